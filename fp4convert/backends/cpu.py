"""The CPU library (kernels/*.c) through ctypes; calls release the interpreter's lock, so threads run side by side."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from fp4convert.codec import FLOAT_DTYPES, block_steps, global_scale_of
from fp4convert.errors import NumericError
from fp4convert.formats import E2M1_MAX, FLOAT_TYPES, Format, Matrix, Quantized, check_rule

Array = NDArray[np.generic]


class Cpu:
    """Runs on the copy of the kernels that fits this processor."""

    name = "cpu"

    def __init__(self) -> None:
        self._library = _library()

    def amax(self, x: Matrix) -> float:
        values = _aligned(x)
        bits = np.zeros(1, np.uint32)
        self._call(f"amax_{FLOAT_TYPES[x.dtype].word}", values, values.size, bits)
        return float(bits.view(np.float32)[0])

    def quantize(self, x: Matrix, fmt: Format, rule: str, group_amax: float) -> Quantized:
        values = _aligned(x)
        packed = np.empty(values.size // 2, np.uint8)
        block_scales = np.empty(values.size // fmt.block_size, np.uint8)
        number = fmt.scale_rules.index(check_rule(fmt, rule))  # as in kernels/fp4.h
        argument = np.array([group_amax], np.float32) if fmt.has_global_scale else number
        self._call(f"quantize_{fmt.name}_{FLOAT_TYPES[x.dtype].word}", values, values.size, argument, packed, block_scales)
        stored = float(global_scale_of(group_amax)) if fmt.has_global_scale else None
        return Quantized(fmt, x.shape, packed.data, block_scales.data, stored)

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        values = np.empty(q.shape[0] * q.shape[1], FLOAT_DTYPES[dtype])
        packed, block_scales = np.frombuffer(q.packed, np.uint8), np.frombuffer(q.block_scales, np.uint8)
        stored = np.array([q.global_scale or 0], np.float32)
        extra = (stored, int(q.kind == "divisor")) if q.format.has_global_scale else ()
        self._call(f"dequantize_{q.format.name}_{FLOAT_TYPES[dtype].word}", packed, block_scales, values.size, *extra, values)
        self._refuse_overflow(q, dtype)
        return values.view(np.uint8).data

    def _refuse_overflow(self, q: Quantized, dtype: str) -> None:
        kind = FLOAT_TYPES[dtype]
        steps = block_steps(q)
        if dtype == "F32" or _largest(steps) * E2M1_MAX <= kind.largest:
            return
        largest = _largest(np.frombuffer(self.dequantize(q, "F32"), np.float32))
        if largest > kind.largest:
            detail = f"the value {largest:g} is beyond {kind.largest:g}, the largest of {kind.word}"
            raise NumericError(f"{kind.word}-overflow", detail, f"Choose --dtype {'bf16 or ' * (dtype == 'F16')}fp32.")

    def _call(self, name: str, *arguments: Array | int) -> None:
        native = [ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in arguments]
        self._library[name](*native)


def _largest(values: NDArray[np.float32]) -> float:
    """The largest magnitude; NaN does not hide it."""
    return float(np.fmax.reduce(np.abs(values), initial=0))


def _aligned(x: Matrix) -> Array:
    """The values, flat; copied only where a shard's header left them unaligned."""
    kind = FLOAT_DTYPES[x.dtype]
    raw = np.frombuffer(x.data, np.uint8)
    return (raw if raw.ctypes.data % kind.itemsize == 0 else raw.copy()).view(kind)


@cache
def _library() -> ctypes.CDLL:
    found = [item for item in files("fp4convert").iterdir() if item.name.startswith("libcpu.")]
    if not found:
        raise RuntimeError("the CPU library is not installed beside the package; reinstall fp4convert")
    return ctypes.CDLL(str(found[0]))
