"""Pieces in memory: fetched once while there is room, hashed in the order of the file, and never
more than the budget.
"""

import hashlib
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from fp4convert.errors import SourceError
from fp4convert.storage.hub import prefetch
from fp4convert.storage.hub import stream as stream_module
from fp4convert.storage.hub.pieces import Piece, hasher
from fp4convert.storage.hub.prefetch import Pieces, split
from fp4convert.storage.hub.stream import Stream

NBYTES = 64 << 10
DATA = random.Random(0).randbytes(NBYTES)
SHA256 = hashlib.sha256(DATA).hexdigest()


class File:
    """Bytes to be fetched, and what was."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.failures = 0

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        if self.failures:
            self.failures -= 1
            raise SourceError("source-unreachable", "no")
        self.fetched.append((start, start + buffer.nbytes))
        buffer[:] = DATA[start : start + buffer.nbytes]


@pytest.fixture
def file(monkeypatch):
    monkeypatch.setattr(prefetch, "PIECE_NBYTES", 1 << 10)
    monkeypatch.setattr(prefetch, "OWN_NBYTES", 0)
    return File()


@pytest.mark.parametrize("stop", [1, 1000, 1 << 20, (1 << 20) + 1, 5_000_000, 100_000_000])
def test_a_range_is_split_into_parts_that_follow_one_another(stop):
    parts = split("f", 7, 7 + stop)
    assert (parts[0].start, parts[-1].stop) == (7, 7 + stop)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(0 < part.stop - part.start <= prefetch.PIECE_NBYTES for part in parts)
    assert split("f", 7, 7) == []


def test_a_piece_is_fetched_once_while_there_is_room(file, monkeypatch):
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 0)
    kept = Pieces(file.read_into, 2 << 10)
    for number in (0, 1, 0, 1, 2, 2, 1, 0):
        piece = Piece("f", number << 10, (number + 1) << 10, True)
        assert bytes(kept.fetch(piece).result()) == DATA[piece.start : piece.stop]
    assert [start >> 10 for start, _ in file.fetched] == [0, 1, 2, 0]


def test_what_failed_is_asked_for_again(file):
    kept, file.failures = Pieces(file.read_into, 1 << 20), 1
    with pytest.raises(SourceError):
        kept.fetch(Piece("f", 0, 10, True)).result()
    assert bytes(kept.fetch(Piece("f", 0, 10, True)).result()) == DATA[:10]


def test_bytes_are_read_only(file):
    with pytest.raises(TypeError):
        Pieces(file.read_into, 1 << 20).fetch(Piece("f", 0, 10, True)).result()[0] = 1


def test_a_stream_stays_a_few_pieces_ahead_and_brings_the_rest_when_it_ends(file):
    stream = Stream(Pieces(file.read_into, 1 << 20), "f", NBYTES, SHA256)
    time.sleep(0.1)
    assert len(file.fetched) <= prefetch.AHEAD + prefetch.CONNECTIONS
    assert [piece.start for piece in stream.cover(1000, 3000)] == [0, 1024, 2048]
    stream.end()
    assert sorted(file.fetched) == [(at, at + 1024) for at in range(0, NBYTES, 1024)]


@pytest.mark.parametrize("connections", [None, 8])
def test_pieces_come_in_parts_where_each_connection_is_slow(connections, file, monkeypatch):
    """A connection brings a byte in 100 us: with more of them more comes."""
    monkeypatch.setattr(prefetch, "LEAST_NBYTES", 1 << 8)
    widths = []

    def read_into(name, start, buffer):
        time.sleep(buffer.nbytes * 1e-4)
        widths.append(buffer.nbytes)
        file.read_into(name, start, buffer)

    stream = Stream(Pieces(read_into, 1 << 20, connections), "f", NBYTES, SHA256)
    stream.end()
    assert sum(widths) == NBYTES
    assert set(widths) == ({1 << 10} if connections else {1 << 10, 1 << 9, 1 << 8})


def test_a_part_that_fails_fails_its_piece(file, monkeypatch):
    monkeypatch.setattr(prefetch, "LEAST_NBYTES", 1 << 8)
    kept = Pieces(file.read_into, 1 << 20)
    kept._growth.parts, file.failures = 2, 1
    with pytest.raises(SourceError):
        kept.fetch(Piece("f", 0, 1 << 10, True)).result()
    assert bytes(kept.fetch(Piece("f", 0, 1 << 10, True)).result()) == DATA[: 1 << 10]


@pytest.mark.parametrize("budget", [0, 4 << 10, 1 << 20])
@pytest.mark.sweep(3)
def test_a_stream_ends_whatever_the_readers_do(budget, file):
    kept = Pieces(file.read_into, budget)
    stream = Stream(kept, "f", NBYTES, SHA256)
    order = list(range(0, NBYTES, 500))
    random.Random(1).shuffle(order)
    for start in order:
        stop = min(start + 500, NBYTES)
        covers = stream.cover(start, stop)
        found = b"".join(bytes(kept.fetch(piece).result()) for piece in covers)
        assert found[start - covers[0].start :][: stop - start] == DATA[start:stop]
    stream.end()


def test_a_stream_with_another_hash_is_an_error(file):
    with pytest.raises(SourceError) as caught:
        Stream(Pieces(file.read_into, 1 << 20), "f", NBYTES, "0" * 64).end()
    assert caught.value.code == "source-corrupt"
    of_git = hashlib.sha1(b"blob %d\0" % NBYTES + DATA).hexdigest()
    Stream(Pieces(file.read_into, 1 << 20), "f", NBYTES, of_git).end()


def test_the_hash_of_git_is_known():
    """As git hash-object /dev/null tells it."""
    assert hasher(0, "0" * 40).hexdigest() == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_room_is_given_to_one_at_least_and_to_others_as_it_is_freed(file):
    kept, order = Pieces(file.read_into, prefetch.SPARE_NBYTES + 100), []

    def use(name: str, nbytes: int) -> None:
        with kept.room_for(nbytes):
            order.append(name)

    with kept.room_for(1000):  # more than there is
        waiting = threading.Thread(target=use, args=("second", 60))
        waiting.start()
        time.sleep(0.05)
        assert order == []
    waiting.join(5)
    with kept.room_for(40):
        use("third", 60)
    assert order == ["second", "third"]


def test_memory_is_used_again_once_nobody_looks_at_it(file):
    pieces = Pieces(file.read_into, 1 << 20)
    first, other = pieces.take_buffer(1 << 10), pieces.take_buffer(1000)
    place = address(first)
    first[:] = b"x" * 1024
    look = first[500:600].toreadonly()
    del first
    beside = pieces.take_buffer(1 << 10)
    beside[:] = b"z" * 1024
    assert address(beside) != place
    assert bytes(look) == b"x" * 100
    del look
    assert address(pieces.take_buffer(1 << 10)) == place
    assert other.nbytes == 1000
    assert pieces.take_buffer(5000).nbytes == 5000  # larger than a piece
    part = pieces.take_buffer(400)
    place = address(part)
    del part
    assert address(pieces.take_buffer(512)) == place


def address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_a_reader_who_is_faster_than_the_hash_has_nothing_fetched_twice(file, monkeypatch):
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 12 << 10)
    kept = Pieces(file.read_into, 12 << 10)
    monkeypatch.setattr(stream_module, "hasher", lambda nbytes, oid: SlowHash(hasher(nbytes, oid)))
    stream = Stream(kept, "f", NBYTES, SHA256)
    for start in range(0, NBYTES, 1 << 10):
        for piece in stream.cover(start, start + (1 << 10)):
            kept.fetch(piece).result()
        stream.have_read(start, start + (1 << 10))
    stream.end()
    assert len(file.fetched) == NBYTES >> 10


class SlowHash:
    """A hash that takes longer than the network."""

    def __init__(self, own) -> None:
        self._own = own
        self.hexdigest, self.digest, self.copy = own.hexdigest, own.digest, own.copy

    def update(self, data: memoryview) -> None:
        time.sleep(0.002)
        self._own.update(data)


def test_what_was_read_stays_only_for_those_who_read_it_again(file, monkeypatch):
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 4 << 10)
    kept = Pieces(file.read_into, 1 << 20)
    for held_nbytes in (16 << 10, 0):
        stream = Stream(kept, "f", NBYTES, SHA256)
        with kept.room_for(held_nbytes, [Piece("f", 0, held_nbytes)]):
            for start in range(0, NBYTES, 1 << 10):
                kept.fetch(stream.cover(start, start + (1 << 10))[0]).result()
                stream.have_read(start, start + (1 << 10))
            stream.end()
            kept.fetch(Piece("other", 0, 1, True)).result()
        assert len(kept._known) == (held_nbytes >> 10) + 4
        kept.forget("f")
        kept.forget("other")


def test_what_somebody_reads_again_stays_and_what_nobody_does_goes(file, monkeypatch):
    """Two readers: the second has not begun again when the first is done, and others have read more
    than there is to spare.
    """
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 4 << 10)
    kept = Pieces(file.read_into, 1 << 20, connections=1)
    stream = Stream(kept, "f", NBYTES, SHA256)

    def read(first: int, last: int) -> None:
        for number in range(first, last):
            kept.fetch(stream.cover(number << 10, (number + 1) << 10)[0]).result()
            stream.have_read(number << 10, (number + 1) << 10)

    with kept.room_for(8 << 10, [Piece("f", 8 << 10, 16 << 10)]):
        with kept.room_for(8 << 10, [Piece("f", 0, 8 << 10)]):
            read(0, 16)
            read(0, 8)
        read(16, 32)
        read(8, 16)
    read(32, NBYTES >> 10)
    stream.end()
    assert len(file.fetched) == len(set(file.fetched))


@pytest.mark.parametrize("connections", [1, 3])
def test_no_more_pieces_are_fetched_at_once_than_there_are_connections(connections, file):
    now, most, lock = [0], [0], threading.Lock()

    def read_into(name: str, start: int, buffer: memoryview) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        file.read_into(name, start, buffer)
        with lock:
            now[0] -= 1

    Stream(Pieces(read_into, 1 << 20, connections), "f", NBYTES, SHA256).end()
    assert most == [connections]


class Liar(File):
    """A file whose first bytes come differently in some requests, by their number."""

    def __init__(self, *lies: bytes) -> None:
        super().__init__()
        self.lies = list(lies)

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        super().read_into(file, start, buffer)
        if self.lies:
            buffer[:1] = self.lies.pop(0)


@pytest.mark.parametrize(("lies", "requests"), [(0, 2), (1, 3), (2, 4), (3, 5), (5, 0)])
def test_what_no_stream_hashes_is_fetched_until_two_requests_agree(lies, requests):
    liar = Liar(*(bytes([number]) for number in range(lies)))
    coming = Pieces(liar.read_into, 1 << 20, 1).fetch(Piece("f", 0, 100))
    if not requests:
        with pytest.raises(SourceError, match="in each of 5 requests"):
            coming.result()
        return
    assert bytes(coming.result()) == DATA[:100]
    assert len(liar.fetched) == requests


def test_a_stream_that_begins_otherwise_than_before_is_an_error(file):
    for head, is_same in ((DATA[:3000], True), (DATA[:2999] + b"?", False)):
        stream = Stream(Pieces(file.read_into, 1 << 20), "f", NBYTES, SHA256, head)
        if is_same:
            stream.end()
            continue
        with pytest.raises(SourceError, match="header"):
            stream.end()


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (500, 3000), (5000, 5100), (1024, 2048)])
@pytest.mark.parametrize("is_planned", [True, False])
def test_a_stream_proves_what_two_requests_said_before(start, stop, is_planned, file):
    """Parts of pieces, and what lies across some; also what was read while it is under way."""
    for lies in ([], [bytes([DATA[start] ^ 1])] * 2):
        liar = Liar()
        kept = Pieces(liar.read_into, 1 << 20, 1)
        if not is_planned:
            Stream(kept, "other", NBYTES, SHA256).end()
        liar.lies = list(lies)
        kept.fetch(Piece("f", start, stop)).result()
        assert kept.unproven("f")
        count = len(liar.fetched)
        stream = Stream(kept, "f", NBYTES, SHA256)
        if lies and is_planned:
            with pytest.raises(SourceError, match="does not hold"):
                stream.end()
            with pytest.raises(SourceError, match="does not hold"):
                kept.check_plan()  # another reading does not mend the plan
        else:
            stream.end()
        assert kept.unproven("f") == []
        assert kept.count_refuted("f") == bool(lies)
        assert len(liar.fetched) == count + NBYTES // prefetch.PIECE_NBYTES


def test_after_the_end_nothing_is_fetched(file):
    kept = Pieces(file.read_into, 1 << 20)
    kept.close()
    with pytest.raises(SourceError, match="stopped"):
        kept.fetch(Piece("f", 0, 10))


class SecondTimeOtherwise(File):
    """One byte of a piece comes otherwise when it is fetched again, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        is_again = (start, start + buffer.nbytes) in self.fetched
        super().read_into(file, start, buffer)
        if is_again and start == 30 << 10 and self.times:
            self.times -= 1
            buffer[5] ^= 1


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["behind the hash", "ahead of the hash"])
def test_a_piece_that_is_fetched_again_is_what_it_was(is_ahead, times, file, monkeypatch):
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 12 << 10)
    kept = Pieces(SecondTimeOtherwise(times).read_into, 12 << 10)
    stream = Stream(kept, "f", NBYTES, SHA256)
    twice = Piece("f", 30 << 10, 31 << 10, True)
    if is_ahead:
        assert bytes(kept.fetch(twice).result()) == DATA[30 << 10 : 31 << 10]
        for number in range(40, 60):  # until nothing is left of it
            kept.fetch(Piece("f", number << 10, (number + 1) << 10, True)).result()
    with nullcontext() if times == 1 else pytest.raises(SourceError, match="otherwise than before"):
        stream.end()
        assert bytes(kept.fetch(twice).result()) == DATA[30 << 10 : 31 << 10]
    kept.end_hash("f")
    assert not kept._hashed


def read_whole(kept: Pieces, stream: Stream, start: int, stop: int) -> bytes:
    """Read a range through a stream, in parts that lie across pieces."""
    found = b""
    for at in range(start, stop, 700):
        end = min(at + 700, stop)
        covers = stream.cover(at, end)
        data = b"".join(bytes(kept.fetch(piece).result()) for piece in covers)
        found += data[at - covers[0].start :][: end - at]
        stream.have_read(at, end)
    return found


@pytest.mark.parametrize("budget", [20 << 10, 40 << 10, 1 << 20])
def test_two_files_at_once_share_the_memory_and_nothing_comes_twice(file, budget, monkeypatch):
    """Groups of 16 KB of either file are read twice by two readers each; a budget of 20 KB holds
    one of them beside what flows.
    """
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 12 << 10)
    fetched, most, lock = [], [0], threading.Lock()

    def read_into(name: str, start: int, buffer: memoryview) -> None:
        with lock:
            fetched.append((name, start))
            most[0] = max(most[0], kept._nbytes)
        buffer[:] = DATA[start : start + buffer.nbytes]

    kept, wrong = Pieces(read_into, budget), []

    def do_group(stream: Stream, name: str, start: int) -> None:
        stop = start + (16 << 10)
        with kept.room_for(stop - start, [Piece(name, start, stop)]):
            read_whole(kept, stream, start + (9 << 10), start + (9 << 10) + 10)  # a glance
            for _ in range(2):
                if read_whole(kept, stream, start, stop) != DATA[start:stop]:
                    wrong.append((name, start))

    def do_file(name: str) -> None:
        stream = Stream(kept, name, NBYTES, SHA256)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(do_group, stream, name), range(0, NBYTES, 16 << 10)))
        stream.end()

    with ThreadPoolExecutor(2) as pool:
        with kept.room_for(16 << 10):  # nobody begins before all have asked
            done = [pool.submit(do_file, name) for name in ("f", "g")]
            # a large budget has room for all of them at once, and they may be through already
            while len(kept._waiting) + len(kept._granted) < 5 and not all(map(Future.done, done)):
                time.sleep(0.001)
        assert not [future.exception(60) for future in done if future.exception(60)]
    assert not wrong
    assert sorted(fetched) == sorted(set(fetched))
    groups_nbytes = max(16 << 10, budget - (12 << 10))
    assert most[0] <= (12 << 10) + groups_nbytes + (4 << 10)  # a piece at the borders of each


def test_readers_far_apart_have_nothing_fetched_twice(file, monkeypatch):
    """One copies the first half, one the second, which the hash reaches later."""
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 12 << 10)
    kept = Pieces(file.read_into, 0)
    stream = Stream(kept, "f", NBYTES, SHA256)

    def read(start: int) -> bytes:
        time.sleep(0.002)
        return read_whole(kept, stream, start, start + NBYTES // 2)

    with ThreadPoolExecutor(2) as pool:
        assert b"".join(pool.map(read, (0, NBYTES // 2))) == DATA
    stream.end()
    assert sorted(file.fetched) == sorted(set(file.fetched))


def test_a_reader_goes_on_where_nobody_reads_what_lies_before(file, monkeypatch):
    monkeypatch.setattr(stream_module, "STALL_SECONDS", 0.05)
    kept = Pieces(file.read_into, 0)
    stream = Stream(kept, "f", NBYTES, SHA256)
    assert read_whole(kept, stream, 50 << 10, NBYTES) == DATA[50 << 10 :]
    stream.end()


def test_a_reader_of_a_group_does_not_wait_for_what_it_holds_itself(file, monkeypatch):
    monkeypatch.setattr(stream_module, "STALL_SECONDS", 100.0)
    kept = Pieces(file.read_into, 1 << 20)
    stream = Stream(kept, "f", NBYTES, SHA256)
    with kept.room_for(NBYTES, [Piece("f", 0, NBYTES)]):
        assert read_whole(kept, stream, 63 << 10, NBYTES) == DATA[63 << 10 :]
    stream.end()


def test_room_is_given_in_the_order_of_asking(file, monkeypatch):
    """A small group that would fit waits behind a large one, which would have to wait longer."""
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 0)
    kept, order = Pieces(file.read_into, 100), []

    def use(name: str, nbytes: int) -> None:
        with kept.room_for(nbytes):
            order.append(name)

    with kept.room_for(60):
        asking = []
        for name, nbytes in (("large", 90), ("small", 20)):
            asking.append(threading.Thread(target=use, args=(name, nbytes)))
            asking[-1].start()
            time.sleep(0.05)
        assert order == []
    for thread in asking:
        thread.join(5)
    assert order == ["large", "small"]


def test_what_is_held_is_told_before(file, monkeypatch):
    """Three at once where they fit; the largest alone where it does not; none that is larger than
    all of the memory.
    """
    monkeypatch.setattr(prefetch, "SPARE_NBYTES", 1000)
    for budget, expected in ((10_000, 1000 + 600), (1500, 1000 + 500), (1300, 1000 + 300)):
        pieces = Pieces(file.read_into, budget)
        assert pieces.held_nbytes([100, 200, 300, 100], 3) == expected, budget
    assert Pieces(file.read_into, 100).held_nbytes([400], 3) == 1100
