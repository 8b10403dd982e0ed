"""Hold the shards of one task while they are filled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from fp4convert.numerics.error_sums import Account
from fp4convert.planning.steps import Task
from fp4convert.storage.shard_writer import ShardWriter


class TaskWriter:
    """The shards of one task, and what was learnt while they were filled.

    shards         by the name of the file
    global_scales  of scale groups that other shards have members of, too, as this task found them
    accounts       module -> what it lost
    taken_over     modules that came with codes of their own
    saturated      modules with weights beyond what their given global scales can say
    amaxes         of scale groups that were measured before any was rounded, by their first output
    early          outputs that were written then
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self.shards: dict[str, ShardWriter] = {}
        self.global_scales: dict[str, float] = {}
        self.accounts: dict[str, Account] = {}
        self.taken_over: set[str] = set()
        self.saturated: set[str] = set()
        self.amaxes: dict[str, float] = {}
        self.early: set[str] = set()
        try:
            for shard in task.shards:
                self.shards[shard.file] = ShardWriter(
                    folder / shard.file, shard.header, shard.outputs, shard.nbytes
                )
        except BaseException:
            self.discard()
            raise

    def begin_again(self) -> None:
        """Write everything anew, from the first byte of every output."""
        found: Collection[object]
        for found in (self.global_scales, self.accounts, self.taken_over, self.saturated):
            found.clear()
        self.amaxes.clear()
        self.early.clear()
        for shard in self.shards.values():
            shard.begin_again()

    def hash_on(self, check: Callable[[int], None]) -> None:
        """Hash what is written of each shard; `check` as in write_task."""
        for shard in self.shards.values():
            shard.hash_on(check)

    def discard(self) -> None:
        """Close all shards, and leave nothing behind."""
        for shard in self.shards.values():
            shard.discard()
