"""The dialects by name, and what tells their tensors from ordinary ones.

This module loads a dialect's own module only when that dialect is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES

if TYPE_CHECKING:
    from fp4convert.checkpoint.dialects.base import Dialect
    from fp4convert.storage.safetensors import TensorRef

DIALECTS = (  # in the order in which an artifact is asked whether it is one of them
    "compressed-tensors",
    "modelopt",
    "quark",
    "gpt-oss",
    "deepseek",
    "mlx",
    "comfy",
    "gguf",
    "plain",
)
_PACKED_DTYPES = ("U8", "I8", "I32", "U32")
_PACKED_ENDINGS = (
    ".weight",
    "_blocks",
    "_scales",
    ".qweight",
    ".qzeros",
)  # the last two of GPTQ and AWQ
_FP8_ENDING = ".weight_scale_inv"  # DeepSeek's
_GGUF_TYPES = ("MXFP4", "NVFP4")


@cache
def dialect_named(name: str) -> Dialect:
    """Return the dialect of that name; InputError names the known ones."""
    if name not in DIALECTS:
        detail = f"dialect {name!r} is not known; expected one of {', '.join(DIALECTS)}"
        raise InputError("unknown-dialect", detail)
    module = import_module(f"fp4convert.checkpoint.dialects.{name.replace('-', '_')}")
    return cast("Dialect", module)


def is_quantized_tensor(ref: TensorRef) -> bool:
    """True for a tensor that only an already quantized checkpoint has, in any dialect."""
    is_matrix = ref.name.endswith(_PACKED_ENDINGS) and len(ref.shape) > 1
    is_packed = is_matrix and ref.dtype in _PACKED_DTYPES
    return (
        ref.dtype in _GGUF_TYPES
        or is_packed
        or ref.name.endswith(_telling_endings(ref.dtype in FLOAT_TYPES))
    )


@cache
def _telling_endings(is_float: bool) -> tuple[str, ...]:
    """Endings of names that only quantized checkpoints have, for tensors of floats or of anything else."""
    endings = {
        ending
        for known in DIALECTS
        for ending in dialect_named(known).TRAITS.suffixes
        if ending.startswith(".")
    }
    return (
        *(ending for ending in endings if not is_float or ending.startswith(".weight_")),
        _FP8_ENDING,
    )
