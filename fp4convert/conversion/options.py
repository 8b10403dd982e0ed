"""Declare the options of the commands that write a checkpoint.

The docstring of a class is the help of its command.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp4convert.checkpoint.dialects.registry import DIALECTS
from fp4convert.errors import InputError, did_you_mean, shell_line
from fp4convert.numerics.formats import FLOAT_TYPES, FORMATS, METHODS
from fp4convert.numerics.scale_layouts import SCALE_LAYOUTS
from fp4convert.progress import Phases
from fp4convert.recipes.engines import ENGINES
from fp4convert.recipes.options import (
    DEVICE,
    HUB,
    MACHINES,
    OUTPUT,
    QUALITY,
    TARGET,
    Option,
    RecipeName,
    RecipeOptions,
    Reference,
    declared_in,
    take_words,
)

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.execution.settings import Settings
    from fp4convert.storage.source import Access

DTYPES = tuple(kind.word for kind in FLOAT_TYPES.values())
TRANSPORTS = ("http", "xet")
ACTIVATION_BITS = ("16", "4")
VIAS = CACHES = ("fp8",)
FILE_ENDINGS = (".gguf", ".safetensors")
DEVICES = "[auto|cpu|cuda|cuda:N]"  # as --help shows them
LONGEST_NAME = 255  # bytes of a file's name on any disk
MOST_MEMORY = 1e6  # GB; inf, too, means no limit


def ignore(line: str) -> None:
    """Do nothing with a line for people."""


def as_nbytes(gigabytes: float) -> int:
    """Return bytes for GB; inf is as many as there are.

    Raises  InputError below 0 and for NaN
    """
    if not gigabytes >= 0:
        raise InputError(
            "usage", f"{gigabytes:g} GB of memory; expected 0 or more", "Give a number of GB."
        )
    return int(min(gigabytes, MOST_MEMORY) * 10**9)


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


def take_references(options: "AccessOptions") -> None:
    """Read ~ and addresses of the Hub in what the options name.

    Raises  InputError for an address with a revision or a folder that others contradict, for an
            empty name, and for one that is too long
    """
    for each in declared_in(type(options)):
        given = getattr(options, each.name)
        if each.type not in (Reference, Reference | None) and each.name != "subfolder":
            continue
        if given is None:
            continue
        given, flag = os.fspath(given), f"--{each.name.replace('_', '-')}"
        if not given and not each.option.is_argument:
            raise InputError("usage", f"{flag} is empty", "Give a name, or leave it out.")
        longest = max(len(os.fsencode(part)) for part in given.split("/"))
        if longest > LONGEST_NAME and each.name != "output":  # which whoever makes it tells
            detail = f"{given[:60]}... has a name of more than {LONGEST_NAME} bytes"
            if each.option.is_argument:
                raise InputError("no-source", f"{detail}, more than disks allow")
            raise InputError("usage", f"{detail}, more than disks allow", f"Check {flag}.")
        if each.name == "subfolder" or not isinstance(getattr(options, each.name), str):
            continue
        if not given.startswith(("~", "http")) and not given.endswith("/"):
            continue  # what it is already: nearly always
        from fp4convert.storage.open import read_reference

        place = read_reference(given)
        setattr(options, each.name, place.reference)
        for name in ("revision", "subfolder"):
            found, known = getattr(place, name), getattr(options, name)
            if found and not each.option.is_argument:
                detail = f"{given} names the {name} {found}, which --{each.name} does not take"
                raise InputError(
                    "usage", detail, f"Name the repository: {shell_line(place.reference)}"
                )
            if found and known not in (None, found):
                detail = f"{given} names the {name} {found}, and {known} is given"
                raise InputError("usage", f"{detail}; expected one of them", f"Leave --{name} out.")
            if found:
                setattr(options, name, found)


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
Force = Annotated[
    bool,
    Option("Replace what an earlier run of fp4convert left in the output folder.", panel=OUTPUT),
]


@dataclass(kw_only=True, eq=False, repr=False)
class AccessOptions:
    """How sources and artifacts are found and read.

    tell  gets lines for people: what is waited for, which part this is, which page was written
    """

    revision: Annotated[
        str | None, Option("Branch, tag or commit. Default: main.", panel=HUB, value="<name>")
    ] = None
    subfolder: Annotated[
        str | None,
        Option("Folder of the source that holds the checkpoint.", panel=HUB, value="<path>"),
    ] = None
    token: Annotated[
        str | None,
        Option("Access token. Better: hf auth login. [env: HF_TOKEN]", panel=HUB, value="<token>"),
    ] = None
    memory: Annotated[
        float,
        Option(
            "GB of downloaded data kept in memory for a second read.",
            least=0,
            panel=HUB,
            value="<gb>",
        ),
    ] = 1.0
    transport: Annotated[
        str, Option("How files are fetched; xet needs hf_xet.", TRANSPORTS, panel=HUB)
    ] = TRANSPORTS[0]
    tell: Callable[[str], None] = ignore

    def __post_init__(self) -> None:
        take_words(self)
        take_references(self)

    @property
    def known_token(self) -> str | None:
        """Return the token; None for an empty one."""
        return (self.token or "").strip() or None

    def access(self, output: Path | None = None) -> "Access":
        """Return how the Hub is asked.

        output  where an unfinished plan may lie, which says of which commit it is
        Raises  InputError for a transport or an amount of memory that cannot be
        """
        from fp4convert.storage.source import Access

        if self.transport not in TRANSPORTS:
            expected = f"expected {' or '.join(TRANSPORTS)}"
            detail = f"transport {self.transport!r} is not known; {expected}"
            raise InputError("transport", detail + did_you_mean(self.transport, TRANSPORTS))
        return Access(
            revision=self.revision,
            subfolder=self.subfolder,
            token=self.known_token,
            memory_nbytes=as_nbytes(self.memory),
            tell=self.tell,
            transport=self.transport,
            output=output,
        )

    def original_access(self) -> "Access":
        """Return how the source of an artifact is found: at its own revision."""
        return replace(self.access(), revision=None)


@dataclass(kw_only=True, eq=False, repr=False)
class WorkOptions(AccessOptions):
    """How a command that writes works; nothing here changes a byte.

    phases  learns how far the work is
    warn    gets what a person should know before the work; None for Python's warnings
    """

    workers: Annotated[
        int, Option("Number of threads; 0 chooses by the device.", least=0, panel=DEVICE)
    ] = 0
    force: Force = False
    phases: Phases | None = None
    warn: Callable[[Iterable[str]], None] | None = None

    def settings(self, device: str) -> "Settings":
        """Return how to work; InputError for fewer workers than none."""
        from fp4convert.execution.settings import Settings

        if self.workers < 0:
            raise InputError(
                "usage",
                f"workers is {self.workers}; expected 0 or more",
                "Leave it out: as many as suit the device.",
            )
        return Settings(
            device=device,
            workers=self.workers,
            is_forced=self.force,
            phases=self.phases or Phases(),
            tell=self.tell,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DeviceOptions(WorkOptions):
    """Where a command computes."""

    device: Annotated[
        str,
        Option(
            "auto takes the CPU, and GPUs that pass a check where the plan says they win.",
            panel=DEVICE,
            value=DEVICES,
        ),
    ] = "auto"


@dataclass(kw_only=True, eq=False, repr=False)
class PartOptions(WorkOptions):
    """Which part of the work this process does, of one that several share."""

    join: Annotated[
        bool,
        Option(
            "Share the work with other processes that write to the same folder.", panel=MACHINES
        ),
    ] = False
    shard_index: Annotated[
        int | None,
        Option(
            "Convert this part only, from 0; when all are done: fp4convert merge.", panel=MACHINES
        ),
    ] = None
    num_shards: Annotated[
        int | None,
        Option(
            "Number of parts. Default of both: from Slurm, torchrun or SkyPilot.", panel=MACHINES
        ),
    ] = None

    def settings(self, device: str, is_elsewhere: bool = False) -> "Settings":
        """Return how to work, with the part that this process does.

        is_elsewhere  other processes take the tasks as they come
        Raises        InputError for a part that cannot be; a launcher's variables count, too
        """
        from fp4convert.execution.share import choose_share

        settings, is_shared = super().settings(device), self.join or is_elsewhere
        share = choose_share(is_shared, self.shard_index, self.num_shards, os.environ)
        return replace(settings, is_joining=self.join, share=share)


def _rules() -> str:
    """Return the rules of every format, the default first."""
    lines = []
    for fmt in FORMATS.values():
        others = [rule for rule in fmt.scale_rules if rule != fmt.default_rule]
        lines.append(f"{fmt.name}: {', '.join([f'{fmt.default_rule} (default)', *others])}")
    return "; ".join(lines)


@dataclass(eq=False, repr=False)
class QuantizeOptions(RecipeOptions, DeviceOptions, PartOptions):
    """Convert a checkpoint to NVFP4 or MXFP4.

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
            "4 lets engines quantize activations too, for the FP4 tensor cores. Default: 16.",
            ACTIVATION_BITS,
            panel=TARGET,
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        Option(
            "Write scales and records for an FP8 KV cache.",
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
    method: Annotated[
        str,
        Option(
            "rtn needs no data; all others need --calibration, gptq one with --gram.",
            METHODS,
            panel=QUALITY,
            synonyms={"smoothquant": METHODS[3]},
        ),
    ] = METHODS[0]
    calibration: Statistics = None
    scale_rule: Annotated[
        str | None,
        Option(
            f"{_rules()}. With --method gptq the default is importance.",
            tuple(dict.fromkeys(rule for fmt in FORMATS.values() for rule in fmt.scale_rules)),
            panel=QUALITY,
            value="<rule>",
        ),
    ] = None
    input_scale: Annotated[
        str | float | None,
        Option(
            "Activation scales for nvfp4 with --activations 4: one multiplier, or an artifact"
            " or calibration file that has them. Default: 1.0.",
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
    report: Page = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine is None:  # else it decides what is left out: engine_choice.py
            if self.format is None:
                detail = f"Missing option --format [{'|'.join(FORMATS)}]"
                raise InputError("usage", detail, "Give it, or your engine: --for vllm.")
            self.dialect = DIALECTS[0] if self.dialect is None else self.dialect
            self.activations = 16 if self.activations is None else self.activations

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

    def that_make_bytes(self) -> dict[str, object]:
        """Return the options by name that the bytes depend on.

        That is every one but how the work is done and where the result goes.
        """
        how = {field.name for kind in (DeviceOptions, PartOptions) for field in fields(kind)}
        where = {"source", "output", "engine", "ray", "push_to_hub", "private", "report"}
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
            synonyms={kind.config_name: kind.word for kind in FLOAT_TYPES.values()},
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
            tuple(FORMATS),
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
