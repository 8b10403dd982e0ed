"""Fetch pieces of files ahead of their readers, and hash them.

What proves that a piece is right: a small file is one piece, which its hash checks.  Pieces of a
stream are checked by the hash of the whole file.  Any other piece is fetched by two requests, until
two bring the same bytes; when the file is hashed, for whatever reason, it is compared with that.
A piece may be dropped from memory before its last reader needs it; when
it is fetched again, its hash must be the same as the first time.

This module does not decide where pieces come from.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from fp4convert.errors import CORRUPT, SourceError
from fp4convert.storage.hub.fetchers import Fetchers
from fp4convert.storage.hub.hashes import corrupt, hasher

# Pieces fetched at once; a storage that limits each connection gives eight times what it gives one.
CONNECTIONS = 8
PIECE_NBYTES = 8 << 20
KEPT_PARTS = 8  # of a piece: memory for less is not kept to be used again
REQUESTS = 4  # for a piece that comes differently each time, after the first
LEAST_NBYTES = 1 << 20  # below it, a range is not worth splitting
# Pieces of streams that nobody has asked for yet; as many may have been asked for that are not
# hashed yet.
AHEAD = 4
# Of the budget: what scale groups leave to everything else, however many files are streamed.
SPARE_NBYTES = (AHEAD + CONNECTIONS) * PIECE_NBYTES
OWN_NBYTES = 100 << 20  # of the budget: the interpreter with its packages, and panels at work
AGAIN = "Run the same command again."
OTHERWISE = "two requests brought what the file does not hold"


class Piece(NamedTuple):
    """A range of a file.

    is_hashed  whoever asks for it hashes the whole file
    """

    file: str
    start: int
    stop: int
    is_hashed: bool = False


class Hashed(NamedTuple):
    """What a piece must be: a hash before its bytes, and the digest after."""

    before: hashlib._Hash
    digest: bytes


class Hold(NamedTuple):
    """Memory for what is read more than once, from when it was granted.

    ranges  of which every byte will be read again: they stay
    """

    nbytes: int
    ranges: tuple[Piece, ...]
    is_granted: threading.Event


class Pieces:
    """The pieces that are in memory or on their way.

    One budget of memory for all streams.  Pieces that were read are dropped first, then the least
    recently used; nothing is fetched ahead that there is no room for.

    read_into      (file, start, buffer): fills the buffer, called by several threads
    budget_nbytes  of the process, as far as a scale group fits; one that does not fit beside the
                   rest, but in these bytes, is held whole all the same, alone
    connections    how many pieces are fetched at once; None for as many as are found right here
    is_sure        True for a file whose bytes need no second request
    """

    def __init__(
        self,
        read_into: Callable[[str, int, memoryview], None],
        budget_nbytes: int,
        connections: int | None = None,
        is_sure: Callable[[str], bool] = lambda file: False,
    ) -> None:
        self._read_into = read_into
        self._budget_nbytes = budget_nbytes
        # For scale groups, at once.
        self._groups_nbytes = max(0, budget_nbytes - OWN_NBYTES - SPARE_NBYTES)
        self._is_sure = is_sure
        self.connections = connections or CONNECTIONS
        # Memory that nobody looks at any more, by its bytes.
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        # For whoever asks after the end.
        self.failure = SourceError("source-stopped", "reading was stopped")
        self._pool = Fetchers(self.connections)
        self._known: dict[Piece, Future[memoryview]] = {}  # least recently used first
        self._spent: set[Piece] = set()  # what a stream needs no more but for a second reading
        self._hashed: dict[Piece, Hashed] = {}
        # By file: the sha256 of what two requests said.
        self._unproven: defaultdict[str, dict[Piece, bytes]] = defaultdict(dict)
        # Of these, what was there before any stream; None until there is one.
        self._planned: set[Piece] | None = None
        self._plan_failure: SourceError | None = None  # what the plan was made of was wrong
        self._refuted: Counter[str] = Counter()  # files: how often that was something else
        self._whole: dict[str, tuple[Piece, Hashed]] = {}  # small files, by name
        self._nbytes = 0  # of all that are known
        self._lock = threading.Lock()
        self._granted: tuple[Hold, ...] = ()
        self._asked: list[Hold] = []  # for room, in the order of their asking
        self._streams = 0  # under way

    def take_buffer(self, nbytes: int) -> memoryview:
        """Return so many bytes, which hold anything.

        They are free again when no view of them is left, and used again: pages that the system has
        to make cost more than what fills them.
        """
        if not PIECE_NBYTES // KEPT_PARTS <= nbytes <= PIECE_NBYTES:
            return np.empty(nbytes, np.uint8).data
        rounded = 1 << (nbytes - 1).bit_length()
        free = self._free[rounded]
        try:
            whole = free.pop()
        except IndexError:
            whole = np.empty(rounded, np.uint8)
        lent = whole[:nbytes]
        finalize(lent, free.append, whole).atexit = False
        return lent.data

    def fetch(self, piece: Piece) -> Future[memoryview]:
        """Return the future of a piece's bytes, read-only.

        Raises  SourceError after the end
        """
        with self._lock:
            future = self._known.pop(piece, None)
            if future is None or (future.done() and future.exception()):
                if future is None:
                    self._nbytes += piece.stop - piece.start
                    self._make_room()
                if piece.is_hashed or self._is_sure(piece.file):
                    future = self._pool.submit(self._fetch, piece)
                else:
                    # Begun first: one that waits for it waits for nothing behind itself.
                    other = self._pool.submit(self._fetch, piece)
                    future = self._pool.submit(self._compare, piece, other)
            self._known[piece] = future
            return future

    def _fetch(self, piece: Piece) -> memoryview:
        """Fetch a piece, until it is what its hash says, if one is known.

        That of a small file, or of the piece when it was here before.
        """
        whole, of_file = self._whole.get(piece.file, (None, None))
        for _ in range(REQUESTS):
            data = self.take_buffer(piece.stop - piece.start)
            self._read_into(piece.file, piece.start, data)
            expected = of_file if piece == whole else self._hashed.get(piece)
            if expected is None:
                return data.toreadonly()
            found = expected.before.copy()
            found.update(data)
            if found.digest() == expected.digest:
                return data.toreadonly()
        came = f"bytes {piece.start}-{piece.stop - 1} came otherwise than before"
        detail = f"{piece.file}: {came} in each of {REQUESTS} requests"
        self.failure = SourceError(CORRUPT, detail, AGAIN)
        if of_file is not None and piece == whole:
            self.failure = corrupt(piece.file, of_file.digest.hex(), found.hexdigest())
        raise self.failure

    def fetch_whole(self, file: str, nbytes: int, oid: str) -> Future[memoryview]:
        """Fetch a small file by one request, which its hash checks.

        From then on `cover` gives that piece for every range of the file.
        """
        piece = Piece(file, 0, nbytes, True)
        self._whole[file] = piece, Hashed(hasher(nbytes, oid), bytes.fromhex(oid))
        return self.fetch(piece)

    def cover(self, file: str, start: int, stop: int) -> list[Piece]:
        """Return the pieces that hold a range which no stream brings."""
        if file in self._whole:
            return [self._whole[file][0]]
        return split(file, start, stop)

    def note_hash(self, piece: Piece, hashed: Hashed) -> None:
        """Note what a piece must be when it is fetched again."""
        with self._lock:
            self._hashed[piece] = hashed

    def _compare(self, piece: Piece, other: Future[memoryview]) -> memoryview:
        """Fetch a piece until two requests bring the same bytes."""
        found = [self._fetch(piece)]
        latest = other.result()
        while not any(is_same(latest, each) for each in found):
            if len(found) == REQUESTS:
                came = f"bytes {piece.start}-{piece.stop - 1} came differently"
                detail = f"{piece.file}: {came} in each of {REQUESTS + 1} requests"
                self.failure = SourceError(CORRUPT, detail, AGAIN)
                raise self.failure
            found.append(latest)
            latest = self._fetch(piece)
        digest = hashlib.sha256(latest).digest()
        with self._lock:
            is_new = piece not in self._hashed
            said = self._unproven[piece.file]
            before = said.setdefault(piece, digest) if is_new else digest
        if before != digest:
            raise self._refute(piece, "they came otherwise than before")
        return latest

    def unproven(self, file: str) -> list[Piece]:
        """List what two requests have said of a file, and no hash has proved."""
        with self._lock:
            return list(self._unproven[file])

    def settle(self, piece: Piece, digest: bytes) -> None:
        """Compare what two requests said with what the file holds.

        digest  the sha256 of that
        Raises  SourceError where it was something else; then it is fetched anew
        """
        with self._lock:
            said = self._unproven[piece.file].pop(piece, digest)
            self._hashed[piece] = Hashed(hashlib.sha256(), digest)
        if said != digest:
            raise self._refute(piece, OTHERWISE)

    def check_plan(self) -> None:
        """Raise SourceError where the plan was made of what no file holds."""
        if self._plan_failure:
            raise self._plan_failure

    def count_refuted(self, file: str) -> int:
        """Count how often two requests turned out wrong about a file."""
        with self._lock:
            return self._refuted[file]

    def _refute(self, piece: Piece, what: str) -> SourceError:
        """Forget what was said of a file; return the error of that."""
        words = f"{piece.file}: bytes {piece.start}-{piece.stop - 1}: {what}"
        error = SourceError(CORRUPT, words, AGAIN)
        with self._lock:
            self._refuted[piece.file] += 1
            if self._planned and piece in self._planned:
                self._plan_failure = error
            self._unproven.pop(piece.file, None)
        self._forget(lambda each: each.file == piece.file and not each.is_hashed)
        return error

    def spend(self, pieces: Iterable[Piece]) -> None:
        """Let go of pieces before others, but for those that room was made for."""
        with self._lock:
            self._spent.update(piece for piece in pieces if piece in self._known)

    def count_streams(self, change: int) -> None:
        with self._lock:
            if self._planned is None:
                self._planned = {piece for said in self._unproven.values() for piece in said}
            self._streams += change

    def share_of(self, count: int) -> int:
        """Return how many of so many pieces each stream has."""
        return max(1, count // max(1, self._streams))

    def has_room(self, piece: Piece) -> bool:
        """Tell whether a piece is there, or fits beside what is needed."""
        with self._lock:
            if piece in self._known:
                return True
            spent = (one for one in self._spent if not self.is_held(one))
            needed_nbytes = self._nbytes - sum(one.stop - one.start for one in spent)
            return needed_nbytes + PIECE_NBYTES <= SPARE_NBYTES + self._groups_nbytes

    def is_held(self, piece: Piece) -> bool:
        """Tell whether there is room for a piece until it was read twice."""
        return any(
            held.file == piece.file and held.start < piece.stop and piece.start < held.stop
            for hold in self._granted
            for held in hold.ranges
        )

    def _make_room(self) -> None:
        """Drop what was read and is not held, then whatever is oldest.

        Of these first what needs no room any more, and last what is held.
        """
        held_nbytes = sum(hold.nbytes for hold in self._granted)
        kept_nbytes = SPARE_NBYTES + min(held_nbytes, self._groups_nbytes)
        if self._nbytes > kept_nbytes:
            spent = [piece for piece in self._known if piece in self._spent]
            self._drop([piece for piece in spent if not self.is_held(piece)], kept_nbytes)
        if self._nbytes > (most := SPARE_NBYTES + self._groups_nbytes):
            self._drop(sorted(self._known, key=self.is_held), most)

    def _drop(self, pieces: list[Piece], kept_nbytes: int) -> None:
        """Drop the first of these that are there, down to so many bytes."""
        for piece in pieces:
            if self._nbytes <= kept_nbytes:
                return
            if self._known[piece].done():
                future = self._known.pop(piece)
                if piece.is_hashed and piece not in self._hashed and not future.exception():
                    digest = hashlib.sha256(future.result()).digest()
                    self._hashed[piece] = Hashed(hashlib.sha256(), digest)
                self._spent.discard(piece)
                self._nbytes -= piece.stop - piece.start

    @contextmanager
    def room_for(self, nbytes: int, ranges: Iterable[Piece] = ()) -> Iterator[None]:
        """Hold memory for bytes that are read more than once.

        Waits until they fit beside what others hold, who are served in the order of their asking,
        those of one file in its order; one always may.  What one had at once, others may have at
        once after it.

        ranges  of which every byte will be read again: they stay
        """
        if not nbytes:
            yield
            return
        hold = Hold(nbytes, tuple(ranges), threading.Event())
        with self._lock:
            self._asked.append(hold)
            self._grant()
        hold.is_granted.wait()
        try:
            yield
        finally:
            with self._lock:
                self._granted = tuple(each for each in self._granted if each is not hold)
                self._grant()

    def _grant(self) -> None:
        """Give room to those who have asked for it first."""
        while self._asked:
            hold = self._next_asked()
            nbytes = hold.nbytes + sum(other.nbytes for other in self._granted)
            if self._granted and nbytes > self._groups_nbytes:
                return
            self._asked.remove(hold)
            self._granted += (hold,)
            self._groups_nbytes = max(self._groups_nbytes, min(nbytes, self._budget_nbytes))
            hold.is_granted.set()

    def _next_asked(self) -> Hold:
        """Return who is served next.

        Of the first one's file whoever reads its foremost bytes: what lies behind them would wait
        for the hash, which waits for these.
        """
        first = self._asked[0]
        files = {piece.file for piece in first.ranges[:1]}
        same = (hold for hold in self._asked if files & {piece.file for piece in hold.ranges[:1]})
        return min(same, key=lambda hold: hold.ranges[0].start, default=first)

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        """Count the memory that is held where these ask for room in turn.

        at_once  how many groups have readers
        """
        groups, room_nbytes, most_nbytes = [*groups], self._groups_nbytes, 0
        for first in range(len(groups)):
            nbytes = groups[first]
            room_nbytes = max(room_nbytes, min(nbytes, self._budget_nbytes))
            for other in groups[first + 1 : first + at_once]:
                if nbytes + other > room_nbytes:
                    break
                nbytes += other
            most_nbytes = max(most_nbytes, min(nbytes, room_nbytes))
        return SPARE_NBYTES + most_nbytes

    def forget(self, file: str) -> None:
        """Drop every piece of a file, whatever it was."""
        self.end_hash(file)
        self._forget(lambda piece: piece.file == file)

    def forget_unproven(self) -> None:
        """Drop what only two requests say.

        They may have agreed on what the file never held.
        """
        self._forget(lambda piece: not piece.is_hashed)

    def _forget(self, is_meant: Callable[[Piece], bool]) -> None:
        with self._lock:
            for piece in [piece for piece in self._known if is_meant(piece)]:
                del self._known[piece]
                self._spent.discard(piece)
                self._nbytes -= piece.stop - piece.start

    def end_hash(self, file: str) -> None:
        """Forget what the pieces of a file were.

        Its hash is known, or another is begun.
        """
        with self._lock:
            for piece in [piece for piece in self._hashed if piece.file == file]:
                del self._hashed[piece]

    def close(self) -> None:
        """End: whoever waits or asks gets the error."""
        self._pool.close(self.failure)


def split(file: str, start: int, stop: int) -> list[Piece]:
    """Split a range into pieces that are fetched side by side."""
    nbytes = min(PIECE_NBYTES, max(LEAST_NBYTES, -(-(stop - start) // CONNECTIONS)))
    return [Piece(file, first, min(first + nbytes, stop)) for first in range(start, stop, nbytes)]


def is_same(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
