"""Take over four-bit blocks as they are, or cast MXFP4 to NVFP4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.tables import is_reversible
from fp4convert.checkpoint.encodings.base import scales_not_finite
from fp4convert.errors import NumericError
from fp4convert.numerics.formats import Format, Kind
from fp4convert.numerics.matrices import Blocks, Fetched, row_panels
from fp4convert.numerics.mxfp4_as_nvfp4 import (
    NAN_BYTE,
    NOTHING,
    global_exponent,
    largest_exponent,
    recast,
)
from fp4convert.planning.steps import Plan
from fp4convert.recipes.recipe import ScaleGroup, group_members, scale_groups
from fp4convert.storage.gguf_types import Q8_0

E4M3_NAN = 0x7F  # without the sign


def carry(stored: Blocks, fmt: Format, exponent: int) -> Blocks:
    """Take over blocks, or cast them under the global scale 2^exponent.

    A cast keeps every value that E4M3 can say the scale of.
    """
    if fmt is stored.format:
        return stored

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        rows = recast(stored.rows(first, last), exponent).rows
        return rows.packed, rows.block_scales

    return Fetched(fmt, stored.shape, 2.0**exponent, "multiplier", fetch)


def refusing_nan(stored: Blocks, module: str) -> Blocks:
    """Return the same blocks; a NaN block scale ends their reading.

    Raises  NumericError as soon as one is
    """
    nan = E4M3_NAN if stored.format.has_global_scale else NAN_BYTE  # set bits, the sign aside

    def fetch(first: int, last: int) -> tuple[memoryview, memoryview]:
        rows = stored.rows(first, last)
        scales = np.frombuffer(rows.block_scales, np.uint8)
        if nans := int(np.count_nonzero(scales & nan == nan)):
            raise scales_not_finite(module, f"{nans} of its block scales are NaN")
        return rows.packed, rows.block_scales

    scale_of = stored.scale_of if isinstance(stored, Fetched) else None
    head = stored.format, stored.shape, stored.global_scale, stored.kind
    return Fetched(*head, fetch, scale_of=scale_of)


def group_exponent(members: Mapping[str, Blocks], fmt: Format) -> int:
    """Find k of the global scale 2^k of a scale group of MXFP4 blocks.

    Returns  0 where none is cast
    Raises   NumericError for a NaN block scale
    """
    if all(q.format is fmt for q in members.values()):
        return 0
    largest = NOTHING
    for module, q in members.items():
        try:
            own = max(largest_exponent(q.rows(first, last)) for first, last in row_panels(q.shape))
        except NumericError as error:
            message = f"{module}: {error.message}"
            raise NumericError(error.code, message, error.next_step, module) from None
        largest = max(largest, own)
    return global_exponent(largest)


class Carried(NamedTuple):
    """A module on its way: its blocks, and what they become.

    exponent  k of the global scale 2^k where they are cast
    """

    module: str
    stored: Blocks
    format: Format
    exponent: int = 0
    input_scale: float | None = None


class Carrier:
    """The four-bit modules of an artifact, each in the format it becomes.

    Raises  NumericError where a block scale that must be cast is NaN
    """

    def __init__(self, artifact: Artifact, forms: Mapping[str, Form]) -> None:
        self._artifact = artifact
        self._forms = forms  # of every module in the result
        self._exponents: dict[str, int] = {}  # k of the global scale 2^k, where they are cast
        groups = scale_groups(artifact.modules, group_members(artifact.source.checkpoint.config))
        members: dict[ScaleGroup | str, list[str]] = defaultdict(list)
        for module, packed in artifact.modules.items():
            if forms[module].format is not packed.form.format:
                members[groups.get(module, module)].append(module)
        for modules in members.values():
            stored = {module: artifact.decode(module) for module in modules}
            exponent = group_exponent(stored, forms[modules[0]].format)
            self._exponents |= dict.fromkeys(modules, exponent)

    def blocks(self, module: str) -> Blocks:
        """Return the blocks that a module gets.

        Every block that is cast keeps its values where E4M3 can say its scale.
        """
        stored = refusing_nan(self._artifact.decode(module), module)
        return carry(stored, self._forms[module].format, self._exponents.get(module, 0))

    def each(self) -> Iterator[Carried]:
        """Describe every module."""
        for module in self._artifact.modules:
            yield Carried(
                module,
                self._artifact.decode(module),
                self._forms[module].format,
                self._exponents.get(module, 0),
                self._artifact.stored_input_scale(module),
            )


def stored_blocks(plan: Plan) -> Iterator[tuple[str, Blocks]]:
    """Find the stored blocks of every linear layer that a plan takes over."""
    for step in plan.steps:
        if step.action == "transcode":
            for linear in step.linears:
                if blocks := linear.coding.blocks(linear):
                    yield linear.module, blocks


def taken_over(plan: Plan) -> Iterator[Carried]:
    """Describe every linear layer whose blocks a plan takes over."""
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
        for linear in step.linears:
            yield Carried(linear.module, stored[linear.module], fmt, exponents[key])


def describe_carried(
    modules: Iterable[Carried],
    kind: Kind | None,
    is_draft: Callable[[str], bool],
    plan: Plan | None = None,
) -> dict[str, object]:
    """Count the modules that keep every bit, and name those that do not.

    plan     of transcode, with modules of eight bits beside these; `floats` counts those among
             them that became ordinary weights, `q8_0` those that became GGUF's blocks
    kind     how the dialect stores global scales
    is_draft tells modules of layers that draft tokens, which are counted by themselves, too
    rounded  their global scale or input scale is stored as its reciprocal, whose reciprocal is
             another float32
    lossy    MXFP4 modules with blocks that NVFP4 cannot say; blocks, kept_blocks count those of all
    """
    rounded, lossy, blocks, kept, count, is_cast = [], [], 0, 0, 0, False
    drafted = {"modules": 0, "blocks": 0, "kept_blocks": 0}
    for each in modules:
        stored, count = each.stored, count + 1
        if each.format is stored.format:
            scalars = (stored.global_scale, each.input_scale)
            if kind and kind != stored.kind and not all(map(is_reversible, scalars)):
                rounded.append(each.module)
            continue
        is_cast = True
        own = stored.shape[0] * stored.shape[1] // stored.format.block_size
        own_kept = 0
        for first, last in row_panels(stored.shape):
            own_kept += recast(stored.rows(first, last), each.exponent).kept_blocks
        blocks, kept = blocks + own, kept + own_kept
        if is_draft(each.module):
            for key, value in zip(drafted, (1, own, own_kept), strict=True):
                drafted[key] += value
        if own != own_kept:
            lossy.append(each.module)
    # a matrix that stays, in the type of --keep-dtype, is no module
    beside = [step for step in plan.steps if step.linears and step.action != "copy"] if plan else []
    became: dict[str, int] = defaultdict(int)
    for step in beside:
        if not step.is_made:
            key = Q8_0.lower() if step.outputs[0].dtype == Q8_0 else "floats"
            became[key] += len(step.linears)
    count += sum(len(step.linears) for step in beside)
    document: dict[str, object] = {
        "modules": count,
        "bit_for_bit": count - len(rounded) - len(lossy) - sum(became.values()),
        "rounded": rounded,
        **became,
    }
    if is_cast:
        document |= {"lossy": lossy, "blocks": blocks, "kept_blocks": kept}
    if drafted["modules"]:
        document["draft"] = drafted
    return document
