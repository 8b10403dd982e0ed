"""The work inside a shard: threads that take scale groups, largest first, and append what the plan says.

A backend turns a group into panels of whole rows, so that memory does not grow with the tensor.
"""

from __future__ import annotations

import glob
import shlex
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import numpy as np

from fp4convert.artifact import Artifact
from fp4convert.backends import Backend, processors
from fp4convert.carrying import Carrier
from fp4convert.codec import FLOAT_DTYPES
from fp4convert.dialects import Speller, dialect_named, form_of
from fp4convert.errors import DeviceError, NumericError, SourceError
from fp4convert.formats import (
    FLOAT_TYPES,
    GLOBAL_RANGE,
    PANEL_ELEMENTS,
    Matrix,
    Quantized,
    format_named,
)
from fp4convert.output import OnNamed, TaskWriter
from fp4convert.parts import Share
from fp4convert.pieces import CORRUPT
from fp4convert.progress import Phases
from fp4convert.recipe import Target
from fp4convert.shard import TensorRef
from fp4convert.sources import Source
from fp4convert.spelling import Part
from fp4convert.stacks import Rows, Slot, alternate, rows_of
from fp4convert.tasks import Action, Step, Task

COPY_NBYTES = 8 << 20
MATRIX_DIMENSIONS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """How to work; nothing here changes a byte of the result.

    workers     threads; 0 is as many as the device serves best
    phases      learns how far the work is
    is_forced   files of another, finished plan in the output folder may go
    is_joining  one of several processes that begin together: none of them may replace a plan
    share       the part of the tasks that this process does; None for all that nobody else does
    tell        gets a line for people when everything has to wait
    named   called with the path, the name and the sha256 of every file that this process has finished
    """

    device: str = "auto"
    workers: int = 0
    is_forced: bool = False
    phases: Phases = field(default_factory=Phases)
    is_joining: bool = False
    share: Share | None = None
    tell: Callable[[str], None] = lambda line: None
    named: OnNamed = lambda path, file, sha256: None


class UnsoundShardError(Exception):
    """A shard that cannot be finished, because of these tensors."""

    def __init__(self, errors: list[NumericError]) -> None:
        super().__init__()
        self.errors = errors


class Worker(Protocol):
    """Does the steps of one scale group of one shard, or of one tensor."""

    source: Source  # what is read
    device: str
    threads: int  # how many groups at once serve it best
    action: Action  # what its steps are called in a plan
    made: str  # what its tensors are called afterwards

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None: ...


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
        data = self.source.read_range(self.ref, first * self._row_nbytes, last * self._row_nbytes)
        return Matrix(data, self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        self.source.read_into(self.ref, first * self._row_nbytes, buffer)


class Quantizer:
    """Quantizes the members of a scale group under their common amax; copies what stays."""

    action: Action = "quantize"
    made = "quantized"

    def __init__(self, source: Source, target: Target, backend: Backend) -> None:
        self.source = source
        self._backend = backend
        self.format = format_named(target.format)
        self._rule = target.scale_rule or self.format.default_rule
        dialect = dialect_named(str(target.dialect))
        self._given_amax = GLOBAL_RANGE if target.has_unit_scale else None
        self._speller = Speller(dialect, form_of(target), target.input_scale)
        self.device = backend.name
        self.threads = backend.threads

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        measured = steps[0].amax_of
        if not measured:
            return _copy(self.source, steps, writer, stop)
        try:
            members = [step.refs[0] for step in steps]
            room = self.source.room_for(sum(ref.nbytes for ref in members))
            with room, closing(self._panels(measured, members)) as panels:
                for number, own in groupby(panels, key=itemgetter(0)):
                    step = steps[number]
                    parts = self._speller.parts(step.module, step.shape, _noted(own, step, writer))
                    if not _append(step, parts, writer, stop):
                        return
        except NumericError:
            found = [error for ref in measured if (error := find_not_finite(self.source, ref))]
            if not found:
                detail = f"{self.device} found NaN or Inf in {measured[0].name}, which has none"
                raise DeviceError("device-failed", detail, "Run the same command again, or with --device cpu.") from None
            raise UnsoundShardError(found) from None

    def _panels(self, measured: Sequence[TensorRef], members: Sequence[TensorRef]) -> Generator[tuple[int, Quantized]]:
        group, own = ([_Stored(self.source, ref) for ref in refs] for refs in (measured, members))
        yield from self._backend.quantize_group(group, own, self.format, self._rule, self._given_amax)


def _noted(panels: Iterable[tuple[int, Quantized]], step: Step, writer: TaskWriter) -> Iterator[Quantized]:
    """The panels; the writer is told the global scale of a group with members in other shards, to be compared with theirs."""
    for _, q in panels:
        if step.group and q.global_scale is not None and len({ref.file for ref in step.amax_of}) > 1:
            writer.global_scales[step.group] = q.global_scale
        yield q


class Dequantizer:
    """Writes the values of four-bit modules; copies everything else."""

    action: Action = "dequantize"
    made = "dequantized"

    def __init__(self, artifact: Artifact, backend: Backend) -> None:
        self.source = artifact.source
        self._artifact = artifact
        self._backend = backend
        self.device = backend.name
        self.threads = backend.threads

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.action != "dequantize":
                _copy(self.source, [step], writer, stop)
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
        """The values in the order of the output: rows, or for a stack each of its matrices transposed."""
        stored, dtype = self._artifact.decode_stem(step.module), step.outputs[0].dtype
        if len(step.shape) == MATRIX_DIMENSIONS:
            yield from self._backend.dequantize_panels(stored, dtype)
            return
        experts, rows, columns = step.shape
        for first in range(0, experts * rows, rows):
            expert = rows_of(stored, Rows(step.module, first, first + rows))
            values = b"".join(self._backend.dequantize_panels(expert, dtype))
            matrix = np.frombuffer(values, FLOAT_DTYPES[dtype]).reshape(rows, columns)
            yield np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint8).data


class Transcoder:
    """Spells four-bit modules in another dialect; copies everything else."""

    action: Action = "transcode"
    made = "transcoded"
    device = "cpu"

    def __init__(self, artifact: Artifact, source: Source, carrier: Carrier, target: Target) -> None:
        self._artifact = artifact
        self.source = source  # of what is copied; modules are the artifact's
        self._carrier = carrier
        self._dialect = dialect_named(str(target.dialect))
        self._form = form_of(target)
        self.threads = processors()

    def __call__(self, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
        for step in steps:
            if step.action != "transcode":
                _copy(self.source, [step], writer, stop)
                continue
            speller = Speller(self._dialect, self._form, self._artifact.input_scale(step.slots[0][0].module))
            if not _append(step, speller.parts(step.module, step.shape, self._panels(step.slots)), writer, stop):
                return

    def _panels(self, slots: tuple[Slot, ...]) -> Iterator[Quantized]:
        for slot in slots:
            yield from alternate([rows_of(self._carrier.blocks(rows.module), rows) for rows in slot])


def _append(step: Step, parts: Iterator[Part], writer: TaskWriter, stop: threading.Event) -> bool:
    """Write parts at the places that the step has for their names; False where it was stopped before the last."""
    place = {output.name: output for output in step.outputs}
    for name, part in parts:
        if stop.is_set():
            return False
        writer.append(place[name], part)
    return True


def _copy(source: Source, steps: list[Step], writer: TaskWriter, stop: threading.Event) -> None:
    for step in steps:
        ref = step.refs[0]
        for start in range(0, ref.nbytes, COPY_NBYTES):
            if stop.is_set():
                return
            writer.append(step.outputs[0], source.read_range(ref, start, min(start + COPY_NBYTES, ref.nbytes)))


def find_not_finite(source: Source, ref: TensorRef) -> NumericError | None:
    """The error for a tensor that holds NaN or Inf: how many, and where the first is; None where all are finite."""
    dtype = np.dtype(FLOAT_DTYPES[ref.dtype])
    count, first, kind = 0, -1, ""
    for start in range(0, ref.nbytes, PANEL_ELEMENTS * dtype.itemsize):
        values = np.frombuffer(source.read_range(ref, start, min(start + PANEL_ELEMENTS * dtype.itemsize, ref.nbytes)), dtype)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size and not count:
            first, kind = start // dtype.itemsize + int(bad[0]), "NaN" if np.isnan(values[bad[0]]) else "Inf"
        count += bad.size
    if not count:
        return None
    index = [first // ref.shape[-1], first % ref.shape[-1]]
    detail = f"{ref.file}: {ref.name} has {count} values that are NaN or Inf, the first {kind} at {index}"
    return NumericError("not-finite", f"{detail}; weights must be finite", f"--exclude {_pattern(ref)}", ref.name)


def _pattern(ref: TensorRef) -> str:
    """A pattern for the shell that fits this module alone, whatever its name holds."""
    pattern = glob.escape(ref.name.removesuffix(".weight"))
    return shlex.quote(f"[r]{pattern[1:]}" if pattern.startswith("re:") else pattern)


def fill_shard(task: Task, writer: TaskWriter, worker: Worker, settings: Settings) -> None:
    """Do all steps of a shard in threads; raises UnsoundShardError after the sound ones are done."""
    stop = threading.Event()

    def do(steps: list[Step]) -> None:
        worker(steps, writer, stop)
        for step in steps:
            settings.phases.report(step.refs[0].name, step.source_bytes)

    with ThreadPoolExecutor(settings.workers or worker.threads) as pool:
        try:
            futures = [pool.submit(do, steps) for steps in _by_scale_group(task, worker.source.is_streamed)]
            unsound: list[NumericError] = []
            for future in futures:
                error = future.exception()
                if isinstance(error, UnsoundShardError):
                    unsound += error.errors
                elif error is not None:
                    raise error
        except BaseException:
            stop.set()
            worker.source.stop()
            pool.shutdown(cancel_futures=True)
            raise
    if unsound:
        raise UnsoundShardError(unsound)


def _by_scale_group(task: Task, is_streamed: bool) -> list[list[Step]]:
    """The steps of a shard, members of a scale group together: largest first, or as they lie in a file that is streamed."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for step in task.steps:
        gathered[step.group or step.refs[0].name].append(step)
    if is_streamed:
        return sorted(gathered.values(), key=lambda steps: min(step.refs[0].start for step in steps))
    return sorted(gathered.values(), key=lambda steps: -sum(step.source_bytes for step in steps))


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
