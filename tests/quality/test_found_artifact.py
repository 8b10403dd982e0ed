"""The tensor that `reproduce` names, in files that the package safetensors wrote."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from fp4convert.quality.found_artifact import first_difference

FIRST = {name: np.arange(16, dtype=np.float32).reshape(4, 4) for name in ("a", "b", "c")}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({}, None),
        ({"b": FIRST["b"] + 1, "c": FIRST["c"] + 1}, "b"),
        ({"c": FIRST["c"].reshape(2, 8)}, "c"),
        ({"a": FIRST["a"].astype(np.float16)}, "a"),
        ({"d": FIRST["a"]}, "d"),
    ],
)
def test_the_first_tensor_that_differs_is_named(other, named, tmp_path):
    save_file(FIRST, tmp_path / "made.safetensors")
    save_file({**FIRST, **other}, tmp_path / "there.safetensors")
    found = first_difference(tmp_path / "made.safetensors", tmp_path / "there.safetensors")
    assert found == named


def test_of_what_is_no_file_of_safetensors_none_is_named(tmp_path):
    save_file(FIRST, tmp_path / "made.safetensors")
    (tmp_path / "there.safetensors").write_bytes(b"short")
    for name in ("there.safetensors", "gone.safetensors", "."):
        assert first_difference(tmp_path / "made.safetensors", tmp_path / name) is None
