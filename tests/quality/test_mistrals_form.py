"""Models in Mistral's own form are told of: vLLM and SGLang do not load them quantized.

vLLM 0.33 was run by hand on both kinds: rows of wq and wk come in another order than the codes
say, and a record with `wkv_a_with_mqa` is a KeyError.
"""

import json

import pytest
from checkpoints import pack_shard, run, weight

HUGGING_FACE = "the Hugging Face form of the same release"
DENSE = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1")
LATENT = ("attention.wq_a", "attention.wkv_a_with_mqa", "attention.wq_b", "attention.wo")
KINDS = {
    "dense": (DENSE, (), "reorders rows of wq and wk"),
    "latent": (LATENT, ("--recipe", "mistral_large_3"), "not Mistral's (wq_a)"),
}


def write(folder, leaves, file="consolidated.safetensors"):
    folder.mkdir()
    tensors = {f"layers.0.{leaf}.weight": weight(seed) for seed, leaf in enumerate(leaves)}
    tensors["tok_embeddings.weight"] = weight(9, 96, 64)
    (folder / file).write_bytes(pack_shard(tensors))
    (folder / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 1}))
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_for_an_engine_it_is_refused_with_the_way_out(kind, engine, tmp_path):
    leaves, options, why = KINDS[kind]
    source, out = write(tmp_path / "m", leaves), tmp_path / "out"
    outcome = run("quantize", source, "--for", engine, *options, "-o", out, "--json")
    assert (outcome.code, out.exists()) == (2, False)
    error = outcome.json["error"]
    assert error["code"] == "engine-refuses"
    assert HUGGING_FACE in error["next"]
    assert engine != "vllm" or why in error["message"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_engine_it_is_a_warning_and_inspect_says_so(kind, tmp_path):
    leaves, options, why = KINDS[kind]
    source, out = write(tmp_path / "m", leaves), tmp_path / "out"
    words = ("quantize", source, "--format", "nvfp4", *options, "--json")
    for outcome in (run(*words, "--dry-run"), run(*words, "-o", out)):
        assert outcome.code == 0
        told = outcome.json["warnings"]
        assert any(line.startswith("vLLM") and why in line for line in told)
        assert any(line.startswith("SGLang") and HUGGING_FACE in line for line in told)
    document = run("inspect", out, "--json").json
    assert not [each["engine"] for each in document["engines"] if each["loads"]]
    lines = run("inspect", out).out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("not in")] == [
        *("vllm", "sglang", "transformers")
    ]
    for engine in ("vllm", "sglang"):
        outcome = run("inspect", out, "--for", engine, "--json")
        assert outcome.code == 6
        assert "engine-refuses" in {each["code"] for each in outcome.json["findings"]}


def test_other_files_with_these_names_are_read_in_the_wrong_order_by_vllm_too(tmp_path):
    source, out = write(tmp_path / "m", DENSE, "model.safetensors"), tmp_path / "out"
    outcome = run("quantize", source, "--for", "vllm", "-o", out, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "engine-refuses")
    assert "reorders rows of wq and wk" in outcome.json["error"]["message"]


def test_the_hugging_face_form_beside_it_is_taken(tmp_path):
    source, out = write(tmp_path / "m", DENSE), tmp_path / "out"
    module = "model.layers.0.self_attn.q_proj"
    (source / "model.safetensors").write_bytes(pack_shard({f"{module}.weight": weight()}))
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (source / "config.json").write_text(json.dumps(config))
    assert run("quantize", source, "--for", "vllm", "-o", out).code == 0
