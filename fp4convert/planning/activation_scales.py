"""Choose the static scale of each module's activations.

Engines divide activations by such a scale before they round them: what is larger than its range is cut off, which costs most
of a model's quality, while a scale that is larger than it must be costs next to nothing.  A scale here is a multiplier,
amax / 2688 for NVFP4 and amax / 448 for FP8; dialects spell it as their engines want it.
Everything is read when a plan is made: scalars of an artifact, or of a calibration file.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fp4convert.calibration.statistics import (
    FORMAT,
    Calibration,
    check_inputs,
    check_source,
    open_calibration,
)
from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, Form
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.errors import InputError
from fp4convert.numerics.formats import E4M3_MAX, GLOBAL_RANGE, Format
from fp4convert.recipes.recipe import ScaleGroup
from fp4convert.storage.source import Source, stopping

SMALLEST = 2.0**-100  # it and its inverse are far inside float32
OPTION = "--input-scale"
REQUESTS = 8  # to the Hub at once
HEAD_NBYTES = 1 << 16  # of a file, in which it says what it is
SLACK = 1e-6  # of a float32 beside the float64 that it was rounded from


class Fed(NamedTuple):
    """A module whose inputs engines round by a scale that stands beside its weights.

    form     that it has in the result
    has_own  the source has such a scale, which stays where nobody says another
    """

    module: str
    shape: tuple[int, int]
    form: Form
    group: ScaleGroup | None
    has_own: bool


class InputScales(Protocol):
    """Something that knows the input scales of modules."""

    @property
    def origin(self) -> str:
        """What a person calls it."""

    def find(self, fed: Fed) -> float | None:
        """The input scale of that module; None where it has none."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One scale for all NVFP4 modules; FP8 ones keep their own, or have 1."""

    input_scale: float

    @property
    def origin(self) -> str:
        return f"{OPTION} {self.input_scale:g}"

    def find(self, fed: Fed) -> float | None:
        if fed.form.format.is_fp4:
            return self.input_scale
        return None if fed.has_own else 1.0


@dataclass(frozen=True, slots=True)
class Copied:
    """Those of another artifact of the same model, in whatever dialect; each is read once, however often a plan is made."""

    artifact: Artifact
    origin: str
    _read: dict[str, float | None] = field(default_factory=dict, repr=False, compare=False)

    def find(self, fed: Fed) -> float | None:
        artifact, module = self.artifact, fed.module
        packed = artifact.modules.get(module) or artifact.others.get(module)
        if packed is None:
            return None
        if packed.shape != fed.shape:
            detail = (
                f"{self.origin}: {module} is {list(packed.shape)} there and {list(fed.shape)} here"
            )
            raise InputError(
                "input-scale-model", detail, "Give an artifact of the same model.", module
            )
        if module not in self._read:
            self._read[module] = (
                artifact.input_scale(module) if module in artifact.modules else self._of_fp8(module)
            )
        stored = self._read[module]
        return (
            None
            if stored is None
            else stored * (range_of(packed.form.format) / range_of(fed.form.format))
        )

    def _of_fp8(self, module: str) -> float | None:
        table = self.artifact.spelling.TRAITS.fp8
        ref = (
            self.artifact.tensors.get(f"{module}{table.input_scale}")
            if table and table.input_scale
            else None
        )
        if ref is None or ref.dtype != "F32" or ref.elements != 1:
            return None
        return float(struct.unpack("<f", self.artifact.source.read_range(ref, 0, ref.nbytes))[0])


@dataclass(frozen=True, slots=True)
class Measured:
    """Those that fit the largest inputs that a calibration saw."""

    calibration: Calibration

    @property
    def origin(self) -> str:
        return str(self.calibration.path)

    def find(self, fed: Fed) -> float | None:
        if not self.calibration.has(fed.module):
            return None
        check_inputs(self.calibration, fed.module)
        amax = self.calibration.amax(fed.module)
        if amax == 0:
            detail = f"{self.origin}: {fed.module} was given nothing but zeros, or no token at all; a scale needs a largest input"
            next_step = f"Calibrate with more text, leave it out (--exclude {fed.module!r}), or give one scale for all: {OPTION} 1."
            raise InputError("input-scale-zero", detail, next_step, fed.module)
        return amax / range_of(fed.form.format)


def range_of(fmt: Format) -> float:
    """The largest input that a scale of 1 stands for."""
    return GLOBAL_RANGE if fmt.is_fp4 else E4M3_MAX


def choose_scales(
    source: Source,
    fmt: Format,
    activations: int,
    asked: str | float | None,
    measured: Measured | None,
) -> InputScales:
    """What says the input scales of a conversion: what is asked for, else a calibration, else 1.0, as NVIDIA does without one.

    source       of the weights
    activations  16 or 4
    asked        a number, or an artifact's folder, file or repository, or another calibration file
    measured     of a calibration file, where there is one
    Raises       InputError where these do not go together, nothing of that name can be opened, or it is of another model
    """
    if activations not in (16, ACTIVATIONS_FP4):
        raise InputError(
            "bad-activations",
            f"--activations {activations} is not known; expected 16 or 4",
            "Leave it out for 16.",
        )
    if asked is None:
        return measured or Constant(1.0)
    if not Form(fmt, activations).has_input_scale:
        detail = f"{OPTION} means nothing for {fmt.name} with {activations}-bit activations"
        raise InputError(
            "bad-input-scale", f"{detail}; it is for nvfp4 with --activations 4", "Leave it out."
        )
    number = _number_in(asked)
    if number is None:
        return (
            _measured(source, str(asked))
            if _is_calibration(str(asked))
            else Copied(_open(str(asked)), f"{OPTION} {asked}")
        )
    if not SMALLEST <= number <= 1 / SMALLEST:
        detail = f"{OPTION} {number:g}; expected a number from {SMALLEST:g} to {1 / SMALLEST:g}, or a file or folder"
        raise InputError(
            "bad-input-scale",
            detail,
            f"Take them from what has them: {OPTION} ARTIFACT, or a calibration file.",
        )
    return Constant(number)


def _number_in(asked: str | float) -> float | None:
    try:
        return float(asked)
    except ValueError:
        return None


def whole_reference(asked: str | float | None) -> str | float | None:
    """What is asked for as it means the same in any folder: a path from the root on."""
    is_path = asked is not None and _number_in(asked) is None and os.path.exists(str(asked))
    return os.path.abspath(str(asked)) if is_path else asked


def _is_calibration(path: str) -> bool:
    """True for a file whose head says that it is one."""
    try:
        with open(path, "rb") as stream:
            return FORMAT.encode() in stream.read(HEAD_NBYTES)
    except OSError:
        return False  # a folder, a name on the Hub, or what opening it as an artifact tells


def _measured(source: Source, path: str) -> Measured:
    calibration = open_calibration(path)
    check_source(calibration, source)
    return Measured(calibration)


def _open(reference: str) -> Artifact:
    """The artifact whose scales are asked for."""
    is_path = os.path.exists(reference)
    try:
        artifact = open_artifact(reference)
    except InputError as error:
        what = "that artifact cannot be used" if is_path else "that is no number, and no artifact"
        raise InputError(
            error.code,
            f"{OPTION} {reference}: {what}: {error.message}",
            error.next_step,
            error.tensor,
        ) from None
    if folds_recorded(artifact.record):
        detail = f"{OPTION} {reference}: it was made by --method {artifact.record.get('method')}, so its scales fit inputs that norms"
        next_step = "Give an artifact without folds, or the calibration file that it was made with."
        raise InputError(
            "input-scale-folded",
            f"{detail} had divided by factors of its own; expected plain ones",
            next_step,
        )
    return artifact


def scales_of(fed: Sequence[Fed], scales: InputScales) -> tuple[dict[str, float], list[str]]:
    """The input scale of every module, one for all members of a scale group, and what a person should know of them.

    Modules whose own scale stays are not in it.
    Raises  InputError for modules without one, and for one that is no positive number of a sensible size
    """
    found: dict[str, float] = {}
    missing: list[str] = []
    for one, value in zip(fed, _values(fed, scales), strict=True):
        if value is not None:
            found[one.module] = _checked(value, one, scales)
        elif not one.has_own:
            missing.append(one.module)
    if missing:
        detail = f"{scales.origin} has no input scale for {len(missing)} of {len(fed)} modules, the first {missing[0]!r}"
        next_step = f"Give an artifact or a calibration of this model with all of them, or one number for all: {OPTION} 1."
        raise InputError(
            "input-scale-missing", f"{detail}; expected one for each", next_step, missing[0]
        )
    return _shared(fed, found, scales)


def _values(fed: Sequence[Fed], scales: InputScales) -> Iterable[float | None]:
    """What it knows of each; asked side by side where every answer takes its time."""
    source = scales.artifact.source if isinstance(scales, Copied) else None
    if source is None or not source.is_streamed:
        return map(scales.find, fed)
    with ThreadPoolExecutor(REQUESTS) as pool, stopping(source):
        return list(pool.map(scales.find, fed))


def _checked(value: float, fed: Fed, scales: InputScales) -> float:
    if SMALLEST <= value <= 1 / SMALLEST and math.isfinite(value):
        return value
    found = f"{scales.origin}: the input scale of {fed.module} is {value:g} as a multiplier"
    detail = f"{found}; expected a number from {SMALLEST:g} to {1 / SMALLEST:g}"
    next_step = f"Give another artifact or calibration, or one number for all: {OPTION} 1."
    raise InputError("bad-input-scale", detail, next_step, fed.module)


def _shared(
    fed: Iterable[Fed], found: Mapping[str, float], scales: InputScales
) -> tuple[dict[str, float], list[str]]:
    """The same, but that members of a scale group have the largest of theirs: engines that fuse them use only one."""
    groups: dict[tuple[ScaleGroup, str], list[str]] = defaultdict(list)
    for one in fed:
        if one.group and one.module in found:
            groups[one.group, one.form.word].append(one.module)
    shared, uneven = dict(found), []
    for (group, _), modules in groups.items():
        largest = max(found[module] for module in modules)
        if any(found[module] != largest for module in modules):
            uneven.append(str(group))
        shared |= dict.fromkeys(modules, largest)
    if not uneven:
        return shared, []
    told = f"{len(uneven)} scale groups have members with different input scales in {scales.origin}, the first {uneven[0]}"
    return shared, [f"{told}; engines use one for all of them, so each gets the largest"]


def find_small(
    fed: Iterable[Fed], shared: Mapping[str, float], measured: Measured | None
) -> list[str]:
    """A warning where scales do not reach the largest inputs that a calibration saw."""
    if measured is None:
        return []
    cut = []
    for one in fed:
        reach = shared.get(one.module, math.inf) * range_of(one.form.format)
        if measured.calibration.has(one.module) and (
            amax := measured.calibration.amax(one.module)
        ) > reach * (1 + SLACK):
            cut.append((amax / reach, one.module, reach, amax))
    if not cut:
        return []
    _, module, reach, amax = max(cut)
    detail = f"input scales of {len(cut)} modules are smaller than {measured.origin} asks for: that of {module} reaches {reach:g}"
    return [
        f"{detail}, where an input of {amax:g} was seen; what is larger is cut off, which costs most quality"
    ]
