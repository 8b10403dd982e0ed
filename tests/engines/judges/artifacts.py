"""Make what the engines judge: tiny checkpoints of many families, and artifacts of each.

    PYTHONPATH=tests/support python tests/engines/judges/artifacts.py FOLDER [FAMILY...]

Families are those of tests/support/judged_families.py. Each artifact is what the
function fp4convert.quantize writes; beside it stands ARTIFACT.json, which says what it is. What is
there already is not made again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from classes import record_of
from families import FAMILIES
from judged_families import JUDGED, source

import fp4convert

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{"": {}, "mixed": {"target_bits": 6.5}, "kv": {"kv_cache": "fp8"}},
    "experts": {"exclude": r"re:(?!.*\.experts\.)"},
    "kept": {"exclude": "*.experts.*"},
}
# Dialect, format, activations and options, of which mixed has FP8 beside four bits, and kept has
# experts as they are.
VARIANTS = (
    ("compressed-tensors", "nvfp4", 16, ""),
    ("compressed-tensors", "nvfp4", 4, ""),
    ("compressed-tensors", "nvfp4", 16, "mixed"),
    ("compressed-tensors", "nvfp4", 16, "kv"),
    ("compressed-tensors", "nvfp4", 16, "kept"),
    ("compressed-tensors", "mxfp4", 16, ""),
    ("compressed-tensors", "mxfp4", 4, ""),
    ("compressed-tensors", "mxfp4", 16, "experts"),
    ("modelopt", "nvfp4", 16, ""),
    ("modelopt", "nvfp4", 4, ""),
    ("modelopt", "nvfp4", 16, "mixed"),
    ("modelopt", "nvfp4", 4, "mixed"),
    ("modelopt", "nvfp4", 4, "kv"),
    ("quark", "mxfp4", 16, ""),
    ("quark", "mxfp4", 4, ""),
    ("quark", "nvfp4", 4, ""),
)


def variants(name: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str, int, str]]:
    """List what is made of a family: experts alone where it has some, as all others have."""
    if name == "gpt_oss":
        yield "gpt-oss", "mxfp4", 16, ""
    config = config.get("text_config", config)
    for variant in VARIANTS:
        options = variant[-1]
        is_able = {
            "mixed": name != "gpt_oss",
            "kv": name != "gpt_oss" and "kv_lora_rank" not in config,
            "experts": "num_experts_per_tok" in config
            and name not in ("gpt_oss", "granitemoehybrid", "nemotron_h"),
            "kept": name == "granitemoehybrid",  # whose experts SGLang does not load
        }
        if is_able.get(options, True):
            yield variant


def make(root: Path, names: tuple[str, ...] = JUDGED) -> None:
    """Make all artifacts."""
    rows = {family.name: family for family in FAMILIES}
    for name in names:
        model = root / name
        if not model.exists():
            source(rows[name], model)
        for dialect, fmt, activations, options in variants(name, rows[name].config):
            row = {"family": name, "dialect": dialect, "format": fmt, "activations": activations}
            artifact = root / "--".join(map(str, [*row.values(), *([options] if options else [])]))
            if artifact.exists():
                continue
            asked = {"dialect": dialect, "format": fmt, "activations": activations}
            fp4convert.quantize(model, output=artifact, **asked, **OPTIONS[options])
            said = {**row, "options": options, **record_of(rows[name].model, artifact)}
            Path(f"{artifact}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    make(Path(sys.argv[1]), tuple(sys.argv[2:]) or JUDGED)
