"""Find the tokens that a forward predicts; compare two predictions.

One source for evaluate and for calibrate --sensitivity.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fp4convert.calibration.model import Skeleton
from fp4convert.calibration.multimodal import placeholders_of
from fp4convert.calibration.samples import Batch


def predictions_of(
    made: Any, batch: Batch, skeleton: Skeleton
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a forward, and the tokens that they predict.

    Returns  (samples, tokens, vocabulary) and (samples, tokens)
    """
    logits, ids = made.logits, torch.from_numpy(batch.ids)
    if not skeleton.model.config.is_encoder_decoder:
        logits, ids = logits[:, :-1], ids[:, 1:]  # each says what the next token is
    if batch.inputs:  # where an image is put in, no token is predicted
        placeholders = torch.tensor(placeholders_of(skeleton.model), dtype=ids.dtype)
        is_text = ~torch.isin(ids[0], placeholders)
        logits, ids = logits[:, is_text.to(logits.device)], ids[:, is_text]
    return logits, ids


def kl_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the KL of each token of two log probabilities, in nats.

    A token that the model rules out (-inf) adds nothing.

    p, q  (tokens, vocabulary) float64: of the model, and of what is compared with it
    """
    return torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1)
