"""Choose the GPUs that compute: those that are there and pass the check."""

from __future__ import annotations

import re
from dataclasses import replace

from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends import self_check
from fp4convert.numerics.backends.base import expected_device
from fp4convert.numerics.backends.gpus import NO_GPU, Gpu, Survey, survey


def usable_gpus(device: str) -> list[Gpu]:
    """Find the GPUs of a --device that is not cpu.

    device   auto, cuda (every GPU), or names as a backend's: cuda:0,cuda:1
    Raises   InputError for a device that is none; DeviceError for a GPU that is not there or cannot
             be used, or gives other bytes than the CPU: auto leaves it aside
    """
    if device == "auto":
        return list(survey_sound().gpus)
    names = device.split(",")
    if device != "cuda" and not all(re.fullmatch("cuda:(0|[1-9][0-9]{0,8})", one) for one in names):
        detail = f"device {device!r} is not known; expected {expected_device(device)}"
        next_step = "Choose one of these; fp4convert doctor lists the GPUs."
        raise InputError("no-device", detail, next_step)
    numbers = None if device == "cuda" else [int(one.partition(":")[2]) for one in names]
    found = survey(numbers)
    chosen = [gpu for gpu in found.gpus if numbers is None or gpu.number in numbers]
    for gpu in chosen:
        self_check.check(gpu)
    missing = {*names} - {f"cuda:{gpu.number}" for gpu in chosen} if numbers else {device}
    if chosen and (numbers is None or not missing):
        return chosen
    first = min(missing)
    names = [f"cuda:{gpu.number}" for gpu in found.gpus]
    there = f"expected {' or '.join(names)}" if names else found.problem
    refused = next((reason for name, reason in found.refused if name == first), None)
    next_step = f"See: fp4convert doctor. {found.next_step}".strip()
    raise DeviceError("no-device", f"device {first!r} is not there: {refused or there}", next_step)


def survey_sound() -> Survey:
    """Find the usable GPUs that pass the check, or why there is none.

    The others are in `refused`, with the reason; where none is left that is the problem, too. The
    first time on a machine the kernels are compiled for it, some seconds.
    """
    found = survey()
    sound, refused = [], list(found.refused)
    for gpu in found.gpus:
        try:
            self_check.check(gpu)
            sound.append(gpu)
        except DeviceError as error:
            refused.append((f"cuda:{gpu.number}", error.message))
    if sound or not found.gpus:
        return replace(found, gpus=tuple(sound), refused=tuple(refused))
    found = replace(found, gpus=(), refused=tuple(refused), problem=refused[-1][1])
    return replace(found, next_step="Use --device cpu.")


def unused(device: str) -> list[str]:
    """Warn where --device auto leaves a GPU, or a broken driver, aside."""
    found = survey_sound() if device == "auto" else Survey()
    if found.driver and found.problem and found.problem != NO_GPU:
        return [f"the CPU is used: {found.problem}. {found.next_step}"]
    return [f"{name} is not used: {reason}" for name, reason in found.refused]
