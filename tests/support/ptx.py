"""What NVRTC makes of the CUDA kernels, run on the host: each PTX instruction is a function of
ptx.h.

Decides how PTX becomes C++, statement by statement; what an instruction means is ptx.h's business.
An instruction that ptx.h lacks does not compile. Nothing is known here of how ptxas goes on.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from paths import SUPPORT
from simt import KERNELS, SimtKernels, compile_for_host

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


def ptx_kernels(folder: Path) -> dict[str, SimtKernels]:
    """The elementwise kernels as NVRTC makes them of either kind of target."""
    return {
        target.arch: SimtKernels(folder, KERNELS, target.has_cvt, compile_ptx)
        for target in (PLAIN, WITH_CVT)
    }


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
