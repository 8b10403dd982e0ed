"""A run that ends with exit 2 leaves nothing: no output folder, no state of its own in one."""

from pathlib import Path

import pytest
from checkpoints import run, write_llama
from gguf_donors import model, write_donor

NVFP4 = ("M", "--format", "nvfp4", "-o", "out")
REFUSED = [
    (*NVFP4, "--ray", "127.0.0.1:1"),
    (*NVFP4, "--ray", "127.0.0.1:1", "--target-bits", "6"),
    (*NVFP4, "--push-to-hub", "bad//name"),
    (*NVFP4, "--push-to-hub", "bad//name", "--target-bits", "6"),
    (*NVFP4, "--report", "out/page.html"),
    (*NVFP4, "--report", "out/sub/page.html"),
    (*NVFP4, "--exclude", "no.such.module"),
    (*NVFP4, "--exclude", "*"),
    (*NVFP4, "--disk", "4"),
    (*NVFP4, "--lora", "nowhere"),
    ("M", "--format", "mxfp4", "--dialect", "gguf", "-o", "out"),
    ("m.gguf", "--format", "mxfp4", "--dialect", "gguf", "-o", "out", "--exclude", "no.such"),
    ("m.gguf", "--format", "nvfp4", "--dialect", "gguf", "-o", "out", "--ray", "127.0.0.1:1"),
    ("m.gguf", "--format", "nvfp4", "-o", "out", "--config", "nowhere"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "M")
    write_donor(tmp_path / "m.gguf", model())
    return tmp_path


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_is_left(words, is_there, places):
    """Also in a folder that is there already, which stays as empty as it was."""
    if is_there:
        (places / "out").mkdir()
    before = sorted(places.rglob("*"))
    refused = run("quantize", *words, "--json")
    assert refused.code == 2, refused
    assert sorted(places.rglob("*")) == before
