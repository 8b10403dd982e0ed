"""--fit: the card less the cache and the engine's share is the size of the artifact."""

import json

import pytest
from checkpoints import run, write_llama

from fp4convert.conversion.memory_fit import cache_nbytes

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
GEMMA = {
    **LLAMA_8B,
    "num_hidden_layers": 6,
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
HYBRID = {**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}


@pytest.mark.parametrize(
    ("config", "tokens", "cache", "nbytes"),
    [
        (
            LLAMA_8B,
            32_768,
            None,
            4_294_967_296,
        ),  # the 128 KiB a token that Llama 3.1 8B is known for
        (LLAMA_8B, 32_768, "fp8", 2_147_483_648),
        (LLAMA_8B, 32_768, "nvfp4", 1_207_959_552),
        (DEEPSEEK, 1, None, 70_272),  # 61 x 576 x 2
        (GEMMA, 8192, None, (5 * 1024 + 8192) * 2 * 8 * 256 * 2),
        (GEMMA, 512, None, 6 * 512 * 2 * 8 * 256 * 2),
        (HYBRID, 1024, None, 8 * 1024 * 2 * 8 * 128 * 2),
        ({**LLAMA_8B, "mamba_d_state": 128}, 1024, None, None),
        ({"model_type": "x"}, 1024, None, None),
    ],
)
def test_the_cache_of_one_sequence(config, tokens, cache, nbytes):
    assert cache_nbytes(config, tokens, cache) == nbytes


@pytest.fixture
def source(tmp_path):
    folder = write_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    heads = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps({**config, **heads}))
    return folder


def plan(source, *words):
    return run("quantize", source, "--format", "nvfp4", *words, "--dry-run", "--json")


def test_the_arithmetic_is_printed_and_the_size_kept(source):
    whole = plan(source).json
    between = (whole["output_bytes"] + whole["source_bytes"]) / 2
    card = between / 0.9
    found = plan(source, "--fit", f"{card / 1e9:.9f}", "--context", 1)
    assert found.code == 0
    assert whole["output_bytes"] < found.json["output_bytes"] <= between
    assert "x 0.9 - " in found.err
    assert " for the cache of 1 tokens = " in found.err


def test_a_card_that_holds_the_weights_needs_no_choice(source):
    plain = plan(source).json
    for words in (("--fit", "24GB"), ("--target-size", 24)):
        found = plan(source, *words)
        assert (found.code, found.json["output_bytes"]) == (
            0,
            pytest.approx(plain["output_bytes"], 1e-3),
        )
        assert "no format has to be chosen" in found.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--fit", "24XB"), "target-range"),
        (("--fit", "0"), "target-range"),
        (("--fit", "0.000001"), "target-range"),
        (("--fit", "24", "--target-bits", 5), "target-twice"),
        (("--context", 5), "idle-option"),
    ],
)
def test_what_cannot_be_is_refused(words, code, source):
    assert plan(source, *words).json["error"]["code"] == code


def test_a_card_by_its_name_is_its_memory_and_its_kernels(source):
    """An RTX 5090 has 32 GB; 2 x 1 layer x 1 head x 64 x 32,768 tokens x 2 bytes are 8.39 MB."""
    found = plan(source, "--fit", "rtx5090")
    assert found.json["gpu"]["architecture"] == "sm120"
    assert "fits: 32.0 GB x 0.9 - 8.39 MB" in found.err
