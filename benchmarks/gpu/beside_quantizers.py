"""Measure amax and NVFP4 quantizers of other packages on the same bytes.

torch, torch.compile, torchao, ModelOpt; in the same run.

A peer that is missing or fails is a row that says why.  Output: whether its bytes are those of this
project's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from fp4convert.numerics.formats import E2M1_MAX, E4M3_MAX, E4M3_MIN, GLOBAL_RANGE, NVFP4
from gpu.device import Case, Device, Rung, Values

SHAPE = (8192, 8192)
Amax = Callable[[Any], Any]  # x -> its largest magnitude
Quantize = Callable[[Any, Any], tuple[Any, Any]]  # x, amax -> packed, block_scales


def reason(error: Exception) -> str:
    """One line that fits into a table."""
    first = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"{type(error).__name__}: {first}"[:160]


def torch_amax(torch: ModuleType) -> Amax:
    return lambda x: x.abs().max()


def torch_norm(torch: ModuleType) -> Amax:
    return lambda x: torch.linalg.vector_norm(x, float("inf"))


def torch_quantize(torch: ModuleType) -> Quantize:
    """codec.quantize in torch's own operations, for weights that are neither all zero nor tiny."""

    def quantize(x: Any, amax: Any) -> tuple[Any, Any]:
        blocks = x.float().view(-1, NVFP4.block_size)
        global_scale = amax / torch.full_like(
            amax, GLOBAL_RANGE
        )  # by a number, torch would multiply with its reciprocal
        r = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * global_scale)
        block_scales = torch.where(r == 0, 1.0, r.clamp(E4M3_MIN, E4M3_MAX)).to(torch.float8_e4m3fn)
        q = blocks / (block_scales.float() * global_scale)
        m = q.abs()
        codes = (q < 0).to(torch.uint8) << 3
        for midpoint, to_even_is_up in zip(
            (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False
        ):
            codes += (m >= midpoint if to_even_is_up else m > midpoint).to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, block_scales

    return quantize


def torch_compiled(torch: ModuleType) -> Quantize:
    return torch.compile(torch_quantize(torch))


def torchao_quantize(torch: ModuleType) -> Quantize:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def quantize(x: Any, amax: Any) -> tuple[Any, Any]:
        block_scales, packed = nvfp4_quantize(
            x, NVFP4.block_size, per_tensor_scale=amax / GLOBAL_RANGE
        )
        return packed, block_scales

    return quantize


def torchao_compiled(torch: ModuleType) -> Quantize:
    return torch.compile(torchao_quantize(torch))


def modelopt_quantize(torch: ModuleType) -> Quantize:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def quantize(x: Any, amax: Any) -> tuple[Any, Any]:
        result, block_scales, _ = NVFP4QTensor.quantize(
            x, NVFP4.block_size, weights_scaling_factor_2=amax / GLOBAL_RANGE
        )
        return result._quantized_data, block_scales

    return quantize


AMAXES = {"torch x.abs().max()": torch_amax, "torch vector_norm(x, inf)": torch_norm}
QUANTIZERS = {
    "torch": torch_quantize,
    "torch.compile": torch_compiled,
    "torchao nvfp4_quantize": torchao_quantize,
    "torchao nvfp4_quantize, compiled": torchao_compiled,
    "ModelOpt NVFP4QTensor.quantize": modelopt_quantize,
}


def peers(device: Device, x: Values) -> str:
    """A table; x: bytes of bf16 weights, repeated to 64M elements."""
    n = SHAPE[0] * SHAPE[1]
    sets = device.sets(2 * n)
    arrays = [device.filled(x, 2 * n) for _ in range(sets)]
    target, packed, block_scales = (
        device.empty(size) for size in (2 * n, n // 2, n // NVFP4.block_size)
    )
    amax = device.empty(4)
    amax.data.memset_async(0, 4)
    ours = {
        "amax": Rung(device.kernels, "amax_bf16"),
        "quantize": Rung(device.kernels, "quantize_nvfp4_bf16"),
    }
    ours["amax"].launch(n, arrays[0], n, amax)
    ours["quantize"].launch(n, arrays[0], n, amax, packed, block_scales)
    expected = np.concatenate([packed.get(), block_scales.get()])

    def cases() -> Iterator[Case]:
        yield device.case(
            ours["amax"],
            lambda run: ours["amax"].launch(n, arrays[run % sets], n, device.amax_slot(run)),
            2 * n,
        )
        yield from (
            peer(device, label, 2 * n, arrays, partial(ready_amax, make, amax))
            for label, make in AMAXES.items()
        )
        quantize = ours["quantize"]
        moved = 2 * n + packed.nbytes + block_scales.nbytes
        yield device.case(
            quantize,
            lambda run: quantize.launch(n, arrays[run % sets], n, amax, packed, block_scales),
            moved,
        )
        for label, make in QUANTIZERS.items():
            yield peer(device, label, moved, arrays, partial(ready_quantize, make, amax, expected))

    return device.measure(
        Case("copy", 4 * n, lambda run: device.copy(target, arrays[run % sets])), cases()
    )


def peer(
    device: Device, label: str, nbytes: int, arrays: list[Any], ready: Callable[..., Any]
) -> Case:
    """The case of a peer that has run once, or of one that cannot."""
    if device.is_late():
        return Case(label, nbytes, None, output="not run: the time is up")
    try:
        import torch

        tensors = [torch.from_dlpack(array).view(torch.bfloat16).view(SHAPE) for array in arrays]
        call, output = ready(torch, tensors)
        run_once = partial(take_turns, call, tensors)
        device.median_ms(run_once)  # what it does badly it does now
    except Exception as error:
        return Case(label, nbytes, None, output=reason(error))
    return Case(label, nbytes, run_once, output=output)


def take_turns(call: Callable[[Any], object], tensors: list[Any], run: int) -> None:
    call(tensors[run % len(tensors)])


def ready_amax(
    make: Callable[[ModuleType], Amax], amax: Any, torch: ModuleType, tensors: list[Any]
) -> tuple[Amax, str]:
    call = make(torch)
    is_equal = float(call(tensors[0])) == float(amax.get().view(np.float32)[0])
    return call, "equal" if is_equal else "differs"


def ready_quantize(
    make: Callable[[ModuleType], Quantize],
    amax: Any,
    expected: Values,
    torch: ModuleType,
    tensors: list[Any],
) -> tuple[Amax, str]:
    quantize = make(torch)
    given = torch.from_dlpack(amax).view(torch.float32).view(())
    found = np.concatenate(
        [part.view(torch.uint8).flatten().cpu().numpy() for part in quantize(tensors[0], given)]
    )
    different = np.count_nonzero(found != expected)
    output = f"{100 * different / found.size:.4f} % of bytes differ" if different else "bytes equal"
    return (lambda x: quantize(x, given)), output
