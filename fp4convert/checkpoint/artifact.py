"""Open a folder of four-bit weights by its headers and records.

An Artifact is judged by its own records: ours (quantization_config.json) where there is one, else
the runtime's quantization_config. Findings say where records and tensors disagree; reading the
numbers is verification's work.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fp4convert.checkpoint.dialects.base import Clues, Dialect, Ignored, Packed, strings
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import DIALECTS, METHODS, dialect_named, recognise
from fp4convert.checkpoint.dialects.tables import SCALAR_NBYTES, decode_scalar, encode_scalar
from fp4convert.checkpoint.record import MIXED, describe_form, describe_groups, groups_recorded
from fp4convert.checkpoint.unread import GGUF_SCALES, find_unread_in_gguf
from fp4convert.checkpoint.whole_model import refuse_adapter
from fp4convert.errors import Finding, InputError, Level, shell_line
from fp4convert.numerics.matrices import Blocks, Span
from fp4convert.storage.checkpoint_files import ENGINE_RECORD, PLAN_FILE, RECORD, UNFINISHED
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import REPOSITORY, open_source
from fp4convert.storage.safetensors import WEIGHT, TensorRef
from fp4convert.storage.source import Access, Source, read_whole, subfolder_of

if TYPE_CHECKING:
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.numerics.low_rank import Correction

# Engines stumble over it; what the weights are is not in doubt.
CLEAR_ENOUGH = frozenset({"record-status", "record-strategy"})
# Names of methods that records write in small letters.
FOREIGN = {
    name.lower(): name for name in ("AQLM", "AWQ", "EETQ", "GPTQ", "HQQ", "Quanto", "SpQR", "VPTQ")
}
# Smoothing, order of activations, offsets, low-rank parts, scales of a cache in another dialect.
UNSAID_ENDINGS = (
    ".pre_quant_scale",
    ".weight_g_idx",
    ".weight_zero_point",
    ".svdquant_lora_a",
    ".svdquant_lora_b",
    ".output_scale",
    ".k_zero_point",
    ".v_zero_point",
)
CODED = frozenset({"U8", "I8", "U32", "I32"})  # dtypes of codes


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


class Artifact(NamedTuple):
    """Quantized weights on a disk.

    clues    what its records and names say
    groups   the forms of its modules, as its records say them
    record   our quantization_config.json, or {} for a foreign artifact
    modules  the four-bit modules whose tensors are all there and sound
    others   the sound modules that are quantized otherwise: FP8, MXFP8 and int4
    adapter  that its source was merged with, where a person names it
    """

    source: Source
    clues: Clues
    groups: tuple[Group, ...]
    dialect: str
    record: dict[str, object]
    tensors: dict[str, TensorRef]
    modules: dict[str, Packed]
    others: dict[str, Packed]
    findings: tuple[Finding, ...]
    adapter: Adapter | None = None

    @property
    def packed(self) -> dict[str, Packed]:
        """Return all quantized modules, the four-bit ones first."""
        return {**self.modules, **self.others}

    @property
    def forms(self) -> tuple[Form, ...]:
        """Return the forms of its four-bit modules; where it has none, all.

        They have one scale layout and one cache.
        """
        every = tuple(group.form for group in self.groups)
        return tuple(form for form in every if form.format.is_fp4) or every

    @property
    def scale_layout(self) -> str:
        """Return the order of the block scales of all four-bit modules."""
        return self.forms[0].scale_layout

    @property
    def spelling(self) -> Dialect:
        return dialect_named(self.dialect)

    def decode(self, module: str) -> Blocks:
        """Return the matrix of that module, or of a stack of that name.

        The matrices of a stack are below each other. Bytes stay where they are until they are
        touched.
        """
        from fp4convert.checkpoint.dialects.stacks import gather

        own = self.modules.get(module)
        packed = own or next(each for each in self.modules.values() if each.stem == module)
        stored = self.spelling.decode(packed.stem, packed.stored_shape, packed.form, self._read)
        is_part = own is not None and packed.stem != module
        return gather(stored, packed.shape, packed.places) if is_part else stored

    def correction(self, module: str) -> Correction | None:
        """Return what a dialect stores of a module beside its codes, if any."""
        packed, table = self.modules[module], self.spelling.TRAITS.correction
        return table.decode(packed.stem, packed.shape, self._read) if table else None

    def input_scale(self, module: str) -> float | None:
        """Return the input scale of a module as a multiplier, not rounded.

        None where it has none.
        """
        packed, scalars = self.modules[module], self.spelling.TRAITS.scalars
        if not packed.form.has_input_scale:
            return None
        stored = self._read(scalars.input_name(packed.stem))
        if stored.nbytes > SCALAR_NBYTES:  # one for each matrix of a stack
            begin = packed.number * SCALAR_NBYTES
            stored = stored[begin : begin + SCALAR_NBYTES]
        return scalars.as_multiplier(decode_scalar(stored))

    def stored_input_scale(self, module: str) -> float | None:
        """Return the stored float32 of the input scale, as an exact Python float."""
        scale = self.input_scale(module)
        if scale is None or self.spelling.TRAITS.global_scale_kind == "multiplier":
            return scale
        (stored,) = struct.unpack("<f", encode_scalar(scale, is_inverse=True))
        return float(stored)

    @property
    def declared_layout(self) -> str | None:
        """Return the order of block scales in our record; None for no record."""
        if self.record.get("format") == MIXED:
            return self.scale_layout
        recorded = self.record.get("scale_layout")
        return str(recorded) if recorded is not None else None

    @property
    def cache_scales(self) -> dict[str, tuple[str, int]]:
        """Find the scales of its cache of keys and values, if it has one.

        Returns  attention, and 0 for keys or 1 for values, by the name of the tensor
        """
        stored = self.spelling.TRAITS.scales_of_cache(self.forms[0].kv_cache)
        return {
            name: (name.removesuffix(f".{ending}"), place)
            for place, ending in enumerate(stored.endings if stored else ())
            for name in self.tensors
            if name.endswith(f".{ending}")
        }

    def refuse_unsound(self) -> None:
        """Raise InputError where its blocks alone do not tell its values.

        Also where something is wrong with it
        """
        refuse_unsaid(self.tensors)
        for finding in self.findings:
            if finding.level == "error" and finding.code not in CLEAR_ENOUGH:
                where = f"{finding.tensor}: " if finding.tensor else ""
                detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
                next_step = "See: fp4convert inspect."
                if finding.code == "unfinished":
                    next_step = UNFINISHED
                raise InputError("unsound-artifact", detail, next_step, finding.tensor)

    def _read(self, name: str) -> Span:
        """Return the bytes of a tensor.

        What a sound module lacks is a scale that is implied to be 1.
        """
        ref = self.tensors.get(name)
        return encode_scalar(1.0) if ref is None else _Tensor(self.source, ref)


def refuse_unsaid(tensors: Mapping[str, TensorRef], known: Collection[str] = ()) -> None:
    """Raise InputError where a tensor changes what weights mean.

    known  names of the tensors that modules have taken
    """
    unsaid = [name for name in tensors if name not in known and name.endswith(UNSAID_ENDINGS)]
    if unsaid:
        detail = f"{len(unsaid)} tensors change what the weights mean, the first {unsaid[0]!r}"
        detail = f"{detail}; fp4convert does not apply them"
        raise InputError("unsaid-tensors", detail, tensor=unsaid[0])
    if unread := find_unread_in_gguf(tensors):
        weight, ending, ref = unread[0]
        own = weight.removesuffix(WEIGHT) + GGUF_SCALES[0]
        detail = f"{ref.file}: {ref.name!r} is beside {weight!r}, and fp4convert does not apply it"
        detail = f"{detail} ({len(unread)} such tensors); llama.cpp multiplies with {own!r} alone"
        next_step = f"Start from the original weights; or rename it to {own}, if it multiplies"
        next_step = f"{next_step} {weight}."
        if ending in GGUF_SCALES:
            next_step = (
                "Start from the original weights; or leave --config out, and make a GGUF file."
            )
        raise InputError("unsaid-tensors", detail, next_step, ref.name)


def describe_foreign(clues: Clues) -> tuple[str, str]:
    """Name the method of a checkpoint that no dialect reads, and a next step.

    Returns  "this is a checkpoint of GPTQ ...", "" where the record names no other method; the next
             step, with the base model where config.json names one
    """
    method, base = clues.record.get("quant_method"), clues.config.get("_name_or_path")
    is_known = isinstance(base, str) and re.fullmatch(REPOSITORY, base)
    next_step = f"Start from the original weights{f': {base}' if is_known else ''}."
    if not isinstance(method, str) or method in (*METHODS.values(), "fp8"):
        return "", next_step
    name = FOREIGN.get(method.lower(), method)
    return f"this is a checkpoint of {name} (config.json)", next_step


def open_artifact(reference: str, access: Access | None = None) -> Artifact:
    """Open the artifact in that folder or repository.

    Raises what open_source raises, and InputError where it is no artifact
    """
    is_unfinished, called = _is_unfinished(reference, access), reference
    if os.path.isdir(reference):
        called = os.path.normpath(os.path.join(reference, subfolder_of(access or Access())))
    return read_artifact(open_source(reference, access, is_unfinished), called)


def _is_unfinished(reference: str, access: Access | None) -> bool:
    """Tell whether a conversion into that folder did not end."""
    folder = os.path.join(reference, subfolder_of(access or Access()))
    return os.path.exists(os.path.join(folder, PLAN_FILE)) and not os.path.exists(
        os.path.join(folder, RECORD)
    )


def open_quantized(reference: str, access: Access | None = None) -> tuple[Source, Artifact | None]:
    """Open a source with quantized weights, as an artifact where it is one.

    Returns  the source, and the artifact where some weights have four bits; raises as open_artifact
    """
    from fp4convert.storage.gguf import BLOCK_TYPES

    source = open_source(reference, access)
    clues = read_clues(source)
    has_others = any(ref.dtype in BLOCK_TYPES for ref in clues.tensors.values())
    is_quantized = bool(clues.record or clues.hf_quant_config or has_others)
    is_other = is_quantized and not is_artifact(source, clues)
    return source, None if is_other else read_artifact(source, reference)


def read_clues(source: Source) -> Clues:
    """Read what a source says of its own quantization."""
    tensors = {ref.name: ref for ref in source.checkpoint.tensors}
    return Clues(source.checkpoint.config, read_json(source, ENGINE_RECORD), tensors)


def is_artifact(source: Source, clues: Clues) -> bool:
    """Tell whether it is read by its records: ours, or an engine's on blocks.

    Other FP8 is read by the names of its tensors, as many tools write them.
    """
    return source.has_file(RECORD) or any(
        group.form.format.block_size for _, groups in recognise(clues) for group in groups
    )


def read_artifact(source: Source, reference: str) -> Artifact:
    """Read the artifact in a source, which errors call by that reference."""
    from fp4convert.checkpoint.modules import read_modules

    record, clues = read_json(source, RECORD), read_clues(source)
    is_unfinished = source.has_file(PLAN_FILE) and not source.has_file(RECORD)
    groups, dialect = _read_identity(source, reference, clues, record)
    tensors = dict(clues.tensors)
    found, findings = read_modules(tensors, groups, dialect_named(dialect))
    modules = {module: packed for module, packed in found.items() if packed.form.format.is_fp4}
    others = {module: packed for module, packed in found.items() if module not in modules}
    if is_unfinished:
        detail = f"{RECORD} is not written yet: the conversion did not end"
        detail = f"{detail}; run its command again to continue"
        findings = [Finding("error", "unfinished", None, detail)]
    elif not found and not any(finding.level == "error" for finding in findings):
        detail = f"no tensor is named as {dialect} names {describe_groups(groups)}"
        coded = [name for name, ref in tensors.items() if ref.dtype in CODED and len(ref.shape) > 1]
        if coded:
            detail += f", and {len(coded)} hold codes, the first {coded[0]!r}: of another dialect"
        level: Level = "error" if coded else "warning"
        findings.append(Finding(level, "nothing-quantized", None, detail))
    if not is_unfinished:
        findings += _judge_records(clues, record, dialect, found)
    return Artifact(
        source, clues, groups, dialect, record, tensors, modules, others, tuple(findings)
    )


def read_json(source: Source, file: str) -> dict[str, object]:
    """Read a JSON object; an empty one where there is no such file."""
    if not source.has_file(file):
        return {}
    return parse_json_object(read_whole(source, file), file)


def _read_identity(
    source: Source, reference: str, clues: Clues, record: dict[str, object]
) -> tuple[tuple[Group, ...], str]:
    """Read forms and dialect: from our record, a plan, or an engine's record.

    Raises InputError where none of them says what it is
    """
    quantize = shell_line("fp4convert", "quantize", reference, "--format", "nvfp4")
    begun: object = None
    if not record:
        # A damaged plan says nothing; the folder's own names may still tell what it is.
        with suppress(InputError):
            begun = read_json(source, PLAN_FILE).get("identity")
    if isinstance(begun, dict) and begun:
        if begun.get("dialect") is None:
            is_pruned = begun.get("format") == "pruned"
            maker = "prune" if is_pruned else "dequantize"
            detail = f"{reference} holds ordinary weights, which {maker} made or was making"
            detail = f"{detail}; expected four-bit ones"
            next_step = "Give the artifact that it was made from."
            if is_pruned:
                next_step = f"Quantize it: {quantize}"
            raise InputError("not-an-artifact", detail, next_step)
        record = begun
    if record and record.get("dialect") is None:
        raise _no_record_of_ours(reference)
    if record:
        try:
            return groups_recorded(record), str(record.get("dialect"))
        except InputError as error:
            next_step = "Make the artifact again with this version, or read it with the version"
            next_step = f"{next_step} that wrote it."
            raise InputError(error.code, f"{RECORD}: {error.message}", next_step) from None
    for name, groups in recognise(clues):
        return groups, name
    foreign, start = describe_foreign(clues)
    if not foreign and (algorithm := _algorithm_of(clues)):
        foreign = f"its record is of {algorithm}, which fp4convert does not read"
    if foreign:
        detail = f"{reference}: {foreign}; expected an artifact of {', '.join(DIALECTS)}"
        raise InputError("not-an-artifact", detail, start)
    refuse_adapter(source)
    if source.has_file(RECORD):
        raise _no_record_of_ours(reference)
    detail = f"{reference} is not a four-bit artifact that fp4convert knows: no {RECORD}"
    detail = f"{detail}, no record or names of {', '.join(DIALECTS)}"
    next_step = f"Quantize it: {quantize}"
    raise InputError("not-an-artifact", detail, next_step)


def _no_record_of_ours(reference: str) -> InputError:
    detail = f"{reference}: its {RECORD} names no dialect; expected one, as fp4convert writes it"
    step = "If the weights are not quantized, give a folder without that file; else fetch the"
    step = f"{step} artifact again."
    return InputError("not-an-artifact", detail, step)


def _algorithm_of(clues: Clues) -> str:
    """Name what the record of a known producer says was done; "" for none."""
    said: object = clues.hf_quant_config.get("quantization")
    for record in (clues.record, said if isinstance(said, dict) else {}):
        for key in ("quant_algo", "format"):  # modelopt's, compressed-tensors'
            if isinstance(algorithm := record.get(key), str):
                return f"{record.get('quant_method', 'modelopt')} with {algorithm!r}"
    return ""


def _judge_records(
    clues: Clues, record: dict[str, object], dialect: str, modules: Mapping[str, Packed]
) -> Iterator[Finding]:
    """Yield findings where our record, the runtime's and the tensors disagree."""
    spelling = dialect_named(dialect)
    if record:
        yield from _compare_records(clues, record, spelling, modules)
    yield from spelling.judge(clues)
    is_ignored, ours = spelling.ignores(clues), frozenset(strings(record.get("ignore")))
    try:
        for module in modules:
            if is_ignored(module) or module in ours:
                detail = "a record lists it under ignore"
                yield Finding("error", "ignored-but-quantized", module, detail)
    except InputError as error:
        yield Finding("error", "ignore-pattern", None, f"config.json: {error.message}")


def _compare_records(
    clues: Clues, record: dict[str, object], spelling: Dialect, modules: Mapping[str, Packed]
) -> Iterator[Finding]:
    """Yield findings where our record and the runtime's disagree.

    On the whole artifact, or on single modules
    """

    recorded, recognised = groups_recorded(record), spelling.recognise(clues)
    dialect = record.get("dialect")
    ours, theirs = (
        {group.form.format.name for group in groups} for groups in (recorded, recognised)
    )
    engine_records = spelling.records(
        [Group(group.form, ()) for group in recorded], Ignored((), ())
    )
    if engine_records and not ours <= theirs:
        missing = " and ".join(sorted(ours - theirs))
        detail = f"config.json does not declare {missing} as {dialect} does"
        detail = f"{detail}; engines would not load it"
        yield Finding("error", "records-disagree", None, detail)
    if len(recorded) == 1:
        expected = recognised[0].form if len(recognised) == 1 else recorded[0].form
        for key, value in describe_form(expected, spelling).items():
            if record.get(key) != value:
                detail = f"{RECORD} says {key} = {record.get(key)!r}, and {dialect} has {value!r}"
                yield Finding("error", "record-wrong", None, detail)
    elif recognised:
        # Engines' records say nothing of the dtype of stored scales.
        from fp4convert.checkpoint.modules import form_finder

        first, second = (
            form_finder([(replace(form, stored_scales=""), names) for form, names in groups])
            for groups in (recorded, recognised)
        )
        differing = [
            module for module in modules if (own := first(module)) is None or own != second(module)
        ]
        if differing:
            detail = f"on {len(differing)} modules, the first {differing[0]!r}: {RECORD} and"
            detail = f"{detail} config.json give them different formats"
            yield Finding("error", "records-disagree", differing[0], detail)
