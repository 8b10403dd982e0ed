"""The calls of the system that the code makes, answered by a simulated machine.

Calls of threads that are not simulated, and of paths and files that are not, go to the real ones.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from greenlet import GreenletExit

from simulation.disk import Disk, Node, refuse
from simulation.machines import Handle, Process
from simulation.streams import PROC, Listed, Listing, Mapped

ROOT = "/sim"
MODES = {True: stat.S_IFDIR | 0o755, False: stat.S_IFREG | 0o644}
NS = 1_000_000_000
SHORT = 0.05  # how often a read or a write does less than it was asked for


class Files:
    """The calls that look at files and change them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    # Where a path leads.

    def _begin(self, process: Process, kind: str, path: str, takes: float = 1.0) -> bool:
        """Let others run, then fail if it is to fail; True where it fails after it was done."""
        process.world.scheduler.step(process, kind, path, takes)
        trouble = process.world.trouble(process, kind)
        if trouble is None:
            return False
        if trouble.is_done:
            return True
        raise refuse(trouble.number, path)

    @staticmethod
    def _end(process: Process, path: str, fails: bool) -> None:
        """Raise the error of a call that was done all the same."""
        if fails:
            raise refuse(errno.EIO, path)

    def _step_down(self, process: Process, folder: Node, name: str, is_new: bool) -> Node | None:
        machine = process.machine
        if folder.entries is None:
            raise refuse(errno.ENOTDIR, name)
        if not machine.cache_seconds:
            return folder.entries.get(name)
        names, now = machine.names.setdefault(folder.inode, {}), process.world.scheduler.now
        known = names.get(name)
        if known is not None and not is_new and known[1] > now:
            return known[0]
        node = folder.entries.get(name)
        seconds = machine.cache_seconds * process.world.chance.random()
        names[name] = node, now + seconds
        return node

    def _find(self, process: Process, path: str, is_new: bool = False) -> Node | None:
        """Return what this machine believes to be there.

        is_new  the server is asked for the last name
        """
        node = self.disk.root
        *parents, last = path.split("/")[1:]
        for name in parents:
            found = self._step_down(process, node, name, False)
            if found is None:
                return None
            node = found
        return self._step_down(process, node, last, is_new) if last else node

    def _parent(self, process: Process, path: str) -> tuple[Node, str]:
        parent, _, name = path.rpartition("/")
        folder = self._find(process, parent) if parent else self.disk.root
        if folder is None or folder.links == 0:
            folder = self._find(process, parent, is_new=True)
        if folder is None:
            raise refuse(errno.ENOENT, path)
        if folder.entries is None:
            raise refuse(errno.ENOTDIR, path)
        process.machine.names.pop(folder.inode, None)  # the server is asked, and tells of changes
        return folder, name

    def _there(self, process: Process, path: str) -> Node:
        node = self._find(process, path)
        if node is not None and node.links == 0:  # stale
            node = self._find(process, path, is_new=True)
        if node is None:
            raise refuse(errno.ENOENT, path)
        return node

    # Looking.

    def stat(self, process: Process, path: str, **_: object) -> os.stat_result:
        if path.startswith(PROC):
            return self._stat_proc(process, path)
        self._begin(process, "look", path)
        node = self._find(process, path)
        if node is None:
            raise refuse(errno.ENOENT, path)
        process.world.rules.looked(process, path, node)
        machine, now = process.machine, process.world.scheduler.now
        known = machine.times.get(node.inode)
        if machine.cache_seconds and known is not None and known[3] > now:
            return self._result(node, known[:3])
        if node.links == 0:
            node = self._there(process, path)
        return self._result(node, self._renew(process, node))

    lstat = stat

    def _renew(self, process: Process, node: Node) -> tuple[int, int, int]:
        times = len(node.data), node.written_ns, node.changed_ns
        if process.machine.cache_seconds:
            seconds = process.machine.cache_seconds * process.world.chance.random()
            until = process.world.scheduler.now + seconds
            process.machine.times[node.inode] = (*times, until)
        return times

    @staticmethod
    def _result(node: Node, times: tuple[int, int, int]) -> os.stat_result:
        nbytes, written, changed = times
        return os.stat_result(
            (
                *(MODES[node.is_folder], node.inode, 7, node.links, 0, 0, nbytes),
                *(written // NS, written // NS, changed // NS),
            ),
            {
                "st_atime_ns": written,
                "st_mtime_ns": written,
                "st_ctime_ns": changed,
                "st_mtime": written / NS,
            },
        )

    def fstat(self, process: Process, fd: int) -> os.stat_result:
        handle = self.handle(process, fd)
        self._begin(process, "look", handle.path, 0.1)
        self._check_stale(process, handle)
        return self._result(handle.node, self._renew(process, handle.node))

    def _stat_proc(self, process: Process, path: str) -> os.stat_result:
        if path != "/proc/self/ns/pid":
            raise refuse(errno.ENOENT, path)
        return os.stat_result((stat.S_IFREG, process.machine.namespace, 0, 1, 0, 0, 0, 0, 0, 0))

    def listdir(self, process: Process, path: str) -> list[str]:
        self._begin(process, "look", path)
        node = self._there(process, path)
        if node.entries is None:
            raise refuse(errno.ENOTDIR, path)
        return list(node.entries)

    def scandir(self, process: Process, path: str) -> Any:
        names = self.listdir(process, path)
        return Listing([Listed(self, process, path, name) for name in names])

    def access(self, process: Process, path: str, mode: int, **_: object) -> bool:
        return self._find(process, path) is not None

    def statvfs(self, process: Process, path: str) -> os.statvfs_result:
        self._begin(process, "look", path)
        blocks = self.disk.free_nbytes // 512
        return os.statvfs_result((512, 512, 1 << 40, blocks, blocks, 0, 0, 0, 0, 255))

    # Open files.

    @staticmethod
    def handle(process: Process, fd: int) -> Handle:
        handle = process.fds.get(fd)
        if handle is None:
            raise refuse(errno.EBADF)
        return handle

    @staticmethod
    def _check_stale(process: Process, handle: Handle) -> None:
        """Fail where another machine has removed the file, and nothing of it is known here."""
        node, machine = handle.node, process.machine
        if (
            machine.cache_seconds
            and not node.links
            and node.remover is not machine
            and process.world.chance.random() < 0.5
        ):
            raise refuse(errno.ESTALE, handle.path)

    def open(self, process: Process, path: str, flags: int, mode: int = 0o777, **_: Any) -> int:
        can_write = bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not flags & os.O_CREAT:
            fails = self._begin(process, "open", path)
            node = self._there(process, path)
            if node.is_folder and can_write:
                raise refuse(errno.EISDIR, path)
            self._renew(process, node)  # close to open: the server is asked
            process.opened[path] = process.world.scheduler.now
        else:
            fails = self._begin(process, "create", path)
            folder, name = self._parent(process, path)
            assert folder.entries is not None
            found = folder.entries.get(name)
            if found is not None and flags & os.O_EXCL:
                raise refuse(errno.EEXIST, path)
            if found is None:
                node = self.disk.make(False, process)
                self._stamp(process, node)
                process.world.rules.named(process, path, node)
                self.disk.change((folder, name, node))
                self._touch(process, folder)
            else:
                node = found
                if node.is_folder:
                    raise refuse(errno.EISDIR, path)
        if can_write:
            process.world.rules.changed(process, path, node)
            if flags & os.O_TRUNC and node.data:
                self.disk.resize(node, 0)
                self._stamp(process, node)
        self._end(process, path, fails)
        return process.open(node, path, can_write)

    def close(self, process: Process, fd: int) -> None:
        self.handle(process, fd)
        process.world.scheduler.step(process, "close", "", 0.1)
        process.fds.pop(fd, None)

    def pread(self, process: Process, fd: int, nbytes: int, place: int) -> bytes:
        handle = self.handle(process, fd)
        self._begin(process, "read", handle.path)
        self._check_stale(process, handle)
        if handle.node.is_folder:
            raise refuse(errno.EISDIR, handle.path)
        return bytes(self._read_by(process, handle)[place : place + nbytes])

    @staticmethod
    def _read_by(process: Process, handle: Handle) -> bytes | bytearray:
        """Return what a machine reads: what others wrote after it opened the file, or not."""
        node, known = handle.node, handle.known
        if known is None or node.writer is process.machine or node.data == known:
            return node.data
        return known if process.world.chance.random() < 0.5 else node.data

    @staticmethod
    def some(process: Process, nbytes: int) -> int:
        """Do less than was asked for, at times."""
        chance = process.world.chance
        return chance.randrange(1, nbytes) if nbytes > 1 and chance.random() < SHORT else nbytes

    def read(self, process: Process, fd: int, nbytes: int) -> bytes:
        handle = self.handle(process, fd)
        data = self.pread(process, fd, nbytes, handle.place)
        handle.place += len(data)
        return data

    def preadv(self, process: Process, fd: int, buffers: list[Any], place: int) -> int:
        data = self.pread(process, fd, self.some(process, buffers[0].nbytes), place)
        buffers[0][: len(data)] = data
        return len(data)

    def pwrite(self, process: Process, fd: int, data: Any, place: int) -> int:
        handle, block = self.handle(process, fd), bytes(data)
        if not handle.can_write:
            raise refuse(errno.EBADF, handle.path)
        chance = process.world.chance
        try:
            fails = self._begin(process, "write", handle.path)
        except GreenletExit:
            if process.is_torn:  # killed in the middle of it
                process.is_torn = False
                self.disk.write(handle.node, place, block[: chance.randrange(len(block) + 1)])
            raise
        if len(block) > 1 and (fails or chance.random() < SHORT):
            block = block[: chance.randrange(1, len(block))]
        process.world.rules.changed(process, handle.path, handle.node)
        self.disk.write(handle.node, place, block)
        self._stamp(process, handle.node)
        self._end(process, handle.path, fails)
        return len(block)

    def write(self, process: Process, fd: int, data: Any) -> int:
        handle = self.handle(process, fd)
        count = self.pwrite(process, fd, data, handle.place)
        handle.place += count
        return count

    def lseek(self, process: Process, fd: int, place: int, whence: int) -> int:
        handle = self.handle(process, fd)
        start = (0, handle.place, len(handle.node.data))[whence]
        handle.place = start + place
        return handle.place

    def ftruncate(self, process: Process, fd: int, nbytes: int) -> None:
        handle = self.handle(process, fd)
        fails = self._begin(process, "write", handle.path)
        process.world.rules.changed(process, handle.path, handle.node)
        self.disk.resize(handle.node, nbytes)
        self._stamp(process, handle.node)
        self._end(process, handle.path, fails)

    def posix_fallocate(self, process: Process, fd: int, place: int, nbytes: int) -> None:
        if len(self.handle(process, fd).node.data) < place + nbytes:
            self.ftruncate(process, fd, place + nbytes)

    def fsync(self, process: Process, fd: int) -> None:
        handle = self.handle(process, fd)
        try:
            fails = self._begin(process, "flush", handle.path, 5.0)
        except OSError:
            self.disk.fail_flush(handle.node, process.world.chance.random() < 0.5)
            raise
        self.disk.flush(handle.node)
        self._end(process, handle.path, fails)

    fdatasync = fsync

    # Names.

    def _stamp(self, process: Process, node: Node) -> None:
        node.written_ns = node.changed_ns = process.world.file_time(process.machine)
        node.writer = process.machine

    def _touch(self, process: Process, folder: Node) -> None:
        self._stamp(process, folder)

    def unlink(self, process: Process, path: str, **_: object) -> None:
        fails = self._begin(process, "unlink", path)
        folder, name = self._parent(process, path)
        assert folder.entries is not None
        node = folder.entries.get(name)
        if node is None:
            raise refuse(errno.ENOENT, path)
        if node.is_folder:
            raise refuse(errno.EISDIR, path)
        process.world.rules.removed(process, path, node)
        self.disk.change((folder, name, None))
        node.remover = process.machine
        self._touch(process, folder)
        self._end(process, path, fails)

    remove = unlink

    def rename(self, process: Process, path: str, target: Any, **_: object) -> None:
        target = os.fspath(target)
        fails = self._begin(process, "rename", f"{path} {target}")
        (folder, name), (place, new) = self._parent(process, path), self._parent(process, target)
        assert folder.entries is not None
        assert place.entries is not None
        node, before = folder.entries.get(name), place.entries.get(new)
        if node is None:
            raise refuse(errno.ENOENT, path)
        if before is not None and before.is_folder:
            raise refuse(errno.EISDIR, target)
        process.world.rules.removed(process, path, node, target)
        process.world.rules.named(process, target, node)
        self.disk.change((folder, name, None), (place, new, node))
        if before is not None:
            before.remover = process.machine
        node.changed_ns = process.world.file_time(process.machine)
        self._touch(process, folder)
        self._touch(process, place)
        self._end(process, path, fails)

    replace = rename

    def mkdir(self, process: Process, path: str, mode: int = 0o777, **_: object) -> None:
        fails = self._begin(process, "mkdir", path)
        folder, name = self._parent(process, path)
        assert folder.entries is not None
        if name in folder.entries:
            raise refuse(errno.EEXIST, path)
        node = self.disk.make(True, process)
        process.world.rules.changed(process, path, node)
        self._stamp(process, node)
        self.disk.change((folder, name, node))
        self._touch(process, folder)
        self._end(process, path, fails)

    def rmdir(self, process: Process, path: str, **_: object) -> None:
        fails = self._begin(process, "unlink", path)
        folder, name = self._parent(process, path)
        assert folder.entries is not None
        node = folder.entries.get(name)
        if node is None:
            raise refuse(errno.ENOENT, path)
        if node.entries is None:
            raise refuse(errno.ENOTDIR, path)
        if node.entries:
            raise refuse(errno.ENOTEMPTY, path)
        process.world.rules.removed(process, path, node)
        self.disk.change((folder, name, None))
        node.links, node.remover = 0, process.machine
        self._touch(process, folder)
        self._end(process, path, fails)

    def rmtree(self, process: Process, path: str, ignore_errors: bool = False) -> None:
        """Remove a folder and all in it, as shutil.rmtree does."""
        try:
            for name in self.listdir(process, path):
                each = f"{path}/{name}"
                try:
                    if stat.S_ISDIR(self.stat(process, each).st_mode):
                        self.rmtree(process, each, ignore_errors)
                    else:
                        self.unlink(process, each)
                except OSError:
                    if not ignore_errors:
                        raise
            self.rmdir(process, path)
        except OSError:
            if not ignore_errors:
                raise

    def utime(self, process: Process, path: Any, *_: object, **__: object) -> None:
        handle = process.fds.get(path)
        fails = self._begin(process, "utime", str(handle.path if handle else path))
        node = handle.node if handle else self._there(process, path)
        process.world.rules.touched(process, str(handle.path if handle else path), node)
        self._stamp(process, node)
        self._renew(process, node)
        process.machine.names.pop(node.inode, None)
        self._end(process, str(path), fails)

    def readlink(self, process: Process, path: str, **_: object) -> str:
        self._there(process, path)
        raise refuse(errno.EINVAL, path)

    def map(self, process: Process, fd: int) -> Mapped:
        handle = self.handle(process, fd)
        self._begin(process, "read", handle.path)
        return Mapped(self._read_by(process, handle))
