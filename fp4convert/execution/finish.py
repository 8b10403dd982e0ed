"""End a conversion: check the files, write the records last.

It needs the output folder alone, so whoever is there when the last task is done can do it, or `merge` later.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fp4convert.checkpoint.error_report import merge_accounts, report_text
from fp4convert.errors import InputError, OutputError
from fp4convert.execution.folder import OutputFolder, entered
from fp4convert.execution.plan_file import (
    Done,
    Manifest,
    TaskFiles,
    digest_of,
    read_ended,
    read_manifest,
)
from fp4convert.numerics.backends.base import processors
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import PLAN_FILE, REPORT, UNDIGESTED
from fp4convert.storage.disk import Mark, hash_file, is_sealed, told
from fp4convert.storage.json_text import as_text

SHA256_DIGITS = 64
ENDING = "end"  # the claim of whoever ends the conversion


@dataclass(frozen=True, slots=True)
class Ending:
    """A finished folder: the digest, the size and the sha256 of all its files.

    nbytes    of what was planned: without the report
    fidelity  the summary of its report; None where nothing was rounded
    """

    digest: str
    nbytes: int
    files: dict[str, str]
    fidelity: dict[str, object] | None = None


def find_harmed(folder: OutputFolder, phases: Phases) -> list[TaskFiles]:
    """Tasks whose files are not what was written; those that others wrote are read, but for what is as it was sealed."""
    records = {task.key: folder.record_of(task) for task in folder.manifest.tasks}
    sizes = {
        file: nbytes
        for task in folder.manifest.tasks
        if records[task.key]
        for file, nbytes in task.files.items()
    }
    for done in filter(None, records.values()):
        folder.hashes |= {
            file: sha256 for file, sha256 in done.files.items() if _is_known(folder, file, done)
        }
    unread = [file for file in sizes if file not in folder.hashes]

    is_over = threading.Event()

    def read(file: str) -> str:
        def each(nbytes: int) -> None:
            phases.report(file, nbytes)
            if is_over.is_set():
                raise OSError("nobody waits for it")

        return _hash(folder.root / file, each)

    if unread:
        phases.begin("check", sum(sizes[file] for file in unread))
        with ThreadPoolExecutor(processors()) as pool:
            try:
                folder.hashes |= zip(unread, pool.map(read, unread), strict=True)
            except BaseException:
                is_over.set()
                pool.shutdown(cancel_futures=True)
                raise
    sound = {
        key for key, done in records.items() if done and done.files.items() <= folder.hashes.items()
    }
    return [task for task in folder.manifest.tasks if task.key not in sound]


def _is_known(folder: OutputFolder, file: str, done: Done) -> bool:
    """True where a file that this process has not looked at yet is as it was sealed by whoever wrote it."""
    return file not in folder.hashes and is_sealed(
        folder.root / file, done.files[file], done.seals.get(file)
    )


def find_disputes(folder: OutputFolder) -> dict[str, list[TaskFiles]]:
    """Scale groups that got another global scale in one shard than in another, and the tasks of all these shards."""
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


def _hash(path: Path, each: Callable[[int], None]) -> str:
    try:
        return hash_file(path, each)
    except OSError:
        return ""  # gone, or the disk cannot read it: it is written again


def write_ending(folder: OutputFolder) -> Ending:
    """Write the texts and the report, then the record; every task is finished, and its files are known to be what was written."""
    manifest = folder.manifest
    folder.write_texts(manifest.texts)
    files = {file: folder.hashes[file] for file in (*manifest.files, *_write_report(folder))}
    if manifest.record is not None:
        folder.write_texts({manifest.last: _record_text(manifest.record, files)})
        files[manifest.last] = folder.hashes[manifest.last]
    with told(folder.root):
        folder.sweep()
    folder.put_ended(files)
    return _ending(folder, files)


def _record_text(record: dict[str, object], files: dict[str, str]) -> str:
    """Our own record, with the sha256 of every file that is digested."""
    listed = {file: sha256 for file, sha256 in sorted(files.items()) if file not in UNDIGESTED}
    return as_text({**record, "files": listed})


def nbytes_of(manifest: Manifest) -> int:
    """Exactly what all files of the result will take, the record too."""
    if manifest.record is None:
        return manifest.nbytes
    text = _record_text(manifest.record, dict.fromkeys(manifest.files, "0" * SHA256_DIGITS))
    return manifest.nbytes + len(text.encode("utf-8", "surrogatepass"))


def _write_report(folder: OutputFolder) -> list[str]:
    """Its name, where it was written; where nothing was rounded, one of an earlier plan goes."""
    records = [done for task in folder.manifest.tasks if (done := folder.record_of(task))]
    accounts, taken_over = merge_accounts((done.accounts, done.taken_over) for done in records)
    if accounts and folder.manifest.record is not None:
        folder.write_texts({REPORT: report_text(accounts, taken_over, folder.manifest.record)})
        return [REPORT]
    with told(folder.root / REPORT):
        (folder.root / REPORT).unlink(missing_ok=True)
    return []


def _ending(folder: OutputFolder, files: dict[str, str]) -> Ending:
    with told(folder.root):
        nbytes = sum((folder.root / file).stat().st_size for file in files if file != REPORT)
    return Ending(
        digest_of(files), nbytes, files, _fidelity(folder.root) if REPORT in files else None
    )


def _fidelity(root: Path) -> dict[str, object]:
    """The summary of the report that was written there."""
    with told(root / REPORT):
        return dict(json.loads((root / REPORT).read_text(encoding="utf-8"))["summary"])


def ended_meanwhile(folder: OutputFolder, before: Mark | None) -> Ending | None:
    """What another process ended the folder with since its mark was `before` (read_ended); None where none did."""
    mark, files = read_ended(folder.root)
    is_whole = mark != before and files.keys() - {REPORT} == {
        *folder.manifest.files,
        folder.manifest.last,
    }
    return _ending(folder, files) if is_whole and not folder.missing() else None


def merge(root: Path, phases: Phases) -> dict[str, object]:
    """End a conversion whose every task is done, by whichever processes and in whichever folders; the document of `merge`.

    Raises InputError where the folder is not begun, OutputError where a shard is missing or is not what was written
    """
    started = time.monotonic()
    with told(root):
        manifest = read_manifest(root) if (root / PLAN_FILE).exists() else None
    if manifest is None:
        detail = (
            f"{root} holds no plan of fp4convert ({PLAN_FILE}); expected the output of quantize"
        )
        raise InputError("no-plan", detail, "Give the folder that was named with -o.")
    with entered(root, manifest) as folder, folder.claims.waited_for(ENDING):
        if missing := [file for task in folder.missing() for file in task.files]:
            detail = f"{root}: {len(missing)} of {len(manifest.files)} files are not written yet, the first {missing[0]}"
            workers = folder.claims.others()
            at_work = (
                f"{len(workers)} processes are at work on it: wait."
                if workers
                else "Run the command for them."
            )
            raise OutputError("unfinished", detail, at_work)
        if harmed := find_harmed(folder, phases):
            files = [file for task in harmed for file in task.files]
            detail = f"{root}: {len(files)} files are not what was written, or others beside them, the first {files[0]}"
            raise OutputError(
                "damaged", detail, "Run the command that wrote it again: it does them anew."
            )
        for group, tasks in find_disputes(folder).items():
            shards = " and ".join(file for task in tasks for file in task.files)
            detail = f"{root}: scale group {group} has another global scale in one shard than in another: {shards}"
            raise OutputError(
                "scale-group", detail, "Run the command that wrote them again: it does them anew."
            )
        ending = write_ending(folder)
    return {
        "output": str(root),
        "format": manifest.identity.get("format"),
        "dialect": manifest.identity.get("dialect"),
        "shards": len(manifest.shards),
        "output_bytes": ending.nbytes,
        "seconds": round(time.monotonic() - started, 3),
        "digest": ending.digest,
        **({"fidelity": ending.fidelity} if ending.fidelity else {}),
    }
