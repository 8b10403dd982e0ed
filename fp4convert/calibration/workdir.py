"""Keep an unfinished calibration in a folder; write the finished file.

An interrupted run goes on from there:

.FILE.calibration/for.json            what the folder is for; a run with the same goes on where another ended
.FILE.calibration/lock                held by the process at work
.FILE.calibration/model/              config.json and the tokenizer's files, nothing that could be run
.FILE.calibration/tokens.npz          the samples
.FILE.calibration/hidden-0, hidden-1  what the next layer is given, and what it gives, float32
.FILE.calibration/part-00003.*        statistics of a layer, and what is to be said of them
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.fingerprint import fingerprint_of, weights_of
from fp4convert.calibration.model import Skeleton
from fp4convert.calibration.observers import block_width
from fp4convert.calibration.statistics import DTYPES, FORMAT, VERSION, header_of
from fp4convert.errors import Fp4Error, InputError, OutputError
from fp4convert.numerics.backends.base import memory_nbytes
from fp4convert.process import Stopped
from fp4convert.progress import size_text
from fp4convert.recipes.recipe import group_members, scale_groups
from fp4convert.storage.disk import hash_file, told
from fp4convert.storage.safetensors import SafetensorsFrame, ShardWriter, TensorRef, TensorSpec
from fp4convert.storage.source import Source

LARGEST_NBYTES = 5 * 10**9  # of tensors in one file
COPY_NBYTES = 8 << 20
_NAMES = {kind: name for name, kind in DTYPES.items()}


def part_notes(source: Source) -> dict[str, str]:
    """The notes of every part and every file made from that source: of which model, of which weights."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint_of(source),
        "weights": weights_of(source),
    }


def write_part(
    path: Path, statistics: Mapping[str, NDArray[np.generic]], notes: Mapping[str, str]
) -> str:
    """Write arrays of float32, float16 or int64 as one safetensors file, the same bytes for the same arrays; its sha256.

    notes  those of `part_notes`, and for a whole file the others that the head of statistics.py has
    """
    specs = [
        TensorSpec(name, _NAMES[array.dtype], array.shape) for name, array in statistics.items()
    ]
    header, refs = SafetensorsFrame(dict(notes)).lay_out(path.name, specs, {})
    with _written(path, header, refs) as writer:
        for ref in refs:
            if ref.nbytes:
                writer.append(
                    ref, np.ascontiguousarray(statistics[ref.name]).reshape(-1).view(np.uint8).data
                )
        return writer.finish()


class Joined(NamedTuple):
    """A calibration that was written: what Calibration.sha256 will be, and the size of all its files."""

    sha256: str
    nbytes: int


def join_parts(
    path: Path,
    parts: Sequence[Path],
    notes: Mapping[str, str],
    largest_nbytes: int = LARGEST_NBYTES,
) -> Joined:
    """Make one calibration of what write_part wrote, under its final name at once.

    notes           as the head of statistics.py has them, but for `parts`
    largest_nbytes  beyond it PATH is an index, and the parts stay files: STEM-00001-of-00007.safetensors beside it
    """
    found = [(part, ref) for part in parts for ref in header_of(part)[1]]
    temp, beside = path.with_name(f".{path.name}.new"), 0
    if sum(ref.nbytes for _, ref in found) <= largest_nbytes:
        sha256 = _write_joined(temp, found, notes)
    else:
        names = [
            f"{path.stem}-{number:05}-of-{len(parts):05}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
        with told(path):
            for part, name in zip(parts, names, strict=True):
                path.with_name(name).unlink(missing_ok=True)
                os.link(part, path.with_name(name))
            sums = {name: hash_file(path.with_name(name)) for name in names}
            beside = sum(path.with_name(name).stat().st_size for name in names)
            temp.write_text(
                json.dumps(
                    {"metadata": {**notes, "parts": json.dumps(sums)}}, indent=1, sort_keys=True
                )
            )
            sha256 = hash_file(temp)
    with told(path):
        nbytes = temp.stat().st_size + beside
        os.replace(temp, path)
    return Joined(sha256, nbytes)


def _write_joined(
    temp: Path, found: Sequence[tuple[Path, TensorRef]], notes: Mapping[str, str]
) -> str:
    """One file of all tensors of the parts, copied piece by piece; its sha256."""
    specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for _, ref in found]
    header, places = SafetensorsFrame(dict(notes)).lay_out(temp.name, specs, {})
    where = {ref.name: (part, ref) for part, ref in found}
    with _written(temp, header, places) as writer:
        for place in places:
            part, ref = where[place.name]
            with part.open("rb") as stream:
                stream.seek(ref.start)
                for done in range(0, ref.nbytes, COPY_NBYTES):
                    writer.append(
                        place, memoryview(stream.read(min(COPY_NBYTES, ref.nbytes - done)))
                    )
        return writer.finish()


@contextmanager
def _written(path: Path, header: bytes, refs: Sequence[TensorRef]) -> Iterator[ShardWriter]:
    """A shard on its way, which leaves nothing behind where it is not finished."""
    writer = ShardWriter(path, header, refs, len(header) + sum(ref.nbytes for ref in refs))
    try:
        yield writer
    except BaseException:
        writer.discard()
        raise


LESS = "--gram block:128 takes less"


@dataclass(frozen=True, slots=True)
class Needs:
    """What is needed at most; layers that turn out to share their input take less.

    statistics_nbytes  of the file, and of the parts that it is joined from
    hidden_nbytes      of hidden states of all samples, before and behind a layer
    gram_nbytes        of the Gram matrices of one layer, all in memory at once
    """

    statistics_nbytes: int
    hidden_nbytes: int
    gram_nbytes: int

    @property
    def disk_nbytes(self) -> int:
        """Beside the file, and the file itself; parts that stay files are there once."""
        joined = self.statistics_nbytes if self.statistics_nbytes <= LARGEST_NBYTES else 0
        return self.statistics_nbytes + joined + self.hidden_nbytes

    def words(self) -> str:
        """For people."""
        grams = (
            f", Gram matrices of a layer {size_text(self.gram_nbytes)} of memory"
            if self.gram_nbytes
            else ""
        )
        file, hidden = size_text(self.statistics_nbytes), size_text(self.hidden_nbytes)
        return (
            f"statistics take up to {file}, hidden states {hidden} beside them until the end{grams}"
        )

    def check(self, output: Path, state: Path, device: torch.device) -> None:
        """OutputError where the disk has too little room beside what is in `state` already; InputError for too little memory."""
        with told(state):
            there = sum(
                path.stat().st_size for kind in ("hidden-*", "part-*") for path in state.glob(kind)
            )
            disk = os.statvfs(state)
        free, more = disk.f_bavail * disk.f_frsize, self.disk_nbytes - there
        if more > free:
            detail = f"{output} needs up to {more:,} bytes with what lies beside it until the end, its disk has {free:,} free"
            next_step = f"Free some space, or choose another disk: -o FILE{f'; {LESS}' if self.gram_nbytes else ''}."
            raise OutputError("disk-full", detail, next_step)
        memory = _memory_of(device)
        if self.gram_nbytes > memory:
            detail = f"Gram matrices of one layer take up to {self.gram_nbytes:,} bytes of memory, and {device} has {memory:,}"
            raise InputError(
                "gram-memory", f"{detail}; expected them to fit", f"Choose smaller ones: {LESS}."
            )


def needs_of(skeleton: Skeleton, gram: str, tokens: int, config: dict[str, object]) -> Needs:
    """What so many tokens take; members of a scale group (q, k and v; gate and up) share their input."""
    groups = scale_groups(skeleton.seats, group_members(config))
    statistics = 0
    grams: dict[str | None, int] = defaultdict(int)
    seen: set[Hashable] = set()
    for module, seat in skeleton.seats.items():
        holder = groups.get(module, module)
        if holder in seen or isinstance(skeleton.module(seat.path), torch.nn.Embedding):
            continue
        seen.add(holder)
        columns = skeleton.linears[module].shape[1]
        width = block_width(gram, columns)
        matrix = 4 * -(-columns // width) * width * width if width else 0
        statistics += 4 * columns * (2 if gram == "none" else 3) + matrix
        grams[skeleton.layer_of(seat)] += matrix
    hidden = int(getattr(skeleton.model.config.get_text_config(), "hidden_size", 0))
    return Needs(statistics, 2 * 4 * tokens * hidden, max(grams.values(), default=0))


def _memory_of(device: torch.device) -> int:
    """All that there is of the processor's, or of a GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return memory_nbytes()


SAMPLES = "tokens.npz"
LOCK = "lock"  # held by the process at work; empty
NOTE = "for.json"  # what the folder was made for


def state_of(output: Path) -> Path:
    """The folder beside the file."""
    return output.with_name(f".{output.name}.calibration")


@contextmanager
def kept_state(output: Path, purpose: str, tell: Callable[[str], None]) -> Iterator[Path]:
    """The folder beside the file, held by this process alone, emptied where it is for something else.

    It goes with whatever was made for it where an error ends the work that would end it again, or comes before there are samples.
    Raises OutputError where another process holds it, or where it cannot be written
    """
    state = state_of(output)
    made = [place for place in (state, *state.absolute().parents) if not place.exists()]
    _refuse_foreign(state)
    with told(state):
        state.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            detail = f"{output} is being made by another process"
            raise OutputError(
                "locked", detail, "Wait for it, or choose another file: -o FILE."
            ) from None
        try:
            with told(state):
                _begin(state, purpose, tell)
            yield state
        except Fp4Error as error:
            if isinstance(error, InputError) or not (state / SAMPLES).exists():
                shutil.rmtree(state, ignore_errors=True)
                with suppress(OSError):  # somebody else's files are in one by now
                    for place in made[1:]:
                        place.rmdir()
            raise


@contextmanager
def interruptible(output: Path) -> Iterator[None]:
    """Meanwhile a stop says what stays of the calibration."""
    try:
        yield
    except Stopped as stopped:
        state = state_of(output)
        is_begun = any(state.glob("part-*.json"))
        stopped.kept = f"finished layers stay in {state}" if is_begun else "no layer was finished"
        raise


def _refuse_foreign(state: Path) -> None:
    """OutputError where the folder is not one that a calibration made: what is in it would be removed."""
    with told(state):
        others = state.exists() and any(
            path.name != LOCK or path.stat().st_size for path in state.iterdir()
        )
        if state.is_symlink() or (others and not (state / NOTE).is_file()):
            detail = f"{state} is not a folder made by fp4convert, or is a link; a calibration keeps its parts there"
            raise OutputError("foreign-output", detail, "Move it, or choose another file: -o FILE.")


def _begin(state: Path, purpose: str, tell: Callable[[str], None]) -> None:
    note = state / NOTE
    was = note.read_text(encoding="utf-8") if note.exists() else None
    if was == purpose:
        tell(f"going on with what {state} holds")
        return
    if was is not None:
        tell(f"{state} is of another source or other options: started anew")
    for path in state.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    note.write_text(purpose, encoding="utf-8")


def part_file(state: Path, number: int) -> Path:
    """Where the statistics of a layer are."""
    return state / f"part-{number:05}.safetensors"


def remark_file(state: Path, number: int) -> Path:
    """Where it is said what a part holds: while it is absent, the layer is not finished."""
    return part_file(state, number).with_suffix(".json")


class Hidden:
    """Hidden states of all batches in one file, float32, in the order of the batches."""

    def __init__(self, path: Path, tokens: Sequence[int]) -> None:
        self._path = path
        self._starts = np.concatenate([[0], np.cumsum(tokens)])

    def put(self, number: int, hidden: torch.Tensor) -> None:
        data = hidden.detach().float().cpu().contiguous().numpy()
        width = data.size // int(self._starts[number + 1] - self._starts[number])
        with told(self._path), self._path.open("r+b" if self._path.exists() else "w+b") as out:
            out.seek(int(self._starts[number]) * width * data.itemsize)
            out.write(data.tobytes())

    def get(self, number: int, like: tuple[int, ...]) -> torch.Tensor:
        """Those of one batch, in a shape that begins with samples and length."""
        count = int(np.prod(like))
        width = count // int(self._starts[number + 1] - self._starts[number])
        found = np.fromfile(
            self._path, np.float32, count, offset=int(self._starts[number]) * width * 4
        )
        return torch.from_numpy(found.reshape(like))
