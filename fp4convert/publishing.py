"""A whole `quantize`: by this process or by a cluster, and where its result goes: a folder, and a repository on the Hub.

Shards are uploaded as they are finished, and one commit names them all when the last is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from fp4convert.artifact import CARD
from fp4convert.backends import open_backend
from fp4convert.cluster import Errand, quantize_together
from fp4convert.convert import begin_quantize, name_files, quantize
from fp4convert.errors import InputError
from fp4convert.job import Result
from fp4convert.manifest import read_ended
from fp4convert.sources import Source
from fp4convert.tasks import Plan
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
    """What is asked for.

    ray          address of the cluster that does it; None for this process
    publication  None for the folder alone
    """

    errand: Errand
    settings: Settings
    ray: str | None = None
    publication: Publication | None = None


def choose_publication(repo: str | None, is_private: bool, token: str | None) -> Publication | None:
    """Where the options say that the result goes; InputError where they contradict one another."""
    if repo is None and is_private:
        raise InputError(
            "repo-name", "--private says how --push-to-hub pushes, which is not given", "Name it: --push-to-hub ORG/NAME."
        )
    return None if repo is None else Publication(repo, is_private, token)


def fulfil(order: Order, source: Source, plan: Plan) -> Result:
    """Carry out a plan of prepare_quantize; any number of processes may do so together.

    Raises  InputError for a part that would be pushed; what convert.quantize, quantize_together and Pusher raise
    """

    def work(settings: Settings) -> Result:
        if order.ray is None:
            return quantize(source, plan, order.errand.output, settings)
        return quantize_together(order.ray, order.errand, source, plan, settings)

    if order.publication is None:
        return work(order.settings)
    return _publish(order, source, plan, work)


def _publish(order: Order, source: Source, plan: Plan, work: Callable[[Settings], Result]) -> Result:
    from fp4convert.card import CardRequest, make_card
    from fp4convert.push import Pusher

    goal, errand, settings = order.publication or Publication(""), order.errand, order.settings
    if settings.share is not None:
        detail = f"part {settings.share.index} of {settings.share.count} cannot be pushed: one commit names all files"
        next_step = "Merge the parts; then the same command with --num-shards 1 finds everything done, and pushes it."
        raise InputError("share", detail, next_step)
    pusher = Pusher(goal.repo, goal.is_private, goal.token, settings.tell, name_files(source, plan))
    if order.ray is None:
        open_backend(settings.device)
    begin_quantize(source, plan, errand.output, settings)
    try:
        pusher.begin()
        result = work(replace(settings, named=pusher.add))
        options = {**asdict(errand.request), "subfolder": errand.access.subfolder}
        card = make_card(plan, result, source, CardRequest(goal.repo, options))
        _, files = read_ended(errand.output)
        nbytes = sum((errand.output / file).stat().st_size for file in files if file != CARD)
        settings.phases.begin("upload", nbytes + len(card.encode("utf-8", "replace")))
        return replace(result, pushed=pusher.commit(errand.output, files, card, settings.phases.report))
    finally:
        pusher.stop()
