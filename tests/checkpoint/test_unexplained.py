"""What the class of a model does not have is named by every command, stays, and stops no engine's
line in silence.
"""

import pytest
from checkpoints import pack_shard, read_folder, read_shard, run, weight
from families import FAMILIES
from family import build
from tiny_models import make_llama

VALUE_HEAD = "v_head.summary.weight"


@pytest.fixture
def source(tmp_path):
    """A Llama with the value head of a reward model, which its class does not have."""
    folder = make_llama(tmp_path / "m")
    (shard,) = folder.glob("*.safetensors")
    columns = read_shard(shard)["model.norm.weight"][1][0]
    shard.write_bytes(pack_shard({**read_shard(shard), VALUE_HEAD: weight(3, 8, columns)}))
    return folder


def named(document):
    return [one["name"] for one in document["unexplained"]]


def test_plan_result_and_inspect_name_it(source, tmp_path):
    words = ("quantize", source, "--format", "nvfp4", "--json")
    plan, made = run(*words, "--dry-run").json, run(*words, "-o", tmp_path / "out")
    (row,) = (row for row in plan["tensors"] if row["name"] == VALUE_HEAD)
    assert (row["action"], named(plan)) == ("copy", [VALUE_HEAD])
    assert row["reason"] == "unexplained: LlamaForCausalLM has no such parameter"
    assert (made.code, named(made.json)) == (0, [VALUE_HEAD])
    assert "1 tensor unexplained" in " ".join(made.json["warnings"])
    before, after = read_folder(source), read_folder(tmp_path / "out")
    assert after[VALUE_HEAD] == before[VALUE_HEAD]
    found = run("inspect", tmp_path / "out", "--json")
    assert named(found.json) == [VALUE_HEAD]
    assert [(one["level"], one["code"]) for one in found.json["findings"]] == [
        ("warning", "unexplained")
    ]


def test_include_decides_before_the_class(source, tmp_path):
    words = ("--format", "nvfp4", "--include", "v_head.*", "-o", tmp_path / "out")
    assert run("quantize", source, *words).code == 0
    assert VALUE_HEAD not in read_folder(tmp_path / "out")


def test_a_lack_in_one_layer_stops_the_line_of_an_engine(source, tmp_path):
    (shard,) = source.glob("*.safetensors")
    lost = "model.layers.1.post_attention_layernorm.weight"
    shard.write_bytes(
        pack_shard({name: one for name, one in read_shard(shard).items() if name != lost})
    )
    words = ("quantize", source, "--for", "vllm", "-o", tmp_path / "out", "--json")
    error = run(*words).json["error"]
    assert (error["exit"], error["code"]) == (2, "module-missing")
    assert error["tensor"] == lost.removesuffix(".weight")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["granitemoehybrid", "gpt_oss", "llama4"])
def test_experts_cut_from_stacks_are_explained_in_the_result(name, tmp_path):
    """Also of stacks whose own name ends in .weight."""
    (family,) = (one for one in FAMILIES if one.name == name)
    source, out = build(family, tmp_path / "m"), tmp_path / "out"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    document = run("inspect", out, "--json").json
    codes = {one["code"] for one in document["findings"]}
    assert codes.isdisjoint({"module-missing", "unexplained"})
