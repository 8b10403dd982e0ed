"""Build the table of architectures: configs/architectures, of three packages' own classes.

    python tests/architectures/build.py [--only REGEX] [transformers] [diffusers] [mlx]

Each config class is read in a process of its own. What was made before stays for the packages that
are not named, and for the jobs that --only does not match. Failures stand in build/architectures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pack
from pool import run_all

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the reader, which the builder asks what it expects
FOLDER = ROOT / "configs" / "architectures"
LOGS = ROOT / "build" / "architectures"
SOURCES = {
    "transformers": ("transformers", "torch"),
    "diffusers": ("diffusers", "torch"),
    "mlx": ("mlx-lm", "mlx"),
}


def rows_of(source: str, only: str = "") -> list[dict[str, Any]]:
    """Return the rows of a package's classes; those that fail are written beside."""
    reader = importlib.import_module(f"of_{source}")
    jobs, failed = reader.jobs()
    arguments = [job for job in jobs.items() if re.search(only, str(job))]
    wanted = {_name(each) for _, classes in arguments for each in classes}
    log = LOGS / f"{source}.jsonl"
    before = [json.loads(line) for line in log.open(encoding="utf-8")] if only else []
    rows = [row for row in before if row["class"] not in wanted]
    with log.open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row), file=file)
        for (_, classes), found, death in run_all(reader.rows, arguments):
            if death:
                missing = {_name(each) for each in classes} - {row["class"] for row in found}
                found += [{"class": name, "error": death} for name in sorted(missing)]
            for row in found:
                print(json.dumps(row), file=file, flush=True)
            rows += found
    failed |= {row["class"]: row["error"] for row in rows if "error" in row}
    lines = [f"{name}: {error}\n" for name, error in sorted(failed.items())]
    (LOGS / f"{source}-failed.txt").write_text("".join(lines), encoding="utf-8")
    causes = Counter(error.partition(":")[0] for error in failed.values())
    rows = [row for row in rows if "error" not in row]
    print(f"{source}: {len(rows)} classes, {len(failed)} failed: {dict(causes)}")
    return rows


def _name(each: Any) -> str:
    return each.__name__ if isinstance(each, type) else str(each)


def main() -> None:
    """Write the lines of the packages named and the index of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*", default=[*SOURCES])
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "index.json"
    index = {"sources": {}, "classes": {}, "types": {}, "families": {}}
    if path.exists():
        index |= json.loads(path.read_text(encoding="ascii"))
    for source in options.sources:
        began = time.monotonic()
        rows = rows_of(source, options.only)
        made = pack.write_source(options.folder, source, rows)
        index["sources"][source] = {
            "version": version(SOURCES[source][0]),
            SOURCES[source][1]: version(SOURCES[source][1]).partition("+")[0],
        }
        for key, value in made.items():
            index[key][source] = value
        if source == "transformers":
            reader = importlib.import_module("of_transformers")
            index["types"] = reader.types(made["classes"])
            index["bases"] = reader.made_for("MODEL_MAPPING", made["classes"])
            index["causal"] = reader.made_for("MODEL_FOR_CAUSAL_LM_MAPPING", made["classes"])
            index["legacy"] = importlib.import_module("renamings").legacy()
        print(f"{source}: {time.monotonic() - began:.0f} s")
    for key in ("sources", "classes", "families"):
        index[key] = {source: index[key][source] for source in SOURCES if source in index[key]}
    path.write_text(pack.dumped(index) + "\n", encoding="ascii")


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1")
    main()
