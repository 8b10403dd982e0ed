"""Artifacts with modules of several forms, judged by those who read them: compressed-tensors with
transformers, and ModelOpt.

The codes come from compressed-tensors' compressors and from torch; fp4convert only spells them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Tensor, read_folder
from compressed_tensors_export import export_compressed
from mixing import Eight, Matrices, spell, write_mixed
from modelopt_export import FP4, FP8, export_modelopt, with_exceptions
from tiny_models import fp4convert, fp4convert_json, make_llama, read_json, read_tensors

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.forms import Form, Granularity
from fp4convert.checkpoint.dialects.tables import scale_grid
from fp4convert.checkpoint.dialects.target_forms import fp8_form, module_form
from fp4convert.numerics.formats import FP8 as FP8_FORMAT
from fp4convert.recipes.recipe import Target

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CT, MO = "compressed-tensors", "modelopt"
FP8_ROW = {"num_bits": (4, 3), "axis": 0}
FP8_BLOCK = {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}
W4A4 = {f"*mlp*{which}_quantizer": FP4 for which in ("weight", "input")}
GRANULARITIES: list[Granularity] = ["tensor", "row", (128, 128), (32, 32)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """compressed-tensors' own NVFP4 in the MLP and MXFP4 in the attention, and what it
    decompresses.
    """
    folder = tmp_path_factory.mktemp("exported")
    weights = export_compressed(
        source, (("NVFP4A16", "re:.*mlp.*"), ("MXFP4A16", "re:.*self_attn.*")), folder
    )
    return folder, weights


def test_an_export_of_two_four_bit_formats_is_read(exported: tuple[Path, dict[str, Any]]) -> None:
    found = fp4convert_json("inspect", exported[0])
    assert (found["healthy"], found["findings"], found["dialect"], found["format"]) == (
        True,
        [],
        CT,
        "mixed",
    )
    assert [(form["format"], form["modules"]) for form in found["forms"]] == [
        ("nvfp4", 6),
        ("mxfp4", 8),
    ]
    assert found["tensors"]["quantized"] == 14


def test_two_four_bit_formats_are_dequantized_and_verified(
    exported: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path
) -> None:
    folder, expected = exported
    fp4convert("dequantize", folder, "-o", tmp_path / "restored", "--dtype", "bf16", "-q")
    restored = read_tensors(tmp_path / "restored")
    _assert_equal({name: restored[name] for name in expected}, expected)
    report = fp4convert_json("verify", folder, "--source", source, "--min-sqnr", "10")
    assert report["passed"]
    assert {error["name"] for error in report["tensors"]} == expected.keys()


def _matrices(artifact: Artifact, target: Target) -> Matrices:
    """The modules of an artifact, each in its own format."""
    found = {}
    for module, packed in artifact.modules.items():
        form = module_form(target, packed.form.format.name)
        found[module] = form, artifact.decode(module).rows(0, packed.shape[0])
    return found


def _kept(folder: Path, modules: Matrices) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in read_folder(folder).items()
        if name.removesuffix(".weight") not in modules
    }


def _load(folder: Path, dtype: str) -> dict[str, Any]:
    """The weights as transformers has them, decompressed where they are: with dequantize=True it
    takes one group for all.

    dtype  of scales too: bfloat16 rounds those of FP8
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not any(info.values()), info
    model.hf_quantizer.compressor.decompress_model(model)
    return {
        name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")
    }


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_two_four_bit_formats_are_spelled_as_their_owner_does(
    exported: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path
) -> None:
    target = Target("nvfp4", CT)
    matrices = _matrices(open_artifact(str(exported[0])), target)
    theirs = read_folder(exported[0])
    ours = spell(target, matrices)
    assert ours == {name: theirs[name] for name in ours}
    folder = write_mixed(
        tmp_path / "ours",
        target,
        matrices,
        _kept(source, matrices),
        read_json(source / "config.json"),
    )
    _assert_equal(_load(folder, "bfloat16"), exported[1])
    found = fp4convert_json("inspect", folder)
    assert (found["healthy"], found["findings"]) == (True, [])


def _to_fp8(weight: Any, form: Form) -> tuple[Eight, Any]:
    """Codes and scales by torch alone, and the values that they stand for."""
    import torch

    rows, columns = weight.shape
    grid = scale_grid((rows, columns), form.granularity or "tensor")
    tall, wide = -(-rows // grid[0]), -(-columns // grid[1])
    values = weight.float().reshape(grid[0], tall, grid[1], wide)
    amax = values.abs().amax((1, 3), keepdim=True)
    scales = torch.where(amax > 0, amax / 448, torch.ones_like(amax))
    codes = (values / scales).to(torch.float8_e4m3fn)
    restored = (codes.float() * scales).reshape(rows, columns)
    stored = codes.reshape(rows, columns).view(torch.uint8).numpy().tobytes()
    return Eight((rows, columns), stored, scales.reshape(-1).numpy().tobytes()), restored


def _with_fp8(
    source: Path, exported: tuple[Path, dict[str, Any]], target: Target, form: Form
) -> tuple[Matrices, dict[str, Any]]:
    """The export's MLP beside an attention of FP8, and all values."""
    from safetensors.torch import load_file

    artifact, expected = open_artifact(str(exported[0])), dict(exported[1])
    matrices = {
        module: each for module, each in _matrices(artifact, target).items() if ".mlp." in module
    }
    for name, weight in load_file(source / "model.safetensors").items():
        if ".self_attn." in name:
            eight, expected[name] = _to_fp8(weight, form)
            matrices[name.removesuffix(".weight")] = form, eight
    return matrices, expected


@pytest.mark.sweep(4)
@pytest.mark.parametrize("activations", [16, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transformers_reads_fp8_beside_nvfp4(
    source: Path,
    exported: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    granularity: Granularity,
    activations: int,
) -> None:
    target = Target("nvfp4", CT, None, activations)
    form = fp8_form(target, granularity)
    matrices, expected = _with_fp8(source, exported, target, form)
    folder = write_mixed(
        tmp_path / "ours",
        target,
        matrices,
        _kept(source, matrices),
        read_json(source / "config.json"),
    )
    weights = _load(folder, "float32")
    _assert_equal(
        {name: tensor.to(expected[name].dtype) for name, tensor in weights.items()}, expected
    )
    found = fp4convert_json("inspect", folder)
    assert (found["healthy"], found["findings"], found["format"]) == (True, [], "mixed")
    assert [(each["format"], each["modules"]) for each in found["forms"]] == [
        ("nvfp4", 6),
        ("fp8", 8),
    ]
    (folder / "quantization_config.json").unlink()
    assert fp4convert_json("inspect", folder)["forms"] == found["forms"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("wide"), hidden_size=256)


@pytest.fixture(scope="module")
def modelopt(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Granularity, Path]:
    """ModelOpt's own NVFP4 in the MLP beside FP8 in the attention, for a matrix, for rows, and for
    blocks of weights alone.
    """
    quantizers: dict[Granularity, dict[str, Any]] = {
        "tensor": {f"*self_attn*{which}_quantizer": FP8 for which in ("weight", "input")},
        "row": {
            "*self_attn*weight_quantizer": FP8_ROW,
            "*self_attn*input_quantizer": {"num_bits": (4, 3), "type": "dynamic"},
        },
        (128, 128): {"*self_attn*weight_quantizer": FP8_BLOCK},
    }
    return {
        kind: export_modelopt(
            wide, with_exceptions({**W4A4, **chosen}), tmp_path_factory.mktemp("modelopt")
        )
        for kind, chosen in quantizers.items()
    }


@pytest.mark.parametrize("granularity", ["tensor", "row", (128, 128)])
def test_modelopts_own_mixed_export(
    modelopt: dict[Granularity, Path], tmp_path: Path, granularity: Granularity
) -> None:
    """Opened, and spelled again: tensor for tensor and key for key as ModelOpt has it."""
    export = modelopt[granularity]
    artifact = open_artifact(str(export))
    assert [finding for finding in artifact.findings if finding.level != "note"] == []
    assert {packed.form.granularity for packed in artifact.others.values()} == {granularity}
    assert (len(artifact.modules), len(artifact.others)) == (6, 8)
    target = Target("nvfp4", MO, None, 4)
    matrices = dict(_matrices(artifact, target))
    for module in artifact.others:
        codes, scales = (
            bytes(artifact.source.read(ref)) for ref in artifact.others[module].refs[:2]
        )
        matrices[module] = (
            fp8_form(target, granularity),
            Eight(artifact.others[module].shape, codes, scales),
        )
    folder = write_mixed(tmp_path / "ours", target, matrices, {}, {})
    theirs, ours = read_folder(export), read_folder(folder)
    weights = {name for name in ours if not name.endswith("input_scale")}
    assert {name: (ours[name][0], ours[name][1]) for name in ours} == {
        name: theirs[name][:2] for name in ours
    }
    assert {name: ours[name] for name in weights} == {name: theirs[name] for name in weights}
    for file in ("config.json", "hf_quant_config.json"):
        _assert_said_alike(read_json(folder / file), read_json(export / file))


def _assert_said_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """quantization_config, or the nested record of hf_quant_config.json.

    FP8_PB_WO is written in small letters by ModelOpt, without numbers, and in capitals in what
    NVIDIA publishes.
    """
    left, right = (
        each.get("quantization_config") or each["quantization"] for each in (ours, theirs)
    )
    for key in ("quant_algo", "quant_method", "kv_cache_quant_algo"):
        assert left.get(key) == right.get(key), key
    capitals = {
        name: {**layer, "quant_algo": layer["quant_algo"].upper()}
        for name, layer in right["quantized_layers"].items()
    }
    assert left["quantized_layers"] == capitals
    if any(layer["quant_algo"] == "FP8_PB_WO" for layer in capitals.values()):
        return
    by_targets = [
        {str(sorted(group["targets"])): group for group in each.get("config_groups", {}).values()}
        for each in (left, right)
    ]
    assert by_targets[0] == by_targets[1]


RECIPE = """
about = "NVFP4 beside FP8"
base = "default"
[[format]]
modules = ["*self_attn*"]
format = "fp8"
"""


def _quantize(source: Path, folder: Path, dialect: str, activations: int) -> Path:
    (folder / "mixed.toml").write_text(RECIPE)
    choice = (
        "--format",
        "nvfp4",
        "--scale-rule",
        "amax",
        "--dialect",
        dialect,
        "--activations",
        activations,
    )
    options = (*choice, "--recipe", folder / "mixed.toml", "-q")
    fp4convert("quantize", source, "-o", folder / "made", *options)
    found = fp4convert_json("inspect", folder / "made")
    assert (found["healthy"], found["findings"]) == (True, [])
    assert [(form["format"], form["modules"]) for form in found["forms"]] == [
        ("nvfp4", 6),
        ("fp8", 8),
    ]
    assert fp4convert_json("verify", folder / "made", "--source", source, "--min-sqnr", "15")[
        "passed"
    ]
    return folder / "made"


@pytest.mark.parametrize("activations", [16, 4])
def test_quantize_makes_fp8_that_transformers_reads(
    source: Path, tmp_path: Path, activations: int
) -> None:
    from safetensors.torch import load_file

    weights = _load(_quantize(source, tmp_path, CT, activations), "float32")
    form = fp8_form(Target("nvfp4", CT), "row")
    originals = {
        name: weight
        for name, weight in load_file(source / "model.safetensors").items()
        if ".self_attn." in name
    }
    expected = {name: _to_fp8(weight, form)[1] for name, weight in originals.items()}
    _assert_equal({name: weights[name] for name in expected}, expected)


def _blocked(source: Path, folder: Path) -> dict[str, Any]:
    """The values of the folder's matrices, which are now FP8 in blocks of 128x128, as DeepSeek
    stores them.
    """
    from safetensors.torch import load_file, save_file

    form = Form(FP8_FORMAT, granularity=(128, 128))
    tensors, values = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            eight, values[name] = _to_fp8(weight, form)
            rows, columns = scale_grid(eight.shape, (128, 128))
            tensors[name] = _tensor(eight.codes, "float8_e4m3fn", eight.shape)
            tensors[f"{name}_scale_inv"] = _tensor(eight.scales, "float32", (rows, columns))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    record = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(
        json.dumps({**read_json(source / "config.json"), "quantization_config": record})
    )
    return values


def _tensor(data: bytes, dtype: str, shape: tuple[int, int]) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dialect", [CT, MO])
def test_fp8_that_stays_is_said_in_the_records(source: Path, tmp_path: Path, dialect: str) -> None:
    """Queries of 128x128 are one block, and keys of 64 rows a part of one: both are stored like all
    others.
    """
    blocked, made = tmp_path / "blocked", tmp_path / "made"
    blocked.mkdir()
    expected = _blocked(source, blocked)
    options = (
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--recipe",
        "mlp_only",
        "--keep-packed",
        "-q",
    )
    fp4convert("quantize", blocked, "-o", made, *options)
    found = fp4convert_json("inspect", made)
    assert (found["healthy"], found["findings"]) == (True, [])
    assert [(form["format"], form["block_size"], form["modules"]) for form in found["forms"]] == [
        ("nvfp4", 16, 6),
        ("fp8", [128, 128], 8),
    ]
    assert fp4convert_json("verify", made, "--source", blocked)["passed"]
    if dialect == CT:
        weights = _load(made, "float32")
        attention = [name for name in expected if ".self_attn." in name]
        _assert_equal(
            {name: weights[name] for name in attention},
            {name: expected[name] for name in attention},
        )


def test_quantize_makes_what_modelopt_exports(
    wide: Path, modelopt: dict[Granularity, Path], tmp_path: Path
) -> None:
    """But for scales of activations, which it calibrates, and codes of FP8, which it rounds to bf16
    first, some to the next.
    """
    import numpy as np
    import torch
    from safetensors.torch import load_file

    ours, theirs = read_folder(_quantize(wide, tmp_path, MO, 4)), read_folder(modelopt["tensor"])
    assert ours.keys() == theirs.keys()
    others = [
        name for name in ours if not name.endswith("input_scale") and ours[name] != theirs[name]
    ]
    assert {name.rpartition(".")[2] for name in others} == {"weight"}
    assert all(".self_attn." in name for name in others)
    weights, exported = (
        load_file(wide / "model.safetensors"),
        load_file(modelopt["tensor"] / "model.safetensors"),
    )
    for name in others:
        rounded = (weights[name] / exported[f"{name}_scale"]).to(torch.float8_e4m3fn)
        assert torch.equal(rounded.float(), exported[name].float())
        left, right = (
            np.frombuffer(each[name][2], np.uint8).astype(int) for each in (ours, theirs)
        )
        assert abs(left - right).max() == 1
        assert (left != right).mean() < 0.06
