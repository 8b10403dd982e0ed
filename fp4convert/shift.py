"""This process's part in a conversion: tasks that nobody else does, one after the other, and the end, if it comes to us."""

from __future__ import annotations

import time
from contextlib import nullcontext

from fp4convert.ending import ENDING, Ending, ended_meanwhile, find_disputes, find_harmed, write_ending
from fp4convert.errors import NumericError, OutputError, SourceError
from fp4convert.output import OutputFolder, TaskWriter, read_ended
from fp4convert.pieces import CORRUPT
from fp4convert.purpose import Listed
from fp4convert.sources import Source
from fp4convert.tasks import Plan, Task
from fp4convert.workers import Settings, UnsoundShardError, Worker, fill_shard

FIRST_SECONDS, LONGEST_SECONDS = 0.1, 3.0  # between looks at what others do: many wait, and a shared disk has to answer all
TRIES = 3  # to write files that afterwards are what was written


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


class Shift:
    """One process at work in an output folder.

    adopted_nbytes  of the source, whose result an earlier run or another process wrote
    """

    def __init__(self, source: Source, plan: Plan, folder: OutputFolder, settings: Settings) -> None:
        self._source = source
        self._folder = folder
        self._settings = settings
        self._mark, _ = read_ended(folder.root)
        share = settings.share
        self._mine = share.of(folder.purpose.tasks) if share else folder.purpose.tasks
        self._tasks = {task.key: task for task in plan.tasks}
        self._unseen = {task.key for task in self._mine} & self._tasks.keys()
        self.adopted_nbytes = 0
        self._pause_seconds = FIRST_SECONDS
        self._tries: dict[str, int] = {}
        self._disputed: set[str] = set()

    def work(self, filler: Filler) -> Ending | None:
        """Do what nobody else does, until everything is done; where a part was dealt out, that part alone.

        Returns  how it ended; None after a part
        Raises   NumericError, after all sound shards are written, where weights are NaN or Inf
        """
        self._settings.phases.begin(filler.verb, sum(self._tasks[key].source_bytes for key in self._unseen))
        while True:
            self._do_tasks(filler)
            if filler.unsound:
                raise summarize(list(filler.unsound.values()))
            for shard in self._source.checkpoint.shards:
                self._source.check_unchanged(shard.file)
            if self._settings.share is not None:
                return None
            if ending := self._try_to_end():
                return ending

    def _do_tasks(self, filler: Filler) -> None:
        folder, known = self._folder, self._tasks
        is_told = False
        while left := self._left(filler):
            taken = 0

            def count(task: Listed) -> Listed:
                nonlocal taken
                taken += 1
                self._unseen.discard(task.key)
                return task

            shards = (task for task in left if task.key in known)
            folder.write_shards((known[count(task).key] for task in folder.claimed(shards)), filler.fill)
            for task in folder.claimed(task for task in left if task.key not in known):
                folder.write_copies(count(task), self._source.open_file)
            if not taken:
                if not is_told:
                    self._tell_whom(left)
                is_told = True
                self._pause()
            else:
                self._pause_seconds = FIRST_SECONDS

    def _left(self, filler: Filler) -> list[Listed]:
        """What is still to be done; what others did meanwhile, or an earlier run, is no work of ours."""
        left = [task for task in self._mine if task.key not in filler.given_up and self._folder.record_of(task) is None]
        adopted = self._unseen - {task.key for task in left} - filler.given_up
        self._unseen -= adopted
        if adopted:
            sizes = {shard.file: shard.nbytes for shard in self._source.checkpoint.shards}
            self.adopted_nbytes += sum(sizes.get(self._tasks[key].shards[0].file, 0) for key in adopted)  # named as its source
            self._settings.phases.skip(sum(self._tasks[key].source_bytes for key in adopted))
        return left

    def _pause(self) -> None:
        time.sleep(self._pause_seconds)
        self._pause_seconds = min(1.5 * self._pause_seconds, LONGEST_SECONDS)

    def _tell_whom(self, left: list[Listed]) -> None:
        others = self._folder.claims.others()
        if others:
            file = next(iter(left[0].files))
            self._settings.tell(f"waiting for {len(left)} tasks of {len(others)} other processes, the first {file}")

    def _try_to_end(self) -> Ending | None:
        """The end, where nobody else is at it and all is as it was written; else None, and what is harmed is to be done again."""
        folder = self._folder
        if not folder.claims.take(ENDING):
            self._pause()
            return None
        try:
            if ending := ended_meanwhile(folder, self._mark):
                return ending
            harmed = find_harmed(folder, self._settings.phases) or self._find_disputed()
            for task in harmed:
                self._forget(task)
            return None if harmed else write_ending(folder)
        finally:
            folder.claims.drop(ENDING)

    def _find_disputed(self) -> list[Listed]:
        """Tasks that found other global scales for a group than others did: one of them has read what never was in the source."""
        disputes = find_disputes(self._folder)
        for group in disputes.keys() & self._disputed:
            shards = " and ".join(file for task in disputes[group] for file in task.files)
            detail = f"scale group {group} has another largest magnitude each time it is read, for {shards}"
            raise SourceError(CORRUPT, detail, "Run the same command again; or read the source from somewhere else.")
        self._disputed |= disputes.keys()
        return [task for tasks in disputes.values() for task in tasks]

    def _forget(self, task: Listed) -> None:
        self._tries[task.key] = self._tries.get(task.key, 0) + 1
        if self._tries[task.key] > TRIES:
            file = next(iter(task.files))
            detail = f"{self._folder.root / file} is not what was written, {TRIES} times; expected a disk that keeps its bytes"
            raise OutputError("damaged", detail, "Choose another disk: -o FOLDER.")
        self._folder.forget(task)


def summarize(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors, with the options that complete the run."""
    lines = "\n".join(error.message for error in errors)
    next_step = errors[0].next_step
    if errors[0].code == "not-finite":
        next_step = f"Run the same command again with {' '.join(error.next_step for error in errors)}"
    return NumericError(errors[0].code, lines, next_step, errors[0].tensor)
