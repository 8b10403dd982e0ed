"""Pushing a finished artifact to the fake Hub, and what must never be told meanwhile."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import run
from fakehub import SIGNATURE, TOKEN
from fakehub_uploads import UploadHub

from fp4convert.errors import Fp4Error
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.hub.upload import Pusher

REPO = "me/q"
CARD = "---\nlicense: mit\n---\n\n# A model\n"
MANY = 1000


@dataclass
class Made:
    """A finished artifact, and what `quantize` knows of it."""

    folder: Path
    files: dict[str, str]

    def bytes(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in self.files}


def make(source: Path, folder: Path) -> Made:
    assert run("quantize", source, "--format", "nvfp4", "-o", folder, "-q").code == 0
    files = dict(json.loads((folder / RECORD).read_text())["files"])
    return Made(
        folder, {**files, RECORD: hashlib.sha256((folder / RECORD).read_bytes()).hexdigest()}
    )


class FastTime:
    """The time module of which nobody sleeps long."""

    sleep = staticmethod(lambda seconds: time.sleep(min(seconds, 0.01)))
    time = staticmethod(time.time)


def check_secrets(text: str) -> None:
    for secret in (TOKEN, SIGNATURE, "Signature", "Expires="):
        assert secret not in text


def push(made: Made, told: list[str], repo: str = REPO, is_private: bool = False) -> str:
    pusher = Pusher(repo, is_private, None, told.append, made.files)
    pusher.begin()
    for name, sha256 in made.files.items():
        if name.endswith(".safetensors"):
            pusher.add(made.folder / name, name, sha256)
    return pusher.commit(made.folder, made.files, CARD)


def refusal(error: type[Fp4Error], made: Made, told: list[str], **options: object) -> Fp4Error:
    """The error of a push that fails; nothing in its whole traceback is a secret."""
    with pytest.raises(error) as caught:
        push(made, told, **options)
    check_secrets(
        "".join(traceback.format_exception(caught.value)) + json.dumps(caught.value.as_json())
    )
    return caught.value


def begun(told: list[str], names: Iterable[str] = ()) -> Pusher:
    pusher = Pusher(REPO, False, None, told.append, names)
    pusher.begin()
    return pusher


def at_hub(method: str, match: str, status: int = 503, **more: object) -> dict[str, object]:
    """A fault of the Hub's own interface, for `hub.fault`."""
    place = {"where": "hub", "method": method, "match": match}
    return {"kind": "status", "status": status, **place, **more}


def requests(hub: UploadHub, method: str, part: str) -> int:
    return sum(seen.method == method and part in seen.path for seen in hub.seen)
