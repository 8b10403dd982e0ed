"""Lies that only the source gives away, and artifacts that tell none, with a source and without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import read_shard, run, values_of, write_checkpoint, write_single
from liars import (
    ARTIFACTS,
    DENSE,
    LAYER,
    MODEL,
    ORDERS,
    OURS,
    Folder,
    Lie,
    lie,
    make,
    split_in_two,
    write_minilm,
)

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.errors import Finding
from fp4convert.quality.inspection import inspect
from fp4convert.quality.verification import Gate, verify
from fp4convert.report.text import explanations
from fp4convert.storage.checkpoint_files import REPORT
from fp4convert.storage.open import open_source

PACKED = {"ct": ".weight_packed", "ct-mx": ".weight_packed", "mo": ".weight", "comfy": ".weight"}
S = f"{DENSE}.weight_scale"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_minilm(tmp_path_factory.mktemp("minilm") / "source")


@pytest.fixture(scope="module")
def artifacts(source, tmp_path_factory) -> dict[str, Folder]:
    root = tmp_path_factory.mktemp("artifacts")
    return {name: Folder.read(make(source, name, root / name)) for name in PACKED}


def packed_names(folder: Folder, key: str) -> list[str]:
    return [name for name in folder.names(PACKED[key]) if folder[name][0] == "U8"]


def swap_nibbles(folder: Folder, key: str) -> None:
    for name in packed_names(folder, key):
        swap_one(folder, name)


def swap_one(folder: Folder, name: str) -> None:
    packed = folder.bytes_of(name)
    folder.store(name, packed >> 4 | packed << 4)


def rearrange_one(folder: Folder, order: str) -> None:
    folder.store(S, ORDERS[order](folder.bytes_of(S)))


def multiply(folder: Folder, name: str, factor: float) -> None:
    folder.set_number(name, folder.number(name) * factor)


def next_exponent(folder: Folder) -> None:
    """Every value of a module twice as large."""
    folder.store(S, folder.bytes_of(S) + 1)


def negate(folder: Folder) -> None:
    folder.store(f"{DENSE}.weight_packed", folder.bytes_of(f"{DENSE}.weight_packed") ^ 0x88)


def another_model(folder: Folder) -> None:
    """Every layer holds what the next should."""
    before = folder.copy()
    for tensors in before.files.values():
        for name in (name for name in tensors if ".layer." in name):
            _, _, number, rest = name.split(".", 3)
            folder.put(f"encoder.layer.{(int(number) + 1) % 6}.{rest}", before[name])


def permute_rows(folder: Folder) -> None:
    order = np.random.default_rng(0).permutation(384)
    for ending in ("weight_packed", "weight_scale"):
        folder.store(f"{DENSE}.{ending}", folder.bytes_of(f"{DENSE}.{ending}")[order])


def flatten(folder: Folder) -> None:
    """All block scales of a module the same."""
    scales = folder.bytes_of(S)
    folder.store(S, np.full_like(scales, np.median(scales)))


FACTORS = {
    ("ct", "weight_global_scale"): (1.25, 1 / 1.05),
    ("mo", "weight_scale_2"): (1 / 1.25, 1.08),
}
LIES = [
    *(lie(f"swapped {key}", key, "nibble-order", None, swap_nibbles, key) for key in PACKED),
    lie("swapped in one module", "ct", "nibble-order", DENSE, swap_one, f"{DENSE}.weight_packed"),
    *(lie(f"one {order}", "ct", "scale-layout", DENSE, rearrange_one, order) for order in ORDERS),
    lie("one mx 128x4", "ct-mx", "scale-layout", DENSE, rearrange_one, "128x4"),
    *(
        lie(f"factor {factor}", key, "scale-factor", DENSE, multiply, f"{DENSE}.{ending}", factor)
        for (key, ending), factors in FACTORS.items()
        for factor in factors
    ),
    lie("twice as large", "ct-mx", "scale-factor", DENSE, next_exponent),
    lie("negated", "ct", "scale-factor", DENSE, negate),
    lie("another model", "ct", "source-differs", None, another_model),
    lie("rows in another order", "ct", "source-differs", DENSE, permute_rows),
    lie("scales all alike", "mo", "source-differs", DENSE, flatten),
]


@pytest.mark.sweep(38)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_seen_with_a_source_and_reported_as_declared_without(
    lie: Lie, artifacts, source, tmp_path
):
    honest = artifacts[lie.artifact]
    folder = honest.copy()
    lie.tell(folder)
    artifact = open_artifact(str(folder.write(tmp_path / "liar")))
    originals = (None, open_source(str(source)))
    alone, beside = (inspect(artifact, original, False) for original in originals)
    found = {Finding(**finding) for finding in beside["findings"]}
    assert lie.found in {(one.level, one.code, one.tensor) for one in found}
    assert not beside["healthy"]
    assert alone["findings"] == []
    assert alone["nibble_order"] == honest.records[OURS]["nibble_order"]
    assert alone["scale_layout"]["declared"] == honest.records[OURS]["scale_layout"]
    assert alone["scale_layout"]["detected"] in (None, alone["scale_layout"]["declared"])
    others = {one.tensor for one in found} - {lie.found[2]}
    assert not others, "only who lies is named"
    verified = verify(artifact, originals[1], Gate())
    assert found <= set(verified.findings)
    assert not verified.passed


def zero_last_rows(folder: Folder) -> None:
    packed = folder.bytes_of(f"{DENSE}.weight_packed").copy()
    packed[-8:] = 0
    folder.store(f"{DENSE}.weight_packed", packed)


def exchange_two_rows(folder: Folder) -> None:
    for ending in ("weight_packed", "weight_scale"):
        stored = folder.bytes_of(f"{DENSE}.{ending}").copy()
        stored[[3, 200]] = stored[[200, 3]]
        folder.store(f"{DENSE}.{ending}", stored)


def change_scales(change: Callable[[np.ndarray], np.ndarray], folder: Folder) -> None:
    """The scales of two blocks of row 5."""
    scales = folder.bytes_of(S).copy()
    scales[5, 2:4] = change(scales[5, 2:4])
    folder.store(S, scales)


DAMAGES = {
    "rows of zeros": (zero_last_rows, "8 rows (the first is row 376)"),
    "exchanged rows": (exchange_two_rows, "2 rows (the first is row 3)"),
    "scales of zero": (
        partial(change_scales, lambda scales: scales * 0),
        "2 blocks of 16 values (the first in row 5 from column 32)",
    ),
    "larger scales": (
        partial(change_scales, lambda scales: scales + 0x18),  # by 2^3
        "2 blocks of 16 values (the first in row 5 from column 32)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_few_rows_or_blocks_are_seen_by_verify_without_hashes(
    damage, artifacts, source, tmp_path
):
    change, words = DAMAGES[damage]
    folder = artifacts["ct"].copy()
    change(folder)
    for file in (OURS, REPORT):  # as of an artifact that somebody else made
        folder.records.pop(file, None)
    artifact = open_artifact(str(folder.write(tmp_path / "damaged")))
    verified = verify(artifact, open_source(str(source)), Gate())
    errors = [finding for finding in verified.findings if finding.level == "error"]
    assert [(one.code, one.tensor) for one in errors] == [("source-differs", f"{DENSE}.weight")]
    assert errors[0].detail == f"its values are the source's, but for {words}"


def faint_rows(scale: float) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    x[3] *= scale
    return x


def loud_columns() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    x[:, [5, 300, 700]] *= 30
    return x


def loud_values() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    x[1, 7] = 60
    return x


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "mxfp8"])
@pytest.mark.parametrize(
    "x",
    [faint_rows(2.0**-30), faint_rows(2.0**-21), loud_columns(), loud_values()],
    ids=["zeros", "nearly-zeros", "columns", "values"],
)
def test_odd_weights_are_their_own(x, format, tmp_path):
    """Of faint rows FP8 holds no scale, or one that is far off; beside a loud value others become
    zeros.
    """
    source = write_single(tmp_path / "source", {"x.o_proj.weight": ("F32", x.shape, x.tobytes())})
    quantize(source, tmp_path / "out", "--format", format)
    done = run("verify", tmp_path / "out", "--source", source)
    assert done.code == 0, done.out


def test_a_layout_on_which_statistics_say_nothing(tmp_path):
    """Independent normal values: no row and no column is larger than another, and readings differ
    little.
    """
    rng = np.random.default_rng(0)
    weights = {
        f"layers.{n}.o_proj.weight": rng.standard_normal((256, 512), np.float32) for n in range(3)
    }
    tensors = {name: ("F32", x.shape, x.tobytes()) for name, x in weights.items()}
    source = write_single(tmp_path / "source", tensors)
    folder = Folder.read(make(source, "ct", tmp_path / "honest"))
    for name in folder.names(".weight_scale"):
        folder.store(name, ORDERS["128x4"](folder.bytes_of(name)))
    liar = folder.write(tmp_path / "liar")
    assert run("inspect", liar, "--json").json["scale_layout"] == {
        "declared": "linear",
        "detected": None,
    }
    assert "scale layout    linear (declared)" in run("inspect", liar).out.splitlines()
    document = run("inspect", liar, "--source", source, "--json").json
    assert document["scale_layout"] == {"declared": "linear", "detected": "128x4"}
    assert [finding["code"] for finding in document["findings"]] == ["scale-layout"]


@pytest.mark.parametrize(
    "options", [("nvfp4", "amax"), *(("mxfp4", rule) for rule in ("floor", "even", "ceil"))]
)
def test_rounding_is_no_wrong_factor(options, tmp_path):
    """Three values: all of a block's codes are rounded alike, which no scale is to blame for."""
    rng = np.random.default_rng(0)
    for size in (5 / 4, 7.5 / 4):
        x = (size * rng.integers(-1, 2, (64, 128))).astype(np.float32)
        tensors = {"x.o_proj.weight": ("F32", x.shape, x.tobytes())}
        source = write_single(tmp_path / f"source-{size}", tensors)
        out = tmp_path / f"out-{size}"
        quantize(source, out, "--format", options[0], "--scale-rule", options[1])
        values = read_values(out, tmp_path / f"plain-{size}")
        assert options[0] == "nvfp4" or np.abs(values).max() == pytest.approx(size, rel=0.35)
        assert run("inspect", out, "--source", source, "--json").json["findings"] == []


def read_values(artifact: Path, plain: Path) -> np.ndarray:
    assert run("dequantize", artifact, "-o", plain, "--dtype", "fp32").code == 0
    return values_of(read_shard(plain / MODEL)["x.o_proj.weight"])


def test_another_source_is_bad_input(artifacts, tmp_path):
    other = write_single(tmp_path / "other", {"x.o_proj.weight": ("F32", (1, 16), bytes(64))})
    outcome = run(
        "inspect", artifacts["ct"].copy().write(tmp_path / "artifact"), "--source", other, "--json"
    )
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "source-differs")


def errors(folder: Path, source: Path) -> list[dict]:
    found = []
    for beside in (None, open_source(str(source))):
        found += inspect(open_artifact(str(folder)), beside, False)["findings"]
    return [finding for finding in found if finding["level"] == "error"]


HONEST = [
    *(
        ("nvfp4", dialect, bits)
        for dialect in ("compressed-tensors", "modelopt", "quark", "comfy", "plain")
        for bits in (16, 4)
    ),
    *(
        ("mxfp4", dialect, bits)
        for dialect in ("compressed-tensors", "quark", "plain")
        for bits in (16, 4)
    ),
    ("nvfp4", "mlx", 16),
    ("mxfp4", "mlx", 16),
]


@pytest.mark.sweep(18)
@pytest.mark.parametrize(("format", "dialect", "activations"), HONEST)
def test_honest_artifacts_are_healthy(format, dialect, activations, source, tmp_path):
    options = ("--format", format, "--dialect", dialect, "--activations", activations)
    quantize(source, tmp_path / "out", *options)
    assert errors(tmp_path / "out", source) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_honest_casts_are_healthy(rule, source, tmp_path):
    quantize(source, tmp_path / "mx", "--format", "mxfp4", "--scale-rule", rule)
    assert errors(tmp_path / "mx", source) == []
    for dialect in ("compressed-tensors", "modelopt", "comfy"):
        out, options = tmp_path / dialect, ("--dialect", dialect, "--format", "nvfp4")
        assert run("transcode", tmp_path / "mx", "-o", out, *options).code == 0
        assert errors(out, source) == []


@pytest.mark.sweep(14)
@pytest.mark.parametrize(
    "layout", ["linear", "128x4", "8x4", "deepgemm", "k_major", "interleaved", "appended"]
)
@pytest.mark.parametrize("key", ["ct", "ct-mx"])
def test_honest_layouts_are_healthy(key, layout, artifacts, source, tmp_path):
    options = ("--dialect", "plain", "--scale-layout", layout)
    assert run("transcode", artifacts[key].source, "-o", tmp_path / "out", *options).code == 0
    assert errors(tmp_path / "out", source) == []


@pytest.mark.slow
def test_honest_shards_and_exclusions_are_healthy(source, tmp_path):
    folder = Folder.read(source)
    split_in_two(folder)
    sharded = folder.write(tmp_path / "sharded")
    for dialect in ("compressed-tensors", "modelopt", "quark"):
        out = tmp_path / dialect
        quantize(sharded, out, "--dialect", dialect, "--exclude", f"{LAYER}.*")
        assert errors(out, sharded) == []


@pytest.mark.slow
def test_honest_experts_are_healthy(source, tmp_path):
    """The same matrices as routed experts, as deepseek names them, and in stacks, as gpt-oss has
    them.
    """
    tensors = read_shard(source / MODEL)
    up = {n: tensors[f"encoder.layer.{n}.intermediate.dense.weight"] for n in range(6)}
    down = {n: tensors[f"encoder.layer.{n}.output.dense.weight"] for n in range(6)}
    experts = {f"layers.0.ffn.experts.{n}.w1.weight": tensor for n, tensor in up.items()}
    deepseek = write_checkpoint(tmp_path / "deepseek", {MODEL: experts}, {})
    for n in range(6):
        for leaf, tensor in (("gate_proj", up[n]), ("up_proj", up[n]), ("down_proj", down[n])):
            experts[f"model.layers.0.mlp.experts.{n}.{leaf}.weight"] = tensor
    gpt_oss = {name: tensor for name, tensor in experts.items() if ".mlp." in name}
    stacked = write_checkpoint(tmp_path / "gpt-oss", {MODEL: gpt_oss}, {})
    for origin, dialect in ((deepseek, "deepseek"), (stacked, "gpt-oss")):
        ct, out = tmp_path / f"{dialect}-ct", tmp_path / f"{dialect}-out"
        quantize(origin, ct, "--format", "mxfp4")
        assert run("transcode", ct, "-o", out, "--dialect", dialect).code == 0
        assert errors(out, origin) == []


def test_the_set_is_what_can_be_made():
    assert {(fmt, dialect, bits) for fmt, dialect, bits in ARTIFACTS.values()} <= set(HONEST)


def test_docs_say_that_these_lies_are_seen_with_a_source():
    known = explanations("findings")
    assert [one.name for one in LIES if "with a source" not in known[one.found[1]]["seen"]] == []
