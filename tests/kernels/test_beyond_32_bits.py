"""Kernels on more elements than 32 bits count: the last ones come out as they do alone.

Decides nothing about what they must give. On the host only the grid's last columns are run, in
memory that is there where it is touched; on a GPU all of them (`make gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from adversarial import generator, importance_for, matrix
from ptx import compile_ptx
from simt import KERNELS
from simt_gpu import ELF, Machine

from fp4convert.numerics import codec, fp8_int
from fp4convert.numerics.backends import cubins, gpus
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import CODES, FP4_FORMATS, NVFP4, ROW_SUMS, kernel_of, rule_number
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.matrices import Quantized
from gpu import device as device_module
from gpu.device import SUMMED_COLUMNS, Device, Rung

N = (1 << 31) + 8192
COLUMNS = 64  # of all matrices; a tail is of whole blocks of threads for every kernel
ROWS, TAIL_ROWS = N // COLUMNS, 512
TAIL = TAIL_ROWS * COLUMNS
LAST = 70  # blocks of threads, enough for the tail of every kernel
RULES = [(fmt, rule) for fmt in FP4_FORMATS.values() for rule in fmt.scale_rules]
DEVICE_NBYTES = 12 * N


@pytest.fixture(
    params=[
        "host",
        pytest.param("ptx", marks=pytest.mark.slow),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
    scope="module",
)
def device(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Device]:
    made = request.getfixturevalue("simt_libraries") if request.param != "gpu" else {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_module, "BUSY_NBYTES", 1 << 10)
        if request.param == "gpu":
            found = gpus.survey()
            if not found.gpus:
                pytest.skip(f"no GPU: {found.problem}")
            if found.gpus[0].memory_nbytes < DEVICE_NBYTES:
                pytest.skip(f"no room: {DEVICE_NBYTES >> 30} GiB of device memory are wanted")
            yield Device(found.gpus[0], 600)
            return
        folder, libraries = tmp_path_factory.mktemp("large"), dict(made)
        if request.param == "ptx":
            libraries = {stem: compile_ptx(KERNELS / f"{stem}.cu", folder) for stem in made}
        Machine(libraries, is_eager=True, last=LAST).install(patched, folder)
        patched.setattr(cubins, "compile_cubin", lambda *_: (ELF, ""))
        yield Device(gpus.survey().gpus[0], 600)


def zeros(device: Device, nbytes: int, tail: Any = b"") -> Any:
    """So many bytes, the last of them given."""
    array, raw = device.cupy.zeros(nbytes, np.uint8), np.frombuffer(tail, np.uint8)
    if raw.size:
        array[nbytes - raw.size :].set(raw)
    return array


def weights() -> np.ndarray:
    """The tail of bf16; its last element is the largest."""
    values = generator(80).standard_normal((TAIL_ROWS, COLUMNS)) / 64
    values[-1, -1] = 3.0
    return values.astype(FLOAT_DTYPES["BF16"])


def launch(device: Device, name: str, count: int | tuple[int, int], *arguments: object) -> None:
    Rung(device.kernels, name).launch(count, *arguments)


def test_amax(device):
    found = device.upload(np.float32(0))
    launch(device, "amax_bf16", N, zeros(device, 2 * N, weights().tobytes()), N, found)
    assert found.get().view(np.float32)[0] == 3.0


@pytest.mark.parametrize(("fmt", "rule"), RULES, ids=lambda each: getattr(each, "name", each))
def test_quantizers(device, fmt, rule):
    values = weights()
    importance = importance_for(rule, COLUMNS)
    amax = [device.upload(np.float32(3.0))] if fmt.has_global_scale else []
    own = []
    if importance is not None:
        own = [device.upload(codec.weigh(importance, COLUMNS, fmt)), COLUMNS]
    choice = (*amax, *rule_number(fmt, rule), *own)
    x, name = zeros(device, 2 * N, values.tobytes()), f"{kernel_of(fmt, rule)}_bf16"
    packed, block_scales = (zeros(device, size) for size in (N // 2, N // fmt.block_size))
    launch(device, name, N, x, N, *choice, packed, block_scales)
    expected = codec.quantize(values.astype(np.float32), fmt, rule, 3.0, importance)
    assert packed[N // 2 - TAIL // 2 :].get().tobytes() == bytes(expected.packed)
    found = block_scales[(N - TAIL) // fmt.block_size :].get()
    assert found.tobytes() == bytes(expected.block_scales)


def quantized(fmt: Any) -> Quantized:
    return codec.quantize(weights().astype(np.float32), fmt, fmt.scale_rules[0], 3.0)


def blocks(device: Device, q: Quantized) -> list[object]:
    """Codes, block scales and what a global scale is told with."""
    parts = [zeros(device, N // 2, q.packed), zeros(device, N // q.format.block_size)]
    parts[1] = zeros(device, N // q.format.block_size, q.block_scales)
    if q.format.has_global_scale:
        return [*parts, device.upload(np.float32(q.global_scale)), 0]
    return parts


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_dequantizers(device, fmt):
    q = quantized(fmt)
    y = zeros(device, 2 * N)
    packed, block_scales, *extra = blocks(device, q)
    launch(device, f"dequantize_{fmt.name}_bf16", N, packed, block_scales, N, *extra, y)
    expected = codec.dequantize(q).astype(FLOAT_DTYPES["BF16"])
    assert expected.any()
    assert y[2 * (N - TAIL) :].get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_reports(device, fmt):
    """Of long rows: a warp takes many that are short, and leaves the grid's last columns idle."""
    columns, q = SUMMED_COLUMNS, quantized(fmt)
    rows, tail_rows = N // columns, TAIL // columns
    values = weights().reshape(tail_rows, columns)
    expected = Cpu().compare(matrix(values, "BF16"), replace(q, shape=values.shape))
    x = zeros(device, 2 * N, values.tobytes())
    sums = zeros(device, 8 * ROW_SUMS * rows)
    launch(device, f"compare_{fmt.name}_bf16", rows, x, rows, columns, *blocks(device, q), sums)
    found = sums[8 * ROW_SUMS * (rows - tail_rows) :].get()
    assert found.tobytes() == bytes(expected.rows)


def test_counts(device):
    """Of more codes than 32 bits count; those that are 0 are not all looked at on the host."""
    q = quantized(NVFP4)
    counts = device.upload(np.zeros(CODES, np.int64))
    launch(device, "count_codes", N, zeros(device, N // 2, q.packed), N // 2, counts)
    codes = np.frombuffer(q.packed, np.uint8)
    expected = np.bincount(codes & 15, minlength=16) + np.bincount(codes >> 4, minlength=16)
    assert (counts.get().view(np.int64)[1:] == expected[1:]).all()


@pytest.mark.parametrize("name", ["decode_fp8", "decode_int4", "decode_int8"])
def test_decoders(device, name):
    """One scale for each row, one code for each element."""
    rng, bits = generator(81), int(name[-1]) if name.startswith("decode_int") else 8
    codes = rng.integers(0, 256, (TAIL_ROWS, COLUMNS * bits // 8)).astype(np.uint8)
    scales = rng.normal(size=(TAIL_ROWS, 1)).astype(np.float32)
    where, shape = Grid(scales, (1, COLUMNS)), (TAIL_ROWS, COLUMNS)
    decode = fp8_int.decode_fp8 if name == "decode_fp8" else fp8_int.decode_integers
    more = () if name == "decode_fp8" else (bits,)
    expected = decode(codes.reshape(-1).data, shape, where, *more)
    grid = device.upload(np.array([ROWS, COLUMNS, 1, COLUMNS, 0], np.int64))
    tables = (zeros(device, N * bits // 8, codes.tobytes()), zeros(device, 4 * ROWS, scales))
    y = zeros(device, 4 * N)
    launch(device, name, N, *tables, *((0,) if more else ()), grid, y)
    found = y[4 * (N - TAIL) :].get().view(np.float32).reshape(shape)
    assert ((found == expected) | np.isnan(found) & np.isnan(expected)).all()


@pytest.mark.parametrize("more", [0, 1], ids=["squares", "elements"])
@pytest.mark.parametrize("nbytes", [2, 4])
def test_transposes(device, nbytes, more):
    """The last rows of x, which lie far apart in y; odd numbers of rows go element by element."""
    rows, width = ROWS + more, COLUMNS + more
    n = rows * width
    table = generator(82).integers(0, 256, (TAIL_ROWS, width, nbytes)).astype(np.uint8)
    x, y = zeros(device, nbytes * n, table.tobytes()), zeros(device, nbytes * n)
    launch(device, f"transpose_{nbytes}", (rows, width), x, rows, width, 0, 1, width, y)
    for column in range(width):
        end = (column + 1) * rows * nbytes
        found = y[end - TAIL_ROWS * nbytes // 2 : end].get()
        assert found.tobytes() == table[TAIL_ROWS // 2 :, column].tobytes(), column


def test_products(device):
    q = quantized(NVFP4)
    x = generator(83).standard_normal(COLUMNS).astype(np.float16)
    y = zeros(device, 2 * ROWS)
    launch(
        device,
        "gemv_nvfp4_fp16",
        (ROWS, 1),
        *blocks(device, q),
        ROWS,
        COLUMNS,
        device.upload(x),
        0,
        0,
        1,
        y,
    )
    exact = codec.dequantize(q).astype(np.float64) @ x.astype(np.float64)
    found = y[2 * (ROWS - TAIL_ROWS) :].get().view(np.float16)
    assert exact.any()
    assert np.allclose(found, exact, rtol=2.0**-10, atol=2.0**-14)
