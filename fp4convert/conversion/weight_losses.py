"""Measure what weights lose in each format, where outputs were not.

The loss is sum |(W - V) x|^2 / sum |W x|^2 over the layer's inputs x: by their second moments where
there is a calibration, else for inputs of unit variance, where it is the noise-to-signal ratio of
the weights.  Weights are rounded to the nearest value by the rule that `quantize` follows, under
the global scale that they set, whichever method follows later.  What stays loses nothing.

Of a matrix SAMPLE_NBYTES are read, in strips of rows that lie evenly over it; of the experts of one
kind in a layer as many bytes together, of at most MOST_EXPERTS: so a model of any size is measured
in minutes.  Smaller matrices are read whole.

  OUT/.fp4convert/measured/<key>.json  {module: {format: loss}} of one shard; the key stands for all
                                       that the losses depend on
  OUT/.fp4convert/measured/claims/     which process measures which shard

Any number of processes measure together, and each finds the same: sums are made in one order, and
told with DIGITS digits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4convert.calibration.input_power import column_power, weighted
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.encodings.base import Linear, find_not_finite
from fp4convert.errors import InputError, NumericError
from fp4convert.execution.crew import read_again_if_damaged
from fp4convert.execution.leases import Leases, do_together
from fp4convert.execution.plan_file import STATE, refuse_links
from fp4convert.execution.settings import summarize
from fp4convert.makers.maker import Tools, UnsoundShardError
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import as_floats, not_finite
from fp4convert.numerics.formats import Format, format_named
from fp4convert.numerics.fp8_rounding import find_scales, round_to_fp8
from fp4convert.numerics.matrices import InMemory
from fp4convert.progress import Phases
from fp4convert.quality.losses import RowSample, sample_matrix
from fp4convert.recipes.recipe import Target
from fp4convert.storage.disk import replace_file
from fp4convert.storage.json_text import MISSHAPEN, read_text_file
from fp4convert.storage.source import ASKED_AT_ONCE, Source, stopping
from fp4convert.version import __version__

FOLDER = "measured"
DIGITS = 9  # of a loss
SAMPLE_NBYTES = 1 << 20  # of a matrix, or of all experts of one kind in a layer
STRIP_NBYTES = 1 << 14  # of rows that lie together, at least
MOST_EXPERTS = 16  # of one kind in a layer, that stand for all
Losses = dict[str, dict[str, float]]
"""{module: {format: loss}}"""


class Candidate(NamedTuple):
    """A linear layer that may take several formats.

    group    the members of its scale group, itself among them, in whichever shard
    formats  names of those in which it loses something that is to be measured
    amax     what sets the global scale of the group, where one is given
    share    one of how many matrices it is that are read as one
    """

    linear: Linear
    group: tuple[Linear, ...]
    formats: tuple[str, ...]
    amax: float | None = None
    share: int = 1

    @property
    def nbytes(self) -> int:
        """Count the bytes that are read of it."""
        return self.sample(self.linear).nbytes

    def sample(self, member: Linear) -> RowSample:
        """Choose the rows that stand for a member of the group."""
        return sample_matrix(member, SAMPLE_NBYTES // self.share, strip_nbytes=STRIP_NBYTES)


@dataclass(frozen=True, slots=True)
class Bench:
    """How the weights of one checkpoint are measured.

    granularity  what shares a scale of FP8: row or tensor
    output       the folder that results are kept in and read from; None: nothing is
    is_kept      False where nothing may be written there
    """

    source: Source
    target: Target
    backend: Backend
    calibration: Calibration | None = None
    granularity: str = "row"
    output: Path | None = None
    is_kept: bool = True
    workers: int = 0
    phases: Phases = field(default_factory=Phases)
    tell: Callable[[str], None] = lambda line: None


def measure(bench: Bench, candidates: Sequence[Candidate]) -> Losses:
    """Measure the losses of all candidates, shard by shard.

    Shards that were measured before, or elsewhere, are not read again.

    Raises  NumericError, after everything is looked at, where weights are NaN or Inf; SourceError
            where the source cannot be read
    """
    shards: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        shards[candidate.linear.home.file].append(candidate)
    left = {_key(bench, file, own): own for file, own in shards.items()}
    found: Losses = {}
    unsound: dict[str, NumericError] = {}
    bench.phases.begin("measure", sum(one.nbytes for one in candidates))
    with ExitStack() as entered:
        leases = None
        if bench.output and bench.is_kept:
            refuse_links(bench.output, FOLDER, f"{FOLDER}/claims")
            leases = entered.enter_context(Leases(bench.output / STATE / FOLDER / "claims"))

        def find_left() -> list[str]:
            for key, own in list(left.items()):
                if (saved := _read(bench, key, own)) is not None:
                    bench.phases.skip(sum(one.nbytes for one in own))
                    found.update(saved)
                    del left[key]
            return list(left)

        def tell_whom(keys: list[str]) -> None:
            bench.tell(f"waiting for {len(keys)} shards that other processes measure")

        def measure_free(keys: list[str]) -> bool:
            before = len(left)
            if leases:
                free = leases.take_undone(keys, lambda key: bool(_read(bench, key, left[key])))
            else:
                free = iter(keys)
            for key in free:
                own = left.pop(key)
                try:
                    losses = read_again_if_damaged(partial(_measure_shard, bench, own))
                    _keep(bench, key, losses)
                    found.update(losses)
                except UnsoundShardError as error:
                    unsound.update((str(bad.tensor), bad) for bad in error.errors)
                if leases:
                    leases.drop(key)
            return len(left) < before

        do_together(find_left, measure_free, tell_whom)
        if leases:
            leases.others()  # which removes what the dead have left
    if unsound:
        raise summarize(list(unsound.values()))
    return {candidate.linear.module: found[candidate.linear.module] for candidate in candidates}


@contextmanager
def removed_if_refused(output: Path) -> Iterator[None]:
    """Remove what is measured meanwhile where an InputError ends it.

    A refused run writes nothing.  What lay there before stays, and so does all that is measured
    where weights are bad: the same command without these finds it.
    """
    place = output / STATE / FOLDER
    before, made = set[Path](), list[Path]()
    with suppress(OSError):  # a place that cannot be has nothing, and is told when it is made
        before = set(place.glob("*.json"))
        folders = [place / "claims", place, output / STATE, output, *output.parents]
        made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except NumericError:
        raise
    except InputError:
        with suppress(OSError):  # others are at work here, too; or the disk is away
            for file in set(place.glob("*.json")) - before:
                file.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
        raise


def _key(bench: Bench, file: str, own: Sequence[Candidate]) -> str:
    """Hash all that the losses of a shard's linear layers depend on."""
    checkpoint, target = bench.source.checkpoint, bench.target
    read = {ref.file for one in own for linear in one.group for ref in linear.refs}
    stamps = [[name, checkpoint.stamps[name]] for name in sorted({file, *read})]
    layers = [
        [
            *(one.linear.module, one.linear.shape, repr(one.linear.coding), one.formats),
            *([member.module for member in one.group], one.amax, one.share),
        ]
        for one in own
    ]
    rules = [
        target.format,
        target.scale_rule,
        target.has_unit_scale,
        target.calibration,
        bench.granularity,
    ]
    origin = [checkpoint.repo, checkpoint.revision]
    text = json.dumps([__version__, origin, stamps, rules, layers])
    return hashlib.sha256(text.encode()).hexdigest()


def _read(bench: Bench, key: str, own: Sequence[Candidate]) -> Losses | None:
    """Read what was measured before; None where nothing was, or it is damaged."""
    if bench.output is None:
        return None
    path = bench.output / STATE / FOLDER / f"{key}.json"
    try:
        entry = json.loads(read_text_file(path))
        return {
            one.linear.module: {name: float(entry[one.linear.module][name]) for name in one.formats}
            for one in own
        }
    except (OSError, *MISSHAPEN):
        return None


def _keep(bench: Bench, key: str, losses: Losses) -> None:
    """Write the losses of a shard, for later runs and other processes."""
    if bench.output is None or not bench.is_kept:
        return
    text = json.dumps(losses, sort_keys=True)
    replace_file(bench.output / STATE / FOLDER / f"{key}.json", text.encode())


def _measure_shard(bench: Bench, own: Sequence[Candidate]) -> Losses:
    """Measure the losses of the linear layers of one shard, in threads.

    Raises  UnsoundShardError, after all are measured, where weights are NaN or Inf
    """
    source, file = bench.source, own[0].linear.home.file
    groups: dict[tuple[Linear, ...], list[Candidate]] = defaultdict(list)
    for candidate in own:
        groups[candidate.group].append(candidate)
    ordered = sorted(groups.values(), key=lambda group: min(c.linear.refs[0].start for c in group))
    losses: Losses = {}
    unsound: list[NumericError] = []
    threads = bench.workers or bench.backend.threads
    if source.is_streamed:
        threads = max(threads, ASKED_AT_ONCE)
    with ThreadPoolExecutor(threads) as pool, stopping(source):
        coming = [pool.submit(_measure_group, bench, group) for group in ordered]
        try:
            for future in coming:
                try:
                    losses |= future.result()
                except UnsoundShardError as error:
                    unsound += error.errors
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    source.check_unchanged(file)
    if unsound:
        raise UnsoundShardError(unsound)
    return losses


def _measure_group(bench: Bench, group: list[Candidate]) -> Losses:
    """Measure the members of one scale group that lie in one shard.

    Raises  UnsoundShardError where a member, in whichever shard, is not finite
    """
    try:
        losses = _losses_of(bench, group)
    except NumericError:
        bad = [find_not_finite(bench.source, linear) for linear in group[0].group]
        named = [error for error in bad if error]
        if not named:
            raise
        raise UnsoundShardError(named) from None
    for one in group:
        bench.phases.report(one.linear.name, one.nbytes)
    return losses


def _losses_of(bench: Bench, group: list[Candidate]) -> Losses:
    """Round members of a scale group in each format, weigh the errors."""
    calibration = bench.calibration
    sample = group[0].sample
    read = {one.module: InMemory(sample(one).read(bench.source)) for one in group[0].group}
    moments = {
        one.linear.module: calibration.moments(one.linear.module) if calibration else None
        for one in group
    }
    powers = {
        module: weighted(column_power(as_floats(read[module].matrix)), own)
        for module, own in moments.items()
    }
    if not all(map(math.isfinite, powers.values())):
        raise not_finite()
    losses: Losses = {module: {} for module in moments}
    for name in dict.fromkeys(name for one in group for name in one.formats):
        modules = [one.linear.module for one in group if name in one.formats]
        fmt = format_named(name)
        if fmt.is_fp4:
            noises = _noises_of_fp4(bench, read, modules, fmt, group[0].amax)
        else:
            noises = [_noise_of_fp8(bench, read[module], fmt) for module in modules]
        for module, noise in zip(modules, noises, strict=True):
            power = powers[module]
            loss = weighted(noise, moments[module]) / power if power else 0.0
            losses[module][name] = float(f"{loss:.{DIGITS}g}")
    return losses


def _noises_of_fp4(
    bench: Bench,
    read: Mapping[str, InMemory],
    modules: Sequence[str],
    fmt: Format,
    amax: float | None,
) -> list[NDArray[np.float64]]:
    """Sum the squared errors of columns, for members of a scale group.

    read  every member of the group; all set the global scale, where no amax is given
    """
    members = [read[module] for module in modules]
    noises = [np.zeros(one.shape[1]) for one in members]
    whole = list(read.values()) if amax is None else []
    current = first = 0
    tools, group = (
        Tools(bench.source, bench.backend, bench.calibration),
        Group(whole, members, modules, fmt),
    )
    method = method_for(bench.target, fmt)
    under = method.under(group, tools, Given(amax))
    for number, q in method.panels(group, tools, under):
        first = first if number == current else 0
        x = as_floats(members[number].rows(first, first + q.shape[0]))
        noises[number] += column_power(x - Cpu().values(q))
        current, first = number, first + q.shape[0]
    return noises


def _noise_of_fp8(bench: Bench, weights: InMemory, fmt: Format) -> NDArray[np.float64]:
    """Sum the squared errors of columns, for MXFP8 or FP8."""
    rows, columns = weights.shape
    is_whole = bench.granularity == "tensor" and not fmt.block_size
    block = (rows if is_whole else 1, fmt.block_size or columns)
    scales = find_scales(weights, block, fmt, bench.target.rule_for(fmt))
    parts = round_to_fp8(weights, scales, block)
    noise: NDArray[np.float64] = sum(
        (column_power(as_floats(part.x) - part.values) for part in parts), np.zeros(columns)
    )
    return noise
