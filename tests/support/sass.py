"""What ptxas made of kernels: the instructions of a cubin, and the way that almost every thread
takes through them.

No GPU is used: cuobjdump disassembles anywhere.
"""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from itertools import pairwise
from pathlib import Path

# (address, instruction with its predicate, such as "@!P0 LDG.E.128 R36, desc[UR6][R6.64]")
Listing = list[tuple[int, str]]
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+ +)?[A-Z][^;]*?) *;", re.MULTILINE)
BRANCH = re.compile(r"(?:@!?U?P\w+ +)?BRA\S*\s.*?(0x[0-9a-f]+)$")
IS_CONDITIONAL = re.compile(r"@|BRA\S*\s+!?U?P")


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
    following = {address: after for (address, _), (after, _) in pairwise(listing)}
    lines = dict(listing)
    looped: set[int] = set()
    for address, line in listing:
        match = BRANCH.fullmatch(line)
        if match and int(match[1], 16) <= address:
            looped |= {one for one in lines if int(match[1], 16) <= one <= address}
    longest: dict[int, int] = {}  # to the end; absent where there is no such way
    for address, line in reversed(listing):
        if address in looped or "CALL" in line or re.search(r"\bRET\b", line):
            continue
        match = BRANCH.fullmatch(line)
        ways = [following.get(address)] if not match or IS_CONDITIONAL.match(line) else []
        ways += [int(match[1], 16)] if match else []
        lengths = [longest[way] for way in ways if way in longest]
        if "EXIT" in line:
            lengths = [0, *lengths] if line.startswith("@") else [0]
        if lengths:
            longest[address] = 1 + max(lengths)
    return longest[listing[0][0]]
