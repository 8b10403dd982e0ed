"""`push`: a finished folder becomes one commit with its card; after a missed gate none is made."""

import json

import pytest
from checkpoints import run, write_llama
from pushing import FastTime, check_secrets
from signing_keys import write_pair

RECORD, FIGURES = "quantization_config.json", "q.evaluation.json"
EVALUATED = {
    "tokens": 4096,
    "windows": 8,
    "kl": {"mean": 0.06, "se": 0.002, "p999": 1.5, "max": 3.0, "windows": [0.06, 0.06]},
    "top1": 0.9,
    "flips": {"share": 0.01, "of": 900, "threshold": 0.5},
    "ppl": {"source": 10.0, "artifact": 10.5},
    "grade": "as usual",
    "usual": {
        "kl": 0.05,
        "top1": 0.92,
        "format": "nvfp4",
        "method": "rtn",
        "activations": 16,
        "parameters": 8e9,
        "source": "measured",
    },
    "activations": 16,
    "kv_cache": None,
    "text_sha256": "0" * 64,
    "by_layer": [],
    "baseline": None,
    "findings": [],
    "passed": None,
}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)


@pytest.fixture
def artifact(tmp_path):
    card = b"---\nlicense: mit\n---\n# Theirs\n"
    source = write_llama(tmp_path / "m", **{"README.md": card})
    made = run("quantize", source, "--format", "nvfp4", "-o", tmp_path / "q", "--json")
    assert made.code == 0
    return tmp_path / "q", made.json["digest"]


def push(*words: object):
    outcome = run("push", *words, "--json")
    check_secrets(outcome.out + outcome.err)
    return outcome


def test_a_folder_becomes_one_commit(hub, artifact):
    folder, digest = artifact
    (folder / "notes.txt").write_text("mine")
    outcome = run("push", folder, "me/q")
    assert (outcome.code, len(hub.repos["me/q"].commits)) == (0, 2)
    assert "no gate was set" in outcome.out
    assert "not pushed: notes.txt" in outcome.err
    there = hub.read("me/q")
    card = there.pop("README.md").decode()
    del there[".gitattributes"]
    left = {"README.md", "notes.txt"}
    here = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert there == {name: data for name, data in here.items() if name not in left}
    for line in (
        "license: mit",
        "# Theirs",
        digest,
        "fp4convert verify me/q --source",
        "## Errors",
    ):
        assert line in card
    assert run("inspect", "me/q").code == 0
    again = run("push", folder, "me/q")
    assert (again.code, len(hub.repos["me/q"].commits)) == (0, 2)
    assert "every file is there already" in again.err


def test_gates_hold_before_anything_is_sent(hub, artifact):
    folder, digest = artifact
    place = folder.with_name(FIGURES)
    missing = push(folder, "me/q", "--max-kl", 0.1).json["error"]
    assert (missing["code"], missing["next"].split(" > ")[1]) == ("no-evaluation", str(place))
    place.write_text(json.dumps(EVALUATED | {"digest": "f" * 64}))
    assert push(folder, "me/q").json["error"]["code"] == "bad-evaluation"
    place.write_text(json.dumps(EVALUATED | {"digest": digest, "usual": {"kl": 1.0}}))
    assert push(folder, "me/q").json["error"]["code"] == "bad-evaluation"
    place.write_text(json.dumps({"error": {"code": "no-text"}}))  # evaluate failed in a script
    assert "evaluate that failed" in push(folder, "me/q").json["error"]["message"]
    place.write_text(json.dumps(EVALUATED | {"digest": digest}))
    for gate in (
        ("--max-kl", 0.05),
        ("--min-top1", 0.95),
        ("--min-sqnr", 60),
        ("--max-nmse", 1e-9),
    ):
        outcome = push(folder, "me/q", *gate)
        assert (outcome.code, outcome.json["error"]["code"]) == (6, "gate-missed"), gate
    assert push(folder, "me/q", "--max-kl", "usal").json["error"]["code"] == "bad-gate"
    assert hub.repos == {}
    met = ("--max-kl", "usual", "--min-top1", 0.8, "--min-sqnr", 10)
    outcome = push(folder, "me/q", *met)
    assert (outcome.code, outcome.json["evaluated"]) == (0, "as usual")
    assert outcome.json["gates"] == ["--min-sqnr", "--max-kl", "--min-top1"]
    assert "0.06 nats a token" in hub.read("me/q")["README.md"].decode()


def test_a_flipped_bit_is_not_pushed(hub, artifact):
    folder, _ = artifact
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    outcome = push(folder, "me/q")
    assert (outcome.code, outcome.json["error"]["code"]) == (6, "not-sound")
    assert hub.repos == {}


def test_what_is_signed_is_pushed_as_it_is(hub, artifact, tmp_path):
    folder, _ = artifact
    private, _ = write_pair(tmp_path, "key")
    assert run("attest", folder, "--key", private).code == 0
    assert push(folder, "me/q").code == 0
    there = hub.read("me/q")
    assert there["README.md"] == (folder / "README.md").read_bytes()
    assert there["model.sig"] == (folder / "model.sig").read_bytes()


def test_a_page_in_the_folder_is_pushed_with_the_card(hub, artifact):
    folder, digest = artifact
    assert run("verify", folder, "--report", folder / "report.html").code == 0
    told = push(folder, "me/q")
    assert (told.code, told.json["digest"], "not pushed" in told.err) == (0, digest, False)
    there = hub.read("me/q")
    assert there["report.html"] == (folder / "report.html").read_bytes()
    assert "README.md" in there
    checked = run("verify", "me/q", "--json").json
    assert (checked["findings"], checked["passed"]) == ([], True)


def test_only_folders_of_fp4convert(hub, tmp_path):
    source = write_llama(tmp_path / "m")
    assert push(source, "me/q").code == 2
    assert push(tmp_path / "nothing", "me/q").json["error"]["code"] == "not-pushable"
    assert hub.repos == {}
