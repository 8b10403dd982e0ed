"""Open a backend: the CPU library, or GPUs."""

from __future__ import annotations

import re

from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends.base import Backend, expected_device


def open_backend(device: str) -> Backend:
    """Open the backend for --device; never another one in its place.

    device   auto (every usable GPU, else the CPU), cpu, cuda (every GPU) or cuda:N
    Raises   InputError for any other; DeviceError for a GPU that is not there or cannot be used,
             or gives other bytes than the CPU: auto leaves it aside
    """
    from fp4convert.numerics.backends.cpu import Cpu

    kind, _, number = device.partition(":")
    if device == "cpu":
        return Cpu()
    if device != "auto" and (
        kind != "cuda" or not (device == kind or re.fullmatch("0|[1-9][0-9]{0,8}", number))
    ):
        detail = f"device {device!r} is not known; expected {expected_device(device)}"
        next_step = "Choose one of these; fp4convert doctor lists the GPUs."
        raise InputError("no-device", detail, next_step)
    # late: --device cpu loads nothing that finds GPUs
    from fp4convert.numerics.backends.gpus import survey
    from fp4convert.numerics.backends.self_check import check, survey_sound

    found = survey_sound() if device == "auto" else survey()
    chosen = [gpu for gpu in found.gpus if not number or gpu.number == int(number)]
    if chosen:
        from fp4convert.numerics.backends.cuda import Cuda

        for gpu in chosen:
            check(gpu)
        return Cuda(chosen)
    if device == "auto":
        return Cpu()
    there = (
        f"expected {' or '.join(f'cuda:{gpu.number}' for gpu in found.gpus)}"
        if found.gpus
        else found.problem
    )
    refused = next((reason for name, reason in found.refused if name == device), None)
    next_step = f"See: fp4convert doctor. {found.next_step}".strip()
    raise DeviceError("no-device", f"device {device!r} is not there: {refused or there}", next_step)
