"""Several processes in one output folder, or each in its own: the work is split, and the bytes are
those of one.
"""

import json
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import (
    FIRST,
    SECOND,
    WAIT_SECONDS,
    bf16,
    run,
    start,
    weight,
    write_checkpoint,
    write_llama,
    write_zeros,
)

from fp4convert.execution.folder import entered
from fp4convert.execution.plan_file import Done, read_manifest

STATE = ".fp4convert"
NVFP4 = ("--format", "nvfp4", "--json", "-q")


def quantize(source: Path, out: Path, *options: object):
    return run("quantize", source, *NVFP4, "-o", out, *options)


def claimed_tasks(out: Path) -> list[str]:
    """What the claims of tasks say."""
    texts = []
    for path in (out / STATE / "claims").glob("?" * 64):
        with suppress(FileNotFoundError):
            texts.append(path.read_text())
    return texts


def finish(process) -> dict:
    text, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(text)


@pytest.fixture
def layers(tmp_path) -> Path:
    """Twelve shards, and scale groups that cross from each to the next."""
    shards = {}
    for number in range(12):
        up, gate = (
            f"layers.{number}.mlp.up_proj.weight",
            f"layers.{number + 1}.mlp.gate_proj.weight",
        )
        own = {
            name: ("BF16", (512, 1024), bf16(512, 1024, seed=2 * number + k))
            for k, name in enumerate((up, gate))
        }
        shards[f"model-{number:02}.safetensors"] = own
    return write_checkpoint(tmp_path / "layers", shards, **{"tokenizer.json": b"{}"})


@pytest.mark.slow
def test_the_same_command_at_once_gives_the_bytes_of_one(tmp_path):
    source, out = write_zeros(tmp_path / "source", count=24), tmp_path / "out"
    processes = [start("quantize", source, *NVFP4, "-o", out, "--workers", "1") for _ in range(2)]
    digests = {finish(process)["digest"] for process in processes}
    assert digests == {quantize(source, tmp_path / "alone").json["digest"]}
    assert list((out / STATE / "claims").iterdir()) == []
    assert list((out / STATE / "tmp").iterdir()) == []


@pytest.mark.slow
def test_both_write_some_of_the_shards(tmp_path):
    """Each is stopped while the other works, so that neither can do everything."""
    source, out = write_zeros(tmp_path / "source", count=24), tmp_path / "out"
    first = start("quantize", source, *NVFP4, "-o", out, "--workers", "1", "--join")
    while len(list(out.glob("part-*"))) < 3:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    alone = len(list(out.glob("part-*")))
    second = start("quantize", source, *NVFP4, "-o", out, "--workers", "1", "--join")
    while len(list(out.glob("part-*"))) < alone + 5:
        time.sleep(0.01)
        assert second.poll() is None
    first.send_signal(signal.SIGCONT)
    assert (
        finish(first)["digest"]
        == finish(second)["digest"]
        == quantize(source, tmp_path / "alone").json["digest"]
    )


@pytest.mark.slow
def test_of_three_one_dies_and_the_others_do_its_work(tmp_path):
    source, out = write_zeros(tmp_path / "source", count=30), tmp_path / "out"
    expected = quantize(source, tmp_path / "alone").json["digest"]
    processes = [
        start("quantize", source, *NVFP4, "-o", out, "--workers", "1", "--join") for _ in range(3)
    ]
    while not any(f'"process": {processes[1].pid}' in text for text in claimed_tasks(out)):
        time.sleep(0.001)
        assert processes[1].poll() is None
    processes[1].kill()
    processes[1].communicate()
    assert {finish(process)["digest"] for process in (processes[0], processes[2])} == {expected}
    assert list((out / STATE / "claims").iterdir()) == []
    assert list((out / STATE / "tmp").iterdir()) == []


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [2, 5, 40])
def test_parts_are_merged_to_the_bytes_of_one_run(count, layers, tmp_path):
    """In one folder, and each in its own folder, copied together afterwards."""
    expected = quantize(layers, tmp_path / "alone").json
    together = tmp_path / "together"
    for index in range(count):
        own = tmp_path / f"own-{index}"
        for out in (tmp_path / "shared", own):
            part = quantize(layers, out, "--shard-index", index, "--num-shards", count).json
            assert (part["digest"], part["share"]["index"], part["share"]["of"]) == (
                None,
                index,
                count,
            )
            assert not (out / "quantization_config.json").exists()
        shutil.copytree(own, together, dirs_exist_ok=True)
    for out in (tmp_path / "shared", together):
        merged = run("merge", out, "--json").json
        assert (merged["digest"], merged["output_bytes"]) == (
            expected["digest"],
            expected["output_bytes"],
        )
        assert run("inspect", out).code == 0
        assert quantize(layers, out).json["digest"] == expected["digest"]


def test_a_part_does_its_own_shards_alone(layers, tmp_path):
    part = quantize(layers, tmp_path / "out", "--shard-index", 1, "--num-shards", 5).json
    written = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert written == [f"model-{number:02}.safetensors" for number in (1, 6, 11)]
    assert part["share"] == {"index": 1, "of": 5, "shards": 3}
    assert part["tensors"] == {"quantized": 6, "copied": 0, "skipped": 0}
    assert part["source_bytes"] == sum((layers / file).stat().st_size for file in written)
    assert part["output_bytes"] == sum((tmp_path / "out" / file).stat().st_size for file in written)


def test_a_part_that_finds_nothing_to_do_says_so(layers, tmp_path):
    for _ in range(2):  # the second finds its shard there already
        drawn = run(
            "quantize",
            layers,
            "--format",
            "nvfp4",
            "-o",
            tmp_path / "out",
            "--shard-index",
            1,
            "--num-shards",
            12,
        )
    assert drawn.out.splitlines() == [
        str(tmp_path / "out"),
        "  nvfp4, dialect compressed-tensors, rule mse",
        "  0 tensors quantized, 0 kept, 0 skipped",
        "  0.00 kB -> 0.00 kB",
        f"  in {drawn.out.splitlines()[4].split()[1]} s on cpu",
        "  part 1 of 12, shards written: 0. When every part is done:",
        f"  fp4convert merge {tmp_path / 'out'}",
    ]


def test_merge_tells_what_is_missing_and_changes_nothing(layers, tmp_path):
    out = tmp_path / "out"
    quantize(layers, out, "--shard-index", 0, "--num-shards", 2)
    before = sorted(out.iterdir())
    error = run("merge", out, "--json")
    assert (error.code, error.json["error"]["code"]) == (5, "unfinished")
    assert "6 of" in error.json["error"]["message"]
    assert "model-01.safetensors" in error.json["error"]["message"]
    assert sorted(out.iterdir()) == before


@pytest.mark.parametrize("make", ["nothing", "file", "foreign", "source"])
def test_merge_refuses_what_is_no_output(make, layers, tmp_path):
    place = layers if make == "source" else tmp_path / "place"
    if make == "file":
        place.write_bytes(b"x")
    elif make == "foreign":
        place.mkdir()
        (place / "thesis.txt").write_bytes(b"x")
    outcome = run("merge", place, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-plan")
    assert not (place / STATE).exists()


def test_merge_finds_a_byte_that_changed(layers, tmp_path):
    out = tmp_path / "out"
    expected = quantize(layers, out).json["digest"]
    shard = out / "model-03.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    outcome = run("merge", out, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "damaged")
    assert "model-03.safetensors" in outcome.json["error"]["message"]
    assert quantize(layers, out).json["digest"] == expected
    assert run("merge", out, "--json").json["digest"] == expected


def test_scale_groups_are_compared_across_shards(layers, tmp_path):
    """A shard that was converted under another global scale, as a damaged reading of its neighbour
    would make it.
    """
    out = tmp_path / "out"
    expected = quantize(layers, out).json["digest"]
    records = [path for path in (out / STATE / "done").iterdir() if "model-03" in path.read_text()]
    entry = json.loads(records[0].read_text())
    assert len(entry["global_scales"]) == 2
    group = sorted(entry["global_scales"])[0]
    entry["global_scales"][group] *= 2
    records[0].write_text(json.dumps(entry))
    outcome = run("merge", out, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "scale-group")
    assert group in outcome.json["error"]["message"]
    assert "model-03.safetensors" in outcome.json["error"]["message"]
    assert quantize(layers, out).json["digest"] == expected
    assert run("merge", out).code == 0


def test_one_that_joins_never_replaces_a_plan(tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    quantize(source, out)
    (out / "quantization_config.json").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for options in (("--exclude", "*.o_proj"), ("--dialect", "modelopt")):
        outcome = quantize(source, out, "--join", *options)
        assert (outcome.code, outcome.json["error"]["code"]) == (5, "other-plan")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert quantize(source, out, "--join").code == 0


def test_ways_to_split_are_not_mixed(tmp_path):
    source = write_llama(tmp_path / "source")
    assert (
        quantize(source, tmp_path / "out", "--join", "--shard-index", 0, "--num-shards", 2).code
        == 2
    )
    assert quantize(source, tmp_path / "out", "--shard-index", 0).code == 2
    assert not (tmp_path / "out").exists()


def test_a_launchers_part_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out)
    assert "part 1 of 2, as RANK and WORLD_SIZE say (--num-shards 1 for the whole)" in outcome.err
    assert "fp4convert merge" in outcome.out
    assert [path.name for path in out.glob("*.safetensors")] == [SECOND]
    assert (
        quantize(source, out, "--num-shards", 1).json["digest"]
        == quantize(source, tmp_path / "b", "--join").json["digest"]
    )


def test_a_second_result_of_a_task_is_discarded(tmp_path):
    """Another process finished the shard while this one did: what is there stays."""
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    quantize(source, out)
    plan = read_manifest(out)
    task = next(task for task in plan.tasks if FIRST in task.files)
    before = (out / FIRST).read_bytes()
    with entered(out, plan) as folder:
        late = folder.temps / FIRST
        late.write_bytes(b"another result")
        folder.settle(task, Done({FIRST: "0" * 64}), lambda file: folder.temps / file)
    assert (out / FIRST).read_bytes() == before
    assert not late.exists()


@pytest.mark.slow
def test_killed_again_and_again_in_a_crowd(layers, tmp_path):
    """Workers come and are killed at random instants;
    the last ones find the bytes of a clean run.
    """
    expected, out = quantize(layers, tmp_path / "alone").json["digest"], tmp_path / "out"
    chance, midway = random.Random(6), 0
    for _ in range(8):
        for shard in chance.sample(
            sorted(out.glob("*.safetensors")), k=min(8, len(list(out.glob("*.safetensors"))))
        ):
            shard.unlink()
        left = len(list(out.glob("*.safetensors")))
        crowd = [
            start("quantize", layers, *NVFP4, "-o", out, "--join", "--workers", "1")
            for _ in range(2)
        ]
        while len(list(out.glob("*.safetensors"))) <= left:
            time.sleep(0.001)
        for process in crowd:
            process.kill()
            process.communicate()
            time.sleep(chance.uniform(0, 0.02))
        midway += left < len(list(out.glob("*.safetensors"))) < 12
    assert midway
    crowd = [start("quantize", layers, *NVFP4, "-o", out, "--join") for _ in range(2)]
    assert {finish(process)["digest"] for process in crowd} == {expected}
    assert list((out / STATE / "tmp").iterdir()) == []


def test_a_finished_folder_is_unfinished_while_a_shard_is_done_again(layers, tmp_path):
    out = tmp_path / "out"
    quantize(layers, out)
    (out / "model-03.safetensors").unlink()
    with entered(out, read_manifest(out)) as folder:
        (task,) = folder.take_tasks(folder.manifest.tasks)
        assert "model-03.safetensors" in task.files
        assert not (out / "quantization_config.json").exists()


def test_small_files_that_change_in_the_source_are_copied_again(tmp_path):
    source, out = write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"}), tmp_path / "out"
    quantize(source, out)
    (source / "tokenizer.json").write_bytes(b"[]")
    assert quantize(source, out).code == 0
    assert (out / "tokenizer.json").read_bytes() == b"[]"


def test_weights_that_cannot_be_are_told_by_everyone(tmp_path):
    nan = ("BF16", (32, 64), b"\xc0\x7f" * 2048)
    shards = {
        f"model-{n}.safetensors": {f"layers.{n}.o_proj.weight": nan if n == 1 else weight(n)}
        for n in range(4)
    }
    source, out = write_checkpoint(tmp_path / "source", shards), tmp_path / "out"
    crowd = [start("quantize", source, *NVFP4, "-o", out) for _ in range(2)]
    for process in crowd:
        text, _ = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, json.loads(text)["error"]["tensor"]) == (
            2,
            "layers.1.o_proj.weight",
        )
    assert len(list(out.glob("model-*.safetensors"))) == 3
