"""Arrays that say they lie on a GPU of simt_gpu.Machine, as other packages have them.

Their bytes come from torch's own DLPack export, of which only the device is changed. What they hold
is written by a stream of their producer, which only an event that is waited for shows to others.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from simt_gpu import Array, Event, Machine, Stream

GPU = 2  # kDLCUDA


class Exported:
    """An array of a package that speaks DLPack alone, such as JAX."""

    def __init__(self, machine: Machine, values: torch.Tensor, device: int = 0) -> None:
        self.machine, self.device_number, self.asked = machine, device, []
        self.tensor, self.kind = torch.zeros_like(values), GPU
        if not values.is_contiguous():
            self.tensor = values.clone(memory_format=torch.preserve_format).zero_()
        with Device(machine, device):
            self.producer = Stream(machine)
        self.producer.start(lambda: self.tensor.copy_(values))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.device_number

    def __dlpack__(self, *, stream: int) -> object:
        self.asked.append(stream)
        event = Event(self.machine)
        event.record(self.producer)
        self.machine.stream(stream).wait_event(event)
        capsule = self.tensor.__dlpack__()
        address_of = ctypes.pythonapi.PyCapsule_GetPointer
        address_of.restype = ctypes.c_void_p
        address_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
        device = (ctypes.c_int32 * 2).from_address(address_of(capsule, b"dltensor") + 8)
        device[0], device[1] = self.kind, self.device_number
        return capsule


class Device:
    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number

    def __enter__(self) -> None:
        self.outer, self.machine.current.device = self.machine.device(), self.number

    def __exit__(self, *_: object) -> None:
        self.machine.current.device = self.outer


class CudaTensor(torch.Tensor):
    """A torch tensor on a GPU: torch's own checks see its device, shape and dtype."""

    @staticmethod
    def of(exported: Exported) -> CudaTensor:
        values = exported.tensor
        made = torch.Tensor._make_wrapper_subclass(
            CudaTensor,
            values.shape,
            strides=values.stride(),
            dtype=values.dtype,
            device=f"cuda:{exported.device_number}",
        )
        made.exported = exported
        return made

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object) -> object:
        raise AssertionError(f"{function} reads values that are not there")

    def detach(self) -> CudaTensor:
        return self

    def resolve_neg(self) -> CudaTensor:
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.exported.__dlpack_device__()

    def __dlpack__(self, *, stream: int) -> object:
        return self.exported.__dlpack__(stream=stream)


def cupy_array(machine: Machine, values: np.ndarray) -> Array:
    """An array of CuPy that holds the values when its stream, the current one, has come so far."""
    made = Array(machine, values.shape, values.dtype)
    data = values.tobytes()
    machine.current_stream().start(lambda: ctypes.memmove(made.data.ptr, data, len(data)))
    return made
