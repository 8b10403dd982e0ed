"""Take the global scales of weights from a file instead of measuring them.

Every weight is then read once. Backends take an amax, so a plan holds the float32 amax whose global
scale is that of the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.tables import decode_scalar, encode_scalar
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.errors import InputError
from fp4convert.numerics.codec import global_scale_of
from fp4convert.numerics.formats import AWQ, NVFP4, Format, Kind, global_range
from fp4convert.planning.decisions import Verdict
from fp4convert.progress import count_text
from fp4convert.recipes.recipe import ScaleGroup, Target
from fp4convert.storage.json_text import read_text_file
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Source, read_each, refusing

OPTION = "--global-scale"
SMALLEST = 2.0**-100  # it, its inverse and 2688 times that are far inside float32
NEARBY = 4  # float32 numbers on either side, among which is the amax of a stored scale
LARGEST = 1e300  # of float32 it is infinity, which is refused
SHOWN = 10  # names of a list
NOT_QUANTIZED = frozenset({"no-weights", "not-an-artifact"})  # of files and checkpoints
MEASURE = "Leave it out: global scales are then measured."


class StoredScale(NamedTuple):
    """A global scale of a file: a float32, and its kind."""

    number: float
    kind: Kind = "multiplier"

    @property
    def multiplier(self) -> float:
        return 1 / self.number if self.kind == "divisor" and self.number else self.number


class GlobalScales(NamedTuple):
    """The global scales of a file.

    origin   its name for people
    modules  modules with a scale
    find     returns the scale of one of them
    shapes   of the modules, where the file has them
    source   read by `find`; None where it reads nothing
    """

    origin: str
    modules: Collection[str]
    find: Callable[[str], StoredScale]
    shapes: Mapping[str, tuple[int, int]]
    source: Source | None = None


def open_global_scales(reference: str, fmt: Format, target: Target) -> GlobalScales:
    """Open a file or an artifact with global scales.

    reference  an artifact of NVFP4 in any dialect, or a .json or .safetensors file that has a
               multiplier for every module
    fmt        of most modules
    Raises     InputError where the result holds no such scales, or the file has none
    """
    origin = f"{OPTION} {reference}"
    if not fmt.has_global_scale or target.has_unit_scale:
        raise InputError(
            "bad-global-scale",
            f"{OPTION} is for nvfp4 in a dialect that stores global scales; found"
            f" {fmt.name}, dialect {target.dialect}",
            "Leave it out.",
        )
    if reference.endswith(".json") and os.path.isfile(reference):
        numbers = _json_numbers(reference)
        return GlobalScales(origin, numbers, lambda module: StoredScale(numbers[module]), {})
    if reference.endswith(".safetensors") and os.path.isfile(reference):
        source = open_source(reference)
        refs = {ref.name: ref for ref in source.checkpoint.tensors}
        if all(ref.dtype == "F32" and ref.elements == 1 for ref in refs.values()):

            @cache
            def read(module: str) -> StoredScale:
                return StoredScale(decode_scalar(source.read_range(refs[module], 0, 4)))

            return GlobalScales(origin, refs, read, {}, source)
    try:
        artifact = open_artifact(reference)
    except InputError as error:
        if error.code not in NOT_QUANTIZED:
            raise
        next_step = "Give an artifact of nvfp4, or a .json or .safetensors file with a multiplier"
        next_step += f" for every module. {MEASURE}"
        raise InputError("bad-global-scale", f"{OPTION} {error.message}", next_step) from None
    _check_folds(artifact, origin, target)
    return _scales_of_artifact(artifact, origin)


def scales_for_component(reference: str, name: str, count: int) -> str:
    """Return the reference to the global scales of one component.

    count   number of components of the pipeline
    Raises  InputError where one file would be for several
    """
    own = Path(reference, name)
    if own.is_dir():
        return str(own)
    if count > 1:
        raise InputError(
            "bad-global-scale",
            f"{OPTION} {reference} is one file for {count} components; expected the folder of a"
            f" pipeline, with {name} in it",
            "Give each component its own scales: --subfolder, one run for each.",
        )
    return reference


def _json_numbers(path: str) -> dict[str, float]:
    """Read {module: multiplier}, each rounded to float32."""
    try:
        entries = json.loads(read_text_file(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("bad-global-scale", f"{OPTION} {path}: {error}", MEASURE) from None
    if not isinstance(entries, dict):
        detail = f"{OPTION} {path}: expected an object of module names and numbers"
        raise InputError("bad-global-scale", detail, MEASURE)
    numbers = {}
    for module, number in entries.items():
        if type(number) not in (int, float):
            detail = f"{OPTION} {path}: {module!r} has {json.dumps(number)}; expected a number"
            raise InputError("bad-global-scale", detail, "Give a float32 multiplier.", module)
        with np.errstate(over="ignore"):
            # an integer may be beyond every float
            numbers[module] = float(np.float32(max(min(number, LARGEST), -LARGEST)))
    return numbers


def _check_folds(artifact: Artifact, origin: str, target: Target) -> None:
    """Raise InputError where folds made other weights than they make here."""
    made = "as they are"
    if folds_recorded(artifact.record):  # else by the artifact that it was made of
        is_awq = artifact.record.get("method") == AWQ
        made = "multiplied by --method awq" if is_awq else "multiplied by other factors"
    wanted = "multiplied by --method awq" if target.method == AWQ else "as they are"
    if made == wanted:
        return
    raise InputError(
        "global-scale-folded",
        f"{origin}: its scales are of weights {made}; expected those of weights {wanted}",
        f"Give an artifact that was made by the same method. {MEASURE}",
    )


def _scales_of_artifact(artifact: Artifact, origin: str) -> GlobalScales:
    having = {
        module: packed.shape
        for module, packed in artifact.modules.items()
        if packed.form.format.has_global_scale
    }

    @cache  # a plan is made again for every size that --target-size tries
    def read(module: str) -> StoredScale:
        blocks = artifact.decode(module)
        return StoredScale(
            math.nan if blocks.global_scale is None else blocks.global_scale, blocks.kind
        )

    return GlobalScales(origin, having, read, having, artifact.source)


def given_amaxes(
    verdicts: Mapping[str, Verdict], scales: GlobalScales, target: Target
) -> tuple[dict[str, float], list[str]]:
    """Find the amax of every module that gets a given global scale.

    Returns  module -> the float32 amax, and notes for people
    Raises   InputError where no module takes a scale, where modules of file and plan differ, for
             numbers that are no scale, and for scale groups with several scales
    """
    groups = {
        module: verdict.group
        for module, verdict in verdicts.items()
        if verdict.action == "quantize" and verdict.form and verdict.form.format.has_global_scale
    }
    if not groups and any(verdict.is_made for verdict in verdicts.values()):
        detail = f"{scales.origin}: no module gets a new nvfp4 global scale; expected one at least"
        raise InputError("bad-global-scale", detail, "Leave it out: what is there is taken over.")
    _check_modules(verdicts, groups, scales)
    found = (
        read_each(scales.source, scales.find, groups)
        if scales.source
        else list(map(scales.find, groups))
    )
    stored = dict(zip(groups, found, strict=True))
    with refusing(scales.source):
        _check_numbers(stored, scales.origin)
        _check_groups(groups, stored, scales.origin)
    amaxes, inexact, rule = {}, 0, target.rule_for(NVFP4)
    for module, one in stored.items():
        amaxes[module], is_exact = amax_of(one, rule)
        inexact += not is_exact
    if not inexact:
        return amaxes, []
    return amaxes, [
        f"{scales.origin}: global scales of {inexact} modules are no float32 amax /"
        f" {global_range(rule):g}; each gets the nearest one that is, the float32 next to it"
    ]


def _check_modules(
    verdicts: Mapping[str, Verdict], quantized: Collection[str], scales: GlobalScales
) -> None:
    """Raise InputError for missing, unlike and unknown modules of the file."""
    known = set(scales.modules)
    next_step = f"Give scales of this model. {MEASURE}"
    if missing := [module for module in quantized if module not in known]:
        detail = f"{scales.origin} has no global scale for {_listed(missing)}"
        raise InputError("global-scale-modules", detail, next_step, missing[0])
    unlike = [
        module
        for module in quantized
        if module in scales.shapes and scales.shapes[module] != verdicts[module].linear.shape
    ]
    if unlike:
        detail = f"{scales.origin}: other shapes than here have {_listed(unlike)}"
        raise InputError("global-scale-modules", detail, next_step, unlike[0])
    if unknown := sorted(known - set(verdicts)):
        detail = f"{scales.origin} has global scales of what is no module here: {_listed(unknown)}"
        raise InputError("global-scale-modules", detail, next_step, unknown[0])


def _check_numbers(stored: Mapping[str, StoredScale], origin: str) -> None:
    """Raise InputError for a number that is no scale."""
    for module, one in stored.items():
        if not SMALLEST <= one.multiplier <= 1 / SMALLEST:
            detail = (
                f"{origin}: the global scale of {module} is {one.multiplier:g} as a"
                f" multiplier; expected a number from {SMALLEST:g} to {1 / SMALLEST:g}"
            )
            raise InputError("bad-global-scale", detail, MEASURE, module)


def _check_groups(
    groups: Mapping[str, ScaleGroup | None], stored: Mapping[str, StoredScale], origin: str
) -> None:
    """Raise InputError where members of a scale group have unlike scales."""
    of_group: dict[ScaleGroup, StoredScale] = {}
    for module, group in groups.items():
        if group and of_group.setdefault(group, stored[module]) != stored[module]:
            detail = (
                f"{origin}: members of the scale group {group} have different global scales,"
                f" {of_group[group].multiplier:g} and {stored[module].multiplier:g} ({module}) as"
                " multipliers"
            )
            next_step = "Give all of them the largest multiplier, as engines have one for a group."
            raise InputError("global-scale-group", f"{detail}; expected one", next_step, module)


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    count = count_text(len(names), "module")
    return f"{count}: {', '.join(names[:SHOWN])}" + (f" and {more} more" if more > 0 else "")


def amax_of(stored: StoredScale, rule: str) -> tuple[float, bool]:
    """Return the amax of a stored global scale, and whether it is exact.

    Of several, as under a divisor, the one with the fewest bits, as weights of 16 bits have. Where
    no amax has that scale, the amax of the nearest scale.
    """
    reach, is_inverse = global_range(rule), stored.kind == "divisor"
    near = np.float32(reach / stored.number if is_inverse else reach * stored.number)
    first = int(near.view(np.uint32)) - NEARBY
    around = np.arange(first, first + 2 * NEARBY + 1, dtype=np.uint32)
    far = partial(_distance, stored=stored, rule=rule)
    least = min(map(far, around.view(np.float32).tolist()))
    same = [int(bits) for bits in around if far(float(bits.view(np.float32))) == least]
    chosen = np.uint32(max(same, key=lambda bits: bits & -bits))
    return float(chosen.view(np.float32)), least == 0


def _distance(amax: float, stored: StoredScale, rule: str) -> float:
    """Return how far the stored scale is from that of an amax."""
    scale = float(global_scale_of(amax, rule))
    return abs(decode_scalar(encode_scalar(scale, stored.kind == "divisor")) - stored.number)
