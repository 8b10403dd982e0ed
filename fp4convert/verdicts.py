"""What becomes of every linear layer, and why: decided from its name, its shape and how it is stored; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp4convert.codings import Linear
from fp4convert.codings.fp4 import FourBit
from fp4convert.dialects import Dialect
from fp4convert.errors import InputError
from fp4convert.formats import FORMATS, MXFP4, NVFP4
from fp4convert.linears import Linears
from fp4convert.recipe import Recipe, ScaleGroup, scale_group
from fp4convert.shard import TensorRef
from fp4convert.spelling import Form
from fp4convert.tasks import MADE_FOUR_BIT, Action

Forms = Mapping[str, Form]  # of the modules that become each format


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one linear layer becomes.

    format  "" where it stays
    group   its scale group; None where it has its scale to itself
    """

    linear: Linear
    action: Action
    reason: str
    format: str = ""
    group: ScaleGroup | None = None

    @property
    def is_made(self) -> bool:
        return self.action in MADE_FOUR_BIT


def decide(linears: Linears, recipe: Recipe, dialect: Dialect, forms: Forms) -> dict[str, Verdict]:
    """The verdict on every linear layer, by module, in the order of the source.

    Raises InputError for stacks of experts that would be quantized if anybody told how they are stored
    """
    for stack in linears.unruled:
        _check_kept(stack, recipe)
    verdicts = {module: _verdict(linear, recipe, dialect, forms) for module, linear in linears.of.items()}
    return _agreed(verdicts)


def _verdict(linear: Linear, recipe: Recipe, dialect: Dialect, forms: Forms) -> Verdict:
    if reason := recipe.reason_to_keep(linear.module):
        return _stays(linear, "copy", reason)
    rows, columns = linear.shape
    if not rows * columns:
        return _stays(linear, "skip", "empty")
    name = recipe.format_of(linear.module)
    form = forms[name]
    if columns % form.format.block_size:
        return _stays(linear, "skip", f"{columns} columns, not a multiple of the block of {form.format.block_size}")
    if reason := dialect.unfit(linear.module, linear.shape, form):
        return _stays(linear, "skip", reason)
    group = scale_group(linear.module, recipe.groups) if form.format.has_global_scale else None
    if carried := _carried(linear, form, dialect):
        return Verdict(linear, "transcode", carried, name, group)
    origin = f", from {linear.coding.word}" if linear.coding.is_packed else ""
    return Verdict(linear, "quantize", f"a linear layer{origin}", name, group)


def _stays(linear: Linear, action: Action, reason: str) -> Verdict:
    """As it is; what is packed becomes bf16, for no engine would know what it was."""
    if linear.coding.is_packed:
        return Verdict(linear, "dequantize", f"{reason}; {linear.coding.word} becomes bf16")
    return Verdict(linear, action, reason)


def _carried(linear: Linear, form: Form, dialect: Dialect) -> str:
    """Why its blocks are taken over as they are, or with a power of two; "" where they are not."""
    coding = linear.coding
    if not isinstance(coding, FourBit):
        return ""
    if form.format.has_global_scale and not dialect.TRAITS.global_scale_kind:
        return ""  # the values must fit a global scale of 1
    if coding.format is form.format:
        return f"{coding.word} already: the same codes and scales"
    return "mxfp4, whose blocks nvfp4 can say" if (coding.format, form.format) == (MXFP4, NVFP4) else ""


def _agreed(verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    """The same, but that no scale group takes over the blocks of some members and quantizes others."""
    groups: dict[ScaleGroup, list[str]] = defaultdict(list)
    for module, verdict in verdicts.items():
        if verdict.group and verdict.is_made:
            groups[verdict.group].append(module)
    for modules in groups.values():
        if len({(verdicts[module].action, verdicts[module].linear.coding.word) for module in modules}) > 1:
            for module in modules:
                if verdicts[module].action == "transcode":
                    reason = f"a linear layer, from {verdicts[module].linear.coding.word}"
                    verdicts[module] = replace(verdicts[module], action="quantize", reason=reason)
    return verdicts


def _check_kept(stack: TensorRef, recipe: Recipe) -> None:
    """InputError for a stack whose layout nobody tells, unless it stays anyway."""
    if recipe.reason_to_keep(stack.name.removesuffix(".weight")):
        return
    detail = f"{stack.file}: {stack.name} {list(stack.shape)} stacks matrices of experts, and no recipe tells how this model does"
    expected = (
        "expected --stack-order out_in or in_out, and where a matrix holds gate and up --stack-rows concatenated or interleaved"
    )
    next_step = "See the model's own code for both (x @ W is in_out, W @ x out_in); or keep them: --exclude '*experts*'."
    raise InputError("unknown-stack", f"{detail}; {expected}", next_step, stack.name)


def gathered(verdicts: Mapping[str, Verdict]) -> dict[ScaleGroup, list[Linear]]:
    """The members of every scale group that become four-bit."""
    found: dict[ScaleGroup, list[Linear]] = defaultdict(list)
    for verdict in verdicts.values():
        if verdict.group and verdict.is_made and FORMATS[verdict.format].has_global_scale:
            found[verdict.group].append(verdict.linear)
    return found


def incomplete_groups(groups: Mapping[ScaleGroup, list[Linear]]) -> list[str]:
    """One warning for each kind of group that lacks members somewhere."""
    lacking: dict[tuple[str, ...], list[ScaleGroup]] = defaultdict(list)
    for key, linears in groups.items():
        if len(linears) < len(key.members):
            lacking[key.members].append(key)
    if not lacking:
        return []
    present = {linear.module.rpartition(".")[2] for linears in groups.values() for linear in linears}
    return [_incomplete(members, keys, present) for members, keys in lacking.items()]


def _incomplete(members: tuple[str, ...], keys: list[ScaleGroup], present: set[str]) -> str:
    where = f"{len(keys)} scale groups {'/'.join(members)} lack members, the first in {keys[0].parent!r}"
    nowhere = [member for member in members if member not in present]
    if nowhere:
        return f"{where}: no {' and no '.join(nowhere)} is quantized anywhere, which is right only where the model has none"
    return f"{where}: engines that fuse them need all of them quantized, or none"
