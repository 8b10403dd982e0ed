"""Fill one shard with several threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol

from fp4convert.errors import CORRUPT, NumericError, SourceError
from fp4convert.execution.folder import TaskWriter
from fp4convert.execution.settings import Settings, UnsoundShardError
from fp4convert.planning.steps import Action, Step, Task
from fp4convert.storage.source import Source


class Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    source: Source  # what is read
    device: str
    threads: int  # how many groups at once serve it best
    action: Action  # what its steps are called in a plan
    made: str  # what its tensors are called afterwards

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None: ...


def fill_shard(task: Task, writer: TaskWriter, worker: Worker, settings: Settings) -> None:
    """Do all steps of a shard in threads; raises UnsoundShardError after the sound ones are done."""
    stop = threading.Event()

    def do(steps: list[Step]) -> None:
        worker(steps, writer, stop)
        for step in steps:
            settings.phases.report(step.name, step.source_bytes)

    with ThreadPoolExecutor(settings.workers or worker.threads) as pool:
        try:
            futures = [
                pool.submit(do, steps) for steps in _by_scale_group(task, worker.source.is_streamed)
            ]
            unsound: list[NumericError] = []
            for future in futures:
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


def _by_scale_group(task: Task, is_streamed: bool) -> list[list[Step]]:
    """The steps of a shard, members of a scale group together: largest first, or as they lie in a file that is streamed."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        gathered[step.group or step.outputs[0].name].append(step)
    if is_streamed:
        return sorted(
            gathered.values(),
            key=lambda steps: min(
                (ref.start for step in steps for ref in step.refs[:1]), default=0
            ),
        )
    return sorted(gathered.values(), key=lambda steps: -sum(step.source_bytes for step in steps))


class Filler:
    """Fills the shards of one task after the other.

    verb     what is done
    unsound  the error of every tensor because of which a shard cannot be finished, by its name
    given_up keys of the tasks that hold them
    """

    def __init__(self, source: Source, worker: Worker, settings: Settings) -> None:
        self._source = source
        self._worker = worker
        self._settings = settings
        self.verb = worker.action
        self.unsound: dict[str, NumericError] = {}
        self.given_up: set[str] = set()

    def fill(self, task: Task, writer: TaskWriter) -> bool:
        """True where the shards are whole; what arrives damaged is fetched once more."""
        try:
            return self._fill_once(task, writer)
        except SourceError as error:
            if error.code != CORRUPT:
                raise
            writer.begin_again()
            return self._fill_once(task, writer)

    def _fill_once(self, task: Task, writer: TaskWriter) -> bool:
        found: list[NumericError] = []
        with self._source.stream(task.steps[0].refs[0].file) if task.steps else nullcontext():
            try:
                fill_shard(task, writer, self._worker, self._settings)
            except UnsoundShardError as caught:
                found = caught.errors
        self.unsound |= {str(error.tensor): error for error in found}
        if found:
            self.given_up.add(task.key)
            return False
        for file in task.sources:
            self._source.check_unchanged(file)
        return True
