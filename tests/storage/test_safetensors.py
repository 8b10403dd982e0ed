"""The container laid out: bytes typed by hand, and the safetensors package that reads them."""

import json
import struct

import pytest
from headers import BITS, header_of
from safetensors import deserialize

from fp4convert.storage.safetensors import SafetensorsFrame, TensorSpec

LAID_OUT = (
    b'\x58\0\0\0\0\0\0\0{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}    '
)


def test_a_small_file_typed_by_hand_is_laid_out():
    head, (ref,) = SafetensorsFrame({}).lay_out("x.safetensors", [TensorSpec("b", "U8", (2,))], {})
    assert head == LAID_OUT
    assert (ref.name, ref.dtype, ref.shape, ref.file, ref.start) == (
        "b",
        "U8",
        (2,),
        "x.safetensors",
        96,
    )


def test_metadata_stand_first_and_names_are_utf8():
    head, _ = SafetensorsFrame({"who": "é"}).lay_out("x", [TensorSpec("é\x1b", "U8", (1,))], {})
    entry = '"é\\u001b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f'{{"__metadata__":{{"format":"pt","who":"é"}},{entry}}}'.encode()
    assert head[8:].rstrip(b" ") == text
    assert struct.unpack("<Q", head[:8])[0] == len(head) - 8


@pytest.mark.parametrize(
    ("metadata", "notes", "expected"),
    [
        ({}, {}, {"format": "pt"}),
        ({"format": "mlx"}, {}, {"format": "mlx"}),
        ({}, {"_quantization_metadata": "new"}, {"format": "pt", "_quantization_metadata": "new"}),
        ({"_quantization_metadata": "old", "who": "me"}, {}, {"format": "pt", "who": "me"}),
        (
            {"_quantization_metadata": "old"},
            {"_quantization_metadata": "new"},
            {"format": "pt", "_quantization_metadata": "new"},
        ),
    ],
)
def test_what_a_file_says_of_its_quantization_is_written_anew(metadata, notes, expected):
    head, _ = SafetensorsFrame(metadata).lay_out("x", [TensorSpec("a", "U8", (1,))], notes)
    assert json.loads(head[8:])["__metadata__"] == expected


def test_wide_types_stand_first_and_then_names_decide():
    names = {"c": "U8", "b": "F32", "a": "U8", "d": "F32", "e": "BF16"}
    specs = [TensorSpec(name, dtype, (1,)) for name, dtype in names.items()]
    head, refs = SafetensorsFrame({}).lay_out("x", specs, {})
    assert [ref.name for ref in refs] == ["b", "d", "e", "a", "c"]
    assert [ref.start - len(head) for ref in refs] == [0, 4, 8, 10, 11]
    assert SafetensorsFrame({}).lay_out("x", specs[::-1], {}) == (head, refs)


def test_what_is_laid_out_is_read_by_safetensors_and_aligned():
    specs = [
        TensorSpec(f"t{number}", dtype, (number % 3, 4))
        for number, dtype in enumerate(sorted(BITS) * 2)
    ]
    specs.append(TensorSpec("scalar", "F32", ()))
    head, refs = SafetensorsFrame({}).lay_out("x", specs, {})
    data = head + bytes(sum(ref.nbytes for ref in refs))
    foreign = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in deserialize(data)}
    assert foreign == {spec.name: (spec.dtype, spec.shape) for spec in specs}
    assert len(head) % 8 == 0
    for ref in refs:
        assert ref.start % max(1, BITS[ref.dtype] // 8) == 0
    assert [ref.start for ref in header_of(data).tensors] == [ref.start for ref in refs]
