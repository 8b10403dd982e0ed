"""Sources whose experts, or all of whose layers, are four-bit already: their codes are taken over,
or nothing of them is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family import PARTS, Stack, Tensors, logits, write_values
from fp4_sources import MAKERS, V4, Source, make_deepseek_v4
from golden_plans import PLANS, draw_plan
from tiny_models import differing, fp4convert, read_tensors

from fp4convert.numerics import codec
from fp4convert.numerics.formats import FP4_FORMATS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]


@pytest.fixture(scope="module", params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "source")


@pytest.fixture(scope="module")
def artifact(source: Source) -> Path:
    """The source as NVFP4 in compressed-tensors, from nothing but its folder."""
    folder = source.folder.parent / "artifact"
    fp4convert("quantize", source.folder, "--format", "nvfp4", "-o", folder, "-q")
    return folder


def _four_bit(folder: Path) -> tuple[dict[str, tuple[Any, Any]], Tensors]:
    """(module -> packed codes and block scales, every other tensor) of an artifact in
    compressed-tensors.
    """
    tensors = read_tensors(folder)
    modules = [
        name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")
    ]
    parts = {
        module: (tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"])
        for module in modules
    }
    return parts, {name: tensor for name, tensor in tensors.items() if not name.endswith(PARTS)}


@pytest.mark.sweep(2)
def test_the_plan_is_the_page_that_a_person_read(
    source: Source, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["source"]
    assert draw_plan(source.folder) == (PLANS / f"{name}.txt").read_text(), (
        "see: python tests/support/golden_plans.py"
    )


@pytest.mark.sweep(3)
def test_the_same_modules_are_four_bit_and_all_else_is_bf16(source: Source, artifact: Path) -> None:
    modules, others = _four_bit(artifact)
    assert sorted(modules) == sorted(source.four_bit)
    gone = {f"{module}.weight" for module in modules}
    expected = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in source.judged.items()
        if name not in gone
    }
    assert differing(others, expected) == []


def test_nothing_is_lost(source: Source, artifact: Path, tmp_path: Path) -> None:
    """Of MXFP4 every value, in float32; of NVFP4 every code and block scale."""
    modules, _ = _four_bit(artifact)
    if source.format == "nvfp4":
        assert differing(_flat(modules), _flat(source.four_bit)) == []
        return
    fp4convert("dequantize", artifact, "-o", tmp_path / "restored", "--dtype", "fp32", "-q")
    restored = read_tensors(tmp_path / "restored")
    for name in [name for name, tensor in restored.items() if tensor.dim() == 3]:  # gpt-oss
        members = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        views = Stack(name, members, is_transposed=True, is_interleaved=True).views(
            name, restored.pop(name)
        )
        restored |= {f"{module}.weight": matrix for module, matrix in views}
    weights = [f"{module}.weight" for module in source.four_bit]
    found, expected = (
        {name: tensors[name] for name in weights} for tensors in (restored, source.judged)
    )
    assert differing(found, expected) == []


def _flat(modules: dict[str, tuple[Any, Any]]) -> Tensors:
    return {
        f"{module} {number}": part
        for module, parts in modules.items()
        for number, part in enumerate(parts)
    }


def test_as_mxfp4_codes_are_taken_over_or_made_of_the_judged_values(
    source: Source, tmp_path: Path
) -> None:
    options = ("--format", "mxfp4", "--scale-rule", "even", "-o", tmp_path / "artifact", "-q")
    fp4convert("quantize", source.folder, *options)
    modules, _ = _four_bit(tmp_path / "artifact")
    expected = source.four_bit
    if source.format != "mxfp4":
        expected = {module: _encoded(source.judged[f"{module}.weight"]) for module in expected}
    made, wanted = (
        {name: part.view(torch.uint8) for name, part in _flat(parts).items()}
        for parts in (modules, expected)
    )
    assert differing(made, wanted) == []


def _encoded(weight: Any) -> tuple[Any, Any]:
    """Codes and block scales by the reference codec."""
    value = codec.quantize(weight.float().numpy(), FP4_FORMATS["mxfp4"], "even")
    rows, columns = value.shape
    packed, block_scales = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8)
        for part in (value.packed, value.block_scales)
    )
    return packed.reshape(rows, columns // 2), block_scales.reshape(rows, columns // 32)


def test_deepseek_v4_computes_what_transformers_computes_of_the_source(tmp_path: Path) -> None:
    """It reads the published form, FP4 and FP8, and the restored one, and nothing was lost between
    them.
    """
    from transformers import FineGrainedFP8Config

    source = make_deepseek_v4(tmp_path / "source")
    fp4convert("quantize", source.folder, "--format", "nvfp4", "-o", tmp_path / "artifact", "-q")
    fp4convert("dequantize", tmp_path / "artifact", "-o", tmp_path / "restored", "-q")
    config = FineGrainedFP8Config(dequantize=True, scale_fmt="ue8m0", expert_dtype="fp4")
    reference = logits(V4, source.folder, quantization_config=config)
    plain = write_values(
        source.folder,
        {name: tensor.bfloat16() for name, tensor in source.judged.items()},
        tmp_path / "plain",
    )
    assert logits(V4, plain).equal(reference), "the judge and transformers differ"
    assert logits(V4, tmp_path / "restored").equal(reference)
