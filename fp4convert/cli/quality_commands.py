"""The commands that look and tell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4convert.cli.options import (
    ArtifactArgument,
    CalibrationOption,
    ExcludeOption,
    ForceOption,
    IncludeOption,
    JsonOption,
    MemoryOption,
    PageOption,
    QuietOption,
    RecipeOption,
    RevisionOption,
    SarifOption,
    SourceArgument,
    StackOrderOption,
    StackRowsOption,
    SubfolderOption,
    TokenOption,
    TransportOption,
    complete_recipe,
)
from fp4convert.cli.run import carry_out


def inspect_command(
    artifact: ArtifactArgument,
    source: Annotated[
        str | None,
        typer.Option(help="The original checkpoint, which decides what statistics cannot."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read every block scale, however many.")
    ] = False,
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
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    carry_out(
        words, quality.inspect, draw_quality.draw_artifact, hears=("tell",), verdict="healthy"
    )


def verify_command(
    artifact: ArtifactArgument,
    source: Annotated[
        str | None, typer.Option(help="The original checkpoint, to measure every tensor against.")
    ] = None,
    min_sqnr: Annotated[
        float | None, typer.Option(help="Fail when a tensor's SQNR is below this many dB.")
    ] = None,
    max_nmse: Annotated[
        float | None,
        typer.Option(help="Fail when a tensor's normalised squared error is above this."),
    ] = None,
    outputs: Annotated[
        bool,
        typer.Option(
            "--outputs", help="Measure what every linear layer answers, for random inputs."
        ),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="The same for the inputs that fp4convert calibrate saw of the source.",
        ),
    ] = None,
    max_output_error: Annotated[
        float | None,
        typer.Option(help="Fail when a layer's output error is above this; 0.1 is 10 %."),
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
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    carry_out(
        words, quality.verify, draw_quality.draw_verification, hears=("tell",), verdict="passed"
    )


def compare_command(
    a: ArtifactArgument,
    b: Annotated[
        str, typer.Argument(help="The same, of the same model: in any format, dialect or rule.")
    ],
    source: Annotated[str, typer.Option(help="The original checkpoint, to measure both against.")],
    calibration: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="Output errors for the inputs that fp4convert calibrate saw, not for random ones.",
        ),
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
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    carry_out(
        words, quality.compare, draw_quality.draw_comparison, hears=("tell",), verdict="passed"
    )


def explain_command(
    code: Annotated[
        str | None, typer.Argument(help="Of a finding or an error, such as scale-layout.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain a finding or an error by its code: what it means, where it comes from, what to do. Without CODE: list all.

    Example: fp4convert explain global-scale-reciprocal
    """
    from fp4convert.cli import draw_quality, screen
    from fp4convert.report import explanations

    if code is None:
        screen.Screen(json).show(explanations.explain_all(), draw_quality.draw_codes)
    else:
        screen.Screen(json).show(explanations.explain(code), draw_quality.draw_code)


def doctor_command(json: JsonOption = False) -> None:
    """Tell what this machine offers: driver, GPUs, compiler, processor, caches, disk.

    Example: fp4convert doctor
    """
    from fp4convert.cli import doctor, draw_results, screen

    screen.Screen(json).show(doctor.examine(Path()), draw_results.draw_examination)


def recipes_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of them, or a TOML file: what it keeps, groups and stacks.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the recipes: modes to pick, and what is kept in the models of each family.

    Example: fp4convert recipes deepseek
    """
    from fp4convert.cli import draw_results, screen
    from fp4convert.recipes import toml_files

    if name is None:
        screen.Screen(json).show(toml_files.describe_known(), draw_results.draw_recipes)
    else:
        screen.Screen(json).show(toml_files.describe(name), draw_results.draw_recipe)


def analyze_command(
    source: SourceArgument,
    calibration: CalibrationOption = None,
    sample: Annotated[
        float | None,
        typer.Option(help="GB of the source to read: rows of all kinds. Default: 0.02."),
    ] = None,
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
    from fp4convert.cli import draw_quality
    from fp4convert.commands import analysis

    carry_out(words, analysis.analyze, draw_quality.draw_study, hears=("phases", "tell"))


def calibrate_command(
    source: SourceArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", readable=False, help="New safetensors file.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(help="A file of plain text; may be given several times.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="jsonl or parquet with 'text' or 'messages' in each record.")
    ] = None,
    self_generate: Annotated[
        int | None, typer.Option(help="No data: so many sequences are written by the model.")
    ] = None,
    samples: Annotated[
        int, typer.Option(help="At most so many, evenly spread over the data.")
    ] = 128,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each. Default: what the model takes, up to 2048, or 512 of its own."
        ),
    ] = None,
    gram: Annotated[
        str, typer.Option(help="none, diag (second moments), block:N or full, which GPTQ takes.")
    ] = "diag",
    device: Annotated[
        str, typer.Option(help="auto (a GPU, else the CPU), cpu, cuda or cuda:N.")
    ] = "auto",
    hold: Annotated[
        float, typer.Option(min=0, help="GB of weights held at once, with --self-generate.")
    ] = 8.0,
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
    from fp4convert.cli import draw_quality
    from fp4convert.commands import calibration

    carry_out(words, calibration.calibrate, draw_quality.draw_calibrated, hears=("phases", "tell"))
