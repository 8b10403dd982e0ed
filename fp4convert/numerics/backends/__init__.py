"""Open a backend: the CPU library, or GPUs."""

from __future__ import annotations

from fp4convert.numerics.backends.base import Backend


def open_backend(device: str) -> Backend:
    """Open the backend for --device; never another one in its place.

    device   auto (every usable GPU, else the CPU), cpu, cuda (every GPU), cuda:N,
             or several of these as a backend is named: cuda:0,cuda:1
    Raises   InputError for any other; DeviceError as usable_gpus
    """
    if device != "cpu":  # which loads nothing that finds GPUs
        from fp4convert.numerics.backends.gpu_choice import usable_gpus

        if gpus := usable_gpus(device):
            from fp4convert.numerics.backends.cuda import Cuda

            return Cuda(gpus)
    from fp4convert.numerics.backends.cpu import Cpu

    return Cpu()
