"""decisions.py: what becomes of every linear layer and for which reason, however it is stored; and
what cannot be decided.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA, Tensor, bf16, weight, write_single
from spellings import module_of, records, tensors_of

from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.decisions import (
    Verdict,
    decide,
    rounded_again,
    uneven_experts,
    uneven_groups,
)
from fp4convert.progress import are_text
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import ScaleGroup, Target, build_recipe, gather_groups
from fp4convert.storage.open import open_source

LAYER = "model.layers.0"
ATTENTION, DOWN = f"{LAYER}.self_attn", f"{LAYER}.mlp.down_proj"
QKV = ("q_proj", "k_proj", "v_proj")
CT = "compressed-tensors"
FP8 = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
PACKED_STAYS = QuantizeOptions("", format="nvfp4", exclude="*down*", keep_packed=True)
Tensors = dict[str, Tensor]


def verdicts_on(
    folder: Path, target: Target, choice: RecipeOptions | None = None
) -> dict[str, Verdict]:
    source = open_source(str(folder))
    recipe = build_recipe(target, source.checkpoint.config, choice or RecipeOptions())
    if isinstance(choice, QuantizeOptions):
        recipe = replace(recipe, keeps_packed=choice.keep_packed)
    return decide(find_linears(source, recipe), recipe, dialect_to_write(target))


def verdict_on(
    folder: Path, target: Target, choice: RecipeOptions | None = None, module: str = DOWN
) -> Verdict:
    return verdicts_on(folder, target, choice)[module]


def ones(*shape: int) -> Tensor:
    return "F32", shape, struct.pack("<f", 1) * int(np.prod(shape))


def fp8(module: str = DOWN) -> Tensors:
    return {
        f"{module}.weight": ("F8_E4M3", (16, 32), b"\x38" * 512),
        f"{module}.weight_scale_inv": ones(2, 2),
    }


def integers(module: str, bits: int) -> Tensors:
    """As compressed-tensors packs them, 16 rows of 64 columns."""
    return {
        f"{module}.weight_packed": ("I32", (16, 2 * bits), bytes(128 * bits)),
        f"{module}.weight_scale": ones(16, 2),
        f"{module}.weight_shape": ("I64", (2,), struct.pack("<qq", 16, 64)),
    }


def artifact(
    folder: Path, fmt: str, modules: tuple[str, ...], floats: Tensors | None = None
) -> Path:
    """Four-bit modules as compressed-tensors spells them, and matrices of floats beside them."""
    made = {name: module_of(1, fmt, (32, 64), 0.25 if fmt == "nvfp4" else None) for name in modules}
    config = records(CT, fmt, made, 16)["config.json"]
    return write_single(folder, tensors_of(CT, fmt, made) | (floats or {}), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "tensor", "target", "action", "reason"),
    [
        (DOWN, weight(), Target("nvfp4", CT), "quantize", "a linear layer"),
        ("lm_head", weight(), Target("nvfp4", CT), "copy", "an output head"),
        (DOWN, ("BF16", (0, 64), b""), Target("nvfp4", CT), "skip", "empty"),
        (DOWN, ("BF16", (64, 0), b""), Target("nvfp4", CT), "skip", "empty"),
        (
            DOWN,
            weight(0, 2, 24),
            Target("nvfp4", CT),
            "skip",
            "24 columns, not a multiple of the block of 16",
        ),
        (DOWN, weight(0, 2, 48), Target("nvfp4", CT), "quantize", "a linear layer"),
        (
            DOWN,
            weight(0, 2, 48),
            Target("mxfp4", CT),
            "skip",
            "48 columns, not a multiple of the block of 32",
        ),
        (
            DOWN,
            weight(0, 24, 64),
            Target("nvfp4", "comfy"),
            "skip",
            "24 rows, which ComfyUI pads to a multiple of 16",
        ),
    ],
)
def test_floats(module, tensor, target, action, reason, tmp_path):
    found = verdict_on(
        write_single(tmp_path / "m", {f"{module}.weight": tensor}), target, None, module
    )
    assert (found.action, found.reason, found.is_made, found.stays) == (
        action,
        reason,
        action == "quantize",
        False,
    )


def test_fp8_is_quantized_or_becomes_bf16_or_stays(tmp_path):
    folder, target = (
        write_single(tmp_path / "m", {**fp8(), "a.o_proj.weight": ones(16, 32)}, FP8),
        Target("nvfp4", CT),
    )
    made = verdict_on(folder, target)
    assert (made.action, made.reason, made.form.format.name) == (
        "quantize",
        "a linear layer, from fp8 8x16",
        "nvfp4",
    )
    kept = verdict_on(folder, target, RecipeOptions(exclude=("*down*",)))
    assert (kept.action, kept.reason, kept.form) == (
        "dequantize",
        "excluded by '*down*'; fp8 8x16 becomes bf16",
        None,
    )
    packed = verdict_on(folder, target, PACKED_STAYS)
    assert (packed.action, packed.reason) == ("copy", "excluded by '*down*'; kept as fp8 8x16")
    assert (packed.form.format.name, packed.form.granularity, packed.stays) == (
        "fp8",
        (8, 16),
        True,
    )


def test_an_artifact_without_any_module_of_four_bits_is_refused(tmp_path):
    """Nobody would know it for one, not this package either."""
    folder = write_single(tmp_path / "m", fp8(), FP8)
    with pytest.raises(InputError) as caught:
        verdicts_on(folder, Target("nvfp4", CT), PACKED_STAYS)
    assert caught.value.code == "no-four-bit"
    assert caught.value.next_step == "Exclude fewer modules, so that some are quantized."


def test_experts_that_are_quantized_in_part_are_told(tmp_path):
    tensors = {
        f"a.experts.0.{leaf}.weight": ones(32, columns)
        for leaf, columns in (("up_proj", 64), ("down_proj", 40))
    }
    verdicts = verdicts_on(write_single(tmp_path / "m", tensors, LLAMA), Target("nvfp4", CT))
    (warning,) = uneven_experts(verdicts)
    assert warning.startswith(
        "the experts of a layer are quantized in part: a.experts.0.up_proj is nvfp4,"
        " a.experts.0.down_proj is not quantized (40 columns, not a multiple of the block of 16);"
    )
    assert (
        uneven_experts(
            {module: verdict for module, verdict in verdicts.items() if "up_proj" in module}
        )
        == []
    )


@pytest.mark.parametrize(
    ("tensors", "config", "dialect", "words"),
    [
        (
            {f"{DOWN}.weight": ("F8_E5M2", (16, 32), b"\x3c" * 512)},
            LLAMA,
            CT,
            f"{DOWN}.weight is fp8, which dialect {CT} cannot hold beside nvfp4; held",
        ),
        (
            fp8(),
            FP8,
            "modelopt",
            f"{DOWN}.weight is fp8 8x16, which dialect modelopt cannot hold beside nvfp4; held"
            " as it is by compressed-tensors",
        ),
    ],
)
def test_what_no_form_of_the_dialect_holds_cannot_stay_packed(
    tensors, config, dialect, words, tmp_path
):
    folder, choice = (write_single(tmp_path / "m", tensors, config), PACKED_STAYS)
    with pytest.raises(InputError) as caught:
        verdicts_on(folder, Target("nvfp4", dialect), choice)
    assert (caught.value.code, caught.value.tensor) == ("dialect-mixed", f"{DOWN}.weight")
    assert caught.value.message.startswith(words)
    assert (
        caught.value.next_step
        == "Leave --keep-packed out, and it becomes bf16; or choose another --dialect."
    )
    assert (
        verdicts_on(folder, Target("nvfp4", dialect), RecipeOptions(exclude=("*down*",)))[
            DOWN
        ].action
        == "dequantize"
    )


@pytest.mark.parametrize(
    ("stored", "made", "dialect", "action", "reason"),
    [
        ("nvfp4", "nvfp4", CT, "transcode", "nvfp4 already: the same codes and scales"),
        ("mxfp4", "mxfp4", CT, "transcode", "mxfp4 already: the same codes and scales"),
        ("mxfp4", "nvfp4", CT, "transcode", "mxfp4, whose blocks nvfp4 represents exactly"),
        ("nvfp4", "mxfp4", CT, "quantize", "a linear layer, from nvfp4"),
        (
            "nvfp4",
            "nvfp4",
            "mlx",
            "quantize",
            "a linear layer, from nvfp4",
        ),  # whose blocks have no global scale
    ],
)
def test_blocks_of_four_bits(stored, made, dialect, action, reason, tmp_path):
    found = verdict_on(artifact(tmp_path / "m", stored, (DOWN,)), Target(made, dialect))
    assert (found.action, found.reason, found.form.format.name) == (action, reason, made)


def test_blocks_that_stay(tmp_path):
    folder, target = artifact(tmp_path / "m", "nvfp4", (DOWN,)), Target("nvfp4", CT)
    plain = verdict_on(folder, target, RecipeOptions(exclude=("*down*",)))
    assert (plain.action, plain.reason, plain.form) == (
        "dequantize",
        "excluded by '*down*'; nvfp4 becomes bf16",
        None,
    )
    packed = verdict_on(folder, target, PACKED_STAYS)
    assert (packed.action, packed.form.format.name, packed.stays) == ("transcode", "nvfp4", True)


@pytest.mark.parametrize("packed", [QKV, QKV[:1], QKV[1:]])
def test_a_scale_group_is_taken_over_whole_or_quantized_whole(packed, tmp_path):
    modules = [f"{ATTENTION}.{name}" for name in QKV]
    stored = tuple(f"{ATTENTION}.{name}" for name in packed)
    floats = {f"{module}.weight": weight() for module in modules if module not in stored}
    found = verdicts_on(
        artifact(tmp_path / "m", "mxfp4", (*stored, DOWN), floats), Target("nvfp4", CT)
    )
    expected = "transcode" if packed == QKV else "quantize"
    assert {found[module].action for module in modules} == {expected}
    assert found[DOWN].action == "transcode"
    if packed != QKV:
        assert {found[module].reason for module in modules} == {
            "a linear layer",
            "a linear layer, from mxfp4",
        }
    assert {found[module].group for module in modules} == {ScaleGroup(ATTENTION, QKV)}
    groups = gather_groups({module: verdict.group for module, verdict in found.items()})
    assert groups == {ScaleGroup(ATTENTION, QKV): [module for module in found if module in modules]}


def test_a_scale_group_of_two_four_bit_formats_is_quantized_whole(tmp_path):
    """Blocks of NVFP4 and of MXFP4 taken over as they are would not share a global scale."""
    modules = {f"{ATTENTION}.{name}": "mxfp4" if name == "v_proj" else "nvfp4" for name in QKV}
    tensors: Tensors = {}
    groups = {}
    for fmt in ("nvfp4", "mxfp4"):
        made = {
            name: module_of(1, fmt, (32, 64), 0.25 if fmt == "nvfp4" else None)
            for name, own in modules.items()
            if own == fmt
        }
        config = records(CT, fmt, made, 16)["config.json"]
        (group,) = config["quantization_config"]["config_groups"].values()
        groups[fmt] = {
            **group,
            "targets": list(made),
            "format": config["quantization_config"]["format"],
        }
        tensors |= tensors_of(CT, fmt, made)  # type: ignore[arg-type]
    config["quantization_config"] |= {"config_groups": groups, "format": "mixed-precision"}
    found = verdicts_on(write_single(tmp_path / "m", tensors, config), Target("nvfp4", CT))
    assert {found[module].action for module in modules} == {"quantize"}


def test_a_stack_that_nobody_tells_of_is_refused_unless_it_stays(tmp_path):
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    folder, target = (
        write_single(tmp_path / "m", {name: ("BF16", (2, 32, 64), bf16(2, 32, 64))}),
        Target("nvfp4", CT),
    )
    with pytest.raises(InputError) as caught:
        verdicts_on(folder, target)
    error = caught.value
    assert (error.code, error.tensor) == ("unknown-stack", name)
    assert error.message.startswith(
        f"model.safetensors: {name} [2, 32, 64] stacks matrices of experts"
    )
    for option in ("--stack-order out_in or in_out", "--stack-rows concatenated or interleaved"):
        assert option in error.message
    assert "--exclude '*experts*'" in error.next_step
    with pytest.raises(
        InputError, match="no recipe says"
    ):  # how gate and up stand in it is still not told
        verdicts_on(folder, target, RecipeOptions(stack_order="out_in"))
    assert verdicts_on(folder, target, RecipeOptions(exclude=("*experts*",))) == {}
    found = verdicts_on(
        folder, target, RecipeOptions(stack_order="out_in", stack_rows="concatenated")
    )
    assert [verdict.action for verdict in found.values()] == ["quantize"] * 4


def test_formats_that_the_dialect_cannot_hold_together_are_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('about = "mine"\n[[format]]\nmodules = ["*o_proj"]\nformat = "fp8"\n')
    folder = write_single(
        tmp_path / "m", {f"{ATTENTION}.o_proj.weight": weight(), f"{DOWN}.weight": weight()}
    )
    choice = RecipeOptions(recipe=str(file))
    found = verdicts_on(folder, Target("nvfp4", CT), choice)
    assert {module: verdict.form.format.name for module, verdict in found.items()} == {
        f"{ATTENTION}.o_proj": "fp8",
        DOWN: "nvfp4",
    }
    with pytest.raises(InputError, match="which dialect mlx cannot hold together") as caught:
        verdicts_on(folder, Target("nvfp4", "mlx"), choice)
    assert (caught.value.code, caught.value.next_step.startswith("Choose another --dialect")) == (
        "dialect-mixed",
        True,
    )


@pytest.mark.parametrize(
    ("bits", "modules", "word"),
    [
        (4, [f"{ATTENTION}.o_proj", f"{LAYER}.mlp.experts.0.down_proj"], "int4 32"),
        (8, [f"{LAYER}.mlp.experts.0.down_proj"], "int8 32"),
        (4, [f"{LAYER}.mlp.experts.0.down_proj"], None),  # as Kimi K2 was trained
    ],
)
def test_packed_integers_that_are_rounded_again_are_told_of(bits, modules, word, tmp_path):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}
    record = {"quant_method": "compressed-tensors", "config_groups": groups}
    tensors = {name: one for module in modules for name, one in integers(module, bits).items()}
    folder = write_single(tmp_path / "m", tensors, {**LLAMA, "quantization_config": record})
    told = rounded_again(verdicts_on(folder, Target("nvfp4", CT)))
    assert len(told) == bool(word)
    if word:
        assert told[0].startswith(f"{are_text(len(modules), 'module')} {word} and rounded again to")


def test_groups_that_are_uneven_are_told_of(tmp_path):
    tensors = {
        f"model.layers.{layer}.self_attn.{name}.weight": weight()
        for layer in (0, 1)
        for name in QKV
    }
    folder, target = write_single(tmp_path / "m", tensors), Target("nvfp4", CT)

    def told(choice: RecipeOptions) -> list[str]:
        return uneven_groups(
            verdicts_on(folder, target, choice), build_recipe(target, LLAMA, choice), ()
        )

    assert told(RecipeOptions()) == []
    assert told(RecipeOptions(exclude=("*self_attn*",))) == []
    end = "; engines that fuse them need all of them in one format, or none"
    first, second = (f"first in 'model.layers.{layer}.self_attn'{end}" for layer in (0, 1))
    assert told(RecipeOptions(exclude=("*.1.self_attn.v_proj",))) == [
        f"1 scale group q_proj/k_proj/v_proj: v_proj is kept, {second}"
    ]
    assert told(RecipeOptions(exclude=("*v_proj",))) == [
        f"2 scale groups q_proj/k_proj/v_proj: v_proj is kept, {first}"
    ]
    stay = RecipeOptions(exclude=("*v_proj", "*k_proj"))
    assert told(stay) == [
        f"2 scale groups q_proj/k_proj/v_proj: k_proj and v_proj are kept, {first}"
    ]
    write_single(
        folder, {name: tensor for name, tensor in tensors.items() if "1.self_attn.k" not in name}
    )
    assert told(RecipeOptions()) == [
        f"1 scale group q_proj/k_proj/v_proj: k_proj is not there, {second}"
    ]
    file = tmp_path / "mine.toml"
    file.write_text(
        'about = "mine"\n[[format]]\nmodules = ["*.0.self_attn.q_proj"]\nformat = "fp8"\n'
    )
    (warning, _) = told(RecipeOptions(recipe=str(file)))
    assert warning.startswith(
        "1 scale group q_proj/k_proj/v_proj: members become fp8 row and nvfp4, first in "
        "'model.layers.0"
    )
