"""Close connections that bring too little.

A socket's own time limit counts from one byte to the next: a server that sends one now and then
would keep it open without end.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

LOOKS = 8  # in the time limit of a transfer


@dataclass(slots=True)
class Transfer:
    """The bytes of one connection, counted by its reader.

    shut                closes the connection under its reader
    seen_nbytes, since  bytes and time when the watch was last content
    """

    shut: Callable[[], None]
    nbytes: int = 0
    seen_nbytes: int = 0
    since: float = 0.0
    is_ended: bool = False

    def end(self) -> None:
        self.is_ended = True
        with suppress(OSError, ValueError, RuntimeError):  # it ended meanwhile
            self.shut()


class Watch:
    """Watches transfers in a thread of its own, while there are any.

    least_nbytes  that a transfer must bring in `seconds`
    """

    def __init__(self, least_nbytes: int, seconds: float) -> None:
        self.least_nbytes = least_nbytes
        self.seconds = seconds
        self._transfers: list[Transfer] = []
        self._is_looking = False
        self._lock = threading.Lock()

    @contextmanager
    def over(self, shut: Callable[[], None]) -> Iterator[Transfer]:
        """Watch a transfer inside the context."""
        transfer = Transfer(shut, since=time.monotonic())
        with self._lock:
            self._transfers.append(transfer)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="watch", daemon=True).start()
        try:
            yield transfer
        finally:
            with self._lock:
                self._transfers = [other for other in self._transfers if other is not transfer]

    def _look(self) -> None:
        while True:
            time.sleep(self.seconds / LOOKS)
            with self._lock:
                if not self._transfers:
                    self._is_looking = False
                    return
                transfers = self._transfers
            now = time.monotonic()
            for transfer in transfers:
                if now - transfer.since < self.seconds:
                    continue
                if transfer.nbytes - transfer.seen_nbytes < self.least_nbytes:
                    transfer.end()
                transfer.seen_nbytes, transfer.since = transfer.nbytes, now

    def pools(self) -> dict[str, type[HTTPConnectionPool]]:
        """Return pool classes for urllib3 that also watch heads of replies."""
        watch = self

        class Watched:
            def getresponse(self: Any) -> Any:
                with self.watched():
                    return super().getresponse()  # type: ignore[misc]

            def _tunnel(self: Any) -> None:
                with self.watched():  # a proxy's answer to CONNECT
                    super()._tunnel()  # type: ignore[misc]

            @contextmanager
            def watched(self: Any) -> Iterator[None]:
                with watch.over(partial(self.sock.shutdown, socket.SHUT_RD)) as transfer:
                    try:
                        yield
                    finally:
                        if transfer.is_ended:  # else the part of a head passes as whole
                            raise TimeoutError("the head of the reply did not come") from None

        def watched_pool(kind: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
            connection = type("WatchedConnection", (Watched, kind.ConnectionCls), {})
            return type("WatchedPool", (kind,), {"ConnectionCls": connection})

        return {
            "http": watched_pool(HTTPConnectionPool),
            "https": watched_pool(HTTPSConnectionPool),
        }
