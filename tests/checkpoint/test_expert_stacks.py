"""Stacks of experts that were taken apart come back as they were: names, shapes, order of rows and
bytes, of the source itself.

All values are E2M1 numbers with a 6 in every block of 32, which MXFP4 and NVFP4 keep, so that the
source judges the result.
Matrices are square where it can be: no shape tells that one was turned round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA, Outcome, Tensor, read_folder, run, write_checkpoint, write_single
from rewriting import forget_hashes

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.conversion import repacking

EXPERTS = "model.layers.0.mlp.experts"
HIDDEN, COUNT = 64, 3
ROUTED = {
    f"{EXPERTS}.gate_up_proj": (COUNT, HIDDEN, HIDDEN),
    f"{EXPERTS}.down_proj": (COUNT, HIDDEN, HIDDEN),
}
LAYOUTS = [
    (order, rows) for order in ("out_in", "in_out") for rows in ("concatenated", "interleaved")
]
CONFIG = {**LLAMA, "hidden_size": HIDDEN}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": HIDDEN}
VALUES = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BITS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """E2M1 numbers, with a 6 in every block along every axis."""
    drawn = np.random.default_rng(seed).choice(VALUES, shape)
    rows, columns = np.indices(shape)[-2:]
    drawn[(rows + columns) % 16 == 0] = 6
    return drawn


def tensor(shape: tuple[int, ...], seed: int = 0, dtype: str = "BF16") -> Tensor:
    drawn = values(shape, seed)
    stored = (
        (drawn.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "BF16"
        else drawn.astype(BITS[dtype])
    )
    return dtype, shape, stored.tobytes()


def stacks(shapes: dict[str, tuple[int, ...]] = ROUTED, dtype: str = "BF16") -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {"model.norm.weight": ("F32", (HIDDEN,), bytes(4 * HIDDEN))}
    return kept | {
        name: tensor(shape, seed, dtype) for seed, (name, shape) in enumerate(shapes.items())
    }


def floats(stored: Tensor) -> np.ndarray:
    dtype, shape, data = stored
    if dtype == "BF16":
        return (
            (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        )
    return np.frombuffer(data, BITS[dtype]).astype(np.float32).reshape(shape)


def done(*arguments: object) -> Outcome:
    outcome = run(*arguments, "-q")
    assert outcome.code == 0, outcome.err
    return outcome


def layout_options(order: str, rows: str) -> tuple[str, ...]:
    return ("--stack-order", order, "--stack-rows", rows)


def quantized(folder: Path, *options: object, fmt: str = "mxfp4") -> Path:
    """An artifact of gpt-oss in that folder."""
    source = write_single(folder / "m", stacks(), GPT_OSS)
    done("quantize", source, "--format", fmt, "-o", folder / "a", *options)
    return folder / "a"


def restored(artifact: Path) -> dict[str, Tensor]:
    """The tensors that dequantize makes of an artifact."""
    done("dequantize", artifact, "-o", artifact.parent / "restored")
    return read_folder(artifact.parent / "restored")


def there_and_back(source: Path, *options: object, fmt: str = "mxfp4") -> dict[str, Tensor]:
    """The tensors that dequantize makes of what quantize made."""
    done("quantize", source, "--format", fmt, "-o", source.parent / "artifact", *options)
    return restored(source.parent / "artifact")


def rewritten(artifact: Path, shards: dict[str, dict[str, Tensor]]) -> Path:
    """The artifact with other tensors, in a folder beside it."""
    files = {
        file: (artifact / file).read_bytes() for file in ("config.json", "quantization_config.json")
    }
    return write_checkpoint(artifact.parent / "rewritten", shards, None, **files)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "quark", "mlx", "plain", "gpt-oss"])
@pytest.mark.parametrize(("order", "rows"), LAYOUTS)
def test_a_stack_comes_back_as_it_was(order: str, rows: str, dialect: str, tmp_path: Path) -> None:
    """Also from stacks of another order of rows: gpt-oss has its own."""
    source = write_single(tmp_path / "m", stacks(), CONFIG)
    options = (*layout_options(order, rows), "--dialect", dialect)
    assert there_and_back(source, *options) == stacks()


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize(("order", "rows"), LAYOUTS)
def test_a_stack_comes_back_from_nvfp4(order: str, rows: str, dialect: str, tmp_path: Path) -> None:
    source = write_single(tmp_path / "m", stacks(), CONFIG)
    options = (*layout_options(order, rows), "--scale-rule", "amax", "--dialect", dialect)
    assert there_and_back(source, *options, fmt="nvfp4") == stacks()


@pytest.mark.parametrize("order", ["out_in", "in_out"])
def test_a_stack_comes_back_from_deepseek(order: str, tmp_path: Path) -> None:
    shapes = {
        "layers.0.ffn.experts.w13": (COUNT, HIDDEN, HIDDEN),
        "layers.0.ffn.experts.w2": (COUNT, HIDDEN, 32),
    }
    source = write_single(tmp_path / "m", stacks(shapes), {**CONFIG, "hidden_size": 1})
    options = (*layout_options(order, "concatenated"), "--dialect", "deepseek")
    assert there_and_back(source, *options) == stacks(shapes)


def test_experts_that_read_narrower_states_are_read(tmp_path: Path) -> None:
    """Muse Spark: transformers 5.23's MuseSparkExperts are moe_hidden_size wide."""
    parent = "model.language_model.layers.0.mlp.experts"
    shapes = {f"{parent}.gate_up_proj": (COUNT, 128, 32), f"{parent}.down_proj": (COUNT, 32, 64)}
    text = {"hidden_size": 128, "moe_hidden_size": 32, "model_type": "muse_spark_text"}
    config = {"model_type": "muse_spark", "text_config": text}
    source = write_single(tmp_path / "m", stacks(shapes), config)
    assert there_and_back(source) == stacks(shapes)


def test_experts_below_each_other_come_back_so(tmp_path: Path) -> None:
    """DBRX: matrices of two dimensions, w2 of them transposed."""
    shapes = {
        f"transformer.blocks.0.ffn.experts.mlp.{leaf}": (COUNT * HIDDEN, HIDDEN)
        for leaf in ("w1", "v1", "w2")
    }
    config = {"model_type": "dbrx", "ffn_config": {"moe_num_experts": COUNT}}
    source = write_single(tmp_path / "m", stacks(shapes), config)
    assert there_and_back(source) == stacks(shapes)


def test_experts_of_several_shards_come_back_into_one_stack(tmp_path: Path) -> None:
    """An artifact whose experts lie scattered: the stack is written where the first of them is."""
    artifact = quantized(tmp_path)
    tensors = read_folder(artifact)
    names = sorted(tensors)
    shards = {
        f"model-{n + 1:05}-of-00003.safetensors": {name: tensors[name] for name in names[n::3]}
        for n in range(3)
    }
    scattered = rewritten(artifact, shards)
    forget_hashes(scattered)
    assert restored(scattered) == stacks()


@pytest.mark.parametrize("way", ["compressed-tensors", "quark", "gpt-oss"])
def test_transcoded_experts_come_back_into_their_stack(way: str, tmp_path: Path) -> None:
    source = write_single(tmp_path / "m", stacks(), CONFIG)
    options = (*layout_options("out_in", "concatenated"), "--format", "mxfp4", "--dialect", "plain")
    done("quantize", source, *options, "-o", tmp_path / "a")
    done("transcode", tmp_path / "a", "--dialect", way, "-o", tmp_path / "b")
    assert restored(tmp_path / "b") == stacks()


def test_an_artifact_that_is_quantized_again_keeps_what_its_stacks_were(tmp_path: Path) -> None:
    options = ("--format", "mxfp4", "--dialect", "quark")
    done("quantize", quantized(tmp_path), *options, "-o", tmp_path / "b")
    assert restored(tmp_path / "b") == stacks()


@pytest.mark.parametrize("command", ["quantize", "transcode"])
def test_published_stacks_of_four_bits_come_back_as_transformers_has_them(
    command: str, tmp_path: Path
) -> None:
    """gpt-oss as OpenAI publishes it, taken apart by another dialect; its record named no stack
    before.
    """
    published = quantized(tmp_path, "--dialect", "gpt-oss")
    (published / "quantization_config.json").unlink()
    shutil.rmtree(published / ".fp4convert")
    done(command, published, "--format", "mxfp4", "--dialect", "quark", "-o", tmp_path / "b")
    assert restored(tmp_path / "b") == stacks()


def test_experts_that_were_single_come_back_single_out_of_stacks(tmp_path: Path) -> None:
    """Only the dialect stacks these."""
    leaves = ("gate_proj", "up_proj", "down_proj")
    single = stacks(
        {
            f"{EXPERTS}.{expert}.{leaf}.weight": (HIDDEN, HIDDEN)
            for expert in range(COUNT)
            for leaf in leaves
        }
    )
    source = write_single(tmp_path / "m", single, {**CONFIG, "model_type": "qwen3_moe"})
    assert there_and_back(source, "--dialect", "gpt-oss") == single


def test_single_experts_beside_stacks_of_the_same_names_stay_single(tmp_path: Path) -> None:
    leaves = ("gate_proj", "up_proj", "down_proj")
    single = {
        f"mtp.layers.0.mlp.experts.{expert}.{leaf}.weight": (HIDDEN, HIDDEN)
        for expert in range(COUNT)
        for leaf in leaves
    }
    tensors = stacks({**ROUTED, **single})
    assert there_and_back(write_single(tmp_path / "m", tensors, GPT_OSS)) == tensors


@pytest.mark.parametrize(
    ("source_dtype", "asked", "result"),
    [
        ("BF16", "bf16", "BF16"),
        ("BF16", "fp16", "F32"),
        ("F32", "bf16", "F32"),
        ("F16", "fp16", "F16"),
    ],
)
@pytest.mark.parametrize(("order", "rows"), LAYOUTS)
def test_matrices_that_stayed_come_back_in_their_stack_and_lose_nothing(
    order: str, rows: str, source_dtype: str, asked: str, result: str, tmp_path: Path
) -> None:
    source = write_single(tmp_path / "m", stacks(dtype=source_dtype), CONFIG)
    options = (*layout_options(order, rows), "--format", "mxfp4", "--exclude", "*.experts.1.*_proj")
    done("quantize", source, *options, "-o", tmp_path / "a")
    outcome = run("dequantize", tmp_path / "a", "-o", tmp_path / "r", "--dtype", asked)
    assert outcome.code == 0, outcome.err
    assert ("stacks of experts are not" in outcome.err) == (
        asked != {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[result]
    )
    found = read_folder(tmp_path / "r")
    assert found.keys() == stacks().keys()
    for name in ROUTED:
        assert found[name][0] == result
        assert np.array_equal(floats(found[name]), floats(stacks()[name]))


def test_experts_in_fp8_come_back_into_the_stack_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[format]]\nmodules = ["*.experts.1.*"]\nformat = "fp8"\n')
    found = restored(quantized(tmp_path, "--recipe", tmp_path / "r.toml"))
    assert {name: each[:2] for name, each in found.items()} == {
        name: each[:2] for name, each in stacks().items()
    }
    for name in ROUTED:
        ours, theirs = floats(found[name]), floats(stacks()[name])
        assert np.array_equal(ours[[0, 2]], theirs[[0, 2]])
        assert not np.array_equal(ours[1], theirs[1])
        assert np.allclose(ours[1], theirs[1], rtol=1 / 14)


@pytest.mark.parametrize(
    "ending",
    ["experts.0.gate_proj", "experts.1.up_proj", "experts.2.down_proj", "experts.1.down_proj"],
)
def test_a_stack_that_lacks_an_expert_is_refused(ending: str, tmp_path: Path) -> None:
    """The last one of a single stack, too, of which only the others tell."""
    artifact = quantized(tmp_path)
    left = {name: each for name, each in read_folder(artifact).items() if f".{ending}." not in name}
    less = rewritten(artifact, {"model.safetensors": left})
    outcome = run("dequantize", less, "-o", tmp_path / "r", "--json")
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == (2, "stack-experts")
    assert ending in error["message"] or ending == "experts.2.down_proj"
    assert not (tmp_path / "r").exists()


def test_experts_of_several_shapes_are_refused(tmp_path: Path) -> None:
    artifact = quantized(tmp_path)
    tensors = read_folder(artifact)
    for part, columns in (("packed", HIDDEN // 2), ("scale", HIDDEN // 32)):
        dtype, _, data = tensors[f"{EXPERTS}.1.up_proj.weight_{part}"]
        tensors[f"{EXPERTS}.1.up_proj.weight_{part}"] = (dtype, (16, columns), data[: 16 * columns])
    odd = rewritten(artifact, {"model.safetensors": tensors})
    error = run("dequantize", odd, "-o", tmp_path / "r", "--json").json["error"]
    assert error["code"] == "stack-experts"
    assert "1.up_proj is [16, 64]" in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": ["*.experts.*"]},
        {"tensors": ["re:.*experts.*_proj$"]},
        {"named": f"{EXPERTS}.{{expert}}.{{member}}"},
    ],
)
def test_a_rule_that_does_not_tell_the_stack_is_told_of(
    change: dict[str, object], tmp_path: Path
) -> None:
    artifact = quantized(tmp_path)
    file = artifact / "quantization_config.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"stacks": [rule | change for rule in record["stacks"]]}))
    outcome = run("dequantize", artifact, "-o", tmp_path / "r")
    assert outcome.code == 0, outcome.err
    assert "experts are not stacked again" in outcome.err
    assert f"{EXPERTS}.0.gate_proj.weight" in read_folder(tmp_path / "r")


@pytest.mark.parametrize(
    "change", [{"order": "out_in"}, {"rows": "concatenated"}, {"members": ["up_proj", "gate_proj"]}]
)
def test_how_a_stack_lies_is_in_the_keys_of_tasks(
    change: dict[str, object], tmp_path: Path
) -> None:
    """Else a run that goes on would take finished shards of another order for its own: shapes are
    the same.
    """
    artifact = quantized(tmp_path)
    before, file = keys_of(artifact), artifact / "quantization_config.json"
    record = json.loads(file.read_text())
    fused = [rule | change if len(rule["members"]) > 1 else rule for rule in record["stacks"]]
    file.write_text(json.dumps(record | {"stacks": fused}))
    keys = keys_of(artifact)
    assert len(keys) == len(before) == 1
    assert keys != before


def keys_of(artifact: Path) -> list[str]:
    """The keys of the tasks that dequantize has."""
    opened = open_artifact(str(artifact))
    return [task.key for task in repacking.prepare_dequantize(opened.source, opened, "bf16").tasks]
