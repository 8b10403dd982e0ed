"""Write shards of safetensors or GGUF files, tensor by tensor.

Every place is planned before.  The package safetensors judges the result, too
(difference_from_package).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from fp4convert.storage.disk import read_blocks, reserve, write_error, write_errors_at
from fp4convert.storage.safetensors import TensorRef, nbytes_of
from fp4convert.storage.system import AS_BYTES, begin_flush, write_at

# Shorter calls cost more: 64 K a twentieth of a conversion. Longer ones gain no more, and hold
# the file's lock against other threads.
WRITE_NBYTES = 256 << 10
FLUSH_NBYTES, LEAST_FLUSH_NBYTES = 4 << 20, 64 << 10  # of one begin_flush


class ShardWriter:
    """Writes one shard: header, tensors at planned places, zeros between.

    Threads may append to different tensors at once.
    """

    def __init__(
        self, path: Path, header: bytes, outputs: Sequence[TensorRef], nbytes: int
    ) -> None:
        self.path = path
        self._outputs = outputs
        self._nbytes = nbytes
        self._reading: BinaryIO | None = None  # the same file, for the hash
        self._fd = -1
        self.begin_again()
        with write_errors_at(path, self._nbytes):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | AS_BYTES, 0o666)
            try:
                reserve(self._fd, nbytes)
                os.ftruncate(self._fd, nbytes)
                self._pwrite(memoryview(header), 0)
            except BaseException:
                self.discard()
                raise

    def begin_again(self) -> None:
        """Forget everything that was appended."""
        self._filled = {ref.name: 0 for ref in self._outputs}
        self._whole = 0  # complete outputs, from the first on
        self._sha256, self._hashed_nbytes = hashlib.sha256(), 0

    def append(self, ref: TensorRef, data: memoryview) -> None:
        """Write the next bytes of an output; on Linux the disk begins with them."""
        flat, before = data.cast("B"), self._filled[ref.name]
        after = before + flat.nbytes
        try:
            self._pwrite(flat, ref.start + before)
        except OSError as error:
            raise write_error(self.path, error, self._nbytes) from error
        self._filled[ref.name] = after
        first, last = (nbytes // FLUSH_NBYTES * FLUSH_NBYTES for nbytes in (before, after))
        if after == ref.nbytes and after - first >= LEAST_FLUSH_NBYTES:
            last = after
        if last > first:
            begin_flush(self._fd, ref.start + first, last - first)

    def _pwrite(self, data: memoryview, offset: int) -> None:
        while data:
            written = write_at(self._fd, data[:WRITE_NBYTES], offset)
            data, offset = data[written:], offset + written

    def hash_on(self, check: Callable[[int], None]) -> None:
        """Hash all bytes before the first gap, in one thread; others may append.

        check  is called with the size of every block; its exceptions end the reading
        """
        outputs, filled = self._outputs, self._filled
        while self._whole < len(outputs):
            ref = outputs[self._whole]
            if filled[ref.name] < ref.nbytes:
                break
            self._whole += 1
        else:
            return self._hash_until(self._nbytes, check)
        self._hash_until(ref.start + filled[ref.name], check)

    def _hash_until(self, end: int, check: Callable[[int], None]) -> None:
        with write_errors_at(self.path, self._nbytes):
            if self._reading is None:
                self._reading = self.path.open("rb", buffering=0)
            self._reading.seek(self._hashed_nbytes)
            for block in read_blocks(self._reading, end - self._hashed_nbytes):
                self._sha256.update(block)
                self._hashed_nbytes += block.nbytes
                check(block.nbytes)

    def finish(self, check: Callable[[int], None] = lambda nbytes: None) -> str:
        """Flush and close a complete shard; return its sha256.

        The rest is hashed while the disk works.

        check  as in hash_on
        """
        short = [ref.name for ref in self._outputs if self._filled[ref.name] != ref.nbytes]
        if short:
            raise RuntimeError(f"{self.path.name}: {short[0]!r} was not filled")
        from concurrent.futures import ThreadPoolExecutor

        with write_errors_at(self.path, self._nbytes), ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(os.fsync, self._fd)
            self._hash_until(self._nbytes, check)
            flushed.result()
        self._close()
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Close the file, and remove it if the disk allows."""
        self._close()
        with suppress(OSError):
            self.path.unlink()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        if self._reading:
            self._reading.close()


def difference_from_package(path: Path, refs: Iterable[TensorRef]) -> str:
    """Compare addresses with those that the package safetensors reads.

    It reads the header alone, and gives the order of the tensors: their offsets follow, for there
    is no gap, and they end with the file.
    Returns  the difference, as the end of a sentence that begins with the file; "" for none
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            kinds = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices}
    except SafetensorError as error:
        return f"is refused by the package safetensors: {error}"
    sizes = [nbytes_of(*kind) for kind in kinds.values()]
    begins = accumulate(sizes, initial=path.stat().st_size - sum(sizes))
    theirs = {
        name: (*kind, begin) for (name, kind), begin in zip(kinds.items(), begins, strict=False)
    }
    ours = {ref.name: (ref.dtype, ref.shape, ref.start) for ref in refs}
    for name in sorted(ours.keys() | theirs.keys()):
        if (own := ours.get(name)) != (other := theirs.get(name)):
            return (
                f"holds {name!r} as {_address_text(other)} by the package safetensors,"
                f" and as {_address_text(own)} by fp4convert"
            )
    return ""


def _address_text(address: tuple[str, tuple[int, ...], int] | None) -> str:
    """Describe a dtype, a shape and an offset; None is no tensor."""
    if address is None:
        return "nothing"
    dtype, shape, start = address
    return f"{dtype} {list(shape)} at byte {start}"
