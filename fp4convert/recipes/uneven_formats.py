"""Find modules of different formats that engines load as one.

Engines stack the experts of a layer and read all of them as the first; they multiply the members of
a scale group as one matrix.  bf16 counts as a format.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fp4convert.recipes.recipe import gather_groups, scale_groups
from fp4convert.recipes.rules import BESIDE_STACKS
from fp4convert.storage.safetensors import WEIGHT, TensorRef

EXPERTS = ".experts."  # in the name of a module; not of shared experts, which are like other MLPs
# Codes of findings.
EXPERTS_IN_PART = "experts-in-part"
GROUP_IN_PART, GROUP_FORMS = "group-in-part", "group-forms-differ"
MATRIX_DIMENSIONS = 2


class Uneven(NamedTuple):
    """Modules of several formats that engines load as one.

    code     of the finding
    parent   the module above them
    modules  by format; "" for those that stay as they are
    """

    code: str
    parent: str
    modules: dict[str, list[str]]

    def __str__(self) -> str:
        """Name an example of every format."""
        return ", ".join(
            f"{modules[0]} is {word or 'not quantized'}" for word, modules in self.modules.items()
        )


def find_uneven(words: Mapping[str, str], members: tuple[tuple[str, ...], ...]) -> list[Uneven]:
    """Find layers of experts, and scale groups, of several formats.

    words    module -> the word of its format, "" where it stays; all that are matrices
    members  of scale groups, as group_members returns them
    """
    if not words:
        return []
    # Most modules have the usual format: only units with another one are examined.
    usual, _ = Counter(words.values()).most_common(1)[0]
    odd = [module for module, word in words.items() if word != usual]
    layers = {layer for module in odd if (layer := _experts_of(module))}
    experts: dict[str, list[str]] = defaultdict(list)
    for module in words if layers else ():
        if (layer := _experts_of(module)) in layers:
            experts[layer].append(module)
    keys = set(scale_groups(odd, members).values())
    groups = gather_groups(scale_groups(words, members)) if keys else {}
    units = [(True, layer, modules) for layer, modules in experts.items()]
    units += [(False, key.parent, modules) for key, modules in groups.items() if key in keys]
    found = []
    for is_experts, parent, modules in units:
        by_word: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            by_word[words[module]].append(module)
        if len(by_word) > 1:
            of_group = GROUP_FORMS if len(by_word.keys() - {""}) > 1 else GROUP_IN_PART
            found.append(Uneven(EXPERTS_IN_PART if is_experts else of_group, parent, by_word))
    return found


def _experts_of(module: str) -> str:
    """Return the module above an expert; "" for other modules."""
    above, inside, _ = module.partition(EXPERTS)
    return above + EXPERTS[:-1] if inside else ""


def ordinary_matrices(refs: Iterable[TensorRef]) -> dict[str, str]:
    """Return the `words` of find_uneven for ordinary matrices and stacks."""
    return {
        ref.name.removesuffix(WEIGHT): ""
        for ref in refs
        if len(ref.shape) >= MATRIX_DIMENSIONS and not ref.name.endswith(BESIDE_STACKS)
    }
