"""Fuzz a target, replay inputs, or run some changes of every seed.

PYTHONPATH=tests/support .venv/bin/python -m fuzzing --changes 40
PYTHONPATH=tests/support .venv/bin/python -m fuzzing --target gguf --input FILE
PYTHONPATH=tests/support .venv/bin/python -m fuzzing --target gguf --seconds 600
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FunctionType

from fuzzing.mutation import mutate

FOUND = Path("build", "fuzz")  # what was found, and the corpus as it grows
COLLECT = 1000  # inputs between two looks for cycles


def main() -> int:
    words = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    words.add_argument("--target", help="one of targets.py; else all, one after the other")
    words.add_argument("--changes", type=int, default=0, help="of each seed of the corpus")
    words.add_argument("--first", type=int, default=0, help="number of the first change")
    words.add_argument("--input", type=Path, help="one file, read once")
    words.add_argument("--seconds", type=int, help="coverage-guided, by atheris")
    asked = words.parse_args()
    if asked.seconds and not asked.target:
        words.error("--seconds is for one --target")
    scratch = Path(tempfile.mkdtemp(prefix="fuzzing-"))
    try:
        return fuzz(asked, scratch) if asked.seconds else replay(asked, scratch)
    finally:
        shutil.rmtree(scratch)


def replay(asked: argparse.Namespace, scratch: Path) -> int:
    """Run every seed, and changes of it that its name and a number decide."""
    from fuzzing.targets import CORPUS, TARGETS, check, limits

    count, faults, began = 0, 0, time.monotonic()
    numbers = range(asked.first, asked.first + asked.changes)
    with limits():
        for name in [asked.target] if asked.target else TARGETS:
            for seed in [asked.input] if asked.input else sorted((CORPUS / name).iterdir()):
                data = seed.read_bytes()
                chances = [random.Random(f"{name} {seed.name} {number}") for number in numbers]
                cases = [data, *(mutate(data, one) for one in chances)]
                for number, case in enumerate(cases, -1):  # -1: the seed as it is
                    count += 1
                    try:
                        check(name, case, scratch)
                    except BaseException as error:
                        faults += 1
                        change = "seed" if number < 0 else asked.first + number
                        found = FOUND / f"{name}-{seed.stem}-{change}"
                        found.parent.mkdir(parents=True, exist_ok=True)
                        found.write_bytes(case)
                        print(f"fault: {name}, {found}:")
                        traceback.print_exception(error, limit=-4, file=sys.stdout)
                        if isinstance(error, KeyboardInterrupt):
                            raise
    print(f"{count} inputs, {faults} faults, {time.monotonic() - began:.0f} s")
    return faults > 0


def fuzz(asked: argparse.Namespace, scratch: Path) -> int:
    """Let coverage guide the changes, until the time is over or a fault is found."""
    import atheris

    from fuzzing.targets import CORPUS, check, limits

    with limits():
        for seed in (CORPUS / asked.target).iterdir():  # which imports what it needs
            check(asked.target, seed.read_bytes(), scratch)
    # Its hook of imports does not see through the loader of an editable install.
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and str(each.__module__).startswith("fp4convert"):
            atheris.instrument_func(each)

    def change(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        return mutate(data, chance, most)

    numbers = itertools.count(1)

    def read(data: bytes) -> None:
        check(asked.target, data, scratch)
        if next(numbers) % COLLECT == 0:  # the command line leaves that to the end of its process
            gc.collect()

    corpus = FOUND / asked.target
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={asked.seconds}", "-timeout=0", "-rss_limit_mb=3000"]
    options += ["-max_len=65536", f"-artifact_prefix={FOUND}/{asked.target}-", "-print_pcs=0"]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus), str(CORPUS / asked.target)],
        read,
        custom_mutator=change,
    )
    with limits():
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
