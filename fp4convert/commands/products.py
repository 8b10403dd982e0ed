"""multiply_tensor(): vectors times matrices that stay packed.

Decides what fits together; on a GPU kernels/gemv.cu multiplies, on the CPU NumPy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4convert.commands.tensors import (
    check_here,
    check_there,
    dequantize_tensor,
    gpu_of,
    kind_of,
    matrix_of,
    plain_tensor,
    working_at,
)
from fp4convert.errors import InputError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.backends.entry_points import ENTRIES
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.matrices import Quantized

if TYPE_CHECKING:
    from fp4convert.numerics.backends.device_arrays import DeviceArray, DeviceQuantized, DeviceWork

MAX_MATRICES = 65535  # of a grid, as its rows
MAX_VECTORS = MAX_MATRICES * ENTRIES["gemv"].down


def multiply_tensor(
    quantized: Quantized | DeviceQuantized | Sequence[Quantized] | Sequence[DeviceQuantized], x: Any
) -> Any:
    """Return the products of vectors with a matrix, x W^T, from its codes.

    quantized  one, or a list of a format, shape and kind on one device: a batch, such as experts
    x          (vectors, columns), of a list (matrices, vectors, columns). On the CPU as
               quantize_tensor takes matrices, or a Quantized; on a GPU bf16 or fp16, row-major, or
               a DeviceQuantized in nvfp4 with a multiplier; of a list a list of these
    Returns    (vectors, rows), of a list (matrices, vectors, rows). On the CPU float32: products
               of float32 weights, added up in float32 in NumPy's order. On a GPU float16 in an
               array of CuPy, made on the stream of x as in quantize_tensor: added up in float32,
               rounded once, Inf from 65520 on. Before that either is off by at most about
               columns * 2^-24 of the sum of magnitudes
    Raises     InputError for anything else; on a GPU for columns that are no multiple of 64
    """
    is_batch = isinstance(quantized, (list, tuple))
    batch: list[Any] = list(quantized) if isinstance(quantized, (list, tuple)) else [quantized]
    device = _check_batch(batch)
    if device is None:
        given = _split(x, len(batch)) if is_batch else [x]
        products = [_multiply_here(q, own) for q, own in zip(batch, given, strict=True)]
        return np.stack(products) if is_batch else products[0]
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    is_packed = hasattr(first, "packed")
    owner = first.packed if is_packed else x
    if gpu_of(owner) is None:
        found = f"the matrix is on a GPU, and x, a {kind_of(x)}, is not"
        step = "Of a batch x is one tensor, (matrices, vectors, columns): torch.stack(x)."
        raise InputError("tensor-device", f"{found}; expected one device", step)
    with working_at(owner, device) as work:
        if is_packed:
            return work.multiply(batch, *_packed_vectors(batch, x, is_batch))
        return work.multiply(batch, *_plain_vectors(work, batch, x, is_batch))


def _check_batch(batch: list[Any]) -> int | None:
    """Return the number of their GPU; None on the CPU, with flat parts."""
    if not batch:
        raise InputError("gemv-shape", "no matrix is given; expected one or more")
    places: dict[int | None, str] = {}
    for place, q in enumerate(batch):
        if isinstance(q, Quantized):
            batch[place] = check_here(q)
            places[None] = "the CPU"
        else:
            device = check_there(q)
            places[device] = f"cuda:{device}"
    if len(places) > 1:
        found = f"the matrices are on {' and '.join(places.values())}"
        raise InputError("tensor-device", f"{found}; expected one device")
    kinds = dict.fromkeys(f"{q.format.name} {q.shape} {q.kind}" for q in batch)
    if len(kinds) > 1:
        found = f"the matrices are {', '.join(list(kinds)[:3])}"
        raise InputError("gemv-shape", f"{found}; expected one format, shape and kind")
    return next(iter(places))


def _split(x: Any, matrices: int) -> list[Any]:
    """Return the vectors of each matrix."""
    try:
        given = list(x)
    except TypeError:  # no sequence, or of no dimension
        raise _misshapen(f"x is a {kind_of(x)}", matrices) from None
    if len(given) != matrices:
        raise _misshapen(f"x is for {len(given)} matrices", matrices)
    return given


def _multiply_here(q: Quantized, x: Any) -> Float32s:
    """Multiply on the CPU, panel by panel of the matrix."""
    if isinstance(x, Quantized):
        values: Float32s = dequantize_tensor(x)
    else:
        if gpu_of(x) is not None:
            found = f"the matrix is on the CPU, and x is on cuda:{gpu_of(x)}"
            raise InputError("tensor-device", f"{found}; expected one device")
        given = matrix_of(x, q.format)
        stored = np.frombuffer(given.data, FLOAT_DTYPES[given.dtype])
        values = stored.reshape(given.shape).astype(np.float32)
    _check_columns(q, values.shape[1])
    panels = (
        np.frombuffer(panel, np.float32).reshape(-1, q.shape[1])
        for panel in Cpu().dequantize_panels(q, "F32")
    )
    with np.errstate(all="ignore"):  # vectors may hold what they like
        return np.concatenate([values @ panel.T for panel in panels], axis=1)


def _plain_vectors(
    work: DeviceWork, batch: Sequence[Any], x: Any, is_batch: bool
) -> tuple[DeviceArray, tuple[int, ...]]:
    """Return bf16 or fp16 vectors, and the shape of their numbers."""
    found_there = work.look_at(plain_tensor(x))
    shape, dtype = found_there.shape, found_there.dtype
    if len(shape) != 2 + is_batch or 0 in shape or (is_batch and shape[0] != len(batch)):
        raise _misshapen(f"x has the shape {shape}", len(batch) if is_batch else None)
    if dtype not in ("BF16", "F16"):
        expected = "expected bf16, fp16 or a DeviceQuantized in nvfp4"
        detail = f"x is {FLOAT_DTYPES.get(dtype, dtype)}; {expected}"
        raise InputError("gemv-vectors", detail, "Cast it there: x.half().")
    _check_launch(batch, shape[-1], shape[-2])
    return found_there, shape[:-1]


def _packed_vectors(
    batch: Sequence[Any], x: Any, is_batch: bool
) -> tuple[list[DeviceQuantized], tuple[int, ...]]:
    """Return vectors in nvfp4, and the shape of their numbers."""
    if is_batch != isinstance(x, (list, tuple)):
        raise _misshapen(f"x is a {kind_of(x)}", len(batch) if is_batch else None)
    given = _split(x, len(batch)) if is_batch else [x]
    for own in given:
        check_there(own)
        if (own.format.name, own.kind, own.shape) != (NVFP4.name, "multiplier", given[0].shape):
            found = f"x is {own.format.name} {own.shape} with a {own.kind}"
            expected = f"expected {NVFP4.name} {given[0].shape} with a multiplier"
            raise InputError("gemv-vectors", f"{found}; {expected}")
    vectors, columns = given[0].shape
    _check_launch(batch, columns, vectors)
    return given, (len(given), vectors) if is_batch else (vectors,)


def _check_launch(batch: Sequence[Any], columns: int, vectors: int) -> None:
    """Raise InputError for sizes that one launch cannot do."""
    _check_columns(batch[0], columns)
    if columns % 64:
        found = f"matrix and x have {columns} columns"
        step = "Copy both to the CPU, or pad their columns with zeros."
        raise InputError("gemv-shape", f"{found}; expected a multiple of 64, on a GPU", step)
    if vectors > MAX_VECTORS or len(batch) > MAX_MATRICES:
        found = f"{vectors} vectors and {len(batch)} matrices"
        expected = f"expected at most {MAX_VECTORS} and {MAX_MATRICES} at once"
        step = "Call it for fewer at a time."
        raise InputError("gemv-vectors", f"{found}; {expected}", step)


def _check_columns(q: Quantized, columns: int) -> None:
    """Raise InputError unless vectors are as long as rows."""
    if columns != q.shape[1]:
        found = f"the matrix has {q.shape[1]} columns, and x has {columns}"
        raise InputError("gemv-shape", f"{found}; expected equal numbers")


def _misshapen(found: str, matrices: int | None) -> InputError:
    """Return the error of vectors in a wrong shape."""
    shape = "(vectors, columns)"
    if matrices is not None:
        shape = f"(matrices, vectors, columns) for {matrices} matrices"
    return InputError("gemv-shape", f"{found}; expected {shape}, none of them 0")
