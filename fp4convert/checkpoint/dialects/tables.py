"""Tensors of one matrix, for dialects that store them alike.

A dialect is a Table where each of these is a tensor of its own, with linear block scales; others use its Scalars alone.
A Fp8Table says the same of FP8 matrices, which some dialects hold beside four-bit ones.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fp4convert.checkpoint.dialects.forms import Form, Granularity, granularity_word
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FP8, INT4, Format, Kind
from fp4convert.numerics.matrices import Blocks, Quantized, Span, Spans
from fp4convert.storage.safetensors import TensorRef, TensorSpec

SMALLEST_SCALE = 2.0**-126  # smallest normal float32; its reciprocal is one too
Read = Callable[[str], Span]
Part = tuple[str, memoryview]
INT4_PER_ITEM = 8  # codes in an I32
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that counts layers or experts


def targets_of(modules: Iterable[str], others: Iterable[str], prefix: str = "") -> list[str]:
    """Expressions that fit those modules and none of the others.

    Modules whose names differ in numbers alone share one expression where it fits no other.

    prefix  an expression for what engines may put before a name, or instead of what stands before its layers; left out where
            another name would fit with it
    """
    fitting, strange = defaultdict(list), {_NUMBER.sub("0", other) for other in others}
    endings = {
        template[dot + 1 :]
        for template in strange
        for dot, letter in enumerate(template)
        if letter == "."
    }
    for module in modules:
        fitting[_NUMBER.sub("0", module)].append(module)
    targets = []
    for template, names in fitting.items():
        before = "re:" + ("" if template in endings else prefix)
        if template in strange:
            targets += [f"{before}{re.escape(name)}$" for name in names]
            continue
        core = from_layers(names[0])
        is_clear = bool(prefix) and not {_NUMBER.sub("0", core)} & (strange | endings)
        targets.append(
            before
            + r"\d+".join(map(re.escape, _NUMBER.split(core if is_clear else names[0])))
            + "$"
        )
    return list(dict.fromkeys(targets))


def from_layers(module: str) -> str:
    """A module's name from its layers on: what stands before, engines call by other names for models of several parts.

    model.language_model.layers.3.mlp.up_proj -> layers.3.mlp.up_proj; the whole where it counts nothing
    """
    number = _NUMBER.search(module)
    return (
        module[module[: number.start() - 1].rfind(".") + 1 :]
        if number and number.start()
        else module
    )


def parents_of(module: str) -> Iterator[str]:
    """The names above a module's, the nearest first."""
    while module := module.rpartition(".")[0]:
        yield module


@dataclass(frozen=True, slots=True)
class Scalars:
    """The float32 that stand once per matrix.

    global_scale  ending of the global scale's name; None: there is no place for one, and it is 1
    input_scale   ending of the name of the scale of activations, or None
    shape         of both: () or (1,)
    kind          whether both are multipliers or divisors
    is_apart      they stand in the file for scales alone
    """

    global_scale: str | None
    input_scale: str | None = None
    shape: tuple[int, ...] = ()
    kind: Kind = "multiplier"
    is_apart: bool = False

    def specs(self, stem: str, form: Form) -> Iterator[TensorSpec]:
        """The tensors of a matrix of that form."""
        if self.global_scale and form.format.has_global_scale:
            yield TensorSpec(stem + self.global_scale, "F32", self.shape, self.is_apart)
        if self.input_scale and form.has_input_scale:
            yield TensorSpec(stem + self.input_scale, "F32", self.shape, self.is_apart)

    def encode(self, stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
        """Their bytes; raises InputError where one cannot be said.

        input_scale  a multiplier, or None
        """
        if q.global_scale is not None and self.global_scale:
            yield (
                stem + self.global_scale,
                encode_scalar(q.global_scale, is_inverse=q.kind != self.kind),
            )
        elif q.global_scale not in (None, 1.0):
            found = f"{stem} has the global scale {q.global_scale:g}, stored as a {q.kind}"
            detail = f"{found}; this dialect has no place for one, expected 1"
            next_step = (
                "Quantize the original weights to this dialect, or dequantize the artifact first."
            )
            raise InputError("dialect-global-scale", detail, next_step, stem)
        if input_scale is not None and self.input_scale:
            yield (
                stem + self.input_scale,
                encode_scalar(input_scale, is_inverse=self.kind == "divisor"),
            )

    def decode_global(self, stem: str, form: Form, read: Read) -> float | None:
        """The stored global scale, where the format has one."""
        if not form.format.has_global_scale:
            return None
        return decode_scalar(read(stem + self.global_scale)) if self.global_scale else 1.0

    def decode_input(self, module: str, read: Read) -> float:
        """The scale of activations as a multiplier, not rounded."""
        return self.as_multiplier(decode_scalar(read(self.input_name(module))))

    def input_name(self, module: str) -> str:
        """The tensor of the scale of activations."""
        if self.input_scale is None:
            raise RuntimeError("this dialect has no input scales")
        return module + self.input_scale

    def as_multiplier(self, stored: float) -> float:
        """What is stored as a multiplier, not rounded."""
        if self.kind == "multiplier":
            return stored
        return 1 / stored if stored else math.inf


def schemes_of(record: Mapping[str, object]) -> list[dict[str, object]]:
    """What an engine's record says of every group of modules, as compressed-tensors and ModelOpt list them."""
    groups = record.get("config_groups")
    return (
        [scheme for scheme in groups.values() if isinstance(scheme, dict)]
        if isinstance(groups, dict)
        else []
    )


def scale_grid(shape: tuple[int, int], granularity: Granularity) -> tuple[int, int]:
    """(rows, columns) of the scales of a matrix of that shape; part of a block has a scale too."""
    if granularity == "tensor":
        return (1, 1)
    if granularity == "row":
        return (shape[0], 1)
    if isinstance(granularity, str):
        raise RuntimeError(f"granularity {granularity!r} is none")
    return (-(-shape[0] // granularity[0]), -(-shape[1] // granularity[1]))


@dataclass(frozen=True, slots=True)
class Fp8Table:
    """Names, types and shapes of FP8 matrices in a dialect: M.weight and M.weight_scale.

    made         what one scale stands for where weights become FP8 here
    scale_shape  of the scales' tensor, by granularity; None for one that the dialect cannot say
    input_scale  ending of the static scale of activations, which engines want with one scale for a matrix; None: there is none
    activations  bits to which engines quantize activations, by granularity, where they do not leave the choice
    """

    made: Granularity
    scale_shape: Callable[[tuple[int, int], Granularity], tuple[int, ...] | None]
    input_scale: str | None = None
    activations: Mapping[Granularity, int] = field(default_factory=dict)

    def unfit(self, shape: tuple[int, int], form: Form) -> str | None:
        """Why such a matrix has no place here; None where it has one."""
        if form.granularity is None or self.scale_shape(shape, form.granularity) is None:
            return f"FP8 with scales of {granularity_word(form.granularity or 'no known kind')}"
        return None

    def outputs(self, stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """Dialect.outputs."""
        rows, columns = shape
        scales = self.scale_shape((rows, columns), form.granularity) if form.granularity else None
        if scales is None:
            raise RuntimeError(
                f"{stem}: {self.unfit((rows, columns), form)} has no place in this dialect"
            )
        specs = [
            TensorSpec(f"{stem}.weight", "F8_E4M3", (rows, columns)),
            TensorSpec(f"{stem}.weight_scale", form.stored_scales, scales),
        ]
        if self.input_scale and self.has_input_scale(form):
            specs.append(TensorSpec(stem + self.input_scale, "F32", ()))
        return tuple(specs)

    def has_input_scale(self, form: Form) -> bool:
        """True where a static scale of activations stands beside such a matrix."""
        return self.input_scale is not None and form.format is FP8 and form.granularity == "tensor"

    def encode(
        self,
        stem: str,
        form: Form,
        panels: Iterable[tuple[memoryview, memoryview]],
        input_scale: float = 1.0,
    ) -> Iterator[Part]:
        """Bytes to append to outputs, by name.

        panels  codes of whole rows and scales as they are stored, one pair after the other; either may be empty
        """
        if self.input_scale and self.has_input_scale(form):
            yield stem + self.input_scale, encode_scalar(input_scale)
        for codes, scales in panels:
            if codes.nbytes:
                yield f"{stem}.weight", codes
            if scales.nbytes:
                yield f"{stem}.weight_scale", scales


@dataclass(frozen=True, slots=True)
class Table:
    """Names and types of a matrix that is stored as packed codes and linear block scales, each a tensor.

    packed        ending and dtype of the packed codes
    codes_per_item  how many of them are in one item of that dtype
    block_scales  ending of the block scales' name
    scale_dtypes  their dtype, by format
    fp8           how FP8 matrices stand beside four-bit ones; int4 ones are packed as compressed-tensors does it
    """

    packed: tuple[str, str]
    block_scales: str
    scale_dtypes: Mapping[Format, str]
    scalars: Scalars
    codes_per_item: int = 2
    fp8: Fp8Table | None = None

    def unfit(self, module: str, shape: tuple[int, int], form: Form) -> str | None:
        """Dialect.unfit."""
        return self.fp8.unfit(shape, form) if self.fp8 and form.format is FP8 else None

    def outputs(self, stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """Dialect.outputs."""
        *above, columns = shape
        ending, dtype = self.packed
        if self.fp8 and form.format is FP8:
            return self.fp8.outputs(stem, shape, form)
        if form.format is INT4:
            scales = scale_grid((above[0], columns), form.granularity or "row")
            packed = TensorSpec(stem + ending, "I32", (above[0], -(-columns // INT4_PER_ITEM)))
            shape_of = TensorSpec(f"{stem}.weight_shape", "I64", (2,))
            return (
                packed,
                TensorSpec(stem + self.block_scales, form.stored_scales, scales),
                shape_of,
            )
        return (
            TensorSpec(stem + ending, dtype, (*above, columns // self.codes_per_item)),
            TensorSpec(
                stem + self.block_scales,
                self.scale_dtypes[form.format],
                (*above, columns // form.format.block_size),
            ),
            *self.scalars.specs(stem, form),
        )

    def stored_shape(self, stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """Dialect.stored_shape."""
        if len(packed.shape) != 2:
            return None
        rows, items = packed.shape
        if not form.format.is_fp4:
            return rows, items * (INT4_PER_ITEM if form.format is INT4 else 1)
        return whole_blocks((rows, items * self.codes_per_item), form)

    def encode(
        self, stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Dialect.encode."""
        for rows in panels:
            yield stem + self.packed[0], rows.packed
            yield stem + self.block_scales, rows.block_scales

    def decode(self, stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """Dialect.decode."""
        *above, columns = shape
        stored, scales = read(stem + self.packed[0]), read(stem + self.block_scales)
        global_scale = self.scalars.decode_global(stem, form, read)
        return Spans(
            form.format,
            (math.prod(above), columns),
            stored,
            scales,
            global_scale,
            self.scalars.kind,
        )


def encode_int4(
    stem: str, shape: tuple[int, ...], panels: Iterable[tuple[memoryview, memoryview]]
) -> Iterator[Part]:
    """Bytes of packed integers as compressed-tensors names them, by name; panels as Fp8Table.encode has them."""
    for codes, scales in panels:
        if codes.nbytes:
            yield f"{stem}.weight_packed", codes
        if scales.nbytes:
            yield f"{stem}.weight_scale", scales
    yield f"{stem}.weight_shape", memoryview(struct.pack("<2q", *shape))


def half_columns(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
    """`stored_shape` where packed codes are (rows, columns / 2)."""
    return (
        whole_blocks((packed.shape[0], packed.shape[1] * 2), form)
        if len(packed.shape) == 2
        else None
    )


def whole_blocks(shape: tuple[int, ...], form: Form) -> tuple[int, ...] | None:
    """The shape itself where it holds at least one block and no part of one."""
    return shape if math.prod(shape) and shape[-1] % form.format.block_size == 0 else None


def is_reversible(scalar: float | None) -> bool:
    """True where the float32 reciprocal of the float32 reciprocal is the float32 itself; of nothing, too."""
    if scalar is None:
        return True
    there = decode_scalar(encode_scalar(scalar, is_inverse=True))
    return bytes(encode_scalar(there, is_inverse=True)) == bytes(encode_scalar(scalar))


def encode_scalar(value: float, is_inverse: bool = False) -> memoryview:
    """The four bytes of a float32; inverted it is fl(1/x): float64, then one rounding.

    Raises InputError where the reciprocal is no positive normal float32
    """
    if is_inverse and not SMALLEST_SCALE <= value <= 1 / SMALLEST_SCALE:
        detail = f"a scale is {value:g}, whose reciprocal is no float32; expected a positive number that has one"
        raise InputError(
            "scale-without-inverse", detail, "Dequantize the artifact, and quantize the result."
        )
    return memoryview(struct.pack("<f", 1 / value if is_inverse else value))


def decode_scalar(stored: Span) -> float:
    """The float32 in those four bytes."""
    return float(struct.unpack("<f", stored[:])[0])
