"""safetensors and torch read every file of an artifact: names, dtypes, shapes, alignment and bytes.

What the engines make of the numbers: test_transformers.py and test_modelopt.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    differing,
    fp4convert,
    is_quantized,
    make_llama,
    make_mixtral,
    make_qwen3_moe,
    make_scattered_llama,
    offline,
    read_tensors,
)

pytestmark = pytest.mark.engine

MAKERS: dict[str, Callable[[Path], Path]] = {
    "bf16": make_llama,
    "fp16": partial(make_llama, dtype="fp16"),
    "fp32": partial(make_llama, dtype="fp32"),
    "tied": partial(make_llama, is_tied=True),
    "scattered": make_scattered_llama,
    "mixtral": make_mixtral,
    "qwen3-moe": make_qwen3_moe,
}
# (format, dialect) -> what stands for a weight of (rows, columns): suffix, torch dtype, shape
TENSORS: dict[tuple[str, str], Callable[[int, int], list[tuple[str, str, tuple[int, ...]]]]] = {
    ("nvfp4", "compressed-tensors"): lambda rows, columns: [
        ("_packed", "uint8", (rows, columns // 2)),
        ("_scale", "float8_e4m3fn", (rows, columns // 16)),
        ("_global_scale", "float32", (1,)),
    ],
    ("mxfp4", "compressed-tensors"): lambda rows, columns: [
        ("_packed", "uint8", (rows, columns // 2)),
        ("_scale", "uint8", (rows, columns // 32)),
    ],
    ("nvfp4", "modelopt"): lambda rows, columns: [
        ("", "uint8", (rows, columns // 2)),
        ("_scale", "float8_e4m3fn", (rows, columns // 16)),
        ("_scale_2", "float32", ()),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with offline():
        yield


@pytest.fixture(scope="module", params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.sweep(7)
@pytest.mark.parametrize(("fmt", "dialect"), TENSORS)
def test_safetensors_and_torch_read_every_file(
    source: Path, tmp_path: Path, fmt: str, dialect: str
) -> None:
    artifact = tmp_path / "artifact"
    fp4convert("quantize", source, "--format", fmt, "--dialect", dialect, "-o", artifact, "-q")
    tensors = read_tensors(artifact)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert found == _expected(read_tensors(source), fmt, dialect)
    assert all(tensor.float().isfinite().all() for tensor in tensors.values())
    files = sorted(artifact.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(
        file.name for file in source.glob("*.safetensors")
    )
    for file in files:
        _check_safe_open(file, tensors)
        _check_layout(file, tensors)


def _expected(
    source: dict[str, Any], fmt: str, dialect: str
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Name -> dtype and shape that the engines ask for."""
    import torch

    expected: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for name, tensor in source.items():
        if is_quantized(name):
            parts = TENSORS[fmt, dialect](*tensor.shape)
            expected |= {
                f"{name}{suffix}": (getattr(torch, dtype), shape) for suffix, dtype, shape in parts
            }
        else:
            expected[name] = (tensor.dtype, tuple(tensor.shape))
    return expected


def _check_safe_open(file: Path, tensors: dict[str, Any]) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
        held = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - it is not a dict
    assert held
    assert differing(held, {name: tensors[name] for name in held}) == []


def _check_layout(file: Path, tensors: dict[str, Any]) -> None:
    """From the raw bytes: every tensor begins where its dtype may,
    and the last one ends the file.
    """
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0
    header = json.loads(raw[8:start])
    del header["__metadata__"]
    ends = []
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert (start + first) % tensors[name].itemsize == 0, name
        assert last - first == tensors[name].nbytes, name
        ends.append(start + last)
    assert max(ends) == len(raw)
