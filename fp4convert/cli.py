"""The commands: each parses, calls one function of the floor below, and prints.  No logic lives here.

Results go to stdout, progress, warnings and errors to stderr; with --json stdout holds one document, also for an error.
Exit codes: 0 done, 1 our bug, 2 bad input or usage, 3 source unreachable or changed, 4 no access to it, 5 output side,
6 findings, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fp4convert.errors import Fp4Error, InputError, Interrupted
from fp4convert.options import (
    MOST_MEMORY,
    ActivationsOption,
    ArtifactArgument,
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
    TemplateOption,
    TokenOption,
    TransportOption,
    ViaOption,
    WorkersOption,
)
from fp4convert.sources import Access
from fp4convert.stops import Stopped, listen
from fp4convert.streams import sturdy_streams

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time, and the same everywhere
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn a checkpoint into NVFP4 or MXFP4 safetensors that inference engines load.",
)


@app.command("quantize")
def quantize_command(
    source: SourceArgument,
    format: FormatOption,
    output: OutputOption = None,
    dialect: DialectOption = "compressed-tensors",
    scale_rule: RuleOption = None,
    activations: ActivationsOption = 16,
    input_scale: InputScaleOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    recipe: RecipeOption = None,
    stack_order: StackOrderOption = None,
    stack_rows: StackRowsOption = None,
    keep_packed: KeepPackedOption = False,
    via: ViaOption = None,
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
    from fp4convert import cluster, convert, gpus, overview, parts, pipelines, publishing, render, sources
    from fp4convert import workers as crew

    screen = render.Screen(json, quiet)
    share = parts.choose_share(join or ray is not None, shard_index, num_shards, os.environ)
    goal = publishing.choose_publication(push_to_hub, private, _given(token))
    target = output or Path(f"{sources.name_of(source)}-{format.upper()}")
    access = _access(screen.tell, (revision, subfolder), token, (memory, transport), target)
    choice = (tuple(include or ()), tuple(exclude or ()), recipe, stack_order, stack_rows, keep_packed)
    request = convert.Request(format, dialect, scale_rule, activations, input_scale, *choice, via)
    with screen.phases() as phases:
        phases.begin("plan")
        work = pipelines.prepare(cluster.Errand(source, access, request, target, device, workers), ray)
        screen.warn([*(() if dry_run else work.warnings), *gpus.unused(device)])
        screen.note([parts.describe(share)] if share else [])
        settings = crew.Settings(device, workers, force, phases, join, share, screen.tell)
        order = publishing.Order(work, settings, goal)
        document: render.Document = work.describe(settings) if dry_run else publishing.fulfil(order).as_json()
    screen.show(document, overview.draw_plan if dry_run else render.draw_result)
    screen.warn(document["warnings"] if dry_run else ())


@app.command("inspect")
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
    opened = artifacts.open_artifact(artifact, _access(screen.tell, (revision, subfolder), token))
    original = sources.open_original(source, _access(screen.tell, (None, subfolder), token)) if source else None
    description = inspection.inspect(opened, original, full)
    screen.show(description, render.draw_artifact)
    raise typer.Exit(0 if description["healthy"] else 6)


@app.command("verify")
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
    opened = artifacts.open_artifact(artifact, _access(screen.tell, (revision, subfolder), token))
    original = sources.open_original(source, _access(screen.tell, (None, subfolder), token)) if source else None
    report = verification.verify(opened, original, verification.Gate(min_sqnr, max_nmse))
    screen.show(report.as_json(), render.draw_verification)
    raise typer.Exit(0 if report.passed else 6)


@app.command("dequantize")
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
        access = _access(screen.tell, (revision, subfolder), token, (memory, transport), output)
        opened = artifacts.open_quantized(artifact, access)
        todo = convert.prepare_dequantize(*opened, dtype)
        screen.warn([*todo.warnings, *gpus.unused(device)])
        settings = crew.Settings(device, workers, force, phases, tell=screen.tell)
        result = convert.dequantize(*opened, todo, output, settings)
    screen.show(result.as_json(), render.draw_result)


@app.command("merge")
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


@app.command("doctor")
def doctor_command(json: JsonOption = False) -> None:
    """Tell what this machine offers: driver, GPUs, compiler, processor, caches, disk.

    Example: fp4convert doctor
    """
    from fp4convert import doctor, render

    render.Screen(json).show(doctor.examine(Path()), render.draw_examination)


@app.command("recipes")
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


@app.command("transcode")
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
        access = _access(screen.tell, (revision, subfolder), token, (memory, transport), output)
        opened = artifacts.open_artifact(artifact, access)
        donor = sources.open_source(template) if template else None
        todo = convert.prepare_transcode(opened, convert.TranscodeRequest(dialect, format, scale_layout), donor)
        screen.warn(todo.warnings)
        settings = crew.Settings("cpu", workers, force, phases, tell=screen.tell)
        result = convert.transcode(opened, todo, output, settings, donor)
    screen.show(result.as_json(), render.draw_result)


def _access(
    tell: Callable[[str], None],
    where: tuple[str | None, str | None],
    token: str | None,
    way: tuple[float, str] = (1.0, "http"),
    output: Path | None = None,
) -> Access:
    """How the Hub is asked; `where` is a revision and a subfolder, `way` the GB of memory and the transport."""
    memory, transport = way
    return Access(*where, _given(token), int(min(memory, MOST_MEMORY) * 10**9), tell, transport, output)


def _given(token: str | None) -> str | None:
    """None for a token of nothing, as --token "$TOKEN" gives where that is not set."""
    return (token or "").strip() or None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fp4convert {version('fp4convert')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; every expected failure becomes one message and its exit code."""
    listen()
    with sturdy_streams():
        _main()


def _main() -> None:
    try:
        sys.exit(app(standalone_mode=False))
    except Fp4Error as error:
        _fail(error)
    except Stopped as stopped:
        command = shlex.join(["fp4convert", *_without_token(sys.argv[1:])])
        _fail(Interrupted(command, stopped.is_terminated))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if not message:  # the bare command: its help has been printed
            sys.exit(InputError.exit_code)
        _fail(InputError("usage", message, "See: fp4convert --help."))


def _without_token(arguments: list[str]) -> list[str]:
    """The arguments, but for --token and what follows it: no message holds a token."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [argument for before, argument in pairs if before != "--token" and not argument.startswith("--token")]


def _fail(error: Fp4Error) -> NoReturn:
    from fp4convert.render import Screen

    Screen(is_json="--json" in sys.argv).fail(error)
    sys.exit(error.exit_code)
