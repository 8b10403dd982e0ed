"""compare: two artifacts of one source, beside what NumPy says of their dequantized weights."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    LAYER,
    SECOND,
    bf16,
    pack_shard,
    read_folder,
    read_shard,
    run,
    values_of,
    write_llama,
    write_single,
)
from made_up_inputs import calibrate
from restored_artifacts import restored

DOWN = f"{LAYER}.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source"))


def make(source: Path, out: Path, format: str, *options: object) -> Path:
    outcome = run("quantize", source, "--format", format, "-o", out, "-q", *options)
    assert outcome.code == 0, outcome.err
    return out


@pytest.fixture(scope="module")
def nvfp4(source, tmp_path_factory) -> Path:
    return make(source, tmp_path_factory.mktemp("n") / "nvfp4", "nvfp4", "--dialect", "modelopt")


@pytest.fixture(scope="module")
def mxfp4(source, tmp_path_factory) -> Path:
    return make(source, tmp_path_factory.mktemp("m") / "mxfp4", "mxfp4", "--scale-rule", "floor")


def compare(a: Path, b: Path, source: Path, *options: object) -> dict:
    outcome = run("compare", a, b, "--source", source, *options, "--json")
    assert outcome.code == (0 if outcome.json["passed"] else 6), outcome
    return outcome.json


def nbits(folder: Path, module: str) -> int:
    """Of all tensors of a module but its input scale, as the safetensors package reads them."""
    held = {
        name: tensor
        for name, tensor in read_folder(folder).items()
        if name.startswith(f"{module}.weight")
    }
    return 8 * sum(len(data) for _, _, data in held.values())


def test_both_are_what_numpy_says_they_are(source, nvfp4, mxfp4, tmp_path):
    document = compare(nvfp4, mxfp4, source)
    before = {name: values_of(tensor) for name, tensor in read_folder(source).items()}
    values = {"a": restored(nvfp4, tmp_path / "a"), "b": restored(mxfp4, tmp_path / "b")}
    sizes, all_db, powers = [], {"a": [], "b": []}, {"a": [], "b": []}
    assert len(document["tensors"]) == 7
    for row in document["tensors"]:
        x = before[row["name"]]
        for side, folder in (("a", nvfp4), ("b", mxfp4)):
            nmse = ((x - values[side][row["name"]]) ** 2).sum() / (x**2).sum()
            assert row[side]["nmse"] == pytest.approx(nmse, rel=1e-9)
            assert row[side]["sqnr_db"] == pytest.approx(-10 * math.log10(nmse), rel=1e-9)
            assert row[side]["output_error"] == pytest.approx(math.sqrt(nmse), rel=1e-9)
            assert (
                row[side]["bits_per_weight"]
                == nbits(folder, row["name"].removesuffix(".weight")) / x.size
            )
            all_db[side].append(row[side]["sqnr_db"])
            powers[side].append(nmse)
        assert row["difference_db"] == row["b"]["sqnr_db"] - row["a"]["sqnr_db"] < -1
        assert (row["better"], row["weights"], row["quantized_by"]) == ("a", x.size, ["a", "b"])
        sizes.append(x.size)
    for side in "ab":
        own = document[side]
        assert own["sqnr_db_mean"] == pytest.approx(np.mean(all_db[side]))
        assert own["sqnr_db_min"] == min(all_db[side])
        assert own["worst"] == document["tensors"][all_db[side].index(min(all_db[side]))]["name"]
        assert own["output_error"] == pytest.approx(
            math.sqrt(np.average(powers[side], weights=sizes))
        )
        assert own["findings"] == []
    assert (document["a"]["formats"], document["a"]["dialect"], document["a"]["scale_rule"]) == (
        ["nvfp4"],
        "modelopt",
        "mse",
    )
    assert (document["b"]["formats"], document["b"]["scale_rule"]) == (["mxfp4"], "floor")
    assert document["b"]["bits_per_weight"] == 4.25
    assert document["a"]["bits_per_weight"] == pytest.approx(4.5 + 32 * 7 / sum(sizes))
    assert {
        key: document["totals"][key]
        for key in ("compared", "quantized_by_both", "better_a", "better_b", "equal")
    } == {
        "compared": 7,
        "quantized_by_both": 7,
        "better_a": 7,
        "better_b": 0,
        "equal": 0,
    }


def test_the_same_codes_in_another_dialect_are_equal(source, mxfp4, tmp_path):
    assert run("transcode", mxfp4, "-o", tmp_path / "quark", "--dialect", "quark", "-q").code == 0
    (tmp_path / "quark" / "quantization_config.json").unlink()  # somebody else's artifact has none
    (tmp_path / "quark" / ".fp4convert" / "plan.json").unlink()
    document = compare(mxfp4, tmp_path / "quark", source)
    assert (document["totals"]["equal"], document["totals"]["difference_db_mean"]) == (7, 0)
    assert {row["better"] for row in document["tensors"]} == {"equal"}
    assert (document["b"]["dialect"], document["b"]["scale_rule"]) == ("quark", None)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_only_one_has_quantized_loses_nothing_in_the_other(is_first, source, nvfp4, tmp_path):
    part = make(source, tmp_path / "part", "mxfp4", "--exclude", "*.down_proj")
    pair = (part, nvfp4) if is_first else (nvfp4, part)
    kept, packed = ("a", "b") if is_first else ("b", "a")
    document = compare(*pair, source)
    (row,) = (row for row in document["tensors"] if row["name"] == f"{DOWN}.weight")
    assert row[kept] == {
        "stored": "bf16",
        "bits_per_weight": 16,
        "sqnr_db": None,
        "nmse": 0,
        "output_error": 0,
    }
    assert row[packed]["stored"] == "nvfp4"
    assert (row["better"], row["difference_db"], row["quantized_by"]) == (kept, None, [packed])
    totals = document["totals"]
    assert (
        totals["compared"],
        totals["quantized_by_both"],
        totals[f"quantized_by_{packed}_alone"],
    ) == (7, 6, 1)
    assert (totals[f"better_{kept}"], totals[f"better_{packed}"]) == (1, 6)
    weights = {row["name"]: row["weights"] for row in document["tensors"]}
    down = weights.pop(f"{DOWN}.weight")
    expected = (4.25 * sum(weights.values()) + 16 * down) / (sum(weights.values()) + down)
    assert document[kept]["bits_per_weight"] == pytest.approx(expected)
    assert document[kept]["quantized"] == 6


def test_what_stays_and_is_not_the_sources_is_told_and_judged_by_nobody(source, nvfp4, tmp_path):
    part = make(source, tmp_path / "part", "mxfp4", "--exclude", "*.down_proj")
    held = read_shard(part / SECOND)
    dtype, shape, data = held[f"{DOWN}.weight"]
    (part / SECOND).write_bytes(
        pack_shard({**held, f"{DOWN}.weight": (dtype, shape, bytes(2) + data[2:])})
    )
    document = compare(nvfp4, part, source)
    assert [(each["code"], each["tensor"]) for each in document["b"]["findings"]] == [
        ("kept-differs", f"{DOWN}.weight")
    ]
    (row,) = (row for row in document["tensors"] if row["name"] == f"{DOWN}.weight")
    assert (row["b"]["nmse"], row["b"]["output_error"], row["better"]) == (None, None, None)
    told = run("compare", nvfp4, part, "--source", source)
    assert told.code == 6
    assert told.out.splitlines()[-1] == "failed: modules with findings were not compared"
    assert f"error kept-differs: {DOWN}.weight: b: " in told.out


def test_a_source_of_the_same_shapes_and_other_weights_gives_no_verdict(
    source, nvfp4, mxfp4, tmp_path
):
    tensors = {
        name: (dtype, shape, bf16(*shape, seed=77 + at))
        for at, (name, (dtype, shape, _)) in enumerate(read_folder(source).items())
    }
    other = write_single(
        tmp_path / "other", tensors, json.loads((source / "config.json").read_text())
    )
    document = compare(nvfp4, mxfp4, other)
    assert not document["passed"]
    for side in "ab":
        codes = {
            each["tensor"]
            for each in document[side]["findings"]
            if each["code"] == "source-differs"
        }
        assert codes == {row["name"] for row in document["tensors"]}
    assert {row["better"] for row in document["tensors"]} == {None}
    told = run("compare", nvfp4, mxfp4, "--source", other)
    lines = told.out.splitlines()
    assert (told.code, lines[-1]) == (6, "failed: no verdict")
    assert "better on" not in told.out
    assert sum("source-differs" in line for line in lines) <= 4, "alike findings are one line"
    assert any("of them): a: its values" in line for line in lines)


def test_with_a_calibration_the_better_one_is_that_for_its_inputs(source, mxfp4, tmp_path):
    """Rule importance gives weights away where inputs are small: less SQNR, and better answers."""
    file = calibrate(tmp_path / "c.safetensors", source, "diag")
    other = make(
        source, tmp_path / "i", "mxfp4", "--scale-rule", "importance", "--calibration", file
    )
    plain = make(source, tmp_path / "p", "mxfp4")
    document = compare(plain, other, source, "--calibration", file)
    assert document["inputs"] == "calibration, gram diag"
    assert document["totals"]["better_b"] == 7
    assert document["totals"]["difference_db_mean"] < 0
    verified = run("verify", other, "--source", source, "--calibration", file, "--json").json[
        "tensors"
    ]
    errors = {entry["name"]: entry["output_error"] for entry in verified}
    assert {row["name"]: row["b"]["output_error"] for row in document["tensors"]} == errors
    assert compare(plain, other, source)["totals"]["better_a"] == 7


def test_a_person_sees_both_and_the_difference(source, nvfp4, mxfp4):
    document = compare(nvfp4, mxfp4, source)
    lines = run("compare", nvfp4, mxfp4, "--source", source).out.splitlines()
    shown = {line.partition("  ")[0]: line for line in lines}
    assert shown["dialect"].split() == ["dialect", "modelopt", "compressed-tensors"]
    assert shown["bits per weight"].split()[-1] == "4.250"
    for row in document["tensors"]:
        (line,) = (line for line in lines if line.startswith(f"{row['name']} "))
        assert line.split()[-2:] == [f"{row['difference_db']:+.2f}", "a"]
        assert f" {row['a']['sqnr_db']:.2f} " in line
        assert f" {row['b']['sqnr_db']:.2f} " in line
    assert any(line.startswith("a is better on 7, b on 0, equal on 0") for line in lines)


def test_experts_are_compared_one_by_one_however_they_are_stored(tmp_path):
    """In stacks of all experts by one dialect, in tensors of their own by the other; interleaved as
    gpt-oss has them.
    """
    tensors = {
        f"{LAYER}.mlp.experts.gate_up_proj": ("BF16", (2, 64, 128), bf16(2, 64, 128)),
        f"{LAYER}.mlp.experts.down_proj": ("BF16", (2, 64, 64), bf16(2, 64, 64, seed=1)),
    }
    source = write_single(
        tmp_path / "m",
        tensors,
        {"model_type": "gpt_oss", "hidden_size": 64, "num_local_experts": 2},
    )
    stacked = make(source, tmp_path / "s", "mxfp4", "--dialect", "gpt-oss")
    document = compare(stacked, make(source, tmp_path / "t", "mxfp4"), source)
    assert document["totals"]["equal"] == document["totals"]["compared"] == 6
    assert {row[side]["bits_per_weight"] for row in document["tensors"] for side in "ab"} == {4.25}


def test_bad_input_is_refused(source, nvfp4, mxfp4, tmp_path):
    other = write_single(
        tmp_path / "other", {"x.o_proj.weight": read_shard(source / SECOND)[f"{DOWN}.weight"]}
    )
    refused = run("compare", nvfp4, mxfp4, "--source", other, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "nothing-in-common")
    refused = run("compare", nvfp4, source, "--source", source, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "not-an-artifact")
    broken = make(source, tmp_path / "broken", "nvfp4")
    config = json.loads((broken / "config.json").read_text())
    del config["quantization_config"]
    (broken / "config.json").write_text(json.dumps(config))
    refused = run("compare", nvfp4, broken, "--source", source, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unsound-artifact")
    file = calibrate(tmp_path / "c.safetensors", other)
    refused = run("compare", nvfp4, mxfp4, "--source", source, "--calibration", file, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "calibration-model")


def test_random_inputs_are_told_with_the_option_for_recorded_ones(tmp_path):
    source = write_llama(tmp_path / "m")
    out = tmp_path / "q"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    hint = "inputs: gaussian (random; --calibration FILE for recorded ones)"
    assert hint in run("compare", out, out, "--source", source).out
