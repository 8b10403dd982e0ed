"""multiply_tensor() on a GPU: gemv.cu on the caller's arrays and stream, against float64 products
of the values that ModelOpt reads, and torch of torchao's codes.

The GPU is simt_gpu.Machine: what a stream was not made to wait for has not happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_tensors import Exported
from paths import GOLDEN
from safetensors.torch import load_file
from simt_gpu import Array, Machine, Stream
from torch_formulas import mxfp4_weight

from fp4convert import DeviceQuantized, InputError, multiply_tensor, quantize_tensor
from fp4convert.numerics.backends import device_arrays
from fp4convert.numerics.formats import FP4_FORMATS

MODELOPT, TORCHAO = (
    load_file(GOLDEN / f"{name}.safetensors") for name in ("modelopt_nvfp4", "torchao_mxfp4")
)
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def gpu(machine: Machine) -> Iterator[Machine]:
    device_arrays._kernels.cache_clear()
    yield machine
    device_arrays._kernels.cache_clear()


def judged(gpu: Machine, case: str, format: str) -> tuple[DeviceQuantized, np.ndarray]:
    """What another package has made, on the GPU, and its values."""
    if format == "nvfp4":
        parts = [MODELOPT[f"{case}/{part}"] for part in ("weight", "weight_scale")]
        w, number = MODELOPT[f"{case}/dequant_f32"], MODELOPT[f"{case}/weight_scale_2"].item()
    else:
        parts = [TORCHAO[f"{case}/{part}_floor"] for part in ("qdata", "scale")]
        w, number = mxfp4_weight(*parts), None
    there = (Exported(gpu, part.contiguous().view(torch.uint8)) for part in parts)
    return DeviceQuantized(FP4_FORMATS[format], tuple(w.shape), *there, number), w.double().numpy()


def vectors(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def assert_close(found: Array, x: np.ndarray, w: np.ndarray) -> None:
    """As far off as float32 additions in any order and one rounding to fp16 may be."""
    exact, size = x @ np.swapaxes(w, -1, -2), np.abs(x) @ np.swapaxes(np.abs(w), -1, -2)
    assert isinstance(found, Array)
    assert (found.dtype, found.shape) == (np.float16, exact.shape)
    reach = 1.01 * (x.shape[-1] + 4) * 2.0**-24 * size + 2.0**-11 * np.abs(exact) + 2.0**-25
    assert (np.abs(found.get() - exact) <= reach).all()
    assert exact.any()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("format", FP4_FORMATS)
def test_products_are_those_of_the_values_that_others_read(gpu, format, dtype, count):
    q, w = judged(gpu, "rand_bf16", format)
    x = vectors(dtype, count, 256)
    assert_close(multiply_tensor(q, Exported(gpu, x)), x.double().numpy(), w)
    assert [name.partition("_")[0] for _, name in gpu.launches] == ["gemv"]
    assert gpu.copied == [("up", 4)]  # the global scale, or what stands for it


def test_vectors_in_nvfp4(gpu):
    (q, w), (x, values) = (judged(gpu, f"heavy_{d}", "nvfp4") for d in ("bf16", "fp16"))
    assert_close(multiply_tensor(q, x), values, w)


@pytest.mark.parametrize("format", FP4_FORMATS)
@pytest.mark.parametrize("kind", ["fp16", "nvfp4"])
def test_a_batch_is_one_launch(gpu, format, kind):
    """Three matrices and their vectors with scales of their own, wherever they lie."""
    cases = ("heavy_bf16", "heavy_fp16", "heavy_fp32")
    pairs = [judged(gpu, case, format) for case in cases]
    w = np.stack([values for _, values in pairs]) * np.array([1, 2, 4])[:, None, None]
    batch = [q for q, _ in pairs]
    if format == "nvfp4":
        batch = [replace(q, global_scale=q.global_scale * 2**z) for z, q in enumerate(batch)]
    else:
        w /= np.array([1, 2, 4])[:, None, None]
    if kind == "fp16":
        plain = vectors(torch.float16, 3, 5, 128)
        x, values = Exported(gpu, plain), plain.double().numpy()
    else:
        own = [judged(gpu, case, "nvfp4") for case in reversed(cases)]
        x, values = [q for q, _ in own], np.stack([values for _, values in own])
    assert_close(multiply_tensor(batch, x), values, w)
    assert [name for _, name in gpu.launches] == [f"gemv_{format}_{kind}"]


def test_parts_of_one_array_are_read_where_they_lie(gpu):
    """A batch cut from one stack is not copied."""
    x = torch.randn((64, 128), generator=torch.Generator().manual_seed(5))
    whole = quantize_tensor(x, format="mxfp4")
    halves = [whole.rows(0, 32), whole.rows(32, 64)]
    stacks = [
        Exported(gpu, torch.frombuffer(bytearray(p), dtype=torch.uint8))
        for p in (whole.packed, whole.block_scales)
    ]
    batch = []
    for z, half in enumerate(halves):
        parts = []
        for stack, part in zip(stacks, (half.packed, half.block_scales), strict=True):
            cut = Exported(gpu, torch.zeros(1))
            cut.tensor = stack.tensor[z * part.nbytes : (z + 1) * part.nbytes]
            cut.producer = stack.producer
            parts.append(cut)
        batch.append(DeviceQuantized(half.format, half.shape, *parts, None))
    given = vectors(torch.float16, 2, 1, 128)
    found = multiply_tensor(batch, Exported(gpu, given))
    assert {way for way, _ in gpu.copied} == {"up"}
    for z, half in enumerate(halves):
        expected = multiply_tensor(half, given[z])
        assert np.allclose(found.get()[z], expected, rtol=2**-10, atol=1e-3)


def test_work_is_put_on_the_stream_that_is_current_in_cupy(gpu):
    q, w = judged(gpu, "rand_bf16", "nvfp4")
    x = vectors(torch.float16, 2, 256)
    given = Exported(gpu, x)
    with Stream(gpu) as own:
        found = multiply_tensor(q, given)
    assert given.asked == q.packed.asked == [own.ptr]
    given.tensor.fill_(7)  # who knows no stream of ours may reuse it now
    assert_close(found, x.double().numpy(), w)


def test_what_does_not_fit_is_refused(gpu):
    q, _ = judged(gpu, "rand_bf16", "nvfp4")
    on_cpu = quantize_tensor(torch.ones(48, 256), format="nvfp4")
    narrow, _ = judged(gpu, "odd_bf16", "nvfp4")  # of 96 columns
    mxfp4, _ = judged(gpu, "rand_bf16", "mxfp4")
    half = torch.ones(3, 256).half()

    def there(x: torch.Tensor) -> Exported:
        return Exported(gpu, x)

    refused = [
        (q, half, "tensor-device", r"x, a torch\.Tensor, is not; expected one device"),
        (q, half.numpy(), "tensor-device", r"x, a numpy\.ndarray, is not"),
        (q, on_cpu, "tensor-device", "x, a fp4convert.* is not"),
        (q, [], "tensor-device", r"x, a builtins\.list, is not"),
        (on_cpu, there(half), "tensor-device", "the matrix is on the CPU, and x is on cuda:0"),
        ([q, on_cpu], there(half[None]), "tensor-device", "are on cuda:0 and the CPU"),
        (q, there(half.float()), "gemv-vectors", "x is float32; expected bf16, fp16"),
        (q, there(half.int()), "gemv-vectors", "x is int32"),
        (q, mxfp4, "gemv-vectors", r"x is mxfp4 \(48, 256\) with a multiplier"),
        (q, replace(q, kind="divisor"), "gemv-vectors", "with a divisor"),
        (q, there(half[0]), "gemv-shape", r"\(256,\); expected \(vectors, columns\)"),
        (q, there(half[:0]), "gemv-shape", r"\(0, 256\)"),
        (q, there(half[:, :64].contiguous()), "gemv-shape", "256 columns, and x has 64"),
        (q, there(half.t().contiguous().t()), "tensor-layout", "row-major"),
        (q, [q], "gemv-shape", r"x is a builtins\.list"),
        ([q], q, "gemv-shape", "DeviceQuantized; expected .* for 1 matrices"),
        ([q, q], [q], "gemv-shape", "x is for 1 matrices"),
        ([q, q], there(half[None]), "gemv-shape", r"\(1, 3, 256\); expected .* for 2 matrices"),
        ([q, mxfp4], there(half[None]), "gemv-shape", "expected one format, shape and kind"),
        (narrow, there(half[:, :96].contiguous()), "gemv-shape", "have 96 columns.*multiple of 64"),
        (replace(q, packed=q.block_scales), there(half), "bad-quantized", "expected 6144 bytes"),
        (q, there(half[:1].expand(131071, 256).contiguous()), "gemv-vectors", "131071 vectors"),
    ]
    for matrix, x, code, said in refused:
        with pytest.raises(InputError, match=said) as found:
            multiply_tensor(matrix, x)
        assert found.value.code == code, said
    assert not gpu.launches
