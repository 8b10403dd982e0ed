"""Declare an option once; the options that choose a recipe.

An option is a field of a dataclass: its name, its type and its default are the field's, its help
and its legal words stand in the Option beside the type.  The command line, completion, the Python
function with its docstring and the site's table are all made of that one row.  These
classes are not frozen, which would double the time that they take when the command line starts.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import get_annotations
from typing import Annotated, Any, NamedTuple

from fp4convert.errors import InputError, did_you_mean

TARGET, QUALITY, MODULES, DEVICE = "Target", "Quality", "Which modules", "Device"
HUB, MACHINES, OUTPUT = "Hub", "Many machines", "Output"
PANELS = (TARGET, QUALITY, MODULES, DEVICE, HUB, MACHINES, OUTPUT)  # as --help shows them
STACK_ORDERS, STACK_ROWS = ("out_in", "in_out"), ("concatenated", "interleaved")
SAME, KEEP = DRAFTS = ("same", "keep")  # layers that draft tokens become what the body does; stay

Reference = str | os.PathLike[str]
"""A folder, a file, or ORG/NAME on the Hub."""
Globs = str | Iterable[str] | None
"""Globs on module names, or re:REGEX: one, or several."""


class Option(NamedTuple):
    """What an option means, beside its name, its type and its default.

    help         one sentence or two
    words        the legal words where they are few; completion offers them
    flags        all spellings, where there are more than --name
    least        the smallest number that is legal
    is_argument  it stands without its name
    is_several   it may be given several times
    is_recipe    it names a recipe, of which a shell is told those that there are
    is_code      it is the code of a finding or an error, of which a shell is told all
    panel        the heading of --help that it stands under, where a command has many options
    value        what --help writes for its value; else that of its words or its type
    synonyms     words that others have for a legal one
    is_rare      a page of --help that would not fit one screen leaves it out
    """

    help: str
    words: Sequence[str] = ()
    flags: tuple[str, ...] = ()
    least: float | None = None
    is_argument: bool = False
    is_several: bool = False
    is_recipe: bool = False
    is_code: bool = False
    panel: str = ""
    value: str = ""
    synonyms: Mapping[str, str] = {}
    is_rare: bool = False


class Declared(NamedTuple):
    """An option as it was declared: its field and its row."""

    name: str
    type: Any
    default: Any
    option: Option


def declared_in(kind: type) -> list[Declared]:
    """Return the options of a class: its own first, then those it shares.

    Of one that it declares again, its own words count.
    """
    defaults = {field.name: field.default for field in fields(kind)}
    found: dict[str, Declared] = {}
    for base in kind.__mro__:
        for name, hint in get_annotations(base).items():
            for extra in getattr(hint, "__metadata__", ()):
                if isinstance(extra, Option):
                    declared = Declared(name, hint.__origin__, defaults[name], extra)
                    found.setdefault(name, declared)
    return sorted(found.values(), key=lambda each: not each.option.is_argument)


def is_required(declared: Declared) -> bool:
    """Tell whether an option has no default."""
    return declared.default is MISSING


def one_of(words: Iterable[str]) -> str:
    """Join words as a sentence lists them: "a, b or c"."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def help_with_words(option: Option) -> str:
    """Return the help, and the legal words that it does not have."""
    if all(word in option.help for word in option.words):
        return option.help
    return f"{option.help} One of: {', '.join(option.words)}."


def take_words(options: Any) -> None:
    """Spell words of the options as they are legal: NVFP4 as nvfp4."""
    for each in declared_in(type(options)):
        given = getattr(options, each.name)
        if each.option.words and isinstance(given, str):
            setattr(options, each.name, _spelled(given, each.option))


def _spelled(given: str, option: Option) -> str:
    """Return the legal word that is alike but for case and dashes."""
    known = {_folded(word): word for word in option.words}
    known |= {_folded(word): meant for word, meant in option.synonyms.items()}
    return given if given in option.words else known.get(_folded(given), given)


def _folded(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def as_globs(patterns: Globs) -> tuple[str, ...]:
    """Return one pattern or several as several."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns or ())


RecipeName = Annotated[
    str | None,
    Option(
        "A recipe that fp4convert recipes lists, or a TOML file of your own.",
        is_recipe=True,
        panel=MODULES,
        value="<name|path>",
    ),
]


@dataclass(kw_only=True, eq=False, repr=False)
class RecipeOptions:
    """What a person chooses of the recipe."""

    exclude: Annotated[
        Globs,
        Option(
            "Keep these modules as they are. Glob, or re:REGEX.",
            is_several=True,
            panel=MODULES,
            value="<pattern>",
        ),
    ] = ()
    include: Annotated[
        Globs,
        Option(
            "Quantize these modules too, although the recipe keeps them.",
            is_several=True,
            panel=MODULES,
            value="<pattern>",
        ),
    ] = ()
    recipe: RecipeName = None
    stack_order: Annotated[
        str | None,
        Option(
            "Layout of fused expert tensors: [experts, out, in] or [experts, in, out].",
            STACK_ORDERS,
            panel=MODULES,
            is_rare=True,
        ),
    ] = None
    stack_rows: Annotated[
        str | None,
        Option(
            "Order of the gate and up rows in a fused expert tensor.",
            STACK_ROWS,
            panel=MODULES,
            is_rare=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        # An iterator could be read only once; a list could change.
        self.include, self.exclude = as_globs(self.include), as_globs(self.exclude)
        # Beside options of another class, that one takes the words of all.
        beside = getattr(super(), "__post_init__", None)
        if beside is None:
            take_words(self)
        else:
            beside()

    def check_stacks(self) -> None:
        """Raise InputError for unknown words on stacks, and rows without an order."""
        next_step = "Give one of these, or leave it out."
        for option, given, words in (
            ("--stack-order", self.stack_order, STACK_ORDERS),
            ("--stack-rows", self.stack_rows, STACK_ROWS),
        ):
            if given is not None and given not in words:
                detail = f"{option} {given!r} is not known; expected {one_of(words)}"
                raise InputError("unknown-stack", detail + did_you_mean(given, words), next_step)
        if self.stack_rows is not None and self.stack_order is None:
            detail = "--stack-rows says how gate and up share a stack; expected --stack-order, too"
            raise InputError("unknown-stack", detail, f"Add --stack-order {one_of(STACK_ORDERS)}.")


NOTHING_CHOSEN = RecipeOptions()
