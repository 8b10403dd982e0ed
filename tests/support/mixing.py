"""Artifacts whose modules have several forms, spelled from given matrices by the dialects' own
functions; others judge them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from checkpoints import Tensor, pack_shard

from fp4convert.checkpoint.dialects.base import Ignored, MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form, group_modules
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.tables import encode_int4
from fp4convert.checkpoint.record import RecordContents, make_record
from fp4convert.numerics.matrices import Quantized
from fp4convert.recipes.recipe import Target
from fp4convert.storage.checkpoint_files import RECORD

NOBODY = {"name": "test", "version": "0"}
NOWHERE: dict[str, object] = {"repo": None, "revision": None}


class Eight(NamedTuple):
    """Codes of FP8 or int4 and scales as they are stored, with the scale of activations."""

    shape: tuple[int, int]
    codes: bytes
    scales: bytes
    input_scale: float = 1.0


Matrices = Mapping[str, tuple[Form, Quantized | Eight]]


def spell(target: Target, matrices: Matrices) -> dict[str, Tensor]:
    """The tensors of every module."""
    dialect = dialect_named(str(target.dialect))
    tensors: dict[str, Tensor] = {}
    for module, (form, q) in matrices.items():
        stored: dict[str, bytes] = {}
        if isinstance(q, Eight):
            panels = [(memoryview(q.codes), memoryview(q.scales))]
            if form.format.is_fp8:
                assert dialect.TRAITS.fp8 is not None
                parts = dialect.TRAITS.fp8.encode(module, q.shape, form, panels, q.input_scale)
            else:
                parts = encode_int4(module, q.shape, panels)
        else:
            parts = MatrixEncoder(dialect, form, 1.0).encode(module, q.shape, iter([q]))
        for name, part in parts:
            stored[name] = stored.get(name, b"") + bytes(part)
        specs = dialect.outputs(module, q.shape, form)
        assert {spec.name for spec in specs} == stored.keys()
        tensors |= {spec.name: (spec.dtype, spec.shape, stored[spec.name]) for spec in specs}
    return tensors


def write_mixed(
    folder: Path,
    target: Target,
    matrices: Matrices,
    kept: Mapping[str, Tensor],
    config: dict[str, object],
) -> Path:
    """The folder, now with those modules, what stays, and every record."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = group_modules((module, form) for module, (form, _) in matrices.items())
    modules = tuple(
        name.removesuffix(".weight") for name, tensor in kept.items() if len(tensor[1]) == 2
    )
    ignored = Ignored(modules, ("lm_head",))
    records = dialect_named(str(target.dialect)).records(groups, ignored)
    records["config.json"] = {**config, **records.get("config.json", {})}
    records[RECORD] = make_record(target, RecordContents(groups, ignored, {}), NOBODY, NOWHERE)
    for file, record in records.items():
        (folder / file).write_text(json.dumps(record))
    (folder / "model.safetensors").write_bytes(pack_shard({**kept, **spell(target, matrices)}))
    return folder
