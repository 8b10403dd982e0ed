"""quantize --draft: layers that draft tokens become what the body does, or stay; their MXFP4
experts become NVFP4 with every value; what is left in another format is found.
"""

import json
import shutil

import numpy as np
import pytest
from checkpoints import done, read_folder, run, weight, write_llama, write_single
from fp4_sources import make_deepseek_v4

DRAFT = [f"mtp.0.ffn.experts.{expert}.w1" for expert in range(4)]
BODY = "layers.0.ffn.experts.0.w1"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_deepseek_v4(tmp_path_factory.mktemp("v4") / "source")


def quantize(folder, out, *words):
    return done("quantize", folder, "--format", "nvfp4", "-o", out, *words, "--json").json


@pytest.mark.parametrize("words", [(), ("--keep-packed",), ("--draft", "same")])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_mxfp4_experts_of_draft_layers_become_nvfp4_with_every_value(
    dialect, words, source, tmp_path
):
    """The values are those that transformers' own decoding gives of the source."""
    out = tmp_path / "out"
    result = quantize(source.folder, out, "--dialect", dialect, *words)
    drafted = 4 * 128 * 256 // 32
    assert result["carried"]["draft"] == {"modules": 4, "blocks": drafted, "kept_blocks": drafted}
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in read_folder(out).items()}
    assert shapes[f"{DRAFT[0]}.weight_scale"] == ("F8_E4M3", (128, 16))
    done("dequantize", out, "-o", tmp_path / "back", "--dtype", "fp32")
    restored = read_folder(tmp_path / "back")
    for module in DRAFT:
        dtype, shape, data = restored[f"{module}.weight"]
        assert (dtype, shape) == ("F32", (128, 256))
        expected = source.judged[f"{module}.weight"].float().numpy()
        assert np.array_equal(np.frombuffer(data, np.float32).reshape(shape), expected)
    healthy = run("inspect", out, "--json").json
    assert healthy["healthy"]
    assert "draft-format" not in {one["code"] for one in healthy["findings"]}


def test_the_record_ignores_no_draft_layer_that_is_quantized(source, tmp_path):
    quantize(source.folder, tmp_path / "out", "--dialect", "modelopt")
    record = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "mtp.*" not in record["ignore"]
    assert "mtp.0.e_proj" in record["ignore"]
    assert not [name for name in record["ignore"] if ".experts." in name]


def test_kept_they_are_bf16_and_the_plan_and_inspect_say_what_engines_do(source, tmp_path):
    out = tmp_path / "out"
    result = quantize(source.folder, out, "--draft", "keep")
    assert read_folder(out)[f"{DRAFT[0]}.weight"][:2] == ("BF16", (128, 256))
    assert any("4 modules of layers that draft tokens" in line for line in result["warnings"])
    found = run("inspect", out, "--json").json
    (finding,) = [one for one in found["findings"] if one["code"] == "draft-format"]
    assert (finding["level"], finding["tensor"]) == ("warning", DRAFT[0])
    assert found["healthy"]
    vllm = next(one for one in found["engines"] if one["engine"] == "vllm")
    assert "draft" in json.dumps(vllm)


def test_a_dialect_without_mxfp4_casts_what_would_stay_packed(source, tmp_path):
    """No recipe says what this model's engines want, and modelopt holds no MXFP4."""
    folder = tmp_path / "source"
    shutil.copytree(source.folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "other"}
    (folder / "config.json").write_text(json.dumps(config))
    words = ("--dialect", "modelopt", "--keep-packed", "--exclude", "*.attn.*")
    result = quantize(folder, tmp_path / "out", *words)
    assert result["carried"]["draft"]["modules"] == 4
    assert read_folder(tmp_path / "out")[f"{DRAFT[0]}.weight_scale_2"][:2] == ("F32", ())


def test_kept_in_mxfp4_under_modelopt_is_refused(source, tmp_path):
    words = ("--dialect", "modelopt", "--draft", "keep", "--keep-packed")
    outcome = run("quantize", source.folder, "--format", "nvfp4", "-o", tmp_path / "out", *words)
    assert outcome.code == 2
    assert "which dialect modelopt cannot hold beside nvfp4" in outcome.err


def test_draft_experts_left_in_mxfp4_beside_nvfp4_are_found(source, tmp_path):
    """As NVIDIA publishes DeepSeek V4.1: the source's own tensors where ours are NVFP4."""
    out = tmp_path / "out"
    quantize(source.folder, out, "--dialect", "modelopt")
    ours, theirs = read_folder(out), read_folder(source.folder)
    kept = {name: tensor for name, tensor in ours.items() if not name.startswith("mtp.0.ffn")}
    kept |= {name: tensor for name, tensor in theirs.items() if name.startswith("mtp.0.ffn")}
    config = json.loads((out / "config.json").read_text())
    foreign = write_single(tmp_path / "foreign", kept, config)
    for command in (("inspect", foreign), ("verify", foreign)):
        found = run(*command, "--json").json
        (finding,) = [one for one in found["findings"] if one["code"] == "draft-format"]
        assert (finding["level"], finding["tensor"]) == ("warning", DRAFT[0])
        assert "mxfp4, and the body's are nvfp4" in finding["detail"]


def qwen(folder):
    """A body and an MTP layer of a family whose engines take bf16 drafts for granted."""
    experts = {
        f"{layer}.mlp.experts.{expert}.{leaf}_proj.weight": weight(expert)
        for layer in ("model.layers.0", "mtp.layers.0")
        for expert in range(2)
        for leaf in ("gate", "up", "down")
    }
    tensors = {**experts, "mtp.fc.weight": weight(9), "mtp.layers.0.mlp.gate.weight": weight(8)}
    config = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    return write_single(folder, tensors, config)


def test_same_quantizes_what_the_body_quantizes_and_nothing_else(tmp_path):
    folder = qwen(tmp_path / "source")
    plain = quantize(folder, tmp_path / "plain")
    assert plain["tensors"] == {"quantized": 6, "copied": 8, "skipped": 0}
    assert not any("draft" in line for line in plain["warnings"])
    same = quantize(folder, tmp_path / "same", "--draft", "same")
    assert same["tensors"] == {"quantized": 12, "copied": 2, "skipped": 0}
    names = read_folder(tmp_path / "same")
    assert names["mtp.fc.weight"] == weight(9)
    assert names["mtp.layers.0.mlp.gate.weight"] == weight(8)
    assert "mtp.layers.0.mlp.experts.1.up_proj.weight_packed" in names
    assert any("accept few drafts" in line for line in same["warnings"])
    found = run("inspect", tmp_path / "same", "--json").json["findings"]
    assert [one["level"] for one in found if one["code"] == "draft-format"] == ["note"]


def test_exclude_goes_before_same(tmp_path):
    folder = qwen(tmp_path / "source")
    words = ("--draft", "same", "--exclude", "mtp.*")
    assert quantize(folder, tmp_path / "out", *words)["tensors"]["quantized"] == 6


@pytest.mark.parametrize("word", ["same", "keep"])
def test_without_draft_layers_the_option_is_refused(word, tmp_path):
    folder, out = write_llama(tmp_path / "source"), tmp_path / "out"
    words = ("quantize", folder, "--format", "nvfp4", "-o", out, "--draft", word, "--json")
    error = run(*words).json["error"]
    assert (error["code"], error["exit"]) == ("idle-option", 2)
    assert f"--draft {word} is for layers that draft tokens" in error["message"]
    assert not out.exists()


def test_another_word_is_refused(tmp_path):
    folder = write_llama(tmp_path / "source")
    from fp4convert import quantize as api
    from fp4convert.errors import InputError

    with pytest.raises(InputError, match="expected same or keep") as caught:
        api(folder, format="nvfp4", output=tmp_path / "out", draft="other")
    assert caught.value.code == "unknown-draft"
