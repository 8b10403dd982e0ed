"""Modules on their way into another artifact: as they are, or MXFP4 as NVFP4 under the global scale of their scale group."""

from __future__ import annotations

from collections import defaultdict

from fp4convert.artifact import Artifact
from fp4convert.errors import NumericError
from fp4convert.formats import Blocks, Fetched, Format, row_panels
from fp4convert.recast import NOTHING, global_exponent, largest_exponent, recast
from fp4convert.recipe import ScaleGroup, group_members, scale_group


class Carrier:
    """The modules of an artifact in a format.

    Raises NumericError where a block scale that must be cast is NaN
    """

    def __init__(self, artifact: Artifact, fmt: Format) -> None:
        self._artifact = artifact
        self.format = fmt
        self._exponents = {} if fmt is artifact.format else _exponents(artifact)

    def blocks(self, module: str) -> Blocks:
        """That module; every block that is cast keeps its values where E4M3 can say its scale."""
        stored = self._artifact.decode(module)
        if self.format is stored.format:
            return stored
        exponent = self._exponents[module]

        def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
            rows = recast(stored.rows(first, last), exponent).rows
            return rows.packed, rows.block_scales

        return Fetched(self.format, stored.shape, 2.0**exponent, "multiplier", fetch)

    def count_kept(self, module: str) -> tuple[int, int]:
        """How many MXFP4 blocks that module has, and how many keep every value as NVFP4."""
        stored = self._artifact.decode(module)
        panels = (stored.rows(first, last) for first, last in row_panels(stored.shape))
        kept = sum(recast(rows, self._exponents[module]).kept_blocks for rows in panels)
        return stored.shape[0] * stored.shape[1] // stored.format.block_size, kept


def _exponents(artifact: Artifact) -> dict[str, int]:
    """For every module k of the global scale 2^k of its scale group."""
    groups = group_members(artifact.source.checkpoint.config)
    group_of: dict[str, ScaleGroup | str] = {module: scale_group(module, groups) or module for module in artifact.modules}
    largest: dict[ScaleGroup | str, int] = defaultdict(lambda: NOTHING)
    for module, group in group_of.items():
        q = artifact.decode(module)
        try:
            own = max(largest_exponent(q.rows(first, last)) for first, last in row_panels(q.shape))
        except NumericError as error:
            raise NumericError(error.code, f"{module}: {error.message}", error.next_step, module) from None
        largest[group] = max(largest[group], own)
    return {module: global_exponent(largest[group]) for module, group in group_of.items()}
