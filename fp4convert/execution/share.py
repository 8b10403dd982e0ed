"""Find the part of a conversion that this process does.

Options or a launcher deal out the parts beforehand.  They need no network, no shared clock and not
even a shared folder: each process writes its own shards, and `merge` ends the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp4convert.errors import InputError

T = TypeVar("T")

# (number of this process, number of processes, first number, step); "" where the launcher sets no
# such variable, or may have launched other work: only --num-shards shows that a job array, or an
# Indexed Job of Kubernetes, shares one conversion
LAUNCHERS = (
    # srun; in a batch script itself the second is not set
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ""),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "", ""),
    ("RANK", "WORLD_SIZE", "", ""),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
    ("JOB_COMPLETION_INDEX", "", "", ""),
)
EXAMPLE = "--shard-index 0 --num-shards 4"


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` parts: tasks index, index + count, and so on, from 0.

    named_by  the variables it was taken from; "" where options gave it
    """

    index: int
    count: int
    named_by: str = ""

    def of(self, tasks: Sequence[T]) -> Sequence[T]:
        """Choose the tasks of this part."""
        return tasks[self.index :: self.count]


def choose_share(
    is_joining: bool, index: int | None, count: int | None, environment: Mapping[str, str]
) -> Share | None:
    """Return the part of this process; None where it takes free tasks.

    Raises  InputError where it joins others and gets a part, too
    """
    if not is_joining:
        return find_share(index, count, environment)
    if (index, count) != (None, None):
        detail = (
            "--join and --ray hand out tasks during the run, --shard-index and --num-shards before"
        )
        raise InputError("share", f"{detail} it; expected one way")
    return None


def describe(share: Share) -> str:
    """Describe the part of this process for people."""
    whence = f", as {share.named_by} say (--num-shards 1 for the whole)" if share.named_by else ""
    return f"this process does part {share.index} of {share.count}{whence}"


def find_share(
    index: int | None, count: int | None, environment: Mapping[str, str]
) -> Share | None:
    """Return the part that options or a launcher name; None for the whole.

    Raises  InputError for an impossible part, or where only half of it is known
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
    give_both = f"Give both: {EXAMPLE} for the first of four processes."
    if index is None or count is None:
        words = ["is not given" if value is None else str(value) for value in (index, count)]
        given = f"--shard-index {words[0]} and --num-shards {words[1]}"
        detail = f"{given}; expected both, or a launcher that sets them"
        raise InputError("share", detail, give_both)
    if count < 1:
        next_step = f"Say how many processes there are: {EXAMPLE}."
        raise InputError("share", f"--num-shards {count}; expected 1 or more", next_step)
    if not 0 <= index < count:
        whence = f" (from {named_by})" if named_by else ""
        given = f"--shard-index {index} of --num-shards {count}{whence}"
        detail = f"{given}: expected an index from 0 to {count - 1}"
        raise InputError("share", detail, give_both)
    return Share(index, count, named_by) if count > 1 else None


def _find_launched(
    environment: Mapping[str, str], count: int | None
) -> tuple[int | None, int | None, str]:
    """Read the variables of the first launcher that agrees with a given count.

    Returns  (index, count, names of the variables)
    """
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
