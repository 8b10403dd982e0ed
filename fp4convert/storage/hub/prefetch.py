"""Fetch pieces of files ahead of their readers, and hash them.

A file that is read from its first byte to its last has a Stream.  It fetches the pieces in the
order of the file, a few ahead of the readers, and hashes them.  A reader who is ahead of the hash
waits for it, so that no piece is fetched twice.  A reader who wants a piece from elsewhere in the
file gets it fetched at once.

What proves that a piece is right: a small file is one piece, which its hash checks.  Pieces of a
stream are checked by the hash of the whole file.  Any other piece is fetched by two requests, until
two bring the same bytes.  A piece may be dropped from memory before its last reader needs it; when
it is fetched again, its hash must be the same as the first time.

This module does not decide where pieces come from.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
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
REQUESTS = 4  # for a piece that comes differently each time, after the first
LEAST_NBYTES = 1 << 20  # below it, a range is not worth splitting
# Pieces of a stream that nobody has asked for yet; as many may have been asked for that are not
# hashed yet.
AHEAD = 4
# Of the budget: what scale groups leave to everything else.
SPARE_NBYTES = (AHEAD + CONNECTIONS) * PIECE_NBYTES
AGAIN = "Run the same command again."


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


class Pieces:
    """The pieces that are in memory or on their way.

    Pieces that were read are dropped first, then the least recently used.

    read_into      (file, start, buffer): fills the buffer, called by several threads
    budget_nbytes  to be kept; pieces on their way come on top where it is less than they are
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
        self._is_sure = is_sure
        self.connections = connections or CONNECTIONS
        self._free: list[NDArray[np.uint8]] = []  # memory that nobody looks at any more
        # For whoever asks after the end.
        self.failure = SourceError("source-stopped", "reading was stopped")
        self._pool = Fetchers(self.connections)
        self._known: dict[Piece, Future[memoryview]] = {}  # least recently used first
        self._spent: set[Piece] = set()  # what a stream needs no more but for a second reading
        self._hashed: dict[Piece, Hashed] = {}
        self._whole: dict[str, tuple[Piece, Hashed]] = {}  # small files, by name
        self._nbytes = 0  # of all that are known
        self._lock = threading.Lock()
        self._held_nbytes = 0
        self._held: tuple[Piece, ...] = ()
        self._released = threading.Condition()

    def take_buffer(self, nbytes: int) -> memoryview:
        """Return so many bytes, which hold anything.

        They are free again when no view of them is left, and used again: pages that the system has
        to make cost more than what fills them.
        """
        if nbytes > PIECE_NBYTES or nbytes <= PIECE_NBYTES // 2:
            return np.empty(nbytes, np.uint8).data
        try:
            whole = self._free.pop()
        except IndexError:
            whole = np.empty(PIECE_NBYTES, np.uint8)
        lent = whole[:nbytes]
        finalize(lent, self._free.append, whole).atexit = False
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
        while not any(_is_same(latest, each) for each in found):
            if len(found) == REQUESTS:
                came = f"bytes {piece.start}-{piece.stop - 1} came differently"
                detail = f"{piece.file}: {came} in each of {REQUESTS + 1} requests"
                self.failure = SourceError(CORRUPT, detail, AGAIN)
                raise self.failure
            found.append(latest)
            latest = self._fetch(piece)
        return latest

    def spend(self, pieces: Iterable[Piece]) -> None:
        """Let go of pieces before others, but for those that room was made for."""
        with self._lock:
            self._spent.update(piece for piece in pieces if piece in self._known)

    def _make_room(self) -> None:
        """Drop what was read and is not held, then whatever is oldest."""
        kept_nbytes = SPARE_NBYTES + self._held_nbytes
        if self._nbytes > kept_nbytes:
            held = self._held
            spent = [
                piece
                for piece in self._known
                if piece in self._spent
                and not any(
                    other.file == piece.file
                    and other.start < piece.stop
                    and piece.start < other.stop
                    for other in held
                )
            ]
            self._drop(spent, kept_nbytes)
        if self._nbytes > self._budget_nbytes:
            self._drop(list(self._known), self._budget_nbytes)

    def _drop(self, pieces: list[Piece], kept_nbytes: int) -> None:
        """Drop the first of these that are there, down to so many bytes."""
        for piece in pieces:
            if self._known[piece].done():
                future = self._known.pop(piece)
                if piece.is_hashed and piece not in self._hashed and not future.exception():
                    digest = hashlib.sha256(future.result()).digest()
                    self._hashed[piece] = Hashed(hashlib.sha256(), digest)
                self._spent.discard(piece)
                self._nbytes -= piece.stop - piece.start
                if self._nbytes <= kept_nbytes:
                    return

    @contextmanager
    def room_for(self, nbytes: int, ranges: Iterable[Piece] = ()) -> Iterator[None]:
        """Hold memory for bytes that are read more than once.

        Waits until they fit beside what others hold; one always may.

        ranges  of which every byte will be read again: they stay
        """
        limit, ranges = max(0, self._budget_nbytes - SPARE_NBYTES), tuple(ranges)
        with self._released:
            self._released.wait_for(
                lambda: not self._held_nbytes or self._held_nbytes + nbytes <= limit
            )
            self._held_nbytes += nbytes
            self._held += ranges
        try:
            yield
        finally:
            with self._released:
                self._held_nbytes -= nbytes
                left = list(self._held)
                for piece in ranges:
                    left.remove(piece)
                self._held = tuple(left)
                self._released.notify_all()

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


class Stream:
    """One file on its way from its first byte to its last.

    oid   what the content is known by: 64 hex digits are its sha256, 40 are git's hash of it
    head  its first bytes as they came before; they must be the same
    """

    def __init__(self, pieces: Pieces, file: str, nbytes: int, oid: str, head: bytes = b"") -> None:
        self._pieces = pieces
        self._all = [
            Piece(file, at, min(at + PIECE_NBYTES, nbytes), True)
            for at in range(0, nbytes, PIECE_NBYTES)
        ]
        self._head = head
        self._oid = oid
        self._hash = hasher(nbytes, oid)
        self._wanted: set[int] = set()
        self._unread = [piece.stop - piece.start for piece in self._all]
        self._at = 0  # number of the piece that is hashed next
        self._is_waiting = False
        self._changed = threading.Condition()
        self._is_ending = self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream {file}", daemon=True)
        self._thread.start()

    def cover(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces that hold a range.

        Waits until the hash is not far from them, or waits for readers itself.
        """
        numbers = range(start // PIECE_NBYTES, -(-stop // PIECE_NBYTES))
        if not self._wanted.issuperset(numbers):
            with self._changed:
                self._wanted.update(numbers)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: numbers[0] - self._at < AHEAD or self._is_waiting or self._is_stopped
                )
        return [self._all[number] for number in numbers]

    def have_read(self, start: int, stop: int) -> None:
        """Note that a reader has that range.

        Pieces that were read to their last byte need not stay.
        """
        for number in range(start // PIECE_NBYTES, -(-stop // PIECE_NBYTES)):
            piece = self._all[number]
            with self._changed:
                self._unread[number] -= min(stop, piece.stop) - max(start, piece.start)
            self._spend(number)

    def _spend(self, number: int) -> None:
        if self._unread[number] <= 0 and number < self._at:
            self._pieces.spend([self._all[number]])

    def end(self) -> None:
        """Bring and hash what is left.

        Raises  SourceError where the content is not what its hash says
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()
        self._pieces.spend(self._all)
        if self._error is not None:
            raise self._error
        if self._hash.hexdigest() != self._oid:
            raise corrupt(self._all[0].file, self._oid, self._hash.hexdigest())

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for number, piece in enumerate(self._all):
                with self._changed:
                    self._is_waiting = not self._may_go_on(number)
                    self._changed.notify_all()
                    self._changed.wait_for(partial(self._may_go_on, number))
                    self._is_waiting = False
                if self._is_stopped:
                    return
                last = number + self._pieces.connections
                coming = [self._pieces.fetch(later) for later in self._all[number:last]]
                data = coming[0].result()
                known = memoryview(self._head)[piece.start : piece.stop]
                if not _is_same(known, data[: known.nbytes]):
                    detail = f"{piece.file} begins with other bytes than when its header was read"
                    raise SourceError(CORRUPT, detail, AGAIN)
                before = self._hash.copy()
                self._hash.update(data)
                with self._changed:
                    if self._is_stopped:  # what another stream of the file notes may not be ours
                        return
                    self._pieces.note_hash(piece, Hashed(before, self._hash.digest()))
                    self._at = number + 1
                    self._changed.notify_all()
                self._spend(number)
        except BaseException as error:  # raised again where the stream ends
            self._error = error
        finally:
            self.stop()

    def _may_go_on(self, number: int) -> bool:
        """Tell whether readers are near enough to fetch a piece for."""
        if self._is_ending or self._is_stopped or number in self._wanted:
            return True
        return number - sum(wanted < number for wanted in self._wanted) < AHEAD


def _is_same(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
