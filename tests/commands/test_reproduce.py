"""Artifacts made again from their record: honest ones are, and what was changed is named.

The expected hashes are those of the files themselves, by hashlib.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import bf16, run, weight, write_llama, write_single
from cpu_levels import every_level
from made_up_inputs import calibrate
from peft_models import make_llama, write_adapter
from safetensors.torch import load_file

from fp4convert.conversion.recorded_options import as_recorded
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.options.writing import QuantizeOptions
from fp4convert.version import __version__

RECORD = "quantization_config.json"
OPTIONS = {  # two or three at a time, so that each stands beside others
    "plain": ("--format", "nvfp4"),
    "mxfp4": ("--format", "mxfp4", "--scale-rule", "even", "--exclude", "*.o_proj"),
    "fp8": ("--format", "fp8", "--dialect", "modelopt", "--kv-cache", "fp8"),
    "mxfp8": ("--format", "mxfp8", "--include", "lm_head", "--activations", "16"),
    "w4a4": ("--format", "nvfp4", "--activations", "4", "--input-scale", "0.5"),
    "modelopt": ("--format", "nvfp4", "--dialect", "modelopt", "--exclude", "*.k_proj"),
    "via": ("--format", "nvfp4", "--via", "fp8", "--scale-rule", "amax"),
    "size": ("--format", "nvfp4", "--target-bits", "5.5"),
    "engine": ("--for", "vllm", "--format", "nvfp4", "--exclude", "re:.*down_proj"),
}


HOSTILE = (  # in a record: what no quantize of ours writes there
    *(("ray", "127.0.0.1:9"), ("token", "x"), ("device", "cuda"), ("output", "/tmp/x")),
    *(("source", "x"), ("revision", "x"), ("push_to_hub", "a/b"), ("workers", 9)),
    *(("recipe", "/etc/passwd"), ("calibration", "/etc/passwd"), ("lora", ["/etc/passwd"])),
    *(("format", ["nvfp4"]), ("exclude", 5), ("exclude", [1, None]), ("lora", {"sha256": 5})),
    *(("input_scale", {"taken": 5}), ("global_scale", {"repo": "../x", "taken": "a"})),
    *(("global_scale", {"folder": True}), ("calibration", {"sha256": "a", "path": "/etc/passwd"})),
    *(("lora", "/etc/passwd"), ("keep_packed", "yes"), ("passes", 1.5), ("damping", "0.1")),
    *(("lora", []), ("exclude", []), ("method", "smooth"), ("scale_rule", "best")),
    *(("input_scale", [1]), ("target_size", "x"), ("target_bits", []), ("subfolder", {})),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("m") / "source", **{"tokenizer.json": b"{}"})


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def made(source: Path, out: Path, *options: object) -> Path:
    outcome = run("quantize", source, "-o", out, "--quiet", *options)
    assert outcome.code == 0, outcome.err
    return out


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sweep(3)
def test_an_honest_artifact_is_reproduced_and_nothing_is_left(name, source, tmp_path, monkeypatch):
    artifact, scratch = made(source, tmp_path / "out", *OPTIONS[name]), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = contents(tmp_path)
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["reproduced"] is True
    assert outcome.json["files"] == len(json.loads((artifact / RECORD).read_text())["files"])
    assert contents(tmp_path) == before
    assert not list(scratch.iterdir())
    # The record alone does, too.
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(artifact / RECORD, tmp_path / "alone" / "record.json")
    assert run("reproduce", alone, "--source", source, "--json").json["reproduced"] is True


def test_every_option_that_changes_bytes_is_recorded():
    """Of a file its hash and of a folder a word; no path."""
    text = Path(__file__)
    options = QuantizeOptions(
        "source",
        format="nvfp4",
        exclude="*.x",
        calibration=text,
        global_scale=text.parent,
        input_scale="me/other",
    )
    sha256 = hashlib.sha256(text.read_bytes()).hexdigest()
    recorded = as_recorded(options, taken={"global_scale": "ab", "input_scale": "cd"})
    assert recorded["calibration"] == {"sha256": sha256}
    assert recorded["global_scale"] == {"taken": "ab"}
    assert recorded["input_scale"] == {"repo": "me/other", "taken": "cd"}
    assert recorded["exclude"] == ["*.x"]
    assert str(text.parent) not in json.dumps(recorded)
    # Whatever is not said is as by default.
    given = {"calibration": text, "global_scale": text, "input_scale": "me/other"}
    again = QuantizeOptions("source", **(recorded | given))
    differ = {
        name
        for name, value in again.that_make_bytes().items()
        if value != options.that_make_bytes()[name]
    }
    assert differ <= {"calibration", "global_scale", "exclude"}


def test_other_instruction_sets_reproduce_it(source, tmp_path, monkeypatch):
    """Of SSE4.2, AVX2 and AVX-512 all that this processor has."""
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    for level, cpu in every_level(tmp_path).items():
        monkeypatch.setattr("fp4convert.numerics.backends.cpu.cpu_library", lambda: cpu._library)  # noqa: B023
        assert Cpu()._library.fp4_level(0) == level
        assert run("reproduce", artifact, "--source", source, "--json").json["reproduced"] is True


def test_one_by_gptq_is_reproduced_with_its_calibration_and_with_no_other(source, tmp_path):
    right = calibrate(tmp_path / "right.safetensors", source, "full")
    gptq = ("--format", "nvfp4", "--method", "gptq", "--calibration", right)
    artifact = made(source, tmp_path / "out", *gptq)
    words = ("reproduce", artifact, "--source", source, "--json")
    assert run(*words, "--calibration", right).json["reproduced"] is True
    wrong = shutil.copy(right, tmp_path / "wrong.safetensors")
    with Path(wrong).open("ab") as out:
        out.write(b"x")
    for options in ((), ("--calibration", wrong)):
        assert run(*words, *options).json["error"]["code"] == "reproduce-file"


@pytest.mark.parametrize("where", ["artifact", "source", "record", "config"])
def test_what_was_changed_is_named(where, source, tmp_path):
    own = shutil.copytree(source, tmp_path / "source")
    artifact = made(own, tmp_path / "out", "--format", "nvfp4")
    name = "model.layers.0.mlp.up_proj"
    shard = next(
        p for p in sorted(artifact.glob("*.safetensors")) if f"{name}.weight_packed" in load_file(p)
    )
    if where == "artifact":
        data = bytearray(shard.read_bytes())
        values = load_file(shard)[f"{name}.weight_packed"].numpy().tobytes()
        data[data.index(values)] ^= 1
        shard.write_bytes(data)
    elif where == "source":
        tensors = own / shard.name
        data = tensors.read_bytes()
        tensors.write_bytes(data[: -2 * 64] + bf16(64, seed=99))
    elif where == "record":
        record = json.loads((artifact / RECORD).read_text())
        record["scale_rule"] = "amax"
        (artifact / RECORD).write_text(json.dumps(record))
    else:
        (artifact / "config.json").write_text("{}")
    outcome = run("reproduce", artifact, "--source", own, "--json")
    assert outcome.code == 6, outcome.err
    found = outcome.json
    assert found["reproduced"] is False
    if where == "record":
        assert (found["differing"], found["record"]) == ([], ["scale_rule"])
        told = " ".join(run("reproduce", artifact, "--source", own).out.split())
        assert "NOT reproduced: the record differs" in told
        assert "of the record differ: scale_rule" in told
        return
    (entry,) = found["differing"]
    assert entry["file"] == ("config.json" if where == "config" else shard.name)
    assert (entry["tensor"] is None) is (where == "config")
    if where == "artifact":
        assert entry["tensor"] == f"{name}.weight_packed"


@pytest.mark.parametrize("files", [{"a.safetensors": []}, {"a.safetensors": None}, [], "x", {}])
def test_files_of_a_record_that_are_none_end_in_no_traceback(files, source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    own = shutil.copytree(artifact, tmp_path / "own")
    record = json.loads((artifact / RECORD).read_text())
    for folder in (artifact, own):
        (folder / RECORD).write_text(json.dumps({**record, "files": files}))
    for place in (source, own):
        outcome = run("reproduce", artifact, "--source", place, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "not-reproducible")
    assert run("verify", artifact, "--json").code in (0, 6)


def test_names_of_options_that_are_files_here_stay_names(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nvfp4", "modelopt", "lm_head"):
        Path(name).mkdir()
    Path("rtn").write_text("private")
    words = ("--format", "nvfp4", "--dialect", "modelopt", "--include", "lm_head")
    artifact = made(source, tmp_path / "out", *words)
    said = json.loads((artifact / RECORD).read_text())["options"]
    assert {key: said[key] for key in ("format", "dialect", "method", "include")} == {
        "format": "nvfp4",
        "dialect": "modelopt",
        "method": "rtn",
        "include": ["lm_head"],
    }
    assert run("reproduce", artifact, "--source", source, "--json").json["reproduced"] is True


def test_an_artifact_is_no_source_of_its_own(source, tmp_path):
    """Its blocks would be carried over, whatever they are."""
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    ignored = shutil.ignore_patterns(RECORD, ".fp4convert")
    copy = shutil.copytree(artifact, tmp_path / "copy", ignore=ignored)
    for other, code in ((artifact, "usage"), (copy, "not-reproducible")):
        outcome = run("reproduce", artifact, "--source", other, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
    record = json.loads((artifact / RECORD).read_text())
    record["source"] = {"repo": str(copy), "revision": None}
    (artifact / RECORD).write_text(json.dumps(record))
    assert run("reproduce", artifact, "--json").json["error"]["code"] == "no-source"


def test_a_shard_that_is_cut_or_gone_differs(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    first, second = sorted(artifact.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    (artifact / "foreign.safetensors").write_bytes(b"x")
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert outcome.code == 6
    named = [each["file"] for each in outcome.json["differing"]]
    assert named == ["foreign.safetensors", first.name, second.name]


def test_what_a_record_claims_and_nobody_asked_is_told(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())
    record["producer"]["version"] = "9.9.9"
    record["source"] = {"repo": "org/m", "revision": "a" * 40}
    (artifact / RECORD).write_text(json.dumps(record))
    outcome = run("reproduce", artifact, "--source", source)
    told = " ".join(outcome.out.split())
    assert outcome.code == 0
    assert f"read from {source}: the record says org/m, which was not asked" in told
    assert f"(made by fp4convert 9.9.9; now by {__version__})" in told


def test_zero_passes_are_recorded(source, tmp_path):
    """0 equals False, and is a number that somebody gave."""
    calibration = calibrate(tmp_path / "c.safetensors", source, "full")
    words = ("--format", "nvfp4", "--method", "gptq", "--calibration", calibration, "--passes", 0)
    artifact = made(source, tmp_path / "out", *words)
    assert json.loads((artifact / RECORD).read_text())["options"]["passes"] == 0
    outcome = run("reproduce", artifact, "--source", source, "--calibration", calibration, "--json")
    assert (outcome.code, outcome.json["reproduced"]) == (0, True)


def test_names_of_recipes_and_numbers_stay_these_beside_files_of_that_name(
    source, tmp_path, monkeypatch
):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    for name in ("mlp_only", "0.5"):
        (place / name).write_bytes(b"x")
    words = ("--format", "nvfp4", "--recipe", "mlp_only", "--activations", 4, "--input-scale")
    artifact = made(source, tmp_path / "out", *words, "0.5")
    options = json.loads((artifact / RECORD).read_text())["options"]
    assert (options["recipe"], options["input_scale"]) == ("mlp_only", 0.5)
    assert run("reproduce", artifact, "--source", source).code == 0


@pytest.mark.parametrize("file", ["model.safetensors", RECORD])
def test_a_pipe_in_an_artifact_ends_no_command_in_a_wait(file, tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.weight": ("BF16", (32, 64), bytes(4096))}
    source = write_single(tmp_path / "m", tensors)
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    (artifact / file).unlink()
    os.mkfifo(artifact / file)
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert outcome.code == (2 if file == RECORD else 6)


def test_names_in_a_record_that_no_disk_has_end_in_no_traceback(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())
    record["files"] |= {f"{'x' * 300}.safetensors": "0" * 64, "a\0b.safetensors": "0" * 64}
    (tmp_path / "record.json").write_text(json.dumps(record))
    outcome = run("reproduce", tmp_path / "record.json", "--source", source, "--json")
    assert outcome.code == 6
    assert len(outcome.json["differing"]) == 2


def test_what_cannot_be_reproduced_is_refused(source, tmp_path):
    artifact = made(source, tmp_path / "out", "--format", "nvfp4")
    record = json.loads((artifact / RECORD).read_text())

    def refused(*options: object, **changed: object) -> tuple[int, str, str]:
        known = {**record, **changed}
        known = {key: value for key, value in known.items() if value is not None}
        (artifact / RECORD).write_text(json.dumps(known))
        outcome = run("reproduce", artifact, *options, "--json")
        error = outcome.json["error"]
        return outcome.code, error["code"], error["message"]

    at = ("--source", source)
    assert refused()[:2] == (2, "no-source")
    assert refused(*at, options=None)[:2] == (2, "not-reproducible")
    for name, value in HOSTILE:
        found = refused(*at, options={"format": "nvfp4", name: value})
        assert found[:2] == (2, "not-reproducible"), (name, value, found)
    newer = refused(*at, options={"format": "nvfp4", "colour": "red"})
    assert newer[:2] == (2, "not-reproducible")
    assert "'colour'" in newer[2]
    asked = {**record["options"], "global_scale": {"sha256": "0" * 64}}
    assert refused(*at, options=asked)[:2] == (2, "reproduce-file")
    other = refused(*at, "--global-scale", artifact / "config.json", options=asked)
    assert other[:2] == (2, "reproduce-file")
    assert "not 000000000000..." in other[2]
    without = refused(*at, "--global-scale", artifact / "config.json")
    assert without[:2] == (2, "reproduce-file")
    assert "made without" in without[2]


def changed(source: Path, folder: Path) -> Path:
    """A copy with every weight doubled, in the first shard."""
    copy = shutil.copytree(source, folder)
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    values = np.frombuffer(data[begin:], np.uint16)
    shard.write_bytes(
        data[:begin] + np.where(values & 0x7FFF, values + 0x80, 0).astype("<u2").tobytes()
    )
    return copy


def test_a_folder_that_gives_other_scales_is_refused_and_a_copy_is_not(source, tmp_path):
    """Its place is nobody's business, and its other files do not matter: what is taken counts."""
    doubled = changed(source, tmp_path / "doubled")
    scales = [
        made(each, tmp_path / f"s{n}", "--format", "nvfp4")
        for n, each in enumerate((source, doubled))
    ]
    inputs = ("--format", "nvfp4", "--activations", "4", "--input-scale")
    numbers = [made(source, tmp_path / f"i{n}", *inputs, n) for n in ("0.5", "0.25")]
    for option, (right, wrong), more in (
        ("--global-scale", scales, ()),
        ("--input-scale", numbers, ("--activations", "4")),
    ):
        artifact = tmp_path / option[2:]
        made(source, artifact, "--format", "nvfp4", option, right, *more)
        asked = json.loads((artifact / RECORD).read_text())["options"][option[2:].replace("-", "_")]
        assert [len(asked["taken"]), *asked] == [64, "taken"]
        again = ("reproduce", artifact, "--source", source, "--json", option)
        copy = shutil.copytree(right, tmp_path / f"copy{option}")
        (copy / "README.md").write_text("moved")
        assert run(*again, copy).json["reproduced"] is True
        assert run(*again[:-1]).json["error"]["code"] == "reproduce-file"
        error = run(*again, wrong).json["error"]
        assert (error["code"], error["exit"]) == ("reproduce-file", 2)
        assert f"{option} {wrong} is not the one that was used" in error["message"]


def test_one_with_an_adapter_is_reproduced_with_it_and_with_no_other(tmp_path):
    source = make_llama(tmp_path / "source")
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    adapters = [write_adapter(source, tmp_path / f"lora{n}", config, seed=n) for n in range(2)]
    artifact = made(source, tmp_path / "out", "--format", "nvfp4", "--lora", adapters[0])
    words = ("reproduce", artifact, "--source", source, "--json")
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    for adapter in (adapters[0], copy):
        assert run(*words, "--lora", adapter).json["reproduced"] is True
    assert run(*words).json["error"]["code"] == "reproduce-file"
    error = run(*words, "--lora", adapters[1]).json["error"]
    assert error["code"] == "reproduce-file"
    assert f"--lora {adapters[1]} is not the one that was used" in error["message"]


def test_another_repository_is_read_at_the_recorded_commit_where_it_has_it(hub, source, tmp_path):
    commit = hub.add("org/m", source)
    artifact = made("org/m", tmp_path / "out", "--format", "nvfp4")
    assert run("reproduce", artifact, "--json").json["source_revision"] == commit
    hub.add("me/copy", source)
    newer = hub.add("me/copy", changed(source, tmp_path / "changed"))
    copy, again = hub.repos["me/copy"], ("reproduce", artifact, "--source", "me/copy")
    copy.commits[commit] = hub.repos["org/m"].commits[commit]
    found = run(*again, "--json")
    assert (found.code, found.json["source_revision"]) == (0, commit)
    del copy.commits[commit]
    found = run(*again, "--json")
    assert (found.code, found.json["reproduced"]) == (6, False)
    told = (found.json["source_revision"], found.json["recorded_revision"])
    assert told == (newer, commit)
    text = " ".join(run(*again).out.split())
    assert f"read from me/copy at commit {newer}: the recorded one, {commit}, is not there" in text
    # The recorded repository without its commit is no other one.
    hub.add("org/m", source)
    del hub.repos["org/m"].commits[commit]
    assert run("reproduce", artifact, "--json").json["error"]["code"] == "no-revision"


def test_scales_of_a_repository_are_compared_with_those_that_were_taken(hub, source, tmp_path):
    scales = made(source, tmp_path / "scales", "--format", "nvfp4")
    hub.add("me/scales", scales)
    words = ("--format", "nvfp4", "--global-scale", "me/scales")
    artifact = made(source, tmp_path / "out", *words)
    asked = json.loads((artifact / RECORD).read_text())["options"]["global_scale"]
    assert (asked["repo"], len(asked["taken"])) == ("me/scales", 64)
    again = ("reproduce", artifact, "--source", source, "--json")
    assert run(*again).json["reproduced"] is True
    assert run(*again, "--global-scale", scales).json["reproduced"] is True
    hub.add("me/scales", made(changed(source, tmp_path / "c"), tmp_path / "o", "--format", "nvfp4"))
    assert run(*again).json["error"]["code"] == "reproduce-file"


def test_a_subfolder_of_a_repository_is_recorded(hub, source, tmp_path):
    shutil.copytree(source, tmp_path / "repo" / "inner")
    (tmp_path / "repo" / "README.md").write_text("x")
    hub.add("org/m", tmp_path / "repo")
    words = ("--format", "nvfp4", "--subfolder", "inner")
    artifact = made("org/m", tmp_path / "out", *words)
    assert json.loads((artifact / RECORD).read_text())["options"]["subfolder"] == "inner"
    assert run("reproduce", artifact, "--json").json["reproduced"] is True


def test_a_source_is_read_at_the_recorded_commit(hub, source, tmp_path):
    """The repository has moved on since; where the commit is gone, no other takes its place."""
    commit = hub.add("org/m", source)
    artifact = made("org/m", tmp_path / "out", "--format", "nvfp4")
    hub.add("org/m", changed(source, tmp_path / "c"))
    verified = run("verify", artifact, "--source", "org/m", "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    del hub.repos["org/m"].commits[commit]
    (tmp_path / "text.txt").write_text("Some words.")
    words = ("--source", "org/m", "--json")
    evaluated = ("evaluate", artifact, "--text", tmp_path / "text.txt")
    commands = [("verify", artifact), ("inspect", artifact), ("compare", artifact, artifact)]
    for command in (*commands, evaluated):
        error = run(*command, *words).json["error"]
        assert (error["code"], "a folder on this disk" in error["next"]) == ("no-revision", True)


# Every dialect that transcode reads and that it writes, and every format: options, from, to.
TRANSCODED = {
    "nvfp4": (("--format", "nvfp4"), "mlx", "comfy"),
    "nvfp4, plain": (("--format", "nvfp4"), "quark", "plain"),
    "nvfp4, 4 bits": (("--format", "nvfp4", "--activations", "4"), "comfy", "quark"),
    "mxfp4": (("--format", "mxfp4"), "plain", "mlx"),
    "fp8": (("--format", "fp8"), "deepseek", "compressed-tensors"),
    "mxfp8": (("--format", "mxfp8"), "compressed-tensors", "modelopt"),
    "cache": (("--format", "nvfp4", "--kv-cache", "fp8"), "modelopt", "compressed-tensors"),
}


@pytest.mark.parametrize(("options", "own", "other"), TRANSCODED.values(), ids=TRANSCODED)
def test_what_was_transcoded_is_reproduced(options, own, other, source, tmp_path):
    """The record has both steps, also where quantize gives other bytes in the last dialect."""
    once, artifact = made(source, tmp_path / "once", *options, "--dialect", own), tmp_path / "t"
    assert run("transcode", once, "--dialect", other, "-o", artifact, "-q").code == 0
    outcome = run("reproduce", artifact, "--source", source, "--json")
    assert (outcome.code, outcome.json["reproduced"]) == (0, True)


def test_several_steps_and_their_options_are_done_again(tmp_path, monkeypatch):
    """A scale as its reciprocal and back is another one: the way counts, not the end."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tensors = {"model.layers.0.self_attn.o_proj.weight": weight()}
    tensors["model.embed_tokens.weight"] = ("F32", (32, 64), b"\1\2\3\x3e" * (32 * 64))
    source = write_single(tmp_path / "source", tensors, {"model_type": "llama"})
    made(source, tmp_path / "0", "--format", "mxfp4")
    steps = (
        ("--dialect", "plain", "--scale-layout", "128x4"),
        ("--dialect", "compressed-tensors", "--format", "nvfp4"),
        ("--dialect", "modelopt", "--keep-dtype", "fp16"),
        ("--dialect", "compressed-tensors"),
    )
    for number, step in enumerate(steps):
        words = ("transcode", tmp_path / f"{number}", "-o", tmp_path / f"{number + 1}", *step, "-q")
        assert run(*words).code == 0
    artifact = tmp_path / f"{len(steps)}"
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    again = ("reproduce", artifact, "--source", source, "--json")
    assert run(*again).json["reproduced"] is True
    assert not list(scratch.iterdir())
    shard = sorted(artifact.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = run(*again).json
    assert [each["file"] for each in found["differing"]] == [shard.name]
    record = json.loads((artifact / RECORD).read_text())
    asked = record["options"]
    for steps in (
        [*asked["transcoded"][:-1], {"dialect": "gguf", "template": True}],
        "plain",
        [5],
        [{}],
        [{"dialect": 5}],
        [{"dialect": "plain", "output": "/tmp/x"}],
    ):
        asked["transcoded"] = steps
        (artifact / RECORD).write_text(json.dumps(record))
        error = run(*again).json["error"]
        assert (error["code"], error["exit"]) == ("not-reproducible", 2)
