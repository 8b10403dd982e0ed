"""Find and read matrices of floats or GGUF's types, and stacks.

A stack is [experts, out, in], or [experts, in, out]; fused matrices stand below each other, or take
turns row by row (column by column where they are transposed). Whole rows are read in place; others
are gathered panel by panel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS, STACK_DIMENSIONS
from fp4convert.checkpoint.encodings.base import CodingDefaults, Linear
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_matrix
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import FetchedWeights, Matrix, RowReader, StoredRows, Weights
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.checkpoint_files import GGUF
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source

DOUBLE = "F64"  # whose matrices are not read
AS_FLOAT32 = f"{DOUBLE} is not read; save it as float32 first: model.float().save_pretrained(DIR)."
UPLOADED_NBYTES = 4  # for an element, with the columns stepped over
OUTPUT_MEMBERS = ("down_proj", "w2", "output_linear", "fc2", "wo")  # rows: the hidden vector


@dataclass(frozen=True, slots=True)
class Floats(CodingDefaults):
    """Rows first, first + step, ... of a matrix, or of its transpose."""

    word: str
    first: int = 0
    step: int = 1
    is_transposed: bool = False
    is_packed = False
    format = None

    @property
    def is_spread(self) -> bool:
        return self.is_transposed

    def weights(self, linear: Linear, source: Source) -> Weights:
        ref = linear.refs[0]
        if not self.is_transposed:
            return _Rows(source, ref, linear.shape, self.first, self.step)
        read = cache(partial(source.read, ref))  # every panel needs the whole stored matrix

        def fetch(first: int, last: int) -> Matrix:
            begin, end = (self.first + column * self.step for column in (first, last))
            stored = Matrix(read(), ref.dtype, (ref.shape[0], ref.shape[1]))
            return Cpu().transpose(stored, range(begin, end, self.step))

        def stored(first: int, last: int) -> StoredRows:
            nbytes = FLOAT_TYPES[ref.dtype].nbytes
            begin, end = (self.first + column * self.step for column in (first, last))
            begin, skipped = begin - begin % self.step, begin % self.step
            whole = np.frombuffer(read(), f"u{nbytes}").reshape(ref.shape)
            part = whole[:, begin : end - skipped]
            numbers = (*part.shape, skipped, self.step, last - first)
            return StoredRows(f"transpose_{nbytes}", (part, *numbers))

        is_left = self.is_decoded_by_cpu(linear)
        return FetchedWeights(ref.dtype, linear.shape, fetch, None if is_left else stored)

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        if not self.is_transposed:
            return False
        return self.step * FLOAT_TYPES[linear.refs[0].dtype].nbytes > UPLOADED_NBYTES


@dataclass(frozen=True, slots=True)
class _Rows(RowReader):
    """Rows start, start + step, ... of a stored matrix."""

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
        if self.step > 1:
            data = np.ascontiguousarray(self._every_step(first, last)).reshape(-1).data
        else:
            width = self._row_nbytes
            begin, end = ((self.start + row) * width for row in (first, last))
            data = self.source.read_range(self.ref, begin, end)
        return Matrix(data, self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        if self.step > 1:
            own = np.frombuffer(buffer, np.uint8).reshape(last - first, self._row_nbytes)
            own[:] = self._every_step(first, last)
        else:
            self.source.read_into(self.ref, (self.start + first) * self._row_nbytes, buffer)

    def _every_step(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return a view of every step-th stored row, as bytes."""
        begin, end = self.start + first * self.step, self.start + (last - 1) * self.step + 1
        width = self._row_nbytes
        data = self.source.read_range(self.ref, begin * width, end * width)
        return np.frombuffer(data, np.uint8).reshape(end - begin, width)[:: self.step]


def as_row(ref: TensorRef) -> Linear:
    """Return a vector of floats as a matrix of one row."""
    return Linear(ref.name, (1, ref.elements), FLOATS[ref.dtype], (ref,))


def advise_on_types(refs: Iterable[TensorRef], otherwise: str) -> str:
    """Return the next step where no linear layer is found.

    otherwise  that of sources without matrices of F64
    """
    is_double = any(ref.dtype == DOUBLE and len(ref.shape) >= MATRIX_DIMENSIONS for ref in refs)
    return AS_FLOAT32 if is_double else otherwise


def measured_whole(linears: Sequence[Linear], source: Source) -> Iterator[Weights]:
    """Yield weights with the values of all these layers, in any order.

    Layers that fill a whole tensor are read in one piece.
    """
    sharing: dict[TensorRef, list[Linear]] = defaultdict(list)
    for linear in linears:
        sharing[linear.refs[0]].append(linear)
    for ref, own in sharing.items():
        is_changed = any(one.coding.is_packed or one.coding.change for one in own)
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

    hidden  hidden sizes of config.json, which tell when a rule has the order of a stack wrong
    """
    found: dict[str, Linear] = {}
    stacked: dict[str, Linear] = {}
    for ref in tensors.values():
        if ref.dtype not in FLOAT_TYPES:
            continue
        if len(ref.shape) == MATRIX_DIMENSIONS and ref.name.endswith(WEIGHT):
            module = ref.name.removesuffix(WEIGHT)
            shape: Any = ref.shape  # no copy for each of 100,000 modules
            found[module] = Linear(module, shape, FLOATS[ref.dtype], (ref,))
        elif len(ref.shape) in (MATRIX_DIMENSIONS, STACK_DIMENSIONS) and (
            rule := rule_for(ref.name, ref.shape)
        ):
            stack = _view_stack(ref, rule, hidden)
            for linear in _split_stack(ref, stack, rule):
                stacked[linear.module] = linear
    for module in stacked.keys() & found.keys():
        stack, alone = stacked[module].home, found[module].home
        detail = (
            f"{stack.file}: {stack.name} holds {module}, which {alone.name} in {alone.file} is"
            " too; expected one of them"
        )
        raise InputError("tensor-twice", detail, "Remove the one that does not belong.", alone.name)
    found |= stacked
    return found


def _view_stack(ref: TensorRef, rule: StackRule, hidden: Collection[int]) -> TensorRef:
    """Return a stack as (experts, ...); it may be stored as one matrix.

    Raises InputError where experts would not fit the model's hidden size, as where two producers of
    one family store stacks in different orders.
    """
    stack = ref
    if len(ref.shape) == MATRIX_DIMENSIONS:  # all experts below each other
        rows, columns = ref.shape
        if not rule.experts or rows % rule.experts:
            detail = (
                f"{ref.file}: {ref.name} {list(ref.shape)} holds the matrices of all experts below"
                f" each other; {rule.experts_key} of config.json is {rule.experts}, expected as"
                " many rows of each"
            )
            next_step = f"Download the checkpoint again, or correct {rule.experts_key} in its"
            raise InputError("stack-shape", detail, f"{next_step} config.json.", ref.name)
        stack = ref._replace(shape=(rule.experts, rows // rule.experts, columns))
    _, outer, inner = stack.shape
    rows, columns = (inner, outer) if rule.is_transposed else (outer, inner)
    is_output = rule.members[-1] in OUTPUT_MEMBERS
    found, other = (rows, columns) if is_output else (columns, rows)
    if hidden and found not in hidden and other in hidden:
        order = "out_in" if rule.is_transposed else "in_out"
        detail = (
            f"{stack.file}: {stack.name} {list(stack.shape)} would be read as experts of {rows}"
            f" rows and {columns} columns, which do not fit the hidden size of config.json"
            f" ({', '.join(map(str, sorted(hidden)))})"
        )
        next_step = f"Say how they are stored: --stack-order {order}."
        raise InputError("stack-shape", detail, next_step, stack.name)
    return stack


def _split_stack(stored: TensorRef, stack: TensorRef, rule: StackRule) -> Iterator[Linear]:
    """Yield the matrices of every expert in a stack."""
    experts, outer, inner = stack.shape
    members, kind = len(rule.members), FLOATS[stack.dtype]
    if (inner if rule.is_transposed else outer) % members:
        detail = (
            f"{stack.file}: {stack.name} {list(stack.shape)} holds {members} matrices for each"
            " expert, of equally many rows"
        )
        next_step = "Say how they are stored: --stack-order, --stack-rows."
        raise InputError("stack-shape", detail, next_step, stack.name)
    shape = (inner // members, outer) if rule.is_transposed else (outer // members, inner)
    element_nbytes = FLOAT_TYPES[stack.dtype].nbytes
    for expert in range(experts):
        start = stack.start + expert * outer * inner * element_nbytes
        name = f"{stack.name}[{expert}]"
        matrix = stack._replace(name=name, shape=(outer, inner), start=start)
        for number, member in enumerate(rule.members):
            module = rule.module(stack.name, expert, member)
            if rule.is_transposed or rule.is_interleaved:
                first, step = (number, members) if rule.is_interleaved else (number * shape[0], 1)
                coding = Floats(kind.word, first, step, rule.is_transposed)
                yield Linear(module, shape, coding, (matrix,), stack=stored, share=members)
            else:
                begin = start + number * shape[0] * shape[1] * element_nbytes
                part = matrix._replace(shape=shape, start=begin)
                yield Linear(module, shape, kind, (part,), stack=stored)


@dataclass(frozen=True, slots=True)
class GgufBlocks(CodingDefaults):
    """Whole rows of blocks of a type of llama.cpp: Q8_0, Q4_K and others.

    is_at_home  it lies in a GGUF file, and can stay there
    """

    dtype: str
    is_at_home: bool
    is_packed = True
    is_gguf_type = True
    format = None

    @property
    def word(self) -> str:
        return self.dtype.lower()

    def is_decoded_by_cpu(self, linear: Linear) -> bool:
        return True

    def weights(self, linear: Linear, source: Source) -> Weights:
        from fp4convert.storage.gguf import decode

        ref = linear.refs[0]
        width = ref.nbytes // linear.shape[0]

        def fetch(first: int, last: int) -> Matrix:
            stored = source.read_range(ref, first * width, last * width)
            values = decode(stored, self.dtype).reshape(last - first, linear.shape[1])
            return as_matrix(np.ascontiguousarray(values))

        return FetchedWeights("F32", linear.shape, fetch)


def find_gguf_blocks(
    tensors: Mapping[str, TensorRef], rule_for: Callable[[str, tuple[int, ...]], StackRule | None]
) -> dict[str, Linear]:
    """Find matrices of llama.cpp's types, and those of stacks with a rule.

    llama.cpp stores one matrix for each expert.
    """
    from fp4convert.storage.gguf import BLOCK_TYPES, shape_in_weights

    found: dict[str, Linear] = {}
    for ref in tensors.values():
        if ref.dtype not in BLOCK_TYPES or not ref.name.endswith(WEIGHT):
            continue
        shape = shape_in_weights(ref.dtype, ref.shape)
        coding = GgufBlocks(ref.dtype, ref.file.endswith(GGUF))
        if len(shape) == MATRIX_DIMENSIONS:
            module = ref.name.removesuffix(WEIGHT)
            found[module] = Linear(module, (shape[0], shape[1]), coding, (ref,))
        elif len(shape) == STACK_DIMENSIONS and (rule := rule_for(ref.name, shape)):
            experts, rows, columns = shape
            for number in range(experts):
                start = ref.start + number * (ref.nbytes // experts)
                part = ref._replace(name=f"{ref.name}[{number}]", shape=ref.shape[1:], start=start)
                module = rule.module(ref.name, number, rule.members[0])
                found[module] = Linear(module, (rows, columns), coding, (part,), stack=ref)
    return found


FLOATS = {dtype: Floats(kind.word) for dtype, kind in FLOAT_TYPES.items()}
