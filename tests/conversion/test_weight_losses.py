"""The measuring pass: losses beside NumPy and torch in float64; what is kept, by whom, and when it
is measured again.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import (
    FIRST,
    LAYER,
    bf16,
    read_folder,
    run,
    start,
    values_of,
    weight,
    write_checkpoint,
    write_single,
)
from targets import MEASURED, digits, losses, quantize, shards

from fp4convert.conversion.mixed_precision import Goal, fit
from fp4convert.conversion.ray_workers import work_on_node
from fp4convert.conversion.request import take_apart
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source


@pytest.fixture
def source(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "source", shards())


def test_losses_are_those_of_the_artifacts_values(source, tmp_path):
    """Beside what `dequantize` makes of an artifact, by NumPy in float64."""
    quantize(source, tmp_path / "fitted", "--target-bits", 6)
    quantize(source, tmp_path / "four")
    assert (
        run(
            "dequantize", tmp_path / "four", "-o", tmp_path / "values", "--dtype", "fp32", "-q"
        ).code
        == 0
    )
    original, rounded = read_folder(source), read_folder(tmp_path / "values")
    found = losses(tmp_path / "fitted")
    assert len(found) == 14
    for module, each in found.items():
        w, v = values_of(original[f"{module}.weight"]), values_of(rounded[f"{module}.weight"])
        assert each["nvfp4"] == pytest.approx(((w - v) ** 2).sum() / (w**2).sum(), rel=1e-6)


def test_losses_are_those_under_given_global_scales(source, tmp_path):
    """Beside what `dequantize` makes of an artifact with these scales, by NumPy in float64."""
    quantize(source, tmp_path / "first", "--dialect", "modelopt")
    scales = {
        name.removesuffix(".weight_scale_2"): float(np.frombuffer(stored[2], np.float32)[0]) / 4
        for name, stored in read_folder(tmp_path / "first").items()
        if name.endswith(".weight_scale_2")
    }
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    given = ("--dialect", "modelopt", "--global-scale", tmp_path / "scales.json")
    quantize(source, tmp_path / "fitted", "--target-bits", 6, *given)
    quantize(source, tmp_path / "four", *given)
    words = ("-o", tmp_path / "values", "--dtype", "fp32", "-q")
    assert run("dequantize", tmp_path / "four", *words).code == 0
    original, rounded = read_folder(source), read_folder(tmp_path / "values")
    found = losses(tmp_path / "fitted")
    assert len(found) == 14
    for module, each in found.items():
        w, v = values_of(original[f"{module}.weight"]), values_of(rounded[f"{module}.weight"])
        assert each["nvfp4"] == pytest.approx(((w - v) ** 2).sum() / (w**2).sum(), rel=1e-6)
    fitted = read_folder(tmp_path / "fitted")
    made = {module for module in scales if f"{module}.weight_scale_2" in fitted}
    assert 0 < len(made) < 14
    for module in made:
        stored = float(np.frombuffer(fitted[f"{module}.weight_scale_2"][2], np.float32)[0])
        assert stored == scales[module]
    # A file that has those of the four-bit modules alone does not say what the others would lose.
    few = ("--global-scale", tmp_path / "fitted", "--target-bits", 6)
    words = ("--format", "nvfp4", "--dialect", "modelopt", "-o", tmp_path / "again", "--json")
    refused = run("quantize", source, *words, *few)
    assert (refused.code, refused.json["error"]["code"]) == (2, "global-scale-modules"), refused
    assert not (tmp_path / "again").exists()


@pytest.mark.engine
@pytest.mark.parametrize(("dialect", "axis"), [("compressed-tensors", 1), ("modelopt", None)])
def test_losses_of_fp8_are_torchs(source, tmp_path, dialect, axis):
    import torch

    quantize(source, tmp_path / "out", "--dialect", dialect, "--target-bits", 7)
    original, found = read_folder(source), losses(tmp_path / "out")
    for module, each in found.items():
        w = torch.tensor(values_of(original[f"{module}.weight"]), dtype=torch.float32)
        step = (w.abs().amax(1, keepdim=True) if axis == 1 else w.abs().max()) / 448
        v = (w / step).to(torch.float8_e4m3fn).float() * step
        assert each["fp8"] == pytest.approx(
            ((w - v).double().norm() / w.double().norm()).item() ** 2, rel=1e-5
        )


def test_with_a_calibration_losses_are_weighted_by_the_moments(source, tmp_path):
    draw = np.random.default_rng(9)
    original = {
        name.removesuffix(".weight"): values_of(t)
        for name, t in read_folder(source).items()
        if "proj" in name
    }
    inputs = {
        module: draw.standard_normal((32, w.shape[1])) * np.geomspace(0.1, 9, w.shape[1])
        for module, w in original.items()
    }
    statistics = {
        name: array
        for module, x in inputs.items()
        for name, array in statistics_of(module, x).items()
    }
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), statistics)
    quantize(source, tmp_path / "out", "--target-bits", 6, "--calibration", file)
    quantize(source, tmp_path / "four")
    assert (
        run(
            "dequantize", tmp_path / "four", "-o", tmp_path / "values", "--dtype", "fp32", "-q"
        ).code
        == 0
    )
    rounded = read_folder(tmp_path / "values")
    for module, each in losses(tmp_path / "out").items():
        w, v, moments = (
            original[module],
            values_of(rounded[f"{module}.weight"]),
            (inputs[module] ** 2).mean(0),
        )
        assert each["nvfp4"] == pytest.approx(
            (((w - v) ** 2) @ moments).sum() / ((w**2) @ moments).sum(), rel=1e-5
        )


@pytest.mark.parametrize("rule", ["mse", "four-over-six", "importance"])
def test_losses_follow_the_rule_of_the_run(source, tmp_path, rule):
    original = {
        name.removesuffix(".weight"): values_of(t)
        for name, t in read_folder(source).items()
        if "proj" in name
    }
    draw = np.random.default_rng(10)
    inputs = {
        module: draw.standard_normal((32, w.shape[1])) * np.geomspace(0.1, 9, w.shape[1])
        for module, w in original.items()
    }
    statistics = {
        name: array
        for module, x in inputs.items()
        for name, array in statistics_of(module, x).items()
    }
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), statistics)
    options = ("--scale-rule", rule, *(("--calibration", file) if rule == "importance" else ()))
    quantize(source, tmp_path / "out", "--target-bits", 6, *options)
    quantize(source, tmp_path / "four", *options)
    assert (
        run(
            "dequantize", tmp_path / "four", "-o", tmp_path / "values", "--dtype", "fp32", "-q"
        ).code
        == 0
    )
    rounded = read_folder(tmp_path / "values")
    for module, each in losses(tmp_path / "out").items():
        w, v = original[module], values_of(rounded[f"{module}.weight"])
        moments = (inputs[module] ** 2).mean(0) if rule == "importance" else np.ones(w.shape[1])
        assert each["nvfp4"] == pytest.approx(
            (((w - v) ** 2) @ moments).sum() / ((w**2) @ moments).sum(), rel=1e-5
        )


def test_a_run_again_measures_nothing_and_a_changed_source_again(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = quantize(source, out, "--target-bits", 6)
    before = {path.name: path.stat().st_mtime_ns for path in (out / MEASURED).glob("*.json")}
    assert len(before) == 2
    monkeypatch.setattr(
        "fp4convert.conversion.weight_losses._losses_of", None
    )  # whoever measures fails
    assert quantize(source, out, "--target-bits", 6)["digest"] == first["digest"]
    monkeypatch.undo()
    (victim,) = [path for path in (out / MEASURED).glob("*.json") if path.name == min(before)]
    victim.write_text("damaged")
    assert quantize(source, out, "--target-bits", 6)["digest"] == first["digest"]
    assert json.loads(victim.read_text())
    (source / FIRST).touch()
    assert (
        run(
            "quantize", source, "--format", "nvfp4", "--target-bits", 6, "-o", out, "-q", "--force"
        ).code
        == 0
    )
    assert len(list((out / MEASURED).glob("*.json"))) == 4  # every shard: scale groups lie in both


def test_the_choice_does_not_depend_on_who_measures(source, tmp_path):
    expected = quantize(source, tmp_path / "one", "--target-bits", 6, "--workers", 1)["digest"]
    assert (
        quantize(source, tmp_path / "four", "--target-bits", 6, "--workers", 4)["digest"]
        == expected
    )
    for part in range(2):
        share = ("--shard-index", part, "--num-shards", 2)
        quantize(source, tmp_path / "parts", "--target-bits", 6, *share)
    assert run("merge", tmp_path / "parts", "--json").json["digest"] == expected
    together = [
        start(
            "quantize",
            source,
            "--format",
            "nvfp4",
            "--target-bits",
            6,
            "-o",
            tmp_path / "join",
            "--join",
            "-q",
        )
        for _ in range(3)
    ]
    assert [process.wait(120) for process in together] == [0, 0, 0]
    assert digits(tmp_path / "join") == digits(tmp_path / "one")


def test_claims_of_a_killed_process_do_not_stay(source, tmp_path):
    out = tmp_path / "q"
    claims = out / MEASURED / "claims"
    dies = f"""
import os
from pathlib import Path
from fp4convert.execution.leases import Leases
leases = Leases(Path({str(claims)!r}))
leases.__enter__()
os._exit(0)
"""
    (out / ".fp4convert").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", dies], check=True)
    assert list(claims.iterdir())
    quantize(source, out, "--target-bits", 6)
    assert list(claims.iterdir()) == []


def test_workers_of_a_cluster_are_sent_the_choice_and_measure_nothing(
    source, tmp_path, monkeypatch
):
    """What Ray runs on every node; the API by which it is made."""
    options = QuantizeOptions(source, format="nvfp4", output=tmp_path / "sent", target_bits=6)
    request = take_apart(open_source(str(source)), options)
    found = fit(request, Goal(bits=6), tmp_path / "sent", Settings("cpu"), False)
    monkeypatch.setattr("fp4convert.conversion.weight_losses._losses_of", None)
    result = work_on_node(options, found.rules)
    monkeypatch.undo()
    assert result.digest == quantize(source, tmp_path / "own", "--target-bits", 6)["digest"]


def test_weights_that_are_nan_are_all_named(tmp_path):
    data = bytearray(bf16(32, 64))
    data[100:102] = (0x7FC0).to_bytes(2, "little")
    bad = ("BF16", (32, 64), bytes(data))
    tensors = {
        f"{LAYER}.mlp.{leaf}.weight": bad if "proj" in leaf else weight(1)
        for leaf in ("down_proj", "o_proj", "x", "y")
    }
    source = write_single(tmp_path / "m", tensors)
    outcome = run(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "--target-bits",
        6,
        "--json",
    )
    assert outcome.code == 2
    assert outcome.json["error"]["next"].count("--exclude") == 2
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_sample_of_rows_tells_what_the_whole_matrix_loses(tmp_path):
    """Rows of two kinds in turn, a hundred times apart: 1 MiB of 8 beside torch on all of it."""
    import torch

    draw = np.random.default_rng(3)
    values = (
        draw.standard_t(4, (4096, 1024)) * np.where(np.arange(4096) % 97 < 48, 1.0, 0.01)[:, None]
    )
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensor = ("BF16", values.shape, bits.tobytes())
    source = write_single(tmp_path / "m", {f"{LAYER}.mlp.down_proj.weight": tensor})
    quantize(source, tmp_path / "q", "--target-bits", 6)
    (found,) = losses(tmp_path / "q").values()
    w = torch.from_numpy(values_of(tensor).copy())
    largest = w.abs().amax(1, keepdim=True) / 448
    error = (w / largest).to(torch.float8_e4m3fn).float() * largest - w
    assert found["fp8"] == pytest.approx(float((error**2).sum() / (w**2).sum()), rel=0.03)
    assert run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "four").code == 0
    document = run("verify", tmp_path / "four", "--source", source, "--json").json
    assert found["nvfp4"] == pytest.approx(document["summary"]["nmse"], rel=0.03)


def test_losses_under_another_group_are_measured_again(source, tmp_path):
    """Pairs of the same modules, as many, with other members: the global scales are others."""
    files = []
    for first, second in (("qk", "vo"), ("qv", "ko")):
        recipe = tmp_path / f"{first}.toml"
        rows = [[f"{letter}_proj" for letter in pair] for pair in (first, second)]
        recipe.write_text("".join(f"[[group]]\nmembers = {json.dumps(row)}\n" for row in rows))
        asked = ("--recipe", recipe, "--target-bits", 6, "--force")
        quantize(source, tmp_path / "out", *asked)
        files.append({path.name for path in (tmp_path / "out" / MEASURED).glob("*.json")})
    assert len(files[1] - files[0]) == len(files[0])
