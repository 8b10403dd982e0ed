"""How long a conversion takes, by formulas alone: from what a byte, a weight, a tensor and a shard cost, and from a machine.

A shard is filled by as many threads as there are cores, a scale group by one of them, and on Linux the disk flushes what there is
of it.  Then one thread hashes it, and meanwhile the next shard is filled (output.write_shards, ShardWriter).

  fill(k)    the longest of: scale groups dealt to cores, largest first, and what Python does for each tensor, one after the
             other; bytes of the source over the link; of a streamed source its SHA-256, which is one thread's; bytes written,
             and read where the source lies there, over the disk
  finish(k)  the SHA-256 of the shard, and what a shard costs beside
  seconds  = start + planning + fill(1) + sum of step(k) + finish(n)
  step(k)    the longest of: fill(k), finish(k - 1), both their core seconds over all cores
  merge    = start + all that was written, read again at the rate of the disk or hashed by all cores, whichever takes longer;
             no more than that: what the merging machine wrote itself it does not read again

On several machines each plans the whole and does every n-th shard; the slowest counts, and the merge comes after it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fp4convert.tasks import Plan, Step, Task

COMPUTED = ("quantize", "dequantize", "transcode")  # actions whose weights pass through the arithmetic


class Group(NamedTuple):
    """What one thread does in one go: a scale group, or a tensor that is copied.

    weights  that are calculated with, by the dtype that they are stored in
    """

    source_nbytes: int
    output_nbytes: int
    weights: Mapping[str, int]


class Shard(NamedTuple):
    """A task: so many tensors, in these groups."""

    tensors: int
    groups: tuple[Group, ...]

    @property
    def source_nbytes(self) -> int:
        return sum(group.source_nbytes for group in self.groups)

    @property
    def output_nbytes(self) -> int:
        return sum(group.output_nbytes for group in self.groups)


class Costs(NamedTuple):
    """Seconds of one core, unless another is named.

    start     of a process that has next to nothing to do
    planning  a tensor
    tensor    all else that Python does for a tensor, one at a time
    shard     a shard: names, claims, records
    rounding  a weight, by the dtype that it is stored in: measured, rounded, compared
    reading   a byte of the source that is in memory
    writing   a byte of the result, into memory
    hashing   a byte
    """

    start: float
    planning: float
    tensor: float
    shard: float
    rounding: Mapping[str, float]
    reading: float
    writing: float
    hashing: float


class Machine(NamedTuple):
    """What converts.

    disk         bytes a second, of what is flushed, and of a source on the same disk
    link         bytes a second of a source from elsewhere; None where it lies on the disk
    is_streamed  the source is hashed as it comes: it is on a Hub
    """

    cores: int
    disk: float
    link: float | None = None
    is_streamed: bool = False


class Times(NamedTuple):
    """Seconds of a conversion: of the part that takes longest, and of the merge of several."""

    part: float
    merge: float
    bound: str

    @property
    def whole(self) -> float:
        return self.part + self.merge


def shards_of(plan: Plan) -> list[Shard]:
    """The tasks of a plan of fp4convert."""
    return [_shard_of(task) for task in plan.tasks]


def _shard_of(task: Task) -> Shard:
    gathered: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        gathered[step.group or step.outputs[0].name].append(step)
    return Shard(len(task.steps), tuple(_group_of(steps) for steps in gathered.values()))


def _group_of(steps: list[Step]) -> Group:
    weights: Counter[str] = Counter()
    for step in steps:
        if step.action in COMPUTED and step.refs:
            weights[step.refs[0].dtype] += math.prod(step.shape)
    return Group(sum(step.source_bytes for step in steps), sum(step.output_bytes for step in steps), weights)


def conversion(shards: Sequence[Shard], costs: Costs, machine: Machine, machines: int = 1) -> Times:
    """The seconds of a whole conversion, and what the part that takes longest waits for most."""
    planning = costs.planning * sum(shard.tensors for shard in shards)
    parts = [_work(shards[first::machines], costs, machine) for first in range(min(machines, len(shards)))]
    seconds, bounds = max(parts, key=lambda part: part[0])
    fixed = costs.start + planning
    bounds["start and plan"] += fixed
    written = sum(shard.output_nbytes for shard in shards)
    merge = costs.start + max(written / machine.disk, written * costs.hashing / machine.cores) if machines > 1 else 0.0
    return Times(fixed + seconds, merge, bounds.most_common(1)[0][0])


def _work(shards: Sequence[Shard], costs: Costs, machine: Machine) -> tuple[float, Counter[str]]:
    """Seconds of these shards one after the other, and by what they are spent."""
    bounds: Counter[str] = Counter()
    previous: Shard | None = None
    for shard in (*shards, None):
        reason, seconds = max(_step(shard, previous, costs, machine).items(), key=lambda item: item[1])
        bounds[reason] += seconds
        previous = shard
    return sum(bounds.values()), bounds


def _step(filled: Shard | None, finished: Shard | None, costs: Costs, machine: Machine) -> dict[str, float]:
    """Seconds of everything that goes on while one shard is filled and the one before it is finished; the longest counts."""
    core_seconds = 0.0
    times = {"cores": 0.0, "link": 0.0, "disk": 0.0, "sha-256": 0.0}
    if filled:
        python, own = filled.tensors * costs.tensor, [_core_seconds(group, costs) for group in filled.groups]
        hashing = filled.source_nbytes * costs.hashing if machine.is_streamed else 0.0
        core_seconds += sum(own) + hashing + python
        times["cores"] = python + makespan(own, machine.cores)
        times["sha-256"] = hashing
        times["disk"] = (filled.output_nbytes + (filled.source_nbytes if machine.link is None else 0)) / machine.disk
        if machine.link is not None:
            times["link"] = filled.source_nbytes / machine.link
    if finished:
        hashing = finished.output_nbytes * costs.hashing
        core_seconds += hashing + costs.shard
        times["sha-256"] = max(times["sha-256"], hashing + costs.shard)
    times["cores"] = max(times["cores"], core_seconds / machine.cores)
    return times


def _core_seconds(group: Group, costs: Costs) -> float:
    rounded = sum(weights * costs.rounding[dtype] for dtype, weights in group.weights.items())
    return rounded + group.source_nbytes * costs.reading + group.output_nbytes * costs.writing


def makespan(pieces: Sequence[float], cores: int) -> float:
    """When the last core is done, where the largest piece left goes to whoever is free."""
    ends = [0.0] * cores
    for piece in sorted(pieces, reverse=True):
        heapq.heapreplace(ends, ends[0] + piece)
    return max(ends)
