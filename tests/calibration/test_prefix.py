"""Corrections of targets beside an own formula, on inputs that transformers computes; what a
calibration rounds to beside what quantize writes; and what corrections are refused for.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chained_families import MORE
from checkpoints import run
from family import build
from numpy.typing import NDArray
from peft_models import ATTENTION, MLP, merge_by_peft, write_adapter
from safetensors.torch import load_file
from tiny_chains import LENGTH, TEXT, calibrate, make_model, tokens_of, write_tokenizer
from torch_formulas import mx_rounded, mxfp4_weight, nvfp4_weight

from fp4convert.calibration import run as calibration_run
from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.conversion import rounding_goal

pytestmark = pytest.mark.engine
Float64s = NDArray[np.float64]
SHARING = {"q_proj": "q_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
SHARE = 0.05  # of H's mean diagonal
FOR_NVFP4 = ("--for-method", "gptq", "--format", "nvfp4")


def quantized(source: Path, out: Path, file: Path, *options: object) -> Any:
    """The outcome of rounding with a calibration."""
    words = ("--method", "gptq", "--calibration", file, *options, "--json")
    return run("quantize", source, "-o", out, *words)


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """The values of linear layers in an artifact, by the formulas of other packages."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != "weight_packed":
            continue
        packed, stored = tensors[name], tensors[f"{module}.weight_scale"]
        divisor = tensors.get(f"{module}.weight_global_scale")
        if divisor is None:
            found[module] = mxfp4_weight(packed, stored)
        else:
            found[module] = nvfp4_weight(packed, stored, 1 / divisor)
    return found


def rounded_mx(x: Float64s) -> Float64s:
    return np.asarray(mx_rounded(torch.from_numpy(x)).numpy())


class Inputs:
    """What a whole model of transformers gives its linear layers and norms, in float64."""

    def __init__(self, model: Any, is_rounded: bool) -> None:
        self.seen: dict[str, Float64s] = {}
        for name, module in model.named_modules():
            if name.endswith(("_proj", "norm")):
                self.hook(name, module, is_rounded and name.endswith("_proj"))
        ids = torch.tensor(tokens_of(TEXT)).reshape(-1, LENGTH)
        with torch.no_grad():
            model(input_ids=ids)

    def hook(self, name: str, module: Any, is_rounded: bool) -> None:
        def look(_: Any, args: Any) -> Any:
            x = args[0].reshape(-1, args[0].shape[-1]).double().numpy()
            self.seen[name] = x = rounded_mx(x) if is_rounded else x
            return (torch.tensor(x, dtype=torch.float32).reshape(args[0].shape),)

        module.register_forward_pre_hook(look)


def expected_target(
    module: str, w: Float64s, streams: tuple[Mapping[str, Float64s], ...], width: int
) -> tuple[Float64s, Float64s]:
    """W* and H of a linear layer: (W C + R + lambda W) (H + lambda)^-1.

    width  of the blocks; 0: whole matrices, and with R for o and down
    """
    x, given = (stream[module] for stream in streams)
    c, h = x.T @ given / len(x), given.T @ given / len(x)
    r = np.zeros((len(w), len(c)))
    layer, _, leaf = module.replace(".self_attn.", ".").replace(".mlp.", ".").rpartition(".")
    norm = {"o_proj": "input_layernorm", "down_proj": "post_attention_layernorm"}.get(leaf)
    if width:
        mask = np.kron(np.eye(-(-len(c) // width)), np.ones((width, width)))[: len(c), : len(c)]
        c, h = c * mask, h * mask
    elif norm:
        before, after = (stream[f"{layer}.{norm}"] for stream in streams)
        r = (before - after).T @ given / len(x)
    damping = SHARE * np.diag(h).mean() * np.eye(len(c))
    return np.linalg.solve(h + damping, (w @ c + r + w @ damping).T).T, h


@pytest.mark.parametrize(
    "case",
    [
        ("nvfp4", "full", 16, True, False),
        ("nvfp4", "full", 16, True, True),
        ("mxfp4", "full", 16, True, False),
        ("nvfp4", "block:32", 16, True, False),
        ("mxfp4", "full", 4, True, False),
        ("mxfp4", "full", 4, False, False),
        ("mxfp4", "block:32", 4, False, False),
    ],
)
def test_targets_are_those_of_the_formula(tmp_path, llama, words, case):
    """The artifact, run by transformers, gives the prefix's inputs: of each linear layer they
    depend on those before it alone. With an adapter the original is the model that PEFT merges.
    """
    from transformers import AutoModelForCausalLM

    fmt, gram, activations, is_sequential, has_adapter = case
    file, out, merged = tmp_path / "s.safetensors", tmp_path / "out", llama
    options = ("--format", fmt, "--activations", activations)
    if has_adapter:
        config = {"r": 4, "target_modules": [*ATTENTION, *MLP]}
        options = (*options, "--lora", write_adapter(llama, tmp_path / "adapter", config))
        merged = merge_by_peft(llama, tmp_path / "adapter", tmp_path / "merged")
    way = ("--for-method", "gptq") if is_sequential else ()
    made = calibrate(llama, file, "--text", words, "--gram", gram, *options, *way)
    assert made.code == 0, made.err
    done = quantized(llama, out, file, *options)
    assert done.code == 0, done.err
    models = [AutoModelForCausalLM.from_pretrained(merged).eval() for _ in range(2)]
    original = {name: x.double().numpy() for name, x in models[0].state_dict().items()}
    if is_sequential:
        state = {f"{module}.weight": x.float() for module, x in values_of(out).items()}
        assert not models[1].load_state_dict(state, strict=False).unexpected_keys
    streams = tuple(
        Inputs(model, number == 1 and activations == 4).seen for number, model in enumerate(models)
    )
    if not is_sequential:
        streams = (
            streams[0],
            {
                name: rounded_mx(x) if name.endswith("_proj") else x
                for name, x in streams[0].items()
            },
        )
    blend = 0.5 if activations == 4 else 1.0
    arrays, moved = load_file(file), 0
    for module in values_of(out):
        w = original[f"{module}.weight"]
        width = int(gram.partition(":")[2] or 0)
        target, h = expected_target(module, w, streams, width)
        holder = open_calibration(file).holder(module)
        blocks = arrays[f"{holder}.input_gram"].double().numpy()
        change = arrays.get(f"{module}.target_change")
        if change is None:
            parts = arrays[f"{holder}.input_correction"].double()
            whole = torch.block_diag(*parts)[: w.shape[1], : w.shape[1]]
            change = torch.from_numpy(w) @ whole
        stored, wanted = change.double().numpy(), blend * (target - w)
        diagonal = np.diagonal(blocks, 0, 1, 2).reshape(-1)[: len(h)]
        np.testing.assert_allclose(diagonal, np.diag(h), 2e-3)
        np.testing.assert_allclose(stored, wanted, atol=0.01 * np.abs(wanted).max() + 1e-6)
        moved += bool(np.abs(wanted).max() > 1e-3)
        group = [m for m in values_of(out) if open_calibration(file).holder(m) == holder]
        largest = max(np.abs(original[f"{m}.weight"]).max() for m in group)
        assert 0.5 * largest < float(arrays[f"{module}.target_amax"]) < 2 * largest
    assert moved >= 18


def test_the_residual_stream_is_made_up_for_beside_whole_grams_alone(tmp_path, llama, words):
    """With blocks along the diagonal it makes sixteen times the loss."""
    for gram, is_there in (("full", True), ("block:64", False)):
        file = tmp_path / "s.safetensors"
        made = calibrate(llama, file, "--text", words, "--gram", gram, *FOR_NVFP4, "--force")
        assert made.code == 0, made.err
        changes = {n.split(".")[-2] for n in load_file(file) if n.endswith(".target_change")}
        assert changes == ({"o_proj", "down_proj"} if is_there else set())


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "Phi3", "Gemma3"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_quantize_rounds_as_the_calibration_did(tmp_path, words, monkeypatch, name, fmt):
    source, file, out = make_model(tmp_path / "m", name), tmp_path / "s.safetensors", tmp_path / "o"
    inside: dict[str, Any] = {}
    values = rounding_goal._round_weights

    def kept(*arguments):
        made = values(*arguments)
        inside.update(made)
        return made

    monkeypatch.setattr(rounding_goal, "_round_weights", kept)
    made = calibrate(source, file, "--text", words, "--for-method", "gptq", "--format", fmt)
    assert made.code == 0, made.err
    assert quantized(source, out, file, "--format", fmt).code == 0
    written = values_of(out)
    assert len(inside) >= 12
    for module, x in inside.items():
        np.testing.assert_allclose(written[module].numpy(), x, rtol=2e-7)
    if name == "Qwen3Moe":  # experts have the statistics of today
        plain = tmp_path / "plain.safetensors"
        assert calibrate(source, plain, "--text", words, "--gram", "full").code == 0
        ours, theirs = load_file(file), load_file(plain)
        experts = [key for key in theirs if "layers.0.mlp.experts" in key and "gram" in key]
        assert experts
        assert not any("experts" in key for key in ours if "target" in key or "correction" in key)


class Death(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, words, monkeypatch, name):
    source, clean, output = make_model(tmp_path / "m", name), tmp_path / "c.st", tmp_path / "k.st"
    assert calibrate(source, clean, "--text", words, *FOR_NVFP4).code == 0
    made, count = calibration_run.write_part, iter(range(9))

    def fail(*arguments):
        if next(count) == 1:
            raise Death
        return made(*arguments)

    monkeypatch.setattr(calibration_run, "write_part", fail)
    with pytest.raises(Death):
        calibrate(source, output, "--text", words, *FOR_NVFP4)
    monkeypatch.setattr(calibration_run, "write_part", made)
    again = calibrate(source, output, "--text", words, *FOR_NVFP4)
    assert again.code == 0, again.err
    assert "going on" in again.err
    assert output.read_bytes() == clean.read_bytes()


@pytest.mark.parametrize("family", [each for each in MORE if each.name in ("albert", "zamba2")])
def test_a_layer_that_runs_again_is_corrected_by_its_first_run(tmp_path, words, family):
    source, file = build(family, tmp_path / "m"), tmp_path / "s.safetensors"
    write_tokenizer(source)
    made = calibrate(source, file, "--text", words, *FOR_NVFP4)
    assert made.code == 0, made.err
    assert any(name.endswith(".target_amax") for name in load_file(file))
    excluded = ("--exclude", "*adapter_list*") if family.name == "zamba2" else ()  # no text there
    assert quantized(source, tmp_path / "out", file, "--format", "nvfp4", *excluded).code == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "mxfp4", "--method", "gptq"),
        ("--format", "nvfp4", "--method", "gptq", "--activations", 4),
        ("--format", "nvfp4", "--method", "gptq", "--scale-rule", "mse"),
        ("--format", "nvfp4"),
    ],
)
def test_other_ways_to_round_are_refused_with_the_line_that_helps(tmp_path, llama, words, options):
    file, out = tmp_path / "s.safetensors", tmp_path / "out"
    assert calibrate(llama, file, "--text", words, *FOR_NVFP4).code == 0
    line = ("quantize", llama, "-o", out, "--calibration", file, *options, "--json")
    refused = run(*line)
    error = refused.json["error"]
    assert (refused.code, error["code"], out.exists()) == (2, "calibration-targets", False)
    given = {"SOURCE": str(llama), "FILE": str(file), "TEXT": str(words)}
    typed = shlex.split(error["next"].removeprefix("Make it: "))
    assert run(*[given.get(word, word) for word in typed[1:]], "--force").code == 0
    done = run(*line)
    assert done.code == 0, done.err


def test_a_module_that_only_the_calibration_rounded_is_warned_of(tmp_path, llama, words):
    file, out = tmp_path / "s.safetensors", tmp_path / "out"
    assert calibrate(llama, file, "--text", words, *FOR_NVFP4).code == 0
    done = quantized(llama, out, file, "--format", "nvfp4", "--exclude", "*.0.mlp.up_proj")
    (warning,) = [words for words in done.json["warnings"] if "was rounded with stay" in words]
    assert (done.code, warning.split()[0]) == (0, "1")
    assert "model.layers.0.mlp.up_proj" in warning


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--for-method", "gptq"), "usage"),
        (("--for-method", "gptq", "--format", "nvfp4", "--gram", "diag"), "no-gram"),
        (("--format", "nvfp4"), "idle-option"),
        (("--activations", 4, "--format", "nvfp4", "--scale-rule", "mse"), "idle-option"),
        (("--for-method", "gptq", "--format", "mxfp4", "--scale-rule", "amax"), None),
    ],
)
def test_options_that_do_not_go_together_are_refused_first(tmp_path, llama, words, options, code):
    refused = calibrate(llama, tmp_path / "s.safetensors", "--text", words, *options)
    assert (refused.code, refused.json["error"]["code"]) == (2, code or "unknown-scale-rule")
    assert not list(tmp_path.glob("*s.safetensors*"))


def test_the_room_for_two_streams_is_known_beforehand(tmp_path, llama, words, monkeypatch):
    """Two Grams a linear layer, hidden states of both streams, and the inputs of a layer."""
    plain = calibrate(llama, tmp_path / "p.safetensors", "--text", words, "--gram", "full")
    tokens, inputs = 192, 3 * 64 + 96
    grams = 4 * (3 * (3 * 64**2 + 96**2) + 64**2)
    small = 12 * (3 * inputs + 64)
    needed = 2 * (2 * grams + small) + 2 * 12 * 64 * tokens + 4 * inputs * tokens
    monkeypatch.setattr("fp4convert.calibration.workdir.free_nbytes", lambda place: needed - 1)
    error = calibrate(llama, tmp_path / "c.safetensors", "--text", words, *FOR_NVFP4)
    assert (plain.code, error.code) == (0, 5)
    assert f"needs up to {needed:,} bytes" in error.json["error"]["message"]
