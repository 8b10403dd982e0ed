"""A whole conversion: the same bytes from everywhere, whatever travels beside the weights, and the
way back.
"""

import hashlib
import json
import math
import os
import shutil

import numpy as np
import pytest
from artifacts import artifact_values, quantize
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    LLAMA,
    SECOND,
    done,
    llama_shards,
    pack_shard,
    read_folder,
    read_shard,
    run,
    run_alone,
    values_of,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)

REPORT = "quantization_report.json"
TARGETS = [("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")]
ATTENTION = f"{LAYER}.self_attn"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_the_same_bytes_from_any_place_any_number_of_workers_and_any_process(
    format, dialect, tmp_path
):
    source = write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})
    copy = tmp_path / "some" / "where" / "else"
    shutil.copytree(source, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    options = ("--format", format, "--dialect", dialect)
    digests = {
        quantize(source, tmp_path / "1", *options, "--workers", 1)["digest"],
        quantize(source, tmp_path / "2", *options, "--workers", 2)["digest"],
        quantize(copy, tmp_path / "3", *options)["digest"],
        quantize(f"{source}/", tmp_path / "4" / "deep", *options)["digest"],
        run_alone("quantize", source, *options, "-o", tmp_path / "5", "--json").json["digest"],
    }
    assert len(digests) == 1


def test_the_digest_is_sha256sum_of_sha256sum(tmp_path):
    out = tmp_path / "out"
    document = quantize(write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"}), out)
    paths = [path for path in out.rglob("*") if path.is_file() and ".fp4convert" not in path.parts]
    files = sorted(str(path.relative_to(out)) for path in paths if path.name != REPORT)
    lines = "".join(
        f"{hashlib.sha256((out / file).read_bytes()).hexdigest()}  {file}\n" for file in files
    )
    assert document["digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert document["output_bytes"] == sum((out / file).stat().st_size for file in files)


def test_the_record_names_every_other_file_with_its_hash(tmp_path):
    out = tmp_path / "out"
    quantize(write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"}), out)
    record = json.loads((out / "quantization_config.json").read_text())
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.iterdir()
        if path.is_file()
    }
    del files["quantization_config.json"], files[REPORT]
    assert record.pop("files") == files
    assert record.pop("producer")["name"] == "fp4convert"
    assert {"model.embed_tokens", "lm_head", "*embed*"} <= set(record.pop("ignore"))
    assert record == {
        "format": "nvfp4",
        "block_size": 16,
        "element_dtype": "fp4_e2m1",
        "scale_dtype": "fp8_e4m3",
        "scale_layout": "linear",
        "scale_padding": None,
        "nibble_order": "low_first",
        "block_axis": -1,
        "global_scale": {"dtype": "fp32", "stored_as": "divisor"},
        "activations": 16,
        "dialect": "compressed-tensors",
        "scale_rule": "mse",
        "method": "rtn",
        "calibration": None,
        "options": {
            "format": "nvfp4",
            "dialect": "compressed-tensors",
            "activations": 16,
            "method": "rtn",
        },
        "source": {"repo": None, "revision": None},
    }


def test_the_document_has_exactly_the_promised_keys(tmp_path):
    document = quantize(write_llama(tmp_path / "source"), tmp_path / "out")
    assert document.pop("seconds") >= 0
    assert len(document.pop("digest")) == 64
    assert document.pop("fidelity").keys() == {"sqnr_db_min", "sqnr_db_mean", "nmse", "worst"}
    assert document.pop("output_bytes") > 0
    assert 4.5 < document.pop("bits_per_weight") < 4.51  # a global scale of small matrices counts
    source_bytes = sum((tmp_path / "source" / file).stat().st_size for file in (FIRST, SECOND))
    assert document == {
        "output": str(tmp_path / "out"),
        "format": "nvfp4",
        "dialect": "compressed-tensors",
        "scale_rule": "mse",
        "method": "rtn",
        "device": "cpu",
        "source_bytes": source_bytes,
        "adopted_bytes": 0,
        "tensors": {"quantized": 7, "copied": 4, "skipped": 0},
        "warnings": [],
        "unexplained": [],
        "next": [
            f"fp4convert verify {tmp_path / 'out'} --source {tmp_path / 'source'}",
            f"vllm serve {tmp_path / 'out'}",
        ],
    }


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_the_members_of_a_group_have_the_global_scale_of_their_common_amax(dialect, tmp_path):
    quantize(write_llama(tmp_path / "source"), tmp_path / "out", "--dialect", dialect)
    before, after = read_folder(tmp_path / "source"), read_folder(tmp_path / "out")
    name = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    groups = [
        [f"{ATTENTION}.{leaf}_proj" for leaf in "qkv"],
        [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"],
    ]
    for members in [*groups, [f"{ATTENTION}.o_proj"], [f"{LAYER}.mlp.down_proj"]]:
        amax = np.float32(
            max(np.abs(values_of(before[f"{member}.weight"])).max() for member in members)
        )
        multiplier = amax / np.float32(2688)
        expected = multiplier if dialect == "modelopt" else np.float32(1) / multiplier
        for member in members:
            assert after[f"{member}.{name}"][2] == np.float32(expected).tobytes()
            error = values_of(before[f"{member}.weight"]) - artifact_values(after, member, dialect)
            assert (
                np.sqrt((error**2).mean() / (values_of(before[f"{member}.weight"]) ** 2).mean())
                < 0.15
            )


def test_codes_and_block_scales_do_not_depend_on_the_dialect(tmp_path):
    source = write_llama(tmp_path / "source")
    for dialect in ("compressed-tensors", "modelopt"):
        quantize(source, tmp_path / dialect, "--dialect", dialect)
    ours, theirs = read_folder(tmp_path / "compressed-tensors"), read_folder(tmp_path / "modelopt")
    for module in (f"{ATTENTION}.q_proj", f"{LAYER}.mlp.down_proj"):
        assert ours[f"{module}.weight_packed"] == theirs[f"{module}.weight"]
        assert ours[f"{module}.weight_scale"] == theirs[f"{module}.weight_scale"]


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_what_stays_is_copied_byte_for_byte_and_shards_are_aligned(format, dialect, tmp_path):
    quantize(
        write_llama(tmp_path / "source"), tmp_path / "out", "--format", format, "--dialect", dialect
    )
    after = read_folder(tmp_path / "out")
    for tensors in llama_shards().values():
        for name in set(tensors) & {
            "model.embed_tokens.weight",
            "lm_head.weight",
            f"{ATTENTION}.q_proj.bias",
        }:
            assert after[name] == tensors[name]
    for file in (FIRST, SECOND):
        data = (tmp_path / "out" / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        nbytes = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
        assert all(
            (8 + length + entry["data_offsets"][0]) % nbytes[entry["dtype"]] == 0
            for entry in header.values()
        )


def test_sidecars_travel_byte_for_byte_and_nothing_else_does(tmp_path):
    files = {
        "tokenizer.json": b"\xef\xbb\xbf{}\r\n",
        "chat_template.jinja": b"{{ x }}",
        "modeling_x.py": b"import os\n",
        "e": b"",
    }
    source = write_llama(
        tmp_path / "source", **files, **{"pytorch_model.bin": b"x", ".hidden": b"x"}
    )
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "voice.wav").write_bytes(bytes(range(256)))
    outcome = done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    assert (
        "warning: 1 file holds weights in another form and is left out: 'pytorch_model.bin'"
        in outcome.err
    )
    found = {
        str(p.relative_to(tmp_path / "out")): p
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    found = {
        file: path.read_bytes()
        for file, path in found.items()
        if not file.startswith(".fp4convert")
    }
    for file in (FIRST, SECOND, INDEX, "config.json", "quantization_config.json", REPORT):
        del found[file]
    assert found == {**files, "a/b/voice.wav": bytes(range(256))}


@pytest.mark.parametrize("name", ["naïve \u202e.txt".encode(), b"new\nline.txt"])
def test_a_sidecar_may_have_any_name(name, tmp_path):
    source = write_llama(tmp_path / "source")
    file = os.fsdecode(name)
    (source / file).write_bytes(b"x")
    document = quantize(source, tmp_path / "out")
    assert (tmp_path / "out" / file).read_bytes() == b"x"
    assert quantize(source, tmp_path / "out")["digest"] == document["digest"]
    done("verify", tmp_path / "out")


def test_a_sidecar_whose_name_no_record_can_hold_is_refused(tmp_path):
    source = write_llama(tmp_path / "source")
    (source / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"x")
    outcome = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "file-name")
    assert not (tmp_path / "out").exists()


def test_config_keeps_every_other_key(tmp_path):
    source = write_llama(tmp_path / "source")
    text = (
        '{"model_type": "llama", "nan": NaN, "inf": Infinity, "neg": -Infinity, '
        '"pad_token_id": -1, "eps": 1e-05,'
    )
    text += (
        ' "big": 12345678901234567890123, "é": ["ü", null, true, {"z": 1, "a": 2}], '
        '"\\u0007": "", "one": 1.0}'
    )
    (source / "config.json").write_text(text)
    quantize(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    expected = json.loads(text)
    assert math.isnan(config.pop("nan"))
    assert math.isnan(expected.pop("nan"))
    assert config == expected
    assert list(config["é"][3]) == ["z", "a"]
    assert type(config["one"]) is float


def test_a_source_without_config_has_the_record_alone(tmp_path):
    source = write_llama(tmp_path / "source")
    (source / "config.json").unlink()
    quantize(source, tmp_path / "out")
    assert list(json.loads((tmp_path / "out" / "config.json").read_text())) == [
        "quantization_config"
    ]


def test_one_file_becomes_one_file_of_its_name(tmp_path):
    (tmp_path / "some.safetensors").write_bytes(
        pack_shard({f"{LAYER}.mlp.down_proj.weight": weight()})
    )
    document = quantize(tmp_path / "some.safetensors", tmp_path / "out")
    assert document["tensors"] == {"quantized": 1, "copied": 0, "skipped": 0}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".fp4convert",
        "some.safetensors",
        "config.json",
        "quantization_config.json",
        REPORT,
    }
    assert set(read_shard(tmp_path / "out" / "some.safetensors")) == {
        f"{LAYER}.mlp.down_proj.{leaf}"
        for leaf in ("weight_packed", "weight_scale", "weight_global_scale")
    }


def test_a_snapshot_of_the_hubs_cache_gives_the_bytes_of_a_folder(tmp_path):
    folder = write_llama(tmp_path / "folder", **{"tokenizer.json": b"{}"})
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / ("0" * 40),
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    assert (
        quantize(snapshot, tmp_path / "1")["digest"] == quantize(folder, tmp_path / "2")["digest"]
    )
    assert not any(path.is_symlink() for path in (tmp_path / "1").rglob("*"))


def test_the_output_is_named_after_the_source_and_the_format(tmp_path, monkeypatch):
    source = write_single(tmp_path / "My-Model", {f"{LAYER}.mlp.down_proj.weight": weight()})
    monkeypatch.chdir(tmp_path)
    assert run("quantize", source, "--format", "nvfp4", "--json").json["output"] == "My-Model-NVFP4"
    done("quantize", source / "model.safetensors", "--format", "mxfp4")
    assert (tmp_path / "My-Model-NVFP4").is_dir()
    assert (tmp_path / "model-MXFP4").is_dir()


def test_a_matrix_larger_than_a_panel_is_whole(tmp_path):
    """4 Mi elements are a panel: three panels with a short last one equal the same rows converted
    as a small matrix.
    """
    top, tail = weight(1, 8, 4096), weight(2, 3, 4096)
    rows = (top[2] * 260 + tail[2],)
    tall = ("BF16", (8 * 260 + 3, 4096), rows[0])
    small = ("BF16", (11, 4096), top[2] + tail[2])
    for name, tensor in (("tall", tall), ("small", small)):
        quantize(
            write_single(tmp_path / name, {"x.o_proj.weight": tensor}), tmp_path / f"{name}-out"
        )
    big, little = read_folder(tmp_path / "tall-out"), read_folder(tmp_path / "small-out")
    for leaf, nbytes in (("weight_packed", 2048), ("weight_scale", 256)):
        data = little[f"x.o_proj.{leaf}"][2]
        assert big[f"x.o_proj.{leaf}"][2] == data[: 8 * nbytes] * 260 + data[8 * nbytes :]


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dequantize_gives_ordinary_weights_again(format, dialect, dtype, tmp_path):
    source = write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})
    quantize(source, tmp_path / "q", "--format", format, "--dialect", dialect)
    done("dequantize", tmp_path / "q", "-o", tmp_path / "out", "--dtype", dtype, "--json")
    before, after = read_folder(source), read_folder(tmp_path / "out")
    assert set(after) == set(before)
    torch_dtype = (
        "bfloat16" if dtype == "bf16" else "float32"
    )  # wide enough for the kept bf16 beside the new dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **LLAMA,
        "torch_dtype": torch_dtype,
    }
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    name = f"{LAYER}.mlp.down_proj"
    assert after[f"{name}.weight"][:2] == (
        {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[dtype],
        (64, 128),
    )
    if format == "nvfp4" and dtype == "fp32":
        expected = artifact_values(read_folder(tmp_path / "q"), name, dialect)
        assert np.allclose(values_of(after[f"{name}.weight"]), expected, rtol=2e-7, atol=0)
    assert after["lm_head.weight"] == before["lm_head.weight"]


def test_what_is_dequantized_is_a_source_again(tmp_path):
    shards = {"model.safetensors": llama_shards()[SECOND]}
    quantize(write_checkpoint(tmp_path / "source", shards), tmp_path / "q")
    done("dequantize", tmp_path / "q", "-o", tmp_path / "plain")
    assert quantize(tmp_path / "plain", tmp_path / "again")["tensors"]["quantized"] == 5


def test_whoever_names_an_engine_is_not_told_what_others_do_with_the_result(tmp_path):
    source, told = write_llama(tmp_path / "m"), []
    for more in ((), ("--for", "vllm")):
        asked = ("quantize", source, "--format", "mxfp4", *more, "--dry-run", "--json")
        told.append([line.split()[0] for line in run(*asked).json["warnings"] if "MXFP4" in line])
    assert told == [["SGLang"], []]
