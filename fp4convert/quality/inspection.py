"""Make the document of inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Packed
from fp4convert.checkpoint.error_report import read_recorded
from fp4convert.checkpoint.module_names import join_names
from fp4convert.checkpoint.record import MIXED, describe_form
from fp4convert.engines.files import EngineAt
from fp4convert.errors import Finding
from fp4convert.progress import Phases
from fp4convert.quality.checks import (
    Judged,
    check_headers,
    choose_modules,
    is_healthy,
    judge,
    scale_nbytes,
)
from fp4convert.quality.engine_check import check_engines, judge_by_engines
from fp4convert.quality.kept_values import check_vectors
from fp4convert.storage.safetensors import TensorRef, nbytes_of
from fp4convert.storage.source import Source, stored_float


def inspect(
    artifact: Artifact,
    source: Source | None,
    is_full: bool,
    phases: Phases | None = None,
    asked: tuple[EngineAt, ...] = (),
) -> dict[str, Any]:
    """Make the document of `inspect --json`.

    source   the original weights, which decide more than statistics
    is_full  read every block scale, and have a second reader open every shard
    phases   receives the progress
    asked    engines that have to load it

    scale_layout: "declared" is of our record (None without one), "detected" None if unknown.  The
    "forms" of a mixed artifact say more; keys in which they differ are None.
    """
    chosen = choose_modules(artifact, is_full)
    judged = judge(artifact, source, chosen, chosen, phases or Phases())
    headers = check_headers(artifact) if is_full else ()
    return describe_judged(artifact, judged, headers, source, asked)


def describe_judged(
    artifact: Artifact,
    judged: Judged,
    others: Iterable[Finding] = (),
    source: Source | None = None,
    asked: tuple[EngineAt, ...] = (),
) -> dict[str, Any]:
    """Make the document of `inspect --json` of a judged artifact.

    others  findings that follow those of judge
    """
    findings = [*judged.findings, *others]
    findings += check_vectors(artifact, source is not None)
    engines = [verdict.as_json() for verdict in judge_by_engines(artifact, findings)]
    findings += check_engines(artifact, findings, asked)
    return {
        **describe(artifact, judged),
        "engines": engines,
        "findings": [asdict(finding) for finding in findings],
        "unexplained": [
            {"name": one.tensor, "reason": one.detail}
            for one in findings
            if one.code == "unexplained"
        ],
        "healthy": is_healthy(findings),
        **({"source": source.name} if source else {}),
    }


def describe(artifact: Artifact, judged: Judged) -> dict[str, Any]:
    """Make the part of the document of inspect that judges nothing."""
    # The share of block scales that was read; those of eight bits are read whole.
    nbytes, packed = scale_nbytes(artifact), artifact.packed
    read_nbytes, whole = sum(nbytes[module] for module in judged.read), sum(nbytes.values())
    forms = _describe_forms(artifact)
    common = {
        key: value if all(form.get(key) == value for form in forms) else None
        for key, value in forms[0].items()
    }
    bits = common.get("bits_per_weight") if len(forms) == 1 else None
    cache, shared = _describe_cache(artifact), common.get("granularity")
    recorded, _ = read_recorded(artifact)
    words = [(module, each.form.word) for module, each in packed.items()]
    return {
        "format": common.get("format") or MIXED,
        "dialect": artifact.dialect,
        **{key: common.get(key) for key in ("block_size", "element_dtype", "scale_dtype")},
        "scale_layout": {"declared": artifact.declared_layout, "detected": judged.detected},
        **{key: common.get(key) for key in ("global_scale", "nibble_order", "activations")},
        **({"kv_cache": cache} if cache else {}),
        **({"granularity": shared} if shared else {}),
        **({"forms": forms} if len(forms) > 1 else {}),
        "tensors": {
            "quantized": len(packed),
            "other": len(artifact.tensors) - len(_stored_tensors(packed.values())),
        },
        "patterns": [
            {"pattern": pattern, "modules": len(held), "form": words[held[0]][1]}
            for pattern, held in join_names(words)
        ],
        "bits_per_weight": bits or _bits_per_weight(artifact, packed.values()),
        "share_read": round(read_nbytes / whole if whole else float(bool(packed)), 4),
        **({"fidelity": recorded.summary} if recorded else {}),
    }


def _describe_forms(artifact: Artifact) -> list[dict[str, object]]:
    """Describe the forms of modules; the declared form without modules."""
    gathered: dict[str, tuple[dict[str, object], list[Packed]]] = {}
    for form, run in groupby(artifact.packed.values(), key=attrgetter("form")):
        described = describe_form(form, artifact.spelling)
        gathered.setdefault(str(described), (described, []))[1].extend(run)
    forms = [
        {**described, "modules": len(own), "bits_per_weight": _bits_per_weight(artifact, own)}
        for described, own in gathered.values()
    ]
    return forms or [describe_form(artifact.forms[0], artifact.spelling)]


def _bits_per_weight(artifact: Artifact, packed: Collection[Packed]) -> float | None:
    """Return the bits per weight of modules, with scales of weights."""
    of_activations = artifact.spelling.TRAITS.companions
    elements = sum([each.shape[0] * each.shape[1] for each in packed])
    stored = [ref for ref in _stored_tensors(packed) if not ref.name.endswith(of_activations)]
    kinds = Counter(map(attrgetter("dtype", "shape"), stored))  # few, of many tensors
    nbytes = sum(count * nbytes_of(*kind) for kind, count in kinds.items())
    return round(8 * nbytes / elements, 4) if elements else None


def _stored_tensors(packed: Collection[Packed]) -> list[TensorRef]:
    """Return the tensors of modules; modules of one stack share them."""
    by_stem = {each.stem: each.refs for each in packed}
    return [ref for refs in by_stem.values() for ref in refs]


def _describe_cache(artifact: Artifact) -> dict[str, object] | None:
    """Describe the cache that an artifact's record asks for, if any."""
    dtype = artifact.forms[0].kv_cache
    if dtype is None:
        return None
    names = artifact.cache_scales
    values = [
        value for name in names if (value := stored_float(artifact.source, artifact.tensors[name]))
    ]
    return {
        "dtype": dtype,
        "scales": len(names),
        "smallest": min(values, default=None),
        "largest": max(values, default=None),
    }
