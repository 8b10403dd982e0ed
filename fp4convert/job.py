"""One conversion from its plan to its last byte: this process's part in it, until the whole is done.

Any number of processes carry out one plan: each takes tasks that nobody has, and whoever is there when the last is done ends it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from fp4convert.artifact import RECORD
from fp4convert.errors import InputError
from fp4convert.output import OutputFolder, Terms, open_output
from fp4convert.purpose import Listed, Purpose
from fp4convert.shift import Filler, Shift
from fp4convert.sources import Source, stopping
from fp4convert.tasks import Plan
from fp4convert.workers import Settings, Worker


@dataclass(frozen=True, slots=True)
class Result:
    """What a conversion tells at its end; the keys of --json.

    bits_per_weight  of the four-bit modules, scales and all; None where there are none
    output_bytes  of the whole; after one of several parts, of what this process wrote
    digest        of the whole; None after one of several parts
    adopted_bytes of the source, whose result an earlier run or another process wrote
    share         which part, and how many shards it wrote; None for the whole
    pushed        address of the commit that holds it on the Hub; None where it is here alone
    """

    output: str
    format: str
    dialect: str | None
    scale_rule: str | None
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str | None
    adopted_bytes: int = 0
    bits_per_weight: float | None = None
    carried: dict[str, object] | None = None
    share: dict[str, int] | None = None
    pushed: str | None = None

    def as_json(self) -> dict[str, object]:
        """The document; `carried` where something was transcoded, `share` after one of several parts, `pushed` to the Hub."""
        rare = ("carried", "share", "pushed")
        return {key: value for key, value in asdict(self).items() if key not in rare or value is not None}


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion.

    texts     small files of ours, in the order in which they are written after the shards
    record    our own record but for the hashes, written last; None where the last of the texts is the last file
    replaced  files of the source that do not travel, because ours take their place
    """

    source: Source
    plan: Plan
    texts: dict[str, str]
    record: dict[str, object] | None
    last: str
    replaced: frozenset[str]

    @property
    def sidecars(self) -> list[str]:
        return [file for file in self.source.checkpoint.sidecars if file not in self.replaced]

    @property
    def tasks(self) -> tuple[Listed, ...]:
        """Every task of the plan, and one for the files that are copied."""
        copies = {file: self.source.file_nbytes(file) for file in self.sidecars}
        stamps = self.source.checkpoint.stamps
        key = _sha256([[file, nbytes, stamps[file]] for file, nbytes in copies.items()])
        return (*map(Listed.of, self.plan.tasks), *([Listed(key, copies)] if copies else ()))

    @property
    def output_nbytes(self) -> int:
        """Everything that will be written, but for the last record."""
        small = sum(len(text.encode("utf-8", "surrogatepass")) for text in self.texts.values())
        return small + sum(sum(task.files.values()) for task in self.tasks)

    def purpose(self) -> Purpose:
        """What the output folder remembers of this job, to know it again and to end it."""
        checkpoint = self.source.checkpoint
        headers = [
            [shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]] for shard in checkpoint.shards
        ]
        stamps = {shard.file: checkpoint.stamps[shard.file] for shard in checkpoint.shards}
        return Purpose(
            identity={"source": _sha256(headers), "format": self.plan.target.format, "dialect": self.plan.target.dialect},
            traits={
                "the version of fp4convert": version("fp4convert"),
                "the options": _sha256([asdict(self.plan.target), self.plan.quantized, self.texts]),
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
    with stopping(job.source), _opened(job, output, settings) as folder:
        folder.published = settings.published
        shift = Shift(job.source, job.plan, folder, settings)
        ending = shift.work(Filler(job.source, worker, settings))
        own_nbytes = sum((output / file).stat().st_size for file in folder.hashes)
        own_shards = sum(shard.file in folder.hashes for shard in job.plan.shards)
    actions = Counter(step.action for step in job.plan.steps)
    share = settings.share
    return Result(
        output=str(output),
        format=job.plan.target.format,
        dialect=job.plan.target.dialect,
        scale_rule=job.plan.target.scale_rule,
        device=worker.device,
        source_bytes=job.source.checkpoint.nbytes,
        output_bytes=ending.nbytes if ending else own_nbytes,
        seconds=round(time.monotonic() - started, 3),
        tensors={worker.made: actions[worker.action], "copied": actions["copy"], "skipped": actions["skip"]},
        digest=ending.digest if ending else None,
        adopted_bytes=shift.adopted_nbytes,
        bits_per_weight=job.plan.bits_per_weight,
        share={"index": share.index, "of": share.count, "shards": own_shards} if share else None,
    )


def begin(job: Job, output: Path, settings: Settings) -> OutputFolder:
    """The output folder with the job's plan in it, for other processes to carry out; raises what carry_out does at first."""
    with _opened(job, output, settings) as folder:
        return folder


def _opened(job: Job, output: Path, settings: Settings) -> AbstractContextManager[OutputFolder]:
    _check_places(job, output)
    return open_output(output, job.purpose(), Terms(job.output_nbytes, settings.is_forced, settings.is_joining))


def _check_places(job: Job, output: Path) -> None:
    """InputError where a file of the source or the output folder would be in the way."""
    for file in job.sidecars:
        if file.partition("/")[0] in {RECORD, *job.texts}:
            raise InputError(
                "file-name", f"{file}: the source has a folder where the result has a file; expected none", "Rename it."
            )
    if job.source.holds(output):
        detail = f"{output} lies inside the source; expected a folder outside it, so that the source stays as it is"
        raise InputError("output-in-source", detail, "Choose another: -o FOLDER.")


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
