"""Sources that are quantized already: FP4 from what an outside judge says they are worth, in
float32, without a stage between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from family import PARTS, Tensors, decoded, encoded, logits, spelled, write_values
from golden_plans import PLANS, draw_plan
from packed_families import CASES, Case
from tiny_models import differing, fp4convert, read_json, read_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Folders, and what the judge says they are worth, under the names of ordinary weights."""

    case: Case
    source: Path
    artifact: Path
    restored: Path
    judged: Tensors


@pytest.fixture(scope="module", params=CASES, ids=str)
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, Tensors]:
    """A source, and what it is worth."""
    case: Case = request.param
    source = tmp_path_factory.mktemp(case.family.name) / "source"
    return case, source, case.build(source)


@pytest.fixture(scope="module")
def done(packed: tuple[Case, Path, Tensors]) -> Conversion:
    """Its conversion, from nothing but the folder."""
    case, source, judged = packed
    artifact, restored = source.parent / "artifact", source.parent / "restored"
    fp4convert(
        "quantize", source, "--format", "nvfp4", "--scale-rule", "amax", "-o", artifact, "-q"
    )
    fp4convert("dequantize", artifact, "-o", restored, "-q")
    return Conversion(case, source, artifact, restored, judged)


@pytest.mark.sweep(4)
def test_the_plan_is_the_page_that_a_person_read(packed: tuple[Case, Path, Tensors]) -> None:
    case, source, _ = packed
    assert draw_plan(source) == (PLANS / f"{case}.txt").read_text(), (
        "see: python tests/support/golden_plans.py"
    )


@pytest.mark.sweep(4)
def test_engine_reads_the_source_as_the_judge_does(
    packed: tuple[Case, Path, Tensors], tmp_path: Path
) -> None:
    case, source, judged = packed
    if case.options is None:
        pytest.skip("transformers does not read this source")
    plain = write_values(
        source, {name: tensor.bfloat16() for name, tensor in judged.items()}, tmp_path / "plain"
    )
    assert logits(case.family, source, **case.options()).equal(logits(case.family, plain))


@pytest.mark.sweep(4)
def test_four_bit_modules_have_the_codes_of_the_judged_values(done: Conversion) -> None:
    quantized = {
        name: tensor for name, tensor in read_tensors(done.artifact).items() if name.endswith(PARTS)
    }
    expected = spelled(encoded(done.case.family, done.judged))
    assert sorted(quantized) == sorted(expected)
    assert differing(quantized, expected) == []


@pytest.mark.sweep(4)
def test_kept_modules_become_bf16_and_no_scale_travels_alone(done: Conversion) -> None:
    others = {
        name: tensor
        for name, tensor in read_tensors(done.artifact).items()
        if not name.endswith(PARTS)
    }
    gone = {f"{module}.weight" for group in done.case.family.groups for module in group}
    expected = {name: tensor.bfloat16() for name, tensor in done.judged.items() if name not in gone}
    assert differing(others, expected) == []


@pytest.mark.sweep(4)
def test_records_of_the_source_are_replaced(done: Conversion) -> None:
    ours, theirs = (read_json(folder / "config.json") for folder in (done.artifact, done.source))
    assert ours.pop("quantization_config")["format"] == "nvfp4-pack-quantized"
    theirs.pop("quantization_config")
    assert ours == theirs
    assert not (done.artifact / "hf_quant_config.json").exists()
    assert "quantization_config" not in read_json(done.restored / "config.json")


@pytest.mark.sweep(4)
def test_logits_are_those_of_the_model_that_the_codec_made(
    done: Conversion, tmp_path: Path
) -> None:
    family = done.case.family
    reference = logits(
        family, write_values(done.source, decoded(family, done.judged), tmp_path / "reference")
    )
    assert reference.isfinite().all()
    assert reference.std() > 0.01
    assert logits(family, done.artifact if family.runs == "artifact" else done.restored).equal(
        reference
    )
