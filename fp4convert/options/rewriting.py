"""Declare the options of dequantize, transcode, prune, merge and push.

The docstring of a class is the help of its command.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from fp4convert.numerics.formats import FP4_FORMATS
from fp4convert.numerics.scale_layouts import SCALE_LAYOUTS
from fp4convert.options.access import DeviceOptions, PartOptions, Token, WorkOptions, ignore
from fp4convert.options.arguments import (
    DTYPES,
    WORDS_OF_DTYPES,
    ArtifactArgument,
    Dialect,
    KeptDtype,
    LargestKl,
    LargestNmse,
    LeastSqnr,
    LeastTop1,
    NewFolder,
    SourceArgument,
)
from fp4convert.progress import Phases
from fp4convert.recipes.options import HUB, QUALITY, TARGET, Option, RecipeName, Reference


@dataclass(eq=False, repr=False)
class DequantizeOptions(DeviceOptions):
    """Turn an artifact back into ordinary weights.

    They have exactly the values that engines compute.

    Example: fp4convert dequantize ./Llama-3.1-8B-NVFP4 -o ./Llama-3.1-8B-restored
    """

    artifact: ArtifactArgument
    output: NewFolder
    _: KW_ONLY
    dtype: Annotated[
        str,
        Option(
            "Data type of the restored weights.", DTYPES, panel=TARGET, synonyms=WORDS_OF_DTYPES
        ),
    ] = "bf16"


@dataclass(eq=False, repr=False)
class TranscodeOptions(WorkOptions):
    """Rewrite an artifact for another engine, without loss.

    The same codes and block scales in another dialect, never rounded again.

    Example: fp4convert transcode ./Llama-3.1-8B-NVFP4 -o ./Llama-3.1-8B-modelopt --dialect
    modelopt
    """

    artifact: ArtifactArgument
    output: NewFolder
    _: KW_ONLY
    dialect: Dialect
    format: Annotated[
        str | None,
        Option(
            "nvfp4 converts an mxfp4 artifact. Default: its own format.",
            tuple(FP4_FORMATS),
            panel=TARGET,
        ),
    ] = None
    scale_layout: Annotated[
        str | None,
        Option(
            f"Block scale layout of dialect plain. Default: {SCALE_LAYOUTS[0]}.",
            SCALE_LAYOUTS,
            panel=TARGET,
            value="<layout>",
        ),
    ] = None
    template: Annotated[
        Reference | None,
        Option(
            "With --dialect gguf: a GGUF file of the model, for names and metadata.", panel=TARGET
        ),
    ] = None
    keep_dtype: KeptDtype = None


@dataclass(eq=False, repr=False)
class PruneOptions(PartOptions):
    """Leave out the experts that matter least (REAP).

    Writes an ordinary checkpoint with fewer of them, for quantize to take.

    Example: fp4convert prune ./Qwen3-30B-A3B -o ./Qwen3-30B-A3B-96 --calibration
    qwen3.safetensors --keep 96
    """

    source: SourceArgument
    output: NewFolder
    calibration: Annotated[
        Reference,
        Option("Statistics of SOURCE, a file made by fp4convert calibrate.", panel=TARGET),
    ]
    keep: Annotated[int, Option("Number of experts to keep in every MoE layer.", panel=TARGET)]
    _: KW_ONLY
    recipe: RecipeName = None


@dataclass(eq=False, repr=False)
class MergeOptions:
    """Finish a conversion whose parts are done.

    Checks every shard (reading what no seal proves unchanged: docs/machines.md), compares scale
    groups, and writes the index and the records.

    Example: fp4convert merge ./Llama-3.1-8B-NVFP4
    """

    output: Annotated[Reference, Option("The folder that holds all parts.", is_argument=True)]
    _: KW_ONLY
    phases: Phases | None = None
    tell: Callable[[str], None] = ignore


@dataclass(eq=False, repr=False)
class PushOptions:
    """Upload a finished artifact, whole or not at all.

    Every file is checked first; then one commit has all of them, with a model card and the
    signature, if there is one. Exit code 6 when a gate is missed: nothing is uploaded.

    Example: fp4convert push ./Llama-NVFP4 me/Llama-NVFP4 --min-sqnr 18
    """

    artifact: Annotated[
        Reference, Option("The folder of an artifact that fp4convert made.", is_argument=True)
    ]
    repo: Annotated[
        str, Option("Repository that receives it: ORG/NAME.", is_argument=True, value="ORG/NAME")
    ]
    _: KW_ONLY
    private: Annotated[bool, Option("Make the repository private.", panel=HUB)] = False
    token: Token = None
    min_sqnr: LeastSqnr = None
    max_nmse: LargestNmse = None
    evaluation: Annotated[
        Reference | None,
        Option(
            "What evaluate --json printed of this artifact, for the card and the gates of KL."
            " Default: ARTIFACT.evaluation.json, where it is there.",
            panel=QUALITY,
        ),
    ] = None
    max_kl: LargestKl = None
    min_top1: LeastTop1 = None
    phases: Phases | None = None
    tell: Callable[[str], None] = ignore
