"""Fill one shard with several threads; copy tensors and append parts."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from fp4convert.checkpoint.dialects.tables import Part, encode_scalar
from fp4convert.errors import CORRUPT, NumericError, SourceError
from fp4convert.execution.folder import TaskWriter
from fp4convert.execution.settings import Settings, UnsoundShardError
from fp4convert.planning.steps import Action, Step, Task
from fp4convert.process import processors
from fp4convert.storage.source import Source

T = TypeVar("T")
COPY_NBYTES = 8 << 20  # read at once


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


def append_parts(
    step: Step, parts: Iterator[Part], writer: TaskWriter, stop: threading.Event
) -> bool:
    """Append parts to the outputs of their names; False where it was stopped."""
    place = {output.name: output for output in step.outputs}
    for name, part in parts:
        if stop.is_set():
            return False
        ref = place[name]
        writer.shards[ref.file].append(ref, part)
    return True


def copy_steps(
    source: Source, steps: list[Step], writer: TaskWriter, stop: threading.Event
) -> None:
    """Copy the refs of each step into its first output, one behind the other.

    Of a step without any write the scalar.
    """
    for step in steps:
        output = step.outputs[0]
        if step.action == "write" and step.scalar is not None:
            writer.shards[output.file].append(output, encode_scalar(step.scalar))
        for ref in step.refs:
            nbytes = ref.nbytes
            for start in range(0, nbytes, COPY_NBYTES):
                if stop.is_set():
                    return
                data = source.read_range(ref, start, min(start + COPY_NBYTES, nbytes))
                writer.shards[output.file].append(output, data)


class CopyWorker:
    """Copies the parts of tensors that stay, one after the other."""

    device = "cpu"

    def __init__(self, source: Source, action: Action, made: str) -> None:
        self.source, self.action, self.made = source, action, made
        self.threads = processors()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        copy_steps(self.source, steps, writer, stop)
