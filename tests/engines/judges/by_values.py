"""Compare what an engine holds of an artifact with what it holds of the same in bf16, bit for bit.

Both models are of one class, so that names, fused layers and orders of rows are the engine's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from parameters import INPUT, MADE_LATER, POISON, is_marked, numberless, raw
from safetensors import safe_open

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# What engines call codes, and the global scales beside them with whether they divide.
CODES = "weight_packed", "weight"
GLOBALS = {"weight_global_scale": True, "weight_scale_2": False}
PREFIXES = "", "w13_", "w2_"
ROWS = 2  # first and last of each matrix of the artifact are looked for


class Loaded(NamedTuple):
    """A model after loading; `before` is what its parameters held until then."""

    model: torch.nn.Module
    before: dict[str, torch.Tensor]


def compare_values(
    loaded: Loaded, restored: Loaded, artifact: Path, source: Path
) -> dict[str, Any]:
    """Say in one row what the engine holds of an artifact."""
    faults: list[str] = []
    mine = dict(loaded.model.named_parameters())
    other = dict(restored.model.named_parameters())
    used: set[str] = set()
    codes = 0
    for name, module in loaded.model.named_modules():
        for prefix in PREFIXES:
            packed = next(
                (f"{prefix}{word}" for word in CODES if is_packed(module, prefix + word)), ""
            )
            if not packed:
                continue
            stem = f"{name}.{prefix}" if name else prefix
            used |= {
                each for each in mine if each.startswith(stem) and "." not in each[len(stem) :]
            }
            codes += getattr(module, packed).numel()
            value = dequantized(module, prefix, packed)
            wanted = other.get(f"{stem}weight")
            if wanted is None:  # the class has other layers for four bits
                is_exact, wanted = rows_of(other, value), value
            else:
                is_exact = is_equal(value, wanted.data, module)
            if not is_exact:
                shapes = f"{list(value.shape)}, bf16 {list(wanted.shape)}"
                unread = bool((raw(getattr(module, packed)) == POISON).all())
                faults.append(
                    f"{'unset' if unread else 'differs'} {stem}{packed[len(prefix) :]} {shapes}"
                )
    same = 0
    for name in mine.keys() - used:
        if name not in other:
            is_made = MADE_LATER.search(name) or not is_marked(loaded.before.get(name, mine[name]))
            if is_untouched(mine[name]) and not is_made and not INPUT.search(name):
                faults.append(f"unset {name}")
        elif mine[name].shape != other[name].shape or not torch.equal(
            raw(mine[name]), raw(other[name])
        ):
            faults.append(
                f"differs {name} {list(mine[name].shape)}, bf16 {list(other[name].shape)}"
            )
        else:
            same += 1
    faults += [
        f"unread {name}"
        for name in unread_matrices(loaded.model, artifact)
        if is_read(restored.model, name, source)
    ]
    if not codes:
        faults.append("nothing in four bits")
    bare = [
        name
        for name, each in other.items()
        if is_untouched(each) and is_marked(restored.before[name])
    ]
    faults = list(dict.fromkeys(map(numberless, faults)))
    row = {
        "outcome": "wrong" if faults else "exact",
        "faults": faults,
        "codes": codes,
        "same": same,
    }
    return {**row, "bare": list(dict.fromkeys(map(numberless, bare)))} if bare else row


def is_packed(module: torch.nn.Module, name: str) -> bool:
    held = module._parameters.get(name)
    return held is not None and held.dtype == torch.uint8


def is_untouched(parameter: torch.Tensor) -> bool:
    return parameter.numel() > 0 and bool((raw(parameter) == POISON).all())


def dequantized(module: Any, prefix: str, packed: str) -> torch.Tensor:
    """Return bf16 values: e2m1 times the float32 product, or quotient, of both scales."""
    codes = getattr(module, packed).data
    scales = getattr(module, f"{prefix}weight_scale").data
    values = torch.cat([E2M1, -E2M1])[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    if scales.dtype == torch.uint8:
        factors = torch.exp2(scales.float() - 127)
    else:
        word = next(each for each in GLOBALS if hasattr(module, prefix + each))
        whole = spread(getattr(module, prefix + word).data.float(), module, scales)
        factors = scales.float() / whole if GLOBALS[word] else scales.float() * whole
    block = values.shape[-1] // factors.shape[-1]
    values = values[..., : factors.shape[-1] * block]
    return (values.unflatten(-1, (-1, block)) * factors.unsqueeze(-1)).flatten(-2).bfloat16()


def spread(whole: torch.Tensor, module: Any, scales: torch.Tensor) -> torch.Tensor:
    """Lay global scales, one for each fused part or expert, beside the rows that they are of."""
    if scales.dim() == 3:
        each = whole.reshape(len(scales), -1)
        return each.repeat_interleave(scales.shape[1] // each.shape[1], 1).unsqueeze(-1)
    whole = whole.reshape(-1)
    if len(whole) == 1:
        return whole
    widths = getattr(module, "logical_widths", None) or [len(scales) // len(whole)] * len(whole)
    return torch.cat(
        [one.expand(int(rows)) for one, rows in zip(whole, widths, strict=True)]
    ).unsqueeze(-1)


def is_equal(value: torch.Tensor, wanted: torch.Tensor, module: Any) -> bool:
    """True where all values are the same; what an engine adds at the end is left out."""
    if value.dim() != wanted.dim():
        return False
    places = tuple(slice(0, min(pair)) for pair in zip(value.shape, wanted.shape, strict=True))
    same = torch.equal(value[places].float(), wanted[places].float())
    if same or value.dim() != 3:
        return same
    half = value.shape[1] // 2  # some kernels want up before gate
    turned = torch.cat([value[:, half:], value[:, :half]], 1)
    return (
        up_first(module)
        and turned.shape == wanted.shape
        and torch.equal(turned.float(), wanted.float())
    )


def rows_of(parameters: dict[str, torch.nn.Parameter], value: torch.Tensor) -> bool:
    """True where a matrix of bf16, by whatever name, has these rows beside each other."""
    for parameter in parameters.values():
        if parameter.dim() < 2 or parameter.shape[-1] != value.shape[-1]:
            continue
        rows = parameter.data.flatten(0, -2)
        (places,) = torch.where((rows == value[0].to(rows.dtype)).all(1))
        for place in places.tolist():
            if torch.equal(rows[place : place + len(value)].float(), value.float()):
                return True
    return False


def is_read(model: torch.nn.Module, name: str, source: Path) -> bool:
    """True where the engine holds a matrix in bf16: some it leaves out in any form."""
    module = name.removesuffix("_packed").removesuffix(".weight")
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if f"{module}.weight" in opened.keys():  # noqa: SIM118 - it is no dictionary
                row = opened.get_tensor(f"{module}.weight")[:1]
                return rows_of(dict(model.named_parameters()), row)
    return True


def up_first(module: Any) -> bool:
    method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
    return bool(getattr(method, "load_up_proj_weight_first", False))


def unread_matrices(model: torch.nn.Module, artifact: Path) -> list[str]:
    """List the four-bit matrices of an artifact of which the engine holds no row."""
    held: set[bytes] = set()
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8 and parameter.dim() > 1:
            rows = parameter.data.flatten(0, -2).contiguous().numpy()
            held |= {row.tobytes() for row in rows}
    lengths = {len(row) for row in held}
    missing = []
    for file in sorted(artifact.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                if not name.endswith((".weight_packed", ".weight")):
                    continue
                tensor = opened.get_tensor(name)
                if tensor.dtype != torch.uint8 or tensor.dim() != 2:
                    continue
                rows = [tensor[place].contiguous().numpy().tobytes() for place in (0, -1)]
                if not all(row in held or is_padded(row, held, lengths) for row in rows):
                    missing.append(name)
    return missing


def is_padded(row: bytes, held: set[bytes], lengths: set[int]) -> bool:
    """True where a longer row begins with it and ends in zeros."""
    return any(row + bytes(length - len(row)) in held for length in lengths if length > len(row))
