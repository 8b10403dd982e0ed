"""linears.py and encodings/: which linear layers a source has, what belongs to each, and every
reason for refusing a source.

What their rows are worth is in test_encodings.py.
"""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA, Tensor, bf16, run, weight, write_single
from spellings import module_of, write_artifact

from fp4convert.checkpoint.linears import Linears, find_linears
from fp4convert.errors import InputError
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.open import open_source

LAYER = "model.layers.0"
EXPERTS, Q_PROJ, O_PROJ = (
    f"{LAYER}.mlp.experts",
    f"{LAYER}.self_attn.q_proj",
    f"{LAYER}.self_attn.o_proj",
)
AGAIN, ORIGINAL = (
    "Download the checkpoint again; all its shards are needed.",
    "Start from the original weights.",
)
ONE = struct.pack("<f", 1)


def linears_in(folder: Path, choice: RecipeOptions | None = None) -> Linears:
    source = open_source(str(folder))
    return find_linears(
        source, build_recipe(Target("nvfp4"), source.checkpoint.config, choice or RecipeOptions())
    )


def stack(*shape: int) -> Tensor:
    return "BF16", shape, bf16(*shape)


def fp8(rows: int = 16, columns: int = 32) -> Tensor:
    return "F8_E4M3", (rows, columns), b"\x38" * (rows * columns)


def ones(*shape: int) -> Tensor:
    return "F32", shape, ONE * int(np.prod(shape))


def integers(rows: int = 16, columns: int = 64, group: int = 32) -> dict[str, Tensor]:
    """The tensors of O_PROJ as compressed-tensors packs them: each of them 1,
    under a scale of 1.
    """
    return {
        f"{O_PROJ}.weight_packed": ("I32", (rows, columns // 8), b"\x99" * (rows * columns // 2)),
        f"{O_PROJ}.weight_scale": ones(rows, columns // group),
        f"{O_PROJ}.weight_shape": ("I64", (2,), struct.pack("<qq", rows, columns)),
    }


def recorded(record: dict[str, object]) -> dict[str, object]:
    return {**LLAMA, "quantization_config": record}


FP8 = recorded({"quant_method": "fp8", "weight_block_size": [8, 16]})

SOUND_FP8 = {f"{Q_PROJ}.weight": fp8(), f"{Q_PROJ}.weight_scale_inv": ones(2, 2)}


def int_record(*bits: int) -> dict[str, object]:
    groups = {
        f"g{each}": {"weights": {"num_bits": each, "type": "int", "group_size": 32}}
        for each in bits
    }
    return recorded(
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    )


INT4 = int_record(4)


def fp8_with(**endings: Tensor) -> dict[str, Tensor]:
    return {f"{Q_PROJ}.weight": fp8()} | {f"{Q_PROJ}.{name}": one for name, one in endings.items()}


def integers_with(**endings: Tensor) -> dict[str, Tensor]:
    return integers() | {f"{O_PROJ}.{name}": tensor for name, tensor in endings.items()}


def integers_without(*endings: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in integers().items() if not name.endswith(endings)}


QWEIGHT: dict[str, Tensor] = {f"{O_PROJ}.qweight": ("I32", (8, 8), bytes(256))}
UNREADABLE = {  # tensors, config and words of the message, by error code
    "already-quantized": [
        (QWEIGHT, LLAMA, ["qweight' (I32 [8, 8])"]),
        (QWEIGHT, recorded({"quant_method": "gptq"}), ["this is a checkpoint of GPTQ", "qweight'"]),
        (
            {"t": weight(), f"{O_PROJ}.weight_scale_inv": ones(1, 1)},
            LLAMA,
            ["weight_scale_inv"],
        ),
        (
            {f"{O_PROJ}.weight_scale": ones(8, 1), f"{O_PROJ}.weight": ("I8", (8, 8), bytes(64))},
            LLAMA,
            [f"'{O_PROJ}.weight' (I8 [8, 8])"],
        ),
        (
            {
                **SOUND_FP8,
                f"{EXPERTS}.gate_up_proj": ("F8_E4M3", (2, 8, 16), bytes(256)),
                f"{EXPERTS}.gate_up_proj_scale": ones(2),
            },
            FP8,
            [f"'{EXPERTS}.gate_up_proj' (F8_E4M3 [2, 8, 16])"],
        ),
        (
            {**SOUND_FP8, f"{LAYER}.moe.w13": fp8(), f"{LAYER}.moe.w13_scale": ones(1)},
            FP8,
            [f"'{LAYER}.moe.w13' (F8_E4M3 [16, 32])"],
        ),
    ],
    "unsaid-tensors": [
        (
            {f"{O_PROJ}.weight": weight(), f"{O_PROJ}.pre_quant_scale": ones(64)},
            LLAMA,
            ["1 tensors"],
        ),
        (
            integers_with(weight_g_idx=("I32", (64,), bytes(256))),
            INT4,
            ["has a weight_g_idx, by which its columns may have an order", "does not look whether"],
        ),
    ],
    "scales-missing": [
        (fp8_with(), FP8, [f"expected {Q_PROJ}.weight_scale_inv or {Q_PROJ}.weight_scale"]),
        (integers_without("scale", "shape"), INT4, [f"{O_PROJ}.weight_scale"]),
        (integers_without("shape"), INT4, [f"{O_PROJ}.weight_shape is missing"]),
    ],
    "scales-shape": [
        (
            fp8_with(weight_scale_inv=ones(2, 3)),
            FP8,
            ["F32 [2, 3] for codes of [16, 32]", "config.json gives 8x16 of blocks"],
        ),
        (
            fp8_with(weight_scale_inv=ones(2, 2)),
            recorded({"quant_method": "fp8"}),
            ["F32 [2, 2] for codes of [16, 32]", "config.json gives no size of blocks"],
        ),
        (
            fp8_with(weight_scale_inv=ones(2, 2), weight_scale=ones(2, 2)),
            FP8,
            [f"two names, {Q_PROJ}.weight_scale_inv and {Q_PROJ}.weight_scale; expected one"],
        ),
        (
            fp8_with(weight_scale_inv=("I32", (2, 2), bytes(16))),
            FP8,
            ["weight_scale_inv is I32 [2, 2]"],
        ),
        (integers_with(weight_scale=ones(16, 3)), INT4, ["weight_scale F32 [16, 3]"]),
        (integers_with(weight_scale=ones(16)), INT4, ["weight_scale F32 [16]"]),
        (
            integers_with(weight_zero_point=("I32", (16, 2), bytes(128))),
            INT4,
            ["point I32 [16, 2]"],
        ),
        (integers_with(weight_shape=ones(2)), INT4, ["weight_shape F32 [2]"]),
    ],
    "packed-bits": [
        (
            integers(),
            int_record(4, 8),
            ["['4', '8'] for num_bits", "expected one group of 4 or of 8"],
        ),
        (integers(), int_record(3), ["['3'] for num_bits"]),
        (integers(), LLAMA, ["[] for num_bits"]),
    ],
    "packed-shape": [
        (
            integers_with(weight_shape=("I64", (2,), struct.pack("<qq", 16, 60))),
            INT4,
            [f"{O_PROJ}.weight_shape says [16, 60], and the integers are of [16, 64]"],
        ),
    ],
}


@pytest.mark.parametrize(
    ("code", "tensors", "config", "words"),
    [(code, *row) for code, rows in UNREADABLE.items() for row in rows],
)
def test_what_cannot_be_read_is_refused(code, tensors, config, words, tmp_path):
    folder = write_single(tmp_path / "m", tensors, config)
    with pytest.raises(InputError) as caught:
        linears_in(folder)
    error = caught.value
    assert (error.code, error.next_step) == (code, AGAIN if code == "scales-missing" else ORIGINAL)
    assert all(word in error.message for word in words), error.message
    for extra in (("--dry-run",), ("-o", tmp_path / "out")):
        outcome = run("quantize", folder, "--format", "nvfp4", "--json", *extra)
        assert (outcome.code, outcome.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "out").exists()


def test_the_next_step_names_the_base_model_or_the_record(tmp_path):
    config = {**recorded({"quant_method": "gptq"}), "_name_or_path": "org/Base-1B"}
    with pytest.raises(InputError) as caught:
        linears_in(write_single(tmp_path / "gptq", QWEIGHT, config))
    assert caught.value.next_step == f"{ORIGINAL.removesuffix('.')}: org/Base-1B."
    tensors, config = {f"{O_PROJ}.weight": weight()}, recorded({"quant_method": "awq"})
    with pytest.raises(
        InputError, match=r"a checkpoint of AWQ .* by 'awq'; no tensor is"
    ) as caught:
        linears_in(write_single(tmp_path / "awq", tensors, config))
    remedy = "If these are the original weights, remove quantization_config from config.json."
    assert (caught.value.code, caught.value.next_step) == (
        "already-quantized",
        f"{ORIGINAL} {remedy}",
    )
    config = {"text_config": config}
    with pytest.raises(InputError, match="by 'awq'") as caught:
        linears_in(write_single(tmp_path / "nested", tensors, config))
    assert "quantization_config from text_config of config.json" in caught.value.next_step


def test_a_four_bit_artifact_that_is_not_sound_is_no_source(tmp_path):
    folder = write_artifact(
        tmp_path / "m", "modelopt", "nvfp4", {O_PROJ: module_of(1, "nvfp4", (32, 64), None)}
    )
    with pytest.raises(InputError, match="not sound") as caught:
        linears_in(folder)
    assert caught.value.code == "unsound-artifact"
    assert caught.value.next_step == "See: fp4convert inspect."


GATE_UP, TALL, WIDE = "gate_up_proj", "of 64 rows and 32 columns", "of 32 rows and 64 columns"
UNEVEN = "holds 2 matrices for each expert, of equally many rows"


@pytest.mark.parametrize(
    ("name", "shape", "order", "words", "next_step"),
    [
        (GATE_UP, (2, 64, 32), "out_in", f"experts {TALL}", "--stack-order in_out."),
        (GATE_UP, (2, 32, 64), "in_out", f"experts {TALL}", "--stack-order out_in."),
        ("down_proj", (2, 32, 64), "out_in", f"experts {WIDE}", "--stack-order in_out."),
        ("down_proj", (2, 64, 32), "in_out", f"experts {WIDE}", "--stack-order out_in."),
        (GATE_UP, (2, 33, 64), "out_in", UNEVEN, "--stack-rows."),
    ],
)
def test_a_stack_that_does_not_fit_its_rule_is_refused(
    name, shape, order, words, next_step, tmp_path
):
    config = {"model_type": "x", "text_config": {"hidden_size": 64}}
    folder = write_single(tmp_path / "m", {f"{EXPERTS}.{name}": stack(*shape)}, config)
    with pytest.raises(InputError) as caught:
        linears_in(folder, RecipeOptions(stack_order=order, stack_rows="concatenated"))
    assert (caught.value.code, caught.value.tensor) == ("stack-shape", f"{EXPERTS}.{name}")
    assert words in caught.value.message
    assert caught.value.next_step.endswith(next_step)


def dbrx(experts: int | None, rows: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors = {
        f"transformer.blocks.0.ffn.experts.mlp.{name}": weight(seed, rows, 64)
        for seed, name in enumerate(("w1", "v1", "w2"))
    }
    return tensors, {
        "model_type": "dbrx",
        "d_model": 64,
        "ffn_config": {"moe_num_experts": experts} if experts else {},
    }


@pytest.mark.parametrize(("experts", "rows"), [(3, 32), (None, 32)])
def test_experts_below_each_other_must_be_as_many_as_the_config_says(experts, rows, tmp_path):
    with pytest.raises(InputError, match=f"moe_num_experts of config.json is {experts}") as caught:
        linears_in(write_single(tmp_path / "m", *dbrx(experts, rows)))
    assert (caught.value.code, caught.value.next_step) == (
        "stack-shape",
        "Download the checkpoint again, or correct moe_num_experts in its config.json.",
    )


def test_experts_below_each_other_are_taken_apart(tmp_path):
    tensors, config = dbrx(2, 32)
    folder = write_single(tmp_path / "m", tensors, config)
    source, found = open_source(str(folder)), linears_in(folder).of
    parent = "transformer.blocks.0.ffn.experts.mlp"
    for (name, (_, shape, data)), expert in product(tensors.items(), range(2)):
        matrix = np.frombuffer(data, np.uint16).reshape(shape)[16 * expert : 16 * (expert + 1)]
        (module,) = [
            module for module in found if module.endswith(f"{expert}.{name[len(parent) + 1 :]}")
        ]
        weights = found[module].coding.weights(found[module], source)
        expected = np.ascontiguousarray(matrix.T if name.endswith("w2") else matrix)
        assert (weights.shape, bytes(weights.rows(0, len(expected)).data)) == (
            expected.shape,
            expected.tobytes(),
        )
    assert len(found) == 6


def test_every_linear_layer_has_its_home_and_what_is_consumed_with_it(tmp_path):
    tensors = {
        f"{EXPERTS}.down_proj": stack(2, 64, 32),
        f"{Q_PROJ}.weight": fp8(),
        f"{Q_PROJ}.weight_scale_inv": ones(2, 2),
        f"{Q_PROJ}.input_scale": ones(),
        f"{LAYER}.self_attn.k_scale": ones(),
        f"{LAYER}.input_layernorm.weight": ("BF16", (64,), bf16(64)),
        f"{LAYER}.mlp.up_proj.weight": weight(),
    }
    linears = linears_in(
        write_single(tmp_path / "m", tensors, FP8), RecipeOptions(stack_order="out_in")
    )
    experts = [f"{EXPERTS}.{expert}.down_proj" for expert in range(2)]
    assert sorted(linears.of) == sorted([*experts, Q_PROJ, f"{LAYER}.mlp.up_proj"])
    assert {
        name: [linear.module for linear in held] for name, held in linears.by_home().items()
    } == {
        f"{EXPERTS}.down_proj": experts,
        f"{Q_PROJ}.weight": [Q_PROJ],
        f"{LAYER}.mlp.up_proj.weight": [f"{LAYER}.mlp.up_proj"],
    }
    assert set(tensors) - linears.consumed() == {f"{LAYER}.input_layernorm.weight"}
    assert [ref.name for ref in linears.of[Q_PROJ].idle] == [f"{Q_PROJ}.input_scale"]
    assert [ref.name for ref in linears.idle] == [f"{LAYER}.self_attn.k_scale"]
    assert (linears.is_packed, linears.unruled) == (True, ())
    assert [linears.of[module].name for module in (experts[1], Q_PROJ)] == [
        experts[1],
        f"{Q_PROJ}.weight",
    ]


def test_a_stack_without_a_rule_is_told_of_and_a_convolution_is_none(tmp_path):
    tensors = {f"{EXPERTS}.gate_up_proj": stack(2, 32, 64), "visual.conv.weight": stack(2, 32, 64)}
    linears = linears_in(write_single(tmp_path / "m", tensors))
    assert [ref.name for ref in linears.unruled] == [f"{EXPERTS}.gate_up_proj"]
    assert (dict(linears.of), linears.is_packed) == ({}, False)


@pytest.mark.parametrize(
    "name",
    ["visual.conv.weight", f"{EXPERTS}.gate_up_proj_scale_inv", f"{EXPERTS}.gate_up_proj_bias"],
)
def test_what_is_no_stack_of_experts_is_none_though_an_order_is_said(name, tmp_path):
    folder = write_single(
        tmp_path / "m", {name: stack(2, 1, 64), f"{EXPERTS}.gate_up_proj": stack(2, 32, 64)}
    )
    linears = linears_in(folder, RecipeOptions(stack_order="out_in", stack_rows="concatenated"))
    assert {linear.home.name for linear in linears.of.values()} == {f"{EXPERTS}.gate_up_proj"}
    assert linears.unruled == ()


def test_an_expert_that_is_there_twice_is_refused(tmp_path):
    tensors = {
        f"{EXPERTS}.down_proj": stack(2, 64, 64),
        f"{EXPERTS}.1.down_proj.weight": weight(0, 64, 64),
    }
    with pytest.raises(
        InputError, match=f"{EXPERTS}.down_proj holds {EXPERTS}.1.down_proj, which .* is too"
    ) as caught:
        linears_in(write_single(tmp_path / "m", tensors), RecipeOptions(stack_order="out_in"))
    assert (caught.value.code, caught.value.next_step) == (
        "tensor-twice",
        "Remove the one that does not belong.",
    )
