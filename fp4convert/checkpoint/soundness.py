"""Refuse artifacts whose weights cannot be read with certainty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.unread import INPUT_FACTORS, refuse_unsaid
from fp4convert.errors import InputError
from fp4convert.numerics.layout_detection import StoredScales, detect_layout
from fp4convert.numerics.scale_layouts import LAYOUTS, arrange_scales
from fp4convert.storage.checkpoint_files import UNFINISHED

# Faults of records and marks for engines, which leave no doubt about the weights.
CLEAR_ENOUGH = frozenset(
    {"record-key", "record-status", "record-strategy", "unmarked", "marked-plain"}
)
SPREAD = 8  # modules apart are those whose layout is judged one after the other


def refuse_unsound(artifact: Artifact) -> None:
    """Raise InputError for findings, and for tensors that are not applied."""
    consumed = {one.stem + INPUT_FACTORS for one in artifact.modules.values()}
    consumed |= {ref.name for one in artifact.foreign.values() for ref in one.refs}
    refuse_unsaid(artifact.tensors, consumed)
    for finding in artifact.findings:
        if finding.level == "error" and finding.code not in CLEAR_ENOUGH:
            where = f"{finding.tensor}: " if finding.tensor else ""
            detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
            next_step = "See: fp4convert inspect."
            if finding.code == "unfinished":
                next_step = UNFINISHED
            raise InputError("unsound-artifact", detail, next_step, finding.tensor)
    if artifact.modules and any(finding.code == "unmarked" for finding in artifact.findings):
        _refuse_other_layout(artifact)


def _refuse_other_layout(artifact: Artifact) -> None:
    """Raise InputError where scales do not show an undeclared layout."""
    expected = artifact.scale_layout
    detected = detect_layout(stored_scales(artifact, [*artifact.modules]), expected)
    if detected != expected:
        detail = f"{artifact.source.name}: nothing marks its NVFP4 modules, and by statistics their"
        detail += f" block scales are in layout {detected or 'unknown'}; expected {expected}, in"
        detail += f" which dialect {artifact.dialect} stores them"
        next_step = "Put the config.json or hf_quant_config.json of its maker beside it; or start"
        raise InputError("unmarked-layout", detail, f"{next_step} from the original weights.")


def stored_scales(artifact: Artifact, modules: Sequence[str]) -> Iterator[StoredScales]:
    """Read stored block scales of modules with a scale tensor.

    Neighbours come far apart, so that the first few are from everywhere.
    """
    layout = LAYOUTS.get(artifact.scale_layout)
    for module in (module for first in range(SPREAD) for module in modules[first::SPREAD]):
        if layout is None or artifact.modules[module].stem != module:
            continue
        q = artifact.decode(module)
        rows, columns = q.shape
        shape = (rows, columns // q.format.block_size)
        yield StoredScales(np.frombuffer(arrange_scales(q, layout), np.uint8), shape, q.format)
