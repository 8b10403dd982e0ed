"""How an artifact spells a quantized matrix: every module here offers a Dialect; nothing above knows a tensor's suffix."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from fp4convert.errors import InputError
from fp4convert.formats import FLOAT_TYPES, Format, Kind, Quantized, format_named
from fp4convert.recipe import Target, matches
from fp4convert.shard import TensorRef, TensorSpec

_PACKED_SUFFIXES = ("_blocks", "_scales", ".qweight", ".qzeros")  # of dialects that this version does not read
ACTIVATIONS_FP4 = 4
SMALLEST_INPUT_SCALE = 2.0**-100  # it and its inverse are far inside float32
MODULES = {"compressed-tensors": "compressed_tensors", "modelopt": "modelopt"}
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Form:
    """What an artifact says of its weights beside their names.

    activations  16: only weights are quantized; 4: engines quantize activations too, NVFP4 with an input scale
    """

    format: Format
    activations: int = 16

    @property
    def has_input_scale(self) -> bool:
        return self.activations == ACTIVATIONS_FP4 and self.format.has_global_scale


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized module as it is stored.

    refs        what its matrix is decoded from, the packed codes first
    shape       (rows, columns)
    companions  its other tensors, such as an input scale, which only a quantized module has
    """

    refs: tuple[TensorRef, ...]
    shape: tuple[int, int]
    companions: tuple[TensorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """Modules that engines must not take for quantized.

    modules   every module of the checkpoint that stays
    patterns  globs (or "re:" expressions) that fit many of them, and tied heads that the checkpoint lacks; an engine may put
              a prefix before the checkpoint's names, under which a pattern still holds
    """

    modules: tuple[str, ...]
    patterns: tuple[str, ...]

    def apart(self) -> list[str]:
        """Modules that no pattern fits."""
        return [module for module in self.modules if not any(matches(pattern, module) for pattern in self.patterns)]


class Dialect(Protocol):
    """Names, places and records of one kind of artifact; a module with these names is one.

    FORMATS            the formats it can say
    GLOBAL_SCALE_KIND  whether its global scale is a multiplier or a divisor
    SUFFIXES           endings of a quantized module's tensors, which no unquantized checkpoint has
    COMPANIONS         endings of a quantized module's other tensors, which mean nothing to ordinary weights
    """

    FORMATS: tuple[Format, ...]
    GLOBAL_SCALE_KIND: Kind
    SUFFIXES: tuple[str, ...]
    COMPANIONS: tuple[str, ...]

    @staticmethod
    def outputs(module: str, shape: tuple[int, int], form: Form) -> tuple[TensorSpec, ...]:
        """The tensors that stand for one matrix of (rows, columns)."""

    @staticmethod
    def encode(module: str, rows: Quantized) -> dict[str, memoryview]:
        """Bytes of some whole rows, to be appended to the outputs of those names."""

    @staticmethod
    def encode_global(module: str, q: Quantized, input_scale: float | None) -> dict[str, memoryview]:
        """Bytes that stand once per matrix: its global scale, and its input scale, given as a multiplier, where it has one."""

    @staticmethod
    def decode(module: str, shape: tuple[int, int], fmt: Format, read: Callable[[str], memoryview]) -> Quantized:
        """The matrix behind the tensors of that module; `read` gives a tensor's bytes by its name."""

    @staticmethod
    def decode_input_scale(module: str, read: Callable[[str], memoryview]) -> float:
        """The input scale of that module as a multiplier, not rounded."""

    @staticmethod
    def records(form: Form, ignored: Ignored, quantized: Iterable[str]) -> dict[str, Json]:
        """What its engines read: file name -> object; the one for config.json is its quantization_config."""

    @staticmethod
    def recognise(quantization_config: Mapping[str, object]) -> Form | None:
        """The form that such a record declares, or None where it is not this dialect's."""

    @staticmethod
    def is_ignored(quantization_config: Mapping[str, object], module: str) -> bool:
        """True where engines that read this record would take the module for an ordinary one."""


def dialect_named(name: str, fmt: Format | None = None) -> Dialect:
    """The dialect of that name; InputError where it is unknown or cannot say `fmt`."""
    if name not in MODULES:
        raise InputError("unknown-dialect", f"dialect {name!r} is not known; expected one of {', '.join(MODULES)}")
    dialect = cast(Dialect, import_module(f"fp4convert.dialects.{MODULES[name]}"))
    if fmt is not None and fmt not in dialect.FORMATS:
        able = ", ".join(known.name for known in dialect.FORMATS)
        raise InputError(
            "dialect-format",
            f"dialect {name} cannot hold {fmt.name}; it holds {able}",
            "Choose another --dialect or --format.",
        )
    return dialect


def form_of(target: Target) -> Form:
    """The form of what is made."""
    return Form(format_named(target.format), target.activations)


def quantized_modules(dialect: Dialect, names: Iterable[str]) -> list[str]:
    """The modules that at least one of those tensor names says to be quantized, in order."""
    found = (name.removesuffix(ending) for name in names for ending in dialect.SUFFIXES if name.endswith(ending))
    return sorted(set(found))


def is_quantized_tensor(ref: TensorRef) -> bool:
    """True for a tensor that only an already quantized checkpoint has, in any dialect."""
    if any(ref.name.endswith(dialect_named(known).SUFFIXES) for known in MODULES):
        return True
    return (ref.name.endswith(_PACKED_SUFFIXES) and ref.dtype not in FLOAT_TYPES) or ref.name.endswith(".weight_scale_inv")


def encode_global_scale(q: Quantized, kind: Kind) -> memoryview:
    """The four bytes of a global scale as that kind."""
    if q.global_scale is None:
        raise RuntimeError(f"{q.format.name} has no global scale")
    return encode_scalar(q.global_scale, is_inverse=q.kind != kind)


def is_reversible(scalar: float | None) -> bool:
    """True where the float32 reciprocal of the float32 reciprocal is the float32 itself; of nothing, too."""
    if scalar is None:
        return True
    (there,) = struct.unpack("<f", encode_scalar(scalar, is_inverse=True))
    return bytes(encode_scalar(there, is_inverse=True)) == bytes(encode_scalar(scalar))


def check_input_scale(fmt: Format, activations: int, input_scale: float | None) -> float | None:
    """The input scale of every module, a multiplier, or None where the form has none.

    activations  16 or 4
    input_scale  None is 1.0, NVIDIA's choice without calibration
    Raises       InputError where the two do not go together, or the scale or its inverse is no positive normal float32
    """
    if activations not in (16, ACTIVATIONS_FP4):
        raise InputError("bad-activations", f"--activations {activations} is not known; expected 16 or 4")
    has_one = Form(fmt, activations).has_input_scale
    if not has_one:
        if input_scale is not None:
            detail = f"--input-scale means nothing for {fmt.name} with {activations}-bit activations"
            raise InputError("bad-input-scale", f"{detail}; it is for nvfp4 with --activations 4", "Leave it out.")
        return None
    wide = 1.0 if input_scale is None else input_scale
    if not SMALLEST_INPUT_SCALE <= wide <= 1 / SMALLEST_INPUT_SCALE:
        detail = f"--input-scale {wide:g}; expected a number from {SMALLEST_INPUT_SCALE:g} to {1 / SMALLEST_INPUT_SCALE:g}"
        raise InputError("bad-input-scale", detail)
    return wide


def encode_scalar(value: float, is_inverse: bool = False) -> memoryview:
    """The four bytes of a float32; inverted it is fl(1/x): float64, then one rounding."""
    return memoryview(struct.pack("<f", 1 / value if is_inverse else value))


def strings(value: object) -> list[str]:
    """The strings of a list in somebody's JSON; nothing where it is no list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
