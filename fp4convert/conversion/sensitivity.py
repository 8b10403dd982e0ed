"""Measure what every linear layer loses in each format.

The loss is sum |(W - V) x|^2 / sum |W x|^2 over the layer's inputs x: by their second moments where there is a calibration, else
for inputs of unit variance, where it is the noise-to-signal ratio of the weights.  Weights are rounded to the nearest value by
the rule that `quantize` follows, under the global scale that it sets, whichever method follows later.  What stays loses nothing.

  OUT/.fp4convert/measured/<key>.json  {module: {format: loss}} of one shard; the key stands for all that the losses depend on
  OUT/.fp4convert/measured/claims/     which process measures which shard

Any number of processes measure together, and each finds the same: sums are made in one order, and told with DIGITS digits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.input_power import column_power, weighted
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.encodings.base import Linear, room_for
from fp4convert.checkpoint.encodings.floats import measured_whole
from fp4convert.errors import CORRUPT, NumericError, SourceError
from fp4convert.execution.leases import Claims
from fp4convert.execution.plan_file import STATE, refuse_links
from fp4convert.execution.repacker import find_not_finite
from fp4convert.execution.rounding import Rounding
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, not_finite
from fp4convert.numerics.formats import FP8, format_named
from fp4convert.numerics.fp8_int import Grid, fp8_scales_of
from fp4convert.numerics.matrices import Matrix, Weights, row_panels
from fp4convert.progress import Phases
from fp4convert.storage.disk import told
from fp4convert.storage.source import Source, stopping

FOLDER = "measured"
DIGITS = 9  # of a loss
FIRST_SECONDS, LONGEST_SECONDS = 0.1, 3.0  # between looks at what others measure
MEASURED_ELEMENTS = 1 << 20  # at once
Losses = dict[str, dict[str, float]]
"""{module: {format: loss}}"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A linear layer that may take several formats.

    group    the members of its scale group, itself among them, in whichever shard
    formats  names of those in which it loses something that is to be measured
    """

    linear: Linear
    group: tuple[Linear, ...]
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """How the weights of one checkpoint are measured.

    granularity  what shares a scale of FP8: row or tensor
    output       the folder that the results are kept in and read from; nothing is read or kept where it is None
    is_kept      False where nothing may be written there
    """

    source: Source
    rounding: Rounding
    calibration: Calibration | None = None
    granularity: str = "row"
    output: Path | None = None
    is_kept: bool = True
    workers: int = 0
    phases: Phases = field(default_factory=Phases)

    @property
    def threads(self) -> int:
        return self.workers or self.rounding.backend.threads


def measure(bench: Bench, candidates: Sequence[Candidate]) -> Losses:
    """The losses of all of them, shard by shard; shards that were measured before, or elsewhere, are not read again.

    Raises  NumericError, after everything is looked at, where weights are NaN or Inf; SourceError where the source cannot be read
    """
    shards: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        shards[candidate.linear.home.file].append(candidate)
    left = {_key(bench, file, own): (file, own) for file, own in shards.items()}
    nbytes = {
        key: sum(candidate.linear.nbytes for candidate in own) for key, (_, own) in left.items()
    }
    bench.phases.begin("measure", sum(nbytes.values()))
    pass_ = _Pass(bench)
    found: Losses = {}
    seconds = FIRST_SECONDS
    with ExitStack() as entered:
        claims = None
        if bench.output and bench.is_kept:
            refuse_links(bench.output, FOLDER, f"{FOLDER}/claims")
            claims = entered.enter_context(Claims(bench.output / STATE / FOLDER / "claims"))
        while left:
            before = len(left)
            for key, (file, own) in list(left.items()):
                if (saved := _read(bench, key, own)) is not None:
                    bench.phases.skip(nbytes[key])
                    found |= saved
                    del left[key]
                elif claims is None or claims.take(key):
                    found |= pass_.shard(file, own, key)
                    del left[key]
                    if claims:
                        claims.drop(key)
            if len(left) == before:
                time.sleep(seconds)
                seconds = min(1.5 * seconds, LONGEST_SECONDS)
    if pass_.unsound:
        raise _summarized(list(pass_.unsound.values()))
    return {candidate.linear.module: found[candidate.linear.module] for candidate in candidates}


def _key(bench: Bench, file: str, own: Sequence[Candidate]) -> str:
    """What the losses of a shard's linear layers depend on."""
    stamps, target = bench.source.checkpoint.stamps, bench.rounding.target
    files = sorted(
        {
            file,
            *(ref.file for candidate in own for linear in candidate.group for ref in linear.refs),
        }
    )
    told = [
        [one.linear.module, one.linear.shape, repr(one.linear.coding), one.formats, len(one.group)]
        for one in own
    ]
    rules = [
        target.format,
        target.scale_rule,
        target.has_unit_scale,
        target.calibration,
        bench.granularity,
    ]
    origin = [bench.source.checkpoint.repo, bench.source.checkpoint.revision]
    return hashlib.sha256(
        json.dumps(
            [version("fp4convert"), origin, [[f, stamps[f]] for f in files], rules, told]
        ).encode()
    ).hexdigest()


def _read(bench: Bench, key: str, own: Sequence[Candidate]) -> Losses | None:
    """What was measured before; None where nothing was, or where it is damaged: it is measured again."""
    if bench.output is None:
        return None
    try:
        entry = json.loads(
            (bench.output / STATE / FOLDER / f"{key}.json").read_text(encoding="utf-8")
        )
        return {
            one.linear.module: {name: float(entry[one.linear.module][name]) for name in one.formats}
            for one in own
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class _Pass:
    """Measures one shard after the other.

    unsound  the error of every tensor that holds NaN or Inf, by its name
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.unsound: dict[str, NumericError] = {}

    def shard(self, file: str, own: Sequence[Candidate], key: str) -> Losses:
        """The losses of its linear layers, kept; what arrives damaged is fetched once more."""
        try:
            found = self._once(file, own)
        except SourceError as error:
            if error.code != CORRUPT:
                raise
            found = self._once(file, own)
        if found.keys() == {candidate.linear.module for candidate in own}:
            _keep(self._bench, key, found)
        return found

    def _once(self, file: str, own: Sequence[Candidate]) -> Losses:
        source, found = self._bench.source, Losses()
        groups: dict[tuple[Linear, ...], list[Candidate]] = defaultdict(list)
        for candidate in own:
            groups[candidate.group].append(candidate)
        ordered = sorted(
            groups.values(), key=lambda group: min(one.linear.refs[0].start for one in group)
        )
        with source.stream(file), ThreadPoolExecutor(self._bench.threads) as pool, stopping(source):
            coming = [pool.submit(self._group, group) for group in ordered]
            try:
                for future in coming:
                    found |= future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        source.check_unchanged(file)
        return found

    def _group(self, group: list[Candidate]) -> Losses:
        """The losses of members of one scale group; none where one of it is not finite."""
        try:
            found = _losses_of(self._bench, group)
        except NumericError:
            named = [
                bad
                for linear in group[0].group
                if (bad := find_not_finite(self._bench.source, linear))
            ]
            if not named:
                raise
            self.unsound |= {str(bad.tensor): bad for bad in named}
            return {}
        for candidate in group:
            self._bench.phases.report(candidate.linear.name, candidate.linear.nbytes)
        return found


def _summarized(errors: list[NumericError]) -> NumericError:
    """One error for all tensors that are not finite, with the options that leave them out."""
    options = " ".join(error.next_step for error in errors)
    lines = tuple(error.message for error in errors)
    return NumericError(
        errors[0].code, lines, f"Run the same command again with {options}", errors[0].tensor
    )


def _keep(bench: Bench, key: str, found: Losses) -> None:
    if bench.output is None or not bench.is_kept:
        return
    final = bench.output / STATE / FOLDER / f"{key}.json"
    temp = final.with_name(f".{key}-{os.getpid()}.new")
    with told(final):
        temp.write_text(json.dumps(found, sort_keys=True), encoding="utf-8")
        os.replace(temp, final)


@dataclass(slots=True)
class _Sums:
    """The power of the columns of a matrix, and of its error in each format."""

    signal: NDArray[np.float64]
    noise: dict[str, NDArray[np.float64]]

    @classmethod
    def of(cls, candidate: Candidate) -> _Sums:
        columns = candidate.linear.shape[1]
        return cls(np.zeros(columns), {name: np.zeros(columns) for name in candidate.formats})


def _losses_of(bench: Bench, group: list[Candidate]) -> Losses:
    source = bench.source
    weights = [one.linear.coding.weights(one.linear, source) for one in group]
    sums = [_Sums.of(one) for one in group]
    fp4 = next((name for one in group for name in one.formats if name != FP8.name), None)
    with room_for(source, group[0].group):
        if fp4:
            _add_blocks(bench, group, weights, sums)
        for one, matrix, own in zip(group, weights, sums, strict=True):
            if FP8.name in one.formats:
                _add_fp8(bench, matrix, own, has_signal=fp4 is not None)
    moments = [
        bench.calibration.moments(one.linear.module) if bench.calibration else None for one in group
    ]
    return {
        one.linear.module: {
            name: _loss(weighted(noise, m), weighted(own.signal, m))
            for name, noise in own.noise.items()
        }
        for one, own, m in zip(group, sums, moments, strict=True)
    }


def _loss(noise: float, signal: float) -> float:
    if not math.isfinite(signal):
        raise not_finite()
    return float(f"{noise / signal:.{DIGITS}g}") if signal else 0.0


def _add_blocks(
    bench: Bench, group: list[Candidate], weights: list[Weights], sums: list[_Sums]
) -> None:
    """The error of blocks of four bits, panel by panel, under the amax of the whole scale group."""
    name = bench.rounding.target.format
    whole = list(measured_whole(group[0].group, bench.source))
    modules = [one.linear.module for one in group]
    for number, panels in groupby(
        bench.rounding.panels(whole, weights, modules, format_named(name)), key=itemgetter(0)
    ):
        first = 0
        for _, q in panels:
            x = as_floats(weights[number].rows(first, first + q.shape[0]))
            sums[number].signal += column_power(x)
            sums[number].noise[name] += column_power(x - Cpu().values(q))
            first += q.shape[0]


def _add_fp8(bench: Bench, weights: Weights, sums: _Sums, has_signal: bool) -> None:
    """The error of FP8 with a scale for each row, or for the whole."""
    panels = list(row_panels(weights.shape, MEASURED_ELEMENTS))
    amax = np.concatenate([Cpu().row_amax(weights.rows(*panel)) for panel in panels])
    if bench.granularity == "tensor":
        amax = np.broadcast_to(amax.max(initial=0), amax.shape)
    scales = fp8_scales_of(amax).reshape(-1, 1)
    for first, last in panels:
        stored = weights.rows(first, last)
        x = as_floats(stored)
        v = _rounded_to_fp8(stored, scales[first:last])
        sums.noise[FP8.name] += column_power(x - v)
        if not has_signal:
            sums.signal += column_power(x)


def _rounded_to_fp8(stored: Matrix, scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values of FP8 codes of these rows under these scales, one for each."""
    codes = Cpu().quantize_fp8(stored, scales)
    return Cpu().decode_fp8(
        codes.reshape(-1).data, stored.shape, Grid(scales, (1, stored.shape[1]), 0)
    )
