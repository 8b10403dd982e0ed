"""What is written for engines to read: exact records, and names in them that fit what they should and nothing else."""

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

from fp4convert.dialects import MODULES, Clues, Ignored, dialect_named
from fp4convert.formats import MXFP4, NVFP4
from fp4convert.spelling import Form, Group

M = "model.layers.0.mlp.up_proj"


def of_config(record: dict) -> dict:
    return {"config.json": {"quantization_config": record}}


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
            **of_config({**MO_RECORD, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}),
            "hf_quant_config.json": {**MO_FILE, "quantization": {**MO_FILE["quantization"], "kv_cache_quant_algo": "FP8"}},
        },
    ),
    ("quark", Form(MXFP4), of_config(quark_record(QUARK_MXFP4_BLOCKS, None))),
    ("quark", Form(MXFP4, 4), of_config(quark_record(QUARK_MXFP4_BLOCKS, MX_DYNAMIC))),
    ("quark", Form(NVFP4), of_config(quark_record([QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES], None))),
    (
        "quark",
        Form(NVFP4, 4),
        of_config(quark_record([QUARK_NVFP4_BLOCKS, QUARK_NVFP4_SCALES], [NV_DYNAMIC, QUARK_NVFP4_SCALES])),
    ),
    ("gpt-oss", Form(MXFP4), of_config(GPT_OSS_RECORD)),
    ("deepseek", Form(MXFP4), {"config.json": {"expert_dtype": "fp4", "quantization_config": DEEPSEEK_RECORD}}),
    ("mlx", Form(NVFP4), {"config.json": {"quantization": MLX_NVFP4, "quantization_config": MLX_NVFP4}}),
    ("mlx", Form(MXFP4), {"config.json": {"quantization": MLX_MXFP4, "quantization_config": MLX_MXFP4}}),
    ("comfy", Form(NVFP4, 16, "128x4"), {}),
    ("plain", Form(NVFP4), {}),
    ("plain", Form(MXFP4), {}),
]


@pytest.mark.parametrize(("name", "form", "files"), RECORDS)
def test_records_are_what_engines_read(name, form, files):
    """Typed by hand after each dialect's source."""
    assert dialect_named(name).records([Group(form, (M,))], Ignored((), ("lm_head", "model.embed_tokens"))) == files


@pytest.mark.parametrize(("name", "form", "files"), [row for row in RECORDS if row[2]])
def test_what_is_written_is_recognised_by_its_own_dialect_alone(name, form, files):
    told = Clues(files["config.json"], files.get("hf_quant_config.json", {}), {})
    assert {known: found for known in MODULES if (found := dialect_named(known).recognise(told))} == {
        name: (Group(form, ("*",)),)
    }
    assert list(dialect_named(name).judge(told)) == []
    is_named = name in (CT, MO, "quark", "gpt-oss")
    assert dialect_named(name).is_ignored(told, "lm_head") is is_named
    assert not dialect_named(name).is_ignored(told, M)


def test_gpt_oss_names_what_stays_and_says_no_globs():
    """transformers compiles every entry as an expression: one that begins with "*" is none, and the model does not load."""
    modules = ("lm_head", "model.layers.0.mlp.router", "model.layers.1.mlp.router", "model.layers.0.mlp.gate")
    ignored = Ignored(modules, ("lm_head", "*.gate", "*router*", "re:.*gate$"))
    record = dialect_named("gpt-oss").records([Group(Form(MXFP4), ())], ignored)["config.json"]["quantization_config"]
    assert record["modules_to_not_convert"] == sorted(modules)
    for entry in record["modules_to_not_convert"]:
        re.compile(entry)


def test_comfy_names_its_modules_in_the_file_itself():
    notes = dialect_named("comfy").notes(Form(NVFP4, 16, "128x4"), ["b", "a.0"])
    text = '{"format_version": "1.0", "layers": {"a.0": {"format": "nvfp4"}, "b": {"format": "nvfp4"}}}'
    assert notes == {"_quantization_metadata": text}
    assert dialect_named("comfy").notes(Form(NVFP4, 16, "128x4"), []) == {}
    assert all(dialect_named(name).notes(Form(MXFP4), ["a"]) == {} for name in MODULES if name != "comfy")


def is_excluded(module: str, patterns: list[str]) -> bool:
    """vLLM 0.33, ModelOptQuantConfigBase.is_layer_excluded: equal, or a part of the name, or a wildcard that fits."""
    return any(pattern == module or pattern in module or fnmatchcase(module, pattern) for pattern in patterns)


def excluded_patterns(ignore: tuple[str, ...], quantized: tuple[str, ...]) -> list[str]:
    records = dialect_named(MO).records([Group(Form(NVFP4), quantized)], Ignored(ignore, ()))
    patterns = records["config.json"]["quantization_config"]["ignore"]
    assert records["hf_quant_config.json"]["quantization"]["exclude_modules"] == patterns
    return patterns


def test_a_kept_name_inside_a_quantized_one_does_not_exclude_it():
    ignore = ("lm_head", "model.layers.0.mlp.gate", "output")
    quantized = ("bert.layer.0.attention.output.dense", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    patterns = excluded_patterns(ignore, quantized)
    assert patterns == ["lm_head", "model.layers.0.mlp.gat[e]", "outpu[t]"]
    assert all(is_excluded(module, patterns) for module in ignore)
    assert not any(is_excluded(module, patterns) for module in (*quantized, "model.layers.0.mlp.gate_up_proj"))


NAME = st.lists(st.sampled_from(("a", "b", "ab", "ba", "gate", "gate_proj", "0", "1", "10")), min_size=1, max_size=3).map(
    ".".join
)


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
    """Engines put a prefix before a checkpoint's names, at the front or inside; patterns and expressions hold under it."""
    ignored = Ignored((module,), ("*vision_tower*", "*.gate", "lm_head"))
    record = dialect_named(CT).records([Group(Form(NVFP4), ("model.layers.0.mlp.gate_proj",))], ignored)["config.json"][
        "quantization_config"
    ]
    names = [entry for entry in record["ignore"] if not entry.startswith("re:")]
    expressions = [re.compile(entry.removeprefix("re:")) for entry in record["ignore"] if entry.startswith("re:")]
    assert (seen_as in names or any(expression.match(seen_as) for expression in expressions)) is is_ignored
