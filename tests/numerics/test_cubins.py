"""CUDA binaries: every kernel compiles for every target into the instructions that were meant.

No GPU is used: NVRTC compiles and cuobjdump disassembles anywhere.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pytest
from ptx import Listing, Loops, disassemble, fast_instructions

from fp4convert.errors import DeviceError, InputError
from fp4convert.numerics.backends import cubins, entry_points
from fp4convert.numerics.backends.cubins import Target

ARCHS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
KNOWN = (75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)  # to NVRTC 12.9, from Turing on
STANDS_FOR = {
    "D": ("bf16", "fp16", "fp32"),
    "W": ("nvfp4", "mxfp4"),
    "X": ("bf16", "fp16", "nvfp4"),
}  # in the head comments
BLOCKS = {  # to a multiprocessor
    **{"quantize_fp32": 4, "amax_fp32": 4, "quantize": 5, "amax": 5, "dequantize": 4, "gemv": 2},
    **{"compare": 3, "count": 4, "search": 3, "weigh": 2, "decode": 4, "transpose": 3},
    **{"fp8": 3},  # of compare_values, and 4 of all others
    "descend": 2,
}
# Of a multiprocessor, of a block; a warp's registers come in eights a thread.
REGISTERS, THREADS = 65536, 256
# Of a thread of the elementwise kernels, which has two units: kernels/device.h.
UNIT, ELEMENTS = 16, 32
UNITS_IN_CODE = {"quantize": 2, "search": 1, "weigh": 1}  # the latter two loop over them
# NVRTC's routines, one of each to a kernel; of reciprocals also every place that may call it.
DIVISION = {"FADD.FTZ": 2, "FSETP.GTU.FTZ.AND": 2, "FSETP.NEU.FTZ.AND": 4}
RECIPROCAL = {"FADD.FTZ": 2, "FSETP.NEU.FTZ.AND": 1}
INVERSION = {"FADD.FTZ": 1}
REMAINDER = {"F2I.FTZ.U32.TRUNC.NTZ": 1}
# Instructions that almost every thread issues for an element, at most: what they were. An H200 has
# about 20 issue slots for an element of bf16 at the rate of its memory.
BUDGETS = {
    "sm_80": {"amax_bf16": 3.0, "quantize_nvfp4_bf16": 16.3, "quantize_mxfp4_bf16": 15.1},
    "sm_90": {
        **{"amax_bf16": 2.8, "quantize_nvfp4_bf16": 16.3, "quantize_mxfp4_bf16": 15.0},
        **{"quantize_nvfp4_fp32": 21.7, "dequantize_nvfp4_bf16": 10.9},
    },
    "sm_100a": {"amax_bf16": 2.6, "quantize_nvfp4_bf16": 9.8, "quantize_mxfp4_bf16": 7.6},
    "sm_120a": {
        **{"amax_bf16": 2.8, "quantize_nvfp4_bf16": 9.8, "quantize_mxfp4_bf16": 7.5},
        **{"quantize_nvfp4_fp32": 13.7, "dequantize_nvfp4_bf16": 8.7},
    },
}
NBYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# x + 0.0 or x * 1 + 0.0, of two 16-bit elements or of one float32; adding -RZ would be -0.0 and
# change nothing
PLUS_ZERO = {
    "bf16": r"(HFMA2(\.MMA)?\.BF16_V2 R\d+, R\d+, 1, 1, RZ|HADD2\.BF16_V2 R\d+, R\d+, "
    r"RZ)(\.H0_H0)?",
    "fp16": r"(HFMA2(\.MMA)? R\d+, R\d+, 1, 1, RZ|HADD2 R\d+, R\d+, RZ)(\.H0_H0)?",
    "fp32": r"FADD R\d+, (RZ, R\d+|R\d+, RZ)",
}
PREDICATE = re.compile(r"^@!?U?P\w+ +")
RESOURCES = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes "
    r"spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


# ------------------------------------------------------------------------------------------------
# what the compiler made


@dataclass(frozen=True)
class Kernel:
    """One entry point of one target.

    memory  bytes of stack, stored by spills, loaded by spills
    listing  (address, instruction)
    """

    name: str
    source: str
    registers: int
    memory: tuple[int, ...]
    listing: Listing

    @cached_property
    def code(self) -> tuple[str, ...]:
        """Instructions without predicates, such as "LDG.E.128 R36, desc[UR6][R6.64]"."""
        return tuple(PREDICATE.sub("", line) for _, line in self.listing)

    @property
    def kind(self) -> str:
        """The beginning of its name; what deals with FP8 is of one kind."""
        is_fp8 = self.source == "fp8.cu" or self.name.startswith("compare_values")
        return "fp8" if is_fp8 else self.name.partition("_")[0]

    @property
    def dtype(self) -> str:
        return self.name.rpartition("_")[2]

    @property
    def opcodes(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self.code)

    def wide_nbytes(self, opcode: str) -> int:
        """Bytes that a thread moves by 128-bit and 256-bit instructions."""
        wide = rf"{opcode}\.E\.(?:ENL2\.)?(128|256)(\..*)?"
        widths = [re.fullmatch(wide, line.split()[0]) for line in self.code]
        return sum(int(match[1]) // 8 for match in widths if match)


@dataclass(frozen=True)
class Built:
    arch: str
    has_cvt: bool
    kernels: tuple[Kernel, ...]

    def of(self, *kinds: str) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.kind in kinds]


GATE = (12, 0)  # the target that is compiled for in the gate; it has E2M1 instructions


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each == GATE else pytest.mark.slow) for each in ARCHS],
    ids=ARCHS.values(),
)
def built(request, tmp_path_factory) -> Built:
    target = cubins.target_for(request.param, cubins.known_targets())
    folder = tmp_path_factory.mktemp("built")
    kernels = []
    for source in entry_points.SOURCES:
        path = cubins.kernels_folder() / source
        cubin, log = cubins.compile_cubin(path, target, ("--ptxas-options=-v",))
        (folder / source).write_bytes(cubin)
        listings = disassemble(folder / source)
        resources = {
            name: [int(number) for number in rest] for name, *rest in RESOURCES.findall(log)
        }
        assert listings.keys() == resources.keys()
        kernels += [
            Kernel(name, source, resources[name][3], tuple(resources[name][:3]), listing)
            for name, listing in listings.items()
        ]
    arch = ARCHS[request.param]
    return Built(arch, arch.endswith("a"), tuple(kernels))


def promised(source: str) -> set[str]:
    """The entry points of a head comment, which writes D, W and X for types."""
    head = (cubins.kernels_folder() / source).read_text().partition("*/")[0]
    names = set()
    for name in re.findall(r"^ \*   ([a-z]\w*)\(", head, re.MULTILINE):
        types = [STANDS_FOR.get(word, (word,)) for word in name.split("_")]
        names |= {"_".join(choice) for choice in product(*types)}
    return names


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("quantize.cu", 9),
        ("search.cu", 12),
        ("dequantize.cu", 6),
        ("gemv.cu", 6),
        ("compare.cu", 10),
        ("fp8.cu", 10),
        ("decode.cu", 5),
        ("descend.cu", 2),
    ],
)
@pytest.mark.slow
def test_entry_points_are_those_of_the_head_comment(built, source, count):
    names = {kernel.name for kernel in built.kernels if kernel.source == source}
    assert names == promised(source)
    assert len(names) == count


def test_entry_points_are_those_of_the_cpu_library(built):
    source = (cubins.kernels_folder() / "cpu.c").read_text()
    both, _, rest = source.partition("that CUDA has no kernels for")
    text = both + rest[rest.index("#define ENTRIES") :]
    stems = re.findall(r"E\((\w+)_##d,", text)
    dtypes = re.findall(r"FOR_DTYPE\(E, (\w+), \w*(?:_t|float)\)", text)
    expected = {f"{stem}_{dtype}" for stem, dtype in product(stems, dtypes)}
    assert len(expected) == 33
    expected |= set(re.findall(r"E\((count_codes|descend_\w+),", text))
    kinds = ("amax", "quantize", "search", "weigh", "dequantize", "compare", "count", "descend")
    assert {kernel.name for kernel in built.of(*kinds)} == expected


# One register, of a kernel that compares FP8 with its source.
SPILLS = {"sm_86": {"compare_values_fp16"}, "sm_89": {"compare_values_fp16"}}


def test_nothing_spills(built):
    spills = {kernel.name: kernel.memory for kernel in built.kernels if any(kernel.memory)}
    assert spills.keys() <= SPILLS.get(built.arch, set())
    assert all(max(memory) <= 8 for memory in spills.values())
    assert spills.keys() >= {
        kernel.name
        for kernel in built.kernels
        if any(line.startswith(("LDL", "STL")) for line in kernel.code)
    }


def test_registers_leave_room_for_the_promised_blocks(built):
    for kernel in built.kernels:
        blocks = BLOCKS.get(f"{kernel.kind}_{kernel.dtype}") or BLOCKS[kernel.kind]
        assert kernel.registers <= REGISTERS // (THREADS * blocks) // 8 * 8, kernel.name


def test_e2m1_instructions_are_used_where_the_target_has_them(built):
    """One rounds two elements, or reads two; codes of steps out of the fast way's range, and exact
    costs, go by bits everywhere.

    gemv decodes 4 rows of 16 pairs of weights, in the code for one vector and in that for two;
    dequantize 4 groups of 8 codes; compare 8 codes of a unit; searches for NVFP4 scales round a
    unit to find a cost.
    """
    for kernel in built.kernels:
        rounding, decoding = (
            sum(count for opcode, count in kernel.opcodes.items() if re.match(pattern, opcode))
            for pattern in (r"F2FP\..*E2M1\.F32\.", r"F2FP\.F16\.E2M1\.UNPACK")
        )
        is_searching = kernel.name.startswith(("search_nvfp4", "weigh_nvfp4"))
        rounded = UNITS_IN_CODE.get(kernel.kind, 0) + is_searching
        least = {"gemv": 2 * 4 * 16, "dequantize": 16, "compare": 8}.get(
            kernel.kind, is_searching * UNIT // 2
        )
        if not built.has_cvt:
            rounded = least = 0
        assert rounding == rounded * UNIT // 2, kernel.name
        assert decoding >= least, kernel.name
        assert bool(decoding) == bool(least), kernel.name
        assert any("E2M1" in line for line in kernel.code) == bool(rounding or decoding), (
            kernel.name
        )


def test_elements_are_on_their_way_before_the_global_scale_is_waited_for(built):
    for kernel in built.of("quantize"):
        lines = [line.split()[0] for line in kernel.code]
        loads = [at for at, code in enumerate(lines) if re.match(r"LDG\.E\..*(128|256)", code)]
        checks = [at for at, code in enumerate(lines) if code == "FCHK"]
        assert max(loads) < min(checks, default=len(lines)), kernel.name


def test_elements_are_read_by_wide_loads(built):
    for kernel in built.of("amax", "quantize"):
        assert kernel.wide_nbytes("LDG") == ELEMENTS * NBYTES[kernel.dtype], kernel.name


def test_weights_of_gemv_are_read_by_wide_loads(built):
    """4 rows of 16 bytes, twice (this tile and the next), in the code for one vector and in that
    for two; 16-bit x: 64 bytes.
    """
    for kernel in built.of("gemv"):
        x_nbytes = 0 if kernel.dtype == "nvfp4" else 64 * (1 + 2)
        assert kernel.wide_nbytes("LDG") == 4 * 16 * 2 * 2 + x_nbytes, kernel.name


def test_dequantize_writes_by_wide_stores_alone(built):
    for kernel in built.of("dequantize"):
        stores = [opcode for opcode in kernel.opcodes if opcode.startswith("ST")]
        assert all(re.match(r"STG\.E\.(128|ENL2\.256)", opcode) for opcode in stores), kernel.name
        ways = 2 if "nvfp4" in kernel.name else 1  # a stored multiplier and a stored divisor
        assert kernel.wide_nbytes("STG") == ways * ELEMENTS * NBYTES[kernel.dtype], kernel.name


def test_what_is_decoded_is_written_by_wide_stores(built):
    """All but what lies in several blocks or at an edge; of integers, a loop may be unrolled."""
    for kernel in built.of("decode", "transpose"):
        squares = 16 if kernel.kind == "transpose" else 0
        nbytes = squares * 16 // int(kernel.name[-1]) if squares else UNIT * 4
        assert kernel.wide_nbytes("STG") in (nbytes, 2 * nbytes), kernel.name
        assert kernel.wide_nbytes("LDG") or kernel.name == "decode_int4", kernel.name


def test_fp8_is_read_and_written_by_wide_instructions(built):
    """But for what lies in several blocks; costs are a double to 8 threads."""
    for kernel in built.of("fp8"):
        if kernel.name.startswith(("grid_amax", "quantize_fp8")):
            assert kernel.wide_nbytes("LDG") == UNIT * NBYTES[kernel.dtype], kernel.name
        if kernel.name.startswith("quantize_fp8"):
            assert kernel.wide_nbytes("STG") == UNIT, kernel.name
        if kernel.name.startswith("compare_values"):
            assert kernel.wide_nbytes("LDG") >= UNIT // 2 * (4 + NBYTES[kernel.dtype]), kernel.name
            assert kernel.registers <= 80


def test_no_kernel_takes_more_instructions_than_it_did(built):
    budgets = BUDGETS.get(built.arch, {})
    found = {
        kernel.name: round(fast_instructions(kernel.listing) / ELEMENTS, 1)
        for kernel in built.kernels
        if kernel.name in budgets
    }
    assert {name: count for name, count in found.items() if count > budgets[name]} == {}
    assert found.keys() == budgets.keys()


# search_nvfp4_bf16, rule mse: turns of the loops of a warp of Gaussian weights (of Student's and
# Laplace's fewer), the most of its 32 blocks: two codes in fp16 beyond the ten that are unrolled;
# one code in float32; and of how many warps one block is in doubt after that, between two codes.
TURNS, DOUBTFUL, DOUBTS = (0.84, 3.03), 0.011, 2
SEARCH_BUDGETS = {"sm_90": 89.7, "sm_100a": 78.1, "sm_120a": 78.9}


# An element in the loop of compare_* over 16 units of a group, for bf16; what folds a group's sums
# and adds them to the row's is about 1.3 more.
COMPARE_BUDGETS = {
    "sm_80": {"nvfp4": 19.0, "mxfp4": 17.9},
    "sm_90": {"nvfp4": 19.0, "mxfp4": 17.8},
    "sm_100a": {"nvfp4": 18.5, "mxfp4": 15.6},
    "sm_120a": {"nvfp4": 18.8, "mxfp4": 15.9},
}


def test_comparing_takes_no_more_instructions_than_it_did(built):
    """All of x is read by wide loads, in the first of the inner loops."""
    for kernel in built.of("compare"):
        loops, lines = Loops(kernel.listing, small=0), dict(kernel.listing)
        low, high = next(
            (low, high)
            for low, high in loops.inner
            if any("LDG" in line for at, line in lines.items() if low <= at <= high)
        )
        loads = [line for at, line in lines.items() if low <= at <= high and "LDG" in line]
        wide = sum("LDG.E.128" in line for line in loads)
        elements = wide * 16 / NBYTES[kernel.dtype]
        assert elements == 16, kernel.name
        codes, scales = elements / 8, elements / (8 if "nvfp4" in kernel.name else 16)
        assert len(loads) - wide in (codes + scales, 2 * codes), kernel.name
        fmt = kernel.name.split("_")[1]
        if kernel.dtype == "bf16" and built.arch in COMPARE_BUDGETS:
            count = loops.longest((low, high)) / elements
            assert count <= COMPARE_BUDGETS[built.arch][fmt], kernel.name


def test_counting_takes_no_more_instructions_than_it_did(built):
    """Two turns of 32 codes to a thread's loop; rolled up, so that nothing but the loop counts."""
    (listing,) = [k.listing for k in built.kernels if k.name == "count_codes"]
    (loop,) = Loops(listing).inner or [Loops(listing).outer]
    assert Loops(listing).longest(loop) / 64 <= 3.4


# A unit of decode_*, with half of what comes before a thread's two; an element of transpose_*.
DECODE_BUDGETS = {
    "sm_80": {"fp8": 20.9, "int4": 14.4, "int8": 14.4, "2": 3.4, "4": 8.0},
    "sm_90": {"fp8": 20.9, "int4": 14.9, "int8": 15.0, "2": 3.5, "4": 8.2},
    "sm_100a": {"fp8": 21.0, "int4": 15.0, "int8": 13.5, "2": 3.4, "4": 8.0},
    "sm_120a": {"fp8": 20.9, "int4": 14.7, "int8": 13.2, "2": 3.2, "4": 7.5},
}


def test_decoding_takes_no_more_instructions_than_it_did(built):
    """What lies in several blocks or at an edge is rolled up in every loop but that over units."""
    budgets = DECODE_BUDGETS.get(built.arch, {})
    counts = {}
    for kernel in built.of("decode", "transpose"):
        name = kernel.name.partition("_")[2]
        if kernel.kind == "transpose":
            counts[name] = fast_instructions(kernel.listing) / (16 // int(name)) ** 2
        else:
            loops = Loops(kernel.listing, small=len(kernel.listing))
            counts[name] = (loops.before() / 2 + loops.once()) / UNIT
    assert counts.keys() == {"fp8", "int4", "int8", "2", "4"}
    assert {n: count for n, count in counts.items() if count > budgets.get(n, count)} == {}


def test_the_search_takes_no_more_instructions_than_it_did(built):
    if built.arch not in SEARCH_BUDGETS:
        pytest.skip("no budget is set for this target")
    (listing,) = [k.listing for k in built.kernels if k.name == "search_nvfp4_bf16"]
    loops = Loops(listing)
    *rough, exact = loops.inner
    count = loops.before() / 2 + loops.once(*rough)
    count += sum(n * loops.longest(loop) for n, loop in zip(TURNS, rough, strict=True))
    count += DOUBTFUL * (loops.once(*rough, exact) - loops.once(*rough))
    count += DOUBTFUL * DOUBTS * loops.longest(exact)
    assert count / UNIT <= SEARCH_BUDGETS[built.arch]


def test_the_fast_way_leaves_out_loops_and_calls_and_takes_the_longer_branch():
    lines = [
        "S2R R0, SR_TID.X",
        "@P0 BRA 0x50",
        "IADD3 R1, R1, 0x1, RZ",  # rolled up
        "@P1 BRA 0x20",
        "EXIT",
        "@!P2 BRA 0x90",
        "FMUL R2, R2, R3",
        "FMUL R2, R2, R3",
        "EXIT",
        "CALL.REL.NOINC 0xb0",  # of a routine
        "EXIT",
        "RET.REL.NODEC R4",
    ]
    assert fast_instructions([(16 * number, line) for number, line in enumerate(lines)]) == 6


def flushing(kernel: Kernel) -> Counter[str]:
    """What flushes to zero: instructions of the compiler's own routines for quotients alone.

    Those give IEEE's quotients (-prec-div): they look for NaN and infinity, or turn a sign, where
    nothing is subnormal.  FP8 divides by its scales; of FP4 NVFP4 alone divides, for block scales
    (quantize and the searches) or by a stored divisor (dequantize, compare); fp32 has its steps
    inverted too, in the code of every unit, and gemv its divisor.  weigh takes a remainder of
    64-bit integers, in whose short way a quotient from 1 to 2^32 becomes an integer.
    """
    parts = [REMAINDER] if kernel.kind == "weigh" else []
    # Quotients of integers alone, as many as the loop is unrolled for.
    if kernel.kind in ("decode", "fp8"):
        parts += [REMAINDER] * kernel.opcodes["F2I.FTZ.U32.TRUNC.NTZ"]
    if kernel.name.startswith(("quantize_fp8", "row_costs")):
        parts += [DIVISION]
    elif kernel.kind == "descend":  # quotients of columns, 1 / H_jj, and places in a ring
        parts += [DIVISION, RECIPROCAL, INVERSION, REMAINDER, REMAINDER]
    elif kernel.name.startswith("gemv_nvfp4"):
        parts += [RECIPROCAL, INVERSION]
    elif "_nvfp4_" in kernel.name and kernel.kind != "gemv":
        units = UNITS_IN_CODE.get(kernel.kind, 0) if kernel.dtype == "fp32" else 0
        parts += [DIVISION, *[RECIPROCAL] * bool(units), *[INVERSION] * units]
    return sum(map(Counter, parts), Counter())


def test_subnormals_are_not_flushed(built):
    for kernel in built.kernels:
        found = {opcode: count for opcode, count in kernel.opcodes.items() if "FTZ" in opcode}
        assert Counter(found) == flushing(kernel), kernel.name


def test_negative_zero_loses_its_sign_in_every_element(built):
    """The compiler must not drop x + 0.0 as if it were x: the code of -0.0 is 0, not 8."""
    for kernel in built.of("quantize"):
        lines = [line.replace(".reuse", "") for line in kernel.code]
        found = sum(bool(re.fullmatch(PLUS_ZERO[kernel.dtype], line)) for line in lines)
        assert found == ELEMENTS * NBYTES[kernel.dtype] // 4, kernel.name


def test_nan_wins_in_every_maximum_of_halves(built):
    """Without .NAN the larger number would win, and amax would not tell of NaN."""
    for kernel in built.of("amax", "quantize"):
        maxima = {code for code in kernel.opcodes if re.match(r".*HMNMX2|V?HMNMX\.", code)}
        assert bool(maxima) == (kernel.dtype != "fp32"), kernel.name
        assert all(".NAN" in opcode for opcode in maxima), kernel.name


# --------------------------------------------------------------------------------------------------
# the target


@pytest.mark.parametrize("capability", ARCHS)
def test_target_is_exact_where_nvrtc_knows_it(capability):
    arch = ARCHS[capability]
    target = cubins.target_for(capability, KNOWN)
    assert target == Target(arch, has_cvt=arch.endswith("a"))
    defines = ("-DFP4_CVT",) if target.has_cvt else ()
    # No -ftz, no -use_fast_math.
    assert target.options == (f"-arch={arch}", "-std=c++17", "--fmad=false", *defines)


def test_thor_has_the_instructions_where_nvrtc_knows_its_number():
    """CUDA 13 calls it 11.0, and knows no 10.1."""
    assert cubins.target_for((11, 0), (*KNOWN, 110)) == Target("sm_110a", has_cvt=True)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 8), "sm_87"),
        ((9, 1), "sm_90"),
        ((10, 1), "sm_101"),
        ((10, 9), "sm_103"),
        ((12, 3), "sm_121"),
    ],
)
def test_newer_minor_gets_the_newest_plain_target_of_its_major(capability, arch):
    assert cubins.target_for(capability, KNOWN) == Target(arch, has_cvt=False)


def test_nvrtc_without_sm_121_gives_plain_sm_120_that_compiles():
    target = cubins.target_for((12, 1), [number for number in KNOWN if number != 121])
    assert target == Target("sm_120", has_cvt=False)
    assert cubins.compile_cubin(cubins.kernels_folder() / "quantize.cu", target)[0]


@pytest.mark.parametrize("capability", [(7, 5), (5, 0)])
def test_old_gpu_is_refused(capability):
    with pytest.raises(InputError, match=r"is too old; expected 8\.0 or newer") as caught:
        cubins.target_for(capability, KNOWN)
    assert caught.value.code == "no-target"


@pytest.mark.parametrize(
    ("capability", "known"), [((13, 0), KNOWN), ((12, 0), (80, 90)), ((8, 0), (86, 90))]
)
def test_gpu_beyond_nvrtc_is_refused(capability, known):
    version = ".".join(map(str, cubins.nvrtc_version()))
    number = ".".join(map(str, capability))
    expected = f"NVRTC {version} cannot compile for compute capability {number}"
    with pytest.raises(InputError, match=re.escape(expected)) as caught:
        cubins.target_for(capability, known)
    assert caught.value.code == "no-target"


@pytest.mark.parametrize("source", ["quantize.cu", "gemv.cu"])
def test_plain_sm_120_lacks_the_e2m1_instructions(source):
    """Why the loader asks for sm_120a, which CuPy's compiler never does."""
    with pytest.raises(DeviceError, match=r"e2m1x2' not supported on \.target 'sm_120'"):
        cubins.compile_cubin(cubins.kernels_folder() / source, Target("sm_120", has_cvt=True))


def test_broken_source_shows_nvrtcs_log(tmp_path):
    (tmp_path / "broken.cu").write_text(
        '#include "device.h"\nKERNEL(1) broken(u32 *y) { *y = undeclared; }\n'
    )
    expected = (
        r"NVRTC [0-9.]+ does not compile broken\.cu for sm_90: broken\.cu\(2\): error: identifier "
        r'"undeclared" is undefined'
    )
    with pytest.raises(DeviceError, match=expected):
        cubins.compile_cubin(tmp_path / "broken.cu", Target("sm_90", has_cvt=False))
