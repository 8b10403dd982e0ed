"""What a calibration on its way keeps in a folder beside its file, so that an interrupted run goes on:

.FILE.calibration/for.json            what the folder is for; a run with the same goes on where another ended
.FILE.calibration/lock                held by the process at work
.FILE.calibration/model/              config.json and the tokenizer's files, nothing that could be run
.FILE.calibration/tokens.npz          the samples
.FILE.calibration/hidden-0, hidden-1  what the next layer is given, and what it gives, float32
.FILE.calibration/part-00003.*        statistics of a layer, and what is to be said of them
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from fp4convert.disk import told
from fp4convert.errors import Fp4Error, InputError, OutputError
from fp4convert.stops import Stopped

SAMPLES = "tokens.npz"
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
        lock = (state / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            detail = f"{output} is being made by another process"
            raise OutputError("locked", detail, "Wait for it, or choose another file: -o FILE.") from None
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
        others = state.exists() and any(path.name != "lock" for path in state.iterdir())
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
        if path.name != "lock":
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
        found = np.fromfile(self._path, np.float32, count, offset=int(self._starts[number]) * width * 4)
        return torch.from_numpy(found.reshape(like))
