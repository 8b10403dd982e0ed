"""Judge a tiny model of every class by an engine's own code, on a CPU.

    .venv-engines/bin/python tests/engines/judges/judge_classes.py ENGINE FOLDER RESULTS.json

FOLDER is what classes.py made. The engine loads each artifact, and beside it what `dequantize`
makes of it: every weight that the engine holds in four bits, dequantized here, must equal the
engine's own weight of that name in the second model, bit for bit, and all other parameters must be
the same. So neither names nor fused layers are told here. A row is judged again only where the
artifact's digest or the engine's version is another. A crash ends one row, not the run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
MOST_SECONDS, MOST_BYTES = 240, 12 << 30
Row = dict[str, Any]


def judge_one(judge: Any, root: Path, name: str) -> Row:
    """Load an artifact and what it is in bf16, and compare them."""
    from by_values import compare_values

    step = "source"
    try:
        restored = judge.load(root / "bf16" / name)
        step = "refuses"
        loaded = judge.load(root / name)
        step = "unjudged"
        return compare_values(loaded, restored, root / name, root / "bf16" / name)
    except Exception as error:  # any error of an engine is its answer
        return failure(step, error)


def failure(outcome: str, error: Exception) -> Row:
    from results import error_line

    return {"outcome": outcome, "faults": [error_line(error)]}


def apart(judge: Any, root: Path, names: list[str]) -> dict[str, Row]:
    """Judge in a process of its own, which leaves nothing behind in the engine's code."""

    def work(say: Callable[[Row], None]) -> None:
        try:
            if judge.STARTS_APART:
                judge.start(root / "bf16" / names[0], tempfile.mkdtemp())
        except Exception as error:  # the engine does not read the configuration
            say({names[0]: failure("source", error)})
            return
        for name in names:
            signal.alarm(MOST_SECONDS)
            say({name: judge_one(judge, root, name)})

    rows: dict[str, Row] = {}
    lines, end = in_child(work)
    for line in lines:
        rows |= line
    if not rows:
        rows[names[0]] = {"outcome": "refuses", "faults": [end]}
    rest = [name for name in names if name not in rows]
    return rows | apart(judge, root, rest) if rest else rows


def apart_each(judge: Callable[[], Row]) -> Row:
    """Call a function in a process of its own."""

    def work(say: Callable[[Row], None]) -> None:
        signal.alarm(MOST_SECONDS)
        say(judge())

    lines, end = in_child(work)
    return lines[0] if lines else {"outcome": "refuses", "faults": [end]}


def in_child(work: Callable[[Callable[[Row], None]], None]) -> tuple[list[Row], str]:
    """Run work in a fork with limits; return what it said, and how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        try:
            work(lambda row: void(os.write(writer, json.dumps(row).encode() + b"\n")))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = [json.loads(line) for line in pipe.read().splitlines()]
    status = os.waitpid(child, 0)[1]
    by = f" by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
    return lines, f"the process ended{by}"


def void(_: object) -> None:
    """Return nothing."""


def main(engine: str, root: Path, results: Path, chosen: list[str]) -> None:
    """Judge what is new; write all rows."""
    judge: Any = __import__(f"judge_{engine}")
    version = judge.version()
    page = json.loads(results.read_text()) if results.exists() else {"rows": []}
    rows = {f"{row['class']}--{row['dialect']}": row for row in page["rows"]}
    names, todo = names_of(engine), {}
    for file in sorted(root.glob("*--*.json")):
        row, folder = json.loads(file.read_text()), file.with_suffix("")
        is_own = (
            folder.name == f"{row['class']}--{row['dialect']}"
        )  # others are transformers' choice
        if is_own and row["class"] in names and (not chosen or row["class"] in chosen):
            row |= {"version": version}
            if chosen or not row.items() <= rows.get(folder.name, {}).items():
                todo[folder.name] = row
    groups: dict[str, list[str]] = {}
    for name, row in todo.items():
        groups.setdefault(row["class"], []).append(name)
    with tempfile.TemporaryDirectory() as scratch:
        if todo and not judge.STARTS_APART:
            judge.start(root / next(iter(todo)), scratch)
        for group in groups.values():
            for name, row in apart(judge, root, group).items():
                rows[name] = todo[name] | row
                print(name, row["outcome"], *row["faults"][:2], flush=True)
            kept = [rows[each] for each in sorted(rows)]
            page = {"engine": ENGINES[engine], "version": version, "rows": kept}
            results.write_text(json.dumps(page, indent=1) + "\n")


def names_of(engine: str) -> set[str]:
    """Return the classes of an engine's registry."""
    import tomllib

    lists = Path(__file__).resolve().parents[3] / "configs" / "engines" / "models"
    return set(tomllib.loads((lists / f"{engine}.toml").read_text())["names"].split())


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
