"""Damage in transit to what no stream hashes: headers, members of a scale group elsewhere, what
inspect and verify read.
"""

import json
import re
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    SECOND,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from gguf_donors import model, write_donor
from hub_cases import ALL_FILES, NVFP4, ask, cached, damage, expect
from safetensors import safe_open

from fp4convert.errors import SourceError
from fp4convert.storage.hub import prefetch
from fp4convert.storage.hub import source as source_module
from fp4convert.storage.hub.retry import Patience
from fp4convert.storage.hub.source import HubSource
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m")
    hub.add("org/m", folder)
    return folder


def header_nbytes(path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize(("place", "after"), [("header", 0), ("header", 1), (1, 1), (1, 2)])
def test_what_came_damaged_is_fetched_again(place, after, hub, folder, tmp_path):
    """A header, or an exponent of v_proj, which the first shard measures."""
    expected = expect(hub, folder, tmp_path / "a")
    at = (folder / SECOND).read_bytes().index(b"lm_head") if place == "header" else place
    fault = hub.fault("flip", match=SECOND, at=at, after=after)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert fault.times == 0


def test_a_header_that_was_damaged_twice_in_the_same_way_is_found_by_the_hash(
    hub, folder, tmp_path
):
    at = (folder / SECOND).read_bytes().index(b"lm_head")
    hub.fault("flip", match=SECOND, at=at, times=2)  # a tensor of another name
    (folder / INDEX).unlink()
    hub.add("org/m", folder)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert "header" in outcome.json["error"]["message"]
    assert outcome.json["error"]["next"] == "Run the same command again."
    assert not (tmp_path / "b" / SECOND).exists()


def test_what_comes_differently_each_time_is_exit_3(hub, folder, tmp_path):
    for at in range(9):
        hub.fault("flip", match=SECOND, at=at + 8)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert "in each of 5 requests" in outcome.json["error"]["message"]


@pytest.fixture
def artifact(hub, folder, tmp_path):
    assert run("quantize", folder, *NVFP4, "-o", tmp_path / "q").code == 0
    hub.add("org/q", tmp_path / "q")
    return tmp_path / "q"


@pytest.mark.sweep(7)
@pytest.mark.parametrize("after", range(0, 40, 3))
@pytest.mark.parametrize(
    "command", [("inspect", "org/q"), ("verify", "org/q", "--source", "org/m")]
)
def test_inspect_and_verify_blame_no_artifact_for_what_the_network_did(
    command, after, hub, folder, artifact
):
    names = {"org/q": artifact, "org/m": folder}
    expected = run(*(names.get(word, word) for word in command), "--json").json
    fault = hub.fault("flip", match="safetensors", after=after, at=2)
    outcome = ask(*command, "--json")
    if "error" in outcome.json:  # a file that is hashed anyway, and came damaged
        found = outcome.code, outcome.json["error"]["code"], fault.times
        assert found == (3, "source-corrupt", 0)
    else:
        assert outcome.json == expected


def test_verify_fetches_the_weights_once_and_some_rows_to_compare(
    hub, folder, artifact, monkeypatch
):
    # Eight rows of a module, one from each part of it.
    monkeypatch.setattr("fp4convert.quality.source_match.COMPARED_ELEMENTS", 8)
    hub.seen.clear()
    assert ask("verify", "org/q", "--source", "org/m", "--json").code == 0
    for file in (FIRST, SECOND):
        begins = header_nbytes(folder / file)
        asked = [
            re.fullmatch(r"bytes=(\d+)-(\d+)", seen.range)
            for seen in hub.seen
            if "/org/m/" in seen.path and file in seen.path and seen.where == "storage"
        ]
        ranges = [(int(match[1]), int(match[2])) for match in asked]
        data = sum(end + 1 - max(begins, first) for first, end in ranges if end >= 1 << 15)
        assert data <= 1.1 * (folder / file).stat().st_size


def cached_shard(hub, folder, tmp_path):
    """A shard in the Hub's cache, where all files of org/m are."""
    names = [name for name in ALL_FILES if (folder / name).exists()]
    (shard,) = cached(hub, folder, tmp_path, names).glob(f"snapshots/*/{SECOND}")
    return shard


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_member_that_is_damaged_in_the_cache_is_no_part_of_an_artifact(
    is_offline, hub, folder, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    shard = cached_shard(hub, folder, tmp_path)
    expected = expect(hub, folder, tmp_path / "a")
    at = header_nbytes(shard) + 1  # v_proj, which the first shard measures
    damage(shard, at, 0x20)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    if not is_offline:
        assert outcome.json["digest"] == expected
        return
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    # Shards are filled at once: the first may have measured it, and then is made again.
    damage(shard, at, 0x20)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected


def test_a_source_is_the_same_through_one_connection(hub, folder):
    source = HubSource("org/m", Access(connections=1), Patience(1.0))
    local = open_source(str(folder))
    for ref in source.checkpoint.tensors:
        assert source.read(ref) == local.read(ref)


def test_a_piece_that_is_fetched_again_with_a_flipped_byte_is_no_part_of_an_artifact(
    hub, tmp_path, monkeypatch
):
    """Pieces of 64 KB and no memory for them: what was measured is fetched again to be rounded."""
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 1 << 16)
    for module in (prefetch, source_module):
        monkeypatch.setattr(module, "PIECE_NBYTES", 1 << 16)
    folder = write_single(tmp_path / "m", {"a.weight": weight(0, 4096, 1024)})
    hub.add("org/m", folder)
    expected = expect(hub, folder, tmp_path / "a")
    fault = hub.fault("flip", match=f"bytes={3 << 16}-", after=1, at=1)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b", "--memory", "0")
    assert fault.times == 0, "no piece was fetched again"
    assert outcome.json["digest"] == expected


def largest_at(path, name) -> int:
    """Where flipping the lowest bit of a byte makes a BF16 value of a tensor four times as large,
    more than any other.
    """
    (start, stop) = json.loads(path.read_bytes()[8 : header_nbytes(path)])[name]["data_offsets"]
    begins = header_nbytes(path)
    bits = np.frombuffer(path.read_bytes()[begins + start : begins + stop], "<u2")
    was, becomes = ((each.astype(np.uint32) << 16).view(np.float32) for each in (bits, bits ^ 256))
    return begins + start, 2 * int(np.argmax(np.abs(becomes) - np.abs(was))) + 1


@pytest.mark.parametrize(("times", "code"), [(2, 0), (4, 3), (1000, 3)])
def test_a_member_that_two_requests_bring_damaged_in_one_way(times, code, hub, folder, tmp_path):
    """The shard that it lies in is hashed, and finds another largest magnitude: both are done
    again, and the member is fetched again.
    """
    expected = expect(hub, folder, tmp_path / "a")
    begins, at = largest_at(folder / SECOND, f"{LAYER}.self_attn.v_proj.weight")
    fault = hub.fault("flip", match=rf"{SECOND}.*bytes={begins}-", at=at, times=times)
    command = ("quantize", "org/m", *NVFP4, "-o", tmp_path / "b", "--workers", 1)
    outcome = ask(*command)
    assert outcome.code == code
    assert "their scale groups were not the same in all of them" in outcome.err
    if code:
        assert outcome.json["error"]["code"] == "source-corrupt"
        assert "has a different largest magnitude each time" in outcome.json["error"]["message"]
        hub.faults.clear()
        outcome = ask(*command)
    assert outcome.json["digest"] == expected
    assert fault.times == max(0, times - 4)


def test_a_shard_that_was_made_again_is_reproduced(hub, folder, tmp_path):
    """The first try, of what came damaged, differed: `reproduce` judges the last."""
    artifact = tmp_path / "q"
    assert run("quantize", "org/m", *NVFP4, "-o", artifact).code == 0
    begins, at = largest_at(folder / SECOND, f"{LAYER}.self_attn.v_proj.weight")
    fault = hub.fault("flip", match=rf"{SECOND}.*bytes={begins}-", at=at, times=2)
    outcome = ask("reproduce", artifact, "--workers", 1, "--json")
    assert fault.times == 0
    assert "made again" in outcome.err
    assert (outcome.code, outcome.json["differing"]) == (0, [])


@pytest.mark.parametrize(("times", "code"), [(2, 0), (1000, 3)])
def test_scales_in_another_shard_that_two_requests_bring_damaged_in_one_way(
    times, code, hub, tmp_path, monkeypatch
):
    """They go into the shard of their weights, and no scale group measures them again.

    Where their own shard streams at the same time, its bytes are taken, which are sound.
    """
    monkeypatch.setattr(source_module, "WHOLE_NBYTES", 0)
    name, rows = f"{LAYER}.self_attn.o_proj", 256
    codes = np.random.default_rng(3).standard_normal((rows, rows)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.random.default_rng(4).uniform(0.5, 2, (2, 2)).astype("<f4")
    first = {f"{name}.weight": ("F8_E4M3", (rows, rows), codes.tobytes())}
    second = {
        f"{name}.weight_scale_inv": ("F32", (2, 2), scales.tobytes()),
        "lm_head.weight": weight(11, 96, rows),
    }
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {"model_type": "llama", "hidden_size": rows, "quantization_config": fp8}
    folder = write_checkpoint(tmp_path / "m", {FIRST: first, SECOND: second}, config)
    hub.add("org/m", folder)
    expected = expect(hub, folder, tmp_path / "a")
    begins = header_nbytes(folder / SECOND)
    fault = hub.fault("flip", match=rf"{SECOND}.*bytes={begins}-", at=3, times=times)
    command = ("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    outcome = ask(*command)
    assert outcome.code in (0, code)
    if outcome.code:
        assert fault.times <= times - 2
        assert outcome.json["error"]["code"] == "source-corrupt"
        assert SECOND in outcome.json["error"]["message"]
        hub.faults.clear()
        outcome = ask(*command)
    assert outcome.json["digest"] == expected


def stored_in(folder, name) -> tuple[str, bytes]:
    """The shard of a tensor, and its bytes."""
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    with safe_open(folder / file, "numpy") as opened:
        return file, opened.get_tensor(name).tobytes()


@pytest.mark.parametrize(
    ("option", "module"),
    [("--global-scale", "q_proj"), ("--global-scale", "o_proj"), ("--input-scale", "q_proj")],
)
def test_scales_of_another_repository_that_two_requests_bring_damaged_in_one_way(
    option, module, hub, folder, tmp_path
):
    """Whether they look wrong, as one of a group with another number, or not."""
    words = ("--activations", "4", "--input-scale", "0.5")
    donor = tmp_path / "donor"
    assert run("quantize", folder, *NVFP4, *words, "-o", donor).code == 0
    hub.add("org/donor", donor)
    wanted = "weight_global_scale" if option == "--global-scale" else "input_global_scale"
    file, stored = stored_in(donor, f"{LAYER}.self_attn.{module}.{wanted}")
    at = (donor / file).read_bytes().rindex(stored)
    command = ("quantize", folder, *NVFP4, "--activations", "4", option, "org/donor")
    expected = ask(*command, "-o", tmp_path / "a").json["digest"]
    ranges = [seen.range.removeprefix("bytes=") for seen in hub.seen if seen.range]
    least = header_nbytes(donor / file)
    pairs = (map(int, text.split("-")) for text in ranges)
    begins, ends = next((first, last) for first, last in pairs if least <= first <= at <= last)
    match = rf"{file}.*bytes={begins}-{ends}$"
    fault = hub.fault("flip", match=match, at=at - begins, times=2)
    outcome = ask(*command, "-o", tmp_path / "b")
    assert fault.times == 0
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt"), outcome.out
    assert file in outcome.json["error"]["message"]
    assert not (tmp_path / "b").exists()
    assert ask(*command, "-o", tmp_path / "b").json["digest"] == expected


@pytest.mark.parametrize("at", [0, 8, 9, 20])
@pytest.mark.parametrize(
    "command",
    [("quantize", "org/m", *NVFP4, "-o"), ("inspect", "org/m", "--json", "--revision", "main")],
)
def test_a_header_that_two_requests_bring_damaged_in_one_way(at, command, hub, folder, tmp_path):
    fault = hub.fault("flip", match=SECOND, at=at, times=1000)
    words = [*command, tmp_path / "b"] if command[-1] == "-o" else command
    outcome = ask(*words)
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert SECOND in outcome.json["error"]["message"]
    assert "Download" not in outcome.json["error"]["next"]
    assert not (tmp_path / "b").exists()
    fault.times = 0


def test_a_header_that_was_never_sound_is_told_so(hub, folder, tmp_path):
    damage(folder / SECOND, 9)
    hub.add("org/m", folder)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "header")


def test_an_index_that_a_damaged_header_contradicts_is_not_blamed(hub, folder, tmp_path):
    at = (folder / SECOND).read_bytes().index(b"lm_head")
    hub.fault("flip", match=SECOND, at=at, times=1000)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")


@pytest.mark.parametrize("word", [b"lm_head", b'"dtype"', b"BF16", b"[", b"up_proj"])
def test_a_header_of_which_a_later_request_brings_the_truth(word, hub, folder, tmp_path):
    """Two requests bring one damage: to a name that the index has, or to words of JSON."""
    expected = expect(hub, folder, tmp_path / "a")
    at = (folder / SECOND).read_bytes().index(word)
    fault = hub.fault("flip", match=SECOND, at=at, times=2)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert outcome.json.get("digest") == expected, outcome.out
    assert fault.times == 0


def test_a_header_that_is_damaged_in_the_cache_is_fetched(hub, folder, tmp_path):
    shard = cached_shard(hub, folder, tmp_path)
    expected = expect(hub, folder, tmp_path / "a")
    damage(shard, 9)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert outcome.json["digest"] == expected


@pytest.mark.parametrize("what", ["weight_scale", "weight_packed"])
def test_what_a_plan_to_transcode_was_made_of_is_proved(what, hub, folder, tmp_path):
    """Two requests agree on a flipped bit of what was compared with the donor."""
    artifact = tmp_path / "q"
    assert run("quantize", folder, "--format", "mxfp4", "-o", artifact, "-q").code == 0
    hub.add("org/q", artifact)
    file, stored = stored_in(artifact, f"{LAYER}.self_attn.q_proj.{what}")
    at = (artifact / file).read_bytes().index(stored)
    donor = write_donor(tmp_path / "donor.gguf", model())
    words = ("--dialect", "gguf", "--template", donor, "--json")
    expected = ask("transcode", "org/q", *words, "-o", tmp_path / "a")
    assert expected.code == 0, expected.out
    hub.fault("flip", match=rf"{file}.*bytes={at}-", at=0, times=2)
    outcome = ask("transcode", "org/q", *words, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt"), outcome.out
    assert file in outcome.json["error"]["message"]
    assert not (tmp_path / "b" / "quantization_config.json").exists()
    again = ask("transcode", "org/q", *words, "-o", tmp_path / "b")
    assert again.json["digest"] == expected.json["digest"]


@pytest.mark.parametrize("times", [0, 2])
def test_what_one_task_refutes_the_other_does_not_believe(times, hub, folder):
    """Two have read the same range; whoever reads the file whole first clears it for both."""
    tensors = open_source(str(folder)).checkpoint.tensors
    ref = next(ref for ref in tensors if ref.file == SECOND)
    source = HubSource("org/m", Access())
    hub.fault("flip", match=rf"{SECOND}.*bytes={ref.start}-", at=0, times=times)
    with pytest.raises(SourceError) if times else nullcontext(), source.proving([SECOND]):
        source.read(ref)
        with pytest.raises(SourceError) if times else nullcontext(), source.proving([SECOND]):
            source.read(ref)


@pytest.mark.parametrize("other", ["values", "header", "noise"])
@pytest.mark.parametrize("memory", [(), ("--memory", "0")], ids=["", "no-memory"])
def test_another_file_of_the_same_size(other, memory, hub, folder, tmp_path):
    """The storage has it in the place of the one whose hash the Hub tells."""
    right = (folder / SECOND).read_bytes()
    begins = header_nbytes(folder / SECOND)
    wrong = {
        "values": right[:begins] + bytes(reversed(right[begins:])),
        "header": right.replace(b"lm_head", b"lm_hand"),
        "noise": np.random.default_rng(0).bytes(len(right)),
    }[other]
    expected = expect(hub, folder, tmp_path / "a")
    (folder / SECOND).write_bytes(wrong)
    outcome = ask("quantize", "org/m", *NVFP4, *memory, "-o", tmp_path / "b")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert SECOND in outcome.json["error"]["message"]
    assert not (tmp_path / "b" / "quantization_config.json").exists()
    (folder / SECOND).write_bytes(right)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
