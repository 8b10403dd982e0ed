"""Give every output of a plan its name, its shard and its offset.

Nothing is read and nothing is decided here; no format, dialect or method has a name here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.forms import Form, Group, group_modules
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.errors import Finding, InputError
from fp4convert.planning.steps import Draft, Shard, Step, Task
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.rules import FoldUse, StackRule
from fp4convert.storage.safetensors import Header, TensorRef, total_nbytes
from fp4convert.storage.source import Checkpoint, Source

if TYPE_CHECKING:
    from fp4convert.checkpoint.adapters.peft import Adapter


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
    faults       what `inspect` will find in the result, because the source has it
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
    faults: tuple[Finding, ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        return chain.from_iterable(task.steps for task in self.tasks)

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
