"""Death at any moment: no final name ever holds partial bytes, and the same command run again ends
like a clean run.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import (
    WAIT_SECONDS,
    bf16,
    run,
    start,
    weight,
    write_checkpoint,
    write_llama,
    write_zeros,
)
from paths import SUPPORT

KILL_POINTS = SUPPORT.joinpath("kill_points.py")


def digest(source: Path, output: Path) -> str:
    return str(
        run("quantize", source, "--format", "nvfp4", "-o", output, "--json", "-q").json["digest"]
    )


@pytest.mark.slow
def test_killed_at_every_write_fsync_and_rename(tmp_path):
    source = write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})
    command = [sys.executable, KILL_POINTS, tmp_path, "quantize", source, "--format", "nvfp4"]
    outcome = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert outcome["points"] > 50
    assert outcome["broken"] == []


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_instants(kills, tmp_path):
    """Kills between the first byte and the last; each later run adopts what the earlier ones
    finished.
    """
    layers = {
        f"layers.{n}.o_proj.weight": ("BF16", (2048, 4096), bf16(2048, 4096, seed=n))
        for n in range(6)
    }
    shards = {
        f"model-{n}.safetensors": {name: tensor} for n, (name, tensor) in enumerate(layers.items())
    }
    source = write_checkpoint(tmp_path / "source", shards)
    begun = time.monotonic()
    expected = digest(source, tmp_path / "clean")
    taken = time.monotonic() - begun
    chance = random.Random(4)
    plan, done, record = (
        tmp_path / "killed" / name
        for name in (".fp4convert/plan.json", ".fp4convert/done", "quantization_config.json")
    )
    midway = 0
    for _ in range(kills):
        with start(
            "quantize",
            source,
            "--format",
            "nvfp4",
            "-o",
            tmp_path / "killed",
            "-q",
            "--workers",
            "1",
        ) as process:
            while not plan.exists():
                time.sleep(0.001)
            wanted = chance.randrange(len(shards))  # by shards: how fast the machine is changes
            while len(list(done.glob("*.json"))) < wanted and process.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, taken / len(shards)))
            process.kill()
        midway += not record.exists() and any(done.glob("*.json"))
        if chance.random() < 0.3:
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
    assert midway >= kills // 5
    assert digest(source, tmp_path / "killed") == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stops_midway_and_says_how_to_continue(tmp_path, number, code):
    source = write_zeros(tmp_path / "source", count=40)
    with start("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-q") as process:
        while not list((tmp_path / "out").glob("part-*")):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code
    assert f"Continue with: fp4convert quantize {source} --format nvfp4" in err
    assert "Traceback" not in err
    finished = sorted(path.name for path in (tmp_path / "out").glob("part-*"))
    assert 0 < len(finished) < 40
    assert list((tmp_path / "out" / ".fp4convert" / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("pause", [0.0, 0.02, 0.1])
def test_asked_twice_it_ends_at_once_and_is_continued(pause, second, tmp_path):
    source = write_zeros(tmp_path / "source", count=12)
    with start("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-q") as process:
        while not list((tmp_path / "out").glob("part-*")):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(second)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert len(list((tmp_path / "out").glob("part-*"))) < 12
    assert process.returncode in (130, 143, -signal.SIGINT, -signal.SIGTERM)
    assert "Traceback" not in err
    assert digest(source, tmp_path / "out") == digest(source, tmp_path / "clean")
    assert [
        path
        for name in ("tmp", "claims")
        for path in (tmp_path / "out" / ".fp4convert" / name).iterdir()
    ] == []


HANGING = """
import time
import fp4convert.execution.folder
from fp4convert.__main__ import main
def hang(*arguments, **options):  # a disk that does not answer
    print("hanging", flush=True)
    time.sleep(3600)
fp4convert.execution.folder.shutil.rmtree = hang
main()
"""


def test_asked_twice_it_ends_though_its_cleaning_up_hangs(tmp_path):
    source = write_zeros(tmp_path / "source", count=40)
    command = [
        sys.executable,
        "-c",
        HANGING,
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        tmp_path / "out",
        "-q",
    ]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not list((tmp_path / "out").glob("part-*")):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err


def test_a_run_again_keeps_what_is_finished(tmp_path):
    """Finished shards are adopted by their hashes, not written again; a damaged one is."""
    source = write_checkpoint(
        tmp_path / "source",
        {f"model-{n}.safetensors": {f"layers.{n}.o_proj.weight": weight(n)} for n in range(3)},
    )
    first = digest(source, tmp_path / "out")
    kept, damaged = (
        tmp_path / "out" / "model-0.safetensors",
        tmp_path / "out" / "model-1.safetensors",
    )
    inode = kept.stat().st_ino
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (tmp_path / "out" / "quantization_config.json").unlink()
    assert digest(source, tmp_path / "out") == first
    assert kept.stat().st_ino == inode
