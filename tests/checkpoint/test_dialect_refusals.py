"""What a dialect has no place for is refused with its code, before anything is written."""

import json

import pytest
from checkpoints import (
    Outcome,
    read_folder,
    read_shard,
    run,
    weight,
    write_checkpoint,
    write_single,
)
from spellings import PLAIN_LAYOUTS, Module, module_of, write_artifact

EXPERTS = "model.layers.0.mlp.experts"
GPT_OSS = ("gate_proj", "up_proj", "down_proj")
LAYOUTS = "linear, 128x4, 8x4, deepgemm, k_major, interleaved, appended"


def refused(outcome: Outcome, tmp_path) -> dict:
    """The error of a command that ended with 2 and left no folder."""
    assert outcome.code == 2, outcome
    assert not (tmp_path / "out").exists()
    assert outcome.json["error"]["next"]
    return outcome.json["error"]


def transcoded(artifact, tmp_path, *options: object) -> Outcome:
    return run("transcode", artifact, "-o", tmp_path / "out", "--json", "--dialect", *options)


def quantized(tensors: dict, tmp_path, *options: object) -> Outcome:
    source = write_single(tmp_path / "source", tensors, {"model_type": "x"})
    return run("quantize", source, "-o", tmp_path / "out", "--json", "--dialect", *options)


def modules(
    fmt: str, names: tuple[str, ...], shape=(16, 64), multiplier=1.0, inputs=None
) -> dict[str, Module]:
    own = multiplier if fmt == "nvfp4" else None
    return {name: module_of(seed, fmt, shape, own, inputs) for seed, name in enumerate(names)}


def artifact_of(tmp_path, dialect: str, fmt: str, *names: str, **numbers):
    """An artifact of modules of those names."""
    return write_artifact(tmp_path / "a", dialect, fmt, modules(fmt, names, **numbers))


@pytest.mark.parametrize(
    ("dialect", "fmt"),
    [("modelopt", "mxfp4"), ("comfy", "mxfp4"), ("gpt-oss", "nvfp4")],
)
def test_a_format_that_a_dialect_lacks(dialect, fmt, tmp_path):
    artifact = artifact_of(tmp_path, "quark", fmt, f"{EXPERTS}.0.w1")
    assert refused(transcoded(artifact, tmp_path, dialect), tmp_path)["code"] == "dialect-format"
    outcome = quantized({f"{EXPERTS}.0.w1.weight": weight(1)}, tmp_path, dialect, "--format", fmt)
    assert refused(outcome, tmp_path)["code"] == "dialect-format"


@pytest.mark.parametrize(
    ("dialect", "layout", "known"),
    [
        *(
            (dialect, "128x4", "linear")
            for dialect in ("compressed-tensors", "modelopt", "quark", "mlx")
        ),
        *(("comfy", layout, "128x4") for layout in PLAIN_LAYOUTS if layout != "128x4"),
        ("plain", "plaid", LAYOUTS),
        ("plain", "", LAYOUTS),
    ],
)
def test_a_layout_that_a_dialect_lacks(dialect, layout, known, tmp_path):
    artifact = artifact_of(tmp_path, "quark", "nvfp4", "a")
    error = refused(transcoded(artifact, tmp_path, dialect, "--scale-layout", layout), tmp_path)
    assert error["code"] == "dialect-layout"
    assert error["message"].endswith(f"it holds {known}")


@pytest.mark.parametrize("rows", [1, 8, 17, 24])
def test_comfy_pads_rows_and_so_must_refuse_others(rows, tmp_path):
    mixed = modules("nvfp4", ("good",)) | modules("nvfp4", ("bad",), (rows, 32))
    artifact = write_artifact(tmp_path / "a", "quark", "nvfp4", mixed)
    error = refused(transcoded(artifact, tmp_path, "comfy"), tmp_path)
    assert (error["code"], error["tensor"]) == ("dialect-shape", "bad")
    tensors = {"good.o_proj.weight": weight(1), "bad.o_proj.weight": weight(1, rows, 32)}
    plan = quantized(tensors, tmp_path, "comfy", "--format", "nvfp4", "--dry-run").json
    assert {step["name"]: step["action"] for step in plan["tensors"]} == {
        "good.o_proj.weight": "quantize",
        "bad.o_proj.weight": "skip",
    }
    outcome = quantized(tensors, tmp_path, "comfy", "--format", "nvfp4")
    assert outcome.json["tensors"]["skipped"] == 1


@pytest.mark.parametrize("multiplier", [0.5, 2.0, 0.99999994, 1.0000001])
@pytest.mark.parametrize(
    "dialect", ["compressed-tensors", "modelopt", "quark", "comfy", "plain/8x4"]
)
def test_mlx_has_no_global_scale(dialect, multiplier, tmp_path):
    odd = modules("nvfp4", ("one",)) | modules("nvfp4", ("other",), multiplier=multiplier)
    artifact = write_artifact(tmp_path / "a", dialect, "nvfp4", odd)
    error = refused(transcoded(artifact, tmp_path, "mlx"), tmp_path)
    assert (error["code"], error["tensor"]) == ("dialect-global-scale", "other")


@pytest.mark.parametrize(
    "dialect", ["compressed-tensors", "modelopt", "quark", "comfy", "plain/linear"]
)
def test_mlx_has_no_input_scale(dialect, tmp_path):
    artifact = write_artifact(
        tmp_path / "a", dialect, "nvfp4", modules("nvfp4", ("a",), inputs=1.0), 4
    )
    error = refused(transcoded(artifact, tmp_path, "mlx"), tmp_path)
    assert error["code"] == "dialect-activations"


@pytest.mark.parametrize(
    "name",
    [
        "proj",
        "model.layers.0.mlp.shared_experts.w1",
        f"{EXPERTS}.0.w4",
        f"{EXPERTS}.w1",
        f"{EXPERTS}.a.w1",
        "myexperts.0.w1",
    ],
)
def test_deepseek_holds_routed_experts_alone(name, tmp_path):
    artifact = artifact_of(tmp_path, "quark", "mxfp4", f"{EXPERTS}.0.w1", name)
    error = refused(transcoded(artifact, tmp_path, "deepseek"), tmp_path)
    assert (error["code"], error["tensor"]) == ("dialect-module", name)


def stack(*left_out: str, **shapes: tuple[int, int]) -> dict[str, Module]:
    """Three experts of gpt-oss but for those; some of other shapes, by the end of their names."""
    names = [f"{EXPERTS}.{number}.{member}" for number in range(3) for member in GPT_OSS]
    kept = [name for name in names if not name.endswith(left_out or ("?",))]
    return {
        name: module_of(
            seed,
            "mxfp4",
            shapes.get(name.removeprefix(f"{EXPERTS}.").replace(".", "_"), (16, 64)),
            None,
        )
        for seed, name in enumerate(kept)
    }


O_PROJ, W1 = "model.layers.0.self_attn.o_proj", f"{EXPERTS}.0.w1"
STACKS = {  # modules, and the name in the error
    "whole": (stack(), None),
    "no 2.up": (stack(".2.up_proj"), EXPERTS),
    "no 2.down": (stack(".2.down_proj"), EXPERTS),
    "no up": (stack("up_proj"), EXPERTS),
    "no down": (stack("down_proj"), EXPERTS),
    "no 1": (stack(".1.gate_proj", ".1.up_proj", ".1.down_proj"), EXPERTS),
    "no 0": (stack(".0.gate_proj", ".0.up_proj", ".0.down_proj"), EXPERTS),
    "taller up": (stack(**{"1_up_proj": (32, 64)}), EXPERTS),
    "wider down": (stack(**{"1_down_proj": (16, 96)}), EXPERTS),
    "attention": (stack() | modules("mxfp4", (O_PROJ,)), O_PROJ),
    "w1": (stack() | modules("mxfp4", (W1,)), W1),
}


@pytest.mark.parametrize("kind", STACKS)
def test_gpt_oss_stacks_whole_experts_of_one_shape(kind, tmp_path):
    experts, named = STACKS[kind]
    artifact = write_artifact(tmp_path / "a", "compressed-tensors", "mxfp4", experts)
    outcome = transcoded(artifact, tmp_path, "gpt-oss")
    if named is None:
        assert outcome.code == 0
    else:
        error = refused(outcome, tmp_path)
        assert (error["code"], error["tensor"]) == ("dialect-module", named)


@pytest.mark.parametrize("source", ["mlx", "plain/linear", "plain/appended"])
@pytest.mark.parametrize("target", ["compressed-tensors", "quark"])
def test_embeddings_are_ordinary_where_no_engine_reads_four_bit_ones(source, target, tmp_path):
    artifact = artifact_of(tmp_path, source, "mxfp4", "proj", "model.embed_tokens")
    error = refused(transcoded(artifact, tmp_path, target), tmp_path)
    assert (error["code"], error["tensor"]) == ("dialect-module", "model.embed_tokens")
    other = "plain" if source == "mlx" else "mlx"
    assert transcoded(artifact, tmp_path, other).code == 0


def test_embeddings_of_nvfp4_into_modelopt(tmp_path):
    artifact = artifact_of(tmp_path, "comfy", "nvfp4", "proj", "model.embed_tokens")
    assert refused(transcoded(artifact, tmp_path, "modelopt"), tmp_path)["code"] == "dialect-module"
    assert transcoded(artifact, tmp_path, "mlx").code == 0


@pytest.mark.parametrize("target", ["mlx", "gpt-oss"])
def test_four_bit_activations_of_mxfp4_where_no_record_says_them(target, tmp_path):
    """Refused, or weights alone: in no case an artifact that inspect finds wrong."""
    artifact = write_artifact(tmp_path / "a", "quark", "mxfp4", stack(), 4)
    outcome = transcoded(artifact, tmp_path, target)
    if outcome.code == 0:
        assert run("inspect", tmp_path / "out").code == 0
    else:
        refused(outcome, tmp_path)


def test_quantize_into_mlx_with_four_bit_activations(tmp_path):
    options = ("mlx", "--format", "nvfp4", "--activations", 4)
    outcome = quantized({"a.o_proj.weight": weight(1)}, tmp_path, *options)
    assert refused(outcome, tmp_path)["code"] == "dialect-activations"


def test_quantize_into_gpt_oss(tmp_path):
    """Done or refused, never a traceback."""
    tensors = {
        f"{EXPERTS}.{number}.{member}.weight": weight(1)
        for number in range(2)
        for member in GPT_OSS
    }
    assert quantized(tensors, tmp_path, "gpt-oss", "--format", "mxfp4").code in (0, 2)


def test_two_shards_of_one_name(tmp_path):
    """The scales of plain's model.safetensors go into scales.safetensors, which the source has
    already.
    """
    shards = {
        "model.safetensors": {"a.o_proj.weight": weight(1)},
        "scales.safetensors": {"a.norm.weight": weight(2, 1, 64)},
    }
    source = write_checkpoint(tmp_path / "source", shards, {"model_type": "x"})
    options = ("--dialect", "plain", "--format", "nvfp4")
    outcome = run("quantize", source, "-o", tmp_path / "out", "--json", *options)
    if outcome.code == 0:
        assert {"a.norm.weight", "a.o_proj.block_scale"} <= read_folder(tmp_path / "out").keys()
    else:
        refused(outcome, tmp_path)


@pytest.mark.parametrize("target", ["quark", "comfy", "mlx"])
def test_a_kv_cache_that_a_dialect_cannot_say(target, tmp_path):
    """Refused, or a line says that it is lost."""
    artifact = artifact_of(tmp_path, "compressed-tensors", "nvfp4", "a")
    config = json.loads((artifact / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (artifact / "config.json").write_text(json.dumps(config))
    outcome = run("transcode", artifact, "-o", tmp_path / "out", "--dialect", target)
    assert outcome.code == 2 or "cache" in (outcome.out + outcome.err).replace(str(tmp_path), "")


def test_fp8_modules_beside_nvfp4_in_comfy(tmp_path):
    """ComfyUI mixes them; those of FP8 are ordinary tensors here, as in modelopt."""
    artifact = artifact_of(tmp_path, "comfy", "nvfp4", "a")
    mark = b'{"format":"float8_e4m3fn"}'
    fp8 = {
        "b.weight": ("F8_E4M3", (16, 64), bytes(1024)),
        "b.weight_scale": ("F32", (), b"\0\0\x80\x3f"),
        "b.comfy_quant": ("U8", (len(mark),), mark),
    }
    tensors = {**read_shard(artifact / "model.safetensors"), **fp8}
    assert run("inspect", write_single(tmp_path / "mixed", tensors, {"model_type": "x"})).code == 0


@pytest.mark.parametrize("number", ["00", "01", "9" * 5000])
def test_experts_with_odd_numbers_are_no_experts(number, tmp_path):
    names = [f"{EXPERTS}.{n}.{member}" for n in ("0", number) for member in GPT_OSS]
    artifact = artifact_of(tmp_path, "quark", "mxfp4", *names)
    assert refused(transcoded(artifact, tmp_path, "gpt-oss"), tmp_path)["code"] == "dialect-module"


@pytest.mark.parametrize(
    "ending",
    ["weight_g_idx", "weight_zero_point", "svdquant_lora_a", "output_scale"],
)
def test_tensors_that_change_the_weights_are_never_passed_over(ending, tmp_path):
    artifact = artifact_of(tmp_path, "modelopt", "nvfp4", "a")
    tensors = {**read_shard(artifact / "model.safetensors"), f"a.{ending}": ("F32", (1,), bytes(4))}
    config = json.loads((artifact / "config.json").read_text())
    folder = write_single(tmp_path / "with", tensors, config)
    dequantized = run("dequantize", folder, "-o", tmp_path / "out", "--json")
    for outcome in (dequantized, transcoded(folder, tmp_path, "compressed-tensors")):
        assert refused(outcome, tmp_path)["code"] == "unsaid-tensors"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_values_under_an_odd_global_scale_are_never_written(value, tmp_path):
    artifact = artifact_of(tmp_path, "modelopt", "nvfp4", "a", multiplier=value)
    dequantized = run("dequantize", artifact, "-o", tmp_path / "out", "--json")
    for outcome in (dequantized, transcoded(artifact, tmp_path, "quark")):
        assert refused(outcome, tmp_path)["code"] == "global-scale"


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("plain", "foo.global_scale"),
        ("plain", "foo.block_scale"),
        ("deepseek", "l.experts.0.w1.scale"),
    ],
)
def test_what_stays_is_never_taken_for_four_bit(dialect, name, tmp_path):
    chosen = "l.experts.0.w2.weight" if dialect == "deepseek" else "a.o_proj.weight"
    fmt = "mxfp4" if dialect == "deepseek" else "nvfp4"
    tensors = {chosen: weight(1), name: ("F32", (1,), bytes(4))}
    outcome = quantized(tensors, tmp_path, dialect, "--format", fmt)
    assert refused(outcome, tmp_path)["code"] == "name-collision"
