"""The Dockerfile, as far as it can be tried without a container: its RUN lines run here on the
places that it names.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from paths import ROOT

TEXT = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
LINES = [
    line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")
]
RUNS = [line.removeprefix("RUN ") for line in LINES if line.startswith("RUN ")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert [line.split()[1:-1] for line in LINES if line.startswith("COPY ")] == [
        ["."],
        ["--from=build", "/wheels"],
    ]
    assert not {
        "pyproject.toml",
        "CMakeLists.txt",
        "kernels",
        "configs",
        "pages",
        "fp4convert",
        "README.md",
        "LICENSE",
    } & set(ignored)
    assert {".git", ".venv*", "build"} <= set(ignored)


def test_the_image_has_a_python_that_the_package_takes():
    (version,) = re.findall(r"^ARG PYTHON=3\.(\d+)$", TEXT, re.MULTILINE)
    assert int(version) >= int(re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])[1])


def test_it_runs_the_command():
    assert 'ENTRYPOINT ["fp4convert"]' in LINES
    assert "fp4convert" in PROJECT["scripts"]
    named = re.findall(r"--build-arg EXTRAS=([\w,]+)", TEXT) + re.findall(
        r"# Extras .*: (.*)", TEXT
    )
    assert {extra.strip() for words in named for extra in words.split(",")} < set(
        PROJECT["optional-dependencies"]
    )


def test_packages_of_the_build_are_debians():
    """By name: those that make system's machine has a compiler from."""
    (line,) = (line for line in RUNS if "apt-get" in line)
    words = shlex.split(line)
    packages = words[
        words.index("--no-install-recommends") + 1 : words.index("&&", words.index("install"))
    ]
    assert packages == ["gcc", "libc6-dev"]


@pytest.mark.slow
@pytest.mark.parametrize("extras", ["", "cuda12,gguf"])
def test_the_wheel_is_installed_with_the_extras(extras, wheel, tmp_path):
    """The line as it is, with pip's own variables to keep it from the network, in an environment of
    its own.
    """
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    line = RUNS[-1].replace("/wheels", str(tmp_path / "wheels"))
    variables = {
        "EXTRAS": extras,
        "INDEX": "file:///nowhere",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }
    path = os.pathsep.join([str(tmp_path / "venv" / "bin"), "/usr/bin", "/bin"])
    shell = ["sh", "-exc", line]
    ended = subprocess.run(
        shell,
        env={**os.environ, **variables, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (f"{wheel.name}[{extras}]" in ended.stderr) is bool(extras)
    assert (tmp_path / "venv" / "bin" / "fp4convert").exists()
    assert not (tmp_path / "wheels").exists()


def test_the_wheel_is_built_by_the_line_that_builds_it_here():
    """The fixture `wheel` runs these words on the checkout."""
    (line,) = (line for line in RUNS if "pip wheel" in line)
    assert shlex.split(line) == [
        "pip",
        "wheel",
        "--no-cache-dir",
        "--no-deps",
        "--wheel-dir",
        "/wheels",
        "/source",
    ]


@pytest.mark.parametrize("line", RUNS)
def test_lines_are_sound_shell(line):
    subprocess.run(["sh", "-n", "-c", line], check=True)
