"""A Diffusers pipeline: each transformer becomes an artifact in its own folder, and everything else
is copied as it is.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from checkpoints import disk_nbytes, done, pack_shard, read_folder, run, weight, write_llama
from diffusion import (
    COMPONENTS,
    DIFFUSERS,
    DIFFUSERS_FIRST,
    DIFFUSERS_INDEX,
    DIFFUSERS_SECOND,
    FLUX_INDEX,
    PIPELINE,
    RECORD,
    WAN_INDEX,
    digest_of,
    error_of,
    files_of,
    quantize,
    wan_tensors,
    write_component,
    write_flux,
    write_others,
    write_wan,
)
from paths import ROOT

from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.leases import Leases
from fp4convert.execution.plan_file import read_manifest
from fp4convert.storage.checkpoint_files import PLAN_FILE

QUANTIZED = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
)


@pytest.fixture
def wan(tmp_path):
    return write_wan(tmp_path / "wan")


def test_the_transformer_is_converted_and_everything_else_copied_byte_for_byte(tmp_path):
    source, out = write_flux(tmp_path / "flux"), tmp_path / "q"
    outcome = quantize(source, out)
    assert outcome.code == 0
    copied = files_of(source, ("transformer",))
    assert files_of(out, ("transformer",)) == copied
    made = files_of(out / "transformer")
    assert made.keys() == {
        DIFFUSERS_FIRST,
        DIFFUSERS_SECOND,
        DIFFUSERS_INDEX,
        "config.json",
        RECORD,
    }
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
    assert result["tensors"] == {"quantized": 12, "copied": 7, "skipped": 0}
    (component,) = result["components"]
    assert (component["name"], component["digest"]) == ("transformer", digest_of(made))


def test_the_digest_can_be_recomputed_as_its_page_says(wan, tmp_path):
    page = ROOT.joinpath("docs", "machines.md").read_text(encoding="utf-8")
    (wan / "vae" / "README.md").write_bytes(b"counts")
    expected = quantize(wan, tmp_path / "q").json["digest"]
    command = re.search(r"`(find \. .*?sha256sum)`", page, re.DOTALL)[1].replace("\n", " ")
    printed = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "q", capture_output=True, text=True, check=True
    ).stdout
    assert printed.split()[0] == expected


def test_members_of_a_scale_group_in_two_shards_share_one_scale(tmp_path):
    assert quantize(write_flux(tmp_path / "flux"), tmp_path / "q").code == 0
    made = read_folder(tmp_path / "q" / "transformer")
    for block in ("transformer_blocks.0", "single_transformer_blocks.0"):
        scales = {
            made[f"{block}.attn.{name}.weight_global_scale"][2] for name in ("to_q", "to_k", "to_v")
        }
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
            f"blocks.7.{module}.weight_packed" for module in QUANTIZED
        )
    assert result["tensors"] == {"quantized": 12, "copied": 8, "skipped": 0}


def test_a_dry_run_tells_of_all_components_and_writes_nothing(wan, tmp_path):
    out = tmp_path / "q"
    plan = quantize(wan, out, "--dry-run").json
    assert not out.exists()
    copied = sum(map(len, files_of(wan, COMPONENTS).values()))
    assert plan["copied_bytes"] == copied
    assert [(part["name"], part["source_bytes"] > 0) for part in plan["components"]] == [
        (name, True) for name in COMPONENTS
    ]
    tensors = [(tensor["component"], tensor["name"]) for tensor in plan["tensors"]]
    assert tensors == [(name, tensor) for name in COMPONENTS for tensor in wan_tensors()]
    made, sizes = quantize(wan, out).json, ("source_bytes", "output_bytes")
    assert [made[key] for key in sizes] == [plan[key] for key in sizes]
    used = disk_nbytes(out)
    assert used <= plan["peak_disk_bytes"] <= 1.1 * used + 100_000 * (1 + len(COMPONENTS))
    drawn = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q2", "--dry-run").out
    assert "outside transformer and transformer_2" in drawn
    weights = sum((wan / name / f"{DIFFUSERS}.safetensors").stat().st_size for name in COMPONENTS)
    assert plan["seconds_estimated"]["reading"]["at_100_mb_per_second"] == pytest.approx(
        (weights + copied) / 1e8
    )


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
        done("dequantize", out, "--subfolder", name, "-o", tmp_path / f"d-{name}", "-q")
        assert read_folder(tmp_path / f"d-{name}").keys() == wan_tensors().keys()


def test_the_folder_that_is_named_stands_in_the_place_of_the_pipeline(wan, tmp_path):
    """Whichever of a command's checkpoints it is: one --subfolder is not for all of them."""
    out = tmp_path / "q"
    assert quantize(wan, out).code == 0
    source, one = wan / COMPONENTS[0], out / COMPONENTS[0]
    scaled = ("quantize", source, "--format", "nvfp4", "-o", tmp_path / "p")
    for place, words in {
        wan: ("verify", one, "--source"),
        out: ("compare", one, "--source", source),
        f"{out}/": (*scaled, "--global-scale"),
    }.items():
        step = run(*words, place, "--json").json["error"]["next"]
        assert step.startswith("Name the folder: ")
        done(*words, step.removeprefix("Name the folder: "))


def test_a_folder_of_a_pipeline_is_called_by_its_own_name(wan, tmp_path):
    out = tmp_path / "q"
    assert quantize(wan, out).code == 0
    outcome = run("inspect", out, "--subfolder", "vae", "--json")
    assert error_of(outcome)[:2] == (2, "not-an-artifact")
    assert str(out / "vae") in outcome.json["error"]["next"]


def test_an_unfinished_component_says_so(wan, tmp_path):
    out = tmp_path / "q"
    assert quantize(wan, out).code == 0
    (out / "transformer" / RECORD).unlink()
    found = run("inspect", out, "--subfolder", "transformer", "--json")
    assert (found.code, [finding["code"] for finding in found.json["findings"]]) == (
        6,
        ["unfinished"],
    )


def test_merge_ends_a_pipeline_only_where_its_components_are_whole(wan, tmp_path):
    out = tmp_path / "q"
    made = quantize(wan, out)
    assert run("merge", out, "--json").json["digest"] == made.json["digest"]
    (shard,) = (out / "transformer_2").glob("*.safetensors")
    sound = shard.read_bytes()
    broken = {"damaged": sound[:-1] + bytes([sound[-1] ^ 1]), "unfinished": sound[:-1]}
    for code, data in broken.items():
        (out / PIPELINE).unlink()
        shard.write_bytes(data)
        outcome = run("merge", out, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (5, code)
        assert "transformer_2: 1 " in outcome.json["error"]["message"]
        assert not (out / PIPELINE).exists()
        assert quantize(wan, out).json["digest"] == made.json["digest"]
    shutil.rmtree(out / "transformer" / ".fp4convert")
    assert run("merge", out, "--json").json["error"]["code"] == "unfinished"


@pytest.mark.parametrize("after", ["flux", "llama"])
def test_what_takes_a_pipelines_place_leaves_none_of_its_components(after, wan, tmp_path):
    """But files that fp4convert did not write."""
    make = {"flux": write_flux, "llama": write_llama}[after]
    source, out = make(tmp_path / after), tmp_path / "q"
    clean = quantize(source, tmp_path / "clean")
    assert quantize(wan, out).code == 0
    (out / "transformer_2" / "notes.txt").write_text("mine")
    forced = run("quantize", source, "--format", "nvfp4", "-o", out, "--json", "--force")
    assert (forced.code, forced.json["digest"]) == (0, clean.json["digest"])
    found = {
        str(path.relative_to(out)) for path in out.rglob("*") if ".fp4convert" not in str(path)
    }
    clean_names = {
        str(path.relative_to(tmp_path / "clean")) for path in (tmp_path / "clean").rglob("*")
    }
    expected = {name for name in clean_names if ".fp4convert" not in name}
    assert found == {*expected, "transformer_2", "transformer_2/notes.txt"}


def test_no_component_goes_where_another_is_refused(wan, tmp_path):
    source, out = write_flux(tmp_path / "flux"), tmp_path / "q"
    made = quantize(source, out)
    before = files_of(out)
    (out / "transformer_2").mkdir()
    (out / "transformer_2" / "notes.txt").write_text("mine")
    outcome = quantize(wan, out, "--force")
    assert error_of(outcome)[:2] == (5, "foreign-output")
    (out / "transformer_2" / "notes.txt").unlink()
    with Leases(out / "transformer" / ".fp4convert" / "claims", work="another"):
        assert error_of(quantize(wan, out, "--force"))[:2] == (5, "locked")
    assert files_of(out) == before
    assert run("merge", out, "--json").json["digest"] == made.json["digest"]


def test_whoever_is_killed_leaves_no_component_behind(wan, tmp_path, monkeypatch):
    source, out = write_flux(tmp_path / "flux"), tmp_path / "q"
    assert quantize(wan, out).code == 0
    remove = OutputFolder.remove

    def die(self: OutputFolder, file: str) -> None:
        if file.startswith("transformer_2/") and file.endswith(".safetensors"):
            raise KeyboardInterrupt
        remove(self, file)

    monkeypatch.setattr(OutputFolder, "remove", die)
    quantize(source, out, "--force")
    assert (out / "transformer_2").exists()
    monkeypatch.undo()
    assert quantize(source, out, "--force").code == 0
    assert not (out / "transformer_2").exists()


def test_merge_wants_the_plan_of_every_component(wan, tmp_path, monkeypatch):
    """One that an earlier command began is not what the whole was begun for."""
    out = tmp_path / "q"
    made = quantize(wan, out)
    (out / PIPELINE).unlink()

    def die(self: Conversion, settings: object) -> None:
        raise KeyboardInterrupt

    words = ("--exclude", "*to_out*")
    monkeypatch.setattr(Conversion, "begin", die)
    quantize(wan, out, *words)
    monkeypatch.undo()
    assert run("merge", out, "--json").json["error"]["code"] == "unfinished"
    assert not (out / PIPELINE).exists()
    changed = quantize(wan, out, *words)
    assert changed.code == 0
    assert changed.json["digest"] != made.json["digest"]
    # A plan of an earlier version does not name its parts: whoever goes on adds them.
    plan = read_manifest(out)
    bare = json.dumps(replace(plan, parts={}).as_json())
    (out / PLAN_FILE).write_text(bare)
    quantize(wan, out, *words)
    assert read_manifest(out).parts == plan.parts


def test_a_restored_transformer_has_the_index_that_diffusers_reads(tmp_path):
    assert quantize(write_flux(tmp_path / "flux"), tmp_path / "q").code == 0
    done("dequantize", tmp_path / "q", "--subfolder", "transformer", "-o", tmp_path / "d", "-q")
    assert files_of(tmp_path / "d").keys() == {
        DIFFUSERS_FIRST,
        DIFFUSERS_SECOND,
        DIFFUSERS_INDEX,
        "config.json",
    }
    assert (
        json.loads((tmp_path / "d" / "config.json").read_text())["_class_name"]
        == "FluxTransformer2DModel"
    )


def test_weights_beside_model_index_json_are_left_out_and_told(wan, tmp_path):
    (wan / "wan-one-file.safetensors").write_bytes(b"another form of the same weights")
    outcome = done("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q")
    assert (
        "warning: 1 weight files next to model_index.json are not part of the pipeline"
        in outcome.err
    )
    assert not (tmp_path / "q" / "wan-one-file.safetensors").exists()


def test_warnings_say_of_which_component_they_are(wan, tmp_path):
    (wan / COMPONENTS[1] / "modeling.py").write_bytes(b"pass")
    loud = run("quantize", wan, "--format", "nvfp4", "-o", tmp_path / "q")
    assert f"warning: {COMPONENTS[1]}: the model has custom code" in loud.err
    outcome = quantize(wan, tmp_path / "q")
    planned = quantize(wan, tmp_path / "q", "--dry-run").json["warnings"]
    for warnings in (planned, outcome.json["warnings"]):
        told = [warning for warning in warnings if "custom code" in warning]
        assert [warning.partition(":")[0] for warning in told] == [COMPONENTS[1]]
    assert "warnings" not in outcome.json["components"][0]


def test_a_pattern_has_to_match_a_module_of_some_component(wan, tmp_path):
    assert error_of(quantize(wan, tmp_path / "q", "--exclude", "nothing"))[:2] == (
        2,
        "unmatched-pattern",
    )
    only = "blocks.7.extra"
    component = wan / COMPONENTS[1]
    shard = component / f"{DIFFUSERS}.safetensors"
    tensors = read_folder(component) | {f"{only}.weight": weight()}
    shard.write_bytes(pack_shard(tensors))
    assert quantize(wan, tmp_path / "q", "--exclude", only).code == 0


def test_a_pipeline_of_which_nothing_is_quantized_is_refused(wan, tmp_path):
    assert error_of(quantize(wan, tmp_path / "q", "--exclude", "*"))[:2] == (2, "no-linears")
    assert not (tmp_path / "q").exists()


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
    assert (
        outcome.json["error"]["next"]
        == "Name the folder of the checkpoint: --subfolder unet, for example."
    )
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
        link, blob = (
            root / "snapshots" / "abc" / name,
            root / "blobs" / hashlib.sha256(str(name).encode()).hexdigest(),
        )
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
    source = write_others(
        tmp_path / "m", {**FLUX_INDEX, "transformer": ["diffusers", "FluxTransformer2DModel"]}
    )
    (source / "one.safetensors").write_bytes(
        (
            write_component(tmp_path / "x", [{"a.weight": weight()}], {})
            / f"{DIFFUSERS}.safetensors"
        ).read_bytes()
    )
    assert quantize(source / "one.safetensors", tmp_path / "q").code == 0
