"""The commands that study a checkpoint before it is converted: each parses, calls one function of the floor below, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.cli.doing import carry_out
from fp4convert.cli.options import (
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
    words = dict(locals())
    from fp4convert import studies
    from fp4convert.commands import studying

    carry_out(words, studying.analyze, studies.draw_study, hears=("phases", "tell"))


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
    words = dict(locals())
    from fp4convert import studies
    from fp4convert.commands import calibrating

    carry_out(words, calibrating.calibrate, studies.draw_calibrated, hears=("phases", "tell"))
