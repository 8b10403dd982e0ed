"""Debian's Python for ARM64, with this package, run by qemu-user: no root, nothing is installed.

Python and the libraries below it are packages of Debian for arm64; packages with compiled parts
are wheels for aarch64 of the versions that are installed here; the C library is compiled anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from emulated_machine import GUEST, LEFT_OUT, needed, walk
from paths import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
TOOLS = (COMPILER, EMULATOR, "apt-get", "apt-cache", "dpkg-deb")
COMPILED = ("numpy", "ml_dtypes", "safetensors", "regex")
APT = """\
APT::Architecture "arm64"; APT::Architectures {{"arm64";}}; APT::Sandbox::User "root";
Dir::State "{folder}/state"; Dir::State::status "{folder}/status"; Dir::Cache "{folder}/cache";
"""
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def run_there(folder: Path, work: Path, seconds: float) -> Iterator[dict[str, object]]:
    """Run emulated_guest.py on what is in `work`; yield each of its answers."""
    root, site = folder / "root", folder / "site"
    python = _unpack_python(folder, root)
    _fill_site(site, python.name.removeprefix("python"))
    _compile(site / "fp4convert" / "libcpu.so")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [EMULATOR, "-L", root, python, "-S", GUEST, work]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"exit {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}")
    yield from (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))


def _unpack_python(folder: Path, root: Path) -> Path:
    for name in ("state/lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "apt.conf").write_text(APT.format(folder=folder))

    def ask(*words: str) -> str:
        sources = "/etc/apt/sources.list.d/debian.sources"
        more = ("-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=/dev/null")
        command = [words[0], *(more if Path(sources).is_file() else ()), *words[1:]]
        there = {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}
        return subprocess.run(
            command, env=there, cwd=folder / "packages", check=True, capture_output=True, text=True
        ).stdout

    ask("apt-get", "update", "-q")
    newest = ask("apt-cache", "depends", "python3")
    (python,) = re.findall(r"Depends: (python[\d.]+)$", newest, re.MULTILINE)
    others = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    only = [f"--no-{kind}" for kind in others]
    listed = ask("apt-cache", "depends", "--recurse", *only, python, "libstdc++6")
    names = re.findall(r"^((?:lib|python|zlib)\S+)$", listed, re.MULTILINE)
    ask("apt-get", "download", "-q", *{name.partition(":")[0] for name in names})
    for package in sorted((folder / "packages").iterdir()):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root / "usr" / "bin" / python


def _fill_site(site: Path, python: str) -> None:
    """Lay out packages: wheels for aarch64, the others as they are here, and this one."""
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    words = [word for name in platforms for word in ("--platform", name)]
    words += ["--only-binary=:all:", "--no-deps", "--python-version", python, "--target", site]
    pinned = [f"{name}=={version(name)}" for name in COMPILED]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words, *pinned], check=True)
    for own in needed("fp4convert"):
        for file in own.files or () if own.name not in COMPILED else ():
            if ".." not in file.parts and not LEFT_OUT & {*file.parts} and file.suffix != ".so":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(own.locate_file(file)), site / file)
    for part, place in (("fp4convert", site), ("configs", site / "fp4convert")):
        for name, path in walk(ROOT / part):
            (place / part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place / part / name)


def _compile(library: Path) -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    (leveled,) = re.findall(r"^set\(leveled (.*)\)$", text, re.MULTILINE)
    (others,) = re.findall(r"^add_library\(cpu MODULE (.*)\)$", text, re.MULTILINE)
    names = [*(f"kernels/{name}" for name in leveled.split()), *others.split()]
    files = [ROOT / name for name in names]
    flags = [*FLAGS, "-DFP4_LEVEL=0", "-Wno-psabi", "-fPIC", "-shared"]
    subprocess.run([COMPILER, *flags, *files, "-o", library], check=True)
