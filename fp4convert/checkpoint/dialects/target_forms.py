"""Forms of modules to write, and checks that a dialect can hold them."""

from __future__ import annotations

from collections.abc import Iterable

from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    MXFP8_BLOCK,
    Form,
    Granularity,
)
from fp4convert.checkpoint.dialects.forms import SCALE_DTYPES as FLOAT_SCALES
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.errors import ChoiceError
from fp4convert.numerics.formats import FP8, MXFP8, Format, format_named
from fp4convert.recipes.recipe import Target


def dialect_to_write(target: Target) -> Dialect:
    """Return the dialect to write.

    Raises ChoiceError where it cannot hold the format, layout, activations or cache
    """
    name, form = str(target.dialect), form_of(target)
    dialect = dialect_named(name)
    traits = dialect.TRAITS
    if form.format not in traits.writes:
        able = ", ".join(fmt.name for fmt in traits.writes)
        able = f"holds {able}" if able else "is read, and never written"
        detail = f"dialect {name} cannot hold {form.format.name}; it {able}"
        raise ChoiceError("dialect-format", detail)
    if target.scale_layout is not None and target.scale_layout not in traits.layouts:
        detail = f"dialect {name} cannot hold block scales in layout {target.scale_layout!r}"
        detail = f"{detail}; it holds {', '.join(traits.layouts)}"
        other = "" if name == "plain" else ", or --dialect plain, which holds them all"
        raise ChoiceError("dialect-layout", detail, f"Choose another --scale-layout{other}.")
    is_known = form.activations != ACTIVATIONS_FP4 or form.format in traits.activations
    if not is_known or form.activations != target.activations:
        words = {ACTIVATIONS_FP4: "four", ACTIVATIONS_FP8: "eight"}
        word = words.get(target.activations, "sixteen")
        detail = f"--activations {target.activations}: dialect {name} cannot record {word}-bit"
        detail = f"{detail} activations of {form.format.name}"
        usual = usual_activations(form.format, name)
        next_step = f"Choose another --dialect, or --activations {usual}."
        raise ChoiceError("dialect-activations", detail, next_step)
    if traits.correction and form.activations != ACTIVATIONS_FP4:
        detail = f"engines of dialect {name} always quantize activations to four bits"
        next_step = "Leave --activations out; or choose another --dialect."
        raise ChoiceError("dialect-activations", f"{detail}; expected 4", next_step)
    if target.kv_cache and target.kv_cache not in traits.cache_scales:
        detail = f"an {target.kv_cache} KV cache was asked for, which dialect {name} cannot record"
        next_step = "Choose another --dialect: compressed-tensors or modelopt."
        raise ChoiceError("dialect-cache", detail, next_step)
    return dialect


def form_of(target: Target) -> Form:
    """Return the form of most modules to write."""
    return module_form(target, target.format)


def module_form(target: Target, fmt: str) -> Form:
    """Return the form of a module that becomes that format."""
    chosen, traits = format_named(fmt), dialect_named(str(target.dialect)).TRAITS
    if chosen is FP8:
        return fp8_form(target, traits.fp8.made if traits.fp8 else "tensor")
    if chosen is MXFP8:
        return fp8_form(target, MXFP8_BLOCK, "U8", MXFP8)
    bits = ACTIVATIONS_FP4 if target.activations == ACTIVATIONS_FP4 else 16
    layout = target.scale_layout or traits.layouts[0]
    rank = traits.correction.rank if traits.correction else None
    return Form(chosen, bits, layout, target.kv_cache, rank=rank)


def fp8_form(
    target: Target,
    granularity: Granularity,
    stored_scales: str = "F32",
    fmt: Format = FP8,
    is_static: bool = False,
) -> Form:
    """Return the form of a matrix that becomes or stays FP8 or MXFP8.

    is_static  it has a scale of activations
    """
    traits = dialect_named(str(target.dialect)).TRAITS
    wanted = 16 if target.activations == 16 else ACTIVATIONS_FP8
    bits = traits.fp8.activations.get(granularity, wanted) if traits.fp8 else wanted
    is_e8m0 = traits.fp8 is not None and traits.fp8.e8m0 and stored_scales == "F8_E8M0"
    if fmt is FP8 and stored_scales not in FLOAT_SCALES and not is_e8m0:
        stored_scales = "F32"
    is_open = traits.fp8 is not None and traits.fp8.is_open and granularity == "tensor"
    return Form(
        fmt,
        bits,
        target.scale_layout or traits.layouts[0],
        target.kv_cache,
        granularity=granularity,
        stored_scales=stored_scales,
        is_static=is_static and is_open and bits == ACTIVATIONS_FP8,
    )


def usual_activations(fmt: Format, dialect: str) -> int:
    """Return the default bits of activations.

    16; for eight-bit weights 8 where the dialect can record it; 4 beside low-rank corrections
    """
    if dialect_named(dialect).TRAITS.correction:
        return ACTIVATIONS_FP4
    target = Target(fmt.name, dialect, activations=ACTIVATIONS_FP8 if fmt.is_fp8 else 16)
    return form_of(target).activations


def check_forms(target: Target, forms: Iterable[Form]) -> None:
    """Raise ChoiceError where the dialect cannot hold such forms together."""
    name, seen = str(target.dialect), [form_of(target)]
    mixes = dialect_named(name).TRAITS.mixes
    for form in forms:
        if form in seen:
            continue
        seen.append(form)
        if any(known.format not in mixes for known in seen):
            words = " and ".join(sorted({known.word for known in seen}))
            able = " and ".join(fmt.name for fmt in mixes) or "one format in an artifact"
            detail = f"modules would become {words}, which dialect {name} cannot hold together"
            next_step = "Choose another --dialect, or one format for all modules."
            raise ChoiceError("dialect-mixed", f"{detail}; it holds {able}", next_step)
