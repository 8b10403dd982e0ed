"""Declare the options of commands in which models read a text.

The docstring of a class is the help of its command.
"""

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

from fp4convert.errors import InputError, shell_line
from fp4convert.numerics.formats import FP4_FORMATS, GPTQ, GRAMS
from fp4convert.options.access import DEVICES, AccessOptions, DeviceOptions, Force
from fp4convert.options.arguments import (
    Adapters,
    AdapterScale,
    ArtifactArgument,
    ByLayer,
    LargestKl,
    LeastTop1,
    Merged,
    Page,
    Sarif,
    SourceArgument,
)
from fp4convert.progress import Phases
from fp4convert.recipes.options import DEVICE, OUTPUT, QUALITY, TARGET, Option, Reference


@dataclass(kw_only=True, eq=False, repr=False)
class TextOptions(AccessOptions):
    """Which text a model is given, and where it runs.

    USUAL_LENGTH  default of the most tokens of a sample
    """

    USUAL_LENGTH: ClassVar[int] = 2048
    text: Annotated[
        Reference | Iterable[Reference] | None,
        Option(
            "A file of plain text; may be given several times.",
            is_several=True,
            panel=TARGET,
            value="<path>",
        ),
    ] = None
    dataset: Annotated[
        Reference | None,
        Option(
            "jsonl or parquet: conversations ('messages'), which the model's chat template writes,"
            " with images or sound its processor, or 'text'.",
            flags=("--dataset", "--chat"),
            panel=TARGET,
        ),
    ] = None
    self_generate: Annotated[
        int | None, Option("No data: let the model write this many sequences.", panel=TARGET)
    ] = None
    samples: Annotated[
        int,
        Option(
            "Largest number of samples, spread evenly over the data.", panel=QUALITY, is_rare=True
        ),
    ] = 128
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens of a sample. Default: up to 2048, or 512 with --self-generate.",
            panel=QUALITY,
            is_rare=True,
        ),
    ] = None
    device: Annotated[
        str, Option("auto takes a GPU, else the CPU.", panel=DEVICE, value=DEVICES, is_rare=True)
    ] = DeviceOptions.device
    hold: Annotated[
        float,
        Option(
            "With --self-generate: GB of weights held in memory.",
            least=0,
            panel=DEVICE,
            value="<gb>",
            is_rare=True,
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
        Reference, Option("New safetensors file.", flags=("--output", "-o"), panel=TARGET)
    ]
    _: KW_ONLY
    gram: Annotated[
        str | None,
        Option(
            "Input statistics: diag (default) for importance and awq, block:N or full for gptq."
            " With --for-method full where it takes at most 16 GB, else block:128.",
            panel=QUALITY,
            value=f"[{'|'.join(GRAMS)}]",
        ),
    ] = None
    for_method: Annotated[
        str | None,
        Option(
            "Round layer by layer meanwhile: statistics of inputs behind rounded weights, for"
            " this method of quantize. Needs --format.",
            (GPTQ,),
            panel=QUALITY,
        ),
    ] = None
    format: Annotated[
        str | None,
        Option(
            "With --for-method or --activations 4: of quantize.", tuple(FP4_FORMATS), panel=QUALITY
        ),
    ] = None
    scale_rule: Annotated[
        str | None,
        Option("With --for-method: of quantize.", panel=QUALITY, value="<rule>", is_rare=True),
    ] = None
    activations: Annotated[
        int, Option("4: record Grams of inputs as engines round them.", ("16", "4"), panel=QUALITY)
    ] = 16
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

    def __post_init__(self) -> None:
        if os.fspath(self.output).endswith("/"):
            detail = f"-o {self.output} names a folder; expected a new file"
            step = f"Name one: {shell_line('-o', f'{self.output}NAME.safetensors')}"
            raise InputError("output-name", detail, step)
        super().__post_init__()


@dataclass(kw_only=True, eq=False, repr=False)
class WindowOptions(TextOptions):
    """Which text two models read, window by window."""

    USUAL_LENGTH: ClassVar[int] = 512
    sequence_length: Annotated[
        int | None,
        Option("Tokens of a window; each is read by itself. Default: up to 512.", panel=QUALITY),
    ] = None


@dataclass(eq=False, repr=False)
class CompareOptions(WindowOptions):
    """Rank artifacts and other tools' weights beside their source.

    All are measured against one source: with a text by their predictions, which rank them, and
    tensor by tensor. Exit code 6 when an artifact is not of that source.

    Example: fp4convert compare ./M-NVFP4 ./M-Q4_K_M.gguf --source ./M --text book.txt
    """

    artifacts: Annotated[
        Iterable[Reference],
        Option(
            "Two or more of one model: artifacts in any format and dialect, GGUF files, GPTQ, AWQ,"
            " MLX's integers.",
            is_argument=True,
            is_several=True,
        ),
    ]
    _: KW_ONLY
    source: Annotated[
        Reference, Option("The original checkpoint, to measure all against.", panel=TARGET)
    ]
    lora: Merged = ()
    calibration: Annotated[
        Reference | None,
        Option(
            "Measure output errors for the inputs that a calibration file recorded.", panel=QUALITY
        ),
    ] = None
    by_layer: ByLayer = False
    report: Annotated[
        Reference | None,
        Option(
            "Write an HTML page of all artifacts, and its figures beside it as .csv and .json.",
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
    source: Annotated[Reference, Option("The original checkpoint, to compare with.", panel=TARGET)]
    lora: Merged = ()
    by_layer: ByLayer = False
    max_kl: LargestKl = None
    min_top1: LeastTop1 = None
    max_ppl_ratio: Annotated[
        float | None,
        Option(
            "Fail when perplexity over the source's is above this; 1.02 is 2 % more.",
            panel=QUALITY,
            is_rare=True,
        ),
    ] = None
    baseline: Annotated[
        Reference | None,
        Option(
            "Fail when KL is worse than in this record of evaluate --json. It is of the same text;"
            " worse is above 1.05 times, and by more than two standard errors.",
            panel=QUALITY,
        ),
    ] = None
    card: Annotated[
        Reference | None,
        Option("Write the figures into a model card; what else it says stays.", panel=OUTPUT),
    ] = None
    report: Page = None
    sarif: Sarif = None
    phases: Phases | None = None
