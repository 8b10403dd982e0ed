"""Measure the CUDA kernels beside this GPU's memory and other packages.

    python benchmarks/bench.py gpu [--output benchmarks/results/gpu-NAME.md] [--seconds N]

Writes one Markdown page, anew after each section, so that a run that is cut short leaves what it
has measured. Ends with 1 where a kernel's output differs or a section fails; a bar that is not met
is the page's to tell.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from fp4convert.numerics.backends import gpus
from fp4convert.numerics.codec import FLOAT_DTYPES
from fp4convert.numerics.formats import (
    CODES,
    FLOAT_TYPES,
    MXFP4,
    NVFP4,
    ROW_SUMS,
    rule_number,
)
from gpu import beside_quantizers, descents, packed, products
from gpu.bars import MEASURED, SHARES
from gpu.compare import compare_all
from gpu.device import (
    BASELINES,
    LAUNCHES,
    REPEATS,
    SUMMED_COLUMNS,
    Case,
    Device,
    M,
    Rung,
    Values,
    Work,
    family,
)
from harness.measure import RESULTS, ROOT

WEIGHED_COLUMNS = 8192
SECONDS = 270


@cache
def noise(dtype: str) -> Values:
    """Bytes of 16M weights."""
    values = np.random.default_rng(0).standard_normal(16 * M, np.float32) * np.float32(0.02)
    return values.astype(FLOAT_DTYPES[dtype]).view(np.uint8)


class Elementwise:
    """Quantizers and dequantizers of n elements, in buffers that take turns."""

    def __init__(self, device: Device, dtype: str, n: int, is_cached: bool = False) -> None:
        """is_cached: one buffer, which the L2 cache may hold, so that no row has a bar."""
        self._is_cached = is_cached
        self._device, self._n, self._nbytes = device, n, n * FLOAT_TYPES[dtype].nbytes
        self._word = FLOAT_TYPES[dtype].word
        self._sets = 1 if is_cached else device.sets(self._nbytes)
        self._x = [device.filled(noise(dtype), self._nbytes) for _ in range(self._sets)]
        sizes = (self._nbytes, n // 2, n // 16)
        self._y, self._packed, self._block_scales = (
            [device.empty(size) for _ in range(self._sets)] for size in sizes
        )
        self._weights = device.upload(
            np.random.default_rng(1).exponential(1, WEIGHED_COLUMNS).astype(np.float32) + 0.01
        )
        self._columns = math.gcd(n, SUMMED_COLUMNS)
        self._sums = device.empty(8 * ROW_SUMS * (n // self._columns))
        self._counts = device.upload(np.zeros(CODES, np.int64))
        self._amax = device.upload(
            np.abs(noise(dtype).view(FLOAT_DTYPES[dtype]).astype(np.float32)).max()
        )

    def table(self) -> str:
        return self._device.measure(Case("copy", 2 * self._nbytes, self._copy), self._cases())

    def _cases(self) -> Iterator[Case]:
        rungs, word = self._device.rungs, self._word
        naive = {
            name: [Rung(self._device.kernels, name)] if word == "bf16" else [] for name in BASELINES
        }
        amax = Rung(self._device.kernels, f"amax_{word}")
        yield self._case(amax, partial(self._measure, amax), parts=0)
        for rung in naive["quantize_naive"] + rungs(f"quantize_nvfp4_{word}"):
            yield self._case(rung, partial(self._quantize, rung, self._amax))
        rung = Rung(self._device.kernels, f"quantize_nvfp4_{word}")
        yield self._case(
            rung, partial(self._measure_and_quantize, amax, rung), f" after amax_{word}", passes=2
        )
        for rung in [
            *naive["dequantize_naive"],
            Rung(self._device.kernels, f"dequantize_nvfp4_{word}"),
        ]:
            yield self._case(rung, partial(self._dequantize, rung, (self._amax, 0)))
        for rung in naive["quantize_naive_mxfp4"]:
            yield self._case(rung, partial(self._quantize, rung, 1), " even")
        for number, rule in enumerate(("floor", "even", "ceil")):
            for rung in rungs(f"quantize_mxfp4_{word}"):
                yield self._case(rung, partial(self._quantize, rung, number), f" {rule}")
        for rule in ("mse", "four-over-six"):
            for rung in rungs(f"search_nvfp4_{word}"):
                yield self._case(
                    rung,
                    partial(self._quantize, rung, self._amax, *rule_number(NVFP4, rule)),
                    f" {rule}",
                )
        for rung in rungs(f"search_mxfp4_{word}"):
            yield self._case(rung, partial(self._quantize, rung), " mse")
        weights = (self._weights, WEIGHED_COLUMNS)
        for rung in rungs(f"weigh_nvfp4_{word}"):
            yield self._case(
                rung, partial(self._quantize, rung, self._amax, *weights), " importance"
            )
        for rung in rungs(f"weigh_mxfp4_{word}"):
            yield self._case(rung, partial(self._quantize, rung, *weights), " importance")
        rung = Rung(self._device.kernels, f"dequantize_mxfp4_{word}")
        yield self._case(rung, partial(self._dequantize, rung, ()))
        for fmt in (NVFP4, MXFP4):
            rung = Rung(self._device.kernels, f"compare_{fmt.name}_{word}")
            extra = (self._amax, 0) if fmt.has_global_scale else ()
            yield self._case(rung, partial(self._sum, rung, extra))
        rung = Rung(self._device.kernels, "count_codes")
        yield self._device.case(rung, partial(self._count, rung), self._n // 2)

    def _case(
        self, rung: Rung, work: Work, note: str = "", passes: int = 1, parts: int = 1
    ) -> Case:
        """passes: over the values; parts: how often codes and scales pass."""
        block_size = MXFP4.block_size if "mxfp4" in rung.name else NVFP4.block_size
        moved = passes * self._nbytes + parts * (self._n // 2 + self._n // block_size)
        return self._device.case(rung, work, moved, self._bar(rung), note)

    def _bar(self, rung: Rung) -> int | None:
        """% of the copy's rate; rules that search are bound by instructions, and have none."""
        is_judged = rung.name not in BASELINES and not self._is_cached
        return SHARES.get(family(rung.name)) if is_judged else None

    def _copy(self, run: int) -> None:
        turn = run % self._sets
        self._device.copy(self._y[turn], self._x[turn])

    def _measure(self, rung: Rung, run: int) -> None:
        x = self._x[run % self._sets]
        rung.launch(self._n, x, self._n, self._device.amax_slot(run))

    def _quantize(self, rung: Rung, *arguments: object) -> None:
        """arguments: those of the rule, then the number of the run"""
        *choice, run = arguments
        turn = int(str(run)) % self._sets
        rung.launch(
            self._n, self._x[turn], self._n, *choice, self._packed[turn], self._block_scales[turn]
        )

    def _measure_and_quantize(self, amax: Rung, rung: Rung, run: int) -> None:
        self._measure(amax, run)
        self._quantize(rung, self._device.amax_slot(run), run)

    def _dequantize(self, rung: Rung, extra: tuple[object, ...], run: int) -> None:
        turn = run % self._sets
        rung.launch(
            self._n, self._packed[turn], self._block_scales[turn], self._n, *extra, self._y[turn]
        )

    def _sum(self, rung: Rung, extra: tuple[object, ...], run: int) -> None:
        turn, rows = run % self._sets, self._n // self._columns
        parts = (self._packed[turn], self._block_scales[turn], *extra, self._sums)
        rung.launch(rows, self._x[turn], rows, self._columns, *parts)

    def _count(self, rung: Rung, run: int) -> None:
        rung.launch(self._n, self._packed[run % self._sets], self._n // 2, self._counts)


def elementwise(device: Device, dtype: str, n: int, is_cached: bool = False) -> str:
    """A table; of cached data it is no measure of memory, but shows how far off that is."""
    return Elementwise(device, dtype, n, is_cached).table()


# --------------------------------------------------------------------------------------------------
# the page


def said(*command: str) -> str:
    """What a command prints on its first line; unknown where it cannot."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def installed(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def head(found: gpus.Survey) -> str:
    gpu = found.gpus[0]
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions = [
        f"driver {driver} (CUDA {gpus.dotted(found.driver)})",
        f"CuPy {found.cupy}",
        f"NVRTC {gpus.dotted(found.nvrtc)}",
        *map(installed, ("torch", "triton", "torchao", "nvidia-modelopt")),
        f"commit {said('git', 'describe', '--always', '--dirty', '--abbrev=7')}",
    ]
    cvt = "with" if gpu.target.has_cvt else "without"
    about = (
        f"Medians of {REPEATS} times of {LAUNCHES} launches between two events, on buffers that "
        "take turns, past the L2 cache but where a heading says otherwise. GB/s of the bytes "
        "that must move; the copy, from"
        " device to device, reads and writes. Each kernel's output was compared before it was "
        "measured."
    )
    machine = (
        f"{gpu.name}, target {gpu.target.arch} {cvt} hardware conversion to and from E2M1; "
        f"{datetime.date.today()}"
    )
    return (
        f"# GPU results\n\n{machine}.\n{'; '.join(versions)}.\nRepeat with `python "
        f"benchmarks/bench.py gpu`.\n\n{about}"
    )


class Page:
    """What is known so far, on paper."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[str] = []
        self.is_whole = True

    def add(self, part: str) -> None:
        self._parts.append(part)
        self._path.write_text("\n\n".join(self._parts) + "\n", encoding="utf-8")
        print(part, flush=True)

    def add_section(self, title: str, section: Callable[[], str]) -> None:
        """Add it, or that it failed, whatever the reason: the others are still wanted."""
        try:
            text = section()
        except Exception as error:
            traceback.print_exc()
            text, self.is_whole = f"Failed: {beside_quantizers.reason(error)}.", False
        self.add(f"## {title}\n\n{text}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.py gpu", description="Measure the CUDA kernels on the first GPU."
    )
    parser.add_argument(
        "--output", type=Path, help="the page; default: benchmarks/results/gpu-NAME.md"
    )
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
    gpu = found.gpus[0]
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    device = Device(gpu, options.seconds)
    page = Page(options.output or RESULTS / f"gpu-{name}.md")
    page.add(head(found))
    sections = {
        "Comparison": compare_all,
        "256M elements, bf16": partial(elementwise, dtype="BF16", n=256 * M),
        **{
            f"Products, {rows} x {columns}": partial(products.products, rows=rows, columns=columns)
            for rows, columns in products.SHAPES
        },
        "64M elements, bf16": partial(elementwise, dtype="BF16", n=64 * M),
        "Packed weights, 64M elements": partial(packed.decoders, shape=packed.SHAPE),
        f"Descents, {descents.SHAPE[0]} x {descents.SHAPE[1]}": descents.descents,
        "16M elements, bf16, again and again in one buffer (in the L2 cache)": partial(
            elementwise, dtype="BF16", n=16 * M, is_cached=True
        ),
        "64M elements, fp16": partial(elementwise, dtype="F16", n=64 * M),
        "64M elements, fp32": partial(elementwise, dtype="F32", n=64 * M),
    }
    for title, section in sections.items():
        page.add_section(title, partial(section, device))
        device.release()
    page.add(MEASURED)
    # last, for they may leave the GPU or the clock in no state to go on
    peers = partial(beside_quantizers.peers, device, x=noise("BF16"))
    page.add_section("Others, 64M elements, bf16", peers)
    device.release()
    is_right = all(not text.startswith("DIFFERS") for text in device.verdicts.values())
    return 0 if page.is_whole and is_right else 1
