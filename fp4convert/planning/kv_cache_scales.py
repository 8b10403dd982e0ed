"""Plan the scales of an FP8 cache of keys and values.

  A.k_scale         A.v_scale          compressed-tensors: F32 [1]     A is an attention, model.layers.0.self_attn
  A.k_proj.k_scale  A.v_proj.v_scale   modelopt: F32 []

Each is a multiplier, amax / 448 of the keys or values that a calibration saw.  Without one they are those that the source has,
or 1, which is what engines take where there are none, and which keys and values up to 448 fit.
Source: ModelOpt 0.47, torch/export/quant_utils; compressed-tensors 0.20, quantization/lifecycle; vLLM's weight_utils.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.errors import InputError
from fp4convert.numerics.formats import E4M3_MAX
from fp4convert.storage.safetensors import TensorRef, TensorSpec
from fp4convert.storage.source import Source

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.encodings.base import Linear
    from fp4convert.checkpoint.linears import Linears
    from fp4convert.planning.steps import Draft
    from fp4convert.recipes.recipe import Recipe

WORDS = ("fp8",)
KEYS_VALUES = (
    ("k_proj", "v_proj"),
    ("wk", "wv"),
)  # names of linear layers that make what a cache holds
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn")
LATENT = (
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "wkv_a",
    "wkv_b",
)  # of attentions whose cache holds one vector for both (MLA)
ASIDE = (
    "encoder",
    "cross",
    "vision",
    "visual",
    "audio",
)  # in names of attentions without a cache that grows
LARGE = 0.5  # ModelOpt warns of larger scales


@dataclass(frozen=True, slots=True)
class Cache:
    """The scales that a plan writes.

    drafts  what is written beside a tensor of the source, by that tensor's name
    own     names of the source's own scales, which stay in another spelling
    """

    drafts: Mapping[str, list[Draft]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def plan_cache(
    source: Source, linears: Linears, recipe: Recipe, calibration: Calibration | None
) -> Cache:
    """The scales of the cache that the target asks for; nothing where it asks for none.

    Raises InputError for models that have no cache with two scales a layer, and for a calibration that says nothing of one
    """
    from fp4convert.planning.steps import Draft

    word, endings = (
        recipe.target.kv_cache,
        dialect_named(str(recipe.target.dialect)).TRAITS.cache_scales,
    )
    if word is None:
        return Cache()
    homes = _find_attentions(linears, recipe)
    if calibration and not any(calibration.has(home, "k_amax") for home in homes):
        detail = f"{calibration.path} says nothing of any cache of keys and values; expected {next(iter(homes))}.k_amax"
        raise InputError(
            "calibration-missing",
            detail,
            "Calibrate again, or leave --kv-cache out.",
            next(iter(homes)),
        )
    known = _Known(source, calibration, {ref.name: ref for ref in linears.idle})
    drafts: dict[str, list[Draft]] = defaultdict(list)
    shape = dialect_named(str(recipe.target.dialect)).TRAITS.scalars.shape
    for attention, home in homes.items():
        scales, reason = known.of(attention)
        for ending, value in zip(endings, scales, strict=True):
            spec = TensorSpec(f"{attention}.{ending}", "F32", shape)
            drafts[home.name].append(Draft("write", reason, (), (spec,), home=home, scalar=value))
    return Cache(drafts, frozenset(known.used), tuple(known.notes(len(homes))))


def check_word(word: str | None) -> None:
    """InputError for a kind of cache that nobody knows."""
    if word not in (None, *WORDS):
        raise InputError(
            "unknown-cache",
            f"--kv-cache {word!r} is not known; expected {' or '.join(WORDS)}",
            "Leave it out.",
        )


def _find_attentions(linears: Linears, recipe: Recipe) -> dict[str, TensorRef]:
    """Every attention with a cache, and the tensor beside which its scales go."""
    leaves: dict[str, dict[str, Linear]] = defaultdict(dict)
    for module, linear in linears.of.items():
        parent, _, leaf = module.rpartition(".")
        leaves[parent][leaf] = linear
    found = {}
    for parent, own in leaves.items():
        if latent := next((leaf for leaf in LATENT if leaf in own), None):
            detail = f"{parent}.{latent}: keys and values are cached as one vector (MLA), which no k_scale and v_scale are for"
            next_step = "Leave --kv-cache out, and ask the engine for it: --kv-cache-dtype fp8 in vLLM and SGLang."
            raise InputError("cache-latent", detail, next_step, parent)
        first = next(
            (
                leaf
                for leaf in (*(key for key, value in KEYS_VALUES if value in own), *FUSED)
                if leaf in own
            ),
            None,
        )
        if (
            first
            and not any(word in parent for word in ASIDE)
            and recipe.kind_of(f"{parent}.{first}") != "tower"
        ):
            found[parent] = own[first].home
    if not found:
        names = ", ".join(f"{key}/{value}" for key, value in KEYS_VALUES)
        detail = f"no attention with a cache is known in this model; expected layers named {names} or {', '.join(FUSED)}"
        raise InputError(
            "cache-none", f"--kv-cache {recipe.target.kv_cache}: {detail}", "Leave --kv-cache out."
        )
    return found


class _Known:
    """What is known of the scales of a cache: a calibration, else the source's own, else nothing."""

    def __init__(
        self, source: Source, calibration: Calibration | None, own: Mapping[str, TensorRef]
    ) -> None:
        self._source = source
        self._calibration = calibration
        self._own = own
        self.used: list[str] = []
        self._assumed: list[str] = []
        self._large: list[tuple[float, str]] = []

    def of(self, attention: str) -> tuple[tuple[float, float], str]:
        """The scales of keys and of values, and where they come from."""
        if self._calibration and self._calibration.has(attention, "k_amax"):
            keys, values = self._calibration.cache_amax(attention)
            scales = self._measured(attention, keys), self._measured(attention, values)
            self._large += [(max(scales), attention)] if max(scales) > LARGE else []
            return scales, "scale of an FP8 cache: amax / 448"
        if own := self._stored(attention):
            return own, "scale of an FP8 cache: the source's own"
        self._assumed.append(attention)
        return (1.0, 1.0), "scale of an FP8 cache: 1, for keys and values up to 448"

    def notes(self, count: int) -> Iterator[str]:
        """What a person should know of them."""
        if self._assumed:
            detail = f"scales of an FP8 cache are 1 for {len(self._assumed)} of {count} attentions, the first {self._assumed[0]}"
            how = (
                "no calibration says theirs"
                if self._calibration
                else "--calibration FILE measures them (fp4convert calibrate)"
            )
            yield f"{detail}: right for keys and values up to {E4M3_MAX:g}, larger ones are cut off; {how}"
        if self._large:
            largest, attention = max(self._large)
            detail = f"scales of an FP8 cache are above {LARGE:g} for {len(self._large)} attentions, up to {largest:.3g}"
            yield f"{detail} in {attention}: keys or values are large there, and FP8 may cost quality"

    def _measured(self, attention: str, amax: float) -> float:
        if amax == 0:
            detail = f"the calibration saw nothing but zeros in the cache of {attention}; a scale needs a largest key and value"
            raise InputError(
                "cache-zero",
                detail,
                "Calibrate with more text, or leave --kv-cache out.",
                attention,
            )
        return amax / E4M3_MAX

    def _stored(self, attention: str) -> tuple[float, float] | None:
        """The source's own scales, in whichever spelling; None where it has not both."""
        for endings in sorted(
            {dialect_named(name).TRAITS.cache_scales for name in DIALECTS} - {()}
        ):
            refs = [
                self._own[name]
                for ending in endings
                if (name := f"{attention}.{ending}") in self._own
            ]
            values = [value for ref in refs if (value := stored_float(self._source, ref))]
            if len(values) == len(endings):
                self.used += [ref.name for ref in refs]
                return values[0], values[1]
        return None


def stored_float(source: Source, ref: TensorRef) -> float | None:
    """The positive number in a tensor of one float; None where it is none."""
    if ref.elements != 1 or ref.dtype not in ("F32", "BF16", "F16"):
        return None
    stored = source.read_range(ref, 0, ref.nbytes).tobytes()
    wide = b"\0\0" + stored if ref.dtype == "BF16" else stored
    (value,) = struct.unpack("<e" if ref.dtype == "F16" else "<f", wide)
    return float(value) if 0 < value < float("inf") else None
