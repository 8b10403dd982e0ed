"""How much memory a conversion from a Hub takes: what --memory and the dry run say."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import bf16, write_checkpoint

ROWS, COLUMNS, LAYERS = 8192, 2048, 3
GROUP_NBYTES = 2 * 2 * ROWS * COLUMNS  # gate_proj and up_proj


@pytest.fixture
def large(hub, tmp_path):
    """Some 350 MB in two shards, the group of a layer 67 MB."""
    data = bf16(1 << 15)

    def tensor(rows, columns):
        return "BF16", (rows, columns), data * (2 * rows * columns >> 16)

    shards = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        matrices = {
            f"{name}.mlp.down_proj.weight": tensor(COLUMNS, ROWS),
            f"{name}.mlp.gate_proj.weight": tensor(ROWS, COLUMNS),
            f"{name}.mlp.up_proj.weight": tensor(ROWS, COLUMNS),
            f"{name}.self_attn.o_proj.weight": tensor(COLUMNS, COLUMNS),
        }
        shards.setdefault(f"model-{1 + layer // 2:05d}-of-00002.safetensors", {}).update(matrices)
    folder = write_checkpoint(tmp_path / "m", shards)
    hub.add("org/m", folder)


def highest_anonymous(words: list[str]) -> int:
    """Run a command; return the most anonymous memory that it had, in bytes."""
    process, most = subprocess.Popen(words, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    most = max(most, int(line.split()[1]) << 10)
        time.sleep(0.005)
    assert process.returncode == 0
    return most


@pytest.mark.usefixtures("large")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("memory", ["0.25", "1"])
@pytest.mark.sweep(2)
def test_memory_is_what_the_dry_run_says_and_nothing_comes_twice(memory, hub, tmp_path):
    options = ["--format", "nvfp4", "--memory", memory, "--workers", "2", "--json", "-o"]
    words = [sys.executable, "-m", "fp4convert", "quantize", "org/m", *options]
    told = json.loads(subprocess.check_output([*words, str(tmp_path / "out"), "--dry-run"]))
    hub.seen.clear()
    found = highest_anonymous([*words, str(tmp_path / "out")])
    assert found <= (250e6 if memory == "0.25" else 1e9) + GROUP_NBYTES
    assert told["peak_memory_bytes"] == pytest.approx(found, rel=0.15)  # two shards at once
    ranges = [(seen.path, seen.range) for seen in hub.seen if seen.nbytes > 1 << 20]
    assert len(ranges) == len(set(ranges))
