"""Which rows of which matrices stand for a model: whole rows, evenly over kinds and layers, within a budget of bytes; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp4convert.codings import Linear
from fp4convert.codings.floats import Picked
from fp4convert.errors import InputError
from fp4convert.numbered import split_numbers

USUAL_NBYTES = 20 * 10**6
MOST_MATRICES = 128  # of a kind: more of them say the same, and each is some requests to a Hub
MOST_STRIPS = 8  # of a matrix
STRIP_NBYTES = 1 << 20
ANY = "*"
TURN = 0.618034  # of a matrix from one sample to the next, so that no place in a matrix is preferred


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of one matrix.

    strips  (first, last + 1) of ranges of whole rows, ascending
    nbytes  that reading them takes
    """

    linear: Linear
    strips: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def rows(self) -> int:
        return sum(last - first for first, last in self.strips)


def kinds_of(linears: Mapping[str, Linear]) -> dict[str, list[Linear]]:
    """Matrices by kind: the glob of their names, with a star for every number; kinds in the order of the source."""
    found: dict[str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        texts, _ = split_numbers(module)
        found[ANY.join(texts)].append(linear)
    return dict(found)


def short_names(kinds: Sequence[str]) -> dict[str, str]:
    """What to call each kind: the fewest last parts of its glob that no other kind ends with, and that begin with a word."""
    ends: dict[str, int] = defaultdict(int)
    for kind in kinds:
        for end in _ends(kind):
            ends[end] += 1
    return {kind: next((end for end in _ends(kind) if ends[end] == 1), kind) for kind in kinds}


def _ends(kind: str) -> list[str]:
    parts = kind.split(".")
    return [".".join(parts[at:]) for at in range(len(parts) - 1, -1, -1) if parts[at] != ANY]


def draw_sample(kinds: Mapping[str, Sequence[Linear]], nbytes: int | None = None) -> dict[str, list[Sample]]:
    """Samples of every kind that take at most so many bytes together, the same for the same source.

    nbytes  None for USUAL_NBYTES, or what a row of every kind takes where that is more
    Raises  InputError where it is less than a row of every kind
    """
    least = {kind: min(map(_least_nbytes, linears)) for kind, linears in kinds.items()}
    nbytes = max(USUAL_NBYTES, sum(least.values())) if nbytes is None else nbytes
    if sum(least.values()) > nbytes:
        detail = f"--sample {nbytes / 1e9:g} GB does not hold a row of each of {len(kinds)} kinds of modules"
        detail = f"{detail}; expected at least {sum(least.values()) / 1e9:.3g} GB"
        raise InputError("sample-size", detail, "Take more, or leave kinds out: --exclude PATTERN.")
    shares = _dealt(kinds, least, nbytes)
    return {kind: _sample_kind(linears, shares[kind]) for kind, linears in kinds.items()}


def _dealt(kinds: Mapping[str, Sequence[Linear]], least: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """The same share for every kind, as far as it can use it, and at least what its smallest row takes."""
    most = {kind: sum(map(_nbytes_read, linears)) for kind, linears in kinds.items()}
    shares = dict(least)
    left = nbytes - sum(least.values())
    open_kinds = set(kinds)
    while open_kinds and left >= len(open_kinds):
        each = left // len(open_kinds)
        for kind in sorted(open_kinds):
            more = min(each, most[kind] - shares[kind])
            shares[kind] += more
            left -= more
        open_kinds = {kind for kind in open_kinds if shares[kind] < most[kind]}
    return shares


def _sample_kind(linears: Sequence[Linear], share: int) -> list[Sample]:
    """Strips of matrices that lie evenly over all of a kind."""
    fitting = [linear for linear in linears if _least_nbytes(linear) <= share]
    count = min(len(fitting), MOST_MATRICES, share // max(map(_least_nbytes, fitting)))
    chosen = [fitting[(2 * number + 1) * len(fitting) // (2 * count)] for number in range(count)]
    granted = [0] * count
    left = share
    for done, at in enumerate(sorted(range(count), key=lambda number: _nbytes_read(chosen[number]))):  # small ones leave some
        granted[at] = min(_nbytes_read(chosen[at]), left // (count - done))
        left -= granted[at]
    return [_strips_of(linear, nbytes, number) for number, (linear, nbytes) in enumerate(zip(chosen, granted, strict=True))]


def _strips_of(linear: Linear, nbytes: int, number: int) -> Sample:
    """So many bytes of a matrix in strips that lie evenly over it; the `number` moves them."""
    rows = linear.shape[0]
    if _is_whole(linear) or nbytes >= _nbytes_read(linear):
        return Sample(linear, ((0, rows),), _nbytes_read(linear))
    row_nbytes = _least_nbytes(linear)
    height = nbytes // row_nbytes
    count = max(1, min(MOST_STRIPS, height, height * row_nbytes // STRIP_NBYTES))
    each, free = height // count, rows - height // count * count
    at = int(number * TURN % 1 * (free // count + 1))  # as far into each gap
    strips = tuple((first, first + each) for first in (at + strip * (rows // count) for strip in range(count)))
    return Sample(linear, strips, each * count * row_nbytes)


def _is_whole(linear: Linear) -> bool:
    """True where a row lies spread over the whole stored matrix."""
    return isinstance(linear.coding, Picked) and linear.coding.is_transposed


def _nbytes_read(linear: Linear) -> int:
    """What reading all rows takes; of a stored matrix that holds others, too, these are read with it."""
    return sum(ref.nbytes for ref in linear.refs)


def _least_nbytes(linear: Linear) -> int:
    """What reading one row takes."""
    return _nbytes_read(linear) if _is_whole(linear) else -(-_nbytes_read(linear) // linear.shape[0])
