"""The verdict of evaluate: figures by NumPy's formulas, limits, and exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp4convert.errors import InputError
from fp4convert.quality.evaluation import EvaluationGate, evaluate

pytest.importorskip("torch")
pytestmark = pytest.mark.engine


def measured(tokens: int = 2000):
    from fp4convert.calibration.side_by_side import LayerLoss, Measured

    random = np.random.default_rng(0)
    losses = random.exponential(2.0, tokens), random.exponential(2.1, tokens)
    kl, agrees = random.exponential(0.1, tokens), random.random(tokens) < 0.9
    return Measured(4, kl, agrees, losses, (LayerLoss("model.layers.0", 0.5, 0.25),))


def test_figures_are_means_and_percentiles():
    given = measured()
    found = evaluate(given, EvaluationGate())
    assert (found.tokens, found.windows, found.passed) == (2000, 4, None)
    assert found.kl == pytest.approx(
        {"mean": sum(given.kl) / 2000, "p999": np.percentile(given.kl, 99.9), "max": max(given.kl)}
    )
    assert found.top1 == sum(given.agrees) / 2000
    assert found.ppl == pytest.approx(
        {
            "source": np.prod(np.exp(given.losses[0] / 2000)),
            "artifact": np.prod(np.exp(given.losses[1] / 2000)),
        }
    )
    row = {"layer": "model.layers.0", "alone": 0.5, "cumulated": 0.25}
    assert found.as_json()["by_layer"] == [row]
    assert repr(found).startswith("<Evaluated without a gate: KL ")
    assert repr(evaluate(given, EvaluationGate(max_kl=1))).startswith("<Evaluated passed: KL ")


def test_a_perplexity_that_no_float_holds_is_the_largest_float():
    """JSON has no infinity, and `compare --report` no page with one."""
    given = measured()._replace(losses=(np.full(8, 5.0), np.full(8, 4000.0)))
    found = evaluate(given, EvaluationGate(max_ppl_ratio=2.0))
    assert found.ppl["source"] == pytest.approx(np.exp(5.0))
    assert 1e308 < found.ppl["artifact"] <= np.finfo(np.float64).max
    assert [finding.code for finding in found.findings] == ["ppl-high"]
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "code", "sign"),
    [("max_kl", "kl-high", 1), ("min_top1", "top1-low", -1), ("max_ppl_ratio", "ppl-high", 1)],
)
def test_a_limit_is_missed_on_its_own_side_alone(name, code, sign):
    given = measured()
    free = evaluate(given, EvaluationGate())
    value = {
        "max_kl": free.kl["mean"],
        "min_top1": free.top1,
        "max_ppl_ratio": free.ppl["artifact"] / free.ppl["source"],
    }[name]
    for shift, codes in ((0.001 * sign, []), (-0.001 * sign, [code])):
        found = evaluate(given, EvaluationGate(**{name: value + shift}))
        assert [finding.code for finding in found.findings] == codes
        assert found.passed is (not codes)


@pytest.mark.parametrize(
    "gate", [{"max_kl": -1.0}, {"min_top1": 1.5}, {"max_ppl_ratio": float("nan")}], ids=str
)
def test_what_is_no_limit_is_refused(gate):
    with pytest.raises(InputError, match="is no limit") as refused:
        EvaluationGate(**gate).check()
    assert refused.value.code == "bad-gate"
