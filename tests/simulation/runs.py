"""Run seeds, one after the other, and say which break a promise."""

from __future__ import annotations

import faulthandler
import gc
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fp4convert.planning.plan import Plan
from simulation.checkpoint import make_wanted, plan_to, write_source
from simulation.seam import installed, seed_random
from simulation.world import Verdict, World

HUNG_SECONDS = 120  # of real time, for one seed
COLLECT = 20  # seeds between two looks for cycles: never in the middle of a world


class Simulator:
    """What all seeds share: the source, and what it must become."""

    def __init__(self, folder: Path) -> None:
        source = write_source(folder / "source")
        self._wanted = make_wanted(source, folder)
        self._source = {
            str(path.relative_to(source)): path.read_bytes()
            for path in sorted(source.rglob("*"))
            if path.is_file()
        }

        self._plans: dict[str, Plan] = {}

    def plan(self) -> None:
        """Plan every conversion, as the simulated source has it."""
        for name, one in self._wanted.items():
            world = World(0, self._wanted, {}, self._source)
            self._plans[name] = world.alone(lambda one=one: plan_to(one))

    def run(self, seed: int, is_traced: bool = False) -> Verdict:
        seed_random(seed)
        faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
        verdict = World(seed, self._wanted, self._plans, self._source).verdict(is_traced)
        faulthandler.cancel_dump_traceback_later()
        return verdict


def run(folder: Path, seeds: Iterable[int], asked: Namespace) -> int:
    """Return 1 where a promise was broken."""
    simulator, began = Simulator(folder), time.process_time()
    outcomes: Counter[str] = Counter()
    count = steps = broken = 0
    gc.collect()
    gc.disable()
    with installed():
        simulator.plan()
        for seed in seeds:
            verdict = simulator.run(seed, asked.trace or asked.hash)
            count, steps = count + 1, steps + verdict.steps
            outcomes.update(verdict.outcomes)
            if asked.trace:
                print(*verdict.trace, sep="", end="")
            if asked.hash:
                print(seed, verdict.trace_hash)
            if verdict.broken:
                broken += 1
                print(f"seed {seed}: {verdict.broken}", flush=True)
                if broken >= asked.most:
                    break
            if count % COLLECT == 0:
                gc.collect()
    seconds = time.process_time() - began
    words = ", ".join(f"{number} {code}" for code, number in outcomes.most_common())
    told = f"{count} seeds, {steps} steps, {seconds:.1f} s of a core, {broken} broken"
    print(f"{told}; processes: {words}")
    return int(broken > 0)
