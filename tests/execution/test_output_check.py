"""A dry run says no where the run would, with the same words, and changes nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import FIRST, llama_shards, run, write_llama, write_single
from diffusion import write_wan

from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.errors import OutputError
from fp4convert.execution import output_check
from fp4convert.execution.job import check_output
from fp4convert.execution.plan_file import DONE, STATE, Done
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source

NVFP4 = ("--format", "nvfp4")
ELSEWHERE = object()  # where shards go: nothing is asked of it


def tree(folder: Path) -> list[tuple[str, int, int]]:
    """Every file and folder below, with its size and time."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


def both_refuse(tmp_path: Path, *words: object) -> dict:
    """What the dry run says, which is what the run says."""
    before = tree(tmp_path)
    dry = run("quantize", *words, "--dry-run", "--json")
    assert tree(tmp_path) == before
    real = run("quantize", *words, "--json")
    assert dry.code != 0, dry.out
    assert (dry.code, dry.json) == (real.code, real.json)
    return dry.json["error"]


def inside(source: Path, tmp_path: Path) -> list[object]:
    return [source, *NVFP4, "-o", source / "out"]


def a_file(source: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "out").write_text("mine")
    return [source, *NVFP4, "-o", tmp_path / "out"]


def below_a_file(source: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "file").write_text("mine")
    return [source, *NVFP4, "-o", tmp_path / "file" / "out"]


def foreign(source: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    return [source, *NVFP4, "-o", tmp_path / "out"]


def other_format(source: Path, tmp_path: Path) -> list[object]:
    assert run("quantize", source, "--format", "mxfp4", "-o", tmp_path / "out").code == 0
    return [source, *NVFP4, "-o", tmp_path / "out"]


def other_options(source: Path, tmp_path: Path) -> list[object]:
    assert run("quantize", source, *NVFP4, "-o", tmp_path / "out").code == 0
    return [source, *NVFP4, "-o", tmp_path / "out", "--scale-rule", "amax"]


def linked(source: Path, tmp_path: Path) -> list[object]:
    assert run("quantize", source, *NVFP4, "-o", tmp_path / "out").code == 0
    done = tmp_path / "out" / ".fp4convert" / "done"
    done.rename(tmp_path / "elsewhere")
    done.symlink_to(tmp_path / "elsewhere")
    return [source, *NVFP4, "-o", tmp_path / "out"]


def dangling(source: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    return [source, *NVFP4, "-o", tmp_path / "out"]


def no_repository(source: Path, tmp_path: Path) -> list[object]:
    return [source, *NVFP4, "-o", tmp_path / "out", "--push-to-hub", ""]


def no_token(source: Path, tmp_path: Path) -> list[object]:
    return [source, *NVFP4, "-o", tmp_path / "out", "--push-to-hub", "me/model"]


def pushed_part(source: Path, tmp_path: Path) -> list[object]:
    part = ("--shard-index", 0, "--num-shards", 2, "--push-to-hub", "me/model")
    return [source, *NVFP4, "-o", tmp_path / "out", *part]


CASES = {
    inside: (2, "output-in-source"),
    a_file: (5, "foreign-output"),
    foreign: (5, "foreign-output"),
    other_format: (5, "other-plan"),
    other_options: (5, "other-plan"),
    linked: (5, "foreign-output"),
    below_a_file: (5, "cannot-write"),
    dangling: (5, "cannot-write"),
    no_repository: (2, "repo-name"),
    no_token: (4, "no-token"),
    pushed_part: (2, "share"),
}


@pytest.mark.parametrize(("write", "expected"), CASES.items(), ids=[w.__name__ for w in CASES])
def test_what_the_run_refuses_its_dry_run_does(write, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path.parent / "no-home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    error = both_refuse(tmp_path, *write(write_llama(tmp_path / "source"), tmp_path))
    assert (error["exit"], error["code"]) == expected


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    source = write_llama(tmp_path / "source")
    real = os.statvfs

    def full(path):
        found = list(real(path))
        found[4] = 1  # blocks that a user may take
        return os.statvfs_result(found)

    monkeypatch.setattr(output_check.os, "statvfs", full)
    words = ("quantize", source, *NVFP4, "-o", tmp_path / "out")
    before = tree(tmp_path)
    dry, seen = run(*words, "--dry-run", "--json"), run(*words, "--dry-run")
    assert tree(tmp_path) == before
    real = run(*words, "--json")
    assert (dry.code, seen.code, real.code) == (5, 5, 5)
    assert dry.json["error"] == real.json["error"]
    assert dry.json["error"]["code"] == "disk-full"
    # The plan is told all the same: how much room it needs, and why.
    assert dry.json["output_bytes"] > 0
    assert "quantize" in seen.out
    assert "error[disk-full]" in seen.err


def test_room_that_a_replaced_plan_gives_back_counts(tmp_path, monkeypatch):
    """--force removes the other plan's files first."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, "--format", "mxfp4", "-o", out).code == 0
    before = tree(tmp_path)
    words = (source, *NVFP4, "-o", out, "--force")
    assert run("quantize", *words, "--dry-run").code == 0
    assert tree(tmp_path) == before
    assert run("quantize", *words).code == 0


def test_files_that_a_replaced_plan_leaves_are_room_on_a_full_disk(tmp_path, monkeypatch):
    """The other plan's two shards and their index go; one shard takes their place."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    assert run("quantize", source, *NVFP4, "-o", out).code == 0
    joined = {name: one for shard in llama_shards().values() for name, one in shard.items()}
    other, real = write_single(tmp_path / "other", joined), os.statvfs

    def full(path):
        found = list(real(path))
        found[4] = 0
        return os.statvfs_result(found)

    monkeypatch.setattr(output_check.os, "statvfs", full)
    words = ("quantize", other, *NVFP4, "--dry-run", "-o")
    assert run(*words, out, "--force").code == 0
    assert run(*words, tmp_path / "new").code == 5


def test_ray_has_to_be_there_for_a_dry_run_too(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write_llama(tmp_path / "source")
    error = both_refuse(tmp_path, source, *NVFP4, "-o", tmp_path / "out", "--ray", "auto")
    assert error["code"] == "no-ray"


def test_what_the_run_continues_its_dry_run_shows(tmp_path):
    """An unfinished and a finished output of the same plan, and of other options unfinished."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    words = ("quantize", source, *NVFP4, "-o", out)
    assert run(*words, "--dry-run").code == 0
    assert not out.exists()
    assert run(*words).code == 0
    assert run(*words, "--dry-run").code == 0
    (out / "quantization_config.json").unlink()
    (out / FIRST).unlink()
    before = tree(tmp_path)
    assert run(*words, "--dry-run").code == 0
    assert run(*words, "--scale-rule", "amax", "--dry-run").code == 0
    assert tree(tmp_path) == before
    assert run(*words, "--scale-rule", "amax").code == 0


def test_of_a_pipeline_every_folder_is_looked_at(tmp_path):
    source, out = write_wan(tmp_path / "pipe"), tmp_path / "out"
    (out / "transformer").mkdir(parents=True)
    (out / "transformer" / "mine.txt").write_text("mine")
    error = both_refuse(tmp_path, source, *NVFP4, "-o", out)
    assert error["code"] == "foreign-output"


def test_shards_that_left_need_no_room_where_the_plan_is_lost(tmp_path, monkeypatch):
    """Their records are by keys, which a dry run makes for a folder of an earlier run alone."""
    source = open_source(str(write_llama(tmp_path / "m")))
    job = artifact_job(
        source, prepare_quantize(take_apart(source, QuantizeOptions("", format="nvfp4")))
    )
    settings = Settings("cpu", elsewhere=ELSEWHERE)
    monkeypatch.setattr(output_check, "free_beside", lambda root: job.output_nbytes // 2)
    with pytest.raises(OutputError, match="needs"):
        check_output(job, tmp_path / "out", replace(settings, elsewhere=None))
    done = tmp_path / "out" / STATE / DONE
    done.mkdir(parents=True)
    for task in job.tasks:
        if task.may_leave:
            gone = Done(dict.fromkeys(task.files, "0" * 64), is_gone=True)
            (done / f"{task.key}.json").write_text(gone.as_json())
    monkeypatch.setattr(output_check, "free_beside", lambda root: job.output_nbytes // 4)
    check_output(job, tmp_path / "out", settings)
