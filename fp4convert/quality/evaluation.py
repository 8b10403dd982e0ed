"""Judge how much an artifact's answers differ from its source's.

calibration/side_by_side.py runs both models and measures the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp4convert.errors import Finding, InputError
from fp4convert.quality.checks import is_healthy

if TYPE_CHECKING:
    from fp4convert.calibration.side_by_side import Measured

MOST_NATS = math.log(np.finfo(np.float64).max)  # of which exp is a number
NO_GATE = "no verdict: no gate was set (--max-kl, --min-top1, --max-ppl-ratio)"


class EvaluationGate(NamedTuple):
    """The limits of `evaluate`; None for no limit.

    max_kl         of the mean KL divergence, in nats
    min_top1       of the share of tokens with the same likeliest one
    max_ppl_ratio  of the artifact's perplexity over the source's
    """

    max_kl: float | None = None
    min_top1: float | None = None
    max_ppl_ratio: float | None = None

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in self)

    def check(self) -> None:
        """Raise InputError for a limit that is none."""
        for option, value, most in (
            ("--max-kl", self.max_kl, math.inf),
            ("--min-top1", self.min_top1, 1.0),
            ("--max-ppl-ratio", self.max_ppl_ratio, math.inf),
        ):
            if value is not None and not (0 <= value <= most and math.isfinite(value)):
                expected = "a number of 0 or more" if most == math.inf else "a number from 0 to 1"
                detail = f"{option} {value:g} is no limit; expected {expected}"
                raise InputError("bad-gate", detail, f"Correct it, or leave {option} out.")


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """The document of `evaluate --json`.

    tokens   predicted tokens, over which all figures are
    windows  pieces of text that are read separately
    kl       KL(source || artifact) of a token in nats: mean, p999 (the 99.9th percentile), max
    top1     share of tokens with the same likeliest prediction
    ppl      perplexity of source and artifact
    activations, kv_cache  of the artifact's run: 16 or 4; "fp8", "nvfp4", None
    by_layer mean KL of one layer of the artifact alone, and with all layers before it
    passed   None without a gate
    """

    tokens: int
    windows: int
    kl: dict[str, float]
    top1: float
    ppl: dict[str, float]
    activations: int
    kv_cache: str | None
    by_layer: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    passed: bool | None

    def __repr__(self) -> str:
        """Say the verdict in a line, for the end of a notebook's cell."""
        words = f"KL {self.kl['mean']:.4g} nats, top-1 {100 * self.top1:.2f} %"
        words += f", perplexity {self.ppl['source']:.4g} -> {self.ppl['artifact']:.4g}"
        verdict = {None: "without a gate", True: "passed", False: "failed"}[self.passed]
        return f"<Evaluated {verdict}: {words}, {self.tokens} tokens>"

    def as_json(self) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


def evaluate(measured: Measured, gate: EvaluationGate) -> Evaluated:
    """Summarize the measurement, and check it against the gate."""
    kl = {
        "mean": float(measured.kl.mean()),
        "p999": float(np.quantile(measured.kl, 0.999)),
        "max": float(measured.kl.max()),
    }
    top1 = float(measured.agrees.mean())
    means = [float(losses.mean()) for losses in measured.losses]
    ppl = {"source": _perplexity(means[0]), "artifact": _perplexity(means[1])}
    findings = tuple(_check(kl["mean"], top1, _perplexity(means[1] - means[0]), gate))
    return Evaluated(
        tokens=len(measured.kl),
        windows=measured.windows,
        kl=kl,
        top1=top1,
        ppl=ppl,
        by_layer=tuple(row._asdict() for row in measured.by_layer),
        findings=findings,
        passed=is_healthy(findings) if gate.is_set else None,
        activations=measured.activations,
        kv_cache=measured.kv_cache,
    )


def _perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats, at most the largest float."""
    return math.exp(min(loss, MOST_NATS))


def _check(kl: float, top1: float, ratio: float, gate: EvaluationGate) -> Iterator[Finding]:
    """Check the totals against the limits."""
    if gate.max_kl is not None and kl > gate.max_kl:
        detail = f"mean KL {kl:.4g} nats, expected at most {gate.max_kl:g}"
        yield Finding("error", "kl-high", None, detail)
    if gate.min_top1 is not None and top1 < gate.min_top1:
        detail = f"the likeliest token is the same for {top1:.4f} of the tokens"
        yield Finding("error", "top1-low", None, f"{detail}, expected at least {gate.min_top1:g}")
    if gate.max_ppl_ratio is not None and ratio > gate.max_ppl_ratio:
        detail = f"perplexity is {ratio:.4f} times the source's"
        yield Finding(
            "error", "ppl-high", None, f"{detail}, expected at most {gate.max_ppl_ratio:g} times"
        )
