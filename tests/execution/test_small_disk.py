"""Disks that are really full or really read-only: mounted by root in a namespace of its own, so
that nobody else sees them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import bf16, run, write_checkpoint

pytestmark = pytest.mark.system

STATE, RECORD = ".fp4convert", "quantization_config.json"
COMMAND = str(Path(sys.executable).with_name("fp4convert"))
NUMBER, OUTPUT_NBYTES = 8, 8 * 590_000  # shards; about what they take


def quantizing(source: Path, output: Path) -> list[object]:
    words = ("--format", "nvfp4", "-o", output, "--json", "-q")
    return [COMMAND, "quantize", source, *words]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Eight shards of 2 MB, and small files that take a page each though they hold a byte."""
    layers = {
        f"layers.{n}.o_proj.weight": ("BF16", (1024, 1024), bf16(1024, 1024, seed=n))
        for n in range(NUMBER)
    }
    shards = {
        f"model-{n}.safetensors": {name: tensor} for n, (name, tensor) in enumerate(layers.items())
    }
    folder = write_checkpoint(tmp_path_factory.mktemp("disk") / "source", shards)
    for number in range(300):
        (folder / f"note-{number}.txt").write_bytes(b"x")
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    words = ("--format", "nvfp4", "-o", tmp_path_factory.mktemp("clean") / "out", "--json", "-q")
    outcome = run("quantize", source, *words)
    return outcome.json["digest"]


SCRIPT = """
import json, subprocess, sys
from pathlib import Path
command, disk, size, processes = json.loads(sys.argv[1])
mount = lambda *options: subprocess.run(["mount", *options], check=True)
mount("-t", "tmpfs", "-o", f"size={size}", "none", disk)
{steps}
"""
FILLING = """
out = Path(disk) / "out"
pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
crowd = [subprocess.Popen(command, **pipes) for _ in range(processes)]
ended = [(*process.communicate(), process.returncode) for process in crowd]
left = [str(path) for name in ("tmp", "claims") for path in (out / ".fp4convert" / name).iterdir()]
kept = {path.name: path.stat().st_ino for path in out.glob("model-*")}
is_ended = (out / "quantization_config.json").exists()
mount("-o", "remount,size=64m", disk)
again = subprocess.run(command, capture_output=True, text=True)
after = {path.name: path.stat().st_ino for path in out.glob("model-*")}
print(json.dumps([ended, left, kept, is_ended, again.stdout, after]))
"""
FORBIDDING = """
mount("-o", "remount,ro", disk)
ended = subprocess.run(command, capture_output=True, text=True)
left = [str(path) for path in Path(disk).iterdir()]
print(json.dumps([ended.returncode, ended.stdout, ended.stderr, left]))
"""


def on_a_disk(steps: str, command: list[object], disk: Path, size: int, processes: int = 1) -> list:
    disk.mkdir()
    asked = json.dumps([[str(word) for word in command], str(disk), size, processes])
    script = SCRIPT.replace("{steps}", steps)
    words = ["unshare", "--mount", sys.executable, "-c", script, asked]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fills_up_is_exit_5_and_more_room_is_all_it_takes(
    processes, source, expected, tmp_path
):
    """Room for every byte, which is checked, but not for the pages that small files take."""
    command = quantizing(source, tmp_path / "disk" / "out")
    found = on_a_disk(FILLING, command, tmp_path / "disk", OUTPUT_NBYTES + 600_000, processes)
    ended, left, kept, is_ended, again, after = found
    for out, err, code in ended:
        error = json.loads(out)["error"]
        assert (code, error["exit"], error["code"]) == (5, 5, "disk-full")
        assert str(tmp_path / "disk" / "out") in error["message"]
        assert "No space left on device" in error["message"]
        assert error["next"].startswith("Make room and run the same command again")
        assert "Traceback" not in err
    assert (left, is_ended) == ([], False)
    assert kept
    assert json.loads(again)["digest"] == expected
    assert kept.items() <= after.items()


def test_a_disk_too_small_is_refused_before_the_first_byte(source, tmp_path):
    command = quantizing(source, tmp_path / "disk" / "out")
    steps = FORBIDDING.replace('mount("-o", "remount,ro", disk)', "")
    code, out, err, left = on_a_disk(steps, command, tmp_path / "disk", 2 << 20)
    error = json.loads(out)["error"]
    assert (code, error["code"], left) == (5, "disk-full", [])
    assert "needs" in error["message"]
    assert "free" in error["message"]
    assert "Traceback" not in err


@pytest.mark.parametrize("place", ["out", "deep/out", "."])
def test_a_disk_that_is_read_only_is_exit_5(place, source, tmp_path):
    command = quantizing(source, tmp_path / "disk" / place)
    code, out, err, left = on_a_disk(FORBIDDING, command, tmp_path / "disk", 64 << 20)
    error = json.loads(out)["error"]
    assert (code, error["exit"], error["code"], left) == (5, 5, "cannot-write", [])
    assert str(tmp_path / "disk") in error["message"]
    assert "Read-only file system" in error["message"]
    assert "Traceback" not in err
