"""Artifacts of several forms: which module is which, what `inspect` says of them, and what it finds
wrong.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, run, write_checkpoint
from spellings import KEPT, module_of, spelled
from typed_records import CT_MXFP4_RECORD, CT_NVFP4_RECORD

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.modules import form_finder
from fp4convert.numerics.formats import FP8, INT4, NVFP4

CT, MO = "compressed-tensors", "modelopt"
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
SHAPE = (32, 64)
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
STRATEGIES = {
    (1,): {"strategy": "tensor"},
    (32, 1): {"strategy": "channel"},
    (2, 1): {"strategy": "block", "block_structure": [16, 64]},
}
ALGORITHMS = {(): "FP8", (32,): "FP8_PER_CHANNEL_PER_TOKEN", (1, 1, 1, 1): "FP8_PB_WO"}


def fp8(name: str, scales: tuple[int, ...], has_inputs: bool = False) -> dict[str, Tensor]:
    """An FP8 module: finite codes, and scales of weights."""
    chance = np.random.default_rng(1)
    codes = chance.integers(0, 0x7E, SHAPE, np.uint8)
    values = chance.uniform(1e-3, 2e-3, scales).astype("<f4")
    inputs: dict[str, Tensor] = (
        {f"{name}.input_scale": ("F32", (), struct.pack("<f", 1.0))} if has_inputs else {}
    )
    return {
        f"{name}.weight": ("F8_E4M3", SHAPE, codes.tobytes()),
        f"{name}.weight_scale": ("F32", scales, values.tobytes()),
        **inputs,
    }


def fp4(dialect: str, fmt: str, *names: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for seed, name in enumerate(names):
        tensors |= spelled(
            dialect, fmt, name, module_of(seed, fmt, SHAPE, 2.0**-11 if fmt == "nvfp4" else None)
        )
    return tensors


def ct_record(**groups: tuple[str, dict, list[str]]) -> dict:
    schemes = {
        name: {"format": fmt, "targets": targets, "weights": weights, "input_activations": None}
        for name, (fmt, weights, targets) in groups.items()
    }
    return {
        **CT_NVFP4_RECORD,
        "format": "mixed-precision",
        "config_groups": schemes,
        "ignore": ["lm_head"],
    }


CT_NVFP4 = CT_NVFP4_RECORD["config_groups"]["group_0"]["weights"]
CT_MXFP4 = CT_MXFP4_RECORD["config_groups"]["group_0"]["weights"]


def write_ct(folder: Path, scales: tuple[int, ...] = (32, 1), **changes: Tensor | None) -> Path:
    """NVFP4 in the MLP, FP8 in the attention; some tensors may be others, or gone."""
    record = ct_record(
        mlp=("nvfp4-pack-quantized", CT_NVFP4, ["re:.*mlp.*"]),
        attention=("float-quantized", {**NUMBERS, **STRATEGIES[scales]}, [Q, OUT]),
    )
    return write(
        folder,
        {**fp4(CT, "nvfp4", UP, DOWN), **fp8(Q, scales), **fp8(OUT, scales), **changes},
        record,
    )


def write_mo(folder: Path, scales: tuple[int, ...] = (), **changes: Tensor | None) -> Path:
    layers = {
        **{name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in (UP, DOWN)},
        **{name: {"quant_algo": ALGORITHMS[scales]} for name in (Q, OUT)},
    }
    record = {
        "quant_method": MO,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["lm_head"],
    }
    modules = {
        **fp4(MO, "nvfp4", UP, DOWN),
        **fp8(Q, scales, scales == ()),
        **fp8(OUT, scales, scales == ()),
    }
    return write(folder, {**modules, **changes}, record)


def write(folder: Path, tensors: dict[str, Tensor | None], record: dict) -> Path:
    stored = {name: tensor for name, tensor in {**KEPT, **tensors}.items() if tensor is not None}
    config = {"model_type": "llama", "quantization_config": record}
    return write_checkpoint(folder, {"model.safetensors": stored}, config)


def findings(folder: Path) -> list[tuple[str, str, str | None]]:
    found = run("inspect", folder, "--json").json["findings"]
    return [(finding["level"], finding["code"], finding["tensor"]) for finding in found]


@pytest.mark.parametrize(
    ("write_one", "scales", "granularity", "bits"),
    [
        (write_ct, (1,), "tensor", 8 + 32 / 2048),
        (write_ct, (32, 1), "row", 8.5),
        (write_ct, (2, 1), (16, 64), 8 + 64 / 2048),
        (write_mo, (), "tensor", 8 + 32 / 2048),
        (write_mo, (32,), "row", 8.5),
        (write_mo, (1, 1, 1, 1), (128, 128), 8 + 32 / 2048),
    ],
)
def test_fp8_beside_nvfp4(write_one, scales, granularity, bits, tmp_path):
    folder = write_one(tmp_path / "a", scales)
    artifact = open_artifact(str(folder))
    assert artifact.findings == ()
    assert {name: packed.form.format for name, packed in artifact.modules.items()} == {
        UP: NVFP4,
        DOWN: NVFP4,
    }
    eight_bits = {name: packed.form for name, packed in artifact.others.items()}
    assert {name: (form.format, form.granularity) for name, form in eight_bits.items()} == {
        Q: (FP8, granularity),
        OUT: (FP8, granularity),
    }
    codes, stored_scales = (bytes(artifact.source.read(ref)) for ref in artifact.others[Q].refs[:2])
    expected = fp8(Q, scales)
    assert (codes, stored_scales) == (expected[f"{Q}.weight"][2], expected[f"{Q}.weight_scale"][2])
    document = run("inspect", folder, "--json").json
    assert (document["healthy"], document["findings"], document["format"]) == (True, [], "mixed")
    assert document["tensors"] == {"quantized": 4, "other": len(KEPT)}
    nvfp4, eight = document["forms"]
    assert (nvfp4["format"], nvfp4["modules"], nvfp4["block_size"]) == ("nvfp4", 2, 16)
    assert (eight["format"], eight["modules"], eight["element_dtype"]) == ("fp8", 2, "fp8_e4m3")
    assert [form["bits_per_weight"] for form in document["forms"]] == pytest.approx(
        [4.5 + 32 / 2048, bits], abs=1e-4
    )
    assert eight["block_size"] == (list(granularity) if isinstance(granularity, tuple) else None)
    assert document["bits_per_weight"] == pytest.approx((4.5 + 32 / 2048 + bits) / 2, abs=1e-4)
    assert f"2 modules, {bits:.3f} bits a weight" in run("inspect", folder).out


def test_mxfp4_beside_nvfp4(tmp_path):
    record = ct_record(
        mlp=("nvfp4-pack-quantized", CT_NVFP4, ["Linear"]),
        attention=("mxfp4-pack-quantized", CT_MXFP4, ["re:.*self_attn"]),
    )
    folder = write(
        tmp_path / "a", {**fp4(CT, "nvfp4", UP, DOWN), **fp4(CT, "mxfp4", Q, OUT)}, record
    )
    assert findings(folder) == []
    artifact = open_artifact(str(folder))
    assert {name: artifact.decode(name).format.name for name in artifact.modules} == {
        **dict.fromkeys((UP, DOWN), "nvfp4"),
        **dict.fromkeys((Q, OUT), "mxfp4"),
    }
    refused = run("transcode", folder, "-o", tmp_path / "b", "--dialect", "modelopt", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "dialect-mixed")


def test_int4_beside_mxfp4(tmp_path):
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    record = ct_record(
        experts=("pack-quantized", int4, [Q]),
        rest=("mxfp4-pack-quantized", CT_MXFP4, ["re:.*mlp.*"]),
    )
    packed: dict[str, Tensor] = {
        f"{Q}.weight_packed": ("I32", (32, 8), bytes(1024)),
        f"{Q}.weight_scale": ("BF16", (32, 2), b"\x80\x3f" * 64),
        f"{Q}.weight_shape": ("I64", (2,), struct.pack("<2q", *SHAPE)),
    }
    folder = write(tmp_path / "a", {**fp4(CT, "mxfp4", UP, DOWN), **packed}, record)
    assert findings(folder) == []
    other = open_artifact(str(folder)).others[Q]
    assert other.form == Form(INT4, granularity=(1, 32), stored_scales="BF16")
    assert other.shape == SHAPE
    forms = run("inspect", folder, "--json").json["forms"]
    assert [form["format"] for form in forms] == ["mxfp4", "int4"]


def scales_of(*values: float) -> Tensor:
    return "F32", (32, 1), struct.pack("<32f", *values, *[1e-3] * (32 - len(values)))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({f"{Q}.weight_scale": None}, [("error", "tensor-missing", f"{Q}.weight_scale")]),
        (
            {f"{Q}.weight_scale": ("F32", (31, 1), bytes(124))},
            [("error", "tensor-shape", f"{Q}.weight_scale")],
        ),
        ({f"{Q}.weight_scale": ("F32", (32,), scales_of()[2])}, []),
        ({f"{Q}.weight_scale": ("BF16", (32, 1), b"\x80\x3a" * 32)}, []),
        (
            {f"{Q}.weight_scale": ("F8_E4M3", (32, 1), bytes(32))},
            [("error", "tensor-shape", f"{Q}.weight_scale")],
        ),
        (
            {f"{Q}.weight_scale": scales_of(float("nan"), float("inf"))},
            [("error", "scale-not-finite", Q)],
        ),
        ({f"{Q}.weight_scale": scales_of(-1.0)}, [("error", "scale-negative", Q)]),
        (
            fp8(UP, (32, 1)) | {f"{UP}.weight_packed": None},
            [("error", "tensor-shape", f"{UP}.weight")],
        ),
    ],
)
def test_damage_of_fp8_modules(changes, found, tmp_path):
    every = findings(write_ct(tmp_path / "a", **changes))
    assert [each for each in every if each[1] != "group-forms-differ"] == found


def test_an_fp8_module_without_a_static_scale_of_activations(tmp_path):
    """vLLM 0.33, ModelOptFp8LinearMethod: the scale is registered whatever the checkpoint holds."""
    assert findings(write_mo(tmp_path / "a", **{f"{OUT}.input_scale": None})) == [
        ("warning", "input-scale-missing", OUT)
    ]


@pytest.mark.parametrize(
    ("leaf", "code", "is_asked"),
    [
        ("ple.ple_embedding.ngram_embedding", 0, False),  # the table of Qwen's n-grams
        ("patch_embed.proj", 6, True),
    ],
)
def test_a_table_in_fp8_has_no_activations(leaf, code, is_asked, tmp_path):
    """vLLM 0.33, models/qwen4_exp: a scale for the table's rows, and nothing is multiplied."""
    name = f"model.layers.0.{leaf}"
    folder = write_mo(tmp_path / "a", **fp8(name, ()))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quantized_layers"][name] = {"quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    assert (("warning", "input-scale-missing", name) in findings(folder)) == is_asked
    assert run("inspect", folder, "--for", "vllm").code == code


def test_a_module_that_no_group_names(tmp_path):
    other = "model.layers.0.cross_attn.o_proj"
    assert findings(write_ct(tmp_path / "a", **fp4(CT, "nvfp4", other))) == [
        ("error", "form-unknown", other)
    ]


def test_members_of_a_scale_group_in_several_forms(tmp_path):
    k = Q.replace("q_proj", "k_proj")
    record = ct_record(
        fp4=("nvfp4-pack-quantized", CT_NVFP4, ["Linear"]),
        fp8=("float-quantized", {**NUMBERS, "strategy": "channel"}, [Q]),
    )
    folder = write(tmp_path / "a", {**fp4(CT, "nvfp4", k), **fp8(Q, (32, 1))}, record)
    assert findings(folder) == [("error", "group-forms-differ", k)]


def test_records_of_other_modules(tmp_path):
    folder = write_mo(tmp_path / "a")
    entries = [
        {"pattern": pattern, "format": fmt, **numbers}
        for pattern, fmt, numbers in (
            ("*mlp*", "nvfp4", {"block_size": 16}),
            ("*q_proj", "fp8", {"granularity": "tensor", "activations": 8, "scale_dtype": "fp32"}),
            ("*o_proj", "fp8", {"granularity": "tensor", "activations": 16, "scale_dtype": "fp32"}),
        )
    ]
    record = {"format": "mixed", "modules": entries, "dialect": MO, "ignore": [], "files": {}}
    (folder / "quantization_config.json").write_text(json.dumps(record))
    assert [each for each in findings(folder) if each[1] == "records-disagree"] == [
        ("error", "records-disagree", OUT)
    ]


def test_names_come_before_patterns():
    groups = [
        Group(Form(NVFP4), ("*",)),
        Group(Form(FP8), ("a.b",)),
        Group(Form(INT4), ("re:a", "c")),
    ]
    found = [form_finder(groups)(name) for name in ("a.b", "c", "d")]
    assert found == [Form(FP8), Form(INT4), Form(NVFP4)]
    assert form_finder(groups[1:])("b") is None


def test_the_nearest_name_above_a_module_tells_its_form():
    find = form_finder(
        [Group(Form(NVFP4), ("a.experts.*", "*.q")), Group(Form(FP8), ("a.experts.1.*",))]
    )
    names = ("a.experts.0.up", "a.experts.1.up", "b.q", "a.experts", "b.experts.0.up")
    assert [find(name) for name in names] == [Form(NVFP4), Form(FP8), Form(NVFP4), None, None]


def test_twenty_thousand_modules_are_told_apart_at_once():
    """A line in a second, where every name is asked for every other."""
    names = tuple(
        f"model.layers.{layer}.mlp.experts.{n}.up_proj" for layer in range(20) for n in range(1000)
    )
    layers = {name: {"quant_algo": "NVFP4"} for name in names} | {Q: {"quant_algo": "FP8"}}
    record = {
        "quant_method": MO,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    told = Clues({"quantization_config": record}, {}, {})
    find = form_finder(dialect_named(MO).recognise(told))
    assert all(
        find(name) == Form(NVFP4, 4) and not dialect_named(MO).ignores(told)(name) for name in names
    )
    assert find("lm_head") is None
