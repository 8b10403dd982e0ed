"""A family's recipe is for GGUF files, too: by llama.cpp's architecture and its map of names."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import run
from llamacpp_models import write_gptoss
from tiny_models import fp4convert_json

WORDS = ("--for", "llama.cpp", "--dry-run")
# What each family's recipe keeps for accuracy, in the words of llama.cpp's LLM_TENSOR_NAMES.
KEPT = {
    "deepseek2": {"attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_output"},
    "qwen35moe": {"attn_q", "attn_k", "attn_qkv", "attn_gate", "ffn_up_shexp", "ffn_down_shexp"},
    "minimax-m2": {"attn_q", "attn_k", "attn_v", "attn_output"},
    "llama": set(),
}
MADE = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


def made_of(source: Path, *words: str) -> set[str]:
    """The names of what is quantized, an expert's with its number in brackets."""
    plan = fp4convert_json("quantize", source, *WORDS, *words)
    rows = (row["name"] for row in plan["tensors"] if row["action"] == "quantize")
    return {name.partition(".weight")[0].removeprefix("blk.0.") for name in rows}


@pytest.mark.parametrize("architecture", KEPT)
def test_a_family_keeps_what_its_recipe_keeps_for_accuracy(
    tmp_path: Path, architecture: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_block_count(1)
    for name in (*KEPT[architecture], *MADE, "ffn_up", "attn_output"):
        shape = (2, 64, 64) if name in MADE else (64, 64)
        if f"blk.0.{name}.weight" not in writer.tensors[0]:
            writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = made_of(tmp_path / "m.gguf")
    assert made.isdisjoint(KEPT[architecture])
    assert made >= {*MADE, "ffn_up"}
    assert ("attn_output" in made) == (architecture == "llama")


def test_gptoss_keeps_its_attention_and_a_recipe_for_nothing_is_refused(tmp_path: Path) -> None:
    """A user's file may speak transformers' names; t5xxl has none of gpt-oss."""
    source = write_gptoss(tmp_path / "tiny.gguf")
    assert made_of(source) == MADE
    own = tmp_path / "own.toml"
    own.write_text(
        'about = "mine"\nbase = "default"\n[[keep]]\nreason = "mine"\n'
        'modules = ["*.mlp.experts.*.up_proj"]\n'
    )
    assert made_of(source, "--recipe", str(own)) == MADE - {"ffn_up_exps"}
    refusal = run("quantize", source, *WORDS, "--recipe", "t5xxl")
    assert refusal.code == 2
    assert "--recipe t5xxl names no module" in refusal.err
