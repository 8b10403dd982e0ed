"""Call functions in threads that end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def do_aside(work: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own; return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="ask", daemon=True).start()
    return future


class Fetchers:
    """A few threads for network work; the program's end waits for none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = (
            SimpleQueue()
        )
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue a call, first in, first out; return its future."""
        future: Future[T] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending.add(future)
            if len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._run, name="fetch", daemon=True))
                self._threads[-1].start()
        self._queue.put((future, work, arguments))
        return future

    def _run(self) -> None:
        while self._error is None:
            future, work, arguments = self._queue.get()
            try:
                result, error = work(*arguments), None
            except BaseException as caught:  # raised again by `result`
                result, error = None, caught
            with self._lock:
                if future in self._pending:
                    self._pending.remove(future)
                    future.set_exception(error) if error else future.set_result(result)
            # Free the memory while waiting for the next call.
            del future, work, arguments, result, error

    def close(self, error: Exception) -> None:
        """Give this error to all waiting and later calls."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(error)
