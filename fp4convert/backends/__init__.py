"""Who does the arithmetic: every module here offers a Backend, and all give the bytes of codec.py."""

from __future__ import annotations

import os
from typing import Protocol

from fp4convert.errors import InputError
from fp4convert.formats import Format, Matrix, Quantized


class Backend(Protocol):
    """Arithmetic on whole rows."""

    @property
    def name(self) -> str: ...

    def amax(self, x: Matrix) -> float:
        """The largest magnitude, exact; Inf or NaN where the data holds one."""

    def quantize(self, x: Matrix, fmt: Format, rule: str, group_amax: float) -> Quantized:
        """The rows as codes and scales; equals codec.quantize."""

    def dequantize(self, q: Quantized, dtype: str) -> memoryview:
        """The values as bytes of `dtype` (safetensors' name); equals codec.dequantize, rounded once.

        Raises NumericError where a value is beyond the range of F16 or BF16.
        """


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_backend(device: str) -> Backend:
    """The backend for --device; never another one in its place.

    device   auto (today: the CPU) or cpu
    Raises   InputError for any other
    """
    if device in ("auto", "cpu"):
        from fp4convert.backends.cpu import Cpu

        return Cpu()
    detail = f"device {device!r} is not there; expected auto or cpu (CUDA kernels are not part of this version)"
    raise InputError("no-device", detail)
