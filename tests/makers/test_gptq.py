"""quantize --method gptq: outputs come nearer, the same bytes from any workers and parts, and bad
statistics are told.
"""

import json
import signal

import numpy as np
import pytest
from artifacts import artifact_values, quantize
from checkpoints import (
    LAYER,
    WAIT_SECONDS,
    pack_shard,
    read_folder,
    read_shard,
    run,
    run_alone,
    start,
    values_of,
    write_checkpoint,
    write_llama,
    write_single,
)
from gptq_reference import gptq_by_the_paper
from made_up_inputs import aliases_of, calibrate, correlated, inputs_of
from refusals import refused

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.calibration.methods.scaled_weights import Scaled
from fp4convert.checkpoint.encodings.base import Factors, Folding
from fp4convert.makers import table
from fp4convert.makers.maker import Tools
from fp4convert.makers.methods import gptq
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group
from fp4convert.numerics import codec
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import MXFP4, NVFP4, format_named
from fp4convert.numerics.matrices import InMemory, Matrix
from fp4convert.recipes.recipe import Target
from fp4convert.storage.open import open_source

pytest.importorskip("torch")

DIALECT = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors"}
QUERY = f"{LAYER}.self_attn.q_proj"
GPTQ = ("--method", "gptq")
DOWN, GATE = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_proj"


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def gptq_of(source, tmp_path, *options, gram="full", out="gptq"):
    file = tmp_path / f"{gram.replace(':', '')}.safetensors"
    return quantize(
        source,
        tmp_path / out,
        "--calibration",
        calibrate(file, source, gram),
        "--method",
        "gptq",
        *options,
    )


def output_errors(source, artifact, inputs):
    """For every module the squared error of its outputs, for these inputs; float64."""
    before, after, holders = read_folder(source), read_folder(artifact), aliases_of(source)
    modules = [
        name.removesuffix(".weight_packed") for name in after if name.endswith(".weight_packed")
    ]
    found = {}
    for module in modules:
        difference = artifact_values(after, module, "compressed-tensors") - values_of(
            before[f"{module}.weight"]
        )
        found[module] = float(
            np.sum((inputs[holders.get(module, module)].astype(np.float64) @ difference.T) ** 2)
        )
    return found


@pytest.mark.parametrize("gram", ["full", "block:128", "block:48"])
def test_outputs_of_every_layer_come_nearer(gram, source, tmp_path):
    """Than by rounding to the nearest; with the whole matrix nearest of all."""
    quantize(source, tmp_path / "rtn")
    gptq_of(source, tmp_path, gram=gram)
    inputs = inputs_of(source)
    before, after = (output_errors(source, tmp_path / name, inputs) for name in ("rtn", "gptq"))
    assert len(after) == 7
    assert all(after[module] < 0.75 * before[module] for module in after), (before, after)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_inputs_that_know_nothing_of_each_other_give_the_bytes_of_mse(format, source, tmp_path):
    """Columns of a Hadamard matrix have identity as Gram matrix, and moments of 1: nothing to weigh
    for method or rule.
    """
    hadamard = np.ones((1, 1), np.float32)
    for _ in range(7):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    inputs = {module: hadamard[:, : x.shape[1]] for module, x in inputs_of(source).items()}
    file = calibrate(tmp_path / "c.safetensors", source, "full", inputs)
    options = ("--format", format, "--calibration", file)
    quantize(source, tmp_path / "gptq", *options, "--method", "gptq")
    quantize(source, tmp_path / "importance", *options, "--scale-rule", "importance")
    quantize(source, tmp_path / "mse", *options, "--scale-rule", "mse")
    found = [read_folder(tmp_path / name) for name in ("gptq", "importance", "mse")]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rule_importance_is_that_of_the_codec_with_the_moments_of_each_input(
    format, source, tmp_path
):
    """q, k and v under one amax and the moments that the file has under q's name."""
    file = calibrate(tmp_path / "c.safetensors", source, "diag")
    quantize(
        source,
        tmp_path / "out",
        "--format",
        format,
        "--calibration",
        file,
        "--scale-rule",
        "importance",
        "--dialect",
        DIALECT[format],
    )
    before, after, inputs = read_folder(source), read_folder(tmp_path / "out"), inputs_of(source)
    weights = {
        leaf: values_of(before[f"{QUERY[:-6]}{leaf}.weight"]).astype(np.float32)
        for leaf in ("q_proj", "k_proj", "v_proj")
    }
    amax = max(float(np.abs(w).max()) for w in weights.values())
    moments = (inputs[QUERY].astype(np.float64) ** 2).mean(0).astype(np.float32)
    for leaf, w in weights.items():
        expected = codec.quantize(w, format_named(format), "importance", amax, moments)
        name = f"{QUERY[:-6]}{leaf}.{'weight' if format == 'nvfp4' else 'weight_packed'}"
        assert after[name][2] == bytes(expected.packed)
        assert after[f"{QUERY[:-6]}{leaf}.weight_scale"][2] == bytes(expected.block_scales)


def test_gptq_is_that_of_the_algebra_under_scales_by_importance(source, tmp_path):
    """One layer, by hand: block scales of the codec, codes of the paper's algorithm in float64."""
    gptq_of(source, tmp_path, "--passes", 0)
    before, after, x = (
        read_folder(source),
        read_folder(tmp_path / "gptq"),
        inputs_of(source)[DOWN].astype(np.float64),
    )
    w = values_of(before[f"{DOWN}.weight"]).astype(np.float32)
    h = (x.T @ x / len(x)).astype(np.float32)
    scaled = codec.quantize(w, NVFP4, "importance", None, np.diag(h))
    assert after[f"{DOWN}.weight_scale"][2] == bytes(scaled.block_scales)
    steps = codec.block_steps(scaled).reshape(len(w), -1)
    expected = gptq_by_the_paper(w, h.astype(np.float64), steps)
    found = codec.unpack(
        np.frombuffer(after[f"{DOWN}.weight_packed"][2], np.uint8).reshape(len(w), -1)
    )
    assert np.mean(found == expected) > 0.999


def held(values):
    """Weights in memory."""
    return InMemory(Matrix(values.reshape(-1).view(np.uint8).data, "F32", values.shape))


def panels_of(target, weights, fmt, calibration):
    """Panels of one matrix, rounded by the method of a target."""
    tools = Tools(
        open_source(str(calibration.path.parent / "source")), open_backend("cpu"), calibration
    )
    group, method = Group([weights], [weights], [DOWN], fmt), method_for(target, fmt)
    return [q for _, q in method.panels(group, tools, method.under(group, tools))]


def test_errors_are_those_of_the_codes_that_are_written(source, tmp_path, monkeypatch):
    """In panels: what the report will say is measured after GPTQ, not before."""
    monkeypatch.setattr(gptq, "PANEL_ELEMENTS", 20 * 128)
    file = calibrate(tmp_path / "c.safetensors", source)
    calibration = open_calibration(file)
    target = Target("nvfp4", None, "importance", method="gptq", calibration=calibration.sha256)
    w = np.random.default_rng(3).standard_normal((50, 128), dtype=np.float32)
    panels = panels_of(target, held(w), NVFP4, calibration)
    assert [q.shape[0] for q in panels] == [20, 20, 10]
    noise = sum(
        np.frombuffer(q.compared.rows, np.float64).reshape(-1, 5)[:, 1].sum() for q in panels
    )
    values = np.concatenate([codec.dequantize(q) for q in panels])
    assert noise == pytest.approx(np.sum((values - w.astype(np.float64)) ** 2), rel=1e-6)
    counts = sum(np.frombuffer(q.compared.counts, np.int64) for q in panels)
    codes = np.concatenate(
        [codec.unpack(np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1)) for q in panels]
    )
    assert counts.tolist() == np.bincount(codes.ravel(), minlength=16).tolist()


def test_under_factors_moments_are_those_of_the_inputs_that_arrive(source, tmp_path):
    """A fold multiplies columns, and its inputs are divided: importance sees both."""
    factors = np.exp(np.random.default_rng(4).normal(0, 1, 128)).astype(np.float32)
    fold = Folding("m", "k", (), lambda source: Factors(factors, factors))
    w = np.random.default_rng(3).standard_normal((8, 128), dtype=np.float32)
    calibration = open_calibration(calibrate(tmp_path / "c.safetensors", source))
    scaled = Scaled(held(w), open_source(str(source)), fold, None)
    target = Target("mxfp4", None, "importance", method="awq", calibration=calibration.sha256)
    (found,) = panels_of(target, scaled, MXFP4, calibration)
    moments = (calibration.moments(DOWN) / np.square(factors)).astype(np.float32)
    expected = codec.quantize(w * factors, MXFP4, "importance", None, moments)
    assert (bytes(found.packed), bytes(found.block_scales)) == (
        bytes(expected.packed),
        bytes(expected.block_scales),
    )


def test_weights_lose_by_design_and_verify_and_inspect_find_nothing(source, tmp_path):
    document = gptq_of(source, tmp_path)
    assert document["method"] == "gptq"
    quantize(source, tmp_path / "rtn")
    verified = run("verify", tmp_path / "gptq", "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    nearest = run("verify", tmp_path / "rtn", "--source", source, "--json").json
    assert verified.json["summary"]["sqnr_db_mean"] < nearest["summary"]["sqnr_db_mean"] - 1
    inspected = run("inspect", tmp_path / "gptq", "--source", source, "--full", "--json")
    assert (
        inspected.code,
        [found for found in inspected.json["findings"] if found["level"] == "error"],
    ) == (0, [])


def test_a_person_is_told_the_method(source, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    words = ("--format", "mxfp4", "-o", tmp_path / "out", "--calibration", file, "--method", "gptq")
    outcome = run("quantize", source, *words)
    assert "method gptq" in outcome.out
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert record["method"] == "gptq"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("gram", ["full", "block:128"])
def test_the_same_bytes_from_any_workers_any_process_and_parts(format, gram, source, tmp_path):
    options = ("--format", format)
    file = calibrate(tmp_path / "c.safetensors", source, gram)
    command = ("quantize", source, *options, "--calibration", file, "--method", "gptq", "--json")
    digests = {
        run(*command, "-o", tmp_path / str(n), "--workers", n).json["digest"] for n in (1, 2, 5)
    }
    digests.add(run_alone(*command, "-o", tmp_path / "alone", seconds=120).json["digest"])
    for index in (0, 1):
        assert (
            run(*command, "-o", tmp_path / "parts", "--num-shards", 2, "--shard-index", index).code
            == 0
        )
    digests.add(run("merge", tmp_path / "parts", "--json").json["digest"])
    assert len(digests) == 1


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path):
    """Stopped in the middle, and the same command ends it with the bytes of a run that nobody
    stopped.
    """
    shards = {
        f"part-{number}.safetensors": {
            f"model.layers.{number}.mlp.down_proj.weight": (
                "F32",
                (256, 512),
                random_bytes(256, 512, number),
            )
        }
        for number in range(12)
    }
    source = write_checkpoint(tmp_path / "source", shards)
    file = calibrate(tmp_path / "c.safetensors", source)
    command = (
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--calibration",
        file,
        "--method",
        "gptq",
        "--workers",
        1,
    )
    with start(*command, "-o", tmp_path / "out") as process:
        while process.poll() is None and not list((tmp_path / "out").glob("*.safetensors")):
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130
    assert run(*command, "-o", tmp_path / "out").code == 0
    assert run(*command, "-o", tmp_path / "whole").code == 0
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")


def random_bytes(rows: int, columns: int, seed: int) -> bytes:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32).tobytes()


EXPERTS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64}


def stack(*shape: int, seed: int) -> tuple[str, tuple[int, ...], bytes]:
    from checkpoints import bf16

    return "BF16", shape, bf16(*shape, seed=seed)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "gpt-oss"])
def test_experts_in_stacks_have_statistics_of_their_own(dialect, tmp_path):
    """gpt-oss' stacks lie transposed, gate and up in turns; written as modules, and as stacks whose
    rows take turns again.
    """
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj": stack(2, 64, 192, seed=1),
        f"{experts}.down_proj": stack(2, 96, 64, seed=2),
    }
    source = write_single(tmp_path / "source", tensors, EXPERTS)
    inputs = {
        f"{experts}.{n}.{leaf}": correlated(64 if leaf != "down_proj" else 96, seed=n)
        for n in (0, 1)
        for leaf in LEAVES
    }
    file = calibrate(tmp_path / "c.safetensors", source, "full", inputs)
    errors = []
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        options = ("--calibration", file, "--method", method, "--dialect", dialect)
        outcome = run("quantize", source, "--format", "mxfp4", "-o", out, *options)
        assert outcome.code == 0, outcome.err
        plain = tmp_path / f"{method}-plain"
        assert run("dequantize", out, "-o", plain, "--dtype", "fp32").code == 0
        errors.append(expert_errors(tensors, read_folder(plain), experts, inputs))
    assert all(after < 0.75 * before for before, after in zip(*errors, strict=True)), errors


LEAVES = ("gate_proj", "up_proj", "down_proj")


def expert_errors(tensors, after, experts, inputs):
    """Squared errors of the outputs of both experts' gate, up and down."""
    gate_up, down = (
        values_of(tensors[f"{experts}.{leaf}"]) for leaf in ("gate_up_proj", "down_proj")
    )
    if f"{experts}.gate_up_proj" in after:
        wide, narrow = (
            values_of(after[f"{experts}.{leaf}"]) for leaf in ("gate_up_proj", "down_proj")
        )
        found = {
            (n, leaf): (wide[n, :, at::2].T, narrow[n].T)[leaf == "down_proj"]
            for n in (0, 1)
            for at, leaf in enumerate(LEAVES)
        }
    else:
        found = {
            (n, leaf): values_of(after[f"{experts}.{n}.{leaf}.weight"])
            for n in (0, 1)
            for leaf in LEAVES
        }
    true = {
        (n, leaf): (gate_up[n, :, at::2].T, down[n].T)[leaf == "down_proj"]
        for n in (0, 1)
        for at, leaf in enumerate(LEAVES)
    }
    return [
        float(np.sum((inputs[f"{experts}.{n}.{leaf}"] @ (found[n, leaf] - true[n, leaf]).T) ** 2))
        for n, leaf in true
    ]


def test_what_is_fp8_already_is_rounded_as_floats_are(tmp_path):
    """A matrix of E4M3 codes under one scale, whose values are known."""
    import ml_dtypes

    codes = np.random.default_rng(0).standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {
        f"{DOWN}.weight": ("F8_E4M3", (32, 64), codes.tobytes()),
        f"{DOWN}.weight_scale": ("F32", (1,), np.float32([0.5]).tobytes()),
    }
    record = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    config = {
        "model_type": "llama",
        "quantization_config": {**record, "config_groups": {"group_0": group}},
    }
    source = write_single(tmp_path / "source", tensors, config)
    x = correlated(64)
    file = calibrate(tmp_path / "c.safetensors", source, "full", {DOWN: x})
    errors = []
    for method in ("rtn", "gptq"):
        quantize(source, tmp_path / method, "--calibration", file, "--method", method)
        values = artifact_values(read_folder(tmp_path / method), DOWN, "compressed-tensors")
        errors.append(np.sum((x @ (values - 0.5 * codes.astype(np.float64)).T) ** 2))
    assert errors[1] < 0.75 * errors[0]


def test_blocks_that_are_taken_over_are_a_warning(source, tmp_path):
    quantize(source, tmp_path / "first", "--exclude", DOWN)
    file = calibrate(tmp_path / "c.safetensors", tmp_path / "first", inputs=inputs_of(source))
    plan = quantize(
        tmp_path / "first", tmp_path / "out", "--calibration", file, "--method", "gptq", "--dry-run"
    )
    assert any(
        "--method gptq changes nothing for 6 modules" in warning for warning in plan["warnings"]
    )


def test_the_plan_counts_the_memory_of_gram_matrices(source, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source)
    plans = [
        quantize(
            source,
            tmp_path / "out",
            "--calibration",
            file,
            "--method",
            method,
            "--dry-run",
            "--workers",
            1,
        )
        for method in ("rtn", "gptq")
    ]
    assert (
        plans[1]["peak_memory_bytes"] - plans[0]["peak_memory_bytes"]
        == 16 * (8 << 20) + 20 * 128 * 128
    )
    assert any("gptq takes longer" in warning for warning in plans[1]["warnings"])


def test_workers_are_as_many_as_memory_holds(source, tmp_path, monkeypatch):
    calibration = open_calibration(calibrate(tmp_path / "c.safetensors", source))
    cpu = open_backend("cpu")
    need = 16 * (8 << 20) + 20 * 128 * 128
    for memory, expected in ((100 * need, cpu.threads), (2 * need, 1), (need // 2, 1)):
        monkeypatch.setattr(table, "memory_nbytes", lambda memory=memory: memory)
        target = Target("nvfp4", method="gptq", calibration=calibration.sha256)
        assert table.callers(target, cpu, calibration) == expected


def test_gptq_without_a_file_is_refused(source, tmp_path):
    error = refused(source, tmp_path, "--method", "gptq")
    assert (error["code"], "fp4convert calibrate" in error["next"]) == ("no-calibration", True)


def test_a_file_without_gram_matrices_is_refused(source, tmp_path):
    error = refused(
        source,
        tmp_path,
        "--method",
        "gptq",
        "--calibration",
        calibrate(tmp_path / "c.safetensors", source, "diag"),
    )
    assert (error["code"], "--method rtn" in error["next"]) == ("no-gram", True)


@pytest.mark.parametrize("kind", ["input_gram", "input_sq_mean", "input_channel_amax"])
def test_a_linear_layer_that_the_file_lacks_is_named(kind, source, tmp_path):
    file = calibrate(tmp_path / "c.safetensors", source, **{f"{DOWN}.{kind}": None})
    error = refused(source, tmp_path, "--method", "gptq", "--calibration", file)
    assert (error["code"], DOWN in error["message"]) == ("calibration-missing", True)
    quantize(source, tmp_path / "out", "--method", "gptq", "--calibration", file, "--exclude", DOWN)


def test_statistics_that_are_nan_are_refused(source, tmp_path):
    file = calibrate(
        tmp_path / "c.safetensors",
        source,
        **{f"{GATE}.input_sq_mean": np.full(64, np.nan, np.float32)},
    )
    error = refused(source, tmp_path, "--method", "gptq", "--calibration", file)
    assert (error["code"], GATE in error["message"]) == ("calibration-values", True)


def test_gram_matrices_that_are_none_end_the_run_without_a_record(source, tmp_path):
    """Found in the work, as weights that are NaN are: other shards are finished, one sentence tells
    of all, nothing loads it.
    """
    bad = {}
    for module in (
        DOWN,
        GATE,
    ):  # moments are right, each pair of columns can be, all together cannot
        roots = np.sqrt(np.square(inputs_of(source)[module].astype(np.float64)).mean(0))
        matrix = np.outer(roots, roots) * (1.9 * np.eye(len(roots)) - 0.9)
        bad[f"{module}.input_gram"] = matrix.astype(np.float32)[None]
    file = calibrate(tmp_path / "c.safetensors", source, **bad)
    out = tmp_path / "out"
    words = ("--format", "nvfp4", "-o", out, "--method", "gptq", "--calibration", file, "--json")
    outcome = run("quantize", source, *words)
    assert outcome.code == 2
    error = outcome.json["error"]
    assert (error["code"], error["tensor"]) == ("calibration-gram", DOWN)
    assert f"matrix of {DOWN} is not positive definite" in error["message"]
    assert error["message"].endswith(f"; the same for 1 more, the last {GATE}")
    assert "\n" not in error["message"]
    assert "Calibrate again" in error["next"]
    assert not (out / "quantization_config.json").exists()
    assert (out / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_scale_is_still_found_beside_the_source(factor, source, tmp_path):
    """The global scale of one module is another: what GPTQ does to weights does not hide it."""
    gptq_of(source, tmp_path)
    for shard in (tmp_path / "gptq").glob("*.safetensors"):
        tensors = read_shard(shard)
        if f"{DOWN}.weight_global_scale" in tensors:
            dtype, shape, data = tensors[f"{DOWN}.weight_global_scale"]
            tensors[f"{DOWN}.weight_global_scale"] = (
                dtype,
                shape,
                (factor * np.frombuffer(data, "<f4")).astype("<f4").tobytes(),
            )
            shard.write_bytes(pack_shard(tensors))
    found = run("inspect", tmp_path / "gptq", "--source", source, "--json").json["findings"]
    assert ("scale-factor", DOWN) in [(one["code"], one["tensor"]) for one in found]
