"""Read Xet storage through hf_xet, as if by range requests.

hf_xet has its own connections, retries and buffers; what it gives is counted here, and hashed by
whoever reads whole files.
Small files that git holds itself come by range requests.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from fp4convert.errors import InputError, SourceError
from fp4convert.storage.hub.http import RangeReader, RemoteFile

BUFFER_NBYTES = 256 << 20  # of hf_xet, whose own default is 1.6 GB
GIT_DIGITS = 40  # of the hash of a file that git holds itself
HELP = "Run the same command again, or without --transport xet."


class XetReader:
    """Reads ranges; threads may call it at once.

    ranges     for small files, and to ask what a large one is called in the storage
    token_url  gives the storage's own token
    headers    for that url, with the Hub's token
    """

    def __init__(self, ranges: RangeReader, token_url: str, headers: Mapping[str, str]) -> None:
        self._ranges = ranges
        self._token_url = token_url
        self._headers = headers
        self._group: Any = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the file's bytes from `start` on.

        Raises  InputError where the repository is not in that storage;
                SourceError where it cannot be read
        """
        if not buffer.nbytes or len(file.oid) == GIT_DIGITS:
            return self._ranges.read_into(file, start, buffer)
        try:
            import hf_xet
        except ImportError:
            detail = "--transport xet needs the package hf_xet, which is not installed"
            raise InputError("no-xet", detail, "Install it: pip install hf_xet.") from None
        if not (name := self._ranges.xet_name(file)):
            detail = f"{file.name} is not in the Hub's Xet storage; expected a repository that is"
            raise InputError("no-xet", detail, "Leave out --transport xet.")
        info = hf_xet.XetFileInfo(name, file.nbytes)
        done, stop = 0, start + buffer.nbytes
        try:
            for chunk in self._open().download_stream(info, start=start, end=stop):
                if self._is_stopped or done + len(chunk) > buffer.nbytes:
                    break
                buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
        except Exception as error:
            # Of hf_xet, which names no base class; its messages may hold signed links.
            where = f"{file.name} cannot be read at byte {start + done} through hf_xet"
            detail = f"{where}: {type(error).__name__}"
            raise SourceError("source-unreachable", detail, HELP) from None
        if done != buffer.nbytes:
            detail = f"{file.name}: hf_xet gave {done} of {buffer.nbytes} bytes"
            raise SourceError("source-unreachable", detail, HELP)

    def _open(self) -> Any:
        with self._lock:
            if self._group is None:
                import hf_xet

                config = hf_xet.XetConfig().with_config(
                    "reconstruction.download_buffer_size", BUFFER_NBYTES
                )
                self._group = hf_xet.XetSession(config).new_download_stream_group(
                    token_refresh_url=self._token_url, token_refresh_headers=dict(self._headers)
                )
                if self._is_stopped:  # meanwhile: `stop` saw no group
                    self._group.abort()
            return self._group

    def stop(self) -> None:
        """Make every read, under way or to come, fail soon."""
        self._is_stopped = True
        self._ranges.stop()
        if self._group is not None:
            self._group.abort()
