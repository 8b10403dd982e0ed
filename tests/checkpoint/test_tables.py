"""Tables of n-grams: FP8 in shards under one scale, as Qwen3.8-Flash-Next has them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, done, read_folder, run, weight, write_checkpoint

PLE = "model.language_model.layers.1.ple.ple_embedding"
TABLE = f"{PLE}.ngram_embedding"
LINEAR = "model.language_model.layers.0.mlp.experts.0.down_proj"
SCALE = np.float32(0.000199)
CODES = np.random.default_rng(0).integers(0, 0x7F, (4, 96, 160)).astype(np.uint8)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
TEXT = {"model_type": "qwen4_exp_text", "hidden_size": 128, "ple_layer_ids": [1]}


def source(folder: Path, is_split: bool = True, **text: object) -> Path:
    """An expert in FP8 of blocks, and the table, whole or in four shards."""
    tensors: dict[str, Tensor] = {
        f"{LINEAR}.weight": ("F8_E4M3", (128, 128), bytes(range(0x30, 0x70)) * 256),
        f"{LINEAR}.weight_scale_inv": ("F32", (1, 1), b"\0\0\x80\x3b"),
        f"{PLE}.key_proj.weight": weight(1, 32, 128),
        f"{TABLE}.weight_scale": ("F32", (), SCALE.tobytes()),
    }
    if is_split:
        for number, shard in enumerate(CODES):
            tensors[f"{TABLE}.shard_{number}.weight"] = ("F8_E4M3", (96, 160), shard.tobytes())
    else:
        tensors[f"{TABLE}.weight"] = ("F8_E4M3", (384, 160), CODES.tobytes())
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        **{"model_type": "qwen4_exp", "text_config": {**TEXT, **text}},
        "quantization_config": FP8,
    }
    return write_checkpoint(folder, {"model.safetensors": tensors}, config)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("words", [(), ("--keep-packed",)])
def test_a_table_stays_bit_for_bit_beside_its_scale(
    words: tuple[str, ...], dialect: str, is_split: bool, tmp_path: Path
) -> None:
    """config.json names its dtype, which vLLM 0.33 asks before any record
    (models/qwen4_exp/common/ngram_embedding.py, from_quant_config).
    """
    checkpoint, out = source(tmp_path / "m", is_split), tmp_path / "q"
    done("inspect", checkpoint)
    options = ("--format", "nvfp4", "--dialect", dialect, *words)
    plan = done("quantize", checkpoint, *options, "--dry-run", "--json").json
    assert any("of n-gram tables, and kept: 61.4 kB of" in each for each in plan["warnings"])
    done("quantize", checkpoint, *options, "-o", out)
    before, after = read_folder(checkpoint), read_folder(out)
    names = [name for name in before if name.startswith(TABLE)]
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["ple_embedding_dtype"] == "float8_e4m3fn"
    done("inspect", out)
    done("verify", out, "--source", checkpoint)


def test_four_bits_of_a_table_are_refused_where_engines_read_none(tmp_path: Path) -> None:
    """vLLM 0.33 reads NVFP4 tables by other names, and SGLang 0.5.23 none: they want weight_scale_2
    of the whole (Qwen4ExpPLENvFp4EmbeddingMethod), or FP8 (_ple_table_is_fp8).
    """
    tensors = {f"{TABLE}.shard_{number}.weight": weight(number, 96, 160) for number in range(2)}
    config = {"model_type": "qwen4_exp", "text_config": TEXT}
    tensors[f"{LINEAR}.weight"] = weight(9, 128, 128)
    checkpoint = write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, config)
    words = ("--include", "*ngram_embedding*", "--dry-run", "--json")
    for engine in ("vllm", "sglang"):
        error = run("quantize", checkpoint, "--for", engine, *words).json["error"]
        assert error["code"] == "engine-refuses"
        assert "leave it out of --include" in error["next"]
    plan = done("quantize", checkpoint, "--format", "nvfp4", *words).json
    assert any("shard_0 is an embedding" in each for each in plan["warnings"]), plan["warnings"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0, -1])
def test_a_scale_of_no_use_is_reported_and_refused(bad: float, tmp_path: Path) -> None:
    """Of a source, before a byte is written, and of an artifact that carries it."""
    checkpoint, stored = source(tmp_path / "m"), np.float32(bad).tobytes()
    done("quantize", checkpoint, "--format", "nvfp4", "-o", tmp_path / "q")
    for folder in (checkpoint, tmp_path / "q"):
        (file,) = folder.glob("*.safetensors")
        data = file.read_bytes()
        assert data.count(SCALE.tobytes()) == 1
        file.write_bytes(data.replace(SCALE.tobytes(), stored))
        found = run("inspect", folder, "--json").json["findings"]
        (finding,) = (one for one in found if one["level"] == "error")
        assert (finding["code"], finding["tensor"]) == ("scale-not-finite", TABLE)
    codes = [one["code"] for one in run("verify", tmp_path / "q", "--json").json["findings"]]
    assert "scale-not-finite" in codes
    for words in (("quantize", checkpoint, "--format", "nvfp4"), ("dequantize", tmp_path / "q")):
        refused = run(*words, "-o", tmp_path / "no", "--json")
        assert refused.json["error"]["code"] == "scale-not-finite"
        assert TABLE in refused.json["error"]["message"]
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("is_split", [True, False])
def test_a_table_becomes_floats(is_split: bool, tmp_path: Path) -> None:
    """And nothing says FP8 any more."""
    checkpoint = source(tmp_path / "m", is_split, ple_embedding_dtype="float8_e4m3fn")
    done("quantize", checkpoint, "--format", "nvfp4", "-o", tmp_path / "q")
    expected = (CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * SCALE).reshape(384, 160)
    for folder in (checkpoint, tmp_path / "q"):
        out = tmp_path / f"d{folder.name}"
        done("dequantize", folder, "-o", out, "--dtype", "fp32")
        made = read_folder(out)
        parts = [made[name] for name in sorted(made) if name.startswith(f"{TABLE}.")]
        found = b"".join(data for _, _, data in parts)
        assert np.array_equal(np.frombuffer(found, "<f4").reshape(384, 160), expected)
        assert "ple_embedding_dtype" not in (out / "config.json").read_text()


def test_a_table_is_carried_on(tmp_path: Path) -> None:
    """transcode keeps it, and its name of a dtype."""
    checkpoint = source(tmp_path / "m")
    done("quantize", checkpoint, "--format", "nvfp4", "-o", tmp_path / "q")
    done("transcode", tmp_path / "q", "--dialect", "modelopt", "-o", tmp_path / "t")
    first, made = read_folder(tmp_path / "q"), read_folder(tmp_path / "t")
    names = [name for name in first if name.startswith(TABLE)]
    assert len(names) == 5
    assert {name: made.get(name) for name in names} == {name: first[name] for name in names}
    config = json.loads((tmp_path / "t" / "config.json").read_text())
    assert config["text_config"]["ple_embedding_dtype"] == "float8_e4m3fn"
