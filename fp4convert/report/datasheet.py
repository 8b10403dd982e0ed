"""Collect everything that a report shows, as one JSON document.

  quantize   what it recorded while it rounded; the source for histograms of the worst tensors
  verify     with a source what it measured, else what was recorded; what it found

Text from a checkpoint is made visible here (text.escape) and stays text: html.py decides how it stands in a page.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import read_recorded, shares
from fp4convert.checkpoint.module_names import (
    join_names,
    join_words,
    reading_rank,
    split_leaf,
    split_numbers,
)
from fp4convert.numerics.codec import decode_e2m1
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.progress import size_text
from fp4convert.quality.checks import choose_modules, read_group_scales
from fp4convert.quality.inspection import inspect
from fp4convert.quality.stored_scalars import Agreement, find_agreements
from fp4convert.quality.verification import TensorError, Verified
from fp4convert.report.explanations import explanations
from fp4convert.report.histograms import count_values
from fp4convert.report.model_map import find_places, reading_order
from fp4convert.report.text import Document, artifact_rows, badness, escape
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source

WORST = 6  # tensors with histograms
MOST_STACKS = 8  # of layers that are drawn apart; the tensors of more stand together
MOST_KEPT = 12  # patterns of what stays
MOST_DIFFERING = 20  # scale groups that are shown with their scales
DIGITS = 5  # of a number
MEASURED, RECORDED = "measured", "recorded"
COUNTED = "; verify counted the codes again."


@dataclass(frozen=True, slots=True)
class Subject:
    """What a data sheet is of.

    source    the original weights, where they are at hand
    verified  what verify found; None where quantize asks
    """

    artifact: Artifact
    source: Source | None = None
    verified: Verified | None = None


def make_datasheet(subject: Subject) -> Document:
    """The document; its keys are those that page/report.js reads.

    Raises  what reading the artifact and the source raises
    """
    artifact, verified = subject.artifact, subject.verified
    described: Document = inspect(artifact, None, is_full=False)
    how, errors = _errors(artifact, verified)
    lossy = (at for at, error in enumerate(errors) if _is_lossy(error))
    worst = sorted(lossy, key=lambda at: badness(errors[at].sqnr_db, errors[at].mse))[:WORST]
    findings = (
        [asdict(finding) for finding in verified.findings] if verified else described["findings"]
    )
    is_sound = verified.passed if verified else described["healthy"]
    document = {
        "title": artifact.source.name,
        "verdict": {
            "is_good": is_sound,
            "words": _verdict(verified is not None, is_sound, findings),
        },
        "about": _about(artifact),
        "tiles": _tiles(subject, described, errors),
        "facts": list(_facts(subject, described).items()),
        "forms": [_drawn(form) for form in described.get("forms", [described])],
        "evidence": {"how": how, "words": _evidence(subject, how)},
        **_tensors(artifact, errors),
        "worst": _worst(subject, errors, worst),
        "magnitudes": [
            f"{value:g}" for value in decode_e2m1(np.arange(8, dtype=np.uint8))
        ],  # of codes without their sign
        "groups": _groups(artifact),
        "findings": [_explained(finding) for finding in findings],
        "producer": f"fp4convert {version('fp4convert')}",
    }
    return {key: _visible(value) for key, value in document.items()}


def _errors(
    artifact: Artifact, verified: Verified | None
) -> tuple[str | None, Sequence[TensorError]]:
    """What is known of every tensor's loss, and how: measured, recorded, or (None) not at all."""
    if verified and verified.tensors:
        return MEASURED, verified.tensors
    recorded, _ = read_recorded(artifact)
    if recorded is None or not recorded.entries:
        return None, ()
    entries = recorded.entries
    return RECORDED, [
        TensorError(e.name, e.sqnr_db, e.mse, e.max_abs, e.cosine, **shares(e.histogram))
        for e in entries
    ]


def _is_lossy(error: TensorError) -> bool:
    return error.mse != 0


def _verdict(is_verified: bool, is_sound: bool, findings: Sequence[Document]) -> str:
    counts = {
        level: sum(finding["level"] == level for finding in findings)
        for level in ("error", "warning")
    }
    told = ", ".join(
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    )
    words = (
        ("passed" if is_sound else "failed")
        if is_verified
        else ("healthy" if is_sound else "not healthy")
    )
    return f"{words}: {told}" if told else words


def _about(artifact: Artifact) -> str:
    """Where the weights come from, in a line."""
    origin = artifact.record.get("source")
    repo, revision = (
        (origin.get("repo"), origin.get("revision")) if isinstance(origin, dict) else (None, None)
    )
    if repo:
        return f"made from {repo}{f' at {revision}' if revision else ''}"
    return (
        "made from a folder of weights"
        if artifact.record
        else "made by others: it holds no record of fp4convert"
    )


def _tiles(
    subject: Subject, described: Document, errors: Sequence[TensorError]
) -> list[tuple[str, str]]:
    """(value, what it is) of the numbers that people ask for first."""
    nbytes = subject.artifact.source.checkpoint.nbytes
    bits, before = (
        described["bits_per_weight"],
        subject.source.checkpoint.nbytes if subject.source else 0,
    )
    tiles = [("-" if bits is None else f"{bits:.2f}", "bits per quantized weight")]
    tiles += [
        (
            size_text(nbytes),
            f"of {size_text(before)} ({100 * nbytes / before:.0f} %)" if before else "of weights",
        )
    ]
    known = [error.sqnr_db for error in errors if error.sqnr_db is not None]
    if known:
        tiles += [
            (f"{math.fsum(known) / len(known):.2f} dB", "SQNR, mean"),
            (f"{min(known):.2f} dB", "SQNR, least"),
        ]
    return [*tiles, (f"{described['tensors']['quantized']:,}", "tensors quantized")]


def _facts(subject: Subject, described: Document) -> dict[str, str]:
    """The artifact card: words and what they say."""
    artifact, record = subject.artifact, subject.artifact.record
    rows = artifact_rows(described)
    shards = len(artifact.source.checkpoint.shards)
    rows["weights"] = (
        f"{size_text(artifact.source.checkpoint.nbytes)} in {shards} file{'s' if shards > 1 else ''}"
    )
    if subject.source:
        rows["source"] = f"{size_text(subject.source.checkpoint.nbytes)}, {subject.source.name}"
    for word, key in (
        ("scale rule", "scale_rule"),
        ("method", "method"),
        ("calibration", "calibration"),
    ):
        if record.get(key):
            rows[word] = str(record[key])
    packed = {ref.name for module in artifact.packed.values() for ref in module.refs}
    others = (
        ref
        for ref in artifact.tensors.values()
        if len(ref.shape) > 1 and ref.dtype in FLOAT_TYPES and ref.name not in packed
    )
    if kept := [ref.name.removesuffix(WEIGHT) for ref in others]:
        rows["stays"] = _folded(kept)
    producer = record.get("producer")
    if isinstance(producer, dict):
        rows["made by"] = f"{producer.get('name')} {producer.get('version')}"
    return rows


def _folded(names: Sequence[str]) -> str:
    patterns = [pattern for pattern, _ in join_names((name, None) for name in names)]
    more = f", and {len(patterns) - MOST_KEPT} more" if len(patterns) > MOST_KEPT else ""
    return f"{', '.join(patterns[:MOST_KEPT])}{more}"


def _drawn(form: Document) -> Document:
    """What a picture of one block shows."""
    return {
        key: form.get(key)
        for key in ("format", "block_size", "element_dtype", "scale_dtype", "global_scale")
    }


def _evidence(subject: Subject, how: str | None) -> str:
    """Who says so, in a sentence."""
    if how == MEASURED:
        return "Measured by verify: every value of every quantized tensor beside the source's."
    if how == RECORDED:
        is_counted = (
            subject.verified and not subject.artifact.source.is_streamed
        )  # as verification.check_codes does
        return f"As quantize measured it while it rounded (quantization_report.json){COUNTED if is_counted else '.'}"
    again = "To measure it: fp4convert verify ARTIFACT --source SOURCE --report FILE.html"
    return f"How much was lost is not known: nothing is recorded, and no source was given. {again}"


def _tensors(artifact: Artifact, errors: Sequence[TensorError]) -> Document:
    """Tensors by columns, and the stacks of layers that they stand in.

    places  four numbers for each: stack, and in it the layer and the module; and the number of the expert, or -1
    """
    places = find_places([error.name for error in errors])
    sizes: dict[str, int] = defaultdict(int)
    for place in places:
        sizes[place.tower] += bool(place.tower)
    apart = sorted((stack for stack in sizes if stack), key=lambda stack: -sizes[stack])[
        :MOST_STACKS
    ]
    layers: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    modules: dict[str, set[str]] = defaultdict(set)
    seats = []
    for error, place in zip(errors, places, strict=True):
        is_apart = place.tower in apart
        stack, layer = (place.tower, place.layer) if is_apart else ("", ())
        module = place.module if is_apart else error.name.removesuffix(WEIGHT)
        layers[stack].add(layer)
        modules[stack].add(module)
        seats.append(
            (stack, layer, module, -1 if place.expert is None or not is_apart else place.expert)
        )
    ordered = [stack for stack in (*apart, "") if stack in layers]
    at_stack = {stack: at for at, stack in enumerate(ordered)}
    at_layer = {
        stack: {layer: at for at, layer in enumerate(sorted(layers[stack]))} for stack in ordered
    }
    at_module = {
        stack: {module: at for at, module in enumerate(reading_order(modules[stack]))}
        for stack in ordered
    }
    flat = [
        number
        for s, layer, m, expert in seats
        for number in (at_stack[s], at_layer[s][layer], at_module[s][m], expert)
    ]
    stacks = [
        {
            "name": stack,
            "layers": [".".join(map(str, layer)) for layer in at_layer[stack]],
            "modules": list(at_module[stack]),
        }
        for stack in ordered
    ]
    columns = {
        key: [_rounded(getattr(error, key)) for error in errors]
        for key in ("sqnr_db", "mse", "max_abs", "cosine")
    }
    parts = {
        key: [_rounded(getattr(error, key)) for error in errors] for key in ("saturated", "zero")
    }
    names = [error.name for error in errors]
    return {
        "stacks": stacks,
        "places": flat,
        "tensors": {"name": names, "format": _formats(artifact, names), **columns, **parts},
    }


def _formats(artifact: Artifact, names: Iterable[str]) -> list[str]:
    """What codes each tensor has."""
    packed = artifact.packed
    usual = artifact.forms[0].format.name
    found = (packed.get(name.removesuffix(WEIGHT)) for name in names)
    return [each.form.format.name if each else usual for each in found]


def _worst(subject: Subject, errors: Sequence[TensorError], worst: Sequence[int]) -> list[Document]:
    """The tensors that lost most: their positions, codes, and values where there is a source."""
    names = [errors[at].name for at in worst]
    found = (
        count_values(subject.artifact, subject.source, names) if subject.source and names else {}
    )
    return [
        {
            "tensor": at,
            "codes": errors[at].histogram,
            "values": asdict(found[name]) if name in found else None,
        }
        for at, name in zip(worst, names, strict=True)
    ]


def _groups(artifact: Artifact) -> Document:
    """Scale groups by kind: how many there are, and how many store one scale."""
    stored = read_group_scales(artifact, choose_modules(artifact, is_full=False))
    kinds: dict[str, list[Agreement]] = defaultdict(list)
    for group in find_agreements(artifact, stored):
        kinds[_kind(group.members)].append(group)
    rows = [
        {"modules": kind, "groups": len(groups), "agree": sum(group.is_kept for group in groups)}
        for kind, groups in kinds.items()
    ]
    differing = [group.scales for groups in kinds.values() for group in groups if not group.is_kept]
    has_scales = any(form.format.has_global_scale for form in artifact.forms)
    shown = [
        [[member, f"{scale:.9g}"] for member, scale in scales.items()]
        for scales in differing[:MOST_DIFFERING]
    ]
    return {
        "rows": rows,
        "differing": shown,
        "hidden": len(differing) - len(shown),
        "has_scales": has_scales,
    }


def _kind(members: Sequence[str]) -> str:
    """Members of a group as one name, with a star for every number above them."""
    parent = split_leaf(members[0])[0]
    return "*".join(split_numbers(parent)[0]) + join_words(
        sorted((split_leaf(member)[1] for member in members), key=reading_rank)
    )


def _explained(finding: Mapping[str, Any]) -> Document:
    known = explanations("findings").get(finding["code"], {})
    return {**finding, **{key: known.get(key, "") for key in ("meaning", "remedy")}}


def _rounded(value: float | None) -> float | None:
    """A number of a few digits; None for what is no finite one."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _visible(value: Any) -> Any:
    """The same document; in its text, whatever acts on what stands around it is shown as what it is."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): _visible(each) for key, each in value.items()}
    return [_visible(each) for each in value] if isinstance(value, list | tuple) else value
