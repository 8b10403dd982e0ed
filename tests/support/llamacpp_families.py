"""A tiny file in float32 of each mixture and state-space family that llama.cpp has a class for.

Sizes are given here; names and shapes of tensors are asked of llama.cpp itself: its loader names
the first that it misses, or whose shape is another, and a file with that one is tried next.

    python llamacpp_families.py FAMILY FILE    in a process of its own: its assertions end it
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from llamacpp_models import VOCABULARY, add_words

WIDTH, HEADS, INNER = 256, 2, 384
OFTEN = 500  # files that are tried
LATENT = ("deepseek2", "glm-dsa", "kimi-linear", "mistral4")
PATTERNED = ("cohere2moe", "mimo2", "step35")
HYBRID = (
    *("plamo2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid"),
    *("lfm2", "lfm2moe", "kimi-linear"),
)
LAYERS = {"llama4": 4, "nemotron_h": 3, "nemotron_h_moe": 3, "gemma4": 5}
# Tensors that the loader does without, and the graph does not: families, after which, and which.
BESIDE = (
    ("falcon-h1 granitehybrid nemotron_h nemotron_h_moe", "ssm_conv1d.weight", "ssm_conv1d.bias"),
    ("qwen35 qwen35moe qwen3next", "ssm_conv1d.weight", "attn_qkv.weight attn_gate.weight"),
    ("rwkv6 rwkv6qwen2", "time_mix_lerp_x.weight", "time_mix_lerp_fused.weight"),
)
NOT_FOUND = re.compile(r"tensor '([^']+)' not found")
SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected\s+([\d, ]+), got")
TYPES = {bool: "add_bool", int: "add_uint32", float: "add_float32", list: "add_array"}


def families() -> list[str]:
    """Names of those with experts or states, by llama.cpp's own table, and newer ones."""
    import gguf

    part = gguf.MODEL_TENSOR
    signs = {part.FFN_DOWN_EXP, part.SSM_IN, part.SSM_A, part.SHORTCONV_CONV, part.TIME_MIX_W1}
    known = (kind for kind, parts in gguf.MODEL_TENSORS.items() if signs & {*parts})
    newer = ["cohere2moe", "mellum"]
    return sorted({*(gguf.MODEL_ARCH_NAMES[kind] for kind in known), *newer})


def _sizes(family: str) -> dict[str, Any]:
    """Metadata behind the family's name; llama.cpp reads what it needs."""
    layers, is_latent = LAYERS.get(family, 2), family in LATENT
    width, heads, inner = (128, 1, 192) if is_latent else (WIDTH, HEADS, INNER)
    is_nemotron = family.startswith("nemotron_h")
    each = [0 if layer == 1 else heads for layer in range(layers)]
    by_layer: Any = each if family in HYBRID else heads
    state = WIDTH if family.startswith("qwen3") else 2 * width
    ranks = ("decay_lora_rank", "iclr_lora_rank", "value_residual_mix_lora_rank", "gate_lora_rank")
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "context_length": 128, "embedding_length": width},
        **{"block_count": layers, "leading_dense_block_count": 1, "logit_scale": 1.0},
        "feed_forward_length": [0, 0, inner] if is_nemotron else inner,
        **{"use_parallel_residual": False, "full_attention_interval": 2},
        **{"time_mix_extra_dim": 64, "time_decay_extra_dim": 128, "wkv.head_size": width // heads},
        **{"attention.head_count": by_layer, "attention.head_count_kv": by_layer},
        **{"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0},
        **{"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"attention.group_norm_epsilon": 1e-5, "attention.group_norm_groups": 8},
        **{"attention.q_lora_rank": 512, "attention.kv_lora_rank": 512},
        **{"attention.relative_buckets_count": 8, "attention.sliding_window": 16},
        **{f"attention.{rank}": 64 for rank in ranks},
        **{"attention.indexer.head_count": 1, "attention.indexer.key_length": 64},
        "attention.indexer.top_k": 8,
        "rope.dimension_sections": [width // heads // 4] * 4,
        **{"ssm.inner_size": state, "ssm.conv_kernel": 4, "ssm.state_size": 128},
        **{"ssm.time_step_rank": heads, "ssm.group_count": 0 if family == "plamo2" else 2},
        **{"kda.head_dim": 128, "shortconv.l_cache": 3},
        **{"expert_feed_forward_length": inner, "expert_shared_feed_forward_length": inner},
        **{"expert_chunk_feed_forward_length": inner, "interleave_moe_layer_step": 2},
        **{"expert_count": 2, "expert_used_count": 1, "expert_shared_count": 1},
        **{"expert_gating_func": 2, "expert_group_scale": 1.0, "experts_per_group": 1},
        "moe_every_n_layers": 2,
    }
    period = [layer % 2 for layer in range(layers)]
    sizes["attention.sliding_window_pattern"] = period if family in PATTERNED else 2
    if is_latent:
        sizes |= {"attention.key_length": 576, "attention.value_length": 512}
        sizes |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
        sizes["rope.dimension_count"] = 64
    if family in ("arwkv7", "rwkv6qwen2"):
        sizes["token_shift_count"] = 1
    if family == "gemma4":
        sizes |= {"embedding_length_per_layer_input": 64, "attention.shared_kv_layers": 0}
        sizes |= {"attention.key_length_swa": 128, "attention.value_length_swa": 128}
        sizes |= {"attention.key_length": 128, "attention.value_length": 128}
        sizes |= {"rope.freq_base_swa": 1e4, "rope.dimension_count_swa": 128}
        sizes["attention.sliding_window_pattern"] = [1, 1, 1, 1, 0]
    if family in ("falcon-h1", "lfm2", "nemotron_h", "mamba", "mamba2", "qwen35"):
        sizes |= {"expert_count": 0, "expert_used_count": 0}
    return sizes


def _write(family: str, shapes: dict[str, tuple[int, ...]], path: Path, spread: float) -> None:
    import gguf
    import numpy as np

    writer, random = gguf.GGUFWriter(path, family), np.random.default_rng(0)
    for key, value in _sizes(family).items():
        getattr(writer, TYPES[type(value)])(f"{family}.{key}", value)
    add_words(writer)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(scale=spread, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _complaint(path: Path, log: Path) -> str:
    """What llama.cpp says of a file that it does not load; "" of one that it loads."""
    import xllamacpp

    params, said = xllamacpp.CommonParams(), log.stat().st_size
    params.model.path, params.fit_params, params.warmup = str(path), False, False
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 64, 1, 2
    try:
        LOADED.append(xllamacpp.Server(params))
    except RuntimeError:
        for _ in range(100):  # it writes in a thread
            if "exiting due to" in (text := log.read_bytes()[said:].decode(errors="replace")):
                return text
            time.sleep(0.02)
        return text
    return ""


LOADED: list[Any] = []  # ending a server waits for its loop


def write_family(family: str, path: Path) -> None:
    """Write a file that llama.cpp loads."""
    log, shapes = path.with_suffix(".log"), {"token_embd.weight": (VOCABULARY, WIDTH)}
    stream = log.open("wb")
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    for _ in range(OFTEN):
        _write(family, shapes, path, 0)
        if not (text := _complaint(path, log)):
            _write(family, shapes, path, 0.02)
            return
        if match := NOT_FOUND.search(text):
            shapes[match[1]] = (1,)
            for having, first, others in BESIDE:
                if family in having.split() and match[1].endswith(first):
                    block = match[1].removesuffix(first)
                    shapes |= {block + other: (1,) for other in others.split()}
        elif match := SHAPE.search(text):
            sizes = [int(size) for size in match[2].split(",")]
            while len(sizes) > 1 and sizes[-1] == 1:
                sizes.pop()
            shapes[match[1]] = tuple(reversed(sizes))
        else:
            raise SystemExit(text)
    raise SystemExit(f"{family}: {OFTEN} files, and none is whole")


if __name__ == "__main__":
    write_family(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)
