"""Read the scales of an artifact, and judge their values.

Block scales are judged by the counts of their bytes.  Global and input scales, one to a module, are
always read from a disk; from the Hub for the chosen modules and their scale groups.
report/catalogue.toml explains the code of a finding.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.record import TABLE, TABLE_SCALES
from fp4convert.errors import Finding, InputError, Level
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, LARGEST_CODE, block_steps
from fp4convert.numerics.formats import FLOAT_TYPES, GLOBAL_RANGE, NVFP4, WITHOUT_SIGNS, Format
from fp4convert.numerics.matrices import Blocks, Quantized, row_panels
from fp4convert.quality.kept_values import describe_zeros, split_bytes
from fp4convert.recipes.recipe import gather_groups, group_members, scale_groups
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import read_each, stored_float

ONLY_ONE = "; engines that fuse them use only one"
MOST_LABEL_NBYTES = 1 << 12  # of a module's label, which is JSON
LOOK_NBYTES = 1 << 16  # of a module's codes, where scales are zero
SMALLEST_AMAX, LARGEST_AMAX = 2.0**-20, 2.0**16  # that weights have; fp16 ends at 65504
ZEROS_SHARE = 0.01  # of blocks; what rounding to zero leaves in honest artifacts is less
FEW_SCALES, LOWEST_BYTE = 6, 0x40  # E4M3 scales are many, or small, or powers of two
WIDE_OCTAVES = 8  # between the 5th and the 95th percentile of the block scales of a matrix


def read_global_scales(artifact: Artifact, modules: Collection[str]) -> dict[str, float]:
    """Read the global scales of modules, if their format has one.

    Returns  module -> the stored float32, a multiplier or a divisor as the dialect's traits say;
             1 if the dialect stores none
    """
    ending = artifact.spelling.TRAITS.scalars.global_scale
    having = [module for module in modules if artifact.modules[module].form.format.has_global_scale]
    if ending is None:
        return dict.fromkeys(having, 1.0)
    return _read_scalars(artifact, having, ending)


def read_input_scales(artifact: Artifact, modules: Collection[str]) -> dict[str, float]:
    """Read the input scales, as multipliers, of the modules with one."""
    scalars = artifact.spelling.TRAITS.scalars
    having = [module for module in modules if artifact.modules[module].form.has_input_scale]
    stored = _read_scalars(artifact, having, scalars.input_name("")) if having else {}
    return {module: scalars.as_multiplier(scale) for module, scale in stored.items()}


def _read_scalars(artifact: Artifact, modules: list[str], ending: str) -> dict[str, float]:
    """Read a scalar of modules by its tensor's ending; 1 if it is missing.

    Modules of a stack have a place in the stack's tensor.
    """
    dtype = artifact.spelling.TRAITS.scalars.dtype
    nbytes = FLOAT_TYPES[dtype].nbytes
    source, homes = artifact.source, {module: artifact.modules[module] for module in modules}
    wanted = {packed.stem + ending for packed in homes.values()}
    # Tensors that follow one another in a file are read together.
    runs: list[list[tuple[TensorRef, int]]] = []  # with the number of their scalars
    next_place: tuple[str, int] | None = None
    for ref in [ref for name, ref in artifact.tensors.items() if name in wanted]:
        if next_place != (ref.file, ref.start):
            runs.append([])
        ref_nbytes = ref.nbytes
        runs[-1].append((ref, ref_nbytes // nbytes))
        next_place = ref.file, ref.start + ref_nbytes

    def read(run: list[tuple[TensorRef, int]]) -> tuple[float, ...]:
        total = sum([count for _, count in run])
        buffer = memoryview(bytearray(nbytes * total))
        source.read_into(run[0][0]._replace(dtype=dtype, shape=(total,)), 0, buffer)
        values = np.frombuffer(buffer, FLOAT_DTYPES[dtype]).astype(np.float64)
        return tuple(values.tolist())

    found: dict[str, tuple[float, ...]] = {}
    for run, values in zip(runs, read_each(source, read, runs), strict=True):
        end = 0
        for ref, count in run:
            found[ref.name] = values[end : end + count]
            end += count
    scales = {}
    for module, packed in homes.items():
        own = found.get(packed.stem + ending, (1.0,))
        scales[module] = own[packed.number if len(own) > 1 else 0]
    return scales


def _modules_with_groups(artifact: Artifact, modules: Sequence[str]) -> list[str]:
    """Return the modules to read scalars of: all on a disk."""
    if not artifact.source.is_streamed:
        return list(artifact.modules)
    members = group_members(artifact.source.checkpoint.config)
    groups = scale_groups(artifact.modules, members)
    keys = set(scale_groups(modules, members).values())
    return [
        module for module in artifact.modules if module in modules or groups.get(module) in keys
    ]


def find_shared_scales(artifact: Artifact, stored: Mapping[str, float]) -> list[dict[str, float]]:
    """Gather stored scales by scale groups of several members.

    stored   module -> global or input scale
    Returns  for every group: module -> scale, in the order of `stored`
    """
    groups = scale_groups(stored, group_members(artifact.source.checkpoint.config))
    return [
        {member: stored[member] for member in members}
        for members in gather_groups(groups).values()
        if len(members) > 1
    ]


def are_equal(scales: Mapping[str, float]) -> bool:
    """Tell whether all members of a group store one scale; NaN is none."""
    values = list(scales.values())
    return all(value == values[0] for value in values)


def check_scales(
    artifact: Artifact, modules: Sequence[str], report: Callable[[str, int], None]
) -> tuple[list[Finding], dict[str, float]]:
    """Check the block scales of these modules, and all other scales.

    report   gets a module and the bytes of its block scales, once they were read
    Returns  the findings, and the global scales by module
    """
    findings = _check_block_scales(artifact, modules, report)
    traits = artifact.spelling.TRAITS
    level: Level = "error" if traits.shares_scales else "warning"
    # Global scales: each by itself, then those of a group beside each other.
    stored = read_global_scales(artifact, _modules_with_groups(artifact, modules))
    for module, scale in stored.items():
        if finding := _judge_global_scale(module, scale, traits.scalars.kind == "divisor"):
            findings.append(finding)
    is_alone = traits.correction or traits.fuses_none
    for scales in () if is_alone else find_shared_scales(artifact, stored):
        if not are_equal(scales):
            detail = f"{', '.join(scales)} have different global scales{ONLY_ONE}"
            findings.append(Finding(level, "group-scales-differ", next(iter(scales)), detail))
    findings += [*check_other_scales(artifact), *_check_cache(artifact)]
    findings += _check_labels(artifact, modules)
    # Input scales in the same way.
    inputs = read_input_scales(artifact, _modules_with_groups(artifact, modules))
    for module, scale in inputs.items():
        if not (math.isfinite(scale) and scale > 0):
            detail = f"as a multiplier its input scale is {scale}"
            findings.append(Finding("error", "input-scale", module, detail))
    for scales in find_shared_scales(artifact, inputs):
        if not are_equal(scales):
            detail = f"{', '.join(scales)} have different input scales{ONLY_ONE}"
            findings.append(Finding(level, "group-inputs-differ", next(iter(scales)), detail))
    return findings, stored


def _judge_global_scale(module: str, stored: float, is_divisor: bool) -> Finding | None:
    """Judge a global scale by the amax of 2688 multipliers that it implies."""
    if not 0 < stored < math.inf:
        return Finding("error", "global-scale", module, f"its global scale is {stored}")
    amax, inverse = GLOBAL_RANGE * stored, GLOBAL_RANGE / stored
    if is_divisor:
        amax, inverse = inverse, amax
    if SMALLEST_AMAX <= amax <= LARGEST_AMAX:
        return None
    detail = f"its global scale {stored:g} says that the largest weight is {amax:.3g}"
    if SMALLEST_AMAX <= inverse <= LARGEST_AMAX:
        detail += f"; it is the reciprocal of what it is declared as, which says {inverse:.3g}"
        return Finding("error", "global-scale-reciprocal", module, detail)
    return Finding("warning", "global-scale-range", module, detail)


def _count_scales(q: Blocks) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Count the scale bytes of a module.

    Returns  (256,) counts, and (256,) float32 steps: the value of code 1 under every byte
    """
    counts, cpu = np.zeros(256, np.int64), Cpu()
    for first, last in row_panels(q.shape):
        counts += cpu.count_bytes(q.scales(first, last))
    every_byte = memoryview(bytes(range(256)))
    shape = (256, q.format.block_size)
    one_each = Quantized(q.format, shape, every_byte, every_byte, q.global_scale, q.kind)
    return counts, block_steps(one_each)


def _check_block_scales(
    artifact: Artifact, modules: Sequence[str], report: Callable[[str, int], None]
) -> list[Finding]:
    """Check the bytes of block scales, module by module and together."""
    findings, zeros = list[Finding](), list[str]()

    def count(module: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        q = artifact.decode(module)
        counted = _count_scales(q)
        report(module, q.shape[0] * q.shape[1] // q.format.block_size)
        return counted

    histograms = read_each(artifact.source, count, modules)
    for module, (counts, steps) in zip(modules, histograms, strict=True):
        if bad := int(counts[~np.isfinite(steps)].sum()):
            detail = f"{bad} blocks have no finite scale"
            findings.append(Finding("error", "scale-not-finite", module, detail))
        if negative := int(counts[steps < 0].sum()):
            detail = f"{negative} blocks have a negative scale"
            findings.append(Finding("error", "scale-negative", module, detail))
        # Dialects give all blocks of such a matrix one scale; from the Hub its codes are not read.
        is_here = not artifact.source.is_streamed
        if is_here and np.count_nonzero(counts) == 1 and _is_zero(artifact, module):
            zeros.append(module)
        # A block of the scale zero holds nothing, whatever its codes say.
        if not counts[steps == 0].sum():
            continue
        q = artifact.decode(module)
        if erased := _count_erased_blocks(q, steps, artifact.source.is_streamed):
            detail = f"{erased} blocks hold values, and have the scale zero"
            is_rounding = erased <= ZEROS_SHARE * counts.sum()
            level: Level = "warning" if is_rounding else "error"
            findings.append(Finding(level, "scale-zero", module, detail))
    if zeros:
        findings.append(describe_zeros(zeros, "four-bit"))
    for fmt in dict.fromkeys(form.format for form in artifact.forms):
        own = [
            counts
            for module, (counts, _) in zip(modules, histograms, strict=True)
            if artifact.modules[module].form.format is fmt
        ]
        findings += _check_dtype(fmt, own)
    return findings


def _is_zero(artifact: Artifact, module: str) -> bool:
    """Return whether all codes of a module are zero."""
    q = artifact.decode(module)
    codes = (np.frombuffer(q.rows(*panel).packed, np.uint8) for panel in row_panels(q.shape))
    return not any((packed & WITHOUT_SIGNS).any() for packed in codes)


def _count_erased_blocks(q: Blocks, steps: NDArray[np.float32], is_remote: bool) -> int:
    """Count blocks with the scale zero and other codes than zero.

    From the Hub some rows with such scales are read, and stand for the others.
    """
    width, row_nbytes = q.shape[1] // q.format.block_size, q.shape[1] // 2
    zeros = seen = erased = 0
    for first, last in row_panels(q.shape):
        is_zero = (steps[np.frombuffer(q.scales(first, last), np.uint8)] == 0).reshape(-1, width)
        zeros += int(is_zero.sum())
        if not is_zero.any() or (is_remote and seen):
            continue
        begin = 0
        if is_remote:
            begin = int(is_zero.any(axis=1).argmax())
            is_zero = is_zero[begin : begin + max(1, LOOK_NBYTES // row_nbytes)]
        rows = q.rows(first + begin, first + begin + len(is_zero))
        packed = np.frombuffer(rows.packed, np.uint8).reshape(*is_zero.shape, -1)[is_zero]
        seen += int(is_zero.sum())
        erased += int((packed & WITHOUT_SIGNS).any(axis=-1).sum())
    return round(erased * zeros / seen) if seen else 0


def _check_dtype(fmt: Format, histograms: list[NDArray[np.int64]]) -> Iterator[Finding]:
    """Check that most modules have bytes of the declared scale dtype.

    The largest E4M3 scale of a scale group is 448.  That byte shows E4M3, whichever of E4M3 and
    E8M0 is declared.
    """
    odd = full = 0
    for counts in histograms:
        full += bool(counts[LARGEST_CODE] and not counts[LARGEST_CODE + 1 : 128].any())
        if fmt is NVFP4:
            # Exponents are a handful of neighbouring large values; scales of E4M3 have mantissas.
            present = np.flatnonzero(counts)
            is_handful = 1 < present.size <= FEW_SCALES and present[0] >= LOWEST_BYTE
            odd += bool(is_handful and (present % 8).any() and np.ptp(present) < 2 * FEW_SCALES)
        elif counts[1:255].any():
            # E4M3 read as exponents spreads as no weights do; byte 0 stands for empty blocks.
            below = np.cumsum(counts[1:255]) / counts[1:255].sum()
            octaves = np.searchsorted(below, 0.95) - np.searchsorted(below, 0.05)
            odd += bool(octaves > WIDE_OCTAVES)
    count = len(histograms)
    is_sure = 8 * full < count if fmt is NVFP4 else 4 * full >= count
    if 2 * odd > count and is_sure:
        other = "e8m0" if fmt is NVFP4 else "fp8_e4m3"
        detail = f"in {odd} of {count} modules the block scales look like {other}"
        yield Finding("error", "scale-dtype", None, f"{detail}, not {fmt.scale_dtype}")


def check_other_scales(artifact: Artifact) -> Iterator[Finding]:
    """Check the scales of FP8, MXFP8, int4 and tables that stay."""
    tables = [
        ref
        for name, ref in artifact.tensors.items()
        if name.endswith(TABLE_SCALES) and TABLE.fullmatch(name.rpartition(".")[0])
    ]
    if not (artifact.others or tables):  # of most artifacts: what reads eight bits is not loaded
        return
    from fp4convert.checkpoint.encodings.fp8 import decode_scales, fault_of_table

    for ref in tables:
        if ref.elements == 1 and (fault := fault_of_table(artifact.source, ref)):
            yield Finding("error", "scale-not-finite", ref.name.rpartition(".")[0], fault)
    zeros, source = list[str](), artifact.source
    for module, packed in artifact.others.items():
        ref = packed.refs[1]
        values = decode_scales(source.read_range(ref, 0, ref.nbytes), ref.dtype)
        if packed.form.format.is_fp8 and not source.is_streamed and np.ptp(values) == 0:
            codes = packed.refs[0]
            parts = ((0, min(codes.nbytes, LOOK_NBYTES)), *split_bytes(codes))
            read = (np.frombuffer(source.read_range(codes, *part), np.uint8) for part in parts)
            zeros += [] if any((part & 0x7F).any() for part in read) else [module]
        if bad := int(np.count_nonzero(~np.isfinite(values))):
            detail = f"{bad} of its {values.size} scales are not finite"
            yield Finding("error", "scale-not-finite", module, detail)
        if negative := int(np.count_nonzero(values < 0)):
            detail = f"{negative} of its {values.size} scales are negative"
            yield Finding("error", "scale-negative", module, detail)
    if zeros:
        yield describe_zeros(zeros, "eight-bit")


def _check_labels(artifact: Artifact, modules: Collection[str]) -> Iterator[Finding]:
    """Check that the labels of modules name the formats of their tensors.

    modules  to read labels of on the Hub, where a label is a request
    """
    table, source = artifact.spelling.TRAITS.fp8, artifact.source
    if not table or not table.mark:
        return
    labelled = []
    for module, packed in artifact.packed.items():
        ending, label = table.mark(packed.form)
        ref = artifact.tensors.get(packed.stem + ending)
        if ref is not None and (not source.is_streamed or module in modules):
            labelled.append((module, ref, json.loads(label)["format"]))

    def read(each: tuple[str, TensorRef, str]) -> bytes:
        return source.read_range(each[1], 0, min(each[1].nbytes, MOST_LABEL_NBYTES)).tobytes()

    stored = read_each(source, read, labelled)
    for text, (module, ref, expected) in zip(stored, labelled, strict=True):
        try:
            found = parse_json_object(text, ref.name).get("format")
        except InputError:
            found = "no JSON" if text.strip(b"\0") else "nothing but zeros"
        if found != expected:
            detail = f"{ref.name} says {found!r}, and its tensors are {expected}"
            yield Finding("error", "label-differs", module, f"{detail}: ComfyUI reads the label")


def _check_cache(artifact: Artifact) -> Iterator[Finding]:
    """Check the scales of the cache that an artifact's record asks for."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, (attention, _) in artifact.cache_scales.items():
        found[attention].append(name)
        if stored_float(artifact.source, artifact.tensors[name]) is None:
            detail = "as the scale of a KV cache it is not a positive number"
            yield Finding("error", "cache-scale", name, detail)
    for attention, names in found.items():
        if len(names) != 2:
            detail = f"its cache has the scale {names[0]} and not the other: engines take 1 for it"
            yield Finding("warning", "cache-scale-missing", attention, detail)
    if (cache := artifact.forms[0].kv_cache) and not found:
        detail = f"the record asks for an {cache.upper()} KV cache, and there are no scales of it:"
        detail += " engines take 1"
        yield Finding("note", "cache-scale-missing", None, detail)
