"""Find the place of each module in the frame of a GGUF file.

The donor is an unquantized GGUF file of the same model; llama.cpp's own map gives the names. Every
module is compared with the tensor whose place it takes, so that another model, or an unknown order
of rows, ends in an error and not in an artifact. Known orders are the model's own, and that of
llama.cpp's Llama, in which the two halves of every head of q and k take turns
(convert_hf_to_gguf.py, LlamaModel.permute). Rows move whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.stacks import (
    MATRIX_DIMENSIONS,
    STACK_DIMENSIONS,
    Rows,
    Slot,
    StridedRows,
    places_of,
)
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.fp4 import find_fp4
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, as_floats
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import Weights
from fp4convert.planning.repack_plan import Stored
from fp4convert.storage.gguf import EXPERT_NUMBER, GgufFrame, block_names
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

COMPARED_ROWS = 24  # of every module, and the last
KEPT_LIMIT = 1e-3  # of the power of what is not quantized; a cast to fp16 or bf16 leaves far less
PLACELESS = "the GGUF file has no place for it"
NMSE_LIMIT = 0.1  # four-bit weights are about 0.01 from their own, and about 2 from any others
OTHER_WEIGHTS = (
    "Give a GGUF file of the same model: --template FILE.gguf. Where factors were folded into"
    " weights and norms (awq), none fits: quantize the GGUF file itself."
)


def place_modules(
    artifact: Artifact, others: Mapping[str, Linear], donor: Source
) -> dict[str, Stored]:
    """Find the tensor of the donor whose place each module takes.

    others   modules of eight bits and of int4
    Returns  the matrix or stack of each stem
    Raises   InputError where the donor is no unquantized GGUF file of the same model
    """
    frames = [shard.frame for shard in donor.checkpoint.shards]
    if len(frames) != 1 or not isinstance(frames[0], GgufFrame):
        raise InputError(
            "template",
            f"{donor.name}: --template needs one GGUF file",
            "Give it: --template FILE.gguf.",
        )
    tensors = {ref.name: ref for ref in donor.checkpoint.tensors}
    linears = {**find_fp4(artifact), **others}
    names = block_names(frames[0], linears)
    placed = {}
    experts: dict[str, dict[int, str]] = defaultdict(dict)
    for module, linear in linears.items():
        stem = names.get(module)
        ref = tensors.get(f"{stem}.weight")
        number = _expert_number(module)
        if stem and number is not None and ref and len(ref.shape) == STACK_DIMENSIONS:
            experts[stem][number] = module
            continue
        if stem is None or ref is None:
            detail = (
                f"{module}: the GGUF file has no tensor for it; expected"
                f" {stem or 'one that llama.cpp knows'}"
            )
            raise InputError(
                "template-name",
                detail,
                "Give a GGUF file of the same model: --template FILE.gguf.",
                module,
            )
        if ref.dtype not in FLOAT_TYPES or ref.shape != linear.shape:
            detail = (
                f"{module}: expected floats of {list(linear.shape)} at {ref.name}, found"
                f" {ref.dtype} {list(ref.shape)}"
            )
            raise InputError(
                "template-differs",
                detail,
                "Give an unquantized GGUF file: --template FILE.gguf.",
                module,
            )
        if stem in placed:
            detail = f"{module}: another module takes the place of {stem} too"
            raise InputError("template-name", detail, "Leave one out.", module)
        weights = linear.coding.weights(linear, artifact.source)
        placed[stem] = Stored(linear.shape, _find_order(weights, module, donor, ref), ref)
    for stem, numbers in experts.items():
        members = {number: linears[module] for number, module in numbers.items()}
        placed[stem] = _place_experts(artifact, members, donor, tensors[f"{stem}.weight"])
    _compare_kept(artifact, linears, donor, tensors)
    return placed


def _expert_number(module: str) -> int | None:
    """Return the number of the expert in a module's name; None without one."""
    found = EXPERT_NUMBER.search(module)
    return int(found[1]) if found else None


def _place_experts(
    artifact: Artifact, members: Mapping[int, Linear], donor: Source, ref: TensorRef
) -> Stored:
    """Find the order of experts' rows in the donor's stack.

    Raises  InputError where it is no stack of floats of their number and shape, or where the
            experts have several formats
    """
    shapes = {linear.shape for linear in members.values()}
    experts, *matrix = ref.shape
    is_whole = sorted(members) == list(range(experts)) and shapes == {tuple(matrix)}
    words = sorted({linear.coding.word for linear in members.values()})
    if len(words) > 1:
        detail = f"experts are {' and '.join(words)}, and {ref.name} has one type for all of them"
        step = "Quantize the GGUF file itself: fp4convert quantize FILE.gguf --dialect gguf."
        raise InputError("template-differs", detail, step, ref.name)
    if ref.dtype not in FLOAT_TYPES or not is_whole:
        found = f"{ref.dtype} {list(ref.shape)} at {ref.name}"
        detail = f"{len(members)} experts of {' and '.join(str(list(each)) for each in shapes)}"
        detail = (
            f"{detail}, the first {next(iter(members.values())).module}, have no place in {found}"
        )
        raise InputError(
            "template-differs",
            f"{detail}; expected floats of their shape, and every expert",
            "Give an unquantized GGUF file of the same model: --template FILE.gguf.",
            ref.name,
        )
    slots: list[Slot] = []
    for number in range(experts):
        start = ref.start + number * (ref.nbytes // experts)
        part = ref._replace(name=f"{ref.name}[{number}]", shape=tuple(matrix), start=start)
        weights = members[number].coding.weights(members[number], artifact.source)
        slots += _find_order(weights, members[number].module, donor, part)
    return Stored(ref.shape, tuple(slots), ref)


def _compare_kept(
    artifact: Artifact,
    linears: Mapping[str, Linear],
    donor: Source,
    tensors: Mapping[str, TensorRef],
) -> None:
    """Raise InputError where tensors that stay differ in the donor.

    The donor's embeddings and other matrices, norms and biases are kept.
    """
    packed = {ref.name for linear in linears.values() for ref in linear.refs}
    kept = {
        ref.name: ref
        for ref in artifact.tensors.values()
        if ref.name not in packed
        and ref.dtype in FLOAT_TYPES
        and ref.name.endswith((WEIGHT, ".bias"))
        and 1 <= len(ref.shape) <= MATRIX_DIMENSIONS
    }
    frame = donor.checkpoint.shards[0].frame
    modules = dict.fromkeys(name.rpartition(".")[0] for name in kept)
    names = block_names(frame, modules) if isinstance(frame, GgufFrame) else {}
    for name, own in kept.items():
        module, _, leaf = name.rpartition(".")
        ref = tensors.get(f"{names.get(module)}.{leaf}")
        if ref is None or ref.shape != own.shape or ref.dtype not in FLOAT_TYPES:
            continue
        rows = _compared_rows(own.shape[0]) if len(own.shape) > 1 else [*range(own.shape[0])]
        ours, theirs = (
            _floats(source, each, rows) for source, each in ((artifact.source, own), (donor, ref))
        )
        theirs = theirs if len(own.shape) > 1 else np.sort(theirs)
        limit = KEPT_LIMIT * float((theirs**2).sum())
        forms = _known_forms(ours, len(own.shape))
        if all(float(((form - theirs) ** 2).sum()) > limit for form in forms):
            detail = f"{name} of the artifact is not what the GGUF file holds at {ref.name}"
            raise InputError(
                "template-differs", f"{detail}, which would be kept", OTHER_WEIGHTS, name
            )


def _known_forms(values: NDArray[np.float64], dimensions: int) -> Iterator[NDArray[np.float64]]:
    """Yield the forms that llama.cpp's converter may give kept values.

    Vectors may get 1 more, as Gemma's norms (convert_hf_to_gguf.py), and be in any order, because
    biases move with the rows of their matrix.
    """
    if dimensions > 1:
        yield values
    else:
        yield from (np.sort(values), np.sort(values) + 1)


def name_replaced(
    artifact: Artifact, others: Mapping[str, Linear], donor: Source
) -> dict[str, str]:
    """Describe the fate of the artifact's tensors that are not quantized.

    Returns  by name: the donor's tensor that is kept instead, or that it has none
    """
    taken = {ref.name for packed in artifact.modules.values() for ref in packed.refs}
    taken |= {ref.name for linear in others.values() for ref in linear.refs}
    kept = [name for name in artifact.tensors if name not in taken]
    frame, there = donor.checkpoint.shards[0].frame, {ref.name for ref in donor.checkpoint.tensors}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in kept)
    names = block_names(frame, modules) if isinstance(frame, GgufFrame) else {}
    found = {}
    for name in kept:
        module, _, leaf = name.rpartition(".")
        own = f"{names.get(module)}.{leaf}"
        found[name] = f"the GGUF file's own {own} is kept" if own in there else PLACELESS
    return found


def _compared_rows(rows: int) -> list[int]:
    return sorted(
        {round(number * (rows - 1) / COMPARED_ROWS) for number in range(COMPARED_ROWS + 1)}
    )


def _floats(source: Source, ref: TensorRef, rows: list[int]) -> NDArray[np.float64]:
    """Read some rows of a matrix of floats."""
    width = ref.nbytes // ref.shape[0]
    data = b"".join(source.read_range(ref, row * width, (row + 1) * width) for row in rows)
    return np.frombuffer(data, FLOAT_DTYPES[ref.dtype]).astype(np.float64)


def _find_order(weights: Weights, module: str, donor: Source, ref: TensorRef) -> tuple[Slot, ...]:
    """Find the order of a module's rows in the donor.

    Raises  InputError where it is no known order
    """
    least = np.inf
    for slots in _known_orders(module, weights.shape[0], donor):
        error = _nmse(weights, places_of(slots)[module], donor, ref)
        if error < NMSE_LIMIT:
            return slots
        least = min(least, error)
    detail = (
        f"{module} is not what the GGUF file holds at {ref.name}, in no order of rows that is known"
    )
    how = f"; the least error is {least:.2f} of the weights' own power, expected under {NMSE_LIMIT}"
    raise InputError("template-differs", detail + how, OTHER_WEIGHTS, module)


def _known_orders(module: str, rows: int, donor: Source) -> Iterator[tuple[Slot, ...]]:
    """Yield the known orders, the model's own first.

    In the others the halves of each head of q, or of k, take turns.
    """
    yield ((Rows(module, 0, rows),),)
    frame = donor.checkpoint.shards[0].frame
    facts = frame.facts if isinstance(frame, GgufFrame) else {}
    for key in ("head_count", "head_count_kv"):
        heads = facts.get(f"{facts.get('general.architecture')}.attention.{key}")
        if isinstance(heads, int) and heads > 0 and rows % (2 * heads) == 0:
            half = rows // heads // 2
            begins = range(0, rows, 2 * half)
            yield tuple(
                (Rows(module, first, first + half), Rows(module, first + half, first + 2 * half))
                for first in begins
            )


def _nmse(
    weights: Weights, pieces: tuple[StridedRows, ...], donor: Source, ref: TensorRef
) -> float:
    """Measure the error of rows as a share of their power in the donor."""
    rows, columns = weights.shape
    stored = np.frombuffer(donor.read(ref), FLOAT_DTYPES[ref.dtype]).reshape(rows, columns)
    signal = noise = 0.0
    for row in _compared_rows(rows):
        piece = next(piece for piece in pieces if piece.start <= row < piece.start + piece.height)
        x = stored[piece.first + (row - piece.start) * piece.step].astype(np.float64)
        difference = x - as_floats(weights.rows(row, row + 1)).ravel()
        signal += float(x @ x)
        noise += float(difference @ difference)
    return noise / signal if signal else float(noise > 0)
