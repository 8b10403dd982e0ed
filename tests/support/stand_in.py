"""A stand-in for a GPU in programs of their own, small enough for the host.

`sitecustomize` calls `install` when Python starts. Decides how much smaller everything is.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from simt import KERNELS, compile_for_host
from simt_gpu import ELF, Machine

from fp4convert.numerics.backends import cubins, cuda_stream, entry_points

BENCHMARKS = ("bench.py", "touch.py")
FEW = {"quantize.cu": "FP4_UNITS", "decode.cu": "THREADS", "compare.cu": "THREADS"}  # forms
SITE = """import sys
sys.path[:0] = {paths!r}
import stand_in
stand_in.install({folder!r})
"""


def compile_source(source: Path, target: cubins.Target, *_: object) -> tuple[bytes, str]:
    """In the place of NVRTC: a cubin that tells what it is made of."""
    return ELF + bytes([target.has_cvt]) + source.read_bytes(), ""


class Bench(Machine):
    """A GPU for the benchmark, which puts nothing off; runs what `compile_source` has made.

    made  of each content; many may share it
    """

    def __init__(
        self, folder: Path, capability: tuple[int, int], made: dict[bytes, ctypes.CDLL]
    ) -> None:
        super().__init__({}, capability=capability, is_eager=True)
        self.folder, self.made = folder, made

    def library_of(self, cubin: Path) -> ctypes.CDLL:
        content = cubin.read_bytes()[len(ELF) :]
        has_cvt, text = bool(content[0]), content[1:]
        if content not in self.made:
            source = self.folder / f"{hashlib.sha256(text).hexdigest()[:16]}.cu"
            source.write_bytes(text)
            self.made[content] = compile_for_host(source, self.folder, has_cvt)
        return self.made[content]


def shrink(patched: pytest.MonkeyPatch) -> None:
    """Make the benchmark one of few and small inputs."""
    from gpu import (
        beside_quantizers,
        compare,
        descents,
        device,
        kernels,
        packed,
        products,
        variants,
    )

    small = {
        device: {
            **{"BUSY_NBYTES": 1 << 10, "REPEATS": 1, "LAUNCHES": 2, "WARM_UP": 1},
            "BUSY_COPIES": 1,
        },
        kernels: {"M": 1 << 7, "WEIGHED_COLUMNS": 64},
        products: {"M": 1 << 7, "SHAPES": ((64, 64), (72, 128))},
        packed: {"M": 1 << 7, "SHAPE": (64, 128)},
        variants: {
            **{"M": 1 << 7, "MEASURED": {f: variants.MEASURED[f] for f in FEW}},
            "KNOBS": tuple(k for k in variants.KNOBS if FEW.get(k.file) == k.name),
        },
        compare: {
            **{"M": 1 << 12, "DEQUANTIZED_SHAPE": (64, 64), "GEMV_SHAPE": (45, 128)},
            **{"DECODED_SHAPE": (29, 160), "DESCENT_SHAPE": (9, 128)},
        },
        descents: {"SHAPE": (17, 64)},
        beside_quantizers: {"SHAPE": (16, 64)},
    }
    for module, values in small.items():
        for name, value in values.items():
            patched.setattr(module, name, value)
    every = compare.inputs
    patched.setattr(
        compare,
        "inputs",
        lambda *which: ((v[:1, :512], amax) for v, amax in itertools.islice(every(*which), 4, 7)),
    )
    kernels.noise.cache_clear()


def torch_without_dlpack() -> ModuleType:
    """A torch that cannot take these arrays, and is quick to import."""
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(empty_cache=lambda: None)
    return torch


def site(kernels: Path) -> str:
    """What stands in sitecustomize.py; kernels: the folder of what is compiled for the host."""
    return SITE.format(paths=[str(Path(__file__).parent)], folder=str(kernels))


def install(folder: str) -> None:
    """Put a stand-in into the place of CuPy, for this program."""
    patched = pytest.MonkeyPatch()  # never undone
    patched.setattr(cubins, "compile_cubin", compile_source)
    names = {Path(word).name for word in sys.orig_argv}
    if names & set(BENCHMARKS):
        Bench(Path(folder), (9, 0), {}).install(patched)
        patched.setitem(sys.modules, "torch", torch_without_dlpack())
        shrink(patched)
        return
    stems = [Path(source).stem for source in entry_points.SOURCES]
    libraries = {stem: compile_for_host(KERNELS / f"{stem}.cu", Path(folder)) for stem in stems}
    Machine(libraries).install(patched)
    patched.setattr(cuda_stream, "GPU_PANEL_ELEMENTS", 1 << 16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin: each test of test_on_gpu.py once, with little where it has gigabytes."""
    items[:] = {i.originalname: i for i in items if hasattr(i.module, "CHUNKS")}.values()
    for module in {item.module for item in items}:
        module.CHUNK_NBYTES, module.CHUNKS, module.LAYERS = 1 << 16, 2, 1
        module.DESCENT_SHAPE = (17, 256)
        module.PRODUCTS, amaxes = module.PRODUCTS[:1], module.group_amaxes
        module.group_amaxes = lambda dtype, amaxes=amaxes: list(amaxes(dtype))[:1]
