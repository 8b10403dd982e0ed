"""Artifacts of several formats carried to another dialect: every code and scale under the names,
dtypes and shapes that the target's engine has for them, which are typed here by hand, and back.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoints import Tensor, bf16, done, read_folder, run
from mixing import Eight, Matrices, write_mixed
from tiny_chains import LENGTH, TEXT, make_model

from fp4convert.checkpoint.dialects.forms import Form, Granularity
from fp4convert.checkpoint.dialects.target_forms import fp8_form, module_form
from fp4convert.numerics.codec import quantize
from fp4convert.numerics.formats import INT4, MXFP4, MXFP8, NVFP4, Format
from fp4convert.numerics.matrices import Quantized
from fp4convert.recipes.recipe import Target

CT, MO = "compressed-tensors", "modelopt"
ROWS, COLUMNS = 192, 256  # the second row of blocks of 128 is half of one
FP8_MODULE = "model.layers.0.self_attn.o_proj"
FP4_MODULE = "model.layers.0.mlp.down_proj"
KEPT: dict[str, Tensor] = {"model.norm.weight": ("BF16", (COLUMNS,), bf16(COLUMNS))}
CONFIG: dict[str, object] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
INPUT_SCALE = 0.375


class Kind(NamedTuple):
    """A form of eight bits, and its scales in both dialects: dtype and shape."""

    granularity: Granularity
    dtype: str
    compressed: tuple[int, ...]
    modelopt: tuple[int, ...]
    count: int


KINDS = {
    "fp8 tensor": Kind("tensor", "F32", (1,), (), 1),
    "fp8 row": Kind("row", "F32", (ROWS, 1), (ROWS,), ROWS),
    "fp8 128x128": Kind((128, 128), "F32", (2, 2), (2, 1, 2, 1), 4),
    "mxfp8": Kind((1, 32), "U8", (ROWS, 8), (ROWS, 8), ROWS * 8),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def eight(kind: str, dialect: str, is_static: bool = False) -> tuple[Form, Eight]:
    """Codes of every byte that is no NaN, and scales that differ."""
    granularity, dtype, *_, count = KINDS[kind]
    draw = np.random.default_rng(1)
    codes = draw.integers(0, 126, ROWS * COLUMNS).astype(np.uint8) | np.uint8(128)
    if dtype == "U8":
        scales = draw.integers(110, 125, count).astype(np.uint8).tobytes()
        form = fp8_form(Target("mxfp8", dialect, activations=8), granularity, "U8", MXFP8)
    else:
        scales = draw.uniform(1e-4, 1e-3, count).astype(np.float32).tobytes()
        target = Target("fp8", dialect, activations=8)
        form = fp8_form(target, granularity, is_static=is_static)
    return form, Eight((ROWS, COLUMNS), codes.tobytes(), scales, INPUT_SCALE)


def four(
    fmt: Format, dialect: str, seed: int = 2, amax: float = 2688 / 2**12
) -> tuple[Form, Quantized]:
    """Weights whose global scale is a power of two, so that its reciprocal is one too."""
    x = np.random.default_rng(seed).uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32)
    q = quantize(x, fmt, "amax" if fmt is NVFP4 else "floor", amax if fmt is NVFP4 else None)
    return module_form(Target(fmt.name, dialect), fmt.name), q


def write(folder: Path, dialect: str, matrices: Matrices) -> Path:
    formats = [form.format for form, _ in matrices.values()]
    first = next((fmt for fmt in formats if fmt.is_fp4), formats[0])
    target = Target(first.name, dialect, activations=8 if first.is_fp8 else 16)
    return write_mixed(folder, target, matrices, KEPT, CONFIG)


def transcode(artifact: Path, folder: Path, dialect: str, *options: object) -> dict[str, Any]:
    outcome = done("transcode", artifact, "-o", folder, "--dialect", dialect, "--json", *options)
    found = run("inspect", folder, "--json").json
    assert found["healthy"]
    assert [each for each in found["findings"] if each["level"] != "note"] == []
    return outcome.json


def refused(artifact: Path, folder: Path, dialect: str, *options: object) -> dict[str, Any]:
    outcome = run("transcode", artifact, "-o", folder, "--dialect", dialect, "--json", *options)
    assert outcome.code == 2
    assert not folder.exists()
    return outcome.json["error"]


def assert_same(made: Path, source: Path, dialect: str) -> None:
    """The same tensors, and the same file as the source's own, written in its dialect."""
    assert read_folder(made) == read_folder(source)
    own = made.parent / f"{made.name}-own"
    transcode(source, own, dialect)
    left, right = (
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        for folder in (made, own)
    )
    assert left == right


@pytest.mark.parametrize("is_alone", [False, True])
@EVERY_KIND
def test_to_modelopt_and_back(tmp_path: Path, kind: str, is_alone: bool) -> None:
    """Every byte of the file comes back, and in between the tensors are ModelOpt's."""
    form, q = eight(kind, CT, is_static=True)
    matrices: Matrices = {FP8_MODULE: (form, q)}
    if not is_alone:
        matrices = {**matrices, FP4_MODULE: four(NVFP4, CT)}
    source = write(tmp_path / "source", CT, matrices)
    made = transcode(source, tmp_path / "there", MO)
    count = len(matrices)
    assert (made["carried"]["modules"], made["carried"]["bit_for_bit"]) == (count, count)
    assert made["tensors"]["transcoded"] == count
    expected: dict[str, Tensor] = {
        f"{FP8_MODULE}.weight": ("F8_E4M3", (ROWS, COLUMNS), q.codes),
        f"{FP8_MODULE}.weight_scale": (KINDS[kind].dtype, KINDS[kind].modelopt, q.scales),
    }
    if kind == "fp8 tensor":
        stored = np.float32(INPUT_SCALE).tobytes()
        expected[f"{FP8_MODULE}.input_scale"] = ("F32", (), stored)
    there = read_folder(tmp_path / "there")
    assert {name: one for name, one in there.items() if name.startswith(FP8_MODULE)} == expected
    names = {"weight", "weight_scale", "weight_scale_2"}
    own = {name.removeprefix(f"{FP4_MODULE}.") for name in there if name.startswith(FP4_MODULE)}
    assert own == (set() if is_alone else names)
    assert any("16-bit" in text for text in made["warnings"]) == (kind == "fp8 128x128")
    back = transcode(tmp_path / "there", tmp_path / "back", CT)
    assert back["carried"]["bit_for_bit"] == count
    assert_same(tmp_path / "back", source, CT)
    forms = []
    for one in (source, tmp_path / "there", tmp_path / "back"):
        found = run("inspect", one, "--json").json
        each = [(form["format"], form["modules"]) for form in found.get("forms", ())]
        forms.append((found["format"], found["tensors"]["quantized"], each))
    assert forms[0] == forms[1] == forms[2]


@EVERY_KIND
def test_compressed_tensors_names(tmp_path: Path, kind: str) -> None:
    form, q = eight(kind, MO)
    source = write(tmp_path / "source", MO, {FP8_MODULE: (form, q), FP4_MODULE: four(NVFP4, MO)})
    made = transcode(source, tmp_path / "made", CT)
    assert made["warnings"] == []
    tensors = read_folder(tmp_path / "made")
    assert tensors[f"{FP8_MODULE}.weight"] == ("F8_E4M3", (ROWS, COLUMNS), q.codes)
    expected = (KINDS[kind].dtype, KINDS[kind].compressed, q.scales)
    assert tensors[f"{FP8_MODULE}.weight_scale"] == expected
    assert (f"{FP8_MODULE}.input_scale" in tensors) == (kind == "fp8 tensor")
    group = next(
        each
        for each in run("inspect", tmp_path / "made", "--json").json["forms"]
        if each["format"] != "nvfp4"
    )
    # ModelOpt's FP8_PB_WO is of weights only
    assert (group["modules"], group["activations"]) == (1, 16 if "128" in kind else 8)


def test_an_input_scale_that_the_source_lacks_is_1_and_told(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CT, {FP8_MODULE: eight("fp8 tensor", CT)})
    assert f"{FP8_MODULE}.input_scale" not in read_folder(source)
    made = transcode(source, tmp_path / "made", MO)
    one = read_folder(tmp_path / "made")[f"{FP8_MODULE}.input_scale"]
    assert one == ("F32", (), b"\x00\x00\x80?")
    assert any("it is 1.0" in text and FP8_MODULE in text for text in made["warnings"])


def test_an_input_scale_without_a_name_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "source", MO, {FP8_MODULE: eight("fp8 tensor", MO)})
    made = transcode(source, tmp_path / "made", "comfy")
    assert any(f"{FP8_MODULE}.input_scale" in text for text in made["warnings"])
    assert "input_scale" not in "".join(read_folder(tmp_path / "made"))


@pytest.mark.parametrize("dialect", ["mlx", "comfy"])
def test_mxfp8_goes_through_other_dialects(tmp_path: Path, dialect: str) -> None:
    """mlx has four codes in a word, comfy another order of scales: both come back."""
    source = write(tmp_path / "source", CT, {FP8_MODULE: eight("mxfp8", CT)})
    transcode(source, tmp_path / "there", dialect)
    transcode(tmp_path / "there", tmp_path / "back", CT)
    assert read_folder(tmp_path / "back") == read_folder(source)


def test_deepseeks_blocks_go_to_both_and_back(tmp_path: Path) -> None:
    form, q = eight("fp8 128x128", "deepseek")
    source = write(tmp_path / "source", "deepseek", {FP8_MODULE: (form, q)})
    for dialect in (CT, MO):
        transcode(source, tmp_path / dialect, dialect)
        transcode(tmp_path / dialect, tmp_path / f"{dialect}-back", "deepseek")
        assert_same(tmp_path / f"{dialect}-back", source, "deepseek")
    name = f"{FP8_MODULE}.weight_scale_inv"
    assert read_folder(source)[name] == ("F32", (2, 2), q.scales)


def int4() -> tuple[Form, Eight]:
    draw = np.random.default_rng(3)
    codes = draw.integers(0, 256, ROWS * COLUMNS // 2).astype(np.uint8).tobytes()
    scales = draw.uniform(1e-3, 1e-2, ROWS * COLUMNS // 32).astype(np.float16).tobytes()
    form = Form(INT4, granularity=(1, 32), stored_scales="F16")
    return form, Eight((ROWS, COLUMNS), codes, scales)


def test_int4_stays_where_the_dialect_has_it(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CT, {FP8_MODULE: int4(), FP4_MODULE: four(NVFP4, CT)})
    transcode(source, tmp_path / "made", CT)
    assert read_folder(tmp_path / "made") == read_folder(source)
    error = refused(source, tmp_path / "never", MO)
    assert error["code"] == "dialect-mixed"
    for part in (FP8_MODULE, "int4 32", "modelopt", "by compressed-tensors"):
        assert part in error["message"]


def test_two_four_bit_formats(tmp_path: Path) -> None:
    """mlx holds both, where global scales are 1; modelopt has no record of MXFP4."""
    matrices = {FP8_MODULE: four(MXFP4, CT, 4), FP4_MODULE: four(NVFP4, CT)}
    source = write(tmp_path / "source", CT, matrices)
    transcode(source, tmp_path / "made", CT)
    assert read_folder(tmp_path / "made") == read_folder(source)
    error = refused(source, tmp_path / "never", MO)
    assert (error["code"], error["tensor"]) == ("dialect-mixed", f"{FP8_MODULE}.weight_packed")
    assert "mxfp4" in error["message"]
    made = transcode(source, tmp_path / "cast", MO, "--format", "nvfp4")
    assert (made["format"], made["carried"]["modules"]) == ("nvfp4", 2)
    own = read_folder(tmp_path / "cast")[f"{FP4_MODULE}.weight"]
    assert own[2] == read_folder(source)[f"{FP4_MODULE}.weight_packed"][2]


TAKEN = {  # also beside NVFP4, and alone
    "fp8 tensor": ((CT, MO, "comfy"), ()),
    "fp8 row": ((CT, MO), ()),
    "fp8 128x128": ((CT, MO), ("deepseek",)),
    "mxfp8": ((CT, MO, "mlx", "comfy"), ()),
}


@EVERY_KIND
def test_what_a_dialect_lacks_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """The table of docs/bytes.md, typed here by hand."""
    alone = {FP8_MODULE: eight(kind, CT)}
    beside = {**alone, FP4_MODULE: four(NVFP4, CT, amax=2688.0)}  # mlx wants a global scale of 1
    both, single = TAKEN[kind]
    for name, matrices, able in (("alone", alone, (*both, *single)), ("beside", beside, both)):
        source = write(tmp_path / name, CT, matrices)
        for dialect in (CT, MO, "quark", "gpt-oss", "deepseek", "mlx", "comfy", "plain"):
            folder = tmp_path / f"{name}-{dialect}"
            if dialect in able:
                transcode(source, folder, dialect)
                assert {*read_folder(folder)} > {*KEPT}
                continue
            error = refused(source, folder, dialect)
            assert error["code"] in ("dialect-mixed", "dialect-format", "dialect-module"), dialect
            if error["code"] == "dialect-mixed":
                told = ", ".join(one for one in (CT, MO, "deepseek", "mlx", "comfy") if one in able)
                for part in (
                    FP8_MODULE,
                    kind.split(maxsplit=1)[0],
                    dialect,
                    f"held as it is by {told}",
                ):
                    assert part in error["message"], dialect


def test_eight_bits_are_not_rounded_to_four(tmp_path: Path) -> None:
    source = write(tmp_path / "source", CT, {FP8_MODULE: eight("fp8 row", CT)})
    error = refused(source, tmp_path / "never", MO, "--format", "nvfp4")
    assert error["code"] == "not-lossless"


MIXED = """
about = "NVFP4 experts beside FP8 and MXFP8"
base = "default"
[[format]]
modules = ["*.q_proj", "*.k_proj", "*.v_proj"]
format = "fp8"
[[format]]
modules = ["*.o_proj"]
format = "mxfp8"
"""
QUANTIZED = 48  # 3 layers of 4 matrices in the attention and 4 experts of 3


@pytest.mark.parametrize(("dialect", "other"), [(CT, MO), (MO, CT)])
def test_every_command_takes_them(tmp_path: Path, dialect: str, other: str) -> None:
    """verify, compare, evaluate and quantize, of a mixture and of what it is carried into: the same
    values to what the reciprocals of global scales leave.
    """
    source, made, there = (tmp_path / name for name in ("source", "made", "there"))
    make_model(source, "Qwen3Moe")
    (tmp_path / "mixed.toml").write_text(MIXED)
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--recipe", tmp_path / "mixed.toml", "--dialect", dialect, "--activations", 4)
    done("quantize", source, "--format", "nvfp4", *options, "-o", made, "-q")
    carried = transcode(made, there, other)["carried"]
    assert carried["modules"] == QUANTIZED
    assert carried["bit_for_bit"] + len(carried["rounded"]) == QUANTIZED
    losses = []
    for artifact in (made, there):
        verified = run("verify", artifact, "--source", source, "--json").json
        assert (verified["passed"], len(verified["tensors"])) == (True, QUANTIZED)
        text = ("--text", tmp_path / "text.txt", "--sequence-length", LENGTH)
        found = done("evaluate", artifact, "--source", source, *text, "--json")
        losses.append(found.json["kl"]["mean"])
    assert 0 < losses[0] < 0.05
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    compared = run("compare", made, there, "--source", source, "--json").json
    assert compared["totals"]["quantized_by_all"] == QUANTIZED
    assert abs(compared["artifacts"]["b"]["difference_db_mean"]) < 1e-6
    # quantize keeps the eight bits that a recipe keeps, and takes the blocks over
    keep = ("--format", "nvfp4", "--dialect", other, "--exclude", "*self_attn*", "--keep-packed")
    done("quantize", made, *keep, "-o", tmp_path / "kept", "-q")
    stored, taken = read_folder(there), read_folder(tmp_path / "kept")
    eights = [name for name in stored if "self_attn" in name and name.endswith("_proj.weight")]
    assert len(eights) == 12
    for name in eights:
        assert taken[name] == stored[name]
        assert taken[f"{name}_scale"] == stored[f"{name}_scale"]
