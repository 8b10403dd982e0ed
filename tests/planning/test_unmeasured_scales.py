"""Input scales that nothing measured, and those that do not suit the inputs that were seen: what a
plan warns of. Expected figures are those of E4M3: 6 * 2**-6, 6 * 448, 2**-6 and 448.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import read_shard, run, unless_given, write_checkpoint, write_llama
from input_scales import (
    ALONE,
    AMAX,
    ATTENTION,
    ENDINGS,
    MLP,
    MODULES,
    calibrate,
    donor,
    eight_bit_recipe,
    input_scales,
    quantized,
    with_own_scale,
)

from fp4convert.storage.open import open_source


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


UNMEASURED = (
    "is 1, which no calibration or file gives; right for blocks whose largest input is from 0.094"
    " to 2688: smaller ones lose bits, below 0.0059 they become 0, and larger ones are clipped"
)


def warnings_of(source: Path, *options: object, dialect: str = "modelopt") -> list[str]:
    words = unless_given(unless_given(options, "--activations", 4), "--format", "nvfp4")
    plan = run("quantize", source, "--dialect", dialect, *words, "--dry-run", "--json")
    assert plan.code == 0, plan
    return [one for one in plan.json["warnings"] if "input scale" in one]


@pytest.mark.parametrize("dialect", list(ENDINGS))
def test_a_scale_that_nothing_measured_is_warned_of(dialect, source, tmp_path):
    """In the plan, the result, and what a person sees; with what measures it. A norm bounds the
    inputs of q, k and v; the model has no other norm.
    """
    (warning,) = warnings_of(source, dialect=dialect)
    assert f"the input scale of 4 modules in four bits, the first {ATTENTION}.o_proj" in warning
    assert UNMEASURED in warning
    assert "fp4convert calibrate SOURCE -o FILE --self-generate 16" in warning
    assert warning.endswith("then add --calibration FILE, and no --input-scale")
    words = ("quantize", source, "--format", "nvfp4", "--dialect", dialect, "--activations", 4)
    assert warning in run(*words, "-o", tmp_path / "a", "--json").json["warnings"]
    drawn = run(*words, "-o", tmp_path / "b")
    assert "the input scale of 4 modules in four bits" in " ".join(drawn.err.split())
    (of_all,) = warnings_of(source, "--input-scale", 1, dialect=dialect)
    assert "the input scale of 7 modules in four bits, the first model.layers.0." in of_all
    assert UNMEASURED in of_all


def test_scales_that_are_measured_or_none_are_not_warned_of(source, tmp_path):
    file = calibrate(source, tmp_path / "c.safetensors", dict.fromkeys(MODULES, 0.7))
    other = donor(source, tmp_path / "other", "modelopt", dict.fromkeys(MODULES, 0.7))
    for options in (
        ("--calibration", file),
        ("--input-scale", file),
        ("--input-scale", other),
        ("--input-scale", 0.5),
        ("--activations", 16),
    ):
        assert warnings_of(source, *options) == [], options
    words = ("--format", "mxfp4", "--activations", 4)
    assert warnings_of(source, *words, dialect="compressed-tensors") == []


def test_scales_of_1_that_are_copied_are_warned_of(source, tmp_path):
    """By --input-scale ARTIFACT, and by transcode."""
    other = donor(source, tmp_path / "other", "modelopt", dict.fromkeys(MODULES, 1.0))
    (warning,) = warnings_of(source, "--input-scale", other)
    assert "of 7 modules in four bits, the first model.layers.0." in warning
    assert f"is 1, as in --input-scale {other}; right for" in warning
    for scale in (1, 0.7):
        made = tmp_path / f"made-{scale}"
        options = ("--format", "nvfp4", "--dialect", "modelopt", "--activations", 4)
        assert run("quantize", source, *options, "--input-scale", scale, "-o", made).code == 0
        words = ("transcode", made, "--dialect", "compressed-tensors", "-o", f"{made}-other")
        warned = run(*words, "--json").json["warnings"]
        assert ("is 1, as in the artifact; right for" in str(warned)) == (scale == 1)


def test_eight_bit_modules_without_a_scale_are_warned_of(source, tmp_path):
    """Beside four-bit ones, alone, and where the source has one of two."""
    said = "right for inputs from 0.016 to 448: smaller ones lose bits, below 0.00098 they become 0"
    recipe = ("--recipe", eight_bit_recipe(tmp_path))
    four, eight = warnings_of(source, *recipe)
    assert "of 3 modules in four bits" in four
    assert f"of 1 module in eight bits, the first {ATTENTION}.o_proj" in eight
    assert said in eight
    (alone,) = warnings_of(source, "--format", "fp8", "--activations", 8)
    assert "of 4 modules in eight bits" in alone
    own = with_own_scale(tmp_path / "own")
    assert warnings_of(own, *recipe, "--input-scale", 0.5) == []


def seen_by(source: Path, path: Path, sizes: dict[str, float], has_squares: bool = True) -> Path:
    """A calibration whose blocks have one large column each, of this root mean square; the first
    block alone has a column of 100.
    """
    found = {}
    for module, size in sizes.items():
        columns = 128 if module == f"{MLP}.down_proj" else 64
        x = np.zeros((4, columns))
        x[:, 5::16] = np.array([size, -size, size, -size])[:, None]
        x[:, 0] = 100
        found |= statistics_of(module, x)
        if not has_squares:
            del found[f"{module}.input_sq_mean"]
    kind = {} if has_squares else {"gram": "none"}
    return write_calibration(path, open_source(str(source)), found, **kind)


@pytest.mark.parametrize("has_squares", [True, False])
def test_a_number_that_is_too_large_for_typical_blocks_is_warned_of(has_squares, source, tmp_path):
    """0.09375 x 1 is the least block of four bits; the columns of 100 are not typical."""
    sizes = dict.fromkeys(MODULES, 0.1) | {ALONE[0]: 0.09, ALONE[1]: 0.004}
    file = seen_by(source, tmp_path / "c.safetensors", sizes, has_squares)
    (warning,) = warnings_of(source, "--calibration", file, "--input-scale", 1)
    assert warning.startswith(
        f"input scales of 2 modules are larger than {file} asks for: that of {ALONE[1]} rounds"
        " blocks well whose largest input is 0.0938 or more, where a typical one has 0.004;"
    )
    assert "leave --input-scale out" in warning
    assert warnings_of(source, "--calibration", file) == []
    assert warnings_of(source, "--calibration", file, "--input-scale", 0.0424) == []
    donated = donor(source, tmp_path / "other", "modelopt", dict.fromkeys(MODULES, 1.0))
    assert warnings_of(source, "--calibration", file, "--input-scale", donated) == [warning]


def test_a_calibrated_scale_has_headroom_that_typical_blocks_allow(source, tmp_path):
    """The largest input is 100 everywhere. Where a typical block has 10, the scale is 8 x 100 /
    2688; where it has 0.1, so much that 0.1 lies 8 times above the floor; where it has 0.004, what
    the largest input needs.
    """
    sizes = dict.fromkeys(MODULES, 10.0) | {ALONE[0]: 0.1, ALONE[1]: 0.004}
    file = seen_by(source, tmp_path / "c.safetensors", sizes)
    out = quantized(source, tmp_path / "out", "modelopt", "--calibration", file)
    expected = dict.fromkeys(MODULES, 800 / 2688)
    expected |= {ALONE[0]: 0.1 / (8 * 0.09375), ALONE[1]: 100 / 2688}
    found = input_scales(out, "modelopt")
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_percentile_reaches_to_the_inputs_of_so_many_tokens(source, tmp_path):
    """Of 1,000 tokens 999 have inputs up to 9.99."""
    found = {}
    for module in MODULES:
        x = np.zeros((1000, 128 if module == f"{MLP}.down_proj" else 64))
        x[:, 3] = np.arange(1, 1001) / 100
        found |= statistics_of(module, x)
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), found)
    given = ("--calibration", file, "--input-scale")
    out = quantized(source, tmp_path / "out", "modelopt", *given, "p99.9")
    expected = dict.fromkeys(MODULES, 9.99 / 2688)
    assert input_scales(out, "modelopt") == pytest.approx(expected, rel=1e-6)
    words = ("quantize", source, "--format", "nvfp4", "--dialect", "modelopt", "--activations", 4)
    words = (*words, "--dry-run", "--json")
    for options, expected in (
        ((*given, "p98"), "expected one of p90, p99, p99.9, p99.99"),
        (("--input-scale", "p99"), "of the inputs that a calibration saw"),
    ):
        error = run(*words, *options).json["error"]
        assert (error["code"], expected in error["message"]) == ("bad-input-scale", True)
    old = calibrate(source, tmp_path / "old.safetensors", AMAX)  # of an earlier version
    error = run(*words, "--calibration", old, "--input-scale", "p99").json["error"]
    assert error["code"] == "calibration-missing"


def test_a_number_for_modules_that_a_calibration_lacks_is_warned_of(source, tmp_path):
    part = {module: value for module, value in AMAX.items() if module != ALONE[1]}
    file = calibrate(source, tmp_path / "c.safetensors", part)
    (warning,) = warnings_of(source, "--calibration", file, "--input-scale", 1)
    assert f"the input scale of 1 module in four bits, the first {ALONE[1]}, is 1" in warning


def test_eight_bit_modules_of_typical_inputs_below_the_floor_are_named(source, tmp_path):
    """0.015625 is the least input of eight bits."""
    sizes = dict.fromkeys(MODULES, 0.1) | {ALONE[0]: 0.004}
    found = {}
    for module, size in sizes.items():
        columns = 128 if module == f"{MLP}.down_proj" else 64
        found |= statistics_of(module, np.full((4, columns), size))
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), found)
    recipe = ("--recipe", eight_bit_recipe(tmp_path), "--dialect", "modelopt")
    eight = donor(source, tmp_path / "eight", "modelopt", dict.fromkeys(MODULES, 1.0))
    (warning,) = warnings_of(source, *recipe, "--calibration", file, "--input-scale", eight)
    assert f"that of {ALONE[0]} rounds" in warning


def test_transcode_warns_of_scales_that_nobody_measured(tmp_path):
    """FP8 with one scale, which engines of compressed-tensors need no scale of inputs for."""
    own = with_own_scale(tmp_path / "own")
    tensors = read_shard(own / "model.safetensors")
    del tensors[f"{ALONE[0]}.input_scale"]
    config = json.loads((own / "config.json").read_text())
    source = write_checkpoint(tmp_path / "source", {"model.safetensors": tensors}, config)
    words = ("--format", "nvfp4", "--recipe", eight_bit_recipe(tmp_path), "-o", tmp_path / "a")
    made = run("quantize", source, "--dialect", "compressed-tensors", *words, "--json")
    assert (made.code, made.json["warnings"]) == (0, [])
    moved = run(
        "transcode", tmp_path / "a", "--dialect", "modelopt", "-o", tmp_path / "b", "--json"
    )
    (warning,) = (one for one in moved.json["warnings"] if "scale of activations" in one)
    assert warning.startswith(
        f"1 FP8 module without a scale of activations, the first '{ALONE[0]}'"
    )
    assert "right for inputs from 0.016 to 448" in warning
    assert "quantize the original again with --calibration FILE" in warning
