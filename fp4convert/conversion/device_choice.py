"""Choose the CPU for --device auto, or the GPUs where they win.

The processor's rate is measured for a tenth of a second. A GPU's is assumed: to measure it takes
as long as a small model on the CPU. Nothing of CuPy is loaded before the GPU has won.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fp4convert.conversion.pace import measure_pace
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.formats import format_named
from fp4convert.planning.steps import Plan
from fp4convert.process import processors
from fp4convert.progress import duration_text

LEAST_WEIGHTS = 10**9  # below, the CPU is done before a GPU has begun
BEGIN_SECONDS = 5.0  # CuPy, contexts, the check's verdict, kernels that are loaded
COPY_SECONDS = 0.4e-9  # of a core for a weight into pinned memory: 4.9 GB/s, measured
LINK_SECONDS = 0.2e-9  # for a weight over PCIe 4: 10 GB/s of bf16, assumed
MARGIN = 0.7  # of the CPU's time, below which a GPU must stay


class Choice(NamedTuple):
    """What to open, and the line that says why; "" where no GPU is there."""

    device: str
    reason: str = ""


def choose_device(device: str, plan: Plan) -> Choice:
    """Choose what computes under --device auto; any other device stays."""
    if device != "auto":
        return Choice(device)
    from fp4convert.numerics.backends.gpus import NO_GPU, ask_driver  # late: the CPU needs no GPU

    driver, count, problem = ask_driver()
    if driver is None or problem == NO_GPU:
        return Choice("cpu")
    if problem:
        return Choice("cpu", f"the CPU is used: {problem}")
    shown = "cuda:0" if count == 1 else f"{count} GPUs"
    otherwise = f"--device cuda uses {shown}"
    # Only what is rounded is work for a GPU: the rest is copied, or decoded by the CPU.
    shapes = [step.shape for step in plan.steps if step.action == "quantize" and step.shape]
    weights, cores = sum(map(math.prod, shapes)), processors()
    if weights < LEAST_WEIGHTS:
        return Choice("cpu", f"device cpu: {weights:,} weights are too few; {otherwise}")
    rule = plan.target.rule_for(format_named(plan.target.format))
    widest = max(shapes, key=lambda shape: shape[-1])
    rate = measure_pace(Cpu(), plan.target, widest, 0).weights_per_second or math.inf
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
        return Choice("auto", "; ".join(filter(None, (f"device {names}: {times}", aside))))
    return Choice("cpu", aside)
