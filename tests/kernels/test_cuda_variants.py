"""Variants of the CUDA kernels that macros choose: the same bytes, and nothing spilled.

benchmarks/gpu finds the fastest on a GPU; the default is what stands in the files.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from adversarial import assert_same_bytes, gaussian, matrix
from simt import KERNELS, SimtKernels, compile_for_host

from fp4convert.numerics import codec
from fp4convert.numerics.backends import cubins
from fp4convert.numerics.error_sums import compare
from fp4convert.numerics.formats import FP4_FORMATS, Format

# (file, option, pattern of the kernels that it is for)
VARIANTS = [
    *(("compare.cu", f"-DCOMPARE_UNROLL={units}", "compare_.*") for units in (1, 2)),
    *(("quantize.cu", f"-DQUANTIZE_BLOCKS={blocks}", ".*_.*16") for blocks in (4, 5)),
    *(("quantize.cu", f"-DFP4_UNITS={units}", "amax_.*") for units in (1, 2, 4)),
    *(("dequantize.cu", f"-DFP4_UNITS={units}", ".*") for units in (1, 2)),
    ("dequantize.cu", "-DFP4_UNITS=4", ".*16"),  # rows of float32 do not fit the registers then
    ("quantize.cu", "-DFP4_UNITS=4 -DQUANTIZE_BLOCKS=4", ".*_.*16"),
]
SPILLS = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", re.DOTALL
)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(("source", "options", "names"), VARIANTS)
def test_no_variant_spills(
    capability: tuple[int, int], source: str, options: str, names: str
) -> None:
    target = cubins.target_for(capability, cubins.known_targets())
    path = cubins.kernels_folder() / source
    _, log = cubins.compile_cubin(path, target, ("--ptxas-options=-v", *options.split()))
    found = {name: rest for name, *rest in SPILLS.findall(log) if re.fullmatch(names, name)}
    assert found
    assert not {name: rest for name, rest in found.items() if rest != ["0", "0"]}


def varied(folder: Path, defines: str, units: int) -> SimtKernels:
    """The kernels with macros set before anything else."""
    for path in KERNELS.glob("*.[ch]*"):
        own = path.read_text()
        (folder / path.name).write_text(defines + own if path.name == "fp4.h" else own)

    def build(source: Path, where: Path, has_cvt: bool = False):  # type: ignore[no-untyped-def]
        (where / source.name).write_text(defines + source.read_text())
        return compile_for_host(where / source.name, where, has_cvt)

    return SimtKernels(folder, KERNELS, False, build, units / 2)


@pytest.mark.parametrize("fmt", FP4_FORMATS.values(), ids=FP4_FORMATS)
@pytest.mark.parametrize(("units", "unroll"), [(4, 1), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_every_variant_gives_the_same_bytes(
    units: int, unroll: int, fmt: Format, tmp_path: Path
) -> None:
    defines = f"#define FP4_UNITS {units}\n#define COMPARE_UNROLL {unroll}\n"
    kernels = varied(tmp_path, defines, units)
    for shape in ((5, 544), (3, 8192), (70, 288)):
        values = gaussian("BF16", *shape)
        x = values.astype(np.float32)
        amax = float(np.abs(x).max())
        for rule in ("amax" if fmt.has_global_scale else "floor", "mse"):
            q = codec.quantize(x, fmt, rule, amax)
            found = kernels.quantize(matrix(values, "BF16"), fmt, rule, amax)
            assert_same_bytes(found, q, values, f"{shape}, {rule}")
        assert kernels.amax(matrix(values, "BF16")) == amax
        expected = codec.dequantize(q)
        assert bytes(kernels.dequantize(q, "F32")) == expected.tobytes()
        expected_sums, found_sums = compare(x, q), kernels.compare(matrix(values, "BF16"), q)
        assert bytes(found_sums.rows) == bytes(expected_sums.rows)
        assert bytes(found_sums.counts) == bytes(expected_sums.counts)
