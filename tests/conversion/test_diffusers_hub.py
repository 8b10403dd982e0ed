"""Pipelines from the Hub, and to it: one commit is read to the end, and one commit holds the whole
result.
"""

import json
import re
from pathlib import Path

import pytest
from checkpoints import run
from diffusion import (
    COMPONENTS,
    DIFFUSERS,
    FLUX_INDEX,
    NVFP4,
    PIPELINE,
    RECORD,
    STATE,
    WAN_CONFIG,
    wan_tensors,
    write_component,
    write_flux,
    write_others,
    write_wan,
)
from pushing import FastTime, check_secrets

PUSH = ("--push-to-hub", "me/q")
MANY = 1000


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)


def quantize(source: object, out: Path, *options: object):
    outcome = run("quantize", source, *NVFP4, "-o", out, *options)
    check_secrets(outcome.out + outcome.err)
    return outcome


REPORT = "quantization_report.json"


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for our state;
    of our records all but where the weights come from.
    """
    found = {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    files = {name.as_posix(): data for name, data in found.items() if STATE not in name.parts}
    records = {name: json.loads(data) for name, data in files.items() if name.endswith(RECORD)}
    for record in records.values():
        del record["source"]
        record["options"].pop("subfolder", None)
    return files | {name: json.dumps(record).encode() for name, record in records.items()}


@pytest.fixture
def wan(hub, tmp_path):
    folder = write_wan(tmp_path / "wan")
    hub.add("org/wan", folder)
    return folder


def test_a_pipeline_from_the_hub_is_what_its_folder_becomes(hub, wan, tmp_path):
    assert quantize("org/wan", tmp_path / "a").code == 0
    assert quantize(wan, tmp_path / "b").code == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    commit = hub.repos["org/wan"].branches["main"]
    for name in COMPONENTS:
        assert json.loads((tmp_path / "a" / name / RECORD).read_text())["source"] == {
            "repo": "org/wan",
            "revision": commit,
        }
    assert quantize("org/wan", tmp_path / "c", "--subfolder", "transformer").code == 0
    assert files_of(tmp_path / "c") == files_of(tmp_path / "a" / "transformer")


def test_a_dry_run_fetches_headers_and_small_files_alone(hub, wan, tmp_path):
    assert quantize("org/wan", tmp_path / "q", "--dry-run").json["copied_bytes"] > 0
    asked = [seen.path for seen in hub.seen if seen.where == "storage"]
    assert not [path for path in asked if "text_encoder" in path or "vae" in path]
    assert not (tmp_path / "q").exists()


def test_a_revision_is_that_of_all_components(hub, wan, tmp_path):
    old = hub.repos["org/wan"].branches["main"]
    expected = quantize("org/wan", tmp_path / "a").json["digest"]
    moved = write_wan(tmp_path / "moved")
    (moved / "transformer_2" / f"{DIFFUSERS}.safetensors").unlink()
    hub.add("org/wan", moved)
    assert quantize("org/wan", tmp_path / "b").code == 2
    assert quantize("org/wan", tmp_path / "b", "--revision", old).json["digest"] == expected


def test_the_branch_moves_between_two_components(hub, wan, tmp_path):
    expected, commit = (
        quantize("org/wan", tmp_path / "a").json["digest"],
        hub.repos["org/wan"].branches["main"],
    )
    hub.seen.clear()
    moved = []

    def move_and_note(handler, kinds, take=hub.take):
        if PIPELINE in handler.path and not moved:
            moved.append(hub.add("org/wan", write_flux(tmp_path / "moved")))
        return take(handler, kinds)

    hub.take = move_and_note
    assert quantize("org/wan", tmp_path / "q").json["digest"] == expected
    assert moved
    assert {part for seen in hub.seen for part in re.findall(r"[0-9a-f]{40}", seen.path)} == {
        commit
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("match", ["transformer_2/", "text_encoder/model", "vae/"])
def test_after_exit_3_the_run_goes_on_with_the_commit_it_began_with(match, hub, wan, tmp_path):
    expected, out = quantize("org/wan", tmp_path / "a").json["digest"], tmp_path / "q"
    hub.seen.clear()
    headers = 2 if match == "transformer_2/" else 0  # read before
    hub.fault("status", where="storage", match=match, after=headers, times=MANY)
    outcome = quantize("org/wan", out)
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-unreachable")
    assert (out / "transformer" / RECORD).exists()
    assert not (out / PIPELINE).exists()
    hub.faults.clear()
    hub.add("org/wan", write_flux(tmp_path / "moved"))
    kept = (out / "transformer" / f"{DIFFUSERS}.safetensors").stat().st_ino
    assert quantize("org/wan", out).json["digest"] == expected
    assert (out / "transformer" / f"{DIFFUSERS}.safetensors").stat().st_ino == kept


def test_a_file_that_arrives_damaged_is_no_part_of_the_result(hub, wan, tmp_path):
    hub.fault("flip", match="text_encoder/model", at=30, times=MANY)
    outcome = quantize("org/wan", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert not (tmp_path / "q" / PIPELINE).exists()
    assert not (tmp_path / "q" / "text_encoder").exists()


def test_a_subfolder_that_is_not_there_is_named_with_what_is(hub, wan, tmp_path):
    remote, local = (
        quantize(source, tmp_path / "q", "--subfolder", "unet") for source in ("org/wan", wan)
    )
    for outcome, where in ((remote, "org/wan at commit"), (local, str(wan))):
        error = outcome.json["error"]
        assert (error["exit"], error["code"]) == (2, "no-subfolder")
        assert error["message"].startswith(where)
        tail = (
            "has no folder 'unet'; it has scheduler, text_encoder, tokenizer, transformer, "
            "transformer_2, vae"
        )
        assert error["message"].endswith(tail)


@pytest.mark.parametrize("subfolder", ["..", "transformer/../vae", "a\0b"])
def test_a_subfolder_never_leads_out(hub, wan, tmp_path, subfolder):
    for source in ("org/wan", wan):
        assert (
            quantize(source, tmp_path / "q", "--subfolder", subfolder).json["error"]["code"]
            == "no-subfolder"
        )


def test_an_artifact_is_opened_by_its_subfolder_on_the_hub(hub, wan, tmp_path):
    assert quantize(wan, tmp_path / "q").code == 0
    hub.add("org/q", tmp_path / "q")
    assert run("inspect", "org/q", "--json").json["error"]["code"] == "pipeline"
    for name in COMPONENTS:
        remote = run("inspect", "org/q", "--subfolder", name, "--json").json
        assert remote == run("inspect", tmp_path / "q", "--subfolder", name, "--json").json
        measured = run("verify", "org/q", "--subfolder", name, "--source", "org/wan", "--json")
        assert (measured.code, len(measured.json["tensors"])) == (0, 6)
    step = run("inspect", "org/q", "--json").json["error"]["next"]
    assert step == "Name the folder: --subfolder transformer"
    one = tmp_path / "q" / "transformer"  # whose subfolder that cannot be
    step = run("verify", one, "--source", "org/wan", "--json").json["error"]["next"]
    assert step.endswith("hf download org/wan --include 'transformer/*' --local-dir FOLDER")


def test_one_commit_holds_the_whole_pipeline(hub, wan, tmp_path):
    outcome = quantize(wan, tmp_path / "q", *PUSH)
    assert (outcome.code, len(hub.repos["me/q"].commits)) == (
        0,
        2,
    )  # the first came with the repository
    found = hub.read("me/q")
    here = {
        path.relative_to(tmp_path / "q"): path
        for path in (tmp_path / "q").rglob("*")
        if path.is_file()
    }
    files = {
        name.as_posix(): path.read_bytes() for name, path in here.items() if STATE not in name.parts
    }
    card = found.pop("README.md").decode()
    assert found.pop(".gitattributes")
    assert files.pop("README.md")
    assert found == files
    assert f"| digest | {outcome.json['digest']} |" in card
    assert "12 linear layers in NVFP4" in card
    assert "A pipeline." in card
    assert "vLLM" not in card
    assert quantize(wan, tmp_path / "q", *PUSH).json["pushed"] == outcome.json["pushed"]
    assert len(hub.repos["me/q"].commits) == 2


def test_a_pipeline_is_not_pushed_over_weights_of_somebody_else(hub, wan, tmp_path):
    hub.add("me/q", wan)
    outcome = quantize(wan, tmp_path / "q", *PUSH)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "foreign-repo")
    (wan / "text_encoder" / "pytorch_model.bin").unlink()
    hub.add("me/q", wan)
    assert (
        "the first 'transformer/diffusion"
        in quantize(wan, tmp_path / "q2", *PUSH).json["error"]["message"]
    )


def test_what_an_earlier_pipeline_left_in_its_folders_is_removed(hub, tmp_path):
    flux, one = write_flux(tmp_path / "flux"), tmp_path / "one"
    assert quantize(flux, tmp_path / "a", *PUSH).code == 0
    write_component(one / "transformer", [wan_tensors()], WAN_CONFIG)
    write_others(one, FLUX_INDEX)
    assert quantize(one, tmp_path / "b", *PUSH).code == 0
    names = {name for name in hub.read("me/q") if name.startswith("transformer/")}
    assert names == {
        f"transformer/{name}"
        for name in (f"{DIFFUSERS}.safetensors", "config.json", RECORD, REPORT)
    }


def test_a_device_that_is_not_there_writes_nothing(wan, tmp_path):
    for options in ((), PUSH):
        assert quantize(wan, tmp_path / "q", "--device", "cuda:9", *options).code == 2
        assert not (tmp_path / "q").exists()
