"""llama.cpp runs every mixture and state-space family with each value of --keep-dtype."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import llamacpp_families
import pytest
from checkpoints import done
from llamacpp_models import read_gguf, runs_llamacpp
from paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# No file that runs was made: embeddings, diffusion models, and a graph that ends without a word.
UNBUILT = {"nomic-bert-moe", "llada-moe", "rnd1", "glm-dsa"}
# What a recipe keeps, of a family of which it keeps everything in so small a file.
INCLUDED = {"step35": "*attn_output"}
FAMILIES = sorted({*llamacpp_families.families()} - UNBUILT)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_runs_a_family_whose_matrices_are_narrowed(family: str, tmp_path: Path) -> None:
    """From float32 everywhere, so that nothing but its name keeps a tensor from another type."""
    source = tmp_path / f"{family}.gguf"
    script = Path(llamacpp_families.__file__)
    subprocess.run([sys.executable, script, family, source], check=True, timeout=300)
    assert runs_llamacpp(source)
    options = ["--format", "mxfp4", "--dialect", "gguf", "-q"]
    options += ["--include", INCLUDED[family]] if family in INCLUDED else []
    for word in ("bf16", "fp16", "q8_0"):
        out = tmp_path / word
        done("quantize", source, *options, "--keep-dtype", word, "-o", out)
        made = out / source.name
        after = read_gguf(made)
        kinds = {tensor.tensor_type.name for tensor in after.values()}
        if family in ("mamba", "mamba2"):  # whose layers have no other matrices
            four = {name.split(".", 2)[2] for name in after if is_four_bit(after[name])}
            assert four == {"ssm_in.weight", "ssm_out.weight"}
        assert {"F32", {"fp16": "F16"}.get(word, word.upper())} <= kinds
        assert runs_llamacpp(made), word


def is_four_bit(tensor: Any) -> bool:
    return bool(tensor.tensor_type.name == "MXFP4")


def test_the_row_names_the_families_that_ran() -> None:
    """But those of the general row, and two that are read by other means."""
    rows = tomllib.loads((ROOT / "configs" / "engines" / "llama.cpp.toml").read_text("utf-8"))[
        "row"
    ]
    one, general = (row for row in rows if row.get("ran"))
    others = {*general["ran"], "llama-embed", "deepseek2-ocr"}
    assert one["ran"] == one["models"] == [each for each in FAMILIES if each not in others]
