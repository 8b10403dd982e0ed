"""`quantize --push-to-hub`: what the folder holds is in the repository, in one commit, whoever did
the work.
"""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import FIRST, run, start, write_llama, write_zeros
from fakehub import TOKEN, File
from pushing import FastTime, check_secrets
from signing_keys import write_pair

from fp4convert.conversion.one_checkpoint import Conversion

NVFP4 = ("--format", "nvfp4", "--json")
PUSH = ("--push-to-hub", "me/q")
OF_TWO = ("--num-shards", 2)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", FastTime)


@pytest.fixture
def source(tmp_path):
    return write_llama(
        tmp_path / "m",
        **{"tokenizer.json": b"{}" * 2000, "README.md": b"---\nlicense: mit\n---\n# Theirs\n"},
    )


def push(*arguments: object):
    outcome = run("quantize", *arguments)
    check_secrets(outcome.out + outcome.err)
    return outcome


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_repository_holds_what_the_folder_holds(hub, source, tmp_path):
    outcome = push(source, *NVFP4, "-o", tmp_path / "q", *PUSH)
    repo = hub.repos["me/q"]
    assert (outcome.code, len(repo.commits)) == (0, 2)  # the first came with the repository
    assert outcome.json["pushed"] == f"{hub.endpoint}/me/q/commit/{repo.branches['main']}"
    found = hub.read("me/q")
    card = found.pop("README.md").decode()
    assert found.pop(".gitattributes")
    here = files_of(tmp_path / "q")
    assert here.pop("README.md").startswith(b"---\nlicense: mit")
    assert found == here
    assert f"| digest | {outcome.json['digest']} |" in card
    assert "license: mit" in card
    assert "# Theirs" in card
    command = re.search(r"^fp4convert quantize .*$", card, re.MULTILINE)[0]
    words = "--format nvfp4 --dialect compressed-tensors --activations 16 --method rtn"
    assert command == f"fp4convert quantize ./m {words}"
    assert run("inspect", "me/q").code == 0


def test_again_it_changes_nothing(hub, source, tmp_path):
    first = push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).json
    sent = hub.sent_nbytes()
    assert push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).json["pushed"] == first["pushed"]
    assert len(hub.repos["me/q"].commits) == 2
    assert hub.sent_nbytes() - sent < 20_000


@pytest.mark.parametrize("is_of_source", [False, True])
def test_what_evaluate_wrote_into_the_card_goes_along(is_of_source, hub, source, tmp_path):
    """But not that of a source which is an evaluated artifact itself."""
    section = "<!-- made: fp4convert evaluate -->\nKL 1\n<!-- end: fp4convert evaluate -->"
    if is_of_source:
        (source / "README.md").write_text(f"# Theirs\n\n{section}\n")
    push(source, *NVFP4, "-o", tmp_path / "q", *PUSH)
    if not is_of_source:
        with (tmp_path / "q" / "README.md").open("a") as card:
            card.write(section)
        assert push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).code == 0
    before, _, below = hub.read("me/q")["README.md"].decode().partition("## The model card of the")
    assert (section in before, section in below) == (not is_of_source, is_of_source)


def test_a_person_reads_where_it_is(hub, source, tmp_path):
    outcome = push(source, "--format", "nvfp4", "-o", tmp_path / "q", *PUSH, "--private")
    assert f"pushed: {hub.endpoint}/me/q/commit/" in outcome.out
    assert hub.repos["me/q"].is_private


def test_without_the_right_to_write_nothing_is_converted(hub, source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    outcome = run("quantize", source, *NVFP4, "-o", tmp_path / "q", *PUSH)
    assert (outcome.code, outcome.json["error"]["exit"]) == (4, 4)
    assert "hf_of_somebody_else" not in outcome.out + outcome.err
    assert not (tmp_path / "q").exists()
    assert hub.repos == {}


@pytest.mark.parametrize("gate", [("--min-sqnr", 60), ("--max-nmse", 1e-6)])
def test_a_missed_gate_commits_nothing_and_loses_nothing(gate, hub, source, tmp_path):
    """What is uploaded stays; without the gate the same command sends no shard again."""
    out = ("-o", tmp_path / "q")
    outcome = push(source, *NVFP4, *out, *PUSH, *gate)
    assert (outcome.code, outcome.json["error"]["code"]) == (6, "gate-missed")
    assert outcome.json["error"]["message"].endswith(f"expected {gate[0]} {gate[1]:g}")
    assert len(hub.repos["me/q"].commits) == 1  # of the empty repository
    assert run("inspect", tmp_path / "q").code == 0
    sent = hub.sent_nbytes()
    assert push(source, *NVFP4, *out, *PUSH, gate[0], 1).code == 0
    assert len(hub.repos["me/q"].commits) == 2
    assert hub.sent_nbytes() - sent < 40_000


def test_gates_without_the_hub(source, tmp_path):
    out = ("-o", tmp_path / "q")
    gated = push(source, *NVFP4, *out, "--min-sqnr", 1, "--max-nmse", 0.5)
    assert (gated.code, "every tensor meets --min-sqnr 1 and --max-nmse 0.5" in gated.err) == (0, 1)
    assert gated.json["next"][0].endswith("--min-sqnr 1 --max-nmse 0.5")
    worst = json.loads((tmp_path / "q" / "quantization_report.json").read_text())["summary"]
    for limit, code in ((worst["sqnr_db_min"] - 1e-3, 0), (worst["sqnr_db_min"] + 1e-3, 6)):
        assert push(source, *NVFP4, *out, "--min-sqnr", limit).code == code
        assert push(source, *NVFP4, *out, "--max-nmse", 10 ** (-limit / 10)).code == code
    assert push(source, *NVFP4, *out, "--min-sqnr", "nan").json["error"]["code"] == "bad-gate"
    share = ("--shard-index", 0, *OF_TWO)
    assert push(source, *NVFP4, *out, "--min-sqnr", 1, *share).json["error"]["code"] == "share"


def test_a_card_that_people_wrote_is_replaced_with_a_word(hub, source, tmp_path):
    """It stays in the repository's history, at the commit that is told."""
    push(source, *NVFP4, "-o", tmp_path / "q", *PUSH)
    (tmp_path / "mine").write_bytes(b"my words")
    mine = File(tmp_path / "mine", 8, "0" * 40)
    edited = hub.repos["me/q"].commit({**hub.head("me/q"), "README.md": mine})
    outcome = push(source, "--format", "nvfp4", "-o", tmp_path / "q", *PUSH)
    told = f"me/q: other contents are replaced, as commit {edited[:8]} has them: README.md"
    assert told in " ".join(outcome.err.split())
    assert b"my words" not in hub.read("me/q")["README.md"]


@pytest.mark.parametrize("lost", ["ended.json", "model.safetensors.index.json"])
def test_what_cannot_be_read_any_more_is_never_left_out_of_a_commit(
    lost, hub, source, tmp_path, monkeypatch
):
    """A list that cannot be read is no empty one: a repository with the card alone was exit 0."""
    out = tmp_path / "q"
    place = out / ".fp4convert" / lost if lost == "ended.json" else out / lost
    real = Conversion.carry_out

    def carry_out(work, settings):
        result = real(work, settings)
        place.unlink()
        return result

    monkeypatch.setattr(Conversion, "carry_out", carry_out)
    outcome = push(source, *NVFP4, "-o", out, *PUSH)
    assert (outcome.code, outcome.json["error"]["exit"]) == (5, 5)
    assert outcome.json["error"]["code"] in ("cannot-read", "file-gone")
    assert len(hub.repos["me/q"].commits) == 1
    monkeypatch.setattr(Conversion, "carry_out", real)
    assert push(source, *NVFP4, "-o", out, *PUSH).code == 0
    assert set(files_of(out)) <= set(hub.read("me/q"))


def test_a_disk_that_fails_before_the_commit(hub, source, tmp_path, monkeypatch):
    out, real = tmp_path / "q", Path.stat

    def stat(path, **options):
        if path == out / "config.json" and (out / "quantization_config.json").exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    outcome = push(source, *NVFP4, "-o", out, *PUSH)
    assert (outcome.code, outcome.json["error"]["code"]) == (5, "cannot-read")
    monkeypatch.setattr(Path, "stat", real)
    assert push(source, *NVFP4, "-o", out, *PUSH).code == 0


def test_a_folder_that_is_refused_makes_no_repository(hub, source, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "thesis.txt").write_bytes(b"x")
    assert (
        push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).json["error"]["code"] == "foreign-output"
    )
    assert hub.repos == {}


@pytest.mark.parametrize(
    "options",
    [
        ("--private",),
        (*PUSH, "--device", "cuda:9"),
        (*PUSH, "--dialect", "nvfp5"),
        (*PUSH, "--shard-index", 0, *OF_TWO),
    ],
)
def test_bad_input_makes_no_folder_and_no_repository(options, hub, source, tmp_path):
    assert push(source, *NVFP4, "-o", tmp_path / "q", *options).code == 2
    assert not (tmp_path / "q").exists()
    assert hub.repos == {}


@pytest.mark.parametrize("measured", [(), ("--target-bits", "6")])
def test_without_a_token_nothing_is_written(measured, hub, source, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    outcome = push(source, *NVFP4, "-o", tmp_path / "q", *PUSH, *measured)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "no-token")
    assert not (tmp_path / "q").exists()


def test_a_push_that_failed_is_continued_though_the_source_has_moved(hub, source, tmp_path):
    commit = hub.add("org/m", source)
    hub.fault("status", where="hub", match="/commit/", method="POST", status=413, times=1000)
    assert push("org/m", *NVFP4, "-o", tmp_path / "q", *PUSH).code == 5
    hub.faults.clear()
    (source / "notes.txt").write_bytes(b"moved")
    hub.add("org/m", source)
    assert push("org/m", *NVFP4, "-o", tmp_path / "q", *PUSH).code == 0
    assert json.loads(hub.read("me/q")["quantization_config.json"])["source"]["revision"] == commit


def test_parts_that_were_merged_are_pushed_by_the_same_command(hub, source, tmp_path):
    for index in range(2):
        run("quantize", source, *NVFP4, "-o", tmp_path / "q", "--shard-index", index, *OF_TWO)
    merged = run("merge", tmp_path / "q", "--json").json
    pushed = push(source, *NVFP4, "-o", tmp_path / "q", *PUSH, "--num-shards", 1).json
    assert pushed["digest"] == merged["digest"]
    assert set(files_of(tmp_path / "q")) <= set(hub.read("me/q"))


def test_workers_that_join_push_together(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    source, out = write_zeros(tmp_path / "source", count=6, rows=1024), tmp_path / "q"
    processes = [
        start("quantize", source, *NVFP4, "-q", "-o", out, "--join", *PUSH) for _ in range(2)
    ]
    results = []
    for process in processes:
        text, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        check_secrets(text + err)
        results.append(json.loads(text))
    assert results[0]["digest"] == results[1]["digest"]
    assert len(hub.repos["me/q"].commits) == 2
    assert set(files_of(out)) <= set(hub.read("me/q"))


def test_what_the_hub_refuses_leaves_the_artifact_here(hub, source, tmp_path):
    hub.fault("status", where="hub", match="/commit/", method="POST", status=413, times=1000)
    outcome = push(source, *NVFP4, "-o", tmp_path / "q", *PUSH)
    assert (outcome.code, outcome.json["error"]["exit"]) == (5, 5)
    assert run("inspect", tmp_path / "q").code == 0
    hub.faults.clear()
    assert push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).code == 0
    assert hub.read("me/q")[FIRST] == (tmp_path / "q" / FIRST).read_bytes()


def test_an_artifact_from_the_hub_names_where_it_came_from(hub, source, tmp_path):
    commit = hub.add("org/m", source)
    push("org/m", *NVFP4, "-o", tmp_path / "q", *PUSH, "--token", TOKEN)
    card = hub.read("me/q")["README.md"].decode()
    assert "base_model: org/m" in card
    assert f"--revision {commit}" in card


@pytest.mark.parametrize("repo", ["nonsense", "me/q/r", "me/..", "https://huggingface.co/me/q"])
def test_a_name_that_cannot_be_is_refused_before_anything_is_written(repo, hub, source, tmp_path):
    outcome = push(source, *NVFP4, "-o", tmp_path / "q", "--push-to-hub", repo)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "repo-name")
    assert not (tmp_path / "q").exists()
    assert hub.repos == {}


def test_a_refused_push_replaces_nothing(hub, source, tmp_path):
    out = tmp_path / "q"
    push(source, *NVFP4, "-o", out)
    before = files_of(out)
    words = ("--format", "mxfp4", "--json", "--force", "-o", out, "--push-to-hub", "other/q")
    outcome = push(source, *words)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "no-write")
    assert files_of(out) == before


def test_the_progress_of_an_upload_ends_at_all_of_it(hub, source, tmp_path, monkeypatch):
    monkeypatch.setattr("fp4convert.progress.LINE_SECONDS", 0.0)
    told = [
        line
        for line in push(source, *NVFP4, "-o", tmp_path / "q", *PUSH).err.splitlines()
        if line.startswith("upload: ")
    ]
    assert "(100 %)" in told[-2]


def test_a_signature_goes_along_with_exactly_the_files_that_it_signs(hub, source, tmp_path):
    """And what is downloaded again is accepted by model-signing's own command line; a later push
    without a signature takes the stale one away.
    """
    out, (key, public) = tmp_path / "q", write_pair(tmp_path, "key")
    assert push(source, *NVFP4, "-o", out).code == 0
    (out / "README.md").write_text("# Edited, then signed\n")
    assert run("attest", out, "--key", key).code == 0
    assert push(source, *NVFP4, "-o", out, *PUSH).code == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in hub.read("me/q").items():
        (copy / name).write_bytes(data)
    assert (copy / "README.md").read_text() == "# Edited, then signed\n"
    words = [sys.executable, "-m", "model_signing", "verify", "key", copy, "--public_key", public]
    ended = subprocess.run([*words, "--signature", copy / "model.sig"], check=False)
    assert ended.returncode == 0
    outcome = run("verify", "me/q", "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (0, "not checked")
    outcome = run("verify", "me/q", "--public-key", public, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "signature-hub")
    assert outcome.json["error"]["next"] == "Download it first: hf download me/q --local-dir q"
    # The card is edited again: what is signed is not what would be pushed.
    commits = len(hub.repos["me/q"].commits)
    (out / "README.md").write_text("# Edited again\n")
    refused = push(source, *NVFP4, "-o", out, *PUSH)
    assert (refused.code, refused.json["error"]["code"]) == (2, "signature-stale")
    assert "'README.md'" in refused.json["error"]["message"]
    assert len(hub.repos["me/q"].commits) == commits
    (out / "model.sig").unlink()
    assert push(source, *NVFP4, "-o", out, *PUSH).code == 0
    assert "model.sig" not in hub.read("me/q")
