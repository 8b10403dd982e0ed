"""Round matrices that the dialect stores in one tensor: stacks of experts.

Each slot of a stack has its own amax, and the rows of its members take turns. Stacks of the source
need nothing here: their encoding reads each expert as a matrix.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from fp4convert.checkpoint.dialects.stacks import InterleavedWeights
from fp4convert.checkpoint.encodings.base import Linear, room_for
from fp4convert.makers.maker import Maker, Parts, Tools
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group, Method
from fp4convert.makers.spelling import Losses, Spelling, naming, reach_over
from fp4convert.makers.unit import Stem, Unit, fold_refs, refs_of
from fp4convert.numerics.matrices import Quantized
from fp4convert.storage.safetensors import TensorRef


@dataclass(frozen=True, slots=True)
class Stacked(Maker):
    """One stack; its experts may lie in other shards."""

    stem: Stem
    linears: tuple[Linear, ...]
    spelling: Spelling
    method: Method

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return (*refs_of(self.linears), *fold_refs(self.linears))

    @property
    def held_nbytes(self) -> int:
        return sum([linear.nbytes for linear in self.linears]) // max(1, len(self.stem.slots))

    def parts(self, tools: Tools) -> Parts:
        losses = Losses(self.stem.name, self.linears, self.spelling.form)
        with naming(self.linears, tools), closing(self._panels(tools)) as panels:
            reach = reach_over(self.linears, tools.source)
            yield from self.spelling.encode(self.stem, losses.passing(panels), reach)
        return losses.facts()

    def _panels(self, tools: Tools) -> Generator[Quantized]:
        linears = {linear.module: linear for linear in self.linears}
        for modules in self.stem.members:
            members = [linears[module] for module in modules]
            weights = [linear.coding.weights(linear, tools.source) for linear in members]
            woven = InterleavedWeights(tuple(weights)) if len(members) > 1 else weights[0]
            group = Group(weights, [woven], modules[:1], self.spelling.form.format)
            with room_for(tools.source, members):
                under = self.method.under(group, tools)
                for _, q in self.method.panels(group, tools, under):
                    yield q


def make(unit: Unit) -> Stacked:
    """Make the maker of a stem that holds several modules."""
    (stem,), target = unit.stems, unit.target
    spelling = Spelling(str(target.dialect), unit.form)
    method = method_for(target, unit.form.format)
    return Stacked(stem, tuple(unit.linears.values()), spelling, method)
