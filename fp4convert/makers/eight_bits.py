"""Round a matrix to FP8 or MXFP8, or keep its codes or integers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from fp4convert.checkpoint.dialects.tables import Part, encode_int4
from fp4convert.checkpoint.encodings.base import Linear, input_scale_of, room_for
from fp4convert.checkpoint.encodings.fp8 import as_stored, block_of, decode_scales
from fp4convert.errors import NumericError
from fp4convert.makers.maker import Fact, Maker, Parts, Tools, UnsoundShardError
from fp4convert.makers.methods.protected import low_ranks_of, measure
from fp4convert.makers.spelling import NO_BYTES, Losses, Spelling, naming, reach_over
from fp4convert.makers.unit import Stem, Unit, fold_refs
from fp4convert.numerics.backends.base import Fp8Passes
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.fp8_rounding import Block, find_scales
from fp4convert.numerics.matrices import Weights
from fp4convert.storage.safetensors import TensorRef

Panel = tuple[memoryview, memoryview]
"""Codes of whole rows, and scales as they are stored; either may be empty."""


@dataclass(frozen=True, slots=True)
class Eight(Maker):
    """One matrix.

    rule  how scales are chosen; None: codes and scales stay
    """

    stem: Stem
    linear: Linear
    spelling: Spelling
    rule: str | None

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return (*self.linear.refs, *fold_refs((self.linear,)))

    @property
    def held_nbytes(self) -> int:
        return self.linear.nbytes if self.rule else 0

    def parts(self, tools: Tools) -> Parts:
        linear, form = self.linear, self.spelling.form
        if self.rule is None:
            try:
                yield from self._encode(linear.coding.kept(linear, tools.source, form), tools)
            except NumericError as error:
                raise UnsoundShardError([error]) from None
            return (Fact("taken_over", self.stem.name),)
        losses = Losses(self.stem.name, [linear], form)
        rounded = closing(self._rounded(tools, losses))
        with naming([linear], tools), room_for(tools.source, [linear]), rounded as panels:
            yield from self._encode(panels, tools)
        return losses.facts()

    def _encode(self, panels: Iterator[Panel], tools: Tools) -> Iterator[Part]:
        """Name the bytes; the input scale is the plan's or the source's own."""
        stem, form, table = self.stem, self.spelling.form, self.spelling.spoken.TRAITS.fp8
        if not form.format.is_fp8 or table is None:
            return encode_int4(stem.name, stem.shape, panels)
        if not table.has_input_scale(form):
            return table.encode(stem.name, stem.shape, form, panels)
        planned, own = next(iter(stem.input_scales), None), input_scale_of(self.linear)
        if planned is not None:
            scale = planned * reach_over([self.linear], tools.source)
        elif own is not None:
            (scale,) = decode_scales(tools.source.read(own), own.dtype)
        else:
            raise RuntimeError(f"the plan has no input scale of {stem.name}")
        return table.encode(stem.name, stem.shape, form, panels, float(scale))

    def _rounded(self, tools: Tools, losses: Losses) -> Generator[Panel]:
        """Yield codes panel by panel, then all scales.

        Formula  as fp8_rounding.py has it
        """
        linear, form = self.linear, self.spelling.form
        weights = linear.coding.weights(linear, tools.source)
        block, changes = block_of(form, weights.shape), low_ranks_of(weights)
        with tools.backend.fp8_passes(weights) as passes:
            scales = self.scales(weights, block, passes)
            for first, shape, codes, lost in passes.fp8_panels(weights, block, scales):
                adapter = lost.adapter
                if changes:
                    x = as_floats(weights.rows(first, first + shape[0]))
                    values = Cpu().decode_fp8(codes, shape, Grid(scales, block, first))
                    adapter = measure(changes, first, x, values)
                losses.add(lost._replace(adapter=adapter), shape[0] * shape[1])
                yield codes, NO_BYTES
        yield NO_BYTES, as_stored(scales, form)

    def scales(self, weights: Weights, block: Block, passes: Fp8Passes) -> Float32s:
        """Choose the scale of every block."""
        return find_scales(weights, block, self.spelling.form.format, str(self.rule), passes)


def make(unit: Unit) -> Eight:
    """Make the maker of an eight-bit module, or of a packed one that is kept."""
    (stem,), (linear,) = unit.stems, unit.linears.values()
    rule = unit.target.rule_for(unit.form.format) if unit.action == "quantize" else None
    return Eight(stem, linear, Spelling(str(unit.target.dialect), unit.form), rule)
