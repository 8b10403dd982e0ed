"""Write findings as SARIF 2.1.0, for code scanning.

One run: a rule for every code that occurs, in the words of catalogue.toml, and a result for every
finding.  The location of a result is the file of its tensor, else the artifact's record; the tensor
is the logical location.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.report.text import escape
from fp4convert.report.user_files import Paper, check_place, write_paper
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.disk import write_errors_at
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Source

VERSION = "2.1.0"
SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
FINGERPRINT = "codeAndTensor/v1"
_OPENING = f"""{{
  "$schema": "{SCHEMA}",
  "version": "{VERSION}",
  "runs": [
    {{
      "tool": {{
        "driver": {{
          "name": "fp4convert",
"""
SARIF = Paper("--sarif", "FILE.sarif", _OPENING)
Findings = Sequence[Mapping[str, Any]]
"""The `findings` of a document of inspect, verify or evaluate"""


def clear_sarif(path: Path) -> None:
    """Remove an earlier SARIF file, so that none is left if the run fails.

    Raises  OutputError if no file can be written there, or another file lies there
    """
    check_place(path, SARIF)
    with write_errors_at(path):
        path.unlink(missing_ok=True)


def write_sarif(path: Path, artifact: Artifact | Source, findings: Findings) -> None:
    """Write the findings on an artifact, or on another checkpoint.

    Raises  OutputError if the file cannot be written
    """
    write_paper(path, json.dumps(make_sarif(artifact, findings), indent=2) + "\n", SARIF)


def make_sarif(artifact: Artifact | Source, findings: Findings) -> dict[str, object]:
    """Return the SARIF document of the findings on an artifact."""
    import hashlib

    from fp4convert.report.text import explanations
    from fp4convert.version import __version__

    # A rule for each code.
    known = explanations("findings")
    codes = list(dict.fromkeys(str(finding["code"]) for finding in findings))
    rules = [
        {
            "id": code,
            "shortDescription": {"text": known[code]["meaning"]},
            "help": {"text": known[code]["remedy"]},
            "defaultConfiguration": {"level": known[code]["levels"][0]},
        }
        for code in codes
    ]

    # The file of every tensor and module, and the record where a finding names none of them.
    source = artifact.source if isinstance(artifact, Artifact) else artifact
    checkpoint = source.checkpoint
    files: dict[str, str] = {}  # of evaluate's findings none names a tensor
    if isinstance(artifact, Artifact):
        files |= {name: ref.file for name, ref in artifact.tensors.items()}
        files |= {module: each.refs[0].file for module, each in artifact.packed.items()}
    records = (name for name in (RECORD, "config.json") if source.has_file(name))
    record = next(records, checkpoint.shards[0].file if checkpoint.shards else RECORD)

    results = []
    for finding in findings:
        code, tensor, detail = finding["code"], finding["tensor"], finding["detail"]
        file, message, names = record, detail, {}
        if tensor is not None:
            file = files.get(tensor) or files.get(tensor.removesuffix(WEIGHT), record)
            names = {"logicalLocations": [{"fullyQualifiedName": escape(tensor)}]}
        if tensor:
            message = f"{tensor}: {detail}"
        place = {"physicalLocation": {"artifactLocation": {"uri": quote(file)}}, **names}
        fingerprint = hashlib.sha256(f"{code} {tensor}".encode()).hexdigest()
        results.append(
            {
                "ruleId": code,
                "ruleIndex": codes.index(code),
                "level": finding["level"],
                "message": {"text": escape(message)},
                "locations": [place],
                "partialFingerprints": {FINGERPRINT: fingerprint},
            }
        )
    run = {
        "tool": {"driver": {"name": "fp4convert", "version": __version__, "rules": rules}},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}
