"""Take over four-bit blocks as they are, or cast MXFP4 to NVFP4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.tables import is_reversible
from fp4convert.errors import NumericError
from fp4convert.numerics.formats import Format, Kind
from fp4convert.numerics.matrices import Blocks, Fetched, row_panels
from fp4convert.numerics.mxfp4_as_nvfp4 import NOTHING, global_exponent, largest_exponent, recast
from fp4convert.planning.steps import Plan
from fp4convert.recipes.recipe import ScaleGroup, group_members, scale_groups


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


def group_exponent(members: Mapping[str, Blocks], fmt: Format) -> int:
    """k of the global scale 2^k of a scale group whose MXFP4 blocks are cast; 0 where none is; NumericError for a NaN scale."""
    if all(q.format is fmt for q in members.values()):
        return 0
    largest = NOTHING
    for module, q in members.items():
        try:
            own = max(largest_exponent(q.rows(first, last)) for first, last in row_panels(q.shape))
        except NumericError as error:
            raise NumericError(
                error.code, f"{module}: {error.message}", error.next_step, module
            ) from None
        largest = max(largest, own)
    return global_exponent(largest)


class Carried(NamedTuple):
    """A module on its way: its blocks, what they become, and k of the global scale 2^k where they are cast."""

    module: str
    stored: Blocks
    format: Format
    exponent: int = 0
    input_scale: float | None = None

    @property
    def blocks(self) -> Blocks:
        """What it becomes."""
        return carry(self.stored, self.format, self.exponent)


class Carrier:
    """The modules of an artifact in a format.

    Raises NumericError where a block scale that must be cast is NaN
    """

    def __init__(self, artifact: Artifact, fmt: Format) -> None:
        self._artifact = artifact
        self.format = fmt
        self._exponents = {} if fmt is artifact.format else _exponents(artifact, fmt)

    def blocks(self, module: str) -> Blocks:
        """That module; every block that is cast keeps its values where E4M3 can say its scale."""
        return self._of(module).blocks

    def each(self) -> Iterator[Carried]:
        """Every module."""
        return (self._of(module) for module in self._artifact.modules)

    def _of(self, module: str) -> Carried:
        scale = self._artifact.stored_input_scale(module)
        return Carried(
            module,
            self._artifact.decode(module),
            self.format,
            self._exponents.get(module, 0),
            scale,
        )


def stored_blocks(plan: Plan) -> Iterator[tuple[str, Blocks]]:
    """The blocks of every linear layer that a plan takes over, as they are stored."""
    for step in plan.steps:
        if step.action == "transcode" and step.linears:
            yield from (
                (one.module, blocks) for one in step.linears if (blocks := one.coding.blocks(one))
            )


def taken_over(plan: Plan) -> Iterator[Carried]:
    """Every linear layer whose blocks a plan takes over."""
    exponents: dict[str, int] = {}
    for step in plan.steps:
        fmt = step.form.format if step.form else None
        if step.action != "transcode" or fmt is None:
            continue
        key = step.group or step.module
        stored = {
            linear.module: blocks
            for linear in step.measured
            if (blocks := linear.coding.blocks(linear))
        }
        if key not in exponents:
            exponents[key] = group_exponent(stored, fmt)
        yield from (
            Carried(linear.module, stored[linear.module], fmt, exponents[key])
            for linear in step.linears
        )


def describe_carried(modules: Iterable[Carried], kind: Kind | None) -> dict[str, object]:
    """How many modules keep every bit, and which do not.

    kind    how the dialect stores global scales
    rounded  their global scale or input scale is stored as its reciprocal, and that of the reciprocal is another float32
    lossy    MXFP4 modules with blocks that NVFP4 cannot say; blocks, kept_blocks count those of all
    """
    rounded, lossy, blocks, kept, count, is_cast = [], [], 0, 0, 0, False
    for each in modules:
        count += 1
        if each.format is each.stored.format:
            scalars = (each.stored.global_scale, each.input_scale)
            if kind and kind != each.stored.kind and not all(map(is_reversible, scalars)):
                rounded.append(each.module)
            continue
        is_cast = True
        fared = kept_blocks(each.stored, each.exponent)
        blocks, kept = blocks + fared.blocks, kept + fared.kept
        if fared.blocks != fared.kept:
            lossy.append(each.module)
    document: dict[str, object] = {
        "modules": count,
        "bit_for_bit": count - len(rounded) - len(lossy),
        "rounded": rounded,
    }
    return (
        {**document, "lossy": lossy, "blocks": blocks, "kept_blocks": kept} if is_cast else document
    )


def kept_blocks(stored: Blocks, exponent: int) -> Kept:
    """How the MXFP4 blocks of a matrix fare as NVFP4 under the global scale 2^exponent."""
    kept = sum(
        recast(stored.rows(first, last), exponent).kept_blocks
        for first, last in row_panels(stored.shape)
    )
    return Kept(stored.shape[0] * stored.shape[1] // stored.format.block_size, kept)


def _exponents(artifact: Artifact, fmt: Format) -> dict[str, int]:
    """For every module k of the global scale 2^k of its scale group."""
    groups = scale_groups(artifact.modules, group_members(artifact.source.checkpoint.config))
    members: dict[ScaleGroup | str, list[str]] = defaultdict(list)
    for module in artifact.modules:
        members[groups.get(module, module)].append(module)
    found: dict[str, int] = {}
    for modules in members.values():
        found |= dict.fromkeys(
            modules, group_exponent({module: artifact.decode(module) for module in modules}, fmt)
        )
    return found
