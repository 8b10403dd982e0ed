"""A pipeline that is interrupted, shared or done again: nothing that is finished is lost, and
nothing half done loads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import WAIT_SECONDS, Tensor, bf16, start
from diffusion import (
    COMPONENTS,
    DIFFUSERS,
    NVFP4,
    PIPELINE,
    RECORD,
    STATE,
    WAN_CONFIG,
    WAN_INDEX,
    error_of,
    files_of,
    quantize,
    wan_tensors,
    write_component,
    write_flux,
    write_others,
    write_wan,
)
from paths import SUPPORT

from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.conversion.work import prepare
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions

BAD = "blocks.7.ffn.net.2.weight"


@pytest.fixture
def wan(tmp_path):
    return write_wan(tmp_path / "wan")


@pytest.mark.slow
def test_killed_at_every_write_fsync_and_rename(wan, tmp_path):
    kill_points = SUPPORT.joinpath("kill_points.py")
    command = [sys.executable, kill_points, tmp_path, "quantize", wan, "--format", "nvfp4"]
    outcome = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert outcome["points"] > 150
    assert outcome["broken"] == []


def test_a_second_run_finds_everything_done(wan, tmp_path):
    first = quantize(wan, tmp_path / "q").json
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "q").rglob("*.safetensors")}
    second = quantize(wan, tmp_path / "q").json
    assert (second["digest"], second["adopted_bytes"]) == (first["digest"], second["source_bytes"])
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert quantize(wan, tmp_path / "q", "--exclude", "*ffn*").json["error"]["code"] == "other-plan"
    forced = quantize(wan, tmp_path / "q", "--exclude", "*ffn*", "--force").json
    assert (
        forced["digest"]
        == quantize(wan, tmp_path / "clean", "--exclude", "*ffn*").json["digest"]
        != first["digest"]
    )


def test_other_weights_of_a_copied_component_are_another_plan(tmp_path):
    """A finished result keeps those that it was made with."""
    source, out = write_wan(tmp_path / "wan"), tmp_path / "q"
    quantize(source, out)
    weights = next(source.glob("vae/*.safetensors"))
    before = (out / weights.relative_to(source)).read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    outcome = quantize(source, out)
    assert error_of(outcome)[:2] == (5, "other-plan")
    assert (out / weights.relative_to(source)).read_bytes() == before


def test_what_was_damaged_is_done_again_and_nothing_loads_the_pipeline_meanwhile(
    wan, tmp_path, monkeypatch
):
    out = tmp_path / "q"
    expected, seen = quantize(wan, out).json["digest"], []
    (out / "transformer_2" / f"{DIFFUSERS}.safetensors").unlink()
    (out / "vae" / "config.json").unlink()
    real = Conversion.carry_out

    def carry_out(self, settings):
        seen.append((out / PIPELINE).exists())
        return real(self, settings)

    monkeypatch.setattr(Conversion, "carry_out", carry_out)
    assert quantize(wan, out).json["digest"] == expected
    assert seen == [False, False]


def test_weights_that_are_nan_end_with_exit_2_and_the_other_transformer_is_finished(tmp_path):
    tensors = wan_tensors()
    bad: Tensor = ("BF16", (64, 128), b"\xc0\x7f" + tensors[BAD][2][2:])
    source, out = tmp_path / "wan", tmp_path / "q"
    write_component(source / "transformer", [{**tensors, BAD: bad}], WAN_CONFIG)
    write_component(source / "transformer_2", [wan_tensors(50)], WAN_CONFIG)
    write_others(source, WAN_INDEX)
    outcome = quantize(source, out)
    assert error_of(outcome)[:2] == (2, "not-finite")
    assert (
        f"transformer: {DIFFUSERS}.safetensors: {BAD} has 1 value that is"
        in outcome.json["error"]["message"]
    )
    assert outcome.json["error"]["next"].startswith(
        "Download the file again, in case it is damaged"
    )
    assert outcome.json["error"]["next"].endswith("command with --exclude blocks.7.ffn.net.2")
    assert (out / "transformer_2" / RECORD).exists()
    assert not (out / "transformer" / RECORD).exists()
    assert not (out / PIPELINE).exists()
    exclude = ("--exclude", "blocks.7.ffn.net.2")
    assert (
        quantize(source, out, *exclude).json["digest"]
        == quantize(source, tmp_path / "clean", *exclude).json["digest"]
    )


def test_a_folder_that_holds_something_else_is_refused(wan, tmp_path):
    (tmp_path / "q" / "transformer").mkdir(parents=True)
    (tmp_path / "q" / "transformer" / "mine.txt").write_bytes(b"mine")
    assert error_of(quantize(wan, tmp_path / "q"))[:2] == (5, "foreign-output")
    assert files_of(tmp_path / "q") == {"transformer/mine.txt": b"mine"}


def test_another_pipeline_does_not_take_the_folder_over(wan, tmp_path):
    assert quantize(wan, tmp_path / "q").code == 0
    before = files_of(tmp_path / "q")
    other = write_flux(tmp_path / "flux")
    assert error_of(quantize(other, tmp_path / "q"))[:2] == (5, "other-plan")
    assert error_of(quantize(wan, tmp_path / "q", "--subfolder", "transformer"))[:2] == (
        5,
        "other-plan",
    )
    assert files_of(tmp_path / "q") == before


def test_another_pipeline_does_not_take_over_what_is_unfinished(wan, tmp_path):
    out = tmp_path / "q"
    command = [sys.executable, "-c", KILLED, "2", "quantize", wan, *NVFP4, "-o", out]
    assert subprocess.run([*map(str, command)], check=False, timeout=WAIT_SECONDS).returncode == -9
    before = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert error_of(quantize(write_flux(tmp_path / "flux"), out))[:2] == (5, "other-plan")
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == before


def test_the_disk_must_hold_all_components_and_copies_before_the_first_byte(
    wan, tmp_path, monkeypatch
):
    assert quantize(wan, tmp_path / "a").code == 0
    written = files_of(tmp_path / "a").items()
    needed = sum(len(data) for name, data in written if not name.endswith(RECORD))
    real = os.statvfs
    free = needed - 1

    def statvfs(path):
        values = list(real(path))
        values[1], values[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    outcome = quantize(wan, tmp_path / "q")
    assert error_of(outcome)[:2] == (5, "disk-full")
    assert f"needs {needed:,} bytes" in outcome.json["error"]["message"]
    assert not files_of(tmp_path / "q") if (tmp_path / "q").exists() else True
    free = needed
    assert quantize(wan, tmp_path / "q").code == 0
    free = 0
    assert quantize(wan, tmp_path / "q").code == 0  # all is there


def test_every_file_is_told_under_its_name_in_the_result(wan, tmp_path):
    """As an upload needs it while the rest is still being made."""
    told: dict[str, tuple[Path, str]] = {}
    work = prepare(QuantizeOptions(wan, format="nvfp4", output=tmp_path / "q"))
    work.carry_out(
        Settings("cpu", on_named=lambda path, file, sha256: told.update({file: (path, sha256)}))
    )
    assert {file: sha256 for file, (_, sha256) in told.items()} == work.ended_files()
    reports = {
        file: told.pop(file)[0]
        for file in [file for file in told if file.endswith("quantization_report.json")]
    }
    assert all(path == tmp_path / "q" / file for file, path in reports.items())
    assert {file: path for file, (path, _) in told.items()} == {
        file: tmp_path / "q" / file for file in files_of(tmp_path / "q")
    }
    assert sorted(told) == sorted(work.names())


def test_processes_that_join_share_the_work(wan, tmp_path):
    expected = quantize(wan, tmp_path / "a").json["digest"]
    crowd = [
        start("quantize", wan, *NVFP4, "-o", tmp_path / "q", "--join", "--workers", "1")
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=WAIT_SECONDS) for process in crowd]
    assert [process.returncode for process in crowd] == [0, 0, 0], ended
    assert {json.loads(out)["digest"] for out, _ in ended} == {expected}


def test_a_large_file_is_copied_by_itself_and_only_once(wan, tmp_path, monkeypatch):
    large = {
        f"text_encoder/large-{number}.safetensors": bf16(1 << 15, seed=number)
        for number in range(2)
    }
    for name, data in large.items():
        (wan / name).write_bytes(data)
    monkeypatch.setattr("fp4convert.execution.job.LARGE_NBYTES", 1 << 16)
    out = tmp_path / "q"
    expected = quantize(wan, out).json["digest"]
    tasks = json.loads((out / STATE / "plan.json").read_text())["tasks"]
    assert sorted(len(task["files"]) for task in tasks) == [1, 1, 8]
    (out / "text_encoder" / "large-1.safetensors").unlink()
    kept = (out / "text_encoder" / "large-0.safetensors").stat().st_ino
    assert quantize(wan, out).json["digest"] == expected
    assert (out / "text_encoder" / "large-0.safetensors").stat().st_ino == kept


def test_a_file_that_changes_while_it_is_copied_is_exit_3(wan, tmp_path, monkeypatch):
    from fp4convert.execution.folder import OutputFolder

    changing, real = wan / "vae" / "config.json", OutputFolder.write_copies

    def write_copies(self, *arguments):
        changing.write_bytes(b'{"longer than before": "was"}' * 3)
        real(self, *arguments)

    expected_missing = tmp_path / "q" / PIPELINE
    monkeypatch.setattr(OutputFolder, "write_copies", write_copies)
    assert error_of(quantize(wan, tmp_path / "q"))[:2] == (3, "source-changed")
    assert not expected_missing.exists()
    monkeypatch.setattr(OutputFolder, "write_copies", real)
    outcome = quantize(wan, tmp_path / "q")
    assert (outcome.code, files_of(tmp_path / "q", COMPONENTS)) == (0, files_of(wan, COMPONENTS))


KILLED = """
import os, signal, sys
import fp4convert.execution.folder as output
real, left = output.OutputFolder.settle, [int(sys.argv.pop(1))]
def settle(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(*arguments)
output.OutputFolder.settle = settle
from fp4convert.__main__ import main
main()
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("finished", [0, 1, 2])
def test_after_a_kill_the_same_command_goes_on(wan, tmp_path, finished):
    out = tmp_path / "q"
    command = [sys.executable, "-c", KILLED, finished, "quantize", wan, *NVFP4, "-o", out]
    assert subprocess.run([*map(str, command)], check=False, timeout=WAIT_SECONDS).returncode == -9
    assert not (out / PIPELINE).exists()
    kept = {
        path: path.stat().st_ino for path in out.rglob("*.safetensors") if STATE not in path.parts
    }
    assert len(kept) == min(finished, 2)
    assert quantize(wan, out).json["digest"] == quantize(wan, tmp_path / "clean").json["digest"]
    assert {path: path.stat().st_ino for path in kept} == kept
    assert not list(out.rglob(f"{STATE}/tmp/*"))
