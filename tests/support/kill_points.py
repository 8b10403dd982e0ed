"""python kill_points.py FOLDER COMMAND...: kill a conversion at its k-th change of the disk, for
every k, and run it again.

Each run is a forked child in which the calls of COUNTED are counted; at call k the child sends
itself SIGKILL, a pwrite after
half of its bytes.  Prints one JSON document: how many points there were, and every broken promise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import fp4convert.cli.screen
import fp4convert.conversion.quantize
import fp4convert.numerics.backends.cpu  # noqa: F401 - imported once here, not in every child
from fp4convert.__main__ import main

COUNTED = ("pwrite", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir")
STATE = ".fp4convert"


def in_child(work: Callable[[], object]) -> int:
    """Exit status of `work` in a forked process; negative where a signal ended it."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            work()
        except SystemExit as stopped:
            os._exit(int(stopped.code or 0))
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def convert(command: list[str], output: Path, kill_at: int = 0) -> int:
    def work() -> None:
        sys.argv = ["fp4convert", *command, "-o", str(output), "-q", "--workers", "1"]
        count_calls(kill_at)
        main()

    return in_child(work)


def count_calls(kill_at: int) -> None:
    """Wrap the calls that change the disk; the one numbered `kill_at` is the last thing this
    process does.
    """
    calls = 0
    real = {name: getattr(os, name) for name in COUNTED}

    def wrap(name: str) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                if name == "pwrite":
                    fd, data, offset = arguments
                    real["pwrite"](fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **options)

        return counted

    for name in COUNTED:
        setattr(os, name, wrap(name))


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file under a final name."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and STATE not in path.relative_to(folder).parts
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def walk(command: list[str], folder: Path) -> dict[str, object]:
    clean = folder / "clean"
    assert convert(command, clean) == 0
    expected = hashes(clean)
    broken, point = [], 0
    while True:
        point += 1
        output = folder / "killed"
        status = convert(command, output, point)
        found = hashes(output) if output.exists() else {}
        partial = [name for name, sha256 in found.items() if expected.get(name) != sha256]
        if partial:
            broken.append(f"point {point}: {partial} hold other bytes than a clean run's")
        if status == 0:
            return {"points": point - 1, "broken": broken}
        if status != -signal.SIGKILL:
            broken.append(f"point {point}: exit status {status}")
        if convert(command, output) != 0 or hashes(output) != expected:
            broken.append(f"point {point}: the second run did not end like a clean one")
        if list((output / STATE / "tmp").iterdir()) or list((output / STATE / "claims").iterdir()):
            broken.append(f"point {point}: temporary files or claims stay after the second run")
        shutil.rmtree(output)


if __name__ == "__main__":
    print(json.dumps(walk(sys.argv[2:], Path(sys.argv[1]))))
