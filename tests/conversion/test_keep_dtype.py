"""--keep-dtype: float32 matrices that stay are written in 16 bits, as ml_dtypes and torch round."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import LAYER, LLAMA, Tensor, done, read_folder, run, weight, write_checkpoint

NARROW = {"bf16": ("BF16", ml_dtypes.bfloat16), "fp16": ("F16", np.float16)}
Q = f"{LAYER}.self_attn.q_proj"
EMBEDDING, CONVOLUTION = "model.embed_tokens.weight", f"{LAYER}.conv1d.weight"
STAYING = (f"{LAYER}.input_layernorm.weight", f"{LAYER}.mlp.gate.weight", "lm_head.weight")


def fp32(*shape: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return "F32", shape, values.tobytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Float32 beside bf16: a head in bf16 stays what it is."""
    norm, router, head = STAYING
    tensors = {
        EMBEDDING: fp32(40, 64, seed=1),
        f"{Q}.weight": fp32(64, 64, seed=2),
        CONVOLUTION: fp32(64, 1, 4, seed=3),
        norm: fp32(64, seed=4),
        router: fp32(8, 64, seed=5),
        head: weight(6, 40),
    }
    return write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, config=LLAMA)


@pytest.mark.parametrize("word", NARROW)
def test_kept_matrices_are_rounded_once(word: str, source: Path, tmp_path: Path) -> None:
    """Vectors, routers and what has 16 bits stay byte for byte; four-bit modules are as without."""
    dtype, narrow = NARROW[word]
    out, plain = tmp_path / "q", tmp_path / "plain"
    options = ("--format", "nvfp4", "--json")
    plan = run("quantize", source, *options, "--keep-dtype", word, "--dry-run").json
    done("quantize", source, *options, "--keep-dtype", word, "-o", out)
    done("quantize", source, *options, "-o", plain)
    before, after, without = map(read_folder, (source, out, plain))
    for name in (EMBEDDING, CONVOLUTION):
        _, shape, data = before[name]
        expected = np.frombuffer(data, np.float32).astype(narrow).tobytes()
        assert after[name] == (dtype, shape, expected)
        (row,) = (row for row in plan["tensors"] if row["name"] == name)
        assert row["reason"].endswith(f"; fp32 becomes {word}")
        assert row["output_bytes"] == len(expected)
        del after[name], without[name]
    assert after == without
    record = json.loads((out / "quantization_config.json").read_text())
    assert record["keep_dtype"] == word
    assert "keep_dtype" not in json.loads((plain / "quantization_config.json").read_text())


@pytest.mark.parametrize("dialect", [None, "quark"])
def test_verify_compares_what_is_narrowed(
    dialect: str | None, source: Path, tmp_path: Path
) -> None:
    """Of a transcoded artifact, too; a wrong bit of it is found, and so is one not narrowed."""
    out = tmp_path / "q"
    done("quantize", source, "--format", "mxfp4", "--keep-dtype", "bf16", "-o", out)
    if dialect:
        other = tmp_path / dialect
        done("transcode", out, "-o", other, "--dialect", dialect)
        out = other
    done("verify", out, "--source", source)
    for file in ("quantization_config.json", ".fp4convert/plan.json"):
        (out / file).write_text(json.dumps(_without_hashes(json.loads((out / file).read_text()))))
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    kept = read_folder(out)[EMBEDDING][2]
    data[data.index(kept[:64])] ^= 1
    shard.write_bytes(data)
    found = run("verify", out, "--source", source, "--json").json["findings"]
    assert ("kept-differs", EMBEDDING) in {(one["code"], one["tensor"]) for one in found}


def _without_hashes(record: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key != "files"}


def test_what_stays_as_it_is_anyway_is_idle(tmp_path: Path) -> None:
    tensors = {EMBEDDING: weight(1, 40), f"{Q}.weight": weight(2, 64), STAYING[0]: fp32(64)}
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, config=LLAMA)
    words = ("--format", "nvfp4", "--keep-dtype", "bf16", "-o", tmp_path / "q", "--json")
    refused = run("quantize", source, *words)
    assert (refused.code, refused.json["error"]["code"]) == (2, "idle-option")
    assert "--keep-dtype" in refused.json["error"]["message"]
    assert not (tmp_path / "q").exists()


def test_a_value_beyond_fp16_ends_with_its_name(source: Path, tmp_path: Path) -> None:
    values = np.ones((40, 64), np.float32)
    values[3, 5] = 70000.0
    file = source / "model.safetensors"
    tensors = {**read_folder(source), EMBEDDING: ("F32", (40, 64), values.tobytes())}
    file.unlink()
    write_checkpoint(source, {"model.safetensors": tensors}, config=LLAMA)
    words = ("--format", "nvfp4", "--keep-dtype", "fp16", "-o", tmp_path / "q", "--json")
    refused = run("quantize", source, *words)
    assert (refused.code, refused.json["error"]["code"]) == (2, "fp16-overflow")
    assert EMBEDDING in refused.json["error"]["message"]
    assert not (tmp_path / "q" / "quantization_config.json").exists()


def test_nan_in_what_is_kept_stays_nan(source: Path, tmp_path: Path) -> None:
    values = np.ones((40, 64), np.float32)
    values[0, 0] = np.nan
    tensors = {**read_folder(source), EMBEDDING: ("F32", (40, 64), values.tobytes())}
    (source / "model.safetensors").unlink()
    write_checkpoint(source, {"model.safetensors": tensors}, config=LLAMA)
    words = ("--format", "nvfp4", "--keep-dtype", "bf16", "-o", tmp_path / "q")
    done("quantize", source, *words)
    kept = np.frombuffer(read_folder(tmp_path / "q")[EMBEDDING][2], ml_dtypes.bfloat16)
    assert np.isnan(kept[0])
    assert (kept[1:] == 1).all()
