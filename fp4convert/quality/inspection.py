"""Make the document of inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Packed
from fp4convert.checkpoint.error_report import read_recorded
from fp4convert.checkpoint.module_names import join_names
from fp4convert.checkpoint.record import MIXED, describe_form
from fp4convert.errors import Finding
from fp4convert.quality.checks import (
    choose_modules,
    describe_cache,
    is_healthy,
    judge,
    scale_nbytes,
)
from fp4convert.storage.safetensors import TensorRef, nbytes_of
from fp4convert.storage.source import Source


def inspect(artifact: Artifact, source: Source | None, is_full: bool) -> dict[str, Any]:
    """The document of `inspect --json`.

    source   the original weights, which decide what statistics cannot
    is_full  read every block scale, however many
    """
    chosen = choose_modules(artifact, is_full)
    judged = judge(artifact, source, chosen, chosen)
    nbytes = scale_nbytes(artifact)
    read, whole = sum(nbytes[module] for module in chosen), sum(nbytes.values())
    return _describe(artifact, judged.detected, read / whole if whole else 0.0, judged.findings)


def _describe(
    artifact: Artifact, detected: str | None, share: float, findings: tuple[Finding, ...]
) -> dict[str, object]:
    """scale_layout: "declared" is what our record says (None where there is none), "detected" None where nothing decides.

    Of a mixed artifact, "forms" says more; what its forms do not agree on is None.
    """
    packed = list(artifact.packed.values())
    forms = _describe_forms(artifact)

    def common(key: str) -> object:
        values = [form.get(key) for form in forms]
        return values[0] if all(value == values[0] for value in values) else None

    return {
        "format": common("format") or MIXED,
        "dialect": artifact.dialect,
        **{key: common(key) for key in ("block_size", "element_dtype", "scale_dtype")},
        "scale_layout": {"declared": artifact.declared_layout, "detected": detected},
        **{key: common(key) for key in ("global_scale", "nibble_order", "activations")},
        **({"kv_cache": cache} if (cache := describe_cache(artifact)) else {}),
        **({"forms": forms} if len(forms) > 1 else {}),
        "tensors": {
            "quantized": len(packed),
            "other": len(artifact.tensors) - len(_stored(packed)),
        },
        "patterns": _describe_patterns(artifact),
        "bits_per_weight": forms[0].get("bits_per_weight")
        if len(forms) == 1
        else _bits(artifact, packed),
        "share_read": round(share, 4),
        **({"fidelity": recorded.summary} if (recorded := read_recorded(artifact)[0]) else {}),
        "findings": [asdict(finding) for finding in findings],
        "healthy": is_healthy(findings),
    }


def _describe_patterns(artifact: Artifact) -> list[dict[str, object]]:
    """The quantized modules, layers and siblings folded: how many a pattern stands for, and their form in a word."""
    forms = [(name, each.form.word) for name, each in artifact.packed.items()]
    return [
        {"pattern": pattern, "modules": len(held), "form": forms[held[0]][1]}
        for pattern, held in join_names(forms)
    ]


def _describe_forms(artifact: Artifact) -> list[dict[str, object]]:
    """Every form that modules have, in the order of the records, with their number; the declared one where there are none."""
    gathered: dict[str, tuple[dict[str, object], list[Packed]]] = {}
    for form, run in groupby(artifact.packed.values(), key=attrgetter("form")):
        described = describe_form(form, artifact.spelling)
        gathered.setdefault(str(described), (described, []))[1].extend(run)
    forms = [
        {**described, "modules": len(packed), "bits_per_weight": _bits(artifact, packed)}
        for described, packed in gathered.values()
    ]
    return forms or [describe_form(artifact.forms[0], artifact.spelling)]


def _bits(artifact: Artifact, packed: Collection[Packed]) -> float | None:
    """Bits that a weight takes in those modules with its scales, but for those of activations."""
    of_activations = artifact.spelling.TRAITS.companions
    elements = sum([rows * columns for rows, columns in map(attrgetter("shape"), packed)])
    kinds = Counter(
        map(
            attrgetter("dtype", "shape"),
            (ref for ref in _stored(packed) if not ref.name.endswith(of_activations)),
        )
    )
    nbytes = sum(count * nbytes_of(*kind) for kind, count in kinds.items())
    return round(8 * nbytes / elements, 4) if elements else None


def _stored(packed: Collection[Packed]) -> list[TensorRef]:
    """The tensors that those modules are decoded from, which modules of one stack share."""
    return [*chain.from_iterable({each.stem: each.refs for each in packed}.values())]
