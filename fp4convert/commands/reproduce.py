"""reproduce(): make an artifact again from its record, and compare."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.record import OPTIONS
from fp4convert.commands.options import ReproduceOptions, public
from fp4convert.conversion.options import QuantizeOptions
from fp4convert.conversion.work import prepare
from fp4convert.conversion.work_options import AccessOptions, DeviceOptions
from fp4convert.errors import InputError
from fp4convert.process import keeping_nothing
from fp4convert.recipes.options import declared_in
from fp4convert.storage.checkpoint_files import RECORD, UNDIGESTED, WEIGHTS
from fp4convert.storage.disk import hash_file
from fp4convert.storage.json_text import parse_json_object, read_text_file
from fp4convert.storage.open import open_source
from fp4convert.storage.safetensors import read_header
from fp4convert.storage.source import read_whole

GIVEN = ("calibration", "lora", "global_scale", "input_scale", "recipe", "config")


@public(ReproduceOptions)
@keeping_nothing()
def reproduce(options: ReproduceOptions) -> dict[str, Any]:
    """Make an artifact again from its record alone, and compare hashes.

    The command `reproduce`.

    Every shard passes through a file in the folder for temporary files, which is removed as soon
    as its hash is known.
    Returns  what `reproduce --json` prints; `reproduced` is False where the command exits with 6
    Raises   Fp4Error, as `quantize` does; InputError for a record that does not tell enough, and
             for a file that differs from the one that the artifact was made with
    """
    started = time.monotonic()
    record, folder = _read_record(options)
    expected = record.get("files")
    if not isinstance(expected, dict) or not isinstance(record.get(OPTIONS), dict):
        detail = f"{options.artifact}: its {RECORD} does not say by which options it was made"
        better = "Give one that quantize of this version or a newer one wrote."
        raise InputError("not-reproducible", f"{detail}; expected files and {OPTIONS}", better)
    differing: dict[str, str | None] = {}  # file -> the first tensor that differs

    def compare(path: Path, file: str, sha256: str) -> None:
        if file in (RECORD, *UNDIGESTED):
            return
        there = folder / file if folder else None
        if expected.get(file) != sha256 or (there and _hash_of(there) != sha256):
            differing[file] = _first_difference(path, there) if there else None

    with tempfile.TemporaryDirectory(prefix="fp4convert-") as scratch:
        asked = _asked(options, record, Path(scratch, "out"))
        settings = replace(options.settings(options.device), keeps=False, on_named=compare)
        settings.phases.begin("plan")
        work = prepare(asked, settings.phases)
        work.carry_out(settings)
        found = work.ended_files()
        made = parse_json_object(Path(scratch, "out", RECORD).read_bytes(), RECORD)
    differing |= dict.fromkeys(expected.keys() - found.keys())
    differing |= dict.fromkeys(found.keys() - expected.keys() - {RECORD, *UNDIGESTED})
    told = [key for key in {**record, **made} if record.get(key) != made.get(key)]
    words = [key for key in told if key not in ("files", "producer", "source")]
    version = record.get("producer")
    return {
        "artifact": os.fspath(options.artifact),
        "source": os.fspath(asked.source),
        "made_by": version.get("version") if isinstance(version, Mapping) else None,
        "files": len(expected),
        "differing": [
            {"file": file, "tensor": differing[file], "sha256": found.get(file)}
            for file in sorted(differing)
        ],
        "record": words,
        "reproduced": not differing and not words,
        "seconds": round(time.monotonic() - started, 3),
    }


def _read_record(options: ReproduceOptions) -> tuple[dict[str, Any], Path | None]:
    """Read our record of an artifact, and say where its files are.

    Returns  the record; the folder, or None where the files are not on this disk
    """
    place = Path(options.artifact)
    if place.is_file() and place.suffix == ".json":
        is_beside = any(place.parent.glob(f"*{WEIGHTS}"))
        text = read_text_file(place).encode()
        return parse_json_object(text, place.name), place.parent if is_beside else None
    source = open_source(os.fspath(options.artifact), options.access())
    if not source.has_file(RECORD):
        detail = f"{options.artifact} has no {RECORD}; expected an artifact by fp4convert"
        raise InputError("not-reproducible", detail, "Give one that quantize wrote.")
    return parse_json_object(read_whole(source, RECORD), RECORD), options.folder_of(place)


def _asked(options: ReproduceOptions, record: Mapping[str, Any], output: Path) -> QuantizeOptions:
    """Return the options that made an artifact, with the files given now."""
    words = dict(record[OPTIONS])
    known = {each.name for each in declared_in(QuantizeOptions)}
    if unknown := sorted(words.keys() - known):
        detail = f"{RECORD}: its {OPTIONS} have {unknown[0]!r}, which this version does not know"
        raise InputError("not-reproducible", detail, "Install the version that made it.")
    for name in GIVEN:
        given = getattr(options, name) or None
        flag, recorded = f"--{name.replace('_', '-')}", words.get(name)
        entry = recorded[0] if isinstance(recorded, list) and recorded else recorded
        if given is not None and recorded is None:
            detail = f"{flag} is given, and the artifact was made without"
            raise InputError("reproduce-file", detail, "Leave it out.")
        if given is None and isinstance(entry, dict):
            of = f" (sha256 {entry['sha256'][:12]}...)" if "sha256" in entry else ""
            detail = f"the artifact was made with a {flag} of its own{of}, which the record has not"
            raise InputError("reproduce-file", detail, f"Give it: {flag} FILE.")
        path = given[0] if isinstance(given, tuple) else given
        if path is not None and isinstance(entry, dict) and os.path.isfile(path):
            found = hash_file(Path(path))
            if "sha256" in entry and found != entry["sha256"]:
                detail = (
                    f"{flag} {path} has the sha256 {found[:12]}..., not {entry['sha256'][:12]}..."
                )
                raise InputError("reproduce-file", detail, "Give the file that it was made with.")
        if given is not None:
            words[name] = given
    origin = record.get("source")
    origin = origin if isinstance(origin, dict) else {}
    source = options.source or origin.get("repo")
    if not source:
        detail = f"{options.artifact} was made from a folder, whose place its record does not say"
        raise InputError("no-source", detail, "Name it: --source SOURCE.")
    revision = None if options.source else origin.get("revision")
    how = {
        each.name: getattr(options, each.name)
        for each in (*declared_in(AccessOptions), *declared_in(DeviceOptions))
        if each.name not in (*GIVEN, "revision", "subfolder")
    }
    return QuantizeOptions(source, output=output, revision=revision, **{**how, **words})


def _hash_of(path: Path) -> str | None:
    """Hash a file of the artifact; None where there is none."""
    try:
        return hash_file(path)
    except OSError:
        return None


def _first_difference(made: Path, there: Path) -> str | None:
    """Name the first tensor whose bytes two files do not share, if any."""
    if not there.is_file() or there.suffix != WEIGHTS:
        return None
    with made.open("rb") as own, there.open("rb") as other:

        def header(stream: Any, path: Path) -> Any:
            def read(offset: int, length: int) -> bytes:
                stream.seek(offset)
                return bytes(stream.read(length))

            return read_header(path.name, path.stat().st_size, read)

        try:
            known = {ref.name: ref for ref in header(other, there).tensors}
        except InputError:
            return None
        for ref in header(own, made).tensors:
            twin = known.get(ref.name)
            if twin is None or (twin.dtype, twin.shape) != (ref.dtype, ref.shape):
                return str(ref.name)
            own.seek(ref.start)
            other.seek(twin.start)
            left = ref.nbytes
            while left:
                blocks = [stream.read(min(left, 1 << 20)) for stream in (own, other)]
                if blocks[0] != blocks[1] or not blocks[0]:
                    return str(ref.name)
                left -= len(blocks[0])
    return None
