"""Headers and index put together: what they agree on is a checkpoint, what they do not is refused
or told.
"""

import json

import pytest
from checkpoints import (
    FIRST,
    INDEX,
    SECOND,
    llama_shards,
    pack_shard,
    run,
    weight,
    write_checkpoint,
    write_single,
)
from diffusion import (
    DIFFUSERS,
    DIFFUSERS_FIRST,
    DIFFUSERS_INDEX,
    DIFFUSERS_SECOND,
    FLUX_CONFIG,
    flux_shards,
    write_component,
)

from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import read_index
from fp4convert.storage.open import open_source


def index_text(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def test_shards_stand_in_the_order_of_their_names_and_tensors_in_that_of_the_file(tmp_path):
    checkpoint = open_source(str(write_checkpoint(tmp_path / "m", llama_shards()))).checkpoint
    assert [shard.file for shard in checkpoint.shards] == [FIRST, SECOND]
    assert [ref.name for ref in checkpoint.tensors] == [
        name for shard in llama_shards().values() for name in shard
    ]
    assert checkpoint.nbytes == sum(
        (tmp_path / "m" / file).stat().st_size for file in (FIRST, SECOND)
    )
    assert (checkpoint.repo, checkpoint.revision, checkpoint.unindexed) == (None, None, ())


def test_several_shards_need_no_index(tmp_path):
    shards = {"a.safetensors": {"a": weight()}, "b.safetensors": {"b": weight(1)}}
    folder = write_checkpoint(tmp_path / "m", shards)
    (folder / INDEX).unlink()
    assert [ref.file for ref in open_source(str(folder)).checkpoint.tensors] == [*shards]


def test_a_sound_index_is_read():
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    assert read_index(index_text(weight_map)) == weight_map


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"oops", "header"),
        (b"\xff{}", "header-utf8"),
        (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "duplicate-key"),
        (b"{}", "index"),
        (index_text({}), "index"),
        (index_text([]), "index"),
        (index_text({"a": 7}), "index"),
        (index_text({"a": None}), "index"),
        (index_text({"a": "config.json"}), "index"),
        (index_text({"a": "x.safetensors", "b": "X.safetensors"}), "index"),
        (index_text({"a": "../x.safetensors"}), "index-outside"),
        (index_text({"a": "/x.safetensors"}), "index-outside"),
        (index_text({"a": "sub/x.safetensors"}), "index-outside"),
        (index_text({"a": ".."}), "index-outside"),
        (index_text({"a": ""}), "index-outside"),
        (index_text({"a": "x\0.safetensors"}), "index-outside"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(text, code):
    with pytest.raises(InputError) as caught:
        read_index(text)
    assert caught.value.code == code
    assert INDEX in caught.value.message


def contradiction(folder) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(str(folder))
    return caught.value


@pytest.fixture
def two(tmp_path):
    """Two shards and their index."""
    return write_checkpoint(tmp_path / "m", {FIRST: {"a": weight()}, SECOND: {"b": weight(1)}})


def test_a_tensor_that_is_not_where_the_index_says(two):
    (two / INDEX).write_bytes(index_text({"a": SECOND, "b": SECOND}))
    error = contradiction(two)
    assert error.code == "index"
    assert f"'a' is not in {SECOND}" in error.message


def test_a_shard_that_the_index_names_and_nobody_has(two):
    (two / SECOND).unlink()
    error = contradiction(two)
    assert error.code == "missing-shard"
    assert SECOND in error.message


def test_a_stale_index_beside_the_model_may_go(two):
    """Its shards are gone, and others lie there; the step works."""
    first, second = (two / f"other-0000{number}-of-00002.safetensors" for number in (1, 2))
    (two / FIRST).rename(first)
    (two / SECOND).rename(second)
    error = contradiction(two)
    assert (error.code, first.name in error.message) == ("missing-shard", True)
    assert f"remove {INDEX}, if the others are the model" in error.next_step
    (two / INDEX).unlink()
    shards = open_source(str(two)).checkpoint.shards
    assert [shard.file for shard in shards] == [first.name, second.name]


def test_a_name_in_two_shards(tmp_path):
    shards = {"a.safetensors": {"w": weight()}, "b.safetensors": {"w": weight(1)}}
    folder = write_checkpoint(tmp_path / "m", shards)
    (folder / INDEX).unlink()
    error = contradiction(folder)
    assert (error.code, error.tensor) == ("tensor-twice", "w")
    assert "a.safetensors and b.safetensors" in error.message


def test_a_tensor_that_the_index_omits_is_converted_and_told(tmp_path):
    folder = write_checkpoint(
        tmp_path / "m", {FIRST: {"a": weight(), "extra": weight(2)}, SECOND: {"b": weight(1)}}
    )
    (folder / INDEX).write_bytes(index_text({"a": FIRST, "b": SECOND}))
    checkpoint = open_source(str(folder)).checkpoint
    assert [ref.name for ref in checkpoint.tensors] == ["a", "extra", "b"]
    assert checkpoint.unindexed == ("extra",)


def test_a_shard_that_the_index_does_not_name_stays_behind(two):
    (two / "consolidated.safetensors").write_bytes(pack_shard({"c": weight(2)}))
    checkpoint = open_source(str(two)).checkpoint
    assert [shard.file for shard in checkpoint.shards] == [FIRST, SECOND]
    assert checkpoint.left_out == ("consolidated.safetensors",)


def test_an_index_beside_a_model_file_that_it_does_not_name_is_refused(two):
    write_single(two, {"a": weight(2)})
    error = contradiction(two)
    assert "model.safetensors" in error.message
    assert "both" in error.message


def test_diffusers_index_says_which_shards_there_are(tmp_path):
    folder = write_component(tmp_path / "m", flux_shards(), FLUX_CONFIG)
    checkpoint = open_source(str(folder)).checkpoint
    assert [shard.file for shard in checkpoint.shards] == [DIFFUSERS_FIRST, DIFFUSERS_SECOND]
    assert (checkpoint.sidecars, checkpoint.left_out, checkpoint.unindexed) == ((), (), ())
    (folder / DIFFUSERS_SECOND).unlink()
    error = contradiction(folder)
    assert (error.code, DIFFUSERS_SECOND in error.message) == ("missing-shard", True)


def test_variants_of_diffusers_stay_behind_with_their_index(tmp_path):
    folder = write_component(tmp_path / "m", [flux_shards()[0]], FLUX_CONFIG)
    others = [f"{DIFFUSERS}.fp16.safetensors", f"{DIFFUSERS}-00001-of-00002.fp8.safetensors"]
    for name in others:
        (folder / name).write_bytes(pack_shard({"other": weight()}))
    index = f"{DIFFUSERS}.safetensors.index.fp8.json"
    (folder / index).write_text("{}")
    checkpoint = open_source(str(folder)).checkpoint
    assert [shard.file for shard in checkpoint.shards] == [f"{DIFFUSERS}.safetensors"]
    assert set(checkpoint.left_out) == {*others, index}
    assert checkpoint.sidecars == ()


def test_a_variant_alone_is_the_checkpoint(tmp_path):
    folder = write_component(tmp_path / "m", [flux_shards()[0]], FLUX_CONFIG)
    variant = f"{DIFFUSERS}.fp16.safetensors"
    (folder / f"{DIFFUSERS}.safetensors").rename(folder / variant)
    assert [shard.file for shard in open_source(str(folder)).checkpoint.shards] == [variant]


def test_an_index_of_diffusers_beside_one_file_that_it_does_not_name_is_refused(tmp_path):
    folder = write_component(tmp_path / "m", flux_shards(), FLUX_CONFIG)
    (folder / f"{DIFFUSERS}.safetensors").write_bytes(pack_shard({"a": weight()}))
    error = contradiction(folder)
    assert (error.code, DIFFUSERS_INDEX in error.message) == ("index-and-single", True)


def test_two_indexes_are_refused(tmp_path):
    folder = write_component(tmp_path / "m", flux_shards(), FLUX_CONFIG)
    (folder / INDEX).write_bytes((folder / DIFFUSERS_INDEX).read_bytes())
    error = contradiction(folder)
    assert error.code == "index"
    assert INDEX in error.message
    assert DIFFUSERS_INDEX in error.message


def test_a_subfolder_of_a_subfolder_and_none_of_a_file(tmp_path):
    folder = write_single(tmp_path / "m" / "deep" / "sub", {"a.weight": weight()})
    options = ("--format", "nvfp4", "-o", tmp_path / "q", "--json", "--subfolder")
    outcome = run("quantize", folder / "model.safetensors", *options, "x")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-subfolder")
    assert run("quantize", tmp_path / "m", *options, "/deep/sub/").code == 0
