"""Artifacts made again that lie, or whose sources lie, on the Hub, in a pipeline, beside others."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import FIRST, SECOND, llama_shards, run, weight, write_checkpoint, write_llama
from diffusion import write_flux
from gguf_donors import model, write_donor
from peft_models import make_llama, write_adapter

from fp4convert.errors import OutputError

RECORD = "quantization_config.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("m") / "source", **{"tokenizer.json": b"{}"})


def made(source: object, out: Path, *options: object) -> Path:
    outcome = run("quantize", source, "-o", out, "--quiet", *options)
    assert outcome.code == 0, outcome.err
    return out


def test_files_that_the_record_does_not_name_are_told(source, tmp_path, hub):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    words = ("reproduce", artifact, "--source", source)
    assert run(*words, "--json").json["unrecorded"] == []
    (artifact / "code").mkdir()
    (artifact / "code" / "modeling.py").write_text("print()")
    (artifact / "README.md").write_text("mine")  # a card is everybody's
    (artifact / ".gitattributes").write_text("")
    outcome = run(*words, "--json")
    assert (outcome.code, outcome.json["unrecorded"]) == (0, ["code/modeling.py"])
    told = " ".join(run(*words).out.split())
    assert "1 file is not in the record, nor compared; the first is code/modeling.py" in told
    # Engines load weights, whatever the record says.
    shutil.copy(next(artifact.glob("*.safetensors")), artifact / "more.safetensors")
    hub.add("me/artifact", artifact)
    for place in (artifact, "me/artifact"):
        outcome = run("reproduce", place, "--source", source, "--json")
        assert outcome.code == 6
        assert outcome.json["unrecorded"] == ["code/modeling.py", "more.safetensors"]
        assert [each["file"] for each in outcome.json["differing"]] == ["more.safetensors"]


def test_the_files_of_an_artifact_on_the_hub_are_compared(source, tmp_path, hub):
    """Its record is honest; what lies beside it is not what the record says."""
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    hub.add("me/honest", artifact)
    words = ("--source", source, "--json")
    assert run("reproduce", "me/honest", *words).json["reproduced"] is True
    (first, second), small = sorted(artifact.glob("*.safetensors")), artifact / "tokenizer.json"
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    small.write_text("[]")
    second.unlink()
    index = artifact / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] = {k: v for k, v in known["weight_map"].items() if v == first.name}
    index.write_text(json.dumps(known))
    hub.add("me/liar", artifact)
    outcome = run("reproduce", "me/liar", *words)
    assert outcome.code == 6, outcome.out
    named = [each["file"] for each in outcome.json["differing"]]
    assert named == sorted([first.name, second.name, index.name, small.name])


@pytest.mark.parametrize("place", ["folder", "record", "hub"])
def test_a_component_is_made_again_from_its_pipeline(place, tmp_path, hub):
    pipeline = write_flux(tmp_path / "flux")
    artifact = made(pipeline, tmp_path / "out", "--format", "nvfp4") / "transformer"
    given, source = artifact, pipeline
    if place == "record":
        (tmp_path / "alone").mkdir()
        given = shutil.copy(artifact / RECORD, tmp_path / "alone" / "record.json")
    if place == "hub":
        source = "me/flux"
        hub.add(source, pipeline)
    outcome = run("reproduce", given, "--source", source, "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.json["reproduced"] is True


def test_an_artifact_of_an_artifact_is_made_again(tmp_path):
    """Shards without anything four-bit are equal in both."""
    first, second = llama_shards().values()
    head = {"lm_head.weight": second.pop("lm_head.weight")}
    source = write_checkpoint(tmp_path / "m", {FIRST: {**first, **second}, SECOND: head}, None)
    once = made(source, tmp_path / "once", "--format", "nvfp4")
    twice = made(once, tmp_path / "twice", "--format", "mxfp4")
    assert (once / SECOND).read_bytes() == (twice / SECOND).read_bytes()
    outcome = run("reproduce", twice, "--source", once, "--json")
    assert (outcome.code, outcome.json["reproduced"]) == (0, True)


def test_one_of_several_gguf_files_on_the_hub_is_found_again(tmp_path, hub):
    for name in ("m.gguf", "n.gguf"):
        (tmp_path / "repository" / "q").mkdir(parents=True, exist_ok=True)
        write_donor(tmp_path / "repository" / "q" / name, model())
    hub.add("me/g", tmp_path / "repository")
    artifact = made("me/g/q/n.gguf", tmp_path / "out", "--format", "mxfp4", "--dialect", "gguf")
    record = json.loads((artifact / RECORD).read_text())
    assert (record["source"]["file"], record["options"]["subfolder"]) == ("n.gguf", "q")
    outcome = run("reproduce", artifact, "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.json["reproduced"] is True
    # The recorded commit, or none: main is no substitute.
    record["source"]["revision"] = "a" * 40
    (artifact / RECORD).write_text(json.dumps(record))
    error = run("reproduce", artifact, "--json").json["error"]
    assert (error["code"], "--source SOURCE" in error["next"]) == ("no-revision", True)


def test_the_folder_of_a_repository_is_found_by_the_record(tmp_path, hub):
    write_llama(tmp_path / "repository" / "inner")
    hub.add("me/deep", tmp_path / "repository")
    artifact, words = tmp_path / "q", ("--subfolder", "inner", "--format", "nvfp4", "--json")
    steps = run("quantize", "me/deep", *words, "-o", artifact).json["next"]
    assert steps[0] == f"fp4convert verify {artifact} --source me/deep"
    for command in ("verify", "inspect"):
        outcome = run(command, artifact, "--source", "me/deep", "--json")
        assert outcome.code == 0, outcome.err
    assert run("compare", artifact, artifact, "--source", "me/deep").code == 0


def test_a_record_that_names_its_own_artifact_as_the_source_is_refused(source, tmp_path, hub):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())
    commit = hub.add("me/own", artifact)
    record["source"] = {"repo": "me/own", "revision": commit}
    (tmp_path / "record.json").write_text(json.dumps(record))
    error = run("reproduce", tmp_path / "record.json", "--json").json["error"]
    assert error["code"] == "not-reproducible"
    assert error["message"].startswith("me/own has the blocks of")


def test_an_artifact_of_an_artifact_is_not_made_from_its_blocks(source, tmp_path):
    first = made(source, tmp_path / "a", "--format", "nvfp4")
    second = made(first, tmp_path / "b", "--format", "nvfp4")
    outcome = run("reproduce", second, "--source", first, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "not-reproducible")
    assert "which go over as they are" in outcome.json["error"]["message"]


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "sub/hf_quant_config.json"])
def test_a_file_that_decides_what_engines_load_is_no_addition(name, source, tmp_path):
    single = {f"{one}.weight": weight(number) for number, one in enumerate(("a", "b"))}
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": single})
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    (artifact / name).parent.mkdir(exist_ok=True)
    (artifact / name).write_text('{"weight_map": {"x": "other.safetensors"}}')
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert (outcome.code, [each["file"] for each in outcome.json["differing"]]) == (6, [name])


@pytest.mark.parametrize("key", ["block_size", "files"])
def test_what_a_record_says_in_another_type_differs(key, source, tmp_path):
    """Who reads 16 need not read 16.0; an entry of `files` that is no hash is read by nobody."""
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())
    changed = {"block_size": 16.0, "files": {**record["files"], "evil.safetensors": 5}}
    (artifact / RECORD).write_text(json.dumps({**record, key: changed[key]}))
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert (outcome.code, outcome.json["record"]) == (6, [key])


def test_counts_and_words_are_of_the_files_that_they_name(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    files = len(json.loads((artifact / RECORD).read_text())["files"])
    (artifact / "notes.txt").write_text("x")
    told = " ".join(run("reproduce", artifact, "--source", source).out.split())
    assert f"reproduced: all {files} files came out again" in told
    (artifact / "pytorch_model.bin").write_bytes(b"x")
    told = " ".join(run("reproduce", artifact, "--source", source).out.split())
    assert "NOT reproduced: what engines load was added" in told
    next(artifact.glob("*.safetensors")).unlink()
    outcome = run("reproduce", artifact, "--source", source)
    told = " ".join(outcome.out.split())
    assert outcome.code == 6
    assert f"NOT reproduced: 1 of {files} files differ" in told
    assert "pytorch_model.bin is what engines load, and the record does not name it" in told
    assert "differs, or is not there" in told


def test_a_linked_folder_is_told_and_weights_by_other_names_are_not_overlooked(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    (artifact / "sub").symlink_to(source)
    assert run("reproduce", artifact, "--source", source, "--json").json["unrecorded"] == ["sub"]
    (artifact / "sub").unlink()
    for shard in list(artifact.glob("*.safetensors")):
        shard.rename(shard.with_name(f"z{shard.name}"))
    assert run("reproduce", artifact / RECORD, "--source", source, "--json").code == 6


def test_a_full_disk_is_that_of_temporary_files(source, tmp_path, monkeypatch):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")

    def fail(*_: object) -> None:
        raise OutputError("disk-full", "no room", "Free some space.")

    monkeypatch.setattr("fp4convert.commands.reproduction._carry_out", fail)
    error = run("reproduce", artifact, "--source", source, "--json").json["error"]
    assert (error["code"], "TMPDIR" in error["next"]) == ("disk-full", True)


def test_a_folder_that_is_no_artifact_is_told_for_what_it_is(source, tmp_path):
    artifact = made(source, tmp_path / "out" / "transformer", "--format", "nvfp4")
    error = run("reproduce", artifact, "--subfolder", "nope", "--json").json["error"]
    assert error["code"] == "no-subfolder"
    (tmp_path / "out" / "model_index.json").write_text("{}")
    error = run("reproduce", tmp_path / "out", "--json").json["error"]
    assert (error["code"], error["next"].endswith(str(artifact))) == ("pipeline", True)


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_tmpdir_that_is_no_folder_is_told(place, source, tmp_path, monkeypatch):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / place))
    reply = run("reproduce", artifact, "--source", source, "--json")
    assert (reply.code, reply.json["error"]["code"]) == (5, "cannot-write")
    assert str(tmp_path / place) in reply.json["error"]["message"]


def test_places_that_no_record_of_ours_has_are_not_opened(source, tmp_path, monkeypatch):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())
    for repo in ("~/x", "../x", "https://huggingface.co/me/x", "~root", "a/b/c"):
        changed = {**record, "source": {"repo": repo, "revision": None}}
        (artifact / RECORD).write_text(json.dumps(changed))
        outcome = run("reproduce", artifact, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-source")
    outcome = run("reproduce", artifact, "--subfolder", "../out", "--source", source, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-subfolder")


@pytest.mark.parametrize("subfolder", [None, "lora/v1"])
def test_an_adapter_on_the_hub_is_read_at_the_commit_that_was_merged(subfolder, tmp_path, hub):
    source = make_llama(tmp_path / "source")
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    adapter = write_adapter(source, tmp_path / "lora", config)
    shutil.copytree(adapter, tmp_path / "first" / (subfolder or ""))
    commit = hub.add("me/lora", tmp_path / "first")
    page = f"https://huggingface.co/me/lora/tree/main/{subfolder}" if subfolder else "me/lora"
    artifact = made(source, tmp_path / "out", "--format", "nvfp4", "--lora", page)
    record = json.loads((artifact / RECORD).read_text())
    assert record["adapter"]["revision"] == commit
    assert record["options"]["lora"][0]["repo"] == "me/lora"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 7}))
    shutil.copytree(adapter, tmp_path / "second" / (subfolder or ""))
    assert hub.add("me/lora", tmp_path / "second") != commit  # main has moved
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.json["reproduced"] is True


def test_shards_that_have_gone_to_the_hub_are_looked_for_there(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    for shard in artifact.glob("*.safetensors"):
        shard.unlink()
    (artifact / ".fp4convert" / "hub.json").write_text(json.dumps({"repo": "me/q"}))
    error = run("reproduce", artifact, "--source", source, "--json").json["error"]
    assert (error["code"], "me/q" in error["message"] + error["next"]) == ("shards-gone", True)
