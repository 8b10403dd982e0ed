"""Checkpoints with the names and shapes of published models: true headers over holes, which take no
disk.

Shapes are those of each model's config.json on the Hub; nothing here comes from fp4convert.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoints import pack_header

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder of attention with grouped heads and a gated MLP, or of experts; counts as
    config.json calls them.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int  # of one expert, where there are experts
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 128
    experts: int = 0
    has_head_norms: bool = True

    def tensors(self) -> Shapes:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in (f"model.layers.{number}" for number in range(self.layers)):
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{layer}.self_attn")
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            if self.experts:
                yield f"{layer}.mlp.gate.weight", (self.experts, self.hidden)
            for mlp in [f"{layer}.mlp.experts.{expert}" for expert in range(self.experts)] or [
                f"{layer}.mlp"
            ]:
                yield from gated_mlp(mlp, self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _attention(self, module: str) -> Shapes:
        yield f"{module}.q_proj.weight", (self.heads * self.head, self.hidden)
        yield f"{module}.k_proj.weight", (self.kv_heads * self.head, self.hidden)
        yield f"{module}.v_proj.weight", (self.kv_heads * self.head, self.hidden)
        yield f"{module}.o_proj.weight", (self.hidden, self.heads * self.head)
        if self.has_head_norms:
            yield f"{module}.q_norm.weight", (self.head,)
            yield f"{module}.k_norm.weight", (self.head,)


LLAMA_8B = Decoder("llama", 32, 4096, 14336, 32, 8, 128256, has_head_norms=False)
MISTRAL_7B = Decoder("mistral", 32, 4096, 14336, 32, 8, 32768, has_head_norms=False)
QWEN3_30B_A3B = Decoder("qwen3_moe", 48, 2048, 768, 32, 4, 151936, experts=128)
QWEN3_8B = Decoder("qwen3", 36, 4096, 12288, 32, 8, 151936)
LLAMA_70B = Decoder("llama", 80, 8192, 28672, 64, 8, 128256, has_head_norms=False)
QWEN3_CODER_480B = Decoder("qwen3_moe", 62, 6144, 2560, 96, 8, 151936, experts=160)


def gated_mlp(module: str, hidden: int, intermediate: int) -> Shapes:
    for leaf in ("gate_proj", "up_proj"):
        yield f"{module}.{leaf}.weight", (intermediate, hidden)
    yield f"{module}.down_proj.weight", (hidden, intermediate)


def deepseek_v3(layers: int = 61, experts: int = 256) -> Shapes:
    """DeepSeek-V3 in bf16: three dense layers, the others of experts, and one more that predicts a
    second token.
    """
    yield "model.embed_tokens.weight", (129280, 7168)
    for number in range(layers + 1):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_a_proj.weight", (1536, 7168)
        yield f"{layer}.self_attn.q_a_layernorm.weight", (1536,)
        yield f"{layer}.self_attn.q_b_proj.weight", (128 * 192, 1536)
        yield f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (512 + 64, 7168)
        yield f"{layer}.self_attn.kv_a_layernorm.weight", (512,)
        yield f"{layer}.self_attn.kv_b_proj.weight", (128 * 256, 512)
        yield f"{layer}.self_attn.o_proj.weight", (7168, 128 * 128)
        if number < 3:
            yield from gated_mlp(f"{layer}.mlp", 7168, 18432)
        else:
            yield f"{layer}.mlp.gate.weight", (experts, 7168)
            yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,)
            yield from gated_mlp(f"{layer}.mlp.shared_experts", 7168, 2048)
            for expert in range(experts):
                yield from gated_mlp(f"{layer}.mlp.experts.{expert}", 7168, 2048)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (7168,)
    last = f"model.layers.{layers}"
    yield f"{last}.embed_tokens.weight", (129280, 7168)
    yield f"{last}.enorm.weight", (7168,)
    yield f"{last}.hnorm.weight", (7168,)
    yield f"{last}.eh_proj.weight", (7168, 2 * 7168)
    yield f"{last}.shared_head.norm.weight", (7168,)
    yield f"{last}.shared_head.head.weight", (129280, 7168)
    yield "model.norm.weight", (7168,)
    yield "lm_head.weight", (129280, 7168)


def write_holes(folder: Path, model_type: str, tensors: Shapes, shards: int = 4) -> Path:
    """A bf16 checkpoint of these shapes whose data are holes, each shard sorted by name as writers
    leave it; the folder.
    """
    folder.mkdir(parents=True)
    listed, weight_map = list(tensors), {}
    size = -(-len(listed) // shards)
    for number, first in enumerate(range(0, len(listed), size), 1):
        entries, end = {}, 0
        for name, shape in sorted(listed[first : first + size]):
            begin, end = end, end + 2 * math.prod(shape)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(entries, file)
        with (folder / file).open("wb") as out:
            out.write(pack_header(json.dumps(entries).encode()))
            out.truncate(out.tell() + end)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "torch_dtype": "bfloat16"})
    )
    return folder
