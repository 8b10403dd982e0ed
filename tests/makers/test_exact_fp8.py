"""MXFP4 and MXFP8 become FP8 blocks of the same values, as torch reads both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import bf16, run, weight, write_single

from fp4convert.makers.exact_fp8 import choose_powers

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODULES = {"gate_proj": (160, 256), "down_proj": (256, 160)}  # blocks at the edges are cut
LAYER = "model.layers.0.mlp"


def source_of(folder: Path, fmt: str) -> Path:
    """Make a source in a format of powers of two, whose rows differ in size."""
    tensors = {"model.norm.weight": ("BF16", (256,), bf16(256))}
    for seed, (name, (rows, columns)) in enumerate(MODULES.items()):
        tensors[f"{LAYER}.{name}.weight"] = weight(seed, rows, columns)
    write_single(folder / "floats", tensors, {"model_type": "other"})
    made = run("quantize", folder / "floats", "--format", fmt, "-o", folder / fmt)
    assert made.code == 0, made.err
    return folder / fmt


def values_of(folder: Path, module: str) -> torch.Tensor:
    """Read a matrix of MXFP4, MXFP8 or FP8 in blocks of 128x128, by torch's types."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    name = f"{LAYER}.{module}"
    if f"{name}.weight_scale_inv" in tensors:
        scales = tensors[f"{name}.weight_scale_inv"]
        codes = tensors[f"{name}.weight"].float()
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * whole[: codes.shape[0], : codes.shape[1]]
    scales = torch.exp2(tensors[f"{name}.weight_scale"].to(torch.float32) - 127)
    if f"{name}.weight_packed" in tensors:
        packed = tensors[f"{name}.weight_packed"].long()
        codes = E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]
    else:
        codes = tensors[f"{name}.weight"].float()
    return codes * scales.repeat_interleave(32, 1)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_every_value_stays(fmt, tmp_path):
    source = source_of(tmp_path, fmt)
    words = ("--format", "fp8", "--dialect", "deepseek", "--json")
    made = run("quantize", source, *words, "-o", tmp_path / "fp8")
    assert made.code == 0, made.err
    assert "rounded again" not in made.err
    blocks = equal = 0
    for module in MODULES:
        before, after = values_of(source, module), values_of(tmp_path / "fp8", module)
        for rows in range(0, before.shape[0], 128):
            for columns in range(0, before.shape[1], 128):
                block = slice(rows, rows + 128), slice(columns, columns + 128)
                blocks, equal = blocks + 1, equal + bool(torch.equal(before[block], after[block]))
    carried = made.json["carried"]
    assert (carried["modules"], carried["blocks"], carried["kept_blocks"]) == (2, blocks, equal)
    if fmt == "mxfp4":
        assert blocks == equal == 8
        assert carried["bit_for_bit"] == 2
    verified = run("verify", tmp_path / "fp8", "--source", source, "--json")
    assert verified.code == 0, verified.out


def test_another_source_or_granularity_is_rounded_by_its_amax(tmp_path):
    source = source_of(tmp_path, "mxfp4")
    rows = run("quantize", source, "--format", "fp8", "-o", tmp_path / "rows", "--json")
    assert "carried" not in rows.json
    assert "rounded again" in rows.err
    floats = tmp_path / "floats"
    words = ("--format", "fp8", "--dialect", "deepseek", "--json")
    assert "carried" not in run("quantize", floats, *words, "-o", tmp_path / "f").json


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        *((0.0, 1.0), (448.0, 1.0), (448.0 * 2**-20, 2.0**-20), (449.0, 2.0), (256.0, 1.0)),
        *((1.0, 2.0**-8), (1.75, 2.0**-8), (1.875, 2.0**-7), (2.0**-140, 2.0**-126)),
    ],
)
def test_the_scale_is_the_least_power_of_two_that_holds_the_largest(amax, scale):
    import numpy as np

    assert choose_powers(np.array([[amax]], np.float32)).tolist() == [[scale]]


def test_values_far_below_the_largest_of_a_block_are_counted_as_lost(tmp_path):
    """In one block 2^20 apart: E4M3 ends at 2^-9 of the scale."""
    folder = source_of(tmp_path, "mxfp4")
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    scales = tensors[f"{LAYER}.gate_proj.weight_scale"]
    scales[0, 0] = int(scales.max()) + 20
    from safetensors.torch import save_file

    own = tmp_path / "own"
    own.mkdir()
    save_file(tensors, own / path.name, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config))
    words = ("--format", "fp8", "--dialect", "deepseek", "--json")
    carried = run("quantize", own, *words, "-o", tmp_path / "fp8").json["carried"]
    assert (carried["blocks"], carried["kept_blocks"]) == (8, 7)
    assert carried["lossy"] == [f"{LAYER}.gate_proj"]
