"""What is fuzzed: readers of files that others give us, and what counts as a fault.

A target reads bytes as the program would.  Errors of ours that have an exit code of their own are
answers; anything else that is raised, more time or memory than a small input is worth, and a file
written where none belongs are faults.

Most inputs are a folder in one JSON document: {name: JSON, or text}.  Of a safetensors file it has
the header alone; its data are FILL.  `"command"` numbers one of the target's command lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from checkpoints import pack_header, run
from safetensors import SafetensorError, deserialize

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.conversion import dry_run
from fp4convert.errors import Fp4Error, InputError
from fp4convert.recipes.patterns import matches
from fp4convert.storage.checkpoint_files import check_index, choose_shards, read_index
from fp4convert.storage.gguf import block_names, read_coming_header
from fp4convert.storage.json_text import MISSHAPEN
from fp4convert.storage.safetensors import WEIGHT, read_header

CORPUS = Path(__file__).with_name("corpus")
SECONDS, NBYTES = 20, 6 << 30  # of a processor for one input; of the process
FILL = 0x38  # of every tensor: a finite number in every dtype
MOST_NBYTES = 1 << 20  # of a file that is made
PLAN, INDEX = ".fp4convert/plan.json", "model.safetensors.index.json"
QUANTIZE = "quantize m --format nvfp4 --dry-run"
LIMIT = "error[machine-limit]"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING = {  # what Python audits, and how many of its arguments are paths
    **dict.fromkeys(("open", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}


class SlowError(BaseException):
    """An input took too long; no handler of the program's takes it."""


def read_safetensors(data: bytes, place: Path) -> None:
    """What safetensors refuses is refused."""
    read_header("x", len(data), lambda offset, length: data[offset : offset + length])
    try:
        deserialize(data)
    except SafetensorError as error:
        raise AssertionError("safetensors refuses it") from error


def read_gguf(data: bytes, place: Path) -> None:
    header = read_coming_header(
        "x.gguf", len(data), lambda offset, length: data[offset : offset + length]
    )
    (place / "x.gguf").write_bytes(data)
    call("inspect", "x.gguf")
    call(*f"{QUANTIZE} --dialect gguf".replace(" m ", " x.gguf ").split())
    block_names(header.frame, [ref.name.removesuffix(WEIGHT) for ref in header.tensors])


def read_weight_map(data: bytes, place: Path) -> None:
    found = read_index(data)
    choose_shards(place, {*found.values(), "model-00001-of-00002.safetensors"}, found)
    check_index(dict.fromkeys(found, "model.safetensors"), found, INDEX)


def read_patterns(data: bytes, place: Path) -> None:
    """The first line is a pattern, the others are names."""
    pattern, *names = data.decode("utf-8", "replace").split("\n")
    for name in names:
        matches(pattern, name)


def read_recipe(data: bytes, place: Path) -> None:
    write_folder(place, json.loads((CORPUS / "source" / "llama.json").read_bytes()))
    (place / "r.toml").write_bytes(data)
    call("recipes", "r.toml")
    call("quantize", "m", "--format", "nvfp4", "--recipe", "r.toml", "--dry-run")


def read_statistics(data: bytes, place: Path) -> None:
    """Every number of a calibration, whatever it is called."""
    write_folder(place, folder_of(data))
    calibration = open_calibration(next(iter(sorted(place.glob("c.*"))), place))
    readers: list[Callable[[str], object]] = [
        *(calibration.amax, calibration.moments, calibration.mean_magnitudes),
        *(calibration.channel_amax, calibration.tokens_of, calibration.gram),
        *(calibration.experts, calibration.output_losses),
    ]
    _ = calibration.samples, calibration.tokens, calibration.unrouted, calibration.gram_widths()
    for module in {name.rpartition(".")[0] for name in calibration.refs}:
        for reader in readers:
            with contextlib.suppress(InputError):
                reader(module)


def folders(*lines: str) -> Callable[[bytes, Path], None]:
    """Make a target of command lines, which read a folder."""

    def read(data: bytes, place: Path) -> None:
        document = folder_of(data)
        number = document.pop("command", 0)
        write_folder(place, document)
        is_number = isinstance(number, int) and not isinstance(number, bool)
        call(*lines[number % len(lines) if is_number else 0].split())

    return read


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "safetensors": read_safetensors,
    "gguf": read_gguf,
    "index": read_weight_map,
    "patterns": read_patterns,
    # config.json, quantization_config and index of a source
    "source": folders(QUANTIZE, "analyze m", f"{QUANTIZE} --keep-packed", "inspect m"),
    # the same of an artifact, our record, our report
    "artifact": folders(
        *("inspect q --full", "inspect q --json", "verify q", "dequantize q -o out"),
        *("transcode q -o out --dialect modelopt", "inspect q --for vllm"),
    ),
    "record": folders("reproduce q/quantization_config.json --source m", "reproduce q --source m"),
    # plan.json, done records, ended.json
    "plan": folders("merge q", "inspect q", "quantize m --format nvfp4 -o q", "verify q"),
    "calibration": read_statistics,
    "calibrated": folders(
        *(f"{QUANTIZE} --calibration c.safetensors", f"{QUANTIZE} --calibration c.json"),
        f"{QUANTIZE} --activations 4 --input-scale c.json",
    ),
    "recipe": read_recipe,
    "scales": folders(f"{QUANTIZE} --global-scale g.json"),
    "adapter": folders(f"{QUANTIZE} --lora a", "inspect a"),
}


def folder_of(data: bytes) -> dict[str, Any]:
    """Return the document of a folder; a text is that of a config.json."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    text = data.decode("utf-8", "surrogateescape")
    return document if isinstance(document, dict) else {"m/config.json": text}


def write_folder(place: Path, document: dict[str, Any]) -> None:
    """Write the files of a document; those that no file system takes are left out."""
    for name, content in document.items():
        path = place / name.lstrip("/")
        if ".." in path.parts or path == place:
            continue
        if name.endswith(".safetensors") and isinstance(content, dict):
            data = _with_data(content)
        elif name.endswith(PLAN) and isinstance(content, dict):  # else nothing behind its hash
            kept = {key: value for key, value in content.items() if key != "sha256"}
            sha256 = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
            data = json.dumps({**kept, "sha256": sha256}).encode()
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            data = text.encode("utf-8", "surrogateescape" if text.isprintable() else "replace")
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _with_data(header: dict[str, Any]) -> bytes:
    """A safetensors file of that header, as long as its tensors want."""
    ends = [0]
    for entry in header.values():
        with contextlib.suppress(*MISSHAPEN):
            ends.append(min(MOST_NBYTES, int(entry["data_offsets"][1])))
    text = json.dumps(header, separators=(",", ":")).encode()  # as long as ours
    return pack_header(text + b" " * (-len(text) % 8)) + bytes([FILL]) * max(ends)


def call(*words: str) -> None:
    """Run a command; a bug of ours is raised by itself, the lack of memory is one, too."""
    ended = run(*words)
    assert ended.code in (0, 2, 3, 4, 5, 6), ended.err
    assert LIMIT not in ended.err, ended.err
    assert "Traceback" not in ended.err, ended.err


def check(name: str, data: bytes, scratch: Path) -> None:
    """Let a target read an input; raise what is a fault."""
    place = scratch / "place"
    if not place.is_dir() or os.listdir(place):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    before = os.listdir(scratch)
    _GUARD.watch(scratch)
    for clock in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(clock, _end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)  # it may wait, and machines are shared
    try:
        with contextlib.chdir(place):
            TARGETS[name](data, place)
    except Fp4Error as error:
        if error.exit_code == 1:
            raise
        json.dumps(error.as_json())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        changed = _GUARD.end()
    assert not changed, f"changed outside of its folder: {changed}"
    assert os.listdir(scratch) == before, "a file outside of its folder"


class _Guard:
    """Sees every file that Python opens for writing, makes, renames or removes.

    allowed  the folder in which that may be; None while nobody asks
    """

    def __init__(self) -> None:
        self.allowed: str | None = None
        self._changed: list[str] = []
        self._is_hooked = False
        self._temporary: str | None = None

    def watch(self, folder: Path) -> None:
        if not self._is_hooked:  # for good: nothing takes such a hook away
            sys.addaudithook(self._hear)
            self._is_hooked = True
        self._temporary, tempfile.tempdir = tempfile.tempdir, os.fspath(folder / "place")
        self.allowed, self._changed = os.path.abspath(folder) + os.sep, []

    def end(self) -> list[str]:
        self.allowed, tempfile.tempdir = None, self._temporary
        return self._changed

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.allowed is None or event not in CHANGING:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        paths = [one for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
        for path in paths[: CHANGING[event]]:
            place = os.path.abspath(os.fsdecode(path))
            if not place.startswith((self.allowed, "/dev/")) and "__pycache__" not in place:
                self._changed.append(place)


_GUARD = _Guard()


def _end(*_: object) -> NoReturn:
    raise SlowError(f"more than {SECONDS} s of a processor, or {10 * SECONDS} s")


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Nothing is asked of a network, and memory has an end."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
    resource.setrlimit(resource.RLIMIT_AS, (NBYTES, NBYTES))
    # How fast a machine is gets measured each time, and is no matter of what is read.
    rates = {"weights_per_second": lambda *_: 1e9, "hashed_bytes_per_second": lambda: 1e9}
    originals = {name: getattr(dry_run, name) for name in rates}
    vars(dry_run).update(rates)
    try:
        yield
    finally:
        vars(dry_run).update(originals)
