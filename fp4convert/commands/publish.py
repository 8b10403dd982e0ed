"""Write a result to a folder, the Hub and a page; hold gates against it.

Shards are uploaded as they are finished, and one commit names them all when the last is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.conversion.work import Work
from fp4convert.errors import GateError, InputError, shell_line
from fp4convert.execution.job import list_peaks
from fp4convert.execution.output_check import free_beside
from fp4convert.execution.settings import Elsewhere, Result, Settings
from fp4convert.options.access import as_nbytes
from fp4convert.options.arguments import gates_of
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.tensor_parallel import pad_as_recorded
from fp4convert.report.user_files import check_apart
from fp4convert.storage.checkpoint_files import CARD, DERIVATION, SIGNATURE
from fp4convert.storage.disk import hash_file, nbytes_there
from fp4convert.storage.open import open_source

if TYPE_CHECKING:  # what only a push loads
    from fp4convert.storage.hub.upload import Pusher


def check_destinations(options: QuantizeOptions, settings: Settings, is_dry: bool) -> None:
    """Check the gates, the Hub, the disk and the page, before any work."""
    share = settings.share
    if gates := gates_of(options.min_sqnr, options.max_nmse):
        from fp4convert.quality.verification import Gate

        Gate(options.min_sqnr, options.max_nmse).check(has_source=True, has_inputs=False)
        if share is not None:
            detail = f"{next(iter(gates))}: a part is not the whole; expected all shards"
            step = "After the merge: fp4convert verify OUTPUT --source SOURCE has these gates."
            raise InputError("share", detail, step)
    for flag, is_given in (("--private", options.private), ("--no-keep", options.no_keep)):
        if is_given and options.push_to_hub is None:
            detail = f"{flag} needs --push-to-hub, which is not given"
            raise InputError("repo-name", detail, "Name it: --push-to-hub ORG/NAME.")
    if options.no_keep and (options.join or options.ray):
        flag = "--join" if options.join else "--ray"
        detail = f"--no-keep with {flag}: shards leave the folder that several processes share"
        raise InputError("no-keep", f"{detail}; expected one process", f"Leave {flag} out.")
    if options.disk is not None and not (options.no_keep and 0 < options.disk < math.inf):
        fault = " is for --no-keep, which is not given"
        if options.no_keep:
            fault = ": expected a number of GB above 0"
        detail = f"--disk {options.disk:g}{fault}"
        raise InputError("no-keep", detail, "See: fp4convert quantize --help.")
    if options.push_to_hub is not None:
        make_pusher(options, settings, [])
    if options.report is None:
        return
    page = Path(options.report)
    if options.no_keep:
        words = ("fp4convert", "verify", str(options.push_to_hub), "--source", options.source)
        detail = f"--report {page}: with --no-keep no artifact is left here to show"
        step = f"Afterwards: {shell_line(*words)} --report FILE.html"
        raise InputError("report", detail, step)
    if is_dry or share is not None:
        fault = "a dry run makes nothing" if is_dry else "a part is not the whole"
        detail = f"--report {page}: {fault}; expected an artifact to show"
        step = "Afterwards: fp4convert verify OUTPUT --report FILE.html."
        raise InputError("report", detail, step)
    _check_page(page, options.folder)


def _check_page(page: Path, folder: Path | None) -> None:
    """Check the place of a page, in a folder that may be missing yet."""
    from fp4convert.report.html import PAGE, check_page

    check_apart({PAGE: page}, folder)
    if folder is None or folder.exists() or page.parent.resolve() != folder.resolve():
        check_page(page)


def carry_out(work: Work, settings: Settings) -> Result:
    """Carry out the work; push the result and write its pages."""
    # The page of every artifact, by its folder in the result.
    pages: dict[str, Path] = {}
    if work.options.report is not None:
        from fp4convert.report.html import save_page

        page = Path(work.options.report)
        is_inside = page.parent.resolve() == work.options.folder.resolve()
        for folder, part in work.artifacts().items():
            other = part.folder / page.name
            other = other if is_inside else page.with_stem(f"{page.stem}-{folder}")
            pages[folder] = other if folder else page
            _check_page(pages[folder], part.folder)
    is_pushed = work.options.push_to_hub is not None
    result = _publish(work, settings) if is_pushed else work.carry_out(settings)
    # The source is opened again: the conversion may have ended its reading.
    for folder, page in pages.items():
        options = work.artifacts()[folder]
        access = options.access(options.folder)
        access = replace(access, revision=work.source.checkpoint.revision or access.revision)
        artifact = open_artifact(str(options.folder))
        source = pad_as_recorded(artifact.record, open_source(os.fspath(options.source), access))
        settings.tell(save_page(page, artifact, source))
    if not is_pushed:
        _check_result(work.options, result)
    return result


def check_gates(gates: Mapping[str, float], summary: object, place: str) -> None:
    """Raise GateError where the worst tensor misses a gate.

    summary  of quantization_report.json; anything without a least SQNR has nothing that was rounded
    place    begins the message, as in "X is whole, and its"
    Formula  SQNR = 10 log10(signal / noise), NMSE = noise / signal: the same tensor is the worst
    """
    least = summary.get("sqnr_db_min") if isinstance(summary, dict) else None
    if not isinstance(summary, dict) or least is None:
        return
    nmse, worst = 10 ** (-least / 10), str(summary.get("worst"))
    for option, limit in gates.items():
        if least < limit if option == "--min-sqnr" else nmse > limit:
            detail = f"{place} tensor {worst} has SQNR {least:.3f} dB, NMSE {nmse:.3g}"
            step = "Exclude that module, or choose another method or format; the same command"
            step = f"{step} without {option} accepts it."
            raise GateError("gate-missed", f"{detail}; expected {option} {limit:g}", step, worst)


def _check_result(options: QuantizeOptions, result: Result) -> None:
    """Raise GateError where a result misses a gate."""
    place = f"{options.folder} is whole, and its"
    if options.push_to_hub is not None:
        place = f"nothing is committed to {options.push_to_hub}: the"
    gates = gates_of(options.min_sqnr, options.max_nmse)
    for summary in (result.fidelity, *(part.get("fidelity") for part in result.components or ())):
        check_gates(gates, summary, place)
    if gates:
        met = " and ".join(f"{option} {limit:g}" for option, limit in gates.items())
        options.tell(f"gates: every tensor meets {met}")


def make_pusher(options: QuantizeOptions, settings: Settings, names: Iterable[str]) -> Pusher:
    """Return the uploader of files; InputError for a part of a result.

    Raises  what Pusher raises: AccessError without a token
    """
    from fp4convert.storage.hub.upload import Pusher

    if (share := settings.share) is not None:
        detail = f"part {share.index} of {share.count} cannot be pushed: one commit names all files"
        step = "Merge the parts; then the same command with --num-shards 1 pushes them."
        raise InputError("share", detail, step)
    repo = str(options.push_to_hub)
    return Pusher(repo, options.private, options.known_token, settings.tell, names)


def leaving(work: Work, settings: Settings, pusher: Pusher) -> Settings:
    """Return how to work with --no-keep; InputError if --disk is too small.

    As many shards are begun at once as have room, but at least one: a full disk is refused later.
    """
    options = work.options
    if not options.no_keep:
        return settings
    peaks = list_peaks(work.jobs().values(), settings.shards_at_once)
    there = [Path(place, file) for place, _, files in os.walk(options.folder) for file in files]
    room = free_beside(options.folder) + sum(nbytes_there(path) or 0 for path in there)
    if options.disk is not None:
        given = as_nbytes(options.disk, "disk")
        if given < peaks[0]:
            detail = f"--disk {options.disk:g}: the largest shard and all small files together"
            step = f"Give at least --disk {math.ceil(peaks[0] / 1e6) / 1e3:g}."
            raise InputError("no-keep", f"{detail} need {peaks[0]:,} bytes", step)
        room = min(room, given)
    return replace(
        settings,
        elsewhere=Elsewhere(pusher.repo, pusher.send, pusher.find_lost),
        at_once=max(1, sum(peak <= room for peak in peaks)),
    )


def _publish(work: Work, settings: Settings) -> Result:
    """Carry out the work and upload its result, in one commit."""
    from fp4convert.report.evaluation_card import evaluation_in
    from fp4convert.report.model_card import CardRequest, describe_plan, make_card
    from fp4convert.storage.hub.api import cannot_read

    options, repo = work.options, str(work.options.push_to_hub)
    pusher = make_pusher(options, settings, work.names())
    work.check(settings)
    settings = leaving(work, settings, pusher)
    work.check_output(settings)
    try:
        pusher.begin()
        work.begin(settings)  # nothing is written or replaced before the Hub lets us write
        result = work.carry_out(replace(settings, on_named=pusher.add))
        _check_result(options, result)
        files, card = work.ended_files(), None
        try:
            files = add_signatures(options.folder, files, work.artifacts())
            if SIGNATURE not in files:
                evaluated = evaluation_in(options.folder / CARD)
                by = options.that_make_bytes()
                made_by = CardRequest(repo, by, _fidelity_rows(result), evaluated)
                subject = describe_plan(work.plan, result, work.source)
                card = make_card(subject, work.source, made_by)
        except OSError as error:  # of this disk, or of the source's own card
            raise cannot_read(error) from None
        sizes = {file: nbytes_there(options.folder / file) for file in files}
        gone = {}
        if options.no_keep:
            planned = {
                f"{place}/{file}" if place else file: nbytes
                for place, job in work.jobs().items()
                for task in job.tasks
                if task.may_leave
                for file, nbytes in task.files.items()
            }
            gone = {file: planned[file] for file in planned.keys() & files if sizes[file] is None}
        sizes |= gone
        if card is not None:
            sizes[CARD] = len(card.encode("utf-8", "replace"))
        settings.phases.begin("upload", sum(nbytes or 0 for nbytes in sizes.values()))
        report = settings.phases.report
        pushed = pusher.commit(options.folder, files, card, report, gone)
        return replace(result, pushed=pushed, hub_bytes=sum(gone.values()) or None)
    finally:
        pusher.stop()


def add_signatures(folder: Path, files: dict[str, str], artifacts: Iterable[str]) -> dict[str, str]:
    """Add the signatures beside the files, and card and statement they sign.

    artifacts  folders of artifacts in it; "" for itself
    Raises     InputError for a signature of other files than those beside it
    """
    for part in sorted({"", *artifacts}, reverse=True):  # inner folders first
        place = folder / part / SIGNATURE
        if not place.is_file():
            continue
        from fp4convert.quality.signature import read_statement

        begin = f"{part}/" if part else ""
        for name in (CARD, DERIVATION):
            if (folder / part / name).is_file():
                files = {**files, f"{begin}{name}": hash_file(folder / part / name)}
        beside = {
            file.removeprefix(begin): sha256
            for file, sha256 in files.items()
            if file.startswith(begin)
        }
        signed = read_statement(place.read_bytes()).files
        odd = sorted(name for name in {*beside, *signed} if beside.get(name) != signed.get(name))
        if odd:
            detail = f"{place} does not sign what is pushed, {odd[0]!r} first"
            again = shell_line("fp4convert", "attest", place.parent, "--force", "--key", "FILE")
            raise InputError(
                "signature-stale", f"{detail}; expected these files", f"Sign it again: {again}"
            )
        files = {**files, f"{begin}{SIGNATURE}": hash_file(place)}
    return files


def _fidelity_rows(result: Result) -> list[tuple[object, ...]] | None:
    """Tabulate the losses for the model card, a row for each component."""
    parts: list[tuple[str, Any]] = [("all tensors", result.fidelity)]
    parts += [(str(part["name"]), part.get("fidelity")) for part in result.components or ()]
    return error_rows(parts)


def error_rows(parts: Iterable[tuple[str, Any]]) -> list[tuple[object, ...]] | None:
    """Tabulate losses, a row for each summary; None if nothing was rounded."""
    rows: list[tuple[object, ...]] = [
        (name, *(summary[key] for key in ("sqnr_db_mean", "sqnr_db_min", "worst", "nmse")))
        for name, summary in parts
        if summary and summary["sqnr_db_mean"] is not None
    ]
    return [("", "SQNR, mean (dB)", "SQNR, least (dB)", "of", "NMSE"), *rows] if rows else None
