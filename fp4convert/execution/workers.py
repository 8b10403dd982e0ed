"""Fill one shard with several threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from fp4convert.errors import CORRUPT, NumericError, SourceError
from fp4convert.execution.folder import TaskWriter
from fp4convert.execution.settings import Settings, UnsoundShardError
from fp4convert.planning.steps import Action, Step, Task
from fp4convert.storage.source import Source

T = TypeVar("T")


class Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    source: Source  # what is read
    device: str
    threads: int  # how many groups at once serve it best
    action: Action  # what its steps are called in a plan
    made: str  # what its tensors are called afterwards

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None: ...


def fill_shard(task: Task, writer: TaskWriter, worker: Worker, settings: Settings) -> None:
    """Do all steps of a shard in threads.

    Raises  UnsoundShardError after the sound steps are done
    """
    # Members of a scale group stay together: the largest group goes first, but what is streamed
    # goes in the order in which it lies in its file.
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        groups[step.group or step.outputs[0].name].append(step)
    places: dict[str, int] = {}
    for name, steps in groups.items():
        if worker.source.is_streamed:
            places[name] = min((step.refs[0].start for step in steps if step.refs), default=0)
        else:
            places[name] = -sum(step.source_bytes for step in steps)
    stop = threading.Event()

    def do(steps: list[Step]) -> None:
        worker(steps, writer, stop)
        for step in steps:
            settings.phases.report(step.name, step.source_bytes)

    unsound: list[NumericError] = []
    with ThreadPoolExecutor(settings.workers or worker.threads) as pool:
        try:
            for future in [
                pool.submit(do, groups[name]) for name in sorted(groups, key=places.__getitem__)
            ]:
                error = future.exception()
                if isinstance(error, UnsoundShardError):
                    unsound += error.errors
                elif error is not None:
                    raise error
        except BaseException:
            stop.set()
            worker.source.stop()
            pool.shutdown(cancel_futures=True)
            raise
    if unsound:
        raise UnsoundShardError(unsound)


def read_again_if_damaged(read: Callable[[], T]) -> T:
    """Call a function, and once more where what it reads arrives damaged."""
    try:
        return read()
    except SourceError as error:
        if error.code != CORRUPT:
            raise
    return read()
