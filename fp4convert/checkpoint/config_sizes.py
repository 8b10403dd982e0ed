"""Find sizes that contradict config.json.

Engines make a model of config.json and fill it: other sizes are refused, or read as something else.
Sizes are judged for families of plain decoders alone, in which a few numbers give every size;
tests/quality/test_config_sizes.py asks transformers' own models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fp4convert.errors import Finding
from fp4convert.recipes.draft_layers import JOINT, is_draft_head
from fp4convert.recipes.uneven_formats import EXPERTS

# Families of plain decoders, in which a few numbers of config.json give every size.
DECODERS = frozenset(
    {
        *("llama", "mistral", "mixtral", "ministral3", "qwen2", "qwen3", "qwen2_moe"),
        *("qwen3_moe", "gemma", "gemma2", "gemma3_text", "granite", "granitemoe", "olmo", "olmo2"),
        *("olmo3", "olmoe", "phi", "stablelm", "starcoder2", "smollm3", "seed_oss", "cohere"),
        *("cohere2", "helium", "arcee", "glm", "glm4", "ernie4_5", "exaone4", "apertus"),
    }
)
WHOLE = frozenset(  # what every config.json of such a model names
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "vocab_size"),
    }
)
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"})
# Families whose class has a head_dim of its own where config.json states none.
OWN_HEAD_DIM = frozenset(
    {
        *("ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "helium", "ministral3"),
        *("qwen3", "seed_oss"),
    }
)
SQUARE_OUTPUT = frozenset({"helium"})  # families whose o_proj is hidden x hidden
LEFT_OUT = ": engines leave it out"
MOST_LETTERS = 40  # of a value in a message
COUNT_DIGITS = 9  # of a size in config.json
_PLACE = re.compile(
    r"(?:model\.)?(?:layers\.(?P<layer>[0-9]{1,9})\.)?(?:self_attn|mlp|)\.?(?P<rest>.*)"
)
Sizes = tuple[tuple[str, int] | None, tuple[str, int] | None]


class _Numbers(NamedTuple):
    """The numbers of config.json that give sizes; None if it has no such key."""

    hidden: tuple[str, int] | None
    vocabulary: tuple[str, int] | None
    heads: tuple[str, int] | None  # rows of the head: a draft head may know fewer words
    mlp: tuple[str, int] | None
    expert: tuple[str, int] | None
    queries: tuple[str, int] | None
    attended: tuple[str, int] | None  # columns of o_proj
    keys: tuple[str, int] | None


def is_plain_decoder(config: Mapping[str, object]) -> bool:
    """Tell whether a config is whole, and of layers that differ by mlp alone."""
    return str(config.get("model_type")) in DECODERS and config.keys() >= WHOLE


def find_odd_sizes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]
) -> Iterator[Finding]:
    """Find matrices and layers that config.json contradicts, one for a kind.

    shapes  module -> (rows, columns) of its matrix
    """
    if not is_plain_decoder(config):
        return
    for key in sorted(WHOLE):
        value = config[key]
        if type(value) is not int or value < 1:
            what = json.dumps(value)[:MOST_LETTERS]
            detail = f"config.json has {key} {what}, and engines read a whole number of 1 or more"
            yield Finding("error", "config-size", None, detail)
    numbers, told, layers = _read(config), set[str](), _int(config, "num_hidden_layers")
    doubled = _read_twice(shapes, numbers.hidden)
    plain, of_experts = (
        _expected_sizes(numbers, numbers.mlp),
        _expected_sizes(numbers, numbers.expert),
    )
    for module, shape in shapes.items():
        found = _PLACE.fullmatch(module)
        if not found or len(shape) != 2:
            continue
        digits, rest = found.groups()
        layer, name = int(digits or 0), rest.rpartition(".")[2]
        if layers and layer >= layers and "layers" not in told:
            told.add("layers")
            detail = f"config.json has num_hidden_layers {layers}, and there is a layer {layer}"
            yield Finding("error", "config-size", module, detail + LEFT_OUT)
        sizes = of_experts if EXPERTS in f".{rest}" else plain
        if name not in sizes or "shared" in rest:
            continue
        rows, columns = sizes[name]
        if name in ATTENTION and not layer:
            columns = doubled or columns
        for axis, size, expected in zip(("rows", "columns"), shape, (rows, columns), strict=True):
            if expected and size != expected[1] and (kind := f"{name} {axis}") not in told:
                told.add(kind)
                words = f"by config.json it has {expected[1]} ({expected[0]})"
                detail = f"{module} has {size} {axis}, and {words}: engines refuse it"
                yield Finding("error", "config-size", module, detail)


def _read_twice(
    shapes: Mapping[str, tuple[int, ...]], hidden: tuple[str, int] | None
) -> tuple[str, int] | None:
    """Return the width that the first attention of an EAGLE-3 head reads.

    None in any other model. Its input is an embedding beside the output of `fc` on the model's
    states; that of EAGLE-1 is the output of `fc` on both (vLLM's models/llama_eagle3.py and
    llama_eagle.py).
    """
    if hidden is None or JOINT not in shapes or not is_draft_head(shapes):
        return None
    both = (f"2 x {hidden[0]}", 2 * hidden[1])
    return None if shapes[JOINT][-1] == both[1] else both


def _expected_sizes(numbers: _Numbers, inner: tuple[str, int] | None) -> dict[str, Sizes]:
    """Return rows and columns of matrices by the last part of their names.

    inner  rows of gate and up
    """
    hidden = numbers.hidden
    return {
        "embed_tokens": (numbers.vocabulary, hidden),
        "lm_head": (numbers.heads, hidden),
        JOINT: (hidden, None),
        "q_proj": (numbers.queries, hidden),
        "k_proj": (numbers.keys, hidden),
        "v_proj": (numbers.keys, hidden),
        "o_proj": (hidden, numbers.attended),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _read(config: Mapping[str, object]) -> _Numbers:
    hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    model, head = str(config.get("model_type")), _int(config, "head_dim")
    if not head and hidden and heads and model not in OWN_HEAD_DIM:
        head = hidden // heads
    by_head = f"x head_dim {head}"
    pairs = _int(config, "num_key_value_heads")
    mlp = _named(config, "intermediate_size")
    of_heads = f"num_attention_heads {heads} {by_head}"
    queries = (of_heads, heads * head) if heads and head else None
    return _Numbers(
        _named(config, "hidden_size"),
        _named(config, "vocab_size"),
        _named(config, "draft_vocab_size") or _named(config, "vocab_size"),
        mlp,
        _named(config, "moe_intermediate_size") or mlp,
        queries,
        _named(config, "hidden_size") if model in SQUARE_OUTPUT else queries,
        (f"num_key_value_heads {pairs} {by_head}", pairs * head) if pairs and head else None,
    )


def _named(config: Mapping[str, object], key: str) -> tuple[str, int] | None:
    value = _int(config, key)
    return (f"{key} {value}", value) if value else None


def _int(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < 10**COUNT_DIGITS else None
