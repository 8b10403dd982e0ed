"""Count the blocks that a conversion takes over bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fp4convert.checkpoint.dialects.tables import is_reversible
from fp4convert.makers.carried import Carried, blocks_of
from fp4convert.numerics.formats import Format, Kind
from fp4convert.numerics.matrices import Blocks, row_panels
from fp4convert.numerics.mxfp4_as_nvfp4 import recast
from fp4convert.planning.plan import Plan
from fp4convert.storage.gguf import Q8_0


class CarriedModule(NamedTuple):
    """A module on its way: its blocks, and what they become.

    exponent  k of the global scale 2^k where they are cast
    """

    module: str
    stored: Blocks
    format: Format
    exponent: int = 0
    input_scale: float | None = None


def stored_blocks(plan: Plan) -> Iterator[tuple[str, Blocks]]:
    """Find the stored blocks of every linear layer that a plan takes over."""
    for step in plan.steps:
        if step.action == "transcode":
            for linear in step.linears:
                if blocks := linear.coding.blocks(linear):
                    yield linear.module, blocks


def taken_over(plan: Plan, has_inputs: bool = False) -> Iterator[CarriedModule]:
    """Describe every linear layer whose blocks a plan takes over.

    has_inputs  with its scale of activations, which goes along
    """
    makers = {id(step.maker): step.maker for step in plan.steps}
    for maker in makers.values():
        if not isinstance(maker, Carried):
            continue
        exponents, fmt = maker.exponents(), maker.spelling.form.format
        for linear in maker.linears:
            artifact, module = linear.coding.artifact, linear.module
            scale = artifact.stored_input_scale(module) if artifact and has_inputs else None
            yield CarriedModule(module, blocks_of(linear), fmt, exponents.get(module, 0), scale)


def describe_carried(
    modules: Iterable[CarriedModule],
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
    beside = [
        step
        for step in (plan.steps if plan else ())
        if step.linears and step.action != "copy" and not (step.form and step.form.format.is_fp4)
    ]
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
