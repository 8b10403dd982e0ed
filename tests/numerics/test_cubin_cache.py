"""The cache of compiled kernels: one whole file for each source, header, target and compiler,
wherever it may be.
"""

import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from itertools import product
from pathlib import Path

import pytest
from checkpoints import WAIT_SECONDS

from fp4convert.errors import OutputError
from fp4convert.numerics.backends import cubins, entry_points
from fp4convert.numerics.backends.cubins import Target

PLAIN = Target("sm_90", has_cvt=False)
ELF = b"\x7fELF" + bytes(60)  # without any table


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache folder, not yet there; temporary files go to a folder beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cubins._own_folder.cache_clear()  # of the process, and so of the test before
    return tmp_path / "cache" / "fp4convert"


@pytest.fixture
def compiled(cache, monkeypatch) -> list[Path]:
    """The sources given to the compiler, which here takes no time and gives four bytes."""
    sources: list[Path] = []

    def compile_cubin(source: Path, target: Target) -> tuple[bytes, str]:
        sources.append(source)
        return ELF, ""

    monkeypatch.setattr(cubins, "compile_cubin", compile_cubin)
    return sources


def source() -> Path:
    return cubins.kernels_folder() / "dequantize.cu"


def test_second_call_does_not_compile(cache, monkeypatch):
    path = cubins.cubin_path(source(), PLAIN)
    assert path.read_bytes() == cubins.compile_cubin(source(), PLAIN)[0]
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(cubins, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert cubins.cubin_path(source(), PLAIN) == path


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_stored_file_is_whole(cache, capability):
    """It ends where its last table ends: CuPy's getCUBIN cuts a byte, without which the file is too
    short.
    """
    stored = cubins.cubin_path(
        source(), cubins.target_for(capability, cubins.known_targets())
    ).read_bytes()
    assert stored[:4] == ELF[:4]
    programs_start, sections_start = struct.unpack_from("<2Q", stored, 0x20)
    program_nbytes, programs, section_nbytes, sections = struct.unpack_from("<4H", stored, 0x36)
    ends = programs_start + programs * program_nbytes, sections_start + sections * section_nbytes
    assert max(ends) == len(stored)


@pytest.mark.parametrize("changed", ["fp4.h", "device.h", "dequantize.cu"])
def test_changed_source_is_compiled_again(compiled, tmp_path, monkeypatch, changed):
    copy = shutil.copytree(cubins.kernels_folder(), tmp_path / "kernels")
    before = cubins.cubin_path(source(), PLAIN)
    monkeypatch.setattr(cubins, "kernels_folder", lambda: copy)
    assert cubins.cubin_path(source(), PLAIN) == before
    data = bytearray((copy / changed).read_bytes())
    data[-2] ^= 1
    (copy / changed).write_bytes(data)
    assert cubins.cubin_path(source(), PLAIN) != before
    assert len(compiled) == 2


def test_each_source_target_and_nvrtc_has_its_own_file(compiled, monkeypatch):
    targets = [
        Target(arch, has_cvt)
        for arch in ("sm_90", "sm_120", "sm_120a")
        for has_cvt in (False, True)
    ]
    cases = list(
        product((cubins.kernels_folder() / name for name in entry_points.SOURCES), targets)
    )
    paths = {cubins.cubin_path(*case) for case in cases}
    monkeypatch.setattr(cubins, "nvrtc_version", lambda: (99, 0))
    paths |= {cubins.cubin_path(*case) for case in cases}
    assert len(paths) == len(compiled) == 2 * len(cases)


def test_two_threads_give_one_whole_file(cache, monkeypatch):
    meeting = threading.Barrier(2, timeout=WAIT_SECONDS)  # both find nothing and both compile
    content, paths = bytes(range(256)) * 1024, []

    def compile_cubin(*_: object) -> tuple[bytes, str]:
        meeting.wait()
        return content, ""

    monkeypatch.setattr(cubins, "compile_cubin", compile_cubin)
    threads = [
        threading.Thread(target=lambda: paths.append(cubins.cubin_path(source(), PLAIN)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [*cache.iterdir()] * 2
    assert paths[0].read_bytes() == content


def test_two_processes_give_one_whole_file(cache):
    asked = f"cubins.cubin_path(cubins.kernels_folder() / 'dequantize.cu', cubins.{PLAIN!r})"
    program = f"from fp4convert.numerics.backends import cubins; print({asked})"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [Path(process.communicate(timeout=WAIT_SECONDS)[0].strip()) for process in processes]
    assert paths == [*cache.iterdir()] * 2
    assert paths[0].read_bytes() == cubins.compile_cubin(source(), PLAIN)[0]


def test_cache_that_is_a_file_is_left_alone(compiled, cache, tmp_path):
    cache.parent.mkdir()
    cache.write_text("not a folder")
    path = cubins.cubin_path(source(), PLAIN)
    assert path.read_bytes() == ELF
    assert path.is_relative_to(tmp_path / "temporary")
    assert cache.read_text() == "not a folder"


def test_cache_that_takes_no_files_is_left_alone(compiled, cache, tmp_path):
    """/proc, which refuses files to root too, stands for a folder on a read-only disk."""
    cache.parent.mkdir()
    cache.symlink_to("/proc")
    path = cubins.cubin_path(source(), PLAIN)
    assert path.read_bytes() == ELF
    assert [*(tmp_path / "temporary").rglob("*.cubin")] == [path]
    assert not [*Path("/proc").glob("dequantize*")]


def test_cache_that_may_not_be_entered_is_passed_by(compiled, cache, monkeypatch):
    def is_file(path: Path) -> bool:
        if path.is_relative_to(cache):
            raise PermissionError(13, "Permission denied", str(path))
        return False

    monkeypatch.setattr(Path, "is_file", is_file)
    assert cubins.cubin_path(source(), PLAIN).read_bytes() == ELF


def test_failed_write_leaves_nothing(compiled, cache, tmp_path, monkeypatch):
    def replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(OutputError, match="takes a compiled kernel"):
        cubins.cubin_path(source(), PLAIN)
    assert not [
        path
        for folder in (cache, tmp_path / "temporary")
        for path in folder.rglob("*")
        if path.is_file()
    ]


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"not a cubin" * 9])
def test_a_damaged_file_is_compiled_again(compiled, cache, damage):
    path = cubins.cubin_path(source(), PLAIN)
    path.write_bytes(damage)
    assert cubins.cubin_path(source(), PLAIN) == path
    assert path.read_bytes() == ELF
    assert len(compiled) == 2


def test_a_cubin_cut_short_is_compiled_again(cache):
    path = cubins.cubin_path(source(), PLAIN)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert cubins.cubin_path(source(), PLAIN).read_bytes() == whole


def test_without_a_home_binaries_are_for_this_process_alone(compiled, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cubins.cubin_path(source(), PLAIN).is_relative_to(tmp_path / "temporary")


def test_cache_is_below_home_without_xdg_cache_home(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (
        lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""),
        lambda: monkeypatch.delenv("XDG_CACHE_HOME"),
    ):
        unset()
        assert cubins.cubin_path(source(), PLAIN).parent == tmp_path / ".cache" / "fp4convert"
    assert len(compiled) == 1
