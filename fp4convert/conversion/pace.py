"""Measure how fast this machine rounds and hashes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from fp4convert.checkpoint.dialects.target_forms import form_of
from fp4convert.checkpoint.encodings.fp8 import block_of
from fp4convert.numerics.backends.base import Backend, Given
from fp4convert.numerics.formats import IMPORTANCE, format_named
from fp4convert.numerics.fp8_rounding import find_scales
from fp4convert.numerics.matrices import PANEL_ELEMENTS, Matrix, RowReader
from fp4convert.process import processors
from fp4convert.recipes.recipe import Target

SECONDS = 0.1  # of arithmetic; of hashing 0.033
# Weights of a sample: twice as many each time, until what begins a call costs nothing.
SMALLEST, LARGEST = 1 << 20, 64 << 20
UNIT_NBYTES = 1 << 20
WIDEST = 1 << 20
ELEMENT_NBYTES = 2


class Pace(NamedTuple):
    """Rates of this machine.

    threads                  that work at once
    weights_per_second       of all threads together; None where nothing is quantized
    hashed_bytes_per_second  of a thread that hashes what is written
    """

    threads: int
    weights_per_second: float | None
    hashed_bytes_per_second: float


def measure_pace(backend: Backend, target: Target, widest: Sequence[int], threads: int) -> Pace:
    """Measure the rates for a plan: 0.13 s, and one panel of each.

    widest   shape of the matrix with the longest rows, which the samples resemble; () for none
    threads  0 is as many as suit the device
    """
    threads = threads or backend.threads
    # A panel of finite bf16 numbers of both signs, none much larger than weights are.
    random, half = Random(0), UNIT_NBYTES // ELEMENT_NBYTES
    signs_and_exponents = bytes((byte & 0x80) | 0x3A + (byte & 3) for byte in range(256))
    unit = bytearray(UNIT_NBYTES)
    unit[0::2] = random.randbytes(half)
    unit[1::2] = random.randbytes(half).translate(signs_and_exponents)
    data = bytes(unit) * (PANEL_ELEMENTS * ELEMENT_NBYTES // UNIT_NBYTES)
    hashed, begun, seconds = 0, time.perf_counter(), 0.0
    while not hashed or seconds < SECONDS / 3:  # once at least, however busy the machine is
        hashlib.sha256(data)
        hashed += len(data)
        seconds = time.perf_counter() - begun
    rate = None
    if widest:
        sample = _Sample((1, min(widest[-1], WIDEST)), data)
        rate = _rate_of_weights(backend, target, sample, threads)
    return Pace(threads, rate, hashed / seconds)


def _rate_of_weights(backend: Backend, target: Target, sample: _Sample, threads: int) -> float:
    """Measure how many weights all threads quantize in a second."""
    fmt = format_named(target.format)
    rule, columns = target.rule_for(fmt), sample.shape[1]
    given = Given(importance=[np.ones(columns, np.float32)] if rule == IMPORTANCE else ())

    def work(seconds: float) -> int:
        """Count the weights done, of one sample at least."""
        done, count, ended = 0, SMALLEST, time.perf_counter() + seconds
        while not done or time.perf_counter() < ended:
            rows = max(1, count // columns)
            weights = _Sample((rows, columns), sample.data)
            if fmt.is_fp8:
                block = block_of(form_of(target), weights.shape)
                with backend.fp8_passes(weights) as passes:
                    scales = find_scales(weights, block, fmt, rule, passes)
                    done += sum(p.codes.nbytes for p in passes.fp8_panels(weights, block, scales))
                count = min(2 * count, LARGEST)
                continue
            for _ in backend.quantize_group([weights], [weights], fmt, rule, given):
                pass
            done, count = done + rows * columns, min(2 * count, LARGEST)
        return done

    threads = min(threads, 4 * processors())  # more of them are no faster
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [0.0] * threads))  # what is loaded, compiled or reserved once
        begun = time.perf_counter()
        done = sum(pool.map(work, [SECONDS] * threads))
        return done / (time.perf_counter() - begun)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample(RowReader):
    """Weights of any height, which are the same few rows again and again."""

    shape: tuple[int, int]
    data: bytes
    dtype: str = "BF16"

    def rows(self, first: int, last: int) -> Matrix:
        nbytes = (last - first) * self.shape[1] * ELEMENT_NBYTES
        data = self.data * -(-nbytes // len(self.data)) if nbytes > len(self.data) else self.data
        return Matrix(memoryview(data)[:nbytes], self.dtype, (last - first, self.shape[1]))

    def copy_rows(self, first: int, last: int, buffer: memoryview) -> None:
        for at in range(0, buffer.nbytes, len(self.data)):
            part = self.data[: buffer.nbytes - at]
            buffer[at : at + len(part)] = part
