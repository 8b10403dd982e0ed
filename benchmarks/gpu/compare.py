"""Compare the output of every kernel on this GPU.

Bytes are those of the CPU backend, products those of float64.

Decides what is compared, on adversarial.py's data, before anything is measured.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp4convert.numerics import codec
from fp4convert.numerics.backends.cpu import Cpu, native_grid
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.descent import gpu_room_nbytes
from fp4convert.numerics.formats import (
    CODES,
    FLOAT_TYPES,
    FP4_FORMATS,
    IMPORTANCE,
    NVFP4,
    ROW_SUMS,
    Format,
    kernel_of,
    rule_number,
)
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of
from fp4convert.numerics.matrices import InMemory, Matrix, Quantized
from gpu.device import LADDER, Device, M, Rung, Values
from harness.measure import SUPPORT

sys.path.append(str(SUPPORT))
import adversarial

DEQUANTIZED_SHAPE = (1024, 1024)  # of M elements
GEMV_SHAPE = (1049, 3136)  # tails everywhere, four turns of a warp
MATRICES = 5  # of a batch
NAIVE_RULES = {"nvfp4": ("amax",), "mxfp4": ("floor", "even", "ceil")}
DECODED_SHAPE = (997, 1056)  # tails of units, and of int8 and int4 scale blocks
FP8_SHAPE = (160, 1056)
FP8_BLOCKS = ((1, 32), (128, 128), (160, 1056))
DESCENT_SHAPE = (517, 1088)
SCALE_BLOCKS = {"decode_fp8": (128, 128), "decode_int4": (1, 32), "decode_int8": (1, 1 << 20)}


def compare(
    device: Device, rung: Rung, check: Callable[[Rung], None], success: str = "bytes equal"
) -> None:
    """Note what the check finds of a rung, unless one before has found a difference."""
    if device.verdicts.get(rung, success) == success:
        try:
            check(rung)
            device.verdicts[rung] = success
        except AssertionError as error:
            device.verdicts[rung] = f"DIFFERS: {error}"


def inputs(dtype: str, fmt: Format, rule: str) -> Iterator[tuple[Values, float]]:
    """(values, group amax), 2.5 million elements or more."""
    for make in adversarial.PLAIN.values():
        values = make(dtype, 256, 1024)
        yield values, float(np.abs(values.astype(np.float32)).max())
    near = rule if rule != IMPORTANCE else "mse"
    for group_amax in itertools.islice(adversarial.group_amaxes(dtype), 0, None, 4):
        blocks = adversarial.block_amaxes(dtype, group_amax, 2048)
        yield adversarial.around_midpoints(blocks, dtype, fmt, near, group_amax), group_amax


def compare_quantizers(device: Device, dtype: str, fmt: Format, rule: str) -> None:
    word, cpu = FLOAT_TYPES[dtype].word, Cpu()
    rungs = device.rungs(f"{kernel_of(fmt, rule)}_{word}")
    if dtype == "BF16" and rule in NAIVE_RULES[fmt.name]:
        name = "quantize_naive" if fmt is NVFP4 else "quantize_naive_mxfp4"
        rungs.append(Rung(device.kernels, name))
    for values, group_amax in inputs(dtype, fmt, rule):
        matrix = adversarial.matrix(values, dtype)
        importance, columns = adversarial.importance_for(rule, values.shape[1]), values.shape[1]
        expected, expected_amax = (
            cpu.quantize(matrix, fmt, rule, group_amax, importance),
            cpu.amax(matrix),
        )
        x, amax = (
            device.upload(matrix.data),
            [device.upload(np.float32(group_amax))] if fmt.has_global_scale else [],
        )
        weights = (
            []
            if importance is None
            else [device.upload(codec.weigh(importance, columns, fmt)), columns]
        )
        choice = (*amax, *rule_number(fmt, rule), *weights)

        def check_amax(
            rung: Rung, n: int = values.size, x: Any = x, expected: float = expected_amax
        ) -> None:
            found = device.upload(np.float32(0))
            rung.launch(n, x, n, found)
            assert found.get().view(np.float32)[0] == expected, f"{rung.name}: expected {expected}"

        def check(
            rung: Rung,
            values: Values = values,
            x: Any = x,
            choice: Any = choice,
            expected: Quantized = expected,
        ) -> None:
            n, parts = (
                values.size,
                [device.poisoned(part.nbytes) for part in (expected.packed, expected.block_scales)],
            )
            rung.launch(n, x, n, *choice, *parts)
            packed, block_scales = (part.get().data for part in parts)
            found = Quantized(fmt, expected.shape, packed, block_scales, expected.global_scale)
            adversarial.assert_same_bytes(found, expected, values, f"{rung.name} {rule}")

        for rung in rungs:
            compare(device, rung, check)
        compare(device, Rung(device.kernels, f"amax_{word}"), check_amax)


def compare_dequantizers(device: Device, dtype: str, fmt: Format) -> None:
    """Every code with every finite block scale within the dtype's range, at random."""
    rng, cpu, shape = np.random.default_rng(1), Cpu(), DEQUANTIZED_SHAPE
    low, high = (0, 127) if fmt is NVFP4 else (100, 140) if dtype == "F16" else (0, 253)
    packed = rng.integers(0, 256, M // 2).astype(np.uint8)
    block_scales = rng.integers(low, high, M // fmt.block_size).astype(np.uint8)
    rungs = [Rung(device.kernels, f"dequantize_{fmt.name}_{FLOAT_TYPES[dtype].word}")]
    if (fmt, dtype) == (NVFP4, "BF16"):
        rungs.append(Rung(device.kernels, "dequantize_naive"))
    for stored, kind in ((0.37, "multiplier"), (2.0**-16 * 1.1, "multiplier"), (3.7, "divisor"))[
        : 3 if fmt is NVFP4 else 1
    ]:
        narrow = float(np.float32(stored)) if fmt.has_global_scale else None
        q = Quantized(fmt, shape, packed.data, block_scales.data, narrow, kind)
        expected = np.frombuffer(cpu.dequantize(q, dtype), FLOAT_DTYPES[dtype]).reshape(shape)

        def check(
            rung: Rung, q: Quantized = q, stored: float = stored, expected: Values = expected
        ) -> None:
            y = device.poisoned(expected.nbytes)
            extra = (
                (device.upload(np.float32(stored)), int(q.kind == "divisor"))
                if q.format.has_global_scale
                else ()
            )
            rung.launch(M, device.upload(q.packed), device.upload(q.block_scales), M, *extra, y)
            adversarial.assert_same_values(
                y.get().view(expected.dtype).reshape(shape), expected, rung.name
            )

        for rung in rungs:
            compare(device, rung, check)


def compare_reports(device: Device, dtype: str, fmt: Format) -> None:
    """The sums and the histogram that a report is made of, bit for bit."""
    word, rule = FLOAT_TYPES[dtype].word, "amax" if fmt.has_global_scale else "even"
    rung, counter = (
        Rung(device.kernels, name) for name in (f"compare_{fmt.name}_{word}", "count_codes")
    )
    for values, group_amax in inputs(dtype, fmt, rule):
        matrix = adversarial.matrix(values, dtype)
        q = Cpu().quantize(matrix, fmt, rule, group_amax)
        expected = Cpu().compare(matrix, q)
        packed = device.upload(q.packed)

        def check_sums(
            rung: Rung,
            x: Any = matrix.data,
            shape: tuple[int, ...] = values.shape,
            q: Quantized = q,
            packed: Any = packed,
            expected: bytes = bytes(expected.rows),
        ) -> None:
            sums = device.poisoned(len(expected))
            extra = (device.upload(np.float32(q.global_scale)), 0) if fmt.has_global_scale else ()
            parts = (packed, device.upload(q.block_scales), *extra, sums)
            rung.launch(shape[0], device.upload(x), *shape, *parts)
            found = sums.get().tobytes()
            assert found == expected, f"{rung.name}: sums of rows"

        def check_counts(
            rung: Rung,
            n: int = values.size,
            packed: Any = packed,
            expected: bytes = bytes(expected.counts),
        ) -> None:
            counts = device.upload(np.zeros(CODES, np.int64))
            rung.launch(n, packed, n // 2, counts)
            assert counts.get().tobytes() == expected, f"{rung.name}: counts of codes"

        compare(device, rung, check_sums)
        compare(device, counter, check_counts)


def vectors_of(kind: str, vectors: int, columns: int) -> tuple[list[Values], Values]:
    """(x, its block scales, its global scale) as gemv takes them, and the vectors in float64; kind:
    bf16, fp16, nvfp4.
    """
    values = np.random.default_rng(vectors).standard_normal((vectors, columns)).astype(np.float32)
    if kind == "nvfp4":
        q = codec.quantize(values, NVFP4, "amax")
        parts = [
            np.frombuffer(q.packed, np.uint8),
            np.frombuffer(q.block_scales, np.uint8),
            np.float32(q.global_scale),
        ]
        return parts, codec.dequantize(q).astype(np.float64)
    narrow = values.astype(FLOAT_DTYPES[{"bf16": "BF16", "fp16": "F16"}[kind]])
    return [narrow.view(np.uint16), np.float32(0), np.float32(0)], narrow.astype(np.float64)


def product_and_reach(q: Quantized, x: Values) -> tuple[Values, Values]:
    """(vectors, rows) in float64, and how far float32 sums in any order, then rounded to fp16, may
    be from that.
    """
    weights = codec.dequantize(q).astype(np.float64)
    expected = x @ weights.T
    sums = q.shape[1] * 2.0**-24 * (np.abs(x) @ np.abs(weights).T)
    return expected, 1.01 * sums + 2.0**-11 * np.abs(expected) + 2.0**-25


def compare_gemv(device: Device, fmt: Format, kind: str, vectors: int) -> None:
    rows, columns = GEMV_SHAPE
    weights = np.random.default_rng(2).standard_normal((rows, columns)).astype(np.float32)
    q = codec.quantize(weights, fmt, fmt.default_rule)
    parts, x = vectors_of(kind, vectors, columns)
    expected, reach = product_and_reach(q, x)
    stored = np.float32(1.0 if q.global_scale is None else q.global_scale)
    arguments = [device.upload(part) for part in (q.packed, q.block_scales, stored)]
    vector_arguments = [device.upload(part) for part in parts]

    def check(rung: Rung) -> None:
        y = device.poisoned(2 * vectors * rows)
        shape = (rows, columns)
        rung.launch((rows, vectors), *arguments, 0, *shape, *vector_arguments, vectors, y)
        off = np.abs(y.get().view(np.float16).reshape(vectors, rows) - expected) / reach
        assert off.max() <= 1, (
            f"{rung.name}: {off.max():.3g} times as far from float64 as float32 may be"
        )  # NaN fails too

    rungs = device.rungs(f"gemv_{fmt.name}_{kind}")
    if (fmt, kind, vectors) == (NVFP4, "fp16", 1):
        rungs += [Rung(device.kernels, name) for name in LADDER]
    for rung in rungs:
        compare(device, rung, check, success="product right")


def compare_batch(device: Device) -> None:
    """Many matrices in one launch, each with its own vector and global scale."""
    shape = (rows, columns) = GEMV_SHAPE
    rng = np.random.default_rng(4)
    batch = [
        codec.quantize(size * rng.standard_normal(shape).astype(np.float32), NVFP4, "amax")
        for size in range(1, MATRICES + 1)
    ]
    (raw, *_), x = vectors_of("fp16", MATRICES, columns)
    pairs = [product_and_reach(q, x[[z]]) for z, q in enumerate(batch)]
    expected, reach = (np.concatenate(part) for part in zip(*pairs, strict=True))
    packed, block_scales = (
        b"".join(getattr(q, part) for q in batch) for part in ("packed", "block_scales")
    )
    stored = np.array([q.global_scale for q in batch], np.float32)
    codes = (np.frombuffer(part, np.uint8) for part in (packed, block_scales))
    arguments = [device.upload(part) for part in (*codes, stored)]

    def check(rung: Rung) -> None:
        y = device.poisoned(2 * MATRICES * rows)
        vector = (device.upload(raw), 0, 0, 1)
        rung.launch((rows, 1, MATRICES), *arguments, 0, *shape, *vector, y)
        off = np.abs(y.get().view(np.float16).reshape(MATRICES, rows) - expected) / reach
        assert off.max() <= 1, f"{rung.name}: {off.max():.3g} times as far as float32 may be"

    for rung in device.rungs("gemv_nvfp4_fp16"):
        compare(device, rung, check, success="product right")


def compare_decoders(device: Device, name: str) -> None:
    """Codes under scales of any size; integers with and without zero points."""
    rng, (rows, columns) = np.random.default_rng(3), DECODED_SHAPE
    bits = 8 if name == "decode_fp8" else int(name[-1])
    codes = rng.integers(0, 256, (rows, -(-columns * bits // 32) * 4)).astype(np.uint8)
    codes = codes[:, :columns] if name == "decode_fp8" else codes
    flat, block = np.ascontiguousarray(codes).reshape(-1), SCALE_BLOCKS[name]
    counts = (-(-rows // block[0]), -(-columns // block[1]))
    scales = np.ldexp(rng.normal(size=counts), rng.integers(-145, 119, counts))
    grid = Grid(scales.astype(np.float32), block)
    zeros = rng.integers(-(1 << bits - 1), 1 << bits - 1, counts).astype(np.float32)
    for zero_points in (None,) if name == "decode_fp8" else (None, zeros):
        if name == "decode_fp8":
            expected, more = Cpu().decode_fp8(flat.data, DECODED_SHAPE, grid), []
        else:
            expected = Cpu().decode_integers(flat.data, DECODED_SHAPE, grid, bits, zero_points)
            more = [0 if zero_points is None else device.upload(zero_points)]
        own, layout = (device.upload(part) for part in native_grid(grid, DECODED_SHAPE))
        tables = (device.upload(flat), own, *more, layout)

        def check(
            rung: Rung,
            expected: Values = expected,
            tables: Any = tables,
        ) -> None:
            y = device.poisoned(expected.nbytes)
            rung.launch(expected.size, *tables, y)
            found = y.get().view(np.float32).reshape(expected.shape)
            adversarial.assert_same_values(found, expected, rung.name)

        compare(device, Rung(device.kernels, name), check)


def compare_to_fp8(device: Device, dtype: str, block: tuple[int, int]) -> None:
    """Amaxes, codes, costs and sums of rows, from values of every kind."""
    word, cpu = FLOAT_TYPES[dtype].word, Cpu()
    for make in adversarial.PLAIN.values():
        weights = InMemory(adversarial.matrix(make(dtype, *FP8_SHAPE), dtype))
        amaxes = cpu.block_amaxes(weights, block)
        scales = fp8_scales_of(amaxes)
        (costs,) = cpu.block_costs(weights, block, [scales])
        whole = next(iter(cpu.fp8_panels(weights, block, scales)))
        values = cpu.decode_fp8(whole.codes, FP8_SHAPE, Grid(scales, block))
        x, y = device.upload(weights.matrix.data), device.upload(values)
        own, layout = (device.upload(part) for part in native_grid(Grid(scales, block), FP8_SHAPE))
        down, across = scales.shape
        row_costs = device.poisoned(8 * FP8_SHAPE[0] * across)
        zeros, n, rows = np.zeros(scales.size), FP8_SHAPE[0] * FP8_SHAPE[1], FP8_SHAPE[0]
        calls = {  # name -> launched for, arguments, what is written there, what is expected
            f"grid_amax_{word}": (n, (x, layout), zeros.astype(np.float32), amaxes.tobytes()),
            f"quantize_fp8_{word}": (n, (x, own, layout), bytes(n), bytes(whole.codes)),
            f"row_costs_{word}": (rows * across, (x, own, layout), None, b""),
            "add_costs": (down * across, (row_costs, layout), zeros, costs.tobytes()),
            f"compare_values_{word}": (
                rows,
                (x, *FP8_SHAPE, y),
                bytes(8 * ROW_SUMS * rows),
                bytes(whole.compared.rows),
            ),
        }

        def check(rung: Rung, calls: dict[str, Any] = calls, row_costs: Any = row_costs) -> None:
            count, arguments, before, expected = calls[rung.name]
            found = row_costs if before is None else device.upload(before)
            rung.launch(count, *arguments, found)  # costs of rows are looked at when added
            assert before is None or found.get().tobytes() == expected, f"{rung.name}, {block}"

        for name in calls:
            compare(device, Rung(device.kernels, name), check)


def compare_transposes(device: Device, name: str) -> None:
    """All columns, and every second from either of the first; whole squares and edges."""
    nbytes, dtype = int(name[-1]), {"2": "BF16", "4": "F32"}[name[-1]]
    for rows, width in ((M >> 10, 1024), (997, 1057)):
        table = np.random.default_rng(5).integers(0, 256, rows * width * nbytes).astype(np.uint8)
        x = device.upload(table)
        for first, step in ((0, 1), (0, 2), (1, 2)):
            columns = range(first, width, step)
            expected = Cpu().transpose(Matrix(table.data, dtype, (rows, width)), columns)

            def check(
                rung: Rung,
                expected: bytes = bytes(expected.data),
                x: Any = x,
                shape: tuple[int, ...] = (rows, width, first, step, len(columns)),
            ) -> None:
                y = device.poisoned(len(expected))
                rung.launch((shape[0], shape[-1]), x, *shape, y)
                assert y.get().tobytes() == expected, f"{rung.name}: {shape}"

            compare(device, Rung(device.kernels, name), check)


def descended(fmt: Format, shape: tuple[int, int], width: int) -> tuple[Values, Quantized, Values]:
    """Weights, their codes, and blocks of H, as descents take them."""
    rng, count = np.random.default_rng(6), -(-shape[1] // width)
    x = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    inputs = rng.standard_normal((count, width, -(-width // 16)), np.float32)
    h = inputs @ inputs.swapaxes(1, 2) + np.eye(width, dtype=np.float32)
    matrix = adversarial.matrix(x, "F32")
    q = Cpu().quantize(matrix, fmt, fmt.default_rule, Cpu().amax(matrix))
    return x, q, (h + h.swapaxes(1, 2)) / np.float32(2)


def compare_descents(device: Device, fmt: Format) -> None:
    """Blocks of H, of which the last reaches beyond the columns, and the whole."""
    rows, columns = DESCENT_SHAPE
    for width, passes in itertools.product((columns, columns // 2 + 32), (1, 3)):
        x, q, h = descended(fmt, DESCENT_SHAPE, width)
        expected = Cpu().descend(x, q, h, passes)
        sizes = np.array([rows, columns, width, passes, rows])
        stored = [np.float32(q.global_scale)] if fmt.has_global_scale else []
        parts = [device.upload(part) for part in (x, h, sizes, *stored, q.packed, q.block_scales)]

        def check(
            rung: Rung,
            parts: Any = parts,
            expected: Quantized = expected,
            width: int = width,
        ) -> None:
            room = device.poisoned(gpu_room_nbytes(rows, width))
            found = [
                device.poisoned(part.nbytes) for part in (expected.packed, expected.block_scales)
            ]
            rung.launch(rows, *parts, *found, room)
            packed, block_scales = (part.get().tobytes() for part in found)
            assert block_scales == bytes(expected.block_scales), f"{rung.name}: block scales"
            assert packed == bytes(expected.packed), f"{rung.name}: codes"

        compare(device, Rung(device.kernels, f"descend_{fmt.name}"), check)


def compare_all(device: Device) -> str:
    for dtype, fmt in itertools.product(FLOAT_TYPES, FP4_FORMATS.values()):
        for rule in fmt.scale_rules:
            compare_quantizers(device, dtype, fmt, rule)
        compare_dequantizers(device, dtype, fmt)
        compare_reports(device, dtype, fmt)
    for fmt, kind, vectors in itertools.product(
        FP4_FORMATS.values(), ("bf16", "fp16", "nvfp4"), (1, 3, 8)
    ):
        compare_gemv(device, fmt, kind, vectors)
    compare_batch(device)
    for name in SCALE_BLOCKS:
        compare_decoders(device, name)
    for dtype, block in itertools.product(FLOAT_TYPES, FP8_BLOCKS):
        compare_to_fp8(device, dtype, block)
    for name in ("transpose_2", "transpose_4"):
        compare_transposes(device, name)
    for fmt in FP4_FORMATS.values():
        compare_descents(device, fmt)
    different = [f"- {text}" for text in device.verdicts.values() if text.startswith("DIFFERS")]
    about = (
        "Quantizers (FP8, too), dequantizers, decoders of packed weights, amax and sums of reports "
        "against the CPU backend, products against float64; FP8 of 170,000 elements, descents of "
        "half a million, others of a million or more."
    )
    found = "\n".join(different) or f"All {len(device.verdicts)} kernels agree."
    return f"{about}\n\n{found}\n"
