"""Ask the Hub through huggingface_hub, with retries.

huggingface_hub retries some requests itself, waits forever for others, and prints signed links while it does; here it is kept
from all but the first.  No message holds an address or what looks like a token.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from fp4convert.errors import AccessError, Fp4Error, OutputError
from fp4convert.storage.hub.http import PASSING, Patience, host_of, no_access, pause_of

AGAIN = "Run the same command again: what is uploaded stays."
CHANGED = 412  # the head is not the parent that a commit names: somebody else's, or our own whose reply was lost
ANSWER_FACTOR = 6  # a commit of many files takes the Hub longer than a piece of a file
NOISY = (
    "huggingface_hub.utils._http",
    "huggingface_hub.hf_api",
    "huggingface_hub._commit_api",
)  # the first logs links
WAITS = "Rate limited"  # how it begins to say that it waits
_UNSAID = re.compile(r"\S+://\S+|hf_\w+")
T = TypeVar("T")


class Asker:
    """Asks about one repository; threads may do so at once.

    repo   ORG/NAME
    token  the one that is logged in where it is None
    tell   gets a line for people when something has to wait
    """

    def __init__(
        self, repo: str, token: str | None, patience: Patience, tell: Callable[[str], None]
    ) -> None:
        self._repo = repo
        self._token = token
        self._patience = patience
        self._tell = tell
        self._stopped = threading.Event()

    @property
    def api(self) -> Any:
        """huggingface_hub's own interface, to be called by what `ask` is given."""
        from huggingface_hub import HfApi, constants

        return HfApi(endpoint=constants.ENDPOINT, token=self._token)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def begin(self) -> None:
        """Keep huggingface_hub from printing, for good: a request under way outlives `stop`."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        for name in NOISY:
            logger = logging.getLogger(name)
            for old in [one for one in logger.filters if isinstance(one, _LinkFilter)]:
                logger.removeFilter(old)
            logger.addFilter(_LinkFilter(self._tell))

    def stop(self) -> None:
        """Make every question to come, and every wait between two tries, end at once."""
        self._stopped.set()

    def check(self) -> None:
        """OutputError once `stop` was called."""
        if self._stopped.is_set():
            raise OutputError("push-stopped", f"{self._repo}: pushing was stopped", AGAIN)

    def ask(self, trouble: str, call: Callable[[], T]) -> T:
        """What the call returns, made again until the Hub answers.

        trouble  what a message says where it does not, such as "it cannot be made"
        Raises   AccessError where the Hub gives no access; OutputError where it refuses, or does not answer
        """
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import HfHubHTTPError

        no_reply = cast(
            type[Exception], HfHubHTTPError.__bases__[0]
        )  # of the HTTP library that huggingface_hub is built on
        for failures in range(1, self._patience.tries + 1):
            self.check()
            get_session().timeout = (
                ANSWER_FACTOR * self._patience.timeout_seconds
            )  # it would wait forever
            try:
                return call()
            except (no_reply, OSError, RuntimeError, ValueError) as error:
                reason, seconds = self._judge(trouble, error)
            if failures < self._patience.tries:
                self._pause(failures, seconds)
        detail = f"{self._repo}: {trouble}: {self._patience.tries} tries at {host_of(constants.ENDPOINT)}, the last: {reason}"
        raise OutputError("hub-unreachable", detail, AGAIN)

    def _pause(self, failures: int, asked_seconds: float | None) -> None:
        seconds = max(self._patience.wait_seconds(failures), asked_seconds or 0.0)
        if asked_seconds is not None:
            self._tell(f"rate limited by the Hub: waiting {seconds:.0f} s")
        self._stopped.wait(seconds)

    def _judge(self, trouble: str, error: BaseException) -> tuple[str, float | None]:
        """Why a call failed, and the seconds that the server asks to wait; raises where another try is no use."""
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            error = error.__cause__  # an upload's own
        if (response := getattr(error, "response", None)) is not None:
            self._judge_status(trouble, response)
            return f"HTTP {response.status_code}", pause_of(response.headers.get)
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            words = " ".join(_UNSAID.sub("...", str(error)).split())[:300]
            raise OutputError("push-refused", f"{self._repo}: {trouble}: {words}", AGAIN) from None
        if isinstance(error, OSError) and error.filename is not None:
            raise OutputError(
                "cannot-read", f"{error.filename}: cannot be read: {error.strerror}", AGAIN
            ) from None
        return type(error).__name__, None

    def _judge_status(self, trouble: str, response: Any) -> None:
        from huggingface_hub import constants

        status, code = response.status_code, response.headers.get("X-Error-Code")
        if (
            status in PASSING
            or status == CHANGED
            or host_of(str(response.url)) != host_of(constants.ENDPOINT)
        ):
            return  # the storage's links expire: another try gets a new one
        if status in (401, 403) or code == "RepoNotFound":
            raise self._no_access(trouble, status, code) from None
        detail = f"{self._repo}: {trouble}: {host_of(constants.ENDPOINT)} answers HTTP {status}"
        raise OutputError("push-refused", detail, AGAIN) from None

    def _no_access(self, trouble: str, status: int, code: str | None) -> Fp4Error:
        from huggingface_hub import constants

        if code == "GatedRepo":
            return no_access(self._repo, f"{constants.ENDPOINT}/{self._repo}", status, code)
        detail = f"{self._repo}: {trouble} with this token (HTTP {status}); expected one that may write there"
        return AccessError(
            "no-write", detail, "hf auth login, or set HF_TOKEN; or name a repository of your own."
        )


class _LinkFilter(logging.Filter):
    """Drops what is logged, for it holds links; that the Hub makes everything wait is passed on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def filter(self, record: logging.LogRecord) -> bool:
        with suppress(TypeError, ValueError):
            message = record.getMessage()
            if message.startswith(WAITS):
                self._tell(f"the Hub: {_UNSAID.sub('...', message)}")
        return False
