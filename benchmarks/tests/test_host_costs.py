"""What the host's costs come to, by figures that are typed here."""

import json
import subprocess
import sys

import pytest

from gpu import host_costs, null_gpu
from harness.checkpoints import make_small_checkpoint


def test_stages_are_of_a_gigabyte_and_the_slowest_limits():
    whole = {"read": 0.4, "write": 0.2, "hash": 0.4, "flush": 0.0, "lock": 0.2}
    cut = {**whole, "lock": 0.75}
    stages = host_costs.stages_of(whole, cut, 2.0)
    found = (stages.whole, stages.read, stages.write, stages.hash, stages.flush, stages.shard)
    assert found == pytest.approx((0.6, 0.2, 0.1, 0.2, 0, 0.05))
    assert stages.lock == pytest.approx(0.1)
    # Shards of 5 GB add 0.01 to a GB; lanes do all but hashing; eight threads hash.
    assert stages.limits(16) == pytest.approx(
        {"all cores": 16 / 0.61, "16 lanes": 16 / 0.4, "16 hashes": 16 / 0.2, "lock": 1 / 0.11}
    )
    assert stages.limits(2) == pytest.approx(
        {"all cores": 2 / 0.61, "2 lanes": 2 / 0.4, "2 hashes": 2 / 0.2, "lock": 1 / 0.11}
    )


def test_the_null_gpu_writes_an_artifact_of_the_right_size_and_tells_its_costs(tmp_path):
    make_small_checkpoint(tmp_path / "m")
    words = ["quantize", tmp_path / "m", "--format", "nvfp4", "--scale-rule", "mse", "--json"]
    words += ["-o", tmp_path / "out", "--device", "cuda"]
    command = [sys.executable, null_gpu.__file__, tmp_path / "costs.json", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["device"] == "cuda:0"
    assert document["tensors"]["quantized"] == 4
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs.keys() == {*host_costs.OUTSIDE, "pin", "shards"}
    assert all(seconds > 0 for seconds in costs.values())
