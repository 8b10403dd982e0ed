"""Quantize, dequantize and multiply arrays that lie on a GPU.

Arrays come over DLPack or `__cuda_array_interface__`, results are arrays of CuPy, and work is put
on the caller's stream. Of the numbers only an amax is read on the host, 4 bytes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends import gpus
from fp4convert.numerics.backends.cuda_kernels import ALIGNMENT, Kernels, as_device_error
from fp4convert.numerics.backends.entry_points import (
    Codes,
    Values,
    Vectors,
    amax_call,
    dequantize_call,
    gemv_call,
    quantize_call,
)
from fp4convert.numerics.backends.gpu_choice import usable_gpus
from fp4convert.numerics.codec import Float32s, check_importance, global_scale_of, weigh
from fp4convert.numerics.formats import FLOAT_TYPES, Format
from fp4convert.numerics.matrices import Canonical, Quantized
from fp4convert.numerics.scale_layouts import LAYOUTS, LINEAR, Layout
from fp4convert.numerics.value_checks import check_range

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
LEGACY_STREAM = 1  # as DLPack calls the default stream, which CUDA calls 0
TYPE_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}  # DLDataTypeCode
DTYPES = {float_type.config_name: name for name, float_type in FLOAT_TYPES.items()}


class _Tensor(ctypes.Structure):
    """DLTensor, with which a capsule named dltensor begins: dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("start", ctypes.c_uint64),
    )


class DeviceArray(NamedTuple):
    """An array on a GPU, row-major without gaps.

    dtype  safetensors' name, or NumPy's where weights have no such dtype
    owner  keeps the memory
    """

    address: int
    dtype: str
    element_nbytes: int
    shape: tuple[int, ...]
    device: int
    owner: object

    @property
    def nbytes(self) -> int:
        return self.element_nbytes * math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceQuantized(Canonical[Any]):
    """One matrix in canonical form on a GPU.

    Its parts are any arrays of the GPU that have elements of one byte. `quantize_tensor` gives
    uint8 arrays of CuPy, (rows, columns / 2) and (rows, blocks).
    """


def device_of(x: object) -> int | None:
    """Return the number of the GPU that an array lies on; None for others.

    Raises  InputError where an array does not tell, or names memory of no GPU
    """
    with _as_input_error(x, Exception):  # whatever its package raises
        if hasattr(x, "__dlpack_device__"):
            device_type, number = x.__dlpack_device__()
            return int(number) if device_type in (CUDA, CUDA_MANAGED) else None
        if not hasattr(x, "__cuda_array_interface__"):
            return None
        address = int(x.__cuda_array_interface__["data"][0])
    driver, _, problem = gpus.ask_driver()
    if driver is None or problem:
        return 0  # whoever opens that GPU says what is missing
    try:
        import cupy
    except ImportError:
        return 0
    try:
        found = int(cupy.cuda.runtime.pointerGetAttributes(address).device)
    except cupy.cuda.runtime.CUDARuntimeError:
        found = -1
    if found < 0:
        detail = f"an array says that it lies at {address:#x} of a GPU, and no GPU has that"
        raise InputError("tensor-device", f"{detail}; expected cuda or cpu")
    return found


@contextmanager
def _as_input_error(x: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into one of an array that cannot be read."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        array = f"{type(x).__module__}.{type(x).__qualname__}"
        detail = f"a {array} cannot be read: {type(error).__name__}: {error!s:.100}"
        expected = "expected what DLPack or version 3 of __cuda_array_interface__ lays down"
        raise InputError("tensor-type", f"{detail}; {expected}") from error


@contextmanager
def on_stream(device: int, stream: int | None) -> Iterator[DeviceWork]:
    """Open a GPU for work on a stream.

    stream  CUDA's handle, of torch, which keeps what its stream reads; None is the stream that is
            current in CuPy: what CuPy does not own is read when the context ends
    Raises  DeviceError for a GPU that cannot be used, gives other bytes than the CPU, or fails
    """
    kernels = _kernels(device)
    cuda = kernels.cupy.cuda
    with as_device_error(kernels), cuda.Device(device):
        chosen = cuda.get_current_stream() if stream is None else cuda.ExternalStream(stream)
        with chosen:  # memory that is freed goes to later work of this stream alone
            work = DeviceWork(kernels, chosen)
            yield work
            if stream is None and work.is_foreign:
                chosen.synchronize()


@cache
def _kernels(device: int) -> Kernels:
    """Open a GPU that passes the check, once for a process."""
    try:
        (gpu,) = usable_gpus(f"cuda:{device}")
    except DeviceError as error:  # whose next step may be an option
        if error.code != "no-device":
            raise
        step = "Copy the matrix to the CPU; fp4convert doctor tells what the GPU needs."
        raise DeviceError(error.code, error.message, step) from None
    return Kernels(gpu)


class DeviceWork:
    """Work on one GPU, put on one stream; valid within `on_stream`."""

    def __init__(self, kernels: Kernels, stream: Any) -> None:
        self._kernels, self._cupy, self._stream = kernels, kernels.cupy, stream
        self._runtime = kernels.cupy.cuda.runtime
        self.is_foreign = False  # whether it reads arrays that are not CuPy's

    def look_at(self, x: object) -> DeviceArray:
        """Find where an array of any package lies; nothing is copied.

        Its producer lets the stream wait for what it has begun.
        Raises  InputError for another device, gaps, and an address that no kernel takes
        """
        with _as_input_error(x, TypeError, LookupError, ValueError, AttributeError):
            found, strides = self._from_dlpack(x) or self._from_interface(x)
        self.is_foreign |= not isinstance(x, self._cupy.ndarray)
        number = self._kernels.gpu.number
        if found.device != number:
            detail = f"one array is on cuda:{found.device}, another on cuda:{number}"
            raise InputError("tensor-device", f"{detail}; expected one device")
        dense = tuple(math.prod(found.shape[axis + 1 :]) for axis in range(len(found.shape)))
        axes = zip(found.shape, strides or dense, dense, strict=True)
        detail = ""
        if any(size > 1 and stride != wanted for size, stride, wanted in axes):
            detail = f"has strides {strides}; expected {dense}, row-major"
        elif found.address % ALIGNMENT:
            detail = f"begins at {found.address:#x}; expected a multiple of {ALIGNMENT}"
        if detail and 0 not in found.shape:
            detail = f"an array on cuda:{number}, of shape {found.shape}, {detail}"
            raise InputError("tensor-layout", detail, "Copy it there first: x.contiguous().clone()")
        return found

    def amax(self, dtype: str, n: int, address: int) -> float:
        """Wait for the largest magnitude; Inf or NaN where there is one."""
        result = self._cupy.cuda.alloc(ALIGNMENT)
        result.memset_async(0, 4, self._stream)
        self._kernels.launch(amax_call(Values(dtype, address, (1, n)), result.ptr), self._stream, n)
        return float(np.frombuffer(self.copy_to_host(result.ptr, 4), np.float32)[0])

    def quantize(
        self, x: DeviceArray, fmt: Format, rule: str, amax: float, importance: Float32s | None
    ) -> DeviceQuantized:
        """Quantize under an amax; equals codec.quantize."""
        rows, columns = x.shape
        n = rows * columns
        packed = self._cupy.empty((rows, columns // 2), np.uint8)
        block_scales = self._cupy.empty((rows, columns // fmt.block_size), np.uint8)
        check_importance(rule, importance)
        group_amax = self._upload(np.array([amax], np.float32)) if fmt.has_global_scale else None
        weights = None if importance is None else self._upload(weigh(importance, columns, fmt))
        choice = () if weights is None else (weights.ptr, columns)
        values = Values(x.dtype, x.address, (rows, columns))
        codes = Codes(fmt, packed.data.ptr, block_scales.data.ptr)
        amax_at = None if group_amax is None else group_amax.ptr
        self._kernels.launch(quantize_call(values, codes, rule, amax_at, choice), self._stream, n)
        stored = float(global_scale_of(amax, rule)) if fmt.has_global_scale else None
        return DeviceQuantized(fmt, (rows, columns), packed, block_scales, stored)

    def arranged(self, q: DeviceQuantized, layout: Layout) -> DeviceQuantized:
        """Return it with block scales in that order, as arrays of CuPy."""
        if layout is LINEAR:
            return q
        stored = layout.arrange_array(q.block_scales, self._cupy)
        return replace(q, block_scales=stored, scale_layout=layout.name)

    def dequantize(self, q: DeviceQuantized, dtype: str) -> Any:
        """Return the values; equals codec.dequantize.

        dtype    safetensors' name
        Returns  (rows, columns) float32 or float16; of BF16 its bits, uint16
        Raises   InputError where sizes do not fit; NumericError as check_range
        """
        n, float_type, fmt = math.prod(q.shape), FLOAT_TYPES[dtype], q.format
        parts = self._parts_of(q)
        values = self._cupy.empty(q.shape, "u2" if dtype == "BF16" else f"f{float_type.nbytes}")
        stored = self._upload(np.array([q.global_scale or 0], np.float32))
        packed_at, scales_at = (part.address for part in parts)
        codes = Codes(fmt, packed_at, scales_at, stored.ptr, q.kind)
        call = dequantize_call(codes, Values(dtype, values.data.ptr, q.shape))
        self._kernels.launch(call, self._stream, n)
        # What was rounded to the largest may have been beyond it: the host looks at such a matrix.
        if dtype != "F32" and not self.amax(dtype, n, values.data.ptr) < float_type.largest:
            packed, scales = (self.copy_to_host(part.address, part.nbytes) for part in parts)
            check_range(Quantized(fmt, q.shape, packed, scales, q.global_scale, q.kind), dtype)
        return values

    def multiply(
        self,
        batch: Sequence[DeviceQuantized],
        x: DeviceArray | Sequence[DeviceQuantized],
        counts: tuple[int, ...],
    ) -> Any:
        """Multiply matrices, alike in all but codes and scales, with vectors.

        x        BF16 or F16, or as many as matrices in NVFP4, whose kind is multiplier
        counts   of the vectors of each matrix; before it, if y is to have it, of the matrices
        Returns  (*counts, rows) float16
        """
        q, (packed, block_scales, stored) = batch[0], self._in_a_row(batch)
        own = [x] if isinstance(x, DeviceArray) else self._in_a_row(x)
        kind = FLOAT_TYPES[x.dtype].word if isinstance(x, DeviceArray) else x[0].format.name
        places = tuple(part.address for part in own) + (0,) * (3 - len(own))
        y = self._cupy.empty((*counts, q.shape[0]), np.float16)
        codes_at = packed.address, block_scales.address
        codes = Codes(q.format, *codes_at, stored.address, q.kind)
        call = gemv_call(codes, q.shape, Vectors(kind, places, counts[-1]), y.data.ptr)
        self._kernels.launch(call, self._stream, q.shape[0], counts[-1], len(batch))
        return y

    def _in_a_row(self, batch: Sequence[DeviceQuantized]) -> list[DeviceArray]:
        """Return codes, block scales and global scales, one behind another."""
        columns = zip(*(self._parts_of(q) for q in batch), strict=True)
        scales = self._upload(np.array([q.global_scale or 0 for q in batch], np.float32))
        number = self._kernels.gpu.number
        stored = DeviceArray(scales.ptr, "F32", 4, (len(batch),), number, scales)
        return [*map(self._join, columns), stored]

    def _join(self, parts: Sequence[DeviceArray]) -> DeviceArray:
        """Copy arrays of one size into one, unless they lie so already."""
        first, nbytes = parts[0], parts[0].nbytes
        if all(part.address == first.address + z * nbytes for z, part in enumerate(parts)):
            return first
        place = self._cupy.cuda.alloc(nbytes * len(parts))
        direction = self._runtime.memcpyDeviceToDevice
        for z, part in enumerate(parts):
            to = place.ptr + z * nbytes
            self._runtime.memcpyAsync(to, part.address, nbytes, direction, self._stream.ptr)
        return first._replace(address=place.ptr, shape=(len(parts), *first.shape), owner=place)

    def _parts_of(self, q: DeviceQuantized) -> list[DeviceArray]:
        """Find codes and block scales; InputError where sizes do not fit."""
        n, size = math.prod(q.shape), q.format.block_size
        if q.scale_layout != LINEAR.name:
            layout, grid = LAYOUTS[q.scale_layout], (q.shape[0], q.shape[1] // size)
            scales = layout.restore_array(self._cupy.asarray(q.block_scales).reshape(-1), grid)
            q = replace(q, block_scales=self._cupy.ascontiguousarray(scales))
        parts = [self.look_at(part) for part in (q.packed, q.block_scales)]
        for part, nbytes in zip(parts, (n // 2, n // size), strict=True):
            if part.element_nbytes != 1 or part.nbytes != nbytes or q.shape[1] % size:
                found = f"{part.shape} of {part.element_nbytes} bytes each"
                detail = f"parts of a matrix {q.shape} have the shape {found}"
                raise InputError("bad-quantized", f"{detail}; expected {nbytes} bytes")
        return parts

    def copy_to_host(self, address: int, nbytes: int) -> memoryview:
        """Wait for bytes: an amax, or what is wrong and named in an error."""
        host, direction = np.empty(nbytes, np.uint8), self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(host.ctypes.data, address, nbytes, direction, self._stream.ptr)
        self._stream.synchronize()
        return host.data

    def _upload(self, values: Float32s) -> Any:
        """Put a few numbers on the device, which CUDA copies before it returns."""
        place, direction = self._cupy.cuda.alloc(values.nbytes), self._runtime.memcpyHostToDevice
        host, stream = values.ctypes.data, self._stream.ptr
        self._runtime.memcpyAsync(place.ptr, host, values.nbytes, direction, stream)
        return place

    def _from_dlpack(self, x: Any) -> tuple[DeviceArray, tuple[int, ...] | None] | None:
        """Read a capsule and its strides; None where a producer gives none."""
        try:
            capsule = x.__dlpack__(stream=self._stream.ptr or LEGACY_STREAM)
        except (AttributeError, BufferError, NotImplementedError):  # CuPy, of bf16
            return None
        address_of = ctypes.pythonapi.PyCapsule_GetPointer
        address_of.restype = ctypes.c_void_p
        address_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
        tensor = _Tensor.from_address(address_of(capsule, b"dltensor"))
        shape, strides = (
            tuple(numbers[axis] for axis in range(tensor.dimensions)) if numbers else None
            for numbers in (tensor.shape, tensor.strides)
        )
        lanes = f"x{tensor.lanes}" if tensor.lanes != 1 else ""
        kind = TYPE_CODES.get(tensor.type_code, f"DLPack type {tensor.type_code} of ")
        named = f"{kind}{tensor.bits}{lanes}"
        dtype, nbytes = DTYPES.get(named, named), tensor.bits * tensor.lanes // 8
        address = (tensor.data or 0) + tensor.start
        return DeviceArray(address, dtype, nbytes, shape or (), tensor.device, capsule), strides

    def _from_interface(self, x: Any) -> tuple[DeviceArray, tuple[int, ...] | None]:
        """Read `__cuda_array_interface__`, which has no word for bf16."""
        interface = x.__cuda_array_interface__
        stored, producer = np.dtype(interface["typestr"]), interface.get("stream")
        if producer and producer != self._stream.ptr:
            done = self._cupy.cuda.Event(block=False, disable_timing=True)
            done.record(self._cupy.cuda.ExternalStream(producer))
            self._stream.wait_event(done)
        named = str(x.dtype) if stored.kind == "V" else stored.name
        strides = interface.get("strides")
        if strides is not None:
            strides = tuple(nbytes // stored.itemsize for nbytes in strides)
        address, device = interface["data"][0], device_of(x)
        if device is None:
            raise InputError("tensor-device", "the array is not on a GPU; expected cuda or cpu")
        dtype, shape = DTYPES.get(named, named), tuple(interface["shape"])
        return DeviceArray(address, dtype, stored.itemsize, shape, device, x), strides
