"""(headers, recipe) -> Plan: what happens to every tensor and where every output byte goes; pure.

Nothing is read but headers and config.json, so a dry run, the disk check, bounded memory and identical output from any
number of workers all follow from this one value.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from fp4convert.dialects import Ignored, Packed, dialect_named, form_of, is_quantized_tensor
from fp4convert.errors import InputError
from fp4convert.formats import FLOAT_TYPES, format_named
from fp4convert.recipe import Recipe, ScaleGroup, Target, build_recipe, matches, scale_group
from fp4convert.shard import Header, TensorRef, TensorSpec, lay_out
from fp4convert.sources import Checkpoint

Action = Literal["quantize", "dequantize", "transcode", "copy", "skip"]
DTYPES = {kind.word: dtype for dtype, kind in FLOAT_TYPES.items()}  # a user's word -> safetensors' name
MATRIX_DIMENSIONS, STACK_DIMENSIONS = 2, 3
METADATA = {"format": "pt"}  # transformers refuses a shard that does not say so; a shard's own metadata stays


@dataclass(frozen=True, slots=True)
class Step:
    """What one tensor (or the tensors of one four-bit module) becomes.

    action   copy: stays by the recipe; skip: a linear layer that cannot be quantized, and stays as it is
    refs     what is read; exactly one, except of a module that is four-bit already
    shape    (rows, columns) of the matrix; () where it stays
    group    name of the scale group, or None
    amax_of  every member of the scale group (or the tensor alone), in whichever shard; the common amax sets the global
             scale, and tells whether all of them are finite; to transcode, every tensor of the group; empty otherwise
    outputs  where the result goes; all in the step's own shard
    """

    module: str
    action: Action
    reason: str
    refs: tuple[TensorRef, ...]
    shape: tuple[int, ...]
    group: str | None
    amax_of: tuple[TensorRef, ...]
    outputs: tuple[TensorRef, ...]

    @property
    def source_bytes(self) -> int:
        return sum(ref.nbytes for ref in self.refs)

    @property
    def output_bytes(self) -> int:
        return sum(ref.nbytes for ref in self.outputs)


@dataclass(frozen=True, slots=True)
class Task:
    """One input shard -> one output shard of the same name; tasks do not depend on each other.

    key     equal keys promise equal output bytes: a hash of target, steps, and what changes when a shard that they read may have
    header  the output's header bytes; nbytes, the size of the whole output
    """

    file: str
    key: str
    header: bytes
    nbytes: int
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[TensorRef]:
        """The tensors of the output shard."""
        return [ref for step in self.steps for ref in step.outputs]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every task, and what the result's records need to know."""

    target: Target
    tasks: tuple[Task, ...]
    ignored: Ignored
    warnings: tuple[str, ...]

    @property
    def steps(self) -> Iterator[Step]:
        return (step for task in self.tasks for step in task.steps)

    @property
    def source_bytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(step.source_bytes for step in self.steps)

    @property
    def output_bytes(self) -> int:
        """Bytes of the shards that are written, headers included."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def quantized(self) -> list[str]:
        """Modules that are four-bit in the result."""
        return [step.module for step in self.steps if step.action in ("quantize", "transcode")]

    @property
    def index(self) -> dict[str, object]:
        """The model.safetensors.index.json of the output."""
        outputs = [ref for task in self.tasks for ref in task.outputs]
        weight_map = {ref.name: ref.file for ref in sorted(outputs, key=lambda ref: ref.name)}
        return {"metadata": {"total_size": sum(ref.nbytes for ref in outputs)}, "weight_map": weight_map}


def plan_quantize(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """The plan that turns a checkpoint into the recipe's format and dialect.

    Raises InputError where the checkpoint is already quantized, or where an output would take the name of another tensor.
    """
    _refuse_quantized(checkpoint)
    dialect, form = dialect_named(str(recipe.target.dialect), recipe.format), form_of(recipe.target)
    verdicts = {ref.name: _verdict(ref, recipe) for ref in checkpoint.tensors}
    chosen = [ref for ref in checkpoint.tensors if verdicts[ref.name][0] == "quantize"]
    groups, warnings = _scale_groups(chosen, recipe)

    def decide(ref: TensorRef) -> _Draft:
        action, reason = verdicts[ref.name]
        if action != "quantize":
            return _Draft(action, reason, (ref,), (TensorSpec(ref.name, ref.dtype, ref.shape),))
        shape = (ref.shape[0], ref.shape[1])
        specs = dialect.outputs(_module_of(ref.name), shape, form)
        group = groups[ref.name]
        return _Draft(action, reason, (ref,), specs, shape, group.name, group.members)

    tasks = tuple(_task(checkpoint, shard, [decide(ref) for ref in shard.tensors], recipe.target) for shard in checkpoint.shards)
    _refuse_collisions(tasks)
    if not chosen:
        warnings.append(f"no tensor becomes {recipe.format.name}: every one stays, for the reasons that --dry-run lists")
    if not checkpoint.config:
        warnings.append("the source has no config.json, or an empty one; the one written holds the quantization record alone")
    notes = (
        *checkpoint.warnings,
        *_left_out(checkpoint),
        *_stacks(checkpoint),
        *_custom_code(checkpoint),
        *_unmatched(checkpoint, recipe),
        *warnings,
    )
    kept = _kept_modules(checkpoint, {ref.name for ref in chosen})
    patterns = recipe.patterns_to_declare(kept, [_module_of(ref.name) for ref in chosen])
    return Plan(recipe.target, tasks, Ignored(tuple(kept), patterns), notes)


def plan_dequantize(checkpoint: Checkpoint, modules: dict[str, Packed], dtype: str) -> Plan:
    """The plan that turns an artifact back into a checkpoint whose four-bit modules are bf16, fp16 or fp32.

    Companions of a four-bit module are left out: they would mean nothing beside ordinary weights.

    modules  the sound quantized modules, as `artifact` found them
    Raises   InputError for an unknown dtype, or where a restored weight would take the name of another tensor
    """
    if dtype not in DTYPES:
        raise InputError("unknown-dtype", f"dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")

    def spell(module: str, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{module}.weight", DTYPES[dtype], shape),)

    target = Target(dtype)
    return Plan(target, _module_tasks(checkpoint, modules, spell, target), Ignored((), ()), ())


def plan_transcode(checkpoint: Checkpoint, modules: dict[str, Packed], target: Target) -> Plan:
    """The plan that spells the four-bit modules of an artifact in another dialect, every other tensor as it is.

    modules  the sound quantized modules, as `artifact` found them
    Raises   InputError for what the dialect cannot hold, or where an output would take the name of another tensor
    """
    dialect, form = dialect_named(str(target.dialect), format_named(target.format)), form_of(target)

    def spell(module: str, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
        return dialect.outputs(module, shape, form)

    recipe = build_recipe(target, checkpoint.model_types)
    tasks = _module_tasks(checkpoint, modules, spell, target, recipe.groups)
    kept = _kept_modules(checkpoint, {ref.name for packed in modules.values() for ref in (*packed.refs, *packed.companions)})
    patterns = recipe.patterns_to_declare(kept, list(modules))
    return Plan(target, tasks, Ignored(tuple(kept), patterns), ())


def _module_tasks(
    checkpoint: Checkpoint,
    modules: dict[str, Packed],
    spell: Callable[[str, tuple[int, int]], tuple[TensorSpec, ...]],
    target: Target,
    groups: tuple[tuple[str, ...], ...] = (),
) -> tuple[Task, ...]:
    """Tasks that make something else of every four-bit module, where its packed codes are, and copy the rest.

    Companions mean nothing beside ordinary weights, and stay beside four-bit ones.
    """
    action: Action = "transcode" if target.dialect else "dequantize"
    left_out = {module: packed.companions if action == "dequantize" else () for module, packed in modules.items()}
    home = {ref.name: module for module, packed in modules.items() for ref in (*packed.refs, *left_out[module])}
    shared: dict[ScaleGroup | str, list[TensorRef]] = defaultdict(list)
    for module, packed in modules.items():
        shared[scale_group(module, groups) or module] += packed.refs

    def decide(shard: Header) -> list[_Draft]:
        drafts = []
        for ref in shard.tensors:
            module = home.get(ref.name)
            if module is None:
                drafts.append(_Draft("copy", "not quantized", (ref,), (TensorSpec(ref.name, ref.dtype, ref.shape),)))
            elif ref == modules[module].refs[0]:
                packed = modules[module]
                group = tuple(shared[scale_group(module, groups) or module]) if action == "transcode" else ()
                drafts.append(_Draft(action, "four-bit", packed.refs, spell(module, packed.shape), packed.shape, amax_of=group))
        return drafts

    tasks = tuple(_task(checkpoint, shard, decide(shard), target) for shard in checkpoint.shards)
    _refuse_collisions(tasks)
    return tasks


@dataclass(frozen=True, slots=True)
class _Draft:
    """A step whose outputs have no place yet."""

    action: Action
    reason: str
    refs: tuple[TensorRef, ...]
    specs: tuple[TensorSpec, ...]
    shape: tuple[int, ...] = ()
    group: str | None = None
    amax_of: tuple[TensorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class _Group:
    name: str | None
    members: tuple[TensorRef, ...]


def _task(checkpoint: Checkpoint, shard: Header, drafts: list[_Draft], target: Target) -> Task:
    header, placed = lay_out(shard.file, (spec for draft in drafts for spec in draft.specs), METADATA | shard.metadata)
    place = {ref.name: ref for ref in placed}
    steps = tuple(
        Step(
            module=_module_of(draft.specs[0].name),
            action=draft.action,
            reason=draft.reason,
            refs=draft.refs,
            shape=draft.shape,
            group=draft.group,
            amax_of=draft.amax_of,
            outputs=tuple(place[spec.name] for spec in draft.specs),
        )
        for draft in drafts
    )
    end = max((ref.start + ref.nbytes for ref in placed), default=len(header))
    files = sorted({shard.file, *(ref.file for draft in drafts for ref in (*draft.refs, *draft.amax_of))})
    promise = f"{target!r} {[checkpoint.stamps[file] for file in files]} {steps!r}"
    key = hashlib.sha256(promise.encode("utf-8", "surrogatepass")).hexdigest()
    return Task(shard.file, key, header, end, steps)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _verdict(ref: TensorRef, recipe: Recipe) -> tuple[Action, str]:
    """Whether a tensor becomes four-bit, and why, or why not."""
    if len(ref.shape) == STACK_DIMENSIONS and ref.dtype in FLOAT_TYPES:
        return "copy", "a stack of matrices; this version quantizes single ones"
    if not ref.name.endswith(".weight"):
        return "copy", "not a linear layer's weight"
    if len(ref.shape) != MATRIX_DIMENSIONS:
        return "copy", f"{len(ref.shape)}-dimensional, not a matrix"
    if reason := recipe.reason_to_keep(_module_of(ref.name)):
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
        if key := scale_group(_module_of(ref.name), recipe.groups):
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
    present = {_module_of(ref.name).rpartition(".")[2] for refs in gathered.values() for ref in refs}
    return [_incomplete(members, keys, present) for members, keys in lacking.items()]


def _incomplete(members: tuple[str, ...], keys: list[ScaleGroup], present: set[str]) -> str:
    where = f"{len(keys)} scale groups {'/'.join(members)} lack members, the first in {keys[0].parent!r}"
    nowhere = [member for member in members if member not in present]
    if nowhere:
        return f"{where}: no {' and no '.join(nowhere)} is quantized anywhere, which is right only where the model has none"
    return f"{where}: engines that fuse them need all of them quantized, or none"


def _kept_modules(checkpoint: Checkpoint, chosen: set[str]) -> list[str]:
    """Modules with a matrix or a stack that stays, and none that is quantized."""
    kept = {_module_of(ref.name) for ref in checkpoint.tensors if len(ref.shape) >= MATRIX_DIMENSIONS and ref.name not in chosen}
    return sorted(kept - {_module_of(name) for name in chosen} - {""})


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    tail = "fp4convert does not read quantized sources yet"
    if checkpoint.config.get("quantization_config"):
        detail = f"config.json: the checkpoint is already quantized (it has a quantization_config); {tail}"
        raise InputError("already-quantized", detail, "Start from the original weights.")
    for ref in checkpoint.tensors:
        if is_quantized_tensor(ref):
            detail = f"{ref.file}: {ref.name!r} says that the checkpoint is already quantized; {tail}"
            raise InputError("already-quantized", detail, "Start from the original weights.", ref.name)


def _refuse_collisions(tasks: Iterable[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        for step in task.steps:
            for ref in step.outputs:
                if ref.name in seen:
                    detail = f"{task.file}: the output {ref.name!r} already exists; expected names that do not collide"
                    raise InputError("name-collision", detail, f"Leave one out: --exclude {step.module!r}.", ref.name)
                seen.add(ref.name)


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
    modules = {_module_of(ref.name) for ref in checkpoint.tensors}
    return [
        f"{option} {pattern!r} matches no module; a module's name is its tensor's without .weight"
        for option, patterns in (("--include", recipe.include), ("--exclude", recipe.exclude))
        for pattern in patterns
        if not any(matches(pattern, module) for module in modules)
    ]
