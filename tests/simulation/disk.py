"""A disk: what processes see of its files, and what is left of them when the power fails.

Data of a file are on the disk when it was flushed (fsync), and names when their folder was. Until
then a power cut leaves any part of what was written, and any of the renames: in their order, as a
journal does, or without one. A flush that fails loses what it was to flush, once and for all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from random import Random

Write = tuple[int, bytes | None]  # place and bytes; or a new size and None
Entry = tuple["Node", str, "Node | None"]  # folder, name, what it leads to from now on


def refuse(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), None if path is None else str(path))


class Node:
    """A file or a folder (which has entries), as processes see it and as it is on the disk.

    pending  what was written since the last flush
    maker    who made it; writer, the machine that wrote last; remover, the one that took its last
             name away
    """

    __slots__ = (
        "changed_ns",
        "data",
        "durable",
        "durable_entries",
        "entries",
        "inode",
        "links",
        "maker",
        "pending",
        "remover",
        "writer",
        "written_ns",
    )

    def __init__(self, inode: int, is_folder: bool, maker: object) -> None:
        self.inode = inode
        self.entries: dict[str, Node] | None = {} if is_folder else None
        self.durable_entries: dict[str, Node] = {}
        self.data = bytearray()
        self.durable = b""
        self.pending: list[Write] = []
        self.links = 1
        self.maker = maker
        self.writer: object = None
        self.remover: object = None
        self.written_ns = self.changed_ns = 0

    @property
    def is_folder(self) -> bool:
        return self.entries is not None


def _apply(data: bytearray, write: Write) -> None:
    place, block = write
    if block is None:
        if place < len(data):
            del data[place:]
        else:
            data.extend(bytes(place - len(data)))
        return
    if place > len(data):
        data.extend(bytes(place - len(data)))
    data[place : place + len(block)] = block


class Disk:
    """Files and folders, and a journal of names that are not on the disk yet.

    keeps_names  names are on the disk with the call that changes them, as servers of NFS promise
    tick_ns      in which its times go on
    """

    def __init__(self, chance: Random, tick_ns: int, keeps_names: bool) -> None:
        self._chance = chance
        self.tick_ns = tick_ns
        self.keeps_names = keeps_names
        self._journal: list[list[Entry]] = []
        self._count = 100
        self.free_nbytes = 1 << 40
        self.root = self.make(True, None)

    def make(self, is_folder: bool, maker: object) -> Node:
        self._count += 1
        return Node(self._count, is_folder, maker)

    # Names.

    def change(self, *entries: Entry) -> None:
        """Change names, all at once or not at all."""
        for folder, name, node in entries:
            assert folder.entries is not None
            before = folder.entries.get(name)
            if before is not None and before is not node:
                before.links -= 1
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        for _, _, node in entries:
            if node is not None:
                node.links = 1
        if self.keeps_names:
            self._settle(list(entries))
        else:
            self._journal.append(list(entries))

    @staticmethod
    def _settle(entries: list[Entry]) -> None:
        for folder, name, node in entries:
            if node is None:
                folder.durable_entries.pop(name, None)
            else:
                folder.durable_entries[name] = node

    # Data.

    def write(self, node: Node, place: int, block: bytes) -> None:
        grows = max(0, place + len(block) - len(node.data))
        if grows > self.free_nbytes:
            raise refuse(errno.ENOSPC)
        self.free_nbytes -= grows
        _apply(node.data, (place, block))
        node.pending.append((place, block))

    def resize(self, node: Node, nbytes: int) -> None:
        grows = nbytes - len(node.data)
        if grows > self.free_nbytes:
            raise refuse(errno.ENOSPC)
        self.free_nbytes -= grows
        _apply(node.data, (nbytes, None))
        node.pending.append((nbytes, None))

    def flush(self, node: Node) -> None:
        """Have a file, or the names in a folder, on the disk."""
        if node.is_folder:
            self._flush_names(node)
            return
        durable = bytearray(node.durable)
        for write in node.pending:
            _apply(durable, write)
        node.durable = bytes(durable)
        node.pending.clear()

    def fail_flush(self, node: Node, is_forgotten: bool) -> None:
        """Lose what was to be flushed: the next flush finds nothing to do.

        is_forgotten  it is read from the disk from now on; else, memory still has it
        """
        if node.is_folder:
            return
        node.pending.clear()
        if is_forgotten:
            node.data = bytearray(node.durable)

    def _flush_names(self, folder: Node) -> None:
        # Whatever changed the same names before goes along, or their order would be another.
        names: set[tuple[int, str]] = set()
        chosen: list[bool] = []
        for entries in reversed(self._journal):
            keys = {(place.inode, name) for place, name, _ in entries}
            is_chosen = any(place is folder for place, _, _ in entries) or bool(keys & names)
            chosen.append(is_chosen)
            if is_chosen:
                names |= keys
        chosen.reverse()
        for entries, is_chosen in zip(self._journal, chosen, strict=True):
            if is_chosen:
                self._settle(entries)
        self._journal = [
            entries
            for entries, is_chosen in zip(self._journal, chosen, strict=True)
            if not is_chosen
        ]

    # Power.

    def cut_power(self) -> None:
        """Leave what a power cut leaves."""
        for entries in self._survivors():
            self._settle(entries)
        self._journal.clear()
        seen: set[int] = set()
        left = [self.root]
        while left:
            node = left.pop()
            if node.inode in seen:
                continue
            seen.add(node.inode)
            node.links = 1  # also of what had lost its name a moment before
            if node.is_folder:
                node.entries = dict(node.durable_entries)
                left += node.entries.values()
            else:
                self._tear(node)

    def _survivors(self) -> Iterator[list[Entry]]:
        """Choose the changes of names that reached the disk."""
        journal, random = self._journal, self._chance.random
        kind = random()
        if kind < 0.2:
            return
        if kind < 0.4:
            yield from journal
        elif kind < 0.6:
            yield from journal[: self._chance.randrange(len(journal) + 1)]
        else:
            lost: set[tuple[int, str]] = set()
            for entries in journal:
                keys = {(place.inode, name) for place, name, _ in entries}
                if keys & lost or random() < 0.5:
                    lost |= keys
                else:
                    yield entries

    def _tear(self, node: Node) -> None:
        """Leave any part of what was written to a file since its last flush."""
        durable, random = bytearray(node.durable), self._chance.random
        share = self._chance.choice((0.0, 0.5, 1.0))
        for place, block in node.pending:
            if random() < share:
                is_torn = block is not None and random() < 0.3
                most = self._chance.randrange(len(block) + 1) if block and is_torn else None
                _apply(durable, (place, None if block is None else block[:most]))
        node.pending.clear()
        node.durable = bytes(durable)
        node.data = durable

    def lose_client(self, maker: object) -> None:
        """Leave what a server of NFS has when this client of it is gone.

        Names are there; what the client wrote and did not flush may be.
        """
        left = [self.root]
        while left:
            node = left.pop()
            if node.is_folder:
                left += (node.entries or {}).values()
            elif node.pending and getattr(node.maker, "machine", None) is maker:
                self._tear(node)

    # Looking, as no process can.

    def find(self, path: str, is_durable: bool = False) -> Node | None:
        node = self.root
        for name in path.split("/")[1:]:
            entries = node.durable_entries if is_durable else node.entries
            found = entries.get(name) if entries is not None else None
            if found is None:
                return None
            node = found
        return node

    def files(self, folder: Node, prefix: str = "") -> dict[str, Node]:
        """Return all files below a folder, by their paths in it."""
        found: dict[str, Node] = {}
        for name, node in (folder.entries or {}).items():
            if node.is_folder:
                found |= self.files(node, f"{prefix}{name}/")
            else:
                found[f"{prefix}{name}"] = node
        return found

    def put(self, path: str, data: bytes | None) -> Node:
        """Have a file (None: a folder) on the disk, as if it had always been there."""
        parent, _, name = path.rpartition("/")
        folder = self.find(parent) if parent else self.root
        if folder is None:
            folder = self.put(parent, None)
        node = self.make(data is None, "user")
        if data is not None:
            node.data, node.durable = bytearray(data), bytes(data)
        assert folder.entries is not None
        folder.entries[name] = folder.durable_entries[name] = node
        return node
