"""What a person is told while work goes on: right figures, after a resume and from several threads
too.
"""

from __future__ import annotations

from threading import Thread

import pytest

from fp4convert.progress import LINE_SECONDS, Meter, Phases, duration_text, size_text

GB = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 kB"),
        (4_321, "4.32 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (90_870_000, "90.9 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (1_200_000_000, "1.20 GB"),
        (9_996_000_000, "10.0 GB"),
        (15_300_000_000, "15.3 GB"),
        (666_592_350_000, "667 GB"),
        (2_027_551_730_000, "2.03 TB"),
        (12_345_000_000_000_000, "12345 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.284, "0.28 s"),
        (9.999, "10 s"),
        (59.2, "1 min 0 s"),
        (312, "5 min 12 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert duration_text(seconds) == text


def test_a_line_tells_share_rate_time_left_and_tensor(clock):
    said = []
    phases = Phases(lambda line, tensor: said.append((line, tensor)), clock)
    phases.begin("quantize", 15_300_000_000)
    report = phases.report
    for number in range(3):
        clock.seconds += 1
        report(f"layers.{number}", 400_000_000)
    assert said == [], "it is early"
    clock.seconds += LINE_SECONDS
    report("layers.3", 0)
    assert said == [("quantize: 1.20 GB of 15.3 GB (7 %), 150 MB/s, 1 min 34 s left", "layers.3")]
    report("layers.4", 14_100_000_000)
    clock.seconds += 2
    phases.end()
    phases.end()
    assert said[1:] == [("quantize: 15.3 GB in 10 s, 1.53 GB/s", "")]


def test_a_short_phase_says_nothing(clock):
    said = []
    phases = Phases(lambda line, tensor: said.append(line), clock)
    phases.begin("plan")
    clock.seconds += 60
    phases.begin("quantize", GB)
    report = phases.report
    clock.seconds += LINE_SECONDS / 2
    report("a", GB)
    phases.end()
    assert said == []


def test_what_was_there_already_is_no_work(clock):
    """A resumed run: 9 of 10 GB are adopted in 90 seconds, the last one is made in 10."""
    phases = Phases(clock=clock)
    phases.begin("quantize", 10 * GB)
    report = phases.report
    for _ in range(9):
        clock.seconds += 10
        phases.skip(GB)
    (meter,) = phases.meters
    assert meter.status() == "9.00 GB of 10.0 GB (90 %)"
    for _ in range(5):
        clock.seconds += 1
        report("a", GB // 10)
    assert meter.status() == "9.50 GB of 10.0 GB (95 %), 100 MB/s, 5 s left"
    clock.seconds += 5
    report("a", GB // 2)
    phases.end()
    assert meter.status() == "10.0 GB in 1 min 40 s, 100 MB/s, 9.00 GB were there already"


def test_the_rate_is_that_of_the_last_half_minute(clock):
    meter = Meter("quantize", 1000 * GB, clock)
    for nbytes in (GB,) * 60 + (GB // 10,) * 60:
        clock.seconds += 1
        meter.report("a", nbytes)
    assert "100 MB/s" in meter.status()


def test_a_rate_sinks_while_nothing_comes(clock):
    meter = Meter("quantize", 10 * GB, clock)
    clock.seconds += 1
    meter.report("a", GB)
    assert "1.00 GB/s, 9 s left" in meter.status()
    clock.seconds += 9
    assert "100 MB/s, 1 min 30 s left" in meter.status()


def test_without_a_total_the_time_is_told(clock):
    meter = Meter("plan", 0, clock)
    clock.seconds += 4
    assert meter.status() == "4.00 s"
    meter.report("a", GB)
    assert meter.status() == "1.00 GB, 4.00 s"
    meter.end()
    assert meter.status() == "1.00 GB in 4.00 s, 250 MB/s"


def test_threads_lose_no_byte():
    lines = []
    phases = Phases(lambda line, tensor: lines.append(line))
    phases.begin("quantize", 4 * 20_000 * 3)
    report = phases.report
    threads = [Thread(target=lambda: [report("a", 3) for _ in range(20_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(1000):
        assert "of" in phases.meters[0].status()
    for thread in threads:
        thread.join()
    assert phases.meters[0].done_nbytes == 4 * 20_000 * 3
