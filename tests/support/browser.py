"""Headless Chromium, driven by its own protocol through two pipes: no network, no driver, no
package.

Source of the methods: the Chrome DevTools Protocol, domains Page, Runtime, Log, Network, Emulation
and Input.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COMMAND = "chromium"  # Debian's
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
SECONDS = 60  # that anything may take on a busy machine


class Tab:
    """One page.

    said      errors and warnings of the console, and exceptions
    asked     addresses that were asked for
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self._write, self._read = to_browser, from_browser
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one method; RuntimeError where it is an error."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser went away")
            self._waiting += part
        text, _, self._waiting = self._waiting.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.said.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.said.append(
                    " ".join(
                        str(part.get("value", part.get("description"))) for part in told["args"]
                    )
                )
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.said.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(told["request"]["url"])

    def open(self, file: Path, width: int = 1280, height: int = 900) -> float:
        """Open a page from the disk and wait until it says that it is drawn;
        the seconds that took.
        """
        self.size(width, height)
        started = time.monotonic()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait("document.body && document.body.dataset.state === 'drawn'")
        return time.monotonic() - started

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def scheme(self, name: str, medium: str = "") -> None:
        """Light or dark; `medium` print shows the page as it is printed."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to; RuntimeError where it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"]["exception"].get("description", expression)
            )
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The text of every element of a selector."""
        return list(self.value(texts_of(selector)))

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{expression} is not so after {SECONDS} s; the console said {self.said}"
                )
            time.sleep(0.02)

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into sight."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / "
            f"2])({found}.getBoundingClientRect())"
        )
        return float(box[0]), float(box[1])

    def mouse(self, x: float, y: float, is_click: bool = False) -> None:
        """The mouse moves there, and may click."""
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if is_click else ())):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def click(self, selector: str) -> None:
        self.mouse(*self.centre(selector), is_click=True)

    def type(self, selector: str, text: str) -> None:
        """Text in place of what the field holds, as if it was typed."""
        self.click(selector)
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def picture(self, file: Path, height: int | None = None) -> Path:
        """A screenshot of the page: of all of it, or so many pixels of its top."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": height or size["height"],
            "scale": 1,
        }
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        file.write_bytes(base64.b64decode(shot["data"]))
        return file

    def printed(self, file: Path) -> Path:
        """The page as a PDF on A4."""
        made = self.call(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True
        )
        file.write_bytes(base64.b64decode(made["data"]))
        return file


def texts_of(selector: str) -> str:
    """The expression for the texts of all elements of a selector."""
    return f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"


@contextmanager
def browser() -> Iterator[Tab]:
    """An empty page of a browser with a profile of its own."""
    if not (command := shutil.which(COMMAND)):
        raise FileNotFoundError(f"{COMMAND} is missing: make system installs it")
    to_browser, from_browser = os.pipe(), os.pipe()
    with TemporaryDirectory() as profile:
        shell = (
            f"exec {command} {' '.join(FLAGS)} --user-data-dir={profile} 3<&{to_browser[0]} "
            f"4>&{from_browser[1]}"
        )
        ends = (to_browser[0], from_browser[1])
        running = subprocess.Popen(
            ["bash", "-c", shell],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in ends:
            os.close(end)
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            running.wait(SECONDS)
