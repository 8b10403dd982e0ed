"""The wheel carries the CPU library, the kernels' sources and the recipes, and works where only the
wheel is.
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import numpy
import pytest
from checkpoints import run, write_llama
from packaging.requirements import Requirement
from paths import ROOT

from fp4convert.numerics.backends import cubins, entry_points
from fp4convert.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CUDA = (*cubins.HEADERS, *entry_points.SOURCES)  # compiled on the user's machine
PAGES = (
    "py.typed",
    "report/catalogue.toml",
    *(
        f"report/page/{kind}.{ending}"
        for kind in ("report", "comparison")
        for ending in ("html", "js")
    ),
    *(f"report/page/{name}" for name in ("page.html", "page.css", "common.js", "draw.js")),
)
CARRIED = (
    *(f"kernels/{name}" for name in CUDA),
    "kernels/quantize.c",
    "kernels/cpu.c",
    "configs/default.toml",
    *PAGES,
)
PLAIN_NBYTES = 155 << 20  # of blocks on the disk, which du -sm counts
PROBE = """
from importlib.resources import files
import fp4convert, sys
from fp4convert.numerics import backends
from fp4convert.numerics import formats
from fp4convert.numerics import matrices
from fp4convert.recipes import recipe
import numpy as np
assert fp4convert.__file__.startswith(sys.argv[1]), fp4convert.__file__
assert all(files("fp4convert").joinpath(name).is_file() for name in sys.argv[2:])
x = matrices.Matrix(np.full(16, 6.0, np.float32).view(np.uint8).data, "F32", (1, 16))
q = backends.open_backend("cpu").quantize(x, formats.NVFP4, "amax", 6.0)
assert bytes(q.packed) == b"\\x77" * 8
assert recipe.build_recipe(recipe.Target("nvfp4", "modelopt"), {"model_type": "llama"}).groups
"""


@pytest.mark.slow
def test_wheel_carries_library_kernels_and_recipes(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"fp4convert/{name}" for name in CARRIED} <= names
    assert any(name.startswith("fp4convert/libcpu.") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
    assert "-py3-none-" in wheel.name


def test_wheel_works_without_the_source_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    packages = Path(numpy.__file__).parents[1]
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(packages)!r}]\n{PROBE}"
    # -S and -E keep out the editable install, which would answer for the wheel.
    command = [sys.executable, "-S", "-E", "-c", program, str(tmp_path), *CARRIED]
    subprocess.run(command, check=True, cwd=tmp_path)


def test_editable_install_finds_the_same_files():
    assert all(files("fp4convert").joinpath(name).is_file() for name in CARRIED)


def run_bare(venv: Path, *words: object) -> str:
    """What the command of an environment prints, where there is no compiler, no other program and
    none of our variables.
    """
    nothing = venv / "nothing"
    nothing.mkdir(exist_ok=True)
    variables = {
        "PATH": str(nothing),
        "CC": "/bin/false",
        "HOME": str(nothing),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [str(venv / "bin" / "fp4convert"), *map(str, words)]
    ended = subprocess.run(
        command, env=variables, cwd=venv, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def check_bare(venv: Path, folder: Path) -> None:
    """Everything that needs no extra, on the wheel's own code; a report, too."""
    code = "import fp4convert, sys; print(fp4convert.__file__)"
    found = subprocess.run(
        [venv / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert Path(found.strip()).is_relative_to(venv)
    source, made, page = write_llama(folder / "m"), folder / "q", folder / "page.html"
    quantize = ("quantize", source, "--format", "nvfp4", "--json", "-o")
    document = json.loads(run_bare(venv, *quantize, made))
    assert document["digest"] == run(*quantize, folder / "here").json["digest"]
    assert json.loads(run_bare(venv, "inspect", made, "--full", "--json"))["healthy"]
    verify = ("verify", made, "--source", source, "--report", page, "--json")
    assert json.loads(run_bare(venv, *verify))["passed"]
    assert "class Plot" in page.read_text(encoding="utf-8")
    run_bare(venv, "dequantize", made, "-o", folder / "floats")
    run_bare(venv, "transcode", made, "-o", folder / "other", "--dialect", "modelopt")
    assert json.loads(run_bare(venv, "analyze", source, "--json"))
    compare = ("compare", made, folder / "other", "--source", source, "--json")
    assert json.loads(run_bare(venv, *compare))["passed"] is None
    assert run_bare(venv, "--version").startswith(f"fp4convert {__version__} (CPU kernels: ")


def make_bare(folder: Path) -> tuple[Path, list[str | Path]]:
    """A new environment in which nothing is, and the words of a pip that installs into it."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    return venv, [*pip, "install", "--quiet"]


@pytest.mark.system
def test_a_plain_install_is_small_and_does_all_that_needs_no_extra(wheel, tmp_path):
    """As `pip install` has it, from an index."""
    venv, install = make_bare(tmp_path)
    subprocess.run([*install, wheel], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    sizes = {
        place.name: sum(512 * path.lstat().st_blocks for path in (place, *place.rglob("*")))
        for place in site.iterdir()
    }
    assert sum(sizes.values()) <= PLAIN_NBYTES, sizes
    assert not {"torch", "transformers", "cupy"} & sizes.keys()
    check_bare(venv, tmp_path)


def names_of(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", each)[0] for each in requirements}


def test_what_is_required_is_imported_and_what_is_heavy_is_an_extra():
    required, extras = names_of(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    text = "\n".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "fp4convert").rglob("*.py")
    )
    unused = [name for name in required if not re.search(rf"(import|from) {name}\b", text)]
    assert unused == []
    assert not required & {"torch", "transformers", "ray", "gguf"}
    assert {"greenlet", "pillow", "torch", "transformers"} == names_of(extras["calibrate"])
    assert {"torch", "transformers", "ray", "gguf"} <= names_of(extras["test"])
    (every,) = extras["all"]
    named = set(re.search(r"\[(.*)\]", every)[1].split(","))
    assert extras.keys() - named == {
        "all",
        "test",
        "cuda13",
    }  # cuda12 and cuda13 exclude each other


def test_the_demo_installs_what_is_required_alone_and_says_so_first(tmp_path):
    words = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", "demo"]
    lines = subprocess.run(
        words, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    installing = [line for line in lines if " pip install " in line]
    assert [line.split()[-1] for line in installing] == [".", "demo-requirements.txt"]
    (said,) = (line for line in lines if "to download" in line)
    assert lines.index(said) < lines.index(installing[0])


def test_the_version_is_written_once():
    """In the package; whoever else says it, asks for it, or is compared here."""
    assert "version" not in PROJECT
    assert version("fp4convert") == __version__
    log, citation = ((ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.search(r"^## (\S+)", log, re.MULTILINE)[1] == __version__
    assert re.search(r"^version: (\S+)", citation, re.MULTILINE)[1] == __version__
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    said = [
        re.findall(r"fp4convert(?:==| v?)(\d+\.\d+\.\d+)", each.read_text("utf-8"))
        for each in pages
    ]
    assert {version for found in said for version in found} <= {__version__}
    assert not [
        file
        for file in (ROOT / "fp4convert").rglob("*.py")
        if __version__ in file.read_text(encoding="utf-8") and file.name != "version.py"
    ]


@pytest.mark.parametrize(
    ("platform", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("macos", "arm64")]
)
def test_one_wheel_is_built_for_every_platform(platform, machine):
    """cibuildwheel itself reads the configuration, and says what it would build."""
    command = [
        sys.executable,
        "-m",
        "cibuildwheel",
        "--platform",
        platform,
        "--archs",
        machine,
        "--print-build-identifiers",
        ROOT,
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    (identifier,) = told.stdout.split()
    assert re.fullmatch(rf"cp311-(manylinux|macosx)_{machine}", identifier)


@pytest.mark.system
def test_kernels_compile_for_macos(tmp_path):
    """By CMakeLists.txt as it is, with clang and the headers of macOS that come with Zig (make
    system installs it).

    Zig's linker knows no bundles, so that a library is linked in place of one, and it needs no tool
    for names of libraries.
    """
    compiler = tmp_path / "cc"
    zig = f"exec {sys.executable} -m ziglang cc -target aarch64-macos -Werror"
    swap = 'for word; do shift; [ "$word" = -bundle ] && word=-shared; set -- "$@" "$word"; done'
    compiler.write_text(f'#!/bin/sh\n{swap}\n{zig} "$@"\n')
    compiler.chmod(0o755)
    target = {"SYSTEM_NAME": "Darwin", "SYSTEM_PROCESSOR": "arm64", "BUILD_TYPE": "Release"}
    tools = {"C_COMPILER": compiler, "C_COMPILER_WORKS": 1, "INSTALL_NAME_TOOL": "/bin/true"}
    words = [f"-DCMAKE_{key}={value}" for key, value in {**target, **tools}.items()]
    cmake = [sys.executable, "-m", "cmake"]
    subprocess.run([*cmake, "-S", ROOT, "-B", tmp_path / "build", *words], check=True)
    subprocess.run([*cmake, "--build", tmp_path / "build"], check=True)
    (library,) = (tmp_path / "build").glob("libcpu.*")
    code = library.read_bytes()
    assert code[:8].hex() == "cffaedfe0c000001"  # Mach-O of 64 bits, for ARM64
    assert all(
        name in code
        for name in (b"_quantize_nvfp4_bf16", b"_dequantize_mxfp4_fp32", b"_compare_nvfp4_fp16")
    )


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "test"])
def test_no_extra_takes_a_cupy_that_misses_nvrtcs_wheel(extra):
    """13.6 says that it failed to load libnvrtc where 14.0 finds the wheel beside it."""
    wanted = map(Requirement, PROJECT["optional-dependencies"][extra])
    (cupy,) = [each.specifier for each in wanted if each.name.startswith("cupy")]
    assert "14.0.0" in cupy
    assert "13.6.0" not in cupy
