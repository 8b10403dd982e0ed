"""Quantizing on a CPU beside other packages: processor time of their defaults, and of this one's,
on the same bytes in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cpu.kernels import hold_cores
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import FLOAT_TYPES, FP4_FORMATS
from fp4convert.numerics.matrices import Matrix
from harness.measure import ROOT, in_turn, median_ratio
from harness.sections import Row, Section

SHAPE = (4096, 4096)
ROUNDS = 5
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
CASES = (("BF16", 1), ("BF16", 2), ("F16", 1), ("F32", 1))  # type, threads
HERE = ("modelopt", "compressed_tensors", "torchao", "quark", "mlx")
ELSEWHERE = ("fouroversix", "llmcompressor")
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
RULES = {
    "nvfp4": "amax",
    "mxfp4": "even",
}  # which the peers' defaults cost what these do; the searching one below
SEARCHING = {("fouroversix", "nvfp4"): "four-over-six"}
BARS = {"modelopt": 100}  # times our processor time, on one thread
INSTALL = {**dict.fromkeys(HERE, "make test"), **dict.fromkeys(ELSEWHERE, "make bench-peers")}
HEADINGS = (
    "package",
    "format",
    "type",
    "threads",
    "its s",
    "our s",
    "its CPU s",
    "our CPU s",
    "our rule",
)


class Cost(NamedTuple):
    """Of quantizing once."""

    seconds: float
    cpu_seconds: float


class RefusedError(Exception):
    """Why a peer has no figures."""


class Server:
    """quantizers.py in another process, perhaps in another environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cost(self, peer: str, threads: int) -> Cost:
        """Of one of quantizers.py; RefusedError where it cannot."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        print(peer, threads, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"problem": "its process ended"}')
        if "missing" in answer:
            raise RefusedError(f"no module {answer['missing']}: {INSTALL[peer.rpartition('_')[0]]}")
        if "problem" in answer:
            raise RefusedError(answer["problem"].replace("|", "/"))
        return Cost(answer["seconds"], answer["cpu_seconds"])


@contextmanager
def serving(python: Path, weights: Path) -> Iterator[Server]:
    command = [python, "-P", Path(__file__).with_name("quantizers.py"), "serve", weights]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, text=True, **pipes)
    try:
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


def write_weights(path: Path, values: np.ndarray, dtype: str) -> None:
    header = {"x": {"dtype": dtype, "shape": values.shape, "data_offsets": [0, values.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())


class Ours:
    """The same matrix through the CPU backend, its largest magnitude included."""

    def __init__(self, values: np.ndarray, dtype: str, threads: int) -> None:
        shape, width = values.shape, values.nbytes // values.shape[0]
        data, part = memoryview(values.view(np.uint8)).cast("B"), -(-shape[0] // threads)
        starts = range(0, shape[0], part)
        self._parts = [
            Matrix(
                data[start * width : (start + part) * width],
                dtype,
                (min(part, shape[0] - start), shape[1]),
            )
            for start in starts
        ]
        self._cpu, self._pool = Cpu(), ThreadPoolExecutor(threads)

    def cost(self, fmt: str, rule: str) -> Cost:
        begun = time.perf_counter(), time.process_time()
        amax = max(self._pool.map(self._cpu.amax, self._parts))
        list(
            self._pool.map(
                lambda part: self._cpu.quantize(part, FP4_FORMATS[fmt], rule, amax), self._parts
            )
        )
        return Cost(time.perf_counter() - begun[0], time.process_time() - begun[1])


def row_of(ours: Ours, server: Server | None, labels: tuple[str, str, str], threads: int) -> Row:
    """One peer beside ours, in turn."""
    package, fmt, _ = labels
    named = (*labels, str(threads))
    rule = SEARCHING.get((package, fmt), RULES[fmt])
    try:
        if server is None:
            raise RefusedError(f"no {PEERS_PYTHON.relative_to(ROOT)}: {INSTALL[package]}")
        works = (partial(ours.cost, fmt, rule), partial(server.cost, f"{package}_{fmt}", threads))
        own, its = in_turn(*works, rounds=ROUNDS, clock=lambda work: work())
    except RefusedError as refused:
        return Row(named, (f"not measured: {refused}", "", "", "", rule))
    (own_seconds, own_cpu), (its_seconds, its_cpu) = (
        tuple(zip(*costs, strict=True)) for costs in (own, its)
    )
    medians = [
        f"{statistics.median(each):.4f}" for each in (its_seconds, own_seconds, its_cpu, own_cpu)
    ]
    bar = BARS.get(package) if threads == 1 else None
    return Row(named, (*medians, rule), median_ratio(its_cpu, own_cpu), bar)


def rows_of(dtype: str, threads: int, is_quick: bool) -> list[Row]:
    values = (
        np.random.default_rng(0).standard_normal(SHAPE, np.float32) * np.float32(0.02)
    ).astype(DTYPES[dtype])
    ours, word = Ours(values, dtype, threads), FLOAT_TYPES[dtype].word
    rows = []
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as folder:
        weights = Path(folder) / "weights.safetensors"
        write_weights(weights, values, dtype)
        for python, packages in (
            (Path(sys.executable), HERE),
            (PEERS_PYTHON, () if is_quick else ELSEWHERE),
        ):
            with serving(python, weights) if python.exists() else nullcontext() as server:
                rows += [
                    row_of(ours, server, (package, fmt, word), threads)
                    for package in packages
                    for fmt in FP4_FORMATS
                ]
    return rows


def sections(is_quick: bool) -> list[Section]:
    """Quick: bf16 and one thread, on the same bytes, and no package of the other environment."""
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for dtype, threads in CASES[:1] if is_quick else CASES:
        if threads <= len(cores):
            hold_cores(threads, cores)
            rows += rows_of(dtype, threads, is_quick)
    about = (
        f"A matrix of {SHAPE[0]} x {SHAPE[1]} by each package's own default, and by this one's "
        "CPU backend, its largest magnitude"
        f" included; medians of {ROUNDS} rounds, in which the two take turns on the same cores. "
        "The ratio is of processor time."
        " No files are read or written. peers/quantizers.py has the calls; fidelity.md tells "
        "what the results are worth."
    )
    return [Section("Beside other packages", about, HEADINGS, tuple(rows), "times our CPU s")]
