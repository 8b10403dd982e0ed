"""What is asked of a disk: hashes, marks of files that changed, sizes, room, and names that reach
it.
"""

import errno
import hashlib
import os
import sys

import pytest

from fp4convert.errors import OutputError
from fp4convert.storage import disk, system
from fp4convert.storage.disk import (
    Mark,
    fsync_folder,
    hash_file,
    nbytes_there,
    reserve,
    write_errors_at,
)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sync_file_range")
def test_linux_is_told_to_begin(tmp_path):
    begin = system._sync_file_range()
    with (tmp_path / "m").open("wb", buffering=0) as out:
        out.write(bytes(8))
        assert begin(out.fileno(), 0, 8, system._WRITE_NOW) == 0
    assert begin(-1, 0, 8, system._WRITE_NOW) == -1


def test_a_file_that_changed_has_another_mark(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    for each in (path, other):
        each.write_bytes(b"1234")
        os.utime(each, ns=(5, 5))
    before = Mark.of(path.stat())
    assert Mark.of(path.stat()) == before
    os.replace(other, path)  # of the same size and time
    assert Mark.of(path.stat()) != before
    before = Mark.of(path.stat())
    path.write_bytes(b"12345")
    assert Mark.of(path.stat()) != before


def test_what_is_no_file_has_no_size(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    assert nbytes_there(tmp_path / "a") == 3
    assert [nbytes_there(tmp_path / name) for name in ("", "b", "a/b", "\0")] == [None] * 4


def test_room_is_kept_before_anything_is_written(tmp_path):
    has_call = hasattr(os, "posix_fallocate")
    with (tmp_path / "a").open("wb") as out:
        reserve(out.fileno(), 1 << 20)
        assert not has_call or os.fstat(out.fileno()).st_blocks * 512 >= 1 << 20
    if has_call:
        with (tmp_path / "a").open("rb") as file, pytest.raises(OSError, match="Bad file"):
            reserve(file.fileno(), 2 << 20)


def test_names_of_a_folder_are_flushed_and_what_is_none_is_an_error(tmp_path):
    fsync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "none")


@pytest.mark.parametrize("nbytes", [0, 1, disk.HASH_NBYTES, disk.HASH_NBYTES + 1])
def test_a_hash_is_that_of_the_whole_file(nbytes, tmp_path):
    data, seen = os.urandom(nbytes), []
    (tmp_path / "a").write_bytes(data)
    assert hash_file(tmp_path / "a", seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == nbytes


def test_a_refusal_names_the_path_and_what_was_needed(tmp_path):
    with pytest.raises(OutputError) as caught, write_errors_at(tmp_path / "none" / "a", 1234):
        (tmp_path / "none" / "a").write_bytes(b"")
    assert caught.value.code == "cannot-write"
    assert str(tmp_path / "none" / "a") in caught.value.message
    assert "1,234 bytes" in caught.value.message


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "f"
    disk.replace_file(path, b"first")

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="No space") as caught:
            disk.replace_file(path, b"second")
    assert caught.value.code == "disk-full"
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("f", b"first")]
    disk.replace_file(path, b"second")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("f", b"second")]


def test_nothing_is_written_where_a_link_of_that_name_leads(tmp_path):
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "f").symlink_to(tmp_path / "theirs")
    disk.replace_file(tmp_path / "f", b"ours")
    assert not (tmp_path / "f").is_symlink()
    assert [(tmp_path / name).read_bytes() for name in ("f", "theirs")] == [b"ours", b"theirs"]
