"""compare --text: artifacts beside each other by their predictions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import run
from tiny_chains import LENGTH, TEXT, make_model

pytestmark = pytest.mark.engine


def make_two(folder: Path) -> tuple[Path, list[Path]]:
    """A Llama, and artifacts of it in both formats."""
    source, paths = make_model(folder / "m", "Llama"), [folder / name for name in "ab"]
    for path, fmt in zip(paths, ("mxfp4", "nvfp4"), strict=True):
        quantize(source, path, "--format", fmt)
    return source, paths


def write_text(folder: Path) -> Path:
    (folder / "text.txt").write_text(TEXT)
    return folder / "text.txt"


@pytest.mark.parametrize("own", [False, True])
def test_two_artifacts_are_ranked_by_predictions(own: bool, tmp_path: Path) -> None:
    """By the figures that each has alone."""
    source, paths = make_two(tmp_path)
    window = ("--sequence-length", LENGTH, "--source", source)
    feed = ("--self-generate", 2) if own else ("--text", write_text(tmp_path))
    compared = run("compare", *paths, *window, *feed, "--json")
    assert compared.code == 0, compared.err
    both = {name: side["predictions"] for name, side in compared.json["artifacts"].items()}
    for name, path in zip("ab", paths, strict=True):
        alone = run("evaluate", path, *window, *feed, "--json").json
        few = f"{alone['tokens']} tokens were predicted, too few to rank by"
        assert both[name].pop("notes") == [few]
        assert both[name] == {key: alone[key] for key in both[name]}
    assert both["b"]["kl"]["mean"] < both["a"]["kl"]["mean"]
    shown = run("compare", *paths, paths[0], *window, *feed)
    words = r"closest to the source by KL: b \(.*\) [<=] a \(.*\) = c \(.*\); both smaller and"
    assert re.match(words, shown.out)


def test_what_each_layer_costs_is_beside_the_others(tmp_path: Path) -> None:
    source, paths = make_two(tmp_path)
    words = ("--sequence-length", LENGTH, "--source", source, "--text", write_text(tmp_path))
    words += ("--by-layer",)
    page = tmp_path / "page.html"
    sides = run("compare", *paths, *words, "--report", page, "--json").json["artifacts"]
    for name, path in zip("ab", paths, strict=True):
        alone = run("evaluate", path, *words, "--json").json
        predictions = sides[name]["predictions"]
        assert predictions["by_layer"] == alone["by_layer"] != []
    shown = run("compare", *paths, *words).out
    for row in zip(*(side["predictions"]["by_layer"] for side in sides.values()), strict=True):
        costs = [f"{each[key]:.4g}" for each in row for key in ("alone", "cumulated")]
        assert [row[0]["layer"], *costs] in [re.split(r"  +", line) for line in shown.split("\n")]
    assert "KL of the predictions with one layer quantized alone" in page.read_text()


def test_options_of_a_text_need_one(tmp_path: Path) -> None:
    source, artifact = make_model(tmp_path / "m", "Llama"), tmp_path / "a"
    quantize(source, artifact)
    options = (("--samples", 4), ("--sequence-length", 16), ("--hold", 2), ("--device", "cpu"))
    for option in (*options, ("--by-layer",)):
        refused = run("compare", artifact, artifact, "--source", source, *option, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, "idle-option")
        assert option[0] in refused.json["error"]["message"]
