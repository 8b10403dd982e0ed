"""What Windows lacks: conversions without it give the same bytes.

Each command runs in a Python that has lost it (support/like_windows.py); the library for Windows is
built, and its entry points are counted.  Nothing here ran on Windows.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import run
from tiny_models import make_llama

from fp4convert import process
from fp4convert.process import cpu_library
from fp4convert.storage import system

LIKE_WINDOWS = Path(__file__).parents[1] / "support" / "like_windows.py"
ROOT = Path(__file__).parents[2]


def run_like_windows(*words: object) -> dict[str, object]:
    found = subprocess.run(
        [sys.executable, LIKE_WINDOWS, *map(str, words), "--json", "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


@pytest.mark.slow
def test_bytes_are_the_same_without_what_windows_lacks(tmp_path):
    source = make_llama(tmp_path / "source")
    ours = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "ours", "-q", "--json")
    theirs = run_like_windows("quantize", source, "--format", "nvfp4", "-o", tmp_path / "theirs")
    assert theirs["digest"] == ours.json["digest"]
    checked = run_like_windows("verify", tmp_path / "theirs", "--source", source)
    assert checked["passed"] is True
    back = run("dequantize", tmp_path / "ours", "-o", tmp_path / "back", "-q", "--json")
    other = run_like_windows("dequantize", tmp_path / "theirs", "-o", tmp_path / "other")
    assert other["digest"] == back.json["digest"]
    again = run_like_windows("quantize", source, "--format", "nvfp4", "-o", tmp_path / "theirs")
    assert again["digest"] == ours.json["digest"]  # a finished folder is read, and left as it is


@pytest.mark.parametrize("gone", [(), ("pread", "preadv", "pwrite")])
def test_reading_and_writing_at_a_place(tmp_path, monkeypatch, gone):
    for name in gone:
        monkeypatch.delattr(os, name)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert system.write_at(fd, memoryview(b"0123456789"), 0) == 10
    assert system.write_at(fd, memoryview(b"ab"), 4) == 2
    assert system.read_at(fd, 4, 3) == b"3ab6"
    buffer = bytearray(4)
    assert system.read_into_at(fd, memoryview(buffer), 8) == 2
    assert buffer == b"89\0\0"
    os.close(fd)


@pytest.mark.parametrize("gone", [(), ("O_NOFOLLOW", "O_NONBLOCK")])
def test_a_link_is_not_opened(tmp_path, monkeypatch, gone):
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in gone:
        monkeypatch.setattr(system, {"O_NOFOLLOW": "_NOT_A_LINK"}.get(name, "_AT_ONCE"), 0)
    with pytest.raises(OSError, match="link"):
        system.open_no_link(tmp_path / "link", os.O_RDONLY)
    os.close(system.open_no_link(tmp_path / "there", os.O_RDONLY))


def test_nobody_is_asked_by_a_signal_that_windows_takes_for_ctrl_c(monkeypatch):
    assert process.is_running(os.getpid()) is True
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail("a signal was sent"))
    assert process.is_running(os.getpid()) is None


def exports_of(dll: bytes) -> set[str]:
    """The names that a 64-bit PE file exports (Microsoft's PE format, export directory table)."""
    start = struct.unpack_from("<I", dll, 0x3C)[0]
    sections, optional = struct.unpack_from("<H", dll, start + 6)[0], start + 24
    directory = struct.unpack_from("<I", dll, optional + 112)[0]
    table = optional + struct.unpack_from("<H", dll, start + 20)[0]
    places = [struct.unpack_from("<III", dll, table + 40 * at + 12) for at in range(sections)]

    def offset(address: int) -> int:
        begin, _, raw = next(p for p in places if p[0] <= address < p[0] + p[1])
        return address - begin + raw

    here = offset(directory)
    count, _, names = struct.unpack_from("<III", dll, here + 24)
    found = struct.unpack_from(f"<{count}I", dll, offset(names))
    return {dll[offset(at) : dll.index(b"\0", offset(at))].decode() for at in found}


@pytest.mark.slow
def test_the_library_for_windows_is_built_with_every_entry_point(tmp_path):
    """zig's clang, for x86_64-windows-gnu; the functions are those of the library in use."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: pip install ziglang")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang cc "$@"\n')
    compiler.chmod(0o755)
    build = tmp_path / "build"
    settings = {
        "CMAKE_SYSTEM_NAME": "Windows",
        "CMAKE_SYSTEM_PROCESSOR": "AMD64",
        "CMAKE_C_COMPILER": compiler,
        "CMAKE_C_COMPILER_TARGET": "x86_64-windows-gnu",
        "Python_EXECUTABLE": sys.executable,
    }
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Unix Makefiles", *defined], check=True)
    subprocess.run(["cmake", "--build", build, "-j", "2"], check=True)
    ours = ["nm", "-D", "--defined-only", cpu_library()._name]
    listed = subprocess.run(ours, capture_output=True, text=True, check=True)
    expected = {line.split()[2] for line in listed.stdout.splitlines()}
    assert exports_of((build / "libcpu.dll").read_bytes()) == expected


@pytest.mark.parametrize(("flag", "number"), [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_a_read_only_disk_is_not_called_a_folder_of_others(flag, number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        system.check_writable(tmp_path)
    assert caught.value.errno == number
