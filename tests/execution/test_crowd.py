"""Processes that come and go at the very moment in which another one looks: nobody is harmed, and
nobody is refused by chance.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from checkpoints import run, unless_given, weight, write_checkpoint
from paths import SUPPORT

from fp4convert.errors import OutputError
from fp4convert.execution import folder as folder_module
from fp4convert.execution.finish import ended_meanwhile
from fp4convert.execution.folder import OutputFolder, entered
from fp4convert.execution.leases import Leases
from fp4convert.execution.plan_file import read_manifest
from fp4convert.execution.settings import Settings
from fp4convert.execution.takeover import begin_plan

CROWD = SUPPORT.joinpath("crowd.py")
STATE, RECORD = ".fp4convert", "quantization_config.json"
DELAYS = (0.002, pytest.param(0.01, marks=pytest.mark.slow))  # seconds
# Stops itself between the look at the plan that is there and the writing of its own.
SLEEPER = """import os, signal, sys
from fp4convert.cli.app import main
from fp4convert.execution import takeover
check = takeover.check_space
def stop(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    return check(*arguments)
takeover.check_space = stop
sys.argv = ["fp4convert", *sys.argv[1:]]
main()"""
OPTIONS = {
    "a": (),
    "b": ("--exclude", "*.3.*"),
    "modelopt": ("--dialect", "modelopt"),
    "mxfp4": ("--format", "mxfp4"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    shards = {f"model-{n}.safetensors": {f"layers.{n}.o_proj.weight": weight(n)} for n in range(6)}
    return write_checkpoint(
        tmp_path_factory.mktemp("crowd") / "source",
        shards,
        None,
        **{"tokenizer.json": b"{}", "e": b""},
    )


def command(source: Path, out: Path, name: str, *more: str) -> list[str]:
    if name == "merge":
        return ["merge", str(out), "--json"]
    options = ("-o", str(out), "--json", "-q", "--workers", "1")
    own = unless_given((*OPTIONS[name], *more), "--format", "nvfp4")
    return ["quantize", str(source), *options, *map(str, own)]


@pytest.fixture(scope="module")
def clean(source, tmp_path_factory):
    """Finished folders by the name of their options."""
    folders = {name: tmp_path_factory.mktemp("clean") / "out" for name in OPTIONS}
    for name, out in folders.items():
        assert run(*command(source, out, name)).code == 0
    return folders


def hashes(folder: Path) -> dict[str, str]:
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and STATE not in path.relative_to(folder).parts
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_all(commands: list[list[str]], folder: Path, delay: float) -> list[tuple[int, dict, str]]:
    """(exit status, document, standard error) of each."""
    words = [sys.executable, CROWD, folder, str(delay)]
    ended = subprocess.run(
        words, input=json.dumps(commands), capture_output=True, text=True, check=True, timeout=100
    )
    return [
        (status, json.loads(out or "null"), err) for status, out, err in json.loads(ended.stdout)
    ]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize(
    ("before", "names", "more"),
    [
        ("", ["a"] * 8, ("--join",)),
        ("", ["a"] * 4, ()),
        ("finished", ["a", "a", "a", "merge"], ()),
        ("finished", ["merge"] * 3, ()),
        ("unfinished", ["b"] * 4, ()),
        ("finished", ["modelopt"] * 3, ("--force",)),
    ],
    ids=["8-join", "4-new", "merge-too", "merges", "4-unfinished", "3-force"],
)
def test_all_of_many_at_once_end_with_the_bytes_of_one(  # noqa: PLR0917
    before, names, more, delay, source, clean, tmp_path
):
    out = tmp_path / "out"
    if before:
        shutil.copytree(clean["a"], out)
    if before == "unfinished":
        (out / RECORD).unlink()
    outcomes = run_all([command(source, out, name, *more) for name in names], tmp_path, delay)
    assert [(status, err) for status, _, err in outcomes if status] == []
    assert len({document["digest"] for _, document, _ in outcomes}) == 1
    assert hashes(out) == hashes(clean["a" if names[0] == "merge" else names[0]])
    assert [path for name in ("claims", "tmp") for path in (out / STATE / name).iterdir()] == []


@pytest.mark.sweep(3)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("before", ["new", "unfinished"])
@pytest.mark.parametrize("names", [["a", "b"], ["a", "mxfp4"], ["modelopt", "a"]], ids="+".join)
def test_of_two_plans_at_once_one_is_carried_out_and_the_other_refused(
    names, before, delay, source, clean, tmp_path
):
    out = tmp_path / "out"
    if before == "unfinished":
        shutil.copytree(clean["a"], out)
        (out / RECORD).unlink()
    outcomes = run_all([command(source, out, name, "--force") for name in names], tmp_path, delay)
    done = [name for name, (status, _, _) in zip(names, outcomes, strict=True) if status == 0]
    refused = [document["error"] for status, document, _ in outcomes if status]
    assert done
    assert [error for error in refused if (error["exit"], error["code"]) != (5, "locked")] == []
    assert hashes(out) in [hashes(clean[name]) for name in done]


def test_one_that_comes_while_another_sweeps_keeps_its_files(clean, tmp_path, monkeypatch):
    out = shutil.copytree(clean["a"], tmp_path / "out")
    plan = read_manifest(out)
    with entered(out, plan) as first:
        newcomer, others = entered(out, plan), first.leases.others

        def others_and_one_more() -> list[str]:
            names = others()
            if not (out / STATE / "late").exists():
                (out / STATE / "late").touch()
                newcomer.__enter__()
            return names

        monkeypatch.setattr(first.leases, "others", others_and_one_more)
        begin_plan(first, Settings())
        assert len(list((out / STATE / "tmp").iterdir())) == 2
        newcomer.__exit__(None, None, None)


def test_one_that_leaves_while_another_sweeps_is_no_error(clean, tmp_path, monkeypatch):
    out = shutil.copytree(clean["a"], tmp_path / "out")
    (out / STATE / "tmp" / "leaving").mkdir()
    remove = shutil.rmtree

    def remove_twice(path: Path, **options: object) -> None:
        remove(path, ignore_errors=True)
        remove(path, **options)

    monkeypatch.setattr("fp4convert.execution.folder.shutil.rmtree", remove_twice)
    with entered(out, read_manifest(out)) as folder:
        begin_plan(folder, Settings())


def test_one_that_wakes_while_it_is_swept_finds_no_place_to_write(clean, tmp_path, monkeypatch):
    """A file that it made meanwhile kept its folder, and with it its leave to go on."""
    out = shutil.copytree(clean["a"], tmp_path / "out")
    place = out / STATE / "tmp" / "asleep"
    place.mkdir()
    remove = shutil.rmtree

    def remove_late(path: Path, **options: object) -> None:
        if place.exists():
            (place / "plan.json").touch()
            raise FileNotFoundError  # as where a file in it is renamed at that moment
        remove(path, **options)

    monkeypatch.setattr("fp4convert.execution.folder.shutil.rmtree", remove_late)
    with entered(out, read_manifest(out)) as folder:
        begin_plan(folder, Settings())
        assert not place.exists()
        monkeypatch.undo()


def test_files_that_are_renamed_while_the_room_is_measured_are_no_error(source, clean, tmp_path):
    out = tmp_path / "out"
    (out / STATE / "tmp" / "other").mkdir(parents=True)
    (out / STATE / "tmp" / "other" / "shard").symlink_to(
        "renamed"
    )  # listed, and not there when it is looked at
    assert (
        run(*command(source, out, "a")).json["digest"]
        == run(*command(source, clean["a"], "a")).json["digest"]
    )


def test_a_folder_that_another_began_meanwhile_is_not_foreign(source, clean, tmp_path, monkeypatch):
    out, listdir = tmp_path / "out", os.listdir
    out.mkdir()

    def list_late(path: object) -> list[str]:
        if path == out and not (out / STATE).exists():
            shutil.copytree(clean["a"], out, dirs_exist_ok=True)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", list_late)
    assert run(*command(source, out, "a")).code == 0


def test_a_process_without_its_files_begins_no_task(clean, tmp_path):
    out = shutil.copytree(clean["a"], tmp_path / "out")
    plan = read_manifest(out)
    with entered(out, plan) as folder:
        shutil.rmtree(folder.temps)
        folder.forget(plan.tasks[0])
        with pytest.raises(OutputError, match="no sign of life"):
            next(folder.take_tasks(plan.tasks))
    assert (out / RECORD).exists()


@pytest.mark.parametrize("when", ["at the first shard", "in the end"])
def test_a_plan_of_one_who_slept_takes_no_place_of_another(
    when, source, clean, tmp_path, monkeypatch
):
    """It held the lease to begin, and went on to write when another had begun, or had finished."""
    out = tmp_path / "out"
    words = [sys.executable, "-c", SLEEPER, *command(source, out, "a")]
    sleeper = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(sleeper.pid, os.WUNTRACED)[1])
    said: list[str] = []
    is_first = threading.Lock()

    def wake() -> None:
        if is_first.acquire(blocking=False):
            sleeper.send_signal(signal.SIGCONT)
            said.extend(sleeper.communicate(timeout=60))

    def settle(folder: OutputFolder, *arguments: object) -> None:
        finish(folder, *arguments)
        if when == "at the first shard":
            wake()

    finish = OutputFolder.settle
    monkeypatch.setattr(OutputFolder, "settle", settle)
    monkeypatch.setattr(folder_module, "Leases", partial(Leases, lease_seconds=0.5))
    assert run(*command(source, out, "mxfp4")).code == 0
    wake()
    assert sleeper.returncode == 5
    assert json.loads(said[0])["error"]["code"] == "given-up"
    assert hashes(out) == hashes(clean["mxfp4"])


def test_merge_waits_for_whoever_begins_another_plan(source, clean, tmp_path):
    """It had seen nobody at work on the plan before, and removes that one's files."""
    out = shutil.copytree(clean["a"], tmp_path / "out")
    words = [sys.executable, "-c", SLEEPER, *command(source, out, "mxfp4", "--force")]
    sleeper = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(sleeper.pid, os.WUNTRACED)[1])
    words = [sys.executable, "-m", "fp4convert", *command(source, out, "merge")]
    merging = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        merging.wait(3)
    sleeper.send_signal(signal.SIGCONT)
    said, _ = merging.communicate(timeout=60)
    sleeper.communicate(timeout=60)
    assert (merging.returncode, json.loads(said)["error"]["code"]) == (5, "other-plan")
    assert hashes(out) == hashes(clean["mxfp4"])
    assert sleeper.returncode == 0


def test_what_another_plan_ended_is_not_taken_for_the_own(clean, tmp_path):
    """Their files have the same names."""
    out = shutil.copytree(clean["mxfp4"], tmp_path / "out")
    plan = replace(read_manifest(out), traits={"other": "1"})
    with entered(out, plan) as folder:
        assert ended_meanwhile(folder, None) is None
    with entered(out, read_manifest(out)) as folder:
        assert ended_meanwhile(folder, None).digest
