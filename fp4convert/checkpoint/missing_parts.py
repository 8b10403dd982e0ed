"""Find parts that a model lacks; judge a source by them and by its sizes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice

from fp4convert.checkpoint.config_sizes import LEFT_OUT, find_odd_sizes, is_plain_decoder
from fp4convert.checkpoint.misnamed import LAYER_COUNTS
from fp4convert.errors import Finding, InputError
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.recipes.patterns import TEXT_CONFIGS, configs_in
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.uneven_formats import EXPERTS

# Last names of what holds the layers of a model, numbered from 0.
STACKS = frozenset({"layers", "layer", "h", "blk", "blocks", "block", "transformer_blocks"})
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
# Configurations of layers one by one: some of them hold no weights.
UNEVEN_LAYERS = "block_configs"
TIED = "tie_word_embeddings"
HEADS = frozenset(
    {
        *("lm_head", "lm_heads", "audio_lm_head", "codec_head", "embed_out", "output_layer"),
        *("output_projection", "output", "head", "proj_out"),
    }
)
GENERATING = ("ForCausalLM", "ForConditionalGeneration")  # classes with a head
# Of a plain decoder: how its layers are named, and the norm behind them.
DECODER_STACKS, FINAL_NORMS = ("layers", "model.layers"), frozenset({"norm", "final_layernorm"})
MIXTURE = EXPERTS.removesuffix(".")  # how the part ends that all experts are together
MAY_DIFFER = re.compile(r"(mlp|moe|experts)\b")  # from one of its layers to the next
FEWEST_PARTS = 3  # of most layers, by which they are told from other numbered parts
FEWEST_ALIKE = 3  # layers from which a single other one is told
DIGITS = 18  # of a number in a name
SHOWN = 5  # missing numbers in a message
WEIGHTLESS = ": engines refuse it, or compute with what was in memory before"
_Parts = dict[int, set[str]]  # of each layer of a stack, or of each expert
_Lost = tuple[str, str]  # a module that is not there, and what is said of it
EMBEDDING = "embed_tokens"  # of a plain decoder
NO_WEIGHTS = re.compile(r"\brotary_emb$")  # modules with buffers that engines compute


def find_faults(
    modules: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, object],
    recipe: Recipe,
) -> Iterator[Finding]:
    """Find missing modules, and sizes that config.json contradicts.

    modules  every module with a tensor, quantized or kept
    shapes   module -> (rows, columns) of its matrix
    config   config.json; may be empty
    """
    yield from find_missing(modules, config, recipe)
    yield from find_odd_sizes(shapes, config)


def judge_source(
    modules: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, object],
    recipe: Recipe,
) -> list[Finding]:
    """Find the faults of a source, which its result will have.

    Raises  InputError for matrices that config.json contradicts, except where a model has code of
            its own
    """
    faults = list(find_faults(modules, shapes, config, recipe))
    odd = [one for one in faults if one.code == "config-size" and not one.detail.endswith(LEFT_OUT)]
    if odd and "auto_map" not in config:
        next_step = "Take config.json from the model of these weights, or correct its number."
        raise InputError("config-size", odd[0].detail, next_step, odd[0].tensor)
    return faults


def fault_text(fault: Finding) -> str:
    """Return the words of a fault with the name of its module."""
    return fault.detail if str(fault.tensor) in fault.detail else f"{fault.tensor}: {fault.detail}"


def find_missing(
    modules: Collection[str], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Finding]:
    """Find the modules of a model that an artifact lacks.

    modules  every module with a tensor, quantized or kept
    config   config.json; may be empty
    """
    stacks = defaultdict[str, _Parts](lambda: defaultdict(set))
    mixtures = defaultdict[str, _Parts](lambda: defaultdict(set))
    split_mixture = cache(_split_at_number)  # which has hundreds of modules
    for module in modules:
        mixture, inside, rest = module.partition(EXPERTS)
        if inside:
            expert, _, projection = rest.partition(".")
            if _is_number(expert):
                mixtures[mixture][int(expert)].add(projection)
        stack, layer, part = split_mixture(mixture) if inside else ("", -1, "")
        if layer >= 0:
            part += MIXTURE
        else:
            stack, layer, part = _split_at_number(module)
        if layer >= 0 and stack.rpartition(".")[2] in STACKS:
            stacks[stack][layer].add(part)
    lost = [
        *_missing_layers(stacks, config, recipe),
        *_missing_experts(mixtures, config, recipe),
        *_missing_head(modules, config),
        *_missing_parts(stacks, config, modules),
    ]
    for first, detail in lost:
        yield Finding("error", "module-missing", first, detail + WEIGHTLESS)


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
        if sorted(map(len, found.values()))[len(found) // 2] < FEWEST_PARTS:
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


def _missing_parts(
    stacks: Mapping[str, _Parts], config: Mapping[str, object], modules: Collection[str]
) -> Iterator[_Lost]:
    """Find modules that a layer lacks and other layers have."""
    if any(UNEVEN_LAYERS in one for one in configs_in(config)) or is_draft_head(modules):
        return
    is_plain = is_plain_decoder(config) and "auto_map" not in config  # which is code of its own
    for stack, layers in stacks.items():
        if is_plain and stack in DECODER_STACKS:
            yield from _missing_in_decoder(stack, layers, config)
            yield from _missing_beside(stack, layers, config, modules)
        else:
            yield from _missing_in_one(stack, layers)


def _missing_in_decoder(
    stack: str, layers: _Parts, config: Mapping[str, object]
) -> Iterator[_Lost]:
    """Find modules that layers of a plain decoder lack.

    All layers have the same norms and attention, and all parts of their kind of mlp (in models of
    transformers; tests/checkpoint/test_missing_parts.py asks them). Modules of few layers are
    extras, such as a buffer or an adapter. Layers beyond the count draft tokens.
    """
    count = config[LAYER_COUNTS[0]]
    layers = {at: own for at, own in layers.items() if type(count) is int and at < count}
    counts = Counter(part for own in layers.values() for part in own)
    parents = {part.rpartition(".")[0] for part in counts}  # which may hold parameters in a few
    common = {
        part
        for part, found in counts.items()
        if 2 * found >= len(layers)
        and part not in parents
        and not MAY_DIFFER.search(part)
        and not NO_WEIGHTS.search(part)
    }
    of_mlp = {at: frozenset(filter(MAY_DIFFER.search, own)) for at, own in layers.items()}
    kinds = Counter(of_mlp.values())
    for at, own in sorted(layers.items()):
        mlp = of_mlp[at]
        wholes = [kind for kind in kinds if mlp and mlp < kind and kinds[kind] >= kinds[mlp]]
        whole = max(wholes, key=len, default=mlp)
        for part in sorted(common - own | whole - mlp):
            yield f"{stack}.{at}.{part}", "it is missing, and other layers have one"


def _missing_beside(
    stack: str, layers: _Parts, config: Mapping[str, object], modules: Collection[str]
) -> Iterator[_Lost]:
    """Find a lack of the embedding or the last norm in a plain decoder."""
    name, above = _class_of(config), stack.removesuffix("layers")
    beside = {module[len(above) :] for module in modules if module.startswith(above)}
    ties = config.get(TIED) is not False
    if EMBEDDING not in beside and not (ties and not HEADS.isdisjoint(modules)):
        yield f"{above}{EMBEDDING}", "the embedding is missing"
    has_norms = any("norm" in part for own in layers.values() for part in own)
    if has_norms and not beside & FINAL_NORMS and (not name or name.endswith(GENERATING)):
        yield f"{above}norm", "the norm behind the last layer is missing"


def _missing_in_one(stack: str, layers: _Parts) -> Iterator[_Lost]:
    """Find the only layer that lacks a module, if it lacks no other.

    The first and the last layer of a model may lack modules: the first of ModernBERT has no norm,
    and the last of Stable Diffusion 3 ends one of two streams.
    """
    common, count = Counter(map(frozenset, layers.values())).most_common(1)[0]
    ends = (min(layers), max(layers))
    fewer = [
        (number, part)
        for number, own in layers.items()
        if own < common and number not in ends
        for part in common - own
    ]
    if len(fewer) != 1 or count < FEWEST_ALIKE or len(common) < FEWEST_PARTS:
        return
    number, part = fewer[0]
    # Not a parameter that a module with others in it has in some layers.
    if not any(each.startswith(f"{part}.") for each in common):
        yield f"{stack}.{number}.{part}", f"it is missing, and {count} other layers have one"


def _missing_experts(
    mixtures: Mapping[str, _Parts], config: Mapping[str, object], recipe: Recipe
) -> Iterator[_Lost]:
    keys = recipe.experts[0].counts if recipe.experts else EXPERT_COUNTS
    found = [one[key] for one in configs_in(config) for key in keys if key in one]
    # Several numbers are of several kinds of mixtures.
    count = found[0] if len(set(map(str, found))) == 1 and type(found[0]) is int else 0
    for mixture, experts in mixtures.items():
        total = max(count, max(experts) + 1)
        projections = set[str]().union(*experts.values())
        if missing := _missing_of(range(total), experts):
            first = f"{mixture}{EXPERTS}{missing[0]}"
            detail = f"{_count(missing, 'expert')} of {total} in {mixture} missing"
            yield first, detail
        for number, own in experts.items():
            if lacks := sorted(projections - own):
                first = f"{mixture}{EXPERTS}{number}.{lacks[0]}"
                yield first, f"{first} is missing, which other experts have"


def _missing_head(modules: Collection[str], config: Mapping[str, object]) -> Iterator[_Lost]:
    ties = [one[TIED] for one in configs_in(config) if TIED in one]
    name = _class_of(config)
    if not ties or any(ties) or not name.endswith(GENERATING):
        return
    if is_draft_head(modules):  # engines lend it that of its model
        return
    if not any(HEADS.intersection(module.rsplit(".", 2)[-2:]) for module in modules):
        yield "lm_head", f"lm_head is missing; {name} has one that is not tied to the embedding"


def _class_of(config: Mapping[str, object]) -> str:
    """Return the name of the model's class; "" if config.json has none."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    return name if isinstance(name, str) else ""


def _split_at_number(module: str) -> tuple[str, int, str]:
    """Split a name before and after its first number; -1 without a number."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if _is_number(part):
            return ".".join(parts[:place]), int(part), ".".join(parts[place + 1 :])
    return module, -1, ""


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= DIGITS


def _missing_of(numbers: range, found: Collection[int]) -> list[int]:
    """List the first numbers that are missing; a config.json may count any."""
    return list(islice((number for number in numbers if number not in found), SHOWN + 1))


def _count(numbers: list[int], what: str) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"
