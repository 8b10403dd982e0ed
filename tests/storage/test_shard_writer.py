"""Shards as they are written, and the package safetensors, which reads what was."""

import hashlib
import os
from itertools import accumulate

import pytest

from fp4convert.errors import OutputError
from fp4convert.storage import disk, shard_writer
from fp4convert.storage.disk import hash_file
from fp4convert.storage.safetensors import DTYPE_BITS, SafetensorsFrame, TensorRef, TensorSpec
from fp4convert.storage.shard_writer import ShardWriter


def test_a_writer_that_is_told_to_stop_does_not_hash_to_the_end(tmp_path):
    ref = TensorRef("a", "U8", (3,), "m", 8)
    writer = ShardWriter(tmp_path / "m", bytes(8), (ref,), 11)
    writer.append(ref, memoryview(b"abc"))

    def stop(nbytes):
        raise OutputError("stopped", f"after {nbytes} bytes")

    with pytest.raises(OutputError, match="after 11 bytes"):
        writer.finish(stop)
    writer.discard()
    assert not (tmp_path / "m").exists()


def test_a_hash_goes_along_with_what_is_written_and_never_beyond_a_gap(tmp_path):
    """Outputs grow in any order; what is begun again is hashed again."""
    sizes, at = {"a": 5, "empty": 0, "b": 700_000, "c": 9}, 8
    refs, told = {}, []
    for name, nbytes in sizes.items():
        refs[name] = TensorRef(name, "U8", (nbytes,), "m", at)
        at += nbytes + 3  # a gap of zeros
    writer = ShardWriter(tmp_path / "m", b"12345678", tuple(refs.values()), at)

    def hashed(*parts):
        """Append parts; say how far the hash has come."""
        for name, data in parts:
            writer.append(refs[name], memoryview(data))
        writer.hash_on(told.append)
        return sum(told)

    assert hashed(("c", b"x" * 9)) == 8  # the header
    assert hashed(("a", b"xx")) == 10
    assert hashed(("a", b"xxx")) == refs["b"].start
    assert hashed(("b", b"x" * 699_999)) == refs["c"].start - 4
    writer.begin_again()
    told.clear()
    data = os.urandom(700_000)
    assert hashed(("b", data[:10]), ("a", b"abcde"), ("b", data[10:])) == refs["c"].start
    assert hashed(("c", b"012345678")) == at
    whole = b"12345678abcde" + bytes(6) + data + bytes(3) + b"012345678" + bytes(3)
    assert writer.finish(told.append) == hashlib.sha256(whole).hexdigest()
    assert sum(told) == at
    assert (tmp_path / "m").read_bytes() == whole


def test_a_file_is_hashed_whole_and_every_block_is_told(tmp_path):
    data = bytes(disk.HASH_NBYTES) + bytes(range(256)) * (disk.HASH_NBYTES // 256) + b"end"
    (tmp_path / "m").write_bytes(data)
    told = []
    assert hash_file(tmp_path / "m", told.append) == hashlib.sha256(data).hexdigest()
    assert (sum(told), len(told)) == (len(data), 3)


def test_no_call_writes_more_than_a_short_run_of_pages(tmp_path, monkeypatch):
    data = bytes(range(256)) * (3 * shard_writer.WRITE_NBYTES // 256) + b"end"
    ref = TensorRef("a", "U8", (len(data),), "m", 8)
    writer = ShardWriter(tmp_path / "m", bytes(8), (ref,), 8 + len(data))
    pwrite, calls = os.pwrite, []

    def half(fd, piece, offset):
        """Writes half of what it is given, as systems may."""
        calls.append(len(piece))
        return pwrite(fd, piece[: (len(piece) + 1) // 2], offset)

    monkeypatch.setattr(os, "pwrite", half)
    writer.append(ref, memoryview(data))
    assert max(calls) == shard_writer.WRITE_NBYTES
    assert writer.finish() == hashlib.sha256(bytes(8) + data).hexdigest()


def test_the_disk_begins_with_every_output_while_it_is_written(tmp_path, monkeypatch):
    """Ranges follow each other and hold nothing that is not written; what is small stays for the
    end.
    """
    block, told = shard_writer.FLUSH_NBYTES, []
    least = shard_writer.LEAST_FLUSH_NBYTES
    sizes = [3 * block - 1, 2 * block, least, least - 1]
    starts = [*accumulate(sizes, initial=8)]
    places = zip("abcd", sizes, starts, strict=False)
    refs = [TensorRef(name, "U8", (nbytes,), "m", at) for name, nbytes, at in places]
    writer = ShardWriter(tmp_path / "m", bytes(8), refs, starts[-1])
    note = lambda fd, start, nbytes: told.append((start, nbytes))  # noqa: E731
    monkeypatch.setattr(shard_writer, "begin_flush", note)
    data = memoryview(bytes(block // 2 + 1))
    for ref in refs:
        for first in range(0, ref.nbytes, len(data)):
            before = len(told)
            writer.append(ref, data[: ref.nbytes - first])
            end = ref.start + first + len(data)
            assert all(start + nbytes <= end for start, nbytes in told[before:])
    first, second, third, _, _ = starts
    assert told == [
        *((first, block), (first + block, block), (first + 2 * block, block - 1)),
        *((second, block), (second + block, block), (third, least)),
    ]
    assert writer.finish() == hashlib.sha256(bytes(starts[-1])).hexdigest()


def write_tensors(path, specs):
    """Write tensors of zeros; return their addresses."""
    head, refs = SafetensorsFrame({"who": "é"}).lay_out(path.name, specs, {})
    path.write_bytes(head + bytes(sum(ref.nbytes for ref in refs)))
    return refs


def test_the_package_finds_the_same_addresses_of_every_dtype(tmp_path):
    specs = [TensorSpec(f"{kind} é", kind, (2, 4)) for kind in DTYPE_BITS]
    specs += [TensorSpec("empty", "F32", (0, 4)), TensorSpec("single", "BF16", ())]
    refs = write_tensors(tmp_path / "m", specs)
    assert shard_writer.difference_from_package(tmp_path / "m", refs) == ""


@pytest.mark.parametrize(
    ("refs", "expected"),
    [
        ((), "holds 'a' as U8 [4] at byte 104 by the package safetensors, and as nothing"),
        (("I8", (4,), 0), "as U8 [4] at byte 104 by the package safetensors, and as I8 [4]"),
        (("U8", (2, 2), 0), "and as U8 [2, 2] at byte 104 by fp4convert"),
        (("U8", (4,), 2), "and as U8 [4] at byte 106 by fp4convert"),
    ],
)
def test_another_address_than_the_package_finds_is_told(refs, expected, tmp_path):
    (ref,) = write_tensors(tmp_path / "m", [TensorSpec("a", "U8", (4,))])
    changed = []
    if refs:
        dtype, shape, moved = refs
        changed = [ref._replace(dtype=dtype, shape=shape, start=ref.start + moved)]
    assert expected in shard_writer.difference_from_package(tmp_path / "m", changed)


def test_what_the_package_refuses_is_told(tmp_path):
    (ref,) = write_tensors(tmp_path / "m", [TensorSpec("a", "U8", (4,))])
    with (tmp_path / "m").open("ab") as file:
        file.write(b"more")
    told = shard_writer.difference_from_package(tmp_path / "m", [ref])
    assert told.startswith("is refused by the package safetensors: ")


def test_the_package_reads_no_tensor(tmp_path):
    """A sparse file of a terabyte is looked at in no time."""
    head, (ref,) = SafetensorsFrame({}).lay_out("m", [TensorSpec("a", "U8", (1 << 40,))], {})
    (tmp_path / "m").write_bytes(head)
    os.truncate(tmp_path / "m", ref.start + ref.nbytes)
    assert shard_writer.difference_from_package(tmp_path / "m", [ref]) == ""
