"""Check the records, names and scales of an artifact.

Block scales are read whole where they are few, and of some modules otherwise; scales that stand once per module are always read
from a disk, and from the Hub for the same modules and those that share theirs.
Each finding's code is explained in report/catalogue.toml.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.modules import UNSAID, idle_scales
from fp4convert.errors import Finding, Level
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import FLOAT_DTYPES, block_steps
from fp4convert.numerics.formats import FLOAT_TYPES, GLOBAL_RANGE, NVFP4, Format
from fp4convert.numerics.matrices import Blocks, Quantized, row_panels
from fp4convert.numerics.scale_layouts import LAYOUTS, arrange_scales
from fp4convert.planning.kv_cache_scales import stored_float
from fp4convert.quality.layout_detection import StoredScales, detect_layout
from fp4convert.quality.stored_scalars import (
    find_agreements,
    read_global_scales,
    read_input_scales,
)
from fp4convert.recipes.patterns import sift
from fp4convert.recipes.recipe import gather_groups, group_members, model_recipe, scale_groups
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source, read_each


def check_cache(artifact: Artifact) -> Iterator[Finding]:
    """Findings on the scales of a cache that an artifact's record asks for."""
    found: dict[str, list[str]] = defaultdict(list)
    endings = artifact.spelling.TRAITS.cache_scales
    for name in artifact.cache_scales(artifact.spelling):
        ending = next(ending for ending in endings if name.endswith(f".{ending}"))
        found[name.removesuffix(f".{ending}")].append(name)
        if stored_float(artifact.source, artifact.tensors[name]) is None:
            yield Finding(
                "error", "cache-scale", name, "as the scale of a cache it is no positive number"
            )
    for attention, names in found.items():
        if len(names) != len(endings):
            detail = (
                f"its cache has the scale {names[0]} and not the other: engines take 1 for that"
            )
            yield Finding("warning", "cache-scale-missing", attention, detail)
    if artifact.forms[0].kv_cache and not found:
        detail = "the record asks for an FP8 cache of keys and values, and there are no scales of it: engines take 1"
        yield Finding("note", "cache-scale-missing", None, detail)


def describe_cache(artifact: Artifact) -> dict[str, object] | None:
    """The cache that an artifact's record asks for: its type, how many scales there are, the smallest and the largest."""
    word = artifact.forms[0].kv_cache
    if word is None:
        return None
    names = artifact.cache_scales(artifact.spelling)
    values = [
        value for name in names if (value := stored_float(artifact.source, artifact.tensors[name]))
    ]
    return {
        "dtype": word,
        "scales": len(names),
        "smallest": min(values, default=None),
        "largest": max(values, default=None),
    }


ALL_NBYTES, SAMPLE_NBYTES = (
    64 << 20,
    48 << 20,
)  # of block scales: read whole up to the first, else about the second
REMOTE_NBYTES, REMOTE_MODULES = (
    16 << 20,
    96,
)  # of a repository on the Hub: a download of seconds, whatever its size
LOOK_NBYTES = 1 << 16  # of a module's codes, where scales are zero
SMALLEST_AMAX, LARGEST_AMAX = 2.0**-20, 2.0**16  # that weights have; fp16 ends at 65504
ZEROS_SHARE = 0.01  # of blocks; what rounding to zero leaves in honest artifacts is less
SPREAD = 8  # modules apart are those whose layout is judged one after the other
FEW_SCALES, LOWEST_BYTE = 6, 0x40  # E4M3 scales are many, or small, or powers of two
WIDE_OCTAVES = 8  # between the 5th and the 95th percentile of the block scales of a matrix
LARGEST_E4M3 = 0x7E  # 448, which the block with the largest weight of a scale group has
GUESSED = (
    "scale-dtype",
    "global-scale-reciprocal",
    "global-scale-range",
)  # what a source that fits refutes


@dataclass(frozen=True, slots=True)
class Judged:
    """What speaks against an artifact.

    refuted   what its scales alone would say, were it not for a source that fits
    detected  the layout that its block scales lie in; None where nothing decides
    """

    findings: tuple[Finding, ...]
    refuted: tuple[Finding, ...]
    detected: str | None


@dataclass(frozen=True, slots=True)
class _Histogram:
    """How often each scale byte occurs in a module, and what one code unit is worth under it."""

    format: Format
    counts: NDArray[np.int64]
    steps: NDArray[np.float32]

    def where(self, chosen: NDArray[np.bool_]) -> int:
        return int(self.counts[chosen].sum())


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Tell whether no finding is an error."""
    return all(finding.level != "error" for finding in findings)


def judge(
    artifact: Artifact, source: Source | None, read: Sequence[str], sampled: Sequence[str]
) -> Judged:
    """Everything that an artifact's records, names and scales say against it: `inspect` and `verify` both say this.

    source   the original weights, which decide what statistics cannot
    read     modules whose block scales are read one by one
    sampled  those that tell the layout, and are compared with the source
    Raises   InputError where the source holds none of them
    """
    findings = [
        *artifact.findings,
        *_check_names(artifact),
        *_check_idle(artifact),
        *_check_scales(artifact, read),
    ]
    detected = detect_layout(_stored_scales(artifact, sampled), artifact.scale_layout)
    if source is None:
        return Judged((*findings, *_check_layout(artifact, detected)), (), detected)
    from fp4convert.quality.source_match import suspect

    suspicion = suspect(artifact, source, sampled)
    if suspicion.layout is None:
        findings += _check_layout(artifact, detected)
    fits = not any(finding.level == "error" for finding in suspicion.findings)
    refuted = tuple(finding for finding in findings if fits and finding.code in GUESSED)
    held = (finding for finding in findings if not fits or finding.code not in GUESSED)
    return Judged((*held, *suspicion.findings), refuted, suspicion.layout or detected)


def _check_layout(artifact: Artifact, detected: str | None) -> Iterator[Finding]:
    if detected and detected != artifact.scale_layout:
        detail = f"block scales are declared {artifact.scale_layout} and lie {detected}; engines would compute garbage"
        yield Finding("error", "scale-layout", None, detail)


def choose_modules(artifact: Artifact, is_full: bool) -> list[str]:
    """The modules whose block scales are read: all, or some from everywhere."""
    modules, nbytes_of = sorted(artifact.modules), _read_nbytes(artifact)
    nbytes, count = sum(nbytes_of.values()), len(modules)
    at_once, left, most = (REMOTE_NBYTES, REMOTE_NBYTES, REMOTE_MODULES)
    if not artifact.source.is_streamed:
        at_once, left, most = ALL_NBYTES, SAMPLE_NBYTES, count
    if is_full or (nbytes <= at_once and count <= most):
        return modules
    chosen = []
    for module in modules[:: max(math.ceil(nbytes / left), math.ceil(count / most))]:
        if nbytes_of[module] <= left:
            chosen.append(module)
            left -= nbytes_of[module]
    return chosen


def scale_nbytes(artifact: Artifact) -> dict[str, int]:
    """Of the block scales of each module, without padding."""
    sized = ((module, *packed.shape, packed.form) for module, packed in artifact.modules.items())
    return {
        module: rows * columns // form.format.block_size for module, rows, columns, form in sized
    }


def _read_nbytes(artifact: Artifact) -> dict[str, int]:
    """What is read for the block scales of each module: its codes too where they lie among them."""
    nbytes = scale_nbytes(artifact)
    if artifact.scale_layout in LAYOUTS:
        return nbytes
    return {
        module: of * (artifact.modules[module].form.format.block_size // 2 + 1)
        for module, of in nbytes.items()
    }


def _beside(artifact: Artifact, modules: Sequence[str]) -> list[str]:
    """The modules whose single scales are read: all, or from the Hub those modules and what shares a scale with them."""
    if not artifact.source.is_streamed:
        return list(artifact.modules)
    members = group_members(artifact.source.checkpoint.config)
    groups = scale_groups(artifact.modules, members)
    keys = set(scale_groups(modules, members).values())
    return [
        module for module in artifact.modules if module in modules or groups.get(module) in keys
    ]


def _stored_scales(artifact: Artifact, modules: Sequence[str]) -> Iterator[StoredScales]:
    """Block scales as they are stored, where they have a tensor of their own; the first of them are from everywhere."""
    layout = LAYOUTS.get(artifact.scale_layout)
    for module in (module for first in range(SPREAD) for module in modules[first::SPREAD]):
        if layout is None or artifact.modules[module].stem != module:
            continue
        q = artifact.decode(module)
        rows, columns = q.shape
        shape = (rows, columns // q.format.block_size)
        yield StoredScales(np.frombuffer(arrange_scales(q, layout), np.uint8), shape, q.format)


def _check_scales(artifact: Artifact, modules: Sequence[str]) -> list[Finding]:
    """Findings on the block scales of those modules, and on the global and input scales of all."""
    findings: list[Finding] = []
    histograms = read_each(
        artifact.source, lambda module: _histogram(artifact.decode(module)), modules
    )
    for module, histogram in zip(modules, histograms, strict=True):
        findings += _judge_histogram(artifact, module, histogram)
    for fmt in {form.format for form in artifact.forms}:
        findings += _judge_dtype(fmt, [each for each in histograms if each.format is fmt])
    stored, is_divisor = (
        read_group_scales(artifact, modules),
        artifact.spelling.TRAITS.scalars.kind == "divisor",
    )
    for module, scale in stored.items():
        if not _is_ordinary(scale, is_divisor):
            findings.append(_judge_global_scale(module, scale, is_divisor))
    level: Level = "error" if artifact.spelling.TRAITS.shares_scales else "warning"
    for members in _unequal_groups(artifact, stored):
        detail = f"{', '.join(members)} have different global scales; engines that fuse them use only one"
        findings.append(Finding(level, "group-scales-differ", members[0], detail))
    findings += [*_check_others(artifact), *check_cache(artifact)]
    inputs = read_input_scales(artifact, _beside(artifact, modules))
    for module, scale in inputs.items():
        if not (math.isfinite(scale) and scale > 0):
            findings.append(
                Finding(
                    "error", "input-scale", module, f"as a multiplier its input scale is {scale}"
                )
            )
    for members in _unequal_groups(artifact, inputs):
        detail = (
            f"{', '.join(members)} have different input scales; engines that fuse them use only one"
        )
        findings.append(Finding(level, "group-inputs-differ", members[0], detail))
    return findings


def read_group_scales(artifact: Artifact, modules: Sequence[str]) -> dict[str, float]:
    """module -> the global scale that it stores: of all modules, or from the Hub of these and those that share theirs."""
    return read_global_scales(artifact, _beside(artifact, modules))


def _check_others(artifact: Artifact) -> Iterator[Finding]:
    """Findings on the scales of FP8 and int4 modules, and on scale groups of several forms."""
    named = [f"{module}.weight_scale" for module in artifact.others]
    for ref in (artifact.tensors[name] for name in named):
        stored = artifact.source.read_range(ref, 0, ref.nbytes).tobytes()
        values = np.frombuffer(stored, FLOAT_DTYPES[ref.dtype]).astype(np.float32)
        module = ref.name.removesuffix(".weight_scale")
        if bad := int(np.count_nonzero(~np.isfinite(values))):
            yield Finding(
                "error",
                "scale-not-finite",
                module,
                f"{bad} of its {values.size} scales are not finite",
            )
        if negative := int(np.count_nonzero(values < 0)):
            yield Finding(
                "error",
                "scale-negative",
                module,
                f"{negative} of its {values.size} scales are negative",
            )
    if len({group.form.word for group in artifact.groups}) < 2:
        return
    packed = artifact.packed
    groups = scale_groups(packed, group_members(artifact.source.checkpoint.config))
    for members in gather_groups(groups).values():
        words = [packed[module].form.word for module in members]
        if len(set(words)) > 1:
            detail = f"{', '.join(members)} are {', '.join(words)}; engines that fuse them refuse the artifact"
            yield Finding("error", "group-forms-differ", members[0], detail)


def _histogram(q: Blocks) -> _Histogram:
    counts, cpu = np.zeros(256, np.int64), Cpu()
    for first, last in row_panels(q.shape):
        counts += cpu.count_bytes(q.scales(first, last))
    every_byte = memoryview(bytes(range(256)))
    one_each = Quantized(
        q.format, (256, q.format.block_size), every_byte, every_byte, q.global_scale, q.kind
    )
    return _Histogram(q.format, counts, block_steps(one_each))


def _judge_histogram(artifact: Artifact, module: str, histogram: _Histogram) -> Iterator[Finding]:
    if bad := histogram.where(~np.isfinite(histogram.steps)):
        yield Finding("error", "scale-not-finite", module, f"{bad} blocks have no finite scale")
    if negative := histogram.where(histogram.steps < 0):
        yield Finding("error", "scale-negative", module, f"{negative} blocks have a negative scale")
    if histogram.where(histogram.steps == 0) and (
        erased := _erased_blocks(
            artifact.decode(module), histogram.steps, artifact.source.is_streamed
        )
    ):
        detail = f"{erased} blocks hold values, and have the scale zero"
        is_rounding = erased <= ZEROS_SHARE * histogram.counts.sum()
        yield Finding("warning" if is_rounding else "error", "scale-zero", module, detail)


def _erased_blocks(q: Blocks, steps: NDArray[np.float32], is_remote: bool) -> int:
    """Blocks whose scale is zero and whose codes are not; from the Hub, some rows that have any speak for all of them."""
    width, row_nbytes = q.shape[1] // q.format.block_size, q.shape[1] // 2
    zeros = seen = erased = 0
    for first, last in row_panels(q.shape):
        is_zero = (steps[np.frombuffer(q.scales(first, last), np.uint8)] == 0).reshape(-1, width)
        zeros += int(is_zero.sum())
        if not is_zero.any() or (is_remote and seen):
            continue
        begin = int(is_zero.any(axis=1).argmax()) if is_remote else 0
        is_zero = (
            is_zero[begin : begin + max(1, LOOK_NBYTES // row_nbytes)] if is_remote else is_zero
        )
        rows = q.rows(first + begin, first + begin + len(is_zero))
        packed = np.frombuffer(rows.packed, np.uint8).reshape(*is_zero.shape, -1)[is_zero]
        seen += int(is_zero.sum())
        erased += int((packed & 0x77).any(axis=-1).sum())
    return round(erased * zeros / seen) if seen else 0


def _judge_dtype(fmt: Format, histograms: list[_Histogram]) -> Iterator[Finding]:
    """Bytes that make no sense as what they are declared, in most of the modules.

    The largest E4M3 scale of a group is 448: a sign of E4M3 where exponents are declared, and of honesty where it is itself.
    """
    is_nvfp4 = fmt is NVFP4
    odd = sum(_is_odd_e4m3(each) if is_nvfp4 else _is_odd_e8m0(each) for each in histograms)
    full = sum(
        bool(each.counts[LARGEST_E4M3] and not each.counts[LARGEST_E4M3 + 1 : 128].any())
        for each in histograms
    )
    is_sure = 8 * full < len(histograms) if is_nvfp4 else 4 * full >= len(histograms)
    if 2 * odd > len(histograms) and is_sure:
        other = "e8m0" if is_nvfp4 else "fp8_e4m3"
        detail = f"in {odd} of {len(histograms)} modules the block scales look like {other}, not {fmt.scale_dtype}"
        yield Finding("error", "scale-dtype", None, detail)


def _is_odd_e4m3(histogram: _Histogram) -> bool:
    """True for a handful of neighbouring large values, as exponents are, though scales have mantissas."""
    present = np.flatnonzero(histogram.counts)
    is_handful = 1 < present.size <= FEW_SCALES and present[0] >= LOWEST_BYTE
    return bool(is_handful and (present % 8).any() and np.ptp(present) < 2 * FEW_SCALES)


def _is_odd_e8m0(histogram: _Histogram) -> bool:
    """True where exponents are spread as no weights are; byte 0 stands for blocks without values."""
    counts = histogram.counts[1:255]
    if not counts.any():
        return False
    below = np.cumsum(counts) / counts.sum()
    return bool(np.searchsorted(below, 0.95) - np.searchsorted(below, 0.05) > WIDE_OCTAVES)


def _is_ordinary(stored: float, is_divisor: bool) -> bool:
    """True where a global scale implies an amax that weights have: 2688 times the multiplier."""
    if not 0 < stored < math.inf:
        return False
    amax = GLOBAL_RANGE / stored if is_divisor else GLOBAL_RANGE * stored
    return SMALLEST_AMAX <= amax <= LARGEST_AMAX


def _judge_global_scale(module: str, stored: float, is_divisor: bool) -> Finding:
    """What is wrong with a global scale that is not ordinary."""
    if not 0 < stored < math.inf:
        return Finding("error", "global-scale", module, f"its global scale is {stored}")
    amax, inverse = GLOBAL_RANGE * stored, GLOBAL_RANGE / stored
    if is_divisor:
        amax, inverse = inverse, amax
    detail = f"its global scale {stored:g} says that the largest weight is {amax:.3g}"
    if _is_ordinary(stored, not is_divisor):
        detail += f"; it is the reciprocal of what it is declared as, which says {inverse:.3g}"
        return Finding("error", "global-scale-reciprocal", module, detail)
    return Finding("warning", "global-scale-range", module, detail)


def _unequal_groups(artifact: Artifact, stored: dict[str, float]) -> list[list[str]]:
    """The members of every scale group that store different scales."""
    return [group.members for group in find_agreements(artifact, stored) if not group.is_kept]


def _check_names(artifact: Artifact) -> Iterator[Finding]:
    """Findings on what is quantized that should not be, and what is not, though records say so."""
    if omitted := artifact.source.checkpoint.unindexed:
        detail = f"{len(omitted)} tensors are not in the index, the first {omitted[0]!r}: engines that follow it do not load them"
        yield Finding("error", "index-omits", None, detail)
    recipe = model_recipe(artifact.source.checkpoint.config)
    is_strict = not artifact.spelling.TRAITS.holds_embeddings
    for module in sift(recipe.kept_patterns, artifact.packed):
        kind = recipe.kind_of(module)
        if kind == "router":
            detail = "it is a router, which few engines read quantized, and which loses most by it"
            yield Finding("warning", "router-quantized", module, detail)
        elif kind == "embedding" and is_strict and module in artifact.modules:
            detail = f"engines of dialect {artifact.dialect} read no embedding in four bits, if it is one"
            yield Finding("warning", "embedding-quantized", module, detail)
        elif kind == "tower":
            yield Finding(
                "warning",
                "tower-quantized",
                module,
                "it is part of a vision or audio tower, which most engines keep",
            )
    if artifact.spelling.TRAITS.ignores_by_name:
        yield from _check_kept(artifact)


def _check_idle(artifact: Artifact) -> Iterator[Finding]:
    has_inputs = all(
        form.has_input_scale for form in artifact.forms if form.format.has_global_scale
    )
    if idle := idle_scales(artifact.modules, artifact.cache_scales(artifact.spelling), has_inputs):
        detail = f"{len(idle)} scales beside four-bit modules, the first {idle[0]}: {UNSAID}; transcode leaves them out"
        yield Finding("note", "scales-idle", None, detail)


def _check_kept(artifact: Artifact) -> Iterator[Finding]:
    """Linear layers that stay, as their quantized namesakes in other layers show, and that no record ignores."""
    leaves = {
        leaf for module in artifact.packed if not (leaf := module.rpartition(".")[2]).isdigit()
    }
    is_ignored = artifact.spelling.ignores(artifact.clues)
    for name, ref in artifact.tensors.items():
        if name.endswith(WEIGHT) and len(ref.shape) == 2 and ref.dtype in FLOAT_TYPES:
            module = name.removesuffix(WEIGHT)
            if module.rpartition(".")[2] in leaves and not is_ignored(module):
                detail = "it is not quantized, other layers' are, and no record ignores it: engines would look for its scales"
                yield Finding("error", "kept-not-ignored", module, detail)
