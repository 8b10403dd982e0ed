"""A calibration file on its way: one part for each part of a model, all joined into one file or an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration_file import DTYPES, FORMAT, VERSION, header_of
from fp4convert.disk import hash_file, told
from fp4convert.identity import fingerprint_of, weights_of
from fp4convert.shard import SafetensorsFrame, ShardWriter, TensorRef, TensorSpec
from fp4convert.sources import Source

LARGEST_NBYTES = 5 * 10**9  # of tensors in one file
COPY_NBYTES = 8 << 20
_NAMES = {kind: name for name, kind in DTYPES.items()}


def part_notes(source: Source) -> dict[str, str]:
    """The notes of every part and every file made from that source: of which model, of which weights."""
    return {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint_of(source), "weights": weights_of(source)}


def write_part(path: Path, statistics: Mapping[str, NDArray[np.generic]], notes: Mapping[str, str]) -> str:
    """Write arrays of float32, float16 or int64 as one safetensors file, the same bytes for the same arrays; its sha256.

    notes  those of `part_notes`, and for a whole file the others that the head of calibration_file.py has
    """
    specs = [TensorSpec(name, _NAMES[array.dtype], array.shape) for name, array in statistics.items()]
    header, refs = SafetensorsFrame(dict(notes)).lay_out(path.name, specs, {})
    with _written(path, header, refs) as writer:
        for ref in refs:
            if ref.nbytes:
                writer.append(ref, np.ascontiguousarray(statistics[ref.name]).reshape(-1).view(np.uint8).data)
        return writer.finish()


class Joined(NamedTuple):
    """A calibration that was written: what Calibration.sha256 will be, and the size of all its files."""

    sha256: str
    nbytes: int


def join_parts(path: Path, parts: Sequence[Path], notes: Mapping[str, str], largest_nbytes: int = LARGEST_NBYTES) -> Joined:
    """Make one calibration of what write_part wrote, under its final name at once.

    notes           as the head of calibration_file.py has them, but for `parts`
    largest_nbytes  beyond it PATH is an index, and the parts stay files: STEM-00001-of-00007.safetensors beside it
    """
    found = [(part, ref) for part in parts for ref in header_of(part)[1]]
    temp, beside = path.with_name(f".{path.name}.new"), 0
    if sum(ref.nbytes for _, ref in found) <= largest_nbytes:
        sha256 = _write_joined(temp, found, notes)
    else:
        names = [f"{path.stem}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        with told(path):
            for part, name in zip(parts, names, strict=True):
                path.with_name(name).unlink(missing_ok=True)
                os.link(part, path.with_name(name))
            sums = {name: hash_file(path.with_name(name)) for name in names}
            beside = sum(path.with_name(name).stat().st_size for name in names)
            temp.write_text(json.dumps({"metadata": {**notes, "parts": json.dumps(sums)}}, indent=1, sort_keys=True))
            sha256 = hash_file(temp)
    with told(path):
        nbytes = temp.stat().st_size + beside
        os.replace(temp, path)
    return Joined(sha256, nbytes)


def _write_joined(temp: Path, found: Sequence[tuple[Path, TensorRef]], notes: Mapping[str, str]) -> str:
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
                    writer.append(place, memoryview(stream.read(min(COPY_NBYTES, ref.nbytes - done))))
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
