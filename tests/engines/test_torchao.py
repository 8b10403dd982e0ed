"""torchao: its tensor classes hold the artifacts' own bytes, and its order of block scales is that
of the plain dialect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    differing,
    fp4convert,
    fp4convert_json,
    is_quantized,
    make_llama,
    read_tensors,
)
from torch_formulas import mxfp4_weight, nvfp4_weight

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.*Enum subclass"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODULES = 14
FORMATS = ["nvfp4", "mxfp4"]
LAYOUTS = {"linear": (), "128x4": ("--scale-layout", "128x4")}
every_format = pytest.mark.parametrize("fmt", FORMATS)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> artifact of the command; NVFP4 in a dialect that stores the global scale as torchao
    does, a multiplier.
    """
    folder = tmp_path_factory.mktemp("artifacts")
    source = make_llama(folder / "source")
    dialects = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors"}
    for fmt, dialect in dialects.items():
        fp4convert(
            "quantize", source, "--format", fmt, "--dialect", dialect, "-o", folder / fmt, "-q"
        )
    return {fmt: folder / fmt for fmt in dialects}


@pytest.fixture(scope="module")
def restored(
    artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Format -> the artifact's weights, turned back by the command in float32."""
    folder = tmp_path_factory.mktemp("restored")
    for fmt, artifact in artifacts.items():
        fp4convert("dequantize", artifact, "-o", folder / fmt, "--dtype", "fp32", "-q")
    return {
        fmt: {n: t for n, t in read_tensors(folder / fmt).items() if is_quantized(n)}
        for fmt in artifacts
    }


@pytest.fixture(scope="module")
def plain(
    artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """(format, scale layout) -> the artifact in the plain dialect: codes in one file, scales in
    another.
    """
    folder = tmp_path_factory.mktemp("plain")
    made = {}
    for fmt, artifact in artifacts.items():
        for layout, options in LAYOUTS.items():
            made[fmt, layout] = folder / f"{fmt}-{layout}"
            fp4convert(
                "transcode", artifact, "-o", made[fmt, layout], "--dialect", "plain", *options, "-q"
            )
    return made


def _stored(artifact: Path, fmt: str) -> dict[str, tuple[Any, ...]]:
    """Module -> packed codes, block scales and, of NVFP4, the global scale."""
    tensors = read_tensors(artifact)
    packed = {"nvfp4": "weight", "mxfp4": "weight_packed"}[fmt]
    parts = {
        "nvfp4": (packed, "weight_scale", "weight_scale_2"),
        "mxfp4": (packed, "weight_scale"),
    }[fmt]
    modules = [
        name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")
    ]
    return {module: tuple(tensors[f"{module}.{part}"] for part in parts) for module in modules}


def _bytes(tensor: Any) -> Any:
    """A flat tensor of bytes, whatever the dtype was."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def _nvfp4(packed: Any, block_scales: Any, global_scale: Any, **options: Any) -> Any:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor(
        packed, block_scales, 16, torch.float32, per_tensor_scale=global_scale, **options
    )


def _mxfp4(packed: Any, block_scales: Any, is_swizzled: bool = False) -> Any:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    scales = block_scales.view(torch.float8_e8m0fnu)
    return MXTensor(
        packed,
        scales,
        torch.float4_e2m1fn_x2,
        32,
        torch.float32,
        KernelPreference.AUTO,
        None,
        is_swizzled,
    )


@every_format
def test_dequantize_equals_the_formula(artifacts: dict[str, Path], restored: Any, fmt: str) -> None:
    formula = {"nvfp4": nvfp4_weight, "mxfp4": mxfp4_weight}[fmt]
    expected = {
        f"{module}.weight": formula(*stored)
        for module, stored in _stored(artifacts[fmt], fmt).items()
    }
    assert len(expected) == MODULES
    assert differing(restored[fmt], expected) == []


@every_format
def test_tensor_class_dequantizes_to_the_same(
    artifacts: dict[str, Path], restored: Any, fmt: str
) -> None:
    """The class is given the artifact's bytes as they are."""
    import torch

    wrap = {"nvfp4": _nvfp4, "mxfp4": _mxfp4}[fmt]
    stored = _stored(artifacts[fmt], fmt)
    weights = {
        f"{module}.weight": wrap(*parts).dequantize(torch.float32)
        for module, parts in stored.items()
    }
    assert differing(weights, restored[fmt]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@every_format
def test_plain_dialect_holds_the_same_codes(
    artifacts: dict[str, Path], plain: Any, fmt: str, layout: str
) -> None:
    """model.safetensors has the codes under the weights' names, and every tensor that is not
    quantized.
    """
    from safetensors.torch import load_file

    stored = _stored(artifacts[fmt], fmt)
    expected = {f"{module}.weight": packed for module, (packed, *_) in stored.items()}
    four_bit = tuple(f"{module}." for module in stored)
    expected |= {
        name: tensor
        for name, tensor in read_tensors(artifacts[fmt]).items()
        if not name.startswith(four_bit)
    }
    assert differing(load_file(plain[fmt, layout] / "model.safetensors"), expected) == []


@every_format
def test_plain_dialect_holds_the_same_scales(
    artifacts: dict[str, Path], plain: Any, fmt: str
) -> None:
    import torch
    from safetensors.torch import load_file

    scales = load_file(plain[fmt, "linear"] / "scales.safetensors")
    expected = {}
    for module, (_, block_scales, *rest) in _stored(artifacts[fmt], fmt).items():
        dtype = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}[fmt]
        expected[f"{module}.block_scale"] = block_scales.view(dtype)
        expected |= {f"{module}.global_scale": global_scale for global_scale in rest}
    assert differing(scales, expected) == []


@every_format
def test_swizzled_scales_are_torchaos(artifacts: dict[str, Path], plain: Any, fmt: str) -> None:
    import torch
    from safetensors.torch import load_file
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = load_file(plain[fmt, "128x4"] / "scales.safetensors")
    stored = _stored(artifacts[fmt], fmt)
    assert any(block_scales.shape[0] % 128 for _, block_scales, *_ in stored.values()), (
        "nothing is padded"
    )
    for module, (_, block_scales, *rest) in stored.items():
        assert _bytes(scales[f"{module}.block_scale"]).equal(
            _bytes(to_blocked(block_scales.view(torch.uint8)))
        ), module
        for global_scale in rest:
            assert scales[f"{module}.global_scale"].equal(global_scale)


@every_format
def test_tensor_class_takes_the_swizzled_scales(plain: Any, restored: Any, fmt: str) -> None:
    """The whole way to a kernel: both files, read by safetensors, wrapped as scales that are
    already in the kernel's order.
    """
    import torch
    from safetensors.torch import load_file

    tensors, scales = (
        load_file(plain[fmt, "128x4"] / file)
        for file in ("model.safetensors", "scales.safetensors")
    )
    dtype = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}[fmt]
    weights = {}
    for name in restored[fmt]:
        module, packed = name.removesuffix(".weight"), tensors[name]
        rows, blocks = packed.shape[0], packed.shape[1] * 2 // {"nvfp4": 16, "mxfp4": 32}[fmt]
        padded = (-(-rows // 128) * 128, -(-blocks // 4) * 4)
        swizzled = _bytes(scales[f"{module}.block_scale"]).view(dtype).reshape(padded)
        if fmt == "nvfp4":
            wrapped = _nvfp4(
                packed, swizzled, scales[f"{module}.global_scale"], is_swizzled_scales=True
            )
        else:
            wrapped = _mxfp4(packed, swizzled, is_swizzled=True)
        weights[name] = wrapped.dequantize(torch.float32)
    assert differing(weights, restored[fmt]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@every_format
def test_inspect_knows_the_plain_dialect(plain: Any, fmt: str, layout: str) -> None:
    found = fp4convert_json("inspect", plain[fmt, layout])
    assert (found["format"], found["dialect"]) == (fmt, "plain")
    assert found["scale_layout"]["declared"] == layout
    assert found["healthy"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_format
def test_plain_dialect_dequantizes_to_the_same(
    plain: Any, restored: Any, fmt: str, layout: str, tmp_path: Path
) -> None:
    fp4convert(
        "dequantize", plain[fmt, layout], "-o", tmp_path / "restored", "--dtype", "fp32", "-q"
    )
    ours = {
        name: tensor
        for name, tensor in read_tensors(tmp_path / "restored").items()
        if is_quantized(name)
    }
    assert differing(ours, restored[fmt]) == []
