"""A language model that is trained here in minutes: a Llama of 4 layers and 256 hidden, on source
text of Python's standard library. It is for bars that compare methods; it loses too little to be a
forecast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quality.models import sources

VOCABULARY, SEQUENCE = 1024, 128
STEPS, BATCH, RATE = 600, 8, 3e-3
SEED = 0


def tiny(folder: Path) -> Path:
    """The language model's folder, trained where it is not there yet."""
    if not (folder / "trained.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(folder)
        loss = train(folder, torch.tensor(tokenizer(sources("train"))["input_ids"]))
        (folder / "trained.json").write_text(json.dumps({"steps": STEPS, "loss": loss}))
    return folder


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
