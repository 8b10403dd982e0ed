"""gpt-oss: experts stored natively in MXFP4, as OpenAI published them and as transformers reads
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family import Stack
from gptoss_models import (
    EXPERTS,
    LAYERS,
    STACKED,
    expected_weights,
    listed_experts,
    make_gptoss,
)
from tiny_models import differing, fp4convert, fp4convert_json, read_json, read_tensors
from torch_formulas import mxfp4_weight


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss whose experts hold every code and several block scales, written by safetensors
    alone.
    """
    return make_gptoss(tmp_path_factory.mktemp("native"))


pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]


@pytest.fixture(scope="module")
def listed(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in compressed-tensors, where every expert has its own modules."""
    folder = tmp_path_factory.mktemp("listed") / "artifact"
    fp4convert("transcode", native, "-o", folder, "--dialect", "compressed-tensors", "-q")
    return folder


@pytest.fixture(scope="module")
def back(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("back") / "artifact"
    fp4convert("transcode", listed, "-o", folder, "--dialect", "gpt-oss", "-q")
    return folder


def _load(folder: Path) -> Any:
    """The model as transformers loads it; the test fails where a tensor was missing, unexpected or
    of another shape.
    """
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    options = {
        "dtype": torch.bfloat16,
        "quantization_config": Mxfp4Config(dequantize=True),
        "output_loading_info": True,
    }
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info.values()), info
    return model.eval()


def _logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(1, 49).reshape(3, 16)).logits


def _engine_weights(model: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(STACKED)}


def test_engine_reads_the_native_file_as_the_formula_does(native: Path) -> None:
    """What the tests below rest on: transformers decodes code 8 as -0.0, and the rows and columns
    are where they should be.
    """
    expected = expected_weights(native)
    assert len(expected) == LAYERS * len(STACKED)
    assert differing(_engine_weights(_load(native)), expected) == []


def test_inspect_knows_the_native_file(native: Path) -> None:
    found = fp4convert_json("inspect", native)
    assert (found["format"], found["dialect"], found["block_size"]) == ("mxfp4", "gpt-oss", 32)
    assert found["activations"] == 16
    assert found["global_scale"] is None
    assert found["healthy"]


def test_experts_become_modules_of_the_same_bytes(native: Path, listed: Path) -> None:
    """Gate and up are the even and odd rows; biases and everything else stay as they are."""
    expected = {
        name: tensor
        for name, tensor in read_tensors(native).items()
        if not name.endswith(("_blocks", "_scales"))
    }
    assert f"model.layers.1.mlp.experts.{STACKED[0]}_bias" in expected
    for module, (packed, block_scales) in listed_experts(native).items():
        expected |= {f"{module}.weight_packed": packed, f"{module}.weight_scale": block_scales}
    assert differing(read_tensors(listed), expected) == []
    found = fp4convert_json("inspect", listed)
    assert (found["format"], found["dialect"]) == ("mxfp4", "compressed-tensors")
    assert found["tensors"]["quantized"] == LAYERS * EXPERTS * 3


def test_dequantized_experts_equal_the_formula(native: Path, listed: Path, tmp_path: Path) -> None:
    """In stacks again, transposed, gate and up column by column in turns: the record of the listed
    ones keeps how they lay.
    """
    fp4convert("dequantize", listed, "-o", tmp_path / "restored", "--dtype", "fp32", "-q")
    restored, found = read_tensors(tmp_path / "restored"), {}
    for name in [name for name in restored if name.endswith(STACKED)]:
        members = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        found |= dict(
            Stack(name, members, is_transposed=True, is_interleaved=True).views(
                name, restored.pop(name)
            )
        )
    assert not any(module in name for name in restored for module in found)
    assert (
        differing(
            found,
            {module: mxfp4_weight(*stored) for module, stored in listed_experts(native).items()},
        )
        == []
    )


def test_there_and_back_is_the_native_file(native: Path, back: Path) -> None:
    """Every tensor, byte for byte, and what the engine reads of its configuration."""
    assert differing(read_tensors(back), read_tensors(native)) == []
    ours, theirs = (read_json(folder / "config.json") for folder in (back, native))
    assert (
        ours.pop("quantization_config")["quant_method"]
        == theirs.pop("quantization_config")["quant_method"]
        == "mxfp4"
    )
    assert ours == theirs


def test_engine_loads_what_came_back(native: Path, back: Path) -> None:
    model = _load(back)
    assert differing(_engine_weights(model), expected_weights(native)) == []
    logits = _logits(model)
    assert logits.isfinite().all()
    assert logits.std() > 0.001
    assert logits.equal(_logits(_load(native)))


@pytest.mark.parametrize(
    ("artifact", "dtype"),
    [("native", "bf16"), ("native", "fp32"), ("listed", "bf16"), ("back", "bf16")],
)
def test_dequantized_stacks_load_as_a_plain_model(
    native: Path, artifact: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Stacks of ordinary weights, transposed as transformers holds them: the model that
    Mxfp4Config(dequantize=True) makes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    fp4convert(
        "dequantize",
        request.getfixturevalue(artifact),
        "-o",
        tmp_path / "plain",
        "--dtype",
        dtype,
        "-q",
    )
    expected = {
        name: tensor.to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
        for name, tensor in expected_weights(native).items()
    }
    restored = read_tensors(tmp_path / "plain")
    assert not any(name.endswith(("_blocks", "_scales")) for name in restored)
    assert differing({name: restored[name] for name in expected}, expected) == []
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    assert _logits(model.eval()).equal(_logits(_load(native)))
