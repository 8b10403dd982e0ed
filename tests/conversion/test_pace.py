"""What a machine does in a second, by a backend that is counted and by the one that is here."""

import math
import threading
import time

import numpy as np
import pytest

from fp4convert.conversion.pace import LARGEST, SMALLEST, measure_pace
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.backends.gpus import survey
from fp4convert.recipes.recipe import Target


class Counted:
    """A backend that does nothing in a known time; it reads every weight both ways."""

    name = "counted"
    threads = 2

    def __init__(self, weights_per_second: float) -> None:
        self.rate = weights_per_second
        self.asked: list[tuple[int, int]] = []
        self.rules: set[tuple[str, str]] = set()
        self.lock = threading.Lock()

    def quantize_group(self, measured, members, fmt, rule, given=None):
        assert measured == members
        (weights,) = members
        rows, columns = weights.shape
        with self.lock:
            self.asked.append(weights.shape)
            self.rules.add((fmt.name, rule))
        time.sleep(rows * columns / self.rate)
        yield 0, None


class Looked:
    """A clock that notes when the main thread looks at it."""

    def __init__(self, looks: list[float]) -> None:
        self.looks = looks

    def perf_counter(self) -> float:
        now = time.perf_counter()
        if threading.current_thread() is threading.main_thread():
            self.looks.append(now)
        return now


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_rate_is_that_of_all_threads(threads, monkeypatch):
    """What all did, but to warm up, in the time between the last two looks of the main thread at
    the clock.
    """
    backend, looks = Counted(1e9), []
    monkeypatch.setattr("fp4convert.conversion.pace.time", Looked(looks))
    pace = measure_pace(backend, Target("nvfp4"), (10, 4096), threads)
    assert pace.threads == (threads or 2)
    measured = sum(math.prod(shape) for shape in backend.asked) - pace.threads * SMALLEST
    assert pace.weights_per_second == pytest.approx(measured / (looks[-1] - looks[-2]))
    assert pace.weights_per_second <= 1e9 * pace.threads
    assert {columns for _, columns in backend.asked} == {4096}
    assert backend.rules == {("nvfp4", "mse")}


def test_a_slow_device_does_one_small_sample_and_a_fast_one_large_ones():
    slow, fast = Counted(1e7), Counted(1e13)
    measure_pace(slow, Target("mxfp4", scale_rule="ceil"), (10, 64), 1)
    assert [math.prod(shape) for shape in slow.asked] == [SMALLEST] * 2  # once to warm up
    assert slow.rules == {("mxfp4", "ceil")}
    measure_pace(fast, Target("mxfp4"), (10, 64), 1)
    assert max(math.prod(shape) for shape in fast.asked) == LARGEST


def test_nothing_to_quantize_is_not_measured():
    backend = Counted(1e9)
    pace = measure_pace(backend, Target("nvfp4"), (), 0)
    assert (pace.weights_per_second, backend.asked) == (None, [])
    assert pace.hashed_bytes_per_second > 1e7


@pytest.mark.parametrize("columns", [16, 4096, 1 << 22])
def test_the_weights_are_finite_whichever_way_they_are_read(columns):
    seen = []

    class Reading(Counted):
        def quantize_group(self, measured, members, fmt, rule, given=None):
            (weights,) = members
            rows = min(
                weights.shape[0], 1 + (9 << 20) // weights.shape[1]
            )  # more than the sample holds
            matrix = weights.rows(0, rows)
            buffer = bytearray(rows * weights.shape[1] * 2)
            weights.copy_rows(0, rows, memoryview(buffer))
            assert bytes(matrix.data) == bytes(buffer)
            assert (matrix.dtype, matrix.shape) == ("BF16", (rows, weights.shape[1]))
            values = (np.frombuffer(buffer, "<u2").astype(np.uint32) << 16).view(np.float32)
            seen.append((float(np.abs(values).max()), bool((values < 0).any()), weights.shape[1]))
            yield 0, None

    measure_pace(Reading(1.0), Target("nvfp4"), (10, columns), 1)
    assert all(largest < 1 and has_negative for largest, has_negative, _ in seen)
    assert {width for *_, width in seen} == {min(columns, 1 << 20)}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_processor_here_has_a_rate(format):
    pace = measure_pace(open_backend("cpu"), Target(format), (10, 4096), 0)
    assert pace.weights_per_second > 1e6


@pytest.mark.gpu
def test_a_gpu_has_a_rate_once_it_is_warm():
    from fp4convert.numerics.backends.cuda import Cuda

    found = survey()
    if not found.gpus:
        pytest.skip(f"no GPU: {found.problem}")
    rates = [
        measure_pace(Cuda(found.gpus[:1]), Target("nvfp4"), (10, 4096), 0).weights_per_second
        for _ in range(3)
    ]
    assert max(rates) < 3 * min(rates)
