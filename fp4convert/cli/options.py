"""Types and help of the command line's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def _one_of(*words: str) -> Callable[[str], list[str]]:
    """What a shell completes a word to: those of `words` that begin like it."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def complete_recipe(incomplete: str) -> list[str]:
    """The same for names of recipes."""
    from fp4convert.recipes.toml_files import known_names

    return _one_of(*known_names())(incomplete)


SourceArgument = Annotated[
    str, typer.Argument(help="A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.")
]
ArtifactArgument = Annotated[
    str, typer.Argument(help="Four-bit weights: a folder, one file, or ORG/NAME on the Hub.")
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format", help="Target: nvfp4 or mxfp4.", autocompletion=_one_of("nvfp4", "mxfp4")
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", readable=False, help="New folder. Default: ./NAME-FORMAT."),
]
NewFolderOption = Annotated[
    Path, typer.Option("--output", "-o", readable=False, help="New folder.")
]
DialectOption = Annotated[
    str,
    typer.Option(
        help="compressed-tensors, modelopt, quark, gpt-oss, deepseek, mlx, comfy, gguf or plain.",
        autocompletion=_one_of(
            "compressed-tensors",
            "modelopt",
            "quark",
            "gpt-oss",
            "deepseek",
            "mlx",
            "comfy",
            "gguf",
            "plain",
        ),
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="plain: linear (default), 128x4, 8x4, deepgemm, k_major, interleaved, appended.",
        autocompletion=_one_of(
            "linear", "128x4", "8x4", "deepgemm", "k_major", "interleaved", "appended"
        ),
    ),
]
TemplateOption = Annotated[
    str | None, typer.Option(help="Dialect gguf: a GGUF file of the model, whose frame it gets.")
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="nvfp4: mse (default), amax, four-over-six, importance; mxfp4: mse (default), floor, even, ceil, importance."
        " With --method gptq importance is the default.",
        autocompletion=_one_of(
            "mse", "amax", "four-over-six", "importance", "floor", "even", "ceil"
        ),
    ),
]
ActivationsOption = Annotated[
    int, typer.Option(help="16: weights alone; 4: for the FP4 tensor cores, activations too.")
]
InputScaleOption = Annotated[
    str | None,
    typer.Option(
        help="With --activations 4, nvfp4: a multiplier; or an artifact or a calibration that has them. Default: 1.0."
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option("--kv-cache", help="fp8: scales and records for a cache of keys and values."),
]
IncludeOption = Annotated[
    list[str] | None, typer.Option(help="Quantize these modules too, though the recipe keeps them.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(help="Keep these modules as they are. Glob, or re:REGEX.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="A mode or family that fp4convert recipes lists, or a TOML file.",
        autocompletion=complete_recipe,
    ),
]
StackOrderOption = Annotated[
    str | None, typer.Option(help="Of stacks of experts, before any recipe: out_in or in_out.")
]
StackRowsOption = Annotated[
    str | None, typer.Option(help="Of gate and up in one such stack: concatenated or interleaved.")
]
KeepPackedOption = Annotated[
    bool, typer.Option("--keep-packed", help="What is FP8, int4 or FP4 and stays is not made bf16.")
]
ViaOption = Annotated[
    str | None,
    typer.Option(help="fp8: round weights to FP8 first, for comparison; it loses accuracy."),
]
MethodOption = Annotated[
    str,
    typer.Option(
        help="rtn, gptq (needs a calibration made with --gram), or awq and smooth, which fold factors.",
        autocompletion=_one_of("rtn", "gptq", "awq", "smooth"),
    ),
]
CalibrationOption = Annotated[
    str | None, typer.Option(help="Statistics that fp4convert calibrate made of this source.")
]
TargetSizeOption = Annotated[
    float | None, typer.Option(help="GB of the artifact: measured formats for modules, to fit it.")
]
TargetBitsOption = Annotated[
    float | None, typer.Option(help="The same by bits per weight, over modules else four-bit.")
]
DeviceOption = Annotated[
    str,
    typer.Option(help="auto (GPUs, else the CPU), cpu, cuda or cuda:N. The bytes are the same."),
]
WorkersOption = Annotated[
    int, typer.Option(min=0, help="Threads; 0 is as many as suit the device.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Discard what an earlier run of fp4convert left in the output."),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="On the Hub: branch, tag or commit. Default: main.")
]
SubfolderOption = Annotated[
    str | None, typer.Option(help="Folder of the source, where the checkpoint is.")
]
TokenOption = Annotated[
    str | None, typer.Option(help="For the Hub. Better: hf auth login, or HF_TOKEN.")
]
TransportOption = Annotated[str, typer.Option(help="From the Hub: http, or xet (through hf_xet).")]
MemoryOption = Annotated[
    float, typer.Option(min=0, help="GB of what the Hub sends that are kept for a second reading.")
]
JoinOption = Annotated[
    bool,
    typer.Option(
        "--join", help="One of several such processes, on any machines that share OUTPUT."
    ),
]
IndexOption = Annotated[
    int | None, typer.Option(help="Do this part alone, from 0; then: fp4convert merge OUTPUT.")
]
PartsOption = Annotated[
    int | None,
    typer.Option(help="How many parts. Default for both: Slurm, torchrun, SkyPilot say so."),
]
RayOption = Annotated[
    str | None,
    typer.Option(help="One worker on every node of this Ray cluster: auto, or HOST:PORT."),
]
PushOption = Annotated[
    str | None,
    typer.Option("--push-to-hub", help="Upload the result to this repository, ORG/NAME."),
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        readable=False,
        help="Write a page of HTML on what was lost, to look at and to share.",
    ),
]
SarifOption = Annotated[
    Path | None,
    typer.Option(
        "--sarif", readable=False, help="Write the findings as SARIF 2.1.0, for code scanning."
    ),
]
PrivateOption = Annotated[
    bool,
    typer.Option("--private", help="With --push-to-hub: into a repository that is not public."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, for errors too.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")]
