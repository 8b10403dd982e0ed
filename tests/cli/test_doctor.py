"""`doctor` tells what is there, with and without a GPU."""

from __future__ import annotations

import sys

import pytest
from checkpoints import run
from simt_gpu import Machine

from fp4convert.numerics.backends import cubins, gpu_choice, gpus, self_check


@pytest.fixture
def machine(monkeypatch):
    made = Machine({}, count=2, capability=(12, 0))
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    monkeypatch.setattr(self_check, "check", lambda gpu: None)
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 1), made.count, ""))
    return made


def test_two_gpus_with_hardware_conversion(machine):
    found = run("doctor", "--json").json
    told = [found[key] for key in ("device", "driver", "gpus_shown", "problem")]
    assert told == ["cuda:0,cuda:1", "13.1", 2, None]
    assert found["nvrtc"] == gpus.dotted(cubins.nvrtc_version())
    first = found["gpus"][0]
    told = [first[key] for key in ("target", "compute_capability", "software_conversion")]
    assert told == ["sm_120a", "12.0", []]
    assert "quantize_nvfp4" in first["hardware_conversion"]
    drawn = run("doctor").out
    assert "cuda:1          Imaginary GPU, compute capability 12.0, 17.2 GB, sm_120a" in drawn
    assert "E2M1 conversion in hardware: quantize_nvfp4" in drawn


def test_software_conversion_is_told(machine):
    machine.capability = (9, 0)
    first = run("doctor", "--json").json["gpus"][0]
    assert (first["target"], first["hardware_conversion"]) == ("sm_90", [])
    assert "E2M1 conversion in software: quantize_nvfp4" in run("doctor").out


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(
        gpus, "ask_driver", lambda: (None, 0, "there is no NVIDIA driver (libcuda.so.1)")
    )
    outcome = run("doctor", "--json")
    found = outcome.json
    assert (outcome.code, found["device"], found["driver"], found["gpus"]) == (0, "cpu", None, [])
    assert "no NVIDIA driver" in found["problem"]
    assert "--device cpu" in found["next"]
    assert "no GPU is used: there is no NVIDIA driver" in run("doctor").out


def test_the_real_driver_is_asked_without_harm():
    version, count, problem = gpus.ask_driver()
    assert bool(problem) == (count == 0)
    assert version is not None or problem


def test_processor_disk_and_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fp4convert").mkdir()
    (tmp_path / "fp4convert" / "a.cubin").write_bytes(b"12345")
    found = run("doctor", "--json").json
    assert found["cubin_cache"] == {
        "folder": str(tmp_path / "fp4convert"),
        "writable": True,
        "files": 1,
        "bytes": 5,
    }
    assert found["disk"]["folder"] == str(tmp_path)
    assert found["disk"]["free_bytes"] > 0
    assert found["cpu"]["processors"] >= 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert run("doctor", "--json").json["cubin_cache"]["writable"] is False
    assert "not writable" in run("doctor").out


def test_odd_places_are_told_and_not_stumbled_over(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + 300 * "a")  # longer than a name may be
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = run("doctor", "--json").json
    assert found["cubin_cache"]["writable"] is False
    assert found["disk"] == {"folder": None, "free_bytes": None}
    assert "the folder is gone" in run("doctor").out


def test_a_gpu_left_aside_by_auto_is_a_warning(machine, monkeypatch):
    assert gpu_choice.unused("auto") == []
    machine.capability = (7, 5)
    (warning,) = gpu_choice.unused("auto")
    assert "the CPU is used: compute capability 7.5 is too old" in warning
    assert gpu_choice.unused("cpu") == []
    monkeypatch.setattr(gpus, "ask_driver", lambda: (None, 0, "there is no NVIDIA driver"))
    assert gpu_choice.unused("auto") == []
