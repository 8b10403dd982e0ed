"""--sarif: the findings of verify and inspect, as the SARIF 2.1.0 standard has them."""

import json
import os
from pathlib import Path

import pytest
from artifacts import quantize
from checkpoints import (
    FIRST,
    LAYER,
    SECOND,
    hidden_characters,
    pack_shard,
    read_shard,
    run,
    weight,
    write_llama,
    write_single,
)
from rewriting import rewrite

DOWN = f"{LAYER}.mlp.down_proj"
# Of the standard's objects that are written here: (required, allowed) properties; the schema allows
# no others.
OBJECTS = {
    kind: (set(required.split()), {*required.split(), *allowed.split(), "properties"})
    for kind, required, allowed in (
        ("log", "version runs", "$schema inlineExternalProperties"),
        ("runs", "tool", "invocations results artifacts originalUriBaseIds columnKind"),
        ("tool", "driver", "extensions"),
        ("driver", "name", "version semanticVersion fullName informationUri rules"),
        (
            "rules",
            "id",
            "name shortDescription fullDescription help helpUri defaultConfiguration",
        ),
        ("shortDescription", "text", "markdown"),
        ("help", "text", "markdown"),
        ("defaultConfiguration", "", "enabled level rank parameters"),
        ("invocations", "executionSuccessful", "commandLine arguments exitCode"),
        (
            "results",
            "message",
            "ruleId ruleIndex kind level locations fingerprints partialFingerprints",
        ),
        ("message", "", "text markdown id arguments"),
        ("locations", "", "id physicalLocation logicalLocations message"),
        ("physicalLocation", "", "artifactLocation region contextRegion address"),
        ("artifactLocation", "", "uri uriBaseId index description"),
        ("logicalLocations", "", "name index fullyQualifiedName decoratedName parentIndex kind"),
    )
}


def check(value: object, kind: str) -> None:
    """Every object has what the standard requires, and nothing that it does not know; every level
    is one.
    """
    if isinstance(value, list):
        for item in value:
            check(item, kind)
    elif isinstance(value, dict) and kind != "partialFingerprints":
        required, allowed = OBJECTS[kind]
        assert required <= value.keys() <= allowed, kind
        for key, inner in value.items():
            check(inner, key)
    if kind == "level":
        assert value in ("none", "note", "warning", "error")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture
def damaged(source, tmp_path) -> Path:
    """An artifact with a block scale that is NaN, and a file that its record does not name."""
    folder = tmp_path / "artifact"
    quantize(source, folder)
    held = read_shard(folder / SECOND)
    dtype, shape, data = held[f"{DOWN}.weight_scale"]
    (folder / SECOND).write_bytes(
        pack_shard({**held, f"{DOWN}.weight_scale": (dtype, shape, b"\x7f" + data[1:])})
    )
    (folder / "notes.txt").write_text("mine")
    return folder


def read(file: Path) -> dict:
    document = json.loads(file.read_text(encoding="utf-8"))
    check(document, "log")
    assert (document["version"], len(document["runs"])) == ("2.1.0", 1)
    assert document["$schema"].endswith("/sarif-schema-2.1.0.json")
    return document["runs"][0]


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_every_finding_is_a_result_at_the_file_that_holds_it(command, damaged, source, tmp_path):
    outcome = run(
        command, damaged, "--source", source, "--sarif", tmp_path / "found.sarif", "--json"
    )
    assert outcome.code == 6
    findings, found = outcome.json["findings"], read(tmp_path / "found.sarif")
    driver, results = found["tool"]["driver"], found["results"]
    assert driver["name"] == "fp4convert"
    assert [(r["ruleId"], r["level"]) for r in results] == [
        (f["code"], f["level"]) for f in findings
    ]
    assert all(driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    (scale,) = (result for result in results if result["ruleId"] == "scale-not-finite")
    (location,) = scale["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": SECOND}
    assert location["logicalLocations"] == [{"fullyQualifiedName": DOWN}]
    assert scale["message"]["text"].startswith(f"{DOWN}: ")


def test_what_has_no_tensor_stands_at_the_record_and_a_source_name_at_its_module(
    damaged, source, tmp_path
):
    run("verify", damaged, "--source", source, "--sarif", tmp_path / "found.sarif")
    results = {result["ruleId"]: result for result in read(tmp_path / "found.sarif")["results"]}
    assert results["file-unrecorded"]["locations"] == [
        {"physicalLocation": {"artifactLocation": {"uri": "quantization_config.json"}}}
    ]
    place = results["not-measurable"]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == SECOND


def test_a_kept_tensor_stands_at_its_shard(source, tmp_path):
    folder = tmp_path / "artifact"
    quantize(source, folder)
    (file,) = (name for name in (FIRST, SECOND) if "lm_head.weight" in read_shard(folder / name))
    _, _, data = read_shard(folder / file)["lm_head.weight"]
    rewrite(folder, file, "lm_head.weight", bytes(reversed(data)))
    run("verify", folder, "--source", source, "--sarif", tmp_path / "found.sarif")
    results = {result["ruleId"]: result for result in read(tmp_path / "found.sarif")["results"]}
    place = results["kept-differs"]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": file}


def test_rules_say_what_the_page_says(damaged, tmp_path):
    run("verify", damaged, "--sarif", tmp_path / "found.sarif")
    rules = {rule["id"]: rule for rule in read(tmp_path / "found.sarif")["tool"]["driver"]["rules"]}
    assert rules["scale-not-finite"] == {
        "id": "scale-not-finite",
        "shortDescription": {
            "text": "A scale is NaN or infinite, so its values are NaN; "
            "or that of an n-gram table is not positive."
        },
        "help": {"text": "Convert again."},
        "defaultConfiguration": {"level": "error"},
    }
    assert rules.keys() >= {"hash-mismatch", "file-unrecorded"}


def test_a_sound_artifact_has_no_results_and_a_run_again_writes_over_it(source, tmp_path):
    folder, file = tmp_path / "artifact", tmp_path / "found.sarif"
    quantize(source, folder, "--format", "mxfp4")
    assert run("verify", folder, "--source", source, "--min-sqnr", 90, "--sarif", file).code == 6
    assert len(read(file)["results"]) == 7
    assert run("verify", folder, "--sarif", file).code == 0
    assert read(file)["results"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "found.sarif"]


def test_names_are_made_visible(tmp_path):
    name = "layers.0.\u202eevil\x1b[2J.down_proj"
    source = write_single(tmp_path / "m", {f"{name}.weight": weight()})
    quantize(source, tmp_path / "a")
    words = ("--source", source, "--min-sqnr", 90, "--sarif", tmp_path / "f")
    assert run("verify", tmp_path / "a", *words).code == 6
    (result,) = read(tmp_path / "f")["results"]
    (name,) = (each["fullyQualifiedName"] for each in result["locations"][0]["logicalLocations"])
    told = result["message"]["text"] + name
    assert "evil" in told
    assert hidden_characters(told) == []


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_nothing_else_is_written_over_and_bad_places_are_known_before_the_work(
    command, damaged, tmp_path
):
    before = {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    (tmp_path / "mine").write_bytes((damaged / "config.json").read_bytes())
    for place, code in (
        (tmp_path / "mine", "output-exists"),
        (tmp_path, "cannot-write"),
        (tmp_path / "none" / "f.sarif", "cannot-write"),
    ):
        refused = run(command, damaged, "--sarif", place, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (5, code)
    assert {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()} == before
    assert run(command, damaged, "--sarif", tmp_path / "f.sarif").code == 6
    assert (tmp_path / "mine").read_bytes() == (damaged / "config.json").read_bytes()
    refused = run(command, tmp_path / "nothing", "--sarif", tmp_path / "f.sarif", "--json")
    assert refused.code == 2
    assert not os.path.exists(tmp_path / "f.sarif")
