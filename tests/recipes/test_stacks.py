"""Stacks of experts, judged by transformers: what a recipe slices out of a saved checkpoint is what
the model multiplies with.

Every size is another number, so that no order of axes or rows can pass for a different one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import fp4convert, offline, read_tensors

from fp4convert.errors import InputError
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.recipes.rules import StackRule

pytestmark = pytest.mark.engine

HIDDEN, INNER, EXPERTS, TOKENS, CHOSEN = 64, 48, 4, 5, 2
TEXT = {
    **{
        "vocab_size": 256,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    **{
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts_per_tok": 2,
    },
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "intermediate_size": 96,
    "n_shared_experts": 1,
}
LOCAL = {"num_local_experts": EXPERTS, "intermediate_size": INNER}
NAMED = {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "intermediate_size": 96}


class Case(NamedTuple):
    """A tiny model, and how its experts compute: `gate` is the name of the activation, `style` how
    they are called.
    """

    kind: str
    config: dict[str, Any]
    gate: str = "silu"
    style: str = "routed"


CASES = {
    "gpt_oss": Case("GptOssForCausalLM", LOCAL, "swiglu"),
    "llama4_text": Case(
        "Llama4ForCausalLM", LOCAL | {"intermediate_size_mlp": 112}, style="sorted"
    ),
    "qwen3_vl_moe_text": Case("Qwen3VLMoeTextModel", NAMED),
    "gemma4_text": Case(
        "Gemma4ForCausalLM",
        NAMED | {"enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 256},
        "gelu",
    ),
    "granitemoe": Case("GraniteMoeForCausalLM", LOCAL),
    "granitemoeshared": Case(
        "GraniteMoeSharedForCausalLM", LOCAL | {"shared_intermediate_size": 80}
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybridForCausalLM",
        LOCAL | {"shared_intermediate_size": 80, "layer_types": ["attention"]},
    ),
    "granitemoe_swa": Case("GraniteMoeSWAForCausalLM", LOCAL),
    "jetmoe": Case(
        "JetMoeForCausalLM", LOCAL | {"kv_channels": 16, "num_key_value_heads": 2}, style="lists"
    ),
    "aria_text": Case(
        "AriaTextForCausalLM", {"moe_num_experts": EXPERTS, "intermediate_size": INNER}
    ),
    "dbrx": Case(
        "DbrxForCausalLM",
        {
            **{
                "d_model": HIDDEN,
                "n_heads": 4,
                "n_layers": 1,
                "max_seq_len": 64,
                "vocab_size": 256,
            },
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        },
    ),
    "mistral4": Case("Mistral4ForCausalLM", LATENT | ROUTED | {"n_group": 1, "topk_group": 1}),
    "minimax_m3_vl_text": Case(
        "MiniMaxM3VLForCausalLM", LOCAL | {"dense_intermediate_size": 112}, "swiglu"
    ),
    "glm4v_moe_text": Case(
        "Glm4vMoeTextModel", ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    ),
    "step3p7": Case(
        "Step3p7ForConditionalGeneration",
        {
            "text_config": TEXT | ROUTED | {"mlp_layer_types": ["sparse"], "share_expert_dim": 80},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
            },
        },
    ),
    "inkling_mm_model": Case(
        "InklingForConditionalGeneration",
        {
            "text_config": TEXT | ROUTED | {"mlp_layer_types": ["sparse"]},
            "vision_config": {
                "text_hidden_size": HIDDEN,
                "hidden_size": 32,
                "n_layers": 1,
                "num_attention_heads": 2,
            },
            "audio_config": {"text_hidden_size": HIDDEN},
        },
    ),
    "inkling_text": Case("InklingForCausalLM", ROUTED),
}


PUBLISHED = {
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": TEXT | NAMED,
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "qwen3_5_moe_text": Case(
        "Qwen3_5MoeForCausalLM",
        NAMED | {"shared_expert_intermediate_size": 80, "layer_types": ["full_attention"]},
    ),
    "qwen4_exp_text": Case(
        "Qwen4ExpForCausalLM",
        NAMED
        | {
            "shared_expert_intermediate_size": 80,
            "layer_types": ["linear_attention"],
            "hc_lowrank": 16,
            "ple_embed_dim": 32,
        },
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model_type", CASES)
def test_the_model_multiplies_with_what_the_recipe_slices(model_type: str, tmp_path: Path) -> None:
    case = CASES[model_type]
    model = build(case, tmp_path)
    found = experts_of(model_type, tmp_path)
    assert_same(model, case, found)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_checkpoint_as_it_was_published_is_sliced_as_transformers_reads_it(
    model_type: str, tmp_path: Path
) -> None:
    """Qwen3-VL: (in, out), which transformers turns; Qwen3.5 and 4: stacks, which transformers 5
    reads, and saves one by one.
    """
    import transformers
    from safetensors.torch import save_file

    case = PUBLISHED[model_type]
    tensors = build(case, tmp_path).state_dict()
    if model_type == "qwen3_vl_moe":
        tensors = {
            name: tensor.mT if ".experts." in name else tensor for name, tensor in tensors.items()
        }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    found = experts_of(model_type, tmp_path)
    assert len(found) == 3
    with offline():
        model = getattr(transformers, case.kind).from_pretrained(tmp_path)
    assert_same(model, case, found)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model_type", CASES)
def test_dequantize_stacks_again_what_was_sliced(model_type: str, tmp_path: Path) -> None:
    """Names and shapes of the checkpoint, near its values, and transformers loads them without a
    word.
    """
    import transformers

    case = CASES[model_type]
    build(case, tmp_path / "m")
    fp4convert("quantize", tmp_path / "m", "--format", "nvfp4", "-o", tmp_path / "a", "-q")
    fp4convert("dequantize", tmp_path / "a", "-o", tmp_path / "r", "--dtype", "fp32", "-q")
    source, restored = read_tensors(tmp_path / "m"), read_tensors(tmp_path / "r")
    assert {name: tensor.shape for name, tensor in restored.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    assert [
        name
        for name, tensor in source.items()
        if (restored[name] - tensor).norm() > 0.15 * tensor.norm()
    ] == []
    with offline():
        _, info = getattr(transformers, case.kind).from_pretrained(
            tmp_path / "r", output_loading_info=True
        )
    assert not any(info.values()), info


def test_where_inputs_and_outputs_are_as_many_a_person_decides(tmp_path: Path) -> None:
    name, shape = (
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        (EXPERTS, HIDDEN, HIDDEN),
    )
    config = {"text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": HIDDEN}}
    with pytest.raises(InputError) as caught:
        build_recipe(Target("nvfp4"), config).stack_rule(name, shape)
    assert caught.value.code == "stack-order"
    assert "--stack-order" in caught.value.next_step
    for order in ("in_out", "out_in"):
        rule = build_recipe(Target("nvfp4"), config, RecipeOptions(stack_order=order)).stack_rule(
            name, shape
        )
        assert rule
        assert rule.is_transposed is (order == "in_out")


def build(case: Case, folder: Path) -> Any:
    """The model, saved in that folder."""
    import torch
    import transformers

    torch.manual_seed(7)
    with offline():
        kind = getattr(transformers, case.kind)
        options = {
            key: value for key, value in TEXT.items() if key in kind.config_class().to_dict()
        }
        model = kind(kind.config_class(**options | case.config)).eval()
        for name, parameter in model.named_parameters():  # biases are none of a recipe's business
            torch.nn.init.zeros_(parameter) if "bias" in name else torch.nn.init.normal_(
                parameter, std=0.1
            )
        model.save_pretrained(folder)
    return model


def experts_of(model_type: str, folder: Path) -> dict[str, Any]:
    """Leaf -> matrix of the chosen expert in the first layer, as the recipe of the folder's
    config.json slices it.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == model_type
    recipe = build_recipe(Target("nvfp4"), config)
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            rule = recipe.stack_rule(name, tuple(tensor.shape))
            if tensor.dim() == 3 and "conv" not in name:
                assert rule, name
            if rule and len(tensor) > 1:  # else a single shared expert
                stack = (
                    tensor.reshape(rule.experts, -1, tensor.shape[1]) if rule.experts else tensor
                )
                found |= slices(rule, name, stack[CHOSEN])
    return found


def slices(rule: StackRule, name: str, matrix: Any) -> dict[str, Any]:
    """Name -> (out, in) matrix of each member of one expert."""
    rows = matrix.T if rule.is_transposed else matrix
    count = len(rule.members)
    parts = (
        [rows[place::count] for place in range(count)] if rule.is_interleaved else rows.chunk(count)
    )
    parent = name.removesuffix(".weight").rpartition(".")[0]
    names = (
        rule.named.format(parent=parent, expert=CHOSEN, member=member) for member in rule.members
    )
    return dict(zip(names, parts, strict=True))


def assert_same(model: Any, case: Case, found: dict[str, Any]) -> None:
    """The experts' own output against gate, up and down as sliced."""
    import torch

    matrices = {
        name.rpartition(".")[2]: matrix
        for name, matrix in found.items()
        if ".shared_experts." not in name
    }
    gate, up, down = (next(matrices[name] for name in names if name in matrices) for names in NAMES)
    assert gate.shape == up.shape == (INNER, HIDDEN)
    assert down.shape == (HIDDEN, INNER)
    x = torch.randn(TOKENS, HIDDEN)
    expected = (activate(case.gate, x @ gate.T, x @ up.T)) @ down.T
    with torch.no_grad():
        torch.testing.assert_close(run(model, case.style, x), expected, rtol=1e-4, atol=1e-5)


NAMES = (("gate_proj", "w1"), ("up_proj", "w3", "v1"), ("down_proj", "w2"))


def activate(word: str, gate: Any, up: Any) -> Any:
    from torch.nn import functional

    if word == "swiglu":  # gpt-oss: alpha 1.702, limit 7
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * (1.702 * gate).sigmoid()
    gated = functional.silu(gate) if word == "silu" else functional.gelu(gate, approximate="tanh")
    return gated * up


def run(model: Any, style: str, x: Any) -> Any:
    """What the first layer's experts make of x when all of it goes to the chosen one."""
    import torch

    if style == "lists":
        moe = next(module for name, module in model.named_modules() if name.endswith(".mlp"))
        sizes = [TOKENS if expert == CHOSEN else 0 for expert in range(EXPERTS)]
        gate, up = moe.input_linear(x, sizes).chunk(2, dim=-1)
        return moe.output_linear(moe.activation(gate) * up, sizes)
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    if style == "sorted":
        batch = torch.zeros(EXPERTS, TOKENS, HIDDEN)
        batch[CHOSEN] = x
        return experts(batch.reshape(-1, HIDDEN)).reshape(EXPERTS, TOKENS, HIDDEN)[CHOSEN]
    return experts(x, torch.full((TOKENS, 1), CHOSEN), torch.ones(TOKENS, 1)).reshape(x.shape)
