"""Round the weights of a scale group, by a rule and a method."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from fp4convert.calibration.methods.gptq import (
    PANEL_ELEMENTS,
    Factor,
    explained,
    factorize,
    held_nbytes,
    one_thread,
    round_columns,
    torch_device,
)
from fp4convert.calibration.methods.scaled_weights import moments_under
from fp4convert.calibration.statistics import Calibration
from fp4convert.numerics.backends.base import Backend, Given, memory_nbytes
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, block_steps, pack
from fp4convert.numerics.formats import IMPORTANCE, Format, global_range
from fp4convert.numerics.matrices import Quantized, Weights, row_panels
from fp4convert.planning.method_needs import GPTQ
from fp4convert.recipes.recipe import Target

MEMORY_SHARE = 0.5  # of the machine's, for all workers together


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds as the target says.

    calibration  None where neither method nor rule takes statistics
    """

    target: Target
    backend: Backend
    calibration: Calibration | None = None

    def panels(
        self,
        measured: Sequence[Weights],
        members: Sequence[Weights],
        modules: Sequence[str],
        fmt: Format,
    ) -> Iterator[tuple[int, Quantized]]:
        """(number of the member, its next panel), member by member, under one amax; as Backend.quantize_group.

        modules  whose statistics are those of each member's inputs
        Raises   NumericError also for a Gram matrix that is none
        """
        rule = self.target.rule_for(fmt)
        nearest = self.backend.quantize_group(
            measured, members, fmt, rule, self._given(rule, members, modules)
        )
        if self.target.method == GPTQ and self.calibration:
            return compared(members, self._compensated(nearest, members, modules, self.calibration))
        return compared(members, nearest)

    @property
    def threads(self) -> int:
        """How many callers it serves at once, with the machine's memory."""
        need = self._extra_nbytes
        return (
            max(1, min(self.backend.threads, int(MEMORY_SHARE * memory_nbytes() / need)))
            if need
            else self.backend.threads
        )

    def held_nbytes(self, threads: int, widest: int) -> int:
        """Memory that so many callers hold, at linear layers of up to so many columns; 0 threads are as many as suit."""
        threads = threads or self.threads
        return self.backend.held_nbytes(threads, widest) + threads * self._extra_nbytes

    @property
    def _extra_nbytes(self) -> int:
        """Memory of one caller beside the backend's: of GPTQ, at the widest linear layer that the file knows."""
        if self.target.method != GPTQ or self.calibration is None:
            return 0
        return max(
            (held_nbytes(count, width) for count, width in self.calibration.gram_widths()),
            default=0,
        )

    def working(self) -> AbstractContextManager[None]:
        """Meanwhile any number of threads may call."""
        return one_thread() if self.target.method == GPTQ else nullcontext()

    def _given(self, rule: str, members: Sequence[Weights], modules: Sequence[str]) -> Given:
        """What the rule is given beside the weights of these modules."""
        amax = global_range(rule) if self.target.has_unit_scale else None
        if rule != IMPORTANCE or self.calibration is None:
            return Given(amax)
        pairs = zip(modules, members, strict=True)
        return Given(
            amax,
            [moments_under(self.calibration.moments(module), weights) for module, weights in pairs],
        )

    def _compensated(
        self,
        nearest: Iterator[tuple[int, Quantized]],
        members: Sequence[Weights],
        modules: Sequence[str],
        calibration: Calibration,
    ) -> Generator[tuple[int, Quantized]]:
        """The members under the block scales of these panels, and with the codes that GPTQ gives them."""
        known: dict[str, Factor] = {}  # of the last member, and most often of all of its group
        for number, panels in groupby(nearest, key=itemgetter(0)):
            module, weights = modules[number], members[number]
            scaled = _joined((q for _, q in panels), weights.shape)
            holder = calibration.holder(module)
            with explained(f"{calibration.path}: the Gram matrix of {module}", module):
                if holder not in known:
                    known = {holder: self._factor(calibration, module)}
                for first, last in row_panels(weights.shape, PANEL_ELEMENTS):
                    q = scaled.rows(first, last)
                    steps = block_steps(q).reshape(last - first, -1)
                    panel = weights.rows(first, last)
                    codes = round_columns(as_floats(panel), steps, known[holder])
                    rounded = replace(q, packed=pack(codes).reshape(-1).data)
                    yield number, replace(rounded, compared=Cpu().compare(panel, rounded))

    def _factor(self, calibration: Calibration, module: str) -> Factor:
        gram = calibration.gram(module)
        if gram is None:
            raise RuntimeError(f"no Gram matrix of {module}")
        return factorize(gram.blocks, gram.columns, torch_device(self.backend.name))


def _joined(panels: Iterator[Quantized], shape: tuple[int, int]) -> Quantized:
    """The block scales of panels of whole rows, each valid until the next is asked for, without codes."""
    first = next(panels)
    block_scales = b"".join([bytes(first.block_scales), *(bytes(q.block_scales) for q in panels)])
    return replace(
        first, shape=shape, packed=memoryview(b""), block_scales=memoryview(block_scales)
    )


def compared(
    members: Sequence[Weights], panels: Iterable[tuple[int, Quantized]]
) -> Iterator[tuple[int, Quantized]]:
    """The panels, each compared with the weights that it stands for; those that are not by now are read once more."""
    current = first = 0
    for number, q in panels:
        first = first if number == current else 0
        current, last = number, first + q.shape[0]
        yield (
            number,
            q
            if q.compared
            else replace(q, compared=Cpu().compare(members[number].rows(first, last), q)),
        )
        first = last
