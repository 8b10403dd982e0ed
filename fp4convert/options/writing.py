"""Declare the options of quantize: the docstring here is its help."""

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Annotated

from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR, DIALECTS
from fp4convert.errors import InputError, shell_line
from fp4convert.numerics.formats import DAMPING, FORMATS, FP8, METHODS, NVFP4, PASSES
from fp4convert.options.access import DeviceOptions, PartOptions
from fp4convert.options.arguments import (
    Adapters,
    AdapterScale,
    EngineName,
    GpuName,
    KeptDtype,
    LargestNmse,
    LeastSqnr,
    Page,
    SourceArgument,
    Statistics,
    as_folder,
    one_adapter,
)
from fp4convert.recipes.options import (
    DRAFTS,
    HUB,
    MACHINES,
    MODULES,
    OUTPUT,
    QUALITY,
    TARGET,
    Option,
    RecipeOptions,
    Reference,
    declared_in,
)

ACTIVATION_BITS = ("16", "8", "4")
VIAS = ("fp8",)
CACHES = (FP8.name, NVFP4.name)  # what a cache of keys and values may hold


def _usual_activations(fmt: str, dialect: str) -> int:
    """Return the default bits of activations; 16 for unknown words."""
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
        others = (f", {rule}" for rule in fmt.scale_rules if rule != fmt.default_rule)
        lines.append(f"{fmt.name}: {fmt.default_rule} (default){''.join(others)}")
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
            "New folder. Default: ./NAME-FORMAT, and dialect, activations, method unless usual.",
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
            is_rare=True,
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
            is_rare=True,
        ),
    ] = None
    target_size: Annotated[
        float | None,
        Option(
            "Largest size of the result: modules get formats by measured loss.",
            panel=QUALITY,
            value="<gb>",
            is_rare=True,
        ),
    ] = None
    target_bits: Annotated[
        float | None,
        Option(
            "The same as bits per weight, averaged over the quantized modules.",
            panel=QUALITY,
            value="<bits>",
            is_rare=True,
        ),
    ] = None
    fit: Annotated[
        float | str | None,
        Option(
            "The card that is to serve it, or its memory: rtx5090, 24GB. The largest size of the"
            " result is what it leaves beside the cache of --context tokens and a tenth for the"
            " engine.",
            panel=TARGET,
            value="<gb|card>",
        ),
    ] = None
    context: Annotated[
        int | None,
        Option(
            "With --fit: tokens of the cache. Default: up to 32768.",
            least=1,
            panel=TARGET,
            value="<tokens>",
            is_rare=True,
        ),
    ] = None
    gpu: GpuName = None
    keep_packed: Annotated[
        bool,
        Option(
            "Do not expand kept FP8, int4 and FP4 modules to bf16.", panel=MODULES, is_rare=True
        ),
    ] = False
    base: Annotated[
        Reference | None,
        Option(
            "Take what stays from this FP8 or MXFP8 checkpoint of the same model, bit for bit.",
            panel=MODULES,
            is_rare=True,
        ),
    ] = None
    keep_dtype: KeptDtype = None
    draft: Annotated[
        str | None,
        Option(
            "Layers that draft tokens (MTP): the format of the body, or kept. Default: as engines"
            " want it of the model.",
            DRAFTS,
            panel=MODULES,
            is_rare=True,
        ),
    ] = None
    pad_for_tp: Annotated[
        int | None,
        Option(
            "Add zeros so that so many ranks of tensor parallelism get whole blocks.",
            least=2,
            panel=MODULES,
            value="<ranks>",
            is_rare=True,
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            "rtn (default) needs no data; all others need --calibration, gptq one with --gram."
            " With --lora gptq is the default, and needs none.",
            METHODS,
            panel=QUALITY,
        ),
    ] = None
    damping: Annotated[
        float | None,
        Option(
            "With --method gptq: share of H's mean diagonal that is added to it."
            f" Default: {DAMPING}.",
            panel=QUALITY,
            value="<share>",
            is_rare=True,
        ),
    ] = None
    passes: Annotated[
        int | None,
        Option(
            "With --method gptq: how often codes and block scales are gone over afterwards."
            f" Default: {PASSES}.",
            panel=QUALITY,
            value="<count>",
            is_rare=True,
        ),
    ] = None
    calibration: Statistics = None
    text: Annotated[
        Reference | Iterable[Reference] | None,
        Option(
            "Calibrate with this plain text first, and round by gptq; may be given several times.",
            is_several=True,
            panel=QUALITY,
            value="<path>",
        ),
    ] = None
    dataset: Annotated[
        Reference | None,
        Option(
            "As --text, with conversations ('messages') or 'text' of a jsonl or parquet file.",
            flags=("--dataset", "--chat"),
            panel=QUALITY,
            is_rare=True,
        ),
    ] = None
    self_generate: Annotated[
        int | None,
        Option(
            "As --text, with so many sequences that the model writes.", panel=QUALITY, is_rare=True
        ),
    ] = None
    lora: Adapters = ()
    lora_scale: AdapterScale = None
    scale_rule: Annotated[
        str | None,
        Option(
            f"{_rules()}. With --calibration the default is importance, but for awq.",
            tuple(dict.fromkeys(rule for fmt in FORMATS.values() for rule in fmt.scale_rules)),
            panel=QUALITY,
            value="<rule>",
            is_rare=True,
        ),
    ] = None
    input_scale: Annotated[
        str | float | None,
        Option(
            "Activation scales for nvfp4 with --activations 4: one multiplier, an artifact or"
            " calibration file that has them, or p99.9: with --calibration, the largest input of"
            " 99.9 % of tokens (p90, p99, p99.99). Default: --calibration, else norms and weights.",
            panel=QUALITY,
            value="<number|path|pN>",
            is_rare=True,
        ),
    ] = None
    global_scale: Annotated[
        Reference | None,
        Option(
            "Take nvfp4's global scales from an artifact or a file; measure none.",
            panel=QUALITY,
            is_rare=True,
        ),
    ] = None
    via: Annotated[
        str | None,
        Option(
            "Round weights to FP8 first; less accurate, for comparison only.",
            VIAS,
            panel=QUALITY,
            is_rare=True,
        ),
    ] = None
    min_sqnr: LeastSqnr = None
    max_nmse: LargestNmse = None
    ray: Annotated[
        str | None,
        Option(
            "Start one worker on every node of this Ray cluster.",
            panel=MACHINES,
            value="[auto|HOST:PORT]",
            is_rare=True,
        ),
    ] = None
    push_to_hub: Annotated[
        str | None, Option("Upload the result to this repository.", panel=HUB, value="ORG/NAME")
    ] = None
    private: Annotated[
        bool, Option("With --push-to-hub: make the repository private.", panel=HUB, is_rare=True)
    ] = False
    no_keep: Annotated[
        bool,
        Option(
            "With --push-to-hub: a shard leaves this disk as soon as it is uploaded.",
            panel=HUB,
            is_rare=True,
        ),
    ] = False
    disk: Annotated[
        float | None,
        Option(
            "With --no-keep: GB that the output folder has at most. Default: what is free.",
            least=0,
            panel=HUB,
            value="<gb>",
            is_rare=True,
        ),
    ] = None
    report: Page = None
    like: Annotated[
        Reference | None,
        Option(
            "Take the options that are not given here from an earlier artifact, or from its"
            " quantization_config.json; statistics, adapters and scales of files are never taken.",
            panel=OUTPUT,
            is_rare=True,
            value="<path>",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lora = one_adapter(self.lora)
        if self.like is not None:  # conversion/recorded_options.py makes options without it
            return
        if self.method is None and not self.has_text:
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
    def has_text(self) -> bool:
        """Return whether a text is given, with which to calibrate first."""
        return any(one is not None for one in (self.text, self.dataset, self.self_generate))

    @property
    def is_checked_after(self) -> bool:
        """Return whether the result is pushed, shown on a page or gated."""
        after = (self.push_to_hub, self.report, self.min_sqnr, self.max_nmse)
        return any(one is not None for one in after)

    @property
    def folder(self) -> Path:
        """Return the output folder, given or by default.

        Beside the source where the current folder is the source or lies in it.
        """
        from fp4convert.storage.source import find_cached, name_of

        source = os.fspath(self.source)
        if self.output:
            return as_folder(self.output, source)
        name, place = "-".join([name_of(source), *self._differences()]), Path(source)
        if place.is_dir() and Path.cwd().is_relative_to(place.resolve()):
            name = os.path.relpath(place.resolve().parent / name)
        if cached := find_cached(Path(name)):
            detail = f"{name} would lie in the Hub's cache, in {cached}; expected a place outside"
            step = f"Name one: {shell_line('-o', Path.home() / Path(name).name)}"
            raise InputError("output-in-source", detail, step)
        return Path(name)

    def _differences(self) -> list[str]:
        """Return the format, and choices that are not the default."""
        fmt, dialect = str(self.format), self.dialect or DIALECTS[0]
        parts = [fmt.upper()]
        parts += [dialect] if dialect != DIALECTS[0] else []
        if self.activations not in (None, _usual_activations(fmt, dialect)):
            parts.append(f"A{self.activations}")
        return [*parts, self.method] if self.method not in (None, METHODS[0]) else parts

    @property
    def place(self) -> Path | str:
        """Return where the result is afterwards: the folder, or the repository."""
        return str(self.push_to_hub) if self.no_keep else self.folder

    def that_make_bytes(self) -> dict[str, object]:
        """Return the options that the bytes depend on, by name.

        The others say how the work is done and where the result goes.
        """
        others = {field.name for kind in (DeviceOptions, PartOptions) for field in fields(kind)}
        others |= {"source", "output", "engine", "ray", "push_to_hub", "private", "report"}
        others |= {"no_keep", "disk", "text", "dataset", "self_generate", "min_sqnr", "max_nmse"}
        others |= {"fit", "context", "gpu", "like"}
        names = [each.name for each in declared_in(QuantizeOptions)]
        values = {name: getattr(self, name) for name in names if name not in others - {"subfolder"}}
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in values.items()
        }
