"""Fill shards with several threads; copy tensors and append parts."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Protocol, TypeVar

from fp4convert.checkpoint.dialects.tables import Part, encode_scalar
from fp4convert.errors import CORRUPT, OutputError, SourceError
from fp4convert.execution.settings import Settings, UnsoundShardError
from fp4convert.execution.task_writer import TaskWriter
from fp4convert.planning.steps import Action, Step, Task
from fp4convert.process import processors
from fp4convert.storage.source import Source

T = TypeVar("T")
Measure = Callable[[list[Step], TaskWriter], None]
COPY_NBYTES = 8 << 20  # read at once


class Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    source: Source  # what is read
    device: str
    threads: int  # how many groups at once serve it best
    action: Action  # what its steps are called in a plan
    made: str  # what its tensors are called afterwards

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None: ...


class Crew:
    """The threads that fill shards, of several at once.

    What was asked for first is done first; the next shard begins when threads are about to have
    nothing to do.
    """

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker, self._settings = worker, settings
        self._threads = settings.workers or worker.threads
        self._pool = ThreadPoolExecutor(self._threads)
        self._changed = threading.Condition()
        self._unfinished = 0  # shards
        self._opening = 0  # shards whose groups are not known yet
        self._waiting = 0  # groups that no thread has begun
        self._stops: set[threading.Event] = set()  # of shards that are being filled
        self._failure: BaseException | None = None  # the first
        self._is_stopped = False

    def write(
        self,
        tasks: Iterable[Task],
        write: Callable[[Task], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the shards of every task, each task in a thread of its own.

        While some are hashed, flushed and named, others are filled.

        write  has `fill` called once, or more often, and does the rest
        after  is called when all are begun, beside the last of them; where it fails, shards that
               are filled are finished all the same
        """
        most = self._settings.shards_at_once
        with self._pool, ThreadPoolExecutor(most) as pool:
            try:
                for task in tasks:
                    with self._changed:
                        self._opening += 1
                        self._unfinished += 1
                    pool.submit(self._write, write, task)
                    self._wait_for(
                        lambda: (
                            self._unfinished < most
                            and not self._opening
                            and self._waiting < self._threads
                        )
                    )
                after()
                self._wait_for(lambda: not self._unfinished)
            except BaseException as error:
                # After what failed, all that is begun is finished, as far as it does not fail too;
                # after an interrupt, then as well, nobody wants to wait.
                try:
                    with self._changed:
                        is_failure = isinstance(error, Exception)
                        self._changed.wait_for(lambda: not (is_failure and self._unfinished))
                except BaseException:
                    self._stop()
                    raise
                if not is_failure:
                    self._stop()
                raise

    def _write(self, write: Callable[[Task], None], task: Task) -> None:
        try:
            write(task)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
        finally:
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; raise what failed in another thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or is_so())
            if self._failure:
                raise self._failure

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            for stop in self._stops:
                stop.set()
        self._worker.source.stop()

    def check(self, nbytes: int = 0) -> None:
        """Raise OutputError after an interrupt; asked while bytes are hashed."""
        if self._is_stopped:
            raise OutputError("stopped", "shards were not finished")

    def fill(
        self, steps: Iterable[Step], writer: TaskWriter, measure: Measure | None = None
    ) -> None:
        """Do steps of a shard, and hash what is written as it grows.

        measure  is called with every scale group before one of them is filled
        Raises   UnsoundShardError after the sound steps are done
        """
        # Members of a scale group stay together. Groups go in the order in which they lie in the
        # file: what is streamed arrives so, and the hash goes along with what is written.
        groups: dict[str, list[Step]] = defaultdict(list)
        for step in steps:
            groups[step.group or step.outputs[0].name].append(step)
        place = _place_in_source if self._worker.source.is_streamed else _place_in_result
        ordered = sorted(groups.values(), key=lambda steps: min(map(place, steps)))
        stop, unsound = threading.Event(), []
        with self._changed:
            self._stops.add(stop)
            self._opening, self._waiting = max(self._opening - 1, 0), self._waiting + len(ordered)
        measured: list[Future[None]] = []
        futures: list[Future[None]] = []
        try:
            if measure:
                measure_steps = partial(_unless, stop, measure)
                measured = [self._pool.submit(measure_steps, steps, writer) for steps in ordered]
                for future in measured:
                    future.result()
            futures = [self._pool.submit(self._do, steps, writer, stop) for steps in ordered]
            for future in futures:
                error = future.exception()
                if isinstance(error, UnsoundShardError):
                    unsound += error.errors
                elif error is not None:
                    raise error
                else:
                    writer.hash_on(self.check)
        finally:
            stop.set()
            for future in measured:
                future.cancel()
            begun = len(futures) - sum(future.cancel() for future in futures)
            wait([*measured, *futures])
            with self._changed:
                self._waiting -= len(ordered) - begun
                self._stops.discard(stop)
                self._changed.notify_all()
        if self._is_stopped:
            raise OutputError("stopped", f"{next(iter(writer.shards))} was not filled")
        if unsound:
            raise UnsoundShardError(unsound)

    def _do(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()
            if self._is_stopped:
                return
        self._worker(steps, writer, stop)
        for step in steps:
            self._settings.phases.report(step.name, step.source_bytes)


def _unless(stop: threading.Event, measure: Measure, steps: list[Step], writer: TaskWriter) -> None:
    if not stop.is_set():
        measure(steps, writer)


def _place_in_source(step: Step) -> int:
    return step.refs[0].start if step.refs else 0


def _place_in_result(step: Step) -> int:
    """Return where the largest output of a step lies in its file."""
    return max(step.outputs, key=lambda ref: ref.nbytes).start


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
