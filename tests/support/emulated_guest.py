"""The first process of an emulated machine: make artifacts again, and say of each whether it is the
same.

/artifacts, or the folder that is given, has one for each model: its source, and artifacts of it.
"""

import ctypes
import io
import json
import platform
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path


def run(*words: object) -> tuple[int, str, str]:
    from fp4convert.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["fp4convert", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stopped:
        return int(stopped.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def say(**answer: object) -> None:
    print("\n" + json.dumps(answer), flush=True)


def work(place: str) -> None:
    from fp4convert.process import cpu_library

    say(level=cpu_library().fp4_level(0), machine=platform.machine())
    for folder in sorted(path for path in Path(place).iterdir() if path.is_dir()):
        for artifact in sorted(folder.iterdir()):
            if artifact.name != "source":
                words = ("reproduce", artifact, "--source", folder / "source", "--json")
                code, out, err = run(*words)
                say(artifact=f"{folder.name}/{artifact.name}", code=code, out=out, err=err)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a process of an emulator, not a machine
        sys.exit(work(sys.argv[1]))
    ctypes.CDLL(None).mount(b"none", b"/proc", b"proc", 0, None)
    try:
        work("/artifacts")
    except BaseException:
        say(error=traceback.format_exc())
    print("\nEND", flush=True)
    signal.pause()
