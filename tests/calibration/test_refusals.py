"""What calibrate refuses: one sentence, its exit code, and nothing written."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import run, write_llama
from tiny_chains import make_model, write_tokenizer
from tiny_models import read_tensors

pytestmark = pytest.mark.engine


@pytest.fixture
def llama(tmp_path) -> Path:
    return make_model(tmp_path / "llama", "Llama")


def refuse(folder: Path, *options: object) -> dict:
    """The error of a calibration, beside whose file nothing is left."""
    output = folder.parent / "c.safetensors"
    before = sorted(folder.parent.iterdir())
    outcome = run("calibrate", folder, "-o", output, *options, "--json")
    assert sorted(folder.parent.iterdir()) == before
    error = outcome.json["error"]
    assert outcome.code == error["exit"]
    assert "\n" not in error["message"]
    assert error["next"]
    return error


def store(folder: Path, tensors: dict) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_tokenizer_that_is_absent(llama, words):
    (llama / "tokenizer.json").unlink()
    (llama / "tokenizer_config.json").unlink()
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("no-tokenizer", 2)
    assert error["message"] == "the source has no tokenizer"
    assert "--self-generate" in error["next"]
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    (llama / "tokenizer.json").write_text("{}")
    assert refuse(llama, "--text", words)["message"].endswith(
        "code that comes with the checkpoint, which is never run"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_named(llama, words, value):
    tensors = read_tensors(llama)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    store(llama, tensors)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("calibration-nan", 2)
    assert error["tensor"] == "model.layers.1.mlp.down_proj"
    assert "sample 0" in error["message"]


def test_code_that_comes_with_a_checkpoint_is_not_run(llama, words, tmp_path):
    (llama / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_own.Own")
    edit(llama, model_type="own", auto_map=code)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("calibration-model", 2)
    assert "never run" in error["message"]
    assert not (tmp_path / "ran").exists()


def test_models_that_read_no_tokens_or_that_nobody_knows(llama, words):
    edit(llama, model_type="vit", architectures=["ViTForImageClassification"], auto_map={})
    error = refuse(llama, "--text", words)
    assert error["code"] == "calibration-model"
    assert "reads pixel_values; expected a model that reads text" in error["message"]
    edit(llama, model_type="nothing-known", architectures=["Nothing"])
    assert refuse(llama, "--text", words)["code"] == "calibration-model"


def test_a_type_that_is_not_known_of_a_class_that_is(llama, words):
    """As Kimi K2 is published: code beside it, of a class that transformers has itself."""
    code = {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}
    edit(llama, model_type="own", auto_map=code)
    done = run("calibrate", llama, "-o", llama.parent / "c.safetensors", "--text", words, "--json")
    assert (done.code, done.json["linears"]) == (0, 22)


@pytest.mark.parametrize(
    ("changes", "words_said"),
    [
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"intermediate_size": "a"}, "expected int, got str"),
        ({"hidden_act": "nope"}, "it has nothing called 'nope'"),
        ({"architectures": 5}, "cannot build the model of config.json"),
    ],
)
def test_configs_that_transformers_takes_no_model_from(llama, words, changes, words_said):
    edit(llama, **changes)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("calibration-model", 2)
    assert words_said in error["message"]


def test_weights_that_the_model_needs_and_are_not_there(llama, words):
    tensors, name = read_tensors(llama), "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    store(llama, tensors)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"], error["tensor"]) == ("calibration-weights", 2, name)
    edit(llama, intermediate_size=64)
    assert refuse(llama, "--text", words)["code"] == "calibration-weights"


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn."])
def test_weights_of_float64_are_not_read(llama, words, part):
    """In all of the model, or in all of an attention, whose cache is calibrated under its name."""
    tensors = read_tensors(llama)
    store(llama, {k: v.double() if k.startswith(part) else v for k, v in tensors.items()})
    error = refuse(llama, "--text", words)
    assert error["code"] == "calibration-model"
    assert "save it as float32 first" in error["next"]


def test_a_folder_without_a_config(tmp_path, words):
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").unlink()
    assert refuse(folder, "--text", words)["code"] == "calibration-model"


def test_transformers_that_is_not_installed(llama, words, monkeypatch):
    imported = builtins.__import__

    def without(name, *arguments, **options):
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("no-transformers", 2)
    assert error["next"].endswith("[calibrate]'")


def test_text_that_is_none(llama, words, tmp_path):
    assert refuse(llama)["code"] == "no-text"
    assert refuse(llama, "--text", words, "--self-generate", 2)["code"] == "no-text"
    os.mkfifo(tmp_path / "pipe")
    for name, found, step in (
        ("absent", "no such file", "typing error"),
        ("pipe", "is a pipe or a device, and text is read more than once", "into a file"),
        ("llama", "is a folder", "Name the files in it"),
    ):
        error = refuse(llama, "--text", tmp_path / name)
        assert (error["code"], found in error["message"]) == ("no-text", True)
        assert step in error["next"]
    words.write_text("a")
    assert refuse(llama, "--text", words)["code"] == "no-text"
    words.write_bytes(b"\xff\xfe")
    assert refuse(llama, "--text", words)["code"] == "bad-text"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "a"}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"text": "a \\ud800 b"}',
        '{"text": 5}',
    ],
)
def test_data_sets_that_are_none(llama, tmp_path, line):
    data = tmp_path / "data.jsonl"
    data.write_text(line)
    error = refuse(llama, "--dataset", data)
    assert (error["code"], error["exit"]) == ("bad-dataset", 2)


@pytest.mark.parametrize(
    ("template", "line", "why"),
    [
        (None, {"messages": [{"role": "user", "content": "a"}]}, "has no chat template"),
        ("{{ raise_exception('roles alternate') }}", {"messages": [{}]}, "roles alternate"),
        ("{{ messages[0].content + 1 }}", {"conversations": [{"from": "a", "value": "b"}]}, "fit"),
        ("{{ messages.clear() }}", {"messages": [{}]}, "fit"),
    ],
)
def test_conversations_that_cannot_be_written(template, line, why, llama, tmp_path):
    source = shutil.copytree(llama, tmp_path / "m")
    if template:
        (source / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "abc"}\n' + json.dumps(line))
    error = refuse(source, "--chat", data)
    assert (error["code"], error["exit"]) == ("bad-dataset", 2)
    assert f"{data}: record 2 " in error["message"]
    assert why in error["message"]


def test_options_that_cannot_be(llama, words):
    for option, values, code in (
        ("--gram", ("block:0", "half"), "unknown-gram"),
        ("--device", ("tpu", "cuda:99"), "no-device"),
        ("--sequence-length", (1, 41), "bad-number"),
        ("--samples", (0,), "bad-number"),
    ):
        for value in values:
            assert refuse(llama, "--text", words, option, value)["code"] == code


def test_an_encoder_writes_no_text(tmp_path):
    folder = make_model(tmp_path / "bert", "Bert")
    assert refuse(folder, "--self-generate", 2)["code"] == "no-text"


def test_experts_that_cannot_be_looked_into(tmp_path, words, monkeypatch):
    """A class of experts that is not known: no warning says that no text goes through them, and
    prune tells why the file is not enough.
    """
    import transformers

    from fp4convert.calibration.experts import KINDS

    monkeypatch.delitem(KINDS, "DbrxExperts")
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 32}
    attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
    experts["ffn_act_fn"] = {"name": "silu"}
    folder, file = tmp_path / "dbrx", tmp_path / "c.safetensors"
    config = transformers.DbrxConfig(**sizes, attn_config=attention, ffn_config=experts)
    transformers.DbrxForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    given = ("--text", words, "--sequence-length", 32, "--samples", 6)
    found = run("calibrate", folder, "-o", file, *given, "--json").json
    assert [warning.partition(" (")[0] for warning in found["warnings"]] == ["24 linear layers"]
    assert "calibrate cannot observe; prune does not take this file" in found["warnings"][0]
    given = ("--calibration", file, "--keep", 2)
    error = run("prune", folder, "-o", tmp_path / "p", *given, "--json").json["error"]
    assert (error["code"], error["exit"]) == ("calibration-missing", 2)
    assert error["message"].endswith("calibrate cannot observe the experts of dbrx models")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_a_folder_of_somebody_else_where_the_parts_would_be(is_link, llama, words):
    state = llama.parent / ".c.safetensors.calibration"
    mine = llama.parent / "mine" if is_link else state
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    if is_link:
        (mine / "for.json").write_text("{}")
        state.symlink_to(mine)
    error = refuse(llama, "--text", words)
    assert (error["code"], error["exit"]) == ("foreign-output", 5)
    assert (mine / "thesis.tex").read_text() == "years of work"


def test_a_lock_that_is_a_link_to_a_file_of_somebody_else(llama, words):
    state = llama.parent / ".c.safetensors.calibration"
    state.mkdir()
    (llama.parent / "thesis.tex").write_text("years of work")
    (state / "lock").symlink_to(llama.parent / "thesis.tex")
    assert refuse(llama, "--text", words)["code"] == "foreign-output"
    assert (llama.parent / "thesis.tex").read_text() == "years of work"
