"""The formats as rows of constants, and the value that every backend makes and every dialect spells.

Where the numbers 16, 32, 6, 448 or 2688 stand for a format, this module alone writes them.
Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E8M0 and MXFP4; NVIDIA's NVFP4 as ModelOpt writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from fp4convert.errors import InputError

E2M1_MAX = 6.0  # largest E2M1 magnitude
E4M3_MAX = 448.0  # largest finite E4M3 (e4m3fn) magnitude
E4M3_MIN = 2.0**-9  # smallest positive E4M3 magnitude
E8M0_STORED_MAX = 252  # 6 * 2**(252 - 127) is still finite in float32
GLOBAL_RANGE = E2M1_MAX * E4M3_MAX  # 2688: the amax that a global scale of 1 stands for
FOUR_OVER_SIX_RANGE = E2M1_MAX * 256.0  # the same under that rule, which has to represent 1.5 times the largest scale, 384
GLOBAL_SCALE_MIN = 2.0**-126  # smallest normal float32

CODES = 16  # of four bits
ROW_SUMS = 5  # that tell what a row has lost: accounting.py
IMPORTANCE = "importance"  # the scale rule that weighs errors with the second moments of the inputs

PANEL_ELEMENTS = 4 << 20  # elements held at once: 8 MB of bf16 in, 2.3 MB out

Kind = Literal["multiplier", "divisor"]


@dataclass(frozen=True, slots=True)
class Format:
    """What the codes of a matrix are, and how many of them along the last axis share a block scale.

    block_size  0 where a form says it: one scale for a matrix, for a row, or for a block of rows and columns
    """

    name: str
    block_size: int
    scale_dtype: str
    scale_rules: tuple[str, ...]
    default_rule: str
    has_global_scale: bool
    element_dtype: str = "fp4_e2m1"

    @property
    def is_fp4(self) -> bool:
        """True where the codes are E2M1."""
        return self.block_size > 0


# Rules stand in the order that kernels/fp4.h numbers them in.
NVFP4 = Format("nvfp4", 16, "fp8_e4m3", ("amax", "mse", "four-over-six", IMPORTANCE), "mse", has_global_scale=True)
MXFP4 = Format("mxfp4", 32, "e8m0", ("floor", "even", "ceil", "mse", IMPORTANCE), "mse", has_global_scale=False)
FP8 = Format("fp8", 0, "fp32", ("amax",), "amax", has_global_scale=False, element_dtype="fp8_e4m3")
INT4 = Format("int4", 0, "bf16", ("amax",), "amax", has_global_scale=False, element_dtype="int4")
FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}  # of a whole artifact
MODULE_FORMATS = {**FORMATS, FP8.name: FP8}  # that a module can become
STORED_FORMATS = {**MODULE_FORMATS, INT4.name: INT4}  # that a module can be found in


class FloatType(NamedTuple):
    """A type of unquantized weights: a user's word for it, config.json's, bytes an element, largest finite value."""

    word: str
    config_name: str
    nbytes: int
    largest: float


FLOAT_TYPES = {  # by safetensors' name
    "BF16": FloatType("bf16", "bfloat16", 2, 2.0**128 - 2.0**119),
    "F16": FloatType("fp16", "float16", 2, 65504.0),
    "F32": FloatType("fp32", "float32", 4, 2.0**128 - 2.0**103),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights as they are stored: whole rows of a matrix, row-major.

    data   the bytes, little-endian; need not be aligned
    dtype  safetensors' name: BF16, F16 or F32
    """

    data: memoryview
    dtype: str
    shape: tuple[int, int]


class Weights(Protocol):
    """A matrix somewhere, fetched by ranges of whole rows, as often as is wanted; equal to another where it is the same one."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, first: int, last: int) -> Matrix:
        """Rows first..last-1, read-only, valid while their source is open."""

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        """Rows first..last-1 into a writable buffer of exactly their size."""

    def amaxes(self) -> Iterator[float] | None:
        """The largest magnitudes of parts that make up the whole, where they are found sooner than rows are."""


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """Weights that are in memory already."""

    matrix: Matrix

    @property
    def dtype(self) -> str:
        return self.matrix.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def rows(self, first: int, last: int) -> Matrix:
        width = self.shape[1] * FLOAT_TYPES[self.dtype].nbytes
        return Matrix(self.matrix.data[first * width : last * width], self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        buffer[:] = self.rows(first, last).data

    def amaxes(self) -> Iterator[float] | None:
        return None


class Compared(NamedTuple):
    """What rows of codes have lost: accounting.py says what the numbers are.

    rows    float64 (rows, ROW_SUMS)
    counts  int64 (CODES): how often each code occurs; empty where codes have more bits
    """

    rows: memoryview
    counts: memoryview


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix, or some whole rows of one, in canonical form: row-major, low nibble first, linear scales.

    packed        rows * columns / 2 bytes; element 2i in bits 0-3, element 2i+1 in bits 4-7
    block_scales  rows * columns / block_size bytes, E4M3 or E8M0
    global_scale  the stored float32, as an exact Python float; None where the format has none
    kind          how that float is meant: value = code * block_scale * multiplier, or code * block_scale / divisor
    compared      with the weights that they were made of, where that was done
    """

    format: Format
    shape: tuple[int, int]
    packed: memoryview
    block_scales: memoryview
    global_scale: float | None
    kind: Kind = "multiplier"
    compared: Compared | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and pickled with its bytes, but without `compared`."""
        bits = bytes(self.packed), bytes(self.block_scales)
        return _revived, (self.format.name, self.shape, bits, self.global_scale, self.kind)

    def rows(self, first: int, last: int) -> Quantized:
        """Rows first..last-1, sharing the same bytes."""
        columns = self.shape[1]
        packed = self.packed[first * columns // 2 : last * columns // 2]
        scales_per_row = columns // self.format.block_size
        block_scales = self.block_scales[first * scales_per_row : last * scales_per_row]
        return replace(self, shape=(last - first, columns), packed=packed, block_scales=block_scales, compared=None)

    def scales(self, first: int, last: int) -> memoryview:
        return self.rows(first, last).block_scales


class Span(Protocol):
    """Bytes somewhere, fetched by slices without a step; a memoryview is one."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def _revived(format: str, shape: tuple[int, int], bits: tuple[bytes, bytes], global_scale: float | None, kind: Kind) -> Quantized:
    return Quantized(FORMATS[format], shape, memoryview(bits[0]), memoryview(bits[1]), global_scale, kind)


class Blocks(Protocol):
    """A four-bit matrix somewhere, fetched by ranges of whole rows, as often as is wanted; a Quantized is one."""

    @property
    def format(self) -> Format: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def global_scale(self) -> float | None: ...

    @property
    def kind(self) -> Kind: ...

    def rows(self, first: int, last: int) -> Quantized:
        """Rows first..last-1 in canonical form."""

    def scales(self, first: int, last: int) -> memoryview:
        """The block scales of rows first..last-1, linear, without their codes where these lie elsewhere."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Blocks that lie somewhere in canonical form."""

    format: Format
    shape: tuple[int, int]
    packed: Span
    block_scales: Span
    global_scale: float | None
    kind: Kind = "multiplier"

    def rows(self, first: int, last: int) -> Quantized:
        half = self.shape[1] // 2
        packed = self.packed[first * half : last * half]
        shape = (last - first, self.shape[1])
        return Quantized(self.format, shape, packed, self.scales(first, last), self.global_scale, self.kind)

    def scales(self, first: int, last: int) -> memoryview:
        width = self.shape[1] // self.format.block_size
        return self.block_scales[first * width : last * width]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that are put into canonical form as they are fetched.

    fetch         (first, last + 1) of a range of rows -> its packed codes and its block scales
    fetch_scales  -> its block scales alone, where that is less work
    """

    format: Format
    shape: tuple[int, int]
    global_scale: float | None
    kind: Kind
    fetch: Callable[[int, int], tuple[memoryview, memoryview]]
    fetch_scales: Callable[[int, int], memoryview] | None = None

    def rows(self, first: int, last: int) -> Quantized:
        packed, block_scales = self.fetch(first, last)
        return Quantized(self.format, (last - first, self.shape[1]), packed, block_scales, self.global_scale, self.kind)

    def scales(self, first: int, last: int) -> memoryview:
        return self.fetch_scales(first, last) if self.fetch_scales else self.fetch(first, last)[1]


def row_panels(shape: tuple[int, int], elements: int = PANEL_ELEMENTS) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of ranges of whole rows, of about `elements` elements each."""
    rows, columns = shape
    height = max(1, elements // columns)
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def format_named(name: str, known: Mapping[str, Format] = FORMATS) -> Format:
    """The format of that name; InputError names the known ones."""
    if name not in known:
        raise InputError(
            "unknown-format", f"format {name!r} is not known; expected one of {', '.join(known)}", "Choose one of these."
        )
    return known[name]


def dtype_named(word: str) -> str:
    """safetensors' name of a type of unquantized weights, by a user's word; InputError names the known ones."""
    known = {kind.word: dtype for dtype, kind in FLOAT_TYPES.items()}
    if word not in known:
        raise InputError("unknown-dtype", f"dtype {word!r} is not known; expected one of {', '.join(known)}")
    return known[word]


def check_rule(fmt: Format, rule: str) -> str:
    """`rule` itself where `fmt` has it; InputError names the rules it has."""
    if rule not in fmt.scale_rules:
        known = ", ".join(fmt.scale_rules)
        detail = f"scale rule {rule!r} does not belong to {fmt.name}; expected one of {known}"
        raise InputError("unknown-scale-rule", detail, f"Choose one of these, or leave it out for {fmt.default_rule}.")
    return rule


def kernel_of(fmt: Format, rule: str) -> str:
    """The kernel for a rule, less its dtype; InputError for a rule of another format."""
    is_searched = check_rule(fmt, rule) in ("mse", "four-over-six")
    return f"{'weigh' if rule == IMPORTANCE else 'search' if is_searched else 'quantize'}_{fmt.name}"


def rule_number(fmt: Format, rule: str) -> tuple[int, ...]:
    """The number of the rule where its kernel has a choice of rules: as in kernels/fp4.h."""
    is_lone = rule in ("amax", IMPORTANCE) or (rule == "mse" and not fmt.has_global_scale)
    return () if is_lone else (fmt.scale_rules.index(rule),)


def global_range(rule: str) -> float:
    """The amax that a global scale of 1 stands for under a scale rule."""
    return FOUR_OVER_SIX_RANGE if rule == "four-over-six" else GLOBAL_RANGE
