"""Judge an output folder before it is written to; change nothing.

It may be a file, foreign, of another plan, behind a link, or on a disk without room.  A dry run and
the run itself ask.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from fp4convert.errors import OutputError
from fp4convert.execution.plan_file import (
    DONE,
    STATE,
    Done,
    Manifest,
    TaskFiles,
    read_manifest,
    refuse_foreign,
    refuse_linked_folders,
    refuse_links,
)
from fp4convert.execution.settings import Settings
from fp4convert.storage.checkpoint_files import PLAN_FILE
from fp4convert.storage.disk import nbytes_there, write_errors_at
from fp4convert.storage.json_text import MISSHAPEN, read_text_file
from fp4convert.storage.system import check_writable, free_nbytes


def check_output(root: Path, manifest: Manifest, settings: Settings, more_nbytes: int) -> None:
    """Refuse a folder as open_output does, and change nothing.

    Other processes at work there are ignored: they may be gone when the work begins.

    manifest     files to write; without an identity where the folder held no plan a moment ago: a
                 plan that has come since is not compared
    more_nbytes  as in open_output
    """
    refuse_taken(root, settings)
    freed = 0
    with write_errors_at(root):
        if (root / PLAN_FILE).exists():
            refuse_all_links(root, manifest)
            old = read_manifest(root)
            if old is not None and manifest.identity and old.plan_id != manifest.plan_id:
                freed = freed_nbytes(root, find_forgotten(root, old, manifest, settings), manifest)
        place = _nearest(root)
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        check_writable(place)
        check_space(root, manifest, settings, more_nbytes - freed)


def refuse_taken(root: Path, settings: Settings) -> None:
    """Raise OutputError for a file and for a foreign folder."""
    with write_errors_at(root):
        is_there, is_ours = root.exists(), (root / PLAN_FILE).exists()
        if is_there and not root.is_dir():
            detail = f"{root} is a file; expected a folder to write to"
            raise OutputError("foreign-output", detail, "Choose another: -o FOLDER.")
        if is_there and not is_ours:
            refuse_foreign(root, settings.is_forced)


def refuse_all_links(root: Path, manifest: Manifest) -> None:
    """Raise OutputError where a folder of the output is a link."""
    refuse_links(root, "claims", "tmp", DONE)
    refuse_linked_folders(root, manifest.files)


def free_beside(root: Path) -> int:
    """Count the free bytes of an output's disk."""
    with write_errors_at(root):
        return free_nbytes(_nearest(root))


def _nearest(root: Path) -> Path:
    """Return the output, or the nearest folder above it that exists."""
    return next(place for place in (root, *root.absolute().parents) if os.path.lexists(place))


def find_forgotten(root: Path, old: Manifest, manifest: Manifest, settings: Settings) -> list[str]:
    """List files of another plan that are removed for this one.

    Raises  OutputError where it may not take the folder
    """
    discard = "" if settings.is_joining else ", or discard its files with --force"
    next_step = f"Choose another folder with -o{discard}."
    traits = manifest.traits
    changed = [words for words in traits if old.traits.get(words) != traits[words]]
    differs = f"{' and '.join(changed) or 'its files'} changed"
    if old.identity != manifest.identity and (settings.is_joining or not settings.is_forced):
        detail = f"{root} holds another plan: {_describe_difference(old, manifest)}"
        raise OutputError("other-plan", detail, next_step)
    if settings.is_joining:
        detail = f"{root} holds another plan: {differs}"
        detail += "; a worker that joins never replaces one"
        next_step = "Give every worker the same source and options."
        raise OutputError("other-plan", detail, next_step)
    if (root / old.last).exists() and not settings.is_forced:
        detail = f"{root} holds a finished result, and since then {differs}"
        raise OutputError("other-plan", detail, next_step)
    forgotten = old.files if settings.is_forced else set(old.files) - set(manifest.files)
    refuse_linked_folders(root, forgotten)
    return sorted(forgotten)


def find_forgotten_parts(root: Path, old: Manifest, manifest: Manifest) -> dict[str, Manifest]:
    """Return plans of an earlier result's components, removed with it.

    Raises  OutputError where such a folder is a link, or its plan damaged
    """
    found = {}
    for part in sorted({*old.parts} - {*manifest.parts}):
        refuse_linked_folders(root, [f"{part}/{STATE}/{DONE}/any"])
        if (root / part / PLAN_FILE).exists() and (plan := read_manifest(root / part)):
            refuse_linked_folders(root, (f"{part}/{file}" for file in plan.files))
            found[part] = plan
    return found


def freed_nbytes(root: Path, forgotten: Iterable[str], manifest: Manifest) -> int:
    """Count the bytes of an earlier plan's files that no file replaces."""
    return sum(nbytes_there(root / file) or 0 for file in {*forgotten} - {*manifest.files})


def _describe_difference(old: Manifest, new: Manifest) -> str:
    """Describe the differences of two plans in source, format and dialect."""
    differs = [
        f"its {key} is {old.identity.get(key) or 'none'}, not {value or 'none'}"
        for key, value in new.identity.items()
        if key != "source" and old.identity.get(key) != value
    ]
    # The hash of a pipeline's source covers what its components become.
    return " and ".join(differs) or "another source"


def missing_nbytes(root: Path, manifest: Manifest) -> int:
    """Count the bytes of a plan that are still to be written."""
    written = [root / file for file in manifest.files]
    for folder, _, files in os.walk(root / STATE / "tmp"):
        written += [Path(folder, file) for file in files]
    return manifest.nbytes - sum(nbytes_there(path) or 0 for path in written)


def needed_nbytes(root: Path, manifest: Manifest, settings: Settings) -> int:
    """Count the bytes that a plan will still take of the disk at once.

    At most shards_at_once of the shards that may leave are there together, with those that are
    there already. A shard that has left needs no room; the Hub is asked later whether it still has
    it, and where it is made again the disk may turn out to be full.
    """
    missing = missing_nbytes(root, manifest)
    if settings.elsewhere is None:
        return missing
    shards = [(task.nbytes, _has_left(root, task)) for task in manifest.tasks if task.may_leave]
    gone = sum(nbytes for nbytes, has_left in shards if has_left)
    here = sorted(nbytes for nbytes, has_left in shards if not has_left)
    return max(0, missing - gone - sum(here[: -settings.shards_at_once]))


def _has_left(root: Path, task: TaskFiles) -> bool:
    """Return whether a task's files have left the folder, by its record."""
    try:
        done = Done.from_json(read_text_file(root / STATE / DONE / f"{task.key}.json"))
    except (OSError, *MISSHAPEN):
        return False
    return done.is_gone and done.files.keys() == task.files.keys()


def check_space(root: Path, manifest: Manifest, settings: Settings, more_nbytes: int) -> None:
    """Raise OutputError where the disk has too little room."""
    needed = needed_nbytes(root, manifest, settings) + more_nbytes
    free = free_beside(root)
    if needed > free:
        detail = f"{root} needs {needed:,} bytes, its disk has {free:,} free"
        next_step = "Free some space, or choose another disk: -o FOLDER."
        raise OutputError("disk-full", detail, next_step)
