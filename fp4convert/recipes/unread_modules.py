"""Find quantized modules that engines do not read so.

Which engine fails at them is data (configs/engines), by the codes of these findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fp4convert.numerics.formats import Format
from fp4convert.recipes.patterns import configs_in, sift
from fp4convert.recipes.recipe import Recipe
from fp4convert.storage.safetensors import WEIGHT

# Codes of findings.
EMBEDDING, TIED_HEAD, PLAIN = "embedding-quantized", "tied-head-quantized", "plain-quantized"
HEADS = frozenset({"lm_head", "embed_out", "output_layer"})  # last names of output heads
WORDS = {True: "four", False: "eight"}  # of the bits that codes have
PLAIN_KIND = "plain"  # the kind of rules on what an engine builds of ordinary layers


class Unread(NamedTuple):
    """Name a quantized module, the code of its finding, and what it is."""

    module: str
    code: str
    what: str


def find_unread_modules(
    quantized: Mapping[str, tuple[tuple[int, ...], Format]],
    recipe: Recipe,
    config: Mapping[str, object],
    holds_embeddings: bool,
    is_embedding: Mapping[str, bool],
) -> list[Unread]:
    """Find embeddings, tied heads, and layers that an engine builds plain.

    quantized         shapes and formats; embeddings and heads of int4 are left to engines
    recipe            of the artifact's dialect
    holds_embeddings  as the dialect's traits say
    is_embedding      as the model's class has weights; of others the recipe's patterns decide
    """
    found = []
    coded = {
        module: fmt.is_fp4 for module, (_, fmt) in quantized.items() if fmt.is_fp4 or fmt.is_fp8
    }
    named = set(sift(recipe.kept_patterns, quantized))
    for module, (shape, _) in quantized.items():
        rule = recipe.rule_on(module, shape) if module in named else None
        is_table = bool(rule and rule.is_table(module))
        if rule and rule.kind == PLAIN_KIND:
            found.append(Unread(module, PLAIN, rule.reason))
        elif module not in coded or holds_embeddings:
            continue
        elif is_embedding.get(module + WEIGHT, is_table):
            what = f"an embedding, which no engine of dialect {recipe.target.dialect} reads in"
            found.append(Unread(module, EMBEDDING, f"{what} {WORDS[coded[module]]} bits"))
    if any(one.get("tie_word_embeddings") for one in configs_in(config)):
        what = "an output head that config.json ties to the embedding: most engines take the"
        what += " embedding's weights instead, or fail"
        heads = (module for module in coded if module.rpartition(".")[2] in HEADS)
        found += [Unread(module, TIED_HEAD, what) for module in heads]
    return found
