"""The commands that study a checkpoint before it is converted: each parses, calls one function of the floor below, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.options import (
    CalibrationOption,
    ExcludeOption,
    ForceOption,
    IncludeOption,
    JsonOption,
    MemoryOption,
    QuietOption,
    RecipeOption,
    RevisionOption,
    SourceArgument,
    StackOrderOption,
    StackRowsOption,
    SubfolderOption,
    TokenOption,
    TransportOption,
)


def analyze_command(
    source: SourceArgument,
    calibration: CalibrationOption = None,
    sample: Annotated[float | None, typer.Option(help="GB of the source to read: rows of all kinds. Default: 0.02.")] = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    stack_order: StackOrderOption = None,
    stack_rows: StackRowsOption = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Tell which format, which rule and which modules: what every kind of module loses in each form. Writes nothing.

    Example: fp4convert analyze ./Llama-3.1-8B
    """
    from fp4convert import render, studies
    from fp4convert.commands import studying

    screen = render.Screen(json, quiet)
    with screen.phases() as phases:
        words = studying.AnalyzeOptions(
            include=include,
            exclude=exclude,
            recipe=recipe,
            stack_order=stack_order,
            stack_rows=stack_rows,
            revision=revision,
            subfolder=subfolder,
            token=token,
            memory=memory,
            transport=transport,
            phases=phases,
            tell=screen.tell,
        )
        document = studying.analyze(source, calibration=calibration, sample=sample, **words)
    screen.show(document, studies.draw_study)
    screen.warn(document["warnings"])


def calibrate_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", readable=False, help="New safetensors file.")],
    text: Annotated[list[Path] | None, typer.Option(help="A file of plain text; may be given several times.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="jsonl or parquet with 'text' or 'messages' in each record.")] = None,
    self_generate: Annotated[int | None, typer.Option(help="No data: so many sequences are written by the model.")] = None,
    samples: Annotated[int, typer.Option(help="At most so many, evenly spread over the data.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of each. Default: what the model takes, up to 2048, or 512 of its own.")
    ] = None,
    gram: Annotated[str, typer.Option(help="none, diag (second moments), block:N or full, which GPTQ takes.")] = "diag",
    device: Annotated[str, typer.Option(help="auto (a GPU, else the CPU), cpu, cuda or cuda:N.")] = "auto",
    hold: Annotated[float, typer.Option(min=0, help="GB of weights held at once, with --self-generate.")] = 8.0,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    memory: MemoryOption = 1.0,
    transport: TransportOption = "http",
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run text through the model, a layer at a time, and keep what every linear layer is given.

    Example: fp4convert calibrate ./Llama-3.1-8B -o llama.safetensors --text book.txt --gram block:128
    """
    from fp4convert import render, studies
    from fp4convert.commands import calibrating

    screen = render.Screen(json, quiet)
    with screen.phases() as phases:
        words = calibrating.CalibrateOptions(
            self_generate=self_generate,
            samples=samples,
            sequence_length=sequence_length,
            gram=gram,
            device=device,
            hold=hold,
            revision=revision,
            subfolder=subfolder,
            token=token,
            memory=memory,
            transport=transport,
            force=force,
            phases=phases,
            tell=screen.tell,
        )
        result = calibrating.calibrate(source, output, text=text or (), dataset=dataset, **words)
    screen.show(result.as_json(), studies.draw_calibrated)
    screen.warn(result.warnings)
