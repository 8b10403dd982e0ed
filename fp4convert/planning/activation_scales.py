"""Choose the static scale of each module's activations.

Engines divide activations by such a scale before they round them. What is larger than its range is
cut off, which costs most of a model's quality. A scale that is larger than it must be costs nothing
as long as the block scales stay normal numbers of E4M3: a scale of 1 is right for blocks of NVFP4
whose largest input is from 0.094 to 2688. Smaller blocks lose bits, and below 0.0059 they become 0:
a model whose inputs are 2^-9 as large has a KL divergence of 3.77 nats with 1. So a scale reaches
beyond the inputs that were seen, or to a bound of them (input_bounds.py), as far as typical blocks
allow; and nothing writes 1 without a warning. A scale here is a multiplier: 1 reaches 2688 in NVFP4
and 448 in FP8; dialects spell it as their engines want it.
Everything is read when a plan is made: scalars of an artifact or a calibration file, norms and some
rows of the source.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.errors import InputError
from fp4convert.numerics.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NORMAL,
    GLOBAL_RANGE,
    Format,
)
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import ScaleGroup
from fp4convert.recipes.rules import FoldRule
from fp4convert.storage.source import Source, read_each, refusing

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.linears import Linears
    from fp4convert.planning.input_bounds import Float64s, Outputs

PERCENTILE = re.compile(r"p\d+(\.\d+)?")
SMALLEST = 2.0**-100  # it and its inverse are far inside float32
HEADROOM = 8.0  # of a scale above the largest input seen
ROOM = 8.0  # between a typical block and the least one that is rounded well
OPTION = "--input-scale"


class Fed(NamedTuple):
    """A module whose inputs engines round by a scale beside its weights.

    form     in the result
    has_own  the source has such a scale, which stays unless another is given
    """

    module: str
    shape: tuple[int, int]
    form: Form
    group: ScaleGroup | None
    has_own: bool


class InputScales(NamedTuple):
    """The origin of the input scales of modules.

    origin       its name for people
    find         returns the multiplier of a module, or None
    source       of the scalars that `find` reads; None for those of the weights' source
    is_constant  all NVFP4 modules have the same
    is_auto      nobody chose the origin: a module that `find` knows nothing of gets 1
    """

    origin: str
    find: Callable[[Fed], float | None]
    source: Source | None = None
    is_constant: bool = False
    is_auto: bool = False


def _find_constant(number: float, fed: Fed) -> float | None:
    """Give one scale to all NVFP4 modules; FP8 ones keep their own, or have 1."""
    if fed.form.format.is_fp4:
        return number
    return None if fed.has_own else 1.0


def bounded_scales(source: Source, folds: Sequence[FoldRule], linears: Linears) -> InputScales:
    """Bound inputs by norms and weights; 1 where these do not tell.

    They are read when the first scale is asked for.

    folds  rules of the recipe, which say what reads what
    """

    @cache
    def read_bounds() -> Mapping[str, Sequence[Outputs]]:
        from fp4convert.planning.input_bounds import bound_inputs

        return bound_inputs(source, folds, linears)

    def find(fed: Fed) -> float | None:
        outputs = read_bounds().get(fed.module)
        if fed.has_own or not outputs:
            return None
        fmt = fed.form.format
        typical = min(typical_amax(squares, fmt) for _, squares in outputs)
        found = _fit(max(bound for bound, _ in outputs), typical, fmt)
        return found if SMALLEST <= found <= 1 / SMALLEST else None

    return InputScales("norms and weights", find, is_auto=True)


# Of a plan without a source.
UNIT_SCALE = InputScales("", lambda fed: None, is_auto=True)


def copied_scales(artifact: Artifact, origin: str) -> InputScales:
    """Copy the scales of another artifact of the same model, in any dialect."""

    @cache  # a plan may be made several times
    def read(module: str) -> float | None:
        if module in artifact.modules:
            return artifact.input_scale(module)
        # Of eight bits, whose scale is a tensor of its own.
        table = artifact.spelling.TRAITS.fp8
        name = f"{module}{table.input_scale}" if table and table.input_scale else ""
        ref = artifact.tensors.get(name)
        if ref is None or ref.dtype != "F32" or ref.elements != 1:
            return None
        data = artifact.source.read_range(ref, 0, ref.nbytes)
        return float(struct.unpack("<f", data)[0])

    def find(fed: Fed) -> float | None:
        module = fed.module
        packed = artifact.modules.get(module) or artifact.others.get(module)
        if packed is None:
            return None
        if packed.shape != fed.shape:
            detail = f"{origin}: {module} is {list(packed.shape)} there and {list(fed.shape)} here"
            raise InputError(
                "input-scale-model", detail, "Give an artifact of the same model.", module
            )
        stored = read(module)
        return stored and stored * (range_of(packed.form.format) / range_of(fed.form.format))

    return InputScales(origin, find, artifact.source)


def measured_scales(calibration: Calibration, share: float | None = None) -> InputScales:
    """Reach beyond the largest inputs that a calibration saw.

    share  percent of tokens, one of TOKEN_SHARES: reach to their largest inputs, and cut off what
           is larger
    """
    from fp4convert.calibration.statistics import check_inputs

    def find(fed: Fed) -> float | None:
        if not calibration.has(fed.module):
            return None
        check_inputs(calibration, fed.module)
        seen, fmt = calibration, fed.form.format
        amax = seen.amax(fed.module) if share is None else seen.token_amax(fed.module, share)
        if amax == 0:
            detail = (
                f"{calibration.path}: {fed.module} received only zeros, or no token;"
                " a scale needs a largest input"
            )
            next_step = (
                f"Calibrate with more text, give one scale for all ({OPTION} 1), or leave it out:"
                f" {exclude_option(fed.module)}"
            )
            raise InputError("input-scale-zero", detail, next_step, fed.module)
        if share is not None:
            return amax / range_of(fmt)
        return scale_beyond(amax, typical_seen(seen, fed), fmt)

    origin = str(calibration.path)
    return InputScales(origin if share is None else f"{origin}, p{share:g}", find)


def _share_in(asked: str, calibration: Calibration | None) -> float | None:
    """Return the percentage that p99.9 names; None for a path or a name."""
    from fp4convert.calibration.statistics import TOKEN_SHARES

    if not PERCENTILE.fullmatch(asked) or os.path.exists(asked):
        return None
    known = {f"p{share:g}": share for share in TOKEN_SHARES}
    if asked not in known:
        detail = f"{OPTION} {asked}; expected one of {', '.join(known)}"
        raise InputError("bad-input-scale", detail, f"Give {OPTION} p99.9.")
    if calibration is None:
        detail = f"{OPTION} {asked} is of the inputs that a calibration saw, and none is given"
        step = (
            "First fp4convert calibrate SOURCE -o FILE and the text; then add --calibration FILE."
        )
        raise InputError("bad-input-scale", detail, step)
    return known[asked]


def scale_beyond(amax: float, typical: float, fmt: Format) -> float:
    """Return the scale that reaches beyond the largest input seen."""
    return max(amax / range_of(fmt), _fit(amax * HEADROOM, typical, fmt))


def _fit(reach: float, typical: float, fmt: Format) -> float:
    """Return the scale that reaches so far, or less for typical blocks.

    typical  amax of a block; 0 says nothing
    """
    most = typical / (floor_of(fmt) * ROOM) if typical else math.inf
    return min(reach / range_of(fmt), most)


def range_of(fmt: Format) -> float:
    """Return the largest input under a scale of 1."""
    return GLOBAL_RANGE if fmt.is_fp4 else E4M3_MAX


def floor_of(fmt: Format) -> float:
    """Return the least amax of a block that a scale of 1 rounds well.

    Below it the block scale (of FP8 the input itself) is a subnormal E4M3 with fewer bits.
    """
    return E4M3_NORMAL * (E2M1_MAX if fmt.is_fp4 else 1.0)


def choose_scales(
    source: Source,
    form: Form,
    asked: str | float,
    adapter: str | None = None,
    calibration: Calibration | None = None,
) -> InputScales:
    """Open the origin of input scales that --input-scale names.

    source  of the weights
    form    of most modules
    asked   a number, an artifact's folder, file or repository, a calibration file, or p and a
            percentage of tokens
    adapter the key of the adapter that is merged into the source
    calibration  of percentages
    Raises  InputError where these do not go together, nothing of that name can be opened, or it is
            of another model
    """
    if not form.has_input_scale:
        found = f"{form.format.name} with {form.activations}-bit activations"
        detail = f"{OPTION} is not for {found}; it is for nvfp4 with --activations 4"
        raise InputError("bad-input-scale", detail, "Leave it out.")
    number = _number_in(asked)
    if (share := _share_in(str(asked), calibration)) is not None and calibration:
        return measured_scales(calibration, share)
    if number is None:
        from fp4convert.calibration.calibration_file import is_calibration, open_calibration

        if not is_calibration(str(asked)):  # a folder or a name on the Hub
            return copied_scales(_open(str(asked), source), f"{OPTION} {asked}")
        from fp4convert.calibration.fingerprint import check_source

        calibration = open_calibration(str(asked))
        check_source(calibration, source, adapter=adapter)
        return measured_scales(calibration)
    if not SMALLEST <= number <= 1 / SMALLEST:
        span = f"{SMALLEST:g} to {1 / SMALLEST:g}"
        detail = f"{OPTION} {number:g}; expected a number from {span}, or a file or folder"
        next_step = f"Take them from what has them: {OPTION} ARTIFACT, or a calibration file."
        raise InputError("bad-input-scale", detail, next_step)
    return InputScales(f"{OPTION} {number:g}", partial(_find_constant, number), is_constant=True)


def _number_in(asked: str | float) -> float | None:
    try:
        return float(asked)
    except ValueError:
        return None


def whole_reference(asked: str | float | None) -> str | float | None:
    """Make a path absolute; leave numbers and names as they are."""
    is_path = asked is not None and _number_in(asked) is None and os.path.exists(str(asked))
    return os.path.abspath(str(asked)) if is_path else asked


def _open(reference: str, source: Source) -> Artifact:
    """Open an artifact with input scales.

    source  of the weights; folds of an artifact are refused unless it is this source
    """
    is_path = os.path.exists(reference)
    try:
        artifact = open_artifact(reference)
    except InputError as error:
        why = "the artifact cannot be used"
        if not is_path:
            why = "it is neither a number nor an artifact"
        detail = f"{OPTION} {reference}: {why}: {error.message}"
        raise InputError(error.code, detail, error.next_step, error.tensor) from None
    is_source = artifact.source.checkpoint.stamps == source.checkpoint.stamps
    if folds_recorded(artifact.record) and not is_source:
        detail = f"{OPTION} {reference}: it holds factors of folds (AWQ), and its scales are"
        detail = f"{detail} for inputs that its norms divide by them; expected scales without folds"
        next_step = "Give an artifact without folds, or the calibration file that it was made with."
        raise InputError("input-scale-folded", detail, next_step)
    return artifact


def scales_of(fed: Sequence[Fed], scales: InputScales) -> tuple[dict[str, float], list[str]]:
    """Return the input scale of every module, and notes for people.

    Members of a scale group get one scale; modules whose own scale stays are left out.

    Raises  InputError for modules without a scale, and for a scale out of range
    """
    found: dict[str, float] = {}
    missing: list[str] = []
    source, find = scales.source, scales.find
    values = read_each(source, find, fed) if source else map(find, fed)
    for one, known in zip(fed, values, strict=True):
        value = 1.0 if known is None and scales.is_auto and not one.has_own else known
        if value is None:
            missing += [] if one.has_own else [one.module]
            continue
        found[one.module] = value
        if not SMALLEST <= value <= 1 / SMALLEST:
            detail = (
                f"{scales.origin}: the input scale of {one.module} is {value:g} as a multiplier;"
                f" expected a number from {SMALLEST:g} to {1 / SMALLEST:g}"
            )
            next_step = f"Give another artifact or calibration, or one number for all: {OPTION} 1."
            with refusing(source):
                raise InputError("bad-input-scale", detail, next_step, one.module)
    if missing:
        detail = (
            f"{scales.origin} has no input scale for {len(missing)} of {len(fed)} modules, the"
            f" first {missing[0]!r}; expected one for each"
        )
        next_step = (
            "Give an artifact or a calibration of this model with all of them, or one number for"
            f" all: {OPTION} 1."
        )
        raise InputError("input-scale-missing", detail, next_step, missing[0])
    return _share_scales(fed, found, scales)


def _share_scales(
    fed: Iterable[Fed], found: Mapping[str, float], scales: InputScales
) -> tuple[dict[str, float], list[str]]:
    """Give members of a scale group the largest of their scales."""
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
    detail = (
        f"{len(uneven)} scale groups have members with different input scales in {scales.origin},"
        f" the first {uneven[0]}"
    )
    return shared, [f"{detail}; engines use one for all of them, so each gets the largest"]


def typical_seen(seen: Calibration, fed: Fed) -> float:
    """Return the amax of a module's median block as a calibration saw it."""
    has_squares = seen.has(fed.module, "input_sq_mean")
    squares = seen.moments(fed.module) if has_squares else seen.channel_amax(fed.module) ** 2
    return typical_amax(squares.astype(np.float64), fed.form.format, has_squares)


def typical_amax(squares: Float64s, fmt: Format, is_mean: bool = True) -> float:
    """Estimate the largest input of a median block, over tokens.

    Its root mean square lies between that of the block's largest column and the root of the sum of
    all columns' mean squares; the geometric mean of both is exact where one column dominates, and
    6 % too small for 16 equal columns of normal inputs.

    squares  x^2 of each column: the mean, or without it the largest
    """
    size = fmt.block_size if fmt.is_fp4 else 1
    blocks = np.pad(squares, (0, -len(squares) % size)).reshape(-1, size)
    largest = blocks.max(axis=1)
    sums = blocks.sum(axis=1) if is_mean else largest
    return float(np.median(np.sqrt(np.sqrt(largest * sums))))
