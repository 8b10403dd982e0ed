"""Sources that are quantized already: FP4 from what an outside judge says they are worth, in float32, without a stage between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from families_dense import DECODER, SIZES
from families_experts import DENSE_FIRST, EXPERTS_SECOND, LATENT, MIXTRAL, SHARED_SECOND
from family import PARTS, Family, Tensors, build, decoded, encoded, logits, modules_of, spelled, write_values
from packings import Packing, compressed, fp8_blocks, modelopt_fp8, pack_checkpoint
from tiny_models import differing, fp4convert, read_json, read_tensors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]

# Multiples of 128: transformers refuses other FP8 matrices, or takes their blocks for smaller ones.
WIDE = {**SIZES, "hidden_size": 256, "num_attention_heads": 6, "head_dim": 64, "intermediate_size": 512}
WIDE_LATENT = {
    **{**LATENT, "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    **{"head_dim": 32, "v_head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128},
}
UNEVEN_LATENT = {**WIDE_LATENT, "hidden_size": 208, "kv_lora_rank": 128, "intermediate_size": 336, "moe_intermediate_size": 144}
LATENT_ATTENTION = "model.layers.{0-1}.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj}"
DEEPSEEK = (*DENSE_FIRST, *EXPERTS_SECOND, *SHARED_SECOND)
MTP = {
    "model.layers.2.eh_proj.weight": (256, 512),
    "model.layers.2.enorm.weight": (256,),
    "model.layers.2.mlp.experts.0.gate_proj.weight": (128, 256),
    "model.layers.2.self_attn.o_proj.weight": (256, 256),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A family whose checkpoint is published in some packing.

    packed   the modules that are, in the notation of families
    options  how transformers reads the source itself, where it can: the judge's own judge
    """

    family: Family
    packing: Callable[[], Packing]
    packed: tuple[str, ...]
    options: Callable[[], Mapping[str, Any]] | None = None

    def __str__(self) -> str:
        return self.family.name


def _fine_grained(*block: int) -> Mapping[str, Any]:
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config(dequantize=True, weight_block_size=block)}


def _decompressing() -> Mapping[str, Any]:
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _deepseek(name: str, config: Mapping[str, Any], extra: Mapping[str, tuple[int, ...]] | None = None) -> Family:
    beside = "model.layers.2." if extra else ""
    return Family(name, "DeepseekV3ForCausalLM", config, DEEPSEEK, runs="restored", extra=extra, beside=beside)


def _qwen3(name: str, packing: Callable[[], Packing], has_engine: bool = True) -> Case:
    return Case(Family(name, "Qwen3ForCausalLM", WIDE, DECODER), packing, DECODER, _decompressing if has_engine else None)


MINIMAX = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
CASES = (
    Case(
        _deepseek("deepseek_v3-fp8", WIDE_LATENT, MTP),
        partial(fp8_blocks, 128, 128),
        (LATENT_ATTENTION, *DEEPSEEK, "model.layers.2.{eh_proj,mlp.experts.0.gate_proj,self_attn.o_proj}"),
        partial(_fine_grained, 128, 128),
    ),
    Case(_deepseek("deepseek_v3-fp8-uneven", UNEVEN_LATENT), partial(fp8_blocks, 128, 128), (LATENT_ATTENTION, *DEEPSEEK)),
    Case(
        Family("minimax_m2-fp8-e8m0", "MiniMaxM2ForCausalLM", MINIMAX, MIXTRAL, runs="restored"),
        partial(fp8_blocks, 32, 32, "float8_e8m0fnu"),
        ("model.layers.{0-1}.self_attn.{q_proj,k_proj,v_proj,o_proj}", *MIXTRAL),
        partial(_fine_grained, 32, 32),
    ),
    Case(
        Family("qwen3-mxfp8", "Qwen3ForCausalLM", WIDE, DECODER),
        partial(fp8_blocks, 1, 32, "uint8"),
        DECODER,
        partial(_fine_grained, 1, 32),
    ),
    Case(Family("qwen3-modelopt-fp8", "Qwen3ForCausalLM", WIDE, DECODER), modelopt_fp8, DECODER),
    _qwen3(
        "qwen3-ct-fp8-tensor", partial(compressed, "FP8"), has_engine=False
    ),  # of a static input_scale transformers knows nothing
    _qwen3("qwen3-ct-fp8-channel", partial(compressed, "FP8_DYNAMIC")),
    _qwen3("qwen3-ct-fp8-block", partial(compressed, "FP8_BLOCK")),
    _qwen3("qwen3-ct-mxfp8", partial(compressed, "MXFP8A16")),
    _qwen3("qwen3-ct-int4-asymmetric", partial(compressed, "W4A16_ASYM")),
    _qwen3("qwen3-ct-int8", partial(compressed, "W8A16")),
    Case(  # Kimi K2 Thinking: only the routed experts are packed
        Family("kimi_k2-int4", "DeepseekV3ForCausalLM", WIDE_LATENT, EXPERTS_SECOND, model_type="kimi_k2", runs="restored"),
        partial(compressed, "W4A16", "group", 32),
        EXPERTS_SECOND,
    ),
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Folders, and what the judge says they are worth, under the names of ordinary weights."""

    case: Case
    source: Path
    artifact: Path
    restored: Path
    judged: Tensors


@pytest.fixture(scope="module", params=CASES, ids=str)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, Tensors]:
    """A source, and what it is worth."""
    case: Case = request.param
    source = build(case.family, tmp_path_factory.mktemp(case.family.name) / "source")
    return case, source, pack_checkpoint(source, [(case.packing(), modules_of(*case.packed))])


@pytest.fixture(scope="module")
def done(packed: tuple[Case, Path, Tensors]) -> Conversion:
    """Its conversion, from nothing but the folder."""
    case, source, judged = packed
    artifact, restored = source.parent / "artifact", source.parent / "restored"
    fp4convert("quantize", source, "--format", "nvfp4", "-o", artifact, "-q")
    fp4convert("dequantize", artifact, "-o", restored, "-q")
    return Conversion(case, source, artifact, restored, judged)


def test_engine_reads_the_source_as_the_judge_does(packed: tuple[Case, Path, Tensors], tmp_path: Path) -> None:
    case, source, judged = packed
    if case.options is None:
        pytest.skip("transformers does not read this source")
    plain = write_values(source, {name: tensor.bfloat16() for name, tensor in judged.items()}, tmp_path / "plain")
    assert logits(case.family, source, **case.options()).equal(logits(case.family, plain))


def test_four_bit_modules_have_the_codes_of_the_judged_values(done: Conversion) -> None:
    quantized = {name: tensor for name, tensor in read_tensors(done.artifact).items() if name.endswith(PARTS)}
    expected = spelled(encoded(done.case.family, done.judged))
    assert sorted(quantized) == sorted(expected)
    assert differing(quantized, expected) == []


def test_kept_modules_become_bf16_and_no_scale_travels_alone(done: Conversion) -> None:
    others = {name: tensor for name, tensor in read_tensors(done.artifact).items() if not name.endswith(PARTS)}
    gone = {f"{module}.weight" for group in done.case.family.groups for module in group}
    expected = {name: tensor.bfloat16() for name, tensor in done.judged.items() if name not in gone}
    assert differing(others, expected) == []


def test_records_of_the_source_are_replaced(done: Conversion) -> None:
    ours, theirs = (read_json(folder / "config.json") for folder in (done.artifact, done.source))
    assert ours.pop("quantization_config")["format"] == "nvfp4-pack-quantized"
    theirs.pop("quantization_config")
    assert ours == theirs
    assert not (done.artifact / "hf_quant_config.json").exists()
    assert "quantization_config" not in read_json(done.restored / "config.json")


def test_logits_are_those_of_the_model_that_the_codec_made(done: Conversion, tmp_path: Path) -> None:
    family = done.case.family
    reference = logits(family, write_values(done.source, decoded(family, done.judged), tmp_path / "reference"))
    assert reference.isfinite().all()
    assert reference.std() > 0.01
    assert logits(family, done.artifact if family.runs == "artifact" else done.restored).equal(reference)
