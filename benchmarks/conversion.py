"""A whole conversion against its own lawful costs, and its memory against the checkpoint's size.

The reference reads the source, writes and fsyncs as many bytes as the artifact has, and hashes them; the latter two on as
many threads as the conversion uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from measure import paired, table, verdict

COMMAND = Path(sys.executable).with_name("fp4convert")
HIDDEN, MLP, KEYS = 4096, 14336, 1024  # Llama-3.1-8B's matrices
ROUNDS = 5
THREADS = len(os.sched_getaffinity(0))
MATRICES = {
    **{"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN)},
    **{"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN)},
    "mlp.down_proj": (HIDDEN, MLP),
}
LAYER_NBYTES = 2 * sum(rows * columns for rows, columns in MATRICES.values())


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """bf16 layers of Llama-3.1-8B's shapes, random, in shards of about 1 GB."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    pattern = (noise.view(np.uint32) >> 16).astype(np.uint16)
    layers = max(1, round(gigabytes * 1e9 / LAYER_NBYTES))
    weight_map = {}
    for shard, group in enumerate(np.array_split(np.arange(layers), max(1, round(gigabytes)))):
        file = f"model-{shard + 1:05d}.safetensors"
        shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in group for name, shape in MATRICES.items()}
        write_shard(folder / file, shapes, pattern)
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))


def write_shard(path: Path, shapes: dict[str, tuple[int, int]], pattern: np.ndarray) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * shape[0] * shape[1]]}
        end = header[name]["data_offsets"][1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors itself aligns
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, (rows, columns) in enumerate(shapes.values()):
            out.write(np.resize(np.roll(pattern, -number * 7919), rows * columns).tobytes())


def convert(source: Path, output: Path, fmt: str = "nvfp4", rule: str = "amax") -> None:
    shutil.rmtree(output, ignore_errors=True)
    words = ["quantize", source, "--format", fmt, "--scale-rule", rule, "-o", output, "-q"]
    subprocess.run([COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def lawful_costs(source: Path, artifact: Path, scratch: Path) -> None:
    """Read every source byte; write and fsync the artifact's bytes; hash them."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    shards = sorted(artifact.glob("*.safetensors"))

    def write_and_hash(path: Path) -> str:
        data = path.read_bytes()
        with (scratch / path.name).open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        return hashlib.sha256(data).hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write_and_hash, shards))


def peak_anonymous_memory(source: Path, output: Path) -> int:
    """Highest RssAnon in bytes, polled every 5 ms while the command runs."""
    shutil.rmtree(output, ignore_errors=True)
    words = [COMMAND, "quantize", source, "--format", "nvfp4", "-o", output, "-q"]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL)
    peak, ended = 0, threading.Event()
    while not ended.wait(0.005):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        line = next((line for line in status.splitlines() if line.startswith("RssAnon")), None)
        peak = max(peak, int(line.split()[1]) * 1024) if line else peak
        if process.poll() is not None:
            ended.set()
    if process.wait():
        raise SystemExit("the conversion failed")
    return peak


def report() -> str:
    scratch = Path(tempfile.mkdtemp(prefix="fp4convert-bench-"))
    try:
        return f"{_speed(scratch)}\n{_memory(scratch)}"
    finally:
        shutil.rmtree(scratch)


def _speed(scratch: Path) -> str:
    source, output = scratch / "source", scratch / "output"
    make_checkpoint(source, 2)
    convert(source, output)
    reference = scratch / "reference"
    shutil.copytree(output, reference)
    work = paired(lambda: convert(source, output), lambda: lawful_costs(source, reference, scratch / "written"), ROUNDS)
    ours, theirs, ratio = work
    row = ["2 GB bf16, warm", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}", verdict(ratio, 1.8, is_floor=False)]
    headings = ["checkpoint", "quantize s", "read + write + fsync + sha256 s", "ratio", "bar"]
    text = f"## A whole conversion, {THREADS} threads, start-up included\n\nRule amax.\n\n{table(headings, [row])}\n"
    rows = [[fmt, plain, *_searched(source, output, fmt, plain)] for fmt, plain in (("nvfp4", "amax"), ("mxfp4", "even"))]
    shutil.rmtree(source)
    headings = ["format", "other rule", "rule mse s", "the other s", "ratio", "bar"]
    return f"{text}\nThe least squared error instead, of the same checkpoint:\n\n{table(headings, rows)}\n"


def _searched(source: Path, output: Path, fmt: str, plain: str) -> list[str]:
    ours, theirs, ratio = paired(lambda: convert(source, output, fmt, "mse"), lambda: convert(source, output, fmt, plain), ROUNDS)
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}", verdict(ratio, 3, is_floor=False)]


def _memory(scratch: Path) -> str:
    largest = 2 * HIDDEN * MLP
    allowed = 150e6 + THREADS * largest / 16
    rows = []
    for gigabytes in (1, 4, 8):
        source = scratch / f"source-{gigabytes}"
        make_checkpoint(source, gigabytes)
        started = time.perf_counter()
        peak = peak_anonymous_memory(source, scratch / "output")
        taken = time.perf_counter() - started
        shutil.rmtree(source)
        rows.append(
            [f"{gigabytes} GB", f"{peak / 1e6:.0f}", f"{taken:.1f}", verdict(peak / 1e6, round(allowed / 1e6), is_floor=False)]
        )
    headings = ["checkpoint", "peak RssAnon MB", "seconds", "bar: 150 MB + 1/16 of the largest tensor a worker"]
    return f"## Memory\n\n{table(headings, rows)}\n"


if __name__ == "__main__":
    print(report())
