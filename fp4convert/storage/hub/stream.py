"""Bring a file from its first byte to its last, and hash it.

The pieces come in the order of the file, a few ahead of the readers.  A reader who is ahead of the
hash waits for it, so that no piece is fetched twice.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from functools import partial

from fp4convert.errors import CORRUPT, SourceError
from fp4convert.storage.hub import prefetch
from fp4convert.storage.hub.pieces import AGAIN, Hashed, Piece, corrupt, hasher, is_same
from fp4convert.storage.hub.prefetch import Pieces

STALL_SECONDS = 1.0  # without a step of any reader: then nobody is on the way to a piece


class Stream:
    """One file on its way from its first byte to its last.

    oid   64 hex digits are the sha256 of the content, 40 are git's hash
    head  the first bytes as they came before; they must be the same
    """

    def __init__(self, pieces: Pieces, file: str, nbytes: int, oid: str, head: bytes = b"") -> None:
        self._pieces = pieces
        self._all = [
            Piece(file, at, min(at + prefetch.PIECE_NBYTES, nbytes), True)
            for at in range(0, nbytes, prefetch.PIECE_NBYTES)
        ]
        self._head = head
        self._oid = oid
        self._hash = hasher(nbytes, oid)
        # Hashes and digests of pieces that only two requests agree on.
        self._hashes: dict[Piece, hashlib._Hash] = {}
        self._digests: dict[Piece, bytes] = {}
        self._wanted: set[int] = set()
        self._unread = [piece.stop - piece.start for piece in self._all]
        self._at = 0  # number of the next piece to hash
        self._early: set[int] = set()  # hashed before a reader wanted them
        self._given_up = 0  # nobody is on the way to a piece below this number
        self._steps = 0  # of readers and of the hash
        self._changed = threading.Condition()
        self._is_waiting = self._is_ending = self._is_stopped = False
        self._error: BaseException | None = None
        pieces.count_streams(1)
        self._thread = threading.Thread(target=self._run, name=f"stream {file}", daemon=True)
        self._thread.start()

    def cover(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of a range; wait until the hash is near them."""
        numbers = range(start // prefetch.PIECE_NBYTES, -(-stop // prefetch.PIECE_NBYTES))
        if not self._wanted.issuperset(numbers):
            with self._changed:
                self._wanted.update(numbers)
                self._early.difference_update(numbers)
                self._note_step()
                self._wait_for_hash(numbers[0])
        return [self._all[number] for number in numbers]

    def is_near(self, start: int) -> bool:
        """Return whether a reader would wait for the hash hardly or not at all."""
        return start // prefetch.PIECE_NBYTES - self._at < prefetch.AHEAD + prefetch.CONNECTIONS

    def _wait_for_hash(self, number: int) -> None:
        """Wait until the hash is near a piece; push it on if it waits in vain."""
        steps = self._steps
        while not self._changed.wait_for(
            lambda: number - self._at < prefetch.AHEAD or self._is_stopped, STALL_SECONDS
        ):
            if steps == self._steps and self._is_waiting:
                self._given_up = max(self._given_up, number)
                self._early.clear()
                self._changed.notify_all()
            steps = self._steps

    def _note_step(self) -> None:
        self._steps += 1
        self._changed.notify_all()

    def have_read(self, start: int, stop: int) -> None:
        """Note a range as read; pieces that were read whole may go."""
        with self._changed:
            for number in range(start // prefetch.PIECE_NBYTES, -(-stop // prefetch.PIECE_NBYTES)):
                piece = self._all[number]
                self._unread[number] -= min(stop, piece.stop) - max(start, piece.start)
                self._spend(number)
            self._steps += 1  # nobody waits for this step

    def _spend(self, number: int) -> None:
        if number < self._at and (self._unread[number] <= 0 or self._is_ending):
            self._pieces.spend([self._all[number]])

    def end(self) -> None:
        """Fetch and hash the rest.

        Raises  SourceError for a wrong hash, also of what was read before
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._pieces.spend(self._all[: self._at])
        self._thread.join()
        self._pieces.spend(self._all)
        if self._error is not None:
            raise self._error
        if self._hash.hexdigest() != self._oid:
            raise corrupt(self._all[0].file, self._oid, self._hash.hexdigest())
        for piece, digest in self._digests.items():
            with suppress(SourceError):  # count_refuted tells its users
                self._pieces.settle(piece, digest)
        self._pieces.check_plan()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for number in range(len(self._all)):
                self._wait_for_readers(number)
                if self._is_stopped or not self._hash_piece(number):
                    return
        except BaseException as error:  # raised again by `end`
            self._error = error
        finally:
            self._pieces.count_streams(-1)
            self.stop()

    def _wait_for_readers(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(partial(self._may_go_on, number))
            if number not in self._wanted and not self._pieces.is_held(self._all[number]):
                self._early.add(number)

    def _may_go_on(self, number: int) -> bool:
        """Return whether to fetch a piece now: readers are near, or none comes."""
        self._is_waiting = False
        if self._is_ending or self._is_stopped or number in self._wanted:
            return True
        if self._pieces.is_held(self._all[number]) or number < self._given_up:
            return True
        if len(self._early) < self._pieces.share_of(prefetch.AHEAD):
            return True
        self._is_waiting = True
        return False

    def _hash_piece(self, number: int) -> bool:
        """Hash a piece, and fetch the next ones meanwhile; False once stopped."""
        piece = self._all[number]
        coming = self._pieces.fetch(piece)
        last = number + self._pieces.share_of(self._pieces.connections)
        for later in self._all[number + 1 : last]:
            if not self._pieces.has_room(later):
                break
            self._pieces.fetch(later)
        data = coming.result()
        known = memoryview(self._head)[piece.start : piece.stop]
        if not is_same(known, data[: known.nbytes]):
            detail = f"{piece.file} begins with other bytes than when its header was read"
            raise SourceError(CORRUPT, detail, AGAIN)
        self._hash_unproven(piece, data)
        before = self._hash.copy()
        self._hash.update(data)
        with self._changed:
            if self._is_stopped:  # another stream of the file may note its own hashes
                return False
            self._pieces.note_hash(piece, Hashed(before, self._hash.digest()))
            self._at = number + 1
            self._spend(number)
            self._note_step()
        return True

    def _hash_unproven(self, piece: Piece, data: memoryview) -> None:
        """Hash the parts of a piece that only two requests agree on."""
        for part in self._pieces.unproven(piece.file):
            if piece.start <= part.start < piece.stop:
                self._hashes[part] = hashlib.sha256()
            if part in self._hashes and part.stop > piece.start:
                first, last = max(part.start, piece.start), min(part.stop, piece.stop)
                self._hashes[part].update(data[first - piece.start : last - piece.start])
                if part.stop <= piece.stop:
                    self._digests[part] = self._hashes.pop(part).digest()
