"""Join recipe files and options into one Recipe for one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fp4convert.errors import InputError, did_you_mean
from fp4convert.numerics.formats import IMPORTANCE, NVFP4, Format, check_rule, format_named
from fp4convert.recipes.options import (
    KEEP,
    NOTHING_CHOSEN,
    SAME,
    STACK_ORDERS,
    STACK_ROWS,
    RecipeOptions,
    as_globs,
)
from fp4convert.recipes.patterns import (
    compiled,
    configs_in,
    expand_all,
    integer_of,
    matches,
    matches_any,
    sift,
)
from fp4convert.recipes.rules import (
    ExpertsRule,
    FoldRule,
    FormatRule,
    KeepRule,
    OnlyRule,
    Patterns,
    StackRule,
)
from fp4convert.recipes.toml_files import (
    ANY_FORMAT,
    DEFAULT,
    RecipeFile,
    chosen_files,
    families_of,
    known_file,
)
from fp4convert.storage.safetensors import WEIGHT

FUSED = {  # last parts of names that hold a gate and an up projection, whoever made the model
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "w13_weight": ("w1", "w3"),
}
EXPERT_WORDS = ("expert", ".moe.", "_moe.")
# What stands beside a stack, one for each expert.
BESIDE_STACKS = ("_scale", "_scales", "_scale_inv", "_bias", ".bias")
STACK_DIMENSIONS = 3
PREDICTION = "prediction"  # the kind of rules on layers that draft tokens


class ScaleGroup(NamedTuple):
    """Sibling modules that engines multiply as one matrix.

    They share one amax; members are their names below one parent.
    """

    parent: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        """Return its name in steps and records; dry_run.py reads it."""
        return f"{self.parent}.{'/'.join(self.members)}"


class Target(NamedTuple):
    """What is made: a four-bit format, a float type, or nothing new.

    By a dialect and a rule it is four-bit; by neither it is dequantized, or pruned.

    format          its name, or the word of the float type, or "pruned", as documents call it
    scale_layout    the dialect's own where it is None
    has_unit_scale  the global scale is 1, whatever the weights are: engines read no other
    via             "fp8" where weights are rounded to FP8 first
    method          by which weights are rounded, one of METHODS; None where none are,
                    or nobody knows
    calibration     sha256 of the file of statistics that they were rounded with
    keep_dtype      a word for the type of float32 matrices that stay, but for routers; None leaves
                    them as they are
    adapter         hash of the adapter's files and scale that were merged before
    damping         of gptq: what share of H's mean diagonal is added to it
    passes          of gptq: how often codes and block scales are gone over afterwards
    """

    format: str
    dialect: str | None = None
    scale_rule: str | None = None
    activations: int = 16
    scale_layout: str | None = None
    kv_cache: str | None = None
    has_unit_scale: bool = False
    via: str | None = None
    method: str | None = None
    calibration: str | None = None
    keep_dtype: str | None = None
    adapter: str | None = None
    damping: float | None = None
    passes: int | None = None

    def rule_for(self, fmt: Format) -> str:
        """Choose the scale rule of modules of a format.

        The target's own where it is the target's format, or has that rule too.
        """
        is_known = self.scale_rule == IMPORTANCE and IMPORTANCE in fmt.scale_rules
        is_own = fmt.name == self.format or is_known
        return self.scale_rule if self.scale_rule and is_own else fmt.default_rule


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made, what stays, what shares a scale, what is a stack.

    kept_patterns  those of all rules of keep
    only_patterns  those of all rules of only
    formats        the first that fits a module counts
    stacks         the first that fits a tensor counts
    may_lack       members of groups that some layers of the model do not have
    folds          where scales of columns may be divided out; several rules may name one place
    options        what a person chose beside these
    keeps_packed   modules that are packed already and stay are not turned into bf16
    asked          patterns of a person's own file, by their table; one of each set has to match
    experts        the first counts
    draft          what engines want of layers that draft tokens, a word of DRAFTS; "" where no file
                   says
    asked_draft    what a person wants of them
    drafts         modules of such layers that are treated as those of the body
    """

    format: Format
    target: Target
    keep: tuple[KeepRule, ...]
    kept_patterns: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    only: tuple[OnlyRule, ...] = ()
    only_patterns: tuple[str, ...] = ()
    stacks: tuple[StackRule, ...] = ()
    formats: tuple[FormatRule, ...] = ()
    may_lack: frozenset[str] = frozenset()
    folds: tuple[FoldRule, ...] = ()
    options: RecipeOptions = NOTHING_CHOSEN
    experts: tuple[ExpertsRule, ...] = ()
    keeps_packed: bool = False
    asked: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    draft: str = ""
    asked_draft: str | None = None
    drafts: frozenset[str] = frozenset()

    @property
    def include(self) -> tuple[str, ...]:
        return as_globs(self.options.include)

    @property
    def exclude(self) -> tuple[str, ...]:
        return as_globs(self.options.exclude)

    def reason_to_keep(self, module: str) -> str | None:
        """Return why a module stays; None where it is quantized.

        --exclude goes before --include before [[format]] before [[keep]] before [[only]]; a
        [[format]] that names the module leaves only what engines do not read in fewer bits.
        """
        if matches_any(self.exclude, module):
            return next(
                f"excluded by {pattern!r}" for pattern in self.exclude if matches(pattern, module)
            )
        if matches_any(self.include, module):
            return None
        override = self.override(module)
        if override == KEEP:
            return "kept by a [[format]] of the recipe"
        if rule := self._rule_for(module, is_overridden=override is not None):
            return rule.reason
        if self.only_patterns and override is None and not matches_any(self.only_patterns, module):
            return self.only[-1].reason
        return None

    def pick_doubtful(self, modules: Collection[str]) -> set[str]:
        """Pick the modules that there may be a reason to keep.

        Perhaps too many, never too few: the others are asked about no more.  Every pattern that
        `reason_to_keep` may find a reason in belongs here.
        """
        if self.only_patterns:
            return set(modules)
        kept = (
            pattern for rule in self.formats if rule.format == KEEP for pattern in rule.patterns
        )
        return set(sift((*self.exclude, *kept, *self.kept_patterns), modules))

    def format_of(self, module: str) -> str:
        """Name the format that a module becomes where it does not stay."""
        override = self.override(module)
        return self.target.format if override in (None, KEEP, ANY_FORMAT) else str(override)

    @property
    def module_formats(self) -> set[str]:
        """Name all formats that modules become."""
        return {
            self.target.format,
            *(rule.format for rule in self.formats if rule.format not in (KEEP, ANY_FORMAT)),
        }

    def pick_asked_for(self, modules: Collection[str]) -> set[str]:
        """Pick the modules that a person or a [[format]] names.

        They may then become four-bit though a rule of keep fits them. Those of layers that draft
        tokens are among them.
        """
        named = (pattern for rule in self.formats for pattern in rule.patterns)
        return {*sift((*self.include, *named), modules), *self.drafts.intersection(modules)}

    def is_draft(self, module: str) -> bool:
        """Tell whether it is of a layer that drafts tokens."""
        return matches_any(self.patterns_of(PREDICTION), module)

    @property
    def takes_drafts(self) -> bool:
        """Tell whether such layers become what the layers of the body do."""
        return (self.asked_draft or self.draft) == SAME

    def kind_of(self, module: str) -> str:
        """Return what rules of keep take a module for; "" where none speaks."""
        rule = self._rule_for(module)
        return rule.kind if rule else ""

    def patterns_of(self, kind: str) -> tuple[str, ...]:
        """List the patterns of all rules of keep of a kind."""
        return tuple(
            pattern for rule in self.keep if rule.kind == kind for pattern in rule.patterns
        )

    def stack_rule(self, tensor: str, shape: tuple[int, ...] = ()) -> StackRule | None:
        """Find how a tensor stacks the matrices of experts.

        A person's stack_order and stack_rows settle the tensors that no recipe names, and go before
        what one says.

        shape    (experts, ...) of the tensor; decides, with config.json, where checkpoints of both
                 orders are in use
        Returns  None where nobody says so
        Raises   InputError where the shape does not decide, and no stack_order is chosen
        """
        order, rows = self.options.stack_order, self.options.stack_rows
        rule = next((rule for rule in self.stacks if matches_any(rule.tensors, tensor)), None)
        if rule is None:
            leaf = tensor.removesuffix(WEIGHT).rpartition(".")[2]
            if not is_expert_stack(tensor, shape) or order is None:
                return None
            if leaf in FUSED and rows is None:
                return None
            members = FUSED.get(leaf, (leaf,))
            is_interleaved = rows == "interleaved" and leaf in FUSED
            return StackRule((tensor,), members, order == "in_out", is_interleaved)

        # A person's order, or that in which the tensor has as many inputs as config.json says.
        if order is not None:
            rule = rule._replace(is_transposed=order == "in_out")
        elif rule.inputs is not None and shape:
            axes = range(1, min(len(shape), STACK_DIMENSIONS))
            fitting = [axis for axis in axes if shape[axis] == rule.inputs]
            if len(fitting) != 1:
                detail = (
                    f"{tensor} is {list(shape)}, and {rule.inputs_key} is {rule.inputs}, "
                    "which does not show which axis is inputs"
                )
                next_step = f"Say --stack-order {' or '.join(STACK_ORDERS)}."
                raise InputError("stack-order", detail, next_step, tensor)
            rule = rule._replace(is_transposed=fitting == [1])
        is_interleaved = rule.is_interleaved if rows is None else rows == "interleaved"
        return rule._replace(is_interleaved=is_interleaved and len(rule.members) > 1)

    def override(self, module: str) -> str | None:
        """Return the word of the first [[format]] that names a module."""
        for rule in self.formats:
            if matches_any(rule.patterns, module):
                return rule.format
        return None

    def _rule_for(self, module: str, is_overridden: bool = False) -> KeepRule | None:
        """Find the first rule of keep that fits a module."""
        if not matches_any(self.kept_patterns, module):  # of most modules this is all that is asked
            return None
        fitting = (rule for rule in self.keep if rule.fits(module))
        is_draft = module in self.drafts
        return next(
            (
                rule
                for rule in fitting
                if not (is_overridden and rule.is_for_accuracy)
                and not (is_draft and rule.kind == PREDICTION)
            ),
            None,
        )

    def patterns_to_declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[str, ...]:
        """List patterns of modules that stay, for the engines' records.

        Short ones, true under the engines' own prefixes: those that fit something kept, or may be
        tied and absent; none that fits a quantized module.

        quantized  those of them that a pattern may fit
        """
        named = [rule.patterns for rule in self.formats if rule.format == KEEP]
        asked = [(patterns, False) for patterns in (self.exclude, *named)]
        rules = [*asked, *((rule.patterns, rule.may_be_absent) for rule in self.keep)]
        fitting = tuple(
            pattern
            for patterns, may_be_absent in rules
            for pattern in patterns
            if may_be_absent or any(matches(pattern, module) for module in kept)
        )
        # few, where modules are many
        fitted = [module for module in quantized if matches_any(fitting, module)]
        return tuple(
            pattern for pattern in fitting if not any(matches(pattern, module) for module in fitted)
        )


def build_recipe(
    target: Target, config: Mapping[str, object], options: RecipeOptions = NOTHING_CHOSEN
) -> Recipe:
    """Build the recipe for the model of a config.json.

    target  a scale_rule of None is the format's own
    config  its model_types and class names pick family files, its numbers of layers fill ranges in
            patterns
    Raises  InputError for what no format, dialect or recipe has
    """
    fmt = format_named(target.format)
    # What a person chose is refused before any file is read.
    for pattern in (*as_globs(options.include), *as_globs(options.exclude)):
        compiled(pattern)
    for option, given, words in (
        ("--stack-order", options.stack_order, STACK_ORDERS),
        ("--stack-rows", options.stack_rows, STACK_ROWS),
    ):
        if given is not None and given not in words:
            detail = f"{option} {given!r} is not known; expected {' or '.join(words)}"
            detail += did_you_mean(given, words)
            raise InputError("unknown-stack", detail, "Give one of these, or leave it out.")
    if options.stack_rows is not None and options.stack_order is None:
        detail = "--stack-rows says how gate and up share a stack; expected --stack-order with it"
        raise InputError("unknown-stack", detail, f"Add --stack-order {' or '.join(STACK_ORDERS)}.")

    written = _find_files(config, options.recipe)
    files = [_fill_ranges(file, config) for file in written]
    # The most special file says first how modules are stored, grouped and made.
    later_first = files[::-1]
    keep = tuple(rule for file in later_first for rule in file.keep)
    only = tuple(rule for file in files for rule in file.only)
    return Recipe(
        fmt,
        target._replace(scale_rule=check_rule(fmt, target.rule_for(fmt))),
        keep,
        kept_patterns=tuple(pattern for rule in keep for pattern in rule.patterns),
        groups=tuple(group for file in later_first for group in file.groups),
        only=only,
        only_patterns=tuple(pattern for rule in only for pattern in rule.patterns),
        stacks=tuple(rule for file in later_first for rule in file.stacks),
        formats=tuple(rule for file in later_first for rule in file.formats),
        may_lack=frozenset(member for file in files for member in file.may_lack),
        folds=tuple(rule for file in later_first for rule in file.folds),
        options=options,
        experts=tuple(rule for file in later_first for rule in file.experts),
        asked=_asked_in(zip(files[::-1], written[::-1], strict=True)),
        draft=next((file.draft for file in later_first if file.draft), ""),
    )


def _asked_in(
    files: Iterable[tuple[RecipeFile, RecipeFile]],
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the patterns of users' files that have to match some module.

    files  with the layer numbers of a model in their patterns, and as they are written, which
           stands where a rule's ranges hold no number
    """
    asked: dict[str, tuple[tuple[str, ...], ...]] = {}
    for file, written in files:
        if file.is_users:
            kept = zip(file.keep, written.keep, strict=True)
            keep = tuple(
                rule.patterns or plain.patterns for rule, plain in kept if not rule.may_be_absent
            )
            made = zip(file.formats, written.formats, strict=True)
            formats = tuple(tuple(rule.patterns or plain.patterns) for rule, plain in made)
            asked |= {f"{file.name}: [[keep]]": keep, f"{file.name}: [[format]]": formats}
    return asked


def model_recipe(config: Mapping[str, object], options: RecipeOptions = NOTHING_CHOSEN) -> Recipe:
    """Build what recipes know of a model of which nothing is quantized.

    Experts, stacks, groups, kinds of modules; its format and its target mean nothing.

    Raises  InputError as build_recipe does
    """
    return build_recipe(Target(NVFP4.name), config, options)


def is_expert_stack(tensor: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor holds the matrices of several experts.

    Names tell, not shapes, which those of convolutions have too.
    """
    is_stack = len(shape) == STACK_DIMENSIONS and not tensor.endswith(BESIDE_STACKS)
    return is_stack and any(word in tensor for word in EXPERT_WORDS)


def group_members(config: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Name the modules that share a scale, for the model of a config.json."""
    return tuple(group for file in _find_files(config, None)[::-1] for group in file.groups)


def scale_groups(
    modules: Iterable[str], groups: tuple[tuple[str, ...], ...]
) -> dict[str, ScaleGroup]:
    """Find the scale group of each module; one that stands alone is left out."""
    members_of = {leaf: members for members in reversed(groups) for leaf in members}
    found = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        if members := members_of.get(leaf):
            found[module] = ScaleGroup(parent, members)
    return found


def gather_groups(group_of: Mapping[str, ScaleGroup | None]) -> dict[ScaleGroup, list[str]]:
    """List the modules of each scale group."""
    found: dict[ScaleGroup, list[str]] = defaultdict(list)
    for module, group in group_of.items():
        if group:
            found[group].append(module)
    return found


def _find_files(config: Mapping[str, object], recipe: str | None) -> list[RecipeFile]:
    """Find default.toml, then the model's families, then what was chosen."""
    values = (one.get(key) for one in configs_in(config) for key in ("model_type", "_class_name"))
    families = families_of(value for value in values if isinstance(value, str))
    chosen = chosen_files(recipe) if recipe is not None else []
    return list({file.name: file for file in (known_file(DEFAULT), *families, *chosen)}.values())


def _fill_ranges(file: RecipeFile, config: Mapping[str, object]) -> RecipeFile:
    """Put the layer numbers of a model into a file's patterns.

    Raises  InputError that names the file, for a range or an expression that is none
    """
    try:
        return file._replace(
            keep=tuple(
                rule._replace(
                    patterns=expand_all(rule.patterns, config),
                    unless=expand_all(rule.unless, config),
                )
                for rule in file.keep
            ),
            only=tuple(
                rule._replace(patterns=expand_all(rule.patterns, config)) for rule in file.only
            ),
            stacks=tuple(
                rule._replace(
                    tensors=expand_all(rule.tensors, config),
                    inputs=integer_of(config, rule.inputs_key),
                    experts=integer_of(config, rule.experts_key),
                )
                for rule in file.stacks
            ),
            formats=tuple(
                rule._replace(patterns=Patterns(expand_all(rule.patterns, config)))
                for rule in file.formats
            ),
            experts=tuple(
                rule._replace(
                    rows=expand_all(rule.rows, config), columns=expand_all(rule.columns, config)
                )
                for rule in file.experts
            ),
        )
    except InputError as error:
        raise InputError(error.code, f"{file.name}: {error.message}", error.next_step) from None
