"""Every family: what becomes four-bit, with which scales, and the logits of the model that the
reference codec made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from families import FAMILIES
from family import (
    PARTS,
    SIDECARS,
    Family,
    Tensors,
    build,
    decoded,
    encoded,
    kept,
    logits,
    spelled,
    write_values,
)
from golden_plans import PLANS, draw_plan
from tiny_models import INDEX, differing, fp4convert, read_json, read_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Folders: the checkpoint, its artifact, and the artifact turned back into bf16 weights; and
    the checkpoint's tensors.
    """

    family: Family
    source: Path
    artifact: Path
    restored: Path
    tensors: Tensors


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A family's conversion by the command, from nothing but its folder."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    source, artifact, restored = (folder / name for name in ("source", "artifact", "restored"))
    build(family, source)
    fp4convert(
        "quantize", source, "--format", "nvfp4", "--scale-rule", "amax", "-o", artifact, "-q"
    )
    fp4convert("dequantize", artifact, "-o", restored, "-q")
    return Conversion(family, source, artifact, restored, read_tensors(source))


@pytest.mark.sweep(18)
def test_the_plan_is_the_page_that_a_person_read(done: Conversion) -> None:
    assert draw_plan(done.source) == (PLANS / f"{done.family.name}.txt").read_text(), (
        "see: python tests/support/golden_plans.py"
    )


@pytest.mark.sweep(9)
def test_four_bit_modules_are_those_listed_with_the_codes_of_the_codec(done: Conversion) -> None:
    """Names, codes, block scales and global scales, which tell the groups: one amax each."""
    artifact = read_tensors(done.artifact)
    quantized = {name: tensor for name, tensor in artifact.items() if name.endswith(PARTS)}
    values = encoded(done.family, done.tensors)
    assert sorted(
        name.rpartition(".")[0] for name in quantized if name.endswith(PARTS[0])
    ) == sorted(values)
    assert differing(quantized, spelled(values)) == []


@pytest.mark.sweep(9)
def test_all_else_arrives_untouched(done: Conversion) -> None:
    """Tensors, layers for multi-token prediction among them, tied heads that are not there, and
    files of every kind.
    """
    untouched = kept(done.family, done.tensors)
    assert not done.family.model or set(done.family.extra or {}) <= set(untouched)
    for folder in (done.artifact, done.restored):
        others = {
            name: tensor
            for name, tensor in read_tensors(folder).items()
            if not name.endswith(PARTS)
        }
        assert differing({name: others.get(name) for name in untouched}, untouched) == []
        if folder == done.artifact:
            assert set(others) == set(untouched)
        ours, theirs = (read_json(each / "config.json") for each in (folder, done.source))
        ours.pop("quantization_config", None)
        assert ours == theirs
        files = [
            file
            for file in done.source.rglob("*")
            if file.is_file() and file.name not in {"config.json", INDEX}
        ]
        sidecars = [
            file.relative_to(done.source) for file in files if file.suffix != ".safetensors"
        ]
        assert len(sidecars) >= len(SIDECARS)
        assert [
            name
            for name in sidecars
            if (folder / name).read_bytes() != (done.source / name).read_bytes()
        ] == []


@pytest.mark.sweep(9)
def test_dequantize_writes_what_the_codec_decodes(done: Conversion) -> None:
    """Under the names and in the shapes of the source, stacks of experts among them."""
    restored = read_tensors(done.restored)
    assert shapes_in(restored) == shapes_in(done.tensors)
    assert differing(restored, decoded(done.family, done.tensors)) == []


def shapes_in(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


@pytest.mark.sweep(9)
def test_logits_are_those_of_the_model_that_the_codec_made(
    done: Conversion, tmp_path: Path
) -> None:
    family = done.family
    if not family.model:
        pytest.skip("no engine here loads it")
    reference = logits(
        family, write_values(done.source, decoded(family, done.tensors), tmp_path / "reference")
    )
    assert reference.isfinite().all()
    assert reference.std() > 0.01
    assert logits(family, done.artifact if family.runs == "artifact" else done.restored).equal(
        reference
    )
    assert not logits(family, done.source).equal(reference), (
        "the four-bit weights play no part in these logits"
    )
