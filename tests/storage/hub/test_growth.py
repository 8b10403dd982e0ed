"""How many requests a piece takes, on lines of several kinds."""

import pytest

from fp4convert.storage.hub.growth import PAUSE, ROUND, Growth

PIECE, EACH, PLACES = 8 << 20, 20e6, 8  # bytes; bytes a second of a connection; pieces at once
PIECES = PLACES * (1 + ROUND)  # in a round, with those that do not count


class Line:
    """A line with a clock, over which pieces come one after the other."""

    def __init__(self, most_rate, most=4):
        self.now, self.most_rate = 0.0, most_rate
        self.growth = Growth(PLACES, most, lambda: self.now)
        self.seen = [1]

    def bring(self, pieces):
        for _ in range(pieces):
            self.now += PIECE / min(EACH * PLACES * self.growth.parts, self.most_rate)
            self.growth.note(PIECE)
            if self.seen[-1] != self.growth.parts:
                self.seen.append(self.growth.parts)


def test_parts_grow_while_the_rate_grows():
    line = Line(most_rate=1e12)
    line.bring(PIECES - 1)
    assert line.seen == [1]
    line.bring(1)
    assert line.seen == [1, 2]
    line.bring(PIECES)
    assert line.seen == [1, 2, 4]
    line.bring(100 * PIECES)
    assert line.seen == [1, 2, 4]


def test_a_line_at_its_limit_takes_no_more():
    line = Line(most_rate=PLACES * EACH)
    line.bring(2 * PIECES)
    assert line.seen == [1, 2, 1]
    line.bring(PIECES * PAUSE)
    assert line.seen == [1, 2, 1]
    line.bring(PIECES)  # another trial: the line may be free by now
    assert line.seen == [1, 2, 1, 2]


def test_parts_grow_as_far_as_the_line():
    line = Line(most_rate=2.5 * PLACES * EACH)
    line.bring(3 * PIECES)
    assert line.seen == [1, 2, 4, 2]


@pytest.mark.parametrize("rate", [1e6, 1e12])
def test_one_part_may_be_the_most(rate):
    line = Line(rate, most=1)
    line.bring(10 * PIECES)
    assert line.seen == [1]
