"""Where ComfyUI looks for a result, and the one file that CLIPLoader takes of a folder in several.

The rules of reading are typed from comfy/sd.py and comfy/ops.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import LLAMA, read_shard, run, weight, write_checkpoint, write_single

DIFFUSION = "model.diffusion_model.blocks.0.attn.qkv"
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def last_line(folder: Path, source: Path) -> list[str]:
    out = run("quantize", source, "--for", "comfyui", "-o", folder)
    assert out.code == 0, out.err
    return shlex.split(out.out.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ([DIFFUSION], "diffusion_models"),
        (["double_blocks.0.img_attn.qkv", "img_in"], "diffusion_models"),
        ([DIFFUSION, "vae.decoder.mid.attn_1.q"], "checkpoints"),
        ([DIFFUSION, "conditioner.embedders.0.transformer.text_model.x"], "checkpoints"),
        ([DIFFUSION, "text_encoders.t5xxl.transformer.encoder.block.0.x"], "checkpoints"),
        (["model.layers.0.self_attn.q_proj", "model.embed_tokens"], "text_encoders"),
        (["encoder.block.0.layer.0.SelfAttention.q", "shared"], "text_encoders"),
    ],
)
def test_the_line_names_the_folder_that_its_nodes_look_in(names, place, tmp_path):
    tensors = {f"{name}.weight": weight(seed) for seed, name in enumerate(names)}
    source = write_single(tmp_path / "m", tensors, {}) / "model.safetensors"
    words = last_line(tmp_path / "out", source)
    assert words == [
        *("cp", str(tmp_path / "out" / "model.safetensors")),
        f"ComfyUI/models/{place}/out.safetensors",
    ]


def encoder() -> dict[str, dict]:
    layers = [f"model.layers.{n}.self_attn.{leaf}" for n in (0, 1) for leaf in ("q_proj", "o_proj")]
    tensors = {f"{name}.weight": weight(seed) for seed, name in enumerate(layers)}
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = list(tensors.items())
    return {files[0]: dict(halves[:2]), files[1]: dict(halves[2:])}


def test_a_folder_of_several_files_becomes_the_one_of_a_text_encoder(tmp_path):
    source = write_checkpoint(tmp_path / "te", encoder(), QWEN)
    words = last_line(tmp_path / "my out", source)
    (tmp_path / "ComfyUI" / "models" / "text_encoders").mkdir(parents=True)
    assert words[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True)
    found = read_shard(tmp_path / "ComfyUI" / "models" / "text_encoders" / "my out.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in found  # detect_te_model
    marks = {name for name in found if name.endswith(".comfy_quant")}
    assert len(marks) == 4
    for mark in marks:  # _load_quantized_module
        stem = mark.removesuffix(".comfy_quant")
        assert json.loads(found[mark][2])["format"] == "nvfp4"
        assert found[f"{stem}.weight"][:2] == ("U8", (32, 32))
        assert found[f"{stem}.weight_scale"][:2] == ("F8_E4M3", (128, 4))
        assert found[f"{stem}.weight_scale_2"][:2] == ("F32", ())


@pytest.mark.parametrize(
    ("named", "prefix", "says"),
    [
        (("MixtralForCausalLM", "mixtral"), "model.", "T5 alone"),
        (("UMT5EncoderModel", "umt5"), "model.", "T5 alone"),
        (("CLIPTextModel", "clip_text_model"), "model.", "T5 alone"),
        (("Qwen3Model", "qwen3"), "", "names from model.layers"),
    ],
)
def test_other_folders_are_refused_for_their_reason(named, prefix, says, tmp_path):
    tensors = {f"{prefix}layers.0.self_attn.q_proj.weight": weight()}
    config = {**LLAMA, "architectures": [named[0]], "model_type": named[1]}
    source = write_single(tmp_path / "m", tensors, config)
    asked = ("quantize", source, "--for", "comfyui", "-o", tmp_path / "out", "--json")
    error = run(*asked).json["error"]
    assert (error["code"], says in error["message"]) == ("engine-refuses", True), error
