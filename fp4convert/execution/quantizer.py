"""Turn the steps of quantize into bytes.

A worker reads panels of whole rows and writes the parts that a dialect makes of them; memory does not grow with the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.methods.scaled_weights import reach_of
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.base import MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.stacks import InterleavedWeights, alternate
from fp4convert.checkpoint.dialects.tables import Part, encode_int4, encode_scalar
from fp4convert.checkpoint.encodings.base import Linear, room_for
from fp4convert.checkpoint.encodings.floats import measured_whole
from fp4convert.checkpoint.encodings.fp8 import ThroughFp8
from fp4convert.errors import DeviceError, NumericError
from fp4convert.execution.carried_blocks import carry, group_exponent
from fp4convert.execution.folder import TaskWriter
from fp4convert.execution.repacker import (
    append_parts,
    copy_steps,
    find_not_finite,
    step_members,
    values_of,
)
from fp4convert.execution.rounding import Rounding
from fp4convert.execution.settings import UnsoundShardError
from fp4convert.numerics.backends.base import Backend
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, not_finite
from fp4convert.numerics.error_sums import SOURCE, Account, Sums
from fp4convert.numerics.formats import FP8, format_named
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of
from fp4convert.numerics.matrices import Blocks, Compared, Quantized, Weights, row_panels
from fp4convert.planning.steps import Action, Step
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Source

Note = Callable[[Compared, int], None]  # of what so many elements have lost


class Quantizer:
    """Quantizes the members of a scale group under their common amax, or takes over their blocks; copies what stays."""

    action: Action = "quantize"
    made = "quantized"

    def __init__(
        self,
        source: Source,
        target: Target,
        backend: Backend,
        calibration: Calibration | None = None,
    ) -> None:
        self.source = source
        self._target = target
        self._dialect = dialect_named(str(target.dialect))
        self._rounding = Rounding(target, backend, calibration)
        self.device = backend.name
        self.threads = self._rounding.threads

    def working(self) -> AbstractContextManager[None]:
        """Meanwhile any number of threads may call it."""
        return self._rounding.working()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        first = steps[0]
        if first.scalar is not None and not first.linears:
            return writer.append(first.outputs[0], encode_scalar(first.scalar))
        if not first.linears:
            return copy_steps(self.source, steps, writer, stop)
        try:
            if first.form is None:
                self._write_floats(steps, writer, stop)
            elif first.form.format.is_fp4:
                self._write_blocks(steps, first.form, writer, stop)
            else:
                self._write_beside(first, first.form, writer, stop)
        except NumericError as error:
            raise UnsoundShardError(self._explain(first, error)) from None

    def _write_blocks(
        self, steps: list[Step], form: Form, writer: TaskWriter, stop: threading.Event
    ) -> None:
        """The members of a scale group as blocks of four bits."""
        with closing(self._panels(steps)) as panels:
            for number, own in groupby(panels, key=itemgetter(0)):
                step = steps[number]
                encoder = MatrixEncoder(self._dialect, form, self._input_scale(step))
                noted = _noted(own, step, writer, self._begin_account(step, writer))
                if not append_parts(
                    step, encoder.encode(step.module, step.shape, noted), writer, stop
                ):
                    return

    def _begin_account(self, step: Step, writer: TaskWriter) -> Note:
        """Takes what further rows of the step have lost; of what is not rounded nothing is known but that."""
        if step.action != "quantize":
            writer.taken_over.add(step.module)
        is_through = self._target.via and step.linears[0].coding.format is not FP8
        account = Account(
            step.name, step.format, str(self._target.via) if is_through else SOURCE, Sums()
        )

        def note(compared: Compared, elements: int) -> None:
            nonlocal account
            account = writer.accounts[step.module] = account.plus(compared, elements)

        return note

    def _write_beside(
        self, step: Step, form: Form, writer: TaskWriter, stop: threading.Event
    ) -> None:
        """A module of eight bits, or of integers that stay."""
        linear, note = step.linears[0], self._begin_account(step, writer)
        if step.action == "quantize":
            panels = quantized_fp8(linear.coding.weights(linear, self.source), form, note)
        else:
            panels = linear.coding.kept(linear, self.source, form)
        table = self._dialect.TRAITS.fp8
        if form.format is FP8 and table:
            parts = table.encode(step.module, form, panels, self._input_scale(step) or 1.0)
        else:
            parts = encode_int4(step.module, step.shape, panels)
        append_parts(
            step,
            parts if step.scalar is not None else self._with_own_scales(parts, linear),
            writer,
            stop,
        )

    def _input_scale(self, step: Step) -> float | None:
        """The scale of activations that the plan has, as far as inputs reach under the factors of a fold."""
        if step.scalar is None:
            return None
        return step.scalar * max(reach_of(linear, self.source) for linear in step.measured)

    def _with_own_scales(self, parts: Iterator[Part], linear: Linear) -> Iterator[Part]:
        """The parts; a scale of activations that the source has stays, where the plan has none."""
        own = {ref.name: ref for ref in linear.idle if ref.dtype == "F32" and ref.elements == 1}
        for name, part in parts:
            yield (
                name,
                self.source.read_range(own[name], 0, own[name].nbytes) if name in own else part,
            )

    def _panels(self, steps: list[Step]) -> Generator[tuple[int, Quantized]]:
        """(number of the step, its next panel), step by step."""
        measured = steps[0].measured
        if steps[0].action == "transcode":
            yield from self._carried(steps)
        elif steps[0].slots:
            for number, step in enumerate(steps):
                for slot in step_members(step):
                    weights = [self._weights(linear) for linear in slot]
                    with room_for(self.source, slot):
                        panels = self._rounding.panels(
                            weights,
                            [InterleavedWeights(tuple(weights))],
                            [slot[0].module],
                            format_named(step.format),
                        )
                        yield from ((number, q) for _, q in panels)
        else:
            members = [self._weights(step.linears[0]) for step in steps]
            modules = [step.linears[0].module for step in steps]
            with room_for(self.source, measured):
                yield from self._rounding.panels(
                    self._measured(measured), members, modules, format_named(steps[0].format)
                )

    def _measured(self, linears: Sequence[Linear]) -> list[Weights]:
        """What has the values of these linear layers, in any order."""
        return (
            [self._weights(linear) for linear in linears]
            if self._target.via
            else list(measured_whole(linears, self.source))
        )

    def _weights(self, linear: Linear) -> Weights:
        weights = linear.coding.weights(linear, self.source)
        return (
            ThroughFp8(weights) if self._target.via and linear.coding.format is not FP8 else weights
        )

    def _carried(self, steps: list[Step]) -> Iterator[tuple[int, Quantized]]:
        """The blocks of four-bit modules, cast where the format is another."""
        fmt = format_named(steps[0].format)
        stored = {linear.module: _blocks(linear) for linear in steps[0].measured}
        exponent = group_exponent(stored, fmt)
        for number, step in enumerate(steps):
            for slot in step_members(step):
                yield from (
                    (number, q)
                    for q in alternate(
                        [carry(stored[linear.module], fmt, exponent) for linear in slot]
                    )
                )

    def _write_floats(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        """Values of linear layers that stay, in the dtype of the output."""
        for step in steps:
            output = step.outputs[0]
            panels = values_of(step.linears[0], self.source, output.dtype)
            if not append_parts(step, ((output.name, panel) for panel in panels), writer, stop):
                return

    def _explain(self, step: Step, error: NumericError) -> list[NumericError]:
        """What is wrong with which linear layer."""
        if step.action == "transcode" or error.code != "not-finite":
            return [error]
        found = [
            unsound for linear in step.measured if (unsound := find_not_finite(self.source, linear))
        ]
        if not found:
            detail = f"{self.device} found NaN or Inf in {step.measured[0].name}, which has none"
            raise DeviceError(
                "device-failed", detail, "Run the same command again, or with --device cpu."
            ) from None
        return found


def quantized_fp8(
    weights: Weights, form: Form, note: Note
) -> Iterator[tuple[memoryview, memoryview]]:
    """E4M3 codes and their scales, of rows or of the whole; NumericError where there is Inf or NaN.

    note     is told what the rows have lost
    Formula  weight_scale = amax / 448, 1 where that is 0; code = e4m3(x / weight_scale)
    """
    panels = list(row_panels(weights.shape))
    amax = np.concatenate([Cpu().row_amax(weights.rows(*panel)) for panel in panels])
    if not np.isfinite(amax).all():
        raise not_finite()
    if form.granularity == "tensor":
        amax = amax.max(initial=0, keepdims=True)
    scales = fp8_scales_of(amax)
    stored = scales.astype(FLOAT_DTYPES[form.stored_scales])
    for first, last in panels:
        chosen = slice(None) if form.granularity == "tensor" else slice(first, last)
        x = weights.rows(first, last)
        codes = Cpu().quantize_fp8(x, scales[chosen]).reshape(-1).data
        note(
            Cpu().compare_values(x, _fp8_values(codes, x.shape, stored[chosen])),
            x.shape[0] * x.shape[1],
        )
        yield codes, memoryview(b"")
    yield memoryview(b""), stored.view(np.uint8).data


def _fp8_values(codes: memoryview, shape: tuple[int, int], stored: NDArray[np.generic]) -> Float32s:
    """What engines take the codes of some rows for, under one scale or a scale for each."""
    block = (shape[0] if stored.size == 1 else 1, shape[1])
    return Cpu().decode_fp8(codes, shape, Grid(stored.astype(np.float32).reshape(-1, 1), block))


def _blocks(linear: Linear) -> Blocks:
    blocks = linear.coding.blocks(linear)
    if blocks is None:
        raise RuntimeError(f"{linear.module} has no blocks to take over")
    return blocks


def _noted(
    panels: Iterable[tuple[int, Quantized]], step: Step, writer: TaskWriter, note: Note
) -> Iterator[Quantized]:
    """The panels; the writer is told the global scale of a group with members in other shards, to be compared with theirs."""
    is_shared = step.action == "quantize" and len({ref.file for ref in step.amax_of}) > 1
    for _, q in panels:
        if is_shared and step.group and q.global_scale is not None:
            writer.global_scales[step.group] = q.global_scale
        if q.compared:
            note(q.compared, q.shape[0] * q.shape[1])
        yield q
