"""quantize --pad-for-tp: every rank gets whole blocks, and transformers computes the same logits,
bit for bit, in float32.

Sizes are multiples of 32: PyTorch's SiLU rounds what is left over of 32 columns otherwise than the
others, so that 48 columns and the same of 64 differ in the last bits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import done, read_folder, run, values_of, write_llama
from safetensors.numpy import save_file

from fp4convert.planning.tensor_parallel import pad_for_ranks
from fp4convert.storage.open import open_source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
HEADS = {"num_attention_heads": [6, 8], "num_key_value_heads": [3, 4]}
MLP = {"intermediate_size": [96, 128]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DIVIDED = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# class, sizes of its own, and what config.json says before and after for four ranks
FAMILIES = {
    "Llama": ({"intermediate_size": 96, "attention_bias": True, "mlp_bias": True}, MLP | HEADS),
    "Mistral": ({"intermediate_size": 96, "sliding_window": None}, MLP | HEADS),
    "Qwen2": ({"intermediate_size": 96} | DIVIDED, MLP),
    "Qwen3": ({"intermediate_size": 96}, MLP | HEADS),
    "Mixtral": (
        {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
        MLP | HEADS,
    ),
    "Qwen2Moe": (
        {
            **EXPERTS,
            **DIVIDED,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "intermediate_size": 96,
        },
        {"moe_intermediate_size": [32, 64], "shared_expert_intermediate_size": [96, 128]},
    ),
    "Qwen3Moe": (
        {**EXPERTS, "moe_intermediate_size": 32, "intermediate_size": 96, "mlp_only_layers": [1]},
        {"moe_intermediate_size": [32, 64]} | MLP | HEADS,
    ),
}


def make(family: str, folder: Path, **sizes: object) -> Path:
    """A model whose every parameter is random, biases and norms too."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family][0], **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 5)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> "torch.Tensor":
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.arange(32).reshape(2, 16)).logits
    assert found.isfinite().all()
    assert found.std() > 0.1
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_change_no_logits(family, tmp_path):
    source = open_source(str(make(family, tmp_path / "source")))
    padded = pad_for_ranks(source, 4, 16)
    assert padded.checkpoint.padding.record == {
        "tensor_parallel": 4,
        "block_size": 16,
        "config": FAMILIES[family][1],
    }
    tensors = {
        ref.name: np.frombuffer(padded.read(ref), np.float32).reshape(ref.shape)
        for ref in padded.checkpoint.tensors
    }
    (tmp_path / "padded").mkdir()
    save_file(tensors, tmp_path / "padded" / "model.safetensors", {"format": "pt"})
    (tmp_path / "padded" / "config.json").write_text(json.dumps(padded.checkpoint.config))
    before, after = logits(tmp_path / "source"), logits(tmp_path / "padded")
    # A processor's matrix products may add longer rows in another order.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_quantized_with_zeros_it_is_the_model_quantized_without(family, fmt, tmp_path):
    """Blocks of the weights are the same, and so is what both are worth to transformers."""
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 96} if "Moe" in family else {}
    source = make(family, tmp_path / "source", **sizes)
    for name, words in (("plain", ()), ("padded", ("--pad-for-tp", 4))):
        quantized = ("quantize", source, "--format", fmt, "-o", tmp_path / name, *words)
        done(*quantized)
        back = ("dequantize", tmp_path / name, "-o", tmp_path / f"{name}-back", "--dtype", "fp32")
        done(*back)
    before, after = logits(tmp_path / "plain-back"), logits(tmp_path / "padded-back")
    assert torch.equal(before, after)
    for check in ("verify", "inspect"):
        done(check, tmp_path / "padded", "--source", source, "--json")
    record = json.loads((tmp_path / "padded" / "quantization_config.json").read_text())
    assert record["padding"]["tensor_parallel"] == 4
    config = json.loads((tmp_path / "padded" / "config.json").read_text())
    after = {key: values[1] for key, values in record["padding"]["config"].items()}
    assert {key: config[key] for key in after} == after


def test_every_rank_gets_whole_blocks_and_the_plan_warns_no_more(tmp_path):
    source = make("Llama", tmp_path / "source")
    plan = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--dry-run", "--json")
    doubts = [line for line in run(*plan).json["warnings"] if "tensor parallelism" in line]
    assert any("down_proj: 96 columns" in line and "--pad-for-tp 8 adds" in line for line in doubts)
    mended = run(*plan, "--pad-for-tp", 4).json["warnings"]
    assert not any("among 2, 4" in line or "among 4" in line for line in mended)
    assert any("intermediate_size 96 -> 128" in line for line in mended)


def test_zeros_stand_behind_rows_and_columns_in_any_range_of_bytes(tmp_path):
    """Every range that begins or ends in a row is what NumPy pads."""
    folder = make("Llama", tmp_path / "source")
    padded = pad_for_ranks(open_source(str(folder)), 4, 16)
    stored = {name: values_of(tensor) for name, tensor in read_folder(folder).items()}
    layer = "model.layers.0"
    for name, shape in (
        (f"{layer}.mlp.down_proj.weight", (96, 128)),
        (f"{layer}.mlp.up_proj.weight", (128, 96)),
        (f"{layer}.mlp.up_proj.bias", (128,)),
        (f"{layer}.self_attn.v_proj.bias", (64,)),
        (f"{layer}.self_attn.o_proj.weight", (96, 128)),
    ):
        (ref,) = [ref for ref in padded.checkpoint.tensors if ref.name == name]
        assert ref.shape == shape
        own = stored[name].reshape(stored[name].shape)
        widths = [(0, new - old) for old, new in zip(own.shape, shape, strict=True)]
        expected = np.pad(own, widths).astype(np.float32).tobytes()
        assert padded.read(ref) == expected
        end = len(expected)
        for start, stop in (
            (0, 0),
            (3, 5),
            (120, end - 30),
            (end // 2 - 9, end // 2),
            (end - 7, end),
        ):
            assert padded.read_range(ref, start, stop) == expected[start:stop]
            buffer = bytearray(stop - start)
            padded.read_into(ref, start, memoryview(buffer))
            assert buffer == expected[start:stop]


def refused(source: Path, out: Path, *words: object) -> dict:
    outcome = run("quantize", source, "--format", "nvfp4", "-o", out, *words, "--json")
    assert outcome.code == 2
    assert not out.exists()
    return outcome.json["error"]


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_what_cannot_be_padded_is_refused_and_nothing_is_written(tmp_path):
    out, words = tmp_path / "out", ("--pad-for-tp", 4)
    # queries of Qwen2 that do not divide: its engines read no head_dim
    qwen2 = make("Qwen2", tmp_path / "qwen2", num_attention_heads=6, num_key_value_heads=3)
    error = refused(qwen2, out, *words)
    assert (error["code"], "no head_dim" in error["message"]) == ("pad-tensor", False)
    assert "engines of qwen2 do not read" in error["message"]
    # no number of heads divides both the hidden size and the ranks
    llama = make("Llama", tmp_path / "llama")
    assert refused(llama, out, "--pad-for-tp", 5)["code"] == "pad-tensor"
    # config.json says another size than the tensors have
    edit(llama, intermediate_size=112)
    error = refused(llama, out, *words)
    assert (error["code"], "112" in error["message"]) == ("pad-tensor", True)
    # a family in which nobody has shown it
    edit(llama, model_type="olmo2", intermediate_size=96)
    assert refused(llama, out, *words)["code"] == "pad-family"


def test_options_that_need_the_own_sizes_and_idle_ones_are_refused(tmp_path):
    llama, out = make("Llama", tmp_path / "llama"), tmp_path / "out"
    words = ("--pad-for-tp", 4)
    for more in (("--calibration", "c.safetensors"), ("--lora", "a"), ("--global-scale", "g")):
        error = refused(llama, out, *words, *more)
        assert (error["code"], more[0] in error["message"]) == ("pad-option", True)
    even = make("Llama", tmp_path / "even", intermediate_size=128, **DIVIDED)
    assert refused(even, out, *words)["code"] == "idle-option"
    assert refused(llama, out, "--pad-for-tp", 1)["code"] == "usage"


def test_transcode_carries_the_record_and_verify_still_understands(tmp_path):
    source = make("Llama", tmp_path / "source")
    words = ("--format", "nvfp4", "--pad-for-tp", 4)
    done("quantize", source, *words, "-o", tmp_path / "out")
    other = tmp_path / "other"
    done("transcode", tmp_path / "out", "-o", other, "--dialect", "modelopt")
    record = json.loads((other / "quantization_config.json").read_text())
    assert record["padding"]["config"] == MLP | HEADS
    done("verify", other, "--source", source)
    compared = ("compare", tmp_path / "out", other, "--source", source, "--json")
    done(*compared)
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "plain")
    outcome = run("compare", tmp_path / "out", tmp_path / "plain", "--source", source, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "pad-differs")
    warned = run("dequantize", other, "-o", tmp_path / "back", "--json").json["warnings"]
    assert any("zeros" in line for line in warned)


def test_a_record_that_nobody_reads_is_refused(tmp_path):
    source, out = write_llama(tmp_path / "source"), tmp_path / "out"
    done("quantize", source, "--format", "nvfp4", "-o", out)
    file = out / "quantization_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"padding": {"tensor_parallel": "4"}})
    )
    outcome = run("verify", out, "--source", source, "--json")
    assert outcome.json["error"]["code"] == "record-padding"
