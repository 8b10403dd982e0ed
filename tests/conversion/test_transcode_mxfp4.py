"""transcode --format nvfp4 of MXFP4 artifacts, whole: values, groups, counts; arithmetic is in
test_mxfp4_as_nvfp4.py.

Artifacts are made by hand, without a record of ours; values are decoded by ml_dtypes in float64.
"""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    FIRST,
    LAYER,
    LLAMA,
    SECOND,
    Outcome,
    Tensor,
    done,
    read_folder,
    read_shard,
    run,
    weight,
    write_checkpoint,
)

CT, MO = "compressed-tensors", "modelopt"
NAMES = {
    CT: ("weight_packed", "weight_scale", "weight_global_scale"),
    MO: ("weight", "weight_scale", "weight_scale_2"),
}
OURS = "quantization_config.json"
Q, K, V, OUT = (f"{LAYER}.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down"))
MODULES = (Q, K, V, OUT, GATE, UP, DOWN)
GROUPS = {
    **dict.fromkeys((Q, K, V), (Q, K, V)),
    OUT: (OUT,),
    **dict.fromkeys((GATE, UP), (GATE, UP)),
    DOWN: (DOWN,),
}
ROWS, BLOCKS = 8, 3
DECLARED = {
    "quant_method": CT,
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": None}
    },
    "ignore": ["lm_head"],
}

every_dialect = pytest.mark.parametrize("dialect", [CT, MO])


def codes(seed: int, count: int = ROWS * BLOCKS * 16) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


def write_mxfp4(
    folder: Path, scales: dict[str, np.ndarray], activations: int = 16, **packed: bytes
) -> Path:
    """Seven modules in two shards, q/k/v and gate/up in both; module -> its E8M0 bytes (rows,
    blocks).
    """
    shards: dict[str, dict[str, Tensor]] = {
        FIRST: {},
        SECOND: {"lm_head.weight": weight(11, 96, 64)},
    }
    for number, module in enumerate(MODULES):
        data = packed.get(module.rpartition(".")[2], codes(number))
        place = shards[FIRST if module in (Q, K, OUT, UP) else SECOND]
        place[f"{module}.weight_packed"] = ("U8", (ROWS, BLOCKS * 16), data)
        place[f"{module}.weight_scale"] = (
            "U8",
            (ROWS, BLOCKS),
            scales[module].astype(np.uint8).tobytes(),
        )
    declared = json.loads(json.dumps(DECLARED))
    if activations == 4:
        declared["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "dynamic": True}
    return write_checkpoint(folder, shards, {**LLAMA, "quantization_config": declared})


def scales_within(lowest: int, highest: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(lowest + 1000 * highest)
    return {module: chance.integers(lowest, highest + 1, (ROWS, BLOCKS)) for module in MODULES}


def e2m1(packed: bytes) -> np.ndarray:
    both = np.frombuffer(packed, np.uint8)
    values = np.stack([both & 15, both >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    return values.astype(np.float64).reshape(ROWS, BLOCKS, 32)


def values_before(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    """(rows, blocks, 32) float64 of an MXFP4 module."""
    stored = np.frombuffer(tensors[f"{module}.weight_scale"][2], ml_dtypes.float8_e8m0fnu).astype(
        np.float64
    )
    return e2m1(tensors[f"{module}.weight_packed"][2]) * stored.reshape(ROWS, BLOCKS, 1)


def multiplier(tensors: dict[str, Tensor], module: str, dialect: str) -> float:
    dtype, shape, data = tensors[f"{module}.{NAMES[dialect][2]}"]
    assert (dtype, shape) == ("F32", (1,) if dialect == CT else ())
    stored = float(np.frombuffer(data, "<f4")[0])
    return 1 / stored if dialect == CT else stored


def values_after(tensors: dict[str, Tensor], module: str, dialect: str) -> np.ndarray:
    """(rows, blocks, 32) float64 of an NVFP4 module."""
    packed, block_scales = (tensors[f"{module}.{part}"] for part in NAMES[dialect][:2])
    assert (packed[:2], block_scales[:2]) == (
        ("U8", (ROWS, BLOCKS * 16)),
        ("F8_E4M3", (ROWS, BLOCKS * 2)),
    )
    stored = (
        np.frombuffer(block_scales[2], ml_dtypes.float8_e4m3fn)
        .astype(np.float64)
        .reshape(ROWS, BLOCKS, 2)
    )
    return e2m1(packed[2]) * np.repeat(stored, 16, axis=-1) * multiplier(tensors, module, dialect)


def largest_exponent(tensors: dict[str, Tensor], modules: tuple[str, ...]) -> int:
    """Over blocks that hold a value."""
    found = []
    for module in modules:
        has_value = (e2m1(tensors[f"{module}.weight_packed"][2]) != 0).any(axis=-1)
        stored = np.frombuffer(tensors[f"{module}.weight_scale"][2], np.uint8).reshape(ROWS, BLOCKS)
        found += [int(byte) - 127 for byte in stored[has_value]]
    return max(found)


def transcode(artifact: Path, output: Path, dialect: str) -> dict:
    outcome = to_nvfp4(artifact, output, dialect)
    assert outcome.code == 0, outcome
    return outcome.json


def to_nvfp4(artifact: Path, output: Path, dialect: str) -> Outcome:
    words = ("--dialect", dialect, "--format", "nvfp4", "--json")
    return run("transcode", artifact, "-o", output, *words)


def contents(folder: Path) -> dict[str, bytes]:
    """Without what quantize measured, which stays with its artifact."""
    files = (
        path
        for path in folder.iterdir()
        if path.is_file() and path.name != "quantization_report.json"
    )
    return {path.name: path.read_bytes() for path in files}


def check(artifact: Path, output: Path, dialect: str, document: dict) -> dict[str, int]:
    """Compare every module, and the counts; returns how many blocks each keeps."""
    before, after = read_folder(artifact), read_folder(output)
    kept = {}
    for module in MODULES:
        wanted, found = values_before(before, module), values_after(after, module, dialect)
        top = largest_exponent(before, GROUPS[module])
        assert multiplier(after, module, dialect) == 2.0 ** max(top - 8, -126), module
        is_equal = (wanted == found).all(axis=-1)
        step = 2.0 ** (top - 17)
        assert (np.abs(wanted - found)[~is_equal] <= step / 2).all(), (
            "half a unit of the lowest block scale is 0.25 of it"
        )
        amax = np.abs(wanted).max(axis=-1)
        assert not (~is_equal & (amax == 0)).any()
        assert (np.signbit(found) == np.signbit(wanted)).all(), "zeros keep their signs too"
        kept[module] = int(is_equal.sum())
    assert document["carried"] == {
        "modules": 7,
        "bit_for_bit": sum(count == ROWS * BLOCKS for count in kept.values()),
        "rounded": [],
        "lossy": sorted(module for module in MODULES if kept[module] < ROWS * BLOCKS),
        "blocks": 7 * ROWS * BLOCKS,
        "kept_blocks": sum(kept.values()),
    }
    assert after["lm_head.weight"] == before["lm_head.weight"]
    return kept


@pytest.mark.parametrize(
    ("lowest", "highest"), [(110, 127), (237, 252), (1, 18), (0, 17), (120, 120)]
)
@every_dialect
def test_eighteen_powers_keep_every_value(dialect, lowest, highest, tmp_path):
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(lowest, highest))
    document = transcode(artifact, tmp_path / "out", dialect)
    assert set(check(artifact, tmp_path / "out", dialect, document).values()) == {ROWS * BLOCKS}
    assert document["tensors"] == {"transcoded": 7, "copied": 1, "skipped": 0}
    found = run("inspect", tmp_path / "out", "--json").json
    assert (found["format"], found["dialect"], found["healthy"]) == ("nvfp4", dialect, True)
    assert {finding["code"] for finding in found["findings"]} <= {
        "global-scale-range"
    }  # of exponents that no model has
    done("verify", tmp_path / "out")


@pytest.mark.parametrize(
    ("lowest", "highest"), [(100, 127), (108, 127), (0, 40), (0, 100), (0, 254), (200, 254)]
)
@every_dialect
def test_blocks_below_are_rounded_and_counted(dialect, lowest, highest, tmp_path):
    scales = scales_within(lowest, highest)
    for module in MODULES:
        scales[module][0, 0] = highest
    artifact = write_mxfp4(tmp_path / "artifact", scales)
    document = transcode(artifact, tmp_path / "out", dialect)
    kept = check(artifact, tmp_path / "out", dialect, document)
    assert all(count < ROWS * BLOCKS for count in kept.values()), "otherwise this tests nothing"
    said = run(
        "transcode", artifact, "-o", tmp_path / "again", "--dialect", dialect, "--format", "nvfp4"
    ).out
    assert f"{sum(kept.values())} of {7 * ROWS * BLOCKS} blocks keep every value" in said
    assert "0 of 7 modules keep every value" in said
    assert "7 are not (blocks too small for E4M3 were rounded)" in said


@every_dialect
def test_members_of_a_group_in_other_shards_set_the_global_scale(dialect, tmp_path):
    """v_proj, in the second shard, is the largest of q/k/v; gate_proj, of gate/up; nobody else
    learns of it.
    """
    scales = {module: np.full((ROWS, BLOCKS), 100) for module in MODULES}
    scales[V] = np.full((ROWS, BLOCKS), 119)
    scales[GATE] = np.full((ROWS, BLOCKS), 110)
    artifact = write_mxfp4(tmp_path / "artifact", scales)
    kept = check(
        artifact, tmp_path / "out", dialect, transcode(artifact, tmp_path / "out", dialect)
    )
    after = read_folder(tmp_path / "out")
    exponents = {module: float(np.log2(multiplier(after, module, dialect))) for module in MODULES}
    assert exponents == {Q: -16, K: -16, V: -16, OUT: -35, GATE: -25, UP: -25, DOWN: -35}
    assert {module for module in MODULES if kept[module] < ROWS * BLOCKS} == {Q, K}


@every_dialect
def test_zeros(dialect, tmp_path):
    """A matrix of zeros of both signs beside others, its scales as large as can be: it has no say,
    and stays.
    """
    scales = scales_within(110, 127)
    scales[K] = np.full((ROWS, BLOCKS), 254)
    zeros = (b"\x80\x08\x00\x88" * (ROWS * BLOCKS * 4))[: ROWS * BLOCKS * 16]
    artifact = write_mxfp4(tmp_path / "artifact", scales, k_proj=zeros)
    document = transcode(artifact, tmp_path / "out", dialect)
    assert set(check(artifact, tmp_path / "out", dialect, document).values()) == {ROWS * BLOCKS}
    after = read_folder(tmp_path / "out")
    assert after[f"{K}.{NAMES[dialect][0]}"][2] == zeros
    assert after[f"{K}.weight_scale"][2] == b"\x38" * (ROWS * BLOCKS * 2)


@every_dialect
def test_our_own_mxfp4_is_carried_in_full(dialect, tmp_path):
    """Weights of a normal distribution, by quantize: no block is too small."""
    shapes = dict.fromkeys(MODULES, (ROWS, BLOCKS * 32))
    tensors = {
        f"{module}.weight": weight(number, *shape)
        for number, (module, shape) in enumerate(shapes.items())
    }
    source = write_checkpoint(
        tmp_path / "source", {FIRST: tensors, SECOND: {"lm_head.weight": weight(11, 96, 64)}}
    )
    done("quantize", source, "--format", "mxfp4", "-o", tmp_path / "mxfp4")
    document = transcode(tmp_path / "mxfp4", tmp_path / "out", dialect)
    assert set(check(tmp_path / "mxfp4", tmp_path / "out", dialect, document).values()) == {
        ROWS * BLOCKS
    }
    done("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", tmp_path / "nvfp4")
    for file in {"config.json", "hf_quant_config.json"} & {
        path.name for path in (tmp_path / "nvfp4").iterdir()
    }:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "nvfp4" / file).read_bytes()
    for restored, folder in (("left", "mxfp4"), ("right", "out")):
        done("dequantize", tmp_path / folder, "-o", tmp_path / restored, "--dtype", "fp32")
    assert read_folder(tmp_path / "left") == read_folder(tmp_path / "right")


@every_dialect
def test_four_bit_activations_become_sixteen(dialect, tmp_path):
    """MXFP4 has no input scales to carry over: the result is for weights alone."""
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(110, 127), activations=4)
    assert run("inspect", artifact, "--json").json["activations"] == 4
    outcome = to_nvfp4(artifact, tmp_path / "out", dialect)
    assert outcome.code == 0
    assert "activations become 16-bit" in outcome.err
    assert run("inspect", tmp_path / "out", "--json").json["activations"] == 16
    assert not [name for name in read_folder(tmp_path / "out") if "input" in name]


@every_dialect
def test_nan_never_becomes_a_number(dialect, tmp_path):
    """E8M0's byte 255 is NaN: it is refused, naming the tensor, or it is NaN afterwards."""
    scales = scales_within(110, 127)
    scales[DOWN][2, 1] = 255
    artifact = write_mxfp4(tmp_path / "artifact", scales)
    outcome = to_nvfp4(artifact, tmp_path / "out", dialect)
    if outcome.code:
        assert DOWN in outcome.json["error"]["message"]
        assert not (tmp_path / "out" / OURS).exists()
    else:
        assert np.isnan(values_after(read_folder(tmp_path / "out"), DOWN, dialect)[2, 1]).all()


@pytest.mark.parametrize(
    ("rows", "nbytes", "blocks"),
    [(2, 24, 1), (0, 16, 1), (4, 0, 0)],
    ids=["half a block", "no rows", "no columns"],
)
@every_dialect
def test_matrices_that_hold_no_whole_blocks(dialect, rows, nbytes, blocks, tmp_path):
    """Refused, with the name, or carried; never a traceback, which `run` lets through."""
    packed, block_scales = (
        ("U8", (rows, nbytes), bytes(rows * nbytes)),
        ("U8", (rows, blocks), b"\x70" * (rows * blocks)),
    )
    shards = {FIRST: {f"{OUT}.weight_packed": packed, f"{OUT}.weight_scale": block_scales}}
    artifact = write_checkpoint(
        tmp_path / "artifact", shards, {**LLAMA, "quantization_config": DECLARED}
    )
    os.replace(artifact / FIRST, artifact / "model.safetensors")
    outcome = to_nvfp4(artifact, tmp_path / "out", dialect)
    if outcome.code:
        assert OUT in outcome.json["error"]["message"]
    else:
        done("verify", tmp_path / "out")


def test_mxfp4_as_mxfp4_stays_as_it_is(tmp_path):
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(0, 255))
    outcome = run("transcode", artifact, "-o", tmp_path / "out", "--dialect", CT, "--json")
    assert outcome.json["carried"] == {"modules": 7, "bit_for_bit": 7, "rounded": []}
    assert read_folder(tmp_path / "out") == read_folder(artifact)


@pytest.mark.parametrize("options", [(), ("--format", "mxfp4")])
def test_modelopt_has_no_mxfp4(options, tmp_path):
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(110, 127))
    refused = run(
        "transcode", artifact, "-o", tmp_path / "out", "--dialect", MO, "--json", *options
    )
    assert (refused.code, refused.json["error"]["code"]) == (2, "dialect-format")
    assert not (tmp_path / "out").exists()


@every_dialect
def test_a_shard_made_under_another_global_scale_is_not_adopted(dialect, tmp_path):
    """The run died after its shards; then v_proj, in the second, grew: q_proj, in the first, needs
    a new global scale.
    """
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(110, 127))
    transcode(artifact, tmp_path / "out", dialect)
    (tmp_path / "out" / OURS).unlink()
    stored, before = (
        read_shard(artifact / SECOND)[f"{V}.weight_scale"][2],
        (artifact / SECOND).read_bytes(),
    )
    (artifact / SECOND).write_bytes(before.replace(stored, b"\x82" * len(stored)))
    os.utime(artifact / SECOND, ns=(1, 1))
    document = transcode(artifact, tmp_path / "out", dialect)
    assert document["digest"] == transcode(artifact, tmp_path / "clean", dialect)["digest"]
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
    after = read_folder(tmp_path / "out")
    assert len({multiplier(after, module, dialect) for module in (Q, K, V)}) == 1


@every_dialect
def test_run_again_after_its_first_shard(dialect, tmp_path):
    artifact = write_mxfp4(tmp_path / "artifact", scales_within(90, 127))
    first = transcode(artifact, tmp_path / "out", dialect)
    for file in (SECOND, OURS, "config.json"):
        (tmp_path / "out" / file).unlink()
    inode = (tmp_path / "out" / FIRST).stat().st_ino
    again = transcode(artifact, tmp_path / "out", dialect)
    assert (again["digest"], again["carried"]) == (first["digest"], first["carried"])
    assert (tmp_path / "out" / FIRST).stat().st_ino == inode, "a finished shard is adopted"
    shutil.rmtree(tmp_path / "out")
    assert transcode(artifact, tmp_path / "out", dialect)["digest"] == first["digest"]
