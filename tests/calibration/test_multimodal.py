"""Images and sound: statistics and predictions are those of transformers' whole models on what
their own processors make of the same files.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Outcome, run
from family import Family, load
from multimodal_models import (
    HELLO,
    SEE,
    SIGHTED,
    WHISPER,
    WORDS,
    listening,
    make_sighted,
    make_whisper,
    picture,
    qwen_images,
    said,
    write_image,
    write_records,
    write_sound,
)
from tiny_chains import tokens_of

pytest.importorskip("PIL", reason="pillow, of the extra calibrate, is not installed")
pytestmark = pytest.mark.engine
RTOL = 2e-5  # of the largest: float32, added in another order
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
RECORDS = [
    said(picture("a.png"), HELLO),
    {"text": WORDS},
    said(SEE, picture("b.png", "image"), picture("pictures/a.png", "url"), answer="both"),
]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Files of images, and records that name them from their own folder."""
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    for name, shape in (("a.png", (40, 60)), ("b.png", (70, 30)), ("pictures/a.png", (33, 33))):
        write_image(folder / name, *shape)
    return write_records(folder / "chat.jsonl", RECORDS)


def judged_inputs(family: Family, source: Path, records: Path) -> list[dict[str, Any]]:
    """What the whole model is given: by transformers' own processor of the folder.

    Qwen's is not made without torchvision: its reader of images is, and the tokens are typed here.
    """
    import torch
    import transformers

    text = {"input_ids": torch.tensor([tokens_of(WORDS)])}
    if not family.name.startswith("qwen"):
        chats = [json.loads(json.dumps(RECORDS[at]["messages"])) for at in (0, 2)]
        for part in (part for chat in chats for part in chat[0]["content"]):
            for key in part.keys() & {"path", "image", "url"}:
                part[key] = str(records.parent / part[key])
        processor = transformers.AutoProcessor.from_pretrained(source)
        read = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        made = [dict(processor.apply_chat_template(chat, **read)) for chat in chats]
        return [made[0], text, made[1]]
    from PIL import Image

    def look(before: str, files: list[str], after: str) -> dict[str, Any]:
        pictures = [Image.open(records.parent / file) for file in files]
        seen = dict(qwen_images()(images=pictures, return_tensors="pt"))
        ids = tokens_of(before)
        for grid in seen["image_grid_thw"]:
            ids += [152, *[150] * (int(grid.prod()) // 4), 153]
        ids = torch.tensor([[*ids, *tokens_of(after)]])
        return {"input_ids": ids, "mm_token_type_ids": (ids == 150).long(), **seen}

    both = look("see", ["b.png", "pictures/a.png"], "both")
    return [look("", ["a.png"], "helloworld"), text, both]


def calibrate(source: Path, records: Path, output: Path) -> Outcome:
    return run("calibrate", source, "-o", output, "--chat", records, "--json")


def check_statistics(family: Family, source: Path, file: Path, inputs: list[Any]) -> set[str]:
    """Those of every linear layer that is a module; returns the names of these."""
    import torch
    from safetensors.torch import load_file

    from fp4convert.calibration.model import open_skeleton
    from fp4convert.storage.open import open_source

    whole = load(family, source, dtype="float32", **EAGER)
    given: dict[str, list[Any]] = {}
    for path, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, path=path: given.setdefault(path, []).append(
                    args[0].reshape(-1, m.in_features)
                )
            )
    with torch.no_grad():
        for each in inputs:
            whole(**each)
    seats = open_skeleton(open_source(str(source)), source, torch.device("cpu")).seats
    found, judged = load_file(file), set()
    for module, seat in seats.items():
        if seat.expert is None and seat.path in given and f"{module}.tokens" in found:
            x = torch.cat(given[seat.path]).double()
            assert int(found[f"{module}.tokens"]) == len(x)
            expected = x.square().mean(0)
            off = (found[f"{module}.input_sq_mean"] - expected).abs().max()
            assert float(off) <= RTOL * float(expected.max())
            judged.add(module)
    return judged


@pytest.mark.parametrize("family", SIGHTED, ids=str)
def test_towers_have_the_statistics_of_the_whole_model(
    family: Family, records: Path, tmp_path: Path
) -> None:
    source, output = make_sighted(family, tmp_path / "m"), tmp_path / "c.safetensors"
    found = calibrate(source, records, output)
    assert found.code == 0, found.err
    inputs = judged_inputs(family, source, records)
    tokens = sum(each["input_ids"].numel() for each in inputs)
    assert (found.json["samples"], found.json["tokens"]) == (3, tokens)
    judged = check_statistics(family, source, output, inputs)
    towers = [name for name in judged if "vision" in name or "visual" in name]
    layers = [name for name in judged if "language_model" in name]
    assert len(towers) >= 5
    assert len(layers) >= 4
    told = [name for name in found.json["unwatched"] if not name.startswith("mtp.")]
    # torch's own attention, at the end of SigLIP, uses the matrix itself.
    assert told in ([], ["vision_tower.vision_model.head.attention.out_proj"])


@pytest.mark.parametrize("family", SIGHTED, ids=str)
def test_logits_are_those_of_the_whole_model(family: Family, records: Path, tmp_path: Path) -> None:
    import torch

    from fp4convert.calibration.layers import Chain
    from fp4convert.calibration.model import open_skeleton
    from fp4convert.calibration.observers import Watch, watching
    from fp4convert.calibration.samples import Feed, batches_of, inputs_of, read_samples
    from fp4convert.storage.open import open_source

    source = make_sighted(family, tmp_path / "m")
    skeleton = open_skeleton(open_source(str(source)), source, torch.device("cpu"))
    batches = batches_of(read_samples(Feed(dataset=records), skeleton, source))
    chain = Chain(skeleton, [inputs_of(skeleton, batch) for batch in batches], tmp_path)
    blind = Watch(skeleton, "none", {}, is_looking=False)
    with watching(blind), chain.held(is_headless=False) as held:
        for path in held:
            skeleton.fill(path)
            for number in chain.standing_at(path):
                chain.hand_on(number, chain.run(number))
            skeleton.empty(path)
    whole = load(family, source, dtype="float32", **EAGER)
    with torch.no_grad():
        judged = {
            tuple(each["input_ids"][0].tolist()): whole(**each).logits
            for each in judged_inputs(family, source, records)
        }
    assert len(batches) == len(judged) == 3
    for batch, forward in zip(batches, chain.forwards, strict=True):
        expected = judged[tuple(batch.ids[0].tolist())]
        off = float((forward.made.logits - expected).abs().max())
        assert off <= RTOL * float(expected.abs().max())


@pytest.mark.parametrize("family", SIGHTED, ids=str)
@pytest.mark.sweep(2)
def test_figures_are_those_of_whole_models(family: Family, records: Path, tmp_path: Path) -> None:
    """Of all tokens but those in whose places an image is put."""
    import torch

    source = make_sighted(family, tmp_path / "m")
    artifact, restored = tmp_path / "a", tmp_path / "r"
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact).code == 0
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    found = run("evaluate", artifact, "--source", source, "--chat", records, "--json")
    assert found.code == 0, found.err
    inputs = judged_inputs(family, source, records)
    kl, losses = [], []
    models = [load(family, folder, dtype="float32", **EAGER) for folder in (source, restored)]
    for each in inputs:
        with torch.no_grad():
            p, q = (model(**each).logits[0, :-1].double().log_softmax(-1) for model in models)
        targets = each["input_ids"][0, 1:]
        is_text = targets != 150
        kl.append((p.exp() * (p - q)).sum(-1)[is_text])
        losses.append(torch.nn.functional.nll_loss(p, targets, reduction="none")[is_text])
    targets_of_all = sum(each["input_ids"].numel() - 1 for each in inputs)
    assert found.json["tokens"] == sum(map(len, kl)) < targets_of_all
    assert found.json["kl"]["mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    perplexity = float(torch.cat(losses).mean().exp())
    assert found.json["ppl"]["source"] == pytest.approx(perplexity, rel=1e-6)


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    folder = tmp_path / "data"
    folder.mkdir()
    for seed in range(2):
        write_sound(folder / f"{seed}.wav", seed)
    records = [{"audio": f"{seed}.wav", "text": text} for seed, text in enumerate(("hello", "you"))]
    return write_records(folder / "spoken.jsonl", records)


def heard(records: Path) -> list[dict[str, Any]]:
    """By transformers' own reader of the numbers that were written; tokens are typed here."""
    import numpy as np
    import torch

    found = []
    for seed, text in enumerate(("hello", "you")):
        stored = (records.parent / f"{seed}.wav").read_bytes()[44:]
        sound = np.array(struct.unpack(f"<{len(stored) // 2}h", stored), np.float32) / 32768
        seen = listening()(sound, sampling_rate=4800, return_tensors="pt")
        ids = torch.tensor([tokens_of(text)])
        # The token of config.json that begins, then all but the last.
        decoder = torch.cat([torch.tensor([[1]]), ids[:, :-1]], 1)
        found.append({**seen, "decoder_input_ids": decoder, "labels": ids})
    return found


def test_whisper_hears(spoken: Path, tmp_path: Path) -> None:
    import torch

    source, output = make_whisper(tmp_path / "m"), tmp_path / "c.safetensors"
    found = calibrate(source, spoken, output)
    assert found.code == 0, found.err
    assert (found.json["samples"], found.json["tokens"]) == (2, 8)
    assert found.json["unwatched"] == []
    inputs = heard(spoken)
    labels = [each.pop("labels") for each in inputs]
    judged = check_statistics(WHISPER, source, output, inputs)
    assert sum(name.startswith("model.encoder") for name in judged) >= 4
    artifact, restored = tmp_path / "a", tmp_path / "r"
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact).code == 0
    assert run("dequantize", artifact, "-o", restored, "--dtype", "fp32").code == 0
    figures = run("evaluate", artifact, "--source", source, "--chat", spoken, "--json")
    assert figures.code == 0, figures.err
    models = [load(WHISPER, folder, dtype="float32", **EAGER) for folder in (source, restored)]
    kl, losses = [], []
    for each, tokens in zip(inputs, labels, strict=True):
        with torch.no_grad():
            p, q = (model(**each).logits[0].double().log_softmax(-1) for model in models)
        kl.append((p.exp() * (p - q)).sum(-1))
        losses.append(torch.nn.functional.nll_loss(p, tokens[0], reduction="none"))
    assert figures.json["tokens"] == 8
    assert figures.json["kl"]["mean"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    perplexity = float(torch.cat(losses).mean().exp())
    assert figures.json["ppl"]["source"] == pytest.approx(perplexity, rel=1e-6)


class Death(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("done", [0, 2, 3, 4])
@pytest.mark.sweep(2)
def test_a_calibration_goes_on_to_the_same_bytes(
    done: int, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before, in and behind the tower, and its images are gone by then."""
    from fp4convert.calibration import run as calibration_run

    source, output = make_sighted(SIGHTED[0], tmp_path / "m"), tmp_path / "c.safetensors"
    assert calibrate(source, records, tmp_path / "whole.safetensors").code == 0
    write, left = calibration_run.write_part, iter([*range(done)])

    def stop(*given: Any) -> str:
        if next(left, None) is None:
            raise Death
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(calibration_run, "write_part", stop)
        with pytest.raises(Death):
            calibrate(source, records, output)
    for file in records.parent.rglob("*.png"):
        file.unlink()
    again = calibrate(source, records, output)
    assert again.code == 0, again.err
    assert "going on with" in again.err
    assert output.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_keys_of_towers_are_not_cached() -> None:
    """SigLIP's attention says so itself, Llama 4's as it calls its function."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig
    from transformers.models.llama4.modeling_llama4 import Llama4VisionAttention, Llama4VisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipVisionConfig

    from fp4convert.calibration.observers import is_cached

    assert is_cached(LlamaAttention(LlamaConfig(), 0), {})
    assert not is_cached(SiglipAttention(SiglipVisionConfig()), {})
    assert not is_cached(Llama4VisionAttention(Llama4VisionConfig()), {"is_causal": False})
