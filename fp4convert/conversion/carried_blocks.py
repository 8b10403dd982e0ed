"""Check and count the blocks that a conversion takes over bit for bit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.tables import is_reversible
from fp4convert.errors import InputError
from fp4convert.makers.maker import Cast
from fp4convert.numerics.matrices import Blocks, row_panels
from fp4convert.planning.plan import Plan
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.gguf import Q8_0
from fp4convert.storage.source import Source


class CarriedModule(NamedTuple):
    """A module whose blocks stay, or are cast."""

    module: str
    stored: Blocks
    input_scale: float | None = None


def check_carried(plan: Plan) -> None:
    """Check the scales of every linear layer whose blocks a plan takes over."""
    spelling = dialect_named(str(plan.target.dialect))
    for step in plan.steps:
        if step.action == "transcode":
            for linear in step.linears:
                if blocks := linear.coding.blocks(linear):
                    check_scalars(linear.module, blocks, None, spelling)


def refuse_odd_scale(module: str, q: Blocks) -> None:
    """Raise InputError where a global scale is no positive number.

    It would make every value of its module wrong.
    """
    if q.global_scale is not None and not 0 < q.global_scale < math.inf:
        detail = f"{module}: its global scale is {q.global_scale}; expected a positive number"
        raise InputError("global-scale", detail, "See: fp4convert inspect.", module)


def check_scalars(module: str, q: Blocks, input_scale: float | None, spelling: Dialect) -> None:
    """Check the global scale of a module, and its spelling in a dialect.

    Raises  InputError for one that is no positive number, or that the dialect cannot say; also for
            an input scale that it cannot say
    """
    refuse_odd_scale(module, q)
    try:
        for _ in spelling.TRAITS.scalars.encode(module, q, input_scale):
            pass
    except InputError as error:
        message = error.message if module in error.message else f"{module}: {error.message}"
        raise InputError(error.code, message, error.next_step, module) from None


def check_block_scales(module: str, q: Blocks, spelling: Dialect) -> None:
    """Refuse block scales that engines of the dialect would misread."""
    highest = spelling.TRAITS.highest_scale.get(q.format)
    if highest is None:
        return
    sayable = bytes(range(highest + 1))
    panels = (q.rows(first, last) for first, last in row_panels(q.shape))
    if count := sum(len(bytes(rows.block_scales).translate(None, sayable)) for rows in panels):
        found = f"{module} has {count} block scales with a sign, or that are NaN"
        detail = f"{found}; engines would read them as other numbers"
        raise InputError("dialect-block-scale", detail, "See: fp4convert inspect --full.", module)


def taken_over(plan: Plan, has_inputs: bool) -> Iterator[CarriedModule]:
    """Yield every linear layer whose blocks a plan takes over.

    has_inputs  with its scale of activations, which goes along
    """
    for step in plan.steps:
        for linear in step.linears if step.form and step.form.format.is_fp4 else ():
            artifact, module = linear.coding.artifact, linear.module
            if step.action == "transcode" and (blocks := linear.coding.blocks(linear)):
                scale = artifact.stored_input_scale(module) if artifact and has_inputs else None
                yield CarriedModule(module, blocks, scale)


def count_casts(plan: Plan, source: Source) -> dict[str, Cast]:
    """Count the blocks of every module that is cast, by module."""
    makers = {id(step.maker): step.maker for step in plan.steps}
    return {cast.module: cast for maker in makers.values() for cast in maker.casts(source)}


def describe_carried(
    plan: Plan, source: Source, order: Iterable[str] | None = None
) -> dict[str, object]:
    """Count the modules that keep every bit, and name those that do not.

    Layers that draft tokens are counted by themselves, too.

    order    of the modules of an artifact that is transcoded: its modules of eight bits count, too.
             `floats` are those among them that became ordinary weights, `q8_0` GGUF's blocks
    rounded  their global scale or input scale is stored as its reciprocal, whose reciprocal is
             another float32
    lossy    modules that are cast, with blocks that change; blocks, kept_blocks count those of all
    """
    kind = dialect_named(str(plan.target.dialect)).TRAITS.global_scale_kind
    is_draft, casts = model_recipe(source.checkpoint.config).is_draft, count_casts(plan, source)
    modules = [*taken_over(plan, has_inputs=order is not None)]
    if order is not None:
        place = {module: number for number, module in enumerate(order)}
        modules.sort(key=lambda one: place[one.module])
    rounded = []
    for module, stored, input_scale in modules:
        scalars = (stored.global_scale, input_scale)
        if kind and kind != stored.kind and not all(map(is_reversible, scalars)):
            rounded.append(module)
    known = [one.module for one in modules]
    lossy = [name for name in known if name in casts and casts[name].is_lossy]
    lossy += [name for name, cast in casts.items() if name not in known and cast.is_lossy]
    count, became = len({*known, *casts}), defaultdict[str, int](int)
    for step in plan.steps if order is not None else ():
        # A matrix that stays, in the type of --keep-dtype, is no module.
        if not step.linears or step.action == "copy" or (step.form and step.form.format.is_fp4):
            continue
        count += len(step.linears)
        if not step.is_made:
            key = Q8_0.lower() if step.outputs[0].dtype == Q8_0 else "floats"
            became[key] += len(step.linears)
    document: dict[str, object] = {
        "modules": count,
        "bit_for_bit": count - len(rounded) - len(lossy) - sum(became.values()),
        "rounded": rounded,
        **became,
    }
    if casts:
        document |= {"lossy": lossy, **_count(casts.values())}
    if drafts := [cast for module, cast in casts.items() if is_draft(module)]:
        document["draft"] = {"modules": len(drafts), **_count(drafts)}
    return document


def _count(casts: Iterable[Cast]) -> dict[str, int]:
    """Add up the blocks of modules that are cast."""
    both = [(cast.blocks, cast.kept_blocks) for cast in casts]
    return dict(zip(("blocks", "kept_blocks"), map(sum, zip(*both, strict=True)), strict=True))
