"""push(): upload a finished artifact, with its card, in one commit."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.checkpoint.error_report import read_recorded
from fp4convert.checkpoint.soundness import refuse_unsound
from fp4convert.commands.publish import add_signatures, check_gates, error_rows
from fp4convert.errors import GateError, InputError, shell_line
from fp4convert.execution.plan_file import recorded_digest
from fp4convert.options.arguments import gates_of
from fp4convert.options.rewriting import PushOptions
from fp4convert.process import keeping_nothing
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import (
    CARD,
    PAGE,
    PLAN_FILE,
    RECORD,
    REPORT,
    SIGNATURE,
    recorded_hashes,
)
from fp4convert.storage.disk import hash_file, nbytes_there
from fp4convert.storage.json_text import parse_json_object, read_text_file

if TYPE_CHECKING:
    from fp4convert.quality.checks import Judged
    from fp4convert.quality.evaluation import EvaluationGate

RECORDED = "{}.evaluation.json"  # beside the folder of an artifact


@keeping_nothing()
def push(options: PushOptions) -> dict[str, Any]:
    """Upload a finished artifact: the command `push`.

    Every file is hashed and every scale read before anything is sent.
    Returns  what `push --json` prints
    Raises   InputError for what is no artifact of fp4convert on this disk, and for an evaluation
             of another one; GateError for a missed gate or a damaged file; errors of the Hub as
             `quantize --push-to-hub` has them
    """
    from fp4convert.quality.evaluation import EvaluationGate
    from fp4convert.quality.verification import Gate
    from fp4convert.storage.hub.upload import Pusher

    started, folder = time.monotonic(), Path(os.path.expanduser(options.artifact))
    Gate(options.min_sqnr, options.max_nmse).check(has_source=True, has_inputs=False)
    gate = EvaluationGate(options.max_kl, options.min_top1).checked()
    artifact = _open_own(folder)
    files, digest = recorded_hashes(artifact.record), str(recorded_digest(artifact.source))
    evaluated = _read_evaluation(options, folder, digest)
    recorded, _ = read_recorded(artifact)
    summary = recorded.summary if recorded else None
    check_gates(
        gates_of(options.min_sqnr, options.max_nmse), summary, f"{folder} is not pushed: its"
    )
    if gate.is_set:
        _check_evaluation(gate, evaluated, folder)
    names = [name for name in (RECORD, REPORT, PAGE) if (folder / name).is_file()]
    files |= {name: hash_file(folder / name) for name in names}
    pusher = Pusher(
        options.repo, options.private, (options.token or "").strip() or None, options.tell, files
    )
    phases = options.phases or Phases()
    card = _check_whole(artifact, options.repo, evaluated, phases)
    files = add_signatures(folder, files, [""])
    if card is None or SIGNATURE in files:  # the card in the folder, as it is signed
        card = None
        if (folder / CARD).is_file():
            files = {**files, CARD: hash_file(folder / CARD)}
    sizes = {file: nbytes_there(folder / file) or 0 for file in files}
    try:
        pusher.begin()
        phases.begin("upload", sum(sizes.values()))
        pushed = pusher.commit(folder, files, card, phases.report)
    finally:
        pusher.stop()
    ours = {CARD, PLAN_FILE.partition("/")[0], *(file.partition("/")[0] for file in files)}
    if left := sorted({each.name for each in folder.iterdir()} - ours):
        options.tell(f"not of the artifact, and not pushed: {', '.join(left)}")
    return {
        "artifact": os.fspath(folder),
        "repo": options.repo,
        "pushed": pushed,
        "digest": digest,
        "files": len(files | {CARD: ""}),
        "bytes": sum(sizes.values()),
        "evaluated": None if evaluated is None else evaluated["grade"],
        "gates": _named_gates(options),
        "seconds": round(time.monotonic() - started, 3),
    }


def _named_gates(options: PushOptions) -> list[str]:
    """Name the gates that are set."""
    given = {"--max-kl": options.max_kl, "--min-top1": options.min_top1}
    return [
        *gates_of(options.min_sqnr, options.max_nmse),
        *(name for name, limit in given.items() if limit is not None),
    ]


def _check_whole(
    artifact: Artifact, repo: str, evaluated: dict[str, Any] | None, phases: Phases
) -> str | None:
    """Check every file and scale; return the card as _make_card does.

    Raises  GateError for a finding that is an error
    """
    from fp4convert.quality.verification import Gate, verify_judged

    verified, judged = verify_judged(artifact, None, Gate(), None, phases)
    folder = artifact.source.name
    for finding in verified.findings:
        if finding.level == "error":
            detail = f"{folder} is not pushed: {finding.code}: {finding.detail}"
            step = f"See: {shell_line('fp4convert', 'verify', folder)}"
            raise GateError("not-sound", detail, step, finding.tensor)
    return _make_card(artifact, judged, repo, evaluated)


def _open_own(folder: Path) -> Artifact:
    """Open a finished artifact of fp4convert; else InputError."""
    if not folder.is_dir():
        detail = f"{folder} is no folder on this disk; expected an artifact that is finished here"
        raise InputError("not-pushable", detail)
    artifact = open_artifact(os.fspath(folder))
    refuse_unsound(artifact)
    if not recorded_hashes(artifact.record):
        detail = f"{folder} has no record of fp4convert with the hashes of its files"
        raise InputError("not-pushable", f"{detail}; expected {RECORD}")
    return artifact


def _read_evaluation(options: PushOptions, folder: Path, digest: str) -> dict[str, Any] | None:
    """Read the evaluation of the artifact, if any.

    Raises  InputError for that of another, or one without all figures
    """
    from fp4convert.quality.evaluation import EvaluationGate, UsualLoss, check_limits
    from fp4convert.report.text import evaluation_rows

    usual = folder.with_name(RECORDED.format(folder.resolve().name))
    path = usual if options.evaluation is None else Path(options.evaluation)
    if options.evaluation is None and not path.is_file():
        return None
    expected = "expected what evaluate --json printed of this artifact"
    try:
        document: dict[str, Any] = parse_json_object(read_text_file(path).encode(), str(path))
    except (OSError, ValueError, InputError) as error:
        raise InputError("bad-evaluation", f"{path}: {error}; {expected}") from None
    if "error" in document:
        detail = f"{path} holds the error of an evaluate that failed, and no figures; {expected}"
        raise InputError("bad-evaluation", detail)
    try:
        known = document["digest"]
        evaluation_rows(document)
        check_limits(document["kl"]["mean"], document["top1"], 0.0, EvaluationGate())
        UsualLoss(**(document["usual"] or dict.fromkeys(UsualLoss._fields)))
    except (KeyError, TypeError, ValueError):
        raise InputError("bad-evaluation", f"{path} has not all figures; {expected}") from None
    if known != digest:
        detail = f"{path} is of an artifact with digest {known}, and {folder} has {digest}"
        raise InputError("bad-evaluation", f"{detail}; {expected}")
    return document


def _check_evaluation(
    gate: EvaluationGate, evaluated: Mapping[str, Any] | None, folder: Path
) -> None:
    """Raise GateError where the figures of an evaluation miss a gate."""
    from fp4convert.quality.evaluation import UsualLoss, check_limits

    if evaluated is None:
        detail = f"--max-kl and --min-top1 judge an evaluation, and {folder} has none beside it"
        line = shell_line("fp4convert", "evaluate", folder, "--source", "SOURCE", "--text", "FILE")
        place = shell_line(folder.with_name(RECORDED.format(folder.resolve().name)))
        raise InputError("no-evaluation", detail, f"Make it: {line} --json > {place}")
    usual = evaluated.get("usual")
    gate = gate.resolved(UsualLoss(**usual) if usual else None)
    for finding in check_limits(evaluated["kl"]["mean"], evaluated["top1"], 0.0, gate):
        detail = f"{folder} is not pushed: {finding.detail}"
        step = "Convert it again with a text (quantize --text FILE), or take another gate."
        raise GateError("gate-missed", detail, step)


def _make_card(
    artifact: Artifact, judged: Judged, repo: str, evaluated: dict[str, Any] | None
) -> str | None:
    """Return the model card; None where the folder has one by fp4convert."""
    from fp4convert.conversion.artifact_job import own_card
    from fp4convert.quality.inspection import describe
    from fp4convert.report.evaluation_card import evaluation_in, evaluation_section
    from fp4convert.report.model_card import CardRequest, code, describe_artifact, make_card

    source, record = artifact.source, artifact.record
    if own_card(source):
        return None
    document = describe(artifact, judged)
    subject = describe_artifact(artifact, document, str(recorded_digest(source)))
    section = evaluation_in(Path(source.name) / CARD)
    if evaluated is not None:
        section = evaluation_section(evaluated, code(subject.origin))
    options = record.get("options")
    rows = error_rows([("all tensors", document.get("fidelity"))])
    made_by = CardRequest(repo, options if isinstance(options, dict) else {}, rows, section)
    return make_card(subject, source, made_by)
