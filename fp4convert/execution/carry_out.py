"""Carry out one plan, alone or with other processes.

Each process takes tasks that no other has; the one that is there when the last task is done ends
the conversion.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from fp4convert.checkpoint.record import MIXED
from fp4convert.errors import CORRUPT, NumericError, OutputError, SourceError
from fp4convert.execution.crew import Crew
from fp4convert.execution.fill import TaskWriter
from fp4convert.execution.finish import (
    ENDING,
    WHY_ENDING,
    Ending,
    ended_meanwhile,
    find_disputes,
    find_edited,
    find_harmed,
    write_ending,
)
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import Job, opened
from fp4convert.execution.leases import do_together
from fp4convert.execution.plan_file import TaskFiles, read_ended
from fp4convert.execution.settings import Result, Settings, summarize
from fp4convert.makers.maker import Fact, Tools, UnsoundShardError
from fp4convert.planning.steps import Action, Task
from fp4convert.process import memory_nbytes
from fp4convert.storage.source import read_again_if_damaged, stopping

CACHED_SHARE = 0.5  # of the memory: a source that is read twice stays in the page cache
TRIES = 3  # to write files that afterwards are what was written
MADE: dict[Action, str] = {  # what tensors are called afterwards, by the action of the job
    "quantize": "quantized",
    "dequantize": "dequantized",
    "transcode": "transcoded",
    "prune": "pruned",
    "copy": "copied",
}
RARE: dict[str, Action] = {  # what tensors became beside the usual
    "transcoded": "transcode",
    "dequantized": "dequantize",
    "folded": "fold",
    "merged": "merge",
    "reordered": "reorder",
    "written": "write",
}


def carry_out(job: Job, tools: Tools, output: Path, settings: Settings) -> Result:
    """Do the tasks of a job that are not done and that no other process does.

    Raises  InputError for an output that cannot be there; NumericError, after all sound shards are
            written, where weights are NaN or Inf; SourceError where the source changed or is gone;
            OutputError as open_output does
    """
    started = time.monotonic()
    with stopping(job.source), opened(job, output, settings) as folder:
        run = _Run(job, tools, folder, settings)
        ending = run.work()
        own_nbytes = sum(map(folder.nbytes_of, folder.hashes))
        own_shards = sum(shard.file in folder.hashes for shard in job.plan.shards)
    # Count the whole job, or the one part of it that this process does.
    share, target, tasks = settings.share, job.plan.target, job.plan.tasks
    sizes = {shard.file: shard.nbytes for shard in job.source.checkpoint.shards}
    if share:
        tasks = tuple(task for task in tasks if task.shards[0].file in folder.hashes)
        sizes = {task.key: _nbytes_of(task, sizes) for task in tasks}
    actions = Counter(step.action for task in tasks for step in task.steps)
    tensors = {
        MADE[job.action]: actions[job.action],
        "copied": actions["copy"],
        "skipped": actions["skip"],
    }
    for word, action in RARE.items():
        if actions[action] and word not in tensors:
            tensors[word] = actions[action]
    return Result(
        output=str(output),
        format=target.format if len(job.plan.formats) < 2 else MIXED,
        dialect=target.dialect,
        scale_rule=target.scale_rule,
        device=tools.backend.name,
        source_bytes=sum(sizes.values()),
        output_bytes=ending.nbytes if ending else own_nbytes,
        seconds=round(time.monotonic() - started, 3),
        tensors=tensors,
        digest=ending.digest if ending else None,
        adopted_bytes=run.adopted_nbytes,
        bits_per_weight=job.plan.bits_per_weight,
        method=target.method if job.action == "quantize" else None,
        fidelity=ending.fidelity if ending else None,
        saturated=(ending.saturated or None) if ending else None,
        erased_rows=(ending.erased_rows or None) if ending else None,
        share={"index": share.index, "of": share.count, "shards": own_shards} if share else None,
    )


class _Run:
    """The tasks that this process does, and perhaps the end of the conversion."""

    def __init__(self, job: Job, tools: Tools, folder: OutputFolder, settings: Settings) -> None:
        self._source = job.source
        self._action, self._tools = job.action, tools
        self._folder = folder
        self._settings = settings
        self._mark, _, _ = read_ended(folder.root)
        share = settings.share
        self._mine = share.of(folder.manifest.tasks) if share else folder.manifest.tasks
        self._tasks = {task.key: task for task in job.plan.tasks}
        self._sizes = {
            task.key: self._tasks[task.key].source_bytes
            if task.key in self._tasks
            else sum(task.files.values())
            for task in self._mine
        }
        self._unseen = set(self._sizes)  # tasks that nobody is known to have begun
        self._adopted: dict[str, int] = {}  # bytes of the source, by the task
        self._has_taken = False  # anything, since it last looked at what is left
        self._last = ""  # key of the last shard of what was left then
        self._unsound: dict[str, NumericError] = {}  # by the tensor
        self._given_up: set[str] = set()  # keys of the tasks that hold these
        self._tries: dict[str, int] = {}
        self._disputed: set[str] = set()

    @property
    def adopted_nbytes(self) -> int:
        """Count the source's bytes that others had converted before."""
        return sum(self._adopted.values())

    def work(self) -> Ending | None:
        """Do tasks that no other process does, until all or this part is done.

        Returns  the end of the conversion; None after a part
        """
        folder = self._folder
        folder.send_kept()
        # A part of the work writes none of these again.
        if self._settings.share is None and (edited := find_edited(folder)):
            more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
            self._settings.tell(f"changed since, and written again: {edited[0]}{more}")
        self._settings.phases.begin(self._action, sum(self._sizes.values()))
        while True:
            do_together(self._find_left, self._do_free, self._tell_whom)
            if self._unsound:
                raise self._explain_unsound()
            for shard in self._source.checkpoint.shards:
                self._source.check_unchanged(shard.file)
            if self._settings.share is not None:
                return None
            # One process at a time checks the whole; it ends it, or requeues damaged tasks.
            with folder.leases.hold_when_free(ENDING, WHY_ENDING):
                if ending := ended_meanwhile(folder, self._mark):
                    return ending
                if not folder.missing() and not self._forget_harmed():
                    return write_ending(folder)

    def _find_left(self) -> list[TaskFiles]:
        """List the tasks that are not done, and count those that others did."""
        left = [
            task
            for task in self._mine
            if task.key not in self._given_up and self._folder.record_of(task) is None
        ]
        adopted = self._unseen - {task.key for task in left} - self._given_up
        self._unseen -= adopted
        if adopted:
            is_first, count = len(self._unseen) + len(adopted) == len(self._sizes), len(self._tasks)
            sizes = {shard.file: shard.nbytes for shard in self._source.checkpoint.shards}
            shards = adopted & self._tasks.keys()
            self._adopted |= {key: _nbytes_of(self._tasks[key], sizes) for key in shards}
            self._settings.phases.skip(sum(self._sizes[key] for key in adopted))
            if is_first and 0 < len(shards) < count and not self._settings.is_joining:
                self._settings.tell(f"{len(shards)} of {count} shards are there already")
        return left

    def _do_free(self, left: list[TaskFiles]) -> bool:
        """Fill shards and copy files that no other process has taken."""
        self._has_taken = False
        own = [task for task in left if task.key in self._tasks]
        self._last = own[-1].key if own else ""
        shards = self._take(own)
        copies = self._take([task for task in left if task.key not in self._tasks])
        crew = Crew(self._tools, self._settings)
        fill = partial(self._fill, crew)
        crew.write(
            (self._tasks[task.key] for task in shards),
            partial(self._folder.write_task, fill=fill, check=crew.check),
            partial(self._copy, copies),
        )
        return self._has_taken

    def _take(self, tasks: list[TaskFiles]) -> Iterator[TaskFiles]:
        for task in self._folder.take_tasks(tasks):
            self._has_taken = True
            self._unseen.discard(task.key)
            yield task

    def _copy(self, tasks: Iterator[TaskFiles]) -> None:
        for task in tasks:
            self._folder.write_copies(task, self._source.open_file, self._settings.phases.report)
            for file in task.files:
                self._source.check_unchanged(file)

    def _fill(self, crew: Crew, task: Task, writer: TaskWriter) -> tuple[Fact, ...] | None:
        """Fill the shards of a task; None where a tensor is unsound."""
        return read_again_if_damaged(partial(self._fill_once, crew, task, writer))

    def _fill_once(self, crew: Crew, task: Task, writer: TaskWriter) -> tuple[Fact, ...] | None:
        writer.begin_again()
        # One file of many shards brings each in its turn; else a shard is brought by its own task.
        parts = task.by_home if len(self._tasks) == 1 else {task.home: task.works}
        has_two_passes = self._has_two_passes(task)
        facts: list[Fact] = []
        unsound: list[NumericError] = []
        with self._source.proving(task.borrowed):
            for file, works in parts.items():
                with self._source.stream(file) if file else nullcontext():
                    try:
                        facts += crew.fill(works, writer, has_two_passes)
                    except UnsoundShardError as error:
                        unsound += error.errors
        # Noted when the stream has ended: before, a NaN may have come damaged.
        if unsound:
            self._unsound |= {str(error.tensor): error for error in unsound}
            self._given_up.add(task.key)
            return None
        for source in task.sources:
            self._source.check_unchanged(source)
        return tuple(facts)

    def _has_two_passes(self, task: Task) -> bool:
        """Return whether all global scales are found before a weight is rounded.

        Scales stand first in a shard, so that the hash goes along with the rounding. The hash of
        the last shard would run alone; others run beside the next shard. The source, read twice,
        has to stay in the page cache.
        """
        is_cached = self._sizes[task.key] <= CACHED_SHARE * memory_nbytes()
        return task.key == self._last and is_cached and not self._source.is_streamed

    def _explain_unsound(self) -> NumericError:
        """Return one error for all unsound tensors.

        It names every tensor that an option leaves out, and the first of the others.
        """
        from fp4convert.checkpoint.module_names import split_numbers

        errors = list(self._unsound.values())
        excludable = [error for error in errors if error.code == "not-finite"]
        others = [error for error in errors if error.code != "not-finite"]
        others.sort(key=lambda error: split_numbers(str(error.tensor)))
        if len(others) > 1:
            first, rest = others[0], f"{len(others) - 1} more, the last {others[-1].tensor}"
            message = f"{first.message}; the same for {rest}"
            others = [NumericError(first.code, message, first.next_step, first.tensor)]
        return summarize([*excludable, *others])

    def _tell_whom(self, left: list[TaskFiles]) -> None:
        """Tell a person which processes this one waits for."""
        others = self._folder.leases.others()
        if others:
            file = next(iter(left[0].files))
            self._settings.tell(
                f"waiting for {len(left)} tasks of {len(others)} other processes, the first {file}"
            )

    def _forget_harmed(self) -> bool:
        """Requeue damaged and disputed tasks; return whether there were any.

        Tasks are disputed that found different global scales for one group: one of them read bytes
        that never were in the source.
        """
        elsewhere = self._folder.elsewhere
        again = find_harmed(self._folder, self._settings.phases, self._settings.is_forced)
        why = "not all of them are what was written"
        if elsewhere and all(map(self._has_gone, again)):
            why = f"{elsewhere.name} does not hold them any more"
        for task in again:
            self._count_try(task)
        if not again:
            again = self._find_disputed()
            why = "their scale groups were not the same in all of them"
        if again:
            self._tell_again(again, why)
        for task in again:
            self._folder.forget(task)
        return bool(again)

    def _find_disputed(self) -> list[TaskFiles]:
        """Find disputed tasks, and distrust what was read of the source.

        Raises  SourceError for the second dispute about the same scale group
        """
        disputes = find_disputes(self._folder)
        for group in disputes.keys() & self._disputed:
            shards = " and ".join(file for task in disputes[group] for file in task.files)
            detail = f"scale group {group} has a different largest magnitude each time it is read"
            next_step = "Run the same command again; or read the source from somewhere else."
            raise SourceError(CORRUPT, f"{detail}, for {shards}", next_step)
        self._disputed |= disputes.keys()
        if disputes:
            self._source.distrust()
        return list({task.key: task for tasks in disputes.values() for task in tasks}.values())

    def _has_gone(self, task: TaskFiles) -> bool:
        """Return whether a task's files have left this disk."""
        done = self._folder.record_of(task)
        return done is not None and done.is_gone

    def _count_try(self, task: TaskFiles) -> None:
        """Count a damaged task; raise OutputError where it happens too often."""
        self._tries[task.key] = self._tries.get(task.key, 0) + 1
        if self._tries[task.key] <= TRIES:
            return
        file = next(iter(task.files))
        if self._has_gone(task):
            detail = f"{file} was sent {TRIES} times, and the Hub lost it"
            raise OutputError("push-lost", f"{detail}; expected a Hub that keeps it")
        detail = f"{self._folder.root / file} is not what was written, {TRIES} times"
        detail += "; expected a disk that keeps its bytes"
        raise OutputError("damaged", detail, "Choose another disk: -o FOLDER.")

    def _tell_again(self, tasks: list[TaskFiles], why: str) -> None:
        """Tell which files are made again, and count them as work."""
        files = [file for task in tasks for file in task.files]
        self._settings.tell(f"made again, the first {files[0]}: {len(files)} files; {why}")
        for task in tasks:
            self._adopted.pop(task.key, None)
        sizes = [self._sizes.get(task.key, 0) for task in tasks]
        self._settings.phases.begin(self._action, sum(sizes))


def _nbytes_of(task: Task, sizes: Mapping[str, int]) -> int:
    """Count the source's bytes of a task, or of a file with its name.

    sizes  of the source's files
    """
    return sizes.get(task.shards[0].file, task.source_bytes)
