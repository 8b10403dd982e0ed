"""Say what a plan comes to: rows, sizes, memory, time, warnings.

Everything follows from the plan and from this machine; of the source nothing is read.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.module_names import join_names, reading_rank, split_leaf, split_numbers
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.execution.rounding import Rounding
from fp4convert.execution.settings import Settings
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.formats import IMPORTANCE, format_named
from fp4convert.numerics.matrices import PANEL_ELEMENTS, Matrix, RowReader
from fp4convert.planning.method_needs import RTN, reopened
from fp4convert.planning.steps import Plan, Step, bits_per_weight_of
from fp4convert.progress import size_text
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source, uncollected

SECONDS = 0.1  # of arithmetic; of hashing a third
SMALLEST, LARGEST = (
    1 << 20,
    64 << 20,
)  # weights of a sample: twice as many each time, until what begins a call costs nothing
UNIT_NBYTES = 1 << 20
WIDEST = 1 << 20
ELEMENT_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates of this machine.

    threads                  that work at once
    weights_per_second       of all threads together; None where nothing is quantized
    hashed_bytes_per_second  of the one thread that hashes what is written
    """

    threads: int
    weights_per_second: float | None
    hashed_bytes_per_second: float


def measure_pace(backend: Backend, target: Target, widest: Sequence[int], threads: int) -> Pace:
    """The rates for a plan; takes a fifth of a second.

    widest   shape of the matrix with the longest rows, which the samples resemble; () where there is none
    threads  0 is as many as suit the device
    """
    threads = threads or backend.threads
    data = _made_up_weights()
    hashed = 0
    begun = time.perf_counter()
    while (seconds := time.perf_counter() - begun) < SECONDS / 3:
        hashlib.sha256(data)
        hashed += len(data)
    rate = (
        _rate_of_weights(backend, target, _Sample((1, min(widest[-1], WIDEST)), data), threads)
        if widest
        else None
    )
    return Pace(threads, rate, hashed / seconds)


def _rate_of_weights(backend: Backend, target: Target, sample: _Sample, threads: int) -> float:
    """Weights that all threads quantize in a second."""
    fmt = format_named(target.format)
    rule, columns = target.rule_for(fmt), sample.shape[1]
    given = Given(importance=[np.ones(columns, np.float32)] if rule == IMPORTANCE else ())

    def work(seconds: float) -> int:
        """Weights done, of one sample at least."""
        done, count, ended = 0, SMALLEST, time.perf_counter() + seconds
        while not done or time.perf_counter() < ended:
            rows = max(1, count // columns)
            weights = _Sample((rows, columns), sample.data)
            for _ in backend.quantize_group([weights], [weights], fmt, rule, given):
                pass
            done, count = done + rows * columns, min(2 * count, LARGEST)
        return done

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [0.0] * threads))  # what is loaded, compiled or reserved once
        begun = time.perf_counter()
        done = sum(pool.map(work, [SECONDS] * threads))
        return done / (time.perf_counter() - begun)


def _made_up_weights() -> bytes:
    """A panel of finite bf16 numbers of both signs, none much larger than weights are."""
    random, half = Random(0), UNIT_NBYTES // ELEMENT_NBYTES
    signs_and_exponents = bytes((byte & 0x80) | 0x3A + (byte & 3) for byte in range(256))
    unit = bytearray(UNIT_NBYTES)
    unit[0::2] = random.randbytes(half)
    unit[1::2] = random.randbytes(half).translate(signs_and_exponents)
    return bytes(unit) * (PANEL_ELEMENTS * ELEMENT_NBYTES // UNIT_NBYTES)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample(RowReader):
    """Weights of any height, which are the same few rows again and again."""

    shape: tuple[int, int]
    data: bytes
    dtype: str = "BF16"

    def rows(self, first: int, last: int) -> Matrix:
        nbytes = (last - first) * self.shape[1] * ELEMENT_NBYTES
        data = self.data * -(-nbytes // len(self.data)) if nbytes > len(self.data) else self.data
        return Matrix(memoryview(data)[:nbytes], self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        for at in range(0, buffer.nbytes, len(self.data)):
            part = self.data[: buffer.nbytes - at]
            buffer[at : at + len(part)] = part


BASE_NBYTES = 100 << 20  # the interpreter with its packages
UNPACKED = "dequantize"  # what becomes of packed weights that stay
READING_RATES = {
    "at_1_gb_per_second": 1e9,
    "at_100_mb_per_second": 1e8,
}  # a good disk or line, and a poor one
RANKS = (2, 4, 8)  # of tensor parallelism
ROW_PARALLEL = (
    frozenset(  # layers whose columns (K) vLLM, SGLang and TensorRT-LLM divide among ranks
        {
            *("o_proj", "out_proj", "wo", "c_proj", "dense_4h_to_h"),
            *("down_proj", "w2", "fc2", "fc_out", "linear_fc2"),
        }
    )
)
COLUMN_PARALLEL = frozenset(  # whose rows they divide; not k_proj and v_proj, which they repeat where heads are few
    {
        *("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
        *("fc1", "c_fc", "fc_in", "linear_fc1", "dense_h_to_4h", "wi", "wi_0", "wi_1"),
    }
)
EMBEDDINGS = ("embed", "wte", "wpe")  # in the name of what stands before the layers
ASIDE = (
    "visual",
    "vision",
    "audio",
    "image",
    "multi_modal",
    "mm_proj",
    "mtp",
)  # in names beside the language model


@uncollected()
def describe_plan(source: Source, plan: Plan, settings: Settings) -> dict[str, object]:
    """The document of `quantize --dry-run --json`.

    source_bytes, output_bytes  of tensors and of shards; the result of the run counts whole files
    bits_per_weight             of the quantized modules
    added_bytes                 by packed weights that stay and are written as bf16
    peak_memory_bytes           what workers hold beside mapped pages
    peak_disk_bytes             of everything that is written, but for our own record
    Raises DeviceError for a device that is not there.
    """
    backend = open_backend(settings.device)
    sized = [Sized(step, step.source_bytes, step.output_bytes) for step in plan.steps]
    widest = max(
        (step.shape for step in plan.steps if step.shape), key=lambda shape: shape[-1], default=()
    )
    rounding = Rounding(plan.target, backend, reopened(plan))
    held_nbytes = rounding.held_nbytes(settings.workers, widest[-1] if widest else 0)
    return {
        "format": plan.target.format,
        "dialect": plan.target.dialect,
        "method": plan.target.method,
        "calibration": plan.target.calibration,
        "source_bytes": sum(step.source_bytes for step in sized),
        "output_bytes": plan.output_bytes,
        "bits_per_weight": bits_per_weight_of((step, nbytes) for step, _, nbytes in sized),
        "added_bytes": _added_nbytes(sized),
        "peak_memory_bytes": BASE_NBYTES
        + held_nbytes
        + min(source.held_nbytes, source.checkpoint.nbytes),
        "peak_disk_bytes": artifact_job(source, plan).output_nbytes,
        "seconds_estimated": estimate_seconds(
            source, plan, backend, settings.workers or rounding.threads
        ),
        **describe_steps(sized),
        "warnings": [*plan.warnings, *find_doubts(sized, plan)],
    }


def describe_steps(
    sized: list[Sized], named: Callable[[Step], str] = lambda step: step.name
) -> dict[str, object]:
    """What a document of a dry run says of steps: in few rows for a person, and one by one under these names."""
    tensors = [
        {
            "name": named(step),
            "action": step.action,
            "reason": step.reason,
            "group": step.group,
            "source_bytes": source_nbytes,
            "output_bytes": output_nbytes,
        }
        for step, source_nbytes, output_nbytes in sized
    ]
    return {"patterns": join_steps(sized), "tensors": tensors}


class Sized(NamedTuple):
    """A step with its sizes, which are asked for often and added up anew each time."""

    step: Step
    source_bytes: int
    output_bytes: int


def estimate_seconds(
    source: Source, plan: Plan, backend: Backend, workers: int
) -> dict[str, object]:
    """How long the work takes here, and beside it how long the source takes to arrive; the longer of them is the least.

    device      that calculates
    arithmetic  the weights that are quantized, at the rate of the device with all its threads, measured for 0.1 s
    hashing     every byte that is written, and of a streamed source every byte that is read, at a measured rate
    work        both; the time of the disk that is written to, and of decoding what is packed, is not in it
    reading     the source, at two rates that a disk or a line may have
    """
    shapes = [step.shape for step in plan.steps if step.action == "quantize"]
    widest = max(shapes, key=lambda shape: shape[-1], default=())
    pace = measure_pace(backend, plan.target, widest, workers)
    arithmetic = (
        sum(map(math.prod, shapes)) / pace.weights_per_second if pace.weights_per_second else 0.0
    )
    hashed = plan.output_bytes + (source.checkpoint.nbytes if source.is_streamed else 0)
    hashing = hashed / pace.hashed_bytes_per_second
    return {
        "device": backend.name,
        "threads": pace.threads,
        "arithmetic": arithmetic,
        "hashing": hashing,
        "work": arithmetic + hashing,
        "reading": {key: source.checkpoint.nbytes / rate for key, rate in READING_RATES.items()},
    }


class Row(NamedTuple):
    """What is said of a step; those that are told in one row have the same.

    group  the members of its scale group that become four-bit; None where it is alone
    """

    action: str
    reason: str
    group: str | None
    format: str | None


def join_steps(sized: Sequence[Sized]) -> list[dict[str, object]]:
    """A row for every kind of module with one verdict, in the order of a model: embeddings, layers, what follows them."""
    told = [(_name_of(one.step), _row_on(one.step)) for one in sized]
    rows = []
    for pattern, places in join_names(told):
        name, common = told[places[0]]
        row = {
            "pattern": pattern,
            "count": len(places),
            **common._asdict(),
            "source_bytes": sum(sized[at].source_bytes for at in places),
            "output_bytes": sum(sized[at].output_bytes for at in places),
        }
        rows.append((_Place.of(pattern, name, sized[places[0]].step, min(places)), row))
    begun: dict[str, int] = {}
    for place, _ in rows:
        begun[place.stack] = min(place.at, begun.get(place.stack, place.at))
    return [row for _, row in sorted(rows, key=lambda item: item[0].order(begun))]


class _Place(NamedTuple):
    """Where a row belongs.

    stack   what stands before the first number: layers of one kind; nothing where there is none
    lowest  that number
    rank    of its first word, in reading order
    at      where its first tensor is in the checkpoint
    """

    stack: str
    lowest: int
    pattern: str
    is_matrix: bool
    rank: tuple[int, str, int]
    at: int

    @classmethod
    def of(cls, pattern: str, name: str, step: Step, at: int) -> _Place:
        """The place of a row, whose lowest name and its step these are."""
        texts, numbers = split_numbers(name)
        is_matrix = len(step.shape or (*step.refs, *step.outputs)[0].shape) > 1
        rank = reading_rank(split_leaf(name)[1])[:-1]
        return cls(
            texts[0] if numbers else "", numbers[0] if numbers else 0, pattern, is_matrix, rank, at
        )

    def order(self, begun: dict[str, int]) -> tuple[object, ...]:
        """Sorts rows: in a stack of layers attention stands first, and what has one parent side by side, matrices first.

        begun  where each stack begins
        """
        parent, _, parameter = split_leaf(self.pattern)
        beside = not self.is_matrix, bool(parameter), self.rank, self.at
        if self.stack:
            return 1, begun[self.stack], self.lowest, "att" not in parent, parent, *beside
        if any(aside in self.pattern for aside in ASIDE):
            return 2, 0, 0, False, parent, *beside
        if any(name in self.pattern for name in EMBEDDINGS):
            return 0, 0, 0, False, "", *beside
        return (
            3,
            0,
            0,
            self.is_matrix,
            "",
            False,
            bool(parameter),
            (),
            self.at,
        )  # the last norm before the head


def _name_of(step: Step) -> str:
    """What a person calls it: a linear layer by its module, another weight without that word."""
    return step.module if step.shape else step.name.removesuffix(WEIGHT)


def _row_on(step: Step) -> Row:
    return Row(
        step.action,
        step.reason,
        step.group.rpartition(".")[2] if step.group else None,
        step.format or None,
    )


def find_doubts(sized: Sequence[Sized], plan: Plan) -> list[str]:
    """What a person should know of a plan as it came out."""
    before, after = sum(one.source_bytes for one in sized), sum(one.output_bytes for one in sized)
    larger = []
    if after > before and size_text(after) != size_text(before):
        added = _added_nbytes(sized)
        because = (
            f"; packed weights that stay, written as bf16, add {size_text(added)}: see --keep-packed"
            if added > 0
            else ""
        )
        larger = [
            f"the result is larger than the source: {size_text(before)} become {size_text(after)}{because}"
        ]
    slower = [
        f"the time is that of --method {RTN}; {plan.target.method} takes longer (docs/methods.md)"
    ]
    return [*larger, *(slower if plan.target.method != RTN else []), *_find_bad_splits(plan)]


def _added_nbytes(sized: Sequence[Sized]) -> int:
    return sum(one.output_bytes - one.source_bytes for one in sized if one.step.action == UNPACKED)


def _find_bad_splits(plan: Plan) -> Iterator[str]:
    """A warning for every kind of layer that some number of ranks cannot divide."""
    kinds: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for step in plan.steps:
        if step.form and len(step.shape) > 1:
            leaf = step.module.rpartition(".")[2]
            if leaf in ROW_PARALLEL:
                kinds[leaf, step.shape[-1], step.form.format.block_size].append(step.module)
            elif leaf in COLUMN_PARALLEL:
                kinds[leaf, step.shape[-2], 0].append(step.module)
    for (leaf, size, block), modules in kinds.items():
        if bad := [str(ranks) for ranks in RANKS if size % (ranks * max(block, 1))]:
            evenly = (
                f"{size} columns cannot be divided into whole blocks of {block}"
                if block
                else f"{size} rows cannot be divided"
            )
            among = f"among {' or '.join(filter(None, (', '.join(bad[:-1]), bad[-1])))} ranks of tensor parallelism"
            where = (
                f"{len(modules):,} modules, the first {modules[0]!r}"
                if len(modules) > 1
                else f"1 module, {modules[0]!r}"
            )
            yield f"{leaf}: {evenly} {among} ({where})"
