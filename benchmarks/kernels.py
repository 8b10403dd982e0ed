"""The CPU kernels against the memory: each call as a share of the read bandwidth measured in the same run, one core."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import ml_dtypes
import numpy as np
from measure import paired, table, verdict

ELEMENTS = 256 << 20  # 512 MB of bf16: many times the last cache
ROUNDS = 5
KINDS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
BARS = {
    **{("amax", "bf16"): 0.9, ("quantize_nvfp4", "bf16"): 0.18, ("quantize_mxfp4", "bf16"): 0.35},
    **{("dequantize_nvfp4", "bf16"): 0.35, ("dequantize_mxfp4", "bf16"): 0.35},
    **{(f"quantize_{fmt}", kind): 0.1 for fmt in ("nvfp4", "mxfp4") for kind in ("fp16", "fp32")},
    **{(f"search_{fmt}", kind): 0.025 for fmt in ("nvfp4", "mxfp4") for kind in KINDS},
}
NAMED = ("amax", "quantize_nvfp4", "quantize_mxfp4", "search_nvfp4", "search_mxfp4", "dequantize_nvfp4", "dequantize_mxfp4")
NVFP4_MSE, MXFP4_EVEN = 1, 1  # kernels/fp4.h
NAMES = {2: "x86-64-v2 (SSE4.2)", 3: "x86-64-v3 (AVX2)", 4: "x86-64-v4 (AVX-512)", 0: "baseline"}


class Kernels:
    """One copy of the library, held at one instruction set, with buffers that every call reuses."""

    def __init__(self, level: int) -> None:
        (found,) = [item for item in files("fp4convert").iterdir() if item.name.startswith("libcpu.")]
        copy = Path(tempfile.mkdtemp()) / "libcpu.so"  # its own file, so that its level is its own
        shutil.copyfile(str(found), copy)
        self._library = ctypes.CDLL(str(copy))
        self.level = self._library.fp4_level(level)
        values = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32) * np.float32(0.02)
        self.x = {kind: values.astype(dtype) for kind, dtype in KINDS.items()}
        self.y = {kind: np.ones(ELEMENTS, dtype) for kind, dtype in KINDS.items()}
        self.packed = np.ones(ELEMENTS // 2, np.uint8)
        self.scales = np.ones(ELEMENTS // 16, np.uint8)
        self.amax = np.array([np.abs(values).max()], np.float32)
        self.bits = np.zeros(1, np.uint32)

    def call(self, name: str, kind: str) -> None:
        arguments = {
            "amax": (self.x[kind], ELEMENTS, self.bits),
            "quantize_nvfp4": (self.x[kind], ELEMENTS, self.amax, self.packed, self.scales),
            "quantize_mxfp4": (self.x[kind], ELEMENTS, MXFP4_EVEN, self.packed, self.scales),
            "search_nvfp4": (self.x[kind], ELEMENTS, self.amax, NVFP4_MSE, self.packed, self.scales),
            "search_mxfp4": (self.x[kind], ELEMENTS, self.packed, self.scales),
            "dequantize_nvfp4": (self.packed, self.scales, ELEMENTS, self.amax, 0, self.y[kind]),
            "dequantize_mxfp4": (self.packed, self.scales, ELEMENTS, self.y[kind]),
        }[name]
        native = [ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in arguments]
        self._library[f"{name}_{kind}"](*native)

    def read(self) -> None:
        """Touch every byte of the bf16 input once: the read bandwidth of this moment."""
        np.bitwise_or.reduce(self.x["bf16"].view(np.uint64))


def rows_of(level: int) -> list[list[str]]:
    kernels = Kernels(level)
    if kernels.level != level:
        return []
    rows = []
    for name in NAMED:
        for kind, dtype in KINDS.items():
            ours, read, _ = paired(lambda name=name, kind=kind: kernels.call(name, kind), kernels.read, ROUNDS)
            bandwidth, rate = 2 * ELEMENTS / read / 1e9, np.dtype(dtype).itemsize * ELEMENTS / ours / 1e9
            share = rate / bandwidth
            bar = BARS.get((name, kind)) if level != 2 else None
            rows.append(
                [NAMES[level], name, kind, f"{rate:.1f}", f"{bandwidth:.1f}", f"{share:.2f}", verdict(share, bar) if bar else ""]
            )
    return rows


def report() -> str:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [row for level in (4, 3, 2, 0) for row in rows_of(level)]
    headings = ["instruction set", "kernel", "type", "GB/s", "read GB/s", "share", "bar"]
    about = (
        "GB/s of input (dequantize: of output), and that as a share of the read bandwidth measured beside it;"
        f" {ELEMENTS >> 20}M elements, medians of {ROUNDS} pairs. Bars hold for AVX2 or better."
        " quantize: rules amax and even; search: rule mse."
    )
    return f"## Kernels, one core\n\n{about}\n\n{table(headings, rows)}\n"


if __name__ == "__main__":
    print(report())
