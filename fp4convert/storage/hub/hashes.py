"""Begin the hash that the Hub knows a file's content by."""

from __future__ import annotations

import hashlib

from fp4convert.errors import CORRUPT, SourceError


def hasher(nbytes: int, oid: str) -> hashlib._Hash:
    """Begin a hash of the kind that an oid is.

    Git's, of 40 digits, begins with what the content is and how long.
    """
    if len(oid) == 40:
        return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
    return hashlib.sha256()


def corrupt(file: str, oid: str, found: str) -> SourceError:
    return SourceError(
        CORRUPT,
        f"{file} came damaged: its hash is {found[:16]}..., and the Hub lists {oid[:16]}...",
        "Run the same command again; where the file is in the Hub's cache, remove it there.",
    )
