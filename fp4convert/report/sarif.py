"""Write findings as SARIF 2.1.0, for code scanning.

One run: a rule for each code that occurs, in the words of catalogue.toml, and a result for each finding.  A result stands at
the file of the artifact that holds its tensor, else at the artifact's record; the tensor is its logical location.
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
from fp4convert.storage.disk import told
from fp4convert.storage.safetensors import WEIGHT

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
"""The `findings` of a document of inspect or verify"""


def clear_sarif(path: Path) -> None:
    """Remove an earlier SARIF file, which would stand for this run if it failed.

    Raises  OutputError where no file can be written there, or where something else lies
    """
    check_place(path, SARIF)
    with told(path):
        path.unlink(missing_ok=True)


def write_sarif(path: Path, artifact: Artifact, findings: Findings) -> None:
    """Write the findings on an artifact; OutputError where they cannot be written."""
    write_paper(path, json.dumps(make_sarif(artifact, findings), indent=2) + "\n", SARIF)


def make_sarif(artifact: Artifact, findings: Findings) -> dict[str, object]:
    """The document."""
    import hashlib
    from importlib.metadata import version

    codes = list(dict.fromkeys(str(finding["code"]) for finding in findings))
    driver = {
        "name": "fp4convert",
        "version": version("fp4convert"),
        "rules": [_rule(code) for code in codes],
    }
    place = _Places(artifact)
    results = [
        {
            "ruleId": finding["code"],
            "ruleIndex": codes.index(finding["code"]),
            "level": finding["level"],
            "message": {"text": _message(finding)},
            "locations": [place.of(finding["tensor"])],
            "partialFingerprints": {
                FINGERPRINT: hashlib.sha256(
                    f"{finding['code']} {finding['tensor']}".encode()
                ).hexdigest()
            },
        }
        for finding in findings
    ]
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _rule(code: str) -> dict[str, object]:
    from fp4convert.report.explanations import explanations

    known = explanations("findings")[code]
    told = {"shortDescription": {"text": known["meaning"]}, "help": {"text": known["remedy"]}}
    return {"id": code, **told, "defaultConfiguration": {"level": known["levels"][0]}}


def _message(finding: Mapping[str, Any]) -> str:
    where = f"{finding['tensor']}: " if finding["tensor"] else ""
    return escape(f"{where}{finding['detail']}")


class _Places:
    """Where the tensors and modules of an artifact lie."""

    def __init__(self, artifact: Artifact) -> None:
        checkpoint = artifact.source.checkpoint
        self._files = {name: ref.file for name, ref in artifact.tensors.items()}
        self._files |= {module: each.refs[0].file for module, each in artifact.packed.items()}
        records = (name for name in (RECORD, "config.json") if artifact.source.has_file(name))
        self._record = next(records, checkpoint.shards[0].file if checkpoint.shards else RECORD)

    def of(self, tensor: str | None) -> dict[str, object]:
        """The location of a tensor of the artifact, or of the source, by its name; that of the artifact itself for None."""
        if tensor is None:
            return {"physicalLocation": {"artifactLocation": {"uri": quote(self._record)}}}
        file = self._files.get(tensor) or self._files.get(tensor.removesuffix(WEIGHT), self._record)
        return {
            "physicalLocation": {"artifactLocation": {"uri": quote(file)}},
            "logicalLocations": [{"fullyQualifiedName": escape(tensor)}],
        }
