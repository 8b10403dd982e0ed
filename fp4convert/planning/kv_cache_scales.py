"""Plan the scales of a cache of keys and values in FP8 or NVFP4.

  A.k_scale         A.v_scale          compressed-tensors, FP8: F32 [1], amax / 448
  A.k_global_scale  A.v_global_scale   compressed-tensors, NVFP4: F32 [1], amax / 2688
  A.k_proj.k_scale  A.v_proj.v_scale   modelopt, both: F32 [], amax / 448

where A is an attention, such as model.layers.0.self_attn.
Each is a multiplier, of the largest key or value that a calibration saw. Without one they are those
that the source has for a cache of the same kind. Else FP8 gets 1, which is what engines take where
there are none, and which keys and values up to 448 fit; NVFP4 is refused. Of NVFP4 engines scale
blocks of 16 along a head as they write them; the multiplier tells where in E4M3 these scales lie:
up to 448 with amax / 2688, up to 75 with amax / 448.
Source: ModelOpt 0.47, torch/export/quant_utils and unified_export_hf; compressed-tensors 0.20,
quantization/lifecycle; AutoRound 0.16.1, experimental/kv_cache; vLLM 0.33, weight_utils and
quantization/kv_cache.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fp4convert.checkpoint.artifact import read_clues
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named, recognise
from fp4convert.errors import InputError, shell_line
from fp4convert.makers.scalar import Scalar
from fp4convert.numerics.formats import E4M3_MAX, NVFP4
from fp4convert.planning.kept_dtype import copy_as
from fp4convert.planning.quantize_plan import Cache
from fp4convert.planning.steps import Draft, Step, module_of
from fp4convert.recipes.patterns import TEXT_CONFIGS
from fp4convert.storage.safetensors import TensorRef, TensorSpec
from fp4convert.storage.source import Source, stored_float

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.artifact import Artifact
    from fp4convert.checkpoint.dialects.base import Dialect
    from fp4convert.checkpoint.dialects.tables import CacheScales
    from fp4convert.checkpoint.encodings.base import Linear
    from fp4convert.checkpoint.linears import Linears
    from fp4convert.recipes.recipe import Recipe

# Names of linear layers whose outputs a cache holds.
KEYS_VALUES = (("k_proj", "v_proj"), ("wk", "wv"))
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
LARGE = 0.5  # ModelOpt warns of larger scales of FP8
HEADS = ("head_dim", "global_head_dim", "v_head_dim")  # of a config.json, how wide heads are


def plan_cache(
    source: Source, linears: Linears, recipe: Recipe, calibration: Calibration | None
) -> Cache:
    """Plan the scales of the target's KV cache.

    Raises  InputError for models without a cache of two scales a layer, for a calibration without
            statistics of it, and for NVFP4 where heads are no whole blocks or scales are unknown
    """
    kind, traits = str(recipe.target.kv_cache), dialect_named(str(recipe.target.dialect)).TRAITS
    stored = traits.cache_scales[kind]
    homes = _find_attentions(linears, recipe)
    if kind == NVFP4.name:
        _refuse_heads(source.checkpoint.config)
    if calibration and not any(calibration.has(home, "k_amax") for home in homes):
        first = next(iter(homes))
        detail = f"{calibration.path} has no statistics of a KV cache; expected {first}.k_amax"
        next_step = "Calibrate again, or leave --kv-cache out."
        raise InputError("calibration-missing", detail, next_step, first)
    is_own = bool(linears.idle) and _own_kind(source) == kind
    own_scales = {ref.name: ref for ref in linears.idle} if is_own else {}
    drafts: dict[str, list[Draft]] = defaultdict(list)
    used: list[str] = []  # of the source's own
    assumed: list[str] = []
    measured: dict[str, float] = {}  # the larger scale of each attention
    for attention, home in homes.items():
        if calibration and calibration.has(attention, "k_amax"):
            scales = _measured_scales(calibration, attention, stored)
            reason = f"amax / {stored.divisor:g}"
            measured[attention] = max(scales)
        elif refs := _stored_scales(source, own_scales, attention, kind):
            scales = tuple([amax / stored.divisor for amax in refs.values()])
            reason = "the source's own"
            used += refs
        elif kind == NVFP4.name:
            raise _unknown_scales(source, calibration, attention)
        else:
            scales, reason = (1.0, 1.0), "1, for keys and values up to 448"
            assumed.append(attention)
        for ending, value in zip(stored.endings, scales, strict=True):
            spec = TensorSpec(f"{attention}.{ending}", "F32", traits.scalars.shape)
            why = f"scale of an {kind.upper()} cache: {reason}"
            drafts[home.name].append(_draft_scalar(why, spec, value))
    notes = _notes_on_nvfp4(stored)
    if kind != NVFP4.name:
        of_all = f"{len(assumed)} of {len(homes)}"
        notes = (*_notes_on_fp8(assumed, of_all, measured, calibration is not None),)
    return Cache(drafts, frozenset(used), notes)


def _notes_on_fp8(
    assumed: Sequence[str], of_all: str, measured: Mapping[str, float], is_calibrated: bool
) -> Iterator[str]:
    """Warn of scales of 1, and of large keys or values."""
    if assumed:
        measure = "--calibration FILE measures them (fp4convert calibrate)"
        how = "no calibration gives them" if is_calibrated else measure
        yield (
            f"scales of an FP8 cache are 1 for {of_all} attentions, the first"
            f" {assumed[0]}: right for keys and values up to {E4M3_MAX:g}, larger ones are clipped;"
            f" {how}"
        )
    if large := [(scale, attention) for attention, scale in measured.items() if scale > LARGE]:
        largest, attention = max(large)
        yield (
            f"scales of an FP8 cache are above {LARGE:g} for {len(large)} attentions, up to"
            f" {largest:.3g} in {attention}: keys or values are large there, and FP8 may cost"
            " quality"
        )


def _notes_on_nvfp4(stored: CacheScales) -> tuple[str, ...]:
    """Describe a dialect's scales, which other tools read in another way."""
    return (f"scales of an NVFP4 cache are amax / {stored.divisor:g}, {stored.known}",)


def carry_cache(artifact: Artifact, spelling: Dialect) -> tuple[dict[str, Draft], tuple[str, ...]]:
    """Plan the scales of an artifact's cache in another dialect.

    Returns  drafts by the name of the source's tensor, and notes
    Raises   InputError for a scale that must be computed anew and is no positive number
    """
    kind = artifact.forms[0].kv_cache
    own, stored = (each.TRAITS.scales_of_cache(kind) for each in (artifact.spelling, spelling))
    drafts: dict[str, Draft] = {}
    if not own or not stored:
        return drafts, ()
    rounded = 0
    for name, (attention, place) in artifact.cache_scales.items():
        ref, ending = artifact.tensors[name], stored.endings[place]
        # transformers loads no other shape than the dialect's
        shape = spelling.TRAITS.scalars.shape if ref.elements == 1 else ref.shape
        if own.divisor == stored.divisor:
            spec = TensorSpec(f"{attention}.{ending}", ref.dtype, shape)
            drafts[name] = copy_as("copy", "not quantized", (ref,), spec)
            continue
        value = stored_float(artifact.source, ref)
        if value is None:
            detail = "as the scale of a KV cache it is not a positive number"
            raise InputError("unsound-artifact", f"{name}: {detail}", tensor=name)
        made = _as_float32(value * own.divisor / stored.divisor)
        rounded += made * stored.divisor != value * own.divisor
        reason = f"scale of an NVFP4 cache: amax / {stored.divisor:g}"
        spec = TensorSpec(f"{attention}.{ending}", "F32", shape)
        drafts[name] = _draft_scalar(reason, spec, made)
    if own.divisor == stored.divisor or not drafts:
        return drafts, ()
    became = f"{len(drafts)} scales of the NVFP4 cache become amax / {stored.divisor:g}"
    became = f"{became} from amax / {own.divisor:g}"
    lost = f"{rounded} of them are rounded to float32, by 2^-24 of their value at most"
    return drafts, (f"{became}; {lost}", *_notes_on_nvfp4(stored))


def _draft_scalar(reason: str, spec: TensorSpec, value: float) -> Draft:
    """Draft the step of a scale that no tensor of the source holds."""
    step = Step("write", reason, module_of(spec.name), Scalar(spec.name, value), ())
    return Draft(step, (spec,), value)


def _as_float32(value: float) -> float:
    """Round to float32; InputError for 0 and for numbers beyond it."""
    try:
        (made,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        made = 0.0
    if not made:
        raise InputError("unsound-artifact", f"{value:g} as the scale of a KV cache is no float32")
    return float(made)


def _own_kind(source: Source) -> str:
    """Return the kind of a source's cache: FP8 where none is recorded."""
    found = (groups for _, groups in recognise(read_clues(source)))
    return next((group.form.kv_cache for group in next(found, ()) if group.form.kv_cache), "fp8")


def _refuse_heads(config: Mapping[str, object]) -> None:
    """Raise InputError where heads of the language model are no whole blocks."""
    nested = (config.get(name) for name in TEXT_CONFIGS)
    text = next((one for one in nested if isinstance(one, Mapping)), config)
    widths = {key: text[key] for key in HEADS if type(text.get(key)) is int}
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if "head_dim" not in widths and isinstance(hidden, int) and isinstance(heads, int) and heads:
        widths["hidden_size / num_attention_heads"] = hidden // heads
    for key, width in widths.items():
        if isinstance(width, int) and width % NVFP4.block_size:
            detail = f"--kv-cache {NVFP4.name}: config.json has {key} {width}"
            expected = f"expected a multiple of {NVFP4.block_size}, whose values share a scale"
            raise InputError("cache-heads", f"{detail}; {expected}", "Use --kv-cache fp8.")


def _unknown_scales(source: Source, calibration: Calibration | None, attention: str) -> InputError:
    """Return the error for an NVFP4 cache with unknown scales."""
    detail = f"--kv-cache {NVFP4.name}: nothing tells how large keys and values of {attention} are"
    expected = "expected a calibration, or a source with scales of an NVFP4 cache"
    if calibration:
        detail = f"{detail}: {calibration.path} does not either"
    line = shell_line("fp4convert", "calibrate", source.name, "-o", "FILE")
    next_step = f"Make one: {line}, and add --calibration FILE; or use --kv-cache fp8."
    return InputError("cache-uncalibrated", f"{detail}; {expected}", next_step, attention)


def _find_attentions(linears: Linears, recipe: Recipe) -> dict[str, TensorRef]:
    """Find every attention with a cache.

    Returns attention -> the tensor beside which its scales are written
    Raises  InputError for a model with another kind of cache, or no known one
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


def _measured_scales(
    calibration: Calibration, attention: str, stored: CacheScales
) -> tuple[float, ...]:
    """Return the scales for the largest keys and values of a calibration."""
    amaxes = calibration.cache_amax(attention)
    if 0 in amaxes:
        detail = (
            f"the calibration saw only zeros in the cache of {attention}; a scale needs a"
            " largest key and value"
        )
        next_step = "Calibrate with more text, or leave --kv-cache out."
        raise InputError("cache-zero", detail, next_step, attention)
    return tuple(amax / stored.divisor for amax in amaxes)


def _stored_scales(
    source: Source, own: Mapping[str, TensorRef], attention: str, kind: str
) -> dict[str, float]:
    """Return the amaxes of the source's own scales, in any spelling.

    Returns  by name; {} unless both scales are there, of keys and of values
    """
    known = {dialect_named(name).TRAITS.cache_scales.get(kind) for name in DIALECTS} - {None}
    for stored in sorted(filter(None, known)):
        names = [name for ending in stored.endings if (name := f"{attention}.{ending}") in own]
        found = {
            name: value * stored.divisor
            for name in names
            if (value := stored_float(source, own[name]))
        }
        if len(found) == len(stored.endings):
            return found
    return {}
