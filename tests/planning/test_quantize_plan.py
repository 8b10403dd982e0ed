"""Every decision of a plan: what becomes four-bit, what stays and why, who shares a scale, and
where every byte goes.
"""

import json
import shutil

import pytest
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    SECOND,
    bf16,
    llama_shards,
    read_folder,
    run,
    weight,
    write_checkpoint,
    write_llama,
)
from checkpoints import write_single as write

from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.planning.quantize_plan import plan_quantize
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.patterns import matches
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.open import open_source

ATTENTION = f"{LAYER}.self_attn"
TARGETS = [("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")]


def plan_of(folder, fmt=NVFP4, dialect="compressed-tensors", include=(), exclude=()):
    source = open_source(str(folder))
    recipe = build_recipe(
        Target(fmt.name, dialect),
        source.checkpoint.config,
        RecipeOptions(include=include, exclude=exclude),
    )
    return plan_quantize(source.checkpoint, recipe, find_linears(source, recipe))


def step_of(plan, name):
    (step,) = [step for step in plan.steps if step.refs[0].name == name]
    return step


@pytest.mark.parametrize(
    ("name", "tensor", "action", "reason"),
    [
        ("a.o_proj.weight", weight(), "quantize", "a linear layer"),
        ("a.o_proj.weight", ("F32", (2, 16), bytes(128)), "quantize", "a linear layer"),
        ("a.o_proj.weight", ("F16", (2, 16), bytes(64)), "quantize", "a linear layer"),
        ("a.o_proj.bias", ("BF16", (64,), bf16(64)), "copy", "not a linear layer's weight"),
        ("a.o_proj.lora_A", weight(), "copy", "not a linear layer's weight"),
        ("weight", weight(), "copy", "not a linear layer's weight"),
        ("", weight(), "copy", "not a linear layer's weight"),
        (
            "a.experts.gate_up_proj",
            ("I8", (2, 32, 64), bytes(4096)),
            "copy",
            "not a linear layer's weight",
        ),
        ("a.norm.weight", ("BF16", (64,), bf16(64)), "copy", "1-dimensional, not a matrix"),
        ("a.scale.weight", ("BF16", (), bf16(1)), "copy", "0-dimensional, not a matrix"),
        (
            "a.conv.weight",
            ("BF16", (2, 2, 2, 16), bf16(128)),
            "copy",
            "4-dimensional, not a matrix",
        ),
        ("model.embed_tokens.weight", weight(), "copy", "an embedding"),
        ("lm_head.weight", weight(), "copy", "an output head"),
        ("a.mlp.gate.weight", weight(), "copy", "a router"),
        (
            "a.o_proj.weight",
            ("I16", (32, 64), bytes(4096)),
            "skip",
            "I16, not one of BF16, F16, F32",
        ),
        (
            "a.o_proj.weight",
            ("F64", (32, 64), bytes(16384)),
            "skip",
            "F64, not one of BF16, F16, F32",
        ),
        ("a.o_proj.weight", ("BF16", (0, 64), b""), "skip", "empty"),
        ("a.o_proj.weight", ("BF16", (64, 0), b""), "skip", "empty"),
        (
            "a.o_proj.weight",
            weight(0, 2, 24),
            "skip",
            "24 columns, not a multiple of the block of 16",
        ),
    ],
)
def test_every_kind_of_tensor_has_its_action_and_reason(name, tensor, action, reason, tmp_path):
    step = step_of(plan_of(write(tmp_path / "m", {name: tensor})), name)
    assert step.action == action
    assert step.reason.startswith(reason)
    if action != "quantize":
        (output,) = step.outputs
        assert (output.name, output.dtype, output.shape, step.shape) == (
            name,
            tensor[0],
            tensor[1],
            (),
        )


def test_the_block_of_mxfp4_is_32(tmp_path):
    folder = write(tmp_path / "m", {"a.weight": weight(0, 2, 48), "b.weight": weight(0, 2, 64)})
    plan = plan_of(folder, MXFP4)
    assert step_of(plan, "a.weight").reason == "48 columns, not a multiple of the block of 32"
    assert plan.quantized == ["b"]


def test_gpt2_keeps_its_transposed_layers(tmp_path):
    tensors = {
        f"h.0.{name}.weight": weight()
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    plan = plan_of(write(tmp_path / "m", tensors, {"model_type": "gpt2"}))
    assert {step.reason for step in plan.steps} == {"a Conv1D, whose weight is stored (in, out)"}
    assert plan.quantized == []
    assert any("no tensor becomes nvfp4" in warning for warning in plan.warnings)
    assert plan_of(write(tmp_path / "n", tensors)).quantized == [
        name.removesuffix(".weight") for name in tensors
    ]


def test_a_transposed_layer_stays_whoever_asks(tmp_path):
    numbers = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **numbers}
    tensors = {"transformer.h.0.attn.c_attn.weight": weight()}
    source = write(tmp_path / "m", tensors, config)
    asked = ("--include", "*.c_attn", "-o", tmp_path / "out", "--json")
    outcome = run("quantize", source, "--format", "nvfp4", *asked)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "idle-option")
    assert "a transposed linear layer of GPT2LMHeadModel" in outcome.json["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "members",
    [
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("to_q", "to_k", "to_v"),
    ],
)
def test_fused_layers_share_a_scale_inside_and_across_shards(members, tmp_path):
    names = [f"model.layers.{layer}.x.{member}.weight" for layer in (1, 10) for member in members]
    shards = {
        FIRST: {name: weight(1) for name in names[::2]},
        SECOND: {name: weight(2) for name in names[1::2]},
    }
    plan = plan_of(write_checkpoint(tmp_path / "m", shards))
    for layer in (1, 10):
        expected = {name for name in names if f".{layer}." in name}
        for name in expected:
            step = step_of(plan, name)
            assert step.group == f"model.layers.{layer}.x.{'/'.join(members)}"
            assert {ref.name for ref in step.maker.measures} == expected
    assert not [warning for warning in plan.warnings if "scale group" in warning]


def test_the_groups_of_experts_stay_inside_each_expert(tmp_path):
    names = [
        f"{LAYER}.mlp.experts.{expert}.{leaf}.weight"
        for expert in (0, 1)
        for leaf in ("w1", "w2", "w3")
    ]
    plan = plan_of(write(tmp_path / "m", {name: weight(at) for at, name in enumerate(names)}))
    for expert in (0, 1):
        w1, w2, w3 = (f"{LAYER}.mlp.experts.{expert}.{leaf}.weight" for leaf in ("w1", "w2", "w3"))
        assert {ref.name for ref in step_of(plan, w1).maker.measures} == {w1, w3}
        assert (
            step_of(plan, w2).group,
            [ref.name for ref in step_of(plan, w2).maker.measures],
        ) == (None, [w2])


def test_mxfp4_has_no_scale_groups(tmp_path):
    assert {step.group for step in plan_of(write_llama(tmp_path / "m"), MXFP4).steps} == {None}


def test_members_that_stay_are_told_once_for_their_kind(tmp_path):
    names = [
        f"layers.{layer}.x.{leaf}.weight"
        for layer in range(3)
        for leaf in ("q_proj", "k_proj", "v_proj")
    ]
    folder = write(tmp_path / "m", {name: weight() for name in names})
    fused = "engines that fuse them need all of them in one format, or none"
    assert [
        text
        for text in plan_of(folder, exclude=["*.q_proj", "*.v_proj"]).warnings
        if "group" in text
    ] == [
        "3 scale groups q_proj/k_proj/v_proj: q_proj and v_proj are kept, first in 'layers.0.x'; "
        f"{fused}"
    ]
    (warning,) = (
        text for text in plan_of(folder, exclude=["*.1.x.q_proj"]).warnings if "group" in text
    )
    assert (
        warning
        == f"1 scale group q_proj/k_proj/v_proj: q_proj is kept, first in 'layers.1.x'; {fused}"
    )


@pytest.mark.parametrize(
    ("model_type", "leaves", "group", "warnings"),
    [
        ("llama", ("gate_proj", "down_proj"), None, []),  # a gate of attention
        ("llama", ("up_proj", "down_proj"), None, []),  # experts without a gate
        ("llama", ("q_proj",), None, ["k_proj and v_proj are not there"]),
        ("gemma4", ("q_proj",), None, []),  # keys and values of another layer
        ("llama", ("q_proj", "k_proj"), "a.q_proj/k_proj", ["v_proj is not there"]),
        ("gemma4", ("q_proj", "k_proj"), "a.q_proj/k_proj", []),  # keys that are values
        ("llama", ("q_proj", "k_proj", "v_proj"), "a.q_proj/k_proj/v_proj", []),
    ],
)
def test_a_scale_group_has_only_members_that_the_model_has(
    model_type, leaves, group, warnings, tmp_path
):
    folder = write(
        tmp_path / "m",
        {f"a.{leaf}.weight": weight() for leaf in leaves},
        {"model_type": model_type},
    )
    plan = plan_of(folder)
    assert step_of(plan, f"a.{leaves[0]}.weight").group == group
    assert [
        text.partition(": ")[2].partition(",")[0] for text in plan.warnings if "group" in text
    ] == warnings


def test_excluding_one_member_leaves_the_others_together(tmp_path):
    plan = plan_of(write_llama(tmp_path / "m"), exclude=["*.q_proj"])
    k, v = f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"
    assert {ref.name for ref in step_of(plan, k).maker.measures} == {k, v}
    assert step_of(plan, f"{ATTENTION}.q_proj.weight").reason == "excluded by '*.q_proj'"
    assert any("q_proj is kept" in warning for warning in plan.warnings)


def test_ignored_are_all_kept_matrices_and_an_absent_head(tmp_path):
    tensors = {
        "model.embed_tokens.weight": weight(),
        f"{ATTENTION}.o_proj.weight": weight(),
        f"{ATTENTION}.o_proj.bias": ("BF16", (32,), bf16(32)),
        f"{LAYER}.mlp.gate.weight": weight(),
        f"{LAYER}.mlp.experts.gate_up_proj": ("BF16", (2, 32, 64), bf16(2, 32, 64)),
        f"{LAYER}.odd.weight": weight(0, 2, 24),
        "model.norm.weight": ("BF16", (64,), bf16(64)),
        "": weight(),
    }
    plan = plan_of(write(tmp_path / "m", tensors), exclude=["*.experts*"])
    expected = [f"{LAYER}.mlp.experts", f"{LAYER}.mlp.gate", f"{LAYER}.odd", "model.embed_tokens"]
    assert list(plan.ignored.modules) == sorted(expected)
    assert {"*lm_head*", "cls.*", "*embed*", "*.gate"} <= set(plan.ignored.patterns)
    assert "*vision_tower*" not in plan.ignored.patterns


def test_include_overrides_the_recipe_and_exclude_overrides_include(tmp_path):
    folder = write_llama(tmp_path / "m")
    plan = plan_of(folder, include=["lm_head", "re:.*embed"], exclude=["re:.*mlp", "model.embed*"])
    quantized = {f"{ATTENTION}.{leaf}_proj" for leaf in "qkvo"} | {"lm_head"}
    assert set(plan.quantized) == quantized
    assert "*lm_head*" not in plan.ignored.patterns
    assert {"re:.*mlp", "model.embed*"} <= set(plan.ignored.patterns)
    assert step_of(plan, f"{LAYER}.mlp.up_proj.weight").reason == "excluded by 're:.*mlp'"


def test_a_plan_knows_the_patterns_that_fit_nothing(tmp_path):
    plan = plan_of(write_llama(tmp_path / "m"), include=["nope"], exclude=["re:zz", "*"])
    assert [(idle.asked, idle.better) for idle in plan.idle] == [
        ("--include 'nope'", ""),
        ("--exclude 're:zz'", ""),
    ]


def test_what_is_left_out_and_what_is_not_there_is_told(tmp_path):
    folder = write_llama(tmp_path / "m", **{"pytorch_model.bin": b"x"})
    (folder / "config.json").unlink()
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"x")
    warnings = plan_of(folder).warnings
    beside = "1 file of weights in folders of the source, the first '2_Dense/model.safetensors'"
    assert f"{beside}: copied as they are" in warnings
    assert "1 file holds weights in another form and is left out: 'pytorch_model.bin'" in warnings
    assert any("no config.json" in warning for warning in warnings)


def test_planning_is_pure_and_knows_no_path(tmp_path):
    folder = write_llama(tmp_path / "m")
    shutil.copytree(folder, tmp_path / "elsewhere" / "n")
    first, again, elsewhere = (
        plan_of(folder),
        plan_of(folder),
        plan_of(tmp_path / "elsewhere" / "n"),
    )
    assert first == again
    assert [(task.shards, task.steps) for task in first.tasks] == [
        (task.shards, task.steps) for task in elsewhere.tasks
    ]
    assert (first.ignored, first.warnings, first.target) == (
        elsewhere.ignored,
        elsewhere.warnings,
        elsewhere.target,
    )
    assert str(tmp_path) not in json.dumps(first.index) + repr(first)


def test_nothing_of_the_weights_is_read_to_plan(tmp_path):
    """The data are one hole: a reader of a terabyte would be noticed."""
    folder = tmp_path / "m"
    folder.mkdir()
    nbytes = 1 << 40
    text = json.dumps(
        {
            "a.o_proj.weight": {
                "dtype": "BF16",
                "shape": [1 << 19, 1 << 20],
                "data_offsets": [0, nbytes],
            }
        }
    ).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + nbytes)
    assert (
        step_of(plan_of(folder), "a.o_proj.weight").output_bytes == nbytes // 4 + nbytes // 32 + 4
    )


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_the_planned_sizes_are_those_on_the_disk(format, dialect, tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "out"
    options = ("--format", format, "--dialect", dialect, "-o", out)
    planned = run("quantize", source, *options, "--dry-run", "--json").json
    assert not out.exists()
    made = run("quantize", source, *options, "--json").json
    for key in ("source_bytes", "output_bytes"):
        assert planned[key] == made[key]
    stored, before = read_folder(out), read_folder(source)
    assert sum(step["output_bytes"] for step in planned["tensors"]) == sum(
        len(data) for _, _, data in stored.values()
    )
    assert {step["name"]: step["source_bytes"] for step in planned["tensors"]} == {
        name: len(data) for name, (_, _, data) in before.items()
    }
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in stored.values())
    assert set(index["weight_map"]) == set(stored)


@pytest.mark.parametrize(("format", "dialect"), TARGETS)
def test_an_output_shard_has_the_name_of_its_source_and_holds_its_tensors(
    format, dialect, tmp_path
):
    fmt = {"nvfp4": NVFP4, "mxfp4": MXFP4}[format]
    plan = plan_of(write_llama(tmp_path / "m"), fmt, dialect)
    assert [shard.file for shard in plan.shards] == [FIRST, SECOND]
    for task, tensors in zip(plan.tasks, llama_shards().values(), strict=True):
        assert {step.refs[0].name for step in task.steps} == set(tensors)
        (shard,) = task.shards
        end = len(shard.header)
        for ref in sorted(
            (ref for step in task.steps for ref in step.outputs), key=lambda ref: ref.start
        ):
            assert (ref.file, ref.start) == (shard.file, end)
            end += ref.nbytes
        assert shard.nbytes == end


def test_equal_tasks_have_equal_keys_and_a_touched_shard_another(tmp_path):
    folder = write_llama(tmp_path / "m")
    apart = ["*.v_proj"]  # then no scale group reaches into both shards
    before, whole = plan_of(folder, exclude=apart), plan_of(folder)
    (folder / SECOND).touch()
    after = plan_of(folder, exclude=[*apart, "nothing"])
    assert before.tasks[0].key == after.tasks[0].key
    assert before.tasks[1].key != after.tasks[1].key
    assert plan_of(folder, exclude=[*apart, "*.o_proj"]).tasks[0].key == before.tasks[0].key
    assert plan_of(folder).tasks[0].key != whole.tasks[0].key, "its amax comes from both"


def test_an_output_that_takes_the_name_of_another_tensor_is_refused(tmp_path):
    tensors = {"a.weight": weight(), "a.weight_global_scale": ("F32", (1,), bytes(4))}
    with pytest.raises(InputError) as caught:
        plan_of(write(tmp_path / "m", tensors))
    assert caught.value.code in ("already-quantized", "name-collision")


@pytest.mark.parametrize(("dtype", "nbytes"), [("U8", 1), ("I8", 1), ("I32", 4), ("U32", 4)])
def test_a_weight_of_integers_is_quantized_already(dtype, nbytes, tmp_path):
    """Its scales beside it would be copied, and mean something else to engines."""
    with pytest.raises(InputError) as caught:
        plan_of(write(tmp_path / "m", {"a.o_proj.weight": (dtype, (32, 64), bytes(2048 * nbytes))}))
    assert (caught.value.code, caught.value.tensor) == ("already-quantized", "a.o_proj.weight")


@pytest.mark.parametrize(
    "record", [{"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}]
)
def test_a_config_that_says_quantized_is_refused(record, tmp_path):
    folder = write(tmp_path / "m", {"a.weight": weight()}, {"quantization_config": record})
    with pytest.raises(InputError) as caught:
        plan_of(folder)
    assert caught.value.code == "already-quantized"


def test_one_chosen_file_is_planned_alone(tmp_path):
    folder = write_llama(tmp_path / "m")
    plan = plan_of(folder / SECOND)
    assert [(task.sources, [shard.file for shard in task.shards]) for task in plan.tasks] == [
        ((SECOND,), [SECOND])
    ]


def test_a_pattern_that_a_rule_makes_exceptions_of_ignores_no_quantized_module(tmp_path):
    """`*.gate` names routers; matrices of blocks of Krea 2, which are none, are quantized."""
    large, router = "transformer_blocks.0.ff.gate", "model.layers.0.mlp.gate"
    tensors = {f"{module}.weight": weight(1) for module in (large, router)}
    source, out = write(tmp_path / "m", tensors), tmp_path / "q"
    assert run("quantize", source, "--format", "nvfp4", "-o", out).code == 0
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert router in ignored
    assert not any(matches(pattern, large) for pattern in ignored)
    assert run("inspect", out).code == 0


@pytest.mark.parametrize(("count", "is_said"), [(1, True), (4, False)])
def test_fp8_without_scales_among_others_is_said(tmp_path, count, is_said):
    """A whole file that was cast has none; a single one lost its scale."""
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"]
    tensors = {name: weight(at) for at, name in enumerate(names)}
    rows, columns = tensors[names[0]][1]
    tensors |= dict.fromkeys(names[:count], ("F8_E4M3", (rows, columns), b"8" * rows * columns))
    plan = plan_of(write(tmp_path / "m", tensors, {"model_type": "llama"}))
    assert any("without scales" in warning for warning in plan.warnings) is is_said
