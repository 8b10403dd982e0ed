"""Files in the system's cache, out of it, and on the disk; no root is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

PAGE = mmap.PAGESIZE
MEBIBYTE = 1 << 20


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def put_on_disk(folder: Path) -> None:
    """fsync of every file in a folder, of every folder, and of that which holds it."""
    for path in (
        *files_of(folder),
        *(path for path in folder.rglob("*") if path.is_dir()),
        folder,
        folder.parent,
    ):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_cold(folder: Path) -> None:
    """Have no page of these files in the cache; SystemExit where the system keeps them."""
    put_on_disk(folder)
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if (share := cached_share(folder)) > 0.01:
        raise SystemExit(
            f"{folder}: {share:.0%} is still in the cache; a cold run cannot be measured here"
        )


def make_warm(folder: Path) -> None:
    """Have every page of these files in the cache; SystemExit where the memory is too little."""
    for path in files_of(folder):
        with path.open("rb", buffering=0) as stream:
            while stream.read(MEBIBYTE):
                pass
    if (share := cached_share(folder)) < 0.99:
        raise SystemExit(
            f"{folder}: only {share:.0%} stays in the cache; a warm run cannot be measured here"
        )


def cached_share(folder: Path) -> float:
    """Of the pages of these files, how many are in the cache, as mincore tells."""
    found = pages = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in files_of(folder):
        if not path.stat().st_size:
            continue
        with (
            path.open("rb") as stream,
            mmap.mmap(
                stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            ) as held,
        ):
            each = (ctypes.c_ubyte * -(-len(held) // PAGE))()
            first = ctypes.c_char.from_buffer(held)
            failed = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(held)), each
            )
            del first  # else the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        found += sum(byte & 1 for byte in bytes(each))
        pages += len(each)
    return found / max(pages, 1)


def file_system(folder: Path) -> str:
    """What holds a folder, as the system calls it."""
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
