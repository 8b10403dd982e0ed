"""Declare arguments and options that several commands have."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named
from fp4convert.engines.files import ENGINES
from fp4convert.errors import InputError, did_you_mean, shell_line
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.options import MODULES, OUTPUT, QUALITY, TARGET, Option, Reference, one_of

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.checkpoint.adapters.peft import Adapter
    from fp4convert.storage.source import Access

DTYPES = tuple(kind.word for kind in FLOAT_TYPES.values())
KEPT_DTYPES = (*DTYPES[:-1], "q8_0")
WORDS_OF_DTYPES = {kind.config_name: kind.word for kind in FLOAT_TYPES.values()}
FILE_ENDINGS = (".gguf", ".safetensors")


SourceArgument = Annotated[
    Reference,
    Option("A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.", is_argument=True),
]
ArtifactArgument = Annotated[
    Reference,
    Option("A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.", is_argument=True),
]
NewFolder = Annotated[Reference, Option("New folder.", flags=("--output", "-o"), panel=TARGET)]
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
        panel=MODULES,
        synonyms={name: word for name, word in WORDS_OF_DTYPES.items() if word in DTYPES[:-1]},
        is_rare=True,
    ),
]
EngineName = Annotated[
    str | None,
    Option(
        "Engine that is to load it. ENGINE:VERSION names a version, vllm,sglang several. One of:"
        f" {', '.join(ENGINES)}.",
        ENGINES,
        flags=("--for",),
        panel=TARGET,
        value="<engine>",
    ),
]
GpuName = Annotated[
    str | None,
    Option(
        "Card that is to serve it, such as rtx5090: say which kernels run there, and refuse what"
        " runs in none.",
        panel=TARGET,
        value="<name>",
        is_rare=True,
    ),
]
Page = Annotated[
    Reference | None,
    Option("Write an HTML page that shows the quantization error of every layer.", panel=OUTPUT),
]
Statistics = Annotated[
    Reference | None,
    Option(
        "Statistics of this source: a file of fp4convert calibrate, or llama.cpp's imatrix.",
        panel=QUALITY,
    ),
]
LeastSqnr = Annotated[
    float | None,
    Option("Fail when the SQNR of a tensor is below this many dB.", panel=QUALITY, value="<db>"),
]
LargestNmse = Annotated[
    float | None,
    Option(
        "Fail when the normalized squared error of a tensor is above this.",
        panel=QUALITY,
        is_rare=True,
    ),
]
LargestKl = Annotated[
    float | str | None,
    Option(
        "Fail when the mean KL divergence is above this many nats. usual and damage: above 1.3"
        " or 3 times what is usual for this format, method and size.",
        panel=QUALITY,
        value="<nats>|usual|damage",
    ),
]
LeastTop1 = Annotated[
    float | None,
    Option("Fail when the likeliest token is the same less often; 0.95 is 95 %.", panel=QUALITY),
]
Adapters = Annotated[
    Reference | Iterable[Reference] | None,
    Option(
        "Merge this LoRA adapter, a folder or ORG/NAME, and round so that it stays.",
        is_several=True,
        panel=QUALITY,
        value="<path>",
    ),
]

AdapterScale = Annotated[
    float | None,
    Option(
        "With --lora: multiplies the adapter's own scale. Default: 1.", panel=QUALITY, is_rare=True
    ),
]
Sarif = Annotated[
    Reference | None,
    Option("Write the findings as SARIF 2.1.0, for code scanning.", panel=OUTPUT, is_rare=True),
]
Merged = Annotated[
    Reference | Iterable[Reference] | None,
    Option(
        "The LoRA adapter that --source was merged with, as quantize --lora had it.",
        is_several=True,
        panel=QUALITY,
        value="<path>",
    ),
]
ByLayer = Annotated[
    bool,
    Option(
        "Also what each layer costs: two more runs for every layer.", panel=QUALITY, is_rare=True
    ),
]


def gates_of(min_sqnr: float | None, max_nmse: float | None) -> dict[str, float]:
    """Return the limits on errors of tensors that are given, by option."""
    gates = {"--min-sqnr": min_sqnr, "--max-nmse": max_nmse}
    return {option: limit for option, limit in gates.items() if limit is not None}


def as_folder(output: Reference, source: Reference) -> Path:
    """Return the folder to write; InputError for the name of a file.

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


def one_adapter(given: Reference | Iterable[Reference] | None) -> tuple[str, ...]:
    """Return the adapter, if any; InputError for several, which have no order."""
    several = (given,) if isinstance(given, str | os.PathLike) else tuple(given or ())
    if len(several) > 1:
        detail = f"--lora is given {len(several)} times; expected one adapter"
        step = "Join them into one with PEFT first: add_weighted_adapter."
        raise InputError("adapter-several", detail, step)
    return tuple(os.fspath(each) for each in several)


def chosen_adapter(
    lora: Reference | Iterable[Reference] | None, scale: float | None, access: "Access"
) -> "Adapter | None":
    """Open the adapter, if any; InputError for a scale without one."""
    given = one_adapter(lora)
    if not given and scale is not None:
        detail = "--lora-scale is given, and no adapter; expected --lora ADAPTER"
        raise InputError("usage", detail, "Name the adapter, or leave --lora-scale out.")
    if not given:
        return None
    from fp4convert.checkpoint.adapters.peft import open_adapter

    return open_adapter(given[0], 1.0 if scale is None else scale, access)


def check_word(option: str, word: str | None, known: Sequence[str], code: str) -> None:
    """Raise InputError for a word that an option does not have."""
    if word is not None and word not in known:
        detail = f"{option} {word!r} is not known; expected {one_of(known)}"
        raise InputError(code, detail + did_you_mean(word, known), "Leave it out.")


def check_keep_dtype(word: str | None, dialect: str | None) -> None:
    """Raise InputError for a type that the dialect's matrices cannot keep."""
    check_word("--keep-dtype", word, KEPT_DTYPES, "unknown-dtype")
    if word not in (None, *DTYPES) and not dialect_named(str(dialect)).TRAITS.q8_0:
        detail = f"--keep-dtype {word} is for --dialect gguf, not {dialect}"
        raise InputError("unknown-dtype", detail, f"Choose {one_of(DTYPES[:-1])}.")


def as_path(file: Reference | None) -> Path | None:
    """Return the path of an optional file."""
    return None if file is None else Path(file)
