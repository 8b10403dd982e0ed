"""Run one worker on every node of a Ray cluster.

The output folder is on a disk that all nodes share, and fp4convert is installed on each.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fp4convert.conversion.quantization import begin_quantize, prepare_quantize, quantize
from fp4convert.conversion.requests import Goal, Request
from fp4convert.errors import DeviceError, Fp4Error, InputError
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.plan_file import TaskFiles
from fp4convert.execution.settings import Result, Settings
from fp4convert.planning.activation_scales import whole_reference
from fp4convert.planning.steps import Plan
from fp4convert.recipes.rules import FormatRule
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access, Source

LOOK_SECONDS = 1.0
LATE_SECONDS = 30.0  # for the others, once one worker has seen the end
LEAVE_SECONDS = 4.0  # for workers to drop their claims, also on busy cores
CONNECT_SECONDS = 5.0
OLDEST = (2, 50)
CARRIED = (
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
)  # of this process's variables; Ray shows them to everybody, so the token goes another way


@dataclass(frozen=True, slots=True)
class Errand:
    """What every worker is sent to do: `quantize`, together with all others.

    reference  the source, as every node finds it
    device     as Settings has it, and workers, too
    goal       what the artifact should come to; None for what comes of it
    formats    of modules, chosen to meet it
    """

    reference: str
    access: Access
    request: Request
    output: Path
    device: str = "auto"
    workers: int = 0
    goal: Goal | None = None
    formats: tuple[FormatRule, ...] = ()

    def __call__(self) -> Result | dict[str, Any]:
        """The result of the whole, or what went wrong, in words that travel."""
        try:
            source = open_source(self.reference, self.access)
            settings = Settings(self.device, self.workers, is_joining=True)
            return quantize(
                source, prepare_quantize(source, self.request, self.formats), self.output, settings
            )
        except Fp4Error as error:
            return {
                "kind": type(error).__name__,
                "said": (error.code, error.lines, error.next_step, error.tensor),
            }


def quantize_together(
    address: str, errand: Errand, source: Source, plan: Plan, settings: Settings
) -> Result:
    """Carry out a plan of prepare_quantize by workers on all nodes; this process begins the folder, and watches.

    errand    `source` is what it names
    settings  of this process
    Raises  InputError where Ray is not there; DeviceError where every worker is lost; what quantize raises
    """
    with (
        redirect_stdout(sys.stderr),
        _connected(address) as ray,
    ):  # Ray prints what its nodes have to say
        folder = begin_quantize(source, plan, errand.output, settings)
        settings.phases.begin("quantize", plan.source_bytes)
        watch = _Watch(folder, plan, settings)
        workers = dict(_start(ray, _sent(errand, source)))
        results, refused = _wait_for(ray, workers, watch)
    if results:
        return replace(max(results, key=lambda result: result.seconds), output=str(errand.output))
    if refused:
        raise _as_error(refused[0])
    raise DeviceError(
        "workers-lost",
        f"every worker on {address} is lost",
        "Run the same command again: what is finished stays.",
    )


def check_cluster(address: str) -> None:
    """Nothing; raises InputError where no cluster answers there."""
    with redirect_stdout(sys.stderr), _connected(address):
        pass


def _sent(errand: Errand, source: Source) -> Errand:
    """The errand as it means the same on every node: whole paths, the commit that was found, nothing that prints."""
    checkpoint = source.checkpoint
    reference = errand.reference if checkpoint.repo else str(Path(errand.reference).absolute())
    token = errand.access.token or (os.environ.get("HF_TOKEN") if checkpoint.repo else None)
    access = replace(
        errand.access, revision=checkpoint.revision, token=token, tell=Access().tell, output=None
    )
    statistics = errand.request.calibration
    scales = whole_reference(errand.request.input_scale)
    request = replace(
        errand.request,
        calibration=str(Path(statistics).absolute()) if statistics else None,
        input_scale=scales,
    )
    return replace(
        errand, reference=reference, access=access, request=request, output=errand.output.absolute()
    )


class _Watch:
    """Tells what all workers have finished, by what is in the folder."""

    def __init__(self, folder: OutputFolder, plan: Plan, settings: Settings) -> None:
        self._folder = folder
        self._left = {task.key: task for task in plan.tasks}
        self._settings = settings
        self.tell = settings.tell

    def look(self) -> None:
        for task in list(self._left.values()):
            done = self._folder.record_of(TaskFiles.of(task))
            if done is None:
                continue
            del self._left[task.key]
            for file, sha256 in done.files.items():
                self._settings.named(self._folder.root / file, file, sha256)
            for step in task.steps:
                self._settings.phases.report(step.name, step.source_bytes)


def _wait_for(
    ray: ModuleType, workers: dict[Any, str], watch: _Watch
) -> tuple[list[Result], list[dict[str, Any]]]:
    """What the workers returned, and what those that could not go on said; the lost are neither."""
    results: list[Result] = []
    refused: list[dict[str, Any]] = []
    until = float("inf")
    try:
        while workers and time.monotonic() < until:
            ended = _ended(ray, workers)
            for worker in ended:
                node = workers.pop(worker)
                outcome = _outcome(ray, worker)
                if isinstance(outcome, Result):
                    results.append(outcome)
                    until = time.monotonic() + LATE_SECONDS
                elif isinstance(outcome, dict):
                    refused.append(outcome)
                    watch.tell(f"the worker on {node} ended: {outcome['said'][1]}")
                else:
                    watch.tell(f"the worker on {node} is lost ({outcome}); the others do its work")
            watch.look()
    finally:
        for worker in workers:
            ray.cancel(worker)
        if workers:
            ray.wait(list(workers), num_returns=len(workers), timeout=LEAVE_SECONDS)
    return results, refused


def _ended(ray: ModuleType, workers: dict[Any, str]) -> list[Any]:
    """The next worker that has ended, or nothing for a second."""
    try:
        return list(ray.wait(list(workers), num_returns=1, timeout=LOOK_SECONDS)[0])
    except Exception as error:
        stop = error.__cause__  # Ray wraps what our handlers of signals raise
        raise stop if stop is not None and not isinstance(stop, Exception) else error from None


def _outcome(ray: ModuleType, worker: Any) -> object:
    """What a worker returned; in a word, how it was lost."""
    try:
        return ray.get(worker)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        return type(cause or error).__name__


def _start(ray: ModuleType, errand: Errand) -> Iterator[tuple[Any, str]]:
    """(worker, name of its node) on every node that has a processor."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in _nodes(ray):
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        needs = {"num_cpus": 1, "num_gpus": node["Resources"].get("GPU", 0), "max_retries": 0}
        yield (
            ray.remote(_run).options(**needs, scheduling_strategy=place).remote(errand),
            node["NodeManagerHostname"],
        )


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """The nodes that live and have a processor."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _run(errand: Errand) -> Result | dict[str, Any]:
    return errand()


def _as_error(outcome: dict[str, Any]) -> Fp4Error:
    import fp4convert.errors

    error: Fp4Error = getattr(fp4convert.errors, outcome["kind"])(*outcome["said"])
    return error


@contextmanager
def _connected(address: str) -> Iterator[ModuleType]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("ray")
    except PackageNotFoundError:
        raise InputError(
            "no-ray",
            "--ray needs Ray, which is not installed",
            "Install it: pip install 'fp4convert[ray]'.",
        ) from None
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise InputError(
            "no-ray",
            f"Ray is {found}; expected 2.50 or newer, as on the cluster",
            "pip install 'fp4convert[ray]'.",
        )
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # where nothing listens, Ray waits for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        there = {"env_vars": {name: os.environ[name] for name in CARRIED if name in os.environ}}
        ray.init(
            address=address,
            runtime_env=there,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            "no-ray", f"no Ray cluster answers at {address}: {reason}", "Look for it: ray status."
        ) from None
    try:
        if not _nodes(ray):
            raise InputError(
                "no-ray",
                f"the Ray cluster at {address} has no node with a processor to spare",
                "Look: ray status.",
            )
        yield ray
    finally:
        ray.shutdown()
