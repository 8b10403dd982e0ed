"""GGUF headers against llama.cpp's own reader and writer, and damaged in every way: an InputError,
or a sound header.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from fp4convert.errors import InputError
from fp4convert.storage.gguf import GgufFrame, read_gguf_header
from fp4convert.storage.safetensors import Header, TensorSpec

pytestmark = pytest.mark.timeout(60)
SPENT_NBYTES = 8 << 20  # what a header of some hundred bytes may cost
# Bytes of a row are last.
RAW = {"MXFP4": (3, 4 * 17), "NVFP4": (2, 2 * 36), "Q8_0": (1, 34), "BF16": (5, 2 * 32)}
U32, STRING, LIST = 4, 8, 9


def write(path: Path, alignment: int | None = None) -> Path:
    """A file by llama.cpp's own writer: every kind of value, four types of blocks or halves, a
    stack and a vector.
    """
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_token_list(["<s>", "ü", ""])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_add_bos_token(False)
    writer.add_float64("some.float64", 0.25)
    writer.add_int8("some.int8", -3)
    writer.add_uint64("some.uint64", 2**63)
    draw = np.random.default_rng(0)
    for number, (kind, shape) in enumerate(RAW.items()):
        stored = draw.integers(0, 256, shape, np.uint8)
        writer.add_tensor(f"blk.{number}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("ü.weight", draw.standard_normal((2, 3, 8)).astype(np.float32))
    writer.add_tensor("norm.weight", draw.standard_normal(7).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=[None, 64, 8])
def alignment(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture
def whole(tmp_path: Path, alignment: int | None) -> Path:
    return write(tmp_path / "whole.gguf", alignment)


def frame_of(header: Header) -> GgufFrame:
    assert isinstance(header.frame, GgufFrame)
    return header.frame


def test_header_equals_what_llama_cpps_reader_finds(whole: Path, alignment: int | None) -> None:
    reader, header = gguf.GGUFReader(whole), read_gguf_header(whole)
    found = [(ref.name, ref.dtype, ref.start, ref.nbytes) for ref in header.tensors]
    assert found == [
        (each.name, each.tensor_type.name, each.data_offset, each.n_bytes)
        for each in reader.tensors
    ]
    stored = {each.name: each.data.tobytes() for each in reader.tensors}
    data = whole.read_bytes()
    assert {ref.name: data[ref.start : ref.start + ref.nbytes] for ref in header.tensors} == stored
    shapes = {ref.name: ref.shape for ref in header.tensors}
    assert shapes["blk.0.weight"] == (3, 68)
    assert shapes["blk.3.weight"] == (5, 32)
    assert shapes["ü.weight"] == (2, 3, 8)
    frame = frame_of(header)
    assert frame.alignment == (alignment or 32)
    singles = {
        name: field.contents()
        for name, field in reader.fields.items()
        if len(field.types) == 1 and not name.startswith("GGUF.")
    }
    assert frame.facts == singles
    assert frame.keys == int(reader.fields["GGUF.kv_count"].contents())


def test_laid_out_again_the_head_is_the_same_bytes(whole: Path) -> None:
    """In whatever order the tensors come."""
    header = read_gguf_header(whole)
    specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for ref in reversed(header.tensors)]
    head, refs = frame_of(header).lay_out("whole.gguf", specs, {})
    assert refs == header.tensors
    assert head == whole.read_bytes()[: header.tensors[0].start]


def test_new_tensors_follow_their_modules_weight(whole: Path, alignment: int | None) -> None:
    """And llama.cpp's reader finds every key, tensor and byte."""
    header = read_gguf_header(whole)
    specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for ref in header.tensors]
    specs[1:1] = [TensorSpec("ü.scale", "F32", (1,))]
    head, refs = frame_of(header).lay_out("new.gguf", specs, {})
    new = bytearray(head.ljust(max(ref.start + ref.nbytes for ref in refs), b"\0"))
    for number, ref in enumerate(refs):
        new[ref.start : ref.start + ref.nbytes] = bytes([number + 1]) * ref.nbytes
    path = whole.with_name("new.gguf")
    path.write_bytes(new)
    reader, before = gguf.GGUFReader(path), gguf.GGUFReader(whole)
    names = [each.name for each in reader.tensors]
    blocks = [f"blk.{number}.weight" for number in range(4)]
    assert names == [*blocks, "ü.weight", "ü.scale", "norm.weight"]
    written = [set(each.data.tobytes()) for each in reader.tensors]
    assert written == [{number + 1} for number in range(len(refs))]
    assert all(each.data_offset % (alignment or 32) == 0 for each in reader.tensors)
    found, kept = (
        {
            name: field.contents()
            for name, field in each.fields.items()
            if "tensor_count" not in name
        }
        for each in (reader, before)
    )
    assert found == kept
    assert read_gguf_header(path).tensors == refs


def refusal(path: Path, content: bytes | bytearray) -> InputError | None:
    """The error that such a file is refused with; None where the header is sound, and then its
    tensors lie apart, in the file.
    """
    path.write_bytes(content)
    tracemalloc.start()
    try:
        header = read_gguf_header(path)
    except InputError as error:
        return error
    finally:
        assert tracemalloc.get_traced_memory()[1] < SPENT_NBYTES
        tracemalloc.stop()
    refs = sorted((ref for ref in header.tensors if ref.nbytes), key=lambda ref: ref.start)
    assert all(one.start + one.nbytes <= other.start for one, other in pairwise(refs))
    assert all(ref.start + ref.nbytes <= len(content) for ref in refs)
    assert len({ref.name for ref in header.tensors}) == len(header.tensors)
    return None


def test_truncated_anywhere_it_is_refused(whole: Path) -> None:
    content, path = whole.read_bytes(), whole.with_name("cut.gguf")
    header = read_gguf_header(whole)
    begin, end = header.tensors[0].start, header.tensors[-1].start + header.tensors[-1].nbytes
    for part in range(20):
        assert refusal(path, content[: begin * part // 20]), part
    for nbytes in (begin - 1, begin, begin + 1, end - 1):
        assert refusal(path, content[:nbytes]), nbytes
    assert refusal(path, content[:end]) is None, "padding behind the last tensor holds nothing"


def test_every_flipped_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """300 bits, and 100 whole bytes."""
    content, path = write(tmp_path / "whole.gguf").read_bytes(), tmp_path / "flipped.gguf"
    begin, draw = read_gguf_header(tmp_path / "whole.gguf").tensors[0].start, random.Random(0)
    refused = 0
    for number in range(400):
        flipped, at = bytearray(content), draw.randrange(begin)
        flipped[at] ^= 1 << draw.randrange(8) if number < 300 else 255
        refused += refusal(path, flipped) is not None
    assert 100 < refused < 400


def text(stored: bytes) -> bytes:
    return struct.pack("<Q", len(stored)) + stored


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}qIQ", len(sizes), *sizes, kind, offset)


def made(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data_nbytes: int = 256,
) -> bytes:
    counts = counts or (len(tensors), len(keys))
    head = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data_nbytes)


def valued(name: bytes, kind: int, value: bytes) -> bytes:
    return made((key(name, kind, value),))


def endless(kind: int) -> bytes:
    return valued(b"a.key", LIST, struct.pack("<IQ", kind, 2**62))


def aligned(nbytes: int) -> bytes:
    return valued(b"general.alignment", U32, struct.pack("<I", nbytes))


def shaped(sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return made(tensors=(tensor(b"a", sizes, kind, offset),))


ONE, OTHER = tensor(b"a.weight", (8, 2)), "behind the one before it, 64"
REFUSED = {
    "empty": (b"", "empty"),
    "no magic": (b"GGML" + made()[4:], "begins with b'GGML'"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "version 1": (made(version=1), "version 1"),
    "version 4": (made(version=4), "version 4"),
    "more tensors": (made(tensors=(ONE,), counts=(2**64 - 1, 0)), "dimensions"),
    "more keys": (made(counts=(0, 2**64 - 1)), "twice"),
    "unknown kind": (valued(b"a.key", 13, b""), "unknown kind 13"),
    "list of lists": (
        valued(b"a.key", LIST, struct.pack("<IQ", LIST, 1)),
        "list of the unknown kind 9",
    ),
    "endless numbers": (endless(U32), "its head needs more"),
    "endless strings": (endless(STRING), "its head needs more"),
    "endless string": (valued(b"a.key", STRING, struct.pack("<Q", 2**63)), "its head needs more"),
    "key twice": (made((key(b"a.key", 0, b"\1"),) * 2), "twice"),
    "key in Latin-1": (valued(b"\xfc", 0, b"\1"), "not UTF-8"),
    "alignment 0": (aligned(0), "aligned to 0"),
    "alignment 48": (aligned(48), "aligned to 48"),
    "alignment 2 GiB": (aligned(1 << 31), "aligned to 2147483648"),
    "alignment in words": (valued(b"general.alignment", STRING, text(b"32")), "aligned to '32'"),
    "tensor in Latin-1": (made(tensors=(tensor(b"\xfc", (8,)),)), "not UTF-8"),
    "tensor twice": (made(tensors=(ONE, tensor(b"a.weight", (8, 2), offset=64))), "one name"),
    "no dimensions": (shaped(()), "0 dimensions"),
    "five dimensions": (shaped((1,) * 5), "5 dimensions"),
    "negative size": (shaped((8, -1)), "the sizes"),
    "part of a block": (shaped((33, 2), 39), "blocks of 32"),
    "half a run of NVFP4": (shaped((32, 2), 40), "blocks of 64"),
    "unknown type": (shaped((8, 2), 77), "type 77"),
    "removed type": (shaped((32, 2), 4), "type 4"),
    "unaligned": (shaped((8,), offset=4), "offset 4"),
    "overlapping": (made(tensors=(ONE, tensor(b"b", (8, 2), offset=32))), f"offset 32; {OTHER}"),
    "all at one place": (made(tensors=(ONE, tensor(b"b", (8, 2)))), f"offset 0; {OTHER}"),
    "past the end": (shaped((1 << 20, 2)), "truncated"),
    "more than 64 bits": (shaped((1 << 62, 1 << 62)), "truncated"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_load_is_refused(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    error = refusal(tmp_path / "bad.gguf", content)
    assert error is not None
    assert error.exit_code == 2
    assert message in error.message
    assert "bad.gguf" in error.message


@pytest.mark.parametrize("version", [2, 3])
def test_no_tensors_no_keys_and_the_version_before_are_sound(tmp_path: Path, version: int) -> None:
    for content in (made(version=version), made(tensors=(ONE,), version=version), shaped((0, 4))):
        assert refusal(tmp_path / "small.gguf", content) is None


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(InputError, match="no sound GGUF file"):
        read_gguf_header(tmp_path / "folder.gguf")
