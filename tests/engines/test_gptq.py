"""From text to four bits by commands alone: calibrate, quantize --method gptq, and what
transformers computes afterwards.
"""

from __future__ import annotations

import pytest
from checkpoints import run
from tiny_chains import LENGTH, TEXT, make_model
from tiny_models import offline

pytestmark = pytest.mark.engine


def logits_of(folder, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    with offline(), torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            tokens
        ).logits.double()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
@pytest.mark.parametrize(
    ("format", "gram"), [("nvfp4", "full"), ("mxfp4", "full"), ("nvfp4", "block:32")]
)
def test_the_model_comes_nearer_to_what_it_was(kind, format, gram, tmp_path):
    """Outputs of the whole model on the text that it was calibrated with, attention, experts and
    all.
    """
    from transformers import AutoTokenizer

    source = make_model(tmp_path / "source", kind)
    (tmp_path / "words.txt").write_text(TEXT)
    file = tmp_path / "c.safetensors"
    assert (
        run(
            "calibrate",
            source,
            "-o",
            file,
            "--text",
            tmp_path / "words.txt",
            "--sequence-length",
            LENGTH,
            "--gram",
            gram,
        ).code
        == 0
    )
    tokens = AutoTokenizer.from_pretrained(source)(TEXT, return_tensors="pt")["input_ids"][
        :, : 4 * LENGTH
    ].reshape(-1, LENGTH)
    expected, errors = logits_of(source, tokens), {}
    for name, options in (("rtn", ()), ("gptq", ("--method", "gptq", "--calibration", file))):
        outcome = run("quantize", source, "--format", format, "-o", tmp_path / name, *options)
        assert outcome.code == 0, outcome.err
        assert (
            run(
                "dequantize", tmp_path / name, "-o", tmp_path / f"{name}-plain", "--dtype", "fp32"
            ).code
            == 0
        )
        errors[name] = float(
            ((logits_of(tmp_path / f"{name}-plain", tokens) - expected) ** 2).mean()
        )
    assert errors["gptq"] < 0.6 * errors["rtn"], errors
