"""List the files of a repository at one commit."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any, cast

from fp4convert.errors import Fp4Error, InputError, SourceError, shell_line
from fp4convert.progress import duration_text
from fp4convert.storage.checkpoint_files import no_subfolder
from fp4convert.storage.hub.api import PASSING, host_of, no_access, plain_words
from fp4convert.storage.hub.fetchers import do_aside
from fp4convert.storage.hub.http import AGAIN, RemoteFile, check_endpoint
from fp4convert.storage.hub.retry import Patience, Retry, pause_of, status_words
from fp4convert.storage.source import Access, commit_begun, subfolder_of

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # names of files in the cache
COMMIT = re.compile(r"[0-9a-f]{40}")
LIST_FACTOR = 9  # 3 minutes for a whole list, of 100,000 files some 30 MB
LARGEST = 1 << 62  # bytes of a file
# Errors of reading a reply that is no list.
NO_LIST = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


# A commit, its files by name, and the paths of those in the Hub's cache.
Listing = tuple[str, dict[str, RemoteFile], dict[str, Path]]


def list_files(repo: str, access: Access, patience: Patience) -> Listing:
    """List the files below the subfolder of `access`."""
    from huggingface_hub import constants

    check_endpoint(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        commit, files, cached = _list_cache(repo, access)
    else:
        commit, files, cached = _list_hub(repo, access, patience)
    subfolder = subfolder_of(access)
    if not subfolder:
        return (commit, files, cached)
    folder, below = f"{subfolder}/", {}
    for path, file in files.items():
        if path.startswith(folder):
            name = path.removeprefix(folder)
            below[name] = file._replace(name=name)
    if not below:
        folders = {name.partition("/")[0] for name in files if "/" in name}
        raise no_subfolder(f"{repo} at commit {commit}", subfolder, folders)
    kept = {name: cached[folder + name] for name in below if folder + name in cached}
    return (commit, below, kept)


def _list_hub(repo: str, access: Access, patience: Patience) -> Listing:
    """List the repository by the Hub; find its files in the cache."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

    info = _ask_hub(repo, access, patience)
    commit = info.sha
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _bad_listing(repo, f"{str(commit)[:60]!r} for a commit; expected 40 hex digits")
    files, cached = {}, {}
    for item in info.siblings or []:
        name, oid, nbytes = item.rfilename, item.blob_id, item.size
        if item.lfs:
            oid, nbytes = item.lfs.sha256, item.lfs.size
        if not isinstance(name, str):
            raise _bad_listing(repo, "a file without a name")
        _check_name(repo, name)
        # Hidden files are left out, and those without a hash or a size.
        if _is_hidden(name) or oid is None or nbytes is None:
            continue
        is_size = type(nbytes) is int and 0 <= nbytes < LARGEST
        if not is_size or not isinstance(oid, str) or not BLOB.fullmatch(oid):
            listed = f"{name!r} with size {str(nbytes)[:60]} and hash {str(oid)[:80]!r}"
            raise _bad_listing(repo, listed)
        url = hf_hub_url(repo, name, revision=commit, endpoint=constants.ENDPOINT)
        files[name] = RemoteFile(name, url, nbytes, oid, commit)
        known = try_to_load_from_cache(repo, name, revision=commit)
        path = Path(known) if isinstance(known, str) else None
        if path and path.resolve().name == oid and path.stat().st_size == nbytes:
            cached[name] = path
    return (commit, files, cached)


def _ask_hub(repo: str, access: Access, patience: Patience) -> Any:
    """Return huggingface_hub's ModelInfo; retry until the Hub answers."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Base class of errors in huggingface_hub's HTTP library.
    no_reply = cast(type[Exception], HfHubHTTPError.__bases__[0])
    api = HfApi(endpoint=constants.ENDPOINT, token=access.token)
    revision = access.revision or commit_begun(access.output, repo)
    retry, failures = Retry(patience, access.tell), 0
    limit = LIST_FACTOR * patience.timeout_seconds
    while True:
        seconds = None
        try:
            listing = do_aside(
                lambda: api.model_info(
                    repo, revision=revision, files_metadata=True, timeout=patience.timeout_seconds
                )
            )
            # A request's own time limit counts from one byte to the next.
            return listing.result(limit)
        except TimeoutError:
            reason = f"its answer did not end in {duration_text(limit)}"
        except HFValidationError:
            detail = f"{repo}: no such folder, and no name that the Hub knows"
            raise InputError("no-source", detail) from None
        except HfHubHTTPError as error:
            status, headers = error.response.status_code, error.response.headers
            if status not in PASSING:
                raise _refusal(repo, access, status, headers.get("X-Error-Code")) from None
            seconds = pause_of(headers.get)
            reason = status_words(status, seconds)
        except (no_reply, OSError) as error:
            reason = plain_words(error)
        except NO_LIST:
            reason = (
                "its reply is not a list of files; does a proxy or a login page answer instead?"
            )
        failures += 1
        host = host_of(constants.ENDPOINT)
        if not retry.wait(failures, f"{host}: {reason}", seconds):
            where = f"{repo} cannot be listed by {host}"
            detail = f"{where}: {failures} tries, the last: {reason}"
            raise SourceError("source-unreachable", detail, AGAIN)


def _refusal(repo: str, access: Access, status: int, code: str | None) -> Fp4Error:
    from huggingface_hub import constants

    if code == "RevisionNotFound":
        detail = f"{repo}: the Hub has no revision {access.revision!r} of it"
        next_step = "Give a branch, a tag or a commit: --revision REV; for the source of an"
        next_step += " artifact a folder on this disk."
        return InputError("no-revision", detail, next_step)
    if status == 404:
        detail = f"{repo}: no such folder or file here, and no such repository on the Hub"
        return InputError("no-source", detail)
    if status in (401, 403):
        return no_access(repo, f"{constants.ENDPOINT}/{repo}", status, code)
    detail = f"{repo}: the Hub answers HTTP {status}"
    return SourceError("source-unreachable", detail, "Run it again later.")


def _bad_listing(repo: str, found: str) -> SourceError:
    detail = f"{repo}: the Hub lists {found}"
    return SourceError(
        "bad-listing", detail, "Check that HF_ENDPOINT is a Hub; run it again later."
    )


def _list_cache(repo: str, access: Access) -> Listing:
    """List the revision by the cache, whose blobs are named after hashes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(repo, revision=access.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        detail = f"{repo} is not in the Hub's cache, and HF_HUB_OFFLINE keeps it from being fetched"
        raise SourceError(
            "offline", detail, "Unset HF_HUB_OFFLINE, or give a folder on this disk."
        ) from None
    files, cached = {}, {}
    for path in sorted(root.rglob("*")):
        name, blob = path.relative_to(root).as_posix(), path.resolve().name
        if not path.is_file() or _is_hidden(name):
            continue
        if not BLOB.fullmatch(blob):
            where = f"{repo}: the Hub's cache holds {name} under no hash"
            raise SourceError(
                "offline",
                f"{where}, so it cannot be checked",
                f"Give the folder itself: {shell_line(root)}",
            )
        files[name] = RemoteFile(name, "", path.stat().st_size, blob, root.name)
        cached[name] = path
    return (root.name, files, cached)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _check_name(repo: str, name: str) -> None:
    """Raise InputError for a name that leads out of the repository."""
    try:
        name.encode("utf-8")
        is_sound = (
            not PurePosixPath(name).is_absolute()
            and not {"", ".", ".."} & set(name.split("/"))
            and "\0" not in name
        )
    except UnicodeEncodeError:
        is_sound = False
    if not is_sound:
        detail = f"{repo} lists a file {name!r}; expected a path inside the repository"
        next_step = "Do not use this repository; take the checkpoint from its maker."
        raise InputError("file-name", detail, next_step)
