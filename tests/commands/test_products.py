"""Products with matrices that stay packed, on the CPU: against float64 products of the values that
ModelOpt reads, and torch of torchao's codes; and what is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paths import GOLDEN
from safetensors.torch import load_file
from torch_formulas import mxfp4_weight

from fp4convert import InputError, multiply_tensor, quantize_tensor
from fp4convert.numerics.matrices import PANEL_ELEMENTS, Quantized

INPUTS, MODELOPT, TORCHAO = (
    load_file(GOLDEN / f"{name}.safetensors")
    for name in ("inputs", "modelopt_nvfp4", "torchao_mxfp4")
)
CASES = ("rand_bf16", "heavy_fp16", "odd_fp32")


def judged(case: str, format: str) -> tuple[Quantized, np.ndarray]:
    """A matrix, and its values as another package reads these codes."""
    if format == "nvfp4":
        q = quantize_tensor(INPUTS[case], format="nvfp4", scale_rule="amax")
        return q, MODELOPT[f"{case}/dequant_f32"].double().numpy()
    q = quantize_tensor(INPUTS[case], format="mxfp4", scale_rule="floor")
    parts = (TORCHAO[f"{case}/{part}_floor"] for part in ("qdata", "scale"))
    return q, mxfp4_weight(*parts).double().numpy()


def vectors(columns: int, *counts: int) -> torch.Tensor:
    return torch.randn((*counts, columns), generator=torch.Generator().manual_seed(columns))


def assert_close(found: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """As far off as float32 additions in any order may be; other rows are much farther."""
    exact, size = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w).T
    assert (found.dtype, found.shape) == (np.float32, exact.shape)
    assert (np.abs(found - exact) <= 1.01 * w.shape[1] * 2.0**-24 * size).all()
    assert exact.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_values_that_others_read(case, format, dtype):
    q, w = judged(case, format)
    x = vectors(w.shape[1], 3).to(dtype)
    for given in (x, x.t().contiguous().t()):
        assert_close(multiply_tensor(q, given), x.double().numpy(), w)
    assert np.array_equal(
        multiply_tensor(q, x.float().numpy()), multiply_tensor(q, x)
    )  # of NumPy as of torch


def test_vectors_may_be_in_four_bits():
    (q, w), (x, values) = judged("heavy_bf16", "nvfp4"), judged("heavy_fp16", "nvfp4")
    assert_close(multiply_tensor(q, x), values, w)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_batch_is_each_matrix_with_vectors_of_its_own(format):
    """Matrices of one shape, each with a global scale of its own."""
    batch, values = zip(*(judged(f"heavy_{d}", format) for d in ("bf16", "fp16")), strict=True)
    x = vectors(128, 2, 3)
    found = multiply_tensor(list(batch), x)
    assert found.shape == (2, 3, 32)
    for z in range(2):
        assert_close(found[z], x[z].numpy(), values[z])
    assert np.array_equal(multiply_tensor(batch, list(x.numpy())), found)


def test_a_divisor_divides():
    q, w = judged("rand_bf16", "nvfp4")
    x = vectors(256, 1)
    stored = float(np.float32(1 / q.global_scale))
    found = multiply_tensor(replace(q, global_scale=stored, kind="divisor"), x)
    assert_close(found, x.numpy(), w / (stored * q.global_scale))


def test_rows_of_several_panels_are_in_their_places():
    """Row r is r mod 97 in its first column, which one vector picks out, exactly."""
    columns = 4096
    rows = 2 * PANEL_ELEMENTS // columns + 5
    codes = np.zeros((rows, columns // 2), np.uint8)
    codes[:, 0] = np.arange(rows) % 7 + 1  # 0.5, 1, 1.5, 2, 3, 4, 6
    scales = np.full((rows, columns // 32), 127, np.uint8)
    q = Quantized(
        quantize_tensor(np.ones((1, 32), np.float32), format="mxfp4").format,
        (rows, columns),
        codes.reshape(-1).data,
        scales.reshape(-1).data,
        None,
    )
    x = np.zeros((1, columns), np.float32)
    x[0, 0] = 2
    expected = np.array([1, 2, 3, 4, 6, 8, 12], np.float32)[np.arange(rows) % 7]
    assert multiply_tensor(q, x).tolist() == [expected.tolist()]


def test_what_is_not_finite_in_a_vector_stays_in_its_products():
    q = quantize_tensor(np.ones((2, 64), np.float32), format="nvfp4")
    x = np.zeros((3, 64), np.float32)
    x[0, 3], x[1, 3] = np.nan, np.inf
    found = multiply_tensor(q, x)
    assert np.isnan(found[0]).all()
    assert found[1:].tolist() == [[np.inf, np.inf], [0.0, 0.0]]


Q = quantize_tensor(np.ones((2, 64), np.float32), format="nvfp4")
X = np.ones((3, 64), np.float32)
REFUSED = [
    (Q, X[:, :32], "gemv-shape", "the matrix has 64 columns, and x has 32"),
    (Q, X[0], "tensor-shape", r"\(64,\)"),
    (Q, X[:0], "tensor-shape", r"\(0, 64\)"),
    (Q, X.astype(np.float64), "tensor-dtype", "x is float64"),
    (Q, X.tolist(), "tensor-type", r"x is a builtins\.list"),
    (Q, torch.ones(3, 64, device="meta"), "tensor-device", "x is on meta"),
    (X, X, "tensor-type", r"numpy\.ndarray is given; expected a Quantized"),
    (None, X, "tensor-type", "NoneType is given"),
    (replace(Q, packed=b""), X, "bad-quantized", "packed is 0 bytes"),
    (replace(Q, global_scale=0.0), X, "bad-quantized", "global_scale is 0"),
    ([], X[None], "gemv-shape", "no matrix is given"),
    ([Q, None], X[None], "tensor-type", "NoneType is given"),
    ([Q, Q], X[None], "gemv-shape", "x is for 1 matrices; expected .* for 2 matrices"),
    ([Q], None, "gemv-shape", r"x is a builtins\.NoneType"),
    ([Q], X, "gemv-shape", "x is for 3 matrices"),
    ([Q], X[:1], "tensor-shape", r"\(64,\)"),
    (
        [Q, quantize_tensor(X, format="nvfp4")],
        X[None],
        "gemv-shape",
        r"nvfp4 \(2, 64\) multiplier, nvfp4 \(3, 64\) multiplier; expected one",
    ),
    ([Q, replace(Q, kind="divisor")], X[None], "gemv-shape", "expected one format, shape and kind"),
]


@pytest.mark.parametrize(("q", "x", "code", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_does_not_fit_is_refused(q, x, code, said):
    with pytest.raises(InputError, match=said) as refused:
        multiply_tensor(q, x)
    assert refused.value.code == code
