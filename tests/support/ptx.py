"""What the compiler makes of the CUDA kernels: NVRTC's PTX, run on the host, and ptxas's listing.

Decides how PTX becomes C++, statement by statement; what an instruction means is ptx.h's business.
An instruction that ptx.h lacks does not compile. Of what ptxas goes on to make, cuobjdump lists the
instructions, and the way that almost every thread takes through them is counted. No GPU is used.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import count, pairwise
from pathlib import Path

import pytest
from cpu_levels import every_level
from paths import SUPPORT
from simt import KERNELS, SimtKernels, compile_for_host

from fp4convert.numerics.backends.cpu import Cpu
from fp4convert.numerics.backends.cubins import HEADERS, Target

PLAIN, WITH_CVT = Target("compute_90", has_cvt=False), Target("compute_120a", has_cvt=True)
FLAGS = ["-std=c++17", "-O1", "-w", "-mfma", "-ffp-contract=off", "-fno-strict-aliasing"]
ENTRY = re.compile(
    r"\.visible \.entry (\w+)\((.*?)\)\s*((?:\.\w+[^\n{]*\n)*)\{(.*?)\n\}", re.DOTALL
)
LABEL = re.compile(r"\$(\w+):\s*")
REGISTERS = re.compile(r"\.reg\s+\.([a-z]+)(\d*)\s+(.*)", re.DOTALL)
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]")
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)\s*(.*)", re.DOTALL)
OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ctaid.x": "blockIdx.x",
    "%ctaid.y": "blockIdx.y",
    "%ctaid.z": "blockIdx.z",
}


# (address, instruction with its predicate, such as "@!P0 LDG.E.128 R36, desc[UR6][R6.64]")
Listing = list[tuple[int, str]]
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+ +)?[A-Z][^;]*?) *;", re.MULTILINE)
BRANCH = re.compile(r"(?:@!?U?P\w+ +)?BRA\S*\s.*?(0x[0-9a-f]+)$")
INSTRUCTION_NBYTES = 16
IS_CONDITIONAL = re.compile(r"@|BRA\S*\s+!?U?P")
IS_CALL = re.compile(r"CALL|\bRET\b")


class UnknownPtxError(Exception):
    """A statement that is not understood."""


def make_ptx(source: Path, target: Target) -> str:
    """What NVRTC makes of one .cu file, with the headers beside it."""
    from cupy_backends.cuda.libs import nvrtc

    headers = [(source.parent / name).read_bytes() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    program = nvrtc.createProgram(source.read_text(), source.name, headers, names)
    try:
        nvrtc.compileProgram(program, target.options)
        made = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return made if isinstance(made, str) else made.decode()


def compile_ptx(
    source: Path,
    folder: Path,
    has_cvt: bool = False,
    changed: Callable[[str], str] = lambda ptx: ptx,
) -> ctypes.CDLL:
    """The kernels of one .cu file as a library of the host's own; as simt.compile_for_host.

    changed  what is done to the PTX before
    """
    text = translate(changed(make_ptx(source, WITH_CVT if has_cvt else PLAIN)))
    return compile_text(text, folder / f"{source.stem}{'-cvt' * has_cvt}-ptx.so")


def compile_text(text: str, library: Path) -> ctypes.CDLL:
    """A library of what `translate` made; CalledProcessError where an instruction is not known."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed to run the CUDA kernels on the host"
    library.with_suffix(".cpp").write_text(text)
    command = [compiler, *FLAGS, "-shared", "-fPIC", f"-I{SUPPORT}"]
    done = [*command, library.with_suffix(".cpp"), "-o", library]
    subprocess.run(done, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


# How kernels are built for the host: of their source, or of what NVRTC makes of it.
BUILDS = [
    *(
        pytest.param((compile_for_host, has_cvt), id="cvt" if has_cvt else "plain")
        for has_cvt in (False, True)
    ),
    pytest.param((compile_ptx, False), id="ptx-90", marks=pytest.mark.slow),
    pytest.param((compile_ptx, True), id="ptx-120a", marks=pytest.mark.slow),
]
SOURCE_OR_PTX = [
    pytest.param(False, id="source"),
    pytest.param(True, id="ptx", marks=pytest.mark.slow),
]


def every_backend(
    folder: Path, is_ptx: bool, cvts: tuple[bool, ...] = (False, True)
) -> dict[str, Cpu | SimtKernels]:
    """The C kernels by level, and the CUDA kernels; or these as NVRTC makes them.

    cvts  without and with the instructions for E2M1
    """
    if is_ptx:
        targets = (PLAIN, WITH_CVT)
        made = {one.arch: SimtKernels(folder, KERNELS, one.has_cvt, compile_ptx) for one in targets}
        return {**made}
    levels = {f"level {level}": cpu for level, cpu in every_level(folder).items()}
    if "LIBCPU" in os.environ:  # sanitized_cpu.py looks at that library alone
        return {**levels}
    simt = {f"simt{', cvt' * cvt}": SimtKernels(folder, has_cvt=cvt) for cvt in cvts}
    return {**levels, **simt}


def translate(ptx: str) -> str:
    """C++ of all entry points; each takes its parameters as 64-bit words."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    entries = ENTRY.findall(ptx)
    if not entries or len(entries) != ptx.count(".entry"):
        raise UnknownPtxError("entry points")
    places = count(1)
    return '#include "ptx.h"\n' + "\n".join(
        _function(
            name, re.findall(r"\.param \.u64 [^,]*?(\w+)\s*(?:,|$)", parameters), body, places
        )
        for name, parameters, _, body in entries
    )


def _function(name: str, parameters: list[str], body: str, places: Iterator[int]) -> str:
    """One entry point.

    places  numbers for exchanges, which lanes must meet at together
    """
    head = ", ".join(f"B64 {parameter}" for parameter in parameters)
    lines = [f'extern "C" __attribute__((visibility("default"))) void {name}({head}) {{']
    for piece in body.split(";"):
        text = piece.strip()
        while match := re.match(r"[{}]\s*", text) or LABEL.match(text):
            lines.append(f"{match[1]}:;" if match.lastindex else match[0].strip())
            text = text[match.end() :]
        if text and not text.startswith(".pragma"):
            lines.append(_statement(text, places))
    return "\n".join([*lines, "}\n"])


def _statement(text: str, places: Iterator[int]) -> str:
    if match := REGISTERS.fullmatch(text):
        return _declaration(*match.groups())
    if match := SHARED.fullmatch(text):
        alignment, name, nbytes = match.groups()
        memory = f"alignas({alignment}) static B8 {name}_memory[{nbytes}];"
        return f"{memory} const B64 {name} = (B64){name}_memory;"
    match = INSTRUCTION.fullmatch(text)
    if not match:
        raise UnknownPtxError(text)
    negated, guard, opcode, rest = match.groups()
    operands = OPERANDS.findall(rest)
    if opcode in ("bra", "bra.uni"):
        done = f"goto {operands[0].lstrip('$').strip()};"
    elif opcode == "ret":
        done = "return;"
    else:
        done = _instruction(opcode, [operand.strip() for operand in operands], places)
    return f"if ({negated}{_word(guard)}) {done}" if guard else done


def _declaration(kind: str, bits: str, names: str) -> str:
    type_ = "PRED" if kind == "pred" else f"B{bits}"
    listed = []
    for name in names.split(","):
        many = re.fullmatch(r"%(\w+)<(\d+)>", name.strip())
        listed += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [_word(name)]
    return f"{type_} {', '.join(listed)};"


def _instruction(opcode: str, operands: list[str], places: Iterator[int]) -> str:
    """A call of the function with the opcode's name, with exceptions for what is no such call."""
    function = f"ptx::{opcode.replace('.', '_')}"
    target, *sources = operands
    if opcode.startswith("ld.param."):
        return f"{_word(target)} = {sources[0].strip('[] ')};"
    if opcode == "bar.warp.sync":
        return f"{function}({next(places)}, {_word(target)});"
    if opcode.startswith("st."):
        return f"{function}({', '.join(_words(target) + _words(sources[0]))});"
    if opcode.startswith("ld.") and target.startswith("{"):
        return f"{function}({', '.join(_words(sources[0]) + _words(target))});"
    if opcode.startswith("mov.b") and sources[0].startswith("{"):
        width = opcode.removeprefix("mov.b")
        return f"{_word(target)} = ptx::pack<B{width}>({', '.join(_words(sources[0]))});"
    if opcode.startswith("mov.b") and target.startswith("{"):
        word = f"(B{opcode.removeprefix('mov.b')}){_word(sources[0])}"
        return f"ptx::unpack({', '.join([word, *_words(target)])});"
    given = [word for source in sources for word in _words(source)]
    if ".sync." in opcode:
        given.insert(0, str(next(places)))
    target, _, is_in_range = target.partition("|")
    call = f"{_word(target)} = {function}({', '.join(given)});"
    return f"{call} {_word(is_in_range)} = true;" if is_in_range else call


def _words(operand: str) -> list[str]:
    """The words of an operand: the parts of a vector, an address, a value."""
    if operand.startswith("{"):
        return [_word(part) for part in operand.strip("{} ").split(",")]
    if operand.startswith("["):
        base, _, offset = operand.strip("[] ").partition("+")
        return [f"{_word(base)} + (int64_t)({offset or 0})"]
    return [_word(operand)]


def _word(operand: str) -> str:
    """A register, a special one, or a number."""
    operand = operand.strip()
    if operand in SPECIAL:
        return SPECIAL[operand]
    if match := re.fullmatch(r"0[fd]([0-9A-F]+)", operand):
        return f"0x{match[1]}{'u' if len(match[1]) == 8 else 'ull'}"
    if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)U?", operand):
        return f"{operand.rstrip('U')}ll"
    if match := re.fullmatch(r"%?([A-Za-z_]\w*)", operand):
        return match[1]
    raise UnknownPtxError(operand)


def disassemble(cubin: Path) -> dict[str, Listing]:
    """The instructions of each entry point; cuobjdump finds nvdisasm, which does the work, beside
    itself.
    """
    (tool,) = [
        file for file in metadata.files("nvidia-cuda-cuobjdump") or () if file.name == "cuobjdump"
    ]
    text = subprocess.run(
        [tool.locate(), "-sass", cubin], check=True, capture_output=True, text=True
    ).stdout
    parts = re.split(r"Function : (\w+)", text)[1:]
    return {
        name: [(int(address, 16), line) for address, line in LINE.findall(body)]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def fast_instructions(listing: Listing) -> int:
    """Instructions of the longest way to the end without a loop and without a call.

    In the elementwise kernels what is rare is rolled up (the exact way) or called (the compiler's
    routine for quotients); everything else is straight.
    """
    ways = _all_ways(listing)
    looped: set[int] = set()
    for address, line in listing:
        match = BRANCH.fullmatch(line)
        if match and int(match[1], 16) <= address:
            looped |= {one for one in ways if int(match[1], 16) <= one <= address}
    longest: dict[int, int] = {}  # to the end; absent where there is no such way
    for address, line in reversed(listing):
        if address in looped or IS_CALL.search(line):
            continue
        lengths = [longest[way] for way in ways[address] if way in longest]
        if lengths or "EXIT" in line:
            longest[address] = 1 + max(lengths) if lengths else 1
    return longest[listing[0][0]]


def _all_ways(listing: Listing) -> dict[int, list[int]]:
    """Where each instruction may go on."""
    following = {address: after for (address, _), (after, _) in pairwise(listing)}
    return {address: _ways(line, following.get(address)) for address, line in listing}


class Loops:
    """The way through a kernel that is one loop, over units, with others in it.

    What is rolled up in fewer instructions than `small` is rare and left out, and so are calls.
    """

    def __init__(self, listing: Listing, small: int = 60) -> None:
        self._ways = _all_ways(listing)
        back = [
            (target, address)
            for address, line in listing
            if not IS_CALL.search(line)
            for target in self._ways[address]
            if target < address
        ]
        self._start = listing[0][0]
        self.outer = max(back, key=lambda loop: loop[1] - loop[0])
        inner = sorted(loop for loop in back if loop != self.outer)
        rare = [loop for loop in inner if loop[1] - loop[0] < small * INSTRUCTION_NBYTES]
        self.inner = [loop for loop in inner if loop not in rare]
        self._barred = {
            address for address in self._ways for low, high in rare if low <= address <= high
        }
        self._back = {(high, low) for low, high in back}

    def before(self) -> int:
        """Instructions before the first unit."""
        return self._shortest(self._start, self.outer[0])

    def once(self, *loops: tuple[int, int]) -> int:
        """Instructions of a unit that goes through these loops in order, without those in them."""
        at, count = self.outer[0], 0
        for low, high in loops:
            count += self._shortest(at, low)
            (at,) = [way for way in self._ways[high] if way != low]
        return count + self._shortest(at, self.outer[1]) + 1

    def longest(self, loop: tuple[int, int]) -> int:
        """Instructions of one turn of a loop, at most."""
        found = {loop[1]: 1}
        for address in sorted((a for a in self._ways if loop[0] <= a < loop[1]), reverse=True):
            counts = [found[way] for way in self._ways[address] if way in found and way > address]
            if counts:
                found[address] = 1 + max(counts)
        return found[loop[0]]

    def _shortest(self, start: int, end: int) -> int:
        """Instructions from one address to another, without the latter's."""
        found, queue = {start: 0}, deque([start])
        while queue:
            address = queue.popleft()
            for way in self._ways[address]:
                if (
                    way not in found
                    and way not in self._barred
                    and (address, way) not in self._back
                ):
                    found[way] = found[address] + 1
                    queue.append(way)
        return found[end]


def _ways(line: str, following: int | None) -> list[int]:
    """Where an instruction may go on; nowhere after a call, which is rare.

    A call that is guarded is passed by: ptxas 12.9 leaves loops so for sm_80.
    """
    if IS_CALL.search(line):
        return [following] if line.startswith("@") and following is not None else []
    match = BRANCH.fullmatch(line)
    is_last = "EXIT" in line and not line.startswith("@")
    ways = [int(match[1], 16)] if match else []
    if following is not None and not is_last and (not match or IS_CONDITIONAL.match(line)):
        ways.append(following)
    return ways
