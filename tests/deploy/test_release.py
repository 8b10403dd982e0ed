"""The release, rehearsed (make rehearse): built by the workflow's own lines, uploaded to an index
on the loopback device, installed from it as people do, and on ARM as far as an emulator goes.

What fp4convert depends on comes from the real index, to which that one points. Not in it: the
images of manylinux (auditwheel judges what Debian's compilers make), macOS, PyPI itself, and its
attestations, for which GitHub's identity is needed.
"""

import json
import os
import shutil
import socket
import subprocess
import venv
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from checkpoints import done, wait_until
from paths import ROOT
from tiny_chains import TEXT, make_model

from fp4convert.version import __version__

pytestmark = pytest.mark.system

TOOLS = Path(os.environ.get("RELEASE_TOOLS", ROOT / ".venv-release" / "bin"))
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))["jobs"]
TAG = {
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "OWNER/fp4convert",
    "GITHUB_REF_NAME": f"v{__version__}",
}
ARM = {"_PYTHON_HOST_PLATFORM": "linux-aarch64", "CC": "aarch64-linux-gnu-gcc"}
CROSS = "-Ccmake.define.CMAKE_SYSTEM_NAME=Linux -Ccmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64"
PACKED = "git archive $(git stash create | grep . || echo HEAD) | tar x -C"  # with what is edited
PACKAGES = "python3.11-minimal libpython3.11-stdlib libstdc++6"
UNPACK = f"""mkdir -p state/lists/partial cache/archives/partial root
options="-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State=$PWD/state
  -o Dir::State::status=/dev/null -o Dir::Cache=$PWD/cache"
apt-get $options update
apt-get $options install --yes --no-install-recommends --download-only {PACKAGES}
for package in cache/archives/*.deb; do dpkg -x $package root; done"""
PLATFORMS = ("2014", "_2_17", "_2_26", "_2_27", "_2_28")  # that an ARM machine of today takes
QUANTIZE = ("quantize", "m", "--format", "nvfp4", "--json", "-o")


def bash(lines: str, cwd: Path, **variables: str) -> str:
    """The output of lines of a shell that finds the release's tools first."""
    known = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}", **variables}
    command = ["bash", "-euo", "pipefail", "-c", lines]
    ended = subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class Index(NamedTuple):
    """Where the release is: the index, and a folder with a model."""

    url: str
    folder: Path
    digest: str  # of the model's artifact, by this checkout

    def convert(self, name: str, words: str, **variables: str) -> None:
        """Run the command that begins with these words as somebody who has nothing yet."""
        command = [*words.format(index=self.url).split(), *QUANTIZE, name]
        kept = {key: value for key, value in os.environ.items() if "CERT" in key}
        known = {
            "HOME": f"{self.folder}/home-{name}",
            "PATH": f"{TOOLS}:/usr/bin:/bin",
            **kept,
            **variables,
        }
        made = subprocess.run(
            command, cwd=self.folder, env=known, stdout=subprocess.PIPE, check=True
        )
        assert json.loads(made.stdout)["digest"] == self.digest


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder of what is uploaded."""
    tree = tmp_path_factory.mktemp("tree")
    bash(f"{PACKED} {tree}", ROOT)
    log = tree / "CHANGELOG.md"
    log.write_text(log.read_text("utf-8").replace("(unreleased)", "(2026-12-01)", 1), "utf-8")
    for step in JOBS["source"]["steps"]:
        if "run" in step:
            bash(step["run"], tree, **TAG)
    bash("python -m build --installer uv --wheel --outdir built .", tree)
    bash(f"python -m build --installer uv --wheel --outdir built {CROSS} .", tree, **ARM)
    bash("for wheel in built/*; do auditwheel repair --wheel-dir dist $wheel; done", tree)
    bash("twine check --strict dist/*", tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def index(dist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine")
    (folder / "packages").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = f"http://127.0.0.1:{port}"
    words = f"run -i 127.0.0.1 -p {port} -P . -a . --fallback-url https://pypi.org/simple/"
    server = subprocess.Popen([TOOLS / "pypi-server", *words.split(), folder / "packages"])
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    bash(f"twine upload --non-interactive --repository-url {place} -u me -p secret {dist}/*", dist)
    (folder / "text.txt").write_text(TEXT)
    make_model(folder / "m", "Llama")
    here = done(*QUANTIZE[:1], folder / "m", *QUANTIZE[2:], folder / "here").json["digest"]
    yield Index(f"{place}/simple/", folder, here)
    server.terminate()
    server.wait()


def test_what_is_uploaded_is_named_for_every_machine(dist):
    assert sorted(file.name for file in dist.iterdir()) == [
        f"fp4convert-{__version__}-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        f"fp4convert-{__version__}-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        f"fp4convert-{__version__}.tar.gz",
    ]
    assert "pip install fp4convert" in (dist.parent / "README.md").read_text("utf-8")


@pytest.mark.parametrize("way", ["uvx", "pipx run"])
def test_one_line_converts_where_nothing_is(index, way):
    index.convert(way, f"{way} --index-url {{index}} fp4convert")


@pytest.mark.parametrize("way", ["wheel", "source"])
def test_pip_installs_the_wheel_and_the_source(index, way):
    """The wheel with an extra, whose commands then run."""
    home = index.folder / f"{way}-venv"
    venv.create(home)
    what = "--no-binary=fp4convert fp4convert" if way == "source" else "fp4convert[calibrate]"
    constraint = f"--constraint {ROOT / 'constraints.txt'} --index-url {index.url}"
    bash(f"python -m pip --python {home}/bin/python install {constraint} {what}", index.folder)
    index.convert(way, f"{home}/bin/fp4convert")
    if way == "wheel":
        bash(
            f"{home}/bin/fp4convert evaluate {way} --source m --text text.txt --max-kl 1",
            index.folder,
        )


def test_the_wheel_for_arm_is_installed_and_makes_the_same_bytes(index, tmp_path):
    """By pip's own choice for an ARM machine; in Debian's Python for it, under an emulator."""
    assert shutil.which("qemu-aarch64"), "qemu-aarch64 is missing: make system installs it"
    bash(UNPACK, tmp_path)
    platforms = " ".join(f"--platform manylinux{each}_aarch64" for each in PLATFORMS)
    only = f"--only-binary=:all: --python-version 3.11 --implementation cp {platforms}"
    bash(f"python -m pip install --target arm --index-url {index.url} {only} fp4convert", tmp_path)
    root = tmp_path / "root"
    words = f"qemu-aarch64 -L {root} {root}/usr/bin/python3.11 -m fp4convert"
    index.convert("arm", words, PYTHONPATH=str(tmp_path / "arm"))


def test_uv_runs_the_job_of_the_hub(index, hub):
    """Its dependencies are those that the script itself names."""
    hub.add("org/m", index.folder / "m")
    words = f"uv run --index-url {index.url} {ROOT}/deploy/machines/hf_job.py org/m me/q"
    bash(f"{words} --format nvfp4", index.folder, HF_HUB_DISABLE_XET="1")
    assert len(hub.repos["me/q"].commits) == 2


def test_the_release_publishes_with_attestations_and_without_a_token():
    job = JOBS["publish"]
    assert job["permissions"] == {"id-token": "write"}
    assert job["if"] == "github.ref_type == 'tag'"
    (step,) = (step for step in job["steps"] if "publish" in step["uses"])
    assert step["with"] == {"attestations": True}
