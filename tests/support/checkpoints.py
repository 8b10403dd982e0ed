"""Checkpoints for tests, byte by byte, and the real command run on them.

Files are packed with json and struct and read back by the safetensors package: never by
fp4convert's own reader or writer.
"""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fakehub import SIGNATURE, TOKEN
from safetensors import deserialize

from fp4convert.cli.app import main

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype as safetensors names it, shape, little-endian bytes"""

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LAYER = "model.layers.0"
WAIT_SECONDS = 120.0  # that a command, or what one waits for, may take on a busy machine
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def bf16(*shape: int, seed: int = 0) -> bytes:
    """Normal values, cut down to bfloat16."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def weight(seed: int = 0, rows: int = 32, columns: int = 64) -> Tensor:
    return "BF16", (rows, columns), bf16(rows, columns, seed=seed)


def values_of(tensor: Tensor) -> np.ndarray:
    """The values of a BF16, F16 or F32 tensor as float64."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        wide = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype])
    return wide.astype(np.float64).reshape(shape)


def pack_shard(tensors: dict[str, Tensor], metadata: dict[str, object] | None = None) -> bytes:
    """One safetensors file; the tensors lie in the order given."""
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt"} if metadata is None else metadata
    }
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    return pack_header(json.dumps(entries).encode()) + b"".join(
        data for _, _, data in tensors.values()
    )


def pack_header(text: bytes, length: int | None = None) -> bytes:
    """The length of a header (or a lie), and its text."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def read_shard(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, as safetensors reads it."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(path.read_bytes())
    }


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every shard in a folder."""
    shards = [read_shard(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def write_checkpoint(
    folder: Path,
    shards: dict[str, dict[str, Tensor]],
    config: dict[str, object] | None = None,
    **files: bytes,
) -> Path:
    """A folder with these shards, an index where there are several, config.json, and more files;
    returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        (folder / file).write_bytes(pack_shard(tensors))
    if len(shards) > 1:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


def write_single(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None
) -> Path:
    return write_checkpoint(folder, {"model.safetensors": tensors}, config)


def llama_shards() -> dict[str, dict[str, Tensor]]:
    """A small llama in two shards; q_proj, k_proj and v_proj lie in both."""
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    first = {
        "model.embed_tokens.weight": weight(1, 96, 64),
        f"{attention}.q_proj.weight": weight(2),
        f"{attention}.k_proj.weight": weight(3, 16, 64),
        f"{attention}.q_proj.bias": ("BF16", (32,), bf16(32, seed=4)),
        f"{LAYER}.input_layernorm.weight": ("BF16", (64,), bf16(64, seed=5)),
    }
    second = {
        f"{attention}.v_proj.weight": weight(6, 16, 64),
        f"{attention}.o_proj.weight": weight(7),
        f"{mlp}.gate_proj.weight": weight(8, 128, 64),
        f"{mlp}.up_proj.weight": weight(9, 128, 64),
        f"{mlp}.down_proj.weight": weight(10, 64, 128),
        "lm_head.weight": weight(11, 96, 64),
    }
    return {FIRST: first, SECOND: second}


def write_llama(folder: Path, **files: bytes) -> Path:
    return write_checkpoint(folder, llama_shards(), None, **files)


def disk_nbytes(folder: Path) -> int:
    """The bytes that a disk has given to the files of a folder; some may vanish meanwhile."""
    nbytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            nbytes += path.stat().st_blocks * 512 if path.is_file() else 0
    return nbytes


def write_zeros(folder: Path, count: int = 8, rows: int = 4096, columns: int = 8192) -> Path:
    """A large checkpoint that takes no disk: `count` sparse shards with one matrix of zeros each;
    slow to convert.
    """
    folder.mkdir(parents=True)
    for number in range(count):
        entry = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * columns * 2]}
        with (folder / f"part-{number}.safetensors").open("wb") as out:
            out.write(pack_header(json.dumps({f"layers.{number}.o_proj.weight": entry}).encode()))
            out.truncate(out.tell() + rows * columns * 2)
    return folder


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The one document on stdout; NaN and Infinity are no JSON."""
        return json.loads(self.out, parse_constant=_refuse)

    @property
    def faults(self) -> list[dict]:
        """The findings, but that the class of a small model is not known."""
        return [one for one in self.json["findings"] if one["code"] != "class-unknown"]


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def unless_given(options: Sequence[object], *words: object) -> Sequence[object]:
    """Options of a test, after an option and its value where they do not have it."""
    return options if words[0] in options else (*words, *options)


def run(*arguments: object) -> Outcome:
    """Run the command in this process; an escaping exception is a bug of ours and fails the
    test.
    """
    out, err = io.StringIO(), io.StringIO()
    argv, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["fp4convert", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stopped:
        return _kept_secret(Outcome(int(stopped.code or 0), out.getvalue(), err.getvalue()))
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return _kept_secret(Outcome(0, out.getvalue(), err.getvalue()))


def done(*arguments: object) -> Outcome:
    """Run the command in this process; it has to succeed."""
    outcome = run(*arguments)
    assert outcome.code == 0, outcome
    return outcome


def _kept_secret(outcome: Outcome) -> Outcome:
    """The outcome of a command, which never prints the token or what signs a link."""
    for secret in (TOKEN, SIGNATURE):
        assert secret not in outcome.out + outcome.err
    return outcome


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the installed command as its own process."""
    command = [str(Path(sys.executable).with_name("fp4convert")), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_until(
    happened: Callable[[], object], process: subprocess.Popen[str] | None = None
) -> None:
    """Return as soon as it is so; fail where the process ends first, or after more than a busy
    machine takes.
    """
    ended = time.monotonic() + WAIT_SECONDS
    while not happened():
        if process is not None and process.poll() is not None:
            raise ChildProcessError(process.communicate())
        if time.monotonic() > ended:
            raise TimeoutError(f"it is not so after {WAIT_SECONDS} s")
        time.sleep(0.002)


def run_alone(*arguments: object, seconds: float = WAIT_SECONDS) -> Outcome:
    """Run the command as its own process, and fail where it hangs."""
    with start(*arguments) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return _kept_secret(Outcome(process.returncode, out, err))


def hidden_characters(text: str) -> list[str]:
    """Characters that could act on a terminal: control, bidi, surrogates, line separators; a
    newline is none of them.
    """
    return sorted(
        {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    )
