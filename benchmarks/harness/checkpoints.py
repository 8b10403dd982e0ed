"""Made checkpoints: a Llama with Llama-3.1-8B's layers, random, which every converter here loads;
and one of small matrices.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HIDDEN, MLP, KEYS = 4096, 14336, 1024  # Llama-3.1-8B's matrices
VOCABULARY = 1024  # little, since embeddings stay as they are
MATRICES = {
    **{
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
    },
    **{
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
    },
    "mlp.down_proj": (HIDDEN, MLP),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
ONE, SMALL_VALUE = 0x3F80, 0x3C00  # as bf16: 1 and 1/128
SMALL = 64  # rows and columns of a matrix that costs nothing
LAYER_NBYTES = 2 * sum(rows * columns for rows, columns in MATRICES.values())


def make_checkpoint(folder: Path, gigabytes: float, shards: int | None = None) -> None:
    """bf16 layers, in so many shards, or in shards of about 1 GB; with config, index and a
    tokenizer.
    """
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    pattern = (noise.view(np.uint32) >> 16).astype(np.uint16)
    layers = max(1, round(gigabytes * 1e9 / LAYER_NBYTES))
    groups = np.array_split(np.arange(layers), shards or max(1, round(gigabytes)))
    weight_map = {}
    for shard, group in enumerate(groups):
        file = f"model-{shard + 1:05d}-of-{len(groups):05d}.safetensors"
        shapes = {
            name: shape for layer in group for name, shape in layer_shapes(int(layer)).items()
        }
        if shard == 0:
            shapes |= {
                "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
                "lm_head.weight": (VOCABULARY, HIDDEN),
            }
            shapes["model.norm.weight"] = (HIDDEN,)
        write_shard(folder / file, shapes, pattern)
        weight_map |= dict.fromkeys(shapes, file)
    texts = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": weight_map},
        "config.json": config(layers),
    }
    for file, value in (texts | TOKENIZER).items():
        (folder / file).write_text(json.dumps(value))


def make_small_checkpoint(folder: Path) -> None:
    """Write one shard of four matrices of 8 kB: a command on it is all start-up."""
    folder.mkdir(parents=True)
    shapes = {f"model.layers.{layer}.mlp.down_proj.weight": (SMALL, SMALL) for layer in range(4)}
    write_shard(
        folder / "model.safetensors", shapes, np.full(SMALL * SMALL, SMALL_VALUE, np.uint16)
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"})
    )


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a layer, by its name."""
    shapes: dict[str, tuple[int, ...]] = dict(MATRICES) | dict.fromkeys(NORMS, (HIDDEN,))
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pattern: np.ndarray) -> None:
    """Matrices are the pattern, each from another place on; vectors are ones."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors itself aligns
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            values = (
                np.full(shape, ONE, np.uint16)
                if len(shape) == 1
                else np.roll(pattern, -number * 7919)
            )
            out.write(np.resize(values, shape).tobytes())


def config(layers: int) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // 128,
        "num_key_value_heads": KEYS // 128,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


_WORDS = ["<s>", "</s>", *(f"w{number}" for number in range(2, VOCABULARY))]
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(_WORDS)},
            "unk_token": "<s>",
        },
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
}
