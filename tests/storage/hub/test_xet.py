"""hf_xet's way to the same bytes, against its own storage in a folder."""

import sys
from types import SimpleNamespace

import pytest
from checkpoints import write_llama
from hub_cases import NVFP4, ask, expect

from fp4convert.errors import SourceError
from fp4convert.storage.hub.http import RemoteFile
from fp4convert.storage.hub.xet import XetReader

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


class Late:
    """hf_xet, whose group of downloads is there only after the reader was stopped."""

    def __init__(self) -> None:
        self.is_aborted = False

    def with_config(self, name: str, value: int) -> None:
        """No option matters."""

    def new_download_stream_group(self, **options: object) -> "Late":
        self.reader.stop()
        return self

    def abort(self) -> None:
        self.is_aborted = True

    def download_stream(self, info: object, start: int, end: int):
        assert self.is_aborted
        raise RuntimeError("aborted")


def test_a_stop_while_the_group_of_downloads_is_made_ends_it(monkeypatch):
    late, ranges = Late(), SimpleNamespace(xet_name=lambda file: "0" * 64, stop=lambda: None)
    known = {
        "XetFileInfo": lambda name, nbytes: None,
        "XetConfig": lambda: late,
        "XetSession": lambda config: late,
    }
    monkeypatch.setitem(sys.modules, "hf_xet", SimpleNamespace(**known))
    late.reader = XetReader(ranges, "https://hub.example/token", {})
    with pytest.raises(SourceError, match="RuntimeError"):
        late.reader.read_into(
            RemoteFile("f", "https://hub.example/f", 10, "0" * 64, "c"),
            0,
            memoryview(bytearray(10)),
        )
    assert late.is_aborted
