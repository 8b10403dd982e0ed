"""The commands that write a checkpoint: each parses, calls one function of the floor below, and prints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4convert.options import (
    ActivationsOption,
    ArtifactArgument,
    CacheOption,
    CalibrationOption,
    DeviceOption,
    DialectOption,
    DryRunOption,
    ExcludeOption,
    ForceOption,
    FormatOption,
    IncludeOption,
    IndexOption,
    InputScaleOption,
    JoinOption,
    JsonOption,
    KeepPackedOption,
    LayoutOption,
    MemoryOption,
    MethodOption,
    OutputOption,
    PartsOption,
    PrivateOption,
    PushOption,
    QuietOption,
    RayOption,
    RecipeOption,
    RevisionOption,
    RuleOption,
    SourceArgument,
    StackOrderOption,
    StackRowsOption,
    SubfolderOption,
    TargetBitsOption,
    TargetSizeOption,
    TemplateOption,
    TokenOption,
    TransportOption,
    ViaOption,
    WorkersOption,
    access_to,
    given,
)

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.pipelines import Work
    from fp4convert.progress import Phases
    from fp4convert.publishing import Publication
    from fp4convert.render import Screen
    from fp4convert.workers import Settings


def quantize_command(
    source: SourceArgument,
    format: FormatOption,
    output: OutputOption = None,
    dialect: DialectOption = "compressed-tensors",
    scale_rule: RuleOption = None,
    activations: ActivationsOption = 16,
    input_scale: InputScaleOption = None,
    kv_cache: CacheOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    stack_order: StackOrderOption = None,
    stack_rows: StackRowsOption = None,
    keep_packed: KeepPackedOption = False,
    via: ViaOption = None,
    calibration: CalibrationOption = None,
    method: MethodOption = "rtn",
    target_size: TargetSizeOption = None,
    target_bits: TargetBitsOption = None,
    device: DeviceOption = "auto",
    workers: WorkersOption = 0,
    dry_run: DryRunOption = False,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    force: ForceOption = False,
    join: JoinOption = False,
    shard_index: IndexOption = None,
    num_shards: PartsOption = None,
    ray: RayOption = None,
    push_to_hub: PushOption = None,
    private: PrivateOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a checkpoint to NVFP4 or MXFP4.

    Example: fp4convert quantize ./Llama-3.1-8B --format nvfp4 -o ./Llama-3.1-8B-NVFP4
    """
    from fp4convert import cluster, convert, fitting, parts, pipelines, publishing, render, sources
    from fp4convert import workers as crew

    screen = render.Screen(json, quiet)
    share = parts.choose_share(join or ray is not None, shard_index, num_shards, os.environ)
    publication = publishing.choose_publication(push_to_hub, private, given(token))
    target = output or Path(f"{sources.name_of(source)}-{format.upper()}")
    access = access_to(screen.tell, (revision, subfolder), token, (memory, transport), target)
    choice = (tuple(include or ()), tuple(exclude or ()), recipe, stack_order, stack_rows, keep_packed)
    request = convert.Request(format, dialect, scale_rule, activations, input_scale, *choice, via, calibration, method, kv_cache)
    errand = cluster.Errand(source, access, request, target, device, workers, fitting.choose_goal(target_size, target_bits))
    settings = crew.Settings(device, workers, force, is_joining=join, share=share, tell=screen.tell)
    _carry_out(screen, lambda phases: pipelines.prepare(errand, ray, phases, not dry_run), settings, publication, dry_run)


def _carry_out(
    screen: Screen, prepare: Callable[[Phases], Work], settings: Settings, publication: Publication | None, is_dry: bool
) -> None:
    """Plan the work, do it or tell what it comes to, and show that."""
    from fp4convert import gpus, overview, parts, publishing, render

    with screen.phases() as phases:
        phases.begin("plan")
        work = prepare(phases)
        screen.warn([*(() if is_dry else work.warnings), *gpus.unused(settings.device)])
        screen.note([parts.describe(settings.share)] if settings.share else [])
        order = publishing.Order(work, replace(settings, phases=phases), publication)
        document: render.Document = work.describe(order.settings) if is_dry else publishing.fulfil(order).as_json()
    screen.show(document, overview.draw_plan if is_dry else render.draw_result)
    screen.warn(document["warnings"] if is_dry else ())


def dequantize_command(
    artifact: ArtifactArgument,
    output: Annotated[Path, typer.Option("--output", "-o", readable=False, help="New folder.")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: DeviceOption = "auto",
    workers: WorkersOption = 0,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Turn an artifact back into a checkpoint of ordinary weights, with exactly the values that engines compute.

    Example: fp4convert dequantize ./Llama-3.1-8B-NVFP4 -o ./Llama-3.1-8B-restored
    """
    from fp4convert import artifact as artifacts
    from fp4convert import convert, gpus, render
    from fp4convert import workers as crew

    screen = render.Screen(json, quiet)
    with screen.phases() as phases:
        phases.begin("plan")
        access = access_to(screen.tell, (revision, subfolder), token, (memory, transport), output)
        opened = artifacts.open_quantized(artifact, access)
        todo = convert.prepare_dequantize(*opened, dtype)
        screen.warn([*todo.warnings, *gpus.unused(device)])
        settings = crew.Settings(device, workers, force, phases, tell=screen.tell)
        result = convert.dequantize(*opened, todo, output, settings)
    screen.show(result.as_json(), render.draw_result)


def transcode_command(
    artifact: ArtifactArgument,
    output: Annotated[Path, typer.Option("--output", "-o", readable=False, help="New folder.")],
    dialect: Annotated[
        str, typer.Option(help="compressed-tensors, modelopt, quark, gpt-oss, deepseek, mlx, comfy, gguf or plain.")
    ],
    format: Annotated[str | None, typer.Option("--format", help="nvfp4, for an mxfp4 artifact. Default: as it is.")] = None,
    scale_layout: LayoutOption = None,
    template: TemplateOption = None,
    workers: WorkersOption = 0,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Spell an artifact in another dialect: the same codes and block scales, never rounded again.

    Example: fp4convert transcode ./Llama-3.1-8B-NVFP4 -o ./Llama-3.1-8B-modelopt --dialect modelopt
    """
    from fp4convert import artifact as artifacts
    from fp4convert import convert, render, sources
    from fp4convert import workers as crew

    screen = render.Screen(json, quiet)
    with screen.phases() as phases:
        phases.begin("plan")
        access = access_to(screen.tell, (revision, subfolder), token, (memory, transport), output)
        opened = artifacts.open_artifact(artifact, access)
        donor = sources.open_source(template) if template else None
        todo = convert.prepare_transcode(opened, convert.TranscodeRequest(dialect, format, scale_layout), donor)
        screen.warn(todo.warnings)
        settings = crew.Settings("cpu", workers, force, phases, tell=screen.tell)
        result = convert.transcode(opened, todo, output, settings, donor)
    screen.show(result.as_json(), render.draw_result)


def prune_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", readable=False, help="New folder.")],
    calibration: Annotated[Path, typer.Option(readable=False, help="What fp4convert calibrate made of SOURCE.")],
    keep: Annotated[int, typer.Option(help="Experts that stay in every layer that has some.")],
    recipe: RecipeOption = None,
    workers: WorkersOption = 0,
    dry_run: DryRunOption = False,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    force: ForceOption = False,
    join: JoinOption = False,
    shard_index: IndexOption = None,
    num_shards: PartsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Leave out the experts that matter least (REAP): an ordinary checkpoint with fewer of them, for quantize to take.

    Example: fp4convert prune ./Qwen3-30B-A3B -o ./Qwen3-30B-A3B-96 --calibration qwen3.safetensors --keep 96
    """
    from fp4convert import calibration_file, overview, parts, pruning, render, sources
    from fp4convert import workers as crew

    screen = render.Screen(json, quiet)
    share = parts.choose_share(join, shard_index, num_shards, os.environ)
    access = access_to(screen.tell, (revision, subfolder), token, (memory, transport), output)
    with screen.phases() as phases:
        phases.begin("plan")
        opened = sources.open_source(source, access)
        todo = pruning.prepare_prune(opened, calibration_file.open_calibration(calibration), keep, recipe)
        screen.warn(() if dry_run else todo.plan.warnings)
        screen.note([parts.describe(share)] if share else [])
        settings = crew.Settings("cpu", workers, force, phases, join, share, screen.tell)
        result = None if dry_run else pruning.prune(opened, todo, output, settings)
        document = result.as_json() if result else pruning.describe_pruning(opened, todo, settings)
    screen.show({**document, "experts": todo.experts}, overview.draw_plan if dry_run else render.draw_result)
    screen.warn(todo.plan.warnings if dry_run else ())


def merge_command(
    output: Annotated[Path, typer.Argument(readable=False, help="The folder that parts were written to, or copied into.")],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """End a conversion whose parts are done: read every shard again, compare scale groups, write the index and the records.

    Example: fp4convert merge ./Llama-3.1-8B-NVFP4
    """
    from fp4convert import ending, render

    screen = render.Screen(json, quiet)
    with screen.phases() as phases:
        merged = ending.merge(output, phases)
    screen.show(merged, render.draw_merged)
