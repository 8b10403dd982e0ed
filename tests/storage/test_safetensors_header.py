"""A header read: a file typed by hand, the safetensors package, one refusal per error code, and
differential tests.
"""

import json
import math
import struct

import numpy as np
import pytest
from checkpoints import pack_header, pack_shard
from headers import BITS, header_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from fp4convert.errors import InputError
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.safetensors import (
    Header,
    SafetensorsFrame,
    read_header,
    read_one_by_one,
    read_together,
)

SMALL = b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   \x01\x02'
U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def shard_of(entries: object, data: bytes = b"") -> bytes:
    return pack_header(json.dumps(entries).encode()) + data


def refusal(data: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        header_of(data)
    assert caught.value.message.startswith("x.safetensors")
    return caught.value


def test_a_small_file_typed_by_hand_is_read():
    header = header_of(SMALL)
    (ref,) = header.tensors
    assert (header.file, header.nbytes, header.frame) == ("x.safetensors", 66, SafetensorsFrame({}))
    assert tuple(ref) == ("a", "U8", (2,), "x.safetensors", 64)
    assert (ref.elements, ref.nbytes) == (2, 2)


def test_what_safetensors_writes_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "b": np.frombuffer(bytes(range(12)), np.float16).reshape(2, 3),
        "a": np.frombuffer(bytes(range(8)), np.int64).reshape(()),
        "c": np.zeros((0, 7), np.uint8),
    }
    save_file(tensors, path, {"format": "pt", "who": "é"})
    data = path.read_bytes()
    header = header_of(data)
    assert header.frame == SafetensorsFrame({"format": "pt", "who": "é"})
    assert contents(header, data) == {
        "b": ("F16", (2, 3), bytes(range(12))),
        "a": ("I64", (), bytes(range(8))),
        "c": ("U8", (0, 7), b""),
    }


def contents(header: Header, data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        ref.name: (ref.dtype, ref.shape, data[ref.start : ref.start + ref.nbytes])
        for ref in header.tensors
    }


REFUSALS = {
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "header-length": b"\xff" * 8 + b"{}",
    "header": pack_header(b"[1]"),
    "header-utf8": pack_header(b'{"\xff":1}'),
    "duplicate-key": pack_header(b'{"a":1,"a":2}'),
    "dtype": shard_of({"a": {**U8, "dtype": "Q7"}}, bytes(4)),
    "shape": shard_of({"a": {**U8, "shape": [5]}}, bytes(4)),
    "offset": shard_of({"a": {**U8, "data_offsets": [4, 0]}}, bytes(4)),
    "overlap": shard_of({"a": U8, "b": {**U8, "data_offsets": [2, 6]}}, bytes(6)),
    "hole": shard_of({"a": U8, "b": {**U8, "data_offsets": [5, 9]}}, bytes(9)),
    "truncated": shard_of({"a": U8}, bytes(3)),
    "trailing-bytes": shard_of({"a": U8}, bytes(5)),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_each_fault_has_its_code(code):
    error = refusal(REFUSALS[code])
    assert (error.code, error.exit_code) == (code, 2)


@pytest.mark.parametrize(
    "entry",
    [
        {**U8, "shape": [True, 4]},
        {**U8, "shape": [4.0]},
        {**U8, "shape": "4"},
        {**U8, "shape": [-4]},
        {**U8, "shape": [1 << 62, 1 << 62]},
        {**U8, "shape": [1 << 70, 0], "data_offsets": [0, 0]},
        {**U8, "shape": [1 << 32, 1 << 32, 0], "data_offsets": [0, 0]},
        {**U8, "data_offsets": [0]},
        {**U8, "data_offsets": [0, 4, 4]},
        {**U8, "data_offsets": [False, 4]},
        {**U8, "data_offsets": {"0": 4}},
        {**U8, "dtype": 8},
        {**U8, "dtype": ["U8"]},
        {"dtype": "U8", "shape": [4]},
        [1, 2, 3],
        None,
        "U8",
    ],
)
def test_entries_of_another_kind_are_refused(entry):
    refusal(shard_of({"a": entry}, bytes(4)))


@pytest.mark.parametrize(
    "shape", [[1 << 32, 1 << 32, 0], [1 << 32, 1 << 31, 0], [0, 1 << 62, 1 << 62], [1 << 61, 0]]
)
def test_sizes_overflow_from_the_left_as_safetensors_has_it(shape):
    data = shard_of({"a": {**U8, "shape": shape, "data_offsets": [0, 0]}}, b"")
    try:
        deserialize(data)
    except SafetensorError:
        assert refusal(data).code == "shape"
    else:
        read_header("x", len(data), lambda offset, length: data[offset : offset + length])


def test_a_header_of_the_largest_length_is_no_reason_to_read_it():
    """The length is judged before anything of that size is asked for."""
    asked = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return struct.pack("<Q", 100_000_001)[offset : offset + length]

    with pytest.raises(InputError, match="header length"):
        read_header("x", 1 << 40, read)
    assert max(asked) < 1024


def test_a_message_names_file_tensor_and_next_step():
    error = refusal(shard_of({"w": {**U8, "shape": [5]}}, bytes(4)))
    assert "'w'" in error.message
    assert "5 bytes" in error.message
    assert error.next_step


def test_json_objects_may_hold_the_constants_of_model_configs_where_asked():
    text = b'{"a": NaN, "b": -Infinity, "c": -1}'
    parsed = parse_json_object(text, "config.json", has_constants=True)
    assert math.isnan(parsed["a"])
    assert (parsed["b"], parsed["c"]) == (-math.inf, -1)
    with pytest.raises(InputError, match="NaN is not JSON"):
        parse_json_object(text, "header")


SOUND = {"a": ("U8", (2, 2), b"\1\2\3\4"), "b.weight": ("BF16", (1, 2), bytes(4))}
VALID = pack_shard({**SOUND, "c": ("F32", (), bytes(4))})
SNIPPETS = (
    *'{}[],:"\\014-. \n\0\x7fé',
    *("e9", "null", "true", "NaN", "-0", "01", "U8", "F4", "1e400", "18446744073709551616"),
    *("\\u0000", "\\ud800", '"a"', '"a":', '"shape"', '"shape":[4],'),
    *('"dtype":"U8",', '"x":{"y":[]},', '"__metadata__":{},', '"__metadata__":null,'),
)


@st.composite
def mutated(draw) -> bytes:
    """A sound file whose header text is cut, filled and repeated here and there; its length follows
    or does not.
    """
    length = struct.unpack("<Q", VALID[:8])[0]
    text = VALID[8 : 8 + length].rstrip()
    for _ in range(draw(st.integers(1, 3))):
        at, until = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        until = min(until, at + draw(st.integers(0, 6)))
        filled = draw(st.one_of(st.sampled_from(SNIPPETS).map(str.encode), st.binary(max_size=2)))
        text = text[:at] + filled + text[until:]
    lie = draw(st.sampled_from((0, 0, 0, 0, 1, -1)))
    header = pack_header(text, max(0, len(text) + lie))
    return header + VALID[8 + length :] + draw(st.sampled_from((b"", b"", b"\0")))


NUMBERS = st.one_of(
    st.integers(0, 5), st.sampled_from((-1, 1 << 32, 1 << 63, 1 << 64, 0.0, 2.5, None, "2", True))
)
DTYPES = st.sampled_from((*BITS, "u8", "F2", "", 8, None))


@st.composite
def described(draw) -> bytes:
    """Headers of entries that are nearly right."""
    entries, end = {}, 0
    known = st.sampled_from(("a", "b", "", "__metadata__", "\ud83d\ude00"))
    for name in draw(st.lists(known, max_size=3, unique=True)):
        dtype, shape = draw(DTYPES), draw(st.lists(NUMBERS, max_size=3))
        is_countable = dtype in BITS and all(
            type(number) is int and 0 <= number < 16 for number in shape
        )
        nbytes = math.prod(shape) * BITS[dtype] // 8 if is_countable else 4
        right = [end, end + nbytes]
        wrong = ([0, nbytes], [end + 1, end + nbytes], [end])
        offsets = draw(st.sampled_from((right, right, *wrong)))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        if draw(st.booleans()):
            entries[name][draw(st.sampled_from(("x", "Shape")))] = draw(NUMBERS)
        end += nbytes
    return shard_of(entries, bytes(draw(st.sampled_from((end, end, end + 1, max(0, end - 1))))))


def check_no_laxer_than_safetensors(data: bytes) -> None:
    try:
        foreign = {
            name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
            for name, entry in deserialize(data)
        }
    except Exception:
        foreign = None
    try:
        header = header_of(data)
    except InputError:
        return
    assert foreign is not None, "safetensors refuses it"
    assert contents(header, data) == foreign


@pytest.mark.parametrize("examples", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_what_safetensors_refuses_is_refused(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.one_of(mutated(), described()))
    @example(VALID)
    def check(data):
        check_no_laxer_than_safetensors(data)

    check()


@pytest.mark.parametrize(
    "extra",
    [
        b'"x":' + b"[" * 200 + b"]" * 200,
        b'"x":1e400',
        b'"x":-1e999',
        b'"x":"\x7f"',
        b'"x":"\t"',
        b'"x":"\\ud800"',
        b'"x":"\\ud800\\udc00"',
        b'"x":' + b"9" * 400,
        b'"x":0.0e0',
        b'"shape":[4]',
        b'"x":1,"x":1',
        b'"x":NaN',
        b'"x":"\\x"',
        b'"x":+1',
        b'"x":\x0b1',
    ],
)
def test_a_strange_key_beside_a_sound_entry(extra):
    """Whether safetensors minds it or not, nothing that it refuses is accepted here."""
    text = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],%s}}' % extra
    check_no_laxer_than_safetensors(pack_header(text) + bytes(4))


def check_both_roads_agree(data: bytes) -> bool:
    """What is read together is what is read one by one; True where it is read together at all."""
    text = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
    together = read_together("x", text, len(data))
    assert together is None or together == read_one_by_one("x", text, len(data))
    return together is not None


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, derandomize=True)
@given(st.one_of(mutated(), described()))
@example(VALID)
def test_entries_looked_at_together_and_one_by_one_are_the_same(data):
    check_both_roads_agree(data)


def test_what_safetensors_writes_is_looked_at_together(tmp_path):
    """Empty tensors stand before a full one at the same place,
    whatever the order of their names.
    """
    tensors = {
        "b": np.zeros((2, 3), np.float32),
        "a": np.zeros((0, 7), np.float32),
        "c": np.zeros((), np.uint8),
    }
    save_file(tensors, tmp_path / "x", {"format": "pt", "who": "\u00e9"})
    assert check_both_roads_agree((tmp_path / "x").read_bytes())
    empty = b'{"b":%s,"a":%s}' % (entry(b"[4]", 0, 4), entry(b"[0]", 0, 0))
    assert check_both_roads_agree(pack_header(empty) + bytes(4))
    spaced = b'{"b" : %s ,\n"a":%s}' % (entry(b"[4]", 4, 8), entry(b"[4]", 0, 4))
    assert check_both_roads_agree(pack_header(spaced) + bytes(8))


def entry(shape: bytes, begin: int, end: int) -> bytes:
    return b'{"dtype":"U8","shape":%s,"data_offsets":[%d,%d]}' % (shape, begin, end)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":%s,"a":%s}' % (entry(b"[4]", 0, 4), entry(b"[4]", 0, 4)),
        b'{"a" :%s,"a":%s,"b":%s}'
        % (entry(b"[9]", 0, 9), entry(b"[2]", 0, 2), entry(b"[2]", 2, 4)),
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"a":"1","a":"1"},"a":%s}' % entry(b"[4]", 0, 4),
        b'{"__metadata__":{},"__metadata__":{},"a":%s}' % entry(b"[4]", 0, 4),
        b'{"__metadata__":null,"a":%s}' % entry(b"[4]", 0, 4),
        b'{"__metadata__":{"a":1},"a":%s}' % entry(b"[4]", 0, 4),
        b'{"__metadata__":{"a":["b"]},"a":%s}' % entry(b"[4]", 0, 4),
        b'{"a":%s,"b":%s}' % (entry(b"{}", 0, 1), entry(b"[3]", 1, 4)),
        b'{"a\\ud800":%s}' % entry(b"[4]", 0, 4),
        b'{"a":%s}' % entry(b"[4,true]", 0, 4),
        b'{"a":%s}' % entry(b"[4.0]", 0, 4),
        b'{"a":%s}' % entry(b"[-4,-1]", 0, 4),
        b'{"a":%s,"b":%s}' % (entry(b"[-4]", 8, 4), entry(b"[8]", 0, 8)),
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}',
        b'{"a":%s,"b":%s}' % (entry(b"[9223372036854775808,0]", 0, 0), entry(b"[4]", 0, 4)),
        b'{"a":{"dtype":"F4","shape":[7],"data_offsets":[0,3]},"b":%s}' % entry(b"[1]", 3, 4),
        b'{"a":{"dtype":"U8","shape":"1111","data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":{"4":1},"data_offsets":[0,4]}}',
        b'{"a\\u0000":%s}' % entry(b"[4]", 0, 4),
        b'{"\xff":%s}' % entry(b"[4]", 0, 4),
        b'{"a":%s}}' % entry(b"[4]", 0, 4),
        b"{}",
    ],
)
def test_what_may_be_wrong_is_not_looked_at_together(text):
    assert not check_both_roads_agree(pack_header(text) + bytes(4))
