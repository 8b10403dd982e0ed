"""Diffusers' Nunchaku Lite: its own loader takes what dialect nunchaku writes, key by key, and its
own linear layer computes the model's outputs, with its CUDA kernels replaced by their meaning in
float64.  Where every byte belongs is told by cache-dit's packer, which other people wrote for them.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_models import fp4convert

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install diffusers pillow"
)
try:
    FILES = distribution("cache-dit").files or []
except PackageNotFoundError:
    pytest.skip(
        "cache-dit is not installed: pip install --no-deps cache-dit==1.5.3",
        allow_module_level=True,
    )
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.*Enum subclass"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (8, 8, 16),
}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
GRID = torch.cat([GRID, -GRID])


def packer() -> Any:
    """cache-dit's packer by itself: the package imports more than is installed."""
    (path,) = (file for file in FILES if str(file).endswith("svdquant/packing.py"))
    spec = spec_from_file_location("packing", path.locate())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SVDQWeightPacker(bits=4)


def places(shape: tuple[int, int], pack: Any) -> Any:
    """Where each stored value came from: what the packer makes of counted ones, digit by digit, for
    its floats hold small numbers alone.
    """
    count = torch.arange(shape[0] * shape[1]).reshape(shape)
    digits = [pack((count // 16**place % 16).bfloat16()).float().long() for place in range(5)]
    return sum(digit.reshape(-1) * 16**place for place, digit in enumerate(digits))


def unpacked(stored: Any, shape: tuple[int, int], pack: Any) -> Any:
    """The values in their ordinary places, as float64."""
    found = torch.empty(shape[0] * shape[1], dtype=torch.float64)
    found[places(shape, pack)] = stored.reshape(-1).double()
    return found.reshape(shape)


def unpacked_codes(stored: Any, shape: tuple[int, int], tool: Any) -> Any:
    """The values of codes, found by packing the bits of each code's own number."""
    count = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
    nibbles = [_nibbles(tool.pack_weight(count // 16**place % 16)) for place in range(5)]
    origin = sum(nibble * 16**place for place, nibble in enumerate(nibbles))
    found = torch.empty(shape[0] * shape[1], dtype=torch.float64)
    found[origin] = GRID[_nibbles(stored)]
    return found.reshape(shape)


def _nibbles(stored: Any) -> Any:
    whole = stored.reshape(-1).view(torch.uint8)
    return torch.stack([whole & 15, whole >> 4], dim=-1).reshape(-1).long()


class Kernels:
    """The two kernels by what they compute, without rounding of activations."""

    def __init__(self) -> None:
        self.tool = packer()
        self.inputs: Any = None

    def vector(self, stored: Any) -> Any:
        pack = lambda values: self.tool.pack_scale(values, -1)  # noqa: E731
        return unpacked(stored, (stored.numel(), 1), pack).reshape(-1)

    def quantize_w4a4_act_fuse_lora(self, *given: Any) -> None:
        x, _, _, down, along, smooth, _, is_nvfp4 = given
        assert is_nvfp4
        columns, rank = down.shape
        pack = lambda values: self.tool.pack_lowrank_weight(values, down=True)  # noqa: E731
        straight = unpacked(down, (rank, columns), pack)
        along[: len(x)] = (x.double() @ straight.T).to(along.dtype)
        self.inputs = x.double() / self.vector(smooth), x.double() @ straight.T

    def gemm_w4a4(self, *given: Any) -> None:
        codes, out, scales, up, bias = (given[place] for place in (1, 2, 5, 9, 15))
        alpha, channels = given[23], given[24]
        rows, columns = codes.shape[0], codes.shape[1] * 2
        values = unpacked_codes(codes, (rows, columns), self.tool)
        pack = lambda each: self.tool.pack_scale(each.reshape(rows, 1, -1, 1), 16)  # noqa: E731
        steps = unpacked(scales.float(), (rows, columns // 16), pack)
        w = values * steps.repeat_interleave(16, 1) * alpha.double()
        straight = unpacked(up, tuple(up.shape), lambda u: self.tool.pack_lowrank_weight(u, False))
        divided, along = self.inputs
        made = divided @ w.T * self.vector(channels) + along @ straight.T
        out[:] = (made + (0 if bias is None else self.vector(bias))).to(out.dtype)


@pytest.fixture
def loader(monkeypatch):
    """Diffusers' quantizer, with a package of kernels that needs no GPU."""
    stand_in, kernels = ModuleType("kernels"), Kernels()
    stand_in.__spec__ = ModuleSpec("kernels", None)
    stand_in.get_kernel = lambda *_, **__: SimpleNamespace(ops=kernels)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", stand_in)
    for place in ("diffusers.utils", "diffusers.utils.import_utils"):
        monkeypatch.setattr(f"{place}.is_kernels_available", lambda: True, raising=False)
        monkeypatch.setattr(f"{place}.is_kernels_version", lambda *_: True, raising=False)
    monkeypatch.setattr("diffusers.utils.constants.DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    from diffusers.quantizers.nunchaku import utils

    return utils


def inputs() -> dict[str, Any]:
    torch.manual_seed(1)
    kinds = {"dtype": torch.bfloat16}
    return {
        "hidden_states": torch.randn(1, 16, 16, **kinds),
        "encoder_hidden_states": torch.randn(1, 4, 32, **kinds),
        "pooled_projections": torch.randn(1, 32, **kinds),
        "timestep": torch.tensor([0.5], **kinds),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(4, 3),
    }


def test_its_loader_takes_every_tensor_and_its_layers_give_the_models_outputs(tmp_path, loader):
    from diffusers.quantizers.quantization_config import NunchakuLiteQuantizationConfig
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**FLUX).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Diffusers makes zeros of some
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "m")
    options = ("--format", "nvfp4", "--dialect", "nunchaku")
    fp4convert("quantize", tmp_path / "m", *options, "-o", tmp_path / "q", "-q")
    fp4convert("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "fp32", "-q")

    record = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    config = NunchakuLiteQuantizationConfig.from_dict(record)
    (file,) = (tmp_path / "q").glob("*.safetensors")
    stored = load_file(file)
    packed = diffusers.FluxTransformer2DModel(**FLUX).to(torch.bfloat16)
    count = loader.replace_with_nunchaku_linear(packed, config.to_dict(), config.compute_dtype)
    assert count == len(config.svdq_w4a4["targets"]) >= 12
    loader.check_strict_state_dict_match(packed, stored)
    packed.load_state_dict(stored, strict=True, assign=True)

    with torch.no_grad():
        original, found = (each(**inputs()).sample.float() for each in (model, packed))
        restored = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "d").float()
        restored.to(torch.bfloat16)
        dequantized = restored(**inputs()).sample.float()

    def distance(one: Any, other: Any) -> float:
        return float((one - other).norm() / other.norm())

    assert distance(found, original) < 0.1
    # As `dequantize` reads them, but for what bf16 rounds off between.
    assert distance(found, dequantized) < 0.02


def test_each_layer_computes_what_dequantize_says(tmp_path, loader):
    """One linear layer by itself, where nothing is rounded between."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(2)
    weight, bias = torch.randn(256, 384) * torch.rand(384).exp(), torch.randn(256)
    (tmp_path / "m").mkdir()
    save_file(
        {"a.weight": weight.bfloat16(), "a.bias": bias.bfloat16()},
        tmp_path / "m" / "model.safetensors",
    )
    (tmp_path / "m" / "config.json").write_text("{}")
    options = ("--format", "nvfp4", "--dialect", "nunchaku")
    fp4convert("quantize", tmp_path / "m", *options, "-o", tmp_path / "q", "-q")
    fp4convert("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "fp32", "-q")
    stored, restored = (load_file(tmp_path / f / "model.safetensors") for f in "qd")
    layer = loader.SVDQW4A4Linear(
        384, 256, precision="nvfp4", group_size=16, torch_dtype=torch.float64
    )
    layer.load_state_dict(
        {name.removeprefix("a."): part for name, part in stored.items()}, assign=True
    )
    x = torch.randn(5, 384, dtype=torch.float64)
    expected = x @ restored["a.weight"].double().T + restored["a.bias"].double()
    assert torch.equal(restored["a.bias"], bias.bfloat16().float())
    assert torch.allclose(layer(x), expected, rtol=1e-6, atol=1e-5)
    error = (restored["a.weight"] - weight).norm() / weight.norm()
    assert 0.02 < error < 0.1
