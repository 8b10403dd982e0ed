"""Other packages' own quantizers on a CPU: what they make of a matrix by default, and what it costs
them.

    python -P quantizers.py values WEIGHTS.safetensors VALUES.safetensors PEER ...
    python -P quantizers.py serve WEIGHTS.safetensors

run where the packages are (make bench-peers makes an environment for those that do not resolve with
the rest).  The first writes
PEER/NAME, float32, for every matrix NAME.  The second answers each line `PEER THREADS` with one
line of JSON: seconds and
cpu_seconds of quantizing the first matrix once, or missing or problem.  Nothing of fp4convert is
imported,
and -P keeps this folder off the path: no package may find a module of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # OCP MX v1.0, 5.3.3


class Peer(NamedTuple):
    """One package's way to one format; what prepare makes of a matrix is quantized once."""

    quantize: Callable[[Any], Any]
    values: Callable[[Any], Tensor]  # of what quantize made: float32
    prepare: Callable[[Tensor], Any] = lambda x: x


def modelopt_nvfp4(x: Tensor) -> Any:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return NVFP4QTensor.quantize(x, 16)


def modelopt_nvfp4_values(made: Any) -> Tensor:
    stored, block_scales, global_scale = made
    return stored.dequantize(
        dtype=torch.float32, scale=block_scales, double_scale=global_scale, block_sizes={-1: 16}
    )


def modelopt_mxfp4(x: Tensor) -> Any:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    return MXFP4QTensor.quantize(x, 32)


def modelopt_mxfp4_values(made: Any) -> Tensor:
    stored, block_scales = made
    return stored.dequantize(dtype=torch.float32, scale=block_scales, block_sizes={-1: 32})


def compressed_tensors(x: Tensor, fmt: str) -> dict[str, Tensor]:
    from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(f"{fmt.upper()}A16", ["Linear"])
    global_scale, compressor = None, MXFP4PackedCompressor
    if fmt == "nvfp4":
        largest = x.abs().max()
        global_scale, compressor = generate_gparam(-largest, largest), NVFP4PackedCompressor
    blocks = x.unflatten(-1, (-1, scheme.weights.group_size))
    block_scales, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale
    )
    state = {"weight": x, "weight_scale": block_scales}
    return compressor.compress(
        state if global_scale is None else state | {"weight_global_scale": global_scale}, scheme
    )


def packed_values(stored: dict[str, Tensor]) -> Tensor:
    """The values of what compressed-tensors stores."""
    packed, block_scales, global_divisor = (
        stored.get(f"weight_{part}") for part in ("packed", "scale", "global_scale")
    )
    if global_divisor is not None:
        steps = block_scales.float() / global_divisor.float()
    else:
        steps = block_scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return (
        torch.tensor(E2M1)[codes].unflatten(-1, (steps.shape[-1], -1)) * steps.unsqueeze(-1)
    ).flatten(-2)


def llmcompressor(x: Tensor, fmt: str) -> dict[str, Tensor]:
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    from llmcompressor.entrypoints.model_free.validate import validate_config

    config = validate_config(None, f"{fmt.upper()}A16", [])
    made = ModelFreePtqConverter(config).process({"model.layers.0.self_attn.o_proj.weight": x})
    return {name.rpartition(".")[2]: tensor for name, tensor in made.items()}


def torchao_nvfp4(x: Tensor) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))


def torchao_mxfp4(x: Tensor, mode: str = "rceil") -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode(mode))


def torchao_values(stored: Any) -> Tensor:
    return stored.dequantize(torch.float32)


def quark_layer(x: Tensor) -> tuple[Any, Tensor]:
    """A model of one layer, and an input for it; the quantizer takes nothing smaller."""
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], x.shape[0], bias=False, dtype=x.dtype))
    model[0].weight.data.copy_(x)
    return model, torch.zeros(1, x.shape[1], dtype=x.dtype)


def quark(given: tuple[Any, Tensor], fmt: str) -> Any:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config import template
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    if fmt == "nvfp4":
        layer = QLayerConfig(weight=template.FP4Block16ScaleE4M3Scheme().config.weight)
    else:
        layer = template.MXFP4WeightOnlyScheme().config
    model, inputs = given
    quantizer = ModelQuantizer(QConfig(global_quant_config=layer))
    return quantizer.freeze(quantizer.quantize_model(model, [inputs]))


def quark_values(frozen: Any) -> Tensor:
    with torch.no_grad():
        return frozen[0](torch.eye(frozen[0].in_features)).T  # W I, exact: every sum has one term


def as_mlx(x: Tensor) -> Any:
    import mlx.core as mx

    array = mx.array(x.float().numpy())
    array = (
        array
        if x.dtype == torch.float32
        else array.astype(getattr(mx, str(x.dtype).removeprefix("torch.")))
    )
    mx.eval(array)
    return array


def mlx(x: Any, mode: str) -> Any:
    import mlx.core as mx

    codes, block_scales = mx.quantize(x, mode=mode)
    mx.eval(codes, block_scales)  # else nothing is done yet
    return codes, block_scales


def mlx_values(made: Any, mode: str) -> Tensor:
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(mx.dequantize(*made, mode=mode, dtype=mx.float32)))


def fouroversix(x: Tensor, dtype: str, rule: str) -> Any:
    from fouroversix import QuantizationConfig, quantize_to_fp4

    return quantize_to_fp4(
        x, QuantizationConfig(backend="pytorch", dtype=dtype, scale_rule=rule)
    ), x.shape


def fouroversix_values(made: Any) -> Tensor:
    from fouroversix import dequantize

    stored, (rows, columns) = made
    return dequantize(stored, torch.float32)[:rows, :columns]


PEERS = {
    "modelopt_nvfp4": Peer(modelopt_nvfp4, modelopt_nvfp4_values),
    "modelopt_mxfp4": Peer(modelopt_mxfp4, modelopt_mxfp4_values),
    "torchao_nvfp4": Peer(torchao_nvfp4, torchao_values),
    "torchao_mxfp4": Peer(torchao_mxfp4, torchao_values),
    "torchao_floor_mxfp4": Peer(partial(torchao_mxfp4, mode="floor"), torchao_values),
    "fouroversix_nvfp4": Peer(partial(fouroversix, dtype="nvfp4", rule="mse"), fouroversix_values),
    "fouroversix_mxfp4": Peer(
        partial(fouroversix, dtype="mxfp4", rule="static_6"), fouroversix_values
    ),
}
for _fmt in ("nvfp4", "mxfp4"):
    PEERS[f"compressed_tensors_{_fmt}"] = Peer(partial(compressed_tensors, fmt=_fmt), packed_values)
    PEERS[f"llmcompressor_{_fmt}"] = Peer(partial(llmcompressor, fmt=_fmt), packed_values)
    PEERS[f"quark_{_fmt}"] = Peer(partial(quark, fmt=_fmt), quark_values, quark_layer)
    PEERS[f"mlx_{_fmt}"] = Peer(partial(mlx, mode=_fmt), partial(mlx_values, mode=_fmt), as_mlx)


def values_of(peer: Peer, x: Tensor) -> Tensor:
    return peer.values(peer.quantize(peer.prepare(x))).detach().float().contiguous()


def write_values(weights_file: str, values_file: str, *names: str) -> None:
    weights = load_file(weights_file)
    save_file(
        {
            f"{name}/{key}": values_of(PEERS[name], x)
            for name in names
            for key, x in weights.items()
        },
        values_file,
    )


def cost(peer: Peer, x: Tensor, threads: int) -> dict[str, object]:
    """Seconds of quantizing it once, by the clock and of all processors."""
    torch.set_num_threads(threads)
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(os.getppid()))[:threads]
    )  # as the parent has it now
    given = peer.prepare(x)
    begun = time.perf_counter(), time.process_time()
    peer.quantize(given)
    return {
        "seconds": time.perf_counter() - begun[0],
        "cpu_seconds": time.process_time() - begun[1],
    }


def answer(line: str, x: Tensor) -> dict[str, object]:
    name, threads = line.split()
    try:
        return cost(PEERS[name], x, int(threads))
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    except Exception as error:  # whatever it is, the other peers are still wanted
        return {
            "problem": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
        }


def serve(weights_file: str) -> None:
    """Answer on what was standard output, where nothing that a package prints can follow."""
    (x, *_) = load_file(weights_file).values()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(line, x)), file=answers, flush=True)


if __name__ == "__main__":
    {"values": write_values, "serve": serve}[sys.argv[1]](*sys.argv[2:])
