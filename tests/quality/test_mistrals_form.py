"""Models in Mistral's own form are told of: vLLM and SGLang do not load them quantized.

vLLM 0.33 was run by hand on both kinds: rows of wq and wk come in another order than the codes
say, and a record with `wkv_a_with_mqa` is a KeyError.
"""

import json
import struct

import pytest
from checkpoints import done, pack_shard, run, weight

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


FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
PARAMS = {"dim": 64, "n_layers": 1}


def write_fp8(folder, scale=0.001, act="F32", **record):
    """One scale a matrix and one for its inputs, and a cache's own, as Mistral ships them."""
    folder.mkdir()
    tensors = {"tok_embeddings.weight": weight(9, 96, 64)}
    for leaf in DENSE:
        module = f"layers.0.{leaf}"
        tensors[f"{module}.weight"] = ("F8_E4M3", (64, 64), bytes(range(0x20, 0x60)) * 64)
        tensors[f"{module}.qscale_weight"] = ("F32", (), struct.pack("<f", scale))
        if act:
            tensors[f"{module}.qscale_act"] = (act, (1,), struct.pack("<f", 0.5))
    tensors["layers.0.attention.k_fake_quantizer.qscale_act"] = ("F32", (), bytes(4))
    (folder / "consolidated.safetensors").write_bytes(pack_shard(tensors))
    quantization = {**FP8, **record}
    (folder / "params.json").write_text(json.dumps({**PARAMS, "quantization": quantization}))
    return folder


def test_its_fp8_is_judged_as_other_fp8_is(tmp_path):
    found = done("inspect", write_fp8(tmp_path / "m"), "--json").json
    assert (found["format"], found["dialect"], found["granularity"]) == ("fp8", "mistral", "tensor")
    assert (found["tensors"]["quantized"], found["activations"]) == (len(DENSE), 8)
    loads = {one["engine"]: (one["loads"], one["evidence"]) for one in found["engines"]}
    assert loads["vllm"] == loads["sglang"] == (None, "read")  # which both have names for
    assert loads["transformers"][0] is False
    assert done("inspect", write_fp8(tmp_path / "d", act="", qscheme_act="NO_SCALES"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"scale": float("nan")}, "scale-not-finite"),
        ({"scale": -1.0}, "scale-negative"),
        ({"qformat_weight": "int4"}, "not-an-artifact"),
    ],
)
def test_faults_of_its_scales_are_named(words, code, tmp_path):
    outcome = run("inspect", write_fp8(tmp_path / "m", **words), "--json")
    if code == "not-an-artifact":
        assert outcome.json["error"]["code"] == code
        return
    assert outcome.code == 6
    assert code in {one["code"] for one in outcome.json["findings"]}


def test_results_no_longer_say_that_they_are_fp8(tmp_path):
    """vLLM 0.33 takes "quantization" of params.json for the record."""
    source = write_fp8(tmp_path / "m")
    done("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q")
    done("dequantize", source, "-o", tmp_path / "f")
    done("transcode", source, "--dialect", "modelopt", "-o", tmp_path / "t")
    for name in "qft":
        assert json.loads((tmp_path / name / "params.json").read_text()) == PARAMS
    assert done("verify", tmp_path / "q", "--source", tmp_path / "f")


def test_it_is_never_written(tmp_path):
    words = ("--format", "fp8", "--dialect", "mistral", "--json", "-o", tmp_path / "q")
    error = run("quantize", write_fp8(tmp_path / "m"), *words).json["error"]
    assert error["code"] == "dialect-format"
    assert "is read, and never written" in error["message"]
