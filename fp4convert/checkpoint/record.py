"""Make and read our own record, quantization_config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp4convert.checkpoint.dialects.base import (
    Dialect,
    Ignored,
    Traits,
    json_object,
    positive_pair,
)
from fp4convert.checkpoint.dialects.forms import (
    ACTIVATIONS_FP4,
    ACTIVATIONS_FP8,
    MXFP8_FORM,
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
from fp4convert.storage.safetensors import WEIGHT, TensorRef

# Keys of the record.
ADAPTER = "adapter"
BASE = "base"
PADDING = "padding"
SCALE_WORDS = {dtype: kind.word for dtype, kind in FLOAT_TYPES.items()} | {"F8_E8M0": "e8m0"}
DECODED = "decoded"  # tensors in formats that the dialect lacks
GOAL = "target"
OPTIONS = "options"  # that the bytes depend on
TRANSCODED = "transcoded"  # in OPTIONS: those of transcode, after quantize
MIXED = "mixed"  # the format of an artifact whose modules have several forms


class RecordContents(NamedTuple):
    """Contents of an artifact, for its record.

    groups   modules by form
    ignored  modules that stay
    shapes   of modules whose tensors alone do not give them
    adapter  entry of a merged adapter
    goal     target that formats of modules were chosen for
    options  that make the artifact again
    """

    groups: Sequence[Group]
    ignored: Ignored
    shapes: Mapping[str, tuple[int, ...]]
    stacks: Sequence[StackRule] = ()
    folds: Sequence[FoldUse] = ()
    adapter: Mapping[str, object] | None = None
    goal: Mapping[str, object] | None = None
    options: Mapping[str, object] | None = None


# A table of n-grams, the key of models that have one, and what tells engines its dtype (vLLM 0.33).
TABLE = re.compile(r"(.+\.ngram_embedding)(?:\.shard_\d+)?")
TABLE_SCALES = (".weight_scale", ".weight_scale_inv")
TABLE_SIGN, TABLE_DTYPE = "ple_layer_ids", "ple_embedding_dtype"


def make_record(
    target: Target, contents: RecordContents, producer: dict[str, str], origin: dict[str, object]
) -> dict[str, object]:
    """Make our quantization_config.json without its last key, `files`.

    `files` has the sha256 of every other file, known when they are written.

    origin  repo and revision of the source; None for a folder, whose path is private
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
    # Stacks and folds have the words of recipe files.
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
    """Name the merged adapter, by its repository or the hash of its weights."""
    entry = json_object(record.get(ADAPTER))
    if entry.get("repo"):
        return f"the adapter {entry['repo']} at commit {entry.get('revision')}"
    listed = list(json_object(entry.get("sha256")).values())
    return f"an adapter (sha256 {str(listed[-1])[:12]}...)" if listed else "an adapter"


def method_settings(target: Target) -> dict[str, object]:
    """Return the settings of the target's method."""
    settings = {"damping": target.damping, "passes": target.passes}
    return {key: value for key, value in settings.items() if value is not None}


def folds_recorded(record: Mapping[str, object]) -> tuple[FoldUse, ...]:
    """Read the folds of our record."""
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
                detail = f"{RECORD}: an entry of folds is {str(entry)[:200]}; expected into, kind,"
                raise InputError("record-folds", f"{detail} linears, heads and modules")
    return tuple(uses)


def stacks_recorded(record: Mapping[str, object]) -> tuple[StackRule, ...]:
    """Read the rules of the source's stacks from our record."""
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
                detail = f"{RECORD}: an entry of stacks is {entry!r}; expected tensors, members,"
                raise InputError("record-stacks", f"{detail} order, rows and named")
    return tuple(rules)


def _describe_modules(groups: Sequence[Group], spelling: Dialect) -> list[dict[str, object]]:
    """Make an entry for every pattern; the first that fits a module counts."""
    entries = []
    for group in groups:
        others = [module for other in groups if other is not group for module in other.modules]
        form = describe_form(group.form, spelling)
        entries += [{"pattern": pattern, **form} for pattern in targets_of(group.modules, others)]
    return entries


def describe_form(form: Form, spelling: Dialect) -> dict[str, object]:
    """Describe the place and meaning of every byte, for a form in a dialect.

    These are the first keys of our record. For FP8 and int4, elements of `granularity` share a
    scale, and `block_size` is the rows and columns of a block.
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
            "scale_dtype": SCALE_WORDS[form.stored_scales],
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

    layout, global_scale = LAYOUTS.get(form.scale_layout), None
    padding = list(layout.padding) if layout and layout.padding != (1, 1) else None
    if fmt.has_global_scale and kind:
        global_scale = {"dtype": FLOAT_TYPES[scalars.dtype].word, "stored_as": kind}
    return {
        "format": fmt.name,
        "block_size": fmt.block_size,
        "element_dtype": fmt.element_dtype,
        "scale_dtype": fmt.scale_dtype,
        "scale_layout": form.scale_layout,
        "scale_padding": padding,
        "nibble_order": spelling.TRAITS.nibble_order if fmt.is_fp4 else None,
        "block_axis": -1,
        "global_scale": global_scale,
        "activations": form.activations,
        **({"rank": form.rank} if form.rank is not None else {}),
        **cache,
    }


def place_recorded(record: Mapping[str, object], reference: str) -> tuple[str | None, str | None]:
    """Return commit and folder of an artifact's source repository.

    reference  of the source; (None, None) unless it is that repository
    """
    origin = json_object(record.get("source"))
    if origin.get("repo") != reference or os.path.exists(reference):
        return None, None
    commit, folder = origin.get("revision"), json_object(record.get(OPTIONS)).get("subfolder")
    return (
        commit if isinstance(commit, str) else None,
        folder if isinstance(folder, str) else None,
    )


def groups_recorded(record: Mapping[str, object]) -> tuple[Group, ...]:
    """Read the forms of our record, and their modules."""
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
    cache = record.get("kv_cache")
    if cache is not None and not (isinstance(cache, str) and cache in traits.cache_scales):
        expected = ", ".join(traits.cache_scales) or "none"
        detail = f'"kv_cache" {str(cache)[:60]!r}; expected one of its dialect: {expected}'
        raise InputError("record-modules", detail)
    layout = str(record.get("scale_layout", "linear"))
    if fmt is MXFP8:
        form = replace(MXFP8_FORM, activations=activations, scale_layout=layout, kv_cache=cache)
    elif fmt.is_fp4:
        listed = json_object(record.get("shapes"))
        shapes = {name: pair for name, shape in listed.items() if (pair := positive_pair(shape))}
        form = Form(fmt, activations, layout, cache, shapes)
        rank = record.get("rank")
        if type(rank) is int and rank > 0:
            form = replace(form, rank=rank)
    else:
        words = {word: dtype for dtype, word in SCALE_WORDS.items()}
        granularity: Granularity
        match record.get("granularity"), record.get("block_size"):
            case "tensor" | "row" as word, _:
                granularity = word
            case None, None if made and fmt.is_fp8:  # a plan has the format alone
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
    """Name the forms for people."""
    return " + ".join(dict.fromkeys(group.form.word for group in groups))


def declare_tables(config: Mapping[str, object], outputs: Sequence[TensorRef]) -> dict[str, object]:
    """Return a config that names the dtype of tables of n-grams in FP8."""
    if TABLE_SIGN in config:
        eight = (ref for ref in outputs if ref.dtype == "F8_E4M3")
        if any(TABLE.fullmatch(ref.name.removesuffix(WEIGHT)) for ref in eight):
            return {**config, TABLE_DTYPE: "float8_e4m3fn"}
    return {
        key: declare_tables(value, outputs) if isinstance(value, dict) else value
        for key, value in config.items()
    }
