"""Death and a broken disk at the system's own calls, injected by strace into the real command; and
the order of the calls.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import FIRST, SECOND, WAIT_SECONDS, write_llama

pytestmark = pytest.mark.system

STATE = ".fp4convert"
COMMAND = str(Path(sys.executable).with_name("fp4convert"))
PARTIAL = "partial bytes under a final name"


def hashes(folder: Path) -> dict[str, str]:
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and STATE not in path.relative_to(folder).parts
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def quantize(source: Path, out: Path, *options: str) -> list[str]:
    return [
        COMMAND,
        "quantize",
        str(source),
        "--format",
        "nvfp4",
        "-o",
        str(out),
        "--json",
        "-q",
        "--workers",
        "1",
        *options,
    ]


def traced(inject: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    call = inject.partition(":")[0]
    strace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={call}",
        "-e",
        f"inject={inject}",
    ]
    return subprocess.run(
        [*strace, *command], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


@pytest.fixture
def clean(source, tmp_path):
    subprocess.run(quantize(source, tmp_path / "clean"), check=True, capture_output=True)
    return hashes(tmp_path / "clean")


def no_claims_stay(out: Path) -> bool:
    return not [path for name in ("tmp", "claims") for path in (out / STATE / name).iterdir()]


@pytest.mark.parametrize(
    "call", ["pwrite64", "fsync", "rename", "unlink,unlinkat", "mkdir", "ftruncate", "fallocate"]
)
def test_killed_at_every_call(call, source, clean, tmp_path):
    out, broken, point = tmp_path / "out", [], 0
    while True:
        point += 1
        ended = traced(f"{call}:signal=KILL:when={point}", quantize(source, out))
        if ended.returncode == 0:
            break
        found = hashes(out) if out.exists() else {}
        broken += [
            (point, name, PARTIAL) for name, sha256 in found.items() if clean.get(name) != sha256
        ]
        for path in (out / STATE / "done").glob("*.json") if out.exists() else ():
            files = json.loads(path.read_text())["files"]
            broken += [
                (point, file, "done, and not there")
                for file, sha256 in files.items()
                if found.get(file) != sha256
            ]
        subprocess.run(quantize(source, out), check=True, capture_output=True)
        broken += (
            []
            if hashes(out) == clean and no_claims_stay(out)
            else [(point, "", "the second run is not like a clean one")]
        )
        shutil.rmtree(out)
    assert broken == []
    assert point > 1


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
@pytest.mark.parametrize("call", ["pwrite64", "fsync", "rename", "ftruncate", "fallocate"])
def test_a_disk_that_fails_at_any_call_is_exit_5_and_loses_nothing(
    call, error, source, clean, tmp_path
):
    out, broken, point = tmp_path / "out", [], 0
    while True:
        point += 1  # strace counts the calls of each thread
        ended = traced(f"{call}:error={error}:when={point}", quantize(source, out))
        if ended.returncode == 0:
            assert hashes(out) == clean
            break
        if ended.returncode != 5 or "Traceback" in ended.stderr or str(out) not in ended.stderr:
            broken.append((point, ended.returncode, ended.stderr[-300:]))
        found = hashes(out) if out.exists() else {}
        broken += [
            (point, name, PARTIAL) for name, sha256 in found.items() if clean.get(name) != sha256
        ]
        if (out / STATE / "tmp").exists() and not no_claims_stay(out):
            broken.append((point, "files on their way or claims stay"))
        subprocess.run(quantize(source, out), check=True, capture_output=True)
        broken += (
            [] if hashes(out) == clean else [(point, "the second run is not like a clean one")]
        )
        shutil.rmtree(out)
    assert broken == []
    assert point > 1


def test_every_byte_is_on_the_disk_before_its_name_and_its_name_before_its_record(source, tmp_path):
    """What a power failure leaves cannot be tried here;
    the order of the calls that decides it can.
    """
    log, out = tmp_path / "log", tmp_path / "out"
    strace = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-s",
        "400",
        "-o",
        str(log),
        "-e",
        "trace=fsync,rename,renameat,renameat2",
    ]
    subprocess.run([*strace, *quantize(source, out)], check=True, capture_output=True)
    calls = [line.split(" ", 1)[1].strip() for line in log.read_text().splitlines()]

    def first(pattern: str, after: int = -1) -> int:
        return next(
            number
            for number, call in enumerate(calls)
            if number > after and re.search(pattern, call)
        )

    for file in (FIRST, SECOND, "tokenizer.json", "config.json", "quantization_config.json"):
        named = first(rf'rename.*"{re.escape(str(out / file))}"')
        temp = re.search(r'rename\w*\((?:AT_FDCWD[^,]*, )?"([^"]+)"', calls[named])[1]
        assert any(call.startswith("fsync") and f"<{temp}>" in call for call in calls[:named]), file
        folder = first(rf"fsync\(\d+<{re.escape(str(out))}>", named)
        if file.endswith("safetensors"):
            assert folder < first(r"rename.*/done/", named)
    record = first(rf'rename.*"{re.escape(str(out / "quantization_config.json"))}"')
    assert record > max(
        first(rf'rename.*"{re.escape(str(out / file))}"') for file in (FIRST, SECOND, "config.json")
    )
