"""docs/errors.md explains every error that the program can raise, and no other, with its exit codes."""

import re

from checkpoints import hidden_characters, run
from error_codes import raised
from paths import ROOT

ROW = re.compile(r"^\| `([a-z0-9-]+)` \| ([0-9, ]+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def explained() -> dict[str, set[int]]:
    """code -> exit codes, of every row; a code has one row."""
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    assert len({row[0] for row in rows}) == len(rows)
    return {code: set(map(int, exits.split(", "))) for code, exits, *_ in rows}


def test_the_page_lists_exactly_what_is_raised():
    assert explained() == raised()


def test_the_search_sees_codes_however_they_are_told():
    """By a constant, a condition, a parameter, a name of another module, a condition in a name, and a format's word."""
    codes = raised()
    for code in (
        "no-weights",
        "offline",
        "lfs-pointer",
        "source-corrupt",
        "overlap",
        "hole",
        "fp16-overflow",
        "cannot-write",
    ):
        assert code in codes
    assert codes["source-unreadable"] == {3}


def test_every_error_is_explained():
    rows = {
        row[0]: row
        for row in ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    }
    for code in explained():
        document = run("explain", code, "--json").json
        assert document["code"] == code
        assert document["error"] == {
            "exits": [int(one) for one in rows[code][1].split(", ")],
            "meaning": rows[code][2],
            "origin": rows[code][3],
            "remedy": rows[code][4],
        }


def test_a_code_of_both_kinds_is_explained_as_both():
    told = run("explain", "scale-layout").out
    assert told.count("scale-layout: ") == 2
    for words in ("a finding (error)", "an error (exit code 2)", "what to do"):
        assert words in told
    assert run("explain", "kept-differs", "--json").json["error"] is None
    assert run("explain", "SQNR-LOW", "--json").json == run("explain", "sqnr-low", "--json").json


def test_the_list_has_every_code():
    document = run("explain", "--json").json
    assert {one["code"] for one in document["errors"]} == set(explained())
    assert len(document["findings"]) > 50
    told = run("explain").out
    assert all(f"  {one['code']} " in told for one in (*document["findings"], *document["errors"]))


def test_what_is_no_code_is_refused_with_what_is_like_it():
    refused = run("explain", "scale-layuot\x1b[31m", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "unknown-code")
    assert "scale-layout" in refused.json["error"]["message"]
    assert not hidden_characters(refused.err)
