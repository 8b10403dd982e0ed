"""quantize --lora: what PEFT merges is rounded, and rounded so that the adapter stays."""

import json
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from checkpoints import done, run
from made_up_inputs import calibrate, inputs_of
from packings import fp8_blocks, pack_checkpoint
from peft_models import ATTENTION, MLP, merge_by_peft, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_llama, make_qwen2

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
EVERY = {"r": 4, "lora_alpha": 4, "target_modules": [*ATTENTION, *MLP, "lm_head"]}
NVFP4, MODEL = ("--format", "nvfp4"), "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A base model, an adapter of it, and what PEFT merges of both."""
    folder = tmp_path_factory.mktemp("models")
    write_adapter(make_llama(folder / "base"), folder / "adapter", EVERY)
    merge_by_peft(folder / "base", folder / "adapter", folder / "merged")
    return folder


def quantize(source: Path, out: Path, *words: object) -> dict:
    return done("quantize", source, "-o", out, *words, "--json").json


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_rounded_to_the_nearest_it_is_the_merged_model_quantized(fmt, models, tmp_path):
    quantize(models / "merged", tmp_path / "judge", "--format", fmt)
    words = ("--format", fmt, "--lora", models / "adapter", "--method", "rtn")
    result = quantize(models / "base", tmp_path / "ours", *words)
    assert shards(tmp_path / "ours") == shards(tmp_path / "judge")
    assert any("--method rtn" in warning for warning in result["warnings"])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_the_adapter_stays_where_rounding_protects_it(fmt, models, tmp_path):
    words = ("--format", fmt, "--lora", models / "adapter")
    lost = quantize(models / "base", tmp_path / "rtn", *words, "--method", "rtn")
    kept = quantize(models / "base", tmp_path / "ours", *words)
    assert (kept["method"], kept["adapter"]["merged"]) == ("gptq", {"rounded": 14, "kept": 1})
    before, after = (one["fidelity"]["adapter"] for one in (lost, kept))
    assert before["modules"] == after["modules"] == 14
    assert after["db_min"] > before["db_min"] + 9
    assert after["db_mean"] > before["db_mean"] + 10
    assert kept["fidelity"]["sqnr_db_mean"] > lost["fidelity"]["sqnr_db_mean"] - 1


def test_what_is_left_is_measured_as_the_page_says(models, tmp_path):
    """10 log10 of |s B A|^2 over |(W' - Q) P|^2, P a basis of the rows of A, by NumPy."""
    out = tmp_path / "out"
    quantize(models / "base", out, *NVFP4, "--lora", models / "adapter")
    done("dequantize", out, "-o", tmp_path / "back", "--dtype", "fp32")
    merged = load_file(models / "merged" / "model.safetensors")
    rounded = load_file(tmp_path / "back" / "model.safetensors")
    factors = load_file(models / "adapter" / "adapter_model.safetensors")
    entries = json.loads((out / "quantization_report.json").read_text())["tensors"]
    assert len(entries) == 14
    for entry in entries:
        a, b = (
            factors[f"base_model.model.{entry['module']}.lora_{side}.weight"].double().numpy()
            for side in "AB"
        )
        basis, _ = np.linalg.qr(a.T)
        error = (merged[entry["name"]].double() - rounded[entry["name"]].double()).numpy()
        ratio = ((b @ a) ** 2).sum() / ((error @ basis) ** 2).sum()
        assert entry["adapter_db"] == pytest.approx(10 * np.log10(ratio), abs=1e-3)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_packed_base_models_are_decoded_merged_and_rounded_again(kind, models, tmp_path):
    base = Path(shutil.copytree(models / "base", tmp_path / "base"))
    modules = [name[: -len(".weight")] for name in load_file(base / MODEL) if "_proj" in name]
    if kind == "fp8":
        judged = pack_checkpoint(base, [(fp8_blocks(128, 128), modules)])
        (base / MODEL).unlink()  # its tensors are dealt out to shards now
    else:
        quantize(models / "base", tmp_path / "packed", *NVFP4)
        back = ("dequantize", tmp_path / "packed", "-o", tmp_path / "back", "--dtype", "fp32")
        done(*back)
        judged, base = load_file(tmp_path / "back" / MODEL), tmp_path / "packed"
    # The same in float32, merged by torch.
    factors = load_file(models / "adapter" / "adapter_model.safetensors")
    plain = Path(shutil.copytree(models / "base", tmp_path / "plain"))
    for module in [*modules, "lm_head"]:
        a, b = (factors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        name, own = f"{module}.weight", judged[f"{module}.weight"]
        judged[name] = (own.float() + b @ a).to(own.dtype)
    save_file({name: values.contiguous() for name, values in judged.items()}, plain / MODEL)
    quantize(plain, tmp_path / "judge", *NVFP4)
    words = (*NVFP4, "--lora", models / "adapter", "--method", "rtn")
    quantize(base, tmp_path / "ours", *words)
    expected, found = (
        {
            name: values
            for path in folder.glob("*.safetensors")
            for name, values in load_file(path).items()
        }
        for folder in (tmp_path / "judge", tmp_path / "ours")
    )
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


def same(one, other) -> bool:
    import torch

    return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other)))


def test_parts_and_threads_make_the_same_bytes(models, tmp_path):
    words = (*NVFP4, "--lora", models / "adapter")
    whole = quantize(models / "base", tmp_path / "whole", *words, "--workers", "1")
    many = quantize(models / "base", tmp_path / "many", *words, "--workers", "3")
    assert many["digest"] == whole["digest"]
    for index in range(2):
        part = ("--shard-index", index, "--num-shards", 2)
        quantize(models / "base", tmp_path / "parts", *words, *part)
    joined = run("merge", tmp_path / "parts", "--json")
    assert joined.json["digest"] == whole["digest"]
    assert joined.json["fidelity"]["adapter"] == whole["fidelity"]["adapter"]


def test_the_plan_says_how_an_adapter_is_rounded(models, tmp_path):
    for fmt, how in (("nvfp4", "so that it stays"), ("fp8", "to the nearest")):
        words = ("--format", fmt, "--lora", models / "adapter", "--dry-run")
        told = " ".join(run("quantize", models / "base", "-o", tmp_path / "q", *words).out.split())
        assert f"rounded {how}" in told


def test_another_adapter_or_scale_is_another_plan(models, tmp_path):
    out = tmp_path / "out"
    words = (*NVFP4, "--lora", models / "adapter")
    first = quantize(models / "base", out, *words)
    assert quantize(models / "base", out, *words)["digest"] == first["digest"]
    other = run("quantize", models / "base", "-o", out, *words, "--lora-scale", "0.5", "--json")
    assert (other.code, other.json["error"]["code"]) == (5, "other-plan")
    again = Path(shutil.copytree(models / "adapter", tmp_path / "adapter"))
    tensors = load_file(again / "adapter_model.safetensors")
    next(iter(tensors.values())).mul_(2)
    save_file(tensors, again / "adapter_model.safetensors")
    other = run("quantize", models / "base", "-o", out, *NVFP4, "--lora", again, "--json")
    assert (other.code, other.json["error"]["code"]) == (5, "other-plan")


def test_the_record_names_the_adapter_and_verify_asks_for_it(models, tmp_path):
    out, scale = tmp_path / "out", ("--lora-scale", "0.5")
    result = quantize(models / "base", out, *NVFP4, "--lora", models / "adapter", *scale)
    record = json.loads((out / "quantization_config.json").read_text())["adapter"]
    assert (record["repo"], record["scale"]) == (None, 0.5)
    assert record["sha256"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    source = ("verify", out, "--source", models / "base")
    bare = run(*source, "--json")
    assert (bare.code, bare.json["error"]["code"]) == (2, "adapter-needed")
    named = run(*source, "--lora", models / "adapter", "--json")
    assert (named.code, named.json["passed"]) == (0, True)
    assert named.json["summary"]["sqnr_db_mean"] == pytest.approx(
        result["fidelity"]["sqnr_db_mean"], abs=1e-4
    )
    assert result["next"][0].endswith(f"--source {models / 'base'} --lora {models / 'adapter'}")


def test_verify_finds_a_kept_tensor_without_its_adapter(models, tmp_path):
    out = tmp_path / "out"
    quantize(models / "base", out, *NVFP4, "--lora", models / "adapter")
    tensors = load_file(out / MODEL)
    tensors["lm_head.weight"] = load_file(models / "base" / MODEL)["lm_head.weight"]
    save_file(tensors, out / MODEL, {"format": "pt"})
    words = ("--source", models / "base", "--lora", models / "adapter", "--json")
    found = run("verify", out, *words).json["findings"]
    assert ("kept-differs", "lm_head.weight") in {(one["code"], one["tensor"]) for one in found}


def test_another_adapter_is_not_the_one_of_the_record(models, tmp_path):
    out = tmp_path / "out"
    quantize(models / "base", out, *NVFP4, "--lora", models / "adapter")
    other = write_adapter(models / "base", tmp_path / "other", EVERY, seed=1)
    words = ("--source", models / "base", "--lora", other, "--json")
    assert run("verify", out, *words).json["error"]["code"] == "adapter-differs"
    quantize(models / "base", tmp_path / "bare", *NVFP4)
    assert run("verify", tmp_path / "bare", *words).json["error"]["code"] == "adapter-differs"


def test_a_dry_run_shows_what_is_merged(models, tmp_path):
    base = make_qwen2(tmp_path / "base")
    config = {
        "r": 4,
        "lora_bias": True,
        "target_modules": ["q_proj"],
        "modules_to_save": ["model.norm"],
    }
    adapter = write_adapter(base, tmp_path / "adapter", config)
    words = (*NVFP4, "--lora", adapter, "--dry-run")
    plan = run("quantize", base, *words, "--json").json
    merged = {row["pattern"]: row["count"] for row in plan["patterns"] if "merged" in row["reason"]}
    assert merged == {
        "model.layers.[0-1].self_attn.q_proj": 2,
        "model.layers.[0-1].self_attn.q_proj.bias": 2,
        "model.norm": 1,
    }
    assert plan["adapter"]["merged"] == {"rounded": 2, "kept": 3}
    assert "adapter, merged into 2 modules and 3 kept tensors" in run("quantize", base, *words).out


def test_transcode_carries_the_adapter_on(models, tmp_path):
    quantize(models / "base", tmp_path / "out", *NVFP4, "--lora", models / "adapter")
    there = tmp_path / "there"
    done("transcode", tmp_path / "out", "-o", there, "--dialect", "modelopt")
    words = ("--source", models / "base", "--lora", models / "adapter", "--json")
    assert run("verify", there, *words).json["passed"] is True


@pytest.mark.parametrize("gram", ["full", "block:32"])
def test_beside_a_calibration_the_adapter_stays_too(gram, models, tmp_path):
    file = calibrate(tmp_path / "calibration.safetensors", models / "base", gram)
    words = (*NVFP4, "--lora", models / "adapter", "--calibration", file)
    lost = quantize(models / "base", tmp_path / "rtn", *words, "--method", "rtn")
    kept = quantize(models / "base", tmp_path / "ours", *words)
    assert (kept["method"], kept["scale_rule"]) == ("gptq", "importance")
    before, after = (one["fidelity"]["adapter"] for one in (lost, kept))
    assert after["db_mean"] > before["db_mean"] + 3


def test_layers_that_saw_few_tokens_keep_the_adapter_too(models, tmp_path):
    """Left to the scale rule by gptq, they are protected as without a calibration."""
    few = {module: x[:8] for module, x in inputs_of(models / "base").items()}
    file = calibrate(tmp_path / "calibration.safetensors", models / "base", "full", few)
    words = (*NVFP4, "--lora", models / "adapter", "--calibration", file)
    lost = quantize(models / "base", tmp_path / "rtn", *words, "--method", "rtn")
    kept = quantize(models / "base", tmp_path / "ours", *words)
    before, after = (one["fidelity"]["adapter"] for one in (lost, kept))
    assert after["db_min"] > before["db_min"] + 5


def test_a_rank_pattern_that_would_never_end_ends(models, tmp_path):
    adapter = shutil.copytree(models / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["rank_pattern"] = {"((a|a)*b|(.|.)*)*c": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    began = time.monotonic()
    outcome = run("quantize", models / "base", *NVFP4, "--lora", adapter, "-o", tmp_path / "o")
    assert outcome.code in (0, 2)
    assert time.monotonic() - began < 30


def test_a_calibration_of_the_merged_model_knows_its_adapter(models, tmp_path):
    """What calibrate --lora records is what it records of PEFT's merged model."""
    text, own = tmp_path / "text.txt", tmp_path / "own.safetensors"
    text.write_text("the inputs of a merged model are others " * 60)
    base = with_tokenizer(models / "base", tmp_path / "base")
    merged = with_tokenizer(models / "merged", tmp_path / "merged")
    words = ("--text", text, "--sequence-length", "32", "--gram", "full")
    adapter = ("--lora", models / "adapter")
    done("calibrate", base, "-o", own, *words, *adapter)
    done("calibrate", merged, "-o", tmp_path / "judge.safetensors", *words)
    found, expected = load_file(own), load_file(tmp_path / "judge.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []
    # It is for this adapter alone, and no warning says that it lacks one.
    out = tmp_path / "out"
    result = quantize(base, out, *NVFP4, *adapter, "--calibration", own)
    assert not any("without the adapter" in warning for warning in result["warnings"])
    other = ("quantize", base, "-o", tmp_path / "x", *NVFP4, "--calibration", own, "--json")
    assert run(*other, *adapter, "--lora-scale", "2").json["error"]["code"] == "calibration-weights"
    four = ("--activations", "4", "--input-scale")
    for words in (
        (*other, "--method", "gptq"),
        (*other[:-3], *four, own, "--json"),
        ("analyze", base, "--calibration", own, "--json"),
    ):
        assert run(*words).json["error"]["code"] == "calibration-weights", words
    alone = tmp_path / "alone"
    quantize(base, alone, *NVFP4)
    verify = ("verify", "--source", base, "--calibration", own, "--json")
    assert run(*verify, alone).json["error"]["code"] == "calibration-weights"
    done(*verify, out, *adapter)
    done(*other[:-3], *four, own, *adapter, "--json")
    # Predictions are compared with those of the merged model, as beside PEFT's own.
    evaluated = ("--text", text, "--sequence-length", "32", "--json")
    ours = run("evaluate", out, "--source", base, *adapter, *evaluated).json
    theirs = run("evaluate", out, "--source", merged, *evaluated).json
    assert ours["kl"] == theirs["kl"]


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of the model, with a tokenizer of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    numbers = {letter: number for number, letter in enumerate(sorted(alphabet))}
    made = Tokenizer(models.BPE(numbers, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def test_an_artifact_with_factors_takes_no_adapter(models, tmp_path):
    """It was trained beside weights that AWQ had not multiplied."""
    quantize(models / "base", tmp_path / "q", *NVFP4)
    path = tmp_path / "q" / "quantization_config.json"
    into, heads = "model.layers.0.input_layernorm", {"repeats": 1, "width": 1}
    linears = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    fold = {"into": into, "kind": "norm", "linears": linears, "heads": heads, "modules": [into]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "folds": [fold]}))
    words = (*NVFP4, "--lora", models / "adapter", "-o", tmp_path / "out", "--json")
    outcome = run("quantize", tmp_path / "q", *words)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "adapter-folded")
    assert not (tmp_path / "out").exists()
