"""Find the fastest form of each kernel on this GPU.

    python benchmarks/bench.py variants [--output variants.md] [--seconds N]

KNOBS is the one list of what is tried: numbers in the .cu files and their headers, an enum's, a
macro's or a template's. Of each file every combination is compiled, on all cores, and its bytes
are compared with those of the shipped form, which `bench.py gpu` compares with the CPU's. The
fastest is then measured again in turn with the shipped one. Nothing is changed in kernels/.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fp4convert.numerics.backends import cubins, gpus
from fp4convert.numerics.backends.cubins import Target, kernels_folder
from gpu import packed, products
from gpu.beside_quantizers import reason
from gpu.device import Case, Device, Kernels, M, grid_of, one_text
from gpu.kernels import Elementwise, Page
from harness.measure import RESULTS, table

SECONDS = 440
ROUNDS = 3  # of the fastest and the shipped form in turn


@dataclass(frozen=True, slots=True)
class Knob:
    """A number in the text of a kernel.

    pattern  finds it, as its group; "": NAME = number, or #define NAME number
    widens   whether a block of threads takes so many times the elements
    """

    file: str
    name: str
    values: tuple[int, ...]  # beside the one that is there
    widens: bool = False
    pattern: str = ""

    def found(self, text: str) -> re.Match[str]:
        """Where it stands; ValueError where that is no single place."""
        pattern = self.pattern or rf"(?:#define {self.name} |\b{self.name} = )(\d+)\b"
        places = list(re.finditer(pattern, text))
        if len(places) != 1:
            raise ValueError(f"{self.file} has {len(places)} places of {self.name}; expected one")
        return places[0]


KNOBS = (
    Knob("quantize.cu", "FP4_UNITS", (1, 4), widens=True),
    Knob("quantize.cu", "THREADS", (128, 512), widens=True),
    Knob("quantize.cu", "QUANTIZE_BLOCKS", (3, 4, 6)),
    Knob("dequantize.cu", "FP4_UNITS", (1, 4), widens=True),
    Knob("dequantize.cu", "THREADS", (128, 512), widens=True),
    Knob("search.cu", "FP4_UNITS", (1, 4), widens=True),
    Knob("search.cu", "THREADS", (128,), widens=True),
    Knob("search.cu", "blocks", (2, 4), pattern=r"KERNEL\((\d+)\) search_nvfp4_##"),
    Knob("gemv.cu", "ROWS", (2, 8), widens=True),
    Knob("gemv.cu", "THREADS", (128, 512), widens=True),
    Knob("compare.cu", "COMPARE_UNROLL", (1,)),
    Knob("compare.cu", "THREADS", (128, 512), widens=True),
    Knob("decode.cu", "FP4_UNITS", (1, 4), widens=True),
    Knob("decode.cu", "THREADS", (128, 512), widens=True),
)
MEASURED = {  # the labels of cases
    "quantize.cu": ("amax_bf16", "quantize_nvfp4_bf16", "quantize_mxfp4_bf16 even"),
    "dequantize.cu": ("dequantize_nvfp4_bf16", "dequantize_mxfp4_bf16"),
    "search.cu": ("search_nvfp4_bf16 mse", "search_mxfp4_bf16 mse"),
    "gemv.cu": ("gemv_nvfp4_fp16",),
    "compare.cu": ("compare_nvfp4_bf16",),
    "decode.cu": ("decode_fp8", "decode_int4"),
}


class Variant(Kernels):
    """The kernels of one file with other numbers; {} is the shipped form."""

    def __init__(self, target: Target, file: str, numbers: dict[str, int]) -> None:
        super().__init__(target)
        self.numbers, self._widened, self._threads = numbers, 1.0, 256
        text = one_text(kernels_folder() / file)
        for knob in (knob for knob in KNOBS if knob.file == file):
            place = knob.found(text)
            number = numbers.get(knob.name, int(place[1]))
            if knob.widens:
                self._widened *= number / int(place[1])
            if knob.name == "THREADS":
                self._threads = number
            text = text[: place.start(1)] + str(number) + text[place.end(1) :]
        self.path = Path(tempfile.mkdtemp()) / file
        self.path.write_text(text, encoding="utf-8")

    def source(self, name: str) -> Path:
        return self.path

    def shape(self, name: str, *counts: int) -> tuple[tuple[int, int, int], int]:
        return grid_of(name, *counts, widened=self._widened), self._threads

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in self.numbers.items()) or "shipped"


def variants(target: Target, file: str) -> Iterator[Variant]:
    """Every combination, the shipped form first."""
    knobs = [knob for knob in KNOBS if knob.file == file]
    for numbers in itertools.product(*((None, *knob.values) for knob in knobs)):
        named = zip((knob.name for knob in knobs), numbers, strict=True)
        yield Variant(target, file, {name: n for name, n in named if n is not None})


def compiled(path: Path, target: Target) -> str:
    """Compile a form; "", or why that fails."""
    try:
        cubins.cubin_path(path, target)
    except Exception as error:
        return reason(error)
    return ""


def subject(device: Device, file: str) -> tuple[Callable[[], Iterator[Case]], list[Any]]:
    """What makes the cases of a file, and the arrays that their first run writes."""
    if file == "gemv.cu":
        own = products.Products(device, *products.SHAPES[0])
        return own._cases, [own._y]
    if file == "decode.cu":
        decoders = packed.Decoders(device, packed.SHAPE)
        return decoders._cases, decoders._y[:1]
    matrix = Elementwise(device, "BF16", 64 * M)
    outputs = {"dequantize.cu": [matrix._y[0]], "compare.cu": [matrix._sums]}
    written = [matrix._packed[0], matrix._block_scales[0], device.slots]
    return matrix._cases, outputs.get(file, written)


class Sweep:
    """All forms of one file, on the same data."""

    def __init__(self, device: Device, file: str) -> None:
        self._device, self._file = device, file
        self._cases, self._outputs = subject(device, file)
        self._expected: dict[str, list[bytes]] = {}
        self._ms: dict[str, list[tuple[float, Variant]]] = {}
        self._shipped = Variant(device.kernels.target, file, {})
        if file in ("dequantize.cu", "compare.cu"):  # they read what a quantizer has written
            next(case for case in self._cases() if case.label == "quantize_nvfp4_bf16").work(0)

    def case(self, variant: Variant, label: str) -> Case:
        """The case with that form's kernel; others keep the shipped one."""
        own, self._device.kernels = self._device.kernels, variant
        try:
            return next(case for case in self._cases() if case.label == label)
        finally:
            self._device.kernels = own

    def row(self, variant: Variant, problem: str, label: str) -> list[str]:
        if problem or self._device.is_late():
            return [label, variant.label, "", problem or "not run: the time is up"]
        try:
            case = self.case(variant, label)
            for array in self._outputs:
                array.data.memset_async(0, array.nbytes)
            case.work(0)
            written = [array.get().tobytes() for array in self._outputs]
            if not variant.numbers:
                self._expected[label] = written
            if label not in self._expected:
                return [label, variant.label, "", "not compared"]
            if written != self._expected[label]:
                return [label, variant.label, "", "DIFFERS"]
            ms = self._device.median_ms(case.work)
        except Exception as error:
            return [label, variant.label, "", reason(error)]
        self._ms.setdefault(label, []).append((ms, variant))
        return [label, variant.label, f"{ms:.4f}", "bytes equal"]

    def best(self) -> Iterator[str]:
        """The fastest form of each kernel, in turn with the shipped one."""
        for label, found in self._ms.items():
            fastest = min(found, key=lambda pair: pair[0])[1]
            if not fastest.numbers:
                yield f"{label}: the shipped form is the fastest"
                continue
            if self._device.is_late():
                yield f"{label}: not run: the time is up"
                continue
            works = [self.case(form, label).work for form in (self._shipped, fastest)]
            turns = [[self._device.median_ms(work) for work in works] for _ in range(ROUNDS)]
            gain = statistics.median(shipped / other for shipped, other in turns)
            yield f"{label}: {fastest.label}: {gain:.3f} times as fast as the shipped form"

    def text(self, pool: ProcessPoolExecutor) -> str:
        forms = list(variants(self._device.kernels.target, self._file))
        problems = pool.map(partial(compiled, target=forms[0].target), [f.path for f in forms])
        rows = []
        for form, problem in zip(forms, problems, strict=True):
            rows += [self.row(form, problem, label) for label in MEASURED[self._file]]
            print("; ".join(rows[-1]), flush=True)
        lines = "\n".join(f"- {line}" for line in self.best())
        return f"{lines}\n\n{table(['what', 'form', 'ms', 'output'], rows)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.py variants", description="Measure other forms of the CUDA kernels."
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "variants.md", help="the page")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="after which no further measurement starts (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    found = gpus.survey()
    if not found.gpus:
        sys.exit(f"{found.problem}. {found.next_step}")
    device = Device(found.gpus[0], options.seconds)
    page = Page(options.output)
    page.add(f"# Forms of the kernels\n\n{found.gpus[0].name}, {found.gpus[0].target.arch}.")
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for file in MEASURED:
            page.add_section(file, partial(lambda file: Sweep(device, file).text(pool), file))
            device.release()
    return 0 if page.is_whole else 1
