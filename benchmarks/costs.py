"""What a byte, a weight, a tensor and a shard cost here: each stage by itself, none of them in a conversion that is predicted.

rounding   pace.measure_pace, by which a dry run estimates; of FP8 the package's own worker, whose output is thrown away
start, shard, tensor  whole commands on checkpoints of next to nothing that differ in one of them
planning   prepare_quantize of the same
the rest   the package's own functions on a file of 256 MB
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conversion import THREADS
from llamas import HIDDEN, MLP, write_shard
from measure import seconds
from processes import COMMAND, clean_environment
from sources import EXPERTS, as_fp8, write
from timeline import Costs

from fp4convert.backends import open_backend
from fp4convert.backends.cpu import READ_ELEMENTS
from fp4convert.convert import Request, prepare_quantize
from fp4convert.disk import hash_file, reserve
from fp4convert.makers import Quantizer
from fp4convert.pace import measure_pace
from fp4convert.shard import ShardWriter, TensorRef
from fp4convert.sources import open_source

FORMAT = "nvfp4"
NBYTES, PIECE_NBYTES = 256 << 20, READ_ELEMENTS * 9 // 16  # written; what a panel becomes
SMALL = 64  # rows and columns of a matrix that costs nothing
FEW, MANY, SHARDS = 4, 1000, 24  # matrices of a shard, and shards
FP8_SHAPE = (2048, 7168)  # an expert's of DeepSeek-V3
PAGE_NBYTES = 4096
REPEATS = 3  # of a command


class Found(NamedTuple):
    """Costs by rule, and the bytes a second that this disk flushes."""

    costs: dict[str, Costs]
    disk: float


class Discarding:
    """A TaskWriter that keeps nothing."""

    def __init__(self) -> None:
        self.global_scales: dict[str, float] = {}
        self.accounts: dict[str, object] = {}
        self.taken_over: set[str] = set()

    def append(self, ref: TensorRef, data: memoryview) -> None:
        """Nothing."""


def quantize(source: Path, output: Path, *options: object) -> None:
    """The whole command, into a new folder."""
    shutil.rmtree(output, ignore_errors=True)
    words = [COMMAND, "quantize", source, "--format", FORMAT, "-o", output, "-q", "--device", "cpu", *options]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, env=clean_environment())


def write_small(folder: Path, shards: int, matrices: int) -> Path:
    """A checkpoint of so many shards of so many matrices of 8 kB, each a scale group of its own."""
    folder.mkdir(parents=True)
    pattern = np.full(SMALL * SMALL, 0x3C00, np.uint16)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}.safetensors"
        shapes = {f"model.layers.{shard * matrices + at}.mlp.down_proj.weight": (SMALL, SMALL) for at in range(matrices)}
        write_shard(folder / file, shapes, pattern)
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return folder


def write_fp8(folder: Path) -> Path:
    """Experts of DeepSeek-V3's shape in FP8, one matrix again and again."""
    noise = np.random.default_rng(0).standard_normal(FP8_SHAPE, np.float32) * np.float32(0.02)
    codes, scales = as_fp8(noise)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        tensors |= {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}
    record = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return write(folder, {"model_type": "qwen3_moe", "quantization_config": record}, tensors)


class Stages:
    """Everything that is measured, with the files that it needs; once around takes some ten seconds.

    least  a checkpoint of next to nothing
    """

    def __init__(self, scratch: Path, rules: tuple[str, ...]) -> None:
        self._scratch, self._rules, self._backend = scratch, rules, open_backend("cpu")
        self.least = write_small(scratch / "least", 1, FEW)
        self._tensors = write_small(scratch / "tensors", 1, MANY)
        self._shards = write_small(scratch / "shards", SHARDS, FEW)
        self._fp8 = write_fp8(scratch / "fp8")
        self._found: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Measure everything once more."""
        output = self._scratch / "out"
        least, tensors, shards = (
            statistics.median(seconds(lambda source=source: quantize(source, output)) for _ in range(REPEATS))
            for source in (self.least, self._tensors, self._shards)
        )
        planned = [seconds(lambda source=source: _plan(source)) for source in (self.least, self._tensors)]
        planning = max(0.0, (planned[1] - planned[0]) / (MANY - FEW))
        tensor = max(0.0, (tensors - least) / (MANY - FEW) - planning)
        self._note("start", least)
        self._note("planning", planning)
        self._note("tensor", tensor)
        self._note("shard", max(0.0, (shards - least) / (SHARDS - 1) - FEW * (tensor + planning)))
        for rule in self._rules:
            target = prepare_quantize(open_source(str(self.least)), Request(FORMAT, scale_rule=rule)).target
            pace = measure_pace(self._backend, target, (HIDDEN, MLP), THREADS)
            self._note(f"BF16 {rule}", THREADS / (pace.weights_per_second or 1))
            self._note(f"F8_E4M3 {rule}", self._fp8_seconds(rule))
        self._measure_disk()

    def found(self) -> Found:
        """The medians of all that was measured so far."""
        medians = {name: statistics.median(values) for name, values in self._found.items()}
        fields = {name: medians[name] for name in Costs._fields if name != "rounding"}
        dtypes = ("BF16", "F8_E4M3")
        costs = {rule: Costs(rounding={dtype: medians[f"{dtype} {rule}"] for dtype in dtypes}, **fields) for rule in self._rules}
        return Found(costs, 1 / medians["flushing"])

    def _note(self, name: str, value: float) -> None:
        self._found.setdefault(name, []).append(value)

    def _fp8_seconds(self, rule: str) -> float:
        """Core seconds a weight: read, decoded, measured, rounded."""
        source = open_source(str(self._fp8))
        plan = prepare_quantize(source, Request(FORMAT, scale_rule=rule))
        worker, stop = Quantizer(source, plan.target, self._backend), threading.Event()
        steps = [step for step in plan.steps if step.action == "quantize"]

        def work() -> None:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda step: worker([step], Discarding(), stop), steps))

        work()
        return seconds(work) * THREADS / (len(steps) * FP8_SHAPE[0] * FP8_SHAPE[1])

    def _measure_disk(self) -> None:
        """A file written by all threads at once, hashed and read through a mapping; and one flushed, all of it at the end."""
        each = NBYTES // THREADS // PIECE_NBYTES * PIECE_NBYTES
        refs = [TensorRef(str(number), "U8", (each,), "file", number * each) for number in range(THREADS)]
        path, piece = self._scratch / "file", memoryview(bytes(PIECE_NBYTES))
        written: list[ShardWriter] = []

        def append(ref: TensorRef) -> None:
            for _ in range(each // PIECE_NBYTES):
                written[0].append(ref, piece)

        def write_all() -> None:
            written.append(ShardWriter(path, b"", refs, each * THREADS))
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(append, refs))

        os.sync()
        nbytes = each * THREADS
        self._note("writing", seconds(write_all) * THREADS / nbytes)
        os.sync()
        self._note("hashing", seconds(partial(hash_file, path)) / nbytes)
        self._note("reading", seconds(lambda: touch(path)) / nbytes)
        written[0].discard()
        with path.open("wb") as out:
            reserve(out.fileno(), nbytes)
            out.write(bytes(nbytes))
            out.flush()
            self._note("flushing", seconds(lambda: os.fsync(out.fileno())) / nbytes)
        path.unlink()


def touch(path: Path) -> None:
    """Have every page of a file that is in memory mapped, as a source's are."""
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    int(np.frombuffer(mapped, np.uint8)[::PAGE_NBYTES].sum())


def _plan(source: Path) -> None:
    prepare_quantize(open_source(str(source)), Request(FORMAT))
