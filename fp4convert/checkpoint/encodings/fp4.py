"""Find and read four-bit blocks of any dialect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.target_forms import module_form
from fp4convert.checkpoint.encodings.base import Coding, CodingDefaults, Linear
from fp4convert.checkpoint.encodings.corrected import Corrected
from fp4convert.checkpoint.encodings.smoothed import Smoothed, check_factors
from fp4convert.checkpoint.unread import INPUT_FACTORS
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_matrix
from fp4convert.numerics.formats import FLOAT_TYPES, Format
from fp4convert.numerics.matrices import Blocks, FetchedWeights, StoredRows, Weights
from fp4convert.recipes.recipe import Target
from fp4convert.storage.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class FourBit(CodingDefaults):
    """Blocks as a dialect stores them."""

    artifact: Artifact = field(repr=False)
    format: Format
    is_packed = True

    @property
    def word(self) -> str:
        return self.format.name

    def weights(self, linear: Linear, source: Source) -> Weights:
        """Return the values of the blocks, as float32."""
        blocks = self.blocks(linear)

        def stored(first: int, last: int) -> StoredRows:
            q = blocks.rows(first, last)
            codes, block_scales = (
                np.frombuffer(part, np.uint8) for part in (q.packed, q.block_scales)
            )
            scale: tuple[Float32s | int, ...] = ()
            if q.global_scale is not None:
                scale = np.array([q.global_scale], np.float32), int(q.kind == "divisor")
            kernel = f"dequantize_{q.format.name}_{FLOAT_TYPES['F32'].word}"
            return StoredRows(kernel, (codes, block_scales, 2 * codes.size, *scale))

        return FetchedWeights(
            "F32",
            blocks.shape,
            lambda first, last: as_matrix(Cpu().values(blocks.rows(first, last))),
            stored,
        )

    def form_kept(self, linear: Linear, target: Target) -> Form | None:
        form = module_form(target, self.format.name)
        return form if form.rank is None else None  # it has no correction

    def blocks(self, linear: Linear) -> Blocks:
        return self.artifact.decode(linear.module)


def find_fp4(artifact: Artifact) -> Mapping[str, Linear]:
    """Find every four-bit module of an artifact."""
    parts = Counter(packed.stem for packed in artifact.modules.values())
    found = {}
    for module, packed in artifact.modules.items():
        idle = tuple(ref for ref in packed.companions if ref not in packed.refs)
        share = parts[packed.stem]
        stack = packed.refs[0] if share > 1 else None
        coding: Coding = FourBit(artifact, packed.form.format)
        if packed.form.rank is not None:
            coding = Corrected(artifact, packed.form.rank)
        refs = packed.refs
        if factors := artifact.tensors.get(packed.stem + INPUT_FACTORS):
            check_factors(factors, packed.shape[1])
            coding, refs = Smoothed(coding, artifact), (*refs, factors)
        found[module] = Linear(module, packed.shape, coding, refs, idle, stack, share)
    return found
