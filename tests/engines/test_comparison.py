"""Exports of four packages beside each other: what compare says of each is what its own maker's
decoder says of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors_export import export_compressed
from mlx_export import export_mlx
from modelopt_export import FP4, export_modelopt, with_exceptions
from quark_export import export_quark
from tiny_models import fp4convert_json, make_llama, offline, read_tensors
from torch_formulas import quark_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
MODULES = 14


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with offline():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


def _by_modelopt(export: Path) -> dict[str, Any]:
    """Every weight, by ModelOpt's own NVFP4QTensor."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors = read_tensors(export)
    weights = {}
    for name, global_scale in tensors.items():
        if not name.endswith(".weight_scale_2"):
            continue
        packed = tensors[name.removesuffix("_scale_2")]
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        weights[name.removesuffix("_scale_2")] = NVFP4QTensor(
            shape, torch.float32, packed
        ).dequantize(
            torch.float32,
            scale=tensors[name.removesuffix("_2")],
            double_scale=global_scale,
            block_sizes={-1: 16},
        )
    return weights


def _by_mlx(export: Path) -> dict[str, Any]:
    import mlx.core as mx
    import numpy as np
    import torch

    tensors = mx.load(str(export / "model.safetensors"))
    weights = {}
    for name, scales in tensors.items():
        if name.endswith(".scales"):
            weight = f"{name.removesuffix('.scales')}.weight"
            values = mx.dequantize(tensors[weight], scales, group_size=32, bits=4, mode="mxfp4")
            weights[weight] = torch.from_numpy(np.array(values.astype(mx.float32)))
    return weights


@pytest.mark.slow
def test_exports_of_four_packages_are_what_their_makers_decode(
    source: Path, tmp_path: Path
) -> None:
    """ModelOpt's NVFP4, compressed-tensors' FP8 and int4, Quark's MXFP4 and MLX's."""
    quantizers = with_exceptions({"*weight_quantizer": FP4})
    fp8 = export_compressed(source, (("FP8", "Linear"),), tmp_path / "fp8")
    int4 = export_compressed(source, (("W4A16", "Linear"),), tmp_path / "int4")
    exports = {
        "a": export_modelopt(source, quantizers, tmp_path / "modelopt"),
        "b": tmp_path / "fp8",
        "c": tmp_path / "int4",
        "d": export_quark(source, "MXFP4WeightOnlyScheme", tmp_path / "quark"),
        "e": export_mlx(source, "mxfp4", tmp_path / "mlx", left="embed"),
    }
    decoded = {
        "a": _by_modelopt(exports["a"]),
        "b": fp8,
        "c": int4,
        "d": quark_weights(read_tensors(exports["d"])),
        "e": _by_mlx(exports["e"]),
    }
    page = tmp_path / "page.html"
    found = fp4convert_json("compare", *exports.values(), "--source", source, "--report", page)
    sides = found["artifacts"]
    assert [side["formats"] for side in sides.values()] == [
        ["nvfp4"],
        ["fp8"],
        ["int4"],
        ["mxfp4"],
        ["mxfp4"],
    ]
    assert page.is_file()
    before = read_tensors(source)
    for letter, weights in decoded.items():
        rows = {row["name"]: row["held"][letter] for row in found["tensors"]}
        measured = [name for name in rows if rows[name]["nmse"]]
        assert len(measured) >= MODULES
        assert set(measured) <= weights.keys()
        for name in measured:
            x, y = before[name].double(), weights[name].double()
            nmse = float(((x - y) ** 2).sum() / (x**2).sum())
            assert rows[name]["nmse"] == pytest.approx(nmse, rel=2e-2), (letter, name)
            assert rows[name]["sqnr_db"] == pytest.approx(-10 * math.log10(nmse), abs=0.1)
