"""How whole conversions are measured: what is cold is cold, what takes too long is ended, the made
checkpoint is one.
"""

import sys
import time

import pytest

from fp4convert.storage.open import open_source
from harness import checkpoints, disk, processes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="mincore and /proc are those of Linux")


@LINUX
def test_a_folder_is_cold_then_warm(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(bytes(8 << 20))
    (folder / "empty").touch()
    disk.put_on_disk(folder)
    assert disk.cached_share(folder) > 0.99
    if disk.file_system(folder) == "tmpfs":
        pytest.skip("a tmpfs is never cold")
    disk.make_cold(folder)
    assert disk.cached_share(folder) < 0.01
    disk.make_warm(folder)
    assert disk.cached_share(folder) > 0.99


@LINUX
def test_cost_of_a_command_has_its_children_and_its_memory():
    held = "held = b'1' * (64 << 20); import time; time.sleep(0.5)"
    busy = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time\\nwhile "
        "time.process_time() < 0.5: pass'])"
    )
    cost = processes.run([sys.executable, "-c", held], is_watched=True)
    assert 64 << 20 <= cost.anonymous_nbytes < 256 << 20 <= 4 * cost.peak_nbytes
    assert processes.run([sys.executable, "-c", busy]).cpu_seconds >= 0.5


def test_a_command_that_takes_too_long_is_ended():
    begun = time.monotonic()
    with pytest.raises(processes.TimeIsUpError):
        processes.run([sys.executable, "-c", "import time; time.sleep(600)"], limit=0.5)
    assert time.monotonic() - begun < 60


def test_a_command_that_fails_tells_what_it_said():
    with pytest.raises(processes.FailedError, match="no such thing"):
        processes.run([sys.executable, "-c", "raise SystemExit('no such thing')"])
    with pytest.raises(processes.FailedError, match="ended by signal 9"):
        processes.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])


def test_turns_leave_the_first_round_out_and_ratios_are_of_pairs():
    taken = iter([100, 100, 1, 2, 3, 3, 8, 4])
    done = processes.take_turns({name: lambda: processes.Cost(next(taken), 0) for name in "ab"}, 3)
    assert [cost.seconds for cost in done["a"]] == [1, 3, 8]
    assert processes.ratio_of(done["a"], done["b"]) == 1
    assert processes.median_of(done["b"]) == 3


def test_the_made_checkpoint_has_as_many_shards_as_layers(tmp_path, monkeypatch):
    small = {
        name: (max(rows // 64, 16), columns // 64)
        for name, (rows, columns) in checkpoints.MATRICES.items()
    }
    monkeypatch.setattr(checkpoints, "MATRICES", small)
    checkpoints.make_checkpoint(tmp_path / "made", 3 * checkpoints.LAYER_NBYTES / 1e9, shards=3)
    made = open_source(str(tmp_path / "made")).checkpoint
    assert len(made.shards) == 3
    assert (
        sum(ref.name.endswith("q_proj.weight") for shard in made.shards for ref in shard.tensors)
        == 3
    )
    assert not made.unindexed
