"""Write single files that a person asks for, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fp4convert.errors import InputError, OutputError
from fp4convert.storage.disk import replace_files, temp_beside, write_errors_at


class Paper(NamedTuple):
    """A kind of such files.

    option   that asks for it
    example  of a name
    opening  that every one of them begins with
    inside   its name in the artifact's folder; "" for a kind that may not lie there
    """

    option: str
    example: str
    opening: str
    inside: str = ""


def check_apart(asked: Mapping[Paper, Path | None], folder: Path | None) -> None:
    """Refuse files in the artifact's folder, or two of a name: InputError.

    asked   the files of one run; None for a file that is not asked for
    folder  of the artifact, even before it exists; None without one
    """
    taken: dict[Path, Paper] = {}
    for kind, path in asked.items():
        if path is None:
            continue
        place = _without_links(path)
        if folder is not None and place.is_relative_to(root := _without_links(folder)):
            own = folder / kind.inside if kind.inside else None
            if own is None or place != root / kind.inside:
                expected = "a file outside it, because verify checks the folder against its record"
                expected += f", or {own}, which may lie in it" if own else ""
                detail = f"{kind.option} {path} lies in the artifact's folder, {folder}"
                step = f"Give {kind.option} {own or kind.example}."
                raise InputError("file-in-artifact", f"{detail}; expected {expected}", step)
        if place in taken:
            detail = f"{taken[place].option} and {kind.option} are both {path}; expected two files"
            next_step = f"Give them two names: {kind.option} {kind.example}."
            raise InputError("file-twice", detail, next_step)
        taken[place] = kind


def _without_links(path: Path) -> Path:
    """Resolve the links of a path; return one that no file can have as it is.

    Whoever opens such a path refuses it.
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path


def check_place(path: Path, kind: Paper) -> None:
    """Raise OutputError if no such file can be written, before the work.

    Only an earlier file of its kind is replaced.
    """
    folder, detail = path.parent, ""
    if path.is_dir():
        detail = "it is a folder"
    elif not folder.is_dir():
        detail = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK):
        detail = f"{folder} cannot be written to"
    if detail:
        message = f"{kind.option} {path}: {detail}; expected the name of a new file"
        raise OutputError("cannot-write", message, f"Give {kind.example}.")

    if os.path.lexists(path):
        opening = kind.opening.encode()
        is_earlier = path.is_file()
        if is_earlier:
            with write_errors_at(path), path.open("rb") as stream:
                is_earlier = stream.read(len(opening)) == opening
        if not is_earlier:
            detail = (
                f"{kind.option} {path} is there already, and no earlier run wrote it; "
                "it is not overwritten"
            )
            next_step = f"Choose another: {kind.option} {kind.example}."
            raise OutputError("output-exists", detail, next_step)
    temp = temp_beside(Path(os.path.realpath(path)))
    with write_errors_at(path):
        temp.touch()
        temp.unlink()


def write_paper(path: Path, text: str, kind: Paper) -> None:
    """Write a file in UTF-8, in place of an earlier one of its kind.

    A link stays, and its target is replaced.
    Raises  OutputError if it cannot be written, or another file is there
    """
    write_papers((path, text, kind))


def write_papers(*papers: tuple[Path, str, Paper]) -> None:
    """Write files that belong together, as write_paper does.

    None takes its name before all are on the disk.
    Raises  errors of write_paper
    """
    for path, _, kind in papers:
        check_place(path, kind)
    replace_files({Path(os.path.realpath(path)): text.encode() for path, text, _ in papers})
