"""Weights that go through FP8 on their way to four bits: torch's own values, whatever rows are
asked for, in little memory.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from fp4convert.checkpoint.encodings.through_fp8 import rounded_to_fp8
from fp4convert.numerics.matrices import Matrix


class Wide:
    """Rows of float32 that take no time to make."""

    dtype = "F32"

    def __init__(self, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self._values = values
        self.shape: tuple[int, int] = values.shape

    def rows(self, first: int, last: int) -> Matrix:
        return Matrix(
            self._values[first:last].reshape(-1).view(np.uint8).data,
            "F32",
            (last - first, self.shape[1]),
        )


@pytest.mark.parametrize("shape", [(1, 40_000), (130, 4_097), (257, 2_048)])
def test_weights_that_go_through_fp8_are_torchs_own_under_the_largest_of_each_block(shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    through = rounded_to_fp8(Wide(values))
    expected = np.empty_like(values)
    for top in range(0, shape[0], 128):
        for left in range(0, shape[1], 128):
            block = torch.from_numpy(values[top : top + 128, left : left + 128])
            scale = block.abs().max() / 448
            expected[top : top + 128, left : left + 128] = (block / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    for first, last in {(0, shape[0]), (0, 1), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0])}:
        found = np.frombuffer(through.rows(first, last).data, np.float32)
        assert np.array_equal(found, expected[first:last].reshape(-1))


def test_going_through_fp8_holds_no_more_than_its_rows_and_a_little():
    through = rounded_to_fp8(Wide(np.ones((2, 1 << 20), np.float32)))
    tracemalloc.start()
    try:
        through.rows(0, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (4 + 16) << 20
