"""Check the kernels of a GPU before its first work.

Values beside ties go through every kernel that commands launch, under every rule, and through the
CPU library. The verdict is kept beside the cubins, for each compiled kernel, driver, GPU and
version of this package. A GPU whose bytes differ is given no work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, product, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import DeviceError, shell_line
from fp4convert.numerics.backends import cubins
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.backends.cuda import Cuda
from fp4convert.numerics.backends.entry_points import ENTRIES, SOURCES
from fp4convert.numerics.backends.gpus import Gpu
from fp4convert.numerics.backends.hard_values import COLUMNS, hard_values
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import (
    CODES,
    E8M0_STORED_MAX,
    FLOAT_TYPES,
    FP4_FORMATS,
    GLOBAL_RANGE,
    IMPORTANCE,
    MXFP4,
    NVFP4,
    ROW_SUMS,
    Format,
    Kind,
    kernel_of,
)
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of, grid_shape
from fp4convert.numerics.matrices import InMemory, Matrix, Quantized, StoredRows
from fp4convert.version import __version__

# That commands launch: none multiplies.
CHECKED = tuple(name for name in SOURCES if name != ENTRIES["gemv"].file)
DRIVER = Path("/proc/driver/nvidia/version")  # its build; absent under WSL
DESCENT_SHAPE = (21, 96)
# Amaxes of the group: every midpoint a tie; none; beyond it many values saturate.
EVEN_AMAX, ODD_AMAX = GLOBAL_RANGE * 2.0**-8, float(np.float32(0.4371339))
STORED: dict[Kind, float] = {"multiplier": 2.0**-11 / 3, "divisor": 2.0**11 * 1.7}

Output = tuple[str, str, int, bytes | memoryview]
"""Kernel, word for a unit, bytes of a unit, data"""


def check(gpu: Gpu) -> None:
    """Refuse a GPU whose kernels give other bytes than the CPU library.

    Raises  DeviceError "device-differs", with kernel, block and bytes; others where kernels do not
            compile or the GPU fails, which is not kept
    """
    paths = [cubins.cubin_path(cubins.kernels_folder() / name, gpu.target) for name in CHECKED]
    driver = b""
    with suppress(OSError):
        driver = DRIVER.read_bytes()
    parts = (gpu.name.encode(), driver, __version__.encode(), *(one.read_bytes() for one in paths))
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    verdict = paths[0].parent / f"check-{gpu.target.arch}-{key[:16]}.txt"  # empty: no difference
    difference, next_step = None, f"Use --device cpu. To check again: {shell_line('rm', verdict)}"
    with suppress(OSError):
        difference = verdict.read_text(encoding="utf-8")
    if difference is None:
        difference, next_step = find_difference(gpu), ""
        with suppress(OSError):  # a cache that takes no more: the check is made again
            cubins.store(verdict, difference.encode())
        if difference:  # of a binary that was damaged in the cache the next one is another
            for path in paths:
                cubins.discard(path)
    if difference:
        detail = f"cuda:{gpu.number} ({gpu.name}) gives other bytes than the CPU: {difference}"
        raise DeviceError("device-differs", detail, next_step)


def find_difference(gpu: Gpu) -> str:
    """Compare every kernel that commands launch with the CPU library.

    Returns  kernel, unit and both bytes of the first difference; "" where there is none
    Raises   DeviceError where the GPU fails
    """
    cuda, cpu = Cuda([gpu], lanes=1), Cpu()
    rounded = chain(_fp4_outputs(cuda), _fp8_outputs(cuda))
    expected = chain(_fp4_outputs(cpu), _fp8_outputs(cpu))
    pairs = zip(rounded, expected, strict=True), _decoded_outputs(cuda, cpu), _descents(cuda, cpu)
    return next(filter(None, starmap(_difference, chain(*pairs))), "")


def _difference(found: Output, expected: Output) -> str:
    """Return the first difference of two outputs; "" where there is none."""
    kernel, unit, nbytes, _ = found
    theirs, ours = (np.frombuffer(data, np.uint8) for *_, data in (found, expected))
    if theirs.size != ours.size:
        return f"{kernel}: {theirs.size} bytes, expected {ours.size}"
    if not (differ := np.flatnonzero(theirs != ours)).size:
        return ""
    at = int(differ[0])
    place = f"{kernel}: {unit} {at // nbytes}"
    return f"{place}: byte {theirs[at]:#04x}, expected {ours[at]:#04x}"


def _fp4_outputs(backend: Cuda | Cpu) -> Iterator[Output]:
    """Round values of every float type to four bits, and read them."""
    for dtype, float_type in FLOAT_TYPES.items():
        for fmt, amax in ((NVFP4, EVEN_AMAX), (NVFP4, ODD_AMAX), (MXFP4, 0.0)):
            values = hard_values(dtype, fmt, amax)
            for bad in (values[-1, -1], np.nan, -np.inf):
                row = np.full((1, COLUMNS), bad, values.dtype)
                largest = np.float32(backend.amax(_matrix(np.concatenate([values, row]), dtype)))
                largest = np.nan_to_num(largest, nan=-1.0)  # nobody reads which NaN it is
                yield f"amax_{float_type.word}", "value", 4, largest.tobytes()
            for rule in fmt.scale_rules:
                yield from _quantized(backend, _matrix(values, dtype), fmt, rule, amax)
        for kind in ("multiplier", "divisor"):
            yield _dequantized(backend, dtype, NVFP4, kind)
        yield _dequantized(backend, dtype, MXFP4, "multiplier")


def _matrix(values: NDArray[np.generic], dtype: str) -> Matrix:
    return Matrix(values.reshape(-1).view(np.uint8).data, dtype, values.shape)


def _quantized(
    backend: Backend, x: Matrix, fmt: Format, rule: str, amax: float
) -> Iterator[Output]:
    """Quantize under a rule, and compare the result with the values."""
    moments = np.geomspace(1e-9, 1e9, COLUMNS).astype(np.float32)
    moments[::9] = 0
    given = Given(amax, [moments] if rule == IMPORTANCE else (), is_own=True)
    parts, counts = [b"", b"", b""], np.zeros(CODES, np.int64)
    for _, q in backend.quantize_group([InMemory(x)], [InMemory(x)], fmt, rule, given):
        if q.compared:
            panel = q.block_scales, q.packed, q.compared.rows
            parts = [part + bytes(more) for part, more in zip(parts, panel, strict=True)]
            counts += np.frombuffer(q.compared.counts, np.int64)
    word = f"{FLOAT_TYPES[x.dtype].word}, rule {rule}"
    kernel = f"{kernel_of(fmt, rule)}_{word}"
    yield kernel, "scale of block", 1, parts[0]
    yield kernel, "codes of block", fmt.block_size // 2, parts[1]
    yield f"compare_{fmt.name}_{word}", "sums of row", 8 * ROW_SUMS, parts[2]
    yield "count_codes", "code", 8, counts.tobytes()


def _dequantized(backend: Cuda | Cpu, dtype: str, fmt: Format, kind: Kind) -> Output:
    """Read any codes under every finite scale within the dtype's range."""
    scales = np.arange(100, 140) if dtype == "F16" else np.arange(E8M0_STORED_MAX + 1)
    if fmt is NVFP4:
        scales = np.concatenate([np.arange(127), np.arange(128, 255)])  # of both signs
    blocks = COLUMNS // fmt.block_size
    rows = -(-2 * scales.size // blocks)
    block_scales = np.resize(scales, rows * blocks).astype(np.uint8)
    packed = np.random.default_rng(1).integers(0, 256, rows * COLUMNS // 2).astype(np.uint8)
    stored = float(np.float32(STORED[kind])) if fmt.has_global_scale else None
    q = Quantized(fmt, (rows, COLUMNS), packed.data, block_scales.data, stored, kind)
    kernel = f"dequantize_{fmt.name}_{FLOAT_TYPES[dtype].word}, {kind}"
    nbytes = fmt.block_size * FLOAT_TYPES[dtype].nbytes
    return kernel, "values of block", nbytes, backend.dequantize(q, dtype)


def _fp8_outputs(backend: Backend) -> Iterator[Output]:
    """Round values of every float type to E4M3 under scales of blocks."""
    for dtype, kind in FLOAT_DTYPES.items():
        x = hard_values(dtype, MXFP4, 0.0)
        odd = np.random.default_rng(5).normal(0, 0.02, (150, COLUMNS + 9))  # rows begin anywhere
        cases = [(x, block) for block in ((1, 32), (128, 128), (1, COLUMNS), x.shape)]
        for values, block in (*cases, (odd.astype(np.float32).astype(kind), (60, 100))):
            word, weights = FLOAT_TYPES[dtype].word, InMemory(_matrix(values, dtype))
            with backend.fp8_passes(weights) as passes:
                amaxes = passes.block_amaxes(weights, block)
                yield f"grid_amax_{word}", "amax of block", 4, amaxes.tobytes()
                scales = fp8_scales_of(amaxes)
                costs = passes.block_costs(weights, block, [scales, scales * np.float32(1.5)])
                yield f"row_costs_{word}", "cost of block", 8, costs.tobytes()
                codes, sums = b"", b""
                for panel in passes.fp8_panels(weights, block, scales):
                    codes, sums = codes + bytes(panel.codes), sums + bytes(panel.compared.rows)
                yield f"quantize_fp8_{word}", "code", 1, codes
                yield f"compare_values_{word}", "sums of row", 8 * ROW_SUMS, sums


def _decoded_outputs(cuda: Cuda, cpu: Cpu) -> Iterator[tuple[Output, Output]]:
    """Decode codes under scales of any size in rows of any length; transpose."""
    rng = np.random.default_rng(4)

    def decoded(kernel: str, arguments: tuple[Any, ...], expected: Any, nbytes: int = 4) -> Any:
        with cuda.lane() as lane:
            found = bytes(lane.decode(StoredRows(kernel, arguments), memoryview(expected).nbytes))
        return tuple((kernel, "value", nbytes, data) for data in (found, bytes(expected)))

    for columns, block in product((COLUMNS, COLUMNS + 9), ((1, 32), (32, 128), (60, 1 << 20))):
        shape = (60, columns)
        counts = grid_shape(shape, block)
        scales = np.ldexp(rng.normal(size=counts), rng.integers(-145, 119, counts))
        grid = Grid(scales.astype(np.float32), block)
        table, geometry = native_grid(grid, shape)
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # the bits of NaN are the device's
        expected = cpu.decode_fp8(codes.reshape(-1).data, shape, grid)
        yield decoded("decode_fp8", (codes, table, geometry), expected)
        for bits, has_zeros in product((4, 8), (False, True)):
            items = rng.integers(0, 256, (60, -(-columns * bits // 32) * 4)).astype(np.uint8)
            zeros = rng.integers(-8, 8, counts).astype(np.float32) if has_zeros else None
            flat, taken_off = items.reshape(-1).data, 0 if zeros is None else zeros
            expected = cpu.decode_integers(flat, shape, grid, bits, zeros)
            yield decoded(f"decode_int{bits}", (items, table, taken_off, geometry), expected)
    for nbytes, shape in product((2, 4), ((272, 544), (131, 77))):
        stored = rng.integers(0, 256, (*shape, nbytes)).astype(np.uint8).view(f"u{nbytes}")[..., 0]
        x = Matrix(stored.reshape(-1).view(np.uint8).data, {2: "BF16", 4: "F32"}[nbytes], shape)
        for first, step in ((0, 1), (0, 2), (1, 2)):
            turned = cpu.transpose(x, range(first, shape[1], step))
            numbers = (*shape, first, step, turned.shape[0])
            yield decoded(f"transpose_{nbytes}", (stored, *numbers), turned.data, nbytes)


def _descents(cuda: Cuda, cpu: Cpu) -> Iterator[tuple[Output, Output]]:
    """Go over the codes of rows of any size, under blocks of H and the whole."""
    rng, (rows, columns) = np.random.default_rng(6), DESCENT_SHAPE
    x = rng.normal(size=DESCENT_SHAPE) * np.exp2(rng.integers(-9, 9, (rows, 1)))
    x[1::5] *= np.exp2(rng.integers(-130, 110, x[1::5].shape))
    x[2::7, ::2] = 0
    values = x.astype(np.float32)
    for fmt, width in product(FP4_FORMATS.values(), (columns // 3, columns)):
        inputs = rng.normal(size=(columns // width, width, 2 * width)).astype(np.float32)
        h = inputs @ inputs.swapaxes(1, 2)
        h = ((h + h.swapaxes(1, 2)) / 2).astype(np.float32)
        q, kernel = cpu.quantize(_matrix(values, "F32"), fmt, "mse", 9.0), f"descend_{fmt.name}"
        found, expected = (one.descend(values, q, h, 2) for one in (cuda, cpu))
        scales, codes = (
            (kernel, "scale of block", 1),
            (kernel, "codes of block", fmt.block_size // 2),
        )
        yield (*scales, found.block_scales), (*scales, expected.block_scales)
        yield (*codes, found.packed), (*codes, expected.packed)
