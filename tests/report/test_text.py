"""Findings in few lines: by their codes, whatever sentences say."""

from __future__ import annotations

from fp4convert.report.text import MOST_ALIKE, fold_findings

SENTENCES = ["it has 1 byte", "it is gone", "nobody can read it", "its hash differs", "2e-3 is off"]


def found(code: str, count: int) -> list[dict[str, object]]:
    return [
        {"level": "error", "code": code, "tensor": None, "detail": f"file {word}: {sentence}"}
        for word, sentence in zip("abcde", SENTENCES[:count], strict=False)
    ]


def test_many_of_one_code_share_a_line_though_their_sentences_differ():
    assert len(SENTENCES) == MOST_ALIKE + 1
    few, (folded,) = (fold_findings(found("hash-mismatch", count)) for count in (MOST_ALIKE, 5))
    assert [line["detail"] for line in few] == [
        one["detail"] for one in found("hash-mismatch", MOST_ALIKE)
    ]
    assert (folded["lead"], folded["detail"]) == ("5 of them, such as ", "file a: it has 1 byte")
    assert folded["is_folded"]


def test_codes_and_levels_stand_alone():
    mixed = [*found("hash-mismatch", 4), *found("no-hashes", 4)]
    mixed += [{**one, "level": "warning"} for one in found("no-hashes", 4)]
    lines = fold_findings(mixed)
    assert [(line["level"], line["code"]) for line in lines] == [
        *[("error", "hash-mismatch")] * 4,
        *[("error", "no-hashes")] * 4,
        *[("warning", "no-hashes")] * 4,
    ]
