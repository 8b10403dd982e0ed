"""Folds read back: verify and inspect take a right artifact for what it is, and find what folds do
not explain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import run, values_of, write_single
from folded_llama import LAYER, calibrated, changed, doubled, made, write_source
from folding_llama import LLAMA, TENSORS
from made_up_inputs import calibrate, inputs_of
from peft_models import make_llama

from fp4convert.calibration.methods.awq import AwqSearch


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=["smooth", "awq"])
def artifact(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """By awq, or by other factors under a record of smooth, which an earlier version had."""
    folder, random = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    out, statistics = folder / "out", calibrated(source, folder / "c.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "smooth":
            factors = {count: random.uniform(0.5, 2, count) for count in (64, 96)}
            patch.setattr(AwqSearch, "_search", lambda _, fold, __: factors[fold.outputs])
        made(source, out, "awq", statistics)
    path = out / "quantization_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": request.param}))
    return out


def test_verify_and_inspect_know_the_artifact_for_what_it_is(artifact, source, tmp_path):
    out = artifact
    report = run("verify", out, "--source", source, "--min-sqnr", "19", "--json")
    assert (report.code, report.faults) == (0, [])
    assert run("inspect", out, "--source", source, "--json").faults == []
    assert run("transcode", out, "-o", tmp_path / "there", "--dialect", "modelopt", "-q").code == 0
    report = run("verify", tmp_path / "there", "--source", source, "--json")
    assert (report.code, report.faults) == (0, [])


def test_columns_rounded_from_four_bits_are_not_held_against_the_original(
    artifact, source, tmp_path
):
    """With the four bits themselves they are."""
    again = tmp_path / "again"
    assert run("quantize", artifact, "--format", "mxfp4", "-o", again, "-q").code == 0
    report = run("verify", again, "--source", artifact, "--json")
    assert (report.code, report.faults) == (0, [])
    report = run("verify", again, "--source", source, "--json")
    assert (report.code, [one["code"] for one in report.faults]) == (0, ["other-source"])


@pytest.mark.parametrize("seed", [6, 10])
def test_rows_are_told_where_outliers_leave_little_of_them(seed, tmp_path):
    """A tenth of the inputs is 300 times the others: of what shares their blocks of MXFP4 much
    is rounded to zero.
    """
    source, inputs = make_llama(tmp_path / "m"), {}
    for module, x in inputs_of(source).items():
        is_large = np.random.default_rng(seed).random(x.shape[1]) < 0.1
        inputs[module] = (x * np.where(is_large, 300, 1)).astype(np.float32)
    file = calibrate(tmp_path / "c.safetensors", source, "full", inputs)
    words = ("--format", "mxfp4", "--method", "awq", "--calibration", file, "-o", tmp_path / "q")
    assert run("quantize", source, *words, "-q").code == 0
    report = run("verify", tmp_path / "q", "--source", source, "--json")
    assert (report.code, report.faults) == (0, [])


def thinned(kind: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors; rows of v_proj and up_proj are zero, tiny, or nearly empty."""
    chance, found = np.random.default_rng(0), dict(TENSORS)
    for name, tensor in TENSORS.items():
        if "v_proj" in name or "up_proj" in name:
            values = values_of(tensor).astype(np.float32)
            if kind == "zero":
                values[::3] = 0
            elif kind == "tiny":
                values[::2] *= 1e-6
            else:
                values *= chance.random(values.shape) < 0.05
            found[name] = (*tensor[:2], values.astype(ml_dtypes.bfloat16).tobytes())
    return found


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", ["zero", "tiny", "thin"])
def test_rows_of_which_little_is_there_are_told(kind, fmt, tmp_path):
    source = write_single(tmp_path / "m", thinned(kind), LLAMA)
    file = calibrated(source, tmp_path / "c.safetensors")
    words = ("--format", fmt, "--method", "awq", "--calibration", file, "-o", tmp_path / "q")
    assert run("quantize", source, *words, "-q").code == 0
    report = run("verify", tmp_path / "q", "--source", source, "--json")
    assert (report.code, report.faults) == (0, [])


def from_source(name: str):
    return lambda data: TENSORS[name][2]


def halved_row(data: bytes) -> bytes:
    """Block scales of 4 columns each: those of the third row one exponent lower."""
    scales = np.frombuffer(data, np.uint8).copy()
    scales[8:12] -= 8
    return scales.tobytes()


def damages() -> Iterator[tuple[str, object, str]]:
    """(tensor, what becomes of it, the module or tensor that is told)."""
    for norm, reader in (
        ("input_layernorm", "self_attn.q_proj"),
        ("post_attention_layernorm", "mlp.gate_proj"),
    ):
        name = f"{LAYER}.{norm}.weight"
        yield name, doubled(5), f"{LAYER}.{reader}"
        yield name, from_source(name), f"{LAYER}.{reader}"
        yield name, lambda data: bytes(len(data)), name
        yield name, lambda data: (np.frombuffer(data, "<u2") ^ 0x8000).tobytes(), name
    yield f"{LAYER}.self_attn.v_proj.weight_scale", halved_row, f"{LAYER}.self_attn.o_proj"
    yield f"{LAYER}.mlp.up_proj.weight_scale", halved_row, f"{LAYER}.mlp.down_proj"
    yield (
        f"{LAYER}.mlp.down_proj.weight_packed",
        lambda data: bytes([data[0] ^ 4]) + data[1:],
        f"{LAYER}.mlp.down_proj",
    )


@pytest.mark.parametrize("number", range(len(list(damages()))))
def test_verify_finds_what_folds_do_not_explain(number, artifact, source, tmp_path):
    out = artifact
    name, change, told = list(damages())[number]
    report = run(
        "verify", changed(out, tmp_path / "bad", name, change), "--source", source, "--json"
    )
    assert report.code == 6
    assert ("fold-differs", told) in {
        (finding["code"], finding["tensor"]) for finding in report.faults
    }


def test_verify_refuses_folds_that_the_source_does_not_have(artifact, source, tmp_path):
    out = artifact
    bad = changed(out, tmp_path / "bad", "nothing", None)
    record = json.loads((bad / "quantization_config.json").read_text())
    for words, change in (
        (
            "does not have",
            lambda folds: folds[0].update(modules=["model.layers.7.input_layernorm"]),
        ),
        ("do not fit", lambda folds: folds[1].update(heads={"repeats": 4, "width": 32})),
        ("an entry of folds is", lambda folds: folds[0].update(kind="sum")),
        ("an entry of folds is", lambda folds: folds.insert(0, "all of them")),
    ):
        folds = json.loads(json.dumps(record["folds"]))
        change(folds)
        (bad / "quantization_config.json").write_text(json.dumps({**record, "folds": folds}))
        outcome = run("verify", bad, "--source", source, "--json")
        assert outcome.code == 2
        assert words in outcome.json["error"]["message"]
        assert "\n" not in outcome.json["error"]["message"]
