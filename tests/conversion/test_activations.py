"""quantize --activations 4: the input scales, the records that change, the bytes that do not, and
what is refused.
"""

import json
import shutil
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    SECOND,
    done,
    llama_shards,
    pack_shard,
    read_folder,
    read_shard,
    run,
    unless_given,
    write_checkpoint,
    write_llama,
)

from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.numerics.formats import NVFP4
from fp4convert.numerics.matrices import Quantized
from fp4convert.storage.checkpoint_files import REPORT

CT, MO = "compressed-tensors", "modelopt"
TARGETS = [("nvfp4", CT), ("mxfp4", CT), ("nvfp4", MO)]
INPUT_SCALE = {CT: "input_global_scale", MO: "input_scale"}
SHAPE = {CT: (1,), MO: ()}
MODULES = sorted(
    [f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"]
    + [f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")]
)
DOWN = f"{LAYER}.mlp.down_proj"
OURS = "quantization_config.json"

every_target = pytest.mark.parametrize(("format", "dialect"), TARGETS)
every_nvfp4 = pytest.mark.parametrize("dialect", [CT, MO])


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


@pytest.fixture
def quantize(source, tmp_path):
    """(name of a folder, format, dialect, options) -> the folder, now with an artifact."""

    def make(name: str, format: str = "nvfp4", dialect: str = CT, *options: object) -> Path:
        words = ("--format", format, "--dialect", dialect, "-o", tmp_path / name, *options)
        done("quantize", source, *words)
        return tmp_path / name

    return make


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the state of the conversion."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def input_scales(folder: Path, dialect: str) -> dict[str, tuple]:
    ending = f".{INPUT_SCALE[dialect]}"
    return {
        name.removesuffix(ending): tensor
        for name, tensor in read_folder(folder).items()
        if name.endswith(ending)
    }


def rewrite(folder: Path, file: str, **changes: object) -> None:
    """A JSON file with those keys changed."""
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))


def forget(folder: Path) -> None:
    """Leave nothing of ours: from now on the artifact is anyone's, read by the engines' record."""
    (folder / OURS).unlink()
    shutil.rmtree(folder / ".fp4convert")


def without(folder: Path, name: str) -> None:
    """Take a tensor out of the second shard and out of the index."""
    tensors = read_shard(folder / SECOND)
    del tensors[name]
    (folder / SECOND).write_bytes(pack_shard(tensors))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def errors_of(folder: Path) -> list[tuple[str, str | None]]:
    outcome = run("inspect", folder, "--json")
    errors = [
        (found["code"], found["tensor"])
        for found in outcome.json["findings"]
        if found["level"] == "error"
    ]
    assert (outcome.code, outcome.json["healthy"]) == ((6, False) if errors else (0, True))
    return sorted(errors, key=str)


@pytest.mark.parametrize(
    ("input_scale", "multiplier", "divisor"),
    [
        (1.0, "3f800000", "3f800000"),
        (0.5, "3f000000", "40000000"),
        (3.0, "40400000", "3eaaaaab"),
        (0.1, "3dcccccd", "41200000"),
        (2.0**-100, "0d800000", "71800000"),
        (2.0**100, "71800000", "0d800000"),
    ],
)
def test_bytes_of_an_input_scale(input_scale, multiplier, divisor):
    q = Quantized(NVFP4, (1, 16), memoryview(bytes(8)), memoryview(bytes(1)), 2.0, "divisor")
    for name, expected in ((CT, divisor), (MO, multiplier)):
        parts = dict(dialect_named(name).TRAITS.scalars.encode("m", q, input_scale))
        assert len(parts) == 2
        assert bytes(parts[f"m.{INPUT_SCALE[name]}"])[::-1].hex() == expected


def test_an_inverted_input_scale_is_rounded_once():
    """No float32 is nearer to 1/X, in exact fractions; rounding X first would often miss it."""
    q = Quantized(NVFP4, (1, 16), memoryview(bytes(8)), memoryview(bytes(1)), 2.0, "divisor")
    for x in np.exp2(np.random.default_rng(2).uniform(-100, 100, 500)).tolist():
        (stored,) = struct.unpack(
            "<f", dict(dialect_named(CT).TRAITS.scalars.encode("m", q, x))["m.input_global_scale"]
        )
        neighbours = (
            float(np.nextafter(np.float32(stored), np.float32(end))) for end in (0, np.inf)
        )
        error = abs(Fraction(stored) - 1 / Fraction(x))
        assert all(error <= abs(Fraction(other) - 1 / Fraction(x)) for other in neighbours)


@pytest.mark.parametrize(
    ("options", "multiplier", "divisor"),
    [
        (("--input-scale", "1"), b"\0\0\x80\x3f", b"\0\0\x80\x3f"),
        (("--input-scale", "0.5"), b"\0\0\0\x3f", b"\0\0\0\x40"),
        (("--input-scale", "3"), b"\0\0\x40\x40", b"\xab\xaa\xaa\x3e"),
    ],
)
@every_nvfp4
def test_every_quantized_module_has_the_same_input_scale(
    dialect, options, multiplier, divisor, quantize
):
    """Of fused modules too; kept ones, such as lm_head, have none."""
    found = input_scales(quantize("out", "nvfp4", dialect, "--activations", 4, *options), dialect)
    expected = ("F32", SHAPE[dialect], divisor if dialect == CT else multiplier)
    assert found == dict.fromkeys(MODULES, expected)


@every_target
def test_all_but_input_scales_and_records_is_as_with_16_bits(format, dialect, quantize):
    four = quantize("four", format, dialect, "--activations", 4)
    sixteen = quantize("sixteen", format, dialect, "--activations", 16)
    assert contents(sixteen) == contents(quantize("default", format, dialect))
    added = (
        {f"{module}.{INPUT_SCALE[dialect]}" for module in MODULES} if format == "nvfp4" else set()
    )
    tensors = read_folder(four)
    assert added <= tensors.keys()
    assert {name: tensor for name, tensor in tensors.items() if name not in added} == read_folder(
        sixteen
    )
    may_differ = {
        "config.json",
        "hf_quant_config.json",
        OURS,
        *((FIRST, SECOND, INDEX) if added else ()),
    }
    left, right = contents(four), contents(sixteen)
    assert left.keys() == right.keys()
    assert {file for file in left if left[file] != right[file]} == may_differ & left.keys()


@every_target
def test_records_change_only_where_they_speak_of_activations(format, dialect, quantize):
    """The new words themselves are typed by hand in test_dialects.py."""
    four = quantize("four", format, dialect, "--activations", 4)
    sixteen = quantize("sixteen", format, dialect)

    def changed(file: str, *path: str) -> set[str]:
        left, right = (json.loads((folder / file).read_text()) for folder in (four, sixteen))
        for key in path:
            left, right = left[key], right[key]
        return {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}

    algorithm = {"quant_algo"} if dialect == MO else set()
    assert changed("config.json") == {"quantization_config"}
    assert changed("config.json", "quantization_config") == {"config_groups", *algorithm}
    assert changed("config.json", "quantization_config", "config_groups", "group_0") == {
        "input_activations"
    }
    assert changed(OURS) == {"activations", "files", "options"}
    assert json.loads((four / OURS).read_text())["activations"] == 4
    if dialect == MO:
        assert changed("hf_quant_config.json") == {"quantization"}
        assert changed("hf_quant_config.json", "quantization") == algorithm
    index = json.loads((four / INDEX).read_text())
    assert {name: file for file in (FIRST, SECOND) for name in read_shard(four / file)} == index[
        "weight_map"
    ]
    assert index["metadata"]["total_size"] == sum(
        len(data) for _, _, data in read_folder(four).values()
    )


@every_target
def test_inspect_and_verify_find_it_sound(format, dialect, quantize, source):
    folder = quantize("out", format, dialect, "--activations", 4)
    document = run("inspect", folder, "--json").json
    assert (document["activations"], document["format"], document["dialect"]) == (
        4,
        format,
        dialect,
    )
    assert (document["healthy"], document["findings"]) == (True, [])
    assert document["tensors"] == {"quantized": 7, "other": 4}
    assert "activations     4 bits, quantized by the engine" in run("inspect", folder).out
    verified = run("verify", folder, "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    forget(folder)
    foreign = run("inspect", folder, "--json").json
    assert (foreign["activations"], foreign["healthy"]) == (4, True), (
        "by the engines' record alone it is the same"
    )


@every_target
def test_dequantize_drops_the_input_scales(format, dialect, quantize, source, tmp_path):
    for name, bits in (("four", 4), ("sixteen", 16)):
        folder = quantize(name, format, dialect, "--activations", bits)
        done("dequantize", folder, "-o", tmp_path / f"{name}-restored")
    restored = contents(tmp_path / "four-restored")
    assert restored == contents(tmp_path / "sixteen-restored")
    assert read_folder(tmp_path / "four-restored").keys() == read_folder(source).keys()


@every_nvfp4
def test_input_scales_that_no_record_asks_for_are_harmless(dialect, quantize, tmp_path):
    """Somebody else's weights for 16-bit activations that still have the scales of a
    calibration.
    """
    folder = quantize("out", "nvfp4", dialect, "--activations", 4)
    forget(folder)
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    del declared["config_groups"]["group_0"]["input_activations"]
    rewrite(folder, "config.json", quantization_config=declared)
    assert errors_of(folder) == []
    assert run("inspect", folder, "--json").json["activations"] == 16
    for name, artifact in (("left", folder), ("right", quantize("sixteen", "nvfp4", dialect))):
        done("dequantize", artifact, "-o", tmp_path / name)
    assert contents(tmp_path / "left") == contents(tmp_path / "right")


@every_nvfp4
def test_one_missing_input_scale_is_an_error(dialect, quantize, tmp_path):
    folder, name = (
        quantize("out", "nvfp4", dialect, "--activations", 4),
        f"{DOWN}.{INPUT_SCALE[dialect]}",
    )
    without(folder, name)
    assert errors_of(folder) == [("tensor-missing", name)]
    refused = run("dequantize", folder, "-o", tmp_path / "restored", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unsound-artifact")
    forget(folder)
    assert errors_of(folder) == [("tensor-missing", name)]


@every_nvfp4
def test_an_input_scale_of_the_other_dialects_shape_is_an_error(dialect, quantize):
    folder, name = (
        quantize("out", "nvfp4", dialect, "--activations", 4),
        f"{DOWN}.{INPUT_SCALE[dialect]}",
    )
    shape = () if dialect == CT else (1,)
    (folder / SECOND).write_bytes(
        pack_shard({**read_shard(folder / SECOND), name: ("F32", shape, b"\0\0\x80\x3f")})
    )
    assert errors_of(folder) == [("tensor-shape", name)]


@every_nvfp4
@pytest.mark.parametrize("has_our_record", [True, False])
def test_a_w4a4_record_without_input_scales_is_an_error(has_our_record, dialect, quantize):
    """The engines' record says W4A4, and ours (where there is one) too; the tensors are those of
    W4A16.
    """
    four, folder = (
        quantize("four", "nvfp4", dialect, "--activations", 4),
        quantize("sixteen", "nvfp4", dialect),
    )
    for file in {"config.json", "hf_quant_config.json"} & {path.name for path in four.iterdir()}:
        (folder / file).write_bytes((four / file).read_bytes())
    if has_our_record:
        rewrite(folder, OURS, activations=4)
    else:
        forget(folder)
    assert errors_of(folder) == [
        ("tensor-missing", f"{module}.{INPUT_SCALE[dialect]}") for module in MODULES
    ]


@every_target
@pytest.mark.parametrize("activations", [4, 16])
def test_one_record_alone_that_lies_is_an_error(activations, format, dialect, quantize):
    other = 20 - activations
    folder = quantize("out", format, dialect, "--activations", activations)
    lie = json.loads(
        (quantize("other", format, dialect, "--activations", other) / "config.json").read_text()
    )
    rewrite(folder, OURS, activations=other)
    codes = {code for code, _ in errors_of(folder)}
    assert codes == {"record-wrong"} | (
        {"tensor-missing"} if format == "nvfp4" and other == 4 else set()
    )
    rewrite(folder, OURS, activations=activations)
    assert errors_of(folder) == []
    rewrite(folder, "config.json", **lie)
    disagree = [("records-disagree", None)] if dialect == MO else []  # with hf_quant_config.json
    assert errors_of(folder) == [("record-wrong", None), *disagree]


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize(
    ("options", "code"),
    [
        *((("--activations", bits), "bad-activations") for bits in (0, -4, 32)),
        (("--activations", 8), "dialect-activations"),
        (("--activations", 8, "--input-scale", 1), "dialect-activations"),
        (("--input-scale", 1), "bad-input-scale"),
        (("--activations", 16, "--input-scale", 1), "bad-input-scale"),
        (("--format", "mxfp4", "--activations", 4, "--input-scale", 1), "bad-input-scale"),
        *(
            (("--activations", 4, "--input-scale", value), "bad-input-scale")
            for value in ("0", "-0.0", "-1", "nan", "inf", "-inf", "1e-40", "1e39", "1e-31", "1e31")
        ),
    ],
)
def test_what_is_refused_leaves_nothing(options, code, is_dry, source, tmp_path):
    out = tmp_path / "out"
    words = (*unless_given(options, "--format", "nvfp4"), *(["--dry-run"] if is_dry else []))
    outcome = run("quantize", source, "-o", out, "--json", *words)
    error = outcome.json["error"]
    assert (outcome.code, error["exit"], error["code"]) == (2, 2, code)
    option = "--input-scale" if code == "bad-input-scale" else "--activations"
    assert option in error["message"]
    assert error["next"]
    assert not out.exists()


@every_target
def test_a_dry_run_counts_the_input_scales(format, dialect, quantize, source, tmp_path):
    options = ("--format", format, "--dialect", dialect, "-o", tmp_path / "out", "--json")
    dry = ("quantize", source, *options, "--dry-run", "--activations")
    four, sixteen = (run(*dry, bits).json for bits in (4, 16))
    assert not (tmp_path / "out").exists()
    folder = quantize("out", format, dialect, "--activations", 4)
    files = (path for path in folder.iterdir() if path.is_file() and path.name != REPORT)
    assert four["output_bytes"] == sum(path.stat().st_size for path in files)
    before = {step["name"]: step["output_bytes"] for step in sixteen["tensors"]}
    added = {step["name"]: step["output_bytes"] - before[step["name"]] for step in four["tensors"]}
    each = 4 if format == "nvfp4" else 0
    assert added == {
        name: each if name.removesuffix(".weight") in MODULES else 0 for name in before
    }


@every_nvfp4
def test_a_finished_folder_is_not_mixed_with_another_input_scale(
    dialect, quantize, source, tmp_path
):
    folder = quantize("out", "nvfp4", dialect, "--activations", 4, "--input-scale", 0.5)
    before = contents(folder)
    options = (
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--activations",
        4,
        "-o",
        folder,
        "--json",
    )
    for others in (("--input-scale", 2), ()):
        refused = run("quantize", source, *options, *others)
        assert (refused.code, refused.json["error"]["code"]) == (5, "other-plan")
        assert "the options changed" in refused.json["error"]["message"]
        assert contents(folder) == before
    assert (
        contents(quantize("out", "nvfp4", dialect, "--activations", 4, "--input-scale", "5e-1"))
        == before
    )
    forced = quantize("out", "nvfp4", dialect, "--activations", 4, "--input-scale", 2, "--force")
    assert contents(forced) == contents(
        quantize("new", "nvfp4", dialect, "--activations", 4, "--input-scale", 2)
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            ("nvfp4", "--activations", 4, "--input-scale", 0.5),
            ("nvfp4", "--activations", 4, "--input-scale", 2),
        ),
        (("nvfp4", "--activations", 16), ("nvfp4", "--activations", 4)),
        (("mxfp4", "--scale-rule", "floor"), ("mxfp4", "--scale-rule", "ceil")),
    ],
)
def test_an_unfinished_folder_is_not_mixed_with_other_options(first, second, tmp_path):
    """A run that fails after its first shard leaves it behind; a run with other options may not
    take it for its own.
    """
    shards = llama_shards()
    dtype, shape, data = shards[SECOND][f"{DOWN}.weight"]
    shards[SECOND][f"{DOWN}.weight"] = (dtype, shape, b"\xc0\x7f" + data[2:])
    source = write_checkpoint(tmp_path / "source", shards)
    command = ("quantize", source, "--format")
    assert run(*command, *first, "-o", tmp_path / "out").code == 2
    assert (tmp_path / "out" / FIRST).exists(), "otherwise this tests nothing"
    for name in ("out", "clean"):
        done(*command, *second, "-o", tmp_path / name, "--exclude", DOWN)
    left, right = contents(tmp_path / "out"), contents(tmp_path / "clean")
    assert {
        file for file in left.keys() | right.keys() if left.get(file) != right.get(file)
    } == set()


def set_input_scale(folder: Path, module: str, dialect: str, value: float) -> None:
    """Another value in the shard, and no record of ours that could tell."""
    forget(folder)
    name = f"{module}.{INPUT_SCALE[dialect]}"
    for file in (FIRST, SECOND):
        tensors = read_shard(folder / file)
        if name in tensors:
            tensors[name] = (*tensors[name][:2], struct.pack("<f", value))
            (folder / file).write_bytes(pack_shard(tensors))


@every_nvfp4
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_verify_reads_input_scales(value, dialect, quantize):
    folder = quantize("out", "nvfp4", dialect, "--activations", 4)
    set_input_scale(folder, DOWN, dialect, value)
    outcome = run("verify", folder, "--json")
    errors = [
        (found["code"], found["tensor"])
        for found in outcome.json["findings"]
        if found["level"] == "error"
    ]
    assert (outcome.code, errors) == (6, [("input-scale", DOWN)])


@every_nvfp4
def test_verify_sees_fused_modules_whose_input_scales_differ(dialect, quantize):
    folder = quantize("out", "nvfp4", dialect, "--activations", 4)
    set_input_scale(folder, f"{LAYER}.mlp.up_proj", dialect, 0.25)
    outcome = run("verify", folder, "--json")
    errors = [found["code"] for found in outcome.json["findings"] if found["level"] == "error"]
    assert (outcome.code, errors) == (6, ["group-inputs-differ"])
