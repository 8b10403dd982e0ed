"""Addresses of tensors; lay out and write safetensors files.

The header stands before the data, so every offset is known before the first weight is read;
safetensors_header.py reads it.
This module knows nothing of folders, models or quantization.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from fp4convert.errors import OutputError
from fp4convert.storage.disk import begin_flush, hash_file, reserve, told, write_error

SHAPES = 1 << 12  # that are remembered: models have few
# By one call: longer ones take pages 2 MB at a time, slow on virtual machines, and keep threads
# out.
WRITE_NBYTES = 64 << 10
FLUSH_NBYTES, LEAST_FLUSH_NBYTES = 4 << 20, 64 << 10  # that the disk is told to begin with
DEFAULT_METADATA = {"format": "pt"}  # transformers refuses a shard that does not say so
# What says that tensors are quantized: written anew, or left out.
ENGINE_NOTES = ("_quantization_metadata",)
WEIGHT = ".weight"  # how the name of a linear layer's tensor ends
DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


class TensorRef(NamedTuple):
    """The address of one stored tensor; holds no data.

    A tuple: its fields, in this order, are part of the keys of tasks.

    dtype  safetensors' name, or GGUF's name of a type of blocks, whose shape counts bytes
    file   name of the shard, relative to its checkpoint
    start  absolute byte offset in that file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@lru_cache(SHAPES)
def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Count the bytes of a tensor of such a TensorRef."""
    return math.prod(shape) * DTYPE_BITS.get(dtype, 8) // 8


def total_nbytes(refs: Iterable[TensorRef]) -> int:
    """Count the bytes of all these tensors.

    Without the property of each, which takes a call more.
    """
    return sum([nbytes_of(ref.dtype, ref.shape) for ref in refs])


class TensorSpec(NamedTuple):
    """A tensor to be written: everything but its place.

    is_apart  it goes into the second file of its shard, the one for scales alone
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_apart: bool = False


class Frame(Protocol):
    """What a file holds beside its tensors, and how it places them.

    container            safetensors or gguf
    reads_global_scales  engines that read such a file apply the global scales in it
    alignment  of which the whole file is a multiple
    """

    container: ClassVar[str]

    @property
    def reads_global_scales(self) -> bool: ...

    @property
    def alignment(self) -> int: ...

    def lay_out(
        self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]
    ) -> tuple[bytes, tuple[TensorRef, ...]]:
        """Return the bytes before the tensors, and each one's address.

        The addresses are in the order of the file.

        notes  what engines want to read in the file itself, by its key
        """


@dataclass(frozen=True, slots=True)
class Header:
    """What one shard says of itself.

    nbytes   of the file
    tensors  in the order of the file
    """

    file: str
    nbytes: int
    tensors: tuple[TensorRef, ...]
    frame: Frame


@dataclass(frozen=True, slots=True)
class SafetensorsFrame:
    """A safetensors file's __metadata__."""

    metadata: dict[str, str]
    container: ClassVar[str] = "safetensors"
    reads_global_scales: ClassVar[bool] = True
    alignment: ClassVar[int] = 1

    def lay_out(
        self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]
    ) -> tuple[bytes, tuple[TensorRef, ...]]:
        """Return a shard's header, and the address of each tensor in it.

        Wider dtypes stand first, so that every tensor is aligned to its own type, then names
        decide: the bytes do not depend on the order of `specs`, and an artifact carried to another
        dialect and back is the same file.
        """
        ordered = sorted(sorted(specs), key=lambda spec: -DTYPE_BITS[spec.dtype])
        kept = {key: value for key, value in self.metadata.items() if key not in ENGINE_NOTES}
        metadata = DEFAULT_METADATA | kept | notes
        text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
        entries = [f'"__metadata__":{text}']
        places, end = [], 0
        # What json.dumps spells so too, in twice the time: tests/storage/test_safetensors.py.
        for name, dtype, shape, _ in ordered:
            begin, end = end, end + nbytes_of(dtype, shape)
            sizes = ",".join(map(str, shape))
            fields = f'"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]'
            entries.append(f"{encode_basestring(name)}:{{{fields}}}")
            places.append(begin)
        header = f"{{{','.join(entries)}}}".encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        refs = tuple(
            TensorRef(spec.name, spec.dtype, spec.shape, file, start + place)
            for spec, place in zip(ordered, places, strict=True)
        )
        return len(header).to_bytes(8, "little") + header, refs


class ShardWriter:
    """One shard that is being written.

    The header first, then each tensor's bytes at the place that the plan gave it; zeros between.
    Threads may append to different tensors at once.
    """

    def __init__(
        self, path: Path, header: bytes, outputs: Sequence[TensorRef], nbytes: int
    ) -> None:
        self.path = path
        self._outputs = outputs
        self._nbytes = nbytes
        self._is_stopped = False
        self.begin_again()
        with told(path, self._nbytes):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            reserve(self._fd, nbytes)
            os.ftruncate(self._fd, nbytes)
            self._pwrite(memoryview(header), 0)

    def begin_again(self) -> None:
        """Take nothing of what was appended for written."""
        self._filled = {ref.name: 0 for ref in self._outputs}

    def append(self, ref: TensorRef, data: memoryview) -> None:
        """Write the next bytes of an output.

        On Linux the disk begins with them, so that the end waits for little.
        """
        flat, before = data.cast("B"), self._filled[ref.name]
        after = before + flat.nbytes
        try:
            self._pwrite(flat, ref.start + before)
        except OSError as error:
            raise write_error(self.path, error, self._nbytes) from error
        self._filled[ref.name] = after
        first, last = (nbytes // FLUSH_NBYTES * FLUSH_NBYTES for nbytes in (before, after))
        if after == ref.nbytes and after - first >= LEAST_FLUSH_NBYTES:
            last = after
        if last > first:
            begin_flush(self._fd, ref.start + first, last - first)

    def _pwrite(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._fd, data[:WRITE_NBYTES], offset)
            data, offset = data[written:], offset + written

    def finish(self) -> str:
        """Flush to the disk and close; return the sha256.

        Every output must be whole.  The hash is taken while the disk works.
        """
        short = [ref.name for ref in self._outputs if self._filled[ref.name] != ref.nbytes]
        if short:
            raise RuntimeError(f"{self.path.name}: {short[0]!r} was not filled")
        from concurrent.futures import ThreadPoolExecutor

        with told(self.path, self._nbytes), ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(os.fsync, self._fd)
            sha256 = hash_file(self.path, self._check_stopped)
            flushed.result()
        self._close()
        return sha256

    def stop(self) -> None:
        """Make `finish`, in another thread, end soon with an OutputError."""
        self._is_stopped = True

    def _check_stopped(self, nbytes: int) -> None:
        if self._is_stopped:
            raise OutputError("stopped", f"{self.path.name} was not finished")

    def discard(self) -> None:
        """Close, and leave nothing behind."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
