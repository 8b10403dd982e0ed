"""The factors of AWQ, and artifacts made with them: against the formula in NumPy, and the codes of
the codec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from artifacts import artifact_values
from calibrations import statistics_of, write_calibration
from checkpoints import (
    FIRST,
    SECOND,
    Outcome,
    Tensor,
    read_folder,
    run,
    values_of,
    weight,
    write_checkpoint,
)
from folded_llama import (
    INPUTS,
    LAYER,
    READERS,
    Arrays,
    calibrated,
    changed,
    doubled,
    made,
    stored_weights,
    write_source,
)
from folding_llama import LLAMA, TENSORS, bf16_norm
from made_up_inputs import correlated

from fp4convert.numerics import codec
from fp4convert.numerics.formats import NVFP4
from fp4convert.storage.open import open_source

GROUPS = (
    *(own for maker, own in READERS.items() if "layernorm" in maker),
    ("self_attn.o_proj",),
    ("mlp.down_proj",),
)


def bf16_of(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def repeated(rows: np.ndarray) -> np.ndarray:
    """Numbers of v's 64 rows for o's 128 columns: two heads of 32, each for two of queries."""
    return np.concatenate([rows[:32], rows[:32], rows[32:], rows[32:]])


def tied_means(columns: np.ndarray) -> np.ndarray:
    """Means of o's columns for v's rows."""
    heads = columns.reshape(2, 2, 32)
    return heads.mean(axis=1).reshape(-1)


def stored(maker: str, wanted: np.ndarray, weights: Arrays) -> np.ndarray:
    """The factors that a fold has in the end: of a norm what undoes its rounding, of rows a power
    of two.
    """
    if "layernorm" not in maker:
        return np.exp2(np.rint(np.log2(wanted))).astype(np.float32)
    norm = weights[maker]
    return norm / bf16_of(norm / wanted.astype(np.float32))


def error_of(w: np.ndarray, columns: np.ndarray, moments: np.ndarray | None = None) -> np.ndarray:
    """What rounding changes of weights under factors, by rule amax, or by importance."""
    rule, scaled = "amax" if moments is None else "importance", (w * columns).astype(np.float32)
    q = codec.quantize(scaled, NVFP4, rule, None, divided_moments(moments, columns))
    return codec.dequantize(q) / columns - w


def divided_moments(moments: np.ndarray | None, columns: np.ndarray) -> np.ndarray | None:
    if moments is None:
        return None
    return (moments.astype(np.float32) / columns.astype(np.float64) ** 2).astype(np.float32)


def best_factors(
    maker: str, magnitudes: np.ndarray, cost: Callable[[np.ndarray], float]
) -> np.ndarray:
    """Every alpha tried; of equal costs the lowest."""
    candidates = []
    for step in range(21):
        powers = magnitudes ** (step / 20)
        wanted = powers / np.sqrt(powers.max() * powers.min())
        candidates.append(stored(maker, wanted, stored_weights()))
    return min(candidates, key=cost)


def awq_factors(maker: str, is_weighed: bool = False) -> np.ndarray:
    """The least error of what the readers put out for these very inputs."""
    weights, is_tied = stored_weights(), maker == "self_attn.v_proj"
    x = INPUTS[maker].astype(np.float64)
    magnitudes, second = np.abs(x).mean(axis=0), np.square(x).mean(axis=0)

    def cost(factors: np.ndarray) -> float:
        columns = repeated(factors) if is_tied else factors
        moments = second if is_weighed else None
        errors = [error_of(weights[reader], columns, moments) for reader in READERS[maker]]
        return sum(float((np.square(error.astype(np.float64)) * second).sum()) for error in errors)

    return best_factors(maker, tied_means(magnitudes) if is_tied else magnitudes, cost)


def quantize(source: Path, out: Path, *options: object) -> Outcome:
    words = ("quantize", source, "--format", "nvfp4", "--method", "awq", "-o", out, "--json")
    return run(*words, *options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def statistics(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(source, tmp_path_factory.mktemp("statistics") / "c.safetensors")


@pytest.fixture(scope="module")
def artifact(source: Path, statistics: Path, tmp_path_factory: pytest.TempPathFactory):
    """Folder, tensors, and the factors that the formula gives."""
    out = tmp_path_factory.mktemp("awq") / "out"
    tensors = made(source, out, "awq", statistics)
    return out, tensors, {maker: awq_factors(maker) for maker in READERS}


def test_norms_are_divided_by_the_factors_of_the_formula(artifact):
    _, tensors, factors = artifact
    weights = stored_weights()
    for maker in ("input_layernorm", "post_attention_layernorm"):
        own = values_of(tensors[f"{LAYER}.{maker}.weight"]).astype(np.float32)
        assert (own == bf16_of(weights[maker] / factors[maker])).all()
        assert (own != weights[maker]).mean() > 0.5


def test_codes_are_those_of_the_codec_for_weights_under_the_factors(artifact):
    """One scale for a group, after the factors; never a rounding to bf16 between."""
    _, tensors, factors = artifact
    weights = stored_weights()
    columns = {reader: factors[maker] for maker, readers in READERS.items() for reader in readers}
    columns["self_attn.o_proj"] = repeated(columns["self_attn.o_proj"])
    scaled = {reader: weights[reader] * columns[reader] for reader in columns}
    for maker in ("self_attn.v_proj", "mlp.up_proj"):
        scaled[maker] = scaled[maker] / factors[maker][:, None]
    for group in GROUPS:
        amax = max(float(np.abs(scaled[module]).max()) for module in group)
        for module in group:
            q = codec.quantize(scaled[module], NVFP4, "amax", amax)
            name = f"{LAYER}.{module}"
            assert tensors[f"{name}.weight_packed"][2] == bytes(q.packed), module
            assert tensors[f"{name}.weight_scale"][2] == bytes(q.block_scales), module


def test_outputs_are_closer(artifact, source, statistics, tmp_path):
    """For the inputs of the calibration, with the norm's share of the fold undone by the inputs."""
    _, tensors, factors = artifact
    plain = made(source, tmp_path / "rtn", "rtn", statistics)
    weights = stored_weights()
    for maker, readers in READERS.items():
        columns = repeated(factors[maker]) if maker == "self_attn.v_proj" else factors[maker]
        losses = {"rtn": 0.0, "awq": 0.0}
        for reader in readers:
            rows = factors[reader][:, None] if reader in READERS else 1
            name = f"{LAYER}.{reader}"
            values = artifact_values(tensors, name, "compressed-tensors") * rows / columns
            for how, found in (
                ("rtn", artifact_values(plain, name, "compressed-tensors")),
                ("awq", values),
            ):
                losses[how] += float(np.square(INPUTS[maker] @ (found - weights[reader]).T).sum())
        assert losses["awq"] < losses["rtn"], maker


@pytest.mark.parametrize("block", [16, 64, 1000])
def test_a_gram_matrix_weighs_the_errors_where_there_is_one(block, source, tmp_path):
    """Of inputs that go together: the alpha is that of the error in the outputs themselves."""
    statistics = calibrated(source, tmp_path / "c.safetensors", block)
    tensors, weights = made(source, tmp_path / "out", "awq", statistics), stored_weights()
    maker = "post_attention_layernorm"
    x, places = INPUTS[maker].astype(np.float64), np.arange(64) // block
    gram = np.where(places[:, None] == places[None], x.T @ x / len(x), 0)

    def cost(columns: np.ndarray) -> float:
        errors = np.concatenate([error_of(weights[reader], columns) for reader in READERS[maker]])
        return float(np.einsum("ri,ij,rj->", errors, gram, errors))

    factors = best_factors(maker, np.abs(x).mean(axis=0), cost)
    found = values_of(tensors[f"{LAYER}.{maker}.weight"]).astype(np.float32)
    assert (found == bf16_of(weights[maker] / factors)).all()


def test_readers_count_by_the_tokens_that_they_were_given(source, tmp_path):
    """Magnitudes and errors of two readers with inputs of their own, as experts have them."""
    maker = "post_attention_layernorm"
    given = {
        "mlp.gate_proj": 10 * INPUTS[maker][:20],
        "mlp.up_proj": correlated(64, 2000, seed=64),
    }  # few large ones, many small
    own = {
        name: array
        for reader, x in given.items()
        for name, array in statistics_of(f"{LAYER}.{reader}", x).items()
    }
    statistics = calibrated(source, tmp_path / "c.safetensors", **own)
    tensors, weights = made(source, tmp_path / "out", "awq", statistics), stored_weights()
    magnitudes = np.concatenate([np.abs(x.astype(np.float64)) for x in given.values()]).mean(axis=0)

    def cost(columns: np.ndarray) -> float:
        total = 0.0
        for reader, x in given.items():
            error = error_of(weights[reader], columns).astype(np.float64)
            total += float((np.square(error) * np.square(x.astype(np.float64)).sum(axis=0)).sum())
        return total

    found = values_of(tensors[f"{LAYER}.{maker}.weight"]).astype(np.float32)
    assert (found == bf16_of(weights[maker] / best_factors(maker, magnitudes, cost))).all()


def test_the_record_tells_the_folds_and_no_factor(artifact):
    record = json.loads((artifact[0] / "quantization_config.json").read_text())
    assert record["method"] == "awq"
    assert {name for fold in record["folds"] for name in fold["modules"]} == {
        f"{LAYER}.{maker}" for maker in READERS
    }
    heads = next(fold for fold in record["folds"] if fold["kind"] == "heads")
    assert heads["heads"] == {"repeats": 2, "width": 32}


def test_bytes_depend_on_no_worker_and_no_shard(artifact, source, statistics, tmp_path):
    """Every task finds the factors of its folds by itself, from whichever shards."""
    out, tensors, _ = artifact
    alone = write_checkpoint(tmp_path / "alone", {"model.safetensors": TENSORS}, LLAMA)
    again = calibrated(alone, tmp_path / "c.safetensors")
    assert made(alone, tmp_path / "one", "awq", again) == tensors
    for part in (1, 2):
        options = ("--workers", "1", "--shard-index", part - 1, "--num-shards", "2")
        made(source, tmp_path / "parts", "awq", statistics, *options)
    assert run("merge", tmp_path / "parts", "-q").code == 0
    for file in (FIRST, SECOND, "quantization_config.json"):
        assert (tmp_path / "parts" / file).read_bytes() == (out / file).read_bytes()


def test_the_rule_importance_weighs_inputs_as_they_are_after_the_fold(source, statistics, tmp_path):
    """Second moments over the squares of the factors."""
    out = tmp_path / "weighed"
    outcome = quantize(source, out, "--scale-rule", "importance", "--calibration", statistics)
    assert outcome.code == 0, outcome.err
    tensors, weights = read_folder(out), stored_weights()
    maker = "post_attention_layernorm"
    factors = awq_factors(maker, is_weighed=True)
    moments = np.square(INPUTS[maker].astype(np.float64)).mean(axis=0)
    gate, up = (weights[reader] * factors for reader in READERS[maker])
    up = up / awq_factors("mlp.up_proj", is_weighed=True)[:, None]
    amax = max(float(np.abs(gate).max()), float(np.abs(up).max()))
    q = codec.quantize(gate, NVFP4, "importance", amax, divided_moments(moments, factors))
    assert tensors[f"{LAYER}.mlp.gate_proj.weight_scale"][2] == bytes(q.block_scales)
    assert tensors[f"{LAYER}.mlp.gate_proj.weight_packed"][2] == bytes(q.packed)
    assert run("verify", out, "--source", source, "--json").faults == []


@pytest.mark.parametrize(("options", "follows"), [((), True), (("--input-scale", "0.5"), False)])
def test_input_scales_follow_the_inputs(options, follows, artifact, source, statistics, tmp_path):
    """Those of a calibration reach 8 times the largest input after it was divided; a number stays
    what was asked for.
    """
    tensors = made(source, tmp_path / "out", "awq", statistics, "--activations", "4", *options)
    for maker, readers in READERS.items():
        factors = artifact[2][maker]
        columns = repeated(factors) if maker == "self_attn.v_proj" else factors
        largest = float((np.abs(INPUTS[maker]) / columns).max())
        for reader in readers:
            divisor = float(
                np.frombuffer(tensors[f"{LAYER}.{reader}.input_global_scale"][2], "<f4")[0]
            )
            assert divisor == pytest.approx(2688 / (8 * largest) if follows else 2, rel=1e-5)


def test_values_in_an_fp8_cache_stay_what_its_scales_are_of(source, tmp_path):
    cache = {f"{LAYER}.self_attn.{name}_amax": np.float32(3) for name in "kv"}
    statistics = calibrated(source, tmp_path / "c.safetensors", **cache)
    made(source, tmp_path / "out", "awq", statistics, "--kv-cache", "fp8")
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert not [fold for fold in record["folds"] if fold["kind"] == "heads"]
    assert len(record["folds"]) == 3
    assert run("verify", tmp_path / "out", "--source", source, "--json").faults == []


EXPERTS: dict[str, Tensor] = {
    **{name: tensor for name, tensor in TENSORS.items() if ".mlp." not in name},
    **{f"{LAYER}.self_attn.{name}_norm.weight": bf16_norm(32) for name in "qk"},
    f"{LAYER}.mlp.gate.weight": weight(30, 4, 64),
    **{
        f"{LAYER}.mlp.experts.{expert}.{name}.weight": weight(
            40 + expert, *((64, 48) if name == "down_proj" else (48, 64))
        )
        for expert in range(4)
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}


def test_a_router_stays_and_sees_the_same_products(tmp_path):
    """Its columns are multiplied by powers of two, which bf16 holds exactly; every expert gets the
    same factors.
    """
    source = write_checkpoint(
        tmp_path / "m", {"model.safetensors": EXPERTS}, {**LLAMA, "model_type": "qwen3_moe"}
    )
    tensors: Arrays = {}
    for name, (_, shape, _) in EXPERTS.items():
        if "_proj" in name:
            tensors |= statistics_of(
                name.removesuffix(".weight"), correlated(shape[1], seed=len(name))
            )
    statistics = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), tensors)
    out = tmp_path / "out"
    artifact = made(source, out, "awq", statistics)
    norm, gate = f"{LAYER}.post_attention_layernorm.weight", f"{LAYER}.mlp.gate.weight"
    before, after = values_of(EXPERTS[norm]), values_of(artifact[norm])
    factors = before / after
    assert set(np.frexp(factors)[0]) == {0.5}
    assert len(set(factors)) > 1
    assert (values_of(artifact[gate]) == values_of(EXPERTS[gate]) * factors).all()
    planned = quantize(source, tmp_path / "plan", "--calibration", statistics, "--dry-run")
    actions = {step["name"]: step["action"] for step in planned.json["tensors"]}
    assert actions[gate] == actions[norm] == "fold"
    assert run("verify", out, "--source", source, "--json").faults == []
    bad = changed(out, tmp_path / "bad", gate, doubled(3))
    report = run("verify", bad, "--source", source, "--json")
    assert ("kept-differs", gate) in {
        (finding["code"], finding["tensor"]) for finding in report.faults
    }


def test_columns_that_nothing_enters_and_rows_of_zeros_are_left_alone(tmp_path):
    """Where there is nothing to weigh, the factor is 1, or unseen; and verify does not stumble."""
    tensors = dict(TENSORS)
    for name in (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.self_attn.v_proj.weight"):
        kind, shape, data = tensors[name]
        tensors[name] = (kind, shape, bytes(2 * shape[1] * 16) + data[2 * shape[1] * 16 :])
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, LLAMA)
    changes = {}
    for maker, readers in READERS.items():
        x = INPUTS[maker].copy()
        x[:, :16] = 0
        for reader in readers:
            changes |= statistics_of(f"{LAYER}.{reader}", x)
    path = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), changes)
    made(source, tmp_path / "out", "awq", path)
    assert run("verify", tmp_path / "out", "--source", source, "--json").faults == []


def test_weights_that_are_not_finite_are_told_by_their_names(tmp_path):
    name = f"{LAYER}.mlp.up_proj.weight"
    kind, shape, data = TENSORS[name]
    broken = (kind, shape, data[:-2] + np.array([0x7FC0], "<u2").tobytes())
    source = write_checkpoint(
        tmp_path / "m", {"model.safetensors": {**TENSORS, name: broken}}, LLAMA
    )
    statistics = calibrated(source, tmp_path / "c.safetensors")
    outcome = quantize(source, tmp_path / "out", "--calibration", statistics)
    assert outcome.code == 2
    assert outcome.json["error"]["tensor"] == name
    assert "1 value that is " in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "config", "code"),
    [
        ((), {"model_type": "never_heard_of"}, "no-fold"),
        (
            ("--exclude", "*.mlp.*", "--exclude", "*.self_attn.*", "--include", "*layernorm"),
            {},
            "no-fold",
        ),
        (("--via", "fp8"), {}, "method-via"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(options, config, code, tmp_path):
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": TENSORS}, {**LLAMA, **config})
    statistics = calibrated(source, tmp_path / "c.safetensors")
    outcome = quantize(source, tmp_path / "out", "--calibration", statistics, *options)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
    assert "\n" not in outcome.json["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacking", ["input_sq_mean", "input_abs_mean", "tokens"])
def test_statistics_that_are_lacking_are_told(lacking, source, tmp_path):
    tensors: Arrays = {}
    for maker, readers in READERS.items():
        for reader in readers:
            tensors |= statistics_of(f"{LAYER}.{reader}", INPUTS[maker])
    del tensors[f"{LAYER}.mlp.up_proj.{lacking}"]
    path = write_calibration(tmp_path / "c.safetensors", open_source(str(source)), tensors)
    outcome = quantize(source, tmp_path / "out", "--calibration", path)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "calibration-missing")
    assert f"{LAYER}.mlp.up_proj" in outcome.json["error"]["message"]
    assert not (tmp_path / "out").exists()
