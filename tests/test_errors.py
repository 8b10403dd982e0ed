"""What is not installed is told before any work, with the line to type that installs it."""

import json
import shlex
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from checkpoints import run, write_llama
from gguf_donors import model, write_donor

from fp4convert.errors import install_line
from fp4convert.numerics.backends import gpus

ASKING = {  # package that is absent -> extra, code of the error, what needs it
    "torch": ("calibrate", "no-torch", ("calibrate", "{source}", "--text", "{source}/config.json")),
    "torch for gptq": (
        "calibrate",
        "no-torch",
        (
            "quantize",
            "{source}",
            "--format",
            "nvfp4",
            "--method",
            "gptq",
            "--calibration",
            "{gguf}",
        ),
    ),
    "ray": ("ray", "no-ray", ("quantize", "{absent}", "--format", "nvfp4", "--ray", "auto")),
    "gguf": ("gguf", "no-gguf", ("quantize", "{gguf}", "--format", "nvfp4")),
    "cupy": (
        "cuda12",
        "no-device",
        ("quantize", "{source}", "--format", "nvfp4", "--device", "cuda"),
    ),
}


@pytest.mark.parametrize(("package", "asked"), ASKING.items(), ids=ASKING)
def test_what_needs_an_extra_says_which_before_any_work(package, asked, tmp_path, monkeypatch):
    extra, code, words = asked
    places = {
        "source": write_llama(tmp_path / "source"),
        "gguf": write_donor(tmp_path / "m.gguf", model()),
        "absent": tmp_path / "absent",  # whoever looks for it is too late
    }
    monkeypatch.setitem(sys.modules, package.partition(" ")[0], None)
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((12, 9), 1, ""))
    before = sorted(tmp_path.rglob("*"))
    told = run(*[word.format(**places) for word in words], "-o", tmp_path / "out", "--json")
    error = told.json["error"]
    assert (told.code, error["code"]) == (2, code)
    assert error["next"].endswith(f"nstall it: {install_line(extra)}")
    assert sorted(tmp_path.rglob("*")) == before


def test_all_public_names_are_there_without_torch():
    code = "import sys; sys.modules['torch'] = None; import fp4convert"
    code += "; print([name for name in fp4convert.__all__ if not hasattr(fp4convert, name)])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def installed_from(monkeypatch, origin: dict[str, object] | None) -> list[str]:
    """The words of the line for the extra `gguf`, as a shell reads them."""
    text = None if origin is None else json.dumps(origin)
    made = SimpleNamespace(
        read_text=lambda file: text if file == "direct_url.json" else None,
        requires=["numpy>=2.0", 'gguf>=0.19; extra == "gguf"', "ray>=2.50; extra == 'ray'"],
    )
    monkeypatch.setattr(metadata, "distribution", lambda name: made)
    return shlex.split(install_line("gguf"))


def test_the_line_names_the_place_that_the_package_came_from(monkeypatch, tmp_path):
    packages = ["pip", "install", "gguf>=0.19"]  # no index is known to have fp4convert itself
    assert installed_from(monkeypatch, None) == packages
    folder = tmp_path / "it's [a] folder"
    url = {"url": folder.as_uri(), "dir_info": {}}
    assert installed_from(monkeypatch, url) == packages  # the folder is gone
    folder.mkdir()
    assert installed_from(monkeypatch, url) == ["pip", "install", f"{folder}[gguf]"]
    editable = {**url, "dir_info": {"editable": True}}
    assert installed_from(monkeypatch, editable) == ["pip", "install", "-e", f"{folder}[gguf]"]
    elsewhere = {"url": "https://example.org/fp4convert.git", "vcs_info": {"vcs": "git"}}
    assert installed_from(monkeypatch, elsewhere) == packages


def test_the_line_of_a_package_that_is_not_installed(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert install_line("gguf") == "pip install '.[gguf]'"
