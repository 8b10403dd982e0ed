"""The kernels as gcc and as clang compile them, in turn; and how many instructions those of ARM64
take, which run in an emulator here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from cpu import compiled_libraries
from cpu.kernels import KINDS, NAMED, Kernels, Memory
from fp4convert.process import LEVELS
from harness.measure import ROOT, in_turn, median_ratio
from harness.sections import Row, Section

ELEMENTS = 1 << 20  # in the last cache, so that the compiler is measured and not the memory
SEARCHED = 1 << 18
CALLS = 8
ROUNDS = 9
MOST_SLOWER = 1.05
COUNTED = 1 << 11  # elements; twice as many take twice as many instructions more
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
INSTALL = "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
ONE_KERNEL = Path(__file__).with_name("one_kernel.c")


def sections(is_quick: bool) -> list[Section]:
    return [in_turns(is_quick), instructions(is_quick)]


def in_turns(is_quick: bool) -> Section:
    """Two libraries, the one that the package runs first."""
    title = "Compilers"
    own = compiled_libraries.installed()
    try:
        other = compiled_libraries.built_by_the_other(own)
    except compiled_libraries.UnavailableError as error:
        return Section(title, f"Not measured: {error}.")
    words = [" ".join(compiled_libraries.compiler_of(path)) for path in (own, other)]
    about = (
        f"Seconds of a core that one thread takes for {ELEMENTS >> 20}M elements (search: "
        f"{SEARCHED >> 10}K) in the cache, compiled by {words[0]} (the package's own) and by "
        f"{words[1]}, in turn; medians of {ROUNDS} pairs of {CALLS} calls."
    )
    names = [compiled_libraries.compiler_of(path)[0] for path in (own, other)]
    headings = ("instruction set", "kernel", "type", "faster")
    rows = tuple(rows_of((own, other), names, is_quick))
    return Section(title, about, headings, rows, "the slower by the faster", is_floor=False)


def rows_of(paths: tuple[Path, Path], names: list[str], is_quick: bool) -> Iterator[Row]:
    memory = Memory(ELEMENTS)
    for level in LEVELS:
        pair = [Kernels(path, level, memory) for path in paths]
        if {each.level for each in pair} != {level}:
            continue
        for name, kind in product(NAMED, KINDS):
            count = SEARCHED if name.startswith("search") else ELEMENTS
            works = [partial(call_often, each, name, kind, count) for each in pair]
            rounds = 3 if is_quick else ROUNDS
            ours, theirs = in_turn(*works, rounds=rounds, clock=lambda work: work())
            ratio = median_ratio(ours, theirs)
            faster = names[ratio > 1]
            labels = (LEVELS[level], name, kind)
            yield Row(labels, (faster,), max(ratio, 1 / ratio), MOST_SLOWER, 2)


def call_often(library: Kernels, name: str, kind: str, count: int) -> float:
    begun = time.thread_time()
    for _ in range(CALLS):
        library.call(name, kind, 0, count)
    return time.thread_time() - begun


def instructions(is_quick: bool) -> Section:
    """No ARM64 machine is at hand: what its processor would have to do."""
    title = "Instructions of ARM64 (NEON)"
    if missing := [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]:
        return Section(title, f"Not counted: no {missing[0]}: {INSTALL}.")
    version = said([COMPILER, "-dumpfullversion"])
    number = re.search(r"version ([\d.]+)", said([EMULATOR, "--version"]))[1]
    about = (
        f"Instructions for an element, compiled by gcc {version} for ARM64 and "
        f"for x86-64-v2, whose vectors are as wide, and counted one by one in QEMU {number}: of "
        f"{2 * COUNTED} elements less those of {COUNTED}. Not a time: it says what a compiler "
        "made of the kernels, not how fast a processor is."
    )
    with tempfile.TemporaryDirectory(prefix="fp4convert-bench-") as folder:
        arm = build(Path(folder, "arm"), COMPILER, ["-static", "-DFP4_LEVEL=0"])
        own = build(Path(folder, "x86"), "gcc", ["-static", "-march=x86-64-v2", "-DFP4_LEVEL=2"])
        rows = []
        for name, kind in product(NAMED[:1] if is_quick else NAMED, KINDS):
            counts = [
                count(emulate, program, f"{name}_{kind}")
                for emulate, program in ((EMULATOR, arm), ("qemu-x86_64", own))
            ]
            cells = tuple(f"{each:.2f}" for each in counts)
            rows.append(Row((name, kind), cells, counts[0] / counts[1]))
    headings = ("kernel", "type", "ARM64", "x86-64-v2")
    return Section(title, about, headings, tuple(rows), "ARM64 by x86-64-v2", is_floor=False)


def said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def build(program: Path, compiler: str, flags: list[str]) -> Path:
    sources = ("amax.c", "quantize.c", "search.c", "dequantize.c")
    files = [ROOT / "kernels" / source for source in sources]
    command = [
        compiler,
        *FLAGS,
        "-Wno-psabi",
        *flags,
        f"-I{ROOT / 'kernels'}",
        ONE_KERNEL,
        *files,
        "-o",
        program,
    ]
    subprocess.run(command, check=True)
    return program


def count(emulator: str, program: Path, kernel: str) -> float:
    """Instructions for one element."""
    found = []
    for elements in (COUNTED, 2 * COUNTED):
        with tempfile.NamedTemporaryFile(prefix="fp4convert-bench-") as log:
            # A block of one instruction each, and a line for every block that runs.
            words = [emulator, "-singlestep", "-d", "exec,nochain", "-D", log.name]
            subprocess.run([*words, program, kernel, str(elements)], check=True)
            with open(log.name, "rb") as lines:
                found.append(sum(line.startswith(b"Trace") for line in lines))
    return (found[1] - found[0]) / COUNTED
