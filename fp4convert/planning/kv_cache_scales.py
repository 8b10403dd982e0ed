"""Plan the scales of an FP8 cache of keys and values.

  A.k_scale         A.v_scale          compressed-tensors: F32 [1]
  A.k_proj.k_scale  A.v_proj.v_scale   modelopt: F32 []

where A is an attention, such as model.layers.0.self_attn.
Each is a multiplier, amax / 448 of the keys or values that a calibration saw. Without one they are
those that the source has, or 1, which is what engines take where there are none, and which keys and
values up to 448 fit. Source: ModelOpt 0.47, torch/export/quant_utils; compressed-tensors 0.20,
quantization/lifecycle; vLLM's weight_utils.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.errors import InputError
from fp4convert.numerics.formats import E4M3_MAX
from fp4convert.storage.safetensors import TensorRef, TensorSpec
from fp4convert.storage.source import Source, stored_float

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.encodings.base import Linear
    from fp4convert.checkpoint.linears import Linears
    from fp4convert.planning.steps import Step
    from fp4convert.recipes.recipe import Recipe

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

    steps   what is written beside a tensor of the source, by that tensor's name
    own     names of the source's own scales, which stay in another spelling
    """

    steps: Mapping[str, list[Step]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def plan_cache(
    source: Source, linears: Linears, recipe: Recipe, calibration: Calibration | None
) -> Cache:
    """Plan the scales of the cache that the target asks for.

    Raises InputError for models that have no cache with two scales a layer, and for a calibration
    that says nothing of one
    """
    from fp4convert.planning.steps import Step

    homes = _find_attentions(linears, recipe)
    if calibration and not any(calibration.has(home, "k_amax") for home in homes):
        first = next(iter(homes))
        detail = f"{calibration.path} has no statistics of a KV cache; expected {first}.k_amax"
        next_step = "Calibrate again, or leave --kv-cache out."
        raise InputError("calibration-missing", detail, next_step, first)
    own_scales = {ref.name: ref for ref in linears.idle}
    steps: dict[str, list[Step]] = defaultdict(list)
    used: list[str] = []  # of the source's own
    assumed: list[str] = []
    large: list[tuple[float, str]] = []
    traits = dialect_named(str(recipe.target.dialect)).TRAITS
    for attention, home in homes.items():
        if calibration and calibration.has(attention, "k_amax"):
            scales = _measured_scales(calibration, attention)
            reason = "amax / 448"
            large += [(max(scales), attention)] if max(scales) > LARGE else []
        elif refs := _stored_scales(source, own_scales, attention):
            scales, reason = tuple(refs.values()), "the source's own"
            used += refs
        else:
            scales, reason = (1.0, 1.0), "1, for keys and values up to 448"
            assumed.append(attention)
        for ending, value in zip(traits.cache_scales, scales, strict=True):
            spec = TensorSpec(f"{attention}.{ending}", "F32", traits.scalars.shape)
            step = Step("write", f"scale of an FP8 cache: {reason}", (), (spec,), scalar=value)
            steps[home.name].append(step)
    notes = []
    if assumed:
        measure = "--calibration FILE measures them (fp4convert calibrate)"
        how = "no calibration gives them" if calibration else measure
        notes.append(
            f"scales of an FP8 cache are 1 for {len(assumed)} of {len(homes)} attentions, the first"
            f" {assumed[0]}: right for keys and values up to {E4M3_MAX:g}, larger ones are clipped;"
            f" {how}"
        )
    if large:
        largest, attention = max(large)
        notes.append(
            f"scales of an FP8 cache are above {LARGE:g} for {len(large)} attentions, up to"
            f" {largest:.3g} in {attention}: keys or values are large there, and FP8 may cost"
            " quality"
        )
    return Cache(steps, frozenset(used), tuple(notes))


def _find_attentions(linears: Linears, recipe: Recipe) -> dict[str, TensorRef]:
    """Find every attention with a cache, and where its scales go.

    Returns the tensor beside which they go, by attention
    Raises  InputError for a model with another kind of cache, or none that is known
    """
    leaves: dict[str, dict[str, Linear]] = defaultdict(dict)
    for module, linear in linears.of.items():
        parent, _, leaf = module.rpartition(".")
        leaves[parent][leaf] = linear
    found = {}
    for parent, own in leaves.items():
        if latent := next((leaf for leaf in LATENT if leaf in own), None):
            detail = (
                f"{parent}.{latent}: keys and values are cached as one vector (MLA), which has"
                " no k_scale and v_scale"
            )
            next_step = (
                "Leave --kv-cache out, and ask the engine for it: --kv-cache-dtype fp8 in vLLM"
                " and SGLang."
            )
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
        detail = (
            f"no attention with a cache is known in this model; expected layers named {names} or"
            f" {', '.join(FUSED)}"
        )
        raise InputError("cache-none", f"--kv-cache {recipe.target.kv_cache}: {detail}")
    return found


def _measured_scales(calibration: Calibration, attention: str) -> tuple[float, ...]:
    """Return the scales of keys and values that fit what a calibration saw."""
    amaxes = calibration.cache_amax(attention)
    if 0 in amaxes:
        detail = (
            f"the calibration saw only zeros in the cache of {attention}; a scale needs a"
            " largest key and value"
        )
        next_step = "Calibrate with more text, or leave --kv-cache out."
        raise InputError("cache-zero", detail, next_step, attention)
    return tuple(amax / E4M3_MAX for amax in amaxes)


def _stored_scales(
    source: Source, own: Mapping[str, TensorRef], attention: str
) -> dict[str, float]:
    """Read the source's own scales, by name, in whichever spelling.

    Nothing where it has not both, of keys and of values.
    """
    for endings in sorted({dialect_named(name).TRAITS.cache_scales for name in DIALECTS} - {()}):
        names = [name for ending in endings if (name := f"{attention}.{ending}") in own]
        found = {name: value for name in names if (value := stored_float(source, own[name]))}
        if len(found) == len(endings):
            return found
    return {}
