"""Measure what the weights of a checkpoint lose, for a target size.

The loss is `output` of quality/losses.py, by the second moments of a calibration, or for inputs of
unit variance.  Weights are rounded to the nearest value by the rule of `quantize`, under the global
scale of their group, whichever method follows later.

SAMPLE_NBYTES of a matrix are read, in strips of rows that lie evenly over it.  The experts of one
kind in a layer share these bytes, and at most MOST_EXPERTS of them are read.  So a model of any
size is measured in minutes.

  OUT/.fp4convert/measured/<key>.json  {module: {format: loss}} of one shard; the key is a hash of
                                       everything that the losses depend on
  OUT/.fp4convert/measured/claims/     which process measures which shard

Several processes share the shards, and the losses do not depend on who measures: sums are made in
one order, and rounded to DIGITS digits.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp4convert.calibration.input_power import Inputs
from fp4convert.calibration.statistics import Calibration
from fp4convert.checkpoint.encodings.base import Linear, find_not_finite
from fp4convert.errors import InputError, NumericError
from fp4convert.execution.leases import Leases, do_together
from fp4convert.execution.plan_file import STATE, refuse_links
from fp4convert.execution.settings import Settings, summarize
from fp4convert.makers.maker import Tools, UnsoundShardError
from fp4convert.makers.methods.choice import method_for
from fp4convert.makers.methods.method import Group
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.codec import Float32s, as_floats
from fp4convert.numerics.formats import Format, format_named
from fp4convert.numerics.matrices import InMemory
from fp4convert.quality.losses import TENSOR, RowSample, Weighed, sample_matrix, through_fp8
from fp4convert.recipes.recipe import Target
from fp4convert.storage.disk import replace_file
from fp4convert.storage.json_text import MISSHAPEN, read_text_file
from fp4convert.storage.source import Source, read_again_if_damaged, read_each
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

    group    the members of its scale group, itself among them, in any shard
    formats  names of the formats to measure
    amax     sets the global scale of the group; None where the weights do
    share    number of experts that share the bytes of a sample
    """

    linear: Linear
    group: tuple[Linear, ...]
    formats: tuple[str, ...]
    amax: float | None = None
    share: int = 1

    @property
    def nbytes(self) -> int:
        """Count the bytes of its sample."""
        return self.sample(self.linear).nbytes

    def sample(self, member: Linear) -> RowSample:
        """Choose the rows to read of a member of the group."""
        return sample_matrix(member, SAMPLE_NBYTES // self.share, strip_nbytes=STRIP_NBYTES)


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings for measuring the weights of one checkpoint.

    granularity  row or tensor: the elements that share a scale of FP8
    output       folder with results of earlier runs
    is_kept      results are written there, too
    """

    source: Source
    target: Target
    backend: Backend
    calibration: Calibration | None
    granularity: str
    output: Path
    is_kept: bool
    settings: Settings


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
    bench.settings.phases.begin("measure", sum(one.nbytes for one in candidates))
    with ExitStack() as entered:
        leases = None
        if bench.is_kept:
            refuse_links(bench.output, FOLDER, f"{FOLDER}/claims")
            leases = entered.enter_context(Leases(bench.output / STATE / FOLDER / "claims"))

        def find_left() -> list[str]:
            for key, own in list(left.items()):
                if (saved := _read(bench, key, own)) is not None:
                    bench.settings.phases.skip(sum(one.nbytes for one in own))
                    found.update(saved)
                    del left[key]
            return list(left)

        def tell_whom(keys: list[str]) -> None:
            bench.settings.tell(f"waiting for {len(keys)} shards that other processes measure")

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
    """Remove the measurements of this run where an InputError ends it.

    A refused run writes nothing.  Earlier files stay, and so do all where weights are bad: the same
    command without these weights reads them.
    """
    place = output / STATE / FOLDER
    before, made = set[Path](), list[Path]()
    with suppress(OSError):  # a place that cannot exist is refused when it is made
        before = set(place.glob("*.json"))
        folders = [place / "claims", place, output / STATE, output, *output.parents]
        made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except NumericError:
        raise
    except InputError:
        with suppress(OSError):  # other processes use the folder, or the disk is gone
            for file in set(place.glob("*.json")) - before:
                file.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
        raise


def _key(bench: Bench, file: str, own: Sequence[Candidate]) -> str:
    """Hash everything that the losses of a shard depend on."""
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
    """Read earlier measurements; None without any, or where they are damaged."""
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
    if not bench.is_kept:
        return
    text = json.dumps(losses, sort_keys=True)
    replace_file(bench.output / STATE / FOLDER / f"{key}.json", text.encode())


def _measure_shard(bench: Bench, own: Sequence[Candidate]) -> Losses:
    """Measure the layers of one shard in threads; raise NaN and Inf last."""
    groups: dict[tuple[Linear, ...], list[Candidate]] = defaultdict(list)
    for candidate in own:
        groups[candidate.group].append(candidate)
    ordered = sorted(groups.values(), key=lambda group: min(c.linear.refs[0].start for c in group))

    def measure_group(group: list[Candidate]) -> tuple[Losses, list[NumericError]]:
        try:
            losses = _losses_of(bench, group)
        except NumericError:
            found = (find_not_finite(bench.source, linear) for linear in group[0].group)
            if errors := [error for error in found if error]:
                return {}, errors
            raise
        for one in group:
            bench.settings.phases.report(one.linear.name, one.nbytes)
        return losses, []

    threads = bench.settings.workers or bench.backend.threads
    measured = read_each(bench.source, measure_group, ordered, threads)
    bench.source.check_unchanged(own[0].linear.home.file)
    if unsound := [error for _, errors in measured for error in errors]:
        raise UnsoundShardError(unsound)
    return {module: losses for found, _ in measured for module, losses in found.items()}


def _losses_of(bench: Bench, group: Sequence[Candidate]) -> Losses:
    """Measure the members of one scale group that lie in one shard."""
    sample, calibration = group[0].sample, bench.calibration
    read = {one.module: InMemory(sample(one).read(bench.source)) for one in group[0].group}
    weighed = {}
    for one in group:
        module = one.linear.module
        inputs = Inputs(calibration.moments(module) if calibration else None)
        weighed[module] = Weighed.of(as_floats(read[module].matrix), inputs)
    losses: Losses = {module: {} for module in weighed}
    for name in dict.fromkeys(name for one in group for name in one.formats):
        modules = [one.linear.module for one in group if name in one.formats]
        fmt = format_named(name)
        if fmt.is_fp4:
            rounded = _through_fp4(bench, read, modules, fmt, group[0].amax)
        else:
            rule, is_whole = bench.target.rule_for(fmt), bench.granularity == TENSOR
            rounded = (through_fp8(read[module], fmt, rule, is_whole) for module in modules)
        for module, values in zip(modules, rounded, strict=True):
            losses[module][name] = float(f"{weighed[module].loss(values).output:.{DIGITS}g}")
    return losses


def _through_fp4(
    bench: Bench,
    read: Mapping[str, InMemory],
    modules: Sequence[str],
    fmt: Format,
    amax: float | None,
) -> Iterator[Float32s]:
    """Yield the rounded values of modules; all of `read` sets the amax."""
    members = [read[module] for module in modules]
    measured = list(read.values()) if amax is None else []
    group = Group(measured, members, modules, fmt)
    tools = Tools(bench.source, bench.backend, bench.calibration)
    method = method_for(bench.target, fmt)
    panels = method.panels(group, tools, method.under(group, tools, Given(amax)))
    for _, own in groupby(panels, key=itemgetter(0)):
        yield np.concatenate([Cpu().values(q) for _, q in own])
