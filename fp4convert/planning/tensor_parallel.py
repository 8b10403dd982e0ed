"""Find layers that tensor parallelism cannot divide; pad them with zeros.

An engine gives each of N GPUs (ranks) as many rows of q, k, v, gate and up, and as many columns of
o and down, in whole blocks.  Zeros change nothing that a model computes: a row of zeros in gate and
up makes a zero, which a column of zeros in down reads; a head whose keys and values are zeros
answers zeros, which columns of zeros in o read.  That holds for the families below, whose
config.json has a key for every size.
Source of names and keys: transformers 5.23, models/FAMILY/modeling_FAMILY.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fp4convert.checkpoint.record import PADDING
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.planning.plan import Plan
from fp4convert.recipes.rules import STACK_DIMENSIONS, is_expert_stack
from fp4convert.recipes.uneven_formats import EXPERTS
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.padded import PaddedSource
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Padding, Source

OPTION = "--pad-for-tp"
RANKS = (2, 4, 8)  # of which plans warn
ROW_PARALLEL = frozenset(  # layers whose columns (K) vLLM, SGLang and TensorRT-LLM divide
    {
        *("o_proj", "out_proj", "wo", "c_proj", "dense_4h_to_h"),
        *("down_proj", "w2", "fc2", "fc_out", "linear_fc2"),
    }
)
# Whose rows they divide; not k_proj and v_proj, which they repeat where heads are few.
COLUMN_PARALLEL = frozenset(
    {
        *("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
        *("fc1", "c_fc", "fc_in", "linear_fc1", "dense_h_to_4h", "wi", "wi_0", "wi_1"),
    }
)
# Of each family, the key of its experts' size, and whether engines read head_dim of it.
FAMILIES = {
    "llama": ("", True),
    "mistral": ("", True),
    "mixtral": ("intermediate_size", True),
    "qwen2": ("", False),
    "qwen2_moe": ("moe_intermediate_size", False),
    "qwen3": ("", True),
    "qwen3_moe": ("moe_intermediate_size", True),
}
MADE, READ = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")  # of an MLP
QUERIES, KEYS_VALUES, ANSWERS = ("q_proj",), ("k_proj", "v_proj"), ("o_proj",)
HEAD_NORMS, POSITIONS = ("q_norm", "k_norm"), "rotary_emb"  # each head has its own values of these


def find_bad_splits(plan: Plan, ranks: tuple[int, ...] = RANKS) -> Iterator[tuple[str, list[int]]]:
    """Find kinds of layers that some numbers of ranks cannot divide.

    Returns  a sentence on each kind, and these numbers
    """
    kinds: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for step in plan.steps:
        if step.form and len(step.shape) > 1:
            leaf = step.module.rpartition(".")[2]
            if leaf in ROW_PARALLEL:
                kinds[leaf, step.shape[-1], step.form.format.block_size].append(step.module)
            elif leaf in COLUMN_PARALLEL:
                kinds[leaf, step.shape[-2], 0].append(step.module)
    for (leaf, size, block), modules in kinds.items():
        bad = [count for count in ranks if size % (count * max(block, 1))]
        if not bad:
            continue
        evenly = f"{size} rows cannot be divided"
        if block:
            evenly = f"{size} columns cannot be divided into whole blocks of {block}"
        *most, last = map(str, bad)
        listed = " or ".join(filter(None, (", ".join(most), last)))
        where = f"1 module, {modules[0]!r}"
        if len(modules) > 1:
            where = f"{len(modules):,} modules, the first {modules[0]!r}"
        yield f"{leaf}: {evenly} among {listed} ranks of tensor parallelism ({where})", bad


class _Sizes(NamedTuple):
    """The sizes in config.json, and the changed ones by key."""

    config: Mapping[str, object]
    changed: dict[str, int]

    def before(self, key: str, tensor: str) -> int:
        """Return a number of config.json; InputError where there is none."""
        value = self.config.get(key)
        if type(value) is not int or value < 1:
            raise _unfit(f"config.json has {key} {value!r}; expected a number", tensor)
        return value


def pad_for_ranks(source: Source, ranks: int, block_size: int) -> PaddedSource:
    """Add zeros to a source so that every rank gets whole blocks.

    Raises  InputError for a family, tensor or number for which nobody has shown that zeros change
            nothing, and where everything divides without them
    """
    checkpoint = source.checkpoint
    family = str(checkpoint.config.get("model_type"))
    if any(shard.frame.container != "safetensors" for shard in checkpoint.shards):
        detail = f"{source.name} is a GGUF file, which gets no zeros; expected safetensors"
        raise InputError("pad-family", detail, "Start from the model's safetensors.")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        detail = f"{source.name} is of the family {family!r}, in which nobody has shown that zeros"
        raise InputError("pad-family", f"{detail} change nothing; expected one of {known}")
    tensors = {ref.name: ref for ref in checkpoint.tensors}
    sizes = _Sizes(checkpoint.config, {})
    shapes = _pad_mlps(tensors, sizes, family, ranks * block_size)
    shapes |= _pad_heads(tensors, sizes, family, (ranks, block_size))
    if not shapes:
        detail = f"{OPTION} {ranks} changes nothing: {ranks} ranks get whole blocks as it is"
        raise InputError("idle-option", detail, f"Leave {OPTION} out.")
    for name in shapes:
        if tensors[name].dtype not in FLOAT_TYPES:
            raise _unfit(f"it is {tensors[name].dtype}, packed already; expected floats", name)
    config = {**checkpoint.config, **sizes.changed}
    before = {key: checkpoint.config.get(key) for key in sizes.changed}
    edits = {key: [before[key], size] for key, size in sizes.changed.items() if size != before[key]}
    record = {"tensor_parallel": ranks, "block_size": block_size, "config": edits}
    listed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in edits.items())
    note = f"{len(shapes)} tensors get zeros for {ranks} ranks of tensor parallelism: {listed};"
    padding = Padding(record, f"{note} the model computes the same")
    return PaddedSource(source, shapes, config, padding)


def _unfit(detail: str, tensor: str) -> InputError:
    return InputError("pad-tensor", f"{OPTION}: {tensor}: {detail}", tensor=tensor)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _pad_mlps(
    tensors: Mapping[str, TensorRef], sizes: _Sizes, family: str, unit: int
) -> dict[str, tuple[int, ...]]:
    """Return new shapes of gates, ups and downs; note the keys that change.

    unit  their size becomes a multiple of it
    """
    shapes = {}
    for name, ref in tensors.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if is_expert_stack(name, ref.shape) and len(ref.shape) == STACK_DIMENSIONS:
            raise _unfit("it stacks the matrices of experts; expected one for each", name)
        if leaf not in (*MADE, *READ) or kind not in ("weight", "bias"):
            continue
        key = _key_of(parent, family)
        before = sizes.before(key, name)
        axis = 0 if leaf in MADE else 1
        if axis == len(ref.shape):  # a bias of what reads
            continue
        if ref.shape[axis] != before:
            detail = f"it is {list(ref.shape)}, and {key} of config.json is {before}"
            raise _unfit(f"{detail}; expected that size", name)
        after = _up(before, unit)
        if after != before:
            sizes.changed[key] = after
            shapes[name] = (*ref.shape[:axis], after, *ref.shape[axis + 1 :])
    return shapes


def _key_of(parent: str, family: str) -> str:
    """Return the key of config.json with the size of an MLP."""
    if EXPERTS in f"{parent}.":
        return FAMILIES[family][0] or "intermediate_size"
    return "shared_expert_intermediate_size" if "shared_expert" in parent else "intermediate_size"


def _pad_heads(
    tensors: Mapping[str, TensorRef], sizes: _Sizes, family: str, split: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return new shapes of q, k, v and o; note the numbers of heads.

    Each head of keys and values serves as many heads of queries as before.

    split  ranks, and the size of a block
    """
    (ranks, block), config = split, sizes.config
    named = [name for name in tensors if name.endswith(f".{QUERIES[0]}{WEIGHT}")]
    if not named:
        return {}
    heads = sizes.before("num_attention_heads", named[0])
    pairs = heads
    if "num_key_value_heads" in config:
        pairs = sizes.before("num_key_value_heads", named[0])
    hidden = sizes.before("hidden_size", named[0])
    width = config.get("head_dim") or hidden // heads
    if not isinstance(width, int) or heads % pairs:
        detail = f"{heads} heads of queries, {pairs} of keys and head_dim {width!r} do not divide"
        raise _unfit(detail, named[0])

    def divides(count: int) -> bool:
        queries = count * (heads // pairs)
        whole = not queries % ranks and not queries // ranks * width % block
        # transformers' configuration of Llama refuses heads that do not divide the hidden size
        return whole and not hidden % queries and (not count % ranks or not ranks % count)

    if not heads % ranks and not heads // ranks * width % block:
        return {}
    if not FAMILIES[family][1]:
        detail = f"{heads} heads of {width} are no whole blocks for {ranks} ranks; more would need"
        raise _unfit(f"{detail} a head_dim, which engines of {family} do not read", named[0])
    most = min(pairs + ranks * block, hidden // (heads // pairs))  # more do not divide it
    count = next(filter(divides, range(pairs, most + 1)), None)
    if count is None:
        detail = f"no number of heads from {heads} on divides the hidden size {hidden} and"
        raise _unfit(f"{detail} can be divided among {ranks} ranks", named[0])
    queries = count * (heads // pairs)
    numbers = {"num_attention_heads": queries, "num_key_value_heads": count, "head_dim": width}
    sizes.changed.update(numbers)
    shapes: dict[str, tuple[int, ...]] = {}
    old, new = (heads * width, pairs * width, width), (queries * width, count * width, width)
    attentions = {name.removesuffix(f".{QUERIES[0]}{WEIGHT}") for name in named}
    for name, ref in tensors.items():
        above, _, last = name.rpartition(".")
        parent, _, leaf = above.rpartition(".")
        if above in attentions or parent in attentions:
            shapes |= _pad_attention(last if above in attentions else leaf, ref, old, new)
    return shapes


def _pad_attention(
    leaf: str, ref: TensorRef, old: tuple[int, int, int], new: tuple[int, int, int]
) -> dict[str, tuple[int, ...]]:
    """Return {name: new shape} of an attention's tensor, or {}.

    leaf      last part of the module's name
    old, new  rows of q, of k and v, and of one head
    """
    sizes = dict.fromkeys((*QUERIES, *ANSWERS), 0) | dict.fromkeys(KEYS_VALUES, 1)
    axis = 1 if leaf in ANSWERS else 0
    if leaf == POSITIONS or (leaf in HEAD_NORMS and ref.shape == (old[2],)):
        return {}
    if leaf not in sizes or (axis < len(ref.shape) and ref.shape[axis] != old[sizes[leaf]]):
        raise _unfit(f"it is {list(ref.shape)} and may depend on the number of heads", ref.name)
    if axis == len(ref.shape):
        return {}
    after = new[sizes[leaf]]
    return {ref.name: (*ref.shape[:axis], after, *ref.shape[axis + 1 :])}


def refuse_bad_splits(plan: Plan, ranks: int) -> None:
    """Raise InputError where ranks cannot divide a padded plan either."""
    if lines := [line for line, _ in find_bad_splits(plan, (ranks,))]:
        detail = f"{OPTION} {ranks} does not mend all: {lines[0]}"
        raise InputError("pad-tensor", f"{detail}; expected layers that zeros can make divisible")


def can_pad(source: Source, ranks: int, block_size: int) -> bool:
    """Return whether zeros make a source divisible."""
    try:
        pad_for_ranks(source, ranks, block_size)
    except InputError:
        return False
    return True


def pad_as_recorded(record: Mapping[str, object], source: Source) -> Source:
    """Add the zeros to a source that an artifact's record lists.

    Returns  the source itself where the record lists none, or the source has the recorded sizes
    Raises   InputError for a malformed record, and a source that gets other sizes
    """
    config = source.checkpoint.config
    match record.get(PADDING):
        case None:
            return source
        case {
            "tensor_parallel": int(ranks),
            "block_size": int(block_size),
            "config": dict(edits),
        } if ranks > 1 and block_size > 0:
            if all([config.get(key)] == edit[1:] for key, edit in edits.items()):
                return source
            padded = pad_for_ranks(source, ranks, block_size)
            padding = padded.checkpoint.padding
            changed = padding.record["config"] if padding else {}
            if changed == edits:
                return padded
            detail = f"{source.name} would become {changed} with zeros"
            raise InputError("record-padding", f"{detail}; expected {edits}, as {RECORD} says")
        case found:
            detail = f"{RECORD}: padding is {str(found)[:200]}"
            expected = "expected tensor_parallel, block_size and config"
            raise InputError("record-padding", f"{detail}; {expected}")
