"""What records and files of made artifacts give away: names, shards, values beside the layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import LLAMA, run, weight, write_llama, write_single


@pytest.mark.parametrize(
    ("dialect", "key"),
    [("compressed-tensors", "ignore"), ("modelopt", "ignore"), ("quark", "exclude")],
)
def test_a_head_that_no_list_names_is_found_in_every_dialect_with_lists(dialect, key, tmp_path):
    source, made = write_llama(tmp_path / "m"), tmp_path / "made"
    quantize(source, made, "--dialect", dialect)
    assert run("inspect", made, "--json").json["findings"] == []
    for file in ("config.json", "hf_quant_config.json"):
        if (made / file).exists():
            record = json.loads((made / file).read_text())
            record.get("quantization_config", {})[key] = []
            record.get("quantization", {})["exclude_modules"] = []
            (made / file).write_text(json.dumps(record))
    outcome = run("inspect", made, "--json")
    assert outcome.code == 6
    found = [(one["code"], one["tensor"]) for one in outcome.json["findings"]]
    assert found == [("kept-not-ignored", "lm_head")]


ROUTER = "model.layers.0.mlp.gate"


def is_named_for_vllm(patterns, module):
    """As vLLM 0.33 reads Quark's `exclude`: a whole name, or an expression after "re:"."""
    return any(
        re.match(each.removeprefix("re:"), module) if each.startswith("re:") else each == module
        for each in patterns
    )


def test_quarks_record_names_every_kept_layer_exactly(tmp_path):
    experts = [f"model.layers.0.mlp.experts.0.{leaf}_proj" for leaf in ("gate", "up", "down")]
    tensors = {f"{name}.weight": weight(n) for n, name in enumerate((*experts, ROUTER))}
    config = {**LLAMA, "model_type": "qwen3_moe"}
    source, made = write_single(tmp_path / "m", tensors, config), tmp_path / "made"
    quantize(source, made, "--format", "mxfp4", "--dialect", "quark")
    config = json.loads((made / "config.json").read_text())
    exclude = config["quantization_config"]["exclude"]
    assert is_named_for_vllm(exclude, ROUTER)
    assert not any(is_named_for_vllm(exclude, expert) for expert in experts)
    assert run("inspect", made, "--json").json["findings"] == []

    config["quantization_config"]["exclude"] = ["*.gate", "lm_head"]
    (made / "config.json").write_text(json.dumps(config))
    (found,) = run("inspect", made, "--json").json["findings"]
    assert (found["level"], found["code"]) == ("warning", "exclude-wildcard")
    assert f"names 1 linear layers by wildcards alone, the first {ROUTER}" in found["detail"]
    config["quantization_config"]["exclude"] = [r"re:.*\.gate$", "lm_head", "*nothing*"]
    (made / "config.json").write_text(json.dumps(config))
    codes = {each["code"] for each in run("inspect", made, "--json").json["findings"]}
    assert "exclude-wildcard" not in codes


@pytest.mark.parametrize("written", [0, 1])
def test_a_folder_that_lacks_numbered_shards_is_unfinished(written, tmp_path):
    """A part was done, and no other."""
    out, part = tmp_path / "out", ("--shard-index", 0, "--num-shards", 2)
    quantize(write_llama(tmp_path / "m"), out, *part)
    made = sorted(out.glob("*.safetensors"))
    assert len(made) == 1
    if not written:
        made[0].unlink()
    for command in ("inspect", "verify"):
        outcome = run(command, out, "--json")
        first = outcome.json["findings"][0]
        assert (outcome.code, first["level"], first["code"]) == (6, "error", "unfinished")
    for command in (("dequantize", out), ("transcode", out, "--dialect", "modelopt")):
        error = run(*command, "-o", tmp_path / "other", "--json").json["error"]
        assert error["exit"] == 2
        assert "run its command again" in error["next"]
    # Of a checkpoint that nobody here began, something is lost.
    (foreign := tmp_path / "foreign").mkdir()
    (foreign / "model-00001-of-00002.safetensors").write_bytes(
        made[0].read_bytes() if written else b""
    )
    assert run("inspect", foreign, "--json").code == 2


def findings_of(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Levels and tensors by codes, of one of our own artifacts."""
    findings = run("inspect", folder, "--json").json["findings"]
    return {one["code"]: (one["level"], one["tensor"]) for one in findings}


def test_weights_beside_an_index_are_left_out_by_engines(tmp_path):
    out = tmp_path / "q"
    quantize(write_llama(tmp_path / "m"), out)
    write_single(tmp_path / "beside", {"model.norm.weight": weight(1)})
    (tmp_path / "beside" / "model.safetensors").rename(out / "model-00009-of-00009.safetensors")
    assert findings_of(out)["weights-beside"] == ("warning", None)
    (out / "model-00009-of-00009.safetensors").unlink()
    assert "weights-beside" not in findings_of(out)


@pytest.mark.parametrize(
    ("kind", "stored", "shape", "level"),
    [
        ("F32", b"\0\0\xc0\x7f", (64,), "error"),  # NaN
        ("F32", b"\0\0\x80\x7f", (64,), "warning"),  # Inf
        ("F32", b"\0\0\xc0\x7f", (4, 16), None),
        ("F64", b"\0\0\0\0\0\0\xf8\x7f", (64,), "error"),
        ("F8_E4M3", b"\x7f", (64,), "error"),  # the one NaN that it has
        ("F8_E5M2", b"\x7c", (64,), "warning"),  # Inf
    ],
)
def test_what_is_not_finite_beside_the_layers(kind, stored, shape, level, tmp_path):
    """Matrices are read by `verify`."""
    kept = (kind, shape, stored * 64)
    source = write_single(tmp_path / "m", {"x.o_proj.weight": weight(1), "x.bias": kept})
    out = tmp_path / "q"
    quantize(source, out)
    found = findings_of(out).get("kept-not-finite")
    assert found == ((level, "x.bias") if level else None)
    verified = run("verify", out, "--json").json["findings"]
    assert [(one["level"], one["code"]) for one in verified] == [
        (level or "warning", "kept-not-finite")
    ]
