"""Tiny models that read images or sound, with processors; and records for them.

Their processors are transformers' own classes, their tokenizers letters and a few special tokens.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES
from families_dense import SIZES
from family import Family, build
from tiny_chains import LETTERS

CLIP = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{
        "intermediate_size": 48,
        "image_size": 28,
        "patch_size": 14,
        "model_type": "clip_vision_model",
    },
}
LLAVA = {
    "text_config": {**SIZES, "model_type": "llama"},
    "vision_config": CLIP,
    "image_token_index": 150,
}
SIGHTED = (
    Family("llava", "LlavaForConditionalGeneration", LLAVA, ()),
    *(each for each in FAMILIES if each.name in ("gemma3", "qwen3_5", "qwen3_vl_moe-saved")),
)
WHISPER = next(each for each in FAMILIES if each.name == "whisper")
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
# What the template writes for an image, and the special tokens by name in the tokenizer's settings.
IMAGE = {
    "llava": ("<image>", {"image_token": ("<image>", 150)}),
    "gemma3": (
        "<begin>",
        {
            "image_token": ("<image>", 150),
            "boi_token": ("<begin>", 151),
            "eoi_token": ("<end>", 152),
        },
    ),
    "qwen": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token": ("<|image_pad|>", 150),
            "video_token": ("<|video_pad|>", 151),
            "vision_bos_token": ("<|vision_start|>", 152),
            "vision_eos_token": ("<|vision_end|>", 153),
        },
    ),
}

WORDS = "thequickbrownfox"
HELLO, SEE = {"type": "text", "text": "hello"}, {"type": "text", "text": "see"}


def kind_of(family: Family) -> str:
    """Which of IMAGE it is."""
    return "qwen" if family.name.startswith("qwen") else family.name


def make_sighted(family: Family, folder: Path) -> Path:
    """The folder, now with the family's checkpoint and a processor."""
    import transformers

    build(family, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    written, tokens = IMAGE[kind_of(family)]
    write_tokenizer(folder, tokens, TEMPLATE.replace("IMAGE", written))
    square = {"height": 28, "width": 28}
    if family.name == "llava":
        clip = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
        settings: dict[str, Any] = {"patch_size": 14, "num_additional_image_tokens": 1}
        settings |= {"vision_feature_select_strategy": "default", "image_token": "<image>"}
        save_processor(folder, clip, "LlavaProcessor", settings)
    elif family.name == "gemma3":
        siglip = transformers.Gemma3ImageProcessorPil(size=square)
        save_processor(folder, siglip, "Gemma3Processor", {"image_seq_length": 4})
    else:
        save_processor(folder, qwen_images(), "Qwen3VLProcessor", {})
    return folder


def qwen_images() -> Any:
    import transformers

    size = {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}
    return transformers.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size)


def save_processor(folder: Path, images: Any, kind: str, settings: dict[str, Any]) -> None:
    """As checkpoints are published: settings of images, and which class puts all together."""
    images.save_pretrained(folder)
    settings = {"processor_class": kind, **settings}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def write_tokenizer(folder: Path, tokens: dict[str, tuple[str, int]], template: str) -> None:
    """Letters from 3 on, as those of tiny_chains; and special tokens."""
    special = dict(tokens.values())
    vocabulary = {"[UNK]": 0, **{letter: 3 + at for at, letter in enumerate(LETTERS)}, **special}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None},
        "added_tokens": [
            {"id": number, "content": word, "special": True, **flags}
            for word, number in special.items()
        ],
        "pre_tokenizer": {
            **{"type": "Split", "pattern": {"Regex": "."}},
            **{"behavior": "Isolated", "invert": False},
        },
        **{"post_processor": None, "decoder": None},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"},
        "extra_special_tokens": {name: word for name, (word, _) in tokens.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)


def write_image(path: Path, rows: int, columns: int) -> None:
    from PIL import Image

    pixels = np.random.default_rng(rows).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_sound(path: Path, seed: int) -> None:
    """A second of noise, 16 bits, 4800 a second."""
    noise = np.random.default_rng(seed).normal(0, 4000, 4800).astype(np.int16)
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 4800, 0, "NONE", ""))
        out.writeframes(noise.tobytes())


def make_whisper(folder: Path) -> Path:
    """The folder, now with a Whisper and its processor."""
    build(WHISPER, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    write_tokenizer(folder, {}, "")
    (folder / "chat_template.jinja").unlink()
    listening().save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"processor_class": "WhisperProcessor"}')
    return folder


def listening() -> Any:
    import transformers

    return transformers.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=4800, hop_length=100, chunk_length=1, n_fft=200
    )


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def picture(file: str, key: str = "path") -> dict[str, str]:
    return {"type": "image", key: file}


def said(*parts: dict[str, str], answer: str = "world") -> dict[str, Any]:
    """A record: a question of parts, and its answer."""
    asked = {"role": "user", "content": list(parts)}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}
