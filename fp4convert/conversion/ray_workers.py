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
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fp4convert.conversion.quantize import prepare_quantize, quantize
from fp4convert.conversion.request import source_as_asked, take_apart
from fp4convert.errors import DeviceError, Fp4Error, InputError, describe_missing, install_line
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import Job, begin
from fp4convert.execution.plan_file import TaskFiles
from fp4convert.execution.settings import Result, Settings
from fp4convert.options.access import ignore
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.activation_scales import whole_reference
from fp4convert.planning.plan import Plan
from fp4convert.planning.steps import Task
from fp4convert.recipes.options import Reference
from fp4convert.recipes.rules import FormatRule
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Source

LOOK_SECONDS = 1.0
LATE_SECONDS = 30.0  # for the others, once one worker has seen the end
LEAVE_SECONDS = 4.0  # for workers to drop their leases, also on busy cores
CONNECT_SECONDS = 5.0
OLDEST = (2, 50)
# of this process's variables; Ray shows them to everybody, so the token goes another way
CARRIED = ("HF_ENDPOINT", "HF_HUB_OFFLINE")
Order = tuple[QuantizeOptions, tuple[FormatRule, ...]]
"""What work_on_node takes."""


def work_on_node(
    options: QuantizeOptions, formats: tuple[FormatRule, ...]
) -> Result | dict[str, Any]:
    """Convert together with all other nodes.

    formats  of modules, chosen to meet a size: a worker measures nothing
    Returns  the result of the whole, or an error in words
    """
    try:
        source = open_source(os.fspath(options.source), options.access())
        source = source_as_asked(source, options)
        settings = Settings(options.device, options.workers, is_joining=True)
        request = take_apart(source, options)
        plan = prepare_quantize(request, formats)
        return quantize(request.source, plan, options.folder, settings)
    except Fp4Error as error:
        return {
            "kind": type(error),
            "said": (error.code, error.lines, error.next_step, error.tensor),
        }


def quantize_together(
    address: str, order: Order, job: Job, output: Path, settings: Settings
) -> Result:
    """Carry out a job by workers on all nodes.

    This process begins the folder, and watches.

    order     what the job is planned from, as it means the same on every node
    settings  of this process
    Raises    InputError where Ray is not there; DeviceError where every worker is lost; what
              quantize raises
    """
    # Ray prints what its nodes have to say.
    with redirect_stdout(sys.stderr), _connected(address) as ray:
        folder = begin(job, output, settings)
        settings.phases.begin("quantize", job.plan.source_bytes)
        workers = dict(_start(ray, order))
        results, refused = _wait_for(ray, workers, folder, job.plan, settings)
    if results:
        last = max(results, key=lambda result: result.seconds)
        return replace(last, output=str(output))
    if refused:
        error: Fp4Error = refused[0]["kind"](*refused[0]["said"])
        raise error
    raise DeviceError(
        "workers-lost",
        f"every worker on {address} is lost",
        "Run the same command again: what is finished is kept.",
    )


def options_for_nodes(options: QuantizeOptions, source: Source) -> QuantizeOptions:
    """Return the options as they mean the same on every node.

    Paths are whole, the commit is the one that was found, and nothing prints.
    """
    checkpoint, reference = source.checkpoint, os.fspath(options.source)
    file, token = options.calibration, options.known_token

    def whole(reference: Reference | None) -> str | None:
        return None if reference is None else str(whole_reference(os.fspath(reference)))

    return replace(
        options,
        source=reference if checkpoint.repo else str(Path(reference).absolute()),
        output=options.folder.absolute(),
        revision=checkpoint.revision,
        token=token or (os.environ.get("HF_TOKEN") if checkpoint.repo else None),
        calibration=None if file is None else str(Path(file).absolute()),
        input_scale=whole_reference(options.input_scale),
        global_scale=whole(options.global_scale),
        base=whole(options.base),
        tell=ignore,
        phases=None,
        warn=None,
    )


def import_ray() -> ModuleType:
    """Import Ray; InputError where it is missing or too old."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "no-ray", *describe_missing("--ray needs the package ray", "ray")
        ) from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        detail = f"Ray is {ray.__version__}; expected 2.50 or newer, as on the cluster"
        raise InputError("no-ray", detail, f"Install a newer one: {install_line('ray')}")
    package: ModuleType = ray
    return package


def check_cluster(address: str) -> None:
    """Raise InputError where no cluster answers there."""
    with redirect_stdout(sys.stderr), _connected(address):
        pass


def _wait_for(
    ray: ModuleType, workers: dict[Any, str], folder: OutputFolder, plan: Plan, settings: Settings
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Wait for the workers; return their results and their errors.

    A worker that is lost gives neither.  Meanwhile every task is reported whose record is in the
    folder, whoever did it.
    """
    left = {task.key: task for task in plan.tasks}
    results: list[Result] = []
    refused: list[dict[str, Any]] = []
    until = float("inf")
    try:
        while workers and time.monotonic() < until:
            ended = _ended(ray, workers)
            for worker in ended:
                node = workers.pop(worker)
                try:
                    outcome = ray.get(worker)
                except ray.exceptions.RayError as error:
                    outcome = type(getattr(error, "cause", None) or error).__name__
                if isinstance(outcome, Result):
                    results.append(outcome)
                    until = time.monotonic() + LATE_SECONDS
                elif isinstance(outcome, dict):
                    refused.append(outcome)
                    settings.tell(f"the worker on {node} ended: {outcome['said'][1]}")
                else:
                    settings.tell(
                        f"the worker on {node} is lost ({outcome}); the others do its work"
                    )
            _report_finished(folder, left, settings)
    finally:
        for worker in workers:
            ray.cancel(worker)
        if workers:
            ray.wait(list(workers), num_returns=len(workers), timeout=LEAVE_SECONDS)
    return results, refused


def _report_finished(folder: OutputFolder, left: dict[str, Task], settings: Settings) -> None:
    """Report and drop the tasks, by key, that have a record in the folder now."""
    for task in list(left.values()):
        done = folder.record_of(TaskFiles.of(task))
        if done is None:
            continue
        del left[task.key]
        for file, sha256 in done.files.items():
            settings.on_named(folder.root / file, file, sha256)
        for step in task.steps:
            settings.phases.report(step.name, step.source_bytes)


def _ended(ray: ModuleType, workers: dict[Any, str]) -> list[Any]:
    """Wait a second for the next worker that ends."""
    try:
        return list(ray.wait(list(workers), num_returns=1, timeout=LOOK_SECONDS)[0])
    except Exception as error:
        stop = error.__cause__  # Ray wraps what our handlers of signals raise
        raise stop if stop is not None and not isinstance(stop, Exception) else error from None


def _start(ray: ModuleType, order: Order) -> Iterator[tuple[Any, str]]:
    """Start a worker on every node with a processor; yield (worker, node)."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in _nodes(ray):
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        needs = {"num_cpus": 1, "num_gpus": node["Resources"].get("GPU", 0), "max_retries": 0}
        yield (
            ray.remote(work_on_node).options(**needs, scheduling_strategy=place).remote(*order),
            node["NodeManagerHostname"],
        )


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the nodes that live and have a processor."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


@contextmanager
def _connected(address: str) -> Iterator[ModuleType]:
    """Connect to a Ray cluster for a while; InputError where none answers."""
    ray = import_ray()
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
            "no-ray", f"no Ray cluster answers at {address}: {reason}", "Check it: ray status."
        ) from None
    try:
        if not _nodes(ray):
            raise InputError(
                "no-ray",
                f"the Ray cluster at {address} has no node with a free CPU",
                "Check it: ray status.",
            )
        yield ray
    finally:
        ray.shutdown()
