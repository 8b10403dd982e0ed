"""Statistics that no inputs have: each alone, by hand; and a file of them, before anything is
written.
"""

from __future__ import annotations

import numpy as np
import pytest
from calibrations import write_calibration
from checkpoints import LAYER, write_llama
from made_up_inputs import calibrate, correlated, inputs_of
from refusals import refused

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.calibration.plausibility import InputStatistics, contradiction, not_a_gram
from fp4convert.errors import InputError
from fp4convert.storage.open import open_source

X = np.array(
    [[1, -2, 0], [3, 0, 0], [-1, 2, 0], [1, 4, 0]], np.float32
)  # four tokens of three columns
RIGHT = InputStatistics(
    tokens=4,
    amax=4.0,
    largest=np.array([3, 4, 0], np.float32),
    magnitudes=np.array([1.5, 2, 0], np.float32),
    squares=np.array([3, 6, 0], np.float32),
    diagonal=np.array([3, 6, 0, 0], np.float32),  # of blocks of two
)
DOWN, QUERY = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj"


def test_what_inputs_have_is_possible():
    assert contradiction(RIGHT) is None
    # a file need not say everything
    for name in ("tokens", "amax", "magnitudes", "squares", "diagonal"):
        assert contradiction(RIGHT._replace(**{name: None})) is None
    nothing = np.zeros(3, np.float32)
    assert contradiction(InputStatistics(0, 0.0, nothing, nothing, nothing, nothing)) is None


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e15])
def test_sums_in_float32_are_possible_at_any_size(size):
    x = (correlated(64, 3000) * np.float32(size)).astype(np.float32)
    squares = np.square(x).mean(0, dtype=np.float32)  # below 1e-19 of few digits, or none
    magnitudes = np.abs(x).mean(0, dtype=np.float32)
    amax = float(np.abs(x).max())
    seen = InputStatistics(3000, amax, np.abs(x).max(0), magnitudes, squares, squares)
    assert contradiction(seen) is None


@pytest.mark.parametrize(
    ("kind", "words", "changes"),
    [
        ("input_amax", "is 3, but input_channel_amax reaches 4", {"amax": 3.0}),
        ("tokens", "is 0, but inputs reach 4", {"tokens": 0}),
        ("input_abs_mean", "is 4.5 in column 1, above 4", {"magnitudes": [1.5, 4.5, 0]}),
        ("input_abs_mean", "is 0.5 in column 0, below 0.75", {"magnitudes": [0.5, 2, 0]}),
        ("input_sq_mean", "is 17 in column 1, above 16", {"squares": [3, 17, 0]}),
        ("input_sq_mean", "is 0 in column 0, below 2.25", {"squares": [0, 6, 0]}),
        ("input_sq_mean", "is 2.25 in column 2, above 0", {"squares": [3, 6, 2.25]}),
        (
            "input_sq_mean",
            "is 5 in column 1, below 6.25, the square of input_abs_mean",
            {"magnitudes": [1, 2.5, 0], "squares": [3, 5, 0]},
        ),
        ("input_gram", "has 0 in its diagonal at column 0, expected 3", {"diagonal": [0, 0, 0, 0]}),
        (
            "input_gram",
            "has 5.5 in its diagonal at column 1, expected 6",
            {"diagonal": [3, 5.5, 0, 0]},
        ),
        (
            "input_gram",
            "has 1 in its diagonal at column 3, expected 0, as in padding",
            {"diagonal": [3, 6, 0, 1]},
        ),
    ],
)
def test_what_no_inputs_have_is_named(kind, words, changes):
    changed = {
        name: np.array(value, np.float32) if isinstance(value, list) else value
        for name, value in changes.items()
    }
    found = contradiction(RIGHT._replace(**changed))
    assert found is not None
    assert found[0] == kind
    assert found[1].startswith(words)


def test_a_gram_matrix_and_what_is_none():
    blocks = np.zeros((2, 2, 2), np.float32)
    blocks[0], blocks[1, 0, 0] = X[:, :2].T @ X[:, :2] / 4, 0.25
    assert not_a_gram(blocks) is None
    for place, value, words in (
        ((0, 1, 0), 2.0, "and a different value across the diagonal"),
        ((0, 0, 1), -5.0, "more than its diagonal allows"),
        ((1, 0, 1), 0.1, "more than its diagonal allows"),
    ):
        changed = blocks.copy()
        changed[place] = value
        assert words in (not_a_gram(changed) or "")
    # more rows than are compared at once, and no positive definite matrix
    wide = correlated(1200, 100)
    gram = (wide.T @ wide / 100)[None]
    assert not_a_gram(gram) is None
    large = 2 * np.sqrt(gram[0, 1100, 1100] * gram[0, 1150, 1150])
    gram[0, 1100, 1150] = gram[0, 1150, 1100] = large
    assert "at [0, 1100, 1150], more than" in (not_a_gram(gram) or "")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("input_gram", np.zeros((1, 128, 128), np.float32)),
        ("input_sq_mean", np.full(128, 1e6, np.float32)),
        ("input_sq_mean", np.zeros(128, np.float32)),
        ("input_amax", np.float32(1e-3)),
        ("tokens", np.int64(-1)),
        ("tokens", np.float32(512)),
    ],
)
def test_a_file_of_impossible_statistics_ends_before_anything_is_written(
    tmp_path, method, kind, value
):
    source = write_llama(tmp_path / "source")
    file = calibrate(tmp_path / "c.safetensors", source, **{f"{DOWN}.{kind}": np.asarray(value)})
    rule = ("--scale-rule", "importance") if method != "gptq" else ()
    error = refused(source, tmp_path, "--method", method, *rule, "--calibration", file)
    assert (error["code"], error["tensor"]) == ("calibration-values", f"{DOWN}.{kind}")
    assert error["next"].startswith("Calibrate again")


def test_a_gram_matrix_that_is_none_is_told_before_anything_is_written(tmp_path):
    source = write_llama(tmp_path / "source")
    x = inputs_of(source)[QUERY].astype(np.float64)
    gram = (x.T @ x / len(x)).astype(np.float32)[None]
    gram[0, 3, 40] += 1e3
    file = calibrate(tmp_path / "c.safetensors", source, **{f"{QUERY}.input_gram": gram})
    error = refused(source, tmp_path, "--method", "gptq", "--calibration", file)
    assert (error["code"], error["tensor"]) == ("calibration-values", f"{QUERY}.input_gram")
    assert "[0, 3, 40]" in error["message"]


def test_input_scales_are_not_taken_from_impossible_statistics(tmp_path):
    source = write_llama(tmp_path / "source")
    file = calibrate(tmp_path / "c.safetensors", source, **{f"{DOWN}.input_amax": np.float32(1e-3)})
    error = refused(source, tmp_path, "--activations", 4, "--input-scale", file)
    assert error["tensor"] == f"{DOWN}.input_amax"


@pytest.mark.parametrize(
    ("tokens", "saliency", "bad"),
    [
        (np.array([3, -1]), [0.5, 0], "expert_tokens"),
        (np.array([3.0, 0], np.float32), [0.5, 0], "expert_tokens"),
        (np.array([3, 0]), [0.5, 0.1], "expert_saliency"),
        (np.array([3, 0]), [np.nan, 0], "expert_saliency"),
    ],
)
def test_experts_that_cannot_be(tmp_path, tokens, saliency, bad):
    source = open_source(str(write_llama(tmp_path / "source")))
    stored = np.array(saliency, np.float32)
    tensors = {"m.mlp.expert_tokens": tokens, "m.mlp.expert_saliency": stored}
    file = write_calibration(tmp_path / "c.safetensors", source, tensors)
    with pytest.raises(InputError) as caught:
        open_calibration(file).experts("m.mlp")
    assert (caught.value.code, caught.value.tensor) == ("calibration-values", f"m.mlp.{bad}")
