"""Every promise holds in every world that a seed makes, and no fault of the code goes unseen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT

from simulation.mutations import MUTATIONS, mutated

AT_ONCE = ("no-fsync-of-names", "host-is-the-machine")  # found within twenty seeds, in the gate
PART = 1000  # seeds of one test of `make slow`


def simulate(*words: object) -> subprocess.CompletedProcess[str]:
    """Run seeds in a process of their own, whose sets have one order."""
    command = [sys.executable, "-m", "simulation", *map(str, words)]
    environment = os.environ | {
        "PYTHONPATH": f"{SUPPORT.parent}{os.pathsep}{SUPPORT}",
        "PYTHONHASHSEED": "0",
    }
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )


def test_every_promise_holds():
    ended = simulate("--seeds", "0:40")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("40 seeds, ")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10 * PART, PART))
def test_every_promise_holds_in_ten_thousand_worlds(first):
    ended = simulate("--seeds", f"{first}:{first + PART}", "--most", 10)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_seed_is_the_same_world_each_time():
    """Alone, or after others."""
    alone = simulate("--seed", 7, "--hash").stdout.splitlines()
    among = simulate("--seeds", "5:9", "--hash").stdout.splitlines()
    assert alone[0].startswith("7 ")
    assert alone[0] in among
    assert len({line.split()[1] for line in among[:4]}) == 4


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_changes_one_place(name):
    package = ROOT / "fp4convert"
    text = mutated(name, package)
    compile(text, name, "exec")
    assert text != (package / MUTATIONS[name].file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS],
)
def test_the_fault_is_found(name):
    ended = simulate("--mutation", name, "--seeds", f"0:{MUTATIONS[name].within}")
    assert ended.returncode == 1, f"{MUTATIONS[name].why}: {ended.stdout}{ended.stderr}"
    assert "\nseed " in f"\n{ended.stdout}", (
        ended.stderr
    )  # it was seen, and did not end the program
