"""Compare log-probabilities of artifacts in vLLM's whole engine, on a CPU, with those of bf16.

    .venv-engines/bin/python tests/engines/judges/forward_vllm.py RESULTS.json ARTIFACT...

Of each FOLDER/ARTIFACT there is FOLDER/bf16/ARTIFACT, what `fp4convert dequantize` makes of it; it
runs in the same engine. Each runs in a process of its own. Exits 1 where a weight-only artifact
differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

TOKENS, WORDS = 32, 512
HIGHEST = 1e-6  # KL divergence of weight-only artifacts: the same numbers are computed


def log_probabilities(folder: Path, file: Path) -> None:
    """Run vLLM on a prompt of random tokens and save the log-probabilities of all words."""
    import judge_vllm  # first, for it sets the environment for a CPU
    import vllm_kernels
    from vllm import LLM, SamplingParams, __version__

    vllm_kernels.install()
    vllm_kernels.compute_experts()
    own = {"max_logprobs": -1, "enable_prefix_caching": False}
    engine = LLM(model=str(folder), **judge_vllm.ARGUMENTS, **own)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, WORDS, (TOKENS,), generator=random).tolist()
    asked = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=-1)
    done = engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0]
    held = torch.full((TOKENS - 1, WORDS), float("nan"))
    for place, words in enumerate(done.prompt_logprobs[1:]):
        for word, found in words.items():
            held[place, word] = found.logprob
    if held.isnan().any():
        raise ValueError(f"{folder}: vLLM left words without a log-probability")
    torch.save({"held": held, "version": __version__.removesuffix("+cpu")}, file)


def main(arguments: list[str]) -> int:
    """Run all artifacts and their dequantized checkpoints, and write a row for each."""
    if arguments[0] == "--one":
        log_probabilities(Path(arguments[1]), Path(arguments[2]))
        return 0
    rows, version = [], ""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "held.pt"
        for folder in map(Path, arguments[1:]):
            runs = []
            for each in (folder.parent / "bf16" / folder.name, folder):
                command = [sys.executable, __file__, "--one", str(each), str(file)]
                subprocess.run(command, check=True, env=os.environ)
                runs.append(torch.load(file))
            first, second = (run["held"] for run in runs)
            version = runs[0]["version"]
            kl = float((first.exp() * (first - second)).sum(-1).mean())
            largest = float((first - second).abs().max())
            rows.append({"artifact": folder.name, "kl": kl, "largest": largest})
            print(rows[-1], flush=True)
    page = {"version": version, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    Path(arguments[0]).write_text(json.dumps(page, indent=1) + "\n")
    return int(any(row["kl"] > HIGHEST for row in rows if "--16" in row["artifact"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
