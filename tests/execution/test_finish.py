"""What `merge` is given that is nothing to finish."""

from __future__ import annotations

from checkpoints import run


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
