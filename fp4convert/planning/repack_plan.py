"""Plan transcode and dequantize."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Clues, Dialect, Ignored, Packed, whole
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import COMFY_MARK, OLD_MARK, is_mark
from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS, Slot
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.encodings.base import Linear, input_scale_of
from fp4convert.checkpoint.encodings.floats import find_gguf_blocks
from fp4convert.checkpoint.encodings.fp4 import find_fp4
from fp4convert.checkpoint.encodings.int4 import find_affine
from fp4convert.checkpoint.encodings.int8 import find_int8
from fp4convert.checkpoint.expert_stacks import ExpertStack
from fp4convert.checkpoint.linears import Linears, judge_stored
from fp4convert.checkpoint.missing_parts import Judgement
from fp4convert.checkpoint.modules import UNSAID, idle_scales
from fp4convert.checkpoint.unread import find_unread
from fp4convert.errors import InputError
from fp4convert.makers.carried import Carried
from fp4convert.makers.floats import Floats
from fp4convert.makers.maker import Maker
from fp4convert.makers.spelling import Spelling
from fp4convert.makers.table import maker_of
from fp4convert.makers.unit import Stem, Unit
from fp4convert.numerics.formats import Format, dtype_named
from fp4convert.planning.kept_dtype import (
    draft_floats,
    expanded_spec,
    idle_keep_dtype,
    keep_tensor,
    word_of,
)
from fp4convert.planning.notes import (
    note_eight_bit_scales,
    note_expanded,
    note_unit_scales,
    note_unread,
    notes_on,
)
from fp4convert.planning.plan import Plan, Writing, refuse_collisions
from fp4convert.planning.quantize_plan import kept_modules, list_left_out, refuse_other_container
from fp4convert.planning.steps import ENGINE_ONLY, Draft, Step, Task, refuse_forgotten
from fp4convert.progress import are_text
from fp4convert.recipes.recipe import Recipe, ScaleGroup, Target, build_recipe, scale_groups
from fp4convert.recipes.unread_modules import find_unread_modules
from fp4convert.storage.safetensors import DTYPE_BITS, WEIGHT, TensorRef, TensorSpec
from fp4convert.storage.source import Checkpoint


def plan_dequantize(
    checkpoint: Checkpoint,
    packed: Sequence[Linear],
    stacks: Sequence[ExpertStack],
    dtype: str,
    idle: Collection[str] = (),
) -> Plan:
    """Plan quantized weights as ordinary ones of bf16, fp16 or fp32.

    A stack in which modules stay in floats of another dtype becomes F32, which holds all values.

    packed   all quantized linear layers, and biases in tiles
    stacks   stacks of experts of which some are packed
    idle     tensors that ordinary weights do not need; left out like idle ones of linear layers
    Raises   InputError for an unknown dtype, or where a restored weight would take the name of
             another tensor
    """
    target, stored = Target(dtype), dtype_named(dtype)
    drafts = [_draft_stack(stack, stored) for stack in stacks]
    stacked = {module for stack in stacks for module in stack.modules}
    for linear in packed:
        if linear.module not in stacked:
            is_bias = linear.coding.becomes is not None
            name = linear.name if is_bias else linear.module + WEIGHT
            spec = TensorSpec(name, stored, linear.refs[0].shape if is_bias else linear.shape)
            maker = Floats(spec, (linear,), next_step=None, is_on_device=True)
            word, read = linear.coding.word, linear.refs
            step = Step("dequantize", word, linear.module, maker, read, linear.shape)
            drafts.append(Draft(step._replace(linears=(linear,)), (spec,)))
    unneeded = {ref.name for linear in packed for ref in linear.idle} | set(idle)
    left_out = dict.fromkeys(sorted(unneeded), "ordinary weights need none")
    consumed = unneeded | {ref.name for draft in drafts for ref in draft.step.refs}
    consumed |= {linear.home.name for linear in packed}
    placed = [(draft.step.refs[0].file, draft) for draft in drafts]
    tasks = _module_tasks(Writing(checkpoint, target), placed, consumed)
    warnings: list[str] = []
    labels = (".weight_shape", COMFY_MARK, OLD_MARK)
    if scales := [name for name in left_out if not name.endswith(labels)]:
        warnings.append(f"{len(scales)} scales are left out: ordinary weights need none")
    if wide := [spec.name for _, (spec,), *_ in drafts[: len(stacks)] if spec.dtype != stored]:
        warnings.append(
            f"{len(wide)} stacks of experts are not {dtype}, the first {wide[0]!r}: matrices"
            " in them were kept in another dtype"
        )
    kept = [ref for ref in checkpoint.tensors if ref.name not in consumed]
    if typed := [ref.name for ref in kept if ref.dtype not in DTYPE_BITS]:
        warnings.append(
            f"{are_text(len(typed), 'tensor')} kept in GGUF's own types, the first {typed[0]!r}"
        )
    homes = {linear.module: linear.home for linear in packed if linear.module not in stacked}
    refuse_forgotten(checkpoint.tensors, tasks, left_out, homes)
    notes = (*notes_on(checkpoint), *warnings)
    return Plan(target, tasks, Ignored((), ()), notes, left_out=left_out)


def _draft_stack(stack: ExpertStack, stored: str) -> Draft:
    """Draft the step of a stack in a dtype; F32 where its modules differ."""
    dtypes = {
        stored if linear.coding.is_packed else linear.refs[0].dtype for linear in stack.linears
    }
    spec = TensorSpec(stack.name, dtypes.pop() if len(dtypes) == 1 else "F32", stack.stored_shape)
    reason = ", ".join(dict.fromkeys(linear.coding.word for linear in stack.linears))
    order = stack.slots, stack.shape, stack.is_transposed
    maker = Floats(spec, stack.linears, *order, next_step=None, is_on_device=True)
    refs = tuple(dict.fromkeys(ref for linear in stack.linears for ref in linear.refs))
    step = Step("dequantize", reason, stack.name, maker, refs, stack.shape, linears=stack.linears)
    return Draft(step, (spec,))


class Stored(NamedTuple):
    """A stored matrix or stack.

    slots  modules of its rows
    home   the tensor whose place it takes; the first of its packed codes
    """

    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    home: TensorRef


class Transcoding(NamedTuple):
    """The modules of an artifact, and their forms in another dialect.

    artifact    has the four-bit modules
    others      modules of eight bits and of int4
    forms       of the modules in the result; a module without one becomes floats
    unscaled    FP8 without scales, which are values themselves, and tables of n-grams: they stay
    keep_dtype  of --keep-dtype; the target's may be that of the artifact
    """

    artifact: Artifact
    others: Mapping[str, Linear]
    forms: Mapping[str, Form]
    keep_dtype: str | None = None
    unscaled: frozenset[str] = frozenset()

    @property
    def modules(self) -> Mapping[str, Packed]:
        return self.artifact.modules

    @property
    def eight_bit(self) -> dict[str, tuple[tuple[int, ...], Format]]:
        """Return shapes and formats of the others that stay quantized."""
        staying = ((name, one) for name, one in self.others.items() if name in self.forms)
        return {name: (one.shape, self.forms[name].format) for name, one in staying}


def plan_transcode(
    checkpoint: Checkpoint,
    contents: Transcoding,
    target: Target,
    placed: Mapping[str, Stored] | None = None,
    caches: Mapping[str, Draft] | None = None,
) -> Plan:
    """Plan the quantized modules of an artifact in another dialect.

    Every other tensor stays as it is, or becomes the contents' `keep_dtype`.

    checkpoint  the artifact's own, or the one whose other tensors are kept
    placed      stem -> its place in that other checkpoint
    caches      drafts of the scales of a cache of keys and values, by their names
    Raises      InputError for what the dialect cannot hold, or where an output would take the name
                of another tensor
    """
    dialect, caches = dialect_to_write(target), caches or {}
    refuse_other_container(checkpoint, dialect, str(target.dialect))
    recipe = build_recipe(target._replace(keep_dtype=contents.keep_dtype), checkpoint.config)
    expanded = [_expand(linear, recipe) for linear in _expandable(checkpoint)]
    refuse_other_matrices(checkpoint, contents)
    placed = _places(contents, dialect) if placed is None else placed
    judged = judge_stored(contents.artifact, contents.artifact.source.checkpoint.config, recipe)
    _refuse_unfit(placed, contents, dialect, recipe, judged)
    drafts = _drafts_of(placed, contents, dialect, recipe)
    # Tensors of modules and scales, which have other names in the result, are left out.
    has_inputs = any(form.has_input_scale for form in contents.forms.values())
    idle = idle_scales(contents.modules, caches, has_inputs)
    unread, unit = _scales_beside([draft for _, draft in drafts], caches)
    drafts += [(draft.step.refs[0].file, draft) for draft in expanded]
    consumed = {stored.home.name for stored in placed.values()} | {*idle, *unread}
    consumed |= {ref.name for _, draft in drafts for ref in draft.step.refs}
    consumed |= {ref.name for one in contents.others.values() for ref in one.idle} - caches.keys()
    read = {ref.name for _, draft in drafts for ref in draft.step.refs}
    marks = [ref.name for ref in checkpoint.tensors if is_mark(ref) and ref.name not in read]
    consumed |= {*marks}
    writing = Writing(checkpoint, target, dialect)
    tasks = _module_tasks(writing, drafts, consumed, recipe, caches)
    left_out = _list_left_out(contents, placed, tasks) | dict.fromkeys(idle, UNSAID)
    left_out |= dict.fromkeys(marks, ENGINE_ONLY)
    left_out |= {name: one.step.reason for name, one in caches.items() if not one.step.refs}
    coded = {module: packed.refs[0] for module, packed in contents.modules.items()}
    coded |= {module: linear.refs[0] for module, linear in contents.others.items()}
    refuse_forgotten(checkpoint.tensors, tasks, left_out, coded)
    kept = kept_modules(tasks)
    made = [module for module in (*contents.modules, *placed) if module not in kept]
    patterns = recipe.patterns_to_declare(kept, made)
    warnings = [
        *([f"{len(idle)} scales are left out, the first {idle[0]!r}: {UNSAID}"] if idle else []),
        *note_eight_bit_scales(unread, unit, str(target.dialect)),
        *note_unit_scales(contents.artifact, contents.forms),
        *note_expanded([draft for _, draft in drafts if draft.step.form is None]),
        *note_unread(contents.eight_bit, recipe, checkpoint.config, dialect.TRAITS, judged),
    ]
    notes, ignored = (*notes_on(checkpoint), *warnings), Ignored(tuple(kept), patterns)
    idle_options = tuple(idle_keep_dtype(recipe, tasks))
    return Plan(target, tasks, ignored, notes, idle=idle_options, left_out=left_out, judged=judged)


def _list_left_out(
    contents: Transcoding, placed: Mapping[str, Stored], tasks: Iterable[Task]
) -> dict[str, str]:
    """Return the tensors that are replaced or left out, with reasons."""
    ours = {ref.name for packed in contents.modules.values() for ref in packed.refs}
    ours |= {ref.name for linear in contents.others.values() for ref in linear.refs}
    homes = {stored.home.name for stored in placed.values()} - ours
    outputs = {ref.name for task in tasks for ref in task.outputs}
    replaced = dict.fromkeys(homes, "a quantized module of the artifact takes its place")
    return replaced | list_left_out(Linears(contents.others), outputs)


def _places(contents: Transcoding, dialect: Dialect) -> dict[str, Stored]:
    """Return the place of each stem: that of its first module."""
    placed = {}
    shapes = {module: packed.shape for module, packed in contents.modules.items()}
    for stem, shape in dialect.stems(shapes).items():
        slots = dialect.slots(stem, shape)
        placed[stem] = Stored(shape, slots, contents.modules[slots[0][0].module].refs[0])
    for module, linear in contents.others.items():
        placed[module] = Stored(linear.shape, whole(module, linear.shape), linear.refs[0])
    return placed


def _drafts_of(
    placed: Mapping[str, Stored], contents: Transcoding, dialect: Dialect, recipe: Recipe
) -> list[tuple[str, Draft]]:
    """Draft the step of every place, with the name of its file."""
    others, forms = contents.others, contents.forms
    linears = find_fp4(contents.artifact)
    makers = _makers_of(placed, contents, linears, recipe)
    drafts = []
    for stem, stored in placed.items():
        members = list(dict.fromkeys(rows.module for slot in stored.slots for rows in slot))
        form = forms.get(members[0])
        if members[0] in others:
            draft = _draft_other(stem, stored, [others[one] for one in members], form, recipe)
        else:
            own = tuple([linears[member] for member in members])
            refs = tuple(dict.fromkeys(ref for one in own for ref in one.refs))
            step = Step("transcode", "four-bit", stem, makers[stem], refs, stored.shape, form)
            specs = dialect.outputs(stem, stored.shape, forms[members[0]])
            draft = Draft(step._replace(linears=own), specs)
        drafts.append((stored.home.file, draft))
    return drafts


def _draft_other(
    stem: str, stored: Stored, linears: list[Linear], form: Form | None, recipe: Recipe
) -> Draft:
    """Draft the step of a module of eight bits or int4."""
    word, own = linears[0].coding.word, tuple(linears)
    refs = tuple([ref for linear in linears for ref in linear.refs])
    if form is None:
        spec = TensorSpec(stem + WEIGHT, stored.home.dtype, stored.shape)
        if recipe.target.keep_dtype:
            spec = expanded_spec(spec.name, stored.shape, recipe)
        maker: Maker = Floats(spec, own, stored.slots, stored.shape, is_on_device=True)
        reason = f"{word} becomes {word_of(spec.dtype)}"
        step = Step("dequantize", reason, stem, maker, refs, stored.shape, linears=own)
        return Draft(step, (spec,))
    dialect = dialect_to_write(recipe.target)
    table = dialect.TRAITS.fp8
    lacks_input = table and table.has_input_scale(form) and input_scale_of(linears[0]) is None
    unit_stem = Stem(stem, stored.shape, stored.slots, (1.0,) if lacks_input else ())
    by_module = {linear.module: linear for linear in linears}
    maker = maker_of(Unit((unit_stem,), by_module, own, "transcode", form, recipe.target))
    reason = f"{word}: the same codes and scales"
    step = Step("transcode", reason, stem, maker, refs, stored.shape, form, linears=own)
    return Draft(step, dialect.outputs(stem, stored.shape, form))


def _makers_of(
    placed: Mapping[str, Stored],
    contents: Transcoding,
    linears: Mapping[str, Linear],
    recipe: Recipe,
) -> dict[str, Maker]:
    """Make the makers of four-bit stems.

    Members of a scale group in one shard have one maker where a cast gives them a global scale.
    """
    artifact, forms = contents.artifact, contents.forms
    group_of = scale_groups(linears, recipe.groups)
    cast: dict[ScaleGroup | str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        if forms[module].format is not linear.coding.format:
            cast[group_of.get(module, module)].append(linear)
    together: dict[object, list[Stem]] = defaultdict(list)
    for name, stored in placed.items():
        first = stored.slots[0][0].module
        if first in linears:
            # The first slot of each matrix of a stack, or of the one.
            firsts = stored.slots[:: len(stored.slots) // math.prod(stored.shape[:-2])]
            inputs = tuple([artifact.input_scale(slot[0].module) for slot in firsts])
            group = group_of.get(first) if len(stored.shape) == MATRIX_DIMENSIONS else None
            key = (group, stored.home.file) if group in cast else name
            together[key].append(Stem(name, stored.shape, stored.slots, inputs))
    makers: dict[str, Maker] = {}
    for stems in together.values():
        modules = dict.fromkeys([one for stem in stems for slot in stem.members for one in slot])
        own = {group_of.get(module, module): None for module in modules}
        groups = tuple([tuple(cast[group]) for group in own if group in cast])
        members = tuple([linears[module] for module in modules])
        spelling = Spelling(str(recipe.target.dialect), forms[next(iter(modules))])
        maker = Carried(tuple(stems), members, groups, spelling)
        makers |= dict.fromkeys([stem.name for stem in stems], maker)
    return makers


def _scales_beside(drafts: Sequence[Draft], caches: Collection[str]) -> tuple[list[str], list[str]]:
    """List input scales without a place, and FP8 modules without a scale."""
    unread, unit = [], []
    for step, specs, *_ in drafts:
        names = {spec.name for spec in specs}
        own = [ref for linear in step.linears for ref in linear.idle if ref.name not in caches]
        unread += [ref.name for ref in own if ref.name not in names and ref.elements == 1]
        wanted = any(name.endswith(".input_scale") for name in names)
        if step.form and wanted and step.form.format.is_fp8 and not input_scale_of(step.linears[0]):
            unit.append(step.module)
    return unread, unit


def _expandable(checkpoint: Checkpoint) -> Iterable[Linear]:
    """Find matrices of llama.cpp's types, of MLX's integers and of INT8.

    No dialect has a place for them.
    """
    apart = {
        ref.name: ref
        for shard in checkpoint.shards
        if shard.frame.container == "safetensors"
        for ref in shard.tensors
    }
    blocks = find_gguf_blocks(apart, lambda name, shape: None)
    others = find_affine(Clues(checkpoint.config, {}, apart)) | find_int8(apart)
    return (blocks | others).values()


def _expand(linear: Linear, recipe: Recipe) -> Draft:
    """Draft the step of a matrix that becomes floats."""
    spec = expanded_spec(linear.module + WEIGHT, linear.shape, recipe)
    reason = f"{linear.coding.word} becomes {word_of(spec.dtype)}"
    return draft_floats("dequantize", reason, linear, spec)


def refuse_other_matrices(checkpoint: Checkpoint, contents: Transcoding) -> None:
    """Raise InputError for matrices that no record could describe."""
    known = {
        ref.name
        for packed in contents.modules.values()
        for ref in (*packed.refs, *packed.companions)
    }
    linears = (*contents.others.values(), *_expandable(checkpoint))
    known |= {ref.name for linear in linears for ref in (*linear.refs, *linear.idle)}
    tensors = {ref.name: ref for ref in checkpoint.tensors}
    known |= {name for name, ref in tensors.items() if is_mark(ref)} | contents.unscaled
    found = [ref.name for ref in find_unread(tensors, known, contents.artifact.clues.is_recorded)]
    known |= set(found)
    fp8 = (ref.name for ref in checkpoint.tensors if ref.dtype.startswith("F8_"))
    found += [name for name in fp8 if name.endswith(WEIGHT) and name not in known]
    if found:
        detail = (
            f"{are_text(len(found), 'tensor')} quantized in a way that cannot be carried, the first"
            f" {found[0]!r}; expected NVFP4, MXFP4, FP8, MXFP8, int4 and floats"
        )
        raise InputError("mixed-modules", detail, "Start from the original weights.", found[0])


def _refuse_unfit(
    placed: Mapping[str, Stored],
    contents: Transcoding,
    dialect: Dialect,
    recipe: Recipe,
    judged: Judgement,
) -> None:
    """Raise InputError for four-bit modules without a place."""
    for stem, stored in placed.items():
        form = contents.forms.get(stored.slots[0][0].module)
        rows, columns = stored.shape[-2:]
        if form and (reason := dialect.unfit(stem, (rows, columns), form)):
            detail = f"{stem} has {reason}; dialect {recipe.target.dialect} has no place for it"
            raise InputError("dialect-shape", detail, tensor=stem)
    quantized = {name: (one.shape, one.form.format) for name, one in contents.modules.items()}
    holds = dialect.TRAITS.holds_embeddings
    for module, _, what in find_unread_modules(quantized, recipe, {}, holds, judged.is_embedding):
        raise InputError("dialect-module", f"{module} is {what}", tensor=module)


def _module_tasks(
    writing: Writing,
    placed: Iterable[tuple[str, Draft]],
    consumed: set[str],
    recipe: Recipe | None = None,
    caches: Mapping[str, Draft] | None = None,
) -> tuple[Task, ...]:
    """Lay out drafts in their shards; copy tensors that are not consumed.

    recipe  has the dtype of matrices that stay; None: their own
    caches  drafts of the scales of a cache, by their names
    """
    at: dict[str, list[Draft]] = defaultdict(list)
    for file, draft in placed:
        at[file].append(draft)
    tasks = []
    for shard in writing.checkpoint.shards:
        copies = []
        for ref in shard.tensors:
            if ref.name not in consumed:
                kept = keep_tensor(ref, "copy", "not quantized", recipe)
                copies.append((caches or {}).get(ref.name, kept))
        # a shard of which nothing is left is none
        if copies or at[shard.file] or not shard.tensors:
            tasks.append(writing.task(shard, [*copies, *at[shard.file]]))
    refuse_collisions(tasks)
    return tuple(tasks)
