"""Make the table of what `transcode` carries into which dialect."""

from __future__ import annotations

from collections.abc import Iterator

from engine_tables import table

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.encodings.fp8 import Fp8
from fp4convert.checkpoint.encodings.int4 import Integers
from fp4convert.numerics.formats import FP4_FORMATS, FP8, MXFP8, NVFP4
from fp4convert.planning.kept_dtype import held_form
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef

SHAPE = (256, 256)  # that every dialect takes
EIGHTS = {  # coding, shape of the scales, dtype of them
    "FP8, one scale": (Fp8("fp8", SHAPE), (), "F32"),
    "FP8, one for each row": (Fp8("fp8 rows", (1, SHAPE[1])), (SHAPE[0], 1), "F32"),
    "FP8, one for 128x128": (Fp8("fp8 128x128", (128, 128)), (2, 2), "F32"),
    "MXFP8": (Fp8("mxfp8", (1, 32), format=MXFP8), (SHAPE[0], 8), "U8"),
    "int4 (beside others)": (Integers(4, 32, has_zero_points=False), (SHAPE[0], 8), "BF16"),
}


def carried() -> Iterator[str]:
    """List what each dialect takes as it is, alone and beside NVFP4."""
    rows: list[tuple[object, ...]] = []
    for name, fmt in FP4_FORMATS.items():
        cells = []
        for dialect in DIALECTS:
            traits = dialect_named(dialect).TRAITS
            is_mixed = {fmt, FP8} <= {*traits.mixes} or {fmt, MXFP8} <= {*traits.mixes}
            floats = "yes, others become floats or Q8_0" if traits.container == "gguf" else "alone"
            is_carried = fmt in traits.writes and not traits.correction
            cells.append(("yes" if is_mixed else floats) if is_carried else "")
        rows.append((name.upper(), *cells))
    for name, (coding, shape, dtype) in EIGHTS.items():
        packed = "I32" if isinstance(coding, Integers) else "F8_E4M3"
        refs = (
            TensorRef("M.weight", packed, SHAPE, "", 0),
            TensorRef("M.weight_scale", dtype, shape, "", 0),
        )
        linear = Linear("M", SHAPE, coding, refs)
        rows.append((name, *(_cell(linear, dialect) for dialect in DIALECTS)))
    yield from table(("", *DIALECTS), rows)


def _cell(linear: Linear, dialect: str) -> str:
    if dialect_named(dialect).TRAITS.container == "gguf":
        return "as floats or Q8_0"
    target = Target(NVFP4.name, dialect)
    if held_form(linear, target, (NVFP4,)):
        return "yes"
    return "alone" if held_form(linear, target) else ""
