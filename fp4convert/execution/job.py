"""Carry out one plan to its last byte, alone or with others.

Any number of processes carry out one plan: each takes tasks that nobody has, and whoever is there when the last is done ends it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fp4convert.checkpoint.module_names import split_numbers
from fp4convert.checkpoint.record import MIXED
from fp4convert.errors import CORRUPT, InputError, NumericError, OutputError, SourceError
from fp4convert.execution.finish import (
    ENDING,
    Ending,
    ended_meanwhile,
    find_disputes,
    find_harmed,
    write_ending,
)
from fp4convert.execution.folder import OutputFolder, Terms, missing_nbytes, open_output
from fp4convert.execution.plan_file import Manifest, TaskFiles, nbytes_written, read_ended
from fp4convert.execution.settings import Result, Settings
from fp4convert.execution.workers import Filler, Worker
from fp4convert.planning.steps import Action, Plan
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.source import Source, stopping

OPTIONS = "the options"
FIRST_SECONDS, LONGEST_SECONDS = (
    0.1,
    3.0,
)  # between looks at what others do: many wait, and a shared disk has to answer all
LARGE_NBYTES = (
    16 << 20
)  # of a file that is copied by itself: what is begun again after an interruption is little
TRIES = 3  # to write files that afterwards are what was written


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion.

    texts     small files of ours, in the order in which they are written after the shards
    record    our own record but for the hashes, written last; None where the last of the texts is the last file
    replaced  files of the source that do not travel, because ours take their place
    parts     what else the result is made of, by the folder in it: they are ended before this job is
    """

    source: Source
    plan: Plan
    texts: dict[str, str]
    record: dict[str, object] | None
    last: str
    replaced: frozenset[str]
    parts: dict[str, Manifest] = field(default_factory=dict)

    @property
    def sidecars(self) -> list[str]:
        return [file for file in self.source.checkpoint.sidecars if file not in self.replaced]

    @property
    def tasks(self) -> tuple[TaskFiles, ...]:
        """Every task of the plan, one for small files that are copied, and one for each large one."""
        copies = {file: self.source.file_nbytes(file) for file in self.sidecars}
        small = {file: nbytes for file, nbytes in copies.items() if nbytes < LARGE_NBYTES}
        large = [{file: nbytes} for file, nbytes in copies.items() if file not in small]
        return (
            *map(TaskFiles.of, self.plan.tasks),
            *(self._copies(files) for files in (small, *large) if files),
        )

    def _copies(self, files: dict[str, int]) -> TaskFiles:
        stamps = self.source.checkpoint.stamps
        return TaskFiles(
            _sha256([[file, nbytes, stamps[file]] for file, nbytes in files.items()]), files
        )

    @property
    def output_nbytes(self) -> int:
        """Everything that will be written, but for the last record and the parts."""
        return nbytes_written(self.tasks, self.texts)

    def manifest(self) -> Manifest:
        """What the output folder remembers of this job, to know it again and to end it."""
        checkpoint = self.source.checkpoint
        headers = [
            [shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]]
            for shard in checkpoint.shards
        ]
        stamps = {shard.file: checkpoint.stamps[shard.file] for shard in checkpoint.shards}
        source = _sha256([*headers, *(part.identity for part in self.parts.values())])
        options = [
            asdict(self.plan.target),
            self.plan.quantized,
            [step.scalar for step in self.plan.steps if step.scalar is not None],
            self.texts,
            *(part.traits[OPTIONS] for part in self.parts.values()),
        ]
        return Manifest(
            identity={
                "source": source,
                "format": self.plan.target.format,
                "dialect": self.plan.target.dialect,
            },
            traits={
                "the version of fp4convert": version("fp4convert"),
                OPTIONS: _sha256(options),
                "the source's files or their times": _sha256([stamps, self.sidecars]),
            },
            tasks=self.tasks,
            texts=self.texts,
            record=self.record,
            last=self.last,
            origin={"repo": checkpoint.repo, "revision": checkpoint.revision},
        )


def carry_out(job: Job, worker: Worker, output: Path, settings: Settings) -> Result:
    """Do all of a job that is not done yet and that nobody else does, and tell what came of it.

    Raises  InputError for an output that cannot be there; NumericError, after all sound shards are written, where weights are
            NaN or Inf; SourceError where the source changed or is gone; OutputError as open_output does
    """
    started = time.monotonic()
    with stopping(job.source), opened(job, output, settings) as folder:
        folder.named = settings.named
        shift = _Part(job.source, job.plan, folder, settings)
        ending = shift.work(Filler(job.source, worker, settings))
        own_nbytes = sum((output / file).stat().st_size for file in folder.hashes)
        own_shards = sum(shard.file in folder.hashes for shard in job.plan.shards)
        own = set(folder.hashes)
    share, tasks = settings.share, job.plan.tasks
    sizes = {shard.file: shard.nbytes for shard in job.source.checkpoint.shards}
    if share:  # what this part did, and no other
        tasks = tuple(task for task in tasks if task.shards[0].file in own)
        sizes = {task.shards[0].file: sizes.get(task.shards[0].file, 0) for task in tasks}
    actions = Counter(step.action for task in tasks for step in task.steps)
    return Result(
        output=str(output),
        format=job.plan.target.format if len(job.plan.formats) < 2 else MIXED,
        dialect=job.plan.target.dialect,
        scale_rule=job.plan.target.scale_rule,
        device=worker.device,
        source_bytes=sum(sizes.values()),
        output_bytes=ending.nbytes if ending else own_nbytes,
        seconds=round(time.monotonic() - started, 3),
        tensors=_count(actions, worker),
        digest=ending.digest if ending else None,
        adopted_bytes=shift.adopted_nbytes,
        bits_per_weight=job.plan.bits_per_weight,
        method=job.plan.target.method if worker.action == "quantize" else None,
        fidelity=ending.fidelity if ending else None,
        share={"index": share.index, "of": share.count, "shards": own_shards} if share else None,
    )


def _count(actions: Mapping[Action, int], worker: Worker) -> dict[str, int]:
    """How many tensors became what: beside the usual, blocks that were taken over and packed ones that became floats."""
    rare: dict[str, Action] = {
        "transcoded": "transcode",
        "dequantized": "dequantize",
        "folded": "fold",
        "written": "write",
    }
    counts = {
        worker.made: actions.get(worker.action, 0),
        "copied": actions.get("copy", 0),
        "skipped": actions.get("skip", 0),
    }
    return {
        **counts,
        **{
            how: actions[action]
            for how, action in rare.items()
            if actions.get(action) and how not in counts
        },
    }


class _Part:
    """This process's part in a conversion: tasks that nobody else does, one after the other, and the end, if it comes to us.

    adopted_nbytes  of the source, whose result an earlier run or another process wrote
    """

    def __init__(
        self, source: Source, plan: Plan, folder: OutputFolder, settings: Settings
    ) -> None:
        self._source = source
        self._folder = folder
        self._settings = settings
        self._mark, _ = read_ended(folder.root)
        share = settings.share
        self._mine = share.of(folder.manifest.tasks) if share else folder.manifest.tasks
        self._tasks = {task.key: task for task in plan.tasks}
        copied = {task.key: sum(task.files.values()) for task in self._mine}
        self._sizes = copied | {
            key: task.source_bytes for key, task in self._tasks.items() if key in copied
        }
        self._unseen = set(self._sizes)
        self.adopted_nbytes = 0
        self._pause_seconds = FIRST_SECONDS
        self._has_taken = False  # anything, since it last looked at what is left
        self._tries: dict[str, int] = {}
        self._disputed: set[str] = set()

    def work(self, filler: Filler) -> Ending | None:
        """Do what nobody else does, until everything is done; where a part was dealt out, that part alone.

        Returns  how it ended; None after a part
        Raises   NumericError, after all sound shards are written, where weights are NaN or Inf
        """
        self._settings.phases.begin(filler.verb, sum(self._sizes.values()))
        while True:
            self._do_tasks(filler)
            if filler.unsound:
                raise _summarize(list(filler.unsound.values()))
            for shard in self._source.checkpoint.shards:
                self._source.check_unchanged(shard.file)
            if self._settings.share is not None:
                return None
            if ending := self._try_to_end():
                return ending

    def _do_tasks(self, filler: Filler) -> None:
        is_told = False
        while left := self._left(filler):
            self._has_taken = False
            shards = self._taken([task for task in left if task.key in self._tasks])
            copies = self._taken([task for task in left if task.key not in self._tasks])
            self._folder.write_shards(
                (self._tasks[task.key] for task in shards), filler.fill, partial(self._copy, copies)
            )
            if self._has_taken:
                self._pause_seconds = FIRST_SECONDS
                continue
            if not is_told:
                self._tell_whom(left)
            is_told = True
            self._pause()

    def _taken(self, tasks: list[TaskFiles]) -> Iterator[TaskFiles]:
        """Of these, one after the other, those that fall to us."""
        for task in self._folder.claimed(tasks):
            self._has_taken = True
            self._unseen.discard(task.key)
            yield task

    def _copy(self, tasks: Iterable[TaskFiles]) -> None:
        for task in tasks:
            self._folder.write_copies(task, self._source.open_file, self._settings.phases.report)
            for file in task.files:
                self._source.check_unchanged(file)

    def _left(self, filler: Filler) -> list[TaskFiles]:
        """What is still to be done; what others did meanwhile, or an earlier run, is no work of ours."""
        left = [
            task
            for task in self._mine
            if task.key not in filler.given_up and self._folder.record_of(task) is None
        ]
        adopted = self._unseen - {task.key for task in left} - filler.given_up
        self._unseen -= adopted
        if adopted:
            sizes = {shard.file: shard.nbytes for shard in self._source.checkpoint.shards}
            shards = [
                self._tasks[key].shards[0].file for key in adopted & self._tasks.keys()
            ]  # named as their sources
            self.adopted_nbytes += sum(sizes.get(file, 0) for file in shards)
            self._settings.phases.skip(sum(self._sizes[key] for key in adopted))
        return left

    def _pause(self) -> None:
        time.sleep(self._pause_seconds)
        self._pause_seconds = min(1.5 * self._pause_seconds, LONGEST_SECONDS)

    def _tell_whom(self, left: list[TaskFiles]) -> None:
        others = self._folder.claims.others()
        if others:
            file = next(iter(left[0].files))
            self._settings.tell(
                f"waiting for {len(left)} tasks of {len(others)} other processes, the first {file}"
            )

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

    def _find_disputed(self) -> list[TaskFiles]:
        """Tasks that found other global scales for a group than others did: one of them has read what never was in the source."""
        disputes = find_disputes(self._folder)
        for group in disputes.keys() & self._disputed:
            shards = " and ".join(file for task in disputes[group] for file in task.files)
            detail = f"scale group {group} has another largest magnitude each time it is read, for {shards}"
            raise SourceError(
                CORRUPT,
                detail,
                "Run the same command again; or read the source from somewhere else.",
            )
        self._disputed |= disputes.keys()
        return [task for tasks in disputes.values() for task in tasks]

    def _forget(self, task: TaskFiles) -> None:
        self._tries[task.key] = self._tries.get(task.key, 0) + 1
        if self._tries[task.key] > TRIES:
            file = next(iter(task.files))
            detail = f"{self._folder.root / file} is not what was written, {TRIES} times; expected a disk that keeps its bytes"
            raise OutputError("damaged", detail, "Choose another disk: -o FOLDER.")
        self._folder.forget(task)


def _summarize(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors: each with the option that completes the run, or the first of those that have none."""
    excludable = [error for error in errors if error.code == "not-finite"]
    others = sorted(
        (error for error in errors if error not in excludable),
        key=lambda error: split_numbers(str(error.tensor)),
    )
    lines = [error.message for error in excludable]
    if others:
        more = (
            f"; so it is with {len(others) - 1} more, the last {others[-1].tensor}"
            if len(others) > 1
            else ""
        )
        lines.append(f"{others[0].message}{more}")
    first, next_step = (*excludable, *others)[0], (*others, *excludable)[0].next_step
    if not others:
        next_step = (
            f"Run the same command again with {' '.join(error.next_step for error in excludable)}"
        )
    return NumericError(first.code, tuple(lines), next_step, first.tensor)


def begin(job: Job, output: Path, settings: Settings) -> OutputFolder:
    """The output folder with the job's plan in it, for other processes to carry out; raises what carry_out does at first."""
    with opened(job, output, settings) as folder:
        return folder


def opened(job: Job, output: Path, settings: Settings) -> AbstractContextManager[OutputFolder]:
    """The output folder with the plan in it, which no other plan replaces meanwhile; raises what carry_out does at first."""
    _check_places(job, output)
    more_nbytes = sum(missing_nbytes(output / folder, part) for folder, part in job.parts.items())
    return open_output(
        output, job.manifest(), Terms(more_nbytes, settings.is_forced, settings.is_joining)
    )


def _check_places(job: Job, output: Path) -> None:
    """InputError where a file of the source or the output folder would be in the way."""
    for file in job.sidecars:
        if file.partition("/")[0] in {RECORD, *job.texts}:
            raise InputError(
                "file-name",
                f"{file}: the source has a folder where the result has a file; expected none",
                "Rename it.",
            )
    refuse_inside(job.source, output)


def refuse_inside(source: Source, output: Path) -> None:
    """InputError for an output folder in the source's own."""
    if source.holds(output):
        detail = f"{output} lies inside the source; expected a folder outside it, so that the source stays as it is"
        raise InputError("output-in-source", detail, "Choose another: -o FOLDER.")


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
