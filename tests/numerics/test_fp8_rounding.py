"""Scales of FP8 and MXFP8: the rules, and that mse finds the least error of all that there are.

Errors are those of torch's own FP8; the candidates are typed here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adversarial import Float32s, generator

from fp4convert.errors import InputError, NumericError
from fp4convert.numerics import fp8_rounding
from fp4convert.numerics.backends import cpu
from fp4convert.numerics.codec import as_matrix
from fp4convert.numerics.formats import FP8, MXFP8, Format
from fp4convert.numerics.fp8_rounding import Block, find_scales, round_to_fp8
from fp4convert.numerics.matrices import InMemory

FACTORS = (1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)


def some_weights(rows: int = 70, columns: int = 288) -> Float32s:
    chance = generator(50)
    values = chance.standard_t(3, (rows, columns)) * np.exp2(chance.integers(-9, 3, (rows, 1)))
    values[3] = 0
    return values.astype(np.float32)


def errors_of(x: Float32s, scale: float) -> float:
    wide = torch.from_numpy(np.ascontiguousarray(x))
    codes = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return float((wide.double() - (codes.float() * scale).double()).square().sum())


def scales_of(x: Float32s, block: Block, fmt: Format, rule: str) -> Float32s:
    return find_scales(InMemory(as_matrix(x)), block, fmt, rule)


def blocks_of(x: Float32s, block: Block) -> list[tuple[tuple[int, int], Float32s]]:
    height, width = block
    places = np.ndindex(-(-len(x) // height), -(-x.shape[1] // width))
    return [
        ((row, column), x[row * height :, column * width :][:height, :width])
        for row, column in places
    ]


@pytest.mark.parametrize("block", [(70, 288), (1, 288), (64, 128)])
def test_fp8_of_rule_amax_and_of_least_error(block: Block) -> None:
    x = some_weights()
    plain, best = (scales_of(x, block, FP8, rule) for rule in ("amax", "mse"))
    moved = 0
    for place, own in blocks_of(x, block):
        amax = np.float32(np.abs(own).max())
        scale = amax / np.float32(448) if amax else np.float32(1)
        assert plain[place] == scale
        costs = [errors_of(own, float(scale * np.float32(factor))) for factor in FACTORS]
        expected = scale * np.float32(FACTORS[int(np.argmin(costs))]) if amax else scale
        assert best[place] == expected
        moved += expected != scale
    assert moved


def test_mxfp8_of_least_error_is_the_best_power_of_two() -> None:
    x = some_weights()
    best = scales_of(x, (1, 32), MXFP8, "mse")
    found = {rule: scales_of(x, (1, 32), MXFP8, rule) for rule in ("floor", "even", "ceil")}
    for place, own in blocks_of(x, (1, 32)):
        if not own.any():
            assert best[place] == 2.0**-127
            continue
        exponents = range(-30, 4)
        costs = [errors_of(own, 2.0**exponent) for exponent in exponents]
        assert best[place] == 2.0 ** exponents[int(np.argmin(costs))]
        assert errors_of(own, float(best[place])) <= min(
            errors_of(own, float(scales[place])) for scales in found.values()
        )
    assert any((best != scales).any() for scales in found.values())


@pytest.mark.parametrize("shift", [-100, 90])
def test_least_error_at_any_size(shift: int) -> None:
    x = some_weights(8)
    for fmt, block in ((FP8, (1, 288)), (MXFP8, (1, 32))):
        near, far = (
            scales_of(values, block, fmt, "mse")
            for values in (x, np.ldexp(x, shift).astype(np.float32))
        )
        is_used = np.abs(x).reshape(8, -1, block[1]).max(axis=2) > 0
        assert (np.ldexp(near, shift) == far)[is_used].all()


def test_rows_are_rounded_from_the_first_on() -> None:
    x = some_weights()
    scales = scales_of(x, (1, 32), MXFP8, "ceil")
    values = round_to_fp8(InMemory(as_matrix(x)), scales, (1, 32))
    wide = torch.from_numpy(scales).repeat_interleave(32, 1)
    expected = (torch.from_numpy(x) / wide).to(torch.float8_e4m3fn).float() * wide
    assert (values == expected.numpy()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    x = some_weights()
    x[69, 287] = bad
    with pytest.raises(NumericError):
        scales_of(x, (64, 128), FP8, "mse")


def test_rules_of_other_formats_are_refused() -> None:
    for fmt, rule in ((FP8, "floor"), (MXFP8, "amax")):
        with pytest.raises(InputError, match=fmt.name):
            scales_of(some_weights(), (1, 32), fmt, rule)


@pytest.mark.parametrize("block", [(70, 288), (1, 288), (64, 128), (1, 32)])
def test_panels_make_no_difference(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    x = some_weights()
    fmt = MXFP8 if block == (1, 32) else FP8
    expected = [scales_of(x, block, fmt, rule) for rule in fmt.scale_rules]
    whole = round_to_fp8(InMemory(as_matrix(x)), expected[-1], block)
    for module in (fp8_rounding, cpu):
        monkeypatch.setattr(
            module,
            "row_panels",
            lambda shape: ((first, min(first + 13, shape[0])) for first in range(0, shape[0], 13)),
        )
    for rule, scales in zip(fmt.scale_rules, expected, strict=True):
        assert (scales_of(x, block, fmt, rule) == scales).all()
    again = round_to_fp8(InMemory(as_matrix(x)), expected[-1], block)
    assert again.tobytes() == whole.tobytes()
