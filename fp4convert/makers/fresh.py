"""Round the matrices of a scale group to four bits under one amax.

The encoding of a linear layer makes its rows: floats, FP8, int4, GGUF blocks, a merged adapter. The
method rounds them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from fp4convert.checkpoint.encodings.base import Linear, room_for
from fp4convert.checkpoint.encodings.floats import measured_whole
from fp4convert.makers.maker import PAUSE, Fact, Maker, Parts, Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group, Method, Under
from fp4convert.makers.spelling import Losses, Spelling, naming, reach_over
from fp4convert.makers.unit import Stem, Unit, fold_refs, refs_of
from fp4convert.numerics.backends.base import Given
from fp4convert.numerics.codec import global_scale_of
from fp4convert.numerics.formats import GLOBAL_RANGE, global_range
from fp4convert.numerics.matrices import Quantized
from fp4convert.storage.safetensors import TensorRef

SLACK = 1e-6  # of an amax that was found from a rounded reciprocal


@dataclass(frozen=True, slots=True)
class Fresh(Maker):
    """Members of a scale group in one shard.

    linears   their values become the stems, one each
    measured  every member of the group, of any shard: they set the amax
    group     name of the group, where it has other members
    amax      of the group, where a file gives it; then nothing is measured
    """

    stems: tuple[Stem, ...]
    linears: tuple[Linear, ...]
    measured: tuple[Linear, ...]
    spelling: Spelling
    method: Method
    rule: str
    group: str | None = None
    amax: float | None = None

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return (*refs_of(self.linears), *fold_refs(self.measured))

    @property
    def measures(self) -> tuple[TensorRef, ...]:
        return refs_of(self.measured) if self.amax is None else ()

    @property
    def held_nbytes(self) -> int:
        if self.amax is not None:
            return 0
        return sum([linear.nbytes for linear in self.measured])

    @property
    def pauses(self) -> bool:
        return self.amax is None

    def parts(self, tools: Tools) -> Parts:
        facts: list[Fact] = []
        saturated: set[int] = set()
        home = self.linears[0].refs[0].file  # the shard that is streamed comes first
        own_first = sorted(self.measured, key=lambda linear: linear.refs[0].file != home)
        with naming(self.measured, tools), room_for(tools.source, own_first if self.pauses else ()):
            group = self._group(tools)
            under = self._under(group, tools, saturated)
            reach = reach_over(self.measured, tools.source)
            early: set[str] = set()
            if under.given.is_own and under.given.amax is not None:
                scale = float(global_scale_of(under.given.amax, self.rule))
                for stem in self.stems:
                    for part in self.spelling.scalars(stem, scale, reach):
                        early.add(part[0])
                        yield part
                yield PAUSE
            with closing(self._panels(group, tools, under)) as panels:
                for number, numbered in groupby(panels, key=itemgetter(0)):
                    stem, linear = self.stems[number], self.linears[number]
                    losses = Losses(stem.name, [linear], self.spelling.form)
                    passing = losses.passing(q for _, q in numbered)
                    for part in self.spelling.encode(stem, passing, reach):
                        if part[0] not in early:
                            yield part
                    facts += losses.facts()
                    if self._is_shared and losses.global_scale is not None:
                        facts.append(Fact("global_scale", str(self.group), losses.global_scale))
        return (*facts, *[Fact("saturated", self.stems[number].name) for number in saturated])

    @property
    def _is_shared(self) -> bool:
        """Tell whether other shards measure the same scale group too."""
        is_alone = len({ref.file for linear in self.measured for ref in linear.refs}) < 2
        return self.group is not None and self.amax is None and not is_alone

    def _group(self, tools: Tools) -> Group:
        weights = [linear.coding.weights(linear, tools.source) for linear in self.linears]
        measured = list(measured_whole(self.measured, tools.source)) if self.pauses else []
        modules = [linear.module for linear in self.linears]
        return Group(measured, weights, modules, self.spelling.form.format)

    def _under(self, group: Group, tools: Tools, saturated: set[int]) -> Under:
        """Measure the group, or take the given amax and note larger values."""
        if self.amax is None:
            return self.method.under(group, tools)
        largest = self.amax * (GLOBAL_RANGE / global_range(self.rule)) * (1 + SLACK)

        def note(number: int, amax: float) -> None:
            if amax > largest:
                saturated.add(number)

        return self.method.under(group, tools, Given(self.amax, note=note))

    def _panels(self, group: Group, tools: Tools, under: Under) -> Generator[tuple[int, Quantized]]:
        yield from self.method.panels(group, tools, under)


def make(unit: Unit) -> Fresh:
    """Make the maker of rounded four-bit matrices, one in each tensor."""
    fmt, target = unit.form.format, unit.target
    linears = tuple([unit.linears[stem.name] for stem in unit.stems])
    spelling, method = Spelling(str(target.dialect), unit.form), method_for(target, fmt)
    rule = target.rule_for(fmt)
    return Fresh(unit.stems, linears, unit.measured, spelling, method, rule, unit.group, unit.amax)
