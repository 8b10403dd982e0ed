"""What every source is read by."""

import threading
from types import SimpleNamespace

import pytest

from fp4convert.storage.source import ASKED_AT_ONCE, read_each


@pytest.mark.parametrize(
    ("is_streamed", "threads", "at_once"),
    [(False, 1, 1), (False, 3, 3), (True, 1, ASKED_AT_ONCE), (True, 12, 12)],
)
def test_so_many_are_read_at_once_and_answers_keep_their_order(is_streamed, threads, at_once):
    source = SimpleNamespace(is_streamed=is_streamed)
    barrier = threading.Barrier(at_once)

    def read(item: int) -> int:
        barrier.wait(30)  # all of them come here, or none goes on
        return 10 * item

    items = range(2 * at_once)
    assert read_each(source, read, items, threads) == [10 * item for item in items]


def test_a_read_that_fails_stops_the_source():
    stopped = []
    source = SimpleNamespace(is_streamed=True, stop=lambda: stopped.append(True))
    with pytest.raises(ZeroDivisionError):
        read_each(source, lambda item: 1 // item, [1, 0, 2])
    assert stopped == [True]
