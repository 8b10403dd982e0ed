"""Move the targets of rounding where the inputs are not the original's.

Behind rounded layers, or rounded itself, an input is x^ in place of x; r is what the residual
stream lacks by then.  The nearest outputs to the original's have the weights

  W* = argmin E|W x + r - W* x^|^2 + lambda |W* - W|^2
     = W + (W E[(x - x^) x^^T] + E[r x^^T]) (H + lambda)^-1,  H = E[x^ x^^T]

which is (W C + R + lambda W) (H + lambda)^-1 with C = E[x x^^T] and R = E[r x^^T].
Source: GPTAQ (arXiv 2504.02692), Qronos (2505.11695) and residual compensation (2604.07955).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp4convert.numerics.codec import Float32s, as_floats, as_matrix
from fp4convert.numerics.formats import DAMPING
from fp4convert.numerics.matrices import FetchedWeights, Matrix, Weights, row_panels

if TYPE_CHECKING:
    import torch


class Correction(NamedTuple):
    """How targets differ from the weights; one of the two is None.

    inputs  (k, n, n) float32, along the diagonal: W* = W + W inputs, for all layers of an input
    change  (rows, columns) float32: W* = W + change
    """

    inputs: Float32s | None
    change: Float32s | None


def over_gram(pull: torch.Tensor, h: torch.Tensor, columns: int) -> torch.Tensor:
    """Return pull (H + lambda)^-1, lambda a share of H's mean diagonal.

    pull  (k, m, n)
    h     (k, n, n), of a linear layer with so many columns
    """
    import torch

    damped = h.double()
    damping = DAMPING * float(damped.diagonal(dim1=1, dim2=2).sum()) / columns
    if not damping:
        return torch.zeros_like(pull)  # the inputs are all 0
    damped.diagonal(dim1=1, dim2=2).add_(damping)
    lower = torch.linalg.cholesky(damped)
    del damped  # as large as H, twice
    return torch.cholesky_solve(pull.double().mT, lower).mT.float()


def retargeted(weights: Weights, correction: Correction | None) -> Weights:
    """Return the targets of weights: what rounding shall come near."""
    if correction is None:
        return weights
    inputs, change = correction

    def fetch(first: int, last: int) -> Matrix:
        x = as_floats(weights.rows(first, last))
        return as_matrix(x + (_times(x, inputs) if change is None else change[first:last]))

    return FetchedWeights("F32", weights.shape, fetch)


def _times(x: Float32s, blocks: Any) -> Float32s:
    """Multiply rows with blocks along a diagonal, in one thread of torch."""
    import torch

    count, width, _ = blocks.shape
    padded = np.zeros((len(x), count * width), np.float32)
    padded[:, : x.shape[1]] = x
    parts = torch.from_numpy(padded).view(len(x), count, width).transpose(0, 1)
    made = torch.bmm(parts, torch.from_numpy(blocks)).transpose(0, 1).reshape(len(x), -1)
    found: Float32s = made[:, : x.shape[1]].numpy()
    return found


def largest_of(targets: Weights) -> float:
    """Return the largest magnitude of targets."""
    panels = (as_floats(targets.rows(*panel)) for panel in row_panels(targets.shape))
    return max((float(np.abs(x).max(initial=0)) for x in panels), default=0.0)
