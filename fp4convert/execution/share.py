"""Find which part of a conversion this process does.

A Share is the part of a conversion that one process does, where parts are dealt out beforehand: by options, or by what launched
it.  Parts need no network, no shared clock and not even a shared folder: each writes its own shards, and `merge` ends the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp4convert.errors import InputError

T = TypeVar("T")

# (number of this process, how many there are, first number, step); "" where the launcher does not say, or where it may have
# launched other work: only --num-shards tells that a job array, or an Indexed Job of Kubernetes, shares one conversion
LAUNCHERS = (
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "",
        "",
    ),  # srun; in a batch script itself the second is not set
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


def choose_share(
    is_joining: bool, index: int | None, count: int | None, environment: Mapping[str, str]
) -> Share | None:
    """find_share, but for processes that join: those take whatever task is free.  InputError for both at once."""
    if is_joining and (index, count) != (None, None):
        raise InputError(
            "share",
            "--join and --ray take tasks as they come, --shard-index and --num-shards deal them out; expected one way",
        )
    return None if is_joining else find_share(index, count, environment)


def describe(share: Share) -> str:
    """What a person should know of a part, and of the rest."""
    whence = f", as {share.named_by} say (--num-shards 1 for the whole)" if share.named_by else ""
    return f"this process does part {share.index} of {share.count}{whence}; when every part is done: fp4convert merge"


def find_share(
    index: int | None, count: int | None, environment: Mapping[str, str]
) -> Share | None:
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
        given = f"--shard-index {_or_nothing(index)} and --num-shards {_or_nothing(count)}"
        detail = f"{given}; expected both, or a launcher that sets them"
        raise InputError(
            "share",
            detail,
            "Give both: --shard-index 0 --num-shards 4 for the first of four processes.",
        )
    if count < 1:
        raise InputError(
            "share",
            f"--num-shards {count}; expected 1 or more",
            "Say how many processes there are: --shard-index 0 --num-shards 4.",
        )
    if not 0 <= index < count:
        whence = f" (from {named_by})" if named_by else ""
        detail = f"--shard-index {index} of --num-shards {count}{whence}: expected an index from 0 to {count - 1}"
        raise InputError(
            "share",
            detail,
            "Give both: --shard-index 0 --num-shards 4 for the first of four processes.",
        )
    return Share(index, count, named_by) if count > 1 else None


def _find_launched(
    environment: Mapping[str, str], count: int | None
) -> tuple[int | None, int | None, str]:
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


def _or_nothing(value: int | None) -> str:
    return "is not given" if value is None else str(value)
