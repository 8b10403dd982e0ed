"""Keep an unfinished calibration in a folder; write the finished file.

An interrupted run goes on from there:

.FILE.calibration/for.json            the settings of the run; a run with equal ones continues it
.FILE.calibration/lock                held by the process at work
.FILE.calibration/model/              config.json and the tokenizer's files, no code
.FILE.calibration/tokens.npz          the samples
.FILE.calibration/hidden-0-00007      input of the next layer for a batch; hidden-1 its output, in
                                      turns
.FILE.calibration/part-00003.*        statistics of a layer, with a remark
.FILE.calibration/losses-00000.json   losses of outputs by some parts; runs/ has their hidden states
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from fp4convert.calibration.calibration_file import FORMAT, VERSION, header_of
from fp4convert.calibration.fingerprint import fingerprint_of, weights_of
from fp4convert.calibration.model import Skeleton
from fp4convert.calibration.moments import block_width
from fp4convert.calibration.statistics import DTYPES
from fp4convert.errors import Fp4Error, InputError, OutputError, shell_line
from fp4convert.process import Stopped, memory_nbytes
from fp4convert.progress import size_text
from fp4convert.recipes.recipe import group_members, scale_groups
from fp4convert.storage.disk import hash_file, write_errors_at
from fp4convert.storage.safetensors import SafetensorsFrame, TensorRef, TensorSpec
from fp4convert.storage.shard_writer import ShardWriter, difference_from_package
from fp4convert.storage.source import Source
from fp4convert.storage.system import free_nbytes

LARGEST_NBYTES = 5 * 10**9  # of tensors in one file
COPY_NBYTES = 8 << 20
LESS = "--gram block:128 takes less"
SAMPLES_FILE = "tokens.npz"
LOCK_FILE = "lock"  # held by the process at work; empty
NOTE_FILE = "for.json"  # what the folder was made for
AROUND = 99_999  # the part of what is outside the layers
LOSSES = 100_000  # the part of what outputs lose
_NAMES = {kind: name for name, kind in DTYPES.items()}


def part_notes(source: Source) -> dict[str, str]:
    """Return the notes that name the model and the weights of a source."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint_of(source),
        "weights": weights_of(source),
    }


def write_part(
    path: Path, statistics: Mapping[str, NDArray[np.generic]], notes: Mapping[str, str]
) -> str:
    """Write arrays as one safetensors file, and return its sha256.

    statistics  of float32, float16 or int64; the same bytes for the same arrays
    notes       those of `part_notes`, and for a whole file the others that the head of
                calibration_file.py has
    """
    specs = [
        TensorSpec(name, _NAMES[array.dtype], array.shape) for name, array in statistics.items()
    ]
    header, refs = SafetensorsFrame(dict(notes)).lay_out(path.name, specs, {})
    with _shard_writer(path, header, refs) as writer:
        for ref in refs:
            if ref.nbytes:
                array = np.ascontiguousarray(statistics[ref.name])
                writer.append(ref, array.reshape(-1).view(np.uint8).data)
        return writer.finish()


def read_part(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read the arrays of a part."""
    found: dict[str, NDArray[np.generic]] = {}
    for ref in header_of(path)[1]:
        kind, count = DTYPES[ref.dtype], int(np.prod(ref.shape))
        found[ref.name] = np.fromfile(path, kind, count, offset=ref.start).reshape(ref.shape)
    return found


def join_parts(
    path: Path,
    parts: Sequence[Path],
    notes: Mapping[str, str],
    largest_nbytes: int = LARGEST_NBYTES,
) -> tuple[str, int]:
    """Join the parts into the file, under its final name at once.

    notes           of calibration_file.py, without `parts`
    largest_nbytes  beyond it PATH is an index, and the parts stay files:
                    STEM-00001-of-00007.safetensors beside it
    Returns         the sha256 of the file, and the size of all files
    """
    found = [(part, ref) for part in parts for ref in header_of(part)[1]]
    temp, beside = path.with_name(f".{path.name}.new"), 0
    if sum(ref.nbytes for _, ref in found) <= largest_nbytes:
        sha256 = _copy_parts(temp, found, notes)
    else:
        with write_errors_at(path):
            sums = {}
            for number, part in enumerate(parts, 1):
                file = path.with_name(f"{path.stem}-{number:05}-of-{len(parts):05}.safetensors")
                file.unlink(missing_ok=True)
                os.link(part, file)
                sums[file.name] = hash_file(file)
                beside += file.stat().st_size
            metadata = {**notes, "parts": json.dumps(sums)}
            temp.write_text(json.dumps({"metadata": metadata}, indent=1, sort_keys=True))
            sha256 = hash_file(temp)
    with write_errors_at(path):
        nbytes = temp.stat().st_size + beside
        os.replace(temp, path)
    return sha256, nbytes


def _copy_parts(
    temp: Path, found: Sequence[tuple[Path, TensorRef]], notes: Mapping[str, str]
) -> str:
    """Copy all tensors of the parts into one file, and return its sha256."""
    specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for _, ref in found]
    header, places = SafetensorsFrame(dict(notes)).lay_out(temp.name, specs, {})
    where = {ref.name: (part, ref) for part, ref in found}
    with _shard_writer(temp, header, places) as writer:
        for place in places:
            part, ref = where[place.name]
            with part.open("rb") as stream:
                stream.seek(ref.start)
                for done in range(0, ref.nbytes, COPY_NBYTES):
                    piece = stream.read(min(COPY_NBYTES, ref.nbytes - done))
                    writer.append(place, memoryview(piece))
        return writer.finish()


@contextmanager
def _shard_writer(path: Path, header: bytes, refs: Sequence[TensorRef]) -> Iterator[ShardWriter]:
    """Open a writer that leaves nothing behind unless it is finished.

    The package safetensors writes metadata in a random order, and plans and records name a
    calibration by its bytes.  Its reader checks the finished file.
    """
    writer = ShardWriter(path, header, refs, len(header) + sum(ref.nbytes for ref in refs))
    try:
        yield writer
        if difference := difference_from_package(path, refs):
            raise RuntimeError(f"{path.name} {difference}")
    except BaseException:
        writer.discard()
        raise


class Needs(NamedTuple):
    """The room that is needed at most; layers with a shared input take less.

    statistics_nbytes  of the file, and of its parts
    hidden_nbytes      of hidden states of all samples, before the first layer, before and behind
                       the current one
    gram_nbytes        of the Gram matrices of one layer, all in memory at once
    """

    statistics_nbytes: int
    hidden_nbytes: int
    gram_nbytes: int

    def words(self) -> str:
        """Describe the needs for a person."""
        file, hidden = size_text(self.statistics_nbytes), size_text(self.hidden_nbytes)
        text = f"statistics take up to {file}, temporary hidden states {hidden}"
        if self.gram_nbytes:
            text += f", Gram matrices of a layer {size_text(self.gram_nbytes)} of memory"
        return text

    def check(self, output: Path, state: Path, device: torch.device) -> None:
        """Raise OutputError or InputError for too little room.

        state  the folder, with files that need no room again
        """
        with write_errors_at(state):
            there = sum(
                path.stat().st_size for kind in ("hidden-*", "part-*") for path in state.glob(kind)
            )
            free = free_nbytes(state)
        # Statistics are there twice where parts are joined to one file.
        times = 2 if self.statistics_nbytes <= LARGEST_NBYTES else 1
        more = times * self.statistics_nbytes + self.hidden_nbytes - there
        if more > free:
            detail = f"{output} needs up to {more:,} bytes of disk, temporary files included"
            next_step = "Free some space, or choose another disk: -o FILE"
            next_step += f"; {LESS}." if self.gram_nbytes else "."
            raise OutputError("disk-full", f"{detail}, its disk has {free:,} free", next_step)
        memory = memory_nbytes()
        if device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(device)[1])
        if self.gram_nbytes > memory:
            detail = f"Gram matrices of one layer take up to {self.gram_nbytes:,} bytes of memory"
            detail += f", and {device} has {memory:,}; expected them to fit"
            raise InputError("gram-memory", detail, f"Choose smaller ones: {LESS}.")


def needs_of(
    skeleton: Skeleton, gram: str, tokens: int, config: dict[str, object], streams: int = 0
) -> Needs:
    """Estimate the room for so many tokens.

    Members of a scale group (q, k and v; gate and up) share their input.
    streams  runs of every batch where targets are corrected; then inputs of a layer are kept
    """
    groups = scale_groups(skeleton.seats, group_members(config))
    statistics = 0
    grams: dict[str | None, int] = defaultdict(int)
    inputs: dict[str | None, int] = defaultdict(int)
    holders: set[Hashable] = set()
    for module, seat in skeleton.seats.items():
        holder = groups.get(module, module)
        if holder in holders or isinstance(skeleton.module(seat.path), torch.nn.Embedding):
            continue
        holders.add(holder)
        columns = skeleton.linears[module].shape[1]
        width = block_width(gram, columns)
        matrix = 4 * -(-columns // width) * width * width if width else 0
        statistics += 4 * columns * (2 if gram == "none" else 3) + matrix * (2 if streams else 1)
        layer = skeleton.layer_above(seat.path)
        grams[layer] += matrix * (3 if streams else 1)  # H, a sum beside it, and its solution
        inputs[layer] += 4 * tokens * columns if streams else 0
    hidden = int(getattr(skeleton.model.config.get_text_config(), "hidden_size", 0))
    states = 3 * 4 * tokens * hidden * max(1, streams) + max(inputs.values(), default=0)
    return Needs(statistics, states, max(grams.values(), default=0))


def state_of(output: Path) -> Path:
    """Return the folder beside the file."""
    return output.with_name(f".{output.name}.calibration")


@contextmanager
def kept_state(output: Path, purpose: str, tell: Callable[[str], None]) -> Iterator[Path]:
    """Lock the folder beside the file for this process.

    A folder with other settings is emptied.  It is removed after an error that a new run would meet
    again, or that comes before there are samples.
    Raises OutputError where another process holds it, or where it cannot be written
    """
    state = state_of(output)
    made = [place for place in (state, *state.absolute().parents) if not place.exists()]
    with write_errors_at(state):
        # A folder that no calibration made is refused: what is in it would be removed.
        others = state.exists() and any(
            path.name != LOCK_FILE or path.stat().st_size for path in state.iterdir()
        )
        if state.is_symlink() or (others and not (state / NOTE_FILE).is_file()):
            detail = f"{state} is not a folder made by fp4convert, or is a link"
            detail += "; a calibration keeps its parts there"
            raise OutputError("foreign-output", detail, "Move it, or choose another file: -o FILE.")
    with write_errors_at(state):
        state.mkdir(parents=True, exist_ok=True)
        lock = FileLock(state / LOCK_FILE, timeout=0, mode=0o666)
        try:
            lock.acquire()
        except Timeout:
            detail = f"{output} is being made by another process"
            next_step = "Wait for it, or choose another file: -o FILE."
            raise OutputError("locked", detail, next_step) from None
    with lock:
        try:
            with write_errors_at(state):
                _begin_state(state, purpose, tell)
            yield state
        except Fp4Error as error:
            if isinstance(error, InputError) or not (state / SAMPLES_FILE).exists():
                shutil.rmtree(state, ignore_errors=True)
                with suppress(OSError):  # somebody else's files are in one by now
                    for place in made[1:]:
                        place.rmdir()
            raise


@contextmanager
def reading_kept(path: Path) -> Iterator[None]:
    """Raise OutputError for a file of the folder that is not as it was kept.

    It is named with the folder: without that a run begins anew.
    """
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        detail = f"{path}: cannot be read ({why}); expected what an earlier run kept there"
        step = f"Remove the folder, and the calibration begins anew: {shell_line(path.parent)}"
        raise OutputError("damaged", detail, step) from None


def _begin_state(state: Path, purpose: str, tell: Callable[[str], None]) -> None:
    """Empty a folder unless it is for the same purpose."""
    note = state / NOTE_FILE
    was = note.read_text(encoding="utf-8") if note.exists() else None
    if was == purpose:
        tell(f"going on with what {state} holds")
        return
    if was is not None:
        tell(f"{state} is of another source or other options: started again")
    for path in state.iterdir():
        if path.name != LOCK_FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    note.write_text(purpose, encoding="utf-8")


@contextmanager
def interruptible(output: Path) -> Iterator[None]:
    """Name the files that stay after an interruption."""
    try:
        yield
    except Stopped as stopped:
        state = state_of(output)
        is_begun = any(state.glob("part-*.json"))
        stopped.kept = (
            f"finished layers are kept in {state}" if is_begun else "no layer was finished"
        )
        raise


def part_file(state: Path, number: int) -> Path:
    """Return the path of the statistics of a layer."""
    return state / f"part-{number:05}.safetensors"


def remark_file(state: Path, number: int) -> Path:
    """Return the path of the remark on a part.

    A layer without it is not finished.
    """
    return part_file(state, number).with_suffix(".json")
