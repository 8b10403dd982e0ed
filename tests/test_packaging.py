"""The wheel carries the CPU library, the kernels' sources and the recipes, and works where only the wheel is."""

import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[1]
CUDA = ("fp4.h", "device.h", "quantize.cu", "dequantize.cu", "gemv.cu")  # compiled on the user's machine
CARRIED = (*(f"kernels/{name}" for name in CUDA), "kernels/quantize.c", "kernels/cpu.c", "configs/default.toml")
PROBE = """
from importlib.resources import files
import fp4convert, sys
from fp4convert import backends, formats, recipe
import numpy as np
assert fp4convert.__file__.startswith(sys.argv[1]), fp4convert.__file__
assert all(files("fp4convert").joinpath(name).is_file() for name in sys.argv[2:])
x = formats.Matrix(np.full(16, 6.0, np.float32).view(np.uint8).data, "F32", (1, 16))
q = backends.open_backend("cpu").quantize(x, formats.NVFP4, "amax", 6.0)
assert bytes(q.packed) == b"\\x77" * 8
assert recipe.build_recipe(recipe.Target("nvfp4", "modelopt"), {"model_type": "llama"}).groups
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


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
