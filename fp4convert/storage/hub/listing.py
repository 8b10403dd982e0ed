"""List the files of a repository at one commit."""

from __future__ import annotations

import re
import time
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from fp4convert.errors import Fp4Error, InputError, SourceError
from fp4convert.storage.checkpoint_files import no_subfolder
from fp4convert.storage.hub.http import (
    AGAIN,
    PASSING,
    Patience,
    RemoteFile,
    check_endpoint,
    host_of,
    no_access,
    pause_of,
    plain_words,
)
from fp4convert.storage.source import Access, commit_begun, subfolder_of

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # how the cache names its files
COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST = 1 << 62  # bytes of a file: more can be neither asked for nor written
NO_LIST = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
)  # what reading another reply raises


class Listing(NamedTuple):
    """The files of a repository at a commit, by name below the subfolder; those in the cache have a path, too."""

    commit: str
    files: dict[str, RemoteFile]
    cached: dict[str, Path]


def list_files(repo: str, access: Access, patience: Patience) -> Listing:
    """The files below the subfolder that `access` names; raises what open_source raises for a repository."""
    from huggingface_hub import constants

    check_endpoint(constants.ENDPOINT)
    listing = (
        _list_cache(repo, access) if constants.HF_HUB_OFFLINE else _list_hub(repo, access, patience)
    )
    subfolder = subfolder_of(access)
    folder = f"{subfolder}/" if subfolder else ""
    if folder and not any(name.startswith(folder) for name in listing.files):
        folders = {name.partition("/")[0] for name in listing.files if "/" in name}
        raise no_subfolder(f"{repo} at commit {listing.commit}", subfolder, folders)
    files, cached = (
        {
            name.removeprefix(folder): value
            for name, value in named.items()
            if name.startswith(folder)
        }
        for named in listing[1:]
    )
    renamed = {name: cast(RemoteFile, file)._replace(name=name) for name, file in files.items()}
    return Listing(listing.commit, renamed, cast(dict[str, Path], cached))


def _check_name(repo: str, name: str) -> None:
    """InputError for a name that would lead out of a folder it is copied to."""
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
        raise InputError(
            "file-name", detail, "Do not use this repository; take the checkpoint from its maker."
        )


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _list_hub(repo: str, access: Access, patience: Patience) -> Listing:
    """What the Hub lists, asked until it answers."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    no_reply = cast(
        type[Exception], HfHubHTTPError.__bases__[0]
    )  # of the HTTP library under this huggingface_hub
    api = HfApi(endpoint=constants.ENDPOINT, token=access.token)
    for failures in range(1, patience.tries + 1):
        try:
            info = api.model_info(
                repo,
                revision=access.revision or commit_begun(access.output, repo),
                files_metadata=True,
                timeout=patience.timeout_seconds,
            )
            break
        except HFValidationError:
            raise InputError(
                "no-source", f"{repo}: no such folder, and no name that the Hub knows"
            ) from None
        except HfHubHTTPError as error:
            if error.response.status_code not in PASSING:
                raise _refusal(
                    repo,
                    access,
                    error.response.status_code,
                    error.response.headers.get("X-Error-Code"),
                ) from None
            reason, seconds = (
                f"HTTP {error.response.status_code}",
                pause_of(error.response.headers.get),
            )
        except (no_reply, OSError) as error:
            reason, seconds = plain_words(error), None
        except NO_LIST:
            reason, seconds = (
                "its reply is no list of files; does a proxy or a login page answer instead?",
                None,
            )
        if failures == patience.tries:
            detail = f"{repo} cannot be listed by {host_of(constants.ENDPOINT)}: {failures} tries, the last: {reason}"
            raise SourceError("source-unreachable", detail, AGAIN)
        pause = max(patience.wait_seconds(failures), seconds or 0.0)
        if seconds is not None:
            access.tell(f"rate limited by the Hub: waiting {pause:.0f} s")
        time.sleep(pause)
    commit, files, cached = _known_commit(repo, info.sha), {}, {}
    for item in info.siblings or []:
        file = _file_of(repo, commit, item)
        if file is None:
            continue
        files[file.name] = file
        found = try_to_load_from_cache(repo, file.name, revision=commit)
        if (
            isinstance(found, str)
            and Path(found).resolve().name == file.oid
            and Path(found).stat().st_size == file.nbytes
        ):
            cached[file.name] = Path(found)
    return Listing(commit, files, cached)


def _known_commit(repo: str, found: object) -> str:
    if not isinstance(found, str) or not COMMIT.fullmatch(found):
        raise _no_list(repo, f"{str(found)[:60]!r} for a commit; expected 40 hex digits")
    return found


def _file_of(repo: str, commit: str, item: Any) -> RemoteFile | None:
    """What the Hub lists as one file; None for one that is hidden, or of which it does not say what it is."""
    from huggingface_hub import constants, hf_hub_url

    name, oid, nbytes = (
        item.rfilename,
        *((item.lfs.sha256, item.lfs.size) if item.lfs else (item.blob_id, item.size)),
    )
    if not isinstance(name, str):
        raise _no_list(repo, "a file without a name")
    _check_name(repo, name)
    if _is_hidden(name) or oid is None or nbytes is None:
        return None
    if (
        type(nbytes) is not int
        or not 0 <= nbytes < LARGEST
        or not isinstance(oid, str)
        or not BLOB.fullmatch(oid)
    ):
        raise _no_list(repo, f"{name!r} with size {str(nbytes)[:60]} and hash {str(oid)[:80]!r}")
    return RemoteFile(
        name,
        hf_hub_url(repo, name, revision=commit, endpoint=constants.ENDPOINT),
        nbytes,
        oid,
        commit,
    )


def _no_list(repo: str, found: str) -> SourceError:
    return SourceError(
        "bad-listing",
        f"{repo}: the Hub lists {found}",
        "See that HF_ENDPOINT is a Hub; run it again later.",
    )


def _refusal(repo: str, access: Access, status: int, code: str | None) -> Fp4Error:
    from huggingface_hub import constants

    if code == "RevisionNotFound":
        detail = f"{repo}: the Hub has no revision {access.revision!r} of it"
        return InputError(
            "no-revision", detail, "Give a branch, a tag or a commit: --revision REV."
        )
    if status == 404:
        return InputError(
            "no-source", f"{repo}: no such folder or file here, and no such repository on the Hub"
        )
    if status in (401, 403):
        return no_access(repo, f"{constants.ENDPOINT}/{repo}", status, code)
    return SourceError(
        "source-unreachable", f"{repo}: the Hub answers HTTP {status}", "Run it again later."
    )


def _list_cache(repo: str, access: Access) -> Listing:
    """What the cache holds of the revision; every blob there is named after its hash."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(repo, revision=access.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        detail = f"{repo} is not in the Hub's cache, and HF_HUB_OFFLINE keeps it from being fetched"
        raise SourceError(
            "offline", detail, "Unset HF_HUB_OFFLINE, or give a folder on this disk."
        ) from None
    cached = {
        path.relative_to(root).as_posix(): path
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    cached = {name: path for name, path in cached.items() if not _is_hidden(name)}
    if unnamed := [
        name for name, path in cached.items() if not BLOB.fullmatch(path.resolve().name)
    ]:
        detail = (
            f"{repo}: the Hub's cache holds {unnamed[0]} under no hash, so it cannot be checked"
        )
        raise SourceError("offline", detail, f"Give the folder itself: {root}.")
    files = {
        name: RemoteFile(name, "", path.stat().st_size, path.resolve().name, root.name)
        for name, path in cached.items()
    }
    return Listing(root.name, files, cached)
