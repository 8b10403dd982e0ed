"""GGUF files on the Hub: their headers come by ranges, their tensors as they are wanted, and they
become what the same files become on a disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import run, write_llama
from gguf_donors import model, write_donor

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.conversion import repacking
from fp4convert.storage.hub import source as hub_source


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


def test_shards_that_become_one_file_are_brought_once(hub, tmp_path, monkeypatch):
    """Each in its turn, which hashes it; only its header is asked for before, twice."""
    monkeypatch.setattr(hub_source, "HEAD_NBYTES", 2048)
    source = write_llama(tmp_path / "source")
    donor = write_donor(tmp_path / "donor.gguf", model())
    artifact, words = tmp_path / "q", ("--dialect", "gguf", "--template", donor)
    assert run("quantize", source, "--format", "mxfp4", "-o", artifact, "-q").code == 0
    hub.add("org/q", artifact)
    here, there, planned = tmp_path / "a", tmp_path / "b", []
    assert run("transcode", artifact, *words, "-o", here, "-q").code == 0
    prepare = repacking.prepare_transcode

    def note(artifact: Artifact, *others: object) -> object:
        plan = prepare(artifact, *others)
        planned.append(hub.sent_nbytes())  # values were compared with the donor's
        artifact.source.distrust()  # as where there is no memory to keep them
        return plan

    monkeypatch.setattr(repacking, "prepare_transcode", note)
    assert run("transcode", "org/q", *words, "-o", there, "-q").code == 0
    files = [next(out.glob("*.gguf")).read_bytes() for out in (here, there)]
    assert files[0] == files[1]
    shards = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    assert hub.sent_nbytes() - planned[0] < 1.2 * shards


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
