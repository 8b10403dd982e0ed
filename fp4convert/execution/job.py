"""Describe one conversion as a job; open its output folder, or refuse it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp4convert.errors import InputError
from fp4convert.execution import output_check
from fp4convert.execution.finish import record_nbytes
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.output_check import needed_nbytes
from fp4convert.execution.plan_file import LARGE_NBYTES, Manifest, TaskFiles, nbytes_written
from fp4convert.execution.settings import Settings
from fp4convert.execution.takeover import open_output
from fp4convert.planning.plan import Plan
from fp4convert.planning.steps import Action
from fp4convert.storage.checkpoint_files import ATTESTED, PLAN_FILE, RECORD, holds_weights
from fp4convert.storage.source import Source
from fp4convert.version import __version__

OPTIONS = "the options"
STATE_NBYTES = 64 << 10  # of .fp4convert, and as much again for each file and linear layer:
FILE_NBYTES, LINEAR_NBYTES = 8 << 10, 2 << 10  # with lines of the report, and blocks of a disk


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion.

    texts     small files of ours, in the order in which they are written after the shards
    record    our own record without the hashes, written last; None where the last of the texts is
              the last file
    replaced  files of the source that are not copied, because ours take their place
    action    of most steps
    parts     components of the result, by their folder: they end before this job
    """

    source: Source
    plan: Plan
    texts: dict[str, str]
    record: dict[str, object] | None
    last: str
    replaced: frozenset[str]
    action: Action = "quantize"
    parts: dict[str, Manifest] = field(default_factory=dict)

    @property
    def sidecars(self) -> list[str]:
        left = self.replaced.union(ATTESTED)  # which are of the source's files
        return [file for file in self.source.checkpoint.sidecars if file not in left]

    @property
    def tasks(self) -> tuple[TaskFiles, ...]:
        """List the tasks: one for each shard, and the copies."""
        return (*map(TaskFiles.of, self.plan.tasks), *self._copied)

    @property
    def keyless(self) -> tuple[TaskFiles, ...]:
        """List the tasks without keys of shards, which take long."""
        return (*(TaskFiles("", task.files) for task in self.plan.tasks), *self._copied)

    @property
    def _copied(self) -> list[TaskFiles]:
        """List the tasks that copy: one for small files, one for each large."""
        copies = {file: self.source.file_nbytes(file) for file in self.sidecars}
        small = {file: nbytes for file, nbytes in copies.items() if nbytes < LARGE_NBYTES}
        large = [{file: nbytes} for file, nbytes in copies.items() if file not in small]
        stamps = self.source.checkpoint.stamps
        copied = []
        for files in (small, *large):
            if files:
                stamped = [[file, nbytes, stamps[file]] for file, nbytes in files.items()]
                copied.append(TaskFiles(_sha256(stamped), files))
        return copied

    @property
    def output_nbytes(self) -> int:
        """Count all bytes to write, without the last record and the parts."""
        return nbytes_written(self.keyless, self.texts)

    @property
    def result_nbytes(self) -> int:
        """Count all bytes of the result, without its report."""
        if self.record is None:
            return self.output_nbytes
        copied = [file for task in self.keyless for file in task.files]
        return self.output_nbytes + record_nbytes(self.record, [*copied, *self.texts])

    @property
    def staying_nbytes(self) -> int:
        """Count at most the bytes of small files, our state and the report."""
        tasks = self.keyless
        small = sum(task.nbytes for task in tasks if not task.may_leave)
        texts = self.result_nbytes - sum(task.nbytes for task in tasks)
        states = STATE_NBYTES + 2 * texts  # plan.json has them, too
        files = sum(len(task.files) for task in tasks) + len(self.texts)
        linears = sum(len(step.linears) for step in self.plan.steps)
        return small + states + FILE_NBYTES * files + LINEAR_NBYTES * linears

    @property
    def peak_nbytes(self) -> int:
        """Count at most the bytes that the output's disk must hold."""
        return self.staying_nbytes + sum(task.nbytes for task in self.keyless if task.may_leave)

    @property
    def leaving(self) -> tuple[list[int], int]:
        """Return sizes of shards, largest first, and of the largest copy or 0."""
        shards = [sum(task.files.values()) for task in self.plan.tasks]
        copies = [task.nbytes for task in self._copied if task.may_leave]
        return sorted(shards, reverse=True), max(copies, default=0)

    def manifest(self) -> Manifest:
        """Describe the job for the output folder, where plan.json holds it."""
        checkpoint = self.source.checkpoint
        headers = [
            [shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]]
            for shard in checkpoint.shards
        ]
        shards = [shard.file for shard in checkpoint.shards]
        weights = (*shards, *filter(holds_weights, self.sidecars))  # of a pipeline, too
        stamps = {file: checkpoint.stamps[file] for file in weights}
        source = _sha256([*headers, *(part.identity for part in self.parts.values())])
        record = dict(self.record or {})
        origin = record.pop("source", None)  # repository and commit
        options = [
            self.plan.target._asdict(),
            self.plan.quantized,
            [scalar for _, scalar in self.plan.scalars],
            self.texts,
            record,
            *(part.traits[OPTIONS] for part in self.parts.values()),
            *(amaxes for _, amaxes in self.plan.amaxes),
        ]
        return Manifest(
            identity={
                "source": source,
                "format": self.plan.target.format,
                "dialect": self.plan.target.dialect,
            },
            traits={
                "the version of fp4convert": __version__,
                OPTIONS: _sha256(options),
                "the source's files or their times": _sha256([stamps, self.sidecars, origin]),
            },
            tasks=self.tasks,
            texts=self.texts,
            record=self.record,
            last=self.last,
            origin={"repo": checkpoint.repo, "revision": checkpoint.revision},
            parts={name: part.plan_id for name, part in self.parts.items()},
        )


def list_peaks(jobs: Iterable[Job], most: int) -> list[int]:
    """List the peaks of bytes on a disk that shards leave.

    jobs     carried out one after another
    Returns  the peaks with 1, 2, ... `most` shards begun at once, beside one large copy
    """
    staying, leaving = zip(*((job.staying_nbytes, job.leaving) for job in jobs), strict=True)
    moving = [
        max(sum(shards[:count]) + copy_nbytes for shards, copy_nbytes in leaving)
        for count in range(1, most + 1)
    ]
    return [sum(staying) + nbytes for nbytes in moving]


def begin(job: Job, output: Path, settings: Settings) -> OutputFolder:
    """Begin the output folder with the plan, for other processes to carry out."""
    with opened(job, output, settings) as folder:
        return folder


def opened(job: Job, output: Path, settings: Settings) -> AbstractContextManager[OutputFolder]:
    """Open the output folder with the plan in it, and keep other plans out."""
    more_nbytes = _check_places(job, output, settings)
    manifest = replace(job.manifest(), root=os.path.abspath(output), next=settings.next)
    return open_output(output, manifest, settings, more_nbytes)


def check_output(job: Job, output: Path, settings: Settings) -> None:
    """Refuse an output folder as `opened` does, and change nothing."""
    more_nbytes = _check_places(job, output, settings)
    if (output / PLAN_FILE).parent.exists():
        manifest = job.manifest()
    else:  # nothing was done there: a large model's hashes take long
        manifest = Manifest({}, {}, job.keyless, job.texts, job.record, job.last)
    output_check.check_output(output, manifest, settings, more_nbytes)


def _check_places(job: Job, output: Path, settings: Settings) -> int:
    """Check that the result does not touch the source's files.

    Returns  the bytes that the parts write to the same disk
    """
    for file in job.sidecars:
        if file.partition("/")[0] in {RECORD, *job.texts}:
            detail = f"{file}: the source has a folder where the result has a file; expected none"
            raise InputError("file-name", detail, "Rename it.")
    refuse_inside(job.source, output)
    own = replace(settings, at_once=1)
    return sum(needed_nbytes(output / folder, part, own) for folder, part in job.parts.items())


def refuse_inside(source: Source, output: Path) -> None:
    """Raise InputError for an output folder inside the source."""
    if source.holds(output):
        is_inside = source.holds(Path(os.path.realpath(output)).parent)
        where = "lies inside the source" if is_inside else "is the source's own folder"
        detail = f"{output} {where}; expected a folder outside it"
        detail += ", so that the source is not changed"
        raise InputError("output-in-source", detail, "Choose another: -o FOLDER.")


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
