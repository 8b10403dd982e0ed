"""quantize --kv-cache fp8: scales of keys and values, the records that speak of them, and what is
refused.
"""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from calibrations import write_calibration
from checkpoints import (
    LAYER,
    LLAMA,
    Tensor,
    pack_shard,
    read_folder,
    read_shard,
    run,
    unless_given,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

from fp4convert.storage.checkpoint_files import REPORT
from fp4convert.storage.open import open_source

CT, MO = "compressed-tensors", "modelopt"
ATTENTION = f"{LAYER}.self_attn"
NAMES = {CT: ("k_scale", "v_scale"), MO: ("k_proj.k_scale", "v_proj.v_scale")}
SHAPE = {CT: (1,), MO: ()}
ONE = b"\0\0\x80\x3f"
every_dialect = pytest.mark.parametrize("dialect", [CT, MO])


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def quantized(source: Path, folder: Path, *options: object) -> Path:
    words = ("--kv-cache", "fp8", *unless_given(options, "--format", "nvfp4"))
    done = run("quantize", source, *words, "-o", folder)
    assert done.code == 0, done
    return folder


def cache_scales(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in read_folder(folder).items()
        if name.endswith((".k_scale", ".v_scale"))
    }


def floats(folder: Path) -> dict[str, float]:
    return {
        name: struct.unpack("<f", data)[0] for name, (_, _, data) in cache_scales(folder).items()
    }


@every_dialect
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_names_shapes_and_records(format, dialect, source, tmp_path):
    """All else is as it is without a cache: tensors, records but for one key, and ours."""
    if (format, dialect) == ("mxfp4", MO):
        pytest.skip("modelopt is not written in mxfp4")
    out, options = tmp_path / "out", ("--format", format, "--dialect", dialect)
    quantized(source, out, *options)
    assert cache_scales(out) == {
        f"{ATTENTION}.{name}": ("F32", SHAPE[dialect], ONE) for name in NAMES[dialect]
    }
    assert run("quantize", source, *options, "-o", tmp_path / "plain").code == 0
    plain = read_folder(tmp_path / "plain")
    assert {name: tensor for name, tensor in read_folder(out).items() if name in plain} == plain
    record, without = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (out, tmp_path / "plain")
    )
    scheme = record.pop("kv_cache_scheme")
    assert record == without
    number = {"num_bits": 8, "type": "float", "dynamic": False}
    assert scheme == number | ({"strategy": "tensor", "symmetric": True} if dialect == CT else {})
    if dialect == MO:
        nested = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert nested["kv_cache_quant_algo"] == "FP8"
    assert json.loads((out / "quantization_config.json").read_text())["kv_cache"] == "fp8"


@every_dialect
def test_a_constant_is_told(dialect, source, tmp_path):
    words = ("--format", "nvfp4", "--dialect", dialect, "--kv-cache", "fp8")
    done = run("quantize", source, *words, "-o", tmp_path / "out", "--json")
    assert (
        "scales of an FP8 cache are 1 for 1 of 1 attentions, the first model.layers.0.self_attn"
        in done.err
    )
    assert "keys and values up to 448" in done.err
    assert done.json["tensors"] == {"quantized": 7, "copied": 4, "skipped": 0, "written": 2}


@every_dialect
def test_every_command_knows_them(dialect, source, tmp_path):
    out = quantized(source, tmp_path / "out", "--dialect", dialect)
    found = run("inspect", out, "--json").json
    assert (found["findings"], found["healthy"]) == ([], True)
    assert found["kv_cache"] == {"dtype": "fp8", "scales": 2, "smallest": 1.0, "largest": 1.0}
    assert "keys and values in fp8, 2 scales from 1 to 1" in run("inspect", out).out
    verified = run("verify", out, "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    assert run("dequantize", out, "-o", tmp_path / "restored").code == 0
    assert read_folder(tmp_path / "restored").keys() == read_folder(source).keys()
    other = MO if dialect == CT else CT
    assert run("transcode", out, "-o", tmp_path / "other", "--dialect", other).code == 0
    assert cache_scales(tmp_path / "other") == {
        f"{ATTENTION}.{name}": ("F32", SHAPE[other], ONE) for name in NAMES[other]
    }
    assert "kv_cache" not in run("inspect", source_without(source, tmp_path), "--json").json


def source_without(source: Path, folder: Path) -> Path:
    assert run("quantize", source, "--format", "nvfp4", "-o", folder / "plain").code == 0
    return folder / "plain"


@every_dialect
def test_a_dry_run_counts_them(dialect, source, tmp_path):
    options = ("--format", "nvfp4", "--dialect", dialect, "--kv-cache", "fp8")
    plan = run("quantize", source, *options, "--dry-run", "--json", "-o", tmp_path / "none").json
    out = quantized(source, tmp_path / "out", "--dialect", dialect)
    files = (path for path in out.iterdir() if path.is_file() and path.name != REPORT)
    assert plan["output_bytes"] == sum(path.stat().st_size for path in files)
    rows = [row for row in plan["tensors"] if row["action"] == "write"]
    assert [(row["name"], row["source_bytes"], row["output_bytes"]) for row in rows] == [
        (f"{ATTENTION}.{name}", 0, 4) for name in NAMES[dialect]
    ]
    text = run("quantize", source, *options, "--dry-run", "-o", tmp_path / "none").out
    assert "added    2 tensors" in text
    assert not (tmp_path / "none").exists()


@every_dialect
def test_parts_and_one_process_make_the_same_files(dialect, source, tmp_path):
    whole = quantized(source, tmp_path / "whole", "--dialect", dialect)
    for index in (1, 0):
        words = ("--dialect", dialect, "--shard-index", index, "--num-shards", 2)
        quantized(source, tmp_path / "parts", *words)
    assert run("merge", tmp_path / "parts").code == 0
    files = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    assert files == {
        path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir() if path.is_file()
    }


@pytest.mark.parametrize(
    ("format", "dialect", "code"),
    [
        ("nvfp4", "quark", "dialect-cache"),
        ("nvfp4", "mlx", "dialect-cache"),
        ("nvfp4", "comfy", "dialect-cache"),
        ("nvfp4", "plain", "dialect-cache"),
        ("mxfp4", "gpt-oss", "dialect-cache"),
        ("mxfp4", "deepseek", "dialect-cache"),
        ("mxfp4", "gguf", "dialect-cache"),
    ],
)
def test_dialects_without_such_a_record_refuse(format, dialect, code, source, tmp_path):
    options = (
        "--format",
        format,
        "--dialect",
        dialect,
        "--kv-cache",
        "fp8",
        "-o",
        tmp_path / "out",
        "--json",
    )
    done = run("quantize", source, *options)
    assert (done.code, done.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "out").exists()


def refused(source: Path, tmp_path: Path, cache: str = "fp8") -> dict:
    words = ("--format", "nvfp4", "--kv-cache", cache, "-o", tmp_path / "out", "--json")
    done = run("quantize", source, *words)
    assert done.code == 2, done
    assert not (tmp_path / "out").exists()
    return done.json["error"]


def test_an_unknown_cache_is_refused(source, tmp_path):
    for word in ("int8", "mxfp4", "FP4", ""):
        assert refused(source, tmp_path, word)["code"] == "unknown-cache"


def test_models_without_a_cache_of_two_scales_are_refused(tmp_path):
    latent = {
        f"{ATTENTION}.{leaf}.weight": weight(1, 32, 64)
        for leaf in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    }
    error = refused(write_single(tmp_path / "mla", latent), tmp_path)
    assert (error["code"], error["tensor"]) == ("cache-latent", ATTENTION)
    assert "--kv-cache-dtype fp8" in error["next"]
    keys = {
        f"encoder.layer.0.attention.self.{leaf}.weight": weight(1, 32, 64)
        for leaf in ("query", "key", "value")
    }
    assert refused(write_single(tmp_path / "bert", keys), tmp_path)["code"] == "cache-none"
    encoder = {
        f"model.encoder.layers.0.self_attn.{leaf}_proj.weight": weight(1, 32, 64) for leaf in "qkv"
    }
    assert refused(write_single(tmp_path / "encoder", encoder), tmp_path)["code"] == "cache-none"


def test_only_attentions_of_the_language_model_have_them(tmp_path):
    """Fused projections count; towers, encoders and cross attention do not."""
    stems = [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.attention.wk",
        "model.layers.1.attention.wv",
    ]
    stems += [
        f"model.{tower}.layers.0.self_attn.{leaf}_proj"
        for tower in ("vision_tower", "encoder")
        for leaf in "kv"
    ]
    stems += [f"model.layers.1.cross_attn.{leaf}_proj" for leaf in "kv"]
    source = write_single(tmp_path / "source", {f"{stem}.weight": weight(3) for stem in stems})
    out = quantized(source, tmp_path / "out")
    attentions = ("model.layers.0.self_attn", "model.layers.1.attention")
    assert cache_scales(out).keys() == {
        f"{attention}.{name}" for attention in attentions for name in NAMES[CT]
    }


def with_own(folder: Path, scales: dict[str, Tensor]) -> Path:
    """A source in FP8 with scales of a cache."""
    tensors = {}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{ATTENTION}.{leaf}.weight"] = ("F8_E4M3", (32, 64), bytes(range(64)) * 32)
        tensors[f"{ATTENTION}.{leaf}.weight_scale"] = ("F32", (), struct.pack("<f", 0.5))
    record = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    return write_checkpoint(
        folder, {"model.safetensors": tensors | scales}, {**LLAMA, "quantization_config": record}
    )


@every_dialect
@pytest.mark.parametrize("theirs", [CT, MO])
def test_scales_of_the_source_stay(theirs, dialect, tmp_path):
    """In the spelling of the result, and as float32: 1.5 is 0x3fc0 in bfloat16."""
    k_name, v_name = (f"{ATTENTION}.{name}" for name in NAMES[theirs])
    own: dict[str, Tensor] = {
        k_name: ("BF16", (1,), b"\xc0\x3f"),
        v_name: ("F32", (), struct.pack("<f", 0.03125)),
    }
    source = with_own(tmp_path / "source", own)
    words = ("--format", "nvfp4", "--dialect", dialect, "--kv-cache", "fp8", "-o", tmp_path / "out")
    done = run("quantize", source, *words)
    assert (done.code, "scales of" in done.err) == (0, False), done
    assert floats(tmp_path / "out") == {
        f"{ATTENTION}.{name}": value
        for name, value in zip(NAMES[dialect], (1.5, 0.03125), strict=True)
    }
    verified = run("verify", tmp_path / "out", "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    left = run(
        "quantize", source, "--format", "nvfp4", "--dialect", dialect, "-o", tmp_path / "left"
    )
    assert "2 KV cache scales of the source are left out" in left.err
    assert run("verify", tmp_path / "left", "--source", source).code == 0


def calibrated(source: Path, path: Path, caches: dict[str, tuple[float, float]]) -> Path:
    found = {
        f"{name}.{key}_amax": np.float32(value)
        for name, pair in caches.items()
        for key, value in zip("kv", pair, strict=True)
    }
    return write_calibration(path, open_source(str(source)), found)


@every_dialect
def test_a_calibration_gives_the_largest_key_and_value(dialect, source, tmp_path):
    """amax / 448, one division of float32 by NumPy; its sha256 is in our record, and no warning is
    left.
    """
    file = calibrated(source, tmp_path / "c.safetensors", {ATTENTION: (13.7, 0.11)})
    options = (
        "--format",
        "nvfp4",
        "--dialect",
        dialect,
        "--kv-cache",
        "fp8",
        "--calibration",
        file,
    )
    done = run("quantize", source, *options, "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    expected = [np.float32(value) / np.float32(448) for value in (13.7, 0.11)]
    assert floats(tmp_path / "out") == {
        f"{ATTENTION}.{name}": value for name, value in zip(NAMES[dialect], expected, strict=True)
    }
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (
        json.loads((tmp_path / "out" / "quantization_config.json").read_text())["calibration"]
        == digest
    )


def test_large_keys_are_told(source, tmp_path):
    file = calibrated(source, tmp_path / "c.safetensors", {ATTENTION: (2.0, 300.0)})
    options = ("--format", "nvfp4", "--kv-cache", "fp8", "--calibration", file)
    done = run("quantize", source, *options, "-o", tmp_path / "out")
    assert (
        "scales of an FP8 cache are above 0.5 for 1 attentions, up to 0.67 in "
        "model.layers.0.self_attn" in done.err
    )


def test_a_calibration_that_says_nothing_of_a_cache_is_refused(source, tmp_path):
    """One attention of several may be missing, as a layer that transformers does not run: it gets
    1, and a warning.
    """
    for number, (caches, code) in enumerate(
        [({"another": (1.0, 1.0)}, "calibration-missing"), ({ATTENTION: (1.0, 0.0)}, "cache-zero")]
    ):
        file = calibrated(source, tmp_path / f"{number}.safetensors", caches)
        options = ("--kv-cache", "fp8", "--calibration", file, "-o", tmp_path / "out", "--json")
        done = run("quantize", source, "--format", "nvfp4", *options)
        assert (done.code, done.json["error"]["code"], done.json["error"]["tensor"]) == (
            2,
            code,
            ATTENTION,
        )
        assert not (tmp_path / "out").exists()
    stems = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    two = write_single(
        tmp_path / "two",
        {f"{stem}.{leaf}_proj.weight": weight(3) for stem in stems for leaf in "qkv"},
    )
    file = calibrated(two, tmp_path / "c.safetensors", {stems[0]: (44.8, 4.48)})
    words = ("--format", "nvfp4", "--kv-cache", "fp8", "--calibration", file)
    done = run("quantize", two, *words, "-o", tmp_path / "out")
    assert "are 1 for 1 of 2 attentions, the first model.layers.1.self_attn" in done.err
    assert "no calibration gives them" in done.err
    assert sorted(floats(tmp_path / "out").values()) == [
        np.float32(4.48) / np.float32(448),
        np.float32(44.8) / np.float32(448),
        1,
        1,
    ]


def test_a_calibration_goes_before_the_sources_own(tmp_path):
    own: dict[str, Tensor] = {
        f"{ATTENTION}.{name}": ("F32", (), struct.pack("<f", 0.25)) for name in NAMES[MO]
    }
    source = with_own(tmp_path / "source", own)
    file = calibrated(source, tmp_path / "c.safetensors", {ATTENTION: (44.8, 4.48)})
    out = quantized(source, tmp_path / "out", "--calibration", file)
    assert 0.25 not in floats(out).values()


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Another tensor in whichever shard has it, or none; and no record of ours that could tell."""
    (folder / "quantization_config.json").unlink()
    shutil.rmtree(folder / ".fp4convert")
    index = folder / "model.safetensors.index.json"
    for path in folder.glob("*.safetensors"):
        tensors = read_shard(path)
        if name in tensors:
            tensors.pop(name)
            path.write_bytes(pack_shard({**tensors, **({name: tensor} if tensor else {})}))
    if not tensor:
        listed = json.loads(index.read_text())
        del listed["weight_map"][name]
        index.write_text(json.dumps(listed))


@every_dialect
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_found(value, dialect, source, tmp_path):
    out, name = (
        quantized(source, tmp_path / "out", "--dialect", dialect),
        f"{ATTENTION}.{NAMES[dialect][1]}",
    )
    rewrite(out, name, ("F32", SHAPE[dialect], struct.pack("<f", value)))
    for command in ("inspect", "verify"):
        done = run(command, out, "--json")
        errors = [
            (found["code"], found["tensor"])
            for found in done.json["findings"]
            if found["level"] == "error"
        ]
        assert (done.code, errors) == (6, [("cache-scale", name)])


@every_dialect
def test_missing_scales_are_told(dialect, source, tmp_path):
    out = quantized(source, tmp_path / "out", "--dialect", dialect)
    rewrite(out, f"{ATTENTION}.{NAMES[dialect][1]}", None)
    found = run("inspect", out, "--json").json["findings"]
    assert [(one["level"], one["code"], one["tensor"]) for one in found] == [
        ("warning", "cache-scale-missing", ATTENTION)
    ]


def test_all_values_of_scales_are_finite_floats(source, tmp_path):
    """NumPy reads what is written."""
    data = cache_scales(quantized(source, tmp_path / "out"))
    assert all(np.frombuffer(part, "<f4").tolist() == [1.0] for _, _, part in data.values())
