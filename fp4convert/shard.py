"""safetensors bytes: a header parsed and checked, a header laid out, a shard written at the places the header gives.

The header stands before the data, so every offset is known before the first weight is read.  Checks follow the format's
own rules (huggingface/safetensors README, "Format", and its tensor.rs) and refuse whatever safetensors refuses.
This module knows nothing of folders, models or quantization.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn, Protocol, cast

from fp4convert.errors import InputError, OutputError

FLOAT_DIGITS = 300  # an integer of fewer digits fits a float64
HASH_NBYTES = 4 << 20  # read and hashed at once
DEPTH_LIMIT = 125  # of a value inside an entry; the reference reader allows 127 in all
HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference reader
DEFAULT_METADATA = {"format": "pt"}  # transformers refuses a shard that does not say so
ENGINE_NOTES = ("_quantization_metadata",)  # what says that tensors are quantized: written anew, or left out
WEIGHT = ".weight"  # how the name of a linear layer's tensor ends
DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The address of one stored tensor; holds no data.

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
        return self.elements * DTYPE_BITS.get(self.dtype, 8) // 8


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

    def lay_out(self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]) -> tuple[bytes, tuple[TensorRef, ...]]:
        """The bytes that stand before the tensors, and the address of each tensor, in the order of the file.

        notes  what engines want to read in the file itself, by its key
        """


@dataclass(frozen=True, slots=True)
class Header:
    """What one shard says of itself: its tensors in file order, its frame, its size in bytes."""

    file: str
    nbytes: int
    tensors: tuple[TensorRef, ...]
    frame: Frame


def read_header(file: str, nbytes: int, read: Callable[[int, int], bytes]) -> Header:
    """The checked header of a shard of `nbytes` bytes; `read(offset, length)` gives its bytes.

    Raises InputError on anything that safetensors refuses, naming the file, what was found and what was expected.
    """
    head = read(0, min(nbytes, 64))
    if head.startswith(b"version https://git-lfs"):
        raise _bad(file, "lfs-pointer", "is a Git LFS pointer, not the weights", "Fetch them: git lfs pull.")
    if nbytes < 8:
        raise _bad(file, "header-length", f"has {nbytes} bytes, shorter than the 8 bytes of a header length")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT or length > nbytes - 8:
        detail = f"gives a header length of {length}, but the file has {nbytes} bytes and the limit is {HEADER_LIMIT}"
        raise _bad(file, "header-length", detail)
    text = read(8, length)
    if not text.startswith(b"{"):
        raise _bad(file, "header", "has a header that does not begin with '{'; expected one JSON object")
    entries = parse_json_object(text, f"{file}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(file, "header", "has a header whose __metadata__ does not map strings to strings")
    refs = sorted((_entry(file, name, entry, 8 + length) for name, entry in entries.items()), key=_place)
    _check_tiling(file, refs, 8 + length, nbytes)
    return Header(file, nbytes, tuple(refs), SafetensorsFrame(metadata))


def parse_json_object(text: bytes, where: str, has_constants: bool = False) -> dict[str, object]:
    """A JSON object, strictly: UTF-8, no duplicate keys, numbers that fit a float.

    where          how messages name the text, such as "model.safetensors: header"
    has_constants  accept NaN and Infinity, which JSON lacks and model configs hold
    Raises         InputError
    """
    expected = "expected one JSON object"
    constant = float if has_constants else _refuse
    try:
        decoded = text.decode("utf-8")
        numbers: dict[str, Any] = {"parse_constant": constant, "parse_int": _integer, "parse_float": _finite}
        parsed = json.loads(decoded, object_pairs_hook=_unique(where), **numbers)
        if "\\u" in decoded:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("header-utf8", f"{where} is not UTF-8 at byte {error.start}; {expected}") from None
    except UnicodeEncodeError:
        raise InputError("header-utf8", f"{where} holds a lone surrogate, which is not UTF-8; {expected}") from None
    except (ValueError, RecursionError) as error:
        detail = "nesting too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError("header", f"{where} is not valid JSON ({detail[:100]}); {expected}") from None
    if not isinstance(parsed, dict):
        raise InputError("header", f"{where} is not a JSON object; {expected}")
    return parsed


def _unique(where: str) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise InputError("duplicate-key", f"{where} holds the duplicate key {twice!r}; expected each once")
        return built

    return build


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int | float:
    if len(digits) > FLOAT_DIGITS:
        _finite(digits)
    return -0.0 if digits == "-0" else int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else float(_refuse(digits))


def _depth(value: object) -> int:
    """How many lists and objects stand inside one another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _bad(file: str, code: str, detail: str, next_step: str = "Download the file again.") -> InputError:
    return InputError(code, f"{file}: {detail}", next_step)


def _place(ref: TensorRef) -> tuple[int, int]:
    return ref.start, ref.nbytes


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of non-negative 64-bit integers as a tuple, or None."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        return None
    return tuple(value)


def _entry(file: str, name: str, entry: object, data_start: int) -> TensorRef:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _bad(file, "header", f"header entry {name!r} lacks dtype, shape or data_offsets")
    if any(_depth(entry[key]) > DEPTH_LIMIT for key in entry.keys() - {"dtype", "shape", "data_offsets"}):
        raise _bad(file, "header", f"header entry {name!r} is nested too deep")
    dtype, shape, offsets = entry["dtype"], _counts(entry["shape"]), _counts(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(file, "dtype", f"{name!r} has the dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    if shape is None or math.prod(shape) >= 1 << 60:
        raise _bad(file, "shape", f"{name!r} has the impossible shape {str(entry['shape'])[:80]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(file, "offset", f"{name!r} has bad offsets {str(entry['data_offsets'])[:80]}; expected [begin, end]")
    bits, found = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if bits % 8:
        raise _bad(file, "shape", f"{name!r}: {dtype} of shape {list(shape)} does not end on a whole byte")
    if bits // 8 != found:
        raise _bad(file, "shape", f"{name!r}: {dtype} of shape {list(shape)} takes {bits // 8} bytes, its offsets {found}")
    return TensorRef(name, dtype, shape, file, data_start + offsets[0])


def _check_tiling(file: str, refs: Sequence[TensorRef], data_start: int, nbytes: int) -> None:
    """The tensors cover the data exactly: no overlap, no hole, nothing missing, nothing after the last."""
    end = data_start
    for ref in refs:
        if ref.start != end:
            fault = "overlap" if ref.start < end else "hole"
            where = f"begins at byte {ref.start}, the tensor before it ends at {end}"
            raise _bad(file, fault, f"{ref.name!r} leaves an {fault} in the data: it {where}".replace("an hole", "a hole"))
        end += ref.nbytes
    if end > nbytes:
        raise _bad(file, "truncated", f"is truncated: the header describes {end} bytes, the file has {nbytes}")
    if end < nbytes:
        raise _bad(file, "trailing-bytes", f"has {nbytes - end} bytes after its last tensor; expected none")


@dataclass(frozen=True, slots=True)
class SafetensorsFrame:
    """A safetensors file's __metadata__."""

    metadata: dict[str, str]
    container: ClassVar[str] = "safetensors"
    reads_global_scales: ClassVar[bool] = True
    alignment: ClassVar[int] = 1

    def lay_out(self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]) -> tuple[bytes, tuple[TensorRef, ...]]:
        """The header bytes of a shard and the address of each tensor in it.

        Wider dtypes stand first, so that every tensor is aligned to its own type, then names decide: the bytes do not depend
        on the order of `specs`, and an artifact carried to another dialect and back is the same file.
        """
        ordered = sorted(specs, key=lambda spec: (-DTYPE_BITS[spec.dtype], spec.name))
        kept = {key: value for key, value in self.metadata.items() if key not in ENGINE_NOTES}
        entries: dict[str, object] = {"__metadata__": DEFAULT_METADATA | kept | notes}
        places, end = [], 0
        for spec in ordered:
            nbytes = math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8
            entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (end, end + nbytes)}
            places.append(end)
            end += nbytes
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        refs = tuple(
            TensorRef(spec.name, spec.dtype, spec.shape, file, start + place) for spec, place in zip(ordered, places, strict=True)
        )
        return len(text).to_bytes(8, "little") + text, refs


class ShardWriter:
    """One shard on its way: the header first, then each tensor's bytes appended at the place the plan gave it; zeros between.

    Threads may append to different tensors at once.
    """

    def __init__(self, path: Path, header: bytes, outputs: Sequence[TensorRef], nbytes: int) -> None:
        self.path = path
        self._outputs = outputs
        self._nbytes = nbytes
        self._is_stopped = False
        self.begin_again()
        with told(path, self._nbytes):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            _reserve(self._fd, nbytes)
            os.ftruncate(self._fd, nbytes)
            self._pwrite(memoryview(header), 0)

    def begin_again(self) -> None:
        """Take nothing of what was appended for written."""
        self._filled = {ref.name: 0 for ref in self._outputs}

    def append(self, ref: TensorRef, data: memoryview) -> None:
        """Write the next bytes of that output."""
        flat = data.cast("B")
        with told(self.path, self._nbytes):
            self._pwrite(flat, ref.start + self._filled[ref.name])
        self._filled[ref.name] += flat.nbytes

    def _pwrite(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def finish(self) -> str:
        """Flush to the disk and close; every output must be whole.  Returns the sha256, taken while the disk works."""
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


def _reserve(fd: int, nbytes: int) -> None:
    """Have the disk keep so much room, where it can: a full one is known before the first byte."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that reserves nothing
            raise


@contextmanager
def told(path: Path, needed_nbytes: int | None = None) -> Iterator[None]:
    """Turn the system's refusals into an OutputError that names the path."""
    try:
        yield
    except OSError as error:
        need = "" if needed_nbytes is None else f" ({needed_nbytes:,} bytes)"
        code = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "cannot-write"
        next_step = "Make room and run the same command again: what is finished stays." if code == "disk-full" else ""
        raise OutputError(code, f"{path}: cannot be written{need}: {error.strerror}", next_step) from error


def hash_file(path: Path, each: Callable[[int], None] = lambda nbytes: None) -> str:
    """The sha256 of a file, as hex.

    each  called with the size of every block that was read; what it raises ends the reading
    """
    with path.open("rb", buffering=0) as stream:
        return hash_stream(stream, each)


def hash_stream(stream: BinaryIO, each: Callable[[int], None] = lambda nbytes: None) -> str:
    """The sha256 of what is left of a stream, as hex; `each` as in hash_file."""
    import hashlib

    found, block = hashlib.sha256(), memoryview(bytearray(HASH_NBYTES))
    while count := cast(RawIOBase, stream).readinto(block):
        found.update(block[:count])
        each(count)
    return found.hexdigest()
