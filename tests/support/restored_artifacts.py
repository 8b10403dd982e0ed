"""Artifacts turned back into weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import read_folder, run, values_of


def restored(folder: Path, out: Path) -> dict[str, np.ndarray]:
    """The values of an artifact by name, float64."""
    if not out.exists():
        assert run("dequantize", folder, "-o", out, "--dtype", "fp32", "-q").code == 0
    return {
        name: values_of(tensor) for name, tensor in read_folder(out).items() if "weight" in name
    }
