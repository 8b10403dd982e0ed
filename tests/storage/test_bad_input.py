"""Every odd or hostile checkpoint through the real command: refused whole, or converted with
nothing lost in silence.
"""

import json
import os
import re
import shlex

import numpy as np
import pytest
from bad_checkpoints import CASES, CONFIG, O_PROJ, Case, beginning
from checkpoints import (
    FIRST,
    SECOND,
    bf16,
    hidden_characters,
    pack_shard,
    read_folder,
    run,
    run_alone,
    values_of,
    weight,
    write_checkpoint,
    write_single,
)

NVFP4 = ("--format", "nvfp4")
NAMED = {case.name: case for case in CASES}
SPECIAL = ("shard_is_fifo",)  # would hang a careless reader: run as processes that can be killed


def cases(*expected: str) -> list[object]:
    chosen = [case for case in CASES if case.expect in expected and case.name not in SPECIAL]
    return [pytest.param(case, id=case.name) for case in chosen]


def check_refused(outcome, out, say: str) -> None:
    assert outcome.code == 2
    assert say.lower() in outcome.err.lower()
    assert not out.exists()
    document = outcome.json
    assert list(document) == ["error"]
    assert set(document["error"]) == {"code", "exit", "message", "tensor", "next"}
    assert document["error"]["exit"] == 2
    assert outcome.err.count("\n next: ") == 1
    assert document["error"]["next"]
    assert say.lower() in document["error"]["message"].lower()


def test_there_are_113_cases_with_names_of_their_own():
    assert len(CASES) == len(NAMED) == 113


@pytest.mark.parametrize("case", cases("refused"))
def test_refused_before_anything_is_written(case: Case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    outcome = run("quantize", case.write(tmp_path), "--format", case.format, "-o", out, "--json")
    check_refused(outcome, out, case.say)
    assert not hidden_characters(outcome.out + outcome.err)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("name", [*SPECIAL, "header_len_101MB_ok_size", "pickle_bin_only"])
def test_refused_by_the_installed_command_without_hanging(name, tmp_path):
    out = tmp_path / "out"
    outcome = run_alone("quantize", NAMED[name].write(tmp_path), *NVFP4, "-o", out, "--json")
    check_refused(outcome, out, NAMED[name].say)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors.index.json", "tokenizer.json", "notes/readme.txt"]
)
def test_a_pipe_anywhere_in_the_source_is_refused_without_hanging(file, tmp_path):
    source, out = write_single(tmp_path / "source", {O_PROJ: weight()}), tmp_path / "out"
    (source / file).parent.mkdir(exist_ok=True)
    (source / file).unlink(missing_ok=True)
    os.mkfifo(source / file)
    outcome = run_alone("quantize", source, *NVFP4, "-o", out, "--json")
    check_refused(outcome, out, "not a regular file")


@pytest.mark.parametrize("file", ["config.json", "quantization_config.json", "model.safetensors"])
def test_a_pipe_in_an_artifact_does_not_hang_inspect(file, tmp_path):
    source, out = write_single(tmp_path / "source", {O_PROJ: weight()}), tmp_path / "out"
    assert run("quantize", source, *NVFP4, "-o", out).code == 0
    (out / file).unlink()
    os.mkfifo(out / file)
    outcome = run_alone("inspect", out, "--json")
    assert outcome.code == 2
    assert "not a regular file" in outcome.json["error"]["message"]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", cases("quantized", "kept", "warned"))
def test_converted_with_nothing_lost_in_silence(case: Case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, out = case.write(tmp_path), tmp_path / "out"
    planned = run("quantize", source, "--format", case.format, "-o", out, "--dry-run", "--json")
    outcome = run("quantize", source, "--format", case.format, "-o", out, "--json")
    if len(read_folder(source)) == len(case.kept):
        check_refused(planned, out, case.say)
        check_refused(outcome, out, case.say)
        return
    assert (planned.code, outcome.code) == (0, 0)
    before, after = read_folder(source), read_folder(out)
    steps = {step["name"]: step for step in planned.json["tensors"]}
    assert set(steps) == set(before)
    for name in case.kept:
        assert after[name] == before[name]
        assert steps[name]["action"] in ("copy", "skip")
        assert case.say in steps[name]["reason"]
    quantized = {name for name, step in steps.items() if step["action"] == "quantize"}
    assert quantized == set(before) - set(case.kept)
    assert outcome.json["tensors"]["quantized"] == len(before) - len(case.kept)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("case", cases("warned"))
def test_doubts_are_warnings(case: Case, tmp_path):
    source, out = case.write(tmp_path), tmp_path / "out"
    outcome = run("quantize", source, "--format", case.format, "-o", out, "--dry-run", "--json")
    if case.say:
        (warning,) = (each for each in outcome.json["warnings"] if case.say in each)
        assert f"warning: {warning}" in outcome.err


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", cases("quantized", "kept", "warned"))
def test_what_is_converted_is_healthy_and_verifies(case: Case, tmp_path):
    source, out = case.write(tmp_path), tmp_path / "out"
    if len(read_folder(source)) == len(case.kept):
        pytest.skip("nothing in it is quantized, which is refused")
    assert run("quantize", source, "--format", case.format, "-o", out, "-q").code == 0
    assert run("inspect", out, "--json").json["healthy"]
    verified = run("verify", out, "--source", source, "--json")
    assert verified.code == 0
    doubts = {finding["code"] for finding in verified.json["findings"]}
    assert doubts <= {"global-scale-range", "zero-weights"}  # of weights that no model has


NAME_CASES = [
    pytest.param(case, id=case.name)
    for case in CASES
    # A tensor without a name is kept, and a conversion of nothing is refused.
    if case.name.startswith("name_") and case.expect != "refused" and case.name != "name_empty"
]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("case", NAME_CASES)
def test_names_reach_the_artifact_and_never_act_on_a_terminal(case: Case, tmp_path):
    source, out = case.write(tmp_path), tmp_path / "out"
    commands = (
        ("quantize", source, *NVFP4, "-o", out, "--dry-run"),
        ("quantize", source, *NVFP4, "-o", out),
        ("quantize", source, *NVFP4, "-o", out),
        ("inspect", out),
        ("verify", out, "--source", source),
        ("verify", out, "--source", source, "--min-sqnr", "300"),
        ("quantize", out, *NVFP4, "-o", tmp_path / "again"),
    )
    for command in commands:
        for extra in ((), ("--json",)):
            outcome = run(*command, *extra)
            assert hidden_characters(outcome.out + outcome.err) == []
    names = set(read_folder(source))
    modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    expected = names - {f"{module}.weight" for module in modules}
    endings = ("weight_packed", "weight_scale", "weight_global_scale")
    assert set(read_folder(out)) == expected | {
        f"{module}.{ending}" for module in modules for ending in endings
    }


def test_markup_is_printed_as_it_is(tmp_path):
    source, out = NAMED["name_rich_markup"].write(tmp_path), tmp_path / "out"
    planned = run("quantize", source, *NVFP4, "-o", out, "--dry-run")
    assert "[bold red]x[/bold red][link=file:///etc/passwd]y[/link]" in planned.out
    assert "[/nope]" in planned.out
    assert run("quantize", source, *NVFP4, "-o", out).code == 0
    gated = run("verify", out, "--source", source, "--min-sqnr", "300")
    assert gated.code == 6
    assert "[bold red]x[/bold red][link=file:///etc/passwd]y[/link].weight" in gated.out


def test_a_control_character_is_shown_escaped(tmp_path):
    source, out = NAMED["name_ansi_escape"].write(tmp_path), tmp_path / "out"
    assert run("quantize", source, *NVFP4, "-o", out).code == 0
    assert r"\x1b[31mRED\x1b]0;pwned\x07.weight" in run("verify", out, "--source", source).out


def excludes(next_step: str) -> list[str]:
    """The --exclude options of a next step, as a shell would read them."""
    words = shlex.split(next_step)
    pairs = zip(words, ["", *words], strict=False)
    return [word for word, before in pairs if "--exclude" in (word, before)]


def check_completes(source, out, outcome, bad: set[str]) -> None:
    """All bad tensors are named, nothing looks finished, and the command that the message gives
    ends well.
    """
    error = outcome.json["error"]
    assert (outcome.code, error["exit"]) == (2, 2)
    for name in bad:
        assert name in error["message"]
    for record in ("config.json", "quantization_config.json", "model.safetensors.index.json"):
        assert not (out / record).exists()
    options = excludes(error["next"])
    assert options.count("--exclude") == len(bad)
    if len(read_folder(source)) == len(bad):
        return  # nothing would be left to quantize
    again = run("quantize", source, *NVFP4, "-o", out, "--json", *options)
    assert again.code == 0, again.err
    before, after = read_folder(source), read_folder(out)
    for name in bad:
        assert after[name] == before[name]
    assert run("verify", out, "--source", source).code == 0


@pytest.mark.parametrize("case", cases("unsound"))
def test_unsound_weights_end_with_the_command_that_completes_the_run(case: Case, tmp_path):
    source, out = case.write(tmp_path), tmp_path / "out"
    outcome = run("quantize", source, "--format", case.format, "-o", out, "--json")
    assert case.say in outcome.json["error"]["message"]
    assert outcome.json["error"]["tensor"] == O_PROJ
    check_completes(source, out, outcome, {O_PROJ})


def test_every_unsound_tensor_is_listed_after_the_sound_shards_are_finished(tmp_path):
    nan = ("BF16", (16, 64), b"\xc0\x7f" + bf16(16, 64)[2:])
    layers = ("model.layers.0", "model.layers.1")
    names = [f"{layer}.self_attn.{leaf}_proj.weight" for layer in layers for leaf in "qkv"]
    down = f"{layers[0]}.mlp.down_proj.weight"
    shards = {
        FIRST: {names[0]: nan, names[1]: nan, names[2]: weight(), down: nan},
        SECOND: {names[3]: weight(1), names[4]: weight(2), names[5]: nan},
        "sound.safetensors": {"model.layers.2.mlp.down_proj.weight": weight(3)},
    }
    source, out = write_checkpoint(tmp_path / "source", shards), tmp_path / "out"
    outcome = run("quantize", source, *NVFP4, "-o", out, "--json")
    assert (out / "sound.safetensors").exists()
    assert not (out / FIRST).exists()
    check_completes(source, out, outcome, {names[0], names[1], names[5], down})
    assert "sound" not in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    "module", ["layers[0].proj", "a b;c.proj", "what?.proj", "re:x.proj", "it's.proj", "-x.proj"]
)
def test_the_exclude_that_is_offered_fits_any_name(module, tmp_path):
    nan = ("BF16", (16, 64), b"\xc0\x7f" + bf16(16, 64)[2:])
    tensors = {f"{module}.weight": nan, O_PROJ: weight()}
    source, out = write_single(tmp_path / "source", tensors), tmp_path / "out"
    outcome = run("quantize", source, *NVFP4, "-o", out, "--json")
    check_completes(source, out, outcome, {f"{module}.weight"})


def test_the_first_unsound_value_is_counted_and_placed(tmp_path):
    values = np.ones((4, 64), np.float32)
    values[2, 5], values[2, 6], values[3, 0] = np.nan, np.inf, -np.inf
    source = write_single(tmp_path / "source", {O_PROJ: ("F32", (4, 64), values.tobytes())})
    outcome = run("quantize", source, *NVFP4, "-o", tmp_path / "out")
    assert re.search(rf"{re.escape(O_PROJ)} has 3 .*NaN.*\[2, 5\]", outcome.err)


@pytest.mark.parametrize(
    ("names", "dtype", "say"),
    [
        (("weight_packed", "weight_scale"), "U8", "already quantized"),
        (("weight", "weight_scale_2"), "U8", "already quantized"),
        (("weight", "weight_scale_inv"), "F8_E4M3", "is F8_E4M3 [8, 8] for codes of [8, 8]"),
        (("qweight", "qzeros"), "I32", "already quantized"),
    ],
)
def test_packed_tensors_that_nothing_explains_are_refused(names, dtype, say, tmp_path):
    nbytes = 4 if dtype == "I32" else 1
    tensor = (dtype, (8, 8), bytes(64 * nbytes))
    tensors = {f"model.layers.0.mlp.down_proj.{name}": tensor for name in names}
    source, out = write_single(tmp_path / "source", tensors), tmp_path / "out"
    check_refused(run("quantize", source, *NVFP4, "-o", out, "--json"), out, say)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_our_own_artifact_is_a_source_whose_blocks_are_taken_over(format, tmp_path):
    source = write_single(tmp_path / "s", {O_PROJ: weight()})
    artifact, out = tmp_path / "a", tmp_path / "out"
    assert run("quantize", source, "--format", format, "-o", artifact).code == 0
    again = run("quantize", artifact, "--format", format, "-o", out, "--json")
    assert (again.code, again.json["tensors"]["transcoded"]) == (0, 1)
    assert read_folder(out) == read_folder(artifact)


def test_a_stack_that_nobody_tells_of_names_the_options_that_tell(tmp_path):
    source, out = NAMED["tensor_3d_experts"].write(tmp_path), tmp_path / "out"
    error = run("quantize", source, *NVFP4, "-o", out, "--json").json["error"]
    assert error["code"] == "unknown-stack"
    assert error["tensor"] == "model.layers.0.mlp.experts.gate_up_proj"
    assert "--stack-order out_in or in_out" in error["message"]
    assert "--stack-rows concatenated or interleaved" in error["message"]
    assert "--exclude '*experts*'" in error["next"]
    kept = read_folder(source)
    (source / "model.safetensors").write_bytes(pack_shard(kept | {O_PROJ: weight()}))
    assert run("quantize", source, *NVFP4, "-o", out, "--exclude", "*experts*").code == 0
    assert kept.items() <= read_folder(out).items()


def test_a_gguf_file_is_refused(tmp_path):
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    check_refused(run("quantize", path, *NVFP4, "-o", out, "--json"), out, "no tensors")


def test_an_index_that_names_model_safetensors_is_accepted(tmp_path):
    source, out = write_single(tmp_path / "source", {O_PROJ: weight()}), tmp_path / "out"
    index = {"metadata": {}, "weight_map": {O_PROJ: "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("quantize", source, *NVFP4, "-o", out).code == 0


@pytest.mark.parametrize("lead", [b"\n", b"  \r\n\t"])
def test_json_files_may_begin_with_white_space(lead, tmp_path):
    shards = {FIRST: {O_PROJ: weight()}, SECOND: {"y.weight": weight(1)}}
    source = write_checkpoint(tmp_path / "source", shards)
    for file in ("config.json", "model.safetensors.index.json"):
        (source / file).write_bytes(lead + (source / file).read_bytes())
    assert run("quantize", source, *NVFP4, "-o", tmp_path / "out").code == 0


def test_a_link_that_leads_to_itself_is_refused(tmp_path):
    source, out = write_single(tmp_path / "source", {O_PROJ: weight()}), tmp_path / "out"
    (source / "vocab.json").symlink_to("vocab.json")
    outcome = run("quantize", source, *NVFP4, "-o", out, "--json")
    assert (outcome.code, out.exists()) == (2, False)
    assert "vocab.json" in outcome.json["error"]["message"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_a_path_that_no_file_system_takes_is_bad_usage(name, tmp_path):
    assert run("quantize", tmp_path / name, *NVFP4, "-o", tmp_path / "out").code == 2
    assert run("inspect", tmp_path / name).code == 2


def test_an_outlier_costs_its_neighbours_and_nobody_else(tmp_path):
    """One value of 3e38 in a block of 16: the other blocks of the tensor become zero, and verify
    says how bad it is.
    """
    source, out = write_single(tmp_path / "source", {}, None), tmp_path / "out"
    (source / "model.safetensors").write_bytes(beginning(3e38)["model.safetensors"])
    (source / "config.json").write_bytes(CONFIG)
    assert run("quantize", source, *NVFP4, "-o", out).code == 0
    tensor = run("verify", out, "--source", source, "--json").json["tensors"][0]
    largest = abs(values_of(read_folder(source)[O_PROJ])).max()
    assert tensor["max_abs"] < largest / 100
    assert pack_shard(read_folder(source))


def test_a_pipe_as_the_file_of_input_scales_is_refused_without_hanging(tmp_path):
    source, out = write_single(tmp_path / "source", {O_PROJ: weight()}), tmp_path / "out"
    os.mkfifo(tmp_path / "pipe")
    words = ("--format", "nvfp4", "--activations", 4, "--input-scale", tmp_path / "pipe")
    outcome = run_alone("quantize", source, *words, "-o", out, "--json")
    assert outcome.code == 2
    assert not out.exists()


def test_an_address_of_the_hub_that_is_none_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    """huggingface_hub cannot even be imported then."""
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@[")
    for source in ("org/m", write_single(tmp_path / "source", {O_PROJ: weight()})):
        outcome = run_alone("quantize", source, *NVFP4, "-o", tmp_path / "out", "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "endpoint")
        assert "secret" not in outcome.out + outcome.err
