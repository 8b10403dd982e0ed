"""Processes that are taken for dead, or die: by whom, how soon, and what they may still do when
they wake up.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import WAIT_SECONDS, write_zeros
from paths import SUPPORT

HASTY = SUPPORT.joinpath("hasty_worker.py")
STATE = ".fp4convert"
OTHER = ("--dialect", "modelopt", "--force")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_zeros(tmp_path_factory.mktemp("given-up") / "source", count=10)


@pytest.fixture(scope="module")
def digests(source, tmp_path_factory):
    """Of clean runs, by the options."""
    outs = {options: tmp_path_factory.mktemp("clean") / "out" for options in ((), OTHER)}
    return {
        options: finish(quantize(source, out, *options))["digest"] for options, out in outs.items()
    }


def quantize(
    source: Path, out: Path, *options: str, host: str = "", skew: float = 0.0
) -> subprocess.Popen[str]:
    command = [
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        out,
        "--json",
        "-q",
        "--workers",
        "1",
        *options,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, HASTY, host, str(skew), *map(str, command)], **pipes)


def finish(process: subprocess.Popen[str], code: int = 0) -> dict:
    text, err = process.communicate(timeout=WAIT_SECONDS)
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


@pytest.mark.slow
@pytest.mark.parametrize("skews", [(0.0, -1e6), (0.0, 1e6), (-1.6e8, 0.0, 1.6e8)])
def test_clocks_that_differ_split_the_work_all_the_same(skews, source, digests, tmp_path):
    """Up to five years on either side."""
    out = tmp_path / "out"
    crowd = [
        quantize(source, out, host=f"host{number}" if skew else "", skew=skew)
        for number, skew in enumerate(skews)
    ]
    assert {finish(process)["digest"] for process in crowd} == {digests[()]}
    assert left_behind(out) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "skew",
    [pytest.param(-1e6, marks=pytest.mark.slow), 0.0, pytest.param(1e6, marks=pytest.mark.slow)],
)
def test_what_a_dead_process_of_another_host_was_at_is_done_once_more_and_the_rest_is_not(
    skew, source, digests, tmp_path
):
    out = tmp_path / "out"
    dead = quantize(source, out, host="elsewhere", skew=skew)
    wait_for_shards(2, out, dead)
    dead.kill()
    dead.communicate()
    finished = [
        file
        for path in (out / STATE / "done").iterdir()
        for file in json.loads(path.read_text())["files"]
    ]
    before = {file: nanoseconds for file, nanoseconds in stamps(out).items() if file in finished}
    crowd = [quantize(source, out) for _ in range(2)]
    assert {finish(process)["digest"] for process in crowd} == {digests[()]}
    assert before.items() <= stamps(out).items()
    assert left_behind(out) == []


@pytest.mark.slow
def test_a_dead_process_of_another_host_does_not_keep_another_plan_out(source, digests, tmp_path):
    out = tmp_path / "out"
    dead = quantize(source, out, host="elsewhere")
    wait_for_shards(1, out, dead)
    dead.kill()
    dead.communicate()
    assert finish(quantize(source, out, *OTHER))["digest"] == digests[OTHER]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), OTHER], ids=["same-plan", "other-plan"])
def test_a_process_that_wakes_up_after_it_was_given_up_changes_nothing(
    options, source, digests, tmp_path
):
    out = tmp_path / "out"
    sleeper = quantize(source, out, host="elsewhere")
    wait_for_shards(2, out, sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    try:
        assert finish(quantize(source, out, *options))["digest"] == digests[options]
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    finally:
        sleeper.send_signal(signal.SIGCONT)
    error = finish(sleeper, 5)["error"]
    assert (error["code"], error["next"]) == (
        "given-up",
        "Run the same command again: what is finished is kept.",
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("gone", [STATE, f"{STATE}/tmp", f"{STATE}/claims", f"{STATE}/done", "."])
def test_a_folder_that_is_removed_under_a_run_ends_it_with_exit_5(gone, source, digests, tmp_path):
    out = tmp_path / "out"
    process = quantize(source, out)
    wait_for_shards(1, out, process)
    (out / gone).rename(tmp_path / "gone")
    error = finish(process, 5)["error"]
    assert error["code"] in ("given-up", "cannot-write")
    assert str(out) in error["message"]
    if gone != STATE:  # without its plan, what is left is foreign
        assert finish(quantize(source, out))["digest"] == digests[()]
