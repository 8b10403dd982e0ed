"""Processes that are taken for dead, or die: by whom, how soon, and what they may still do when they wake up."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import write_zeros

HASTY = Path(__file__).with_name("hasty.py")
STATE = ".fp4convert"
OTHER = ("--dialect", "modelopt", "--force")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_zeros(tmp_path_factory.mktemp("given-up") / "source", count=10)


@pytest.fixture(scope="module")
def digests(source, tmp_path_factory):
    """Of clean runs, by the options."""
    outs = {options: tmp_path_factory.mktemp("clean") / "out" for options in ((), OTHER)}
    return {options: finish(quantize(source, out, *options))["digest"] for options, out in outs.items()}


def quantize(source: Path, out: Path, *options: str, host: str = "", skew: float = 0.0) -> subprocess.Popen[str]:
    command = ["quantize", source, "--format", "nvfp4", "-o", out, "--json", "-q", "--workers", "1", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, HASTY, host, str(skew), *map(str, command)], **pipes)


def finish(process: subprocess.Popen[str], code: int = 0) -> dict:
    text, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return json.loads(text)


def wait_for_shards(count: int, out: Path, process: subprocess.Popen[str]) -> None:
    while len(list(out.glob("part-*"))) < count:
        time.sleep(0.005)
        assert process.poll() is None, process.communicate()


def left_behind(out: Path) -> list[Path]:
    return [path for name in ("claims", "tmp") for path in (out / STATE / name).iterdir()]


def stamps(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_clocks_that_differ_split_the_work_all_the_same(skew, source, digests, tmp_path):
    out = tmp_path / "out"
    here, there = quantize(source, out), quantize(source, out, host="elsewhere", skew=skew)
    assert finish(here)["digest"] == finish(there)["digest"] == digests[()]
    assert left_behind(out) == []


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_what_a_dead_process_of_another_host_was_at_is_done_once_more_and_the_rest_is_not(skew, source, digests, tmp_path):
    out = tmp_path / "out"
    dead = quantize(source, out, host="elsewhere", skew=skew)
    wait_for_shards(2, out, dead)
    dead.kill()
    dead.communicate()
    finished = [file for path in (out / STATE / "done").iterdir() for file in json.loads(path.read_text())["files"]]
    before = {file: nanoseconds for file, nanoseconds in stamps(out).items() if file in finished}
    crowd = [quantize(source, out) for _ in range(2)]
    assert {finish(process)["digest"] for process in crowd} == {digests[()]}
    assert before.items() <= stamps(out).items()
    assert left_behind(out) == []


def test_a_dead_process_of_another_host_does_not_keep_another_plan_out(source, digests, tmp_path):
    out = tmp_path / "out"
    dead = quantize(source, out, host="elsewhere")
    wait_for_shards(1, out, dead)
    dead.kill()
    dead.communicate()
    assert finish(quantize(source, out, *OTHER))["digest"] == digests[OTHER]
