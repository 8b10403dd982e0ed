"""Which linear layers a source has, and how each is stored: from names, headers and records alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fp4convert.artifact import is_artifact, read_artifact, read_clues, refuse_unsaid
from fp4convert.codings import Linear
from fp4convert.codings.floats import STACK_DIMENSIONS, find_floats
from fp4convert.codings.fp4 import find_fp4
from fp4convert.codings.fp8 import find_fp8
from fp4convert.codings.int4 import find_integers
from fp4convert.dialects import Clues, is_quantized_tensor
from fp4convert.errors import InputError
from fp4convert.formats import FLOAT_TYPES
from fp4convert.recipe import Recipe
from fp4convert.shard import TensorRef
from fp4convert.sources import Source

METHODS = frozenset({"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "quark", "mlx"})  # whose tensors are known
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale", ".k_zero_point", ".v_zero_point")
EXPERT_WORDS = ("expert", ".moe.", "_moe.")


@dataclass(frozen=True, slots=True)
class Linears:
    """Every linear layer of a source whose matrix can be read.

    of       by module
    unruled  stacks of expert matrices, whose layout no recipe tells
    idle     scales of a quantized cache of keys and values beside packed layers, whose engine alone has a use for them
    """

    of: Mapping[str, Linear]
    unruled: tuple[TensorRef, ...] = ()
    idle: tuple[TensorRef, ...] = ()

    @property
    def is_packed(self) -> bool:
        """True where one of them is quantized already."""
        return any(linear.coding.is_packed for linear in self.of.values())

    def by_home(self) -> dict[str, list[Linear]]:
        """Those of every tensor, by its name."""
        found: dict[str, list[Linear]] = defaultdict(list)
        for linear in self.of.values():
            found[linear.home.name].append(linear)
        return found

    def consumed(self) -> set[str]:
        """Names of the tensors that stand for linear layers, and for nothing else."""
        names = {ref.name for linear in self.of.values() for ref in (linear.home, *linear.refs, *linear.idle)}
        return names | {ref.name for ref in self.idle}


def find_linears(source: Source, recipe: Recipe) -> Linears:
    """Raises InputError for weights that are quantized in a way that cannot be read, or whose records contradict them."""
    clues = read_clues(source)
    four_bit: Mapping[str, Linear] = {}
    if is_artifact(source, clues):
        artifact = read_artifact(source, source.name)
        artifact.refuse_unsound()
        four_bit = find_fp4(artifact)
    eight_bit, integers = find_fp8(clues), find_integers(clues)
    found = {**find_floats(clues.tensors, recipe.stack_rule), **integers, **eight_bit, **four_bit}
    unruled = tuple(ref for ref in clues.tensors.values() if is_expert_stack(ref) and recipe.stack_rule(ref.name) is None)
    is_packed = any(linear.coding.is_packed for linear in found.values())
    idle = tuple(ref for ref in clues.tensors.values() if is_packed and ref.name.endswith(CACHE_SCALES))
    linears = Linears(found, unruled, idle)
    _refuse_unreadable(clues, linears)
    return linears


def is_expert_stack(ref: TensorRef) -> bool:
    """True for matrices of experts in one tensor: their names tell, not their shapes, which those of convolutions have too."""
    return len(ref.shape) == STACK_DIMENSIONS and ref.dtype in FLOAT_TYPES and any(word in ref.name for word in EXPERT_WORDS)


def _refuse_unreadable(clues: Clues, linears: Linears) -> None:
    """InputError for whatever is quantized and stands for no linear layer that can be read."""
    next_step = "Start from the original weights."
    known = linears.consumed()
    refuse_unsaid(name for name in clues.tensors if name not in known)
    for ref in clues.tensors.values():
        if ref.name not in known and is_quantized_tensor(ref):
            detail = f"{ref.file}: {ref.name!r} ({ref.dtype} {list(ref.shape)}) is quantized in a way that fp4convert does not read"
            raise InputError("already-quantized", detail, next_step, ref.name)
    method = clues.record.get("quant_method", "modelopt" if clues.hf_quant_config else None)
    if (clues.record or clues.hf_quant_config) and not linears.is_packed and method not in METHODS:
        detail = f"config.json: the checkpoint is already quantized, by {method!r}, which fp4convert does not read"
        raise InputError("already-quantized", detail, next_step)
