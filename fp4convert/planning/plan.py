"""Place what makers write: every output gets its name, its shard and its offset.

Nothing is read and nothing is decided here; no format, dialect or method has a name here.
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
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.makers.maker import Maker
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
    """What becomes of one tensor, or of the tensors of one module: a line of the plan.

    action   copy: stays by the recipe; skip: a linear layer that cannot be quantized, and stays as
             it is; fold: it keeps its dtype, multiplied or divided by the factors of a fold;
             merge: it keeps its dtype, and an adapter changes it; reorder: a bias, put into the
             order of tiles or out of it; prune: parts of it stay; write: a scalar
    module   names the outputs: a module, or a stem of the dialect that holds several
    maker    makes the bytes; members of a scale group in one shard share it
    refs     the tensors that the values come from; none for a scalar
    shape    (rows, columns) of the matrix, longer for a stack; () where it stays
    form     of the module in the result; None for an ordinary tensor
    group    name of the scale group, or None
    linears  the linear layers whose values the result holds; none for a copied tensor
    outputs  places of the result; all in the shard of the step
    """

    action: Action
    reason: str
    module: str
    maker: Maker
    refs: tuple[TensorRef, ...]
    shape: tuple[int, ...] = ()
    form: Form | None = None
    group: str | None = None
    linears: tuple[Linear, ...] = ()
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


class Draft(NamedTuple):
    """A step without a place, and the tensors that it is to write.

    scalar  a float32 that no tensor of the source holds: an input scale, or a scale of a cache
    amaxes  of its linear layers, where their global scales are given
    """

    step: Step
    specs: tuple[TensorSpec, ...]
    scalar: float | None = None
    amaxes: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.step.name if self.step.linears or self.step.refs else self.specs[0].name


class Work(NamedTuple):
    """A maker, and the steps that it makes."""

    maker: Maker
    steps: list[Step]


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
        key = hashlib.sha256(repr(self.promise).encode())
        for work in self.works:
            key.update(repr(work.maker).encode())
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
    def works(self) -> list[Work]:
        """List the makers, each with its steps."""
        found: dict[int, Work] = {}
        for step in self.steps:
            found.setdefault(id(step.maker), Work(step.maker, [])).steps.append(step)
        return list(found.values())

    @property
    def by_home(self) -> dict[str | None, list[Work]]:
        """Sort the makers by the shard that they read first."""
        found: dict[str | None, list[Work]] = {}
        for work in self.works:
            refs = work.steps[0].refs
            found.setdefault(refs[0].file if refs else self.home, []).append(work)
        return found

    @property
    def borrowed(self) -> set[str]:
        """Name the other shards whose bytes go into this one.

        Not those that are read for scales alone: all that have members of a scale group must find
        the same.
        """
        files = {ref.file for work in self.works for ref in work.maker.reads}
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
    scalars      float32 numbers that no tensor of the source holds, by the name of their step
    amaxes       given ones, by the name of their step
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
    scalars: tuple[tuple[str, float], ...] = ()
    amaxes: tuple[tuple[str, tuple[float, ...]], ...] = ()

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

    def task(self, shard: Header, drafts: Iterable[Draft]) -> Task:
        """Lay the drafts of one shard out, each output at its place."""
        drafts = list(drafts)
        shards = tuple(self._shards(shard, drafts))
        place = {ref.name: ref for written in shards for ref in written.outputs}
        steps = tuple(
            [
                Step(*step[:-1], tuple([place[spec.name] for spec in specs]))
                for step, specs, _, _ in drafts
            ]
        )
        read = {shard.file}
        for work in Task((), (), steps, ()).works:
            read.update(
                [ref.file for refs in (work.maker.reads, work.maker.measures) for ref in refs]
            )
        stamps = [self.checkpoint.stamps[file] for file in sorted(read)]
        return Task(tuple(sorted(read)), shards, steps, (self.target, stamps))

    def _shards(self, shard: Header, drafts: list[Draft]) -> Iterator[Shard]:
        """Lay out the file of that name, and one for scales where they go apart."""
        notes = {}
        if self.dialect:
            steps = [draft.step for draft in drafts]
            notes = self.dialect.notes({step.module: step.form for step in steps if step.form})
        specs = [spec for draft in drafts for spec in draft.specs]
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


def spec_of(ref: TensorRef) -> TensorSpec:
    """Return what writes a tensor as it is."""
    return TensorSpec(ref.name, ref.dtype, ref.shape)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
