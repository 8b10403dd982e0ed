"""What a conversion is asked to do: configs/*.toml and the command line, read into one Recipe.

Patterns are globs on module names, or regular expressions after "re:" (matched from the start, as compressed-tensors does).
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.abc import Traversable
from typing import Any, NamedTuple

from fp4convert.errors import InputError
from fp4convert.formats import Format, check_rule, format_named


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Modules that stay as they are, and why.

    kind           what they are, for what depends on it: embedding, router, tower; or nothing of these
    may_be_absent  engines must know of them even where the checkpoint holds none: a tied head
    """

    patterns: tuple[str, ...]
    reason: str
    kind: str
    may_be_absent: bool


class ScaleGroup(NamedTuple):
    """Sibling modules that engines multiply as one matrix, and that share one amax: names below one parent."""

    parent: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.parent}.{'/'.join(self.members)}"


@dataclass(frozen=True, slots=True)
class Target:
    """What is made: a four-bit format by a dialect and a rule, or (dequantized) a float type by neither.

    scale_layout    the dialect's own where it is None
    has_unit_scale  the global scale is 1, whatever the weights are: engines read no other
    """

    format: str
    dialect: str | None = None
    scale_rule: str | None = None
    activations: int = 16
    input_scale: float | None = None
    scale_layout: str | None = None
    kv_cache: str | None = None
    has_unit_scale: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made; what stays; which sibling modules share a scale.

    kept_patterns  those of all rules
    """

    format: Format
    target: Target
    keep: tuple[KeepRule, ...]
    kept_patterns: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def reason_to_keep(self, module: str) -> str | None:
        """Why that module stays, or None: --exclude before --include before the recipes' own rules."""
        if matches_any(self.exclude, module):
            return next(f"excluded by {pattern!r}" for pattern in self.exclude if matches(pattern, module))
        if matches_any(self.include, module):
            return None
        rule = self._rule_for(module)
        return rule.reason if rule else None

    def kind_of(self, module: str) -> str:
        """What the recipes' rules take a module for; nothing where none speaks of it."""
        rule = self._rule_for(module)
        return rule.kind if rule else ""

    def _rule_for(self, module: str) -> KeepRule | None:
        if not matches_any(self.kept_patterns, module):  # of most modules this is all that is asked
            return None
        return next(rule for rule in self.keep if matches_any(rule.patterns, module))

    def patterns_to_declare(self, kept: Sequence[str], quantized: Sequence[str]) -> tuple[str, ...]:
        """Patterns of modules that stay, for the engines' records: short, and true under the engines' own prefixes.

        Those that fit something kept, or may be tied and absent; none that fits a quantized module.

        quantized  those of them that a pattern may fit
        """
        rules = [(self.exclude, False), *((rule.patterns, rule.may_be_absent) for rule in self.keep)]
        fitting = tuple(
            pattern
            for patterns, may_be_absent in rules
            for pattern in patterns
            if may_be_absent or any(matches(pattern, module) for module in kept)
        )
        fitted = [module for module in quantized if matches_any(fitting, module)]  # rare, where modules are many
        return tuple(pattern for pattern in fitting if not any(matches(pattern, module) for module in fitted))


def build_recipe(
    target: Target,
    model_types: Collection[str],
    patterns: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Recipe:
    """The recipe for a model of those types.

    target       a scale_rule of None is the format's own
    model_types  every model_type that config.json names; picks the family files that list one
    patterns     (include, exclude)
    Raises       InputError for what no format or dialect has
    """
    fmt = format_named(target.format)
    include, exclude = patterns
    for pattern in (*include, *exclude):
        _compiled(pattern)
    tables = _tables(model_types)
    rows = (row for table in tables for row in table.get("keep", ()))
    keep = tuple(
        KeepRule(tuple(row["modules"]), row["reason"], row.get("kind", ""), row.get("may_be_absent", False)) for row in rows
    )
    target = replace(target, scale_rule=check_rule(fmt, target.scale_rule or fmt.default_rule))
    kept_patterns = tuple(pattern for rule in keep for pattern in rule.patterns)
    return Recipe(fmt, target, keep, kept_patterns, group_members(model_types), tuple(include), tuple(exclude))


def group_members(model_types: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Names of the modules that share a scale, for a model of those types."""
    return tuple(tuple(row["members"]) for table in _tables(model_types) for row in table.get("group", ()))


def scale_group(module: str, groups: tuple[tuple[str, ...], ...]) -> ScaleGroup | None:
    """The scale group of a module, or None where it stands alone."""
    parent, _, leaf = module.rpartition(".")
    return next((ScaleGroup(parent, members) for members in groups if leaf in members), None)


def matches(pattern: str, module: str) -> bool:
    """True where a glob fits the whole name, or a "re:" expression its beginning."""
    return _compiled(pattern).match(module) is not None


def matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """True where one of the patterns matches."""
    return _sieve(patterns).holds(module)


class _Sieve:
    """Many patterns as one question: most are text with stars around it, which strings find far sooner than expressions do."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        texts = {pattern for pattern in patterns if not pattern.startswith("re:") and not set(pattern.strip("*")) & set("*?[")}
        self._names = frozenset(pattern for pattern in texts if "*" not in pattern)
        starred = [pattern for pattern in texts if "*" in pattern]
        self._inside = [text.strip("*") for text in starred if text[0] == text[-1] == "*"]
        self._beginnings = tuple(text.rstrip("*") for text in starred if text[0] != "*")
        self._ends = tuple(text.lstrip("*") for text in starred if text[-1] != "*")
        self._expressions = [_compiled(pattern) for pattern in patterns if pattern not in texts]

    def holds(self, module: str) -> bool:
        return (
            module in self._names
            or module.startswith(self._beginnings)
            or module.endswith(self._ends)
            or any(map(module.__contains__, self._inside))
            or any(expression.match(module) for expression in self._expressions)
        )


_sieve = cache(_Sieve)


_ENDLESS = re.compile(r"\([^()]*[*+][^()]*\)[*+]")  # a repeat of what repeats: its time can double with every letter


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # what may once mean something else
            if _ENDLESS.search(pattern):
                detail = f"{pattern!r} repeats what is repeated inside, which can take for ever; expected a simpler expression"
                raise InputError("bad-pattern", detail)
            return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise InputError("bad-pattern", f"{pattern!r} is no regular expression: {error}") from None


def _tables(model_types: Collection[str]) -> list[dict[str, Any]]:
    """default.toml, and the family files that list one of the model types."""
    names = sorted(item.name for item in _configs().iterdir() if item.name.endswith(".toml"))
    tables = (_table(name) for name in names if name != "default.toml")
    return [_table("default.toml"), *(table for table in tables if not set(model_types).isdisjoint(table["model_types"]))]


def _table(name: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(_configs().joinpath(name).read_text(encoding="utf-8"))


def _configs() -> Traversable:
    from importlib.resources import files

    return files("fp4convert").joinpath("configs")
