"""What IQ4_NL does better than NVFP4 at the same 4.5 bits; the figures of docs/methods.md.

    python benchmarks/bench.py scale_search [SmolLM2|Whisper]

SmolLM2 off its grid, and Whisper's decoder; every linear layer in other values, no data: levels,
blocks, scales and the weight of the errors that a block's scale is searched by, one changed at a
time. A search over all scales near the block's largest magnitude; of 16-bit scales with the best
scale for the codes. Mean KL of WINDOWS windows of LENGTH tokens or SPOKEN sentences, paired.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.measure import ROOT, table
from quality import models
from quality.fidelity import LANGUAGE, SPEECH, SPOKEN, Loss

WINDOWS, LENGTH = 16, 512
FP4 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
# ggml's 16 levels (kvalues_iq4nl of ggml-common.h); the scale may be negative
NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
SHRINKS = torch.linspace(0.62, 1.3, 28)  # of 16-bit scales: where the largest lies, 1 at the end
NEAR = range(-6, 8)  # E4M3 scales around that of the largest magnitude, which may become 4, too


class Way(NamedTuple):
    """Levels, block length, whether scales are E4M3, the power of |x| that weighs errors."""

    levels: Tensor
    block: int
    is_e4m3: bool
    power: int


WAYS = {
    "NVFP4": Way(FP4, 16, True, 0),
    "NVFP4, errors weighted by abs(x)": Way(FP4, 16, True, 1),
    "NVFP4, errors weighted by x^2": Way(FP4, 16, True, 2),
    "IQ4_NL": Way(NL, 32, False, 2),
    "IQ4_NL, errors not weighted": Way(NL, 32, False, 0),
    "NVFP4 with 16-bit scales (5 bits)": Way(FP4, 16, False, 0),
    "NVFP4 with IQ4_NL's levels": Way(NL, 16, True, 0),
}


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The nearest level; of two as near, that of E2M1's even code."""
    if levels is not FP4:
        return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    size = x.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).copysign(x)


def in_levels(w: Tensor, amax: float, way: Way) -> Tensor:
    """The values that a matrix gets."""
    blocks = w.reshape(-1, way.block)
    weight = blocks.abs().pow(way.power)
    top = float(way.levels.abs().max())
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
        levels = nearest(blocks / tried, way.levels)
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


class Judge(NamedTuple):
    """A model, the linear layers that get other values, and log-probabilities of a sample."""

    layers: Mapping[str, torch.nn.Linear]
    samples: Sequence[Any]
    predict: Callable[[Any], Tensor]


def linears(model: torch.nn.Module, but: str) -> dict[str, torch.nn.Linear]:
    """All linear layers but the head."""
    named = dict(model.named_modules())
    return {n: x for n, x in named.items() if isinstance(x, torch.nn.Linear) and n != but}


def language(folder: Path) -> Judge:
    """SmolLM2 on windows of the fidelity page's text."""
    from transformers import AutoModelForCausalLM

    source = models.smollm2(folder / LANGUAGE)
    (folder / "texts").mkdir(exist_ok=True)
    text = models.write_text("judge", folder / "texts" / "judge.txt").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()

    def predict(window: Tensor) -> Tensor:
        return model(window[None]).logits[0, :-1].float().log_softmax(-1)

    windows = models.tokens(source, text, WINDOWS, LENGTH)
    return Judge(linears(model, "lm_head"), list(windows), predict)


def speech(folder: Path) -> Judge:
    """Whisper's decoder behind its encoder as it is, on the fidelity page's sentences."""
    import soundfile
    import soxr
    from transformers import AutoTokenizer, WhisperFeatureExtractor
    from transformers import WhisperForConditionalGeneration as Whisper

    source = models.whisper(folder / SPEECH)
    model: Any = Whisper.from_pretrained(source, dtype=torch.float32).eval()
    features, tokenizer = WhisperFeatureExtractor(), AutoTokenizer.from_pretrained(source)
    file = models.write_speech("judge", SPOKEN, folder / "judged")
    samples = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        sound, rate = soundfile.read(file.with_name(record["audio"]))
        heard = features(
            soxr.resample(sound, rate, 16000), sampling_rate=16000, return_tensors="pt"
        )
        hidden = model.model.encoder(heard.input_features).last_hidden_state
        words = tokenizer(record["text"], add_special_tokens=False)["input_ids"]
        samples.append((hidden, torch.tensor([[model.config.decoder_start_token_id, *words]])))

    def predict(sample: tuple[Tensor, Tensor]) -> Tensor:
        hidden, ids = sample
        decoded = model.model.decoder(input_ids=ids, encoder_hidden_states=hidden)
        return model.proj_out(decoded.last_hidden_state)[0].log_softmax(-1)

    return Judge(linears(model.model.decoder, ""), samples, predict)


def losses_of(judge: Judge) -> dict[str, Loss]:
    """What every way loses of the predictions."""
    weights = {name: layer.weight.data.float().clone() for name, layer in judge.layers.items()}
    original = [judge.predict(sample) for sample in judge.samples]
    losses: dict[str, Loss] = {}
    for name, way in WAYS.items():
        for layer, values in rounded(weights, way).items():
            judge.layers[layer].weight.data.copy_(values)
        ours = map(judge.predict, judge.samples)
        by = [
            float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(original, ours, strict=True)
        ]
        losses[name] = Loss(0.0, sum(by) / len(by), by, 0.0)
        print(f"{name}: {losses[name].kl:.4f}", file=sys.stderr, flush=True)
    return losses


def main(arguments: list[str]) -> int:
    """Print the table of each model."""
    folder = ROOT / "build" / "fidelity"
    makers = {LANGUAGE: language, SPEECH: speech}
    with torch.no_grad():
        for model in arguments or makers:
            losses = losses_of(makers[model](folder))
            rows = [
                [name, f"{loss.kl:.4f} ± {loss.error:.4f}", loss.beside(losses["NVFP4"])]
                for name, loss in losses.items()
            ]
            print(table([f"values of {model}", "KL", "minus NVFP4's"], rows), flush=True)
    return 0
