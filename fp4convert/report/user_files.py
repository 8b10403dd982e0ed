"""Write single files that a person asks for, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4convert.errors import InputError, OutputError
from fp4convert.storage.disk import told


@dataclass(frozen=True, slots=True)
class Paper:
    """A kind of such files.

    option   that asks for it
    example  of a name
    opening  that every one of them begins with
    """

    option: str
    example: str
    opening: str


def check_apart(asked: Mapping[Paper, Path | None], folder: Path | None) -> None:
    """Nothing; InputError for a file in the artifact's own folder, or for two in one place.

    asked   the files of one run; None where one is not asked for
    folder  of the artifact, there or not yet; None where it has none to itself
    """
    taken: dict[Path, Paper] = {}
    for kind, path in asked.items():
        if path is None:
            continue
        place = _real(path)
        if folder is not None and place.is_relative_to(_real(folder)):
            detail = f"{kind.option} {path} lies in the artifact's folder, {folder}; expected a file outside it"
            raise InputError(
                "file-in-artifact",
                f"{detail}, for verify holds the folder to its record",
                f"Give {kind.example}.",
            )
        if place in taken:
            detail = f"{taken[place].option} and {kind.option} are both {path}; expected two files"
            raise InputError(
                "file-twice", detail, f"Give them two names: {kind.option} {kind.example}."
            )
        taken[place] = kind


def _real(path: Path) -> Path:
    """The path without links; one that no file can have as it is, which whoever opens it will tell."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path


def check_place(path: Path, kind: Paper) -> None:
    """Nothing; OutputError where no such file can be written, which should be known before the work.

    What is there is replaced where it is an earlier one of its kind, and nothing else is.
    """
    folder = path.parent
    detail = (
        "it is a folder" if path.is_dir() else "" if folder.is_dir() else f"{folder} is no folder"
    )
    detail = detail or ("" if os.access(folder, os.W_OK) else f"{folder} cannot be written to")
    if detail:
        message = f"{kind.option} {path}: {detail}; expected the name of a new file"
        raise OutputError("cannot-write", message, f"Give {kind.example}.")
    if os.path.lexists(path) and not _is_earlier(path, kind):
        detail = f"{kind.option} {path} is there already, and is none that an earlier run wrote; nothing else is written over"
        raise OutputError("output-exists", detail, f"Choose another: {kind.option} {kind.example}.")
    temp = _beside(path)
    with told(path):
        temp.touch()
        temp.unlink()


def _is_earlier(path: Path, kind: Paper) -> bool:
    if not path.is_file():
        return False
    opening = kind.opening.encode()
    with told(path), path.open("rb") as stream:
        return stream.read(len(opening)) == opening


def _beside(path: Path) -> Path:
    """Where it is written before it takes its name; a link is not replaced, but what it leads to."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def write_paper(path: Path, text: str, kind: Paper) -> None:
    """Write the file in UTF-8, in place of an earlier one; OutputError where it cannot be written, or something else is there."""
    check_place(path, kind)
    temp = _beside(path)
    with told(path):
        try:
            temp.write_text(text, encoding="utf-8")
            os.replace(temp, path.resolve())
        finally:
            temp.unlink(missing_ok=True)
