"""View biases of gpt-oss in MLX's form in transformers' form.

mlx-lm cuts the stack gate_up_proj of gpt-oss in two, and its bias: X.experts.gate_proj.bias and
X.experts.up_proj.bias [experts, rows] were X.experts.gate_up_proj_bias, in which they take turns;
X.experts.down_proj.bias was X.experts.down_proj_bias.
Source: mlx-lm 0.32, models/gpt_oss.py, sanitize.
"""

from __future__ import annotations

import numpy as np

from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source, SourceView

GATE, UP, DOWN = (f".experts.{part}_proj.bias" for part in ("gate", "up", "down"))
GATE_UP, DOWN_BIAS = ".experts.gate_up_proj_bias", ".experts.down_proj_bias"


def join_biases(source: Source) -> Source:
    """View a checkpoint of MLX with biases of stacks in transformers' form."""
    names = {ref.name for ref in source.checkpoint.tensors}
    is_cut = any(name.endswith(GATE) and name.removesuffix(GATE) + UP in names for name in names)
    return JoinedBiases(source) if is_cut else source


class JoinedBiases(SourceView):
    """A checkpoint of MLX with biases of stacks in transformers' form."""

    def __init__(self, source: Source) -> None:
        checkpoint = source.checkpoint
        refs = {ref.name: ref for ref in checkpoint.tensors}
        self._stored: dict[str, tuple[TensorRef, ...]] = {}
        shards = []
        for shard in checkpoint.shards:
            tensors = []
            for ref in shard.tensors:
                name, shape = ref.name, ref.shape
                stem, other = name.removesuffix(GATE), refs.get(name.removesuffix(GATE) + UP)
                if name.endswith(UP) and name.removesuffix(UP) + GATE in refs:
                    continue
                if name.endswith(DOWN):
                    name = name.removesuffix(DOWN) + DOWN_BIAS
                    self._stored[name] = (ref,)
                elif name.endswith(GATE) and other and other.shape == shape:
                    name, shape = stem + GATE_UP, (*shape[:-1], 2 * shape[-1])
                    self._stored[name] = (ref, other)
                tensors.append(ref._replace(name=name, shape=shape))
            shards.append(shard._replace(tensors=tuple(tensors)))
        super().__init__(source, checkpoint._replace(shards=tuple(shards)))

    def stored(self, ref: TensorRef) -> TensorRef:
        return self._stored.get(ref.name, (ref,))[0]

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        stored = self._stored.get(ref.name, ())
        if len(stored) < 2:
            return super().read_range(ref, start, stop)
        item = ref.nbytes // ref.elements
        halves = [
            np.frombuffer(self._source.read(one), np.uint8).reshape(-1, item) for one in stored
        ]
        return np.stack(halves, axis=1).reshape(-1).data[start:stop]

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read_range(ref, start, start + buffer.nbytes)
