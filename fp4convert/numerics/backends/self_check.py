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
from fp4convert.numerics.backends.base import Fp8Passes
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.backends.cuda_descent import descend
from fp4convert.numerics.backends.cuda_fp8 import Fp8Lane
from fp4convert.numerics.backends.cuda_kernels import Kernels, as_device_error
from fp4convert.numerics.backends.entry_points import ENTRIES, SOURCES
from fp4convert.numerics.backends.gpus import Gpu
from fp4convert.numerics.codec import FLOAT_DTYPES, decode_e4m3
from fp4convert.numerics.formats import (
    CODES,
    E2M1_MAX,
    E4M3_MAX,
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
COLUMNS = 544  # whole blocks, and a tail of everything that takes more
DESCENT_SHAPE = (21, 96)
# Midpoints of neighbours, as shares of the largest value.
E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / E2M1_MAX
E4M3_VALUES = decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
E4M3_TIES = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2 / E4M3_MAX
TURNS = np.array([1.5, 1.75, 2.0])  # mantissas at which rules floor, even and ceil go up
# Amaxes of the group: every midpoint a tie; none; beyond it many values saturate.
EVEN_AMAX, ODD_AMAX = GLOBAL_RANGE * 2.0**-8, float(np.float32(0.4371339))
STORED: dict[Kind, float] = {"multiplier": 2.0**-11 / 3, "divisor": 2.0**11 * 1.7}
REACH = 2  # units in the last place around every tie

Values = NDArray[np.generic]
Output = tuple[Any, ...]
"""Kernel, word for a unit, bytes of a unit; its bytes, and those of the CPU library."""


def check(gpu: Gpu) -> None:
    """Refuse a GPU whose kernels give other bytes than the CPU library.

    Raises  DeviceError "device-differs", with kernel, block and bytes; others where kernels do not
            compile or the GPU fails, which is not kept
    """
    paths = [cubins.cubin_path(cubins.kernels_folder() / name, gpu.target) for name in CHECKED]
    verdict = _place_of_verdict(gpu, paths)
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


def _place_of_verdict(gpu: Gpu, paths: list[Path]) -> Path:
    """Name the file of the verdict, which is empty where every byte is equal.

    paths  of the cubins, beside which it lies
    """
    driver = b""
    with suppress(OSError):
        driver = DRIVER.read_bytes()
    parts = (gpu.name.encode(), driver, __version__.encode())
    key = hashlib.sha256()
    for part in (*parts, *(path.read_bytes() for path in paths)):
        key.update(hashlib.sha256(part).digest())
    return paths[0].parent / f"check-{gpu.target.arch}-{key.hexdigest()[:16]}.txt"


def find_difference(gpu: Gpu) -> str:
    """Compare every kernel that commands launch with the CPU library.

    Returns  kernel, unit and both bytes of the first difference; "" where there is none
    Raises   DeviceError where the GPU fails
    """
    kernels = Kernels(gpu)
    with as_device_error(kernels):
        lane = Fp8Lane(kernels)
        try:
            with lane.device:
                outputs = _fp4_outputs(lane), _stored_outputs(lane), _fp8_outputs(lane)
                found = starmap(_difference, chain(*outputs, _descents(kernels)))
                return next(filter(None, found), "")
        finally:
            lane.finish()


def _difference(kernel: str, unit: str, nbytes: int, found: Any, expected: Any) -> str:
    """Return the first difference of two results; "" where there is none.

    unit    the word for so many bytes
    """
    ours, theirs = (np.frombuffer(bytes(part), np.uint8) for part in (expected, found))
    if theirs.size != ours.size:
        return f"{kernel}: {theirs.size} bytes, expected {ours.size}"
    if not (differ := np.flatnonzero(theirs != ours)).size:
        return ""
    at = int(differ[0])
    place = f"{kernel}: {unit} {at // nbytes}"
    return f"{place}: byte {theirs[at]:#04x}, expected {ours[at]:#04x}"


def _fp4_outputs(lane: Fp8Lane) -> Iterator[Output]:
    """Round values of every float type to four bits, and read four bits."""
    for dtype in FLOAT_TYPES:
        for fmt, amax in ((NVFP4, EVEN_AMAX), (NVFP4, ODD_AMAX), (MXFP4, 0.0)):
            values = _hard_values(dtype, fmt, amax)
            x = _matrix(values, dtype)
            if fmt is NVFP4:
                yield from _amaxes(lane, values, dtype)
            for rule in fmt.scale_rules:
                yield from _quantized(lane, x, fmt, rule, amax)
        yield _dequantized(lane, dtype, MXFP4, "multiplier")
        yield _dequantized(lane, dtype, NVFP4, "multiplier")
        yield _dequantized(lane, dtype, NVFP4, "divisor")


def _amaxes(lane: Fp8Lane, values: Values, dtype: str) -> Iterator[Output]:
    """Measure values, and the same with one that is NaN or Inf."""
    for bad in (values[-1, -1], np.nan, -np.inf):
        x = _matrix(np.concatenate([values, np.full((1, COLUMNS), bad, values.dtype)]), dtype)
        lane.measure([InMemory(x)], keep=[])
        # Nobody reads which NaN it is.
        pair = (np.nan_to_num(np.float32(amax), nan=-1.0) for amax in (lane.amax(), Cpu().amax(x)))
        yield f"amax_{FLOAT_TYPES[dtype].word}", "value", 4, *(amax.tobytes() for amax in pair)


def _quantized(lane: Fp8Lane, x: Matrix, fmt: Format, rule: str, amax: float) -> Iterator[Output]:
    """Quantize under a rule, and compare the result with the values."""
    word = FLOAT_TYPES[x.dtype].word
    moments = np.geomspace(1e-9, 1e9, COLUMNS).astype(np.float32)
    moments[::9] = 0
    own = [moments] if rule == IMPORTANCE else []
    expected = Cpu().quantize(x, fmt, rule, amax, *own)
    lost = Cpu().compare(x, expected)
    packed, block_scales, sums, counts = b"", b"", b"", np.zeros(CODES, np.int64)
    lane.give_amax(amax)
    for _, q in lane.quantize([InMemory(x)], fmt, rule, own):
        packed, block_scales = packed + bytes(q.packed), block_scales + bytes(q.block_scales)
        if q.compared:
            sums += bytes(q.compared.rows)
            counts += np.frombuffer(q.compared.counts, np.int64)
    kernel, rows = f"{kernel_of(fmt, rule)}_{word}, rule {rule}", f"compare_{fmt.name}_{word}"
    yield kernel, "scale of block", 1, block_scales, expected.block_scales
    yield kernel, "codes of block", fmt.block_size // 2, packed, expected.packed
    yield f"{rows}, rule {rule}", "sums of row", 8 * ROW_SUMS, sums, lost.rows
    yield "count_codes", "code", 8, counts.tobytes(), lost.counts


def _dequantized(lane: Fp8Lane, dtype: str, fmt: Format, kind: Kind) -> Output:
    """Read any codes under every finite scale within the dtype's range."""
    scales = np.arange(127) if fmt is NVFP4 else np.arange(E8M0_STORED_MAX + 1)
    if fmt is NVFP4:
        scales = np.concatenate([scales, scales + 128])  # of both signs
    elif dtype == "F16":
        scales = scales[100:140]
    blocks = COLUMNS // fmt.block_size
    rows = -(-2 * scales.size // blocks)
    block_scales = np.resize(scales, rows * blocks).astype(np.uint8)
    packed = np.random.default_rng(1).integers(0, 256, rows * COLUMNS // 2).astype(np.uint8)
    stored = float(np.float32(STORED[kind])) if fmt.has_global_scale else None
    q = Quantized(fmt, (rows, COLUMNS), packed.data, block_scales.data, stored, kind)
    found = b"".join(map(bytes, lane.dequantize(q, dtype)))
    nbytes, kernel = FLOAT_TYPES[dtype].nbytes, f"dequantize_{fmt.name}_{FLOAT_TYPES[dtype].word}"
    expected = Cpu().dequantize(q, dtype)
    return f"{kernel}, {kind}", "values of block", fmt.block_size * nbytes, found, expected


def _fp8_outputs(lane: Fp8Lane) -> Iterator[Output]:
    """Round values of every float type to E4M3 under scales of blocks."""
    for dtype in FLOAT_TYPES:
        x = _matrix(_hard_values(dtype, MXFP4, 0.0), dtype)
        for block in ((1, 32), (128, 128), (1, COLUMNS), x.shape):
            yield from _to_fp8(lane, x, block)
        weights = np.random.default_rng(5).normal(0, 0.02, (150, COLUMNS + 9))
        odd = weights.astype(np.float32).astype(FLOAT_DTYPES[dtype])  # rows that begin anywhere
        yield from _to_fp8(lane, _matrix(odd, dtype), (60, 100))


def _to_fp8(lane: Fp8Lane, x: Matrix, block: tuple[int, int]) -> Iterator[Output]:
    word, weights = FLOAT_TYPES[x.dtype].word, InMemory(x)
    both: tuple[Fp8Passes, Fp8Passes] = (lane, Cpu())
    found, expected = (own.block_amaxes(weights, block) for own in both)
    yield f"grid_amax_{word}", "amax of block", 4, found.tobytes(), expected.tobytes()
    scales = fp8_scales_of(expected)
    candidates = [scales, scales * np.float32(1.5)]
    costs = (own.block_costs(weights, block, candidates).tobytes() for own in both)
    yield f"row_costs_{word}", "cost of block", 8, *costs
    codes, sums = [b"", b""], [b"", b""]
    for number, own in enumerate(both):
        for panel in own.fp8_panels(weights, block, scales):
            codes[number] += bytes(panel.codes)
            sums[number] += bytes(panel.compared.rows)
    yield f"quantize_fp8_{word}", "code", 1, *codes
    yield f"compare_values_{word}", "sums of row", 8 * ROW_SUMS, *sums


def _stored_outputs(lane: Fp8Lane) -> Iterator[Output]:
    """Decode codes under scales of any size in rows of any length; transpose."""
    rng, cpu = np.random.default_rng(4), Cpu()

    def decoded(kernel: str, arguments: tuple[Any, ...], expected: Any, nbytes: int = 4) -> Output:
        size = memoryview(expected).nbytes
        found = bytes(lane.decode(StoredRows(kernel, arguments), size))
        return kernel, "value", nbytes, found, expected

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


def _descents(kernels: Kernels) -> Iterator[Output]:
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
        q = Cpu().quantize(_matrix(values, "F32"), fmt, "mse", 9.0)
        expected, found = Cpu().descend(values, q, h, 2), descend(kernels, values, q, h, 2)
        kernel = f"descend_{fmt.name}"
        yield kernel, "scale of block", 1, found.block_scales, expected.block_scales
        yield kernel, "codes of block", fmt.block_size // 2, found.packed, expected.packed


def _matrix(values: Values, dtype: str) -> Matrix:
    return Matrix(values.reshape(-1).view(np.uint8).data, dtype, values.shape)


def _hard_values(dtype: str, fmt: Format, group_amax: float) -> Values:
    """Return (rows, COLUMNS) finite values beside the ties of a format.

    The largest values of blocks are beside every turn of the block scale, the others beside
    midpoints of E2M1 and of E4M3; some blocks hold subnormals, some zeros of both signs.
    """
    rng, kind = np.random.default_rng(3), FLOAT_DTYPES[dtype]
    unsigned = np.dtype(f"u{kind.itemsize}")
    last = int(np.array(np.inf, np.float32).astype(kind).view(unsigned)) - 1  # the largest finite
    if fmt.has_global_scale:
        steps = E4M3_VALUES * group_amax / GLOBAL_RANGE
        turns = (steps[1:] + steps[:-1]) / 2
    else:
        steps = np.exp2(np.arange(E8M0_STORED_MAX + 1) - 127.0)
        turns = np.outer(steps, TURNS).ravel() / E2M1_MAX
    tops = E2M1_MAX * np.concatenate([np.tile(steps, 4), np.tile(turns, 2 * REACH + 1)])
    shape = (tops.size, fmt.block_size)
    shares = rng.choice(E2M1_TIES, shape)
    shares[::3] = rng.choice(E4M3_TIES, shares[::3].shape)
    shares[:, 0] = 1
    largest = float(np.array(last, unsigned).view(kind))
    values = np.minimum(shares * tops[:, None], largest).astype(np.float32).astype(kind)
    ulps = rng.integers(-REACH, REACH + 1, shape)
    ulps[: 4 * steps.size, 0] = 0  # exact block scales
    stored = np.clip(values.view(unsigned).astype(np.int64) + ulps, 0, last)
    stored[5::11] = rng.integers(0, 90, stored[5::11].shape)  # subnormals
    stored[7::11] = 0
    stored[9::11] = rng.integers(0, last + 1, stored[9::11].shape)
    stored |= rng.integers(0, 2, shape) << 8 * kind.itemsize - 1
    return np.resize(stored, (-(-stored.size // COLUMNS), COLUMNS)).astype(unsigned).view(kind)
