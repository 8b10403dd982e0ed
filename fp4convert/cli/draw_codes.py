"""Draw what explain tells of codes."""

from __future__ import annotations

from textwrap import wrap

from fp4convert.cli.screen import WIDEST, Screen
from fp4convert.report.text import Document, explain_all

CODE_KINDS = {
    "findings": "findings of inspect and verify",
    "errors": "errors, with the exit code of the command",
}


def draw_explained(screen: Screen, explained: Document) -> None:
    """Draw what explain tells: of one code, of a subject's codes, or of all."""
    if "code" in explained:
        draw_code(screen, explained)
    elif explained == explain_all():
        draw_subjects(screen, explained)
    else:
        draw_codes(screen, explained)


def draw_subjects(screen: Screen, known: Document) -> None:
    """Draw the subjects of codes, a few codes of each, and how to see all."""
    headings = {one["subject"] for kind in CODE_KINDS for one in known[kind]}
    width = max(map(len, headings))
    for kind, title in CODE_KINDS.items():
        screen.line(title, "bold")
        for subject in dict.fromkeys(one["subject"] for one in known[kind]):
            codes = [one["code"] for one in known[kind] if one["subject"] == subject]
            begun = f"  {subject:{width}}  {len(codes):>2}: "
            room = min(screen.width, WIDEST) - len(begun) - len(", ...")
            told = wrap(", ".join(codes), room, break_on_hyphens=False)
            more = ", ..." if len(told) > 1 else ""
            screen.line(f"{begun}{told[0].removesuffix(',')}{more}")
    screen.line("")
    screen.line("All codes of a subject: fp4convert explain hub. One code: explain sqnr-low.")


def draw_codes(screen: Screen, known: Document) -> None:
    """Draw every code in a line, under its subject."""
    listed = [*known["findings"], *known["errors"]]
    width = max(len(one["code"]) for one in listed)
    for kind, title in CODE_KINDS.items():
        for subject in dict.fromkeys(one["subject"] for one in known[kind]):
            screen.line(f"{subject}: {title}", "bold")
            for one in known[kind]:
                if one["subject"] == subject:
                    exits = "".join(f"{code} " for code in one.get("exits", ()))
                    screen.line(f"  {one['code']:{width}}  {exits}{one['meaning']}")


def draw_code(screen: Screen, explained: Document) -> None:
    """Draw what one code means, where it comes from, and what to do."""
    code, finding, failure = explained["code"], explained["finding"], explained["error"]
    if finding:
        screen.line(f"{code}: a finding ({', '.join(finding['levels'])})", "bold")
        for key, name in (("means", "meaning"), ("seen", "seen"), ("what to do", "remedy")):
            screen.line(f"  {key:<12}{finding[name]}", hang=14)
    if failure:
        exits = ", ".join(map(str, failure["exits"]))
        screen.line(f"{code}: an error (exit code {exits})", "bold")
        for key, name in (("means", "meaning"), ("comes from", "origin"), ("what to do", "remedy")):
            screen.line(f"  {key:<12}{failure[name]}", hang=14)
