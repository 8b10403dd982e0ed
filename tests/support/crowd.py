"""python crowd.py FOLDER DELAY: run many commands at the same instant, each slowed down by chance
wherever it asks the system.

Standard input holds a JSON list of commands, each a list of words.  Each runs in a forked child
that has everything imported;
calls of SLOWED wait, now and then, for some DELAY seconds, so that what seldom happens between two
of them happens often.
Prints a JSON list of [exit status, standard output, standard error] in the order of the commands.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import fp4convert.cli.screen
import fp4convert.commands.publish
import fp4convert.execution.finish
import fp4convert.numerics.backends.cpu  # noqa: F401 - imported once here, not in every child
from fp4convert.__main__ import main

SLOWED = (
    "stat",
    "rename",
    "replace",
    "unlink",
    "listdir",
    "scandir",
    "open",
    "mkdir",
    "link",
    "rmdir",
)
SHARE = 0.3  # of the calls that wait


def slow_down(delay_seconds: float) -> None:
    chance = random.Random(os.getpid())

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def slowed(*arguments: object, **options: object) -> object:
            if chance.random() < SHARE:
                time.sleep(chance.expovariate(1 / delay_seconds))
            return real(*arguments, **options)

        return slowed

    for name in SLOWED:
        setattr(os, name, wrap(getattr(os, name)))


def start(command: list[str], number: int, gate: int, folder: Path, delay_seconds: float) -> int:
    """The process number of a child that waits at the gate."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(
                os.open(folder / f"{number}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                stream,
            )
        os.read(gate, 1)
        sys.argv = ["fp4convert", *command]
        slow_down(delay_seconds)
        main()
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_all(
    commands: list[list[str]], folder: Path, delay_seconds: float
) -> list[tuple[int, str, str]]:
    gate, opener = os.pipe()
    pids = [
        start(command, number, gate, folder, delay_seconds)
        for number, command in enumerate(commands)
    ]
    os.write(opener, b"." * len(pids))
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    texts = [
        [(folder / f"{number}.{stream}").read_text() for stream in (1, 2)]
        for number in range(len(pids))
    ]
    return [(status, *text) for status, text in zip(statuses, texts, strict=True)]


if __name__ == "__main__":
    print(json.dumps(run_all(json.load(sys.stdin), Path(sys.argv[1]), float(sys.argv[2]))))
