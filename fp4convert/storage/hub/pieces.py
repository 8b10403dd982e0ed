"""A piece of a file on the Hub, and its hash."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from fp4convert.errors import CORRUPT, SourceError

AGAIN = "Run the same command again."
OTHERWISE = "two requests brought what the file does not hold"


class Piece(NamedTuple):
    """A range of a file.

    is_hashed  its reader hashes the whole file
    """

    file: str
    start: int
    stop: int
    is_hashed: bool = False

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.file}: bytes {self.start}-{self.stop - 1}"


class Hashed(NamedTuple):
    """Proof of a piece: the hash before its bytes, the digest after them."""

    before: hashlib._Hash
    digest: bytes


def is_same(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def hasher(nbytes: int, oid: str) -> hashlib._Hash:
    """Begin a hash of the kind of an oid: git's has 40 digits, sha256 has 64."""
    if len(oid) == 40:
        return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
    return hashlib.sha256()


def corrupt(file: str, oid: str, digest: str) -> SourceError:
    return SourceError(
        CORRUPT,
        f"{file} came damaged: its hash is {digest[:16]}..., and the Hub lists {oid[:16]}...",
        "Run the same command again; where the file is in the Hub's cache, remove it there.",
    )
