"""What a folder says of itself: whose it is, what is wrong with its records, and which modules
engines would ignore.
"""

import pytest
from typed_records import (
    CT,
    CT_MXFP4_RECORD,
    CT_NVFP4_INPUTS,
    CT_NVFP4_RECORD,
    DEEPSEEK_RECORD,
    MLX_MXFP4,
    MLX_NVFP4,
    MO,
    MO_FILE,
    MO_NUMBERS,
    MO_RECORD,
    MO_W4A4_FILE,
    MO_W4A4_RECORD,
    QUARK_MXFP4_BLOCKS,
    clues,
    quark_record,
    with_formats,
    with_inputs,
    with_weights,
)

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.dialects.forms import Form, Group, everywhere
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named, recognise
from fp4convert.numerics.formats import FP8, INT4, MXFP4, MXFP8, NVFP4
from fp4convert.storage.safetensors import TensorRef

M = "model.layers.0.mlp.up_proj"


def recognised(name: str, told: Clues) -> tuple[Group, ...]:
    """What a dialect recognises; the registry, which asks few,
    finds what asking all of them finds.
    """
    answers = {each: dialect_named(each).recognise(told) for each in DIALECTS}
    assert dict(recognise(told)) == {each: groups for each, groups in answers.items() if groups}
    return answers[name]


@pytest.mark.parametrize(
    ("config", "name", "form"),
    [
        ({"quantization": MLX_MXFP4}, "mlx", Form(MXFP4)),
        ({"quantization_config": MLX_NVFP4}, "mlx", Form(NVFP4)),
        ({"quantization": {**MLX_NVFP4, "group_size": 32}}, "mlx", None),
        ({"quantization": {**MLX_MXFP4, "bits": 8}}, "mlx", None),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx", None),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "mlx", None),
        ({"quantization": "nvfp4"}, "mlx", None),
        ({"expert_dtype": "fp4"}, "deepseek", None),
        ({"quantization_config": DEEPSEEK_RECORD}, "deepseek", None),
        ({"quantization_config": DEEPSEEK_RECORD, "expert_dtype": "fp8"}, "deepseek", None),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "gpt-oss", None),
        (
            {"quantization_config": quark_record({"dtype": "int4", "group_size": 32}, None)},
            "quark",
            None,
        ),
        (
            {"quantization_config": quark_record({"dtype": "fp4", "group_size": 64}, None)},
            "quark",
            None,
        ),
        ({"quantization_config": quark_record([], None)}, "quark", None),
        ({"quantization_config": {"quant_method": "quark"}}, "quark", None),
        (
            {"quantization_config": quark_record(QUARK_MXFP4_BLOCKS, {"dtype": "fp8_e4m3"})},
            "quark",
            Form(MXFP4),
        ),
    ],
)
def test_other_records_of_these_engines(config, name, form):
    assert recognised(name, Clues(config, {}, {})) == everywhere(form)


MARKED, OTHER = (
    {f"{module}.comfy_quant": "U8", f"{module}.weight_scale_2": "F32"} for module in "ab"
)


@pytest.mark.parametrize(
    ("tensors", "form"),
    [
        (MARKED, Form(NVFP4, 16, "128x4")),
        ({**MARKED, "a.input_scale": "F32"}, Form(NVFP4, 4, "128x4")),
        ({**MARKED, "a.input_scale": "F32", **OTHER}, Form(NVFP4, 16, "128x4")),
        ({"a.comfy_quant": "U8", "a.weight_scale": "F32"}, None),
        ({"a.weight_scale_2": "F32", "a.weight_scale": "F8_E4M3"}, None),
    ],
)
def test_comfy_is_known_by_its_tensors(tensors, form):
    assert recognised("comfy", clues(None, tensors)) == everywhere(form)


MXFP8_FORM = Form(MXFP8, 8, granularity=(1, 32), stored_scales="U8")


@pytest.mark.parametrize(
    ("hf", "form"),
    [
        (MO_FILE, Form(NVFP4)),
        (MO_W4A4_FILE, Form(NVFP4, 4)),
        (
            {**MO_FILE, "quantization": {**MO_FILE["quantization"], "kv_cache_quant_algo": "FP8"}},
            Form(NVFP4, kv_cache="fp8"),
        ),
        ({"quantization": {"quant_algo": "MXFP4"}}, Form(MXFP4)),
        ({"quantization": {"quant_algo": "FP8"}}, Form(FP8, 8, granularity="tensor")),
        ({"quantization": {"quant_algo": "MXFP8"}}, MXFP8_FORM),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, None),
        ({"quantization": 7}, None),
        ({}, None),
    ],
)
def test_modelopt_is_known_by_its_second_record_alone(hf, form):
    assert recognised(MO, clues(None, hf=hf)) == everywhere(form)
    assert recognised(MO, clues({"quant_method": "fp8"}, hf=hf)) == ()


FP8_TENSOR = Form(FP8, 8, granularity="tensor")


@pytest.mark.parametrize(
    ("algorithms", "forms"),
    [
        (("FP8", "W4A16_NVFP4"), (FP8_TENSOR, Form(NVFP4))),
        (("FP8", "NVFP4"), (FP8_TENSOR, Form(NVFP4, 4))),
        (("W4A16_NVFP4", "NVFP4"), (Form(NVFP4), Form(NVFP4, 4))),
        (("NVFP4", "FP8_PB_WO"), (Form(NVFP4, 4), Form(FP8, 16, granularity=(128, 128)))),
        (("NVFP4", "fp8_pb_wo"), (Form(NVFP4, 4), Form(FP8, 16, granularity=(128, 128)))),
        (("NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"), (Form(NVFP4, 4), Form(FP8, 8, granularity="row"))),
        (("NVFP4", "W4A16_AWQ"), (Form(NVFP4, 4),)),
        (("NVFP4", "MXFP8"), (Form(NVFP4, 4), MXFP8_FORM)),
        (("FP8",), (FP8_TENSOR,)),
        (("W4A16_AWQ",), ()),
        ((), ()),
    ],
)
def test_mixed_precision_is_what_its_modules_are(algorithms, forms):
    """An entry names a module, or all below it, as NVIDIA's entries for `experts` do."""
    layers = {
        f"m.{number}": {"quant_algo": algorithm} for number, algorithm in enumerate(algorithms)
    }
    mixed = {"quant_method": MO, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    expected = tuple(
        Group(form, (f"m.{number}", f"m.{number}.*")) for number, form in enumerate(forms)
    )
    assert recognised(MO, clues(mixed)) == expected
    assert recognised(MO, clues(None, hf={"quantization": mixed})) == expected


def doubts(name: str, told: Clues) -> list[tuple[str, str]]:
    return [(doubt.level, doubt.code) for doubt in dialect_named(name).judge(told)]


@pytest.mark.parametrize(
    ("record", "codes"),
    [
        (CT_NVFP4_RECORD, []),
        ({**CT_NVFP4_RECORD, "quantization_status": "frozen"}, [("error", "record-status")]),
        (
            {key: value for key, value in CT_NVFP4_RECORD.items() if key != "quantization_status"},
            [("error", "record-status")],
        ),
        (with_weights(CT_NVFP4_RECORD, strategy="group"), [("error", "record-strategy")]),
        (with_weights(CT_MXFP4_RECORD, strategy="tensor_group"), [("error", "record-strategy")]),
        (with_weights(CT_NVFP4_RECORD, strategy=None), [("error", "record-strategy")]),
        (with_weights(CT_NVFP4_RECORD, group_size=32), [("error", "record-strategy")]),
        (with_weights(CT_NVFP4_RECORD, num_bits=8), [("error", "record-strategy")]),
        (with_weights(CT_NVFP4_RECORD, type="int"), [("error", "record-strategy")]),
        (with_weights(CT_NVFP4_RECORD, symmetric=False), [("error", "record-strategy")]),
        ({**CT_NVFP4_RECORD, "quant_method": "other", "quantization_status": None}, []),
    ],
)
def test_what_engines_would_load_in_silence_is_an_error(record, codes):
    assert doubts(CT, clues(record)) == codes


@pytest.mark.parametrize(
    ("record", "hf", "codes"),
    [
        (MO_RECORD, MO_FILE, []),
        (MO_RECORD, {}, []),
        (MO_RECORD, MO_W4A4_FILE, [("error", "records-disagree")]),
        ({**MO_RECORD, "ignore": ["lm_head"]}, MO_FILE, [("error", "records-disagree")]),
        ({**MO_W4A4_RECORD, "ignore": []}, MO_FILE, [("error", "records-disagree")] * 2),
        ({"quant_method": MO, "quant_algo": "MXFP4"}, {}, [("warning", "record-refused")]),
    ],
)
def test_two_records_of_modelopt_must_agree(record, hf, codes):
    assert doubts(MO, clues(record, hf=hf)) == codes


def test_a_record_of_four_bit_activations_that_lists_none_is_told():
    weights_alone = {**MO_W4A4_RECORD, "config_groups": MO_RECORD["config_groups"]}
    assert doubts(MO, clues(weights_alone)) == [("note", "activations-unsaid")]
    assert doubts(MO, clues(MO_W4A4_RECORD)) == []
    assert doubts(MO, clues(MO_RECORD)) == []


def kept(*names: str) -> dict:
    return {"modules_to_not_convert": list(names)}


@pytest.mark.parametrize(
    ("name", "record", "module", "is_ignored"),
    [
        ("quark", {"exclude": ["lm_head", "*.gate"]}, "model.mlp.gate", True),
        ("quark", {"exclude": ["lm_head", "*.gate"]}, "model.mlp.gate_proj", False),
        ("quark", {"exclude": ["head"]}, "lm_head", False),
        (CT, {"ignore": ["re:.*gate"]}, "model.mlp.gate_proj", True),
        (CT, {"ignore": ["gate"]}, "model.mlp.gate", False),
        (MO, {"ignore": ["gate"]}, "model.mlp.gate_proj", True),
        (MO, {"ignore": ["*.gate"]}, "model.mlp.gate_proj", False),
        ("gpt-oss", kept("m.layers.*.mlp.router"), "m.layers.3.mlp.router", True),
        ("gpt-oss", kept("m.layers.*.self_attn"), "m.layers.3.self_attn.q_proj", True),
        ("gpt-oss", kept("m.layers.*.mlp.gate"), "m.layers.3.mlp.gate_proj", False),
        ("gpt-oss", kept("m.layers.*.mlp"), "m.layers.3.mlp.experts.0.up_proj", True),
        ("mlx", {"ignore": ["lm_head"]}, "lm_head", False),
        ("quark", {"exclude": "lm_head"}, "lm_head", False),
    ],
)
def test_modules_that_engines_would_ignore(name, record, module, is_ignored):
    assert dialect_named(name).ignores(clues(record))(module) is is_ignored


def test_modelopt_ignores_by_its_second_record_alone():
    assert dialect_named(MO).ignores(clues(None, hf=MO_FILE))("lm_head")
    assert not dialect_named(MO).ignores(clues(None, hf=MO_FILE))(M)


@pytest.mark.parametrize(
    ("name", "declared", "form"),
    [
        (MO, MO_W4A4_RECORD, Form(NVFP4, 4)),
        (MO, MO_RECORD, Form(NVFP4)),
        (MO, {**MO_W4A4_RECORD, "config_groups": {}}, Form(NVFP4, 4)),
        (MO, with_inputs(MO_W4A4_RECORD, None), Form(NVFP4)),
        (MO, with_inputs(MO_W4A4_RECORD, None, None), Form(NVFP4)),
        (MO, with_inputs(MO_W4A4_RECORD, None, MO_NUMBERS), Form(NVFP4, 4)),
        (MO, {**MO_W4A4_RECORD, "config_groups": MO_RECORD["config_groups"]}, Form(NVFP4)),
        (MO, {**MO_W4A4_RECORD, "quant_algo": "W4A16_NVFP4"}, Form(NVFP4)),
        (MO, {**MO_W4A4_RECORD, "quant_algo": "W4A8_NVFP4_FP8"}, None),
        (CT, with_inputs(CT_NVFP4_RECORD, CT_NVFP4_INPUTS, CT_NVFP4_INPUTS), Form(NVFP4, 4)),
        (CT, with_inputs(CT_NVFP4_RECORD), Form(NVFP4)),
        (CT, {**CT_MXFP4_RECORD, "config_groups": None}, Form(MXFP4)),
        (CT, {**CT_MXFP4_RECORD, "config_groups": {"group_0": "W4A4"}}, Form(MXFP4)),
        (CT, {**CT_MXFP4_RECORD, "format": "mixed-precision"}, None),
        (CT, with_formats(CT_NVFP4_RECORD, "nvfp4-pack-quantized"), Form(NVFP4)),
        (CT, with_formats(CT_NVFP4_RECORD, "nvfp4-pack-quantized", "float-quantized"), Form(NVFP4)),
    ],
)
def test_activations_are_recognised(name, declared, form):
    """ModelOpt's NVFP4 with no input_activations in any group is for weights alone: so vLLM 0.33
    reads it.
    """
    assert recognised(name, clues(declared)) == everywhere(form)


@pytest.mark.parametrize(
    ("name", "declared", "fmt"),
    [
        (MO, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
        (MO, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, NVFP4),
        (MO, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, None),
        (MO, {"quant_method": "modelopt"}, None),
        (MO, {"quant_algo": "NVFP4"}, None),
        (MO, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, None),
        (CT, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, None),
        (CT, {"quant_method": "compressed-tensors"}, None),
        (CT, {"quant_method": "compressed-tensors", "format": ["nvfp4-pack-quantized"]}, None),
        (CT, {"quant_method": "quark"}, None),
        (CT, {}, None),
    ],
)
def test_only_the_own_records_are_recognised(name, declared, fmt):
    assert recognised(name, clues(declared)) == everywhere(
        fmt and Form(fmt, 4 if declared.get("quant_algo") == "NVFP4" else 16)
    )


@pytest.mark.parametrize(
    ("name", "tensors", "stems"),
    [
        (
            CT,
            {"b.weight_packed": "U8", "a.0.weight_packed": "U8", "a.0.bias": "BF16"},
            ["a.0", "b"],
        ),
        (CT, {"a.weight_scale": "F32", "a.weight": "F8_E4M3"}, []),
        (
            MO,
            {"b.weight_scale_2": "F32", "a.0.weight_scale_2": "F32", "lm_head.weight": "BF16"},
            ["a.0", "b"],
        ),
        (MO, {"a.weight_scale": "F32", "a.weight": "F8_E4M3", "b.weight_scale": "U8"}, ["b"]),
        ("quark", {"a.weight_scale": "U8", "b.weight_scale": "F32", "b.weight": "F8_E4M3"}, ["a"]),
        (
            "gpt-oss",
            {"x.down_proj_blocks": "U8", "x.down_proj_scales": "U8", "x.down_proj_bias": "BF16"},
            ["x.down_proj"],
        ),
        (
            "deepseek",
            {"l.experts.0.w1.scale": "F8_E8M0", "norm.scale": "F32", "l.attn.scale": "F8_E8M0"},
            ["l.experts.0.w1"],
        ),
        ("deepseek", {"l.experts.0.w1.scale": "F8_E8M0", "l.experts.0.w1.weight": "F8_E4M3"}, []),
        ("mlx", {"a.scales": "U8", "b.scales": "BF16", "b.biases": "BF16"}, ["a"]),
        (
            "comfy",
            {
                "a.comfy_quant": "U8",
                "a.weight": "U8",
                "b.weight_scale_2": "F32",
                "c.weight": "BF16",
            },
            ["a", "b"],
        ),
        ("comfy", {"a.comfy_quant": "U8", "a.weight": "F8_E4M3", "a.weight_scale": "F32"}, []),
        (
            "plain",
            {"a.block_scale": "U8", "b.global_scale": "F32", "c.weight": "U8", "d.weight": "BF16"},
            ["a", "b", "c"],
        ),
    ],
)
def test_modules_are_found_by_their_tensors(name, tensors, stems):
    refs = {known: TensorRef(known, dtype, (4,), "x", 0) for known, dtype in tensors.items()}
    assert dialect_named(name).find(refs) == stems


CT_NUMBERS = {  # of weights, by the format of their group
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
    },
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
}


def ct_groups(*groups: tuple[str, list[str]]) -> dict:
    schemes = {
        f"group_{number}": {
            "format": fmt,
            "targets": targets,
            "weights": CT_NUMBERS[fmt],
            "input_activations": None,
        }
        for number, (fmt, targets) in enumerate(groups)
    }
    return {
        "quant_method": CT,
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": schemes,
    }


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [
                ("nvfp4-pack-quantized", ["re:.*mlp.*"]),
                ("mxfp4-pack-quantized", ["a.q_proj", "a.k_proj"]),
            ],
            [(Form(NVFP4), ("re:.*mlp.*",)), (Form(MXFP4), ("a.q_proj", "a.k_proj"))],
        ),
        (
            [("nvfp4-pack-quantized", ["Linear"]), ("float-quantized", ["re:.*self_attn.*"])],
            [(Form(FP8, granularity="row"), ("re:.*self_attn.*",)), (Form(NVFP4), ("*",))],
        ),
        (
            [("mxfp4-pack-quantized", ["re:.*experts.*"]), ("pack-quantized", ["lm_head"])],
            [(Form(MXFP4), ("re:.*experts.*",)), (Form(INT4, granularity=(1, 32)), ("lm_head",))],
        ),
        (
            [("nvfp4-pack-quantized", ["re:.*mlp.*"]), ("int-quantized", ["lm_head"])],
            [(Form(NVFP4), ("*",))],
        ),
        (
            [("float-quantized", ["Linear"]), ("pack-quantized", ["lm_head"])],
            [
                (Form(INT4, granularity=(1, 32)), ("lm_head",)),
                (Form(FP8, granularity="row"), ("*",)),
            ],
        ),
        ([("float-quantized", ["Linear"])], [(Form(FP8, granularity="row"), ("*",))]),
        ([("pack-quantized", ["lm_head"])], [(Form(INT4, granularity=(1, 32)), ("*",))]),
    ],
)
def test_groups_of_several_formats(groups, expected):
    """What holds for a whole class of layers comes last, as compressed-tensors has it."""
    found = recognised(CT, clues(ct_groups(*groups)))
    assert found == tuple(Group(form, modules) for form, modules in expected)


def test_a_group_without_a_format_is_what_its_numbers_are():
    record = ct_groups(("nvfp4-pack-quantized", ["re:.*mlp.*"]), ("float-quantized", ["a.q_proj"]))
    record["format"] = "nvfp4-pack-quantized"
    del record["config_groups"]["group_1"]["format"]
    expected = (
        Group(Form(NVFP4), ("re:.*mlp.*",)),
        Group(Form(FP8, granularity="row"), ("a.q_proj",)),
    )
    assert recognised(CT, clues(record)) == expected
