"""GPTQ: a column compensates the errors of earlier columns.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1, with its order of columns: the largest
diagonal first.  Block scales are those of the given weights.  numerics/descent.py refines the
result under the same H.
One thread of torch does this part, on a GPU that GPU: the same bytes from any number of workers.
The algebra knows no file, no module and no dialect; makers/methods/gptq.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import DeviceError, NumericError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Bytes, Float32s
from fp4convert.numerics.formats import DAMPING, E2M1_MAX

ESCALATION = 4  # times as much where the matrix is not positive definite
DAMPING_LIMIT = 1.0  # what needs as much is no matrix of second moments
LAZY_COLUMNS = 64  # whose errors reach the columns behind them together; MOST in compensate.c
INVERSE_COLUMNS = 1024  # of the inverse that are found at once
PANEL_ELEMENTS = 8 << 20  # of weights that are rounded together
PANEL_ELEMENT_NBYTES = 16  # weights, twice while they are put in order; codes, steps and errors
GRAM_ELEMENT_NBYTES = 20  # as read in float32, and twice in float64

Tensor = Any  # torch.Tensor; torch is imported where it is needed


class Factor(NamedTuple):
    """A Gram matrix, or the blocks along its diagonal, for GPTQ.

    upper    (k, n, n) float32: U with U^T U the inverse, of the columns in their order
    columns  (k, n): the column at every place; numbers beyond the last column are padding
    damped   (k, n, n) float32: H with its damping, symmetric to the last bit
    """

    upper: Tensor
    columns: Tensor
    damped: Float32s


def factorize(blocks: Float32s, columns: int, device: str, share: float = DAMPING) -> Factor:
    """Return the Cholesky factor of the inverse of mean x x^T, damped.

    Its columns are in descending order of their diagonal.
    blocks   (k, n, n); a column that saw nothing but zeros is rounded to the nearest
    columns  of the linear layer; k * n or fewer
    share    of the mean diagonal, which is added to it
    Raises   NumericError where the matrix is not positive definite with all the damping that is
             allowed
    Formula  with J the reversal: J H J = L L^T, so that H^-1 = U^T U for U = J L^-1 J
    """
    import torch

    # J H J: rows and columns in ascending order of the diagonal.
    diagonal = np.diagonal(blocks, axis1=1, axis2=2)
    order = np.argsort(-diagonal, axis=1, kind="stable")
    reverse = order[:, ::-1]
    rows = np.take_along_axis(blocks, reverse[:, :, None], 1)
    h = torch.from_numpy(np.take_along_axis(rows, reverse[:, None, :], 2))
    del rows  # as large as the Gram matrix, and needed no more
    h = h.to(device, torch.float64)
    own = h.diagonal(dim1=1, dim2=2)
    mean = float(own.sum()) / columns
    own[own == 0] = 1
    lower, added = _cholesky(h, own, mean, share)
    del h
    # L^-1, some columns at a time; then U, back in descending order.
    upper = torch.empty(lower.shape, dtype=torch.float32, device=device)
    n = lower.shape[1]
    for first in range(0, n, INVERSE_COLUMNS):
        last = min(first + INVERSE_COLUMNS, n)
        unit = torch.eye(n - first, last - first, dtype=torch.float64, device=device)
        unit = unit.expand(len(lower), -1, -1)
        part = torch.linalg.solve_triangular(lower[:, first:, first:], unit, upper=False)
        upper[:, :first, first:last] = 0
        upper[:, first:, first:last] = part
    del lower  # as large as two of what follows
    places = order + np.arange(len(order))[:, None] * n
    damped = _damp(blocks, added.cpu().numpy() * mean)
    return Factor(upper.flip(1, 2), torch.from_numpy(places).to(device), damped)


def _damp(blocks: Float32s, added: NDArray[np.float64]) -> Float32s:
    """Add the damping to the diagonals; 1 for a diagonal of 0.

    A column with zeros alone has the damping, so that it decides no block scale.
    """
    damped = blocks + blocks.swapaxes(1, 2)
    damped *= np.float32(0.5)
    at = np.arange(blocks.shape[1])
    diagonal = (damped[:, at, at] + added[:, None]).astype(np.float32)
    damped[:, at, at] = np.where(diagonal > 0, diagonal, np.float32(1))
    return damped


def _cholesky(h: Tensor, diagonal: Tensor, mean: float, share: float) -> tuple[Tensor, Tensor]:
    """Return L of the damped matrices; damp those without L more.

    Returns  L, and the shares of damping
    """
    import torch

    damping = torch.full((len(h),), share, dtype=h.dtype, device=h.device)
    added = torch.zeros_like(damping)
    while True:
        diagonal += ((damping - added) * mean)[:, None]
        added = damping.clone()
        lower, failed = torch.linalg.cholesky_ex(h)
        bad = failed != 0
        if not bad.any():
            return lower, added
        damping[bad] *= ESCALATION
        if float(damping.max()) > DAMPING_LIMIT:
            detail = f"is not positive definite, even with {float(added.max()):.2f}"
            raise NumericError("calibration-gram", f"{detail} of its mean diagonal added")


def round_columns(x: Float32s, steps: Float32s, factor: Factor) -> Bytes:
    """Round weights column by column; later columns compensate errors.

    x        (rows, columns) float32
    steps    (rows, columns / block_size) float32: the value of code 1 in a block
    Returns  (rows, columns) codes
    Raises   NumericError if errors grow beyond float32
    """
    import torch

    upper, places, _ = factor
    (k, n), (rows, columns), device = places.shape, x.shape, upper.device
    # Weights and steps, transposed and in the order of the factor.
    w = torch.zeros((k * n, rows), dtype=torch.float32, device=device)
    w[:columns] = torch.from_numpy(x).to(device).T
    w = w[places.reshape(-1)].reshape(k, n, rows)
    wide = torch.from_numpy(steps).to(device).T.contiguous()
    block_of = (places // (columns // steps.shape[1])).clamp(max=steps.shape[1] - 1)
    codes = torch.empty((k, n, rows), dtype=torch.uint8, device=device)
    round_group = _round_group if device.type == "cpu" else _round_group_on_gpu
    for first in range(0, n, LAZY_COLUMNS):
        last = min(first + LAZY_COLUMNS, n)
        errors = torch.empty((k, last - first, rows), dtype=torch.float32, device=device)
        round_group((w, upper, wide, block_of, errors, codes), first, last)
        w[:, last:].baddbmm_(upper[:, first:last, last:].mT, errors, alpha=-1)
    if not torch.isfinite(w).all():
        raise NumericError("calibration-gram", "makes errors grow beyond float32")
    found = torch.empty((k * n, rows), dtype=torch.uint8, device=device)
    found[places.reshape(-1)] = codes.reshape(k * n, rows)
    return np.ascontiguousarray(found[:columns].T.cpu().numpy())


def _round_group(tensors: tuple[Tensor, ...], first: int, last: int) -> None:
    """Round some columns of all blocks by kernels/compensate.c."""
    Cpu().compensate([tensor.numpy() for tensor in tensors], range(first, last))


def _round_group_on_gpu(tensors: tuple[Tensor, ...], first: int, last: int) -> None:
    """Round some columns of all blocks, one after the other, in torch."""
    import torch

    w, upper, wide, block_of, errors, codes = tensors
    for at in range(first, last):
        column, step = w[:, at], wide[block_of[:, at]]
        q = column / step
        magnitude, is_negative = nearest(q), q < 0
        code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), magnitude / 2 + 4)
        codes[:, at] = code + 8 * is_negative
        value = torch.where(is_negative, -magnitude, magnitude) * step
        error = (column - value) / upper[:, at, at, None]
        errors[:, at - first] = error
        w[:, at + 1 : last].addcmul_(upper[:, at, at + 1 : last, None], error[:, None], value=-1)


def nearest(q: Tensor) -> Tensor:
    """Round to the magnitudes of E2M1, half to even, saturating.

    Equals codec.encode_e2m1 but for the sign.
    """
    import torch

    magnitude = q.abs().clamp_(max=E2M1_MAX)
    # Between neighbours, above each power of two.
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(magnitude / unit).mul_(unit)


def held_nbytes(columns: int, width: int) -> int:
    """Return the memory of a worker at a linear layer.

    columns  of the layer
    width    of the blocks of its Gram matrix
    """
    count = -(-columns // width)
    gram_nbytes = GRAM_ELEMENT_NBYTES * count * width * width
    return gram_nbytes + PANEL_ELEMENT_NBYTES * max(PANEL_ELEMENTS, columns)


def torch_device(name: str) -> str:
    """Return torch's device for a backend.

    Raises DeviceError if torch cannot use that GPU
    """
    import torch

    device = name.partition(",")[0]
    if device != "cpu" and not torch.cuda.is_available():
        detail = f"--method gptq runs in torch on {device}"
        detail += f", and torch {torch.__version__} sees no GPU"
        raise DeviceError("no-device", detail, "Install torch with CUDA, or: --device cpu.")
    return device


@contextmanager
def explained(what: str, module: str) -> Iterator[None]:
    """Name the matrix in errors.

    A GPU that is full is a DeviceError.
    """
    import torch

    try:
        yield
    except NumericError as error:
        detail = f"{what} {error.message}; expected the mean of x x^T over tokens"
        raise NumericError(error.code, detail, "Calibrate again, with more text.", module) from None
    except torch.cuda.OutOfMemoryError as error:
        detail = f"{what} does not fit into the GPU's free memory"
        detail += f": {str(error).splitlines()[0][:200]}"
        next_step = "Use --workers 1, --device cpu, or calibrate with --gram block:128."
        raise DeviceError("device-memory", detail, next_step) from None


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in a worker.

    Workers do not wait for one another, and the number of threads changes no byte.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
