"""Other packages' own converters: one checkpoint to NVFP4, weights alone, on the CPU.

    python -P converters.py PACKAGE SOURCE OUTPUT

run where the package is.  Nothing of fp4convert is imported, and -P keeps this folder off the path:
no package may find a module
of ours.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def mlx_lm(source: str, output: str) -> None:
    from mlx_lm import convert

    convert(source, output, quantize=True, q_mode="nvfp4", q_bits=4, q_group_size=16)


def modelopt(source: str, output: str) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = mtq.quantize(model, mtq.W4A16_NVFP4_CFG)
    export_hf_checkpoint(model, export_dir=output)


def llmcompressor(source: str, output: str) -> None:
    import torch
    from llmcompressor import model_free_ptq

    ignored = ["lm_head", "model.embed_tokens", "re:.*norm"]
    model_free_ptq(
        source,
        output,
        scheme="NVFP4A16",
        ignore=ignored,
        max_workers=torch.get_num_threads(),
        device="cpu",
    )


def limit_memory() -> None:
    """Refuse this process more memory than there is: it fails, and the machine goes on."""
    available = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    most = int(available.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    limit_memory()
    {"mlx_lm": mlx_lm, "modelopt": modelopt, "llmcompressor": llmcompressor}[sys.argv[1]](
        *sys.argv[2:]
    )
