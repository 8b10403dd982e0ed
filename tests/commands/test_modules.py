"""open_artifact() and arrange_scales(): what a kernel engineer reads of one module."""

import json

import numpy as np
import pytest
from checkpoints import done, write_llama
from safetensors import safe_open

import fp4convert


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "m")


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "mlx"])
def test_a_module_is_what_engines_compute(dialect, source, tmp_path):
    done("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", tmp_path / "q")
    done("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "fp32")
    modules = fp4convert.open_artifact(tmp_path / "q")
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())["weight_map"]
    assert modules.dialect == dialect
    for module, q in modules.items():
        with safe_open(tmp_path / "d" / index[f"{module}.weight"], "np") as file:
            stored = file.get_tensor(f"{module}.weight")
        np.testing.assert_array_equal(fp4convert.dequantize_tensor(q), stored)
    with pytest.raises(KeyError, match="did you mean"):
        modules[next(iter(modules))[:-1]]


def test_scales_lie_where_cutlass_reads_them():
    """By the formula of cuBLAS's documentation, typed here: offset(row, block) of 128x4 tiles."""
    x = np.random.default_rng(0).standard_normal((130, 96)).astype(np.float32)
    q = fp4convert.quantize_tensor(x, format="nvfp4")
    found = fp4convert.arrange_scales(q, "128x4")
    linear = np.frombuffer(q.block_scales, np.uint8).reshape(130, 6)
    expected = np.zeros(256 * 8, np.uint8)
    for row in range(130):
        for block in range(6):
            tile = (row // 128) * 2 + block // 4
            inside = (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            expected[tile * 512 + inside] = linear[row, block]
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(fp4convert.InputError, match="128x4, 8x4, deepgemm or k_major"):
        fp4convert.arrange_scales(q, "16x16")
    with pytest.raises(fp4convert.InputError):
        fp4convert.arrange_scales(x, "128x4")


def test_a_vector_is_answered_with_what_makes_it_a_matrix():
    x = np.zeros((4, 64), np.float32)
    q = fp4convert.quantize_tensor(x, format="nvfp4")
    with pytest.raises(fp4convert.InputError) as refused:
        fp4convert.multiply_tensor(q, x[0])
    assert refused.value.next_step == "Of a vector give x[None], (1, columns)."
