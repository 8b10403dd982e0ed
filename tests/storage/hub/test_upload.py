"""An artifact reaches its repository in one commit, whole, or not at all; and neither the token nor
a link is ever told.
"""

import hashlib
import json

import pytest
from checkpoints import FIRST, SECOND, run, wait_until, write_llama, write_single
from fakehub import File
from pushing import (
    CARD,
    MANY,
    REPO,
    Made,
    at_hub,
    begun,
    check_secrets,
    make,
    push,
    refusal,
    requests,
)

from fp4convert.errors import AccessError, InputError, OutputError
from fp4convert.storage.checkpoint_files import RECORD, REPORT

OLD = b"x" * 2000


def stored(hub, data: bytes) -> File:
    return File(hub.keep(data), len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Made:
    """An artifact whose one shard has another name."""
    root = tmp_path_factory.mktemp("other")
    ones = ("BF16", (32, 64), b"\x80\x3f" * 2048)
    return make(write_single(root / "m", {"a.o_proj.weight": ones}), root / "q")


def test_every_byte_arrives_in_one_commit(hub, made, told):
    address = push(made, told)
    repo = hub.repos[REPO]
    assert len(repo.commits) == 2  # the first came with the repository
    assert address == f"{hub.endpoint}/{REPO}/commit/{repo.branches['main']}"
    found = hub.read(REPO)
    assert found.pop(".gitattributes")
    assert found.pop("README.md") == CARD.encode()
    assert found == made.bytes()
    assert told == []


def test_what_was_pushed_is_an_artifact_of_its_own(hub, told, tmp_path):
    own = b"---\nlicense: mit\n---\n# Theirs\n"
    made = make(write_llama(tmp_path / "m", **{"README.md": own}), tmp_path / "q")
    push(made, told)
    assert hub.read(REPO)["README.md"] == CARD.encode()
    assert (made.folder / "README.md").read_bytes() == own
    report = run("verify", REPO, "--source", tmp_path / "m", "--json").json
    assert (report["passed"], report["findings"]) == (True, [])


def test_shards_go_up_before_the_commit_is_asked_for(hub, made, told):
    pusher = begun(told)
    pusher.add(made.folder / FIRST, FIRST, made.files[FIRST])
    wait_until(lambda: made.files[FIRST] in hub.stored)
    assert len(hub.repos[REPO].commits) == 1
    pusher.stop()


def test_adding_waits_for_nothing(hub, made, told):
    pusher = begun(told)
    hub.fault("stall", method="PUT", seconds=60, times=MANY)
    for name, sha256 in made.files.items():
        pusher.add(made.folder / name, name, sha256)
    assert hub.stored == {}
    assert not any(upload.done() for upload in pusher._started.values())
    pusher.stop()


def test_no_token_goes_to_the_storage(hub, made, told):
    push(made, told)
    sent = [seen for seen in hub.seen if seen.where == "storage"]
    assert len(sent) >= 2
    assert {seen.token for seen in sent} == {None}


def test_no_file_holds_a_secret(hub, made, told, tmp_path):
    push(made, told)
    for path in (*made.folder.rglob("*"), *(tmp_path / "home").rglob("*")):
        if path.is_file():
            check_secrets(path.read_bytes().decode("latin-1"))


@pytest.mark.parametrize("is_private", [True, False])
def test_a_new_repository_is_private_where_that_is_asked_for(is_private, hub, made, told):
    push(made, told, is_private=is_private)
    assert hub.repos[REPO].is_private == is_private


def test_private_weights_do_not_go_to_a_public_repository(hub, made, told):
    hub.create(REPO)
    assert refusal(OutputError, made, told, is_private=True).code == "public-repo"
    assert not hub.stored


@pytest.mark.parametrize(
    "repo", ["q", "me/", "me/q/r", "me/a--b", "me/q.git", "/me/q", "me/q r", ""]
)
def test_what_names_no_repository(repo, hub, made, told):
    assert refusal(InputError, made, told, repo=repo).code == "repo-name"
    assert not hub.seen


@pytest.mark.parametrize("name", ["caf\udce9.txt", "a/../b", "/a", ".git/config"])
def test_names_that_the_hub_cannot_hold_are_refused_before_anything(name, hub, made, told):
    assert refusal(InputError, Made(made.folder, {name: "0" * 64}), told).code == "file-name"
    assert not hub.seen


def test_without_a_token_nothing_is_asked(hub, made, told, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert refusal(AccessError, made, told).exit_code == 4
    assert not hub.seen


def test_a_wrong_token(hub, made, told, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = refusal(AccessError, made, told)
    assert (error.exit_code, error.code) == (4, "no-write")
    assert "hf_wrong" not in error.message


def test_no_right_to_make_a_repository(hub, made, told):
    error = refusal(AccessError, made, told, repo="org/q")
    assert (error.exit_code, error.code) == (4, "no-write")
    assert "HTTP 403" in error.message


def test_no_right_to_write_to_one_that_can_be_read(hub, made, told, tmp_path):
    (tmp_path / "r").mkdir()
    hub.add("org/q", tmp_path / "r")
    assert refusal(AccessError, made, told, repo="org/q").code == "no-write"
    hub.repos["org/q"].is_gated = True
    assert refusal(AccessError, made, told, repo="org/q").code == "gated"
    assert not requests(hub, "POST", "preupload")


def test_a_right_lost_meanwhile(hub, made, told):
    hub.fault(**at_hub("POST", "/commit/", 401, times=MANY))
    assert refusal(AccessError, made, told).exit_code == 4


def test_what_the_hub_says_when_it_refuses_is_told(hub, made, told):
    """It has just said that the token may write: the reason is another one."""
    words = "Private repository storage limit reached,   see https://hub.example/?token=abc"
    headers = {"X-Error-Message": words}
    hub.fault(**at_hub("POST", "/commit/", 403, headers=headers, times=MANY))
    error = refusal(OutputError, made, told)
    assert error.code == "push-refused"
    assert "HTTP 403: Private repository storage limit reached, see ..." in error.message
    assert "token" not in f"{error.message}{error.next_step}"


def test_offline(hub, made, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(InputError, made, told).code == "offline"


def test_a_hub_that_would_carry_the_token_in_the_clear(hub, made, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.example")
    assert refusal(InputError, made, told).code == "plain-http"


def test_files_that_nobody_added_are_uploaded_by_the_commit(hub, made, told):
    reported: dict[str, int] = {}
    begun(told).commit(made.folder, made.files, CARD, reported.__setitem__)
    assert {name: hub.read(REPO)[name] for name in made.files} == made.bytes()
    expected = {**made.bytes(), "README.md": CARD.encode()}
    assert reported == {name: len(data) for name, data in expected.items()}


def test_what_an_earlier_artifact_left_leaves_with_the_commit_and_nothing_else(
    hub, made, other, told
):
    push(other, told)
    extra = {"images/a.png": b"png", "notes.md": b"ours", "extra/a.safetensors": OLD}
    for name, data in {**extra, "hf_quant_config.json": b"{}"}.items():
        hub.head(REPO)[name] = stored(hub, data)
    push(made, told)
    head = hub.head(REPO)
    assert "model.safetensors" not in head
    assert "hf_quant_config.json" not in head
    assert {".gitattributes", *extra} <= set(head)
    assert told == [
        f"{REPO}: what an earlier artifact left is removed: hf_quant_config.json, model.safetensors"
    ]
    assert len(hub.repos[REPO].commits) == 3
    push(other, told)
    assert {FIRST, SECOND, "model.safetensors.index.json"} & set(hub.head(REPO)) == set()


def test_weights_of_any_kind_and_the_report_of_an_earlier_artifact_leave_too(
    hub, made, told, tmp_path
):
    files = {"old.gguf": hashlib.sha256(OLD).hexdigest()}
    record = json.dumps({"producer": {"name": "fp4convert"}, "files": files}).encode()
    old = {RECORD: record, "old.gguf": OLD, REPORT: b"{}" * 2000, "theirs.bin": b"y" * 2000}
    for name, data in old.items():
        (tmp_path / name).write_bytes(data)
    hub.add(REPO, tmp_path)
    files = {name: sha256 for name, sha256 in made.files.items() if name != REPORT}
    begun(told).commit(made.folder, files, None)
    head = hub.head(REPO)
    assert not {"old.gguf", REPORT} & set(head)
    assert "theirs.bin" in head


def test_weights_of_any_kind_in_the_place_of_ours_are_theirs(hub, made, told, tmp_path):
    record = {"producer": {"name": "fp4convert"}, "files": {"old.gguf": "0" * 64}}
    (tmp_path / RECORD).write_text(json.dumps(record))
    (tmp_path / "old.gguf").write_bytes(OLD)
    hub.add(REPO, tmp_path)
    error = refusal(OutputError, made, told)
    assert (error.code, "old.gguf" in error.message) == ("foreign-repo", True)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", FIRST])
def test_weights_that_people_put_beside_ours_are_theirs(name, hub, made, other, told):
    """A LoRA beside an artifact of ours, or a shard in the place of one: no commit of ours takes it
    away.
    """
    push(made, told)
    mine = stored(hub, OLD)
    hub.repos[REPO].commit({**hub.head(REPO), name: mine})
    for artifact in (made, other):
        error = refusal(OutputError, artifact, told)
        assert (error.exit_code, error.code) == (5, "foreign-repo")
        assert name in error.message
        assert ("delete it there" in error.next_step) == (name == FIRST)
    assert hub.head(REPO)[name] == mine
    assert FIRST in hub.head(REPO)


@pytest.mark.parametrize("record", [None, b"{}", b"[", b'{"producer": {"name": "auto-round"}}'])
def test_weights_of_somebody_else_are_not_touched(record, hub, made, told, tmp_path):
    folder = write_llama(tmp_path / "theirs", **({} if record is None else {RECORD: record}))
    before = hub.add(REPO, folder)
    error = refusal(OutputError, made, told)
    assert (error.exit_code, error.code) == (5, "foreign-repo")
    assert FIRST in error.message
    assert hub.repos[REPO].branches["main"] == before
    assert not hub.stored


@pytest.mark.parametrize("name", ["pytorch_model.bin", "onnx/model.onnx", "model-Q4_0.gguf"])
def test_weights_in_another_form_are_not_touched(name, hub, made, told, tmp_path):
    (tmp_path / "theirs" / name).parent.mkdir(parents=True)
    (tmp_path / "theirs" / name).write_bytes(b"x" * 2000)
    hub.add(REPO, tmp_path / "theirs")
    assert refusal(OutputError, made, told).code == "foreign-repo"


@pytest.mark.parametrize(
    ("name", "data"), [("hf_quant_config.json", b"{}"), (".gitignore", b"*.safetensors\n")]
)
def test_nothing_leaves_a_repository_without_an_artifact(name, data, hub, made, told):
    """And what git would ignore comes all the same."""
    hub.create(REPO)
    hub.head(REPO)[name] = File(hub.keep(data), len(data), "0" * 40)
    push(made, told)
    assert {name, FIRST} <= set(hub.head(REPO))


def test_a_card_that_the_hub_refuses(hub, made, told):
    hub.card_errors = ['"license" must be one of [mit]; see https://hub.example/docs?Signature=x']
    error = refusal(OutputError, made, told)
    assert error.code == "push-refused"
    assert '"license" must be one of [mit]' in error.message
    assert "https" not in error.message


def test_the_servers_own_words_are_not_printed(hub, made, told, recwarn):
    push(made, told)
    assert [warning for warning in recwarn if warning.category is UserWarning] == []
