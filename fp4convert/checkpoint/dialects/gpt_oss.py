"""gpt-oss: MXFP4 as OpenAI stores the experts of gpt-oss.

  X.gate_up_proj_blocks  U8  [experts, 2 * inner, columns / 32, 16]: rows of gate and up in turn,
                             gate first
  X.gate_up_proj_scales  U8  [experts, 2 * inner, columns / 32]
  X.down_proj_blocks, X.down_proj_scales: the same with [experts, outer, ...]

X is "...mlp.experts". As modules they are X.N.gate_proj, X.N.up_proj and X.N.down_proj, as other
models name their experts; the biases (X.gate_up_proj_bias) stay as they are. Everything but the
experts stays unquantized.
Source: openai/gpt-oss-20b; transformers 5.23, integrations/mxfp4.
Readers: transformers, vLLM, SGLang.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Ignored,
    Json,
    Traits,
    no_doubts,
    nothing,
    shape_of_all,
    stems_named,
    strings,
)
from fp4convert.checkpoint.dialects.forms import Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import METHODS, SUFFIXES
from fp4convert.checkpoint.dialects.stacks import Rows, Slot
from fp4convert.checkpoint.dialects.tables import Scalars, Table, whole_blocks
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import MXFP4
from fp4convert.storage.safetensors import TensorRef, TensorSpec

METHOD = METHODS["gpt-oss"]
TRAITS = Traits(
    writes=(MXFP4,), scalars=Scalars(None), packed="_blocks", suffixes=SUFFIXES["gpt-oss"]
)
TABLE = Table(("_blocks", "U8"), "_scales", {MXFP4: "U8"}, TRAITS.scalars)
find, encode, decode = partial(stems_named, endings=TRAITS.suffixes), TABLE.encode, TABLE.decode
notes, judge, unfit = nothing, no_doubts, TABLE.unfit
_MEMBERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MOST_STARS = 4  # in a name of a record: each one more multiplies the time that it takes
_EXPERT = re.compile(r"(.*experts)\.(0|[1-9]\d{0,8})\.(gate|up|down)_proj")
_BLOCK_NBYTES = MXFP4.block_size // 2


def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Stack the experts of a layer; all must be there, of one shape."""
    experts: dict[str, dict[int, dict[str, tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for module, matrix in shapes.items():
        if (match := _EXPERT.fullmatch(module)) is None:
            detail = f"{module} is four-bit; dialect gpt-oss holds only experts"
            detail = f"{detail}, named ...experts.N.gate_proj, up_proj, down_proj"
            raise ChoiceError("dialect-module", detail, tensor=module)
        experts[match[1]][int(match[2])][f"{match[3]}_proj"] = matrix
    found: dict[str, tuple[int, ...]] = {}
    for parent, members in experts.items():
        for stack, names in _MEMBERS.items():
            shape = shape_of_all(
                members.get(number, {}).get(name)
                for number in range(len(members))
                for name in names
            )
            if shape is None:
                detail = f"{parent}: dialect gpt-oss stacks the {stack} of all experts"
                detail = f"{detail}; expected every one, and all of one shape"
                raise ChoiceError("dialect-module", detail, tensor=parent)
            found[f"{parent}.{stack}"] = (len(members), shape[0] * len(names), shape[1])
    return found


def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    parent, _, stack = stem.rpartition(".")
    names = _MEMBERS.get(stack, (stack,))
    height = shape[1] // len(names)
    return tuple(
        tuple(Rows(f"{parent}.{number}.{name}", 0, height) for name in names)
        for number in range(shape[0])
    )


def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
    experts, rows, columns = shape
    blocks = columns // form.format.block_size
    return (
        TensorSpec(f"{stem}_blocks", "U8", (experts, rows, blocks, _BLOCK_NBYTES)),
        TensorSpec(f"{stem}_scales", "U8", (experts, rows, blocks)),
    )


def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    members = _MEMBERS.get(stem.rpartition(".")[2], (stem,))
    if len(packed.shape) != 4 or packed.shape[1] % len(members):
        return None
    return whole_blocks((*packed.shape[:2], packed.shape[2] * form.format.block_size), form)


def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
    # transformers compiles them: no globs
    exact = [pattern for pattern in ignored.patterns if not set(pattern) & set("*?[:")]
    stored = groups[0].modules  # their own biases may stay
    kept = [
        name
        for name in (*ignored.modules, *exact)
        if not any(stem.startswith(f"{name}.") for stem in stored)
    ]
    record = {"quant_method": METHOD, "modules_to_not_convert": sorted(set(kept))}
    return {"config.json": {"quantization_config": record}}


def recognise(clues: Clues) -> tuple[Group, ...]:
    return everywhere(Form(MXFP4) if clues.record.get("quant_method") == METHOD else None)


def ignores(clues: Clues) -> Callable[[str], bool]:
    """Read `modules_to_not_convert`: beginnings of names, with wildcards "*"."""
    names = strings(clues.record.get("modules_to_not_convert"))
    few = [name for name in names if name.count("*") <= MOST_STARS]
    expressions = [re.compile(re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)") for name in few]
    return lambda module: any(expression.match(module) for expression in expressions)
