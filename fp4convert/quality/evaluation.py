"""Judge how much an artifact's answers differ from its source's.

calibration/side_by_side.py runs both models and measures the difference.  A grade sets it beside
what is usual for the format, the method and the size: configs/usual_losses.toml.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact, is_artifact, read_artifact, read_clues
from fp4convert.checkpoint.missing_parts import GENERATING, class_of
from fp4convert.errors import Finding, InputError
from fp4convert.numerics.formats import GPTQ, IMPORTANCE, NVFP4, RTN
from fp4convert.quality.checks import is_healthy
from fp4convert.recipes.options import one_of
from fp4convert.recipes.recipe import Target
from fp4convert.storage.gguf import BLOCK_TYPES, shape_in_weights
from fp4convert.storage.json_text import parse_json_object, read_text_file
from fp4convert.storage.source import Source

if TYPE_CHECKING:
    from fp4convert.calibration.side_by_side import Measured

MOST_NATS = math.log(np.finfo(np.float64).max)  # of which exp is a number
NO_GATE = "no verdict: no gate was set (--max-kl, --min-top1, --max-ppl-ratio, --baseline)"
CONFIDENT = 0.9  # least probability of the likeliest token, to be sure of it
AS_USUAL, WORSE, DAMAGED = "as usual", "worse than usual", "damaged"
NO_FIGURE = "no figure to compare with"
LIMITS = {"usual": 1.3, "damage": 3.0}  # words of --max-kl: times the usual KL
MOST_TOP1_LOST = 0.1  # below the usual share of tokens
MOST_BEYOND = 2  # times smaller than the smallest model with a figure, or larger than the largest
MOST_WORSE, SURE_ERRORS = 1.05, 2  # times a baseline's KL; standard errors of the difference
WHOLE = ("F", "BF", "I8")  # begin the dtypes of one weight an element; others are four-bit codes


class UsualLoss(NamedTuple):
    """What artifacts of one kind and size lose: a row of usual_losses.toml.

    method  of the artifact's record; "importance" for rtn by that rule
    top1    share of tokens with the same likeliest one
    source  of the figures, or of both rows that they lie between
    """

    format: str
    activations: int
    method: str
    parameters: int
    kl: float
    top1: float
    source: str


class UsualSqnr(NamedTuple):
    """What weights of a format usually keep, in dB: another row of that file.

    by   the scale rule, or gptq
    low  of one layer: below it one looks closer
    """

    format: str
    by: str
    db: float
    low: float

    @property
    def words(self) -> str:
        return (
            f"{self.format} by {self.by} usually has {self.db:g} dB; below {self.low:g} dB is low"
        )

    def grade(self, mean: float) -> str:
        """Set the mean of an artifact's layers beside what is usual."""
        high = 2 * self.db - self.low
        word = "low" if mean < self.low else "usual" if mean <= high else "more than usual"
        return f"{word} for {self.format.upper()} by {self.by} ({self.db:g})"


@cache
def usual_losses() -> tuple[UsualLoss, ...]:
    """Read the losses of predictions in configs/usual_losses.toml."""
    return tuple(UsualLoss(**row) for row in _read_usual()["row"])


def _read_usual() -> dict[str, Any]:
    file = files("fp4convert").joinpath("configs", "usual_losses.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def find_usual_sqnr(artifact: Artifact) -> UsualSqnr | None:
    """Find the usual SQNR of our artifact in one format, if it is known."""
    formats = {one.form.format.name for one in artifact.packed.values()}
    method, rule = (artifact.record.get(key) for key in ("method", "scale_rule"))
    by = method if method == GPTQ else rule
    rows = (UsualSqnr(**row) for row in _read_usual()["sqnr"])
    return next((row for row in rows if formats == {row.format} and row.by == by), None)


def find_usual(artifact: Source, source: Source) -> UsualLoss | None:
    """Find what is usual for an artifact; None if nobody has a figure.

    Another maker's is taken for rounded to nearest.
    """
    if not is_artifact(artifact, read_clues(artifact)):
        return None
    opened = read_artifact(artifact, artifact.name)
    kinds = {(one.form.format.name, one.form.activations) for one in opened.packed.values()}
    if len(kinds) != 1 or opened.forms[0].kv_cache == NVFP4.name:
        return None
    method = str(opened.record.get("method") or RTN)
    if method == RTN and opened.record.get("scale_rule") == IMPORTANCE:
        method = IMPORTANCE
    return interpolate((*kinds.pop(), method), count_parameters(source))


def forecast(target: Target, source: Source) -> dict[str, Any] | None:
    """Return what the result of a plan usually loses, and by GPTQ.

    Returns  kl, top1 and source of the figures, with_text the same; None for models that write no
             text, and where nobody has a figure
    """
    if not class_of(source.checkpoint.config).endswith(GENERATING):
        return None
    kind, parameters = (target.format, target.activations), count_parameters(source)
    method = IMPORTANCE if target.scale_rule == IMPORTANCE else RTN
    usual = interpolate((*kind, GPTQ if target.method == GPTQ else method), parameters)
    best = None if target.method == GPTQ else interpolate((*kind, GPTQ), parameters)
    figures = [
        one and {"kl": one.kl, "top1": one.top1, "source": one.source} for one in (usual, best)
    ]
    return {**figures[0], "with_text": figures[1]} if figures[0] else None


def interpolate(kind: tuple[str, int, str], parameters: int) -> UsualLoss | None:
    """Return the loss between the rows of a kind, on log(parameters).

    kind     format, activations, method
    Returns  the nearest row's, a little outside of them; None farther out, and without rows
    Formula  log(kl), and top1, are linear in log(parameters)
    """
    rows = sorted((row for row in usual_losses() if row[:3] == kind), key=lambda r: r.parameters)
    sizes = [row.parameters for row in rows]
    if not rows or not sizes[0] <= parameters * MOST_BEYOND <= sizes[-1] * MOST_BEYOND**2:
        return None
    below, above = bisect_right(sizes, parameters) - 1, bisect_left(sizes, parameters)
    nearest = rows[max(below, 0)], rows[min(above, len(rows) - 1)]
    logs = np.log(sizes)
    return UsualLoss(
        *kind,
        parameters,
        math.exp(np.interp(math.log(parameters), logs, np.log([row.kl for row in rows]))),
        float(np.interp(math.log(parameters), logs, [row.top1 for row in rows])),
        "; ".join(dict.fromkeys(row.source for row in nearest)),
    )


def count_parameters(source: Source) -> int:
    """Count the weights of a source by its headers; scales of codes count."""
    total = 0
    for ref in source.checkpoint.tensors:
        if ref.dtype in BLOCK_TYPES:
            total += math.prod(shape_in_weights(ref.dtype, ref.shape))
        else:
            is_whole = ref.dtype.startswith(WHOLE)
            total += math.prod(ref.shape) if is_whole else 2 * ref.nbytes
    return total


def grade(kl: float, top1: float, usual: UsualLoss | None) -> str:
    """Set a mean KL and a top-1 agreement beside what is usual."""
    if usual is None:
        return NO_FIGURE
    if kl > LIMITS["damage"] * usual.kl or top1 < usual.top1 - MOST_TOP1_LOST:
        return DAMAGED
    return AS_USUAL if kl <= LIMITS["usual"] * usual.kl else WORSE


class Baseline(NamedTuple):
    """The record of an earlier run, which KL is compared with.

    windows      mean KL of each
    text_sha256  of the text, in windows
    """

    path: Path
    kl: float
    windows: NDArray[np.float64]
    text_sha256: str

    def check_text(self, sha256: str, windows: int) -> None:
        """Raise InputError for another text, or other windows of it."""
        if (sha256, windows) != (self.text_sha256, len(self.windows)):
            found, wanted = (
                f"{text[:16]} in {count} windows"
                for text, count in ((self.text_sha256, len(self.windows)), (sha256, windows))
            )
            detail = f"{self.path} is of another text or other windows: {found}; expected {wanted}"
            raise InputError("bad-baseline", detail)

    def compare(self, windows: NDArray[np.float64]) -> dict[str, float | None]:
        """Return its KL, the mean difference of windows, and its error."""
        differences = windows - self.windows
        error = standard_error(differences)
        return {"kl": self.kl, "difference": float(differences.mean()), "se": error}


def read_baseline(path: Path) -> Baseline:
    """Read a document of `evaluate --json`; InputError for another file."""
    expected = "expected what evaluate --json prints, of two windows or more"
    try:
        document = parse_json_object(read_text_file(path).encode(), str(path))
    except (OSError, ValueError, InputError) as error:
        raise InputError("bad-baseline", f"{path}: {error}; {expected}") from None
    match document:
        case {"kl": {"mean": float(mean), "windows": [_, _, *_] as windows}, "text_sha256": str(s)}:
            if all(type(one) in (int, float) and one >= 0 for one in windows):
                return Baseline(path, mean, np.array(windows, np.float64), s)
    raise InputError("bad-baseline", f"{path} has no KL of windows of a text; {expected}")


class EvaluationGate(NamedTuple):
    """The limits of `evaluate`; None for no limit.

    max_kl         of the mean KL divergence, in nats, or a word of LIMITS
    min_top1       of the share of tokens with the same likeliest one
    max_ppl_ratio  of the artifact's perplexity over the source's
    baseline       whose KL is not to be surpassed
    """

    max_kl: float | str | None = None
    min_top1: float | None = None
    max_ppl_ratio: float | None = None
    baseline: Baseline | None = None

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in self)

    def checked(self) -> EvaluationGate:
        """Return it with numbers as such; InputError for a limit that is none."""
        max_kl = self.max_kl
        if isinstance(max_kl, str) and max_kl not in LIMITS:
            with suppress(ValueError):
                max_kl = float(max_kl)
        for option, value, most, expected in (
            ("--max-kl", max_kl, math.inf, f"a number of 0 or more, {one_of(LIMITS)}"),
            ("--min-top1", self.min_top1, 1.0, "a number from 0 to 1"),
            ("--max-ppl-ratio", self.max_ppl_ratio, math.inf, "a number of 0 or more"),
        ):
            if value is None or value in LIMITS:
                continue
            if isinstance(value, str) or not (0 <= value <= most and math.isfinite(value)):
                detail = f"{option} {value} is no limit; expected {expected}"
                raise InputError("bad-gate", detail, f"Correct it, or leave {option} out.")
        return self._replace(max_kl=max_kl)

    def resolved(self, usual: UsualLoss | None) -> EvaluationGate:
        """Return it with the limits that a word of --max-kl stands for.

        The top-1 agreement is limited, too, as it is for a grade.
        Raises  InputError where no figure is known
        """
        if not isinstance(self.max_kl, str):
            return self
        if usual is None:
            detail = f"--max-kl {self.max_kl}: for this format, method and size there is"
            raise InputError("no-usual-loss", f"{detail} {NO_FIGURE}; expected one")
        least = max(self.min_top1 or 0.0, usual.top1 - MOST_TOP1_LOST)
        return self._replace(max_kl=LIMITS[self.max_kl] * usual.kl, min_top1=least)


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """The document of `evaluate --json`.

    tokens   predicted tokens, over which all figures are
    windows  pieces of text that are read separately
    kl       KL(source || artifact) of a token in nats: mean, se (its standard error over windows,
             None for one), p999 (the 99.9th percentile), max, windows (the mean of each)
    top1     share of tokens with the same likeliest prediction
    flips    share of tokens with another one, of those that the source gave `threshold` or more
    ppl      perplexity of source and artifact
    grade    beside `usual`, the UsualLoss of such an artifact, if any
    activations, kv_cache  of the artifact's run: 16 or 4; "fp8", "nvfp4", None
    by_layer mean KL of one layer of the artifact alone, and with all layers before it
    baseline its KL, the mean difference of windows to it, and the standard error of that
    passed   None without a gate
    digest   of the artifact; None where nobody recorded it
    """

    tokens: int
    windows: int
    kl: dict[str, Any]
    top1: float
    flips: dict[str, Any]
    ppl: dict[str, float]
    grade: str
    usual: dict[str, Any] | None
    activations: int
    kv_cache: str | None
    text_sha256: str
    by_layer: tuple[dict[str, Any], ...]
    baseline: dict[str, float | None] | None
    findings: tuple[Finding, ...]
    passed: bool | None
    digest: str | None = None

    def __repr__(self) -> str:
        """Say the verdict in a line, for the end of a notebook's cell."""
        words = f"KL {self.kl['mean']:.4g} nats, {self.grade}, top-1 {100 * self.top1:.2f} %"
        words += f", perplexity {self.ppl['source']:.4g} -> {self.ppl['artifact']:.4g}"
        verdict = {None: "without a gate", True: "passed", False: "failed"}[self.passed]
        return f"<Evaluated {verdict}: {words}, {self.tokens} tokens>"

    def as_json(self) -> dict[str, Any]:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


def evaluate(measured: Measured, gate: EvaluationGate, usual: UsualLoss | None = None) -> Evaluated:
    """Summarize the measurement, and check it against the gate."""
    sizes = measured.windows
    sums = np.bincount(np.repeat(np.arange(len(sizes)), sizes), measured.kl, len(sizes))
    windows = sums / np.maximum(sizes, 1)
    kl: dict[str, Any] = {
        "mean": float(measured.kl.mean()),
        "se": standard_error(windows),
        "p999": float(np.quantile(measured.kl, 0.999)),
        "max": float(measured.kl.max()),
        "windows": windows.tolist(),
    }
    top1 = float(measured.agrees.mean())
    is_sure = measured.likeliest >= CONFIDENT
    flips = None if not is_sure.any() else float(1 - measured.agrees[is_sure].mean())
    means = [float(losses.mean()) for losses in measured.losses]
    baseline = gate.baseline.compare(windows) if gate.baseline else None
    findings = [*check_limits(kl["mean"], top1, _perplexity(means[1] - means[0]), gate)]
    if baseline:
        findings += _check_regression(kl["mean"], baseline)
    return Evaluated(
        tokens=len(measured.kl),
        windows=len(sizes),
        kl=kl,
        top1=top1,
        flips={"share": flips, "of": int(is_sure.sum()), "threshold": CONFIDENT},
        ppl={"source": _perplexity(means[0]), "artifact": _perplexity(means[1])},
        grade=grade(kl["mean"], top1, usual),
        usual=usual._asdict() if usual else None,
        activations=measured.activations,
        kv_cache=measured.kv_cache,
        text_sha256=measured.text_sha256,
        by_layer=tuple(row._asdict() for row in measured.by_layer),
        baseline=baseline,
        findings=tuple(findings),
        passed=is_healthy(findings) if gate.is_set else None,
    )


def standard_error(values: NDArray[np.float64]) -> float | None:
    """Return the standard error of a mean; None for one value.

    Formula  sqrt(sum((v - mean)^2) / (n - 1)) / sqrt(n)
    """
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def _perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats, at most the largest float."""
    return math.exp(min(loss, MOST_NATS))


def check_limits(kl: float, top1: float, ratio: float, gate: EvaluationGate) -> Iterator[Finding]:
    """Check the totals against the limits.

    ratio  of the artifact's perplexity over the source's
    """
    most = gate.max_kl
    if most is not None and not isinstance(most, str) and kl > most:
        detail = f"mean KL {kl:.4g} nats, expected at most {most:.4g}"
        yield Finding("error", "kl-high", None, detail)
    if gate.min_top1 is not None and top1 < gate.min_top1:
        detail = f"the likeliest token is the same for {top1:.4f} of the tokens"
        yield Finding("error", "top1-low", None, f"{detail}, expected at least {gate.min_top1:.4g}")
    if gate.max_ppl_ratio is not None and ratio > gate.max_ppl_ratio:
        detail = f"perplexity is {ratio:.4f} times the source's"
        yield Finding(
            "error", "ppl-high", None, f"{detail}, expected at most {gate.max_ppl_ratio:g} times"
        )


def _check_regression(kl: float, baseline: dict[str, Any]) -> Iterator[Finding]:
    """Check that KL is not surely above a baseline's."""
    is_sure = baseline["difference"] > SURE_ERRORS * baseline["se"]
    if kl > MOST_WORSE * baseline["kl"] and is_sure:
        detail = f"mean KL {kl:.4g} nats, {kl / baseline['kl']:.3f} times the baseline's"
        most = f"expected at most {MOST_WORSE:g} times, or no more than {SURE_ERRORS} standard"
        yield Finding(
            "error", "kl-regressed", None, f"{detail} {baseline['kl']:.4g}; {most} errors"
        )
