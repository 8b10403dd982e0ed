"""A Hub on the loopback device: what huggingface_hub and range readers ask of one, with faults on
request.

Two servers of different origin: the hub lists and resolves, the storage holds large files behind
signed links.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_NBYTES = 1 << 10  # files from this size on lie in the storage; the real limit is larger
TOKEN = "hf_granted"
SIGNATURE = "Signature=SECRET"
CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file of a commit; oid as the Hub knows it, path where its bytes are."""

    path: Path
    nbytes: int
    oid: str

    @property
    def is_large(self) -> bool:
        return len(self.oid) == 64


@dataclass(slots=True)
class Repo:
    """Commits by their 40 digits, and where branches stand."""

    commits: dict[str, dict[str, File]]
    branches: dict[str, str]
    is_gated: bool
    is_private: bool

    def commit(self, files: dict[str, File]) -> str:
        """Put a commit of exactly these files on the main branch."""
        listed = json.dumps([[path, file.oid] for path, file in files.items()])
        commit = hashlib.sha1(f"{len(self.commits)}{listed}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches["main"] = commit
        return commit


@dataclass(slots=True)
class Fault:
    """What goes wrong at some requests.

    kind    status, drop, stall, trickle (a byte every `seconds`: of a body, or of the head of a
            reply to HEAD), flip, ignore-range, etag, gzip, or commit, size, oid: lies of the
            hub; of what is sent
            to it, also cut-before and cut-after: no reply, and it had no effect or had it
    where   hub or storage
    match   an expression for the path and the range that are asked for
    times   at how many requests
    after   requests that pass before
    """

    kind: str
    where: str = "storage"
    match: str = ""
    method: str = "GET"
    times: int = 1
    after: int = 0
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    at: int = 1000  # byte of the reply
    is_reset: bool = False
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One request."""

    where: str
    method: str
    path: str
    range: str | None
    token: str | None
    nbytes: int
    at: float


class FakeHub:
    """Both servers, as long as it is open."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.link_uses: int | None = None  # requests that a signed link serves before it expires
        self.nbytes_per_second: float | None = None  # of a connection
        self.is_copying = False  # send what was read, not the file itself
        self.xet_names: dict[str, str] = {}  # oid -> name in the chunk storage
        self.chunks = ""  # folder of that storage
        self.lock = threading.Lock()
        self._released = threading.Event()
        self.signed: dict[str, int] = {}
        self._hub, self._storage = (self._serve(handler) for handler in self.handlers())
        self.endpoint = f"http://127.0.0.1:{self._hub.server_address[1]}"
        self.storage = f"http://localhost:{self._storage.server_address[1]}"

    def handlers(self) -> tuple[type[BaseHTTPRequestHandler], type[BaseHTTPRequestHandler]]:
        """What the hub and the storage answer."""
        return Hub, Storage

    def _serve(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"fake": self}))
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return server

    def rest(self, seconds: float) -> None:
        """Say nothing for so long, at most until `release`."""
        self._released.wait(seconds)

    def release(self) -> None:
        """Let go of everybody who rests."""
        self._released.set()

    def close(self) -> None:
        self.release()
        for server in (self._hub, self._storage):
            server.shutdown()
            server.server_close()

    def add(self, name: str, folder: Path, is_gated: bool = False, is_private: bool = False) -> str:
        """Commit all files of a folder to the main branch of a repository; returns the commit."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): read_file(path) for path in paths}
        return self.repos.setdefault(name, Repo({}, {}, is_gated, is_private)).commit(files)

    def fault(self, kind: str, **options: object) -> Fault:
        fault = Fault(kind, **options)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def take(self, handler: _Handler, kinds: tuple[str, ...]) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                is_here = (fault.where, fault.method) == (
                    handler.where,
                    handler.command,
                ) and fault.kind in kinds
                if (
                    is_here
                    and fault.times > 0
                    and re.search(fault.match, f"{handler.path} {handler.headers.get('Range', '')}")
                ):
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def sign(self, path: str) -> str:
        with self.lock:
            number = len(self.signed)
            self.signed[str(number)] = self.link_uses if self.link_uses is not None else 1 << 30
        return f"{self.storage}{path}?Expires={number}&{SIGNATURE}"

    def is_valid(self, query: str) -> bool:
        number = parse_qs(query).get("Expires", [""])[0]
        with self.lock:
            self.signed[number] = self.signed.get(number, 0) - 1
            return self.signed[number] >= 0

    def sent_nbytes(self) -> int:
        return sum(seen.nbytes for seen in self.seen)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what the tests are for."""


def _path_info(path: str, file: File) -> dict[str, object]:
    large = (
        {"lfs": {"oid": file.oid, "size": file.nbytes, "pointerSize": 134}} if file.is_large else {}
    )
    return {
        "type": "file",
        "path": path,
        "size": file.nbytes,
        "oid": "0" * 40 if file.is_large else file.oid,
        **large,
    }


def read_file(path: Path) -> File:
    nbytes = path.stat().st_size
    if nbytes >= LFS_NBYTES:
        return File(path, nbytes, _sha256(path))
    return File(path, nbytes, hashlib.sha1(b"blob %d\0" % nbytes + path.read_bytes()).hexdigest())


def _sha256(path: Path) -> str:
    if path.stat().st_blocks * 512 < path.stat().st_size // 2:  # sparse: nobody reads it whole
        return hashlib.sha256(str(path).encode()).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeHub
    where = ""

    def log_message(self, *arguments: object) -> None:
        pass

    def note(self, nbytes: int) -> None:
        token = self.headers.get("Authorization")
        with self.fake.lock:
            self.fake.seen.append(
                Seen(
                    self.where,
                    self.command,
                    self.path,
                    self.headers.get("Range"),
                    token,
                    nbytes,
                    time.monotonic(),
                )
            )

    def is_broken(self) -> bool:
        kinds = ("status", "trickle") if self.command == "HEAD" else ("status",)
        fault = self.fake.take(self, kinds)
        if fault is not None and fault.kind == "trickle":
            self.trickle(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 60_000, fault.seconds)
        elif fault is not None:
            self.answer(fault.status, fault.body, fault.headers)
        return fault is not None

    def trickle(self, data: bytes, seconds: float) -> None:
        """Send byte after byte, and wait after each."""
        for at in range(len(data)):
            self.wfile.write(data[at : at + 1])
            self.fake.rest(seconds)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.note(len(body))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, file: File, headers: dict[str, str]) -> None:
        """The file or a range of it, with whatever goes wrong."""
        fault = self.fake.take(
            self, ("drop", "stall", "trickle", "flip", "ignore-range", "etag", "gzip")
        )
        kind = fault.kind if fault else ""
        start, stop, status = 0, file.nbytes, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked and kind != "ignore-range":
            start, stop, status = int(asked[1]), min(int(asked[2]) + 1, file.nbytes), 206
            if start >= file.nbytes:
                return self.answer(416)
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{file.nbytes}"}
        if kind == "gzip":
            headers = {**headers, "Content-Encoding": "gzip"}
        etag = "another" if kind == "etag" else file.oid
        self.note(0 if self.command == "HEAD" else stop - start)
        self.send_response(status)
        for name, value in {
            "Content-Length": str(stop - start),
            "ETag": f'"{etag}"',
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_range(file.path, start, stop, fault)

    def _send_range(self, path: Path, start: int, stop: int, fault: Fault | None) -> None:
        if fault and fault.kind in ("drop", "stall"):
            stop = min(stop, start + fault.at)
        with path.open("rb") as stream:
            began = time.monotonic()
            if fault and fault.kind == "trickle":
                stream.seek(start)
                return self.trickle(stream.read(stop - start), fault.seconds)
            if not (fault or self.fake.nbytes_per_second or self.fake.is_copying):
                return self._send_whole(stream.fileno(), start, stop)
            for at in range(start, stop, CHUNK_NBYTES):
                stream.seek(at)
                data = stream.read(min(CHUNK_NBYTES, stop - at))
                if fault and fault.kind == "flip" and at <= start + fault.at < at + len(data):
                    damaged = bytearray(data)
                    damaged[start + fault.at - at] ^= 1
                    data = bytes(damaged)
                self.wfile.write(data)
                if self.fake.nbytes_per_second:
                    self.fake.rest(
                        max(
                            0.0,
                            began + (at - start) / self.fake.nbytes_per_second - time.monotonic(),
                        )
                    )
        if fault and fault.kind in ("drop", "stall"):
            self.wfile.flush()
            self.fake.rest(fault.seconds if fault.kind == "stall" else 0)
            if fault.is_reset:
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            self.close_connection = True
            os.close(self.connection.detach()) if fault.is_reset else self.connection.shutdown(
                socket.SHUT_RDWR
            )

    def _send_whole(self, file: int, start: int, stop: int) -> None:
        """A range of an open file, copied by the system alone: benchmarks measure the client."""
        while start < stop:
            count = os.sendfile(self.connection.fileno(), file, start, stop - start)
            if not count:
                return
            start += count


class Hub(_Handler):
    where = "hub"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.is_broken():
            return None
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._list(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path, re.DOTALL):
            return self._resolve(match[1], match[2], match[3])
        return self.answer(404)

    def do_POST(self) -> None:
        """What a commit holds at some paths; pull-through mirrors ask so."""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        match = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", unquote(urlsplit(self.path).path)
        )
        repo = self.fake.repos.get(match[1]) if match else None
        if match is None or self.refuse(repo, is_file=False) or repo is None:
            return None if match else self.answer(404)
        files = repo.commits.get(repo.branches.get(match[2], match[2]), {})
        listed = [_path_info(path, files[path]) for path in asked.get("paths", []) if path in files]
        return self.answer(200, json.dumps(listed).encode())

    def refuse(self, repo: Repo | None, is_file: bool) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            self.answer(
                401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}
            )
        elif repo is None or (repo.is_private and not token):
            self.answer(
                404 if token else 401,
                b"{}",
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
            )
        elif is_file and repo.is_gated and not token:
            self.answer(
                401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
        else:
            return False
        return True

    def _list(self, name: str, revision: str) -> None:
        repo = self.fake.repos.get(name)
        if self.refuse(repo, is_file=False) or repo is None:
            return None
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self.answer(
                404,
                b"{}",
                {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"},
            )
        siblings = []
        for path, file in repo.commits[commit].items():
            large = (
                {"lfs": {"sha256": file.oid, "size": file.nbytes, "pointerSize": 134}}
                if file.is_large
                else {}
            )
            blob = "0" * 40 if file.is_large else file.oid
            siblings.append({"rfilename": path, "size": file.nbytes, "blobId": blob, **large})
        names = {"_id": "1", "id": name, "modelId": name, "tags": [], "private": repo.is_private}
        body = {**names, "sha": commit, "siblings": siblings}
        return self.answer(200, json.dumps(body).encode())

    def _resolve(self, name: str, commit: str, path: str) -> None:
        repo = self.fake.repos.get(name)
        if self.refuse(repo, is_file=True) or repo is None:
            return None
        commit = repo.branches.get(commit, commit)
        file = repo.commits.get(commit, {}).get(path)
        if file is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        lie = self.fake.take(self, ("commit", "size", "oid"))
        headers = {"X-Repo-Commit": "f" * 40 if lie and lie.kind == "commit" else commit}
        if not file.is_large:
            return self.send_file(file, headers)
        headers["X-Linked-Size"] = str(file.nbytes + (1 if lie and lie.kind == "size" else 0))
        headers["X-Linked-ETag"] = f'"{"f" * 64 if lie and lie.kind == "oid" else file.oid}"'
        if file.oid in self.fake.xet_names:
            headers["X-Xet-Hash"] = self.fake.xet_names[file.oid]
        return self.answer(
            302, b"", {**headers, "Location": self.fake.sign(f"/{name}/{commit}/{path}")}
        )


class Storage(_Handler):
    where = "storage"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if self.is_broken():
            return None
        if not self.fake.is_valid(parts.query):
            return self.answer(403, b"Request has expired")
        organisation, name, commit, path = unquote(parts.path).strip("/").split("/", 3)
        return self.send_file(self.fake.repos[f"{organisation}/{name}"].commits[commit][path], {})
