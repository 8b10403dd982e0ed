"""Records with images or sound that are refused: one sentence, exit 2, nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from multimodal_models import (
    HELLO,
    SIGHTED,
    WORDS,
    make_sighted,
    make_whisper,
    picture,
    said,
    write_image,
    write_records,
)
from tiny_chains import make_model
from tiny_models import read_json

pytest.importorskip("PIL", reason="pillow, of the extra calibrate, is not installed")
pytestmark = pytest.mark.engine


def refuse(source: Path, records: Path) -> dict[str, Any]:
    """The error, of both commands; nothing is left of either."""
    output = source.parent / "c.safetensors"
    before = sorted(source.parent.rglob("*"))
    found = run("calibrate", source, "-o", output, "--chat", records, "--json")
    error: dict[str, Any] = found.json["error"]
    assert (found.code, error["exit"]) == (2, 2)
    assert sorted(source.parent.rglob("*")) == before
    evaluated = run("evaluate", source, "--source", source, "--chat", records, "--json")
    assert evaluated.json["error"] == error
    assert "\n" not in error["message"]
    assert error["next"]
    return error


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_image(folder / "a.png", 40, 60)
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:60])
    return make_sighted(SIGHTED[0], folder / "m")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (said(picture("https://example.com/a.png")), "is the address 'https://example.com/a.png'"),
        (said(picture("data:image/png;base64,iVBORw0KGgo=", "url")), "is the address 'data:image"),
        (said(picture("b.png")), "image 'b.png' is no file; expected one, relative to"),
        (said(picture("cut.png")), "cannot be read by the source's processor"),
        (said({"type": "image"}), "'image' with 0 files; expected one"),
        (said({**picture("a.png"), "url": "a.png"}), "'image' with 2 files; expected one"),
        (said({"type": "image", "image": 5}), "its image is int; expected the path"),
        (said({"type": "video", "path": "a.mp4"}), "part of type 'video'"),
        (said({"type": "image_url", "image_url": {"url": "a.png"}}), "part of type 'image_url'"),
        ({**said(HELLO), "images": ["a.png"]}, "has 'images', which is not read there"),
        ({"text": "abc", "image": "a.png"}, "has 'image', which is not read there"),
        ({"text": "abc", "audio": "a.png"}, "LlavaForConditionalGeneration takes messages"),
        (said(picture("a.png"), {"type": "text", "text": "a" * 80}), "at most the 64 that"),
    ],
)
@pytest.mark.sweep(4)
def test_records_that_cannot_be_read(record: dict[str, Any], why: str, llava: Path) -> None:
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    records = write_records(llava.parent / "chat.jsonl", [{"text": WORDS}, record])
    error = refuse(llava, records)
    assert error["code"] in ("bad-dataset", "no-processor")
    assert f"{records}: record 2" in error["message"]
    assert why in error["message"]


def test_sound_for_a_model_that_sees(llava: Path) -> None:
    record = said({"type": "audio", "path": "a.png"})
    error = refuse(llava, write_records(llava.parent / "chat.jsonl", [record]))
    assert error["code"] == "no-processor"
    assert "has audio, and LlavaProcessor reads none" in error["message"]


def test_images_for_models_without_a_processor(llava: Path, tmp_path: Path) -> None:
    """Of text alone, and of images but without their settings; a record of text is no excuse."""
    records = write_records(tmp_path / "chat.jsonl", [{"text": WORDS}, said(picture("a.png"))])
    shutil.copy(llava.parent / "a.png", tmp_path)
    llama = make_model(tmp_path / "llama", "Llama")
    error = refuse(llama, records)
    assert error["code"] == "no-processor"
    assert error["message"].startswith("the source has no preprocessor_config.json, which says")
    shutil.copy(llava / "preprocessor_config.json", llama)
    error = refuse(llama, records)
    assert error["code"] == "no-processor"
    assert "transformers knows none for LlamaForCausalLM" in error["message"]
    blind = shutil.copytree(llava, tmp_path / "m")
    (blind / "preprocessor_config.json").unlink()
    error = refuse(blind, records)
    assert error["code"] == "no-processor"
    assert "Can't load image processor for 'the source'" in error["message"]
    # A model of text with the processor of another: what is made of the image has no place in it.
    weights = shutil.ignore_patterns("*.safetensors*")
    text = shutil.copytree(llava, tmp_path / "text", ignore=weights)
    made = make_model(tmp_path / "whole", "Llama", vocab_size=160)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(made / name, text / name)
    error = refuse(text, records)
    assert error["code"] == "no-processor"
    assert "LlamaForCausalLM takes no image" in error["message"]


def test_a_processor_of_code_is_not_run(llava: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llava, tmp_path / "m")
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name, part in (("processor", "AutoProcessor"), ("preprocessor", "AutoImageProcessor")):
        path = source / f"{name}_config.json"
        code = {"processor_class": "Own", "image_processor_type": "Own"}
        path.write_text(json.dumps({**read_json(path), **code, "auto_map": {part: "own.Own"}}))
    records = write_records(llava.parent / "chat.jsonl", [said(picture("a.png"))])
    error = refuse(source, records)
    assert error["code"] == "no-processor"
    assert "never run" in error["message"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"processor_class": "PixtralProcessor"}, "pip install torchvision"),
        ({"processor_class": "Gemma4Processor"}, "pip install torchvision"),
        ({}, "[calibrate]'"),
    ],
)
def test_packages_that_are_missing(
    settings: dict[str, str],
    package: str,
    llava: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Classes of transformers that need torchvision; and pillow, for what reads images."""
    from transformers.utils.import_utils import is_torchvision_available

    from fp4convert.calibration import multimodal

    if is_torchvision_available():
        pytest.skip("torchvision is here")
    source = shutil.copytree(llava, tmp_path / "m")
    path = source / "processor_config.json"
    path.write_text(json.dumps({**read_json(path), **settings}))
    if not settings:
        monkeypatch.setattr(multimodal, "find_spec", lambda name: None)
    records = write_records(llava.parent / "chat.jsonl", [said(picture("a.png"))])
    error = refuse(source, records)
    assert error["code"] == "no-processor-package"
    assert package in error["next"]


def test_text_for_a_model_that_hears(tmp_path: Path) -> None:
    source = make_whisper(tmp_path / "m")
    error = refuse(source, write_records(tmp_path / "chat.jsonl", [{"text": WORDS}]))
    assert error["code"] == "calibration-model"
    assert "reads sound, and this is text" in error["message"]
    assert '{"audio": FILE, "text": WORDS}' in error["next"]
    own = run("calibrate", source, "-o", tmp_path / "c", "--self-generate", 2, "--json")
    assert (own.code, own.json["error"]["code"]) == (2, "no-text")
