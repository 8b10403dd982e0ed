"""Decide what becomes of every linear layer, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fp4convert.checkpoint.architectures import TRANSPOSED
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import Form, keeps_powers
from fp4convert.checkpoint.dialects.target_forms import check_forms, form_of, module_form
from fp4convert.checkpoint.encodings.base import Linear, is_fp8
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES, INT4, MXFP4, NVFP4, Format, format_named
from fp4convert.planning.kept_dtype import expanded_spec, held_form, unheld, word_of
from fp4convert.planning.steps import Action, Task
from fp4convert.progress import are_text, count_text
from fp4convert.recipes.draft_layers import find_differing, is_draft_head
from fp4convert.recipes.options import KEEP
from fp4convert.recipes.patterns import matches_any
from fp4convert.recipes.recipe import Recipe, ScaleGroup, gather_groups, scale_groups
from fp4convert.recipes.uneven_formats import EXPERTS, find_uneven
from fp4convert.storage.safetensors import WEIGHT, TensorRef

# The figure: ModelOpt, examples/speculative_decoding/scripts/quantize_drafter.py, of Qwen3-8B.
HEAD_NOTE = (
    "this is a draft head: engines serve it beside its model, in the format of its own record; in"
    " NVFP4 about 4 % fewer tokens are accepted at a time, as NVIDIA measured one"
)
NAME_SOME = (
    "Name modules to quantize: --include 'PATTERN'; what a recipe keeps: fp4convert recipes."
)


class Verdict(NamedTuple):
    """The decision on one linear layer.

    form   in the result; None for an ordinary tensor
    group  its scale group; None where it has its own scale
    stays  it would be an ordinary tensor, but stays packed
    """

    linear: Linear
    action: Action
    reason: str
    form: Form | None = None
    group: ScaleGroup | None = None
    stays: bool = False

    @property
    def is_made(self) -> bool:
        return self.form is not None


def decide(linears: Linears, recipe: Recipe, dialect: Dialect) -> dict[str, Verdict]:
    """Decide what becomes of every linear layer.

    Returns  verdicts by module, in the order of the source
    Raises   InputError for stacks of experts with an unknown layout that would be quantized, and
             for forms that the dialect cannot hold beside each other
    """
    for stack in linears.unruled:
        _check_kept(stack, recipe)
    verdicts = judge_each(linears.of, recipe, dialect, linears.judged.kept)
    forms = [verdict.form for verdict in verdicts.values() if verdict.form]
    check_forms(recipe.target, forms)
    is_asked = format_named(recipe.target.format).is_fp4
    if forms and is_asked and not any(form.format.is_fp4 for form in forms):
        words = " and ".join(form.word for form in dict.fromkeys(forms))
        detail = f"every module becomes or stays {words}, none {recipe.target.format}"
        next_step = "Leave some modules out of the recipe's [[format]] rows."
        if any(verdict.form and verdict.stays for verdict in verdicts.values()):
            next_step = "Exclude fewer modules, so that some are quantized."
        raise InputError("no-four-bit", f"{detail}; expected modules of four bits", next_step)
    # A scale group is quantized whole where only some of its members would be taken over.
    taken_over = {verdict.group for verdict in verdicts.values() if verdict.action == "transcode"}
    groups = gather_groups(
        {
            module: verdict.group
            for module, verdict in verdicts.items()
            if verdict.group in taken_over
        }
    )
    for modules in groups.values():
        members = [verdicts[module] for module in modules]
        if len({(verdict.action, verdict.linear.coding.word) for verdict in members}) > 1:
            for module, verdict in zip(modules, members, strict=True):
                if verdict.action == "transcode":
                    reason = _origin(verdict.linear)
                    verdicts[module] = verdict._replace(action="quantize", reason=reason)
    return verdicts


def judge_each(
    linears: Mapping[str, Linear],
    recipe: Recipe,
    dialect: Dialect,
    kept: Mapping[str, str],
) -> dict[str, Verdict]:
    """Decide on each of these linear layers, whatever the others become.

    kept  names of weights that the model's class does not hold as linear layers, and reasons
    """
    forms = {name: module_form(recipe.target, name) for name in recipe.module_formats}
    groups = scale_groups(linears, recipe.groups)
    doubtful = recipe.pick_doubtful(linears)
    judge = _Judge(recipe, dialect, forms, groups, doubtful, kept)
    return {module: judge.verdict(linear) for module, linear in linears.items()}


class _Judge(NamedTuple):
    """Decides on one linear layer after the other.

    forms    by the name of the format
    groups   scale groups by module
    doubtful modules that the recipe may keep, and is asked about one by one
    kept     names of weights that the class does not hold as linear layers, and reasons
    """

    recipe: Recipe
    dialect: Dialect
    forms: Mapping[str, Form]
    groups: Mapping[str, ScaleGroup]
    doubtful: Collection[str]
    kept: Mapping[str, str]

    def verdict(self, linear: Linear) -> Verdict:
        if reason := self._reason_to_keep(linear):
            return self._stays(linear, "copy", reason)
        rows, columns = linear.shape
        if not rows * columns:
            return self._stays(linear, "skip", "empty")
        form = self.forms[self.recipe.format_of(linear.module)]
        fmt = form.format
        if fmt.block_size and columns % fmt.block_size:
            return self._stays(
                linear,
                "skip",
                f"{columns} columns, not a multiple of the block of {fmt.block_size}",
            )
        if reason := self.dialect.unfit(linear.module, linear.shape, form):
            return self._stays(linear, "skip", reason)
        # The residual of a correction has its own scale.
        is_shared = fmt.has_global_scale and form.rank is None
        group = self.groups.get(linear.module) if is_shared else None
        stored = _in_eight_bits(linear)
        is_same = fmt.is_fp8 and stored.coding.format is fmt
        if is_same and (own := held_form(stored, self.recipe.target)):
            return Verdict(
                stored,
                "copy",
                f"{stored.coding.word} already: the same codes and scales",
                own,
                group,
                stays=True,
            )
        if form.rank is None and (carried := self._carried(linear, fmt)):
            return Verdict(linear, "transcode", carried, form, group)
        return Verdict(linear, "quantize", _origin(linear), form, group)

    def _reason_to_keep(self, linear: Linear) -> str | None:
        """Return why it stays; None where it does not.

        --exclude and --include may also name its stack.
        """
        stack = linear.stack.name.removesuffix(WEIGHT) if linear.stack else ""
        if stack and (
            matches_any(self.recipe.exclude, stack) or matches_any(self.recipe.include, stack)
        ):
            return self.recipe.reason_to_keep(stack)
        if linear.module in self.doubtful and (
            reason := self.recipe.reason_to_keep(linear.module, linear.shape)
        ):
            return reason
        return None if linear.stack else self._reason_by_type(linear.module)

    def _reason_by_type(self, module: str) -> str | None:
        """Return why the class keeps a module that nobody asks for by name.

        A transposed weight stays whoever asks: its blocks would run along the wrong axis.
        """
        reason = self.kept.get(module + WEIGHT)
        is_asked = (
            reason
            and not reason.startswith(TRANSPOSED)
            and (matches_any(self.recipe.include, module) or self.recipe.override(module))
        )
        return None if is_asked else reason

    def _stays(self, linear: Linear, action: Action, reason: str) -> Verdict:
        """Keep a linear layer; a packed one becomes bf16, or stays packed.

        Without --keep-packed it becomes bf16: no record would describe it to engines.
        """
        is_grafted = (stored := _in_eight_bits(linear)) is not linear
        linear, word = stored, stored.coding.word
        if not linear.coding.is_packed or linear.coding.is_at_home:
            return Verdict(linear, action, reason)
        if not (self.recipe.keeps_packed or is_grafted) or linear.coding.change:
            change = f", {linear.coding.change}" if linear.coding.change else ""
            spec = expanded_spec(linear.module + WEIGHT, linear.shape, self.recipe)
            became = f"{word} becomes {word_of(spec.dtype)}{change}"
            return Verdict(linear, "dequantize", f"{reason}; {became}")
        beside = (form_of(self.recipe.target).format,)
        form = held_form(linear, self.recipe.target, beside)
        if form is None and (cast := self._cast_draft(linear)):
            return cast._replace(reason=f"{reason}; {cast.reason}")
        if form is None:
            option = "--base" if is_grafted else "--keep-packed"
            next_step = f"Leave {option} out, and it becomes bf16; or choose another --dialect."
            raise unheld(linear, self.recipe.target, next_step, beside)
        action = "transcode" if form.format.is_fp4 else "copy"
        return Verdict(linear, action, f"{reason}; kept as {word}", form, stays=True)

    def _cast_draft(self, linear: Linear) -> Verdict | None:
        """Cast a draft layer that the dialect cannot hold as it is.

        None where a cast is not exact, or --draft keep is given.
        """
        recipe, module = self.recipe, linear.module
        if recipe.asked_draft == KEEP or not recipe.is_draft(module):
            return None
        form = self.forms[recipe.target.format]
        carried = self._carried(linear, form.format)
        if not carried or self.dialect.unfit(module, linear.shape, form):
            return None
        group = self.groups.get(module) if form.format.has_global_scale else None
        return Verdict(linear, "transcode", carried, form, group, stays=True)

    def _carried(self, linear: Linear, fmt: Format) -> str:
        """Return why its blocks are taken over; "" where they are not."""
        coding = linear.coding
        if coding.format is None or not coding.format.is_fp4:
            return ""
        if fmt.has_global_scale and not self.dialect.TRAITS.global_scale_kind:
            return ""  # the values must fit a global scale of 1
        if coding.format is fmt:
            return f"{coding.word} already: the same codes and scales"
        return (
            "mxfp4, whose blocks nvfp4 represents exactly"
            if (coding.format, fmt) == (MXFP4, NVFP4)
            else ""
        )


def _in_eight_bits(linear: Linear) -> Linear:
    """Return a linear layer, as --base holds it if nothing changes it."""
    return linear if linear.coding.change or linear.eight is None else linear.eight


def _origin(linear: Linear) -> str:
    origin = (
        f"a linear layer, from {linear.coding.word}"
        if linear.coding.is_packed
        else "a linear layer"
    )
    return f"{origin}, {linear.coding.change}" if linear.coding.change else origin


def _check_kept(stack: TensorRef, recipe: Recipe) -> None:
    """Raise InputError for a stack of unknown layout that does not stay."""
    if recipe.reason_to_keep(stack.name.removesuffix(WEIGHT)):
        return
    detail = (
        f"{stack.file}: {stack.name} {list(stack.shape)} stacks matrices of experts, and no"
        " recipe says how they are stored"
    )
    expected = (
        "expected --stack-order out_in or in_out, and where a matrix holds gate and up"
        " --stack-rows concatenated or interleaved"
    )
    next_step = (
        "See the model's own code for both (x @ W is in_out, W @ x out_in); or keep them:"
        " --exclude '*experts*'."
    )
    raise InputError("unknown-stack", f"{detail}; {expected}", next_step, stack.name)


def _reasons_of_others(tasks: Iterable[Task], verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Return why weights stay that are no linear layers, by module."""
    weights = (
        (step.refs[0].name, step.reason)
        for task in tasks
        for step in task.steps
        if step.action in ("copy", "skip")
    )
    modules = ((name.removesuffix(WEIGHT), why) for name, why in weights if name.endswith(WEIGHT))
    return {module: why for module, why in modules if module not in verdicts}


def of_other_types(tasks: Iterable[Task]) -> list[str]:
    """Warn of matrices that stay because of their type."""
    skipped: dict[str, list[str]] = defaultdict(list)
    for step in (step for task in tasks for step in task.steps if step.action == "skip"):
        if step.refs[0].dtype not in FLOAT_TYPES:
            skipped[step.reason].append(step.refs[0].name)
    return [
        f"{count_text(len(names), 'weight')} left as in the source: {why}, the first"
        f" {names[0]!r}; converted to one of these before, they can be quantized"
        for why, names in skipped.items()
    ]


def uneven_groups(
    verdicts: Mapping[str, Verdict], recipe: Recipe, tasks: Iterable[Task]
) -> list[str]:
    """Warn of scale groups whose members differ, once for each kind.

    Some members stay, are absent, or become another format.
    """
    others = _reasons_of_others(tasks, verdicts)
    uneven: dict[tuple[tuple[str, ...], str], list[ScaleGroup]] = defaultdict(list)
    for key, modules in gather_groups(scale_groups(verdicts, recipe.groups)).items():
        forms = [verdicts[module].form for module in modules]
        if len(forms) == len(key.members) and all(form is forms[0] for form in forms):
            continue
        members = {module.rpartition(".")[2]: verdicts[module].form for module in modules}
        staying = [member for member, form in members.items() if form is None]
        if len(staying) == len(members):
            continue
        absent = [member for member in key.members if member not in members]
        odd = {member: why for member in absent if (why := others.get(f"{key.parent}.{member}"))}
        missing = [member for member in absent if member not in {*odd, *recipe.may_lack}]
        words = dict.fromkeys(form.word for form in members.values() if form)
        differences = []
        if staying:
            verb = "are kept" if len(staying) > 1 else "is kept"
            differences.append(f"{' and '.join(staying)} {verb}")
        differences += [f"{member} stays as it is ({why})" for member, why in odd.items()]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            differences.append(f"{' and '.join(missing)} {verb} not there")
        if len(words) > 1:
            differences.append(f"members become {' and '.join(words)}")
        if differences:
            uneven[key.members, ", ".join(differences)].append(key)
    return [
        f"{len(keys)} scale {'groups' if len(keys) > 1 else 'group'} {'/'.join(members)}:"
        f" {what}, first in {keys[0].parent!r};"
        " engines that fuse them need all of them in one format, or none"
        for (members, what), keys in uneven.items()
    ]


def warnings_on_four_bits(verdicts: Mapping[str, Verdict], recipe: Recipe) -> list[str]:
    """Warn of uneven experts, draft layers, and modules rounded again."""
    words = {name: verdict.form.word if verdict.form else "" for name, verdict in verdicts.items()}
    drafts = [f"{found}; {found.consequence}" for found in find_differing(words, recipe)]
    head = [HEAD_NOTE] if is_draft_head(verdicts) else []
    return [*uneven_experts(verdicts), *head, *drafts, *rounded_again(verdicts)]


def rounded_again(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Warn of packed modules that are rounded a second time.

    FP8, and int4 of experts alone, are left out: models are trained and published so. Blocks that
    keep their values are left out, too.
    """
    again: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, verdict in verdicts.items():
        coding, form = verdict.linear.coding, verdict.form
        if form is None or verdict.action != "quantize" or keeps_powers(coding.format, form):
            continue
        if coding.is_packed and not is_fp8(verdict.linear):
            again[coding.word, form.word].append(module)
    return [
        f"{are_text(len(modules), 'module')} {word} and rounded again to {other}, the first"
        f" {modules[0]!r}: the errors add; start from the original weights if you can"
        for (word, other), modules in again.items()
        if not word.startswith(INT4.name) or not all(EXPERTS in module for module in modules)
    ]


def uneven_experts(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Warn where experts of a layer are quantized in part."""
    words = {
        module: verdict.form.word if verdict.form else ""
        for module, verdict in verdicts.items()
        if EXPERTS in module
    }
    uneven = find_uneven(words, ())
    if not uneven:
        return []
    first = uneven[0]
    kept = first.modules.get("")
    why = f" ({verdicts[kept[0]].reason})" if kept else ""
    layers = f"{len(uneven)} layers" if len(uneven) > 1 else "a layer"
    return [
        f"the experts of {layers} are quantized in part: {first}{why}; engines that load the"
        " experts of a layer together load them wrong or not at all; to keep all of them:"
        " --exclude '*.experts.*'"
    ]
