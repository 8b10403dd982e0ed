"""What stored four-bit weights are worth, by torch and the formats' definitions alone: no line of
the package is used.

E2M1 and the order of two codes in a byte: OCP Microscaling Formats v1.0, section 5.3.3, low nibble
first. Block scales are
decoded by torch's own dtypes: float8_e4m3fn, float8_e8m0fnu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpacked(packed: Any) -> Any:
    """Codes 0-15 of a matrix of bytes: element 2i in bits 0-3, element 2i+1 in bits 4-7."""
    import torch

    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def e8m0(stored: Any) -> Any:
    """Float32 of bytes: 2 ** (byte - 127), NaN of 255."""
    import torch

    return stored.view(torch.uint8).view(torch.float8_e8m0fnu).float()


def e4m3(stored: Any) -> Any:
    import torch

    return stored.view(torch.float8_e4m3fn).float()


def decoded(codes: Any, block_scales: Any) -> Any:
    """Float32 weight: every code times the float32 scale of its block; blocks run along the last
    axis.
    """
    import torch

    blocks = torch.tensor(E2M1)[codes.long()].unflatten(-1, (block_scales.shape[-1], -1))
    return (blocks * block_scales.unsqueeze(-1)).flatten(-2)


def mxfp4_weight(packed: Any, stored: Any) -> Any:
    return decoded(unpacked(packed), e8m0(stored))


def nvfp4_weight(packed: Any, stored: Any, global_scale: Any = 1.0) -> Any:
    """global_scale  a multiplier; the block's scale is rounded to float32 once, before it meets the
    codes
    """
    return decoded(unpacked(packed), e4m3(stored) * global_scale)


def mx_rounded(x: Any) -> Any:
    """Values in MXFP4 along the last axis; powers of two of amaxes that are rounded at 1.75, and
    codes by ml_dtypes.
    """
    import ml_dtypes
    import numpy as np
    import torch

    blocks = x.detach().double().numpy().reshape(-1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    steps = np.exp2(np.floor(np.log2(np.maximum(amax, 1e-30) * (8 / 7))) - 2)
    codes = np.clip(blocks / steps, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return torch.from_numpy(codes * steps).reshape(x.shape).to(x.dtype)


def quark_weights(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> float32 weight of every four-bit module, as Quark spells it; ModelOpt's NVFP4 has the
    same names.
    """
    weights = {}
    for name, stored in tensors.items():
        if name.endswith(".weight_scale"):
            weight = name.removesuffix("_scale")
            packed, global_scale = tensors[weight], tensors.get(f"{weight}_scale_2")
            is_mxfp4 = global_scale is None
            weights[weight] = (
                mxfp4_weight(packed, stored)
                if is_mxfp4
                else nvfp4_weight(packed, stored, global_scale)
            )
    return weights
