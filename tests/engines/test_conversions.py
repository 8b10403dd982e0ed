"""Models whose names transformers converts while it loads: what becomes of packed weights then is
what configs/engines says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 64, "num_attention_heads": 4}


def make_dinov2(folder: Path) -> Any:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(num_hidden_layers=2, image_size=28, patch_size=14, mlp_ratio=2, **SIZES)
    return _saved(Dinov2Model(config), folder)


def make_olmo_hybrid(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, OlmoHybridConfig

    linear = {f"linear_{of}": size for of, size in (("num_key_heads", 4), ("num_value_heads", 4))}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 128}
    config = OlmoHybridConfig(
        num_hidden_layers=4,
        intermediate_size=128,
        num_key_value_heads=4,
        **SIZES,
        **linear,
        **tokens,
    )
    return _saved(AutoModelForCausalLM.from_config(config), folder)


def make_nomic_bert(folder: Path) -> Any:
    from transformers import NomicBertConfig, NomicBertModel

    config = NomicBertConfig(
        num_hidden_layers=2, intermediate_size=128, vocab_size=128, pad_token_id=0, **SIZES
    )
    return _saved(NomicBertModel(config), folder)


def _saved(model: Any, folder: Path) -> Any:
    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    return type(model)


def loaded(engine: Any, folder: Path) -> Any:
    import torch

    return engine.from_pretrained(folder, dtype=torch.bfloat16).eval()


def said(folder: Path) -> set[tuple[str, str]]:
    """What inspect tells of transformers: (level, code)."""
    document = run("inspect", folder, "--for", "transformers", "--json").json
    return {
        (finding["level"], finding["code"])
        for finding in document["findings"]
        if finding["code"].startswith("engine")
    }


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("make", [make_dinov2, make_olmo_hybrid])
def test_what_does_not_load_is_told(make: Callable[[Path], Any], fmt, tmp_path):
    engine = make(tmp_path / "m")
    made = run("quantize", tmp_path / "m", "--format", fmt, "-o", tmp_path / "q", "--json")
    assert any("transformers" in warning for warning in made.json["warnings"])
    assert said(tmp_path / "q") == {("error", "engine-refuses")}
    with pytest.raises((ValueError, RuntimeError)):
        loaded(engine, tmp_path / "q")
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "back", "-q").code == 0
    loaded(engine, tmp_path / "back")


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_what_computes_garbage_is_told(fmt, tmp_path):
    """Scales that transformers leaves as memory was: NaN in most runs."""
    import torch

    engine = make_nomic_bert(tmp_path / "m")
    made = run("quantize", tmp_path / "m", "--format", fmt, "-o", tmp_path / "q", "--json")
    is_bad = fmt == "nvfp4"
    assert any("transformers" in warning for warning in made.json["warnings"]) is is_bad
    assert said(tmp_path / "q") == ({("error", "engine-refuses")} if is_bad else set())
    assert run("dequantize", tmp_path / "q", "-o", tmp_path / "back", "-q").code == 0
    with torch.no_grad():
        states, expected = (
            loaded(engine, tmp_path / name)(input_ids=torch.arange(1, 9)[None])[0].float()
            for name in ("q", "back")
        )
    assert torch.allclose(states, expected, rtol=0.05, atol=0.05) is not is_bad
