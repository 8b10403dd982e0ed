"""Join recipe files and options into one Recipe for one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp4convert.errors import InputError
from fp4convert.numerics.formats import IMPORTANCE, NVFP4, Format, check_rule, format_named
from fp4convert.recipes.options import (
    NOTHING_CHOSEN,
    STACK_ORDERS,
    STACK_ROWS,
    RecipeOptions,
    as_globs,
)
from fp4convert.recipes.patterns import (
    compiled,
    configs_in,
    expand,
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
    KEEP,
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
BESIDE_STACKS = (
    "_scale",
    "_scales",
    "_scale_inv",
    "_bias",
    ".bias",
)  # what stands beside a stack, one for each expert
STACK_DIMENSIONS = 3


class ScaleGroup(NamedTuple):
    """Sibling modules that engines multiply as one matrix, and that share one amax: names below one parent."""

    parent: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        """Its name in steps and records; members are last parts of names, so dry_run.py reads them behind the last dot."""
        return f"{self.parent}.{'/'.join(self.members)}"


@dataclass(frozen=True, slots=True)
class Target:
    """What is made: a four-bit format by a dialect and a rule; by neither a float type (dequantized), or nothing new (pruned).

    format          its name, or the word of the float type, or "pruned", as documents and plans call it
    scale_layout    the dialect's own where it is None
    has_unit_scale  the global scale is 1, whatever the weights are: engines read no other
    via             "fp8" where weights are rounded to FP8 first
    method          by which weights are rounded, one of METHODS; None where none are, or nobody knows
    calibration     sha256 of the file of statistics that they were rounded with
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

    def rule_for(self, fmt: Format) -> str:
        """The scale rule of modules of that format: the target's own where it is the target's format, or has that rule too."""
        is_own = fmt.name == self.format or self.scale_rule == IMPORTANCE
        return self.scale_rule if self.scale_rule and is_own else fmt.default_rule


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made; what stays; which sibling modules share a scale; which tensors are stacks.

    kept_patterns  those of all rules of keep
    only_patterns  those of all rules of only
    formats        the first that fits a module counts
    stacks         the first that fits a tensor counts
    may_lack       members of groups that some layers of the model do not have
    folds          where scales of columns may be divided out; several rules may speak of one place
    options        what a person chose beside these
    keeps_packed   modules that are packed already and stay are not turned into bf16
    experts        the first counts
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

    @property
    def include(self) -> tuple[str, ...]:
        return as_globs(self.options.include)

    @property
    def exclude(self) -> tuple[str, ...]:
        return as_globs(self.options.exclude)

    def reason_to_keep(self, module: str) -> str | None:
        """Why that module stays, or None: --exclude before --include before [[format]] before [[keep]] before [[only]].

        A [[format]] that names the module leaves only what engines do not read in fewer bits.
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
        """The modules that there may be a reason to keep: perhaps too many, never too few; the others are asked about no more.

        Every pattern that `reason_to_keep` may find a reason in belongs here.
        """
        if self.only_patterns:
            return set(modules)
        kept = (
            pattern for rule in self.formats if rule.format == KEEP for pattern in rule.patterns
        )
        return set(sift((*self.exclude, *kept, *self.kept_patterns), modules))

    def format_of(self, module: str) -> str:
        """Name of the format that the module becomes where it does not stay."""
        override = self.override(module)
        return self.target.format if override in (None, KEEP, ANY_FORMAT) else str(override)

    @property
    def module_formats(self) -> set[str]:
        """Names of all formats that modules become."""
        return {
            self.target.format,
            *(rule.format for rule in self.formats if rule.format not in (KEEP, ANY_FORMAT)),
        }

    def is_asked_for(self, module: str) -> bool:
        """True where a person or a [[format]] names it: it may become four-bit though a rule of keep fits it."""
        return matches_any(self.include, module) or self.override(module) is not None

    def kind_of(self, module: str) -> str:
        """What the recipes' rules take a module for; nothing where none speaks of it."""
        rule = self._rule_for(module)
        return rule.kind if rule else ""

    def patterns_of(self, kind: str) -> tuple[str, ...]:
        """Patterns of the modules that rules of keep take for that, whichever rule speaks first."""
        return tuple(
            pattern for rule in self.keep if rule.kind == kind for pattern in rule.patterns
        )

    def stack_rule(self, tensor: str, shape: tuple[int, ...] = ()) -> StackRule | None:
        """How that tensor stacks the matrices of experts, or None where nobody says so.

        A person's stack_order and stack_rows settle the tensors that no recipe names, and go before what one says.

        shape   (experts, ...) of the tensor; decides, with config.json, where checkpoints of both orders are in use
        Raises  InputError where it does not, and no stack_order is chosen
        """
        order, rows = self.options.stack_order, self.options.stack_rows
        for rule in self.stacks:
            if matches_any(rule.tensors, tensor):
                return self._settled(rule, tensor, shape)
        leaf = tensor.removesuffix(WEIGHT).rpartition(".")[2]
        if not is_expert_stack(tensor, shape):
            return None
        if order is None or (leaf in FUSED and rows is None):
            return None
        return StackRule(
            (tensor,),
            FUSED.get(leaf, (leaf,)),
            order == "in_out",
            rows == "interleaved" and leaf in FUSED,
        )

    def _settled(self, rule: StackRule, tensor: str, shape: tuple[int, ...]) -> StackRule:
        """The rule with what a person says instead of it."""
        order, rows = self.options.stack_order, self.options.stack_rows
        if order is not None:
            rule = rule._replace(is_transposed=order == "in_out")
        elif rule.inputs is not None and shape:
            rule = self._turned(rule, tensor, shape)
        is_interleaved = rule.is_interleaved if rows is None else rows == "interleaved"
        return rule._replace(is_interleaved=is_interleaved and len(rule.members) > 1)

    def _turned(self, rule: StackRule, tensor: str, shape: tuple[int, ...]) -> StackRule:
        """The rule, in the order in which the tensor has as many inputs as config.json says."""
        fitting = [axis == 1 for axis in (1, 2) if axis < len(shape) and shape[axis] == rule.inputs]
        if len(fitting) == 1:
            return rule._replace(is_transposed=fitting[0])
        detail = f"{tensor} is {list(shape)}, and {rule.inputs_key} is {rule.inputs}, which does not tell inputs from outputs"
        raise InputError(
            "stack-order", detail, f"Say --stack-order {' or '.join(STACK_ORDERS)}.", tensor
        )

    def override(self, module: str) -> str | None:
        """The word of the first [[format]] that names it."""
        for rule in self.formats:
            if matches_any(rule.patterns, module):
                return rule.format
        return None

    def _rule_for(self, module: str, is_overridden: bool = False) -> KeepRule | None:
        if not matches_any(self.kept_patterns, module):  # of most modules this is all that is asked
            return None
        fitting = (rule for rule in self.keep if matches_any(rule.patterns, module))
        return next(
            (rule for rule in fitting if not (is_overridden and rule.is_for_accuracy)), None
        )

    def patterns_to_declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[str, ...]:
        """Patterns of modules that stay, for the engines' records: short, and true under the engines' own prefixes.

        Those that fit something kept, or may be tied and absent; none that fits a quantized module.

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
        fitted = [
            module for module in quantized if matches_any(fitting, module)
        ]  # rare, where modules are many
        return tuple(
            pattern for pattern in fitting if not any(matches(pattern, module) for module in fitted)
        )


def build_recipe(
    target: Target, config: Mapping[str, object], options: RecipeOptions = NOTHING_CHOSEN
) -> Recipe:
    """The recipe for the model of a config.json.

    target  a scale_rule of None is the format's own
    config  its model_types and class names pick family files, its numbers of layers fill ranges in patterns
    Raises  InputError for what no format, dialect or recipe has
    """
    fmt = format_named(target.format)
    _check(options)
    files = [_filled(file, config) for file in _files(config, options.recipe)]
    later_first = files[
        ::-1
    ]  # the most special says first how modules are stored, grouped and made
    keep = tuple(rule for file in later_first for rule in file.keep)
    only = tuple(rule for file in files for rule in file.only)
    return Recipe(
        fmt,
        replace(target, scale_rule=check_rule(fmt, target.rule_for(fmt))),
        keep,
        tuple(pattern for rule in keep for pattern in rule.patterns),
        tuple(group for file in later_first for group in file.groups),
        only,
        tuple(pattern for rule in only for pattern in rule.patterns),
        tuple(rule for file in later_first for rule in file.stacks),
        tuple(rule for file in later_first for rule in file.formats),
        frozenset(member for file in files for member in file.may_lack),
        tuple(rule for file in later_first for rule in file.folds),
        options,
        tuple(rule for file in later_first for rule in file.experts),
    )


def model_recipe(config: Mapping[str, object], options: RecipeOptions = NOTHING_CHOSEN) -> Recipe:
    """What recipes know of the model of a config.json where nothing is quantized: experts, stacks, groups, kinds of modules.

    Its format and its target mean nothing.  Raises InputError as build_recipe does.
    """
    return build_recipe(Target(NVFP4.name), config, options)


def is_expert_stack(tensor: str, shape: tuple[int, ...]) -> bool:
    """True for matrices of experts in one tensor: their names tell, not their shapes, which those of convolutions have too."""
    is_stack = len(shape) == STACK_DIMENSIONS and not tensor.endswith(BESIDE_STACKS)
    return is_stack and any(word in tensor for word in EXPERT_WORDS)


def group_members(config: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Names of the modules that share a scale, for the model of that config.json."""
    return tuple(group for file in _files(config, None)[::-1] for group in file.groups)


def scale_group(module: str, groups: tuple[tuple[str, ...], ...]) -> ScaleGroup | None:
    """The scale group of a module, or None where it stands alone."""
    parent, _, leaf = module.rpartition(".")
    return next((ScaleGroup(parent, members) for members in groups if leaf in members), None)


def gather_groups(
    modules: Iterable[str], groups: tuple[tuple[str, ...], ...]
) -> dict[ScaleGroup, list[str]]:
    """The members of every scale group among those modules."""
    found: dict[ScaleGroup, list[str]] = defaultdict(list)
    members_of = {leaf: members for members in reversed(groups) for leaf in members}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        if members := members_of.get(leaf):
            found[ScaleGroup(parent, members)].append(module)
    return found


def _files(config: Mapping[str, object], recipe: str | None) -> list[RecipeFile]:
    """default.toml, then the model's families, then what a person chose."""
    values = (one.get(key) for one in configs_in(config) for key in ("model_type", "_class_name"))
    families = families_of(value for value in values if isinstance(value, str))
    chosen = chosen_files(recipe) if recipe is not None else []
    return list({file.name: file for file in (known_file(DEFAULT), *families, *chosen)}.values())


def _filled(file: RecipeFile, config: Mapping[str, object]) -> RecipeFile:
    """The file with layer numbers in its patterns; raises InputError that names it."""

    def filled(patterns: Iterable[str]) -> tuple[str, ...]:
        names = tuple(name for pattern in patterns for name in expand(pattern, config))
        for name in names:
            if name.startswith("re:"):
                compiled(name)
        return names

    try:
        return replace(
            file,
            keep=tuple(rule._replace(patterns=filled(rule.patterns)) for rule in file.keep),
            only=tuple(rule._replace(patterns=filled(rule.patterns)) for rule in file.only),
            stacks=tuple(
                rule._replace(
                    tensors=filled(rule.tensors),
                    inputs=integer_of(config, rule.inputs_key),
                    experts=integer_of(config, rule.experts_key),
                )
                for rule in file.stacks
            ),
            formats=tuple(
                rule._replace(patterns=Patterns(filled(rule.patterns))) for rule in file.formats
            ),
        )
    except InputError as error:
        raise InputError(error.code, f"{file.name}: {error.message}", error.next_step) from None


def _check(options: RecipeOptions) -> None:
    for pattern in (*as_globs(options.include), *as_globs(options.exclude)):
        compiled(pattern)
    for option, given, words in (
        ("--stack-order", options.stack_order, STACK_ORDERS),
        ("--stack-rows", options.stack_rows, STACK_ROWS),
    ):
        if given is not None and given not in words:
            detail = f"{option} {given!r} is not known; expected {' or '.join(words)}"
            raise InputError("unknown-stack", detail, "Give one of these, or leave it out.")
    if options.stack_rows is not None and options.stack_order is None:
        detail = "--stack-rows says how gate and up share a stack; expected --stack-order with it"
        raise InputError("unknown-stack", detail, f"Add --stack-order {' or '.join(STACK_ORDERS)}.")
