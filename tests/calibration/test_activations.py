"""Inputs as engines round them: beside compressed-tensors, by itself and inside transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from calibrations import write_calibration
from checkpoints import Outcome, run
from tiny_chains import LENGTH, SAMPLES, SIZES, TEXT, make_model, tokens_of
from tiny_models import read_tensors

from fp4convert.storage.open import open_source

pytestmark = pytest.mark.engine


def scheme(fmt: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    name = {"nvfp4": "NVFP4", "mxfp4": "MXFP4"}[fmt]
    return preset_name_to_scheme(name, ["Linear"]).input_activations


def rounded_by_compressed_tensors(fmt: str, x: Any, multiplier: float) -> Any:
    import torch
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = scheme(fmt)
    divisor = torch.tensor([1 / multiplier]) if fmt == "nvfp4" else None
    scales, zero = compute_dynamic_scales_and_zp(
        value=x, args=args, module=torch.nn.Linear(x.shape[-1], 1), global_scale=divisor
    )
    return fake_quantize(x, scales, zero, args, global_scale=divisor)


@pytest.mark.parametrize("multiplier", [1.0, 2.0**-9, 2.0**-14])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_values_are_those_of_compressed_tensors(fmt: str, multiplier: float) -> None:
    """Of a power of two as the scale, by which divisions are exact in any order."""
    import torch

    from fp4convert.calibration.activations import round_mxfp4, round_nvfp4

    random = torch.Generator().manual_seed(0)
    x = torch.randn((64, 256), generator=random) * torch.logspace(-2, 2, 256)
    x[0], x[1, :64] = 0, torch.arange(64) / 8
    found = round_nvfp4(x, multiplier) if fmt == "nvfp4" else round_mxfp4(x)
    judged = rounded_by_compressed_tensors(fmt, x, multiplier)
    assert (found == judged).double().mean() > 0.9999  # a quotient that rounds to a tie
    torch.testing.assert_close(found, judged, rtol=0.34, atol=0)


def ids_of() -> Any:
    import torch

    return torch.tensor(tokens_of(TEXT)).reshape(SAMPLES, LENGTH)


def mean_kl(source: Any, artifact: Any) -> float:
    import torch
    from torch.nn import functional

    with torch.no_grad():
        p, q = (
            model(input_ids=ids_of()).logits[:, :-1].double().log_softmax(-1).flatten(0, 1)
            for model in (source, artifact)
        )
    return float(functional.kl_div(q, p, log_target=True, reduction="batchmean"))


def load(folder: Path) -> Any:
    import transformers

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype="float32", **eager).eval()


def evaluated(artifact: Path, source: Path, *options: str) -> Outcome:
    text = source.parent / "text.txt"
    text.write_text(TEXT)
    named = ("--source", source, "--text", text, "--sequence-length", LENGTH)
    return run("evaluate", artifact, *named, *options)


def evaluate(artifact: Path, source: Path) -> dict[str, Any]:
    outcome = evaluated(artifact, source, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.json


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_four_bit_activations_are_those_of_compressed_tensors(fmt: str, tmp_path: Path) -> None:
    """transformers' model, where compressed-tensors rounds the input of what is packed."""
    source, artifact, plain = make_model(tmp_path / "m", "Llama"), tmp_path / "a", tmp_path / "w"
    options = ("--input-scale", 2.0**-9) if fmt == "nvfp4" else ()
    made = run("quantize", source, "--format", fmt, "-o", artifact, "--activations", 4, *options)
    assert made.code == 0, made.err
    assert run("quantize", source, "--format", fmt, "-o", plain).code == 0
    found = evaluate(artifact, source)
    assert found["activations"] == 4
    restored = tmp_path / "r"
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    stored, theirs = read_tensors(artifact), load(restored)
    packed = [name.removesuffix(".weight_packed") for name in stored if "_packed" in name]
    assert len(packed) == 21
    for path in packed:
        divisor = stored.get(f"{path}.input_global_scale")
        assert (divisor is not None) == (fmt == "nvfp4")
        scale = 1.0 if divisor is None else 1 / float(divisor)
        theirs.get_submodule(path).register_forward_pre_hook(
            lambda module, args, scale=scale: rounded_by_compressed_tensors(fmt, args[0], scale)
        )
    judged = mean_kl(load(source), theirs)
    assert found["kl"]["mean"] == pytest.approx(judged, rel=1e-3)
    assert found["kl"]["mean"] > 1.2 * evaluate(plain, source)["kl"]["mean"]


def test_experts_are_given_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own experts, whose inputs the test rounds."""
    import torch

    source = make_model(tmp_path / "m", "Qwen3Moe", moe_intermediate_size=96)
    artifact = tmp_path / "a"
    options = ("--activations", 4, "--exclude", "*self_attn*", "--exclude", "lm_head")
    assert run("quantize", source, "--format", "mxfp4", "-o", artifact, *options).code == 0
    restored = tmp_path / "r"
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    found = evaluate(artifact, source)
    models, multiply = (load(source), load(restored)), torch.nn.functional.linear
    of_experts = {
        (192, 64),  # gate and up of an expert
        (64, 96),
    }
    is_artifact = False

    def rounding(x: Any, weight: Any, bias: Any = None) -> Any:
        if is_artifact and tuple(weight.shape) in of_experts:
            x = rounded_by_compressed_tensors("mxfp4", x, 1.0)
        return multiply(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", rounding)
    ours = models[0](input_ids=ids_of())
    is_artifact = True
    theirs = models[1](input_ids=ids_of())
    judged = mean_kl(lambda input_ids: ours, lambda input_ids: theirs)
    assert found["kl"]["mean"] == pytest.approx(judged, rel=1e-3)


def through_fp8(x: Any, multiplier: float) -> Any:
    import ml_dtypes

    return (x / multiplier).astype(ml_dtypes.float8_e4m3fn).astype("float32") * multiplier


def through_nvfp4(x: Any, multiplier: float) -> Any:
    """As vLLM's kernel stores it: a block scale for 16 values along a head, under the stored
    multiplier.
    """
    import ml_dtypes
    import numpy as np

    blocks = x.reshape(*x.shape[:-1], -1, 16)
    wanted = np.abs(blocks).max(-1, keepdims=True) / 6 / multiplier
    steps = wanted.clip(max=448).astype(ml_dtypes.float8_e4m3fn).astype("float32") * multiplier
    codes = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps != 0)
    made = codes.astype(ml_dtypes.float4_e2m1fn).astype("float32") * steps
    return made.reshape(x.shape).astype("float32")


CACHES = [
    ("fp8", "compressed-tensors", None, through_fp8),
    ("nvfp4", "compressed-tensors", 2688, through_nvfp4),
    ("nvfp4", "modelopt", 448, through_nvfp4),
]


@pytest.mark.parametrize(("cache", "dialect", "divisor", "through"), CACHES)
def test_keys_and_values_go_through_a_cache(
    cache: str,
    dialect: str,
    divisor: float | None,
    through: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' own attention, whose keys and values the test rounds by ml_dtypes."""
    import numpy as np
    import torch
    from transformers.models.llama import modeling_llama

    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    options = ["--kv-cache", cache, "--include", "*", "--dialect", dialect]
    scales = {"k": np.float32(1), "v": np.float32(1)}
    if divisor:
        amaxes = {"k": np.float32(11.3), "v": np.float32(2.7)}
        names = [f"model.layers.{number}.self_attn" for number in range(SIZES["num_hidden_layers"])]
        seen = {f"{name}.{which}_amax": amaxes[which] for name in names for which in "kv"}
        file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), seen)
        options += ["--calibration", str(file)]
        scales = {which: amax / np.float32(divisor) for which, amax in amaxes.items()}
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact, *options).code == 0
    restored = tmp_path / "r"
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    found = evaluate(artifact, source)
    assert found["kv_cache"] == cache
    whole, other = load(source), load(restored)
    ours, attend = whole(input_ids=ids_of()), modeling_llama.eager_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        key, value = (
            torch.from_numpy(through(x.detach().numpy(), scales[which]))
            for x, which in ((key, "k"), (value, "v"))
        )
        return attend(module, query, key, value, *rest, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
    theirs = other(input_ids=ids_of())
    judged = mean_kl(lambda input_ids: ours, lambda input_ids: theirs)
    assert found["kl"]["mean"] == pytest.approx(judged, rel=1e-4)
    without = evaluate(restored, source)["kl"]["mean"]
    assert abs(without - judged) > 1e-3 * judged


def test_a_cache_of_integers_is_told_and_not_computed_with(tmp_path: Path) -> None:
    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact).code == 0
    (artifact / "quantization_config.json").unlink()
    shutil.rmtree(artifact / ".fp4convert")  # whose plan says what it is, too
    config = json.loads((artifact / "config.json").read_text())
    cache = {"num_bits": 8, "type": "int", "strategy": "tensor"}
    config["quantization_config"]["kv_cache_scheme"] = cache
    (artifact / "config.json").write_text(json.dumps(config))
    assert evaluate(artifact, source)["kv_cache"] is None
    told = evaluated(artifact, source).err
    assert "a KV cache in int8 is not computed with" in told


def with_small_inputs(source: Path, factor: float) -> Path:
    """The same function, where every linear layer is given inputs times a power of two."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    smaller = ("input_layernorm", "post_attention_layernorm")
    larger = ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj")
    for name in tensors:
        leaf = name.split(".")[-2]
        if leaf in smaller:
            tensors[name] = tensors[name] * factor
        elif leaf in larger:
            tensors[name] = tensors[name] / factor
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_small_inputs_are_destroyed_by_1_alone_which_is_warned_of(tmp_path: Path) -> None:
    """As small inputs as become 0 under a scale of 1; scales of norms and weights and calibrated
    ones cost what they always do.
    """
    source = with_small_inputs(make_model(tmp_path / "m", "Llama"), 2.0**-9)
    text, file = tmp_path / "text.txt", tmp_path / "c.safetensors"
    text.write_text(TEXT)
    feed = ("--text", text, "--sequence-length", LENGTH)
    assert run("calibrate", source, "-o", file, *feed).code == 0
    ways = {"bounded": (), "measured": ("--calibration", file), "unmeasured": ("--input-scale", 1)}
    ways["number"] = ("--calibration", file, "--input-scale", 1)
    warnings, kl = {}, {}
    for way, options in ways.items():
        words = ("--format", "nvfp4", "--activations", 4, "--scale-rule", "mse", *options)
        words += ("-o", tmp_path / way)
        made = run("quantize", source, *words, "--json")
        warnings[way] = [one for one in made.json["warnings"] if "input scale" in one]
        kl[way] = evaluate(tmp_path / way, source)["kl"]["mean"]
    assert kl["unmeasured"] == kl["number"] > 8 * kl["measured"]
    assert kl["bounded"] < 1.1 * kl["measured"]
    assert warnings["measured"] == warnings["bounded"] == []
    (unmeasured,), (number,) = warnings["unmeasured"], warnings["number"]
    assert "the input scale of 21 modules in four bits, the first model.layers.0." in unmeasured
    assert "input scales of 21 modules are larger than" in number
    assert "that of model.layers." in number


def test_nothing_passes_without_a_gate(tmp_path: Path) -> None:
    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact).code == 0
    page = tmp_path / "page.html"
    bare = evaluated(artifact, source, "--report", page)
    assert (bare.code, "passed" in bare.out) == (0, False)
    assert bare.out.rstrip().endswith("--max-ppl-ratio, --baseline)")
    assert evaluate(artifact, source)["passed"] is None
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert data
    verdict = json.loads(data[1])["verdict"]
    assert verdict["is_good"] is None
    assert verdict["words"].startswith("KL ")
    assert "no gate was set" in verdict["words"]
    gated = evaluated(artifact, source, "--max-kl", 100)
    assert (gated.code, gated.out.rstrip().endswith("\npassed")) == (0, True)
    assert evaluated(artifact, source, "--max-kl", 0).code == 6
