"""Refuse plans that lose a tensor of the source."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

from fp4convert.errors import InputError
from fp4convert.planning.steps import Task
from fp4convert.storage.safetensors import TensorRef

ENGINE_ONLY = "only the engine of the source has a use for it"
WRITTEN_ANEW = "written anew: the result has one of that name"


def refuse_forgotten(
    tensors: Iterable[TensorRef],
    tasks: Iterable[Task],
    left_out: Mapping[str, str],
    homes: Mapping[str, TensorRef],
) -> None:
    """Check that every tensor is read by a step, or left out and said why.

    One that is read in parts, a stack of experts, has to be read whole, and each of its modules by
    a step, for several may lie in the same bytes.
    tensors   all of the source; of one that is cut, the parts that stay
    left_out  why, by the name of a tensor
    homes     the tensor that holds it, by linear layer
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
    """Find tensors of which bytes are in none of the parts that are read."""
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
