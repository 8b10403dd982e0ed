"""Fill the shards of one task with the parts of its makers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fp4convert.makers.maker import PAUSE, Fact, Tools
from fp4convert.planning.steps import MakerSteps, Task
from fp4convert.storage.shard_writer import ShardWriter


class TaskWriter:
    """Writes the shards of one task.

    shards  by the name of the file
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self.shards: dict[str, ShardWriter] = {}
        try:
            for shard in task.shards:
                self.shards[shard.file] = ShardWriter(
                    folder / shard.file, shard.header, shard.outputs, shard.nbytes
                )
        except BaseException:
            self.discard()
            raise

    def begin_again(self) -> None:
        """Begin again at the first byte of every output."""
        for shard in self.shards.values():
            shard.begin_again()

    def hash_on(self, check: Callable[[int], None]) -> None:
        """Hash what is written of each shard; see ShardWriter.hash_on."""
        for shard in self.shards.values():
            shard.hash_on(check)

    def discard(self) -> None:
        """Close all shards, and leave nothing behind."""
        for shard in self.shards.values():
            shard.discard()


class Making:
    """Runs a maker and appends its parts to the outputs.

    facts  the maker's return value; () before its end
    """

    def __init__(self, work: MakerSteps, tools: Tools, writer: TaskWriter) -> None:
        self.work = work
        self.facts: tuple[Fact, ...] = ()
        self._parts = work.maker.parts(tools)
        self._outputs = {ref.name: ref for step in work.steps for ref in step.outputs}
        self._writer = writer
        self.is_done = False

    def advance(self, stop: threading.Event, is_first_pass: bool = False) -> None:
        """Append parts until the maker ends, or pauses in the first pass.

        stop  ends the maker where it stands: others may wait for a GPU's lane that it holds
        """
        while not self.is_done:
            if stop.is_set():
                return self.close()
            try:
                name, data = next(self._parts)
            except StopIteration as end:
                self.facts, self.is_done = end.value or (), True
                return
            if name == PAUSE[0]:
                if is_first_pass:
                    return
                continue
            ref = self._outputs[name]
            try:
                self._writer.shards[ref.file].append(ref, data)
            except BaseException:
                self.close()  # as above
                raise

    def close(self) -> None:
        """End the maker, which then holds nothing."""
        self._parts.close()
        self.is_done = True
