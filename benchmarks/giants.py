"""Checkpoints of published giants, as plans: true names, dtypes and shapes over holes, planned by fp4convert itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import planning
from measure import ROOT
from timeline import Shard, shards_of

from fp4convert.convert import Request, prepare_quantize
from fp4convert.sources import open_source

sys.path.append(str(ROOT / "tests"))
from true_shapes import LLAMA_70B, Shapes, deepseek_v3

BLOCK = 128
FP8_RECORD = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
Listed = tuple[str, str, tuple[int, ...]]


class Giant(NamedTuple):
    """A published model; as many shards as its publisher has, or would have."""

    name: str
    model_type: str
    tensors: Callable[[], Shapes]
    shards: int
    is_fp8: bool = False

    def plan(self, folder: Path, fmt: str) -> list[Shard]:
        """Every shard of its conversion; the folder gets the headers."""
        folder.mkdir()
        listed = list(in_fp8(self.tensors()) if self.is_fp8 else in_bf16(self.tensors()))
        config = {
            "model_type": self.model_type,
            "torch_dtype": "bfloat16",
            **({"quantization_config": FP8_RECORD} if self.is_fp8 else {}),
        }
        planning.write_holes(folder, config, listed, self.shards)
        return shards_of(prepare_quantize(open_source(str(folder)), Request(fmt)))


def in_bf16(tensors: Shapes) -> Iterator[Listed]:
    return ((name, "BF16", shape) for name, shape in tensors)


def in_fp8(tensors: Shapes) -> Iterable[Listed]:
    """Linear layers of attention and MLPs as DeepSeek publishes them: codes, and a float32 for each 128x128 of them."""
    for name, shape in tensors:
        is_linear = name.endswith("_proj.weight") and (".self_attn." in name or ".mlp." in name)
        if not is_linear and "kv_a_proj_with_mqa" not in name:
            yield name, "BF16", shape
            continue
        yield name, "F8_E4M3", shape
        yield f"{name}_scale_inv", "F32", tuple(-(-size // BLOCK) for size in shape)


GIANTS = (
    Giant("70B (Llama 3)", "llama", LLAMA_70B.tensors, 30),
    Giant("671B (DeepSeek R1), FP8", "deepseek_v3", deepseek_v3, 163, is_fp8=True),
    Giant("671B (DeepSeek R1), bf16", "deepseek_v3", deepseek_v3, 163),
    Giant("1T (experts as Kimi K2)", "deepseek_v3", lambda: planning.tensors(planning.LAYERS, planning.EXPERTS), planning.SHARDS),
)
