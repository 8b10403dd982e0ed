"""State what an artifact was derived from; check such a statement.

derivation.json is an in-toto statement (https://in-toto.io/Statement/v1) with the predicate
https://slsa.dev/provenance/v1: the sha256 of the artifact's files, of the source's files at a
commit, the options of our record, and the package that made it. Its signature is model.sig, which
is of this file, too. deploy/check_derivation.py reads it without this package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fp4convert
from fp4convert.checkpoint.record import OPTIONS
from fp4convert.errors import InputError
from fp4convert.quality.found_artifact import hash_in
from fp4convert.storage.checkpoint_files import (
    CONFIG,
    DERIVATION,
    INDEXES,
    RECORD,
    SIGNATURE,
    UNDIGESTED,
    recorded_hashes,
)
from fp4convert.storage.disk import hash_file
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.source import Source
from fp4convert.version import __version__

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
TOOL = "pkg:pypi/fp4convert"  # a package URL, without the version


def derivation_text(record: Mapping[str, Any], record_sha256: str, source: Source) -> str:
    """Write the statement of an artifact with that record, made from a source.

    source  its files are hashed, but for large ones of the Hub, which knows their hashes
    """
    origin = _origin(record)
    uri = "{repo}@{revision}/".format(**origin) if origin["repo"] else ""
    read: list[dict[str, Any]] = [
        {"name": file, "uri": f"hf://{uri}{file}" if uri else file, "digest": {"sha256": sha256}}
        for file, sha256 in sorted(_source_hashes(source).items())
    ]
    maker = _maker(record)
    if maker == __version__:  # else another package made it
        read.append({"name": "fp4convert", "uri": f"{TOOL}@{maker}", "digest": _tool_digest()})
    external = {"source": origin, **{key: record.get(key) for key in ("format", OPTIONS)}}
    statement = {
        "_type": STATEMENT,
        "subject": [
            {"name": file, "digest": {"sha256": sha256}}
            for file, sha256 in sorted(_subjects(record, record_sha256).items())
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{TOOL}#quantize",
                "externalParameters": external,
                "resolvedDependencies": read,
            },
            "runDetails": {"builder": {"id": f"{TOOL}@{maker}", "version": {"fp4convert": maker}}},
        },
    }
    return json.dumps(statement, indent=1, ensure_ascii=False) + "\n"


def find_disagreements(
    data: bytes, record: Mapping[str, Any], record_sha256: str, source: Source
) -> Iterator[str]:
    """Name what of a statement is not so, of the artifact, its record and the source.

    Raises  InputError for another kind of file
    """
    statement: Any = parse_json_object(data, DERIVATION)
    try:
        if (statement["_type"], statement["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError("it is of another type")
        subjects = _digests(statement["subject"])
        build = statement["predicate"]["buildDefinition"]
        read = [one for one in build["resolvedDependencies"] if TOOL not in one["uri"]]
        external, sources = build["externalParameters"], _digests(read)
        origin, options = external["source"], external[OPTIONS]
        maker = statement["predicate"]["runDetails"]["builder"]["id"]
    except (KeyError, TypeError, ValueError) as error:
        detail = f"{DERIVATION} is no statement of a derivation: {error}"
        raise InputError("bad-derivation", detail) from None
    if subjects != _subjects(record, record_sha256):
        yield "files of the artifact"
    if json.dumps(options, sort_keys=True) != json.dumps(record.get(OPTIONS), sort_keys=True):
        yield OPTIONS
    if origin != _origin(record):
        yield "repository or commit"
    if maker != f"{TOOL}@{_maker(record)}":
        yield "version of fp4convert"
    if sources != _source_hashes(source):
        yield "files of the source"


def _digests(entries: list[dict[str, Any]]) -> dict[str, str]:
    return {str(entry["name"]): str(entry["digest"]["sha256"]) for entry in entries}


def _subjects(record: Mapping[str, Any], record_sha256: str) -> dict[str, str]:
    """Return the hashes of an artifact's files, as its record has them."""
    hashes = recorded_hashes(record).items()
    return {file: sha256 for file, sha256 in hashes if file not in UNDIGESTED} | {
        RECORD: record_sha256
    }


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    known = record.get("source")
    known = known if isinstance(known, dict) else {}
    return {key: known.get(key) for key in ("repo", "revision")}


def _maker(record: Mapping[str, Any]) -> str:
    producer = record.get("producer")
    return str(producer.get("version")) if isinstance(producer, dict) else ""


def _source_hashes(source: Source) -> dict[str, str]:
    """Return the hashes of weights, index, config.json and files beside them."""
    known = source.checkpoint
    files = {shard.file for shard in known.shards} | {*known.sidecars, CONFIG, *INDEXES}
    kept = files - UNDIGESTED - {SIGNATURE}
    return {file: hash_in(source, file) for file in sorted(kept) if source.has_file(file)}


def _tool_digest() -> dict[str, str]:
    """Return digests of this package: of its files, and of its wheel if pip noted that.

    dirHash  as the specification of DigestSet says, of the folder fp4convert
    """
    root = Path(fp4convert.__file__).parent
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    hashes = {f"{root.name}/{path.relative_to(root).as_posix()}": hash_file(path) for path in files}
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes, key=str.encode))
    digest = {"dirHash": hashlib.sha256(lines.encode()).hexdigest()}
    noted = metadata.distribution("fp4convert").read_text("direct_url.json")
    hashes = json.loads(noted or "{}").get("archive_info", {}).get("hashes", {})
    return {**digest, **{key: value for key, value in hashes.items() if key == "sha256"}}
