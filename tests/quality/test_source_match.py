"""source_match.py where its judgements turn: which reading is named, and which factor is one of
rounding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from artifacts import quantize
from checkpoints import pack_shard, read_shard, run, write_single
from liars import MODEL
from rewriting import rewrite

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.errors import InputError
from fp4convert.quality.inspection import inspect
from fp4convert.quality.source_match import COMPARED_MODULES, match_source
from fp4convert.storage.open import open_source

NAMES = [f"layers.{n}.o_proj" for n in range(3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Normal weights, and an artifact of them: statistics on scales say nothing."""
    root = tmp_path_factory.mktemp("pair")
    rng = np.random.default_rng(1)
    tensors = {}
    for name in NAMES:
        x = rng.standard_normal((128, 256), np.float32)
        tensors[f"{name}.weight"] = ("F32", x.shape, x.tobytes())
    source = write_single(root / "source", tensors)
    quantize(source, root / "out", "--dialect", "modelopt")
    return source, root / "out"


def told(
    pair: tuple[Path, Path], folder: Path, **changes: np.ndarray
) -> list[tuple[str, str | None]]:
    """Findings beside the source, after these tensors' bytes were replaced; an underscore for each
    dot but the last.
    """
    source, honest = pair
    folder.mkdir()
    for file in honest.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = read_shard(honest / MODEL)
    for name, values in changes.items():
        dtype, shape, _ = tensors[name]
        tensors[name] = (dtype, shape, values.tobytes())
    (folder / MODEL).write_bytes(pack_shard(tensors))
    document = inspect(open_artifact(str(folder)), open_source(str(source)), False)
    return [(finding["code"], finding["tensor"]) for finding in document["findings"]]


def stored(pair: tuple[Path, Path], name: str, dtype: str = "u1") -> np.ndarray:
    _, shape, data = read_shard(pair[1] / MODEL)[name]
    return np.frombuffer(data, dtype).reshape(shape)


@pytest.mark.parametrize(
    ("factor", "is_wrong"),
    [(1, False), (1.03, False), (0.97, False), (1.06, True), (0.95, True), (4, True)],
)
def test_a_factor_of_more_than_four_per_cent_is_told(factor, is_wrong, pair, tmp_path):
    name = f"{NAMES[1]}.weight_scale_2"
    changed = (stored(pair, name, "<f4") * np.float32(factor)).astype("<f4")
    assert told(pair, tmp_path / "liar", **{name: changed}) == (
        [("scale-factor", NAMES[1])] if is_wrong else []
    )


def test_the_other_order_of_all_and_of_one(pair, tmp_path):
    changes = {
        f"{name}.weight_scale": np.ascontiguousarray(stored(pair, f"{name}.weight_scale").T)
        for name in NAMES
    }
    assert told(pair, tmp_path / "all", **changes) == [("scale-layout", None)]
    changes.pop(f"{NAMES[0]}.weight_scale")
    assert told(pair, tmp_path / "two", **changes) == [
        ("scale-layout", None),
        ("scale-layout", NAMES[0]),
    ]
    changes.pop(f"{NAMES[1]}.weight_scale")
    assert told(pair, tmp_path / "one", **changes) == [("scale-layout", NAMES[2])]


def test_two_lies_at_once(pair, tmp_path):
    changes = {
        f"{name}.weight_scale": np.ascontiguousarray(stored(pair, f"{name}.weight_scale").T)
        for name in NAMES
    }
    for name in NAMES:
        packed = stored(pair, f"{name}.weight")
        changes[f"{name}.weight"] = packed >> 4 | packed << 4
    assert told(pair, tmp_path / "liar", **changes) == [
        ("scale-layout", None),
        ("nibble-order", None),
    ]


def test_scales_that_are_all_alike_lie_as_declared(tmp_path):
    """Every reading is the same; the declared one stands."""
    x = np.where(np.random.default_rng(0).random((128, 256)) < 0.5, -1, 1).astype(np.float32)
    source = write_single(tmp_path / "source", {"x.o_proj.weight": ("F32", x.shape, x.tobytes())})
    quantize(source, tmp_path / "out", "--format", "mxfp4")
    found = match_source(
        open_artifact(str(tmp_path / "out")), open_source(str(source)), ["x.o_proj"]
    )
    assert found == ("linear", [])


def test_zeros_and_nan_are_no_traceback(pair, tmp_path):
    nan = np.full((128, 16), 0x7F, np.uint8)
    found = told(pair, tmp_path / "nan", **{f"{NAMES[0]}.weight_scale": nan})
    assert ("scale-not-finite", NAMES[0]) in found
    assert ("source-differs", NAMES[0]) in found
    zero = write_single(tmp_path / "zero", {"x.o_proj.weight": ("F32", (64, 64), bytes(16384))})
    quantize(zero, tmp_path / "out")
    findings = run("inspect", tmp_path / "out", "--source", zero, "--json").json["findings"]
    assert [one["code"] for one in findings] == ["zero-weights"]


def test_modules_of_any_shape_are_compared(tmp_path):
    """Of some, 128x4 has as many bytes as linear, of others more: only what all could lie in is a
    candidate for all.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in zip(NAMES, ((128, 256), (128, 256), (100, 112)), strict=True):
        x = rng.standard_normal(shape, np.float32)
        tensors[f"{name}.weight"] = ("F32", shape, x.tobytes())
    source = write_single(tmp_path / "source", tensors)
    for fmt in ("nvfp4", "mxfp4"):
        quantize(source, tmp_path / fmt, "--format", fmt)
        assert run("inspect", tmp_path / fmt, "--source", source, "--json").json["findings"] == []
        out = tmp_path / f"plain-{fmt}"
        options = ("--dialect", "plain", "--scale-layout", "128x4")
        assert run("transcode", tmp_path / fmt, "-o", out, *options).code == 0
        assert run("inspect", out, "--source", source, "--json").json["findings"] == []


def test_a_source_without_these_modules_is_bad_input(pair, tmp_path):
    other = write_single(
        tmp_path / "other", {f"{NAMES[0]}.weight": ("F32", (64, 64), bytes(16384))}
    )
    with pytest.raises(InputError) as caught:
        match_source(open_artifact(str(pair[1])), open_source(str(other)), NAMES)
    assert caught.value.code == "source-differs"


def test_some_modules_from_everywhere_are_compared(tmp_path, monkeypatch):
    count = 2 * COMPARED_MODULES
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    names = [f"layers.{n:03}.o_proj" for n in range(count)]
    source = write_single(
        tmp_path / "source", {f"{name}.weight": ("F32", x.shape, x.tobytes()) for name in names}
    )
    quantize(source, tmp_path / "out")
    compared: list[str] = []
    artifact = open_artifact(str(tmp_path / "out"))
    decode = type(artifact).decode
    monkeypatch.setattr(
        type(artifact),
        "decode",
        lambda self, module: compared.append(module) or decode(self, module),
    )
    assert match_source(artifact, open_source(str(source)), names)[1] == []
    assert compared == names[::2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_how_many_modules_differ_is_told(count, pair, tmp_path):
    """Two of three are no "none", and one is told by its name."""
    source, artifact = pair
    tensors = read_shard(source / "model.safetensors")
    for seed, name in enumerate(NAMES[:count]):
        dtype, shape, _ = tensors[f"{name}.weight"]
        other = np.random.default_rng(100 + seed).standard_normal(shape, np.float32)
        tensors[f"{name}.weight"] = (dtype, shape, other.tobytes())
    other = write_single(tmp_path / "other", tensors)
    document = run("verify", artifact, "--source", other, "--json").json
    details = {
        one["tensor"]: one["detail"]
        for one in document["findings"]
        if one["code"] == "source-differs"
    }
    words = {
        1: None,
        2: "was not made from other as it is: 2 of 3 tensors have other values",
        3: "was not made from other: none of 3 tensors has its values",
    }[count]
    assert (words or "") in (document["verdict"] or "")
    assert bool(document["verdict"]) == (None in details) == (count > 1)
    assert {f"{name}.weight" for name in NAMES[:count]} <= details.keys()
    if count > 1:
        those = "2 of 3 modules compared" if count == 2 else "these"
        assert details[None].startswith(f"{those} are not the weights of other")


@pytest.mark.parametrize("values", ["all", "one"])
def test_weights_below_mxfp4s_least_scale_are_lost_to_underflow(values, tmp_path):
    """Denormal float32: under 2^-127, the least of E8M0, they are zeros, and no other source."""
    rng, module = np.random.default_rng(1), "layers.0.self_attn.o_proj"
    x = rng.integers(0, 1 << 10, (64, 128)).astype(np.uint32)
    if values == "one":
        x[:] = 0
        x[3, 5] = 5
    tensors = {f"{module}.weight": ("F32", x.shape, x.tobytes())}
    source, out = write_single(tmp_path / "source", tensors), tmp_path / "out"
    run("quantize", source, "--format", "mxfp4", "-o", out, "-q")
    assert errors_of(source, out) == {
        ("weights-underflow", module),
        ("weights-underflow", f"{module}.weight"),
    }


@pytest.mark.parametrize(
    ("dialect", "faint"), [("mlx", 1e-5), ("compressed-tensors", 2e-8), ("modelopt", 2e-8)]
)
def test_values_below_the_least_step_are_lost_to_underflow(dialect, faint, tmp_path):
    """In mlx by themselves, elsewhere beside another member of their scale group."""
    names = [f"layers.0.self_attn.{part}_proj" for part in "qkvo"]
    rng, tensors = np.random.default_rng(1), {}
    for name in names:
        x = rng.standard_normal((64, 128), np.float32) * (faint if "k_proj" in name else 0.1)
        tensors[f"{name}.weight"] = ("F32", x.shape, x.astype(np.float32).tobytes())
    source, out = write_single(tmp_path / "source", tensors), tmp_path / "out"
    run("quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", out, "-q")
    found = errors_of(source, out)
    assert found == {("weights-underflow", names[1]), ("weights-underflow", f"{names[1]}.weight")}
    # Zeros in the place of what the scales could hold, and another source, are none.
    stored = read_shard(out / MODEL)
    codes = max(
        (name for name in stored if names[0] in name), key=lambda name: len(stored[name][2])
    )
    rewrite(out, MODEL, codes, bytes(64 * 64))
    assert ("source-differs", names[0]) in errors_of(source, out)
    x = rng.standard_normal((64, 128), np.float32)
    tensors[f"{names[1]}.weight"] = ("F32", x.shape, x.tobytes())
    write_single(source, tensors)
    assert ("source-differs", f"{names[1]}.weight") in errors_of(source, out)


def errors_of(source: Path, out: Path) -> set[tuple[str, str | None]]:
    findings = run("verify", out, "--source", source, "--json").json["findings"]
    return {(one["code"], one["tensor"]) for one in findings if one["level"] == "error"}
