"""Ignore lists: `inspect` finds the kept layers that compressed-tensors' own matching takes for
quantized ones, whatever the record's targets and ignore list are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import run
from tiny_models import fp4convert, make_llama, make_qwen3_moe, read_tensors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MAKERS = {"llama": make_llama, "qwen3-moe": make_qwen3_moe}
EXCLUDED = ("*.0.self_attn.*", "*.1.mlp.down_proj", "*.experts.0.down_proj")
ATTENTION = "re:.*self_attn.*"
NAMESAKES = {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
FORMS = {  # targets, ignore
    "all": (["Linear"], ["lm_head", "re:.*0.self_attn.*", "re:.*1.mlp.down_proj", "re:.*.0.down"]),
    "no head": (["Linear"], ["re:.*0.self_attn.*", "re:.*1.mlp.down_proj", "re:.*.0.down_proj"]),
    "none": (["Linear"], []),
    "class ignored": (["Linear"], ["Linear"]),
    "exact": (["model.layers.0.self_attn.q_proj", "lm_head"], ["lm_head"]),
    "expressions": ([ATTENTION, "re:.*mlp.*_proj$"], ["re:.*0.self_attn.[qk]_proj"]),
    "from the start": (["re:self_attn", "re:model.layers.0.self_attn.v_proj"], []),
    "router": (["re:.*mlp.gate$"], []),
    "both": (["Linear", ATTENTION], ["lm_head", "re:model.layers.0.self_attn"]),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> an artifact with some layers kept beside namesakes that are quantized."""
    folder, made = tmp_path_factory.mktemp("ignored"), {}
    for name, maker in MAKERS.items():
        source, made[name] = maker(folder / f"{name}-source"), folder / name
        kept = [word for pattern in _fitting(source) for word in ("--exclude", pattern)]
        fp4convert("quantize", source, "--format", "nvfp4", *kept, "-o", made[name], "-q")
    return made


def _fitting(source: Path) -> list[str]:
    """The patterns that fit a module; others would be refused."""
    from fnmatch import fnmatchcase

    names = [name.removesuffix(".weight") for name in read_tensors(source)]
    return [each for each in EXCLUDED if any(fnmatchcase(name, each) for name in names)]


def _named(artifact: Path, targets: list[str], ignore: list[str]) -> set[str]:
    """Modules of transformers' own class that compressed-tensors would quantize."""
    import torch
    from compressed_tensors.utils.match import match_named_modules
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(artifact)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name for name, _ in match_named_modules(model, targets, ignore)}


def _matched(artifact: Path, targets: list[str], ignore: list[str]) -> set[str]:
    """Those of them that the artifact has as ordinary matrices."""
    found = _named(artifact, targets, ignore)
    stored = read_tensors(artifact)
    matrices = {name for name in found if getattr(stored.get(f"{name}.weight"), "ndim", 0) == 2}
    return {name for name in matrices if "embed" not in name}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", MAKERS)
def test_inspect_finds_what_compressed_tensors_would_quantize(
    artifacts: dict[str, Path], tmp_path: Path, family: str, form: str
) -> None:
    targets, ignore = FORMS[form]
    shutil.copytree(artifacts[family], tmp_path / "a")
    (tmp_path / "a" / "quantization_config.json").unlink()  # judged by the engines' record alone
    shutil.rmtree(tmp_path / "a" / ".fp4convert")
    file = tmp_path / "a" / "config.json"
    config = json.loads(file.read_text())
    record = config["quantization_config"]
    record["config_groups"]["group_0"]["targets"] = targets
    record["ignore"] = ignore
    file.write_text(json.dumps(config))
    findings = run("inspect", tmp_path / "a", "--json").json["findings"]
    found = {each["tensor"] for each in findings if each["code"] == "kept-not-ignored"}
    expected = _matched(tmp_path / "a", targets, ignore)
    assert expected <= found
    # Namesakes of quantized layers count too: engines fuse them, and split what transformers fuses.
    assert {name.rpartition(".")[2] for name in found - expected} <= NAMESAKES


@pytest.mark.parametrize(
    "groups",
    [
        {"a": ["Linear"]},
        {"a": ["linear"]},
        {"a": ["re:.*q_proj$"]},
        {"a": ["re:q_proj"]},
        {"a": ["re:.*self_attn.*", "re:.*mlp.*"]},
        {"a": ["re:.*self_attn.*"], "b": ["re:.*mlp.*"]},
        {"a": ["model.layers.1.self_attn.q_proj"]},
        {},
    ],
    ids=str,
)
def test_quantized_layers_that_no_target_covers(groups, artifacts, tmp_path):
    artifact = shutil.copytree(artifacts["llama"], tmp_path / "a")
    config = json.loads((artifact / "config.json").read_text())
    record = config["quantization_config"]
    scheme = record["config_groups"]["group_0"]
    record["config_groups"] = {name: scheme | {"targets": each} for name, each in groups.items()}
    (artifact / "config.json").write_text(json.dumps(config))
    targets = [target for each in groups.values() for target in each]
    packed = {
        name.removesuffix(".weight_packed")
        for name in read_tensors(artifact)
        if name.endswith(".weight_packed")
    }
    bare = packed - _named(artifact, targets, [])
    outcome = run("inspect", artifact, "--json")
    found = [one for one in outcome.json["findings"] if one["code"] == "quantized-not-targeted"]
    assert (outcome.code == 6, len(found)) == (bool(bare), bool(bare))
    if bare:
        assert found[0]["tensor"] in bare
        assert found[0]["detail"].startswith(f"{len(bare)} of {len(packed)} ")
