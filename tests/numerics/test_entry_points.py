"""The one table of kernels: files and grids as the heads of kernels/*.cu have them."""

from __future__ import annotations

import re

import pytest
from simt import KERNELS

from fp4convert.numerics.backends.entry_points import ENTRIES, SOURCES, entry_of, grid_of

TOLD = {  # in the head of a file, a kernel, and what it says of its grid
    "amax_bf16": ("device.h", r"32 elements a thread, so grid = ceil\(n / 8192\)"),
    "decode_fp8": ("decode.cu", r"decode grid = ceil\(rows \* columns / 8192\)"),
    "compare_nvfp4_bf16": ("compare.cu", r"compare grid = ceil\(rows / 8\)"),
    "grid_amax_bf16": ("fp8.cu", r"grid_amax, quantize_fp8 grid = ceil\(rows \* columns / 8192\)"),
    "quantize_fp8_bf16": ("grid.cuh", r"grid = ceil\(rows \* columns / 8192\)"),
    "row_costs_fp32": ("fp8.cu", r"row_costs grid = ceil\(rows \* blocks across / 32\)"),
    "add_costs": ("fp8.cu", r"add_costs grid = ceil\(blocks that the rows lie in / 256\)"),
    "compare_values_fp16": ("compare.cu", r"compare grid = ceil\(rows / 8\)"),
    "count_codes": ("compare.cu", r"count_codes grid = ceil\(nbytes / 65536\)"),
    "gemv_mxfp4_fp16": (
        "gemv.cu",
        r"grid.x = ceil\(rows / 32\), grid.y = ceil\(vectors / 2\), grid.z = matrices",
    ),
    "descend_nvfp4": ("descend.cu", r"grid = ceil\(rows / 16\), MXFP4 ceil\(rows / 8\)"),
    "transpose_2": ("decode.cu", r"ceil\(rows / T\), ceil\(count / T\)\), T = 256 / N"),
}


@pytest.mark.parametrize(
    ("name", "counts", "grid"),
    [
        ("amax_bf16", (8193,), (2, 1, 1)),
        ("decode_fp8", (8192,), (1, 1, 1)),
        ("compare_nvfp4_bf16", (17,), (3, 1, 1)),
        ("count_codes", (2 * 65536 + 2,), (2, 1, 1)),
        ("grid_amax_bf16", (8193,), (2, 1, 1)),
        ("quantize_fp8_bf16", (8192,), (1, 1, 1)),
        ("row_costs_fp32", (33,), (2, 1, 1)),
        ("add_costs", (257,), (2, 1, 1)),
        ("compare_values_fp16", (17,), (3, 1, 1)),
        ("gemv_mxfp4_fp16", (65, 3), (3, 2, 1)),
        ("gemv_mxfp4_fp16", (65, 3, 4), (3, 2, 4)),
        ("transpose_2", (129, 128), (2, 1, 1)),
        ("transpose_4", (64, 65), (1, 2, 1)),
        ("descend_nvfp4", (17,), (2, 1, 1)),
        ("descend_mxfp4", (17,), (3, 1, 1)),
    ],
)
def test_grids_are_those_of_the_heads(name, counts, grid):
    same = {"transpose_4": "transpose_2", "descend_mxfp4": "descend_nvfp4"}
    file, text = TOLD[same.get(name, name)]
    assert re.search(text, (KERNELS / file).read_text())
    assert grid_of(name, *counts) == grid


def test_every_kernel_stands_in_its_file():
    """Of every file that is compiled; macros make the rest of a name."""
    assert set(SOURCES) == {path.name for path in KERNELS.glob("*.cu")}
    for name in ENTRIES:
        assert re.search(
            rf"\b{name.partition('_')[0]}_", (KERNELS / entry_of(name).file).read_text()
        )
