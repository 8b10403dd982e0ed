"""Stacks of experts in GGUF files: what llama.cpp's own Python package reads of them, each expert
under the scale that stands at its place.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import run
from gguf.quants import dequantize
from gguf_donors import model, write_donor

EXPERTS, ROWS, COLUMNS = 3, 32, 64
NAMES = ("gate", "up", "down")
LARGEST = (1.0, 8.0, 0.25)  # of the weights of each expert


def stacks() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shape = (EXPERTS, ROWS, COLUMNS)
    parts = {f"blk.0.ffn_{name}_exps.weight": random.uniform(-1, 1, shape) for name in NAMES}
    by_expert = np.array(LARGEST).reshape(-1, 1, 1)
    return {name: (part * by_expert).astype(np.float32) for name, part in parts.items()}


def read(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {each.name: each for each in gguf.GGUFReader(path).tensors}


def values(tensors: dict[str, gguf.ReaderTensor], name: str) -> np.ndarray:
    """Of a stack, by the package, each expert under its own scale."""
    stored = dequantize(tensors[name].data, tensors[name].tensor_type)
    scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
    return stored if scale is None else stored * scale.data.reshape(-1, 1, 1)


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("donor")
    return write_donor(folder / "donor.gguf", {**model(), **stacks()})


def convert(donor: Path, out: Path, *options: object) -> Path:
    outcome = run("quantize", donor, "--dialect", "gguf", "-o", out, "-q", *options)
    assert outcome.code == 0, outcome.err
    return out / "donor.gguf"


@pytest.mark.parametrize(("fmt", "limit"), [("nvfp4", 0.1), ("mxfp4", 0.14)])
def test_every_expert_is_near_its_weights(
    donor: Path, tmp_path: Path, fmt: str, limit: float
) -> None:
    tensors = read(convert(donor, tmp_path / "out", "--format", fmt))
    for name, weights in stacks().items():
        assert tensors[name].tensor_type.name == fmt.upper()
        error = np.linalg.norm(values(tensors, name) - weights, axis=(1, 2))
        assert (error < limit * np.linalg.norm(weights, axis=(1, 2))).all()


def test_every_expert_has_a_global_scale_of_its_own(donor: Path, tmp_path: Path) -> None:
    """amax / 2688, which is what the rule amax makes of the largest weight."""
    path = convert(donor, tmp_path / "out", "--format", "nvfp4", "--scale-rule", "amax")
    for name, weights in stacks().items():
        scale = read(path)[f"{name.removesuffix('.weight')}.scale"]
        assert scale.tensor_type.name == "F32"
        expected = np.abs(weights).max(axis=(1, 2)) / np.float32(2688)
        # the source is bf16, eight bits of each weight
        assert np.allclose(scale.data, expected, rtol=2.0**-8)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_stack_is_inspected_verified_and_turned_back(
    donor: Path, tmp_path: Path, fmt: str
) -> None:
    path = convert(donor, tmp_path / "out", "--format", fmt)
    found = run("inspect", path, "--full", "--json").json
    assert found["findings"] == []
    assert found["tensors"]["quantized"] == 7 + 3 * EXPERTS
    checked = run("verify", path.parent, "--source", donor, "--min-sqnr", "15", "--json").json
    assert checked["passed"]
    assert {f"blk.0.ffn_up_exps.{number}" for number in range(EXPERTS)} < {
        row["name"] for row in checked["tensors"]
    }
    restored = tmp_path / "restored"
    assert run("dequantize", path.parent, "-o", restored, "--dtype", "fp32", "-q").code == 0
    before, after = read(path), read(restored / "donor.gguf")
    assert list(after) == list(read(donor))
    for name in stacks():
        assert after[name].tensor_type.name == "F32"
        # one rounding more there: (code * block scale) * global scale
        assert np.allclose(values(after, name), values(before, name), rtol=2.0**-22, atol=0)


def test_input_scales_stand_once_for_each_expert(donor: Path, tmp_path: Path) -> None:
    options = ("--format", "nvfp4", "--activations", "4", "--input-scale", "0.5")
    path = convert(donor, tmp_path / "out", *options)
    stored = read(path)["blk.0.ffn_up_exps.input_scale"].data
    assert stored.tolist() == [0.5] * EXPERTS
    found = run("inspect", path.parent, "--full", "--json").json
    assert found["findings"] == []


def test_a_stack_is_four_bit_whole_or_not_at_all(donor: Path, tmp_path: Path) -> None:
    options = ("--format", "mxfp4", "--exclude", "blk.0.ffn_up_exps.1", "--json")
    outcome = run("quantize", donor, "--dialect", "gguf", "-o", tmp_path / "out", *options)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "dialect-module")
    assert not (tmp_path / "out").exists()
    tensors = read(
        convert(donor, tmp_path / "all", "--format", "mxfp4", "--exclude", "blk.0.ffn_up_exps")
    )
    assert tensors["blk.0.ffn_up_exps.weight"].tensor_type.name == "BF16"
    assert tensors["blk.0.ffn_gate_exps.weight"].tensor_type.name == "MXFP4"


def test_experts_alone(donor: Path, tmp_path: Path) -> None:
    options = ("--format", "mxfp4", "--recipe", "experts_only")
    tensors = read(convert(donor, tmp_path / "out", *options))
    four_bit = {name for name, each in tensors.items() if each.tensor_type.name == "MXFP4"}
    assert four_bit == set(stacks())


def test_llama_cpps_own_mxfp4_stack_is_read(tmp_path: Path) -> None:
    """As its package quantizes it, without any record of ours."""
    kinds = dict.fromkeys(stacks(), "MXFP4")
    path = write_donor(tmp_path / "own.gguf", {**model(), **stacks()}, kinds=kinds)
    restored = tmp_path / "restored"
    assert run("dequantize", path, "-o", restored, "--dtype", "fp32", "-q").code == 0
    before, after = read(path), read(restored / "own.gguf")
    for name in stacks():
        assert np.array_equal(values(after, name), values(before, name))
