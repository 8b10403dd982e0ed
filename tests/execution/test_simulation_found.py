"""What the simulated worlds found in the real code: each fault by itself, on the real disk."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import run, write_llama

from fp4convert.execution import finish as finish_module
from fp4convert.execution import folder as folder_module
from fp4convert.execution import output_check, takeover
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.leases import Leases
from fp4convert.execution.settings import Settings
from fp4convert.storage.disk import hash_file
from fp4convert.storage.local import LocalSource
from fp4convert.storage.shard_writer import ShardWriter

STATE = ".fp4convert"


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


def quantize(source: Path, out: Path):
    return run("quantize", source, "--format", "nvfp4", "-o", out, "--json")


def test_the_names_of_the_folders_above_are_on_the_disk_before_the_plan_is(
    source, tmp_path, monkeypatch
):
    """Else a power cut after the end takes the whole output; files in folders as well."""
    (source / "assets" / "deep").mkdir(parents=True)
    (source / "assets" / "deep" / "words.txt").write_bytes(b"words")
    out, flushed = tmp_path / "new" / "deep" / "out", []
    is_begun = {}

    def note(place: Path) -> None:
        flushed.append(place)
        is_begun.setdefault(place, (out / STATE / "plan.json").exists())

    monkeypatch.setattr("fp4convert.storage.disk.fsync_folder", note)
    monkeypatch.setattr(folder_module, "fsync_folder", note)
    assert quantize(source, out).code == 0
    above = (out, *out.parents[:3])
    assert out.parents[2] == tmp_path
    assert [is_begun.get(place) for place in above] == [False] * 4
    assert {out / "assets" / "deep", out / "assets"} <= set(flushed)


@pytest.mark.parametrize("taken", ["small-config.json", "small-0", "quantization_config.json"])
def test_a_process_whose_small_files_were_taken_away_is_told_so(
    taken, source, tmp_path, monkeypatch
):
    """As one that slept for longer than a minute: it was a traceback."""

    def hash_none(path: Path, *_: object) -> str:
        if path.name.endswith(taken):
            path.parent.rename(tmp_path / "taken")  # at once: another thread may be writing there
        return hash_file(path)

    monkeypatch.setattr(folder_module, "hash_file", hash_none)
    outcome = quantize(source, tmp_path / "out")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "given-up")


def test_a_copy_whose_source_fails_does_not_blame_the_output(source, tmp_path, monkeypatch):
    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = LocalSource.open_file
    monkeypatch.setattr(
        LocalSource,
        "open_file",
        lambda self, file: Failing() if file == "tokenizer.json" else opened(self, file),
    )
    outcome = quantize(source, tmp_path / "out")
    assert outcome.code == 3
    assert outcome.json["error"]["code"] == "source-unreadable"


def test_a_shard_that_cannot_be_removed_does_not_hide_why_it_goes(tmp_path, monkeypatch):
    """A disk that became read-only: it was a traceback of the removal."""
    monkeypatch.setattr(Path, "unlink", _refuse)
    writer = ShardWriter(tmp_path / "shard", b"", (), 10)
    writer.discard()
    assert (tmp_path / "shard").exists()


def test_no_report_is_written_of_a_part_of_the_records(source, tmp_path, monkeypatch):
    """One could not be read for a moment: the report said nothing of its modules."""
    real = finish_module.write_ending

    def end_without_one(folder: OutputFolder) -> object:
        lost, found = folder.manifest.tasks[0], folder.record_of
        monkeypatch.setattr(
            OutputFolder, "record_of", lambda self, task: None if task == lost else found(task)
        )
        return real(folder)

    monkeypatch.setattr("fp4convert.execution.carry_out.write_ending", end_without_one)
    outcome = quantize(source, tmp_path / "out")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "unfinished")
    assert not (tmp_path / "out" / "quantization_report.json").exists()


def test_a_plan_that_came_meanwhile_is_seen_through_a_network_file_system(
    source, tmp_path, monkeypatch
):
    """What a machine remembers of a folder is renewed before it is asked for the plan."""
    calls: list[str] = []
    read, utime = takeover.read_manifest, os.utime
    monkeypatch.setattr(takeover, "read_manifest", lambda root: calls.append("read") or read(root))

    def note(path: object, *more: object, **options: object) -> None:
        calls.append(Path(str(path)).name)
        utime(path, *more, **options)

    monkeypatch.setattr("os.utime", note)
    assert quantize(source, tmp_path / "out").code == 0
    assert calls[calls.index("read") - 1] == STATE


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_shard_that_another_has_just_found_harmed_is_waited_for(source, tmp_path, monkeypatch):
    """Who held the end before had it done again: that ends nothing."""
    out, taken = tmp_path / "out", []
    hold = Leases.hold_when_free

    @contextmanager
    def hold_after_another(
        leases: Leases, lease: str, *how: object, **more: object
    ) -> Iterator[None]:
        with hold(leases, lease, *how, **more):
            if lease == finish_module.ENDING and not taken:
                taken.append(sorted((out / STATE / "done").iterdir())[0])
                taken[0].unlink()
            yield

    monkeypatch.setattr(Leases, "hold_when_free", hold_after_another)
    outcome = quantize(source, out)
    assert taken
    assert outcome.code == 0, outcome.out
    assert "made again" not in outcome.err  # it was not harmed while this one looked
    assert outcome.json["digest"] == quantize(source, tmp_path / "again").json["digest"]


def test_a_plan_that_comes_between_two_looks_is_not_taken_for_another(
    source, tmp_path, monkeypatch
):
    """Of the same source, by another process: a dry run said "another source"."""
    out = tmp_path / "out"
    look = output_check.refuse_taken

    def begin_meanwhile(root: Path, settings: Settings) -> None:
        look(root, settings)
        monkeypatch.setattr(output_check, "refuse_taken", look)
        assert quantize(source, out).code == 0

    monkeypatch.setattr(output_check, "refuse_taken", begin_meanwhile)
    words = ("--format", "nvfp4", "-o", out, "--dry-run", "--json")
    outcome = run("quantize", source, *words)
    assert outcome.code == 0, outcome.out
    assert (out / "quantization_config.json").exists()
