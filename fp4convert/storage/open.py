"""Open what a person names: a folder, a file, a Hub repository."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from fp4convert.errors import Fp4Error, InputError, shell_line
from fp4convert.storage.source import BRANCH, Access, Source, stopping, subfolder_of

REPOSITORY = r"[A-Za-z0-9_-][\w.-]*/[\w.-]+"  # organisation/name
GGUF_FILE = re.compile(rf"({REPOSITORY})/(?:([^?#]+)/)?([^/?#]+\.gguf)")  # of a repository
PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/({REPOSITORY})/?"
    r"(?:tree/([^/]+)/?(.*?)/?)?"
)  # of a repository on the Hub: its name, a revision, a folder
ADDRESS = re.compile(
    rf"(hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)?({REPOSITORY})"
    r"(?:@([\w.-]+))?(?:/([^?#]*))?(?:[?#].*)?"
)  # of anything in it: prefix, name, revision, path
ABSENT = ("source-unreachable", "offline", "no-source", "no-access")  # a repository may not exist
LISTED_EXPERT = ".experts.gate_up_projs.0.weight"  # where experts are a list of linear layers
LLAMA_CPP = ("blk.", "token_embd.", "v.blk.", "a.blk.")  # begin its names of tensors
VIEWS = ("tree", "blob", "resolve", "raw")  # before the revision, in paths of pages


class Place(NamedTuple):
    """The meaning of a reference that a person typed."""

    reference: str
    revision: str | None = None
    subfolder: str | None = None


def read_reference(text: str) -> Place:
    """Parse ~, the address of a page on the Hub, and ORG/NAME/."""
    if page := PAGE.fullmatch(text):
        repository, revision, folder = page.groups()
        return Place(repository, unquote(revision or "") or None, unquote(folder or "") or None)
    if text.startswith("~"):
        return Place(os.path.expanduser(text))
    bare = text.rstrip("/")
    is_repository = re.fullmatch(REPOSITORY, bare) and not os.path.exists(bare)
    return Place(bare if is_repository else text)


def page_of(place: Place) -> str:
    """Return the reference that read_reference parses as this place."""
    if place.revision is None and place.subfolder is None:
        return place.reference
    page = (
        f"https://huggingface.co/{place.reference}/tree/{quote(place.revision or BRANCH, safe='')}"
    )
    return f"{page}/{quote(place.subfolder)}" if place.subfolder else page


def absolute(reference: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the absolute path, or the name of a repository as it is."""
    return Path(os.path.abspath(reference)) if os.path.exists(reference) else reference


def _suggest_repository(text: str) -> str:
    """Return a next step with the repository of an address; "" for no address."""
    match = ADDRESS.fullmatch(text)
    if not match or not (match[1] or match[3]):
        return ""
    revision, parts = match[3], [part for part in (match[4] or "").split("/") if part]
    if len(parts) > 1 and parts[0] in VIEWS:
        revision, parts = parts[1], parts[2:]
    if parts and "." in parts[-1]:  # one file: repositories are read whole
        parts.pop()
    words = [match[2]]
    words += ["--revision", unquote(revision)] if revision else []
    words += ["--subfolder", unquote("/".join(parts))] if parts else []
    return f"Name the repository: {shell_line(*words)}"


def open_source(reference: str, access: Access | None = None, may_lack: bool = False) -> Source:
    """Open the checkpoint of that name, on this disk or on the Hub.

    reference  a folder, one file, or a repository
    may_lack   accept a folder of an unfinished conversion, without some shards
    Raises     InputError for no sound checkpoint, or a pipeline of several; SourceError for an
               unreachable Hub or an empty cache; AccessError
    """
    source = _open(reference, access or Access(), may_lack)
    if source.checkpoint.components:
        raise _pipeline(reference, source, access)
    return source


def open_with_components(reference: str, access: Access) -> tuple[Source, dict[str, Source]]:
    """Open a source, and the components of a pipeline at the same commit."""
    source = _open(reference, access)
    with stopping(source):
        names = source.checkpoint.components
        return source, {name: _open(reference, access_to(access, source, name)) for name in names}


def open_original(reference: str, access: Access, folder: str | None = None) -> Source:
    """Open the source of an artifact.

    In a pipeline it is the component `access.subfolder`, or the only one.

    folder  of the repository, if the record names one
    """
    access, wanted = replace(access, subfolder=folder), access.subfolder
    source = _open(reference, access)
    names = source.checkpoint.components
    if not names:
        return source
    if wanted not in names:
        if len(names) > 1:
            raise _pipeline(reference, source, None)
        wanted = names[0]
    return _open(reference, access_to(access, source, wanted))


def as_file_of(source: Source, container: str) -> Source:
    """Return the source, or its view as a dialect's kind of file.

    A GGUF file without llama.cpp's names is of a model of images, and reads as safetensors.
    """
    shards = source.checkpoint.shards
    is_gguf = any(shard.frame.container == "gguf" for shard in shards)
    if container == "gguf" or not is_gguf:
        return source
    if any(ref.name.startswith(LLAMA_CPP) for ref in source.checkpoint.tensors):
        return source
    from fp4convert.storage.gguf_views import ImageGguf

    return ImageGguf(source)


def access_to(access: Access, pipeline: Source, component: str) -> Access:
    """Return the access to a component, at the pipeline's commit."""
    folders = [folder.strip("/") for folder in (access.subfolder, component) if folder]
    revision = pipeline.checkpoint.revision or access.revision
    return replace(access, subfolder="/".join(folders), revision=revision)


def _pipeline(reference: str, source: Source, access: Access | None) -> InputError:
    """Stop a pipeline's source; return the error of one wanted checkpoint.

    access  of the command; None if its --subfolder means something else
    """
    source.stop()
    names = source.checkpoint.components
    found = f"{reference} is a Diffusers pipeline of {' and '.join(names)}"
    below = subfolder_of(access) if access else ""
    if not below and os.path.isdir(reference):
        step = f"Name the folder: {shell_line(Path(reference, names[0]))}"
    elif access:
        step = f"Name the folder: {shell_line('--subfolder', f'{below}/{names[0]}'.strip('/'))}"
    else:
        fetch = shell_line("hf", "download", reference, "--include", f"{names[0]}/*")
        step = f"Fetch one of its folders, and name that: {fetch} --local-dir FOLDER"
    return InputError("pipeline", f"{found}; expected one checkpoint", step)


def _open(reference: str, access: Access, may_lack: bool = False) -> Source:
    source = _open_stored(reference, access, may_lack)
    frames = [shard.frame.container for shard in source.checkpoint.shards]
    if "quantization" in source.checkpoint.config:
        from fp4convert.storage.mlx_biases import join_biases

        source = join_biases(source)
    if "quantization_config" in source.checkpoint.config:
        from fp4convert.storage.mxfp4_experts import as_deepseek

        source = as_deepseek(source)
    if "gguf" in frames:
        from fp4convert.storage.gguf_views import join_parts

        source = join_parts(source)
    if access.config is None or "gguf" not in frames:
        if not any(ref.name.endswith(LISTED_EXPERT) for ref in source.checkpoint.tensors):
            return source
        from fp4convert.storage.joined_experts import JoinedExperts

        return JoinedExperts(source)
    from fp4convert.storage.gguf_folder import as_folder
    from fp4convert.storage.local import LocalSource

    if not access.config.is_dir():
        detail = f"--config {access.config}: no such folder; expected one with a config.json"
        raise InputError("gguf-config", detail, "Give the model's folder: --config DIR.")
    return as_folder(source, LocalSource(access.config, may_lack=True))


def _open_stored(reference: str, access: Access, may_lack: bool) -> Source:
    path = Path(reference)
    try:
        is_there = path.exists()
    except OSError as error:
        detail = f"{reference[:100]}: {error.strerror}; expected a folder or a file"
        raise InputError(
            "no-source",
            detail,
            "Look for a typing error in the path; check that this user may read it.",
        ) from None
    if is_there and reference:  # Path("") is the current folder
        from fp4convert.storage.local import LocalSource

        return LocalSource(path, may_lack, subfolder_of(access), access.follows_links)
    gguf = GGUF_FILE.fullmatch(reference)
    if not gguf and not re.fullmatch(REPOSITORY, reference):
        name = reference or "the source without a name"
        expected = "expected a checkpoint on this disk, or organisation/name on the Hub"
        detail = f"{name}: no such file or folder; {expected}"
        raise InputError("no-source", detail, _suggest_repository(reference))
    from fp4convert.storage.hub.source import HubSource

    with _doubting(path):
        if not gguf:
            return HubSource(reference, access)
        folders = [folder for folder in (access.subfolder, gguf[2]) if folder]
        access = replace(access, subfolder="/".join(folders) or None)
        return HubSource(gguf[1], access, single=gguf[3])


@contextmanager
def _doubting(path: Path) -> Iterator[None]:
    """Add to errors of the Hub that a folder here may be meant.

    That is possible if the first part of the repository's name is a folder here.
    """
    try:
        yield
    except Fp4Error as error:
        if error.code not in ABSENT or not os.path.isdir(path.parts[0]):
            raise
        first, *others = error.lines
        found = f"{first}; the folder {path.parts[0]} is here, and {path} is not"
        next_step = f"Look for a typing error, where a path is meant. {error.next_step}"
        raise type(error)(error.code, (found, *others), next_step, error.tensor) from None
