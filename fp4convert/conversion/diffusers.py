"""Convert each transformer of a Diffusers pipeline.

A transformer is converted into its own folder of the result, where it is an artifact by itself.
All else is copied as it is by a job without shards, which comes last and ends with
model_index.json: without that file nothing takes the folder for a pipeline.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp4convert.checkpoint.dialects.base import Ignored
from fp4convert.conversion.dry_run import READING_RATES
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.engines.gpus import Use
from fp4convert.engines.verdicts import Verdict
from fp4convert.errors import InputError, NumericError, named, shell_line
from fp4convert.execution.carry_out import carry_out
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import Job, check_output, opened
from fp4convert.execution.output_check import missing_nbytes
from fp4convert.execution.plan_file import (
    digest_of,
    read_ended_files,
    read_manifest,
    refuse_linked_folders,
)
from fp4convert.execution.settings import Result, Settings, summarize
from fp4convert.execution.takeover import refuse_busy
from fp4convert.makers.maker import Tools
from fp4convert.numerics.backends import open_backend
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.global_scales import scales_for_component
from fp4convert.planning.plan import Plan
from fp4convert.storage.checkpoint_files import PIPELINE, PLAN_FILE, REPORT
from fp4convert.storage.disk import write_errors_at
from fp4convert.storage.open import absolute, access_to
from fp4convert.storage.source import Source


class PipelineConversion(NamedTuple):
    """A Diffusers pipeline into one folder: a Work.

    source       of what is copied: everything but the components
    conversions  by the name of the component, which is that of its folder, too
    """

    options: QuantizeOptions
    source: Source
    conversions: dict[str, Conversion]

    @property
    def plan(self) -> Plan:
        plans = [conversion.plan for conversion in self.conversions.values()]
        return Plan(
            plans[0].target,
            tuple(task for plan in plans for task in plan.tasks),
            Ignored((), ()),
            (),
        )

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return next(iter(self.conversions.values())).verdicts

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return the kernels of the first component."""
        return next(iter(self.conversions.values())).uses

    @property
    def warnings(self) -> list[str]:
        return self._collect(
            {name: list(conversion.warnings) for name, conversion in self.conversions.items()}
        )

    def _collect(self, warnings: dict[str, list[str]]) -> list[str]:
        """Return our warnings, then those of components with their names."""
        left_out = self.source.checkpoint.left_out
        lines = [f"{name}: {line}" for name, lines in warnings.items() for line in lines]
        if not left_out:
            return lines
        beside = f"{len(left_out)} weight files next to {PIPELINE} are not part of the pipeline"
        return [f"{beside} and are left out, the first {left_out[0]!r}", *lines]

    def jobs(self) -> dict[str, Job]:
        return {"": self._copying(), **{name: one.job for name, one in self.conversions.items()}}

    def names(self) -> list[str]:
        parts = [
            f"{name}/{file}"
            for name, conversion in self.conversions.items()
            for file in conversion.names()
        ]
        return [*parts, *self._copying().manifest().files]

    def artifacts(self) -> dict[str, QuantizeOptions]:
        return {name: conversion.options for name, conversion in self.conversions.items()}

    def describe(self, settings: Settings) -> dict[str, object]:
        """Join the documents of all components, and what is copied.

        Every tensor says which component it is of.
        """
        copied = self._copying().output_nbytes
        described = {
            name: dict[str, Any](conversion.describe(settings))
            for name, conversion in self.conversions.items()
        }
        whole: dict[str, Any] = {}
        for name, document in described.items():
            for key, value in document.items():
                whole[key] = (
                    _join_values(key, whole[key], _label_entries(name, value))
                    if key in whole
                    else _label_entries(name, value)
                )
        sizes = ("source_bytes", "output_bytes", "peak_disk_bytes")
        for key, nbytes in zip(sizes, (copied, copied, self._copying().peak_nbytes), strict=True):
            whole[key] = _join_values(key, whole[key], nbytes)
        components = [
            {"name": name, **{key: document[key] for key in sizes}}
            for name, document in described.items()
        ]
        ours = {
            "bits_per_weight": self.plan.bits_per_weight,
            "seconds_estimated": self._add_copies(whole["seconds_estimated"], copied),
            "warnings": self._collect(
                {name: document["warnings"] for name, document in described.items()}
            ),
        }
        return {**whole, **ours, "copied_bytes": copied, "components": components}

    def _add_copies(self, seconds: dict[str, Any], copied_nbytes: int) -> dict[str, object]:
        """Add the copies, which are hashed twice where they arrive, to the times."""
        streamed = sum(
            c.source.checkpoint.nbytes for c in self.conversions.values() if c.source.is_streamed
        )
        hashed = self.plan.output_bytes + streamed
        more = (
            seconds["hashing"] * copied_nbytes * (2 if self.source.is_streamed else 1) / hashed
            if hashed
            else 0.0
        )
        reading = {
            key: seconds["reading"][key] + copied_nbytes / rate
            for key, rate in READING_RATES.items()
        }
        return {
            **seconds,
            "hashing": seconds["hashing"] + more,
            "work": seconds["work"] + more,
            "reading": reading,
        }

    def check(self, settings: Settings) -> None:
        if settings.share is not None:  # nobody could end all parts of all conversions
            part = f"part {settings.share.index} of {settings.share.count}"
            detail = (
                f"{part}: a pipeline is several conversions, which --shard-index does not split"
            )
            one = "Split one component at a time: --subfolder transformer"
            next_step = f"{one}; or use --join, or --num-shards 1."
            raise InputError("share", detail, next_step)
        next(iter(self.conversions.values())).check(settings)

    def check_output(self, settings: Settings) -> None:
        refuse_linked_folders(self.options.folder, (f"{name}/any" for name in self.conversions))
        check_output(self._copying(), self.options.folder, settings)
        for name, conversion in self.conversions.items():
            is_forced = settings.is_forced or self._is_reopened(conversion)
            with named(name):
                conversion.check_output(replace(settings, is_forced=is_forced))

    def begin(self, settings: Settings) -> OutputFolder:
        with self._begun(settings) as folder:
            return folder

    @contextmanager
    def _begun(self, settings: Settings) -> Iterator[OutputFolder]:
        """Begin every folder with its plan, or none where one of them refuses."""
        self.check_output(settings)
        for name, conversion in self.conversions.items():
            with named(name):
                plan_id = conversion.job.manifest().plan_id
                refuse_busy(conversion.options.folder, plan_id, settings.tell)
        with opened(self._copying(), self.options.folder, settings) as folder:
            for name, conversion in self.conversions.items():
                with named(name), write_errors_at(self.options.folder):
                    output = conversion.options.folder
                    if self._is_reopened(conversion) and (old := read_manifest(output)):
                        (output / old.last).unlink(missing_ok=True)  # its record
                    if conversion.begin(self._within(settings, name)).missing():
                        # Done again after it was whole: nothing loads it meanwhile.
                        self._end.unlink(missing_ok=True)
            yield folder

    @property
    def _end(self) -> Path:
        """Return the file whose absence makes the whole unfinished."""
        return self.options.folder / PIPELINE

    def _is_reopened(self, conversion: Conversion) -> bool:
        """Tell whether the whole is unfinished: a component's plan may change."""
        output = conversion.options.folder
        manifest = conversion.job.manifest()
        old = read_manifest(output) if (output / PLAN_FILE).exists() else None
        return (
            old is not None
            and not self._end.exists()
            and old.identity == manifest.identity
            and old.plan_id != manifest.plan_id
        )

    def carry_out(self, settings: Settings) -> Result:
        self.check(settings)
        with self._begun(settings) as folder:
            adopted_nbytes = folder.manifest.nbytes - missing_nbytes(folder.root, folder.manifest)
            results = self._convert(settings)
            tools = Tools(self.source, open_backend("cpu"))
            copied = carry_out(self._copying(), tools, self.options.folder, settings)
        return self._join_results(results, copied, adopted_nbytes)

    def _convert(self, settings: Settings) -> dict[str, Result]:
        """Convert every component; raise one error for all NaN and Inf at the end."""

        def hear_name(component: str, path: Path, file: str, sha256: str) -> None:
            settings.on_named(path, f"{component}/{file}", sha256)

        results: dict[str, Result] = {}
        unsound: list[NumericError] = []
        for name, conversion in self.conversions.items():
            own = self._within(settings, name)
            try:
                with named(name):
                    results[name] = conversion.carry_out(
                        replace(own, on_named=partial(hear_name, name))
                    )
            except NumericError as error:
                unsound.append(error)
            conversion.source.stop()
        if unsound:
            raise summarize(unsound)
        return results

    def _within(self, settings: Settings, name: str) -> Settings:
        """Return how a component is converted: its files are known by its folder."""
        if settings.elsewhere is None:
            return settings
        return replace(settings, elsewhere=settings.elsewhere.below(name))

    def next_steps(self, is_absolute: bool = False) -> list[str]:
        output, original = self.options.place, self.options.source
        if is_absolute:
            original = absolute(original)
            output = output if self.options.no_keep else Path(os.path.abspath(output))
        verify, source = ("fp4convert", "verify", output), ("--source", original)
        lines = [shell_line(*verify, "--subfolder", name, *source) for name in self.conversions]
        if self.verdicts and not self.options.no_keep:  # then each ends with the line that loads it
            lines += [one.next_steps(is_absolute)[-1] for one in self.conversions.values()]
        return lines

    def ended_files(self) -> dict[str, str]:
        own = {name: conversion.ended_files() for name, conversion in self.conversions.items()}
        parts = {
            f"{name}/{file}": sha256
            for name, files in own.items()
            for file, sha256 in files.items()
        }
        return {**parts, **read_ended_files(self.options.folder)}

    def _copying(self) -> Job:
        """Return the job that copies everything else."""
        with self.source.open_file(PIPELINE) as stream:
            texts = {PIPELINE: stream.read().decode("utf-8")}
        plan = replace(self.plan, tasks=())
        parts = {name: conversion.job.manifest() for name, conversion in self.conversions.items()}
        replaced = frozenset({*texts, REPORT})
        return Job(self.source, plan, texts, None, PIPELINE, replaced, "copy", parts)

    def _join_results(
        self, results: dict[str, Result], copied: Result, adopted_nbytes: int
    ) -> Result:
        """Join the results of all components and of the copies."""
        made, copied_nbytes = list(results.values()), copied.output_bytes
        tensors: Counter[str] = Counter()
        for result in made:
            tensors.update(result.tensors)
        return replace(
            made[0],
            output=str(self.options.folder),
            source_bytes=sum(result.source_bytes for result in made) + copied_nbytes,
            output_bytes=sum(result.output_bytes for result in made) + copied_nbytes,
            seconds=round(sum(result.seconds for result in made) + copied.seconds, 3),
            tensors=dict(tensors),
            digest=digest_of(self.ended_files()),
            adopted_bytes=sum(result.adopted_bytes for result in made) + adopted_nbytes,
            bits_per_weight=self.plan.bits_per_weight,
            carried=None,
            fidelity=None,
            components=[{"name": name, **result.as_json()} for name, result in results.items()],
        )


def component_options(options: QuantizeOptions, pipeline: Source, name: str) -> QuantizeOptions:
    """Return the options that make one component of a pipeline.

    Raises  InputError where what is given has nothing for it by itself
    """
    access, given = access_to(options.access(), pipeline, name), options.global_scale
    if given is not None:
        count = len(pipeline.checkpoint.components)
        given = scales_for_component(os.fspath(given), name, count)
    return replace(
        options,
        subfolder=access.subfolder,
        revision=access.revision,
        output=options.folder / name,
        global_scale=given,
    )


def _label_entries(name: str, value: object) -> object:
    """Add to the entries of a list which component they are of."""
    if not isinstance(value, list):
        return value
    return [{**entry, "component": name} if isinstance(entry, dict) else entry for entry in value]


def _join_values(key: str, value: object, other: object) -> object:
    """Append lists, add numbers; of memory and threads take the larger number."""
    if isinstance(value, list) and isinstance(other, list):
        return [*value, *other]
    if isinstance(value, dict) and isinstance(other, dict):
        return {part: _join_values(part, value[part], other[part]) for part in value}
    if (
        isinstance(value, int | float)
        and isinstance(other, int | float)
        and not isinstance(value, bool)
    ):
        return max(value, other) if key in ("peak_memory_bytes", "threads") else value + other
    return value
