"""Experts of gpt-oss that are a list of linear layers, read as the stacks of transformers' class.

The stacks that they are compared with are made here, by hand.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, done, read_folder, run, write_checkpoint

HIDDEN, INNER, EXPERTS = 64, 96, 12
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64},
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"},
    **{"layer_types": ["sliding_attention"], "sliding_window": 32, "tie_word_embeddings": False},
}
LAYER = "model.layers.0"


def stored(values: np.ndarray) -> Tensor:
    return "BF16", values.shape, values.astype(ml_dtypes.bfloat16).tobytes()


def models() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same weights as a list of experts, and as stacks."""
    dice = np.random.default_rng(0)

    def made(*shape: int) -> np.ndarray:
        return dice.normal(0, 0.1, shape).astype(np.float32)

    both: dict[str, Tensor] = {}
    sizes = {"q_proj": (64, HIDDEN), "k_proj": (32, HIDDEN), "v_proj": (32, HIDDEN)}
    for leaf, shape in {**sizes, "o_proj": (HIDDEN, 64)}.items():
        both[f"{LAYER}.self_attn.{leaf}.weight"] = stored(made(*shape))
        both[f"{LAYER}.self_attn.{leaf}.bias"] = stored(made(shape[0]))
    both[f"{LAYER}.self_attn.sinks"] = stored(made(2))
    for name in ("input_layernorm", "post_attention_layernorm"):
        both[f"{LAYER}.{name}.weight"] = stored(made(HIDDEN))
    both["model.norm.weight"] = stored(made(HIDDEN))
    both |= {
        f"{name}.weight": stored(made(64, HIDDEN)) for name in ("model.embed_tokens", "lm_head")
    }
    router, shift = stored(made(EXPERTS, HIDDEN)), stored(made(EXPERTS))
    listed = {f"{LAYER}.mlp.router.linear.weight": router, f"{LAYER}.mlp.router.linear.bias": shift}
    stacks = {f"{LAYER}.mlp.router.weight": router, f"{LAYER}.mlp.router.bias": shift}
    for leaf, shape in {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        weights, biases = made(EXPERTS, *shape), made(EXPERTS, shape[0])
        stacks[f"{LAYER}.mlp.experts.{leaf}"] = stored(weights.transpose(0, 2, 1))
        stacks[f"{LAYER}.mlp.experts.{leaf}_bias"] = stored(biases)
        for n in range(EXPERTS):
            listed[f"{LAYER}.mlp.experts.{leaf}s.{n}.weight"] = stored(weights[n])
            listed[f"{LAYER}.mlp.experts.{leaf}s.{n}.bias"] = stored(biases[n])
    return both | listed, both | stacks


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A folder of two files, between which experts are divided."""
    names = sorted(tensors)
    halves = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    shards = {file: {name: tensors[name] for name in own} for file, own in halves.items()}
    return write_checkpoint(folder, shards, CONFIG)


@pytest.mark.parametrize(
    "words",
    [
        ("--format", "mxfp4", "--dialect", "gpt-oss"),
        ("--format", "mxfp4", "--dialect", "compressed-tensors"),
        ("--format", "nvfp4", "--include", "*self_attn.*", "--exclude", "*experts*"),
    ],
)
def test_results_are_those_of_stacks(words, tmp_path):
    listed, stacked = models()
    sources = [write(tmp_path / n, t) for n, t in (("list", listed), ("stack", stacked))]
    for source in sources:
        done("quantize", source, *words, "-o", tmp_path / f"{source.name}-out", "-q")
    found, expected = (read_folder(tmp_path / f"{source.name}-out") for source in sources)
    assert found == expected
    for out in ("list-out", "stack-out"):
        done("verify", tmp_path / out, "--source", sources[0], "-q")


def test_a_missing_expert_is_refused(tmp_path):
    listed, _ = models()
    del listed[f"{LAYER}.mlp.experts.down_projs.7.weight"]
    source = write(tmp_path / "list", listed)
    error = run("quantize", source, "--format", "mxfp4", "-o", tmp_path / "o", "--json").json[
        "error"
    ]
    assert (error["code"], "every number from 0 on" in error["message"]) == ("stack-shape", True)
