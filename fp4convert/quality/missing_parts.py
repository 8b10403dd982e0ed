"""Find layers, experts and heads that an artifact lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice

from fp4convert.errors import Finding
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.recipes.patterns import TEXT_CONFIGS, configs_in
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.uneven_formats import EXPERTS

# Last names of what holds the layers of a model, numbered from 0.
STACKS = frozenset({"layers", "layer", "h", "blk", "blocks", "block", "transformer_blocks"})
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
# Configurations of layers one by one: some of them hold no weights.
UNEVEN_LAYERS = "block_configs"
TIED = "tie_word_embeddings"
HEADS = frozenset({"lm_head", "embed_out", "output_layer", "output", "head", "proj_out"})
GENERATING = ("ForCausalLM", "ForConditionalGeneration")  # classes with a head
DIGITS = 18  # of a number in a name
SHOWN = 5  # missing numbers in a message
WEIGHTLESS = ": engines refuse it, or compute with what was in memory before"


def find_missing(
    modules: Collection[str], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Finding]:
    """Find what a model must have and an artifact has not.

    modules  every module that has a tensor, quantized or kept
    config   config.json; empty where there is none
    """
    stacks, mixtures = defaultdict[str, set[int]](set), defaultdict[str, dict[int, set[str]]](dict)
    of_mixture = cache(_split_at_number)  # which has hundreds of modules
    for module in modules:
        mixture, inside, rest = module.partition(EXPERTS)
        if inside:
            expert, _, projection = rest.partition(".")
            if _is_number(expert):
                mixtures[mixture].setdefault(int(expert), set()).add(projection)
        stack, layer = of_mixture(mixture) if inside else ("", -1)
        if layer < 0:
            stack, layer = _split_at_number(module)
        if layer >= 0 and stack.rpartition(".")[2] in STACKS:
            stacks[stack].add(layer)
    lost = [
        *_missing_layers(stacks, config, recipe),
        *_missing_experts(mixtures, config, recipe),
        *_missing_head(modules, config),
    ]
    for first, detail in lost:
        yield Finding("error", "module-missing", first, detail + WEIGHTLESS)


def _missing_layers(
    stacks: Mapping[str, set[int]], config: Mapping[str, object], recipe: Recipe
) -> Iterator[tuple[str, str]]:
    if any(UNEVEN_LAYERS in one for one in configs_in(config)):
        return
    text = next((config[name] for name in TEXT_CONFIGS if name in config), config)
    counts = [text.get(key) for key in LAYER_COUNTS] if isinstance(text, Mapping) else []
    numbers = [count for count in counts if type(count) is int]
    expected = min(numbers, default=0)
    for stack, found in stacks.items():
        first = 0 if min(found) < expected else min(found)  # beyond lie drafts alone
        if missing := _missing_of(range(first, max(found)), found):
            yield f"{stack}.{missing[0]}", f"{_count(missing, 'layer')} of {stack} missing"
    texts = {
        stack: max(found) + 1
        for stack, found in stacks.items()
        if recipe.kind_of(f"{stack}.0") != "tower"
    }
    if texts and max(texts.values()) < expected:
        stack = max(texts, key=lambda name: texts[name])
        detail = f"config.json has {expected} layers, and {stack} ends after {texts[stack]}"
        yield f"{stack}.{texts[stack]}", detail


def _missing_experts(
    mixtures: Mapping[str, Mapping[int, set[str]]], config: Mapping[str, object], recipe: Recipe
) -> Iterator[tuple[str, str]]:
    keys = recipe.experts[0].counts if recipe.experts else EXPERT_COUNTS
    found = [one[key] for one in configs_in(config) for key in keys if key in one]
    # Several numbers are of several kinds of mixtures.
    count = found[0] if len(set(map(str, found))) == 1 and type(found[0]) is int else 0
    for mixture, experts in mixtures.items():
        numbers = range(max(count, max(experts) + 1))
        projections = set[str]().union(*experts.values())
        if missing := _missing_of(numbers, experts):
            first = f"{mixture}{EXPERTS}{missing[0]}"
            detail = f"{_count(missing, 'expert')} of {len(numbers)} in {mixture} missing"
            yield first, detail
        for number, own in experts.items():
            if lacks := sorted(projections - own):
                first = f"{mixture}{EXPERTS}{number}.{lacks[0]}"
                yield first, f"{first} is missing, which other experts have"


def _missing_head(
    modules: Collection[str], config: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    ties = [one[TIED] for one in configs_in(config) if TIED in one]
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not ties or any(ties) or not (isinstance(name, str) and name.endswith(GENERATING)):
        return
    if is_draft_head(modules):  # engines lend it that of its model
        return
    if not any(HEADS.intersection(module.rsplit(".", 2)[-2:]) for module in modules):
        yield "lm_head", f"lm_head is missing; {name} has one that is not tied to the embedding"


def _split_at_number(module: str) -> tuple[str, int]:
    """Split a name before its first number; -1 where it has none."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if _is_number(part):
            return ".".join(parts[:place]), int(part)
    return module, -1


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= DIGITS


def _missing_of(numbers: range, found: Collection[int]) -> list[int]:
    """List the first numbers that are missing; a config.json may count any."""
    return list(islice((number for number in numbers if number not in found), SHOWN + 1))


def _count(numbers: list[int], what: str) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"
