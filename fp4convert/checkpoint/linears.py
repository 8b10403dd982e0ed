"""Find the linear layers of a source, and how each is stored.

Names, headers and records alone decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fp4convert.checkpoint.artifact import (
    Artifact,
    describe_foreign,
    is_artifact,
    read_artifact,
    read_clues,
)
from fp4convert.checkpoint.dialects.base import Clues, json_object
from fp4convert.checkpoint.dialects.registry import is_mark
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.checkpoint.encodings.base import CACHE_SCALES, PACKED_DTYPE, Linear
from fp4convert.checkpoint.encodings.floats import find_floats
from fp4convert.checkpoint.missing_parts import Judgement, judge_names
from fp4convert.checkpoint.record import stacks_recorded
from fp4convert.checkpoint.unread import find_beside, find_unread, is_coded, refuse_unsaid
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.fp8_int import FP8_DTYPES
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import configs_in
from fp4convert.recipes.recipe import Recipe, model_recipe
from fp4convert.recipes.rules import FoldUse, is_expert_stack
from fp4convert.storage.safetensors import DTYPE_BITS, WEIGHT, TensorRef
from fp4convert.storage.source import Checkpoint, Source

if TYPE_CHECKING:
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.checkpoint.encodings.base import Base
    from fp4convert.checkpoint.unreadable import Aside

EVERYTHING = RecipeOptions(exclude=("*",))
HIDDEN_SIZES = ("hidden_size", "moe_hidden_size")  # of config.json; experts may read fewer columns


@dataclass(frozen=True, slots=True)
class Linears:
    """Every linear layer of a source whose matrix can be read.

    of       by module
    unruled  stacks of expert matrices whose layout no recipe gives
    idle     scales of a quantized cache of keys and values, and marks of ComfyUI; only engines use
             them
    vectors  weights of norms and biases that a fold, an adapter or tiles change, by name; each as a
             matrix of one row
    adapter  applied to some of them
    base     the checkpoint that has some in eight bits
    renamed  prefix of the adapter's names, and of the model's
    folds    places of factors that weights hold, those of the source first
    notes    what a person should know of these
    judged   what names and sizes say of the source
    aside    tensors of excluded modules that cannot be read, by name
    """

    of: Mapping[str, Linear]
    unruled: tuple[TensorRef, ...] = ()
    idle: tuple[TensorRef, ...] = ()
    vectors: Mapping[str, Linear] = field(default_factory=dict)
    adapter: Adapter | None = None
    base: Base | None = None
    renamed: tuple[str, str] = ("", "")
    folds: tuple[FoldUse, ...] = ()
    notes: tuple[str, ...] = ()
    judged: Judgement = field(default_factory=Judgement)
    aside: Mapping[str, Aside] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Return whether any is quantized already."""
        return any(linear.coding.is_packed for linear in self.of.values())

    @property
    def homes(self) -> dict[str, TensorRef]:
        """Return the tensor that holds each linear layer."""
        return {module: linear.home for module, linear in self.of.items()}

    def by_home(self) -> dict[str, list[Linear]]:
        """Return the linear layers of every tensor, by its name."""
        found: dict[str, list[Linear]] = defaultdict(list)
        for linear in self.of.values():
            found[linear.home.name].append(linear)
        return found

    def consumed(self) -> set[str]:
        """Return the names of tensors that linear layers alone need."""
        names = {
            ref.name
            for linear in self.of.values()
            for ref in (linear.home, *linear.refs, *linear.idle)
        }
        return names | {ref.name for ref in self.idle}


def find_linears(source: Source, recipe: Recipe) -> Linears:
    """Find the linear layers of a source; excluded ones need not be readable."""
    aside: dict[str, Aside] = {}
    while True:
        try:
            linears = _find_all(source, recipe, aside)
        except InputError as error:
            from fp4convert.checkpoint.unreadable import set_aside

            more = set_aside(error, read_clues(source), recipe)
            if not more.keys() - aside.keys():
                raise
            aside |= more
        else:
            strange = [one for one in linears.judged.unexplained if one.name not in aside]
            judged = linears.judged._replace(unexplained=tuple(strange))
            return replace(linears, aside=aside, judged=judged) if aside else linears


def _find_all(source: Source, recipe: Recipe, aside: Mapping[str, Aside]) -> Linears:
    clues = read_clues(source).without(aside)
    if is_artifact(source, clues):
        from fp4convert.checkpoint.encodings.corrected import biases_stored
        from fp4convert.checkpoint.encodings.fp4 import find_fp4
        from fp4convert.checkpoint.encodings.fp8 import Fp8
        from fp4convert.checkpoint.soundness import refuse_unsound

        artifact = read_artifact(source, source.name, clues)
        refuse_unsound(artifact)
        others = others_of(artifact).items()
        fp8 = {module: linear for module, linear in others if isinstance(linear.coding, Fp8)}
        linears = linears_of(clues, recipe, {**fp8, **find_fp4(artifact)})
        linears = replace(linears, vectors=biases_stored(artifact))
    else:
        linears = linears_of(clues, recipe)
    if not source.is_streamed:  # a request each on the Hub; there the run checks
        for linear in linears.of.values():
            linear.coding.check(linear, source)
    if any(shard.frame.container != "safetensors" for shard in source.checkpoint.shards):
        return linears  # GGUF has names of its own
    return replace(linears, judged=_judge(source.checkpoint, linears, recipe))


def _judge(checkpoint: Checkpoint, linears: Linears, recipe: Recipe) -> Judgement:
    """Judge a source by names and sizes, as `inspect` judges the result."""
    consumed = linears.consumed()
    kept = [ref for ref in checkpoint.tensors if ref.name not in consumed]
    names = dict.fromkeys(ref.name for ref in kept)
    for module, linear in linears.of.items():
        is_stored = linear.stack is not None and not linear.coding.is_packed
        names[linear.home.name if is_stored else module + WEIGHT] = None
    shapes = {module: linear.shape for module, linear in linears.of.items()} | {
        ref.name.removesuffix(WEIGHT): ref.shape
        for ref in kept
        if ref.name.endswith(WEIGHT) and ref.dtype in FLOAT_TYPES
    }
    return judge_names(names, shapes, checkpoint.config, recipe)


def names_stored(artifact: Artifact) -> list[str]:
    """List the tensors of an artifact, and MODULE.weight of quantized modules."""
    packed = artifact.packed
    stored = {ref.name for one in packed.values() for ref in (*one.refs, *one.companions)}
    names = [name for name in artifact.tensors if name not in stored]
    return [*names, *(module + WEIGHT for module in packed)]


def judge_stored(artifact: Artifact, config: Mapping[str, object], recipe: Recipe) -> Judgement:
    """Judge an artifact by names and sizes; config may be empty."""
    names, packed = names_stored(artifact), artifact.packed
    shapes = {
        name.removesuffix(WEIGHT): artifact.tensors[name].shape
        for name in names
        if name.endswith(WEIGHT)
        and name in artifact.tensors
        and artifact.tensors[name].dtype in FLOAT_TYPES
    } | {module: one.shape for module, one in packed.items()}
    return judge_names(names, shapes, config, recipe)


def linears_of(
    clues: Clues, recipe: Recipe, four_bit: Mapping[str, Linear] | None = None
) -> Linears:
    """Find linear layers by names, headers and records; refuse other codes.

    four_bit  modules of an artifact
    """
    refs = clues.tensors.values()
    dtypes = {ref.dtype for ref in refs}
    sizes = [config.get(key) for config in configs_in(clues.config) for key in HIDDEN_SIZES]
    hidden_sizes = {size for size in sizes if isinstance(size, int)}
    of = find_floats(clues.tensors, recipe.stack_rule, hidden_sizes)
    # An encoding's file is loaded only for its types or names.
    if PACKED_DTYPE in dtypes:
        from fp4convert.checkpoint.encodings.int4 import find_integers

        of |= find_integers(clues)
        if any(name.endswith(".qweight") for name in clues.tensors):
            from fp4convert.checkpoint.encodings.gptq_awq import find_transposed

            of |= find_transposed(clues)
    if "I8" in dtypes:
        from fp4convert.checkpoint.encodings.int8 import find_int8

        of |= find_int8(clues.tensors)
    if not dtypes.isdisjoint(FP8_DTYPES):
        from fp4convert.checkpoint.encodings.fp8 import find_fp8

        of |= find_fp8(clues, four_bit or {})
    if dtypes - DTYPE_BITS.keys():
        from fp4convert.checkpoint.encodings.floats import find_gguf_blocks

        of |= find_gguf_blocks(clues.tensors, recipe.stack_rule)
    if any(name.endswith(".biases") for name in clues.tensors):
        from fp4convert.checkpoint.encodings.int4 import find_affine

        of |= find_affine(clues)
    of |= four_bit or {}
    # Stacks of experts with an unknown layout.
    unruled = [
        ref
        for ref in refs
        if ref.dtype in FLOAT_TYPES
        and is_expert_stack(ref.name, ref.shape)
        and recipe.stack_rule(ref.name, ref.shape) is None
    ]
    is_packed = any(linear.coding.is_packed for linear in of.values())
    # Scalars beside floats too: the cache alone may be quantized.
    cached = [ref for ref in refs if ref.name.endswith(CACHE_SCALES)]
    cached = [ref for ref in cached if is_packed or ref.elements == 1]
    idle = [*filter(is_mark, refs), *cached]
    linears = Linears(of, tuple(unruled), tuple(idle))
    _refuse_unreadable(clues, linears)
    return linears


def originals_of(artifact: Artifact, source: Source) -> Linears:
    """Find the linear layers of an artifact's source, before any adapter.

    Stacks are read by the rules of the artifact's record. What could not be read was excluded, and
    is compared as bytes.
    """
    recipe = model_recipe(source.checkpoint.config, EVERYTHING, artifact.dialect)
    stacks = (*stacks_recorded(artifact.record), *recipe.stacks)
    return find_linears(source, replace(recipe, stacks=stacks))


def linears_stored(artifact: Artifact) -> dict[str, Linear]:
    """Find the sound linear layers of an artifact: quantized ones and floats."""
    from fp4convert.checkpoint.encodings.fp4 import find_fp4
    from fp4convert.checkpoint.encodings.int4 import find_affine
    from fp4convert.checkpoint.encodings.int8 import find_int8

    found = find_floats(artifact.tensors, lambda name, shape: None)
    if artifact.foreign:
        return {**found, **artifact.foreign}
    found |= others_of(artifact) | find_int8(artifact.tensors) | find_affine(artifact.clues)
    return {**found, **find_fp4(artifact)}


def others_of(artifact: Artifact) -> dict[str, Linear]:
    """Find the modules of FP8, MXFP8 and int4 in an artifact."""
    from fp4convert.checkpoint.encodings.fp8 import fp8_of
    from fp4convert.checkpoint.encodings.int4 import integers_of

    found = {}
    for module, packed in artifact.others.items():
        coding = fp8_of(packed, artifact) if packed.form.format.is_fp8 else integers_of(packed)
        codes, scales, *others = packed.refs
        idle = (*others, *packed.companions)
        found[module] = Linear(module, packed.shape, coding, (codes, scales), idle)
    return found


def find_unread_codes(artifact: Artifact) -> list[TensorRef]:
    """Find the tensors of an artifact whose codes nothing here reads.

    In an artifact of fp4convert, small integers are tables unless they are named weight, are stacks
    or have a scale.
    """
    clues = artifact.clues
    known = {
        ref.name
        for packed in artifact.packed.values()
        for ref in (*packed.refs, *packed.companions)
    }
    if any(name.endswith(".biases") for name in clues.tensors):
        from fp4convert.checkpoint.encodings.int4 import find_affine

        known |= {ref.name for linear in find_affine(clues).values() for ref in linear.refs}
    from fp4convert.checkpoint.encodings.int8 import find_int8

    bytes_read = find_int8(clues.tensors).values()
    known |= {ref.name for linear in bytes_read for ref in (*linear.refs, *linear.idle)}
    coded = {ref.name: ref for ref in find_unread(clues.tensors, known, True) if is_coded(ref)}
    if any(ref.dtype in FP8_DTYPES for ref in coded.values()):
        from fp4convert.checkpoint.encodings.fp8 import find_fp8

        for linear in find_fp8(clues, artifact.packed, is_strict=False).values():
            for ref in (*linear.refs, *linear.idle):
                coded.pop(ref.name, None)
    if not artifact.record:
        return list(coded.values())
    scaled = {beside.weight for beside in find_beside(clues.tensors, coded) if beside.is_scale}
    return [
        ref
        for name, ref in coded.items()
        if name.endswith(WEIGHT) or len(ref.shape) > MATRIX_DIMENSIONS or name in scaled
    ]


def _refuse_unreadable(clues: Clues, linears: Linears) -> None:
    """Raise InputError for quantized tensors that cannot be read."""
    foreign, next_step = describe_foreign(clues)
    known = linears.consumed()
    refuse_unsaid(clues.tensors, known)
    unread = find_unread(clues.tensors, known, clues.is_recorded)
    if clues.is_recorded:  # vectors of FP8, too, which may have scales
        eight_bits = [ref for ref in clues.tensors.values() if ref.dtype in FP8_DTYPES]
        unread += [ref for ref in eight_bits if ref.name not in known and ref.shape != ()]
    prefix = f"{foreign}; " if foreign else ""
    for ref in unread[:1]:
        # Name a scale's weight instead of the scale.
        weight = clues.tensors.get(ref.name.rpartition(".")[0] + WEIGHT, ref)
        named = ref if weight.name in known or weight.dtype in FLOAT_TYPES else weight
        detail = f"{prefix}{named.file}: {named.name!r} ({named.dtype} {list(named.shape)})"
        detail = f"{detail} is already quantized, in a way that fp4convert does not read"
        raise InputError("already-quantized", detail, next_step, named.name)
    is_cache_alone = any(ref.name.endswith(CACHE_SCALES) for ref in linears.idle)
    if clues.is_recorded and not linears.is_packed and not is_cache_alone:
        method = clues.record.get("quant_method", "modelopt")
        detail = f"{prefix}config.json: the checkpoint is already quantized, by {method!r}"
        detail = f"{detail}; no tensor is stored in a way that fp4convert reads"
        configs = {"": clues.config, **clues.config}.items()
        at = next((key for key, one in configs if clues.record in json_object(one).values()), "")
        place = f"{at} of config.json" if at else "config.json"
        remedy = f"If these are the original weights, remove quantization_config from {place}."
        raise InputError("already-quantized", detail, f"{next_step} {remedy}")
