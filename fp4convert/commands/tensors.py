"""quantize_tensor() and dequantize_tensor(): one matrix in memory.

Decides which arrays and tensors are matrices of weights; what becomes of them is the CPU backend's
work, or where they lie on a GPU that of device_arrays.py.  torch is never imported: whoever has a
tensor has it already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from fp4convert.commands import fp8_tensors
from fp4convert.commands.fp8_tensors import QuantizedFp8
from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.backends.base import Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, LEAVE, Float32s
from fp4convert.numerics.formats import (
    FLOAT_TYPES,
    FP4_FORMATS,
    IMPORTANCE,
    Format,
    Kind,
    check_rule,
    dtype_named,
    format_named,
)
from fp4convert.numerics.matrices import InMemory, Matrix, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS, LINEAR, Layout
from fp4convert.numerics.value_checks import check_largest, find_not_finite_values
from fp4convert.recipes.options import one_of

if TYPE_CHECKING:
    import torch

    from fp4convert.numerics.backends.device_arrays import DeviceQuantized, DeviceWork

EXPECTED = "expected float32, float16 or bfloat16"


class OnGpu(Protocol):
    """An array of CuPy, JAX or any other package that speaks DLPack."""

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def quantize_tensor(
    x: NDArray[Any] | torch.Tensor | OnGpu,
    *,
    format: str,
    global_amax: float | None = None,
    scale_rule: str | None = None,
    importance: Float32s | torch.Tensor | None = None,
    scale_layout: str | None = None,
) -> Any:
    """Return the codes and scales of one matrix, as `quantize` writes them.

    x            (rows, columns) NumPy float32, float16 or ml_dtypes.bfloat16, or such a torch
                 tensor on the CPU, in any strides; or a torch tensor or an array of any package
                 with DLPack or `__cuda_array_interface__` on a GPU, row-major; columns a multiple
                 of 16 (nvfp4) or 32 (mxfp4); not changed
    format       nvfp4, mxfp4, fp8 or mxfp8; of eight bits on the CPU
    global_amax  nvfp4: the largest magnitude of all matrices that share its global scale
                 (q/k/v, gate/up); default: of x
    scale_rule   of the format; default mse, as `quantize` has it
    importance   (columns,) float32 second moments of the inputs on the CPU, for rule importance
    scale_layout  of nvfp4 and mxfp4 the order of block_scales, a name of docs/bytes.md: another
                 than linear is flat, padded with zeros to whole tiles; of fp8 what shares a scale:
                 row (default), tensor or 128x128
    Returns      Quantized in memory of its own, its global scale a multiplier: packed, (rows,
                 columns / 2) bytes, element 2i in bits 0-3; block_scales, (rows, blocks) bytes.
                 Of x on a GPU a DeviceQuantized: the same bytes as arrays of CuPy there, made on
                 torch's current stream for a torch tensor, else on CuPy's. Of eight bits a
                 QuantizedFp8: codes (rows, columns), block_scales
    Raises       InputError for any other format, rule, type, dtype, device or shape, and for a
                 global_amax that is no number or below the largest of x; NumericError for NaN and
                 infinity, with the first place; DeviceError for a GPU that cannot be used
    """
    fmt = format_named(format)
    layout = LINEAR if fmt.is_fp8 else layout_named(scale_layout or LINEAR.name)
    rule = check_rule(fmt, fmt.default_rule if scale_rule is None else scale_rule)
    moments = None if importance is None else _moments(importance)
    if moments is not None and rule != IMPORTANCE:
        detail = f"importance is given, and scale rule {rule} does not use it"
        raise InputError("scale-rule", detail, "Leave it out.")
    if (device := gpu_of(x)) is not None:
        if fmt.is_fp8:
            detail = f"x is on cuda:{device}; expected the CPU, for {fmt.name}"
            raise InputError("tensor-device", detail, "Copy it: x.cpu().")
        with working_at(x, device) as work:
            there = _quantize_there(work, x, fmt, rule, (global_amax, moments))
            return work.arranged(there, layout)
    weights = InMemory(matrix_of(x, fmt))
    _refuse_not_finite(weights)
    if fmt.is_fp8:
        if global_amax is not None:
            _check_amax(global_amax, fmt, 0)
        return fp8_tensors.quantize(weights, fmt, rule, scale_layout)
    chosen = None
    if global_amax is not None:
        chosen = _check_amax(global_amax, fmt, Cpu().amax(weights.matrix))
    given = Given(chosen, () if moments is None else (moments,))
    return _quantize_here(weights, fmt, rule, given, layout)


def _quantize_here(
    weights: InMemory, fmt: Format, rule: str, given: Given, layout: Layout
) -> Quantized:
    """Quantize on the CPU, panel by panel, into memory of its own."""
    rows, columns = weights.shape
    packed = np.empty(rows * columns // 2, np.uint8)
    block_scales = np.empty(rows * columns // fmt.block_size, np.uint8)
    codes, scales, global_scale = packed.data, block_scales.data, None
    for _, q in Cpu().quantize_group([weights], [weights], fmt, rule, given):
        codes[: len(q.packed)], scales[: len(q.block_scales)] = q.packed, q.block_scales
        codes, scales = codes[len(q.packed) :], scales[len(q.block_scales) :]
        global_scale = q.global_scale
    q = Quantized(fmt, weights.shape, packed.data, block_scales.data, global_scale).shaped()
    if layout is LINEAR:
        return q
    stored = layout.arrange_array(np.asarray(q.block_scales), np).data
    return replace(q, block_scales=stored, scale_layout=layout.name)


def layout_named(name: str) -> Layout:
    """Look an order of block scales up; InputError names the known ones."""
    if isinstance(name, str) and name in LAYOUTS:
        return LAYOUTS[name]
    detail = f"scale_layout {name!r:.60} is not known; expected {one_of(list(LAYOUTS))}"
    raise InputError("scale-layout", detail, "Choose one of these.")


def dequantize_tensor(q: Quantized | DeviceQuantized | QuantizedFp8, dtype: str = "fp32") -> Any:
    """Return the values of a Quantized, as engines compute them.

    q        its parts as long as format and shape say; of a DeviceQuantized they are arrays of any
             package that lie on one GPU
    dtype    fp32, bf16 (an array of ml_dtypes.bfloat16) or fp16
    Returns  (rows, columns) of this dtype, rounded once; of a DeviceQuantized an array of CuPy
             there, made on the stream as in quantize_tensor: of bf16 the bits, uint16
    Raises   InputError for any other; NumericError where a value is beyond its range
    """
    stored = dtype_named(dtype)
    if isinstance(q, QuantizedFp8):
        values = fp8_tensors.values_of(q)
        check_largest(float(np.abs(values).max()), stored)
        return values.astype(FLOAT_DTYPES[stored])
    if isinstance(q, Quantized):
        panels = [
            np.frombuffer(panel, FLOAT_DTYPES[stored])
            for panel in Cpu().dequantize_panels(check_here(q), stored)
        ]
        return np.concatenate(panels).reshape(q.shape)
    device = check_there(q)
    with working_at(q.packed, device) as work:
        return work.dequantize(q, stored)


def check_there(q: DeviceQuantized) -> int:
    """Return the number of the GPU that it lies on.

    Raises  InputError for what is none, and for fields that do not fit together
    """
    device = gpu_of(getattr(q, "packed", None))
    if device is None:
        found = f"a {kind_of(q)} is given; expected a Quantized"
        raise InputError("tensor-type", found, "Give what quantize_tensor returned.")
    _check_fields(q)
    return device


def _check_fields(q: Quantized | DeviceQuantized) -> None:
    """Raise InputError unless format, shape and global scale fit together."""
    if not isinstance(q.format, Format) or q.format.name not in FP4_FORMATS:
        expected = "expected that of a Quantized, as quantize_tensor gives it"
        raise InputError("bad-quantized", f"format is {q.format!r:.60}; {expected}")
    size = q.format.block_size
    is_pair = isinstance(q.shape, tuple) and len(q.shape) == 2
    if not (is_pair and all(type(n) is int and n > 0 for n in q.shape) and q.shape[1] % size == 0):
        detail = f"shape is {q.shape!r:.60}; expected (rows, columns), columns a multiple of {size}"
        raise InputError("bad-quantized", f"{detail}, for {q.format.name}")
    if q.kind not in get_args(Kind):
        detail = f"kind is {q.kind!r:.60}; expected {' or '.join(get_args(Kind))}"
        raise InputError("bad-quantized", detail)
    number, expected = q.global_scale, "None, for mxfp4"
    is_sound = number is None
    if q.format.has_global_scale:
        expected = f"a finite float32 above 0, for {q.format.name}"
        with np.errstate(over="ignore"):
            is_sound = isinstance(number, Real) and 0 < float(np.float32(number)) < math.inf
    if not is_sound:
        detail = f"global_scale is {number!r:.60}; expected {expected}"
        raise InputError("bad-quantized", detail)


def check_here(q: Quantized) -> Quantized:
    """Return it with flat parts and linear scales.

    Raises  InputError unless its fields and the lengths of its parts fit
    """
    _check_fields(q)
    layout, grid = layout_named(q.scale_layout), (q.shape[0], q.shape[1] // q.format.block_size)
    sizes = {"packed": math.prod(q.shape) // 2, "block_scales": math.prod(layout.padded(grid))}
    for name, expected in sizes.items():
        part = getattr(q, name)
        try:
            found = f"{memoryview(part).nbytes} bytes"
        except TypeError:  # no buffer
            found = f"a {kind_of(part)}"
        if found != f"{expected} bytes":
            detail = f"{name} is {found}; expected {expected} bytes, for {q.format.name}"
            raise InputError("bad-quantized", f"{detail} of the shape {q.shape}")
    packed, scales = (memoryview(part).cast("B") for part in (q.packed, q.block_scales))
    if layout is not LINEAR:
        scales = layout.restore(scales, grid)
    return replace(q, packed=packed, block_scales=scales, scale_layout=LINEAR.name)


def _quantize_there(
    work: DeviceWork, x: object, fmt: Format, rule: str, given: tuple[float | None, Float32s | None]
) -> DeviceQuantized:
    """Quantize on a GPU, given the amax of the group and second moments."""
    found = work.look_at(plain_tensor(x))
    shape = _check_shape(found.shape, fmt)
    if found.dtype not in FLOAT_DTYPES:
        detail = f"x is {found.dtype}; {EXPECTED}"
        raise InputError("tensor-dtype", detail, "Cast them there.")
    amax = work.amax(found.dtype, math.prod(shape), found.address)
    if not math.isfinite(amax):  # then alone they are copied, to name the place
        data = work.copy_to_host(found.address, found.nbytes)
        _refuse_not_finite(InMemory(Matrix(data, found.dtype, shape)))
    if given[0] is not None:
        amax = _check_amax(given[0], fmt, amax)
    return work.quantize(found, fmt, rule, amax, given[1])


def gpu_of(x: object) -> int | None:
    """Return the number of the GPU that an array lies on; None for others."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        index = x.device.index
        return int(index or 0) if x.device.type == "cuda" else None
    if isinstance(x, np.ndarray):
        return None
    from fp4convert.numerics.backends.device_arrays import device_of

    return device_of(x)


@contextmanager
def working_at(x: object, device: int) -> Iterator[DeviceWork]:
    """Work on a GPU: on torch's stream for its tensors, else on CuPy's."""
    from fp4convert.numerics.backends.device_arrays import on_stream

    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        with on_stream(device, None) as work:
            yield work
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        with on_stream(device, stream) as work:
            yield work


def _refuse_not_finite(weights: InMemory) -> None:
    """Raise NumericError for NaN and infinity, with the first place."""
    if found := find_not_finite_values(weights):
        raise NumericError("not-finite", f"the matrix has {found}; weights must be finite", LEAVE)


def _check_amax(global_amax: float, fmt: Format, own: float) -> float:
    """Return the amax of a scale group as float32; InputError if below own.

    own  the largest magnitude of x
    """
    if not fmt.has_global_scale:
        detail = f"global_amax {global_amax!r} is given, and {fmt.name} has no global scale"
        raise InputError("global-amax", detail, "Leave it out.")
    try:
        if isinstance(global_amax, str) or np.ndim(global_amax):
            raise TypeError
        found = float(global_amax)
    except OverflowError:  # beyond every float
        found = math.inf
    except (TypeError, ValueError):
        detail = f"global_amax is {global_amax!r:.60}; expected a number"
        raise InputError("global-amax", detail, "Give a float.") from None
    with np.errstate(over="ignore"):
        narrow = float(np.float32(found))
    if not own <= narrow < math.inf:
        expected = f"a finite number, at least {own:g}, the largest magnitude of the matrix"
        step = "Give the largest magnitude of all matrices that share the global scale."
        raise InputError("global-amax", f"global_amax is {found:g}; expected {expected}", step)
    return narrow


def _moments(importance: object) -> Float32s:
    """Return the second moments as an array."""
    try:
        given = np.asarray(getattr(importance, "detach", lambda: importance)())
        if np.iscomplexobj(given):
            raise TypeError
        return given.astype(np.float32)
    except (TypeError, ValueError, RuntimeError):
        found = f"importance is a {kind_of(importance)}"
        detail = f"{found}; expected an array of real numbers, one to a column"
        raise InputError("importance-shape", detail) from None


def matrix_of(x: object, fmt: Format) -> Matrix:
    """Return the values row by row, copied only if they do not lie so."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch_matrix(x, fmt)
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        expected = "expected a NumPy array or a torch tensor"
        raise InputError("tensor-type", f"x is a {kind_of(x)}; {expected}")
    shape = _check_shape(x.shape, fmt)
    names = {kind: name for name, kind in FLOAT_DTYPES.items()}
    if x.dtype not in names:
        step = "Cast them: x.astype(numpy.float32)."
        raise InputError("tensor-dtype", f"x is {x.dtype}; {EXPECTED}", step)
    return Matrix(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, names[x.dtype], shape)


def _torch_matrix(x: torch.Tensor, fmt: Format) -> Matrix:
    """Return the values of a torch tensor, row by row, as matrix_of does."""
    names = {f"torch.{kind.config_name}": name for name, kind in FLOAT_TYPES.items()}
    plain = plain_tensor(x)
    shape = _check_shape(tuple(x.shape), fmt)
    if str(x.dtype) not in names:
        raise InputError("tensor-dtype", f"x is {x.dtype}; {EXPECTED}", "Cast them: x.float().")
    if x.device.type != "cpu":
        raise InputError("tensor-device", f"x is on {x.device}; expected cpu or cuda")
    try:
        flat = plain.contiguous().view(-1).view(sys.modules["torch"].uint8).numpy()
    except RuntimeError:  # of a subclass, such as a FakeTensor
        detail = f"x is a {kind_of(x)}, which holds no values in memory"
        raise InputError("tensor-type", f"{detail}; expected a plain torch tensor") from None
    return Matrix(flat.data, names[str(x.dtype)], shape)


def kind_of(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def plain_tensor(x: Any) -> Any:
    """Return a torch tensor as it is stored, and any other array as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    if str(x.layout) != "torch.strided" or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise InputError("tensor-layout", f"x is {layout}; expected torch.strided")
    return x.detach().resolve_neg()


def _check_shape(shape: tuple[int, ...], fmt: Format) -> tuple[int, int]:
    """Return the shape; InputError unless it is a matrix of whole blocks."""
    found, size = f"x has the shape {tuple(shape)}", fmt.block_size or 1
    if len(shape) != 2 or 0 in shape:
        detail = f"{found}; expected a matrix, (rows, columns), that holds something"
        step = "Of a stack give one matrix at a time."
        if len(shape) == 1:
            step = "Of a vector give x[None], (1, columns)."
        raise InputError("tensor-shape", detail, step)
    if shape[1] % size:
        detail = f"{found}; expected columns that are a multiple of {size}, for {fmt.name}"
        next_step = f"Pad its columns with zeros to a multiple of {size}."
        raise InputError("tensor-shape", detail, next_step)
    return shape[0], shape[1]
