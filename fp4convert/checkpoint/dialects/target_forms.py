"""Forms of what is made, and checks that its dialect can hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, ACTIVATIONS_FP8, Form, Granularity
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FP8, MODULE_FORMATS, format_named
from fp4convert.recipes.recipe import Target


def dialect_to_write(target: Target) -> Dialect:
    """The dialect of what is made; InputError where it cannot say its format, layout or cache."""
    name, form = str(target.dialect), form_of(target)
    dialect = dialect_named(name)
    if form.format not in dialect.TRAITS.writes:
        able = ", ".join(known.name for known in dialect.TRAITS.writes)
        detail = f"dialect {name} cannot hold {form.format.name}; it holds {able}"
        raise InputError("dialect-format", detail, "Choose another --dialect or --format.")
    if target.scale_layout is not None and target.scale_layout not in dialect.TRAITS.layouts:
        able = ", ".join(dialect.TRAITS.layouts)
        detail = f"dialect {name} cannot hold block scales that lie {target.scale_layout!r}; it holds {able}"
        other = "" if name == "plain" else ", or --dialect plain, which holds them all"
        raise InputError("dialect-layout", detail, f"Choose another --scale-layout{other}.")
    if form.activations == ACTIVATIONS_FP4 and form.format not in dialect.TRAITS.activations:
        detail = f"dialect {name} cannot say that activations of {form.format.name} are four-bit"
        raise InputError(
            "dialect-activations", detail, "Choose another --dialect, or --activations 16."
        )
    if target.kv_cache and not (target.kv_cache == "fp8" and dialect.TRAITS.cache_scales):
        detail = f"an {target.kv_cache} cache of keys and values is asked for, which dialect {name} cannot say"
        raise InputError(
            "dialect-cache", detail, "Choose another --dialect: compressed-tensors or modelopt."
        )
    return dialect


def form_of(target: Target) -> Form:
    """The form of what is made."""
    layout = target.scale_layout or dialect_named(str(target.dialect)).TRAITS.layouts[0]
    return Form(format_named(target.format), target.activations, layout, target.kv_cache)


def module_form(target: Target, fmt: str) -> Form:
    """The form of a module that becomes that format, which need not be the artifact's own; InputError for an unknown one."""
    own, chosen = form_of(target), format_named(fmt, MODULE_FORMATS)
    table = dialect_named(str(target.dialect)).TRAITS.fp8
    return (
        fp8_form(target, table.made if table else "tensor")
        if chosen is FP8
        else replace(own, format=chosen)
    )


def fp8_form(target: Target, granularity: Granularity, stored_scales: str = "F32") -> Form:
    """The form of a matrix that becomes FP8, or stays it, with such scales."""
    table = dialect_named(str(target.dialect)).TRAITS.fp8
    wanted = ACTIVATIONS_FP8 if target.activations == ACTIVATIONS_FP4 else 16
    bits = table.activations.get(granularity, wanted) if table else wanted
    own = form_of(target)
    return replace(
        own, format=FP8, activations=bits, granularity=granularity, stored_scales=stored_scales
    )


def check_forms(target: Target, forms: Iterable[Form]) -> None:
    """InputError where the dialect of what is made cannot hold modules of those forms beside each other."""
    name, seen = str(target.dialect), [form_of(target)]
    mixes = dialect_named(name).TRAITS.mixes
    for form in forms:
        if form in seen:
            continue
        seen.append(form)
        if any(each.format not in mixes for each in seen):
            words = " and ".join(sorted({each.word for each in seen}))
            able = " and ".join(fmt.name for fmt in mixes) or "one format in an artifact"
            detail = f"modules are to be {words}, which dialect {name} cannot hold beside each other; it holds {able}"
            raise InputError(
                "dialect-mixed", detail, "Choose another --dialect, or one format for all modules."
            )
