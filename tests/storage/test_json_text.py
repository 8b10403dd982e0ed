"""Small files of ours are the JSON that everybody writes with an indent of 2, whatever is nested in
them.
"""

from __future__ import annotations

import json

import pytest

from fp4convert.storage.json_text import as_text

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
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=repr)
def test_small_files_are_indented_as_json_does_it(document: object) -> None:
    assert as_text(document) == json.dumps(document, indent=2, ensure_ascii=False) + "\n"
