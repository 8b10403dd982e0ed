"""Where the weights come from: local and hub offer a Source each, and nothing above asks which.

A source makes a Checkpoint of what it finds (addresses, no data) with the checks below, and gives the bytes behind it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from fp4convert.errors import InputError
from fp4convert.gguf_shard import GGUF
from fp4convert.shard import Header, TensorRef, parse_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
REPOSITORY = r"[A-Za-z0-9_-][\w.-]*/[\w.-]+"  # organisation/name
WEIGHTS = ".safetensors"
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d{1,9})\.safetensors")
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pkl", ".npz"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
PLAN_FILE = ".fp4convert/plan.json"  # in a folder that fp4convert writes: the plan being carried out, or carried out


@dataclass(frozen=True, slots=True)
class Access:
    """How a repository on the Hub is opened; a path on this disk needs none of it.

    revision      branch, tag or commit; None for the main branch
    subfolder     of the repository, where the checkpoint is
    token         None for the one that the Hub's own client knows
    memory_nbytes what is kept of it in memory for a second reading
    tell          gets a line for people when the Hub makes everything wait
    transport     http, or xet for hf_xet
    connections   at once; None for as many as pieces.py finds right
    output        where an unfinished plan may lie, which says of which commit it is
    """

    revision: str | None = None
    subfolder: str | None = None
    token: str | None = None
    memory_nbytes: int = 1 << 30
    tell: Callable[[str], None] = lambda line: None
    transport: str = "http"
    output: Path | None = None
    connections: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a source holds.

    repo, revision  Hub repository and commit; None for a folder or a file
    config          config.json, or {} where there is none
    shards          headers, in the order of their names
    sidecars        files beside the weights that travel unchanged, relative to the source
    left_out        files that are weights in another form and stay behind
    unindexed       tensors that the index, where there is one, does not name
    stamps          per shard and sidecar a word that changes when its bytes may have (for resuming; part of no digest)
    """

    repo: str | None
    revision: str | None
    config: dict[str, object]
    shards: tuple[Header, ...]
    sidecars: tuple[str, ...]
    left_out: tuple[str, ...]
    unindexed: tuple[str, ...]
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

    @property
    def is_streamed(self) -> bool:
        """True where bytes come best in the order of the file."""

    @property
    def held_nbytes(self) -> int:
        """What may be kept in memory of the bytes that were read."""

    def read(self, ref: TensorRef) -> memoryview:
        """The bytes of one tensor, read-only."""

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        """Bytes start..stop-1 of one tensor, read-only; no others are fetched for it, but ahead of it in a stream."""

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
        """True where that path is the source's folder or lies inside it; for a single file, where it is its folder."""

    def stream(self, file: str) -> AbstractContextManager[None]:
        """Meanwhile the shard's tensors are read, all of them; SourceError at the end where its bytes were not the right ones."""

    def room_for(self, nbytes: int) -> AbstractContextManager[None]:
        """Meanwhile so many bytes are read more than once; waits until there is memory for them."""

    def stop(self) -> None:
        """Make reads in other threads fail soon; nothing is read afterwards."""


@contextmanager
def stopping(*sources: Source) -> Iterator[None]:
    """Whatever ends the work early makes reads in other threads fail soon; enter it inside of what waits for these threads."""
    try:
        yield
    except BaseException:
        for source in sources:
            source.stop()
        raise


def open_source(reference: str, access: Access | None = None, may_be_empty: bool = False) -> Source:
    """The source of that name: a folder or one file on this disk, else a repository on the Hub.

    may_be_empty  accept a folder without weights: a conversion that has not got to its first shard
    Raises        InputError where it is none of them, or is not a sound checkpoint; SourceError where the Hub cannot be reached
                  or has nothing cached, AccessError where it gives no access
    """
    path = Path(reference)
    try:
        is_there = path.exists()
    except OSError as error:
        raise InputError("no-source", f"{reference[:100]}: {error.strerror}; expected a folder or a file") from None
    if is_there:
        from fp4convert.sources.local import LocalSource

        return LocalSource(path, may_be_empty)
    if not re.fullmatch(REPOSITORY, reference):
        detail = f"{reference}: no such file or folder; expected a checkpoint on this disk, or organisation/name on the Hub"
        raise InputError("no-source", detail, "Look for a typing error in the path or the name.")
    from fp4convert.sources.hub import HubSource

    return HubSource(reference, access or Access())


def name_of(reference: str) -> str:
    """What a person calls a source: the last part of its path, or of its name on the Hub."""
    path = Path(reference)
    try:
        return path.stem if path.is_file() else path.resolve().name
    except (OSError, ValueError, RuntimeError):  # no path at all, which open_source tells
        return path.name


def commit_begun(output: Path | None, repo: str) -> str | None:
    """The commit of a repository that an output was begun from; None where there is none."""
    try:
        plan = json.loads((output / PLAN_FILE).read_text(encoding="utf-8")) if output else {}
        if not output or plan["source"]["repo"] != repo:
            return None
        return str(plan["source"]["revision"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no plan, or a damaged one, which open_output judges


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
    sound: set[object] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in sound:
            _check_shard_name(tensor, file)
            sound.add(file)
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


def check_index(shards: Sequence[Header], weight_map: dict[str, str]) -> tuple[str, ...]:
    """The tensors that an index omits; InputError where it contradicts the headers."""
    held = {shard.file: {ref.name for ref in shard.tensors} for shard in shards}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise InputError("index", f"{INDEX}: {tensor!r} is not in {file}, where the index says it is")
    return tuple(ref.name for shard in shards for ref in shard.tensors if ref.name not in weight_map)


def check_unique(shards: Sequence[Header]) -> None:
    """InputError when two shards hold a tensor of the same name."""
    owner: dict[str, str] = {}
    for shard in shards:
        for ref in shard.tensors:
            if ref.name in owner:
                detail = f"{ref.name!r} is in two shards, {owner[ref.name]} and {shard.file}; expected one"
                raise InputError("tensor-twice", detail, "Remove the file that does not belong.", ref.name)
            owner[ref.name] = shard.file


def choose_shards(where: object, names: Collection[str], weight_map: dict[str, str] | None) -> list[str]:
    """The files that are the checkpoint, of those beside one another: what the index names, or else what engines read.

    where   how messages name the place
    Raises  InputError where there are none, or where names contradict the index
    """
    found = sorted(name for name in names if name.endswith(WEIGHTS)) or sorted(name for name in names if name.endswith(GGUF))
    if len(found) > 1 and found[0].endswith(GGUF):
        detail = f"{where}: {len(found)} GGUF files, the first {found[0]}; expected one, each is a model of its own"
        raise InputError("gguf", detail, f"Choose one: {where}/{found[0]}.")
    unlisted = [SINGLE] if SINGLE in found else found  # without an index, as engines read a folder
    if weight_map is not None and SINGLE in set(found) - set(weight_map.values()):
        detail = f"the folder holds both {SINGLE} and {INDEX}, which does not name it; expected one of them"
        raise InputError("index-and-single", detail, "Remove the one that does not belong.")
    if weight_map is None:
        _check_complete(unlisted)
    shards = unlisted if weight_map is None else sorted(set(weight_map.values()))
    for missing in sorted(set(shards) - set(names)):
        raise InputError("missing-shard", f"{missing} is missing, the index names it", "Download the file again.")
    return shards


def _check_complete(shards: Sequence[str]) -> None:
    """InputError where names say that a checkpoint has more shards than there are, and no index says otherwise."""
    sets: dict[tuple[str, int], int] = {}
    for name in shards:
        if match := NUMBERED.fullmatch(name):
            key = match[1], int(match[3])
            sets[key] = sets.get(key, 0) + 1
    for (stem, expected), found in sets.items():
        if found < expected:
            detail = f"{stem}*{WEIGHTS}: {found} shards, whose names say that there are {expected}; there is no index either"
            raise InputError("missing-shard", detail, "Download the whole checkpoint again.")


def no_weights(where: object, names: Iterable[str]) -> InputError:
    """The error for a place without weights that can be read."""
    detail = f"{where}: no safetensors file; expected model.safetensors or shards with an index"
    if {os.path.splitext(name)[1] for name in names} & PICKLES:
        detail = f"{where}: only pickle weights (.bin, .pt), which run code when they are loaded; expected safetensors"
        return InputError(
            "pickle", detail, "Convert them first, in a sandbox: save_pretrained of transformers writes safetensors."
        )
    return InputError("no-weights", detail)


def sort_others(files: Iterable[str], shards: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of all files beside the shards, those that travel unchanged, and weights in another form, which stay behind."""
    sidecars: list[str] = []
    left_out: list[str] = []
    for file in files:
        if file not in shards and file not in ("config.json", INDEX):
            is_root_weight = "/" not in file and file.endswith(WEIGHTS)
            is_weight = is_root_weight or os.path.splitext(file)[1] in OTHER_WEIGHTS
            (left_out if is_weight else sidecars).append(file)
    return tuple(sidecars), tuple(left_out)
