"""The lower rungs of the GPU benchmark do the same work as the product: same bytes, same products.

Decides that a comparison with them is fair; they run on the host, through simt.py, as the product's
kernels do there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil

import numpy as np
import pytest
from adversarial import PLAIN, assert_same_bytes, assert_same_values, generator, rounded
from simt import KERNELS, aligned, compile_for_host, guarded, is_intact, launch

from fp4convert.numerics import codec
from fp4convert.numerics.backends import cubins
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Quantized
from gpu.compare import product_and_reach
from gpu.device import BASELINES, LADDER, THREADS, baselines_source, grid_of

ROWS, COLUMNS = 37, 3136  # no whole number of blocks of threads, nor of the tiles of three turns


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = shutil.copytree(KERNELS, tmp_path_factory.mktemp("baselines") / "kernels")
    return compile_for_host(baselines_source(folder), folder)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host(KERNELS / "gemv.cu", tmp_path_factory.mktemp("product"))


def run(library: ctypes.CDLL, name: str, count: int, *arguments: np.ndarray | int) -> None:
    words = [a if isinstance(a, int) else a.ctypes.data for a in arguments]
    launch(library, name, grid_of(name, count), words, THREADS)
    assert all(isinstance(a, int) or is_intact(a) for a in arguments[-2:]), (
        "written beside the result"
    )


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_naive_quantizer_gives_the_codec_s_bytes(baselines, make):
    values = make("BF16", 9, 96)
    expected = codec.quantize(values.astype(np.float32), NVFP4, "amax")
    packed, block_scales = guarded(values.size // 2), guarded(values.size // 16)
    amax = np.array([np.abs(values.astype(np.float32)).max()])
    run(
        baselines,
        "quantize_naive",
        values.size,
        aligned(values.tobytes()),
        values.size,
        amax,
        packed,
        block_scales,
    )
    found = Quantized(NVFP4, values.shape, packed.data, block_scales.data, expected.global_scale)
    assert_same_bytes(found, expected, values, make.__name__)


@pytest.mark.parametrize("number", range(3), ids=["floor", "even", "ceil"])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_naive_mxfp4_quantizer_gives_the_codec_s_bytes(baselines, make, number):
    values = make("BF16", 9, 96)
    expected = codec.quantize(values.astype(np.float32), MXFP4, ("floor", "even", "ceil")[number])
    packed, block_scales = guarded(values.size // 2), guarded(values.size // 32)
    x = aligned(values.tobytes())
    name = "quantize_naive_mxfp4"
    run(baselines, name, values.size, x, values.size, number, packed, block_scales)
    found = Quantized(MXFP4, values.shape, packed.data, block_scales.data, None)
    assert_same_bytes(found, expected, values, make.__name__)


@pytest.mark.parametrize("kind", ["multiplier", "divisor"])
def test_naive_dequantizer_gives_the_codec_s_values(baselines, kind):
    """Every code with every block scale, of either sign, NaN included."""
    packed = np.tile(np.arange(256, dtype=np.uint8), 16)
    block_scales = np.repeat(np.arange(256, dtype=np.uint8), 2)
    q = Quantized(NVFP4, (1, 2 * packed.size), packed.data, block_scales.data, 0.37, kind)
    stored, n = np.array([0.37], np.float32), 2 * packed.size
    found = guarded(2 * n)
    run(
        baselines,
        "dequantize_naive",
        n,
        packed,
        block_scales,
        n,
        stored,
        int(kind == "divisor"),
        found,
    )
    expected = codec.dequantize(
        Quantized(NVFP4, q.shape, q.packed, q.block_scales, float(stored[0]), kind)
    )
    bf16 = FLOAT_DTYPES["BF16"]
    assert_same_values(found.view(bf16).reshape(q.shape), expected.astype(bf16), kind)


@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_gives_the_product(baselines, product, rung):
    """Within what float32 sums in different orders may differ by, then one rounding to fp16."""
    rng = generator(20)
    q = codec.quantize(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), NVFP4, "amax")
    x = rounded(rng.standard_normal((1, COLUMNS)), "F16")
    parts = [aligned(q.packed), aligned(q.block_scales), np.array([q.global_scale], np.float32)]
    results = {}
    for library, name in ((product, "gemv_nvfp4_fp16"), (baselines, rung)):
        y = guarded(2 * ROWS)
        run(library, name, ROWS, *parts, 0, ROWS, COLUMNS, aligned(x.tobytes()), 0, 0, 1, y)
        results[name] = y.view(np.float16).astype(np.float64)[None]
    for name, found in results.items():
        expected, reach = product_and_reach(q, x.astype(np.float64))
        assert (np.abs(found - expected) <= reach).all(), name
    assert expected.any()


@pytest.mark.parametrize("arch", ["sm_90", "sm_120a"])
def test_they_compile(tmp_path, arch):
    pytest.importorskip("cupy_backends", reason="CuPy is not installed; NVRTC is not asked")
    if importlib.util.find_spec("nvidia.cuda_nvrtc") is None:
        pytest.skip("NVRTC is not installed")
    for has_cvt in sorted({False, arch.endswith("a")}):
        cubin, _ = cubins.compile_cubin(baselines_source(tmp_path), cubins.Target(arch, has_cvt))
        assert all(name.encode() in cubin for name in BASELINES)
