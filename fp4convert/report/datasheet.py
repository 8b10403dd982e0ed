"""Collect everything that a report shows, as one JSON document.

  quantize   losses recorded while it rounded; the source for histograms of the worst tensors
  verify     losses measured with a source, else recorded ones; findings

Text from a checkpoint is made visible here (text.escape) and stays text: html.py puts it into a
page.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.error_report import read_recorded, shares
from fp4convert.checkpoint.linears import linears_stored
from fp4convert.checkpoint.module_names import (
    join_names,
    join_words,
    reading_rank,
    split_leaf,
    split_numbers,
)
from fp4convert.numerics.codec import as_doubles, decode_e2m1
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.matrices import Weights, row_panels
from fp4convert.progress import Phases, size_text
from fp4convert.quality.checks import Judged, choose_modules, fault_word, judge
from fp4convert.quality.evaluation import NO_GATE, UsualSqnr, find_usual_sqnr
from fp4convert.quality.fold_recovery import fold_originals
from fp4convert.quality.inspection import describe, describe_judged
from fp4convert.quality.scale_checks import are_equal, find_shared_scales
from fp4convert.quality.verification import TensorError, Verified
from fp4convert.report.places import find_places, group_names, reading_order
from fp4convert.report.text import (
    MOST_ALIKE,
    Document,
    artifact_rows,
    badness,
    count_levels,
    evaluation_rows,
    explain_findings,
    fold_findings,
    make_visible,
    most_lines,
)
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source
from fp4convert.version import __version__

WORST = 6  # tensors with histograms
# Bytes for rows of tensors in a page of 200 kB, and of a row's figures beside its name.
ROOM, ROW = 135_000, 90
# Of codes, without their sign.
MAGNITUDES = [f"{value:g}" for value in decode_e2m1(np.arange(8, dtype=np.uint8))]
SHARED = " Tensors share rows here, experts of a layer first; verify --json has each."
MERGED: dict[str, Callable[[list[float]], float]] = {  # figures of rows of several tensors
    "sqnr_db": fmean,
    "mse": fmean,
    "max_abs": max,
    "cosine": min,
    "saturated": fmean,
    "zero": fmean,
}
MOST_STACKS = 8  # of layers that are drawn apart
MOST_KEPT = 12  # patterns of kept matrices
MOST_DIFFERING = 20  # scale groups that are shown with their scales
DIGITS = 5  # of a number
MEASURED, RECORDED = "measured", "recorded"
COUNTED = "; verify counted the codes again."
FORM_KEYS = ("format", "block_size", "element_dtype", "scale_dtype", "global_scale")
BINS = 81  # of a histogram; odd: zero has one of its own
MOST_PANELS, PANEL = 16, 1 << 18  # of a tensor, evenly spread; elements of each
# Rows for those who read the bytes.
STORED = ("global scale", "scale layout", "nibble order", "bits per weight", "share read")


Row = tuple[str, str]  # a word and its text


def make_datasheet(
    artifact: Artifact,
    source: Source | None = None,
    verified: Verified | None = None,
    judged: Judged | None = None,
    evaluated: Document | None = None,
) -> Document:
    """Return the document of a report on an artifact.

    source     the original weights, if at hand
    verified   the result of verify; None in other commands
    judged     the judgement of verify; None reads records and scales here
    evaluated  the document of `evaluate --json`; None in other commands
    Returns    the keys that page/report.js reads
    Raises     errors of reading the artifact and the source
    """
    how, errors = _find_errors(artifact, verified)
    if judged is None:
        chosen = choose_modules(artifact, is_full=False)
        judged = judge(artifact, None, chosen, chosen, Phases())
    if verified:
        described = describe(artifact, judged)
        is_good, words = verified.passed, verified.words
        findings = [asdict(finding) for finding in verified.findings]
        how_many, most = len(verified.tensors), most_lines(verified.verdict)
    else:
        described = describe_judged(artifact, judged)
        findings = described["findings"]
        errors_found = [one["code"] for one in findings if one["level"] == "error"]
        is_good = described["healthy"]
        words = "healthy" if is_good else fault_word(errors_found, "not healthy")
        how_many, most = 0, MOST_ALIKE
        if evaluated:
            is_good = is_good and evaluated["passed"]
            words = {None: NO_GATE, True: "passed", False: "failed"}[is_good]
            findings = [*findings, *evaluated["findings"]]
    usual, words = find_usual_sqnr(artifact), f"{words}{count_levels(findings)}"
    if loss := _loss(errors, usual, evaluated):
        words = f"{words}; {loss}" if is_good is False else f"{loss}; {words}"
    forms = described.get("forms", [described])
    worst = _find_worst(errors)
    shown = _tensors(artifact, errors, worst)
    document = {
        "title": artifact.source.name,
        "verdict": {"is_good": is_good, "words": words},
        "about": _origin(artifact),
        "tiles": _tiles(artifact, source, described, errors),
        **_facts(artifact, source, described),
        "forms": [{key: form.get(key) for key in FORM_KEYS} for form in forms],
        "evidence": {"how": how, "words": _evidence(artifact, verified, how) + _sharing(shown)},
        "usual": {"db": usual.db, "words": usual.words} if usual and how else None,
        **shown,
        "worst": _worst(artifact, source, errors, _row_of(worst, shown["tensors"])),
        "magnitudes": MAGNITUDES,
        "answers": _answers(evaluated) if evaluated else None,
        "groups": _groups(artifact, judged.scales),
        "findings": explain_findings(fold_findings(findings, how_many, most)),
        "producer": f"fp4convert {__version__}",
    }
    return {key: make_visible(value) for key, value in document.items()}


def _sharing(shown: Document) -> str:
    """Say that tensors share rows; "" if each has its own."""
    return SHARED if "count" in shown["tensors"] else ""


def _row_of(worst: Sequence[int], shown: Document) -> dict[int, int]:
    """Return row -> tensor of the worst; they are last if rows are shared."""
    last = len(shown["name"])
    rows = range(last - len(worst), last) if "count" in shown else worst
    return dict(zip(rows, worst, strict=True))


def _find_worst(errors: Sequence[TensorError]) -> list[int]:
    """Find the tensors that lost most, by place."""
    lossy = (at for at, error in enumerate(errors) if error.mse != 0)
    return sorted(lossy, key=lambda at: badness(errors[at].sqnr_db, errors[at].mse))[:WORST]


def _loss(
    errors: Sequence[TensorError], usual: UsualSqnr | None, evaluated: Document | None
) -> str:
    """Say how much was lost, beside what is usual; "" if it is unknown."""
    words = [f"KL {evaluated['kl']['mean']:.3g}: {evaluated['grade']}"] if evaluated else []
    if known := [error.sqnr_db for error in errors if error.sqnr_db is not None]:
        mean = math.fsum(known) / len(known)
        words.append(f"{mean:.2f} dB on average{f': {usual.grade(mean)}' if usual else ''}")
    return "; ".join(words)


def _answers(evaluated: Document) -> Document:
    """Describe how predictions differ: rows of words, and the cost of layers."""
    rows = evaluated["by_layer"]
    layers = [[row["layer"], f"{row['alone']:.4g}", f"{row['cumulated']:.4g}"] for row in rows]
    return {"rows": list(evaluation_rows(evaluated).items()), "layers": layers}


def _find_errors(
    artifact: Artifact, verified: Verified | None
) -> tuple[str | None, Sequence[TensorError]]:
    """Find the losses of tensors.

    Returns  MEASURED, RECORDED, or None for unknown losses; and the losses
    """
    if verified and verified.tensors:
        return MEASURED, verified.tensors
    recorded, _ = read_recorded(artifact)
    if recorded is None or not recorded.entries:
        return None, ()
    return RECORDED, [
        TensorError(e.name, e.sqnr_db, e.mse, e.max_abs, e.cosine, **shares(e.histogram))
        for e in recorded.entries
    ]


def _origin(artifact: Artifact) -> str:
    """Describe the origin of the weights in a line."""
    if not artifact.record:
        return "made by others: it holds no record of fp4convert"
    origin = artifact.record.get("source")
    if isinstance(origin, dict) and origin.get("repo"):
        revision = f" at {origin['revision']}" if origin.get("revision") else ""
        return f"made from {origin['repo']}{revision}"
    return "made from a folder of weights"


def _tiles(
    artifact: Artifact, source: Source | None, described: Document, errors: Sequence[TensorError]
) -> list[Row]:
    """List the most important numbers with their words."""
    bits, nbytes = described["bits_per_weight"], artifact.source.checkpoint.nbytes
    words = "of weights"
    if source and (before := source.checkpoint.nbytes):
        words = f"of {size_text(before)} ({100 * nbytes / before:.0f} %)"
    tiles = [
        ("-" if bits is None else f"{bits:.2f}", "bits per quantized weight"),
        (size_text(nbytes), words),
    ]
    if known := [error.sqnr_db for error in errors if error.sqnr_db is not None]:
        tiles.append((f"{min(known):.2f} dB", "SQNR, least"))
    return [*tiles, (f"{described['tensors']['quantized']:,}", "tensors quantized")]


def _facts(artifact: Artifact, source: Source | None, described: Document) -> Document:
    """Describe the artifact in `facts`, and how its bytes lie in `stored`."""
    checkpoint, record = artifact.source.checkpoint, artifact.record
    rows = artifact_rows(described)
    shards = len(checkpoint.shards)
    rows["weights"] = f"{size_text(checkpoint.nbytes)} in {shards} file{'s' * (shards > 1)}"
    if source:
        rows["source"] = f"{size_text(source.checkpoint.nbytes)}, {source.name}"
    for key in ("scale_rule", "method", "damping", "passes", "calibration"):
        if record.get(key) is not None:
            rows[key.replace("_", " ")] = str(record[key])
    # Matrices of floats stay; they are shown as patterns.
    packed = {ref.name for module in artifact.packed.values() for ref in module.refs}
    kept = [
        ref.name.removesuffix(WEIGHT)
        for ref in artifact.tensors.values()
        if len(ref.shape) > 1 and ref.dtype in FLOAT_TYPES and ref.name not in packed
    ]
    if kept:
        patterns = [pattern for pattern, _ in join_names((name, None) for name in kept)]
        more = f", and {len(patterns) - MOST_KEPT} more" if len(patterns) > MOST_KEPT else ""
        rows["kept"] = f"{', '.join(patterns[:MOST_KEPT])}{more}"
    producer = record.get("producer")
    if isinstance(producer, dict):
        rows["made by"] = f"{producer.get('name')} {producer.get('version')}"
    facts = [(word, text) for word, text in rows.items() if word not in STORED]
    return {"facts": facts, "stored": [(word, rows[word]) for word in STORED if word in rows]}


def _evidence(artifact: Artifact, verified: Verified | None, how: str | None) -> str:
    """Say in a sentence who measured the losses."""
    if how == MEASURED:
        values = "every value of every quantized tensor compared with the source's"
        return f"Measured by verify: {values}."
    if how == RECORDED:
        is_counted = verified and not artifact.source.is_streamed  # by record_checks.check_codes
        measured = "As quantize measured it while it rounded (quantization_report.json)"
        return f"{measured}{COUNTED if is_counted else '.'}"
    again = "To measure it: fp4convert verify ARTIFACT --source SOURCE --report FILE.html"
    return f"How much was lost is not known: nothing is recorded, and no source was given. {again}"


def _tensors(artifact: Artifact, errors: Sequence[TensorError], worst: Sequence[int]) -> Document:
    """Return tensors by columns, and the stacks of their layers.

    worst   whose figures are shown, so that each has a row of its own
    places  four numbers for a row: stack, layer and module in it, and expert or -1; of a row of
            `worst` beside one that it is in, four times -1
    """
    groups = group_names([error.name for error in errors], ROOM, ROW)
    is_merged = len(groups) < len(errors)
    places = find_places([error.name for error in errors])
    places = [
        places[group[0]] if len(group) == 1 else places[group[0]]._replace(expert=None)
        for _, group in groups
    ]
    # The largest stacks are drawn apart; tensors of other stacks share one, by their names.
    sizes = Counter(place.tower for place in places if place.tower)
    apart = [stack for stack, _ in sizes.most_common(MOST_STACKS)]
    layers: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    modules: dict[str, set[str]] = defaultdict(set)
    seats = []
    for (label, _), place in zip(groups, places, strict=True):
        stack, layer, module, expert = place
        if stack not in apart:
            stack, layer, module, expert = "", (), label.removesuffix(WEIGHT), None
        layers[stack].add(layer)
        modules[stack].add(module)
        seats.append((stack, layer, module, -1 if expert is None else expert))
    # Places are numbers of stacks, and of layers and modules in their stack.
    stacks: list[Document] = []
    number_of: dict[tuple[str, object], int] = {}
    for stack in (*apart, ""):
        if stack in layers:
            rows, columns = sorted(layers[stack]), reading_order(modules[stack])
            number_of[stack, None] = len(stacks)
            for members in (rows, columns):
                number_of |= {(stack, member): at for at, member in enumerate(members)}
            names = [".".join(map(str, layer)) for layer in rows]
            stacks.append({"name": stack, "layers": names, "modules": columns})
    flat: list[int] = []
    for stack, layer, module, expert in seats:
        flat += (number_of[stack, key] for key in (None, layer, module))
        flat.append(expert)

    if is_merged:
        groups += [(errors[at].name, [at]) for at in worst]
        flat += [-1] * 4 * len(worst)
    return {"stacks": stacks, "places": flat, "tensors": _columns(artifact, errors, groups)}


def _columns(
    artifact: Artifact, errors: Sequence[TensorError], groups: Sequence[tuple[str, list[int]]]
) -> Document:
    """Return figures of groups by columns; with "count" if any has several."""
    usual = artifact.forms[0]
    packed = (artifact.packed.get(errors[at].name.removesuffix(WEIGHT)) for _, (at, *_) in groups)
    tensors: Document = {
        "name": [label for label, _ in groups],
        "format": [(each.form if each else usual).format.name for each in packed],
    }
    for key, merge in MERGED.items():
        known = ([getattr(errors[at], key) for at in group] for _, group in groups)
        figures = ([value for value in values if value is not None] for values in known)
        tensors[key] = [round_figure(merge(values)) if values else None for values in figures]
    if any(len(group) > 1 for _, group in groups):
        tensors["count"] = [len(group) for _, group in groups]
        losses = ([errors[at].sqnr_db for at in group] for _, group in groups)
        tensors["least"] = [
            round_figure(min((value for value in values if value is not None), default=None))
            for values in losses
        ]
    return tensors


def _worst(
    artifact: Artifact,
    source: Source | None,
    errors: Sequence[TensorError],
    worst: Mapping[int, int],
) -> list[Document]:
    """List the tensors that lost most: codes, values with a source.

    worst  row -> place in errors
    """
    names = [errors[at].name for at in worst.values()]
    found = count_values(artifact, source, names) if source and names else {}
    return [
        {"tensor": row, "codes": errors[at].histogram, "values": found.get(name)}
        for (row, at), name in zip(worst.items(), names, strict=True)
    ]


def count_values(artifact: Artifact, source: Source, names: Collection[str]) -> dict[str, Document]:
    """Count the values of tensors that artifact and source hold in one shape.

    names    of the source's tensors
    Returns  by name: `source` and `artifact`, counts in BINS equal parts of -`limit`..`limit`; the
             limit is the largest magnitude of both; `share` of the rows that were read
    """
    originals, stored = fold_originals(artifact, source).of, linears_stored(artifact)
    wanted = {linear.name: linear for linear in originals.values() if linear.name in names}
    found = {}
    for name, theirs in wanted.items():
        ours = stored.get(theirs.module)
        if ours is not None and ours.shape == theirs.shape:
            found[name] = _count(
                theirs.coding.weights(theirs, source), ours.coding.weights(ours, artifact.source)
            )
    return found


def _count(theirs: Weights, ours: Weights) -> Document:
    """Count the values of at most MOST_PANELS panels from all over a matrix."""
    panels = list(row_panels(theirs.shape, PANEL))
    if len(panels) > MOST_PANELS:
        step = len(panels) / MOST_PANELS
        panels = [panels[int(number * step)] for number in range(MOST_PANELS)]
    x, y = (
        np.concatenate([as_doubles(weights.rows(*panel)) for panel in panels])
        for weights in (theirs, ours)
    )
    largest = (float(np.abs(v[np.isfinite(v)]).max(initial=0)) for v in (x, y))
    limit = max(largest) or 1.0
    counts = [np.histogram(values, BINS, (-limit, limit))[0].tolist() for values in (x, y)]
    share = sum(last - first for first, last in panels) / max(theirs.shape[0], 1)
    return {"limit": limit, "source": counts[0], "artifact": counts[1], "share": share}


def _groups(artifact: Artifact, stored: Mapping[str, float]) -> Document:
    """Count scale groups by kind, and groups that store one scale.

    stored  global scales by module
    """
    kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for scales in find_shared_scales(artifact, stored):
        # One name for the members, with a star for every number above them.
        members = list(scales)
        parent = split_leaf(members[0])[0]
        leaves = sorted((split_leaf(member)[1] for member in members), key=reading_rank)
        kinds["*".join(split_numbers(parent)[0]) + join_words(leaves)].append(scales)
    rows = [
        {"modules": kind, "groups": len(groups), "agree": sum(map(are_equal, groups))}
        for kind, groups in kinds.items()
    ]
    differing = [scales for groups in kinds.values() for scales in groups if not are_equal(scales)]
    shown = [
        [[member, f"{scale:.9g}"] for member, scale in scales.items()]
        for scales in differing[:MOST_DIFFERING]
    ]
    return {
        "rows": rows,
        "differing": shown,
        "hidden": len(differing) - len(shown),
        "has_scales": any(form.format.has_global_scale for form in artifact.forms),
    }


def round_figure(value: float | None) -> float | None:
    """Round to a few digits; None unless the number is finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
