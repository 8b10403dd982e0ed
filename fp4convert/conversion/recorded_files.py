"""Compare a source on a disk with the hashes of its record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fp4convert.checkpoint.artifact import read_json
from fp4convert.errors import InputError
from fp4convert.execution.settings import Settings
from fp4convert.process import processors
from fp4convert.storage.checkpoint_files import PLAN_FILE, RECORD, UNDIGESTED, recorded_hashes
from fp4convert.storage.disk import hash_stream
from fp4convert.storage.source import Source


def refuse_harmed(source: Source, output: Path, settings: Settings) -> None:
    """Raise InputError where weights are not what our record says of them.

    The record of what is made would vouch for them.  Files beside the weights have to be there, and
    people may edit them.  A Hub's hashes prove what it sends; a worker that joins leaves it to
    whoever began.
    """
    is_begun = settings.is_joining and (output / PLAN_FILE).exists()
    if is_begun or source.is_streamed:
        return
    recorded = recorded_hashes(read_json(source, RECORD))
    for file in sorted(recorded.keys() - UNDIGESTED):
        if not source.has_file(file):
            raise _unsound(source, f"file-missing: {file} is recorded, and not there")
    shards = [shard for shard in source.checkpoint.shards if shard.file in recorded]
    if not shards:
        return
    files = [shard.file for shard in shards]
    settings.phases.begin("hash", sum(shard.nbytes for shard in shards))

    def read(file: str) -> str:
        with source.open_file(file) as stream:
            return hash_stream(stream, partial(settings.phases.report, file))

    with ThreadPoolExecutor(min(len(shards), processors())) as pool:
        try:
            for file, found in zip(files, pool.map(read, files), strict=True):
                if found != recorded[file]:
                    detail = f"hash-mismatch: {file} is not the file that was written"
                    raise _unsound(source, detail)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _unsound(source: Source, detail: str) -> InputError:
    found = f"{source.name}: the artifact is not sound: {detail}; expected what {RECORD} lists"
    next_step = "Download it again, or make it again: fp4convert verify names every such file."
    next_step += f" Where it was changed on purpose, take 'files' out of {RECORD}."
    return InputError("unsound-artifact", found, next_step)
