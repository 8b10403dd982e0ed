"""A repository on the Hub against a bare download of the same bytes: how fast it is hashed and
quantized, in what memory.

The Hub is tests/support/fakehub.py in a process of its own, on the loopback device, pinned to the
last core of this machine; where there are more than two, what is measured has the others.  The bare
download is one connection of http.client, read into one buffer, without a check.

The bound is what no reader here can go below: every core busy all the time with receiving, with the
SHA-256 of the source, with what the same conversion takes from a folder (which hashes what it
writes, too), and with what the server takes where it shares the cores.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants

from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access
from harness.checkpoints import HIDDEN, MLP, make_checkpoint
from harness.measure import BENCHMARKS, SUPPORT, machine, results, seconds, table, verdict
from harness.processes import COMMAND, cost_here, run

ROUNDS = 7
BOUND = (
    "The bound is the cores divided by the CPU-seconds. A bare stream takes only receiving of them"
    " (and serving, where it shares the cores); the bound without conversion is what SHA-256 of"
    " the source alone leaves, and above it no rule can come."
)
WORKERS, WORKER_ROUNDS = (2, 4, 8), 5
TWO = 2  # cores, which the server shares
GIGABYTES = 4
CHUNK_NBYTES = 1 << 20
SLOW = 20e6  # bytes a second that a busy storage gives a connection
SLOW_GIGABYTES = 1
MEMORY = 0.25  # GB: the largest scale group
REPOSITORY = "org/model"
GROUP_NBYTES = 2 * 2 * HIDDEN * MLP  # gate_proj and up_proj


def serve(folder: str, nbytes_per_second: float, is_copying: bool) -> None:
    """Be the Hub until standard input ends; the first line of output is the endpoint and the
    commit.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.path.append(str(SUPPORT))
    from fakehub import FakeHub

    hub = FakeHub()
    hub.nbytes_per_second = nbytes_per_second or None
    hub.is_copying = is_copying
    commit = hub.add(REPOSITORY, Path(folder))
    print(hub.endpoint, commit, flush=True)
    sys.stdin.read()
    hub.close()


@contextmanager
def hub_of(
    folder: Path, nbytes_per_second: float = 0, is_copying: bool = False
) -> Iterator[tuple[str, int]]:
    """Where a Hub of one repository resolves its files, while HF_ENDPOINT leads there; and the
    process that it is.
    """
    arguments = [str(folder), nbytes_per_second, is_copying]
    words = [sys.executable, "-m", "hub.beside_downloading", *map(json.dumps, arguments)]
    process = subprocess.Popen(
        words, cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes")
    endpoint, commit = process.stdout.readline().split()
    constants.ENDPOINT = endpoint
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    os.environ.update(HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(folder / ".cache"))
    try:
        yield f"{endpoint}/{REPOSITORY}/resolve/{commit}/", process.pid
    finally:
        process.stdin.close()
        process.wait()


def download(place: str, names: list[str]) -> None:
    """Every file through one connection, into one buffer."""
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    connection, host = None, ""
    for name in names:
        parts = urlsplit(place + name)
        asked = http.client.HTTPConnection(parts.netloc)
        asked.request("HEAD", parts.path)
        link = urlsplit(asked.getresponse().getheader("Location") or "")
        asked.close()
        if connection is None or host != link.netloc:
            connection, host = http.client.HTTPConnection(link.netloc), link.netloc
        connection.request("GET", f"{link.path}?{link.query}")
        reply = connection.getresponse()
        while reply.readinto(buffer):
            pass


def hash_alone(connections: int | None = None) -> None:
    """Every shard through the reader, which hashes it; nobody else wants it."""
    source = open_source(REPOSITORY, Access(connections=connections))
    for shard in source.checkpoint.shards:
        with source.stream(shard.file):
            pass
    source.stop()


def hash_through(connections: int) -> Callable[[], None]:
    return lambda: hash_alone(connections)


def words_of(output: Path, *options: object, source: object = REPOSITORY) -> list[str]:
    """The command that is measured, writing a new folder."""
    shutil.rmtree(output, ignore_errors=True)
    words = [
        COMMAND,
        "quantize",
        source,
        "--format",
        "nvfp4",
        "-o",
        output,
        "-q",
        "--json",
        "--device",
        "cpu",
        *options,
    ]
    return [str(word) for word in words]


def quantize(output: Path, *options: object) -> float:
    """The seconds that the command itself tells: from the opened repository to the last file."""
    words = words_of(output, *options)
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["seconds"])


def hash_bytes(nbytes: int) -> None:
    """SHA-256 of so many bytes in memory."""
    data, found = bytes(8 << 20), hashlib.sha256()
    for _ in range(nbytes // len(data)):
        found.update(data)


def processor_seconds(process: int) -> float:
    """What a living process has taken of processors."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _speed(source: Path, output: Path, is_copying: bool) -> list[str]:
    """Medians of rounds in which all take turns; of processor seconds the least."""
    names = sorted(path.name for path in source.glob("*.safetensors"))
    nbytes = sum((source / name).stat().st_size for name in names)
    all_cores = os.sched_getaffinity(0)
    own = all_cores if len(all_cores) <= TWO else all_cores - {max(all_cores)}
    folder = words_of(output, source=source)
    with hub_of(source, is_copying=is_copying) as (place, server):
        os.sched_setaffinity(0, own)
        rounds, parts = [], []
        for _ in range(ROUNDS + 1):
            shutil.rmtree(output, ignore_errors=True)
            local = run(folder).cpu_seconds
            begun = processor_seconds(server)
            bare = cost_here(lambda: download(place, names))
            serving = processor_seconds(server) - begun if own == all_cores else 0.0
            hashing = cost_here(lambda: hash_bytes(nbytes)).cpu_seconds
            rounds.append((bare.seconds, seconds(hash_alone), quantize(output)))
            parts.append((bare.cpu_seconds, hashing, local, serving))
        os.sched_setaffinity(0, all_cores)
    bare_s, hashed, quantized = zip(*rounds[1:], strict=True)
    least = [min(each) for each in zip(*parts[1:], strict=True)]
    receiving, hashing, converting, serving = least
    bound = (receiving + hashing + converting + serving) / len(own)
    unconverted = (receiving + hashing + serving) / len(own)
    rates = [
        f"{nbytes / statistics.median(each) / 1e9:.2f}" for each in (bare_s, hashed, quantized)
    ]
    to_bare = statistics.median(b / q for b, q in zip(bare_s, quantized, strict=True))
    to_hashed = statistics.median(h / q for h, q in zip(hashed, quantized, strict=True))
    to_bound = bound / statistics.median(quantized)
    costs = " + ".join(f"{each / nbytes * 1e9:.2f}" for each in least)
    return [
        "read and send" if is_copying else "sendfile",
        *rates,
        *(f"{to_bare:.2f}", verdict(to_bare, 0.5), f"{to_hashed:.2f}", verdict(to_hashed, 0.9)),
        *(
            costs,
            f"{nbytes / unconverted / 1e9:.2f}",
            f"{nbytes / bound / 1e9:.2f}",
            f"{to_bound:.2f}",
            verdict(to_bound, 0.9),
        ),
    ]


def _workers(source: Path, output: Path) -> list[list[str]]:
    """The same with more threads, taking turns."""
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    with hub_of(source):
        rounds = [
            [quantize(output, "--workers", count) for count in WORKERS]
            for _ in range(WORKER_ROUNDS)
        ]
    found = []
    columns = list(zip(*rounds, strict=True))
    for count, own in zip(WORKERS, columns, strict=True):
        ratio = statistics.median(few / more for few, more in zip(columns[0], own, strict=True))
        found.append([str(count), f"{nbytes / statistics.median(own) / 1e9:.2f}", f"{ratio:.2f}"])
    return found


def _connections(source: Path) -> list[list[str]]:
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    rates: dict[int | None, float] = {}
    with hub_of(source, SLOW):
        for connections in (1, 2, 4, 8, None):
            rates[connections] = nbytes / seconds(hash_through(connections)) / 1e6
    bars = {8: 6, None: 12}  # as many as it takes: it begins with 8
    return [
        [
            str(count or "default"),
            f"{rate:.0f}",
            f"{rate / rates[1]:.1f}",
            verdict(rate / rates[1], bars[count]) if count in bars else "",
        ]
        for count, rate in rates.items()
    ]


def _memory(source: Path, output: Path) -> list[list[str]]:
    bar = 250 + GROUP_NBYTES / 1e6
    rows = []
    for options in (("--memory", MEMORY), ()):
        with hub_of(source):
            done = run(words_of(output, *options), is_watched=True)
        anonymous, peak = done.anonymous_nbytes / 1e6, done.peak_nbytes / 1e6
        judged = (
            verdict(peak, round(bar), is_floor=False) if options == ("--memory", MEMORY) else ""
        )
        rows.append(
            [" ".join(map(str, options)) or "default", f"{anonymous:.0f}", f"{peak:.0f}", judged]
        )
    return rows


def report() -> str:
    scratch = Path(tempfile.mkdtemp(prefix="fp4convert-bench-"))
    source, small, output = scratch / "source", scratch / "small", scratch / "output"
    try:
        make_checkpoint(source, GIGABYTES)
        make_checkpoint(small, SLOW_GIGABYTES)
        speeds = [_speed(source, output, is_copying) for is_copying in (False, True)]
        workers = _workers(source, output)
        slow, memory = _connections(small), _memory(source, output)
    finally:
        shutil.rmtree(scratch)
    headings = [
        "the server's way",
        "bare GB/s",
        "hash GB/s",
        "quantize GB/s",
        "to bare",
        "bar",
        "to hash",
        "bar",
        "CPU-s a GB: receive + SHA-256 + convert + serve",
        "bound without conversion GB/s",
        "bound GB/s",
        "to the bound",
        "bar",
    ]
    text = f"## {GIGABYTES} GB over loopback\n\n{table(headings, speeds)}\n\n{BOUND}\n"
    text += (
        f"\n## 20 MB/s a connection\n\n{table(['connections', 'MB/s', 'times one', 'bar'], slow)}\n"
    )
    more = table(["--workers", "GB/s", "times 2"], workers)
    text += f"\n## Workers, {GIGABYTES} GB\n\n{more}\n"
    memories = table(
        ["options", "peak RssAnon MB", "VmHWM MB", "bar: 250 MB + the largest scale group"], memory
    )
    return f"{text}\n## Memory, {GIGABYTES} GB\n\n{memories}\n"


def main(arguments: list[str]) -> int:
    """Write hub.md."""
    argparse.ArgumentParser(
        prog="bench.py hub", description="Measure conversions from a Hub."
    ).parse_args(arguments)
    head = f"# From the Hub\n\n{machine()}. Repeat with `python benchmarks/bench.py hub`.\n\n"
    page = head + report()
    results("hub", "md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    serve(*map(json.loads, sys.argv[1:]))
