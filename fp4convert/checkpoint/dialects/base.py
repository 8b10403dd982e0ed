"""How an artifact spells a quantized matrix: every module here offers a Dialect; nothing above knows a tensor's suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Literal, NamedTuple, Protocol, cast

from fp4convert.errors import InputError
from fp4convert.formats import FLOAT_TYPES, FP8, MODULE_FORMATS, Blocks, Format, Kind, Quantized, format_named
from fp4convert.patterns import matches_any
from fp4convert.recipe import Target
from fp4convert.shard import TensorRef, TensorSpec
from fp4convert.spelling import ACTIVATIONS_FP4, ACTIVATIONS_FP8, Form, Fp8Table, Granularity, Group, Part, Read, Scalars
from fp4convert.stacks import Piece, Rows, Slot

MODULES = {  # in the order in which an artifact is asked whether it is one of them
    "compressed-tensors": "compressed_tensors",
    "modelopt": "modelopt",
    "quark": "quark",
    "gpt-oss": "gpt_oss",
    "deepseek": "deepseek",
    "mlx": "mlx",
    "comfy": "comfy",
    "gguf": "gguf",
    "plain": "plain",
}
_PACKED_DTYPES = ("U8", "I8", "I32", "U32")
_PACKED_ENDINGS = (".weight", "_blocks", "_scales", ".qweight", ".qzeros")  # the last two of GPTQ and AWQ
_FP8_ENDING = ".weight_scale_inv"  # DeepSeek's
_GGUF_TYPES = ("MXFP4", "NVFP4")
Json = dict[str, object]


class Doubt(NamedTuple):
    """Something wrong with a record, as a finding's level, code and detail."""

    level: Literal["error", "warning"]
    code: str
    detail: str


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
        for config in (self.config, *(part for part in self.config.values() if isinstance(part, dict))):
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
    def encode(stem: str, shape: tuple[int, ...], form: Form, panels: Iterable[Quantized]) -> Iterator[Part]:
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


@cache
def dialect_named(name: str) -> Dialect:
    """The dialect of that name; InputError names the known ones."""
    if name not in MODULES:
        raise InputError("unknown-dialect", f"dialect {name!r} is not known; expected one of {', '.join(MODULES)}")
    return cast(Dialect, import_module(f"fp4convert.dialects.{MODULES[name]}"))


def dialect_to_write(target: Target) -> Dialect:
    """The dialect of what is made; InputError where it cannot say its format, layout or cache."""
    name, form = str(target.dialect), form_of(target)
    dialect = dialect_named(name)
    if form.format not in dialect.TRAITS.writes:
        able = ", ".join(known.name for known in dialect.TRAITS.writes)
        detail = f"dialect {name} cannot hold {form.format.name}; it holds {able}"
        raise InputError("dialect-format", detail, "Choose another --dialect or --format.")
    if target.scale_layout is not None and target.scale_layout not in dialect.TRAITS.layouts:
        able = ", ".join(dialect.TRAITS.layouts)
        detail = f"dialect {name} cannot hold block scales that lie {target.scale_layout!r}; it holds {able}"
        other = "" if name == "plain" else ", or --dialect plain, which holds them all"
        raise InputError("dialect-layout", detail, f"Choose another --scale-layout{other}.")
    if form.activations == ACTIVATIONS_FP4 and form.format not in dialect.TRAITS.activations:
        detail = f"dialect {name} cannot say that activations of {form.format.name} are four-bit"
        raise InputError("dialect-activations", detail, "Choose another --dialect, or --activations 16.")
    if target.kv_cache and not (target.kv_cache == "fp8" and dialect.TRAITS.cache_scales):
        detail = f"an {target.kv_cache} cache of keys and values is asked for, which dialect {name} cannot say"
        raise InputError("dialect-cache", detail, "Choose another --dialect: compressed-tensors or modelopt.")
    return dialect


def form_of(target: Target) -> Form:
    """The form of what is made."""
    layout = target.scale_layout or dialect_named(str(target.dialect)).TRAITS.layouts[0]
    return Form(format_named(target.format), target.activations, layout, target.kv_cache)


def module_form(target: Target, fmt: str) -> Form:
    """The form of a module that becomes that format, which need not be the artifact's own; InputError for an unknown one."""
    own, chosen = form_of(target), format_named(fmt, MODULE_FORMATS)
    table = dialect_named(str(target.dialect)).TRAITS.fp8
    return fp8_form(target, table.made if table else "tensor") if chosen is FP8 else replace(own, format=chosen)


def fp8_form(target: Target, granularity: Granularity, stored_scales: str = "F32") -> Form:
    """The form of a matrix that becomes FP8, or stays it, with such scales."""
    table = dialect_named(str(target.dialect)).TRAITS.fp8
    wanted = ACTIVATIONS_FP8 if target.activations == ACTIVATIONS_FP4 else 16
    bits = table.activations.get(granularity, wanted) if table else wanted
    own = form_of(target)
    return replace(own, format=FP8, activations=bits, granularity=granularity, stored_scales=stored_scales)


def check_forms(target: Target, forms: Iterable[Form]) -> None:
    """InputError where the dialect of what is made cannot hold modules of those forms beside each other."""
    name, seen = str(target.dialect), [form_of(target)]
    mixes = dialect_named(name).TRAITS.mixes
    for form in forms:
        if form in seen:
            continue
        seen.append(form)
        if any(each.format not in mixes for each in seen):
            words = " and ".join(sorted({each.word for each in seen}))
            able = " and ".join(fmt.name for fmt in mixes) or "one format in an artifact"
            detail = f"modules are to be {words}, which dialect {name} cannot hold beside each other; it holds {able}"
            raise InputError("dialect-mixed", detail, "Choose another --dialect, or one format for all modules.")


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


@dataclass(frozen=True, slots=True)
class Speller:
    """Makes all bytes of a stem out of its panels."""

    dialect: Dialect
    form: Form
    input_scale: float | None

    def parts(self, stem: str, shape: tuple[int, ...], panels: Iterator[Quantized]) -> Iterator[Part]:
        """What to append to the outputs of that stem, by name; no panels, no parts."""
        for first in panels:
            input_scale = self.input_scale if self.form.has_input_scale else None
            yield from self.dialect.encode_scalars(stem, first, input_scale)
            yield from self.dialect.encode(stem, shape, self.form, chain((first,), panels))


def stems_named(tensors: Mapping[str, TensorRef], endings: tuple[str, ...]) -> list[str]:
    """The stems that at least one tensor's name gives, in order."""
    found = {name.removesuffix(ending): None for ending in endings for name in tensors if name.endswith(ending)}
    return sorted(found)  # of a dict and no set: it keeps the order, in which long runs are sorted already


def is_fp8(tensors: Mapping[str, TensorRef], name: str) -> bool:
    """True where that tensor is there and FP8: its module has scales, and is not four-bit."""
    return name in tensors and tensors[name].dtype.startswith("F8_")


def is_quantized_tensor(ref: TensorRef) -> bool:
    """True for a tensor that only an already quantized checkpoint has, in any dialect."""
    is_matrix = ref.name.endswith(_PACKED_ENDINGS) and len(ref.shape) > 1
    is_packed = is_matrix and ref.dtype in _PACKED_DTYPES
    return ref.dtype in _GGUF_TYPES or is_packed or ref.name.endswith(_telling_endings(ref.dtype in FLOAT_TYPES))


@cache
def _telling_endings(is_float: bool) -> tuple[str, ...]:
    """Endings of names that only quantized checkpoints have, for tensors of floats or of anything else."""
    endings = {ending for known in MODULES for ending in dialect_named(known).TRAITS.suffixes if ending.startswith(".")}
    return (*(ending for ending in endings if not is_float or ending.startswith(".weight_")), _FP8_ENDING)


def strings(value: object) -> list[str]:
    """The strings of a list in somebody's JSON; nothing where it is no list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
