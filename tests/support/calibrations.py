"""Calibration files written by hand, with the safetensors package: never by fp4convert's own
writer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fp4convert.calibration.fingerprint import fingerprint_of, weights_of
from fp4convert.storage.source import Source


def notes_for(source: Source, **notes: str) -> dict[str, str]:
    """The metadata of a calibration of that source."""
    origin = {"repo": source.checkpoint.repo, "revision": source.checkpoint.revision}
    return {
        "format": "fp4convert-calibration",
        "version": "2",
        "source": json.dumps(origin),
        "fingerprint": fingerprint_of(source),
        "weights": weights_of(source),
        "samples": "4",
        "tokens": "64",
        "gram": "diag",
        "text": "by hand",
        "inputs": "{}",
        "unrouted": "[]",
        **notes,
    }


SHARES = ("90", "99", "99.9", "99.99")  # percent of tokens


def token_amax(x: np.ndarray) -> np.ndarray:
    """The largest |x| of so many percent of the rows: the nearest rank."""
    tops = np.sort(np.abs(x).max(1))
    return tops[[math.ceil(Fraction(share) * len(tops) / 100) - 1 for share in SHARES]]


def statistics_of(
    module: str, x: np.ndarray, block: int = 0, is_half: bool = False
) -> dict[str, np.ndarray]:
    """What a calibration says of a linear layer that was given the rows of `x`.

    block    of a Gram matrix along its diagonal; 0 for none, the number of columns for the whole
    is_half  that one in fp16, scaled by its mean diagonal
    """
    x = x.astype(np.float64)
    found = {
        "input_amax": np.float32(np.abs(x).max()),
        "input_sq_mean": (x * x).mean(0),
        "input_abs_mean": np.abs(x).mean(0),
        "input_channel_amax": np.abs(x).max(0),
        "input_token_amax": token_amax(x),
        "tokens": np.int64(len(x)),
    }
    if block:
        count = -(-x.shape[1] // block)
        padded = np.pad(x, ((0, 0), (0, count * block - x.shape[1])))
        parts = [padded[:, first : first + block] for first in range(0, count * block, block)]
        grams = np.stack([part.T @ part / len(x) for part in parts])
        if is_half:
            found["input_gram_scale"] = np.float32((x * x).mean())
            found["input_gram"] = (grams / found["input_gram_scale"]).astype(np.float16)
        else:
            found["input_gram"] = grams
    narrow = {np.dtype(np.float64): np.float32}
    return {
        f"{module}.{kind}": np.asarray(v, narrow.get(np.asarray(v).dtype))
        for kind, v in found.items()
    }


def write_calibration(
    path: Path, source: Source, statistics: Mapping[str, np.ndarray], **notes: str
) -> Path:
    """A calibration file of these tensors for that source; returns its path."""
    save_file(
        {name: np.asarray(array, order="C") for name, array in statistics.items()},
        path,
        notes_for(source, **notes),
    )
    return path
