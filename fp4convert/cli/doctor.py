"""Examine this machine: the document of doctor."""

from __future__ import annotations

import platform
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from fp4convert.numerics.backends import cubins
from fp4convert.numerics.backends.base import processors
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.backends.gpus import Gpu, dotted, survey

CONVERTING = (
    "quantize_nvfp4",
    "quantize_mxfp4",
    "gemv_nvfp4",
    "gemv_mxfp4",
)  # kernels that convert to or from E2M1 in hardware


def examine(folder: Path) -> dict[str, object]:
    """Driver, GPUs, compiler, caches, processor and disk, as JSON; `problem` and `next` where no GPU can be used.

    folder  whose disk is looked at
    """
    found = survey()
    return {
        "fp4convert": version("fp4convert"),
        "python": platform.python_version(),
        "device": ",".join(f"cuda:{gpu.number}" for gpu in found.gpus) or "cpu",
        "driver": found.driver and dotted(found.driver),
        "gpus_shown": found.count,
        "gpus": [_describe(gpu) for gpu in found.gpus],
        "gpus_refused": [{"device": name, "reason": reason} for name, reason in found.refused],
        "cupy": found.cupy,
        "nvrtc": found.nvrtc and dotted(found.nvrtc),
        "problem": found.problem or None,
        "next": found.next_step or None,
        "cubin_cache": _cache(cubins.cache_folder()),
        "cpu": {
            "processors": processors(),
            "machine": platform.machine(),
            "instruction_set": Cpu().instruction_set,
        },
        "disk": _disk(folder),
    }


def _describe(gpu: Gpu) -> dict[str, object]:
    return {
        "device": f"cuda:{gpu.number}",
        "name": gpu.name,
        "compute_capability": dotted(gpu.capability),
        "memory_bytes": gpu.memory_nbytes,
        "target": gpu.target.arch,
        "hardware_conversion": list(CONVERTING) if gpu.target.has_cvt else [],
        "software_conversion": [] if gpu.target.has_cvt else list(CONVERTING),
    }


def _cache(folder: Path) -> dict[str, object]:
    """Where compiled kernels are kept, and whether they can be."""
    try:
        sizes = [path.stat().st_size for path in folder.glob("*.cubin")] if folder.is_dir() else []
        is_writable = _takes_files(
            next(place for place in (folder, *folder.parents) if place.exists())
        )
    except OSError:
        sizes, is_writable = [], False
    return {
        "folder": str(folder),
        "writable": is_writable,
        "files": len(sizes),
        "bytes": sum(sizes),
    }


def _disk(folder: Path) -> dict[str, object]:
    try:
        return {"folder": str(folder.resolve()), "free_bytes": shutil.disk_usage(folder).free}
    except OSError:
        return {"folder": None, "free_bytes": None}


def _takes_files(folder: Path) -> bool:
    """Tried, with a file that has no name: permissions do not tell all."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
