"""Lies that inspect sees alone: artifacts of real weights, changed without fp4convert's code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
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
    lie,
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


def rearrange(folder: Folder, order: str) -> None:
    for name in folder.names(".weight_scale"):
        folder.store(name, ORDERS[order](folder.bytes_of(name)))


def plain_says(folder: Folder, layout: str) -> None:
    """The scales of dialect plain, in order 8x4 and declared so, or otherwise."""
    for name in folder.names(".block_scale"):
        scales = folder.bytes_of(name)
        folder.put(name, ("U8", (scales.size,), np.ascontiguousarray(to_8x4(scales)).tobytes()))
    padding = {"8x4": [8, 4], "128x4": [128, 4]}.get(layout)
    our_record_says(folder, scale_layout=layout, scale_padding=padding)


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


def set_bytes(folder: Folder, name: str, value: int, share: float) -> None:
    scales = folder.bytes_of(name)
    scales.reshape(-1)[: max(1, int(share * scales.size))] = value
    folder.store(name, scales)


def negate(folder: Folder) -> None:
    scales = folder.bytes_of(S)
    scales[3] |= 0x80
    folder.store(S, scales)


def add_scales(folder: Folder) -> None:
    folder.put("extra.weight_scale", ("F8_E4M3", (8, 4), b"\x38" * 32))


def keep(folder: Folder, *endings: str) -> None:
    """The module is an ordinary one again; no record is told."""
    rows, columns = folder[f"{DENSE}.{endings[0]}"][1]
    for ending in endings:
        folder.remove(f"{DENSE}.{ending}")
    folder.put(W, ("BF16", (rows, columns * 2), bf16(rows, columns * 2)))


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
    del folder.records[INDEX]["weight_map"][S]


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


def without_ours(folder: Folder, tell: Callable[..., None], *words: object) -> None:
    """Somebody else's artifact, judged by the runtime's record alone."""
    del folder.records[OURS]
    tell(folder, *words)


def w4a4_record(folder: Folder) -> None:
    group = folder.record["config_groups"]["group_0"]
    group["input_activations"] = {**folder.weights, "dynamic": "local"}


def modelopt_mxfp4(folder: Folder) -> None:
    """MXFP4 as ModelOpt 0.47 names it; engines know no such algorithm."""
    record = {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": []}
    folder.records[CONFIG]["quantization_config"] = record


def warn(*row: object) -> Lie:
    """A lie that is a warning."""
    told = lie(*row)
    return replace(told, found=("warning", *told.found[1:]))


W, S = f"{DENSE}.weight", f"{DENSE}.weight_scale"
GLOBALS, INPUTS = f"{W}_global_scale", f"{DENSE}.input_global_scale"
FORMAT = "mxfp4-pack-quantized"
PACKED = ("weight_packed", "weight_scale", "weight_global_scale")
MODELOPT = ("weight", "weight_scale", "weight_scale_2")
LIES = [
    *(lie(f"ct {order}", "ct", "scale-layout", None, rearrange, order) for order in ORDERS),
    *(lie(f"ct mx {order}", "ct-mx", "scale-layout", None, rearrange, order) for order in ORDERS),
    lie("foreign 128x4", "mo", "scale-layout", None, without_ours, rearrange, "128x4"),
    lie("comfy linear", "comfy", "scale-layout", None, comfy_linear),
    lie("plain is 8x4", "plain", "scale-layout", None, plain_says, "128x4"),
    lie("plain 8x4 says linear", "plain", "tensor-shape", None, plain_says, "linear"),
    *(
        lie(
            f"ours says {value}", key, "record-wrong", None, partial(our_record_says, **{at: value})
        )
        for key, at, value in (
            ("ct", "scale_layout", "128x4"),
            ("ct", "activations", 4),
            ("mo", "nibble_order", "high_first"),
        )
    ),
    *(
        lie(f"reciprocal {key}", key, "global-scale-reciprocal", None, reciprocal, GLOBAL[key])
        for key in GLOBAL
    ),
    lie("reciprocal of one", "mo", "global-scale-reciprocal", DENSE, reciprocal, f"{S}_2"),
    lie("e4m3 as e8m0", "ct-mx", "scale-dtype", None, e4m3_as_e8m0),
    lie("e8m0 as e4m3", "ct", "scale-dtype", None, e8m0_as_e4m3),
    *(
        make_lie(f"{key} alone", key, code, None, multiply, name, factor)
        for make_lie, key, code, name, factor in (
            (lie, "ct", "group-scales-differ", f"{QUERY}.weight_global_scale", 1.01),
            (lie, "mo", "group-scales-differ", f"{KEY}.weight_scale_2", 1.01),
            (warn, "quark", "group-scales-differ", f"{VALUE}.weight_scale_2", 1.01),
            (lie, "ct-w4a4", "group-inputs-differ", f"{QUERY}.input_global_scale", 1.1),
            (lie, "mo-w4a4", "group-inputs-differ", f"{QUERY}.input_scale", 1.1),
            (warn, "quark-w4a4", "group-inputs-differ", f"{KEY}.input_scale_2", 1.1),
        )
    ),
    lie("no block scales", "ct", "tensor-missing", S, Folder.remove, S),
    lie("no block scales mo", "mo", "tensor-missing", S, Folder.remove, S),
    lie("no global scale", "ct", "tensor-missing", GLOBALS, Folder.remove, GLOBALS),
    lie("no global scale mo", "mo", "tensor-missing", f"{S}_2", Folder.remove, f"{S}_2"),
    lie("no codes", "ct", "packed-missing", DENSE, Folder.remove, f"{W}_packed"),
    lie("scales of nothing", "mo", "packed-missing", "extra", add_scales),
    lie("NaN scale", "ct", "scale-not-finite", DENSE, set_bytes, S, 0x7F, 0),
    lie("NaN scale mx", "ct-mx", "scale-not-finite", DENSE, set_bytes, S, 0xFF, 0),
    lie("negative scales", "mo", "scale-negative", DENSE, negate),
    lie("zeroed scales", "ct", "scale-zero", DENSE, set_bytes, S, 0, 0.02),
    warn("a zeroed scale", "ct", "scale-zero", DENSE, set_bytes, S, 0, 0),
    *(
        lie(f"global {value}", "ct", "global-scale", DENSE, Folder.set_number, GLOBALS, value)
        for value in (0.0, -1.0, math.nan, math.inf)
    ),
    warn("no global", "mo", "global-scale-range", DENSE, Folder.set_number, f"{S}_2", 1e30),
    *(
        lie(f"input {value}", "ct-w4a4", "input-scale", DENSE, Folder.set_number, INPUTS, value)
        for value in (0.0, math.nan, math.inf)
    ),
    *(
        lie(f"{key} ignores it", key, "ignored-but-quantized", DENSE, ignore, where)
        for key, where in (("ct", "ignore"), ("mo", "ignore"), ("quark", "exclude"))
    ),
    lie("ours ignores it", "comfy", "ignored-but-quantized", DENSE, ignore_in_ours),
    *(
        lie(f"the label is {text}", "comfy", "label-differs", DENSE, label, text)
        for text in (b'{"format":"float8_e4m3fn"}', b"nvfp4")
    ),
    lie("ignore is no pattern", "ct", "ignore-pattern", None, set_record, "ignore", ["re:("]),
    lie("ct ignores it not", "ct", "kept-not-ignored", DENSE, keep, *PACKED),
    lie("mo ignores it not", "mo", "kept-not-ignored", DENSE, keep, *MODELOPT),
    lie("quark mx ignores it not", "quark-mx", "kept-not-ignored", DENSE, keep, *MODELOPT[:2]),
    lie("another shard", "ct", "weights-beside", None, add_shard),
    lie("a norm of NaN", "ct", "kept-not-finite", NORM, spoil_norm),
    lie("not in the index", "ct", "index-omits", None, omit_from_index),
    lie("another format", "ct", "records-disagree", None, set_record, "format", FORMAT),
    lie("foreign format", "ct", "tensor-shape", S, without_ours, set_record, "format", FORMAT),
    lie("another group size", "ct", "record-strategy", None, set_weights, "group_size", 32),
    lie("another strategy", "ct-mx", "record-strategy", None, set_weights, "strategy", "channel"),
    lie("no status", "ct", "record-status", None, forget_status),
    lie("no record", "ct", "records-disagree", None, forget_config),
    lie("two algorithms", "mo", "records-disagree", None, hf_says, "quant_algo", "NVFP4"),
    lie("two ignore lists", "mo", "records-disagree", None, hf_says, "exclude_modules", ["x"]),
    lie("w4a4 without inputs", "ct", "tensor-missing", INPUTS, without_ours, w4a4_record),
    warn("modelopt mxfp4", "quark-mx", "record-refused", None, without_ours, modelopt_mxfp4),
    lie("e8m0 where u8 belongs", "ct-mx", "tensor-shape", S, retype, S, "F8_E8M0"),
    lie("u8 where e4m3 belongs", "ct", "tensor-shape", S, retype, S, "U8"),
    lie("a scalar", "ct", "tensor-shape", GLOBALS, retype, GLOBALS, "F32", ()),
    lie("codes as a heap", "ct", "packed-shape", DENSE, retype, f"{W}_packed", "U8", (384 * 768,)),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_seen_alone(lie: Lie, artifacts, tmp_path):
    folder = artifacts[lie.artifact].copy()
    lie.tell(folder)
    artifact = open_artifact(str(folder.write(tmp_path / "liar")))
    document = inspect(artifact, None, False)
    level, code, tensor = lie.found
    findings = [Finding(**finding) for finding in document["findings"]]
    told = {one.tensor for one in findings if (one.level, one.code) == (level, code)}
    assert told, findings
    assert tensor is None or tensor in told
    assert document["healthy"] == (level == "warning")
    if code == "scale-layout":
        assert document["scale_layout"]["detected"] in lie.name
        assert document["scale_layout"]["detected"] != document["scale_layout"]["declared"]
    assert set(findings) <= set(verify(artifact, None, Gate()).findings)


def test_at_least_24_kinds():
    assert len({lie.found[:2] for lie in LIES}) >= 24


def test_exit_6_and_the_drawn_line(artifacts, tmp_path):
    folder = artifacts["ct"].copy()
    rearrange(folder, "128x4")
    outcome = run("inspect", folder.write(tmp_path / "liar"))
    assert outcome.code == 6
    assert "scale layout    linear (declared), 128x4 (detected)" in outcome.out.splitlines()
    assert outcome.out.splitlines()[-1] == "not healthy"
    verified = run("verify", tmp_path / "liar", "--report", tmp_path / "page.html")
    assert (verified.code, verified.out.splitlines()[-1]) == (6, "failed")
    (line,) = (line for line in outcome.out.splitlines() if "scale-layout" in line)
    assert line in verified.out.splitlines()
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
    quantize(source, out, "--dialect", dialect, "--include", "*")
    found, verified = (run(word, out, "--json").json["findings"] for word in ("inspect", "verify"))
    assert all(finding in verified for finding in found)
    return {finding["code"]: finding["level"] for finding in found}


@pytest.mark.parametrize(
    ("dialect", "codes"),
    [
        ("modelopt", {"router-quantized", "tower-quantized", "embedding-quantized"}),
        ("plain", {"router-quantized", "tower-quantized"}),  # where embeddings may be four-bit
    ],
)
def test_a_router_a_tower_and_an_embedding(dialect, codes, tmp_path):
    assert towers(dialect, tmp_path) == dict.fromkeys(codes, "warning")


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
    known = explanations("findings")
    assert [one.name for one in LIES if "alone" not in known[one.found[1]]["seen"]] == []
