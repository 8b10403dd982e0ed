"""Declare the options of the commands that write a checkpoint.

The docstring of a class is the help of its command.
"""

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR, DIALECTS
from fp4convert.conversion.work_options import DeviceOptions, PartOptions, WorkOptions
from fp4convert.engines.files import ENGINES
from fp4convert.errors import InputError, shell_line
from fp4convert.numerics.formats import (
    DAMPING,
    FLOAT_TYPES,
    FORMATS,
    FP4_FORMATS,
    FP8,
    METHODS,
    NVFP4,
    PASSES,
)
from fp4convert.numerics.scale_layouts import SCALE_LAYOUTS
from fp4convert.recipes.options import (
    DRAFTS,
    HUB,
    MACHINES,
    MODULES,
    OUTPUT,
    QUALITY,
    TARGET,
    Option,
    RecipeName,
    RecipeOptions,
    Reference,
    declared_in,
)

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.storage.source import Access

DTYPES = tuple(kind.word for kind in FLOAT_TYPES.values())
KEPT_DTYPES = (*DTYPES[:-1], "q8_0")
WORDS_OF_DTYPES = {kind.config_name: kind.word for kind in FLOAT_TYPES.values()}
ACTIVATION_BITS = ("16", "8", "4")
VIAS = ("fp8",)
CACHES = (FP8.name, NVFP4.name)  # what a cache of keys and values may hold
FILE_ENDINGS = (".gguf", ".safetensors")


def as_folder(output: Reference, source: Reference) -> Path:
    """Return the folder that is written; InputError for the name of a file.

    source  whose single file would lie in it
    """
    path = Path(output)
    if path.suffix not in FILE_ENDINGS or path.is_dir():
        return path
    name = Path(source).name
    file = name if name.endswith(path.suffix) else f"NAME{path.suffix}"
    detail = f"-o {path} names a file, and a folder is written, with {file} in it"
    raise InputError(
        "output-name",
        f"{detail}; expected a folder's name",
        f"Leave the ending out: {shell_line('-o', path.with_suffix(''))}",
    )


SourceArgument = Annotated[
    Reference,
    Option("A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.", is_argument=True),
]
ArtifactArgument = Annotated[
    Reference,
    Option("A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.", is_argument=True),
]
NewFolder = Annotated[
    Reference,
    Option("New folder.", parse=Path, flags=("--output", "-o"), panel=TARGET),
]
Dialect = Annotated[
    str,
    Option(
        "Tensor names and config records that your engine reads.",
        DIALECTS,
        panel=TARGET,
        value="<name>",
    ),
]
KeptDtype = Annotated[
    str | None,
    Option(
        "Write kept fp32 matrices, and packed ones that become floats, as this; vectors and routers"
        " stay as they are. q8_0 is for --dialect gguf, and kept matrices of 16 bits become it,"
        " too.",
        KEPT_DTYPES,
        panel=TARGET,
        synonyms={name: word for name, word in WORDS_OF_DTYPES.items() if word in DTYPES[:-1]},
    ),
]
EngineName = Annotated[
    str | None,
    Option(
        f"Engine that is to load it, or ENGINE:VERSION. One of: {', '.join(ENGINES)}.",
        ENGINES,
        flags=("--for",),
        panel=TARGET,
        value="<engine>",
    ),
]
Page = Annotated[
    Reference | None,
    Option(
        "Write an HTML page that shows the quantization error of every layer.",
        parse=Path,
        panel=OUTPUT,
    ),
]
Statistics = Annotated[
    Reference | None,
    Option(
        "Statistics of this source, a file made by fp4convert calibrate.", parse=str, panel=QUALITY
    ),
]

Adapters = Annotated[
    Reference | Iterable[Reference] | None,
    Option(
        "Merge this LoRA adapter, a folder or ORG/NAME, and round so that it stays.",
        parse=str,
        is_several=True,
        panel=QUALITY,
        value="<path>",
    ),
]


AdapterScale = Annotated[
    float | None,
    Option("With --lora: multiplies the adapter's own scale. Default: 1.", panel=QUALITY),
]


def one_adapter(given: Reference | Iterable[Reference] | None) -> tuple[str, ...]:
    """Return the adapter that is given, if any.

    Raises  InputError for several, whose order and weights nobody tells
    """
    several = (given,) if isinstance(given, str | os.PathLike) else tuple(given or ())
    if len(several) > 1:
        detail = f"--lora is given {len(several)} times; expected one adapter"
        step = "Join them into one with PEFT first: add_weighted_adapter."
        raise InputError("adapter-several", detail, step)
    return tuple(os.fspath(each) for each in several)


def chosen_adapter(
    lora: Reference | Iterable[Reference] | None, scale: float | None, access: "Access"
) -> "Adapter | None":
    """Read the adapter that is given, if any.

    Raises  InputError for a scale without one, and what open_adapter raises
    """
    from fp4convert.checkpoint.adapters.peft import open_adapter

    given = one_adapter(lora)
    if not given and scale is not None:
        detail = "--lora-scale is given, and no adapter; expected --lora ADAPTER"
        raise InputError("usage", detail, "Name the adapter, or leave --lora-scale out.")
    return open_adapter(given[0], 1.0 if scale is None else scale, access) if given else None


def _usual_activations(fmt: str, dialect: str) -> int:
    """Return the bits of activations where nobody says; 16 for unknown words."""
    if dialect in ALWAYS_FOUR:
        return 4
    if not (fmt in FORMATS and FORMATS[fmt].is_fp8 and dialect in DIALECTS):
        return 16
    from fp4convert.checkpoint.dialects.target_forms import usual_activations

    return usual_activations(FORMATS[fmt], dialect)


def _rules() -> str:
    """Return the rules of every format, the default first."""
    lines = []
    for fmt in FORMATS.values():
        others = [rule for rule in fmt.scale_rules if rule != fmt.default_rule]
        lines.append(f"{fmt.name}: {', '.join([f'{fmt.default_rule} (default)', *others])}")
    return "; ".join(lines)


@dataclass(eq=False, repr=False)
class QuantizeOptions(RecipeOptions, DeviceOptions, PartOptions):
    """Convert a checkpoint to NVFP4, MXFP4, FP8 or MXFP8.

    Example: fp4convert quantize ./Llama-3.1-8B --format nvfp4 -o ./Llama-3.1-8B-NVFP4
    """

    source: SourceArgument
    _: KW_ONLY
    format: Annotated[
        str | None,
        Option("Format of the quantized weights. --for chooses it.", tuple(FORMATS), panel=TARGET),
    ] = None
    engine: EngineName = None
    output: Annotated[
        Reference | None,
        Option(
            "New folder. Default: ./NAME-FORMAT.",
            parse=Path,
            flags=("--output", "-o"),
            panel=TARGET,
        ),
    ] = None
    dialect: Annotated[
        str | None,
        Option(
            f"Tensor names and config records that your engine reads. Default: {DIALECTS[0]}.",
            DIALECTS,
            panel=TARGET,
            value="<name>",
        ),
    ] = None
    activations: Annotated[
        int | None,
        Option(
            "4 lets engines quantize activations too, for the FP4 tensor cores; 8 is for fp8"
            " and mxfp8. Default: 16, and for these 8 where the dialect can say it; in"
            f" dialect {ALWAYS_FOUR[0]} 4.",
            ACTIVATION_BITS,
            panel=TARGET,
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        Option(
            "Write scales and records for an FP8 or NVFP4 KV cache; NVFP4 needs --calibration.",
            CACHES,
            panel=TARGET,
            synonyms={"fp8_e4m3": CACHES[0], "e4m3": CACHES[0]},
        ),
    ] = None
    target_size: Annotated[
        float | None,
        Option(
            "Largest size of the result: modules get formats by measured loss.",
            panel=TARGET,
            value="<gb>",
        ),
    ] = None
    target_bits: Annotated[
        float | None,
        Option(
            "The same as bits per weight, averaged over the quantized modules.",
            panel=TARGET,
            value="<bits>",
        ),
    ] = None
    keep_packed: Annotated[
        bool,
        Option("Do not expand kept FP8, int4 and FP4 modules to bf16.", panel=TARGET),
    ] = False
    keep_dtype: KeptDtype = None
    draft: Annotated[
        str | None,
        Option(
            "Layers that draft tokens (MTP): the format of the body, or kept. Default: as engines"
            " want it of the model.",
            DRAFTS,
            panel=MODULES,
        ),
    ] = None
    pad_for_tp: Annotated[
        int | None,
        Option(
            "Add zeros so that so many ranks of tensor parallelism get whole blocks.",
            least=2,
            panel=MODULES,
            value="<ranks>",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            "rtn (default) needs no data; all others need --calibration, gptq one with --gram."
            " With --lora gptq is the default, and needs none.",
            METHODS,
            panel=QUALITY,
            synonyms={"smoothquant": METHODS[3]},
        ),
    ] = None
    damping: Annotated[
        float | None,
        Option(
            "With --method gptq: share of H's mean diagonal that is added to it."
            f" Default: {DAMPING}.",
            panel=QUALITY,
            value="<share>",
        ),
    ] = None
    passes: Annotated[
        int | None,
        Option(
            "With --method gptq: how often codes and block scales are gone over afterwards."
            f" Default: {PASSES}.",
            panel=QUALITY,
            value="<count>",
        ),
    ] = None
    calibration: Statistics = None
    lora: Adapters = ()
    lora_scale: AdapterScale = None
    scale_rule: Annotated[
        str | None,
        Option(
            f"{_rules()}. With --calibration and gptq the default is importance.",
            tuple(dict.fromkeys(rule for fmt in FORMATS.values() for rule in fmt.scale_rules)),
            panel=QUALITY,
            value="<rule>",
        ),
    ] = None
    input_scale: Annotated[
        str | float | None,
        Option(
            "Activation scales for nvfp4 with --activations 4: one multiplier, or an artifact"
            " or calibration file that has them. Default: those of --calibration, else 1.0.",
            parse=str,
            panel=QUALITY,
            value="<number|path>",
        ),
    ] = None
    global_scale: Annotated[
        Reference | None,
        Option(
            "Take nvfp4's global scales from an artifact or a file; measure none.",
            parse=str,
            panel=QUALITY,
        ),
    ] = None
    via: Annotated[
        str | None,
        Option(
            "Round weights to FP8 first; less accurate, for comparison only.",
            VIAS,
            panel=QUALITY,
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option(
            "Start one worker on every node of this Ray cluster.",
            panel=MACHINES,
            value="[auto|HOST:PORT]",
        ),
    ] = None
    push_to_hub: Annotated[
        str | None,
        Option("Upload the result to this repository.", panel=HUB, value="ORG/NAME"),
    ] = None
    private: Annotated[
        bool, Option("With --push-to-hub: make the repository private.", panel=HUB)
    ] = False
    no_keep: Annotated[
        bool,
        Option(
            "With --push-to-hub: a shard leaves this disk as soon as it is uploaded.", panel=HUB
        ),
    ] = False
    disk: Annotated[
        float | None,
        Option(
            "With --no-keep: GB that the output folder has at most. Default: what is free.",
            least=0,
            panel=HUB,
            value="<gb>",
        ),
    ] = None
    report: Page = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lora = one_adapter(self.lora)
        if self.method is None:
            is_protected = self.lora and self.dialect not in ALWAYS_FOUR
            self.method = METHODS[1] if is_protected else METHODS[0]
        if self.engine is None:  # else it decides what is left out: engine_choice.py
            if self.format is None:
                detail = f"Missing option --format [{'|'.join(FORMATS)}]"
                raise InputError("usage", detail, "Give it, or your engine: --for vllm.")
            self.dialect = DIALECTS[0] if self.dialect is None else self.dialect
            if self.activations is None:
                self.activations = _usual_activations(self.format, self.dialect)

    @property
    def folder(self) -> Path:
        """Return where the artifact goes: the output, else ./NAME-FORMAT.

        Beside the source where this is the current folder, or one above it.
        Raises  InputError as as_folder does, and where it would lie in the Hub's cache
        """
        from fp4convert.storage.source import find_cached, name_of

        source = os.fspath(self.source)
        if self.output:
            return as_folder(self.output, source)
        name, place = f"{name_of(source)}-{str(self.format).upper()}", Path(source)
        if place.is_dir() and Path.cwd().is_relative_to(place.resolve()):
            name = os.path.relpath(place.resolve().parent / name)
        if cached := find_cached(Path(name)):
            detail = f"{name} would lie in the Hub's cache, in {cached}; expected a place outside"
            step = f"Name one: {shell_line('-o', Path.home() / Path(name).name)}"
            raise InputError("output-in-source", detail, step)
        return Path(name)

    @property
    def place(self) -> Path | str:
        """Return where its result is afterwards: the folder, or the repository."""
        return str(self.push_to_hub) if self.no_keep else self.folder

    def that_make_bytes(self) -> dict[str, object]:
        """Return the options by name that the bytes depend on.

        That is every one but how the work is done and where the result goes.
        """
        how = {field.name for kind in (DeviceOptions, PartOptions) for field in fields(kind)}
        where = {"source", "output", "engine", "ray", "push_to_hub", "private", "report"}
        where |= {"no_keep", "disk"}
        names = [each.name for each in declared_in(QuantizeOptions)]
        values = {
            name: getattr(self, name)
            for name in names
            if name == "subfolder" or name not in how | where
        }
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in values.items()
        }


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
            "Data type of the restored weights.",
            DTYPES,
            panel=TARGET,
            synonyms=WORDS_OF_DTYPES,
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
            "With --dialect gguf: a GGUF file of the model, for names and metadata.",
            parse=str,
            panel=TARGET,
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
        Option(
            "Statistics of SOURCE, a file made by fp4convert calibrate.", parse=Path, panel=TARGET
        ),
    ]
    keep: Annotated[int, Option("Number of experts to keep in every MoE layer.", panel=TARGET)]
    _: KW_ONLY
    recipe: RecipeName = None
