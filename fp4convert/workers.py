"""The work inside a shard: threads that take scale groups, largest first, and append what the plan says.

A backend turns a group into panels of whole rows, so that memory does not grow with the tensor.
"""

from __future__ import annotations

import glob
import shlex
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fp4convert.artifact import Artifact
from fp4convert.backends import Backend, processors
from fp4convert.codec import FLOAT_DTYPES
from fp4convert.dialects import dialect_named
from fp4convert.errors import DeviceError, NumericError
from fp4convert.formats import FLOAT_TYPES, PANEL_ELEMENTS, Format, Matrix, Quantized, format_named, row_panels
from fp4convert.plan import Action, Step, Task
from fp4convert.recast import NOTHING, Recast, global_exponent, largest_exponent, recast
from fp4convert.recipe import Target, group_members, scale_group
from fp4convert.shard import ShardWriter, TensorRef
from fp4convert.sources import Source

COPY_NBYTES = 8 << 20

Progress = Callable[[str, int], None]
"""Called with a tensor's name and how many of its source bytes are done."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to work; nothing here changes a byte of the result."""

    device: str = "auto"
    workers: int = 0  # threads; 0 is as many as the device serves best
    is_forced: bool = False
    progress: Progress = lambda tensor, nbytes: None


class UnsoundShardError(Exception):
    """A shard that cannot be finished, because of these tensors."""

    def __init__(self, errors: list[NumericError]) -> None:
        super().__init__()
        self.errors = errors


class Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    device: str
    threads: int  # how many groups at once serve it best
    action: Action  # what its steps are called in a plan
    made: str  # what its tensors are called afterwards

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stored:
    """Weights in a source."""

    source: Source
    ref: TensorRef

    @property
    def dtype(self) -> str:
        return self.ref.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.ref.shape
        return rows, columns

    @property
    def _row_nbytes(self) -> int:
        return self.shape[1] * FLOAT_TYPES[self.dtype].nbytes

    def rows(self, first: int, last: int) -> Matrix:
        data = self.source.read(self.ref)[first * self._row_nbytes : last * self._row_nbytes]
        return Matrix(data, self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        self.source.read_into(self.ref, first * self._row_nbytes, buffer)


class Quantizer:
    """Quantizes the members of a scale group under their common amax; copies what stays."""

    action: Action = "quantize"
    made = "quantized"

    def __init__(self, source: Source, target: Target, backend: Backend) -> None:
        self._source = source
        self._backend = backend
        self.format = format_named(target.format)
        self._input_scale = target.input_scale
        self._rule = target.scale_rule or self.format.default_rule
        self._dialect = dialect_named(str(target.dialect), self.format)
        self.device = backend.name
        self.threads = backend.threads

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
        measured = steps[0].amax_of
        if not measured:
            return _copy(self._source, steps, writer, stop)
        started: set[int] = set()
        try:
            with closing(self._panels(measured, [step.refs[0] for step in steps])) as panels:
                for number, q in panels:
                    if stop.is_set():
                        return
                    step = steps[number]
                    parts = self._dialect.encode(step.module, q)
                    if number not in started:
                        parts |= self._dialect.encode_global(step.module, q, self._input_scale)
                    _append(step, parts, writer)
                    started.add(number)
        except NumericError:
            found = [error for ref in measured if (error := find_not_finite(ref, self._source.read(ref)))]
            if not found:
                detail = f"{self.device} found NaN or Inf in {measured[0].name}, which has none"
                raise DeviceError("device-failed", detail, "Run the same command again, or with --device cpu.") from None
            raise UnsoundShardError(found) from None

    def _panels(self, measured: Sequence[TensorRef], members: Sequence[TensorRef]) -> Generator[tuple[int, Quantized]]:
        group, own = ([_Stored(self._source, ref) for ref in refs] for refs in (measured, members))
        yield from self._backend.quantize_group(group, own, self.format, self._rule)


class Dequantizer:
    """Writes the values of four-bit modules; copies everything else."""

    action: Action = "dequantize"
    made = "dequantized"

    def __init__(self, artifact: Artifact, backend: Backend) -> None:
        self._artifact = artifact
        self._backend = backend
        self.device = backend.name
        self.threads = backend.threads

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.action != "dequantize":
                _copy(self._artifact.source, [step], writer, stop)
                continue
            output = step.outputs[0]
            try:
                with closing(self._panels(step)) as panels:
                    for values in panels:
                        if stop.is_set():
                            return
                        writer.append(output, values)
            except NumericError as error:
                named = NumericError(error.code, f"{output.name}: {error.message}", error.next_step, output.name)
                raise UnsoundShardError([named]) from None

    def _panels(self, step: Step) -> Generator[memoryview]:
        yield from self._backend.dequantize_panels(self._artifact.decode(step.module), step.outputs[0].dtype)


class Transcoder:
    """Spells four-bit modules in another dialect; copies everything else."""

    action: Action = "transcode"
    made = "transcoded"
    device = "cpu"

    def __init__(self, artifact: Artifact, target: Target) -> None:
        self._artifact = artifact
        self._format = format_named(target.format)
        self._dialect = dialect_named(str(target.dialect), self._format)
        self.threads = processors()

    def __call__(self, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.action != "transcode":
                _copy(self._artifact.source, [step], writer, stop)
                continue
            for number, q in enumerate(carry(self._artifact, step.module, self._format)):
                if stop.is_set():
                    return
                parts = self._dialect.encode(step.module, q.rows)
                if number == 0:
                    parts |= self._dialect.encode_global(step.module, q.rows, self._artifact.input_scale(step.module))
                _append(step, parts, writer)


def carry(artifact: Artifact, module: str, fmt: Format) -> Iterator[Recast]:
    """The panels of a module, as they are or as NVFP4."""
    q = artifact.decode(module)
    exponent = global_exponent(_largest_of_group(artifact, module)) if fmt is not q.format else 0
    for first, last in row_panels(q.shape):
        rows = q.rows(first, last)
        yield recast(rows, exponent) if fmt is not q.format else Recast(rows, rows.block_scales.nbytes)


def _largest_of_group(artifact: Artifact, module: str) -> int:
    """The largest exponent of the modules that share a scale with that one."""
    group = scale_group(module, group_members(artifact.source.checkpoint.model_types))
    members = [f"{group.parent}.{member}".lstrip(".") for member in group.members] if group else [module]
    largest = NOTHING
    for member in (member for member in members if member in artifact.modules):
        q = artifact.decode(member)
        try:
            largest = max(largest, *(largest_exponent(q.rows(first, last)) for first, last in row_panels(q.shape)))
        except NumericError as error:
            raise NumericError(error.code, f"{member}: {error.message}", error.next_step, member) from None
    return largest


def _append(step: Step, parts: dict[str, memoryview], writer: ShardWriter) -> None:
    """Write parts at the places that the step has for their names."""
    place = {output.name: output for output in step.outputs}
    for name, part in parts.items():
        writer.append(place[name], part)


def _copy(source: Source, steps: list[Step], writer: ShardWriter, stop: threading.Event) -> None:
    for step in steps:
        data = source.read(step.refs[0])
        for start in range(0, data.nbytes, COPY_NBYTES):
            if stop.is_set():
                return
            writer.append(step.outputs[0], data[start : start + COPY_NBYTES])


def find_not_finite(ref: TensorRef, data: memoryview) -> NumericError | None:
    """The error for a tensor that holds NaN or Inf: how many, and where the first is; None where all are finite."""
    raw = np.frombuffer(data, FLOAT_DTYPES[ref.dtype])
    count, first = 0, -1
    for start in range(0, raw.size, PANEL_ELEMENTS):
        bad = np.flatnonzero(~np.isfinite(raw[start : start + PANEL_ELEMENTS]))
        if bad.size and not count:
            first = start + int(bad[0])
        count += bad.size
    if not count:
        return None
    kind = "NaN" if np.isnan(raw[first]) else "Inf"
    index = [first // ref.shape[-1], first % ref.shape[-1]]
    detail = f"{ref.file}: {ref.name} has {count} values that are NaN or Inf, the first {kind} at {index}"
    return NumericError("not-finite", f"{detail}; weights must be finite", f"--exclude {_pattern(ref)}", ref.name)


def _pattern(ref: TensorRef) -> str:
    """A pattern for the shell that fits this module alone, whatever its name holds."""
    pattern = glob.escape(ref.name.removesuffix(".weight"))
    return shlex.quote(f"[r]{pattern[1:]}" if pattern.startswith("re:") else pattern)


def fill_shard(task: Task, writer: ShardWriter, worker: Worker, settings: Settings) -> None:
    """Do all steps of a shard in threads; raises UnsoundShardError after the sound ones are done."""
    stop = threading.Event()

    def do(steps: list[Step]) -> None:
        worker(steps, writer, stop)
        for step in steps:
            settings.progress(step.refs[0].name, step.source_bytes)

    with ThreadPoolExecutor(settings.workers or worker.threads) as pool:
        futures = [pool.submit(do, steps) for steps in _by_scale_group(task)]
        try:
            unsound: list[NumericError] = []
            for future in futures:
                error = future.exception()
                if isinstance(error, UnsoundShardError):
                    unsound += error.errors
                elif error is not None:
                    raise error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if unsound:
        raise UnsoundShardError(unsound)


def _by_scale_group(task: Task) -> list[list[Step]]:
    """The steps of a shard, members of a scale group together, largest first."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        gathered[step.group or step.refs[0].name].append(step)
    return sorted(gathered.values(), key=lambda steps: -sum(step.source_bytes for step in steps))
