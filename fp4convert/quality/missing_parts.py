"""Find layers, experts, heads and parts of layers that an artifact lacks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice

from fp4convert.errors import Finding
from fp4convert.quality.config_sizes import is_plain_decoder
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
HEADS = frozenset(
    {
        *("lm_head", "audio_lm_head", "embed_out", "output_layer", "output_projection"),
        *("output", "head", "proj_out"),
    }
)
GENERATING = ("ForCausalLM", "ForConditionalGeneration")  # classes with a head
# Of a plain decoder: what its layers lie in, and the norm behind them.
PLAIN, FINAL_NORMS = ("", "model"), frozenset({"norm", "final_layernorm"})
MIXTURE = re.compile(r"(mlp|moe)\b")  # what layers of a plain decoder may differ in
FEWEST_PARTS = 2  # of any layer, by which it is told from other numbered parts
MOST_ALIKE = 3  # layers from which a single other one is told
DIGITS = 18  # of a number in a name
_Parts = dict[int, set[str]]
_Lost = tuple[str, str]  # a module that is not there, and what is said of it
SHOWN = 5  # missing numbers in a message
WEIGHTLESS = ": engines refuse it, or compute with what was in memory before"


def find_missing(
    modules: Collection[str], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Finding]:
    """Find what a model must have and an artifact has not.

    modules  every module that has a tensor, quantized or kept
    config   config.json; empty where there is none
    """
    # Parts of layers by stack and number, and of experts by mixture and number.
    stacks, mixtures = defaultdict[str, _Parts](dict), defaultdict[str, _Parts](dict)
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
            parts = stacks[stack].setdefault(layer, set())
            if not inside:
                parts.add(module[len(stack) + 1 :].partition(".")[2])
    lost = [
        *_missing_layers(stacks, config, recipe),
        *_missing_experts(mixtures, config, recipe),
        *_missing_head(modules, config),
    ]
    if not any(UNEVEN_LAYERS in one for one in configs_in(config)) and not is_draft_head(modules):
        for stack, layers in stacks.items():
            is_plain = is_plain_decoder(config) and stack.rpartition(".")[0] in PLAIN
            of_stack = _missing_in_plain(stack, layers, modules) if is_plain else ()
            lost += of_stack or _missing_in_one(stack, layers)
    for first, detail in lost:
        yield Finding("error", "module-missing", first, detail + WEIGHTLESS)


def _missing_in_plain(stack: str, layers: _Parts, modules: Collection[str]) -> list[_Lost]:
    """Find what layers of a plain decoder lack, and what is beside them.

    All of its layers have the same norms and the same attention (transformers' own models;
    tests/quality/test_missing_parts.py asks them).
    """
    above = stack.removesuffix("layers")
    parts = set[str]().union(*layers.values())
    common = [part for part in parts if not MIXTURE.search(part)]
    lost = [
        (f"{stack}.{number}.{part}", "which other layers have")
        for number, own in layers.items()
        for part in common
        if part not in own
    ]
    beside = {module[len(above) :] for module in modules if module.startswith(above)}
    if any("norm" in part for part in parts) and not beside & FINAL_NORMS:
        lost.append((f"{above}norm", "the norm behind the last layer"))
    return [(module, f"{module} is missing, {why}") for module, why in sorted(lost)]


def _missing_in_one(stack: str, layers: _Parts) -> list[_Lost]:
    """Find a layer that lacks one module, where it is the only one.

    The first and the last layer of a model may lack what others have: ModernBERT begins with one
    that has no norm, and the last of Stable Diffusion 3 ends one of two streams.
    """
    common, count = Counter(map(frozenset, layers.values())).most_common(1)[0]
    ends = (min(layers), max(layers))
    fewer = [
        (number, part)
        for number, own in layers.items()
        if own < common and number not in ends
        for part in common - own
    ]
    if len(fewer) != 1 or count < MOST_ALIKE:
        return []
    number, part = fewer[0]
    if any(each.startswith(f"{part}.") for each in common):  # a parameter beside other modules
        return []
    module = f"{stack}.{number}.{part}"
    return [(module, f"{module} is missing, which {count} other layers have")]


def _missing_layers(
    stacks: Mapping[str, _Parts], config: Mapping[str, object], recipe: Recipe
) -> Iterator[_Lost]:
    if any(UNEVEN_LAYERS in one for one in configs_in(config)):
        return
    text = next((config[name] for name in TEXT_CONFIGS if name in config), config)
    counts = [text.get(key) for key in LAYER_COUNTS] if isinstance(text, Mapping) else []
    numbers = [count for count in counts if type(count) is int]
    expected = min(numbers, default=0)
    for stack, found in stacks.items():
        first = 0 if min(found) < expected else min(found)  # beyond lie drafts alone
        # Of what else is named so, as of an audio codec, some have no weights: a function, a pool.
        if min(map(len, found.values())) < FEWEST_PARTS:
            continue
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
    mixtures: Mapping[str, _Parts], config: Mapping[str, object], recipe: Recipe
) -> Iterator[_Lost]:
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


def _missing_head(modules: Collection[str], config: Mapping[str, object]) -> Iterator[_Lost]:
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
