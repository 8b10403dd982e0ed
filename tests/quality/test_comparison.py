"""compare: artifacts of one source, beside what NumPy says of their dequantized weights."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
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
from made_up_inputs import calibrate, calibrate_white
from restored_artifacts import restored

from fp4convert.quality import source_compare

DOWN = f"{LAYER}.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source"))


def make(source: Path, out: Path, format: str, *options: object) -> Path:
    quantize(source, out, "--format", format, *options)
    return out


@pytest.fixture(scope="module")
def nvfp4(source, tmp_path_factory) -> Path:
    return make(source, tmp_path_factory.mktemp("n") / "nvfp4", "nvfp4", "--dialect", "modelopt")


@pytest.fixture(scope="module")
def mxfp4(source, tmp_path_factory) -> Path:
    return make(source, tmp_path_factory.mktemp("m") / "mxfp4", "mxfp4", "--scale-rule", "floor")


def compare(artifacts: Sequence[Path], source: Path, *options: object) -> dict:
    if not options:  # random inputs rank nobody
        options = ("--calibration", calibrate_white(source, source.with_suffix(".safetensors")))
    outcome = run("compare", *artifacts, "--source", source, *options, "--json")
    assert outcome.code == (6 if outcome.json["passed"] is False else 0), outcome
    return outcome.json


def best_on(document: dict) -> dict[str, int]:
    return {letter: side["best"] for letter, side in document["artifacts"].items()}


def nbits(folder: Path, module: str) -> int:
    """Of all tensors of a module but its input scale, as the safetensors package reads them."""
    held = read_folder(folder).items()
    return 8 * sum(len(data) for name, (_, _, data) in held if name.startswith(f"{module}.weight"))


def nmse_of(x: np.ndarray, y: np.ndarray) -> float:
    return ((x - y) ** 2).sum() / (x**2).sum()


def test_both_are_what_numpy_says_they_are(source, nvfp4, mxfp4, tmp_path):
    document = compare((nvfp4, mxfp4), source)
    before = {name: values_of(tensor) for name, tensor in read_folder(source).items()}
    values = {"a": restored(nvfp4, tmp_path / "a"), "b": restored(mxfp4, tmp_path / "b")}
    sizes, all_db, powers = [], {"a": [], "b": []}, {"a": [], "b": []}
    assert len(document["tensors"]) == 7
    for row in document["tensors"]:
        x, module = before[row["name"]], row["name"].removesuffix(".weight")
        for side, folder in (("a", nvfp4), ("b", mxfp4)):
            held, nmse = row["held"][side], nmse_of(x, values[side][row["name"]])
            assert held["nmse"] == pytest.approx(nmse, rel=1e-9)
            assert held["sqnr_db"] == pytest.approx(-10 * math.log10(nmse), rel=1e-9)
            assert held["output_error"] == pytest.approx(math.sqrt(nmse), rel=1e-9)
            assert held["bits_per_weight"] == nbits(folder, module) / x.size
            all_db[side].append(held["sqnr_db"])
            powers[side].append(nmse)
        difference = row["held"]["b"]["sqnr_db"] - row["held"]["a"]["sqnr_db"]
        assert row["held"]["b"]["difference_db"] == difference < -1
        assert row["held"]["a"]["difference_db"] == 0
        assert (row["best"], row["weights"], row["quantized_by"]) == (["a"], x.size, ["a", "b"])
        sizes.append(x.size)
    for side in "ab":
        own = document["artifacts"][side]
        assert own["sqnr_db_mean"] == pytest.approx(np.mean(all_db[side]))
        assert own["sqnr_db_min"] == min(all_db[side])
        assert own["worst"] == document["tensors"][all_db[side].index(min(all_db[side]))]["name"]
        assert own["output_error"] == pytest.approx(
            math.sqrt(np.average(powers[side], weights=sizes))
        )
        assert own["findings"] == []
    a, b = document["artifacts"].values()
    assert (a["formats"], a["dialect"], a["scale_rule"]) == (["nvfp4"], "modelopt", "mse")
    assert (b["formats"], b["scale_rule"]) == (["mxfp4"], "floor")
    assert b["bits_per_weight"] == 4.25
    assert a["bits_per_weight"] == pytest.approx(4.5 + 32 * 7 / sum(sizes))
    assert document["totals"] == {
        "compared": 7,
        "quantized_by_all": 7,
        "quantized_by_one": {"a": 0, "b": 0},
        "judged": 7,
        "shared": 0,
    }
    assert best_on(document) == {"a": 7, "b": 0}


def test_the_same_codes_in_another_dialect_are_equal(source, mxfp4, tmp_path):
    assert run("transcode", mxfp4, "-o", tmp_path / "quark", "--dialect", "quark", "-q").code == 0
    (tmp_path / "quark" / "quantization_config.json").unlink()  # somebody else's artifact has none
    (tmp_path / "quark" / ".fp4convert" / "plan.json").unlink()
    document = compare((mxfp4, tmp_path / "quark"), source)
    assert document["totals"]["shared"] == document["totals"]["judged"] == 7
    assert document["artifacts"]["b"]["difference_db_mean"] == 0
    assert all(row["best"] == ["a", "b"] for row in document["tensors"])
    quark = document["artifacts"]["b"]
    assert (quark["dialect"], quark["scale_rule"]) == ("quark", None)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_only_one_has_quantized_loses_nothing_in_the_other(is_first, source, nvfp4, tmp_path):
    part = make(source, tmp_path / "part", "mxfp4", "--exclude", "*.down_proj")
    pair = (part, nvfp4) if is_first else (nvfp4, part)
    kept, packed = ("a", "b") if is_first else ("b", "a")
    document = compare(pair, source)
    (row,) = (row for row in document["tensors"] if row["name"] == f"{DOWN}.weight")
    assert row["held"][kept] == {
        "stored": "bf16",
        "bits_per_weight": 16,
        "sqnr_db": None,
        "nmse": 0,
        "output_error": 0,
        "difference_db": None,
    }
    assert row["held"][packed]["stored"] == "nvfp4"
    assert (row["best"], row["quantized_by"]) == ([kept], [packed])
    assert row["held"][packed]["difference_db"] == (None if is_first else 0)
    totals = document["totals"]
    assert (totals["compared"], totals["quantized_by_all"]) == (7, 6)
    assert totals["quantized_by_one"] == {packed: 1, kept: 0}
    assert best_on(document) == {kept: 1, packed: 6}
    weights = {row["name"]: row["weights"] for row in document["tensors"]}
    down = weights.pop(f"{DOWN}.weight")
    expected = (4.25 * sum(weights.values()) + 16 * down) / (sum(weights.values()) + down)
    assert document["artifacts"][kept]["bits_per_weight"] == pytest.approx(expected)
    assert document["artifacts"][kept]["quantized"] == 6


def test_the_same_codes_in_two_dialects_are_alike(source, nvfp4, tmp_path):
    """ModelOpt stores the reciprocal of the global scale: figures differ by rounding alone."""
    other = make(source, tmp_path / "other", "nvfp4", "--dialect", "modelopt")
    document = compare((nvfp4, other), source)
    totals = document["totals"]
    assert totals["shared"] == totals["judged"] == totals["compared"] == 7
    errors = [side["output_error"] for side in document["artifacts"].values()]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


def test_an_error_says_which_artifact_it_is_of(source, nvfp4, mxfp4, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(nvfp4, broken)
    held = read_shard(broken / SECOND)
    kept = {name: held[name] for name in held if name != f"{DOWN}.weight_scale"}
    (broken / SECOND).write_bytes(pack_shard(kept))
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if file != SECOND or name in kept
    }
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    refused = run("compare", mxfp4, broken, nvfp4, "--source", source, "--json")
    assert refused.code == 2
    assert refused.json["error"]["message"].startswith("broken: ")


def test_what_stays_and_is_not_the_sources_is_told_and_judged_by_nobody(source, nvfp4, tmp_path):
    part = make(source, tmp_path / "part", "mxfp4", "--exclude", "*.down_proj")
    held = read_shard(part / SECOND)
    dtype, shape, data = held[f"{DOWN}.weight"]
    (part / SECOND).write_bytes(
        pack_shard({**held, f"{DOWN}.weight": (dtype, shape, bytes(2) + data[2:])})
    )
    document = compare((nvfp4, part), source)
    assert [(each["code"], each["tensor"]) for each in document["artifacts"]["b"]["findings"]] == [
        ("kept-differs", f"{DOWN}.weight")
    ]
    (row,) = (row for row in document["tensors"] if row["name"] == f"{DOWN}.weight")
    b = row["held"]["b"]
    assert (b["nmse"], b["output_error"], row["best"]) == (None, None, None)
    told = run("compare", nvfp4, part, "--source", source)
    assert told.code == 6
    assert told.out.splitlines()[-1] == "failed"
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
    document = compare((nvfp4, mxfp4), other)
    assert document["passed"] is False
    for side in "ab":
        codes = {
            each["tensor"]
            for each in document["artifacts"][side]["findings"]
            if each["code"] == "source-differs"
        }
        assert codes == {row["name"] for row in document["tensors"]}
    assert {row["best"] for row in document["tensors"]} == {None}
    told = run("compare", nvfp4, mxfp4, "--source", other)
    lines = told.out.splitlines()
    assert (told.code, lines[-1]) == (6, "failed")
    assert lines[0] == "nothing is ranked: an artifact has failed, as the findings say"
    assert "best" not in told.out
    assert sum("source-differs" in line for line in lines) <= 4, "alike findings are one line"
    assert any("of them): a: its values" in line for line in lines)


def test_with_a_calibration_the_better_one_is_that_for_its_inputs(source, mxfp4, tmp_path):
    """Rule importance gives weights away where inputs are small: less SQNR, and better answers."""
    file = calibrate(tmp_path / "c.safetensors", source, "diag")
    other = make(
        source, tmp_path / "i", "mxfp4", "--scale-rule", "importance", "--calibration", file
    )
    plain = make(source, tmp_path / "p", "mxfp4")
    document = compare((plain, other), source, "--calibration", file)
    assert document["inputs"] == "calibration, gram diag"
    lost = [side["output_error"] for side in document["artifacts"].values()]
    assert lost[0] > lost[1]
    assert document["artifacts"]["b"]["difference_db_mean"] < 0
    verified = run("verify", other, "--source", source, "--calibration", file, "--json").json[
        "tensors"
    ]
    errors = {entry["name"]: entry["output_error"] for entry in verified}
    assert {row["name"]: row["held"]["b"]["output_error"] for row in document["tensors"]} == errors
    assert best_on(document) == {"a": 0, "b": 0}
    words = "cannot be ranked without --text FILE: b is of rule importance"
    assert document["verdict"]["words"].startswith(words)
    told = run("compare", plain, other, "--source", source, "--calibration", file).out
    assert told.startswith(words)
    assert "best" not in told


def test_healthy_four_bits_are_measured_by_the_library_alone(
    source, nvfp4, mxfp4, tmp_path, monkeypatch
):
    monkeypatch.delattr(source_compare, "as_doubles")
    document = compare((nvfp4, mxfp4), source, "-q")
    before = {name: values_of(tensor) for name, tensor in read_folder(source).items()}
    for side, folder in (("a", nvfp4), ("b", mxfp4)):
        values = restored(folder, tmp_path / side)
        for row in document["tensors"]:
            nmse = nmse_of(before[row["name"]], values[row["name"]])
            found = (row["held"][side]["nmse"], row["held"][side]["output_error"])
            assert found == pytest.approx((nmse, math.sqrt(nmse)), rel=1e-6)


def test_random_inputs_rank_nobody(source, nvfp4, mxfp4, tmp_path):
    document = run("compare", nvfp4, mxfp4, "--source", source, "--json").json
    assert {row["best"] for row in document["tensors"]} == {None}
    assert (document["verdict"]["by"], document["totals"]["judged"]) == (None, 0)
    told = run("compare", nvfp4, mxfp4, "--source", source, "--report", tmp_path / "p.html").out
    assert told.startswith("cannot be ranked without --text FILE: inputs are random")
    assert "best" not in told


def test_a_person_sees_both_and_the_difference(source, nvfp4, mxfp4):
    document = compare((nvfp4, mxfp4), source)
    file = source.with_suffix(".safetensors")
    told = run("compare", nvfp4, mxfp4, "--source", source, "--calibration", file)
    lines = told.out.splitlines()
    shown = {line.partition("  ")[0]: line for line in lines}
    assert shown["dialect"].split() == ["dialect", "modelopt", "compressed-tensors"]
    assert shown["bits per weight"].split()[-1] == "4.250"
    for row in document["tensors"]:
        (line,) = (line for line in lines if line.startswith(f"{row['name']} "))
        assert line.split()[-1] == "a"
        assert f" {row['held']['a']['sqnr_db']:.2f} " in line
        assert f" {row['held']['b']['sqnr_db']:.2f} " in line
    assert lines[0] == "best by output error: a on 7, b on 0; several alike on 0"
    mean = document["artifacts"]["b"]["difference_db_mean"]
    assert f"SQNR of b - a: {mean:+.2f} dB on average" in lines


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
    words = ("compare", stacked, make(source, tmp_path / "t", "mxfp4"), "--source", source)
    document = run(*words, "--json").json
    errors = [
        [held["output_error"] for held in row["held"].values()] for row in document["tensors"]
    ]
    assert len(errors) == 6
    assert all(one == other > 0 for one, other in errors)
    assert {
        row["held"][side]["bits_per_weight"] for row in document["tensors"] for side in "ab"
    } == {4.25}


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
    out = make(source, tmp_path / "q", "nvfp4")
    hint = "inputs: gaussian (random; --calibration FILE for recorded ones)"
    assert hint in run("compare", out, out, "--source", source).out


def test_four_are_put_beside_each_other(source, nvfp4, mxfp4, tmp_path):
    """Each by what NumPy makes of its restored weights; the best by the least error."""
    fp8 = make(source, tmp_path / "fp8", "fp8")
    amax = make(source, tmp_path / "amax", "nvfp4", "--scale-rule", "amax")
    folders = dict(zip("abcd", (nvfp4, mxfp4, amax, fp8), strict=True))
    document = compare(list(folders.values()), source)
    before = {name: values_of(tensor) for name, tensor in read_folder(source).items()}
    values = {letter: restored(each, tmp_path / letter) for letter, each in folders.items()}
    for row in document["tensors"]:
        x = before[row["name"]]
        nmse = {letter: nmse_of(x, own[row["name"]]) for letter, own in values.items()}
        for letter, expected in nmse.items():
            assert row["held"][letter]["nmse"] == pytest.approx(expected, rel=1e-9)
        assert row["best"] == [min(nmse, key=nmse.__getitem__)] == ["d"]
    sides = document["artifacts"]
    formats = ("nvfp4", "mxfp4", "nvfp4", "fp8")
    assert [side["formats"] for side in sides.values()] == [[each] for each in formats]
    for letter, folder in folders.items():
        files = folder.glob("*.safetensors")
        assert sides[letter]["bytes"] == sum(file.stat().st_size for file in files)
    assert document["totals"]["quantized_by_one"] == dict.fromkeys("abcd", 0)


def test_a_doubted_one_leaves_the_others_their_verdict(source, nvfp4, mxfp4, tmp_path):
    other = {name: (d, s, bf16(*s, seed=99)) for name, (d, s, _) in read_folder(source).items()}
    config = json.loads((source / "config.json").read_text())
    foreign = make(write_single(tmp_path / "other", other, config), tmp_path / "f", "nvfp4")
    document = compare((foreign, nvfp4, mxfp4), source)
    assert document["passed"] is False
    assert best_on(document) == {"a": 0, "b": 7, "c": 0}
    told = run("compare", foreign, nvfp4, mxfp4, "--source", source)
    assert told.code == 6
    assert told.out.splitlines()[-1] == "failed"


def test_integers_beside_four_bits_lose_what_they_lose(tmp_path):
    """MLX's are no module of a dialect: once they counted as kept, with nothing lost."""
    source = write_llama(tmp_path / "m")
    mixed = make(source, tmp_path / "x", "mxfp4", "--dialect", "mlx", "--exclude", "*.down_proj")
    config = json.loads((mixed / "config.json").read_text())
    for key in {"quantization", "quantization_config"} & config.keys():
        config[key][DOWN] = {"bits": 4, "group_size": 32, "mode": "affine"}
    (mixed / "config.json").write_text(json.dumps(config))
    (file,) = (each for each in mixed.glob("*.safetensors") if f"{DOWN}.weight" in read_shard(each))
    shard = read_shard(file)
    kept = shard.pop(f"{DOWN}.weight")
    x = values_of(kept).astype(np.float32).reshape(*kept[1])
    groups = x.reshape(x.shape[0], -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scales = (high - low) / 15
    codes = np.clip(np.round((groups - low) / scales), 0, 15).astype(np.uint32)
    restored_down = (codes * scales + low).reshape(x.shape)
    shifts = 4 * np.arange(8, dtype=np.uint32)
    words = (codes.reshape(x.shape[0], -1, 8) << shifts).sum(-1, dtype=np.uint32)
    shard |= {
        f"{DOWN}.weight": ("U32", words.shape, words.tobytes()),
        f"{DOWN}.scales": ("F32", scales.shape[:2], scales.astype("<f4").tobytes()),
        f"{DOWN}.biases": ("F32", low.shape[:2], low.astype("<f4").tobytes()),
    }
    file.write_bytes(pack_shard(shard))
    document = compare((make(source, tmp_path / "n", "nvfp4"), mixed), source)
    (row,) = (row for row in document["tensors"] if row["name"] == f"{DOWN}.weight")
    assert row["held"]["b"]["nmse"] == pytest.approx(nmse_of(x, restored_down), rel=1e-4)


@pytest.mark.parametrize("count", [0, 1, 27])
def test_fewer_than_two_or_too_many_are_refused(count, source, nvfp4):
    refused = run("compare", *[nvfp4] * count, "--source", source, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "usage")


def test_a_record_with_odd_words_is_compared_all_the_same(source, nvfp4, mxfp4, tmp_path):
    copy = shutil.copytree(nvfp4, tmp_path / "odd")
    file = copy / "quantization_config.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "scale_rule": [1]}))
    told = run("compare", copy, mxfp4, "--source", source)
    assert told.code == 0, told
    assert compare((copy, mxfp4), source)["artifacts"]["a"]["scale_rule"] is None


def test_artifacts_of_one_name_are_told_apart(source, nvfp4, mxfp4, tmp_path):
    one, other = (
        shutil.copytree(folder, tmp_path / kind / "M-FP4")
        for kind, folder in (("n", nvfp4), ("m", mxfp4))
    )
    sides = compare((one, other), source)["artifacts"]
    assert [side["artifact"] for side in sides.values()] == ["M-FP4 (a)", "M-FP4 (b)"]


def test_many_artifacts_are_below_each_other_on_a_terminal(source, nvfp4, mxfp4):
    told = run("compare", *[nvfp4, mxfp4] * 4, "--source", source)
    lines = told.out.splitlines()
    assert [line[0] for line in lines[2:10]] == list("abcdefgh")
    assert max(map(len, lines[:10])) <= 100


def test_an_address_with_a_revision_is_not_taken_for_all(source, nvfp4):
    address = "https://huggingface.co/o/A/tree/v1"
    refused = run("compare", address, nvfp4, "--source", source, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "usage")
    assert "--revision is that of all artifacts" in refused.json["error"]["message"]
