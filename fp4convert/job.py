"""One conversion from its plan to its last byte: shards, then small files, and last the one that says it is finished.

No decisions here: the plan made them all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from fp4convert.artifact import RECORD
from fp4convert.errors import InputError, NumericError, SourceError
from fp4convert.output import OutputFolder, Purpose, TaskWriter, open_output
from fp4convert.pieces import CORRUPT
from fp4convert.sources import Source
from fp4convert.tasks import Plan, Task
from fp4convert.workers import Settings, UnsoundShardError, Worker, fill_shard


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished conversion tells; the keys of --json."""

    output: str
    format: str
    dialect: str | None
    scale_rule: str | None
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str
    carried: dict[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The document; `carried` where something was transcoded."""
        return {key: value for key, value in asdict(self).items() if key != "carried" or value is not None}


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion.

    texts     small files of ours, in the order in which they are written after the shards
    last      the file whose presence says that the folder is finished
    replaced  files of the source that do not travel, because ours take their place
    """

    source: Source
    plan: Plan
    texts: dict[str, str]
    last: str
    replaced: frozenset[str]

    @property
    def sidecars(self) -> list[str]:
        return [file for file in self.source.checkpoint.sidecars if file not in self.replaced]

    @property
    def output_nbytes(self) -> int:
        """Everything that will be written, but for the last record."""
        small = sum(len(text.encode("utf-8", "surrogatepass")) for text in self.texts.values())
        return self.plan.output_bytes + small + sum(self.source.file_nbytes(file) for file in self.sidecars)

    def purpose(self) -> Purpose:
        """What the output folder remembers of this job, to know it again."""
        shards = self.source.checkpoint.shards
        headers = [[shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]] for shard in shards]
        return Purpose(
            identity={"source": _sha256(headers), "format": self.plan.target.format, "dialect": self.plan.target.dialect},
            traits={
                "the version of fp4convert": version("fp4convert"),
                "the options": _sha256([asdict(self.plan.target), self.plan.quantized, self.texts]),
                "the source's files or their times": _sha256([self.source.checkpoint.stamps, self.sidecars]),
            },
            files=(*(shard.file for shard in self.plan.shards), *self.sidecars, *self.texts),
            last=self.last,
            origin={"repo": self.source.checkpoint.repo, "revision": self.source.checkpoint.revision},
        )


class _Filler:
    """Fills the shards of one task after the other.

    unsound  the error of every tensor because of which a shard cannot be finished, by its name
    """

    def __init__(self, job: Job, worker: Worker, settings: Settings) -> None:
        self._source = job.source
        self._worker = worker
        self._settings = settings
        self.unsound: dict[str, NumericError] = {}

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
            return False
        for file in task.sources:
            self._source.check_unchanged(file)
        return True


def carry_out(
    job: Job,
    worker: Worker,
    output: Path,
    settings: Settings,
    conclude: Callable[[OutputFolder], None] = lambda folder: None,
) -> Result:
    """Do all of a job that is not done yet, and tell what came of it.

    conclude  writes the job's last file, where that is none of its texts or shards
    Raises    InputError for an output that cannot be there; NumericError, after all sound shards are written, where weights are
              NaN or Inf; SourceError where the source changed or is gone; OutputError as open_output does
    """
    started = time.monotonic()
    _check_places(job, output)
    filler = _Filler(job, worker, settings)
    with _stopping(job.source), open_output(output, job.purpose(), job.output_nbytes, settings.is_forced) as folder:
        folder.write_shards((task for task in job.plan.tasks if not folder.adopt(task)), filler.fill)
        if filler.unsound:
            raise _summary(list(filler.unsound.values()))
        for shard in job.source.checkpoint.shards:
            job.source.check_unchanged(shard.file)
        for file in job.sidecars:
            with job.source.open_file(file) as stream:
                folder.write_copy(file, stream)
        for file, text in job.texts.items():
            folder.write_text(file, text)
        conclude(folder)
        digest, output_bytes = folder.digest(), folder.nbytes()
    actions = Counter(step.action for step in job.plan.steps)
    return Result(
        output=str(output),
        format=job.plan.target.format,
        dialect=job.plan.target.dialect,
        scale_rule=job.plan.target.scale_rule,
        device=worker.device,
        source_bytes=job.source.checkpoint.nbytes,
        output_bytes=output_bytes,
        seconds=round(time.monotonic() - started, 3),
        tensors={worker.made: actions[worker.action], "copied": actions["copy"], "skipped": actions["skip"]},
        digest=digest,
    )


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


@contextmanager
def _stopping(source: Source) -> Iterator[None]:
    """Leaves no thread that reads behind where something ends the work early."""
    try:
        yield
    except BaseException:
        source.stop()
        raise


def _summary(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors, with the options that complete the run."""
    lines = "\n".join(error.message for error in errors)
    next_step = errors[0].next_step
    if errors[0].code == "not-finite":
        next_step = f"Run the same command again with {' '.join(error.next_step for error in errors)}"
    return NumericError(errors[0].code, lines, next_step, errors[0].tensor)


def as_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
