"""ModelOpt, which defines the arithmetic of NVFP4: its own export of a model against the command's
artifact, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from modelopt_export import export_modelopt
from tiny_models import (
    TORCH_NAMES,
    differing,
    fp4convert,
    fp4convert_json,
    make_llama,
    read_json,
    read_tensors,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
]

CONFIGS = {"W4A16": "W4A16_NVFP4_CFG", "W4A4": "NVFP4_DEFAULT_CFG"}
MODULES = 14
PROBED = "model.layers.1.mlp.down_proj"
every_export = pytest.mark.parametrize("export", CONFIGS, indirect=True)


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp4convert") / "artifact"
    fp4convert(
        "quantize",
        source,
        "--format",
        "nvfp4",
        "--scale-rule",
        "amax",
        "--dialect",
        "modelopt",
        "-o",
        folder,
        "-q",
    )
    return folder


@pytest.fixture(scope="module")
def w4a4(source: Path, exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command's artifact for four-bit activations, with the input scale that ModelOpt
    calibrated for PROBED.
    """
    folder = tmp_path_factory.mktemp("w4a4") / "artifact"
    probed = read_tensors(exports["W4A4"])[f"{PROBED}.input_scale"].item()
    choice = ("--format", "nvfp4", "--scale-rule", "amax", "--dialect", "modelopt")
    options = (*choice, "--activations", 4, "--input-scale", repr(probed))
    fp4convert("quantize", source, *options, "-o", folder, "-q")
    return folder


@pytest.fixture(scope="module")
def exports(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What ModelOpt itself exports: weights only,
    and with input scales for four-bit activations.
    """
    return {
        name: export_modelopt(source, config, tmp_path_factory.mktemp(name))
        for name, config in CONFIGS.items()
    }


@pytest.fixture
def export(request: pytest.FixtureRequest, exports: dict[str, Path]) -> Path:
    return exports[request.param]


def _input_scales(export: Path) -> set[str]:
    return {name for name in read_tensors(export) if name.endswith(".input_scale")}


def test_weights_only_export_is_equal_byte_for_byte(
    exports: dict[str, Path], artifact: Path
) -> None:
    ours = read_tensors(artifact)
    assert sum(name.endswith(".weight_scale_2") for name in ours) == MODULES
    assert differing(ours, read_tensors(exports["W4A16"])) == []


def test_four_bit_activations_export_adds_input_scales_only(
    exports: dict[str, Path], artifact: Path
) -> None:
    ours, theirs = read_tensors(artifact), read_tensors(exports["W4A4"])
    modules = {
        name.removesuffix(".weight_scale_2") for name in ours if name.endswith(".weight_scale_2")
    }
    assert differing(ours, theirs) == sorted(f"{module}.input_scale" for module in modules)


def test_four_bit_activations_export_equals_ours_but_for_calibration(
    exports: dict[str, Path], w4a4: Path
) -> None:
    """Every name, dtype, shape and byte but the values of input scales; and the one that ours was
    given is equal too.
    """
    ours, theirs = read_tensors(w4a4), read_tensors(exports["W4A4"])
    scales = _input_scales(exports["W4A4"])
    assert len(scales) == MODULES
    assert set(differing(ours, theirs)) == {
        name for name in scales if not ours[name].equal(theirs[name])
    }
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in ours.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in theirs.items()
    }
    assert (
        differing({"": ours[f"{PROBED}.input_scale"]}, {"": theirs[f"{PROBED}.input_scale"]}) == []
    )
    assert {ours[name].item() for name in scales} == {theirs[f"{PROBED}.input_scale"].item()}
    assert len({theirs[name].item() for name in scales}) > 1, (
        "calibration does not test what it should"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_engine_records_equal_the_export(
    exports: dict[str, Path], artifact: Path, w4a4: Path, name: str
) -> None:
    """Equal but for the modules to leave alone: ours names more, all of them modules that are not
    quantized.
    """
    made = {"W4A16": artifact, "W4A4": w4a4}[name]
    for file, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):
        ours, theirs = (_engine_record(folder / file) for folder in (made, exports[name]))
        assert ours["quant_algo"] == {"W4A16": "W4A16_NVFP4", "W4A4": "NVFP4"}[name]
        assert any(
            fnmatchcase(name, pattern) for name in theirs.pop(key) for pattern in ours.pop(key)
        )
        assert ours == theirs


def _engine_record(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if path.name == "config.json":
        return dict(record["quantization_config"])
    return {"producer": record["producer"], **record["quantization"]}


def test_config_keeps_what_modelopt_keeps(
    exports: dict[str, Path], artifact: Path, source: Path
) -> None:
    """config.json is the source's with one key more; ModelOpt's differs from it only in how it
    spells dtype.
    """
    ours, theirs = read_json(artifact / "config.json"), read_json(exports["W4A16"] / "config.json")
    assert {key: value for key, value in ours.items() if key != "quantization_config"} == read_json(
        source / "config.json"
    )
    spelling = {"dtype", "torch_dtype", "quantization_config"}
    assert {key: ours[key] for key in ours.keys() - spelling} == {
        key: theirs[key] for key in theirs.keys() - spelling
    }


@every_export
def test_inspect_knows_modelopts_own_export(export: Path) -> None:
    found = fp4convert_json("inspect", export)
    assert (found["format"], found["dialect"]) == ("nvfp4", "modelopt")
    assert found["global_scale"] == {"dtype": "fp32", "stored_as": "multiplier"}
    assert found["tensors"] == {"quantized": MODULES, "other": 7}
    assert found["activations"] == (4 if _input_scales(export) else 16)
    assert found["healthy"]
    assert found["findings"] == []


@every_export
def test_verify_measures_modelopts_own_export(export: Path, source: Path, artifact: Path) -> None:
    """Nothing is wrong with it, and its errors are those of the command's artifact to the last
    digit.
    """
    theirs = fp4convert_json("verify", export, "--source", source, "--min-sqnr", 18)
    assert theirs["passed"]
    assert [finding["code"] for finding in theirs["findings"]] == ["no-hashes"]
    assert len(theirs["tensors"]) == MODULES
    assert all(18 < row["sqnr_db"] < 24 and row["cosine"] > 0.99 for row in theirs["tensors"])
    ours = fp4convert_json("verify", artifact, "--source", source)
    assert (ours["tensors"], ours["summary"]) == (theirs["tensors"], theirs["summary"])


@every_export
@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_dequantize_equals_modelopts_own(export: Path, tmp_path: Path, dtype: str) -> None:
    """Equal but for the sign of zeros: ModelOpt writes code 8 for small negative values and reads
    it as +0.0; others, -0.0.
    """
    fp4convert("dequantize", export, "-o", tmp_path / "restored", "--dtype", dtype, "-q")
    restored, expected = (
        read_tensors(tmp_path / "restored"),
        _dequantized(export, TORCH_NAMES[dtype]),
    )
    assert len(expected) == MODULES
    assert differing({name: restored[name] + 0.0 for name in expected}, expected) == []


def _dequantized(export: Path, dtype: str) -> dict[str, Any]:
    """Name -> weight of every four-bit module, by ModelOpt's own tensor class, which computes in
    the dtype of its scales.
    """
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors = read_tensors(export)
    weights = {}
    for name, global_scale in tensors.items():
        if name.endswith(".weight_scale_2"):
            packed = tensors[name.removesuffix("_scale_2")]
            shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
            quantized = NVFP4QTensor(shape, getattr(torch, dtype), packed)
            block_scales = tensors[name.removesuffix("_2")]
            weights[name.removesuffix("_scale_2")] = quantized.dequantize(
                getattr(torch, dtype),
                scale=block_scales,
                double_scale=global_scale,
                block_sizes={-1: 16},
            )
    return weights


def test_dequantized_export_loads_as_a_plain_model(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    fp4convert("dequantize", exports["W4A16"], "-o", tmp_path / "restored", "-q")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "restored", output_loading_info=True)
    assert not any(info.values()), info


def test_dequantize_leaves_no_input_scale(
    exports: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    fp4convert("dequantize", exports["W4A4"], "-o", tmp_path / "restored", "-q")
    assert read_tensors(tmp_path / "restored").keys() == read_tensors(source).keys()


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2"])
def test_tampering_with_one_tensor_is_seen(
    exports: dict[str, Path], artifact: Path, tmp_path: Path, part: str
) -> None:
    """The comparisons above have teeth: one fault in one tensor, and exactly that tensor and its
    weight differ.
    """
    import torch
    from safetensors.torch import save_file

    module, tampered = "model.layers.0.self_attn.k_proj", tmp_path / "tampered"
    tensors = read_tensors(artifact)
    shutil.copytree(artifact, tampered)
    if part == "weight":
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] << 4) | (
            tensors[f"{module}.weight"] >> 4
        )
    elif part == "weight_scale":
        tensors[f"{module}.weight_scale"].view(torch.uint8)[7, 3] += 1
    else:
        tensors[f"{module}.weight_scale_2"] = 1 / tensors[f"{module}.weight_scale_2"]
    save_file(tensors, tampered / "model.safetensors", metadata={"format": "pt"})
    assert differing(read_tensors(tampered), read_tensors(exports["W4A16"])) == [f"{module}.{part}"]
    found = json.loads(fp4convert("verify", tampered, "--json", expect=6))
    assert "hash-mismatch" in [finding["code"] for finding in found["findings"]]
    assert differing(
        _dequantized(tampered, "float32"), _dequantized(exports["W4A16"], "float32")
    ) == [f"{module}.weight"]


@pytest.fixture
def transcoded(export: Path, tmp_path: Path) -> Path:
    """ModelOpt's own export as compressed-tensors."""
    fp4convert(
        "transcode", export, "-o", tmp_path / "transcoded", "--dialect", "compressed-tensors", "-q"
    )
    return tmp_path / "transcoded"


@every_export
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transcoded_export_loads_in_transformers(transcoded: Path, tmp_path: Path) -> None:
    """With nothing missing or unexpected; as plain weights, those that dequantize writes, and with
    no use for input scales.
    """
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {"dtype": torch.bfloat16, "output_loading_info": True}
    _, info = AutoModelForCausalLM.from_pretrained(transcoded, **options)
    assert not any(info.values()), info
    config = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        transcoded, quantization_config=config, **options
    )
    scales = {name for name in read_tensors(transcoded) if name.endswith(".input_global_scale")}
    assert set(info.pop("unexpected_keys")) == scales
    assert not any(info.values()), info
    fp4convert("dequantize", transcoded, "-o", tmp_path / "restored", "-q")
    assert differing(model.state_dict(), read_tensors(tmp_path / "restored")) == []


@every_export
def test_transcoded_export_keeps_every_code(export: Path, transcoded: Path) -> None:
    """Codes, block scales and kept tensors are the same bytes; scalars are inverted and rounded
    once, as torch divides.
    """
    names = {
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
        "weight": "weight_packed",
    }
    theirs, ours = read_tensors(export), read_tensors(transcoded)
    quantized = {
        name.removesuffix("_scale_2") for name in theirs if name.endswith(".weight_scale_2")
    }
    expected = {}
    for name, tensor in theirs.items():
        module, _, part = name.rpartition(".")
        if part in ("weight_scale_2", "input_scale"):
            expected[f"{module}.{names[part]}"] = (1 / tensor).reshape(1)
        else:
            expected[f"{module}.weight_packed" if name in quantized else name] = tensor
    assert len(quantized) == MODULES
    assert differing(ours, expected) == []
    found = fp4convert_json("inspect", transcoded)
    assert (found["dialect"], found["findings"]) == ("compressed-tensors", [])
    assert found["activations"] == (4 if _input_scales(export) else 16)


@every_export
def test_transcoded_export_there_and_back_is_the_export(
    export: Path, transcoded: Path, tmp_path: Path
) -> None:
    """But for the scales that --json names: those come back one unit of the last place away."""
    fp4convert("transcode", transcoded, "-o", tmp_path / "back", "--dialect", "modelopt", "-q")
    ours, theirs = read_tensors(tmp_path / "back"), read_tensors(export)
    document = fp4convert_json(
        "transcode", export, "-o", tmp_path / "again", "--dialect", "compressed-tensors"
    )
    differ = differing(ours, theirs)
    assert {name.rpartition(".")[0] for name in differ} == set(document["carried"]["rounded"])
    assert all(name.endswith(("weight_scale_2", "input_scale")) for name in differ)
    assert all(
        abs(ours[name].view(_int32()) - theirs[name].view(_int32())).item() == 1 for name in differ
    )


def _int32() -> Any:
    import torch

    return torch.int32
