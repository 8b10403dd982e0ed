"""compare --report: the page, and its figures beside it."""

import csv
import json
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import (
    LAYER,
    SECOND,
    bf16,
    pack_shard,
    read_shard,
    run,
    write_llama,
    write_single,
)
from made_up_inputs import calibrate_white

from fp4convert.report.comparison_page import make_sheet
from fp4convert.report.html import COMPARISON, make_page

DOWN = f"{LAYER}.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    write_llama(folder / "source")
    for fmt in ("nvfp4", "mxfp4"):
        quantize(folder / "source", folder / fmt, "--format", fmt)
    return {name: folder / name for name in ("source", "nvfp4", "mxfp4")}


@pytest.fixture
def source(made) -> Path:
    return made["source"]


@pytest.fixture
def nvfp4(made) -> Path:
    return made["nvfp4"]


@pytest.fixture
def mxfp4(made) -> Path:
    return made["mxfp4"]


def compare(artifacts: tuple[Path, ...], source: Path) -> dict:
    file = calibrate_white(source, source.with_suffix(".safetensors"))
    return run("compare", *artifacts, "--source", source, "--calibration", file, "--json").json


def test_the_page_has_its_figures_beside_it(source, nvfp4, mxfp4, tmp_path):
    page = tmp_path / "page.html"
    file = calibrate_white(source, source.with_suffix(".safetensors"))
    words = ("--source", source, "--calibration", file, "--report", page, "--json")
    told = run("compare", nvfp4, mxfp4, *words)
    document = json.loads((tmp_path / "page.json").read_text())
    assert document.pop("producer") == "fp4convert compare"
    assert document == told.json
    with (tmp_path / "page.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["layer"] for row in rows] == [row["name"] for row in document["tensors"]]
    for row, known in zip(rows, document["tensors"], strict=True):
        assert float(row["b_output_error"]) == known["held"]["b"]["output_error"]
        assert (row["best"], row["a_stored"]) == ("a", "nvfp4")
    again = run("compare", mxfp4, nvfp4, "--source", source, "--report", page)
    assert (again.code, page.is_file()) == (0, True), "an earlier page is replaced"


def test_a_page_of_many_layers_is_small(source, nvfp4, mxfp4):
    """Rows are merged: weights are added up, errors are those of one layer of as many weights."""
    found = compare((nvfp4, mxfp4), source)
    (one, *_) = found["tensors"]
    found["tensors"] = [
        {**one, "name": f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"}
        for layer in range(60)
        for expert in range(200)
    ]
    sheet = make_sheet(found)
    assert len(make_page(sheet, COMPARISON)) < 200_000
    layers, (a, b) = sheet["layers"], found["artifacts"]
    assert layers["name"][0] == "model.layers.0.mlp.experts.*.up_proj.weight (200 of them)"
    assert layers["weights"] == [200 * one["weights"]] * 60
    errors = [one["held"][letter]["output_error"] for letter in (a, b)]
    assert [each[0] for each in layers["output_error"]] == pytest.approx(errors, rel=1e-4)


def test_what_somebody_else_wrote_beside_the_page_stays(source, nvfp4, mxfp4, tmp_path):
    words = ("compare", nvfp4, mxfp4, "--source", source, "--json", "--report")
    mine = tmp_path / "page.csv"
    mine.write_text("mine")
    refused = run(*words, tmp_path / "page.html")
    assert (refused.code, refused.json["error"]["code"]) == (5, "output-exists")
    assert [path.name for path in tmp_path.iterdir()] == ["page.csv"]
    assert mine.read_text() == "mine"
    refused = run(*words, tmp_path / "other.csv")
    assert (refused.code, refused.json["error"]["code"]) == (2, "usage")
    refused = run(*words, mxfp4 / "page.html")
    assert (refused.code, refused.json["error"]["code"]) == (2, "file-in-artifact")


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_page_that_is_a_folder_is_refused(place, source, nvfp4, mxfp4):
    words = ("compare", nvfp4, mxfp4, "--source", source, "--json", "--report", place)
    refused = run(*words)
    assert (refused.code, refused.json["error"]["code"]) == (5, "cannot-write")


def test_means_are_ranked_where_each_has_every_layer_alone(source, nvfp4, mxfp4, tmp_path):
    """One that loses nothing has no SQNR, and is not worse for that."""
    pair = compare((nvfp4, mxfp4), source)
    best = {word: places for word, _, places in make_sheet(pair)["rows"]}
    assert (best["output error"], best["bits per weight"], best["SQNR, mean dB"]) == ([0], [], [0])
    pair["tensors"][0]["held"]["b"]["output_error"] = None
    sheet = make_sheet(pair)
    assert "not every artifact has a figure" in sheet["fairness"]
    assert all(places == [] for _, _, places in sheet["rows"])
    part = tmp_path / "part"
    quantize(source, part, "--format", "mxfp4", "--exclude", "*.down_proj")
    held = read_shard(part / SECOND)
    dtype, shape, data = held[f"{DOWN}.weight"]
    odd = {**held, f"{DOWN}.weight": (dtype, shape, bytes(2) + data[2:])}
    (part / SECOND).write_bytes(pack_shard(odd))
    sheet = make_sheet(compare((nvfp4, part), source))
    assert sheet["fairness"]
    assert all(places == [] for word, _, places in sheet["rows"] if word != "best on, layers")


def test_a_name_that_a_spreadsheet_would_run_is_text(tmp_path):
    name = "=HYPERLINK(1).mlp.up_proj.weight"
    source = write_single(tmp_path / "m", {name: ("BF16", (64, 64), bf16(64, 64))})
    made, page = tmp_path / "q", tmp_path / "p.html"
    quantize(source, made, "--format", "mxfp4")
    assert run("compare", made, made, "--source", source, "--report", page).code == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[1].startswith("\"'=HYPERLINK(1)")
