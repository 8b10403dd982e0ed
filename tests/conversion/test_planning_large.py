"""Twice the tensors are twice the work, from the headers to the plan as it is drawn: a trillion
parameters plan in seconds.

Work is counted in calls, which no other process disturbs; loops inside a built-in function make
none, so time counts, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cpu.planning import write_checkpoint
from fp4convert.cli import screen
from fp4convert.cli.draw_plan import draw_plan
from fp4convert.commands.convert import preview_quantize
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.dry_run import describe_plan
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.plan import Plan
from fp4convert.storage.json_text import as_text
from fp4convert.storage.open import open_source

LAYERS, EXPERTS, SHARDS = 8, 200, 10
MOST_CALLS = 345  # of functions for each tensor of a dry run: 342 here, 463 before
PATTERNS = tuple(f"model.layers.{layer}.self_attn.o_proj" for layer in range(4))


def plan(folder: Path) -> None:
    """Everything that a dry run does, and the text of the index."""
    source = open_source(str(folder))
    request = QuantizeOptions(
        "", format="nvfp4", include=("lm_head", "re:.*gate$"), exclude=PATTERNS
    )
    planned = prepare_quantize(take_apart(source, request))
    assert as_text(planned.index)
    screen.Screen().show(describe_plan(artifact_job(source, planned), Settings("cpu")), draw_plan)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of 4,900 tensors in 10 shards, and one of twice as many in twice as many."""
    scratch = tmp_path_factory.mktemp("planning")
    made = [scratch / name for name in ("once", "twice")]
    for times, folder in enumerate(made, 1):
        folder.mkdir()
        assert (
            write_checkpoint(folder, times * LAYERS, EXPERTS, times * SHARDS)
            == times * LAYERS * (3 * EXPERTS + 14) + 3
        )
    plan(made[0])  # what is loaded or compiled once
    return made


def calls_of(work: Callable[[], object]) -> int:
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def seconds_of(folder: Path) -> float:
    begun = time.process_time()
    plan(folder)
    return time.process_time() - begun


@pytest.mark.slow
def test_twice_the_tensors_are_twice_the_calls(folders):
    once, twice = (calls_of(partial(plan, folder)) for folder in folders)
    assert 1.8 < twice / once < 2.2


@pytest.mark.slow  # where cores are shared with other tests, seconds mean little
def test_twice_the_tensors_take_twice_the_time(folders):
    """Four times, and more where something is compared with everything."""
    rounds = [
        [seconds_of(folder) for folder in folders] for _ in range(5)
    ]  # the best of each, for cores are shared
    once, twice = map(min, zip(*rounds, strict=True))
    assert twice / once < 3


def test_a_dry_run_takes_few_calls_for_each_tensor_and_makes_its_index_once(tmp_path, monkeypatch):
    """Calls are counted, which no other process disturbs."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder, 2, EXPERTS, 2)
    made = []
    index = Plan.index.fget
    monkeypatch.setattr(Plan, "index", property(lambda self: made.append(1) or index(self)))
    options = QuantizeOptions(
        str(folder), format="nvfp4", device="cpu", output=str(tmp_path / "out")
    )
    preview_quantize(options)  # what is loaded or compiled once
    made.clear()
    count = calls_of(lambda: preview_quantize(options))
    assert made == [1]
    tensors = 2 * (3 * EXPERTS + 14) + 3
    assert count / tensors < MOST_CALLS
