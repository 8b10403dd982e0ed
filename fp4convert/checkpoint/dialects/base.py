"""What every dialect offers: the protocol Dialect, and defaults.

Every other module of this folder that registry.py names is a Dialect. Nothing above knows the ending of a tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.stacks import Piece, Rows, Slot
from fp4convert.checkpoint.dialects.tables import Fp8Table, Part, Read, Scalars
from fp4convert.errors import Doubt
from fp4convert.numerics.formats import Format, Kind
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.recipes.patterns import matches_any
from fp4convert.storage.safetensors import TensorRef, TensorSpec

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Clues:
    """What a folder of weights says of itself.

    config           config.json
    hf_quant_config  hf_quant_config.json, which some producers write beside or instead
    tensors          by name
    """

    config: Json
    hf_quant_config: Json
    tensors: Mapping[str, TensorRef]

    @property
    def record(self) -> Json:
        """config.json's quantization_config, or that of the language model in it."""
        for config in (
            self.config,
            *(part for part in self.config.values() if isinstance(part, dict)),
        ):
            for key in ("quantization_config", "compression_config"):
                if isinstance(declared := config.get(key), dict):
                    return declared
        return {}


class Packed(NamedTuple):
    """A quantized module as it is stored.

    refs          what its matrix is decoded from, the packed codes first
    shape         (rows, columns)
    companions    its other tensors, such as an input scale, which only a quantized module has
    stem          what its tensors are named after: the module itself, or the stack that it is a part of
    stored_shape  of the matrix, or stack of matrices, of that name
    pieces        where its rows are in it
    form          what its tensors mean
    """

    refs: tuple[TensorRef, ...]
    shape: tuple[int, int]
    companions: tuple[TensorRef, ...]
    stem: str
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    form: Form


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
        return [module for module in self.modules if not matches_any(self.patterns, module)]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a dialect can say, and what its engines do.

    writes             the formats it is written in
    only_reads         those that engines refuse, but artifacts are in
    activations        the formats in which it can say that engines quantize activations to four bits
    container          the kind of file that holds it: safetensors or gguf
    layouts            the scale layouts it can say, its own first
    nibble_order       low_first: element 2i in bits 0-3 of a byte; high_first; half_split: as GGUF
    scalars            its global scale and input scale
    shares_scales      its engines multiply the members of a scale group as one matrix, with one global scale
    ignores_by_name    its records name the modules that stay; otherwise what has no scales stays
    holds_embeddings   its engines read four-bit embeddings
    highest_scale      the largest byte of a block scale that its engines read as what it is, by format; any where it is not named
    packed             ending of the tensor of packed codes
    suffixes           endings of a quantized module's tensors, which no unquantized checkpoint has
    companions         endings of a quantized module's other tensors, which mean nothing to ordinary weights
    implied            endings of scales that are 1 where a module has none
    labels             endings of tensors that say to engines what a module is, in text of any length
    cache_scales       endings, below an attention, of the scales of an FP8 cache of keys and of values; empty: it can say none
    mixes              the formats of which it holds several in one artifact, each module in its own; empty: one format at a time
    fp8                how it stores FP8 matrices beside four-bit ones
    """

    writes: tuple[Format, ...]
    scalars: Scalars
    only_reads: tuple[Format, ...] = ()
    activations: tuple[Format, ...] = ()
    container: str = "safetensors"
    layouts: tuple[str, ...] = ("linear",)
    nibble_order: str = "low_first"
    shares_scales: bool = False
    ignores_by_name: bool = False
    holds_embeddings: bool = False
    highest_scale: Mapping[Format, int] = field(default_factory=dict)
    packed: str = ".weight"
    suffixes: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    cache_scales: tuple[str, ...] = ()
    mixes: tuple[Format, ...] = ()
    fp8: Fp8Table | None = None

    @property
    def global_scale_kind(self) -> Kind | None:
        """Whether its global scale is a multiplier or a divisor; None: it has no place for one, so that it is 1."""
        return self.scalars.kind if self.scalars.global_scale else None

    @property
    def reads(self) -> tuple[Format, ...]:
        return self.writes + self.only_reads


class Dialect(Protocol):
    """Names, places and records of one kind of artifact; a module with these names is one.

    A stem is what the tensors of one stored matrix are named after.  Its shape is (rows, columns), and longer for a stack.
    """

    TRAITS: Traits

    @staticmethod
    def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """The matrices to store for modules of those shapes; InputError for modules that this dialect has no place for."""

    @staticmethod
    def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Which modules' rows a stored matrix of that shape holds."""

    @staticmethod
    def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
        """Why a module of that shape, of whole blocks, has no place in it; None where it has one."""

    @staticmethod
    def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """The tensors that stand for one stored matrix, the packed codes first."""

    @staticmethod
    def notes(form: Form, stems: Iterable[str]) -> dict[str, str]:
        """What engines want to read in the file that holds those stems."""

    @staticmethod
    def encode(
        stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Bytes to append to outputs, by name, for the whole rows that come in panels, one after the other."""

    @staticmethod
    def encode_scalars(stem: str, q: Blocks, input_scale: float | None) -> Iterator[Part]:
        """Bytes that stand once per matrix: its global scale, and its input scale, given as a multiplier, where it has one.

        Raises InputError where they cannot be said.
        """

    @staticmethod
    def find(tensors: Mapping[str, TensorRef]) -> list[str]:
        """The stems that at least one tensor says to be quantized, in order."""

    @staticmethod
    def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """The shape of the matrix whose packed codes that tensor is, or None where it is none."""

    @staticmethod
    def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """The matrix behind the tensors of that stem, a stack's matrices below each other; `read` gives bytes by name."""

    @staticmethod
    def decode_input_scale(module: str, read: Read) -> float:
        """The input scale of that module as a multiplier, not rounded."""

    @staticmethod
    def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
        """What its engines read: file name -> object; the keys of config.json's take their places in it.

        groups  of at least one form; of several where the dialect mixes them
        """

    @staticmethod
    def recognise(clues: Clues) -> tuple[Group, ...]:
        """The forms that such a folder declares, and which modules are of each; none where it is not this dialect's."""

    @staticmethod
    def judge(clues: Clues) -> Iterator[Doubt]:
        """What is wrong with such records by themselves."""

    @staticmethod
    def ignores(clues: Clues) -> Callable[[str], bool]:
        """Whether engines that read these records would take a module for an ordinary one, by its name."""


@dataclass(frozen=True, slots=True)
class MatrixEncoder:
    """A dialect with the form of a stored matrix, which makes all its bytes."""

    dialect: Dialect
    form: Form
    input_scale: float | None

    def encode(
        self, stem: str, shape: tuple[int, ...], panels: Iterator[Quantized]
    ) -> Iterator[Part]:
        """Yield the bytes to append to the outputs of a stem, by name.

        No panels, no bytes: then not even the scalars are written.
        """
        for first in panels:
            input_scale = self.input_scale if self.form.has_input_scale else None
            yield from self.dialect.encode_scalars(stem, first, input_scale)
            yield from self.dialect.encode(stem, shape, self.form, chain((first,), panels))


def each_alone(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """`stems` of a dialect that stores every module by itself."""
    return dict(shapes)


def whole(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    """`slots` of a dialect that stores every module by itself."""
    return ((Rows(stem, 0, shape[0]),),)


def always_fit(module: str, shape: tuple[int, int], form: Form) -> str | None:
    """`unfit` of a dialect that holds any matrix of whole blocks."""
    return None


def no_notes(form: Form, stems: Iterable[str]) -> dict[str, str]:
    """`notes` of a dialect whose engines read none."""
    return {}


def no_doubts(clues: Clues) -> Iterator[Doubt]:
    """`judge` of a dialect whose records cannot contradict themselves."""
    return iter(())


def ignores_none(clues: Clues) -> Callable[[str], bool]:
    """`ignores` of a dialect whose records name no module."""
    return lambda module: False


def stems_named(tensors: Mapping[str, TensorRef], endings: tuple[str, ...]) -> list[str]:
    """The stems that at least one tensor's name gives, in order."""
    found = {
        name.removesuffix(ending): None
        for ending in endings
        for name in tensors
        if name.endswith(ending)
    }
    return sorted(
        found
    )  # of a dict and no set: it keeps the order, in which long runs are sorted already


def is_fp8(tensors: Mapping[str, TensorRef], name: str) -> bool:
    """True where that tensor is there and FP8: its module has scales, and is not four-bit."""
    return name in tensors and tensors[name].dtype.startswith("F8_")


def strings(value: object) -> list[str]:
    """The strings of a list in somebody's JSON; nothing where it is no list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
