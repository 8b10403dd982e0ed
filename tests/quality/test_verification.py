"""verify: every lie in the bytes is found, and its numbers are those of plain NumPy in float64."""

import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from artifacts import quantize
from checkpoints import (
    FIRST,
    LAYER,
    SECOND,
    bf16,
    read_folder,
    read_shard,
    run,
    values_of,
    weight,
    write_llama,
    write_single,
)
from rewriting import rewrite

from fp4convert.quality.odd_places import OddPlaces

ATTENTION, DOWN = f"{LAYER}.self_attn", f"{LAYER}.mlp.down_proj"
TARGETS = [("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")]
GLOBAL = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


@pytest.fixture
def artifact(source, tmp_path):
    def make(format: str = "nvfp4", dialect: str = "compressed-tensors") -> Path:
        out = tmp_path / "artifact"
        quantize(source, out, "--format", format, "--dialect", dialect)
        return out

    return make


def verify(folder: Path, *options: object) -> dict:
    outcome = run("verify", folder, *options, "--json")
    assert outcome.code == (0 if outcome.json["passed"] else 6), outcome
    return outcome.json


def errors_of(document: dict) -> set[tuple[str, str | None]]:
    errors = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert document["passed"] is not bool(errors)
    return {(finding["code"], finding["tensor"]) for finding in errors}


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_a_sound_artifact_passes(format, dialect, source, artifact):
    folder = artifact(format, dialect)
    document = verify(folder)
    checked, usual = document.pop("checked"), document.pop("usual")
    assert (usual["db"], usual["low"]) == {"nvfp4": (21.8, 20.0), "mxfp4": (18.9, 18.0)}[format]
    assert document == {
        "tensors": [],
        "summary": {"sqnr_db_min": None, "sqnr_db_mean": None, "nmse": None, "worst": None},
        "findings": [],
        "passed": True,
        "recorded": json.loads((folder / "quantization_report.json").read_text())["summary"],
        "verdict": None,
    }
    measured = verify(folder, "--source", source)
    assert (measured["findings"], measured["verdict"]) == ([], None)
    told = run("verify", folder, "--source", source).out
    assert f"usually has {usual['db']:g} dB; below {usual['low']:g} dB is low" in told
    assert min(checked["files"], checked["modules"]) > 0
    assert checked == measured["checked"] | {"tensors": 0, "source": None}
    assert measured["checked"]["tensors"] == len(measured["tensors"]) > 0
    assert measured["checked"]["source"] == source.name


SUMMED = 7e-7


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_the_numbers_are_those_of_numpy(format, dialect, source, artifact, tmp_path):
    """But for groups of 256 squares, which are added in float32: kernels/compare.c."""
    folder = artifact(format, dialect)
    assert run("dequantize", folder, "-o", tmp_path / "plain", "--dtype", "fp32").code == 0
    before, after = read_folder(source), read_folder(tmp_path / "plain")
    document = verify(folder, "--source", source)
    assert len(document["tensors"]) == 7
    noises, signals, all_db = [], [], []
    for entry in document["tensors"]:
        x, y = values_of(before[entry["name"]]).ravel(), values_of(after[entry["name"]]).ravel()
        noise, signal = ((x - y) ** 2).sum(), (x**2).sum()
        assert " ".join(entry) == "name sqnr_db mse max_abs cosine saturated zero histogram"
        assert entry["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=SUMMED)
        assert entry["mse"] == pytest.approx(noise / x.size, rel=SUMMED)
        assert entry["max_abs"] == np.abs(x - y).max()
        assert entry["cosine"] == pytest.approx(x @ y / math.sqrt(signal * (y @ y)), rel=SUMMED)
        noises.append(noise)
        signals.append(signal)
        all_db.append(10 * math.log10(signal / noise))
    assert document["summary"] == {
        "sqnr_db_min": pytest.approx(min(all_db), rel=SUMMED),
        "sqnr_db_mean": pytest.approx(sum(all_db) / 7, rel=SUMMED),
        "nmse": pytest.approx(sum(noises) / sum(signals), rel=SUMMED),
        "worst": min(zip(all_db, (entry["name"] for entry in document["tensors"]), strict=True))[1],
    }
    assert 15 < min(all_db) < max(all_db) < 25


def test_a_matrix_worked_out_by_hand(tmp_path):
    """One block: amax 6 gives the multiplier 6/2688, block scale 448, step 1.0; 0.7 becomes 0.5,
    everything else is exact.
    """
    values = np.array([6, -4, 3, 2, 1.5, 1, 0.5, 0.7, 0, -0.5, -1, -1.5, -2, -3, 4, -6], np.float32)
    source = write_single(tmp_path / "m", {"x.o_proj.weight": ("F32", (1, 16), values.tobytes())})
    quantize(source, tmp_path / "out", "--dialect", "modelopt")
    stored = read_folder(tmp_path / "out")
    assert stored["x.o_proj.weight_scale"][2] == b"\x7e"
    assert stored["x.o_proj.weight"][2] == bytes([0xE7, 0x45, 0x23, 0x11, 0x90, 0xBA, 0xDC, 0xF6])
    (entry,) = verify(tmp_path / "out", "--source", source)["tensors"]
    assert entry["max_abs"] == pytest.approx(0.2, rel=1e-6)
    assert entry["mse"] == pytest.approx(0.04 / 16, rel=1e-5)


def test_gates(source, artifact):
    folder = artifact()
    least = verify(folder, "--source", source)["summary"]["sqnr_db_min"]
    assert run("verify", folder, "--source", source, "--min-sqnr", least - 0.01).code == 0
    failed = verify(folder, "--source", source, "--min-sqnr", least + 0.01)
    assert {code for code, _ in errors_of(failed)} == {"sqnr-low"}
    assert len(errors_of(verify(folder, "--source", source, "--min-sqnr", 90))) == 7
    assert run("verify", folder, "--source", source, "--max-nmse", 0.5).code == 0
    failed = verify(folder, "--source", source, "--max-nmse", 1e-6)
    assert {code for code, _ in errors_of(failed)} == {"nmse-high"}


GATES = {"--min-sqnr": 20, "--max-nmse": 0.01}


def test_a_gate_that_measured_nothing_is_not_met(source, tmp_path):
    """Nothing is quantized, as where somebody gates the wrong folder."""
    folder = tmp_path / "kept"
    quantize(source, folder, "--exclude", "*_proj", "--include", "lm_head")
    other = write_single(tmp_path / "other", {"x.norm.weight": ("BF16", (64,), bytes(128))})
    for option, value in GATES.items():
        found = verify(folder, "--source", other, option, value)["findings"]
        (told,) = (finding for finding in found if finding["code"] == "nothing-measured")
        assert (told["level"], told["detail"].partition(":")[0]) == ("error", option)
    assert "nothing-measured" not in {
        code for code, _ in errors_of(verify(folder, "--source", other))
    }
    assert verify(folder, "--source", source, "--min-sqnr", 5)["passed"]


@pytest.mark.parametrize(
    ("option", "value", "step"),
    [
        ("--max-output-error", "8", "For 8 %: --max-output-error 0.08"),
        ("--max-output-error", "-0.1", "Give 0 or more."),
        ("--max-nmse", "-1", "Give 0 or more."),
    ],
)
def test_a_gate_that_cannot_be_met_or_missed_is_bad_usage(option, value, step, source, artifact):
    refused = run("verify", artifact(), "--source", source, option, value, "--json")
    assert (refused.code, refused.json["error"]["code"], refused.json["error"]["next"]) == (
        2,
        "bad-gate",
        step,
    )


@pytest.mark.parametrize("option", ["--min-sqnr", "--max-nmse"])
def test_a_gate_without_a_source_is_bad_usage(option, artifact):
    outcome = run("verify", artifact(), option, "1", "--json")
    assert (outcome.code, outcome.json["error"]["exit"]) == (2, 2)
    assert "--source" in outcome.json["error"]["next"]
    assert outcome.json["error"]["message"] == f"{option} needs the original weights"


@pytest.mark.parametrize("data", [bytes(4096), b"\x80\x3f" * 2048])
def test_what_loses_nothing_has_no_sqnr_and_passes_every_gate(data, tmp_path):
    source = write_single(tmp_path / "m", {"x.o_proj.weight": ("BF16", (32, 64), data)})
    quantize(source, tmp_path / "out", "--format", "mxfp4")
    document = verify(tmp_path / "out", "--source", source, "--min-sqnr", 300, "--max-nmse", 0)
    (entry,) = document["tensors"]
    assert (entry["sqnr_db"], entry["mse"], entry["max_abs"]) == (None, 0, 0)
    assert document["passed"]


@pytest.mark.parametrize("file", [FIRST, "tokenizer.json", "config.json"])
def test_a_flipped_byte_is_found_by_its_hash(file, tmp_path):
    source = write_llama(tmp_path / "source", **{"tokenizer.json": b'{"a": 1}'})
    folder = tmp_path / "artifact"
    quantize(source, folder)
    data = bytearray((folder / file).read_bytes())
    at = data.index(b"llama") if file == "config.json" else len(data) - 2
    data[at] ^= 1
    (folder / file).write_bytes(data)
    document = verify(folder)
    assert ("hash-mismatch", None) in errors_of(document)
    assert any(file in finding["detail"] for finding in document["findings"])


def test_a_missing_file_is_found(tmp_path):
    source = write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})
    quantize(source, tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").unlink()
    assert ("file-missing", None) in errors_of(verify(tmp_path / "a"))


@pytest.mark.parametrize("name", ["a" * 999, "a/" * 3000, "\0", "config.json/a", "", ".fp4convert"])
def test_a_recorded_name_that_no_file_has_is_found(name, tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "a"
    quantize(source, out)
    record = json.loads((out / "quantization_config.json").read_text())
    record["files"][name] = "0" * 64
    (out / "quantization_config.json").write_text(json.dumps(record))
    found = run("verify", out, "--json")
    assert found.code == 6
    assert ("file-missing", None) in errors_of(found.json)


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_a_nan_scale_byte_is_found(format, dialect, source, artifact):
    folder = artifact(format, dialect)
    name = f"{DOWN}.weight_scale"
    data = bytearray(read_shard(folder / SECOND)[name][2])
    data[7] = 0xFF if format == "mxfp4" else 0x7F
    rewrite(folder, SECOND, name, bytes(data))
    assert ("scale-not-finite", DOWN) in errors_of(verify(folder))
    measured = verify(folder, "--source", source)
    entry = next(entry for entry in measured["tensors"] if entry["name"] == f"{DOWN}.weight")
    assert entry["sqnr_db"] is None
    assert ("not-measurable", f"{DOWN}.weight") in errors_of(measured)


@pytest.mark.parametrize("dialect", GLOBAL)
def test_a_negative_block_scale_is_found(dialect, artifact):
    folder = artifact("nvfp4", dialect)
    name = f"{DOWN}.weight_scale"
    data = read_shard(folder / SECOND)[name][2]
    rewrite(folder, SECOND, name, bytes([data[0] | 0x80]) + data[1:])
    assert ("scale-negative", DOWN) in errors_of(verify(folder))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dialect", GLOBAL)
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.inf, math.nan])
def test_an_impossible_global_scale_is_found(value, dialect, source, artifact):
    folder = artifact("nvfp4", dialect)
    rewrite(folder, SECOND, f"{DOWN}.{GLOBAL[dialect]}", struct.pack("<f", value))
    assert any(
        tensor is not None and tensor.startswith(DOWN) for _, tensor in errors_of(verify(folder))
    )
    assert run("verify", folder, "--source", source).code == 6


@pytest.mark.parametrize("dialect", GLOBAL)
@pytest.mark.parametrize("leaf", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_global_scales_that_differ_inside_a_group_are_found(leaf, dialect, artifact):
    folder, name = artifact("nvfp4", dialect), f"{LAYER}.{leaf}.{GLOBAL[dialect]}"
    file = FIRST if "q_proj" in leaf else SECOND
    (value,) = struct.unpack("<f", read_shard(folder / file)[name][2])
    rewrite(folder, file, name, struct.pack("<f", value * 1.5))
    codes = dict(errors_of(verify(folder)))
    assert codes["group-scales-differ"].startswith(f"{LAYER}.{leaf.partition('.')[0]}.")


def test_a_kept_tensor_that_changed_is_found(source, artifact):
    folder = artifact()
    data = bytearray(read_shard(folder / SECOND)["lm_head.weight"][2])
    data[0] ^= 1
    rewrite(folder, SECOND, "lm_head.weight", bytes(data))
    (folder / "quantization_config.json").unlink()
    (folder / ".fp4convert" / "plan.json").unlink()
    assert errors_of(verify(folder)) == set()
    assert errors_of(verify(folder, "--source", source)) == {("kept-differs", "lm_head.weight")}


def test_an_artifact_without_hashes_says_so(artifact):
    folder = artifact()
    (folder / "quantization_config.json").unlink()
    (folder / ".fp4convert" / "plan.json").unlink()
    document = verify(folder)
    assert [(finding["level"], finding["code"]) for finding in document["findings"]] == [
        ("note", "no-hashes")
    ]


def test_the_model_card_may_be_written_by_anybody(artifact):
    folder = artifact()
    (folder / "README.md").write_text("# Mine")
    assert verify(folder)["findings"] == []


def test_another_source_is_found(artifact, tmp_path):
    shards = {"x.o_proj.weight": weight(), f"{DOWN}.weight": weight(0, 64, 64)}
    errors = errors_of(verify(artifact(), "--source", write_single(tmp_path / "other", shards)))
    assert ("source-differs", DOWN) in errors
    assert ("source-differs", f"{ATTENTION}.q_proj") in errors
    assert ("kept-missing", "x.o_proj.weight") in errors


def test_wrong_codes_are_measured(source, artifact):
    """Every code of a tensor negated: SQNR is -6 dB, where noise is four times the signal."""
    folder = artifact()
    name = f"{DOWN}.weight_packed"
    data = bytes(byte ^ 0x88 for byte in read_shard(folder / SECOND)[name][2])
    rewrite(folder, SECOND, name, data)
    document = verify(folder, "--source", source, "--min-sqnr", 10)
    entry = next(entry for entry in document["tensors"] if entry["name"] == f"{DOWN}.weight")
    assert entry["sqnr_db"] == pytest.approx(-6, abs=0.3)
    assert entry["cosine"] < -0.98
    assert ("sqnr-low", f"{DOWN}.weight") in errors_of(document)


def test_a_row_that_gptq_moved_still_holds_the_sources_row():
    """Through a quantized prefix, a row of SmolLM2's o_proj moved by ten times its power."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 576))
    moved = rng.standard_normal(576)
    moved -= x[5] * (moved @ x[5]) / (x[5] @ x[5])
    moved *= math.sqrt(10 * (x[5] @ x[5]) / (moved @ moved))
    harms = {"": x[5] + moved, "zeros": 0 * x[5], "other": x[4] * 2, "too large": 4 * x[5] + moved}
    for harm, row in harms.items():
        y = x.copy()
        y[5] = row
        for is_placed in (True, False):
            places = OddPlaces(576, 16, is_placed)
            places.add(0, x.ravel(), (x - y).ravel())
            is_odd = bool(harm) or not is_placed
            assert ("1 row (the first is row 5)" in places.describe()) is is_odd, (harm, is_placed)


def test_a_moved_row_of_another_tools_artifact_may_be_gptqs(tmp_path):
    """llm-compressor's GPTQ moved a row of SmolLM2's down_proj by 1.1 times its power."""
    original, moved = weight(1), values_of(weight(1))
    moved[5] += 1.1 * np.where(np.arange(64) % 2, moved[5], -moved[5])[::-1]
    shifted = ("F32", original[1], moved.astype("<f4").tobytes())
    source = write_single(tmp_path / "source", {f"{DOWN}.weight": original})
    folder = tmp_path / "artifact"
    quantize(write_single(tmp_path / "moved", {f"{DOWN}.weight": shifted}), folder)
    assert errors_of(verify(folder, "--source", source)) == {("source-differs", f"{DOWN}.weight")}
    (folder / "quantization_config.json").unlink()
    shutil.rmtree(folder / ".fp4convert")
    assert errors_of(verify(folder, "--source", source)) == set()


@pytest.mark.parametrize(
    ("module", "tensor"), [("", None), (DOWN, DOWN)], ids=["everywhere", "in one"]
)
def test_swapped_nibbles_are_one_error(module, tensor, source, artifact):
    """Beside the hash of the file: what follows from them is no error of its own."""
    folder = artifact()
    for shard in sorted(folder.glob("*.safetensors")):
        for name, (_, _, data) in read_shard(shard).items():
            if name.endswith(".weight_packed") and name.startswith(module):
                rewrite(folder, shard.name, name, bytes(b >> 4 | (b & 15) << 4 for b in data))
    document = verify(folder, "--source", source)
    found = errors_of(document)
    assert {each for each in found if each[0] != "hash-mismatch"} == {("nibble-order", tensor)}
    worst = min(entry["sqnr_db"] for entry in document["tensors"])
    assert worst < 0, "the numbers tell it all the same"


def test_a_gate_holds_where_nibbles_are_swapped(source, artifact):
    folder = artifact()
    name = f"{DOWN}.weight_packed"
    data = bytes(b >> 4 | (b & 15) << 4 for b in read_shard(folder / SECOND)[name][2])
    rewrite(folder, SECOND, name, data)
    found = errors_of(verify(folder, "--source", source, "--min-sqnr", 5))
    assert ("sqnr-low", f"{DOWN}.weight") in found


def test_other_damage_is_told_beside_swapped_nibbles(source, artifact):
    """One module is swapped, another is negated: each has its own error."""
    folder = artifact()
    down, query = f"{DOWN}.weight_packed", f"{ATTENTION}.q_proj.weight_packed"
    swapped = bytes(b >> 4 | (b & 15) << 4 for b in read_shard(folder / SECOND)[down][2])
    rewrite(folder, SECOND, down, swapped)
    rewrite(folder, FIRST, query, bytes(b ^ 0x88 for b in read_shard(folder / FIRST)[query][2]))
    found = errors_of(verify(folder, "--source", source))
    assert ("nibble-order", DOWN) in found
    assert ("source-differs", f"{ATTENTION}.q_proj.weight") in found
    assert ("source-differs", f"{DOWN}.weight") not in found


def test_config_without_its_record_is_found(artifact):
    folder = artifact()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert {code for code, _ in errors_of(verify(folder))} == {"records-disagree", "hash-mismatch"}


def test_stacks_are_read_as_they_were_when_the_artifact_was_made(tmp_path):
    """No recipe knows this model: our record says what a person said."""
    tensors = {
        f"{LAYER}.mlp.experts.gate_up_proj": ("BF16", (2, 64, 96), bf16(2, 64, 96)),
        f"{LAYER}.mlp.experts.down_proj": ("BF16", (2, 48, 64), bf16(2, 48, 64)),
    }
    source, out = write_single(tmp_path / "m", tensors, {"model_type": "x"}), tmp_path / "out"
    flags = ("--stack-order", "in_out", "--stack-rows", "interleaved")
    quantize(source, out, *flags)
    found = run("verify", out, "--source", source, "--json")
    assert (found.code, len(found.json["tensors"])) == (0, 6)
    assert run("inspect", out, "--source", source).code == 0
    other = tmp_path / "other"
    assert run("transcode", out, "-o", other, "--dialect", "modelopt").code == 0
    assert run("verify", other, "--source", source).code == 0


def test_weights_of_any_size_are_sound_beside_their_source(tmp_path):
    """2^19 is no size of weights, and its reciprocal is one: only the source tells that it is
    meant.
    """
    values = np.float32(np.random.default_rng(0).standard_normal((64, 64)))
    values[3, 5] = 2.0**19
    source = write_single(
        tmp_path / "source", {"a.weight": ("F32", (64, 64), values.tobytes())}, {"model_type": "x"}
    )
    quantize(source, tmp_path / "out")
    assert errors_of(verify(tmp_path / "out")) == {("global-scale-reciprocal", "a")}
    assert errors_of(verify(tmp_path / "out", "--source", source)) == set()
    negated = {"a.weight": ("F32", (64, 64), (-values).tobytes())}
    other = write_single(tmp_path / "other", negated, {"model_type": "x"})
    found = {code for code, _ in errors_of(verify(tmp_path / "out", "--source", other))}
    assert found == {"global-scale-reciprocal", "scale-factor", "source-differs", "report-differs"}


def test_weights_beside_the_shards_that_the_record_does_not_name_are_an_error(artifact):
    folder = artifact()
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    assert errors_of(verify(folder)) == {("file-unrecorded", None)}


def test_a_shard_that_the_package_safetensors_refuses_is_found(artifact, monkeypatch):
    """Where its reader is stricter than ours; by verify, and by inspect --full alone."""
    out, found = artifact(), ["safetensors-differs"]
    assert run("inspect", out, "--full").code == 0

    def refuse(path, framework):
        raise safetensors.SafetensorError("not as I like it")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    findings = verify(out)["findings"]
    assert [finding["code"] for finding in findings] == found * 2
    assert findings[0]["detail"] == (
        f"{FIRST} is refused by the package safetensors: not as I like it"
    )
    told = run("inspect", out, "--full", "--json")
    assert (told.code, [finding["code"] for finding in told.json["findings"]]) == (6, found * 2)
    assert run("inspect", out).code == 0
