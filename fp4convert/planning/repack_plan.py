"""Plan transcode and dequantize."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import Clues, Dialect, Ignored, Packed
from fp4convert.checkpoint.dialects.registry import is_quantized_tensor
from fp4convert.checkpoint.dialects.stacks import Slot
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write, form_of
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.corrected import InTiles
from fp4convert.checkpoint.encodings.gguf_blocks import find_gguf_blocks
from fp4convert.checkpoint.encodings.mlx_affine import find_affine
from fp4convert.checkpoint.expert_stacks import Stacked
from fp4convert.checkpoint.modules import UNSAID, idle_scales
from fp4convert.errors import InputError
from fp4convert.numerics.formats import dtype_named
from fp4convert.planning.completeness import refuse_forgotten
from fp4convert.planning.kept_dtype import KEPT_DTYPE
from fp4convert.planning.quantize_plan import (
    kept_modules,
    notes_on,
    refuse_other_container,
)
from fp4convert.planning.steps import Plan, Step, Task, Writing, refuse_collisions
from fp4convert.recipes.recipe import Recipe, ScaleGroup, Target, build_recipe, scale_groups
from fp4convert.storage.safetensors import DTYPE_BITS, WEIGHT, TensorRef, TensorSpec
from fp4convert.storage.source import Checkpoint


def plan_dequantize(
    checkpoint: Checkpoint,
    packed: Sequence[Linear],
    stacks: Sequence[Stacked],
    dtype: str,
    idle: Collection[str] = (),
) -> Plan:
    """Plan quantized weights as ordinary ones of bf16, fp16 or fp32.

    A stack in which modules stay in floats of another dtype becomes F32, which holds the values of
    all.

    packed   the linear layers that are quantized, in whatever way, and biases in tiles
    stacks   of experts, that some of them were, and others that stayed
    idle     tensors that mean nothing beside ordinary weights; left out, as what linear layers call
             idle is
    Raises   InputError for an unknown dtype, or where a restored weight would take the name of
             another tensor
    """
    target, stored = Target(dtype), dtype_named(dtype)
    steps = [_stack_step(stack, stored) for stack in stacks]
    stacked = {module for stack in stacks for module in stack.modules}
    for linear in packed:
        if linear.module not in stacked:
            is_bias = isinstance(linear.coding, InTiles)
            name = linear.name if is_bias else linear.module + WEIGHT
            spec = TensorSpec(name, stored, linear.refs[0].shape if is_bias else linear.shape)
            step = Step("dequantize", linear.coding.word, linear.refs, (spec,), linear.shape)
            steps.append(step._replace(module=linear.module, linears=(linear,)))
    unneeded = {ref.name for linear in packed for ref in linear.idle} | set(idle)
    left_out = dict.fromkeys(sorted(unneeded), "ordinary weights need none")
    consumed = unneeded | {ref.name for step in steps for ref in step.refs}
    consumed |= {linear.home.name for linear in packed}
    placed = [(step.refs[0].file, step) for step in steps]
    tasks = _module_tasks(Writing(checkpoint, target), placed, consumed)
    scales = [name for name in left_out if not name.endswith(".weight_shape")]
    warnings = [f"{len(scales)} scales are left out: ordinary weights need none"] if scales else []
    if wide := [
        step.specs[0].name for step in steps if step.slots and step.specs[0].dtype != stored
    ]:
        warnings.append(
            f"{len(wide)} stacks of experts are not {dtype}, the first {wide[0]!r}: matrices"
            " in them were kept in another dtype"
        )
    typed = [
        ref.name
        for ref in checkpoint.tensors
        if ref.dtype not in DTYPE_BITS and ref.name not in consumed
    ]
    if typed:
        warnings.append(
            f"{len(typed)} tensors are kept in GGUF's own types, the first {typed[0]!r}"
        )
    alone = (linear for linear in packed if linear.module not in stacked)
    homes = {linear.module: linear.home for linear in alone}
    refuse_forgotten(checkpoint.tensors, tasks, left_out, homes)
    notes = (*notes_on(checkpoint), *warnings)
    return Plan(target, tasks, Ignored((), ()), notes, left_out=left_out)


def _stack_step(stack: Stacked, stored: str) -> Step:
    """Make the step of a stack, its modules in that dtype.

    The stack is F32 where others stayed in floats of another dtype.
    """
    dtypes = {
        stored if linear.coding.is_packed else linear.refs[0].dtype for linear in stack.linears
    }
    spec = TensorSpec(stack.name, dtypes.pop() if len(dtypes) == 1 else "F32", stack.stored_shape)
    refs = tuple(dict.fromkeys(ref for linear in stack.linears for ref in linear.refs))
    reason = ", ".join(dict.fromkeys(linear.coding.word for linear in stack.linears))
    step = Step("dequantize", reason, refs, (spec,), stack.shape, stack.slots)
    return step._replace(
        module=stack.name, linears=stack.linears, is_transposed=stack.is_transposed
    )


class Stored(NamedTuple):
    """What stores some modules.

    shape of the matrix
    slots whose rows it holds
    home  a tensor whose place it takes; the first of its packed codes
    """

    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    home: TensorRef


def plan_transcode(
    checkpoint: Checkpoint,
    modules: dict[str, Packed],
    target: Target,
    placed: dict[str, Stored] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the four-bit modules of an artifact in another dialect.

    Every other tensor stays as it is.
    checkpoint  the artifact's own, or the one whose other tensors are kept
    modules     the sound quantized modules, as `artifact` found them
    placed      what is stored in that other checkpoint, by stem
    renamed     new names of tensors that are kept
    Raises      InputError for what the dialect cannot hold, or where an output would take the name
                of another tensor
    """
    dialect, form = dialect_to_write(target), form_of(target)
    refuse_other_container(checkpoint, dialect, str(target.dialect))
    recipe = build_recipe(target, checkpoint.config)
    expanded = [_expand(linear) for linear in _expandable(checkpoint)]
    own = {ref.name for step in expanded for ref in step.refs}
    _refuse_other_matrices(checkpoint, modules, own)
    if placed is None:
        placed = _place_each(modules, dialect)
    _refuse_unfit(placed, modules, dialect, recipe)
    shared: dict[ScaleGroup | str, list[TensorRef]] = defaultdict(list)
    groups = scale_groups(modules, recipe.groups)
    for module, packed in modules.items():
        shared[groups.get(module, module)] += packed.refs
    steps = []
    for stem, stored in placed.items():
        members = list(dict.fromkeys(rows.module for slot in stored.slots for rows in slot))
        refs = tuple(dict.fromkeys(ref for member in members for ref in modules[member].refs))
        group = tuple(
            dict.fromkeys(ref for member in members for ref in shared[groups.get(member, member)])
        )
        specs = dialect.outputs(stem, stored.shape, form)
        step = Step("transcode", "four-bit", refs, specs, stored.shape, stored.slots)
        step = step._replace(module=stem, amax_of=group, form=form)
        steps.append((stored.home.file, step))
    homes = {stored.home.name for stored in placed.values()}
    idle = idle_scales(modules, renamed or {}, form.has_input_scale)
    ours = {ref.name for packed in modules.values() for ref in packed.refs}
    consumed = homes | set(idle) | ours | own
    steps += [(step.refs[0].file, step) for step in expanded]
    tasks = _module_tasks(
        Writing(checkpoint, target, dialect, form, renamed or {}), steps, consumed
    )
    left_out = dict.fromkeys(homes - ours, "a four-bit module of the artifact takes its place")
    left_out |= dict.fromkeys(idle, UNSAID)
    coded = {module: packed.refs[0] for module, packed in modules.items()}
    refuse_forgotten(checkpoint.tensors, tasks, left_out, coded)
    kept = kept_modules(tasks)
    patterns = recipe.patterns_to_declare(kept, [*modules, *placed])
    warnings = [f"{len(idle)} scales are left out, the first {idle[0]!r}: {UNSAID}"] if idle else []
    warnings += _notes_on_expanded(expanded)
    notes = (*notes_on(checkpoint), *warnings)
    return Plan(target, tasks, Ignored(tuple(kept), patterns), notes, left_out=left_out)


def _place_each(modules: Mapping[str, Packed], dialect: Dialect) -> dict[str, Stored]:
    """Place each stored matrix where its first module is now."""
    placed = {}
    shapes = {module: packed.shape for module, packed in modules.items()}
    for stem, shape in dialect.stems(shapes).items():
        slots = dialect.slots(stem, shape)
        placed[stem] = Stored(shape, slots, modules[slots[0][0].module].refs[0])
    return placed


def _expandable(checkpoint: Checkpoint) -> Iterable[Linear]:
    """Find matrices of llama.cpp's own types, and integers of MLX.

    Where they are read as safetensors, no other dialect has a place for them.
    """
    apart = {
        ref.name: ref
        for shard in checkpoint.shards
        if shard.frame.container == "safetensors"
        for ref in shard.tensors
    }
    blocks = find_gguf_blocks(apart, lambda name, shape: None)
    return (blocks | find_affine(Clues(checkpoint.config, {}, apart))).values()


def _expand(linear: Linear) -> Step:
    """Make the step of a matrix that becomes bf16."""
    spec = TensorSpec(linear.module + WEIGHT, dtype_named(KEPT_DTYPE), linear.shape)
    reason = f"{linear.coding.word} becomes {KEPT_DTYPE}"
    return Step("dequantize", reason, linear.refs, (spec,), linear.shape, linears=(linear,))


def _notes_on_expanded(steps: Sequence[Step]) -> list[str]:
    if not steps:
        return []
    first = steps[0].linears[0]
    what = f"{len(steps)} matrices become {KEPT_DTYPE}, the first {first.name!r}"
    return [f"{what}: the dialect has no {first.coding.word}"]


def _refuse_other_matrices(
    checkpoint: Checkpoint, modules: dict[str, Packed], expanded: Collection[str]
) -> None:
    """Raise InputError for matrices quantized in another way.

    The result's records would not tell of them.
    """
    ours = {ref.name for packed in modules.values() for ref in (*packed.refs, *packed.companions)}
    others = [
        ref for ref in checkpoint.tensors if ref.name not in ours and ref.name not in expanded
    ]
    next_step = "Start from the original weights."
    matrices = [
        ref.name for ref in others if ref.dtype.startswith("F8_") and ref.name.endswith(WEIGHT)
    ]
    if matrices:
        detail = (
            f"{len(matrices)} matrices are FP8, the first {matrices[0]!r}; this version carries"
            " four-bit ones and floats"
        )
        raise InputError("fp8-modules", detail, next_step, matrices[0])
    if found := [ref.name for ref in others if is_quantized_tensor(ref)]:
        detail = f"{len(found)} tensors are quantized in another way, the first {found[0]!r}"
        raise InputError(
            "mixed-modules",
            f"{detail}; this version carries four-bit matrices of one format",
            next_step,
            found[0],
        )


def _refuse_unfit(
    placed: dict[str, Stored], modules: Iterable[str], dialect: Dialect, recipe: Recipe
) -> None:
    """Raise InputError for what the dialect has no place for."""
    for stem, stored in placed.items():
        rows, columns = stored.shape[-2:]
        if reason := dialect.unfit(stem, (rows, columns), form_of(recipe.target)):
            detail = f"{stem} has {reason}; dialect {recipe.target.dialect} has no place for it"
            raise InputError("dialect-shape", detail, tensor=stem)
    for module in modules:
        if not dialect.TRAITS.holds_embeddings and recipe.kind_of(module) == "embedding":
            detail = (
                f"{module} is a four-bit embedding, which no engine of dialect"
                f" {recipe.target.dialect} reads"
            )
            raise InputError("dialect-module", detail, tensor=module)


def _module_tasks(
    writing: Writing, placed: Iterable[tuple[str, Step]], consumed: set[str]
) -> tuple[Task, ...]:
    """Lay out steps, each in its shard; copy tensors not consumed."""
    at: dict[str, list[Step]] = defaultdict(list)
    for file, step in placed:
        at[file].append(step)
    tasks = []
    for shard in writing.checkpoint.shards:
        copies = []
        for ref in shard.tensors:
            if ref.name not in consumed:
                shape = ref.shape
                if ref.name in writing.renamed and writing.dialect and ref.elements == 1:
                    # a scale of a cache: transformers loads no other shape than the dialect's
                    shape = writing.dialect.TRAITS.scalars.shape
                spec = TensorSpec(writing.renamed.get(ref.name, ref.name), ref.dtype, shape)
                copies.append(Step("copy", "not quantized", (ref,), (spec,)))
        # a shard of which nothing is left is none
        if copies or at[shard.file] or not shard.tensors:
            tasks.append(writing.task(shard, [*copies, *at[shard.file]]))
    refuse_collisions(tasks)
    return tuple(tasks)
