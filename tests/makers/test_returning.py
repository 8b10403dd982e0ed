"""Weights of four bits in wider dtypes come back without loss, and the result says so.

ModelOpt and torchao make them; transformers trains some.
"""

import json

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import LAYER, read_folder, run, weight, write_llama, write_single
from fake_quantized import by_modelopt, by_torchao, mxfp4_by_modelopt, write_fake_quantized
from made_up_inputs import calibrate

torch = pytest.importorskip("torch")
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MODULES = 7


def come_back(source, tmp_path, stored, *options, fmt="nvfp4"):
    """The result of quantize, and the modules whose values are not the source's afterwards."""
    made, again = tmp_path / "made", tmp_path / "again"
    outcome = run("quantize", source, "--format", fmt, "-o", made, "--json", *options)
    assert outcome.code == 0, outcome.err
    assert run("dequantize", made, "-o", again, "--dtype", WORDS[stored]).code == 0
    before, after = read_folder(source), read_folder(again)
    kinds = {"bf16": "<u2", "fp16": "<u2", "fp32": "<u4"}
    changed = []
    for name, (_, _, data) in before.items():
        bits = [np.frombuffer(x, kinds[WORDS[stored]]) for x in (data, after[name][2])]
        top = 1 << (8 * bits[0].itemsize - 1)
        own, other = (np.where(x == top, 0, x) for x in bits)  # -0 is 0
        if not np.array_equal(own, other):
            changed.append(name)
    return outcome.json, changed


def is_whole(result):
    found = result["fidelity"]["fake_quantized"]
    assert found["modules"] == MODULES
    assert found["exact"] == found["blocks"] > 0
    assert found["share_min"] == 1


@pytest.mark.parametrize("quantizer", [by_modelopt, by_torchao])
@pytest.mark.parametrize(
    ("master", "stored"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=["bf16", "bf16 of fp32", "fp16 of fp32", "fp32"],
)
def test_every_value_comes_back(tmp_path, quantizer, master, stored):
    """Where the masters are wider than what is stored, the amax of the weights is another than the
    one they were rounded under: it is found again.
    """
    source = write_fake_quantized(tmp_path / "source", quantizer, master, stored)
    result, changed = come_back(source, tmp_path, stored, "--dialect", "modelopt")
    assert changed == []
    is_whole(result)


@pytest.mark.parametrize("frozen", [0.7, 0.9, 1.3, 2.5])
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_an_amax_that_was_frozen_before_the_training_ended_is_found(tmp_path, master, frozen):
    source = write_fake_quantized(
        tmp_path / "source", by_modelopt, master, torch.bfloat16, frozen=frozen
    )
    result, changed = come_back(source, tmp_path, torch.bfloat16)
    assert changed == []
    is_whole(result)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_values_of_mxfp4_come_back_in_either_format(tmp_path, stored, fmt):
    source = write_fake_quantized(tmp_path / "source", mxfp4_by_modelopt, torch.float32, stored)
    result, changed = come_back(source, tmp_path, stored, fmt=fmt)
    assert changed == []
    is_whole(result)


def test_fused_matrices_under_scales_of_their_own_are_told(tmp_path):
    """Engines take one global scale for q, k and v; what had others is rounded again."""
    source = write_fake_quantized(
        tmp_path / "source", by_modelopt, torch.bfloat16, torch.bfloat16, shared=False
    )
    result, changed = come_back(source, tmp_path, torch.bfloat16)
    found = result["fidelity"]["fake_quantized"]
    assert 0 < found["exact"] < found["blocks"]
    assert found["share_min"] < 0.5
    fused = {f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"}
    fused |= {f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up")}
    assert changed
    assert set(changed) < fused
    report = json.loads((tmp_path / "made" / "quantization_report.json").read_text())
    shares = {entry["name"]: entry["exact"] for entry in report["tensors"]}
    assert {name for name, share in shares.items() if share < 1} == set(changed)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_ordinary_weights_are_never_called_so(tmp_path, fmt):
    source = write_llama(tmp_path / "source")
    result = run("quantize", source, "--format", fmt, "-o", tmp_path / "made", "--json").json
    assert "fake_quantized" not in result["fidelity"]
    words = ("quantize", source, "--format", fmt, "--dry-run")
    assert "fake_quantized" not in run(*words, "--json").json
    assert "fake" not in run(*words).out


def test_gptq_keeps_them_too(tmp_path):
    source = write_fake_quantized(
        tmp_path / "source", by_modelopt, torch.float32, torch.bfloat16, frozen=0.9
    )
    file = calibrate(tmp_path / "inputs.safetensors", source)
    options = ("--method", "gptq", "--calibration", file)
    result, changed = come_back(source, tmp_path, torch.bfloat16, *options)
    assert changed == []
    is_whole(result)


def test_the_plan_and_the_result_say_so(tmp_path):
    source = write_fake_quantized(tmp_path / "source", by_modelopt, torch.float32, torch.bfloat16)
    words = ("quantize", source, "--format", "nvfp4")
    plan = run(*words, "--dry-run", "--json").json["fake_quantized"]
    assert plan["modules"] == plan["found"] == MODULES
    assert plan["exact"] == plan["blocks"] > MODULES * 8
    assert "trained with fake quantization: 100 %" in " ".join(run(*words, "--dry-run").out.split())
    shown = " ".join(run(*words, "-o", tmp_path / "made").out.split())
    assert "100 % of blocks come back exact" in shown


def test_one_layer_of_them_among_others(tmp_path):
    """A module that is not from fake quantization has no count, and changes none."""
    source = write_fake_quantized(tmp_path / "source", by_modelopt, torch.float32, torch.bfloat16)
    tensors = read_folder(source)
    tensors[f"{LAYER}.self_attn.o_proj.weight"] = weight(1, 256, 128)
    mixed = write_single(tmp_path / "mixed", tensors)
    result = quantize(mixed, tmp_path / "made")
    found = result["fidelity"]["fake_quantized"]
    assert found["modules"] == MODULES - 1
    assert found["exact"] == found["blocks"]


class FakeQuantize(torch.nn.Module):
    def __init__(self, amax):
        super().__init__()
        self.amax = amax

    def forward(self, weight):
        rounded = by_modelopt(weight.detach(), self.amax)
        return weight + (rounded - weight).detach() if self.training else rounded


def amaxes_of(linears):
    """The largest weight of each scale group, by the name of every member."""
    fused = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    keys = {
        name: ".".join((*name.split(".")[:-1], fused.get(name.split(".")[-1], name.split(".")[-1])))
        for name in linears
    }
    amaxes = {}
    for name, module in linears.items():
        own = module.weight.detach().abs().amax()
        amaxes[keys[name]] = torch.maximum(own, amaxes.get(keys[name], own))
    return {name: amaxes[keys[name]] for name in linears}


def train_with_fake_quantization(folder, stored):
    """A small Llama whose weights pass ModelOpt's NVFP4 in every forward pass, straight through
    backward; its masters are float32, its amaxes are those of the beginning. Saved as they are
    after the last rounding; returns its loss at the beginning and at the end.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    amaxes = amaxes_of(linears)
    for name, module in linears.items():
        quantizer = FakeQuantize(amaxes[name])
        torch.nn.utils.parametrize.register_parametrization(module, "weight", quantizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    text = torch.tensor(list(b"the rain in spain stays mainly in the plain " * 40)) % 64
    windows = text.unfold(0, 32, 7)
    losses = []
    for step in range(40):
        batch = windows[step % 8 :: 8]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    for module in linears.values():
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    model.to(stored).save_pretrained(folder)
    return losses[0], losses[-1]


def test_a_model_that_was_trained_so_answers_as_before(tmp_path):
    """Rounded, and read back by transformers, it has the same logits, bit for bit."""
    from transformers import AutoModelForCausalLM

    source, stored = tmp_path / "source", torch.bfloat16
    begun, ended = train_with_fake_quantization(source, stored)
    assert ended < begun / 2
    result, changed = come_back(source, tmp_path, stored)
    assert changed == []
    assert result["fidelity"]["fake_quantized"]["modules"] == 2 * MODULES
    numbers = torch.arange(32).reshape(1, -1)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=stored)(numbers).logits
        for folder in (source, tmp_path / "again")
    ]
    assert torch.equal(*logits)
