"""Weights of other tools' formats: what they are worth, and beside an artifact on a text."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from artifacts import quantize
from checkpoints import Outcome, run
from family import write_shards, write_values
from llamacpp_models import weights_of, write_gguf
from packed_integers import awq, gptq
from packings import Packing, compressed, pack_checkpoint
from tiny_chains import LENGTH, SAMPLES, TEXT, make_model, tokens_of
from tiny_models import read_tensors

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}
PACKINGS: dict[str, Callable[[], Packing]] = {
    "gptq": lambda: gptq(4, 32, is_symmetric=True, version="gptq", is_ordered=False),
    "gptq asymmetric, act-order": lambda: gptq(
        4, 64, is_symmetric=False, version="gptq", is_ordered=True
    ),
    "gptq v2, 8 bits, rows": lambda: gptq(
        8, -1, is_symmetric=False, version="gptq_v2", is_ordered=False
    ),
    "gptq, 2 bits": lambda: gptq(2, 32, is_symmetric=False, version="gptq", is_ordered=False),
    "awq": lambda: awq(64),
    "int4": lambda: compressed("W4A16"),
    "int4 asymmetric": lambda: compressed("W4A16_ASYM"),
    "int8": lambda: compressed("W8A16"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("c") / "m", "Llama", **SIZES)


def packed(source: Path, folder: Path, word: str) -> dict[str, Any]:
    """The folder, packed by an outside tool; what that says it is worth."""
    shutil.copytree(source, folder)
    modules = [name.removesuffix(".weight") for name in read_tensors(folder) if "_proj" in name]
    worth = pack_checkpoint(folder, [(PACKINGS[word](), modules)])
    (folder / "model.safetensors").unlink()  # it is in shards now
    return worth


def mlx(source: Path, folder: Path, bits: int, group: int) -> dict[str, Any]:
    """The same by mlx-lm, and by mlx's own dequantize; the embedding is packed, too."""
    import mlx.core as mx
    import numpy as np
    import torch
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    shutil.copytree(source, folder)
    model, config = load_model(folder)
    model, config = quantize_model(model, config, group, bits, mode="affine")
    (folder / "model.safetensors").unlink()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    worth = {}
    for name, kept in stored.items():
        tensor, stem = kept, name.removesuffix(".weight")
        if f"{stem}.scales" in stored and stem != name:
            scales, biases = stored[f"{stem}.scales"], stored[f"{stem}.biases"]
            tensor = mx.dequantize(tensor, scales, biases, group, bits)
        if not name.endswith((".scales", ".biases")):
            worth[name] = torch.from_numpy(np.array(tensor.astype(mx.float32)))
    return worth


def make(source: Path, folder: Path, word: str) -> tuple[Path, dict[str, Any]]:
    """A candidate of that format, and what it is worth."""
    if word in PACKINGS:
        return folder, packed(source, folder, word)
    if word.startswith("mlx"):
        _, bits, group = word.split()
        return folder, mlx(source, folder, int(bits), int(group))
    path = write_gguf(source, "llama", folder.with_suffix(".gguf"), word)
    return path, weights_of(path, source, "llama")


def evaluate(source: Path, *words: object) -> Outcome:
    text = source.parent / "text.txt"
    text.write_text(TEXT)
    return run(*words, "--source", source, "--text", text, "--sequence-length", LENGTH)


@pytest.mark.parametrize("word", [*PACKINGS, *(f"mlx {bits} 32" for bits in (2, 3, 4, 5, 6, 8))])
def test_values_are_those_of_the_formats_own_tool(source: Path, tmp_path: Path, word: str) -> None:
    folder, worth = make(source, tmp_path / "x", word)
    done = run("dequantize", folder, "-o", tmp_path / "d", "--dtype", "fp32")
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "d")
    assert found.keys() == worth.keys()
    for name, tensor in worth.items():
        assert found[name].float().equal(tensor.float()), name


def losses_of(source: Path, worth: dict[str, Any], folder: Path) -> list[float]:
    """Mean KL of every window, by whole models of transformers."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(tokens_of(TEXT)).reshape(SAMPLES, LENGTH)
    values = write_values(source, {name: one.float() for name, one in worth.items()}, folder)
    with torch.no_grad():
        p, q = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(input_ids=ids)
            .logits[:, :-1]
            .double()
            .log_softmax(-1)
            for each in (source, values)
        )
    kl = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    return [float(mean) for mean in kl.mean(1)]


def test_everybodys_bits_are_ranked_beside_an_artifact(source: Path, tmp_path: Path) -> None:
    """In one command; every figure by whole models of what each format's own tool says."""
    words = ("Q8_0", "Q4_0", "gptq", "awq", "int4 asymmetric", "mlx 4 32")
    made = [make(source, tmp_path / f"x{at}", word) for at, word in enumerate(words)]
    quantize(source, tmp_path / "a")
    run("dequantize", tmp_path / "a", "-o", tmp_path / "d", "--dtype", "fp32")
    paths = [tmp_path / "a", *(path for path, _ in made)]
    worth = [read_tensors(tmp_path / "d"), *(values for _, values in made)]
    judged = [losses_of(source, one, tmp_path / f"j{at}") for at, one in enumerate(worth)]

    page = tmp_path / "page.html"
    found = evaluate(source, "compare", *paths, "--report", page, "--json").json
    assert found["passed"] is None
    letters = "abcdefg"
    for letter, windows in zip(letters, judged, strict=True):
        figures = found["artifacts"][letter]["predictions"]
        assert figures["kl"]["windows"] == pytest.approx(windows, rel=1e-4)
    alone = evaluate(source, "evaluate", paths[1], "--json").json  # a GGUF file without --config
    assert alone["kl"] == found["artifacts"]["b"]["predictions"]["kl"]
    assert (alone["grade"], alone["passed"]) == ("no figure to compare with", None)
    ranking = found["verdict"]["ranking"]
    order = sorted(letters, key=lambda letter: fmean(judged[letters.index(letter)]))
    assert [one["letter"] for one in ranking] == order
    for before, one in pairwise(ranking):
        ours, theirs = (judged[letters.index(each["letter"])] for each in (one, before))
        steps = [x - y for x, y in zip(ours, theirs, strict=True)]
        error = stdev(steps) / math.sqrt(SAMPLES)
        assert one["difference"] == pytest.approx(fmean(steps), rel=1e-3, abs=1e-9)
        assert one["difference_se"] == pytest.approx(error, rel=1e-3, abs=1e-9)
        assert one["is_alike"] == (fmean(steps) <= 2 * error)
    # Q8_0 is closest, and larger than every other: it and the best of four bits are unbeaten.
    assert ranking[0]["letter"] == "b"
    bits = {one["letter"]: one["bits_per_weight"] for one in ranking}
    assert (bits["b"], bits["c"]) == (8.5, 4.5)
    assert ranking[0]["is_unbeaten"]
    formats = {letter: side["formats"] for letter, side in found["artifacts"].items()}
    assert (formats["d"], formats["e"]) == (["gptq int4 32"], ["awq int4 64"])

    (data,) = re.findall(r'type="application/json" id="data">(.*?)</script>', page.read_text())
    sheet = json.loads(data)
    assert sheet["verdict"]["words"].startswith("closest to the source by KL: b (")
    coloured = {word for word, _, places in sheet["rows"] if places}
    assert "mean KL, nats" in coloured <= {"mean KL, nats", "top-1"}


def test_the_source_is_read_once_for_all(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4convert.storage.local import LocalSource

    quantize(source, tmp_path / "a")
    quantize(source, tmp_path / "b", "--format", "mxfp4")
    opened: list[str] = []
    stream = LocalSource.stream

    def counted(self: LocalSource, file: str) -> Any:
        opened.append(file)
        return stream(self, file)

    monkeypatch.setattr(LocalSource, "stream", counted)
    assert run("compare", tmp_path / "a", tmp_path / "b", "--source", source).code == 0
    assert opened == ["model.safetensors"]


def test_what_cannot_be_read_is_named(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "a")
    folder, _ = make(source, tmp_path / "x", "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "marlin"
    (folder / "config.json").write_text(json.dumps(config))
    words = ("compare", tmp_path / "a", folder, "--source", source, "--json")
    error = run(*words).json["error"]
    assert (error["exit"], error["code"]) == (2, "already-quantized")
    assert "GPTQ" in error["message"]
    # A GGUF file of an architecture whose names are not known.
    other = make_model(tmp_path / "p", "Phi3")
    path = write_gguf(source, "llama", tmp_path / "x.gguf", "Q8_0")
    error = run("compare", tmp_path / "a", path, "--source", other, "--json").json["error"]
    assert (error["code"], "names of 'phi3' are not known" in error["message"]) == (
        "gguf-config",
        True,
    )


def test_changes_of_other_tools_are_warnings(source: Path, tmp_path: Path) -> None:
    """AWQ divides norms by what it multiplies columns with: KL ranks it all the same."""
    quantize(source, tmp_path / "a")
    folder, _ = make(source, tmp_path / "x", "awq")
    tensors = read_tensors(folder)
    norm = "model.layers.1.input_layernorm.weight"
    write_shards({**tensors, norm: 3 * tensors[norm]}, folder)
    found = evaluate(source, "compare", tmp_path / "a", folder, "--json").json
    findings = found["artifacts"]["b"]["findings"]
    assert ("warning", norm) in [(one["level"], one["tensor"]) for one in findings]
    assert {one["level"] for one in findings} == {"warning"}
    assert (found["passed"], found["verdict"]["by"]) == (None, "kl")


def test_a_group_that_is_not_there_is_refused(source: Path, tmp_path: Path) -> None:
    folder, _ = make(source, tmp_path / "x", "gptq")
    tensors = read_tensors(folder)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    tensors[name][5] = 99
    write_shards(tensors, folder)
    error = run("dequantize", folder, "-o", tmp_path / "d", "--json").json["error"]
    assert (error["exit"], error["code"], error["tensor"]) == (2, "scales-shape", name)
