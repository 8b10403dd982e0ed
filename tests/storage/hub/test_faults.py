"""What a network does to a long download: either the bytes are right, or the command says what is
wrong.
"""

import json
import re
import subprocess
import sys

import pytest
from checkpoints import (
    FIRST,
    SECOND,
    WAIT_SECONDS,
    start,
    wait_until,
    weight,
    write_llama,
    write_single,
    write_zeros,
)
from fakehub import SIGNATURE, TOKEN
from hub_cases import NVFP4, ask, expect
from pushing import MANY, at_hub

from fp4convert.storage.hub.api import no_access
from fp4convert.storage.open import open_source

SOON = 30.0  # seconds that a busy machine may take
DROP = {"kind": "drop", "at": 700}


@pytest.fixture
def folder(tmp_path, hub):
    folder = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000})
    hub.add("org/m", folder)
    return folder


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "faults",
    [
        [{**DROP, "times": 25}],
        [{**DROP, "times": 4, "is_reset": True}],
        [{"kind": "stall", "at": 700, "times": 2}],
        [{"kind": "status", "status": 503, "times": 5}],
        [{"kind": "status", "status": 500}, at_hub("HEAD", "resolve", 504)],
        [at_hub("GET", "api/models", 502, times=3)],
        [{"kind": "status", "status": 403, "times": 2}],
        [{"kind": "status", "status": 404}],
        [{"kind": "status", "status": 400}],
        [{"kind": "ignore-range", "times": 2}],
        [{"kind": "gzip"}],
        [{"kind": "status", "status": 429, "headers": {"Retry-After": "1"}}],
        [at_hub("GET", "api/models", 429, headers={"RateLimit": '"api";r=0;t=1'})],
        [
            {**DROP, "times": 3},
            {"kind": "status", "status": 403},
            {"kind": "ignore-range"},
            {"kind": "status"},
        ],
    ],
    ids=lambda faults: "+".join(f"{fault['kind']}{fault.get('status', '')}" for fault in faults),
)
def test_what_passes_changes_no_byte(faults, hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    made = [hub.fault(**fault) for fault in faults]
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b")
    assert outcome.code == 0
    told = re.compile(
        r"quantize: .+|rate limited by the Hub: waiting 1 s|.+; try [3-6] of 6 in [\d.]+ s"
    )
    assert all(told.fullmatch(line) for line in outcome.err.splitlines()), outcome.err
    assert outcome.json["digest"] == expected
    assert [fault.times for fault in made] == [0] * len(made)


def test_a_reply_that_broke_off_goes_on_where_it_broke(hub, folder, tmp_path):
    hub.fault(**DROP, match="bytes=0-")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").code == 0
    assert any((seen.range or "").startswith(f"bytes={DROP['at']}-") for seen in hub.seen)


def test_links_that_expire_are_resolved_again(hub, folder, tmp_path):
    hub.link_uses = 1
    expected = expect(hub, folder, tmp_path / "a")
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "b").json["digest"] == expected
    assert len(hub.signed) > 4


UNREACHABLE, CHANGED = "source-unreachable", "source-changed"
ENDLESS = [
    ({"kind": "status", "status": 503}, "HTTP 503"),
    ({"kind": "status", "status": 403}, "HTTP 403"),
    ({"kind": "ignore-range"}, "HTTP 200 where 206"),
    ({"kind": "gzip"}, "compressed"),
    ({"kind": "drop", "at": 0}, "ended early"),
    (at_hub("GET", "api/models"), "503"),
]
ONCE = [
    ({"kind": "etag", "after": 2}, CHANGED, "ETag"),
    ({"kind": "status", "status": 416, "after": 2}, CHANGED, "no such range"),
    (at_hub("HEAD", SECOND, kind="commit"), CHANGED, "commit ffff"),
    (at_hub("HEAD", SECOND, kind="size"), CHANGED, "bytes and now has"),
    (at_hub("HEAD", SECOND, kind="oid"), CHANGED, "another hash"),
    (at_hub("HEAD", SECOND, 404), CHANGED, "any more"),
    (at_hub("HEAD", SECOND, 501), UNREACHABLE, "HTTP 501"),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [*(({**fault, "times": MANY}, UNREACHABLE, word) for fault, word in ENDLESS), *ONCE],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_what_does_not_pass_is_exit_3(fault, code, word, hub, folder, tmp_path):
    hub.fault(**fault)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, code)
    assert word in outcome.json["error"]["message"]
    assert not (tmp_path / "q" / "quantization_config.json").exists()


def test_a_flipped_bit_is_found_and_the_shard_is_fetched_once_more(hub, folder, tmp_path):
    expected = expect(hub, folder, tmp_path / "a")
    # The header came before, and what the first shard measures.
    fault = hub.fault("flip", match=SECOND, at=50_000, after=4)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--workers", 1)
    assert outcome.json["digest"] == expected
    assert fault.times == 0


def test_what_only_came_as_nan_is_not_told_as_such(hub, tmp_path):
    below_inf = ("BF16", (1, 16), b"\x80\x7e" * 16)  # by one bit
    folder = write_single(tmp_path / "nan", {"a.o_proj.weight": below_inf})
    hub.add("org/nan", folder)
    size = (folder / "model.safetensors").stat().st_size
    fault = hub.fault("flip", where="hub", match="model.safetensors", at=size - 1, after=2)
    assert ask("quantize", "org/nan", *NVFP4, "-o", tmp_path / "q").code == 0
    assert fault.times == 0


def test_a_shard_that_comes_damaged_twice_is_not_written_and_another_run_completes(
    hub, folder, tmp_path
):
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("flip", match=SECOND, at=50_000, after=2, times=MANY)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (3, "source-corrupt")
    assert SECOND in outcome.json["error"]["message"]
    assert (tmp_path / "q" / FIRST).exists()
    assert not (tmp_path / "q" / SECOND).exists()
    hub.faults.clear()
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected


def test_a_run_that_was_broken_off_goes_on_with_its_commit_though_the_branch_moved(
    hub, folder, tmp_path
):
    expected = expect(hub, folder, tmp_path / "a")
    hub.fault("status", match=SECOND, after=2, times=MANY)
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 3
    hub.faults.clear()
    commit = hub.repos["org/m"].branches["main"]
    hub.add("org/m", write_single(tmp_path / "other", {"a.o_proj.weight": weight()}))
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").json["digest"] == expected
    plan = json.loads((tmp_path / "q" / ".fp4convert" / "plan.json").read_text())
    assert plan["source"] == {"repo": "org/m", "revision": commit}
    finished = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert finished.json["digest"] == expected
    moved = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--revision", "main")
    assert (moved.code, moved.json["error"]["code"]) == (5, "other-plan")


def test_tries_are_counted_only_without_progress(hub, folder):
    hub.fault("drop", at=100, times=40)
    source = open_source("org/m")
    for ref in source.checkpoint.tensors:
        source.read(ref)
    assert len([seen for seen in hub.seen if seen.where == "storage"]) > 40


@pytest.mark.parametrize(
    "case",
    [
        ("org/gated", (), "", (4, "gated", "Accept the licence at")),
        ("org/private", (), "", (4, "no-access", "HF_TOKEN")),
        ("org/absent", (), "", (4, "no-access", "HF_TOKEN")),
        ("org/absent", (), TOKEN, (2, "no-source", None)),
        ("org/m", (), "hf_wrong", (4, "no-access", "HF_TOKEN")),
        ("org/m", ("--token", "hf_wrong"), TOKEN, (4, "no-access", "HF_TOKEN")),
        ("org/m", ("--revision", "v9"), TOKEN, (2, "no-revision", "--revision")),
        ("org/m", ("--subfolder", "nowhere"), TOKEN, (2, "no-subfolder", None)),
    ],
)
def test_no_access_says_what_to_do(case, hub, folder, monkeypatch):
    repo, arguments, token, expected = case
    hub.add("org/gated", folder, is_gated=True)
    hub.add("org/private", folder, is_private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    outcome = ask("quantize", repo, *NVFP4, *arguments)
    error = outcome.json["error"]
    assert (outcome.code, error["code"]) == expected[:2]
    assert (expected[2] or "") in (error["next"] or "")
    assert "hf_wrong" not in outcome.out + outcome.err
    assert len(hub.seen) < 8  # nobody tries again


@pytest.mark.parametrize(
    ("fault", "code"),
    [("", "no-source"), ("token", "no-access"), ("http", "source-unreachable")],
)
def test_what_is_not_here_and_not_there_may_be_a_mistyped_path(
    fault, code, hub, tmp_path, monkeypatch
):
    """The first part of the name is a folder; a repository is asked for all the same."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "" if fault == "token" else TOKEN)
    if fault == "http":
        hub.fault("status", where="hub", status=418, times=99)
    for name, is_told in (("out/absent", True), ("org/absent", False)):
        error = ask("verify", name, "--json").json["error"]
        assert error["code"] == code
        assert ("out is here, and out/absent is not" in error["message"]) == is_told
        assert error["next"].startswith("Look for a typing error, where a path is") == is_told


@pytest.mark.parametrize("token", ["hf_ключ", "hf_a\nb", "hf_\x7f"])
def test_a_token_that_no_request_can_carry_is_refused_without_showing_it(token, hub, folder):
    outcome = ask("quantize", "org/m", *NVFP4, "--token", token)
    assert (outcome.code, outcome.json["error"]["code"]) == (4, "bad-token")
    assert token not in outcome.out + outcome.err
    assert hub.seen == []


def test_no_message_holds_the_password_of_an_address(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://user:SECRET@hub.example")
    outcome = ask("quantize", "org/m", *NVFP4)
    assert "http://hub.example" in outcome.json["error"]["message"]
    assert "SECRET" not in outcome.out + outcome.err
    error = no_access(
        "m",
        "https://user:SECRET@hub.example:8/org/m/resolve/main/f?Signature=SECRET",
        403,
        "GatedRepo",
    )
    assert "https://hub.example:8/org/m," in (error.next_step or "")
    assert "SECRET" not in f"{error} {error.next_step}"


def test_a_token_given_reads_what_is_gated(hub, folder, tmp_path, monkeypatch):
    hub.add("org/gated", folder, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", "")
    assert ask("quantize", "org/gated", *NVFP4, "-o", tmp_path / "q", "--token", TOKEN).code == 0


def test_a_token_never_goes_over_plain_http(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    outcome = ask("quantize", "org/m", *NVFP4)
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "plain-http")
    assert hub.seen == []


def test_an_interrupted_download_ends_soon_and_names_no_token(hub, tmp_path):
    hub.add("org/zeros", write_zeros(tmp_path / "z", count=1))
    hub.nbytes_per_second = 1e5  # which takes more than a minute
    with start(
        "quantize", "org/zeros", "--format", "mxfp4", "-o", tmp_path / "q", "--token", TOKEN
    ) as process:
        wait_until(lambda: len(hub.seen) > 5, process)
        process.terminate()
        out, err = process.communicate(timeout=SOON)
    assert process.returncode == 143
    assert "interrupted" in err
    assert TOKEN not in out + err
    assert SIGNATURE not in out + err


def test_help_and_local_runs_load_no_client_of_the_hub(folder, tmp_path):
    code = (
        "import sys; from fp4convert.__main__ import main\ntry: main()\nexcept SystemExit: "
        "print(sorted(sys.modules))"
    )
    for arguments in (("--help",), ("quantize", folder, "--format", "nvfp4", "--dry-run")):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        loaded = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
        ).stdout
        assert "huggingface_hub" not in loaded
        assert "http.client" not in loaded
        assert "urllib3" not in loaded
