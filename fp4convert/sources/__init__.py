"""Where the weights come from: every module here offers a Source, and nothing above asks which.

A source makes a Checkpoint of what it finds (addresses, no data) with the checks below, and gives the bytes behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from fp4convert.errors import InputError
from fp4convert.shard import Header, TensorRef, parse_json_object

INDEX = "model.safetensors.index.json"
PLAN_FILE = ".fp4convert/plan.json"  # in a folder that fp4convert writes: the plan being carried out, or carried out


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a source holds.

    repo, revision  Hub repository and commit; None for a folder or a file
    config          config.json, or {} where there is none
    shards          headers, in the order of their names
    sidecars        files beside the weights that travel unchanged, relative to the source
    left_out        files that are weights in another form and stay behind
    stamps          per shard a word that changes when its bytes may have (for resuming; part of no digest)
    """

    repo: str | None
    revision: str | None
    config: dict[str, object]
    shards: tuple[Header, ...]
    sidecars: tuple[str, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    stamps: dict[str, str]

    @property
    def tensors(self) -> Iterator[TensorRef]:
        return (ref for shard in self.shards for ref in shard.tensors)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def model_types(self) -> frozenset[str]:
        """Every model_type that config.json names, those of nested configs too."""
        return frozenset(_model_types(self.config))


class Source(Protocol):
    """A checkpoint and the bytes behind it."""

    @property
    def name(self) -> str:
        """What a person calls it: the last part of its path."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    def read(self, ref: TensorRef) -> memoryview:
        """The bytes of one tensor, read-only, valid until `close`."""

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        """The bytes of one tensor from `start` on, as many as `buffer` holds; SourceError where they are gone."""

    def has_file(self, file: str) -> bool:
        """True where the source's folder holds that file."""

    def open_file(self, file: str) -> BinaryIO:
        """A file of the source, opened for reading."""

    def file_nbytes(self, file: str) -> int:
        """The size of a file of the source."""

    def check_unchanged(self, shard: str) -> None:
        """SourceError where a shard was written, replaced or removed since its header was read."""

    def holds(self, path: Path) -> bool:
        """True where that path is the source's folder or lies inside it."""


def open_source(reference: str, may_be_empty: bool = False) -> Source:
    """The source of that name: a folder or one .safetensors file.

    may_be_empty  accept a folder without weights: a conversion that has not got to its first shard
    Raises        InputError where it is neither, or is not a sound checkpoint
    """
    path = Path(reference)
    try:
        is_there = path.exists()
    except OSError as error:
        raise InputError("no-source", f"{reference[:100]}: {error.strerror}; expected a folder or a file") from None
    if not is_there:
        detail = f"{reference}: no such file or folder; expected a checkpoint on this disk"
        raise InputError("no-source", detail, f"From the Hub, first: hf download {reference} --local-dir FOLDER")
    from fp4convert.sources.local import LocalSource

    return LocalSource(path, may_be_empty)


def _model_types(config: dict[str, object]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _model_types(value)
        elif key == "model_type" and isinstance(value, str):
            yield value


def read_index(text: bytes) -> dict[str, str]:
    """Tensor name -> shard of a model.safetensors.index.json, checked; raises InputError."""
    weight_map = parse_json_object(text, f"{INDEX}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("index", f"{INDEX}: no weight_map that maps tensors to files")
    for tensor, file in weight_map.items():
        _check_shard_name(tensor, file)
    folded = Counter(file.lower() for file in set(weight_map.values()))
    if twins := sorted(file for file in set(weight_map.values()) if folded[file.lower()] > 1):
        detail = f"{INDEX}: weight_map names {twins[0]!r} and {twins[1]!r}, which differ only in case"
        raise InputError("index", f"{detail}; expected names that any file system keeps apart")
    return dict(weight_map)


def _check_shard_name(tensor: str, file: object) -> None:
    if not isinstance(file, str):
        raise InputError("index", f"{INDEX}: weight_map gives {file!r} for {tensor!r}; expected a file name")
    if len(PurePosixPath(file).parts) != 1 or file in (".", "..") or "\0" in file:
        raise InputError("index-outside", f"{INDEX}: {tensor!r} is said to lie in {file!r}, outside the folder of shards")
    if not file.endswith(".safetensors"):
        raise InputError("index", f"{INDEX}: {tensor!r} is said to lie in {file!r}; expected a .safetensors file")


def check_index(shards: Sequence[Header], weight_map: dict[str, str]) -> list[str]:
    """Warnings where an index omits tensors; InputError where it contradicts the headers."""
    held = {shard.file: {ref.name for ref in shard.tensors} for shard in shards}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise InputError("index", f"{INDEX}: {tensor!r} is not in {file}, where the index says it is")
    omitted = [ref.name for shard in shards for ref in shard.tensors if ref.name not in weight_map]
    if not omitted:
        return []
    return [f"{len(omitted)} tensors are not in the index, the first {omitted[0]!r}; they are converted all the same"]


def check_unique(shards: Sequence[Header]) -> None:
    """InputError when two shards hold a tensor of the same name."""
    owner: dict[str, str] = {}
    for shard in shards:
        for ref in shard.tensors:
            if ref.name in owner:
                detail = f"{ref.name!r} is in two shards, {owner[ref.name]} and {shard.file}; expected one"
                raise InputError("tensor-twice", detail, "Remove the file that does not belong.", ref.name)
            owner[ref.name] = shard.file
