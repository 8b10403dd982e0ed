"""Read a repository at one commit, without storing it.

Files in the Hub's own cache are read from there; with HF_HUB_OFFLINE there are no others.  A shard
that is read whole is hashed as it flows, a small one at once.  Other reads need two equal replies,
or a file of the cache that was hashed first.
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
    gguf_parts,
    no_weights,
    read_index,
    sort_others,
    sort_pipeline,
)
from fp4convert.storage.hub.api import hub_headers
from fp4convert.storage.hub.fetchers import do_aside
from fp4convert.storage.hub.http import RangeReader, RemoteFile, check_token
from fp4convert.storage.hub.listing import list_files
from fp4convert.storage.hub.pieces import AGAIN, OTHERWISE, Piece, corrupt, hasher
from fp4convert.storage.hub.prefetch import CONNECTIONS, PIECE_NBYTES, Pieces, split
from fp4convert.storage.hub.retry import Patience
from fp4convert.storage.hub.stream import Stream
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import Header, TensorRef, read_header
from fp4convert.storage.source import (
    Access,
    Checkpoint,
    Source,
    name_of,
    read_each,
    read_whole,
    stopping,
)

HEAD_NBYTES = 32 << 10  # first read of a shard, at least: most headers are shorter
ENTRY_NBYTES = 88  # header of one tensor without its name: few take more
WHOLE_NBYTES = 1 << 20  # up to here a shard is fetched whole: its hash checks its header


class HubSource(Source):
    """Fetches pieces of shards on demand; keeps them within its memory."""

    is_streamed = True

    def __init__(
        self, reference: str, access: Access, patience: Patience | None = None, single: str = ""
    ) -> None:
        """Open a repository, or one file of it."""
        patience = patience or Patience()
        self.name = single.removesuffix(GGUF) or name_of(reference)
        self._repo, self._single = reference, single
        self._tell = access.tell
        headers = hub_headers(access.token)
        check_token(headers)
        # In a thread: an interrupt must not wait for name servers.
        listing = do_aside(partial(list_files, reference, access, patience))
        self._commit, self._files, self._cached = listing.result()
        self._reader = RangeReader(headers, patience, access.tell)
        is_cached = self._cached.__contains__
        self._pieces = Pieces(self._fill, access.memory_nbytes, access.connections, is_cached)
        self._streams: dict[str, Stream] = {}
        self._streamed_for: dict[int, str] = {}  # thread -> its shard, if it reads others, too
        self._heads: dict[str, bytes] = {}  # the bytes of each shard's header
        self._entries_nbytes: Counter[str] = Counter()  # of headers, estimated from the index
        self._sound: set[str] = set()  # hashed files of the cache
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
        """Yield the bytes of a range in consecutive parts."""
        stream = self._streams.get(file)
        if stream and self._streamed_for.get(threading.get_ident(), file) != file:
            # Do not wait for the shard of another thread.
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
        """Hash a file of the cache once; fetch a damaged one instead.

        Raises  SourceError for a damaged one when offline
        """
        with self._lock:
            if file in self._sound or file not in self._cached:
                return
            remote = self._files[file]
            digest = hasher(remote.nbytes, remote.oid)
            with self._cached[file].open("rb") as stream:
                while data := stream.read(PIECE_NBYTES):
                    digest.update(data)
            if digest.hexdigest() == remote.oid:
                self._sound.add(file)
            elif remote.url:
                del self._cached[file]
            else:
                self._pieces.failure = corrupt(file, remote.oid, digest.hexdigest())
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
        """Do nothing: every reply is compared with the commit."""

    @contextmanager
    def proving(self, shards: Collection[str]) -> Iterator[None]:
        refuted = {shard: self._pieces.count_refuted(shard) for shard in shards}
        yield
        for shard in shards:
            self._settle(shard)
            self._pieces.check_plan()
            # Another thread may have refuted it meanwhile.
            if self._pieces.count_refuted(shard) != refuted[shard]:
                raise SourceError(CORRUPT, f"{shard}: {OTHERWISE}", AGAIN)

    def _settle(self, shard: str) -> None:
        """Read a shard whole if it has unproven pieces."""
        if not (unproven := self._pieces.unproven(shard)):
            return
        digests = {piece: hashlib.sha256() for piece in unproven}
        with self.open_file(shard) as stream:  # checks the hash at its end
            at = 0
            while data := stream.read(PIECE_NBYTES):
                for piece, digest in digests.items():
                    digest.update(data[max(0, piece.start - at) : max(0, piece.stop - at)])
                at += len(data)
        for piece, digest in digests.items():
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
            self._streamed_for[threading.get_ident()] = next(iter(together))
        # Gaps between the tensors of a group stay, too, if they are smaller than the tensors.
        ranges = []
        for file, pieces in together.items():
            hull = Piece(file, min(p.start for p in pieces), max(p.stop for p in pieces))
            tensors_nbytes = sum(piece.nbytes for piece in pieces)
            gaps_nbytes = hull.nbytes - tensors_nbytes
            is_whole = file in self._streams and gaps_nbytes < tensors_nbytes
            ranges += [hull] if is_whole else pieces
            nbytes += gaps_nbytes if is_whole else 0
        try:
            with self._pieces.room_for(nbytes, ranges):
                yield
        finally:
            self._streamed_for.pop(threading.get_ident(), None)

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
            names = gguf_parts(self._single, self._files)
            self._check_there(names[0])

        # A pipeline: its components are checkpoints, and files beside them are copied.
        if PIPELINE in names:
            folders = {name.partition("/")[0] for name in self._files if "/" in name}
            if components := find_components(read_whole(self, PIPELINE), folders):
                sidecars, left_out = sort_pipeline(self._files, components)
                stamps = {name: self._files[name].oid for name in sidecars}
                at = self._repo, self._commit
                return Checkpoint(*at, {}, (), sidecars, left_out, (), stamps, components)

        # The shards: by the index or by their names.
        index = find_index(names)
        weight_map = read_index(read_whole(self, index), index) if index else None
        shards = choose_shards(where, names, weight_map)
        if not shards:
            raise no_weights(where, names)
        for name, file in (weight_map or {}).items():
            self._entries_nbytes[file] += len(name) + ENTRY_NBYTES
        headers, unindexed = self._headers(shards, weight_map or {}, index or "")
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

    def _headers(
        self, shards: list[str], weight_map: dict[str, str], index: str
    ) -> tuple[tuple[Header, ...], tuple[str, ...]]:
        """Return the headers, and the tensors that the index lacks.

        Headers that contradict each other or the index are read again, from shards that are proved.
        """
        headers = tuple(read_each(self, self._header, shards))
        try:
            return headers, _unindexed(headers, weight_map, index)
        except InputError as error:
            tensor = error.tensor or ""
        holders = [ref.file for each in headers for ref in each.tensors if ref.name == tensor]
        for name in sorted({*holders, weight_map.get(tensor, shards[0])}):
            self._distrust_header(name)
        headers = tuple(read_each(self, self._header, shards))
        return headers, _unindexed(headers, weight_map, index)

    def _header(self, name: str) -> Header:
        """Read the header of a shard, again from a proved shard if it is unsound."""
        try:
            return self._read_header(name)
        except InputError:
            self._distrust_header(name)
            return self._read_header(name)

    def _distrust_header(self, name: str) -> None:
        """Prove a shard, and forget its header, which may have come damaged."""
        self._prove(name)
        self._pieces.forget(name, is_used=False)
        self._heads.pop(name, None)

    def _prove(self, name: str) -> None:
        """Hash a shard whose header makes no sense.

        Two equal replies prove nothing: a mirror may have another file of that size.
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


def _unindexed(
    headers: tuple[Header, ...], weight_map: dict[str, str], index: str
) -> tuple[str, ...]:
    """Return the tensors that the index lacks; raise as find_homes does."""
    homes = find_homes(headers)
    return check_index(homes, weight_map, index) if weight_map else ()


class _RemoteStream(io.RawIOBase):
    """A file from its first byte to its last; SourceError at a wrong hash."""

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
        # NumPy releases the GIL for the copy.
        whole[done : done + part.nbytes] = np.frombuffer(part, np.uint8)
        done += part.nbytes
