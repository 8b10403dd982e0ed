"""Compile kernels/*.cu for one GPU target; keep the binaries.

CuPy's own compiler is not asked: it appends -arch=sm_120 where sm_120a is needed, which loses the
instruction that rounds to E2M1, and always adds -ftz=true, which flushes subnormals. A finished
cubin loads through cupy.RawModule(path=...) untouched.
Works without a GPU; importing this module imports nothing of CuPy.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fp4convert.errors import DeviceError, InputError, OutputError

HEADERS = ("fp4.h", "device.h", "codes.cuh", "grid.cuh", "screening.cuh")
ELF_HEADER_NBYTES = 64
OLDEST = (8, 0)  # the first with packed bf16 arithmetic
# cvt to and from e2m1x2, under their own targets alone.
WITH_CVT = frozenset({(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)})


class Target(NamedTuple):
    """What NVRTC compiles for.

    arch     as -arch takes it, such as sm_90 or sm_120a
    has_cvt  whether the kernels use the hardware's own E2M1 conversions
    """

    arch: str
    has_cvt: bool

    @property
    def options(self) -> tuple[str, ...]:
        """Return NVRTC's options: no contraction of a * b + c.

        Kernels say where they fuse. NVRTC's defaults keep subnormals and IEEE division.
        """
        defined = ("-DFP4_CVT",) if self.has_cvt else ()
        return (f"-arch={self.arch}", "-std=c++17", "--fmad=false", *defined)


def target_for(capability: tuple[int, int], known: Collection[int]) -> Target:
    """Choose the target for a compute capability.

    known  targets that NVRTC knows, as 80, 90, 120
    Code for sm_120a runs on 12.0 alone; code for a plain target also runs on later minors of its
    major, so that a GPU newer than NVRTC gets the newest of its major. Raises InputError where
    there is none.
    """
    major, minor = capability
    if capability < OLDEST:
        detail = f"compute capability {major}.{minor} is too old; expected 8.0 or newer"
        raise InputError("no-target", detail, "Use --device cpu.")
    if 10 * major + minor in known:
        has_cvt = capability in WITH_CVT
        return Target(f"sm_{major}{minor}{'a' * has_cvt}", has_cvt)
    older = [number for number in known if number // 10 == major and number % 10 < minor]
    if not older:
        version = ".".join(map(str, nvrtc_version()))
        detail = f"NVRTC {version} cannot compile for compute capability {major}.{minor}"
        detail += f"; it knows {', '.join(map(str, sorted(known)))}"
        raise InputError("no-target", detail, "Install a newer NVRTC.")
    return Target(f"sm_{max(older)}", has_cvt=False)


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor of the NVRTC that CuPy found, or raise."""
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()
    return int(major), int(minor)


def known_targets() -> tuple[int, ...]:
    """List every plain target of this NVRTC, as 80, 90, 120."""
    from cupy_backends.cuda.libs import nvrtc

    return tuple(int(number) for number in nvrtc.getSupportedArchs())


def kernels_folder() -> Path:
    """Find the sources: beside the package, or in the checkout."""
    return Path(str(files("fp4convert") / "kernels"))


def compile_cubin(
    source: Path, target: Target, extra_options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile one .cu file; return an ELF file, and the compiler's log."""
    from cupy_backends.cuda.libs import nvrtc

    headers = [(kernels_folder() / name).read_bytes() for name in HEADERS]
    names, text = [name.encode() for name in HEADERS], source.read_text(encoding="utf-8")
    program = nvrtc.createProgram(text, source.name, headers, names)
    try:
        nvrtc.compileProgram(program, (*target.options, *extra_options))
        return nvrtc.getCUBIN(program) + b"\0", _log(program)  # CuPy cuts the last byte of the file
    except nvrtc.NVRTCError as error:
        lines = [line.strip() for line in _log(program).splitlines() if "error" in line]
        version = ".".join(map(str, nvrtc_version()))
        detail = f"NVRTC {version} does not compile {source.name} for {target.arch}"
        raise DeviceError("no-kernel", f"{detail}: {[*lines, str(error)][0]}") from error
    finally:
        nvrtc.destroyProgram(program)


def _log(program: int) -> str:
    from cupy_backends.cuda.libs import nvrtc

    return str(nvrtc.getProgramLog(program)).rstrip("\0\n")


def cubin_path(source: Path, target: Target) -> Path:
    """Find the cached binary of one .cu file; compile it where none is."""
    parts = [source, *(kernels_folder() / name for name in HEADERS)]
    key = hashlib.sha256(repr((target.options, nvrtc_version())).encode())
    for part in parts:
        key.update(hashlib.sha256(part.read_bytes()).digest())
    name = f"{source.stem}-{target.arch}-{key.hexdigest()[:16]}.cubin"
    with suppress(OSError):
        if _is_whole(path := cache_folder() / name):
            return path
    cubin, _ = compile_cubin(source, target)
    for folder in (cache_folder, _own_folder):
        with suppress(OSError):
            store(path := folder() / name, cubin)
            return path
    detail = f"neither {cache_folder()} nor {tempfile.gettempdir()} takes a compiled kernel"
    next_step = "Set XDG_CACHE_HOME or TMPDIR to a folder that can be written."
    raise OutputError("no-cache", detail, next_step)


def cache_folder() -> Path:
    """Choose where binaries are kept.

    That is fp4convert below XDG_CACHE_HOME or ~/.cache; without a home, a folder of this process.
    """
    candidates = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    found = next((candidate for candidate in candidates if os.path.isabs(candidate)), None)
    return Path(found) / "fp4convert" if found else _own_folder()


@cache
def _own_folder() -> Path:
    """Make a folder for this process, where a cache takes no files."""
    folder = Path(tempfile.mkdtemp(prefix="fp4convert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(path: Path) -> bool:
    """Return whether an ELF file is as long as its tables say."""
    if not path.is_file():
        return False
    cubin = path.read_bytes()
    if len(cubin) < ELF_HEADER_NBYTES or not cubin.startswith(b"\x7fELF"):
        return False
    programs_at, sections_at, _, _, *counts = struct.unpack_from("<QQIHHHHH", cubin, 32)
    ends = programs_at + counts[0] * counts[1], sections_at + counts[2] * counts[3]
    return bool(len(cubin) >= max(ends))


def discard(path: Path) -> None:
    """Take a binary out of the cache, so that it is compiled again."""
    with suppress(OSError):
        path.unlink()


def store(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
        os.replace(part, path)
    except OSError:
        os.unlink(part)
        raise
