"""Read a repository at one commit, without storing it.

What the Hub's own cache holds already is read from there.  Either way a shard that is read whole is
hashed as it flows, and a small one at once.  What is read beside that comes by two requests that
must agree, or from a file of the cache that is hashed before it is first used so.
With HF_HUB_OFFLINE the cache is all there is.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from fp4convert.errors import CORRUPT, InputError, SourceError
from fp4convert.storage.checkpoint_files import (
    CONFIG,
    GGUF,
    PIPELINE,
    check_index,
    choose_shards,
    find_components,
    find_homes,
    find_index,
    no_weights,
    read_index,
    sort_others,
    sort_pipeline,
)
from fp4convert.storage.hub.api import Patience, hub_headers
from fp4convert.storage.hub.fetchers import do_aside
from fp4convert.storage.hub.hashes import corrupt, hasher
from fp4convert.storage.hub.http import RangeReader, RemoteFile, check_token
from fp4convert.storage.hub.listing import list_files
from fp4convert.storage.hub.prefetch import (
    AGAIN,
    CONNECTIONS,
    OTHERWISE,
    PIECE_NBYTES,
    Piece,
    Pieces,
    split,
)
from fp4convert.storage.hub.stream import Stream
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header, TensorRef, read_header
from fp4convert.storage.source import Access, Checkpoint, name_of, read_each, read_whole, stopping

HEAD_NBYTES = 32 << 10  # of a shard are read first, or more: most headers are shorter
ENTRY_NBYTES = 88  # of a header for each tensor, beside its name: few take more
WHOLE_NBYTES = 1 << 20  # a shard no larger is fetched whole, as its hash then checks its header


class HubSource:
    """Fetches pieces of shards when they are asked for.

    It keeps them while the memory that it may use lasts.
    """

    is_streamed = True

    def __init__(
        self, reference: str, access: Access, patience: Patience | None = None, single: str = ""
    ) -> None:
        """Open a repository, or the one file of it."""
        patience = patience or Patience()
        self.name = single.removesuffix(GGUF) or name_of(reference)
        self._repo, self._single = reference, single
        self._tell = access.tell
        headers = hub_headers(access.token)
        check_token(headers)
        # In a thread: an interrupt does not wait for name servers.
        listing = do_aside(partial(list_files, reference, access, patience))
        self._commit, self._files, self._cached = listing.result()
        self._reader = RangeReader(headers, patience, access.tell)
        is_cached = self._cached.__contains__
        self._pieces = Pieces(self._fill, access.memory_nbytes, access.connections, is_cached)
        self._streams: dict[str, Stream] = {}
        self._own_files: dict[int, str] = {}  # of threads that read other shards, too
        self._heads: dict[str, bytes] = {}  # what each shard's header was made of
        self._entries_nbytes: Counter[str] = Counter()  # of headers, as the index lets expect
        self._sound: set[str] = set()  # files of the cache that were hashed
        self._lock = threading.Lock()
        with stopping(self):
            self.checkpoint = self._open()

    def read(self, ref: TensorRef) -> memoryview:
        return self.read_range(ref, 0, ref.nbytes)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        parts = list(self._views(ref.file, ref.start + start, ref.start + stop))
        if len(parts) == 1:
            return parts[0]
        whole = self._pieces.take_buffer(stop - start)
        _copy_into(parts, whole)
        return whole.toreadonly()

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        first = ref.start + start
        _copy_into(self._views(ref.file, first, first + buffer.nbytes), buffer)

    def _views(self, file: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, in parts that follow one another."""
        stream = self._streams.get(file)
        if stream and self._own_files.get(threading.get_ident(), file) != file:
            # Nobody waits for a shard that others work at.
            stream = stream if stream.is_near(start) else None
        if not stream and file in self._cached:
            self._check_cached(file)
        pieces = stream.cover(start, stop) if stream else self._pieces.cover(file, start, stop)
        coming = [self._pieces.fetch(piece) for piece in pieces]
        for piece, data in zip(pieces, coming, strict=True):
            yield data.result()[max(start - piece.start, 0) : stop - piece.start]
        if stream:
            stream.have_read(start, stop)

    def _check_cached(self, file: str) -> None:
        """Hash a file of the cache once.

        What is damaged there is fetched instead, or SourceError offline.
        """
        with self._lock:
            if file in self._sound or file not in self._cached:
                return
            remote = self._files[file]
            found = hasher(remote.nbytes, remote.oid)
            with self._cached[file].open("rb") as stream:
                while data := stream.read(PIECE_NBYTES):
                    found.update(data)
            if found.hexdigest() == remote.oid:
                self._sound.add(file)
            elif remote.url:
                del self._cached[file]
            else:
                self._pieces.failure = corrupt(file, remote.oid, found.hexdigest())
                raise self._pieces.failure

    def _fill(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer from the cache, or from the Hub."""
        if file not in self._cached:
            return self._reader.read_into(self._files[file], start, buffer)
        with self._cached[file].open("rb", buffering=0) as stream:
            stream.seek(start)
            done = 0
            while done < buffer.nbytes:
                count = stream.readinto(buffer[done:])
                if not count:
                    detail = f"{file} changed in the Hub's cache: it ends at byte {start + done}"
                    raise SourceError("source-changed", detail)
                done += count

    def has_file(self, file: str) -> bool:
        return file in self._files

    def open_file(self, file: str) -> BinaryIO:
        self._check_there(file)
        return cast(BinaryIO, _RemoteStream(self._pieces, self._files[file]))

    def file_nbytes(self, file: str) -> int:
        self._check_there(file)
        return self._files[file].nbytes

    def _check_there(self, file: str) -> None:
        if file not in self._files:
            detail = f"{self._repo} does not have it at commit {self._commit}"
            next_step = "Choose a commit that has it: --revision REV."
            raise InputError("unreadable", f"{file} cannot be read: {detail}", next_step)

    def check_unchanged(self, shard: str) -> None:
        """Do nothing: every reply was compared with the commit."""

    @contextmanager
    def proving(self, shards: Collection[str]) -> Iterator[None]:
        refuted = {shard: self._pieces.count_refuted(shard) for shard in shards}
        yield
        for shard in shards:
            self._settle(shard)
            self._pieces.check_plan()
            # Also by whoever has read it whole meanwhile.
            if self._pieces.count_refuted(shard) != refuted[shard]:
                raise SourceError(CORRUPT, f"{shard}: {OTHERWISE}", AGAIN)

    def _settle(self, shard: str) -> None:
        """Read a shard whole where something of it is not proved."""
        if not (read := self._pieces.unproven(shard)):
            return
        found = {piece: hashlib.sha256() for piece in read}
        with self.open_file(shard) as stream:  # hashed at its end
            at = 0
            while data := stream.read(PIECE_NBYTES):
                for piece, digest in found.items():
                    digest.update(data[max(0, piece.start - at) : max(0, piece.stop - at)])
                at += len(data)
        for piece, digest in found.items():
            self._pieces.settle(piece, digest.digest())

    def distrust(self) -> None:
        self._pieces.forget_unproven()

    def holds(self, path: Path) -> bool:
        return False

    @contextmanager
    def stream(self, file: str) -> Iterator[None]:
        remote = self._files[file]
        stream = self._streams[file] = Stream(
            self._pieces, file, remote.nbytes, remote.oid, self._heads.get(file, b"")
        )
        try:
            yield
            stream.end()
        except SourceError as error:
            if error.code == CORRUPT:
                self._pieces.forget(file)
                if remote.url:
                    self._cached.pop(file, None)
            raise
        finally:
            stream.stop()
            self._pieces.end_hash(file)
            del self._streams[file]

    @contextmanager
    def room_for(self, nbytes: int, refs: Collection[TensorRef]) -> Iterator[None]:
        together = defaultdict(list)
        for ref in refs:
            together[ref.file].append(Piece(ref.file, ref.start, ref.start + ref.nbytes))
        if len(together) > 1:
            self._own_files[threading.get_ident()] = next(iter(together))
        # What lies between the tensors of a group is fetched with them, and stays, where it is
        # less than they are.
        ranges = []
        for file, own in together.items():
            hull = Piece(file, min(each.start for each in own), max(each.stop for each in own))
            own_nbytes = sum(each.stop - each.start for each in own)
            more_nbytes = hull.stop - hull.start - own_nbytes
            is_whole = file in self._streams and more_nbytes < own_nbytes
            ranges += [hull] if is_whole else own
            nbytes += more_nbytes if is_whole else 0
        try:
            with self._pieces.room_for(nbytes, ranges):
                yield
        finally:
            self._own_files.pop(threading.get_ident(), None)

    def held_nbytes(self, groups: Iterable[int], at_once: int) -> int:
        return min(self._pieces.held_nbytes(groups, at_once), self.checkpoint.nbytes)

    def stop(self) -> None:
        self._pieces.close()
        self._reader.stop()
        for stream in list(self._streams.values()):
            stream.stop()

    def _open(self) -> Checkpoint:
        where = f"{self._repo} at commit {self._commit}"
        names = [name for name in self._files if "/" not in name]
        if self._single:
            self._check_there(self._single)
            names = [self._single]

        # A pipeline: its components are checkpoints, and what lies beside them travels.
        if PIPELINE in names:
            folders = {name.partition("/")[0] for name in self._files if "/" in name}
            if components := find_components(read_whole(self, PIPELINE), folders):
                sidecars, left_out = sort_pipeline(self._files, components)
                stamps = {name: self._files[name].oid for name in sidecars}
                at = self._repo, self._commit
                return Checkpoint(*at, {}, (), sidecars, left_out, (), stamps, components)

        # The shards: what the index or their names say.
        index = find_index(names)
        weight_map = read_index(read_whole(self, index), index) if index else None
        shards = choose_shards(where, names, weight_map)
        if not shards:
            raise no_weights(where, names)
        for name, file in (weight_map or {}).items():
            self._entries_nbytes[file] += len(name) + ENTRY_NBYTES
        headers = tuple(read_each(self, self._header, shards))
        try:
            homes = find_homes(headers)
            unindexed = check_index(homes, weight_map, index) if weight_map and index else ()
        except InputError as error:
            named = {
                ref.file for each in headers for ref in each.tensors if ref.name == error.tensor
            }
            for name in sorted(named | {(weight_map or {}).get(str(error.tensor), shards[0])}):
                self._prove(name)
            raise
        sidecars, left_out = sort_others(() if self._single else self._files, shards)
        config: dict[str, object] = {}
        if CONFIG in self._files:
            config = parse_json_object(read_whole(self, CONFIG), CONFIG, has_constants=True)
        return Checkpoint(
            repo=self._repo,
            revision=self._commit,
            config=config,
            shards=headers,
            sidecars=sidecars,
            left_out=left_out,
            unindexed=unindexed,
            stamps={name: self._files[name].oid for name in (*shards, *sidecars)},
        )

    def _header(self, name: str) -> Header:
        """Read the header of a shard, as the commit has it where it is none."""
        try:
            return self._read_header(name)
        except InputError:
            # It is what the commit names: what came for the header was not.
            self._prove(name)
            self._pieces.forget(name)
            self._heads.pop(name, None)
            return self._read_header(name)

    def _prove(self, name: str) -> None:
        """Hash a shard whose header makes no sense.

        Two requests that agree prove nothing: a mirror may have another file of that size.

        Raises  SourceError where it is not what the commit names
        """
        if name in self._cached:
            self._check_cached(name)
            self._pieces.forget(name)
            return
        self._tell(f"{name}: its header makes no sense; hashing the file, whether it came damaged")
        with self.open_file(name) as stream:
            while stream.read(PIECE_NBYTES):
                pass

    def _read_header(self, name: str) -> Header:
        nbytes, oid = self._files[name].nbytes, self._files[name].oid
        if nbytes <= min(WHOLE_NBYTES, PIECE_NBYTES) and name not in self._cached:
            head = self._pieces.fetch_whole(name, nbytes, oid).result()
        else:
            expected = min(max(HEAD_NBYTES, self._entries_nbytes[name]), PIECE_NBYTES, nbytes)
            head = self._pieces.fetch(Piece(name, 0, expected)).result()

        def read(offset: int, length: int) -> bytes:
            stop = offset + length
            beyond = split(name, max(offset, head.nbytes), max(stop, head.nbytes))
            coming = [self._pieces.fetch(piece) for piece in beyond]
            data = b"".join([head[offset:stop], *(piece.result() for piece in coming)])
            self._heads[name] = self._heads.get(name, b"")[:offset] + data
            return data

        if name.endswith(GGUF):
            from fp4convert.storage.gguf import read_coming_header

            return read_coming_header(name, nbytes, read)
        return read_header(name, nbytes, read)


class _RemoteStream(io.RawIOBase):
    """A file from its first byte to its last.

    SourceError at its end where the content is not what its hash says.
    """

    def __init__(self, pieces: Pieces, file: RemoteFile) -> None:
        self._pieces = pieces
        self._file = file
        self._hash = hasher(file.nbytes, file.oid)
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        at, nbytes = self._at, self._file.nbytes
        if at == nbytes:
            if self._hash.hexdigest() != self._file.oid:
                raise corrupt(self._file.name, self._file.oid, self._hash.hexdigest())
            return 0
        first, name = at - at % PIECE_NBYTES, self._file.name
        starts = range(first, min(nbytes, first + CONNECTIONS * PIECE_NBYTES), PIECE_NBYTES)
        pieces = [Piece(name, start, min(start + PIECE_NBYTES, nbytes), True) for start in starts]
        coming = [self._pieces.fetch(piece) for piece in pieces]
        data = coming[0].result()[at - first :][: view.nbytes]
        view[: data.nbytes] = data
        self._hash.update(data)
        self._at += data.nbytes
        return data.nbytes


def _copy_into(parts: Iterator[memoryview] | list[memoryview], buffer: memoryview) -> None:
    done, whole = 0, np.frombuffer(buffer, np.uint8)
    for part in parts:
        # By NumPy, which lets other threads run meanwhile.
        whole[done : done + part.nbytes] = np.frombuffer(part, np.uint8)
        done += part.nbytes
