"""The CPU library as it is installed, the same built by the other compiler beside it, and the
memory's own speed in C.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from harness.measure import ROOT

COMMENTS = {
    "clang": rb"clang version ([\d.]+)",
    "gcc": rb"GCC: \([^)]*\) ([\d.]+)",
}  # in the ELF section .comment
ZIG_NAMES = """for word; do
  shift
  case $word in -march=*) word=$(echo "$word" | tr - _ | sed s/_/-/);; esac
  set -- "$@" "$word"
done"""

INSTALL = f"{Path(sys.executable).name} -m pip install cmake ziglang"


class UnavailableError(Exception):
    """What is missing, and the command that installs it."""


def installed() -> Path:
    """The library that the package runs."""
    (found,) = [item for item in files("fp4convert").iterdir() if item.name.startswith("libcpu.")]
    return Path(str(found))


def compiler_of(library: Path) -> tuple[str, str]:
    """(gcc or clang, its version), as the compiler has noted them; clang's linkers note GCC's start
    files, too.
    """
    data = library.read_bytes()
    for name, pattern in COMMENTS.items():
        if found := re.search(pattern, data):
            return name, found[1].decode()
    return "compiler", "unknown"


def built_by_the_other(library: Path) -> Path:
    """The library as clang builds it where gcc built the given one, or the other way round;
    UnavailableError without it.
    """
    name = "gcc" if compiler_of(library)[0] == "clang" else "clang"
    if importlib.util.find_spec("cmake") is None:
        raise UnavailableError(f"no cmake: {INSTALL}")
    build = ROOT / "build" / f"bench-{name}"
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    compiler, libraries = _compiler(name, build)
    variables = {"C_COMPILER": compiler, "C_STANDARD_LIBRARIES": libraries, "BUILD_TYPE": "Release"}
    options = [f"-DCMAKE_{key}={value}" for key, value in variables.items()]
    for words in (["-S", ROOT, "-B", build, *options], ["--build", build]):
        done = subprocess.run(
            [sys.executable, "-m", "cmake", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} did not build the CPU library:\n{done.stdout}{done.stderr}")
    (found,) = build.glob("libcpu.*")
    levels = [loaded(each).fp4_level(0) for each in (library, found)]
    if levels[0] != levels[1]:
        raise SystemExit(
            f"the CPU library picks x86-64-v{levels[0]} here, and as {name} built it "
            f"x86-64-v{levels[1]}: {found}"
        )
    return found


def _compiler(name: str, build: Path) -> tuple[Path, str]:
    """A program that compiles, and what it must link: the system's, or Zig's clang.

    Zig spells the names of processors its own way; its runtime library knows nothing of the
    processor, GCC's does.
    """
    if system := shutil.which(name):
        return Path(system), ""
    if name == "clang" and importlib.util.find_spec("ziglang") and shutil.which("gcc"):
        script = build / "clang"
        script.write_text(f'#!/bin/sh\n{ZIG_NAMES}\nexec {sys.executable} -m ziglang cc "$@"\n')
        script.chmod(0o755)
        library = subprocess.run(
            ["gcc", "-print-libgcc-file-name"], check=True, capture_output=True, text=True
        ).stdout.strip()
        return script, library
    raise UnavailableError(
        f"no {name}: "
        f"{f'{INSTALL}, and apt-get install gcc' if name == 'clang' else 'apt-get install gcc'}"
    )


def loaded(library: Path) -> ctypes.CDLL:
    """A copy of its own, so that the instruction set that it is held at is its own."""
    copy = Path(tempfile.mkdtemp(prefix="fp4convert-bench-")) / "libcpu.so"
    shutil.copyfile(library, copy)
    try:
        return ctypes.CDLL(str(copy))
    finally:
        shutil.rmtree(copy.parent)


def stream() -> ctypes.CDLL:
    """stream.c, built for this processor."""
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as folder:
        made = Path(folder) / "stream.so"
        source = Path(__file__).with_name("stream.c")
        subprocess.run(
            ["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", made], check=True
        )
        return ctypes.CDLL(str(made))
