"""Small Diffusers pipelines with the names that published ones have, made byte by byte, and what
becomes of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from checkpoints import Outcome, Tensor, bf16, pack_shard, run, weight

NVFP4 = ("--format", "nvfp4", "--json", "-q")
RECORD, STATE, PIPELINE = "quantization_config.json", ".fp4convert", "model_index.json"
COMPONENTS = ("transformer", "transformer_2")
DIFFUSERS = "diffusion_pytorch_model"
DIFFUSERS_INDEX = f"{DIFFUSERS}.safetensors.index.json"
DIFFUSERS_FIRST, DIFFUSERS_SECOND = (
    f"{DIFFUSERS}-0000{number}-of-00002.safetensors" for number in (1, 2)
)
FLUX_CONFIG = {
    "_class_name": "FluxTransformer2DModel",
    "_diffusers_version": "0.30.0.dev0",
    "guidance_embeds": True,
}
FLUX_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.30.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
WAN_CONFIG = {
    "_class_name": "WanTransformer3DModel",
    "_diffusers_version": "0.35.0.dev0",
    "num_layers": 7,
}
WAN_INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.0.dev0",
    "boundary_ratio": 0.875,
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def vector(length: int, seed: int) -> Tensor:
    return "BF16", (length,), bf16(length, seed=seed)


def flux_shards() -> list[dict[str, Tensor]]:
    """Two shards, q, k and v of the double block apart."""
    double, single = "transformer_blocks.0", "single_transformer_blocks.0"
    first = {
        "x_embedder.weight": weight(1),
        "context_embedder.weight": weight(2),
        "time_text_embed.timestep_embedder.linear_1.weight": weight(3),
        f"{double}.norm1.linear.weight": weight(4, 192),
        f"{double}.norm1.linear.bias": vector(192, 5),
        f"{double}.attn.to_q.weight": weight(6, 64),
        f"{double}.attn.to_k.weight": weight(7, 64),
        f"{double}.attn.norm_q.weight": vector(16, 8),
    }
    second = {
        f"{double}.attn.to_v.weight": weight(9, 64),
        f"{double}.attn.to_out.0.weight": weight(10, 64),
        f"{double}.ff.net.0.proj.weight": weight(11, 256),
        f"{double}.ff.net.2.weight": weight(12, 64, 256),
        f"{single}.attn.to_q.weight": weight(13, 64),
        f"{single}.attn.to_k.weight": weight(14, 64),
        f"{single}.attn.to_v.weight": weight(15, 64),
        f"{single}.proj_mlp.weight": weight(16, 256),
        f"{single}.proj_out.weight": weight(17, 64, 320),
        "norm_out.linear.weight": weight(18, 128),
        "proj_out.weight": weight(19),
    }
    return [first, second]


def wan_tensors(seed: int = 0) -> dict[str, Tensor]:
    return {
        "patch_embedding.weight": ("BF16", (64, 16, 1, 2, 2), bf16(64, 16, 1, 2, 2, seed=seed)),
        "condition_embedder.time_embedder.linear_1.weight": weight(seed + 1, 64),
        "blocks.7.attn1.to_q.weight": weight(seed + 2, 64),
        "blocks.7.attn1.to_k.weight": weight(seed + 3, 64),
        "blocks.7.attn1.to_v.weight": weight(seed + 4, 64),
        "blocks.7.attn1.to_out.0.weight": weight(seed + 5, 64),
        "blocks.7.ffn.net.0.proj.weight": weight(seed + 6, 128),
        "blocks.7.ffn.net.2.weight": weight(seed + 7, 64, 128),
        "blocks.7.scale_shift_table": ("F32", (1, 6, 64), bytes(4 * 6 * 64)),
        "proj_out.weight": weight(seed + 8),
    }


def write_component(
    folder: Path, shards: list[dict[str, Tensor]], config: dict[str, object]
) -> Path:
    """A folder as ModelMixin.save_pretrained writes it."""
    folder.mkdir(parents=True)
    files = (
        [f"{DIFFUSERS}.safetensors"] if len(shards) == 1 else [DIFFUSERS_FIRST, DIFFUSERS_SECOND]
    )
    for file, tensors in zip(files, shards, strict=True):
        (folder / file).write_bytes(pack_shard(tensors))
    if len(shards) > 1:
        weight_map = {
            name: file for file, tensors in zip(files, shards, strict=True) for name in tensors
        }
        (folder / DIFFUSERS_INDEX).write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_others(folder: Path, index: dict[str, object]) -> Path:
    """Everything of a pipeline but its transformers."""
    write_component(
        folder / "vae", [{"decoder.conv_in.weight": weight(90)}], {"_class_name": "AutoencoderKL"}
    )
    for name, data in {
        "text_encoder/config.json": b'{"model_type": "clip_text_model"}\n',
        "text_encoder/model.safetensors": pack_shard(
            {"text_model.embeddings.token_embedding.weight": weight(91)}
        ),
        "text_encoder/pytorch_model.bin": b"a pickle" * 200,
        "tokenizer/vocab.json": b'{"a": 0}',
        "scheduler/scheduler_config.json": b'{"shift": 3.0}',
        "README.md": b"---\nlicense: other\n---\nA pipeline.\n",
        "model_index.json": json.dumps(index, indent=2).encode() + b"\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_flux(folder: Path) -> Path:
    write_component(folder / "transformer", flux_shards(), FLUX_CONFIG)
    return write_others(folder, FLUX_INDEX)


def write_wan(folder: Path) -> Path:
    write_component(folder / "transformer", [wan_tensors()], WAN_CONFIG)
    write_component(folder / "transformer_2", [wan_tensors(50)], WAN_CONFIG)
    return write_others(folder, WAN_INDEX)


def quantize(source: object, out: Path, *options: object) -> Outcome:
    return run("quantize", source, *NVFP4, "-o", out, *options)


def files_of(folder: Path, apart: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files of a folder but for our state, reports and whole folders `apart`."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    kept = {
        name: path
        for name, path in found.items()
        if STATE not in name.parts and name.parts[0] not in apart
    }
    return {
        name.as_posix(): path.read_bytes()
        for name, path in kept.items()
        if path.name != "quantization_report.json"
    }


def digest_of(files: dict[str, bytes]) -> str:
    """As `sha256sum FILES | sha256sum` has it, model cards left out."""
    lines = [
        f"{hashlib.sha256(data).hexdigest()}  {name}\n"
        for name, data in sorted(files.items())
        if name != "README.md"
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def error_of(outcome: Outcome) -> tuple[int, str, str]:
    return outcome.code, outcome.json["error"]["code"], outcome.json["error"]["message"]
