"""The protocol Dialect, its defaults, and the types that dialects share.

Every module that registry.py names is a Dialect; only dialects know the endings of tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    """The configs and headers of a folder of weights.

    config           config.json
    hf_quant_config  hf_quant_config.json, which some producers write beside or instead
    tensors          by name
    notes            metadata on quantization in the headers of files
    """

    config: Json
    hf_quant_config: Json
    tensors: Mapping[str, TensorRef]
    notes: tuple[str, ...] = ()

    @property
    def record(self) -> Json:
        """Return quantization_config of config.json, or of a model nested in it."""
        for config in (self.config, *map(json_object, self.config.values())):
            for key in ("quantization_config", "compression_config"):
                if isinstance(declared := config.get(key), dict):
                    return declared
        return {}

    @property
    def is_bare(self) -> bool:
        """Return whether there is no config: a single file, as ComfyUI has them."""
        return not (self.config or self.hf_quant_config)

    @property
    def is_recorded(self) -> bool:
        """Return whether an engine's record declares quantization."""
        return bool(self.record or self.hf_quant_config)

    def without(self, names: Collection[str]) -> Clues:
        """Leave tensors out."""
        left = {name: ref for name, ref in self.tensors.items() if name not in names}
        return self._replace(tensors=left) if names else self


class Packed(NamedTuple):
    """A quantized module as it is stored.

    refs          tensors that its matrix is decoded from, the packed codes first
    shape         (rows, columns)
    companions    other tensors of quantized modules, such as an input scale
    stem          beginning of its tensors' names: the module, or the stack that it is a part of
    stored_shape  of the matrix, or stack of matrices, of that name
    places        its rows in that matrix
    form          meaning of its tensors
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
              lacks; they still fit where an engine puts a prefix before the names
    renamed   engines' names of modules, kept and quantized
    """

    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    renamed: Mapping[str, tuple[str, ...]] = {}

    def apart(self) -> list[str]:
        """List the modules that no pattern fits."""
        return [module for module in self.modules if not matches_any(self.patterns, module)]

    def with_engine_names(self) -> tuple[str, ...]:
        """Return all names of the modules that no quantized module has."""
        kept = set(self.modules)
        quantized = {
            name
            for module, names in self.renamed.items()
            if module not in kept
            for name in (module, *names)
        }
        others = (name for module in self.modules for name in self.renamed.get(module, ()))
        return tuple(
            dict.fromkeys((*self.modules, *(name for name in others if name not in quantized)))
        )


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of a dialect and of its engines.

    writes             formats that can be written
    activations        formats whose activations engines can quantize to four bits
    container          kind of file: safetensors or gguf
    layouts            scale layouts, the default first
    nibble_order       low_first: element 2i in bits 0-3 of a byte; high_first; half_split: as GGUF
    scalars            global scale and input scale
    shares_scales      engines multiply a scale group as one matrix, with one global scale
    fuses_none         no engine of the dialect multiplies scale groups as one matrix
    ignores_by_name    records name the modules that stay; else modules without scales stay
    holds_embeddings   engines read quantized embeddings
    highest_scale      largest byte of a block scale that engines read right, by format; any
                       byte for a format that is not named
    packed             ending of the tensor of packed codes
    suffixes           endings of a quantized module's tensors, from registry.py
    companions         endings of other tensors, which ordinary weights do not have
    implied            endings of scales that are 1 where a module has none
    labels             endings of tensors that name a module's format for engines, of any length
    cache_scales       scales of a cache of keys and values by its format, "fp8" or "nvfp4"
    mixes              formats that can stand beside each other; empty: one format at a time
    fp8                table of FP8 matrices
    q8_0               matrices that stay can be Q8_0
    floats             patterns of tensors that engines read as floats alone
    takes_turns        ending of a tensor beside a stack whose members' rows take turns; "": none
    has_own_stacks     stacks of experts have names of the engine's classes, not of the model's
    correction         table of low-rank corrections, which every module has; engines then quantize
                       activations to four bits, and look up each module's name
    """

    writes: tuple[Format, ...]
    scalars: Scalars
    activations: tuple[Format, ...] = ()
    container: str = "safetensors"
    layouts: tuple[str, ...] = ("linear",)
    nibble_order: str = "low_first"
    shares_scales: bool = False
    fuses_none: bool = False
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
    takes_turns: str = ""
    has_own_stacks: bool = False
    correction: CorrectionTable | None = None

    @property
    def global_scale_kind(self) -> Kind | None:
        """Return the kind of stored global scales; None: there are none."""
        return self.scalars.kind if self.scalars.global_scale else None

    def scales_of_cache(self, kind: str | None) -> CacheScales | None:
        """Return the scales of a cache; int8 caches have those of FP8."""
        return self.cache_scales.get(kind, self.cache_scales.get("fp8")) if kind else None

    def eight_beside(self, fmt: Format) -> Format | None:
        """Return the eight-bit format that modules may have beside a four-bit one."""
        eights = (FP8, MXFP8) if fmt.is_fp4 else ()
        return next((eight for eight in eights if eight in self.mixes), None)


class Dialect(Protocol):
    """Names, places and records of artifacts; a module with these names.

    A stem begins the names of the tensors of one stored matrix, whose shape is (rows, columns), and
    longer for a stack.
    """

    TRAITS: Traits

    @staticmethod
    def stems(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Return the matrices to store for modules of those shapes.

        Raises InputError for modules that have no place
        """

    @staticmethod
    def slots(stem: str, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """List the modules' rows in a stored matrix of that shape."""

    @staticmethod
    def unfit(module: str, shape: tuple[int, int], form: Form) -> str | None:
        """Explain why a module of whole blocks has no place; None: it has one."""

    @staticmethod
    def outputs(stem: str, shape: tuple[int, ...], form: Form) -> tuple[TensorSpec, ...]:
        """List the tensors of one stored matrix, the packed codes first."""

    @staticmethod
    def notes(forms: Mapping[str, Form]) -> dict[str, str]:
        """Return a file's metadata for engines, by the forms of its stems."""

    @staticmethod
    def encode(
        stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Yield bytes to append to outputs, by name; panels are whole rows."""

    @staticmethod
    def find(tensors: Mapping[str, TensorRef]) -> list[str]:
        """List the stems whose tensors show that they are quantized, in order."""

    @staticmethod
    def stored_shape(stem: str, packed: TensorRef, form: Form) -> tuple[int, ...] | None:
        """Return the shape of the matrix of packed codes; None: codes do not fit."""

    @staticmethod
    def decode(stem: str, shape: tuple[int, ...], form: Form, read: Read) -> Blocks:
        """Return the matrix of a stem, a stack's matrices below each other."""

    @staticmethod
    def records(groups: Sequence[Group], ignored: Ignored) -> dict[str, Json]:
        """Make the engines' records, an object for each file name.

        config.json's object is merged into the model's config.json.

        groups  at least one; several where the dialect mixes forms
        """

    @staticmethod
    def recognise(clues: Clues) -> tuple[Group, ...]:
        """Read the forms that a folder declares; () for no such artifact."""

    @staticmethod
    def judge(clues: Clues) -> Iterator[Finding]:
        """Find faults of the engines' records."""

    @staticmethod
    def ignores(clues: Clues) -> Callable[[str], bool]:
        """Return a test of whether engines take a module for an ordinary one."""


class MatrixEncoder(NamedTuple):
    """Encodes a stored matrix of a form in a dialect.

    input_scales  one for each matrix of a stack
    """

    dialect: Dialect
    form: Form
    input_scale: float | None
    input_scales: tuple[float | None, ...] = ()

    def encode(
        self, stem: str, shape: tuple[int, ...], panels: Iterator[Quantized]
    ) -> Iterator[Part]:
        """Return the bytes to append to the outputs of a stem, by name.

        Asks for the first panel at once; without panels nothing is written.
        """
        first = next(panels, None)
        if first is None:
            return iter(())
        return self._encode(stem, shape, chain((first,), panels))

    def _encode(
        self, stem: str, shape: tuple[int, ...], panels: Iterable[Quantized]
    ) -> Iterator[Part]:
        """Yield the scalars of each matrix of a stack, then its panels."""
        for number, numbered in groupby(_numbered(panels, shape[-2]), key=itemgetter(0)):
            matrix = (q for _, q in numbered)
            first, input_scale = next(matrix), None
            if self.form.has_input_scale:
                input_scale = self.input_scales[number] if self.input_scales else self.input_scale
            yield from self.dialect.TRAITS.scalars.encode(stem, first, input_scale)
            yield from self.dialect.encode(stem, shape, self.form, chain((first,), matrix))


def _numbered(panels: Iterable[Quantized], height: int) -> Iterator[tuple[int, Quantized]]:
    """Number panels by their matrix in a stack."""
    row = 0
    for q in panels:
        yield row // height, q
        row += q.shape[0]


def each_alone(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Serve as `stems` where every module is stored by itself."""
    return dict(shapes)


def shape_of_all(shapes: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the one shape of all matrices of a stack; None: they have none."""
    kinds = set(shapes)
    return kinds.pop() if len(kinds) == 1 else None


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
    """List the stems with such scales, without FP8 modules, in order.

    FP8 modules may have scales of these names, but their .weight is FP8.
    """
    return [
        stem
        for stem in stems_named(tensors, endings)
        if (ref := tensors.get(f"{stem}.weight")) is None or not ref.dtype.startswith("F8_")
    ]


def doubt_stacks(stacks: Sequence[TensorRef]) -> Iterator[Finding]:
    """Yield a warning on stacks of experts that the dialect does not read."""
    if stacks:
        detail = f"{len(stacks)} stacks of experts are not checked"
        yield Finding("warning", "stack-unread", None, f"{detail}, the first {stacks[0].name}")


def strings(value: object) -> list[str]:
    """Return the strings of a list in somebody's JSON; [] for anything else."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def json_object(value: object) -> Json:
    """Return an object in somebody's JSON; {} for anything else."""
    return value if isinstance(value, dict) else {}


def positive_pair(value: object) -> tuple[int, int] | None:
    """Return a list of two whole numbers above 0 in somebody's JSON."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    is_pair = all(type(size) is int and size > 0 for size in value)
    return (value[0], value[1]) if is_pair else None


def schemes_of(record: Mapping[str, object]) -> list[Json]:
    """Return the groups of a record of compressed-tensors or ModelOpt."""
    groups = json_object(record.get("config_groups"))
    return [scheme for scheme in groups.values() if isinstance(scheme, dict)]
