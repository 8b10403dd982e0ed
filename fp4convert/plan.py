"""(headers, recipe) -> Plan: what happens to every tensor and where every output byte goes; pure.

Nothing is read but headers and config.json, so a dry run, the disk check, bounded memory and identical output from any
number of workers all follow from this one value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp4convert.dialects import Dialect, Ignored, Packed, dialect_to_write, form_of, is_quantized_tensor
from fp4convert.errors import InputError
from fp4convert.formats import FLOAT_TYPES
from fp4convert.patterns import matches
from fp4convert.recipe import Recipe, ScaleGroup, Target, build_recipe, scale_group
from fp4convert.shard import DTYPE_BITS, TensorRef, TensorSpec
from fp4convert.sources import Checkpoint
from fp4convert.stacks import Slot
from fp4convert.tasks import Action, Draft, Plan, Task, Writing, module_of, refuse_collisions

DTYPES = {kind.word: dtype for dtype, kind in FLOAT_TYPES.items()}  # a user's word -> safetensors' name
UNSAID = "not every four-bit module has one, or the record says nothing of them"
MATRIX_DIMENSIONS, STACK_DIMENSIONS = 2, 3


def plan_quantize(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """The plan that turns a checkpoint into the recipe's format and dialect.

    Raises InputError where the checkpoint is already quantized, or where an output would take the name of another tensor.
    """
    _refuse_quantized(checkpoint)
    dialect, form = dialect_to_write(recipe.target), form_of(recipe.target)
    _refuse_other_container(checkpoint, dialect, str(recipe.target.dialect))
    verdicts = {ref.name: _verdict(ref, recipe) for ref in checkpoint.tensors}
    for ref in checkpoint.tensors:
        if verdicts[ref.name][0] == "quantize" and (
            reason := dialect.unfit(module_of(ref.name), (ref.shape[0], ref.shape[1]), form)
        ):
            verdicts[ref.name] = ("skip", reason)
    chosen = [ref for ref in checkpoint.tensors if verdicts[ref.name][0] == "quantize"]
    groups, warnings = _scale_groups(chosen, recipe)
    shapes = {module_of(ref.name): (ref.shape[0], ref.shape[1]) for ref in chosen}
    if dialect.stems(shapes) != shapes:
        detail = f"dialect {recipe.target.dialect} stacks modules, which this version does not while it quantizes"
        raise InputError("dialect-stacks", detail, "Quantize to another --dialect, and transcode the result.")

    def decide(ref: TensorRef) -> Draft:
        action, reason = verdicts[ref.name]
        if action != "quantize":
            return Draft(action, reason, (ref,), (TensorSpec(ref.name, ref.dtype, ref.shape),))
        shape = (ref.shape[0], ref.shape[1])
        specs = dialect.outputs(module_of(ref.name), shape, form)
        group = groups[ref.name]
        return Draft(action, reason, (ref,), specs, shape, group=group.name, amax_of=group.members)

    writing = Writing(checkpoint, recipe.target, dialect, form)
    tasks = tuple(writing.task(shard, [decide(ref) for ref in shard.tensors]) for shard in checkpoint.shards)
    refuse_collisions(tasks)
    _refuse_lookalikes(tasks, dialect, shapes)
    included = [module for module in shapes if recipe.is_asked_for(module)]  # no other fits a rule of what stays
    if not dialect.TRAITS.holds_embeddings:
        warnings += [
            f"{module} is an embedding, which no engine of dialect {recipe.target.dialect} reads in four bits"
            for module in included
            if recipe.kind_of(module) == "embedding"
        ]
    if not chosen:
        warnings.append(f"no tensor becomes {recipe.format.name}: every one stays, for the reasons that --dry-run lists")
    if not checkpoint.config and dialect.TRAITS.container == "safetensors":
        warnings.append("the source has no config.json, or an empty one; the one written holds the quantization record alone")
    notes = (*_notes_on(checkpoint), *_stacks(checkpoint), *_unmatched(checkpoint, recipe), *warnings)
    kept = _kept_modules(checkpoint, {ref.name for ref in chosen})
    patterns = recipe.patterns_to_declare(kept, included)
    return Plan(recipe.target, tasks, Ignored(tuple(kept), patterns), notes)


def plan_dequantize(checkpoint: Checkpoint, modules: dict[str, Packed], dtype: str, cache_scales: Collection[str] = ()) -> Plan:
    """The plan that turns an artifact back into a checkpoint whose four-bit modules are bf16, fp16 or fp32.

    Companions of a four-bit module are left out: they would mean nothing beside ordinary weights.  A stack of experts becomes
    one as transformers keeps it: (experts, columns, rows), under its own name.

    modules       the sound quantized modules, as `artifact` found them
    cache_scales  tensors that only an engine with a quantized cache wants; left out too
    Raises        InputError for an unknown dtype, or where a restored weight would take the name of another tensor
    """
    if dtype not in DTYPES:
        raise InputError("unknown-dtype", f"dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")

    target = Target(dtype)
    _refuse_other_matrices(checkpoint, modules)
    drafts = {}
    for packed in modules.values():
        shape = packed.stored_shape
        spec = TensorSpec(f"{packed.stem}.weight", DTYPES[dtype], shape)
        if len(shape) == STACK_DIMENSIONS:
            spec = TensorSpec(packed.stem, DTYPES[dtype], (shape[0], shape[2], shape[1]))
        drafts[packed.stem] = Draft("dequantize", "four-bit", packed.refs, (spec,), shape)
    left_out = {ref.name for packed in modules.values() for ref in packed.companions} | set(cache_scales)
    tasks = _module_tasks(Writing(checkpoint, target), modules, drafts, left_out)
    warnings = [f"{len(left_out)} scales are left out: ordinary weights need none"] if left_out else []
    four_bit = {ref.name for packed in modules.values() for ref in packed.refs}
    typed = [ref.name for ref in checkpoint.tensors if ref.dtype not in DTYPE_BITS and ref.name not in four_bit]
    if typed:
        warnings.append(f"{len(typed)} tensors stay in GGUF's own types, the first {typed[0]!r}")
    return Plan(target, tasks, Ignored((), ()), (*_notes_on(checkpoint), *warnings))


class Stored(NamedTuple):
    """What becomes of some modules: the shape of the matrix that stores them, whose rows it holds, and what it replaces.

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
    """The plan that spells the four-bit modules of an artifact in another dialect, every other tensor as it is.

    checkpoint  the artifact's own, or the one whose other tensors are kept
    modules     the sound quantized modules, as `artifact` found them
    placed      what is stored in that other checkpoint, by stem
    renamed     new names of tensors that are kept
    Raises      InputError for what the dialect cannot hold, or where an output would take the name of another tensor
    """
    dialect, form = dialect_to_write(target), form_of(target)
    _refuse_other_container(checkpoint, dialect, str(target.dialect))
    recipe = build_recipe(target, checkpoint.config)
    _refuse_other_matrices(checkpoint, modules)
    if placed is None:
        placed = _place(modules, dialect)
    _refuse_unfit(placed, modules, dialect, recipe)
    shared: dict[ScaleGroup | str, list[TensorRef]] = defaultdict(list)
    for module, packed in modules.items():
        shared[scale_group(module, recipe.groups) or module] += packed.refs
    drafts = {}
    for stem, stored in placed.items():
        members = list(dict.fromkeys(rows.module for slot in stored.slots for rows in slot))
        refs = tuple(dict.fromkeys(ref for member in members for ref in modules[member].refs))
        group = tuple(dict.fromkeys(ref for member in members for ref in shared[scale_group(member, recipe.groups) or member]))
        specs = dialect.outputs(stem, stored.shape, form)
        drafts[stem] = Draft("transcode", "four-bit", refs, specs, stored.shape, stored.slots, amax_of=group, home=stored.home)
    homes = {stored.home.name for stored in placed.values()}
    idle = idle_scales(modules, renamed or {})
    tasks = _module_tasks(Writing(checkpoint, target, dialect, form, renamed or {}), modules, drafts, homes | set(idle))
    four_bit = {ref.name for packed in modules.values() for ref in (*packed.refs, *packed.companions)}
    kept = _kept_modules(checkpoint, homes | four_bit)
    patterns = recipe.patterns_to_declare(kept, [*modules, *placed])
    warnings = [f"{len(idle)} scales are left out, the first {idle[0]!r}: {UNSAID}"] if idle else []
    return Plan(target, tasks, Ignored(tuple(kept), patterns), (*_notes_on(checkpoint), *warnings))


def idle_scales(modules: Mapping[str, Packed], cache_scales: Collection[str]) -> list[str]:
    """Scales beside four-bit modules that mean nothing for the artifact as a whole: only some modules have input scales."""
    names = (ref.name for packed in modules.values() for ref in packed.companions if ref not in packed.refs)
    return [name for name in names if name not in cache_scales]


def _refuse_lookalikes(tasks: Iterable[Task], dialect: Dialect, chosen: Collection[str]) -> None:
    """InputError where readers would take a tensor that stays for a part of a four-bit module."""
    outputs = {ref.name: ref for task in tasks for ref in task.outputs}
    if others := sorted(set(dialect.find(outputs)) - set(chosen)):
        detail = f"{others[0]} stays, and its tensors have the names and types of four-bit ones in this dialect"
        raise InputError("name-collision", detail, "Choose another --dialect.", others[0])


def _place(modules: dict[str, Packed], dialect: Dialect) -> dict[str, Stored]:
    """Every matrix that the dialect stores for those modules, where the first of its modules is now."""
    placed = {}
    for stem, shape in dialect.stems({module: packed.shape for module, packed in modules.items()}).items():
        slots = dialect.slots(stem, shape)
        placed[stem] = Stored(shape, slots, modules[slots[0][0].module].refs[0])
    return placed


def _refuse_other_matrices(checkpoint: Checkpoint, modules: dict[str, Packed]) -> None:
    """InputError for quantized matrices beside the four-bit ones of one format, which the result's records would not tell."""
    ours = {ref.name for packed in modules.values() for ref in (*packed.refs, *packed.companions)}
    others = [ref for ref in checkpoint.tensors if ref.name not in ours]
    next_step = "Start from the original weights."
    matrices = [ref.name for ref in others if ref.dtype.startswith("F8_") and ref.name.endswith(".weight")]
    if matrices:
        detail = f"{len(matrices)} matrices are FP8, the first {matrices[0]!r}; this version carries four-bit ones and floats"
        raise InputError("fp8-modules", detail, next_step, matrices[0])
    if found := [ref.name for ref in others if is_quantized_tensor(ref)]:
        detail = f"{len(found)} tensors are quantized in another way, the first {found[0]!r}"
        raise InputError("mixed-modules", f"{detail}; this version carries four-bit matrices of one format", next_step, found[0])


def _refuse_other_container(checkpoint: Checkpoint, dialect: Dialect, name: str) -> None:
    """InputError where names and rows are those of one kind of file, and the dialect belongs to the other."""
    for shard in checkpoint.shards:
        if shard.frame.container == dialect.TRAITS.container:
            continue
        if dialect.TRAITS.container == "gguf":
            detail = f"{shard.file}: dialect gguf needs llama.cpp's names, order of rows and keys; expected a GGUF file"
            next_step = "Make a bf16 GGUF of the model first; quantize it, or give it: transcode --template FILE.gguf."
        else:
            detail = f"{shard.file}: a GGUF file has llama.cpp's names and order of rows, which dialect {name} knows nothing of"
            next_step = "Use --dialect gguf, or start from the model's safetensors."
        raise InputError("dialect-container", detail, next_step)


def _refuse_unfit(placed: dict[str, Stored], modules: Iterable[str], dialect: Dialect, recipe: Recipe) -> None:
    """InputError for what the dialect has no place for."""
    for stem, stored in placed.items():
        rows, columns = stored.shape[-2:]
        if reason := dialect.unfit(stem, (rows, columns), form_of(recipe.target)):
            detail = f"{stem} has {reason}; dialect {recipe.target.dialect} has no place for it"
            raise InputError("dialect-shape", detail, "Choose another --dialect.", stem)
    for module in modules:
        if not dialect.TRAITS.holds_embeddings and recipe.kind_of(module) == "embedding":
            detail = f"{module} is a four-bit embedding, which no engine of dialect {recipe.target.dialect} reads"
            raise InputError("dialect-module", detail, "Choose another --dialect.", module)


def _module_tasks(writing: Writing, modules: dict[str, Packed], drafts: dict[str, Draft], left_out: set[str]) -> tuple[Task, ...]:
    """Tasks that carry out each draft where the first of its packed codes are, and copy every other tensor."""
    consumed = left_out | {ref.name for packed in modules.values() for ref in packed.refs}
    at: dict[str, list[Draft]] = defaultdict(list)
    for stem, draft in drafts.items():
        at[(draft.home or draft.refs[0]).file].append(replace(draft, module=stem))
    tasks = []
    for shard in writing.checkpoint.shards:
        copies = [
            Draft("copy", "not quantized", (ref,), (TensorSpec(writing.renamed.get(ref.name, ref.name), ref.dtype, ref.shape),))
            for ref in shard.tensors
            if ref.name not in consumed
        ]
        if copies or at[shard.file] or not shard.tensors:  # a shard of which nothing is left is none
            tasks.append(writing.task(shard, [*copies, *at[shard.file]]))
    refuse_collisions(tasks)
    return tuple(tasks)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str | None
    members: tuple[TensorRef, ...]


def _verdict(ref: TensorRef, recipe: Recipe) -> tuple[Action, str]:
    """Whether a tensor becomes four-bit, and why, or why not."""
    if len(ref.shape) == STACK_DIMENSIONS and ref.dtype in FLOAT_TYPES:
        return "copy", "a stack of matrices; this version quantizes single ones"
    if not ref.name.endswith(".weight"):
        return "copy", "not a linear layer's weight"
    if len(ref.shape) != MATRIX_DIMENSIONS:
        return "copy", f"{len(ref.shape)}-dimensional, not a matrix"
    if reason := recipe.reason_to_keep(module_of(ref.name)):
        return "copy", reason
    if ref.dtype not in FLOAT_TYPES:
        return "skip", f"{ref.dtype}, not one of {', '.join(FLOAT_TYPES)}"
    if not ref.elements:
        return "skip", "empty"
    block = recipe.format.block_size
    if ref.shape[1] % block:
        return "skip", f"{ref.shape[1]} columns, not a multiple of the block of {block}"
    return "quantize", "a linear layer"


def _scale_groups(chosen: list[TensorRef], recipe: Recipe) -> tuple[dict[str, _Group], list[str]]:
    """The scale group of every chosen tensor, and a warning for each kind of group that has not all of its members."""
    if not recipe.format.has_global_scale:
        return {ref.name: _Group(None, (ref,)) for ref in chosen}, []
    gathered: dict[ScaleGroup, list[TensorRef]] = defaultdict(list)
    groups: dict[str, _Group] = {}
    for ref in chosen:
        if key := scale_group(module_of(ref.name), recipe.groups):
            gathered[key].append(ref)
        else:
            groups[ref.name] = _Group(None, (ref,))
    for key, refs in gathered.items():
        groups |= dict.fromkeys((ref.name for ref in refs), _Group(str(key), tuple(refs)))
    return groups, _incomplete_groups(gathered)


def _incomplete_groups(gathered: dict[ScaleGroup, list[TensorRef]]) -> list[str]:
    """One warning for each kind of group that lacks members somewhere."""
    lacking: dict[tuple[str, ...], list[ScaleGroup]] = defaultdict(list)
    for key, refs in gathered.items():
        if len(refs) < len(key.members):
            lacking[key.members].append(key)
    if not lacking:
        return []
    present = {module_of(ref.name).rpartition(".")[2] for refs in gathered.values() for ref in refs}
    return [_incomplete(members, keys, present) for members, keys in lacking.items()]


def _incomplete(members: tuple[str, ...], keys: list[ScaleGroup], present: set[str]) -> str:
    where = f"{len(keys)} scale groups {'/'.join(members)} lack members, the first in {keys[0].parent!r}"
    nowhere = [member for member in members if member not in present]
    if nowhere:
        return f"{where}: no {' and no '.join(nowhere)} is quantized anywhere, which is right only where the model has none"
    return f"{where}: engines that fuse them need all of them quantized, or none"


def _kept_modules(checkpoint: Checkpoint, chosen: set[str]) -> list[str]:
    """Modules with a matrix or a stack that stays, and none that is quantized."""
    kept = {module_of(ref.name) for ref in checkpoint.tensors if len(ref.shape) >= MATRIX_DIMENSIONS and ref.name not in chosen}
    return sorted(kept - {module_of(name) for name in chosen} - {""})


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    tail = "fp4convert does not read quantized sources yet"
    if checkpoint.config.get("quantization_config"):
        detail = f"config.json: the checkpoint is already quantized (it has a quantization_config); {tail}"
        raise InputError("already-quantized", detail, "Start from the original weights.")
    for ref in checkpoint.tensors:
        if is_quantized_tensor(ref):
            detail = f"{ref.file}: {ref.name!r} says that the checkpoint is already quantized; {tail}"
            raise InputError("already-quantized", detail, "Start from the original weights.", ref.name)


def _notes_on(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a person should know of a source, whatever becomes of it."""
    omitted = checkpoint.unindexed
    index = (
        [f"{len(omitted)} tensors are not in the index, the first {omitted[0]!r}; they are taken all the same"] if omitted else []
    )
    return (*index, *_left_out(checkpoint), *_custom_code(checkpoint))


def _left_out(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.left_out:
        return []
    first = checkpoint.left_out[0]
    return [f"{len(checkpoint.left_out)} files hold weights in another form and are left out, the first {first!r}"]


def _stacks(checkpoint: Checkpoint) -> list[str]:
    stacks = [ref.name for ref in checkpoint.tensors if len(ref.shape) == STACK_DIMENSIONS and ref.dtype in FLOAT_TYPES]
    experts = [name for name in stacks if "expert" in name]
    if not experts:
        return []
    return [
        f"{len(experts)} stacks of expert matrices stay as they are, the first {experts[0]!r}: this version does not quantize"
        " them, and some engines load no quantized model with such experts"
    ]


def _custom_code(checkpoint: Checkpoint) -> list[str]:
    programs = [file for file in checkpoint.sidecars if file.endswith(".py")]
    if not programs and "auto_map" not in checkpoint.config:
        return []
    return [f"the model has custom code ({', '.join(programs) or 'elsewhere'}): copied, never run; engines will ask to trust it"]


def _unmatched(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    if not recipe.include and not recipe.exclude:
        return []
    modules = {module_of(ref.name) for ref in checkpoint.tensors}
    return [
        f"{option} {pattern!r} matches no module; a module's name is its tensor's without .weight"
        for option, patterns in (("--include", recipe.include), ("--exclude", recipe.exclude))
        for pattern in patterns
        if pattern not in modules and not any(matches(pattern, module) for module in modules)
    ]
