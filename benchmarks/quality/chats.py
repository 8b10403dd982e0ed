"""What the kind of calibration text changes for a model that was trained on conversations.

python benchmarks/bench.py chats [FOLDER]

Trains the small language model of the fidelity page on conversations of its own chat template: a
docstring of Python's standard library asks, the function's source answers. Then rounds it by GPTQ
(NVFP4, full Gram matrices) with three calibrations, and evaluates each on
conversations that neither training nor calibration saw. Prints the table of docs/better.md.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness.measure import ROOT
from quality import models, tiny
from quality.fidelity import run

TEMPLATE = "{% for each in messages %}<|{{ each.role }}|>\n{{ each.content }}</s>\n{% endfor %}"
LONGEST = 1500  # characters of an answer
SAMPLES = 128


def conversations(what: str) -> Iterator[list[dict[str, str]]]:
    """Functions of the standard library: what their docstring says, and their source."""
    source = models.sources(what)
    for part in source.split("\ndef ")[1:]:
        text = "def " + part.partition("\n\n\n")[0]
        try:
            (node,) = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        words = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if words and len(text) < LONGEST:
            yield [
                {"role": "user", "content": words},
                {"role": "assistant", "content": text},
            ]


def write_conversations(what: str, file: Path) -> Path:
    """Write the conversations of one set as --chat takes them."""
    lines = (json.dumps({"messages": each}) for each in conversations(what))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def write(folder: Path) -> Path:
    """Train the model in FOLDER, where it is not there, and write all texts."""
    for what in models.SETS:
        write_conversations(what, folder / f"{what}.jsonl")
    (folder / "source.txt").write_text(models.sources("calibrate"), encoding="utf-8")
    (folder / "prose.txt").write_text("\n".join(models.sentences("calibrate")), encoding="utf-8")
    model = folder / "model"
    if not (model / "trained").exists():
        model.mkdir(exist_ok=True)
        tokenizer = tiny.train_tokenizer(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        chats = [
            tokenizer.apply_chat_template(each, tokenize=False) for each in conversations("train")
        ]
        numbers: Any = tokenizer("".join(chats), add_special_tokens=False)["input_ids"]
        print(f"{len(chats)} conversations, {len(numbers)} tokens", file=sys.stderr)
        loss = tiny.train(model, torch.tensor(numbers))
        (model / "trained").write_text(f"{loss}\n")
    return model


def measure(folder: Path) -> None:
    """Print the table."""
    model = write(folder)
    read = ("--sequence-length", tiny.SEQUENCE, "--samples", SAMPLES)
    print("| calibration | tokens | mean KL on conversations | top-1 |\n|---|---|---|---|")
    kinds = {
        "none (rule `mse`)": (),
        "prose, `--text`": ("--text", folder / "prose.txt"),
        "source code, `--text`": ("--text", folder / "source.txt"),
        "conversations, `--chat`": ("--chat", folder / "calibrate.jsonl"),
    }
    for name, words in kinds.items():
        with tempfile.TemporaryDirectory() as made:
            file, out, tokens = Path(made) / "c.safetensors", Path(made) / "out", 0
            method: tuple[object, ...] = ()
            if words:
                tokens = json.loads(
                    run("calibrate", model, "-o", file, "--gram", "full", *words, *read, "--json")
                )["tokens"]
                method = ("--method", "gptq", "--calibration", file)
            run("quantize", model, "--format", "nvfp4", "-o", out, *method)
            judged = ("--source", model, "--chat", folder / "judge.jsonl", *read)
            found = json.loads(run("evaluate", out, *judged, "--json"))
            print(f"| {name} | {tokens} | {found['kl']['mean']:.5f} | {found['top1']:.4f} |")


def main(arguments: list[str]) -> int:
    """Print the table of the folder's model."""
    folder = Path(arguments[0]) if arguments else ROOT / "build" / "chats"
    folder.mkdir(parents=True, exist_ok=True)
    measure(folder)
    return 0
