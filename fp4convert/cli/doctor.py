"""Examine this machine: the document of doctor."""

from __future__ import annotations

import platform
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from fp4convert.numerics.backends import cubins
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.backends.gpu_choice import survey_sound
from fp4convert.numerics.backends.gpus import Gpu, dotted
from fp4convert.options.looking import DoctorOptions
from fp4convert.process import processors
from fp4convert.version import __version__

# Kernels that convert to or from E2M1, in hardware where the GPU can.
CONVERTING = ("quantize_nvfp4", "quantize_mxfp4", "gemv_nvfp4", "gemv_mxfp4")


def doctor(options: DoctorOptions) -> dict[str, object]:
    """Describe driver, GPUs, compiler, caches, processor and disk."""
    found = survey_sound()
    try:
        place: str | None = str(Path().resolve())
        free_nbytes: int | None = shutil.disk_usage(".").free
    except OSError:
        place = free_nbytes = None
    return {
        "fp4convert": __version__,
        "python": platform.python_version(),
        "device": ",".join(f"cuda:{gpu.number}" for gpu in found.gpus) or "cpu",
        "driver": found.driver and dotted(found.driver),
        "gpus_shown": found.count,
        "gpus": [_describe_gpu(gpu) for gpu in found.gpus],
        "gpus_refused": [{"device": name, "reason": reason} for name, reason in found.refused],
        "cupy": found.cupy,
        "nvrtc": found.nvrtc and dotted(found.nvrtc),
        "problem": found.problem or None,
        "next": found.next_step or None,
        "cubin_cache": _describe_cache(cubins.cache_folder()),
        "cpu": {
            "processors": processors(),
            "machine": platform.machine(),
            "instruction_set": Cpu().instruction_set,
        },
        "disk": {"folder": place, "free_bytes": free_nbytes},
    }


def _describe_gpu(gpu: Gpu) -> dict[str, object]:
    return {
        "device": f"cuda:{gpu.number}",
        "name": gpu.name,
        "compute_capability": dotted(gpu.capability),
        "memory_bytes": gpu.memory_nbytes,
        "target": gpu.target.arch,
        "hardware_conversion": list(CONVERTING) if gpu.target.has_cvt else [],
        "software_conversion": [] if gpu.target.has_cvt else list(CONVERTING),
    }


def _describe_cache(folder: Path) -> dict[str, object]:
    """Describe the cache of compiled kernels, and whether it can grow."""
    sizes: list[int] = []
    is_writable = False
    try:
        with suppress(FileNotFoundError):
            folder.stat()  # raises for a name that no folder can have
        if folder.is_dir():
            sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
        # Tried with a nameless file: permissions alone do not decide it.
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        tempfile.TemporaryFile(dir=nearest).close()
        is_writable = True
    except OSError:
        pass
    return {
        "folder": str(folder),
        "writable": is_writable,
        "files": len(sizes),
        "bytes": sum(sizes),
    }
