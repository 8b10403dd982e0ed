"""Carry out a command: call its function, show what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.cli.screen import Screen
    from fp4convert.report.text import Document

FINDINGS = 6  # the exit code where something is wrong with what was looked at


def carry_out(
    words: dict[str, Any],
    do: Callable[..., Any],
    draw: Callable[[Screen, Document], None],
    hears: tuple[str, ...] = ("phases", "tell", "warn"),
    verdict: str = "",
) -> None:
    """Do what a function of commands/ does, and show that; warnings in its document are shown last.

    words    every option of the command by its name, which is the word that the function has for it
    do       returns a document, or what has one as_json
    hears    which words for who is told `do` takes
    verdict  the key of the document that is False where the command ends with FINDINGS
    """
    from fp4convert.cli.screen import Screen

    screen = Screen(words.pop("json"), words.pop("quiet", False))
    with screen.phases() as phases:
        ears = {"phases": phases, "tell": screen.tell, "warn": screen.warn}
        made = do(**words, **{word: ears[word] for word in hears})
        document: Document = made if isinstance(made, dict) else made.as_json()
    screen.show(document, draw)
    screen.warn(document.get("warnings", ()))
    if verdict and not document[verdict]:
        raise typer.Exit(FINDINGS)
