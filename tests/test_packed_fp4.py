"""Sources whose experts, or all of whose layers, are four-bit already: their codes are taken over, or nothing of them is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_formulas as formulas
from ct_export import export_compressed
from families_experts import DEEPSEEK_V4, V4_EXPERTS, unprefixed
from family import PARTS, Family, Tensors, build, logits, modules_of, write_values
from packings import fp8_blocks, mxfp4_experts, pack_checkpoint
from test_engines_gptoss import _listed as gptoss_experts
from test_engines_gptoss import make_gptoss
from test_engines_modelopt import _export as export_modelopt
from tiny_models import differing, fp4convert, make_llama, read_json, read_tensors
from torch_formulas import mxfp4_weight

from fp4convert import codec
from fp4convert.formats import FORMATS

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]

V4 = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    {**DEEPSEEK_V4, "hidden_size": 256, "moe_intermediate_size": 128},
    V4_EXPERTS,
    published=unprefixed,
    extra={"mtp.0.e_proj.weight": (256, 256), "mtp.0.ffn.experts.0.w1.weight": (128, 256)},
    beside="mtp.",
)
V4_FP8 = (
    "layers.{0-1}.attn.{wq_a,wq_b,wkv,wo_a,wo_b}",
    "layers.{0-1}.ffn.shared_experts.{w1,w2,w3}",
    "mtp.0.e_proj",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and what its tensors are worth in float32, under the names that they have when every module has its own.

    four_bit  module -> its packed codes and block scales, as safetensors holds them
    judged    every tensor, as an ordinary weight
    """

    folder: Path
    format: str
    four_bit: dict[str, tuple[Any, Any]]
    judged: Tensors


def _gpt_oss(folder: Path) -> Source:
    """Every code and seven exponents; gates are the even rows of gate_up, ups the odd ones."""
    tensors = read_tensors(make_gptoss(folder))
    judged = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    four_bit = gptoss_experts(folder)
    return Source(
        folder, "mxfp4", four_bit, judged | {f"{name}.weight": mxfp4_weight(*parts) for name, parts in four_bit.items()}
    )


def _deepseek_v4(folder: Path) -> Source:
    """Routed experts in MXFP4, one for multi-token prediction among them, attention and the shared expert in FP8."""
    build(V4, folder)
    fp8, fp4 = fp8_blocks(128, 128, "float8_e8m0fnu", ".scale"), mxfp4_experts()
    experts = modules_of(*V4_EXPERTS)
    judged = pack_checkpoint(folder, [(fp8, modules_of(*V4_FP8)), (fp4, [*experts, "mtp.0.ffn.experts.0.w1"])])
    config = read_json(folder / "config.json")
    config["quantization_config"]["expert_dtype"] = config["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(folder)
    return Source(folder, "mxfp4", {name: (tensors[f"{name}.weight"], tensors[f"{name}.scale"]) for name in experts}, judged)


def _compressed_tensors(folder: Path) -> Source:
    plain = make_llama(folder.parent / "plain")
    export_compressed(plain, (("NVFP4A16", "Linear"),), folder)
    tensors, judged = read_tensors(folder), read_tensors(plain)
    four_bit = {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        packed, block_scales, divisor = (tensors[f"{module}.{part}"] for part in PARTS)
        four_bit[module] = (packed, block_scales)
        judged[f"{module}.weight"] = formulas.decoded(formulas.unpacked(packed), formulas.e4m3(block_scales) / divisor)
    return Source(folder, "nvfp4", four_bit, judged)


def _modelopt(folder: Path) -> Source:
    plain = make_llama(folder.parent / "plain")
    export_modelopt(plain, "NVFP4_DEFAULT_CFG", folder)
    tensors = read_tensors(folder)
    weights = formulas.quark_weights(tensors)
    four_bit = {name.removesuffix(".weight"): (tensors[name], tensors[f"{name}_scale"]) for name in weights}
    return Source(folder, "nvfp4", four_bit, read_tensors(plain) | weights)


MAKERS = {"gpt_oss": _gpt_oss, "deepseek_v4": _deepseek_v4, "nvfp4-ct": _compressed_tensors, "nvfp4-modelopt": _modelopt}


@pytest.fixture(scope="module", params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp(request.param) / "source"
    folder.mkdir()
    return MAKERS[request.param](folder)


@pytest.fixture(scope="module")
def artifact(source: Source) -> Path:
    """The source as NVFP4 in compressed-tensors, from nothing but its folder."""
    folder = source.folder.parent / "artifact"
    fp4convert("quantize", source.folder, "--format", "nvfp4", "-o", folder, "-q")
    return folder


def _four_bit(folder: Path) -> tuple[dict[str, tuple[Any, Any]], Tensors]:
    """(module -> packed codes and block scales, every other tensor) of an artifact in compressed-tensors."""
    tensors = read_tensors(folder)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    parts = {module: (tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]) for module in modules}
    return parts, {name: tensor for name, tensor in tensors.items() if not name.endswith(PARTS)}


def test_the_same_modules_are_four_bit_and_all_else_is_bf16(source: Source, artifact: Path) -> None:
    modules, others = _four_bit(artifact)
    assert sorted(modules) == sorted(source.four_bit)
    gone = {f"{module}.weight" for module in modules}
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in source.judged.items()}
    assert differing(others, {name: tensor for name, tensor in expected.items() if name not in gone}) == []


def test_nothing_is_lost(source: Source, artifact: Path, tmp_path: Path) -> None:
    """Of MXFP4 every value, in float32; of NVFP4 every code and block scale."""
    modules, _ = _four_bit(artifact)
    if source.format == "nvfp4":
        assert differing(_flat(modules), _flat(source.four_bit)) == []
        return
    fp4convert("dequantize", artifact, "-o", tmp_path / "restored", "--dtype", "fp32", "-q")
    restored = read_tensors(tmp_path / "restored")
    weights = [f"{module}.weight" for module in source.four_bit]
    assert differing({name: restored[name] for name in weights}, {name: source.judged[name] for name in weights}) == []


def _flat(modules: dict[str, tuple[Any, Any]]) -> Tensors:
    return {f"{module} {number}": part for module, parts in modules.items() for number, part in enumerate(parts)}


def test_as_mxfp4_codes_are_taken_over_or_made_of_the_judged_values(source: Source, tmp_path: Path) -> None:
    fp4convert("quantize", source.folder, "--format", "mxfp4", "-o", tmp_path / "artifact", "-q")
    modules, _ = _four_bit(tmp_path / "artifact")
    made = {module: tuple(part.view(torch.uint8) for part in parts) for module, parts in modules.items()}
    if source.format == "mxfp4":
        expected = {module: tuple(part.view(torch.uint8) for part in parts) for module, parts in source.four_bit.items()}
    else:
        expected = {module: _encoded(source.judged[f"{module}.weight"]) for module in source.four_bit}
    assert differing(_flat(made), _flat(expected)) == []


def _encoded(weight: Any) -> tuple[Any, Any]:
    """Codes and block scales by the reference codec."""
    value = codec.quantize(weight.float().numpy(), FORMATS["mxfp4"], "even")
    rows, columns = value.shape
    packed, block_scales = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (value.packed, value.block_scales))
    return packed.reshape(rows, columns // 2), block_scales.reshape(rows, columns // 32)


def test_deepseek_v4_computes_what_transformers_computes_of_the_source(tmp_path: Path) -> None:
    """It reads the published form, FP4 and FP8, and the restored one, and nothing was lost between them."""
    from transformers import FineGrainedFP8Config

    source = _deepseek_v4(tmp_path / "source")
    fp4convert("quantize", source.folder, "--format", "nvfp4", "-o", tmp_path / "artifact", "-q")
    fp4convert("dequantize", tmp_path / "artifact", "-o", tmp_path / "restored", "-q")
    config = FineGrainedFP8Config(dequantize=True, scale_fmt="ue8m0", expert_dtype="fp4")
    reference = logits(V4, source.folder, quantization_config=config)
    plain = write_values(source.folder, {name: tensor.bfloat16() for name, tensor in source.judged.items()}, tmp_path / "plain")
    assert logits(V4, plain).equal(reference), "the judge and transformers differ"
    assert logits(V4, tmp_path / "restored").equal(reference)
