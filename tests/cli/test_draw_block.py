"""The picture of a block says where bits are: bytes that other packages wrote are taken apart by
what it says.
"""

import ml_dtypes
import numpy as np
import pytest
from paths import GOLDEN
from safetensors import safe_open

from fp4convert.cli.draw_quality import draw_block, elements_of
from fp4convert.numerics.formats import FP8, MXFP4, NVFP4
from fp4convert.numerics.scale_layouts import swap_nibbles

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def block_of(lines: list[str], raw: np.ndarray) -> dict[int, float]:
    """Element -> the value of its code, by the positions that the drawn bytes show."""
    bits, meaning, elements = (line[: line.rindex("  ")] for line in lines)
    found: dict[int, float] = {}
    shown = [slice(0, 9), slice(11, 20), slice(27, 36)]
    for part, byte in zip(shown, (raw[0], raw[1], raw[-1]), strict=True):
        assert (bits[part], meaning[part]) == ("7654 3210", "seem seem")
        high, low = map(int, elements[part].split())
        found |= {high: float(E2M1[byte >> 4]), low: float(E2M1[byte & 15])}
    return found


def golden(file: str, *names: str) -> list[np.ndarray]:
    with safe_open(GOLDEN / f"{file}.safetensors", "np") as made:
        return [made.get_tensor(name).reshape(-1) for name in names]


@pytest.mark.parametrize("case", ["heavy_bf16", "heavy_fp32"])
def test_codes_of_modelopt_lie_as_drawn(case: str) -> None:
    """Its own values of a block, from its own bytes."""
    packed, values = golden("modelopt_nvfp4", f"{case}/weight", f"{case}/dequant_f32")
    found = block_of(draw_block(NVFP4, "low_first"), packed[:8])
    assert len(found) == 6
    step = next(values[element] / value for element, value in found.items() if value)
    assert {element: np.float32(value * step) for element, value in found.items()} == {
        e: values[e] for e in found
    }


@pytest.mark.parametrize("case", ["heavy_bf16", "heavy_fp32"])
def test_codes_of_torchao_lie_as_drawn(case: str) -> None:
    packed, scales = golden("torchao_mxfp4", f"{case}/qdata_floor", f"{case}/scale_floor")
    (values,) = golden("inputs", case)
    step = 2.0 ** (int(scales.view(np.uint8)[0]) - 127)
    found = block_of(draw_block(MXFP4, "low_first"), packed[:16])
    errors = [
        abs(float(values[element]) - value * step) for element, value in found.items() if value < 6
    ]
    assert errors
    assert max(errors) <= step


def test_orders_of_nibbles() -> None:
    packed = np.arange(8, dtype=np.uint8) * 17 + np.uint8(16)
    low, high = elements_of(NVFP4, "low_first"), elements_of(NVFP4, "high_first")
    assert [pair[::-1] for pair in low] == high
    swapped = np.frombuffer(swap_nibbles(packed.data), np.uint8)
    assert (packed >> 4).tolist() == (swapped & 15).tolist()
    assert elements_of(MXFP4, "half_split")[0] == (16, 0)
    assert elements_of(MXFP4, "half_split")[-1] == (31, 15)
    for fmt in (NVFP4, MXFP4):
        for order in ("low_first", "high_first", "half_split"):
            assert sorted(sum(elements_of(fmt, order), ())) == list(range(fmt.block_size))


def test_bits_of_scales_are_those_of_their_types() -> None:
    """1.5 has the exponent's bias and the mantissa's highest bit: where the letters say."""
    letters = draw_block(NVFP4, "low_first")[1][-8:]
    byte = int(np.array([1.5], ml_dtypes.float8_e4m3fn).view(np.uint8)[0])
    assert letters == "-eeeemmm"
    exponent = int("".join("1" if letter == "e" else "0" for letter in letters), 2)
    bias = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).maxexp - 2
    assert (byte & exponent) >> 3 == bias == 7
    assert byte & 7 == 4
    assert draw_block(MXFP4, "low_first")[1].endswith("  eeeeeeee")


def test_a_format_without_such_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8 has no blocks"):
        draw_block(FP8, "low_first")
