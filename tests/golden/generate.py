"""Golden bytes: the inputs, and what seven packages that nobody here wrote make of them.

Decides which cases exist and which function of each package speaks for it; README.md says which
version made what.

    python tests/golden/generate.py [NAME ...] [--write]

prints what differs from the committed files and exits 1 if anything does; --write replaces the
files, and a person commits them.
NAME is a file without its suffix; none means all but those of packages that need an environment of
their own.  Nothing of
fp4convert is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
HERE = Path(__file__).parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(shape: tuple[int, int], dtype: torch.dtype, deviation: float, seed: int) -> Tensor:
    return (torch.randn(shape, generator=seeded(seed)) * deviation).to(dtype)


def heavy(dtype: torch.dtype) -> Tensor:
    """Values whose own deviation is log-normal: long tails."""
    spread = torch.exp(torch.randn((32, 128), generator=seeded(3)) * 2)
    return (torch.randn((32, 128), generator=seeded(2)) * spread * 0.05).to(dtype)


def ties(dtype: torch.dtype) -> Tensor:
    """Every midpoint of E2M1 and its neighbours; the tensor's amax is 2688, so that the global
    scale is 1 and steps are 2^k.
    """
    rows = []
    for step in (2.0**k for k in (0, 1, -3, 5, -6)):
        values = []
        for midpoint in MIDPOINTS:
            tie = torch.tensor(midpoint * step, dtype=dtype)
            far = torch.tensor(6e4 if dtype == torch.float16 else 1e30, dtype=dtype)
            below, above = torch.nextafter(tie, torch.zeros_like(tie)), torch.nextafter(tie, far)
            values += [tie.item(), -tie.item(), below.item(), above.item()]
        row = [6 * step, *values[:14], -0.0, 6 * step, *values[14:], -0.0, 6 * step]
        row += [value * step for value in GRID] + [-value * step for value in GRID[:7]]
        row += [6 * step, 0.0, -0.0] + [-midpoint * step for midpoint in MIDPOINTS]
        row += [value * step for value in (5.5, -5.5, 4.999, 2.4999, 0.2499, -0.2499)]
        rows.append(row)
    rows.append([2688.0] + [0.0] * 63)
    return torch.tensor(rows, dtype=torch.float32).to(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, lone values, subnormals, outliers,
    and a tiny block beside a huge one.
    """
    subnormal = torch.finfo(dtype).smallest_normal / 2**7  # representable in all three
    rows = [
        [0.0] * 64,
        [-0.0] * 64,
        [0.0] * 17 + [1.0] + [0.0] * 46,
        [subnormal] * 64,
        [torch.finfo(dtype).tiny] * 64,
        ([1e-3] * 15 + [30.0]) * 4,
        [(-1) ** i * 0.01 * (i + 1) for i in range(64)],
        [1e-6] * 3 + [100.0] + [1e-6] * 36 + [-100.0] + [1e-6] * 23,
        [2.0**-i for i in range(64)],
        [1.0] * 64,
        [-6.0] * 64,
        [5.0] * 64,
    ]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32).to(dtype)


def mxfp4_thresholds(dtype: torch.dtype) -> Tensor:
    """Blocks of 32 whose amax lies at and around every threshold of the MXFP4 scale rules."""
    step = 2**-7
    mantissas = (
        1.0,
        1.25,
        1.5,
        1.5 + step,
        1.5 - step,
        1.625,
        1.75,
        1.75 - step,
        1.75 + step,
        1.875,
        2 - step,
        1.0 + step,
    )
    rows = []
    for i, amax in enumerate(
        mantissa * 2.0**exponent for exponent in (0, 3, -5) for mantissa in mantissas
    ):
        line = torch.linspace(-1, 1, 32) * amax
        line[0] = amax if i % 2 else -amax
        noise = torch.rand(32, generator=seeded(100 + i)) * amax * (1 if i % 3 else -1)
        noise[31] = amax
        rows.append(torch.cat([line, noise]))
    return torch.stack(rows).to(dtype)


def e4m3_ties(dtype: torch.dtype) -> Tensor:
    """Blocks of 16 whose block scale lands on a midpoint of E4M3; the tensor's amax is 2688, so
    that the global scale is 1.
    """
    scales = [(1 + (2 * m + 1) / 16) * 2.0**e for e in (-5, -2, 0, 4, 7) for m in range(8)]
    scales = [value for value in scales if value < 448] + [
        (2 * m + 1) / 2 * 2.0**-9 for m in range(8)
    ]
    scales += [2.0**-9, 2.0**-10, 2.0**-11, 0.75 * 2.0**-9]
    blocks = []
    for i, value in enumerate(scales):
        amax = 6 * value
        block = torch.rand(16, generator=seeded(200 + i)) * 2 * amax - amax
        block[i % 16] = amax
        blocks.append(block)
    blocks += [torch.zeros(16)] * (-len(blocks) % 4)
    last = torch.zeros(1, 64)
    last[0, 5] = 2688.0
    return torch.cat([torch.stack(blocks).reshape(-1, 64), last]).to(dtype)


def lone(dtype: torch.dtype) -> Tensor:
    """Zeros but for the largest finite value."""
    x = torch.zeros((4, 64), dtype=dtype)
    x[1, 7] = torch.finfo(dtype).max
    return x


def not_finite(dtype: torch.dtype) -> Tensor:
    x = gaussian((4, 64), dtype, 1.0, 6)
    x[0, 3], x[1, 20], x[2, 40] = float("nan"), float("inf"), float("-inf")
    return x


CASES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rand": lambda dtype: gaussian((48, 256), dtype, 0.02, 1),
    "heavy": heavy,
    "ties": ties,
    "edges": edges,
    "mxthresh": mxfp4_thresholds,
    "sfties": e4m3_ties,
    "allzero": lambda dtype: torch.zeros((4, 64), dtype=dtype),
    "small": lambda dtype: gaussian((8, 64), dtype, 1e-4, 4),
    "hugeone": lone,
    "denorm": lambda dtype: gaussian((4, 64), dtype, float(torch.finfo(dtype).tiny), 5),
    "naninf": not_finite,
    "odd": lambda dtype: gaussian((5, 96), dtype, 0.5, 7),
}


def inputs() -> Tensors:
    return {
        f"{case}_{name}": make(dtype)
        for name, dtype in DTYPES.items()
        for case, make in CASES.items()
    }


def modelopt_nvfp4(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, block_scales, global_scale = NVFP4QTensor.quantize(x, 16)
    yield "weight", quantized._quantized_data
    yield "weight_scale", block_scales
    yield "weight_scale_2", global_scale.reshape(())
    arguments = {"scale": block_scales, "double_scale": global_scale, "block_sizes": {-1: 16}}
    yield "dequant_f32", quantized.dequantize(dtype=torch.float32, **arguments)


def torchao_mxfp4(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Its mode rceil is our rule ceil; its own ceil is another rule.  torchao takes no fp16, which
    is widened first.
    """
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    wide = x.float() if x.dtype == torch.float16 else x
    for mode in ("floor", "even", "rceil"):
        block_scales, packed = to_mx(
            wide, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode(mode)
        )
        yield f"qdata_{mode}", packed.view(torch.uint8)
        yield f"scale_{mode}", block_scales.view(torch.uint8)


def ct_mxfp4(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The steps of llm-compressor's weight-only path: scales from the extremes of each block, then
    the compressor.
    """
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    blocks = x.unflatten(-1, (-1, 32))
    block_scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    stored = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": block_scales}, scheme)
    yield "weight_packed", stored["weight_packed"]
    yield "weight_scale", stored["weight_scale"]
    yield "dequant", MXFP4PackedCompressor.decompress(stored, scheme)["weight"]


def modelopt_nvfp4_mse(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Its sweep over all E4M3 scales (fp8_scale_sweep), as it runs without a GPU, of what its own
    quantizer makes of them.
    """
    from modelopt.torch.quantization.calib import NVFP4MSECalibrator
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    blocks, amax = x.float().reshape(-1, 16), x.float().abs().max()
    if not 0 < amax < torch.inf:  # no sweep is defined there
        return

    def quantized(values: Tensor, block_amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block_scales = (block_amax.reshape(-1, 1) / 6 / (amax / 2688)).to(torch.float8_e4m3fn)
        stored, _, _ = NVFP4QTensor.quantize(values, 16, block_scales, amax / 2688)
        arguments = {"scale": block_scales, "double_scale": amax / 2688, "block_sizes": {-1: 16}}
        return (
            stored.dequantize(dtype=torch.float32, **arguments),
            stored._quantized_data,
            block_scales,
        )

    sweep = NVFP4MSECalibrator(
        blocks.abs().amax(1, keepdim=True),
        amax,
        axis=0,
        quant_func=lambda values, block_amax: quantized(values, block_amax)[0],
    )
    sweep.collect(blocks)
    _, packed, block_scales = quantized(blocks, sweep.compute_amax())
    yield "weight", packed.reshape(x.shape[0], -1)
    yield "weight_scale", block_scales.reshape(x.shape[0], -1)


def fouroversix_nvfp4(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Its PyTorch backend, without the padding and the order of scales that the package's own
    kernels read.
    """
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4

    if not x.isfinite().all():
        return
    packed, block_scales, amax = quantize_to_fp4(x, use_blackwell_scale_layout=False)
    yield "values", packed
    yield "scale_factors", block_scales.reshape(x.shape[0], -1)
    yield "amax", amax.reshape(())


def quark_mxfp4_mse(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Its observer that takes the better of two scales."""
    from quark.torch.quantization.config import template
    from quark.torch.quantization.observer.observer import PerBlockMXDiffsObserver

    if not x.isfinite().all():
        return
    observer = PerBlockMXDiffsObserver(template.MXFP4WeightOnlyScheme().config.weight)
    observer(x.float())
    yield "scale", observer.calculate_qparams()[0]


def svdq_nvfp4() -> Tensors:
    """Random codes, scales, vectors and factors, and what its packer makes of each.  Its module is
    loaded by itself: the package imports Diffusers.
    """
    files = distribution("cache-dit").files or []
    (path,) = (file for file in files if str(file).endswith("svdquant/packing.py"))
    spec = spec_from_file_location("packing", path.locate())
    assert spec
    assert spec.loader
    spec.loader.exec_module(packing := module_from_spec(spec))
    packer, (rows, columns, rank) = packing.SVDQWeightPacker(bits=4), (256, 128, 32)
    chance = seeded(14608)
    codes = torch.randint(0, 16, (rows, columns), generator=chance, dtype=torch.int32)
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = every[torch.randint(1, 0x7F, (rows, columns // 16), generator=chance)]
    down, up, smooth, bias = (
        torch.randn(shape, generator=chance).bfloat16()
        for shape in ((rank, columns), (rows, rank), (columns,), (rows,))
    )
    given = {"codes": codes.to(torch.uint8), "scales": scales, "down": down, "up": up}
    vectors = {"smooth": smooth, "bias": bias}
    return {
        **{f"given/{name}": value for name, value in (given | vectors).items()},
        "qweight": packer.pack_weight(codes),
        "wscales": packer.pack_scale(scales.bfloat16().reshape(rows, 1, -1, 1), 16),
        "proj_down": packer.pack_lowrank_weight(down, down=True),
        "proj_up": packer.pack_lowrank_weight(up, down=False),
        "smooth_factor": packer.pack_scale(smooth.reshape(-1, 1), -1),
        "bias": packer.pack_scale(bias.reshape(-1, 1), -1),
    }


# file -> the package that makes it, as pip calls it, and the function that runs it on one case
MAKERS = {
    "modelopt_nvfp4": ("nvidia-modelopt", "0.47.0", modelopt_nvfp4),
    "torchao_mxfp4": ("torchao", "0.18.0", torchao_mxfp4),
    "ct_mxfp4": ("compressed-tensors", "0.20.0", ct_mxfp4),
    "modelopt_nvfp4_mse": ("nvidia-modelopt", "0.47.0", modelopt_nvfp4_mse),
    "fouroversix_nvfp4": ("fouroversix", "1.0.5", fouroversix_nvfp4),
    "quark_mxfp4_mse": ("amd-quark", "0.13", quark_mxfp4_mse),
}
NAMES = ("inputs", "svdq_nvfp4", *MAKERS)
APART = ("fouroversix_nvfp4", "svdq_nvfp4")  # in environments of their own


def made(name: str) -> tuple[Tensors, dict[str, str]] | str:
    """The tensors of one golden file and its metadata, or what has to be installed first."""
    if name == "inputs":
        return inputs(), {"torch": torch.__version__}
    if name == "svdq_nvfp4":
        try:
            return svdq_nvfp4(), {"cache-dit": version("cache-dit"), "torch": torch.__version__}
        except PackageNotFoundError:
            return "cache-dit is not installed; pip install --no-deps cache-dit==1.5.3"
    package, wanted, maker = MAKERS[name]
    try:
        metadata = {package: version(package), "torch": torch.__version__}
    except PackageNotFoundError:
        return f"{package} is not installed; pip install {package}=={wanted}"
    tensors = {}
    try:
        for case, x in inputs().items():
            tensors.update(
                {
                    f"{case}/{key}": value.detach().clone().contiguous()
                    for key, value in maker(x.clone())
                }
            )
    except ModuleNotFoundError as missing:
        return f"{package} needs {missing.name}, which is not installed; pip install {missing.name}"
    return tensors, metadata


def differences(found: Tensors, path: Path) -> Iterator[str]:
    """One line for each tensor that is not, byte for byte, what the file holds."""
    committed = load_file(path) if path.exists() else {}
    for key in sorted(found.keys() | committed.keys()):
        if key not in found or key not in committed:
            yield f"{key}: only in {'the file' if key in committed else 'the new tensors'}"
            continue
        new, old = found[key], committed[key]
        if (new.dtype, new.shape) != (old.dtype, old.shape):
            yield f"{key}: {old.dtype} {tuple(old.shape)} becomes {new.dtype} {tuple(new.shape)}"
        else:
            new, old = new.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)
            if changed := int((new != old).sum()):
                yield (
                    f"{key}: {changed} of {new.numel()} bytes differ, first at byte "
                    f"{int((new != old).nonzero()[0])}"
                )


def compare(name: str, write: bool) -> bool:
    """Prints what one golden file's maker says today; True where the file says the same."""
    path = HERE / f"{name}.safetensors"
    result = made(name)
    if isinstance(result, str):
        print(f"{name}: {result}")
        return False
    tensors, metadata = result
    lines = list(differences(tensors, path))
    print(
        f"{name}: {len(tensors)} tensors, {len(lines)} differ from the file; made with {metadata}"
    )
    if path.exists():
        with safe_open(path, "pt") as file:
            print(f"  the file was made with {file.metadata()}")
    print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
    if write and lines:
        save_file(tensors, path, metadata=metadata)
        print(f"  written: {path.name}")
    return not lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(NAMES)}; default: all but {', '.join(APART)}",
    )
    parser.add_argument("--write", action="store_true", help="replace the files that differ")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(NAMES)}")
    equal = [
        compare(name, arguments.write)
        for name in arguments.names or (name for name in NAMES if name not in APART)
    ]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
