"""MLX: mlx-lm loads and runs what the command writes, and the command reads what MLX itself
quantized.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_export import GROUP_SIZES, export_mlx
from tiny_models import (
    differing,
    fp4convert,
    fp4convert_json,
    is_quantized,
    make_llama,
    make_mixtral,
    make_qwen3_moe,
    read_json,
    read_tensors,
)
from torch_formulas import mxfp4_weight, nvfp4_weight

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(sys.platform != "linux", reason="the CPU build of MLX is for Linux"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODULES = 14
LAYER_TYPES = ["sliding_attention", "full_attention"]
EMBEDDINGS = {"model.embed_tokens.weight", "lm_head.weight"}
every_format = pytest.mark.parametrize("fmt", GROUP_SIZES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def artifacts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> the command's artifact: MXFP4 respelled,
    NVFP4 quantized with a global scale of 1.
    """
    folder = tmp_path_factory.mktemp("artifacts")
    fp4convert("quantize", source, "--format", "mxfp4", "-o", folder / "first", "-q")
    fp4convert("transcode", folder / "first", "-o", folder / "mxfp4", "--dialect", "mlx", "-q")
    fp4convert(
        "quantize", source, "--format", "nvfp4", "--dialect", "mlx", "-o", folder / "nvfp4", "-q"
    )
    return {fmt: folder / fmt for fmt in GROUP_SIZES}


@pytest.fixture(scope="module")
def restored(
    artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Format -> the artifact's weights, turned back by the command in float32."""
    folder = tmp_path_factory.mktemp("restored")
    return {fmt: _restored(artifact, folder / fmt) for fmt, artifact in artifacts.items()}


@pytest.fixture(scope="module")
def owns(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> what mlx-lm's own conversion writes, embeddings and head quantized as well."""
    return {fmt: export_mlx(source, fmt, tmp_path_factory.mktemp(fmt)) for fmt in GROUP_SIZES}


@pytest.fixture(scope="module")
def linears(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with the embeddings left alone, which no other engine reads in four bits."""
    return {
        fmt: export_mlx(source, fmt, tmp_path_factory.mktemp(fmt), left="embed")
        for fmt in GROUP_SIZES
    }


def _restored(artifact: Path, folder: Path, dtype: str = "fp32") -> dict[str, Any]:
    """Every weight that was four-bit, by the command."""
    fp4convert("dequantize", artifact, "-o", folder, "--dtype", dtype, "-q")
    scaled = {
        f"{name.removesuffix('.scales')}.weight"
        for name in read_tensors(artifact)
        if name.endswith(".scales")
    }
    return {name: tensor for name, tensor in read_tensors(folder).items() if name in scaled}


def _load(folder: Path) -> Any:
    """The model as mlx-lm loads it; strict: a tensor that is missing or of another shape is an
    error.
    """
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


def _torch(array: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(array))


def _engine_weights(model: Any) -> dict[str, Any]:
    """Name -> float32 weight of every four-bit module that mlx-lm made, by mx.dequantize."""
    import mlx.core as mx

    return {
        f"{name}.weight": _torch(
            mx.dequantize(module.weight, module.scales, mode=module.mode, dtype=mx.float32)
        )
        for name, module in model.named_modules()
        if "scales" in module
    }


def _dequantized(stored: dict[str, Any], stem: str) -> Any:
    import mlx.core as mx

    codes, scales = stored[f"{stem}.weight"], stored[f"{stem}.scales"]
    return mx.dequantize(codes, scales, mode="mxfp4", dtype=mx.float32)


def _logits(model: Any) -> Any:
    import mlx.core as mx
    import numpy as np

    return _torch(model(mx.array(np.arange(1, 49).reshape(3, 16))).astype(mx.float32))


def _formula(tensors: dict[str, Any], fmt: str) -> dict[str, Any]:
    """What the tensors of an MLX checkpoint are worth; eight codes of a U32 lie as little-endian
    bytes of two codes do.
    """
    import torch

    formula = {"mxfp4": mxfp4_weight, "nvfp4": nvfp4_weight}[fmt]
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    return {
        f"{m}.weight": formula(tensors[f"{m}.weight"].view(torch.uint8), tensors[f"{m}.scales"])
        for m in modules
    }


@every_format
def test_engine_holds_the_weights_that_dequantize_writes(
    artifacts: dict[str, Path], restored: Any, fmt: str
) -> None:
    """Every bit of every float32, the sign of zeros included."""
    weights = _engine_weights(_load(artifacts[fmt]))
    assert len(weights) == MODULES
    assert differing(weights, restored[fmt]) == []


@every_format
def test_dequantize_equals_the_formula(artifacts: dict[str, Path], restored: Any, fmt: str) -> None:
    assert differing(restored[fmt], _formula(read_tensors(artifacts[fmt]), fmt)) == []


@every_format
def test_engine_agrees_with_the_plain_model(
    artifacts: dict[str, Path], tmp_path: Path, fmt: str
) -> None:
    """mlx-lm runs both; only the order of its sums differs."""
    _restored(artifacts[fmt], tmp_path / "plain", "bf16")
    logits, plain = (_logits(_load(folder)) for folder in (artifacts[fmt], tmp_path / "plain"))
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert (logits - plain).abs().max() < 0.2 * logits.std()


@every_format
def test_record_is_the_one_that_mlx_writes(
    artifacts: dict[str, Path], owns: dict[str, Path], fmt: str
) -> None:
    """But for modules that are left alone, of which mlx-lm's own conversion has none."""
    ours, theirs = (read_json(folder / "config.json") for folder in (artifacts[fmt], owns[fmt]))
    for key in ("quantization", "quantization_config"):
        assert {name: value for name, value in ours[key].items() if value is not False} == theirs[
            key
        ]


def test_other_global_scales_are_refused(source: Path, tmp_path: Path) -> None:
    """MLX's layers have no place for one: nothing is multiplied in silence, nothing is written."""
    fp4convert("quantize", source, "--format", "nvfp4", "-o", tmp_path / "nvfp4", "-q")
    options = ("-o", tmp_path / "mlx", "--dialect", "mlx", "--json")
    text = fp4convert("transcode", tmp_path / "nvfp4", *options, expect=2)
    assert '"dialect-global-scale"' in text
    assert [path.name for path in tmp_path.iterdir()] == ["nvfp4"]


@every_format
def test_inspect_knows_mlxs_own_checkpoint(owns: dict[str, Path], fmt: str) -> None:
    found = fp4convert_json("inspect", owns[fmt])
    assert (found["format"], found["dialect"]) == (fmt, "mlx")
    assert found["tensors"] == {"quantized": MODULES + len(EMBEDDINGS), "other": 5}
    assert found["activations"] == 16
    assert found["healthy"]


@every_format
def test_dequantize_equals_mlxs_own(owns: dict[str, Path], tmp_path: Path, fmt: str) -> None:
    restored = _restored(owns[fmt], tmp_path / "restored")
    assert {name for name in restored if not is_quantized(name)} == EMBEDDINGS
    assert differing(restored, _engine_weights(_load(owns[fmt]))) == []
    assert differing(restored, _formula(read_tensors(owns[fmt]), fmt)) == []


@every_format
def test_transcoded_checkpoint_holds_the_same_bytes(
    linears: dict[str, Path], tmp_path: Path, fmt: str
) -> None:
    """In compressed-tensors, NVFP4 has a global scale: it is 1."""
    import torch

    fp4convert(
        "transcode", linears[fmt], "-o", tmp_path / "other", "--dialect", "compressed-tensors", "-q"
    )
    expected = {}
    for name, tensor in (theirs := read_tensors(linears[fmt])).items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            expected[f"{module}.weight_scale"] = (
                tensor.view(torch.float8_e4m3fn) if fmt == "nvfp4" else tensor
            )
            expected |= {f"{module}.weight_global_scale": torch.ones(1)} if fmt == "nvfp4" else {}
        elif f"{module}.scales" in theirs:
            expected[f"{module}.weight_packed"] = tensor.view(torch.uint8)
        else:
            expected[name] = tensor
    assert differing(read_tensors(tmp_path / "other"), expected) == []
    fp4convert("transcode", tmp_path / "other", "-o", tmp_path / "back", "--dialect", "mlx", "-q")
    assert differing(read_tensors(tmp_path / "back"), theirs) == []


@every_format
def test_transcoded_checkpoint_dequantizes_to_the_same(
    linears: dict[str, Path], tmp_path: Path, fmt: str
) -> None:
    fp4convert(
        "transcode", linears[fmt], "-o", tmp_path / "other", "--dialect", "compressed-tensors", "-q"
    )
    fp4convert("dequantize", tmp_path / "other", "-o", tmp_path / "after", "--dtype", "fp32", "-q")
    before, after = _restored(linears[fmt], tmp_path / "before"), read_tensors(tmp_path / "after")
    assert differing({name: after[name] for name in before}, before) == []


@every_format
def test_engine_loads_what_came_back(linears: dict[str, Path], tmp_path: Path, fmt: str) -> None:
    fp4convert(
        "transcode", linears[fmt], "-o", tmp_path / "other", "--dialect", "compressed-tensors", "-q"
    )
    fp4convert("transcode", tmp_path / "other", "-o", tmp_path / "back", "--dialect", "mlx", "-q")
    ours, theirs = _load(tmp_path / "back"), _load(linears[fmt])
    assert differing(_engine_weights(ours), _engine_weights(theirs)) == []
    assert _logits(ours).equal(_logits(theirs))


def test_four_bit_embeddings_are_refused_elsewhere(owns: dict[str, Path], tmp_path: Path) -> None:
    options = ("-o", tmp_path / "other", "--dialect", "compressed-tensors", "--json")
    assert '"dialect-module"' in fp4convert("transcode", owns["mxfp4"], *options, expect=2)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """(family, format) -> a mixture, and what mlx-lm's own conversion makes of it: stacks, and of
    Qwen3-MoE routers of eight bits.
    """
    made = {}
    for family, make in (("qwen3_moe", make_qwen3_moe), ("mixtral", make_mixtral)):
        source = make(tmp_path_factory.mktemp(family))
        config = read_json(source / "config.json")
        # what mlx-lm wants to read of older checkpoints
        older = {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
        older["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (source / "config.json").write_text(json.dumps({**older, **config}))
        for fmt in GROUP_SIZES:
            folder = tmp_path_factory.mktemp(f"{family}-{fmt}")
            made[family, fmt] = source, _make_mixture(source, fmt, folder)
    return made


def _make_mixture(source: Path, fmt: str, folder: Path) -> Path:
    """By mlx-lm, which asks the model what becomes of each module."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    predicate = getattr(model, "quant_predicate", lambda name, module: True)

    def is_chosen(name: str, module: Any) -> Any:
        return "embed" not in name and "lm_head" not in name and predicate(name, module)

    size = GROUP_SIZES[fmt]
    quantized, record = quantize_model(model, config, size, 4, mode=fmt, quant_predicate=is_chosen)
    save_model(folder, quantized)
    save_config(record, folder / "config.json")
    return folder


def _apart(name: str, weight: Any) -> dict[str, Any]:
    """A stack of MLX as transformers' checkpoints have it, by hand."""
    parent, found, leaf = name.partition(".switch_mlp.")
    if not found:
        return {name: weight}
    if "block_sparse_moe" in parent:
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        leaf = f"{names[leaf.removesuffix('.weight')]}.weight"
    return {f"{parent}.experts.{number}.{leaf}": one for number, one in enumerate(weight)}


def _values_by_mlx(model: Any) -> dict[str, Any]:
    import mlx.core as mx

    values = {}
    for name, module in model.named_modules():
        if "scales" in module:
            # affine in float32, where nothing is rounded but the result
            is_affine = module.mode == "affine"
            numbers = [module.scales, module.biases] if is_affine else [module.scales]
            if is_affine:
                numbers = [number.astype(mx.float32) for number in numbers]
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            if not is_affine:
                how["dtype"] = mx.float32
            values |= _apart(
                f"{name}.weight", _torch(mx.dequantize(module.weight, *numbers, **how))
            )
    return values


@every_format
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.sweep(2)
def test_mlxs_mixtures_are_read(
    mixtures: dict[tuple[str, str], tuple[Path, Path]], tmp_path: Path, family: str, fmt: str
) -> None:
    """Inspected, verified against the source, turned back as MLX dequantizes them, and carried."""
    source, artifact = mixtures[family, fmt]
    found = fp4convert_json("inspect", artifact, "--full")
    assert (found["format"], found["dialect"], found["healthy"]) == (fmt, "mlx", True)
    assert not [one for one in found["findings"] if one["code"] == "stack-unread"]
    assert {one["engine"] for one in found["engines"] if one["loads"]} == {"mlx"}
    report = fp4convert_json("verify", artifact, "--source", source, "--min-sqnr", 15)
    assert report["passed"], report["findings"]
    fp4convert("dequantize", artifact, "-o", tmp_path / "plain", "--dtype", "fp32", "-q")
    plain, values = read_tensors(tmp_path / "plain"), _values_by_mlx(_load(artifact))
    assert plain.keys() == read_tensors(source).keys()
    affine = {name for name in values if name.endswith("mlp.gate.weight")}
    assert len(affine) == (2 if family == "qwen3_moe" else 0)
    exact = {name: value for name, value in values.items() if name not in affine}
    assert differing({name: plain[name] for name in exact}, exact) == []
    for name in affine:
        assert plain[name].allclose(values[name], rtol=2.0**-22, atol=1e-9)
    words = ("--dialect", "compressed-tensors", "-q")
    fp4convert("transcode", artifact, "-o", tmp_path / "carried", *words)
    fp4convert("dequantize", tmp_path / "carried", "-o", tmp_path / "x", "--dtype", "fp32", "-q")
    after = read_tensors(tmp_path / "x")
    assert differing({name: after[name] for name in exact}, exact) == []
    assert (
        differing(
            {name: after[name] for name in affine},
            {name: plain[name].bfloat16() for name in affine},
        )
        == []
    )


def test_gptoss_with_eight_bits_beside_its_stacks_is_read(tmp_path: Path) -> None:
    """As mlx-community publishes it: experts in MXFP4, all else affine; mlx-lm made the file, and
    mx.dequantize the values, which transformers' class then holds, biases of experts too.
    """
    import mlx.core as mx
    import torch
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import gpt_oss
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 32}
    rest = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    model = gpt_oss.Model(gpt_oss.ModelArgs(model_type="gpt_oss", **sizes, **rest))
    four = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    record: dict[str, Any] = dict(four)

    def form_of(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        if "experts" in path:
            return four
        record[path] = {"group_size": 64, "bits": 8}
        return record[path]

    for path, module in model.named_modules():
        if path.endswith("_proj") and ".experts." in path:
            module.bias = mx.random.normal(module.bias.shape)
    nn.quantize(model, class_predicate=form_of, **four)
    stored, source = dict(tree_flatten(model.parameters())), tmp_path / "source"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), stored, {"format": "mlx"})
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **sizes, **rest}
    config |= {"quantization": record, "quantization_config": record, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    found = fp4convert_json("inspect", source, "--for", "mlx")
    assert found["healthy"]
    assert found["tensors"]["quantized"] == 18
    fp4convert("dequantize", source, "-o", tmp_path / "out", "--dtype", "fp32", "-q")
    loaded, lacking = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(lacking.values())
    ours = loaded.model.layers[0].mlp.experts
    stem = "model.layers.0.mlp.experts"
    values = {
        part: _torch(_dequantized(stored, f"{stem}.{part}"))
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    biases = {part: _torch(stored[f"{stem}.{part}.bias"].astype(mx.float32)) for part in values}
    both = [
        torch.stack([one["gate_proj"], one["up_proj"]], 2).flatten(1, 2) for one in (values, biases)
    ]
    assert torch.equal(ours.gate_up_proj.detach().float(), both[0].float().mT)
    assert torch.equal(ours.down_proj.detach().float(), values["down_proj"].float().mT)
    assert torch.equal(ours.gate_up_proj_bias.detach().float(), both[1])
    assert torch.equal(ours.down_proj_bias.detach().float(), biases["down_proj"])
    fp4convert("transcode", source, "-o", tmp_path / "native", "--dialect", "gpt-oss", "-q")
    assert f"{stem}.gate_up_proj_bias" in read_tensors(tmp_path / "native")


def test_stacks_have_the_names_that_mlx_lms_classes_have() -> None:
    """By the table of architectures: 3-dimensional weights of experts in any class of mlx-lm."""
    from fp4convert.checkpoint.class_table import _read_family, _read_index
    from fp4convert.checkpoint.dialects.mlx import STACK

    seen = 0
    for name in _read_index()["classes"]["mlx"]:
        table = _read_family("mlx", name)
        assert table is not None
        for part in table["parts"]:
            letter, _, leaf = part.partition(" ")
            if letter in ("X3", "Y3") and "o_a_proj" not in leaf:
                seen += 1
                assert STACK.fullmatch(f"model.layers.0.{leaf.removesuffix('.weight')}"), leaf
    assert seen > 100
