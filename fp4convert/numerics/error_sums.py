"""Errors of rounded values as sums: SQNR, MSE, cosine.

Decides the order of addition, which kernels/compare.* keep, so that the numbers of a tensor are the
same on every device and for any number of threads and panels. What becomes of the sums is the
business of checkpoint/error_report.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4convert.numerics.codec import Float32s, block_steps, dequantize
from fp4convert.numerics.formats import CODES, E2M1_MAX, WITHOUT_SIGNS
from fp4convert.numerics.matrices import Compared, Quantized

# Elements that are added in float32, by lanes; lanes that remain of those.
GROUP, LANES, QUARTERS = 256, 16, 4
FINE, COARSE = 2.0**-70, 2.0**100  # sums whose squares float32 holds
SMALLEST_STEP = 2.0**-50
NORMAL_SCALE = 8  # code of the smallest E4M3 with all its bits
COLUMNS = ("signal", "noise", "output", "max_abs", "clipped")  # of the sums of a row

SOURCE = "source"  # what most tensors are compared with
Float64s = NDArray[np.float64]


def decibels(ratio: float) -> float:
    """Compute 10 log10 of a ratio of powers above zero."""
    return 10 * math.log10(ratio)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the elements of one tensor.

    signal, noise, output  of x^2, (x - y)^2 and y^2
    max_abs    largest |x - y|
    clipped    how many |x| > 6 * step: they lie beyond what their block can say
    histogram  how often each of the 16 codes occurs; empty where codes have more bits
    """

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    output: float = 0.0
    max_abs: float = 0.0
    clipped: int = 0
    histogram: tuple[int, ...] = ()

    def plus(self, compared: Compared, elements: int) -> Sums:
        """Add what further rows lost, in their order."""
        rows = np.frombuffer(compared.rows, np.float64).reshape(-1, len(COLUMNS))
        own = [[self.signal, self.noise, self.output]]
        signal, noise, output = np.add.accumulate(np.concatenate((own, rows[:, :3])))[-1].tolist()
        counts = np.frombuffer(compared.counts, np.int64).tolist()
        histogram = _added(self.histogram, counts)
        most = float(np.maximum.reduce(rows[:, 3], initial=self.max_abs))
        clipped = self.clipped + int(rows[:, 4].sum())
        return Sums(self.elements + elements, signal, noise, output, most, clipped, histogram)

    def with_all(self, other: Sums) -> Sums:
        """Add what another tensor lost."""
        signal, noise, output = (getattr(self, name) + getattr(other, name) for name in COLUMNS[:3])
        histogram = _added(self.histogram, other.histogram)
        most, clipped = max(self.max_abs, other.max_abs), self.clipped + other.clipped
        return Sums(self.elements + other.elements, signal, noise, output, most, clipped, histogram)

    @property
    def mse(self) -> float:
        return self.noise / max(self.elements, 1)

    @property
    def nmse(self) -> float | None:
        """Return noise / signal; None where the values are zero."""
        return self.noise / self.signal if self.signal > 0 else None

    @property
    def sqnr_db(self) -> float | None:
        """Return signal to noise in dB; None where either is zero."""
        return decibels(self.signal / self.noise) if self.signal > 0 and self.noise > 0 else None

    @property
    def cosine(self) -> float | None:
        """Return the cosine of x and y; None where one of them is zero.

        Their product is half of signal + output - noise.
        """
        if not (self.signal > 0 and self.output > 0):
            return None
        product = (self.signal + self.output - self.noise) / 2
        return product / math.sqrt(self.signal * self.output)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Sums:
        """Read what as_json gave; one of json_text.MISSHAPEN for others."""
        entry = dict(entry)
        signal, noise, output, max_abs = (float(entry[name]) for name in COLUMNS[:-1])
        counts = [int(entry[name]) for name in ("elements", "clipped")]
        histogram = tuple(int(count) for count in entry["histogram"])
        if counts[0] < 1 or min(*counts, *histogram) < 0 or len(histogram) not in (0, CODES):
            raise ValueError("no sums of a tensor")
        return Sums(counts[0], signal, noise, output, max_abs, counts[1], histogram)


def _added(histogram: tuple[int, ...], counts: Sequence[int]) -> tuple[int, ...]:
    """Add counts to a histogram, which is empty before the first."""
    return tuple(map(sum, zip(histogram or (0,) * len(counts), counts, strict=True)))


def summarise(tensors: Iterable[tuple[str, Sums]]) -> dict[str, Any]:
    """Summarise tensors: least and mean SQNR in dB, the worst, NMSE.

    tensors  names and sums; those whose values are not finite count for nothing
    """
    finite = [(name, sums) for name, sums in tensors if math.isfinite(sums.noise)]
    known = [(sums.sqnr_db, name) for name, sums in finite if sums.sqnr_db is not None]
    least, worst = min(known, default=(None, None))
    signal, noise = (
        math.fsum(getattr(sums, part) for _, sums in finite) for part in ("signal", "noise")
    )
    return {
        "sqnr_db_min": least,
        "sqnr_db_mean": math.fsum(sqnr_db for sqnr_db, _ in known) / len(known) if known else None,
        "nmse": noise / signal if signal > 0 else None,
        "worst": worst,
    }


def count_erased_rows(q: Quantized) -> int:
    """Count the rows of NVFP4 that held weights and became zeros.

    Their blocks have tiny scales; a block of zeros has 1.0.
    """
    scales = np.frombuffer(q.block_scales, np.uint8).reshape(q.shape[0], -1)
    low = (scales < NORMAL_SCALE).any(axis=1)
    codes = np.frombuffer(q.packed, np.uint8).reshape(q.shape[0], -1)[low]
    return len(codes) - int((codes & WITHOUT_SIGNS).any(axis=1).sum())


@dataclass(frozen=True, slots=True)
class Account:
    """What one tensor lost.

    name     what a person looks for, as Step.name
    format   that its codes have
    against  what it was compared with: SOURCE, or how that was changed before it was rounded
    adapter  of merged weights: the power of the adapter's effect, and of errors along its inputs
    exact    of weights from fake quantization: how many blocks are not zero, and how many of these
             come back
    source_dtype  of what the weights were decoded from; "" where nobody noted it
    """

    name: str
    format: str
    against: str
    sums: Sums
    adapter: tuple[float, float] | None = None
    exact: tuple[int, int] | None = None
    source_dtype: str = ""

    @property
    def adapter_db(self) -> float | None:
        """Return how much of an adapter is left, in dB; None without one."""
        effect, error = self.adapter or (0.0, 0.0)
        return decibels(effect / error) if effect > 0 and error > 0 else None

    def plus(self, compared: Compared, elements: int) -> Account:
        """Add what further rows lost."""
        adapter = self.adapter
        if compared.adapter:
            effect, error = adapter or (0.0, 0.0)
            adapter = effect + compared.adapter[0], error + compared.adapter[1]
        exact = self.exact
        if compared.exact:
            blocks, same = exact or (0, 0)
            exact = blocks + compared.exact[0], same + compared.exact[1]
        sums = self.sums.plus(compared, elements)
        return replace(self, sums=sums, adapter=adapter, exact=exact)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Account:
        """Read what asdict gave; one of json_text.MISSHAPEN for others."""
        entry = dict(entry)
        name, fmt, against = (str(entry[key]) for key in ("name", "format", "against"))
        adapter = entry.get("adapter")
        kept = (float(adapter[0]), float(adapter[1])) if adapter else None
        counted = entry.get("exact")
        exact = (int(counted[0]), int(counted[1])) if counted else None
        dtype = str(entry.get("source_dtype", ""))
        return Account(name, fmt, against, Sums.from_json(entry["sums"]), kept, exact, dtype)


def summarise_adapter(accounts: Iterable[Account]) -> dict[str, Any] | None:
    """Summarise what is left of an adapter, in dB; None without one."""
    known = [(db, one.name) for one in accounts if (db := one.adapter_db) is not None]
    if not known:
        return None
    least, worst = min(known)
    mean = math.fsum(db for db, _ in known) / len(known)
    return {"modules": len(known), "db_mean": mean, "db_min": least, "worst": worst}


def summarise_exact(accounts: Iterable[Account]) -> dict[str, Any] | None:
    """Summarise blocks of fake quantization that came back; None without any."""
    known = [(one.exact, one.name) for one in accounts if one.exact]
    if not known:
        return None
    least, worst = min((same / max(blocks, 1), name) for (blocks, same), name in known)
    blocks, same = (sum(counts[place] for counts, _ in known) for place in (0, 1))
    counted = {"modules": len(known), "blocks": blocks, "exact": same}
    return {**counted, "share_min": least, "worst": worst}


def compare(x: Float32s, q: Quantized) -> Compared:
    """Compare a finite matrix with its codes, as kernels/compare.* do."""
    step = block_steps(q).reshape(len(x), -1)
    rows = compare_values(x, dequantize(q), np.repeat(step, q.format.block_size, axis=1))
    return Compared(rows.reshape(-1).view(np.uint8).data, count_codes(q.packed).view(np.uint8).data)


def compare_values(x: Float32s, y: Float32s, steps: Float32s | None = None) -> Float64s:
    """Sum every row: (rows, 5), in the order of COLUMNS.

    steps  of each element where they are known; without them nothing is clipped
    """
    rows, columns = x.shape
    found = np.zeros((rows, len(COLUMNS)))
    quarters = np.zeros((rows, 3, QUARTERS))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        difference = x - y
        for first in range(0, columns, GROUP):
            group = slice(first, min(first + GROUP, columns))
            own = [values[:, group] for values in (x, difference, y)]
            exact = np.stack([_quarters(values.astype(np.float64)) for values in own], axis=1)
            is_exact: NDArray[np.bool_] = np.full(rows, bool((group.stop - first) % LANES))
            if not is_exact.any():
                fast = np.stack([_quarters(values) for values in own], axis=1).astype(np.float64)
                is_exact = ~np.asarray(
                    (fast[:, :2] >= FINE).all(axis=(1, 2)) & (fast <= COARSE).all(axis=(1, 2))
                )
                if steps is not None:
                    is_exact |= ~(steps[:, group] >= SMALLEST_STEP).all(axis=1)
                exact[~is_exact] = fast[~is_exact]
            quarters += exact
        found[:, 3] = np.abs(difference).max(axis=1, initial=0)
        if steps is not None:
            found[:, 4] = (np.abs(x) > np.abs(np.float32(E2M1_MAX) * steps)).sum(axis=1)
    found[:, :3] = (quarters[..., 0] + quarters[..., 2]) + (quarters[..., 1] + quarters[..., 3])
    return found


def _quarters(values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Sum squares: (rows, 4), in the values' dtype.

    Element i in lane i % 16, then lanes 2j and 2j + 1, then j and j + 4.
    """
    short = -values.shape[1] % LANES
    squares = np.pad(values * values, ((0, 0), (0, short))).reshape(len(values), -1, LANES)
    lanes = np.add.accumulate(squares, axis=1)[:, -1]
    pairs = lanes[:, 0::2] + lanes[:, 1::2]
    return np.asarray(pairs[:, :QUARTERS] + pairs[:, QUARTERS:])


def count_codes(packed: memoryview) -> NDArray[np.int64]:
    """Count how often each of the 16 codes occurs."""
    pairs = np.bincount(np.frombuffer(packed, np.uint8), minlength=CODES * CODES)
    pairs = pairs.reshape(CODES, CODES)
    return np.asarray(pairs.sum(axis=0) + pairs.sum(axis=1), np.int64)
