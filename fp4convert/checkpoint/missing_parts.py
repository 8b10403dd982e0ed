"""Find parts that a model lacks; judge a source by them and by its sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import NamedTuple

from fp4convert.checkpoint.class_table import OWN_CODE, find_architecture, note_on_class
from fp4convert.checkpoint.config_sizes import LEFT_OUT, find_odd_sizes
from fp4convert.checkpoint.explained import WEIGHTLESS, Explained, Lost, Unexplained, explain
from fp4convert.errors import Finding, InputError
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.recipes.patterns import TEXT_CONFIGS, configs_in
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.uneven_formats import EXPERTS
from fp4convert.storage.safetensors import WEIGHT

# Last names of what holds the layers of a model, numbered from 0.
STACKS = frozenset({"layers", "layer", "h", "blk", "blocks", "block", "transformer_blocks"})
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
ZERO_EXPERTS = "zero_expert_num"  # of LongCat, that compute nothing
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
MIXTURE = EXPERTS.removesuffix(".")  # how the part ends that all experts are together
FEWEST_PARTS = 3  # of most layers, by which they are told from other numbered parts
FEWEST_ALIKE = 3  # layers from which a single other one is told
DIGITS = 18  # of a number in a name
SHOWN = 5  # missing numbers in a message
_Parts = dict[int, set[str]]  # of each layer of a stack, or of each expert


class Judgement(NamedTuple):
    """What the names and sizes of a checkpoint say of it.

    faults       missing modules, and sizes that config.json contradicts
    unexplained  tensors that the class in config.json does not have
    note         that the class is in no table, or contradicts config.json's model type; or ""
    kept         names of weights that the class does not hold as linear layers, and reasons
    is_embedding  weights of linear layers and embeddings of the class: whether the latter
    """

    faults: tuple[Finding, ...] = ()
    unexplained: tuple[Unexplained, ...] = ()
    note: str = ""
    kept: Mapping[str, str] = {}
    is_embedding: Mapping[str, bool] = {}

    @property
    def findings(self) -> list[Finding]:
        """List everything as findings of `inspect`."""
        strange = [Finding("warning", "unexplained", *one) for one in self.unexplained]
        note = [Finding("note", "class-unknown", None, self.note)] if self.note else []
        return [*self.faults, *strange, *note]

    def refuse_odd_sizes(self, config: Mapping[str, object]) -> None:
        """Raise InputError for matrices that config.json contradicts.

        Code of a model's own may have other sizes.
        """
        odd = [one for one in self.faults if one.code == "config-size"]
        odd = [one for one in odd if not one.detail.endswith(LEFT_OUT)]
        if odd and OWN_CODE not in config:
            next_step = "Take config.json from the model of these weights, or correct its number."
            raise InputError("config-size", odd[0].detail, next_step, odd[0].tensor)


def judge_names(
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, object],
    recipe: Recipe,
) -> Judgement:
    """Judge a checkpoint by the class in its config.json.

    names    of tensors: those that no encoding has taken, and MODULE.weight of each packed one
    shapes   module -> shape of its weight
    config   config.json; may be empty
    """
    modules = {name.rpartition(".")[0] for name in names}
    odd = tuple(find_odd_sizes(shapes, config))
    ranks = {module + WEIGHT: len(shape) for module, shape in shapes.items()}
    explained = explain_by_class(names, config, recipe, ranks)
    lost = _list_lost(modules, config, recipe, explained)
    faults = [Finding("error", "module-missing", one.name, one.detail + WEIGHTLESS) for one in lost]
    note = "" if is_draft_head(modules) else note_on_class(config, explained is not None)
    if explained:
        strange, _, kept, is_embedding = explained
        if surplus := tuple(_find_surplus(names, config, recipe)):
            strange = (*strange, *surplus)
            kept = {**kept, **{one.name: f"unexplained: {one.reason}" for one in surplus}}
        return Judgement((*faults, *odd), strange, note, kept, is_embedding)
    return Judgement((*faults, *odd), note=note)


def explain_by_class(
    names: Collection[str],
    config: Mapping[str, object],
    recipe: Recipe,
    ranks: Mapping[str, int],
) -> Explained | None:
    """Hold names against the class in config.json; None where no table has it.

    A model with code of its own, or a draft head, is held against a class only if all fits.
    """
    architecture = find_architecture(config, names)
    if architecture is None or not names:
        return None
    explained = explain(names, architecture, recipe, ranks)
    is_other = OWN_CODE in config or is_draft_head({name.rpartition(".")[0] for name in names})
    if is_other and (explained.unexplained or explained.lost):
        return None
    return explained


def fault_text(fault: Finding) -> str:
    """Return the words of a fault with the name of its module."""
    return fault.detail if str(fault.tensor) in fault.detail else f"{fault.tensor}: {fault.detail}"


def _list_lost(
    modules: Collection[str],
    config: Mapping[str, object],
    recipe: Recipe,
    explained: Explained | None,
) -> list[Lost]:
    """Find the modules of a model that a checkpoint lacks."""
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
    lost = [*_missing_experts(mixtures, config, recipe)]
    if explained:
        return [*lost, *explained.lost]
    lost = [*_missing_layers(stacks, config), *_missing_at_end(stacks, config, recipe), *lost]
    lost += _missing_head(modules, config)
    if not any(UNEVEN_LAYERS in one for one in configs_in(config)) and not is_draft_head(modules):
        lost += [
            each for stack, layers in stacks.items() for each in _missing_in_one(stack, layers)
        ]
    return lost


def _missing_layers(stacks: Mapping[str, _Parts], config: Mapping[str, object]) -> Iterator[Lost]:
    """Find gaps in the numbers of layers."""
    if (expected := _count_layers(config)) is None:
        return
    for stack, found in stacks.items():
        first = 0 if min(found) < expected else min(found)  # beyond lie drafts alone
        # Of what else is named so, as of an audio codec, some have no weights: a function, a pool.
        if sorted(map(len, found.values()))[len(found) // 2] < FEWEST_PARTS:
            continue
        if missing := _missing_of(range(first, max(found)), found):
            detail = f"{_count(missing, 'layer')} of {stack} missing"
            yield Lost(f"{stack}.{missing[0]}", detail)


def _missing_at_end(
    stacks: Mapping[str, _Parts], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Lost]:
    """Find that layers end before the count in config.json."""
    texts = {
        stack: max(found) + 1
        for stack, found in stacks.items()
        if recipe.kind_of(f"{stack}.0") != "tower"
    }
    expected = _count_layers(config) or 0
    if texts and max(texts.values()) < expected:
        stack = max(texts, key=lambda name: texts[name])
        detail = f"config.json has {expected} layers, and {stack} ends after {texts[stack]}"
        yield Lost(f"{stack}.{texts[stack]}", detail)


def _count_layers(config: Mapping[str, object]) -> int | None:
    """Return the count in config.json; 0 without one, None of uneven layers."""
    if any(UNEVEN_LAYERS in one for one in configs_in(config)):
        return None
    text = next((config[name] for name in TEXT_CONFIGS if name in config), config)
    counts = [text.get(key) for key in LAYER_COUNTS] if isinstance(text, Mapping) else []
    return min((count for count in counts if type(count) is int), default=0)


def _missing_in_one(stack: str, layers: _Parts) -> Iterator[Lost]:
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
        detail = f"it is missing, and {count} other layers have one"
        yield Lost(f"{stack}.{number}.{part}", detail)


def _count_experts(config: Mapping[str, object], recipe: Recipe) -> int:
    """Return the count in config.json; 0 without one.

    Several numbers are of several kinds of mixtures.
    """
    keys = recipe.experts[0].counts if recipe.experts else EXPERT_COUNTS
    found = [one[key] for one in configs_in(config) for key in keys if key in one]
    return found[0] if len(set(map(str, found))) == 1 and type(found[0]) is int else 0


def _find_surplus(
    names: Iterable[str], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Unexplained]:
    """Find experts beyond the count in config.json.

    LongCat's experts beyond it compute nothing, and transformers saves parts of them.
    """
    count = _count_experts(config, recipe)
    if not count or ZERO_EXPERTS in config:
        return
    for name in names:
        _, inside, rest = name.partition(EXPERTS)
        number = rest.partition(".")[0] if inside else ""
        if _is_number(number) and int(number) >= count:
            yield Unexplained(name, f"config.json has {count} experts")


def _missing_experts(
    mixtures: Mapping[str, _Parts], config: Mapping[str, object], recipe: Recipe
) -> Iterator[Lost]:
    count = _count_experts(config, recipe)
    for mixture, experts in mixtures.items():
        total = max(count, max(experts) + 1)
        projections = sorted(set[str]().union(*experts.values()))
        if missing := _missing_of(range(total), experts):
            first = f"{mixture}{EXPERTS}{missing[0]}"
            detail = f"{_count(missing, 'expert')} of {total} in {mixture} missing"
            yield Lost(first, detail)
        for number, own in experts.items():
            if 0 < count <= number and ZERO_EXPERTS in config:
                continue
            # A search that ends early: strange names may be as many as there are experts.
            lack = next((part for part in projections if part not in own), None)
            if lack is not None:
                first = f"{mixture}{EXPERTS}{number}.{lack}"
                yield Lost(first, f"{first} is missing, which other experts have")


def _missing_head(modules: Collection[str], config: Mapping[str, object]) -> Iterator[Lost]:
    ties = [one[TIED] for one in configs_in(config) if TIED in one]
    name = class_of(config)
    if not ties or any(ties) or not name.endswith(GENERATING):
        return
    if is_draft_head(modules):  # engines lend it that of its model
        return
    if not any(HEADS.intersection(module.rsplit(".", 2)[-2:]) for module in modules):
        detail = f"lm_head is missing; {name} has one that is not tied to the embedding"
        yield Lost("lm_head", detail)


def class_of(config: Mapping[str, object]) -> str:
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
