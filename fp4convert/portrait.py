"""What `inspect` found of an artifact, drawn for a person."""

from __future__ import annotations

from fp4convert.formats import FORMATS
from fp4convert.pictures import draw_block
from fp4convert.render import Document, Screen, draw_findings, draw_verdict, fidelity_text

MOST_PATTERNS = 24  # of modules that are shown


def draw_artifact(screen: Screen, artifact: Document) -> None:
    """What `inspect` found out."""
    recorded = {"recorded": fidelity_text(fidelity)} if (fidelity := artifact.get("fidelity")) else {}
    for key, value in {**artifact_rows(artifact), **recorded, **_picture(artifact)}.items():
        screen.line(f"{key:<16}{value}")
    for entry in artifact["patterns"][:MOST_PATTERNS]:
        screen.line(f"{entry['modules']:>9}  {entry['form']:<12}  {entry['pattern']}")
    if (more := len(artifact["patterns"]) - MOST_PATTERNS) > 0:
        screen.line(f"{'':<25}and {more} patterns more: --json")
    draw_findings(screen, artifact["findings"])
    draw_verdict(screen, artifact["healthy"], "healthy", "not healthy")


def _picture(artifact: Document) -> dict[str, str]:
    """The bits of a block, where all blocks are of one format."""
    fmt = FORMATS.get(artifact["format"])
    return dict(zip(("bits", "meaning", "elements"), draw_block(fmt, artifact["nibble_order"]), strict=True)) if fmt else {}


def artifact_rows(artifact: Document) -> dict[str, str]:
    """What an artifact is, by the words for it: the document of `inspect` but for findings and what was recorded."""
    counts, layout, bits = artifact["tensors"], artifact["scale_layout"], artifact["bits_per_weight"]
    order = f"{_declared(layout['declared'])}, {_detected(layout['detected'])}"
    return {
        **(_form_lines(artifact, order) if "forms" not in artifact else _forms_lines(artifact, order)),
        **({"cache": _cache_text(cache)} if (cache := artifact.get("kv_cache")) else {}),
        "tensors": f"{counts['quantized']} quantized, {counts['other']} other",
        "bits per weight": "none" if bits is None else f"{bits:.3f} (codes, block scales and global scales)",
        "share read": f"{100 * artifact['share_read']:.0f} % of the block scales",
    }


def _form_lines(artifact: Document, order: str) -> dict[str, str]:
    """What codes and scales are."""
    codes = f"{artifact['element_dtype']} codes, {artifact['block_size']} to a block, {artifact['scale_dtype']} block scales"
    stored = artifact["global_scale"]
    return {
        "format": f"{artifact['format']}: {codes}",
        "dialect": artifact["dialect"],
        "global scale": f"{stored['dtype']}, stored as a {stored['stored_as']}" if stored else "none",
        "scale layout": order,
        "nibble order": artifact["nibble_order"],
        "activations": "16 bits" if artifact["activations"] == 16 else "4 bits, quantized by the engine",
    }


def _forms_lines(artifact: Document, order: str) -> dict[str, str]:
    """What they are in modules of each form."""
    forms = {f"  {form['format']} ({number})": _form_text(form) for number, form in enumerate(artifact["forms"], 1)}
    return {"format": artifact["format"], **forms, "dialect": artifact["dialect"], "scale layout": order}


def _form_text(form: Document) -> str:
    size = form["block_size"]
    shared = f"{'x'.join(map(str, size))} to a block" if isinstance(size, list) else f"{size} to a block"
    if size is None:
        shared = f"one scale to a {form['granularity']}"
    what = f"{form['modules']} modules, {form['bits_per_weight']:.3f} bits a weight, activations of {form['activations']} bits"
    return f"{form['element_dtype']} codes, {shared}, {form['scale_dtype']} scales; {what}"


def _cache_text(cache: Document) -> str:
    if not cache["scales"]:
        return f"keys and values in {cache['dtype']}, without scales: engines take 1"
    return f"keys and values in {cache['dtype']}, {cache['scales']} scales from {cache['smallest']:.4g} to {cache['largest']:.4g}"


def _declared(layout: str | None) -> str:
    return f"{layout} (declared)" if layout else "undeclared"


def _detected(layout: str | None) -> str:
    return f"{layout} (detected)" if layout else "unknown by statistics"
