"""The loops: carry out a plan, shard by shard, and write the records that make the result an artifact.

No decisions here: the plan made them all.  Work inside a shard is handed out by scale group, largest first, to threads
that read mapped pages, call the backend on panels of whole rows, and write each result at the place the plan gave it.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from fp4convert.artifact import RECORD, Artifact, make_record
from fp4convert.backends import Backend, open_backend, processors
from fp4convert.dialects import dialect_named
from fp4convert.errors import InputError, NumericError
from fp4convert.formats import Matrix
from fp4convert.output import OutputFolder, Purpose, ShardWriter, open_output
from fp4convert.plan import Plan, Step, Task, plan_dequantize
from fp4convert.recipe import Recipe
from fp4convert.shard import TensorRef
from fp4convert.sources import INDEX, Source

PANEL_ELEMENTS = 4 << 20  # elements a worker holds at once: 8 MB of bf16 in, 2.3 MB out
COPY_NBYTES = 8 << 20
ITEM_NBYTES = {"BF16": 2, "F16": 2, "F32": 4}
BASE_NBYTES = 100 << 20  # the interpreter with its packages

Progress = Callable[[str, int], None]
"""Called with a tensor's name and how many of its source bytes are done."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to work; nothing here changes a byte of the result."""

    device: str = "auto"
    workers: int = 0  # threads; 0 is one per processor this process may use
    is_forced: bool = False
    progress: Progress = lambda tensor, nbytes: None


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished conversion tells; the keys of `quantize --json`."""

    output: str
    format: str
    dialect: object
    scale_rule: object
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan made by plan_quantize; the artifact's record is written last.

    Raises InputError for a device that is not there; OutputError as open_output does; NumericError, after all sound shards
    are written, where weights are NaN or Inf: then neither index nor records are written.
    """
    recipe = plan.recipe
    if recipe is None:
        raise RuntimeError("this plan does not quantize")
    records = dialect_named(recipe.dialect, recipe.format).records(recipe.format, plan.ignore, plan.quantized)
    texts = _index_text(plan)
    texts |= {file: _json(record) for file, record in records.items()}
    texts["config.json"] = _json({**source.checkpoint.config, "quantization_config": records["config.json"]})
    job = _Job(source, plan, texts, RECORD, frozenset({*texts, RECORD}))

    def conclude(folder: OutputFolder) -> None:
        folder.write_text(RECORD, _json(make_record(plan, version("fp4convert"), folder.hashes)))

    return _carry_out(job, _Quantizer(source, recipe, open_backend(settings.device)), output, settings, conclude)


def prepare_dequantize(artifact: Artifact, dtype: str) -> Plan:
    """The plan that `dequantize` carries out; InputError for an unknown dtype or an artifact with errors."""
    for finding in artifact.findings:
        if finding.level == "error":
            where = f"{finding.tensor}: " if finding.tensor else ""
            detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
            raise InputError("unsound-artifact", detail, "See: fp4convert inspect.", finding.tensor)
    return plan_dequantize(artifact.source.checkpoint, artifact.modules, dtype)


def dequantize(artifact: Artifact, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_dequantize: ordinary weights again, with the values that engines compute.

    Raises InputError for a device that is not there; NumericError beyond fp16's range; OutputError as open_output does.
    """
    source = artifact.source
    config = {key: value for key, value in source.checkpoint.config.items() if key != "quantization_config"}
    texts = {**_index_text(plan), "config.json": _json(config)}
    replaced = frozenset({*texts, RECORD, *artifact.spelling.records(artifact.format, (), ())})
    job = _Job(source, plan, texts, "config.json", replaced)
    return _carry_out(job, _Dequantizer(artifact, open_backend(settings.device)), output, settings)


def describe(plan: Plan, workers: int = 0) -> dict[str, object]:
    """The document of `quantize --dry-run --json`; memory is what workers hold beside mapped pages."""
    threads = workers or processors()
    widest = max((step.shape[1] for step in plan.steps if step.shape), default=0)
    return {
        "format": plan.target["format"],
        "dialect": plan.target["dialect"],
        "source_bytes": sum(step.source_bytes for step in plan.steps),
        "output_bytes": plan.output_bytes,
        "peak_memory_bytes": BASE_NBYTES + threads * max(PANEL_ELEMENTS, widest),
        "peak_disk_bytes": plan.output_bytes,
        "tensors": [
            {
                "name": step.refs[0].name,
                "action": step.action,
                "reason": step.reason,
                "group": step.group,
                "source_bytes": step.source_bytes,
                "output_bytes": step.output_bytes,
            }
            for step in plan.steps
        ],
        "warnings": list(plan.warnings),
    }


@dataclass(frozen=True, slots=True)
class _Job:
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

    def purpose(self) -> Purpose:
        shards = self.source.checkpoint.shards
        headers = [[shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]] for shard in shards]
        identity = {"source": _sha256(headers), "format": self.plan.target["format"], "dialect": self.plan.target["dialect"]}
        maker = f"fp4convert {version('fp4convert')}"
        plan_id = _sha256([maker, self.plan.target, [task.key for task in self.plan.tasks], self.sidecars, self.texts])
        files = (*(task.file for task in self.plan.tasks), *self.sidecars, *self.texts)
        return Purpose(maker, identity, plan_id, files, self.last)


class _Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    device: str

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None: ...


class _Quantizer:
    """Quantizes the members of a scale group under their common amax; copies what stays."""

    def __init__(self, source: Source, recipe: Recipe, backend: Backend) -> None:
        self._source = source
        self._recipe = recipe
        self._backend = backend
        self._dialect = dialect_named(recipe.dialect, recipe.format)
        self.device = backend.name

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
        if not steps[0].amax_of:
            return _copy(self._source, steps, writer, stop)
        group_amax = max(self._amax(ref) for ref in steps[0].amax_of)
        for step in steps:
            self._quantize(step, group_amax, writer, stop)

    def _amax(self, ref: TensorRef) -> float:
        data = self._source.read(ref)
        amax = self._backend.amax(Matrix(data, ref.dtype, (ref.shape[0], ref.shape[1])))
        if not math.isfinite(amax):
            raise not_finite(ref, data)
        return amax

    def _quantize(self, step: Step, group_amax: float, writer: ShardWriter, stop: threading.Event) -> None:
        (ref,), fmt, columns = step.refs, self._recipe.format, step.shape[1]
        data = self._source.read(ref)
        place = {output.name: output for output in step.outputs}
        for first, last in _panels(step):
            if stop.is_set():
                return
            panel = data[first * columns * ITEM_NBYTES[ref.dtype] : last * columns * ITEM_NBYTES[ref.dtype]]
            x = Matrix(panel, ref.dtype, (last - first, columns))
            q = self._backend.quantize(x, fmt, self._recipe.scale_rule, group_amax)
            parts = self._dialect.encode(step.module, q)
            if first == 0:
                parts |= self._dialect.encode_global(step.module, q)
            for name, part in parts.items():
                writer.append(place[name], part)


class _Dequantizer:
    """Writes the values of four-bit modules; copies everything else."""

    def __init__(self, artifact: Artifact, backend: Backend) -> None:
        self._artifact = artifact
        self._backend = backend
        self.device = backend.name

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.action != "dequantize":
                _copy(self._artifact.source, [step], writer, stop)
                continue
            q = self._artifact.decode(step.module)
            for first, last in _panels(step):
                if stop.is_set():
                    return
                output = step.outputs[0]
                try:
                    values = self._backend.dequantize(q.rows(first, last), output.dtype)
                except NumericError as error:
                    raise NumericError(error.code, f"{output.name}: {error.message}", error.next_step, output.name) from None
                writer.append(output, values)


def _panels(step: Step) -> Iterator[tuple[int, int]]:
    """Row ranges of about PANEL_ELEMENTS elements."""
    rows, columns = step.shape
    height = max(1, PANEL_ELEMENTS // columns)
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def _copy(source: Source, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
    for step in steps:
        data = source.read(step.refs[0])
        for start in range(0, data.nbytes, COPY_NBYTES):
            if stop.is_set():
                return
            writer.append(step.outputs[0], data[start : start + COPY_NBYTES])


def not_finite(ref: TensorRef, data: memoryview) -> NumericError:
    """The error for a tensor that holds NaN or Inf: how many, and where the first is."""
    import numpy as np

    from fp4convert.codec import FLOAT_DTYPES

    raw = np.frombuffer(bytes(data), FLOAT_DTYPES[ref.dtype])
    bad = np.flatnonzero(~np.isfinite(raw))
    kind = "NaN" if np.isnan(raw[bad[0]]) else "Inf"
    index = [int(bad[0]) // ref.shape[-1], int(bad[0]) % ref.shape[-1]]
    detail = f"{ref.file}: {ref.name} has {len(bad)} values that are NaN or Inf, the first {kind} at {index}"
    module = ref.name.removesuffix(".weight")
    return NumericError("not-finite", f"{detail}; weights must be finite", f"--exclude {shlex.quote(module)}", ref.name)


def _carry_out(
    job: _Job,
    worker: _Worker,
    output: Path,
    settings: Settings,
    conclude: Callable[[OutputFolder], None] = lambda folder: None,
) -> Result:
    started = time.monotonic()
    unsound: dict[str, NumericError] = {}
    with open_output(output, job.purpose(), job.plan.output_bytes, settings.is_forced) as folder:
        for task in job.plan.tasks:
            if not folder.adopt(task):
                try:
                    folder.write_shard(task, lambda writer, task=task: _fill(task, writer, worker, settings))  # type: ignore[misc]
                except _UnsoundShardError as found:
                    unsound |= {str(error.tensor): error for error in found.errors}
        if unsound:
            raise _summary(list(unsound.values()))
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
        format=str(job.plan.target["format"]),
        dialect=job.plan.target["dialect"],
        scale_rule=job.plan.target["scale_rule"],
        device=worker.device,
        source_bytes=job.source.checkpoint.nbytes,
        output_bytes=output_bytes,
        seconds=round(time.monotonic() - started, 3),
        tensors={
            "quantized": actions["quantize"] + actions["dequantize"],
            "copied": actions["copy"],
            "skipped": actions["skip"],
        },
        digest=digest,
    )


class _UnsoundShardError(Exception):
    """A shard that cannot be finished, because tensors in it are not finite."""

    def __init__(self, errors: list[NumericError]) -> None:
        super().__init__()
        self.errors = errors


def _fill(task: Task, writer: ShardWriter, worker: _Worker, settings: Settings) -> None:
    """Do all steps of a shard in threads; raises _UnsoundShardError after the sound ones are done."""
    stop = threading.Event()

    def do(steps: list[Step]) -> None:
        worker(steps, writer, stop)
        for step in steps:
            settings.progress(step.refs[0].name, step.source_bytes)

    with ThreadPoolExecutor(settings.workers or processors()) as pool:
        futures = [pool.submit(do, steps) for steps in _by_scale_group(task)]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
            for error in errors:
                if not isinstance(error, NumericError):
                    raise error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if errors:
        raise _UnsoundShardError([error for error in errors if isinstance(error, NumericError)])


def _by_scale_group(task: Task) -> list[list[Step]]:
    """The steps of a shard, members of a scale group together, largest first."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        gathered[step.group or step.refs[0].name].append(step)
    return sorted(gathered.values(), key=lambda steps: -sum(step.source_bytes for step in steps))


def _summary(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors, with the options that complete the run."""
    if errors[0].code != "not-finite":
        return errors[0]
    lines = "\n".join(error.message for error in errors)
    options = " ".join(error.next_step for error in errors)
    return NumericError("not-finite", lines, f"Run the same command again with {options}", errors[0].tensor)


def _index_text(plan: Plan) -> dict[str, str]:
    return {INDEX: _json(plan.index)} if len(plan.tasks) > 1 else {}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
