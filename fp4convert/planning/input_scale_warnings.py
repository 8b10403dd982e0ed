"""Warn of input scales that nothing measured, or that do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fp4convert.numerics.formats import E2M1_MAX, E4M3_MAX, E4M3_MIN, E4M3_NORMAL
from fp4convert.planning.activation_scales import (
    OPTION,
    Fed,
    InputScales,
    floor_of,
    range_of,
    typical_seen,
)
from fp4convert.progress import are_text, count_text

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration

SLACK = 1e-6  # of a float32 beside the float64 that it was rounded from
MEASURE = (
    "measure them: fp4convert calibrate SOURCE -o FILE --self-generate 16 (or --text TEXT), then"
    f" add --calibration FILE, and no {OPTION}"
)


def judge_scales(
    fed: Sequence[Fed], shared: Mapping[str, float], scales: InputScales, seen: Calibration | None
) -> list[str]:
    """Warn of scales that nothing measured, and of unsuitable ones.

    scales  the origin of the shared ones
    seen    statistics of the inputs of modules
    """
    warnings = list(_warn_unmeasured(fed, shared, scales, seen))
    if seen:
        warnings += [*_find_small(fed, shared, seen), *_find_large(fed, shared, seen)]
    return warnings


def describe_unit(is_fp4: bool) -> str:
    """Describe the inputs for which a scale of 1 is right, and the others."""
    inputs, step = ("blocks whose largest input is", E2M1_MAX) if is_fp4 else ("inputs", 1.0)
    return (
        f"right for {inputs} from {step * E4M3_NORMAL:.2g} to {step * E4M3_MAX:g}: smaller ones"
        f" lose bits, below {step * E4M3_MIN / 2:.2g} they become 0, and larger ones are clipped"
    )


def _warn_unmeasured(
    fed: Iterable[Fed], shared: Mapping[str, float], scales: InputScales, seen: Calibration | None
) -> Iterator[str]:
    """Warn of scales of 1 of modules without statistics, and without a bound."""
    why = f"as in {scales.origin}"
    if scales.is_constant or scales.is_auto:
        why = "which no calibration or file gives"
    assumed: dict[bool, list[str]] = {True: [], False: []}
    for one in fed:
        is_measured = (seen and seen.has(one.module, "input_amax")) or (
            scales.is_auto and scales.find(one)
        )
        if shared.get(one.module) == 1.0 and not is_measured:
            assumed[one.form.format.is_fp4].append(one.module)
    for is_fp4, modules in assumed.items():
        if modules:
            yield warn_of_unit(modules, is_fp4, why)


def warn_of_unit(modules: Sequence[str], is_fp4: bool, why: str) -> str:
    """Return the warning for modules whose input scale is 1.

    why  the origin of the 1, as the end of a clause
    """
    return (
        f"the input scale of {count_text(len(modules), 'module')} in"
        f" {'four' if is_fp4 else 'eight'} bits, the first {modules[0]}, is 1, {why};"
        f" {describe_unit(is_fp4)}. It can ruin the model, and neither inspect nor verify sees"
        f" that: {MEASURE}"
    )


def _find_small(fed: Iterable[Fed], shared: Mapping[str, float], seen: Calibration) -> list[str]:
    """Warn of scales that clip the largest inputs seen."""
    cut = []
    for one in fed:
        reach = shared.get(one.module, math.inf) * range_of(one.form.format)
        if seen.has(one.module, "input_amax") and (amax := seen.amax(one.module)) > reach * (
            1 + SLACK
        ):
            cut.append((amax / reach, one.module, reach, amax))
    if not cut:
        return []
    _, module, reach, amax = max(cut)
    detail = (
        f"input scales of {are_text(len(cut), 'module')} smaller than {seen.path} asks for: that of"
        f" {module} reaches {reach:g}"
    )
    detail += f", where an input of {amax:g} was seen"
    return [f"{detail}; larger inputs are clipped, which costs the most quality"]


def _find_large(fed: Iterable[Fed], shared: Mapping[str, float], seen: Calibration) -> list[str]:
    """Warn of scales under which typical inputs lose bits."""
    lost = []
    for one in fed:
        chosen, fmt = shared.get(one.module), one.form.format
        if chosen is None or not seen.has(one.module, "input_amax"):
            continue
        if chosen <= seen.amax(one.module) / range_of(fmt) * (1 + SLACK):
            continue
        floor, typical = chosen * floor_of(fmt), typical_seen(seen, one)
        if typical < floor:
            lost.append((typical / floor, one.module, floor, typical))
    if not lost:
        return []
    _, module, floor, typical = min(lost)
    detail = (
        f"input scales of {are_text(len(lost), 'module')} larger than {seen.path} asks for: that of"
        f" {module} rounds blocks well whose largest input is {floor:.3g} or more, where a typical"
        f" one has {typical:.3g}"
    )
    detail += "; smaller ones lose bits or become 0, which can ruin the model"
    return [f"{detail}; leave {OPTION} out: the calibration gives each module its own"]
