"""A machine with AVX-512 for those that have none: Linux on the emulator Bochs.

No bytes pass through a network or a disk: the kernel gets an archive of Python, of the packages
that fp4convert needs and of what the machine is to do, and its answer comes over a serial line.

Sources of the formats: the kernel's Documentation/driver-api/early-userspace/buffer-format.rst;
Bochs' user manual, "The configuration file".
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from paths import ROOT

from fp4convert.process import cpu_library

TOOLS = ("bochs-bin", "xorriso", "apt-get", "dpkg-deb")
KERNEL = "linux-image-cloud-amd64"  # depends on the package that has it
BOOT_FILES = "/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32"
LEFT_OUT = {"test", "tests", "site-packages", "__pycache__", "idlelib", "tkinter", "ensurepip"}
GUEST = Path(__file__).with_name("emulated_guest.py")
SITE, WORK, LAST, PANIC = "/site", "/artifacts", "END", b"Kernel panic"
# Bochs' XSAVEC does not take the room that it says; without it Linux uses XSAVE.
LINUX = "console=ttyS0 mitigations=off nokaslr clearcpuid=xsavec,xsaves,pku quiet"
MACHINE = """\
cpu: model=corei7_skylake_x, count=1, ips=100000000
memory: guest=2047, host=2047
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={folder}/image.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial
display_library: sdl2
sound: driver=dummy, waveout=/dev/null
log: {folder}/log
"""


def has_kernel() -> bool:
    """Whether the packages of this system are Debian's."""
    return Path("/etc/os-release").is_file() and platform.freedesktop_os_release()["ID"] == "debian"


def run_there(folder: Path, work: Path, seconds: float) -> Iterator[dict[str, object]]:
    """Run emulated_guest.py on what is in `work`; yield each of its answers.

    folder  for the image; it takes about as much as Python and `work`
    Raises  RuntimeError, with the last that the machine said, where it ends, stops by a fault of
            the kernel, or has taken so many seconds
    """
    _write_image(folder, work)
    (folder / "bochsrc").write_text(MACHINE.format(folder=folder))
    process = subprocess.Popen(
        ["bochs-bin", "-q", "-unlock", "-f", folder / "bochsrc"],
        stdin=subprocess.PIPE,  # left open: its end would stop the emulator
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "SDL_VIDEODRIVER": "dummy"},
    )
    if process.stdin is None:
        raise RuntimeError("no pipe")
    try:
        process.stdin.write(b"c\n")  # "continue", where it is built with its debugger
        process.stdin.flush()
        for line in _lines(folder / "serial", process, seconds):
            if line == LAST:
                return
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(path: Path, process: subprocess.Popen[bytes], seconds: float) -> Iterator[str]:
    """Yield each whole line of a file that grows."""
    ended, read = time.monotonic() + seconds, 0
    while True:
        text = path.read_bytes() if path.exists() else b""
        *whole, _ = text[read:].split(b"\n")
        for line in whole:
            read += len(line) + 1
            yield line.decode(errors="replace").strip()
        if process.poll() is not None or PANIC in text or time.monotonic() > ended:
            raise RuntimeError(f"the machine said last: {text[-2000:].decode(errors='replace')}")
        time.sleep(0.5)


def _write_image(folder: Path, work: Path) -> None:
    """Write image.iso: a boot loader, the kernel, and the archive."""
    disk = folder / "disk" / "isolinux"
    disk.mkdir(parents=True)
    for file in BOOT_FILES:
        shutil.copy(file, disk)
    shutil.copy(_kernel(folder), disk / "linux")
    python = os.path.realpath(sys.executable)
    variables = f"PYTHONHOME={sys.base_prefix} PYTHONPATH={SITE} HF_HUB_OFFLINE=1"
    append = f"{LINUX} {variables} rdinit={python} -- {WORK}/{GUEST.name}"
    (disk / "isolinux.cfg").write_text(
        f"DEFAULT linux\nLABEL linux\n KERNEL linux\n INITRD archive\n APPEND {append}\n"
    )
    with (disk / "archive").open("wb") as out:
        for piece in _archive(_files(python, work)):
            out.write(piece)
    words = ["xorriso", "-as", "mkisofs", "-quiet", "-o", folder / "image.iso"]
    words += ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot"]
    words += ["-boot-load-size", "4", "-boot-info-table", disk.parent]
    subprocess.run(words, check=True, capture_output=True)


def _kernel(folder: Path) -> Path:
    """Fetch Debian's newest kernel for machines in clouds; nothing is installed."""
    shown = subprocess.run(
        ["apt-cache", "depends", KERNEL], check=True, capture_output=True, text=True
    ).stdout
    (name,) = re.findall(r"Depends: (linux-image-[\w.-]+)", shown)
    subprocess.run(["apt-get", "download", "-q", name], check=True, capture_output=True, cwd=folder)
    (package,) = folder.glob("linux-image-*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "kernel"], check=True)
    (found,) = (folder / "kernel" / "boot").glob("vmlinuz-*")
    return found


def _files(python: str, work: Path) -> dict[str, Path]:
    """Where each file is to be, and where it is: Python, packages, the work, shared libraries."""
    found = {python: Path(python)}
    standard = Path(sysconfig.get_path("stdlib"))
    found |= {str(standard / name): path for name, path in walk(standard)}
    for own in needed("fp4convert"):
        for file in own.files or ():
            if ".." not in file.parts and not LEFT_OUT & {*file.parts}:
                found[f"{SITE}/{file}"] = Path(str(own.locate_file(file)))
    found |= {f"{SITE}/fp4convert/{name}": path for name, path in walk(ROOT / "fp4convert")}
    found |= {f"{SITE}/fp4convert/configs/{name}": path for name, path in walk(ROOT / "configs")}
    library = Path(cpu_library()._name)
    found[f"{SITE}/fp4convert/{library.name}"] = library
    found |= {f"{WORK}/{name}": path for name, path in walk(work)}
    found[f"{WORK}/{GUEST.name}"] = GUEST
    binaries = [python, *(path for path in found.values() if ".so" in path.name)]
    return found | {str(path): path for path in _libraries(binaries)}


def needed(name: str) -> list[Distribution]:
    """The packages that one needs without any extra, and theirs; not itself."""
    found: dict[str, Distribution] = {}
    asked = [name]
    while asked:
        for text in distribution(asked.pop()).requires or ():
            requirement = Requirement(text)
            is_meant = not requirement.marker or requirement.marker.evaluate({"extra": ""})
            if is_meant and requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                asked.append(requirement.name)
    return list(found.values())


def walk(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not LEFT_OUT & {*name.parts}:
            yield name.as_posix(), path


def _libraries(binaries: Iterable[str | Path]) -> set[Path]:
    """The shared libraries that these load and no package brings, and the loader."""
    shown = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    found = {Path(name) for name in re.findall(r"(?:=> |^\t)(/\S+)", shown, re.MULTILINE)}
    return {path for path in found if not path.is_relative_to(sysconfig.get_path("platlib"))}


def _archive(files: dict[str, Path]) -> Iterator[bytes]:
    """The bytes of a "newc" archive: folders before what is in them."""
    folders = {str(parent) for name in files for parent in Path(name).parents}
    folders |= {"/proc", "/tmp"}
    for number, name in enumerate(sorted(folders - {"/"}), 1):
        yield _entry(number, name, 0o040755, b"")
    for number, (name, path) in enumerate(sorted(files.items()), len(folders) + 1):
        yield _entry(number, name, 0o100755, path.read_bytes())
    yield _entry(0, "/TRAILER!!!", 0, b"")


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    stored = name.removeprefix("/").encode() + b"\0"
    numbers = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(stored), 0)
    head = b"070701" + "".join(f"{one:08X}" for one in numbers).encode() + stored
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
