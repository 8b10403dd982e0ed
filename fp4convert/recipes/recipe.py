"""Join recipe files and options into one Recipe for one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp4convert.errors import InputError
from fp4convert.numerics.formats import IMPORTANCE, NVFP4, Format, check_rule, format_named
from fp4convert.recipes.options import (
    KEEP,
    NOTHING_CHOSEN,
    SAME,
    RecipeOptions,
    as_globs,
)
from fp4convert.recipes.patterns import (
    compiled,
    configs_in,
    expand_all,
    matches,
    matches_any,
    pick_fitting,
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
    unnamed_stack,
)
from fp4convert.recipes.toml_files import (
    ANY_FORMAT,
    DEFAULT,
    RecipeFile,
    chosen_files,
    families_of,
    known_file,
)

PATTERN_FIELDS = {  # by the table of a RecipeFile: fields of its rules that may hold ranges
    "keep": ("patterns", "unless"),
    "only": ("patterns",),
    "stacks": ("tensors",),
    "formats": ("patterns",),
    "experts": ("rows", "columns"),
}
PREDICTION = "prediction"  # the kind of rules on layers that draft tokens


class ScaleGroup(NamedTuple):
    """Sibling modules that engines multiply as one matrix, under one amax.

    members  last parts of their names
    """

    parent: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        """Return the name in steps and records; dry_run.py reads it."""
        return f"{self.parent}.{'/'.join(self.members)}"


class Target(NamedTuple):
    """The target of a conversion; only a quantized one has a dialect.

    format          name of a format or a float type, or "pruned"
    scale_layout    None: that of the dialect
    has_unit_scale  the global scale is 1 for all weights: engines read no other
    via             "fp8" where weights are rounded to FP8 first
    method          one of METHODS; None where no weight is rounded, or it is unknown
    calibration     sha256 of the statistics for rounding
    keep_dtype      type of float32 matrices that stay, except routers; None: they keep theirs
    adapter         hash of the files and the scale of a merged adapter
    damping         of gptq: the share of H's mean diagonal that is added to it
    passes          of gptq: passes over codes and block scales afterwards
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
        """Return the scale rule of modules of a format.

        The target's rule is for its own format; `importance` is for every format that has it.
        """
        is_known = self.scale_rule == IMPORTANCE and IMPORTANCE in fmt.scale_rules
        applies = fmt.name == self.format or is_known
        return self.scale_rule if self.scale_rule and applies else fmt.default_rule


@dataclass(frozen=True, slots=True)
class Recipe:
    """The target and the rules for modules; the first rule that fits counts.

    kept_patterns  patterns of all rules of keep
    only_patterns  patterns of all rules of only
    may_lack       members of groups that some layers of the model lack
    folds          modules that scales of columns may be moved to; rules may share a module
    options        choices on the command line
    keeps_packed   packed modules that stay do not become bf16
    asked          patterns of a user's file, by table; one of each set must match a module
    draft          a word of DRAFTS: the choice of engines for layers that draft tokens; "": none
    asked_draft    the choice on the command line
    drafts         modules of such layers that are treated as the body's
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

    def reason_to_keep(self, module: str, shape: tuple[int, ...] = ()) -> str | None:
        """Return why a module stays; None where it is quantized.

        --exclude goes before --include before [[format]] before [[keep]] before [[only]]; beside a
        [[format]] that names the module only rules count that are not for accuracy. Rules for some
        sizes need the shape.
        """
        if matches_any(self.exclude, module):
            pattern = next(pattern for pattern in self.exclude if matches(pattern, module))
            return f"excluded by {pattern!r}"
        if matches_any(self.include, module):
            return None
        override = self.override(module)
        if override == KEEP:
            return "kept by a [[format]] of the recipe"
        if rule := self.rule_on(module, shape, is_overridden=override is not None):
            return rule.reason
        if self.only_patterns and override is None and not matches_any(self.only_patterns, module):
            return self.only[-1].reason
        return None

    def pick_doubtful(self, modules: Collection[str]) -> set[str]:
        """Pick the modules that `reason_to_keep` may keep; too many do no harm.

        Every pattern of `reason_to_keep` belongs here: other modules are not examined.
        """
        if self.only_patterns:
            return set(modules)
        kept = (
            pattern for rule in self.formats if rule.format == KEEP for pattern in rule.patterns
        )
        return set(sift((*self.exclude, *kept, *self.kept_patterns), modules))

    def format_of(self, module: str) -> str:
        """Return the format of a module that does not stay."""
        override = self.override(module)
        return self.target.format if override in (None, KEEP, ANY_FORMAT) else str(override)

    @property
    def module_formats(self) -> set[str]:
        """Return all formats that modules may become."""
        return {
            self.target.format,
            *(rule.format for rule in self.formats if rule.format not in (KEEP, ANY_FORMAT)),
        }

    def pick_asked_for(self, modules: Collection[str]) -> set[str]:
        """Pick modules that become four-bit although a rule of keep may fit them."""
        named = [pattern for rule in self.formats for pattern in rule.patterns]
        return {*sift((*self.include, *named), modules), *self.drafts.intersection(modules)}

    def is_draft(self, module: str) -> bool:
        """Return whether a module belongs to a layer that drafts tokens."""
        return matches_any(self.patterns_of(PREDICTION), module)

    @property
    def takes_drafts(self) -> bool:
        """Return whether draft layers are treated as the body's layers."""
        return (self.asked_draft or self.draft) == SAME

    def kind_of(self, module: str) -> str:
        """Return the kind of a module by its rule of keep; "" without one."""
        rule = self.rule_on(module)
        return rule.kind if rule else ""

    def patterns_of(self, kind: str) -> tuple[str, ...]:
        """Return the patterns of all rules of keep of a kind."""
        return tuple(
            pattern for rule in self.keep if rule.kind == kind for pattern in rule.patterns
        )

    def stack_rule(self, tensor: str, shape: tuple[int, ...] = ()) -> StackRule | None:
        """Return how a tensor stacks the matrices of experts; None if unknown.

        shape  (experts, ...); with config.json it decides for models with both orders
        """
        order, rows = self.options.stack_order, self.options.stack_rows
        for rule in self.stacks:
            if matches_any(rule.tensors, tensor):
                return rule.decide(tensor, shape, order, rows)
        return unnamed_stack(tensor, shape, order, rows)

    def override(self, module: str) -> str | None:
        """Return the word of the first [[format]] that names a module."""
        for rule in self.formats:
            if matches_any(rule.patterns, module):
                return rule.format
        return None

    def rule_on(
        self, module: str, shape: tuple[int, ...] = (), is_overridden: bool = False
    ) -> KeepRule | None:
        """Return the first rule of keep that fits a module."""
        if not matches_any(self.kept_patterns, module):  # enough for most modules
            return None
        is_draft = module in self.drafts
        for rule in self.keep:
            is_waived = is_draft and rule.kind == PREDICTION
            is_waived = is_waived or (is_overridden and rule.is_for_accuracy)
            if not is_waived and rule.fits(module, shape):
                return rule
        return None

    def patterns_to_declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[str, ...]:
        """Return short patterns of modules that stay, for the engines' records.

        Each fits a kept module, or one that may be tied and absent; none fits a quantized module.
        They hold under the engines' prefixes.

        quantized  quantized modules that a pattern may fit
        """
        named = [rule.patterns for rule in self.formats if rule.format == KEEP]
        asked = [(patterns, False) for patterns in (self.exclude, *named)]
        rules = [*asked, *((rule.patterns, rule.may_be_absent) for rule in self.keep)]
        fits = pick_fitting([pattern for patterns, _ in rules for pattern in patterns], kept)
        fitting = tuple(
            pattern
            for patterns, may_be_absent in rules
            for pattern in patterns
            if may_be_absent or pattern in fits
        )
        fitted = [module for module in quantized if matches_any(fitting, module)]  # few
        return tuple(
            pattern for pattern in fitting if not any(matches(pattern, module) for module in fitted)
        )


def build_recipe(
    target: Target, config: Mapping[str, object], options: RecipeOptions = NOTHING_CHOSEN
) -> Recipe:
    """Build the recipe for the model of a config.json.

    target  a scale_rule of None is the format's default
    config  model types and class names pick family files, numbers of layers fill ranges
    Raises  InputError for unknown words and wrong files
    """
    fmt = format_named(target.format)
    # Options are refused before a file is read.
    for pattern in (*as_globs(options.include), *as_globs(options.exclude)):
        compiled(pattern)
    options.check_stacks()
    written = _find_files(config, options.recipe)
    files = [_fill_ranges(file, config) for file in written]
    # The most special file comes first.
    later_first = files[::-1]
    keep = tuple(
        rule
        for file in later_first
        for rule in file.keep
        if not rule.dialects or target.dialect in rule.dialects
    )
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
        asked=_required_patterns(zip(files[::-1], written[::-1], strict=True)),
        draft=next((file.draft for file in later_first if file.draft), ""),
    )


def _required_patterns(
    files: Iterable[tuple[RecipeFile, RecipeFile]],
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return users' patterns that must match some module, by table.

    files  with filled ranges, and as written: these patterns stand for an empty range
    """
    required: dict[str, tuple[tuple[str, ...], ...]] = {}
    for file, written in files:
        if file.is_users:
            keep = zip(file.keep, written.keep, strict=True)
            required[f"{file.name}: [[keep]]"] = tuple(
                rule.patterns or plain.patterns for rule, plain in keep if not rule.may_be_absent
            )
            formats = zip(file.formats, written.formats, strict=True)
            required[f"{file.name}: [[format]]"] = tuple(
                tuple(rule.patterns or plain.patterns) for rule, plain in formats
            )
    return required


def model_recipe(
    config: Mapping[str, object],
    options: RecipeOptions = NOTHING_CHOSEN,
    dialect: str | None = None,
) -> Recipe:
    """Build the recipe of a model that is examined, with any target.

    dialect  of an artifact of the model: some rules are for one dialect
    """
    return build_recipe(Target(NVFP4.name, dialect), config, options)


def group_members(config: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Return the scale groups of the model of a config.json."""
    return tuple(group for file in _find_files(config, None)[::-1] for group in file.groups)


def scale_groups(
    modules: Iterable[str], groups: tuple[tuple[str, ...], ...]
) -> dict[str, ScaleGroup]:
    """Return the scale group of each module that has one."""
    members_of = {leaf: members for members in reversed(groups) for leaf in members}
    group_of = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        if members := members_of.get(leaf):
            group_of[module] = ScaleGroup(parent, members)
    return group_of


def gather_groups(group_of: Mapping[str, ScaleGroup | None]) -> dict[ScaleGroup, list[str]]:
    """Return the modules of each scale group."""
    modules_of: dict[ScaleGroup, list[str]] = defaultdict(list)
    for module, group in group_of.items():
        if group:
            modules_of[group].append(module)
    return modules_of


def _find_files(config: Mapping[str, object], recipe: str | None) -> list[RecipeFile]:
    """Return default.toml, the model's families, then the chosen files."""
    kinds = [part.get(key) for part in configs_in(config) for key in ("model_type", "_class_name")]
    families = families_of(kind for kind in kinds if isinstance(kind, str))
    chosen = chosen_files(recipe) if recipe is not None else []
    return list({file.name: file for file in (known_file(DEFAULT), *families, *chosen)}.values())


def _fill_ranges(file: RecipeFile, config: Mapping[str, object]) -> RecipeFile:
    """Fill the ranges in a file's patterns with a model's layer numbers.

    Raises  InputError that names the file, for a wrong range or expression
    """

    def fill(rule: Any, names: tuple[str, ...]) -> Any:
        filled = {name: expand_all(getattr(rule, name), config) for name in names}
        return rule._replace(**filled)

    try:
        filled: dict[str, Any] = {
            table: tuple(fill(rule, names) for rule in getattr(file, table))
            for table, names in PATTERN_FIELDS.items()
        }
    except InputError as error:
        raise InputError(error.code, f"{file.name}: {error.message}", error.next_step) from None
    formats = filled.pop("formats")
    stacks = filled.pop("stacks")
    return file._replace(
        **filled,
        formats=tuple(rule._replace(patterns=Patterns(rule.patterns)) for rule in formats),
        stacks=tuple(rule.of_model(config) for rule in stacks),
    )
