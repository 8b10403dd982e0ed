"""quantize(), dequantize(), transcode(), prune() and merge()."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from fp4convert.calibration.statistics import open_calibration
from fp4convert.checkpoint.artifact import open_artifact, open_quantized
from fp4convert.commands.options import (
    PartOptions,
    Patterns,
    Reference,
    WorkOptions,
    access_of,
    as_path,
    as_warnings,
    check_words,
    given,
    words_of,
)
from fp4convert.commands.publish import Destinations, Order, choose_page, choose_publication, fulfil
from fp4convert.conversion import pruning, repacking, requests
from fp4convert.conversion.ray_workers import Errand
from fp4convert.conversion.requests import choose_goal
from fp4convert.conversion.work import prepare
from fp4convert.execution import finish
from fp4convert.execution.settings import Result, Settings
from fp4convert.execution.share import choose_share, describe
from fp4convert.numerics.backends.gpus import unused
from fp4convert.progress import Phases
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Source, name_of


class DequantizeOptions(WorkOptions, total=False):
    """device  auto (default: GPUs, else the CPU), cpu, cuda or cuda:N."""

    device: str


class TranscodeOptions(WorkOptions, total=False):
    """format  nvfp4, for an mxfp4 artifact; default: as it is

    scale_layout  of dialect plain: linear (default), 128x4, 8x4, deepgemm, k_major, interleaved, appended
    template      of dialect gguf: a GGUF file of the model, whose frame it gets
    """

    format: str | None
    scale_layout: str | None
    template: Reference | None


class PruneOptions(PartOptions, total=False):
    """recipe  a mode or family that `recipes` lists, or a TOML file."""

    recipe: str | None


class QuantizeOptions(PartOptions, total=False):
    """What `quantize` and `preview_quantize` are told beside the source and the format.

    output        new folder; default: ./NAME-FORMAT
    dialect       compressed-tensors (default), modelopt, quark, gpt-oss, deepseek, mlx, comfy, gguf or plain
    scale_rule    nvfp4: mse (default), amax, four-over-six, importance; mxfp4: mse (default), floor, even, ceil, importance
    activations   16 (default): weights alone; 4: for the FP4 tensor cores, activations too
    input_scale   with activations 4, nvfp4: a multiplier, or an artifact or calibration that has them; default 1.0
    kv_cache      fp8: scales and records for a cache of keys and values
    include       modules to quantize though the recipe keeps them
    exclude       modules to keep as they are
    recipe        a mode or family that `recipes` lists, or a TOML file
    stack_order   of stacks of experts, before any recipe: out_in or in_out
    stack_rows    of gate and up in one such stack: concatenated or interleaved
    keep_packed   what is FP8, int4 or FP4 and stays is not made bf16
    via           fp8: round weights to FP8 first
    calibration   file that `calibrate` made of this source
    method        rtn (default), gptq, awq or smooth
    target_size   GB of the artifact: measured formats for modules, to fit it
    target_bits   the same by bits per weight
    device        auto (default: GPUs, else the CPU), cpu, cuda or cuda:N
    ray           one worker on every node of this Ray cluster: auto, or HOST:PORT
    push_to_hub   upload the result to this repository, ORG/NAME
    private       into a repository that is not public
    report        file of HTML to write on what was lost
    """

    output: Reference | None
    dialect: str
    scale_rule: str | None
    activations: int
    input_scale: str | float | None
    kv_cache: str | None
    include: Patterns
    exclude: Patterns
    recipe: str | None
    stack_order: str | None
    stack_rows: str | None
    keep_packed: bool
    via: str | None
    calibration: Reference | None
    method: str
    target_size: float | None
    target_bits: float | None
    device: str
    ray: str | None
    push_to_hub: str | None
    private: bool
    report: Reference | None


def quantize(source: Reference, *, format: str, **options: Unpack[QuantizeOptions]) -> Result:
    """Convert a checkpoint to NVFP4 or MXFP4: the command `quantize`.

    source   a folder, one .safetensors or .gguf file, or ORG/NAME on the Hub
    format   nvfp4 or mxfp4
    options  as QuantizeOptions says
    Returns  what was done, once the artifact is whole; keys of --json are its fields
    Raises   Fp4Error, of the class whose exit code the command would have.  After an InputError nothing is written, unless it is
             a NumericError, for NaN or Inf in weights: then all sound shards are finished
    """
    return fulfil(_order(source, format, options, is_dry=False))


def preview_quantize(
    source: Reference, *, format: str, **options: Unpack[QuantizeOptions]
) -> dict[str, Any]:
    """The plan that `quantize` would carry out, from headers alone, as `quantize --dry-run --json` prints it.  Writes nothing."""
    order = _order(source, format, options, is_dry=True)
    return order.work.describe(order.settings)


def _order(source: Reference, format: str, options: QuantizeOptions, is_dry: bool) -> Order:
    """What is asked for, planned; a person is told of doubts, and of a dry run only those that are not in its document."""
    check_words(options, QuantizeOptions)
    ray = options.get("ray")
    settings = _part_settings(options, is_elsewhere=ray is not None)
    publication = choose_publication(
        options.get("push_to_hub"), options.get("private", False), given(options.get("token"))
    )
    reference = os.fspath(source)
    output = Path(options.get("output") or f"{name_of(reference)}-{format.upper()}")
    destinations = Destinations(
        publication, choose_page(as_path(options.get("report")), output, settings.share, is_dry)
    )
    size = choose_goal(options.get("target_size"), options.get("target_bits"))
    request = requests.Request(format, **words_of(requests.Request, options))
    access = access_of(options, output)
    errand = Errand(
        reference,
        access,
        request,
        output,
        device=settings.device,
        workers=settings.workers,
        goal=size,
    )
    settings.phases.begin("plan")
    work = prepare(errand, ray, settings.phases, not is_dry)
    _tell(options, () if is_dry else work.warnings, settings)
    return Order(work, settings, destinations)


def dequantize(
    artifact: Reference,
    output: Reference,
    *,
    dtype: str = "bf16",
    **options: Unpack[DequantizeOptions],
) -> Result:
    """Turn an artifact back into a checkpoint of ordinary weights, with exactly the values that engines compute: `dequantize`.

    artifact  a folder, one file, or ORG/NAME on the Hub; FP8 and int4 of other makers too
    output    new folder
    dtype     bf16, fp16 or fp32
    options   as DequantizeOptions says
    Raises    Fp4Error, as `quantize` does; NumericError beyond the range of fp16
    """
    check_words(options, DequantizeOptions)
    settings, target = _settings(options), Path(output)
    settings.phases.begin("plan")
    source, opened = open_quantized(os.fspath(artifact), access_of(options, target))
    plan = repacking.prepare_dequantize(source, opened, dtype)
    _tell(options, plan.warnings, settings)
    return repacking.dequantize(source, plan, target, settings)


def transcode(
    artifact: Reference, output: Reference, *, dialect: str, **options: Unpack[TranscodeOptions]
) -> Result:
    """Spell an artifact in another dialect, its codes and block scales never rounded again: `transcode`.

    artifact  a folder, one file, or ORG/NAME on the Hub
    output    new folder
    dialect   compressed-tensors, modelopt, quark, gpt-oss, deepseek, mlx, comfy, gguf or plain
    options   as TranscodeOptions says
    Raises    Fp4Error, as `quantize` does; InputError for what the dialect cannot say
    """
    check_words(options, TranscodeOptions)
    settings, target = _settings(options, device="cpu"), Path(output)
    settings.phases.begin("plan")
    opened = open_artifact(os.fspath(artifact), access_of(options, target))
    template = options.get("template")
    donor = open_source(os.fspath(template)) if template else None
    request = repacking.TranscodeRequest(dialect, **words_of(repacking.TranscodeRequest, options))
    plan = repacking.prepare_transcode(opened, request, donor)
    _tell(options, plan.warnings, settings)
    return repacking.transcode(opened, plan, target, settings, donor)


def prune(
    source: Reference,
    output: Reference,
    calibration: Reference,
    keep: int,
    **options: Unpack[PruneOptions],
) -> Result:
    """Leave out the experts that matter least (REAP): an ordinary checkpoint with fewer of them: `prune`.

    calibration  file that `calibrate` made of the source
    keep         experts that stay in every layer that has some
    options      as PruneOptions says
    Raises       Fp4Error, as `quantize` does
    """
    settings = _part_settings(options, device="cpu")
    opened, todo = _pruning(source, output, (calibration, keep), options, settings)
    _tell(options, todo.plan.warnings, settings)
    return replace(pruning.prune(opened, todo, Path(output), settings), experts=todo.experts)


def preview_prune(
    source: Reference,
    output: Reference,
    calibration: Reference,
    keep: int,
    **options: Unpack[PruneOptions],
) -> dict[str, Any]:
    """The plan that `prune` would carry out: `prune --dry-run --json`.  Writes nothing; raises as it does."""
    settings = _part_settings(options, device="cpu")
    opened, todo = _pruning(source, output, (calibration, keep), options, settings)
    _tell(options, (), settings)
    return pruning.describe_pruning(opened, todo, settings)


def _pruning(
    source: Reference,
    output: Reference,
    asked: tuple[Reference, int],
    options: PruneOptions,
    settings: Settings,
) -> tuple[Source, pruning.Pruning]:
    check_words(options, PruneOptions)
    calibration, keep = asked
    settings.phases.begin("plan")
    opened = open_source(os.fspath(source), access_of(options, Path(output)))
    return opened, pruning.prepare_prune(
        opened, open_calibration(Path(calibration)), keep, options.get("recipe")
    )


def merge(output: Reference, *, phases: Phases | None = None) -> dict[str, Any]:
    """End a conversion whose parts are done: check every shard, compare scale groups, write the records: `merge`.

    Shards that no seal proves untouched are read again (docs/resume.md).

    output   the folder that parts were written to, or copied into
    Returns  what `merge --json` prints
    Raises   InputError where it holds no plan; OutputError where a shard is missing or damaged
    """
    return finish.merge(Path(output), phases or Phases())


def _part_settings(options: PartOptions, is_elsewhere: bool = False, **fixed: str) -> Settings:
    """How to work, with the part that this process does; the launcher's variables count as they do for the command."""
    settings = _settings(options, **fixed)
    is_shared = settings.is_joining or is_elsewhere
    return replace(
        settings,
        share=choose_share(
            is_shared, options.get("shard_index"), options.get("num_shards"), os.environ
        ),
    )


def _settings(options: WorkOptions, **fixed: str) -> Settings:
    """How to work.

    fixed  what the command leaves nobody a choice of
    """
    return Settings(**words_of(Settings, options, is_forced="force", is_joining="join") | fixed)


def _tell(options: WorkOptions, warnings: Iterable[str], settings: Settings) -> None:
    """A person is told of doubts, and of the part that this process does."""
    options.get("warn", as_warnings)([*warnings, *unused(settings.device)])
    if settings.share:
        settings.tell(describe(settings.share))
