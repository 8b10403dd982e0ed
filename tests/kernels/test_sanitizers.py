"""The CPU library under AddressSanitizer and UndefinedBehaviorSanitizer, over its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpu_levels import NATIVE
from paths import ROOT, SUPPORT

pytestmark = pytest.mark.slow
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-fPIC", "-fno-omit-frame-pointer", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-fsanitize=address,undefined",
)
REPORT = "runtime error"  # of undefined behaviour, which ends nothing
UNLEVELED = ("cpu.c", "bus_errors.c", "sha256.c")
OF_THE_CPU = [
    "storage/test_sha256.py",
    *(f"kernels/test_{name}.py" for name in ("descend", "fp8_int", "kernels", "scale_variance")),
    *(f"kernels/test_{name}.py" for name in ("search", "search_hostile", "nvfp4_encode")),
    *(f"numerics/test_{name}.py" for name in ("backend_cpu", "descent", "error_sums", "low_rank")),
    *(f"numerics/test_{name}.py" for name in ("fake_quantization", "fp8_int", "mxfp4_as_nvfp4")),
]


def compile_kernels(kernels: Path, folder: Path, only: str = "") -> None:
    """Compile every file for every level of this machine, with both sanitizers."""
    (names,) = re.findall(
        r"^set\(leveled (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    jobs: dict[str, list[object]] = {name: [kernels / name] for name in UNLEVELED}
    for level in (2, 3, 4) if NATIVE else (0,):
        march = [f"-march=x86-64-v{level}"] if level else []
        for name in names.split():
            jobs[f"{level}-{name}"] = [*march, f"-DFP4_LEVEL={level}", kernels / name]

    def build(name: str) -> None:
        command = ["gcc", *FLAGS, "-c", *jobs[name], "-o", folder / f"{name}.o"]
        subprocess.run(list(map(str, command)), check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, [name for name in jobs if name.endswith(only)]))


def link(folder: Path) -> Path:
    library = folder / "libcpu.so"
    subprocess.run(
        ["gcc", "-shared", *FLAGS, *map(str, folder.glob("*.o")), "-o", str(library)], check=True
    )
    return library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """The folder of its objects."""
    folder = tmp_path_factory.mktemp("objects")
    compile_kernels(ROOT / "kernels", folder)
    return folder


def kernel_tests(library: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Tests of the CPU with that library; memory of Python's objects is looked at, too."""
    # C++ of torch throws: what catches it has to be there when the sanitizer looks.
    found = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LIBCPU": str(library),
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(SUPPORT),
    }
    command = [sys.executable, "-m", "pytest", "-p", "sanitized_cpu", "--capture=sys"]
    marks = ["-m", "not slow and not system and not gpu", "-k", "not cuda and not ptx and not simt"]
    return subprocess.run(
        [*command, *marks, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def test_nothing_is_read_or_written_beside_its_place(compiled):
    library = link(compiled)
    ended = kernel_tests(library, *(ROOT / "tests" / name for name in OF_THE_CPU))
    assert (ended.returncode, REPORT in ended.stderr) == (0, False), ended.stdout + ended.stderr
    assert str(library) in ended.stdout


BREAKS = {
    "amax reads one too many": (
        *("amax.c", "bits_of(x[i]) &", "bits_of(x[i + 1]) &"),
        *("numerics/test_backend_cpu.py", "heap-buffer-overflow"),
    ),
    "transpose believes in alignment": (
        *("transpose.c", "DEFINE_TRANSPOSE(2, any2)", "DEFINE_TRANSPOSE(2, uint16_t)"),
        *("kernels/test_fp8_int.py", "misaligned address"),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_seen(name, compiled, tmp_path):
    file, old, new, tests, expected = BREAKS[name]
    kernels = Path(shutil.copytree(ROOT / "kernels", tmp_path / "kernels"))
    text = (kernels / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (kernels / file).write_text(text.replace(old, new), encoding="utf-8")
    objects = Path(shutil.copytree(compiled, tmp_path / "objects"))
    compile_kernels(kernels, objects, only=file)
    ended = kernel_tests(link(objects), ROOT / "tests" / tests)
    assert expected in ended.stderr
