"""Experts that stay four-bit on their way into transformers: MXFP4, since 5.23 drops the global
scales of NVFP4 experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from family import Family, build, logits
from tiny_models import fp4convert, read_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]

# transformers has other names for modules that stay than compressed-tensors' list of them has.
OTHER_NAMES = ("axk2", "bailing_hybrid", "deepseek_v4")
SINGLE = [family for family in FAMILIES if family.runs == "restored" and not family.stacks]
SIZES = ("intermediate_size", "ffn_hidden_size", "q_lora_rank")
WIDER = {48: 96, 80: 160, 112: 224}  # blocks of 32


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.xfail(raises=(AssertionError, RuntimeError)))
        if family.name in OTHER_NAMES
        else family
        for family in SINGLE
    ],
    ids=str,
)
def test_engine_computes_four_bit_experts_as_the_restored_ones(
    family: Family, tmp_path: Path
) -> None:
    wide = replace(family, config=_wider(family.config))
    build(wide, tmp_path / "source")
    fp4convert(
        "quantize", tmp_path / "source", "--format", "mxfp4", "-o", tmp_path / "artifact", "-q"
    )
    fp4convert("dequantize", tmp_path / "artifact", "-o", tmp_path / "restored", "-q")
    names = {
        name.removesuffix(".weight_packed")
        for name in read_tensors(tmp_path / "artifact")
        if name.endswith("_packed")
    }
    assert names == {module for group in family.groups for module in group}
    assert logits(wide, tmp_path / "artifact").equal(logits(wide, tmp_path / "restored"))


def _wider(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with sizes of feed-forward layers that blocks of 32 divide."""
    return {
        key: _wider(value)
        if isinstance(value, dict)
        else WIDER[value]
        if key.endswith(SIZES) and value in WIDER
        else value
        for key, value in config.items()
    }
