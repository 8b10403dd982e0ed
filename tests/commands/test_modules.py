"""open_artifact() and arrange_scales(): what a kernel engineer reads of one module."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
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
    at_once = fp4convert.quantize_tensor(x, format="nvfp4", scale_layout="128x4")
    np.testing.assert_array_equal(at_once.block_scales, expected)
    np.testing.assert_array_equal(
        fp4convert.dequantize_tensor(pickle.loads(pickle.dumps(at_once))),
        fp4convert.dequantize_tensor(q),
    )
    np.testing.assert_array_equal(fp4convert.arrange_scales(at_once, "linear"), linear.reshape(-1))
    np.testing.assert_array_equal(
        fp4convert.multiply_tensor([at_once], x[None]), fp4convert.multiply_tensor([q], x[None])
    )
    with pytest.raises(fp4convert.InputError, match="128x4, 8x4, deepgemm or k_major"):
        fp4convert.arrange_scales(q, "16x16")
    with pytest.raises(fp4convert.InputError):
        fp4convert.arrange_scales(x, "128x4")


def test_parts_are_matrices_as_on_a_gpu(source, tmp_path):
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    made = done("quantize", source, "--format", "mxfp4", "-o", tmp_path / "q")
    assert made.code == 0
    _, q = next(iter(fp4convert.open_artifact(tmp_path / "q").items()))
    rows, columns = q.shape
    assert (q.packed.shape, q.block_scales.shape) == ((rows, columns // 2), (rows, columns // 32))
    own = fp4convert.quantize_tensor(x, format="nvfp4")
    assert (own.packed.shape, own.block_scales.shape) == ((8, 32), (8, 4))
    assert pickle.loads(pickle.dumps(own)).packed.shape == (8, 32)


@pytest.mark.parametrize(("granularity", "axis"), [(None, 1), ("row", 1), ("tensor", (0, 1))])
def test_fp8_is_torchs_rounding_under_amax_over_448(granularity, axis):
    """torch's float8_e4m3fn rounds to nearest even; the scale is compressed-tensors' formula."""
    x = np.random.default_rng(2).standard_normal((24, 40)).astype(np.float32)
    q = fp4convert.quantize_tensor(x, format="fp8", scale_layout=granularity, scale_rule="amax")
    scales = np.abs(x).max(axis=axis, keepdims=True) / np.float32(448)
    theirs = torch.from_numpy(x / scales).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(q.block_scales, scales)
    np.testing.assert_array_equal(q.codes, theirs.view(torch.uint8).numpy())
    values = theirs.float().numpy() * scales
    np.testing.assert_array_equal(fp4convert.dequantize_tensor(q), values)


def test_fp8_in_tiles_of_128_and_mxfp8_by_torch():
    x = np.random.default_rng(3).standard_normal((130, 256)).astype(np.float32)
    q = fp4convert.quantize_tensor(x, format="fp8", scale_layout="128x128", scale_rule="amax")
    assert q.block_scales.shape == (2, 2)
    assert q.block_scales[1, 0] == np.abs(x[128:, :128]).max() / np.float32(448)
    q = fp4convert.quantize_tensor(x, format="mxfp8", scale_rule="floor")
    amax = np.abs(x.reshape(130, 8, 32)).max(-1)
    exponents = np.floor(np.log2(amax)).astype(int) - 8  # OCP MX v1.0, 6.3: emax of E4M3 is 8
    np.testing.assert_array_equal(q.block_scales, exponents + 127)
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32).repeat(32, 1)
    theirs = torch.from_numpy((x / scales).clip(-448, 448)).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(q.codes, theirs.view(torch.uint8).numpy())
    bf16 = fp4convert.dequantize_tensor(q, "bf16")
    assert str(bf16.dtype) == "bfloat16"


@pytest.mark.parametrize(
    "words",
    [
        {"format": "fp8", "scale_layout": "64x64"},
        {"format": "mxfp8", "scale_layout": "row"},
        {"format": "nvfp4", "scale_layout": "tensor"},
        {"format": "fp8", "scale_layout": "128x4"},
        {"format": "fp8", "global_amax": 1.0},
        {"format": "fp8", "scale_rule": "even"},
        {"format": "mxfp8", "importance": np.ones(64, np.float32)},
    ],
)
def test_what_a_format_has_not_is_refused(words):
    with pytest.raises(fp4convert.InputError):
        fp4convert.quantize_tensor(np.ones((4, 64), np.float32), **words)


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": np.zeros((2, 64), np.uint8)},
        {"codes": np.zeros((4, 64), np.int8)},
        {"block_scales": np.ones((2, 1), np.float32)},
        {"block_scales": np.ones((4, 1))},
        {"block_scales": [[1.0]] * 4},
        {"block": (0, 0)},
        {"shape": (64, 4)},
        {"format": "fp8"},
    ],
)
def test_eight_bits_whose_parts_do_not_fit_together_are_refused(changes):
    q = fp4convert.quantize_tensor(np.ones((4, 64), np.float32), format="fp8")
    with pytest.raises(fp4convert.InputError) as refused:
        fp4convert.dequantize_tensor(replace(q, **changes))
    assert refused.value.code == "bad-quantized"


def test_a_vector_is_answered_with_what_makes_it_a_matrix():
    x = np.zeros((4, 64), np.float32)
    q = fp4convert.quantize_tensor(x, format="nvfp4")
    with pytest.raises(fp4convert.InputError) as refused:
        fp4convert.multiply_tensor(q, x[0])
    assert refused.value.next_step == "Of a vector give x[None], (1, columns)."
