"""--kv-cache nvfp4: what each dialect's scales are, where they come from, and what is refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from calibrations import write_calibration
from checkpoints import (
    LAYER,
    LLAMA,
    Outcome,
    Tensor,
    read_folder,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

from fp4convert.storage.open import open_source

CT, MO = "compressed-tensors", "modelopt"
ATTENTION = f"{LAYER}.self_attn"
NAMES = {CT: ("k_global_scale", "v_global_scale"), MO: ("k_proj.k_scale", "v_proj.v_scale")}
SHAPES, DIVISORS = {CT: (1,), MO: ()}, {CT: 2688, MO: 448}
# What a config.json that compressed-tensors 0.20 wrote holds, and one of ModelOpt 0.47.
SCHEMES = {
    CT: {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": 16,
        "strategy": "tensor_group",
        "dynamic": "local",
        "scale_dtype": "torch.float8_e4m3fn",
        "observer": "static_minmax",
    },
    MO: "NVFP4",
}
ENDINGS = (".k_scale", ".v_scale", ".k_global_scale", ".v_global_scale")
AMAXES = (13.7, 0.13)
every_dialect = pytest.mark.parametrize("dialect", [CT, MO])
ASKED = ("--format", "nvfp4", "--kv-cache", "nvfp4")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source")


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    return calibrated(source, tmp_path / "c.safetensors", {ATTENTION: AMAXES})


def calibrated(source: Path, path: Path, caches: dict[str, tuple[float, float]]) -> Path:
    found = {
        f"{name}.{key}_amax": np.float32(value)
        for name, pair in caches.items()
        for key, value in zip("kv", pair, strict=True)
    }
    return write_calibration(path, open_source(str(source)), found)


def quantized(source: Path, out: Path, dialect: str, *options: object) -> Path:
    done = run("quantize", source, *ASKED, "--dialect", dialect, "-o", out, *options)
    assert done.code == 0, done
    return out


def scales(folder: Path) -> dict[str, Tensor]:
    found = read_folder(folder).items()
    return {name: tensor for name, tensor in found if name.endswith(ENDINGS)}


def of_dialect(dialect: str, values: tuple[np.float32, ...], attention: str = ATTENTION) -> dict:
    return {
        f"{attention}.{name}": ("F32", SHAPES[dialect], value.tobytes())
        for name, value in zip(NAMES[dialect], values, strict=True)
    }


def expected(dialect: str) -> tuple[np.float32, ...]:
    """One division of float32, by NumPy."""
    return tuple(np.float32(amax) / np.float32(DIVISORS[dialect]) for amax in AMAXES)


@every_dialect
def test_a_calibration_gives_each_dialects_own(dialect, source, file, tmp_path):
    """All else is as it is without a cache: tensors, and records but for their keys of it."""
    out = quantized(source, tmp_path / "out", dialect, "--calibration", file)
    assert scales(out) == of_dialect(dialect, expected(dialect))
    options = ("--format", "nvfp4", "--dialect", dialect, "--calibration", file)
    assert run("quantize", source, *options, "-o", tmp_path / "plain").code == 0
    plain, made = read_folder(tmp_path / "plain"), read_folder(out)
    assert {name: tensor for name, tensor in made.items() if name in plain} == plain
    record, without = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (out, tmp_path / "plain")
    )
    assert record.pop("kv_cache_scheme") == SCHEMES[dialect]
    assert record == without
    if dialect == MO:
        nested = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert nested["kv_cache_quant_algo"] == "NVFP4"
    assert json.loads((out / "quantization_config.json").read_text())["kv_cache"] == "nvfp4"


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        (CT, "amax / 2688, as AutoRound writes them; compressed-tensors' own Python code takes"),
        (MO, "amax / 448, as ModelOpt writes them for Hugging Face"),
    ],
)
def test_the_plan_says_what_scales_are(dialect, words, source, file, tmp_path):
    options = ("--dialect", dialect, "--calibration", file, "-o", tmp_path / "none", "--dry-run")
    plan = run("quantize", source, *ASKED, *options, "--json").json
    assert any(f"scales of an NVFP4 cache are {words}" in line for line in plan["warnings"])
    rows = [row for row in plan["tensors"] if row["action"] == "write"]
    assert [(row["name"], row["reason"]) for row in rows] == [
        (f"{ATTENTION}.{name}", f"scale of an NVFP4 cache: amax / {DIVISORS[dialect]}")
        for name in NAMES[dialect]
    ]


def refused(source: Path, tmp_path: Path, *options: object) -> dict:
    done = run("quantize", source, *ASKED, "-o", tmp_path / "out", "--json", *options)
    assert done.code == 2, done
    assert not (tmp_path / "out").exists()
    return done.json["error"]


@every_dialect
def test_no_scale_is_made_up(dialect, source, tmp_path):
    """Neither without a calibration, nor of an attention that it does not know."""
    error = refused(source, tmp_path, "--dialect", dialect)
    assert (error["code"], error["tensor"]) == ("cache-uncalibrated", ATTENTION)
    assert "fp4convert calibrate source -o FILE, and add --calibration FILE" in error["next"]
    stems = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    tensors = {f"{stem}.{leaf}_proj.weight": weight(3) for stem in stems for leaf in "qkv"}
    two = write_single(tmp_path / "two", tensors)
    file = calibrated(two, tmp_path / "c.safetensors", {stems[0]: AMAXES})
    error = refused(two, tmp_path, "--dialect", dialect, "--calibration", file)
    assert (error["code"], error["tensor"]) == ("cache-uncalibrated", stems[1])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"head_dim": 24}, "head_dim 24"),
        ({"hidden_size": 96, "num_attention_heads": 4}, "hidden_size / num_attention_heads 24"),
        ({"head_dim": 64, "global_head_dim": 72}, "global_head_dim 72"),
        ({"text_config": {"num_attention_heads": 2, "head_dim": 40}}, "head_dim 40"),
    ],
)
def test_heads_are_whole_blocks(config, named, source, tmp_path):
    known = json.loads((source / "config.json").read_text())
    bare = {key: value for key, value in known.items() if "head" not in key}
    heads = {} if "text_config" in config else {"num_attention_heads": 2}
    (source / "config.json").write_text(json.dumps({**bare, **heads, **config}))
    error = refused(source, tmp_path)
    assert (error["code"], error["next"]) == ("cache-heads", "Use --kv-cache fp8.")
    assert f"config.json has {named}; expected a multiple of 16" in error["message"]


def test_heads_of_a_tower_are_not_asked(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config["vision_config"] = {"num_attention_heads": 2, "head_dim": 72}
    (source / "config.json").write_text(json.dumps(config))
    assert refused(source, tmp_path)["code"] == "cache-uncalibrated"


@pytest.mark.parametrize("dialect", ["quark", "mlx", "comfy", "plain"])
def test_other_dialects_refuse(dialect, source, file, tmp_path):
    error = refused(source, tmp_path, "--dialect", dialect, "--calibration", file)
    assert error["code"] == "dialect-cache"
    assert "an nvfp4 KV cache was asked for" in error["message"]


def with_own(folder: Path, cache: str) -> Path:
    """A source in FP8 of ModelOpt with scales of a cache of that kind."""
    tensors: dict[str, Tensor] = {}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{ATTENTION}.{leaf}.weight"] = ("F8_E4M3", (32, 64), bytes(range(64)) * 32)
        tensors[f"{ATTENTION}.{leaf}.weight_scale"] = ("F32", (), struct.pack("<f", 0.5))
    record = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": cache}
    own = of_dialect(MO, expected(MO))
    return write_checkpoint(
        folder, {"model.safetensors": tensors | own}, {**LLAMA, "quantization_config": record}
    )


@every_dialect
def test_the_sources_own_of_the_same_kind_stay(dialect, tmp_path):
    """A sixth of them in compressed-tensors, by NumPy."""
    source = with_own(tmp_path / "source", "NVFP4")
    out = quantized(source, tmp_path / "out", dialect)
    factor = np.float32(DIVISORS[dialect] / DIVISORS[MO])
    assert scales(out) == of_dialect(dialect, tuple(value / factor for value in expected(MO)))
    verified = run("verify", out, "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])


def test_those_of_another_kind_do_not(tmp_path):
    error = refused(with_own(tmp_path / "fp8", "FP8"), tmp_path)
    assert error["code"] == "cache-uncalibrated"
    source, out = with_own(tmp_path / "nvfp4", "NVFP4"), tmp_path / "out"
    done = run("quantize", source, "--format", "nvfp4", "--kv-cache", "fp8", "-o", out)
    assert done.code == 0
    assert "are 1 for 1 of 1 attentions" in done.err
    assert "2 KV cache scales of the source are left out" in done.err


@every_dialect
def test_every_command_knows_them(dialect, source, file, tmp_path):
    out = quantized(source, tmp_path / "out", dialect, "--calibration", file)
    found = run("inspect", out, "--json").json
    assert (found["findings"], found["healthy"]) == ([], True)
    largest, smallest = map(float, expected(dialect))
    values = {"smallest": smallest, "largest": largest}
    assert found["kv_cache"] == {"dtype": "nvfp4", "scales": 2, **values}
    assert "keys and values in nvfp4, 2 scales from" in run("inspect", out).out
    verified = run("verify", out, "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])
    assert run("dequantize", out, "-o", tmp_path / "restored").code == 0
    assert read_folder(tmp_path / "restored").keys() == read_folder(source).keys()


def carried(artifact: Path, out: Path, dialect: str) -> Outcome:
    done = run("transcode", artifact, "-o", out, "--dialect", dialect)
    assert done.code == 0, done
    return done


def test_transcode_multiplies_by_six_and_tells_what_it_rounds(source, file, tmp_path):
    """From modelopt and back they are the same, by Kahan's theorem: 6 is 4 + 2."""
    first = quantized(source, tmp_path / "mo", MO, "--calibration", file)
    told = carried(first, tmp_path / "ct", CT).err
    sixth = tuple(value / np.float32(6) for value in expected(MO))
    assert scales(tmp_path / "ct") == of_dialect(CT, sixth)
    rounded = sum(
        float(part) * 6 != float(whole) for part, whole in zip(sixth, expected(MO), strict=True)
    )
    assert rounded
    assert f"become amax / 2688 from amax / 448; {rounded} of them are rounded to float32" in told
    assert "compressed-tensors' own Python code takes them for their reciprocals" in told
    carried(tmp_path / "ct", tmp_path / "back", MO)
    assert scales(tmp_path / "back") == scales(first)
    record = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert record["kv_cache_scheme"] == SCHEMES[CT]
    verified = run("verify", tmp_path / "ct", "--source", source, "--json")
    assert (verified.code, verified.json["findings"]) == (0, [])


def test_transcode_within_a_dialect_copies_them(source, file, tmp_path):
    first = quantized(source, tmp_path / "ct", CT, "--calibration", file)
    told = carried(first, tmp_path / "again", CT).err
    assert scales(tmp_path / "again") == scales(first)
    assert "amax" not in told


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 1e38])
def test_transcode_refuses_what_it_cannot_multiply(value, source, file, tmp_path):
    first = quantized(source, tmp_path / "ct", CT, "--calibration", file)
    for path in first.glob("*.safetensors"):
        stored = expected(CT)[0].tobytes()
        path.write_bytes(path.read_bytes().replace(stored, struct.pack("<f", value)))
    done = run("transcode", first, "-o", tmp_path / "mo", "--dialect", MO, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "unsound-artifact")


def test_records_that_ask_for_different_caches(source, file, tmp_path):
    out = quantized(source, tmp_path / "out", MO, "--calibration", file)
    path = out / "hf_quant_config.json"
    nested = json.loads(path.read_text())
    nested["quantization"]["kv_cache_quant_algo"] = "FP8"
    path.write_text(json.dumps(nested))
    found = run("inspect", out, "--json").json["findings"]
    assert ("records-disagree", "FP8 or NVFP4 cache") in [
        (one["code"], one["detail"][-18:]) for one in found
    ]


def test_engines_are_chosen_by_what_they_read(source, file, tmp_path):
    """vLLM 0.33 and SGLang 0.5.23 read such caches in modelopt alone."""
    options = ("--kv-cache", "nvfp4", "--calibration", file)
    for engine, line, more in (
        ("vllm", "vllm serve", ()),
        ("sglang", "sglang.launch_server --model-path", ("--activations", 4, "--input-scale", 1)),
    ):
        out = tmp_path / engine
        made = run("quantize", source, "--for", engine, *options, *more, "-o", out, "--json")
        assert made.json["next"][1].endswith(f"{line} {out} --kv-cache-dtype nvfp4"), made
        assert scales(out).keys() == of_dialect(MO, expected(MO)).keys()
    warned = run("quantize", source, "--format", "nvfp4", *options, "-o", tmp_path / "ct").err
    for engine in ("vLLM", "SGLang", "transformers"):
        assert any(engine in line and "NVFP4 cache" in line for line in warned.splitlines())
    judged = run("inspect", tmp_path / "ct", "--for", "vllm", "--json")
    assert [one["code"] for one in judged.json["findings"]] == ["engine-refuses"]
