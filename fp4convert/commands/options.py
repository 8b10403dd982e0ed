"""Make functions of options; declare options of commands that look.

The options of the commands that write are in conversion/options.py, for they are planned by them.
The docstring of a class is the help of its command.  Nothing is printed.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from inspect import Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, cast

from fp4convert.conversion.options import (
    AccessOptions,
    ArtifactArgument,
    DeviceOptions,
    Force,
    Page,
    SourceArgument,
    Statistics,
)
from fp4convert.numerics.formats import GRAMS
from fp4convert.progress import Phases
from fp4convert.recipes.options import (
    Option,
    RecipeOptions,
    Reference,
    declared_in,
    one_of,
)

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741  (options of a command)
O_contra = TypeVar("O_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Sarif = Annotated[
    Reference | None,
    Option("Write the findings as SARIF 2.1.0, for code scanning.", parse=Path),
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
            try:
                own_signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{run.__name__}() {error}") from None
            return run(options(*args, **kwargs))

        rows = [f"{each.name}: {each.option.help}" for each in declared_in(kind)]
        called.__doc__ = "\n".join([cleandoc(run.__doc__ or ""), "", *rows])
        made: Any = called
        made.__signature__ = own_signature
        made.run = run
        return cast(Public[P, O, R], made)

    return decorate


@dataclass(eq=False, repr=False)
class InspectOptions(AccessOptions):
    """Tell what an artifact is and whether it is healthy, from its headers, records and scales.

    Exit code 6 when something is wrong with it. Example: fp4convert inspect ./Llama-3.1-8B-NVFP4
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    source: Annotated[
        Reference | None,
        Option("The original checkpoint, which decides what statistics cannot.", parse=str),
    ] = None
    full: Annotated[bool, Option("Read every block scale, however many.")] = False
    sarif: Sarif = None


@dataclass(eq=False, repr=False)
class VerifyOptions(AccessOptions):
    """Re-hash every file and read every scale; with --source, measure every tensor.

    Exit code 6 when something is wrong. Example: fp4convert verify ./M-NVFP4 --source ./M
    --min-sqnr 18
    """

    artifact: ArtifactArgument
    _: KW_ONLY
    source: Annotated[
        Reference | None,
        Option("The original checkpoint, to measure every tensor against.", parse=str),
    ] = None
    min_sqnr: Annotated[
        float | None, Option("Fail when a tensor's SQNR is below this many dB.")
    ] = None
    max_nmse: Annotated[
        float | None, Option("Fail when a tensor's normalised squared error is above this.")
    ] = None
    outputs: Annotated[
        bool, Option("Measure what every linear layer answers, for random inputs.")
    ] = False
    calibration: Annotated[
        Reference | None,
        Option("The same for the inputs that fp4convert calibrate saw of the source.", parse=Path),
    ] = None
    max_output_error: Annotated[
        float | None, Option("Fail when a layer's output error is above this; 0.1 is 10 %.")
    ] = None
    report: Page = None
    sarif: Sarif = None


@dataclass(eq=False, repr=False)
class CompareOptions(AccessOptions):
    """Put two artifacts side by side against one source, tensor by tensor:
    which of them is better, and by how much.

    Exit code 6 when one of them is not of that source. Example: fp4convert compare ./M-NVFP4
    ./M-MXFP4 --source ./M
    """

    a: ArtifactArgument
    b: Annotated[
        Reference,
        Option("The same, of the same model: in any format, dialect or rule.", is_argument=True),
    ]
    _: KW_ONLY
    source: Annotated[
        Reference, Option("The original checkpoint, to measure both against.", parse=str)
    ]
    calibration: Annotated[
        Reference | None,
        Option(
            "Output errors for the inputs that fp4convert calibrate saw, not for random ones.",
            parse=Path,
        ),
    ] = None


@dataclass(eq=False, repr=False)
class AnalyzeOptions(RecipeOptions, AccessOptions):
    """Tell which format, which rule and which modules: what every kind of
    module loses in each form. Writes nothing.

    Example: fp4convert analyze ./Llama-3.1-8B
    """

    source: SourceArgument
    _: KW_ONLY
    calibration: Statistics = None
    sample: Annotated[
        float | None, Option("GB of the source to read: rows of all kinds. Default: 0.02.")
    ] = None
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class CalibrateOptions(AccessOptions):
    """Run text through the model, a layer at a time, and keep what every linear layer is given.

    Example: fp4convert calibrate ./Llama-3.1-8B -o llama.safetensors --text book.txt --gram
    block:128
    """

    source: SourceArgument
    output: Annotated[
        Reference, Option("New safetensors file.", parse=Path, flags=("--output", "-o"))
    ]
    _: KW_ONLY
    text: Annotated[
        Reference | Iterable[Reference] | None,
        Option("A file of plain text; may be given several times.", parse=Path, is_several=True),
    ] = None
    dataset: Annotated[
        Reference | None,
        Option("jsonl or parquet with 'text' or 'messages' in each record.", parse=Path),
    ] = None
    self_generate: Annotated[
        int | None, Option("No data: so many sequences are written by the model.")
    ] = None
    samples: Annotated[int, Option("At most so many, evenly spread over the data.")] = 128
    sequence_length: Annotated[
        int | None,
        Option("Tokens of each. Default: what the model takes, up to 2048, or 512 of its own."),
    ] = None
    gram: Annotated[
        str, Option(f"{one_of(GRAMS)}: diag keeps second moments, the last two what GPTQ takes.")
    ] = "diag"
    device: Annotated[str, Option("auto (a GPU, else the CPU), cpu, cuda or cuda:N.")] = (
        DeviceOptions.device
    )
    hold: Annotated[float, Option("GB of weights held at once, with --self-generate.", least=0)] = (
        8.0
    )
    force: Force = False
    phases: Phases | None = None


@dataclass(eq=False, repr=False)
class MergeOptions:
    """End a conversion whose parts are done: check every shard (reading
    what no seal proves untouched: docs/resume.md), compare scale groups,
    write the index and the records.

    Example: fp4convert merge ./Llama-3.1-8B-NVFP4
    """

    output: Annotated[
        Reference,
        Option(
            "The folder that parts were written to, or copied into.", parse=Path, is_argument=True
        ),
    ]
    _: KW_ONLY
    phases: Phases | None = None


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
