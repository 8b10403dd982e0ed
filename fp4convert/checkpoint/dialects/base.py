"""What every dialect offers: the protocol Dialect, and defaults.

Every module that registry.py names is a Dialect. Nothing above knows the ending of a tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.stacks import Rows, Slot, StridedRows
from fp4convert.checkpoint.dialects.tables import (
    CacheScales,
    CorrectionTable,
    Fp8Table,
    Part,
    Read,
    Scalars,
)
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FP8, MXFP8, Format, Kind
from fp4convert.numerics.matrices import Blocks, Quantized
from fp4convert.recipes.patterns import matches_any
from fp4convert.storage.safetensors import TensorRef, TensorSpec

Json = dict[str, object]


class Clues(NamedTuple):
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
        """Return quantization_config of config.json, or of a model nested in it."""
        for config in (
            self.config,
            *(part for part in self.config.values() if isinstance(part, dict)),
        ):
            for key in ("quantization_config", "compression_config"):
                if isinstance(declared := config.get(key), dict):
                    return declared
        return {}

    @property
    def is_recorded(self) -> bool:
        """Tell whether a record of an engine says that it is quantized."""
        return bool(self.record or self.hf_quant_config)


class Packed(NamedTuple):
    """A quantized module as it is stored.

    refs          what its matrix is decoded from, the packed codes first
    shape         (rows, columns)
    companions    its other tensors, such as an input scale, which only a quantized module has
    stem          what its tensors are named after: the module, or the stack that it is a part of
    stored_shape  of the matrix, or stack of matrices, of that name
    places        where its rows are in it
    form          what its tensors mean
    """

    refs: tuple[TensorRef, ...]
    shape: tuple[int, int]
    companions: tuple[TensorRef, ...]
    stem: str
    stored_shape: tuple[int, ...]
    places: tuple[StridedRows, ...]
    form: Form

    @property
    def number(self) -> int:
        """Count the matrices above it in a stack that holds one for each module."""
        return self.places[0].first // self.shape[0] if self.shape[0] else 0


class Ignored(NamedTuple):
    """Modules that engines must not take for quantized.

    modules   every module of the checkpoint that stays
    patterns  globs (or "re:" expressions) that fit many of them, and tied heads that the checkpoint
              lacks; a pattern still holds where an engine puts a prefix before the names
    renamed   what engines call modules by other names, also quantized ones
    """

    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    renamed: Mapping[str, tuple[str, ...]] = {}

    def apart(self) -> list[str]:
        """List the modules that no pattern fits."""
        return [module for module in self.modules if not matches_any(self.patterns, module)]

    def with_engine_names(self) -> tuple[str, ...]:
        """Return the modules by every name of theirs.

        Names of quantized modules are left out.
        """
        kept = set(self.modules)
        made = {
            name
            for module, names in self.renamed.items()
            if module not in kept
            for name in (module, *names)
        }
        others = (name for module in self.modules for name in self.renamed.get(module, ()))
        return tuple(dict.fromkeys((*self.modules, *(name for name in others if name not in made))))


@dataclass(frozen=True, slots=True)
class Traits:
    """What a dialect can say, and what its engines do.

    writes             the formats it is written in
    activations        formats in which it can say that engines quantize activations to four bits
    container          the kind of file that holds it: safetensors or gguf
    layouts            the scale layouts it can say, its own first
    nibble_order       low_first: element 2i in bits 0-3 of a byte; high_first; half_split: as GGUF
    scalars            its global scale and input scale
    shares_scales      engines multiply a scale group as one matrix, with one global scale
    ignores_by_name    records name the modules that stay; else what has no scales stays
    holds_embeddings   its engines read quantized embeddings
    highest_scale      largest byte of a block scale that engines read right, by format; any
                       byte for a format that is not named
    packed             ending of the tensor of packed codes
    suffixes           endings of a quantized module's tensors, as registry.py has them
    companions         endings of its other tensors, which mean nothing to ordinary weights
    implied            endings of scales that are 1 where a module has none
    labels             endings of tensors that tell engines what a module is, of any length
    cache_scales       scales of a cache of keys and values by what it holds, "fp8" or "nvfp4";
                       empty: it can say none
    mixes              formats that it holds beside each other; empty: one format at a time
    fp8                how it stores FP8 matrices beside four-bit ones
    q8_0               matrices that stay can be Q8_0
    floats             patterns of tensors that its engines read as floats alone
    unread_stacks      what follows a stack's name in that of its scales, of stacks that its engines
                       read and nothing here does
    correction         how it stores low-rank corrections, which every module of it has; its engines
                       then quantize activations to four bits, and look each module's name up
    """

    writes: tuple[Format, ...]
    scalars: Scalars
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
    cache_scales: Mapping[str, CacheScales] = field(default_factory=dict)
    mixes: tuple[Format, ...] = ()
    fp8: Fp8Table | None = None
    q8_0: bool = False
    floats: tuple[str, ...] = ()
    unread_stacks: tuple[str, ...] = ()
    correction: CorrectionTable | None = None

    @property
    def global_scale_kind(self) -> Kind | None:
        """Return how global scales are stored; None: there is no place for one."""
        return self.scalars.kind if self.scalars.global_scale else None

    def scales_of_cache(self, kind: str | None) -> CacheScales | None:
        """Return how scales of a cache are stored; of int8 caches as of FP8."""
        return self.cache_scales.get(kind, self.cache_scales.get("fp8")) if kind else None

    def eight_beside(self, fmt: Format) -> Format | None:
        """Return the eight-bit format that modules may have beside a four-bit one."""
        eights = (FP8, MXFP8) if fmt.is_fp4 else ()
        return next((eight for eight in eights if eight in self.mixes), None)


class Dialect(Protocol):
    """Names, places and records of artifacts; a module with these names.

    A stem is what the tensors of one stored matrix are named after. Its shape is (rows, columns),
    and longer for a stack.
    """

    TRAITS: Traits

    @staticmethod
    def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Return the matrices to store for modules of those shapes.

        Raises InputError for modules that this dialect has no place for.
        """

    @staticmethod
    def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Tell which modules' rows a stored matrix of that shape holds."""

    @staticmethod
    def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
        """Say why a module of whole blocks has no place; None where it has one."""

    @staticmethod
    def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """List the tensors of one stored matrix, the packed codes first."""

    @staticmethod
    def notes(forms: Mapping[str, Form]) -> dict[str, str]:
        """Return what engines read in the metadata of a file.

        forms  of the stems in it
        """

    @staticmethod
    def encode(
        stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Yield bytes to append to outputs, by name.

        panels  whole rows, one panel after the other
        """

    @staticmethod
    def find(tensors: Mapping[str, TensorRef]) -> list[str]:
        """Find the stems that a tensor says to be quantized, in order."""

    @staticmethod
    def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """Return the shape of the matrix of packed codes; None: there is none."""

    @staticmethod
    def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """Return the matrix of a stem, a stack's matrices below each other.

        read  gives the bytes of a tensor by its name
        """

    @staticmethod
    def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
        """Make what engines read: an object for each file name.

        The keys of config.json's object take their places in the model's own config.json.

        groups  of at least one form; of several where the dialect mixes them
        """

    @staticmethod
    def recognise(clues: Clues) -> tuple[Group, ...]:
        """Read which forms a folder declares; none where it is no such artifact."""

    @staticmethod
    def judge(clues: Clues) -> Iterator[Finding]:
        """Find what is wrong with such records by themselves."""

    @staticmethod
    def ignores(clues: Clues) -> Callable[[str], bool]:
        """Make a test of whether engines take a module for an ordinary one."""


class MatrixEncoder(NamedTuple):
    """A dialect with the form of a stored matrix, which makes all its bytes.

    input_scales  of the matrices of a stack, where they have one each
    """

    dialect: Dialect
    form: Form
    input_scale: float | None
    input_scales: tuple[float | None, ...] = ()

    def encode(
        self, stem: str, shape: tuple[int, ...], panels: Iterator[Quantized]
    ) -> Iterator[Part]:
        """Return the bytes to append to the outputs of a stem, by name.

        Asks for the first panel at once; without one not even the scalars are written.
        """
        first = next(panels, None)
        if first is None:
            return iter(())
        return self._encode(stem, shape, chain((first,), panels))

    def _encode(
        self, stem: str, shape: tuple[int, ...], panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Yield the scalars of each matrix of a stack, then its panels."""
        for number, own in groupby(_numbered(panels, shape[-2]), key=itemgetter(0)):
            matrix = (q for _, q in own)
            first, input_scale = next(matrix), None
            if self.form.has_input_scale:
                input_scale = self.input_scales[number] if self.input_scales else self.input_scale
            yield from self.dialect.TRAITS.scalars.encode(stem, first, input_scale)
            yield from self.dialect.encode(stem, shape, self.form, chain((first,), matrix))


def _numbered(panels: Iterable[Quantized], height: int) -> Iterator[tuple[int, Quantized]]:
    """Say of each panel which matrix of a stack it is of."""
    row = 0
    for q in panels:
        yield row // height, q
        row += q.shape[0]


def each_alone(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Serve as `stems` where every module is stored by itself."""
    return dict(shapes)


def whole(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    """Serve as `slots` where every module is stored by itself."""
    return ((Rows(stem, 0, shape[0]),),)


def nothing(*given: object) -> dict[str, Any]:
    """Serve as `notes`, or as `records`, where engines read none."""
    return {}


def no_doubts(clues: Clues) -> Iterator[Finding]:
    """Serve as `judge` where records cannot contradict themselves."""
    return iter(())


def ignores_none(clues: Clues) -> Callable[[str], bool]:
    """Serve as `ignores` where records name no module."""
    return lambda module: False


def stems_named(tensors: Mapping[str, TensorRef], endings: tuple[str, ...]) -> list[str]:
    """List the stems that at least one tensor's name gives, in order."""
    found: dict[str, None] = {}  # no set: in the order of the files long runs are sorted already
    for ending in endings:
        found |= {name.removesuffix(ending): None for name in tensors if name.endswith(ending)}
    return sorted(found)


def stems_of_scales(tensors: Mapping[str, TensorRef], endings: tuple[str, ...]) -> list[str]:
    """List the stems with such scales, but for FP8 modules, in order.

    The scales of an FP8 module may have the same names; its .weight tells.
    """
    return [
        stem
        for stem in stems_named(tensors, endings)
        if (ref := tensors.get(f"{stem}.weight")) is None or not ref.dtype.startswith("F8_")
    ]


def doubt_stacks(stacks: Sequence[TensorRef]) -> Iterator[Finding]:
    """Yield a doubt for stacks of experts in a dialect that reads none."""
    if stacks:
        detail = f"{len(stacks)} stacks of experts are not checked"
        yield Finding("warning", "stack-unread", None, f"{detail}, the first {stacks[0].name}")


def strings(value: object) -> list[str]:
    """Return the strings of a list in somebody's JSON; nothing for no list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def schemes_of(record: Mapping[str, object]) -> list[Json]:
    """Return what a record says of every group of modules.

    compressed-tensors and ModelOpt list them alike.
    """
    groups = record.get("config_groups")
    if not isinstance(groups, dict):
        return []
    return [scheme for scheme in groups.values() if isinstance(scheme, dict)]
