"""DeepSeek-V4 as NVIDIA ships it: FP8 attention under E8M0, routed experts in NVFP4, one record of
both. Written from MXFP4 and FP8, and read by every command; values by a decoder typed here.

Names, dtypes and keys: vLLM, models/deepseek_v4/quant_config.py; SGLang 0.5.23,
srt/configs/model_config.py:776 and srt/model_loader/loader.py:228.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import done, read_folder, run
from fp4_sources import make_deepseek_v4

EXPERT, DRAFT = "layers.1.ffn.experts.2.w2", "mtp.0.ffn.experts.1.w1"
ATTENTION = "layers.0.attn.wq_a"
WORDS = ("--format", "nvfp4", "--dialect", "deepseek", "--activations", "4", "--input-scale", "0.5")
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_deepseek_v4(tmp_path_factory.mktemp("v4") / "source")


@pytest.fixture(scope="module")
def shipped(source, tmp_path_factory):
    """The result without any file of ours, as a foreign checkpoint comes."""
    folder = tmp_path_factory.mktemp("nvidia") / "shipped"
    done("quantize", source.folder, *WORDS, "--keep-packed", "--draft", "keep", "-o", folder)
    for file in ("quantization_config.json", "quantization_report.json"):
        (folder / file).unlink(missing_ok=True)
    for file in sorted((folder / ".fp4convert").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (folder / ".fp4convert").rmdir()
    return folder


def decoded(tensors, module):
    """Low nibbles first; code x scale x global scale."""
    _, (rows, half), packed = tensors[f"{module}.weight"]
    codes = np.frombuffer(packed, np.uint8).reshape(rows, half)
    values = VALUES[np.stack([codes & 15, codes >> 4], -1).reshape(rows, half * 2)]
    scales = np.frombuffer(tensors[f"{module}.weight_scale"][2], ml_dtypes.float8_e4m3fn)
    scales = scales.astype(np.float32).reshape(rows, -1)
    scales = scales * np.frombuffer(tensors[f"{module}.weight_scale_2"][2], np.float32)
    return values * scales.repeat(16, 1)


def test_it_is_written_as_both_engines_ask(source, shipped):
    stored, made = read_folder(source.folder), read_folder(shipped)
    for name in (f"{ATTENTION}.weight", f"{ATTENTION}.scale", f"{DRAFT}.weight", f"{DRAFT}.scale"):
        assert made[name] == stored[name]
    assert made[f"{ATTENTION}.scale"][0] == "F8_E8M0"
    rows, half = made[f"{EXPERT}.weight"][1]
    assert made[f"{EXPERT}.weight"][0] == "U8"
    assert made[f"{EXPERT}.weight_scale"][:2] == ("F8_E4M3", (rows, half // 8))
    assert made[f"{EXPERT}.weight_scale_2"][:2] == ("F32", ())
    assert made[f"{EXPERT}.input_scale"] == ("F32", (), np.float32(0.5).tobytes())
    expected = source.judged[f"{EXPERT}.weight"].float().numpy()
    assert np.array_equal(decoded(made, EXPERT), expected)
    config = json.loads((shipped / "config.json").read_text())
    record = config["quantization_config"]
    assert (config["expert_dtype"], record["quant_method"]) == ("fp4", "fp8")
    assert record["weight_block_size"] == [128, 128]
    wanted = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    assert record.items() >= wanted.items()
    assert record["ignore"] == []  # of experts alone: SGLang leaves the draft's out itself


def test_every_command_reads_what_others_made(source, shipped, tmp_path):
    found = run("inspect", shipped, "--json").json
    assert found["healthy"]
    assert done("verify", shipped, "--source", source.folder)
    done("dequantize", shipped, "-o", tmp_path / "floats", "--dtype", "fp32")
    floats = read_folder(tmp_path / "floats")
    for module in (EXPERT, ATTENTION, DRAFT):
        _, shape, data = floats[f"{module}.weight"]
        expected = source.judged[f"{module}.weight"].float().numpy()
        assert np.array_equal(np.frombuffer(data, np.float32).reshape(shape), expected)
    done("transcode", shipped, "--dialect", "compressed-tensors", "-o", tmp_path / "ct")
    made, carried = read_folder(shipped), read_folder(tmp_path / "ct")
    assert carried[f"{EXPERT}.weight_packed"][2] == made[f"{EXPERT}.weight"][2]
    assert carried[f"{ATTENTION}.weight"] == made[f"{ATTENTION}.weight"]
    words = (*WORDS, "--keep-packed", "--draft", "keep")
    done("quantize", shipped, *words, "-o", tmp_path / "again")
    assert read_folder(tmp_path / "again") == made


def test_what_its_engines_do_not_read_is_refused(source, tmp_path):
    """They scale activations of NVFP4 experts by a stored number."""
    words = ("--format", "nvfp4", "--dialect", "deepseek", "--keep-packed", "-o", tmp_path / "out")
    error = run("quantize", source.folder, *words, "--json").json["error"]
    assert (error["code"], error["next"]) == ("dialect-activations", "Add --activations 4.")
    assert not (tmp_path / "out").exists()
