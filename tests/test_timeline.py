"""The formulas by which benchmarks/scaling.py predicts: sums that can be done by hand, and how they grow with a machine."""

import math
import sys
from pathlib import Path

import pytest
from checkpoints import LAYER, run, weight, write_single

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from timeline import Costs, Group, Machine, Shard, conversion, makespan, shards_of

from fp4convert.convert import Request, prepare_quantize
from fp4convert.sources import open_source

FREE = Costs(0, 0, 0, 0, {"BF16": 0}, 0, 0, 0)
FAST = Machine(4, math.inf, math.inf)


def shard(source_nbytes, output_nbytes=0, groups=1):
    own = Group(source_nbytes // groups, output_nbytes // groups, {"BF16": source_nbytes // groups // 2})
    return Shard(groups, (own,) * groups)


def seconds(shards, costs, machine=FAST, machines=1):
    return conversion(shards, costs, machine, machines).whole


def test_start_and_planning_are_paid_once():
    assert seconds([shard(8)] * 3, FREE._replace(start=2, planning=0.5)) == 2 + 3 * 0.5


def test_groups_are_dealt_to_cores():
    rounding = FREE._replace(rounding={"BF16": 1.0})
    assert seconds([shard(80, groups=8)], rounding) == 10  # 8 groups of 5 weights on 4 cores
    assert seconds([shard(80, groups=1)], rounding) == 40  # one is one thread's
    assert makespan([5, 4, 3, 3, 3], 2) == 10
    assert makespan([1, 1, 1], 64) == 1


def test_a_shard_is_flushed_while_it_is_filled_and_hashed_while_the_next_is():
    """By hand: four shards of which each takes the disk 12 s; with a hash, the first of them, three steps, the last hash."""
    costs = FREE._replace(rounding={"BF16": 1.0})
    machine = Machine(4, 1.0, math.inf)  # a byte a second
    assert seconds([shard(40, 12, groups=4)] * 4, costs, machine) == 4 * 12
    hashing = costs._replace(hashing=1.5)
    assert seconds([shard(40, 12, groups=4)] * 4, hashing, machine) == 12 + 3 * 18 + 18


def test_cores_are_shared_by_both():
    """Filling takes 20 core seconds and hashing 8: on 2 cores 14 s for both, though neither alone takes longer than 10."""
    costs = FREE._replace(rounding={"BF16": 1.0}, hashing=0.5)
    assert seconds([shard(40, 16, groups=4)] * 2, costs, Machine(2, math.inf, math.inf)) == 10 + 14 + 8


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine(4, 10.0), (100 + 50) / 10),  # what is read and what is written, all over one disk
        (Machine(4, 10.0, 5.0), 100 / 5),  # what is written is flushed while more comes
        (Machine(4, math.inf, 5.0, is_streamed=True), 100 / 5),
    ],
)
def test_disk_and_link(machine, expected):
    shards = [shard(50, 25)] * 2
    assert seconds(shards, FREE, machine) == pytest.approx(expected)


def test_a_streamed_source_is_hashed_by_one_thread():
    costs = FREE._replace(hashing=1.0)
    assert seconds([shard(50)] * 2, costs, Machine(64, math.inf, math.inf, is_streamed=True)) == 100
    assert seconds([shard(50)] * 2, costs, Machine(64, math.inf, math.inf)) == 0


def test_several_machines_take_what_the_slowest_takes_and_then_merge():
    costs = FREE._replace(rounding={"BF16": 1.0}, start=3, planning=1, hashing=0.1)
    times = conversion([shard(80, 40, groups=4)] * 5, costs, FAST, 2)
    assert (
        times.part == 3 + 20 + 10 + 2 * 11 + 4
    )  # plan of 20 tensors; three of the five shards, two beside a hash; the last hash
    assert times.merge == 3 + 5 * 40 * 0.1 / 4
    assert conversion([shard(80)] * 5, costs, FAST, 64).part == conversion([shard(80)] * 5, costs, FAST, 5).part


def test_what_it_waits_for():
    shards = [shard(100, 50)] * 3
    assert conversion(shards, FREE._replace(rounding={"BF16": 1.0}), FAST).bound == "cores"
    assert conversion(shards, FREE, Machine(4, 1.0, math.inf)).bound == "disk"
    assert conversion(shards, FREE, Machine(4, math.inf, 1.0)).bound == "link"
    assert conversion(shards, FREE._replace(hashing=1.0), FAST).bound == "sha-256"
    assert conversion(shards, FREE._replace(start=1.0), FAST).bound == "start and plan"


def test_a_plan_as_shards(tmp_path):
    """The sums are those of the dry run; members of a scale group are one piece of work."""
    tensors = {f"{LAYER}.self_attn.{leaf}.weight": weight((32, 64)) for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")}
    source = write_single(tmp_path / "m", tensors | {"model.norm.weight": weight((64,))}, {"model_type": "llama"})
    document = run("quantize", source, "--format", "nvfp4", "--dry-run", "--json").json
    (found,) = shards_of(prepare_quantize(open_source(str(source)), Request("nvfp4")))
    assert (found.source_nbytes, found.output_nbytes) == tuple(
        sum(tensor[key] for tensor in document["tensors"]) for key in ("source_bytes", "output_bytes")
    )
    assert found.tensors == 5
    assert sorted(sum(group.weights.values()) for group in found.groups) == [0, 32 * 64, 3 * 32 * 64]
