"""Make functions of options; declare options of commands that look.

The options of the commands that write are in conversion/options.py, for they are planned by them.
The docstring of a class is the help of its command.  Nothing is printed.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from inspect import Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, ParamSpec, Protocol, TypeVar, cast, get_args
from urllib.parse import urlsplit

from fp4convert.commands.idle_options import refuse_idle_options
from fp4convert.conversion.options import (
    Adapters,
    AdapterScale,
    ArtifactArgument,
    EngineName,
    Page,
    SourceArgument,
    Statistics,
)
from fp4convert.conversion.work_options import DEVICES, AccessOptions, DeviceOptions, Force, ignore
from fp4convert.numerics.formats import GRAMS
from fp4convert.progress import Phases
from fp4convert.recipes.options import (
    DEVICE,
    OUTPUT,
    QUALITY,
    TARGET,
    Option,
    RecipeName,
    RecipeOptions,
    Reference,
    declared_in,
    help_with_words,
    one_of,
)

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741  (options of a command)
O_contra = TypeVar("O_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Sarif = Annotated[
    Reference | None,
    Option("Write the findings as SARIF 2.1.0, for code scanning.", parse=Path, panel=OUTPUT),
]

Merged = Annotated[
    Reference | Iterable[Reference] | None,
    Option(
        "The LoRA adapter that --source was merged with, as quantize --lora had it.",
        parse=str,
        is_several=True,
        panel=QUALITY,
        value="<path>",
    ),
]

ByLayer = Annotated[
    bool,
    Option("Also what each layer costs: two more runs for every layer.", panel=QUALITY),
]


class Public(Protocol[P, O_contra, R_co]):
    """A public function, called with options by name or run with all."""

    @property
    def run(self) -> Callable[[O_contra], R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def public(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Public[P, O, R]]:
    """Let a function of an options object take them by name.

    options  the dataclass; its fields are the parameters, for a type checker, too
    """

    def decorate(run: Callable[[O], R]) -> Public[P, O, R]:
        kind = cast(type, options)
        parameters = [
            each.replace(annotation=getattr(each.annotation, "__origin__", each.annotation))
            for each in signature(kind).parameters.values()
        ]
        returned = run.__annotations__.get("return", Signature.empty)
        own_signature = Signature(parameters, return_annotation=returned)

        @wraps(run)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            places = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
            if len(args) > len(places):
                taken = f"takes {', '.join(places)} without a name"
                given = ", ".join(f"NAME={value!r}" for value in args[len(places) :])
                raise TypeError(f"{run.__name__}() {taken}; the others need theirs: {given}")
            try:
                bound = own_signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{run.__name__}() {error}") from None
            for name, kinds in numbers.items():
                if isinstance(bound.get(name), str):
                    expected = one_of(kind.__name__ for kind in kinds)
                    raise TypeError(f"{run.__name__}() {name}={bound[name]!r}; expected {expected}")
            return checked(options(*args, **kwargs))

        def checked(given: O) -> R:
            refuse_idle_options(given)
            _check_hub_address()
            return run(given)

        numbers: dict[str, list[type]] = {}  # the types of options that are no texts
        for each in declared_in(kind):
            kinds = [one for one in (each.type, *get_args(each.type)) if one in (int, float, bool)]
            if kinds and str not in get_args(each.type):
                numbers[each.name] = kinds
        rows = [f"{each.name}: {help_with_words(each.option)}" for each in declared_in(kind)]
        called.__doc__ = "\n".join([cleandoc(run.__doc__ or ""), "", *rows])
        made: Any = called
        made.__signature__ = own_signature
        made.run = checked
        return cast(Public[P, O, R], made)

    return decorate


def _check_hub_address() -> None:
    """Raise InputError where HF_ENDPOINT is no address.

    huggingface_hub cannot even be loaded then.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        urlsplit(address)
    except ValueError:
        from fp4convert.storage.hub.http import check_endpoint

        check_endpoint(address)


@dataclass(eq=False, repr=False)
class InspectOptions(AccessOptions):
    """Show what an artifact is, and whether it is healthy.

    Headers, records and scales are read. Exit code 6 when something is wrong.

    Example: fp4convert inspect ./Llama-3.1-8B-NVFP4
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    engine: EngineName = None
    source: Annotated[
        Reference | None,
        Option("The original checkpoint: compare values with it, too.", parse=str),
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
        Option(
            "The original checkpoint, to measure every tensor against.", parse=str, panel=QUALITY
        ),
    ] = None
    lora: Merged = ()
    min_sqnr: Annotated[
        float | None,
        Option(
            "Fail when the SQNR of a tensor is below this many dB.", panel=QUALITY, value="<db>"
        ),
    ] = None
    max_nmse: Annotated[
        float | None,
        Option("Fail when the normalized squared error of a tensor is above this.", panel=QUALITY),
    ] = None
    calibration: Annotated[
        Reference | None,
        Option(
            "Measure the output error of every linear layer, for the inputs recorded here.",
            parse=Path,
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
        Option(
            "Whose signature the artifact must have: a public key in PEM.",
            parse=Path,
            panel=QUALITY,
        ),
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


@dataclass(kw_only=True, eq=False, repr=False)
class TextOptions(AccessOptions):
    """Which text a model is given, and where it runs.

    USUAL_LENGTH  most tokens of a sample where a person does not say
    """

    USUAL_LENGTH: ClassVar[int] = 2048
    text: Annotated[
        Reference | Iterable[Reference] | None,
        Option(
            "A file of plain text; may be given several times.",
            parse=Path,
            is_several=True,
            panel=TARGET,
        ),
    ] = None
    dataset: Annotated[
        Reference | None,
        Option(
            "jsonl or parquet: conversations ('messages'), which the model's chat template writes,"
            " with images or sound its processor, or 'text'.",
            parse=Path,
            flags=("--dataset", "--chat"),
            panel=TARGET,
        ),
    ] = None
    self_generate: Annotated[
        int | None,
        Option("No data: let the model write this many sequences.", panel=TARGET),
    ] = None
    samples: Annotated[
        int, Option("Largest number of samples, spread evenly over the data.", panel=QUALITY)
    ] = 128
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens of a sample. Default: up to 2048, or 512 with --self-generate.",
            panel=QUALITY,
        ),
    ] = None
    device: Annotated[
        str, Option("auto takes a GPU, else the CPU.", panel=DEVICE, value=DEVICES)
    ] = DeviceOptions.device
    hold: Annotated[
        float,
        Option(
            "With --self-generate: GB of weights held in memory.",
            least=0,
            panel=DEVICE,
            value="<gb>",
        ),
    ] = 8.0


@dataclass(eq=False, repr=False)
class CalibrateOptions(TextOptions):
    """Record the inputs of linear layers, for better rounding.

    Text runs through the model, a layer at a time; statistics of what every linear layer is given
    are kept.

    Example: fp4convert calibrate ./Llama-3.1-8B -o llama.safetensors --text book.txt --gram
    block:128
    """

    source: SourceArgument
    output: Annotated[
        Reference,
        Option("New safetensors file.", parse=Path, flags=("--output", "-o"), panel=TARGET),
    ]
    _: KW_ONLY
    gram: Annotated[
        str,
        Option(
            "Input statistics: diag for importance and awq, block:N or full for gptq.",
            panel=QUALITY,
            value=f"[{'|'.join(GRAMS)}]",
        ),
    ] = "diag"
    sensitivity: Annotated[
        bool,
        Option(
            "Also measure what outputs lose by each part in each format, for --target-bits.",
            panel=QUALITY,
        ),
    ] = False
    lora: Adapters = ()
    lora_scale: AdapterScale = None
    force: Force = False
    phases: Phases | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class WindowOptions(TextOptions):
    """Which text two models read, window by window."""

    USUAL_LENGTH: ClassVar[int] = 512
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens of a window; each is read by itself. Default: up to 512.",
            panel=QUALITY,
        ),
    ] = None


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
            parse=str,
            panel=QUALITY,
        ),
    ] = None
    calibration: Statistics = None
    lora: Merged = ()
    global_scale: Annotated[
        Reference | None,
        Option("What quantize had as --global-scale.", parse=str, panel=QUALITY),
    ] = None
    input_scale: Annotated[
        Reference | None,
        Option(
            "The artifact or file that quantize had as --input-scale.", parse=str, panel=QUALITY
        ),
    ] = None
    recipe: RecipeName = None


@dataclass(eq=False, repr=False)
class AttestOptions:
    """Sign the files of an artifact, as OpenSSF model signing does.

    The signature, model.sig, has the hash of every file beside it. verify checks it.

    Example: fp4convert attest ./Llama-3.1-8B-NVFP4 --key private.pem
    """

    artifact: Annotated[
        Reference, Option("The folder of an artifact on this disk.", parse=Path, is_argument=True)
    ]
    _: KW_ONLY
    key: Annotated[
        Reference,
        Option(
            "Private key in PEM of an elliptic curve: P-256, P-384 or P-521; no password.",
            parse=Path,
            panel=TARGET,
        ),
    ]
    force: Annotated[bool, Option("Replace the signature that is there.", panel=OUTPUT)] = False
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class CompareOptions(WindowOptions):
    """Show which of several artifacts is best, and by how much.

    All are measured against one source, tensor by tensor, and with a text by their predictions.
    Exit code 6 when one of them is not of that source.

    Example: fp4convert compare ./M-NVFP4 ./M-MXFP4 --source ./M --report page.html
    """

    artifacts: Annotated[
        Iterable[Reference],
        Option(
            "Two or more artifacts of one model, in any formats and dialects.",
            parse=str,
            is_argument=True,
            is_several=True,
        ),
    ]
    _: KW_ONLY
    source: Annotated[
        Reference,
        Option("The original checkpoint, to measure all against.", parse=str, panel=TARGET),
    ]
    lora: Merged = ()
    calibration: Annotated[
        Reference | None,
        Option(
            "Measure output errors for the inputs that a calibration file recorded.",
            parse=Path,
            panel=QUALITY,
        ),
    ] = None
    by_layer: ByLayer = False
    report: Annotated[
        Reference | None,
        Option(
            "Write an HTML page of all artifacts, and its figures beside it as .csv and .json.",
            parse=Path,
            panel=OUTPUT,
        ),
    ] = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class EvaluateOptions(WindowOptions):
    """Compare an artifact's predictions with its source's.

    Both read the same text, a layer at a time: KL divergence, how often the likeliest token is the
    same, perplexity of both. Exit code 6 when a limit is missed.

    Example: fp4convert evaluate ./Llama-3.1-8B-NVFP4 --source ./Llama-3.1-8B --text book.txt
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    source: Annotated[
        Reference,
        Option("The original checkpoint, to compare with.", parse=str, panel=TARGET),
    ]
    lora: Merged = ()
    by_layer: ByLayer = False
    max_kl: Annotated[
        float | None,
        Option("Fail when the mean KL divergence is above this many nats.", panel=QUALITY),
    ] = None
    min_top1: Annotated[
        float | None,
        Option(
            "Fail when the likeliest token is the same less often; 0.95 is 95 %.", panel=QUALITY
        ),
    ] = None
    max_ppl_ratio: Annotated[
        float | None,
        Option(
            "Fail when perplexity over the source's is above this; 1.02 is 2 % more.",
            panel=QUALITY,
        ),
    ] = None
    card: Annotated[
        Reference | None,
        Option(
            "Write the figures into a model card; what else it says stays.",
            parse=Path,
            panel=OUTPUT,
        ),
    ] = None
    report: Page = None
    sarif: Sarif = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class MergeOptions:
    """Finish a conversion whose parts are done.

    Checks every shard (reading what no seal proves unchanged: docs/resume.md), compares scale
    groups, and writes the index and the records.

    Example: fp4convert merge ./Llama-3.1-8B-NVFP4
    """

    output: Annotated[
        Reference,
        Option("The folder that holds all parts.", parse=Path, is_argument=True),
    ]
    _: KW_ONLY
    phases: Phases | None = None
    tell: Callable[[str], None] = ignore


def as_path(file: Reference | None) -> Path | None:
    """Return the path of a file that may not be named."""
    return None if file is None else Path(file)


def as_warnings(lines: Iterable[str]) -> None:
    """Warn as Python does, at the line that called the package.

    The text is safe for a terminal.
    """
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("fp4convert."):
        level += 1
    for line in lines:
        from fp4convert.report.text import escape

        warnings.warn(escape(line), UserWarning, stacklevel=level + 1)
