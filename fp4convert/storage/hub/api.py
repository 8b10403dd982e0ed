"""Call the Hub's API, retry, and explain failures.

http.py retries range requests with the same Retry.

huggingface_hub retries some requests itself, waits without a limit for others, and logs signed
links.  This module limits the waits and drops the logs.  No message holds an address or a token.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from fp4convert.errors import AccessError, Fp4Error, OutputError
from fp4convert.progress import duration_text
from fp4convert.storage.hub.fetchers import do_aside
from fp4convert.storage.hub.retry import LONGEST_PAUSE, Patience, Retry, pause_of, status_words

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that are worth a retry
LATE = "it did not answer in time"
NO_HUB = "its answer is not a Hub's; does a proxy answer instead?"
FAILURES: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "it refuses the connection: nothing listens there"),
    (socket.gaierror, "no such host is known here (DNS)"),
    (ssl.SSLCertVerificationError, "its certificate is not trusted here (TLS)"),
    (ssl.SSLError, "no secure connection could be made (TLS)"),
    (TimeoutError, LATE),
    (ConnectionError, "it broke the connection off"),
    (http.client.IncompleteRead, "the reply ended early"),
    (http.client.HTTPException, "it does not speak HTTP"),
    (UnicodeError, "no host can have that name (DNS)"),
    (json.JSONDecodeError, "its answer is no JSON"),
    # huggingface_hub raises these for JSON of an unexpected shape, and odd numbers in headers.
    *((kind, NO_HUB) for kind in (TypeError, AttributeError, LookupError)),
    *((kind, NO_HUB) for kind in (ArithmeticError, NameError)),
)
NAMED_FAILURES = {  # by a part of the class's name: these libraries may not be loaded
    "Timeout": LATE,
    "ProtocolError": "it broke the connection off, or does not speak HTTP",
    "TooManyRedirects": "it sends every request elsewhere, in a circle",
}
AGAIN = "Run the same command again: what is uploaded is kept."
NOT_THERE = "Make the repository on that Hub first, or look at HF_ENDPOINT."
REFUSED = "Do what it asks for; then run the same command again: what is uploaded is kept."
# Final statuses of the storage; its other refusals pass, for its links expire.
FINAL = frozenset({413, 507})
# Another commit is the head now: somebody else's, or ours, whose reply was lost.
CHANGED = 412
CALL_FACTOR = 4  # one call of huggingface_hub makes several requests
SENDING_TRIES = 2  # huggingface_hub makes six tries in each
LEAST_RATE = 16 << 10  # bytes a second of an upload
TELL_SECONDS = 60.0  # between two lines about a wait
POLL_SECONDS = 0.2
ANSWER_FACTOR = 6  # the Hub takes longer for a commit than for a piece of a file
NOISY = tuple(f"huggingface_hub.{name}" for name in ("utils._http", "hf_api", "_commit_api"))
WAITS = "Rate limited"  # its log line about a wait begins so
_WAITED = re.compile(r"Waiting ([0-9.e+]+)s")
_UNSAID = re.compile(r"\S+://\S+|hf_\w+")
_STORAGE_SAYS = re.compile(r"<Message>([^<]{1,300})</Message>")
T = TypeVar("T")


def hub_headers(token: str | None) -> dict[str, str]:
    """Return the headers of a request, with the token; None is the login's.

    huggingface_hub's own function first asks the Hub for a list of agents, without a time limit.
    """
    from huggingface_hub.utils._headers import get_token_to_send
    from huggingface_hub.utils._runtime import get_hf_hub_version

    headers = {"user-agent": f"fp4convert; hf_hub/{get_hf_hub_version()}"}
    if known := get_token_to_send(token):
        headers["authorization"] = f"Bearer {known}"
    return headers


class Asker:
    """Calls the API for one repository; safe for several threads.

    repo       ORG/NAME
    token      None is the login's
    tell       gets a line for people about waits
    may_write  the Hub has confirmed write access: later refusals have other reasons
    """

    def __init__(
        self, repo: str, token: str | None, patience: Patience, tell: Callable[[str], None]
    ) -> None:
        self.may_write = False
        self._repo = repo
        self._token = token
        self._tell = tell
        self._retry = Retry(patience, tell)
        self._asked_seconds: list[
            float
        ] = []  # pauses that huggingface_hub was asked for, and keeps

    @property
    def api(self) -> Any:
        """Return the client that calls inside `ask` use."""
        from huggingface_hub import HfApi, constants

        return HfApi(endpoint=constants.ENDPOINT, token=self._token)

    @property
    def is_stopped(self) -> bool:
        return self._retry.stopped.is_set()

    def begin(self) -> None:
        """Silence huggingface_hub for good: a request may outlive `stop`."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        for name in NOISY:
            logger = logging.getLogger(name)
            for old in [one for one in logger.filters if getattr(one, "func", None) is _drop_links]:
                logger.removeFilter(old)
            logger.addFilter(partial(_drop_links, self._tell, self._asked_seconds))

    def stop(self) -> None:
        """End all waits and refuse further calls."""
        self._retry.stopped.set()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until `stop`."""
        self._retry.stopped.wait(seconds)

    def check(self) -> None:
        """Raise OutputError once `stop` was called, or a pause is too long."""
        from huggingface_hub import constants

        if self.is_stopped:
            raise OutputError("push-stopped", f"{self._repo}: pushing was stopped", AGAIN)
        if (longest := max(self._asked_seconds, default=0.0)) > LONGEST_PAUSE:
            detail = f"{host_of(constants.ENDPOINT)} asks to wait {duration_text(longest)}"
            detail = f"{self._repo}: {detail}; expected {duration_text(LONGEST_PAUSE)} at most"
            raise OutputError("hub-unreachable", detail, f"After that time: {AGAIN.lower()}")

    def ask(self, trouble: str, call: Callable[[], T], nbytes: int = 0) -> T:
        """Return the call's result; repeat the call until the Hub answers.

        trouble  begins the message of a failure, such as "it cannot be made"
        nbytes   size of an upload, which has more time and huggingface_hub's own retries
        Raises   AccessError without access; OutputError on refusal or silence
        """
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError

        # Base class of errors in huggingface_hub's HTTP library.
        no_reply = cast(type[Exception], HfHubHTTPError.__bases__[0])
        failures, patience = 0, self._retry.patience
        seconds_at_most = ANSWER_FACTOR * patience.timeout_seconds
        tries = SENDING_TRIES if nbytes else patience.tries
        while True:
            self.check()
            _limit_waits(seconds_at_most)
            try:
                limit = CALL_FACTOR * seconds_at_most + nbytes / LEAST_RATE
                return self._wait_for(trouble, call, limit)
            except Fp4Error:
                raise
            except Exception as error:
                is_known = isinstance(error, (no_reply, OSError, RuntimeError, ValueError))
                if not is_known and not _is_of_package(error):
                    raise  # a bug of ours
                failures += 1
                reason, seconds = self._judge(trouble, error)
                host = host_of(constants.ENDPOINT)
                if nbytes and failures < tries:
                    self._tell(f"{host}: {reason}; try {failures + 1} of {tries}")
                if not self._retry.wait(failures, f"{host}: {reason}", seconds, tries):
                    detail = f"{failures} tries at {host}, the last: {reason}"
                    raise OutputError(
                        "hub-unreachable", f"{self._repo}: {trouble}: {detail}", AGAIN
                    ) from None

    def _wait_for(self, trouble: str, call: Callable[[], T], seconds: float) -> T:
        """Return the call's result; raise OutputError after so many seconds.

        huggingface_hub has no limit for dripping bytes, nor for a concurrent request that creates
        the same repository.
        """
        from huggingface_hub import constants

        future, began, reported = do_aside(call), time.monotonic(), 0.0
        before = sum(self._asked_seconds)
        while not wait([future], POLL_SECONDS).done:
            self.check()
            passed = time.monotonic() - began
            if passed > seconds + sum(self._asked_seconds) - before:
                found = f"{host_of(constants.ENDPOINT)} did not end its answer in"
                detail = f"{self._repo}: {trouble}: {found} {duration_text(seconds)}"
                raise OutputError("hub-unreachable", detail, AGAIN)
            if passed - reported > TELL_SECONDS:
                reported = passed
                since, end = duration_text(passed), duration_text(seconds)
                self._tell(f"waiting for the Hub since {since}; given up after {end}")
        return future.result()

    def _judge(self, trouble: str, error: BaseException) -> tuple[str, float | None]:
        """Return the reason of a failure and the pause that the server asks for.

        Raises  OutputError or AccessError when another try is useless
        """
        from huggingface_hub import constants

        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            error = error.__cause__  # an upload's own
        if (response := getattr(error, "response", None)) is not None:
            status, code = response.status_code, response.headers.get("X-Error-Code")
            host = host_of(str(response.url))
            is_storage = host != host_of(constants.ENDPOINT)
            # The storage's links expire: another try gets a new one.
            is_passing = status in PASSING or status == CHANGED
            if is_passing or (is_storage and status not in FINAL):
                of_storage = f" of {host}{_words_of_storage(response)}" if is_storage else ""
                seconds = pause_of(response.headers.get)
                return f"{status_words(status, seconds)}{of_storage}", seconds
            words = clean_words(getattr(error, "server_message", None) or "")
            said = f": {words}" if words else ""
            if status in (401, 403) and code == "GatedRepo":
                page = f"{constants.ENDPOINT}/{self._repo}"
                raise no_access(self._repo, page, status, code) from None
            is_refusal = status == 403 and self.may_write and code != "RepoNotFound"
            if (status in (401, 403) or code == "RepoNotFound") and not is_refusal:
                detail = f"{self._repo}: {trouble} with this token (HTTP {status}){said}"
                detail += "; expected a token with write access"
                next_step = "hf auth login, or set HF_TOKEN; or name a repository of your own."
                raise AccessError("no-write", detail, next_step) from None
            detail = f"{self._repo}: {trouble}: {host} answers HTTP {status}{said}"
            step = REFUSED if words else NOT_THERE if status == 404 else AGAIN
            raise OutputError("push-refused", detail, step) from None
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            words = clean_words(str(error))
            detail = f"{self._repo}: {trouble}: {words}"
            raise OutputError("push-refused", detail, REFUSED if words else AGAIN) from None
        if isinstance(error, OSError) and error.filename is not None:
            raise cannot_read(error) from None
        return plain_words(error), None


def _words_of_storage(response: Any) -> str:
    """Return ": " and the message in S3's XML; "" for none."""
    try:
        match = _STORAGE_SAYS.search(response.text)
    except RuntimeError:  # closed before it was read
        return ""
    return f": {clean_words(match[1])}" if match else ""


def _limit_waits(seconds: float) -> None:
    """Set a read timeout in huggingface_hub's client, which has none.

    All threads share the client; one that loses its connection takes it from the others.
    """
    from huggingface_hub import get_session

    while (client := get_session()) is None:
        pass
    client.timeout = seconds


@contextmanager
def replies_seen_by(look: Callable[[Any], None]) -> Iterator[None]:
    """Show huggingface_hub's replies to a function meanwhile."""
    from huggingface_hub import get_session

    client = get_session()
    before = client.event_hooks
    client.event_hooks = {**before, "response": [*before.get("response", ()), look]}
    try:
        yield
    finally:
        client.event_hooks = before


def _is_of_package(error: BaseException) -> bool:
    """Return whether huggingface_hub raised the error, not our code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("huggingface_hub")


def clean_words(text: str) -> str:
    """Return a server's text in one line, without addresses and tokens."""
    return " ".join(_UNSAID.sub("...", text).split())[:300]


def cannot_read(error: OSError) -> OutputError:
    """Return the error for a local file that cannot be read."""
    detail = f"{error.filename}: cannot be read: {error.strerror}"
    return OutputError("cannot-read", detail, AGAIN)


def _drop_links(tell: Callable[[str], None], asked: list[float], record: logging.LogRecord) -> bool:
    """Drop a log record, for it holds links; pass on only rate limits.

    asked  gets the seconds of those
    """
    with suppress(TypeError, ValueError):
        message = record.getMessage()
        if message.startswith(WAITS):
            asked += map(float, _WAITED.findall(message))
            tell(f"the Hub: {_UNSAID.sub('...', message)}")
    return False


def no_access(name: str, url: str, status: int, code: str | None) -> AccessError:
    """Return the error for a 401 or 403 on a repository's or a file's URL."""
    page = f"{urlsplit(url).scheme}://{host_of(url)}{urlsplit(url).path.partition('/resolve/')[0]}"
    if code == "GatedRepo":
        return AccessError(
            "gated",
            f"{name}: the repository is gated, and this token, if any, has no access to it"
            f" (HTTP {status})",
            f"Accept the licence at {page}, then: hf auth login, or set HF_TOKEN.",
        )
    return AccessError(
        "no-access",
        f"{name}: the Hub gives no access (HTTP {status}): the repository is private or not there,"
        " or the token is wrong",
        "Look for a typing error; then: hf auth login, or set HF_TOKEN.",
    )


def plain_words(error: BaseException) -> str:
    """Describe a network failure for people, by its innermost known cause."""
    cause: BaseException | None = error
    while cause is not None:
        for kind, words in FAILURES:
            if isinstance(cause, kind):
                return words
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    name, said = type(error).__name__, clean_words(str(error))
    unknown = f"{name}: {said}" if said else name
    return next((words for part, words in NAMED_FAILURES.items() if part in name), unknown)


def host_of(url: str) -> str:
    """Return host and port of an address, without its password."""
    return urlsplit(url).netloc.rpartition("@")[2]
