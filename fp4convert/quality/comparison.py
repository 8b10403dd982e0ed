"""Compare two artifacts of one source.

What is compared is every linear layer that either of them has quantized; one that an artifact keeps as it is loses nothing there.
The better one is that with the lesser output error: SQNR is of the weights as they are stored, which folds change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fp4convert.calibration.input_power import describe_inputs
from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.errors import Finding, InputError
from fp4convert.quality.checks import is_healthy
from fp4convert.quality.source_compare import Distance, Outputs, mean_output_error, stand_beside
from fp4convert.storage.source import Source

DOUBTS = (
    "kept-differs",
    "kept-missing",
    "not-measurable",
    "source-differs",
)  # that it is the source's
A, B, EQUAL = "a", "b", "equal"


@dataclass(frozen=True, slots=True)
class Held:
    """How an artifact holds one linear layer.

    stored     what a person calls it: nvfp4, fp8, bf16
    nbits      that it takes with its scales, but for those of activations
    is_packed  False where it stayed
    sqnr_db    None where nothing was lost, or nothing can be said
    nmse, output_error  0 where nothing was lost; None where nothing can be said
    """

    stored: str
    nbits: float
    is_packed: bool
    sqnr_db: float | None = None
    nmse: float | None = None
    output_error: float | None = None

    def as_json(self, elements: int) -> dict[str, object]:
        numbers = {"sqnr_db": self.sqnr_db, "nmse": self.nmse, "output_error": self.output_error}
        return {"stored": self.stored, "bits_per_weight": self.nbits / elements, **numbers}


@dataclass(frozen=True, slots=True)
class _Side:
    """An artifact, measured.

    distances  of the linear layers that it has quantized, by module
    kept       all others that it stores
    doubted    tensors of which DOUBTS were found
    """

    artifact: Artifact
    distances: Mapping[str, Distance]
    kept: Mapping[str, Linear]
    findings: tuple[Finding, ...]
    doubted: frozenset[str | None]

    def held(self, module: str) -> Held | None:
        """How it holds that linear layer; None where it does not."""
        packed = self.artifact.modules.get(module) or self.artifact.others.get(module)
        if packed is None or module not in self.distances:
            return self._kept(module)
        companions, share = (
            self.artifact.spelling.TRAITS.companions,
            math.prod(packed.shape) / math.prod(packed.stored_shape),
        )
        nbits = (
            8 * share * sum(ref.nbytes for ref in packed.refs if not ref.name.endswith(companions))
        )
        found, word = self.distances[module], packed.form.format.name
        sums = found.sums
        if not math.isfinite(sums.noise):
            return Held(word, nbits, True)
        nmse = 0.0 if sums.noise == 0 else sums.nmse
        return Held(
            word, nbits, True, sums.sqnr_db, nmse, found.answers.error if found.answers else None
        )

    def _kept(self, module: str) -> Held | None:
        linear = self.kept.get(module)
        if linear is None:
            return None
        lost = None if self.doubted & {linear.home.name, module} else 0.0
        return Held(linear.coding.word, 8 * linear.nbytes, False, None, lost, lost)


def compare(
    artifacts: tuple[Artifact, Artifact], source: Source, outputs: Outputs | None = None
) -> dict[str, Any]:
    """The document of `compare --json`.

    outputs  whose inputs output errors are for; Gaussians where it is None
    Raises   InputError where an artifact is not sound, nothing is quantized in either, or a calibration is of another source
    """
    outputs = outputs or Outputs()
    for artifact in artifacts:
        artifact.refuse_unsound()
    besides = [stand_beside(artifact, source, outputs) for artifact in artifacts]
    names = {
        pair.theirs.module: pair.theirs
        for beside in besides
        for pair in beside.pairs
        if pair.ours.coding.is_packed
    }
    if not names:
        detail = f"neither {artifacts[0].source.name} nor {artifacts[1].source.name} has quantized a linear layer of {source.name}"
        raise InputError(
            "nothing-in-common",
            detail,
            "Give the weights that they were made from: --source SOURCE.",
        )
    sides = []
    for beside in besides:
        found, findings = beside.compare()
        findings += [doubt for name, distance in found.items() if (doubt := distance.check(name))]
        modules = {pair.theirs.name: pair.ours.module for pair in beside.pairs}
        distances = {modules[name]: distance for name, distance in found.items()}
        doubted = frozenset(finding.tensor for finding in findings if finding.code in DOUBTS)
        sides.append(
            _Side(
                beside.artifact,
                distances,
                linears_stored(beside.artifact),
                tuple(findings),
                doubted,
            )
        )
    rows = [_row(linear, sides) for linear in names.values()]
    return {
        "source": source.name,
        **describe_inputs(outputs.calibration),
        **{name: _describe(side, name, rows) for name, side in zip((A, B), sides, strict=True)},
        "tensors": rows,
        "totals": _count(rows),
        "passed": all(is_healthy(side.findings) for side in sides),
    }


def _row(linear: Linear, sides: Iterable[_Side]) -> dict[str, Any]:
    """difference_db is of B over A; None where one of them lost nothing, or is not there.

    better is None, too, where one of them is not the source's
    """
    elements, (a, b) = math.prod(linear.shape), (side.held(linear.module) for side in sides)
    is_doubted = any(side.doubted & {linear.name, linear.module} for side in sides)
    return {
        "name": linear.name,
        "weights": elements,
        A: a.as_json(elements) if a else None,
        B: b.as_json(elements) if b else None,
        "quantized_by": [name for name, held in ((A, a), (B, b)) if held and held.is_packed],
        "difference_db": b.sqnr_db - a.sqnr_db
        if a and b and a.sqnr_db is not None and b.sqnr_db is not None
        else None,
        "better": None if is_doubted else _better(a, b),
    }


def _better(a: Held | None, b: Held | None) -> str | None:
    if a is None or b is None or a.output_error is None or b.output_error is None:
        return None
    return (
        EQUAL if a.output_error == b.output_error else A if a.output_error < b.output_error else B
    )


def _describe(side: _Side, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What an artifact is, and what it loses: SQNR over what both have quantized, all else over what is compared."""
    artifact = side.artifact
    own = [(row["weights"], row[name]) for row in rows if row[name]]
    both = [
        (row[name]["sqnr_db"], row["name"])
        for row in rows
        if _is_by_both(row) and row[name]["sqnr_db"] is not None
    ]
    formats = dict.fromkeys(packed.form.format.name for packed in artifact.packed.values())
    least = min(both, default=(None, None))
    worst = {"sqnr_db_min": least[0], "worst": least[1]}
    return {
        "artifact": artifact.source.name,
        "formats": list(formats),
        "dialect": artifact.dialect,
        "scale_rule": artifact.record.get("scale_rule"),
        "scale_layout": artifact.scale_layout,
        "quantized": len(side.distances),
        "bits_per_weight": _mean((weights, held["bits_per_weight"]) for weights, held in own),
        "sqnr_db_mean": _mean((1, sqnr_db) for sqnr_db, _ in both),
        **worst,
        "output_error": mean_output_error((weights, held["output_error"]) for weights, held in own),
        "findings": [asdict(finding) for finding in side.findings],
    }


def _mean(weighted: Iterable[tuple[int, float]]) -> float | None:
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    return math.fsum(weight * value for weight, value in pairs) / total if total else None


def _is_by_both(row: dict[str, Any]) -> bool:
    return bool(row["quantized_by"] == [A, B])


def _count(rows: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [row["difference_db"] for row in rows if row["difference_db"] is not None]
    return {
        "compared": len(rows),
        "quantized_by_both": sum(_is_by_both(row) for row in rows),
        **{
            f"quantized_by_{name}_alone": sum(row["quantized_by"] == [name] for row in rows)
            for name in (A, B)
        },
        **{f"better_{name}": sum(row["better"] == name for row in rows) for name in (A, B)},
        "equal": sum(row["better"] == EQUAL for row in rows),
        "difference_db_mean": _mean((1, difference) for difference in differences),
    }
