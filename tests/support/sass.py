"""What ptxas made of kernels: the instructions of a cubin, and the way that almost every thread
takes through them.

No GPU is used: cuobjdump disassembles anywhere.
"""

from __future__ import annotations

import re
import subprocess
from collections import deque
from importlib import metadata
from itertools import pairwise
from pathlib import Path

# (address, instruction with its predicate, such as "@!P0 LDG.E.128 R36, desc[UR6][R6.64]")
Listing = list[tuple[int, str]]
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+ +)?[A-Z][^;]*?) *;", re.MULTILINE)
BRANCH = re.compile(r"(?:@!?U?P\w+ +)?BRA\S*\s.*?(0x[0-9a-f]+)$")
INSTRUCTION_NBYTES = 16
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


class Loops:
    """The way through a kernel that is one loop, over units, with others in it.

    What is rolled up in fewer instructions than `small` is rare and left out, and so are calls.
    """

    def __init__(self, listing: Listing, small: int = 60) -> None:
        following = {address: after for (address, _), (after, _) in pairwise(listing)}
        self._ways = {address: _ways(line, following.get(address)) for address, line in listing}
        back = [
            (target, address)
            for address, line in listing
            if "CALL" not in line and not re.search(r"\bRET\b", line)
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
    if "CALL" in line or re.search(r"\bRET\b", line):
        return [following] if line.startswith("@") and following is not None else []
    match = BRANCH.fullmatch(line)
    is_last = "EXIT" in line and not line.startswith("@")
    ways = [int(match[1], 16)] if match else []
    if following is not None and not is_last and (not match or IS_CONDITIONAL.match(line)):
        ways.append(following)
    return ways
