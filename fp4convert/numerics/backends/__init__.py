"""Open a backend: the CPU library, or GPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends.base import Backend

if TYPE_CHECKING:
    from fp4convert.numerics.backends.gpus import Survey


def open_backend(device: str) -> Backend:
    """Open the backend for --device; never another one in its place.

    device   auto (every usable GPU, else the CPU), cpu, cuda (every GPU) or cuda:N
    Raises   InputError for any other; DeviceError for a GPU that is not there, cannot be used or
             gives other bytes than the CPU: auto leaves these aside (see `unused`)
    """
    from fp4convert.numerics.backends.cpu import Cpu

    kind, _, number = device.partition(":")
    if device == "cpu":
        return Cpu()
    if device != "auto" and (
        kind != "cuda" or not (device == kind or re.fullmatch("0|[1-9][0-9]{0,8}", number))
    ):
        detail = f"device {device!r} is not known; expected auto, cpu, cuda or cuda:N"
        raise InputError(
            "no-device", detail, "Choose one of these; fp4convert doctor lists the GPUs."
        )
    # late: --device cpu loads nothing that finds GPUs
    from fp4convert.numerics.backends.gpus import survey

    found = survey_sound() if device == "auto" else survey()
    chosen = [gpu for gpu in found.gpus if not number or gpu.number == int(number)]
    if chosen:
        from fp4convert.numerics.backends.cuda import Cuda
        from fp4convert.numerics.backends.self_check import check

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


def survey_sound() -> Survey:
    """Find the usable GPUs that give the CPU's bytes, or why there is none.

    The first time on a machine their kernels are compiled and checked, some seconds.
    """
    from fp4convert.numerics.backends.gpus import survey

    found = survey()
    if not found.gpus:
        return found
    from fp4convert.numerics.backends.self_check import leave_out_unsound

    return leave_out_unsound(found)


def unused(device: str) -> list[str]:
    """Warn where --device auto leaves a GPU, or a broken driver, aside."""
    from fp4convert.numerics.backends.gpus import NO_GPU

    if device != "auto":
        return []
    found = survey_sound()
    if found.driver and found.problem and found.problem != NO_GPU:
        return [f"the CPU is used: {found.problem}. {found.next_step}"]
    return [f"{name} is not used: {reason}" for name, reason in found.refused]
