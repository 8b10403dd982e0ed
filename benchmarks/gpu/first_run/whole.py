"""Convert a whole checkpoint in memory, on the CPU and on the GPU.

    python benchmarks/gpu/first_run/whole.py OUT.jsonl [--gigabytes N] [--hidden N]
        [--folder /dev/shm] [--seconds N]

OUT is written anew: a line for each run with its seconds and digest, as it ends. Digests
of one rule must be equal on both devices.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HIDDEN = 4096
LAYERS_PER_SHARD = 8
RULES = {"nvfp4": ("amax", "mse", "four-over-six"), "mxfp4": ("even", "mse")}
RUNS = (("cpu", 0), ("cuda", 0), ("auto", 0), ("cuda", 1))  # device, --workers
SECONDS, SECONDS_EACH = 440, 120


def shapes_of(hidden: int) -> dict[str, tuple[int, int]]:
    """A layer of a Llama of that width."""
    wide, keys = 7 * hidden // 2, hidden // 4
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


def write_checkpoint(folder: Path, layers: int, hidden: int = HIDDEN) -> None:
    """Write a Llama of random bf16 weights, alike from layer to layer but shifted."""
    folder.mkdir(parents=True)
    shapes = shapes_of(hidden)
    largest = max(rows * columns for rows, columns in shapes.values())
    wide = np.random.default_rng(0).standard_normal(largest, np.float32) * np.float32(0.02)
    noise = (wide.view(np.uint32) >> 16).astype(np.uint16)
    weight_map, shards = {}, -(-layers // LAYERS_PER_SHARD)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        here = range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD))
        header, at = {}, 0
        for layer in here:
            for name, shape in shapes.items():
                tensor, end = f"model.layers.{layer}.{name}.weight", at + 2 * shape[0] * shape[1]
                header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
                weight_map[tensor], at = file, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for number, (rows, columns) in enumerate(list(shapes.values()) * len(here)):
                stream.write(np.roll(noise[: rows * columns], 977 * number).tobytes())
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
    }
    config |= {"num_hidden_layers": layers, "vocab_size": 128, "num_attention_heads": 32}
    config |= {"hidden_size": hidden, "intermediate_size": 7 * hidden // 2}
    config |= {"num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))


def convert(
    source: Path, output: Path, fmt: str, rule: str, run: tuple[str, int]
) -> dict[str, object]:
    """Quantize once; a row with seconds, CPU-seconds and the digest, or why there is none."""
    device, workers = run
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "fp4convert", "quantize", str(source), "--format", fmt]
    command += ["--scale-rule", rule, "--device", device, "--output", str(output), "--json"]
    command += ["--workers", str(workers)] if workers else []
    begun, before = time.monotonic(), os.times()
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SECONDS_EACH
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 124, f"longer than {SECONDS_EACH} s", "")
    after = os.times()
    used = after.children_user - before.children_user
    used += after.children_system - before.children_system
    seconds = {"seconds": round(time.monotonic() - begun, 2), "cpu_seconds": round(used, 2)}
    row = {"format": fmt, "rule": rule, "device": device, "workers": workers, **seconds}
    if done.returncode:
        return {**row, "rc": done.returncode, "problem": (done.stdout + done.stderr)[-300:]}
    told = json.loads(done.stdout)
    return {**row, "rc": 0, "took": told["device"], "digest": told["digest"]}


def rows(source: Path, output: Path, seconds: float) -> Iterator[dict[str, object]]:
    deadline = time.monotonic() + seconds
    yield {"warms up": convert(source, output, "nvfp4", "amax", ("cuda", 0))}
    for fmt, rules in RULES.items():
        for rule in rules:
            for run in RUNS:
                if time.monotonic() < deadline:
                    yield convert(source, output, fmt, rule, run)
                else:
                    named = {"format": fmt, "rule": rule, "device": run[0], "workers": run[1]}
                    yield {**named, "problem": "not run: the time is up"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Convert a checkpoint on the CPU and on the GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="columns of q_proj")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which no conversion begins"
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args(arguments)
    source, output = options.folder / "whole-source", options.folder / "whole-output"
    shutil.rmtree(source, ignore_errors=True)
    layer_nbytes = sum(2 * rows * columns for rows, columns in shapes_of(options.hidden).values())
    layers = max(1, round(options.gigabytes * 1e9 / layer_nbytes))
    digests: dict[tuple[object, object], set[object]] = {}
    try:
        write_checkpoint(source, layers, options.hidden)
        with options.out.open("w", encoding="utf-8") as stream:
            for row in rows(source, output, options.seconds):
                text = json.dumps({"gigabytes": layers * layer_nbytes / 1e9, **row})
                print(text, flush=True)
                print(text, file=stream, flush=True)
                if "format" in row:
                    found = digests.setdefault((row["format"], row["rule"]), set())
                    found.add(row.get("digest"))
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)
    differ = [key for key, found in digests.items() if len(found) != 1 or None in found]
    print(f"digests differ or are missing: {differ}" if differ else "every digest is equal")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
