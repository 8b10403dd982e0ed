"""The page as a file: whole, closed to names that are scripts, asking nobody for anything; and when
it is written at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import run, weight, write_llama, write_single
from hostile import NAMES, make_hostile, name_of

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.quality.verification import TensorError
from fp4convert.report import datasheet
from fp4convert.report.html import make_page


class Elements(HTMLParser):
    """What Python's own parser makes of a page: elements with their attributes, and the text inside
    of scripts.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._is_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("page") / "source")


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    quantize(source, source.parent / "artifact")
    return source.parent / "artifact"


def document_of(page: Path) -> dict:
    scripts = Elements(page.read_text(encoding="utf-8")).scripts
    (data,) = [text for text in scripts if text.startswith("{")]
    return json.loads(data)


def test_verify_and_quantize_write_a_page_and_say_so(source, artifact, tmp_path):
    outcome = run("verify", artifact, "--source", source, "--report", tmp_path / "v.html")
    assert (outcome.code, "report: " in outcome.err, "report: " in outcome.out) == (0, True, False)
    assert document_of(tmp_path / "v.html")["evidence"]["how"] == "measured"
    words = ("--format", "mxfp4", "-o", tmp_path / "q", "--report", tmp_path / "q.html")
    outcome = run("quantize", source, *words, "--json", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    shown = document_of(tmp_path / "q.html")
    assert (shown["evidence"]["how"], set(shown["tensors"]["format"])) == ("recorded", {"mxfp4"})
    assert all(one["values"] for one in shown["worst"])
    assert {path.name for path in tmp_path.iterdir()} == {"v.html", "q.html", "q"}


@pytest.mark.parametrize(("layers", "experts"), [(1300, 1), (61, 256)])
def test_a_page_of_many_tensors_is_small(layers, experts, artifact, monkeypatch):
    """Of a deep model, and of experts, whose worst has a row of its own and is the least of its."""
    lost = [
        TensorError(f"model.layers.{at}.mlp.experts.{one}.{leaf}.weight", 20.5, 0.01, 0.5, 0.99)
        for at in range(layers)
        for one in range(experts)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    lost[4] = replace(lost[4], sqnr_db=12.25, histogram=[7] * 16)
    monkeypatch.setattr(datasheet, "_find_errors", lambda *given: ("measured", lost))
    shown = datasheet.make_datasheet(open_artifact(str(artifact)))
    assert len(make_page(shown)) < 200_000
    tensors, worst = shown["tensors"], shown["worst"][0]
    assert sum(tensors["count"]) == len(lost) + len(shown["worst"])
    assert tensors["name"][worst["tensor"]] == lost[4].name
    assert (worst["codes"], tensors["sqnr_db"][worst["tensor"]]) == ([7] * 16, 12.25)
    rows = [at for at, least in enumerate(tensors["least"]) if least == 12.25]
    assert len(rows) == 2
    count = tensors["count"][rows[0]]
    assert tensors["sqnr_db"][rows[0]] == round((20.5 * (count - 1) + 12.25) / count, 3)
    assert "Tensors share rows" in shown["evidence"]["words"]


def test_a_failed_artifact_is_shown_too(artifact, tmp_path):
    broken = tmp_path / "artifact"
    broken.mkdir()
    for file in artifact.iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    with (broken / "config.json").open("a") as config:
        config.write(" ")
    assert run("verify", broken, "--report", tmp_path / "v.html").code == 6
    shown = document_of(tmp_path / "v.html")
    assert shown["verdict"]["is_good"] is False
    assert [finding["code"] for finding in shown["findings"]] == ["hash-mismatch"]


def test_nothing_is_fetched_and_only_our_scripts_may_run(artifact, tmp_path):
    assert run("verify", artifact, "--report", tmp_path / "v.html").code == 0
    text = (tmp_path / "v.html").read_text(encoding="utf-8")
    page, fetching = Elements(text), {"src", "href", "srcset", "action", "data"}
    assert not [tag for tag, attributes in page.tags if fetching & attributes.keys()]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not {"link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in page.tags}
    metas = [each for tag, each in page.tags if tag == "meta" and "http-equiv" in each]
    (policy,) = [each["content"] for each in metas]
    words = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    (script,) = [each for each in page.scripts if not each.startswith("{")]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    for part, held in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(held.encode()).digest()).decode()
        assert words.pop(part) == f"'sha256-{digest}'"
    assert words == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert not re.search(r"url\(|@import", style)
    assert not [each for _, each in page.tags if "style" in each], "the policy refuses these"
    assert len(text) < 200_000


def test_names_that_are_scripts_stay_names(tmp_path):
    source, artifact = make_hostile(tmp_path)
    assert run("verify", artifact, "--source", source, "--report", tmp_path / "v.html").code == 0
    text = (tmp_path / "v.html").read_text(encoding="utf-8")
    usual = Elements(make_page({"title": "usual", "findings": []}))
    hostile = Elements(text)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in usual.tags]
    assert len(hostile.scripts) == 2
    shown = document_of(tmp_path / "v.html")
    assert sorted(shown["tensors"]["name"]) == sorted(name_of(name) for name in NAMES)
    assert shown["title"] == artifact.name
    data = next(part for part in hostile.scripts if part.startswith("{"))
    assert not set("<>&") & set(data)
    assert "<title>&lt;i&gt;artifact" in text


def test_a_source_on_the_hub_is_read_for_histograms(hub, source, artifact, tmp_path):
    commit = hub.add("org/model", source)
    quantize("org/model", tmp_path / artifact.name, "--report", tmp_path / "q.html")
    quantize(source, tmp_path / "local", "--report", tmp_path / "l.html")
    remote, local = document_of(tmp_path / "q.html"), document_of(tmp_path / "l.html")
    assert remote["about"] == f"made from org/model at {commit}"
    assert remote["worst"] == local["worst"]
    assert all(one["values"] for one in remote["worst"])


@pytest.mark.parametrize("name", ["missing/r.html", "folder", "file/r.html"])
def test_a_page_that_cannot_be_written_is_told_before_the_work(name, source, artifact, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    for command in (
        ("verify", artifact),
        ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out"),
    ):
        outcome = run(*command, "--report", tmp_path / name, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (5, "cannot-write")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["weights", "text", "another's page", "empty", "pipe", "link"])
def test_nothing_but_an_earlier_page_is_written_over(kind, source, artifact, tmp_path):
    place, target = tmp_path / "there", tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(target)
    else:
        weights = next(artifact.glob("*.safetensors")).read_bytes()
        held = {
            "weights": weights,
            "text": b"mine\n",
            "another's page": b"<!doctype html>\n<html lang='en'>\n<head>\n",
            "empty": b"",
        }
        place.write_bytes(held[kind])
    before = (place.lstat().st_mode, place.read_bytes() if place.is_file() else None)
    for command in (
        ("verify", artifact),
        ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out"),
    ):
        outcome = run(*command, "--report", place, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (5, "output-exists")
        assert str(place) in outcome.json["error"]["message"]
    assert (place.lstat().st_mode, place.read_bytes() if place.is_file() else None) == before
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_link_to_an_earlier_page_stays_a_link(artifact, tmp_path):
    page, link = tmp_path / "v.html", tmp_path / "latest.html"
    assert run("verify", artifact, "--report", page).code == 0
    link.symlink_to(page)
    page.write_bytes(page.read_bytes()[:1000])
    assert run("verify", artifact, "--report", link).code == 0
    assert link.is_symlink()
    assert document_of(page)


def test_a_name_that_no_file_can_have_is_told_before_the_work(source, tmp_path):
    name = tmp_path / ("x" * 250)
    outcome = run(
        "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--report", name, "--json"
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "cannot-write")
    assert not list(tmp_path.iterdir())


def test_an_earlier_page_is_replaced(source, artifact, tmp_path):
    page = tmp_path / "v.html"
    for asked, how in (((), "recorded"), (("--source", source), "measured")):
        assert run("verify", artifact, *asked, "--report", page).code == 0
        assert document_of(page)["evidence"]["how"] == how
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("options", [("--dry-run",), ("--shard-index", 0, "--num-shards", 2)])
def test_what_makes_nothing_whole_has_no_report(options, source, tmp_path):
    words = ("--format", "nvfp4", "-o", tmp_path / "out", "--report", tmp_path / "r.html")
    outcome = run("quantize", source, *words, *options, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "report")
    assert list(tmp_path.iterdir()) == []


def test_every_transformer_of_a_pipeline_has_a_page(tmp_path):
    pipeline = tmp_path / "pipeline"
    for name in ("transformer", "transformer_2"):
        tensors = {f"blocks.0.{name}.weight": weight(1, 64, 64)}
        folder = write_single(pipeline / name, tensors, {"_class_name": "NewTransformer"})
        (folder / "model.safetensors").rename(folder / "diffusion_pytorch_model.safetensors")
    listed = {
        "_class_name": "NewPipeline",
        "transformer": ["diffusers", "N"],
        "transformer_2": ["diffusers", "N"],
    }
    (pipeline / "model_index.json").write_text(json.dumps(listed))
    words = ("--format", "nvfp4", "-o", tmp_path / "out", "--report", tmp_path / "r.html")
    command = ("quantize", pipeline, *words)
    (tmp_path / "r-transformer_2.html").write_text("mine")
    refused = run(*command, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (5, "output-exists")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "r-transformer_2.html").read_text() == "mine"
    (tmp_path / "r-transformer_2.html").unlink()
    outcome = run(*command)
    assert outcome.code == 0, outcome
    pages = sorted(path.name for path in tmp_path.glob("*.html"))
    assert pages == ["r-transformer.html", "r-transformer_2.html"]
    names = document_of(tmp_path / pages[1])["tensors"]["name"]
    assert names == ["blocks.0.transformer_2.weight"]
    inside = tmp_path / "inside"
    words = ("--format", "nvfp4", "-o", inside, "--report", inside / "report.html")
    made = [run("quantize", pipeline, *words, "--json").json["digest"] for _ in range(2)]
    assert made[0] == made[1]
    pages = sorted(str(path.relative_to(inside)) for path in inside.rglob("*.html"))
    assert pages == ["transformer/report.html", "transformer_2/report.html"]
    assert run("verify", inside / "transformer", "--json").json["findings"] == []


def test_a_page_named_report_travels_with_the_artifact(source, tmp_path):
    """No check minds it, no digest counts it, and what is made of the artifact has none."""
    made = tmp_path / "made"
    page = made / "report.html"
    first = quantize(source, made, "--report", page)
    assert document_of(page)["evidence"]["how"] == "recorded"
    assert run("verify", made, "--source", source, "--report", page).code == 0
    assert document_of(page)["evidence"]["how"] == "measured"
    verified = run("verify", made, "--json").json
    assert (verified["findings"], verified["passed"]) == ([], True)
    assert run("inspect", made, "--json").json["findings"] == []
    assert quantize(source, made, "--report", page)["digest"] == first["digest"]
    assert run("transcode", made, "--dialect", "modelopt", "-o", tmp_path / "other").code == 0
    assert not (tmp_path / "other" / "report.html").exists()


@pytest.mark.parametrize("name", ["page.html", "sub/report.html", "report.HTML"])
def test_no_other_page_may_lie_in_the_artifact(name, artifact):
    (artifact / "sub").mkdir(exist_ok=True)
    told = run("verify", artifact, "--report", artifact / name, "--json")
    error = told.json["error"]
    assert (told.code, error["code"]) == (2, "file-in-artifact")
    assert error["next"] == f"Give --report {artifact / 'report.html'}."
    (artifact / "sub").rmdir()
