"""Measure what the host costs with a GPU that takes no time.

    python benchmarks/bench.py host [--rounds N] [--folder DIR]    writes results/host.md

From CPU-seconds it computes what so many cores could do at most, if the GPU, its link and the disk
took no time: a model, no measurement of such a machine. CPU-seconds hold on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cpu.conversion import words_of
from fp4convert.numerics.backends.cuda_stream import LANES
from gpu.bars import NULL_GPU_SHARE
from harness.checkpoints import make_checkpoint
from harness.measure import BENCHMARKS, RESULTS, machine, table, verdict
from harness.processes import Cost, run

WHOLE, CUT = (2.0, 1), (2.0, 12)  # GB and shards
SHARD_GIGABYTES = 5  # as most checkpoints are published
RULES = ("mse",)
ROUNDS = 5
CORES = (2, 8, 16, 32)
MODEL_CORES, FLOOR = 16, 20  # GB/s of bf16
OUTSIDE = ("read", "write", "hash", "flush")  # of the interpreter's lock
NULL_GPU = BENCHMARKS / "gpu" / "null_gpu.py"
ABOUT = (
    "Written by `python benchmarks/bench.py host`. The GPU is a stand-in for CuPy that takes no"
    " time and moves nothing: the result is no artifact, and no GPU was measured. CPU-seconds of"
    " whole processes, start-up included; medians of {rounds} runs in turn. {machine}."
)
STAGES = (
    f"CPU-seconds from the first shard to the last, the least of all runs; {WHOLE[0]:g} GB in one"
    " shard. lock: whatever is not in a call that reads, writes, hashes, flushes or makes pinned"
    " memory (once for each lane); at most that is done under the interpreter's lock. A shard more:"
    f" from {CUT[1]} shards less one."
)
MODEL = (
    "Computed from these, GB/s of bf16 by rule mse: the least of what all cores, the lanes, the"
    f" threads that hash, and the lock allow. It rests on shards of {SHARD_GIGABYTES} GB whose work"
    " is even, cores as fast as here, and memory that keeps up with all of them; it counts neither"
    " start-up, the GPU, its link nor the disk. A real machine does less."
)


@dataclass(frozen=True, slots=True)
class Stages:
    """CPU-seconds for a GB of bf16, by what they are for.

    lock   whatever is none of the others: at most this is done under the interpreter's lock
    shard  for a shard, however large: part of none of them
    """

    read: float
    write: float
    hash: float
    flush: float
    lock: float
    shard: float

    @property
    def whole(self) -> float:
        return self.read + self.write + self.hash + self.flush + self.lock

    def limits(self, cores: int) -> dict[str, float]:
        """Compute GB/s of bf16 that each part allows, if the others took no time."""
        filling = self.whole - self.hash - self.flush
        shards = max(self.shard, 0.0) / SHARD_GIGABYTES  # noise may be more than it
        return {
            "all cores": cores / (self.whole + shards),
            f"{min(LANES, cores)} lanes": min(LANES, cores) / filling,
            f"{cores} hashes": cores / self.hash,
            "lock": 1 / (self.lock + shards),
        }


def stages_of(whole: dict[str, float], cut: dict[str, float], gigabytes: float) -> Stages:
    """Share out what runs of so many GB took, in WHOLE's shards and in CUT's."""
    found = {name: whole[name] / gigabytes for name in (*OUTSIDE, "lock")}
    return Stages(**found, shard=(cut["lock"] - whole["lock"]) / (CUT[1] - WHOLE[1]))


def run_null(source: Path, output: Path, rule: str) -> dict[str, float]:
    """Quantize with the GPU that takes no time: CPU-seconds by what they are for."""
    shutil.rmtree(output, ignore_errors=True)
    costs = output.with_suffix(".json")
    words = [*words_of(source, output, rule)[1:-1], "cuda"]
    cost = run([sys.executable, NULL_GPU, costs, *words])
    found = json.loads(costs.read_text())
    outside = sum(found[name] for name in (*OUTSIDE, "pin"))
    return {**found, "whole": cost.cpu_seconds, "lock": found["shards"] - outside}


def run_cpu(source: Path, output: Path, rule: str) -> Cost:
    shutil.rmtree(output, ignore_errors=True)
    return run(words_of(source, output, rule))


def measure(scratch: Path, rounds: int) -> tuple[list[list[str]], dict[str, Stages]]:
    """Measure all in turns: rows of the comparison, and the stages by rule."""
    output, kinds = scratch / "output", (WHOLE, CUT)
    sources = {kind: scratch / "-".join(map(str, kind)) for kind in kinds}
    for (size, shards), source in sources.items():
        make_checkpoint(source, size, shards)
    nbytes = {
        kind: sum(path.stat().st_size for path in source.glob("*.safetensors"))
        for kind, source in sources.items()
    }
    null: dict[tuple[str, tuple[float, int]], list[dict[str, float]]] = {}
    cpu: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(rounds):
        for rule in RULES:
            cpu[rule].append(run_cpu(sources[CUT], output, rule).cpu_seconds)
            for kind, source in sources.items():
                null.setdefault((rule, kind), []).append(run_null(source, output, rule))
    rows, stages = [], {}
    for rule in RULES:
        wholes = [one["whole"] for one in null[rule, CUT]]
        ratio = statistics.median(a / b for a, b in zip(wholes, cpu[rule], strict=True))
        cells = [f"{statistics.median(each):.2f}" for each in (wholes, cpu[rule])]
        spread = f"{min(wholes):.2f}-{max(wholes):.2f}, {min(cpu[rule]):.2f}-{max(cpu[rule]):.2f}"
        bar = verdict(ratio, NULL_GPU_SHARE, is_floor=False) if rule == "mse" else ""
        rows.append([rule, *cells, spread, f"{ratio:.2f}", bar])
        # Of each part the least: what else runs on a machine only adds to CPU-seconds.
        least = [
            {name: min(one[name] for one in null[rule, kind]) for name in null[rule, kind][0]}
            for kind in kinds
        ]
        stages[rule] = stages_of(*least, nbytes[WHOLE] / 1e9)
    return rows, stages


def page(rows: list[list[str]], stages: dict[str, Stages], rounds: int) -> str:
    """Return host.md."""
    costs = [
        [
            rule,
            *(f"{getattr(one, name):.3f}" for name in ("whole", *OUTSIDE, "lock", "shard")),
        ]
        for rule, one in stages.items()
    ]
    limits = []
    for cores in CORES:
        found = stages["mse"].limits(cores)
        least = min(found.values())
        bar = verdict(least, FLOOR) if cores == MODEL_CORES else ""
        parts = ", ".join(f"{name} {rate:.0f}" for name, rate in found.items())
        limits.append([str(cores), parts, f"{least:.1f}", bar])
    texts = [
        "# What the host costs where a GPU computes",
        ABOUT.format(rounds=rounds, machine=machine()),
        f"## Beside the CPU\n\n{CUT[0]:g} GB of bf16 in memory, {CUT[1]} shards, to NVFP4.",
        table(
            ["rule", "null GPU CPU-s", "CPU CPU-s", "least to most of each", "ratio", "bar"], rows
        ),
        f"## A GB of bf16 more\n\n{STAGES}",
        table(["rule", "whole", *OUTSIDE, "lock", "a shard more"], costs),
        f"## What so many cores could do\n\n{MODEL}",
        table(["cores", "GB/s that each allows", "the least", "bar"], limits),
    ]
    return "\n\n".join(texts) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py host", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", default="/dev/shm", help="where checkpoints are made")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fp4convert-", dir=options.folder) as folder:
        text = page(*measure(Path(folder), options.rounds), options.rounds)
    (RESULTS / "host.md").write_text(text, encoding="utf-8")
    print(text)
    return 0
