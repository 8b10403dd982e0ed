"""The measuring pass: losses beside NumPy and torch in float64; what is kept, by whom, and when it
is measured again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import (
    FIRST,
    LAYER,
    bf16,
    done,
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


def restored(artifact: Path) -> dict[str, np.ndarray]:
    """The values that `dequantize` makes of an artifact."""
    folder = artifact.with_name(f"{artifact.name}-values")
    done("dequantize", artifact, "-o", folder, "--dtype", "fp32", "-q")
    return {name: values_of(stored) for name, stored in read_folder(folder).items()}


def assert_losses(measured: Path, source: Path, artifact: Path, moments: dict[str, Any]) -> None:
    """Losses of all modules are those of an artifact's values, in float64.

    moments  mean squares of the inputs by module; of others 1
    """
    original, rounded, found = read_folder(source), restored(artifact), losses(measured)
    assert len(found) == 14
    for module, each in found.items():
        w, v = values_of(original[f"{module}.weight"]), rounded[f"{module}.weight"]
        squares = moments.get(module, np.ones(w.shape[1]))
        loss = (((w - v) ** 2) @ squares).sum() / ((w**2) @ squares).sum()
        assert each["nvfp4"] == pytest.approx(loss, rel=1e-5 if moments else 1e-6)


def test_losses_are_those_of_the_artifacts_values(source, tmp_path):
    """Beside what `dequantize` makes of an artifact, by NumPy in float64."""
    quantize(source, tmp_path / "fitted", "--target-bits", 6)
    quantize(source, tmp_path / "four")
    assert_losses(tmp_path / "fitted", source, tmp_path / "four", {})


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
    assert_losses(tmp_path / "fitted", source, tmp_path / "four", {})
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


@pytest.mark.parametrize(
    ("rule", "is_calibrated"),
    [(None, True), ("mse", False), ("four-over-six", False), ("importance", True)],
)
def test_losses_follow_the_rule_and_the_moments_of_the_run(source, tmp_path, rule, is_calibrated):
    draw = np.random.default_rng(9)
    inputs = {
        name.removesuffix(".weight"): draw.standard_normal((32, columns))
        * np.geomspace(0.1, 9, columns)
        for name, (_, (*_, columns), _) in sorted(read_folder(source).items())
        if "proj" in name
    }
    found = [statistics_of(module, x).items() for module, x in inputs.items()]
    statistics = {name: array for one in found for name, array in one}
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), statistics)
    options = ("--scale-rule", rule) if rule else ()
    given = ("--calibration", file) if is_calibrated else ()
    quantize(source, tmp_path / "out", "--target-bits", 6, *options, *given)
    quantize(source, tmp_path / "four", *options, *given)
    moments = {module: (x**2).mean(0) for module, x in inputs.items()} if is_calibrated else {}
    assert_losses(tmp_path / "out", source, tmp_path / "four", moments)


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
    done("quantize", source, "--format", "nvfp4", "--target-bits", 6, "-o", out, "-q", "--force")
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
    words = ("--format", "nvfp4", "--target-bits", 6, "-o", tmp_path / "join", "--join", "-q")
    together = [start("quantize", source, *words) for _ in range(3)]
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
    command = ("--format", "nvfp4", "-o", tmp_path / "out", "--target-bits", 6, "--json")
    outcome = run("quantize", source, *command)
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
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "four")
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
