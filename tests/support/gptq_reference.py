"""GPTQ as its paper has it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def gptq_by_the_paper(w, h, steps, damping=0.05):
    """Codes by algorithm 1 of arXiv 2210.17323 with its order of columns; float64, the inverse as
    such, no lazy blocks.
    """
    columns = len(h)
    damped = h + damping * np.diag(h).mean() * np.eye(columns)
    order = np.argsort(-np.diag(h), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left, codes = w.astype(np.float64)[:, order], np.zeros(w.shape, np.uint8)
    for at, column in enumerate(order):
        step = steps[:, column * steps.shape[1] // columns].astype(np.float64)
        codes[:, column] = nearest(left[:, at] / step)
        error = (left[:, at] - E2M1[codes[:, column]] * step) / upper[at, at]
        left[:, at:] -= np.outer(error, upper[at, at:])
    return codes


def nearest(q):
    """Codes by ml_dtypes' own conversion; a negative quotient sets the sign."""
    magnitude = (
        np.minimum(np.abs(q), 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        & 7
    )
    return np.where(q < 0, magnitude | 8, magnitude)
