"""How a folder is ended, and what `merge` says where there is none."""

from __future__ import annotations

import threading

from checkpoints import run, write_llama

from fp4convert.execution import leases
from fp4convert.execution.finish import ENDING
from fp4convert.execution.leases import Leases


def test_merge_says_what_it_finds_instead_of_a_begun_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name, found in (
        ("nope", "nope: no such folder"),
        ("file", "file: a file"),
        ("folder", "folder holds no plan of fp4convert"),
    ):
        outcome = run("merge", tmp_path / name, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-plan")
        assert outcome.json["error"]["message"].startswith(f"{tmp_path / found}")


def test_a_card_that_was_edited_is_no_damage(tmp_path):
    """It is people's; that of the source was copied there.  Other copies are written again."""
    source = write_llama(tmp_path / "m", **{"README.md": b"# Theirs", "notes.txt": b"notes"})
    made, out = ("quantize", source, "--format", "nvfp4", "--json", "-o", tmp_path / "q"), []
    out.append(run(*made).json["digest"])
    card, notes = tmp_path / "q" / "README.md", tmp_path / "q" / "notes.txt"
    card.write_text("# Mine, and longer")
    out.append(run("merge", tmp_path / "q", "--json").json["digest"])
    notes.write_text("other")
    refused = run("merge", tmp_path / "q", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (5, "damaged")
    out.append(run(*made).json["digest"])
    assert len(set(out)) == 1
    assert notes.read_bytes() == b"notes"


def test_merge_names_the_format_that_the_record_has(tmp_path):
    """Of two formats it is "mixed", whatever was asked for first."""
    source, out = write_llama(tmp_path / "m"), tmp_path / "q"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[format]]\nmodules = ["*o_proj"]\nformat = "fp8"\n')
    words = ("quantize", source, "--format", "nvfp4", "--recipe", recipe, "--json", "-o", out)
    for index in range(2):
        part = run(*words, "--shard-index", index, "--num-shards", 2)
        assert part.code == 0, part.out
    assert part.json["format"] == "mixed"
    assert run("merge", out, "--json").json["format"] == "mixed"


def test_merge_says_for_whom_it_waits(tmp_path, monkeypatch):
    out = tmp_path / "q"
    made = ("quantize", write_llama(tmp_path / "m"), "--format", "nvfp4", "-o", out, "-q")
    assert run(*made).code == 0
    monkeypatch.setattr(leases, "LONGEST_SECONDS", 0.2)
    with Leases(out / ".fp4convert" / "claims") as other:
        assert other.take(ENDING)
        threading.Timer(1.5, other.drop, (ENDING,)).start()
        merged = run("merge", out)
    assert merged.code == 0
    assert "waiting for another process, which checks what is written" in merged.err
