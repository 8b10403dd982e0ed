"""Hashes of two streams side by side, against hashlib and the examples of FIPS 180."""

from __future__ import annotations

import hashlib
import random
import subprocess

import pytest
from paths import ROOT

from fp4convert.storage import disk, sha256
from fp4convert.storage.disk import open_regular
from fp4convert.storage.sha256 import Sha256, hash_each, update_both

EXAMPLES = {  # NIST: "Examples with Intermediate Values", SHAVS' shortest, FIPS 180-2's longest
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    ),
    bytes.fromhex("d3"): "28969cdfa74a12c82f3bad960b0b000aca2ac329deea5c2328ebc6f2ba9802c1",
    b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
}
MAIN = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int64_t sha256_lanes(void);
void sha256_blocks(uint32_t *, const uint8_t *, uint32_t *, const uint8_t *, int64_t);
int main(void) {
    static uint8_t a[64 * 9 + 1], b[64 * 9 + 1];
    uint32_t h[4][8];
    fread(h, 1, sizeof h, stdin), fread(a + 1, 1, 576, stdin), fread(b + 1, 1, 576, stdin);
    if (sha256_lanes() != 2) return 2;
    sha256_blocks(h[0], a + 1, h[1], b + 1, 9);
    sha256_blocks(h[2], a + 1, 0, 0, 9);
    sha256_blocks(h[3], b + 1, 0, 0, 9);
    return fwrite(h, 1, sizeof h, stdout) != sizeof h;
}
"""


@pytest.fixture
def chance() -> random.Random:
    if not sha256.has_lanes():
        pytest.skip("this processor has no instructions for SHA-256: hashlib does it all")
    return random.Random(180)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: f"{len(message)} bytes")
def test_examples_of_the_standard(chance: random.Random, message: bytes) -> None:
    one, other = Sha256(), Sha256()
    one.update(message)
    update_both(other, memoryview(message), Sha256(), memoryview(bytes(200)))
    assert one.hexdigest() == other.hexdigest() == EXAMPLES[message]


def test_two_streams_in_random_parts_are_hashlib_s(chance: random.Random) -> None:
    """Lengths and parts of any size, copies that part ways, data that is not aligned."""
    for _ in range(40):
        streams = [chance.randbytes(chance.choice((0, 5, 63, 64, 65, 900, 70_000))) for _ in "ab"]
        expected, digests = [hashlib.sha256() for _ in "ab"], [Sha256(), Sha256()]
        while any(streams):
            sizes = [chance.choice((1, 55, 64, 119, 128, 4_096)) for _ in "ab"]
            parts = [memoryview(data)[:size] for data, size in zip(streams, sizes, strict=True)]
            streams = [data[size:] for data, size in zip(streams, sizes, strict=True)]
            update_both(digests[0], parts[0], digests[1], parts[1])
            for known, part in zip(expected, parts, strict=True):
                known.update(part)
        assert [each.digest() for each in digests] == [known.digest() for known in expected]
        before = digests[0].copy()
        digests[0].update(b"more")
        assert before.digest() == expected[0].digest() != digests[0].digest()


@pytest.mark.system
def test_nine_blocks_on_arm64_are_hashlib_s(tmp_path) -> None:
    """By qemu; states are read and written as words of this machine."""
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    (tmp_path / "main.c").write_text(MAIN)
    sources = [tmp_path / "main.c", ROOT / "kernels/sha256.c"]
    command = [compiler, "-std=gnu11", "-O3", "-static", *sources]
    subprocess.run([*command, "-o", tmp_path / "run"], check=True)
    data = [random.Random(seed).randbytes(64 * 9) for seed in (1, 2)]
    begin = b"".join(word.to_bytes(4, "little") for word in sha256.BEGIN)
    ended = subprocess.run(
        [emulator, tmp_path / "run"],
        input=begin * 4 + b"".join(data),
        capture_output=True,
        check=True,
    )
    found = []
    for at in range(0, 128, 32):
        digest = Sha256()
        digest._nbytes = 64 * 9
        digest._state = sha256.np.frombuffer(ended.stdout[at : at + 32], "<u4").astype("u4")
        found.append(digest.digest())
    assert found == [hashlib.sha256(each).digest() for each in data * 2]


@pytest.mark.parametrize("has_lanes", [True, False])
def test_files_of_any_size_in_pairs(tmp_path, monkeypatch, has_lanes: bool) -> None:
    monkeypatch.setattr(disk, "HASH_NBYTES", 1 << 12)
    monkeypatch.setattr(sha256, "has_lanes", lambda: has_lanes and bool(sha256_lanes))
    sha256_lanes = sha256.cpu_library().sha256_lanes()
    sizes = {"a": 1, "b": 70_000, "empty": 0, "c": 4096, "d": 300_001}
    for name, nbytes in sizes.items():
        (tmp_path / name).write_bytes(random.Random(name).randbytes(nbytes))
    seen = dict.fromkeys(sizes, 0)

    def report(file: str, nbytes: int) -> None:
        seen[file] += nbytes

    names = [*sizes, "gone"]
    found = dict(hash_each(names, lambda file: open_regular(tmp_path / file), OSError, report))
    assert isinstance(found.pop("gone"), FileNotFoundError)
    assert found == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in sizes
    }
    assert seen == sizes
    with pytest.raises(FileNotFoundError):
        list(hash_each(["a", "gone"], lambda file: open_regular(tmp_path / file), ValueError))
