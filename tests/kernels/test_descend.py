"""kernels/descend.c at every level of instructions, byte by byte beside descent.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_levels import every_level, unaligned_bytes

from fp4convert.numerics import codec, descent
from fp4convert.numerics.backends import cpu
from fp4convert.numerics.formats import MXFP4, NVFP4

BOTH = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    return every_level(tmp_path_factory.mktemp("levels"))


def second_moments(count, width, seed):
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((count, width, width // 3 + 1), dtype=np.float32)
    h = x @ x.swapaxes(1, 2) + 0.5 * np.eye(width, dtype=np.float32)
    return (np.tril(h) + np.tril(h, -1).swapaxes(1, 2)).astype(np.float32)


def check(levels, x, q, h, passes):
    expected = descent.descend(x, q, h, passes)
    for level, backend in levels.items():
        found = backend.descend(x, q, h, passes)
        assert bytes(found.block_scales) == bytes(expected.block_scales), level
        assert bytes(found.packed) == bytes(expected.packed), level
        assert (found.shape, found.global_scale) == (q.shape, q.global_scale)
    return expected


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(1, 32, 32), (5, 64, 64), (17, 96, 32), (33, 160, 64), (16, 224, 224), (3, 96, 128)],
)
@BOTH
def test_every_level_gives_the_bytes_of_the_reference(fmt, rows, columns, width, levels):
    """Also rows that fill no vector, a last block of H that reaches beyond the columns, and codes
    that lie anywhere.
    """
    x = np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
    h = second_moments(-(-columns // width), width, columns)
    for rule in fmt.scale_rules[:-1]:
        q = codec.quantize(x, fmt, rule)
        for passes in (0, 1, 2, 4):
            check(levels, x, q, h, passes)
        packed, scales = unaligned_bytes(q.packed), unaligned_bytes(q.block_scales)
        found = check(levels, x, replace(q, packed=packed, block_scales=scales), h, 3)
        assert bytes(found.packed) != bytes(q.packed)


@BOTH
def test_rows_are_taken_in_panels(fmt, levels, monkeypatch):
    monkeypatch.setattr(cpu, "panel_rows", lambda width: 16)
    x = np.random.default_rng(0).standard_normal((50, 96), dtype=np.float32)
    check(levels, x, codec.quantize(x, fmt, "mse"), second_moments(3, 32, 1), 3)


@BOTH
def test_what_is_beyond_float32_gives_the_same_bytes(fmt, levels):
    """Pulls that are infinite or no numbers, subnormal weights, zeros, and scales at either end."""
    chance = np.random.default_rng(0)
    x = chance.standard_normal((40, 64), dtype=np.float32)
    h = second_moments(1, 64, 2)
    hostile = (
        (x * np.float32(5e37), h),
        (x * np.float32(1e-38), h),
        (x * np.float32(1e-44), h * np.float32(1e30)),
        (x, h * np.float32(1e36)),
        (x, h * np.float32(1e-36)),
        (np.where(chance.random(x.shape) < 0.9, 0, x).astype(np.float32), h),
        ((x * np.exp(chance.normal(0, 9, x.shape))).astype(np.float32), h),
    )
    for values, moments in hostile:
        check(levels, values, codec.quantize(values, fmt, "mse"), moments, 3)
    lowest, highest = {NVFP4: (1, 126), MXFP4: (0, 252)}[fmt]
    for byte in (lowest, highest):
        q = codec.quantize(x, fmt, "mse")
        scales = np.full(len(q.block_scales), byte, np.uint8)
        found = check(levels, x, replace(q, block_scales=scales.data), h, 3)
        assert set(bytes(found.block_scales)) <= set(range(lowest, highest + 1))


@BOTH
def test_blocks_of_h_that_do_not_fit_are_refused(fmt, levels):
    x = np.zeros((2, 64), np.float32)
    q = codec.quantize(x, fmt, "mse")
    for shape in ((1, 32, 32), (2, 40, 40), (1, 64, 32), (3, 32, 32)):
        with pytest.raises(ValueError, match="expected blocks of n columns that cover 64"):
            levels[max(levels)].descend(x, q, np.ones(shape, np.float32), 1)
    with pytest.raises(ValueError, match="multiplier"):
        levels[max(levels)].descend(
            x, replace(q, kind="divisor"), np.ones((1, 64, 64), np.float32), 1
        )
