"""Range requests with retries and redirects.

Decides what a reply may be used for: only a 206 with the range that was asked for, of a file with the size and the ETag that it
had before.  Requests that got somewhere are continued where they stopped; only those that did not are counted.  What is read,
when, and whether its hash is right, others decide.
The token goes to the Hub's own origin alone, and no message holds the query of a link, which is what signs it.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NamedTuple, NoReturn
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakSet

from fp4convert.errors import AccessError, InputError, SourceError

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # replies that another try may not get
LONGEST_PAUSE = 900.0  # seconds; of what a server asks for
HOPS = 5  # redirects inside the Hub
CHUNK_NBYTES = 1 << 20  # read from a socket at once
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
AGAIN = "See that this host can be reached from here (proxy, HF_ENDPOINT); the same command goes on with what is finished."
FAILURES: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "it refuses the connection: nothing listens there"),
    (socket.gaierror, "no such host is known here (DNS)"),
    (ssl.SSLCertVerificationError, "its certificate is not trusted here (TLS)"),
    (ssl.SSLError, "no secure connection could be made (TLS)"),
    (TimeoutError, "it did not answer in time"),
    (ConnectionError, "it broke the connection off"),
    (http.client.IncompleteRead, "the reply ended early"),
    (http.client.HTTPException, "it does not speak HTTP"),
    (UnicodeError, "no host can have that name (DNS)"),
)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_RATE_LIMIT = re.compile(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_SECONDS = re.compile(r"\s*[0-9]+\s*")  # other digits, such as a raised 2, are no number


class RemoteFile(NamedTuple):
    """One file of a repository at one commit.

    name    as messages name it
    url     on the Hub, without a query
    oid     what its content is known by: the sha256 of a large file, git's hash of another
    commit  40 hex digits
    """

    name: str
    url: str
    nbytes: int
    oid: str
    commit: str


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the network is waited for.

    tries  without a byte of progress
    """

    timeout_seconds: float = 20.0
    tries: int = 6
    first_seconds: float = 0.5
    longest_seconds: float = 60.0

    def wait_seconds(self, failures: int) -> float:
        """Before the try after so many failures: doubled each time, spread so that threads do not come together."""
        return float(
            min(self.longest_seconds, self.first_seconds * 2 ** max(0, failures - 1))
            * random.uniform(0.5, 1.5)
        )


class _AgainError(Exception):
    """A request that may be tried again, after as many seconds as the server said, if it did."""

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


class RangeReader:
    """Reads ranges; threads may call it at once, and each keeps its own connections.

    headers  for the Hub's own origin, with the token
    tell     gets a line for people when everything has to wait
    """

    def __init__(
        self, headers: Mapping[str, str], patience: Patience, tell: Callable[[str], None]
    ) -> None:
        self._headers = headers
        self._patience = patience
        self._tell = tell
        self._places: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        self._xet_names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._open: WeakSet[socket.socket] = (
            WeakSet()
        )  # a connection lets go of its own before the reply is read
        self._paused_until = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make every read, under way or to come, fail at once; one that waits for a connection, before it asks for anything."""
        self._stopped.set()
        with self._lock:
            for opened in self._open:
                with suppress(OSError):
                    socket.socket.shutdown(
                        opened, socket.SHUT_RDWR
                    )  # TLS's own would take the key from who still reads

    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the file's bytes from `start` on.

        Raises SourceError where the file is not what it was, or after too many tries; AccessError where the Hub gives none
        """
        done, failures = 0, 0
        while done < buffer.nbytes:
            before = done
            try:
                self._wait_while_paused()
                for count in self._receive(file, start + done, buffer[done:]):
                    done += count
                    if self._stopped.is_set():
                        raise SourceError("source-stopped", f"{file.name}: reading was stopped")
            except (_AgainError, OSError, http.client.HTTPException, UnicodeError) as error:
                self._hang_up()
                failures = 0 if done > before else failures + 1
                if failures >= self._patience.tries:
                    self._give_up(file, start + done, error)
                self._wait(failures, error)

    def xet_name(self, file: RemoteFile) -> str | None:
        """What a file is called in the Hub's Xet storage, where it is there; the first byte is read to be told."""
        if file.url not in self._places:
            self.read_into(file, 0, memoryview(bytearray(1)))
        return self._xet_names.get(file.url)

    def _give_up(self, file: RemoteFile, at: int, error: Exception) -> NoReturn:
        reason = str(error) if isinstance(error, _AgainError) else plain_words(error)
        where = f"{file.name} cannot be read at byte {at} from {host_of(file.url)}"
        detail = f"{where}: {self._patience.tries} tries without progress, the last: {reason}"
        raise SourceError("source-unreachable", detail, AGAIN) from None

    def _wait(self, failures: int, error: Exception) -> None:
        seconds = error.pause_seconds if isinstance(error, _AgainError) else None
        patience = self._patience.wait_seconds(failures)
        if seconds is None:
            self._stopped.wait(patience)
            return
        seconds = max(seconds, patience)
        with self._lock:
            until = time.monotonic() + seconds
            is_news = until > self._paused_until + 1
            self._paused_until = max(self._paused_until, until)
        if is_news:
            self._tell(f"rate limited by the Hub: waiting {seconds:.0f} s")

    def _wait_while_paused(self) -> None:
        while (left := self._paused_until - time.monotonic()) > 0 and not self._stopped.is_set():
            self._stopped.wait(left)
        if self._stopped.is_set():
            raise SourceError("source-stopped", "reading was stopped")

    def _receive(self, file: RemoteFile, start: int, buffer: memoryview) -> Iterator[int]:
        """Counts of bytes that came, from one request."""
        place = self._place(file)
        is_hub = _origin(place) == _origin(file.url)
        end = start + buffer.nbytes
        headers = {"Range": f"bytes={start}-{end - 1}", **(self._headers if is_hub else {})}
        reply = self._request("GET", place, headers)
        self._judge_status(file, reply, is_hub)
        self._judge_range(file, reply, start, end)
        done = 0
        while done < buffer.nbytes:
            count = reply.readinto(buffer[done : done + CHUNK_NBYTES])
            if not count:
                raise _AgainError("the reply ended early")
            done += count
            yield count
        if reply.read(1):
            self._hang_up()  # whatever else comes, nobody asked for it

    def _judge_status(
        self, file: RemoteFile, reply: http.client.HTTPResponse, is_hub: bool
    ) -> None:
        if reply.status in PASSING:
            raise _passing(reply)
        if reply.status == 416:
            raise _changed(file, f"it has no such range any more, and had {file.nbytes} bytes")
        if reply.status in (401, 403) and is_hub:
            raise no_access(file.name, file.url, reply.status, reply.getheader("X-Error-Code"))
        if reply.status != 206:
            if not is_hub:
                self._places.pop(file.url, None)  # the link has expired, perhaps
            raise _AgainError(f"HTTP {reply.status} where 206 was expected")

    def _judge_range(
        self, file: RemoteFile, reply: http.client.HTTPResponse, start: int, end: int
    ) -> None:
        found = reply.getheader("Content-Range") or ""
        match = _CONTENT_RANGE.fullmatch(found)
        if not match or (int(match[1]), int(match[2])) != (start, end - 1):
            raise _AgainError(
                f"Content-Range {found[:60]!r} where bytes {start}-{end - 1} were asked for"
            )
        if int(match[3]) != file.nbytes:
            raise _changed(file, f"it had {file.nbytes} bytes and now has {match[3]}")
        if reply.getheader("Content-Encoding", "identity") != "identity":
            raise _AgainError("the reply is compressed, though it was not asked to be")
        etag = reply.getheader("ETag")
        with self._lock:
            known = self._etags.setdefault(file.url, etag) if etag else etag
        if etag != known:
            raise _changed(file, "its ETag is another one than before")

    def _place(self, file: RemoteFile) -> str:
        """Where the Hub says that the bytes are: a signed link to its storage, or the Hub itself."""
        if known := self._places.get(file.url):
            return known
        place = file.url
        for _ in range(HOPS):
            reply = self._request("HEAD", place, self._headers)
            reply.read()
            self._judge_resolved(file, reply)
            if name := reply.getheader("X-Xet-Hash"):
                self._xet_names[file.url] = name
            if not 300 <= reply.status < 400:
                break
            place = _follow(place, reply.getheader("Location") or "")
            if _origin(place) != _origin(file.url):
                break
        self._places[file.url] = place
        return place

    def _judge_resolved(self, file: RemoteFile, reply: http.client.HTTPResponse) -> None:
        if reply.status in PASSING:
            raise _passing(reply)
        if reply.status in (401, 403):
            raise no_access(file.name, file.url, reply.status, reply.getheader("X-Error-Code"))
        if reply.status >= 500:  # of mirrors, which lack what the Hub has
            detail = f"{file.name}: {host_of(file.url)} answers HTTP {reply.status}"
            raise SourceError("source-unreachable", detail, "Run it again later.")
        if reply.status >= 400:
            raise _changed(file, f"the Hub does not have it any more (HTTP {reply.status})")
        commit, nbytes, etag = (
            reply.getheader(f"X-{name}") for name in ("Repo-Commit", "Linked-Size", "Linked-ETag")
        )
        if commit and commit != file.commit:
            raise _changed(file, f"it is of commit {commit}, and {file.commit} was asked for")
        if nbytes and nbytes != str(file.nbytes):
            raise _changed(file, f"it had {file.nbytes} bytes and now has {nbytes}")
        if etag and etag.removeprefix("W/").strip('"') != file.oid:
            raise _changed(file, "its content has another hash than the commit says")

    def _request(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        connections = self._mine.__dict__.setdefault("connections", {})
        if _origin(url) not in connections:
            connections[_origin(url)] = _connect(parts, self._patience.timeout_seconds)
        connection, of_proxy = connections[_origin(url)]
        if not connection.sock:
            connection.connect()
            with self._lock:
                self._open.add(connection.sock)
            self._wait_while_paused()  # behind `add`: either this sees a stop, or `stop` sees the socket
        target = parts._replace(scheme="", netloc="").geturl() or "/" if of_proxy is None else url
        connection.request(
            method, target, headers={"Accept-Encoding": "identity", **headers, **(of_proxy or {})}
        )
        reply: http.client.HTTPResponse = connection.getresponse()
        return reply

    def _hang_up(self) -> None:
        """Close this thread's connections: a reply that was not read to its end is in the way."""
        for connection, _ in self._mine.__dict__.pop("connections", {}).values():
            connection.close()


def no_access(name: str, url: str, status: int, code: str | None) -> AccessError:
    """The error for a 401 or 403 of the Hub, with what a person can do; `url` leads to the repository or into it."""
    page = f"{urlsplit(url).scheme}://{host_of(url)}{urlsplit(url).path.partition('/resolve/')[0]}"
    if code == "GatedRepo":
        detail = f"{name}: the repository is gated, and this token or nobody was granted access (HTTP {status})"
        return AccessError(
            "gated", detail, f"Accept the licence at {page}, then: hf auth login, or set HF_TOKEN."
        )
    detail = f"{name}: the Hub gives no access (HTTP {status}): the repository is private or not there, or the token is wrong"
    return AccessError(
        "no-access", detail, "Look for a typing error; then: hf auth login, or set HF_TOKEN."
    )


def _changed(file: RemoteFile, found: str) -> SourceError:
    detail = f"{file.name} changed while it was read: {found}"
    return SourceError(
        "source-changed", detail, "Run the same command again: what is finished stays."
    )


def _passing(reply: http.client.HTTPResponse) -> _AgainError:
    return _AgainError(
        f"HTTP {reply.status}", pause_of(reply.getheader) if reply.status == 429 else None
    )


def pause_of(header: Callable[[str], str | None]) -> float | None:
    """Seconds that a server asks to wait for, by a reply's headers, up to 15 minutes; None where it names none."""
    asked = header("Retry-After") or ""
    if match := _RATE_LIMIT.search(header("RateLimit") or ""):
        asked = match[1]
    if _SECONDS.fullmatch(asked):
        return min(float(asked), LONGEST_PAUSE)
    try:
        return max(0.0, min(parsedate_to_datetime(asked).timestamp() - time.time(), LONGEST_PAUSE))
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def plain_words(error: BaseException) -> str:
    """What happened on the network, for a person; what the error came from says it best."""
    known: BaseException | None = error
    while known is not None:
        for kind, words in FAILURES:
            if isinstance(known, kind):
                return words
        if isinstance(known, OSError) and known.strerror:
            return known.strerror
        known = known.__cause__ or known.__context__
    return FAILURES[4][1] if "Timeout" in type(error).__name__ else type(error).__name__


def host_of(url: str) -> str:
    """The host and the port, as messages name a server: without the password that an address may hold."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _follow(place: str, location: str) -> str:
    """Where a redirect leads; it is tried again where that is no address."""
    try:
        target = urljoin(place, location)
        if (
            target.isascii()
            and target.isprintable()
            and " " not in target
            and urlsplit(target).port != 0
        ):
            return target
    except ValueError:
        pass
    raise _AgainError("a redirect to what is no address")


def check_endpoint(endpoint: str) -> None:
    """InputError where the Hub's address is none, would carry the token in the clear, or lies behind a proxy that is none."""
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
    _proxy_of(parts)


def check_token(headers: Mapping[str, str]) -> None:
    """AccessError where the headers hold a token that no request can carry."""
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        detail = "the token holds a character that is not printable ASCII; expected hf_ and letters and digits"
        raise AccessError(
            "bad-token", detail, "Copy it again from the Hub's settings, or hf auth login."
        )


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for an address; None for the direct way, InputError for one that cannot be used."""
    known = getproxies()
    found = (
        None if proxy_bypass(parts.hostname or "") else known.get(parts.scheme) or known.get("all")
    )
    if not found:
        return None
    with suppress(ValueError):
        proxy = urlsplit(found if "://" in found else f"http://{found}")
        if proxy.scheme == "http" and proxy.hostname and proxy.port != 0:
            return proxy
    detail = f"the proxy for {parts.scheme} is {found.rpartition('@')[2][:60]!r}; expected http://HOST:PORT"
    raise InputError(
        "proxy", detail, f"Set {parts.scheme}_proxy to one that speaks HTTP, or set NO_PROXY."
    )


def _credentials(proxy: SplitResult) -> dict[str, str]:
    """The header that a proxy with a password wants."""
    words = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
    return (
        {"Proxy-Authorization": f"Basic {b64encode(words.encode()).decode()}"}
        if proxy.username
        else {}
    )


def _connect(
    parts: SplitResult, timeout_seconds: float
) -> tuple[http.client.HTTPConnection, dict[str, str] | None]:
    """A connection that opens when it is used; where its requests name the whole URL, as a proxy for http wants, its headers."""
    proxy = _proxy_of(parts)
    host, port = (
        (proxy.hostname or "", proxy.port or http.client.HTTP_PORT)
        if proxy
        else (parts.hostname or "", parts.port)
    )
    if parts.scheme == "https":
        secure = http.client.HTTPSConnection(
            host, port, timeout=timeout_seconds, context=ssl.create_default_context()
        )
        if proxy:
            secure.set_tunnel(parts.hostname or "", parts.port, _credentials(proxy))
        return secure, None
    return http.client.HTTPConnection(host, port, timeout=timeout_seconds), _credentials(
        proxy
    ) if proxy else None
