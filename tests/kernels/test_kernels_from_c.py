"""Kernels called from C give the bytes of the reference codec: the installed library, and that for
ARM64, with NEON, run by an emulator.
"""

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adversarial import scattered_importance
from paths import ROOT, SUPPORT

from fp4convert.numerics import codec, fp8_int
from fp4convert.numerics.error_sums import compare, compare_values, count_codes
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.matrices import Matrix, Quantized
from fp4convert.process import cpu_library

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-static",
]
KINDS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
RULES = ("floor", "even", "ceil")
COLUMNS = 32 * 71
IMPORTANCE = scattered_importance(COLUMNS)


def leveled_kernels() -> list[str]:
    """The kernels that are compiled once per instruction set."""
    (names,) = re.findall(
        r"^set\(leveled (.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    return names.split()


@pytest.fixture(scope="module", params=["host", pytest.param("aarch64", marks=pytest.mark.system)])
def command(request, tmp_path_factory) -> list[str | Path]:
    """What runs run_kernels.c, with the installed library or with the emulator."""
    folder = tmp_path_factory.mktemp(request.param)
    main, made = SUPPORT / "run_kernels.c", folder / "run"
    if request.param == "host":
        library = Path(cpu_library()._name)
        subprocess.run(
            ["cc", main, library, f"-Wl,-rpath,{library.parent}", "-o", made], check=True
        )
        return [made]
    for tool in (COMPILER, EMULATOR):
        assert shutil.which(tool), f"{tool} is missing: make system installs it"
    sources = {**{name: ["-DFP4_LEVEL=0"] for name in leveled_kernels()}, "cpu.c": []}
    for name, defines in sources.items():
        subprocess.run(
            [COMPILER, *FLAGS, *defines, "-c", ROOT / "kernels" / name, "-o", folder / f"{name}.o"],
            check=True,
        )
    objects = [folder / f"{name}.o" for name in sources]
    subprocess.run([COMPILER, *FLAGS, main, *objects, "-o", made], check=True)
    return [EMULATOR, made]


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Wide exponents, ties, subnormals, zeros and -0, finite in every type."""
    chance = np.random.default_rng(seed)
    wide = chance.standard_normal(COLUMNS) * np.exp2(chance.integers(-30, 8, COLUMNS // 16)).repeat(
        16
    )
    ties = chance.integers(-28, 29, COLUMNS) / 4 * 2.0 ** chance.integers(-6, 4)
    tiny = chance.standard_normal(COLUMNS) * 2.0**-128
    values = np.choose(chance.integers(0, 3, COLUMNS // 16).repeat(16), (wide, ties, tiny)).astype(
        np.float32
    )
    values[::97] = -0.0
    values[:64] = 0
    return {kind: values.astype(dtype) for kind, dtype in KINDS.items()}


def expected_bytes(x: dict[str, np.ndarray]) -> bytes:
    """What run_kernels.c writes, by the reference codec."""
    parts = []
    for values in x.values():
        wide = values.astype(np.float32).reshape(1, -1)
        parts.append(np.abs(wide).max().tobytes())
        quantized = [
            codec.quantize(wide, NVFP4, "amax"),
            *(codec.quantize(wide, MXFP4, rule) for rule in RULES),
        ]
        parts += [bytes(part) for q in quantized for part in (q.packed, q.block_scales)]
    wide = x["bf16"].astype(np.float32).reshape(1, -1)
    nvfp4, mxfp4 = codec.quantize(wide, NVFP4, "amax"), codec.quantize(wide, MXFP4, "even")
    amax = float(np.abs(wide).max())
    for dtype in KINDS.values():
        for kind in ("multiplier", "divisor"):
            stored = Quantized(NVFP4, nvfp4.shape, nvfp4.packed, nvfp4.block_scales, amax, kind)
            parts.append(codec.dequantize(stored).astype(dtype).tobytes())
        parts.append(codec.dequantize(mxfp4).astype(dtype).tobytes())
    parts += [*expected_of_fp8(x), *expected_of_grids(x["fp32"])]
    for values in x.values():
        parts += expected_of_searches(values.astype(np.float32).reshape(1, -1))
    for values in x.values():
        parts += expected_of_comparisons(values.astype(np.float32).reshape(1, -1), x["fp32"])
    return b"".join(parts)


def expected_of_fp8(x: dict[str, np.ndarray]) -> Iterator[bytes]:
    for kind, dtype in (("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")):
        rows = Matrix(x[kind].view(np.uint8).data, dtype, (4, COLUMNS // 4))
        grid = Grid(np.zeros((4, -(-COLUMNS // 128)), np.float32), (1, 32))
        fp8_int.grid_amax(rows, grid)
        yield grid.scales.tobytes()
        ones = Grid(np.ones_like(grid.scales), (1, 32))
        yield fp8_int.quantize_fp8(rows, ones).tobytes()
        costs = np.zeros(ones.scales.shape)
        fp8_int.fp8_costs(rows, ones, costs)
        yield costs.tobytes()


def expected_of_grids(values: np.ndarray) -> Iterator[bytes]:
    stored = values.view(np.uint8).data
    width = -(-COLUMNS // 100)
    fp8 = Grid(values[: 2 * width].reshape(2, width), (3, 100), 1)
    decoded = fp8_int.decode_fp8(stored, (4, COLUMNS), fp8)
    yield np.array(
        np.nan if np.isnan(decoded).any() else np.abs(decoded).max(), np.float32
    ).tobytes()
    yield decoded.tobytes()
    for bits, columns in ((4, 2 * COLUMNS), (8, COLUMNS)):
        width = -(-columns // 100)
        scales = values[: 4 * width].reshape(4, width)
        yield fp8_int.decode_integers(stored, (4, columns), Grid(scales, (1, 100)), bits).tobytes()
    yield bytes(fp8_int.to_bf16(values))
    for kind in (np.uint32, np.uint16, np.uint8):
        square = values.view(kind)[:COLUMNS].reshape(8, COLUMNS // 8)
        yield square[:, ::2].T.tobytes()


def expected_of_searches(wide: np.ndarray) -> Iterator[bytes]:
    narrow = wide.reshape(-1, 32)
    amax = float(np.abs(wide).max())
    made = [
        codec.quantize(wide, fmt, rule)
        for fmt, rule in ((NVFP4, "mse"), (NVFP4, "four-over-six"), (MXFP4, "mse"))
    ]
    for rows in (wide, narrow):
        made += [
            codec.quantize(rows, fmt, "importance", amax, IMPORTANCE[: rows.shape[1]])
            for fmt in (NVFP4, MXFP4)
        ]
    for q in made:
        yield bytes(q.packed)
        yield bytes(q.block_scales)


def expected_of_comparisons(wide: np.ndarray, against: np.ndarray) -> Iterator[bytes]:
    nvfp4, mxfp4 = codec.quantize(wide, NVFP4, "amax"), codec.quantize(wide, MXFP4, "floor")
    multiplier = np.float32(nvfp4.global_scale)
    ones = memoryview(bytes([127]) * len(mxfp4.block_scales))
    stored = (
        (multiplier, "multiplier"),
        (multiplier * np.float32(2.0**-60), "multiplier"),
        (np.float32(1) / multiplier, "divisor"),
    )
    said = [replace(nvfp4, global_scale=float(number), kind=kind) for number, kind in stored]
    yield from (
        bytes(compare(wide, q).rows) for q in (*said, mxfp4, replace(mxfp4, block_scales=ones))
    )
    yield compare_values(wide.reshape(8, -1), against.reshape(8, -1)).tobytes()
    yield count_codes(mxfp4.packed).tobytes()


@pytest.mark.parametrize("seed", range(8))
def test_every_kernel_gives_the_codecs_bytes(command, tmp_path, seed):
    x = inputs(seed)
    amax = [float(np.abs(values.astype(np.float32)).max()) for values in x.values()]
    weights = [codec.weigh(IMPORTANCE, COLUMNS, fmt).tobytes() for fmt in (NVFP4, MXFP4)]
    data = (
        struct.pack("<q", COLUMNS)
        + b"".join(values.tobytes() for values in x.values())
        + struct.pack("<3f", *amax)
    )
    (tmp_path / "in").write_bytes(b"".join([data, *weights]))
    subprocess.run([*command, tmp_path / "in", tmp_path / "out"], check=True)
    with np.errstate(over="ignore"):
        assert (tmp_path / "out").read_bytes() == expected_bytes(x)
