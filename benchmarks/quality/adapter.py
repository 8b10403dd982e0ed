"""What an adapter's model loses by each way to round it; the table of docs/special.md.

    python benchmarks/bench.py adapter [FOLDER]

Trains a LoRA adapter (PEFT, rank 16, attention and MLP) on SmolLM2 off its grid: a docstring asks,
the function's source answers (chats.py). Rounds the merged model to NVFP4 with and without data of
the task, and compares the answers on conversations that neither training nor calibration saw.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from harness.measure import ROOT, table
from quality import chats, models
from quality.fidelity import LANGUAGE, loss_of, run

RANK, STEPS, BATCH, RATE, SEED, LONGEST = 16, 50, 4, 5e-4, 0, 160
PROJECTIONS = "all-linear"  # attention and MLP, not the head
READ = ("--samples", 32, "--sequence-length", 256)


def train(base: Path, folder: Path) -> Path:
    """Train the adapter where it is not there; return its folder."""
    if (folder / "adapter_config.json").exists():
        return folder
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(SEED)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=PROJECTIONS)
    model: Any = get_peft_model(model, config).train()
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0)
    cycle = {"total_steps": STEPS, "pct_start": 0.1}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, **cycle)
    texts = [tokenizer.apply_chat_template(x, tokenize=False) for x in chats.conversations("train")]
    losses = []
    for step in range(STEPS):
        chosen = torch.randint(0, len(texts), (BATCH,)).tolist()
        words = {"return_tensors": "pt", "padding": True, "truncation": True}
        batch = tokenizer([texts[at] for at in chosen], max_length=LONGEST, **words)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 10 == 9:
            print(
                f"step {step + 1}: loss {sum(losses[-10:]) / 10:.3f}", file=sys.stderr, flush=True
            )
    model.save_pretrained(folder)
    return folder


def kept(folder: Path) -> str:
    """Say how much of the adapter is left, by the report of an artifact: the mean, the lowest."""
    tensors = json.loads((folder / "quantization_report.json").read_text("utf-8"))["tensors"]
    left = [tensor["adapter_db"] for tensor in tensors]
    return f"{statistics.mean(left):.1f} / {min(left):.1f} dB"


def main(arguments: list[str]) -> int:
    """Print the table."""
    folder = Path(arguments[0]) if arguments else ROOT / "build" / "adapter"
    base = models.smollm2(folder / LANGUAGE)
    adapter = train(base, folder / "lora")
    heard, judged = (
        chats.write_conversations(part, folder / f"{part}.jsonl") for part in ("calibrate", "judge")
    )
    merged, nvfp4 = ("--lora", adapter), ("--format", "nvfp4", "--force")
    known = folder / "heard.safetensors"
    calibrated = ("calibrate", base, *merged, "--chat", heard, *READ, "-o")
    if not known.exists():
        run(*calibrated, known, "--gram", "full")
    ways = {
        "rtn, `mse`": ("--method", "rtn"),
        "default with `--lora`": (),
        "rtn, `importance`": ("--method", "rtn", "--calibration", known),
        "`gptq`": ("--method", "gptq", "--calibration", known),
        "`--chat`": ("--chat", heard),
    }
    for number, options in enumerate(ways.values()):
        run("quantize", base, *merged, *nvfp4, "-o", folder / f"made-{number}", *options)
    artifacts = [folder / f"made-{number}" for number in range(len(ways))]
    document = run(
        "compare", *artifacts, "--source", base, *merged, "--chat", judged, *READ, "--json"
    )
    losses = [loss_of(side) for side in json.loads(document)["artifacts"].values()]
    rows = [
        [
            way,
            kept(made),
            f"{loss.kl:.4f} ± {loss.error:.4f}",
            loss.beside(losses[0]),
            f"{loss.top1:.1%}",
        ]
        for way, made, loss in zip(ways, artifacts, losses, strict=True)
    ]
    print(table(["rounded by", "kept", "KL", "minus that of mse", "top-1"], rows))
    return 0
