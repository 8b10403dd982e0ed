"""What a plan is made of: Step, Task, Shard, Plan.

A step says what becomes of a tensor; laid out beside the others of its shard it says where, and
nothing is left to decide.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple

from fp4convert.checkpoint.adapters.peft import Adapter
from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.forms import Form, Group, group_modules
from fp4convert.checkpoint.dialects.stacks import Slot
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.rules import FoldUse, StackRule
from fp4convert.storage.safetensors import Frame, Header, TensorRef, TensorSpec, total_nbytes
from fp4convert.storage.source import Checkpoint, Source

Action = Literal[
    "quantize",
    "dequantize",
    "transcode",
    "fold",
    "merge",
    "reorder",
    "prune",
    "copy",
    "skip",
    "write",
]


class Step(NamedTuple):
    """What one tensor (or the tensors of one four-bit module) becomes.

    action   copy: stays by the recipe; skip: a linear layer that cannot be quantized, and stays as
             it is; fold: it keeps its dtype, multiplied or divided by the factors of a fold;
             merge: it keeps its dtype, and an adapter changes it; reorder: a bias, put into the
             order of tiles or out of it; prune: parts of it stay; write: a scalar
    refs     what is read; of a linear layer all that it is decoded from; nothing for a scalar
    specs    what is written, while it has no place; () in a plan
    shape    (rows, columns) of the matrix, longer for a stack; () where it stays
    slots    whose rows the result holds, where that is no single module
    group    name of the scale group, or None
    amax_of  what is read beside for the scales: every tensor of the scale group, in whichever
             shard, and one of every file that factors of folds are found in
    module   what its outputs are named after: a module, or a stem of the dialect that holds
             several; where it is "" before the step has a place, that of its first output
    form     that its module has in the result; None where that is an ordinary tensor
    linears  whose values the result holds, in the order of the slots; none for a copied tensor
    measured every member of the scale group (or the linear layer alone), in whichever shard; the
             common amax sets the global scale, and tells whether all of them are finite
    scalar   a float32 that no tensor of the source holds: the input scale of its module, or what
             is written
    amaxes   of the linears, where their global scales are given and not measured
    is_transposed  each matrix of a stack is stored as (columns, rows)
    outputs  where the result goes; all in the step's own shard; () before the step has a place
    """

    action: Action
    reason: str
    refs: tuple[TensorRef, ...]
    specs: tuple[TensorSpec, ...]
    shape: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    group: str | None = None
    amax_of: tuple[TensorRef, ...] = ()
    module: str = ""
    form: Form | None = None
    linears: tuple[Linear, ...] = ()
    measured: tuple[Linear, ...] = ()
    scalar: float | None = None
    amaxes: tuple[float, ...] = ()
    is_transposed: bool = False
    outputs: tuple[TensorRef, ...] = ()

    @property
    def name(self) -> str:
        """Name it as a person looks for it.

        By its tensor, or by the module where the tensor holds others too.
        """
        return (
            self.linears[0].name if len(self.linears) == 1 else (*self.refs, *self.outputs)[0].name
        )

    @property
    def source_bytes(self) -> int:
        return sum([linear.nbytes for linear in self.linears]) or total_nbytes(self.refs)

    @property
    def output_bytes(self) -> int:
        return total_nbytes(self.outputs)

    @property
    def is_made(self) -> bool:
        """Tell whether the result is no ordinary tensor."""
        return self.form is not None

    @property
    def format(self) -> str:
        """Name the format in the result; "" for an ordinary tensor."""
        return self.form.format.name if self.form else ""


class Shard(NamedTuple):
    """A file to be written: its size, its tensors, and what makes its header.

    notes  what engines want to read in the file itself
    """

    file: str
    nbytes: int
    outputs: tuple[TensorRef, ...]
    frame: Frame
    notes: dict[str, str]

    @property
    def header(self) -> bytes:
        """Make the bytes before the tensors: all of them would fill a plan."""
        specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for ref in self.outputs]
        return self.frame.lay_out(self.file, specs, self.notes)[0]


@dataclass(frozen=True)
class Task:
    """One input shard becomes an output shard of the same name.

    And a second where scales stand apart; no task needs another.
    sources  the shards that are read
    promise  what the bytes depend on beside shards and steps: target, and what changes when a
             shard that is read may have
    """

    sources: tuple[str, ...]
    shards: tuple[Shard, ...]
    steps: tuple[Step, ...]
    promise: tuple[object, ...]

    @cached_property
    def key(self) -> str:
        """Return a hash; equal keys promise equal output bytes."""
        promise = [*self.promise, [*_describe(self.steps)]]
        key = hashlib.sha256(json.dumps(promise, check_circular=False).encode())
        for shard in self.shards:
            header = shard.header
            key.update(json.dumps([shard.file, shard.nbytes, len(header)]).encode() + header)
        return key.hexdigest()

    @property
    def files(self) -> dict[str, int]:
        """Return the sizes of the files that are written."""
        return {shard.file: shard.nbytes for shard in self.shards}

    @property
    def source_bytes(self) -> int:
        """Count the bytes of the tensors that are read."""
        return sum(step.source_bytes for step in self.steps)

    @property
    def home(self) -> str | None:
        """Name the source's shard that becomes this one, if one does."""
        return next((ref.file for step in self.steps for ref in step.refs), None)

    @property
    def by_home(self) -> dict[str | None, list[Step]]:
        """Sort the steps by the shard that they read first.

        Members of a scale group stay together.
        """
        homes: dict[str, str] = {}  # of groups
        found: dict[str | None, list[Step]] = {}
        for step in self.steps:
            file = step.refs[0].file if step.refs else self.home
            if file and step.group:
                file = homes.setdefault(step.group, file)
            found.setdefault(file, []).append(step)
        return found

    @property
    def borrowed(self) -> set[str]:
        """Name the other shards whose bytes go into this one.

        Not those of members of scale groups: all that has them must measure the same.
        """
        files = {ref.file for step in self.steps for ref in step.refs}
        for step in self.steps:
            if step.amax_of:
                measured = {ref for linear in step.measured for ref in linear.refs}
                files |= {ref.file for ref in step.amax_of if ref not in measured}
        return files - {str(self.home)}

    @property
    def outputs(self) -> list[TensorRef]:
        """List the tensors of the output shards."""
        return [ref for shard in self.shards for ref in shard.outputs]


class Idle(NamedTuple):
    """A request that changes nothing.

    asked   the option with its value
    why     it changes nothing, after those words
    better  options to give instead, as one types them; "" where nothing is alike
    modules how many modules these match
    is_pattern  on names of modules; else it is for what the source lacks
    """

    asked: str
    why: str
    better: str = ""
    modules: int = 0
    is_pattern: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Every task, and what the result's records need to know.

    stacks       how the source's stacks of experts were read
    folds        where factors are folded in
    idle         requests that change nothing
    excluded     how many linear layers --exclude keeps
    calibration  path of the file of statistics, whose sha256 the target has
    adapter      that was merged, whose hash the target has
    goal         what formats of modules were chosen for, as our record says it
    left_out     tensors of the source that are in no output, and why
    options      those that the bytes depend on, as our record says them
    scale_sources  artifacts that input scales and global scales were taken of
    """

    target: Target
    tasks: tuple[Task, ...]
    ignored: Ignored
    warnings: tuple[str, ...]
    stacks: tuple[StackRule, ...] = ()
    calibration: str | None = None
    folds: tuple[FoldUse, ...] = ()
    idle: tuple[Idle, ...] = ()
    excluded: int = 0
    adapter: Adapter | None = None
    goal: Mapping[str, object] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] | None = None
    scale_sources: tuple[Source, ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        return (step for task in self.tasks for step in task.steps)

    @property
    def source_bytes(self) -> int:
        """Count the bytes of the tensors that are read."""
        return sum(step.source_bytes for step in self.steps)

    @property
    def output_bytes(self) -> int:
        """Count the bytes of the shards that are written, with headers."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def shards(self) -> list[Shard]:
        """List every file that is written."""
        return [shard for task in self.tasks for shard in task.shards]

    @property
    def quantized(self) -> list[str]:
        """List modules that are quantized in the result, or their stacks."""
        return [step.module for step in self.steps if step.is_made]

    @property
    def formats(self) -> set[str]:
        """Return the formats that modules have in the result."""
        return {step.format for step in self.steps} - {""}

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return these modules by their form.

        Where there are none, one group without modules.
        """
        made = ((step.module, step.form) for step in self.steps if step.form is not None)
        return group_modules(made) or (Group(form_of(self.target), ()),)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return their shapes."""
        return {step.module: step.shape for step in self.steps if step.is_made}

    @property
    def bits_per_weight(self) -> float | None:
        """Count the bits of a quantized weight, with scales; None without any."""
        return bits_per_weight_of((step, step.output_bytes) for step in self.steps)

    @property
    def index(self) -> dict[str, object]:
        """Return the model.safetensors.index.json of the output."""
        outputs = [ref for task in self.tasks for ref in task.outputs]
        weight_map = {ref.name: ref.file for ref in sorted(outputs, key=attrgetter("name"))}
        return {"metadata": {"total_size": total_nbytes(outputs)}, "weight_map": weight_map}


def bits_per_weight_of(sized: Iterable[tuple[Step, int]]) -> float | None:
    """Count the bits per weight of what is quantized, with its scales.

    sized    steps with their bytes
    Returns  None where nothing is quantized
    """
    made = [(step.shape, nbytes) for step, nbytes in sized if step.is_made]
    weights = sum(math.prod(shape) for shape, _ in made)
    return 8 * sum(nbytes for _, nbytes in made) / weights if weights else None


class Writing(NamedTuple):
    """What is written, and how; ordinary weights have no dialect."""

    checkpoint: Checkpoint
    target: Target
    dialect: Dialect | None = None
    form: Form | None = None

    def task(self, shard: Header, made: Iterable[Step]) -> Task:
        """Lay the steps of one shard out, each output at its place."""
        named = [
            step if step.module else step._replace(module=module_of(step.specs[0].name))
            for step in made
        ]
        shards = tuple(self._shards(shard, named))
        place = {ref.name: ref for written in shards for ref in written.outputs}
        # As _replace puts outputs for specs, in a third of the time.
        steps = tuple(
            [
                Step._make(
                    (*step[:3], (), *step[4:-1], tuple([place[spec.name] for spec in step.specs]))
                )
                for step in named
            ]
        )
        read = {ref.file for step in steps for refs in (step.refs, step.amax_of) for ref in refs}
        sources = sorted({shard.file, *read})
        stamps = [self.checkpoint.stamps[file] for file in sources]
        return Task(tuple(sources), shards, steps, (repr(self.target), stamps))

    def _shards(self, shard: Header, steps: list[Step]) -> Iterator[Shard]:
        """Lay out the file of that name, and one for scales where they go apart."""
        notes = {}
        if self.dialect:
            notes = self.dialect.notes({step.module: step.form for step in steps if step.form})
        specs = [spec for step in steps for spec in step.specs]
        stem = shard.file.removeprefix("model")
        beside = f"scales{stem}" if stem != shard.file else f"scales-{stem}"
        for file, chosen in (
            (shard.file, [spec for spec in specs if not spec.is_apart]),
            (beside, [spec for spec in specs if spec.is_apart]),
        ):
            if chosen or file == shard.file:
                header, placed = shard.frame.lay_out(file, chosen, notes)
                end = placed[-1].start + placed[-1].nbytes if placed else len(header)
                nbytes = -(-end // shard.frame.alignment) * shard.frame.alignment
                yield Shard(file, nbytes, placed, shard.frame, notes)


def refuse_collisions(tasks: Iterable[Task]) -> dict[str, TensorRef]:
    """Collect every output by its name.

    Raises InputError where two have the same, or two shards.
    """
    tasks, found, files = tuple(tasks), dict[str, TensorRef](), set[str]()
    for task in tasks:
        for shard in task.shards:
            if shard.file in files:
                detail = (
                    f"two shards of the result would be {shard.file}; expected names that do not"
                    " collide"
                )
                raise InputError("name-collision", detail, "Rename the shard of that name.")
            files.add(shard.file)
    outputs = [ref for task in tasks for step in task.steps for ref in step.outputs]
    every = {ref.name: ref for ref in outputs}
    if len(every) == len(outputs):
        return every
    for task in tasks:
        for step in task.steps:
            for ref in step.outputs:
                if ref.name in found:
                    detail = (
                        f"{ref.file}: the output {ref.name!r} already exists; expected names that"
                        " do not collide"
                    )
                    raise InputError(
                        "name-collision",
                        detail,
                        f"Leave one out: {exclude_option(step.module)}",
                        ref.name,
                    )
                found[ref.name] = ref
    return found


def _describe(steps: Iterable[Step]) -> Iterator[list[object]]:
    """List what steps say of their bytes beside the header, for JSON."""
    spelled: dict[int, str] = {}  # codings, of which most are one object
    for step in steps:
        described: list[object] = [
            step.module,
            step.action,
            step.shape,
            step.slots,
            step.refs,
            step.amax_of,
            step.scalar,
        ]
        if step.amaxes:
            described.append(["amaxes", *step.amaxes])
        if step.is_transposed:  # shapes do not tell it of square matrices
            described.append("transposed")
        if step.linears:
            described.append(step.form.word if step.form else "")
        for linear in step.linears:  # what makes its values out of its bytes
            coding = linear.coding
            if id(coding) not in spelled:
                spelled[id(coding)] = repr(coding)
            described.append([linear.module, linear.shape, spelled[id(coding)]])
        yield described


def spec_of(ref: TensorRef) -> TensorSpec:
    """Return what writes a tensor as it is."""
    return TensorSpec(ref.name, ref.dtype, ref.shape)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
