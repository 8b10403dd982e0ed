"""On a real GPU (`make gpu`): a gigabyte and more through every kernel, whole conversions,
products; bytes as on the CPU.

Without a GPU all of this is skipped, with the reason; nothing else in the tests says that a GPU was
tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from adversarial import (
    PLAIN,
    Values,
    around_midpoints,
    assert_same_bytes,
    block_amaxes,
    every_finite,
    generator,
    group_amaxes,
    importance_for,
    matrix,
)
from checkpoints import bf16, run, write_checkpoint
from cpu_levels import EVERY_DTYPE, EVERY_RULE
from scale_grids import same, some_scales

from fp4convert import DeviceQuantized, multiply_tensor
from fp4convert.numerics import codec
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.backends.cuda import Cuda
from fp4convert.numerics.backends.cuda_kernels import Kernels
from fp4convert.numerics.backends.cuda_stream import Lane
from fp4convert.numerics.backends.gpus import survey
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import CODES, FP4_FORMATS, NVFP4
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of
from fp4convert.numerics.matrices import InMemory, Quantized, StoredRows

pytestmark = pytest.mark.gpu
CHUNK_NBYTES = 128 << 20
CHUNKS = 9  # 1.2 GB of every dtype
ODD_NBYTES = 16 << 20  # of chunks of random bits, of which the CPU's searches take 30 times as long
COLUMNS = 4096
LAYERS = 4  # of whole conversions
DESCENT_SHAPE = (1025, 2048)
PRODUCTS = ((33, 64, 1), (1000, 2112, 3), (4096, 4096, 8))  # rows, columns, vectors


@pytest.fixture(scope="module")
def gpu() -> Cuda:
    found = survey()
    if not found.gpus:
        pytest.skip(f"no GPU: {found.problem}")
    return Cuda(found.gpus[:1])


@pytest.fixture(scope="module")
def lane(gpu: Cuda) -> Iterator[Lane]:
    """Decodes rows that are stored packed."""
    made = Lane(Kernels(survey().gpus[0]))
    with made.device:
        yield made
    made.finish()


def any_bits(dtype: str, number: int) -> Values:
    """Random bit patterns, the exponent of Inf and NaN made finite; a tenth are zeros of both
    signs.
    """
    itemsize = FLOAT_DTYPES[dtype].itemsize
    unsigned = np.dtype(f"u{itemsize}").type
    raw = np.frombuffer(generator(number).bytes(ODD_NBYTES), unsigned).copy()
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[dtype]
    raw[(raw & unsigned(exponent)) == exponent] ^= unsigned(exponent & -exponent)
    raw[:: 10 + number] &= unsigned(1 << (8 * itemsize - 1))
    return raw.view(FLOAT_DTYPES[dtype]).reshape(-1, COLUMNS)


def like_weights(dtype: str, number: int) -> Values:
    count = CHUNK_NBYTES // FLOAT_DTYPES[dtype].itemsize
    wide = generator(number).standard_normal(count, np.float32) * np.float32(0.02)
    return wide.astype(FLOAT_DTYPES[dtype]).reshape(-1, COLUMNS)


def chunks(dtype: str) -> Iterator[Values]:
    for number in range(2 * CHUNKS):
        yield (any_bits, like_weights)[number % 2](dtype, number)


def amax_of(values: Values, number: int) -> float:
    """The data's own, a power of two (exact ties), one of eight bits, a tiny one: in turn for
    either kind of chunk.
    """
    own = float(np.abs(values.astype(np.float32)).max())
    given = (own, 2688.0 * 2.0 ** -(number + 3), (129 + 14 * number) * 2.0**-6, 1e-30)
    return given[number // 2 % 4]


@EVERY_DTYPE
def test_amax(gpu, dtype):
    for values in chunks(dtype):
        assert gpu.amax(matrix(values, dtype)) == Cpu().amax(matrix(values, dtype))


@EVERY_RULE
@EVERY_DTYPE
def test_quantize(gpu, dtype, fmt, rule):
    for number, values in enumerate(chunks(dtype)):
        x, importance = matrix(values, dtype), importance_for(rule, values.shape[1])
        amax = amax_of(values, number) if fmt.has_global_scale else 0.0
        found, expected = (
            backend.quantize(x, fmt, rule, amax, importance) for backend in (gpu, Cpu())
        )
        assert_same_bytes(
            found, expected, values, f"{dtype}, chunk {number}, {rule}, amax {amax.hex()}"
        )


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@EVERY_DTYPE
def test_reports(gpu, fmt, dtype):
    """What was lost of every row, and how often each code came, bit for bit."""
    for number, values in zip(range(2), chunks(dtype), strict=False):
        x = matrix(values, dtype)
        whole = Cpu().quantize(x, fmt, fmt.default_rule, Cpu().amax(x))
        sums, counts, row = b"", np.zeros(CODES, np.int64), 0
        for _, q in gpu.quantize_group([InMemory(x)], [InMemory(x)], fmt, fmt.default_rule):
            sums += bytes(q.compared.rows)
            counts += np.frombuffer(q.compared.counts, np.int64)
            row += q.shape[0]
        expected = Cpu().compare(x, whole)
        assert row == len(values), number
        assert sums == bytes(expected.rows)
        assert counts.tobytes() == bytes(expected.counts)


@pytest.mark.parametrize("name", ["decode_fp8", "decode_int4", "decode_int8"])
def test_packed_rows(lane, name):
    """Codes under scales of any size in blocks that cut units, every second with zero points."""
    bits = 8 if name == "decode_fp8" else int(name[-1])
    for number in range(CHUNKS):
        rng = generator(number, 6)
        shape = (CHUNK_NBYTES // 4 // COLUMNS, COLUMNS - 8 * (number % 2))
        codes = rng.integers(0, 256, (shape[0], shape[1] * bits // 8)).astype(np.uint8)
        block = ((128, 128), (1, 32), (1, 60), (1, COLUMNS))[number % 4]
        grid = Grid(some_scales(*shape, block), block)
        own, flat = native_grid(grid, shape), codes.reshape(-1).data
        if name == "decode_fp8":
            stored = StoredRows(name, (codes, *own))
            expected = Cpu().decode_fp8(flat, shape, grid)
        else:
            half = 1 << bits - 1
            zeros = rng.integers(-half, half, own[0].shape).astype(np.float32)
            origin = zeros if number % 3 else None
            stored = StoredRows(name, (codes, own[0], 0 if origin is None else origin, own[1]))
            expected = Cpu().decode_integers(flat, shape, grid, bits, origin)
        found = np.frombuffer(lane.decode(stored, expected.nbytes), np.float32).reshape(shape)
        same(found, expected)


@pytest.mark.parametrize("block", [(1, 32), (1, COLUMNS), (128, 128), (1 << 20, COLUMNS)])
@EVERY_DTYPE
def test_fp8(gpu, dtype, block):
    """Half a GB of every dtype: amaxes, costs, codes and what rows lost, in blocks of each kind."""
    for number, values in zip(range(8), chunks(dtype), strict=False):
        weights, cpu = InMemory(matrix(values, dtype)), Cpu()
        own = min(block[0], len(values)), block[1]
        with gpu.fp8_passes(weights) as passes:
            amaxes = passes.block_amaxes(weights, own)
            assert amaxes.tobytes() == cpu.block_amaxes(weights, own).tobytes(), number
            scales = fp8_scales_of(amaxes)
            if number % 4 < 2:  # the CPU takes seconds for them
                costs = [p.block_costs(weights, own, [scales]).tobytes() for p in (passes, cpu)]
                assert costs[0] == costs[1], number
            found, expected = (
                [
                    b"".join(parts)
                    for parts in zip(
                        *(
                            (bytes(p.codes), bytes(p.compared.rows))
                            for p in each.fp8_panels(weights, own, scales)
                        ),
                        strict=True,
                    )
                ]
                for each in (passes, cpu)
            )
        assert found == expected, number


@pytest.mark.parametrize("nbytes", [2, 4])
def test_transposed_stacks(lane, nbytes):
    """All columns, and every second; whole squares and edges."""
    for number in range(CHUNKS):
        width = COLUMNS - number % 3
        rows = CHUNK_NBYTES // nbytes // COLUMNS
        raw = np.frombuffer(generator(number, 7).bytes(rows * width * nbytes), f"u{nbytes}")
        table, first, step = raw.reshape(rows, width), number % 2, 1 + number % 2
        expected = table[:, first::step].T.tobytes()
        numbers = (rows, width, first, step, len(range(first, width, step)))
        stored = StoredRows(f"transpose_{nbytes}", (table, *numbers))
        assert bytes(lane.decode(stored, len(expected))) == expected


@pytest.mark.parametrize("blocks", [128, None], ids=["128", "whole"])
@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_descents(gpu, fmt, blocks):
    """Under blocks of H and the whole, an odd number of rows; some rows are of any size, and some
    of zeros.
    """
    width = blocks or DESCENT_SHAPE[1]
    x = generator(8, width).standard_normal(DESCENT_SHAPE, np.float32)
    x[::9] *= np.exp2(generator(9).integers(-30, 30, (len(x[::9]), 1))).astype(np.float32)
    x[::31] = 0
    shape = (DESCENT_SHAPE[1] // width, width, 2 * width)
    inputs = generator(10, width).standard_normal(shape, np.float32)
    h = inputs @ inputs.swapaxes(1, 2)
    h = (h + h.swapaxes(1, 2)) / np.float32(2)
    for rule in (fmt.scale_rules[0], fmt.default_rule):
        q = Cpu().quantize(matrix(x, "F32"), fmt, rule, 5.0)
        for passes in (1, 3):
            expected = Cpu().descend(x, q, h, passes)
            assert bytes(expected.packed) != bytes(q.packed)
            assert_same_bytes(gpu.descend(x, q, h, passes), expected, x, f"{rule}, {passes} passes")


@EVERY_DTYPE
def test_values_beside_midpoints(gpu, dtype):
    for group_amax in group_amaxes(dtype):
        values = around_midpoints(
            block_amaxes(dtype, group_amax, 1500), dtype, NVFP4, "amax", group_amax
        )
        expected = codec.quantize(values.astype(np.float32), NVFP4, "amax", group_amax)
        assert_same_bytes(
            gpu.quantize(matrix(values, dtype), NVFP4, "amax", group_amax),
            expected,
            values,
            group_amax.hex(),
        )


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_value(gpu, dtype):
    values = every_finite(dtype)
    values = np.resize(values, (len(values) // 32 + 1, 32))
    for fmt in FP4_FORMATS.values():
        for rule in fmt.scale_rules:
            importance = importance_for(rule, 32)
            for group_amax in group_amaxes(dtype):
                expected = Cpu().quantize(matrix(values, dtype), fmt, rule, group_amax, importance)
                found = gpu.quantize(matrix(values, dtype), fmt, rule, group_amax, importance)
                assert_same_bytes(found, expected, values, rule)


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@EVERY_DTYPE
def test_awkward_values_and_tails(gpu, make, dtype):
    for rows, columns in ((1, 32), (37, 416), (257, 32), (3, 8224)):
        values = make(dtype, rows, columns)
        amax = float(np.abs(values.astype(np.float32)).max())
        for fmt in FP4_FORMATS.values():
            expected = codec.quantize(values.astype(np.float32), fmt, fmt.default_rule, amax)
            assert_same_bytes(
                gpu.quantize(matrix(values, dtype), fmt, fmt.default_rule, amax),
                expected,
                values,
                fmt.name,
            )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@EVERY_DTYPE
def test_inf_and_nan_are_seen(gpu, dtype, bad):
    values = np.zeros((33, 512), FLOAT_DTYPES[dtype])
    for place in (0, 8191, 8192, 33 * 512 - 1):
        spoilt = values.copy()
        spoilt.reshape(-1)[place] = bad
        assert not np.isfinite(gpu.amax(matrix(spoilt, dtype)))


@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@EVERY_DTYPE
def test_dequantize(gpu, dtype, fmt, kind):
    """A gigabyte of values, from any codes and any finite scales (fp16: those that stay in its
    range).
    """
    rows = CHUNK_NBYTES // FLOAT_DTYPES[dtype].itemsize // COLUMNS
    for number in range(CHUNKS):
        rng = generator(number, 5)
        packed = memoryview(rng.bytes(rows * COLUMNS // 2))
        low, high = (1, 0x7F) if fmt is NVFP4 else ((110, 140) if dtype == "F16" else (0, 253))
        scales = memoryview(
            rng.integers(low, high, rows * COLUMNS // fmt.block_size).astype(np.uint8)
        )
        stored = (2.0**-11 / 3 if kind == "multiplier" else 2.0**11 * 1.7) if fmt is NVFP4 else None
        q = Quantized(
            fmt, (rows, COLUMNS), packed, scales, stored, kind if fmt is NVFP4 else "multiplier"
        )
        assert gpu.dequantize(q, dtype) == Cpu().dequantize(q, dtype)


def there(values: Values) -> object:
    """The array on the GPU."""
    import cupy

    host, made = np.ascontiguousarray(values), cupy.empty(values.shape, values.dtype)
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
    runtime.memcpyAsync(
        made.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream.ptr
    )
    stream.synchronize()
    return made


def quantized_there(q: Quantized) -> DeviceQuantized:
    parts = (there(np.frombuffer(part, np.uint8)) for part in (q.packed, q.block_scales))
    return DeviceQuantized(q.format, q.shape, *parts, q.global_scale, q.kind)


@pytest.mark.parametrize("kind", ["BF16", "F16", "nvfp4"])
@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
def test_products_with_vectors(gpu, fmt, kind):
    """Of three matrices in one launch."""
    for rows, columns, vectors in PRODUCTS:
        weights = generator(1, rows).standard_normal((3, rows, columns), np.float32)
        wide = generator(2, rows).standard_normal((3, vectors, columns), np.float32)
        batch = [codec.quantize(each, fmt, fmt.default_rule) for each in weights]
        if kind == "nvfp4":
            own = [codec.quantize(each, NVFP4, "amax") for each in wide]
            seen, x = np.stack([codec.dequantize(q) for q in own]), [*map(quantized_there, own)]
        else:
            narrow = wide.astype(FLOAT_DTYPES[kind])
            seen, x = narrow.astype(np.float32), there(narrow)
        dense = np.stack([codec.dequantize(q) for q in batch]).swapaxes(1, 2).astype(np.float64)
        exact, size = seen.astype(np.float64) @ dense, np.abs(seen).astype(np.float64) @ abs(dense)
        found = multiply_tensor([*map(quantized_there, batch)], x).get()
        assert (
            np.abs(found - exact) <= np.abs(exact) * 2.0**-11 + size * columns * 2.0**-24 + 2.0**-25
        ).all()


def test_every_code_pair_in_a_product(gpu):
    """One-hot vectors read back every weight exactly, by the hardware's own decoding where there is
    one.
    """
    codes = np.arange(64 * 64, dtype=np.int64).reshape(64, 64)
    packed = ((codes * 7 + codes // 64) % 256).astype(np.uint8)[:, :32]
    q = Quantized(
        NVFP4,
        (64, 64),
        memoryview(np.ascontiguousarray(packed).reshape(-1)),
        memoryview(bytes([0x38]) * 256),
        1.0,
    )
    found = multiply_tensor(quantized_there(q), there(np.eye(64, dtype=np.float16))).get()
    assert (codec.dequantize(q) == found.T).all()


@pytest.mark.parametrize(
    ("fmt", "dialect"),
    [
        ("nvfp4", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
        ("nvfp4", "modelopt"),
        ("fp8", "compressed-tensors"),
        ("fp8", "modelopt"),
        ("fp8", "deepseek"),
        ("mxfp8", "compressed-tensors"),
    ],
)
def test_the_same_artifact_as_on_the_cpu(gpu, fmt, dialect, tmp_path):
    """Matrices of several panels, scale groups across shards."""
    shapes = {
        "q_proj": (2048, 8192),
        "k_proj": (512, 8192),
        "v_proj": (512, 8192),
        "o_proj": (8192, 2048),
    }
    shards = {
        f"model-0000{number + 1}-of-00002.safetensors": {
            f"model.layers.{layer}.self_attn.{name}.weight": (
                "BF16",
                shape,
                bf16(*shape, seed=layer),
            )
            for layer in range(LAYERS)
            for name, shape in shapes.items()
            if (name == "k_proj") == bool(number)
        }
        for number in range(2)
    }
    source = write_checkpoint(tmp_path / "source", shards)
    options = ("--format", fmt, "--dialect", dialect, "--json")
    found = {
        d: run("quantize", source, *options, "--device", d, "-o", tmp_path / d).json
        for d in ("cpu", "cuda")
    }
    assert found["cuda"]["digest"] == found["cpu"]["digest"]
    back = {
        d: run(
            "dequantize", tmp_path / "cpu", "--device", d, "-o", tmp_path / f"back-{d}", "--json"
        ).json
        for d in ("cpu", "cuda")
    }
    assert back["cuda"]["digest"] == back["cpu"]["digest"]
