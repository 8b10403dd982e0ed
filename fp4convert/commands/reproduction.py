"""reproduce(): make an artifact again from its record, and compare."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fp4convert.checkpoint.record import OPTIONS
from fp4convert.commands.options import ReproduceOptions, public
from fp4convert.conversion.options import FILES, QuantizeOptions
from fp4convert.conversion.work import prepare
from fp4convert.conversion.work_options import AccessOptions, DeviceOptions
from fp4convert.errors import InputError, OutputError, shell_line
from fp4convert.execution.settings import Elsewhere
from fp4convert.process import keeping_nothing
from fp4convert.recipes.options import declared_in
from fp4convert.storage.checkpoint_files import GGUF, RECORD, UNDIGESTED, WEIGHTS
from fp4convert.storage.disk import hash_file, read_blocks
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import open_source
from fp4convert.storage.safetensors import read_header
from fp4convert.storage.source import Source, read_whole

NUMBER = re.compile(r"\d\.\d{16}e[+-]\d\d")  # as options.py writes a size
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
        settings = options.settings(options.device)
        settings = replace(settings, elsewhere=Elsewhere("", compare), on_named=compare)
        settings.phases.begin("plan")
        work = prepare(asked, settings.phases)
        _refuse_own_weights(work.source, options, expected)
        try:
            work.carry_out(settings)
        except OutputError as error:
            better = "Point TMPDIR to a folder on a disk with room, and run it again."
            raise OutputError(error.code, error.message, better) from error
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
    folder = place / (options.subfolder or "") if place.is_dir() else place.parent
    if place.exists():
        file = place if place.suffix == ".json" else folder / RECORD
        try:
            record = parse_json_object(file.read_bytes(), file.name)
        except OSError as error:
            raise _no_record(options, error.strerror) from None
        listed = record.get("files")
        files = listed if isinstance(listed, dict) else {}
        shards = [name for name in files if name.endswith((WEIGHTS, GGUF))]
        is_beside = file != place or any((folder / name).is_file() for name in shards)
        return record, folder if is_beside else None
    source = open_source(os.fspath(options.artifact), replace(options.access(), config=None))
    if not source.has_file(RECORD):
        raise _no_record(options, "none is there")
    return parse_json_object(read_whole(source, RECORD), RECORD), None


def _no_record(options: ReproduceOptions, why: str | None) -> InputError:
    detail = f"{options.artifact}: its {RECORD} cannot be read ({why})"
    step = "Give an artifact by quantize, of a pipeline one of its folders."
    return InputError("not-reproducible", f"{detail}; expected the record of an artifact", step)


def _asked(options: ReproduceOptions, record: Mapping[str, Any], output: Path) -> QuantizeOptions:
    """Return the options that made an artifact, with the files given now."""
    words = {name: _checked(name, value) for name, value in record[OPTIONS].items()}
    for name in FILES:
        given = getattr(options, name) or None
        _compare_file(name, given, words.get(name))
        if given is not None:
            words[name] = given
    origin = record.get("source")
    origin = origin if isinstance(origin, dict) else {}
    repo = origin.get("repo") if isinstance(origin.get("repo"), str) else None
    source = options.source or repo
    if not source or (not options.source and os.path.exists(source)):
        detail = f"{options.artifact} was made from a folder, whose place its record does not say"
        raise InputError("no-source", detail, "Name it: --source SOURCE.")
    are_here = os.path.exists(source) and os.path.exists(options.artifact)
    if are_here and os.path.samefile(source, options.artifact):
        raise _own_source(options)
    how = {
        each.name: getattr(options, each.name)
        for each in (*declared_in(AccessOptions), *declared_in(DeviceOptions))
        if each.name not in (*FILES, "revision", "subfolder", "force")
    }
    revision = str(origin["revision"]) if source == repo and origin.get("revision") else None
    return QuantizeOptions(source, output=output, revision=revision, **{**how, **words})


def _own_source(options: ReproduceOptions) -> InputError:
    detail = f"{options.source} is the artifact {options.artifact}, or has its weights"
    return InputError(
        "usage",
        f"{detail}; expected what it was made from",
        "Name the weights that it was made from: --source SOURCE.",
    )


def _checked(name: str, value: object) -> Any:
    """Return the value of an option in a record.

    Raises  InputError for what quantize does not write there
    """
    declared = {each.name: each for each in declared_in(QuantizeOptions)}.get(name)
    makes_bytes = {*QuantizeOptions("", format="nvfp4").that_make_bytes(), "config", "format"}
    is_known = declared is not None and name in makes_bytes
    if name == "target_size" and isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)
    entry = value[0] if isinstance(value, list) and len(value) == 1 else value
    if name in FILES and isinstance(entry, dict):
        is_sound = entry == {"folder": True} or isinstance(entry.get("sha256"), str)
    elif name in FILES:  # a recipe of ours, a number; never a path
        is_name = name == "recipe" and isinstance(value, str) and value.isidentifier()
        is_hub = isinstance(entry, str) and HUB_NAME.fullmatch(entry) and not os.path.exists(entry)
        is_sound = is_name or isinstance(value, float) or bool(is_hub)
    elif isinstance(value, list):
        is_sound = bool(declared and declared.option.is_several)
        is_sound = is_sound and all(isinstance(each, str) for each in value)
    else:
        kinds = get_args(declared.type) or (declared.type,) if declared else ()
        is_sound = any(isinstance(value, kind) for kind in kinds if isinstance(kind, type))
        is_sound = is_sound or (float in kinds and isinstance(value, int))
    if not (is_known and is_sound):
        detail = f"{RECORD}: its {OPTIONS} have {name!r}: {str(value)[:80]!r}"
        detail = f"{detail}, which this version of quantize does not write"
        raise InputError("not-reproducible", detail, "Install the version that made it.")
    return value


def _compare_file(name: str, given: Any, recorded: Any) -> None:
    """Raise InputError where a file is missing, or is not the recorded one."""
    flag = f"--{name.replace('_', '-')}"
    path = given[0] if isinstance(given, tuple | list) else given
    entry = recorded[0] if isinstance(recorded, list) else recorded
    if path is not None and entry is None:
        detail = f"{flag} is given, and the artifact was made without"
        raise InputError("reproduce-file", detail, "Leave it out.")
    if not isinstance(entry, dict):
        return
    sha256 = str(entry.get("sha256", ""))
    if path is None:
        of = f" (sha256 {sha256[:12]}...)" if sha256 else ""
        detail = f"the artifact was made with a {flag} of its own{of}, which the record has not"
        raise InputError("reproduce-file", detail, f"Give it: {shell_line(flag, 'PATH')}")
    if sha256 and os.path.isdir(path):
        raise InputError("reproduce-file", f"{flag} {path} is a folder; expected a file")
    if sha256 and os.path.isfile(path) and (found := hash_file(Path(path))) != sha256:
        detail = f"{flag} {path} has the sha256 {found[:12]}..., not {sha256[:12]}..."
        raise InputError("reproduce-file", detail, "Give the file that it was made with.")


def _refuse_own_weights(
    source: Source, options: ReproduceOptions, expected: Mapping[str, object]
) -> None:
    """Raise InputError where a source is an artifact with the same shards.

    Its blocks would be carried over, which proves nothing.
    """
    if source.has_file(RECORD):
        files = parse_json_object(read_whole(source, RECORD), RECORD).get("files")
        known = set(files.values()) if isinstance(files, dict) else set()
        if any(sha256 in known for name, sha256 in expected.items() if name.endswith(WEIGHTS)):
            raise _own_source(options)


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
    with made.open("rb", buffering=0) as own, there.open("rb", buffering=0) as other:

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
            blocks = zip(read_blocks(own, ref.nbytes), read_blocks(other, ref.nbytes), strict=True)
            if any(mine != theirs for mine, theirs in blocks):
                return str(ref.name)
    return None
