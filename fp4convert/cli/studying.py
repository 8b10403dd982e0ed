"""The commands that study a checkpoint before it is converted: each parses, calls one function of the floor below, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.options import (
    ExcludeOption,
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
    access_to,
)


def analyze_command(
    source: SourceArgument,
    calibration: Annotated[
        Path | None, typer.Option(help="What fp4convert calibrate made: the inputs that errors count.")
    ] = None,
    sample: Annotated[float, typer.Option(help="GB of the source that are read: rows evenly over kinds and layers.")] = 0.1,
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
    from fp4convert import analysis, calibration_file, render, sources, studies
    from fp4convert import recipe as recipes

    screen = render.Screen(json, quiet)
    choice = recipes.Choice(recipe, tuple(include or ()), tuple(exclude or ()), stack_order, stack_rows)
    with screen.phases() as phases:
        phases.begin("plan")
        known = calibration_file.open_calibration(calibration) if calibration else None
        study = analysis.Study(choice, analysis.sample_nbytes(sample), known)
        opened = sources.open_source(source, access_to(screen.tell, (revision, subfolder), token, (memory, transport)))
        document = analysis.analyze(opened, study, phases)
    screen.show(document, studies.draw_study)
    screen.warn(document["warnings"])
