"""Fill shards with several threads, of several shards at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from fp4convert.errors import NumericError, OutputError
from fp4convert.execution.fill import Making, TaskWriter
from fp4convert.execution.settings import Settings
from fp4convert.makers.maker import Fact, Tools, UnsoundShardError
from fp4convert.planning.steps import MakerSteps, Task


class Crew:
    """The threads that fill shards, several shards at once.

    Shards are filled in the order of the tasks; the next one begins when threads are about to have
    nothing to do.
    """

    def __init__(self, tools: Tools, settings: Settings) -> None:
        self._tools, self._settings = tools, settings
        self._threads = settings.workers or tools.threads or tools.backend.threads
        self._pool = ThreadPoolExecutor(self._threads)
        self._changed = threading.Condition()
        self._unfinished: set[str] = set()  # keys of tasks
        self._opening = 0  # shards whose makers are not known yet
        self._waiting = 0  # makers that no thread has begun
        self._stops: set[threading.Event] = set()  # of shards that are being filled
        self._failure: BaseException | None = None  # the first
        self._is_stopped = False

    def write(
        self,
        tasks: Iterable[Task],
        write: Callable[[Task], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the shards of every task, one thread for each task.

        While some shards are hashed, flushed and named, others are filled.

        write  calls `fill` once or more often, and does the rest
        after  called when all tasks are begun; where it fails, filled shards are finished all the
               same
        """
        most = self._settings.shards_at_once
        with self._pool, ThreadPoolExecutor(most) as pool:
            try:
                for task in tasks:
                    self._begin(pool, write, task)
                    self._wait_for(
                        lambda: (
                            len(self._unfinished) < most
                            and not self._opening
                            and self._waiting < self._threads
                        )
                    )
                after()
                self._wait_for(lambda: not self._unfinished)
            except BaseException as error:
                # After a failure, tasks that are begun are finished as far as they do not fail
                # too; after an interrupt, then as well, nobody wants to wait.
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

    def _begin(self, pool: ThreadPoolExecutor, write: Callable[[Task], None], task: Task) -> None:
        with self._changed:
            self._opening += 1
            self._unfinished.add(task.key)
        try:
            pool.submit(self._write, write, task)
        except BaseException:  # no thread can be started
            with self._changed:
                self._unfinished.discard(task.key)
            raise

    def _write(self, write: Callable[[Task], None], task: Task) -> None:
        try:
            write(task)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
        finally:
            with self._changed:
                self._unfinished.discard(task.key)
                if not self._unfinished:
                    self._opening = 0  # of a task without makers, too
                self._changed.notify_all()

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds; raise the failure of another thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or is_so())
            if self._failure:
                raise self._failure

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            for stop in self._stops:
                stop.set()
        self._tools.source.stop()

    def check(self, nbytes: int = 0) -> None:
        """Raise OutputError after an interrupt; asked while bytes are hashed."""
        if self._is_stopped:
            raise OutputError("stopped", "shards were not finished")

    def fill(
        self, works: Sequence[MakerSteps], writer: TaskWriter, has_two_passes: bool = False
    ) -> tuple[Fact, ...]:
        """Fill a shard by its makers and hash it as it grows; return the facts.

        Makers run in the order of the file, in which streamed bytes arrive and are hashed.

        has_two_passes  all makers that pause reach their pause before one of them goes on
        Raises          UnsoundShardError after all sound makers are done
        """
        place = _place_in_source if self._tools.source.is_streamed else _place_in_result
        makings = [Making(work, self._tools, writer) for work in sorted(works, key=place)]
        stop, unsound = threading.Event(), list[NumericError]()
        measured, futures = list[Future[None]](), list[Future[None]]()
        with self._changed:
            self._stops.add(stop)
            self._opening = max(self._opening - 1, 0)
            self._waiting += len(makings)
        try:
            if has_two_passes:
                pausing = [making for making in makings if making.work.maker.pauses]
                for one in pausing:  # added one by one: all are waited for below
                    measured.append(self._pool.submit(one.advance, stop, True))
                for future in measured:
                    unsound += _unsound_in(future)
            for making in makings:
                futures.append(self._pool.submit(self._do, making, stop))
            for future in futures:
                unsound += _unsound_in(future)
                writer.hash_on(self.check)
        finally:
            stop.set()
            for future in measured:
                future.cancel()
            begun = len(futures) - sum(future.cancel() for future in futures)
            wait([*measured, *futures])
            for making in makings:
                making.close()
            with self._changed:
                self._waiting -= len(makings) - begun
                self._stops.discard(stop)
                self._changed.notify_all()
        if self._is_stopped:
            raise OutputError("stopped", f"{next(iter(writer.shards))} was not filled")
        if unsound:
            raise UnsoundShardError(unsound)
        return tuple([fact for making in makings for fact in making.facts])

    def _do(self, making: Making, stop: threading.Event) -> None:
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()
            if self._is_stopped:
                return
        making.advance(stop)
        for step in making.work.steps:
            self._settings.phases.report(step.name, step.source_bytes)


def _unsound_in(future: Future[None]) -> list[NumericError]:
    """Wait for a maker; return its unsound tensors, or raise its error."""
    error = future.exception()
    if isinstance(error, UnsoundShardError):
        return error.errors
    if error is not None:
        raise error
    return []


def _place_in_source(work: MakerSteps) -> int:
    return min([step.refs[0].start if step.refs else 0 for step in work.steps])


def _place_in_result(work: MakerSteps) -> int:
    """Return the place of the largest output of a first step in its file."""
    return min([max(step.outputs, key=lambda ref: ref.nbytes).start for step in work.steps])
