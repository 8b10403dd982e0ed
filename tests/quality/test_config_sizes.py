"""Records and sizes that engines refuse, or make another model of: inspect finds them alone."""

import json
import shutil

import pytest
from checkpoints import bf16, run, weight, write_single
from meta_models import model_of

from fp4convert.checkpoint.config_sizes import DECODERS, find_odd_sizes
from fp4convert.execution.plan_file import STATE
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.safetensors import WEIGHT

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "tie_word_embeddings": False,
}
MATRICES = {
    **{"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)},
    **{"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)},
    "mlp.down_proj": (64, 128),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A llama of two layers in two dialects, by the dialect."""
    root = tmp_path_factory.mktemp("llama")
    tensors = {
        "model.embed_tokens.weight": weight(1, 96, 64),
        "model.norm.weight": ("BF16", (64,), bf16(64)),
        "lm_head.weight": weight(3, 96, 64),
    }
    for layer in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ("BF16", (64,), bf16(64))
        for name, (rows, columns) in MATRICES.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(layer, rows, columns)
    write_single(root / "m", tensors, CONFIG)
    for dialect in ("compressed-tensors", "mlx", "modelopt"):
        words = ("--format", "nvfp4", "--dialect", dialect, "-o", root / dialect)
        assert run("quantize", root / "m", *words).code == 0
    return root


def judged(folder, config):
    """(level, code) of what inspect finds of an artifact of somebody else."""
    (folder / RECORD).unlink()
    shutil.rmtree(folder / STATE)
    (folder / "config.json").write_text(json.dumps(config))
    findings = run("inspect", folder, "--json").json["findings"]
    return {(finding["level"], finding["code"]) for finding in findings}


SIZES = [
    ({"hidden_size": 128}, "model.embed_tokens has 64 columns"),
    ({"intermediate_size": 256}, "mlp.gate_proj has 128 rows"),
    ({"vocab_size": 97}, "model.embed_tokens has 96 rows"),
    ({"num_attention_heads": 4}, "q_proj has 64 rows"),
    ({"num_key_value_heads": 2}, "k_proj has 32 rows"),
    ({"head_dim": 64}, "q_proj has 64 rows"),
    ({"num_hidden_layers": 1}, "there is a layer 1"),
]


@pytest.mark.parametrize(("change", "words"), SIZES)
def test_sizes_of_another_model_are_found(change, words):
    shapes = {"model.embed_tokens": (96, 64), "lm_head": (96, 64)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in MATRICES.items()}
    assert list(find_odd_sizes(shapes, CONFIG)) == []
    found = list(find_odd_sizes(shapes, {**CONFIG, **change}))
    assert {(finding.level, finding.code) for finding in found} == {("error", "config-size")}
    assert any(words in finding.detail for finding in found)
    assert list(find_odd_sizes(shapes, {**CONFIG, **change, "model_type": "other"})) == []


@pytest.mark.sweep(6)
@pytest.mark.parametrize("model_type", sorted(DECODERS))
def test_transformers_makes_matrices_of_these_sizes(model_type):
    model = model_of(model_type)
    shapes = {
        name.removesuffix(WEIGHT): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.endswith(WEIGHT) and tensor.dim() == 2
    }
    config = model.config.to_dict()
    assert list(find_odd_sizes(shapes, config)) == []
    wrong = {**config, "hidden_size": config["hidden_size"] + 16}
    assert list(find_odd_sizes(shapes, wrong))


def change_weights(config, **changes):
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"] |= changes


def change_targets(config, *targets):
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = list(targets)


MODULE = "model.layers.0.self_attn.q_proj"
RECORDS = [
    ("compressed-tensors", lambda config: None, set()),
    (
        "compressed-tensors",
        lambda config: change_weights(config, scale_dtype="torch.uint8"),
        {("error", "record-strategy")},
    ),
    (
        "compressed-tensors",
        lambda config: change_weights(config, scale_dtype="torch.float8_e4m3fn"),
        set(),
    ),
    (
        "compressed-tensors",
        lambda config: change_weights(config, nonsense=3),
        {("error", "record-key")},
    ),
    (
        "compressed-tensors",
        lambda config: change_targets(config, "Linaer"),
        {("error", "quantized-not-targeted")},
    ),
    ("mlx", lambda config: None, set()),
    (
        "mlx",
        lambda config: config["quantization"].update({MODULE: False}),
        {("error", "ignored-but-quantized"), ("error", "records-disagree")},
    ),
    (
        "mlx",
        lambda config: (
            [config[key].update({MODULE: False}) for key in ("quantization",)]
            + [config["quantization_config"].update({MODULE: False})]
        ),
        {("error", "ignored-but-quantized")},
    ),
]


@pytest.mark.parametrize(("dialect", "change", "expected"), RECORDS)
def test_records_that_engines_refuse_or_misread_are_found(
    dialect, change, expected, artifacts, tmp_path
):
    folder = shutil.copytree(artifacts / dialect, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    assert judged(folder, config) == expected


def test_a_record_over_the_tensors_of_another_dialect_is_an_error(artifacts, tmp_path):
    folder = shutil.copytree(artifacts / "modelopt", tmp_path / "q")
    config = json.loads((artifacts / "compressed-tensors" / "config.json").read_text())
    (folder / "hf_quant_config.json").unlink()
    assert ("error", "nothing-quantized") in judged(folder, config)


def test_a_config_of_another_kind_says_nothing():
    shapes = {"model.layers.0.mlp.down_proj": (64, 128)}
    assert list(find_odd_sizes(shapes, {**CONFIG, "model_type": ["llama"]})) == []


def change_config(source, folder, **changes):
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "words"), [case for case in SIZES if "num_hidden_layers" not in case[0]]
)
def test_quantize_refuses_the_sizes_that_inspect_finds(change, words, artifacts, tmp_path):
    source = change_config(artifacts / "m", tmp_path / "m", **change)
    ended = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "--json")
    assert ended.code == 2
    assert ended.json["error"]["code"] == "config-size"
    assert words in ended.json["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("model_type", sorted(DECODERS))
def test_a_config_without_head_dim_has_the_sizes_that_its_class_makes(model_type):
    """As configs written by hand: transformers' class knows the size where none is stated."""
    config_class = type(model_of(model_type).config)
    stated = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    stated |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    rows = 4 * (getattr(config_class(**stated), "head_dim", None) or 96 // 4)
    shapes = {"model.layers.0.self_attn.q_proj": (rows, 96)}
    assert list(find_odd_sizes(shapes, {**stated, "model_type": model_type})) == []


def test_the_output_of_attention_is_square_in_helium():
    """Also where its heads are wider than hidden_size: as transformers makes it."""
    import torch
    import transformers

    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    config = transformers.HeliumConfig(**sizes, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.HeliumForCausalLM(config)
    matrices = {
        name.removesuffix(WEIGHT): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.endswith(WEIGHT) and tensor.dim() == 2
    }
    assert list(find_odd_sizes(matrices, config.to_dict())) == []
    assert list(find_odd_sizes(matrices, {**config.to_dict(), "model_type": "llama"}))


@pytest.mark.parametrize("kind", [["x"], {}, None, 3])
def test_a_model_type_that_is_no_word_is_no_family(kind, artifacts, tmp_path):
    source = change_config(artifacts / "m", tmp_path / "m", model_type=kind)
    assert run("quantize", source, "--format", "nvfp4", "--dry-run", "-q").code == 0


def test_more_layers_than_config_counts_are_warned_of(artifacts, tmp_path):
    """transformers leaves them out, and loads the others."""
    source = change_config(artifacts / "m", tmp_path / "m", num_hidden_layers=1)
    ended = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json")
    assert ended.code == 0
    assert any(
        "there is a layer 1: engines leave it out" in line for line in ended.json["warnings"]
    )


def test_sizes_of_a_model_with_its_own_code_are_warned_of(artifacts, tmp_path):
    code = {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    source = change_config(artifacts / "m", tmp_path / "m", hidden_size=128, **code)
    ended = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json")
    assert ended.code == 0
    assert any("64 columns" in line for line in ended.json["warnings"])


def test_quantize_warns_of_the_parts_that_inspect_misses(artifacts, tmp_path):
    source = change_config(artifacts / "m", tmp_path / "m", num_hidden_layers=3)
    ended = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "out")
    assert ended.code == 0
    assert "model.layers.2: config.json has 3 layers, and model.layers ends after 2" in ended.err
    assert "verify" in ended.out
    assert "serve" not in ended.out
    findings = run("inspect", tmp_path / "out", "--json").json["findings"]
    assert "module-missing" in {finding["code"] for finding in findings}
    refused = run("quantize", source, "--format", "nvfp4", "--for", "vllm", "--dry-run", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "module-missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", None),
        ("num_hidden_layers", "3"),
        ("num_hidden_layers", -3),
        ("num_attention_heads", 0),
        ("hidden_size", [64]),
    ],
)
def test_a_size_that_is_no_count_is_refused(key, value, artifacts, tmp_path):
    folder = change_config(artifacts / "m", tmp_path / "m", **{key: value})
    outcome = run("quantize", folder, "--format", "nvfp4", "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "config-size")
    assert key in outcome.json["error"]["message"]
    assert not (tmp_path / "out").exists()
