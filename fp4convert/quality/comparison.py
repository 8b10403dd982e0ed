"""Compare artifacts of one source with each other.

Every linear layer is compared that one artifact has quantized; an artifact that keeps it loses
nothing there.  The order by KL on a text is the verdict.  Without a text the best has the least
output error, unless inputs are random or a method placed its errors: then nobody is best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.checkpoint.soundness import refuse_unsound
from fp4convert.errors import Finding, InputError, named
from fp4convert.numerics.formats import IMPORTANCE, RTN
from fp4convert.progress import Phases
from fp4convert.quality.checks import is_healthy
from fp4convert.quality.evaluation import SURE_ERRORS, find_usual_sqnr, standard_error
from fp4convert.quality.source_compare import (
    Distance,
    SourcePairs,
    compare_all,
    mean_output_error,
    pair_with_source,
)
from fp4convert.recipes.options import one_of
from fp4convert.storage.source import Source

# Codes of findings which say that a tensor may not be the source's.
DOUBTS = ("kept-differs", "kept-missing", "not-measurable", "source-differs")
ALIKE = 1e-6  # of a figure: what is closer differs by the rounding of float32 scales alone
LETTERS = ascii_lowercase  # which name the artifacts, in their order
FAILED = "nothing is ranked: an artifact has failed, as the findings say"


class _Side(NamedTuple):
    """The measurements of one artifact.

    distances  of its quantized linear layers, by module
    kept       all linear layers that it stores
    doubted    tensors with a finding in DOUBTS
    """

    artifact: Artifact
    distances: Mapping[str, Distance]
    kept: Mapping[str, Linear]
    findings: tuple[Finding, ...]
    doubted: frozenset[str | None]

    def describe(self, module: str, elements: int) -> dict[str, Any] | None:
        """Describe the artifact's copy of a linear layer, if it has one.

        stored               nvfp4, fp8, bf16
        bits_per_weight      with scales of weights, without scales of activations
        sqnr_db              None if nothing was lost, or the loss is unknown
        nmse, output_error   0 if nothing was lost; None if the loss is unknown
        """
        packed, linear = self.artifact.packed.get(module), self.kept.get(module)
        if packed is not None:
            # Of a stack of matrices, the share that is this module's.
            stored = packed.form.format.name
            share = math.prod(packed.shape) / math.prod(packed.stored_shape)
            of_activations = self.artifact.spelling.TRAITS.companions
            refs = [ref for ref in packed.refs if not ref.name.endswith(of_activations)]
            nbits = 8 * share * sum(ref.nbytes for ref in refs)
        elif linear is not None:
            stored, nbits = linear.coding.word, 8.0 * linear.nbytes
        else:
            return None
        sqnr_db = nmse = output_error = None
        distance = self.distances.get(module)
        if distance is None:
            names = {module} if linear is None else {module, linear.home.name}
            if not self.doubted & names:
                nmse = output_error = 0.0
        elif math.isfinite(distance.sums.noise):
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


def pair_all(
    artifacts: Sequence[Artifact], source: Source, calibration: Calibration | None
) -> tuple[list[SourcePairs], list[Linear]]:
    """Pair artifacts with their source, without reading a weight.

    artifacts    at most one for each of LETTERS
    calibration  inputs of layers; None for Gaussians of unit variance
    Returns      the pairs, and the source's layers that an artifact has quantized
    Raises       InputError for an artifact that is not sound, artifacts without a quantized layer,
                 or a calibration of another source
    """
    paired = []
    for artifact in artifacts:
        with named(artifact.source.name):
            refuse_unsound(artifact)
    for artifact in artifacts:
        with named(artifact.source.name):
            paired.append(pair_with_source(artifact, source, calibration, True))
    compared = {
        pair.theirs.module: pair.theirs
        for one in paired
        for pair in one.pairs
        if pair.ours.coding.is_packed
    }
    if not compared:
        names = one_of(artifact.source.name for artifact in artifacts)
        detail = f"none of {names} has quantized a linear layer of {source.name}"
        raise InputError("nothing-in-common", detail)
    return paired, list(compared.values())


def compare(
    paired: Sequence[SourcePairs],
    compared: Sequence[Linear],
    phases: Phases,
    predictions: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Make the document of `compare --json`.

    paired, compared  from pair_all
    phases            receives the progress
    predictions       figures of each artifact on a text
    Returns           `passed` is False if a finding is an error, else None: there is no gate
    """
    measured = compare_all(paired, phases, "measure")
    sides = {
        letter: _find_side(one, *found)
        for letter, one, found in zip(LETTERS, paired, measured, strict=False)
    }
    has_failed = not all(is_healthy(side.findings) for side in sides.values())
    why = _why_unranked(sides, paired[0].calibration)
    rows = [_describe_row(linear, sides, not why) for linear in compared]
    artifacts = {letter: _describe_side(side, letter, rows) for letter, side in sides.items()}
    for letter, figures in zip(artifacts, predictions, strict=False):
        artifacts[letter]["predictions"] = figures
    names = Counter(side["artifact"] for side in artifacts.values())
    for letter, side in artifacts.items():
        if names[side["artifact"]] > 1:
            side["artifact"] += f" ({letter})"
    totals = _describe_totals(rows, list(sides))
    verdict = _judge(artifacts, totals, why)
    if has_failed:
        verdict |= {"by": None, "words": FAILED}
    return {
        "verdict": verdict,
        "source": _full_name(paired[0].source),
        **describe_inputs(paired[0].calibration),
        "artifacts": artifacts,
        "tensors": rows,
        "totals": totals,
        "passed": False if has_failed else None,
    }


def _why_unranked(sides: Mapping[str, _Side], calibration: Calibration | None) -> str:
    """Return why errors of layers rank nobody; "" if they do."""
    if calibration is None:
        return "inputs are random"
    for letter, side in sides.items():
        artifact, record = side.artifact, side.artifact.record
        method = record.get("method", RTN) if not artifact.foreign else artifact.dialect
        if method == RTN and record.get("scale_rule") == IMPORTANCE:
            method = f"rule {IMPORTANCE}"
        if method != RTN:
            return f"{letter} is of {method}, which places errors where inputs hide them"
    return ""


def _judge(artifacts: Mapping[str, Any], totals: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Return the verdict: what it is by, its words, and the ranking by KL."""
    if all("predictions" in side for side in artifacts.values()):
        ranking = rank(artifacts)
        words = _name(ranking[0])
        for one in ranking[1:]:
            words += f" {'=' if one['is_alike'] else '<'} {_name(one)}"
        unbeaten = ", ".join(one["letter"] for one in ranking if one["is_unbeaten"])
        words = (
            f"closest to the source by KL: {words}; both smaller and closer than {unbeaten}: none"
        )
        return {"by": "kl", "words": words, "ranking": ranking}
    if why or not totals["judged"]:
        why = why or "too few errors are known"
        words = f"cannot be ranked without --text FILE: {why}"
        return {"by": None, "words": words, "ranking": []}
    best = ", ".join(f"{letter} on {side['best']}" for letter, side in artifacts.items())
    words = f"best by output error: {best}; several alike on {totals['shared']}"
    return {"by": "output_error", "words": words, "ranking": []}


def _name(ranked: Mapping[str, Any]) -> str:
    bits = ranked["bits_per_weight"]
    return f"{ranked['letter']} ({ranked['kl']:.4g} nats{f', {bits:.3f} bits' if bits else ''})"


def rank(artifacts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rank artifacts by their mean KL on one text, the least first.

    Returns  letter, kl, se, bits_per_weight; difference and difference_se: of the means of windows,
             to the one before, paired; is_alike: that is within two standard errors of 0;
             is_unbeaten: none is surely closer without being larger
    """
    kl = {letter: side["predictions"]["kl"] for letter, side in artifacts.items()}
    bits = {letter: side["bits_per_weight"] or math.inf for letter, side in artifacts.items()}
    order = sorted(kl, key=lambda letter: kl[letter]["mean"])

    def difference(one: str, other: str) -> tuple[float, float | None]:
        windows = np.array(kl[one]["windows"]) - np.array(kl[other]["windows"])
        return kl[one]["mean"] - kl[other]["mean"], standard_error(windows)

    def is_closer(one: str, other: str) -> bool:
        by, error = difference(other, one)
        same = is_alike(kl[one]["mean"], kl[other]["mean"])
        return by > SURE_ERRORS * (error or 0.0) and not same

    ranking: list[dict[str, Any]] = []
    for at, letter in enumerate(order):
        by, error = difference(letter, order[at - 1]) if at else (None, None)
        others = [one for one in order if bits[one] <= bits[letter] * (1 + ALIKE)]
        ranking.append(
            {
                "letter": letter,
                "kl": kl[letter]["mean"],
                "se": kl[letter]["se"],
                "bits_per_weight": artifacts[letter]["bits_per_weight"],
                "difference": by,
                "difference_se": error,
                "is_alike": at > 0 and not is_closer(order[at - 1], letter),
                "is_unbeaten": not any(is_closer(one, letter) for one in others),
            }
        )
    return ranking


def _find_side(
    pairs: SourcePairs, found: Mapping[str, Distance], findings: Sequence[Finding]
) -> _Side:
    """Gather what was measured; find tensors that may not be the source's.

    Other tools divide norms by factors of weights, round them and leave some out: of foreign
    weights this is a warning.
    """
    findings = [
        *findings,
        *(doubt for name, distance in found.items() if (doubt := distance.check(name))),
    ]
    doubted = frozenset(finding.tensor for finding in findings if finding.code in DOUBTS)
    if pairs.artifact.foreign:
        findings = [replace(finding, level="warning") for finding in findings]
    modules = {pair.theirs.name: pair.ours.module for pair in pairs.pairs}
    distances = {modules[name]: distance for name, distance in found.items()}
    kept = linears_stored(pairs.artifact)
    return _Side(pairs.artifact, distances, kept, tuple(findings), doubted)


def _describe_row(linear: Linear, sides: Mapping[str, _Side], is_ranked: bool) -> dict[str, Any]:
    """Describe one linear layer in all artifacts.

    held   by letter; None for an artifact without it.  difference_db is its SQNR over that of the
           first artifact, None if one of them lost nothing or is unknown
    best   letters with the least output error; None if fewer than two are known, or none is ranked
    """
    elements = math.prod(linear.shape)
    held = {letter: side.describe(linear.module, elements) for letter, side in sides.items()}
    first = (held[LETTERS[0]] or {}).get("sqnr_db")
    errors = {}
    for letter, one in held.items():
        if one is None:
            continue
        is_known = first is not None and one["sqnr_db"] is not None
        one["difference_db"] = one["sqnr_db"] - first if is_known else None
        is_doubted = sides[letter].doubted & {linear.name, linear.module}
        if not is_doubted and one["output_error"] is not None:
            errors[letter] = one["output_error"]
    best = None
    if is_ranked and len(errors) > 1:
        least = min(errors.values())
        best = [letter for letter, error in errors.items() if is_alike(error, least)]
    return {
        "name": linear.name,
        "weights": elements,
        "held": held,
        "quantized_by": [
            letter for letter, side in sides.items() if linear.module in side.distances
        ],
        "best": best,
    }


def _describe_side(side: _Side, letter: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe an artifact and its losses.

    SQNR is over the layers that all have quantized, other figures over all that are compared.
    """
    artifact = side.artifact
    own = [(row, row["held"][letter]) for row in rows if row["held"][letter]]
    shared = [
        (held["sqnr_db"], row["name"])
        for row, held in own
        if len(row["quantized_by"]) == len(row["held"]) and held["sqnr_db"] is not None
    ]
    differences = [held["difference_db"] for _, held in own if held["difference_db"] is not None]
    formats = [packed.form.format.name for packed in artifact.packed.values()]
    rule = artifact.record.get("scale_rule")
    formats += [held["stored"] for row, held in own if letter in row["quantized_by"]]
    least, worst = min(shared, default=(None, None))
    return {
        "artifact": _full_name(artifact.source),
        "formats": list(dict.fromkeys(formats)),
        "dialect": artifact.dialect,
        "scale_rule": rule if isinstance(rule, str) else None,
        "scale_layout": artifact.scale_layout if artifact.groups else None,
        "bytes": artifact.source.checkpoint.nbytes,
        "quantized": len(side.distances),
        "bits_per_weight": _mean_bits(own),
        "bits_quantized": _mean_bits([one for one in own if letter in one[0]["quantized_by"]]),
        "sqnr_db_mean": _mean([sqnr_db for sqnr_db, _ in shared]),
        "sqnr_db_min": least,
        "usual": usual._asdict() if (usual := find_usual_sqnr(artifact)) else None,
        "worst": worst,
        "difference_db_mean": _mean(differences),
        "output_error": mean_output_error(
            (row["weights"], held["output_error"]) for row, held in own
        ),
        "best": sum(row["best"] == [letter] for row in rows),
        "findings": [asdict(finding) for finding in side.findings],
    }


def _mean_bits(held: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float | None:
    """Return the bits of a weight, over all weights of some layers."""
    weights = sum(row["weights"] for row, _ in held)
    nbits = math.fsum(row["weights"] * one["bits_per_weight"] for row, one in held)
    return nbits / weights if weights else None


def _describe_totals(rows: list[dict[str, Any]], letters: list[str]) -> dict[str, Any]:
    """Count layers by the artifacts that quantized them, and by the best one.

    judged  layers with a known best; shared  layers with several best
    """
    quantized_by = [row["quantized_by"] for row in rows]
    return {
        "compared": len(rows),
        "quantized_by_all": quantized_by.count(letters),
        "quantized_by_one": {letter: quantized_by.count([letter]) for letter in letters},
        "judged": sum(row["best"] is not None for row in rows),
        "shared": sum(len(row["best"] or ()) > 1 for row in rows),
    }


def _full_name(source: Source) -> str:
    """Name a source as nobody else's: a repository with its commit."""
    checkpoint = source.checkpoint
    if checkpoint.repo is None:
        return source.name
    return f"{checkpoint.repo}@{checkpoint.revision}" if checkpoint.revision else checkpoint.repo


def is_alike(a: float, b: float) -> bool:
    """Tell whether neither of two figures is better."""
    return math.isclose(a, b, rel_tol=ALIKE)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
