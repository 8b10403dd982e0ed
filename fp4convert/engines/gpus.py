"""Read which kernels engines choose on GPUs: configs/engines/gpus.toml."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from fp4convert.engines.files import (
    Engine,
    as_tuples,
    parse_engines,
    read_engine,
    read_toml,
)
from fp4convert.engines.rows import FOUR_BIT, Contents, Part
from fp4convert.errors import InputError, did_you_mean

SLOW = ("emulated", "refused")  # what a kernel computes where there is none in four bits
NATIVE = "W4A4"


class Gpu(NamedTuple):
    """A card: its name, architecture ("sm120", "gfx950") and memory in GB."""

    name: str
    arch: str
    memory: int
    words: str

    @property
    def title(self) -> str:
        return f"{self.name} ({self.arch.upper()}, {self.memory} GB)"


class Kernel(NamedTuple):
    """What an engine runs on some cards, where nobody names a kernel.

    on        globs on architectures
    formats   globs on words of Part.format, or "kv-fp8", "kv-nvfp4" of the cache
    computes  "W4A16" and the like, "stored" of a cache, or one of SLOW
    lines     as of rows.Row
    """

    engine: str
    on: tuple[str, ...]
    formats: tuple[str, ...]
    computes: str
    kernel: str
    source: str
    lines: tuple[str, ...]
    dialects: tuple[str, ...] = ()
    activations: int | None = None
    has_experts: bool | None = None

    def fits(self, arch: str, part: Part, dialect: str) -> bool:
        """Return whether this is what runs."""
        return (
            any(fnmatchcase(arch, glob) for glob in self.on)
            and any(fnmatchcase(part.format, glob) for glob in self.formats)
            and dialect in (self.dialects or (dialect,))
            and self.activations in (None, part.activations)
            and self.has_experts in (None, part.is_expert)
        )


class Use(NamedTuple):
    """A part of an artifact on a card, with the kernel; None: not looked at."""

    gpu: Gpu
    engine: Engine
    part: Part
    kernel: Kernel | None

    @property
    def words(self) -> str:
        """Say what is computed, such as "nvfp4 as W4A16 (Marlin)"."""
        name = f"{self.part.format}{' experts' if self.part.is_expert else ''}"
        if self.part.activations == 4 and self.part.format in FOUR_BIT:
            name += " with --activations 4"
        if self.kernel is None:
            return f"{name}: not looked at"
        verb = {"stored": "is", "refused": "is", "emulated": "is"}.get(self.kernel.computes, "as")
        return f"{name} {verb} {self.kernel.computes} ({self.kernel.kernel})"

    def as_json(self) -> dict[str, Any]:
        own, part = self.kernel, self.part
        return {
            "engine": self.engine.at(self.engine.version),
            "says": self.words,
            "format": part.format,
            "experts": part.is_expert,
            "activations": part.activations,
            "computes": own and own.computes,
            "kernel": own and own.kernel,
            "source": own and own.source,
            "lines": list(own.lines) if own else [],
        }


@cache
def _read() -> tuple[tuple[Gpu, ...], tuple[Kernel, ...]]:
    table = read_toml("gpus.toml")
    gpus = tuple(Gpu(*row) for row in table["gpus"])
    return gpus, tuple(Kernel(**as_tuples(row)) for row in table["kernel"])


def known_gpus() -> tuple[Gpu, ...]:
    return _read()[0]


def known_kernels() -> tuple[Kernel, ...]:
    return _read()[1]


def find_gpu(word: str) -> Gpu | None:
    """Find a card by a name in any spelling."""
    plain = "".join(filter(str.isalnum, word.lower())).removeprefix("nvidia").removeprefix("amd")
    plain = plain.removeprefix("geforce").removeprefix("instinct")
    return next((gpu for gpu in known_gpus() if plain in gpu.words.split()), None)


def parse_gpu(word: str) -> Gpu:
    """Parse the value of --gpu; InputError for other words."""
    if gpu := find_gpu(word):
        return gpu
    names = [gpu.words.split()[0] for gpu in known_gpus()]
    detail = f"--gpu {word} is not known; expected one of {', '.join(names)}"
    raise InputError("unknown-gpu", detail + did_you_mean(word, names))


def engines_with_kernels() -> tuple[Engine, ...]:
    """List the engines whose choice of kernels was read."""
    return tuple(map(read_engine, dict.fromkeys(kernel.engine for kernel in known_kernels())))


def readers(asked: str | None, contents: Contents) -> list[Engine]:
    """List the engines of --for, or those that read the dialect."""
    if asked is not None:
        return [engine for engine, _ in parse_engines(asked)]
    return [one for one in engines_with_kernels() if contents.dialect in one.dialects]


def use_of(gpu: Gpu, engine: Engine, part: Part, dialect: str) -> Use:
    """Find the kernel of a part; the first row that fits counts."""
    fitting = (one for one in known_kernels() if one.engine == engine.key)
    kernel = next((one for one in fitting if one.fits(gpu.arch, part, dialect)), None)
    return Use(gpu, engine, part, kernel)


def uses_of(gpu: Gpu, engines: Iterable[Engine], contents: Contents) -> list[Use]:
    """List what each engine runs of an artifact, its cache last."""
    parts = sorted(contents.parts, key=lambda part: (part.is_expert, part.format))
    if contents.cache:
        parts.append(Part(f"kv-{contents.cache}", 16, False))
    return [use_of(gpu, engine, part, contents.dialect) for engine in engines for part in parts]


def advice(gpu: Gpu) -> str:
    """Say which of four and eight bits is faster there, by vLLM's kernels."""
    engine, dialect = read_engine("vllm"), "compressed-tensors"
    kinds = (Part("nvfp4", 4, False), Part("fp8 row", 8, False))
    four, eight = (use_of(gpu, engine, part, dialect).kernel for part in kinds)
    if four and four.computes == NATIVE:
        return "four bits are multiplied there: --activations 4 is for long prompts and many users"
    if eight and eight.computes == "W8A8":
        return (
            "FP8 is faster there for long prompts and many users (--format fp8, 1.8 times the"
            " bytes); one user waits for memory, where four bits are"
        )
    return "no low-bit products there: four bits save memory and its traffic, and compute in 16"


def every_use(gpu: Gpu) -> list[Use]:
    """List what engines run of every format, where it was looked at."""
    kinds = [("nvfp4", 16), ("nvfp4", 4), ("mxfp4", 16), ("fp8 row", 8)]
    parts = [Part(fmt, bits, is_expert) for fmt, bits in kinds for is_expert in (False, True)]
    parts += [Part("kv-fp8", 16, False), Part("kv-nvfp4", 16, False)]
    engines, dialect = engines_with_kernels(), "compressed-tensors"
    uses = [use_of(gpu, engine, part, dialect) for engine in engines for part in parts]
    return [use for use in uses if use.kernel]


def is_bad(use: Use) -> bool:
    """Return whether no kernel computes this part as it is stored."""
    return use.kernel is not None and use.kernel.computes in SLOW


def find_fault(
    gpu: Gpu, uses: Iterable[Use], dialect: str, is_asked: bool
) -> tuple[str, str] | None:
    """Return what does not run on a card and the way out, if anything.

    is_asked  each of the engines has to run it; otherwise one of them
    """
    bad: dict[str, list[Use]] = {}
    for use in uses:
        bad.setdefault(use.engine.key, []).extend([use] if is_bad(use) else [])
    faults = [faults for faults in bad.values() if faults]
    if not faults or (not is_asked and len(faults) < len(bad)):
        return None
    first = faults[0][0]
    name = first.engine.at(first.engine.version)
    return f"{name} on {gpu.title}: {first.words}", _instead(gpu, faults[0], dialect)


def _instead(gpu: Gpu, faults: list[Use], dialect: str) -> str:
    """Return options whose kernels are there, as advice."""
    if faults[0].part.format.startswith("kv-"):
        return "Leave --kv-cache out, or give --kv-cache fp8."
    for fmt, bits in (("nvfp4", 16), ("nvfp4", 4), ("mxfp4", 16), ("fp8 row", 8)):
        parts = (Part(fmt, bits, use.part.is_expert) for use in faults)
        kernels = [use_of(gpu, faults[0].engine, part, dialect).kernel for part in parts]
        if all(kernel and kernel.computes not in SLOW for kernel in kernels):
            more = " --activations 4" if (fmt, bits) == ("nvfp4", 4) else ""
            return f"Use --format {fmt.split()[0]}{more}"
    return "Choose another engine, or another card."


def find_warnings(uses: Iterable[Use]) -> list[str]:
    """List parts that a card computes with other bits than they ask for."""
    lines = dict[str, None]()
    for use in uses:
        called, kernel = f"{use.engine.name} on {use.gpu.name}", use.kernel
        if kernel is None or use.part.format not in FOUR_BIT:
            continue
        if is_bad(use):
            lines[f"{called}: {use.words}; choose another engine"] = None
        elif use.part.activations == 4 and kernel.computes == "W4A16":
            lines[f"{called} computes in 16 bits all the same; leave out --activations 4"] = None
        elif use.part.activations == 16 and kernel.computes == NATIVE:
            why = "whatever the record says; for 16 bits use --format nvfp4"
            lines[f"{called} rounds inputs of {use.part.format} to four bits, {why}"] = None
    return list(lines)


def describe_uses(gpu: Gpu, uses: Iterable[Use]) -> dict[str, Any]:
    """Make the key "gpu" of a document: what runs of an artifact."""
    return {
        "name": gpu.name,
        "architecture": gpu.arch,
        "memory_gb": gpu.memory,
        "uses": [use.as_json() for use in uses],
        "advice": advice(gpu),
    }


def lines_of(described: dict[str, Any]) -> list[str]:
    """Say what runs, a line for each engine, and what is faster.

    described  by describe_uses
    """
    by_engine: dict[str, list[str]] = {}
    for use in described["uses"]:
        by_engine.setdefault(use["engine"], []).append(use["says"])
    name, arch = described["name"], described["architecture"].upper()
    lines = [
        f"{engine} on {name} ({arch}): {'; '.join(all_)}" for engine, all_ in by_engine.items()
    ]
    return [*lines, f"{name}: {described['advice']}"]
