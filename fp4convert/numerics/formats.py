"""NVFP4, MXFP4, FP8, MXFP8 and INT4 as rows of constants.

Where the numbers 16, 32, 6, 448 or 2688 stand for a format, this module alone writes them. Sources:
OCP Microscaling Formats (MX) v1.0 for E2M1, E8M0, MXFP4 and MXFP8; NVIDIA's NVFP4 as ModelOpt
writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fp4convert.errors import InputError, did_you_mean

E2M1_MAX = 6.0  # largest E2M1 magnitude
E4M3_MAX = 448.0  # largest finite E4M3 (e4m3fn) magnitude
E4M3_MIN = 2.0**-9  # smallest positive E4M3 magnitude
E4M3_NORMAL = 2.0**-6  # smallest one with all four bits
E8M0_STORED_MAX = 252  # 6 * 2**(252 - 127) is still finite in float32
MXFP8_STORED_MAX = 246  # 448 * 2**(246 - 127) is
GLOBAL_RANGE = E2M1_MAX * E4M3_MAX  # 2688: the amax that a global scale of 1 stands for
# The same under that rule, which has to represent 1.5 times the largest scale, 384.
FOUR_OVER_SIX_RANGE = E2M1_MAX * 256.0
GLOBAL_SCALE_MIN = 2.0**-126  # smallest normal float32

CODES = 16  # of four bits
WITHOUT_SIGNS = 0x77  # of both codes of a byte
ROW_SUMS = 5  # that tell what a row has lost: error_sums.py
IMPORTANCE = "importance"  # the scale rule that weighs errors with the second moments of the inputs
GRAMS = ("none", "diag", "block:N", "full")  # products of inputs that a calibration can keep
METHODS = RTN, GPTQ, AWQ = "rtn", "gptq", "awq"  # of rounding, the default first
UNAIDED = (RTN,)  # methods that need no statistics; AWQ multiplies columns
DAMPING, PASSES = 0.05, 3  # of gptq, where nobody says

FP4_CODES, FP8_CODES = "fp4_e2m1", "fp8_e4m3"  # the element dtypes of four and of eight bits
Kind = Literal["multiplier", "divisor"]


@dataclass(frozen=True, slots=True)
class Format:
    """What the codes of a matrix are, and which of them share a scale.

    block_size  codes along the last axis that share a block scale; 0 where a form says it: one
                scale for a matrix, for a row, or for a block of rows and columns
    """

    name: str
    block_size: int
    scale_dtype: str
    scale_rules: tuple[str, ...]
    default_rule: str
    element_dtype: str = FP4_CODES
    has_global_scale: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def is_fp4(self) -> bool:
        """Tell whether the codes are E2M1."""
        return self.element_dtype == FP4_CODES

    @property
    def is_fp8(self) -> bool:
        """Tell whether the codes are E4M3."""
        return self.element_dtype == FP8_CODES


# Rules stand in the order that kernels/fp4.h numbers them in.
_NVFP4_RULES = ("amax", "mse", "four-over-six", IMPORTANCE)
_POWERS = ("floor", "even", "ceil", "mse")
NVFP4 = Format("nvfp4", 16, "fp8_e4m3", _NVFP4_RULES, "mse", has_global_scale=True)
MXFP4 = Format("mxfp4", 32, "e8m0", (*_POWERS, IMPORTANCE), "even")
FP8 = Format("fp8", 0, "fp32", ("amax", "mse"), "amax", FP8_CODES)
MXFP8 = Format("mxfp8", 32, "e8m0", _POWERS, "mse", FP8_CODES)
INT4 = Format("int4", 0, "bf16", ("amax",), "amax", "int4")
FP4_FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}
FORMATS = {**FP4_FORMATS, FP8.name: FP8, MXFP8.name: MXFP8}  # that a module can become
STORED_FORMATS = {**FORMATS, INT4.name: INT4}  # that a module can be found in


class FloatType(NamedTuple):
    """A type of unquantized weights, with its largest finite value."""

    word: str
    config_name: str
    nbytes: int
    largest: float


FLOAT_TYPES = {  # by safetensors' name
    "BF16": FloatType("bf16", "bfloat16", 2, 2.0**128 - 2.0**119),
    "F16": FloatType("fp16", "float16", 2, 65504.0),
    "F32": FloatType("fp32", "float32", 4, 2.0**128 - 2.0**103),
}


def format_named(name: str, known: Mapping[str, Format] = FORMATS) -> Format:
    """Look the format of that name up; InputError names the known ones."""
    if isinstance(name, str) and name in known:
        return known[name]
    detail = f"format {name!r} is not known; expected one of {', '.join(known)}"
    detail += did_you_mean(name, known)
    raise InputError("unknown-format", detail, "Choose one of these.")


def dtype_named(word: str) -> str:
    """Translate a user's word for a float type to safetensors' name."""
    known = {kind.word: dtype for dtype, kind in FLOAT_TYPES.items()}
    if isinstance(word, str) and word in known:
        return known[word]
    detail = f"dtype {word!r} is not known; expected one of {', '.join(known)}"
    # torch.bfloat16, numpy.float32 and numpy.dtype("float32") end with what config.json says.
    name = word.__name__ if isinstance(word, type) else str(word).rpartition(".")[2]
    meant = {kind.config_name: kind.word for kind in FLOAT_TYPES.values()}
    near = did_you_mean(word, known)
    near = f"; did you mean {meant[name]}?" if name in meant else near
    raise InputError("unknown-dtype", detail + near)


def check_rule(fmt: Format, rule: str) -> str:
    """Return the rule; InputError where `fmt` has no such rule."""
    if not isinstance(rule, str) or rule not in fmt.scale_rules:
        known = ", ".join(fmt.scale_rules)
        detail = f"scale rule {rule!r} does not belong to {fmt.name}; expected one of {known}"
        detail += did_you_mean(rule, fmt.scale_rules)
        next_step = f"Choose one of these, or leave it out for {fmt.default_rule}."
        raise InputError("unknown-scale-rule", detail, next_step)
    return rule


def kernel_of(fmt: Format, rule: str) -> str:
    """Name the kernel for a rule, less its dtype."""
    is_searched = check_rule(fmt, rule) in ("mse", "four-over-six")
    kind = "weigh" if rule == IMPORTANCE else "search" if is_searched else "quantize"
    return f"{kind}_{fmt.name}"


def rule_number(fmt: Format, rule: str) -> tuple[int, ...]:
    """Return the number that kernels/fp4.h has for a rule, or nothing."""
    is_lone = rule in ("amax", IMPORTANCE) or (rule == "mse" and not fmt.has_global_scale)
    return () if is_lone else (fmt.scale_rules.index(rule),)


def global_range(rule: str) -> float:
    """Return the amax that a global scale of 1 stands for under a rule."""
    return FOUR_OVER_SIX_RANGE if rule == "four-over-six" else GLOBAL_RANGE
