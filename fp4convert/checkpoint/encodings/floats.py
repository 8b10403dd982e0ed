"""Find and read matrices of BF16, F16 or F32, and stacks of experts.

A stack is [experts, out, in], or [experts, in, out]; fused matrices stand below each other, or take
turns row by row (column by column where they are transposed). What lies in whole rows is read where
it lies; the rest is put into rows panel by panel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import Matrix, RowReader, Weights
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

MATRIX_DIMENSIONS, STACK_DIMENSIONS = 2, 3
OUTPUT_MEMBERS = (
    "down_proj",
    "w2",
    "output_linear",
    "fc2",
    "wo",
)  # their rows are the hidden vector


@dataclass(frozen=True, slots=True)
class Floats(CodingDefaults):
    """Whole rows, one after the other."""

    word: str
    is_packed = False
    format = None

    def weights(self, linear: Linear, source: Source) -> Weights:
        return _Rows(source, linear.refs[0], linear.shape)


@dataclass(frozen=True, slots=True)
class Picked(CodingDefaults):
    """Rows first, first + step, ... of a matrix, or of its transpose."""

    word: str
    first: int
    step: int
    is_transposed: bool
    is_packed = False
    format = None

    @property
    def is_spread(self) -> bool:
        return self.is_transposed

    def weights(self, linear: Linear, source: Source) -> Weights:
        kind = _Columns if self.is_transposed else _Rows
        return kind(source, linear.refs[0], linear.shape, self.first, self.step)


@dataclass(frozen=True, slots=True)
class _Rows(RowReader):
    """Rows start, start + step, ... of a stored matrix, as they lie."""

    source: Source
    ref: TensorRef
    shape: tuple[int, int]
    start: int = 0
    step: int = 1

    @property
    def dtype(self) -> str:
        return self.ref.dtype

    @property
    def _row_nbytes(self) -> int:
        return self.shape[1] * FLOAT_TYPES[self.dtype].nbytes

    def rows(self, first: int, last: int) -> Matrix:
        begin, end = self.start + first * self.step, self.start + (last - 1) * self.step + 1
        width = self._row_nbytes
        data = self.source.read_range(self.ref, begin * width, end * width)
        if self.step > 1:
            stored = np.frombuffer(data, np.uint8).reshape(end - begin, width)
            data = np.ascontiguousarray(stored[:: self.step]).reshape(-1).data
        return Matrix(data, self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        if self.step > 1:
            buffer[:] = self.rows(first, last).data
        else:
            self.source.read_into(self.ref, (self.start + first) * self._row_nbytes, buffer)


@dataclass(frozen=True, slots=True)
class _Columns(RowReader):
    """Every `step`-th column of a matrix, from column `start` on, as rows."""

    source: Source
    ref: TensorRef
    shape: tuple[int, int]
    start: int
    step: int
    _held: list[memoryview] = field(
        default_factory=list, compare=False
    )  # the stored matrix, which every panel needs whole

    @property
    def dtype(self) -> str:
        return self.ref.dtype

    def rows(self, first: int, last: int) -> Matrix:
        if not self._held:
            self._held.append(self.source.read(self.ref))
        stored = Matrix(self._held[0], self.dtype, (self.ref.shape[0], self.ref.shape[1]))
        places = range(
            self.start + first * self.step, self.start + (last - 1) * self.step + 1, self.step
        )
        return Cpu().transpose(stored, places)


def measured_whole(linears: Sequence[Linear], source: Source) -> Iterator[Weights]:
    """Yield weights with the values of all these linear layers.

    In any order: what together is one stored matrix is read as it lies.
    """
    sharing: dict[TensorRef, list[Linear]] = defaultdict(list)
    for linear in linears:
        sharing[linear.refs[0]].append(linear)
    for ref, own in sharing.items():
        is_changed = any(one.coding.is_packed or one.coding.foldings for one in own)
        if len(own) == own[0].share and not is_changed:
            yield _Rows(source, ref, (ref.shape[0], ref.shape[1]))
        else:
            yield from (linear.coding.weights(linear, source) for linear in own)


def find_floats(
    tensors: Mapping[str, TensorRef],
    rule_for: Callable[[str, tuple[int, ...]], StackRule | None],
    hidden: Collection[int] = (),
) -> dict[str, Linear]:
    """Find matrices named ".weight", and those of stacks with a rule.

    hidden  what config.json calls a hidden size, to tell when a rule has the order of a stack wrong
    """
    found: dict[str, Linear] = {}
    stacked: dict[str, Linear] = {}
    for ref in tensors.values():
        if ref.dtype not in FLOAT_TYPES:
            continue
        if len(ref.shape) == MATRIX_DIMENSIONS and ref.name.endswith(WEIGHT):
            module = ref.name.removesuffix(WEIGHT)
            found[module] = Linear(module, (ref.shape[0], ref.shape[1]), _FLOATS[ref.dtype], (ref,))
        elif len(ref.shape) in (MATRIX_DIMENSIONS, STACK_DIMENSIONS) and (
            rule := rule_for(ref.name, ref.shape)
        ):
            stack = _as_stack(ref, rule)
            _check_order(stack, rule, hidden)
            stacked |= {
                linear.module: replace(linear, stack=ref) for linear in _of_stack(stack, rule)
            }
    for module in stacked.keys() & found.keys():
        stack, alone = stacked[module].home, found[module].home
        detail = (
            f"{stack.file}: {stack.name} holds {module}, which {alone.name} in {alone.file} is"
            " too; expected one of them"
        )
        raise InputError("tensor-twice", detail, "Remove the one that does not belong.", alone.name)
    found |= stacked
    return found


def _as_stack(ref: TensorRef, rule: StackRule) -> TensorRef:
    """View a stack as (experts, ...).

    It may be stored as one matrix, all experts below each other.
    """
    if len(ref.shape) == STACK_DIMENSIONS:
        return ref
    rows, columns = ref.shape
    if not rule.experts or rows % rule.experts:
        detail = (
            f"{ref.file}: {ref.name} {list(ref.shape)} holds the matrices of all experts below"
            " each other"
        )
        number = f"{rule.experts_key} of config.json is {rule.experts}"
        next_step = (
            f"Download the checkpoint again, or correct {rule.experts_key} in its config.json."
        )
        raise InputError(
            "stack-shape", f"{detail}; {number}, expected as many rows of each", next_step, ref.name
        )
    return ref._replace(shape=(rule.experts, rows // rule.experts, columns))


def _check_order(ref: TensorRef, rule: StackRule, hidden: Collection[int]) -> None:
    """Raise InputError where a rule has the order of a stack wrong.

    Experts would read, or write, vectors of another size than the model has: two spellings of
    one family.
    """
    _, outer, inner = ref.shape
    rows, columns = (inner, outer) if rule.is_transposed else (outer, inner)
    is_output = rule.members[-1] in OUTPUT_MEMBERS
    found, other = (rows, columns) if is_output else (columns, rows)
    if hidden and found not in hidden and other in hidden:
        order = "out_in" if rule.is_transposed else "in_out"
        detail = (
            f"{ref.file}: {ref.name} {list(ref.shape)} would be read as experts of {rows} rows"
            f" and {columns} columns"
        )
        expected = (
            f"{detail}, which do not fit the hidden size of config.json"
            f" ({', '.join(map(str, sorted(hidden)))})"
        )
        raise InputError(
            "stack-shape", expected, f"Say how they are stored: --stack-order {order}.", ref.name
        )


def _of_stack(ref: TensorRef, rule: StackRule) -> Iterator[Linear]:
    """Yield the matrices of every expert in a stack."""
    experts, outer, inner = ref.shape
    members = len(rule.members)
    if (inner if rule.is_transposed else outer) % members:
        detail = (
            f"{ref.file}: {ref.name} {list(ref.shape)} holds {members} matrices for each expert,"
            " of equally many rows"
        )
        raise InputError(
            "stack-shape", detail, "Say how they are stored: --stack-order, --stack-rows.", ref.name
        )
    for expert in range(experts):
        nbytes = outer * inner * FLOAT_TYPES[ref.dtype].nbytes
        matrix = ref._replace(
            name=f"{ref.name}[{expert}]", shape=(outer, inner), start=ref.start + expert * nbytes
        )
        for number, member in enumerate(rule.members):
            module = rule.module(ref.name, expert, member)
            yield replace(_part_of(matrix, rule, number), module=module)


def _part_of(matrix: TensorRef, rule: StackRule, number: int) -> Linear:
    """Describe one of the fused matrices of an expert, under its name."""
    outer, inner = matrix.shape
    members, kind = len(rule.members), _FLOATS[matrix.dtype]
    rows, columns = (inner // members, outer) if rule.is_transposed else (outer // members, inner)
    if rule.is_transposed or rule.is_interleaved:
        first, step = (number, members) if rule.is_interleaved else (number * rows, 1)
        coding = Picked(kind.word, first, step, rule.is_transposed)
        return Linear(matrix.name, (rows, columns), coding, (matrix,), share=members)
    start = matrix.start + number * rows * columns * FLOAT_TYPES[matrix.dtype].nbytes
    return Linear(
        matrix.name, (rows, columns), kind, (matrix._replace(shape=(rows, columns), start=start),)
    )


_FLOATS = {dtype: Floats(kind.word) for dtype, kind in FLOAT_TYPES.items()}
