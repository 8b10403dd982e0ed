"""Bytes that other packages made, by case."""

from __future__ import annotations

from functools import cache

import torch
from paths import GOLDEN
from safetensors.torch import load_file

NOT_FINITE = {f"naninf_{dtype}": "NaN and Inf are refused" for dtype in ("bf16", "fp16", "fp32")}


ZERO = "ModelOpt divides 0 by 0: NaN scales, a global scale of 0; we store 1.0 and 1.0"


TINY = (
    "amax < 2688 * 2^-126: ModelOpt's global scale is subnormal, with few bits left; ours "
    "stays 2^-126"
)


SUBNORMAL_STEP = "torchao divides a block of scale byte 0, which stands for 2^-127, by 2^-126"


LARGEST = "byte 253 would decode to values beyond float32; we clamp to 252"


HALF = "compressed-tensors works in fp16, where steps below 2^-24 become 0, and those 1"


RULES = ("floor", "even", "ceil")  # that torchao has


# package -> case, or case/rule, that is not equal -> why
EXCLUDED: dict[str, dict[str, str]] = {
    "modelopt": {
        **NOT_FINITE,
        **dict.fromkeys(("allzero_bf16", "allzero_fp16", "allzero_fp32"), ZERO),
        **dict.fromkeys(("denorm_bf16", "denorm_fp32"), TINY),
    },
    "torchao": {
        **{f"{case}/{rule}": reason for case, reason in NOT_FINITE.items() for rule in RULES},
        **{
            f"{case}_{dtype}/{rule}": SUBNORMAL_STEP
            for case in ("denorm", "edges")
            for dtype in ("bf16", "fp32")
            for rule in RULES
        },
        **{
            f"hugeone_{dtype}/{rule}": LARGEST
            for dtype in ("bf16", "fp32")
            for rule in ("even", "ceil")
        },
    },
    "compressed-tensors": {
        **NOT_FINITE,
        **dict.fromkeys(("hugeone_bf16", "hugeone_fp32"), LARGEST),
        **dict.fromkeys(
            ("allzero_fp16", "edges_fp16", "hugeone_fp16", "sfties_fp16", "ties_fp16"), HALF
        ),
    },
}


@cache
def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


CASES = sorted(golden("inputs"))
