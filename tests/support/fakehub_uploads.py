"""What huggingface_hub asks of a Hub when it uploads: repositories made, large files stored,
commits with a parent.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import tempfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fakehub import LFS_NBYTES, TOKEN, FakeHub, File, Hub, Repo, Storage, read_file

OWNED = "me"  # the namespace that the token may write to
Reply = tuple[int, object, dict[str, str]]
FORBIDDEN: Reply = (
    403,
    {"error": "You don't have the rights"},
    {"X-Error-Message": "You don't have the rights"},
)


class UploadHub(FakeHub):
    """A fake Hub that can also be written to.

    card_errors    what it finds wrong with every model card
    takes_unsent   large files count as stored: they came by another way
    keeps_bytes    of large files; else their hashes are all that it has, and nothing can be read
    """

    def __init__(self) -> None:
        super().__init__()
        self.card_errors: list[str] = []
        self.takes_unsent = False
        self.keeps_bytes = True
        self._folder = tempfile.TemporaryDirectory()
        self.stored: dict[str, Path] = {}

    def handlers(self) -> tuple[type[BaseHTTPRequestHandler], type[BaseHTTPRequestHandler]]:
        return _UploadHub, _UploadStorage

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def keep(self, data: bytes) -> Path:
        """The bytes in a file of their own."""
        path = Path(self._folder.name) / hashlib.sha256(data).hexdigest()
        path.write_bytes(data)
        return path

    def head(self, name: str) -> dict[str, File]:
        """The files of a repository's newest commit."""
        repo = self.repos[name]
        return repo.commits[repo.branches["main"]]

    def read(self, name: str) -> dict[str, bytes]:
        """Their bytes."""
        return {path: file.path.read_bytes() for path, file in self.head(name).items()}

    def create(self, name: str, is_private: bool = False) -> None:
        """A new repository, which holds what every new one does."""
        self.repos[name] = Repo({}, {}, False, is_private)
        self.repos[name].commit(
            {".gitattributes": read_file(self.keep(b"*.safetensors filter=lfs\n"))}
        )


class _Writing:
    """Requests with a body; an effect may come without its reply."""

    fake: UploadHub

    def reply_to(self, body: bytes) -> Reply:
        raise NotImplementedError

    def handle_body(self) -> None:
        body = self._body()
        if self.is_broken() or self._is_cut("cut-before"):
            return None
        if stalled := self.fake.take(self, ("stall",)):
            self.fake.rest(stalled.seconds)
        status, document, headers = self.reply_to(body)
        if not self._is_cut("cut-after"):
            self.answer(status, json.dumps(document).encode(), headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while count := int(self.rfile.readline(), 16):
            body += self.rfile.read(count)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _is_cut(self, kind: str) -> bool:
        if self.fake.take(self, (kind,)) is None:
            return False
        self.note(0)
        self.close_connection = True
        return True


class _UploadHub(_Writing, Hub):
    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check/write", path):
            return None if self.is_broken() else self._check_access(match[1])
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/xet-write-token/main", path):
            token = {"casUrl": self.fake.chunks, "accessToken": "x", "exp": 1 << 40}
            return None if self.is_broken() else self.answer(200, json.dumps(token).encode())
        return super().do_GET()

    def do_POST(self) -> None:  # noqa: N802
        return super().do_POST() if "/paths-info/" in self.path else self.handle_body()

    def _check_access(self, name: str) -> None:
        repo = self.fake.repos.get(name)
        if self.refuse(repo, is_file=False) or repo is None:
            return None
        if self._may_write(name):
            return self.answer(200, b"{}")
        code = {"X-Error-Code": "GatedRepo"} if repo.is_gated else {}
        return self.answer(403, b"{}", {**code, **FORBIDDEN[2]})

    def _may_write(self, name: str) -> bool:
        return (
            self.headers.get("Authorization") == f"Bearer {TOKEN}"
            and name.partition("/")[0] == OWNED
        )

    def reply_to(self, body: bytes) -> Reply:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            errors = [{"message": message} for message in self.fake.card_errors]
            return (
                (400 if errors else 200),
                {"errors": errors, "warnings": [{"message": "\x1b[31m"}]},
                {},
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)", path):
            return self._write(match[1], match[2], body)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path):
            return self._write(match[1], match[2], body)
        return 404, {}, {}

    def _create(self, asked: dict) -> Reply:
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.fake.endpoint}/{name}"}
        if not self._may_write(name):
            return FORBIDDEN
        if name in self.fake.repos:
            return 409, {**url, "error": "You already created this model repo"}, {}
        self.fake.create(name, asked.get("visibility") == "private")
        return 200, url, {}

    def _write(self, name: str, what: str, body: bytes) -> Reply:
        if name not in self.fake.repos:
            return 404, {}, {"X-Error-Code": "RepoNotFound"}
        if not self._may_write(name):
            return FORBIDDEN
        if what == "commit":
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        return {"preupload": self._modes, "batch": self._batch, "verify": self._verify}[what](
            name, json.loads(body)
        )

    def _modes(self, name: str, asked: dict) -> Reply:
        head = self.fake.head(name)
        ignored = asked.get("gitIgnore")
        if ignored is None:
            ignored = head[".gitignore"].path.read_text() if ".gitignore" in head else ""
        files = []
        for file in asked["files"]:
            is_large = file["size"] >= LFS_NBYTES or file["path"].endswith(".safetensors")
            known = {"oid": head[file["path"]].oid} if file["path"] in head else {}
            is_ignored = any(fnmatch.fnmatch(file["path"], pattern) for pattern in ignored.split())
            mode = {"uploadMode": "lfs" if is_large else "regular", "shouldIgnore": is_ignored}
            files.append({"path": file["path"], **mode, **known})
        return 200, {"files": files}, {}

    def _batch(self, name: str, asked: dict) -> Reply:
        objects = []
        for entry in asked["objects"]:
            actions = {
                "upload": {"href": self.fake.sign(f"/upload/{entry['oid']}")},
                "verify": {"href": f"{self.fake.endpoint}/{name}.git/info/lfs/objects/verify"},
            }
            objects.append(
                {**entry, **({} if entry["oid"] in self.fake.stored else {"actions": actions})}
            )
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _verify(self, name: str, asked: dict) -> Reply:
        return (200 if asked["oid"] in self.fake.stored else 404), {}, {}

    def _commit(self, name: str, lines: list[dict]) -> Reply:
        repo = self.fake.repos[name]
        files = dict(self.fake.head(name))
        parent = lines[0]["value"].get("parentCommit")
        if parent not in (None, repo.branches["main"]):
            return (
                412,
                {"error": "A commit has happened since"},
                {"X-Error-Message": "A commit has happened since"},
            )
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = read_file(self.fake.keep(base64.b64decode(value["content"])))
            elif line["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    return 404, {}, {"X-Error-Code": "EntryNotFound"}
            elif value["oid"] in self.fake.stored:
                files[value["path"]] = File(
                    self.fake.stored[value["oid"]], value["size"], value["oid"]
                )
            elif self.fake.takes_unsent:
                files[value["path"]] = File(Path(), value["size"], value["oid"])
            else:
                return (
                    400,
                    {"error": "an object is missing"},
                    {"X-Error-Message": "an object is missing"},
                )
        commit = repo.commit(files)
        return (
            200,
            {"commitUrl": f"{self.fake.endpoint}/{name}/commit/{commit}", "commitOid": commit},
            {},
        )


class _UploadStorage(_Writing, Storage):
    def do_PUT(self) -> None:  # noqa: N802
        self.handle_body()

    def reply_to(self, body: bytes) -> Reply:
        parts = urlsplit(self.path)
        if not self.fake.is_valid(parts.query):
            return 403, "Request has expired", {}
        oid = parts.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, "BadDigest", {}
        self.fake.stored[oid] = self.fake.keep(body) if self.fake.keeps_bytes else Path()
        return 200, "", {}
