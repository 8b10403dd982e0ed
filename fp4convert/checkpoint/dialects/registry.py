"""The dialects by name, and the marks of their tensors and records.

A dialect's module is loaded when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from fp4convert.errors import InputError, did_you_mean
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.options import one_of

if TYPE_CHECKING:
    from fp4convert.checkpoint.dialects.base import Clues, Dialect
    from fp4convert.checkpoint.dialects.forms import Group
    from fp4convert.storage.safetensors import TensorRef

DIALECTS = (  # in the order in which an artifact is asked whether it is one of them
    "compressed-tensors",
    "modelopt",
    "quark",
    "gpt-oss",
    "deepseek",
    "mlx",
    "comfy",
    "nunchaku",
    "gguf",
    "plain",
)
READ_ONLY = ("mistral",)  # read, and never written
ALWAYS_FOUR = ("nunchaku",)  # with low-rank corrections; engines quantize activations, too
METHODS = {  # quant_method in the record of an engine
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "quark": "quark",
    "gpt-oss": "mxfp4",
    "deepseek": "fp8",
    "nunchaku": "nunchaku_lite",
}
MISTRAL_KEY = "qformat_weight"  # of "quantization" in params.json
MLX_KEYS = ("quantization", "quantization_config")  # of config.json; mlx-lm reads the first
COMFY_MARK = ".comfy_quant"  # ends the tensor that names a module's format for ComfyUI
OLD_MARK = "scaled_fp8"  # of a file or a part whose FP8 scales have ComfyUI's names of 2024
COMFY_SIGNS = (COMFY_MARK, ".weight_scale", ".weight_scale_2", ".scale_weight")
SUFFIXES = {  # endings of a quantized module's tensors, which no unquantized checkpoint has
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
    "modelopt": (".weight_scale", ".weight_scale_2"),
    "quark": (".weight_scale", ".weight_scale_2"),
    "gpt-oss": ("_blocks", "_scales"),
    "mlx": (".scales",),
    "comfy": (COMFY_MARK, ".weight_scale_2"),
    "nunchaku": (".wscales", ".wtscale"),
    "plain": (".block_scale", ".global_scale"),
    # deepseek: ".scale" ends names of ordinary norms too; gguf: M.weight has a type of its own
}
GGUF_TYPES = ("MXFP4", "NVFP4")  # of tensors in a GGUF file
_PACKED_DTYPES = ("U8", "I8", "I32", "U32")
_PACKED_ENDINGS = (".weight", "_blocks", "_scales", ".qweight", ".qzeros")  # last of GPTQ and AWQ
_FP8_ENDING = ".weight_scale_inv"  # DeepSeek's
_TELLING_ENDINGS = (
    *(ending for endings in SUFFIXES.values() for ending in endings if ending.startswith(".")),
    _FP8_ENDING,
)
_TELLING_ENDINGS_OF_FLOATS = tuple(
    ending for ending in _TELLING_ENDINGS if ending.startswith(".weight_")
)


@cache
def dialect_named(name: str) -> Dialect:
    """Return the dialect of that name; InputError names the known ones."""
    if name not in (*DIALECTS, *READ_ONLY):
        from fp4convert.engines.files import find_engine

        if engine := find_engine(name):
            read = [dialect for dialect in DIALECTS if dialect in engine.dialects]
            detail = f"{name!r} is an engine; expected a dialect, of which {engine.name} reads"
            preset = next(preset for preset in engine.presets if not preset.models)
            step = f"{engine.name} is an engine: --for {engine.key}, or --dialect {preset.dialect}."
            raise InputError("unknown-dialect", f"{detail} {one_of(read)}", step)
        detail = f"dialect {name!r} is not known; expected one of {', '.join(DIALECTS)}"
        detail += did_you_mean(name, DIALECTS)
        raise InputError("unknown-dialect", detail)
    module = import_module(f"fp4convert.checkpoint.dialects.{name.replace('-', '_')}")
    return cast("Dialect", module)


def recognise(clues: Clues) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """Yield the dialects of a folder, with the forms that it declares.

    Records and names of tensors suggest dialects; each then decides for itself.
    """
    record, tensors = clues.record, clues.tensors
    suspects = {name for name, method in METHODS.items() if method == record.get("quant_method")}
    if clues.hf_quant_config and not record:
        suspects.add("modelopt")
    if "quantization" in clues.config or "mode" in record:
        suspects.add("mlx")
    signs = COMFY_SIGNS if clues.is_bare else (COMFY_MARK,)
    if clues.notes or any(name.endswith(signs) for name in tensors):
        suspects.add("comfy")
    if any(ref.dtype in GGUF_TYPES for ref in tensors.values()):
        suspects.add("gguf")
    if MISTRAL_KEY in record:
        suspects.add("mistral")
    for name in (*DIALECTS, *READ_ONLY):
        if name in suspects and (groups := dialect_named(name).recognise(clues)):
            yield name, groups


def is_mark(ref: TensorRef) -> bool:
    """Return whether a tensor only says for ComfyUI how others are stored."""
    return ref.name.endswith(COMFY_MARK) or ref.name.rpartition(".")[2] == OLD_MARK


def is_quantized_tensor(ref: TensorRef) -> bool:
    """Return whether only quantized checkpoints have such a tensor."""
    is_matrix = ref.name.endswith(_PACKED_ENDINGS) and len(ref.shape) > 1
    is_float = ref.dtype in FLOAT_TYPES
    return (
        ref.dtype in GGUF_TYPES
        or (is_matrix and ref.dtype in _PACKED_DTYPES)
        or ref.name.endswith(_TELLING_ENDINGS_OF_FLOATS if is_float else _TELLING_ENDINGS)
    )
