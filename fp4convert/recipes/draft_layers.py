"""Find layers that draft tokens; compare their formats with the body's.

A model may end in layers that draft further tokens (multi-token prediction): engines run them
beside the body, and answer a draft that is right with several tokens at once.  Weights that an
engine reads wrong there cost no error and no quality, only speed.  A draft head (EAGLE, DFlash) is
a checkpoint of its own, and all of it drafts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fp4convert.progress import count_text
from fp4convert.recipes.options import KEEP, SAME
from fp4convert.recipes.patterns import sift
from fp4convert.recipes.recipe import PREDICTION, Recipe

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.)")


DRAFT_FORMAT = "draft-format"  # the code of the finding
JOINT = "fc"  # joins what a draft head reads of its model: an embedding, hidden states of layers
HEAD_LAYERS = frozenset({"layers", "midlayer"})  # of heads, which have no prefix before them
HEAD_WORDS = (JOINT, *HEAD_LAYERS)


class DraftFormat(NamedTuple):
    """Modules of draft layers in a format that engines do not expect.

    modules  all of them; JOINT alone of a draft head
    word     their format; "" for ordinary weights
    body     that of the modules of the body with the same names; "" where there is no body
    is_told  a recipe states the format that engines want, with a source
    """

    modules: tuple[str, ...]
    word: str
    body: str
    is_told: bool

    def __str__(self) -> str:
        """Describe the modules and both formats."""
        if not self.body:
            return f"{self.modules[0]!r}, which joins the inputs of a draft head, is {self.word}"
        count = len(self.modules)
        modules = count_text(count, "module")
        word, body = (word or "not quantized" for word in (self.word, self.body))
        return (
            f"{modules} of layers that draft tokens, the first {self.modules[0]!r},"
            f" {'is' if count == 1 else 'are'} {word}, and the body's are {body}"
        )

    @property
    def is_note(self) -> bool:
        """Return whether it harms only engines that expect ordinary weights."""
        return self.is_told and bool(self.word)

    @property
    def consequence(self) -> str:
        """Describe what engines do with such layers."""
        if not self.body:
            return "SGLang and older vLLM build it as an ordinary linear layer, and do not load it"
        if self.is_note:
            return "engines that take ordinary weights there for granted accept few drafts"
        if self.is_told:
            return "engines that build both alike may not load them, or accept few drafts"
        return (
            "engines that read one format of both do not load them, or accept few drafts without"
            " an error"
        )


def is_draft_head(names: Iterable[str]) -> bool:
    """Return whether a whole checkpoint drafts tokens for another model.

    names  of its tensors, or of modules; config.json is often that of a plain Llama
    """
    firsts = {name.partition(".")[0] for name in names if name.startswith(HEAD_WORDS)}
    return JOINT in firsts and not firsts.isdisjoint(HEAD_LAYERS)


def find_drafts(modules: Collection[str], recipe: Recipe) -> frozenset[str]:
    """Find modules of draft layers that have a counterpart in the body.

    No engine quantizes the others, such as the projection of the inputs.
    """
    drafts = sift(recipe.patterns_of(PREDICTION), modules)
    if not drafts:
        return frozenset()
    body = {_place_of(module) for module in set(modules).difference(drafts)}
    return frozenset(module for module in drafts if _place_of(module) in body)


def find_differing(words: Mapping[str, str], recipe: Recipe) -> list[DraftFormat]:
    """Find draft layers in a format that engines do not expect.

    That is a packed format other than the body's, which engines read as the body's; ordinary
    weights where engines expect the body's format; and the reverse.
    words    module -> the word of its format, "" for ordinary weights
    """
    if words.get(JOINT) and is_draft_head(words):
        return [DraftFormat((JOINT,), words[JOINT], "", False)]
    drafts = find_drafts(words, recipe)
    if not drafts:
        return []
    usual = _usual_words((module, word) for module, word in words.items() if module not in drafts)
    differing: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for module in words:
        if module not in drafts or not (body := usual[_place_of(module)]):
            continue
        word = words[module]
        if word and word != body:
            differing[word, body, False].append(module)
        elif recipe.draft == (KEEP if word else SAME):
            differing[word, body, True].append(module)
    return [
        DraftFormat(tuple(sorted(modules)), word, body, is_told)
        for (word, body, is_told), modules in differing.items()
    ]


def _usual_words(words: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the most common format of every place in a layer."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for module, word in words:
        counts[_place_of(module)][word] += 1
    return {place: count.most_common(1)[0][0] for place, count in counts.items()}


def _place_of(module: str) -> str:
    """Return the name behind the layer's number, without numbers."""
    first = _NUMBER.search(module)
    return _NUMBER.sub(".#", module[first.end() :]) if first else module
