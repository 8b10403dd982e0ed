"""Turn the steps of quantize into bytes.

A worker reads panels of whole rows and writes the parts that a dialect makes of them; memory does
not grow with the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from itertools import chain, groupby
from operator import itemgetter

from fp4convert.calibration.methods.scaled_weights import reach_of
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.dialects.base import MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.stacks import InterleavedWeights, alternate
from fp4convert.checkpoint.encodings.base import Linear, is_fp8, room_for
from fp4convert.checkpoint.encodings.floats import measured_whole
from fp4convert.checkpoint.encodings.fp8 import as_stored, block_of, rounded_to_fp8
from fp4convert.errors import DeviceError, NumericError
from fp4convert.execution.adapter_rounding import low_ranks_of, measure
from fp4convert.execution.carried_blocks import carry, group_exponent, refusing_nan
from fp4convert.execution.corrected_rounding import round_corrected
from fp4convert.execution.exact_blocks import are_exact
from fp4convert.execution.repacker import (
    find_not_finite,
    parts_beside,
    step_members,
    values_of,
)
from fp4convert.execution.rounding import Rounding
from fp4convert.execution.settings import UnsoundShardError
from fp4convert.execution.task_writer import TaskWriter
from fp4convert.execution.workers import append_parts, copy_steps
from fp4convert.numerics.backends.base import OWN, Backend, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, global_scale_of
from fp4convert.numerics.error_sums import SOURCE, Account, Sums
from fp4convert.numerics.formats import GLOBAL_RANGE, Format, global_range
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.fp8_rounding import find_scales
from fp4convert.numerics.matrices import Compared, Quantized, Weights
from fp4convert.planning.steps import Action, Step
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Source

NO_BYTES = memoryview(b"")
SLACK = 1e-6  # of an amax that was found from a rounded reciprocal


class Quantizer:
    """Quantizes the members of a scale group, or takes over their blocks.

    Whatever is no linear layer is copied.
    """

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
        """Let any number of threads call meanwhile."""
        return self._rounding.working()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        first, form = steps[0], steps[0].form
        if not first.linears:
            copy_steps(self.source, steps, writer, stop)
            return
        try:
            if form is None:
                for step in steps:
                    name, dtype = step.outputs[0].name, step.outputs[0].dtype
                    panels = values_of(step.linears[0], self.source, dtype)
                    if not append_parts(step, ((name, data) for data in panels), writer, stop):
                        return
            elif form.rank is not None:
                self._write_corrected(steps, form, writer, stop)
            elif form.format.is_fp4:
                self._write_blocks(steps, form, writer, stop)
            else:
                self._write_beside(first, form, writer, stop)
        except NumericError as error:
            if form is None and error.tensor is None and error.code != "not-finite":
                # of --keep-dtype
                detail, better = f"{first.name}: {error.message}", "Choose another --keep-dtype."
                error = NumericError(error.code, detail, better, first.name)
            if first.action == "transcode" or error.code != "not-finite":
                raise UnsoundShardError([error]) from None
            # Name the linear layers that are not finite.
            looked_at = [find_not_finite(self.source, linear) for linear in first.measured]
            unsound = [found for found in looked_at if found]
            if unsound:
                raise UnsoundShardError(unsound) from None
            name = first.measured[0].name
            detail = f"{self.device} found NaN or Inf in {name}, which has none"
            next_step = "Run the same command again, or with --device cpu."
            raise DeviceError("device-failed", detail, next_step) from None

    def _write_blocks(
        self, steps: list[Step], form: Form, writer: TaskWriter, stop: threading.Event
    ) -> None:
        """Write the members of a scale group as four-bit blocks."""
        # 1. Read rows, measure and quantize: all rows of the group are read for its amax first,
        #    then panel by panel for their codes and scales, which are compared with the rows.
        with closing(self._quantize_panels(steps, form.format, writer)) as panels:
            for number, own in groupby(panels, key=itemgetter(0)):
                step = steps[number]
                # 2. Add up what each panel has lost, as it passes.
                passing = self._add_losses(step, own, writer)
                # 3. Let the dialect make parts of panels: scalars first, then codes and scales.
                encoder = MatrixEncoder(self._dialect, form, self._input_scale(step))
                parts = encoder.encode(step.module, step.shape, passing)
                # 4. Append each part to its tensor in the shard.
                left = (part for part in parts if part[0] not in writer.early)
                if not append_parts(step, left, writer, stop):
                    return

    def _write_corrected(
        self, steps: list[Step], form: Form, writer: TaskWriter, stop: threading.Event
    ) -> None:
        """Write modules as low-rank corrections, and blocks of what these leave."""
        table = self._dialect.TRAITS.correction
        if table is None:
            raise RuntimeError("this dialect has no corrections")
        for number, step in enumerate(steps):
            linear, encoder = step.linears[0], MatrixEncoder(self._dialect, form, None)
            with room_for(self.source, [linear]):
                weights = linear.coding.weights(linear, self.source)
                correction, panels = round_corrected(
                    weights, linear.module, table.rank, self._rounding
                )
                passing = self._add_losses(step, ((number, q) for q in panels), writer)
                parts = chain(
                    table.encode(step.module, correction),
                    encoder.encode(step.module, step.shape, passing),
                )
                if not append_parts(step, parts, writer, stop):
                    return

    def _quantize_panels(
        self, steps: list[Step], fmt: Format, writer: TaskWriter
    ) -> Generator[tuple[int, Quantized]]:
        """Quantize the steps one by one: (number of the step, its next panel)."""
        measured = steps[0].measured
        if steps[0].action == "transcode":
            # Take over blocks; cast them under one global scale where the format is another.
            stored = {
                linear.module: refusing_nan(blocks, linear.module)
                for linear in measured
                if (blocks := linear.coding.blocks(linear))
            }
            exponent = group_exponent(stored, fmt)
            for number, step in enumerate(steps):
                for slot in step_members(step):
                    taken = [carry(stored[linear.module], fmt, exponent) for linear in slot]
                    yield from ((number, q) for q in alternate(taken))
        elif steps[0].slots:
            # In a stack every slot has an amax of its own; rows of its members take turns.
            for number, step in enumerate(steps):
                for slot in step_members(step):
                    weights = [self._weights(linear) for linear in slot]
                    woven = InterleavedWeights(tuple(weights)) if len(slot) > 1 else weights[0]
                    with room_for(self.source, slot):
                        panels = self._rounding.panels(weights, [woven], [slot[0].module], fmt)
                        yield from ((number, q) for _, q in panels)
        else:
            # The members in whichever shard set the common amax; those of the steps get codes.
            members = [self._weights(step.linears[0]) for step in steps]
            modules = [step.linears[0].module for step in steps]
            given = self._given(steps, fmt, writer)
            group = [] if given.amax else self._group(measured)
            home = steps[0].linears[0].refs[0].file
            own_first = sorted(measured, key=lambda linear: linear.refs[0].file != home)
            with room_for(self.source, () if given.amax else own_first):
                yield from self._rounding.panels(group, members, modules, fmt, given)

    def _given(self, steps: list[Step], fmt: Format, writer: TaskWriter) -> Given:
        """Return the amax of a scale group, if it is given.

        The writer learns which of the steps have weights beyond it.
        """
        if (known := writer.amaxes.get(steps[0].outputs[0].name)) is not None:
            return Given(known, is_own=True)
        if not steps[0].amaxes:
            return OWN
        given = steps[0].amaxes[0]
        reach = given * (GLOBAL_RANGE / global_range(self._target.rule_for(fmt))) * (1 + SLACK)

        def note(number: int, amax: float) -> None:
            if amax > reach:
                writer.saturated.add(steps[number].module)

        return Given(given, note=note)

    def measure(self, steps: list[Step], writer: TaskWriter) -> None:
        """Measure a scale group and write its scalars, before any is rounded.

        They stand first in a file, whose hash goes along with what is written.  What is not plain,
        or not finite, is left to the call that rounds.
        """
        first, form, target = steps[0], steps[0].form, self._target
        if first.action != "quantize" or form is None or first.slots or first.amaxes:
            return
        if form.rank is not None or not form.format.has_global_scale or target.has_unit_scale:
            return
        backend, members = (
            self._rounding.backend,
            [self._weights(step.linears[0]) for step in steps],
        )
        if not isinstance(backend, Cpu) or are_exact(members, form.format):
            return
        shape = members[0].shape
        with suppress(NumericError):
            amax = backend.group_amax(self._group(first.measured))
            scale = float(global_scale_of(amax, target.rule_for(form.format)))
            for step in steps:
                q = Quantized(form.format, shape, NO_BYTES, NO_BYTES, scale)
                input_scale = self._input_scale(step) if form.has_input_scale else None
                scalars = self._dialect.TRAITS.scalars.encode(step.module, q, input_scale)
                parts = list(scalars)
                append_parts(step, iter(parts), writer, threading.Event())
                writer.early |= {name for name, _ in parts}
            writer.amaxes[first.outputs[0].name] = amax

    def _group(self, measured: Sequence[Linear]) -> list[Weights]:
        """Return all rows that set the amax of a scale group."""
        if self._target.via:
            return [self._weights(linear) for linear in measured]
        return list(measured_whole(measured, self.source))

    def _add_losses(
        self, step: Step, panels: Iterator[tuple[int, Quantized]], writer: TaskWriter
    ) -> Iterator[Quantized]:
        """Pass panels on, and tell the writer what they lost.

        It also learns the global scale of a group with members in other shards, to be compared with
        theirs.
        """
        if step.action != "quantize":
            writer.taken_over.add(step.module)
        is_shared = step.action == "quantize" and len({ref.file for ref in step.amax_of}) > 1
        for _, q in panels:
            if is_shared and step.group and q.global_scale is not None:
                writer.global_scales[step.group] = q.global_scale
            if q.compared:
                self._add_loss(step, writer, q.compared, q.shape[0] * q.shape[1])
            yield q

    def _add_loss(self, step: Step, writer: TaskWriter, compared: Compared, elements: int) -> None:
        """Add to a module's account what further rows have lost."""
        account = writer.accounts.get(step.module)
        if account is None:
            is_through = self._target.via and not is_fp8(step.linears[0])
            against = str(self._target.via) if is_through else SOURCE
            dtype = step.linears[0].refs[0].dtype
            account = Account(step.name, step.format, against, Sums(), source_dtype=dtype)
        writer.accounts[step.module] = account.plus(compared, elements)

    def _write_beside(
        self, step: Step, form: Form, writer: TaskWriter, stop: threading.Event
    ) -> None:
        """Write a module of eight bits, or of integers that stay."""
        linear = step.linears[0]

        def append(panels: Iterator[tuple[memoryview, memoryview]]) -> None:
            parts = parts_beside(step, self.source, panels, self._dialect, self._input_scale(step))
            append_parts(step, parts, writer, stop)

        # Quantize, or read codes and scales as they are.
        if step.action == "quantize":
            weights = linear.coding.weights(linear, self.source)
            note = partial(self._add_loss, step, writer)
            rule, backend = self._target.rule_for(form.format), self._rounding.backend
            panels = quantized_fp8(weights, form, rule, backend, note)
            with room_for(self.source, [linear]), closing(panels):
                append(panels)
        else:
            writer.taken_over.add(step.module)
            append(linear.coding.kept(linear, self.source, form))

    def _input_scale(self, step: Step) -> float | None:
        """Return the scale of activations that the plan has.

        It reaches as far as inputs do under the factors of a fold.
        """
        if step.scalar is None:
            return None
        return step.scalar * max(reach_of(linear, self.source) for linear in step.measured)

    def _weights(self, linear: Linear) -> Weights:
        """Return the rows of a linear layer, through FP8 where the target says so."""
        weights = linear.coding.weights(linear, self.source)
        is_through = self._target.via and not is_fp8(linear)
        return rounded_to_fp8(weights) if is_through else weights


def quantized_fp8(
    weights: Weights,
    form: Form,
    rule: str,
    backend: Backend,
    note: Callable[[Compared, int], None],
) -> Generator[tuple[memoryview, memoryview]]:
    """Quantize to FP8 or MXFP8: codes panel by panel, then all scales.

    note     is told what so many elements have lost
    Raises   NumericError where there is Inf or NaN
    Formula  as fp8_rounding.py has it
    """
    block, changes = block_of(form, weights.shape), low_ranks_of(weights)
    with backend.fp8_passes(weights) as passes:
        scales = find_scales(weights, block, form.format, rule, passes)
        for first, shape, codes, lost in passes.fp8_panels(weights, block, scales):
            adapter = lost.adapter
            if changes:
                x = as_floats(weights.rows(first, first + shape[0]))
                values = Cpu().decode_fp8(codes, shape, Grid(scales, block, first))
                adapter = measure(changes, first, x, values)
            note(lost._replace(adapter=adapter), shape[0] * shape[1])
            yield codes, memoryview(b"")
    yield memoryview(b""), as_stored(scales, form)
