"""GGUF bytes: what one file holds, read with llama.cpp's own package, and a file laid out in the frame of another.

The key-value section is carried byte for byte, whatever it holds; only the list of tensors is written anew.  A tensor of one of
GGUF's types of blocks has that type's name as its dtype, and a shape whose last part counts bytes.
Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from fp4convert.errors import InputError
from fp4convert.shard import DTYPE_BITS, Header, TensorRef, TensorSpec

GGUF = ".gguf"
_HEAD = struct.Struct("<4sIQQ")  # magic, version, tensors, keys
_VERSION = 3


@dataclass(frozen=True, slots=True)
class GgufFrame:
    """A GGUF file's keys and values, and the order of its tensors.

    keys       how many there are
    text       their bytes, as they are stored
    alignment  of every tensor
    places     name of a tensor -> its number in the file that the frame comes from
    facts      the values that are single numbers or strings, by key
    """

    keys: int
    text: bytes
    alignment: int
    places: dict[str, int]
    facts: dict[str, object]
    container: ClassVar[str] = "gguf"

    def lay_out(self, file: str, specs: Iterable[TensorSpec], notes: dict[str, str]) -> tuple[bytes, tuple[TensorRef, ...]]:
        """The bytes before the tensors, and each tensor's address: in the frame's order, a new one behind its module's weight."""
        ordered = sorted(specs, key=self._place)
        infos, offset, offsets = b"", 0, []
        for spec in ordered:
            kind, dimensions = _described(spec)
            name = spec.name.encode("utf-8")
            infos += struct.pack(f"<Q{len(name)}sI", len(name), name, len(dimensions))
            infos += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)
            offsets.append(offset)
            offset += -(-TensorRef(spec.name, spec.dtype, spec.shape, file, 0).nbytes // self.alignment) * self.alignment
        head = _HEAD.pack(b"GGUF", _VERSION, len(ordered), self.keys) + self.text + infos
        head += bytes(-len(head) % self.alignment)
        refs = (
            TensorRef(spec.name, spec.dtype, spec.shape, file, len(head) + place)
            for spec, place in zip(ordered, offsets, strict=True)
        )
        return head, tuple(refs)

    def _place(self, spec: TensorSpec) -> tuple[int, str]:
        weight = f"{spec.name.rpartition('.')[0]}.weight"
        return self.places.get(spec.name, self.places.get(weight, len(self.places))), spec.name[::-1]


def read_gguf_header(path: Path) -> Header:
    """The header of a GGUF file; InputError where it is none, damaged, truncated, or one part of several."""
    gguf = _package()
    nbytes = path.stat().st_size
    try:
        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
        tensors = [_ref(gguf, path.name, tensor) for tensor in reader.tensors]
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, UnicodeDecodeError, OSError) as error:
        detail = f"{path.name}: no sound GGUF file ({str(error)[:100]}); expected one that llama.cpp loads"
        raise InputError("gguf", detail, "Download the file again.") from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise InputError("gguf", f"{path.name}: a big-endian GGUF file; expected a little-endian one")
    if isinstance(parts := facts.get("split.count"), int) and parts > 1:
        detail = f"{path.name}: one of {parts} parts of a GGUF file; expected a whole one"
        raise InputError("gguf-split", detail, "Join them: llama-gguf-split --merge FIRST OUT.")
    end = max((ref.start + ref.nbytes for ref in tensors), default=0)
    if end > nbytes:
        raise InputError("truncated", f"{path.name}: is truncated: its tensors end at byte {end}, the file has {nbytes}")
    start = min((tensor.field.offset for tensor in reader.tensors), default=reader.data_offset)
    text = bytes(reader.data[_HEAD.size : start])
    places = {ref.name: number for number, ref in enumerate(tensors)}
    keys = int(reader.fields["GGUF.kv_count"].contents())
    return Header(path.name, nbytes, tuple(tensors), GgufFrame(keys, text, int(reader.alignment), places, facts))


def block_names(frame: GgufFrame, modules: Iterable[str]) -> dict[str, str]:
    """llama.cpp's names of a model's modules, without .weight; those that it does not know are left out.

    Raises InputError where the architecture is unknown to the installed package
    """
    gguf = _package()
    architecture = str(frame.facts.get("general.architecture"))
    number = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    blocks = frame.facts.get(f"{architecture}.block_count")
    if number is None or not isinstance(blocks, int):
        detail = f"the GGUF file is of the architecture {architecture!r}, which the package gguf does not know"
        raise InputError("gguf", detail, "Install a newer one: pip install --upgrade gguf.")
    names = gguf.get_tensor_name_map(number, blocks)
    return {module: name for module in modules if (name := names.get_name(module)) is not None}


def _ref(gguf: ModuleType, file: str, tensor: Any) -> TensorRef:
    """A tensor's address; blocks of a row count as bytes."""
    kind, shape = tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape))
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    if kind.name not in DTYPE_BITS:
        shape = (*shape[:-1], shape[-1] // block * block_nbytes)
    return TensorRef(tensor.name, kind.name, shape, file, int(tensor.data_offset))


def _described(spec: TensorSpec) -> tuple[int, list[int]]:
    """GGUF's number of a tensor's type, and its dimensions, the row's length first."""
    gguf = _package()
    kind = gguf.GGMLQuantizationType[spec.dtype]
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    row = spec.shape[-1] if spec.dtype in DTYPE_BITS else spec.shape[-1] // block_nbytes * block
    return int(kind), [row, *reversed(spec.shape[:-1])]


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        detail = "GGUF files need llama.cpp's package gguf, which is not installed"
        raise InputError("no-gguf", detail, "Install it: pip install 'fp4convert[gguf]'.") from None
    package: ModuleType = gguf
    return package
