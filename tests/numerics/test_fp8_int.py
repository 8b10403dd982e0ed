"""fp8_int.py against torch, ml_dtypes and compressed-tensors: FP8 and integer codes under block
scales, and back.

Decides that this reference is right; test_fp8_int.py then holds every kernel to it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from adversarial import DTYPES, PLAIN, Float32s, generator, matrix
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from scale_grids import EVERY_LAYOUT, same, some_scales
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from fp4convert.numerics import fp8_int
from fp4convert.numerics.fp8_int import Grid
from fp4convert.numerics.matrices import Matrix

USUAL = {name: make for name, make in PLAIN.items() if name not in ("subnormals", "extremes")}
TORCH_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def expanded(scales: Float32s, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    wide = torch.from_numpy(scales).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


@pytest.mark.parametrize("dtype", TORCH_FP8)
@EVERY_LAYOUT
def test_fp8_is_decoded_as_torch_does_it(
    rows: int, columns: int, block: tuple[int, int], dtype: str
) -> None:
    codes = generator(21).integers(0, 256, (rows, columns)).astype(np.uint8)
    scales = some_scales(rows, columns, block)
    expected = torch.from_numpy(codes).view(TORCH_FP8[dtype]).to(torch.float32) * expanded(
        scales, block, codes.shape
    )
    found = fp8_int.decode_fp8(codes.reshape(-1).data, codes.shape, Grid(scales, block), dtype)
    same(found, expected.numpy())
    first = rows // 2
    part = fp8_int.decode_fp8(
        codes[first:].reshape(-1).data, (rows - first, columns), Grid(scales, block, first), dtype
    )
    same(part, expected.numpy()[first:])
    at = first // block[0]
    part = fp8_int.decode_fp8(
        codes[first:].reshape(-1).data,
        part.shape,
        Grid(scales[at:], block, first % block[0]),
        dtype,
    )
    same(part, expected.numpy()[first:])
    finite = np.where(
        np.isfinite(codes.view(fp8_int.FP8_DTYPES[dtype]).astype(np.float32)), codes, 1
    ).astype(np.uint8)
    expected = torch.from_numpy(finite).view(TORCH_FP8[dtype]).to(torch.float32) * expanded(
        scales, block, codes.shape
    )
    assert fp8_int.amax_fp8(
        finite.reshape(-1).data, codes.shape, Grid(scales, block), dtype
    ) == float(expected.abs().max())


def test_fp8_nan_makes_the_amax_nan() -> None:
    codes = np.array([[0x7E, 0xFF], [1, 2]], np.uint8)
    assert np.isnan(
        fp8_int.amax_fp8(codes.reshape(-1).data, (2, 2), Grid(np.ones((1, 1), np.float32), (2, 2)))
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 32, 128])
def test_integers_are_decoded_as_compressed_tensors_does_it(
    bits: int, symmetric: bool, group: int | None
) -> None:
    rows, columns = 21, 384
    rng = generator(22, bits)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
    )
    groups = columns // (group or columns)
    half = 1 << bits - 1
    scales = torch.from_numpy(rng.lognormal(-5, 1, (rows, groups)).astype(np.float32))
    state = {
        "weight": torch.from_numpy(rng.normal(0, 0.2, (rows, columns)).astype(np.float32)),
        "weight_scale": scales,
    }
    if not symmetric:
        zero_points = rng.integers(-half, half, (rows, groups)).astype(np.int8)
        state["weight_zero_point"] = torch.from_numpy(zero_points)
    stored = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(stored, scheme)["weight"].numpy()
    zeros = None
    if not symmetric:
        zeros = fp8_int.read_zero_points(
            stored["weight_zero_point"].numpy().reshape(-1).view(np.uint8).data,
            (rows, groups),
            bits,
        )
        assert (zeros == zero_points).all()
    packed = stored["weight_packed"].numpy()
    block = Grid(scales.numpy(), (1, group or columns))
    assert len(np.unique(expected)) > 100
    same(
        fp8_int.decode_integers(
            packed.reshape(-1).view(np.uint8).data, (rows, columns), block, bits, zeros
        ),
        expected,
    )
    below = Grid(block.scales, block.block, 8)
    same(
        fp8_int.decode_integers(
            packed[8:].reshape(-1).view(np.uint8).data, (13, columns), below, bits, zeros
        ),
        expected[8:],
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_padding_behind_integers_is_left_out(bits: int) -> None:
    """compressed-tensors rounds a row up to whole items."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    values = generator(23).integers(-8, 8, (3, 37)).astype(np.int8)
    packed = pack_to_int32(torch.from_numpy(values), bits).numpy()
    found = fp8_int.decode_integers(
        packed.reshape(-1).view(np.uint8).data,
        (3, 37),
        Grid(np.ones((3, 1), np.float32), (1, 37)),
        bits,
    )
    assert (found == values).all()


@pytest.mark.parametrize("block", [(1, 416), (9, 416), (1, 32), (4, 128)])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_encoded_as_torch_and_ml_dtypes_do_it(
    make,  # type: ignore[no-untyped-def]
    dtype: str,
    block: tuple[int, int],
) -> None:
    values = make(dtype, 9, 416)
    x, wide = matrix(values, dtype), values.astype(np.float32)
    amax = np.zeros((-(-9 // block[0]), -(-416 // block[1])), np.float32)
    fp8_int.grid_amax(x, Grid(amax, block))
    for row, column in np.ndindex(amax.shape):
        own = wide[row * block[0] :, column * block[1] :][: block[0], : block[1]]
        assert amax[row, column] == np.abs(own).max()
    grid = Grid(fp8_int.fp8_scales_of(amax), block)
    scales = expanded(grid.scales, block, wide.shape)
    quotients = (torch.from_numpy(wide) / scales).clamp(-448, 448)
    found = fp8_int.quantize_fp8(x, grid)
    assert (found == quotients.to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()
    assert (found == quotients.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    costs = np.zeros(amax.shape)
    fp8_int.fp8_costs(x, grid, costs)
    back = quotients.to(torch.float8_e4m3fn).float() * scales
    errors = (torch.from_numpy(wide).double() - back.double()).square().numpy()
    for row, column in np.ndindex(amax.shape):
        own = errors[row * block[0] :, column * block[1] :][: block[0], : block[1]]
        np.testing.assert_allclose(costs[row, column], own.sum(), rtol=1e-12)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
@pytest.mark.parametrize("make", USUAL.values(), ids=USUAL)
def test_mxfp8_is_encoded_as_torchao_does_it(make, rule: str) -> None:  # type: ignore[no-untyped-def]
    """MXTensor's bytes; not where its exponent leaves what float32 holds, or a block is zero."""
    mode = {"floor": "FLOOR", "even": "EVEN", "ceil": "RCEIL"}[rule]
    values = make("BF16", 64, 416)
    x = torch.from_numpy(values.astype(np.float32)).bfloat16()
    their_scales, their_codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])
    amax = np.zeros((64, 13), np.float32)
    fp8_int.grid_amax(matrix(values, "BF16"), Grid(amax, (1, 32)))
    scales = fp8_int.mxfp8_scales_of(amax, rule)
    codes = fp8_int.quantize_fp8(matrix(values, "BF16"), Grid(scales, (1, 32)))
    usual = (amax > 2.0**-110) & (amax < 2.0**120)
    theirs = their_scales.view(torch.uint8).numpy()
    assert usual.sum() > 100
    assert (fp8_int.encode_e8m0(scales) == theirs)[usual].all()
    is_usual = usual.repeat(32, axis=1)
    found = codes[is_usual], their_codes.view(torch.uint8).numpy()[is_usual]
    assert (found[0] == found[1]).all()


def test_mxfp8_scales_by_hand() -> None:
    """256 to 448 units are one binade; 448 and 496 are where ceil and even go up."""
    amax = np.array([0, 1, 256, 448, 448.25, 495.5, 496, 511, 2.0**-149, 3e38], np.float32)
    amax = amax.reshape(1, -1)
    floor = [0, 119, 127, 127, 127, 127, 127, 127, 0, 246]
    even = [0, 119, 127, 127, 127, 127, 128, 128, 0, 246]
    ceil = [0, 119, 127, 127, 128, 128, 128, 128, 0, 246]
    for rule, expected in (("floor", floor), ("even", even), ("ceil", ceil)):
        found = fp8_int.encode_e8m0(fp8_int.mxfp8_scales_of(amax, rule))
        assert found.tolist() == [expected], rule


def test_fp8_scales() -> None:
    smallest = 2.0**-149
    amax = np.array([0, 448, 1, smallest, 224 * smallest, 300 * smallest], np.float32)
    assert fp8_int.fp8_scales_of(amax).tolist() == [
        1,
        1,
        float(np.float32(1) / np.float32(448)),
        1,
        1,
        smallest,
    ]


def test_fp8_codes_by_hand() -> None:
    """Ties to even, signed zeros and underflows, saturation where amax / 448 was rounded down."""
    values = np.array(
        [[448, -448, 17, 19, 2.0**-10, 2.0**-10 + 2.0**-20, -(2.0**-11), -0.0, 0.0, 470, -1e30]],
        np.float32,
    )
    grid = Grid(np.ones((1, 1), np.float32), (1, 11))
    found = fp8_int.quantize_fp8(matrix(values, "F32"), grid)
    assert found.tolist() == [[0x7E, 0xFE, 0x58, 0x5A, 0, 1, 0x80, 0x80, 0, 0x7E, 0xFE]]


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_transpose(dtype: str) -> None:
    kind = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32}[dtype]
    values = np.arange(5 * 8, dtype=kind).reshape(5, 8)
    found = fp8_int.transpose(
        Matrix(values.reshape(-1).view(np.uint8).data, dtype, (5, 8)), range(3, 8, 2)
    )
    assert (found.shape, found.dtype) == ((3, 5), dtype)
    assert np.frombuffer(found.data, kind).tolist() == [
        3,
        11,
        19,
        27,
        35,
        5,
        13,
        21,
        29,
        37,
        7,
        15,
        23,
        31,
        39,
    ]


def test_bf16() -> None:
    values = PLAIN["random_bits"]("F32", 40, 512)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
    assert bytes(fp8_int.to_bf16(values)) == expected.tobytes()
    assert np.isnan(
        np.frombuffer(fp8_int.to_bf16(np.array([[np.nan]], np.float32)), ml_dtypes.bfloat16)
    ).all()
