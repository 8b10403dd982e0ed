"""Make what the engines judge: tiny checkpoints of many families, and artifacts of each.

    PYTHONPATH=tests/support python tests/engines/judges/artifacts.py FOLDER [FAMILY...]

Families are those of tests/support/judged_families.py. Each artifact is what the
command `fp4convert quantize` writes; beside it stands ARTIFACT.json, which says what it is. What is
there already is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from families import FAMILIES
from judged_families import JUDGED, source

OPTIONS = {"": (), "mixed": ("--target-bits", "6.5"), "kv": ("--kv-cache", "fp8")}
# Dialect, format, activations and options, of which mixed has FP8 beside four bits.
VARIANTS = (
    ("compressed-tensors", "nvfp4", 16, ""),
    ("compressed-tensors", "nvfp4", 4, ""),
    ("compressed-tensors", "nvfp4", 16, "mixed"),
    ("compressed-tensors", "nvfp4", 16, "kv"),
    ("compressed-tensors", "mxfp4", 16, ""),
    ("compressed-tensors", "mxfp4", 4, ""),
    ("modelopt", "nvfp4", 16, ""),
    ("modelopt", "nvfp4", 4, ""),
    ("modelopt", "nvfp4", 16, "mixed"),
    ("modelopt", "nvfp4", 4, "mixed"),
    ("modelopt", "nvfp4", 4, "kv"),
    ("quark", "mxfp4", 16, ""),
    ("quark", "mxfp4", 4, ""),
    ("quark", "nvfp4", 4, ""),
)
GPT_OSS = (("gpt-oss", "mxfp4", 16, ""), *(row for row in VARIANTS if not row[3]))


def make(root: Path, names: tuple[str, ...] = JUDGED) -> Iterator[tuple[str, str]]:
    """Make all artifacts; return those that the command refuses, and its message."""
    rows = {family.name: family for family in FAMILIES}
    for name in names:
        model = root / name
        if not model.exists():
            source(rows[name], model)
        for dialect, fmt, activations, options in GPT_OSS if name == "gpt_oss" else VARIANTS:
            row = {"family": name, "dialect": dialect, "format": fmt, "activations": activations}
            artifact = root / "--".join(map(str, [*row.values(), *([options] if options else [])]))
            if artifact.exists():
                continue
            command = ["fp4convert", "quantize", str(model), "--output", str(artifact), "--quiet"]
            command += ["--dialect", dialect, "--format", fmt, "--activations", str(activations)]
            command += OPTIONS[options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                yield artifact.name, done.stderr.strip()
                continue
            Path(f"{artifact}.json").write_text(json.dumps({**row, "options": options}))


if __name__ == "__main__":
    for refused, message in make(Path(sys.argv[1]), tuple(sys.argv[2:]) or JUDGED):
        print(f"not made: {refused}: {message}")
