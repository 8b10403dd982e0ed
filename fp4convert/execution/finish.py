"""End a conversion: check the files, write the records last.

Only the output folder is needed, so any process that is there when the last task is done can do it,
or `merge` later.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fp4convert.checkpoint.error_report import merge_accounts, report_text
from fp4convert.errors import InputError, OutputError, shell_line
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.plan_file import (
    ENDED,
    Manifest,
    TaskFiles,
    digest_of,
    read_ended,
    read_manifest,
)
from fp4convert.execution.takeover import reopened
from fp4convert.process import processors
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import CARD, HUB_FILE, PLAN_FILE, REPORT, UNDIGESTED
from fp4convert.storage.disk import (
    SHA256_DIGITS,
    Mark,
    is_sealed,
    nbytes_there,
    open_regular,
    write_errors_at,
)
from fp4convert.storage.json_text import as_text
from fp4convert.storage.sha256 import hash_each

ENDING = "end"  # the lease of the process that ends the conversion
WHY_ENDING = "checks what is written, and ends the work"


class Ending(NamedTuple):
    """A finished folder: the digest, the size and the sha256 of all its files.

    nbytes    without the report, which no plan counts
    fidelity  summary of the report; None where nothing was rounded
    saturated number of modules with weights beyond their given global scales
    erased_rows  number of rows that large global scales turned into zeros
    """

    digest: str
    nbytes: int
    files: dict[str, str]
    fidelity: dict[str, object] | None = None
    saturated: int = 0
    erased_rows: int = 0


def find_harmed(
    folder: OutputFolder, phases: Phases, is_reading_all: bool = False
) -> list[TaskFiles]:
    """Find tasks whose files are not what was written.

    Files of other processes are read, except those with a sound seal. The place that files were
    sent to is asked about them.

    is_reading_all  sealed files are read too: a disk may have lost bytes of them
    """
    records = {task.key: folder.record_of(task) for task in folder.manifest.tasks}
    sizes: dict[str, int] = {}
    gone: dict[str, tuple[int, str]] = {}
    for task in folder.manifest.tasks:
        if done := records[task.key]:
            if done.is_gone:
                folder.hashes |= done.files
                gone |= {file: (task.files[file], done.files[file]) for file in task.files}
            sizes |= task.files
            for file, sha256 in done.files.items():
                seal = None if is_reading_all else done.seals.get(file)
                if file not in folder.hashes and is_sealed(folder.root / file, sha256, seal):
                    folder.hashes[file] = sha256
    if gone and folder.elsewhere:
        folder.hashes |= dict.fromkeys(folder.elsewhere.find_lost(gone), "")
    unread = sorted(sizes.keys() - folder.hashes.keys(), key=lambda file: (-sizes[file], file))
    if unread:
        phases.begin("check", sum(sizes[file] for file in unread))
        folder.hashes |= _hash_all(folder.root, unread, phases)

    def is_sound(file: str, sha256: str) -> bool:
        found = folder.hashes[file]
        return found == sha256 or (file == CARD and bool(found))  # which people edit

    sound = {
        key
        for key, done in records.items()
        if done and all(is_sound(*each) for each in done.files.items())
    }
    return [task for task in folder.manifest.tasks if task.key not in sound]


def _hash_all(root: Path, files: list[str], phases: Phases) -> dict[str, str]:
    """Hash files with all cores; "" for one that is gone or unreadable.

    Such a one is written again.
    """
    is_over, threads = threading.Event(), processors()
    waiting, lanes = iter(files), 2 if len(files) > threads else 1
    hashes: dict[str, str] = {}

    def report(file: str, nbytes: int) -> None:
        phases.report(file, nbytes)
        if is_over.is_set():
            raise OSError("nobody waits for it")

    def open_file(file: str) -> BinaryIO:
        return open_regular(root / file)

    def read_some(thread: int) -> None:
        for file, found in hash_each(waiting, open_file, OSError, report, lanes):
            hashes[file] = found if isinstance(found, str) else ""

    with ThreadPoolExecutor(threads) as pool:
        try:
            list(pool.map(read_some, range(threads)))
        except BaseException:
            list(waiting)  # no thread begins another one
            is_over.set()
            raise
    return hashes


def find_edited(folder: OutputFolder) -> list[str]:
    """Find small files that were changed since the folder was finished.

    They are written again, except for the model card, which people edit. Changed copies of the
    same size are found by `find_harmed`.
    """
    _, plan_id, files = read_ended(folder.root)
    if plan_id != folder.manifest.plan_id:
        return []
    edited = []
    for task in folder.manifest.tasks:
        for file, nbytes in () if task.may_leave else task.files.items():
            if file != CARD and nbytes_there(folder.root / file) not in (None, nbytes):
                edited.append(file)
    for file in sorted({*folder.manifest.texts, folder.manifest.last} & files.keys()):
        try:
            data = (folder.root / file).read_bytes()
        except FileNotFoundError:  # others remove and write them meanwhile
            continue
        except OSError:
            data = b""  # it cannot be read, and is written again, too
        if hashlib.sha256(data).hexdigest() != files[file]:
            edited.append(file)
    return edited


def find_disputes(folder: OutputFolder) -> dict[str, list[TaskFiles]]:
    """Find scale groups whose global scale differs between shards.

    Returns  group -> the tasks of its shards
    """
    found: dict[str, dict[str, float]] = {}
    for task in folder.manifest.tasks:
        done = folder.record_of(task)
        for group, global_scale in done.global_scales.items() if done else ():
            found.setdefault(group, {})[task.key] = global_scale
    disputed = {group: scales for group, scales in found.items() if len(set(scales.values())) > 1}
    return {
        group: [task for task in folder.manifest.tasks if task.key in scales]
        for group, scales in disputed.items()
    }


def write_ending(folder: OutputFolder) -> Ending:
    """Write texts and report of finished, checked tasks, then the record.

    Raises  OutputError where the record of a task has gone meanwhile
    """
    manifest, record = folder.manifest, folder.manifest.record
    done_records = []
    for task in manifest.tasks:
        done = folder.record_of(task)
        if done is None:  # a report of the others alone would say too little
            found = f"{folder.root}: {next(iter(task.files))} was finished"
            detail = f"{found}, and its done record cannot be read any more; expected it to stay"
            raise OutputError("unfinished", detail, "Run the same command again.")
        done_records.append(done)
    folder.write_texts(manifest.texts)
    files = {file: folder.hashes[file] for file in manifest.files}
    # Write the report; where nothing was rounded, one of an earlier plan goes.
    accounts, taken_over = merge_accounts((done.accounts, done.taken_over) for done in done_records)
    if accounts and record is not None:
        norms = {name: is_zero for done in done_records for name, is_zero in done.norms.items()}
        folder.write_texts({REPORT: report_text(accounts, taken_over, record, norms)})
        files[REPORT] = folder.hashes[REPORT]
    else:
        folder.remove(REPORT)
    # Write the record last: with it the folder is finished.
    if record is not None:
        folder.write_texts({manifest.last: _record_text(record, files)})
        files[manifest.last] = folder.hashes[manifest.last]
    with write_errors_at(folder.root):
        folder.sweep()
    ended = {"plan": manifest.plan_id, "files": files}
    folder.put(ENDED, json.dumps(ended, sort_keys=True))
    return _ending(folder, files)


def _record_text(record: dict[str, object], files: dict[str, str]) -> str:
    """Return the text of our record, with the sha256 of digested files."""
    listed = {file: sha256 for file, sha256 in sorted(files.items()) if file not in UNDIGESTED}
    return as_text({**record, "files": listed})


def record_nbytes(record: dict[str, object], files: Iterable[str]) -> int:
    """Count the exact bytes of our record of some files."""
    text = _record_text(record, dict.fromkeys(files, "0" * SHA256_DIGITS))
    return len(text.encode("utf-8", "surrogatepass"))


def _ending(folder: OutputFolder, files: dict[str, str]) -> Ending:
    """Describe the finished folder."""
    fidelity = None
    nbytes = sum(folder.nbytes_of(file) for file in files if file != REPORT)
    if REPORT in files:
        with write_errors_at(folder.root / REPORT):
            report = json.loads((folder.root / REPORT).read_text(encoding="utf-8"))
        fidelity = dict(report["summary"])
    records = [done for task in folder.manifest.tasks if (done := folder.record_of(task))]
    lost = sum(done.saturated for done in records), sum(done.erased_rows for done in records)
    return Ending(digest_of(files), nbytes, files, fidelity, *lost)


def ended_meanwhile(folder: OutputFolder, before: Mark | None) -> Ending | None:
    """Describe a folder that another process has ended; None otherwise.

    before  the folder's mark at the beginning (read_ended)
    """
    mark, plan_id, files = read_ended(folder.root)
    expected = {*folder.manifest.files, folder.manifest.last}
    if (
        mark == before
        or plan_id != folder.manifest.plan_id
        or files.keys() - {REPORT} != expected
        or folder.missing()
    ):
        return None
    return _ending(folder, files)


def merge(
    root: Path, phases: Phases, tell: Callable[[str], None] = lambda line: None
) -> dict[str, object]:
    """End a conversion whose tasks are done, by whichever processes.

    tell     gets a line where another process is waited for
    Returns  the document of `merge`
    Raises   InputError where the folder is not begun, or its shards go to the Hub; OutputError
             where a shard is missing or is not what was written
    """
    started = time.monotonic()
    manifests, ending = _end(root, phases, tell)
    manifest = manifests[0]
    # The process that began it knew the source; in another place its paths are wrong.
    steps = list(manifest.next) if os.path.abspath(root) == manifest.root else []
    if not steps and manifest.record:
        source = ("--source", manifest.origin["repo"]) if manifest.origin.get("repo") else ()
        steps = [shell_line("fp4convert", "verify", root, *source)]
    return {
        "output": str(root),
        "format": (manifest.record or manifest.identity).get("format"),
        "dialect": manifest.identity.get("dialect"),
        "shards": sum(len(each.shards) for each in manifests),
        "output_bytes": ending.nbytes,
        "seconds": round(time.monotonic() - started, 3),
        "digest": ending.digest,
        **({"fidelity": ending.fidelity} if ending.fidelity else {}),
        **({"next": steps} if steps else {}),
    }


def _end(root: Path, phases: Phases, tell: Callable[[str], None]) -> tuple[list[Manifest], Ending]:
    """End the plan in a folder, after the plans of its parts.

    Returns  the plan and those of its parts; and the ending, in which names of a part's files begin
             with its folder
    """
    with write_errors_at(root):
        manifest = read_manifest(root) if (root / PLAN_FILE).exists() else None
    if manifest is None:
        found = f"{root} holds no plan of fp4convert ({PLAN_FILE})"
        if not root.is_dir():
            found = f"{root}: {'a file' if root.exists() else 'no such folder'}"
        detail = f"{found}; expected the output of quantize or prune"
        raise InputError("no-plan", detail, "Give the folder that was named with -o.")
    with reopened(root, manifest, tell) as folder, folder.leases.hold_when_free(ENDING, WHY_ENDING):
        parts = {}
        for part, plan_id in manifest.parts.items():
            is_begun = (root / part / PLAN_FILE).exists()
            plan = read_manifest(root / part) if is_begun else None
            if plan is None or plan.plan_id != plan_id:
                detail = f"{root / part}, a part of {root}, is not begun yet for its plan"
                raise OutputError("unfinished", detail, "Run the command that began it again.")
            parts[part] = _end(root / part, phases, tell)
        _refuse_unfinished(folder)
        _refuse_harmed(folder, phases)
        ending = write_ending(folder)
    manifests, files, nbytes = [manifest], dict(ending.files), ending.nbytes
    for part, (plans, ended) in parts.items():
        manifests += plans
        files |= {f"{part}/{file}": sha256 for file, sha256 in ended.files.items()}
        nbytes += ended.nbytes
    return manifests, ending._replace(digest=digest_of(files), nbytes=nbytes, files=files)


def _refuse_unfinished(folder: OutputFolder) -> None:
    """Raise OutputError where a task is not done, InputError with a Hub."""
    if not (missing := [file for task in folder.missing() for file in task.files]):
        return
    if nbytes_there(folder.root / HUB_FILE) is not None:
        detail = f"{folder.root}: its shards are not here: --no-keep sends them to the Hub"
        step = "Run the command that began it again: it ends it on the Hub, and merges nothing."
        raise InputError("shards-gone", detail, step)
    files = folder.manifest.files
    absent = [file for file in missing if nbytes_there(folder.root / file) is None] or missing
    detail = f"{folder.root}: {len(absent)} of {len(files)} files are not written yet"
    workers = folder.leases.others()
    next_step = "Run the command that began it again; of parts, those that are left."
    if workers:
        next_step = f"{len(workers)} processes are at work on it: wait."
    raise OutputError("unfinished", f"{detail}, the first {absent[0]}", next_step)


def _refuse_harmed(folder: OutputFolder, phases: Phases) -> None:
    """Raise OutputError for damaged files or uneven scale groups."""
    root = folder.root
    files = []
    for task in find_harmed(folder, phases):
        done = folder.record_of(task)
        known = done.files if done else {}
        changed = [file for file in task.files if folder.hashes.get(file) != known.get(file)]
        files += [file for file in changed if file != CARD] or changed or list(task.files)
    if files:
        detail = f"{root}: {len(files)} files differ from what was written, or are gone"
        next_step = "Run the command that wrote it again: it writes them again."
        raise OutputError("damaged", f"{detail}, the first {files[0]}", next_step)
    for group, tasks in find_disputes(folder).items():
        shards = " and ".join(file for task in tasks for file in task.files)
        detail = f"{root}: scale group {group} has different global scales in different shards"
        next_step = "Run the command that wrote them again: it writes them again."
        raise OutputError("scale-group", f"{detail}: {shards}", next_step)
