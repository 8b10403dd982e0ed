"""How a process works, and its result: Settings, Share, Result.

A Share is the part of a conversion that one process does, where parts are dealt out beforehand: by options, or by what launched
it.  Parts need no network, no shared clock and not even a shared folder: each writes its own shards, and `merge` ends the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from fp4convert.errors import InputError, NumericError
from fp4convert.progress import Phases

OnNamed = Callable[[Path, str, str], None]


class UnsoundShardError(Exception):
    """A shard that cannot be finished, because of these tensors."""

    def __init__(self, errors: list[NumericError]) -> None:
        super().__init__()
        self.errors = errors


T = TypeVar("T")

# (number of this process, how many there are, first number, step); "" where the launcher does not say, or where it may have
# launched other work: only --num-shards tells that a job array, or an Indexed Job of Kubernetes, shares one conversion
LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ""),  # srun; in a batch script itself the second is not set
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "", ""),
    ("RANK", "WORLD_SIZE", "", ""),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
    ("JOB_COMPLETION_INDEX", "", "", ""),
)


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` parts: the tasks number index, index + count, and so on, counted from 0.

    named_by  the variables it was taken from; "" where options gave it
    """

    index: int
    count: int
    named_by: str = ""

    def of(self, tasks: Sequence[T]) -> Sequence[T]:
        """The tasks of this part."""
        return tasks[self.index :: self.count]


def choose_share(is_joining: bool, index: int | None, count: int | None, environment: Mapping[str, str]) -> Share | None:
    """find_share, but for processes that join: those take whatever task is free.  InputError for both at once."""
    if is_joining and (index, count) != (None, None):
        raise InputError(
            "share", "--join and --ray take tasks as they come, --shard-index and --num-shards deal them out; expected one way"
        )
    return None if is_joining else find_share(index, count, environment)


def describe(share: Share) -> str:
    """What a person should know of a part, and of the rest."""
    whence = f", as {share.named_by} say (--num-shards 1 for the whole)" if share.named_by else ""
    return f"this process does part {share.index} of {share.count}{whence}; when every part is done: fp4convert merge"


def find_share(index: int | None, count: int | None, environment: Mapping[str, str]) -> Share | None:
    """The part that options ask for, else the one that the launcher of several processes says; None for the whole.

    Raises InputError for a part that cannot be, or where only half of it is known
    """
    named_by = ""
    if count != 1 and None in (index, count):
        launched, total, names = _find_launched(environment, count)
        if index is None and launched is not None:
            index, named_by = launched, names
        if count is None and total is not None:
            count, named_by = total, names
        if count is None and (index is None or named_by):
            return None  # nobody asked for parts
    if count == 1 and index in (None, 0):
        return None
    if index is None or count is None:
        detail = f"--shard-index {_said(index)} and --num-shards {_said(count)}; expected both, or a launcher that sets them"
        raise InputError("share", detail, "Give both: --shard-index 0 --num-shards 4 for the first of four processes.")
    if count < 1:
        raise InputError(
            "share",
            f"--num-shards {count}; expected 1 or more",
            "Say how many processes there are: --shard-index 0 --num-shards 4.",
        )
    if not 0 <= index < count:
        whence = f" (from {named_by})" if named_by else ""
        detail = f"--shard-index {index} of --num-shards {count}{whence}: expected an index from 0 to {count - 1}"
        raise InputError("share", detail, "Give both: --shard-index 0 --num-shards 4 for the first of four processes.")
    return Share(index, count, named_by) if count > 1 else None


def _find_launched(environment: Mapping[str, str], count: int | None) -> tuple[int | None, int | None, str]:
    """(index, count, names of the variables) by the first launcher whose variables are there, and agree with a count given."""
    for number, total, first, step in LAUNCHERS:
        names = [name for name in (number, total, first, step) if name]
        if not all(name in environment for name in names):
            continue
        try:
            values = {name: int(environment[name]) for name in names}
        except ValueError:
            continue  # not what a launcher sets
        if total and (values[total] == 1 or count not in (None, values[total])):
            continue  # it launched this process alone, or something else
        index, rest = divmod(values[number] - values.get(first, 0), values.get(step, 1) or 1)
        if rest == 0:
            return index, values.get(total), " and ".join(names[:2] if total else names[:1])
    return None, None, ""


def _said(value: int | None) -> str:
    return "is not given" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to work; nothing here changes a byte of the result.

    workers     threads; 0 is as many as the device serves best
    phases      learns how far the work is
    is_forced   files of another, finished plan in the output folder may go
    is_joining  one of several processes that begin together: none of them may replace a plan
    share       the part of the tasks that this process does; None for all that nobody else does
    tell        gets a line for people when everything has to wait
    named   called with the path, the name and the sha256 of every file that this process has finished, by two threads at times
    """

    device: str = "auto"
    workers: int = 0
    is_forced: bool = False
    phases: Phases = field(default_factory=Phases)
    is_joining: bool = False
    share: Share | None = None
    tell: Callable[[str], None] = lambda line: None
    named: OnNamed = lambda path, file, sha256: None


@dataclass(frozen=True, slots=True)
class Result:
    """What a conversion tells at its end; the keys of --json.

    bits_per_weight  of the quantized modules, scales and all; None where there are none
    output_bytes  of the whole; after one of several parts, of what this process wrote
    digest        of the whole; None after one of several parts
    adopted_bytes of the source, whose result an earlier run or another process wrote
    share         which part, and how many shards it wrote; None for the whole
    pushed        address of the commit that holds it on the Hub; None where it is here alone
    components    of a pipeline: the name and the result of each conversion that it was made of
    method        by which weights were rounded; None where none were
    fidelity      the summary of its report; None where nothing was rounded, or after one of several parts
    experts       of a pruned model: how many a layer had and has, in how many layers
    """

    output: str
    format: str
    dialect: str | None
    scale_rule: str | None
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str | None
    adopted_bytes: int = 0
    bits_per_weight: float | None = None
    carried: dict[str, object] | None = None
    share: dict[str, int] | None = None
    pushed: str | None = None
    components: list[dict[str, object]] | None = None
    method: str | None = None
    fidelity: dict[str, object] | None = None
    experts: dict[str, int] | None = None

    def as_json(self) -> dict[str, object]:
        """The document; some keys are there only where they mean something."""
        rare = ("carried", "share", "pushed", "components", "method", "fidelity", "experts")
        return {key: value for key, value in asdict(self).items() if key not in rare or value is not None}
