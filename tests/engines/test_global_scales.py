"""--global-scale with stacks, methods, FP8 on the way and several processes: ModelOpt makes the
same bytes under the same scales.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    Outcome,
    read_folder,
    run,
    start,
    values_of,
    write_llama,
    write_single,
)
from folded_llama import INPUTS, LAYER, READERS, calibrated, stored_weights, write_source
from gptq_reference import gptq_by_the_paper

from fp4convert.conversion.ray_workers import options_for_nodes, work_on_node
from fp4convert.execution.settings import Result
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

BEGINNING = f"{LAYER}."
EXPERTS, HIDDEN, COUNT = f"{LAYER}.mlp.experts", 64, 3
FACTORS = (0.5, 2.0)  # of the scales that a run measures: weights saturate, or use little of it
Scales = dict[str, float]


def modelopt_parts(weights: np.ndarray, multiplier: float) -> tuple[bytes, bytes]:
    """ModelOpt's codes and block scales under that global scale."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x, whole = torch.from_numpy(weights), torch.tensor(multiplier, dtype=torch.float32)
    block_scales, _ = NVFP4QTensor.get_weights_scaling_factor(x, 16, whole)
    packed, _, _ = NVFP4QTensor.quantize(x, 16, block_scales, whole)
    return packed._quantized_data.numpy().tobytes(), block_scales.view(
        torch.uint8
    ).numpy().tobytes()


def files_of(made: Outcome) -> dict[str, str]:
    """The hashes of all files but the record, which says by which options they were made."""
    record = Path(made.json["output"], "quantization_config.json")
    return json.loads(record.read_text())["files"]


def quantize(source: Path, out: Path, *options: object) -> Outcome:
    words = ("--format", "nvfp4", "--scale-rule", "amax", "--dialect", "modelopt", "-o", out)
    outcome = run("quantize", source, *words, "--json", *options)
    assert outcome.code == 0, outcome
    return outcome


def scales_of(folder: Path) -> Scales:
    """Every module's multiplier, as the artifact has it."""
    stored = read_folder(folder)
    return {
        name.removesuffix(".weight_scale_2"): float(np.frombuffer(tensor[2], np.float32)[0])
        for name, tensor in stored.items()
        if name.endswith(".weight_scale_2")
    }


def write_scales(path: Path, scales: Scales) -> tuple[str, Path]:
    path.write_text(json.dumps(scales))
    return "--global-scale", path


def check_modelopts(folder: Path, weights: Mapping[str, np.ndarray], scales: Scales) -> None:
    """Codes and scales of every module are ModelOpt's."""
    stored = read_folder(folder)
    assert scales_of(folder) == scales
    for module, multiplier in scales.items():
        codes, block_scales = modelopt_parts(weights[module], multiplier)
        assert stored[f"{module}.weight"][2] == codes, module
        assert stored[f"{module}.weight_scale"][2] == block_scales, module


def multiplied(scales: Scales, factor: float) -> Scales:
    return {module: float(np.float32(factor * one)) for module, one in scales.items()}


def stacked(order: str, rows: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Stacks of experts, and the matrix of every module in them, taken apart here."""
    random, weights = np.random.default_rng(0), {}
    tensors: dict[str, Any] = {}
    for name, members in (
        ("gate_up_proj", ("gate_proj", "up_proj")),
        ("down_proj", ("down_proj",)),
    ):
        height = len(members) * HIDDEN
        values = random.standard_normal((COUNT, height, HIDDEN)).astype(np.float32)
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        for expert in range(COUNT):
            for number, member in enumerate(members):
                part = slice(number, None, len(members))
                if rows == "concatenated":
                    part = slice(number * HIDDEN, (number + 1) * HIDDEN)
                weights[f"{EXPERTS}.{expert}.{member}"] = np.ascontiguousarray(values[expert, part])
        stored = values if order == "out_in" else np.ascontiguousarray(values.transpose(0, 2, 1))
        bits = (stored.view(np.uint32) >> 16).astype(np.uint16)
        tensors[f"{EXPERTS}.{name}"] = ("BF16", stored.shape, bits.tobytes())
    return tensors, weights


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("order", ["out_in", "in_out"])
@pytest.mark.parametrize("rows", ["concatenated", "interleaved"])
@pytest.mark.sweep(3)
def test_every_expert_of_a_stack_gets_its_own_scale(order, rows, factor, tmp_path):
    tensors, weights = stacked(order, rows)
    source = write_single(tmp_path / "m", tensors, {**LLAMA, "hidden_size": HIDDEN})
    options = ("--stack-order", order, "--stack-rows", rows)
    first = quantize(source, tmp_path / "first", *options)
    measured = scales_of(tmp_path / "first")
    assert measured.keys() == weights.keys()
    again = quantize(source, tmp_path / "again", *options, "--global-scale", tmp_path / "first")
    assert files_of(again) == files_of(first)
    scales = multiplied(measured, factor)
    given = write_scales(tmp_path / "scales.json", scales)
    done = quantize(source, tmp_path / "given", *options, *given)
    check_modelopts(tmp_path / "given", weights, scales)
    assert done.json.get("saturated", 0) == (len(weights) if factor < 1 else 0)


@pytest.mark.parametrize("factor", FACTORS)
def test_weights_that_go_through_fp8_get_the_scale_afterwards(factor, tmp_path):
    source, weights = write_source(tmp_path / "m"), {}
    for name, values in stored_weights().items():
        if values.ndim == 2:
            x = torch.from_numpy(values)  # of one block of 128 x 128 at most
            assert max(x.shape) <= 128
            step = x.abs().max() / 448
            weights[BEGINNING + name] = ((x / step).to(torch.float8_e4m3fn).float() * step).numpy()
    first = quantize(source, tmp_path / "first", "--via", "fp8")
    given = ("--via", "fp8", "--global-scale", tmp_path / "first")
    assert files_of(quantize(source, tmp_path / "a", *given)) == files_of(first)
    scales = multiplied(scales_of(tmp_path / "first"), factor)
    given = ("--via", "fp8", *write_scales(tmp_path / "scales.json", scales))
    quantize(source, tmp_path / "given", *given)
    check_modelopts(tmp_path / "given", weights, scales)


def test_folded_weights_get_the_scale(tmp_path):
    """The factors, which the given scales do not change, are told by the norms."""
    source = write_source(tmp_path / "m")
    statistics = calibrated(source, tmp_path / "c.safetensors")
    options = ("--method", "awq", "--calibration", statistics)
    first = quantize(source, tmp_path / "first", *options)
    given = (*options, "--global-scale", tmp_path / "first")
    assert files_of(quantize(source, tmp_path / "a", *given)) == files_of(first)
    scales = multiplied(scales_of(tmp_path / "first"), FACTORS[1])
    given = (*options, *write_scales(tmp_path / "scales.json", scales))
    quantize(source, tmp_path / "given", *given)
    before, after = read_folder(source), read_folder(tmp_path / "given")
    assert scales_of(tmp_path / "given") == scales
    norm = f"{BEGINNING}post_attention_layernorm.weight"
    factors = values_of(before[norm]) / values_of(after[norm])
    assert len(set(factors)) > 1
    # up_proj has a fold of its own before down_proj, too: gate_proj has none but the norm's.
    gate = f"{BEGINNING}mlp.gate_proj"
    weights = (stored_weights()["mlp.gate_proj"] * factors.astype(np.float32)).astype(np.float32)
    codes, block_scales = modelopt_parts(weights, scales[gate])
    assert after[f"{gate}.weight"][2] == codes
    assert after[f"{gate}.weight_scale"][2] == block_scales


@pytest.mark.parametrize(
    ("before", "recorded", "after"),
    [
        ("awq", "awq", "rtn"),
        ("rtn", "rtn", "awq"),
        ("awq", "smooth", "awq"),  # of an earlier version
        ("awq", "rtn", "awq"),  # made of an artifact with folds
    ],
)
def test_scales_of_other_weights_are_refused(before, recorded, after, tmp_path):
    source = write_source(tmp_path / "m")
    statistics = ("--calibration", calibrated(source, tmp_path / "c.safetensors"))
    options = {"rtn": (), "awq": ("--method", "awq", *statistics)}
    quantize(source, tmp_path / "first", *options[before])
    path = tmp_path / "first" / "quantization_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": recorded}))
    words = ("--format", "nvfp4", "--json", "-o", tmp_path / "q", *options[after])
    done = run("quantize", source, *words, "--global-scale", tmp_path / "first")
    assert (done.code, done.json["error"]["code"]) == (2, "global-scale-folded"), done
    assert not (tmp_path / "q").exists()
    # Numbers of a file are what a person says that they are.
    given = write_scales(tmp_path / "scales.json", scales_of(tmp_path / "first"))
    assert run("quantize", source, *words, *given).code == 0


@pytest.mark.parametrize("factor", FACTORS)
def test_gptq_compensates_under_the_scale(factor, tmp_path):
    """ModelOpt's block scales, and the codes of the paper's algorithm under them."""
    source = write_source(tmp_path / "m")
    statistics = calibrated(source, tmp_path / "c.safetensors", block=128)
    options = ("--method", "gptq", "--passes", "0", "--calibration", statistics)
    first = quantize(source, tmp_path / "first", *options)
    given = (*options, "--global-scale", tmp_path / "first")
    assert files_of(quantize(source, tmp_path / "a", *given)) == files_of(first)
    scales = multiplied(scales_of(tmp_path / "first"), factor)
    given = (*options, *write_scales(tmp_path / "scales.json", scales))
    done = quantize(source, tmp_path / "given", *given)
    stored = read_folder(tmp_path / "given")
    assert scales_of(tmp_path / "given") == scales
    assert done.json.get("saturated", 0) == (len(scales) if factor < 1 else 0)
    inputs = {reader: INPUTS[maker] for maker, readers in READERS.items() for reader in readers}
    for name, x in inputs.items():
        module, w = BEGINNING + name, stored_weights()[name]
        _, block_scales = modelopt_parts(w, scales[module])
        assert stored[f"{module}.weight_scale"][2] == block_scales, module
        e4m3 = torch.frombuffer(bytearray(block_scales), dtype=torch.float8_e4m3fn).float().numpy()
        steps = (e4m3 * np.float32(scales[module])).reshape(len(w), -1)
        gram = x.astype(np.float64).T @ x / len(x)
        codes = gptq_by_the_paper(w, gram, steps)
        packed = np.frombuffer(stored[f"{module}.weight"][2], np.uint8).reshape(len(w), -1)
        ours = np.stack((packed & 15, packed >> 4), axis=-1).reshape(w.shape)
        assert np.mean(ours == codes) > 0.995, module


def test_nodes_of_a_cluster_find_the_file_from_their_own_folders(tmp_path, monkeypatch):
    """What Ray sends, pickled as Ray does, and carried out as a worker does it."""
    source = write_llama(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    quantize(Path("m"), Path("first"))
    scales = multiplied(scales_of(Path("first")), FACTORS[1])
    write_scales(Path("scales.json"), scales)
    alone = quantize(Path("m"), Path("alone"), "--global-scale", "scales.json")
    words = {"format": "nvfp4", "scale_rule": "amax", "dialect": "modelopt"}
    options = QuantizeOptions("m", output="sent", global_scale="scales.json", **words)
    sent = pickle.dumps(options_for_nodes(options, open_source(str(source))))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = work_on_node(pickle.loads(sent), ())
    assert isinstance(result, Result), result
    assert result.digest == alone.json["digest"]
    check_modelopts(tmp_path / "sent", {m: values_of_source(source, m) for m in scales}, scales)


def values_of_source(source: Path, module: str) -> np.ndarray:
    return values_of(read_folder(source)[f"{module}.weight"]).astype(np.float32)


def test_parts_and_workers_make_the_bytes_of_one_process(tmp_path):
    source = write_llama(tmp_path / "m")
    quantize(source, tmp_path / "first")
    given = write_scales(
        tmp_path / "scales.json", multiplied(scales_of(tmp_path / "first"), FACTORS[0])
    )
    alone = quantize(source, tmp_path / "alone", *given)
    assert alone.json["saturated"] == 7
    # Two parts, one after the other, and merge.
    for index in range(2):
        part = ("--shard-index", index, "--num-shards", 2)
        quantize(source, tmp_path / "parts", *given, *part)
    merged = run("merge", tmp_path / "parts", "--json")
    assert (merged.code, merged.json["digest"]) == (0, alone.json["digest"]), merged
    # Two processes at once.
    words = ("--format", "nvfp4", "--scale-rule", "amax", "--dialect", "modelopt", "--json")
    together = (source, "-o", tmp_path / "together", *words, *given, "--join")
    processes = [start("quantize", *together) for _ in range(2)]
    documents = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert {document["digest"] for document in documents} == {alone.json["digest"]}
    assert {document["saturated"] for document in documents} == {7}
