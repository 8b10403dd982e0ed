"""The verdict of evaluate: figures by NumPy's formulas, limits, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fp4convert.errors import InputError
from fp4convert.quality import evaluation
from fp4convert.quality.evaluation import (
    Baseline,
    EvaluationGate,
    UsualLoss,
    evaluate,
    interpolate,
    read_baseline,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.engine


def measured(tokens: int = 2000):
    from fp4convert.calibration.side_by_side import LayerLoss, Measured

    random = np.random.default_rng(0)
    losses = random.exponential(2.0, tokens), random.exponential(2.1, tokens)
    kl, agrees = random.exponential(0.1, tokens), random.random(tokens) < 0.9
    layers = (LayerLoss("model.layers.0", 0.5, 0.25),)
    return Measured(np.full(4, tokens // 4), kl, agrees, random.random(tokens), losses, "", layers)


def of_windows(*kl: float):
    """As many windows of one token, with these KL."""
    ones = np.ones(len(kl))
    given = measured()._replace(windows=ones.astype(int), likeliest=ones, agrees=ones > 0)
    return given._replace(kl=np.array(kl), losses=(ones, ones))


def test_figures_are_means_and_percentiles():
    given = measured()
    found = evaluate(given, EvaluationGate())
    assert (found.tokens, found.windows, found.passed) == (2000, 4, None)
    windows = [np.mean(given.kl[500 * at : 500 * (at + 1)]) for at in range(4)]
    assert found.kl.pop("windows") == pytest.approx(windows)
    assert found.kl == pytest.approx(
        {
            "mean": sum(given.kl) / 2000,
            "se": np.std(windows, ddof=1) / 2,
            "p999": np.percentile(given.kl, 99.9),
            "max": max(given.kl),
        }
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
    given = of_windows(*8 * [1.0])._replace(losses=(np.full(8, 5.0), np.full(8, 4000.0)))
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
        EvaluationGate(**gate).checked()
    assert refused.value.code == "bad-gate"


def test_windows_of_any_length_are_the_units_of_the_error():
    """Means 0.1, 0.3, 0.4: sqrt((0.1667^2 + 0.0333^2 + 0.1333^2) / 2 / 3) = 0.0881917."""
    given = of_windows(0.1, 0.2, 0.4, 0.3, 0.3, 0.6)._replace(windows=np.array([1, 2, 3]))
    found = evaluate(given, EvaluationGate())
    assert found.kl["windows"] == pytest.approx([0.1, 0.3, 0.4])
    assert found.kl["se"] == pytest.approx(0.0881917, rel=1e-6)
    assert found.windows == 3
    alone = evaluate(given._replace(windows=np.array([6])), EvaluationGate())
    assert alone.kl["se"] is None
    assert alone.kl["windows"] == pytest.approx([1.9 / 6])


def test_flips_are_of_tokens_that_the_source_was_sure_of():
    given = of_windows(0.1, 0.1, 0.1, 0.1)._replace(
        likeliest=np.array([0.95, 0.9, 0.8999, 0.99]), agrees=np.array([True, False, False, True])
    )
    found = evaluate(given, EvaluationGate())
    assert found.flips == {"share": pytest.approx(1 / 3), "of": 3, "threshold": 0.9}
    unsure = evaluate(given._replace(likeliest=np.full(4, 0.5)), EvaluationGate())
    assert unsure.flips == {"share": None, "of": 0, "threshold": 0.9}


def test_logits_give_the_largest_probability_of_the_source():
    import torch

    from fp4convert.calibration.side_by_side import _compare_logits

    ours = torch.tensor([[0.92, 0.05, 0.03], [0.2, 0.5, 0.3]]).log() + 3
    theirs = torch.tensor([[0.3, 0.6, 0.1], [0.1, 0.8, 0.1]]).log()
    kl, agrees, likeliest, *losses = _compare_logits(ours, theirs, torch.tensor([0, 2]))
    assert likeliest.tolist() == pytest.approx([0.92, 0.5], rel=1e-6)
    assert agrees.tolist() == [False, True]
    first = 0.92 * np.log(0.92 / 0.3) + 0.05 * np.log(0.05 / 0.6) + 0.03 * np.log(0.03 / 0.1)
    assert float(kl[0]) == pytest.approx(first, rel=1e-5)
    expected = [-np.log([0.92, 0.3]), -np.log([0.3, 0.1])]
    assert [each.tolist() for each in losses] == [pytest.approx(e, rel=1e-5) for e in expected]


ROWS = (
    UsualLoss("nvfp4", 16, "rtn", 10**10, 0.004, 0.9, "large"),
    UsualLoss("nvfp4", 16, "rtn", 10**6, 0.4, 0.6, "small"),
    UsualLoss("nvfp4", 4, "rtn", 10**8, 0.7, 0.5, "other"),
)


@pytest.mark.parametrize(
    ("parameters", "kl", "top1"),
    [
        (10**8, 0.04, 0.75),  # sqrt(0.4 * 0.004): half of the way in logarithms
        (10**7, 0.4 * 0.01**0.25, 0.675),
        (10**6, 0.4, 0.6),
        (5 * 10**5, 0.4, 0.6),
        (2 * 10**10, 0.004, 0.9),
    ],
)
def test_a_size_between_two_rows_has_a_figure_between(parameters, kl, top1, monkeypatch):
    monkeypatch.setattr(evaluation, "usual_losses", lambda: ROWS)
    found = interpolate(("nvfp4", 16, "rtn"), parameters)
    assert found[:4] == ("nvfp4", 16, "rtn", parameters)
    assert (found.kl, found.top1) == (pytest.approx(kl), pytest.approx(top1))


def test_far_from_all_rows_there_is_no_figure(monkeypatch):
    monkeypatch.setattr(evaluation, "usual_losses", lambda: ROWS)
    rtn = ("nvfp4", 16, "rtn")
    assert interpolate(rtn, 499_999) is interpolate(rtn, 2 * 10**10 + 1) is None
    assert interpolate(("nvfp4", 4, "rtn"), 2 * 10**8).source == "other"
    assert interpolate(rtn, 10**8).source == "small; large"
    assert interpolate(rtn, 10**6).source == interpolate(rtn, 6 * 10**5).source == "small"
    assert interpolate(("mxfp4", 16, "rtn"), 10**8) is interpolate((*rtn[:2], "awq"), 10**8) is None


@pytest.mark.parametrize(
    ("kl", "top1", "word"),
    [
        (1.3, 0.65, "as usual"),
        (1.3001, 0.9, "worse than usual"),
        (3.0, 0.65, "worse than usual"),
        (3.0001, 0.9, "damaged"),
        (0.1, 0.6499, "damaged"),
    ],
)
def test_grades_at_their_borders(kl, top1, word):
    usual = UsualLoss("nvfp4", 16, "rtn", 1, 1.0, 0.75, "")
    assert evaluation.grade(kl, top1, usual) == word
    assert evaluation.grade(kl, top1, None) == "no figure to compare with"


def test_rows_are_of_measurements():
    rows = evaluation.usual_losses()
    assert len({row[:4] for row in rows}) == len(rows)
    for row in rows:
        assert row.format in ("nvfp4", "mxfp4")
        assert row.activations in (16, 4)
        assert 0 < row.kl < 2
        assert 0.3 < row.top1 < 1
        assert row.source.startswith(("https://", "measured: "))


def test_weights_are_counted_by_headers():
    refs = [("BF16", (4, 3), 24), ("U8", (4, 8), 32), ("Q4_0", (2, 36), 72), ("F8_E4M3", (5,), 5)]
    tensors = [SimpleNamespace(dtype=d, shape=s, nbytes=n) for d, s, n in refs]
    source = SimpleNamespace(checkpoint=SimpleNamespace(tensors=tensors))
    assert evaluation.count_parameters(source) == 12 + 64 + 2 * 64 + 5


@pytest.mark.parametrize(
    ("kl", "difference", "se", "codes"),
    [
        ((0.05, 0.15, 0.25, 0.35), -0.05, 0.0, []),
        ((0.11, 0.21, 0.31, 0.41), 0.01, 0.0, []),  # 1.04 times
        ((0.4, 0.2, 0.3, 0.2), 0.025, 0.1030776, []),  # 1.1 times, by one window of four
        ((0.15, 0.27, 0.35, 0.45), 0.055, 0.005, ["kl-regressed"]),
    ],
)
def test_a_baseline_is_compared_window_by_window(kl, difference, se, codes):
    baseline = Baseline(Path("b.json"), 0.25, np.array([0.1, 0.2, 0.3, 0.4]), "")
    found = evaluate(of_windows(*kl), EvaluationGate(baseline=baseline))
    expected = {"kl": 0.25, "difference": difference, "se": se}
    assert found.baseline == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert [finding.code for finding in found.findings] == codes
    assert found.passed is (not codes)


def test_a_baseline_is_what_evaluate_prints(tmp_path):
    found = evaluate(of_windows(0.1, 0.3), EvaluationGate()).as_json()
    file = tmp_path / "b.json"
    file.write_text(json.dumps(found))
    baseline = read_baseline(file)
    assert (baseline.kl, baseline.windows.tolist()) == (pytest.approx(0.2), [0.1, 0.3])
    baseline.check_text("", 2)
    for sha256, windows in (("ab", 2), ("", 3)):
        with pytest.raises(InputError, match="of another text or other windows"):
            baseline.check_text(sha256, windows)
    broken = [{**found, "text_sha256": None}, {**found, "kl": 0.2}, {}, []]
    broken += [{**found, "kl": {**found["kl"], "windows": w}} for w in ([0.1], [0.1, "x"], [0, -1])]
    for text in (*map(json.dumps, broken), "no JSON", "[" * 10**5):
        file.write_text(text)
        with pytest.raises(InputError, match="expected what evaluate --json prints") as refused:
            read_baseline(file)
        assert refused.value.code == "bad-baseline"
    with pytest.raises(InputError, match="expected what evaluate --json prints"):
        read_baseline(tmp_path)


def test_words_of_a_limit_stand_for_usual_figures():
    usual = UsualLoss("nvfp4", 16, "rtn", 1, 0.2, 0.75, "")
    for word, limit in (("usual", 0.26), ("damage", 0.6)):
        gate = EvaluationGate(word).checked().resolved(usual)
        assert (gate.max_kl, gate.min_top1) == (pytest.approx(limit), pytest.approx(0.65))
        stricter = EvaluationGate(word, min_top1=0.9).resolved(usual)
        assert stricter.min_top1 == 0.9
        with pytest.raises(InputError, match="there is no figure to compare with") as refused:
            EvaluationGate(word).resolved(None)
        assert refused.value.code == "no-usual-loss"
    assert EvaluationGate("0.05").checked().resolved(None) == EvaluationGate(0.05)
    for word in ("usually", "nan", "-1", ""):
        with pytest.raises(InputError, match="is no limit"):
            EvaluationGate(word).checked()
