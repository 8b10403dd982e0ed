"""The commands that look and tell: each parses, calls one function of the floor below, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.options import (
    ArtifactArgument,
    JsonOption,
    RevisionOption,
    SubfolderOption,
    TokenOption,
    access_to,
)


def inspect_command(
    artifact: ArtifactArgument,
    source: Annotated[str | None, typer.Option(help="The original checkpoint, which decides what statistics cannot.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every block scale, however many.")] = False,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Tell what an artifact is and whether it is healthy, from its headers, records and scales.

    Exit code 6 when something is wrong with it. Example: fp4convert inspect ./Llama-3.1-8B-NVFP4
    """
    from fp4convert import artifact as artifacts
    from fp4convert import inspection, render, sources

    screen = render.Screen(json)
    opened = artifacts.open_artifact(artifact, access_to(screen.tell, (revision, subfolder), token))
    original = sources.open_original(source, access_to(screen.tell, (None, subfolder), token)) if source else None
    description = inspection.inspect(opened, original, full)
    screen.show(description, render.draw_artifact)
    raise typer.Exit(0 if description["healthy"] else 6)


def verify_command(
    artifact: ArtifactArgument,
    source: Annotated[str | None, typer.Option(help="The original checkpoint, to measure every tensor against.")] = None,
    min_sqnr: Annotated[float | None, typer.Option(help="Fail when a tensor's SQNR is below this many dB.")] = None,
    max_nmse: Annotated[float | None, typer.Option(help="Fail when a tensor's normalised squared error is above this.")] = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Re-hash every file and read every scale; with --source, measure every tensor.

    Exit code 6 when something is wrong. Example: fp4convert verify ./M-NVFP4 --source ./M --min-sqnr 18
    """
    from fp4convert import artifact as artifacts
    from fp4convert import render, sources, verification

    screen = render.Screen(json)
    opened = artifacts.open_artifact(artifact, access_to(screen.tell, (revision, subfolder), token))
    original = sources.open_original(source, access_to(screen.tell, (None, subfolder), token)) if source else None
    report = verification.verify(opened, original, verification.Gate(min_sqnr, max_nmse))
    screen.show(report.as_json(), render.draw_verification)
    raise typer.Exit(0 if report.passed else 6)


def doctor_command(json: JsonOption = False) -> None:
    """Tell what this machine offers: driver, GPUs, compiler, processor, caches, disk.

    Example: fp4convert doctor
    """
    from fp4convert import doctor, render

    render.Screen(json).show(doctor.examine(Path()), render.draw_examination)


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="One of them, or a TOML file: what it keeps, groups and stacks.")] = None,
    json: JsonOption = False,
) -> None:
    """List the recipes: modes to pick, and what is kept in the models of each family.

    Example: fp4convert recipes deepseek
    """
    from fp4convert import recipe_files, render

    if name is None:
        render.Screen(json).show(recipe_files.describe_known(), render.draw_recipes)
    else:
        render.Screen(json).show(recipe_files.describe(name), render.draw_recipe)
