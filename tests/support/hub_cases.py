"""What tests of the Hub ask, and what they expect."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from checkpoints import FIRST, SECOND, Outcome, run
from fakehub import SIGNATURE, TOKEN, FakeHub

from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.hub.http import RemoteFile

NVFP4 = ("--format", "nvfp4", "--json")


def ask(*arguments: object) -> Outcome:
    """Run the command; neither the token nor what signs a link is printed, ever."""
    outcome = run(*arguments)
    assert TOKEN not in outcome.out + outcome.err
    assert SIGNATURE not in outcome.out + outcome.err
    return outcome


def expect(hub: FakeHub, folder: Path, out: Path) -> str:
    """The digest that org/m gives: that of its folder, but that our record names the repository and
    its newest commit.
    """
    assert run("quantize", folder, *NVFP4, "-o", out).code == 0
    record = json.loads((out / RECORD).read_text())
    assert record["source"] == {"repo": None, "revision": None}
    record["source"] = {"repo": "org/m", "revision": hub.repos["org/m"].branches["main"]}
    (out / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    files = [path for path in out.rglob("*") if path.is_file() and ".fp4convert" not in path.parts]
    undigested = {"README.md", "quantization_report.json"}
    names = sorted({path.relative_to(out).as_posix() for path in files} - undigested)
    lines = "".join(
        f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def remote_file(hub: FakeHub, name: str, repo: str = "org/m") -> RemoteFile:
    """A file of the newest commit of a repository, for a RangeReader."""
    commit = hub.repos[repo].branches["main"]
    file = hub.repos[repo].commits[commit][name]
    url = f"{hub.endpoint}/{repo}/resolve/{commit}/{name}"
    return RemoteFile(name, url, file.nbytes, file.oid, commit)


def damage(path: Path, at: int, bits: int = 1) -> None:
    """Flip bits of a byte of a file, or of the file that a link leads to."""
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.resolve().write_bytes(data)


def cached(hub, folder, tmp_path, names):
    """Download some files as the Hub's own client does; returns the cache."""
    from huggingface_hub import hf_hub_download

    hub.add("org/m", folder)
    for name in names:
        hf_hub_download("org/m", name, endpoint=hub.endpoint)
    hub.seen.clear()
    return tmp_path / "cache" / "models--org--m"


SIDECARS = ("model.safetensors.index.json", "config.json", "tokenizer.json", "notes.txt")
ALL_FILES = (FIRST, SECOND, *SIDECARS)
