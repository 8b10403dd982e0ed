"""The state of an output folder, damaged in every way: it proves nothing then, and is never
followed.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoints import FIRST, SECOND, run, run_alone, unless_given, write_llama

from fp4convert.execution.folder import entered
from fp4convert.execution.plan_file import Done, Manifest, TaskFiles
from fp4convert.numerics.error_sums import Account, Sums

STATE, RECORD = ".fp4convert", "quantization_config.json"
DEEP, BIG = b"[" * 100_000, b"9" * 6000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("state") / "source", **{"tokenizer.json": b"{}", "empty.txt": b""}
    )


@pytest.fixture(scope="module")
def clean(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("state") / "out"
    assert quantize(source, out).code == 0
    return out


@pytest.fixture
def out(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "out")


def quantize(source: Path, out: Path, *options: str):
    asked = unless_given(options, "--format", "nvfp4")
    return run("quantize", source, "-o", out, "--json", "-q", *asked)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and STATE not in path.parts)
    return {path.name: path.read_bytes() for path in files}


def record_of(out: Path) -> Path:
    """The record of the first shard, which shares a scale group with the second."""
    return next(path for path in (out / STATE / "done").iterdir() if FIRST in path.read_text())


def is_redone(source: Path, out: Path, clean: Path, *codes: str) -> None:
    """`merge` refuses, and the command itself ends with the bytes of a clean run."""
    refused = run("merge", out, "--json")
    assert (refused.code, refused.json["error"]["code"] in codes) == (5, True), refused
    assert quantize(source, out).code == 0
    assert contents(out) == contents(clean)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0\0",
        b"\xff",
        b"NaN",
        b"null",
        b"[]",
        b"7",
        b'"files"',
        DEEP,
        b'{"files": ' + BIG + b"}",
        b'{"files": {"a',
    ],
    ids=lambda text: str(text[:12]),
)
def test_a_record_that_is_none_has_its_task_done_again(text, source, out, clean):
    record_of(out).write_bytes(text)
    is_redone(source, out, clean, "unfinished")


@pytest.mark.parametrize(
    "scale",
    [float("nan"), float("inf"), -1.0, 1e308, 1, 10**400, True, None, "x", [1.0], {"a": 1.0}],
    ids=str,
)
def test_a_global_scale_that_cannot_be_has_its_task_done_again(scale, source, out, clean):
    entry = json.loads(record_of(out).read_text())
    assert entry["global_scales"]
    record_of(out).write_text(
        json.dumps({**entry, "global_scales": dict.fromkeys(entry["global_scales"], scale)})
    )
    is_redone(source, out, clean, "unfinished", "scale-group")


@pytest.mark.parametrize("sha256", ["", "0" * 64, "\ud800", 5, None, ["a"]], ids=ascii)
def test_a_hash_that_is_another_has_its_task_done_again(sha256, source, out, clean):
    entry = json.loads(record_of(out).read_text())
    record_of(out).write_text(json.dumps({**entry, "files": {FIRST: sha256}}))
    is_redone(source, out, clean, "unfinished", "damaged")


ACCOUNTS = {
    "a-list": [["m", {}]],
    "elements": {"sums": {"elements": 0}},
    "histogram-short": {"sums": {"histogram": [1, 2]}},
    "histogram-negative": {"sums": {"histogram": [-1] * 16}},
    "clipped": {"sums": {"clipped": 1e999}},
    "noise": {"sums": {"noise": 10**400}},
    "adapter": {"adapter": [1.0]},
    "exact": {"exact": [float("inf"), 1]},
}


@pytest.mark.parametrize("change", ACCOUNTS)
def test_an_account_that_is_none_has_its_task_done_again(change, source, out, clean):
    entry, changed = json.loads(record_of(out).read_text()), ACCOUNTS[change]
    (module, account), *_ = entry["accounts"].items()
    if isinstance(changed, dict):
        sums = {**account["sums"], **changed.get("sums", {})}
        changed = {**entry["accounts"], module: {**account, **changed, "sums": sums}}
    record_of(out).write_text(json.dumps({**entry, "accounts": changed}))
    is_redone(source, out, clean, "unfinished")


def test_a_record_is_parsed_once_as_long_as_it_stays_the_same(tmp_path, monkeypatch):
    plan = Manifest({}, {}, (), {}, None, RECORD)
    task, parsed, parse = TaskFiles("a", {"m": 1}), [], Done.from_json
    monkeypatch.setattr(Done, "from_json", lambda text: parsed.append(text) or parse(text))
    (tmp_path / "m").write_bytes(b"m")
    with entered(tmp_path, plan) as folder:
        record = folder.state / "done" / "a.json"
        assert folder.record_of(task) is None
        found = []
        for sha256 in "0" * 64, "1" * 64:  # of one size
            (tmp_path / "new").write_text(Done({"m": sha256}).as_json())
            os.replace(tmp_path / "new", record)
            found += [folder.record_of(task) for _ in range(3)]
        assert [done.files["m"][0] for done in found] == ["0", "0", "0", "1", "1", "1"]
        assert len(parsed) == 2
        record.write_text("{")
        assert folder.record_of(task) is None
        record.unlink()
        assert folder.record_of(task) is None


def test_the_record_of_a_shard_is_what_asdict_makes_of_it():
    sums = Sums(32, 1.5, 0.25, 1.25, 2.0, 3, tuple(range(16)))
    done = Done({"m": "0" * 64}, {"g": 0.1}, {"l": Account("l.weight", "nvfp4", "source", sums)})
    assert done.as_json() == json.dumps(asdict(done), sort_keys=True)
    assert Done.from_json(done.as_json()) == done


CHANGES = {
    "size": lambda plan: plan["tasks"][0]["files"].update({FIRST: "x"}),
    "size-huge": lambda plan: plan["tasks"][0]["files"].update({FIRST: 10**30}),
    "no-tasks": lambda plan: plan.update(tasks=[]),
    "file-nul": lambda plan: plan["tasks"][0]["files"].update({"a\0": 1}),
    "file-surrogate": lambda plan: plan["tasks"][0]["files"].update({"\ud800": 1}),
    "key-long": lambda plan: plan["tasks"][0].update(key="a" * 999),
    "text-number": lambda plan: plan["texts"].update({"config.json": 5}),
    "text-surrogate": lambda plan: plan["texts"].update({"config.json": "\ud800"}),
    "text-more": lambda plan: plan["texts"].update({"thesis.txt": "mine"}),
    "no-texts": lambda plan: plan.update(texts={}),
    "record": lambda plan: plan.update(record={}),
    "last-nul": lambda plan: plan.update(last="\0"),
    "last-folder": lambda plan: plan.update(last=""),
    "identity": lambda plan: plan.update(identity={"format": "\x1b[31m"}),
    "traits": lambda plan: plan.update(traits={}),
    "source": lambda plan: plan.update(source={"repo": "org/m", "revision": "0" * 40}),
    "hash": lambda plan: plan.pop("sha256"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_was_changed_is_refused_by_every_command_that_writes(change, source, out):
    (out / "thesis.txt").write_bytes(b"years of work")
    path = out / STATE / "plan.json"
    plan = json.loads(path.read_text())
    CHANGES[change](plan)
    path.write_text(json.dumps(plan))
    before = contents(out)
    for outcome in (
        run("merge", out, "--json"),
        quantize(source, out),
        quantize(source, out, "--format", "mxfp4", "--force"),
    ):
        error = outcome.json["error"]
        assert (outcome.code, error["code"]) == (5, "other-plan")
        assert "plan.json is damaged" in error["message"]
    assert contents(out) == before


IMPOSSIBLE = {
    **{key: CHANGES[key] for key in ("size", "file-nul", "file-surrogate", "last-nul")},
    **{key: CHANGES[key] for key in ("last-folder", "text-number", "text-surrogate")},
    "size-negative": lambda plan: plan["tasks"][0]["files"].update({FIRST: -1}),
    "outside": lambda plan: plan.update(last="../thesis.txt"),
    "dialect-number": lambda plan: plan["identity"].update(dialect=1e-45),
    "commit-number": lambda plan: plan["source"].update(revision=7),
    "task-empty": lambda plan: plan["tasks"].append({"key": "x", "files": {}}),
    "format-number": lambda plan: plan["record"].update(format=4),
    "record-surrogate": lambda plan: plan["record"].update(format="\ud800"),
}


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_what_no_plan_has_is_refused_whatever_its_hash_says(change, out):
    path = out / STATE / "plan.json"
    plan = json.loads(path.read_text())
    IMPOSSIBLE[change](plan)
    del plan["sha256"]
    plan["sha256"] = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
    path.write_text(json.dumps(plan))
    (out / RECORD).unlink()
    merged = run("merge", out, "--json")
    assert (merged.code, merged.json["error"]["code"]) == (5, "other-plan")


def replace(path: Path, make: str, elsewhere: Path) -> None:
    """Put something of another kind in a file's place."""
    path.rename(elsewhere)
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "link-to-itself":
        path.symlink_to(path)
    elif make == "link-nowhere":
        path.symlink_to("nowhere")
    elif make == "link-elsewhere":
        path.symlink_to(elsewhere)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", ["pipe", "link-to-itself", "link-nowhere"])
@pytest.mark.parametrize("file", [FIRST, "empty.txt"])
def test_a_file_in_whose_place_is_none_is_written_again(file, make, source, out, clean, tmp_path):
    replace(out / file, make, tmp_path / "elsewhere")
    merged = run_alone("merge", out, "--json")  # apart, for reading a pipe would never end
    assert (merged.code, merged.json["error"]["code"]) == (5, "unfinished")
    assert run_alone("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    assert contents(out) == contents(clean)
    assert not (out / file).is_symlink()


@pytest.mark.parametrize(
    "file", [FIRST, "config.json", RECORD, f"{STATE}/plan.json", f"{STATE}/ended.json"]
)
def test_a_folder_in_the_place_of_a_file_is_told_and_stays(file, source, out, tmp_path):
    replace(out / file, "folder", tmp_path / "elsewhere")
    (out / file / "thesis.txt").write_bytes(b"years of work")
    for outcome in (
        quantize(source, out),
        run("merge", out, "--json"),
        quantize(source, out, "--format", "mxfp4", "--force"),
    ):
        error = outcome.json["error"]
        assert (outcome.code, error["exit"]) == (5, 5)
        assert str(out) in error["message"]
    assert (out / file / "thesis.txt").read_bytes() == b"years of work"


def test_a_link_to_a_shard_elsewhere_is_not_written_through(source, out, clean, tmp_path):
    replace(out / FIRST, "link-elsewhere", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"\0" * (clean / FIRST).stat().st_size)
    is_redone(source, out, clean, "damaged")
    assert not (out / FIRST).is_symlink()
    assert not any((tmp_path / "elsewhere").read_bytes())


@pytest.mark.parametrize("name", ["done", "claims", "tmp"])
def test_a_file_in_the_place_of_a_folder_is_told(name, source, out, tmp_path):
    (out / STATE / name).rename(tmp_path / "elsewhere")
    (out / STATE / name).write_bytes(b"x")
    error = quantize(source, out).json["error"]
    assert (error["exit"], error["code"]) == (5, "cannot-write")


def test_parts_of_two_plans_in_one_folder_are_not_merged(source, tmp_path):
    """Copied together, the second plan lies over the first; its own shards alone count."""
    parts = {0: (), 1: ("--exclude", "*.o_proj", "--exclude", "*.q_proj")}
    for index, options in parts.items():
        share = ("--shard-index", str(index), "--num-shards", "2")
        assert quantize(source, tmp_path / f"part-{index}", *share, *options).code == 0
        shutil.copytree(tmp_path / f"part-{index}", tmp_path / "both", dirs_exist_ok=True)
    merged = run("merge", tmp_path / "both", "--json")
    assert (merged.code, merged.json["error"]["code"]) == (5, "unfinished")
    assert FIRST in merged.json["error"]["message"]
    finished, alone = (quantize(source, tmp_path / name, *parts[1]) for name in ("both", "alone"))
    assert finished.json["digest"] == alone.json["digest"]


@pytest.mark.parametrize("options", [(), ("--force",)])
@pytest.mark.parametrize("name", [".", "tmp", "claims", "done"])
def test_no_folder_of_ours_is_a_link_to_files_of_somebody_else(
    name, options, source, out, tmp_path
):
    mine = tmp_path / "mine" / "deep"
    mine.mkdir(parents=True)
    (mine / "thesis.tex").write_text("years of work")
    place = (out / STATE / name).resolve()
    if name == ".":
        shutil.copytree(place, mine.parent, dirs_exist_ok=True)
    shutil.rmtree(place)
    place.symlink_to(mine.parent)
    (out / SECOND).unlink()
    before = {path: path.read_bytes() for path in mine.parent.rglob("*") if path.is_file()}
    refused = quantize(source, out, *options)
    assert (refused.code, refused.json["error"]["code"]) == (5, "foreign-output")
    assert {path: path.read_bytes() for path in mine.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("options", [(), ("--exclude", "*.o_proj", "--force")])
def test_no_folder_of_the_result_is_a_link_to_files_of_somebody_else(options, tmp_path):
    source, out, mine = write_llama(tmp_path / "source"), tmp_path / "out", tmp_path / "mine"
    (source / "assets").mkdir()
    (source / "assets" / "notes.txt").write_text("theirs")
    assert quantize(source, out).code == 0
    shutil.move(out / "assets", mine)
    (mine / "notes.txt").write_text("mine")
    (out / "assets").symlink_to(mine)
    if options:  # the file is none of the new plan, and would go
        (source / "assets" / "notes.txt").unlink()
    refused = quantize(source, out, *options)
    assert (refused.code, refused.json["error"]["code"]) == (5, "foreign-output")
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("file", ["plan.json", "done"])
def test_a_pipe_in_the_place_of_a_file_of_ours_ends_no_command_in_a_wait(file, source, out):
    place = out / STATE / file
    if place.is_dir():
        place = next(place.iterdir())
    place.unlink()
    os.mkfifo(place)
    for words in (("merge", out), ("quantize", source, "--format", "nvfp4", "-o", out)):
        outcome = run_alone(*words, "--json")
        assert outcome.code in (0, 5)
        assert "Traceback" not in outcome.err
