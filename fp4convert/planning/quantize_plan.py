"""Plan quantize: what happens to each tensor, where each byte goes.

Nothing is read but headers and records, and the scalars of what input scales are taken from, so a dry run, the disk check,
bounded memory and identical output from any number of workers all follow from this one value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.stacks import Slot
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write, form_of
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import MATRIX_DIMENSIONS, STACK_DIMENSIONS
from fp4convert.checkpoint.linears import Linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES, FP8
from fp4convert.planning.activation_scales import (
    Constant,
    Fed,
    InputScales,
    Measured,
    find_small,
    scales_of,
)
from fp4convert.planning.decisions import (
    Verdict,
    decide,
    gather_made,
    skipped_experts,
    uneven_groups,
)
from fp4convert.planning.expert_stacks import are_stacked, ending_of, rules_of
from fp4convert.planning.kv_cache_scales import Cache
from fp4convert.planning.steps import (
    Action,
    Plan,
    Step,
    Task,
    Writing,
    module_of,
    refuse_collisions,
)
from fp4convert.recipes.patterns import matches
from fp4convert.recipes.recipe import Recipe, ScaleGroup, is_expert_stack, scale_group
from fp4convert.recipes.rules import StackRule
from fp4convert.storage.safetensors import WEIGHT, TensorRef, TensorSpec
from fp4convert.storage.source import Checkpoint

GGUF_STACK = "_exps."  # in the name of a stack of experts in a GGUF file
KEPT_DTYPE = "BF16"  # of what was packed and stays


@dataclass(frozen=True, slots=True)
class Scalars:
    """Scales that stand beside the weights, and come from elsewhere.

    inputs    what says those of activations
    measured  what a calibration says of them, to be compared
    cache     those of a cache of keys and values
    """

    inputs: InputScales = field(default_factory=lambda: Constant(1.0))
    measured: Measured | None = None
    cache: Cache = field(default_factory=Cache)


def plan_quantize(
    checkpoint: Checkpoint, recipe: Recipe, linears: Linears, scalars: Scalars = Scalars()
) -> Plan:
    """The plan that turns a checkpoint into the recipe's format and dialect.

    linears  those of the checkpoint
    Raises   InputError for stacks of experts whose layout nobody tells, for what the dialect cannot say, for modules without an
             input scale, or where an output would take the name of another tensor
    """
    dialect = dialect_to_write(recipe.target)
    refuse_other_container(checkpoint, dialect, str(recipe.target.dialect))
    verdicts = decide(linears, recipe, dialect)
    groups = gather_made(verdicts)
    fed = fed_modules(verdicts, recipe, dialect)
    inputs, inputs_told = scales_of(fed, scalars.inputs)
    drafting = _Drafting.of(verdicts, groups, dialect, inputs)
    home, consumed = linears.by_home(), linears.consumed()

    def steps_of(tensors: Iterable[TensorRef]) -> Iterator[Step]:
        for ref in tensors:
            if ref.name in linears.vectors:
                yield _folded(linears.vectors[ref.name], ref)
            elif ref.name in home:
                yield from drafting.of_tensor(ref, home[ref.name])
            elif ref.name not in consumed:
                yield Step(*_why(ref, recipe), (ref,), (_as_it_is(ref),))
            yield from scalars.cache.steps.get(ref.name, ())

    writing = Writing(checkpoint, recipe.target, dialect, form_of(recipe.target))
    tasks = tuple(writing.task(shard, steps_of(shard.tensors)) for shard in checkpoint.shards)
    _refuse_lookalikes(refuse_collisions(tasks), dialect, drafting.stems)
    made = [module for module, verdict in verdicts.items() if verdict.is_made]
    asked = [
        module for module in made if verdicts[module].stays or recipe.is_asked_for(module)
    ]  # no other fits a rule of keep
    kept = kept_modules(tasks)
    notes = (
        *notes_on(checkpoint),
        *_stacks(checkpoint, consumed),
        *_unmatched(recipe, _names_of(checkpoint, linears)),
        *uneven_groups(verdicts, recipe),
        *skipped_experts(verdicts),
        *inputs_told,
        *find_small(fed, inputs, scalars.measured),
        *scalars.cache.notes,
        *_left_behind(linears, scalars.cache),
        *_not_via(verdicts, recipe),
        *(_embeddings(asked, recipe) if not dialect.TRAITS.holds_embeddings else ()),
        *(
            ()
            if made
            else [
                f"no tensor becomes {recipe.format.name}: every one stays, for the reasons that --dry-run lists"
            ]
        ),
        *_no_config(checkpoint, dialect),
    )
    ignored = Ignored(tuple(kept), recipe.patterns_to_declare(kept, asked))
    return Plan(recipe.target, tasks, ignored, notes, _stack_rules(linears, recipe))


class _Shared(NamedTuple):
    """What the members of a scale group have in common.

    label    what a person calls the group; None where it has one member
    read     what the common amax is found in
    linears  the members
    """

    label: str | None
    read: tuple[TensorRef, ...]
    linears: tuple[Linear, ...]

    @classmethod
    def of(cls, linears: tuple[Linear, ...], group: ScaleGroup | None = None) -> _Shared:
        """That of members of a group, or of modules that have no scale in common with others."""
        read = dict.fromkeys(ref for linear in linears for ref in (*linear.refs, *_read_by(linear)))
        return cls(
            _label(group, linears) if group and len(linears) > 1 else None, tuple(read), linears
        )


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Verdicts as drafts, every module's beside the others of its stored tensor.

    groups what is shared in every scale group
    stems  shape of everything that is made, by what its tensors are named after
    slots  of the stems that hold other modules
    inputs scales of activations, of the modules that have one
    """

    verdicts: Mapping[str, Verdict]
    groups: Mapping[ScaleGroup, _Shared]
    dialect: Dialect
    stems: Mapping[str, tuple[int, ...]]
    slots: Mapping[str, tuple[Slot, ...]]
    inputs: Mapping[str, float]
    _stem_at: Mapping[str, str] = field(default_factory=dict)  # by its first module
    _held: frozenset[str] = frozenset()  # modules that stems of other names hold

    @classmethod
    def of(
        cls,
        verdicts: Mapping[str, Verdict],
        groups: Mapping[ScaleGroup, tuple[Linear, ...]],
        dialect: Dialect,
        inputs: Mapping[str, float],
    ) -> _Drafting:
        shapes = {
            module: verdict.linear.shape for module, verdict in verdicts.items() if verdict.is_made
        }
        stems = dialect.stems(shapes)
        slots = {
            stem: dialect.slots(stem, shape) for stem, shape in stems.items() if stem not in shapes
        }
        at = {stored[0][0].module: stem for stem, stored in slots.items()}
        held = frozenset(
            rows.module for stored in slots.values() for slot in stored for rows in slot
        )
        shared = {group: _Shared.of(members, group) for group, members in groups.items()}
        return cls(verdicts, shared, dialect, stems, slots, inputs, at, held)

    def of_tensor(self, ref: TensorRef, linears: list[Linear]) -> Iterator[Step]:
        """What becomes of a stored tensor that holds those; where all of them stay as they are, it stays whole."""
        verdicts = [self.verdicts[linear.module] for linear in linears]
        if not any(
            verdict.is_made or verdict.linear.coding.is_packed or verdict.linear.coding.foldings
            for verdict in verdicts
        ):
            yield Step(verdicts[0].action, verdicts[0].reason, (ref,), (_as_it_is(ref),))
            return
        for verdict in verdicts:
            linear = verdict.linear
            if not verdict.is_made and not linear.coding.is_packed and linear.coding.foldings:
                yield _folded(linear, ref, verdict.reason)
            elif not verdict.is_made:
                dtype = KEPT_DTYPE if linear.coding.is_packed else ref.dtype
                spec = TensorSpec(linear.module + WEIGHT, dtype, linear.shape)
                beside = _read_by(linear)
                yield Step(
                    verdict.action,
                    verdict.reason,
                    linear.refs,
                    (spec,),
                    linear.shape,
                    amax_of=beside,
                    linears=(linear,),
                )
            elif linear.module in self._stem_at:
                stem = self._stem_at[linear.module]
                members = dict.fromkeys(rows.module for slot in self.slots[stem] for rows in slot)
                yield self._made(
                    stem, [self.verdicts[module] for module in members], self.slots[stem]
                )
            elif linear.module not in self._held:
                yield self._made(linear.module, [verdict])

    def _made(self, stem: str, verdicts: list[Verdict], slots: tuple[Slot, ...] = ()) -> Step:
        first, shape = verdicts[0], self.stems[stem]
        if first.form is None:
            raise RuntimeError(f"{stem} stays")
        linears = tuple([verdict.linear for verdict in verdicts])
        shared = self.groups[first.group] if first.group else _Shared.of(linears)
        return Step(
            first.action,
            first.reason,
            tuple([ref for linear in linears for ref in linear.refs]),
            self.dialect.outputs(stem, shape, first.form),
            shape,
            slots,
            group=shared.label,
            amax_of=shared.read,
            module=stem,
            form=first.form,
            linears=linears,
            measured=shared.linears,
            scalar=max(
                (self.inputs[linear.module] for linear in linears if linear.module in self.inputs),
                default=None,
            ),
        )


def fed_modules(verdicts: Mapping[str, Verdict], recipe: Recipe, dialect: Dialect) -> list[Fed]:
    """The modules with a static scale of activations beside their weights."""
    table, found = dialect.TRAITS.fp8, []
    for module, verdict in verdicts.items():
        form, linear = verdict.form, verdict.linear
        is_eight = form is not None and table is not None and table.has_input_scale(form)
        if form is not None and (form.has_input_scale or is_eight):
            own = f"{module}{table.input_scale}" if is_eight and table else ""
            has_own = any(
                ref.name == own and ref.dtype == "F32" and ref.elements == 1 for ref in linear.idle
            )
            found.append(
                Fed(module, linear.shape, form, scale_group(module, recipe.groups), has_own)
            )
    return found


def _label(group: ScaleGroup, members: Iterable[Linear]) -> str:
    """What a scale group is called: its parent, and those of its members that there are."""
    there = {linear.module.rpartition(".")[2] for linear in members}
    return str(group._replace(members=tuple(member for member in group.members if member in there)))


def _stack_rules(linears: Linears, recipe: Recipe) -> tuple[StackRule, ...]:
    """How the stacks that are taken apart were read, by the ends of their names; before that how those of an artifact were.

    By whole names where matrices that stand alone would be taken for others of them.
    """
    every = (linear.stack for linear in linears.of.values() if linear.stack)
    stacks = {stack.name: stack for stack in every if stack.dtype in FLOAT_TYPES}
    found = ((ref, recipe.stack_rule(name, ref.shape)) for name, ref in stacks.items())
    used = [
        (ref, rule if len(ref.shape) < STACK_DIMENSIONS else rule._replace(experts=None))
        for ref, rule in found
        if rule
    ]
    rules = tuple(
        dict.fromkeys(rule._replace(tensors=(ending_of(ref.name),)) for ref, rule in used)
    )
    alone = (
        module
        for module, linear in linears.of.items()
        if not linear.stack and not linear.coding.is_packed
    )
    if rules and are_stacked(alone, rules):
        rules = tuple(rule._replace(tensors=(ref.name,)) for ref, rule in used)
    artifacts = (linear.coding.artifact for linear in linears.of.values())
    artifact = next(filter(None, artifacts), None)
    return (*(rules_of(artifact, recipe) if artifact else ()), *rules)


def _folded(linear: Linear, ref: TensorRef, reason: str = "") -> Step:
    """A tensor that stays in its dtype, under the factors of folds."""
    told = (
        f"{reason}; folded" if reason else "folded: divided by what its readers are multiplied with"
    )
    return Step(
        "fold",
        told,
        linear.refs,
        (_as_it_is(ref),),
        linear.shape,
        amax_of=_read_by(linear),
        linears=(linear,),
    )


def _read_by(linear: Linear) -> tuple[TensorRef, ...]:
    """What its folds read."""
    return tuple(ref for folding in linear.coding.foldings for ref in folding.beside)


def _as_it_is(ref: TensorRef) -> TensorSpec:
    return TensorSpec(ref.name, ref.dtype, ref.shape)


def _why(ref: TensorRef, recipe: Recipe) -> tuple[Action, str]:
    """What becomes of a tensor that stands for no linear layer, and why."""
    if not ref.name.endswith(WEIGHT):
        return "copy", "not a linear layer's weight"
    if len(ref.shape) != MATRIX_DIMENSIONS:
        return "copy", f"{len(ref.shape)}-dimensional, not a matrix"
    if reason := recipe.reason_to_keep(module_of(ref.name)):
        return "copy", reason
    return "skip", f"{ref.dtype}, not one of {', '.join(FLOAT_TYPES)}"


def kept_modules(tasks: Iterable[Task]) -> list[str]:
    """Modules with a matrix or a stack that stays, and none that is four-bit."""
    kept: set[str] = set()
    made = {""}
    for task in tasks:
        for step in task.steps:
            if step.is_made:
                made.add(step.module)
                made.update([module_of(ref.name) for ref in step.outputs])
            else:
                kept.update(
                    module_of(ref.name)
                    for ref in step.outputs
                    if len(ref.shape) >= MATRIX_DIMENSIONS
                )
    return sorted(kept - made)


def _refuse_lookalikes(
    outputs: Mapping[str, TensorRef], dialect: Dialect, chosen: Collection[str]
) -> None:
    """InputError where readers would take a tensor that stays for a part of a four-bit module."""
    if others := sorted(set(dialect.find(outputs)) - set(chosen)):
        detail = f"{others[0]} stays, and its tensors have the names and types of four-bit ones in this dialect"
        raise InputError("name-collision", detail, "Choose another --dialect.", others[0])


def refuse_other_container(checkpoint: Checkpoint, dialect: Dialect, name: str) -> None:
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


def notes_on(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a person should know of a source, whatever becomes of it."""
    omitted = checkpoint.unindexed
    index = (
        [
            f"{len(omitted)} tensors are not in the index, the first {omitted[0]!r}; they are taken all the same"
        ]
        if omitted
        else []
    )
    return (*index, *_left_out(checkpoint), *_custom_code(checkpoint))


def _left_out(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.left_out:
        return []
    first = checkpoint.left_out[0]
    return [
        f"{len(checkpoint.left_out)} files hold weights in another form and are left out, the first {first!r}"
    ]


def _stacks(checkpoint: Checkpoint, consumed: Collection[str]) -> list[str]:
    stacks = [
        ref.name
        for ref in checkpoint.tensors
        if len(ref.shape) == STACK_DIMENSIONS and ref.dtype in FLOAT_TYPES
    ]
    experts = [
        name
        for name in stacks
        if (is_expert_stack(name, (0,) * STACK_DIMENSIONS) or GGUF_STACK in name)
    ]
    experts = [name for name in experts if name not in consumed]
    if not experts:
        return []
    return [f"{len(experts)} stacks of expert matrices stay as they are, the first {experts[0]!r}"]


def _custom_code(checkpoint: Checkpoint) -> list[str]:
    programs = [file for file in checkpoint.sidecars if file.endswith(".py")]
    if not programs and "auto_map" not in checkpoint.config:
        return []
    return [
        f"the model has custom code ({', '.join(programs) or 'elsewhere'}): copied, never run; engines will ask to trust it"
    ]


def _names_of(checkpoint: Checkpoint, linears: Linears) -> set[str]:
    """What a pattern may name: modules, those in stacks, and the stacks."""
    stacks = {
        linear.stack.name.removesuffix(WEIGHT) for linear in linears.of.values() if linear.stack
    }
    return {*linears.of, *stacks, *(module_of(ref.name) for ref in checkpoint.tensors)}


def _unmatched(recipe: Recipe, modules: Collection[str]) -> list[str]:
    of_formats = tuple(pattern for rule in recipe.formats for pattern in rule.patterns)
    return [
        f"{option} {pattern!r} matches no module; a module's name is its tensor's without .weight"
        for option, patterns in (
            ("--include", recipe.include),
            ("--exclude", recipe.exclude),
            ("[[format]]", of_formats),
        )
        for pattern in patterns
        if pattern not in modules and not any(matches(pattern, module) for module in modules)
    ]


def _left_behind(linears: Linears, cache: Cache) -> list[str]:
    """What only the engine of a packed source has a use for."""
    idle = [
        ref.name
        for linear in linears.of.values()
        for ref in linear.idle
        if "input" in ref.name or "activation" in ref.name
    ]
    caches = [ref.name for ref in linears.idle if ref.name not in cache.own]
    return [
        f"{len(names)} {what} of the source are left out, the first {names[0]!r}: they belong to how it was quantized"
        for what, names in (
            ("scales of activations", idle),
            ("scales of a cache of keys and values", caches),
        )
        if names
    ]


def _not_via(verdicts: Mapping[str, Verdict], recipe: Recipe) -> Iterator[str]:
    """What --via fp8 does not change."""
    if recipe.target.via:
        made = [verdict for verdict in verdicts.values() if verdict.is_made]
        if same := [
            one for one in made if one.action != "quantize" or one.linear.coding.format is FP8
        ]:
            first = same[0].linear.name
            yield f"--via fp8 changes nothing for {len(same)} modules that are FP8 or in four bits already, the first {first}"


def _embeddings(asked: Iterable[str], recipe: Recipe) -> Iterator[str]:
    for module in asked:
        if recipe.kind_of(module) == "embedding":
            yield f"{module} is an embedding, which no engine of dialect {recipe.target.dialect} reads in four bits"


def _no_config(checkpoint: Checkpoint, dialect: Dialect) -> Iterator[str]:
    if not checkpoint.config and dialect.TRAITS.container == "safetensors":
        yield "the source has no config.json, or an empty one; the one written holds the quantization record alone"
