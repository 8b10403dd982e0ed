"""What is measured of converted models: errors of weights, errors of outputs of linear layers, and
how far predictions move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

BATCH = 32


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Every matrix of a checkpoint, float32."""
    tensors = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return {
        name: tensor.float()
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.is_floating_point()
    }


def squared_error(values: Tensor, original: Tensor) -> float:
    return float((values.double() - original.double()).square().sum())


def sqnr_db(noise: float, signal: float) -> float:
    return 10 * math.log10(signal / noise)


def mean_sqnr_db(values: Mapping[str, Tensor], originals: Mapping[str, Tensor]) -> float:
    """Of the weights, a mean over tensors."""
    return statistics.mean(
        sqnr_db(squared_error(values[name], x), float(x.double().square().sum()))
        for name, x in originals.items()
    )


def grams(inputs: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Sum of x x^T over the inputs of every linear layer, float64."""
    found: dict[str, Tensor] = {}
    for name, x in inputs:
        flat = x.reshape(-1, x.shape[-1]).double()
        found[name] = found.get(name, 0) + flat.T @ flat
    return found


def output_sqnr_db(
    values: Mapping[str, Tensor], originals: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> float:
    """Of W x for the inputs that the original model has: a mean over layers."""
    found = []
    for name, x in originals.items():
        gram, error, weight = moments[name], (values[name] - x).double(), x.double()
        found.append(
            sqnr_db(float(((error @ gram) * error).sum()), float(((weight @ gram) * weight).sum()))
        )
    return statistics.mean(found)


def minilm_moments(folder: Path, texts: list[str], names: list[str]) -> dict[str, Tensor]:
    """`grams` of MiniLM's linear layers over sentences; padding is left out."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    seen: list[tuple[str, Tensor]] = []
    mask: Tensor | None = None

    def hook(name: str) -> Any:
        return lambda module, inputs: seen.append((name, _unpadded(inputs[0], mask)))

    for name in names:
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(hook(name))

    def inputs() -> Iterator[tuple[str, Tensor]]:
        nonlocal mask
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                texts[start : start + BATCH],
                padding=True,
                truncation=True,
                max_length=128,
                return_tensors="pt",
            )
            mask = batch["attention_mask"]
            with torch.no_grad():
                model(**batch)
            yield from seen
            seen.clear()

    return grams(inputs())


def _unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens of a batch; what has a row for each sentence, as a pooler's input, is whole
    already.
    """
    return x if mask is None or x.ndim == 2 else x[mask.bool()]


def log_probabilities(folder: Path, numbers: Tensor) -> Tensor:
    """(tokens, vocabulary) of a language model, float32: of each token that follows another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        parts = [model(input_ids=part).logits.log_softmax(-1) for part in numbers.split(BATCH // 4)]
    return torch.cat(parts)[:, :-1].flatten(0, 1)


def divergence(ours: Tensor, original: Tensor) -> float:
    """KL(original || ours), a mean over tokens, in nats; by torchmetrics."""
    from torchmetrics import KLDivergence

    return float(KLDivergence(log_prob=True)(original.double(), ours.double()))
