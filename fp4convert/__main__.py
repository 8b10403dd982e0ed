"""The command fp4convert, also python -m fp4convert."""

from __future__ import annotations

import gc
import os

from fp4convert.process import Stopped, end_if_stopped, listen, uncovered

# NumPy's threads wait for work without sleeping, from when they begin: 30 ms of a core each, unless
# told to sleep at once.
BLAS_WAIT = ("OPENBLAS_THREAD_TIMEOUT", "4")
# Objects made before Python looks for cycles; what loading makes stays, and is not looked through.
FEWEST_OBJECTS = 100_000


def main() -> None:
    """Run the command line; every expected failure ends with its exit code."""
    try:
        _run()
    except SystemExit as ended:
        end_if_stopped(int(ended.code or 0))
        raise
    finally:
        gc.freeze()  # the process ends: nothing is to be looked for


def _run() -> None:
    try:
        listen()
        os.environ.setdefault(*BLAS_WAIT)
        gc.set_threshold(FEWEST_OBJECTS)
        with uncovered():
            from fp4convert.cli.app import main as command_line

        command_line()
    except Stopped as stopped:  # before the command line could hear of it
        from fp4convert.cli.app import end_stopped

        end_stopped(stopped)


if __name__ == "__main__":
    main()
