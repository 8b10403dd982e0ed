"""Quantized embeddings and output heads: what transformers and mlx-lm make of them, which is what
`--for` and `inspect` say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from tiny_models import fp4convert, fp4convert_json, make_llama, read_tensors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Make = Callable[[bool, str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(is tied, dialect, --include) -> a small Llama that stores its head, and its artifact."""

    @cache
    def made(is_tied: bool, dialect: str, include: str) -> tuple[Path, Path]:
        from safetensors.torch import save_file

        folder = tmp_path_factory.mktemp("unread")
        source, out = make_llama(folder / "source", is_tied=is_tied), folder / dialect
        if is_tied:
            tensors = read_tensors(source)
            tensors[f"{HEAD}.weight"] = tensors[f"{EMBEDDING}.weight"].clone()
            save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        fmt = "mxfp4" if dialect == "mlx" else "nvfp4"
        options = ("--format", fmt, "--dialect", dialect, "--include", include)
        fp4convert("quantize", source, *options, "-o", out, "-q")
        return source, out

    return made


def _load(folder: Path) -> tuple[Any, set[str]]:
    """The model, and the parameters that transformers leaves random."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    return model, set(info["missing_keys"])


def _loads(artifact: Path, engine: str) -> bool | None:
    """What inspect says of an engine."""
    engines = fp4convert_json("inspect", artifact)["engines"]
    (loads,) = (each["loads"] for each in engines if each["engine"] == engine)
    return loads


def _refused(source: Path, engine: str, include: str, *options: str) -> bool:
    words = ("--for", engine, "--include", include, *options, "--dry-run", "--json")
    asked = run("quantize", source, *words)
    return asked.code == 2 and asked.json["error"]["code"] == "engine-refuses"


def test_an_embedding_stays_random(make: Make) -> None:
    source, artifact = make(False, "compressed-tensors", EMBEDDING)
    assert _load(artifact)[1] == {f"{EMBEDDING}.weight"}
    assert _loads(artifact, "transformers") is False
    assert _refused(source, "transformers", EMBEDDING)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8"])
def test_an_embedding_of_eight_bits_has_codes_for_values(
    fmt: str, make: Make, tmp_path: Path
) -> None:
    import torch

    source, _ = make(False, "compressed-tensors", EMBEDDING)
    options = ("--format", fmt, "--dialect", "compressed-tensors", "--include", EMBEDDING)
    fp4convert("quantize", source, *options, "-o", tmp_path / "q", "-q")
    loaded = _load(tmp_path / "q")[0].get_input_embeddings().weight
    codes = read_tensors(tmp_path / "q")[f"{EMBEDDING}.weight"]
    assert torch.equal(loaded, codes.to(loaded.dtype))
    assert _loads(tmp_path / "q", "transformers") is False
    assert _refused(source, "transformers", EMBEDDING, "--format", fmt)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "deepseek"])
def test_a_tied_head_of_eight_bits_fails_to_load(
    dialect: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: on a CPU transformers dequantizes FP8 in blocks."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    source, _ = make(True, "compressed-tensors", HEAD)
    options = ("--format", "fp8", "--dialect", dialect, "--include", HEAD)
    fp4convert("quantize", source, *options, "-o", tmp_path / "q", "-q")
    with pytest.raises(RuntimeError, match="Float8"):
        _load(tmp_path / "q")
    assert _loads(tmp_path / "q", "transformers") is False
    assert _refused(source, "transformers", HEAD, "--format", "fp8")


def test_an_untied_head_computes_what_the_artifact_says(make: Make, tmp_path: Path) -> None:
    import torch

    source, artifact = make(False, "compressed-tensors", HEAD)
    fp4convert("dequantize", artifact, "-o", tmp_path / "restored", "--dtype", "bf16", "-q")
    (model, missing), (other, _) = _load(artifact), _load(tmp_path / "restored")
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits)
    assert missing == set()
    assert _loads(artifact, "transformers") is True
    assert not _refused(source, "transformers", HEAD)


def test_a_tied_head_fails_to_load(make: Make) -> None:
    _, artifact = make(True, "compressed-tensors", HEAD)
    with pytest.raises(AttributeError, match="weight"):
        _load(artifact)
    assert _loads(artifact, "transformers") is False


def test_mlx_looks_up_four_bits_and_refuses_a_tied_head(make: Make) -> None:
    from mlx_lm.utils import load_model

    source, artifact = make(False, "mlx", EMBEDDING)
    load_model(artifact)
    assert _loads(artifact, "mlx") is True
    assert not _refused(source, "mlx", EMBEDDING)
    source, artifact = make(True, "mlx", HEAD)
    with pytest.raises(ValueError, match=r"lm_head\.scales"):
        load_model(artifact)
    assert _loads(artifact, "mlx") is False
    assert _refused(source, "mlx", HEAD)
