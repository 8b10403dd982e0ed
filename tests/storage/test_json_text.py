"""Small files of ours are the JSON that everybody writes with an indent of 2, whatever is nested in
them.
"""

from __future__ import annotations

import json

import pytest

from fp4convert.storage.json_text import as_text, pieces_of

DOCUMENTS = [
    *({}, [], 3, "x", None, True),
    {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}, "metadata": {"total_size": 5}},
    {
        "empty": {},
        "none": [],
        "nested": [1, [2, {"x": 'ü"\n,: '}], ()],
        "deep": {"er": {"tuple": (1, 2.5, None)}},
    },
    [{"a": 1}, {}, [], [[]], "b, c", float("nan")],
    {'a "quoted", name\t': {"ü": "\ud800"}, "": [[1, 2], 3]},
    {"numbers": {1: [2.5], 2: {3: None}}, "flags": {True: "yes"}},
]
ROWS = 2500  # more than are spelled together, twice
LONG = {
    "plain": list(range(ROWS)),
    "named": {f"model.{number}": number for number in range(ROWS)},
    "rows": [{"name": '},\n  {"', "number": number} for number in range(ROWS)],
    "some empty": [{}, *({"number": number} for number in range(ROWS))],
    "nested": tuple({"a": 1, "shape": [number]} for number in range(ROWS)),
    "in a tuple": tuple({"ü": number} for number in range(ROWS)),
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=repr)
def test_small_files_are_indented_as_json_does_it(document: object) -> None:
    assert as_text(document) == json.dumps(document, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, LONG, [LONG]], ids=lambda document: repr(document)[:40]
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_documents_are_printed_as_json_does_it(document: object, is_ascii: bool) -> None:
    expected = json.dumps(document, indent=2, ensure_ascii=is_ascii)
    assert "".join(pieces_of(document, is_ascii)) == expected


def test_a_long_document_is_never_there_at_once() -> None:
    pieces = [*pieces_of(LONG)]
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 4


def test_a_list_of_numbers_of_an_object_stands_in_a_line():
    document = {"tensors": [{"name": "a", "histogram": [1, 2, 3]}, {"name": "b"}], "none": []}
    text = "".join(pieces_of(document, is_short=True))
    assert json.loads(text) == document
    assert '\n      "histogram": [1, 2, 3]\n' in text
