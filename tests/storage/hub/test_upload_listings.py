"""Mirrors that list names without sizes and hashes."""

import json

import fakehub
import pytest
from checkpoints import FIRST
from pushing import CARD, REPO, Pusher, push, refusal

from fp4convert.errors import OutputError


@pytest.fixture
def bare(monkeypatch):
    """Lists have names alone; whoever asks for paths is told, until `told_of_paths` is False."""
    answer, told_of_paths = fakehub.Hub.answer, {"is": True}

    def say_less(handler, status, body=b"", headers=None):
        if body.startswith(b'{"_id"'):
            document = json.loads(body)
            names = [{"rfilename": each["rfilename"]} for each in document["siblings"]]
            body = json.dumps({**document, "siblings": names}).encode()
        if body.startswith(b'[{"type"') and not told_of_paths["is"]:
            body = b"[]"
        return answer(handler, status, body, headers)

    monkeypatch.setattr(fakehub.Hub, "answer", say_less)
    return told_of_paths


def test_what_a_commit_holds_is_asked_for_by_path(bare, hub, made, told):
    push(made, told)
    (made.folder / "notes.txt").write_text("other words")
    made.files["notes.txt"] = fakehub.hashlib.sha256(b"other words").hexdigest()
    push(made, told)  # only that file is new
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()
    assert len(hub.repos[REPO].commits) == 3
    again = Pusher(REPO, False, None, told.append, made.files)
    again.begin()
    assert again.commit(made.folder, made.files, CARD).endswith(hub.repos[REPO].branches["main"])
    assert len(hub.repos[REPO].commits) == 3


def test_a_commit_of_which_nothing_is_said_is_not_called_incomplete(bare, hub, made, told):
    bare["is"] = False
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "push-unproven")
    assert FIRST in hub.read(REPO)
