"""Parse and check the header of a safetensors file.

Checks follow the format's own rules (huggingface/safetensors README, "Format", and its tensor.rs)
and refuse whatever safetensors refuses.  All entries of a header are looked at together first; they
are looked at one by one, to say which is wrong and why, where any of them could be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, repeat, takewhile
from operator import add, itemgetter
from typing import Any

from fp4convert.errors import InputError
from fp4convert.storage.json_text import DEPTH_LIMIT, depth_of, parse_json_object, refuse_constant
from fp4convert.storage.safetensors import (
    DTYPE_BITS,
    SHAPES,
    Header,
    SafetensorsFrame,
    TensorRef,
    nbytes_of,
)

HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference reader
KEYS = ("dtype", "shape", "data_offsets")  # of an entry
NUMBER_LIMIT = 1 << 63  # of a size or an offset
ELEMENT_LIMIT = 1 << 60  # of a tensor
OVERFLOW = 1 << 64  # of the reference reader's sizes
BYTE_BITS = 8


def read_header(file: str, nbytes: int, read: Callable[[int, int], bytes]) -> Header:
    """Read and check the header of a shard.

    nbytes  of the file
    read    (offset, length) gives its bytes
    Raises  InputError on anything that safetensors refuses, naming the file, what was found and
            what was expected
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
    """Read a header in which nothing is out of the ordinary.

    None where anything may be, sound or not.
    Of equal keys the parser keeps the last.  Without backslashes every string is two quotation
    marks, so none was dropped, and no entry has other keys, where the strings that there must be
    are half as many as the marks in the text.
    """
    # -0 is no integer, which the parser makes it; "-" alone is found fast.
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
    # As TensorRef itself makes them, in a third of the time.
    refs = tuple(map(tuple.__new__, repeat(TensorRef), fields))
    return Header(file, nbytes, refs, SafetensorsFrame(metadata or {}))


@lru_cache(SHAPES)
def _whole_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Count the bytes of a tensor; ValueError for what `_entry` refuses."""
    is_possible = (
        dtype in DTYPE_BITS
        and all(0 <= size < NUMBER_LIMIT for size in shape)
        and not _is_too_large(shape)
    )
    if not is_possible or math.prod(shape) * DTYPE_BITS[dtype] % BYTE_BITS:
        raise ValueError(dtype, shape)
    return nbytes_of(dtype, shape)


def _is_too_large(shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor would have too many elements.

    Also where sizes overflow before one of 0: the reference reader multiplies from the left.
    """
    return math.prod(shape) >= ELEMENT_LIMIT or math.prod(takewhile(bool, shape)) >= OVERFLOW


def read_one_by_one(file: str, text: bytes, nbytes: int) -> Header:
    """Read a header; say which of its entries is wrong.

    Raises  InputError
    """
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
            fault, name = ("overlap", "an overlap") if ref.start < end else ("hole", "a hole")
            where = f"begins at byte {ref.start}, the tensor before it ends at {end}"
            raise _bad(file, fault, f"{ref.name!r} leaves {name} in the data: it {where}")
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
        raise _bad(file, "header", f"header entry {name!r} lacks dtype, shape or data_offsets")
    if any(depth_of(entry[key]) > DEPTH_LIMIT for key in entry.keys() - {*KEYS}):
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
