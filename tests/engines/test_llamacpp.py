"""llama.cpp: it loads and runs the GGUF files that the command writes, from a GGUF file and from an
artifact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    differing,
    fp4convert,
    fp4convert_json,
    is_quantized,
    make_llama,
    make_qwen2,
    make_qwen3,
    read_tensors,
)
from torch_formulas import decoded, e4m3, mxfp4_weight, unpacked

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODULES, VOCABULARY, BLOCKS = 14, 320, 2
HEADS = {"q_proj": 4, "k_proj": 2}
MAKERS = {"llama": make_llama, "qwen3": make_qwen3}
FILE_TYPES = {"bf16": 32, "mxfp4": 38, "nvfp4": 39}  # LLAMA_FTYPE_MOSTLY_* of llama.h
PROMPT = [1, *range(260, 275)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
every_kind = pytest.mark.parametrize("kind", MAKERS)
every_format = pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])


@dataclass(frozen=True, slots=True)
class Models:
    """A checkpoint, the same as a GGUF file in bfloat16, and what the command makes of each: GGUF
    files, and an artifact.
    """

    checkpoint: Path
    template: Path
    artifact: Path
    quantized: Path
    transcoded: Path

    def made(self, way: str) -> Path:
        return {"quantize": self.quantized, "transcode": self.transcoded}[way]


Make = Callable[[str, str], Models]
every_way = pytest.mark.parametrize("way", ["quantize", "transcode"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(architecture, format) -> its models, made once; artifacts of NVFP4 store the multiplier that
    GGUF stores too.
    """

    @cache
    def source(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        checkpoint = MAKERS[kind](folder / "checkpoint")
        return checkpoint, write_gguf(checkpoint, kind, folder / "tiny.gguf")

    @cache
    def models(kind: str, fmt: str) -> Models:
        folder, (checkpoint, template) = tmp_path_factory.mktemp(f"{kind}-{fmt}"), source(kind)
        artifact, quantized, transcoded = (
            folder / name for name in ("artifact", "quantized", "transcoded")
        )
        dialect = {"mxfp4": "compressed-tensors", "nvfp4": "modelopt"}[fmt]
        fp4convert(
            "quantize", template, "--format", fmt, "--dialect", "gguf", "-o", quantized, "-q"
        )
        fp4convert(
            "quantize", checkpoint, "--format", fmt, "--dialect", dialect, "-o", artifact, "-q"
        )
        fp4convert(
            "transcode",
            artifact,
            "-o",
            transcoded,
            "--dialect",
            "gguf",
            "--template",
            template,
            "-q",
        )
        (other,) = transcoded.glob("*.gguf")
        return Models(checkpoint, template, artifact, quantized / "tiny.gguf", other)

    return models


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of transformers."""
    module, _, part = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{part}"
    _, _, block, inner = module.split(".", 3)
    return f"blk.{block}.{NAMES[inner]}.{part}"


def permuted(name: str, rows: Any, kind: str) -> Any:
    """Rows in the order of llama.cpp, whose rotary embedding of Llama turns neighbours; of Qwen3,
    halves, as transformers.
    """
    heads = HEADS.get(name.split(".")[-2]) if kind == "llama" else None
    return (
        rows if heads is None else rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    )


def unpermuted(name: str, rows: Any, kind: str) -> Any:
    heads = HEADS.get(name.split(".")[-2]) if kind == "llama" else None
    return (
        rows if heads is None else rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    )


def write_gguf(checkpoint: Path, kind: str, path: Path) -> Path:
    """The checkpoint as llama.cpp's own converter would write it: matrices in bfloat16, norms in
    float32.
    """
    import gguf
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(path, kind)
    _add_metadata(writer, kind)
    for name, tensor in read_tensors(checkpoint).items():
        rows = permuted(name, tensor, kind).float().numpy()
        if rows.ndim == 1:
            writer.add_tensor(gguf_name(name), rows)
        else:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), quantize(rows, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: Any, kind: str) -> None:
    writer.add_name(f"tiny {kind}")
    writer.add_file_type(FILE_TYPES["bf16"])
    writer.add_quantization_version(2)
    writer.add_context_length(64)
    writer.add_embedding_length(128)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS["q_proj"])
    writer.add_head_count_kv(HEADS["k_proj"])
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    byte_tokens, words = (
        [f"<0x{byte:02X}>" for byte in range(256)],
        [f"▁t{number}" for number in range(61)],
    )
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_tokens, *words])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 61])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _read(path: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def _values(tensor: Any) -> Any:
    """Float32 of a GGUF tensor, of NVFP4 without its global scale, by llama.cpp's own Python
    package.
    """
    import torch
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _weights(path: Path, checkpoint: Path, kind: str) -> dict[str, Any]:
    """Name in transformers -> float32 tensor of a GGUF file, its rows back in the order of
    transformers.
    """
    tensors, weights = _read(path), {}
    for name in read_tensors(checkpoint):
        stored = gguf_name(name)
        values, scale = (
            _values(tensors[stored]),
            tensors.get(f"{stored.removesuffix('.weight')}.scale"),
        )
        weights[name] = unpermuted(name, values if scale is None else values * _values(scale), kind)
    return weights


def _four_bit(path: Path) -> set[str]:
    return {
        name
        for name, tensor in _read(path).items()
        if tensor.tensor_type.name in ("MXFP4", "NVFP4")
    }


def _expected(checkpoint: Path, weights: dict[str, Any]) -> Any:
    """Log-probabilities of the next token, by transformers in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(checkpoint), dtype=torch.float32
    )
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)


def _run(path: Path) -> dict[int, float]:
    """Token -> log-probability of the 20 likeliest next tokens, by llama.cpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_predict, params.cpuparams.n_threads, params.warmup = 64, 1, 2, False
    request = {
        "prompt": PROMPT,
        "n_predict": 1,
        "n_probs": 20,
        "temperature": 0,
        "cache_prompt": False,
    }
    answer = xllamacpp.Server(params).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in likeliest}


def _distance(found: dict[int, float], expected: Any) -> float:
    return max(abs(value - expected[token].item()) for token, value in found.items())


@every_kind
def test_engine_runs_the_template_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """What the tests below rest on: names, metadata and the order of rows are those that llama.cpp
    expects.
    """
    checkpoint = MAKERS[kind](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, kind, tmp_path / "tiny.gguf")
    weights = _weights(template, checkpoint, kind)
    assert (
        differing(
            weights, {name: tensor.float() for name, tensor in read_tensors(checkpoint).items()}
        )
        == []
    )
    assert _distance(_run(template), _expected(checkpoint, weights)) < 0.02


@pytest.mark.sweep(4)
@every_way
@every_format
@every_kind
def test_engine_agrees_with_the_dequantized_model(
    make: Make, kind: str, fmt: str, way: str
) -> None:
    """llama.cpp rounds activations to eight bits; what is left is far below what four-bit weights
    change.
    """
    models = make(kind, fmt)
    weights = _weights(models.made(way), models.checkpoint, kind)
    before = {name: tensor.float() for name, tensor in read_tensors(models.checkpoint).items()}
    found = _run(models.made(way))
    near, far = (
        _distance(found, _expected(models.checkpoint, tensors)) for tensors in (weights, before)
    )
    print(f"{kind} {fmt} {way}: {near:.4f} from the dequantized model, {far:.4f} from the first")
    assert len(found) == 20
    assert near < 0.02
    assert near < far / 2


@every_way
@every_format
@every_kind
def test_weights_are_close_to_the_first(make: Make, kind: str, fmt: str, way: str) -> None:
    models = make(kind, fmt)
    weights, before = (
        _weights(models.made(way), models.checkpoint, kind),
        read_tensors(models.checkpoint),
    )
    assert _four_bit(models.made(way)) == {gguf_name(name) for name in filter(is_quantized, before)}
    for name, tensor in before.items():
        error = (weights[name] - tensor.float()).norm() / tensor.float().norm()
        assert error < (0.15 if is_quantized(name) else 0.0) or not error, name


@every_way
@every_format
@every_kind
def test_metadata_is_the_templates(make: Make, kind: str, fmt: str, way: str) -> None:
    """Every key and every value."""
    import gguf

    models = make(kind, fmt)
    ours, theirs = (
        {
            name: field.contents()
            for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith("GGUF.")
        }
        for path in (models.made(way), models.template)
    )
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()


@every_way
@every_format
@every_kind
def test_kept_tensors_are_the_templates(make: Make, kind: str, fmt: str, way: str) -> None:
    models = make(kind, fmt)
    ours, theirs = _read(models.made(way)), _read(models.template)
    kept = theirs.keys() - _four_bit(models.made(way))
    assert len(kept) == len(theirs) - MODULES
    for name in kept:
        assert ours[name].tensor_type == theirs[name].tensor_type
        assert ours[name].data.tobytes() == theirs[name].data.tobytes(), name
    assert all(name.endswith(".scale") for name in ours.keys() - theirs.keys())


@every_format
@every_kind
def test_transcoded_blocks_are_the_artifacts(make: Make, kind: str, fmt: str) -> None:
    """Codes and block scales by value, in llama.cpp's order of rows; global scales bit for bit;
    code 8 is +0.0 there.
    """
    models = make(kind, fmt)
    artifact, ours = read_tensors(models.artifact), _read(models.transcoded)
    for name in filter(is_quantized, read_tensors(models.checkpoint)):
        module, stored = name.removesuffix(".weight"), ours[gguf_name(name)]
        if fmt == "mxfp4":
            expected = mxfp4_weight(
                artifact[f"{module}.weight_packed"], artifact[f"{module}.weight_scale"]
            )
        else:
            expected = decoded(unpacked(artifact[name]), e4m3(artifact[f"{module}.weight_scale"]))
            scale = _values(ours[f"{gguf_name(name).removesuffix('.weight')}.scale"])
            assert scale.equal(artifact[f"{module}.weight_scale_2"].reshape(1)), name
        assert stored.tensor_type.name == fmt.upper()
        assert (
            differing({name: _values(stored)}, {name: permuted(name, expected, kind) + 0.0}) == []
        )


@every_way
@every_format
def test_inspect_knows_the_file(make: Make, fmt: str, way: str) -> None:
    found = fp4convert_json("inspect", make("llama", fmt).made(way).parent)
    assert (found["format"], found["dialect"]) == (fmt, "gguf")
    assert found["tensors"]["quantized"] == MODULES
    assert found["healthy"]
    assert found["findings"] == []


@pytest.mark.sweep(4)
@every_way
@every_format
@every_kind
def test_inspect_and_verify_measure_against_the_template(
    make: Make, kind: str, fmt: str, way: str
) -> None:
    models = make(kind, fmt)
    folder = models.made(way).parent
    assert fp4convert_json("inspect", folder, "--source", models.template)["findings"] == []
    report = fp4convert_json("verify", folder, "--source", models.template, "--min-sqnr", 15)
    assert report["passed"]
    assert len(report["tensors"]) == MODULES
    assert all(row["cosine"] > 0.99 for row in report["tensors"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@every_format
@every_kind
def test_engine_runs_the_dequantized_file(
    make: Make, tmp_path: Path, kind: str, fmt: str, dtype: str
) -> None:
    """It holds what the four-bit file is worth, rounded to its dtype, and nothing that only
    four-bit tensors need.
    """
    models = make(kind, fmt)
    fp4convert(
        "dequantize", models.quantized.parent, "-o", tmp_path / "restored", "--dtype", dtype, "-q"
    )
    (path,) = (tmp_path / "restored").glob("*.gguf")
    tensors, template = _read(path), _read(models.template)
    assert list(tensors) == list(template)
    assert {tensors[name].tensor_type.name for name in _four_bit(models.quantized)} == {
        {"bf16": "BF16", "fp32": "F32"}[dtype]
    }
    expected, found = (_weights(each, models.checkpoint, kind) for each in (models.quantized, path))
    for name, weight in expected.items():
        assert found[name].allclose(weight, rtol=2.0 ** {"bf16": -8, "fp32": -22}[dtype], atol=0), (
            name
        )
    assert _distance(_run(path), _expected(models.checkpoint, found)) < 0.02


@every_format
def test_engine_runs_an_architecture_whose_graph_passes_over_global_scales(
    tmp_path: Path, fmt: str
) -> None:
    """llama.cpp loads Qwen2's .scale and does not multiply with it: they are 1."""
    checkpoint = make_qwen2(tmp_path / "checkpoint")
    template = write_gguf(checkpoint, "qwen2", tmp_path / "tiny.gguf")
    fp4convert(
        "quantize", template, "--format", fmt, "--dialect", "gguf", "-o", tmp_path / "out", "-q"
    )
    made = tmp_path / "out" / "tiny.gguf"
    assert len(_four_bit(made)) == MODULES
    found = _run(made)
    assert _distance(found, _expected(checkpoint, _weights(made, checkpoint, "qwen2"))) < 0.02
    assert _distance(found, _expected(checkpoint, _weights(template, checkpoint, "qwen2"))) > 0.02
