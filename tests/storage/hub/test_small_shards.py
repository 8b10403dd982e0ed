"""A shard of a megabyte or less is fetched whole, once, and checked by its hash at once."""

import json
import re

import numpy as np
import pytest
from checkpoints import FIRST, SECOND, run, write_llama
from hub_cases import NVFP4, ask, expect
from safetensors.numpy import save_file

from fp4convert.storage.hub import prefetch, source
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access

MANY = 1000
INDEX = "model.safetensors.index.json"
VECTOR = np.ones(64, np.float32)
WHOLE_NBYTES = 1 << 20


@pytest.fixture
def folder(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(source, "WHOLE_NBYTES", WHOLE_NBYTES)
    folder = write_llama(tmp_path / "m")
    hub.add("org/m", folder)
    return folder


def shards_seen(hub) -> list[tuple[str, str | None]]:
    """Method and range of every request for a shard."""
    return sorted(
        (seen.method, seen.range) for seen in hub.seen if re.search(r"safetensors(\?|$)", seen.path)
    )


def whole(folder, *files: str) -> list[tuple[str, str | None]]:
    ranges = [f"bytes=0-{(folder / file).stat().st_size - 1}" for file in files]
    return sorted([*(("GET", asked) for asked in ranges), *[("HEAD", None)] * len(files)])


def test_a_small_shard_is_one_request(hub, folder, tmp_path):
    """Its header, what the other shard measures of it, and its weights."""
    (folder / "model.safetensors.index.json").unlink()
    hub.add("org/m", folder)
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert shards_seen(hub) == whole(folder, FIRST, SECOND)


@pytest.mark.parametrize("at", [9, 50_000])
@pytest.mark.parametrize("times", [1, 3])
def test_damage_is_found_at_once_and_fetched_again(times, at, hub, folder, tmp_path):
    """In the header or the weights, whoever asks: inspect has hashed it, too."""
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("flip", match=SECOND, at=at, times=times)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    hub.fault("flip", match=SECOND, at=at, times=times)
    local = open_source(str(folder)).checkpoint
    assert open_source("org/m").checkpoint.shards == local.shards
    assert not any(fault.times for fault in hub.faults)


def test_damage_that_stays_is_exit_3_and_the_next_run_completes(hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("flip", match=SECOND, at=9, times=MANY)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert f"{SECOND} came damaged: its hash is" in outcome.json["error"]["message"]
    hub.faults.clear()
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected


@pytest.mark.parametrize("after", range(0, 12, 3))
def test_damage_to_what_is_fetched_again_is_found_too(after, hub, folder, tmp_path, monkeypatch):
    """Without memory a shard goes when it was measured, and comes again to be rounded."""
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 1)
    expected = expect(hub, folder, tmp_path / "a")
    fault = hub.fault("flip", match=SECOND, at=50_000, after=after)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b", "--memory", "0")
    assert outcome.json["digest"] == expected
    if not after:
        assert fault.times == 0


def test_ranges_are_those_of_the_shard(hub, folder):
    remote, local = open_source("org/m", Access(connections=1)), open_source(str(folder))
    for ref in local.checkpoint.tensors:
        assert remote.read(ref) == local.read(ref)
        assert remote.read_range(ref, 3, 17) == local.read_range(ref, 3, 17)
    assert shards_seen(hub) == whole(folder, FIRST, SECOND)


def test_inspect_and_verify_tell_the_same(hub, folder, tmp_path):
    assert run("quantize", folder, *NVFP4, "-o", tmp_path / "q").code == 0
    hub.add("org/q", tmp_path / "q")
    for command in (("inspect", "org/q"), ("verify", "org/q", "--source", "org/m")):
        hub.fault("flip", match=r"safetensors\?", at=2)
        names = {"org/q": tmp_path / "q", "org/m": folder}
        expected = run(*(names.get(word, word) for word in command), "--json").json
        assert ask(*command, "--json").json == expected


def test_one_byte_more_is_a_large_shard(hub, folder, monkeypatch):
    nbytes = (folder / SECOND).stat().st_size
    monkeypatch.setattr(source, "WHOLE_NBYTES", nbytes - 1)
    open_source("org/m")
    asked = [("GET", "bytes=0-32767"), ("GET", "bytes=0-32767"), ("HEAD", None)]
    assert shards_seen(hub) == sorted(asked + whole(folder, FIRST))


def test_a_long_header_comes_by_one_request(hub, folder, monkeypatch):
    """The index tells how long it is, about; two requests have to agree on it."""
    monkeypatch.setattr(source, "WHOLE_NBYTES", 0)
    index = json.loads((folder / INDEX).read_text())
    vectors = {f"model.layers.{at}.post_attention_layernorm.weight": VECTOR for at in range(MANY)}
    save_file(vectors, folder / SECOND)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f == FIRST}
    index["weight_map"] |= dict.fromkeys(vectors, SECOND)
    (folder / INDEX).write_text(json.dumps(index))
    hub.add("org/m", folder)
    open_source("org/m")
    ranges = [seen.range for seen in hub.seen if SECOND in seen.path and seen.method == "GET"]
    assert ranges == [ranges[0]] * 2
    header_nbytes = 8 + int.from_bytes((folder / SECOND).read_bytes()[:8], "little")
    assert 64 << 10 < header_nbytes <= int(ranges[0].partition("-")[2]) + 1


def test_an_empty_shard_is_refused(hub, folder):
    (folder / SECOND).write_bytes(b"")
    hub.add("org/m", folder)
    refused = run("inspect", "org/m", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "header-length")
