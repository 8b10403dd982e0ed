"""Round the inputs of linear layers and of the KV cache as engines do.

For four-bit activations engines quantize the input of every linear layer and multiply four bits
with four; here the rounded values go on as floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fp4convert.calibration.experts import FIRST_PARAMETERS
from fp4convert.calibration.model import Seat, Skeleton, read_tensor
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4
from fp4convert.errors import InputError
from fp4convert.numerics.formats import E2M1_MAX, E4M3_MAX, GLOBAL_RANGE, MXFP4, NVFP4, Format

EVEN = 0x200000  # added to the bits of a float32: from a mantissa of 1.75 on it is the next power
E8M0_BIAS, E8M0_MAX = 127, 254
CACHE_SCALE = 1.0  # of keys and values where none is stored

Round = Callable[[torch.Tensor], torch.Tensor]


def round_call(
    make: Round, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Round the one tensor that a linear layer is called with, in a hook."""
    if args:
        return (make(args[0]), *args[1:]), kwargs
    return args, {name: make(given) for name, given in kwargs.items()}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The activations that are rounded in a model.

    linears  path of a linear layer -> rounding of its input
    experts  (path of a stack, is it its first matrix, expert) -> rounding of that input
    cache    path of an attention -> scales of its keys and values; None: they are not rounded
    kind     format of the cache: "fp8", or "nvfp4" in blocks of 16 along a head
    """

    linears: Mapping[str, Round] = field(default_factory=dict)
    experts: Mapping[tuple[str, bool, int], Round] = field(default_factory=dict)
    cache: Mapping[str, tuple[float, float]] | None = None
    kind: str | None = None

    def expert(self, path: str, is_first: bool, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Round the input of an expert's matrix."""
        made = self.experts.get((path, is_first, expert))
        return x if made is None else made(x)

    def keys_and_values(
        self, path: str, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the keys and values that an attention keeps.

        Raises  InputError for NVFP4 heads that are no whole blocks
        """
        if self.cache is None:
            return key, value
        for_keys, for_values = self.cache.get(path, (CACHE_SCALE, CACHE_SCALE))
        if self.kind != NVFP4.name:
            return round_fp8(key, for_keys), round_fp8(value, for_values)
        for width in (key.shape[-1], value.shape[-1]):
            if width % NVFP4.block_size:
                detail = f"{path}: the record asks for an NVFP4 KV cache, and heads have {width}"
                expected = f"expected a multiple of {NVFP4.block_size}"
                next_step = "Quantize the source again with --kv-cache fp8."
                raise InputError("cache-heads", f"{detail}; {expected}", next_step, path)
        return round_nvfp4(key, for_keys), round_nvfp4(value, for_values)


def rounding_of(skeleton: Skeleton, artifact: Artifact | None) -> Rounding:
    """Find the activations that engines round, by the records of an artifact.

    Matrices that the model multiplies as one, and the first ones of an expert, share an input: the
    largest of their input scales counts, as in engines.
    """
    if artifact is None:
        return Rounding()
    scales: dict[tuple[str, bool, int | None], float] = defaultdict(float)
    formats = {}
    for module, packed in artifact.modules.items():
        seat = skeleton.seats.get(module)
        if seat is None or packed.form.activations != ACTIVATIONS_FP4:
            continue
        key = (seat.path, seat.parameter in FIRST_PARAMETERS, seat.expert)
        formats[key] = packed.form.format
        scales[key] = max(scales[key], artifact.input_scale(module) or 0.0)
    made: dict[tuple[str, bool, int | None], Round] = {
        key: partial(round_nvfp4, input_scale=scales[key] or 1.0) if fmt is NVFP4 else round_mxfp4
        for key, fmt in formats.items()
        if fmt in (NVFP4, MXFP4)
    }
    return Rounding(
        {path: each for (path, _, expert), each in made.items() if expert is None},
        {(path, one, n): each for (path, one, n), each in made.items() if n is not None},
        _cache_scales(artifact, skeleton.seats),
        artifact.forms[0].kv_cache,
    )


def _cache_scales(
    artifact: Artifact, seats: Mapping[str, Seat]
) -> dict[str, tuple[float, float]] | None:
    """Read the scales of a cache, by the path of the attention.

    None where there is none, or one of a kind that is not computed with.
    """
    if artifact.forms[0].kv_cache not in artifact.spelling.TRAITS.cache_scales:
        return None
    homes = {  # what the checkpoint calls an attention -> what the model does
        module.rpartition(".")[0]: seat.path.rpartition(".")[0]
        for module, seat in seats.items()
        if seat.expert is None
    }
    found: dict[str, tuple[float, float]] = {}
    for name, (attention, place) in artifact.cache_scales.items():
        if (home := homes.get(attention)) is not None:
            stored = float(read_tensor(artifact.tensors[name], artifact.source).float().max())
            both = list(found.get(home, (CACHE_SCALE, CACHE_SCALE)))
            both[place] = stored
            found[home] = (both[0], both[1])
    return found


def round_e2m1(q: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 value, ties to the even code, saturating."""
    magnitude = q.abs().clamp(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, q)


def round_nvfp4(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    """Quantize and dequantize with a static global scale.

    input_scale  a multiplier: amax / 2688
    Formula      vLLM's emulation: block_scale = e4m3(amax of 16 / 6 / input_scale); a block whose
                 scale is below E4M3's least value is zero
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, NVFP4.block_size)
    amax = blocks.abs().amax(-1, keepdim=True)
    wanted = (amax / E2M1_MAX / input_scale).clamp(max=E4M3_MAX)
    steps = wanted.to(torch.float8_e4m3fn).float() * input_scale
    made = torch.where(steps == 0, 0.0, round_e2m1(blocks / steps) * steps)
    return made.reshape(x.shape).to(x.dtype)


def round_alone(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize, if blocks are whole; NVFP4's scale suits these."""
    if x.shape[-1] % fmt.block_size:
        return x
    if fmt is not NVFP4:
        return round_mxfp4(x)
    return round_nvfp4(x, float(x.abs().max()) / GLOBAL_RANGE if x.numel() else 1.0)


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with a power of two for blocks of 32.

    Formula  OCP MX, with the amax rounded to a power of two first, as compressed-tensors and quark
             have it: 2^(floor(log2(amax')) - 2)
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, MXFP4.block_size)
    bits = blocks.abs().amax(-1, keepdim=True).contiguous().view(torch.int32)
    exponents = (((bits + EVEN) >> 23) - 2).clamp(0, E8M0_MAX)
    steps = torch.ldexp(torch.ones_like(blocks[..., :1]), exponents - E8M0_BIAS)
    return (round_e2m1(blocks / steps) * steps).reshape(x.shape).to(x.dtype)


def round_fp8(x: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Quantize and dequantize with one scale, saturating."""
    codes = (x.float() / multiplier).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * multiplier).to(x.dtype)
