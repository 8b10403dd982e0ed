"""Whether a file is still as it was when it was hashed, without reading it again.

A seal is made of a file's sha256 and of all that changes when the file does: device, inode, size, times of data and inode,
and the machine since it was started.  A seal that is not found again proves nothing: then the file is read.  A seal is never
found again on another machine, after a restart or in a copied folder, and none is made where there is no boot id.  What goes
wrong below the file system, on a disk that loses bits, it does not see: that shows when the file is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from fp4convert.disk import Mark

LOOKS, LOOK_SECONDS = 12, 0.001  # at the file system's clock; most go on every 1 to 10 ms


def boot_id() -> str:
    """A word that this machine has had since it was started, and no other has; "" where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def seal(path: Path, sha256: str, clock: Path) -> str:
    """The seal of a file that has its final name; "" where later changes might not show in it.

    clock  a folder of ours on the same file system, whose time is set, to learn what time it is there: a change within the same
           tick as the last one would leave the file's times as they are
    """
    try:
        for _ in range(LOOKS):
            os.utime(clock)
            now = clock.stat().st_mtime_ns  # before the file: whatever changes it afterwards is later
            found, changed_ns = _look(path, sha256)
            if changed_ns < now:
                return found
            time.sleep(LOOK_SECONDS)
    except OSError:  # the file or the folder is gone: the work itself will tell
        pass
    return ""


def is_sealed(path: Path, sha256: str, found: str | None) -> bool:
    """True where the file is what was sealed as having that sha256."""
    try:
        return bool(found) and _look(path, sha256)[0] == found
    except OSError:
        return False


def _look(path: Path, sha256: str) -> tuple[str, int]:
    """The seal that a file has now, and when it last changed by its file system's clock, in ns."""
    fd = os.open(path, os.O_RDONLY)  # opened: a network file system asks its server then
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    machine, mark = boot_id(), Mark.of(status)
    sealed = hashlib.sha256(json.dumps([machine, status.st_dev, *mark, sha256]).encode()).hexdigest() if machine else ""
    return sealed, max(mark.written_ns, mark.changed_ns)
