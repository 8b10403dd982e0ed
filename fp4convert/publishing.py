"""Where the result of a whole `quantize` goes: a folder, and a repository on the Hub.

Shards are uploaded as they are finished, and one commit names them all when the last is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fp4convert.artifact import CARD
from fp4convert.errors import InputError
from fp4convert.job import Result
from fp4convert.pipelines import Work
from fp4convert.workers import Settings


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
class Order:
    """What is asked for; without a publication, for the folder alone."""

    work: Work
    settings: Settings
    publication: Publication | None = None


def choose_publication(repo: str | None, is_private: bool, token: str | None) -> Publication | None:
    """Where the options say that the result goes; InputError where they contradict one another."""
    if repo is None and is_private:
        raise InputError(
            "repo-name", "--private says how --push-to-hub pushes, which is not given", "Name it: --push-to-hub ORG/NAME."
        )
    return None if repo is None else Publication(repo, is_private, token)


def fulfil(order: Order) -> Result:
    """Carry out the work; any number of processes may do so together.

    Raises  InputError for a part that would be pushed; what Work.carry_out and Pusher raise
    """
    return order.work.carry_out(order.settings) if order.publication is None else _publish(order, order.publication)


def _publish(order: Order, goal: Publication) -> Result:
    from fp4convert.card import CardRequest, make_card
    from fp4convert.push import Pusher

    work, settings, errand = order.work, order.settings, order.work.errand
    if settings.share is not None:
        detail = f"part {settings.share.index} of {settings.share.count} cannot be pushed: one commit names all files"
        next_step = "Merge the parts; then the same command with --num-shards 1 finds everything done, and pushes it."
        raise InputError("share", detail, next_step)
    pusher = Pusher(goal.repo, goal.is_private, goal.token, settings.tell, work.names())
    work.check(settings)
    work.begin(settings)
    try:
        pusher.begin()
        result = work.carry_out(replace(settings, named=pusher.add))
        goal_options = errand.goal.options() if errand.goal else {}
        options = {**asdict(errand.request), **goal_options, "subfolder": errand.access.subfolder}
        card = make_card(work.plan, result, work.source, CardRequest(goal.repo, options, _errors(result)))
        files = work.ended_files()
        nbytes = sum((errand.output / file).stat().st_size for file in files if file != CARD)
        settings.phases.begin("upload", nbytes + len(card.encode("utf-8", "replace")))
        return replace(result, pushed=pusher.commit(errand.output, files, card, settings.phases.report))
    finally:
        pusher.stop()


def _errors(result: Result) -> list[tuple[object, ...]] | None:
    """The table of a card: what was lost by all tensors, of each component apart; None where nothing was rounded."""
    parts: list[tuple[str, Any]] = [("all tensors", result.fidelity)]
    parts += [(str(part["name"]), part.get("fidelity")) for part in result.components or ()]
    known = [(name, summary) for name, summary in parts if summary and summary["sqnr_db_mean"] is not None]
    rows = [(name, *(summary[key] for key in ("sqnr_db_mean", "sqnr_db_min", "worst", "nmse"))) for name, summary in known]
    return [("", "SQNR, mean (dB)", "SQNR, least (dB)", "of", "NMSE"), *rows] if rows else None
