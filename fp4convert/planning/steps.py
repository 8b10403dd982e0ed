"""Describe what becomes of tensors: Step, Draft, Task, Shard.

A step says what becomes of a tensor and names its maker; a draft has no place yet; a task is one
shard of the result.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.encodings.base import Linear
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


class Step(NamedTuple):
    """What becomes of one tensor, or of one module: a line of the plan.

    action   copy: stays by the recipe; skip: a linear layer that cannot be quantized, and stays as
             it is; fold: it keeps its dtype, multiplied or divided by the factors of a fold;
             merge: it keeps its dtype, and an adapter changes it; reorder: a bias, put into the
             order of tiles or out of it; prune: parts of it stay; write: a scalar
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
        """Name it as a person looks for it.

        By its tensor, or by the module where the tensor holds others too.
        """
        return (
            self.linears[0].name if len(self.linears) == 1 else (*self.refs, *self.outputs)[0].name
        )

    @property
    def source_bytes(self) -> int:
        return sum([linear.nbytes for linear in self.linears]) or total_nbytes(self.refs)

    @property
    def output_bytes(self) -> int:
        return total_nbytes(self.outputs)

    @property
    def is_made(self) -> bool:
        """Tell whether the result is no ordinary tensor."""
        return self.form is not None

    @property
    def format(self) -> str:
        """Name the format in the result; "" for an ordinary tensor."""
        return self.form.format.name if self.form else ""


class Draft(NamedTuple):
    """A step without a place, and the tensors that it is to write.

    scalar  a float32 that no tensor of the source holds: an input scale, or a scale of a cache
    amaxes  of its linear layers, where their global scales are given
    """

    step: Step
    specs: tuple[TensorSpec, ...]
    scalar: float | None = None
    amaxes: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.step.name if self.step.linears or self.step.refs else self.specs[0].name


class Work(NamedTuple):
    """A maker, and the steps that it makes."""

    maker: Maker
    steps: list[Step]


class Shard(NamedTuple):
    """A file to be written: its size, its tensors, and what makes its header.

    notes  what engines want to read in the file itself
    """

    file: str
    nbytes: int
    outputs: tuple[TensorRef, ...]
    frame: Frame
    notes: dict[str, str]

    @property
    def header(self) -> bytes:
        """Make the bytes before the tensors: all of them would fill a plan."""
        specs = [TensorSpec(ref.name, ref.dtype, ref.shape) for ref in self.outputs]
        return self.frame.lay_out(self.file, specs, self.notes)[0]


@dataclass(frozen=True)
class Task:
    """One input shard becomes an output shard of the same name.

    And a second where scales stand apart; no task needs another.
    sources  the shards that are read
    promise  what the bytes depend on beside shards and steps: target, and what changes when a
             shard that is read may have
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
        """Name the source's shard that becomes this one, if one does."""
        return next((ref.file for step in self.steps for ref in step.refs), None)

    @property
    def works(self) -> list[Work]:
        """List the makers, each with its steps."""
        found: dict[int, Work] = {}
        for step in self.steps:
            found.setdefault(id(step.maker), Work(step.maker, [])).steps.append(step)
        return list(found.values())

    @property
    def by_home(self) -> dict[str | None, list[Work]]:
        """Sort the makers by the shard that they read first."""
        found: dict[str | None, list[Work]] = {}
        for work in self.works:
            refs = work.steps[0].refs
            found.setdefault(refs[0].file if refs else self.home, []).append(work)
        return found

    @property
    def borrowed(self) -> set[str]:
        """Name the other shards whose bytes go into this one.

        Not those that are read for scales alone: all that have members of a scale group must find
        the same.
        """
        files = {ref.file for work in self.works for ref in work.maker.reads}
        return files - {str(self.home)}

    @property
    def outputs(self) -> list[TensorRef]:
        """List the tensors of the output shards."""
        return [ref for shard in self.shards for ref in shard.outputs]


def spec_of(ref: TensorRef) -> TensorSpec:
    """Return what writes a tensor as it is."""
    return TensorSpec(ref.name, ref.dtype, ref.shape)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
