"""Find the GPUs that can be used, or say why there is none.

What is looked for, in this order: driver, CuPy, NVRTC, a target that kernels are compiled for.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from fp4convert.errors import install_line

if TYPE_CHECKING:
    from fp4convert.numerics.backends import cubins

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NO_GPU = "the NVIDIA driver shows no GPU"

Version = tuple[int, int]


class Gpu(NamedTuple):
    """One GPU that can be used."""

    number: int
    name: str
    capability: Version
    memory_nbytes: int
    target: cubins.Target


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found on the way to a GPU, and where the way ends.

    driver   highest CUDA version that the driver runs; None without a driver
    count    GPUs that the driver shows
    refused  (device, why) of those that cannot be used
    problem  where the way ends, and next_step what to do; "" where it does not
    """

    driver: Version | None = None
    count: int = 0
    cupy: str | None = None
    nvrtc: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    next_step: str = ""


def survey(wanted: Sequence[int] | None = None) -> Survey:
    """Find the usable GPUs, or why there is none; raise nothing.

    CuPy is imported only where the driver shows a GPU.
    wanted  the only ones to be opened, where the driver shows them
    """
    driver, count, problem = ask_driver()
    if driver is None or problem:
        next_step = "Install NVIDIA's driver, or use --device cpu."
        return Survey(driver, count, problem=problem, next_step=next_step)
    install = install_line(f"cuda{12 if driver[0] < 13 else 13}")
    if importlib.util.find_spec("cupy") is None:
        next_step = f"Use --device cpu, or install it: {install}"
        return Survey(driver, count, problem="CuPy is not installed", next_step=next_step)
    from fp4convert.numerics.backends import cubins

    try:
        import cupy

        nvrtc = cubins.nvrtc_version()
    except Exception as error:  # CuPy raises many kinds where a library of CUDA is missing
        problem = f"CuPy or its NVRTC does not load: {_first_line(error)}"
        return Survey(driver, count, problem=problem, next_step=f"Install them again: {install}")
    if nvrtc[0] > driver[0]:
        problem = f"NVRTC {dotted(nvrtc)} is newer than the driver"
        problem += f", which runs CUDA {dotted(driver)}"
        next_step = f"Uninstall that NVRTC, then: {install}"
        return Survey(driver, count, cupy.__version__, nvrtc, (), (), problem, next_step)
    gpus, refused = [], []
    for number in range(count) if wanted is None or max(wanted) >= count else wanted:
        try:
            gpus.append(_gpu(cupy, number))
        # Ours, or any that CUDA has for a GPU in exclusive use, without memory, lost.
        except Exception as error:
            refused.append((f"cuda:{number}", _first_line(error)))
    problem, next_step = ("", "") if gpus else (refused[0][1], "Use --device cpu.")
    return Survey(
        driver, count, cupy.__version__, nvrtc, tuple(gpus), tuple(refused), problem, next_step
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def ask_driver() -> tuple[Version | None, int, str]:
    """Ask NVIDIA's driver for its CUDA version and number of GPUs.

    Returns them, and why there are none.
    """
    number, count = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        missing = "cannot open shared object file" in str(error)
        return None, 0, f"there is no NVIDIA driver (libcuda.so.1{'' if missing else f': {error}'})"
    try:
        code = (
            library.cuDriverGetVersion(ctypes.byref(number))
            or library.cuInit(0)
            or library.cuDeviceGetCount(ctypes.byref(count))
        )
    except AttributeError:
        return None, 0, "libcuda.so.1 is not an NVIDIA driver: it lacks cuInit"
    version = (number.value // 1000, number.value % 1000 // 10)
    if code and code != NO_DEVICE:
        return version, 0, f"the NVIDIA driver refuses to start (CUDA error {code})"
    return version, count.value, "" if count.value else NO_GPU


def _gpu(cupy: ModuleType, number: int) -> Gpu:
    """Open a GPU; any error of CuPy where it does not take work."""
    from fp4convert.numerics.backends import cubins

    properties = cupy.cuda.runtime.getDeviceProperties(number)
    capability = (int(properties["major"]), int(properties["minor"]))
    target = cubins.target_for(capability, cubins.known_targets())
    with cupy.cuda.Device(number) as device:
        _ = device.mem_info  # starts a context
    name, nbytes = properties["name"].decode(), int(properties["totalGlobalMem"])
    return Gpu(number, name, capability, nbytes, target)
