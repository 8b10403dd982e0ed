"""Read GGUF headers and blocks; lay out one file in the frame of another.

The key-value section is copied byte for byte; only the list of tensors is written anew.  A tensor
of one of GGUF's types of blocks has that type's name as its dtype, and a shape whose last part
counts bytes.
llama.cpp's package gguf knows types and names.  Its reader is not used: it trusts every count and
length of a damaged file.
Source: ggml, docs/gguf.md, and src/gguf.cpp for the refusals of llama.cpp.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from fp4convert.errors import InputError, NumericError, describe_missing
from fp4convert.storage.safetensors import DTYPE_BITS, Header, TensorRef, TensorSpec, nbytes_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Q8_0 = "Q8_0"
LARGEST_Q8_0 = 127 * 65504.0  # a code of seven bits times the largest fp16 scale
BLOCKS_AT_ONCE = 2048  # 256 KiB of float32, which stay in a cache
# Run with llama.cpp of 2026-10; ten others gave NaN or garbage.
SCALED_ARCHITECTURES = ("llama", "qwen3", "qwen3moe", "mistral3")
_HEAD = "4sIQQ"  # magic, version, tensors, keys
_MAGIC, _VERSION, _VERSIONS = b"GGUF", 3, (2, 3)
# A value's kind -> its struct code.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _LIST = 4, 8, 9
_ALIGNMENT, _WIDEST, _MOST_DIMENSIONS = 32, 1 << 20, 4
EXPERT_NUMBER = re.compile(r"(?<=experts)\.(\d+)(?=\.)")  # in the name of a module
MOST_BLOCKS = 1000  # of a model: ten times what any has
_FIRST_NBYTES = 32 << 10  # of a file that is elsewhere
_LIMIT = 1 << 30  # bytes before the tensors; the longest vocabularies need some 20 MB
LONGEST_NAME = 512  # in an importance matrix of the old kind
FOUR_BIT = ("MXFP4", "NVFP4")
FILE_TYPE, SPLIT = "general.file_type", "split."  # keys
SHAPE = "comfy.gguf.orig_shape."  # before a tensor's name: its shape, where rows were too short
# The type in a file's name: M-BF16.gguf, M.Q4_K_M.gguf.
TYPE_WORD = re.compile(
    r"(?<=[-._])(?:BF16|F(?:P)?(?:16|32)|I?Q\d\w*|TQ\d_0|MXFP4(?:_MOE)?|NVFP4)(?=\.gguf$)", re.I
)


@dataclass(frozen=True, slots=True)
class GgufFrame:
    """A GGUF file's keys and values, and the order of its tensors.

    keys       their number
    text       their bytes
    alignment  of every tensor
    places     name of a tensor -> its number in the original file
    facts      key -> value, for single numbers and strings, and shapes of ComfyUI's tensors
    type_at    place of the number of general.file_type in the bytes; None without one
    """

    keys: int
    text: bytes
    alignment: int
    places: dict[str, int]
    facts: dict[str, object]
    type_at: int | None = None
    container: ClassVar[str] = "gguf"
    engine_notes: ClassVar[Mapping[str, str]] = {}

    @property
    def reads_global_scales(self) -> bool:
        """Return whether llama.cpp applies a .scale of this architecture.

        It loads one for every architecture, but most of its graphs ignore it.
        """
        return self.architecture in SCALED_ARCHITECTURES

    @property
    def architecture(self) -> str:
        return str(self.facts.get("general.architecture", ""))

    @property
    def blocks(self) -> int | None:
        """Return the number of the model's layers; None where it is not said."""
        blocks = self.facts.get(f"{self.architecture}.block_count")
        return blocks if isinstance(blocks, int) else None

    def lay_out(
        self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]
    ) -> tuple[bytes, tuple[TensorRef, ...]]:
        """Return the bytes before the tensors, and each one's address.

        The order is the frame's; a new tensor follows its module's weight.
        """
        gguf, ordered = gguf_package(), sorted(specs, key=self._place)
        text, file_type = self.text, _file_type(_usual_type(ordered))
        if self.type_at is not None and file_type is not None:
            text = text[: self.type_at] + struct.pack("<I", file_type) + text[self.type_at + 4 :]
        infos, offset, offsets = b"", 0, []
        for spec in ordered:
            name, kind = spec.name.encode("utf-8"), gguf.GGMLQuantizationType[spec.dtype]
            # GGUF counts elements, and names the length of a row first.
            *others, row = spec.shape
            if spec.dtype not in DTYPE_BITS:
                block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
                row = row // block_nbytes * block
            dimensions = [row, *reversed(others)]
            infos += struct.pack(f"<Q{len(name)}sI", len(name), name, len(dimensions))
            infos += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, int(kind), offset)
            offsets.append(offset)
            offset += -(-nbytes_of(spec.dtype, spec.shape) // self.alignment) * self.alignment
        head = struct.pack(f"<{_HEAD}", _MAGIC, _VERSION, len(ordered), self.keys)
        head += text + infos
        head += bytes(-len(head) % self.alignment)
        refs = (
            TensorRef(spec.name, spec.dtype, spec.shape, file, len(head) + place)
            for spec, place in zip(ordered, offsets, strict=True)
        )
        return head, tuple(refs)

    def name_for(self, file: str, specs: Iterable[TensorSpec]) -> str:
        """Return a file's name with the type of its matrices, if it names one."""
        kind = _usual_type(specs)
        return file if _file_type(kind) is None else TYPE_WORD.sub(kind, file)

    def _place(self, spec: TensorSpec) -> tuple[int, str]:
        if spec.name in self.places:
            return self.places[spec.name], ""
        weight = f"{spec.name.rpartition('.')[0]}.weight"
        return self.places.get(weight, len(self.places)), spec.name


def _usual_type(specs: Iterable[TensorSpec]) -> str:
    """Return the four-bit type of a file, or the type of most matrices."""
    kinds = Counter(spec.dtype for spec in specs if len(spec.shape) > 1)
    four = Counter({kind: kinds[kind] for kind in FOUR_BIT if kinds[kind]})
    return ((four or kinds).most_common(1) or [("", 0)])[0][0]


def _file_type(kind: str) -> int | None:
    """Return general.file_type of a file of a type; None if several name it."""
    words = {f"MOSTLY_{kind}", f"MOSTLY_{kind}_MOE", f"ALL_{kind}"}
    every = gguf_package().LlamaFileType
    return next((int(one) for one in every if one.name in words), None)


def is_imatrix(head: bytes) -> bool:
    """Tell by its first bytes whether a file may be an importance matrix."""
    entries, length = struct.unpack("<ii", head.ljust(8, b"\0")[:8])
    return head[:4] == _MAGIC or (entries > 0 and 0 < length <= LONGEST_NAME)


def read_gguf_header(path: Path) -> Header:
    """Read the header of a whole, sound GGUF file."""
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(path.name, _Cursor(data))
    except (ValueError, OSError) as error:  # of mmap: the file is empty, or no file
        raise _unsound(path.name, error) from None


def read_coming_header(file: str, nbytes: int, read: Callable[[int, int], bytes]) -> Header:
    """Read the header of a GGUF file that comes by ranges.

    nbytes  of the file
    read    (offset, length) returns its bytes; called for consecutive ranges from 0 on
    """
    try:
        return _parse(file, _Cursor(_Beginning(nbytes, read)))
    except ValueError as error:
        raise _unsound(file, error) from None


def _unsound(file: str, error: Exception) -> InputError:
    detail = f"{file}: no sound GGUF file: {error}; expected one that llama.cpp loads"
    return InputError("gguf", detail, "Download the file again.")


class _Bytes(Protocol):
    """A file's bytes, wherever they are."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class _Beginning:
    """The first bytes of a file; each read doubles them."""

    def __init__(self, nbytes: int, read: Callable[[int, int], bytes]) -> None:
        self._nbytes, self._read = nbytes, read
        self._held = b""

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice, /) -> bytes:
        if part.stop > len(self._held):
            wanted = min(self._nbytes, max(part.stop, 2 * len(self._held), _FIRST_NBYTES))
            self._held += self._read(len(self._held), wanted - len(self._held))
        return self._held[part]


@dataclass(slots=True)
class _Cursor:
    """Reads a file from its beginning; ValueError if it ends too early."""

    data: _Bytes
    at: int = 0

    def take(self, nbytes: int) -> bytes:
        self.skip(nbytes)
        return self.data[self.at - nbytes : self.at]

    def skip(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > min(len(self.data), _LIMIT):
            limits = f"of {len(self.data)} that it has and {_LIMIT} allowed"
            raise ValueError(f"its head needs more than {self.at} bytes, {limits}")

    def unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def name(self) -> str:
        stored = self.take(self.unpack("Q")[0])
        try:
            return stored.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"the name {stored[:60]!r} is not UTF-8") from None

    def value(self, kind: int) -> object:
        """Read a single number or string; skip a list, and return None."""
        if kind == _STRING:
            return self.take(self.unpack("Q")[0]).decode("utf-8", "replace")
        if kind in _NUMBERS:
            return self.unpack(_NUMBERS[kind])[0]
        if kind != _LIST:
            raise ValueError(f"a value of the unknown kind {kind}")
        items, count = self.unpack("IQ")
        if items in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[items]}"))
        elif items != _STRING:
            raise ValueError(f"a list of the unknown kind {items}")
        else:
            for _ in range(count):
                self.skip(self.unpack("Q")[0])
        return None

    def shape(self) -> tuple[int, ...]:
        """Read a list of at most four positive numbers."""
        items, count = self.unpack("IQ")
        code = _NUMBERS.get(items, "f")
        if code in "f?d" or not 1 <= count <= _MOST_DIMENSIONS:
            raise ValueError("the shape of a tensor is no short list of whole numbers")
        return self.unpack(f"{count}{code}")


def _parse(file: str, cursor: _Cursor) -> Header:
    magic, version, count, keys = cursor.unpack(_HEAD)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("it is big-endian" if swapped else f"it is of version {version}")
    facts, text, type_at = dict[str, object](), b"", None
    for _ in range(keys):
        begin = cursor.at
        key = cursor.name()
        if key in facts:
            raise ValueError(f"the key {key!r} stands twice")
        kind = cursor.unpack("I")[0]
        place = len(text) + cursor.at - begin
        facts[key] = cursor.shape() if key.startswith(SHAPE) else cursor.value(kind)
        if key.startswith(SPLIT):  # written anew, the parts are one
            keys -= 1
            continue
        if key == FILE_TYPE and kind == _UINT32:
            type_at = place
        text += cursor.data[begin : cursor.at]
    alignment = facts.get("general.alignment", _ALIGNMENT)
    is_power = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
    if not isinstance(alignment, int) or not is_power or alignment > _WIDEST:
        raise ValueError(f"its tensors are aligned to {alignment!r} bytes")

    # The tensors follow one another, as llama.cpp requires.
    described = [_read_tensor(cursor) for _ in range(count)]
    start, expected, tensors = -(-cursor.at // alignment) * alignment, 0, []
    for spec, offset in described:
        if offset != expected:
            found = f"{spec.name!r} lies at offset {offset}"
            raise ValueError(f"{found}; behind the one before it, {expected}")
        tensors.append(TensorRef(spec.name, spec.dtype, spec.shape, file, start + offset))
        expected += -(-tensors[-1].nbytes // alignment) * alignment
    end, nbytes = max((ref.start + ref.nbytes for ref in tensors), default=0), len(cursor.data)
    if end > nbytes:
        detail = f"{file}: is truncated: its tensors end at byte {end}, the file has {nbytes}"
        raise InputError("truncated", detail)
    places = {ref.name: number for number, ref in enumerate(tensors)}
    if len(places) < count:
        raise ValueError("two of its tensors have one name")
    single = {key: value for key, value in facts.items() if value is not None}
    frame = GgufFrame(keys, text, alignment, places, single, type_at)
    return Header(file, nbytes, tuple(tensors), frame)


def _read_tensor(cursor: _Cursor) -> tuple[TensorSpec, int]:
    """Read a tensor's entry and its offset behind the head."""
    gguf, name = gguf_package(), cursor.name()
    (dimensions,) = cursor.unpack("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name!r} has {dimensions} dimensions")
    *sizes, number, offset = cursor.unpack(f"{dimensions}qIQ")
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        known = "which the installed package gguf does not know"
        raise ValueError(f"{name!r} is of type {number}, {known}") from None
    row, *others = sizes
    if min(sizes) < 0 or row % block:
        raise ValueError(f"{name!r} has the sizes {sizes}, rows in blocks of {block}")
    row = row if kind.name in DTYPE_BITS else row // block * block_nbytes
    return TensorSpec(name, kind.name, (*reversed(others), row)), offset


def block_names(frame: GgufFrame, modules: Iterable[str]) -> dict[str, str]:
    """Return llama.cpp's names of a model's modules, without .weight.

    Unknown modules are left out; an expert has the name of its stack.
    Raises  InputError for an architecture that the package gguf does not know
    """
    if (names := aliases_of(frame)) is None:
        found = f"the GGUF file is of the architecture {frame.architecture!r}"
        detail = f"{found}, which the package gguf does not know"
        raise InputError("gguf", detail, "Install a newer one: pip install --upgrade gguf.")
    # The package knows stacks of experts, not single ones.
    known = {module: names.get(EXPERT_NUMBER.sub("", module)) for module in modules}
    return {module: name for module, name in known.items() if name is not None}


def aliases_of(frame: GgufFrame) -> dict[str, str] | None:
    """Return llama.cpp's name of a module by each that it knows for it.

    Returns  None for an architecture that the package gguf does not know
    Raises   InputError for an absurd number of blocks
    """
    gguf, blocks = gguf_package(), frame.blocks
    numbers = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    number = numbers.get(frame.architecture)
    if number is None or blocks is None:
        return None
    if not 0 <= blocks <= MOST_BLOCKS:  # the package makes names for every one
        detail = f"the GGUF file says that it has {blocks} blocks; expected 0 to {MOST_BLOCKS}"
        raise InputError("gguf", detail, "Download it again; or ask whoever made it.")
    mapping = gguf.get_tensor_name_map(number, blocks).mapping
    return {alias: name for alias, (_, name) in mapping.items()}


def gguf_package() -> ModuleType:
    """Import llama.cpp's package, or raise InputError."""
    try:
        import gguf
    except ImportError:
        needing = "GGUF files need llama.cpp's package gguf"
        raise InputError("no-gguf", *describe_missing(needing, "gguf")) from None
    package: ModuleType = gguf
    return package


class BlockType(NamedTuple):
    """Weights and bytes of one block."""

    block_size: int
    nbytes: int


BLOCK_TYPES = {  # that are read; MXFP4 and NVFP4 are the dialect's
    **{"Q4_0": BlockType(32, 18), "Q4_1": BlockType(32, 20)},
    **{"Q5_0": BlockType(32, 22), "Q5_1": BlockType(32, 24), Q8_0: BlockType(32, 34)},
    **{"Q2_K": BlockType(256, 84), "Q3_K": BlockType(256, 110), "Q4_K": BlockType(256, 144)},
    **{"Q5_K": BlockType(256, 176), "Q6_K": BlockType(256, 210)},
    **{"IQ4_NL": BlockType(32, 18), "IQ4_XS": BlockType(256, 136), "IQ3_S": BlockType(256, 110)},
    **{"IQ3_XXS": BlockType(256, 98), "IQ2_S": BlockType(256, 82), "IQ2_XS": BlockType(256, 74)},
    **{"IQ2_XXS": BlockType(256, 66), "IQ1_S": BlockType(256, 50)},
}


def shape_in_bytes(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that counts bytes, for one that counts weights."""
    *above, columns = shape
    kind = BLOCK_TYPES[dtype]
    return (*above, columns // kind.block_size * kind.nbytes)


def shape_in_weights(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that counts weights, for one that counts bytes."""
    *above, row_nbytes = shape
    kind = BLOCK_TYPES[dtype]
    return (*above, row_nbytes // kind.nbytes * kind.block_size)


def decode(stored: memoryview, dtype: str) -> NDArray[np.float32]:
    """Return the values of whole blocks, by gguf-py's quants.py (NumPy)."""
    import numpy as np
    from gguf import quants

    kind = gguf_package().GGMLQuantizationType[dtype]
    values: NDArray[np.float32] = quants.dequantize(np.frombuffer(stored, np.uint8), kind)
    return values


def encode_q8_0(values: NDArray[np.float32]) -> memoryview:
    """Round whole blocks of 32 to Q8_0.

    Formula  d = amax / 127 in float32; codes are x * (1 / d), halves away from 0; d in fp16
    Raises   NumericError for NaN, or a value beyond its range
    """
    import numpy as np

    size, nbytes = BLOCK_TYPES[Q8_0]
    blocks = values.reshape(-1, size)
    # Added, then cut off: rounds halves away from 0.
    below_half = np.nextafter(np.float32(0.5), np.float32(0))
    stored = np.empty((len(blocks), nbytes), np.uint8)
    for first in range(0, len(blocks), BLOCKS_AT_ONCE):
        x, out = (all_[first : first + BLOCKS_AT_ONCE] for all_ in (blocks, stored))
        amax = np.abs(x).max(1, keepdims=True)
        largest = amax.max(initial=0)  # NaN if there is one
        if not largest <= LARGEST_Q8_0:
            detail = f"the value {largest:g} is beyond {LARGEST_Q8_0:g}, the largest of q8_0"
            raise NumericError("q8-overflow", detail, "Choose the dtype bf16.")
        scales = amax / np.float32(127)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            q = x * np.where(scales == 0, np.float32(0), 1 / scales)
            q += np.copysign(below_half, q)
            out[:, 2:] = q.astype(np.int8).view(np.uint8)
        out[:, :2] = scales.astype(np.float16).view(np.uint8)
    return stored.reshape(-1).data
