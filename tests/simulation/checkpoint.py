"""The conversion that every world does: a checkpoint of three shards, and what it must become.

The real command makes it on a real disk, once; hashlib and the package safetensors say what it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import bf16, read_folder, run, write_checkpoint

from fp4convert.commands import publish
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.conversion.quantize import prepare_quantize, quantize
from fp4convert.conversion.request import take_apart
from fp4convert.execution.settings import Settings
from fp4convert.execution.share import Share
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.plan import Plan
from fp4convert.storage.local import LocalSource
from simulation.disk import Disk
from simulation.hub import REPO, TOKEN
from simulation.invariants import RECORD, REPORT, SOURCE, STATE

ROWS, COLUMNS = 16, 32
PLANS: dict[str, tuple[str, ...]] = {"a": (), "b": ("model.layers.1.*",)}  # what they leave out
LAYER = "model.layers"


@dataclass(frozen=True)
class Wanted:
    """An artifact as the real command makes it, of all but what the patterns leave out."""

    excluded: tuple[str, ...]
    files: dict[str, bytes]
    digest: str


def write_source(folder: Path) -> Path:
    """Three shards; q_proj and k_proj share a scale and lie in two of them."""

    def matrix(seed: int) -> tuple[str, tuple[int, ...], bytes]:
        return "BF16", (ROWS, COLUMNS), bf16(ROWS, COLUMNS, seed=seed)

    shards = {
        "model-1.safetensors": {
            f"{LAYER}.0.self_attn.q_proj.weight": matrix(1),
            f"{LAYER}.0.mlp.down_proj.weight": matrix(2),
        },
        "model-2.safetensors": {
            f"{LAYER}.0.self_attn.k_proj.weight": matrix(3),
            f"{LAYER}.1.mlp.down_proj.weight": matrix(4),
        },
        "model-3.safetensors": {"model.norm.weight": ("BF16", (COLUMNS,), bf16(COLUMNS, seed=5))},
    }
    more = {"tokenizer.json": b'{"a": 1}', "generation_config.json": b"{}"}
    write_checkpoint(folder, shards, None, **more)
    (folder / "assets").mkdir()
    (folder / "assets" / "words.txt").write_bytes(b"words")
    return folder


def make_wanted(source: Path, folder: Path) -> dict[str, Wanted]:
    """Have the real command convert the source by each plan, and judge what it makes."""
    made = {}
    for name, excluded in PLANS.items():
        out = folder / name
        words = [word for pattern in excluded for word in ("--exclude", pattern)]
        told = run("quantize", source, "--format", "nvfp4", "-o", out, "--json", "-q", *words).json
        files = {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file() and STATE not in path.relative_to(out).parts
        }
        digested = {file: data for file, data in files.items() if file != REPORT}
        lines = [
            f"{hashlib.sha256(digested[file]).hexdigest()}  {file}\n" for file in sorted(digested)
        ]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        recorded = json.loads(files[RECORD])["files"]
        tensors = read_folder(out)  # by the package safetensors
        norm = read_folder(source)["model.norm.weight"]
        if digest != told["digest"] or tensors["model.norm.weight"] != norm:
            raise RuntimeError("the real command does not make what its digest says")
        for file, sha256 in recorded.items():
            if hashlib.sha256(files[file]).hexdigest() != sha256:
                raise RuntimeError(f"{file} is not what its record says")
        made[name] = Wanted(excluded, files, digest)
    return made


def put_source(disk: Disk, source: dict[str, bytes]) -> None:
    for file, data in source.items():
        node = disk.put(f"{SOURCE}/{file}", data)
        node.written_ns = node.changed_ns = 10**18


def plan_to(wanted: Wanted) -> Plan:
    """Plan the conversion of the simulated source; in a simulated process."""
    options = QuantizeOptions(SOURCE, format="nvfp4", exclude=list(wanted.excluded))
    return prepare_quantize(take_apart(LocalSource(Path(SOURCE)), options))


def converts(plan: Plan, out: str, **settings: Any) -> Callable[[], Any]:
    """Return what a process does that converts the source."""

    def convert() -> Any:
        return quantize(LocalSource(Path(SOURCE)), plan, Path(out), Settings(workers=2, **settings))

    return convert


def pushes(plan: Plan, out: str, no_keep: bool, **settings: Any) -> Callable[[], Any]:
    """Return what a process does that converts the source and pushes the artifact."""

    def push() -> Any:
        options = QuantizeOptions(
            SOURCE, format="nvfp4", output=out, push_to_hub=REPO, token=TOKEN, no_keep=no_keep
        )
        work = Conversion(options, LocalSource(Path(SOURCE)), plan)
        return publish.carry_out(work, Settings(workers=2, **settings))

    return push


def part(index: int, count: int) -> Share:
    return Share(index, count)
