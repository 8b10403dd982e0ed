"""Give every output of a plan its name, its shard and its offset.

Nothing is read and nothing is decided here; no format, dialect or method has a name here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from fp4convert.checkpoint.dialects.base import Dialect, Ignored
from fp4convert.checkpoint.dialects.forms import Group, group_modules
from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.missing_parts import Judgement
from fp4convert.errors import InputError
from fp4convert.planning.steps import Draft, Shard, Step, Task, by_maker
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.rules import FoldUse, StackRule
from fp4convert.storage.safetensors import Header, TensorRef, total_nbytes
from fp4convert.storage.source import Checkpoint, Source

if TYPE_CHECKING:
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.checkpoint.encodings.base import Base


class Idle(NamedTuple):
    """A request that changes nothing.

    asked   the option with its value
    why     the reason, a predicate whose subject is `asked`
    better  options to type instead; "" where none is close
    modules number of modules that these match
    is_pattern  a pattern on names of modules; else an option for something that the source lacks
    """

    asked: str
    why: str
    better: str = ""
    modules: int = 0
    is_pattern: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """All tasks, and facts for the records of the result.

    stacks       rules by which stacks of experts were read
    folds        modules that factors are folded into
    idle         requests that change nothing
    excluded     number of linear layers that --exclude keeps
    calibration  path of the file of statistics, whose sha256 the target has
    adapter      the merged adapter, whose hash the target has
    base         the checkpoint that modules in eight bits come from
    goal         purpose of the formats of modules, as our record words it
    left_out     tensor of the source without an output -> the reason
    scalars      float32 numbers that no tensor of the source holds, by the name of their step
    amaxes       given by a file, by the name of their step
    options      options that the bytes depend on, as our record words them
    judged       what names and sizes say of the source
    scale_sources  artifacts with the input scales and global scales
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
    base: Base | None = None
    goal: Mapping[str, object] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] | None = None
    scale_sources: tuple[Source, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    amaxes: tuple[tuple[str, tuple[float, ...]], ...] = ()
    judged: Judgement = field(default_factory=Judgement)

    @property
    def steps(self) -> list[Step]:
        return [step for task in self.tasks for step in task.steps]

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
        """List the files of weights."""
        return [shard for task in self.tasks for shard in task.shards]

    @property
    def quantized(self) -> list[str]:
        """List the quantized modules of the result, or their stacks."""
        return [step.module for step in self.steps if step.is_made]

    @property
    def formats(self) -> set[str]:
        """Return the formats that modules have in the result."""
        return {step.format for step in self.steps} - {""}

    @property
    def groups(self) -> tuple[Group, ...]:
        """Group the quantized modules by form; one empty group without any."""
        made = ((step.module, step.form) for step in self.steps if step.form is not None)
        return group_modules(made) or (Group(form_of(self.target), ()),)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the quantized modules."""
        return {step.module: step.shape for step in self.steps if step.is_made}

    @property
    def bits_per_weight(self) -> float | None:
        """Count the bits of a quantized weight, with its scales; None without any."""
        return bits_per_weight_of((step, step.output_bytes) for step in self.steps)

    @property
    def index(self) -> dict[str, object]:
        """Return the model.safetensors.index.json of the output."""
        outputs = [ref for task in self.tasks for ref in task.outputs]
        weight_map = {ref.name: ref.file for ref in sorted(outputs, key=attrgetter("name"))}
        return {"metadata": {"total_size": total_nbytes(outputs)}, "weight_map": weight_map}


def bits_per_weight_of(sized: Iterable[tuple[Step, int]]) -> float | None:
    """Count the bits of a quantized weight, with its scales.

    sized    steps with the bytes of their outputs
    Returns  None without a quantized weight
    """
    made = [(step.shape, nbytes) for step, nbytes in sized if step.is_made]
    weights = sum(math.prod(shape) for shape, _ in made)
    return 8 * sum(nbytes for _, nbytes in made) / weights if weights else None


class Writing(NamedTuple):
    """Lays out tasks of a checkpoint; ordinary weights have no dialect."""

    checkpoint: Checkpoint
    target: Target
    dialect: Dialect | None = None

    def task(self, shard: Header, drafts: Iterable[Draft]) -> Task:
        """Give each output of a shard's drafts its place."""
        drafts = list(drafts)
        shards = tuple(self._shards(shard, drafts))
        place = {ref.name: ref for written in shards for ref in written.outputs}
        steps = tuple(
            [
                draft.step._replace(outputs=tuple([place[spec.name] for spec in draft.specs]))
                for draft in drafts
            ]
        )
        read = {shard.file}
        for maker, _ in by_maker(steps):
            read.update([ref.file for ref in (*maker.reads, *maker.measures)])
        stamps = [self.checkpoint.stamps[file] for file in sorted(read)]
        return Task(tuple(sorted(read)), shards, steps, (self.target, stamps))

    def _shards(self, shard: Header, drafts: list[Draft]) -> Iterator[Shard]:
        """Lay out a file of the same name, and one for scales that stand apart."""
        notes = {}
        if self.dialect:
            steps = [draft.step for draft in drafts]
            notes = self.dialect.notes({step.module: step.form for step in steps if step.form})
        specs = [spec for draft in drafts for spec in draft.specs]
        stem = shard.file.removeprefix("model")
        beside = f"scales{stem}" if stem != shard.file else f"scales-{stem}"
        here, apart = ([one for one in specs if one.is_apart == is_one] for is_one in (False, True))
        for file, chosen in ((shard.frame.name_for(shard.file, here), here), (beside, apart)):
            if chosen or chosen is here:
                header, placed = shard.frame.lay_out(file, chosen, notes)
                end = placed[-1].start + placed[-1].nbytes if placed else len(header)
                nbytes = -(-end // shard.frame.alignment) * shard.frame.alignment
                yield Shard(file, nbytes, placed, shard.frame, notes)


def refuse_collisions(tasks: Iterable[Task]) -> dict[str, TensorRef]:
    """Return every output by its name.

    Raises  InputError where two outputs, or two shards, have the same name
    """
    tasks = tuple(tasks)
    files = Counter(shard.file for task in tasks for shard in task.shards)
    file, count = next(iter(files.most_common(1)), ("", 0))
    if count > 1:
        detail = f"two shards of the result would be {file}; expected names that do not collide"
        raise InputError("name-collision", detail, "Rename the shard of that name.")
    outputs: dict[str, TensorRef] = {}
    for step in [step for task in tasks for step in task.steps]:
        for ref in step.outputs:
            if ref.name in outputs:
                detail = f"{ref.file}: the output {ref.name!r} already exists"
                detail += "; expected names that do not collide"
                next_step = f"Leave one out: {exclude_option(step.module)}"
                raise InputError("name-collision", detail, next_step, ref.name)
            outputs[ref.name] = ref
    return outputs
