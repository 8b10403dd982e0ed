"""View experts that are a list of linear layers as stacks.

Trainers that quantize linear layers alone take the experts of gpt-oss apart (Unsloth), and their
checkpoints keep these names:
  X.experts.gate_up_projs.N.weight  (rows, columns)  in  X.experts.gate_up_proj [N, columns, rows]
  X.experts.gate_up_projs.N.bias    (rows,)          in  X.experts.gate_up_proj_bias [N, rows]
  X.router.linear.weight                             is  X.router.weight
Source: transformers 5.23, modeling_gpt_oss; unsloth-zoo, temporary_patches/gpt_oss.py.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from fp4convert.errors import InputError
from fp4convert.storage.padded import PaddedSource
from fp4convert.storage.safetensors import Header, TensorRef
from fp4convert.storage.source import Source

LISTED = re.compile(r"(.+\.experts\.(?:gate_up|down)_proj)s\.(\d+)\.(weight|bias)")
RENAMED = re.compile(r"\.router\.linear\.(?=weight$|bias$)")
VIRTUAL = 1 << 60  # where stacks begin: behind all bytes of a file


class _Joined(NamedTuple):
    """A stack, and the tensors of its experts in their order."""

    ref: TensorRef
    parts: tuple[TensorRef, ...]


class JoinedExperts(PaddedSource):
    """A source whose listed experts are stacks; nothing is copied."""

    def __init__(self, source: Source) -> None:
        listed: dict[str, dict[int, TensorRef]] = defaultdict(dict)
        for ref in source.checkpoint.tensors:
            if match := LISTED.fullmatch(ref.name):
                stack = match[1] + ("_bias" if match[3] == "bias" else "")
                listed[stack][int(match[2])] = ref
        self._joined: list[_Joined] = []
        self._last: tuple[TensorRef | None, bytes] = None, b""
        place = VIRTUAL
        for name, parts in sorted(listed.items()):
            joined = _join(name, parts, place)
            self._joined.append(joined)
            place += joined.ref.nbytes
        self._starts = [one.ref.start for one in self._joined]
        super().__init__(source, {}, source.checkpoint.config, None)
        shards = tuple(map(self._view, source.checkpoint.shards))
        self.checkpoint = source.checkpoint._replace(shards=shards)

    def _view(self, shard: Header) -> Header:
        """Return a header with stacks, each in the file of its first expert."""
        kept = [
            ref._replace(name=RENAMED.sub(".router.", ref.name))
            for ref in shard.tensors
            if not LISTED.fullmatch(ref.name)
        ]
        stacks = [one.ref for one in self._joined if one.ref.file == shard.file]
        return shard._replace(tensors=(*kept, *stacks))

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        if ref.start < VIRTUAL:
            return self._source.read_range(ref, start, stop)
        whole, parts = self._joined[bisect_right(self._starts, ref.start) - 1]
        nbytes = parts[0].nbytes
        begin, end = (ref.start - whole.start + at for at in (start, stop))
        numbers = range(begin // nbytes, -(-end // nbytes))
        data = b"".join(self._read_part(parts[number]) for number in numbers)
        first = numbers.start * nbytes
        return memoryview(data)[begin - first : end - first]

    def _read_part(self, ref: TensorRef) -> bytes:
        """Read an expert's tensor as the stack holds it: (columns, rows)."""
        last, data = self._last
        if last != ref:  # pieces of one follow each other
            data = bytes(self._source.read(ref))
            if len(ref.shape) > 1:
                stored = np.frombuffer(data, np.uint8).reshape(*ref.shape, -1)
                data = stored.swapaxes(0, 1).tobytes()
            self._last = ref, data
        return data

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read_range(ref, start, start + buffer.nbytes)


def _join(name: str, parts: dict[int, TensorRef], place: int) -> _Joined:
    """Join the tensors of all experts; InputError where one is missing or odd."""
    first = parts[min(parts)]
    alike = {(ref.dtype, ref.shape) for ref in parts.values()}
    if [*sorted(parts)] != [*range(len(parts))] or len(alike) > 1:
        detail = f"{first.file}: {name} has experts {sorted(parts)[:8]} ... of {len(alike)} kinds"
        detail += "; expected every number from 0 on, in one shape and dtype"
        raise InputError("stack-shape", detail, tensor=first.name)
    ordered = tuple(parts[number] for number in range(len(parts)))
    shape = (len(parts), *reversed(first.shape))
    return _Joined(TensorRef(name, first.dtype, shape, ordered[0].file, place), ordered)
