"""Round column after column; later ones make up for earlier errors.

The block scales are those of another method; calibration/methods/gptq.py has the algebra.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

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
from fp4convert.calibration.methods.targets import Correction, retargeted
from fp4convert.calibration.statistics import has_few_tokens
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods.method import Group, Method, Under
from fp4convert.makers.methods.protected import directions_in, low_ranks_of, protected_gram
from fp4convert.numerics.backends.base import OWN, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, block_steps, pack
from fp4convert.numerics.descent import aligned
from fp4convert.numerics.matrices import Quantized, Weights, row_panels
from fp4convert.process import reuse_freed_memory

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration


class Gptq(NamedTuple):
    """Block scales of another method, and codes under a Gram matrix.

    Modules that saw too few tokens stay as the other method has them.

    statistics  sha256 of the calibration file
    """

    scaled_by: Method
    statistics: str
    damping: float
    passes: int

    def under(self, group: Group, tools: Tools, given: Given = OWN) -> Under:
        under, calibration = self.scaled_by.under(group, tools, given), tools.calibration
        is_own = under.given.amax is None or under.given.is_own
        if calibration is None or not group.fmt.has_global_scale or not is_own:
            return under
        amax = calibration.target_amax(group.modules[0])
        return under if amax is None else Under(Given(amax))

    def panels(self, group: Group, tools: Tools, under: Under) -> Generator[tuple[int, Quantized]]:
        calibration = tools.calibration
        if calibration is None:
            raise RuntimeError("gptq without its calibration")
        known: dict[str, Factor] = {}  # of the last member, and most often of all of its group
        targets = _targets_of(group, calibration)
        nearest = self.scaled_by.panels(group._replace(members=targets), tools, under)
        for number, panels in groupby(nearest, key=itemgetter(0)):
            module, weights = group.modules[number], group.members[number]
            if has_few_tokens(calibration, module):
                yield from panels
                continue
            scaled = _without_codes(panels, weights)
            changes = low_ranks_of(weights)
            holder = module if changes else calibration.holder(module)  # an adapter is its own
            with explained(f"{calibration.path}: the Gram matrix of {module}", module):
                if holder not in known:
                    known = {holder: self._factor(module, weights, tools, calibration)}
                aims = weights, targets[number]
                for q in self._rounded(*aims, scaled, known[holder], tools):
                    yield number, q

    def _factor(
        self, module: str, weights: Weights, tools: Tools, calibration: Calibration
    ) -> Factor:
        gram, changes = calibration.gram(module), low_ranks_of(weights)
        if gram is None:
            raise RuntimeError(f"no Gram matrix of {module}")
        blocks = gram.blocks
        if changes:
            blocks = protected_gram(blocks, gram.columns, directions_in(changes).basis)
        return factorize(blocks, gram.columns, torch_device(tools.backend.name), self.damping)

    def _rounded(
        self, weights: Weights, targets: Weights, scaled: Quantized, factor: Factor, tools: Tools
    ) -> Generator[Quantized]:
        """Round targets, go over it, and compare it with the weights."""
        h = aligned(factor.damped, weights.shape[1], scaled.format)
        for first, last in row_panels(weights.shape, PANEL_ELEMENTS):
            q, values = scaled.rows(first, last), as_floats(targets.rows(first, last))
            codes = round_columns(values, block_steps(q).reshape(last - first, -1), factor)
            q = replace(q, packed=pack(codes).reshape(-1).data)
            if self.passes:
                q = tools.backend.descend(values, q, h, self.passes)
            yield replace(q, compared=Cpu().compare(weights.rows(first, last), q))

    def caller_nbytes(self, calibration: Calibration | None) -> int:
        """Count H and panels at the widest linear layer that the file knows."""
        widths = calibration.gram_widths() if calibration else ()
        beside = 4 if calibration and calibration.targets else 0  # a correction, as large as H
        sizes = (held_nbytes(count, n) + beside * count * n for count, n in widths)
        return max(sizes, default=0)

    def working(self) -> AbstractContextManager[None]:
        reuse_freed_memory()
        return one_thread()


def _targets_of(group: Group, calibration: Calibration) -> list[Weights]:
    """Return the targets of members, by a calibration."""
    known: dict[str, Correction | None] = {}
    targets = []
    for module, weights in zip(group.modules, group.members, strict=True):
        holder = calibration.holder(module)
        if holder not in known:
            known[holder] = calibration.correction(module, weights.shape)
        targets.append(retargeted(weights, known[holder]))
    return targets


def _without_codes(panels: Iterable[tuple[int, Quantized]], weights: Weights) -> Quantized:
    """Return the block scales of a whole matrix.

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
