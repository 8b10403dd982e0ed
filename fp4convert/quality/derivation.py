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
from functools import reduce
from importlib import metadata
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.record import OPTIONS
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
BUILD = ("predicate", "buildDefinition")
GIVEN = (*BUILD, "externalParameters")
PARTS = {  # of a statement, by the words for people
    "kind of statement": ("predicateType",),
    "kind of document": ("_type",),
    "kind of build": (*BUILD, "buildType"),
    "files of the artifact": ("subject",),
    "repository or commit": (*GIVEN, "source"),
    OPTIONS: (*GIVEN, OPTIONS),
    "format": (*GIVEN, "format"),
    "version of fp4convert": ("predicate", "runDetails"),
    "files of the source": (*BUILD, "resolvedDependencies"),
}


def make_statement(record: Mapping[str, Any], record_sha256: str, source: Source) -> dict[str, Any]:
    """Make the statement of an artifact with that record, made from a source.

    source  its files are hashed, but for large ones of the Hub, which knows their hashes
    """
    origin = {key: _entry(record, "source").get(key) for key in ("repo", "revision")}
    begin = "hf://{repo}@{revision}/".format(**origin) if origin["repo"] else ""
    version = _entry(record, "producer").get("version")
    made = recorded_hashes(record) | {RECORD: record_sha256}
    read = [one | {"uri": begin + one["name"]} for one in _described(_source_hashes(source))]
    if version == __version__:  # else another package made it
        read.append({"name": "fp4convert", "uri": f"{TOOL}@{version}", "digest": _tool_digest()})
    given = {"source": origin, "format": record.get("format"), OPTIONS: record.get(OPTIONS)}
    return {
        "_type": STATEMENT,
        "subject": _described(made),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{TOOL}#quantize",
                "externalParameters": given,
                "resolvedDependencies": read,
            },
            "runDetails": {
                "builder": {"id": f"{TOOL}@{version}", "version": {"fp4convert": version}}
            },
        },
    }


def find_disagreements(
    data: bytes, record: Mapping[str, Any], record_sha256: str, source: Source
) -> Iterator[str]:
    """Name the parts of a statement that artifact, record and source deny."""
    stated = parse_json_object(data, DERIVATION)
    truth = make_statement(record, record_sha256, source)
    for words, path in PARTS.items():
        if _part(stated, path) != _part(truth, path):
            yield words


def _entry(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _part(statement: Any, path: tuple[str, ...]) -> str:
    """Return a part as JSON, where 1 and true differ, without the package."""
    part = reduce(lambda at, key: at.get(key) if isinstance(at, dict) else None, path, statement)
    listed = part if isinstance(part, list) else []
    kept = [one for one in listed if not isinstance(one, dict) or one.get("name") != "fp4convert"]
    return json.dumps(kept if isinstance(part, list) else part, sort_keys=True)


def _described(hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    kept = sorted((file, hashes[file]) for file in hashes if file not in UNDIGESTED)
    return [{"name": file, "digest": {"sha256": sha256}} for file, sha256 in kept]


def _source_hashes(source: Source) -> dict[str, str]:
    """Return the hashes of weights, index, config.json and files beside them."""
    known = source.checkpoint
    files = {shard.file for shard in known.shards} | {*known.sidecars, CONFIG, *INDEXES}
    files -= {SIGNATURE, *UNDIGESTED}
    return {file: hash_in(source, file) for file in files if source.has_file(file)}


def _tool_digest() -> dict[str, str]:
    """Return digests of this package: its files, its wheel if pip noted it.

    dirHash  as the specification of DigestSet says, of the folder fp4convert
    """
    root = Path(__file__).parents[1]
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    hashes = {f"{root.name}/{path.relative_to(root).as_posix()}": hash_file(path) for path in files}
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes, key=str.encode))
    digest = {"dirHash": hashlib.sha256(lines.encode()).hexdigest()}
    noted = metadata.distribution("fp4convert").read_text("direct_url.json")
    hashes = json.loads(noted or "{}").get("archive_info", {}).get("hashes", {})
    return {**digest, **{key: value for key, value in hashes.items() if key == "sha256"}}
