"""kernels/descend.c at every level of instructions, and kernels/descend.cu on the host, byte by
byte beside descent.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from adversarial import around_midpoints, block_amaxes
from cpu_levels import unaligned_bytes
from ptx import SOURCE_OR_PTX, every_backend

from fp4convert.numerics import codec, descent
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Quantized

BOTH = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])


@pytest.fixture(scope="module", params=SOURCE_OR_PTX)
def levels(request, tmp_path_factory):
    """Backends by what they are."""
    return every_backend(tmp_path_factory.mktemp("levels"), request.param, (False,))


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
@pytest.mark.sweep(4)
def test_every_level_gives_the_bytes_of_the_reference(fmt, rows, columns, width, levels):
    """Also rows that fill no vector, a last block of H that reaches beyond the columns, and codes
    that lie anywhere.
    """
    x = np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
    h = second_moments(-(-columns // width), width, columns)
    for rule in (fmt.scale_rules[0], fmt.default_rule):
        q = codec.quantize(x, fmt, rule)
        for passes in (0, 1, 3):
            check(levels, x, q, h, passes)
        packed, scales = unaligned_bytes(q.packed), unaligned_bytes(q.block_scales)
        found = check(levels, x, replace(q, packed=packed, block_scales=scales), h, 2)
        assert bytes(found.packed) != bytes(q.packed)


@BOTH
def test_rows_are_taken_in_panels(fmt, levels, monkeypatch):
    monkeypatch.setattr(descent, "panel_rows", lambda width: 16)
    x = np.random.default_rng(0).standard_normal((50, 96), dtype=np.float32)
    check(levels, x, codec.quantize(x, fmt, "mse"), second_moments(3, 32, 1), 3)


@BOTH
@pytest.mark.sweep(2)
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
def test_a_row_that_would_cost_more_stays_as_it_came_in(fmt, levels):
    """Where float32 does not hold the pulls, a second descent takes codes that are no gain."""
    x = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
    h = (np.eye(64) + 1e8)[None].astype(np.float32)
    q = descent.descend(x, codec.quantize(x, fmt, "mse"), h, 3)
    found = check(levels, x, q, h, 3)
    before, after = (codec.dequantize(each).astype(np.float64) for each in (q, found))
    costs = [((x - y) @ h[0].astype(np.float64) * (x - y)).sum(1) for y in (before, after)]
    changed = (before != after).any(1)
    assert 0 < changed.sum() < 40
    assert (costs[1][changed] < costs[0][changed]).all()


@BOTH
def test_targets_beside_midpoints(fmt, levels):
    """Where a quotient that is rounded twice gives the other code; columns of any weight."""
    diagonal = np.ones(64, np.float32)
    diagonal[::2] = np.random.default_rng(1).choice([3, 7, 10, 0.1], 32)
    for amax in (2688.0, 0.4371339):
        x = around_midpoints(block_amaxes("F32", amax, 256), "F32", fmt, "mse", amax)
        x = x.reshape(-1, 64)
        q = codec.quantize(x, fmt, "mse", amax)
        zeros = replace(q, packed=memoryview(bytes(len(q.packed))))
        for codes in (q, zeros):
            check(levels, x, codes, np.diag(diagonal)[None], 1)


def test_of_two_scales_that_cost_as_little_the_lower_is_tried_first(levels):
    """The one half gains 25 and loses 21, the double gains 4."""
    x, codes, diagonal = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.uint8), np.ones(32)
    x[0, :2], codes[0, 1], diagonal[0] = (0.25, 8), 7, 400
    packed = codec.pack(codes).reshape(-1).data
    q = Quantized(MXFP4, x.shape, packed, memoryview(b"\x7f"), None)
    found = check(levels, x, q, np.diag(diagonal.astype(np.float32))[None], 1)
    assert bytes(found.block_scales) == b"\x7e"


@BOTH
def test_blocks_of_h_that_do_not_fit_are_refused(fmt, levels):
    x = np.zeros((2, 64), np.float32)
    q = codec.quantize(x, fmt, "mse")
    for shape in ((1, 32, 32), (2, 40, 40), (1, 64, 32), (3, 32, 32)):
        with pytest.raises(ValueError, match="expected blocks of n columns that cover 64"):
            levels[max(levels)].descend(x, q, np.ones(shape, np.float32), 1)
    with pytest.raises(ValueError, match="multiplier"):
        levels[min(levels)].descend(
            x, replace(q, kind="divisor"), np.ones((1, 64, 64), np.float32), 1
        )
