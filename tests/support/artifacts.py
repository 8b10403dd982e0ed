"""Artifacts as tests make and read them."""

from __future__ import annotations

import numpy as np
from checkpoints import (
    run,
    unless_given,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantize(source, out, *options):
    outcome = run(
        "quantize", source, "-o", out, "--json", *unless_given(options, "--format", "nvfp4")
    )
    assert outcome.code == 0, outcome.err
    return outcome.json


def artifact_values(tensors, module: str, dialect: str) -> np.ndarray:
    """What an engine computes from stored tensors, float64: of NVFP4 code * block scale *
    multiplier, or / divisor; of MXFP4, which has no global scale, code * 2^(byte - 127).
    """
    codes, last = (
        ("weight", "weight_scale_2")
        if dialect == "modelopt"
        else ("weight_packed", "weight_global_scale")
    )
    packed = np.frombuffer(tensors[f"{module}.{codes}"][2], np.uint8).reshape(
        tensors[f"{module}.{codes}"][1]
    )
    values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
    byte = np.frombuffer(tensors[f"{module}.weight_scale"][2], np.uint8).astype(int)
    if f"{module}.{last}" not in tensors:
        blocks = values.reshape(*byte.shape, 32) * 2.0 ** (byte[..., None] - 127)
        return blocks.reshape(values.shape)
    exponent, mantissa = byte >> 3, byte & 7
    scales = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    stored = struct_float(tensors[f"{module}.{last}"][2])
    steps = scales * stored if dialect == "modelopt" else scales / stored
    return (values.reshape(len(packed), -1, 16) * steps.reshape(len(packed), -1, 1)).reshape(
        values.shape
    )


def struct_float(data: bytes) -> float:
    return float(np.frombuffer(data, "<f4")[0])
