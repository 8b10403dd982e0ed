"""Compare two artifacts of one source.

What is compared is every linear layer that either of them has quantized; one that an artifact keeps
as it is loses nothing there.  The better one is that with the lesser output error: SQNR is of the
weights as they are stored, which folds change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.errors import Finding, InputError
from fp4convert.progress import Phases
from fp4convert.quality.checks import is_healthy
from fp4convert.quality.source_compare import (
    Distance,
    Outputs,
    SourcePairs,
    mean_output_error,
    pair_with_source,
)
from fp4convert.storage.source import Source

# Codes of findings which say that a tensor may not be the source's.
DOUBTS = ("kept-differs", "kept-missing", "not-measurable", "source-differs")
A, B, EQUAL = "a", "b", "equal"


@dataclass(frozen=True, slots=True)
class _Side:
    """An artifact, measured.

    distances  of the linear layers that it has quantized, by module
    kept       all linear layers that it stores
    doubted    tensors of which DOUBTS were found
    """

    artifact: Artifact
    distances: Mapping[str, Distance]
    kept: Mapping[str, Linear]
    findings: tuple[Finding, ...]
    doubted: frozenset[str | None]

    def describe(self, module: str, elements: int) -> dict[str, Any] | None:
        """Describe how the artifact holds a linear layer, if it does.

        stored               what a person calls it: nvfp4, fp8, bf16
        bits_per_weight      with its scales, but for those of activations
        sqnr_db              None where nothing was lost, or nothing can be said
        nmse, output_error   0 where nothing was lost; None where nothing can be said
        """
        packed = self.artifact.modules.get(module) or self.artifact.others.get(module)
        sqnr_db = nmse = output_error = None
        if packed is None or module not in self.distances:
            linear = self.kept.get(module)
            if linear is None:
                return None
            stored, nbits = linear.coding.word, 8.0 * linear.nbytes
            if not self.doubted & {linear.home.name, module}:
                nmse = output_error = 0.0
        else:
            # Of a stack of matrices, the share that is this module's.
            stored = packed.form.format.name
            share = math.prod(packed.shape) / math.prod(packed.stored_shape)
            of_activations = self.artifact.spelling.TRAITS.companions
            refs = [ref for ref in packed.refs if not ref.name.endswith(of_activations)]
            nbits = 8 * share * sum(ref.nbytes for ref in refs)
            distance = self.distances[module]
            if math.isfinite(distance.sums.noise):
                sqnr_db = distance.sums.sqnr_db
                nmse = 0.0 if distance.sums.noise == 0 else distance.sums.nmse
                output_error = distance.output_error
        return {
            "stored": stored,
            "bits_per_weight": nbits / elements,
            "sqnr_db": sqnr_db,
            "nmse": nmse,
            "output_error": output_error,
        }


def compare(
    artifacts: tuple[Artifact, Artifact],
    source: Source,
    outputs: Outputs | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Make the document of `compare --json`.

    outputs  whose inputs output errors are for; Gaussians where it is None
    phases   learns how far the reading is
    Raises   InputError where an artifact is not sound, nothing is quantized in either, or a
             calibration is of another source
    """
    outputs = outputs or Outputs()
    for artifact in artifacts:
        artifact.refuse_unsound()
    paired = [pair_with_source(artifact, source, outputs) for artifact in artifacts]
    compared = {
        pair.theirs.module: pair.theirs
        for one in paired
        for pair in one.pairs
        if pair.ours.coding.is_packed
    }
    if not compared:
        detail = f"neither {artifacts[0].source.name} nor {artifacts[1].source.name}"
        detail += f" has quantized a linear layer of {source.name}"
        next_step = "Give the weights that they were made from: --source SOURCE."
        raise InputError("nothing-in-common", detail, next_step)
    phases = phases or Phases()
    a, b = (
        _measure_side(one, phases, f"measure {name}")
        for one, name in zip(paired, (A, B), strict=True)
    )
    rows = [_describe_row(linear, a, b) for linear in compared.values()]
    return {
        "source": source.name,
        **describe_inputs(outputs.calibration),
        A: _describe_side(a, A, rows),
        B: _describe_side(b, B, rows),
        "tensors": rows,
        "totals": _describe_totals(rows),
        "passed": is_healthy(a.findings) and is_healthy(b.findings),
    }


def _measure_side(pairs: SourcePairs, phases: Phases, verb: str) -> _Side:
    """Measure one artifact, and find what may not be the source's."""
    found, findings = pairs.compare(phases, verb)
    findings += [doubt for name, distance in found.items() if (doubt := distance.check(name))]
    modules = {pair.theirs.name: pair.ours.module for pair in pairs.pairs}
    distances = {modules[name]: distance for name, distance in found.items()}
    doubted = frozenset(finding.tensor for finding in findings if finding.code in DOUBTS)
    kept = linears_stored(pairs.artifact)
    return _Side(pairs.artifact, distances, kept, tuple(findings), doubted)


def _describe_row(linear: Linear, side_a: _Side, side_b: _Side) -> dict[str, Any]:
    """Describe one linear layer beside itself.

    difference_db is of B over A; None where one of them lost nothing, or is not there.  better is
    None, too, where one of them is not the source's.
    """
    elements = math.prod(linear.shape)
    a, b = side_a.describe(linear.module, elements), side_b.describe(linear.module, elements)
    difference_db = better = None
    if a and b:
        if a["sqnr_db"] is not None and b["sqnr_db"] is not None:
            difference_db = b["sqnr_db"] - a["sqnr_db"]
        names = {linear.name, linear.module}
        is_doubted = side_a.doubted & names or side_b.doubted & names
        if not is_doubted and a["output_error"] is not None and b["output_error"] is not None:
            better = A if a["output_error"] < b["output_error"] else B
            better = EQUAL if a["output_error"] == b["output_error"] else better
    return {
        "name": linear.name,
        "weights": elements,
        A: a,
        B: b,
        "quantized_by": [
            name for name, side in ((A, side_a), (B, side_b)) if linear.module in side.distances
        ],
        "difference_db": difference_db,
        "better": better,
    }


def _describe_side(side: _Side, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe an artifact and what it loses.

    SQNR is over what both have quantized, all else over what is compared.
    """
    artifact = side.artifact
    own = [(row["weights"], row[name]) for row in rows if row[name]]
    both = [
        (row[name]["sqnr_db"], row["name"])
        for row in rows
        if row["quantized_by"] == [A, B] and row[name]["sqnr_db"] is not None
    ]
    formats = dict.fromkeys(packed.form.format.name for packed in artifact.packed.values())
    least, worst = min(both, default=(None, None))
    weights = sum(elements for elements, _ in own)
    nbits = math.fsum(elements * held["bits_per_weight"] for elements, held in own)
    return {
        "artifact": artifact.source.name,
        "formats": list(formats),
        "dialect": artifact.dialect,
        "scale_rule": artifact.record.get("scale_rule"),
        "scale_layout": artifact.scale_layout,
        "quantized": len(side.distances),
        "bits_per_weight": nbits / weights if weights else None,
        "sqnr_db_mean": _mean([sqnr_db for sqnr_db, _ in both]),
        "sqnr_db_min": least,
        "worst": worst,
        "output_error": mean_output_error(
            (elements, held["output_error"]) for elements, held in own
        ),
        "findings": [asdict(finding) for finding in side.findings],
    }


def _describe_totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the layers by who quantized them, and who is better."""
    quantized_by = [row["quantized_by"] for row in rows]
    better = [row["better"] for row in rows]
    differences = [row["difference_db"] for row in rows if row["difference_db"] is not None]
    return {
        "compared": len(rows),
        "quantized_by_both": quantized_by.count([A, B]),
        "quantized_by_a_alone": quantized_by.count([A]),
        "quantized_by_b_alone": quantized_by.count([B]),
        "better_a": better.count(A),
        "better_b": better.count(B),
        "equal": better.count(EQUAL),
        "difference_db_mean": _mean(differences),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
