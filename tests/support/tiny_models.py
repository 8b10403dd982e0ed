"""Tiny random checkpoints with true names, and what every engine test does with them: convert,
read, compare.

torch and transformers are imported where they are needed: collecting the tests stays fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from built_once import built_once
from checkpoints import run

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
QUANTIZED_NAMES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
INDEX = "model.safetensors.index.json"


def make_llama(folder: Path, dtype: str = "bf16", is_tied: bool = False, **shape: int) -> Path:
    """The folder, now with a two-layer Llama of 14 linear layers in one file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"intermediate_size": 256, **SHAPE, **shape}
    return _save(LlamaForCausalLM, LlamaConfig(tie_word_embeddings=is_tied, **sizes), folder, dtype)


def make_qwen3(folder: Path) -> Path:
    """The folder, now with a two-layer Qwen3 of 14 linear layers, whose queries and keys are
    normalized.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(intermediate_size=256, head_dim=32, tie_word_embeddings=False, **SHAPE)
    return _save(Qwen3ForCausalLM, config, folder, "bf16")


def make_qwen2(folder: Path) -> Path:
    """The folder, now with a two-layer Qwen2 of 14 linear layers, those of queries, keys and values
    with biases.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _save(
        Qwen2ForCausalLM,
        Qwen2Config(intermediate_size=256, tie_word_embeddings=False, **SHAPE),
        folder,
        "bf16",
    )


def make_mixtral(folder: Path) -> Path:
    """The folder, now with a two-layer Mixtral of four experts; transformers saves them one by one,
    as w1, w2 and w3.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    return _save(
        MixtralForCausalLM,
        MixtralConfig(tie_word_embeddings=False, **experts, **SHAPE),
        folder,
        "bf16",
    )


def make_qwen3_moe(folder: Path, **options: object) -> Path:
    """The folder, now with a two-layer Qwen3-MoE of four experts, one by one as gate_proj, up_proj
    and down_proj.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    return _save(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(tie_word_embeddings=False, **experts, **SHAPE, **options),
        folder,
        "bf16",
    )


def make_scattered_llama(folder: Path) -> Path:
    """The weights of make_llama dealt out to three shards, so that q/k/v and gate/up of a layer lie
    in different ones.
    """
    from safetensors.torch import save_file

    tensors = read_tensors(make_llama(folder))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(
            {name: tensors[name] for name in names[number::3]},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names[number::3], file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _save(kind: Any, config: Any, folder: Path, dtype: str) -> Path:
    import torch

    def build(made: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = kind(config).to(getattr(torch, TORCH_NAMES[dtype]))
            for name, parameter in model.named_parameters():
                _season(name, parameter.data)
        model.save_pretrained(made)

    return built_once(f"{kind.__name__} {dtype} {config.to_json_string()}", build, folder)


def _season(name: str, weight: Any) -> None:
    """Norms that are not all ones; in each matrix of a layer a zero block, a block of tiny values
    and an outlier.
    """
    import torch

    if weight.dim() == 1:
        weight += 0.1 * torch.randn_like(weight)
    elif weight.dim() == 2 and ".layers." in name:
        weight[0, :32] = 0
        weight[1, :32] *= 1e-4
        weight[2, 5] = -0.25


def fp4convert(*arguments: object, expect: int = 0) -> str:
    """What the command prints to stdout; the test fails where its exit code is not `expect`."""
    outcome = run(*arguments)
    assert outcome.code == expect, f"exit code {outcome.code}: {outcome.err or outcome.out}"
    return outcome.out


def fp4convert_json(*arguments: object) -> dict[str, Any]:
    """The document that the command prints with --json."""
    document: dict[str, Any] = json.loads(fp4convert(*arguments, "--json"))
    return document


def read_json(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def read_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of the safetensors files in a folder, as torch reads it."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def is_quantized(name: str) -> bool:
    """True for a weight of these models, under its name in the source, that becomes four-bit."""
    return name.endswith(QUANTIZED_NAMES)


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names whose tensors differ in dtype, shape or any byte, or that only one side has; -0.0 is
    not 0.0.
    """
    return sorted(
        name
        for name in {*left, *right}
        if name not in left or name not in right or _bits(left[name]) != _bits(right[name])
    )


def _bits(tensor: Any) -> tuple[object, object, bytes]:
    import torch

    return (
        tensor.dtype,
        tensor.shape,
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


@contextmanager
def offline() -> Iterator[None]:
    """No request leaves this process or a command that it starts; both are as before afterwards."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(
            constants, "HF_HUB_OFFLINE", True
        )  # read from the environment only once, at import
        yield
