"""Make text safe to print; say in words what an artifact is."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

Document = dict[str, Any]  # what --json prints; keys as in the README
_HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
}  # control, format (bidi), surrogate, private, unassigned, separators
CELL_WIDTH = 100


def escape(text: object) -> str:
    """`text` with everything that could act on a terminal written as \\xNN or \\uNNNN."""
    string = str(text)
    return string if string.isprintable() else "".join(map(_visible, string))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def badness(sqnr_db: float | None, mse: float | None) -> float:
    """Sorts tensors: first what has no mse, for it is not measurable, or no ratio, for its source is zero; exact ones last."""
    if mse == 0:
        return math.inf
    return -math.inf if mse is None or sqnr_db is None else sqnr_db


def fidelity_text(summary: Document) -> str:
    """How much was lost, in a line."""
    mean, least = summary["sqnr_db_mean"], summary["sqnr_db_min"]
    return (
        "nothing was lost"
        if mean is None
        else f"SQNR {mean:.2f} dB on average, least {least:.2f} dB ({summary['worst']})"
    )


def shorten(text: str, width: int = CELL_WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width // 2]}...{text[-width // 2 :]}"


def artifact_rows(artifact: Document) -> dict[str, str]:
    """What an artifact is, by the words for it: the document of `inspect` but for findings and what was recorded."""
    counts, layout, bits = (
        artifact["tensors"],
        artifact["scale_layout"],
        artifact["bits_per_weight"],
    )
    order = f"{_declared(layout['declared'])}, {_detected(layout['detected'])}"
    return {
        **(
            _form_lines(artifact, order)
            if "forms" not in artifact
            else _forms_lines(artifact, order)
        ),
        **({"cache": _cache_text(cache)} if (cache := artifact.get("kv_cache")) else {}),
        "tensors": f"{counts['quantized']} quantized, {counts['other']} other",
        "bits per weight": "none"
        if bits is None
        else f"{bits:.3f} (codes, block scales and global scales)",
        "share read": f"{100 * artifact['share_read']:.0f} % of the block scales",
    }


def _form_lines(artifact: Document, order: str) -> dict[str, str]:
    """What codes and scales are."""
    codes = f"{artifact['element_dtype']} codes, {artifact['block_size']} to a block, {artifact['scale_dtype']} block scales"
    stored = artifact["global_scale"]
    return {
        "format": f"{artifact['format']}: {codes}",
        "dialect": artifact["dialect"],
        "global scale": f"{stored['dtype']}, stored as a {stored['stored_as']}"
        if stored
        else "none",
        "scale layout": order,
        "nibble order": artifact["nibble_order"],
        "activations": "16 bits"
        if artifact["activations"] == 16
        else "4 bits, quantized by the engine",
    }


def _forms_lines(artifact: Document, order: str) -> dict[str, str]:
    """What they are in modules of each form."""
    forms = {
        f"  {form['format']} ({number})": _form_text(form)
        for number, form in enumerate(artifact["forms"], 1)
    }
    return {
        "format": artifact["format"],
        **forms,
        "dialect": artifact["dialect"],
        "scale layout": order,
    }


def _form_text(form: Document) -> str:
    size = form["block_size"]
    shared = (
        f"{'x'.join(map(str, size))} to a block" if isinstance(size, list) else f"{size} to a block"
    )
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
