"""Sum up what a linear layer is given, and merge such sums."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.statistics import TOKEN_SHARES

Arrays = dict[str, NDArray[np.generic]]


class Moments:
    """Sums over the tokens that a linear layer was given.

    gram  none, diag, block:N or full
    """

    def __init__(self, columns: int, gram: str, device: torch.device) -> None:
        self.columns, self.tokens = columns, 0
        self.magnitudes = torch.zeros(columns, dtype=torch.float64, device=device)
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)
        self.tops: list[torch.Tensor] = []  # of each token
        self.squares: torch.Tensor | None = None
        self.products: torch.Tensor | None = None
        if gram != "none":
            self.squares = torch.zeros(columns, dtype=torch.float64, device=device)
        self.width = block_width(gram, columns)
        if self.width:
            count = -(-columns // self.width)
            self.products = torch.zeros((count, self.width, self.width), device=device)

    def add(self, given: torch.Tensor) -> bool:
        """Add (tokens, columns); return False where a value is NaN or Inf."""
        x = given.detach().reshape(-1, self.columns).float()
        if not len(x):
            return True
        magnitudes = x.abs()
        self.tokens += len(x)
        torch.maximum(self.largest, magnitudes.amax(0), out=self.largest)
        self.tops.append(magnitudes.amax(1))
        self.magnitudes += magnitudes.sum(0)
        if self.squares is not None:
            self.squares += x.square().sum(0)
        if self.products is not None:
            self.multiply(x, x, self.products)
        return bool(torch.isfinite(self.largest).all())

    def multiply(self, a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the blocks along the diagonal of a^T b."""
        parts = [self._blocks(a)]
        parts.append(parts[0] if b is a else self._blocks(b))
        sums.baddbmm_(parts[0].transpose(1, 2), parts[1])

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Cut (tokens, columns) into (blocks, tokens, width), padded."""
        count = -(-self.columns // self.width)
        padded = torch.nn.functional.pad(x, (0, count * self.width - self.columns))
        return padded.reshape(len(x), count, self.width).transpose(0, 1)

    def size(self) -> tuple[float, NDArray[np.float64]]:
        """Return the largest magnitude, and the mean squares of columns."""
        assert self.squares is not None, "squares are kept"
        squares = (self.squares / max(1, self.tokens)).cpu().numpy()
        return float(self.largest.max()), squares

    def arrays(self, module: str) -> Arrays:
        """Return what a calibration file says of them, and end them.

        Nothing is added afterwards: a second copy of Gram matrices may not fit.
        """
        count = max(1, self.tokens)
        found = {
            "input_amax": self.largest.max(),
            "input_abs_mean": (self.magnitudes / count).float(),
            "input_channel_amax": self.largest,
            "input_token_amax": self._token_amax(),
            "tokens": torch.tensor(self.tokens),
        }
        if self.squares is not None:
            found["input_sq_mean"] = (self.squares / count).float()
        if self.products is not None:
            found["input_gram"] = self.products.div_(count)
        return {f"{module}.{kind}": value.cpu().numpy() for kind, value in found.items()}

    def _token_amax(self) -> torch.Tensor:
        """Return the largest |x| of so many percent of the tokens."""
        if not self.tops:
            return torch.zeros(len(TOKEN_SHARES))
        tops, _ = torch.cat(self.tops).sort()
        # in whole numbers: 99.9 % of 1,000 tokens are 999
        ranks = [-(-round(100 * share) * len(tops) // 10_000) - 1 for share in TOKEN_SHARES]
        return tops[ranks]


def block_width(gram: str, columns: int) -> int:
    """Return how wide the blocks of a Gram matrix are; 0 for none."""
    if gram == "full":
        return columns
    return min(columns, int(gram.partition(":")[2])) if gram.startswith("block:") else 0


def merge_statistics(first: Arrays, second: Arrays) -> Arrays:
    """Merge what a layer was given when it ran, and when it ran again.

    Largest values are the larger, means are weighted by tokens, counts are added.
    """
    found = {**first, **second}
    for name in first.keys() & second.keys():
        (owner, _, kind), a, b = name.rpartition("."), first[name], second[name]
        counter = {"expert_saliency": "expert_tokens"}.get(kind, "tokens")
        if kind in ("tokens", "expert_tokens"):
            found[name] = a + b  # type: ignore[operator]
        elif kind.endswith("amax"):
            found[name] = np.maximum(a, b)
        else:
            one, other = (np.asarray(v[f"{owner}.{counter}"], np.float64) for v in (first, second))
            mean = (a * one + b * other) / np.maximum(one + other, 1)  # type: ignore[operator]
            found[name] = mean.astype(a.dtype)
    return found
