"""Rules mse and four-over-six beside the searches of packages that nobody here wrote: what those
made is in golden/.

Squared errors are counted in float64, of what each side stored.  Two scales whose errors are equal
are both right: each side
rounds on its way to them, and breaks ties, as it likes.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from paths import GOLDEN
from safetensors.torch import load_file
from scale_search import E4M3, GRID
from torch import Tensor

from fp4convert.numerics import codec
from fp4convert.numerics.formats import MXFP4, NVFP4

Doubles = NDArray[np.float64]
Blocks = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # of each: the scale's byte, its codes
DTYPES = ("bf16", "fp16", "fp32")
SIGNED = np.concatenate([GRID, -GRID]).astype(np.float64)
NOISE = 2.0**-20  # of sums of 16 or 32 squares in float32
BELOW_OUR_GLOBAL_SCALES = {"denorm_bf16", "denorm_fp32"}  # which end at 2^-126


@cache
def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def cases(name: str, but: set[str]) -> list[str]:
    """Those that the package was given, in every dtype."""
    found = sorted({key.partition("/")[0] for key in golden(name)} - but)
    assert {case.rpartition("_")[2] for case in found} == set(DTYPES)
    return found


def unpacked(scales: Tensor | memoryview, packed: Tensor | memoryview, size: int) -> Blocks:
    stored, pairs = (
        np.frombuffer(p if isinstance(p, memoryview) else p.view(torch.uint8).numpy(), np.uint8)
        for p in (scales, packed)
    )
    return stored, np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, size)


def spent(blocks: Doubles, made: Blocks, global_scale: float) -> Doubles:
    """The squared error of every block of 16."""
    stored, codes = made
    difference: Doubles = (
        blocks - SIGNED[codes] * (E4M3[stored].astype(np.float64) * global_scale)[:, None]
    )
    return np.square(difference).sum(axis=1)


def quantized(case: str, rule: str) -> tuple[Doubles, Blocks, float]:
    """The blocks of 16 of one case, what we make of them, and our global scale."""
    x = golden("inputs")[case].float().numpy()
    q = codec.quantize(x, NVFP4, rule)
    assert q.global_scale is not None
    return (
        x.reshape(-1, 16).astype(np.float64),
        unpacked(q.block_scales, q.packed, 16),
        q.global_scale,
    )


def test_no_scale_of_modelopts_sweep_is_better() -> None:
    """It tries all E4M3 scales, its candidates are ours: a block may differ where two are as good,
    and where it is all zeros.
    """
    seen: Counter[str] = Counter()
    for case in cases("modelopt_nvfp4_mse", BELOW_OUR_GLOBAL_SCALES):
        blocks, ours, global_scale = quantized(case, "mse")
        theirs = unpacked(
            *(golden("modelopt_nvfp4_mse")[f"{case}/{key}"] for key in ("weight_scale", "weight")),
            16,
        )
        own, other = spent(blocks, ours, global_scale), spent(blocks, theirs, global_scale)
        assert (own <= other * (1 + NOISE)).all(), case
        assert (other <= own * (1 + NOISE)).all(), case
        is_same, is_zero = ours[0] == theirs[0], (blocks == 0).all(axis=1)
        assert (ours[1] == theirs[1])[is_same].all(), case
        seen += Counter(np.where(is_same, "same", np.where(is_zero, "zeros", "tie")).tolist())
    assert seen == {"same": 4019, "zeros": 98, "tie": 21}


def test_where_modelopts_global_scale_is_subnormal_ours_loses_less() -> None:
    for case in BELOW_OUR_GLOBAL_SCALES:
        blocks, ours, global_scale = quantized(case, "mse")
        theirs = unpacked(
            *(golden("modelopt_nvfp4_mse")[f"{case}/{key}"] for key in ("weight_scale", "weight")),
            16,
        )
        assert (
            spent(blocks, ours, global_scale) < spent(blocks, theirs, np.abs(blocks).max() / 2688)
        ).all()


def test_four_over_six_as_its_authors_have_it() -> None:
    """Equal but for blocks that are named here, none of which their choice serves better.

    zeros    they store scale 0, we 1.0 (0x38)
    scale 0  what rounds to it is 0 with them, and 2^-9 with us, as in ModelOpt
    wrapped  a quotient beyond 7, under a subnormal scale, becomes 8 with them, whose bits are those
             of -0
    tie      four and six are as good, or a midpoint that their product with a reciprocal misses
    """
    seen: Counter[str] = Counter()
    made = golden("fouroversix_nvfp4")
    for case in cases(
        "fouroversix_nvfp4", BELOW_OUR_GLOBAL_SCALES | {f"allzero_{dtype}" for dtype in DTYPES}
    ):
        blocks, ours, global_scale = quantized(case, "four-over-six")
        theirs = unpacked(made[f"{case}/scale_factors"], made[f"{case}/values"], 16)
        assert global_scale == np.float32(made[f"{case}/amax"]) / np.float32(1536), case
        own, other = spent(blocks, ours, global_scale), spent(blocks, theirs, global_scale)
        assert (own <= other * (1 + NOISE)).all(), case
        for block, mine, its, codes, codes_of_theirs, gain in zip(
            blocks, ours[0], theirs[0], ours[1], theirs[1], other - own, strict=True
        ):
            if mine == its and (codes == codes_of_theirs).all():
                seen["same"] += 1
            elif not block.any():
                assert (mine, its) == (0x38, 0)
                seen["zeros"] += 1
            elif its == 0:
                assert mine == 1
                seen["scale 0"] += 1
            elif np.abs(block).max() / (float(E4M3[its]) * global_scale) > 7:
                assert its < 8
                seen["wrapped"] += 1
            else:
                assert gain <= NOISE * np.square(block).sum(), case
                seen["tie"] += 1
    assert seen == {"same": 3969, "zeros": 98, "scale 0": 46, "wrapped": 3, "tie": 22}


def nearest_error(blocks: Doubles, step: Doubles) -> Doubles:
    """The squared error of every block whose elements are the nearest E2M1 values of a step."""
    q = np.abs(blocks) / step[:, None]
    return np.square((q - GRID[np.abs(q[..., None] - GRID).argmin(axis=-1)]) * step[:, None]).sum(
        axis=1
    )


def test_no_scale_of_quarks_observer_is_better() -> None:
    """It tries ceil(log2 amax) - 2 and the one below,
    and takes the larger of two that are as good.
    """
    seen: Counter[str] = Counter()
    for case in cases("quark_mxfp4_mse", BELOW_OUR_GLOBAL_SCALES):
        x = golden("inputs")[case].float().numpy()
        blocks = x.reshape(-1, 32).astype(np.float64)
        ours = 2.0 ** (
            np.frombuffer(codec.quantize(x, MXFP4, "mse").block_scales, np.uint8).astype(np.float64)
            - 127
        )
        theirs = golden("quark_mxfp4_mse")[f"{case}/scale"].numpy().astype(np.float64).reshape(-1)
        is_tried = (np.abs(blocks).max(axis=1) > 0) & (theirs >= 2.0**-127) & (theirs <= 2.0**125)
        blocks, ours, theirs = blocks[is_tried], ours[is_tried], theirs[is_tried]
        own, other = nearest_error(blocks, ours), nearest_error(blocks, theirs)
        assert (own <= other * (1 + NOISE)).all(), case
        largest = 2.0 ** (np.ceil(np.log2(np.abs(blocks).max(axis=1))) - 2)
        is_known = (ours == largest) | (ours == largest / 2)
        assert (other <= own * (1 + NOISE))[is_known].all(), case
        assert (theirs == 2 * ours)[is_known & (theirs != ours)].all(), case
        seen += Counter(
            np.where(ours == theirs, "same", np.where(is_known, "tie", "not tried")).tolist()
        )
    assert seen == {"same": 1963, "tie": 53}
