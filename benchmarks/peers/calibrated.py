"""Other packages' calibrated quantizers on a CPU: NVFP4 of the weights of a small language model.

    python -P calibrated.py PEER MODEL NUMBERS.safetensors FOLDER

run where the package is (make bench-peers makes the environments). NUMBERS holds `numbers`, the
tokens to calibrate with: (sequences, length). FOLDER becomes an artifact, or a checkpoint of values
that went through four bits. Nothing of fp4convert is imported, and -P keeps this folder off the
path.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HEAD = "lm_head"  # which all of them, and we, leave as it is


def llmcompressor_gptq(model: Any, tokenizer: Any, numbers: Tensor, folder: str) -> None:
    """GPTQ with the scheme NVFP4A16, as an artifact of compressed-tensors."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    seen = torch.ones_like(numbers).tolist()
    count, length = numbers.shape
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_dict({"input_ids": numbers.tolist(), "attention_mask": seen}),
        recipe=GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=[HEAD]),
        max_seq_length=length,
        num_calibration_samples=count,
    )
    model.save_pretrained(folder, save_compressed=True)


def autoround(model: Any, tokenizer: Any, numbers: Tensor, folder: str) -> None:
    """SignRound, 200 steps a layer by default, as values."""
    from auto_round import AutoRound

    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in numbers]
    scheme = {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", "act_bits": 16}
    made = AutoRound(
        model,
        tokenizer,
        scheme=scheme,
        dataset=torch.utils.data.DataLoader(rows, batch_size=8),
        nsamples=len(rows),
        seqlen=numbers.shape[1],
        device_map="cpu",
        enable_torch_compile=False,
    ).quantize()
    quantized = made[0] if isinstance(made, tuple) else made
    quantized.float().save_pretrained(folder)


PEERS = {"llmcompressor_gptq": llmcompressor_gptq, "autoround": autoround}


def main(peer: str, source: str, numbers_file: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    PEERS[peer](model, tokenizer, load_file(numbers_file)["numbers"], folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
