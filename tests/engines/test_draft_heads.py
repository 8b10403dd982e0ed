"""A draft head that ModelOpt makes and exports: what the command makes of it has the names that
ModelOpt's own exporter allows and the bytes of its arithmetic, and is told for what it is.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import run
from families import FAMILIES
from family import build
from tiny_models import fp4convert, fp4convert_json, read_json, read_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
HEADS = [family for family in FAMILIES if family.name.startswith("eagle")]
MODEL = {
    **{"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 24},
    **{"num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64},
}
OF_HEAD = {
    **{"num_hidden_layers": 1, "draft_vocab_size": 96, "use_aux_hidden_state": True},
    **{"has_lm_head": True, "use_last_layernorm": True},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


@pytest.fixture(scope="module")
def exporter() -> Any:
    """ModelOpt's exporter of the EAGLE-3 head that it puts on a tiny Llama."""
    from modelopt.torch import speculative
    from modelopt.torch.export.plugins.hf_spec_export import EagleExporter
    from modelopt.torch.speculative.eagle.default_config import default_eagle_config
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, num_hidden_layers=6, architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(config).bfloat16()
    own = {**default_eagle_config, **MODEL, **OF_HEAD}
    speculative.convert(
        model, [("eagle", {"eagle_architecture_config": own, "eagle_decoder_type": "llama"})]
    )
    return EagleExporter(model)


@pytest.fixture(scope="module")
def source(exporter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle") / "head"
    exporter.export(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    folder = source.with_name("artifact")
    words = ("--format", "nvfp4", "--scale-rule", "amax", "--dialect", "modelopt")
    fp4convert("quantize", source, *words, "-o", folder, "-q")
    return folder


def test_the_names_are_those_that_modelopt_exports(exporter: Any, artifact: Path) -> None:
    exporter._check_valid_sd(read_tensors(artifact))


def test_codes_and_scales_are_those_of_modelopt(source: Path, artifact: Path) -> None:
    """By the formulas of its packed tensor, with the amax of what engines fuse."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    before, after = read_tensors(source), read_tensors(artifact)
    packed = [name.removesuffix("_scale_2") for name in after if name.endswith("_scale_2")]
    assert len(packed) == 7
    for name in packed:
        parent, leaf = name.removesuffix(".weight").rsplit(".", 1)
        group = next((members for members in FUSED if leaf in members), (leaf,))
        amax = max(before[f"{parent}.{member}.weight"].abs().max() for member in group).float()
        whole = amax / 2688
        scales, _ = NVFP4QTensor.get_weights_scaling_factor(before[name], 16, whole)
        codes, _, _ = NVFP4QTensor.quantize(before[name], 16, scales, whole)
        assert torch.equal(after[name], codes._quantized_data)
        own = after[f"{name}_scale"]
        assert torch.equal(own.view(torch.uint8), scales.to(own.dtype).view(torch.uint8))
        assert float(after[f"{name}_scale_2"]) == float(whole)
    kept = before.keys() - set(packed)
    assert {"d2t", "fc.weight", "lm_head.weight"} <= kept
    assert all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors", "quark"])
@pytest.mark.parametrize("family", HEADS, ids=str)
def test_engines_find_what_stays_under_their_own_prefix(
    family: Any, dialect: str, tmp_path: Path
) -> None:
    """As vLLM names it: model.fc (llama_eagle3.py, maybe_prefix)."""
    build(family, tmp_path / "head")
    words = ("--format", "nvfp4", "--dialect", dialect, "-o", tmp_path / "out", "-q")
    fp4convert("quantize", tmp_path / "head", *words)
    record = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    ignored = record.get("ignore") or record["exclude"]
    if dialect == "compressed-tensors":
        from compressed_tensors.utils import match_name

        fits = [match_name("model.fc", pattern) for pattern in ignored]
    else:
        fits = [fnmatchcase("model.fc", pattern) for pattern in ignored]
    assert any(fits)


@pytest.mark.parametrize("family", HEADS, ids=str)
def test_a_head_is_told_and_healthy(family: Any, tmp_path: Path) -> None:
    source, out = build(family, tmp_path / "head"), tmp_path / "out"
    made = fp4convert_json("quantize", source, "--format", "nvfp4", "-o", out)
    assert any("draft head" in warning for warning in made["warnings"])
    assert [line for line in made["next"] if "speculative" in line and line.startswith("#")]
    assert not any("vllm serve" in line for line in made["next"])
    found = fp4convert_json("verify", out, "--source", source)
    assert found["passed"]
    report = fp4convert_json("inspect", out)
    assert report["healthy"]
    assert [(one["level"], one["code"]) for one in report["findings"]] == [("note", "draft-head")]
    loads = {one["engine"]: one["loads"] for one in report["engines"]}
    assert loads["vllm"] is not False
    assert loads["transformers"] is False


def test_a_quantized_projection_of_inputs_is_found(tmp_path: Path) -> None:
    source, out = build(HEADS[1], tmp_path / "head"), tmp_path / "out"
    words = ("--format", "nvfp4", "--include", "fc", "-o", out)
    made = fp4convert_json("quantize", source, *words)
    assert any("'fc', which joins" in warning for warning in made["warnings"])
    report = fp4convert_json("inspect", out)
    assert [one["tensor"] for one in report["findings"] if one["code"] == "draft-format"] == ["fc"]


@pytest.mark.parametrize(
    ("key", "tensor"),
    [("draft_vocab_size", "lm_head"), ("hidden_size", "q_proj"), ("hidden_size", "'fc'")],
)
def test_a_head_of_other_sizes_than_its_config_is_found(
    key: str, tensor: str, tmp_path: Path
) -> None:
    source, out = build(HEADS[1], tmp_path / "head"), tmp_path / "out"
    fp4convert("quantize", source, "--format", "nvfp4", "-o", out, "-q")
    config = read_json(out / "config.json")
    (out / "config.json").write_text(json.dumps({**config, key: config[key] + 16}))
    found = run("inspect", out, "--json").json["findings"]
    named = [one["tensor"] for one in found if one["code"] == "config-size"]
    assert any(name.endswith(tensor.strip("'")) for name in named)


@pytest.mark.parametrize("family", HEADS, ids=str)
def test_to_keep_drafts_leaves_nothing_to_do(family: Any, tmp_path: Path) -> None:
    source = build(family, tmp_path / "head")
    words = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--draft")
    refused = run(*words, "keep", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "no-linears")
    assert "Leave --draft keep out" in refused.json["error"]["next"]
    assert not (tmp_path / "out").exists()
    assert run(*words, "same", "-q").code == 0
