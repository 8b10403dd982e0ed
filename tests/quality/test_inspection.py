"""inspection.py: what is read, where its judgements turn, and the document; artifacts are made by
hand.
"""

from __future__ import annotations

import json
import struct
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import run, write_single

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.numerics.formats import NVFP4
from fp4convert.progress import Phases
from fp4convert.quality.checks import ALL_NBYTES, SAMPLE_NBYTES, choose_modules, judge
from fp4convert.quality.inspection import inspect

KEYS = (
    *(
        "format",
        "dialect",
        "block_size",
        "element_dtype",
        "scale_dtype",
        "scale_layout",
        "global_scale",
        "nibble_order",
    ),
    *("activations", "tensors", "patterns", "bits_per_weight", "share_read"),
    *("engines", "findings", "unexplained", "healthy"),
)
OUT = "layers.0.o_proj"
WEIGHTS = {"num_bits": 4, "type": "float"}


def of_shapes(count: int, shape: tuple[int, int]) -> Any:
    """All that choose_modules looks at."""
    modules = {
        f"layers.{n:04}.o_proj": SimpleNamespace(shape=shape, form=Form(NVFP4))
        for n in range(count)
    }
    return SimpleNamespace(
        modules=modules, scale_layout="linear", source=SimpleNamespace(is_streamed=False)
    )


def test_up_to_64_megabytes_everything_is_read():
    rows = ALL_NBYTES // 64  # 1024 columns are 64 blocks
    assert len(choose_modules(of_shapes(1, (rows, 1024)), False)) == 1
    assert len(choose_modules(of_shapes(64, (rows // 64, 1024)), False)) == 64
    assert len(choose_modules(of_shapes(65, (rows // 64, 1024)), False)) < 65


@pytest.mark.parametrize(
    ("count", "shape"),
    [(65, (1 << 14, 1024)), (500, (4096, 4096)), (3, (1 << 19, 1024)), (4000, (512, 4096))],
)
def test_of_more_at_most_48_megabytes_from_everywhere(count, shape):
    artifact = of_shapes(count, shape)
    chosen = choose_modules(artifact, False)
    each = shape[0] * shape[1] // 16
    assert len(chosen) * each <= SAMPLE_NBYTES
    assert len(chosen) * each > SAMPLE_NBYTES / 3 - each
    places = [sorted(artifact.modules).index(module) for module in chosen]
    assert len(set(np.diff(places))) <= 1
    assert places[-1] >= count - 2 * count / len(chosen) - 1
    assert choose_modules(artifact, True) == sorted(artifact.modules)


def test_a_module_above_the_budget_hides_no_other():
    artifact = of_shapes(100, (1024, 1024))
    artifact.modules["embed_tokens"] = SimpleNamespace(shape=(1 << 18, 5120), form=Form(NVFP4))
    assert sorted(artifact.modules)[0] == "embed_tokens"
    assert len(choose_modules(artifact, False)) == 51


def test_where_most_modules_are_above_the_budget_a_smaller_one_is_read():
    """Llama 3.1 405B: every 527th module is a matrix of its MLP, with 54.5 MB of scales."""
    names = [
        f"layers.{n:03}.mlp.{name}_proj" for n in range(126) for name in ("down", "gate", "up")
    ]
    artifact = of_shapes(0, (0, 0))
    wide, square = SimpleNamespace(shape=(53248, 16384), form=Form(NVFP4)), (16384, 16384)
    artifact.modules |= dict.fromkeys(names, wide)
    assert choose_modules(artifact, False) == [min(names)]
    for n, name in product(range(126), ("q", "k", "v", "o")):
        smaller = SimpleNamespace(shape=square, form=Form(NVFP4))
        artifact.modules[f"layers.{n:03}.self_attn.{name}_proj"] = smaller
    assert [name.partition("self_attn.")[2] for name in choose_modules(artifact, False)] == [
        *("k_proj", "o_proj")
    ]


def test_share_read_is_of_the_bytes_of_block_scales(monkeypatch, tmp_path):
    folder = write_ct(tmp_path / "a", {f"layers.{n}.o_proj": scales() for n in range(8)})
    assert inspect(open_artifact(str(folder)), None, False)["share_read"] == 1.0
    monkeypatch.setattr("fp4convert.quality.checks.ALL_NBYTES", 8 * 2048 - 1)
    monkeypatch.setattr("fp4convert.quality.checks.SAMPLE_NBYTES", 4 * 2048)
    assert inspect(open_artifact(str(folder)), None, False)["share_read"] == 0.5
    assert inspect(open_artifact(str(folder)), None, True)["share_read"] == 1.0
    assert "share read      50 % of the block scales" in run("inspect", folder).out.splitlines()
    assert (
        "share read      100 % of the block scales"
        in run("inspect", folder, "--full").out.splitlines()
    )


def scales(rows: int = 64, blocks: int = 32) -> np.ndarray:
    """Bytes as E4M3 scales are: over three binades, with every mantissa."""
    return np.random.default_rng(rows).integers(0x58, 0x78, (rows, blocks)).astype(np.uint8)


def write_ct(
    folder: Path, block_scales: dict[str, np.ndarray], fmt: str = "nvfp4", **more: Any
) -> Path:
    """A compressed-tensors artifact by hand; `more`: divisors of modules, packed codes (one byte
    for all), other tensors.
    """
    block = 16 if fmt == "nvfp4" else 32
    tensors = dict(more.get("others", {}))
    for module, stored in block_scales.items():
        rows, blocks = stored.shape
        packed = bytes([more.get("packed", 0x35)]) * (rows * blocks * block // 2)
        tensors[f"{module}.weight_packed"] = ("U8", (rows, blocks * block // 2), packed)
        tensors[f"{module}.weight_scale"] = (
            "F8_E4M3" if fmt == "nvfp4" else "U8",
            (rows, blocks),
            stored.tobytes(),
        )
        if fmt == "nvfp4":
            divisor = more.get("divisors", {}).get(module, 2688.0)
            tensors[f"{module}.weight_global_scale"] = ("F32", (1,), struct.pack("<f", divisor))
    strategy = "tensor_group" if fmt == "nvfp4" else "group"
    record = {
        "quant_method": "compressed-tensors",
        "format": f"{fmt}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**WEIGHTS, "group_size": block, "strategy": strategy},
            }
        },
        "ignore": more.get("ignore", []),
    }
    return write_single(folder, tensors, {"quantization_config": record})


def told(folder: Path) -> dict[str, tuple[str, str | None]]:
    document = inspect(open_artifact(str(folder)), None, False)
    assert set(document) == set(KEYS)
    json.dumps(document, allow_nan=False)
    return {
        finding["code"]: (finding["level"], finding["tensor"]) for finding in document["findings"]
    }


def test_the_keys_of_the_document(tmp_path):
    document = run("inspect", write_ct(tmp_path / "a", {OUT: scales()}), "--json").json
    assert tuple(document) == KEYS
    assert document["scale_layout"] == {"declared": None, "detected": None}
    assert document["tensors"] == {"quantized": 1, "other": 0}
    assert document["patterns"] == [{"pattern": OUT, "modules": 1, "form": "nvfp4"}]
    assert (document["share_read"], document["healthy"]) == (1.0, True)


def test_layers_are_folded_and_many_patterns_cut(tmp_path):
    """Every second layer has another name, so that six modules are two patterns; sixty words of
    their own are sixty.
    """
    alike = {f"layers.{n}.{('o_proj', 'down_proj')[n % 2]}": scales() for n in range(6)}
    told = run("inspect", write_ct(tmp_path / "a", alike)).out.splitlines()
    assert [line.split() for line in told if "layers." in line] == [
        ["3", "nvfp4", "layers.[0,2,4].o_proj"],
        ["3", "nvfp4", "layers.[1,3,5].down_proj"],
    ]
    words = {f"{chr(97 + n % 26)}x{n}.y{n}_w": scales() for n in range(60)}
    told = run("inspect", write_ct(tmp_path / "b", words)).out.splitlines()
    assert sum(line.split()[1:2] == ["nvfp4"] for line in told) == 24
    assert "and 36 more patterns: --json" in {line.strip() for line in told}


@pytest.mark.parametrize(
    ("zeros", "level"), [(0, None), (1, "warning"), (20, "warning"), (21, "error")]
)
def test_one_per_cent_of_blocks_may_be_erased(zeros, level, tmp_path):
    stored = scales(100, 20)  # 2000 blocks
    stored.reshape(-1)[:zeros] = 0
    found = told(write_ct(tmp_path / "a", {OUT: stored}))
    assert found == ({"scale-zero": (level, OUT)} if level else {})


@pytest.mark.parametrize("packed", [0x00, 0x88, 0x80])
def test_blocks_of_zeros_may_have_the_scale_zero(packed, tmp_path):
    zero = np.zeros((64, 32), np.uint8)
    assert told(write_ct(tmp_path / "a", {OUT: zero}, packed=packed)) == {
        "zero-weights": ("warning", OUT)
    }


def test_a_block_of_minus_zero_alone_is_empty_and_any_other_code_is_not(tmp_path):
    zero = np.zeros((64, 32), np.uint8)
    assert told(write_ct(tmp_path / "a", {OUT: zero}, packed=0x81)) == {
        "scale-zero": ("error", OUT)
    }
    assert told(write_ct(tmp_path / "b", {OUT: zero}, packed=0x18)) == {
        "scale-zero": ("error", OUT)
    }


@pytest.mark.parametrize(
    ("values", "is_odd"),
    [
        ([0x71, 0x72, 0x73], True),
        ([0x71, 0x72, 0x73, 0x74, 0x75, 0x76], True),
        ([0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77], False),  # more than a handful
        ([0x71], False),  # all alike
        ([0x70, 0x78], False),  # powers of two: a format that rounds them so
        ([0x38, 0x39], False),  # small
        ([0x3F, 0x40, 0x41], False),
        ([0x40, 0x41], True),
        ([0x71, 0x7C], True),
        ([0x71, 0x7D], False),  # not neighbours
    ],
)
def test_when_e4m3_looks_like_e8m0(values, is_odd, tmp_path):
    stored = np.resize(np.array(values, np.uint8), (64, 32))
    assert told(write_ct(tmp_path / "a", {OUT: stored})) == (
        {"scale-dtype": ("error", None)} if is_odd else {}
    )


@pytest.mark.parametrize(("width", "is_odd"), [(8, False), (9, False), (11, True), (60, True)])
def test_when_e8m0_looks_like_e4m3(width, is_odd, tmp_path):
    """The 5th and the 95th percentile lie over 8 octaves apart, and the largest is 448's byte."""
    stored = np.resize(np.arange(127 - width, 127, dtype=np.uint8), (64, 32))
    found = told(write_ct(tmp_path / "a", {OUT: stored}, "mxfp4"))
    assert found == ({"scale-dtype": ("error", None)} if is_odd else {})
    assert told(write_ct(tmp_path / "b", {OUT: stored - 1}, "mxfp4")) == {}, (
        "wide, as outliers make it"
    )


def test_weights_on_a_grid_have_few_scales(tmp_path):
    """Few and neighbours, and the largest is 448: the scales of weights that were integers."""
    stored = np.resize(np.array([0x71, 0x78, 0x7C, 0x7E], np.uint8), (64, 32))
    assert told(write_ct(tmp_path / "a", {OUT: stored})) == {}


def test_most_modules_must_look_odd(tmp_path):
    odd, plain = np.resize(np.array([0x71, 0x73], np.uint8), (64, 32)), scales()
    modules = {f"layers.{n}.o_proj": odd if n < 2 else plain for n in range(4)}
    assert told(write_ct(tmp_path / "a", modules)) == {}
    assert told(write_ct(tmp_path / "b", {**modules, "layers.4.o_proj": odd})) == {
        "scale-dtype": ("error", None)
    }


@pytest.mark.parametrize(
    ("divisor", "found"),
    [
        (2688.0, {}),
        (2688 * 2.0**20, {}),  # amax 2^-20
        (
            2688 * 2.0**21,
            {"global-scale-range": ("warning", OUT)},
        ),  # the inverse says 2688^2 * 2^21
        (2688 / 65504, {}),  # fp16's largest
        (
            2688 / 2.0**17,
            {"global-scale-reciprocal": ("error", OUT)},
        ),  # amax 2^17, or by the inverse 55
        (1 / 2688, {"global-scale-reciprocal": ("error", OUT)}),
        (1e-38, {"global-scale-range": ("warning", OUT)}),
        (0.0, {"global-scale": ("error", OUT)}),
        (-2688.0, {"global-scale": ("error", OUT)}),
        (float("nan"), {"global-scale": ("error", OUT), "scale-not-finite": ("error", OUT)}),
    ],
)
def test_the_amax_that_a_global_scale_implies(divisor, found, tmp_path):
    told_of = told(write_ct(tmp_path / "a", {OUT: scales()}, divisors={OUT: divisor}))
    assert {code: where for code, where in told_of.items() if code.startswith("global")} == {
        code: where for code, where in found.items() if code.startswith("global")
    }
    assert found.items() <= told_of.items()


def test_groups_are_siblings_and_only_they(tmp_path):
    names = ["a.q_proj", "a.k_proj", "a.o_proj", "b.q_proj"]
    modules = {name: scales() for name in names}
    assert (
        told(
            write_ct(tmp_path / "same", modules, divisors={"a.o_proj": 1000.0, "b.q_proj": 2000.0})
        )
        == {}
    )
    found = told(write_ct(tmp_path / "differ", modules, divisors={"a.k_proj": 2687.9998}))
    assert found == {"group-scales-differ": ("error", "a.k_proj")}


def test_scales_of_modules_that_are_not_chosen_are_left_alone(tmp_path):
    bad = np.full((64, 32), 0x7F, np.uint8)
    artifact: Artifact = open_artifact(
        str(write_ct(tmp_path / "a", {OUT: bad, "layers.1.o_proj": scales()}, divisors={OUT: 0.0}))
    )
    codes = {
        finding.code
        for finding in judge(artifact, None, ["layers.1.o_proj"], [], Phases()).findings
    }
    assert codes == {"global-scale"}, "what stands once for a module is always read"


def test_what_stayed_must_be_ignored_where_its_namesakes_are_quantized(tmp_path):
    floats = ("BF16", (64, 64), bytes(8192))
    others = {
        "layers.1.o_proj.weight": floats,
        "embed_tokens.weight": floats,
        "layers.1.norm.weight": ("BF16", (64,), bytes(128)),
    }
    assert told(write_ct(tmp_path / "a", {OUT: scales()}, others=others)) == {
        "kept-not-ignored": ("error", "layers.1.o_proj")
    }
    assert (
        told(write_ct(tmp_path / "b", {OUT: scales()}, others=others, ignore=["layers.1.o_proj"]))
        == {}
    )
    assert (
        told(
            write_ct(tmp_path / "c", {OUT: scales()}, others=others, ignore=["re:layers\\.1\\..*"])
        )
        == {}
    )


def test_a_head_that_stayed_must_be_ignored_where_records_are_for_every_linear(tmp_path):
    floats = ("BF16", (64, 64), bytes(8192))
    names = ("lm_head", "embed_tokens", "layers.0.mlp.gate", "layers.0.norm_table")
    others = {f"{name}.weight": floats for name in names}

    def write(folder, **more):
        return write_ct(folder, {"layers.1.down_proj": scales()}, others=others, **more)

    unhealthy = {"kept-not-ignored": ("error", "lm_head")}
    assert told(write(tmp_path / "a")) == unhealthy
    for number, ignored in enumerate(("lm_head", "re:.*lm_head")):
        assert told(write(tmp_path / f"b{number}", ignore=[ignored])) == {}
    # A record that names its modules is not for others; a tied head has no tensors of its own.
    for key, change in (
        ("named", lambda config: group_of(config).update(targets=["re:.*down_proj"])),
        ("tied", lambda config: config.update(tie_word_embeddings=True)),
    ):
        folder = write(tmp_path / key)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        assert told(folder) == {}


def group_of(config):
    return config["quantization_config"]["config_groups"]["group_0"]
