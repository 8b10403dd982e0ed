"""Scales of FP8 and integer weights in blocks of many shapes."""

from __future__ import annotations

import numpy as np
import pytest
from adversarial import Float32s, generator

# rows, columns, block: per tensor, per row, square blocks that are cut, blocks of one row
LAYOUTS = [
    (5, 256, (5, 256)),
    (5, 256, (1, 256)),
    (200, 300, (128, 128)),
    (37, 100, (32, 32)),
    (6, 300, (1, 128)),
    (4, 77, (3, 7)),
]


EVERY_LAYOUT = pytest.mark.parametrize(
    ("rows", "columns", "block"), LAYOUTS, ids=lambda value: str(value).replace(" ", "")
)


def some_scales(rows: int, columns: int, block: tuple[int, int]) -> Float32s:
    """Scales of any size, subnormals, ones that make subnormals or infinity, and negative ones."""
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    rng = generator(20, rows, columns)
    chosen = np.ldexp(rng.normal(size=shape), rng.integers(-145, 119, shape))
    return np.where(rng.random(shape) < 0.5, rng.lognormal(-6, 1, shape), chosen).astype(np.float32)


def same(found: Float32s, expected: Float32s) -> None:
    """Equal bits, any NaN for a NaN."""
    both_nan = np.isnan(found) & np.isnan(expected)
    assert found.shape == expected.shape
    assert ((found.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()
