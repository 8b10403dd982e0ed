"""Run seeds: one with its trace, or many.

PYTHONPATH=tests:tests/support .venv/bin/python -m simulation --seed 7 --trace
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from simulation import mutations


def main() -> int:
    words = argparse.ArgumentParser(prog="simulation", description=__doc__)
    words.add_argument("--seed", type=int, help="one seed")
    words.add_argument("--seeds", default="0:1000", help="FIRST:END, as many")
    words.add_argument("--trace", action="store_true", help="print every step")
    words.add_argument("--most", type=int, default=1, help="stop after so many broken promises")
    words.add_argument("--mutation", help="a fault of the code that is to be found")
    words.add_argument("--hash", action="store_true", help="print the hash of each trace")
    asked = words.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names have one order then
        os.execve(
            sys.executable,
            [sys.executable, "-m", "simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    if asked.mutation:
        mutations.apply(asked.mutation)
    from simulation import runs  # of the package as it is now

    first, _, end = asked.seeds.partition(":")
    seeds = range(int(first), int(end)) if asked.seed is None else range(asked.seed, asked.seed + 1)
    folder = Path(tempfile.mkdtemp(prefix="simulation-"))
    try:
        return runs.run(folder, seeds, asked)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
