"""reproduce(): make an artifact again from its record, and compare."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.checkpoint.record import ADAPTER, BASE, OPTIONS, TRANSCODED
from fp4convert.conversion.recorded_options import FILES, WHERE, as_page, read_options
from fp4convert.conversion.repacking import prepare_transcode, transcode
from fp4convert.conversion.work import Work, prepare
from fp4convert.errors import InputError, shell_line
from fp4convert.execution.plan_file import read_ended_files
from fp4convert.execution.settings import Elsewhere, Settings
from fp4convert.options.access import AccessOptions, DeviceOptions
from fp4convert.options.looking import ReproduceOptions
from fp4convert.options.rewriting import TranscodeOptions
from fp4convert.options.writing import QuantizeOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.quality.derivation import find_disagreements
from fp4convert.quality.found_artifact import (
    FoundArtifact,
    find_artifact,
    first_difference,
    hash_in,
)
from fp4convert.recipes.options import declared_in
from fp4convert.storage.checkpoint_files import (
    DERIVATION,
    RECORD,
    UNDIGESTED,
    holds_weights,
    recorded_hashes,
)
from fp4convert.storage.disk import hash_file, temporary_folder
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import GGUF_FILE, REPOSITORY
from fp4convert.storage.source import Source


@keeping_nothing()
def reproduce(options: ReproduceOptions) -> dict[str, Any]:
    """Make an artifact again from its record alone, and compare hashes.

    The command `reproduce`.

    Every shard passes through a file in the folder for temporary files, which is removed as soon
    as its hash is known; the input of a transcode step lies there whole until the step ends.
    Returns  what `reproduce --json` prints; `reproduced` is False where the command exits with 6
    Raises   Fp4Error, as `quantize` does; InputError for a record without options or hashes, and
             for a file that differs from the recorded one
    """
    started = time.monotonic()
    artifact = find_artifact(os.fspath(options.artifact), replace(options.access(), config=None))
    record, folder = artifact.record, artifact.folder
    expected = _expected_hashes(options, record)
    differing: dict[str, str | None] = {}  # file -> the first tensor that differs

    def compare(path: Path, file: str, sha256: str) -> None:
        if file in (RECORD, *UNDIGESTED):
            return
        differing.pop(file, None)  # a shard that arrived damaged is written again
        if expected.get(file) != sha256 or artifact.hash_of(file, sha256) != sha256:
            differing[file] = first_difference(path, folder / file) if folder else None

    origin = {key: _text_in(record, "source", key) for key in ("repo", "revision", "file")}
    with temporary_folder() as scratch:
        asked = _asked(options, record, origin, scratch / "out")
        steps, settings = _steps(record[OPTIONS]), options.settings(options.device)
        settings.phases.begin("plan")
        is_recorded = asked.source in (origin["repo"], _recorded_source(origin))
        work = _prepare(asked, is_recorded, folder, settings.phases)
        _compare_taken(options, record[OPTIONS], work.plan.options or {})
        _refuse_own_weights(work, options, expected)
        last = _carry_out(work, steps, settings, compare)
        found = read_ended_files(last)
        made = parse_json_object((last / RECORD).read_bytes(), RECORD)
    others = found.keys() - expected.keys() - {RECORD, *UNDIGESTED}
    for file in (*(expected.keys() - found.keys()), *others, *artifact.added):
        differing.setdefault(file, None)
    words = _differing_keys(record, made)
    doubts = _find_doubts(artifact, work.source)
    return {
        "artifact": os.fspath(options.artifact),
        "source": os.fspath(asked.source),
        "source_revision": work.source.checkpoint.revision,
        "recorded_source": origin["repo"],
        "recorded_revision": origin["revision"],
        "made_by": _text_in(record, "producer", "version"),
        "files": len(expected),
        "differing": [
            {"file": file, "tensor": differing[file], "sha256": found.get(file)}
            for file in sorted(differing)
        ],
        "record": words,
        "derivation": doubts,
        "unrecorded": artifact.unrecorded,
        "reproduced": not (differing or words or doubts),
        "seconds": round(time.monotonic() - started, 3),
    }


def _find_doubts(artifact: FoundArtifact, source: Source) -> list[str] | None:
    """List what of an artifact's derivation.json is false; None without one."""
    if (stated := artifact.read(DERIVATION)) is None:
        return None
    sha256 = hashlib.sha256(artifact.read(RECORD) or b"").hexdigest()
    return [*find_disagreements(stated, artifact.record, sha256, source)]


def _expected_hashes(options: ReproduceOptions, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of a record that has options, too; else InputError."""
    hashes = recorded_hashes(record)
    if hashes and isinstance(record.get(OPTIONS), dict):
        return hashes
    detail = f"{options.artifact}: its {RECORD} does not say by which options it was made"
    better = "Give one that quantize of this version or a newer one wrote."
    raise InputError("not-reproducible", f"{detail}; expected files and {OPTIONS}", better)


def _text_in(record: Mapping[str, Any], *keys: str) -> str | None:
    """Return a text of a record; None if it has none there."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def _recorded_source(origin: Mapping[str, str | None]) -> str | None:
    """Return the repository of a record, or the file in it; never a path."""
    repo, file = origin["repo"], origin["file"]
    if not repo:
        return None
    name, expected = (f"{repo}/{file}", GGUF_FILE) if file else (repo, re.compile(REPOSITORY))
    return name if expected.fullmatch(name) else None


def _differing_keys(record: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """List the keys of two records whose values differ; places of files may."""

    def placeless(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key not in ("repo", *WHERE)}

    def written(value: Any) -> str:  # as JSON, where 1, 1.0 and true differ
        known = json.loads(json.dumps(value), object_hook=placeless)
        return json.dumps(known, sort_keys=True)

    keys = {**record, **made}.keys() - {"files", "producer", "source"}
    differing = {key for key in keys if written(record.get(key)) != written(made.get(key))}
    if len(record["files"]) != len(recorded_hashes(record)):  # an entry that is no hash
        differing.add("files")
    return sorted(differing)


def _asked(
    options: ReproduceOptions,
    record: Mapping[str, Any],
    origin: Mapping[str, str | None],
    output: Path,
) -> QuantizeOptions:
    """Return the options that made an artifact, with the files given now."""
    words = read_options(record)
    for name in FILES:
        given = getattr(options, name) or None
        _compare_file(name, given, words.get(name))
        if given is not None:
            words[name] = given
        elif name in words:
            entry = {"base": BASE, "lora": ADAPTER}.get(name, "")
            commit = _text_in(record, entry, "revision")
            words[name] = as_page(words[name], commit)
    source = options.source or _recorded_source(origin)
    if not source or (not options.source and os.path.exists(source)):
        detail = f"{options.artifact} was made from a folder, whose place its record does not say"
        if source and re.fullmatch(REPOSITORY, os.fspath(source)):
            detail = f"{options.artifact} was made from {source}, and a folder here has that name"
        raise InputError("no-source", detail, "Name it: --source SOURCE.")
    are_here = os.path.exists(source) and os.path.exists(options.artifact)
    if are_here and os.path.samefile(source, options.artifact):
        detail = f"{source} is the artifact {options.artifact}; expected what it was made from"
        better = "Name the weights that it was made from: --source SOURCE."
        raise InputError("usage", detail, better)
    how = {
        one.name: getattr(options, one.name)
        for one in (*declared_in(AccessOptions), *declared_in(DeviceOptions))
        if one.name not in (*FILES, "revision", "subfolder", "force")
    }
    revision = None if os.path.exists(source) else origin["revision"]
    return QuantizeOptions(source, output=output, revision=revision, **{**how, **words})


def _prepare(
    asked: QuantizeOptions, is_recorded: bool, folder: Path | None, phases: Phases
) -> Work:
    """Plan the work, at the recorded commit if the source has it.

    Another repository than the recorded one is read at its main branch otherwise. Of a pipeline
    the component with the name of the artifact's folder is taken, or the only one.

    is_recorded  the source is the recorded one, which must have the commit
    """
    try:
        work = prepare(asked, phases)
    except InputError as error:
        if error.code not in ("no-revision", "no-subfolder"):
            raise
        if error.code == "no-revision" and asked.revision and not is_recorded:
            return _prepare(replace(asked, revision=None), is_recorded, folder, phases)
        better = "Name what it was made from: --source SOURCE, or --lora PATH for an adapter."
        raise InputError(error.code, error.message, better) from None
    names = [name for name in work.artifacts() if name]
    if not names:
        return work
    named = [name for name in names if folder and folder.resolve().name == name]
    if len(chosen := named or names) > 1:
        detail = f"{asked.source} is a pipeline of {' and '.join(names)}; expected one of them"
        step = f"Name it: {shell_line('--source', os.path.join(asked.source, names[0]))}"
        raise InputError("pipeline", detail, step)
    return prepare(replace(asked, subfolder=chosen[0]), phases)


def _steps(recorded: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the options of every transcode step; InputError for unknown ones."""
    steps = recorded.get(TRANSCODED, [])
    for step in steps if isinstance(steps, list) else [steps]:
        words = step if isinstance(step, dict) else {}
        if words.get("template") is True:
            detail = "it was carried into a GGUF file by transcode with a --template, of which the"
            better = "Reproduce what it was made from; then transcode that with the same file."
            raise InputError("not-reproducible", f"{detail} record has nothing", better)
        known = {"dialect", "format", "scale_layout", "keep_dtype"}
        is_known = {"dialect"} <= words.keys() <= known
        if not is_known or not all(isinstance(value, str) for value in words.values()):
            detail = f"{RECORD}: {TRANSCODED} has {str(step)[:80]!r}"
            detail = f"{detail}, which this version of transcode does not write"
            raise InputError("not-reproducible", detail, "Install the version that made it.")
    return list(steps)


def _carry_out(
    work: Work,
    steps: Sequence[Mapping[str, Any]],
    settings: Settings,
    compare: Callable[[Path, str, str], None],
) -> Path:
    """Quantize, then transcode step by step; return the last folder.

    compare  gets every file of the last step, before it is removed
    """
    last = replace(settings, elsewhere=Elsewhere("", compare), on_named=compare)
    work.carry_out(settings if steps else last)
    folder = work.options.folder
    for number, step in enumerate(steps, 1):
        output = folder.with_name(f"{number}")
        plan = prepare_transcode(
            artifact := open_artifact(os.fspath(folder)), TranscodeOptions(folder, output, **step)
        )
        transcode(artifact, plan, output, last if number == len(steps) else settings)
        shutil.rmtree(folder)
        folder = output
    return folder


def _first(value: Any) -> Any:
    """Return the first of several values; a single value as it is."""
    return value[0] if isinstance(value, tuple | list) and value else value


def _compare_file(name: str, given: Any, recorded: Any) -> None:
    """Raise InputError where a file is missing, or is not the recorded one."""
    flag, path, entry = f"--{name.replace('_', '-')}", _first(given), _first(recorded)
    if path is not None and entry is None:
        detail = f"{flag} is given, and the artifact was made without"
        raise InputError("reproduce-file", detail, "Leave it out.")
    if not isinstance(entry, dict):
        return
    sha256 = str(entry.get("sha256", ""))
    if path is None and "repo" not in entry:
        of = f" (sha256 {sha256[:12]}...)" if sha256 else ""
        detail = f"the artifact was made with a {flag} of its own{of}, which the record has not"
        raise InputError("reproduce-file", detail, f"Give it: {shell_line(flag, 'PATH')}")
    if path is None or not sha256:  # of a folder, _compare_taken compares the values
        return
    if os.path.isdir(path):
        raise InputError("reproduce-file", f"{flag} {path} is a folder; expected a file")
    if os.path.isfile(path) and (found := hash_file(Path(path))) != sha256:
        detail = f"{flag} {path} has the sha256 {found[:12]}..., not {sha256[:12]}..."
        raise InputError("reproduce-file", detail, "Give the file that it was made with.")


def _compare_taken(
    options: ReproduceOptions, recorded: Mapping[str, Any], planned: Mapping[str, Any]
) -> None:
    """Raise InputError for a folder or repository with other values.

    planned  options as they will be recorded, with hashes of the values
    """
    for name in FILES:
        then, now = _first(recorded.get(name)), _first(planned.get(name))
        if not isinstance(then, dict) or "taken" not in then:
            continue
        if not isinstance(now, dict) or now.get("taken") != then["taken"]:
            path = _first(getattr(options, name)) or then.get("repo")
            detail = f"--{name.replace('_', '-')} {path} is not the one that was used"
            more = "the values taken of it have another sha256 than the record has"
            step = "Give the one that it was made with."
            raise InputError("reproduce-file", f"{detail}: {more}", step)


def _refuse_own_weights(work: Work, options: ReproduceOptions, expected: Mapping[str, str]) -> None:
    """Raise InputError for a source that is an artifact with the same shards.

    Its blocks would be carried over, which proves nothing. Shards without such blocks are equal in
    honest artifacts, too.
    """
    shards = {
        file
        for task in work.plan.tasks
        if any(step.action == "transcode" for step in task.steps)
        for file in task.sources
    }
    ours = {sha256 for name, sha256 in expected.items() if holds_weights(name)}
    if shards and all(hash_in(work.source, shard) in ours for shard in shards):
        source = work.options.source
        detail = f"{source} has the blocks of {options.artifact}, which go over as they are"
        detail += ": equal hashes would prove nothing; expected what those were quantized from"
        better = "Name it: --source SOURCE. Whether two artifacts are equal, `compare` tells."
        raise InputError("not-reproducible", detail, better)
