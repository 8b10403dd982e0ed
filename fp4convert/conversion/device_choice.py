"""Choose the CPU for --device auto, or the GPUs where they win.

The processor's rate is measured for 0.1 s. A GPU's is assumed: to measure it takes as long as a
small model on the CPU. CuPy is loaded after the GPU has won.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.encodings.base import Linear, is_fp8
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import IMPORTANCE, format_named
from fp4convert.numerics.matrices import InMemory, Matrix
from fp4convert.planning.plan import Plan
from fp4convert.process import processors
from fp4convert.progress import duration_text
from fp4convert.recipes.recipe import Target

LEAST_WEIGHTS = 10**9  # below, the CPU is done before a GPU has begun
BEGIN_SECONDS = 5.0  # CuPy, contexts, the check's verdict, kernels that are loaded
# Of a core, to copy a weight into pinned memory: benchmarks/results/host.md, read.
COPY_SECONDS = 0.45e-9
LINK_SECONDS = 0.2e-9  # for a weight over PCIe 4: 10 GB/s of bf16, assumed
MARGIN = 0.7  # of the CPU's time, below which a GPU must stay
MEASURED_SECONDS = 0.1  # of arithmetic; a third of it of hashing
SAMPLE_WEIGHTS = 4 << 20
DRAWN_WEIGHTS = 1 << 16  # of these, again and again
MOST_SAMPLES = 16  # in one call: twice as many each time, until a call's beginning costs nothing


class Choice(NamedTuple):
    """What to open, by its name, and the line that says why.

    reason  "" where there was nothing to choose
    """

    device: str
    reason: str = ""


def rounded_by(plan: Plan) -> list[Linear]:
    """List what a plan rounds: the rest is no work for a GPU."""
    return [
        linear
        for step in plan.steps
        if step.action == "quantize" and step.form
        for linear in step.linears
    ]


def choose_device(device: str, target: Target, rounded: Iterable[Linear]) -> Choice:
    """Choose what computes under --device auto; any other device stays.

    rounded  what gets codes
    """
    if device == "cpu":
        return Choice(device)
    if device != "auto":
        left = _left_to_cpu(target, rounded)
        return Choice(device, f"device {device}: {left}" if left else "")
    from fp4convert.numerics.backends.gpus import NO_GPU, ask_driver  # late: the CPU needs no GPU

    driver, count, problem = ask_driver()
    if driver is None or problem == NO_GPU:
        return Choice("cpu")
    if problem:
        return Choice("cpu", f"the CPU is used: {problem}")
    shown = "cuda:0" if count == 1 else f"{count} GPUs"
    otherwise = f"--device cuda uses {shown}"
    if target.method == "gptq":  # torch makes its codes, in sums of another order on a GPU
        why = "a GPU gives gptq other bytes, which no timing may choose"
        return Choice("cpu", f"device cpu: {why}; {otherwise}")
    rounded = list(rounded)
    shapes = [linear.shape for linear in rounded]
    weights, cores = sum(map(math.prod, shapes)), processors()
    if weights < LEAST_WEIGHTS:
        return Choice("cpu", f"device cpu: {weights:,} weights are too few; {otherwise}")
    rule = target.rule_for(format_named(target.format))
    widest = max(shapes, key=lambda shape: shape[-1])
    cpu_seconds = weights / weights_per_second(Cpu(), target, widest[-1], 0)
    copying = max(COPY_SECONDS / cores, LINK_SECONDS / count)
    gpu_seconds = BEGIN_SECONDS + weights * copying
    times = f"{rule} takes {duration_text(cpu_seconds)} on {cores} cores as estimated"
    times += f", and a GPU's copies {duration_text(gpu_seconds)}"
    if gpu_seconds > MARGIN * cpu_seconds:
        return Choice("cpu", f"device cpu: {times}; {otherwise}")
    from fp4convert.numerics.backends.gpu_choice import unused, usable_gpus

    aside = "; ".join(unused("auto"))
    if gpus := usable_gpus("auto"):
        names = ",".join(f"cuda:{gpu.number}" for gpu in gpus)
        words = (f"device {names}: {times}", _left_to_cpu(target, rounded), aside)
        return Choice(names, "; ".join(filter(None, words)))
    return Choice("cpu", aside)


def _left_to_cpu(target: Target, rounded: Iterable[Linear]) -> str:
    """Say which modules the CPU decodes before a GPU rounds them; "" for none."""
    rounded = list(rounded)
    left = [
        linear.coding.word
        for linear in rounded
        if linear.coding.is_decoded_by_cpu(linear) or (target.via and not is_fp8(linear))
    ]
    if not left:
        return ""
    kinds = ", ".join(dict.fromkeys(left))
    return f"the CPU decodes {len(left)} of {len(rounded)} modules for it ({kinds})"


def hashed_bytes_per_second() -> float:
    """Measure how fast one thread hashes the bytes that are written."""
    data, hashed = bytes(2 * SAMPLE_WEIGHTS), 0
    begun = time.perf_counter()
    while not hashed or time.perf_counter() < begun + MEASURED_SECONDS / 3:
        hashlib.sha256(data)
        hashed += len(data)
    return hashed / (time.perf_counter() - begun)


def weights_per_second(backend: Backend, target: Target, columns: int, threads: int) -> float:
    """Measure how many weights all threads of a backend quantize in a second.

    columns  of the widest matrix of a plan
    threads  0 is as many as suit the backend
    """
    from fp4convert.checkpoint.encodings.fp8 import block_of
    from fp4convert.numerics.fp8_rounding import find_scales

    fmt, columns = format_named(target.format), min(columns, SAMPLE_WEIGHTS)
    rule, rows = target.rule_for(fmt), SAMPLE_WEIGHTS // columns
    drawn = np.random.default_rng(0).normal(0, 0.02, DRAWN_WEIGHTS).astype(FLOAT_DTYPES["BF16"])
    data = np.resize(drawn, rows * columns).view(np.uint8).data
    sample = InMemory(Matrix(data, "BF16", (rows, columns)))
    importance = np.ones(columns, np.float32) if rule == IMPORTANCE else None

    def quantize(samples: Sequence[InMemory]) -> None:
        if not fmt.is_fp8:
            given = Given(importance=() if importance is None else [importance] * len(samples))
            for _ in backend.quantize_group(samples, samples, fmt, rule, given):
                pass
            return
        for weights in samples:
            block = block_of(form_of(target), weights.shape)
            with backend.fp8_passes(weights) as passes:
                scales = find_scales(weights, block, fmt, rule, passes)
                for _ in passes.fp8_panels(weights, block, scales):
                    pass

    def work(seconds: float) -> int:
        done, count, ended = 0, 1, time.perf_counter() + seconds
        while not done or time.perf_counter() < ended:
            quantize([sample] * count)
            done, count = done + count * rows * columns, min(2 * count, MOST_SAMPLES)
        return done

    # More threads than four to a processor are no faster.
    threads = min(threads or backend.threads, 4 * processors())
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [0.0] * threads))  # kernels are compiled, memory is reserved
        begun = time.perf_counter()
        done = sum(pool.map(work, [MEASURED_SECONDS] * threads))
        return done / (time.perf_counter() - begun)
