"""Take over four-bit blocks as they are, or cast MXFP4 to NVFP4.

A cast has one global scale for a scale group. Rows move whole, so a matrix and a stack are handled
alike: the slots of a stem name the modules of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fp4convert.checkpoint.dialects.stacks import alternate, take_rows
from fp4convert.checkpoint.encodings.base import Linear, scales_not_finite
from fp4convert.errors import NumericError
from fp4convert.makers.maker import Cast, Fact, Maker, Parts, Tools, UnsoundShardError
from fp4convert.makers.spelling import Spelling
from fp4convert.makers.unit import Stem, Unit, refs_of
from fp4convert.numerics.formats import Format
from fp4convert.numerics.matrices import Blocks, Fetched, Quantized, row_panels
from fp4convert.numerics.mxfp4_as_nvfp4 import (
    NAN_BYTE,
    NOTHING,
    global_exponent,
    largest_exponent,
    recast,
)
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

E4M3_NAN = 0x7F  # without the sign


@dataclass(frozen=True, slots=True)
class Carried(Maker):
    """Stems whose modules are blocks already.

    linears  the modules of all stems
    groups   all members of the scale groups that are cast, each group under one exponent
    """

    stems: tuple[Stem, ...]
    linears: tuple[Linear, ...]
    groups: tuple[tuple[Linear, ...], ...]
    spelling: Spelling

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        return refs_of(self.linears)

    @property
    def measures(self) -> tuple[TensorRef, ...]:
        return tuple([ref for group in self.groups for linear in group for ref in linear.refs])

    def exponents(self) -> dict[str, int]:
        """Find k of the global scale 2^k of each module that is cast.

        Raises  NumericError for a NaN block scale
        """
        exponents: dict[str, int] = {}
        for group in self.groups:
            largest = NOTHING
            for linear in group:
                blocks = sound_blocks(linear)
                panels = (blocks.rows(*panel) for panel in row_panels(blocks.shape))
                largest = max(largest, *map(largest_exponent, panels))
            modules = [linear.module for linear in group]
            exponents |= dict.fromkeys(modules, global_exponent(largest))
        return exponents

    @property
    def carries(self) -> bool:
        return True

    def casts(self, source: Source) -> Iterator[Cast]:
        fmt, exponents = self.spelling.form.format, self.exponents()
        for linear in self.linears:
            stored, exponent = blocks_of(linear), exponents.get(linear.module, 0)
            if fmt is not stored.format:
                panels = (stored.rows(*panel) for panel in row_panels(stored.shape))
                kept = sum(recast(panel, exponent).kept_blocks for panel in panels)
                rows, columns = stored.shape
                yield Cast(linear.module, rows * columns // stored.format.block_size, kept)

    def parts(self, tools: Tools) -> Parts:
        try:
            exponents = self.exponents()
            for stem in self.stems:
                yield from self.spelling.encode(stem, self._panels(stem, exponents))
        except NumericError as error:
            raise UnsoundShardError([error]) from None
        return tuple([Fact("taken_over", stem.name) for stem in self.stems])

    def _panels(self, stem: Stem, exponents: Mapping[str, int]) -> Iterator[Quantized]:
        fmt, linears = self.spelling.form.format, {one.module: one for one in self.linears}
        for slot in stem.slots:
            cast = [
                cast_blocks(sound_blocks(linears[rows.module]), fmt, exponents.get(rows.module, 0))
                for rows in slot
            ]
            yield from alternate(
                [take_rows(blocks, rows) for blocks, rows in zip(cast, slot, strict=True)]
            )


def blocks_of(linear: Linear) -> Blocks:
    """Return the stored blocks of a linear layer that has some."""
    blocks = linear.coding.blocks(linear)
    if blocks is None:
        raise RuntimeError(f"{linear.module} has no blocks")
    return blocks


def sound_blocks(linear: Linear) -> Blocks:
    """Return the stored blocks; reading a NaN block scale is a NumericError."""
    stored = blocks_of(linear)
    nan = E4M3_NAN if stored.format.has_global_scale else NAN_BYTE  # set bits, the sign aside

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        rows = stored.rows(first, last)
        scales = np.frombuffer(rows.block_scales, np.uint8)
        if nans := int(np.count_nonzero(scales & nan == nan)):
            raise scales_not_finite(linear.module, f"{nans} of its block scales are NaN")
        return rows.packed, rows.block_scales

    scale_of = stored.scale_of if isinstance(stored, Fetched) else None
    head = stored.format, stored.shape, stored.global_scale, stored.kind
    return Fetched(*head, fetch, scale_of=scale_of)


def cast_blocks(stored: Blocks, fmt: Format, exponent: int) -> Blocks:
    """Return blocks as they are, or cast under the global scale 2^exponent.

    A cast keeps every value whose scale E4M3 has.
    """
    if fmt is stored.format:
        return stored

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        rows = recast(stored.rows(first, last), exponent).rows
        return rows.packed, rows.block_scales

    return Fetched(fmt, stored.shape, 2.0**exponent, "multiplier", fetch)


def make(unit: Unit) -> Carried:
    """Make the maker of modules whose blocks are taken over."""
    is_cast = any(one.coding.format is not unit.form.format for one in unit.measured)
    groups = (unit.measured,) if is_cast else ()
    spelling = Spelling(str(unit.target.dialect), unit.form)
    return Carried(unit.stems, tuple(unit.linears.values()), groups, spelling)
