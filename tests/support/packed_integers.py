"""GPTQ's and AWQ's integers, packed and unpacked as their packages' own loops do it.

Typed from AutoGPTQ and GPTQModel 7.7 (qlinear/torch.py; utils/model.py for zeros of version 1) and
from AutoAWQ 0.2.9 (modules/linear/gemm.py, utils/packing_utils.py): none runs without CUDA here.
"""

from __future__ import annotations

from typing import Any

from packings import Packing, Parts

ORDER, BACK = (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)


def _rounded(weight: Any, groups: Any, bits: int, is_symmetric: bool) -> tuple[Any, Any, Any]:
    """Codes (columns, rows), scales in fp16 and zeros (groups, rows)."""
    import torch

    most = 2**bits - 1
    columns = weight.float().T
    parts = [columns[groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([part.amin(0).clamp(max=0) for part in parts])
    high = torch.stack([part.amax(0).clamp(min=0) for part in parts])
    if is_symmetric:
        high = torch.maximum(high, -low)
        scales = (2 * high / most).half()
        zeros = torch.full_like(high, 2 ** (bits - 1)).long()
    else:
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    codes = (columns / scales[groups].float()).round().long() + zeros[groups]
    return codes.clamp(0, most), scales, zeros


def _words(items: Any, bits: int) -> Any:
    """Words of consecutive items of the last axis, the first in the lowest bits."""
    import torch

    parts = items.unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., at] << (bits * at) for at in range(32 // bits))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _items(words: Any, bits: int) -> Any:
    import torch

    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _ones(bits: int) -> int:
    return sum(1 << at for at in range(0, 32, bits))


def gptq(bits: int, group: int, *, is_symmetric: bool, version: str, is_ordered: bool) -> Packing:
    """version: gptq or gptq_v2; is_ordered: columns of a group do not lie together (desc_act)."""
    import torch

    def pack(weight: Any) -> Parts:
        groups = torch.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])
        if is_ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.manual_seed(4))]
        codes, scales, zeros = _rounded(weight, groups, bits, is_symmetric)
        stored = _words(zeros, bits)
        if version == "gptq":  # convert_gptq_v2_to_v1_format_module: the word as a whole
            stored = ((stored.long() - _ones(bits)) & 0xFFFFFFFF).to(torch.int64)
            stored = torch.where(stored >= 2**31, stored - 2**32, stored).int()
        return {
            ".qweight": _words(codes.T, bits).T.contiguous(),
            ".qzeros": stored,
            ".scales": scales,
            ".g_idx": groups.int(),
        }

    def unpack(parts: Parts) -> Any:
        stored = parts[".qzeros"].long()
        if version == "gptq":  # convert_gptq_v1_to_v2_format_module
            stored = (stored + _ones(bits)) & 0xFFFFFFFF
        zeros, groups = _items(stored, bits), parts[".g_idx"].long()
        codes = _items(parts[".qweight"].T, bits).T
        return (parts[".scales"].float()[groups] * (codes - zeros[groups]).float()).T.contiguous()

    record = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_ordered}
    record |= {"sym": is_symmetric} | ({"checkpoint_format": version} if version != "gptq" else {})
    return Packing(f"gptq-{bits}-{group}", record, pack, unpack, {})


def awq(group: int) -> Packing:
    import torch

    def interleaved(items: Any, order: tuple[int, ...]) -> Any:
        return items.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)

    def pack(weight: Any) -> Parts:
        groups = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = _rounded(weight, groups, 4, is_symmetric=False)
        codes, zeros = (_words(interleaved(items, ORDER), 4) for items in (codes, zeros))
        return {".qweight": codes, ".qzeros": zeros, ".scales": scales}

    def unpack(parts: Parts) -> Any:
        codes, zeros = (
            interleaved(_items(parts[name], 4), BACK) for name in (".qweight", ".qzeros")
        )
        scales, zeros = (
            items.repeat_interleave(group, 0) for items in (parts[".scales"].float(), zeros)
        )
        return ((codes - zeros).float() * scales).T.contiguous()

    record = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Packing("awq", {**record, "version": "gemm"}, pack, unpack, {})
