"""What a calibration takes, known from shapes before the first layer is run: of the disk beside its file, and of memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

from fp4convert.backends import memory_nbytes
from fp4convert.calibration_parts import LARGEST_NBYTES
from fp4convert.disk import told
from fp4convert.errors import InputError, OutputError
from fp4convert.observers import block_width
from fp4convert.progress import size_text
from fp4convert.recipe import group_members, scale_group
from fp4convert.skeleton import Skeleton

LESS = "--gram block:128 takes less"


@dataclass(frozen=True, slots=True)
class Needs:
    """What is needed at most; layers that turn out to share their input take less.

    statistics_nbytes  of the file, and of the parts that it is joined from
    hidden_nbytes      of hidden states of all samples, before and behind a layer
    gram_nbytes        of the Gram matrices of one layer, all in memory at once
    """

    statistics_nbytes: int
    hidden_nbytes: int
    gram_nbytes: int

    @property
    def disk_nbytes(self) -> int:
        """Beside the file, and the file itself; parts that stay files are there once."""
        joined = self.statistics_nbytes if self.statistics_nbytes <= LARGEST_NBYTES else 0
        return self.statistics_nbytes + joined + self.hidden_nbytes

    def words(self) -> str:
        """For people."""
        grams = f", Gram matrices of a layer {size_text(self.gram_nbytes)} of memory" if self.gram_nbytes else ""
        file, hidden = size_text(self.statistics_nbytes), size_text(self.hidden_nbytes)
        return f"statistics take up to {file}, hidden states {hidden} beside them until the end{grams}"

    def check(self, output: Path, state: Path, device: torch.device) -> None:
        """OutputError where the disk has too little room beside what is in `state` already; InputError for too little memory."""
        with told(state):
            there = sum(path.stat().st_size for kind in ("hidden-*", "part-*") for path in state.glob(kind))
            disk = os.statvfs(state)
        free, more = disk.f_bavail * disk.f_frsize, self.disk_nbytes - there
        if more > free:
            detail = f"{output} needs up to {more:,} bytes with what lies beside it until the end, its disk has {free:,} free"
            next_step = f"Free some space, or choose another disk: -o FILE{f'; {LESS}' if self.gram_nbytes else ''}."
            raise OutputError("disk-full", detail, next_step)
        memory = _memory_of(device)
        if self.gram_nbytes > memory:
            detail = f"Gram matrices of one layer take up to {self.gram_nbytes:,} bytes of memory, and {device} has {memory:,}"
            raise InputError("gram-memory", f"{detail}; expected them to fit", f"Choose smaller ones: {LESS}.")


def needs_of(skeleton: Skeleton, gram: str, tokens: int, config: dict[str, object]) -> Needs:
    """What so many tokens take; members of a scale group (q, k and v; gate and up) share their input."""
    groups = group_members(config)
    statistics = 0
    grams: dict[str | None, int] = defaultdict(int)
    seen: set[Hashable] = set()
    for module, seat in skeleton.seats.items():
        holder = scale_group(module, groups) or module
        if holder in seen or isinstance(skeleton.module(seat.path), torch.nn.Embedding):
            continue
        seen.add(holder)
        columns = skeleton.linears[module].shape[1]
        width = block_width(gram, columns)
        matrix = 4 * -(-columns // width) * width * width if width else 0
        statistics += 4 * columns * (2 if gram == "none" else 3) + matrix
        grams[skeleton.layer_of(seat)] += matrix
    hidden = int(getattr(skeleton.model.config.get_text_config(), "hidden_size", 0))
    return Needs(statistics, 2 * 4 * tokens * hidden, max(grams.values(), default=0))


def _memory_of(device: torch.device) -> int:
    """All that there is of the processor's, or of a GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return memory_nbytes()
