"""One matrix in memory: the bytes of ModelOpt, torchao and compressed-tensors, whatever holds it;
and what is refused.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import LAYER, read_folder, run, write_llama
from golden_cases import CASES, EXCLUDED
from paths import GOLDEN, SUPPORT
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_formulas import decoded, e4m3, unpacked

from fp4convert import dequantize_tensor, quantize_tensor
from fp4convert.errors import InputError, NumericError
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.matrices import Matrix

INPUTS = load_file(GOLDEN / "inputs.safetensors")
MODELOPT, TORCHAO = (
    load_file(GOLDEN / f"{name}.safetensors") for name in ("modelopt_nvfp4", "torchao_mxfp4")
)
TORCHAO_RULES = {"floor": "floor", "even": "even", "ceil": "rceil"}  # ours -> theirs


def as_array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def ways(x: torch.Tensor) -> list[object]:
    """The same matrix in every form that is taken."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    return [
        x,
        x.clone().requires_grad_(),
        torch.nn.Parameter(x),
        x.t().contiguous().t(),
        wide[:, ::2],
        as_array(x),
        np.asfortranarray(as_array(x)),
        as_array(wide)[:, ::2],
    ]


@pytest.mark.parametrize("case", [case for case in CASES if case not in EXCLUDED["modelopt"]])
def test_nvfp4_is_modelopts_in_every_form(case):
    for x in ways(INPUTS[case]):
        q = quantize_tensor(x, format="nvfp4", scale_rule="amax")
        assert bytes(q.packed) == as_bytes(MODELOPT[f"{case}/weight"])
        assert bytes(q.block_scales) == as_bytes(MODELOPT[f"{case}/weight_scale"])
        assert np.float32(q.global_scale).tobytes() == as_bytes(MODELOPT[f"{case}/weight_scale_2"])
        assert (q.shape, q.kind) == (tuple(INPUTS[case].shape), "multiplier")


@pytest.mark.parametrize("rule", TORCHAO_RULES)
def test_mxfp4_is_torchaos_in_every_form(rule):
    """But for -0.0, whose code torchao makes 8, and all others 0."""
    cases = [case for case in CASES if f"{case}/{rule}" not in EXCLUDED["torchao"]]
    cases = [
        case for case in cases if not ((INPUTS[case] == 0) & torch.signbit(INPUTS[case])).any()
    ]
    assert len(cases) >= 20
    for case in cases:
        for x in ways(INPUTS[case]):
            q = quantize_tensor(x, format="mxfp4", scale_rule=rule)
            for part, found in (("qdata", q.packed), ("scale", q.block_scales)):
                theirs = TORCHAO[f"{case}/{part}_{TORCHAO_RULES[rule]}"]
                assert bytes(found) == as_bytes(theirs), (case, part)
            assert q.global_scale is None


def test_a_group_amax_sets_the_global_scale_as_in_modelopt():
    """The bytes of one half under the amax of both are the first rows of both together, which
    ModelOpt made.
    """
    x = INPUTS["rand_bf16"]
    half, rows = x[16:], x.shape[0]
    q = quantize_tensor(half, format="nvfp4", scale_rule="amax", global_amax=float(x.abs().max()))
    assert q.global_scale == MODELOPT["rand_bf16/weight_scale_2"].item()
    assert bytes(q.packed) == as_bytes(MODELOPT["rand_bf16/weight"].view(rows, -1)[16:])
    assert bytes(q.block_scales) == as_bytes(MODELOPT["rand_bf16/weight_scale"].view(rows, -1)[16:])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_default_is_what_quantize_writes(format, tmp_path):
    source = write_llama(tmp_path / "m")
    assert run("quantize", source, "--format", format, "-o", tmp_path / "q").code == 0
    name = f"{LAYER}.self_attn.o_proj"
    _, shape, data = read_folder(source)[f"{name}.weight"]
    x = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape)
    q = quantize_tensor(x, format=format)
    stored = read_folder(tmp_path / "q")
    assert (bytes(q.packed), bytes(q.block_scales)) == (
        stored[f"{name}.weight_packed"][2],
        stored[f"{name}.weight_scale"][2],
    )


def test_matrices_of_several_panels_are_whole():
    """4 Mi elements are dealt with at once; torch's own arithmetic reads them back, within half a
    step of the weights.
    """
    x = torch.randn((2100, 4096), generator=torch.Generator().manual_seed(0))
    q = quantize_tensor(x, format="nvfp4", scale_rule="amax")
    packed = torch.frombuffer(q.packed, dtype=torch.uint8).view(2100, 2048)
    steps = (
        e4m3(torch.frombuffer(q.block_scales, dtype=torch.uint8)).view(2100, 256) * q.global_scale
    )
    values = decoded(unpacked(packed), steps)
    assert ((values - x).abs() <= 1.07 * steps.repeat_interleave(16, 1)).all()
    assert np.array_equal(dequantize_tensor(q), values.numpy())


@pytest.mark.parametrize("case", ["heavy_bf16", "ties_fp32", "odd_fp16"])
def test_values_come_back_as_modelopt_reads_them(case):
    q = quantize_tensor(INPUTS[case], format="nvfp4", scale_rule="amax")
    expected = MODELOPT[f"{case}/dequant_f32"]
    assert np.array_equal(dequantize_tensor(q), expected.numpy())
    narrow = dequantize_tensor(q, "bf16")
    assert narrow.dtype == ml_dtypes.bfloat16
    assert np.array_equal(narrow.astype(np.float32), expected.bfloat16().float().numpy())


def test_a_tensor_that_torch_keeps_negated_is_what_it_says():
    x = INPUTS["rand_fp32"].clone()
    assert torch._neg_view(x).is_neg()
    lazy, plain = (quantize_tensor(one, format="nvfp4") for one in (torch._neg_view(x), -x))
    assert bytes(lazy.packed) == bytes(plain.packed)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_is_quantized_can_be_copied_and_pickled(format):
    q = quantize_tensor(INPUTS["rand_fp32"], format=format)
    assert pickle.loads(pickle.dumps(q)) == q == copy.deepcopy(q)


DAMAGED = [
    ("nvfp4", {"packed": b"\x22" * 16}, "packed is 16 bytes; expected 128 bytes"),
    ("nvfp4", {"packed": b""}, "packed is 0 bytes"),
    ("nvfp4", {"packed": bytes(129)}, "packed is 129 bytes"),
    ("nvfp4", {"packed": None}, r"packed is a builtins\.NoneType"),
    ("nvfp4", {"block_scales": bytes(3)}, "block_scales is 3 bytes; expected 16 bytes, for nvfp4"),
    ("mxfp4", {"block_scales": bytes(16)}, "expected 8 bytes, for mxfp4 of the shape"),
    ("nvfp4", {"shape": (64,)}, r"shape is \(64,\); expected \(rows, columns\)"),
    ("nvfp4", {"shape": None}, "shape is None"),
    ("nvfp4", {"shape": (-2, -128)}, r"shape is \(-2, -128\)"),
    ("nvfp4", {"shape": (16, 16.0)}, r"shape is \(16, 16\.0\)"),
    ("mxfp4", {"shape": (16, 16)}, "columns a multiple of 32, for mxfp4"),
    ("nvfp4", {"global_scale": None}, "global_scale is None; expected a finite float32 above 0"),
    ("nvfp4", {"global_scale": float("nan")}, "global_scale is nan"),
    ("nvfp4", {"global_scale": 0.0}, r"global_scale is 0\.0"),
    ("nvfp4", {"global_scale": 1e39}, r"global_scale is 1e\+39"),
    ("nvfp4", {"global_scale": "x"}, "global_scale is 'x'"),
    ("mxfp4", {"global_scale": 1.0}, r"global_scale is 1\.0; expected None, for mxfp4"),
    ("nvfp4", {"kind": "factor"}, "kind is 'factor'; expected multiplier or divisor"),
    ("nvfp4", {"format": "nvfp4"}, "format is 'nvfp4'; expected that of a Quantized"),
]


@pytest.mark.parametrize(("format", "changes", "said"), DAMAGED, ids=[said for *_, said in DAMAGED])
def test_parts_that_do_not_fit_together_are_refused(format, changes, said):
    """Kernels read as many bytes as the shape says, whatever is there."""
    q = quantize_tensor(np.ones((4, 64), np.float32), format=format)
    for dtype in ("fp32", "bf16"):
        with pytest.raises(InputError, match=said) as refused:
            dequantize_tensor(replace(q, **changes), dtype)
        assert refused.value.code == "bad-quantized"


@pytest.mark.parametrize("part", ["packed", "block_scales"])
def test_the_cpu_reads_nothing_beyond_a_buffer(part):
    q = quantize_tensor(X, format="nvfp4")
    short = replace(q, **{part: getattr(q, part)[:-1]})
    with pytest.raises(ValueError, match="cannot reshape"):
        Cpu().dequantize(short, "F32")
    with pytest.raises(ValueError, match="cannot reshape"):
        Cpu().compare(Matrix(X.data.cast("B"), "F32", X.shape), short)


def test_only_what_is_quantized_is_dequantized():
    with pytest.raises(InputError, match="expected one of nvfp4, mxfp4, fp8, mxfp8"):
        quantize_tensor(np.ones((32, 64), np.float32), format="int4")
    with pytest.raises(InputError, match=r"numpy\.ndarray is given; expected a Quantized"):
        dequantize_tensor(X)


def test_importance_weighs_columns():
    """A column that counts for everything is met as well as four bits can."""
    x = torch.randn((8, 64), generator=torch.Generator().manual_seed(1)).numpy()
    heavy = np.ones(64, np.float32)
    heavy[5] = 1e6
    by_importance = partial(quantize_tensor, x, format="nvfp4", scale_rule="importance")
    by_mse, weighed = quantize_tensor(x, format="nvfp4"), by_importance(importance=heavy)
    for form in (heavy.tolist(), torch.from_numpy(heavy).requires_grad_()):
        assert by_importance(importance=form) == weighed
    lost = [np.square(dequantize_tensor(q) - x) for q in (by_mse, weighed)]
    assert lost[1][:, 5].sum() < lost[0][:, 5].sum()
    assert lost[1].sum() > lost[0].sum()


X = np.ones((2, 64), np.float32)
REFUSED = [
    (X.astype(np.float64), {}, "tensor-dtype", "float64"),
    (X.astype(">f4"), {}, "tensor-dtype", ">f4"),
    (X.astype(np.int8), {}, "tensor-dtype", "int8"),
    (torch.ones(2, 64, dtype=torch.float64), {}, "tensor-dtype", "torch.float64"),
    (torch.ones(2, 64, dtype=torch.float8_e4m3fn), {}, "tensor-dtype", "float8_e4m3fn"),
    (torch.ones(2, 64, device="meta"), {}, "tensor-device", "meta"),
    (torch.ones(2, 64).to_sparse(), {}, "tensor-layout", "sparse_coo"),
    (X[0], {}, "tensor-shape", r"\(64,\)"),
    (X[None], {}, "tensor-shape", r"\(1, 2, 64\)"),
    (torch.ones(()), {}, "tensor-shape", r"\(\)"),
    (X[:0], {}, "tensor-shape", r"\(0, 64\)"),
    (X[:, :0], {}, "tensor-shape", r"\(2, 0\)"),
    (X[:, :40], {}, "tensor-shape", r"\(2, 40\).*multiple of 16, for nvfp4"),
    (X[:, :48], {"format": "mxfp4"}, "tensor-shape", "multiple of 32, for mxfp4"),
    (X.tolist(), {}, "tensor-type", "builtins.list"),
    (np.ma.masked_array(X), {}, "tensor-type", "MaskedArray"),
    (X, {"format": "int4"}, "unknown-format", "int4"),
    (X, {"format": None}, "unknown-format", "None"),
    (X, {"format": []}, "unknown-format", r"\[\]"),
    (X, {"scale_rule": "even"}, "unknown-scale-rule", "even"),
    (X, {"scale_rule": 3}, "unknown-scale-rule", "3"),
    (X, {"scale_rule": ""}, "unknown-scale-rule", "''"),
    (X, {"scale_rule": "importance"}, "no-importance", "second moments"),
    (X, {"importance": X[0]}, "scale-rule", "mse does not use it"),
    (X, {"scale_rule": "importance", "importance": X[0, :16]}, "importance-shape", r"\(64,\)"),
    (X, {"scale_rule": "importance", "importance": X[0] * 1j}, "importance-shape", "ndarray"),
    (X, {"global_amax": 0.5}, "global-amax", "at least 1"),
    (X, {"global_amax": -1}, "global-amax", "at least 1"),
    (X, {"global_amax": float("nan")}, "global-amax", "finite"),
    (X, {"global_amax": 1e39}, "global-amax", "finite"),
    (X, {"format": "mxfp4", "global_amax": 1.0}, "global-amax", "no global scale"),
    (X, {"format": "mxfp4", "global_amax": "3"}, "global-amax", "no global scale"),
    (X, {"global_amax": "3"}, "global-amax", "'3'; expected a number"),
    (X, {"global_amax": [1.0]}, "global-amax", "expected a number"),
    (X, {"global_amax": 10**400}, "global-amax", "is inf; expected a finite number"),
    (X, {"scale_rule": "importance", "importance": "much"}, "importance-shape", "builtins.str"),
    (
        torch.nested.nested_tensor([torch.ones(2, 64)], layout=torch.jagged),
        {},
        "tensor-layout",
        "nested",
    ),
    (
        FakeTensorMode().from_tensor(torch.ones(2, 64)),
        {},
        "tensor-type",
        "FakeTensor, which holds no values",
    ),
]


@pytest.mark.parametrize(
    ("x", "words", "code", "said"), REFUSED, ids=[f"{code}-{said}" for *_, code, said in REFUSED]
)
def test_what_is_no_matrix_of_weights_is_refused(x, words, code, said):
    with pytest.raises(InputError, match=said) as refused:
        quantize_tensor(x, **{"format": "nvfp4", **words})
    assert refused.value.code == code


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_its_place(bad, format):
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 33], x[2, 0] = bad, bad
    what = "NaN" if np.isnan(bad) else "Inf"
    for form in (x, as_array(x)):
        with pytest.raises(
            NumericError, match=rf"2 values that are NaN or Inf, the first {what} at \[1, 33\]"
        ):
            quantize_tensor(form, format=format)


@pytest.mark.parametrize(
    ("dtype", "meant"),
    [
        ("int8", ""),
        (None, ""),
        ([], ""),
        (torch.int8, ""),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (np.float32, "fp32"),
        (np.dtype("float16"), "fp16"),
        (ml_dtypes.bfloat16, "bf16"),
        ("float32", "fp32"),
    ],
)
def test_an_unknown_dtype_to_dequantize_to_is_refused_with_the_word(dtype, meant):
    with pytest.raises(InputError) as refused:
        dequantize_tensor(quantize_tensor(X, format="mxfp4"), dtype)
    suggested = f"; did you mean {meant}?" if meant else ""
    end = f" is not known; expected one of bf16, fp16, fp32{suggested}"
    assert refused.value.message == f"dtype {dtype!r}{end}"


def test_the_weights_are_not_changed_and_the_result_is_its_own():
    x = INPUTS["rand_fp32"].clone()
    q = quantize_tensor(x, format="nvfp4")
    kept = bytes(q.packed)
    assert torch.equal(x, INPUTS["rand_fp32"])
    x.zero_()
    assert bytes(q.packed) == kept


def test_arrays_load_no_torch_and_the_package_loads_nothing():
    code = """
import sys
import fp4convert
assert not {"numpy", "torch", "typer", "rich", "huggingface_hub"} & set(sys.modules), "heavy"
import numpy
q = fp4convert.quantize_tensor(numpy.ones((1, 16), numpy.float32), format="nvfp4")
assert bytes(q.packed) == b"\\x77" * 8
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SUPPORT)
