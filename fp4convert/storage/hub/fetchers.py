"""Call functions in threads that end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def do_aside(work: Callable[[], T]) -> Future[T]:
    """Do the work in a thread that ends with it; return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the result is wanted
            future.set_exception(error)

    threading.Thread(target=run, name="ask", daemon=True).start()
    return future


class Fetchers:
    """A few threads that do what waits for a network.

    The end of the program waits for none of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._asked: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = (
            SimpleQueue()
        )
        self._coming: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Return the future of what the work returns.

        Work begins in the order in which it is asked for.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._coming.add(future)
            if len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._run, name="fetch", daemon=True))
                self._threads[-1].start()
        self._asked.put((future, work, arguments))
        return future

    def _run(self) -> None:
        while self._error is None:
            future, work, arguments = self._asked.get()
            try:
                result, error = work(*arguments), None
            except BaseException as caught:  # raised again where the result is wanted
                result, error = None, caught
            with self._lock:
                if future in self._coming:
                    self._coming.remove(future)
                    future.set_exception(error) if error else future.set_result(result)
            # Lest they keep memory while the next is awaited.
            del future, work, arguments, result, error

    def close(self, error: Exception) -> None:
        """Give this error to everybody who waits or asks, at once."""
        with self._lock:
            self._error = error
            coming, self._coming = self._coming, set()
        for future in coming:
            future.set_exception(error)
