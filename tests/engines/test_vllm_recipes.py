"""`recipes FAMILY --for vllm --yaml`: fields and words as vllm-project/recipes documents them,
variants as vLLM loaded them, commands that run.  That repository's own builder
(scripts/build-recipes-api.mjs, 2026-08-21) took Qwen3-30B-A3B's file with them.
"""

import re
import shlex
import tomllib

import pytest
import yaml
from checkpoints import done, run, write_llama
from paths import ROOT

# CONTRIBUTING.md there, "YAML schema (authoritative)".
FIELDS = {"model_id", "precision", "vram_minimum_gb", "description", "extra_args", "extra_env"}
PRECISIONS = {"bf16", "fp8", "nvfp4", "fp4", "int4", "int8", "awq", "gptq", "mxfp4"}
LOADED = tomllib.loads((ROOT / "configs" / "engines" / "loaded" / "vllm.toml").read_text("utf-8"))


def variants(family: str) -> dict[str, dict[str, object]]:
    (file,) = yaml.safe_load_all(done("recipes", family, "--for", "vllm", "--yaml").out)
    assert file.keys() == {"variants"}
    return file["variants"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_variants_are_of_that_schema_and_vllm_loaded_each(family):
    made = variants(family)
    forms = ["mxfp4"] if family == "gpt_oss" else ["nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp4_w4a4"]
    assert sorted(made) == sorted(forms)
    rows = [row.split() for row in LOADED["rows"].splitlines()]
    for variant in made.values():
        assert variant.keys() <= FIELDS
        assert variant["precision"] in PRECISIONS
        (name,) = re.findall(r"\((\w+)\)", variant["description"])
        fitting = [row for row in rows if row[0] == name and variant["precision"] in row[2]]
        assert any(len(row) == 4 for row in fitting)


def test_its_commands_make_what_vllm_loads(tmp_path):
    source = write_llama(tmp_path / "m")
    for key, variant in variants("llama").items():
        (line,) = re.findall("`fp4convert (.*?)`", variant["description"])
        words = [word.replace("ORG/NAME", str(source)) for word in shlex.split(line)]
        done(*words, "-o", tmp_path / key)
        assert run("inspect", tmp_path / key, "--for", "vllm").code == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [("bert --for vllm --yaml", "engine-refuses"), ("llama --yaml", "usage")],
)
def test_what_cannot_be_written_is_refused(words, code):
    ended = run("recipes", *words.split(), "--json")
    assert (ended.code, ended.json["error"]["code"]) == (2, code)
