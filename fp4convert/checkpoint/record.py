"""Make and read our own record, quantization_config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import Dialect, Ignored, Traits
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    Form,
    Granularity,
    Group,
    merge_groups,
    targets_of,
)
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES, INT4, MXFP8, STORED_FORMATS, format_named
from fp4convert.recipes.recipe import Target
from fp4convert.recipes.rules import FoldRule, FoldUse, StackRule
from fp4convert.storage.checkpoint_files import RECORD

ADAPTER = "adapter"  # the key of what was merged
PADDING = "padding"  # the key of zeros that were added
DECODED = "decoded"  # the key of tensors that were of formats which the dialect lacks
GOAL = "target"  # the key of what formats of modules were chosen for
OPTIONS = "options"  # the key of those that the bytes depend on
TRANSCODED = "transcoded"  # in OPTIONS, the key of what transcode was told after quantize
MIXED = "mixed"  # the format of an artifact whose modules have several forms


class Contents(NamedTuple):
    """What an artifact holds.

    groups   modules by form
    ignored  those that stay
    shapes   of modules whose tensors alone do not tell
    adapter  what is said of one that was merged
    goal     what formats of modules were chosen for
    options  those that make it again
    """

    groups: Sequence[Group]
    ignored: Ignored
    shapes: Mapping[str, tuple[int, ...]]
    stacks: Sequence[StackRule] = ()
    folds: Sequence[FoldUse] = ()
    adapter: Mapping[str, object] | None = None
    goal: Mapping[str, object] | None = None
    options: Mapping[str, object] | None = None


def make_record(
    target: Target, contents: Contents, producer: dict[str, str], origin: dict[str, object]
) -> dict[str, object]:
    """Make our quantization_config.json, but for its last key.

    That is `files`, the sha256 of every other file, known when they are written.

    origin  repo and revision of the weights it was made from; None for a folder, whose path is
            nobody's business
    """
    groups, ignored, shapes, stacks, folds, adapter, goal, options = contents
    form, spelling = groups[0].form, dialect_named(str(target.dialect))
    record: dict[str, object]
    if len(groups) > 1:
        record = {"format": MIXED, "modules": _describe_modules(groups, spelling)}
    else:
        record = describe_form(form, spelling)
    if form.scale_layout == "appended":
        record["shapes"] = {module: list(shape) for module, shape in shapes.items()}
    # Stacks and folds are said in the words of recipe files.
    if stacks:
        record["stacks"] = [
            {
                "tensors": list(rule.tensors),
                "members": list(rule.members),
                "order": "in_out" if rule.is_transposed else "out_in",
                "rows": "interleaved" if rule.is_interleaved else "concatenated",
                "named": rule.named,
                **({"experts": rule.experts} if rule.experts else {}),
            }
            for rule in stacks
        ]
    if folds:
        record["folds"] = [
            {
                "into": use.rule.into,
                "kind": use.rule.kind,
                "linears": list(use.rule.linears),
                "heads": {"repeats": use.repeats, "width": use.width},
                "modules": list(use.modules),
            }
            for use in folds
        ]
    if target.keep_dtype:
        record["keep_dtype"] = target.keep_dtype
    return {
        **record,
        "dialect": target.dialect,
        "scale_rule": target.scale_rule,
        "method": target.method,
        "calibration": target.calibration,
        **({ADAPTER: dict(adapter)} if adapter else {}),
        **({GOAL: dict(goal)} if goal else {}),
        **method_settings(target),
        "ignore": [*ignored.modules, *ignored.patterns],
        **({OPTIONS: dict(options)} if options else {}),
        "producer": producer,
        "source": origin,
    }


def describe_adapter(record: Mapping[str, object]) -> str:
    """Say which adapter was merged, by name or by the hash of its weights."""
    known = record.get(ADAPTER)
    entry = known if isinstance(known, dict) else {}
    if entry.get("repo"):
        return f"the adapter {entry['repo']} at commit {entry.get('revision')}"
    hashes = entry.get("sha256")
    listed = list(hashes.values()) if isinstance(hashes, dict) else []
    return f"an adapter (sha256 {str(listed[-1])[:12]}...)" if listed else "an adapter"


def method_settings(target: Target) -> dict[str, object]:
    """Return what a method was told; nothing for one that takes nothing."""
    told = {"damping": target.damping, "passes": target.passes}
    return {key: value for key, value in told.items() if value is not None}


def folds_recorded(record: Mapping[str, object]) -> tuple[FoldUse, ...]:
    """Read from our record where factors were folded in."""
    listed = record.get("folds", [])
    uses = []
    for entry in listed if isinstance(listed, list) else [listed]:
        match entry:
            case {
                "into": str(into),
                "kind": "norm" | "norm_plus_one" | "linear" | "heads" as kind,
                "linears": [*linears],
                "heads": {"repeats": int(repeats), "width": int(width)},
                "modules": [*modules],
            } if repeats > 0 and width > 0:
                rule = FoldRule(into, kind, tuple(map(str, linears)))
                uses.append(FoldUse(rule, repeats, width, tuple(map(str, modules))))
            case _:
                detail = f"{RECORD}: an entry of folds is {str(entry)[:200]}"
                expected = "expected into, kind, linears, heads and modules"
                raise InputError("record-folds", f"{detail}; {expected}")
    return tuple(uses)


def stacks_recorded(record: Mapping[str, object]) -> tuple[StackRule, ...]:
    """Read from our record how the stacks of the source were read."""
    listed = record.get("stacks")
    rules = []
    for entry in listed if isinstance(listed, list) else []:
        match entry:
            case {
                "tensors": [*tensors],
                "members": [*members],
                "order": "in_out" | "out_in" as order,
                "rows": "interleaved" | "concatenated" as rows,
                "named": str(named),
            }:
                experts = entry.get("experts")
                names = tuple(map(str, tensors)), tuple(map(str, members))
                rule = StackRule(*names, order == "in_out", rows == "interleaved", named)
                rules.append(rule._replace(experts=experts if isinstance(experts, int) else None))
            case _:
                detail = f"{RECORD}: an entry of stacks is {entry!r}"
                expected = "expected tensors, members, order, rows and named"
                raise InputError("record-stacks", f"{detail}; {expected}")
    return tuple(rules)


def _describe_modules(groups: Sequence[Group], spelling: Dialect) -> list[dict[str, object]]:
    """Make an entry for every pattern; the first that fits a module counts."""
    entries = []
    for group in groups:
        others = [module for other in groups if other is not group for module in other.modules]
        described = describe_form(group.form, spelling)
        targets = targets_of(group.modules, others)
        entries += [{"pattern": pattern, **described} for pattern in targets]
    return entries


def describe_form(form: Form, spelling: Dialect) -> dict[str, object]:
    """Describe where every byte is and what it means, for a form in a dialect.

    These are the first keys of our record. Of FP8 and int4, `granularity` is what one scale stands
    for, and `block_size` the rows and columns of a block; other formats have blocks of their own.
    """

    fmt, kind, scalars = form.format, spelling.TRAITS.global_scale_kind, spelling.TRAITS.scalars
    cache = {"kv_cache": form.kv_cache} if form.kv_cache else {}
    if not fmt.block_size:
        is_block = isinstance(form.granularity, tuple)
        return {
            "format": fmt.name,
            "block_size": list(form.granularity or ()) if is_block else None,
            "granularity": "block" if is_block else form.granularity,
            "element_dtype": fmt.element_dtype,
            "scale_dtype": FLOAT_TYPES[form.stored_scales].word,
            "scale_layout": "linear",
            "scale_padding": None,
            "nibble_order": "low_first" if fmt is INT4 else None,
            "block_axis": -1,
            "global_scale": None,
            "activations": form.activations,
            **({"static_activations": True} if form.is_static else {}),
            **cache,
        }
    from fp4convert.numerics.scale_layouts import LAYOUTS

    has_global_scale, layout = fmt.has_global_scale and kind, LAYOUTS.get(form.scale_layout)
    padding = list(layout.padding) if layout and layout.padding != (1, 1) else None
    return {
        "format": fmt.name,
        "block_size": fmt.block_size,
        "element_dtype": fmt.element_dtype,
        "scale_dtype": fmt.scale_dtype,
        "scale_layout": form.scale_layout,
        "scale_padding": padding,
        "nibble_order": spelling.TRAITS.nibble_order if fmt.is_fp4 else None,
        "block_axis": -1,
        "global_scale": {"dtype": FLOAT_TYPES[scalars.dtype].word, "stored_as": kind}
        if has_global_scale
        else None,
        "activations": form.activations,
        **({"rank": form.rank} if form.rank is not None else {}),
        **cache,
    }


def place_recorded(record: Mapping[str, object], reference: str) -> tuple[str | None, str | None]:
    """Return commit and folder of the repository an artifact is from.

    reference  what a person names as its source; another one has no such commit and folder
    """
    origin, options = record.get("source"), record.get("options")
    if not isinstance(origin, dict) or origin.get("repo") != reference or os.path.exists(reference):
        return None, None
    commit = origin.get("revision")
    folder = options.get("subfolder") if isinstance(options, dict) else None
    found = [text if isinstance(text, str) else None for text in (commit, folder)]
    return found[0], found[1]


def groups_recorded(record: Mapping[str, object]) -> tuple[Group, ...]:
    """Read the forms that our record says, and of which modules.

    Raises InputError for a form or a layout that its dialect does not have
    """
    traits = dialect_named(str(record.get("dialect"))).TRAITS
    if record.get("format") != MIXED:
        return (Group(_form_recorded(record, traits), ("*",)),)
    listed = record.get("modules")
    entries = (
        [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    )
    if not entries:
        detail = 'format "mixed" and no "modules"; expected a form for every pattern'
        raise InputError("record-modules", detail)
    return merge_groups(
        (_form_recorded(entry, traits), [str(entry.get("pattern"))]) for entry in entries
    )


def _form_recorded(record: Mapping[str, object], traits: Traits) -> Form:
    """Read a form of our record, or of a plan, in a dialect of those traits."""
    layouts, made = traits.layouts, traits.fp8.made if traits.fp8 else None
    fmt = format_named(str(record.get("format")), STORED_FORMATS)
    known = ACTIVATIONS_FP4 if fmt.is_fp4 else ACTIVATIONS_FP8
    activations = known if record.get("activations") == known else 16
    recorded = record.get("kv_cache")
    if recorded is not None and not (isinstance(recorded, str) and recorded in traits.cache_scales):
        expected = ", ".join(traits.cache_scales) or "none"
        detail = f'"kv_cache" {str(recorded)[:60]!r}; expected one of its dialect: {expected}'
        raise InputError("record-modules", detail)
    cache = None if recorded is None else str(recorded)
    if fmt is MXFP8:
        block, layout = (1, fmt.block_size), str(record.get("scale_layout", "linear"))
        form = Form(fmt, activations, layout, cache, granularity=block, stored_scales="U8")
    elif fmt.is_fp4:
        listed = record.get("shapes")
        shapes = {
            module: (shape[0], shape[1])
            for module, shape in (listed.items() if isinstance(listed, dict) else ())
            if isinstance(shape, list)
            and len(shape) == 2
            and all(type(size) is int and size > 0 for size in shape)
        }
        layout, rank = str(record.get("scale_layout", "linear")), record.get("rank")
        form = Form(fmt, activations, layout, cache, shapes)
        if type(rank) is int and rank > 0:
            form = replace(form, rank=rank)
    else:
        words = {kind.word: dtype for dtype, kind in FLOAT_TYPES.items()}
        granularity: Granularity  # what one scale stands for
        match record.get("granularity"), record.get("block_size"):
            case "tensor" | "row" as word, _:
                granularity = word
            case None, None if made and fmt.is_fp8:  # a plan says no more than the format
                granularity = made
            case _, [int(rows), int(columns)] if rows > 0 and columns > 0:
                granularity = (rows, columns)
            case found, size:
                detail = f"granularity {found!r}, block_size {size!r}"
                expected = 'expected "tensor", "row", or "block" of [rows, columns]'
                raise InputError("record-modules", f"{detail}; {expected}")
        form = Form(
            fmt,
            activations,
            kv_cache=cache,
            granularity=granularity,
            stored_scales=words.get(str(record.get("scale_dtype")), "F32"),
            is_static=record.get("static_activations") is True,
        )
    if len(layouts) == 1:
        return replace(form, scale_layout=layouts[0])
    if form.scale_layout not in layouts:
        detail = f"scale_layout {form.scale_layout!r} is not known"
        raise InputError("unknown-layout", f"{detail}; expected one of {', '.join(layouts)}")
    return form


def describe_groups(groups: Sequence[Group]) -> str:
    """Say the forms in a few words, for people."""
    return " + ".join(dict.fromkeys(group.form.word for group in groups))
