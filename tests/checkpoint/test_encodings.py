"""encodings/: every kind of stored matrix gives exactly the rows that its judge gives, in panels
that begin and end anywhere.

Stacks are sliced by hand; FP8 codes are torch's own dtypes; integers are decompressed by
compressed-tensors; blocks of four bits
are decoded by torch_formulas.py.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import LLAMA, Tensor, bf16, read_folder, run, weight, write_single
from spellings import module_of, write_artifact
from torch_formulas import decoded, e4m3

from fp4convert.calibration.methods.scaled_weights import Folded
from fp4convert.checkpoint.encodings.base import Factors, Folding, Linear, room_for
from fp4convert.checkpoint.encodings.floats import Floats, measured_whole
from fp4convert.checkpoint.linears import find_linears
from fp4convert.numerics.matrices import Weights
from fp4convert.recipes.options import RecipeOptions
from fp4convert.recipes.recipe import Target, build_recipe
from fp4convert.storage.open import open_source
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

EXPERTS = "model.layers.0.mlp.experts"
MODULE = "model.layers.0.mlp.down_proj"
HIDDEN, INNER = 48, 32  # of the model, of an expert
CONFIG = {**LLAMA, "hidden_size": HIDDEN}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
LAYOUTS = [
    (order, rows) for order in ("out_in", "in_out") for rows in ("concatenated", "interleaved")
]
EVERY_LAYOUT = pytest.mark.parametrize(("order", "rows"), LAYOUTS)
BLOCKS = (8, 16)
FP8_RECORD = {"quant_method": "fp8", "weight_block_size": list(BLOCKS)}
FP8_CONFIG = {**LLAMA, "quantization_config": FP8_RECORD}
CODES_OF_NAN = (0x7F, 0xFF)  # of E4M3


def found_in(folder: Path, choice: RecipeOptions | None = None) -> tuple[Source, dict[str, Linear]]:
    """The source in a folder, and its linear layers by module."""
    source = open_source(str(folder))
    recipe = build_recipe(Target("nvfp4"), source.checkpoint.config, choice or RecipeOptions())
    return source, dict(find_linears(source, recipe).of)


def bytes_of(weights: Weights, first: int, last: int) -> bytes:
    """Rows as bytes; `rows` and `copy_rows` must agree."""
    panel = weights.rows(first, last)
    assert (panel.dtype, panel.shape) == (weights.dtype, (last - first, weights.shape[1]))
    buffer = bytearray(len(bytes(panel.data)))
    weights.copy_rows(first, last, memoryview(buffer))
    assert bytes(panel.data) == bytes(buffer)
    return bytes(buffer)


def check_panels(weights: Weights, expected: np.ndarray) -> None:
    """Every panel of rows, wherever it begins and ends, has the expected bytes."""
    assert tuple(weights.shape) == expected.shape
    for first in range(len(expected)):
        for last in range(first + 1, len(expected) + 1):
            assert bytes_of(weights, first, last) == expected[first:last].tobytes(), (first, last)


def check_amax(weights: Weights, expected: np.ndarray) -> None:
    """The largest magnitude, where it is found sooner than rows."""
    amaxes = weights.amaxes()
    assert amaxes is not None
    assert max(amaxes) == np.abs(expected).max()


def random_floats(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Finite values of every exponent, as their bits."""
    bits = np.random.default_rng(7).integers(
        0, np.iinfo(BITS[dtype]).max, shape, BITS[dtype], endpoint=True
    )
    exponent, lowest = {
        "BF16": (0x7F80, 0x80),
        "F16": (0x7C00, 0x400),
        "F32": (0x7F800000, 0x800000),
    }[dtype]
    return np.where(bits & exponent == exponent, bits ^ lowest, bits).astype(BITS[dtype])


def sliced(stack: np.ndarray, order: str, rows: str) -> dict[str, np.ndarray]:
    """Module -> rows, of gate and up of every expert."""
    found = {}
    for expert, stored in enumerate(stack):
        matrix = stored if order == "out_in" else stored.T
        half = len(matrix) // 2
        parts = (
            (matrix[:half], matrix[half:])
            if rows == "concatenated"
            else (matrix[0::2], matrix[1::2])
        )
        for member, part in zip(("gate_proj", "up_proj"), parts, strict=True):
            found[f"{EXPERTS}.{expert}.{member}"] = np.ascontiguousarray(part)
    return found


def stack_shape(order: str, inputs: int = HIDDEN) -> tuple[int, int, int]:
    return (3, 2 * INNER, inputs) if order == "out_in" else (3, inputs, 2 * INNER)


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", BITS)
def test_the_rows_of_a_stack_are_those_that_numpy_slices(order, rows, dtype, tmp_path):
    stack = random_floats(dtype, stack_shape(order))
    tensors: dict[str, Tensor] = {
        "first": ("U8", (3,), b"abc"),
        f"{EXPERTS}.gate_up_proj": (dtype, stack.shape, stack.tobytes()),
    }
    source, found = found_in(
        write_single(tmp_path / "m", tensors, CONFIG),
        RecipeOptions(stack_order=order, stack_rows=rows),
    )
    expected = sliced(stack, order, rows)
    assert list(found) == list(expected)
    for module, values in expected.items():
        weights = found[module].coding.weights(found[module], source)
        assert (found[module].shape, weights.dtype) == (values.shape, dtype)
        check_panels(weights, values)
    assert sum(linear.nbytes for linear in found.values()) == stack.nbytes


@pytest.mark.parametrize("order", ["out_in", "in_out"])
def test_the_rows_of_a_stack_of_one_matrix_each(order, tmp_path):
    stack = random_floats("BF16", (3, HIDDEN, INNER) if order == "out_in" else (3, INNER, HIDDEN))
    tensors = {f"{EXPERTS}.down_proj.weight": ("BF16", stack.shape, stack.tobytes())}
    source, found = found_in(
        write_single(tmp_path / "m", tensors, CONFIG), RecipeOptions(stack_order=order)
    )
    assert list(found) == [f"{EXPERTS}.{expert}.down_proj" for expert in range(3)]
    for linear, matrix in zip(found.values(), stack, strict=True):
        check_panels(
            linear.coding.weights(linear, source),
            matrix if order == "out_in" else np.ascontiguousarray(matrix.T),
        )


@EVERY_LAYOUT
def test_gate_and_up_are_measured_as_the_one_matrix_that_they_are(order, rows, tmp_path):
    """Read as it lies where both are measured; one alone is measured by its own rows."""
    stack = random_floats("F32", stack_shape(order))
    tensors = {f"{EXPERTS}.gate_up_proj": ("F32", stack.shape, stack.tobytes())}
    source, found = found_in(
        write_single(tmp_path / "m", tensors, CONFIG),
        RecipeOptions(stack_order=order, stack_rows=rows),
    )
    expected = sliced(stack, order, rows)
    gate, up = f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.1.up_proj"
    for modules in ((gate, up), (gate,), (up,)):
        measured = list(measured_whole([found[module] for module in modules], source))
        elements = [
            np.frombuffer(weights.rows(0, weights.shape[0]).data, np.uint32) for weights in measured
        ]
        wanted = np.concatenate([expected[module].view(np.uint32).ravel() for module in modules])
        assert sorted(np.concatenate(elements)) == sorted(wanted)
    is_apart = (order, rows) == ("out_in", "concatenated")
    assert len(list(measured_whole([found[gate], found[up]], source))) == (2 if is_apart else 1)
    scaled = Folding(
        "norm", "key", (), lambda source: Factors(np.full(HIDDEN, 2, "f4"), np.ones(1))
    )
    folded = [
        found[module]._replace(coding=Folded(found[module].coding, columns=scaled))
        for module in (gate, up)
    ]
    assert len(list(measured_whole(folded, source))) == 2, "no stored matrix has their values"


@EVERY_LAYOUT
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_stack_becomes_what_its_experts_become_one_by_one(order, rows, format, tmp_path):
    values = np.random.default_rng(3).normal(0, 0.1, stack_shape(order, 64)).astype(np.float32)
    stacked = {f"{EXPERTS}.gate_up_proj": ("F32", values.shape, values.tobytes())}
    single = {
        f"{module}.weight": ("F32", part.shape, part.tobytes())
        for module, part in sliced(values, order, rows).items()
    }
    one, other = (
        write_single(tmp_path / "stacked", stacked),
        write_single(tmp_path / "single", single),
    )
    options = ("--stack-order", order, "--stack-rows", rows)
    assert run("quantize", one, "--format", format, "-o", tmp_path / "a", *options).code == 0
    assert run("quantize", other, "--format", format, "-o", tmp_path / "b").code == 0
    assert read_folder(tmp_path / "a") == read_folder(tmp_path / "b")


@EVERY_LAYOUT
def test_nan_is_found_in_the_right_expert_at_the_right_place(order, rows, tmp_path):
    stack = np.random.default_rng(4).normal(0, 0.1, stack_shape(order, 64)).astype(np.float32)
    bad = {f"{EXPERTS}.1.up_proj": (7, 40), f"{EXPERTS}.2.gate_proj": (31, 63)}
    for expert, member, (row, column) in ((1, 1, (7, 40)), (2, 0, (31, 63))):
        output = 2 * row + member if rows == "interleaved" else INNER * member + row
        place = (expert, output, column) if order == "out_in" else (expert, column, output)
        stack[place] = math.nan
    tensors = {f"{EXPERTS}.gate_up_proj": ("F32", stack.shape, stack.tobytes())}
    source, out = write_single(tmp_path / "m", tensors), tmp_path / "out"
    layout = ("--stack-order", order, "--stack-rows", rows)
    command = ("quantize", source, "--format", "nvfp4", "-o", out, *layout, "--json")
    error = run(*command).json["error"]
    for module, place in bad.items():
        assert f"{module} has 1 value that is NaN, at {list(place)}" in error["message"]
    options = re.findall(r"--exclude \S+", error["next"])
    assert options == [f"--exclude {module}" for module in bad]
    assert run(*command, *" ".join(options).split()).code == 0
    written = read_folder(out)
    parts = sliced(stack, order, rows)
    assert {name for name in written if name.endswith(".weight")} == {
        f"{module}.weight" for module in bad
    }
    assert all(
        written[f"{module}.weight"] == ("F32", (INNER, 64), parts[module].tobytes())
        for module in bad
    )
    assert {name for name in written if name.endswith("packed")} == {
        f"{module}.weight_packed" for module in set(parts) - set(bad)
    }


def fp8_codes(rows: int = 21, columns: int = 40) -> np.ndarray:
    """Every code but NaN."""
    codes = np.random.default_rng(11).integers(0, 256, (rows, columns), np.uint8)
    return np.where(np.isin(codes, CODES_OF_NAN), 0x38, codes).astype(np.uint8)


def fp8_values(
    codes: np.ndarray, scales: Any, block: tuple[int, int], dtype: Any = torch.float8_e4m3fn
) -> np.ndarray:
    """Codes times the scales of blocks, by torch."""
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (
        torch.from_numpy(codes).view(dtype).float() * wide[: codes.shape[0], : codes.shape[1]]
    ).numpy()


def in_blocks(codes: np.ndarray, scales: Any) -> dict[str, Tensor]:
    """The tensors of FP8 codes under scales of blocks."""
    return {
        f"{MODULE}.weight": ("F8_E4M3", codes.shape, codes.tobytes()),
        f"{MODULE}.weight_scale_inv": scale_tensor(scales, tuple(scales.shape)),
    }


def test_what_is_fp8_already_does_not_go_through_fp8_again(tmp_path):
    """Other values would, under blocks of 128 x 128 in place of its own; where that is all there
    is, nobody asks for it.
    """
    scales, nvfp4 = (
        torch.tensor([[1.0, 0.3, 7.0, 0.011], [2.0, 1.0, 1e-3, 9.0]]),
        ("--format", "nvfp4"),
    )
    tensors = in_blocks(fp8_codes(16, 64), scales)
    alone = write_single(tmp_path / "alone", tensors, FP8_CONFIG)
    refused = run("quantize", alone, *nvfp4, "-o", tmp_path / "out", "--via", "fp8", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "idle-option")
    tensors["model.layers.0.self_attn.o_proj.weight"] = ("BF16", (16, 64), bf16(16, 64))
    source = write_single(tmp_path / "m", tensors, FP8_CONFIG)
    results = []
    for name, options in (("through", ("--via", "fp8")), ("plain", ())):
        assert run("quantize", source, *nvfp4, "-o", tmp_path / name, *options).code == 0
        found = read_folder(tmp_path / name)
        results.append({key: found[key] for key in found if key.startswith(MODULE)})
    assert f"{MODULE}.weight_packed" in results[0]
    assert results[0] == results[1]


def scale_tensor(scales: Any, shape: tuple[int, ...]) -> Tensor:
    names = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.uint8: "U8",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
    return names[scales.dtype], shape, scales.contiguous().view(torch.uint8).numpy().tobytes()


def ct_record(**weights: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }


def random_scales(rows: int, columns: int, dtype: Any = torch.float32) -> Any:
    values = torch.rand((rows, columns), generator=torch.Generator().manual_seed(5)) * 0.01 + 0.001
    return (
        torch.pow(2, values.log2().round()).to(dtype)
        if dtype == torch.float8_e8m0fnu
        else values.to(dtype)
    )


SCALE, E8M0 = ".weight_scale", torch.float8_e8m0fnu
ROWS_RECORD, WHOLE_RECORD = {"quant_method": "fp8"}, {"quant_method": "modelopt"}
CT_BLOCKS = ct_record(num_bits=8, type="float", strategy="block", block_structure=list(BLOCKS))
CT_GROUPS = ct_record(num_bits=8, type="float", strategy="group", group_size=8)
FP8_KINDS = {  # ending; rows, columns and dtype of scales; their shape, block, record, word
    "blocks": (".weight_scale_inv", (3, 3), (3, 3), BLOCKS, FP8_RECORD, "fp8 8x16"),
    "blocks bf16": (SCALE, (3, 3, torch.bfloat16), (3, 3), BLOCKS, FP8_RECORD, "fp8 8x16"),
    "blocks e8m0": (".scale", (3, 3, E8M0), (3, 3), BLOCKS, FP8_RECORD, "fp8 8x16"),
    "blocks of ct": (SCALE, (3, 3), (3, 3), BLOCKS, CT_BLOCKS, "fp8 8x16"),
    "groups": (SCALE, (21, 5, E8M0), (21, 5), (1, 8), CT_GROUPS, "fp8 1x8"),
    "rows": (SCALE, (21, 1), (21, 1), (1, 40), ROWS_RECORD, "fp8 rows"),
    "rows flat": (SCALE, (21, 1, torch.float16), (21,), (1, 40), ROWS_RECORD, "fp8 rows"),
    "whole": (SCALE, (1, 1), (), (21, 40), WHOLE_RECORD, "fp8"),
    "whole of 1": (SCALE, (1, 1), (1,), (21, 40), WHOLE_RECORD, "fp8"),
    "comfy": (".scale_weight", (1, 1), (), (21, 40), None, "fp8"),
}


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_is_worth_what_torch_says(kind, tmp_path):
    ending, drawn, shape, block, record, word = FP8_KINDS[kind]
    codes, held = fp8_codes(), random_scales(*drawn)
    scales = held.view(torch.uint8) if kind == "groups" else held  # as compressed-tensors has them
    tensors = {
        f"{MODULE}{ending}": scale_tensor(scales, shape),
        f"{MODULE}.weight": ("F8_E4M3", codes.shape, codes.tobytes()),
    }
    config = LLAMA if record is None else {**LLAMA, "quantization_config": record}
    source, found = found_in(write_single(tmp_path / "m", tensors, config))
    linear, expected = found[MODULE], fp8_values(codes, held, block)
    weights = linear.coding.weights(linear, source)
    assert (linear.coding.word, linear.coding.is_packed, weights.dtype) == (word, True, "F32")
    check_panels(weights, expected)  # most of them begin inside a row of blocks
    check_amax(weights, expected)


@pytest.mark.parametrize(
    ("dtype", "judge"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]
)
def test_fp8_without_scales_or_record_is_numbers_as_they_stand(dtype, judge, tmp_path):
    codes = fp8_codes() & (0xFF if dtype == "F8_E4M3" else 0xFB)  # neither Inf nor NaN
    source, found = found_in(
        write_single(tmp_path / "m", {f"{MODULE}.weight": (dtype, codes.shape, codes.tobytes())})
    )
    expected = torch.from_numpy(codes).view(judge).float().numpy()
    weights = found[MODULE].coding.weights(found[MODULE], source)
    check_panels(weights, expected)
    check_amax(weights, expected)


def check_same_result(packed: Path, values: np.ndarray, format: str) -> None:
    """Quantizing a packed matrix gives the bytes that its values as floats give."""
    tensors: dict[str, Tensor] = {f"{MODULE}.weight": ("F32", values.shape, values.tobytes())}
    for folder in (packed, write_single(packed.parent / "floats", tensors)):
        assert run("quantize", folder, "--format", format, "-o", f"{folder}-out").code == 0
    assert read_folder(Path(f"{packed}-out")) == read_folder(packed.parent / "floats-out")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fp8_becomes_what_its_values_become(format, tmp_path):
    codes, scales = fp8_codes(40, 64), random_scales(5, 4)
    values = fp8_values(codes, scales, BLOCKS)
    packed = in_blocks(codes, scales)
    one = write_single(tmp_path / "packed", packed, FP8_CONFIG)
    check_same_result(one, values, format)
    two = write_single(tmp_path / "two", {**packed, "other.weight": weight()}, FP8_CONFIG)
    options = ("--format", format, "-o", tmp_path / "kept", "--exclude", MODULE)
    assert run("quantize", two, *options).code == 0
    kept = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().tobytes()
    restored = read_folder(tmp_path / "kept")[f"{MODULE}.weight"]
    assert restored == ("BF16", values.shape, kept)


def test_nan_among_fp8_codes_and_scales_is_placed(tmp_path):
    codes, scales = fp8_codes(40, 64), random_scales(5, 4)
    codes[13, 21] = 0x7F
    words = ("--format", "nvfp4", "-o", tmp_path / "out", "--json")
    source = write_single(tmp_path / "m", in_blocks(codes, scales), FP8_CONFIG)
    error = run("quantize", source, *words).json["error"]
    assert f"{MODULE}.weight has 1 value that is NaN, at [13, 21]" in error["message"]
    codes[13, 21], scales[2, 1] = 0x38, math.inf
    source = write_single(tmp_path / "n", in_blocks(codes, scales), FP8_CONFIG)
    error = run("quantize", source, *words).json["error"]
    assert re.search(
        r"has 128 values that are NaN or Inf, the first (Inf|NaN) at \[16, 16\]", error["message"]
    )
    assert f"--exclude {MODULE}" in error["next"]


def packed_integers(
    bits: int, symmetric: bool, group: int | None
) -> tuple[dict[str, Tensor], dict[str, object], np.ndarray]:
    """Tensors, the record and the values of a matrix that compressed-tensors packed, and unpacked
    again.
    """
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rows, columns = 21, 128
    strategy: dict[str, Any] = (
        {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    )
    arguments = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    chance, groups, half = np.random.default_rng(bits), columns // (group or columns), 1 << bits - 1
    state = {
        "weight": torch.from_numpy(chance.normal(0, 0.2, (rows, columns)).astype(np.float32)),
        "weight_scale": torch.from_numpy(
            chance.lognormal(-4, 1, (rows, groups)).astype(np.float32)
        ),
    }
    if not symmetric:
        state["weight_zero_point"] = torch.from_numpy(
            chance.integers(-half, half, (rows, groups)).astype(np.int8)
        )
    stored = PackedQuantizationCompressor.compress(state, scheme)
    values = PackedQuantizationCompressor.decompress(stored, scheme)["weight"].numpy()
    names = {torch.int32: "I32", torch.int64: "I64", torch.float32: "F32"}
    tensors = {
        f"{MODULE}.{name}": (names[t.dtype], tuple(t.shape), t.numpy().tobytes())
        for name, t in stored.items()
    }
    record = ct_record(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    return tensors, {**record, "format": "pack-quantized"}, values


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_worth_what_compressed_tensors_says(bits, symmetric, group, tmp_path):
    tensors, record, values = packed_integers(bits, symmetric, group)
    one = write_single(tmp_path / "packed", tensors, {**LLAMA, "quantization_config": record})
    source, found = found_in(one)
    linear = found[MODULE]
    assert (list(found), linear.coding.word, linear.shape) == (
        [MODULE],
        f"int{bits} {group or 128}",
        values.shape,
    )
    check_panels(linear.coding.weights(linear, source), values)
    check_same_result(one, values, "nvfp4")


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "mlx", "plain/128x4"])
def test_blocks_of_four_bits_are_worth_what_the_formats_say(dialect, tmp_path):
    fmt = "mxfp4" if dialect == "mlx" else "nvfp4"
    q = module_of(1, fmt, (20, 64), None if fmt == "mxfp4" else 0.25)
    source, found = found_in(write_artifact(tmp_path / "m", dialect, fmt, {MODULE: q}))
    scales = torch.from_numpy(q.scales)
    held = e4m3(scales) * 0.25 if fmt == "nvfp4" else scales.view(torch.float8_e8m0fnu).float()
    linear = found[MODULE]
    assert (linear.coding.word, linear.shape) == (fmt, (20, 64))
    expected = decoded(torch.from_numpy(q.codes), held).numpy()
    check_panels(linear.coding.weights(linear, source), expected)


class Roomy:
    """A source that notes what room it is asked for."""

    def room_for(self, nbytes, refs):
        self.asked = nbytes, refs
        return nullcontext()


def test_a_part_of_a_stack_claims_its_own_bytes_and_keeps_no_other_part():
    """By hand: a matrix of 64 bytes that is its own, and a quarter of 1024."""
    own, stack = TensorRef("a", "BF16", (4, 8), "f", 0), TensorRef("b", "U8", (4, 256), "f", 64)
    linears = [
        Linear("a", (4, 8), Floats("bf16"), (own,)),
        Linear("b.0", (1, 512), Floats("u8"), (stack,), share=4),
    ]
    source = Roomy()
    with room_for(source, linears):
        assert source.asked == (64 + 256, [own])
