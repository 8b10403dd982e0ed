"""One matrix that lies on a GPU: the CPU's bytes, on the caller's stream, without a copy.

The GPU is simt_gpu.Machine: what a stream was not made to wait for has not happened.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from gpu_tensors import CudaTensor, Exported, cupy_array
from simt_gpu import Array, Machine, Stream

from fp4convert import (
    DeviceError,
    DeviceQuantized,
    InputError,
    NumericError,
    dequantize_tensor,
    quantize_tensor,
)
from fp4convert.numerics.backends import device_arrays, gpus, self_check
from fp4convert.numerics.formats import FP4_FORMATS, NVFP4

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
RULES = [(fmt.name, rule) for fmt in FP4_FORMATS.values() for rule in fmt.scale_rules]
HEAVY = np.linspace(0, 3, 544, dtype=np.float32)


@pytest.fixture
def machine(simt_libraries, cache, monkeypatch) -> Machine:  # type: ignore[no-untyped-def]
    made = Machine(simt_libraries, count=2)
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    monkeypatch.setattr(gpus, "ask_driver", lambda: ((13, 0), made.count, ""))
    monkeypatch.setattr(self_check, "check", lambda gpu: None)  # test_self_check.py has it
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    device_arrays._kernels.cache_clear()
    yield made
    device_arrays._kernels.cache_clear()


def weights(dtype: torch.dtype = torch.bfloat16, rows: int = 33) -> torch.Tensor:
    spread = torch.randn((rows, 544), generator=torch.Generator().manual_seed(rows))
    return (spread * torch.linspace(0.01, 3, rows)[:, None]).to(dtype)


def as_array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def stored(q: DeviceQuantized) -> tuple[object, ...]:
    parts = q.packed.get().tobytes(), q.block_scales.get().tobytes()
    return q.format, q.shape, *parts, q.global_scale, q.kind


def expected(x: torch.Tensor, **words: object) -> tuple[object, ...]:
    q = quantize_tensor(x, **words)
    return q.format, q.shape, bytes(q.packed), bytes(q.block_scales), q.global_scale, q.kind


@pytest.mark.parametrize(("format", "rule"), RULES)
@pytest.mark.parametrize("dtype", NAMES)
def test_the_bytes_are_those_of_the_cpu_and_only_an_amax_is_copied(machine, dtype, format, rule):
    x = weights(dtype)
    words = {"format": format, "scale_rule": rule}
    if rule == "importance":
        words["importance"] = HEAVY
    if format == "nvfp4":
        words["global_amax"] = 20.0
    q = quantize_tensor(Exported(machine, x), **words)
    assert stored(q) == expected(x, **words)
    assert (q.packed.shape, q.packed.dtype) == ((33, 272), np.uint8)
    assert q.block_scales.shape == (33, 544 // q.format.block_size)
    ups = [4] * (format == "nvfp4") + [HEAVY.nbytes] * (rule == "importance")
    assert machine.copied == [("down", 4), *(("up", nbytes) for nbytes in ups)]


@pytest.mark.parametrize("dtype", NAMES)
def test_without_an_amax_of_the_group_it_is_the_matrix_own(machine, dtype):
    x = weights(dtype)
    assert stored(quantize_tensor(Exported(machine, x), format="nvfp4")) == expected(
        x, format="nvfp4"
    )


@pytest.mark.parametrize("dtype", NAMES)
def test_arrays_of_cupy_come_by_the_interface_that_knows_no_bf16(machine, dtype):
    x = weights(dtype)
    with Stream(machine) as own:
        array = cupy_array(machine, as_array(x))
        q = quantize_tensor(array, format="mxfp4")
        assert own.done < len(own.queue)  # nothing waits for the codes
    assert stored(q) == expected(x, format="mxfp4")


def test_a_stream_that_an_interface_names_is_waited_for(machine):
    """As of Numba, which may have another stream current than CuPy has."""
    x = weights(torch.float32)
    with Stream(machine) as other:
        array = cupy_array(machine, x.numpy())
        named = SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__)
    assert machine.current_stream() is not other
    assert stored(quantize_tensor(named, format="nvfp4")) == expected(x, format="nvfp4")


def test_strides_of_an_interface_are_bytes(machine):
    x = weights(torch.float32)
    array = cupy_array(machine, x.numpy())
    strides = (544 * 4, 4)
    named = SimpleNamespace(__cuda_array_interface__={**array.__cuda_array_interface__})
    named.__cuda_array_interface__["strides"] = strides
    assert stored(quantize_tensor(named, format="nvfp4")) == expected(x, format="nvfp4")
    named.__cuda_array_interface__["strides"] = (4, 33 * 4)
    with pytest.raises(InputError, match=r"strides \(1, 33\)"):
        quantize_tensor(named, format="nvfp4")


def test_work_is_put_on_the_stream_that_is_current_in_cupy(machine):
    x = Exported(machine, weights())
    with Stream(machine) as own:
        quantize_tensor(x, format="nvfp4")
        assert x.asked == [own.ptr]
    on_default = Exported(machine, weights())
    quantize_tensor(on_default, format="nvfp4")
    assert on_default.asked == [1]  # DLPack's word for CUDA's 0


def test_a_torch_tensor_is_worked_on_at_torchs_stream(machine, monkeypatch):
    x = weights()
    own, entered = Stream(machine), []
    monkeypatch.setattr(torch.cuda, "device", lambda n: entered.append(n) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=own.ptr))
    exported = Exported(machine, x)
    tensor = CudaTensor.of(exported)
    q = quantize_tensor(tensor, format="nvfp4")
    assert (exported.asked, entered) == ([own.ptr], [0])
    assert own.done < len(own.queue)
    assert stored(q) == expected(x, format="nvfp4")
    assert machine.current_stream() is machine.stream()


def test_the_gpu_that_the_matrix_is_on_does_the_work(machine):
    x = weights()
    q = quantize_tensor(Exported(machine, x, device=1), format="nvfp4")
    assert {device for device, _ in machine.launches} == {1}
    assert q.packed.data.device == q.block_scales.data.device == 1
    assert stored(q) == expected(x, format="nvfp4")


def test_memory_that_its_owner_may_reuse_is_read_when_the_call_returns(machine):
    """Only torch and CuPy know that a stream of theirs still reads what they free."""
    x = Exported(machine, weights())
    q = quantize_tensor(x, format="nvfp4")
    x.tensor.fill_(7)
    assert stored(q) == expected(weights(), format="nvfp4")
    q = quantize_tensor(weights(), format="mxfp4")
    parts = on_gpu(machine, q.packed), on_gpu(machine, q.block_scales)
    values = dequantize_tensor(DeviceQuantized(q.format, q.shape, *parts, None))
    parts[0].tensor.fill_(7)
    assert np.array_equal(values.get(), dequantize_tensor(q))


def on_gpu(machine: Machine, data: object, device: int = 0) -> Exported:
    return Exported(machine, torch.frombuffer(bytearray(data), dtype=torch.uint8), device)


@pytest.mark.parametrize("format", FP4_FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_are_those_of_the_cpu_of_any_arrays(machine, dtype, format):
    q = quantize_tensor(weights(), format=format)
    parts = on_gpu(machine, q.packed), on_gpu(machine, q.block_scales)
    there = DeviceQuantized(q.format, q.shape, *parts, q.global_scale)
    values = dequantize_tensor(there, dtype)
    assert isinstance(values, Array)
    assert values.dtype == {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}[dtype]
    assert values.get().tobytes() == dequantize_tensor(q, dtype).tobytes()
    assert sum(nbytes for way, nbytes in machine.copied if way == "down") <= 4
    assert sum(nbytes for way, nbytes in machine.copied if way == "up") <= 4


def test_what_was_quantized_there_is_dequantized_there(machine):
    x = weights(torch.float32)
    values = dequantize_tensor(quantize_tensor(Exported(machine, x), format="nvfp4"))
    assert np.array_equal(values.get(), dequantize_tensor(quantize_tensor(x, format="nvfp4")))


@pytest.mark.parametrize("global_scale", [14.6, 14.7])  # 6 * 448 * 24.37 = 65504
def test_values_beyond_fp16_are_refused_as_on_the_cpu(machine, global_scale):
    """A value between 65504 and 65520 rounds to the largest, and is refused all the same."""
    largest = 65510.0 if global_scale > 14.65 else 65504.0
    scales, codes = bytes([0x7E]) * 2, bytes([0x77]) * 16  # 448, 6
    q = DeviceQuantized(
        NVFP4, (1, 32), on_gpu(machine, codes), on_gpu(machine, scales), largest / (6 * 448)
    )
    if largest > 65504:
        with pytest.raises(NumericError, match="beyond 65504"):
            dequantize_tensor(q, "fp16")
    else:
        assert (dequantize_tensor(q, "fp16").get() == 65504).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_with_its_place(machine, bad):
    x = weights()
    x[1, 33], x[2, 0] = bad, bad
    what = "NaN" if np.isnan(bad) else "Inf"
    said = rf"2 values that are NaN or Inf, the first {what} at \[1, 33\]"
    with pytest.raises(NumericError, match=said):
        quantize_tensor(Exported(machine, x), format="mxfp4")
    assert not [name for _, name in machine.launches if not name.startswith("amax")]


def test_other_devices_are_refused(machine):
    x = Exported(machine, weights())
    x.kind = 10  # ROCm
    with pytest.raises(InputError, match="expected a NumPy array"):
        quantize_tensor(x, format="nvfp4")
    q = quantize_tensor(weights(), format="nvfp4")
    apart = on_gpu(machine, q.packed), on_gpu(machine, q.block_scales, device=1)
    with pytest.raises(InputError, match="on cuda:1, another on cuda:0") as refused:
        dequantize_tensor(DeviceQuantized(q.format, q.shape, *apart, q.global_scale))
    assert refused.value.code == "tensor-device"
    machine.count = 1
    device_arrays._kernels.cache_clear()
    with pytest.raises(DeviceError, match="'cuda:1' is not there"):
        quantize_tensor(Exported(machine, weights(), device=1), format="nvfp4")


REFUSED = [
    (lambda x: x.double(), {}, "tensor-dtype", "float64"),
    (lambda x: x.int(), {}, "tensor-dtype", "int32"),
    (lambda x: x.t().contiguous().t(), {}, "tensor-layout", r"strides \(1, 64\); expected \(64, 1"),
    (lambda x: x[:, :32], {}, "tensor-layout", r"strides \(64, 1\); expected \(32, 1\)"),
    (lambda x: x.reshape(-1)[:32], {}, "tensor-shape", r"\(32,\)"),
    (lambda x: x.reshape(-1)[:80].reshape(2, 40), {}, "tensor-shape", "multiple of 16"),
    (lambda x: x[:0], {}, "tensor-shape", r"\(0, 64\)"),
    (lambda x: x, {"global_amax": 0.5}, "global-amax", "at least 1"),
    (lambda x: x, {"format": "mxfp4", "global_amax": 2.0}, "global-amax", "no global scale"),
    (lambda x: x, {"importance": HEAVY[:64]}, "scale-rule", "mse does not use it"),
    (lambda x: x, {"scale_rule": "importance"}, "no-importance", "second moments"),
]


@pytest.mark.parametrize(("change", "words", "code", "said"), REFUSED, ids=[r[3] for r in REFUSED])
def test_what_is_no_matrix_of_weights_is_refused(machine, change, words, code, said):
    x = Exported(machine, torch.ones(64, 64))
    x.tensor = change(torch.ones(64, 64))
    x.producer.queue.clear()
    with pytest.raises(InputError, match=said) as refused:
        quantize_tensor(x, **{"format": "nvfp4", **words})
    assert refused.value.code == code
    assert not [name for _, name in machine.launches if not name.startswith("amax")]


def test_an_address_that_no_kernel_takes_is_refused(machine):
    x = Exported(machine, torch.ones(1, 64))
    x.tensor = torch.ones(80)[1:65].reshape(1, 64)
    x.producer.queue.clear()
    with pytest.raises(InputError, match="expected a multiple of 16"):
        quantize_tensor(x, format="nvfp4")


def array_of(**words: object) -> object:
    return SimpleNamespace(__cuda_array_interface__=words)


class Raising:
    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("no such stream")


HOST = {"data": (4096, False), "typestr": "<f4", "shape": (4, 64), "version": 3}
UNREADABLE = [
    (SimpleNamespace(__cuda_array_interface__=5), "tensor-type", "TypeError"),
    (array_of(), "tensor-type", "KeyError: 'data'"),
    (array_of(data=()), "tensor-type", "IndexError"),
    (Raising(), "tensor-type", "RuntimeError: no such stream"),
    *[
        (SimpleNamespace(__dlpack_device__=lambda told=told: told), "tensor-type", "types.Simple")
        for told in (None, 5, (2,), ("cuda", None, 1))
    ],
    (SimpleNamespace(__dlpack_device__=lambda: (2, 0)), "tensor-type", "AttributeError"),
    (
        SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=lambda stream: 7),
        "tensor-type",
        "ValueError",
    ),
    (array_of(**HOST), "tensor-device", "at 0x1000 of a GPU, and no GPU has that"),
]


@pytest.mark.parametrize(("x", "code", "said"), UNREADABLE)
def test_an_array_that_does_not_keep_to_its_protocol_is_refused(machine, x, code, said):
    with pytest.raises(InputError, match=said) as refused:
        quantize_tensor(x, format="nvfp4")
    assert refused.value.code == code
    assert not machine.launches


@pytest.mark.parametrize("left_out", ["typestr", "shape"])
def test_an_interface_without_a_key_is_refused(machine, left_out):
    interface = cupy_array(machine, weights(torch.float32).numpy()).__cuda_array_interface__
    del interface[left_out]
    with pytest.raises(InputError, match=f"KeyError: '{left_out}'"):
        quantize_tensor(array_of(**interface), format="nvfp4")


def test_without_a_driver_an_array_of_a_gpu_is_a_device_error(monkeypatch):
    monkeypatch.setattr(gpus, "ask_driver", lambda: (None, 0, "there is no NVIDIA driver"))
    device_arrays._kernels.cache_clear()
    said = "'cuda:0' is not there: there is no NVIDIA driver"
    with pytest.raises(DeviceError, match=said) as refused:
        quantize_tensor(array_of(**HOST), format="nvfp4")
    assert refused.value.next_step == (
        "Copy the matrix to the CPU; fp4convert doctor tells what the GPU needs."
    )


def test_parts_of_another_size_are_refused(machine):
    q = quantize_tensor(weights(), format="nvfp4")
    parts = on_gpu(machine, q.packed[:-16]), on_gpu(machine, q.block_scales)
    with pytest.raises(InputError, match="expected 8976 bytes"):
        dequantize_tensor(DeviceQuantized(q.format, q.shape, *parts, q.global_scale))


def test_a_gpu_that_gives_other_bytes_gets_no_work(machine, monkeypatch):
    def differs(gpu: object) -> None:
        raise DeviceError("device-differs", "cuda:0 gives other bytes than the CPU", "")

    monkeypatch.setattr(self_check, "check", differs)
    with pytest.raises(DeviceError, match="other bytes"):
        quantize_tensor(Exported(machine, weights()), format="nvfp4")
    assert not machine.launches


def test_a_gpu_that_is_lost_is_a_device_error(machine):
    machine.is_lost = True
    with pytest.raises(DeviceError, match=r"cuda:0 \(Imaginary GPU\) failed"):
        quantize_tensor(Exported(machine, weights()), format="nvfp4")
