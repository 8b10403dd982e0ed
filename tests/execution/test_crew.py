"""Shards that are filled at once, hashed as they grow, and stopped."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import WAIT_SECONDS, bf16, run, wait_until, write_checkpoint

from fp4convert.errors import CORRUPT, OutputError, SourceError
from fp4convert.execution import settings
from fp4convert.execution.crew import Crew
from fp4convert.execution.fill import Making
from fp4convert.execution.folder import OutputFolder
from fp4convert.planning.steps import MakerSteps
from fp4convert.process import Stopped
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.shard_writer import ShardWriter


def quantize(source: Path, out: Path, *options: object):
    return run("quantize", source, "--format", "nvfp4", "-o", out, "--json", *options)


def several_shards(folder: Path, count: int, each: int = 1) -> Path:
    """Write so many shards, with so many tensors each."""
    names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(count * each)]
    tensors = [(name, ("BF16", (64, 128), bf16(64, 128, seed=5))) for name in names]
    shards = {f"model-{n}.safetensors": dict(tensors[n::count]) for n in range(count)}
    return write_checkpoint(folder, shards)


@pytest.mark.parametrize("cores", [1, 3])
def test_twice_as_many_shards_are_at_work_as_there_are_cores(cores, tmp_path, monkeypatch):
    """Each waits here until as many are hashed; never are more files open."""
    monkeypatch.setattr(settings, "processors", lambda: cores)
    finish, together = ShardWriter.finish, threading.Barrier(2 * cores, timeout=WAIT_SECONDS)
    most, made = [], []
    begin = ShardWriter.__init__

    def begin_and_count(writer, *arguments):
        begin(writer, *arguments)
        made.append(writer)
        most.append(sum(one._fd >= 0 for one in made))

    def finish_together(writer, check):
        together.wait()
        return finish(writer, check)

    monkeypatch.setattr(ShardWriter, "__init__", begin_and_count)
    monkeypatch.setattr(ShardWriter, "finish", finish_together)
    source = several_shards(tmp_path / "m", 12)
    assert quantize(source, tmp_path / "out", "--workers", cores).code == 0
    assert max(most) == 2 * cores


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_without_work_fill_the_next_shard(threads, tmp_path, monkeypatch):
    """Shards of one tensor each wait here until so many are filled at once; never are more."""
    together, inside, most = threading.Barrier(threads, timeout=WAIT_SECONDS), [], []
    advance = Making.advance

    def advance_together(making, stop, is_first_pass=False):
        if is_first_pass:
            advance(making, stop, is_first_pass)
            return
        inside.append(making)
        most.append(len(inside))
        together.wait()
        advance(making, stop)
        inside.remove(making)

    monkeypatch.setattr(Making, "advance", advance_together)
    source = several_shards(tmp_path / "m", 6)
    assert quantize(source, tmp_path / "out", "--workers", threads).code == 0
    assert max(most) == threads


def test_after_an_interrupt_no_hash_is_waited_for(tmp_path, monkeypatch):
    finish, begun, ended = ShardWriter.finish, [], []

    def is_stopped(check):
        try:
            check(0)
        except OutputError:
            return True

    def finish_when_stopped(writer, check):
        begun.append(writer)
        wait_until(lambda: is_stopped(check))
        try:
            return finish(writer, check)
        except OutputError as error:
            ended.append(error.code)
            raise

    def interrupt(folder, *arguments):
        wait_until(lambda: len(begun) == 3)
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(ShardWriter, "hash_on", lambda writer, check: None)  # all of it is left
    monkeypatch.setattr(ShardWriter, "finish", finish_when_stopped)
    monkeypatch.setattr(OutputFolder, "write_copies", interrupt)
    source = several_shards(tmp_path / "m", 3)
    (source / "tokenizer.json").write_bytes(b"{}")
    with suppress(Stopped):
        assert quantize(source, tmp_path / "out").code == 130
    assert ended == ["stopped"] * 3
    assert not list((tmp_path / "out").glob("*.safetensors"))
    monkeypatch.undo()
    assert quantize(source, tmp_path / "out").code == 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_hash_of_the_last_shard_goes_along_with_its_rounding(count, tmp_path, monkeypatch):
    """Its global scales stand first: they are measured before any is rounded; any other shard is
    hashed while the next is filled.
    """
    source = several_shards(tmp_path / "m", count, each=4)
    finish, left = ShardWriter.finish, []

    def finish_and_note(writer, check):
        left.append(writer._nbytes - writer._hashed_nbytes)
        return finish(writer, check)

    monkeypatch.setattr(ShardWriter, "finish", finish_and_note)
    append, order = ShardWriter.append, []

    def append_and_note(writer, ref, data):
        order.append((ref.file, ref.name.rpartition(".")[2]))
        append(writer, ref, data)

    monkeypatch.setattr(ShardWriter, "append", append_and_note)
    assert quantize(source, tmp_path / "out", "--workers", 1).code == 0
    assert left == [0] * count
    for number in range(count):
        parts = [part for file, part in order if file == f"model-{number}.safetensors"]
        scalars = 4 if number == count - 1 else 1
        assert parts[: scalars + 1] == ["weight_global_scale"] * scalars + ["weight_packed"]


def test_no_measurement_goes_on_when_a_shard_is_begun_again(tmp_path, monkeypatch):
    """What comes damaged is read again: no thread may add to the shard from before."""
    source = several_shards(tmp_path / "m", 2, each=4)
    expected = quantize(source, tmp_path / "expected").json["digest"]
    advance, begun = Making.advance, []

    def fail_first(making, stop, is_first_pass=False):
        if not is_first_pass:
            advance(making, stop)
            return
        begun.append(making)
        if len(begun) == 1:
            wait_until(lambda: len(begun) >= 2)
            raise SourceError(CORRUPT, "a group came damaged")
        if len(begun) == 2:
            threading.Event().wait(0.2)  # until the shard would have been begun again
        advance(making, stop, is_first_pass)

    monkeypatch.setattr(Making, "advance", fail_first)
    found = quantize(source, tmp_path / "out", "--workers", 2)
    assert (found.code, found.json.get("digest")) == (0, expected)
    assert 6 <= len(begun) <= 8


def test_an_interrupt_ends_the_wait_for_shards_that_are_begun_when_another_failed(
    tmp_path, monkeypatch
):
    """One shard fails, the other works until it is told to stop."""
    begun, told = threading.Event(), []

    def fail_or_work(making, stop, is_first_pass=False):
        if making.work.steps[0].outputs[0].file == "model-0.safetensors":
            begun.set()
            told.append(stop.wait(WAIT_SECONDS))
            return
        assert begun.wait(WAIT_SECONDS)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        raise OutputError("disk-full", "no room for a shard")

    def interrupt(number, frame):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(Making, "advance", fail_or_work)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with suppress(Stopped):
            code = quantize(
                several_shards(tmp_path / "m", 2), tmp_path / "out", "--workers", 2
            ).code
            assert code == 130
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [True]


class _Lanes:
    """A maker that holds one of two lanes while its parts are appended."""

    pauses = False

    def __init__(self, name: str, lanes: threading.Semaphore) -> None:
        self._name, self._lanes = name, lanes

    def parts(self, tools):
        with self._lanes:
            for _ in range(4):
                yield self._name, memoryview(b"\0" * 16)
        return ()


def crew_of(threads: int) -> Crew:
    source = SimpleNamespace(is_streamed=False, stop=lambda: None)
    backend = SimpleNamespace(threads=threads)
    tools = SimpleNamespace(source=source, backend=backend, threads=0)
    return Crew(tools, settings.Settings(workers=threads))


@pytest.mark.timeout(60)
def test_a_write_that_fails_ends_the_run_though_makers_wait_for_lanes():
    """The makers that failed gave their lanes to those that all wait for."""
    lanes = threading.Semaphore(2)
    refs = [TensorRef(f"t{n}", "U8", (64,), "s", 64 * n) for n in range(12)]
    works = [
        MakerSteps(_Lanes(ref.name, lanes), (SimpleNamespace(refs=(), outputs=(ref,)),))
        for ref in refs
    ]

    def fail(ref, data):
        raise OutputError("disk-full", "no space left")

    shard = SimpleNamespace(append=fail, hash_on=lambda check: None)
    writer = SimpleNamespace(shards={"s": shard}, hash_on=lambda check: None)
    crew = crew_of(4)
    task = SimpleNamespace(key="s")
    with pytest.raises(OutputError, match="no space left"):
        crew.write([task], lambda task: crew.fill(works, writer))
    assert lanes._value == 2


@pytest.mark.timeout(60)
def test_a_task_without_makers_lets_the_next_begin():
    crew, written = crew_of(1), []
    crew.write([SimpleNamespace(key=str(n)) for n in range(6)], written.append)
    assert len(written) == 6


@pytest.mark.timeout(60)
def test_a_thread_that_cannot_start_ends_the_run(monkeypatch):
    def refuse(pool, *arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    crew = crew_of(1)
    with pytest.raises(RuntimeError, match="new thread"):
        crew.write([SimpleNamespace(key="s")], lambda task: None)
