"""The commands that write a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.cli.options import (
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
    NewFolderOption,
    OutputOption,
    PageOption,
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
)
from fp4convert.cli.run import carry_out


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
    report: PageOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a checkpoint to NVFP4 or MXFP4.

    Example: fp4convert quantize ./Llama-3.1-8B --format nvfp4 -o ./Llama-3.1-8B-NVFP4
    """
    words = dict(locals())
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    if words.pop("dry_run"):
        from fp4convert.cli import draw_plan

        carry_out(words, convert.preview_quantize, draw_plan.draw_plan)
    else:
        carry_out(words, convert.quantize, draw_results.draw_result)


def dequantize_command(
    artifact: ArtifactArgument,
    output: NewFolderOption,
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
    words = dict(locals())
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    carry_out(words, convert.dequantize, draw_results.draw_result)


def transcode_command(
    artifact: ArtifactArgument,
    output: NewFolderOption,
    dialect: DialectOption,
    format: Annotated[
        str | None,
        typer.Option("--format", help="nvfp4, for an mxfp4 artifact. Default: as it is."),
    ] = None,
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
    words = dict(locals())
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    carry_out(words, convert.transcode, draw_results.draw_result)


def prune_command(
    source: SourceArgument,
    output: NewFolderOption,
    calibration: Annotated[
        Path, typer.Option(readable=False, help="What fp4convert calibrate made of SOURCE.")
    ],
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
    words = dict(locals())
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    if words.pop("dry_run"):
        from fp4convert.cli import draw_plan

        carry_out(words, convert.preview_prune, draw_plan.draw_plan)
    else:
        carry_out(words, convert.prune, draw_results.draw_result)


def merge_command(
    output: Annotated[
        Path,
        typer.Argument(
            readable=False, help="The folder that parts were written to, or copied into."
        ),
    ],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """End a conversion whose parts are done: check every shard (reading what no seal proves untouched:
    docs/resume.md), compare scale groups, write the index and the records.

    Example: fp4convert merge ./Llama-3.1-8B-NVFP4
    """
    words = dict(locals())
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    carry_out(words, convert.merge, draw_results.draw_merged, hears=("phases",))
