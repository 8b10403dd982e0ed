"""Read an importance matrix of llama.cpp as the mean squares of inputs.

  GGUF   general.type "imatrix"; M.in_sum2 F32 [matrices, columns], sums of x^2, and
         M.counts F32 [matrices, 1], the tokens of each
  .dat   number of entries; of each its name M, calls, values and so many F32: mean x^2 times calls;
         all numbers I32, little-endian

M is llama.cpp's name of a weight; a stack has a row for each expert. Modules of safetensors are
found by llama.cpp's own table of names; where its converter reorders columns (heads of a state
space) a module has none. An expert without a token has the mean of its stack.
Source: llama.cpp, tools/imatrix/imatrix.cpp (save_imatrix, save_imatrix_legacy).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.gguf import STACK
from fp4convert.errors import InputError
from fp4convert.numerics.codec import Float32s
from fp4convert.storage.disk import hash_file, open_regular
from fp4convert.storage.gguf import (
    EXPERT_NUMBER,
    LONGEST_NAME,
    GgufFrame,
    gguf_package,
    read_gguf_header,
)
from fp4convert.storage.safetensors import WEIGHT, TensorRef

KIND = "imatrix"
SQUARES, SUMS, COUNTS = ".input_sq_mean", ".in_sum2", ".counts"
REORDERED = "blk.{bid}.ssm_out"  # columns, for some families
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
NEXT = "Make it again: llama-imatrix -m MODEL.gguf -f TEXT -o imatrix.gguf."


class Imatrix(Calibration):
    """An importance matrix: mean squares of inputs alone."""

    __slots__ = ()

    @property
    def usual(self) -> str:
        return SQUARES[1:]

    def holder(self, module: str) -> str:
        """Return llama.cpp's name of a module, with the number of an expert."""
        if module + SQUARES in self.refs:
            return module
        expert = EXPERT_NUMBER.search(module)
        name = EXPERT_NUMBER.sub("", module).replace("language_model.", "")
        layer = LAYER.search(name)
        for template in _names().get(LAYER.sub("{bid}", name, count=1), ()):
            stem = template.replace("{bid}", layer[0] if layer else "")
            stem += f".{expert[1]}" if expert else ""
            if template != REORDERED and stem + SQUARES in self.refs:
                return stem
        return module

    def _read(self, ref: TensorRef) -> NDArray[np.generic]:
        name = ref.name.removesuffix(SQUARES)
        sums, counts = self._stored(ref), self._stored(self.refs[name + COUNTS])
        stack = self.refs.get(name.rpartition(".")[0] + SUMS)
        if stack and not counts.any():
            sums = self._stored(stack).sum(0)
            counts = self._stored(self.refs[stack.name.removesuffix(SUMS) + COUNTS])
        if not (counts.any() and np.isfinite(counts).all()):
            raise self.refusal(ref, "counts no tokens, or no finite number of them")
        mean: Float32s = (sums / counts.sum()).astype(np.float32)
        return mean

    def refusal(self, ref: TensorRef, why: str) -> InputError:
        return InputError("calibration-values", f"{self.path}: {ref.name} {why}", NEXT, ref.name)

    def _stored(self, ref: TensorRef) -> NDArray[np.float64]:
        """Read numbers as they are stored, as float64."""
        values = np.fromfile(self.path, f"<{ref.dtype[0]}4".lower(), ref.elements, offset=ref.start)
        if values.size != ref.elements:
            raise self.refusal(ref, "is gone: the file became shorter while it was read")
        return values.reshape(ref.shape).astype(np.float64)


@cache
def _names() -> dict[str, list[str]]:
    """Return llama.cpp's names of modules by those of other packages."""
    gguf, found = gguf_package(), dict[str, list[str]]()
    table = gguf.TensorNameMap
    for tensor, aliases in (table.mappings_cfg | table.block_mappings_cfg).items():
        for alias in aliases:
            found.setdefault(alias, []).append(gguf.TENSOR_NAMES[tensor])
    return found


def open_imatrix(path: Path) -> Imatrix:
    """Open an importance matrix of either kind.

    Raises  InputError where it is something else, or damaged
    """
    with open_regular(path) as stream:
        find = _parts_of_gguf if stream.read(4) == b"GGUF" else _parts_of_dat
    try:
        refs = {ref.name: ref for ref in find(path)}
    except (struct.error, ValueError) as error:
        detail = f"{path}: no sound importance matrix of llama.cpp: {error}"
        raise InputError("calibration-file", detail, NEXT) from None
    notes = {"format": KIND, "gram": "diag", "samples": "0", "tokens": "0", "text": KIND}
    return Imatrix(path, hash_file(path), notes, {}, refs)


def _parts_of_gguf(path: Path) -> Iterator[TensorRef]:
    header = read_gguf_header(path)
    tensors = {ref.name: ref for ref in header.tensors}
    if cast(GgufFrame, header.frame).facts.get("general.type") != KIND:
        raise ValueError(f"its general.type is not {KIND!r}")
    for name, sums in tensors.items():
        if name.endswith(SUMS):
            counts = tensors.get(name.removesuffix(SUMS) + COUNTS)
            if counts is None or {sums.dtype, counts.dtype} != {"F32"}:
                raise ValueError(f"{name} has no counts in F32 beside it")
            yield from _rows(name.removesuffix(SUMS).removesuffix(WEIGHT), sums, counts)


def _rows(stem: str, sums: TensorRef, counts: TensorRef) -> Iterator[TensorRef]:
    """Yield the statistics of a matrix, or of each in a stack."""
    columns = sums.shape[-1]
    matrices = sums.elements // max(1, columns)
    if not matrices or counts.elements not in (1, matrices):
        raise ValueError(f"{stem} has {matrices} rows and {counts.elements} counts")
    is_stack = STACK.fullmatch(stem) or matrices > 1  # of heads, too: no module has such a name
    yield sums._replace(name=stem + SUMS, shape=(matrices, columns))
    yield counts._replace(name=stem + COUNTS)
    for row in range(matrices):
        one = f"{stem}.{row}" if is_stack else stem
        at = sums.start + row * columns * 4, counts.start + row % counts.elements * 4
        yield sums._replace(name=one + SQUARES, shape=(columns,), start=at[0])
        yield counts._replace(name=one + COUNTS, shape=(), start=at[1])


def _parts_of_dat(path: Path) -> Iterator[TensorRef]:
    entries: dict[str, tuple[int, int]] = {}  # where its calls are, and the number of its values
    with open_regular(path) as stream:

        def number() -> int:
            return int(struct.unpack("<i", stream.read(4))[0])

        for _ in range(number()):
            if not 0 < (length := number()) <= LONGEST_NAME:
                raise ValueError(f"a name of {length} bytes")
            name = stream.read(length).decode("utf-8")
            calls, _, values = stream.tell(), number(), number()
            if name.removesuffix(WEIGHT) in entries:
                raise ValueError(f"{name} is there twice")
            entries[name.removesuffix(WEIGHT)] = calls, values
            if values <= 0 or stream.seek(4 * values, 1) > path.stat().st_size:
                raise ValueError(f"{name} has {values} values, past the end of the file")
    for stem, (calls, values) in entries.items():
        matrices = _experts(stem, {name: count for name, (_, count) in entries.items()})
        if not matrices or values % matrices:
            raise ValueError(f"{stem} stacks experts whose number no router beside it tells")
        sums = TensorRef(stem, "F32", (matrices, values // matrices), path.name, calls + 8)
        yield from _rows(stem, sums, TensorRef(stem, "I32", (1,), path.name, calls))


def _experts(stem: str, values: dict[str, int]) -> int:
    """Count the matrices of an entry by its router's input; 0 if unknown."""
    if not STACK.fullmatch(stem):
        return 1
    block = stem.rpartition(".")[0]
    width = values.get(f"{block}.ffn_gate_inp", 0)
    reading = (values.get(f"{block}.ffn_{part}_exps") for part in ("gate", "up", "gate_up"))
    wide = next((count for count in reading if count), 0)
    return wide // width if width else 0
