"""What a folder of four-bit weights is: opened from headers and records alone, ours or anyone's.

An Artifact is judged by its own records: ours (quantization_config.json) where there is one, else the runtime's
quantization_config.  Findings say where records and tensors disagree; reading the numbers is verification's work.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fp4convert.dialects import MODULES, Clues, Dialect, Ignored, Packed, dialect_named, form_of
from fp4convert.errors import InputError
from fp4convert.formats import Blocks, Format, Span, format_named
from fp4convert.layout import padding_of
from fp4convert.recipe import Target
from fp4convert.shard import TensorRef, TensorSpec, parse_json_object
from fp4convert.sources import PLAN_FILE, Access, Source, open_source
from fp4convert.spelling import ACTIVATIONS_FP4, Form, encode_scalar
from fp4convert.stacks import gather, pieces_of

RECORD = "quantization_config.json"
CARD = "README.md"  # the model card: for people, who edit it
UNDIGESTED = frozenset({CARD, "quantization_report.json"})  # no engine reads them, and no digest counts them
CLEAR_ENOUGH = frozenset({"record-status", "record-strategy"})  # engines stumble over it; what the weights are is not in doubt
UNSAID_ENDINGS = (  # smoothing, order of activations, offsets, low-rank parts, scales of a cache in another dialect
    *(".pre_quant_scale", ".weight_g_idx", ".weight_zero_point", ".svdquant_lora_a", ".svdquant_lora_b", ".output_scale"),
    *(".k_zero_point", ".v_zero_point"),
)
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong (error), doubtful (warning) or worth knowing (note)."""

    level: Level
    code: str
    tensor: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The bytes of a tensor where they are; a Span."""

    source: Source
    ref: TensorRef

    @property
    def nbytes(self) -> int:
        return self.ref.nbytes

    def __getitem__(self, part: slice, /) -> memoryview:
        return self.source.read_range(self.ref, *part.indices(self.nbytes)[:2])


@dataclass(frozen=True, slots=True)
class Artifact:
    """Four-bit weights on a disk.

    clues    what its records and names say
    record   our quantization_config.json, or {} for a foreign artifact
    modules  the quantized modules whose tensors are all there and sound
    """

    source: Source
    clues: Clues
    form: Form
    dialect: str
    record: dict[str, object]
    tensors: dict[str, TensorRef]
    modules: dict[str, Packed]
    findings: tuple[Finding, ...]

    @property
    def format(self) -> Format:
        return self.form.format

    @property
    def spelling(self) -> Dialect:
        return dialect_named(self.dialect)

    def decode(self, module: str) -> Blocks:
        """The matrix of that module; its bytes stay where they are until they are touched."""
        packed = self.modules[module]
        return gather(self._decode(packed), packed.shape, packed.pieces)

    def decode_stem(self, stem: str) -> Blocks:
        """The stored matrix of that name, which is a module's own, or a stack's matrices below each other."""
        return self._decode(self.modules.get(stem) or next(packed for packed in self.modules.values() if packed.stem == stem))

    def _decode(self, packed: Packed) -> Blocks:
        return self.spelling.decode(packed.stem, packed.stored_shape, self.form, self._read)

    def input_scale(self, module: str) -> float | None:
        """The input scale of that module, a multiplier, where the form has one."""
        return self.spelling.decode_input_scale(module, self._read) if self.form.has_input_scale else None

    def stored_input_scale(self, module: str) -> float | None:
        """The input scale as it is stored: a float32, as an exact Python float."""
        scale = self.input_scale(module)
        if scale is None or self.spelling.TRAITS.global_scale_kind == "multiplier":
            return scale
        (stored,) = struct.unpack("<f", encode_scalar(scale, is_inverse=True))
        return float(stored)

    @property
    def declared_layout(self) -> str | None:
        """The order of block scales that our record says; None where there is none."""
        recorded = self.record.get("scale_layout")
        return str(recorded) if recorded is not None else None

    def cache_scales(self, spelling: Dialect) -> dict[str, str]:
        """The scales of an FP8 cache of keys and values, and their names in another dialect."""
        if not self.form.kv_cache:
            return {}
        pairs = zip(self.spelling.TRAITS.cache_scales, spelling.TRAITS.cache_scales, strict=False)
        return {name: name.removesuffix(own) + other for own, other in pairs for name in self.tensors if name.endswith(f".{own}")}

    def refuse_unsound(self) -> None:
        """InputError where its values are not what its blocks say, or something is wrong with it."""
        refuse_unsaid(self.tensors)
        for finding in self.findings:
            if finding.level == "error" and finding.code not in CLEAR_ENOUGH:
                where = f"{finding.tensor}: " if finding.tensor else ""
                detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
                raise InputError("unsound-artifact", detail, "See: fp4convert inspect.", finding.tensor)

    def is_ignored(self, module: str) -> bool:
        """True where a record takes the module for an ordinary one."""
        return self.spelling.is_ignored(self.clues, module)

    def _read(self, name: str) -> Span:
        """The bytes of a tensor; where a sound module lacks it, it is a scale that is implied to be 1."""
        ref = self.tensors.get(name)
        return encode_scalar(1.0) if ref is None else _Tensor(self.source, ref)


def refuse_unsaid(names: Iterable[str]) -> None:
    """InputError where one of the tensors of those names changes what weights mean."""
    if unsaid := [name for name in names if name.endswith(UNSAID_ENDINGS)]:
        detail = f"{len(unsaid)} tensors change what the weights mean, the first {unsaid[0]!r}; fp4convert does not apply them"
        raise InputError("unsaid-tensors", detail, "Start from the original weights.", unsaid[0])


def make_record(
    target: Target,
    ignored: Ignored,
    shapes: Mapping[str, tuple[int, ...]],
    producer: dict[str, str],
    origin: dict[str, object],
) -> dict[str, object]:
    """Our quantization_config.json, but for its last key: `files`, the sha256 of every other file, known when they are written.

    shapes  of the modules
    origin  repo and revision of the weights it was made from; None for a folder, whose path is nobody's business
    """
    form, spelling = form_of(target), dialect_named(str(target.dialect))
    return {
        **describe_form(form, spelling),
        **({"shapes": {module: list(shape) for module, shape in shapes.items()}} if form.scale_layout == "appended" else {}),
        "dialect": target.dialect,
        "scale_rule": target.scale_rule,
        "ignore": [*ignored.modules, *ignored.patterns],
        "producer": producer,
        "source": origin,
    }


def describe_form(form: Form, spelling: Dialect) -> dict[str, object]:
    """Where every byte is and what it means, for a form in a dialect; the first keys of our record."""
    fmt, kind = form.format, spelling.TRAITS.global_scale_kind
    return {
        "format": fmt.name,
        "block_size": fmt.block_size,
        "element_dtype": "fp4_e2m1",
        "scale_dtype": fmt.scale_dtype,
        "scale_layout": form.scale_layout,
        "scale_padding": padding_of(form.scale_layout),
        "nibble_order": spelling.TRAITS.nibble_order,
        "block_axis": -1,
        "global_scale": {"dtype": "fp32", "stored_as": kind} if fmt.has_global_scale and kind else None,
        "activations": form.activations,
        **({"kv_cache": form.kv_cache} if form.kv_cache else {}),
    }


def open_artifact(reference: str, access: Access | None = None) -> Artifact:
    """The artifact in that folder or repository; raises what open_source raises, and InputError where it is no artifact."""
    is_unfinished = os.path.exists(os.path.join(reference, PLAN_FILE)) and not os.path.exists(os.path.join(reference, RECORD))
    return read_artifact(open_source(reference, access, is_unfinished), reference, is_unfinished)


def read_clues(source: Source) -> Clues:
    """What a source says of its own quantization."""
    tensors = {ref.name: ref for ref in source.checkpoint.tensors}
    return Clues(source.checkpoint.config, _read_json(source, "hf_quant_config.json"), tensors)


def is_artifact(source: Source, clues: Clues) -> bool:
    """True where a record, ours or an engine's, says that there are four-bit modules."""
    return source.has_file(RECORD) or any(dialect_named(name).recognise(clues) is not None for name in MODULES)


def read_artifact(source: Source, reference: str, is_unfinished: bool = False) -> Artifact:
    """The artifact in a source, which errors call by that reference."""
    record, clues = _read_json(source, RECORD), read_clues(source)
    tensors = dict(clues.tensors)
    begun = {} if record else _identity_begun(source)
    if begun and begun.get("dialect") is None:
        detail = f"{reference} holds ordinary weights, which dequantize made or was making; expected four-bit ones"
        raise InputError("not-an-artifact", detail, "Give the artifact that it was made from.")
    form, dialect = _identity(reference, clues, record or begun)
    modules, findings = _read_modules(tensors, form, dialect_named(dialect))
    if is_unfinished:
        detail = f"{RECORD} is not written yet: the conversion did not end; run its command again to continue"
        findings = [Finding("error", "unfinished", None, detail)]
    elif not modules:
        findings.append(
            Finding("warning", "nothing-quantized", None, f"no tensor is named as {dialect} names {form.format.name}")
        )
    if not is_unfinished:
        findings += _judge_records(clues, record, dialect, modules)
    return Artifact(source, clues, form, dialect, record, tensors, modules, tuple(findings))


def _read_json(source: Source, file: str) -> dict[str, object]:
    if not source.has_file(file):
        return {}
    with source.open_file(file) as stream:
        return parse_json_object(stream.read(), file)


def _identity_begun(source: Source) -> dict[str, object]:
    try:
        identity = _read_json(source, PLAN_FILE).get("identity")
    except InputError:
        identity = None  # damaged; the folder's own names may still tell what it is
    return identity if isinstance(identity, dict) else {}


def _identity(reference: str, clues: Clues, record: dict[str, object]) -> tuple[Form, str]:
    """Form and dialect, as our record says or else the runtime's."""
    if record:
        try:
            return _recorded(record), str(record.get("dialect"))
        except InputError as error:
            raise InputError(error.code, f"{RECORD}: {error.message}", "See what wrote it, and with which version.") from None
    for name in MODULES:
        if (form := dialect_named(name).recognise(clues)) is not None:
            return form, name
    known = ", ".join(MODULES)
    detail = f"{reference} is not a four-bit artifact that fp4convert knows: no {RECORD}, no record or names of {known}"
    raise InputError("not-an-artifact", detail, "Quantize it: fp4convert quantize SOURCE --format nvfp4.")


def _form_recorded(record: dict[str, object]) -> Form:
    activations = ACTIVATIONS_FP4 if record.get("activations") == ACTIVATIONS_FP4 else 16
    listed = record.get("shapes")
    shapes = {
        module: (shape[0], shape[1])
        for module, shape in (listed.items() if isinstance(listed, dict) else ())
        if isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    }
    layout, kv_cache = str(record.get("scale_layout", "linear")), record.get("kv_cache")
    cache = "fp8" if kv_cache == "fp8" else None
    return Form(format_named(str(record.get("format"))), activations, layout, cache, shapes)


def _recorded(record: dict[str, object]) -> Form:
    """The form that our record says, in a layout that its dialect has; InputError where it has none of that name."""
    form, layouts = _form_recorded(record), dialect_named(str(record.get("dialect"))).TRAITS.layouts
    if len(layouts) == 1:
        return replace(form, scale_layout=layouts[0])
    if form.scale_layout not in layouts:
        detail = f"scale_layout {form.scale_layout!r} is not known; expected one of {', '.join(layouts)}"
        raise InputError("unknown-layout", detail)
    return form


def _read_modules(tensors: dict[str, TensorRef], form: Form, dialect: Dialect) -> tuple[dict[str, Packed], list[Finding]]:
    """The sound quantized modules with their shapes, and a finding for each tensor that is missing or misshapen."""
    modules, findings = {}, []
    for stem in dialect.find(tensors):
        packed = tensors.get(stem + dialect.TRAITS.packed)
        if packed is None:
            findings.append(Finding("error", "packed-missing", stem, "its scales are there, its packed codes are not"))
            continue
        shape = dialect.stored_shape(stem, packed, form)
        if shape is None:
            detail = f"{packed.dtype} {list(packed.shape)} holds no matrix of whole blocks of {form.format.block_size}"
            findings.append(Finding("error", "packed-shape", stem, detail))
            continue
        specs = dialect.outputs(stem, shape, form)
        free = {True: dialect.TRAITS.labels, False: dialect.TRAITS.implied}  # to be of any length; to be missing
        exact = [spec for spec in specs if not spec.name.endswith(free[spec.name in tensors])]
        faults = [fault for spec in exact if (fault := _fault(tensors.get(spec.name), spec))]
        findings += faults
        if not faults:
            names = (stem + ending for ending in dialect.TRAITS.companions)
            companions = tuple(tensors[name] for name in names if name in tensors)
            refs = tuple(tensors[spec.name] for spec in specs if spec.name in tensors)
            for module, pieces in pieces_of(dialect.slots(stem, shape)).items():
                rows = sum(piece.height for piece in pieces)
                modules[module] = Packed(refs, (rows, shape[-1]), companions, stem, shape, pieces)
    return modules, findings


def _fault(found: TensorRef | None, spec: TensorSpec) -> Finding | None:
    if found is None:
        return Finding("error", "tensor-missing", spec.name, f"expected {spec.dtype} {list(spec.shape)}, found nothing")
    if (found.dtype, found.shape) != (spec.dtype, spec.shape):
        detail = f"expected {spec.dtype} {list(spec.shape)}, found {found.dtype} {list(found.shape)}"
        return Finding("error", "tensor-shape", spec.name, detail)
    return None


def _judge_records(clues: Clues, record: dict[str, object], dialect: str, modules: Mapping[str, Packed]) -> Iterator[Finding]:
    """Findings where our record, the runtime's and the tensors disagree."""
    spelling = dialect_named(dialect)
    recognised = spelling.recognise(clues)
    if record:
        if has_records(spelling, _form_recorded(record)) and (recognised is None or recognised.format.name != record["format"]):
            detail = f"config.json does not declare {record['format']} as {dialect} does; engines would not load it"
            yield Finding("error", "records-disagree", None, detail)
        for key, expected in describe_form(recognised or _form_recorded(record), spelling).items():
            if record.get(key) != expected:
                detail = f"{RECORD} says {key} = {record.get(key)!r}, and {dialect} has {expected!r}"
                yield Finding("error", "record-wrong", None, detail)
    for doubt in spelling.judge(clues):
        yield Finding(doubt.level, doubt.code, None, doubt.detail)
    ours = record.get("ignore")
    for module in modules:
        try:
            is_ignored = spelling.is_ignored(clues, module)
        except InputError as error:
            yield Finding("error", "ignore-pattern", None, f"config.json: {error.message}")
            return
        if is_ignored or (isinstance(ours, list) and module in ours):
            yield Finding("error", "ignored-but-quantized", module, "a record lists it under ignore")


def has_records(spelling: Dialect, form: Form) -> bool:
    """True where engines of that dialect read a record of their own."""
    return bool(spelling.records(form, Ignored((), ()), ()))


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """True where no finding is an error."""
    return all(finding.level != "error" for finding in findings)
