"""quantization_report.json: what it says of every tensor, held to outside judges; how it comes
about; who sees that it lies.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import read_folder, run, values_of, weight, write_llama, write_single

REPORT = "quantization_report.json"
ENTRY = {
    *("name", "module", "format", "against", "source_dtype", "elements"),
    *("mse", "sqnr_db", "max_abs", "cosine", "nmse"),
}
SHARES = {"clipped", "saturated", "zero", "histogram"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source")


def quantize(source: Path, out: Path, *options: object) -> dict:
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out, *options, "--json", "-q")
    assert outcome.code == 0, outcome
    return outcome.json


def report_of(folder: Path) -> dict:
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def verify(folder: Path, *options: object) -> dict:
    outcome = run("verify", folder, *options, "--json")
    assert outcome.code == (0 if outcome.json["passed"] else 6), outcome
    return outcome.json


def found_by(document: dict) -> set[tuple[str, str, str | None]]:
    return {
        (finding["level"], finding["code"], finding["tensor"]) for finding in document["findings"]
    }


def rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    document = report_of(folder)
    change(document)
    (folder / REPORT).write_text(json.dumps(document))


def decompressed(folder: Path, module: str, columns: int) -> np.ndarray:
    """The values of a module of an artifact by compressed-tensors' own helpers and PyTorch's
    float8.
    """
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from safetensors import safe_open

    def read(leaf: str):  # type: ignore[no-untyped-def]
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as shard:
                if f"{module}.{leaf}" in list(shard.keys()):
                    return shard.get_tensor(f"{module}.{leaf}")
        return None

    packed, scales, divisor = map(read, ("weight_packed", "weight_scale", "weight_global_scale"))
    codes = unpack_fp4_from_uint8(packed, len(packed), columns, dtype=torch.float32)
    steps = torch.exp2(scales.float() - 127) if divisor is None else scales.float() / divisor
    values = codes.reshape(len(packed), scales.shape[1], -1) * steps[..., None]
    return np.asarray(values.double().numpy()).ravel()


@pytest.mark.engine
@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "amax"), ("mxfp4", "even")])
def test_the_numbers_are_those_of_compressed_tensors(fmt: str, rule: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    options = ("--format", fmt, "--scale-rule", rule, "-o", tmp_path / "out", "-q")
    assert run("quantize", source, *options).code == 0
    before = read_folder(source)
    report = report_of(tmp_path / "out")
    assert {entry["name"] for entry in report["tensors"]} == {
        name for name in before if name.endswith("_proj.weight")
    }
    for entry in report["tensors"]:
        assert entry.keys() == ENTRY | SHARES
        x = values_of(before[entry["name"]])
        x, y = x.ravel(), decompressed(tmp_path / "out", entry["module"], x.shape[1])
        noise, signal = ((x - y) ** 2).sum(), (x**2).sum()
        assert entry["elements"] == x.size
        assert entry["mse"] == pytest.approx(noise / x.size, rel=1e-6)
        assert entry["nmse"] == pytest.approx(noise / signal, rel=1e-6)
        assert entry["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
        assert entry["max_abs"] == pytest.approx(np.abs(x - y).max(), rel=1e-5)
        assert entry["cosine"] == pytest.approx(x @ y / math.sqrt(signal * (y @ y)), abs=1e-6)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_codes_are_those_of_the_artifact(dialect: str, source: Path, tmp_path: Path) -> None:
    """Counted from the stored bytes: a nibble at a time."""
    quantize(source, tmp_path / "out", "--dialect", dialect)
    stored = read_folder(tmp_path / "out")
    leaf = "weight_packed" if dialect == "compressed-tensors" else "weight"
    for entry in report_of(tmp_path / "out")["tensors"]:
        counted = Counter(
            code
            for byte in stored[f"{entry['module']}.{leaf}"][2]
            for code in (byte & 15, byte >> 4)
        )
        assert entry["histogram"] == [counted[code] for code in range(16)]
        assert entry["saturated"] == (counted[7] + counted[15]) / entry["elements"]
        assert entry["zero"] == (counted[0] + counted[8]) / entry["elements"]


def test_the_summary_is_that_of_the_tensors(source: Path, tmp_path: Path) -> None:
    document = quantize(source, tmp_path / "out", "--scale-rule", "amax")
    report = report_of(tmp_path / "out")
    by_sqnr = {entry["sqnr_db"]: entry["name"] for entry in report["tensors"]}
    noise, signal = (
        sum(
            entry["mse"] * entry["elements"] / (entry["nmse"] if is_signal else 1)
            for entry in report["tensors"]
        )
        for is_signal in (False, True)
    )
    assert document["fidelity"] == report["summary"]
    assert report["summary"] == {
        "sqnr_db_min": min(by_sqnr),
        "sqnr_db_mean": pytest.approx(sum(by_sqnr) / 7),
        "nmse": pytest.approx(noise / signal),
        "worst": by_sqnr[min(by_sqnr)],
    }
    head = {"format": "nvfp4", "scale_rule": "amax", "method": "rtn", "taken_over": 0}
    assert {key: report[key] for key in head} == head
    assert report["producer"]["name"] == "fp4convert"


def test_fp8_modules_are_measured_too(source: Path, tmp_path: Path) -> None:
    """By PyTorch's own float8; their codes have no histogram of sixteen."""
    import torch

    recipe = tmp_path / "mixed.toml"
    recipe.write_text(
        'about = "x"\nbase = "default"\n[[format]]\nmodules = ["*.mlp.*"]\nformat = "fp8"\n'
    )
    quantize(source, tmp_path / "out", "--recipe", recipe)
    before, stored = read_folder(source), read_folder(tmp_path / "out")
    entries = {entry["name"]: entry for entry in report_of(tmp_path / "out")["tensors"]}
    mixed = {name: entry for name, entry in entries.items() if entry["format"] == "fp8"}
    assert len(mixed) == 3
    for name, entry in mixed.items():
        dtype, shape, data = stored[name]
        assert dtype == "F8_E4M3"
        codes = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).reshape(shape).double()
        scales = torch.tensor(values_of(stored[f"{name}_scale"])).double().reshape(-1, 1)
        x = torch.tensor(values_of(before[name])).double()
        noise = ((x - codes * scales) ** 2).sum().item()
        assert entry["mse"] == pytest.approx(noise / x.numel(), rel=1e-6)
        assert entry["sqnr_db"] > 30
        assert (entry["histogram"], entry["saturated"], entry["zero"]) == (None, None, None)
    assert verify(tmp_path / "out", "--source", source)["findings"] == []


def test_what_is_taken_over_is_counted_and_not_listed(source: Path, tmp_path: Path) -> None:
    """A source that is MXFP4 already: nothing is rounded, and there is no report."""
    assert run("quantize", source, "--format", "mxfp4", "-o", tmp_path / "first", "-q").code == 0
    document = quantize(tmp_path / "first", tmp_path / "second")
    assert "fidelity" not in document
    assert not (tmp_path / "second" / REPORT).exists()


def test_any_number_of_workers_writes_the_same_report(source: Path, tmp_path: Path) -> None:
    texts = set()
    for workers in (1, 2, 5):
        quantize(source, tmp_path / f"out{workers}", "--workers", workers)
        texts.add((tmp_path / f"out{workers}" / REPORT).read_bytes())
    assert len(texts) == 1


def test_parts_that_are_merged_write_the_report_of_one(source: Path, tmp_path: Path) -> None:
    whole = quantize(source, tmp_path / "whole")
    for index in (0, 1):
        part = quantize(source, tmp_path / "parts", "--shard-index", index, "--num-shards", 2)
        assert "fidelity" not in part
        assert not (tmp_path / "parts" / REPORT).exists()
    merged = run("merge", tmp_path / "parts", "--json").json
    assert (merged["digest"], merged["fidelity"]) == (whole["digest"], whole["fidelity"])
    assert (tmp_path / "parts" / REPORT).read_bytes() == (tmp_path / "whole" / REPORT).read_bytes()


def test_a_run_that_goes_on_keeps_what_was_measured_before(source: Path, tmp_path: Path) -> None:
    whole = quantize(source, tmp_path / "whole")
    quantize(source, tmp_path / "out", "--shard-index", 0, "--num-shards", 2)
    assert quantize(source, tmp_path / "out")["fidelity"] == whole["fidelity"]
    assert (tmp_path / "out" / REPORT).read_bytes() == (tmp_path / "whole" / REPORT).read_bytes()


def test_a_finished_folder_tells_it_again(source: Path, tmp_path: Path) -> None:
    first = quantize(source, tmp_path / "out")
    (tmp_path / "out" / REPORT).unlink()
    again = quantize(source, tmp_path / "out")
    assert (again["digest"], again["fidelity"]) == (first["digest"], first["fidelity"])
    assert (tmp_path / "out" / REPORT).is_file()


def test_another_plan_leaves_no_report_of_the_one_before(source: Path, tmp_path: Path) -> None:
    """With nothing left to round, the report of the first plan goes."""
    quantize(source, tmp_path / "packed")
    quantize(source, tmp_path / "out")
    quantize(tmp_path / "packed", tmp_path / "out", "--force")
    assert not (tmp_path / "out" / REPORT).exists()


def test_the_report_changes_no_digest_and_stands_in_no_record(source: Path, tmp_path: Path) -> None:
    document = quantize(source, tmp_path / "out")
    rewrite(tmp_path / "out", lambda report: report.update(producer=None))
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert REPORT not in record["files"]
    assert quantize(source, tmp_path / "out")["digest"] == document["digest"]
    assert report_of(tmp_path / "out")["producer"] is not None


def test_a_report_in_the_source_does_not_travel(source: Path, tmp_path: Path) -> None:
    (source / REPORT).write_text("{}")
    quantize(source, tmp_path / "out")
    assert len(report_of(tmp_path / "out")["tensors"]) == 7
    assert run("dequantize", tmp_path / "out", "-o", tmp_path / "back").code == 0
    assert not (tmp_path / "back" / REPORT).exists()


def test_verify_and_inspect_show_what_was_recorded(source: Path, tmp_path: Path) -> None:
    recorded = quantize(source, tmp_path / "out")["fidelity"]
    assert verify(tmp_path / "out")["recorded"] == recorded
    assert run("inspect", tmp_path / "out", "--json").json["fidelity"] == recorded
    words = (
        f"SQNR {recorded['sqnr_db_mean']:.2f} dB on average, lowest "
        f"{recorded['sqnr_db_min']:.2f} dB ({recorded['worst']})"
    )
    shown = run("verify", tmp_path / "out").out.splitlines()
    assert f"recorded when it was quantized: {words}" in shown
    assert f"recorded        {words}" in run("inspect", tmp_path / "out").out.splitlines()
    (tmp_path / "out" / REPORT).unlink()
    assert verify(tmp_path / "out")["recorded"] is None
    assert "fidelity" not in run("inspect", tmp_path / "out", "--json").json


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "plain", "mlx", "comfy"])
def test_an_honest_report_agrees_in_every_dialect(
    dialect: str, source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "out", "--dialect", dialect)
    assert verify(tmp_path / "out")["findings"] == []
    document = verify(tmp_path / "out", "--source", source)
    assert document["findings"] == []
    histograms = {
        entry["name"]: entry["histogram"] for entry in report_of(tmp_path / "out")["tensors"]
    }
    assert {tensor["name"]: tensor["histogram"] for tensor in document["tensors"]} == histograms


def test_codes_that_the_report_did_not_count_are_found(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out")

    def move_one(report: dict) -> None:
        report["tensors"][3]["histogram"][2] += 1
        report["tensors"][3]["histogram"][5] -= 1

    rewrite(tmp_path / "out", move_one)
    module = report_of(tmp_path / "out")["tensors"][3]["module"]
    for options in ((), ("--source", source)):
        document = verify(tmp_path / "out", *options)
        assert found_by(document) == {("error", "report-differs", module)}
        assert not document["passed"]
        assert "2 of 16 codes differ" in document["findings"][0]["detail"]


@pytest.mark.parametrize(("key", "factor"), [("mse", 1 + 1e-4), ("mse", 0.0), ("max_abs", 0.99)])
def test_numbers_that_were_not_measured_are_found_with_the_source(
    key: str, factor: float, source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "out")
    entry = report_of(tmp_path / "out")["tensors"][0]
    rewrite(
        tmp_path / "out", lambda report: report["tensors"][0].update({key: factor * entry[key]})
    )
    assert verify(tmp_path / "out")["findings"] == []
    found = found_by(verify(tmp_path / "out", "--source", source))
    assert found == {("error", "report-differs", entry["module"])}


def test_a_report_that_is_none_is_found(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out")
    whole = report_of(tmp_path / "out")
    entry = whole["tensors"][0]
    changed = (
        {"tensors": [{key: value for key, value in entry.items() if key != "mse"}]},
        {"tensors": [{**entry, "histogram": [1, 2]}]},
        {"summary": {**whole["summary"], "sqnr_db_min": None}},
    )
    damaged = [json.dumps({**whole, **change}).encode() for change in changed]
    for text in (b"", b"{", b"[]", b"7", b'{"summary": 1}', b"\xff", b"[" * 9999, *damaged):
        (tmp_path / "out" / REPORT).write_bytes(text)
        assert found_by(verify(tmp_path / "out")) == {("error", "report-damaged", None)}
        assert run("inspect", tmp_path / "out").code == 0


def test_a_report_beside_an_artifact_of_others_is_not_ours_to_judge(
    source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "out")
    (tmp_path / "out" / "quantization_config.json").unlink()
    (tmp_path / "out" / REPORT).write_text("theirs")
    document = verify(tmp_path / "out")
    assert document["recorded"] is None
    assert {code for _, code, _ in found_by(document)} <= {"no-hashes", "unfinished"}


def test_weights_rounded_through_fp8_are_not_held_against_the_source(
    source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "out", "--via", "fp8")
    assert {entry["against"] for entry in report_of(tmp_path / "out")["tensors"]} == {"fp8"}
    assert verify(tmp_path / "out", "--source", source)["findings"] == []


def test_numbers_by_an_fp8_source_are_not_held_against_its_original(
    source: Path, tmp_path: Path
) -> None:
    """With the FP8 source itself they are."""
    eight, out = tmp_path / "eight", tmp_path / "out"
    assert run("quantize", source, "--format", "fp8", "-o", eight).code == 0
    quantize(eight, out)
    assert {entry["source_dtype"] for entry in report_of(out)["tensors"]} == {"F8_E4M3"}
    assert verify(out, "--source", eight)["findings"] == []
    document = verify(out, "--source", source)
    assert found_by(document) == {("note", "other-source", None)}
    assert document["summary"]["nmse"] > report_of(out)["summary"]["nmse"]
    rewrite(out, lambda report: report["tensors"][0].update(mse=0.0))
    module = report_of(out)["tensors"][0]["module"]
    assert found_by(verify(out, "--source", eight)) == {("error", "report-differs", module)}


def test_a_module_that_lost_its_values_is_warned_of(source: Path, tmp_path: Path) -> None:
    """As where MLX, which has no global scale, rounds tiny weights to zero; zeros lose nothing."""
    assert not [each for each in quantize(source, tmp_path / "a")["warnings"] if "lost" in each]
    tensors = {name: weight(seed) for seed, name in enumerate(("x.q_proj", "x.k_proj", "x.v_proj"))}
    dtype, shape, data = tensors["x.k_proj"]
    tiny = (values_of(tensors["x.k_proj"]).astype(np.float32) * 1e-7).astype(ml_dtypes.bfloat16)
    tensors |= {
        "x.k_proj": (dtype, shape, tiny.tobytes()),
        "x.v_proj": (dtype, shape, bytes(len(data))),
    }
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    folder = write_single(tmp_path / "tiny", named)
    words = ("--dialect", "mlx", "--json")
    outcome = run("quantize", folder, "--format", "nvfp4", "-o", tmp_path / "b", *words)
    assert outcome.code == 0, outcome
    (told,) = [each for each in outcome.json["warnings"] if "lost much" in each]
    assert told.startswith("x.k_proj lost much of its values: SQNR 0.00 dB")
    assert told in " ".join(outcome.err.split())
    left = told[told.index("--exclude") :].split()
    assert left[1] == "x.k_proj"
    warnings = quantize(folder, tmp_path / "c", "--dialect", "mlx", *left)["warnings"]
    assert not [each for each in warnings if "lost" in each]
