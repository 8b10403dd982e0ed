"""Take a folder over: refuse it, or remove the files of another plan."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4convert.errors import OutputError
from fp4convert.execution.folder import OutputFolder, entered
from fp4convert.execution.leases import Leases
from fp4convert.execution.output_check import (
    check_output,
    check_space,
    find_forgotten,
    find_forgotten_parts,
    freed_nbytes,
)
from fp4convert.execution.plan_file import HUB, PLAN, STATE, Manifest, read_manifest, refuse_links
from fp4convert.execution.settings import Settings
from fp4convert.storage.checkpoint_files import ATTESTED, PLAN_FILE, REPORT, SIGNATURE
from fp4convert.storage.disk import fsync_parents, write_errors_at

PLANNING = "plan"  # the lease of whoever writes plan.json


@contextmanager
def open_output(
    root: Path, manifest: Manifest, settings: Settings, more_nbytes: int
) -> Iterator[OutputFolder]:
    """Create or enter the output folder, and begin the plan in it.

    more_nbytes  written to the same disk beside the plan's files
    Raises  OutputError where it is foreign, holds another plan, cannot be written, or where the
            disk has too little room for the unfinished shards
    """
    with write_errors_at(root):
        if not (root / PLAN_FILE).exists():
            check_output(root, manifest, settings, more_nbytes)
    with entered(root, manifest, settings.tell) as folder:
        folder.on_named, folder.elsewhere = settings.on_named, settings.elsewhere
        begin_plan(folder, settings, more_nbytes)
        yield folder


@contextmanager
def reopened(root: Path, manifest: Manifest, tell: Callable[[str], None]) -> Iterator[OutputFolder]:
    """Enter a folder that still holds its plan.

    A process that would begin another plan from then on sees this process, and refuses.

    tell    gets a line where another process is waited for
    Raises  OutputError where another plan has replaced it since the manifest was read
    """
    with entered(root, manifest, tell) as folder:
        with _planning(folder):
            found = read_manifest(root)
        if found is None or found.plan_id != manifest.plan_id:
            detail = f"another plan was begun in {root} while this one was read"
            raise OutputError("other-plan", detail, "Run the same command again.")
        yield folder


@contextmanager
def _planning(folder: OutputFolder) -> Iterator[None]:
    """Keep a folder from being begun for another plan."""
    # A process that slept in here must not wake and replace another's plan.
    lease = folder.leases.hold_when_free(PLANNING, "begins here", is_fencing=True)
    with write_errors_at(folder.root), lease:
        # This makes a network file system ask its server, whose answer "no plan" may be cached.
        os.utime(folder.state)
        yield


def refuse_busy(root: Path, plan_id: str, tell: Callable[[str], None]) -> None:
    """Raise OutputError where a process works in a folder for another plan.

    Only leases of dead processes change.

    tell  gets a line while it is not known whether a process lives
    """
    if (root / PLAN_FILE).exists():
        refuse_links(root, "claims")
        with Leases(root / STATE / "claims", work=plan_id, tell=tell) as leases:
            _refuse_other_work(root, leases)


def begin_plan(folder: OutputFolder, settings: Settings, more_nbytes: int = 0) -> None:
    """Write the plan of an entered folder, or refuse.

    more_nbytes  as in open_output
    """
    root, manifest = folder.root, folder.manifest
    with _planning(folder):
        old = read_manifest(root)
        is_new = old is None or old.plan_id != manifest.plan_id
        forgotten: list[str] = []
        parts: dict[str, Manifest] = {}
        if old is not None and is_new:
            _refuse_other_work(root, folder.leases)
            # The file that marks it as finished is removed first.
            found = (old.last, *find_forgotten(root, old, manifest, settings), *ATTESTED)
            forgotten = list(dict.fromkeys(found))
            parts = find_forgotten_parts(root, old, manifest)
            for part in parts:
                refuse_busy(root / part, "", settings.tell)
        folder.sweep()
        freed = freed_nbytes(root, forgotten, manifest)
        check_space(root, manifest, settings, more_nbytes - freed)
        if forgotten and (root / SIGNATURE).exists():
            settings.tell(f"{root / SIGNATURE} goes: what it signs is replaced")
        _remove_files(folder, forgotten)  # nothing is, for what then has no room
        for part, plan in parts.items():
            _remove_part(folder, part, plan)
        if old is None:
            fsync_parents(folder.state)
        if old is None or is_new or old.parts != manifest.parts:
            folder.put(PLAN, json.dumps(manifest.as_json(), indent=1))
        if settings.elsewhere is None:  # whatever has gone is made again, and stays
            folder.remove(f"{STATE}/{HUB}")
        elif settings.elsewhere.name:
            folder.put(HUB, json.dumps({"repo": settings.elsewhere.name}))


def _remove_files(folder: OutputFolder, files: Iterable[str]) -> None:
    """Remove files of an earlier plan, and folders that become empty."""
    places = set()
    for file in files:
        folder.remove(file)
        places |= {*Path(file).parents}
    for place in sorted(places - {Path()}, reverse=True):  # the deepest first
        with suppress(OSError):  # of somebody's files
            (folder.root / place).rmdir()


def _remove_part(folder: OutputFolder, part: str, plan: Manifest) -> None:
    """Remove another plan's files in a folder of this one, its state last.

    A process that is killed meanwhile leaves a plan by which the next one goes on.
    """
    files = (plan.last, *plan.files, REPORT, *ATTESTED)
    _remove_files(folder, (f"{part}/{file}" for file in files))
    state = folder.temps / f"removed-{part.replace('/', '-')}"
    with write_errors_at(folder.root / part):
        os.replace(folder.root / part / STATE, state)
        shutil.rmtree(state)
    with suppress(OSError):  # of somebody's files
        (folder.root / part).rmdir()


def _refuse_other_work(root: Path, leases: Leases) -> None:
    if others := leases.wait_for_other_work():
        detail = f"{root} is being written by {others[0]} for another plan"
        raise OutputError("locked", detail, "Wait for it, or choose another folder: -o FOLDER.")
