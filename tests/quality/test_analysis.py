"""analyze: its numbers beside torchao's quantizers and plain torch, its sample's bytes on a Hub,
and what it refuses.
"""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from calibrations import statistics_of, write_calibration
from checkpoints import (
    FIRST,
    LAYER,
    SECOND,
    bf16,
    read_folder,
    run,
    values_of,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

from fp4convert.storage.open import open_source

DOWN, Q = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def study(source: object, *options: object) -> dict:
    outcome = run("analyze", source, *options, "--json", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.json


def numbers(ways: list[dict]) -> dict[tuple, tuple[float, float]]:
    """(format, rule, block) -> SQNR, output error."""
    return {(w["format"], w["rule"], w["block"]): (w["sqnr_db"], w["output_error"]) for w in ways}


def of_kind(document: dict, short: str) -> dict:
    (found,) = [kind for kind in document["kinds"] if kind["kind"] == short]
    return found


@pytest.fixture
def matrix(tmp_path) -> Path:
    """A checkpoint of one matrix with columns of very different sizes."""
    values = np.random.default_rng(1).standard_normal((96, 128)) * np.geomspace(0.01, 1, 128)
    data = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return write_single(tmp_path / "m", {f"{DOWN}.weight": ("BF16", (96, 128), data)})


def stored(folder: Path) -> np.ndarray:
    return values_of(read_folder(folder)[f"{DOWN}.weight"])


def nearest(q: np.ndarray) -> np.ndarray:
    """The nearest E2M1 value of every quotient."""
    return E2M1[np.abs(np.abs(q)[..., None] - E2M1).argmin(-1)] * np.sign(q)


def sqnr_db(w: np.ndarray, v: np.ndarray) -> float:
    return float(10 * np.log10((w**2).sum() / ((w - v) ** 2).sum()))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    ("rule", "mode"), [("floor", "FLOOR"), ("even", "EVEN"), ("ceil", "RCEIL")]
)
def test_mxfp4_rows_are_torchaos(matrix, rule, mode, block):
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    w = torch.tensor(stored(matrix), dtype=torch.float32)
    v = MXTensor.to_mx(w, torch.float4_e2m1fn_x2, block, ScaleCalculationMode[mode]).dequantize(
        torch.float32
    )
    found = numbers(study(matrix)["ways"])["mxfp4", rule, block]
    assert found == pytest.approx(
        (sqnr_db(w.double().numpy(), v.double().numpy()), (w - v).norm().item() / w.norm().item())
    )


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_nvfp4_row_is_torchaos(matrix):
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    w = torch.tensor(stored(matrix), dtype=torch.float32)
    v = NVFP4Tensor.to_nvfp4(
        w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max())
    ).dequantize(torch.float32)
    found = numbers(study(matrix)["ways"])["nvfp4", "amax", 16]
    assert found[0] == pytest.approx(sqnr_db(w.double().numpy(), v.double().numpy()), abs=0.01)


@pytest.mark.parametrize("block", [32, 64])
def test_nvfp4_of_larger_blocks_for_study_is_its_formula(matrix, block):
    w = stored(matrix)
    step = np.abs(w).max() / 2688
    blocks = w.reshape(96, -1, block)
    scales = (
        (np.abs(blocks).max(-1, keepdims=True) / 6 / step)
        .astype(np.float32)
        .astype(ml_dtypes.float8_e4m3fn)
        .astype(float)
    )
    q = blocks / (scales * step)
    v = (nearest(q) * scales * step).reshape(w.shape)
    assert numbers(study(matrix)["ways"])["nvfp4", "amax", block][0] == pytest.approx(
        sqnr_db(w, v), abs=0.02
    )


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_no_scale_at_all_loses_less_than_rule_mse(matrix, fmt, block):
    """Every E4M3 code, or every power of two, tried on every block, in float64."""
    w = stored(matrix)
    blocks = w.reshape(-1, block)
    codes = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    steps = codes * np.abs(w).max() / 2688 if fmt == "nvfp4" else 2.0 ** np.arange(-30, 6)
    errors = [((blocks - nearest(blocks / step) * step) ** 2).sum(-1) for step in steps]
    least = 10 * math.log10((w**2).sum() / np.min(errors, axis=0).sum())
    assert numbers(study(matrix)["ways"])[fmt, "mse", block][0] == pytest.approx(least, abs=1e-3)


@pytest.mark.engine
def test_fp8_and_bf16_rows_are_torchs(matrix, tmp_path):
    import torch

    w = torch.tensor(stored(matrix), dtype=torch.float32)
    found = numbers(study(matrix)["ways"])
    for block, amax in (("row", w.abs().amax(1, keepdim=True)), ("tensor", w.abs().max())):
        v = (w / (amax / 448)).to(torch.float8_e4m3fn).float() * (amax / 448)
        assert found["fp8", "amax", block][0] == pytest.approx(
            sqnr_db(w.double().numpy(), v.double().numpy()), abs=1e-3
        )
    assert found["bf16", None, None] == (None, 0.0)
    wide = np.random.default_rng(2).standard_normal((32, 64), np.float32)
    source = write_single(tmp_path / "fp32", {"a.weight": ("F32", (32, 64), wide.tobytes())})
    v = torch.tensor(wide).bfloat16().double().numpy()
    assert numbers(study(source)["ways"])["bf16", None, None][0] == pytest.approx(
        sqnr_db(wide.astype(float), v)
    )


def restored(folder: Path, out: Path, *options: object) -> np.ndarray:
    """The values of the matrix in an artifact of the command, read by it and by safetensors."""
    assert run("quantize", folder, *options, "-o", out / "q", "-q").code == 0
    assert run("dequantize", out / "q", "-o", out / "w", "--dtype", "fp32", "-q").code == 0
    return stored(out / "w")


@pytest.mark.parametrize("gram", ["diag", "block:32", "full"])
def test_output_errors_with_a_calibration_are_those_of_its_inputs(matrix, tmp_path, gram):
    """Inputs drawn here, with columns that go together: |(W - V) X| / |W X| over these inputs."""
    draw = np.random.default_rng(3)
    x = (draw.standard_normal((512, 128)) @ draw.standard_normal((128, 128))) * np.geomspace(
        8, 0.1, 128
    )
    block = {"diag": 0, "block:32": 32, "full": 128}[gram]
    source = open_source(str(matrix))
    file = write_calibration(
        tmp_path / "c.safetensors", source, statistics_of(DOWN, x, block), gram=gram
    )
    w, v = stored(matrix), restored(matrix, tmp_path, "--format", "mxfp4", "--scale-rule", "even")
    if gram == "full":
        expected = np.linalg.norm((w - v) @ x.T) / np.linalg.norm(w @ x.T)
    elif gram == "diag":
        expected = np.sqrt(
            (((w - v) ** 2) @ (x * x).mean(0)).sum() / ((w**2) @ (x * x).mean(0)).sum()
        )
    else:
        parts = [np.s_[:, first : first + 32] for first in range(0, 128, 32)]
        noise = sum(np.linalg.norm((w - v)[part] @ x[part].T) ** 2 for part in parts)
        expected = np.sqrt(noise / sum(np.linalg.norm(w[part] @ x[part].T) ** 2 for part in parts))
    document = study(matrix, "--calibration", file)
    assert document["inputs"] == f"calibration, gram {gram}"
    sqnr, output = numbers(document["ways"])["mxfp4", "even", 32]
    assert output == pytest.approx(expected, rel=1e-4)
    assert sqnr == pytest.approx(sqnr_db(w, v), abs=1e-4)
    assert abs(output - 10 ** (-sqnr / 20)) > 0.005  # these inputs are not those of no calibration


def test_the_rule_importance_is_there_with_a_calibration_and_loses_least_by_it(matrix, tmp_path):
    x = np.random.default_rng(8).standard_normal((64, 128)) * np.geomspace(9, 0.05, 128)
    file = write_calibration(
        tmp_path / "c.safetensors", open_source(str(matrix)), statistics_of(DOWN, x)
    )
    assert not [way for way in study(matrix)["ways"] if way["rule"] == "importance"]
    found = numbers(study(matrix, "--calibration", file)["ways"])
    for fmt in ("nvfp4", "mxfp4"):
        for block in (16, 32, 64):
            others = [
                output
                for (f, rule, b), (_, output) in found.items()
                if (f, b) == (fmt, block) and rule != "importance"
            ]
            assert found[fmt, "importance", block][1] < min(others)


def test_without_a_calibration_the_output_error_is_that_of_gaussian_inputs(matrix, tmp_path):
    w, v = stored(matrix), restored(matrix, tmp_path, "--format", "mxfp4", "--scale-rule", "even")
    x = np.random.default_rng(4).standard_normal((128, 20_000))
    drawn = np.linalg.norm((w - v) @ x) / np.linalg.norm(w @ x)
    assert numbers(study(matrix)["ways"])["mxfp4", "even", 32][1] == pytest.approx(drawn, rel=0.01)


def test_kinds_have_their_own_rows_and_the_whole_is_weighted_by_their_weights(tmp_path):
    source = write_llama(tmp_path / "m")
    document = study(source)
    keys = "kind modules matrices weights sampled_matrices sampled_weights ways"
    assert document["kinds"][0].keys() >= set(keys.split())
    assert {kind["kind"]: (kind["matrices"], kind["weights"]) for kind in document["kinds"]} == {
        "q_proj": (1, 2048),
        "k_proj": (1, 1024),
        "v_proj": (1, 1024),
        "o_proj": (1, 2048),
        "gate_proj": (1, 8192),
        "up_proj": (1, 8192),
        "down_proj": (1, 8192),
    }
    assert document["weights"] == document["sampled_weights"] == 30720
    assert document["matrices"] == 7
    for key, (sqnr, output) in numbers(document["ways"]).items():
        each = [(kind["weights"], *numbers(kind["ways"])[key]) for kind in document["kinds"]]
        nmse = sum(n * 10 ** (-s / 10) for n, s, _ in each if s is not None) / 30720
        assert sqnr == (pytest.approx(-10 * math.log10(nmse)) if nmse else None)
        assert output == pytest.approx(math.sqrt(sum(n * o * o for n, _, o in each) / 30720))


def test_matrices_of_a_kind_count_the_same_whatever_their_size_and_scale(tmp_path):
    """A matrix a thousand times larger in its values has no more say than another."""
    rows, values = {0: 32, 1: 96}, {}
    for layer, height in rows.items():
        drawn = (
            np.random.default_rng(layer).standard_normal((height, 64)) ** (1 + 2 * layer)
            * 1000.0**layer
        )
        values[f"layers.{layer}.down_proj.weight"] = (
            "F32",
            (height, 64),
            drawn.astype(np.float32).tobytes(),
        )
    alone = [
        numbers(study(write_single(tmp_path / name, {name: tensor}))["ways"])
        for name, tensor in values.items()
    ]
    (kind,) = study(write_single(tmp_path / "both", values))["kinds"]
    for key, (sqnr, output) in numbers(kind["ways"]).items():
        ratios = [10 ** (-each[key][0] / 10) for each in alone]
        assert sqnr == pytest.approx(-10 * math.log10(sum(ratios) / 2))
        assert output == pytest.approx(math.sqrt(sum(each[key][1] ** 2 for each in alone) / 2))


def test_bits_per_weight_count_every_scale(tmp_path):
    document = study(write_llama(tmp_path / "m"))
    bits = {
        (w["format"], w["block"]): w["bits_per_weight"] for w in of_kind(document, "q_proj")["ways"]
    }
    assert bits["nvfp4", 16] == 4.5 + 32 / 2048
    assert (bits["mxfp4", 32], bits["mxfp4", 64]) == (4.25, 4.125)
    assert (bits["fp8", "row"], bits["fp8", "tensor"]) == (8 + 32 * 32 / 2048, 8 + 32 / 2048)
    assert bits["bf16", None] == 16
    studied = {(w["format"], w["block"]) for w in document["ways"] if w["for_study"]}
    assert studied == {("nvfp4", 32), ("nvfp4", 64), ("mxfp4", 16), ("mxfp4", 64)}


def test_the_advice_says_what_the_numbers_say(tmp_path):
    """down_proj has outliers in every block, and nothing else does."""
    draw = np.random.default_rng(5)
    tensors = {
        f"{LAYER}.self_attn.{leaf}_proj.weight": weight(number, 64, 64)
        for number, leaf in enumerate("qkvo")
    }
    between = draw.choice([0.24, -0.24], (64, 64))
    between[:, ::16] = 6  # beside which they become 0, whatever the rule
    data = (between.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    source = write_single(tmp_path / "m", {**tensors, f"{DOWN}.weight": ("BF16", (64, 64), data)})
    document = study(source)
    advice, ways = document["recommendation"], numbers(document["ways"])
    used = {
        key: output
        for key, (_, output) in ways.items()
        if key[2] == {"nvfp4": 16, "mxfp4": 32}.get(key[0], 0)
    }
    best = min(used, key=used.get)
    assert (advice["format"], advice["rule"]) == best[:2]
    assert f"{best[0]} with rule {best[1]}, {100 * used[best]:.2f} %" in advice["words"][0]
    (kind,) = advice["kinds"]
    assert (kind["kind"], kind["modules"]) == ("down_proj", "model.layers.*.mlp.down_proj")
    assert kind["bf16_bits_per_weight"] == pytest.approx(
        (4 * (4096 * 4.5 + 32) + 16 * 4096) / (5 * 4096)
    )
    times = kind["output_error"] / used[best]
    assert any(
        f"down_proj loses {100 * kind['output_error']:.2f} %, {times:.2f} times the whole" in line
        for line in advice["words"]
    )
    drawn = run("analyze", source, "-q").out
    assert all(line in " ".join(drawn.split()) for line in advice["words"])
    assert (
        run(
            "quantize", source, "--format", "nvfp4", "--exclude", kind["modules"], "--dry-run", "-q"
        ).out.count("excluded")
        == 1
    )


def test_a_sample_is_close_to_the_whole_and_the_same_each_time(tmp_path):
    source = write_single(
        tmp_path / "m", {f"layers.{n}.down_proj.weight": weight(n, 256, 512) for n in range(12)}
    )
    whole, part = study(source), study(source, "--sample", 0.0003)
    assert part["sampled_bytes"] <= 300_000 < whole["sampled_bytes"]
    assert part == study(source, "--sample", 0.0003)
    for key, (sqnr, _) in numbers(whole["ways"]).items():
        assert numbers(part["ways"])[key][0] == (
            sqnr if sqnr is None else pytest.approx(sqnr, abs=0.1)
        )


def test_from_a_hub_the_sampled_rows_alone_are_read(hub, tmp_path):
    shards = {
        file: {
            f"model.layers.{n}.mlp.{leaf}.weight": weight(n, 2048, 512)
            for leaf in ("up_proj", "down_proj")
        }
        for n, file in enumerate((FIRST, SECOND))
    }
    folder = write_checkpoint(tmp_path / "m", shards)
    hub.add("org/model", folder)
    document = study("org/model", "--sample", 0.002)
    assert document == {**study(folder, "--sample", 0.002), "source": document["source"]}
    seen = [each for each in hub.seen if each.where == "storage"]
    ranges = {(each.path.partition("?")[0], each.range) for each in seen}
    heads = 2 * (32 << 10)
    places = [text.removeprefix("bytes=").split("-") for _, text in ranges]
    read = sum(int(last) - int(first) + 1 for first, last in places)
    assert document["sampled_bytes"] <= read <= document["sampled_bytes"] + heads
    assert 1_900_000 < document["sampled_bytes"] <= 2_000_000


def test_fp8_sources_are_measured_by_the_values_of_their_codes(tmp_path):
    codes = np.random.default_rng(6).integers(0, 0x60, (64, 128), np.uint8)
    scales = np.array([0.5, 0.25], np.float32)
    record = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    tensors = {
        f"{DOWN}.weight": ("F8_E4M3", (64, 128), codes.tobytes()),
        f"{DOWN}.weight_scale_inv": ("F32", (1, 2), scales.tobytes()),
    }
    packed = write_single(tmp_path / "fp8", tensors, {"model_type": "llama", **record})
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(scales, 64)
    floats = {f"{DOWN}.weight": ("F32", (64, 128), values.astype(np.float32).tobytes())}
    plain = write_single(tmp_path / "fp32", floats)
    document = study(packed)
    assert document["ways"] == study(plain)["ways"]
    assert "packed already" in document["warnings"][0]


def test_progress_and_json_go_their_ways(tmp_path):
    outcome = run("analyze", write_llama(tmp_path / "m"))
    assert outcome.code == 0
    assert "output error of every kind" in outcome.out
    assert not {"{", "}"} & set(outcome.out)


def refused(*arguments: object) -> dict:
    outcome = run("analyze", *arguments, "--json")
    assert outcome.code == 2, outcome
    assert json.loads(outcome.out)["error"]["message"].count("\n") == 0
    return outcome.json["error"]


def test_bad_input_is_one_sentence(tmp_path):
    source = write_llama(tmp_path / "m")
    for sample in (0, -1, "nan", "inf", 1e300):
        assert refused(source, "--sample", sample)["code"] == "sample-size"
    assert "expected at least" in refused(source, "--sample", 1e-7)["message"]
    error = refused(source, "--exclude", "*")
    assert (error["code"], "--include 'PATTERN'" in error["next"]) == ("no-linears", True)
    assert refused(tmp_path / "none")["code"] == "no-source"
    assert refused(source, "--calibration", tmp_path / "none")["code"] == "calibration-file"
    assert refused(source, "--recipe", "none")["exit"] == 2
    other = write_single(tmp_path / "other", {f"{DOWN}.weight": weight(1)})
    statistics = statistics_of(DOWN, np.ones((4, 64)))
    file = write_calibration(tmp_path / "c.safetensors", open_source(str(other)), statistics)
    assert refused(source, "--calibration", file)["code"] == "calibration-model"
    file = write_calibration(
        tmp_path / "d.safetensors", open_source(str(source)), statistics_of(DOWN, np.ones((4, 128)))
    )
    assert refused(source, "--calibration", file)["code"] == "calibration-missing"


def test_weights_that_are_nan_are_named(tmp_path):
    data = bytearray(bf16(32, 64))
    data[100:102] = (0x7FC0).to_bytes(2, "little")
    source = write_single(
        tmp_path / "m",
        {f"{Q}.weight": weight(1), f"{DOWN}.weight": ("BF16", (32, 64), bytes(data))},
    )
    error = refused(source)
    assert (error["code"], error["tensor"]) == ("not-finite", f"{DOWN}.weight")
    option = error["next"].removeprefix("Leave it out: ").removesuffix(".").split()
    assert study(source, *option)["matrices"] == 1
