"""What values lose by their codes: the sums against float64 and against their order spelled out,
and every kernel against both.

Decides that error_sums.py is right, and that kernels/compare.* equal it bit for bit on each level
and on the GPU's stand-in.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from adversarial import PLAIN, Values, gaussian, generator, matrix, rounded
from cpu_levels import EVERY_DTYPE
from ptx import SOURCE_OR_PTX, every_backend
from simt import SimtKernels, survives, walled

from fp4convert.numerics import codec
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.error_sums import (
    COLUMNS,
    Sums,
    compare,
    compare_values,
    count_codes,
    summarise,
)
from fp4convert.numerics.formats import FP4_FORMATS, MXFP4, NVFP4, Format
from fp4convert.numerics.matrices import Compared, Quantized

Backends = dict[str, Cpu | SimtKernels]
EVERY_FORMAT = pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
RULE = {NVFP4: "amax", MXFP4: "floor"}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module", params=SOURCE_OR_PTX)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return every_backend(tmp_path_factory.mktemp("kernels"), request.param, (False,))


def check(backends: Backends, values: Values, dtype: str, q: Quantized) -> Sums:
    """The sums by error_sums.py, after every backend found the same rows and counts."""
    expected = compare(values.astype(np.float32), q)
    for name, backend in backends.items():
        found = backend.compare(matrix(values, dtype), q)
        assert bytes(found.counts) == bytes(expected.counts), f"{name}, {dtype}: counts"
        different = rows_of(found).view(np.uint64) != rows_of(expected).view(np.uint64)
        place = tuple(int(index) for index in np.argwhere(different)[0]) if different.any() else ()
        assert not place, (
            f"{name}, {dtype}: {COLUMNS[place[1]]} of row {place[0]}, {rows_of(found)[place]!r}"
        )
    return Sums().plus(expected, values.size)


def rows_of(compared: Compared) -> np.ndarray:
    return np.frombuffer(compared.rows, np.float64).reshape(-1, len(COLUMNS))


def by_hand(values: Values, q: Quantized) -> dict[str, float]:
    """The same in float64, a step and a code at a time, by ml_dtypes and Python alone."""
    packed = np.frombuffer(q.packed, np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(q.shape)
    kind = ml_dtypes.float8_e4m3fn if q.format is NVFP4 else ml_dtypes.float8_e8m0fnu
    scales = np.frombuffer(q.block_scales, kind).astype(np.float32)
    steps = scales if q.global_scale is None else scales * np.float32(q.global_scale)
    step = np.repeat(steps.reshape(len(values), -1), q.format.block_size, axis=1)
    y = np.array([*MAGNITUDES, *(-one for one in MAGNITUDES)], np.float32)[codes] * step
    x, far = values.astype(np.float64), y.astype(np.float64)
    return {
        "signal": float((x * x).sum()),
        "noise": float(((x - far) ** 2).sum()),
        "output": float((far * far).sum()),
        "product": float((x * far).sum()),
        "max_abs": float(np.abs(x - far).max()),
        "clipped": int((np.abs(values.astype(np.float32)) > np.float32(6) * step).sum()),
    }


@pytest.mark.sweep(3)
@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_sums_are_those_of_float64(backends: Backends, make, dtype: str, fmt: Format) -> None:  # type: ignore[no-untyped-def]
    for shape in ((5, 416), (3, 32), (2, 2080), (1, 256)):
        values = make(dtype, *shape)
        amax = float(np.abs(values.astype(np.float32)).max())
        for group_amax in (
            amax,
            min(7.3 * amax, 3e38),
            amax / 64,
        ):  # with the last, much is clipped
            q = codec.quantize(values.astype(np.float32), fmt, RULE[fmt], group_amax)
            found, expected = check(backends, values, dtype, q), by_hand(values, q)
            assert found.signal == pytest.approx(expected["signal"], rel=7e-7)
            assert found.noise == pytest.approx(expected["noise"], rel=7e-7)
            assert found.output == pytest.approx(expected["output"], rel=7e-7)
            assert found.max_abs == pytest.approx(
                expected["max_abs"], rel=2**-24
            )  # x - y is a float32
            assert found.clipped == expected["clipped"]
            assert found.elements == values.size
            if found.cosine is not None:
                cosine = expected["product"] / math.sqrt(expected["signal"] * expected["output"])
                assert found.cosine == pytest.approx(cosine, abs=2e-6)


def test_a_block_typed_by_hand(backends: Backends) -> None:
    """Step 0.5: codes 7, 15, 1, 0 stand for 3, -3, 0.25, 0; the rest is zero."""
    values = np.zeros((1, 32), np.float32)
    values[0, [0, 1, 16, 31]] = 3.5, -2.75, 0.3125, -0.0625
    packed = bytearray(16)
    packed[0], packed[8], packed[15] = 0xF7, 0x01, 0x80
    q = Quantized(MXFP4, (1, 32), memoryview(bytes(packed)), memoryview(b"\x7e"), None)
    found = check(backends, values, "F32", q)
    assert (found.signal, found.noise) == (
        12.25 + 7.5625 + 0.09765625 + 0.00390625,
        0.25 + 0.0625 + 0.00390625 + 0.00390625,
    )
    assert (found.output, found.max_abs, found.clipped) == (9 + 9 + 0.0625, 0.5, 1)
    assert found.histogram == (28, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1)
    assert found.sqnr_db == pytest.approx(10 * math.log10(19.9140625 / 0.3203125))
    assert found.cosine == pytest.approx((10.5 + 8.25 + 0.078125) / math.sqrt(19.9140625 * 18.0625))
    assert found.mse == 0.3203125 / 32


def spelled_out(squares: list[float], add: type[np.floating]) -> list[float]:  # type: ignore[type-arg]
    """The four sums that a group adds to its row's, one addition after the other."""
    lanes = [add(0)] * 16
    for i, square in enumerate(squares):
        lanes[i % 16] = add(lanes[i % 16] + add(square))
    pairs = [add(lanes[2 * j] + lanes[2 * j + 1]) for j in range(8)]
    return [float(add(pairs[j] + pairs[j + 4])) for j in range(4)]


def test_the_order_of_addition_is_the_one_that_is_promised() -> None:
    """Other orders of the same sums differ in their last bits, so equality tells."""
    values = gaussian("F32", 3, 592)  # two groups, and a third of five blocks
    y = (values * np.float32(1.03)).astype(np.float32)
    for row, found in enumerate(compare_values(values, y)):
        for column, part in enumerate((values[row], values[row] - y[row], y[row])):
            squares = part * part
            groups = [
                spelled_out(list(squares[first : first + 256]), np.float32)
                for first in range(0, 592, 256)
            ]
            four = [(a + b) + c for a, b, c in zip(*groups, strict=True)]
            assert found[column] == (four[0] + four[2]) + (four[1] + four[3])


def test_a_tensor_has_the_same_sums_in_any_panels() -> None:
    values = gaussian("BF16", 41, 304)
    q = codec.quantize(values.astype(np.float32), NVFP4, "amax")
    whole = Sums().plus(Cpu().compare(matrix(values, "BF16"), q), values.size)
    for height in (1, 2, 7, 40):
        found = Sums()
        for first in range(0, 41, height):
            rows = values[first : first + height]
            found = found.plus(
                Cpu().compare(matrix(rows, "BF16"), q.rows(first, min(first + height, 41))),
                rows.size,
            )
        assert found == whole


@EVERY_DTYPE
@EVERY_FORMAT
def test_what_float32_would_not_hold(backends: Backends, dtype: str, fmt: Format) -> None:
    """Squares beyond its range, zeros, nothing lost,
    and a huge block beside a tiny one in a group.
    """
    rng = generator(31)
    plain = rng.normal(0, 1, (2, 512))
    mixed = plain * np.exp2(rng.integers(-14, 15, (2, 32))).repeat(16, axis=1)
    apart = plain * np.where(
        np.arange(512) // 32 % 2, 1.0, 2.0**-55
    )  # steps too small beside others that are not
    said = rng.choice([-6.0, -0.5, 0.0, 1.5, 6.0], (2, 512))
    nearly = np.where(
        np.arange(512) % 37, said, 2.0**-80
    )  # what is lost is too little for a float32
    for scale in (
        (1.0, 1e-4, 6e4 / np.abs(mixed).max())
        if dtype == "F16"
        else (1.0, 1e-30, 1e16, 1e30, 2.0**-130, 2.0**60)
    ):
        for kind in (plain, mixed, apart, np.zeros((2, 512)), said, nearly):
            values = rounded(kind * scale, dtype)
            q = codec.quantize(values.astype(np.float32), fmt, RULE[fmt])
            found, expected = check(backends, values, dtype, q), by_hand(values, q)
            assert found.noise == pytest.approx(expected["noise"], rel=7e-7)
            assert found.signal == pytest.approx(expected["signal"], rel=7e-7)


SHAPES = [(35, 32), (19, 288), (9, 800), (5, 1536), (3, 2304), (2, 4096), (2, 4128), (1, 8224)]


@pytest.mark.sweep(2)
@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_any_number_of_groups(
    backends: Backends, dtype: str, fmt: Format, shape: tuple[int, int]
) -> None:
    """Every third group is added in double; the kernels take 16 groups of a row, or short rows."""
    rows, columns = shape
    values = generator(36, columns).normal(0, 1, shape)
    values *= np.where((np.arange(columns) // 256 + np.arange(rows)[:, None]) % 3 == 1, 0, 1)
    values[:, ::32] += 2.0**-12
    narrow = rounded(values, dtype)
    q = codec.quantize(narrow.astype(np.float32), fmt, RULE[fmt])
    check(backends, narrow, dtype, q)


@EVERY_FORMAT
def test_codes_of_other_values(backends: Backends, fmt: Format) -> None:
    """x, x - y and y, each alone at both sides of what float32 sums hold; 64 squares to a sum, 8.6
    the mean of a code's.
    """
    rng = generator(34)
    packed = rng.integers(0, 256, 4 * 512 // 2).astype(np.uint8)
    scales = np.full(4 * 512 // fmt.block_size, 0x38 if fmt is NVFP4 else 127, np.int64)
    scales[-7:] += 1
    for step in (-90, -60, -51, -50.5, -50, -49, -39.5, -20, 0, 44.9, 45, 45.3, 45.6, 46, 60):
        stored = float(np.float32(2.0**step)) if fmt is NVFP4 else None
        block_scales = (scales if fmt is NVFP4 else scales + round(step)).astype(np.uint8)
        q = Quantized(fmt, (4, 512), packed.data, block_scales.data, stored)
        for own in (-130, -60, -38.3, -38, -37.8, -37.6, -20, 0, 46.8, 47, 47.2, 47.4, 60):
            check(backends, rounded(2.0**own * rng.normal(0, 1, (4, 512)), "F32"), "F32", q)


def test_sums_of_x_and_of_y_at_either_side_of_what_float32_sums_hold(backends: Backends) -> None:
    """64 squares of 2^47 are 2^100; what is lost is little."""
    packed = np.full(2 * 512 // 2, 0x44, np.uint8)  # 2.0
    for near in (0.997, 1.003):
        q = Quantized(
            NVFP4,
            (2, 512),
            packed.data,
            memoryview(b"\x38" * 64),
            float(np.float32(near * 2.0**46)),
        )
        check(
            backends,
            rounded((2 - near) * 2.0**47 * generator(35).normal(1, 1e-4, (2, 512)), "F32"),
            "F32",
            q,
        )


@EVERY_FORMAT
def test_a_scale_that_is_nan_shows(backends: Backends, fmt: Format) -> None:
    """In every sum of its row but that of x, wherever it is; other rows are as they were."""
    values = gaussian("BF16", 3, 512)
    q = codec.quantize(values.astype(np.float32), fmt, RULE[fmt])
    before = rows_of(Cpu().compare(matrix(values, "BF16"), q))
    blocks = 512 // fmt.block_size
    for place in (0, 3, blocks - 1):
        spoilt = bytearray(q.block_scales)
        spoilt[blocks + place] = 0x7F if fmt is NVFP4 else 0xFF
        for name, backend in backends.items():
            found = rows_of(
                backend.compare(matrix(values, "BF16"), replace(q, block_scales=memoryview(spoilt)))
            )
            assert np.array_equal(found[[0, 2]], before[[0, 2]]), name
            assert np.isnan(found[1]).tolist() == [False, True, True, True, False], name
            assert found[1, 0] == pytest.approx(before[1, 0], rel=1e-6), name


def test_where_nothing_is_lost_there_is_no_ratio() -> None:
    values = generator(32).choice(np.array([-6.0, -0.5, 0.0, 1.5, 6.0], np.float32), (2, 512))
    found = Sums().plus(compare(values, codec.quantize(values, MXFP4, "floor")), values.size)
    assert (found.noise, found.sqnr_db, found.nmse, found.mse, found.max_abs, found.clipped) == (
        0,
        None,
        0,
        0,
        0,
        0,
    )
    zeros = Sums().plus(
        compare(values * 0, codec.quantize(values * 0, MXFP4, "floor")), values.size
    )
    assert (zeros.sqnr_db, zeros.nmse, zeros.cosine) == (None, None, None)


def test_a_divisor_divides(backends: Backends) -> None:
    values = gaussian("BF16", 3, 256)
    q = codec.quantize(values.astype(np.float32), NVFP4, "amax")
    inverse = np.float32(1) / np.float32(q.global_scale)
    for stored in (
        inverse,
        inverse * np.float32(1.1),
        np.float32(3.3),
        np.float32(7e-5),
    ):  # by one of these a product is another
        check(backends, values, "BF16", replace(q, global_scale=float(stored), kind="divisor"))


def test_codes_are_counted_at_any_length(tmp_path: object) -> None:
    rng = generator(33)
    for nbytes in (0, 1, 7, 8, 31, 32, 33, 480, 511, 3840, 3841, 70_001):
        packed = (
            rng.integers(0, 256, nbytes).astype(np.uint8)
            if nbytes % 2
            else rng.choice([0x00, 0xFF, 0x71], nbytes).astype(np.uint8)
        )
        counted = Counter(code for byte in packed.tolist() for code in (byte & 15, byte >> 4))
        expected = [counted[code] for code in range(16)]
        assert count_codes(packed.data).tolist() == expected
        counts = np.zeros(16, np.int64)
        Cpu()._call("count_codes", packed, packed.size, counts)
        assert counts.tolist() == expected


@EVERY_DTYPE
def test_values_of_any_width_are_compared(backends: Backends, dtype: str) -> None:
    shapes = ((3, 1), (2, 17), (4, 250), (3, 256), (2, 272), (1, 1031))
    for make, shape in product((gaussian, PLAIN["wide_range"]), shapes):
        values = make(dtype, shape[0], 1040)[:, : shape[1]].copy()
        wide = values.astype(np.float32)
        y = wide * np.float32(1.0625) + np.float32(1e-3)
        expected = compare_values(wide, y)
        x64, y64 = wide.astype(np.float64), y.astype(np.float64)
        for column, squares in enumerate((x64**2, (x64 - y64) ** 2, y64**2)):
            assert expected[:, column] == pytest.approx(squares.sum(axis=1), rel=7e-7)
        for name, backend in backends.items():
            if isinstance(backend, Cpu):
                assert (
                    bytes(backend.compare_values(matrix(values, dtype), y).rows)
                    == expected.tobytes()
                ), name


@pytest.mark.sweep(3)
@EVERY_FORMAT
@EVERY_DTYPE
def test_nothing_is_read_behind_an_input(backends: Backends, dtype: str, fmt: Format) -> None:
    for columns in (32, 64, 96, 288):
        n = 3 * columns
        x, packed, block_scales = (
            walled(size) for size in (n * FLOAT_DTYPES[dtype].itemsize, n // 2, n // fmt.block_size)
        )
        block_scales[:] = 0x7E
        q = Quantized(
            fmt, (3, columns), packed.data, block_scales.data, 1.0 if fmt is NVFP4 else None
        )
        values = x.view(FLOAT_DTYPES[dtype]).reshape(3, columns)
        for name, backend in backends.items():
            if isinstance(backend, Cpu):
                assert survives(partial(backend.compare, matrix(values, dtype), q)), (
                    f"{name}, {columns} columns"
                )


@pytest.mark.sweep(3)
@EVERY_DTYPE
def test_nothing_is_read_behind_values(backends: Backends, dtype: str) -> None:
    for columns in (1, 15, 17, 255, 272, 281):
        kind = FLOAT_DTYPES[dtype]
        values, y = (
            walled(3 * columns * kind.itemsize).view(kind),
            walled(12 * columns).view(np.float32),
        )
        for name, backend in backends.items():
            if isinstance(backend, Cpu):
                x = matrix(values.reshape(3, columns), dtype)
                assert survives(partial(backend.compare_values, x, y.reshape(3, columns))), (
                    f"{name}, {columns} columns"
                )


def test_sums_travel_as_json() -> None:
    values = gaussian("BF16", 3, 256)
    sums = Sums().plus(
        compare(
            values.astype(np.float32), codec.quantize(values.astype(np.float32), NVFP4, "amax")
        ),
        values.size,
    )
    assert Sums.from_json(sums.as_json()) == sums
    for spoilt in ({}, {**sums.as_json(), "noise": "much"}, {**sums.as_json(), "histogram": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Sums.from_json(spoilt)


def test_a_summary_of_tensors_worked_out_by_hand():
    whole, exact, zero = Sums(4, signal=100.0, noise=1.0), Sums(4, signal=300.0), Sums(4, noise=2.0)
    small, odd = Sums(4, signal=1e-3, noise=1e-4), Sums(4, signal=math.inf, noise=math.nan)
    found = summarise(
        {"whole": whole, "exact": exact, "zero": zero, "odd": odd, "small": small}.items()
    )
    assert found == {
        "sqnr_db_min": 10.0,
        "sqnr_db_mean": 15.0,
        "nmse": pytest.approx(3.0001 / 400.001, rel=1e-15),
        "worst": "small",
    }
    assert summarise([("odd", odd)]) == {
        "sqnr_db_min": None,
        "sqnr_db_mean": None,
        "nmse": None,
        "worst": None,
    }
    many = [(str(at), Sums(1, signal=1.0, noise=0.1)) for at in range(10)]
    assert summarise(many)["nmse"] == 0.1  # added one after the other it would be less


def test_of_two_tensors_the_largest_error_is_that_of_either():
    large, small = (Sums(16, 1.0, 0.5, 1.0, most, 2, (1, 15)) for most in (0.5, 0.25))
    for joined in (large.with_all(small), small.with_all(large)):
        assert (
            joined.elements,
            joined.noise,
            joined.max_abs,
            joined.clipped,
            joined.histogram,
        ) == (32, 1.0, 0.5, 4, (2, 30))
