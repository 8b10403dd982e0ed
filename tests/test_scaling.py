"""What benchmarks/scaling.py predicts from and says: stages that can be measured, models of their published size, errors told."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from costs import Found, Stages
from giants import BLOCK, GIANTS, in_bf16, in_fp8
from scaling import Checked, words
from timeline import Costs, Group, Shard
from true_shapes import deepseek_v3

COSTS = Costs(1, 0, 0, 0, {"BF16": 1.0}, 0, 0, 0)
NBYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def size_of(listed):
    return sum(NBYTES[dtype] * math.prod(shape) for _, dtype, shape in listed)


def test_deepseek_r1_has_its_published_size():
    """689 GB in FP8 on the Hub, layer for a second token included; its linear layers alone are FP8."""
    listed = list(in_fp8(deepseek_v3()))
    assert round(size_of(listed) / 1e9) == 689
    assert round(size_of(in_bf16(deepseek_v3())) / 1e12, 2) == 1.37
    shapes = {name: (dtype, shape) for name, dtype, shape in listed}
    head = "model.layers.4.self_attn.kv_a_proj_with_mqa.weight"
    assert shapes[head] == ("F8_E4M3", (576, 7168))
    assert shapes[f"{head}_scale_inv"] == ("F32", (-(-576 // BLOCK), 56))
    assert {shapes[name][0] for name in ("lm_head.weight", "model.layers.4.mlp.gate.weight")} == {"BF16"}


def test_a_giant_is_planned_by_fp4convert(tmp_path):
    llama = GIANTS[0].plan(tmp_path / "llama", "nvfp4")
    assert len(llama) == GIANTS[0].shards
    assert sum(shard.source_nbytes for shard in llama) == pytest.approx(141e9, rel=0.01)
    assert sum(shard.output_nbytes for shard in llama) == pytest.approx(43e9, rel=0.02)


def checked(measured, **more):
    shards = [Shard(1, (Group(8, 4, {"BF16": 4}),))]
    return Checked(1, "one command", "mse", shards, measured, **more)


def test_an_error_is_told_with_its_bar():
    found = Found({"mse": COSTS}, 1e9)
    assert checked(5.0).predicted(found) == pytest.approx(5)  # a second to start, four weights of a second by one thread
    assert checked(5.0).row(found)[-2:] == ["+0%", "<= 0.2 met"]
    assert checked(4.0).row(found)[-2:] == ["+25%", "<= 0.2 NOT MET"]
    assert checked(10.0).row(found)[-2:] == ["-50%", "<= 0.2 NOT MET"]
    assert checked(12.0, start=3.0, link=1.0).predicted(found) == pytest.approx(3 + 8)  # eight bytes at one a second


def test_durations():
    assert [words(seconds) for seconds in (7.4, 99, 600, 7200)] == ["7 s", "99 s", "10 min", "2.0 h"]


@pytest.mark.slow
def test_every_stage_can_be_measured(tmp_path):
    stages = Stages(tmp_path, ("amax", "mse"))
    stages.measure()
    found = stages.found()
    for costs in found.costs.values():
        assert all(0 < cost < 1e-3 for cost in (*costs.rounding.values(), costs.reading, costs.writing, costs.hashing))
        assert costs.rounding.keys() == {"BF16", "F8_E4M3"}
        assert costs.start > 0
    assert found.disk > 0
    assert found.costs["mse"].rounding["BF16"] > found.costs["amax"].rounding["BF16"] / 2
