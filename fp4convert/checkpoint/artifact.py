"""Open a folder of four-bit weights by its headers and records.

Our record (quantization_config.json) describes an Artifact, or else the engine's
quantization_config. Findings say where records and tensors disagree; `verify` reads the numbers.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp4convert.checkpoint.dialects.base import (
    Clues,
    Dialect,
    Ignored,
    Packed,
    json_object,
    strings,
)
from fp4convert.checkpoint.dialects.forms import Form, Group
from fp4convert.checkpoint.dialects.registry import DIALECTS, METHODS, dialect_named, recognise
from fp4convert.checkpoint.dialects.tables import SCALAR_NBYTES, decode_scalar, encode_scalar
from fp4convert.checkpoint.record import MIXED, describe_form, describe_groups, groups_recorded
from fp4convert.checkpoint.unread import INPUT_FACTORS
from fp4convert.checkpoint.whole_model import refuse_adapter
from fp4convert.errors import Finding, InputError, shell_line
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s
from fp4convert.numerics.fp8_int import FP8_DTYPES
from fp4convert.numerics.matrices import Blocks, Span
from fp4convert.storage.checkpoint_files import ENGINE_RECORD, PLAN_FILE, RECORD
from fp4convert.storage.json_text import as_text, parse_json_object, unquantized
from fp4convert.storage.open import REPOSITORY, open_source
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Access, Source, read_whole, subfolder_of

if TYPE_CHECKING:
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.numerics.low_rank import Correction

# Names of methods that records write in small letters.
FOREIGN = {"nvfp4": "FastVideo's NVFP4"} | {
    name.lower(): name for name in ("AQLM", "AWQ", "EETQ", "GPTQ", "HQQ", "Quanto", "SpQR", "VPTQ")
}
# Makers whose codes nothing here reads, by a tensor of theirs: nunchaku 1.2, models/linear.py;
# musubi-tuner, modules/nvfp4_optimization_utils.py.
MAKERS = {
    ".smooth_factor_orig": "Nunchaku's SVDQuant (svdq-fp4, svdq-int4)",
    ".nvfp4_block_scale": "musubi-tuner's NVFP4 (kohya)",
}
METHOD = "quant_method"  # of engines' records; AutoRound's is called as ours, too
CODED = frozenset({"U8", "I8", "U32", "I32"})  # dtypes of codes


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The stored bytes of a tensor; a Span."""

    source: Source
    ref: TensorRef

    @property
    def nbytes(self) -> int:
        return self.ref.nbytes

    def __getitem__(self, part: slice, /) -> memoryview:
        return self.source.read_range(self.ref, *part.indices(self.nbytes)[:2])


class Artifact(NamedTuple):
    """Quantized weights on a disk.

    clues    its configs and tensors
    groups   the forms of its modules, from its records
    record   our quantization_config.json, or {} for a foreign artifact
    modules  the four-bit modules whose tensors are all there and sound
    others   the sound modules of FP8, MXFP8 and int4
    adapter  merged into its source, where a person names it
    foreign  linear layers of other tools' formats, where the weights are no artifact
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
    foreign: Mapping[str, Any] = {}  # Linear of encodings/base.py, which imports this file

    @property
    def packed(self) -> dict[str, Packed]:
        """Return all quantized modules, the four-bit ones first."""
        return {**self.modules, **self.others}

    @property
    def forms(self) -> tuple[Form, ...]:
        """Return the forms of its four-bit modules, or else all.

        All have one scale layout and one cache.
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
        """Return the matrix of a module, or all matrices of a stack of that name.

        Bytes are read when they are used.
        """
        from fp4convert.checkpoint.dialects.stacks import gather

        packed = self.modules.get(module)
        is_part = packed is not None and packed.stem != module
        packed = packed or next(each for each in self.modules.values() if each.stem == module)
        stored = self.spelling.decode(packed.stem, packed.stored_shape, packed.form, self._read)
        return gather(stored, packed.shape, packed.places) if is_part else stored

    def correction(self, module: str) -> Correction | None:
        """Return the low-rank correction beside a module's codes, if any."""
        packed, table = self.modules[module], self.spelling.TRAITS.correction
        if (factors := self.input_factors(module)) is not None:
            from fp4convert.numerics.low_rank import Correction

            empty = np.zeros((0, packed.shape[1]), np.float32)
            up = np.zeros((packed.shape[0], 0), np.float32)
            return Correction((np.float32(1) / factors).astype(np.float32), empty, up)
        return table.decode(packed.stem, packed.shape, self._read) if table else None

    def input_factors(self, module: str) -> Float32s | None:
        """Return the factors that engines multiply a module's inputs with, if any."""
        packed = self.modules[module]
        ref = self.tensors.get(packed.stem + INPUT_FACTORS)
        if ref is None:
            return None
        stored = self.source.read_range(ref, 0, ref.nbytes)
        return np.frombuffer(stored, FLOAT_DTYPES[ref.dtype]).astype(np.float32)

    def input_scale(self, module: str) -> float | None:
        """Return the input scale of a module as a multiplier, not rounded."""
        packed, scalars = self.modules[module], self.spelling.TRAITS.scalars
        if not packed.form.has_input_scale:
            return None
        name = scalars.input_name(packed.stem)
        across = f"{packed.stem}_{name.removeprefix(packed.stem)[1:]}"  # of a stack named so
        stored = self._read(across if across in self.tensors else name)
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
        """Return (attention, 0 for keys or 1 for values) by cache scale's name."""
        stored = self.spelling.TRAITS.scales_of_cache(self.forms[0].kv_cache)
        return {
            name: (name.removesuffix(f".{ending}"), place)
            for place, ending in enumerate(stored.endings if stored else ())
            for name in self.tensors
            if name.endswith(f".{ending}")
        }

    def _read(self, name: str) -> Span:
        """Return a tensor's bytes; a missing scale is 1."""
        ref = self.tensors.get(name)
        return encode_scalar(1.0) if ref is None else _Tensor(self.source, ref)


def describe_foreign(clues: Clues) -> tuple[str, str]:
    """Name the method of a checkpoint that no dialect reads, and a next step.

    Returns  "this is a checkpoint of GPTQ ...", or "" where the record names no other method; the
             next step
    """
    method, base = clues.record.get("quant_method"), clues.config.get("_name_or_path")
    is_known = isinstance(base, str) and re.fullmatch(REPOSITORY, base)
    next_step = f"Start from the original weights{f': {base}' if is_known else ''}."
    if not isinstance(method, str) or method in (*METHODS.values(), "fp8"):
        endings = tuple(MAKERS)
        sign = next((name for name in clues.tensors if name.endswith(endings)), "")
        maker = next((words for ending, words in MAKERS.items() if sign.endswith(ending)), "")
        return f"these are codes of {maker}" if sign else "", next_step
    name = FOREIGN.get(method.lower(), method)
    return f"this is a checkpoint of {name} (config.json)", next_step


def open_artifact(reference: str, access: Access | None = None) -> Artifact:
    """Open the artifact in that folder or repository."""
    return read_artifact(*open_unfinished(reference, access))


def open_unfinished(reference: str, access: Access | None = None) -> tuple[Source, str]:
    """Open a folder or repository that may lack shards; return its name."""
    folder = os.path.join(reference, subfolder_of(access or Access()))
    has_plan, has_record = (
        os.path.exists(os.path.join(folder, file)) for file in (PLAN_FILE, RECORD)
    )
    called = os.path.normpath(folder) if os.path.isdir(reference) else reference
    return open_source(reference, access, has_plan and not has_record), called


def open_quantized(reference: str, access: Access | None = None) -> tuple[Source, Artifact | None]:
    """Open a source with quantized weights, and its artifact where it is one."""
    from fp4convert.storage.gguf import BLOCK_TYPES

    source = open_source(reference, access)
    clues = read_clues(source)
    has_others = any(
        ref.dtype in BLOCK_TYPES or ref.dtype in FP8_DTYPES for ref in clues.tensors.values()
    )
    is_quantized = bool(clues.record or clues.hf_quant_config or has_others)
    is_other = is_quantized and not is_artifact(source, clues)
    return source, None if is_other else read_artifact(source, reference)


PARAMS = "params.json"


def read_clues(source: Source) -> Clues:
    """Read the configs and headers of a source."""
    tensors = {ref.name: ref for ref in source.checkpoint.tensors}
    config = source.checkpoint.config
    if not config:  # Mistral's own form
        quantization = read_json(source, PARAMS).get("quantization")
        config = {"quantization_config": quantization} if isinstance(quantization, dict) else {}
    frames = [shard.frame for shard in source.checkpoint.shards]
    notes = tuple(text for frame in frames for text in frame.engine_notes.values())
    return Clues(config, read_json(source, ENGINE_RECORD), tensors, notes)


def params_unquantized(source: Source) -> dict[str, str]:
    """Return params.json without its record, by its name, if it has one."""
    params = {} if source.checkpoint.config else read_json(source, PARAMS)
    return {PARAMS: as_text(unquantized(params))} if "quantization" in params else {}


def is_artifact(source: Source, clues: Clues) -> bool:
    """Return whether records describe it: ours, or an engine's of blocks.

    Other FP8 is read by the names of its tensors, which many tools write.
    """
    is_ours = source.has_file(RECORD) and METHOD not in read_json(source, RECORD)
    return is_ours or any(
        group.form.format.block_size for _, groups in recognise(clues) for group in groups
    )


def read_artifact(source: Source, reference: str, clues: Clues | None = None) -> Artifact:
    """Read the artifact in a source; errors name the reference."""
    from fp4convert.checkpoint.modules import read_modules

    record, clues = read_json(source, RECORD), clues or read_clues(source)
    record = {} if METHOD in record else record
    groups, dialect = _read_identity(source, reference, clues, record)
    tensors = dict(clues.tensors)
    found, findings = read_modules(tensors, groups, dialect_named(dialect))
    modules = {module: packed for module, packed in found.items() if packed.form.format.is_fp4}
    others = {module: packed for module, packed in found.items() if module not in modules}
    if source.has_file(PLAN_FILE) and not source.has_file(RECORD):
        detail = f"{RECORD} is not written yet: the conversion did not end"
        detail = f"{detail}; run its command again to continue"
        findings = [Finding("error", "unfinished", None, detail)]
    else:
        if not found and not any(finding.level == "error" for finding in findings):
            findings.append(_nothing_quantized(tensors, groups, dialect))
        findings += _judge_records(clues, record, dialect, found)
    return Artifact(
        source, clues, groups, dialect, record, tensors, modules, others, tuple(findings)
    )


def _nothing_quantized(
    tensors: Mapping[str, TensorRef], groups: tuple[Group, ...], dialect: str
) -> Finding:
    detail = f"no tensor is named as {dialect} names {describe_groups(groups)}"
    coded = [name for name, ref in tensors.items() if ref.dtype in CODED and len(ref.shape) > 1]
    if coded:
        detail += f", and {len(coded)} hold codes, the first {coded[0]!r}: of another dialect"
    return Finding("error" if coded else "warning", "nothing-quantized", None, detail)


def read_json(source: Source, file: str) -> dict[str, object]:
    """Read a JSON object; an empty one where there is no such file."""
    if not source.has_file(file):
        return {}
    return parse_json_object(read_whole(source, file), file)


def _read_identity(
    source: Source, reference: str, clues: Clues, record: dict[str, object]
) -> tuple[tuple[Group, ...], str]:
    """Read forms and dialect from our record, a plan, or an engine's record."""
    quantize = shell_line("fp4convert", "quantize", reference, "--format", "nvfp4")
    begun: object = None
    if not record:
        # Without a readable plan, names of tensors may still identify the artifact.
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
    refuse_adapter(source, reference)
    if source.has_file(RECORD):
        raise _no_record_of_ours(reference)
    detail = f"{reference} is not a four-bit artifact that fp4convert knows: no {RECORD}"
    detail = f"{detail}, no record or names of {', '.join(DIALECTS)}"
    if eights := Counter(ref.dtype for ref in clues.tensors.values() if ref.dtype in FP8_DTYPES):
        words = " and ".join(f"{count} tensors of {dtype}" for dtype, count in eights.items())
        detail = f"{reference} holds {words}, and no record or mark describes them for an engine;"
        detail = f"{detail} quantize and dequantize read FP8 by the names of its scales"
    next_step = f"Quantize it: {quantize}"
    raise InputError("not-an-artifact", detail, next_step)


def _no_record_of_ours(reference: str) -> InputError:
    detail = f"{reference}: its {RECORD} names no dialect; expected one, as fp4convert writes it"
    step = "If the weights are not quantized, give a folder without that file; else fetch the"
    step = f"{step} artifact again."
    return InputError("not-an-artifact", detail, step)


def _algorithm_of(clues: Clues) -> str:
    """Name the algorithm in the record of a known producer; "" for none."""
    for record in (clues.record, json_object(clues.hf_quant_config.get("quantization"))):
        for key in ("quant_algo", "format"):  # modelopt's, compressed-tensors'
            if isinstance(algorithm := record.get(key), str):
                return f"{record.get('quant_method', 'modelopt')} with {algorithm!r}"
    return ""


def _judge_records(
    clues: Clues, record: dict[str, object], dialect: str, modules: Mapping[str, Packed]
) -> Iterator[Finding]:
    """Yield findings where our record, the engine's and the tensors disagree."""
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
    """Yield findings where our record and the engine's disagree."""
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
        for key, value in {"kv_cache": None, **describe_form(expected, spelling)}.items():
            if record.get(key) != value:
                detail = f"{RECORD} says {key} = {record.get(key)!r}, and {dialect} has {value!r}"
                yield Finding("error", "record-wrong", None, detail)
    elif recognised:
        # Engines' records lack the dtype of stored scales.
        from fp4convert.checkpoint.modules import form_finder

        first, second = (
            form_finder([(replace(form, stored_scales=""), names) for form, names in groups])
            for groups in (recorded, recognised)
        )
        differing = [
            module
            for module in modules
            if (form := first(module)) is None or form != second(module)
        ]
        if differing:
            detail = f"on {len(differing)} modules, the first {differing[0]!r}: {RECORD} and"
            detail = f"{detail} config.json give them different formats"
            yield Finding("error", "records-disagree", differing[0], detail)
