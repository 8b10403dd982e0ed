"""Seals: a file that nothing touched is not read again, and one that anything touched is."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FIRST, SECOND, run, write_llama

from fp4convert.execution import finish
from fp4convert.storage import disk
from fp4convert.storage.disk import hash_file, is_sealed, seal
from fp4convert.storage.sha256 import hash_each

SHA256 = "1" * 64


def change_a_byte(path: Path) -> None:
    """As a file would be by whoever hides it: of the same size and time."""
    status = path.stat()
    with path.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        byte = out.read(1)[0]
        out.seek(-1, os.SEEK_END)
        out.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns
    os.replace(copy, path)


TOUCHED: dict[str, Callable[[Path], object]] = {
    "byte": change_a_byte,
    "copy": replace_by_a_copy,
    "time": os.utime,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": Path.unlink,
}


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "file").write_bytes(b"weights")
    return tmp_path / "file"


def sealed(file: Path, sha256: str = SHA256) -> str:
    """Its seal, where the clock of this disk goes on within a moment."""
    clock = file.parent / "clock"
    clock.mkdir(exist_ok=True)
    found = seal(file, sha256, clock)
    if not found:
        pytest.skip("no boot id here, or temporary files whose times are too coarse for seals")
    return found


def test_a_file_that_nothing_touched_is_sealed(file):
    found = sealed(file)
    file.read_bytes()
    assert is_sealed(file, SHA256, found)
    moved = file.parent.rename(file.parent.with_name("moved"))  # the folder that it is in
    assert is_sealed(moved / "file", SHA256, found)


@pytest.mark.parametrize("how", TOUCHED)
def test_a_file_that_anything_touched_is_not(how, file):
    found = sealed(file)
    TOUCHED[how](file)
    assert not is_sealed(file, SHA256, found)


def test_every_change_shows_however_soon_it_comes(file):
    for _ in range(200):
        found = sealed(file)
        change_a_byte(file)
        assert not is_sealed(file, SHA256, found)


@pytest.mark.parametrize("machine", ["this", ""])
@pytest.mark.parametrize("found", ["", None, "0" * 64, 5])
def test_what_is_no_seal_proves_nothing(found, machine, file, monkeypatch):
    monkeypatch.setattr(disk, "boot_id", lambda: machine)
    assert not is_sealed(file, SHA256, found)


def test_a_seal_is_of_one_sha256_and_of_one_machine_since_it_was_started(file, monkeypatch):
    found = sealed(file)
    assert not is_sealed(file, "2" * 64, found)
    monkeypatch.setattr(disk, "boot_id", lambda: "another")
    assert not is_sealed(file, SHA256, found)


def test_without_a_boot_id_nothing_is_sealed(file, monkeypatch):
    monkeypatch.setattr(disk, "boot_id", lambda: "")
    assert seal(file, SHA256, file.parent) == ""


@pytest.mark.parametrize("late_ns", [0, -1, 1])
def test_nothing_is_sealed_before_the_disks_clock_has_gone_on(late_ns, file, tmp_path, monkeypatch):
    """A change in the tick of the last one could not be told from none."""
    clock, status = tmp_path / "clock", file.stat()
    clock.mkdir()
    now = max(status.st_mtime_ns, status.st_ctime_ns) + late_ns
    set_time = os.utime
    monkeypatch.setattr(os, "utime", lambda path: set_time(path, ns=(now, now)))
    assert bool(seal(file, SHA256, clock)) == (late_ns > 0 and bool(disk.boot_id()))


@pytest.mark.skipif(not disk.boot_id(), reason="this machine has no boot id")
def test_a_file_from_the_future_is_not_sealed(file, tmp_path):
    os.utime(file, ns=(2 * file.stat().st_mtime_ns,) * 2)
    assert seal(file, SHA256, tmp_path) == ""


def test_a_file_that_is_gone_is_not_sealed(file):
    file.unlink()
    assert seal(file, SHA256, file.parent) == ""


# what that means for a folder


@pytest.fixture
def read_again(monkeypatch) -> list[str]:
    """Names of the files that the end of a conversion reads."""
    names: list[str] = []

    def noting(files: Iterable[str], *each: Any) -> Iterator[Any]:
        return hash_each((names.append(Path(file).name) or file for file in files), *each)

    monkeypatch.setattr(finish, "hash_each", noting)
    return names


@pytest.fixture
def source(tmp_path) -> Path:
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


@pytest.fixture
def out(source, tmp_path) -> Path:
    """Two parts, by two processes as far as this folder knows."""
    sealed_here = tmp_path / "here"
    sealed_here.write_bytes(b"")
    sealed(sealed_here)
    for index in range(2):
        share = ("--shard-index", index, "--num-shards", 2)
        assert quantize(source, tmp_path / "out", *share).code == 0
    return tmp_path / "out"


def quantize(source: Path, out: Path, *options: object):
    return run("quantize", source, "--format", "nvfp4", "-o", out, "--json", "-q", *options)


FILES = sorted([FIRST, SECOND, "tokenizer.json"])


def test_parts_that_nothing_touched_are_not_read_again(source, out, read_again):
    alone = quantize(source, out.with_name("alone"))
    assert run("merge", out, "--json").json["digest"] == alone.json["digest"]
    assert quantize(source, out).code == 0
    assert read_again == []
    assert run("verify", out).code == 0


def test_parts_that_were_copied_are_read_again(source, out, read_again):
    copied = shutil.copytree(out, out.with_name("copied"))
    assert run("merge", copied).code == 0
    assert sorted(read_again) == FILES


def test_after_a_restart_everything_is_read_again(source, out, read_again, monkeypatch):
    monkeypatch.setattr(disk, "boot_id", lambda: "the next")
    assert run("merge", out).code == 0
    assert sorted(read_again) == FILES


def test_a_shard_that_was_touched_is_read_again_alone(source, out, read_again):
    os.utime(out / FIRST)
    assert run("merge", out).code == 0
    assert read_again == [FIRST]


def test_a_byte_that_changed_behind_restored_times_is_found(source, out, read_again):
    change_a_byte(out / FIRST)
    refused = run("merge", out, "--json")
    assert (refused.code, refused.json["error"]["code"], read_again) == (5, "damaged", [FIRST])
    alone = quantize(source, out.with_name("alone"))
    assert quantize(source, out).json["digest"] == alone.json["digest"]


def test_a_record_whose_sha256_is_another_is_not_believed(source, out, read_again):
    for record in (out / ".fp4convert" / "done").iterdir():
        if FIRST in record.read_text():
            record.write_text(record.read_text().replace(hash_file(out / FIRST), SHA256))
    refused = run("merge", out, "--json")
    assert (refused.code, refused.json["error"]["code"], read_again) == (5, "damaged", [FIRST])


@pytest.mark.parametrize("seal", [None, 5, "", [], {"a": 1}], ids=str)
def test_what_is_no_seal_in_a_record_has_its_file_read_again(seal, out, read_again):
    for path in (out / ".fp4convert" / "done").iterdir():
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "seals": dict.fromkeys(record["seals"], seal)}))
    assert run("merge", out).code == 0
    assert sorted(read_again) == FILES
