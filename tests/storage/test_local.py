"""A folder, one file, or a snapshot of the Hub's cache: which files it has, and which bytes."""

import errno
import gc
import json
import math
import os

import pytest
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    LLAMA,
    SECOND,
    llama_shards,
    pack_shard,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

from fp4convert.errors import InputError, SourceError
from fp4convert.storage.open import open_source

SNAPSHOT = "0123456789abcdef0123456789abcdef01234567"


def opened(path):
    return open_source(str(path))


def test_the_bytes_of_every_tensor_are_those_that_were_written(tmp_path):
    source = opened(write_llama(tmp_path / "m"))
    stored = {name: tensor for shard in llama_shards().values() for name, tensor in shard.items()}
    refs = source.checkpoint.tensors
    assert {ref.name: (ref.dtype, ref.shape, bytes(source.read(ref))) for ref in refs} == stored


def test_an_empty_tensor_and_an_unaligned_one_are_read(tmp_path):
    tensors = {"odd": ("U8", (1,), b"\7"), "empty": ("BF16", (0, 64), b""), "w": weight()}
    source = opened(write_single(tmp_path / "m", tensors))
    assert {ref.name: bytes(source.read(ref)) for ref in source.checkpoint.tensors} == {
        name: data for name, (_, _, data) in tensors.items()
    }


def test_a_shard_is_mapped_until_it_was_streamed(tmp_path):
    source, stored = opened(write_llama(tmp_path / "m")), llama_shards()
    first, second = (
        next(ref for ref in source.checkpoint.tensors if ref.file == file)
        for file in (FIRST, SECOND)
    )
    with source.stream(FIRST):
        views = {ref: source.read(ref) for ref in (first, second)}
        assert set(source._maps) == {FIRST, SECOND}
    assert set(source._maps) == {SECOND}
    with pytest.raises(SourceError), source.stream(SECOND):
        raise SourceError("source-changed", "as where a reader fails")
    assert source._maps == {}
    assert {ref: bytes(view) for ref, view in views.items()} == {
        ref: stored[ref.file][ref.name][2] for ref in (first, second)
    }


def test_the_name_of_a_folder_of_a_file_and_of_here(tmp_path, monkeypatch):
    folder = write_single(tmp_path / "Llama-3.1", {"w.weight": weight()})
    assert opened(folder).name == "Llama-3.1"
    assert opened(folder / "model.safetensors").name == "model"
    monkeypatch.chdir(folder)
    assert opened(".").name == "Llama-3.1"


def test_sidecars_are_all_other_files_at_any_depth_but_hidden_ones(tmp_path):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}", ".gitattributes": b"x"})
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "assets" / "deep" / "voice.txt").write_bytes(b"v")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_bytes(b"{}")
    assert opened(folder).checkpoint.sidecars == ("tokenizer.json", "assets/deep/voice.txt")


def test_weights_in_another_form_stay_behind(tmp_path):
    files = ("pytorch_model.bin", "tf_model.h5", "model.onnx", "model.Q4.gguf")
    folder = write_llama(tmp_path / "m", **dict.fromkeys((*files, "vocab.txt"), b"x"))
    copies = ["consolidated.00.pth", "model-00001-of-00002.safetensors"]
    copies = [f"original/{name}" for name in (*copies, "model.safetensors.index.json")]
    copies.append("onnx/model.onnx_data")
    needed = ["2_Dense/model.safetensors", "original/params.json"]
    for name in (*copies, *needed):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"c")
    checkpoint = opened(folder).checkpoint
    assert set(checkpoint.left_out) == {*files, *copies}
    assert set(checkpoint.sidecars) == {"vocab.txt", *needed}


def test_config_holds_what_the_file_holds(tmp_path):
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").write_text(
        '{"a": NaN, "b": -Infinity, "c": -1, "d": {"e": [1e-05, null, "é"]}}'
    )
    config = opened(folder).checkpoint.config
    assert math.isnan(config.pop("a"))
    assert config == {"b": -math.inf, "c": -1, "d": {"e": [1e-05, None, "é"]}}


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"a":1,"a":2}', b"\xff\xfe{", b'{"a":"\\ud800"}'])
def test_a_damaged_config_is_refused(text, tmp_path):
    folder = write_llama(tmp_path / "m", **{"config.json": text})
    with pytest.raises(InputError, match=r"config\.json"):
        opened(folder)


def test_one_file_is_a_checkpoint_with_nothing_beside_it_but_its_config(tmp_path):
    folder = write_single(tmp_path / "m", {f"{LAYER}.mlp.down_proj.weight": weight()})
    (folder / "tokenizer.json").write_bytes(b"{}")
    checkpoint = opened(folder / "model.safetensors").checkpoint
    assert (checkpoint.config, checkpoint.sidecars, len(checkpoint.shards)) == (LLAMA, (), 1)


def test_one_shard_of_several_is_opened_alone(tmp_path):
    shards = {"a.safetensors": {"a": weight()}, "b.safetensors": {"b": weight(1)}}
    folder = write_checkpoint(tmp_path / "m", shards)
    assert [ref.name for ref in opened(folder / "b.safetensors").checkpoint.tensors] == ["b"]


def cache(root, tensors):
    """models--org--name as the Hub's client lays it out; returns the snapshot."""
    repository = root / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / SNAPSHOT
    blobs.mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    contents = {"model.safetensors": pack_shard(tensors), "config.json": b"{}"}
    for number, (file, data) in enumerate({**contents, "sub/vocab.txt": b"v"}.items()):
        blob, link = blobs / f"blob{number}", snapshot / file
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_links_into_the_blobs_of_the_cache_are_followed(tmp_path):
    source = opened(cache(tmp_path, {"w.weight": weight()}))
    (ref,) = source.checkpoint.tensors
    assert bytes(source.read(ref)) == weight()[2]
    assert source.checkpoint.sidecars == ("sub/vocab.txt",)
    with source.open_file("sub/vocab.txt") as stream:
        assert stream.read() == b"v"


def test_links_inside_the_folder_are_followed(tmp_path):
    folder = write_single(tmp_path / "m", {"w.weight": weight()})
    (folder / "model.safetensors").rename(folder / ".blob")
    (folder / "model.safetensors").symlink_to(".blob")
    assert [ref.name for ref in opened(folder).checkpoint.tensors] == ["w.weight"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "vocab.txt"])
def test_links_that_lead_outside_are_refused(file, tmp_path):
    folder = write_llama(tmp_path / "m")
    (tmp_path / "secret").write_bytes(b"{}")
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError) as caught:
        opened(folder)
    assert "outside" in caught.value.message or "both" in caught.value.message


def test_blobs_are_only_those_of_the_own_repository(tmp_path):
    snapshot = cache(tmp_path, {"w.weight": weight()})
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_bytes(b"s")
    (snapshot / "vocab.txt").symlink_to(other / "secret")
    with pytest.raises(InputError, match="outside"):
        opened(snapshot)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "no-weights"),
        ({"config.json": b"{}"}, "no-weights"),
        ({"pytorch_model.bin": b"x"}, "pickle"),
        ({"model.gguf": b"x"}, "gguf"),
    ],
)
def test_a_folder_without_safetensors_is_refused(files, code, tmp_path):
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "reference",
    ["absent", "./absent/m", "/absent/m", "a/b/c", "../m", "a b/c", "org/m?x=1", "org/"],
)
def test_what_is_neither_here_nor_a_name_of_the_hub(reference):
    with pytest.raises(InputError) as caught:
        open_source(reference)
    assert caught.value.code == "no-source"
    assert "organisation/name on the Hub" in caught.value.message


def test_the_stamp_changes_when_a_shard_does(tmp_path):
    folder = write_single(tmp_path / "m", {"w.weight": weight()})
    before = opened(folder).checkpoint.stamps
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert opened(folder).checkpoint.stamps != before
    assert set(before) == {"model.safetensors"}


def test_files_are_found_and_opened_by_name(tmp_path):
    source = opened(write_llama(tmp_path / "m", **{"notes.txt": b"n"}))
    assert source.has_file("notes.txt")
    assert not source.has_file("absent.txt")
    with source.open_file("notes.txt") as stream:
        assert stream.read() == b"n"
    with source.open_file("config.json") as stream:
        assert json.load(stream)["model_type"] == "llama"


@pytest.mark.parametrize("file", [FIRST, INDEX, "config.json", "tokenizer.json", "deep", "."])
def test_what_this_user_may_not_read_is_told(file, tmp_path, monkeypatch):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}"})
    (folder / "deep").mkdir()
    # Root may read everything: the system's refusal is put on.
    forbidden = (folder / file, str(folder / file))

    def refuse(real):
        def ask(path, *arguments, **options):
            if path in forbidden:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return ask

    monkeypatch.setattr("pathlib.Path.open", refuse(type(folder).open))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    outcome = run("quantize", folder, "--format", "nvfp4", "-o", tmp_path / "q", "--json")
    error = outcome.json["error"]
    expected = (3, "source-unreadable") if file == "tokenizer.json" else (2, "unreadable")
    assert (outcome.code, error["code"]) == expected
    assert "Permission denied" in error["message"]


@pytest.mark.parametrize("harm", ["removed", "made a folder", "made a link to outside"])
@pytest.mark.parametrize("file", [SECOND, "tokenizer.json"])
def test_what_goes_away_while_it_is_read_is_a_source_that_changed(file, harm, tmp_path):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}"})
    source = opened(folder)
    (folder / file).rename(tmp_path / "elsewhere")
    if harm == "made a folder":
        (folder / file).mkdir()
    elif harm == "made a link to outside":
        (folder / file).symlink_to(tmp_path / "elsewhere")
    ref = next(ref for ref in source.checkpoint.tensors if ref.file == SECOND)
    of_shard = (lambda: source.read(ref), lambda: source.read_range(ref, 0, 4))
    for read in of_shard if file == SECOND else (lambda: source.open_file(file),):
        with pytest.raises(SourceError) as caught:
            read()
        assert caught.value.code == "source-changed"
        assert file in caught.value.message


def test_files_are_closed_with_the_source(tmp_path, recwarn):
    source = opened(write_llama(tmp_path / "m"))
    for ref in source.checkpoint.tensors:
        source.read_range(ref, 0, 2)
    del source
    gc.collect()
    own = [each for each in recwarn if str(tmp_path) in str(each.message)]  # not of other tests
    assert [each for each in own if each.category is ResourceWarning] == []


def _fail(number=errno.EIO):
    """The call of a disk that cannot read."""

    def failing(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return failing


def test_a_source_whose_disk_fails_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    """As a network file system does for a moment; it was a traceback."""
    folder = write_llama(tmp_path / "m")
    monkeypatch.setattr("fp4convert.storage.local.read_at", _fail())
    with pytest.raises(InputError, match="cannot be read: Input/output error"):
        opened(folder)


def test_a_shard_that_cannot_be_mapped_or_looked_at_is_an_unreadable_source(tmp_path, monkeypatch):
    source = opened(write_llama(tmp_path / "m"))
    ref = next(iter(source.checkpoint.tensors))
    with monkeypatch.context() as patch:
        patch.setattr("fp4convert.storage.local.mmap.mmap", _fail(errno.ESTALE))
        with pytest.raises(SourceError, match="Stale file handle") as caught:
            source.read(ref)
    assert caught.value.code == "source-unreadable"
    monkeypatch.setattr("fp4convert.storage.local._stamp", _fail())
    with pytest.raises(SourceError, match="Input/output error"):
        source.check_unchanged(ref.file)


def test_links_out_of_a_folder_are_followed_where_it_is_yours(tmp_path):
    """The digest is that of the files themselves, and the next line works as it is printed."""
    real, linked = write_llama(tmp_path / "real"), tmp_path / "linked"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    words = ("--format", "nvfp4", "--json")
    refused = run("quantize", linked, *words, "-o", tmp_path / "q").json["error"]
    assert refused["code"] == "link-outside"
    found = run("quantize", linked, *words, "-o", tmp_path / "q", "--follow-links").json
    assert found["digest"] == run("quantize", real, *words, "-o", tmp_path / "r").json["digest"]
    _, *line = found["next"][0].split()
    assert line[-1] == "--follow-links"
    assert run(*line).code == 0
