"""GGUF files on the Hub: their headers come by ranges, their tensors as they are wanted, and they
become what the same files become on a disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import run
from gguf_donors import model, write_donor


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    """Long enough that a header and a range are a small part of it."""
    folder = tmp_path / "r"
    folder.mkdir()
    arrays = {**model(), "blk.0.ffn_up_exps.weight": np.ones((16, 1024, 256), np.float32)}
    return write_donor(folder / "donor.gguf", arrays)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("reference", ["org/m", "org/m/donor.gguf"])
def test_it_becomes_what_it_becomes_on_a_disk(hub, donor, tmp_path, reference, fmt):
    hub.add("org/m", donor.parent)
    words = ("--format", fmt, "--dialect", "gguf")
    for source, out in ((donor, "a"), (reference, "b")):
        outcome = run("quantize", source, *words, "-o", tmp_path / out)
        assert outcome.code == 0, outcome.err
    a, b = ((tmp_path / out / "donor.gguf").read_bytes() for out in "ab")
    assert a == b
    record = json.loads((tmp_path / "b" / "quantization_config.json").read_text())
    assert record["source"]["repo"] == "org/m"


def test_a_dry_run_reads_the_header_alone(hub, donor):
    hub.add("org/m", donor.parent)
    outcome = run("quantize", "org/m", "--format", "mxfp4", "--dialect", "gguf", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert 0 < hub.sent_nbytes() < donor.stat().st_size / 20


def test_inspect_reads_parts(hub, donor, tmp_path):
    words = ("--format", "mxfp4", "--dialect", "gguf", "-q")
    assert run("quantize", donor, *words, "-o", tmp_path / "q").code == 0
    (tmp_path / "only").mkdir()
    (tmp_path / "q" / "donor.gguf").rename(tmp_path / "only" / "q.gguf")
    hub.add("org/q", tmp_path / "only")
    found = run("inspect", "org/q", "--json").json
    here = run("inspect", tmp_path / "only" / "q.gguf", "--json").json
    assert (found["format"], found["dialect"]) == ("mxfp4", "gguf")
    assert found["tensors"] == here["tensors"]
    assert found["findings"] == here["findings"]


def test_one_of_several_is_named(hub, donor):
    (donor.parent / "other.gguf").write_bytes(donor.read_bytes())
    folder = donor.parent / "BF16"
    folder.mkdir()
    (folder / "third.gguf").write_bytes(donor.read_bytes())
    hub.add("org/m", donor.parent)
    words = ("--format", "mxfp4", "--dialect", "gguf", "--dry-run", "--json")
    refused = run("quantize", "org/m", *words)
    assert (refused.code, refused.json["error"]["code"]) == (2, "gguf")
    assert refused.json["error"]["next"] == "Choose one: org/m/donor.gguf"
    for reference in ("org/m/donor.gguf", "org/m/other.gguf", "org/m/BF16/third.gguf"):
        outcome = run("quantize", reference, *words)
        assert outcome.code == 0, outcome.err
        assert len(outcome.json["tensors"]) == len(model()) + 1
    missing = run("quantize", "org/m/none.gguf", *words)
    assert (missing.code, missing.json["error"]["code"]) == (2, "unreadable")


def test_a_damaged_header_is_refused(hub, donor):
    data = donor.read_bytes()
    donor.write_bytes(data[:100] + b"\xff" * 8 + data[108:])
    hub.add("org/m", donor.parent)
    outcome = run("quantize", "org/m", "--format", "mxfp4", "--dialect", "gguf", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "gguf")
