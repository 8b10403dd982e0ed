"""Bring a result where it belongs: a folder, the Hub, a page.

Shards are uploaded as they are finished, and one commit names them all when the last is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.conversion.work import Work
from fp4convert.errors import InputError
from fp4convert.execution.settings import Result, Settings
from fp4convert.execution.share import Share
from fp4convert.report.user_files import check_apart
from fp4convert.storage.checkpoint_files import CARD
from fp4convert.storage.open import open_source


@dataclass(frozen=True, slots=True)
class Publication:
    """A repository that the result goes to.

    repo   ORG/NAME
    token  the one that is logged in where it is None
    """

    repo: str
    is_private: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where the result goes beside the folder.

    page  a file of HTML; where the work makes several artifacts, each has one, with its folder in the name
    """

    publication: Publication | None = None
    page: Path | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for."""

    work: Work
    settings: Settings
    destinations: Destinations = field(default_factory=Destinations)


def choose_publication(repo: str | None, is_private: bool, token: str | None) -> Publication | None:
    """Where the options say that the result goes; InputError where they contradict one another."""
    if repo is None and is_private:
        raise InputError(
            "repo-name",
            "--private says how --push-to-hub pushes, which is not given",
            "Name it: --push-to-hub ORG/NAME.",
        )
    return None if repo is None else Publication(repo, is_private, token)


def choose_page(page: Path | None, output: Path, share: Share | None, is_dry: bool) -> Path | None:
    """The page; InputError in the output, or where nothing whole is made to show; OutputError where it cannot be written."""
    if page is not None and (is_dry or share is not None):
        made = "a dry run makes nothing" if is_dry else "a part is not the whole"
        next_step = "Afterwards: fp4convert verify OUTPUT --report FILE.html."
        raise InputError(
            "report", f"--report {page}: {made}; expected an artifact to show", next_step
        )
    if page is not None:
        from fp4convert.report.html import PAGE, check_page

        check_apart({PAGE: page}, output)
        check_page(page)
    return page


def fulfil(order: Order) -> Result:
    """Carry out the work; any number of processes may do so together.

    Raises  InputError for a part that would be pushed; what Work.carry_out, Pusher and save_page raise
    """
    publication, pages = order.destinations.publication, _pages(order)
    if pages:
        from fp4convert.report.html import check_page

        for page in pages.values():
            check_page(page)
    result = (
        order.work.carry_out(order.settings)
        if publication is None
        else _publish(order, publication)
    )
    for line in _write_pages(order.work, pages):
        order.settings.tell(line)
    return result


def _pages(order: Order) -> dict[str, Path]:
    """The page of every artifact, by its folder in the result; none where they are not asked for."""
    page = order.destinations.page
    if page is None:
        return {}
    return {
        folder: page.with_stem(f"{page.stem}-{folder}") if folder else page
        for folder in order.work.errands()
    }


def _write_pages(work: Work, pages: Mapping[str, Path]) -> Iterator[str]:
    """Lines that tell which pages were written.

    The source is opened again, for whoever converted it may have ended its reading.
    """
    for folder, page in pages.items():
        from fp4convert.report.html import save_page

        errand = work.errands()[folder]
        access = replace(
            errand.access, revision=work.source.checkpoint.revision or errand.access.revision
        )
        source, artifact = open_source(errand.reference, access), open_artifact(str(errand.output))
        yield save_page(page, artifact, source)


def _publish(order: Order, publication: Publication) -> Result:
    from fp4convert.report.model_card import CardRequest, make_card
    from fp4convert.storage.hub.upload import Pusher

    work, settings, errand = order.work, order.settings, order.work.errand
    if settings.share is not None:
        detail = f"part {settings.share.index} of {settings.share.count} cannot be pushed: one commit names all files"
        next_step = "Merge the parts; then the same command with --num-shards 1 finds everything done, and pushes it."
        raise InputError("share", detail, next_step)
    pusher = Pusher(
        publication.repo, publication.is_private, publication.token, settings.tell, work.names()
    )
    work.check(settings)
    work.begin(settings)
    try:
        pusher.begin()
        result = work.carry_out(replace(settings, named=pusher.add))
        goal_options = errand.goal.options() if errand.goal else {}
        options = {**asdict(errand.request), **goal_options, "subfolder": errand.access.subfolder}
        card = make_card(
            work.plan, result, work.source, CardRequest(publication.repo, options, _errors(result))
        )
        files = work.ended_files()
        nbytes = sum((errand.output / file).stat().st_size for file in files if file != CARD)
        settings.phases.begin("upload", nbytes + len(card.encode("utf-8", "replace")))
        return replace(
            result, pushed=pusher.commit(errand.output, files, card, settings.phases.report)
        )
    finally:
        pusher.stop()


def _errors(result: Result) -> list[tuple[object, ...]] | None:
    """The table of a card: what was lost by all tensors, of each component apart; None where nothing was rounded."""
    parts: list[tuple[str, Any]] = [("all tensors", result.fidelity)]
    parts += [(str(part["name"]), part.get("fidelity")) for part in result.components or ()]
    known = [
        (name, summary)
        for name, summary in parts
        if summary and summary["sqnr_db_mean"] is not None
    ]
    rows = [
        (name, *(summary[key] for key in ("sqnr_db_mean", "sqnr_db_min", "worst", "nmse")))
        for name, summary in known
    ]
    return [("", "SQNR, mean (dB)", "SQNR, least (dB)", "of", "NMSE"), *rows] if rows else None
