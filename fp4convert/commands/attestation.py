"""attest(): sign the files of an artifact."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.checkpoint.record import OPTIONS
from fp4convert.checkpoint.soundness import refuse_unsound
from fp4convert.errors import InputError, OutputError, shell_line
from fp4convert.options.looking import AttestOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.quality.signature import read_statement, sign_folder
from fp4convert.recipes.options import Reference
from fp4convert.storage.checkpoint_files import (
    DERIVATION,
    RECORD,
    SIGNATURE,
    UNDIGESTED,
    recorded_hashes,
)
from fp4convert.storage.disk import hash_file, replace_file
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access, stopping


@keeping_nothing()
def attest(options: AttestOptions) -> dict[str, Any]:
    """Sign the files of an artifact: the command `attest`.

    The signature, model.sig, is of every file beside it, by the package model-signing; with a
    source also of derivation.json, which states what the artifact was made from.
    Returns  what `attest --json` prints
    Raises   InputError for what is no finished artifact, has damaged files, or for a key that
             cannot sign; OutputError for a signature that is there, or cannot be written
    """
    started = time.monotonic()
    folder, key = Path(os.path.expanduser(options.artifact)), Path(os.path.expanduser(options.key))
    place = folder / SIGNATURE
    _check_places(folder, key, options.force)
    artifact = _open_whole(folder)
    phases = options.phases or Phases()
    recorded = recorded_hashes(artifact.record)
    with _restoring(folder / DERIVATION):
        if options.source is not None:
            _state_derivation(folder, artifact.record, options.source)
        phases.begin("sign")
        data = sign_folder(folder, key)
        statement = read_statement(data)
        for file, sha256 in recorded.items():
            if statement.files.get(file) != sha256:
                detail = f"{folder / file} is not what the record says; expected it as written"
                step = f"See: {shell_line('fp4convert', 'verify', folder)}"
                raise InputError("not-signable", f"{detail}. Nothing is signed", step)
        replace_file(place, data)
    unrecorded = statement.files.keys() - recorded.keys() - {RECORD, *UNDIGESTED}
    return {
        "artifact": os.fspath(folder),
        "signature": os.fspath(place),
        "derivation": DERIVATION in statement.files,
        "files": len(statement.files),
        "recorded": bool(recorded),
        "unrecorded": sorted(unrecorded) if recorded else [],
        "public_key": statement.hint,
        "seconds": round(time.monotonic() - started, 3),
    }


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    """Put a small file back if anything fails: it may be signed already."""
    before = path.read_bytes() if path.is_file() else None
    try:
        yield
    except BaseException:
        if before is None:
            path.unlink(missing_ok=True)
        elif path.read_bytes() != before:
            replace_file(path, before)
        raise


def _check_places(folder: Path, key: Path, is_forced: bool) -> None:
    """Raise an error for a folder, a key or a signature that cannot be."""
    if not folder.is_dir():
        what = "is one file" if folder.is_file() else "is no folder on this disk"
        detail = f"{folder} {what}; expected the folder of an artifact"
        raise InputError("not-signable", detail)
    if Path(os.path.realpath(key)).is_relative_to(Path(os.path.realpath(folder))):
        detail = f"--key {key} lies in {folder}, which is there to be published"
        raise InputError("signature-key", f"{detail}; expected a private key elsewhere", "Move it.")
    place = folder / SIGNATURE
    if os.path.lexists(place) and not is_forced:
        detail = f"{place} is there already; it is not overwritten"
        raise OutputError("output-exists", detail, "Replace it: --force.")
    if not os.access(folder, os.W_OK):
        detail = f"{place}: {folder} cannot be written to; expected a folder of yours"
        raise OutputError("cannot-write", detail)


def _state_derivation(folder: Path, record: Mapping[str, Any], reference: Reference) -> None:
    """Write derivation.json; InputError for a record without options."""
    from fp4convert.quality.derivation import make_statement

    origin, options = record.get("source"), record.get(OPTIONS)
    if not isinstance(origin, dict) or not isinstance(options, dict):
        detail = f"{folder}: its {RECORD} does not say by which options it was made"
        raise InputError("not-reproducible", detail, "Leave --source out.")
    name = os.fspath(reference)
    revision = None if os.path.exists(name) else origin.get("revision")
    source = open_source(name, Access(revision=revision, subfolder=options.get("subfolder")))
    with stopping(source):
        statement = make_statement(record, hash_file(folder / RECORD), source)
    source.stop()
    text = json.dumps(statement, indent=1, ensure_ascii=False)
    replace_file(folder / DERIVATION, f"{text}\n".encode())


def _open_whole(folder: Path) -> Any:
    """Open an artifact that is finished and sound; else InputError."""
    try:
        artifact = open_artifact(os.fspath(folder))
    except InputError as error:
        if error.code == "pipeline":
            words = ("fp4convert", "attest", folder / "transformer", "--key", "FILE")
            step = f"Sign its folders: {shell_line(*words)}"
            raise InputError(error.code, error.message, step) from None
        raise
    refuse_unsound(artifact)
    return artifact
