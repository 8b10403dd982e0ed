"""Fetch pieces of files ahead of their readers, and hash them.

Proofs of a piece: a small file is one piece and has a hash.  The hash of the whole file covers the
pieces of a stream.  Any other piece is requested until two replies are equal; if the file is hashed
later, the piece is compared with that.  A piece that is dropped from memory and fetched again must
have the same hash as before.
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
from fp4convert.storage.hub.growth import Growth
from fp4convert.storage.hub.pieces import AGAIN, OTHERWISE, Hashed, Piece, corrupt, hasher, is_same

CONNECTIONS = 8  # pieces at once; a storage that limits each connection gives eight times one
MOST_PARTS = 4  # of a piece, each by a connection of its own, where that brings more
PIECE_NBYTES = 8 << 20
KEPT_PARTS = 8  # memory of less than a piece / KEPT_PARTS is not reused
REQUESTS = 4  # repetitions for a piece that differs each time
LEAST_NBYTES = 1 << 20  # smaller ranges are not split
AHEAD = 4  # unrequested pieces of a stream; also requested ones before the hash
# Part of the budget that scale groups leave to all streams together.
SPARE_NBYTES = (AHEAD + CONNECTIONS) * PIECE_NBYTES
OWN_NBYTES = 100 << 20  # part of the budget for the interpreter, its packages, and panels at work


class Hold(NamedTuple):
    """Memory for bytes that are read more than once.

    ranges  stay in memory, for every byte of them is read again
    """

    nbytes: int
    ranges: tuple[Piece, ...]
    is_granted: threading.Event


class Pieces:
    """The pieces in memory or on their way, under one budget for all streams.

    Pieces that were read are dropped first, then the least recently used; nothing is fetched ahead
    without room for it.

    read_into      (file, start, buffer) fills the buffer; called by several threads
    budget_nbytes  of the process; a scale group that fits in it, but not beside the rest, is held
                   whole, alone
    connections    pieces fetched at once, each by one request; None for CONNECTIONS, each in parts
                   where that brings more
    is_sure        returns True for a file whose bytes need no second request
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
        self._groups_nbytes = max(0, budget_nbytes - OWN_NBYTES - SPARE_NBYTES)  # for scale groups
        self._is_sure = is_sure
        self.connections = connections or CONNECTIONS
        self._growth = Growth(self.connections, 1 if connections else MOST_PARTS)
        # Unused memory, by its size.
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.failure = SourceError("source-stopped", "reading was stopped")  # after the end
        self._pool = Fetchers(self.connections)
        self._parts = Fetchers((MOST_PARTS - 1) * self.connections)
        self._known: dict[Piece, Future[memoryview]] = {}  # least recently used first
        self._spent: set[Piece] = set()  # streams need these again only for a second reading
        self._hashed: dict[Piece, Hashed] = {}
        # By file: the sha256 of pieces that two requests agree on.
        self._unproven: defaultdict[str, dict[Piece, bytes]] = defaultdict(dict)
        # Those of them that are older than the first stream; None before it.
        self._planned: set[Piece] | None = None
        self._plan_failure: SourceError | None = None  # the plan rests on a refuted piece
        self._refuted: Counter[str] = Counter()  # refuted pieces of each file
        self._whole: dict[str, tuple[Piece, Hashed]] = {}  # small files, by name
        self._nbytes = 0  # of all known pieces
        self._lock = threading.Lock()
        self._granted: tuple[Hold, ...] = ()
        self._waiting: list[Hold] = []  # first come, first served
        self._streams = 0  # under way

    def take_buffer(self, nbytes: int) -> memoryview:
        """Return a buffer with arbitrary content.

        It is reused when no view of it is left: new pages of the system cost more than their bytes.
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
        """Return the future of a piece's bytes, read-only."""
        with self._lock:
            future = self._known.pop(piece, None)
            if future is None or (future.done() and future.exception()):
                if future is None:
                    self._nbytes += piece.nbytes
                    self._make_room()
                if piece.is_hashed or self._is_sure(piece.file):
                    future = self._pool.submit(self._fetch, piece)
                else:
                    # Queued first: the other waits for nothing behind itself.
                    other = self._pool.submit(self._fetch, piece)
                    future = self._pool.submit(self._compare, piece, other)
            self._known[piece] = future
            return future

    def _fetch(self, piece: Piece) -> memoryview:
        """Fetch a piece until it has its hash, if that is known.

        It is known of a small file, and of a piece that was here before.
        """
        whole, of_file = self._whole.get(piece.file, (None, None))
        for _ in range(REQUESTS):
            data = self.take_buffer(piece.nbytes)
            self._read_parts(piece, data)
            expected = of_file if piece == whole else self._hashed.get(piece)
            if expected is None:
                return data.toreadonly()
            digest = expected.before.copy()
            digest.update(data)
            if digest.digest() == expected.digest:
                return data.toreadonly()
        detail = f"{piece} came otherwise than before in each of {REQUESTS} requests"
        self.failure = SourceError(CORRUPT, detail, AGAIN)
        if of_file is not None and piece == whole:
            self.failure = corrupt(piece.file, of_file.digest.hex(), digest.hexdigest())
        raise self.failure

    def _read_parts(self, piece: Piece, data: memoryview) -> None:
        """Fill the buffer by as many requests at once as the line is worth."""
        if self._is_sure(piece.file):
            return self._read_into(piece.file, piece.start, data)
        count = min(self._growth.parts, max(1, piece.nbytes // LEAST_NBYTES))
        width = max(1, -(-piece.nbytes // count))  # an empty file has a piece, too
        coming = [
            self._parts.submit(self._read_into, piece.file, piece.start + at, data[at : at + width])
            for at in range(width, piece.nbytes, width)
        ]
        self._read_into(piece.file, piece.start, data[:width])
        for part in coming:
            part.result()
        self._growth.note(piece.nbytes)

    def fetch_whole(self, file: str, nbytes: int, oid: str) -> Future[memoryview]:
        """Fetch a small file by one request, and check its hash.

        From then on `cover` returns that piece for every range of the file.
        """
        piece = Piece(file, 0, nbytes, True)
        self._whole[file] = piece, Hashed(hasher(nbytes, oid), bytes.fromhex(oid))
        return self.fetch(piece)

    def cover(self, file: str, start: int, stop: int) -> list[Piece]:
        """Return the pieces of a range outside of streams."""
        if file in self._whole:
            return [self._whole[file][0]]
        return split(file, start, stop)

    def note_hash(self, piece: Piece, hashed: Hashed) -> None:
        """Keep the hash that a piece must have if it is fetched again."""
        with self._lock:
            self._hashed[piece] = hashed

    def _compare(self, piece: Piece, other: Future[memoryview]) -> memoryview:
        """Fetch a piece until two requests bring the same bytes."""
        replies = [self._fetch(piece)]
        latest = other.result()
        while not any(is_same(latest, reply) for reply in replies):
            if len(replies) == REQUESTS:
                detail = f"{piece} came differently in each of {REQUESTS + 1} requests"
                self.failure = SourceError(CORRUPT, detail, AGAIN)
                raise self.failure
            replies.append(latest)
            latest = self._fetch(piece)
        digest = hashlib.sha256(latest).digest()
        with self._lock:
            is_new = piece not in self._hashed
            before = self._unproven[piece.file].setdefault(piece, digest) if is_new else digest
        if before != digest:
            raise self._refute(piece, "they came otherwise than before")
        return latest

    def unproven(self, file: str) -> list[Piece]:
        """List the pieces of a file that two requests agree on, without a hash."""
        with self._lock:
            return list(self._unproven[file])

    def settle(self, piece: Piece, digest: bytes) -> None:
        """Compare a piece that two requests agreed on with the whole file.

        digest  sha256 of the piece in the file
        Raises  SourceError on a difference; then the piece is fetched anew
        """
        with self._lock:
            agreed = self._unproven[piece.file].pop(piece, digest)
            self._hashed[piece] = Hashed(hashlib.sha256(), digest)
        if agreed != digest:
            raise self._refute(piece, OTHERWISE)

    def check_plan(self) -> None:
        """Raise SourceError if the plan rests on a refuted piece."""
        if self._plan_failure:
            raise self._plan_failure

    def count_refuted(self, file: str) -> int:
        """Count the refuted pieces of a file."""
        with self._lock:
            return self._refuted[file]

    def _refute(self, piece: Piece, what: str) -> SourceError:
        """Forget unproven pieces of the file; return the error."""
        error = SourceError(CORRUPT, f"{piece}: {what}", AGAIN)
        with self._lock:
            self._refuted[piece.file] += 1
            if self._planned and piece in self._planned:
                self._plan_failure = error
            self._unproven.pop(piece.file, None)
        self._forget(lambda other: other.file == piece.file and not other.is_hashed)
        return error

    def spend(self, pieces: Iterable[Piece]) -> None:
        """Mark pieces as read: unless they are held, they are dropped first."""
        with self._lock:
            self._spent.update(piece for piece in pieces if piece in self._known)

    def count_streams(self, change: int) -> None:
        with self._lock:
            if self._planned is None:
                self._planned = {piece for pieces in self._unproven.values() for piece in pieces}
            self._streams += change

    def share_of(self, count: int) -> int:
        """Divide a number of pieces among the streams."""
        return max(1, count // max(1, self._streams))

    def has_room(self, piece: Piece) -> bool:
        """Return whether a piece is there, or fits beside the unread ones."""
        with self._lock:
            if piece in self._known:
                return True
            spent = (other for other in self._spent if not self.is_held(other))
            needed_nbytes = self._nbytes - sum(other.nbytes for other in spent)
            return needed_nbytes + PIECE_NBYTES <= SPARE_NBYTES + self._groups_nbytes

    def is_held(self, piece: Piece) -> bool:
        """Return whether a piece stays until its second reading."""
        return any(
            held.file == piece.file and held.start < piece.stop and piece.start < held.stop
            for hold in self._granted
            for held in hold.ranges
        )

    def _make_room(self) -> None:
        """Drop read pieces that are not held, then the oldest, held ones last."""
        held_nbytes = sum(hold.nbytes for hold in self._granted)
        kept_nbytes = SPARE_NBYTES + min(held_nbytes, self._groups_nbytes)
        if self._nbytes > kept_nbytes:
            spent = [piece for piece in self._known if piece in self._spent]
            self._drop([piece for piece in spent if not self.is_held(piece)], kept_nbytes)
        if self._nbytes > (most := SPARE_NBYTES + self._groups_nbytes):
            self._drop(sorted(self._known, key=self.is_held), most)

    def _drop(self, pieces: list[Piece], kept_nbytes: int) -> None:
        """Drop pieces in this order until so many bytes are left."""
        for piece in pieces:
            if self._nbytes <= kept_nbytes:
                return
            if self._known[piece].done():
                future = self._known.pop(piece)
                if piece.is_hashed and piece not in self._hashed and not future.exception():
                    digest = hashlib.sha256(future.result()).digest()
                    self._hashed[piece] = Hashed(hashlib.sha256(), digest)
                self._spent.discard(piece)
                self._nbytes -= piece.nbytes

    @contextmanager
    def room_for(self, nbytes: int, ranges: Iterable[Piece] = ()) -> Iterator[None]:
        """Hold memory for bytes that are read more than once.

        Waits until they fit beside other holds: first come, first served, and in the order of the
        file within a file.  One hold is always granted; its size then is room for later ones.
        """
        if not nbytes:
            yield
            return
        hold = Hold(nbytes, tuple(ranges), threading.Event())
        with self._lock:
            self._waiting.append(hold)
            self._grant()
        hold.is_granted.wait()
        try:
            yield
        finally:
            with self._lock:
                self._granted = tuple(other for other in self._granted if other is not hold)
                self._grant()

    def _grant(self) -> None:
        """Grant waiting holds in turn, as long as they fit."""
        while self._waiting:
            hold = self._next_waiting()
            nbytes = hold.nbytes + sum(other.nbytes for other in self._granted)
            if self._granted and nbytes > self._groups_nbytes:
                return
            self._waiting.remove(hold)
            self._granted += (hold,)
            self._groups_nbytes = max(self._groups_nbytes, min(nbytes, self._budget_nbytes))
            hold.is_granted.set()

    def _next_waiting(self) -> Hold:
        """Return the hold to grant next.

        Within a file the foremost bytes go first: the rest waits for the hash, which waits for
        these.
        """
        first = self._waiting[0]
        files = {piece.file for piece in first.ranges[:1]}
        same = (hold for hold in self._waiting if files & {piece.file for piece in hold.ranges[:1]})
        return min(same, key=lambda hold: hold.ranges[0].start, default=first)

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        """Return the most memory that groups hold, taken in turn.

        at_once  groups that have readers at the same time
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

    def forget(self, file: str, *, is_used: bool = True) -> None:
        """Drop every piece of a file.

        is_used  something rests on them, so that they must come as before
        """
        if not is_used:
            with self._lock:
                self._unproven.pop(file, None)
        self.end_hash(file)
        self._forget(lambda piece: piece.file == file)

    def forget_unproven(self) -> None:
        """Drop pieces that no hash covers: two requests may agree and be wrong."""
        self._forget(lambda piece: not piece.is_hashed)

    def _forget(self, is_meant: Callable[[Piece], bool]) -> None:
        with self._lock:
            for piece in [piece for piece in self._known if is_meant(piece)]:
                del self._known[piece]
                self._spent.discard(piece)
                self._nbytes -= piece.nbytes

    def end_hash(self, file: str) -> None:
        """Forget the hashes of a file's pieces."""
        with self._lock:
            for piece in [piece for piece in self._hashed if piece.file == file]:
                del self._hashed[piece]

    def close(self) -> None:
        """End: waiting and later readers get the error."""
        self._pool.close(self.failure)
        self._parts.close(self.failure)


def split(file: str, start: int, stop: int) -> list[Piece]:
    """Split a range into pieces for parallel requests."""
    nbytes = min(PIECE_NBYTES, max(LEAST_NBYTES, -(-(stop - start) // CONNECTIONS)))
    return [Piece(file, first, min(first + nbytes, stop)) for first in range(start, stop, nbytes)]
