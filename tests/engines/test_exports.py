"""What ModelOpt and compressed-tensors themselves export beyond the plain case: caches in FP8,
mixed modules, MXFP4.

How ModelOpt's plain NVFP4 fares is in test_modelopt.py.  vLLM's maybe_remap_kv_scale_name takes
self_attn.k_proj.k_scale
(ModelOpt) and self_attn.k_scale (compressed-tensors) for the same scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_tensors_export import Schemes, export_compressed
from modelopt_export import FP4, FP8, MXFP8, Quantizers, export_modelopt, with_exceptions
from tiny_models import differing, fp4convert, fp4convert_json, make_llama, read_json, read_tensors
from torch_formulas import quark_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:transformers .* is not tested with current version"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODULES, IN_MLP = 14, 6
MODELOPT: dict[str, Quantizers] = {
    "cache": {"*weight_quantizer": FP4, "*input_quantizer": FP4, "*[kv]_bmm_quantizer": FP8},
    "beside-fp8": {
        **{f"*mlp*{which}_quantizer": FP4 for which in ("weight", "input")},
        **{f"*self_attn*{which}_quantizer": FP8 for which in ("weight", "input")},
    },
    "w4a4-beside-w4a16": {"*weight_quantizer": FP4, "*mlp*input_quantizer": FP4},
    "beside-mxfp8": {
        **{f"*mlp*{which}_quantizer": FP4 for which in ("weight", "input")},
        **{f"*self_attn*{which}_quantizer": MXFP8 for which in ("weight", "input")},
    },
}
MLP, ATTENTION = "re:.*mlp.*", "re:.*self_attn.*_proj"
COMPRESSED: dict[str, Schemes] = {
    "nvfp4a16": (("NVFP4A16", "Linear"),),
    "nvfp4": (("NVFP4", "Linear"),),
    "cache": (("NVFP4A16", "Linear"),),
    "mxfp4a16": (("MXFP4A16", "Linear"),),
    "mxfp4": (("MXFP4", "Linear"),),
    "w4a4-beside-w4a16": (("NVFP4", MLP), ("NVFP4A16", ATTENTION)),
    "beside-fp8": (("NVFP4", MLP), ("FP8", ATTENTION)),
    "beside-int8": (("NVFP4", MLP), ("W8A8", ATTENTION)),
}
MIXED = ("beside-fp8", "beside-int8")
SOUND = [name for name in COMPRESSED if name not in MIXED]
Exports = dict[str, Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def modelopt(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """What ModelOpt exports: with an FP8 cache, two of mixed precision, and MXFP4."""
    from modelopt.torch import quantization

    chosen: dict[str, Quantizers] = {
        name: with_exceptions(quantizers) for name, quantizers in MODELOPT.items()
    }
    configs = {**chosen, "mxfp4": quantization.MXFP4_DEFAULT_CFG}
    return {
        name: export_modelopt(source, config, tmp_path_factory.mktemp(name))
        for name, config in configs.items()
    }


@pytest.fixture(scope="module")
def compressed(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """What compressed-tensors exports, and the weights that it decompresses again."""
    made = {}
    for name, schemes in COMPRESSED.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (
            folder,
            export_compressed(source, schemes, folder, has_fp8_cache=name == "cache"),
        )
    return made


def _findings(export: Path) -> list[tuple[str, str]]:
    found = fp4convert_json("inspect", export)
    assert found["healthy"]
    return [(finding["level"], finding["code"]) for finding in found["findings"]]


def _facts(export: Path) -> tuple[str, str, int | None, int]:
    found = fp4convert_json("inspect", export)
    return found["dialect"], found["format"], found["activations"], found["tensors"]["quantized"]


def _restored(artifact: Path, folder: Path, dtype: str = "fp32") -> dict[str, Any]:
    fp4convert("dequantize", artifact, "-o", folder, "--dtype", dtype, "-q")
    return read_tensors(folder)


def _there_and_back(
    export: Path, folder: Path, dialects: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Names of tensors that are not as they were, and of the modules that --json calls rounded."""
    document = fp4convert_json(
        "transcode", export, "-o", folder / "there", "--dialect", dialects[0]
    )
    fp4convert("transcode", folder / "there", "-o", folder / "back", "--dialect", dialects[1], "-q")
    assert not {level for level, _ in _findings(folder / "there") + _findings(folder / "back")} & {
        "error",
        "warning",
    }
    return differing(read_tensors(folder / "back"), read_tensors(export)), document["carried"][
        "rounded"
    ]


def _refused(expected: str, *arguments: object) -> None:
    document = json.loads(fp4convert(*arguments, "--json", expect=2))
    assert document["error"]["code"] == expected


def test_inspect_knows_modelopts_exports(modelopt: Exports) -> None:
    assert {name: _facts(export) for name, export in modelopt.items()} == {
        "cache": ("modelopt", "nvfp4", 4, MODULES),
        "beside-fp8": ("modelopt", "mixed", None, MODULES),
        "beside-mxfp8": ("modelopt", "mixed", None, MODULES),
        "w4a4-beside-w4a16": ("modelopt", "nvfp4", None, MODULES),
        "mxfp4": ("modelopt", "mxfp4", 16, MODULES),
    }
    assert {name: _findings(export) for name, export in modelopt.items()} == {
        "cache": [],
        "beside-fp8": [],
        "beside-mxfp8": [],
        "w4a4-beside-w4a16": [("note", "scales-idle")],
        "mxfp4": [("warning", "record-refused")],
    }
    algorithms = {
        name: read_json(export / "hf_quant_config.json")["quantization"]["quant_algo"]
        for name, export in modelopt.items()
    }
    mixed = dict.fromkeys(("beside-fp8", "beside-mxfp8", "w4a4-beside-w4a16"), "MIXED_PRECISION")
    assert algorithms == {"cache": "NVFP4", "mxfp4": "mxfp4", **mixed}


@pytest.mark.parametrize("name", ["cache", "w4a4-beside-w4a16", "mxfp4"])
def test_modelopts_exports_dequantize_as_the_formula_says(
    modelopt: Exports, source: Path, tmp_path: Path, name: str
) -> None:
    """And nothing that only four-bit modules or FP8 caches need is left."""
    restored, expected = (
        _restored(modelopt[name], tmp_path / "restored"),
        quark_weights(read_tensors(modelopt[name])),
    )
    assert len(expected) == MODULES
    assert differing({weight: restored[weight] for weight in expected}, expected) == []
    assert restored.keys() == read_tensors(source).keys()


@pytest.mark.slow
def test_matrices_of_eight_bits_beside_four(
    modelopt: Exports, compressed: dict[str, Any], tmp_path: Path
) -> None:
    """quark has no FP8 beside NVFP4; integers of eight bits are not read at all; FP8 is restored as
    torch computes it.
    """
    exports = [
        ("dialect-mixed", modelopt["beside-fp8"]),
        ("dialect-mixed", compressed["beside-fp8"][0]),
        ("mixed-modules", compressed["beside-int8"][0]),
    ]
    for code, export in exports:
        _refused(code, "transcode", export, "-o", tmp_path / "other", "--dialect", "quark")
    _refused(
        "already-quantized", "dequantize", compressed["beside-int8"][0], "-o", tmp_path / "restored"
    )
    assert list(tmp_path.iterdir()) == []
    for number, export in enumerate((modelopt["beside-fp8"], compressed["beside-fp8"][0])):
        fp4convert("dequantize", export, "-o", tmp_path / f"{number}", "--dtype", "fp32")
        stored, restored = read_tensors(export), read_tensors(tmp_path / f"{number}")
        eight = [
            name
            for name, tensor in stored.items()
            if str(tensor.dtype) == "torch.float8_e4m3fn" and name.endswith(".weight")
        ]
        assert eight
        for name in eight:
            expected = stored[name].float() * stored[f"{name}_scale"].float()
            assert restored[name].equal(expected), name


def _loaded(folder: Path) -> dict[str, Any]:
    """The weights as transformers has them, decompressed in float32, nothing missing or left."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    model.hf_quantizer.compressor.decompress_model(model)
    return {
        name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize("name", ["beside-fp8", "beside-mxfp8"])
def test_modelopts_mixed_export_is_loaded_by_transformers(
    modelopt: Exports, tmp_path: Path, name: str
) -> None:
    """Carried to compressed-tensors: what its own decompressor makes of FP8 and MXFP8 is what the
    formula makes of ModelOpt's bytes; and back again, every byte but of scales that --json names.
    """
    import torch

    export = modelopt[name]
    differ, rounded = _there_and_back(export, tmp_path, ("compressed-tensors", "modelopt"))
    assert {tensor.rpartition(".")[0] for tensor in differ} <= set(rounded)
    assert all(tensor.endswith(("weight_scale_2", "input_scale")) for tensor in differ)
    stored, weights = read_tensors(export), _loaded(tmp_path / "there")
    eight = [each for each in weights if ".self_attn." in each]
    assert (len(weights), len(eight)) == (MODULES, MODULES - IN_MLP)
    for each in eight:
        scales = stored[f"{each}_scale"]
        if name == "beside-mxfp8":
            scales = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
        assert weights[each].equal(stored[each].float() * scales.float()), each
    record = read_json(tmp_path / "there" / "config.json")["quantization_config"]
    by_format = {group["format"]: group for group in record["config_groups"].values()}
    inputs = by_format["float-quantized" if name == "beside-fp8" else "mxfp8-quantized"]
    assert inputs["input_activations"]["dynamic"] is (name == "beside-mxfp8")
    scales = [each for each in read_tensors(tmp_path / "there") if each.endswith("j.input_scale")]
    assert len(scales) == (len(eight) if name == "beside-fp8" else 0)


def test_compressed_tensors_mixed_export_there_and_back(
    compressed: dict[str, Any], tmp_path: Path
) -> None:
    """Its FP8 has static scales of activations, too; in BF16, which become F32."""
    export = compressed["beside-fp8"][0]
    differ, rounded = _there_and_back(export, tmp_path, ("modelopt", "compressed-tensors"))
    inputs = [tensor for tensor in differ if tensor.endswith(".input_scale")]  # F32, not BF16
    assert {tensor.rpartition(".")[0] for tensor in differ if tensor not in inputs} <= set(rounded)
    before, after = read_tensors(export), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert len(inputs) == MODULES - IN_MLP
    # Nothing was calibrated: they are whatever was in memory, also NaN.
    left, right = ([each[tensor].float().item() for tensor in inputs] for each in (before, after))
    np.testing.assert_array_equal(left, right)
    weights = _loaded(tmp_path / "back")
    attention = [name for name in weights if ".self_attn." in name]
    assert attention
    for name in attention:
        assert weights[name].equal(before[name].float() * before[f"{name}_scale"].float()), name


def test_fp8_cache_travels_to_compressed_tensors_and_back(
    modelopt: Exports, compressed: dict[str, Any], tmp_path: Path
) -> None:
    """Its scales get the names that compressed-tensors itself gives them, and both records of it
    say FP8.
    """
    export, own = modelopt["cache"], compressed["cache"][0]
    differ, rounded = _there_and_back(export, tmp_path, ("compressed-tensors", "modelopt"))
    assert {tensor.rpartition(".")[0] for tensor in differ} <= set(rounded)
    assert all(tensor.endswith(("weight_scale_2", "input_scale")) for tensor in differ)
    before, there = read_tensors(export), read_tensors(tmp_path / "there")
    moved = {
        name: name.replace(f"{name[-7]}_proj.", "")
        for name in before
        if name.endswith((".k_scale", ".v_scale"))
    }
    assert moved["model.layers.1.self_attn.v_proj.v_scale"] == "model.layers.1.self_attn.v_scale"
    assert set(moved.values()) == {
        name for name in read_tensors(own) if name.endswith((".k_scale", ".v_scale"))
    }
    assert (
        differing(
            {new: before[old].reshape(1) for old, new in moved.items()},
            {new: there[new] for new in moved.values()},
        )
        == []
    )
    assert not moved.keys() & there.keys()
    ours, theirs = (
        read_json(folder / "config.json")["quantization_config"]
        for folder in (tmp_path / "there", own)
    )
    assert ours["kv_cache_scheme"].items() <= theirs["kv_cache_scheme"].items()
    config, nested = (
        read_json(tmp_path / "back" / file) for file in ("config.json", "hf_quant_config.json")
    )
    first = read_json(export / "config.json")["quantization_config"]
    assert config["quantization_config"]["kv_cache_scheme"] == first["kv_cache_scheme"]
    assert nested["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_fp8_cache_of_compressed_tensors_travels_to_modelopt_and_back(
    compressed: dict[str, Any], tmp_path: Path
) -> None:
    export = compressed["cache"][0]
    differ, rounded = _there_and_back(export, tmp_path, ("modelopt", "compressed-tensors"))
    assert {tensor.rpartition(".")[0] for tensor in differ} <= set(rounded)
    assert all(tensor.endswith("weight_global_scale") for tensor in differ)
    assert "model.layers.0.self_attn.k_proj.k_scale" in read_tensors(tmp_path / "there")
    assert (
        read_json(tmp_path / "there/hf_quant_config.json")["quantization"]["kv_cache_quant_algo"]
        == "FP8"
    )


def test_a_dialect_that_knows_no_cache_refuses_one(modelopt: Exports, tmp_path: Path) -> None:
    _refused(
        "dialect-cache",
        "transcode",
        modelopt["cache"],
        "-o",
        tmp_path / "other",
        "--dialect",
        "quark",
    )
    assert list(tmp_path.iterdir()) == []


def test_input_scales_of_some_modules_are_left_out(
    modelopt: Exports, compressed: dict[str, Any], tmp_path: Path
) -> None:
    """A warning says so: engines would not know the names, and the record of the result has one
    word for all modules.
    """
    for export, dialect, ending in (
        (modelopt["w4a4-beside-w4a16"], "compressed-tensors", ".input_scale"),
        (compressed["w4a4-beside-w4a16"][0], "modelopt", ".input_global_scale"),
    ):
        before = read_tensors(export)
        assert sum(name.endswith(ending) for name in before) == IN_MLP
        fp4convert("transcode", export, "-o", tmp_path / dialect, "--dialect", dialect, "-q")
        assert not [
            name for name in read_tensors(tmp_path / dialect) if "input" in name.rpartition(".")[2]
        ]
        assert _facts(tmp_path / dialect)[1:3] == ("nvfp4", 16)
        assert _findings(tmp_path / dialect) == []
        left, right = (
            _restored(export, tmp_path / f"{dialect}-left"),
            _restored(tmp_path / dialect, tmp_path / f"{dialect}-right"),
        )
        assert left.keys() == right.keys()
        assert all(left[name].allclose(right[name], rtol=2.0**-22, atol=0) for name in left)


def test_modelopts_mxfp4_travels_to_compressed_tensors_and_quark(
    modelopt: Exports, tmp_path: Path
) -> None:
    """Quark has ModelOpt's names for it; ModelOpt's own record is one that engines refuse, and is
    not written.
    """
    assert _there_and_back(modelopt["mxfp4"], tmp_path, ("compressed-tensors", "quark")) == ([], [])
    _refused(
        "dialect-format",
        "transcode",
        tmp_path / "there",
        "-o",
        tmp_path / "never",
        "--dialect",
        "modelopt",
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", COMPRESSED)
def test_inspect_knows_compressed_tensors_exports(compressed: dict[str, Any], name: str) -> None:
    mixed = {
        "beside-fp8": (None, MODULES),
        "beside-int8": (4, IN_MLP),
        "w4a4-beside-w4a16": (None, MODULES),
    }
    plain = {"nvfp4": 4, "mxfp4": 4, "nvfp4a16": 16, "mxfp4a16": 16, "cache": 16}
    fmt = "mxfp4" if name.startswith("mxfp4") else "nvfp4"
    told = "mixed" if name == "beside-fp8" else fmt
    export = compressed[name][0]
    assert _facts(export) == (
        "compressed-tensors",
        told,
        *(mixed.get(name) or (plain[name], MODULES)),
    )
    findings = {
        "w4a4-beside-w4a16": [("note", "scales-idle")],
        "beside-int8": [("warning", "stack-unread")],  # its integers are read by nothing here
    }
    assert _findings(export) == findings.get(name, [])
    record = read_json(export / "config.json")["quantization_config"]
    assert record["format"] == ("mixed-precision" if name in MIXED else f"{fmt}-pack-quantized")


@pytest.mark.parametrize("name", SOUND)
def test_dequantize_equals_compressed_tensors_own(
    compressed: dict[str, Any], source: Path, tmp_path: Path, name: str
) -> None:
    export, expected = compressed[name]
    restored = _restored(export, tmp_path / "restored", "bf16")
    assert len(expected) == MODULES
    assert differing({weight: restored[weight] for weight in expected}, expected) == []
    assert restored.keys() == read_tensors(source).keys()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dialect", ["modelopt", "quark"])
@pytest.mark.parametrize("name", ["nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4"])
def test_compressed_tensors_exports_there_and_back(
    compressed: dict[str, Any], tmp_path: Path, name: str, dialect: str
) -> None:
    """Every byte but that of global scales and input scales that --json names."""
    export = compressed[name][0]
    if dialect == "modelopt" and name.startswith("mxfp4"):
        return _refused(
            "dialect-format", "transcode", export, "-o", tmp_path / "never", "--dialect", dialect
        )
    differ, rounded = _there_and_back(export, tmp_path, (dialect, "compressed-tensors"))
    assert {tensor.rpartition(".")[0] for tensor in differ} <= set(rounded)
    assert all(tensor.endswith("_global_scale") for tensor in differ)
    assert _facts(tmp_path / "there")[2] == _facts(export)[2]
