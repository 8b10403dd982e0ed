"""Inputs of linear layers for tests, and the calibration file that follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from calibrations import statistics_of, write_calibration
from checkpoints import read_folder

from fp4convert.storage.open import open_source

ALIASES = {
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "up_proj": "gate_proj",
}  # layers that are given what another is
Inputs = Mapping[str, np.ndarray]


def correlated(columns: int, tokens: int = 512, seed: int = 0) -> np.ndarray:
    """(tokens, columns) of inputs as models have them: columns that go together, and a few much
    larger ones.
    """
    chance = np.random.default_rng(seed)
    mixing = chance.standard_normal((columns, columns)) / np.sqrt(columns)
    return (
        chance.standard_normal((tokens, columns)) @ mixing * np.exp(chance.normal(0, 1, columns))
    ).astype(np.float32)


def inputs_of(source: Path) -> dict[str, np.ndarray]:
    """Inputs of every "_proj" that has its own."""
    shapes = {
        name.removesuffix(".weight"): shape
        for name, (_, shape, _) in read_folder(source).items()
        if "_proj.weight" in name
    }
    own = {
        module: shape
        for module, shape in shapes.items()
        if module.rpartition(".")[2] not in ALIASES
    }
    return {
        module: correlated(shape[1], seed=number)
        for number, (module, shape) in enumerate(sorted(own.items()))
    }


def aliases_of(source: Path) -> dict[str, str]:
    """Module -> the module that holds its statistics."""
    modules = [
        name.removesuffix(".weight") for name in read_folder(source) if "_proj.weight" in name
    ]
    pairs = ((module, *module.rpartition(".")[::2]) for module in modules)
    return {
        module: f"{parent}.{ALIASES[leaf]}" for module, parent, leaf in pairs if leaf in ALIASES
    }


def calibrate_white(source: Path, path: Path) -> Path:
    """A calibration file of inputs of unit variance, by which outputs lose what weights lose."""
    inputs = {
        module: np.sqrt(x.shape[1]) * np.eye(x.shape[1], dtype=np.float32)
        for module, x in inputs_of(source).items()
    }
    return path if path.exists() else calibrate(path, source, "diag", inputs)


def calibrate(
    path: Path,
    source: Path,
    gram: str = "full",
    inputs: Inputs | None = None,
    **changes: np.ndarray | None,
) -> Path:
    """A calibration file of the source; returns its path.

    gram     diag, block:N or full
    changes  tensors that are put in place of its own; None leaves one out
    """
    tensors: dict[str, np.ndarray | None] = {}
    for module, x in (inputs_of(source) if inputs is None else inputs).items():
        width = (
            {"diag": 0, "full": x.shape[1]}.get(gram)
            if ":" not in gram
            else int(gram.partition(":")[2])
        )
        tensors |= statistics_of(module, x, width)
    held = {name: array for name, array in {**tensors, **changes}.items() if array is not None}
    return write_calibration(
        path, open_source(str(source)), held, gram=gram, inputs=json.dumps(aliases_of(source))
    )
