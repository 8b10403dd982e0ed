"""Lies that inspect sees alone: artifacts of real weights, changed without fp4convert's code."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, bf16, run, write_single
from liars import (
    ARTIFACTS,
    CONFIG,
    DENSE,
    GLOBAL,
    KEY,
    MODEL,
    NORM,
    ORDERS,
    OURS,
    QUERY,
    SCALES,
    THEIRS,
    VALUE,
    Folder,
    Lie,
    add_shard,
    from_128x4,
    make,
    split_in_two,
    spoil_norm,
    to_8x4,
    write_minilm,
)

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.errors import Finding
from fp4convert.quality.inspection import inspect
from fp4convert.quality.verification import Gate, verify
from fp4convert.report.text import explanations


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_minilm(tmp_path_factory.mktemp("minilm") / "source")


@pytest.fixture(scope="module")
def artifacts(source, tmp_path_factory) -> dict[str, Folder]:
    root = tmp_path_factory.mktemp("artifacts")
    return {name: Folder.read(make(source, name, root / name)) for name in ARTIFACTS}


def rearrange(order: str, folder: Folder) -> None:
    for name in folder.names(".weight_scale"):
        folder.store(name, ORDERS[order](folder.bytes_of(name)))


def plain_says(layout: str, folder: Folder) -> None:
    """The scales of dialect plain, in order 8x4 and declared so, or otherwise."""
    for name in folder.names(".block_scale"):
        scales = folder.bytes_of(name)
        folder.put(name, ("U8", (scales.size,), np.ascontiguousarray(to_8x4(scales)).tobytes()))
    folder.records[OURS] |= {
        "scale_layout": layout,
        "scale_padding": {"8x4": [8, 4], "128x4": [128, 4]}.get(layout),
    }


def our_record_says(folder: Folder, **changes: object) -> None:
    folder.records[OURS] |= changes


def reciprocal(folder: Folder, ending: str) -> None:
    for name in folder.names(ending):
        folder.set_number(name, 1 / folder.number(name))


def e4m3_as_e8m0(folder: Folder) -> None:
    """The bytes of an NVFP4 artifact of these weights: half of them, one for each block of 32."""
    for name in folder.names(".weight_scale"):
        rng = np.random.default_rng(0)
        scales = folder.bytes_of(name).astype(np.float32) - 127
        amax = 2.0**scales * rng.uniform(4, 7.9, scales.shape)
        folder.store(name, e4m3(448 * amax / amax.max()))


def e4m3(values: np.ndarray) -> np.ndarray:
    """Bytes of positive normal numbers, cut to three bits of mantissa."""
    mantissa, exponent = np.frexp(values)
    return ((exponent + 6).clip(1, 15) * 8 + ((mantissa * 2 - 1) * 8)).astype(np.uint8)


def e8m0_as_e4m3(folder: Folder) -> None:
    """Exponents with the bias of 127, of blocks as wide as those of NVFP4."""
    for name in folder.names(".weight_scale"):
        scales = folder.bytes_of(name)
        folder.store(name, (scales >> 3) + 127 - 15)


def multiply(folder: Folder, name: str, factor: float) -> None:
    folder.set_number(name, folder.number(name) * factor)


def set_number(folder: Folder, name: str, value: float) -> None:
    folder.set_number(name, value)


def remove(folder: Folder, name: str) -> None:
    folder.remove(name)


def set_bytes(folder: Folder, name: str, value: int, share: float) -> None:
    scales = folder.bytes_of(name)
    scales.reshape(-1)[: max(1, int(share * scales.size))] = value
    folder.store(name, scales)


def negate(folder: Folder) -> None:
    scales = folder.bytes_of(f"{DENSE}.weight_scale")
    scales[3] |= 0x80
    folder.store(f"{DENSE}.weight_scale", scales)


def add(folder: Folder, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    folder.put(name, (dtype, shape, b"\x38" * math.prod(shape)))


def keep(folder: Folder, module: str, *endings: str) -> None:
    """The module is an ordinary one again; no record is told."""
    rows, columns = folder[f"{module}.{endings[0]}"][1]
    for ending in endings:
        folder.remove(f"{module}.{ending}")
    folder.put(f"{module}.weight", ("BF16", (rows, columns * 2), bf16(rows, columns * 2)))


def ignore(folder: Folder, key: str) -> None:
    folder.record[key].append(DENSE)


def ignore_in_ours(folder: Folder) -> None:
    folder.records[OURS]["ignore"].append(DENSE)


def comfy_linear(folder: Folder) -> None:
    for name in folder.names(".weight_scale"):
        folder.store(name, from_128x4(folder.bytes_of(name)))


def label(folder: Folder, text: bytes) -> None:
    folder.put(f"{DENSE}.comfy_quant", ("U8", (len(text),), text))


def omit_from_index(folder: Folder) -> None:
    split_in_two(folder)
    del folder.records[INDEX]["weight_map"][f"{DENSE}.weight_scale"]


def retype(folder: Folder, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> None:
    _, old, data = folder[name]
    folder.put(name, (dtype, old if shape is None else shape, data))


def set_record(folder: Folder, key: str, value: object) -> None:
    folder.record[key] = value


def set_weights(folder: Folder, key: str, value: object) -> None:
    folder.weights[key] = value


def forget_status(folder: Folder) -> None:
    del folder.record["quantization_status"]


def hf_says(folder: Folder, key: str, value: object) -> None:
    folder.records[THEIRS]["quantization"][key] = value


def forget_config(folder: Folder) -> None:
    del folder.records[CONFIG]["quantization_config"]


def without_ours(tell, folder: Folder) -> None:
    """Somebody else's artifact, judged by the runtime's record alone."""
    del folder.records[OURS]
    tell(folder)


def w4a4_record(folder: Folder) -> None:
    group = folder.record["config_groups"]["group_0"]
    group["input_activations"] = {**folder.weights, "dynamic": "local"}


def modelopt_mxfp4(folder: Folder) -> None:
    """MXFP4 as ModelOpt 0.47 names it; engines know no such algorithm."""
    folder.records[CONFIG]["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "mxfp4",
        "ignore": [],
    }


W, S = f"{DENSE}.weight", f"{DENSE}.weight_scale"
ERROR, WARNING = "error", "warning"
LIES = [
    *(
        Lie(f"ct {order}", "ct", partial(rearrange, order), (ERROR, "scale-layout", None))
        for order in ORDERS
    ),
    *(
        Lie(f"ct mx {order}", "ct-mx", partial(rearrange, order), (ERROR, "scale-layout", None))
        for order in ORDERS
    ),
    Lie(
        "foreign 128x4",
        "mo",
        partial(without_ours, partial(rearrange, "128x4")),
        (ERROR, "scale-layout", None),
    ),
    Lie("comfy linear", "comfy", comfy_linear, (ERROR, "scale-layout", None)),
    Lie("plain is 8x4", "plain", partial(plain_says, "128x4"), (ERROR, "scale-layout", None)),
    Lie(
        "plain 8x4 says linear",
        "plain",
        partial(plain_says, "linear"),
        (ERROR, "tensor-shape", None),
    ),
    Lie(
        "ours says 128x4",
        "ct",
        lambda f: our_record_says(f, scale_layout="128x4"),
        (ERROR, "record-wrong", None),
    ),
    Lie(
        "ours says w4a4",
        "ct",
        lambda f: our_record_says(f, activations=4),
        (ERROR, "record-wrong", None),
    ),
    Lie(
        "ours says high_first",
        "mo",
        lambda f: our_record_says(f, nibble_order="high_first"),
        (ERROR, "record-wrong", None),
    ),
    *(
        Lie(
            f"reciprocal {key}",
            key,
            lambda f, key=key: reciprocal(f, GLOBAL[key]),
            (ERROR, "global-scale-reciprocal", None),
        )
        for key in GLOBAL
    ),
    Lie(
        "reciprocal of one",
        "mo",
        lambda f: reciprocal(f, f"{DENSE}.weight_scale_2"),
        (ERROR, "global-scale-reciprocal", DENSE),
    ),
    Lie("e4m3 as e8m0", "ct-mx", e4m3_as_e8m0, (ERROR, "scale-dtype", None)),
    Lie("e8m0 as e4m3", "ct", e8m0_as_e4m3, (ERROR, "scale-dtype", None)),
    Lie(
        "q alone ct",
        "ct",
        lambda f: multiply(f, f"{QUERY}.weight_global_scale", 1.01),
        (ERROR, "group-scales-differ", None),
    ),
    Lie(
        "k alone mo",
        "mo",
        lambda f: multiply(f, f"{KEY}.weight_scale_2", 1.01),
        (ERROR, "group-scales-differ", None),
    ),
    Lie(
        "v alone quark",
        "quark",
        lambda f: multiply(f, f"{VALUE}.weight_scale_2", 1.01),
        (WARNING, "group-scales-differ", None),
    ),
    Lie(
        "inputs ct",
        "ct-w4a4",
        lambda f: multiply(f, f"{QUERY}.input_global_scale", 1.1),
        (ERROR, "group-inputs-differ", None),
    ),
    Lie(
        "inputs mo",
        "mo-w4a4",
        lambda f: multiply(f, f"{QUERY}.input_scale", 1.1),
        (ERROR, "group-inputs-differ", None),
    ),
    Lie(
        "inputs quark",
        "quark-w4a4",
        lambda f: multiply(f, f"{KEY}.input_scale_2", 1.1),
        (WARNING, "group-inputs-differ", None),
    ),
    Lie("no block scales", "ct", lambda f: remove(f, S), (ERROR, "tensor-missing", S)),
    Lie("no block scales mo", "mo", lambda f: remove(f, S), (ERROR, "tensor-missing", S)),
    Lie(
        "no global scale",
        "ct",
        lambda f: remove(f, f"{W}_global_scale"),
        (ERROR, "tensor-missing", f"{W}_global_scale"),
    ),
    Lie(
        "no global scale mo",
        "mo",
        lambda f: remove(f, f"{S}_2"),
        (ERROR, "tensor-missing", f"{S}_2"),
    ),
    Lie("no codes", "ct", lambda f: remove(f, f"{W}_packed"), (ERROR, "packed-missing", DENSE)),
    Lie(
        "scales of nothing",
        "mo",
        lambda f: add(f, "extra.weight_scale", "F8_E4M3", (8, 4)),
        (ERROR, "packed-missing", "extra"),
    ),
    Lie("NaN scale", "ct", lambda f: set_bytes(f, S, 0x7F, 0), (ERROR, "scale-not-finite", DENSE)),
    Lie(
        "NaN scale mx",
        "ct-mx",
        lambda f: set_bytes(f, S, 0xFF, 0),
        (ERROR, "scale-not-finite", DENSE),
    ),
    Lie("negative scales", "mo", negate, (ERROR, "scale-negative", DENSE)),
    Lie("zeroed scales", "ct", lambda f: set_bytes(f, S, 0, 0.02), (ERROR, "scale-zero", DENSE)),
    Lie("a zeroed scale", "ct", lambda f: set_bytes(f, S, 0, 0), (WARNING, "scale-zero", DENSE)),
    *(
        Lie(
            f"global {value}",
            "ct",
            lambda f, v=value: set_number(f, f"{W}_global_scale", v),
            (ERROR, "global-scale", DENSE),
        )
        for value in (0.0, -1.0, math.nan, math.inf)
    ),
    Lie(
        "global of no weights",
        "mo",
        lambda f: set_number(f, f"{S}_2", 1e30),
        (WARNING, "global-scale-range", DENSE),
    ),
    *(
        Lie(
            f"input {v}",
            "ct-w4a4",
            lambda f, v=v: set_number(f, f"{DENSE}.input_global_scale", v),
            (ERROR, "input-scale", DENSE),
        )
        for v in (0.0, math.nan, math.inf)
    ),
    Lie(
        "ct ignores it",
        "ct",
        lambda f: ignore(f, "ignore"),
        (ERROR, "ignored-but-quantized", DENSE),
    ),
    Lie(
        "mo ignores it",
        "mo",
        lambda f: ignore(f, "ignore"),
        (ERROR, "ignored-but-quantized", DENSE),
    ),
    Lie(
        "quark ignores it",
        "quark",
        lambda f: ignore(f, "exclude"),
        (ERROR, "ignored-but-quantized", DENSE),
    ),
    Lie("ours ignores it", "comfy", ignore_in_ours, (ERROR, "ignored-but-quantized", DENSE)),
    Lie(
        "the label is of another format",
        "comfy",
        lambda f: label(f, b'{"format":"float8_e4m3fn"}'),
        (ERROR, "label-differs", DENSE),
    ),
    Lie(
        "the label is none", "comfy", lambda f: label(f, b"nvfp4"), (ERROR, "label-differs", DENSE)
    ),
    Lie(
        "ignore is no pattern",
        "ct",
        lambda f: set_record(f, "ignore", ["re:("]),
        (ERROR, "ignore-pattern", None),
    ),
    Lie(
        "ct ignores it not",
        "ct",
        lambda f: keep(f, DENSE, "weight_packed", "weight_scale", "weight_global_scale"),
        (ERROR, "kept-not-ignored", DENSE),
    ),
    Lie(
        "mo ignores it not",
        "mo",
        lambda f: keep(f, DENSE, "weight", "weight_scale", "weight_scale_2"),
        (ERROR, "kept-not-ignored", DENSE),
    ),
    Lie(
        "quark mx ignores it not",
        "quark-mx",
        lambda f: keep(f, DENSE, "weight", "weight_scale"),
        (ERROR, "kept-not-ignored", DENSE),
    ),
    Lie("another shard", "ct", add_shard, (ERROR, "weights-beside", None)),
    Lie("a norm of NaN", "ct", spoil_norm, (ERROR, "kept-not-finite", NORM)),
    Lie("not in the index", "ct", omit_from_index, (ERROR, "index-omits", None)),
    Lie(
        "another format",
        "ct",
        lambda f: set_record(f, "format", "mxfp4-pack-quantized"),
        (ERROR, "records-disagree", None),
    ),
    Lie(
        "foreign, another format",
        "ct",
        partial(without_ours, lambda f: set_record(f, "format", "mxfp4-pack-quantized")),
        (ERROR, "tensor-shape", S),
    ),
    Lie(
        "another group size",
        "ct",
        lambda f: set_weights(f, "group_size", 32),
        (ERROR, "record-strategy", None),
    ),
    Lie(
        "another strategy",
        "ct-mx",
        lambda f: set_weights(f, "strategy", "channel"),
        (ERROR, "record-strategy", None),
    ),
    Lie("no status", "ct", forget_status, (ERROR, "record-status", None)),
    Lie("no record", "ct", forget_config, (ERROR, "records-disagree", None)),
    Lie(
        "two algorithms",
        "mo",
        lambda f: hf_says(f, "quant_algo", "NVFP4"),
        (ERROR, "records-disagree", None),
    ),
    Lie(
        "two ignore lists",
        "mo",
        lambda f: hf_says(f, "exclude_modules", ["x"]),
        (ERROR, "records-disagree", None),
    ),
    Lie(
        "w4a4 without inputs",
        "ct",
        partial(without_ours, w4a4_record),
        (ERROR, "tensor-missing", f"{DENSE}.input_global_scale"),
    ),
    Lie(
        "modelopt mxfp4",
        "quark-mx",
        partial(without_ours, modelopt_mxfp4),
        (WARNING, "record-refused", None),
    ),
    Lie(
        "e8m0 where u8 belongs",
        "ct-mx",
        lambda f: retype(f, S, "F8_E8M0"),
        (ERROR, "tensor-shape", S),
    ),
    Lie("u8 where e4m3 belongs", "ct", lambda f: retype(f, S, "U8"), (ERROR, "tensor-shape", S)),
    Lie(
        "a scalar",
        "ct",
        lambda f: retype(f, f"{W}_global_scale", "F32", ()),
        (ERROR, "tensor-shape", f"{W}_global_scale"),
    ),
    Lie(
        "codes as a heap",
        "ct",
        lambda f: retype(f, f"{W}_packed", "U8", (384 * 768,)),
        (ERROR, "packed-shape", DENSE),
    ),
]


def of_inspect(finding: dict) -> Finding:
    return Finding(**finding)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_seen_alone(lie: Lie, artifacts, tmp_path):
    folder = artifacts[lie.artifact].copy()
    lie.tell(folder)
    artifact = open_artifact(str(folder.write(tmp_path / "liar")))
    document = inspect(artifact, None, False)
    level, code, tensor = lie.found
    told = [
        finding
        for finding in document["findings"]
        if (finding["level"], finding["code"]) == (level, code)
    ]
    assert told, document["findings"]
    assert tensor is None or tensor in {finding["tensor"] for finding in told}
    assert document["healthy"] == (level == "warning")
    if code == "scale-layout":
        assert document["scale_layout"]["detected"] in lie.name
        assert document["scale_layout"]["detected"] != document["scale_layout"]["declared"]
    assert set(map(of_inspect, document["findings"])) <= set(
        verify(artifact, None, Gate()).findings
    )


def test_at_least_24_kinds():
    assert len({lie.found[:2] for lie in LIES}) >= 24


def test_exit_6_and_the_drawn_line(artifacts, tmp_path):
    folder = artifacts["ct"].copy()
    rearrange("128x4", folder)
    outcome = run("inspect", folder.write(tmp_path / "liar"))
    assert outcome.code == 6
    assert "scale layout    linear (declared), 128x4 (detected)" in outcome.out.splitlines()
    assert outcome.out.splitlines()[-1] == "not healthy"
    verified = run("verify", tmp_path / "liar", "--report", tmp_path / "page.html")
    assert (verified.code, verified.out.splitlines()[-1]) == (6, "failed")
    assert (
        next(line for line in outcome.out.splitlines() if "scale-layout" in line)
        in verified.out.splitlines()
    )
    assert '"code":"scale-layout"' in (tmp_path / "page.html").read_text()


def towers(dialect: str, tmp_path: Path) -> dict[str, str]:
    """Code and level of all findings on a model whose router, tower and embedding are quantized."""
    shapes = {
        "model.layers.0.mlp.router.weight": (8, 64),
        "model.vision_tower.layers.0.q_proj.weight": (64, 64),
        "model.embed_tokens.weight": (96, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 128),
    }
    tensors = {
        name: ("BF16", shape, bf16(*shape, seed=at))
        for at, (name, shape) in enumerate(shapes.items())
    }
    source, out = write_single(tmp_path / "source", tensors), tmp_path / dialect
    assert (
        run(
            "quantize",
            source,
            "--format",
            "nvfp4",
            "--dialect",
            dialect,
            "--include",
            "*",
            "-o",
            out,
        ).code
        == 0
    )
    found, verified = (
        run(command, out, "--json").json["findings"] for command in ("inspect", "verify")
    )
    assert all(finding in verified for finding in found)
    return {finding["code"]: finding["level"] for finding in found}


def test_a_router_a_tower_and_an_embedding(tmp_path):
    expected = {
        "router-quantized": "warning",
        "tower-quantized": "warning",
        "embedding-quantized": "warning",
    }
    assert towers("modelopt", tmp_path) == expected


def test_where_embeddings_may_be_four_bit(tmp_path):
    assert towers("plain", tmp_path) == {
        "router-quantized": "warning",
        "tower-quantized": "warning",
    }


def test_what_was_changed_is_what_differs(artifacts, tmp_path):
    """An artifact that is read and written again by the tools of these tests is as healthy as
    before.
    """
    for name, folder in artifacts.items():
        document = run("inspect", folder.copy().write(tmp_path / name), "--json").json
        assert document["findings"] == [], name
        assert MODEL in folder.files
        assert (SCALES in folder.files) == (name == "plain")


def test_docs_say_that_these_lies_are_seen_alone():
    assert {
        lie.name for lie in LIES if "alone" not in explanations("findings")[lie.found[1]]["seen"]
    } == set()
