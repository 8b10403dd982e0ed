"""Every family: what becomes four-bit, with which scales, and the logits of the model that the reference codec made."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from families_dense import DENSE
from families_experts import ONE_BY_ONE
from families_hybrid import HYBRID
from families_stacked import STACKED
from family import PARTS, SIDECARS, Family, Tensors, build, decoded, encoded, kept, stacked_again, write_shards
from tiny_models import INDEX, differing, fp4convert, read_json, read_tensors

from fp4convert.formats import Quantized

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]

FAMILIES = (*DENSE, *ONE_BY_ONE, *HYBRID, *STACKED)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Folders: the checkpoint, its artifact, and the artifact turned back into bf16 weights; and the checkpoint's tensors."""

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
    fp4convert("quantize", source, "--format", "nvfp4", "-o", artifact, "-q")
    fp4convert("dequantize", artifact, "-o", restored, "-q")
    return Conversion(family, source, artifact, restored, read_tensors(source))


def test_four_bit_modules_are_those_listed_with_the_codes_of_the_codec(done: Conversion) -> None:
    """Names, codes, block scales and global scales, which tell the groups: one amax each."""
    artifact = read_tensors(done.artifact)
    quantized = {name: tensor for name, tensor in artifact.items() if name.endswith(PARTS)}
    values = encoded(done.family, done.tensors)
    assert sorted(name.rpartition(".")[0] for name in quantized if name.endswith(PARTS[0])) == sorted(values)
    expected = {name: tensor for module, value in values.items() for name, tensor in _spelled(module, value).items()}
    assert differing(quantized, expected) == []


def _spelled(module: str, value: Quantized) -> Tensors:
    """As compressed-tensors stores it."""
    import torch

    rows, columns = value.shape
    packed = torch.frombuffer(bytearray(value.packed), dtype=torch.uint8).reshape(rows, columns // 2)
    block_scales = torch.frombuffer(bytearray(value.block_scales), dtype=torch.float8_e4m3fn).reshape(rows, columns // 16)
    stored = (packed, block_scales, torch.tensor([value.global_scale], dtype=torch.float32))
    return {f"{module}.{part}": tensor for part, tensor in zip(PARTS, stored, strict=True)}


def test_all_else_arrives_untouched(done: Conversion) -> None:
    """Tensors, layers for multi-token prediction among them, tied heads that are not there, and files of every kind."""
    untouched = kept(done.family, done.tensors)
    assert set(done.family.extra or {}) <= set(untouched)
    for folder in (done.artifact, done.restored):
        others = {name: tensor for name, tensor in read_tensors(folder).items() if not name.endswith(PARTS)}
        assert differing({name: others.get(name) for name in untouched}, untouched) == []
        if folder == done.artifact:
            assert set(others) == set(untouched)
        ours, theirs = (read_json(each / "config.json") for each in (folder, done.source))
        ours.pop("quantization_config", None)
        assert ours == theirs
        files = [file for file in done.source.rglob("*") if file.is_file() and file.name not in {"config.json", INDEX}]
        sidecars = [file.relative_to(done.source) for file in files if file.suffix != ".safetensors"]
        assert len(sidecars) >= len(SIDECARS)
        assert [name for name in sidecars if (folder / name).read_bytes() != (done.source / name).read_bytes()] == []


def test_dequantize_writes_what_the_codec_decodes(done: Conversion) -> None:
    restored = read_tensors(done.restored)
    assert not any(name.endswith(PARTS[1:]) for name in restored)
    assert differing(stacked_again(done.family, done.tensors, restored), decoded(done.family, done.tensors)) == []


def test_logits_are_those_of_the_model_that_the_codec_made(done: Conversion, tmp_path: Path) -> None:
    family = done.family
    reference = _logits(family, _with_tensors(done, decoded(family, done.tensors), tmp_path / "reference"))
    assert reference.isfinite().all()
    assert reference.std() > 0.01
    if family.runs == "artifact":
        folder = done.artifact
    elif family.stacks:
        folder = _with_tensors(done, stacked_again(family, done.tensors, read_tensors(done.restored)), tmp_path / "stacked")
    else:
        folder = done.restored
    assert _logits(family, folder).equal(reference)
    assert not _logits(family, done.source).equal(reference), "the four-bit weights play no part in these logits"


def _with_tensors(done: Conversion, tensors: Tensors, folder: Path) -> Path:
    """The checkpoint with other values."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (done.source / name).exists():
            shutil.copy(done.source / name, folder)
    write_shards(tensors, folder)
    return folder


def _logits(family: Family, folder: Path) -> Any:
    """What transformers computes; the test fails where a tensor of the model was missing or of another shape."""
    import torch
    import transformers

    kind = getattr(transformers, family.model)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "output_loading_info": True}
    if family.model_type:  # else its names are not known for those of the class
        options["config"] = kind.config_class(**{**read_json(folder / "config.json"), "model_type": kind.config_class.model_type})
    model, info = kind.from_pretrained(folder, **options)
    beside = os.path.commonprefix(list(family.extra or {}))
    assert [name for name in info.pop("unexpected_keys") if not beside or not name.startswith(beside)] == []
    assert not any(info.values()), info
    if model.config.get_text_config().tie_word_embeddings:
        assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    inputs = {"input_ids": torch.arange(1, 33).reshape(2, 16)}
    if family.name == "whisper":
        random = torch.Generator().manual_seed(0)
        features = torch.randn((2, 16, 48), generator=random).bfloat16()
        inputs = {"input_features": features, "decoder_input_ids": inputs["input_ids"]}
    with torch.no_grad():
        return model.eval()(**inputs).logits
