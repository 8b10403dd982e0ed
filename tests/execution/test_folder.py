"""The output folder: whose it is, what a second run does in it, and what a full or forbidden disk
leaves behind.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import (
    FIRST,
    INDEX,
    SECOND,
    WAIT_SECONDS,
    llama_shards,
    run,
    start,
    unless_given,
    wait_until,
    write_checkpoint,
    write_llama,
    write_zeros,
)

from fp4convert.errors import OutputError
from fp4convert.execution import finish, output_check
from fp4convert.execution.folder import OutputFolder
from fp4convert.storage.safetensors import SafetensorsFrame
from fp4convert.storage.shard_writer import ShardWriter

STATE = ".fp4convert"
RECORDS = ("config.json", INDEX, "quantization_config.json")


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


def quantize(source: Path, out: Path, *options: object):
    return run("quantize", source, "-o", out, "--json", *unless_given(options, "--format", "nvfp4"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the state of the conversion."""
    files = (path for path in folder.rglob("*") if path.is_file() and STATE not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.glob("*.safetensors")
    }


def refusal(outcome, code: str) -> dict:
    error = outcome.json["error"]
    assert (outcome.code, error["exit"], error["code"]) == (5, 5, code), outcome
    return error


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_a_foreign_folder_is_refused_and_untouched(options, source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_bytes(b"years of work")
    error = refusal(quantize(source, out, *options), "foreign-output")
    assert str(out) in error["message"]
    assert "thesis.txt" in error["message"]
    assert ("--force discards only" in error["next"]) == bool(options)
    assert {path.name for path in out.iterdir()} == {"thesis.txt"}
    assert (out / "thesis.txt").read_bytes() == b"years of work"


@pytest.mark.parametrize("options", [(), ("--force",)])
@pytest.mark.parametrize("place", [".", "out", "deep/down/out", "../source/out"])
def test_an_output_in_the_source_is_refused_and_the_source_untouched(place, options, source):
    before = contents(source)
    outcome = quantize(source, source / place, *options)
    error = outcome.json["error"]
    assert (outcome.code, error["exit"], error["code"]) == (2, 2, "output-in-source")
    assert contents(source) == before
    assert not list(source.rglob(STATE))


def test_an_output_in_the_source_is_refused_through_a_link(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    assert quantize(source, tmp_path / "link" / "out").json["error"]["code"] == "output-in-source"
    assert quantize(tmp_path / "link", source / "out").json["error"]["code"] == "output-in-source"


def test_a_link_that_is_planted_while_a_run_works_gets_nothing(source, tmp_path, monkeypatch):
    out, theirs, real = tmp_path / "out", tmp_path / "theirs", OutputFolder.write_temp
    theirs.mkdir()

    def planted(folder, name, blocks):
        done = folder.state / "done"
        if done.is_dir() and not done.is_symlink():
            shutil.rmtree(done)
            done.symlink_to(theirs)
        return real(folder, name, blocks)

    monkeypatch.setattr(OutputFolder, "write_temp", planted)
    assert quantize(source, out).code == 5
    assert list(theirs.iterdir()) == []


def test_an_empty_folder_is_taken(source, tmp_path):
    (tmp_path / "out").mkdir()
    assert quantize(source, tmp_path / "out").code == 0


def test_a_file_is_no_folder(source, tmp_path):
    (tmp_path / "out").write_bytes(b"x")
    refusal(quantize(source, tmp_path / "out"), "foreign-output")
    assert (tmp_path / "out").read_bytes() == b"x"


def test_a_second_run_does_nothing_and_gives_the_same_digest(source, tmp_path):
    out = tmp_path / "out"
    first = quantize(source, out)
    before, untouched = contents(out), stamps(out)
    second = quantize(source, out)
    assert (first.code, second.code) == (0, 0)
    assert first.json["digest"] == second.json["digest"]
    assert contents(out) == before
    assert stamps(out) == untouched


@pytest.mark.parametrize("harm", ["deleted", "flipped", "shortened", "lengthened", "emptied"])
def test_a_harmed_shard_is_done_again_and_the_other_is_not(harm, source, tmp_path):
    out = tmp_path / "out"
    first = quantize(source, out)
    before, untouched = contents(out), stamps(out)
    data = before[SECOND]
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    harmed = {
        "flipped": flipped,
        "shortened": data[:-1],
        "lengthened": data + b"\0",
        "emptied": b"",
    }
    (out / SECOND).unlink()
    if harm in harmed:
        (out / SECOND).write_bytes(harmed[harm])
    assert quantize(source, out).json["digest"] == first.json["digest"]
    assert contents(out) == before
    assert stamps(out)[FIRST] == untouched[FIRST]


@pytest.mark.parametrize("file", [*RECORDS, "tokenizer.json"])
def test_a_missing_or_changed_small_file_is_written_again(file, source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out)
    before = contents(out)
    (out / file).write_bytes(b"{}changed")
    outcome = quantize(source, out)
    assert f"changed since, and written again: {file}" in outcome.err
    assert contents(out) == before
    (out / file).unlink()
    quantize(source, out)
    assert contents(out) == before


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "mxfp4"),
        ("--dialect", "modelopt"),
        ("--exclude", "*.o_proj"),
        ("--recipe", "default"),  # the record alone differs
    ],
)
def test_a_finished_artifact_gives_way_to_another_plan_only_by_force(options, source, tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    quantize(source, out)
    before = contents(out)
    error = refusal(quantize(source, out, *options), "other-plan")
    assert "--force" in error["next"]
    assert contents(out) == before
    (out / "notes.txt").write_bytes(b"mine")
    (out / "mine").mkdir()
    (out / "mine" / "model.safetensors").write_bytes(b"mine too")
    forced, clean = quantize(source, out, *options, "--force"), quantize(source, fresh, *options)
    assert (forced.code, forced.json["digest"]) == (0, clean.json["digest"])
    expected = {**contents(fresh), "notes.txt": b"mine", "mine/model.safetensors": b"mine too"}
    assert contents(out) == expected


def test_force_removes_nothing_before_there_is_room(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    quantize(source, out)
    before = contents(out)
    monkeypatch.setattr("fp4convert.execution.output_check.free_nbytes", lambda place: -(1 << 40))
    refusal(quantize(source, out, "--format", "mxfp4", "--force"), "disk-full")
    assert contents(out) == before


def test_force_reads_what_is_sealed_and_makes_it_again(source, tmp_path, monkeypatch):
    """Bytes that a disk loses below a file change no time of it."""
    out = tmp_path / "out"
    quantize(source, out)
    before = contents(out)
    monkeypatch.setattr(
        "fp4convert.execution.finish.is_sealed", lambda path, sha256, seal: seal is not None
    )
    shard = out / next(name for name in before if name.endswith(".safetensors"))
    shard.write_bytes(before[shard.name][:-1] + b"?")
    assert quantize(source, out).code == 0
    assert contents(out) != before
    assert quantize(source, out, "--force").code == 0
    assert contents(out) == before


def test_a_small_file_that_cannot_be_read_is_written_again(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    quantize(source, out)
    before = contents(out)
    hash_each = finish.hash_each

    def failing(files, open_file, *each):
        def opened(file):
            if Path(file).name == "tokenizer.json":
                raise OSError(errno.EIO, "Input/output error")
            return open_file(file)

        return hash_each(files, opened, *each)

    monkeypatch.setattr(finish, "hash_each", failing)
    assert quantize(source, out).code == 0
    assert contents(out) == before


def test_force_and_join_are_not_for_each_other(source, tmp_path):
    outcome = quantize(source, tmp_path / "out", "--join", "--force")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "idle-option")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "mxfp4"), "its format is nvfp4, not mxfp4"),
        (("--dialect", "modelopt"), "its dialect is compressed-tensors, not modelopt"),
        (
            ("--format", "mxfp4", "--dialect", "quark"),
            "its format is nvfp4, not mxfp4 and its dialect is compressed-tensors, not quark",
        ),
    ],
)
def test_another_plan_is_told_by_what_differs(options, words, source, tmp_path):
    quantize(source, tmp_path / "out")
    error = refusal(quantize(source, tmp_path / "out", *options), "other-plan")
    assert error["message"].endswith(f"holds another plan: {words}")


def test_another_dtype_is_another_plan_by_its_name(source, tmp_path):
    quantize(source, tmp_path / "q")
    command = ("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--json")
    assert run(*command, "--dtype", "fp16").code == 0
    error = run(*command, "--dtype", "bf16").json["error"]
    assert error["message"].endswith("holds another plan: its format is fp16, not bf16")


def test_a_run_that_goes_on_tells_how_many_shards_it_found(source, tmp_path):
    out = tmp_path / "out"
    told = "1 of 2 shards are there already"
    command = ("quantize", source, "--format", "nvfp4", "-o", out)
    assert told not in run(*command).err
    (out / FIRST).unlink()
    assert told in run(*command).err
    again = run(*command)
    assert told not in again.err
    assert "  already there: nothing to do\n" in again.out


def test_another_source_is_another_plan(source, tmp_path):
    other = write_checkpoint(tmp_path / "other", {"model.safetensors": llama_shards()[SECOND]})
    out = tmp_path / "out"
    quantize(source, out)
    error = refusal(quantize(other, out), "other-plan")
    assert error["message"].endswith("holds another plan: another source")
    assert quantize(other, out, "--force").code == 0
    assert not (out / FIRST).exists()
    assert not (out / INDEX).exists()


def test_what_modelopt_alone_writes_goes_when_it_is_replaced(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out, "--dialect", "modelopt")
    assert (out / "hf_quant_config.json").exists()
    quantize(source, out, "--force")
    assert not (out / "hf_quant_config.json").exists()


@pytest.mark.parametrize("victim", ["../victim", "{tmp}/victim"])
def test_force_removes_nothing_outside_the_folder_whatever_its_plan_says(victim, source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out)
    (tmp_path / "victim").write_bytes(b"mine")
    plan = json.loads((out / STATE / "plan.json").read_text())
    plan["texts"][victim.format(tmp=tmp_path)] = ""
    del plan["sha256"]  # whoever made this plan knew how
    plan["sha256"] = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
    (out / STATE / "plan.json").write_text(json.dumps(plan))
    quantize(source, out, "--format", "mxfp4", "--force")
    assert (tmp_path / "victim").read_bytes() == b"mine"


def test_a_damaged_plan_is_not_guessed_at(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out)
    (out / STATE / "plan.json").write_bytes(b"{")
    before = contents(out)
    refusal(quantize(source, out), "other-plan")
    assert contents(out) == before


@pytest.mark.parametrize("removed", ["quantization_config.json", "all but the plan"])
def test_an_unfinished_folder_is_found_and_continued(removed, source, tmp_path):
    out = tmp_path / "out"
    first = quantize(source, out)
    if removed == "all but the plan":
        plan = (out / STATE / "plan.json").read_bytes()
        shutil.rmtree(out)
        (out / STATE).mkdir(parents=True)
        (out / STATE / "plan.json").write_bytes(plan)
    else:
        (out / removed).unlink()
    inspected = run("inspect", out, "--json")
    assert inspected.code == 6
    assert ("error", "unfinished") in [
        (found["level"], found["code"]) for found in inspected.json["findings"]
    ]
    assert inspected.json["healthy"] is False
    assert quantize(source, out).json["digest"] == first.json["digest"]
    assert run("inspect", out).code == 0


def test_a_changed_recipe_takes_over_an_unfinished_folder_and_its_finished_shards(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out)
    (out / "quantization_config.json").unlink()
    untouched = stamps(out)[FIRST]
    outcome = quantize(source, out, "--exclude", "*.o_proj")
    assert outcome.code == 0
    assert stamps(out)[FIRST] == untouched
    assert (
        outcome.json["digest"]
        == quantize(source, tmp_path / "fresh", "--exclude", "*.o_proj").json["digest"]
    )


@pytest.mark.slow
def test_while_a_run_writes_no_other_plan_takes_its_folder(tmp_path):
    source, out = write_zeros(tmp_path / "source"), tmp_path / "out"
    with start(
        "quantize", source, "--format", "nvfp4", "-o", out, "--workers", "1", "--json"
    ) as first:
        wait_until((out / "part-1.safetensors").exists, first)  # one that begins is waited for
        first.send_signal(signal.SIGSTOP)
        try:
            for options in (
                ("--exclude", "*.1.*"),
                ("--exclude", "*.1.*", "--force"),
                ("--format", "mxfp4", "--force"),
            ):
                assert (
                    str(first.pid) in refusal(quantize(source, out, *options), "locked")["message"]
                )
        finally:
            first.send_signal(signal.SIGCONT)
        text, _ = first.communicate(timeout=WAIT_SECONDS)
    assert first.returncode == 0
    assert json.loads(text)["digest"] == quantize(source, out).json["digest"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_partial_file_and_continues(number, code, tmp_path):
    source, out = write_zeros(tmp_path / "source"), tmp_path / "out"
    with start("quantize", source, "--format", "nvfp4", "-o", out, "--workers", "1") as process:
        wait_until((out / "part-1.safetensors").exists, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code
    assert len(list(out.glob("part-*"))) < 8
    assert "Traceback" not in err
    assert not list((out / STATE / "tmp").iterdir())
    assert not (out / "quantization_config.json").exists()
    untouched = stamps(out)["part-0.safetensors"]
    again = quantize(source, out)
    assert again.code == 0
    assert stamps(out)["part-0.safetensors"] == untouched


@pytest.mark.slow
def test_a_killed_run_is_continued(tmp_path):
    source, out = write_zeros(tmp_path / "source"), tmp_path / "out"
    with start("quantize", source, "--format", "nvfp4", "-o", out, "--workers", "1") as process:
        wait_until((out / "part-1.safetensors").exists, process)
        process.kill()
        process.wait()
    untouched = stamps(out)["part-0.safetensors"]
    again = quantize(source, out)
    assert again.json["digest"] == quantize(source, tmp_path / "fresh").json["digest"]
    assert stamps(out)["part-0.safetensors"] == untouched
    assert not list((out / STATE / "tmp").iterdir())


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from fp4convert.__main__ import main
main()
"""


@pytest.mark.parametrize("limit", [300, 4000, 25000])
def test_a_disk_that_fills_up_is_told_and_leaves_nothing_of_ours_half_done(limit, source, tmp_path):
    """A limit on the size of a file stands for the disk: the first refuses the plan, the second a
    shard, the third the other.
    """
    out = tmp_path / "out"
    command = (
        sys.executable,
        "-c",
        LIMITED,
        str(limit),
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        out,
        "--json",
    )
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    error = json.loads(ended.stdout)["error"]
    assert (ended.returncode, error["exit"], error["code"]) == (5, 5, "disk-full")
    assert str(out) in error["message"]
    assert not list((out / STATE / "tmp").glob("*"))
    assert not (out / "quantization_config.json").exists()
    assert (
        quantize(source, out).json["digest"] == quantize(source, tmp_path / "fresh").json["digest"]
    )


def test_a_disk_too_small_is_known_before_the_first_byte(source, tmp_path, monkeypatch):
    real = os.statvfs

    def tiny(path):
        found = real(path)
        return os.statvfs_result((found.f_bsize, 1, 4, 4, 4, *found[5:]))

    monkeypatch.setattr(os, "statvfs", tiny)
    error = refusal(quantize(source, tmp_path / "out"), "disk-full")
    assert str(tmp_path / "out") in error["message"]
    assert "needs" in error["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file/out", "file/deeper/out", "x" * 300])
def test_a_place_that_cannot_be_written_is_told(place, source, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    error = refusal(quantize(source, tmp_path / place), "cannot-write")
    assert str(tmp_path / place) in error["message"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    error = refusal(quantize(source, tmp_path / "locked" / "out"), "cannot-write")
    assert str(tmp_path / "locked") in error["message"]


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EINVAL, 0), (errno.EOPNOTSUPP, 0), (errno.EIO, 5)]
)
def test_a_file_system_without_fsync_of_folders_will_do(
    code, expected, source, tmp_path, monkeypatch
):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert quantize(source, tmp_path / "out").code == expected


def test_the_state_says_what_a_finished_shard_is(source, tmp_path):
    out = tmp_path / "out"
    quantize(source, out)
    done = [json.loads(path.read_text()) for path in (out / STATE / "done").iterdir()]
    hashes = {
        file: hashlib.sha256((out / file).read_bytes()).hexdigest() for file in (FIRST, SECOND)
    }
    hashes["tokenizer.json"] = hashlib.sha256(b"{}").hexdigest()
    found = {file: sha256 for entry in done for file, sha256 in entry["files"].items()}
    assert (len(done), found) == (3, hashes)


def test_small_files_are_copied_while_the_last_shard_is_hashed(source, tmp_path, monkeypatch):
    """The last hash waits for the copies here; threads that record at once share no file."""
    finish, copy, temp = ShardWriter.finish, OutputFolder.write_copies, OutputFolder.write_temp
    copied, on_their_way = threading.Event(), {}

    def finish_late(writer, check):
        assert writer.path.name != SECOND or copied.wait(WAIT_SECONDS)
        return finish(writer, check)

    def copy_and_tell(folder, *arguments):
        copy(folder, *arguments)
        copied.set()

    def write_and_note(folder, name, fill):
        on_their_way.setdefault(threading.current_thread(), set()).add(name)
        return temp(folder, name, fill)

    monkeypatch.setattr(ShardWriter, "finish", finish_late)
    monkeypatch.setattr(OutputFolder, "write_copies", copy_and_tell)
    monkeypatch.setattr(OutputFolder, "write_temp", write_and_note)
    assert quantize(source, tmp_path / "out").code == 0
    assert len(on_their_way) >= 2
    assert len(set.union(*on_their_way.values())) == sum(map(len, on_their_way.values()))


def test_a_copy_that_fails_leaves_the_last_shard_finished(source, tmp_path, monkeypatch):
    def fail(folder, *arguments):
        raise OutputError("disk-full", "no room for copies")

    monkeypatch.setattr(OutputFolder, "write_copies", fail)
    refusal(quantize(source, tmp_path / "out"), "disk-full")
    monkeypatch.undo()
    untouched = stamps(tmp_path / "out")
    assert untouched.keys() == {FIRST, SECOND}
    assert quantize(source, tmp_path / "out").json["adopted_bytes"] > 0
    assert stamps(tmp_path / "out") == untouched


def test_a_header_that_a_second_reader_finds_otherwise_ends_the_run_without_a_record(
    source, tmp_path, monkeypatch
):
    """A mistake of ours: it names the shard, and no shard of it gets its name."""
    right = SafetensorsFrame.lay_out

    def mistaken(self, file, specs, notes):
        head, refs = right(self, file, specs, notes)
        return head.replace(b'"U8"', b'"I8"'), refs

    monkeypatch.setattr(SafetensorsFrame, "lay_out", mistaken)
    with pytest.raises(RuntimeError, match=r"safetensors holds .* as I8 .* by the package"):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out" / FIRST).exists()
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    monkeypatch.undo()
    assert quantize(source, tmp_path / "out").code == 0


def test_a_disk_that_fails_while_a_folder_is_judged_is_named(source, tmp_path, monkeypatch):
    """It fails after the first look at plan.json."""
    judge, exists, judged = output_check.refuse_taken, Path.exists, []

    def fail(path: Path) -> bool:
        if path.name == "plan.json" and judged:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", fail)
    monkeypatch.setattr(output_check, "refuse_taken", lambda *a: judged.append(judge(*a)))
    words = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "new", "--dry-run", "--json")
    failed = run(*words)
    assert judged
    assert (failed.code, failed.json["error"]["code"]) == (5, "cannot-write")
