"""Declare the options of commands that look, and of those that explain.

The docstring of a class is the help of its command.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from fp4convert.options.access import AccessOptions, DeviceOptions
from fp4convert.options.arguments import (
    ArtifactArgument,
    EngineName,
    GpuName,
    LargestNmse,
    LeastSqnr,
    Merged,
    Page,
    Sarif,
    SourceArgument,
    Statistics,
)
from fp4convert.progress import Phases
from fp4convert.recipes.options import (
    OUTPUT,
    QUALITY,
    TARGET,
    Option,
    RecipeName,
    RecipeOptions,
    Reference,
)


@dataclass(eq=False, repr=False)
class InspectOptions(AccessOptions):
    """Show what an artifact is, and whether it is healthy.

    Headers, records and scales are read. Exit code 6 when something is wrong.

    Example: fp4convert inspect ./Llama-3.1-8B-NVFP4
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    engine: EngineName = None
    gpu: GpuName = None
    source: Annotated[
        Reference | None, Option("The original checkpoint: compare values with it, too.")
    ] = None
    full: Annotated[bool, Option("Read every block scale, not a sample.")] = False
    sarif: Sarif = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class VerifyOptions(AccessOptions):
    """Check an artifact: files, scales, and loss by its source.

    Every file is hashed and every scale read; with --source every tensor is measured. Exit code 6
    when something is wrong.

    Example: fp4convert verify ./Llama-3.1-8B-NVFP4 --source ./Llama-3.1-8B --min-sqnr 18
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    engine: EngineName = None
    source: Annotated[
        Reference | None,
        Option("The original checkpoint, to measure every tensor against.", panel=QUALITY),
    ] = None
    lora: Merged = ()
    min_sqnr: LeastSqnr = None
    max_nmse: LargestNmse = None
    calibration: Annotated[
        Reference | None,
        Option(
            "Measure the output error of every linear layer, for the inputs recorded here.",
            panel=QUALITY,
        ),
    ] = None
    max_output_error: Annotated[
        float | None,
        Option(
            "With --calibration: fail when the output error of a layer is above this; 0.1 is 10 %.",
            panel=QUALITY,
        ),
    ] = None
    public_key: Annotated[
        Reference | None,
        Option("Whose signature the artifact must have: a public key in PEM.", panel=QUALITY),
    ] = None
    report: Page = None
    sarif: Sarif = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class AnalyzeOptions(RecipeOptions, AccessOptions):
    """Measure what each format would lose, before converting.

    Which format, which rule and which modules: what every kind of module loses in each form. Writes
    nothing.

    Example: fp4convert analyze ./Llama-3.1-8B
    """

    source: SourceArgument
    _: KW_ONLY
    calibration: Statistics = None
    sample: Annotated[
        float | None,
        Option(
            "GB of the source to read, from every kind of module. Default: 0.02.",
            panel=QUALITY,
            value="<gb>",
        ),
    ] = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class ReproduceOptions(DeviceOptions):
    """Make an artifact again from its record, and compare.

    Every file by its hash. Nothing stays on the disk. Exit code 6 where a file differs.

    Example: fp4convert reproduce ./Llama-3.1-8B-NVFP4 --source ./Llama-3.1-8B
    """

    artifact: Annotated[
        Reference,
        Option(
            "An artifact, or its quantization_config.json alone: a folder, a file, or ORG/NAME.",
            is_argument=True,
        ),
    ]
    _: KW_ONLY
    source: Annotated[
        Reference | None,
        Option(
            "What it was made from. Default: the repository and commit in the record.",
            panel=QUALITY,
        ),
    ] = None
    base: Annotated[Reference | None, Option("What quantize had as --base.", panel=QUALITY)] = None
    calibration: Statistics = None
    lora: Merged = ()
    global_scale: Annotated[
        Reference | None, Option("What quantize had as --global-scale.", panel=QUALITY)
    ] = None
    input_scale: Annotated[
        Reference | None,
        Option("The artifact or file that quantize had as --input-scale.", panel=QUALITY),
    ] = None
    recipe: RecipeName = None


@dataclass(eq=False, repr=False)
class AttestOptions:
    """Sign the files of an artifact, as OpenSSF model signing does.

    The signature, model.sig, has the hash of every file beside it. verify checks it.

    Example: fp4convert attest ./Llama-3.1-8B-NVFP4 --key private.pem
    """

    artifact: Annotated[
        Reference, Option("The folder of an artifact on this disk.", is_argument=True)
    ]
    _: KW_ONLY
    key: Annotated[
        Reference,
        Option(
            "Private key in PEM of an elliptic curve: P-256, P-384 or P-521; no password.",
            panel=TARGET,
        ),
    ]
    source: Annotated[
        Reference | None,
        Option(
            "What it was made from: derivation.json will state its hashes, the options and the"
            " version.",
            panel=QUALITY,
        ),
    ] = None
    force: Annotated[bool, Option("Replace the signature that is there.", panel=OUTPUT)] = False
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class ExplainOptions:
    """Explain a finding or an error by its code.

    What it means, where it comes from, what to do. Without CODE the subjects are listed; with a
    subject its codes are, one in a line.

    Example: fp4convert explain global-scale-reciprocal
    """

    code: Annotated[
        str | None,
        Option(
            "Code of a finding or an error, such as scale-layout; a subject, such as hub; an"
            " engine; a card, such as rtx5090; or agents, for the page that agents follow.",
            is_argument=True,
            is_code=True,
        ),
    ] = None


@dataclass(eq=False, repr=False)
class DoctorOptions:
    """Show what this machine offers: GPUs, compiler, disk.

    Example: fp4convert doctor
    """


@dataclass(eq=False, repr=False)
class RecipesOptions:
    """List the recipes: modes, and families of models.

    Modes are yours to pick; a family says what is kept in its models.

    Example: fp4convert recipes deepseek
    """

    name: Annotated[
        str | None,
        Option("Show one recipe, or a TOML file of your own.", is_argument=True, is_recipe=True),
    ] = None
    _: KW_ONLY
    engine: Annotated[
        str | None,
        Option(
            "With --yaml: the engine, vllm, whose recipes get variants of this family.",
            ("vllm",),
            flags=("--for",),
            panel=TARGET,
            value="vllm",
        ),
    ] = None
    yaml: Annotated[
        bool, Option("Print the variants of vllm-project/recipes that vLLM loaded.", panel=OUTPUT)
    ] = False
