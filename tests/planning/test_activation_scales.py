"""--input-scale FILE: scales of activations copied from another artifact, or taken from a
calibration; module by module.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import (
    LAYER,
    bf16,
    read_folder,
    run,
    unless_given,
    values_of,
    weight,
    write_llama,
    write_single,
)
from input_scales import (
    ALONE,
    AMAX,
    ATTENTION,
    ENDINGS,
    GROUPS,
    MLP,
    MODULES,
    STORED,
    calibrate,
    donor,
    eight_bit_recipe,
    input_scales,
    quantized,
    with_own_scale,
)
from rewriting import forget_hashes

from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.activation_scales import whole_reference
from fp4convert.storage.open import open_source


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def refused(source: Path, out: Path, *options: object) -> dict:
    words = unless_given(options, "--activations", 4)
    done = run("quantize", source, "--format", "nvfp4", "-o", out, "--json", *words)
    assert (done.code, done.json["error"]["exit"]) == (2, 2), done
    assert not out.exists()
    return done.json["error"]


@pytest.mark.sweep(4)  # each dialect on both sides, its own and another
@pytest.mark.parametrize("theirs", ENDINGS)
@pytest.mark.parametrize("ours", ENDINGS)
def test_scales_are_copied_from_any_dialect_into_any(ours, theirs, source, tmp_path):
    """The same float32 where both store it alike, else the one nearest to its reciprocal, computed
    here in float64.
    """
    other = donor(source, tmp_path / "other", theirs, STORED)
    found = input_scales(quantized(source, tmp_path / "out", ours, "--input-scale", other), ours)
    is_inverse = ENDINGS[ours][1] != ENDINGS[theirs][1]
    narrow = {module: float(np.float32(value)) for module, value in STORED.items()}
    assert found == {
        module: float(np.float32(1 / value)) if is_inverse else value
        for module, value in narrow.items()
    }


def test_members_of_a_group_get_the_largest_and_a_warning_says_so(source, tmp_path):
    other = donor(
        source,
        tmp_path / "other",
        "modelopt",
        {**STORED, f"{MLP}.gate_proj": 0.5, f"{MLP}.up_proj": 2.0},
    )
    words = ("--format", "nvfp4", "--activations", 4)
    done = run("quantize", source, *words, "-o", tmp_path / "out", "--input-scale", other)
    assert done.code == 0
    assert (
        f"1 scale groups have members with different input scales in --input-scale {other}, the "
        f"first {MLP}.gate_proj" in done.err
    )
    found = input_scales(tmp_path / "out", "compressed-tensors")
    assert [found[module] for module in GROUPS[1]] == [0.5, 0.5], (
        "the divisors of the largest multiplier, 2"
    )
    assert "group-inputs-differ" not in run("verify", tmp_path / "out", "--source", source).out


def test_nothing_else_changes(source, tmp_path):
    """Beside the input scales the artifact is that of a constant, and inspect and verify find
    nothing wrong.
    """
    other = donor(source, tmp_path / "other", "quark", STORED)
    copied, constant = (
        quantized(source, tmp_path / "a", "modelopt", "--input-scale", other),
        quantized(source, tmp_path / "b", "modelopt"),
    )
    left, right = read_folder(copied), read_folder(constant)
    assert {name for name in left if left[name] != right[name]} == {
        f"{module}.input_scale" for module in MODULES
    }
    for file in ("config.json", "hf_quant_config.json"):
        assert (copied / file).read_bytes() == (constant / file).read_bytes()
    assert run("inspect", copied, "--json").json["findings"] == []
    assert run("verify", copied, "--source", source).code == 0


def test_a_module_without_one_is_refused(source, tmp_path):
    """Of an artifact that keeps its MLP, or of one for 16-bit activations,
    which has none at all.
    """
    quantized(source, tmp_path / "part", "modelopt", "--exclude", "*mlp*")
    error = refused(source, tmp_path / "out", "--input-scale", tmp_path / "part")
    assert (error["code"], error["tensor"]) == ("input-scale-missing", f"{MLP}.gate_proj")
    assert (
        "no input scale for 3 of 7 modules, the first 'model.layers.0.mlp.gate_proj'"
        in error["message"]
    )
    assert run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "a16").code == 0
    error = refused(source, tmp_path / "out", "--input-scale", tmp_path / "a16")
    assert (error["code"], "for 7 of 7 modules" in error["message"]) == (
        "input-scale-missing",
        True,
    )
    words = ("--exclude", "*mlp*", "--input-scale", tmp_path / "part")
    quantized(source, tmp_path / "fits", "modelopt", *words)


def test_an_artifact_of_another_model_is_refused(source, tmp_path):
    tensors = {
        f"{MLP}.down_proj.weight": weight(1, 64, 256),
        f"{ATTENTION}.o_proj.weight": weight(2),
    }
    quantized(write_single(tmp_path / "wider", tensors), tmp_path / "other")
    words = ("--input-scale", tmp_path / "other", "--include", "*", "--exclude", "*[qkvge]*_proj")
    error = refused(source, tmp_path / "out", *words)
    assert error["code"] in ("input-scale-model", "input-scale-missing")
    only = write_single(tmp_path / "only", {f"{MLP}.down_proj.weight": weight(1, 64, 128)})
    error = refused(only, tmp_path / "out", "--input-scale", tmp_path / "other")
    assert (error["code"], error["tensor"]) == ("input-scale-model", f"{MLP}.down_proj")
    assert "[64, 256] there and [64, 128] here" in error["message"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_scale_that_is_no_number_is_refused(value, dialect, source, tmp_path):
    other = donor(source, tmp_path / "other", dialect, {**STORED, ALONE[1]: value})
    error = refused(source, tmp_path / "out", "--input-scale", other)
    assert (error["code"], error["tensor"]) == ("bad-input-scale", ALONE[1])
    assert (
        error["next"]
        == "Give another artifact or calibration, or one number for all: --input-scale 1."
    )


def test_scales_for_divided_inputs_are_refused(source, tmp_path):
    """An artifact of --method awq has them, and one of smooth, which an earlier version had: they
    are too small, or too large, for any other.
    """
    other = donor(source, tmp_path / "other", "modelopt", STORED)
    path = other / "quantization_config.json"
    linears = [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"]
    norm, heads = f"{LAYER}.post_attention_layernorm", {"repeats": 1, "width": 1}
    fold = {"into": norm, "kind": "norm", "linears": linears, "heads": heads, "modules": [norm]}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "method": "smooth", "folds": [fold]})
    )
    forget_hashes(other)
    error = refused(source, tmp_path / "out", "--input-scale", other)
    assert error["code"] == "input-scale-folded"
    # Of that artifact itself they are right, and what is made of it is as much divided.
    words = ("--format", "nvfp4", "--activations", "4")
    made = run("quantize", other, *words, "--input-scale", other, "-o", tmp_path / "b", "--json")
    assert (made.code, made.json["warnings"]) == (0, []), made.err
    record = json.loads((tmp_path / "b" / "quantization_config.json").read_text())
    assert record["folds"] == [fold]
    error = refused(source, tmp_path / "out", "--input-scale", tmp_path / "b")
    assert error["code"] == "input-scale-folded"
    # Without it they are left out, and that is told.
    for options, told in ((words, "takes them over"), (words[:2], "belong to how it was quan")):
        plan = run("quantize", other, *options, "--dry-run", "--json").json
        (warning,) = (one for one in plan["warnings"] if "activation scales" in one)
        assert told in warning
    assert "factors of folds (AWQ)" in error["message"]


def test_what_is_neither_a_number_nor_an_artifact_is_refused(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("hello")
    for name in (
        "1,0",
        "missing/folder/of/mine",
        tmp_path / "empty",
        tmp_path / "text.safetensors",
        source,
        "",
    ):
        message = refused(source, tmp_path / "out", "--input-scale", name)["message"]
        assert message.startswith(f"--input-scale {name}: ")
    assert (
        refused(source, tmp_path / "out", "--input-scale", tmp_path / "x", "--activations", 16)[
            "code"
        ]
        == "bad-input-scale"
    )


def test_a_changed_scale_changes_the_key_of_its_shard_alone(source, tmp_path):
    """An unfinished folder keeps what is still right, and a finished one is not mixed with other
    scales.
    """
    first = donor(source, tmp_path / "first", "modelopt", STORED)
    second = donor(source, tmp_path / "second", "modelopt", {**STORED, ALONE[1]: 9.0})
    opened = open_source(str(source))
    plans = [
        prepare_quantize(
            take_apart(
                opened, QuantizeOptions("", format="nvfp4", activations=4, input_scale=str(other))
            )
        )
        for other in (first, second)
    ]
    assert [
        left.key == right.key for left, right in zip(*(plan.tasks for plan in plans), strict=True)
    ] == [True, False]
    quantized(source, tmp_path / "out", "compressed-tensors", "--input-scale", first)
    options = ("--activations", 4, "-o", tmp_path / "out", "--json", "--input-scale", second)
    again = run("quantize", source, "--format", "nvfp4", *options)
    assert (again.code, again.json["error"]["code"]) == (5, "other-plan")


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_calibration_gives_the_largest_input_of_each_group(dialect, source, tmp_path):
    """8 amax / 2688 and its reciprocal, each one rounding of float32 arithmetic by NumPy."""
    file = calibrate(source, tmp_path / "c.safetensors", AMAX)
    found = input_scales(
        quantized(source, tmp_path / "out", dialect, "--input-scale", file), dialect
    )
    largest = AMAX | {
        module: max(AMAX[each] for each in group) for group in GROUPS for module in group
    }
    wide = {module: np.float32(value) for module, value in largest.items()}
    if dialect == "modelopt":
        assert found == {module: 8 * value / np.float32(2688) for module, value in wide.items()}
    else:
        assert found == {module: np.float32(2688) / (8 * value) for module, value in wide.items()}


def test_layers_that_share_an_input_share_its_statistics(source, tmp_path):
    """q_proj holds those of k_proj and v_proj, as a calibration stores them."""
    shared = dict.fromkeys(GROUPS[0][1:], GROUPS[0][0])
    own = {module: value for module, value in AMAX.items() if module not in shared}
    file = calibrate(source, tmp_path / "c.safetensors", own, inputs=json.dumps(shared))
    found = input_scales(
        quantized(source, tmp_path / "out", "modelopt", "--input-scale", file), "modelopt"
    )
    assert {found[module] for module in GROUPS[0]} == {
        8 * np.float32(AMAX[GROUPS[0][0]]) / np.float32(2688)
    }


def test_a_calibration_that_does_not_fit_is_refused(source, tmp_path):
    file = calibrate(source, tmp_path / "zero.safetensors", {**AMAX, ALONE[0]: 0.0})
    error = refused(source, tmp_path / "out", "--input-scale", file)
    assert (error["code"], error["tensor"]) == ("input-scale-zero", ALONE[0])
    assert f"--exclude {ALONE[0]}" in error["next"]
    file = calibrate(
        source, tmp_path / "part.safetensors", {module: AMAX[module] for module in GROUPS[0]}
    )
    error = refused(source, tmp_path / "out", "--input-scale", file)
    assert (error["code"], "for 4 of 7 modules" in error["message"]) == (
        "input-scale-missing",
        True,
    )
    other = write_single(tmp_path / "other", {f"{MLP}.down_proj.weight": weight(1, 64, 128)})
    words = ("--input-scale", calibrate(source, tmp_path / "c.safetensors", AMAX))
    error = refused(other, tmp_path / "out", *words)
    assert error["code"] == "calibration-model"


def test_eight_bit_modules_have_static_scales_too(source, tmp_path):
    """modelopt: 8 amax / 448 of a calibration; beside NVFP4 modules, whatever their own activations
    are. Without one that of q, k and v is 8 max |w| / 448 of their norm, and others have 1.
    """
    recipe = ("--recipe", eight_bit_recipe(tmp_path))
    plain = input_scales(quantized(source, tmp_path / "one", "modelopt", *recipe), "modelopt")
    norm = values_of(read_folder(source)[f"{LAYER}.input_layernorm.weight"])
    of_norm = np.float32(8 * np.abs(norm).max() / 448)
    assert plain == dict.fromkeys(MODULES, 1.0) | dict.fromkeys(GROUPS[0], of_norm)
    file = calibrate(source, tmp_path / "c.safetensors", AMAX)
    found = input_scales(
        quantized(source, tmp_path / "two", "modelopt", *recipe, "--input-scale", file), "modelopt"
    )
    largest = np.float32(max(AMAX[module] for module in GROUPS[0]))
    assert [found[module] for module in GROUPS[0]] == [8 * largest / np.float32(448)] * 3
    assert found[ALONE[0]] == 8 * np.float32(AMAX[ALONE[0]]) / np.float32(448)
    assert found[ALONE[1]] == 8 * np.float32(AMAX[ALONE[1]]) / np.float32(2688)
    copied = input_scales(
        quantized(
            source, tmp_path / "three", "modelopt", *recipe, "--input-scale", tmp_path / "two"
        ),
        "modelopt",
    )
    assert copied == found
    narrow = input_scales(
        quantized(source, tmp_path / "four", "modelopt", "--input-scale", tmp_path / "two"),
        "modelopt",
    )
    assert narrow[ALONE[0]] == np.float32(float(found[ALONE[0]]) * 448 / 2688), (
        "FP8's range as NVFP4's"
    )


def test_a_scale_that_the_source_has_stays_unless_a_file_says_another(tmp_path):
    source, recipe = with_own_scale(tmp_path / "source"), ("--recipe", eight_bit_recipe(tmp_path))
    o_proj, down = ALONE
    found = input_scales(
        quantized(source, tmp_path / "a", "modelopt", *recipe, "--input-scale", 0.5), "modelopt"
    )
    assert found == {o_proj: 0.375, down: 0.5}
    file = calibrate(source, tmp_path / "c.safetensors", {module: AMAX[module] for module in ALONE})
    found = input_scales(
        quantized(source, tmp_path / "b", "modelopt", *recipe, "--input-scale", file), "modelopt"
    )
    assert found[o_proj] == 8 * np.float32(AMAX[o_proj]) / np.float32(448)


def test_an_artifact_on_the_hub(hub, source, tmp_path):
    """Its headers and its scales alone are read; and what is not there is told as such."""
    hub.add("org/donor", donor(source, tmp_path / "donor", "modelopt", STORED))
    before = len(hub.seen)
    out = quantized(source, tmp_path / "out", "modelopt", "--input-scale", "org/donor")
    assert input_scales(out, "modelopt") == {
        module: float(np.float32(value)) for module, value in STORED.items()
    }
    assert len(hub.seen) - before < 40
    words = ("--format", "nvfp4", "--activations", 4)
    missing = run("quantize", source, *words, "-o", tmp_path / "none", "--input-scale", "org/gone")
    assert missing.code in (2, 4)
    assert "org/gone" in missing.err
    assert not (tmp_path / "none").exists()


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_local_experts": 2,
}
MOE = f"{LAYER}.block_sparse_moe"


def mixtral(folder: Path) -> Path:
    tensors = {
        f"{MOE}.gate.weight": weight(20, 2, 64),
        f"{LAYER}.post_attention_layernorm.weight": ("BF16", (64,), bf16(64, seed=21)),
    }
    for number in range(2):
        for seed, (leaf, rows, columns) in enumerate(
            (("w1", 32, 64), ("w3", 32, 64), ("w2", 64, 32))
        ):
            tensors[f"{MOE}.experts.{number}.{leaf}.weight"] = weight(
                30 + 3 * number + seed, rows, columns
            )
    return write_single(folder, tensors, MIXTRAL)


def test_scales_follow_inputs_under_factors_of_each_experts_own_tokens(tmp_path):
    """The factors are what the norm was divided by; the largest input of an expert's own columns
    over them, by NumPy.

    One expert's largest inputs lie where factors are large, the other's where they are small: one
    ratio for both is too small.
    """
    source, chance = mixtral(tmp_path / "source"), np.random.default_rng(4)
    found, channels = {}, {}
    for number, (low, high) in enumerate(((1.0, 60.0), (2.0, 0.02))):
        spread = np.where(np.arange(64) < 32, high, low)
        for leaf, x in (
            ("w1", chance.standard_normal((128, 64)) * spread),
            ("w2", chance.standard_normal((128, 32))),
        ):
            module = f"{MOE}.experts.{number}.{leaf}"
            found |= statistics_of(module, x)
            channels[module] = np.abs(x).max(0).astype(np.float32)
    shared = {f"{MOE}.experts.{number}.w3": f"{MOE}.experts.{number}.w1" for number in range(2)}
    file = write_calibration(
        tmp_path / "c.safetensors", open_source(str(source)), found, inputs=json.dumps(shared)
    )
    words = ("--calibration", file, "--method", "awq", "--scale-rule", "amax")
    out = quantized(source, tmp_path / "out", "modelopt", *words)
    scales, norm = input_scales(out, "modelopt"), f"{LAYER}.post_attention_layernorm.weight"
    before, after = (values_of(read_folder(folder)[norm]) for folder in (source, out))
    assert not np.array_equal(before, after), "otherwise this tests nothing"
    for number in range(2):
        expected = 8 * (channels[f"{MOE}.experts.{number}.w1"] / (before / after)).max() / 2688
        for leaf in ("w1", "w3"):
            assert scales[f"{MOE}.experts.{number}.{leaf}"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_calibration_gives_them_unless_another_option_does(bits, source, tmp_path):
    """--calibration alone; beside a number that is smaller, the number with a warning; with 16 bits
    there are none.
    """
    file = calibrate(source, tmp_path / "c.safetensors", AMAX)
    options = (
        "--format",
        "nvfp4",
        "--dialect",
        "modelopt",
        "--activations",
        bits,
        "--calibration",
        file,
    )
    assert run("quantize", source, *options, "-o", tmp_path / "a").code == 0
    if bits == 16:
        assert input_scales(tmp_path / "a", "modelopt") == {}
        return
    largest = AMAX | {
        module: max(AMAX[each] for each in group) for group in GROUPS for module in group
    }
    assert input_scales(tmp_path / "a", "modelopt") == {
        key: 8 * np.float32(value) / np.float32(2688) for key, value in largest.items()
    }
    done = run("quantize", source, *options, "--input-scale", 0.001, "-o", tmp_path / "b")
    assert set(input_scales(tmp_path / "b", "modelopt").values()) == {float(np.float32(0.001))}
    reached = [module for module in MODULES if AMAX[module] > 2.688]
    assert (
        f"input scales of {len(reached)} modules are smaller than {file} asks for: that of "
        f"{ALONE[1]} reaches 2.688" in done.err
    )
    enough = run("quantize", source, *options, "--input-scale", 1, "-o", tmp_path / "c")
    assert (enough.code, "smaller" in enough.err) == (0, False)


def test_what_is_sent_to_a_cluster_means_the_same_there(tmp_path, monkeypatch):
    (tmp_path / "donor").mkdir()
    monkeypatch.chdir(tmp_path)
    assert whole_reference("donor") == str(tmp_path / "donor")
    assert [whole_reference(asked) for asked in ("0.5", 0.5, None, "org/name")] == [
        "0.5",
        0.5,
        None,
        "org/name",
    ]
