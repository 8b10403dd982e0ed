"""Artifacts with folds in transformers: as close to the model as rounding alone, whatever the
factors were.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import run
from folding_models import build, outputs
from made_up_inputs import correlated

from fp4convert.checkpoint.linears import find_linears
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.open import open_source

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]


def statistics(folder: Path, path: Path) -> Path:
    """A calibration file with inputs of every linear layer; some columns are much larger than
    others.
    """
    source = open_source(str(folder))
    linears = find_linears(source, build_recipe(Target("nvfp4"), source.checkpoint.config)).of
    tensors: dict[str, np.ndarray] = {}
    for number, linear in enumerate(linears.values()):
        tensors |= statistics_of(linear.module, correlated(linear.shape[1], 128, number))
    return write_calibration(path, source, tensors)


def restored(folder: Path, out: Path, *options: object) -> Path:
    """The model in float32 that engines compute with."""
    made = run(
        "quantize",
        folder,
        "--format",
        "nvfp4",
        "--scale-rule",
        "amax",
        "-o",
        out,
        "-q",
        "--json",
        *options,
    )
    assert made.code == 0, made.err
    assert run("verify", out, "--source", folder, "--json").json["findings"] == []
    assert run("dequantize", out, "-o", out.with_suffix(".f32"), "--dtype", "fp32", "-q").code == 0
    return out.with_suffix(".f32")


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi", "cohere", "bert", "mixtral", "qwen2_moe", "deepseek_v2"]
)
def test_a_folded_artifact_is_as_close_as_a_rounded_one(name, tmp_path):
    """A reader that was left out, or a factor that was not undone, would be an error of another
    size.
    """
    folder = build(name, tmp_path / "model")
    before = outputs(name, folder)
    calibration = (
        "--calibration",
        statistics(folder, tmp_path / "c.safetensors"),
        "--recipe",
        "all",
    )
    plain = (
        (outputs(name, restored(folder, tmp_path / "rtn", "--recipe", "all")) - before)
        .square()
        .mean()
    )
    found = outputs(name, restored(folder, tmp_path / "awq", "--method", "awq", *calibration))
    assert 0 < (found - before).square().mean() < 2 * plain


def test_transformers_loads_the_packed_weights_beside_divided_norms(tmp_path):
    """What compressed-tensors unpacks, and norms as they are stored,
    is what `dequantize` writes.
    """
    import torch
    import transformers

    folder = build("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "torch_dtype": "float32", "dtype": "float32"})
    )
    out = tmp_path / "awq"
    expected = outputs(
        "qwen3",
        restored(
            folder, out, "--method", "awq", "--calibration", statistics(folder, tmp_path / "c.st")
        ),
    )
    model = transformers.Qwen3ForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    with torch.no_grad():
        found = model.eval()(input_ids=torch.arange(1, 33).reshape(2, 16)).logits
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()  # bf16 beside float32
