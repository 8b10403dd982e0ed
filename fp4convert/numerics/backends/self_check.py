"""Check the kernels of a GPU before its first work.

Adversarial values go through every kernel that commands launch, under every rule, and through the
CPU library. What comes of it is kept beside the cubins: it is found out once for each compiled
kernel, driver, GPU and version of this package. A GPU whose bytes differ is given no work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import DeviceError, InputError, shell_line
from fp4convert.numerics.backends import cubins
from fp4convert.numerics.backends.base import Fp8Passes, expected_device
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.backends.cuda_descent import descend
from fp4convert.numerics.backends.cuda_fp8 import Fp8Lane
from fp4convert.numerics.backends.cuda_kernels import Kernels, as_device_error
from fp4convert.numerics.backends.cuda_stream import Lane
from fp4convert.numerics.backends.entry_points import ENTRIES, SOURCES
from fp4convert.numerics.backends.gpus import NO_GPU, Gpu, Survey, survey
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s, decode_e4m3
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
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of
from fp4convert.numerics.matrices import InMemory, Matrix, Quantized, StoredRows
from fp4convert.version import __version__

# That commands launch: none multiplies.
CHECKED = tuple(name for name in SOURCES if name != ENTRIES["gemv"].file)
DRIVER = Path("/proc/driver/nvidia/version")  # its build; absent under WSL
COLUMNS = 544  # whole blocks, and a tail of everything that takes more
DESCENT_SHAPE = (21, 96)
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # of E2M1's neighbours
TURNS = np.array([1.5, 1.75, 2.0])  # mantissas at which rules floor, even and ceil go up
# Amaxes of the group: every midpoint a tie; none; beyond it many values saturate.
GROUP_AMAXES = (GLOBAL_RANGE * 2.0**-8, float(np.float32(0.4371339)))
STORED: dict[Kind, float] = {"multiplier": 2.0**-11 / 3, "divisor": 2.0**11 * 1.7}
REACH = 2  # units in the last place around every tie

Values = NDArray[np.generic]
Doubles = NDArray[np.float64]


def usable_gpus(device: str) -> list[Gpu]:
    """Find the GPUs of a --device that is not cpu.

    device   auto, cuda (every GPU), or names as a backend's: cuda:0,cuda:1
    Raises   InputError for a device that is none; DeviceError for a GPU that is not there or cannot
             be used, or gives other bytes than the CPU: auto leaves it aside
    """
    if device == "auto":
        return list(survey_sound().gpus)
    names = device.split(",")
    if device != "cuda" and not all(re.fullmatch("cuda:(0|[1-9][0-9]{0,8})", one) for one in names):
        detail = f"device {device!r} is not known; expected {expected_device(device)}"
        next_step = "Choose one of these; fp4convert doctor lists the GPUs."
        raise InputError("no-device", detail, next_step)
    numbers = None if device == "cuda" else [int(one.partition(":")[2]) for one in names]
    found = survey(numbers)
    chosen = [gpu for gpu in found.gpus if numbers is None or gpu.number in numbers]
    for gpu in chosen:
        check(gpu)
    missing = {*names} - {f"cuda:{gpu.number}" for gpu in chosen} if numbers else {device}
    if chosen and (numbers is None or not missing):
        return chosen
    first = min(missing)
    there = (
        f"expected {' or '.join(f'cuda:{gpu.number}' for gpu in found.gpus)}"
        if found.gpus
        else found.problem
    )
    refused = next((reason for name, reason in found.refused if name == first), None)
    next_step = f"See: fp4convert doctor. {found.next_step}".strip()
    raise DeviceError("no-device", f"device {first!r} is not there: {refused or there}", next_step)


def survey_sound() -> Survey:
    """Find the usable GPUs that pass the check, or why there is none.

    The others are in `refused`, with the reason; where none is left that is the problem, too. The
    first time on a machine the kernels are compiled for it, some seconds.
    """
    found = survey()
    sound, refused = [], list(found.refused)
    for gpu in found.gpus:
        try:
            check(gpu)
            sound.append(gpu)
        except DeviceError as error:
            refused.append((f"cuda:{gpu.number}", error.message))
    if sound or not found.gpus:
        return replace(found, gpus=tuple(sound), refused=tuple(refused))
    reason = refused[-1][1]
    return replace(
        found, gpus=(), refused=tuple(refused), problem=reason, next_step="Use --device cpu."
    )


def unused(device: str) -> list[str]:
    """Warn where --device auto leaves a GPU, or a broken driver, aside."""
    found = survey_sound() if device == "auto" else Survey()
    if found.driver and found.problem and found.problem != NO_GPU:
        return [f"the CPU is used: {found.problem}. {found.next_step}"]
    return [f"{name} is not used: {reason}" for name, reason in found.refused]


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
    """Name the file of the verdict, empty where every byte is equal.

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


class Output(NamedTuple):
    """Bytes of a kernel, and those of the CPU library.

    what    a unit of them is called, and nbytes how long it is
    """

    kernel: str
    what: str
    nbytes: int
    found: bytes
    expected: bytes


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
                outputs = chain(_outputs(lane), _descents(kernels))
                return next(filter(None, map(_describe_difference, outputs)), "")
        finally:
            lane.finish()


def _describe_difference(output: Output) -> str:
    kernel, what, nbytes, *parts = output
    found, expected = (np.frombuffer(part, np.uint8) for part in parts)
    if found.size != expected.size:
        return f"{kernel}: {found.size} bytes, expected {expected.size}"
    differ = np.flatnonzero(found != expected)
    if not differ.size:
        return ""
    first = int(differ[0])
    return (
        f"{kernel}: {what} {first // nbytes}: byte {found[first]:#04x},"
        f" expected {expected[first]:#04x}"
    )


def _outputs(lane: Fp8Lane) -> Iterator[Output]:
    for dtype in FLOAT_TYPES:
        yield from _amaxes(lane, dtype)
        for fmt in FP4_FORMATS.values():
            for group_amax in GROUP_AMAXES if fmt.has_global_scale else (0.0,):
                values = adversarial_values(dtype, fmt, group_amax)
                for rule in fmt.scale_rules:
                    yield from _quantized(lane, _matrix(values, dtype), fmt, rule, group_amax)
            yield from _dequantized(lane, dtype, fmt)
    yield from _decoded(lane)
    yield from _transposed(lane)
    for dtype in FLOAT_TYPES:
        yield from _to_fp8(lane, dtype)


# ------------------------------------------------------------------------------------------------
# what goes through the kernels


def _amaxes(lane: Lane, dtype: str) -> Iterator[Output]:
    """Measure values, and the same with one that is NaN or Inf."""
    kernel = f"amax_{FLOAT_TYPES[dtype].word}"
    plain = adversarial_values(dtype, NVFP4, GROUP_AMAXES[0])
    for bad in (None, np.nan, -np.inf):
        values = plain.copy()
        if bad is not None:
            values[-1, -1] = bad
        x = _matrix(values, dtype)
        lane.measure([InMemory(x)], keep=[])
        # Which NaN it is nobody reads.
        pair = [np.nan_to_num(np.float32(m), nan=-1.0) for m in (lane.amax(), Cpu().amax(x))]
        yield Output(kernel, "value", 4, *(number.tobytes() for number in pair))


def _quantized(
    lane: Lane, x: Matrix, fmt: Format, rule: str, group_amax: float
) -> Iterator[Output]:
    """Quantize under a rule, and compare what comes of it with the values."""
    word = FLOAT_TYPES[x.dtype].word
    importance = _importance(x.shape[1]) if rule == IMPORTANCE else None
    expected = Cpu().quantize(x, fmt, rule, group_amax, importance)
    lost = Cpu().compare(x, expected)
    packed, block_scales, sums, counts = b"", b"", b"", np.zeros(CODES, np.int64)
    lane.give_amax(group_amax)
    own = [] if importance is None else [importance]
    for _, q in lane.quantize([InMemory(x)], fmt, rule, own):
        packed, block_scales = packed + bytes(q.packed), block_scales + bytes(q.block_scales)
        if q.compared:
            sums += bytes(q.compared.rows)
            counts += np.frombuffer(q.compared.counts, np.int64)
    kernel = f"{kernel_of(fmt, rule)}_{word}, rule {rule}"
    yield Output(kernel, "scale of block", 1, block_scales, bytes(expected.block_scales))
    yield Output(kernel, "codes of block", fmt.block_size // 2, packed, bytes(expected.packed))
    rows = f"compare_{fmt.name}_{word}, rule {rule}"
    yield Output(rows, "sums of row", 8 * ROW_SUMS, sums, bytes(lost.rows))
    yield Output("count_codes", "code", 8, counts.tobytes(), bytes(lost.counts))


def _to_fp8(lane: Fp8Lane, dtype: str) -> Iterator[Output]:
    """Round to E4M3 under scales of blocks, rows and the whole."""
    word, both = FLOAT_TYPES[dtype].word, cast(tuple[Fp8Passes, Fp8Passes], (lane, Cpu()))
    values = np.concatenate([_around_e4m3(dtype), adversarial_values(dtype, MXFP4, 0.0)])
    odd = np.resize(values[-160:], (150, COLUMNS + 9))  # rows that begin anywhere
    blocks = [(1, 32), (128, 128), (1, COLUMNS), values.shape]
    for x, block in (*((values, block) for block in blocks), (odd, (60, 100))):
        weights = InMemory(_matrix(x, dtype))
        found, expected = (own.block_amaxes(weights, block) for own in both)
        yield Output(f"grid_amax_{word}", "amax of block", 4, found.tobytes(), expected.tobytes())
        scales = fp8_scales_of(expected)
        candidates = [scales, scales * np.float32(1.5)]
        costs = (own.block_costs(weights, block, candidates) for own in both)
        yield Output(f"row_costs_{word}", "cost of block", 8, *(own.tobytes() for own in costs))
        codes, sums = [b"", b""], [b"", b""]
        for number, own in enumerate(both):
            for panel in own.fp8_panels(weights, block, scales):
                codes[number] += bytes(panel.codes)
                sums[number] += bytes(panel.compared.rows)
        yield Output(f"quantize_fp8_{word}", "code", 1, *codes)
        yield Output(f"compare_values_{word}", "sums of row", 8 * ROW_SUMS, *sums)


def _dequantized(lane: Lane, dtype: str, fmt: Format) -> Iterator[Output]:
    """Read any codes under every finite scale within the dtype's range."""
    kernel = f"dequantize_{fmt.name}_{FLOAT_TYPES[dtype].word}"
    magnitudes = [*range(127)] if fmt is NVFP4 else [*range(E8M0_STORED_MAX + 1)]
    if dtype == "F16" and fmt is MXFP4:
        magnitudes = [*range(100, 140)]
    signs = (0, 128) if fmt is NVFP4 else (0,)
    scales = np.array([byte + sign for sign in signs for byte in magnitudes] * 2, np.uint8)
    rows = -(-scales.size // (COLUMNS // fmt.block_size))
    block_scales = np.resize(scales, rows * (COLUMNS // fmt.block_size))
    packed = np.random.default_rng(1).integers(0, 256, rows * COLUMNS // 2).astype(np.uint8)
    kinds: tuple[Kind, ...] = ("multiplier", "divisor") if fmt.has_global_scale else ("multiplier",)
    for kind in kinds:
        stored = float(np.float32(STORED[kind])) if fmt.has_global_scale else None
        q = Quantized(fmt, (rows, COLUMNS), packed.data, block_scales.data, stored, kind)
        found = b"".join(bytes(panel) for panel in lane.dequantize(q, dtype))
        nbytes = fmt.block_size * FLOAT_TYPES[dtype].nbytes
        expected = bytes(Cpu().dequantize(q, dtype))
        yield Output(f"{kernel}, {kind}", "values of block", nbytes, found, expected)


def _decoded(lane: Lane) -> Iterator[Output]:
    """Decode codes under scales of any size, in rows of any length."""
    rng = np.random.default_rng(4)
    for columns, block in product((COLUMNS, COLUMNS + 9), ((1, 32), (32, 128), (60, 1 << 20))):
        shape = (60, columns)
        counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        scales = np.ldexp(rng.normal(size=counts), rng.integers(-145, 119, counts))
        grid = Grid(scales.astype(np.float32), block)
        own = native_grid(grid, shape)
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # values that are NaN have bits of the device's own
        stored = StoredRows("decode_fp8", (codes, *own))
        expected = Cpu().decode_fp8(codes.reshape(-1).data, shape, grid)
        yield _values(lane, stored, expected)
        for bits in (4, 8):
            half = 1 << bits - 1
            items = rng.integers(0, 256, (60, -(-columns * bits // 32) * 4)).astype(np.uint8)
            zeros = rng.integers(-half, half, counts).astype(np.float32)
            for origin in (None, zeros):
                taken_off = 0 if origin is None else origin
                stored = StoredRows(f"decode_int{bits}", (items, own[0], taken_off, own[1]))
                flat = items.reshape(-1).data
                expected = Cpu().decode_integers(flat, shape, grid, bits, origin)
                yield _values(lane, stored, expected)


def _values(lane: Lane, stored: StoredRows, expected: Float32s) -> Output:
    found = bytes(lane.decode(stored, expected.nbytes))
    return Output(stored.kernel, "value", 4, found, expected.tobytes())


def _transposed(lane: Lane) -> Iterator[Output]:
    """Turn every column, or every second, of whole squares or others."""
    rng = np.random.default_rng(5)
    for dtype, shape in product(("BF16", "F32"), ((272, 544), (131, 77))):
        nbytes = FLOAT_TYPES[dtype].nbytes
        table = rng.integers(0, 256, (*shape, nbytes)).astype(np.uint8).view(f"u{nbytes}")[..., 0]
        x = Matrix(table.reshape(-1).view(np.uint8).data, dtype, shape)
        for first, step in ((0, 1), (0, 2), (1, 2)):
            expected = Cpu().transpose(x, range(first, shape[1], step))
            numbers = (*shape, first, step, expected.shape[0])
            stored = StoredRows(f"transpose_{nbytes}", (table, *numbers))
            found = bytes(lane.decode(stored, expected.data.nbytes))
            yield Output(stored.kernel, "element", nbytes, found, bytes(expected.data))


def _descents(kernels: Kernels) -> Iterator[Output]:
    """Go over the codes of rows of any size, under blocks of H and the whole."""
    rng, (rows, columns) = np.random.default_rng(6), DESCENT_SHAPE
    x = rng.normal(size=DESCENT_SHAPE) * np.exp2(rng.integers(-9, 9, (rows, 1)))
    x[1::5] *= np.exp2(rng.integers(-130, 110, x[1::5].shape))
    values = x.astype(np.float32)
    values[2::7, ::2] = 0
    for fmt, width in product(FP4_FORMATS.values(), (columns // 3, columns)):
        inputs = rng.normal(size=(columns // width, width, 2 * width)).astype(np.float32)
        h = inputs @ inputs.swapaxes(1, 2)
        h = ((h + h.swapaxes(1, 2)) / 2).astype(np.float32)
        q = Cpu().quantize(_matrix(values, "F32"), fmt, "mse", 9.0)
        expected, found = Cpu().descend(values, q, h, 2), descend(kernels, values, q, h, 2)
        kernel, parts = f"descend_{fmt.name}", (found.block_scales, expected.block_scales)
        yield Output(kernel, "scale of block", 1, *map(bytes, parts))
        parts = found.packed, expected.packed
        yield Output(kernel, "codes of block", fmt.block_size // 2, *map(bytes, parts))


def _importance(columns: int) -> Float32s:
    """Make second moments over many decades, some of them zero."""
    rng = np.random.default_rng(2)
    spread = np.exp(rng.normal(0, 5, columns)).astype(np.float32)
    return np.where(rng.random(columns) < 0.1, np.float32(0), spread)


def _matrix(values: Values, dtype: str) -> Matrix:
    return Matrix(values.reshape(-1).view(np.uint8).data, dtype, values.shape)


def adversarial_values(dtype: str, fmt: Format, group_amax: float) -> NDArray[np.generic]:
    """Make finite values that a wrong kernel rounds wrongly.

    Returns  (rows, COLUMNS); the same on every call
    """
    rng = np.random.default_rng(3)
    if fmt.has_global_scale:
        grid = decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
        steps, turns = grid[1:], (grid[1:] + grid[:-1]) / 2
        unit = group_amax / GLOBAL_RANGE
        steps, tops = steps * unit, np.repeat(turns * (E2M1_MAX * unit), 2 * REACH + 1)
    else:
        steps = np.exp2(np.arange(E8M0_STORED_MAX + 1) - 127.0)
        tops = np.outer(steps, TURNS).ravel()
    parts = [
        _around_midpoints(rng, dtype, fmt, steps),
        _around_midpoints(rng, dtype, fmt, steps),
        _around_tops(rng, dtype, fmt, tops),
        _extremes(rng, dtype, 256, fmt.block_size),
        _weights(rng, dtype, 256, fmt.block_size),
    ]
    values = np.concatenate([part.reshape(-1) for part in parts])
    return np.resize(values, (-(-values.size // COLUMNS), COLUMNS))


def _around_midpoints(
    rng: np.random.Generator, dtype: str, fmt: Format, steps: Doubles
) -> NDArray[np.generic]:
    """Put values beside midpoints of E2M1, in blocks with these steps."""
    shape = (steps.size, fmt.block_size)
    magnitudes = rng.choice(MIDPOINTS, shape) * steps[:, None]
    magnitudes[:, 0] = E2M1_MAX * steps
    ulps = rng.integers(-REACH, REACH + 1, shape)
    ulps[:, 0] = 0
    return _nudged(magnitudes, ulps, rng.random(shape) < 0.5, dtype)


def _around_e4m3(dtype: str) -> NDArray[np.generic]:
    """Put values beside midpoints of E4M3, under scales of rows of 32."""
    rng = np.random.default_rng(6)
    grid = decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    shape = (200 * COLUMNS // 32, 32)
    steps = np.exp2(rng.integers(-140, 119, (shape[0], 1)).astype(np.float64))
    magnitudes = rng.choice((grid[1:] + grid[:-1]) / 2, shape) * steps
    magnitudes[:, :1] = E4M3_MAX * steps
    ulps = rng.integers(-REACH, REACH + 1, shape)
    ulps[:, 0] = 0
    return _nudged(magnitudes, ulps, rng.random(shape) < 0.5, dtype).reshape(-1, COLUMNS)


def _around_tops(
    rng: np.random.Generator, dtype: str, fmt: Format, tops: Doubles
) -> NDArray[np.generic]:
    """Make blocks whose largest value is beside a turn of the block scale."""
    shape = (tops.size, fmt.block_size)
    magnitudes = rng.random(shape) * 0.99 * tops[:, None]
    ulps = np.zeros(shape, np.int64)
    magnitudes[:, -1], ulps[:, -1] = tops, np.resize(np.arange(-REACH, REACH + 1), tops.size)
    return _nudged(magnitudes, ulps, rng.random(shape) < 0.5, dtype)


def _extremes(
    rng: np.random.Generator, dtype: str, count: int, block_size: int
) -> NDArray[np.generic]:
    """Mix zeros of both signs, subnormals, ones and the largest values.

    Some blocks hold zeros alone, some subnormals.
    """
    kind = FLOAT_DTYPES[dtype]
    least = float(np.ones(1, f"u{kind.itemsize}").view(kind)[0])
    largest = float(_largest(dtype)[0])
    kinds = np.array([0.0, least, 3 * least, 90 * least, 1.0, largest / 3, largest])
    chosen = rng.integers(0, len(kinds), (count, block_size))
    chosen[::5] %= 1
    chosen[1::5] %= 4
    zeros = np.zeros(chosen.shape, np.int64)
    return _nudged(kinds[chosen], zeros, rng.random(chosen.shape) < 0.5, dtype)


def _weights(
    rng: np.random.Generator, dtype: str, count: int, block_size: int
) -> NDArray[np.generic]:
    """Make ordinary weights in half of the blocks, any exponent in the others."""
    magnitudes = np.abs(rng.normal(0, 0.02, (count, block_size)))
    magnitudes[::2] *= np.exp2(rng.integers(-150, 135, (len(magnitudes[::2]), 1)))
    zeros = np.zeros(magnitudes.shape, np.int64)
    return _nudged(magnitudes, zeros, rng.random(magnitudes.shape) < 0.5, dtype)


def _largest(dtype: str) -> NDArray[np.generic]:
    """Return the largest finite value: one bit below infinity."""
    kind = FLOAT_DTYPES[dtype]
    infinity = np.array([np.inf], np.float32).astype(kind)
    found: NDArray[np.generic] = (infinity.view(f"u{kind.itemsize}") - 1).view(kind)
    return found


def _nudged(
    magnitudes: Doubles, ulps: NDArray[np.int64], is_negative: NDArray[np.bool_], dtype: str
) -> NDArray[np.generic]:
    """Round to the dtype, then move by units in the last place.

    What would be infinite stays the largest finite value.
    """
    kind = FLOAT_DTYPES[dtype]
    unsigned = np.dtype(f"u{kind.itemsize}")
    largest = _largest(dtype)
    narrow = np.minimum(magnitudes, float(largest[0])).astype(np.float32).astype(kind)
    last = int(largest.view(unsigned)[0])
    bits = np.clip(narrow.view(unsigned).astype(np.int64) + ulps, 0, last)
    signed = bits | is_negative.astype(np.int64) << (8 * kind.itemsize - 1)
    found: NDArray[np.generic] = signed.astype(unsigned).view(kind)
    return found
