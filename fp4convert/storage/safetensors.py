"""Addresses of tensors; headers of safetensors files, read and laid out.

The header stands before the data, so every offset is known before the first weight is read.
Checks follow the format's own rules (huggingface/safetensors README, "Format", and its tensor.rs)
and refuse whatever safetensors refuses.  All entries are checked together first; if any of them
could be wrong, they are checked one by one, for a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat, takewhile
from json.encoder import encode_basestring
from operator import add, itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

from fp4convert.errors import InputError
from fp4convert.storage.json_text import parse_json_object, refuse_constant

SHAPES = 1 << 12  # in caches: models have few
DEFAULT_METADATA = {"format": "pt"}  # transformers refuses a shard that does not say so
# Metadata on quantization: written anew, or left out.
ENGINE_NOTES = ("_quantization_metadata",)
WEIGHT = ".weight"  # end of the name of a linear layer's tensor
DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}

HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference reader
KEYS = ("dtype", "shape", "data_offsets")  # of an entry
NUMBER_LIMIT = 1 << 63  # of a size or an offset
ELEMENT_LIMIT = 1 << 60  # of a tensor
ENTRY_DEPTH_LIMIT = 125  # of a value inside an entry; the reference reader allows 127 in all
OVERFLOW = 1 << 64  # of the reference reader's sizes
BYTE_BITS = 8


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
    """Count the bytes of all these tensors."""
    return sum([nbytes_of(ref.dtype, ref.shape) for ref in refs])  # faster than the properties


class TensorSpec(NamedTuple):
    """A tensor to be written, without its place.

    is_apart  it goes into the second file of its shard, for scales alone
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_apart: bool = False


class Frame(Protocol):
    """Content of a file beside its tensors, and their layout.

    container            safetensors or gguf
    reads_global_scales  engines that read such a file apply the global scales in it
    engine_notes         the file's metadata on quantization
    alignment            the size of the file is a multiple of it
    architecture         name of the model's kind in the file; "" for none
    """

    container: ClassVar[str]

    @property
    def reads_global_scales(self) -> bool: ...

    @property
    def alignment(self) -> int: ...

    @property
    def engine_notes(self) -> Mapping[str, str]: ...

    @property
    def architecture(self) -> str: ...

    def lay_out(
        self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]
    ) -> tuple[bytes, tuple[TensorRef, ...]]:
        """Return the bytes before the tensors, and addresses in file order.

        notes  metadata for engines
        """

    def name_for(self, file: str, specs: Iterable[TensorSpec]) -> str:
        """Return a source file's name for a result with these tensors."""


class Header(NamedTuple):
    """The header of one shard.

    nbytes   of the file
    tensors  in the order of the file
    """

    file: str
    nbytes: int
    tensors: tuple[TensorRef, ...]
    frame: Frame


@dataclass(frozen=True, slots=True)
class SafetensorsFrame:
    """A safetensors file's __metadata__.

    is_stored  False for tensors out of a file of another kind
    """

    metadata: dict[str, str]
    is_stored: bool = True
    container: ClassVar[str] = "safetensors"
    reads_global_scales: ClassVar[bool] = True
    alignment: ClassVar[int] = 1
    architecture: ClassVar[str] = ""

    def name_for(self, file: str, specs: Iterable[TensorSpec]) -> str:
        return file

    @property
    def engine_notes(self) -> Mapping[str, str]:
        return {key: self.metadata[key] for key in ENGINE_NOTES if key in self.metadata}

    def lay_out(
        self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]
    ) -> tuple[bytes, tuple[TensorRef, ...]]:
        """Return a shard's header, and the address of each tensor in it.

        Wider dtypes stand first, which aligns every tensor to its type; then names decide. So the
        order of `specs` changes no byte, nor does a way to another dialect and back.
        """
        ordered = sorted(sorted(specs), key=lambda spec: -DTYPE_BITS[spec.dtype])
        kept = {key: value for key, value in self.metadata.items() if key not in ENGINE_NOTES}
        metadata = DEFAULT_METADATA | kept | notes
        text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
        entries = [f'"__metadata__":{text}']
        places, end = [], 0
        # As json.dumps, in half the time: tests/storage/test_safetensors.py.
        for name, dtype, shape, _ in ordered:
            begin, end = end, end + nbytes_of(dtype, shape)
            fields = f'{_spelled(dtype, shape)},"data_offsets":[{begin},{end}]'
            entries.append(f"{encode_basestring(name)}:{{{fields}}}")
            places.append((name, dtype, shape, begin))
        header = f"{{{','.join(entries)}}}".encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        refs = _refs_of((name, dtype, shape, file, start + at) for name, dtype, shape, at in places)
        return len(header).to_bytes(8, "little") + header, refs


def read_header(file: str, nbytes: int, read: Callable[[int, int], bytes]) -> Header:
    """Read and check the header of a shard.

    nbytes  of the file
    read    (offset, length) returns its bytes
    Raises  InputError for anything that safetensors refuses
    """
    head = read(0, min(nbytes, 64))
    if head.startswith(b"version https://git-lfs"):
        detail = "is a Git LFS pointer, not the weights"
        raise _bad(file, "lfs-pointer", detail, "Fetch them: git lfs pull.")
    if nbytes < 8:
        detail = f"has {nbytes} bytes, shorter than the 8 bytes of a header length"
        raise _bad(file, "header-length", detail)
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT or length > nbytes - 8:
        limits = f"the file has {nbytes} bytes and the limit is {HEADER_LIMIT}"
        raise _bad(file, "header-length", f"gives a header length of {length}, but {limits}")
    text = read(8, length)
    if not text.startswith(b"{"):
        detail = "has a header that does not begin with '{'; expected one JSON object"
        raise _bad(file, "header", detail)
    return read_together(file, text, nbytes) or read_one_by_one(file, text, nbytes)


def read_together(file: str, text: bytes, nbytes: int) -> Header | None:
    """Read an ordinary header; return None for any other, sound or not.

    The parser keeps the last of equal keys.  Without backslashes every string has two quotation
    marks: if the text has just the marks of the expected strings, no key was dropped and no entry
    has other keys.
    """
    # The parser turns -0 into an integer; a search for "-" alone is fast.
    if b"\\" in text or (b"-" in text and b"-0" in text):
        return None
    try:
        entries = json.loads(text.decode("utf-8"), parse_constant=refuse_constant)
        metadata = entries.pop("__metadata__", None)
        dtypes, listed, offsets = zip(*map(itemgetter(*KEYS), entries.values()), strict=True)
        numbers, shapes = [*chain.from_iterable(offsets)], [*map(tuple, listed)]
        words = () if metadata is None else ("__metadata__", *metadata, *metadata.values())
        is_sound = (
            text.count(b'"')
            == 2 * (len(words) + (2 + len(KEYS)) * len(entries))  # a name, the keys and a dtype
            and {*map(len, offsets)} == {2}
            and {*map(type, listed), *map(type, offsets)} == {list}
            and {*map(type, numbers), *map(type, chain.from_iterable(shapes))} == {int}
            and {*map(type, words), *map(type, dtypes)} == {str}
        )
        sizes = [*map(_whole_nbytes, dtypes, shapes)] if is_sound else []
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    begins, ends, data_start = numbers[::2], numbers[1::2], 8 + len(text)
    if not sizes or [*map(add, begins, sizes)] != ends:
        return None
    known: dict[Any, Any] = {}  # equal shapes, and dtypes, are one object
    dtypes = tuple([known.setdefault(one, one) for one in dtypes])
    shapes = [known.setdefault(one, one) for one in shapes]
    if [*begins, nbytes - data_start] != [0, *ends]:
        columns: Any = zip(
            *sorted(zip(begins, ends, entries, dtypes, shapes, strict=True), key=itemgetter(0, 1)),
            strict=True,
        )
        begins, ends, entries, dtypes, shapes = columns
        if [*begins, nbytes - data_start] != [0, *ends]:
            return None
    fields = zip(
        entries, dtypes, shapes, repeat(file), map(data_start.__add__, begins), strict=False
    )
    return Header(file, nbytes, _refs_of(fields), SafetensorsFrame(metadata or {}))


def _refs_of(fields: Iterable[tuple[str, str, tuple[int, ...], str, int]]) -> tuple[TensorRef, ...]:
    """Construct TensorRefs, in a third of the usual time."""
    return tuple(map(tuple.__new__, repeat(TensorRef), fields))


@lru_cache(SHAPES)
def _spelled(dtype: str, shape: tuple[int, ...]) -> str:
    """Spell the first two fields of an entry."""
    return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'


@lru_cache(SHAPES)
def _whole_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Count the bytes of a tensor; raise ValueError as `_entry` refuses."""
    is_possible = (
        dtype in DTYPE_BITS
        and all(0 <= size < NUMBER_LIMIT for size in shape)
        and not _is_too_large(shape)
    )
    if not is_possible or math.prod(shape) * DTYPE_BITS[dtype] % BYTE_BITS:
        raise ValueError(dtype, shape)
    return nbytes_of(dtype, shape)


def _is_too_large(shape: tuple[int, ...]) -> bool:
    """Return whether a shape has too many elements.

    Sizes before a 0 may overflow, too: the reference reader multiplies from the left.
    """
    return math.prod(shape) >= ELEMENT_LIMIT or math.prod(takewhile(bool, shape)) >= OVERFLOW


def read_one_by_one(file: str, text: bytes, nbytes: int) -> Header:
    """Read a header; raise InputError that names the wrong entry."""
    entries, data_start = parse_json_object(text, f"{file}: header"), 8 + len(text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        detail = "has a header whose __metadata__ does not map strings to strings"
        raise _bad(file, "header", detail)
    refs = [_entry(file, name, entry, data_start) for name, entry in entries.items()]
    refs.sort(key=lambda ref: (ref.start, ref.nbytes))

    # The tensors cover the data: no overlap, no hole, nothing missing, nothing after the last.
    end = data_start
    for ref in refs:
        if ref.start != end:
            where = f"it begins at byte {ref.start}, the tensor before it ends at {end}"
            if ref.start < end:
                detail = f"{ref.name!r} leaves an overlap in the data: {where}"
                raise _bad(file, "overlap", detail)
            raise _bad(file, "hole", f"{ref.name!r} leaves a hole in the data: {where}")
        end += ref.nbytes
    if end > nbytes:
        detail = f"is truncated: the header describes {end} bytes, the file has {nbytes}"
        raise _bad(file, "truncated", detail)
    if end < nbytes:
        detail = f"has {nbytes - end} bytes after its last tensor; expected none"
        raise _bad(file, "trailing-bytes", detail)
    return Header(file, nbytes, tuple(refs), SafetensorsFrame(metadata))


def _bad(
    file: str, code: str, detail: str, next_step: str = "Download the file again."
) -> InputError:
    return InputError(code, f"{file}: {detail}", next_step)


def _counts(value: object) -> tuple[int, ...] | None:
    """Return a list of non-negative 64-bit integers as a tuple, or None."""
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item < NUMBER_LIMIT for item in value
    ):
        return None
    return tuple(value)


def _entry(file: str, name: str, entry: object, data_start: int) -> TensorRef:
    if not isinstance(entry, dict) or not entry.keys() >= {*KEYS}:
        raise _bad(file, "header", f"header entry {name!r} has no dtype, shape or data_offsets")
    if any(_depth_of(entry[key]) > ENTRY_DEPTH_LIMIT for key in entry.keys() - {*KEYS}):
        raise _bad(file, "header", f"header entry {name!r} is nested too deep")
    dtype, shape, offsets = entry["dtype"], _counts(entry["shape"]), _counts(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        detail = f"{name!r} has the dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}"
        raise _bad(file, "dtype", detail)
    if shape is None or _is_too_large(shape):
        raise _bad(file, "shape", f"{name!r} has the impossible shape {str(entry['shape'])[:80]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        found = f"{name!r} has bad offsets {str(entry['data_offsets'])[:80]}"
        raise _bad(file, "offset", f"{found}; expected [begin, end]")
    bits, found_nbytes = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    what = f"{name!r}: {dtype} of shape {list(shape)}"
    if bits % BYTE_BITS:
        raise _bad(file, "shape", f"{what} does not end on a whole byte")
    if bits // BYTE_BITS != found_nbytes:
        detail = f"{what} takes {bits // BYTE_BITS} bytes, its offsets {found_nbytes}"
        raise _bad(file, "shape", detail)
    return TensorRef(name, dtype, shape, file, data_start + offsets[0])


def _depth_of(value: object) -> int:
    """Return the depth of nested lists and objects."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth_of, inner), default=0) if isinstance(value, dict | list) else 0
