"""benchmarks/gpu runs to its end, over arrays of NumPy and kernels on the host; it measures nothing
here.

A slip of the pen in it would cost the first minutes on a GPU that is lent.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from checkpoints import run
from numpy_cuda import Gpu
from paths import ROOT
from simt import KERNELS, compile_for_host

from fp4convert.numerics.backends import cubins, gpus
from gpu import beside_quantizers, compare, device, kernels, packed, products
from gpu.first_run import touch, whole

ELF = b"\x7fELF" + bytes(60)  # without any table
FIRST_RUN = ROOT / "benchmarks" / "gpu" / "first_run"


@pytest.fixture
def gpu(
    request: pytest.FixtureRequest,
    simt_libraries: dict[str, ctypes.CDLL],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Gpu:
    """A GPU with (12.0) or without E2M1 instructions, and a benchmark of few and small inputs."""
    made: dict[tuple[str, bool], ctypes.CDLL] = {
        (stem, False): library for stem, library in simt_libraries.items()
    }

    def build(stem: str, has_cvt: bool) -> ctypes.CDLL:
        if (stem, has_cvt) not in made:
            folder = tmp_path / f"{stem}-{has_cvt}"
            folder.mkdir()
            source = KERNELS / f"{stem}.cu"
            if stem == "baselines":
                source = device.baselines_source(folder)
            made[stem, has_cvt] = compile_for_host(source, folder, has_cvt)
        return made[stem, has_cvt]

    found = Gpu(build, request.param)
    monkeypatch.setitem(sys.modules, "cupy", found.module())
    torch = ModuleType("torch")  # which cannot take these arrays, and is slow to import
    torch.cuda = SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), 1, ""))
    monkeypatch.setattr(cubins, "compile_cubin", lambda *_: (ELF, ""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = {
        device: {
            "BUSY_NBYTES": 1 << 10,
            "REPEATS": 1,
            "LAUNCHES": 2,
            "WARM_UP": 1,
            "BUSY_COPIES": 1,
        },
        kernels: {"M": 1 << 7, "WEIGHED_COLUMNS": 64},
        products: {"M": 1 << 7, "SHAPES": ((64, 64), (72, 128))},
        packed: {"M": 1 << 7, "SHAPE": (64, 128)},
        compare: {
            **{"M": 1 << 12, "DEQUANTIZED_SHAPE": (64, 64), "GEMV_SHAPE": (45, 128)},
            "DECODED_SHAPE": (29, 160),
        },
        beside_quantizers: {"SHAPE": (16, 64)},
    }
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    every = compare.inputs
    monkeypatch.setattr(
        compare,
        "inputs",
        lambda *which: ((v[:1, :512], amax) for v, amax in itertools.islice(every(*which), 4, 7)),
    )
    kernels.noise.cache_clear()
    return found


@pytest.mark.parametrize(
    "gpu", [(9, 0), pytest.param((12, 0), marks=pytest.mark.slow)], indirect=True, ids=str
)
def test_the_benchmark_runs_to_its_end(gpu, tmp_path, capsys):
    assert kernels.main(["--output", str(tmp_path / "gpu.md")]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "kernels agree." in page
    assert "Failed" not in page
    assert "DIFFERS" not in page
    assert page.count("bytes equal") > 30
    peers = len(beside_quantizers.AMAXES) + len(beside_quantizers.QUANTIZERS)
    assert page.count("has no attribute 'from_dlpack'") == peers
    gpu.check_margins()


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_every_entry_point_is_touched(gpu, capsys):
    """What sanitizer and profiler run: a line for each kernel of the .cu files."""
    touch.main("small")
    words = ("bf16", "fp16", "fp32")
    expected = {
        f"{kind}_{fmt}_{word}"
        for kind in touch.KINDS
        for fmt in ("nvfp4", "mxfp4")
        for word in words
    }
    expected |= {f"amax_{word}" for word in words} | {"count_codes"}
    expected |= {f"gemv_{fmt}_{x}" for fmt in ("nvfp4", "mxfp4") for x in ("bf16", "fp16", "nvfp4")}
    expected |= set(touch.DECODERS)
    assert expected <= gpu.launched
    gpu.check_margins()


def first_run(
    tmp_path: Path, tools: Path, limit: str, parts: Sequence[str] = ("first", "bytes", "whole")
) -> dict[str, str]:
    """What parts of the first run leave in $OUT, by file."""
    places = {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), "LIMIT": limit}
    environment = {**os.environ, **places, "PATH": f"{tools}:{os.environ['PATH']}"}
    for part in parts:
        command = ["bash", FIRST_RUN / "first_run.sh", part]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    return {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}


def test_the_first_run_begins_nothing_when_its_time_is_up(tmp_path):
    left = first_run(tmp_path, tmp_path, "0")
    assert all("the time is up" in text and "rc" not in text for text in left.values())
    assert left["sanitizer.txt"].count("the time is up") == 4


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_a_gpu_every_program_of_the_first_run_says_so(tmp_path):
    """Each is found and imports what it needs; the sanitizer runs what it is given."""
    folder = tmp_path / "tools"
    tool(folder, "python3", f'CUDA_VISIBLE_DEVICES= exec {sys.executable} "$@"')
    for name in ("compute-sanitizer", "ncu"):
        tool(folder, name, 'while [ "$1" != python3 ]; do shift; done; exec "$@"')
    left = first_run(tmp_path, folder, "200", ("first",))
    assert not [name for name, text in left.items() if "ModuleNotFoundError" in text]
    for name in ("machine.txt", "brief.txt", "gpu.log", "sanitizer.txt", "ncu.csv"):
        assert re.search("no NVIDIA driver|shows no GPU|CUDA error", left[name]), name


def test_the_first_run_stops_at_nothing(tmp_path):
    """Every tool fails, and every part has left that in $OUT."""
    for name in ("python3", "nvidia-smi", "nvcc", "compute-sanitizer", "ncu", "cmake", "gcc"):
        tool(tmp_path / "tools", name, f"echo {name} was asked\nexit 3")
    left = first_run(tmp_path, tmp_path / "tools", "530")
    assert left.keys() >= {"machine.txt", "brief.txt", "gpu.log", "sanitizer.txt", "ncu.csv"}
    assert left.keys() >= {"bytes.txt", "whole.txt"}
    assert all("rc 3" in text for name, text in left.items())
    assert left["sanitizer.txt"].count("rc 3") == 4


@pytest.mark.slow
def test_whole_conversions_are_of_a_checkpoint_that_is_one(tmp_path):
    """Two shards of a shape that is quick; the GPU's row says why there is none."""
    shapes = dict.fromkeys(whole.SHAPES, (64, 128))
    whole.write_checkpoint(tmp_path / "source", whole.LAYERS_PER_SHARD + 1, shapes)
    outcome = run(
        "quantize", tmp_path / "source", "--format", "nvfp4", "-o", tmp_path / "o", "--json"
    )
    assert (outcome.code, outcome.json["tensors"]["quantized"]) == (0, 7 * 9)
    row = whole.convert(tmp_path / "source", tmp_path / "again", "nvfp4", "mse", ("cpu", 1))
    assert (row["rc"], row["digest"]) == (0, outcome.json["digest"])
    row = whole.convert(tmp_path / "source", tmp_path / "again", "nvfp4", "mse", ("cuda:77", 0))
    assert (row["rc"], "digest" in row) == (2, False)
