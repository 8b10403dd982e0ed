"""Launch every kernel once, for compute-sanitizer and for ncu.

    PYTHONPATH=benchmarks python benchmarks/gpu/first_run/touch.py small|large

small has tails and odd sizes and takes seconds under a sanitizer; large has 64M elements. What the
kernels give is not looked at, but for a count.
"""

from __future__ import annotations

import sys

import numpy as np

from fp4convert.numerics.backends import gpus
from fp4convert.numerics.backends.cubins import cubin_path, kernels_folder
from fp4convert.numerics.formats import CODES, FLOAT_TYPES, FORMATS, ROW_SUMS
from gpu import kernels
from gpu.device import Device

KINDS = ("quantize", "search", "weigh", "dequantize", "compare")  # by format and dtype
SECONDS = 600
ROWS_PER_BLOCK, BYTES_PER_BLOCK = 8, 65536  # kernels/compare.cu
SIZES = {  # elements; shapes of products; shapes of what is compared
    "small": ((32, 3 * 8192 + 32), ((37, 64), (33, 1088)), ((1, 32), (37, 544))),
    "large": ((64 << 20,), kernels.GEMV_SHAPES, ((8192, 8192),)),
}


def main(size: str) -> None:
    found = gpus.survey()
    if not found.gpus:
        sys.exit(f"{found.problem}. {found.next_step}")
    device = Device(found.gpus[0], SECONDS)
    if size == "small":
        kernels.M, kernels.WEIGHED_COLUMNS = 1 << 12, 32
    elements, products, compared = SIZES[size]
    for dtype in FLOAT_TYPES:
        for n in elements:
            for case in kernels.Elementwise(device, dtype, n)._cases():
                case.work(0)
            device.release()
    for shape in products:
        for case in kernels.Products(device, *shape)._cases():
            case.work(0)
        device.release()
    for shape in compared:
        _compare(device, *shape)
        device.release()
    print(f"touched every kernel, {size}")


def _compare(device: Device, rows: int, columns: int) -> None:
    """Launch compare.cu on shapes with tails, which the benchmark does not have."""
    target, n = device.kernels.target, rows * columns
    path = cubin_path(kernels_folder() / "compare.cu", target)
    module = device.cupy.RawModule(path=str(path))

    def start(name: str, blocks: int, *arguments: object) -> None:
        words = [a if isinstance(a, int) else int(a.data.ptr) for a in arguments]
        module.get_function(name)((blocks,), (256,), tuple(words))

    packed = device.filled(np.arange(256, dtype=np.uint8), n // 2)
    scales = device.filled(np.full(64, 0x38, np.uint8), n // 16)
    stored = device.upload(np.float32(0.01))
    sums, counts = device.empty(8 * ROW_SUMS * rows), device.upload(np.zeros(CODES, np.int64))
    blocks = -(-rows // ROWS_PER_BLOCK)
    for dtype, kind in FLOAT_TYPES.items():
        x = device.filled(kernels.noise(dtype), n * kind.nbytes)
        for fmt in FORMATS.values():
            extra = (stored, 0) if fmt.has_global_scale else ()
            name = f"compare_{fmt.name}_{kind.word}"
            start(name, blocks, x, rows, columns, packed, scales, *extra, sums)
    start("count_codes", -(-n // 2 // BYTES_PER_BLOCK), packed, n // 2, counts)
    total = int(counts.get().view(np.int64).sum())
    assert total == n, f"count_codes counted {total} of {n}"


if __name__ == "__main__":
    main(sys.argv[1])
