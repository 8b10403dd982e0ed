"""A small model with scale groups in two shards, made to fit a size by the command; and what the
command measured of it.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
from checkpoints import (
    FIRST,
    SECOND,
    Tensor,
    run,
    weight,
)

MEASURED = ".fp4convert/measured"


def scaled(seed: int, rows: int, columns: int, spread: float) -> Tensor:
    """A matrix whose columns differ by that factor: what four bits lose grows with it."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((rows, columns)) * np.exp(
        draw.standard_normal((rows, columns)) * spread
    )
    return (
        "BF16",
        (rows, columns),
        (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    )


def shards(layers: int = 2) -> dict[str, dict[str, Tensor]]:
    """Two shards; scale groups lie in both."""
    found: dict[str, dict[str, Tensor]] = {
        FIRST: {"model.embed_tokens.weight": weight(1, 96, 64)},
        SECOND: {},
    }
    shapes = {
        "self_attn.q_proj": (32, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (64, 32),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }
    for number, (layer, (leaf, shape)) in enumerate(product(range(layers), shapes.items())):
        home = FIRST if number % 2 else SECOND
        found[home][f"model.layers.{layer}.{leaf}.weight"] = scaled(
            number, *shape, 0.3 * (number % 4)
        )
    return found


def quantize(source: object, out: Path, *options: object) -> dict:
    outcome = run("quantize", source, "--format", "nvfp4", *options, "-o", out, "--json", "-q")
    assert outcome.code == 0, outcome
    return outcome.json


def planned(source: object, out: Path, *options: object) -> dict:
    return quantize(source, out, *options, "--dry-run")


def nbytes_of(folder: Path) -> int:
    """Of every file of the artifact."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and ".fp4convert" not in path.parts
    ]
    return sum(path.stat().st_size for path in paths if path.name != "quantization_report.json")


def digits(folder: Path) -> dict[str, bytes]:
    paths = [
        path for path in folder.rglob("*") if path.is_file() and ".fp4convert" not in path.parts
    ]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name != "quantization_report.json"
    }


def losses(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for path in (folder / MEASURED).glob("*.json"):
        found |= json.loads(path.read_text())
    return found
