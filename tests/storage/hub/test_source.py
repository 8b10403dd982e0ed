"""A repository on the Hub gives what the same folder gives, and nothing of it lies on the disk
meanwhile.
"""

import json

import pytest
from checkpoints import FIRST, SECOND, run, weight, write_llama, write_single
from hub_cases import ALL_FILES, NVFP4, ask, cached, damage, expect

from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000, "notes.txt": b"n"})


def test_a_dry_run_tells_the_same(hub, folder):
    hub.add("org/m", folder)
    local = run("quantize", folder, *NVFP4, "--dry-run").json
    remote = ask("quantize", "org/m", *NVFP4, "--dry-run").json
    held_nbytes = remote.pop("peak_memory_bytes") - local.pop("peak_memory_bytes")
    assert held_nbytes == sum((folder / file).stat().st_size for file in (FIRST, SECOND))
    # Our record names the repository and its commit, in quotation marks where "null" was.
    named = len('"org/m"') + len('"') * 2 + 40 - 2 * len("null")
    assert remote.pop("output_bytes") - local.pop("output_bytes") == named
    # On its way the record lies in the plan, too.
    assert remote.pop("peak_disk_bytes") - local.pop("peak_disk_bytes") == 2 * named
    measured = remote.pop("seconds_estimated"), local.pop("seconds_estimated")
    assert measured[0]["reading"] == measured[1]["reading"]
    assert remote == local


def test_every_command_gives_the_same_bytes(hub, folder, tmp_path):
    hub.add("org/m", folder)
    expected = expect(hub, folder, tmp_path / "a")
    remote = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json
    assert remote["digest"] == expected
    hub.add("org/q", tmp_path / "a")
    assert ask("inspect", "org/q", "--json").json == run("inspect", tmp_path / "a", "--json").json
    measured = ask("verify", "org/q", "--source", "org/m", "--json")
    assert measured.json == run("verify", tmp_path / "a", "--source", folder, "--json").json
    for name, options in (("dequantize", ()), ("transcode", ("--dialect", "modelopt"))):
        one = run(name, tmp_path / "a", *options, "-o", tmp_path / f"{name}-a", "--json").json
        two = ask(name, "org/q", *options, "-o", tmp_path / f"{name}-b", "--json").json
        assert one["digest"] == two["digest"]


def test_nothing_of_the_source_touches_the_disk(hub, folder, tmp_path):
    hub.add("org/m", folder)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 0
    assert not (tmp_path / "cache").exists()
    assert not list((tmp_path / "q").rglob("*.incomplete"))


def test_every_byte_of_a_shard_is_fetched_once_and_twice_what_no_hash_covers(hub, folder, tmp_path):
    hub.add("org/m", folder)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 0
    shards = [seen for seen in hub.seen if ".safetensors?" in seen.path]
    nbytes = {file: (folder / file).stat().st_size for file in (FIRST, SECOND)}
    begins = [seen for seen in shards if seen.range.startswith("bytes=0-")]
    whole = [seen for seen in begins if seen.nbytes in nbytes.values()]
    measured = sum(seen.nbytes for seen in shards if seen not in begins)
    assert len(whole) == 4  # the first is so small that its header came with all of it, twice
    # q_proj and k_proj for the second shard, v_proj for the first; nothing where they are at hand,
    # since both are streamed at once.
    assert measured <= 2 * 2 * (32 + 16 + 16) * 64


def test_the_default_output_is_named_after_the_repository(hub, folder, tmp_path, monkeypatch):
    hub.add("org/m", folder)
    monkeypatch.chdir(tmp_path)
    assert ask("quantize", "org/m", *NVFP4).json["output"] == "m-NVFP4"


def test_a_revision_and_a_subfolder(hub, tmp_path):
    old = write_single(tmp_path / "r" / "deep" / "sub", {"a": weight()})
    commit = hub.add("org/m", tmp_path / "r")
    (old / "model.safetensors").unlink()
    hub.add("org/m", tmp_path / "r")
    write_single(old, {"a": weight()})
    source = open_source("org/m", Access(revision=commit, subfolder="deep/sub"))
    assert (source.checkpoint.repo, source.checkpoint.revision) == ("org/m", commit)
    assert [ref.name for ref in source.checkpoint.tensors] == ["a"]
    assert source.checkpoint.sidecars == ()
    assert source.has_file("config.json")


def test_what_is_read_is_of_the_commit_that_was_opened(hub, folder, tmp_path):
    commit = hub.add("org/m", folder)
    source = open_source("org/m")
    hub.add("org/m", write_single(tmp_path / "other", {"other": weight(99)}))
    ref = next(iter(source.checkpoint.tensors))
    assert bytes(source.read(ref)) == bytes(open_source(str(folder)).read(ref))
    assert source.checkpoint.revision == commit
    assert open_source("org/m").checkpoint.revision != commit


def test_ranges_of_a_tensor_are_its_bytes(hub, folder):
    hub.add("org/m", folder)
    source, local = open_source("org/m"), open_source(str(folder))
    for ref in source.checkpoint.tensors:
        whole = bytes(local.read(ref))
        assert bytes(source.read(ref)) == whole
        assert bytes(source.read_range(ref, 3, 17)) == whole[3:17]
        buffer = bytearray(9)
        source.read_into(ref, 5, memoryview(buffer))
        assert bytes(buffer) == whole[5:14]
        assert bytes(source.read_range(ref, 4, 4)) == b""


@pytest.mark.sweep(4)
@pytest.mark.parametrize("piece_nbytes", [1, 100, 4096, 1 << 20])
def test_the_size_of_pieces_changes_no_byte(piece_nbytes, hub, folder, tmp_path, monkeypatch):
    hub.add("org/m", folder)
    if piece_nbytes < 100:
        folder = write_single(tmp_path / "tiny", {"a.o_proj.weight": weight(0, 1, 16)})
        hub.add("org/m", folder)
    monkeypatch.setattr("fp4convert.storage.hub.prefetch.PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr("fp4convert.storage.hub.source.PIECE_NBYTES", piece_nbytes)
    expected = expect(hub, folder, tmp_path / "a")
    for memory in ("0", "1"):
        remote = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / memory, "--memory", memory).json
        assert remote["digest"] == expected


def test_a_name_that_leads_outside_is_refused(hub, folder):
    commit = hub.add("org/m", folder)
    files = hub.repos["org/m"].commits[commit]
    for name in ("../x", "/etc/x", "a/../../x", "a//x", "a\0x"):
        files[name] = files["notes.txt"]
        outcome = ask("quantize", "org/m", *NVFP4, "--dry-run")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "file-name"), name
        del files[name]


def test_hidden_files_and_weights_of_other_kinds_stay_behind(hub, folder):
    for name in (".gitattributes", "pytorch_model.bin"):
        (folder / name).write_bytes(b"x")
    hub.add("org/m", folder)
    checkpoint = open_source("org/m").checkpoint
    assert set(checkpoint.sidecars) == {"tokenizer.json", "notes.txt"}
    assert checkpoint.left_out == ("pytorch_model.bin",)


@pytest.mark.parametrize(
    ("file", "code"),
    [("pytorch_model.bin", "pickle"), ("notes.txt", "no-weights"), ("m.gguf", "gguf")],
)
def test_a_repository_without_safetensors_is_refused(file, code, hub, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / file).write_bytes(b"x")
    hub.add("org/m", tmp_path / "r")
    outcome = ask("quantize", "org/m", *NVFP4)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, code)


def test_what_is_in_the_cache_is_not_fetched(hub, folder, tmp_path):
    cached(hub, folder, tmp_path, [FIRST, "config.json"])
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert not [seen for seen in hub.seen if FIRST in seen.path or "config.json" in seen.path]


def test_offline_the_cache_is_enough(hub, folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cached(hub, folder, tmp_path, ALL_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert hub.seen == []
    outcome = ask("quantize", "org/other", *NVFP4)
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "offline")


def test_half_a_model_without_its_index_is_refused(hub, folder, tmp_path):
    (folder / "model.safetensors.index.json").unlink()
    (folder / SECOND).unlink()
    hub.add("org/half", folder)
    for place in (folder, "org/half"):
        outcome = ask("quantize", place, *NVFP4, "-o", tmp_path / "q")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "missing-shard")
        assert "1 shards, whose names say that there are 2" in outcome.json["error"]["message"]


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_damaged_cache_is_noticed(is_offline, hub, folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = cached(hub, folder, tmp_path, ALL_FILES)
    (shard,) = cache.glob(f"snapshots/*/{SECOND}")
    damage(shard, -5)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    if not is_offline:  # fetched instead
        assert outcome.json["digest"] == expect(hub, folder, tmp_path / "a")
        return
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert not (tmp_path / "b" / SECOND).exists()
    assert not (tmp_path / "b" / "quantization_config.json").exists()


def test_a_config_that_came_damaged_is_refused(hub, folder):
    hub.add("org/m", folder)
    hub.fault("flip", where="hub", match="config.json", at=3)
    outcome = ask("quantize", "org/m", *NVFP4)
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert json.loads((folder / "config.json").read_text())
