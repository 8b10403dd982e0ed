"""docs/findings.md explains every finding that the program can give, and no other."""

import ast
import re

from paths import ROOT

from fp4convert.report.explanations import explanations

ROW = re.compile(r"\| `([a-z-]+)` \| ([a-z, ]+) \| (.+?) \| (.+?) \| (.+?) \|")


def given() -> dict[str, set[str]]:
    """code -> levels, of every Finding and Doubt in the source; a code must be written where it is given."""
    codes: dict[str, set[str]] = {}
    for file in sorted((ROOT / "fp4convert").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Finding", "Doubt")
            ):
                level, code = node.args[:2]
                if ast.unparse(node) == "Finding(doubt.level, doubt.code, None, doubt.detail)":
                    continue
                assert isinstance(code, ast.Constant), (
                    f"{file.name}, line {node.lineno}: the code is not written out"
                )
                words = {each.value for each in ast.walk(level) if isinstance(each, ast.Constant)}
                is_named = isinstance(level, ast.Name) and level.id == "level"
                codes.setdefault(code.value, set()).update(
                    {"error", "warning"} if is_named else words
                )
    return codes


def explained() -> dict[str, tuple[set[str], str]]:
    """code -> levels, and who sees it, of every row; a code has one row."""
    rows = ROW.findall((ROOT / "docs" / "findings.md").read_text(encoding="utf-8"))
    assert len({row[0] for row in rows}) == len(rows)
    return {code: (set(levels.split(", ")), seen) for code, levels, _, seen, _ in rows}


def test_the_page_lists_exactly_what_is_given():
    assert {code: levels for code, (levels, _) in explained().items()} == given()


def test_programs_read_the_page_as_people_do():
    rows = ROW.findall((ROOT / "docs" / "findings.md").read_text(encoding="utf-8"))
    assert {
        code: (", ".join(one.levels), one.meaning, one.seen, one.remedy)
        for code, one in explanations().items()
    } == {code: tuple(words) for code, *words in rows}


def test_every_code_says_who_sees_it():
    assert all(
        re.search(r"\b(alone|with a source|verify)\b", seen) for _, seen in explained().values()
    )
