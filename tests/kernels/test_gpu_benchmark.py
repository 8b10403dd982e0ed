"""benchmarks/gpu runs to its end over simt_gpu.py, kernels on the host; it measures nothing here.

A slip of the pen in it would cost the first minutes on a GPU that is lent.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import run
from paths import ROOT
from simt import KERNELS
from stand_in import Bench, compile_source, shrink, site, torch_without_dlpack

from fp4convert.numerics.backends import cubins, gpus
from gpu import beside_quantizers, kernels, variants
from gpu.device import Device, Rung, grid_of, one_text
from gpu.first_run import touch, whole

FIRST_RUN = ROOT / "benchmarks" / "gpu" / "first_run"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, ctypes.CDLL]]:
    """A folder, and what was compiled there."""
    return tmp_path_factory.mktemp("builds"), {}


@pytest.fixture
def gpu(
    request: pytest.FixtureRequest,
    builds: tuple[Path, dict[bytes, ctypes.CDLL]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    """A GPU with (12.0) or without E2M1 instructions, and a benchmark of few and small inputs."""
    folder, made = builds
    found = Bench(folder, request.param, made)
    found.install(monkeypatch, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "torch", torch_without_dlpack())
    monkeypatch.setattr(cubins, "compile_cubin", compile_source)
    shrink(monkeypatch)
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
    expected |= set(touch.DECODERS) | {"add_costs", "descend_nvfp4", "descend_mxfp4"}
    expected |= {f"{kind}_{word}" for kind in touch.FP8 for word in words}
    assert expected <= {name for _, name in gpu.launches}


PARTS = ("first", "bytes", "whole", "variants", "page")
LEFT = {  # what every part leaves in $OUT
    "first": {"machine.txt", "brief.txt", "gpu.log", "ncu.csv", "ncu-mse.csv"},
    "bytes": {"bytes.txt", "sanitizer.txt"},
    "whole": {"whole.txt"},
    "variants": {"variants.log"},
    "page": set(),
}


@pytest.mark.parametrize("file", variants.MEASURED)
def test_a_form_of_a_kernel_has_other_numbers_in_one_place_each(file):
    """The shipped one has its own text and launch; every number that is tried is found."""
    target = cubins.Target("sm_90", has_cvt=False)
    shipped, *others = variants.variants(target, file)
    assert shipped.path.read_text() == one_text(KERNELS / file)
    name = variants.MEASURED[file][0].split()[0]
    assert shipped.shape(name, 1 << 20) == (grid_of(name, 1 << 20), 256)
    assert others
    assert len({form.path.read_text() for form in others}) == len(others)
    for form in others:
        changed = {knob.name: knob for knob in variants.KNOBS if knob.file == file}
        text = form.path.read_text()
        assert all(int(changed[n].found(text)[1]) == v for n, v in form.numbers.items())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_120a"])
@pytest.mark.parametrize("file", variants.MEASURED)
def test_the_forms_farthest_off_compile(file, arch, tmp_path, monkeypatch):
    """The smallest of all numbers, and the largest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = cubins.Target(arch, has_cvt=arch.endswith("a"))
    numbers = {knob.name: sorted(knob.values) for knob in variants.KNOBS if knob.file == file}
    for end in (0, -1):
        form = variants.Variant(target, file, {name: own[end] for name, own in numbers.items()})
        assert variants.compiled(form.path, target) == "", form.label


def test_a_number_that_stands_in_no_place_or_in_two_is_refused():
    for text in ("enum { OTHER = 2 };", "enum { UNITS = 2 };\n#define UNITS 2"):
        with pytest.raises(ValueError, match="places of UNITS; expected one"):
            variants.Knob("quantize.cu", "UNITS", (4,)).found(text)


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_a_form_that_gives_other_bytes_is_not_the_fastest(gpu, monkeypatch, capsys):
    """A launch that leaves out half of the elements, and would win."""
    monkeypatch.setattr(variants.Variant, "shape", lambda own, name, n: ((1, 1), own._threads))
    half = variants.Knob("quantize.cu", "FP4_UNITS", (1,), widens=True)
    monkeypatch.setattr(variants, "KNOBS", (half,))
    sweep = variants.Sweep(Device(gpus.survey().gpus[0], 600), "quantize.cu")
    with ThreadPoolExecutor(1) as pool:
        text = sweep.text(pool)
    assert "| quantize_nvfp4_bf16 | FP4_UNITS 1 |  | DIFFERS |" in text
    assert "- quantize_nvfp4_bf16: the shipped form is the fastest" in text


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_without_the_shipped_form_or_time_nothing_is_said_of_others(gpu, monkeypatch):
    units = variants.Knob("quantize.cu", "FP4_UNITS", (1,), widens=True)
    monkeypatch.setattr(variants, "KNOBS", (units,))
    device = Device(gpus.survey().gpus[0], 600)
    sweep = variants.Sweep(device, "quantize.cu")
    shipped, other = variants.variants(device.kernels.target, "quantize.cu")
    assert sweep.row(shipped, "no room", "amax_bf16")[3] == "no room"
    assert sweep.row(other, "", "amax_bf16")[3] == "not compared"
    sweep._ms["amax_bf16"] = [(1.0, other)]
    monkeypatch.setattr(Device, "is_late", lambda own: True)
    assert list(sweep.best()) == ["amax_bf16: not run: the time is up"]


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_part_mse_launches_the_searches_alone(gpu, monkeypatch, capsys):
    """Other rules have kernels of the same names: each is launched once."""
    monkeypatch.setitem(touch.SIZES, "small", (("BF16",), (), (64,), (), (), (), ()))
    found = []
    monkeypatch.setattr(Rung, "launch", lambda own, *arguments: found.append(own.name))
    touch.main("small", "mse")
    assert found == ["search_nvfp4_bf16", "search_mxfp4_bf16"]


def first_run(
    tmp_path: Path, tools: Path, parts: Sequence[str] = PARTS, **environment: str
) -> dict[str, str]:
    """What parts of the first run leave in $OUT, by file."""
    places = {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), **environment}
    own = {**os.environ, **places, "PATH": f"{tools}:{os.environ['PATH']}"}
    for part in parts:
        before = {path.name for path in (tmp_path / "out").glob("*")}
        command = ["bash", FIRST_RUN / "first_run.sh", part]
        subprocess.run(command, check=True, env=own, capture_output=True, timeout=1200)
        left = {path.name for path in (tmp_path / "out").iterdir()}
        assert LEFT[part] <= left
        assert len(left - before) <= 8  # as many come back from a machine that is lent
    return {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}


def test_the_first_run_begins_nothing_when_its_time_is_up(tmp_path):
    left = first_run(tmp_path, tmp_path, LIMIT="0")
    assert all("the time is up" in text and "rc" not in text for text in left.values())
    assert left["sanitizer.txt"].count("the time is up") == 4


def test_the_stages_of_a_part_take_less_than_a_call():
    """As the script names them; the limit of a call is 600 s, of which a kill takes up to 10."""
    script = (FIRST_RUN / "first_run.sh").read_text()
    limit = int(re.search(r"LIMIT:-(\d+)", script)[1])
    functions, cases = script.split("case $part in\n")
    (build,) = re.findall(r"run build (\d+)", functions)
    for case in cases.split(";;")[:-2]:  # without what is no part
        stages = [*re.findall(r"^\s*run [\w-]+ (\d+)", case, re.MULTILINE)]
        stages += re.findall(r"^\s*profile [\w-]+ (\d+)", case, re.MULTILINE)
        beside = re.findall(r'^\s*run "\$tool" (\d+)', case, re.MULTILINE)
        assert not beside or beside == re.findall(r"^\s*run bytes (\d+)", case, re.MULTILINE)
        stages += [build] * len(re.findall(r"^\s*build$", case, re.MULTILINE))
        assert stages
        assert sum(map(int, stages)) <= limit <= 580


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def checked_tool(folder: Path, name: str, options: str) -> None:
    """A tool that wants its options to be known, then runs the program it is given."""
    (folder / f"{name}.py").write_text(
        f"""import argparse, os, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
{options}
parser.add_argument("program", nargs=argparse.REMAINDER)
given = parser.parse_args()
os.execvp(given.program[0], given.program)
"""
    )
    tool(folder, name, f'exec {sys.executable} -S {folder / name}.py "$@"')


# As compute-sanitizer 2026.4 --help has them; those of the first run, and some beside them.
SANITIZER_OPTIONS = """
parser.add_argument("--tool", choices=["memcheck", "racecheck", "synccheck", "initcheck"])
parser.add_argument("--error-exitcode", type=int, required=True)
parser.add_argument("--print-limit", type=int)
parser.add_argument("--padding", type=int)
parser.add_argument("--kernel-name")
"""
# As the manual of Nsight Compute's command line has them.
PROFILER_OPTIONS = """
import re
def regex(text):
    assert text.startswith("regex:")
    return re.compile(text[6:])
def metrics(text):
    known = "(gpu|dram|sm|smsp)__[a-z_]+"
    ends = "(sum|(avg|sum).pct_of_peak_sustained_(active|elapsed)|ratio)"
    assert all(re.fullmatch(known + "[.]" + ends, name) for name in text.split(",")), text
    return text
parser.add_argument("--clock-control", choices=["base", "none", "reset", "boost"])
parser.add_argument("--csv", action="store_true")
parser.add_argument("--metrics", type=metrics)
parser.add_argument("-k", "--kernel-name", type=regex)
parser.add_argument("-c", "--launch-count", type=int)
"""


def lent_machine(tmp_path: Path, python: str) -> Path:
    """A folder of tools: this Python, so changed, and sanitizer and profiler that do nothing."""
    folder = tmp_path / "tools"
    tool(folder, "python3", f'{python} exec {sys.executable} "$@"')
    checked_tool(folder, "compute-sanitizer", SANITIZER_OPTIONS)
    checked_tool(folder, "ncu", PROFILER_OPTIONS)
    return folder


@pytest.mark.slow
def test_without_a_gpu_every_program_of_the_first_run_says_so(tmp_path):
    """Each is found and imports what it needs; sanitizer and profiler run what they are given."""
    folder = lent_machine(tmp_path, "CUDA_VISIBLE_DEVICES=")
    left = first_run(tmp_path, folder, ("first", "bytes", "variants", "page"), LIMIT="300")
    assert not [name for name, text in left.items() if "ModuleNotFoundError" in text]
    for name in ("machine.txt", "brief.txt", "gpu.log", "sanitizer.txt", "ncu.csv", "variants.log"):
        assert re.search("no NVIDIA driver|shows no GPU|CUDA error", left[name]), name
    (page,) = (json.loads(text) for name, text in left.items() if name.endswith(".json"))
    assert {verdict for _, verdict in page["bars"].values()} == {"not run"}


def test_the_first_run_stops_at_nothing(tmp_path):
    """Every tool fails, and every part has left that in $OUT."""
    for name in ("python3", "nvidia-smi", "nvcc", "compute-sanitizer", "ncu", "cmake", "gcc"):
        tool(tmp_path / "tools", name, f"echo {name} was asked\nexit 3")
    left = first_run(tmp_path, tmp_path / "tools")
    assert all("rc 3" in text for name, text in left.items())
    assert left["sanitizer.txt"].count("rc 3") == 4
    assert left["ncu.csv"].count("rc 3") == 2


def test_a_stage_that_takes_too_long_leaves_what_it_has_said(tmp_path):
    """It is asked to end, and says what it knows; nothing waits for what it has begun."""
    text = "trap 'echo told in time; exit 0' INT\ncase $* in *Cpu*) exit;; esac\nsleep 50 & wait"
    tool(tmp_path / "tools", "python3", text)
    for name in ("nvidia-smi", "nvcc"):
        tool(tmp_path / "tools", name, "echo asked")
    begun = time.monotonic()
    left = first_run(tmp_path, tmp_path / "tools", ("first",), LIMIT="4")
    assert time.monotonic() - begun < 30
    assert "told in time" in left["machine.txt"]
    assert "rc 124" in left["machine.txt"]
    assert "the time is up" in left["gpu.log"]


@pytest.mark.slow
def test_the_first_run_from_beginning_to_end(builds, tmp_path):
    """Over the stand-in, everything small: no stage fails, and every bar that it can judge is."""
    folder = lent_machine(tmp_path, "PYTEST_PLUGINS=stand_in OMP_NUM_THREADS=1")
    for name in ("nvidia-smi", "nvcc"):
        tool(folder, name, f"echo {name} was asked")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site(builds[0]))
    small = f"--gigabytes 0.001 --hidden 128 --folder {tmp_path}"
    left = first_run(tmp_path, folder, LIMIT="1000", WHOLE=small)
    ends = {
        name: re.findall(r"^-- (\S+): (.*),", text, re.MULTILINE) for name, text in left.items()
    }
    assert [end for found in ends.values() for end in found if end[1] != "rc 0"] == []
    assert sum(len(found) for found in ends.values()) == 16
    assert "kernels agree." in left["gpu.md"]
    assert "Failed" not in left["gpu.md"]
    assert left["sanitizer.txt"].count("touched every kernel") == 4
    assert "DIFFERS" not in left["variants.log"]
    assert left["variants.md"].count("bytes equal") == 3 * 3 + 3 * 2 + 3  # forms times kernels
    assert "every digest is equal" in left["whole.txt"]
    page = json.loads(left["gpu-imaginary-gpu.json"])
    verdicts = {what: verdict for what, (_, verdict) in page["bars"].items()}
    assert verdicts.pop("whole conversions: digests on both devices") == "met"
    assert verdicts.pop("memcheck, racecheck, initcheck, synccheck") == "met"


@pytest.mark.slow
def test_whole_conversions_are_of_a_checkpoint_that_is_one(tmp_path):
    """Two shards of a shape that is quick; the GPU's row says why there is none."""
    whole.write_checkpoint(tmp_path / "source", whole.LAYERS_PER_SHARD + 1, 128)
    words = ("--format", "nvfp4", "--scale-rule", "mse", "-o", tmp_path / "o", "--json")
    outcome = run("quantize", tmp_path / "source", *words)
    assert (outcome.code, outcome.json["tensors"]["quantized"]) == (0, 7 * 9)
    row = whole.convert(tmp_path / "source", tmp_path / "again", "nvfp4", "mse", ("cpu", 1))
    assert (row["rc"], row["digest"]) == (0, outcome.json["digest"])
    assert row["took"] == "cpu"
    row = whole.convert(tmp_path / "source", tmp_path / "again", "nvfp4", "mse", ("cuda:77", 0))
    assert (row["rc"], "digest" in row) == (2, False)
