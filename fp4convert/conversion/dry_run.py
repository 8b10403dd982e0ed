"""Say what a plan comes to: rows, sizes, memory, time, warnings.

Everything follows from the plan and from this machine; of a source on a disk some rows are read, to
see whether its weights were trained with fake quantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fp4convert.checkpoint.module_names import join_names, reading_rank, split_leaf, split_numbers
from fp4convert.checkpoint.record import TABLE, method_settings
from fp4convert.conversion.artifact_job import describe_adapter
from fp4convert.conversion.device_choice import (
    choose_device,
    hashed_bytes_per_second,
    rounded_by,
    weights_per_second,
)
from fp4convert.execution.job import Job
from fp4convert.execution.settings import Settings
from fp4convert.makers.methods.returning import glance
from fp4convert.makers.table import caller_nbytes, callers
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.base import Backend
from fp4convert.numerics.fake_quantization import is_on_grid
from fp4convert.numerics.formats import RTN, format_named
from fp4convert.planning.method_needs import reopened
from fp4convert.planning.plan import Plan, bits_per_weight_of
from fp4convert.planning.steps import Step
from fp4convert.planning.tensor_parallel import OPTION, can_pad, find_bad_splits
from fp4convert.process import processors
from fp4convert.progress import are_text, size_text
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source, uncollected

BASE_NBYTES = 50 << 20  # the interpreter with its packages
GLANCES = 16  # matrices whose rows are looked at
UNPACKED = "dequantize"  # what becomes of packed weights that stay
READING_RATES = {  # a good disk or line, and a poor one
    "at_1_gb_per_second": 1e9,
    "at_100_mb_per_second": 1e8,
}
EMBEDDINGS = ("embed", "wte", "wpe")  # in the name of what stands before the layers
# In names beside the language model.
ASIDE = ("visual", "vision", "audio", "image", "multi_modal", "mm_proj", "mtp")
VERDICT = ("action", "reason", "group", "format")  # steps that share a row have the same


class Sized(NamedTuple):
    """A step with its sizes, which a step adds up anew each time."""

    step: Step
    source_bytes: int
    output_bytes: int


@uncollected()
def describe_plan(job: Job, settings: Settings) -> dict[str, object]:
    """Make the document of `quantize --dry-run --json`.

    source_bytes       of the source's shards, as the result of the run says
    output_bytes       of all files, as the result of the run says; quantization_report.json, some
                       500 bytes a module, comes on top
    bits_per_weight    of the quantized modules
    added_bytes        by packed weights that stay and are written as bf16
    peak_memory_bytes  what workers hold beside mapped pages
    peak_disk_bytes    at most, of all files, the report and .fp4convert, as the disk counts them
    Raises DeviceError for a device that is not there.
    """
    source, plan = job.source, job.plan
    choice = choose_device(settings.device, plan.target, rounded_by(plan))
    backend = open_backend(choice.device)
    known: dict[int, int] = {}  # sizes, of which there are few
    sized = []
    for step in plan.steps:
        read, made = step.source_bytes, step.output_bytes
        sized.append(Sized(step, known.setdefault(read, read), known.setdefault(made, made)))
    shapes = {step.shape for step in plan.steps if step.shape}
    widest = max(shapes, key=lambda shape: shape[-1], default=())
    calibration = reopened(plan)
    workers = settings.workers or callers(plan.target, backend, calibration)
    held_nbytes = backend.held_nbytes(workers, widest[-1] if widest else 0)
    held_nbytes += workers * caller_nbytes(plan.target, calibration)
    read_nbytes = source.held_nbytes(each_group(plan), workers)
    own = None if source.checkpoint.padding else source
    return {
        "format": plan.target.format,
        "dialect": plan.target.dialect,
        "method": plan.target.method,
        "calibration": plan.target.calibration,
        **({"adapter": describe_adapter(plan)} if plan.adapter else {}),
        **method_settings(plan.target),
        **({"fake_quantized": found} if (found := find_fake_quantized(source, plan)) else {}),
        "source_bytes": source.checkpoint.nbytes,
        "output_bytes": job.result_nbytes,
        "bits_per_weight": bits_per_weight_of((step, nbytes) for step, _, nbytes in sized),
        "added_bytes": _added_nbytes(sized),
        "peak_memory_bytes": BASE_NBYTES + held_nbytes + read_nbytes,
        "peak_disk_bytes": job.peak_nbytes,
        "seconds_estimated": estimate_seconds(source, plan, backend, workers)
        | {"device_reason": choice.reason or None},
        **describe_steps(sized),
        "left_out": describe_left_out(plan),
        "warnings": [*plan.warnings, *find_doubts(sized, plan, own)],
        "unexplained": [one._asdict() for one in plan.judged.unexplained],
    }


def each_group(plan: Plan) -> Iterator[int]:
    """Yield the bytes of each scale group that is measured, as they lie.

    Nothing is counted before they are asked for: a source on a disk never asks.
    """
    for task in plan.tasks:
        groups = []
        for maker, steps in task.works:
            if nbytes := maker.held_nbytes:
                groups.append((min([step.refs[0].start for step in steps]), nbytes))
        for _, nbytes in sorted(groups):
            yield nbytes


def find_fake_quantized(source: Source, plan: Plan) -> dict[str, int] | None:
    """Look whether weights are values of the format that they become.

    Rows of a few matrices are read, spread over the model; none of the Hub, where each would be a
    request: there the result tells.

    Returns  None where there are none; modules: how many were looked at; found: those whose blocks
             are steps times E2M1 values; blocks: of these that tell; exact: those that are such
    """
    if source.is_streamed:
        return None
    fp4 = (step for step in plan.steps if step.action == "quantize" and step.form)
    linears = [
        (linear, step.form.format)
        for step in fp4
        if step.form and step.form.format.is_fp4
        for linear in step.linears
        if not linear.coding.is_packed and not linear.coding.is_spread
    ]
    number = min(GLANCES, len(linears))
    chosen = [linears[(2 * at + 1) * len(linears) // (2 * number)] for at in range(number)]
    counts = [glance(one.coding.weights(one, source), fmt) for one, fmt in chosen]
    found = [own for own in counts if is_on_grid(*own)]
    if not found:
        return None
    blocks, exact = (sum(own[place] for own in found) for place in (0, 1))
    return {"modules": number, "found": len(found), "blocks": blocks, "exact": exact}


def describe_steps(
    sized: list[Sized], named: Callable[[Step], str] = lambda step: step.name
) -> dict[str, object]:
    """Describe steps for a dry run: in few rows for a person, and one by one.

    named  what the steps are called one by one
    """
    patterns = join_steps(sized)  # first: what that needs meanwhile is free again
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
    return {"patterns": patterns, "tensors": tensors}


def describe_left_out(plan: Plan) -> list[dict[str, str]]:
    """List tensors of the source that no output has, and why."""
    return [{"name": name, "reason": reason} for name, reason in plan.left_out.items()]


def estimate_seconds(
    source: Source, plan: Plan, backend: Backend, workers: int
) -> dict[str, object]:
    """Estimate how long the work takes here, and the source to arrive.

    The longer of them is the least.

    device      that calculates; describe_plan adds why --device auto chose it
    arithmetic  the weights that are quantized, at the rate of the device with all its threads,
                measured for 0.1 s
    hashing     every byte that is written, several shards at once, and of a streamed source every
                byte that is read, at a measured rate
    work        both; the time of the disk that is written to, and of decoding what is packed, is
                not in it
    reading     the source, at two rates that a disk or a line may have
    """
    shapes = [step.shape for step in plan.steps if step.action == "quantize"]
    arithmetic = 0.0
    if shapes:
        columns = max(shape[-1] for shape in shapes)
        rate = weights_per_second(backend, plan.target, columns, workers)
        arithmetic = sum(map(math.prod, shapes)) / rate
    at_once = max(1, min(processors(), len(plan.tasks)))
    arriving = source.checkpoint.nbytes if source.is_streamed else 0
    hashing = (plan.output_bytes / at_once + arriving) / hashed_bytes_per_second()
    return {
        "device": backend.name,
        "threads": workers or backend.threads,
        "arithmetic": arithmetic,
        "hashing": hashing,
        "work": arithmetic + hashing,
        "reading": {key: source.checkpoint.nbytes / rate for key, rate in READING_RATES.items()},
    }


def join_steps(sized: Sequence[Sized]) -> list[dict[str, object]]:
    """Make a row for every kind of module with one verdict.

    Rows are in the order of a model: embeddings, layers, what follows them. `group` in a row is the
    members of the scale group that become four-bit; None where a module is alone.
    """
    named = []
    known: dict[Any, Any] = {}  # few verdicts, of many steps
    for step, _, _ in sized:
        # A person calls a linear layer by its module, another weight without that word.
        name = step.module if step.shape else step.name.removesuffix(WEIGHT)
        group = step.group.rpartition(".")[2] if step.group else None
        words = step.action, step.reason, group, step.format or None
        named.append((name, known.setdefault(words, words)))
    rows = []
    begun: dict[str, int] = {}  # where each stack of layers begins
    for pattern, places in join_names(named):
        name, verdict = named[places[0]]
        row: dict[str, object] = {
            "pattern": pattern,
            "count": len(places),
            **dict(zip(VERDICT, verdict, strict=True)),
            "source_bytes": sum(sized[at].source_bytes for at in places),
            "output_bytes": sum(sized[at].output_bytes for at in places),
        }
        at = min(places)
        rows.append((name, sized[places[0]].step, at, row))
        # A stack is what stands before the first number: layers of one kind.
        texts, numbers = split_numbers(name)
        stack = texts[0] if numbers else ""
        begun[stack] = min(at, begun.get(stack, at))
    ordered = sorted(
        ((_row_order(name, step, at, row, begun), row) for name, step, at, row in rows),
        key=itemgetter(0),
    )
    return [row for _, row in ordered]


def _row_order(
    name: str, step: Step, at: int, row: Mapping[str, object], begun: Mapping[str, int]
) -> tuple[object, ...]:
    """Return a key that sorts rows in the order of a model.

    In a stack of layers attention stands first, and what has one parent side by side, matrices
    first.

    name   the lowest of the row; `step` is its own
    at     where the row's first tensor is in the checkpoint
    begun  where each stack begins
    """
    pattern = str(row["pattern"])
    texts, numbers = split_numbers(name)
    is_matrix = len(step.shape or (*step.refs, *step.outputs)[0].shape) > 1
    rank = reading_rank(split_leaf(name)[1])[:-1]
    parent, _, parameter = split_leaf(pattern)
    beside = not is_matrix, bool(parameter), rank, at
    if numbers and texts[0]:
        return 1, begun[texts[0]], numbers[0], "att" not in parent, parent, *beside
    if any(aside in pattern for aside in ASIDE):
        return 2, 0, 0, False, parent, *beside
    if any(word in pattern for word in EMBEDDINGS):
        return 0, 0, 0, False, "", *beside
    # The last norm before the head.
    return 3, 0, 0, is_matrix, "", False, bool(parameter), (), at


def find_doubts(sized: Sequence[Sized], plan: Plan, source: Source | None = None) -> list[str]:
    """List what a person should know of a plan as it came out.

    source  to which zeros may be added, or None
    """
    found = []
    before, after = sum(one.source_bytes for one in sized), sum(one.output_bytes for one in sized)
    if after > before and size_text(after) != size_text(before):
        sizes = f"{size_text(before)} become {size_text(after)}"
        warning = f"the result is larger than the source: {sizes}"
        if (added := _added_nbytes(sized)) > 0:
            because = f"packed weights that are kept add, as bf16, {size_text(added)}"
            warning = f"{warning}; {because}: see --keep-packed"
        found.append(warning)
    kept = (one for one in sized if not one.step.is_made and TABLE.fullmatch(one.step.module))
    tables = [one.output_bytes for one in kept]
    if 4 * sum(tables) > after:
        share = f"{size_text(sum(tables))} of {size_text(after)}"
        found.append(f"{are_text(len(tables), 'tensor')} of n-gram tables, and kept: {share}")
    if plan.target.method != RTN:
        longer = f"{plan.target.method} takes longer (docs/methods.md)"
        found.append(f"the time is that of --method {RTN}; {longer}")
    for line, ranks in find_bad_splits(plan):
        block_size = max(format_named(plan.target.format).block_size, 1)
        mended = f"; {OPTION} {ranks[-1]} adds zeros, with which they can"
        is_offered = source is not None and can_pad(source, ranks[-1], block_size)
        found.append(f"{line}{mended if is_offered else ''}")
    return found


def _added_nbytes(sized: Sequence[Sized]) -> int:
    return sum(one.output_bytes - one.source_bytes for one in sized if one.step.action == UNPACKED)
