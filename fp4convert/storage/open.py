"""Open what a person names: a folder, a file, a Hub repository."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fp4convert.errors import InputError
from fp4convert.storage.source import Access, Source, stopping, subfolder_of

REPOSITORY = r"[A-Za-z0-9_-][\w.-]*/[\w.-]+"  # organisation/name


def open_source(reference: str, access: Access | None = None, may_be_empty: bool = False) -> Source:
    """The checkpoint of that name: a folder or one file on this disk, else a repository on the Hub.

    may_be_empty  accept a folder without weights: a conversion that has not got to its first shard
    Raises        InputError where it is none of them, or is not a sound checkpoint, or is a pipeline of several; SourceError
                  where the Hub cannot be reached or has nothing cached, AccessError where it gives no access
    """
    source = _open(reference, access or Access(), may_be_empty)
    if source.checkpoint.components:
        raise _pipeline(reference, source)
    return source


def open_with_components(reference: str, access: Access) -> tuple[Source, dict[str, Source]]:
    """The source of that name, and where it is a pipeline, each of its components, all of the same commit.

    Raises  what open_source raises
    """
    source = _open(reference, access)
    with stopping(source):
        names = source.checkpoint.components
        return source, {name: _open(reference, access_to(access, source, name)) for name in names}


def open_original(reference: str, access: Access) -> Source:
    """The checkpoint that an artifact was made from; of a pipeline the component `access.subfolder`, or the only one.

    Raises  what open_source raises
    """
    access, wanted = replace(access, subfolder=None), access.subfolder
    source = _open(reference, access)
    names = source.checkpoint.components
    if not names:
        return source
    if wanted not in names and len(names) > 1:
        raise _pipeline(reference, source)
    return _open(
        reference,
        access_to(access, source, next((name for name in names if name == wanted), names[0])),
    )


def access_to(access: Access, pipeline: Source, component: str) -> Access:
    """How a component of a pipeline is opened, at the commit that the pipeline was."""
    checkpoint = pipeline.checkpoint
    return replace(
        access,
        subfolder=_joined(access.subfolder, component),
        revision=checkpoint.revision or access.revision,
    )


def _joined(*folders: str | None) -> str:
    return "/".join(folder.strip("/") for folder in folders if folder)


def _pipeline(reference: str, source: Source) -> InputError:
    source.stop()
    names = source.checkpoint.components
    detail = f"{reference} is a Diffusers pipeline, whose {' and '.join(names)} is a checkpoint by itself; expected one checkpoint"
    return InputError("pipeline", detail, f"Name the folder: --subfolder {names[0]}.")


def _open(reference: str, access: Access, may_be_empty: bool = False) -> Source:
    path = Path(reference)
    try:
        is_there = path.exists()
    except OSError as error:
        detail = f"{reference[:100]}: {error.strerror}; expected a folder or a file"
        raise InputError(
            "no-source",
            detail,
            "Look for a typing error in the path; see that this user may read it.",
        ) from None
    if is_there and reference:  # the path of no words is that of the current folder
        from fp4convert.storage.local import LocalSource

        return LocalSource(path, may_be_empty, subfolder_of(access))
    if not re.fullmatch(REPOSITORY, reference):
        name = reference or "the source without a name"
        detail = f"{name}: no such file or folder; expected a checkpoint on this disk, or organisation/name on the Hub"
        raise InputError("no-source", detail)
    from fp4convert.storage.hub.source import HubSource

    return HubSource(reference, access)
