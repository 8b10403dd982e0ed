"""--config: a GGUF file becomes a folder that transformers loads, with the values that llama.cpp's
own package reads, in transformers' order.
"""

from __future__ import annotations

import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from llamacpp_models import MAKERS, run_llamacpp, weights_of, write_gguf
from tiny_models import differing, fp4convert, fp4convert_json, is_quantized, read_tensors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KINDS = ["llama", "mixtral", "qwen2", "qwen3", "qwen3moe"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_format = pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind, format) -> the first checkpoint, and the four-bit GGUF file that is made of it."""

    @cache
    def made(kind: str, fmt: str, *options: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(f"{kind}-{fmt}")
        checkpoint = MAKERS[kind](folder / "checkpoint")
        source = write_gguf(checkpoint, kind, folder / "tiny.gguf")
        words = ("--format", fmt, "--dialect", "gguf", *options)
        fp4convert("quantize", source, *words, "-o", folder / "out", "-q")
        return checkpoint, folder / "out" / "tiny.gguf"

    return made


def widened(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.float() for name, tensor in tensors.items()}


@every_format
@every_kind
@pytest.mark.sweep(3)
def test_values_names_and_order_are_those_of_transformers(
    make: Any, tmp_path: Path, kind: str, fmt: str
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, path = make(kind, fmt, "--keep-dtype", "q8_0")
    words = ("--config", checkpoint, "--dtype", "fp32", "-q")
    fp4convert("dequantize", path, "-o", tmp_path / "out", *words)
    found, expected = read_tensors(tmp_path / "out"), weights_of(path, checkpoint, kind)
    assert found.keys() == read_tensors(checkpoint).keys()
    for name, weight in expected.items():
        assert found[name].shape == weight.shape
        assert found[name].float().allclose(weight, rtol=2.0**-22, atol=0), name
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


@every_kind
@pytest.mark.sweep(3)
def test_transcoded_blocks_are_those_of_the_first_checkpoint(
    make: Any, tmp_path: Path, kind: str
) -> None:
    """Rounding does not know the order of rows, so that both ways give the same bytes."""
    checkpoint, path = make(kind, "mxfp4")
    own, words = tmp_path / "own", ("--dialect", "compressed-tensors", "-q")
    fp4convert("quantize", checkpoint, "--format", "mxfp4", *words, "-o", own)
    fp4convert("transcode", path, "--config", checkpoint, *words, "-o", tmp_path / "out")
    found, expected = read_tensors(tmp_path / "out"), read_tensors(own)
    assert found.keys() == expected.keys()
    packed = [name for name in expected if name.endswith(("_packed", "_scale"))]
    assert len(packed) == 2 * len(list(filter(is_quantized, read_tensors(checkpoint))))
    assert differing(*({name: each[name] for name in packed} for each in (found, expected))) == []
    assert differing(widened(found), widened(expected)) == []
    assert fp4convert_json("verify", tmp_path / "out", "--source", checkpoint)["passed"]


@every_format
def test_kept_q8_0_becomes_bf16_where_safetensors_are_written(
    make: Any, tmp_path: Path, fmt: str
) -> None:
    checkpoint, path = make("qwen3", fmt, "--keep-dtype", "q8_0")
    words = ("--config", checkpoint, "--dialect", "modelopt" if fmt == "nvfp4" else "quark")
    outcome = run("transcode", path, *words, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "2 matrices become bf16" in outcome.err
    found, expected = read_tensors(tmp_path / "out"), weights_of(path, checkpoint, "qwen3")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert differing({name: found[name]}, {name: expected[name].bfloat16()}) == []


@every_format
def test_any_gguf_file_is_a_source_of_any_dialect(tmp_path: Path, fmt: str) -> None:
    """The same bytes as from safetensors of these values."""
    checkpoint = MAKERS["llama"](tmp_path / "checkpoint")
    source = write_gguf(checkpoint, "llama", tmp_path / "tiny.gguf")
    words = ("--format", fmt, "--dialect", "compressed-tensors", "-q")
    made = run("quantize", source, "--config", checkpoint, *words, "-o", tmp_path / "a", "--json")
    # What is to be run next is complete: the source is no safetensors file.
    program, *verify = shlex.split(made.json["next"][0])
    assert program == "fp4convert"
    assert run(*verify).code == 0
    fp4convert("quantize", checkpoint, *words, "-o", tmp_path / "b")
    found, expected = read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b")
    assert differing(widened(found), widened(expected)) == []


def test_evaluate_takes_a_gguf_file(make: Any, tmp_path: Path) -> None:
    """Its figures are those of the same values in safetensors."""
    checkpoint, path = make("qwen3moe", "mxfp4")
    words = ("--source", checkpoint, "--self-generate", "2")
    fp4convert("dequantize", path, "-o", tmp_path / "d", "--config", checkpoint, "-q")
    ours = fp4convert_json("evaluate", path, "--config", checkpoint, *words)
    assert fp4convert_json("evaluate", path, *words)["kl"] == ours["kl"]  # by the source's config
    theirs = fp4convert_json("evaluate", tmp_path / "d", *words)
    assert ours["kl"]["mean"] > 0
    assert ours["kl"]["mean"] == pytest.approx(theirs["kl"]["mean"], rel=0.02)


def test_compare_and_verify_take_gguf_files(make: Any) -> None:
    checkpoint, path = make("mixtral", "nvfp4")
    _, other = make("mixtral", "mxfp4")
    words = ("--config", checkpoint, "--source", checkpoint)
    found = fp4convert_json("compare", path, other, *words)
    assert len(found["modules"] if "modules" in found else found["tensors"]) == 32
    report = fp4convert_json("verify", path, *words, "--min-sqnr", 15)
    assert report["passed"]
    assert len(report["tensors"]) == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8}, "attention.head_count"),
        ({"num_hidden_layers": 3}, "block_count"),
        ({"model_type": "qwen3"}, "general.architecture"),
        ({"model_type": "bert"}, "'bert'"),
    ],
)
def test_the_config_of_another_model_is_refused(
    make: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint, path = make("llama", "mxfp4")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    outcome = run("dequantize", path, "--config", other, "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "gguf-config")
    assert message in outcome.json["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_config_without_a_use_is_refused(make: Any, tmp_path: Path) -> None:
    checkpoint, path = make("llama", "mxfp4")
    out = tmp_path / "out"
    for words, code in (
        (("quantize", checkpoint, "--format", "mxfp4", "--config", checkpoint), "idle-option"),
        (("dequantize", path, "--config", tmp_path / "nothing"), "gguf-config"),
        (("dequantize", path, "--config", path.parent), "gguf-config"),
    ):
        outcome = run(*words, "-o", out, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
        assert not out.exists()


def test_what_is_turned_back_runs_in_llama_cpp_again(make: Any, tmp_path: Path) -> None:
    """Written by the rules of its converter, it is the file that it came from."""
    checkpoint, path = make("mixtral", "mxfp4")
    words = ("--config", checkpoint, "--dtype", "fp32", "-q")
    fp4convert("dequantize", path, "-o", tmp_path / "d", *words)
    shutil.copy(checkpoint / "config.json", tmp_path / "d")
    again = write_gguf(tmp_path / "d", "mixtral", tmp_path / "again.gguf", "F32")
    first, second = run_llamacpp(path), run_llamacpp(again)
    assert max(abs(first[token] - second[token]) for token in first.keys() & second.keys()) < 0.02
