"""Range requests over urllib3, with retries and redirects.

Accepts only a 206 with the requested range of a file with unchanged size and ETag.  A request that
made progress continues at its end; only tries without progress count.  urllib3 supplies
connections, TLS and proxies; it neither retries nor redirects.  The token goes to the Hub's own
origin alone, and no message holds the query of a link, which signs it.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager
from urllib3.exceptions import HTTPError

from fp4convert.errors import AccessError, InputError, SourceError
from fp4convert.progress import duration_text, size_text
from fp4convert.storage.hub.api import PASSING, host_of, no_access, plain_words
from fp4convert.storage.hub.retry import Patience, Retry, pause_of, status_words
from fp4convert.storage.hub.watch import Watch

HOPS = 5  # redirects inside the Hub
CHUNK_NBYTES = 2 << 20  # most bytes of one read from a reply
MOST_IDLE = 1 << 10  # idle connections to one host: more than anybody opens
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
LOGGERS = ("urllib3.connection", "urllib3.connectionpool")  # they log addresses
AGAIN = (
    "Check that this host can be reached from here (proxy, HF_ENDPOINT);"
    " the same command goes on with what is finished."
)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_QUERY = re.compile(r"\?\S*")


class RemoteFile(NamedTuple):
    """One file of a repository at one commit.

    name    in messages
    url     on the Hub, without a query
    oid     sha256 of a large file's content, git's hash of a small one's
    commit  40 hex digits
    """

    name: str
    url: str
    nbytes: int
    oid: str
    commit: str


class AgainError(Exception):
    """A request that may be tried again.

    pause_seconds  that the server asks for, if any
    """

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


class RangeReader:
    """Reads ranges; safe for several threads.

    headers  for the Hub's own origin, with the token
    tell     gets a line for people when everything waits
    """

    def __init__(
        self, headers: Mapping[str, str], patience: Patience, tell: Callable[[str], None]
    ) -> None:
        self._headers = headers
        self._retry = Retry(patience, tell)
        self._watch = Watch(patience.least_nbytes, patience.least_seconds)
        self._pools: dict[tuple[str, str], PoolManager] = {}
        self._places: dict[str, str] = {}
        self._resolving: dict[str, threading.Lock] = {}  # by URL, as _places
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._replies: set[BaseHTTPResponse] = set()  # under way
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_hide_queries)

    def stop(self) -> None:
        """Make all reads fail at once, now and later."""
        self._retry.stopped.set()
        with self._lock:
            for reply in self._replies:
                with suppress(OSError, ValueError, RuntimeError):  # read to its end meanwhile
                    reply.shutdown()

    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the file's bytes from `start` on.

        Raises  SourceError for a changed file or after too many tries; AccessError
        """
        done, failures, counted = 0, 0, 0
        while done < buffer.nbytes:
            try:
                for count in self._receive(file, start + done, buffer[done:]):
                    done += count
            except (AgainError, HTTPError, OSError, UnicodeError) as error:
                again = error if isinstance(error, AgainError) else AgainError(plain_words(error))
                # A server that breaks off after every byte gets nowhere.
                is_progress = done - counted >= self._watch.least_nbytes
                failures, counted = (0, done) if is_progress else (failures + 1, counted)
                host = host_of(file.url)
                if not self._retry.wait(failures, f"{host}: {again}", again.pause_seconds):
                    where = f"at byte {start + done} from {host}"
                    raise SourceError(
                        "source-unreachable",
                        f"{file.name} cannot be read {where}: {failures} tries without progress"
                        f" (expected {self._progress}), the last: {again}",
                        AGAIN,
                    ) from None

    def _check_running(self) -> None:
        if self._retry.stopped.is_set():
            raise SourceError("source-stopped", "reading was stopped")

    def _receive(self, file: RemoteFile, start: int, buffer: memoryview) -> Iterator[int]:
        """Fill the buffer by one request; yield the bytes of each read."""
        place = self._resolve(file)
        is_hub = _origin(place) == _origin(file.url)
        headers = {"Range": f"bytes={start}-{start + buffer.nbytes - 1}"}
        reply = self._ask("GET", place, {**headers, **(self._headers if is_hub else {})})
        with self._lock:
            self._replies.add(reply)
        is_over = False
        try:
            self._check_running()  # after `add`: this sees the stop, or `stop` sees the reply
            self._judge_range(file, reply, start, start + buffer.nbytes, is_hub)
            with self._watch.over(reply.shutdown) as transfer:
                try:
                    body = _body_of(reply)
                    while transfer.nbytes < buffer.nbytes:
                        # Only what has arrived: the whole could take any time.
                        count = _read_some(reply, body, buffer[transfer.nbytes :][:CHUNK_NBYTES])
                        self._check_running()
                        if not count:
                            raise AgainError("the reply ended early")
                        transfer.nbytes += count
                        yield count
                    # More bytes than requested are not read.
                    is_over = not body.length if body else not reply.read(1)
                    if body and is_over:
                        body.close()  # else its connection could not be used again
                except (AgainError, HTTPError, OSError):
                    if transfer.is_ended:
                        raise AgainError(f"it sent less than {self._progress}") from None
                    raise
        finally:
            with self._lock:
                self._replies.discard(reply)
            if not is_over:
                reply.close()
            reply.release_conn()

    @property
    def _progress(self) -> str:
        return f"{size_text(self._watch.least_nbytes)} in {duration_text(self._watch.seconds)}"

    def _judge_range(
        self, file: RemoteFile, reply: BaseHTTPResponse, start: int, end: int, is_hub: bool
    ) -> None:
        """Raise an error unless the reply is that range of that file."""
        if reply.status in PASSING:
            raise _passing(reply)
        if reply.status == 416:
            raise _changed(file, f"it has no such range any more, and had {file.nbytes} bytes")
        if reply.status in (401, 403) and is_hub:
            raise no_access(file.name, file.url, reply.status, reply.headers.get("X-Error-Code"))
        if reply.status != 206:
            if not is_hub:
                self._places.pop(file.url, None)  # the link may have expired
            raise AgainError(f"HTTP {reply.status} where 206 was expected")
        came = reply.headers.get("Content-Range") or ""
        match = _CONTENT_RANGE.fullmatch(came)
        if not match or (int(match[1]), int(match[2])) != (start, end - 1):
            expected = f"where bytes {start}-{end - 1} were asked for"
            raise AgainError(f"Content-Range {came[:60]!r} {expected}")
        if int(match[3]) != file.nbytes:
            raise _changed(file, f"it had {file.nbytes} bytes and now has {match[3]}")
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise AgainError("the reply is compressed, though it was not asked to be")
        etag = reply.headers.get("ETag")
        with self._lock:
            known = self._etags.setdefault(file.url, etag) if etag else etag
        if etag != known:
            raise _changed(file, "its ETag is another one than before")

    def _resolve(self, file: RemoteFile) -> str:
        """Return the address of the bytes: a signed link or the Hub's own."""
        with self._lock:
            resolving = self._resolving.setdefault(file.url, threading.Lock())
        with resolving:  # one thread asks; the others wait for its answer
            if known := self._places.get(file.url):
                return known
            place = file.url
            for _ in range(HOPS):
                reply = self._ask("HEAD", place, self._headers)
                reply.drain_conn()
                _judge_resolved(file, reply)
                if not 300 <= reply.status < 400:
                    break
                place = _follow(place, reply.headers.get("Location") or "")
                if _origin(place) != _origin(file.url):
                    break
            self._places[file.url] = place
            return place

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """Send a request; return the reply, whose body is not read yet."""
        self._retry.wait_while_paused()
        self._check_running()
        with self._lock:
            if _origin(url) not in self._pools:
                self._pools[_origin(url)] = self._open_pool(url)
            pool = self._pools[_origin(url)]
        return pool.request(
            method,
            url,
            headers={"Accept-Encoding": "identity", **headers},
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def _open_pool(self, url: str) -> PoolManager:
        """Open a pool of connections to a host, by the environment's proxy."""
        seconds = self._retry.patience.timeout_seconds
        options: dict[str, Any] = {"timeout": seconds, "maxsize": MOST_IDLE}
        if urlsplit(url).scheme == "https":
            options["ssl_context"] = ssl.create_default_context()
        proxy = _find_proxy(urlsplit(url))
        if proxy is None:
            pool = PoolManager(**options)
        else:
            if proxy.username:
                words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
                basic = f"Basic {b64encode(words.encode()).decode()}"
                options["proxy_headers"] = {"Proxy-Authorization": basic}
            pool = ProxyManager(f"http://{proxy.netloc.rpartition('@')[2]}", **options)
        pool.pool_classes_by_scheme = self._watch.pools()
        return pool


def _body_of(reply: BaseHTTPResponse) -> HTTPResponse | None:
    """Return http.client's response under a reply of known length, or None.

    urllib3 itself cannot read the bytes that have arrived into a buffer.
    """
    body = getattr(reply, "_fp", None)
    is_plain = isinstance(body, HTTPResponse) and body.length is not None and not body.chunked
    return body if is_plain else None


def _read_some(reply: BaseHTTPResponse, body: HTTPResponse | None, buffer: memoryview) -> int:
    """Read arrived bytes into the buffer; return their count, 0 at the end."""
    if body is None:
        data = reply.read1(buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)
    if not body.length:
        return 0
    count = int(body.fp.readinto1(buffer[: body.length]))
    body.length -= count
    return count


def _hide_queries(record: logging.LogRecord) -> bool:
    """Remove queries, which sign links, from a record of urllib3's log."""
    record.msg, record.args = _QUERY.sub("?...", record.getMessage()), ()
    record.exc_info = None  # headers that could not be parsed hold links, too
    return True


def _judge_resolved(file: RemoteFile, reply: BaseHTTPResponse) -> None:
    """Raise an error unless the Hub's reply describes that file."""
    if reply.status in PASSING:
        raise _passing(reply)
    if reply.status in (401, 403):
        raise no_access(file.name, file.url, reply.status, reply.headers.get("X-Error-Code"))
    if reply.status >= 500:  # a mirror that lacks the file
        detail = f"{file.name}: {host_of(file.url)} answers HTTP {reply.status}"
        raise SourceError("source-unreachable", detail, "Run it again later.")
    if reply.status >= 400:
        raise _changed(file, f"the Hub does not have it any more (HTTP {reply.status})")
    commit = reply.headers.get("X-Repo-Commit")
    nbytes = reply.headers.get("X-Linked-Size")
    etag = reply.headers.get("X-Linked-ETag")
    if commit and commit != file.commit:
        raise _changed(file, f"it is of commit {commit}, and {file.commit} was asked for")
    if nbytes and nbytes != str(file.nbytes):
        raise _changed(file, f"it had {file.nbytes} bytes and now has {nbytes}")
    if etag and etag.removeprefix("W/").strip('"') != file.oid:
        raise _changed(file, "its content has another hash than the commit says")


def _changed(file: RemoteFile, found: str) -> SourceError:
    detail = f"{file.name} changed while it was read: {found}"
    return SourceError(
        "source-changed", detail, "Run the same command again: what is finished is kept."
    )


def _passing(reply: BaseHTTPResponse) -> AgainError:
    seconds = pause_of(reply.headers.get) if reply.status == 429 else None
    return AgainError(status_words(reply.status, seconds), seconds)


def _follow(place: str, location: str) -> str:
    """Return the target of a redirect; raise AgainError for a bad one."""
    try:
        target = urljoin(place, location)
        parts = urlsplit(target)
        is_address = target.isascii() and target.isprintable() and " " not in target
        if not is_address or parts.port == 0:
            raise ValueError(target)
    except ValueError:
        raise AgainError("a redirect to something that is not an address") from None
    if parts.scheme != "https" and urlsplit(place).scheme == "https":
        raise AgainError(f"a redirect from https to {parts.scheme}")
    return target


def check_endpoint(endpoint: str) -> None:
    """Raise InputError for an unusable address of the Hub or of its proxy."""
    parts = urlsplit("")
    with suppress(ValueError):
        parts = urlsplit(endpoint if urlsplit(endpoint).port != 0 else "")
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise InputError(
            "endpoint",
            f"HF_ENDPOINT is {endpoint.rpartition('@')[2][:60]!r}; expected https://HOST",
            "Set it to a Hub, or unset it.",
        )
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        found = f"{parts.scheme}://{host_of(endpoint)}"
        detail = f"HF_ENDPOINT is {found}, which would carry the token in the clear; expected https"
        raise InputError("plain-http", detail, "Set HF_ENDPOINT to an https address.")
    _find_proxy(parts)


def check_token(headers: Mapping[str, str]) -> None:
    """Raise AccessError for a token that no header can hold."""
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise AccessError(
            "bad-token",
            "the token holds a character that is not printable ASCII;"
            " expected hf_ and letters and digits",
            "Copy it again from the Hub's settings, or hf auth login.",
        )


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _find_proxy(parts: SplitResult) -> SplitResult | None:
    """Return the environment's proxy for an address; None for the direct way."""
    proxies = getproxies()
    address = proxies.get(parts.scheme) or proxies.get("all")
    if not address or proxy_bypass(parts.hostname or ""):
        return None
    with suppress(ValueError):
        proxy = urlsplit(address if "://" in address else f"http://{address}")
        if proxy.scheme == "http" and proxy.hostname and proxy.port != 0:
            return proxy
    raise InputError(
        "proxy",
        f"the proxy for {parts.scheme} is {address.rpartition('@')[2][:60]!r}; expected"
        " http://HOST:PORT",
        f"Set {parts.scheme}_proxy to one that speaks HTTP, or set NO_PROXY.",
    )
