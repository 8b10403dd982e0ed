"""What errors count by the inputs of a linear layer, beside the mean over these inputs."""

import numpy as np
import pytest

from fp4convert.calibration.input_power import Inputs
from fp4convert.calibration.statistics import Gram

DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((40, 24)) @ DRAW.standard_normal((24, 24))  # tokens, columns
MATRIX = DRAW.standard_normal((7, 24))


def blocks_of(width: int) -> np.ndarray:
    """Blocks of the mean of x x^T along its diagonal, the last one padded with zeros."""
    short = -X.shape[1] % width
    padded = np.pad(X, ((0, 0), (0, short)))
    parts = [padded[:, first : first + width] for first in range(0, padded.shape[1], width)]
    return np.stack([part.T @ part / len(X) for part in parts]).astype(np.float32)


def power_of(parts: list[slice]) -> float:
    """The mean over tokens of |matrix x|^2 where columns of different parts know nothing of each
    other.
    """
    return sum(float(((X[:, part] @ MATRIX[:, part].T) ** 2).sum(axis=1).mean()) for part in parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("width", "parts"), [(24, [slice(24)]), (16, [slice(16), slice(16, 24)])])
def test_power_under_a_gram_matrix_is_the_mean_over_the_inputs(
    width: int, parts: list[slice], dtype: type
) -> None:
    inputs = Inputs((X**2).mean(axis=0).astype(np.float32), Gram(blocks_of(width), 24))
    assert inputs.power(MATRIX.astype(dtype)) == pytest.approx(power_of(parts), rel=1e-5)


def test_power_under_moments_takes_every_column_for_itself() -> None:
    inputs = Inputs((X**2).mean(axis=0).astype(np.float32))
    assert inputs.power(MATRIX) == pytest.approx(
        power_of([slice(one, one + 1) for one in range(24)]), rel=1e-6
    )


def test_power_without_inputs_is_that_of_the_matrix() -> None:
    assert Inputs().power(MATRIX) == pytest.approx(
        sum(value**2 for value in MATRIX.ravel().tolist())
    )
