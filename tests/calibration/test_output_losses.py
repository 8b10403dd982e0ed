"""calibrate --sensitivity, beside transformers' own forwards of whole models in which torch rounded
one part's weights to FP8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_chains import LENGTH, SAMPLES, TEXT, calibrate, make_model, tokens_of
from torch_formulas import mx_rounded

from fp4convert.calibration import output_losses
from fp4convert.calibration.calibration_file import open_calibration

pytestmark = pytest.mark.engine
ATTENTION = [f"self_attn.{leaf}_proj" for leaf in "qkv"]
PARTS = [  # model, layer, stored matrices of one part, the axis of their inputs
    ("Llama", 0, ATTENTION, -1),
    ("Llama", 2, ["mlp.down_proj"], -1),
    ("Gemma3", 1, ["mlp.gate_proj", "mlp.up_proj"], -1),
    ("Qwen3Moe", 1, ["mlp.experts"], -1),
    ("GptOss", 0, ["mlp.experts"], -2),
    ("Bert", 1, ["attention.self.query", "attention.self.key", "attention.self.value"], -1),
]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def in_fp8(w: Any, axis: int) -> Any:
    """One scale for each row of weights: amax / 448."""
    import torch

    w = w.float()
    step = w.abs().amax(axis, keepdim=True) / 448
    return (w / step).to(torch.float8_e4m3fn).float() * step


def judge(name: str, source: Path, stored: list[str], axis: int, to: Any = in_fp8) -> float:
    """KL of predictions; of an encoder the squared error of its hidden states.

    to  what becomes of weights; of inputs too, unless it is FP8
    """
    import torch
    import transformers

    kind = transformers.AutoModel if name == "Bert" else transformers.AutoModelForCausalLM
    ids, outputs = torch.tensor(tokens_of(TEXT)).reshape(SAMPLES, LENGTH), []
    ids = ids[:1] if name == "Bert" else ids  # an encoder gets a line, cut to that length
    for is_rounded in (False, True):
        model = kind.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        for path, parameter in model.eval().named_parameters():
            is_matrix = parameter.dim() > 1 and not path.endswith("bias")
            if is_rounded and is_matrix and any(f"{part}." in path for part in stored):
                parameter.data = to(parameter.data, axis)
        for path, module in model.named_modules():
            if is_rounded and to is not in_fp8 and any(path.endswith(part) for part in stored):
                module.register_forward_pre_hook(lambda _, args: (to(args[0], -1),))
        with torch.no_grad():
            made = model(input_ids=ids)
        outputs.append(made[0] if name == "Bert" else made.logits[:, :-1].log_softmax(-1))
    ours, theirs = (each.double() for each in outputs)
    if name == "Bert":
        return float((theirs - ours).square().sum() / ours.square().sum())
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def losses_in(file: Path, beginnings: list[str]) -> dict[str, float]:
    """Of modules with such names, together."""
    found = open_calibration(file)
    names = json.loads(found.notes["loss_formats"])
    arrays = [
        value
        for name, value in load_file(file).items()
        if name.endswith(".output_losses")
        and any(f"{name}.".startswith(f"{beginning}.") for beginning in beginnings)
    ]
    return dict(zip(names, np.sum(arrays, 0).tolist(), strict=True))


@pytest.mark.parametrize(("name", "layer", "leaves", "axis"), PARTS, ids=str)
@pytest.mark.sweep(3)
def test_a_part_alone_costs_what_it_does_in_the_whole_model(
    name: str, layer: int, leaves: list[str], axis: int, tmp_path: Path, words: Path
) -> None:
    source, file = make_model(tmp_path / "m", name), tmp_path / "c.safetensors"
    made = calibrate(source, file, "--text", words, "--sensitivity")
    assert made.code == 0, made.err
    above = "encoder.layer" if name == "Bert" else "model.layers"
    stored = [f"{above}.{layer}.{leaf}" for leaf in leaves]
    found = losses_in(file, stored)
    short = [part.removeprefix("model.") for part in stored]
    assert found["fp8"] == pytest.approx(judge(name, source, short, axis), rel=2e-3)
    assert found["fp8"] < min(found["nvfp4"], found["mxfp4"])
    assert open_calibration(file).loss_kind == ("output" if name == "Bert" else "kl")


def in_mxfp4(x: Any, axis: int) -> Any:
    return mx_rounded(x)


@pytest.mark.parametrize("leaves", [ATTENTION, ["mlp.down_proj"]], ids=str)
def test_inputs_are_rounded_too_where_activations_have_four_bits(
    leaves: list[str], tmp_path: Path, words: Path
) -> None:
    source, file = make_model(tmp_path / "m", "Llama"), tmp_path / "c.safetensors"
    for_four = ("--activations", 4, "--format", "mxfp4")
    made = calibrate(source, file, "--text", words, "--sensitivity", *for_four)
    assert made.code == 0, made.err
    stored = [f"model.layers.1.{leaf}" for leaf in leaves]
    expected = judge("Llama", source, stored, -1, in_mxfp4)
    assert losses_in(file, stored)["mxfp4"] == pytest.approx(expected, rel=2e-3)


class Death(BaseException):
    """Nothing catches it."""


def test_a_killed_run_goes_on_after_the_parts_that_were_measured(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of five runs: 12 parts in 4 formats are 10 rounds; the fourth is killed."""
    source, clean = make_model(tmp_path / "m", "Llama"), tmp_path / "clean.safetensors"
    assert calibrate(source, clean, "--text", words, "--sensitivity").code == 0
    monkeypatch.setattr(output_losses, "HIDDEN_NBYTES", 5 * 3 * 4 * 64 * LENGTH * SAMPLES)
    measure, began = output_losses._Runs.measure, []

    def counted(runs: Any) -> list[float]:
        began.append(len(runs.lanes))
        if len(began) == 4:
            raise Death
        return measure(runs)

    monkeypatch.setattr(output_losses._Runs, "measure", counted)
    output = tmp_path / "killed.safetensors"
    with pytest.raises(Death):
        calibrate(source, output, "--text", words, "--sensitivity")
    assert not output.exists()
    again = calibrate(source, output, "--text", words, "--sensitivity")
    assert again.code == 0, again.err
    assert began == [*[5] * 10, 3]
    before, after = (load_file(file) for file in (clean, output))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-12)


def test_of_long_text_some_is_taken_and_a_person_is_told(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_losses, "MOST_TOKENS", 2 * LENGTH)
    source, file = make_model(tmp_path / "m", "Llama"), tmp_path / "c.safetensors"
    made = calibrate(source, file, "--text", words, "--sensitivity")
    assert f"12 parts in 4 formats, a run of {2 * LENGTH} tokens for each" in made.err
    assert open_calibration(file).loss_tokens == 2 * LENGTH
    plain = tmp_path / "plain.safetensors"
    assert calibrate(source, plain, "--text", words).code == 0
    assert open_calibration(plain).loss_formats == ()
