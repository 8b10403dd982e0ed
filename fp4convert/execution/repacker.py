"""Turn the steps of dequantize, transcode and copy into bytes.

A worker reads panels of whole rows and writes the parts that a dialect makes of them; memory does
not grow with the tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Dialect, MatrixEncoder
from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES, Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.stacks import Rows, Slot, alternate, places_of, take_rows
from fp4convert.checkpoint.dialects.tables import Part, encode_int4
from fp4convert.checkpoint.encodings.base import (
    Linear,
    check_scales_finite,
    input_scale_of,
    is_fp8,
    room_for,
    scales_not_finite,
)
from fp4convert.checkpoint.encodings.fp8 import E8M0_DTYPES, decode_scales
from fp4convert.errors import NumericError
from fp4convert.execution.carried_blocks import Carrier, refusing_nan
from fp4convert.execution.settings import UnsoundShardError
from fp4convert.execution.task_writer import TaskWriter
from fp4convert.execution.workers import append_parts, copy_steps
from fp4convert.numerics.backends.base import Backend
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, as_floats, check_largest, find_not_finite_values
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import Matrix, row_panels
from fp4convert.planning.steps import Action, Step
from fp4convert.process import processors
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.storage.gguf_types import Q8_0, encode_q8_0
from fp4convert.storage.source import Source


def step_members(step: Step) -> list[tuple[Linear, ...]]:
    """List the linear layers of each slot of a step; their rows take turns."""
    if not step.slots:
        return [step.linears]
    linears = {linear.module: linear for linear in step.linears}
    return [tuple(linears[rows.module] for rows in slot) for slot in step.slots]


class Dequantizer:
    """Writes the values of quantized modules; copies everything else."""

    action: Action = "dequantize"
    made = "dequantized"

    def __init__(self, source: Source, backend: Backend, next_step: str | None = None) -> None:
        self.source = source
        self._backend = backend
        self._next_step = next_step  # for values beyond the dtype; None: what the codec says
        self.device = backend.name
        self.threads = backend.threads

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        for step in steps:
            if not step.linears:
                copy_steps(self.source, [step], writer, stop)
                continue
            name = step.outputs[0].name
            try:
                with closing(self._panels(step)) as panels:
                    if not append_parts(step, ((name, data) for data in panels), writer, stop):
                        return
            except NumericError as error:
                if error.tensor is None:
                    message, better = f"{name}: {error.message}", self._next_step or error.next_step
                    error = NumericError(error.code, message, better, name)
                raise UnsoundShardError([error]) from None

    def _panels(self, step: Step) -> Generator[memoryview]:
        """Decode in the order of the output: rows, or one expert after the other."""
        dtype = step.outputs[0].dtype
        if not step.slots:
            yield from self._values(step.linears[0], dtype)
            return
        linears = {linear.module: linear for linear in step.linears}
        count = len(step.slots) // math.prod(step.shape[:-2])
        for first in range(0, len(step.slots), count):
            slots = step.slots[first : first + count]
            # What shares a tensor with others is read more than once: its rows lie among theirs.
            held = {linears[rows.module] for slot in slots for rows in slot}
            shared = [linear for linear in held if linear.share > 1]
            with room_for(self.source, shared):
                if step.is_transposed or any(len(slot) > 1 for slot in slots):
                    yield self._matrix(step, linears, slots)
                else:
                    for (rows,) in slots:
                        yield from self._values(linears[rows.module], dtype, rows)

    def _matrix(
        self, step: Step, linears: Mapping[str, Linear], slots: Sequence[Slot]
    ) -> memoryview:
        """Decode a matrix, or one expert of a stack, whole.

        Slot lies below slot, and the rows of a slot's members take turns.
        """
        output, (height, columns) = step.outputs[0], step.shape[-2:]
        width = output.nbytes // math.prod(step.shape[:-1])  # of a row: Q8_0 has whole blocks
        matrix = np.empty((height, width), np.uint8)
        for module, pieces in places_of(slots).items():
            for piece in pieces:
                rows = Rows(module, piece.start, piece.start + piece.height)
                values = b"".join(self._values(linears[module], output.dtype, rows))
                places = slice(piece.first, piece.first + piece.height * piece.step, piece.step)
                matrix[places] = np.frombuffer(values, np.uint8).reshape(-1, width)
        data = matrix.reshape(-1).data
        if not step.is_transposed:
            return data
        stored = Matrix(data, output.dtype, (height, columns))
        return Cpu().transpose(stored, range(columns)).data

    def _values(self, linear: Linear, dtype: str, rows: Rows | None = None) -> Iterator[memoryview]:
        """Decode a linear layer, or those rows of it, as that dtype."""
        blocks = linear.coding.blocks(linear)
        if blocks is None:
            yield from values_of(linear, self.source, dtype, rows)
            return
        sound = refusing_nan(blocks, linear.module)
        yield from self._backend.dequantize_panels(take_rows(sound, rows) if rows else sound, dtype)


def values_of(
    linear: Linear, source: Source, dtype: str, rows: Rows | None = None
) -> Iterator[memoryview]:
    """Decode a linear layer as bytes of that dtype, panel by panel.

    rows    that are wanted; None: all
    Raises  NumericError beyond the range of F16, BF16 or Q8_0, or for scales that are not finite
    """
    weights = linear.coding.weights(linear, source)
    begin, end = (rows.first, rows.last) if rows else (0, weights.shape[0])
    for first, last in row_panels((end - begin, weights.shape[1])):
        panel = weights.rows(begin + first, begin + last)
        if panel.dtype == dtype and not linear.coding.is_packed:
            yield panel.data
            continue
        values = as_floats(panel).reshape(-1)
        if linear.coding.is_packed and not np.isfinite(values).all():
            _check_scales(linear, source)
            if np.isinf(values).any():  # of finite scales: no dtype holds it
                limit = f"{FLOAT_TYPES['F32'].largest:g}, the largest of fp32"
                raise scales_not_finite(linear.module, f"it makes values beyond {limit}")
        if panel.dtype == dtype:
            yield panel.data
        elif dtype == Q8_0:
            yield encode_q8_0(values)
        else:
            check_largest(float(np.fmax.reduce(np.abs(values), initial=0)), dtype)
            if dtype == "BF16":
                yield Cpu().to_bf16(values)
            else:
                yield values.astype(FLOAT_DTYPES[dtype]).view(np.uint8).data


def _check_scales(linear: Linear, source: Source) -> None:
    """Raise NumericError where values are not finite because a scale is not."""
    for ref in linear.refs[1:2]:
        if ref.dtype in SCALE_DTYPES or (ref.dtype in E8M0_DTYPES and is_fp8(linear)):
            stored = source.read_range(ref, 0, ref.nbytes)
            check_scales_finite(linear, decode_scales(stored, ref.dtype))


def parts_beside(
    step: Step,
    source: Source,
    panels: Iterator[tuple[memoryview, memoryview]],
    dialect: Dialect,
    input_scale: float | None = None,
) -> Iterator[Part]:
    """Name the bytes of a module of eight bits, or of integers.

    A scale of activations that the source has stays, where the plan has none; without both it is 1.

    panels  codes and scales as they are stored
    """
    form, table = step.form, dialect.TRAITS.fp8
    if form is None or not form.format.is_fp8 or table is None:
        return encode_int4(step.module, step.shape, panels)
    own = input_scale_of(step.linears[0])
    if input_scale is None and own:
        (input_scale,) = decode_scales(source.read(own), own.dtype)
    return table.encode(
        step.module, step.shape, form, panels, 1.0 if input_scale is None else float(input_scale)
    )


class Transcoder:
    """Spells quantized modules in another dialect; copies everything else.

    What the dialect has no form for becomes floats.
    """

    action: Action = "transcode"
    made = "transcoded"
    device = "cpu"

    def __init__(
        self, artifact: Artifact, source: Source, carrier: Carrier, target: Target
    ) -> None:
        self._artifact = artifact
        self.source = source  # of what is copied; modules are the artifact's
        self._carrier = carrier
        self._dialect = dialect_named(str(target.dialect))
        self._dequantizer = Dequantizer(source, Cpu(), "Choose another --keep-dtype.")
        self.threads = processors()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.form is None:
                self._dequantizer([step], writer, stop)
                continue
            form = step.form
            if form.format.is_fp4:
                parts = self._blocks(step, form)
            else:
                panels = step.linears[0].coding.kept(step.linears[0], self.source, form)
                parts = parts_beside(step, self.source, panels, self._dialect)
            if not append_parts(step, parts, writer, stop):
                return

    def _blocks(self, step: Step, form: Form) -> Iterator[Part]:
        """Name the bytes of a matrix, or a stack, of four-bit blocks."""
        # The first slot of each matrix of a stack, or of the one.
        firsts = step.slots[:: len(step.slots) // math.prod(step.shape[:-2])]
        scales = [self._artifact.input_scale(slot[0].module) for slot in firsts]
        encoder = MatrixEncoder(self._dialect, form, scales[0], tuple(scales))
        panels = (
            q
            for slot in step.slots
            for q in alternate(
                [take_rows(self._carrier.blocks(rows.module), rows) for rows in slot]
            )
        )
        return encoder.encode(step.module, step.shape, panels)


def find_not_finite(source: Source, linear: Linear) -> NumericError | None:
    """Count NaN and Inf in a matrix; None where all are finite."""
    found = find_not_finite_values(linear.coding.weights(linear, source))
    if not found:
        return None
    detail = f"{linear.home.file}: {linear.name} has {found}; weights must be finite"
    return NumericError("not-finite", detail, exclude_option(linear.module), linear.name)
