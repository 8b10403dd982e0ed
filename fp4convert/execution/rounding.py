"""Round the weights of a scale group, by a rule and a method."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

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
from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR
from fp4convert.execution.adapter_rounding import (
    PANEL_NBYTES,
    directions_in,
    low_ranks_of,
    protected_gram,
    with_adapter,
)
from fp4convert.execution.exact_blocks import are_exact, under_their_scale, with_exact
from fp4convert.numerics.backends.base import OWN, Backend, Given
from fp4convert.numerics.backends.cpu import READ_ELEMENTS, Cpu
from fp4convert.numerics.codec import as_floats, block_steps, pack
from fp4convert.numerics.descent import aligned
from fp4convert.numerics.formats import DAMPING, IMPORTANCE, Format, global_range
from fp4convert.numerics.matrices import Quantized, Weights, row_panels
from fp4convert.planning.method_needs import GPTQ, has_few_tokens
from fp4convert.process import memory_nbytes
from fp4convert.recipes.recipe import Target

MEMORY_SHARE = 0.5  # of the machine's, for all workers together


class Rounding(NamedTuple):
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
        given: Given = OWN,
    ) -> Iterator[tuple[int, Quantized]]:
        """Quantize under one amax: (number of the member, its next panel).

        Member by member, each panel compared with its weights; as Backend.quantize_group.

        modules  whose statistics are those of each member's inputs
        given    an amax where it is not measured
        Raises   NumericError also for a Gram matrix that is none
        """
        rule, calibration = self.target.rule_for(fmt), self.calibration
        # What the rule is given beside the weights.
        importance = []
        if rule == IMPORTANCE and calibration:
            importance = [
                moments_under(calibration.moments(module), weights)
                for module, weights in zip(modules, members, strict=True)
            ]
        is_unit = self.target.has_unit_scale and fmt.has_global_scale
        amax = global_range(rule) if is_unit else given.amax
        given = given._replace(amax=amax, importance=importance)
        is_exact = are_exact(members, fmt)
        if is_exact:
            given = under_their_scale(measured, fmt, rule, given)
        nearest = self.backend.quantize_group(measured, members, fmt, rule, given)
        is_protected = self.target.method == GPTQ
        if is_protected and calibration:
            nearest = self._compensated(nearest, members, modules, calibration)
        if is_exact:
            nearest = with_exact(nearest, members)
        if any(map(low_ranks_of, members)):
            # GPTQ under a Gram matrix has protected its own already.
            protected = [
                is_protected and (calibration is None or has_few_tokens(calibration, module))
                for module in modules
            ]
            return with_adapter(nearest, members, protected)
        return nearest

    @property
    def threads(self) -> int:
        """Count the callers it serves at once, with the machine's memory."""
        threads, each_nbytes = self.backend.threads, self._extra_nbytes
        if not each_nbytes:
            return threads
        return max(1, min(threads, int(MEMORY_SHARE * memory_nbytes() / each_nbytes)))

    def held_nbytes(self, threads: int, widest: int) -> int:
        """Count the memory that so many callers hold.

        threads  0: as many as suit
        widest   columns of the widest linear layer
        """
        threads = threads or self.threads
        return self.backend.held_nbytes(threads, widest) + threads * self._extra_nbytes

    @property
    def _extra_nbytes(self) -> int:
        """Count the memory of one caller beside the backend's.

        It is that of GPTQ, at the widest linear layer that the file knows, or of panels beside
        low-rank corrections.
        """
        if self.target.dialect in ALWAYS_FOUR:
            return PANEL_NBYTES * READ_ELEMENTS
        if self.target.method != GPTQ:
            return 0
        if self.calibration is None:
            return PANEL_NBYTES * READ_ELEMENTS
        widths = self.calibration.gram_widths()
        return max((held_nbytes(count, width) for count, width in widths), default=0)

    def working(self) -> AbstractContextManager[None]:
        """Let any number of threads call meanwhile."""
        is_by_torch = self.target.method == GPTQ and self.calibration is not None
        return one_thread() if is_by_torch else nullcontext()

    def _compensated(
        self,
        nearest: Iterator[tuple[int, Quantized]],
        members: Sequence[Weights],
        modules: Sequence[str],
        calibration: Calibration,
    ) -> Generator[tuple[int, Quantized]]:
        """Quantize the members by GPTQ, from the block scales of nearest panels.

        Members that saw too few tokens stay as those panels have them.
        """
        known: dict[str, Factor] = {}  # of the last member, and most often of all of its group
        for number, panels in groupby(nearest, key=itemgetter(0)):
            module, weights = modules[number], members[number]
            if has_few_tokens(calibration, module):
                yield from panels
                continue
            scaled = _scaled(panels, weights)
            holder, changes = calibration.holder(module), low_ranks_of(weights)
            if changes:  # each layer has an adapter of its own
                holder = module
            with explained(f"{calibration.path}: the Gram matrix of {module}", module):
                if holder not in known:
                    gram = calibration.gram(module)
                    if gram is None:
                        raise RuntimeError(f"no Gram matrix of {module}")
                    device, blocks = torch_device(self.backend.name), gram.blocks
                    if changes:
                        basis = directions_in(changes).basis
                        blocks = protected_gram(blocks, gram.columns, basis)
                    share = self.target.damping or DAMPING
                    known = {holder: factorize(blocks, gram.columns, device, share)}
                # Round column by column, go over it, and say what these codes lose.
                h = aligned(known[holder].damped, weights.shape[1], scaled.format)
                for first, last in row_panels(weights.shape, PANEL_ELEMENTS):
                    q = scaled.rows(first, last)
                    steps = block_steps(q).reshape(last - first, -1)
                    panel = weights.rows(first, last)
                    values = as_floats(panel)
                    codes = round_columns(values, steps, known[holder])
                    rounded = replace(q, packed=pack(codes).reshape(-1).data)
                    if self.target.passes:
                        rounded = self.backend.descend(values, rounded, h, self.target.passes)
                    yield number, replace(rounded, compared=Cpu().compare(panel, rounded))


def _scaled(panels: Iterable[tuple[int, Quantized]], weights: Weights) -> Quantized:
    """Return the block scales of a whole matrix, without codes.

    They are kept: a panel is valid until the next is asked for.
    """
    scales, q = bytearray(), None
    for _, q in panels:
        scales += q.block_scales
    if q is None:
        raise RuntimeError("no panels of a matrix")
    return replace(
        q,
        shape=weights.shape,
        packed=memoryview(b""),
        block_scales=memoryview(scales),
        compared=None,
    )
