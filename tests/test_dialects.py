"""How an artifact spells a matrix: exact names, dtypes, shapes and records, and back again."""

import re
import struct
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4convert.dialects import Form, Ignored, dialect_named, is_quantized_tensor, quantized_modules
from fp4convert.errors import InputError
from fp4convert.formats import MXFP4, NVFP4, Quantized
from fp4convert.shard import TensorRef

CT, MO = "compressed-tensors", "modelopt"
M = "model.layers.0.mlp.up_proj"
SPELLINGS = [
    (
        CT,
        NVFP4,
        [
            (f"{M}.weight_packed", "U8", (48, 32)),
            (f"{M}.weight_scale", "F8_E4M3", (48, 4)),
            (f"{M}.weight_global_scale", "F32", (1,)),
        ],
    ),
    (CT, MXFP4, [(f"{M}.weight_packed", "U8", (48, 32)), (f"{M}.weight_scale", "U8", (48, 2))]),
    (
        MO,
        NVFP4,
        [(f"{M}.weight", "U8", (48, 32)), (f"{M}.weight_scale", "F8_E4M3", (48, 4)), (f"{M}.weight_scale_2", "F32", ())],
    ),
]
CT_NVFP4_RECORD = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
}
CT_MXFP4_RECORD = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
}
MO_RECORD = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MO_FILE = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    },
}

# four-bit activations: compressed-tensors 0.20, quantization/quant_scheme.py (NVFP4, MXFP4); ModelOpt 0.47, torch/export
CT_NVFP4_INPUTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": "local",
    "scale_dtype": "torch.float8_e4m3fn",
    "observer": "static_minmax",
}
CT_MXFP4_INPUTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}
MO_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MO_W4A4_RECORD = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": MO_NUMBERS, "input_activations": MO_NUMBERS}},
    "ignore": ["lm_head", "model.embed_tokens"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MO_W4A4_FILE = {**MO_FILE, "quantization": {**MO_FILE["quantization"], "quant_algo": "NVFP4"}}


def with_inputs(record: dict, *inputs: object) -> dict:
    """The record with one group of modules for each of these input_activations."""
    weights = {"targets": ["Linear"], "weights": record["config_groups"]["group_0"]["weights"]}
    groups = {f"group_{number}": {**weights, "input_activations": numbers} for number, numbers in enumerate(inputs)}
    return {**record, "config_groups": groups}


@pytest.mark.parametrize(("name", "fmt", "expected"), SPELLINGS)
def test_names_dtypes_and_shapes(name, fmt, expected):
    specs = dialect_named(name, fmt).outputs(M, (48, 64), Form(fmt))
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == expected


@pytest.mark.parametrize(
    ("name", "fmt", "files"),
    [
        (CT, NVFP4, {"config.json": CT_NVFP4_RECORD}),
        (CT, MXFP4, {"config.json": CT_MXFP4_RECORD}),
        (MO, NVFP4, {"config.json": MO_RECORD, "hf_quant_config.json": MO_FILE}),
    ],
)
def test_records_are_what_engines_read(name, fmt, files):
    dialect = dialect_named(name, fmt)
    assert dialect.records(Form(fmt), Ignored((), ("lm_head", "model.embed_tokens")), (M,)) == files
    assert dialect.recognise(files["config.json"]) == Form(fmt)


@pytest.mark.parametrize(
    ("spelling", "added"),
    [
        (SPELLINGS[0], [(f"{M}.input_global_scale", "F32", (1,))]),
        (SPELLINGS[1], []),
        (SPELLINGS[2], [(f"{M}.input_scale", "F32", ())]),
    ],
)
def test_four_bit_activations_add_an_input_scale_to_nvfp4(spelling, added):
    name, fmt, expected = spelling
    specs = dialect_named(name, fmt).outputs(M, (48, 64), Form(fmt, 4))
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == expected + added


@pytest.mark.parametrize(
    ("name", "fmt", "files"),
    [
        (CT, NVFP4, {"config.json": with_inputs(CT_NVFP4_RECORD, CT_NVFP4_INPUTS)}),
        (CT, MXFP4, {"config.json": with_inputs(CT_MXFP4_RECORD, CT_MXFP4_INPUTS)}),
        (MO, NVFP4, {"config.json": MO_W4A4_RECORD, "hf_quant_config.json": MO_W4A4_FILE}),
    ],
)
def test_records_of_four_bit_activations(name, fmt, files):
    dialect = dialect_named(name, fmt)
    assert dialect.records(Form(fmt, 4), Ignored((), ("lm_head", "model.embed_tokens")), (M,)) == files
    assert dialect.recognise(files["config.json"]) == Form(fmt, 4)


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
        (CT, with_inputs(CT_NVFP4_RECORD, None, CT_NVFP4_INPUTS), Form(NVFP4, 4)),
        (CT, with_inputs(CT_NVFP4_RECORD), Form(NVFP4)),
        (CT, {**CT_MXFP4_RECORD, "config_groups": None}, Form(MXFP4)),
        (CT, {**CT_MXFP4_RECORD, "config_groups": {"group_0": "W4A4"}}, Form(MXFP4)),
    ],
)
def test_activations_are_recognised(name, declared, form):
    """ModelOpt's NVFP4 with no input_activations in any group is for weights alone: so vLLM 0.33 reads it."""
    assert dialect_named(name).recognise(declared) == form


@pytest.mark.parametrize(
    ("name", "declared", "fmt"),
    [
        (MO, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
        (MO, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, NVFP4),
        (MO, {"quant_method": "modelopt", "quant_algo": "FP8"}, None),
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
    assert dialect_named(name).recognise(declared) == (fmt and Form(fmt, 4 if declared.get("quant_algo") == "NVFP4" else 16))


@pytest.mark.parametrize(("name", "fmt", "expected"), SPELLINGS)
def test_what_is_encoded_is_decoded(name, fmt, expected):
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, 48 * 32, np.uint8).data
    block_scales = rng.integers(0, 255, 48 * 64 // fmt.block_size, np.uint8).data
    stored = float(np.float32(0.0123)) if fmt.has_global_scale else None
    dialect = dialect_named(name, fmt)
    kind = dialect.GLOBAL_SCALE_KIND
    q = Quantized(fmt, (48, 64), packed, block_scales, stored, kind)
    top, bottom = dialect.encode(M, q.rows(0, 10)), dialect.encode(M, q.rows(10, 48))
    parts = {part: bytes(top[part]) + bytes(bottom[part]) for part in top}
    parts |= {part: bytes(data) for part, data in dialect.encode_global(M, q, None).items()}
    assert list(parts) == [part for part, _, _ in expected]
    assert parts[expected[0][0]] == bytes(packed)
    assert parts[expected[1][0]] == bytes(block_scales)
    back = dialect.decode(M, (48, 64), fmt, lambda part: memoryview(parts[part]))
    assert (bytes(back.packed), bytes(back.block_scales)) == (bytes(packed), bytes(block_scales))
    assert (back.format, back.shape, back.global_scale) == (fmt, (48, 64), stored)
    assert not fmt.has_global_scale or back.kind == kind


MULTIPLIERS = [1.0, 2.0**-126, 2.0**100, 3.0, 1e-5, 6.5e-4, float(np.float32(3.4e38) / np.float32(2688))]


def stored_global(name: str, multiplier: float, kind: str) -> bytes:
    q = Quantized(NVFP4, (1, 16), memoryview(bytes(8)), memoryview(bytes(1)), multiplier, kind)
    (data,) = dialect_named(name).encode_global(M, q, None).values()
    return bytes(data)


@pytest.mark.parametrize(("name", "kind"), [(CT, "multiplier"), (MO, "divisor")])
def test_the_other_kind_of_global_scale_is_one_rounding_of_its_reciprocal(name, kind):
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-126, 115, 2000)
    drawn = (rng.uniform(1, 2, 2000) * 2.0**exponents).astype(np.float32)
    for value in (*np.array(MULTIPLIERS, np.float32), *drawn):
        assert stored_global(name, float(value), kind) == (np.float32(1) / value).astype("<f4").tobytes()


@pytest.mark.parametrize(("name", "kind"), [(CT, "divisor"), (MO, "multiplier")])
def test_the_own_kind_of_global_scale_is_stored_as_it_is(name, kind):
    for value in np.array(MULTIPLIERS, np.float32):
        assert stored_global(name, float(value), kind) == struct.pack("<f", value)


def test_no_global_scale_is_no_tensor():
    q = Quantized(MXFP4, (1, 32), memoryview(bytes(16)), memoryview(bytes(1)), None)
    assert dialect_named(CT).encode_global(M, q, None) == {}


def is_excluded(module: str, patterns: list[str]) -> bool:
    """vLLM 0.33, ModelOptQuantConfigBase.is_layer_excluded: equal, or a part of the name, or a wildcard that fits."""
    return any(pattern == module or pattern in module or fnmatchcase(module, pattern) for pattern in patterns)


def excluded_patterns(ignore: tuple[str, ...], quantized: tuple[str, ...]) -> list[str]:
    records = dialect_named(MO).records(Form(NVFP4), Ignored(ignore, ()), quantized)
    patterns = records["config.json"]["ignore"]
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
    ("name", "is_quantized"),
    [
        ("a.layer_scales", False),
        ("a.weight_packed", True),
        ("a.weight_scale", True),
        ("a.weight_scale_2", True),
        ("a.weight_global_scale", True),
        ("a.weight_scale_inv", True),
        ("a.experts.gate_up_proj_blocks", True),
        ("a.experts.gate_up_proj_scales", True),
        ("a.qweight", True),
        ("a.qzeros", True),
        ("a.weight", False),
        ("a.bias", False),
        ("a.scale", False),
        ("a.logit_scale", False),
        ("a.blocks.0.weight", False),
    ],
)
def test_names_that_only_quantized_checkpoints_have(name, is_quantized):
    dtype = "U8" if is_quantized else "BF16"
    assert is_quantized_tensor(TensorRef(name, dtype, (4,), "model.safetensors", 0)) is is_quantized


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
    record = dialect_named(CT).records(Form(NVFP4), ignored, ("model.layers.0.mlp.gate_proj",))["config.json"]
    names = [entry for entry in record["ignore"] if not entry.startswith("re:")]
    expressions = [re.compile(entry.removeprefix("re:")) for entry in record["ignore"] if entry.startswith("re:")]
    assert (seen_as in names or any(expression.match(seen_as) for expression in expressions)) is is_ignored


@pytest.mark.parametrize(("name", "ending"), [(CT, "weight_packed"), (MO, "weight_scale_2")])
def test_modules_are_found_by_their_tensors(name, ending):
    names = [f"b.{ending}", f"a.0.{ending}", "a.0.bias", "lm_head.weight", "norm.weight"]
    assert quantized_modules(dialect_named(name), names) == ["a.0", "b"]


def test_an_unknown_dialect_is_refused_with_the_known_ones():
    with pytest.raises(InputError) as caught:
        dialect_named("awq")
    assert caught.value.code == "unknown-dialect"
    assert "compressed-tensors, modelopt" in caught.value.message


def test_a_dialect_that_cannot_say_a_format_is_refused():
    with pytest.raises(InputError) as caught:
        dialect_named(MO, MXFP4)
    assert caught.value.code == "dialect-format"
    assert "nvfp4" in caught.value.message
