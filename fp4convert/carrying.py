"""Four-bit blocks on their way into another artifact: as they are, or MXFP4 cast to NVFP4 under one global scale a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from fp4convert.artifact import Artifact
from fp4convert.errors import NumericError
from fp4convert.formats import Blocks, Fetched, Format, row_panels
from fp4convert.recast import NOTHING, global_exponent, largest_exponent, recast
from fp4convert.recipe import ScaleGroup, group_members, scale_group


class Kept(NamedTuple):
    """How many MXFP4 blocks there are, and how many of them keep every value as NVFP4."""

    blocks: int
    kept: int


def carry(stored: Blocks, fmt: Format, exponent: int) -> Blocks:
    """The same blocks; where they must be cast, under the global scale 2^exponent, with every value that E4M3 can say."""
    if fmt is stored.format:
        return stored

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        rows = recast(stored.rows(first, last), exponent).rows
        return rows.packed, rows.block_scales

    return Fetched(fmt, stored.shape, 2.0**exponent, "multiplier", fetch)


def group_exponent(members: Mapping[str, Blocks]) -> int:
    """k of the global scale 2^k of a scale group of MXFP4 modules; NumericError where a block scale is NaN."""
    largest = NOTHING
    for module, q in members.items():
        try:
            own = max(largest_exponent(q.rows(first, last)) for first, last in row_panels(q.shape))
        except NumericError as error:
            raise NumericError(error.code, f"{module}: {error.message}", error.next_step, module) from None
        largest = max(largest, own)
    return global_exponent(largest)


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
        return carry(self._artifact.decode(module), self.format, self._exponents.get(module, 0))

    def count_kept(self, module: str) -> Kept:
        """How its MXFP4 blocks fare as NVFP4."""
        return kept_blocks(self._artifact.decode(module), self._exponents[module])


def kept_blocks(stored: Blocks, exponent: int) -> Kept:
    """How the MXFP4 blocks of a matrix fare as NVFP4 under the global scale 2^exponent."""
    kept = sum(recast(stored.rows(first, last), exponent).kept_blocks for first, last in row_panels(stored.shape))
    return Kept(stored.shape[0] * stored.shape[1] // stored.format.block_size, kept)


def _exponents(artifact: Artifact) -> dict[str, int]:
    """For every module k of the global scale 2^k of its scale group."""
    groups = group_members(artifact.source.checkpoint.config)
    members: dict[ScaleGroup | str, list[str]] = defaultdict(list)
    for module in artifact.modules:
        members[scale_group(module, groups) or module].append(module)
    found: dict[str, int] = {}
    for modules in members.values():
        found |= dict.fromkeys(modules, group_exponent({module: artifact.decode(module) for module in modules}))
    return found
