"""Find codes, and scales beside weights, that nothing here reads.

Tensors that nothing reads are copied. That is right for masks and tables, and garbage for the codes
of a matrix, or its scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from fp4convert.checkpoint.dialects.registry import is_quantized_tensor
from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import GGUF
from fp4convert.storage.safetensors import DTYPE_BITS, WEIGHT, TensorRef

CODE_DTYPES = {dtype for dtype, bits in DTYPE_BITS.items() if bits <= 8} - {"BOOL"}
# Several codes in a word, or the codes of AQLM; integers of 64 bits are indexes.
WORD_DTYPES = {"I16", "U16", "I32", "U32"}
FLAT_DTYPES = {"U8", "I8"}  # of bitsandbytes, under "absmax"
SCALE_WORDS = ("scale", "amax", "absmax")
# Causal masks: "attn.bias" of GPT-2, "attn.masked_bias" of GPT-J, bytes of old checkpoints.
MASK = re.compile(r"(?:^|[._])bias$|mask[^.]*$|(?:ids|idx|index|indices)$")
# Of M.codes or M_packed; a scale M.scale may be of anything in M.
SHARED_SCALE = re.compile(r"(?:_scale|\.(?:weight_|q)scale|[._](?:weight_|q)?scales|[._]absmax)$")
# Limits of Gemma 4's towers (clip.cpp).
GGUF_OTHERS = (".bias", ".input_max", ".input_min", ".output_max", ".output_min")
GGUF_SCALES = (".scale", ".input_scale")  # llama.cpp reads them beside weights of any type
# Smoothing, order of activations, offsets, low-rank parts, scales of a cache in another dialect.
INPUT_FACTORS = ".pre_quant_scale"  # of AWQ: read beside four-bit codes
UNSAID_ENDINGS = (
    *(INPUT_FACTORS, ".weight_g_idx", ".weight_zero_point", ".svdquant_lora_a"),
    *(".svdquant_lora_b", ".output_scale", ".k_zero_point", ".v_zero_point"),
)


class Beside(NamedTuple):
    """A tensor that is named after a weight.

    weight  name of that weight
    ending  of the tensor's name, behind the weight's module
    """

    weight: str
    ending: str
    ref: TensorRef

    @property
    def is_scale(self) -> bool:
        return _is_scale(self.ending)


def _is_scale(ending: str) -> bool:
    return any(word in ending.lower() for word in SCALE_WORDS)


def find_beside(tensors: Mapping[str, TensorRef], weights: Collection[str]) -> Iterator[Beside]:
    """Find the tensors that are named after some weights.

    After M.weight: M.any, M.weight.any, and M.any.weight and M_any where "any" is a scale; after a
    stack X: X.any and X_any.
    """
    stems = {name.removesuffix(WEIGHT): name for name in weights}
    for name, ref in tensors.items() if stems else ():
        start = name.rfind(".", 0, max(name.rfind("."), 0))
        for at in range(len(name) - 1, max(start, 1) - 1, -1):
            if name[at] not in "._" or (weight := stems.get(name[:at])) in (None, name):
                continue
            beside = Beside(weight, name[at:], ref)
            parts = beside.ending.count(".")
            if name[at] == "_":
                is_own = parts == 0 and beside.is_scale
            else:
                is_scale = beside.is_scale and beside.ending.endswith(WEIGHT)
                is_own = parts == 1 or beside.ending.startswith(f"{WEIGHT}.") or is_scale
            if is_own:
                yield beside
                break


def find_unread(
    tensors: Mapping[str, TensorRef], known: Collection[str], is_recorded: bool
) -> list[TensorRef]:
    """Find quantized tensors that no module has taken.

    They are tensors that only quantized checkpoints have, and integers with a scale; under a record
    all codes of 8 bits or fewer in two or more dimensions.

    known        names of the tensors that modules have taken
    is_recorded  a record of an engine says that the checkpoint is quantized
    Returns      the codes before their scales
    """
    left = {name: ref for name, ref in tensors.items() if name not in known}
    coded = {name for name, ref in left.items() if is_coded(ref)}
    coded = set(_find_scaled(tensors, left, coded)) | {
        name
        for name in coded
        if is_recorded and left[name].dtype in CODE_DTYPES and len(left[name].shape) > 1
    }
    found = [ref for name, ref in left.items() if name in coded or is_quantized_tensor(ref)]
    return sorted(found, key=lambda ref: _is_scale(ref.name.rpartition(".")[2]))


def _find_scaled(
    tensors: Mapping[str, TensorRef], left: Mapping[str, TensorRef], coded: Collection[str]
) -> Iterator[str]:
    """Yield the codes that have a scale."""
    scales = [(one.weight, one.ending) for one in find_beside(tensors, coded) if one.is_scale]
    stems = {
        name[: match.start()]: match[0] for name in left if (match := SHARED_SCALE.search(name))
    }
    for name in coded if stems else ():
        ends = [at for at in range(name.rfind("."), len(name)) if at > 0 and name[at] in "._"]
        scales += [(name, stems[name[:at]]) for at in ends if name[:at] in stems]
    for name, ending in scales:
        if len(left[name].shape) > 1 or ending.endswith("absmax"):
            yield name


def is_coded(ref: TensorRef) -> bool:
    """Return whether a tensor may hold the codes of a matrix, or of a stack."""
    is_matrix = ref.dtype in CODE_DTYPES | WORD_DTYPES and len(ref.shape) > 1
    is_flat = ref.dtype in FLAT_DTYPES and len(ref.shape) == 1
    return (is_matrix or is_flat) and not MASK.search(ref.name)


def find_unread_in_gguf(tensors: Mapping[str, TensorRef]) -> list[Beside]:
    """Find tensors beside quantized weights of GGUF that llama.cpp refuses."""
    quantized = [
        name
        for name, ref in tensors.items()
        if ref.dtype not in DTYPE_BITS and name.endswith(WEIGHT)
    ]
    return [one for one in find_beside(tensors, quantized) if not _is_applied(one, tensors)]


def _is_applied(beside: Beside, tensors: Mapping[str, TensorRef]) -> bool:
    """Return whether it is read with its weight, or by llama.cpp."""
    is_read = tensors[beside.weight].dtype == "NVFP4" or beside.ref.file.endswith(GGUF)
    return beside.ending in (GGUF_OTHERS + GGUF_SCALES if is_read else GGUF_OTHERS)


def refuse_unsaid(tensors: Mapping[str, TensorRef], known: Collection[str] = ()) -> None:
    """Raise InputError where a tensor that is not applied changes weights.

    known  names of the tensors that modules have taken
    """
    unsaid = [name for name in tensors if name not in known and name.endswith(UNSAID_ENDINGS)]
    if unsaid:
        detail = f"{len(unsaid)} tensors change what the weights mean, the first {unsaid[0]!r}"
        detail = f"{detail}; fp4convert does not apply them"
        raise InputError("unsaid-tensors", detail, tensor=unsaid[0])
    if unread := find_unread_in_gguf(tensors):
        weight, ending, ref = unread[0]
        scale = weight.removesuffix(WEIGHT) + GGUF_SCALES[0]
        detail = f"{ref.file}: {ref.name!r} is beside {weight!r}, and fp4convert does not apply it"
        detail = f"{detail} ({len(unread)} such tensors); llama.cpp multiplies with {scale!r} alone"
        next_step = "Start from the original weights; or "
        if ending in GGUF_SCALES:
            next_step += "leave --config out, and make a GGUF file."
        else:
            next_step += f"rename it to {scale}, if it multiplies {weight}."
        raise InputError("unsaid-tensors", detail, next_step, ref.name)
