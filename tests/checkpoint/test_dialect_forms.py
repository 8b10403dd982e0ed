"""Records also name the matrices that engines make of several."""

import re

import pytest
from tiny_models import fp4convert, make_llama, read_json

from fp4convert.checkpoint.dialects.forms import with_fused

QKV = ("l.0.q_proj", "l.0.k_proj", "l.0.v_proj")


@pytest.mark.parametrize(
    ("names", "added"),
    [
        (QKV, {"l.0.qkv_proj"}),
        ((*QKV[:2], "l.1.v_proj"), set()),
        ((*QKV, "l.0.qkv_proj"), set()),
        (("*.mlp.gate_proj", "*.mlp.up_proj"), {"*.mlp.gate_up_proj"}),
        (("gate_proj", "up_proj"), {"gate_up_proj"}),
        (("l.0.experts.3.gate_proj", "l.0.experts.3.up_proj"), set()),
    ],
)
def test_a_fused_name_is_added_where_all_parts_are_there(names, added):
    made = with_fused(names)
    assert made[: len(names)] == names
    assert set(made[len(names) :]) == added


def test_records_of_a_mixture_name_what_engines_fuse(tmp_path):
    """SGLang looks for these names alone where its class does not say what it fuses."""
    model = make_llama(tmp_path / "m")
    kinds = {"--dialect": "modelopt"}, {"--dialect": "compressed-tensors"}
    for number, kind in enumerate(kinds):
        out = tmp_path / str(number)
        words = [word for pair in kind.items() for word in pair]
        fp4convert("quantize", model, "--format", "nvfp4", "--target-bits", "6", *words, "-o", out)
        record = read_json(out / "config.json")["quantization_config"]
        groups = [group["targets"] for group in record["config_groups"].values()]
        for fused, part in (("qkv_proj", "q_proj"), ("gate_up_proj", "up_proj")):
            name = f"model.layers.1.{'mlp' if part == 'up_proj' else 'self_attn'}."
            place = [
                [any(_fits(target, name + word) for target in group) for group in groups]
                for word in (fused, part)
            ]
            assert place[0] == place[1]
            assert any(place[0])


def test_no_expression_fits_nothing(tmp_path, caplog):
    """transformers would warn of it; compressed-tensors finds its modules so."""
    from compressed_tensors.utils import match_named_modules
    from transformers import AutoModelForCausalLM

    model, out = make_llama(tmp_path / "m"), tmp_path / "out"
    fp4convert("quantize", model, "--format", "nvfp4", "--target-bits", "6", "-o", out)
    record = read_json(out / "config.json")["quantization_config"]
    groups = [group["targets"] for group in record["config_groups"].values()]
    targets = [target for group in groups for target in group]
    assert any("qkv_proj" in target for target in targets)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with caplog.at_level("WARNING", logger="compressed_tensors"):
        found = [name for name, _ in match_named_modules(loaded, targets, warn_on_fail=True)]
    assert caplog.messages == []
    assert len(found) == sum(name.endswith("_proj") for name, _ in loaded.named_modules())


def _fits(target, name):
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name
