"""Calibration files: read and refused as the safetensors package wrote them; written in one file or
several.
"""

import json
import os

import numpy as np
import pytest
from calibrations import notes_for, statistics_of, write_calibration
from checkpoints import FIRST, LAYER, LLAMA, write_checkpoint, write_llama
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.calibration.fingerprint import check_source, fingerprint_of, weights_of
from fp4convert.calibration.statistics import Calibration
from fp4convert.calibration.workdir import join_parts, part_notes, write_part
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.open import open_source

Q, K, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.down_proj"
X = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)


@pytest.fixture
def source(tmp_path):
    return open_source(str(write_llama(tmp_path / "llama")))


@pytest.fixture
def opened(tmp_path, source):
    """Write statistics, and open the file."""

    def write(statistics: dict, **notes: str):
        return open_calibration(
            write_calibration(tmp_path / "c.safetensors", source, statistics, **notes)
        )

    return write


def refusal(call, *arguments) -> InputError:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return caught.value


def test_statistics_are_read_by_module_and_by_the_module_that_holds_them(opened):
    calibration = opened(statistics_of(Q, X), inputs=json.dumps({K: Q}))
    for module in (Q, K):
        assert calibration.has(module)
        assert calibration.amax(module) == np.abs(X).max()
        np.testing.assert_allclose(calibration.moments(module), np.square(X).mean(0), rtol=1e-6)
        magnitudes = calibration.mean_magnitudes(module)
        np.testing.assert_allclose(magnitudes, np.abs(X).mean(0), rtol=1e-6)
        np.testing.assert_array_equal(calibration.channel_amax(module), np.abs(X).max(0))
        assert calibration.tokens_of(module) == 50
        assert calibration.gram(module) is None
    assert not calibration.has(DOWN)
    assert (calibration.samples, calibration.tokens) == (4, 64)
    assert (calibration.gram_kind, calibration.unrouted) == ("diag", ())


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(
    ("block", "shape"), [(64, (1, 64, 64)), (32, (2, 32, 32)), (48, (2, 48, 48))]
)
def test_a_gram_matrix_comes_back_in_its_blocks(opened, block, shape, is_half):
    gram = opened(statistics_of(Q, X, block, is_half)).gram(Q)
    assert (gram.columns, gram.blocks.shape, gram.blocks.dtype) == (64, shape, np.float32)
    wide = X.astype(np.float64)
    whole = wide.T @ wide / 50
    np.testing.assert_allclose(
        gram.blocks[0], whole[:block, :block], rtol=2e-3 if is_half else 1e-6, atol=1e-3 * is_half
    )
    tail = 64 - block * (shape[0] - 1)
    np.testing.assert_allclose(
        gram.blocks[-1][:tail, :tail], whole[-tail:, -tail:], rtol=2e-3, atol=1e-3
    )


def test_experts_and_the_cache_are_read(opened):
    tensors = {
        "m.mlp.expert_tokens": np.array([3, 0], np.int64),
        "m.mlp.expert_saliency": np.array([0.5, 0], np.float32),
        "m.self_attn.k_amax": np.float32(7.5).reshape(()),
        "m.self_attn.v_amax": np.float32(0.25).reshape(()),
    }
    calibration = opened(tensors, unrouted='["m.mlp.experts.1"]')
    assert calibration.experts("m.mlp").tokens.tolist() == [3, 0]
    assert calibration.experts("m.mlp").saliency.tolist() == [0.5, 0]
    assert calibration.cache_amax("m.self_attn") == (7.5, 0.25)
    assert calibration.unrouted == ("m.mlp.experts.1",)


def test_a_calibration_of_this_checkpoint_passes(opened, source):
    linears = find_linears(source, build_recipe(Target("nvfp4"), LLAMA)).of
    columns = {module: linear.shape[1] for module, linear in linears.items()}
    tensors = {
        k: v
        for m, c in columns.items()
        for k, v in statistics_of(m, np.ones((2, c), np.float32)).items()
    }
    check_source(opened(tensors), source, linears.values())
    short = {**tensors, f"{DOWN}.input_channel_amax": np.ones(64, np.float32)}
    error = refusal(check_source, opened(short), source, linears.values())
    assert (error.code, error.exit_code, error.tensor) == ("calibration-shape", 2, DOWN)
    del tensors[f"{DOWN}.input_channel_amax"]
    error = refusal(check_source, opened(tensors), source, linears.values())
    assert (error.code, error.tensor) == ("calibration-missing", DOWN)


def test_what_is_missing_is_answered_by_its_kind(opened):
    again = "Calibrate again: fp4convert calibrate SOURCE -o FILE."
    unreached = "Calibrate again with text that reaches it"
    unreached += f", or quantize without it: --exclude {DOWN}"
    tensors = statistics_of(Q, X)
    del tensors[f"{Q}.input_sq_mean"]
    for gram, remedy in (("none", "Calibrate again with --gram diag."), ("block:32", again)):
        calibration = opened(tensors, gram=gram)
        found = {
            (calibration.moments, Q): remedy,  # a file of --gram none has none, of any layer
            (calibration.moments, DOWN): unreached,
            (calibration.channel_amax, DOWN): unreached,
            (calibration.experts, "m.mlp"): again,  # no layer that could be excluded
            (calibration.cache_amax, "m.self_attn"): again,
        }
        for (call, module), expected in found.items():
            error = refusal(call, module)
            assert (error.code, error.next_step) == ("calibration-missing", expected)


def test_another_model_and_other_weights_are_told_apart(tmp_path, opened):
    calibration = opened(statistics_of(Q, X))
    folder = write_llama(tmp_path / "tuned")
    check_source(calibration, open_source(str(folder)))  # a copy elsewhere is the same checkpoint
    shard = folder / FIRST
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    error = refusal(check_source, calibration, open_source(str(folder)))
    assert (error.code, error.exit_code) == ("calibration-weights", 2)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 1e6}))
    assert refusal(check_source, calibration, open_source(str(folder))).code == "calibration-model"


def test_the_fingerprint_leaves_quantization_out_and_shapes_in(tmp_path, source):
    quantized = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    other = open_source(str(write_checkpoint(tmp_path / "q", shards_of(source), quantized)))
    assert fingerprint_of(other) == fingerprint_of(source)
    assert weights_of(other) == weights_of(source)


def shards_of(source):
    return {
        shard.file: {
            ref.name: (ref.dtype, ref.shape, bytes(source.read(ref))) for ref in shard.tensors
        }
        for shard in source.checkpoint.shards
    }


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        ("input_amax", Calibration.amax),
        ("input_sq_mean", Calibration.moments),
        ("input_abs_mean", Calibration.mean_magnitudes),
        ("input_channel_amax", Calibration.channel_amax),
        ("input_gram", Calibration.gram),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_impossible_statistics_are_named(opened, kind, reader, bad):
    tensors = statistics_of(Q, X, block=64)
    tensors[f"{Q}.{kind}"] = tensors[f"{Q}.{kind}"].copy()
    tensors[f"{Q}.{kind}"].reshape(-1)[0] = bad
    error = refusal(reader, opened(tensors), Q)
    assert (error.code, error.tensor) == ("calibration-values", f"{Q}.{kind}")


def test_what_is_no_calibration_is_refused(tmp_path, source):
    assert refusal(open_calibration, tmp_path / "absent").code == "calibration-file"
    assert refusal(open_calibration, tmp_path).code == "calibration-file"
    save_file({"x": X}, tmp_path / "weights.safetensors")
    error = refusal(open_calibration, tmp_path / "weights.safetensors")
    assert error.code == "calibration-file"
    assert error.next_step == "Give a file that fp4convert calibrate made."
    for other in ("1", "3"):
        file = tmp_path / "n.safetensors"
        path = write_calibration(file, source, statistics_of(Q, X), version=other)
        error = refusal(open_calibration, path)
        assert f"version '{other}'" in error.message
        assert error.next_step == "Calibrate again: fp4convert calibrate SOURCE -o FILE."
    odd_notes = (("samples", "many"), ("tokens", "1" * 5000), ("inputs", "[]"), ("inputs", "{"))
    for key, value in odd_notes:
        file = tmp_path / "o.safetensors"
        odd = write_calibration(file, source, statistics_of(Q, X), **{key: value})
        assert refusal(open_calibration, odd).code == "calibration-file"
    whole = write_calibration(tmp_path / "c.safetensors", source, statistics_of(Q, X)).read_bytes()
    (tmp_path / "c.safetensors").write_bytes(whole[:-1])
    truncated = refusal(open_calibration, tmp_path / "c.safetensors")
    assert truncated.code == "truncated"
    assert truncated.next_step.endswith("or calibrate again.")
    (tmp_path / "i.json").write_text('{"metadata": {}}')  # as the index of a sharded checkpoint
    error = refusal(open_calibration, tmp_path / "i.json")
    assert (error.code, error.next_step) == (
        "calibration-file",
        "Give a file that fp4convert calibrate made.",
    )
    (tmp_path / "j.json").write_text(json.dumps({"metadata": notes_for(source, parts="{}")}))
    assert "an index that names no parts" in refusal(open_calibration, tmp_path / "j.json").message


def test_parts_of_an_index_are_files_in_its_folder(tmp_path, source):
    index = tmp_path / "in" / "index.json"
    index.parent.mkdir()
    write_calibration(tmp_path / "c.safetensors", source, statistics_of(Q, X))
    os.mkfifo(index.parent / "pipe")
    for name in ("../c.safetensors", str(tmp_path / "c.safetensors"), "a\0b", ""):
        index.write_text(json.dumps({"metadata": notes_for(source, parts=json.dumps({name: ""}))}))
        assert f"names {name!r}" in refusal(open_calibration, index).message
    index.write_text(json.dumps({"metadata": notes_for(source, parts='{"pipe": ""}')}))
    assert "no regular file" in refusal(open_calibration, index).message


def write_two_parts(folder, source):
    folder.mkdir()
    files = [folder / "a.part", folder / "b.part"]
    for file, module in zip(files, (Q, DOWN), strict=True):
        write_part(
            file, dict(reversed(statistics_of(module, X, block=32).items())), part_notes(source)
        )
    return files


def test_parts_become_one_file_that_safetensors_reads(tmp_path, source):
    files, notes = write_two_parts(tmp_path / "parts", source), notes_for(source, gram="block:32")
    sha256, nbytes = join_parts(tmp_path / "c.safetensors", files, notes)
    assert nbytes == (tmp_path / "c.safetensors").stat().st_size
    expected = {**statistics_of(Q, X, block=32), **statistics_of(DOWN, X, block=32)}
    found = load_file(tmp_path / "c.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / "c.safetensors", "np") as opened:
        assert opened.metadata() == notes
    assert open_calibration(tmp_path / "c.safetensors").sha256 == sha256
    assert join_parts(tmp_path / "d.safetensors", files[::-1], notes)[0] == sha256
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["c.safetensors", "d.safetensors", "llama", "parts"]


def test_beyond_a_size_the_file_is_an_index_of_parts(tmp_path, source):
    files = write_two_parts(tmp_path / "parts", source)
    path = tmp_path / "c.safetensors"
    _, nbytes = join_parts(path, files, notes_for(source), largest_nbytes=1000)
    assert nbytes == sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    calibration = open_calibration(tmp_path / "c.safetensors")
    names = ["c-00001-of-00002.safetensors", "c-00002-of-00002.safetensors"]
    assert list(json.loads(calibration.notes["parts"])) == names
    expected = statistics_of(DOWN, X, block=32)[f"{DOWN}.input_gram"]
    assert calibration.gram(DOWN).blocks.tolist() == expected.tolist()
    (tmp_path / names[0]).write_bytes((tmp_path / "c.safetensors").read_bytes())
    assert refusal(open_calibration, tmp_path / "c.safetensors").exit_code == 2
    (tmp_path / names[0]).unlink()
    assert refusal(open_calibration, tmp_path / "c.safetensors").code == "calibration-file"


def test_a_part_of_another_calibration_is_noticed(tmp_path, source):
    files = write_two_parts(tmp_path / "parts", source)
    join_parts(tmp_path / "c.safetensors", files, notes_for(source), largest_nbytes=0)
    write_part(
        tmp_path / "c-00002-of-00002.safetensors", statistics_of(DOWN, 2 * X), part_notes(source)
    )
    assert refusal(open_calibration, tmp_path / "c.safetensors").code == "calibration-file"


@pytest.mark.parametrize(
    ("kind", "reader"),
    [("input_sq_mean", Calibration.moments), ("input_abs_mean", Calibration.mean_magnitudes)],
)
@pytest.mark.parametrize("shape", [(), (1,), (63,), (64, 1)])
def test_statistics_of_another_number_of_columns_are_refused(opened, kind, reader, shape):
    statistics = {**statistics_of(Q, X), f"{Q}.{kind}": np.ones(shape, np.float32)}
    error = refusal(reader, opened(statistics), Q)
    assert (error.code, error.exit_code) == ("calibration-values", 2)
    assert f"{Q}.{kind}" in error.message


@pytest.mark.parametrize("shape", [(64, 64), (1, 32, 64), (1, 32, 32), (3, 32, 32)])
def test_a_gram_matrix_of_other_columns_is_refused(opened, shape):
    statistics = {**statistics_of(Q, X), f"{Q}.input_gram": np.zeros(shape, np.float32)}
    error = refusal(opened(statistics).gram, Q)
    assert (error.code, error.tensor) == ("calibration-values", f"{Q}.input_gram")
    assert error.message.endswith("expected square blocks that cover 64 columns")
