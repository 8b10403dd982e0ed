"""Define what every backend offers: the protocol Backend.

A backend gives the bytes of codec.py, whichever it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from fp4convert.numerics.codec import Float32s
from fp4convert.numerics.formats import Format
from fp4convert.numerics.fp8_int import Float64s
from fp4convert.numerics.matrices import Blocks, Fp8Panel, Quantized, Weights


class Given(NamedTuple):
    """What a scale group is quantized under, beside its own weights.

    amax        what sets the global scale in place of the group's own, so that nothing is read to
                measure that; values beyond it saturate
    importance  a vector for each member, (columns,), as codec.weigh takes it: for rule importance
                alone
    note        with an amax: told the number of the member and the largest magnitude of each panel
    is_own      the amax is the group's own, measured before: no value is beyond it or not finite
    """

    amax: float | None = None
    importance: Sequence[Float32s] = ()
    note: Callable[[int, float], None] = lambda number, amax: None
    is_own: bool = False


OWN = Given()


class Fp8Passes(Protocol):
    """Passes over matrices that become E4M3; they equal fp8_int.py.

    block  rows and columns that share a scale; those at the edges may be cut
    """

    def block_amaxes(self, weights: Weights, block: tuple[int, int]) -> Float32s:
        """Find the largest magnitude of every block, also Inf or NaN."""

    def block_costs(
        self, weights: Weights, block: tuple[int, int], candidates: Sequence[Float32s]
    ) -> Float64s:
        """Sum the squared errors of blocks: a table for each of the scales."""

    def fp8_panels(
        self, weights: Weights, block: tuple[int, int], scales: Float32s
    ) -> Iterator[Fp8Panel]:
        """Round finite rows in order; a panel is valid until the next."""


class Backend(Protocol):
    """Arithmetic on whole rows, a panel at a time: little memory."""

    @property
    def name(self) -> str:
        """Name the device as --json does: cpu, cuda:0."""

    @property
    def threads(self) -> int:
        """Say how many callers it serves at once."""

    def quantize_group(
        self,
        measured: Sequence[Weights],
        members: Sequence[Weights],
        fmt: Format,
        rule: str,
        given: Given = OWN,
    ) -> Iterator[tuple[int, Quantized]]:
        """Quantize the members of a scale group under one amax.

        Equals codec.quantize.
        measured  whose largest magnitude is the group's: the members, and what shares their scale
                  elsewhere
        Yields    (number of the member, its next panel), member by member; panels are compared with
                  their weights, and each is valid until the next is asked for
        Raises    NumericError where anything measured holds Inf or NaN, before the first panel of a
                  format with a global scale, or under a given amax before the panel itself;
                  InputError for a rule of another format, and for importance that does not fit
        """

    def group_amax(self, measured: Sequence[Weights]) -> float | None:
        """Find the largest magnitude of a scale group before it is rounded.

        Returns  None where quantize_group finds it, for rows stay with the device meanwhile
        Raises   NumericError where there is Inf or NaN
        """

    def dequantize_panels(self, q: Blocks, dtype: str) -> Iterator[memoryview]:
        """Read the values in order, as bytes of `dtype`.

        Equals codec.dequantize, rounded once.
        Yields    panels that are valid until the next is asked for
        Raises    NumericError where a value is beyond the range of F16 or BF16
        """

    def fp8_passes(self, weights: Weights) -> AbstractContextManager[Fp8Passes]:
        """Lend what rounds this matrix; it may be kept there meanwhile."""

    def descend(self, x: Float32s, q: Quantized, h: Float32s, passes: int) -> Quantized:
        """Find codes and scales that cost less; equals descent.descend.

        Raises  DeviceError where a GPU has no memory for H and a few rows
        """

    def held_nbytes(self, threads: int, widest: int) -> int:
        """Count the host memory held for callers; `widest` of their rows."""


def expected_device(word: str) -> str:
    """Return what --device takes, with the device that a word may mean."""
    meant = re.fullmatch(r"(cpu|cuda|gpu|nvidia)?[ :_-]*([0-9]{1,9})?", word.strip().lower())
    near = ""
    if meant and any(meant.groups()):
        number = f":{int(meant[2])}" if meant[2] else ""
        near = f"; did you mean {'cpu' if meant[1] == 'cpu' else f'cuda{number}'}?"
    return f"auto, cpu, cuda or cuda:N{near}"
