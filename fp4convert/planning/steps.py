"""Describe what becomes of tensors: Step, Draft, Task, Shard.

A step says what becomes of a tensor and names its maker; a draft has no place yet; a task is one
shard of the result.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.makers.maker import Maker
from fp4convert.storage.safetensors import Frame, TensorRef, TensorSpec, total_nbytes

Action = Literal[
    "quantize",
    "dequantize",
    "transcode",
    "fold",
    "merge",
    "reorder",
    "prune",
    "copy",
    "skip",
    "write",
]


ENGINE_ONLY = "only the engine of the source has a use for it"
WRITTEN_ANEW = "written anew: the result has one of that name"


class Step(NamedTuple):
    """What becomes of one tensor, or of one module: a line of the plan.

    action   copy: stays by the recipe; skip: a linear layer that cannot be quantized, and stays;
             fold: it keeps its dtype, multiplied or divided by the factors of a fold; merge: it
             keeps its dtype, and an adapter changes it; reorder: a bias, put into the order of
             tiles or out of it; prune: parts of it stay; write: a scalar
    module   names the outputs: a module, or a stem of the dialect that holds several
    maker    makes the bytes; members of a scale group in one shard share it
    refs     the tensors that the values come from; none for a scalar
    shape    (rows, columns) of the matrix, longer for a stack; () where it stays
    form     of the module in the result; None for an ordinary tensor
    group    name of the scale group, or None
    linears  the linear layers whose values the result holds; none for a copied tensor
    outputs  places of the result; all in the shard of the step
    """

    action: Action
    reason: str
    module: str
    maker: Maker
    refs: tuple[TensorRef, ...]
    shape: tuple[int, ...] = ()
    form: Form | None = None
    group: str | None = None
    linears: tuple[Linear, ...] = ()
    outputs: tuple[TensorRef, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its one linear layer, else of its first tensor."""
        if len(self.linears) == 1:
            return self.linears[0].name
        return (*self.refs, *self.outputs)[0].name

    @property
    def source_bytes(self) -> int:
        return sum([linear.nbytes for linear in self.linears]) or total_nbytes(self.refs)

    @property
    def output_bytes(self) -> int:
        return total_nbytes(self.outputs)

    @property
    def is_made(self) -> bool:
        """Tell whether the result is quantized."""
        return self.form is not None

    @property
    def format(self) -> str:
        """Return the name of the format in the result; "" for an ordinary tensor."""
        return self.form.format.name if self.form else ""


class Draft(NamedTuple):
    """A step whose outputs have no place yet, and the tensors that it writes.

    scalar  a float32 that no tensor of the source holds: an input scale, or a scale of a cache
    amaxes  of its linear layers, where a file gives their global scales
    """

    step: Step
    specs: tuple[TensorSpec, ...]
    scalar: float | None = None
    amaxes: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.step.name if self.step.linears or self.step.refs else self.specs[0].name


class MakerSteps(NamedTuple):
    """A maker and the steps whose outputs it writes."""

    maker: Maker
    steps: list[Step]


class Shard(NamedTuple):
    """A file of the result: its size, its tensors and its header's parts.

    notes  entries of the header that engines read
    """

    file: str
    nbytes: int
    outputs: tuple[TensorRef, ...]
    frame: Frame
    notes: dict[str, str]

    @property
    def header(self) -> bytes:
        """Lay out the header anew: all headers would fill a plan's memory."""
        specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for ref in self.outputs]
        return self.frame.lay_out(self.file, specs, self.notes)[0]


@dataclass(frozen=True)
class Task:
    """One input shard becomes an output shard of the same name.

    A dialect whose scales stand apart adds a second output shard. No task depends on another.

    sources  the shards that are read
    promise  other things that the bytes depend on: the target, and the stamps of these shards
    """

    sources: tuple[str, ...]
    shards: tuple[Shard, ...]
    steps: tuple[Step, ...]
    promise: tuple[object, ...]

    @cached_property
    def key(self) -> str:
        """Return a hash; equal keys promise equal output bytes."""
        key = hashlib.sha256(repr(self.promise).encode())
        for work in self.works:
            key.update(repr(work.maker).encode())
        for shard in self.shards:
            header = shard.header
            key.update(json.dumps([shard.file, shard.nbytes, len(header)]).encode() + header)
        return key.hexdigest()

    @property
    def files(self) -> dict[str, int]:
        """Return the sizes of the files that are written."""
        return {shard.file: shard.nbytes for shard in self.shards}

    @property
    def source_bytes(self) -> int:
        """Count the bytes of the tensors that are read."""
        return sum(step.source_bytes for step in self.steps)

    @property
    def home(self) -> str | None:
        """Return the source's shard that becomes this one; None without one."""
        return next((ref.file for step in self.steps for ref in step.refs), None)

    @property
    def works(self) -> list[MakerSteps]:
        """List the makers with their steps."""
        return by_maker(self.steps)

    @property
    def by_home(self) -> dict[str | None, list[MakerSteps]]:
        """Return the makers by the shard that they read first."""
        homes: dict[str | None, list[MakerSteps]] = defaultdict(list)
        for work in self.works:
            refs = work.steps[0].refs
            homes[refs[0].file if refs else self.home].append(work)
        return homes

    @property
    def borrowed(self) -> set[str]:
        """Return the names of other shards whose bytes go into this one.

        Shards that are read for scales alone are no part of it: every shard with members of a scale
        group measures the same amax.
        """
        files = {ref.file for work in self.works for ref in work.maker.reads}
        return files - {str(self.home)}

    @property
    def outputs(self) -> list[TensorRef]:
        """List the tensors of the output shards."""
        return [ref for shard in self.shards for ref in shard.outputs]


def by_maker(steps: Iterable[Step]) -> list[MakerSteps]:
    """Return the makers of steps, each with its own steps."""
    works: dict[int, MakerSteps] = {}
    for step in steps:
        works.setdefault(id(step.maker), MakerSteps(step.maker, [])).steps.append(step)
    return list(works.values())


def spec_of(ref: TensorRef) -> TensorSpec:
    """Return the spec of an unchanged tensor."""
    return TensorSpec(ref.name, ref.dtype, ref.shape)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def refuse_forgotten(
    tensors: Iterable[TensorRef],
    tasks: Iterable[Task],
    left_out: Mapping[str, str],
    homes: Mapping[str, TensorRef],
) -> None:
    """Check that each tensor is read by a step, or left out for a reason.

    A stack of experts that is read in parts must be read whole, and a step must read each of its
    modules, because several modules may lie in the same bytes.

    tensors   of the source; of a tensor that is cut, the parts that stay
    left_out  reasons, by the name of the tensor
    homes     linear layer -> the tensor that holds it
    Raises    InputError that names the first, and counts them
    """
    steps = [step for task in tasks for step in task.steps]
    read = [ref for step in steps for ref in step.refs]
    named = {ref.name for ref in read}
    unnamed = [ref for ref in tensors if ref.name not in named and not left_out.get(ref.name)]
    forgotten = {ref.name: ref for ref in _find_unread(unnamed, read)} if unnamed else {}
    modules = {linear.module for step in steps for linear in step.linears}
    if missing := homes.keys() - modules:
        written = {ref.name for step in steps for ref in step.outputs}
        lost = [name for name in homes if name in missing and homes[name].name not in written]
        forgotten |= {name: homes[name] for name in lost}
    if forgotten:
        name, ref = next(iter(forgotten.items()))
        detail = (
            f"{ref.file}: {name!r} ({ref.dtype} {list(ref.shape)}) would be in no output and in no"
            f" list of what is left out, one of {len(forgotten)} such; expected a place or a reason"
            " for every tensor and linear layer of the source"
        )
        raise InputError("tensor-forgotten", detail, tensor=name)


def _find_unread(tensors: Iterable[TensorRef], read: Iterable[TensorRef]) -> list[TensorRef]:
    """Find tensors with bytes outside the parts that are read."""
    parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for ref in read:
        parts[ref.file].append((ref.start, ref.start + ref.nbytes))
    for spans in parts.values():
        spans.sort()
    found = []
    for ref in tensors:
        spans, at, end = parts[ref.file], ref.start, ref.start + ref.nbytes
        for first, last in spans[bisect_left(spans, (at, at)) :]:
            if first > at or at >= end:
                break
            at = max(at, last)
        if at < end or not ref.nbytes:
            found.append(ref)
    return found
