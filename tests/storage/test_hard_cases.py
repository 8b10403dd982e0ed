"""Cases that broke an earlier version: each fails without its mend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    LAYER,
    LLAMA,
    bf16,
    pack_shard,
    read_folder,
    run,
    weight,
    write_llama,
    write_single,
)

from fp4convert.errors import SourceError
from fp4convert.numerics import codec
from fp4convert.numerics.formats import NVFP4
from fp4convert.storage.open import open_source

CONV1D = {
    f"decoder.h.0.attn.{leaf}.weight": weight(seed)
    for seed, leaf in enumerate(("c_attn", "c_proj"))
}


def quantize(source: Path, output: Path, *options: object) -> dict:
    outcome = run("quantize", source, "--format", "nvfp4", "-o", output, "--json", *options)
    assert outcome.code == 0, outcome.err
    return outcome.json


def findings(*arguments: object) -> set[tuple[str, str]]:
    return {
        (finding["level"], finding["code"])
        for finding in run(*arguments, "--json").json["findings"]
    }


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source")


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    quantize(source, tmp_path / "artifact")
    return tmp_path / "artifact"


GPT2 = {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"model_type": "vision-encoder-decoder", "decoder": GPT2}, ""),
        (GPT2, "model.safetensors"),
    ],
)
def test_a_nested_model_type_counts_and_the_config_beside_a_single_file(config, file, tmp_path):
    source = write_single(tmp_path / "m", CONV1D, config) / file
    told = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out").err
    assert "nothing becomes nvfp4: a Conv1D, whose weight is stored (in, out) (2)" in told


def test_equal_names_sizes_and_times_are_not_equal_weights(tmp_path):
    """Archives and content stores give every file the same time."""
    for seed, name in enumerate(("a", "b")):
        write_single(tmp_path / name, {f"{LAYER}.o_proj.weight": weight(seed)})
        os.utime(tmp_path / name / "model.safetensors", (1, 1))
    quantize(tmp_path / "a", tmp_path / "out")
    outcome = run("quantize", tmp_path / "b", "--format", "nvfp4", "-o", tmp_path / "out")
    assert outcome.code == 5
    assert "the source's files or their times changed" in outcome.err


def test_without_an_index_model_safetensors_is_the_model(tmp_path):
    source = write_single(tmp_path / "m", {f"{LAYER}.o_proj.weight": weight()})
    (source / "consolidated.safetensors").write_bytes(pack_shard({"layers.0.wo.weight": weight()}))
    outcome = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    assert "'consolidated.safetensors' is left out: Mistral's own copy" in outcome.err
    modules = {name.rpartition(".")[0] for name in read_folder(tmp_path / "out")}
    assert modules == {f"{LAYER}.o_proj"}


def test_expert_stacks_that_stay_are_warned_of(tmp_path):
    stack = {
        f"{LAYER}.mlp.experts.gate_up_proj": ("BF16", (2, 32, 64), bf16(2, 32, 64)),
        f"{LAYER}.o_proj.weight": weight(),
    }
    command = ("quantize", write_single(tmp_path / "m", stack), "--format", "nvfp4", "--dry-run")
    refused = run(*command)
    assert (refused.code, "no recipe says how they are stored" in refused.err) == (2, True)
    told = run(*command, "--exclude", "*experts*").err
    assert "1 stacks of expert matrices are not quantized" in told


def test_missing_members_of_a_group_are_told_as_they_are(tmp_path):
    options = ("--format", "nvfp4", "--dry-run")
    only_q = write_single(tmp_path / "a", {f"{LAYER}.self_attn.q_proj.weight": weight()})
    assert "k_proj and v_proj are not there" in run("quantize", only_q, *options).err
    for parent, leaves, kept in (
        ("self_attn", "qkv", "k_proj"),
        ("mlp", ("gate", "up"), "gate_proj"),
    ):
        names = [f"{LAYER}.{parent}.{leaf}_proj.weight" for leaf in leaves]
        tensors = {name: weight(seed) for seed, name in enumerate(names)}
        mixed = write_single(tmp_path / parent, tensors)
        told = run("quantize", mixed, *options, "--exclude", f"*.{kept}").err
        assert f"{kept} is kept, first in '{LAYER}.{parent}'" in told


def test_a_null_quantization_config_is_none(tmp_path):
    config = {**LLAMA, "quantization_config": None}
    source = write_single(tmp_path / "m", {f"{LAYER}.o_proj.weight": weight()}, config)
    assert quantize(source, tmp_path / "out")["tensors"]["quantized"] == 1


def test_another_dialects_record_does_not_travel(source, tmp_path):
    (source / "hf_quant_config.json").write_text("{}")
    quantize(source, tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_behind_the_first_panel_is_found(bad, tmp_path):
    """Tensors are read in ranges of rows; a maximum over ranges must not lose a NaN."""
    values = np.ones((1200, 4096), np.float32)
    values[1199, 7] = bad
    write_single(tmp_path / "m", {"a.o_proj.weight": ("F32", values.shape, values.tobytes())})
    outcome = run("quantize", tmp_path / "m", "--format", "nvfp4", "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "at [1199, 7]" in outcome.err


def test_the_bytes_do_not_depend_on_panels_or_alignment(tmp_path):
    """Several ranges of rows, aligned and not: the codes of the reference, whose amax is that of
    the whole.
    """
    values = np.random.default_rng(5).standard_normal((1300, 4096)).astype(np.float32)
    for name, extra in (("aligned", {}), ("odd", {"a": ("U8", (3,), b"abc")})):
        tensors = {**extra, "b.o_proj.weight": ("F32", values.shape, values.tobytes())}
        source = write_single(tmp_path / name, tensors)
        quantize(source, tmp_path / f"{name}-out", "--scale-rule", "amax")
        stored = read_folder(tmp_path / f"{name}-out")
        expected = codec.quantize(values, NVFP4, "amax")
        assert stored["b.o_proj.weight_packed"][2] == bytes(expected.packed)
        assert stored["b.o_proj.weight_scale"][2] == bytes(expected.block_scales)


@pytest.mark.parametrize("left", [0, 100])
def test_a_source_that_shrinks_is_told(source, left):
    opened = open_source(str(source))
    ref = next(opened.checkpoint.tensors)
    os.truncate(source / ref.file, left)
    with pytest.raises(SourceError) as told:
        opened.read(ref)
    assert (told.value.code, told.value.exit_code) == ("source-changed", 3)


def test_a_source_that_shrinks_while_it_is_mapped_is_told(source):
    """In a process of its own: what was read so is worth nothing in the whole of it."""
    code = f"""
import os, sys
from fp4convert.errors import Fp4Error
from fp4convert.storage.open import open_source
opened = open_source({str(source)!r})
ref = next(opened.checkpoint.tensors)
mapped = opened.read(ref)
before = bytes(mapped[:16])
os.truncate(os.path.join({str(source)!r}, ref.file), 0)
assert bytes(mapped[:16]) == bytes(16) != before
try:
    opened.check_unchanged(ref.file)
except Fp4Error as error:
    print(error.code, error.exit_code, error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("source-changed 3 a file of the source could not be read")


@pytest.mark.parametrize("command", [("quantize", "--format", "nvfp4"), ("analyze",)])
def test_a_source_that_shrinks_during_a_command_ends_it(source, tmp_path, command):
    """Never by SIGBUS; nothing is left that looks whole."""
    code = f"""
import os, sys
from fp4convert.storage.local import LocalSource
read = LocalSource.read
def shrink(self, ref):
    mapped = read(self, ref)
    if ref.nbytes > 4096:
        os.truncate(os.path.join({str(source)!r}, ref.file), 0)
    return mapped
LocalSource.read = shrink
from fp4convert.__main__ import main
main()
"""
    output = tmp_path / "out"
    words = [command[0], str(source), *command[1:], "--json"]
    words += ["-o", str(output)] if command[0] == "quantize" else []
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "source-changed"
    assert not list(output.glob("*.safetensors"))


def test_a_source_written_during_a_run_ends_it(source, tmp_path, monkeypatch):
    """Equal size, other bytes: no record may promise what was read half before and half after."""
    from fp4convert.execution.crew import Crew

    fill = Crew.fill

    def fill_then_write(crew, works, *rest):
        facts = fill(crew, works, *rest)
        shard = source / works[0].steps[0].refs[0].file
        data = shard.read_bytes()
        with shard.open("r+b") as file:  # others still read it
            file.seek(-1, os.SEEK_END)
            file.write(bytes([data[-1] ^ 1]))
        return facts

    monkeypatch.setattr(Crew, "fill", fill_then_write)
    outcome = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-changed")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_dead_runs_temporary_files_do_not_count_as_used_space(source, artifact, monkeypatch):
    leftover = artifact / ".fp4convert" / "tmp" / "model.safetensors"
    leftover.write_bytes(b"x")
    (artifact / "quantization_config.json").unlink()
    real = os.statvfs

    def statvfs(path):
        status = real(path)
        return status if not leftover.exists() else type(status)((*status[:3], 0, 0, *status[5:10]))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert quantize(source, artifact)["tensors"]["quantized"] > 0


def test_a_link_or_a_folder_among_the_temporary_files_is_removed_and_not_followed(source, artifact):
    (artifact / ".fp4convert" / "tmp" / "link").symlink_to(source)
    (artifact / ".fp4convert" / "tmp" / "odd").mkdir()
    quantize(source, artifact)
    assert (source / "config.json").exists()
    assert list((artifact / ".fp4convert" / "tmp").iterdir()) == []


def test_the_metadata_of_a_shard_stays(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    data = pack_shard({f"{LAYER}.o_proj.weight": weight()}, {"format": "pt", "author": "me"})
    (folder / "model.safetensors").write_bytes(data)
    quantize(folder, tmp_path / "out")
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    assert header["__metadata__"] == {"format": "pt", "author": "me"}


@pytest.mark.parametrize("damage", ["{", "[]", '{"file": 1}', "[" * 200_000])
def test_a_damaged_record_of_a_finished_shard_proves_nothing(damage, source, artifact):
    digest = quantize(source, artifact)["digest"]
    for record in (artifact / ".fp4convert" / "done").iterdir():
        record.write_text(damage)
    assert quantize(source, artifact)["digest"] == digest


def test_a_file_that_the_new_plan_forgets_is_removed(source, tmp_path):
    (source / "notes.txt").write_text("x")
    quantize(source, tmp_path / "out")
    (source / "notes.txt").unlink()
    (tmp_path / "out" / "quantization_config.json").unlink()
    quantize(source, tmp_path / "out")
    assert not (tmp_path / "out" / "notes.txt").exists()


@pytest.mark.parametrize(
    "lie",
    [
        {"scale_layout": "128x4"},
        {"nibble_order": "half_split"},
        {"block_size": 32},
        {"scale_dtype": "e8m0"},
        {"global_scale": {"dtype": "fp32", "stored_as": "multiplier"}},
        {"global_scale": None},
        {"activations": 4},
    ],
)
def test_a_record_that_lies_is_found(lie, artifact, tmp_path):
    edit_json(artifact / "quantization_config.json", **lie)
    assert ("error", "record-wrong") in findings("inspect", artifact)
    assert run("verify", artifact).code == 6
    assert run("dequantize", artifact, "-o", tmp_path / "restored").code == 2


@pytest.mark.parametrize("files", [{}, None, {"../../source/config.json": "0" * 64}])
def test_a_record_must_name_the_files_and_no_others(files, artifact):
    edit_json(artifact / "quantization_config.json", files=files)
    found = findings("verify", artifact)
    assert {("error", "file-unrecorded"), ("error", "file-missing")} & found


def test_what_was_added_to_an_artifact_is_found(source, artifact):
    (artifact / "modeling_x.py").write_text("")
    assert findings("verify", artifact) == {("warning", "file-unrecorded")}
    (artifact / "model-3.safetensors").write_bytes(pack_shard({"extra.weight": weight()}))
    assert ("error", "file-unrecorded") in findings("verify", artifact)


def test_a_tensor_that_no_source_has_is_found(tmp_path):
    ours = {f"{LAYER}.o_proj.weight": weight()}
    more = {**ours, "extra.bias": ("F32", (4,), bytes(16))}
    quantize(write_single(tmp_path / "m", more), tmp_path / "out")
    bare = write_single(tmp_path / "bare", ours)
    assert ("error", "tensor-foreign") in findings("verify", tmp_path / "out", "--source", bare)


@pytest.mark.parametrize("gate", ["--min-sqnr", "--max-nmse"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gate_that_asks_nothing_is_refused(gate, value, source, artifact):
    assert run("verify", artifact, "--source", source, gate, value).code == 2


def test_something_out_of_nothing_passes_no_gate(tmp_path):
    zeros = ("BF16", (32, 64), bytes(32 * 64 * 2))
    quantize(write_single(tmp_path / "m", {f"{LAYER}.o_proj.weight": weight()}), tmp_path / "out")
    nothing = write_single(tmp_path / "zeros", {f"{LAYER}.o_proj.weight": zeros})
    found = findings("verify", tmp_path / "out", "--source", nothing, "--min-sqnr", "1")
    assert ("error", "sqnr-low") in found


def test_nan_in_a_kept_tensor_is_warned_of(tmp_path):
    norm = ("F32", (64,), np.full(64, np.nan, np.float32).tobytes())
    tensors = {f"{LAYER}.o_proj.weight": weight(), "model.norm.weight": norm}
    source = write_single(tmp_path / "m", tensors)
    quantize(source, tmp_path / "out")
    found = findings("verify", tmp_path / "out", "--source", source)
    assert found == {("warning", "kept-not-finite")}


def test_a_broken_expression_in_an_engines_record_is_a_finding(artifact):
    config = json.loads((artifact / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:(")
    (artifact / "config.json").write_text(json.dumps(config))
    assert ("error", "ignore-pattern") in findings("inspect", artifact)


def test_a_kept_module_may_look_like_an_expression(tmp_path):
    tensors = {"re:(bad.weight": weight(0, 2, 24), f"{LAYER}.o_proj.weight": weight()}
    quantize(write_single(tmp_path / "m", tensors), tmp_path / "out")
    assert findings("inspect", tmp_path / "out") == set()


def test_a_value_beyond_bf16_is_not_written_as_inf(tmp_path):
    largest = np.full((1, 16), np.finfo(np.float32).max, np.float32)
    source = write_single(tmp_path / "m", {"a.weight": ("F32", (1, 16), largest.tobytes())})
    quantize(source, tmp_path / "out")
    outcome = run("dequantize", tmp_path / "out", "-o", tmp_path / "restored")
    assert (outcome.code, "the largest of bf16" in outcome.err) == (2, True)
    assert run("dequantize", tmp_path / "out", "-o", tmp_path / "wide", "--dtype", "fp32").code == 0


@pytest.mark.parametrize(
    ("declared", "dtype", "expected"),
    [
        ("bfloat16", "bf16", "bfloat16"),
        ("float16", "bf16", "float32"),
        ("bfloat16", "fp32", "float32"),
        ("float32", "bf16", "float32"),
        ({"vision_config": "bfloat16"}, "bf16", {"vision_config": "bfloat16"}),
    ],
)
def test_the_declared_dtype_holds_the_restored_weights(declared, dtype, expected, tmp_path):
    config = {**LLAMA, "torch_dtype": declared, "text_config": {"dtype": declared}}
    source = write_single(tmp_path / "m", {f"{LAYER}.o_proj.weight": weight()}, config)
    quantize(source, tmp_path / "out")
    back = tmp_path / "restored"
    assert run("dequantize", tmp_path / "out", "-o", back, "--dtype", dtype).code == 0
    restored = json.loads((back / "config.json").read_text())
    assert (restored["torch_dtype"], restored["text_config"]["dtype"]) == (expected, expected)
