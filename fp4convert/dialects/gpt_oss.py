"""gpt-oss: MXFP4 as OpenAI stores the experts of gpt-oss, all of a layer in one tensor.

  X.gate_up_proj_blocks  U8  [experts, 2 * inner, columns / 32, 16]: rows of gate and up in turn, gate first
  X.gate_up_proj_scales  U8  [experts, 2 * inner, columns / 32]
  X.down_proj_blocks, X.down_proj_scales: the same with [experts, outer, ...]

X is "...mlp.experts".  As modules they are X.N.gate_proj, X.N.up_proj and X.N.down_proj, as other models name their experts;
the biases (X.gate_up_proj_bias) stay as they are.  Everything but the experts stays unquantized.
Source: openai/gpt-oss-20b; transformers 5.23, integrations/mxfp4.  Readers: transformers, vLLM, SGLang.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from fp4convert.dialects import (
    Clues,
    Form,
    Ignored,
    Json,
    Part,
    Read,
    always_fit,
    no_doubts,
    no_notes,
    stems_named,
    strings,
    whole_blocks,
)
from fp4convert.errors import InputError
from fp4convert.formats import MXFP4, Blocks, Format, Kind, Quantized, Spans
from fp4convert.shard import TensorRef, TensorSpec
from fp4convert.stacks import Rows, Slot

READS = WRITES = (MXFP4,)
ACTIVATIONS: tuple[Format, ...] = ()
CONTAINER = "safetensors"
LAYOUTS = ("linear",)
NIBBLE_ORDER = "low_first"
GLOBAL_SCALE_KIND: Kind | None = None
SHARES_SCALES = False
HOLDS_EMBEDDINGS = False
PACKED = "_blocks"
SUFFIXES = ("_blocks", "_scales")
COMPANIONS = ()
LABELS: tuple[str, ...] = ()
CACHE_SCALES: tuple[str, ...] = ()
_MEMBERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj")
_BLOCK_NBYTES = MXFP4.block_size // 2
notes, judge, unfit = no_notes, no_doubts, always_fit


def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Two stacks for each layer; every expert must be there, and all of one shape."""
    experts: dict[str, dict[int, dict[str, tuple[int, int]]]] = defaultdict(lambda: defaultdict(dict))
    for module, matrix in shapes.items():
        if (match := _EXPERT.fullmatch(module)) is None:
            detail = f"{module} is four-bit; dialect gpt-oss holds only experts, named ...experts.N.gate_proj, up_proj, down_proj"
            raise InputError("dialect-module", detail, "Choose another --dialect.", module)
        experts[match[1]][int(match[2])][f"{match[3]}_proj"] = matrix
    found: dict[str, tuple[int, ...]] = {}
    for parent, members in experts.items():
        for stack, names in _MEMBERS.items():
            kinds = {members.get(number, {}).get(name) for number in range(len(members)) for name in names}
            shape = kinds.pop()
            if kinds or shape is None:
                detail = f"{parent}: dialect gpt-oss stacks the {stack} of all experts; expected every one, and all of one shape"
                raise InputError("dialect-module", detail, "Choose another --dialect.", parent)
            found[f"{parent}.{stack}"] = (len(members), shape[0] * len(names), shape[1])
    return found


def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    parent, _, stack = stem.rpartition(".")
    names = _MEMBERS.get(stack, (stack,))
    height = shape[1] // len(names)
    return tuple(tuple(Rows(f"{parent}.{number}.{name}", 0, height) for name in names) for number in range(shape[0]))


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    experts, rows, columns = shape
    blocks = columns // form.format.block_size
    return (
        TensorSpec(f"{stem}_blocks", "U8", (experts, rows, blocks, _BLOCK_NBYTES)),
        TensorSpec(f"{stem}_scales", "U8", (experts, rows, blocks)),
    )


def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
    for rows in panels:
        yield f"{stem}_blocks", rows.packed
        yield f"{stem}_scales", rows.block_scales


def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
    yield from ()


def find(tensors: Mapping[str, TensorRef]) -> list[str]:
    return stems_named(tensors, SUFFIXES)


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    if len(packed.shape) != 4 or packed.shape[1] % len(_MEMBERS.get(stem.rpartition(".")[2], "1")):
        return None
    return whole_blocks((*packed.shape[:2], packed.shape[2] * form.format.block_size), form)


def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
    experts, rows, columns = shape
    return Spans(form.format, (experts * rows, columns), read(f"{stem}_blocks"), read(f"{stem}_scales"), None)


def decode_input_scale(module: str, read: Read) -> float:
    raise RuntimeError("gpt-oss has no input scales")


def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
    exact = [pattern for pattern in ignored.patterns if not set(pattern) & set("*?[:")]  # transformers compiles them: no globs
    stems = tuple(quantized)  # their own biases may stay
    kept = [name for name in (*ignored.modules, *exact) if not any(stem.startswith(f"{name}.") for stem in stems)]
    record = {"quant_method": "mxfp4", "modules_to_not_convert": sorted(set(kept))}
    return {"config.json": {"quantization_config": record}}


def recognise(clues: Clues) -> Form | None:
    return Form(MXFP4) if clues.record.get("quant_method") == "mxfp4" else None


def is_ignored(clues: Clues, module: str) -> bool:
    """`modules_to_not_convert` holds beginnings of names, up to a dot or the end, in which "*" fits anything."""
    names = strings(clues.record.get("modules_to_not_convert"))
    return any(re.match(re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)", module) for name in names)
