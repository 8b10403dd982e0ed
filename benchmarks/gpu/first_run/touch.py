"""Launch every kernel once, for compute-sanitizer and for ncu.

    PYTHONPATH=benchmarks python benchmarks/gpu/first_run/touch.py small|large [PART ...]

small has tails and odd sizes and takes seconds under a sanitizer, which sees every array's end:
CuPy's pool, where arrays lie side by side, is left aside. large has 64M elements of bf16, and part
mse the searches of that rule alone. What the kernels give is not looked at, but for a count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4convert.numerics.backends import gpus
from fp4convert.numerics.formats import CODES, FLOAT_TYPES, FP4_FORMATS, ROW_SUMS
from gpu import descents, kernels, packed, products
from gpu import device as device_module
from gpu.device import Case, Device, Rung

KINDS = ("quantize", "search", "weigh", "dequantize", "compare")  # by format and dtype
DECODERS = ("decode_fp8", "decode_int4", "decode_int8", "transpose_2", "transpose_4")
FP8 = ("grid_amax", "quantize_fp8", "row_costs", "compare_values")  # by dtype, and add_costs
SECONDS = 600
# Dtypes; elements, and of the searches alone; shapes of products, reports, packed and descents.
SIZES = {
    "small": (
        tuple(FLOAT_TYPES),
        (32, 3 * 8192 + 32),
        (),
        ((40, 64), (33, 1088)),
        ((1, 32), (37, 544)),
        ((1, 128), (130, 96), (37, 544)),
        ((1, 32), (35, 96)),
    ),
    "large": (
        ("BF16",),
        (64 * kernels.M,),
        (64 * kernels.M,),
        products.SHAPES,
        (packed.SHAPE,),
        (packed.SHAPE,),
        (descents.SHAPE,),
    ),
}


def main(size: str, *parts: str) -> None:
    found = gpus.survey()
    if not found.gpus:
        sys.exit(f"{found.problem}. {found.next_step}")
    if size == "small":
        import cupy

        cupy.cuda.set_allocator(None)
        kernels.M = packed.M = products.M = 1 << 12
        kernels.WEIGHED_COLUMNS, device_module.BUSY_NBYTES = 32, 1 << 12
    device = Device(found.gpus[0], SECONDS)
    if size == "small":
        device.l2_nbytes = 0  # one buffer of each: nothing is timed
    dtypes, *shapes = SIZES[size]
    works = {  # of every case the first run
        "elements": lambda n: [kernels.Elementwise(device, dtype, n)._cases() for dtype in dtypes],
        "mse": lambda n: [_searches(device, n)],
        "products": lambda shape: [products.Products(device, *shape)._cases()],
        "reports": lambda shape: _compare(device, dtypes, *shape),
        "packed": lambda shape: [packed.Decoders(device, shape)._cases()],
        "descents": lambda shape: [descents.Descents(device, shape).cases()],
    }
    for part, own in zip(works, shapes, strict=True):
        for shape in own if part in parts or not parts else ():
            for cases in works[part](shape):
                for case in cases:
                    case.work(0)
                device.release()
                print(f"touched {part}, {shape}", flush=True)
    print(f"touched every kernel of {', '.join(parts or works)}; {size}")


def _searches(device: Device, n: int) -> list[Case]:
    """List the shipped searches of rule mse: other rules launch kernels of the same names."""
    cases = list(kernels.Elementwise(device, "BF16", n)._cases())
    return [case for case in cases if case.label.endswith(" mse")]


def _compare(device: Device, dtypes: Sequence[str], rows: int, columns: int) -> list[Any]:
    """Launch compare.cu on shapes with tails, which the benchmark does not have; no cases."""
    n = rows * columns
    codes = device.filled(np.arange(256, dtype=np.uint8), n // 2)
    scales = device.filled(np.full(64, 0x38, np.uint8), n // 16)
    stored = device.upload(np.float32(0.01))
    sums, counts = device.empty(8 * ROW_SUMS * rows), device.upload(np.zeros(CODES, np.int64))
    for dtype in dtypes:
        kind = FLOAT_TYPES[dtype]
        x = device.filled(kernels.noise(dtype), n * kind.nbytes)
        for fmt in FP4_FORMATS.values():
            extra = (stored, 0) if fmt.has_global_scale else ()
            rung = Rung(device.kernels, f"compare_{fmt.name}_{kind.word}")
            rung.launch(rows, x, rows, columns, codes, scales, *extra, sums)
    Rung(device.kernels, "count_codes").launch(n, codes, n // 2, counts)
    total = int(counts.get().view(np.int64).sum())
    assert total == n, f"count_codes counted {total} of {n}"
    return []


if __name__ == "__main__":
    main(*sys.argv[1:])
