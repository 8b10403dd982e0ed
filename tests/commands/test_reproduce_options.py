"""Every option that changes bytes is in the record: options two by two, on sources that have what
they are for. Each artifact is made again from its record alone; and of two runs whose records have
equal options, the bytes are equal, however the work was done.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
from checkpoints import bf16, run, write_single
from fp4_sources import make_deepseek_v4
from gguf_donors import model, write_donor
from made_up_inputs import calibrate
from peft_models import make_llama, write_adapter
from safetensors.torch import load_file, save_file

from fp4convert.options.writing import QuantizeOptions

RECORD = "quantization_config.json"
LAYER = "model.layers.0.mlp.experts"
TOML = '[[keep]]\nmodules = ["*.k_proj"]\nreason = "a test"\n'
# By source, then by a name: the words of one choice, with all that it needs. {x} are files.
AMAX = ("--scale-rule", "amax")
GPTQ = ("--method", "gptq", "--calibration", "{gram}")
CHOICES = {
    "llama": {
        "mxfp4": ("--format", "mxfp4"),
        "fp8": ("--format", "fp8"),
        "mxfp8": ("--format", "mxfp8"),
        "modelopt": ("--dialect", "modelopt"),
        "quark": ("--dialect", "quark"),
        "plain": ("--dialect", "plain"),
        "comfy": ("--dialect", "comfy"),
        "mlx": ("--dialect", "mlx"),
        "a4": ("--activations", "4"),
        "a8": ("--format", "fp8", "--activations", "8"),
        "cache": ("--kv-cache", "fp8"),
        "size": ("--target-size", "{size}"),
        "bits": ("--target-bits", "5.5"),
        "keep-dtype": ("--keep-dtype", "fp16"),
        "pad": ("--pad-for-tp", "16"),
        "gptq": GPTQ,
        "awq": ("--method", "awq", "--calibration", "{gram}"),
        "damping": (*GPTQ, "--damping", "0.02"),
        "passes": (*GPTQ, "--passes", "1"),
        "importance": ("--calibration", "{gram}", "--scale-rule", "importance"),
        "amax": AMAX,
        "even": ("--format", "mxfp4", "--scale-rule", "even"),
        "inputs": ("--activations", "4", "--input-scale", "0.5"),
        "inputs-folder": ("--activations", "4", "--input-scale", "{inputs}"),
        "inputs-file": ("--activations", "4", "--input-scale", "{gram}"),
        "scales-folder": ("--global-scale", "{scales}"),
        "scales-file": ("--global-scale", "{numbers}"),
        "via": ("--via", "fp8"),
        "lora": ("--lora", "{lora}"),
        "lora-scale": ("--lora", "{lora}", "--lora-scale", "0.5"),
        "exclude": ("--exclude", "*.o_proj"),
        "include": ("--include", "lm_head"),
        "recipe": ("--recipe", "mlp_only"),
        "recipe-file": ("--recipe", "{toml}"),
    },
    "stacks": {
        "out-in": ("--stack-order", "out_in", "--stack-rows", "concatenated"),
        "in-out": ("--stack-order", "in_out", "--stack-rows", "interleaved"),
        "rows": ("--stack-order", "in_out", "--stack-rows", "concatenated"),
        "mxfp4": ("--stack-order", "in_out", "--stack-rows", "concatenated", "--format", "mxfp4"),
        "amax": ("--stack-order", "out_in", "--stack-rows", "concatenated", *AMAX),
    },
    "packed": {
        "draft-keep": ("--draft", "keep"),
        "draft-same": ("--draft", "same"),
        "keep-packed": ("--keep-packed",),
        "modelopt": ("--dialect", "modelopt"),
        "exclude": ("--exclude", "*.shared_experts.*"),
    },
    "gguf": {
        "folder": ("--config", "{config}"),
        "gguf": ("--dialect", "gguf"),
        "mxfp4": ("--dialect", "gguf", "--format", "mxfp4"),
        "modelopt": ("--config", "{config}", "--dialect", "modelopt"),
        "exclude": ("--config", "{config}", "--exclude", "*.o_proj"),
        "keep": ("--dialect", "gguf", "--keep-dtype", "q8_0"),
    },
}
HOW = ("--workers", "1"), ("--workers", "3")
# Of a repository: tests/commands/test_reproduce.py; of two checkpoints: conversion/test_base.py.
ELSEWHERE = {"subfolder", "base"}
GIVEN = ("--calibration", "--lora", "--global-scale", "--input-scale", "--recipe", "--config")
LEAST = {"llama": 150, "stacks": 2, "packed": 6, "gguf": 3}  # of pairs; others are refused
CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The sources, and what options name."""
    folder = tmp_path_factory.mktemp("options")
    llama = make_llama(folder / "llama")
    tensors = load_file(llama / "model.safetensors")
    wide = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].float()}
    save_file({**tensors, **wide}, llama / "model.safetensors", {"format": "pt"})
    gram = calibrate(folder / "gram.safetensors", llama, "full")
    lora = write_adapter(llama, folder / "lora", {"r": 4, "target_modules": ["q_proj"]})
    toml = folder / "own.toml"
    toml.write_text(TOML)
    made = {}
    for name, more in (("scales", ()), ("inputs", ("--activations", "4", "--input-scale", "0.25"))):
        made[name] = folder / name
        words = ("--format", "nvfp4", "--scale-rule", "amax", *more)
        assert run("quantize", llama, *words, "-o", made[name], "-q").code == 0
    numbers = folder / "numbers.json"
    numbers.write_text(json.dumps(dict.fromkeys(linears_of(llama), 2.0**-9)))
    size = planned(llama)["output_bytes"] * 1.05 / 1e9
    stacks = {
        f"{LAYER}.gate_up_proj": ("BF16", (2, 64, 64), bf16(2, 64, 64)),
        f"{LAYER}.down_proj": ("BF16", (2, 64, 64), bf16(2, 64, 64, seed=1)),
    }
    config = folder / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    donor = write_donor(folder / "m.gguf", model())
    return {
        "llama": llama,
        "stacks": write_single(folder / "stacks", stacks, {"model_type": "unheard_of"}),
        "packed": make_deepseek_v4(folder / "packed").folder,
        "gguf": donor,
        "gram": gram,
        "lora": lora,
        "toml": toml,
        "numbers": numbers,
        "size": f"{size:.9f}",
        "config": config,
        **made,
    }


def planned(source: Path) -> dict:
    return run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json


def linears_of(source: Path) -> list[str]:
    """The modules that become four-bit, by the plan."""
    tensors = planned(source)["tensors"]
    return [one["name"].removesuffix(".weight") for one in tensors if one["action"] == "quantize"]


def joined(*choices: tuple[str, ...]) -> dict[str, str] | None:
    """The options of several choices; None where one option would have two values."""
    found: dict[str, str] = {}
    for words in choices:
        pairs = zip(words, (*words[1:], "--"), strict=True)
        for word, value in (
            (w, "" if v.startswith("--") else v) for w, v in pairs if w[:2] == "--"
        ):
            if found.setdefault(word, value) != value:
                return None
    return found


def digest_of(folder: Path) -> str:
    """Of all files but the record and the report."""
    hashes = sorted(
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
        and ".fp4convert" not in path.parts
        and path.name not in (RECORD, "quantization_report.json", "README.md")
    )
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def test_no_option_that_changes_bytes_is_left_out():
    told = {word for choices in CHOICES.values() for words in choices.values() for word in words}
    names = {word[2:].replace("-", "_") for word in told if word.startswith("--")}
    makes_bytes = {*QuantizeOptions("", format="nvfp4").that_make_bytes(), "config", "format"}
    assert names | ELSEWHERE == makes_bytes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", CHOICES)
def test_options_two_by_two_are_in_the_record(source, files, tmp_path):
    choices, found, made = CHOICES[source], defaultdict(dict), 0
    for number, names in enumerate([*((name,) for name in choices), *combinations(choices, 2)]):
        options = joined(*(choices[name] for name in names))
        if options is None:
            continue
        options.setdefault("--format", "nvfp4")
        given = {option: value.format(**files) for option, value in options.items()}
        words = [word for pair in given.items() for word in pair if word]
        out, alone = tmp_path / f"{number}", tmp_path / f"{number}.json"
        how = HOW[number % 2]
        outcome = run("quantize", files[source], "-o", out, *how, *words, "--json", "-q")
        if outcome.code == 2:  # some do not go together
            assert len(names) > 1, (names, outcome.json)
            continue
        assert outcome.code == 0, (names, outcome)
        made += len(names) == 2
        shutil.copy(out / RECORD, alone)
        asked = json.dumps(json.loads(alone.read_text())["options"], sort_keys=True)
        found[asked].setdefault(digest_of(out), names)
        assert len(found[asked]) == 1, (asked, found[asked])  # no option is left out
        again = [
            word
            for option in GIVEN
            if option in given and Path(given[option]).exists()
            for word in (option, given[option])
        ]
        again += ["--source", files[source], "--json", *HOW[1 - number % 2]]
        outcome = run("reproduce", alone, *again)
        assert outcome.code == 0, (names, outcome)
        assert outcome.json["reproduced"] is True
        shutil.rmtree(out)
    assert made >= LEAST[source]
