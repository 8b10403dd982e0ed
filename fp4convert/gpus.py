"""The GPUs that can be used, and if there is none, where the way to one ends: driver, CuPy, NVRTC, target."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from fp4convert import cubins
from fp4convert.errors import InputError

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that can be used."""

    number: int
    name: str
    capability: Version
    memory_nbytes: int
    target: cubins.Target


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found on the way to a GPU; `problem` and `next_step` say where the way ends, if it does.

    driver  highest CUDA version that the driver runs; None without a driver
    count   GPUs that the driver shows
    """

    driver: Version | None = None
    count: int = 0
    cupy: str | None = None
    nvrtc: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    next_step: str = ""


def survey() -> Survey:
    """The usable GPUs, or why there is none; CuPy is imported only where the driver shows a GPU."""
    driver, count, problem = ask_driver()
    if driver is None or problem:
        return Survey(driver, count, problem=problem, next_step="Install NVIDIA's driver, or use --device cpu.")
    install = f"pip install 'fp4convert[cuda{12 if driver[0] < 13 else 13}]'"
    if importlib.util.find_spec("cupy") is None:
        return Survey(driver, count, problem="CuPy is not installed", next_step=f"{install}, or use --device cpu.")
    try:
        import cupy

        nvrtc = cubins.nvrtc_version()
    except Exception as error:  # CuPy raises many kinds where a library of CUDA is missing
        detail = str(error).strip().partition("\n")[0]
        return Survey(driver, count, problem=f"CuPy or its NVRTC does not load: {detail}", next_step=f"{install}.")
    if nvrtc[0] > driver[0]:
        detail = f"NVRTC {dotted(nvrtc)} is newer than the driver, which runs CUDA {dotted(driver)}"
        return Survey(driver, count, cupy.__version__, nvrtc, problem=detail, next_step=f"Uninstall that NVRTC and {install}.")
    try:
        gpus = tuple(_gpu(cupy, number) for number in range(count))
    except InputError as error:
        return Survey(driver, count, cupy.__version__, nvrtc, problem=error.message, next_step=error.next_step)
    return Survey(driver, count, cupy.__version__, nvrtc, gpus)


def unused(device: str) -> list[str]:
    """A warning where --device auto leaves a GPU aside that the driver shows."""
    found = survey() if device == "auto" else Survey()
    return (
        [f"the CPU is used, though there is a GPU: {found.problem}. {found.next_step}"] if found.count and found.problem else []
    )


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def ask_driver() -> tuple[Version | None, int, str]:
    """(highest CUDA version, GPUs that it shows, why there are none) of NVIDIA's driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0, "there is no NVIDIA driver (libcuda.so.1)"
    number, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return version, 0, f"the NVIDIA driver refuses to start (CUDA error {code})"
    return version, count.value, "" if count.value else "the NVIDIA driver shows no GPU"


def _gpu(cupy: ModuleType, number: int) -> Gpu:
    properties = cupy.cuda.runtime.getDeviceProperties(number)
    capability = (int(properties["major"]), int(properties["minor"]))
    target = cubins.target_for(capability, cubins.known_targets())
    return Gpu(number, properties["name"].decode(), capability, int(properties["totalGlobalMem"]), target)
