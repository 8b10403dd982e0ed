"""Read MXFP4 experts of FP8 checkpoints as DeepSeek V4 stores them.

Ling 3 names their scales M.weight_scale_inv, as those of FP8 (routed_experts_quant_method in the
record), and MiMo V2.6 too (store_dtype): F8_E8M0 [rows, columns / 32] beside codes of U8 or I8
[rows, columns / 2]. DeepSeek V4 names them M.scale, and codes are I8.
Source: vllm-project/vllm pull 52140; XiaomiMiMo/MiMo-V2.6, config.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Source, SourceView

SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
CODES, BLOCK = ("U8", "I8"), 32


def as_deepseek(source: Source) -> Source:
    """Return the source, or its view if its record names MXFP4 beside FP8."""
    record = source.checkpoint.config.get("quantization_config")
    is_fp8 = isinstance(record, dict) and record.get("quant_method") == "fp8"
    words = str(record).lower() if is_fp8 else ""
    return Mxfp4Experts(source) if "mxfp4" in words else source


class Mxfp4Experts(SourceView):
    """A checkpoint whose four-bit experts have DeepSeek V4's names."""

    def __init__(self, source: Source) -> None:
        checkpoint = source.checkpoint
        refs = {ref.name: ref for ref in checkpoint.tensors}
        self._stored: dict[str, TensorRef] = {}
        renamed = dict(_experts(refs))
        for name, ref in renamed.items():
            self._stored[ref.name] = refs[name]
        shards = tuple(
            shard._replace(tensors=tuple(renamed.get(ref.name, ref) for ref in shard.tensors))
            for shard in checkpoint.shards
        )
        config = {**checkpoint.config, "expert_dtype": "fp4"} if renamed else checkpoint.config
        super().__init__(source, checkpoint._replace(shards=shards, config=config))

    def stored(self, ref: TensorRef) -> TensorRef:
        return self._stored.get(ref.name, ref)


def _experts(refs: Mapping[str, TensorRef]) -> list[tuple[str, TensorRef]]:
    """List the tensors of four-bit experts, as DeepSeek V4 has them."""
    found = []
    for name, codes in refs.items():
        if not name.endswith(WEIGHT) or codes.dtype not in CODES or len(codes.shape) != 2:
            continue
        module = name.removesuffix(WEIGHT)
        shape = codes.shape[0], codes.shape[1] * 2 // BLOCK
        for ending in SCALES:
            scales = refs.get(module + ending)
            if scales and scales.dtype == "F8_E8M0" and scales.shape == shape:
                found.append((name, codes._replace(dtype="I8")))
                found.append((scales.name, scales._replace(name=f"{module}.scale")))
    return found
