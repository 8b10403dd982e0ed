"""View GGUF parts as one file, and image models as safetensors.

llama-gguf-split, and Unsloth, cut large models into NAME-00001-of-0000N.gguf: the first part has
the keys, each has some of the tensors. The parts lie one behind another in a file that is nowhere;
nothing above asks. The result is one file.
Models of images (city96's ComfyUI-GGUF, gguf-connector) have the names of ComfyUI's own files and
architectures that llama.cpp lacks. Where rows are no whole blocks, a tensor has another shape, and
its own in the key comfy.gguf.orig_shape.NAME.
Source: ComfyUI-GGUF, loader.py, get_orig_shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import GGUF, PART, WEIGHTS
from fp4convert.storage.gguf import SHAPE, TYPE_WORD, GgufFrame, decode, shape_in_weights
from fp4convert.storage.safetensors import DTYPE_BITS, Header, SafetensorsFrame, TensorRef
from fp4convert.storage.source import Source, SourceView

MATRIX_DIMENSIONS = 2
COUNT, NUMBER = "split.count", "split.no"


def join_parts(source: Source) -> Source:
    """Return a GGUF source as one file; InputError for parts of others."""
    frames = [shard.frame for shard in source.checkpoint.shards]
    counts = [frame.facts.get(COUNT) for frame in frames if isinstance(frame, GgufFrame)]
    return source if len(counts) == 1 and counts[0] in (None, 1) else JoinedGguf(source)


class JoinedGguf(SourceView):
    """The parts of a GGUF model as one file."""

    def __init__(self, source: Source) -> None:
        shards = source.checkpoint.shards
        frames = [shard.frame for shard in shards if isinstance(shard.frame, GgufFrame)]
        for number, (shard, frame) in enumerate(zip(shards, frames, strict=True)):
            said = frame.facts.get(NUMBER), frame.facts.get(COUNT)
            if said != (number, len(shards)):
                detail = f"{shard.file} says {NUMBER} = {said[0]} and {COUNT} = {said[1]}"
                detail = f"{detail}; expected {number} and {len(shards)}, by the names of its files"
                raise InputError("gguf-split", detail)
        self._parts = [shard.file for shard in shards]
        starts = [0, *accumulate(shard.nbytes for shard in shards)]
        self._starts = dict(zip(self._parts, starts, strict=False))
        match = PART.fullmatch(self._parts[0])
        file = f"{match[1]}{GGUF}" if match else self._parts[0]
        tensors = tuple(
            ref._replace(file=file, start=start + ref.start)
            for shard, start in zip(shards, starts, strict=False)
            for ref in shard.tensors
        )
        places = {ref.name: number for number, ref in enumerate(tensors)}
        header = Header(file, starts[-1], tensors, replace(frames[0], places=places))
        stamps = dict(source.checkpoint.stamps)
        stamps[file] = " ".join(stamps.pop(part) for part in self._parts)
        super().__init__(source, source.checkpoint._replace(shards=(header,), stamps=stamps))
        if PART.fullmatch(f"{self.name}{GGUF}"):
            self.name = file.removesuffix(GGUF)

    def stored(self, ref: TensorRef) -> TensorRef:
        part = [one for one in self._parts if self._starts[one] <= ref.start][-1]
        return ref._replace(file=part, start=ref.start - self._starts[part])

    def stored_files(self, shards: Collection[str]) -> Collection[str]:
        return self._parts if shards else []


class ImageGguf(SourceView):
    """A GGUF file with ComfyUI's names as a safetensors file.

    Blocks that are no rows of a matrix are float32.
    """

    def __init__(self, source: Source) -> None:
        (shard,) = source.checkpoint.shards
        facts = shard.frame.facts if isinstance(shard.frame, GgufFrame) else {}
        self.name, self._file = source.name, shard.file
        stem = TYPE_WORD.sub("", shard.file).removesuffix(GGUF).rstrip("-._")
        file = f"{stem or self.name}{WEIGHTS}"
        self._stored: dict[str, TensorRef] = {}  # of tensors that are decoded
        refs = []
        for ref in shard.tensors:
            shape = facts.get(SHAPE + ref.name)
            shape = tuple(shape) if isinstance(shape, tuple) else None
            is_coded = ref.dtype not in DTYPE_BITS
            stored = shape_in_weights(ref.dtype, ref.shape) if is_coded else ref.shape
            if math.prod(shape or stored) != math.prod(stored):
                detail = f"{ref.name} is {list(stored)}, and its shape before {list(shape or ())}"
                raise InputError("gguf", f"{detail}; expected as many weights", tensor=ref.name)
            if is_coded and (shape or len(stored) != MATRIX_DIMENSIONS):
                self._stored[ref.name] = ref
                refs.append(TensorRef(ref.name, "F32", shape or stored, file, ref.start))
            else:
                refs.append(ref._replace(file=file, shape=shape or ref.shape))
        frame = SafetensorsFrame({}, is_stored=False)
        header = Header(file, shard.nbytes, tuple(refs), frame)
        stamps = {file: source.checkpoint.stamps[self._file]}
        super().__init__(source, source.checkpoint._replace(shards=(header,), stamps=stamps))

    def stored(self, ref: TensorRef) -> TensorRef:
        return self._stored.get(ref.name, ref._replace(file=self._file))

    def stored_files(self, shards: Collection[str]) -> Collection[str]:
        return [self._file] if shards else []

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        stored = self._stored.get(ref.name)
        if stored is None:
            return super().read_range(ref, start, stop)
        return (
            decode(self._source.read(stored), stored.dtype).reshape(-1).data.cast("B")[start:stop]
        )

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read_range(ref, start, start + buffer.nbytes)
