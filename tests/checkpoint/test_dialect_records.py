"""What is written for engines to read: exact records, and names in them that fit what they should
and nothing else.
"""

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed_records import (
    CT,
    CT_CACHE,
    CT_MXFP4_INPUTS,
    CT_MXFP4_RECORD,
    CT_NVFP4_INPUTS,
    CT_NVFP4_RECORD,
    DEEPSEEK_RECORD,
    GPT_OSS_RECORD,
    MLX_MXFP4,
    MLX_NVFP4,
    MO,
    MO_FILE,
    MO_RECORD,
    MO_W4A4_FILE,
    MO_W4A4_RECORD,
    MX_DYNAMIC,
    NV_DYNAMIC,
    QUARK_MXFP4_BLOCKS,
    QUARK_NVFP4_BLOCKS,
    QUARK_NVFP4_SCALES,
    quark_record,
    with_inputs,
)

from fp4convert.checkpoint.dialects.base import Clues, Ignored
from fp4convert.checkpoint.dialects.forms import Form, Group, targets_of, with_values
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named, recognise
from fp4convert.checkpoint.dialects.target_forms import check_forms, fp8_form, module_form
from fp4convert.checkpoint.modules import form_finder
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FP8, INT4, MXFP4, NVFP4
from fp4convert.recipes.recipe import Target

M = "model.layers.0.mlp.up_proj"


def of_config(record: dict) -> dict:
    return {"config.json": {"quantization_config": record}}


def record_of(name: str, groups: list[Group], ignored: Ignored) -> dict:
    """The record that a dialect writes into config.json."""
    return dialect_named(name).records(groups, ignored)["config.json"]["quantization_config"]


def expressions_in(record: dict) -> list[re.Pattern[str]]:
    """The expressions of `ignore`."""
    entries = (entry for entry in record["ignore"] if entry.startswith("re:"))
    return [re.compile(entry.removeprefix("re:")) for entry in entries]


MO_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
RECORDS = [
    (CT, Form(NVFP4), of_config(CT_NVFP4_RECORD)),
    (CT, Form(MXFP4), of_config(CT_MXFP4_RECORD)),
    (CT, Form(NVFP4, 4), of_config(with_inputs(CT_NVFP4_RECORD, CT_NVFP4_INPUTS))),
    (CT, Form(MXFP4, 4), of_config(with_inputs(CT_MXFP4_RECORD, CT_MXFP4_INPUTS))),
    (CT, Form(NVFP4, kv_cache="fp8"), of_config({**CT_NVFP4_RECORD, "kv_cache_scheme": CT_CACHE})),
    (MO, Form(NVFP4), {**of_config(MO_RECORD), "hf_quant_config.json": MO_FILE}),
    (MO, Form(NVFP4, 4), {**of_config(MO_W4A4_RECORD), "hf_quant_config.json": MO_W4A4_FILE}),
    (
        MO,
        Form(NVFP4, kv_cache="fp8"),
        {
            **of_config({**MO_RECORD, "kv_cache_scheme": MO_FP8}),
            "hf_quant_config.json": {
                **MO_FILE,
                "quantization": {**MO_FILE["quantization"], "kv_cache_quant_algo": "FP8"},
            },
        },
    ),
    ("quark", Form(MXFP4), of_config(quark_record(QUARK_MXFP4_BLOCKS, None))),
    ("quark", Form(MXFP4, 4), of_config(quark_record(QUARK_MXFP4_BLOCKS, MX_DYNAMIC))),
    ("quark", Form(NVFP4), of_config(quark_record([QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES], None))),
    (
        "quark",
        Form(NVFP4, 4),
        of_config(
            quark_record([QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES], [NV_DYNAMIC, QUARK_NVFP4_SCALES])
        ),
    ),
    ("gpt-oss", Form(MXFP4), of_config(GPT_OSS_RECORD)),
    (
        "deepseek",
        Form(MXFP4),
        {"config.json": {"expert_dtype": "fp4", "quantization_config": DEEPSEEK_RECORD}},
    ),
    (
        "mlx",
        Form(NVFP4),
        {"config.json": {"quantization": MLX_NVFP4, "quantization_config": MLX_NVFP4}},
    ),
    (
        "mlx",
        Form(MXFP4),
        {"config.json": {"quantization": MLX_MXFP4, "quantization_config": MLX_MXFP4}},
    ),
    ("comfy", Form(NVFP4, 16, "128x4"), {}),
    ("plain", Form(NVFP4), {}),
    ("plain", Form(MXFP4), {}),
]


@pytest.mark.parametrize(("name", "form", "files"), RECORDS)
def test_records_are_what_engines_read(name, form, files):
    """Typed by hand after each dialect's source."""
    ignored = Ignored((), ("lm_head", "model.embed_tokens"))
    assert dialect_named(name).records([Group(form, (M,))], ignored) == files


@pytest.mark.parametrize(("name", "form", "files"), [row for row in RECORDS if row[2]])
def test_what_is_written_is_recognised_by_its_own_dialect_alone(name, form, files):
    told = Clues(files["config.json"], files.get("hf_quant_config.json", {}), {})
    assert {
        known: found for known in DIALECTS if (found := dialect_named(known).recognise(told))
    } == {name: (Group(form, ("*",)),)}
    assert list(recognise(told)) == [(name, (Group(form, ("*",)),))], "others need not be asked"
    assert list(dialect_named(name).judge(told)) == []
    is_named = name in (CT, MO, "quark", "gpt-oss")
    assert dialect_named(name).ignores(told)("lm_head") is is_named
    assert not dialect_named(name).ignores(told)(M)


def test_gpt_oss_names_what_stays_and_says_no_globs():
    """transformers compiles every entry as an expression: one that begins with "*" is none, and the
    model does not load.
    """
    layer = "model.layers.0.mlp"
    modules = ("lm_head", f"{layer}.router", "model.layers.1.mlp.router", f"{layer}.gate")
    ignored = Ignored(modules, ("lm_head", "*.gate", "*router*", "re:.*gate$"))
    record = record_of("gpt-oss", [Group(Form(MXFP4), ())], ignored)
    assert record["modules_to_not_convert"] == sorted(modules)
    for entry in record["modules_to_not_convert"]:
        re.compile(entry)


def test_comfy_names_its_modules_in_the_file_itself():
    notes = dialect_named("comfy").notes(dict.fromkeys(("b", "a.0"), Form(NVFP4, 16, "128x4")))
    text = (
        '{"format_version": "1.0", "layers": {"a.0": {"format": "nvfp4"}, "b": {"format": '
        '"nvfp4"}}}'
    )
    assert notes == {"_quantization_metadata": text}
    assert dialect_named("comfy").notes({}) == {}
    assert all(
        dialect_named(name).notes({"a": Form(MXFP4)}) == {} for name in DIALECTS if name != "comfy"
    )


def is_excluded(module: str, patterns: list[str]) -> bool:
    """vLLM 0.33, ModelOptQuantConfigBase.is_layer_excluded: equal, or a part of the name, or a
    wildcard that fits.
    """
    return any(
        pattern == module or pattern in module or fnmatchcase(module, pattern)
        for pattern in patterns
    )


def excluded_patterns(ignore: tuple[str, ...], quantized: tuple[str, ...]) -> list[str]:
    records = dialect_named(MO).records([Group(Form(NVFP4), quantized)], Ignored(ignore, ()))
    patterns = records["config.json"]["quantization_config"]["ignore"]
    assert records["hf_quant_config.json"]["quantization"]["exclude_modules"] == patterns
    return patterns


def test_a_kept_name_inside_a_quantized_one_does_not_exclude_it():
    ignore = ("lm_head", "model.layers.0.mlp.gate", "output")
    quantized = (
        "bert.layer.0.attention.output.dense",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    )
    patterns = excluded_patterns(ignore, quantized)
    assert patterns == ["lm_head", "model.layers.0.mlp.gat[e]", "outpu[t]"]
    assert all(is_excluded(module, patterns) for module in ignore)
    assert not any(
        is_excluded(module, patterns) for module in (*quantized, "model.layers.0.mlp.gate_up_proj")
    )


def test_parts_of_a_fused_layer_are_excluded_by_name_too():
    """vLLM 0.33, is_layer_skipped: of qkv_proj it looks for the exact names of its parts."""
    parts = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    ignored = Ignored(parts, ("*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj"))
    group = Group(Form(NVFP4), ("model.layers.0.mlp.gate_proj",))
    record = dialect_named(MO).records([group], ignored)["hf_quant_config.json"]
    assert {*parts, *ignored.patterns} <= {*record["quantization"]["exclude_modules"]}


NAME = st.lists(
    st.sampled_from(("a", "b", "ab", "ba", "gate", "gate_proj", "0", "1", "10")),
    min_size=1,
    max_size=3,
).map(".".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sets(NAME, max_size=6), st.sets(NAME, max_size=6))
def test_exactly_the_kept_names_are_excluded(kept, quantized):
    ignore = tuple(sorted(kept - quantized))
    patterns = excluded_patterns(ignore, tuple(quantized))
    assert all(is_excluded(module, patterns) for module in ignore)
    assert not any(is_excluded(module, patterns) for module in quantized)


@pytest.mark.parametrize(
    ("module", "seen_as", "is_ignored"),
    [
        ("odd", "odd", True),
        ("odd", "model.odd", True),
        ("odd", "even.oddity", False),
        ("re:(bad", "re:(bad", True),
        ("vision_tower.layers.0.fc1", "model.vision_tower.layers.0.fc1", True),
        ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_kept_modules_are_ignored_under_any_prefix(module, seen_as, is_ignored):
    """Engines put a prefix before a checkpoint's names, at the front or inside; patterns and
    expressions hold under it.
    """
    ignored = Ignored((module,), ("*vision_tower*", "*.gate", "lm_head"))
    record = record_of(CT, [Group(Form(NVFP4), ("model.layers.0.mlp.gate_proj",))], ignored)
    names = [entry for entry in record["ignore"] if not entry.startswith("re:")]
    is_matched = any(expression.match(seen_as) for expression in expressions_in(record))
    assert (seen_as in names or is_matched) is is_ignored


MLP, ATTENTION = ("m.0.mlp.up_proj", "m.1.mlp.up_proj"), ("m.0.attn.q_proj", "m.1.attn.q_proj")
CT_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CT_FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
BESIDE = [  # a form, its format, weights and activations in compressed-tensors
    (Form(FP8, granularity="tensor"), "float-quantized", {**CT_FP8, "strategy": "tensor"}, None),
    (Form(FP8, granularity="row"), "float-quantized", {**CT_FP8, "strategy": "channel"}, None),
    (
        Form(FP8, 8, granularity="row"),
        "float-quantized",
        {**CT_FP8, "strategy": "channel"},
        {**CT_FP8_INPUTS, "strategy": "token"},
    ),
    (
        Form(FP8, 8, granularity=(128, 128)),
        "float-quantized",
        {**CT_FP8, "strategy": "block", "block_structure": [128, 128]},
        {**CT_FP8_INPUTS, "strategy": "group", "group_size": 128},
    ),
    (
        Form(MXFP4),
        "mxfp4-pack-quantized",
        CT_MXFP4_RECORD["config_groups"]["group_0"]["weights"],
        None,
    ),
    (
        Form(INT4, granularity=(1, 32)),
        "pack-quantized",
        {**CT_FP8, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        None,
    ),
]


@pytest.mark.parametrize(("form", "fmt", "weights", "inputs"), BESIDE)
def test_groups_of_compressed_tensors(form, fmt, weights, inputs):
    """Typed by hand after compressed-tensors 0.20, quantization/quant_scheme.py: every group has
    its own format.
    """
    groups = [Group(Form(NVFP4), MLP), Group(form, ATTENTION)]
    record = record_of(CT, groups, Ignored((), ("lm_head",)))
    assert record == {
        "quant_method": CT,
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [r"re:(?:.*\.)?m\.\d+\.mlp\.up_proj$"],
                "format": "nvfp4-pack-quantized",
                "weights": CT_NVFP4_RECORD["config_groups"]["group_0"]["weights"],
                "input_activations": None,
            },
            "group_1": {
                "targets": [r"re:(?:.*\.)?m\.\d+\.attn\.q_proj$"],
                "format": fmt,
                "weights": weights,
                "input_activations": inputs,
            },
        },
        "ignore": ["lm_head"],
    }
    find = form_finder(dialect_named(CT).recognise(Clues({"quantization_config": record}, {}, {})))
    found = [find(module) for module in (*MLP, *ATTENTION, "lm_head")]
    assert found == [Form(NVFP4), Form(NVFP4), form, form, None]


@pytest.mark.parametrize(
    ("form", "algorithm", "group"),
    [
        (
            Form(FP8, 8, granularity="tensor"),
            "FP8",
            {"weights": MO_FP8, "input_activations": MO_FP8},
        ),
        (
            Form(FP8, 8, granularity="row"),
            "FP8_PER_CHANNEL_PER_TOKEN",
            {"weights": {**MO_FP8, "strategy": "channel"}, "input_activations": MO_FP8},
        ),
        (
            Form(FP8, granularity=(128, 128)),
            "FP8_PB_WO",
            {"weights": {**MO_FP8, "strategy": "block", "block_structure": [128, 128]}},
        ),
    ],
)
def test_mixed_precision_of_modelopt(form, algorithm, group):
    """Typed by hand after ModelOpt 0.47, torch/export/convert_hf_config.py: every module, and every
    group, by name.
    """
    records = dialect_named(MO).records(
        [Group(Form(NVFP4, 4), MLP), Group(form, ATTENTION)], Ignored(("m.0.mlp.up",), ("lm_head",))
    )
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    layers = {
        **{module: {"quant_algo": algorithm} for module in ATTENTION},
        **{module: {"quant_algo": "NVFP4", "group_size": 16} for module in MLP},
    }
    config = records["config.json"]["quantization_config"]
    assert config == {
        "quant_method": MO,
        "quant_algo": "MIXED_PRECISION",
        "config_groups": {
            "group_0": {"targets": list(MLP), "weights": numbers, "input_activations": numbers},
            "group_1": {"targets": list(ATTENTION), **group},
        },
        "quantized_layers": layers,
        "ignore": ["m.0.mlp.u[p]", "lm_head"],
        "producer": {"name": MO, "version": "0.47.0"},
    }
    assert records["hf_quant_config.json"]["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["m.0.mlp.u[p]", "lm_head"],
        "quantized_layers": layers,
    }
    told = Clues({"quantization_config": config}, records["hf_quant_config.json"], {})
    find = form_finder(dialect_named(MO).recognise(told))
    found = [find(module) for module in (*MLP, *ATTENTION, "lm_head")]
    assert found == [Form(NVFP4, 4), Form(NVFP4, 4), form, form, None]
    assert list(dialect_named(MO).judge(told)) == []
    assert not any(dialect_named(MO).ignores(told)(module) for module in (*MLP, *ATTENTION))
    assert dialect_named(MO).ignores(told)("m.0.mlp.gate")


@pytest.mark.parametrize(
    ("modules", "others", "targets"),
    [
        (["l.0.a", "l.1.a"], ["l.0.b"], [r"re:^?l\.\d+\.a$"]),
        (["l.0.a", "l.2.a"], ["l.1.a"], [r"re:^?l\.0\.a$", r"re:^?l\.2\.a$"]),
        (
            ["l.0.experts.0.w1", "l.3.experts.17.w1"],
            ["l.0.w1"],
            [r"re:^?l\.\d+\.experts\.\d+\.w1$"],
        ),
        (["l.0.a"], ["mtp.l.0.a"], [r"re:l\.\d+\.a$"]),
        (["mtp.l.0.a"], ["l.0.a"], [r"re:^?mtp\.l\.\d+\.a$"]),
        (["m.t.layers.0.a"], ["m.t.layers.1.a"], [r"re:^?layers\.0\.a$"]),
        (["m.t.layers.0.a"], ["m.t.layers.1.a", "v.layers.0.a"], [r"re:^?m\.t\.layers\.0\.a$"]),
        (["b2.c", "b3.c"], [], [r"re:^?b2\.c$", r"re:^?b3\.c$"]),
        (["0", "1"], [], [r"re:^?\d+$"]),
        (["a+b.(c"], [], [r"re:^?a\+b\.\(c$"]),
    ],
)
def test_targets_name_modules_that_differ_in_numbers_at_once(modules, others, targets):
    assert targets_of(modules, others, "^?") == targets


def test_values_that_are_keys_have_the_form_of_these():
    """Of a layer that has none of its own, as other layers have."""
    first = ("m.layers.0.k_proj", "m.layers.0.v_proj")
    second = ("m.layers.1.k_proj", "m.layers.1.q_proj")
    both = ("m.layers.1.k_proj", "m.layers.1.v_proj", "m.layers.1.q_proj")
    assert with_values(first, (*first, *second)) == first
    assert with_values(second, (*first, *second)) == both
    assert with_values(second, both) == second
    assert with_values(second, second) == second


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sets(NAME, max_size=6), st.sets(NAME, max_size=6))
def test_targets_fit_their_modules_and_no_others(first, second):
    modules, others = sorted(first), sorted(second - first)
    targets = [
        re.compile(target.removeprefix("re:"))
        for target in targets_of(modules, others, r"(?:.*\.)?")
    ]
    assert all(any(target.match(module) for target in targets) for module in modules)
    assert not any(target.match(other) for target in targets for other in others)


@pytest.mark.parametrize(
    "name", [name for name in DIALECTS if name not in (CT, MO, "comfy", "deepseek")]
)
def test_dialects_that_hold_one_form_refuse_others(name):
    own = dialect_named(name).TRAITS.writes[0].name
    target = Target(own, name)
    other = "mxfp4" if own == "nvfp4" else "nvfp4"
    check_forms(target, [module_form(target, own)])
    for word in ("fp8",) if name == "mlx" else (other, "fp8"):
        with pytest.raises(InputError) as refused:
            check_forms(target, [module_form(target, own), module_form(target, word)])
        assert refused.value.code == "dialect-mixed"
        assert word in refused.value.message


def test_dialects_refuse_what_they_cannot_mix():
    target, other = Target("nvfp4", MO), Target("nvfp4", CT)
    check_forms(target, [module_form(target, "nvfp4"), module_form(target, "fp8")])
    with pytest.raises(InputError):
        check_forms(target, [module_form(target, "mxfp4")])
    check_forms(other, [module_form(other, word) for word in ("nvfp4", "mxfp4", "fp8")])
    small, large = (fp8_form(target, (size, size)) for size in (32, 128))
    assert dialect_named(MO).unfit("m", (256, 256), small) == "FP8 with scales of 32x32"
    assert dialect_named(MO).unfit("m", (256, 256), large) is None


@pytest.mark.parametrize(
    ("name", "activations", "granularity", "scales", "bits"),
    [
        (CT, 16, "tensor", (1,), 16),
        (CT, 16, "row", (200, 1), 16),
        (CT, 4, "row", (200, 1), 8),
        (CT, 4, (128, 128), (2, 3), 8),
        (CT, 16, (32, 32), (7, 10), 16),
        (MO, 16, "tensor", (), 8),
        (MO, 4, "tensor", (), 8),
        (MO, 16, "row", (200,), 8),
        (MO, 4, (128, 128), (2, 1, 3, 1), 16),
        ("comfy", 8, "tensor", (), 8),
    ],
)
def test_tensors_of_fp8_modules(name, activations, granularity, scales, bits):
    """vLLM 0.33, compressed_tensors_w8a8_fp8 and modelopt.py; only ModelOpt's FP8 has a static
    scale of activations, and must.
    """
    form = fp8_form(Target("nvfp4", name, None, activations), granularity)
    specs = [
        (spec.name, spec.dtype, spec.shape)
        for spec in dialect_named(name).outputs("m", (200, 320), form)
    ]
    inputs = [("m.input_scale", "F32", ())] if name == MO and granularity == "tensor" else []
    marks = [("m.comfy_quant", "U8", (26,))] if name == "comfy" else []
    weights = [("m.weight", "F8_E4M3", (200, 320)), ("m.weight_scale", "F32", scales)]
    assert specs == [*weights, *inputs, *marks]
    assert form.activations == bits
    table = dialect_named(name).TRAITS.fp8
    assert table is not None
    panels = [(memoryview(b"ab"), memoryview(b"1234")), (memoryview(b"c"), memoryview(b""))]
    parts = list(table.encode("m", (200, 320), form, panels, 1.0))
    ones = [("m.input_scale", bytes.fromhex("0000803f"))] if inputs else []
    if inputs:  # nothing is 1 because nobody says it
        with pytest.raises(RuntimeError, match="no input scale"):
            list(table.encode("m", (200, 320), form, panels))
    if name == "comfy":
        ones = [("m.comfy_quant", b'{"format":"float8_e4m3fn"}')]
    expected = [*ones, ("m.weight", b"ab"), ("m.weight_scale", b"1234"), ("m.weight", b"c")]
    assert [(part, bytes(data)) for part, data in parts] == expected


@pytest.mark.parametrize(
    ("name", "weight", "scales", "bits"),
    [
        (CT, ("m.weight", "F8_E4M3", (200, 320)), ("m.weight_scale", "U8", (200, 10)), 8),
        (MO, ("m.weight", "F8_E4M3", (200, 320)), ("m.weight_scale", "U8", (200, 10)), 8),
        ("mlx", ("m.weight", "U32", (200, 80)), ("m.scales", "U8", (200, 10)), 16),
        ("comfy", ("m.weight", "F8_E4M3", (200, 320)), ("m.weight_scale", "U8", (256, 12)), 8),
    ],
)
def test_tensors_of_mxfp8_modules(name, weight, scales, bits):
    """In the order 128x4 row 33 and block 1 is byte 16 (row 1 of 32) + 4 (the second 32) + 1."""
    form = module_form(Target("mxfp8", name, None, bits), "mxfp8")
    dialect = dialect_named(name)
    specs = [(spec.name, spec.dtype, spec.shape) for spec in dialect.outputs("m", (200, 320), form)]
    assert specs[:2] == [weight, scales]
    assert form.activations == bits
    table = dialect.TRAITS.fp8
    assert table is not None
    linear = bytearray(200 * 10)
    linear[33 * 10 + 1] = 7
    panels = [(memoryview(bytes(200 * 320)), memoryview(bytes(linear)))]
    parts = dict(table.encode("m", (200, 320), form, panels))
    place = 21 if name == "comfy" else 331
    assert bytes(parts[scales[0]])[place] == 7
    assert sum(bytes(parts[scales[0]])) == 7


def test_layers_that_stay_are_told_under_whatever_an_engine_has_before_them():
    """Qwen2.5-VL saves model.layers, and runs model.language_model.layers: names from the layers on
    hold for both.
    """
    kept, pattern = "model.layers.0.mlp.down_proj", "model.layers.1.*"
    ignored = Ignored((kept, "model.layers.1.mlp.up_proj"), (pattern,))
    group = Group(Form(NVFP4), ("model.layers.2.mlp.down_proj", "model.layers.11.mlp.up_proj"))
    expressions = expressions_in(record_of(CT, [group], ignored))
    layers = {"0.mlp.down_proj", "1.mlp.up_proj", "2.mlp.down_proj", "11.mlp.up_proj"}
    for prefix in ("model.", "model.language_model.", "language_model.model.", ""):
        fitting = {
            name
            for name in layers
            if any(expression.match(f"{prefix}layers.{name}") for expression in expressions)
        }
        assert fitting == {"0.mlp.down_proj", "1.mlp.up_proj"}, prefix


def test_a_kept_tower_does_not_hide_the_layers_of_the_text():
    """Both have layers.0: the tower keeps its whole name."""
    ignored = Ignored(("vision.layers.0.mlp.up_proj",), ())
    group = Group(Form(NVFP4), ("model.layers.0.mlp.up_proj",))
    told = expressions_in(record_of(CT, [group], ignored))
    assert not any(entry.match("model.layers.0.mlp.up_proj") for entry in told)
    assert any(entry.match("model.vision.layers.0.mlp.up_proj") for entry in told)
