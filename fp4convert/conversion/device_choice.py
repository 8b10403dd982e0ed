"""Choose the CPU for --device auto, or the GPUs where they win.

The processor's rate is measured for 0.13 s. A GPU's is assumed: to measure it takes
as long as a small model on the CPU. Nothing of CuPy is loaded before the GPU has won.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fp4convert.checkpoint.encodings.base import Linear, is_fp8
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import format_named
from fp4convert.planning.plan import Plan
from fp4convert.process import processors
from fp4convert.progress import duration_text
from fp4convert.recipes.recipe import Target

LEAST_WEIGHTS = 10**9  # below, the CPU is done before a GPU has begun
BEGIN_SECONDS = 5.0  # CuPy, contexts, the check's verdict, kernels that are loaded
COPY_SECONDS = (
    0.45e-9  # of a core for a weight into pinned memory: benchmarks/results/host.md, read
)
LINK_SECONDS = 0.2e-9  # for a weight over PCIe 4: 10 GB/s of bf16, assumed
MARGIN = 0.7  # of the CPU's time, below which a GPU must stay


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
    from fp4convert.conversion.pace import measure_pace

    rate = measure_pace(Cpu(), target, widest, 0).weights_per_second or math.inf
    cpu_seconds = weights / rate
    copying = max(COPY_SECONDS / cores, LINK_SECONDS / count)
    gpu_seconds = BEGIN_SECONDS + weights * copying
    times = f"{rule} takes {duration_text(cpu_seconds)} on {cores} cores as estimated"
    times += f", and a GPU's copies {duration_text(gpu_seconds)}"
    if gpu_seconds > MARGIN * cpu_seconds:
        return Choice("cpu", f"device cpu: {times}; {otherwise}")
    from fp4convert.numerics.backends.self_check import unused, usable_gpus

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
