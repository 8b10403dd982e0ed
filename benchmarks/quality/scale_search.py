"""What IQ4_NL does better than NVFP4 at the same 4.5 bits; the figures of docs/methods.md.

    python benchmarks/bench.py scale_search

SmolLM2 off its grid, every linear layer in other values, no data: levels, blocks, scales and the
weight of the errors that a block's scale is searched by, one changed at a time. A search over all
scales near the block's largest magnitude; of 16-bit scales with the best scale for the codes.
Mean KL of WINDOWS windows of LENGTH tokens, paired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from harness.measure import ROOT, table
from quality import models
from quality.fidelity import LANGUAGE, Loss

WINDOWS, LENGTH = 16, 512
FP4 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
# ggml's 16 levels (kvalues_iq4nl of ggml-common.h); the scale may be negative
NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
SHRINKS = torch.linspace(0.75, 1.5, 26)  # of 16-bit scales
NEAR = range(-6, 4)  # E4M3 scales around that of the largest magnitude


class Way(NamedTuple):
    """Levels, block length, whether scales are E4M3, and whether errors are weighted by x^2."""

    levels: Tensor
    block: int
    is_e4m3: bool
    is_weighted: bool


WAYS = {
    "NVFP4": Way(FP4, 16, True, False),
    "NVFP4, errors weighted by x^2": Way(FP4, 16, True, True),
    "IQ4_NL": Way(NL, 32, False, True),
    "IQ4_NL, errors not weighted": Way(NL, 32, False, False),
    "NVFP4 with 16-bit scales (5 bits)": Way(FP4, 16, False, False),
    "NVFP4 with IQ4_NL's levels": Way(NL, 16, True, False),
}


def in_levels(w: Tensor, amax: float, way: Way) -> Tensor:
    """The values that a matrix gets."""
    blocks = w.reshape(-1, way.block)
    weight = blocks.square() if way.is_weighted else torch.ones_like(blocks)
    middles, top = (way.levels[1:] + way.levels[:-1]) / 2, float(way.levels.abs().max())
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    signs = (1.0,) if way.levels is FP4 else (1.0, -1.0)
    if way.is_e4m3:
        step = amax / (448 * top)
        at = torch.bucketize(largest.abs() / (top * step), (E4M3[1:] + E4M3[:-1]) / 2)
        scales = [s * step * E4M3[(at + near).clamp(0, 125)] for near in NEAR for s in signs]
    else:  # the block's largest becomes the end of the levels, or somewhat more or less
        scales = [largest / (float(way.levels[0]) * shrink) for shrink in SHRINKS]
    least, best = torch.full_like(largest, torch.inf), torch.zeros_like(blocks)
    for tried in scales:
        levels = way.levels[torch.bucketize(blocks / tried, middles)]
        scale = tried
        if not way.is_e4m3:
            power = (weight * levels.square()).sum(1, keepdim=True).clamp(min=1e-38)
            scale = ((weight * levels * blocks).sum(1, keepdim=True) / power).half().float()
        error = (weight * (blocks - scale * levels).square()).sum(1, keepdim=True)
        best = torch.where(error < least, scale * levels, best)
        least = torch.minimum(error, least)
    return best.reshape(w.shape)


def rounded(weights: Mapping[str, Tensor], way: Way) -> dict[str, Tensor]:
    """All matrices; q, k and v, and gate and up share the largest magnitude."""
    largest: dict[str, float] = {}
    groups = {name: re.sub(r"[qkv](?=_proj)|gate|up", "#", name) for name in weights}
    for name, group in groups.items():
        largest[group] = max(largest.get(group, 0.0), float(weights[name].abs().max()))
    return {name: in_levels(w, largest[groups[name]], way) for name, w in weights.items()}


def main(_arguments: list[str]) -> int:
    """Print the table."""
    from transformers import AutoModelForCausalLM

    folder = ROOT / "build" / "fidelity"
    source = models.smollm2(folder / LANGUAGE)
    (folder / "texts").mkdir(exist_ok=True)
    text = models.write_text("judge", folder / "texts" / "judge.txt").read_text(encoding="utf-8")
    windows = models.tokens(source, text, WINDOWS, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }
    weights = {name: layer.weight.data.float() for name, layer in layers.items()}
    losses: dict[str, Loss] = {}
    with torch.no_grad():

        def predictions(window: Tensor) -> Tensor:
            return model(window[None]).logits[0, :-1].float().log_softmax(-1)

        original = [predictions(window) for window in windows]
        for name, way in WAYS.items():
            for layer, values in rounded(weights, way).items():
                layers[layer].weight.data.copy_(values)
            ours = [predictions(window) for window in windows]
            by = [
                float((p.exp() * (p - q)).sum(-1).mean())
                for p, q in zip(original, ours, strict=True)
            ]
            losses[name] = Loss(0.0, sum(by) / len(by), by, 0.0)
    first = losses["NVFP4"]
    rows = [
        [name, f"{loss.kl:.4f} ± {loss.error:.4f}", loss.beside(first)]
        for name, loss in losses.items()
    ]
    print(table(["values", "KL", "minus NVFP4's"], rows))
    return 0
