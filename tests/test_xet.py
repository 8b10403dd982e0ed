"""hf_xet's way to the same bytes, against its own storage in a folder."""

import pytest
from checkpoints import write_llama
from test_hub import NVFP4, ask, expect

XET = ("--transport", "xet")


@pytest.fixture
def folder(hub, tmp_path):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000})
    hub.add("org/m", folder)
    return folder


def test_it_gives_the_same_bytes_without_a_large_range(hub, folder, tmp_path):
    hub.store_chunks(folder, tmp_path / "chunks")
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, *XET, "-o", tmp_path / "b").json["digest"] == expected
    assert {seen.nbytes for seen in hub.seen if seen.where == "storage"} <= {1}


def test_a_repository_that_is_not_there_is_refused(hub, folder, tmp_path):
    outcome = ask("quantize", "org/m", *NVFP4, *XET, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-xet")


def test_chunks_that_are_gone_are_exit_3(hub, folder, tmp_path):
    hub.store_chunks(folder, tmp_path / "chunks")
    for oid in hub.xet_names:
        hub.xet_names[oid] = "0" * 64
    outcome = ask("quantize", "org/m", *NVFP4, *XET, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-unreachable")


def test_another_transport_is_refused(hub, folder):
    outcome = ask("quantize", "org/m", *NVFP4, "--transport", "ftp")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "transport")
