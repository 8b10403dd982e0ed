"""Where the bits of a block lie, drawn with letters: s sign, e exponent, m mantissa, - unused."""

from __future__ import annotations

from fp4convert.formats import Format

CODE = "seem"  # E2M1, bit 3 first
SCALES = {"fp8_e4m3": "-eeeemmm", "e8m0": "eeeeeeee"}  # of a scale that is positive
SHOWN = 2  # bytes at the beginning of a block, before the dots


def elements_of(fmt: Format, nibble_order: str) -> list[tuple[int, int]]:
    """(element in bits 7-4, element in bits 3-0) of every byte of a block's codes.

    nibble_order  low_first, high_first or half_split, as Traits.nibble_order
    """
    half = fmt.block_size // 2
    if nibble_order == "half_split":
        return [(byte + half, byte) for byte in range(half)]
    pairs = [(2 * byte + 1, 2 * byte) for byte in range(half)]
    return pairs if nibble_order == "low_first" else [(low, high) for high, low in pairs]


def draw_block(fmt: Format, nibble_order: str) -> list[str]:
    """Three lines: numbers of bits, what they mean, of which elements of the block; ValueError for a format without blocks."""
    if fmt.scale_dtype not in SCALES:
        raise ValueError(f"{fmt.name} has no blocks to draw")
    elements = elements_of(fmt, nibble_order)
    first, last = ([_byte(*pair) for pair in part] for part in (elements[:SHOWN], elements[-1:]))
    scale = ("76543210", SCALES[fmt.scale_dtype], f"all {fmt.block_size}")
    return ["  ".join(line).rstrip() for line in zip(*first, ("   ", "...", "   "), *last, scale, strict=True)]


def _byte(high: int, low: int) -> tuple[str, str, str]:
    return "7654 3210", f"{CODE} {CODE}", f"{high:>4} {low:>4}"
