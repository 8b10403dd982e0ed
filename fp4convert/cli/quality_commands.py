"""The commands that look and tell: each parses, calls one function, and prints; what computes is in commands/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.cli.doing import carry_out
from fp4convert.cli.options import (
    ArtifactArgument,
    JsonOption,
    PageOption,
    RevisionOption,
    SarifOption,
    SubfolderOption,
    TokenOption,
    complete_recipe,
)


def inspect_command(
    artifact: ArtifactArgument,
    source: Annotated[str | None, typer.Option(help="The original checkpoint, which decides what statistics cannot.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every block scale, however many.")] = False,
    sarif: SarifOption = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Tell what an artifact is and whether it is healthy, from its headers, records and scales.

    Exit code 6 when something is wrong with it. Example: fp4convert inspect ./Llama-3.1-8B-NVFP4
    """
    words = dict(locals())
    from fp4convert import portrait
    from fp4convert.commands import judging

    carry_out(words, judging.inspect, portrait.draw_artifact, hears=("tell",), verdict="healthy")


def verify_command(
    artifact: ArtifactArgument,
    source: Annotated[str | None, typer.Option(help="The original checkpoint, to measure every tensor against.")] = None,
    min_sqnr: Annotated[float | None, typer.Option(help="Fail when a tensor's SQNR is below this many dB.")] = None,
    max_nmse: Annotated[float | None, typer.Option(help="Fail when a tensor's normalised squared error is above this.")] = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Measure what every linear layer answers, for random inputs.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(readable=False, help="The same for the inputs that fp4convert calibrate saw of the source.")
    ] = None,
    max_output_error: Annotated[
        float | None, typer.Option(help="Fail when a layer's output error is above this; 0.1 is 10 %.")
    ] = None,
    report: PageOption = None,
    sarif: SarifOption = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Re-hash every file and read every scale; with --source, measure every tensor.

    Exit code 6 when something is wrong. Example: fp4convert verify ./M-NVFP4 --source ./M --min-sqnr 18
    """
    words = dict(locals())
    from fp4convert import judgements
    from fp4convert.commands import judging

    carry_out(words, judging.verify, judgements.draw_verification, hears=("tell",), verdict="passed")


def compare_command(
    a: ArtifactArgument,
    b: Annotated[str, typer.Argument(help="The same, of the same model: in any format, dialect or rule.")],
    source: Annotated[str, typer.Option(help="The original checkpoint, to measure both against.")],
    calibration: Annotated[
        Path | None,
        typer.Option(readable=False, help="Output errors for the inputs that fp4convert calibrate saw, not for random ones."),
    ] = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
) -> None:
    """Put two artifacts side by side against one source, tensor by tensor: which of them is better, and by how much.

    Exit code 6 when one of them is not of that source. Example: fp4convert compare ./M-NVFP4 ./M-MXFP4 --source ./M
    """
    words = dict(locals())
    from fp4convert import judgements
    from fp4convert.commands import judging

    carry_out(words, judging.compare, judgements.draw_comparison, hears=("tell",), verdict="passed")


def explain_command(
    code: Annotated[str | None, typer.Argument(help="Of a finding or an error, such as scale-layout.")] = None,
    json: JsonOption = False,
) -> None:
    """Explain a finding or an error by its code: what it means, where it comes from, what to do. Without CODE: list all.

    Example: fp4convert explain global-scale-reciprocal
    """
    from fp4convert import explanations, judgements, render

    if code is None:
        render.Screen(json).show(explanations.explain_all(), judgements.draw_codes)
    else:
        render.Screen(json).show(explanations.explain(code), judgements.draw_code)


def doctor_command(json: JsonOption = False) -> None:
    """Tell what this machine offers: driver, GPUs, compiler, processor, caches, disk.

    Example: fp4convert doctor
    """
    from fp4convert import doctor, render

    render.Screen(json).show(doctor.examine(Path()), render.draw_examination)


def recipes_command(
    name: Annotated[
        str | None,
        typer.Argument(help="One of them, or a TOML file: what it keeps, groups and stacks.", autocompletion=complete_recipe),
    ] = None,
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
