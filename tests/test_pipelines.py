"""A Diffusers pipeline: each transformer becomes an artifact in its own folder, and everything else is copied as it is."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Tensor, bf16, read_folder, run, start, weight
from diffusion import (
    DIFFUSERS,
    DIFFUSERS_FIRST,
    DIFFUSERS_INDEX,
    DIFFUSERS_SECOND,
    FLUX_INDEX,
    WAN_CONFIG,
    WAN_INDEX,
    wan_tensors,
    write_component,
    write_flux,
    write_others,
    write_wan,
)

from fp4convert.pipelines import Conversion

NVFP4 = ("--format", "nvfp4", "--json", "-q")
RECORD, STATE, PIPELINE = "quantization_config.json", ".fp4convert", "model_index.json"
COMPONENTS = ("transformer", "transformer_2")
QUANTIZED = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ffn.net.0.proj", "ffn.net.2")
BAD = "blocks.0.ffn.net.2.weight"


def quantize(source: object, out: Path, *options: object):
    return run("quantize", source, *NVFP4, "-o", out, *options)


def files_of(folder: Path, apart: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files of a folder but for our state and whole folders `apart`."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    kept = {name: path for name, path in found.items() if STATE not in name.parts and name.parts[0] not in apart}
    return {name.as_posix(): path.read_bytes() for name, path in kept.items()}


def digest_of(files: dict[str, bytes]) -> str:
    """As `sha256sum FILES | sha256sum` has it, model cards left out."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()) if name != "README.md"]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.fixture
def wan(tmp_path):
    return write_wan(tmp_path / "wan")


def error_of(outcome) -> tuple[int, str, str]:
    return outcome.code, outcome.json["error"]["code"], outcome.json["error"]["message"]


def test_the_transformer_is_converted_and_everything_else_copied_byte_for_byte(tmp_path):
    source, out = write_flux(tmp_path / "flux"), tmp_path / "q"
    outcome = quantize(source, out)
    assert outcome.code == 0
    copied = files_of(source, ("transformer",))
    assert files_of(out, ("transformer",)) == copied
    made = files_of(out / "transformer")
    assert made.keys() == {DIFFUSERS_FIRST, DIFFUSERS_SECOND, DIFFUSERS_INDEX, "config.json", RECORD}
    config = json.loads(made["config.json"])
    assert config["_class_name"] == "FluxTransformer2DModel"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    index = json.loads(made[DIFFUSERS_INDEX])["weight_map"]
    assert set(index.values()) == {DIFFUSERS_FIRST, DIFFUSERS_SECOND}
    assert index.keys() == read_folder(out / "transformer").keys()
    result = outcome.json
    assert result["output"] == str(out)
    assert result["digest"] == digest_of(files_of(out))
    assert result["output_bytes"] == sum(map(len, files_of(out).values()))
    assert result["tensors"] == {"quantized": 13, "copied": 6, "skipped": 0}
    (component,) = result["components"]
    assert (component["name"], component["digest"]) == ("transformer", digest_of(made))


def test_members_of_a_scale_group_in_two_shards_share_one_scale(tmp_path):
    assert quantize(write_flux(tmp_path / "flux"), tmp_path / "q").code == 0
    made = read_folder(tmp_path / "q" / "transformer")
    for block in ("transformer_blocks.0", "single_transformer_blocks.0"):
        scales = {made[f"{block}.attn.{name}.weight_global_scale"][2] for name in ("to_q", "to_k", "to_v")}
        assert len(scales) == 1


def test_every_transformer_is_what_its_folder_alone_becomes(wan, tmp_path):
    result = quantize(wan, tmp_path / "q").json
    assert [component["name"] for component in result["components"]] == list(COMPONENTS)
    for name, component in zip(COMPONENTS, result["components"], strict=True):
        by_name = quantize(wan, tmp_path / f"named-{name}", "--subfolder", name).json
        by_path = quantize(wan / name, tmp_path / f"path-{name}").json
        assert component["digest"] == by_name["digest"] == by_path["digest"]
        assert files_of(tmp_path / "q" / name) == files_of(tmp_path / f"path-{name}")
        modules = read_folder(tmp_path / "q" / name)
        assert sorted(key for key in modules if key.endswith("weight_packed")) == sorted(
            f"blocks.0.{module}.weight_packed" for module in QUANTIZED
        )
    assert result["tensors"] == {"quantized": 12, "copied": 8, "skipped": 0}


def test_a_dry_run_tells_of_all_components_and_writes_nothing(wan, tmp_path):
    out = tmp_path / "q"
    plan = quantize(wan, out, "--dry-run").json
    assert not out.exists()
    copied = sum(map(len, files_of(wan, COMPONENTS).values()))
    assert plan["copied_bytes"] == copied
    assert [(part["name"], part["source_bytes"] > 0) for part in plan["components"]] == [(name, True) for name in COMPONENTS]
    tensors = [(tensor["component"], tensor["name"]) for tensor in plan["tensors"]]
    assert tensors == [(name, tensor) for name in COMPONENTS for tensor in wan_tensors()]
    assert plan["source_bytes"] == copied + sum(tensor["source_bytes"] for tensor in plan["tensors"])
    assert quantize(wan, out).code == 0
    written = files_of(out)
    records = sum(len(data) for name, data in written.items() if name.endswith(RECORD))
    assert plan["peak_disk_bytes"] == sum(map(len, written.values())) - records
    drawn = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q2", "--dry-run").out
    assert "everything outside transformer and transformer_2 is copied as it is" in drawn


def test_a_second_run_finds_everything_done(wan, tmp_path):
    first = quantize(wan, tmp_path / "q").json
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "q").rglob("*.safetensors")}
    second = quantize(wan, tmp_path / "q").json
    assert (second["digest"], second["adopted_bytes"]) == (first["digest"], second["source_bytes"])
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert quantize(wan, tmp_path / "q", "--exclude", "*ffn*").json["error"]["code"] == "other-plan"
    forced = quantize(wan, tmp_path / "q", "--exclude", "*ffn*", "--force").json
    assert forced["digest"] == quantize(wan, tmp_path / "clean", "--exclude", "*ffn*").json["digest"] != first["digest"]


def test_what_was_damaged_is_done_again_and_nothing_loads_the_pipeline_meanwhile(wan, tmp_path, monkeypatch):
    out = tmp_path / "q"
    expected, seen = quantize(wan, out).json["digest"], []
    (out / "transformer_2" / f"{DIFFUSERS}.safetensors").unlink()
    (out / "vae" / "config.json").unlink()
    real = Conversion.carry_out

    def carry_out(self, settings):
        seen.append((out / PIPELINE).exists())
        return real(self, settings)

    monkeypatch.setattr(Conversion, "carry_out", carry_out)
    assert quantize(wan, out).json["digest"] == expected
    assert seen == [False, False]


def test_weights_that_are_nan_end_with_exit_2_and_the_other_transformer_is_finished(tmp_path):
    tensors = wan_tensors()
    bad: Tensor = ("BF16", (64, 128), b"\xc0\x7f" + tensors[BAD][2][2:])
    source, out = tmp_path / "wan", tmp_path / "q"
    write_component(source / "transformer", [{**tensors, BAD: bad}], WAN_CONFIG)
    write_component(source / "transformer_2", [wan_tensors(50)], WAN_CONFIG)
    write_others(source, WAN_INDEX)
    outcome = quantize(source, out)
    assert error_of(outcome)[:2] == (2, "not-finite")
    assert f"transformer: {DIFFUSERS}.safetensors: {BAD} has 1 values" in outcome.json["error"]["message"]
    assert outcome.json["error"]["next"] == "Run the same command again with --exclude blocks.0.ffn.net.2"
    assert (out / "transformer_2" / RECORD).exists()
    assert not (out / "transformer" / RECORD).exists()
    assert not (out / PIPELINE).exists()
    exclude = ("--exclude", "blocks.0.ffn.net.2")
    assert quantize(source, out, *exclude).json["digest"] == quantize(source, tmp_path / "clean", *exclude).json["digest"]


def test_other_commands_want_one_checkpoint_and_are_told_its_name(wan, tmp_path):
    out = tmp_path / "q"
    assert quantize(wan, out).code == 0
    for command in (("inspect", out), ("verify", out), ("dequantize", out, "-o", tmp_path / "d")):
        code, slug, message = error_of(run(*command, "--json"))
        assert (code, slug) == (2, "pipeline")
        assert "transformer and transformer_2" in message
    for name in COMPONENTS:
        assert run("inspect", out, "--subfolder", name, "--json").json["healthy"]
        measured = run("verify", out, "--subfolder", name, "--source", wan, "--json")
        assert (measured.code, len(measured.json["tensors"])) == (0, 6)
        assert run("dequantize", out, "--subfolder", name, "-o", tmp_path / f"d-{name}", "-q").code == 0
        assert read_folder(tmp_path / f"d-{name}").keys() == wan_tensors().keys()


def test_an_unfinished_component_says_so(wan, tmp_path):
    out = tmp_path / "q"
    assert quantize(wan, out).code == 0
    (out / "transformer" / RECORD).unlink()
    found = run("inspect", out, "--subfolder", "transformer", "--json")
    assert (found.code, [finding["code"] for finding in found.json["findings"]]) == (6, ["unfinished"])


def test_a_restored_transformer_has_the_index_that_diffusers_reads(tmp_path):
    assert quantize(write_flux(tmp_path / "flux"), tmp_path / "q").code == 0
    assert run("dequantize", tmp_path / "q", "--subfolder", "transformer", "-o", tmp_path / "d", "-q").code == 0
    assert files_of(tmp_path / "d").keys() == {DIFFUSERS_FIRST, DIFFUSERS_SECOND, DIFFUSERS_INDEX, "config.json"}
    assert json.loads((tmp_path / "d" / "config.json").read_text())["_class_name"] == "FluxTransformer2DModel"


def test_weights_beside_model_index_json_are_left_out_and_told(wan, tmp_path):
    (wan / "wan-one-file.safetensors").write_bytes(b"another form of the same weights")
    outcome = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q")
    assert outcome.code == 0
    assert "warning: 1 files of weights beside model_index.json are no part of the pipeline" in outcome.err
    assert not (tmp_path / "q" / "wan-one-file.safetensors").exists()


def test_warnings_say_of_which_component_they_are(wan, tmp_path):
    outcome = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q", "--exclude", "nothing")
    assert "warning: transformer_2: --exclude 'nothing' matches no module" in outcome.err


def test_a_pipeline_without_a_transformer_says_which_option_converts_a_folder(tmp_path):
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "transformer": [None, None],
    }
    source = write_others(tmp_path / "sdxl", index)
    write_component(source / "unet", [wan_tensors()], {"_class_name": "UNet2DConditionModel"})
    outcome = quantize(source, tmp_path / "q")
    assert error_of(outcome)[:2] == (2, "no-weights")
    assert outcome.json["error"]["next"] == "Name the folder of the checkpoint: --subfolder unet, for example."
    assert quantize(source, tmp_path / "q", "--subfolder", "unet").code == 0


@pytest.mark.parametrize("name", ["transformer_3", "transformer/../x", "transformer\n"])
def test_a_component_that_is_not_there_is_an_error(wan, tmp_path, name):
    (wan / PIPELINE).write_text(json.dumps({**WAN_INDEX, name: ["diffusers", "X"]}))
    outcome = quantize(wan, tmp_path / "q")
    assert error_of(outcome)[:2] == (2, "missing-component")
    assert repr(name) in outcome.json["error"]["message"]
    assert not (tmp_path / "q").exists()


def test_a_model_index_that_cannot_be_read_is_an_error(wan, tmp_path):
    (wan / PIPELINE).write_bytes(b"{oops")
    assert quantize(wan, tmp_path / "q").code == 2


def test_a_part_of_a_pipeline_is_refused_before_anything_is_written(wan, tmp_path):
    outcome = quantize(wan, tmp_path / "q", "--shard-index", 0, "--num-shards", 2)
    assert error_of(outcome)[:2] == (2, "share")
    assert "--subfolder transformer" in outcome.json["error"]["next"]
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("out", ["q", "transformer/q"])
def test_an_output_inside_the_pipeline_is_refused(wan, out):
    for options in ((), ("--subfolder", "transformer_2")):
        assert error_of(quantize(wan, wan / out, *options))[:2] == (2, "output-in-source")
    assert not (wan / out).exists()


def test_a_folder_that_holds_something_else_is_refused(wan, tmp_path):
    (tmp_path / "q" / "transformer").mkdir(parents=True)
    (tmp_path / "q" / "transformer" / "mine.txt").write_bytes(b"mine")
    assert error_of(quantize(wan, tmp_path / "q"))[:2] == (5, "foreign-output")
    assert files_of(tmp_path / "q") == {"transformer/mine.txt": b"mine"}


def test_another_pipeline_does_not_take_the_folder_over(wan, tmp_path):
    assert quantize(wan, tmp_path / "q").code == 0
    before = files_of(tmp_path / "q")
    other = write_flux(tmp_path / "flux")
    assert error_of(quantize(other, tmp_path / "q"))[:2] == (5, "other-plan")
    assert error_of(quantize(wan, tmp_path / "q", "--subfolder", "transformer"))[:2] == (5, "other-plan")
    assert files_of(tmp_path / "q") == before


def test_the_disk_must_hold_all_components_and_copies_before_the_first_byte(wan, tmp_path, monkeypatch):
    needed = quantize(wan, tmp_path / "a", "--dry-run").json["peak_disk_bytes"]
    real = os.statvfs
    free = needed - 1

    def statvfs(path):
        values = list(real(path))
        values[1], values[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    outcome = quantize(wan, tmp_path / "q")
    assert error_of(outcome)[:2] == (5, "disk-full")
    assert f"needs {needed:,} bytes" in outcome.json["error"]["message"]
    assert not files_of(tmp_path / "q") if (tmp_path / "q").exists() else True
    free = needed
    assert quantize(wan, tmp_path / "q").code == 0
    free = 0
    assert quantize(wan, tmp_path / "q").code == 0  # all is there


def test_processes_that_join_share_the_work(wan, tmp_path):
    expected = quantize(wan, tmp_path / "a").json["digest"]
    crowd = [start("quantize", wan, *NVFP4, "-o", tmp_path / "q", "--join", "--workers", "1") for _ in range(3)]
    ended = [process.communicate(timeout=60) for process in crowd]
    assert [process.returncode for process in crowd] == [0, 0, 0], ended
    assert {json.loads(out)["digest"] for out, _ in ended} == {expected}


def test_a_large_file_is_copied_by_itself_and_only_once(wan, tmp_path, monkeypatch):
    large = {f"text_encoder/large-{number}.safetensors": bf16(1 << 15, seed=number) for number in range(2)}
    for name, data in large.items():
        (wan / name).write_bytes(data)
    monkeypatch.setattr("fp4convert.job.LARGE_NBYTES", 1 << 16)
    out = tmp_path / "q"
    expected = quantize(wan, out).json["digest"]
    tasks = json.loads((out / STATE / "plan.json").read_text())["tasks"]
    assert sorted(len(task["files"]) for task in tasks) == [1, 1, 8]
    (out / "text_encoder" / "large-1.safetensors").unlink()
    kept = (out / "text_encoder" / "large-0.safetensors").stat().st_ino
    assert quantize(wan, out).json["digest"] == expected
    assert (out / "text_encoder" / "large-0.safetensors").stat().st_ino == kept


def test_a_file_that_changes_while_it_is_copied_is_exit_3(wan, tmp_path, monkeypatch):
    from fp4convert.output import OutputFolder

    changing, real = wan / "vae" / "config.json", OutputFolder.write_copies

    def write_copies(self, *arguments):
        changing.write_bytes(b'{"longer than before": "was"}' * 3)
        real(self, *arguments)

    expected_missing = tmp_path / "q" / PIPELINE
    monkeypatch.setattr(OutputFolder, "write_copies", write_copies)
    assert error_of(quantize(wan, tmp_path / "q"))[:2] == (3, "source-changed")
    assert not expected_missing.exists()
    monkeypatch.setattr(OutputFolder, "write_copies", real)
    outcome = quantize(wan, tmp_path / "q")
    assert (outcome.code, files_of(tmp_path / "q", COMPONENTS)) == (0, files_of(wan, COMPONENTS))


KILLED = """
import os, signal, sys
import fp4convert.output as output
real, left = output.OutputFolder.settle, [int(sys.argv.pop(1))]
def settle(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(*arguments)
output.OutputFolder.settle = settle
from fp4convert.cli import main
main()
"""


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_after_a_kill_the_same_command_goes_on(wan, tmp_path, finished):
    out = tmp_path / "q"
    command = [sys.executable, "-c", KILLED, finished, "quantize", wan, *NVFP4, "-o", out]
    assert subprocess.run([*map(str, command)], check=False, timeout=60).returncode == -9
    assert not (out / PIPELINE).exists()
    kept = {path: path.stat().st_ino for path in out.rglob("*.safetensors") if STATE not in path.parts}
    assert len(kept) == min(finished, 2)
    assert quantize(wan, out).json["digest"] == quantize(wan, tmp_path / "clean").json["digest"]
    assert {path: path.stat().st_ino for path in kept} == kept
    assert not list(out.rglob(f"{STATE}/tmp/*"))


def test_a_comfy_file_is_made_of_the_transformer_alone(tmp_path):
    source = write_flux(tmp_path / "flux")
    outcome = quantize(source, tmp_path / "q", "--dialect", "comfy", "--subfolder", "transformer")
    assert outcome.code == 0
    assert run("inspect", tmp_path / "q", "--json").json["dialect"] == "comfy"


def test_the_result_is_drawn_with_its_components(wan, tmp_path):
    drawn = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q").out
    for name in COMPONENTS:
        assert f"  {name}: 6 tensors quantized, " in drawn


def test_a_snapshot_of_the_hubs_cache_is_a_pipeline_too(tmp_path):
    """Its files are links into the blobs beside the snapshots."""
    plain, root = write_wan(tmp_path / "plain"), tmp_path / "models--org--wan"
    for path in [path for path in plain.rglob("*") if path.is_file()]:
        name = path.relative_to(plain)
        link, blob = root / "snapshots" / "abc" / name, root / "blobs" / hashlib.sha256(str(name).encode()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    snapshot = root / "snapshots" / "abc"
    expected = quantize(plain, tmp_path / "a").json
    assert quantize(snapshot, tmp_path / "b").json["digest"] == expected["digest"]
    alone = quantize(snapshot / "transformer", tmp_path / "c").json["digest"]
    assert alone == expected["components"][0]["digest"]


def test_one_file_beside_a_model_index_is_still_one_checkpoint(tmp_path):
    source = write_others(tmp_path / "m", {**FLUX_INDEX, "transformer": ["diffusers", "FluxTransformer2DModel"]})
    (source / "one.safetensors").write_bytes(
        (write_component(tmp_path / "x", [{"a.weight": weight()}], {}) / f"{DIFFUSERS}.safetensors").read_bytes()
    )
    assert quantize(source / "one.safetensors", tmp_path / "q").code == 0
