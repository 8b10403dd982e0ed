"""Samples: whole rows, evenly over kinds and layers, never more bytes than the budget."""

import itertools

import numpy as np
import pytest

from fp4convert.calibration.input_power import Inputs
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.floats import Floats
from fp4convert.errors import InputError
from fp4convert.numerics.codec import as_floats, as_matrix
from fp4convert.quality import losses
from fp4convert.quality.losses import Weighed, draw_sample, kinds_of, short_names
from fp4convert.storage.safetensors import TensorRef


def linear(module: str, rows: int, columns: int, coding: object = Floats("bf16")) -> Linear:
    ref = TensorRef(f"{module}.weight", "BF16", (rows, columns), "model.safetensors", 0)
    return Linear(module, (rows, columns), coding, (ref,))


def model(layers: int, experts: int = 0) -> dict[str, Linear]:
    found = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.q_proj": (64, 128), f"{at}.mlp.down_proj": (128, 512)}
        found |= {f"{at}.mlp.experts.{expert}.down_proj": (128, 64) for expert in range(experts)}
    return {module: linear(module, *shape) for module, shape in found.items()}


Q, DOWN, EXPERT = (
    "model.layers.*.self_attn.q_proj",
    "model.layers.*.mlp.down_proj",
    "model.layers.*.mlp.experts.*.down_proj",
)


def test_kinds_are_globs_and_have_short_names():
    kinds = kinds_of(model(3, experts=2))
    assert {kind: len(linears) for kind, linears in kinds.items()} == {Q: 3, DOWN: 3, EXPERT: 6}
    assert short_names(list(kinds)) == {
        Q: "q_proj",
        DOWN: "mlp.down_proj",
        EXPERT: "experts.*.down_proj",
    }
    assert short_names(["lm_head", "layers.*", "layers.*.q"]) == {
        "lm_head": "lm_head",
        "layers.*": "layers.*",
        "layers.*.q": "q",
    }


@pytest.mark.parametrize("nbytes", [2000, 5000, 12_345, 100_000, 10**6, 10**9])
def test_no_more_than_the_budget_and_whole_rows(nbytes):
    kinds = kinds_of(model(5, experts=7))
    samples = draw_sample(kinds, nbytes)
    assert samples.keys() == kinds.keys()
    assert sum(sample.nbytes for own in samples.values() for sample in own) <= nbytes
    for sample in (sample for own in samples.values() for sample in own):
        last_row = 0
        for first, last in sample.strips:
            assert last_row <= first < last <= sample.linear.shape[0]
            last_row = last
        assert sample.nbytes == sample.rows * sample.linear.shape[1] * 2


def test_a_budget_for_everything_takes_everything():
    kinds = kinds_of(model(2, experts=3))
    samples = draw_sample(kinds, 10**9)
    assert {kind: [s.linear for s in own] for kind, own in samples.items()} == kinds
    assert all(sample.rows == sample.linear.shape[0] for own in samples.values() for sample in own)


def test_layers_and_matrices_are_covered_evenly():
    kinds = kinds_of(model(1000))
    samples = draw_sample(kinds, 2 * 128 * 10 * 1024)
    for own in samples.values():
        layers = [int(sample.linear.module.split(".")[2]) for sample in own]
        assert len(layers) == 128
        gaps = {after - before for before, after in itertools.pairwise(layers)}
        assert gaps <= {7, 8}
    starts = [sample.strips[0][0] / sample.linear.shape[0] for sample in samples[DOWN]]
    thirds = [sum(low / 3 <= start < (low + 1) / 3 for start in starts) for low in range(3)]
    assert min(thirds) > 30


def test_what_a_small_kind_leaves_others_get():
    small, large = linear("a", 2, 16), linear("b", 4096, 1024)
    samples = draw_sample({"a": [small], "b": [large]}, 1_000_000)
    assert samples["a"][0].nbytes == small.refs[0].nbytes
    assert 990_000 < samples["b"][0].nbytes <= 1_000_000 - small.refs[0].nbytes


def test_large_shares_are_cut_into_strips_all_over_a_matrix():
    big = linear("big", 8192, 4096)
    (sample,) = draw_sample({"big": [big]}, 4 << 20)["big"]
    assert len(sample.strips) == 4
    assert [first * 4 // 8192 for first, _ in sample.strips] == [0, 1, 2, 3]


def test_transposed_matrices_are_read_whole_or_not_at_all():
    stacked = linear("experts.0.up", 64, 32, Floats("bf16", 0, 1, True))
    (sample,) = draw_sample({"up": [stacked]}, 5000)["up"]
    assert (sample.strips, sample.nbytes) == (((0, 64),), 64 * 32 * 2)
    with pytest.raises(InputError, match=r"expected at least 4\.1e-06 GB"):
        draw_sample({"up": [stacked]}, 4000)


def test_without_a_budget_it_is_the_usual_one_or_a_row_of_every_kind():
    kinds = kinds_of(model(400))
    assert sum(sample.nbytes for own in draw_sample(kinds).values() for sample in own) <= 20_000_000
    stacked = linear("experts.0.up", 4096, 4096, Floats("bf16", 0, 1, True))
    (sample,) = draw_sample({"up": [stacked]})["up"]
    assert sample.nbytes == 4096 * 4096 * 2


def test_too_little_for_a_row_of_each_kind():
    with pytest.raises(InputError, match="does not hold a row of each of 3 kinds") as caught:
        draw_sample(kinds_of(model(2, experts=2)), 1000)
    assert caught.value.exit_code == 2


def test_losses_by_panels_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(losses, "MEASURED_ELEMENTS", 3 * 192)
    x = np.random.default_rng(7).standard_normal((50, 192)).astype(np.float32)
    x[11] = 0
    ways, amax = losses.ways(False), float(np.abs(x).max())
    weighed = Weighed.of(x, Inputs())
    found = losses.plain_losses(as_matrix(x), ways, amax)
    for way, loss in zip(ways, found, strict=True):
        whole = weighed.loss(losses.through_form(as_floats(as_matrix(x)), way, amax))
        assert loss == pytest.approx(whole, rel=1e-6), way
